//! What can rest, and the bounded table of what does.

use super::rest::Rest;
use super::tracked::Tracked;
use crate::model::{Fingerprint, GroupName, KeyId, ModelName, ProviderName};
use crate::store::StoreTime;

/// Secrets of one key whose own rests are remembered at once; a rotation needs two.
const FINGERPRINTS: usize = 4;
/// Scoped rests that a provider has before no more are kept for models with a name: callers make those up.
/// Rests of all models, and of requests that name none, are as many as the configuration, or the provider's
/// own names for its accounts, make them; they are always kept.
const SCOPED: usize = 1024;
/// At the bound, so many rests are looked at for one that may go.
const SAMPLE: usize = 8;

/// What a rest is about. Where a secret matters it is part of the subject: evidence about one secret
/// touches nothing of another's.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Subject {
    /// A key with this secret.
    Key(KeyId, Fingerprint),
    /// A key with this secret, for one model, or for requests of which none is known.
    KeyModel(KeyId, Fingerprint, Option<ModelName>),
    /// All keys of a group.
    Group(GroupName),
    /// The same, for one model, or for requests of which none is known.
    GroupModel(GroupName, Option<ModelName>),
    /// All keys of the provider, for one model, or for requests of which none is known.
    ProviderModel(Option<ModelName>),
}

impl Subject {
    /// Every subject whose rest stops a request with this key.
    pub fn bearing<'a>(
        key: &'a KeyId,
        fingerprint: Fingerprint,
        group: Option<&'a GroupName>,
        model: Option<&'a ModelName>,
    ) -> impl Iterator<Item = Self> + use<'a> {
        [
            Some(Self::Key(key.clone(), fingerprint)),
            group.map(|group| Self::Group(group.clone())),
            Some(Self::KeyModel(key.clone(), fingerprint, model.cloned())),
            group.map(|group| Self::GroupModel(group.clone(), model.cloned())),
            Some(Self::ProviderModel(model.cloned())),
        ]
        .into_iter()
        .flatten()
    }

    /// Whether it is the key itself, and so the source of the key's status.
    pub fn is_own(&self) -> bool {
        matches!(self, Self::Key(..))
    }

    /// Whether a caller chose its name.
    fn names_model(&self) -> bool {
        match self {
            Self::KeyModel(.., model) | Self::GroupModel(_, model) | Self::ProviderModel(model) => {
                model.is_some()
            }
            Self::Key(..) | Self::Group(_) => false,
        }
    }

    /// Whether it is the key, with any secret, for any model or none.
    pub fn is_of_key(&self, wanted: &KeyId) -> bool {
        matches!(self, Self::Key(key, _) | Self::KeyModel(key, ..) if key == wanted)
    }

    /// Whether it is about this secret.
    pub fn is_of_secret(&self, wanted: Fingerprint) -> bool {
        matches!(self, Self::Key(_, secret) | Self::KeyModel(_, secret, _) if *secret == wanted)
    }

    /// Whether it is the group, for any model or none.
    pub fn is_of_group(&self, wanted: &GroupName) -> bool {
        matches!(self, Self::Group(group) | Self::GroupModel(group, _) if group == wanted)
    }

    /// The words users see: `key`, `key|model`, `group`, `group|model`, `provider|model`; [`ModelName::NONE`]
    /// is the model of requests of which none is known.
    pub fn label(&self, provider: &ProviderName) -> String {
        match self {
            Self::Key(key, _) => key.to_string(),
            Self::KeyModel(key, _, model) => format!("{key}|{}", model_text(model.as_ref())),
            Self::Group(group) => group.to_string(),
            Self::GroupModel(group, model) => format!("{group}|{}", model_text(model.as_ref())),
            Self::ProviderModel(model) => format!("{provider}|{}", model_text(model.as_ref())),
        }
    }
}

/// A model's name, or what stands for none.
pub(in crate::store) fn model_text(model: Option<&ModelName>) -> &str {
    model.map_or(ModelName::NONE, ModelName::as_str)
}

/// What rests, or did and is remembered.
#[derive(Debug, Default)]
pub struct Rests {
    pub(super) rows: Tracked<Subject, Rest>,
    /// How many of them are not a key's own.
    scoped: usize,
}

impl FromIterator<(Subject, Rest)> for Rests {
    fn from_iter<T: IntoIterator<Item = (Subject, Rest)>>(rests: T) -> Self {
        let rows = Tracked::of(rests);
        let scoped = rows.iter().filter(|(subject, _)| !subject.is_own()).count();
        Self { rows, scoped }
    }
}

impl Rests {
    /// Whether nothing rests: the usual case, in which nobody need look.
    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    /// What is known of a subject.
    pub fn get(&self, subject: &Subject) -> Option<&Rest> {
        self.rows.get(subject)
    }

    /// The same, to be changed.
    pub fn get_mut(&mut self, subject: &Subject) -> Option<&mut Rest> {
        self.rows.get_mut(subject)
    }

    /// All of them.
    pub fn iter(&self) -> impl Iterator<Item = (&Subject, &Rest)> {
        self.rows.iter()
    }

    /// Forgets a subject's rest; whether there was one.
    pub fn remove(&mut self, subject: &Subject) -> bool {
        let was = self.rows.remove(subject).is_some();
        self.scoped -= usize::from(was && !subject.is_own());
        was
    }

    /// Forgets what `lifted` names; whether there was anything.
    pub fn lift(&mut self, mut lifted: impl FnMut(&Subject, &Rest) -> bool) -> bool {
        let before = self.rows.len();
        let scoped = &mut self.scoped;
        self.rows.retain(|subject, rest| {
            let goes = lifted(subject, rest);
            *scoped -= usize::from(goes && !subject.is_own());
            !goes
        });
        self.rows.len() < before
    }

    /// Writes a rest; `false` where there are too many and this one is not kept. `current` is the key's present
    /// secret, whose own rest is never pushed out.
    pub fn set(
        &mut self,
        subject: Subject,
        rest: Rest,
        current: Option<Fingerprint>,
        now: StoreTime,
    ) -> bool {
        if let Some(known) = self.rows.get_mut(&subject) {
            *known = rest;
            return true;
        }
        if let Subject::Key(key, _) = &subject {
            self.make_room_of(key, current, now);
        } else if self.scoped >= SCOPED && subject.names_model() && !self.make_room_for(&rest, now) {
            return false;
        }
        self.scoped += usize::from(!subject.is_own());
        self.rows.insert(subject, rest);
        true
    }

    /// Among a key's own rests, by secret.
    fn make_room_of(&mut self, key: &KeyId, current: Option<Fingerprint>, now: StoreTime) {
        let is_own = |subject: &Subject| subject.is_own() && subject.is_of_key(key);
        self.lift(|subject, rest| is_own(subject) && rest.is_forgotten(now));
        let others = self.rows.iter().filter(|(subject, _)| is_own(subject));
        if others.clone().count() >= FINGERPRINTS {
            let oldest = others
                .filter(|(other, _)| current.is_none_or(|secret| !other.is_of_secret(secret)))
                .min_by_key(|(_, rest)| rest.since)
                .map(|(other, _)| other.clone());
            oldest.map(|oldest| self.remove(&oldest));
        }
    }

    /// Among those for models with a name: of a few, those go that are healed, or else one that weighs less
    /// than the `coming` one. So a caller who makes names up pushes nothing out, and costs the same with each.
    fn make_room_for(&mut self, coming: &Rest, now: StoreTime) -> bool {
        // Anywhere: the order of a hash map is its own, and no caller's.
        let start = usize::try_from(coming.token.0).unwrap_or(0) % self.rows.len().max(1);
        let from_start = self.rows.iter().skip(start).chain(self.rows.iter().take(start));
        let looked_at = from_start.filter(|(subject, _)| subject.names_model()).take(SAMPLE);
        let mut going: Vec<Subject> = Vec::new();
        let mut lighter = None;
        for (subject, rest) in looked_at {
            if rest.is_forgotten(now) {
                going.push(subject.clone());
            } else if rest.is_light() {
                lighter = Some(subject.clone());
            }
        }
        if going.is_empty() && !coming.is_light() {
            going.extend(lighter);
        }
        for subject in &going {
            self.remove(subject);
        }
        !going.is_empty()
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::super::rest::Evidence;
    use super::*;
    use crate::model::{Class, FencingToken};

    fn rest(class: Class, token: u64, now: StoreTime) -> Rest {
        let evidence = Evidence {
            class,
            wait: None,
            doubt: false,
            by_check: false,
            status: None,
            code: None,
            lease: None,
            token: FencingToken(0),
            of_model: true,
        };
        Rest::after(None, &evidence, FencingToken(token), now)
    }

    fn of_model(number: u64) -> Subject {
        Subject::ProviderModel(ModelName::new(&format!("m{number}")))
    }

    #[test]
    fn what_has_healed_makes_room_at_the_bound_a_few_at_a_time() {
        let (mut rests, bound) = (Rests::default(), SCOPED as u64);
        let (early, late) = (StoreTime(0), StoreTime(1_900_000));
        for number in 0..bound {
            assert!(rests.set(of_model(number), rest(Class::Access, number, early), None, early));
        }
        assert!(!rests.set(of_model(bound), rest(Class::Access, bound, early), None, early));
        assert!(rests.set(of_model(bound), rest(Class::Access, bound, late), None, late));
        assert_eq!(rests.iter().count(), SCOPED + 1 - SAMPLE);
        assert_eq!(rests.scoped, rests.iter().count());
    }

    #[test]
    fn what_weighs_more_takes_the_place_of_what_weighs_less_and_not_the_other_way_round() {
        let (mut rests, bound, now) = (Rests::default(), SCOPED as u64, StoreTime(0));
        for number in 0..bound {
            rests.set(of_model(number), rest(Class::Access, number, now), None, now);
        }
        for number in bound..bound + 100 {
            assert!(rests.set(of_model(number), rest(Class::Rate, number, now), None, now));
            assert!(!rests.set(of_model(number + 100), rest(Class::Access, number, now), None, now));
        }
        let rates = rests.iter().filter(|(_, rest)| rest.class == Class::Rate).count();
        assert_eq!((rates, rests.iter().count()), (100, SCOPED));
    }
}

//! What can rest, and the bounded table of what does.

use super::rest::Rest;
use super::tracked::Tracked;
use crate::model::{Fingerprint, GroupName, KeyId, ModelName, ProviderName};
use crate::store::StoreTime;

/// Secrets of one key whose own rests are remembered at once; a rotation needs two.
const FINGERPRINTS: usize = 4;
/// Scoped rests remembered at once per provider. Models are named by callers, so they need a bound;
/// past it the rest that ends first goes, which costs one more refusal at worst.
const SCOPED: usize = 1024;

/// What a rest is about. Where a secret matters it is part of the subject: evidence about one secret
/// touches nothing of another's.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Subject {
    /// A key with this secret.
    Key(KeyId, Fingerprint),
    /// A key with this secret, for one model.
    KeyModel(KeyId, Fingerprint, ModelName),
    /// All keys of a group.
    Group(GroupName),
    /// All keys of a group, for one model.
    GroupModel(GroupName, ModelName),
    /// All keys of the provider, for one model where it is known.
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
        let with_model = model.into_iter().flat_map(move |model| {
            let of_group = group.map(|group| Self::GroupModel(group.clone(), model.clone()));
            [
                Some(Self::KeyModel(key.clone(), fingerprint, model.clone())),
                of_group,
                Some(Self::ProviderModel(Some(model.clone()))),
            ]
        });
        [
            Some(Self::Key(key.clone(), fingerprint)),
            group.map(|group| Self::Group(group.clone())),
            Some(Self::ProviderModel(None)),
        ]
        .into_iter()
        .chain(with_model)
        .flatten()
    }

    /// Whether it is the key itself, and so the source of the key's status.
    pub fn is_own(&self) -> bool {
        matches!(self, Self::Key(..))
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

    /// The words users see: `key`, `key|model`, `group`, `group|model`, `provider`, `provider|model`.
    pub fn label(&self, provider: &ProviderName) -> String {
        match self {
            Self::Key(key, _) => key.to_string(),
            Self::KeyModel(key, _, model) => format!("{key}|{model}"),
            Self::Group(group) => group.to_string(),
            Self::GroupModel(group, model) => format!("{group}|{model}"),
            Self::ProviderModel(Some(model)) => format!("{provider}|{model}"),
            Self::ProviderModel(None) => provider.to_string(),
        }
    }
}

/// What rests, or did and is remembered.
#[derive(Debug, Default)]
pub struct Rests(pub(super) Tracked<Subject, Rest>);

impl FromIterator<(Subject, Rest)> for Rests {
    fn from_iter<T: IntoIterator<Item = (Subject, Rest)>>(rests: T) -> Self {
        Self(Tracked::of(rests))
    }
}

impl Rests {
    /// Whether nothing rests: the usual case, in which nobody need look.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// What is known of a subject.
    pub fn get(&self, subject: &Subject) -> Option<&Rest> {
        self.0.get(subject)
    }

    /// The same, to be changed.
    pub fn get_mut(&mut self, subject: &Subject) -> Option<&mut Rest> {
        self.0.get_mut(subject)
    }

    /// All of them.
    pub fn iter(&self) -> impl Iterator<Item = (&Subject, &Rest)> {
        self.0.iter()
    }

    /// Forgets a subject's rest; whether there was one.
    pub fn remove(&mut self, subject: &Subject) -> bool {
        self.0.remove(subject).is_some()
    }

    /// Forgets what `lifted` names; whether there was anything.
    pub fn lift(&mut self, mut lifted: impl FnMut(&Subject, &Rest) -> bool) -> bool {
        let before = self.0.len();
        self.0.retain(|subject, rest| !lifted(subject, rest));
        self.0.len() < before
    }

    /// Writes a rest, and forgets others where a bound is reached: first what has healed, then what
    /// matters least. `current` is the key's present secret, whose own rest is never pushed out.
    pub fn set(&mut self, subject: Subject, rest: Rest, current: Option<Fingerprint>, now: StoreTime) {
        if let Some(known) = self.0.get_mut(&subject) {
            *known = rest;
            return;
        }
        self.0.retain(|_, rest| !rest.is_forgotten(now));
        match &subject {
            Subject::Key(key, _) => {
                let others = self.0.iter().filter(|(other, _)| other.is_own() && other.is_of_key(key));
                if others.clone().count() >= FINGERPRINTS {
                    let oldest = others
                        .filter(|(other, _)| current.is_none_or(|secret| !other.is_of_secret(secret)))
                        .min_by_key(|(_, rest)| rest.since)
                        .map(|(other, _)| other.clone());
                    oldest.map(|oldest| self.0.remove(&oldest));
                }
            }
            _ if self.0.len() >= SCOPED => {
                // Own rests are bounded by the number of keys and so do not count here.
                let scoped = self.0.iter().filter(|(other, _)| !other.is_own());
                if scoped.clone().count() >= SCOPED {
                    let first = scoped.min_by_key(|(_, rest)| rest.until).map(|(other, _)| other.clone());
                    first.map(|first| self.0.remove(&first));
                }
            }
            _ => {}
        }
        self.0.insert(subject, rest);
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::super::rest::Evidence;
    use super::*;
    use crate::model::{Class, FencingToken};

    #[test]
    fn what_has_healed_and_is_forgotten_makes_room_for_what_comes() {
        let mut rests = Rests::default();
        for minutes in [0, 40, 80] {
            let evidence = Evidence {
                class: Class::Access,
                wait: None,
                doubt: false,
                by_check: false,
                status: None,
                code: None,
                lease: None,
                token: FencingToken(0),
            };
            let now = StoreTime(minutes * 60_000);
            let model = ModelName::new(&format!("m{minutes}")).unwrap();
            let rest = Rest::after(None, &evidence, FencingToken(1), now);
            rests.set(Subject::ProviderModel(Some(model)), rest, None, now);
            assert_eq!(rests.iter().count(), 1);
        }
    }
}

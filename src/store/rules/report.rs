//! What an answer changes.

use super::Ledger;
use super::cleared::Clearable;
use super::learned::group_of;
use super::rest::Evidence;
use super::subject::Subject;
use crate::model::{Class, Scope};
use crate::store::{Report, Reported, StoreTime};

/// What a [`Report`] did.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Effect {
    /// What the reporter is told.
    pub reported: Reported,
    /// Whether a rest was lifted, so that somebody who waits may go on.
    pub lifted: bool,
}

impl Ledger {
    /// Applies an outcome. A report that contradicts its own live lease, or names a key that nobody
    /// serves, changes nothing.
    pub fn report(&mut self, ask: &Report, now: StoreTime) -> Effect {
        let contradicted = self.leases.get(&ask.lease).is_some_and(|lease| {
            lease.key != ask.key || lease.token != ask.token || lease.fingerprint != ask.fingerprint
        });
        let served = self.keys.get(&ask.key).is_some_and(|key| key.settings.is_some());
        if contradicted || !served {
            return Effect::default();
        }
        self.learn_group(ask);
        let mut effect = Effect::default();
        match ask.outcome.class {
            Class::Success => effect.lifted = ask.outcome.shows_use() && self.succeed(ask, now),
            Class::Concurrency => self.learn(ask, now),
            Class::Caller | Class::Cancelled | Class::Network => {}
            Class::Rate
            | Class::Quota
            | Class::Invalid
            | Class::Access
            | Class::Region
            | Class::Overloaded => effect.reported.cooling_until = self.take_refusal(ask, now),
        }
        effect.reported.status = Some(self.status(&ask.key, Some(ask.fingerprint), now));
        effect
    }

    /// Rests what a refusal blames; until when.
    fn take_refusal(&mut self, ask: &Report, now: StoreTime) -> Option<StoreTime> {
        let subject = blamed(ask)?;
        let evidence = Evidence {
            class: ask.outcome.class,
            wait: ask.outcome.wait,
            doubt: ask.outcome.class == Class::Invalid && !ask.outcome.proven,
            by_check: false,
            status: ask.outcome.status,
            code: ask.outcome.code.clone(),
            lease: Some(ask.lease),
            token: self.believed(ask.token, now),
            of_model: ask.model.is_some(),
        };
        // What is proven is not cleared by hand either.
        let clearable = Clearable::of(&subject).filter(|_| !evidence.is_proof());
        if self.is_from_before(clearable.as_ref(), evidence.token) {
            return None;
        }
        let stamp = self.next_token(now);
        self.refuse(subject, &evidence, stamp, now)
    }

    /// Lifts what rests, or is remembered, of every subject of this request, where this lease was
    /// granted after it was set.
    fn succeed(&mut self, ask: &Report, now: StoreTime) -> bool {
        if self.rests.is_empty() {
            return false;
        }
        let token = self.believed(ask.token, now);
        let mut lifted = false;
        for subject in Subject::bearing(&ask.key, ask.fingerprint, group_of(ask), ask.model.as_ref()) {
            if self.rests.get(&subject).is_some_and(|rest| rest.is_lifted_by(token, ask.model.is_some())) {
                lifted |= self.rests.remove(&subject);
            }
        }
        lifted
    }
}

impl Report {
    /// Whether it rests all keys of a group, whatever the model.
    pub fn rests_group(&self) -> bool {
        matches!(blamed(self), Some(Subject::Group(_)))
    }

    /// The subject that it rests, in the words of [`CooldownView::subject`](crate::store::CooldownView), and
    /// whether that is the key itself; `None` where it rests nothing.
    pub fn subject(&self) -> Option<(String, bool)> {
        let subject = blamed(self)?;
        Some((subject.label(&self.provider), subject.is_own()))
    }
}

/// The subject a refusal rests. A group scope without a group means the key; a model scope without a known
/// model, those requests alone of which none is known: a caller decides what can be known, and must not stop
/// others by it. `None` where it rests nothing, as with a key that may not use a model when it is not known
/// which.
pub(in crate::store) fn blamed(ask: &Report) -> Option<Subject> {
    let key = || Subject::Key(ask.key.clone(), ask.fingerprint);
    let key_model = || Subject::KeyModel(ask.key.clone(), ask.fingerprint, ask.model.clone());
    if !ask.outcome.rests_something(ask.model.is_some()) {
        return None;
    }
    Some(match (ask.outcome.blamed_scope(), group_of(ask)) {
        (Scope::Key, _) | (Scope::Group, None) => key(),
        (Scope::KeyModel, _) | (Scope::GroupModel, None) => key_model(),
        (Scope::Group, Some(group)) => Subject::Group(group.clone()),
        (Scope::GroupModel, Some(group)) => Subject::GroupModel(group.clone(), ask.model.clone()),
        (Scope::ProviderModel, _) => Subject::ProviderModel(ask.model.clone()),
    })
}

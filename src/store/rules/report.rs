//! What an answer changes.

use super::Ledger;
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
            Class::Success => effect.lifted = self.succeed(ask, now),
            Class::Concurrency => self.learn(ask, now),
            Class::Caller | Class::Cancelled | Class::Network => {}
            Class::Rate
            | Class::Quota
            | Class::Invalid
            | Class::Access
            | Class::Region
            | Class::Overloaded => {
                let evidence = Evidence {
                    class: ask.outcome.class,
                    wait: ask.outcome.wait,
                    doubt: ask.outcome.class == Class::Invalid && !ask.outcome.proven,
                    by_check: false,
                    status: ask.outcome.status,
                    code: ask.outcome.code.clone(),
                    lease: Some(ask.lease),
                    token: self.believed(ask.token, now),
                };
                let stamp = self.next_token(now);
                effect.reported.cooling_until = self.refuse(blamed(ask), &evidence, stamp, now);
            }
        }
        effect.reported.status = Some(self.status(&ask.key, Some(ask.fingerprint), now));
        effect
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
            if self.rests.get(&subject).is_some_and(|rest| rest.is_lifted_by(token)) {
                lifted |= self.rests.remove(&subject);
            }
        }
        lifted
    }
}

impl Report {
    /// Whether it rests all keys of a group, whatever the model.
    pub fn rests_group(&self) -> bool {
        matches!(blamed(self), Subject::Group(_))
    }

    /// The subject that it rests, in the words of [`CooldownView::subject`](crate::store::CooldownView), and
    /// whether that is the key itself.
    pub fn subject(&self) -> (String, bool) {
        let subject = blamed(self);
        (subject.label(&self.provider), subject.is_own())
    }
}

/// The subject a refusal rests. Where its scope names what the request does not have, the next wider
/// one that it has counts: a group scope without a group means the key, a model scope without a model
/// the whole subject.
pub(in crate::store) fn blamed(ask: &Report) -> Subject {
    let scope = ask.outcome.blamed_scope();
    let key = || Subject::Key(ask.key.clone(), ask.fingerprint);
    let key_model = || match &ask.model {
        Some(model) => Subject::KeyModel(ask.key.clone(), ask.fingerprint, model.clone()),
        None => key(),
    };
    match (scope, group_of(ask), &ask.model) {
        (Scope::Key, ..) | (Scope::Group, None, _) => key(),
        (Scope::KeyModel, ..) | (Scope::GroupModel, None, _) => key_model(),
        (Scope::Group, Some(group), _) | (Scope::GroupModel, Some(group), None) => {
            Subject::Group(group.clone())
        }
        (Scope::GroupModel, Some(group), Some(model)) => Subject::GroupModel(group.clone(), model.clone()),
        (Scope::ProviderModel, _, model) => Subject::ProviderModel(model.clone()),
    }
}

//! What a person cleared, and when: refusals of leases from before are older news than that.
//!
//! A request that was on its way when somebody cleared its key comes back with the very refusal that was
//! cleared. Only a person's word is remembered so: to remember each success the same way would cost a write
//! for each.

use std::time::Duration;

use super::Ledger;
use super::subject::Subject;
use super::tracked::Tracked;
use crate::model::{FencingToken, GroupName, KeyId};
use crate::store::StoreTime;

/// How long a clearing is remembered: no answer takes longer to begin.
const KEPT: Duration = Duration::from_hours(24);

/// What a person can clear, whatever the secret and the model.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(in crate::store) enum Clearable {
    Key(KeyId),
    Group(GroupName),
}

impl Clearable {
    /// What must be cleared by hand to lift a rest of this subject; `None` where nothing does.
    pub(in crate::store) fn of(subject: &Subject) -> Option<Self> {
        match subject {
            Subject::Key(key, _) | Subject::KeyModel(key, ..) => Some(Self::Key(key.clone())),
            Subject::Group(group) | Subject::GroupModel(group, _) => Some(Self::Group(group.clone())),
            Subject::ProviderModel(_) => None,
        }
    }
}

/// The newest token as of when each was cleared.
pub(in crate::store) type Clearings = Tracked<Clearable, FencingToken>;

impl Ledger {
    /// Whether a lease with this token is from before a person cleared the subject.
    pub(super) fn is_from_before(&self, clearable: Option<&Clearable>, token: FencingToken) -> bool {
        clearable.and_then(|what| self.cleared.get(what)).is_some_and(|cleared| token <= *cleared)
    }

    /// A person cleared a key, and its group.
    pub(super) fn note_clearing(&mut self, key: KeyId, group: Option<GroupName>, now: StoreTime) {
        let stamp = self.next_token(now);
        // Tokens are microseconds, or ahead of them.
        self.cleared.retain(|_, token| now < StoreTime(token.0 / 1000).plus(KEPT));
        for what in [Some(Clearable::Key(key)), group.map(Clearable::Group)].into_iter().flatten() {
            self.cleared.insert(what, stamp);
        }
    }
}

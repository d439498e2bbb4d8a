//! What keeps the fitting keys of a request from being lent, summed up for whoever must be told.

use std::time::Duration;

use crate::model::{Class, KeyId, KeyStatus};
use crate::store::{Reason, StoreTime};

/// What keeps some of the fitting keys from being lent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Kept {
    /// What it is.
    pub by: By,
    /// How many keys.
    pub keys: usize,
    /// For how long yet, at least: until the first of these keys is back.
    pub rest: Option<Duration>,
}

/// What keeps a key from being lent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum By {
    /// Its slots are in use, or it is left to those who wait for it.
    Uses,
    /// It rests, for what was answered.
    Rest(Class),
    /// It waits for a person or a check.
    Status(KeyStatus),
    /// The store does not know it, or not in this pool.
    Settings,
}

impl By {
    fn of(reason: Reason) -> Self {
        match reason {
            Reason::Full => Self::Uses,
            Reason::Cooling { class, .. } => Self::Rest(class),
            Reason::Unusable(status) => Self::Status(status),
            Reason::NotMember | Reason::NoSettings => Self::Settings,
        }
    }

    /// Whether the provider does not let the key do this, though perhaps other things.
    pub fn is_no_access(self) -> bool {
        matches!(self, Self::Rest(Class::Access | Class::Region))
    }
}

impl Kept {
    /// Each reason once, in the order in which they were found.
    pub(super) fn sum(reasons: &[(KeyId, Reason)], now: StoreTime) -> Vec<Self> {
        let mut sums: Vec<Self> = Vec::new();
        for (_, reason) in reasons {
            let by = By::of(*reason);
            let rest = match reason {
                Reason::Cooling { until, .. } => Some(until.since(now)),
                _ => None,
            };
            match sums.iter_mut().find(|sum| sum.by == by) {
                Some(sum) => {
                    sum.keys += 1;
                    sum.rest = sum.rest.into_iter().chain(rest).min();
                }
                None => sums.push(Self { by, keys: 1, rest }),
            }
        }
        sums
    }
}

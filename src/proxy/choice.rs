//! Which keys may serve one request, also where the configuration is replaced while it waits.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::model::{Candidate, Fingerprint, GroupName, KeyId, Wanted};
use crate::route::ring::{Fitting, ProviderKeys, Ring, Wish};

/// One request's choice. Asked by the store's client for candidates, best first, and whether what was lent may
/// be used; each time by what is configured then.
pub(super) struct Choice<'a> {
    ring: &'a Ring,
    wish: Wish,
    seen: Mutex<Seen>,
}

/// What was found at the last look.
struct Seen {
    keys: Arc<ProviderKeys>,
    fitting: Fitting,
}

impl<'a> Choice<'a> {
    /// Of `keys`, which the request was routed by.
    pub(super) fn new(ring: &'a Ring, keys: Arc<ProviderKeys>, wish: Wish) -> Self {
        let fitting = keys.fitting(&wish);
        Self { ring, wish, seen: Mutex::new(Seen { keys, fitting }) }
    }

    /// What is wanted.
    pub(super) fn wish(&self) -> &Wish {
        &self.wish
    }

    /// The keys as they were at the last look: those that the last candidates are of.
    pub(super) fn keys(&self) -> Arc<ProviderKeys> {
        self.seen().keys.clone()
    }

    /// The fitting keys: the queue that the request stands in.
    pub(super) fn ids(&self) -> Arc<[KeyId]> {
        let seen = self.seen();
        seen.keys.ids(&seen.fitting)
    }

    /// Whether no key fits.
    pub(super) fn is_empty(&self) -> bool {
        self.seen().fitting.is_empty()
    }

    /// The candidates that are wanted, best first.
    pub(super) fn rank(&self, wanted: &Wanted<'_>) -> Vec<Candidate> {
        let seen = self.look();
        seen.keys.rank(&seen.fitting, &self.wish.model, wanted)
    }

    /// Whether a key that was just lent may be used: by what is configured now, however it was ranked.
    pub(super) fn confirm(&self, key: &KeyId, fingerprint: Fingerprint) -> bool {
        let provider = self.seen().keys.provider.name.clone();
        self.ring.of(provider.as_str()).is_some_and(|now| now.confirm(key, fingerprint))
    }

    /// Rules out, for this request, a key with which it was refused, and its group where the limit is the
    /// group's.
    pub(super) fn rule_out(&mut self, key: KeyId, group: Option<GroupName>) {
        self.wish.rule_out(key, group);
        let mut seen = self.seen();
        seen.fitting = seen.keys.fitting(&self.wish);
        drop(seen);
    }

    /// Looks again. What was routed by another definition of the provider than there is now goes on with the
    /// keys that it found, as far as they are still good: new ones may be for another place.
    fn look(&self) -> MutexGuard<'_, Seen> {
        let mut seen = self.seen();
        let now = self.ring.of(seen.keys.provider.name.as_str());
        let same_place = |now: &Arc<ProviderKeys>| Arc::ptr_eq(&now.provider, &seen.keys.provider);
        if let Some(now) = now.filter(same_place).filter(|now| !Arc::ptr_eq(now, &seen.keys)) {
            seen.fitting = now.fitting(&self.wish);
            seen.keys = now;
        }
        seen
    }

    fn seen(&self) -> MutexGuard<'_, Seen> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

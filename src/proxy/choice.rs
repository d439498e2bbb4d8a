//! Which keys may serve one request, also where the configuration is replaced while it waits.

use std::sync::Arc;

use crate::lease::Choose;
use crate::model::{Candidate, Fingerprint, GroupName, KeyId, ModelName, Wanted};
use crate::route::ring::{Fitting, ProviderKeys, Ring, Wish};

/// One request's choice. Asked by the store's client for candidates, best first, and whether what was lent may
/// be used; each time by what is configured then.
pub(super) struct Choice<'a> {
    ring: &'a Ring,
    wish: Wish,
    /// The keys at the last look.
    keys: Arc<ProviderKeys>,
    /// Those of them that fit.
    fitting: Fitting,
}

impl<'a> Choice<'a> {
    /// Of `keys`, which the request was routed by.
    pub(super) fn new(ring: &'a Ring, keys: Arc<ProviderKeys>, wish: Wish) -> Self {
        let fitting = keys.fitting(&wish);
        Self { ring, wish, keys, fitting }
    }

    /// What is wanted.
    pub(super) fn wish(&self) -> &Wish {
        &self.wish
    }

    /// The keys as they were at the last look: those that the last candidates are of.
    pub(super) fn keys(&self) -> &Arc<ProviderKeys> {
        &self.keys
    }

    /// Whether no key fits.
    pub(super) fn is_empty(&self) -> bool {
        self.fitting.is_empty()
    }

    /// Rules out, for this request, a key with which it was refused, and its group where the limit is the
    /// group's.
    pub(super) fn rule_out(&mut self, key: KeyId, group: Option<GroupName>) {
        self.wish.rule_out(key, group);
        self.fitting = self.keys.fitting(&self.wish);
    }

    /// Looks again. What was routed by another definition of the provider than there is now goes on with the
    /// keys that it found, as far as they are still good: new ones may be for another place.
    fn look(&mut self) {
        let now = self.ring.newer(&self.keys);
        if let Some(now) = now.filter(|now| Arc::ptr_eq(&now.provider, &self.keys.provider)) {
            self.fitting = now.fitting(&self.wish);
            self.keys = now;
        }
    }
}

impl Choose for Choice<'_> {
    fn model(&self) -> Option<&ModelName> {
        self.wish.model.name()
    }

    fn fitting(&self) -> Arc<[KeyId]> {
        self.keys.ids(&self.fitting)
    }

    fn rank(&mut self, wanted: &Wanted<'_>) -> Arc<[Candidate]> {
        self.look();
        self.keys.rank(&self.fitting, &self.wish.model, wanted)
    }

    /// By what is configured now, however it was ranked.
    fn confirm(&self, key: &KeyId, fingerprint: Fingerprint) -> bool {
        self.ring.confirm(&self.keys, key, fingerprint)
    }
}

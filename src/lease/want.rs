//! What a request wants to hold, and how it is asked about its keys on the way.

use std::sync::Arc;

use tokio::time::Instant;

use crate::model::{AppName, Candidate, Fingerprint, KeyId, ModelName, PoolName, ProviderName, Wanted};

/// What a request wants to hold.
pub struct Want<'a> {
    /// Whose key.
    pub provider: &'a ProviderName,
    /// The caller.
    pub app: &'a AppName,
    /// The pool that was asked for; for errors only.
    pub pool: &'a PoolName,
    /// Which keys.
    pub keys: &'a mut dyn Choose,
    /// The end of the wait.
    pub until: Instant,
}

/// One request's own view of the keys.
pub trait Choose: Send + Sync {
    /// The model, where known.
    fn model(&self) -> Option<&ModelName>;

    /// Every key that may serve the request, sorted: with the model, the queue it stands in. Asked for only
    /// where somebody waits. A key that the request may not use any more (it was refused with it) belongs in
    /// neither this nor `rank`'s answer.
    fn fitting(&self) -> Arc<[KeyId]>;

    /// Called at each try, and again for the rest where the best could not be had: candidates out of
    /// `fitting`, best first. One that cools is better ranked last than left out, for the store's word on its
    /// end is what a wait is planned by. None at all means that none may be used now.
    fn rank(&mut self, wanted: &Wanted<'_>) -> Arc<[Candidate]>;

    /// The process's own view, asked after the store's yes and before use: false gives the slot back, and
    /// the next candidate is tried.
    fn confirm(&self, key: &KeyId, fingerprint: Fingerprint) -> bool;
}

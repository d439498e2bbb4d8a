//! Whether an app may go on: a person can revoke it, which ends at once what it has under way.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};

use tokio_util::sync::CancellationToken;

/// An app's standing, as one request found it. Once revoked it stays so: an app that is restored begins
/// with a new one. Clones share it.
#[derive(Debug, Clone, Default)]
pub struct Standing(Arc<State>);

#[derive(Debug, Default)]
struct State {
    /// Beside the token, whose own answer takes a lock: this is asked for each chunk.
    revoked: AtomicBool,
    ended: CancellationToken,
}

impl Standing {
    /// Whether it was revoked.
    pub fn is_revoked(&self) -> bool {
        self.0.revoked.load(Ordering::Acquire)
    }

    /// Resolves when it is. Cancel safe.
    pub async fn revoked(&self) {
        self.0.ended.cancelled().await;
    }

    /// Ready when it is, for who polls; wakes the last task that asked.
    pub fn watch(&self) -> impl FnMut(&mut Context<'_>) -> Poll<()> + Send + use<> {
        let mut ended: Pin<Box<_>> = Box::pin(self.0.ended.clone().cancelled_owned());
        move |cx| ended.as_mut().poll(cx)
    }

    pub(super) fn revoke(&self) {
        self.0.revoked.store(true, Ordering::Release);
        self.0.ended.cancel();
    }
}

//! When a connection is over: nobody asks on it, or nobody takes what was asked for.
//!
//! Pings do not tell: a peer that answers them may hold a place, and answers, for ever.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

/// How long a connection may stand without a request. API servers open another.
pub(super) const IDLE: Duration = Duration::from_secs(30);
/// How long an answer may take to go out; the longest is a few MiB.
pub(super) const SENDING: Duration = Duration::from_secs(10);
/// How often it is looked at.
const LOOK: Duration = Duration::from_secs(1);

/// What is under way on one connection.
#[derive(Debug, Clone)]
pub(super) struct Watch(Arc<Mutex<State>>);

#[derive(Debug)]
struct State {
    next: u64,
    /// Requests under way, and since when their answers are ready. The protocol bounds how many there are.
    open: HashMap<u64, Option<Instant>>,
    idle_since: Instant,
}

/// Why it is over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Over {
    Idle,
    NotTaken,
}

impl Default for Watch {
    fn default() -> Self {
        Self(Arc::new(Mutex::new(State { next: 0, open: HashMap::new(), idle_since: Instant::now() })))
    }
}

impl Watch {
    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A request has come.
    pub(super) fn begin(&self) -> Open {
        let mut state = self.state();
        let id = state.next;
        state.next += 1;
        state.open.insert(id, None);
        Open { watch: self.clone(), id }
    }

    /// Waits until the connection should end.
    pub(super) async fn over(&self) -> Over {
        loop {
            if let Some(over) = self.state().over(Instant::now()) {
                return over;
            }
            tokio::time::sleep(LOOK).await;
        }
    }
}

impl State {
    fn over(&self, now: Instant) -> Option<Over> {
        let since = |begun: Instant| now.saturating_duration_since(begun);
        if self.open.values().flatten().any(|ready| since(*ready) >= SENDING) {
            return Some(Over::NotTaken);
        }
        (self.open.is_empty() && since(self.idle_since) >= IDLE).then_some(Over::Idle)
    }
}

/// A request, until its answer is sent or cannot be.
#[derive(Debug)]
pub(super) struct Open {
    watch: Watch,
    id: u64,
}

impl Open {
    /// From now on it is the peer who is waited for.
    pub(super) fn answered(self) -> Self {
        self.watch.state().open.insert(self.id, Some(Instant::now()));
        self
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        let mut state = self.watch.state();
        state.open.remove(&self.id);
        state.idle_since = Instant::now();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_connection_without_requests_is_over_and_one_with_a_request_under_way_is_not() {
        let (watch, begun) = (Watch::default(), Instant::now());
        let open = watch.begin();
        assert!(tokio::time::timeout(IDLE * 3, watch.over()).await.is_err());
        drop(open.answered());
        assert_eq!(watch.over().await, Over::Idle);
        assert_eq!(begun.elapsed().as_secs(), (IDLE * 4).as_secs());
    }

    #[tokio::test(start_paused = true)]
    async fn an_answer_that_is_not_taken_ends_its_connection_though_others_are() {
        let watch = Watch::default();
        let stuck = watch.begin().answered();
        let begun = Instant::now();
        let others = async {
            loop {
                drop(watch.begin().answered());
                tokio::time::sleep(LOOK).await;
            }
        };
        let over = tokio::select! { over = watch.over() => Some(over), () = others => None };
        assert_eq!((over, begun.elapsed().as_secs()), (Some(Over::NotTaken), SENDING.as_secs()));
        drop(stuck);
    }
}

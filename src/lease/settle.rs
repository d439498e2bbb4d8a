//! Reports and releases, off everybody's path. A call that answers at once (`memory:`) is done where it
//! is made; any other goes on in a task that is counted and bounded.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use crate::model::LeaseId;
use crate::store::{Acquire, Acquired, Answer, Release, Report};

use super::Inner;
use super::live::Live;

/// The first pause between tries of a release; doubles up to [`LONGEST_PAUSE`].
const PAUSE: Duration = Duration::from_millis(50);
const LONGEST_PAUSE: Duration = Duration::from_secs(2);

/// The bound of one report.
const REPORT: Duration = Duration::from_secs(5);

/// Work that may be over at its first poll.
type Work = Pin<Box<dyn Future<Output = ()> + Send>>;

/// Polls once; `None` when it is done, else what is left of it.
fn first_poll(mut work: Work) -> Option<Work> {
    match work.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(()) => None,
        Poll::Pending => Some(work),
    }
}

impl Inner {
    /// Does `work` at once if it can be, else in a counted task.
    fn settle(&self, work: Work) -> Option<tokio::task::JoinHandle<()>> {
        // Timers inside need the runtime, and a drop may come from outside of it.
        let _inside = self.runtime.enter();
        first_poll(work).map(|rest| self.settling.spawn_on(rest, &self.runtime))
    }
}

/// Reports; gives what the release must wait for.
pub(super) fn report(leases: &Arc<Inner>, ask: Report) -> Option<tokio::task::JoinHandle<()>> {
    let answer = leases.store.report(ask);
    let inner = leases.clone();
    leases.settle(Box::pin(async move {
        match bounded(REPORT, answer).await {
            Some(Ok(_)) => {}
            Some(Err(error)) => inner.note_store(Some(&error)),
            None => inner.metrics.store_error(),
        }
    }))
}

/// Releases after the report, and offers the slot to who waits for it.
pub(super) fn release(leases: &Arc<Inner>, live: &Arc<Live>, reporting: Option<tokio::task::JoinHandle<()>>) {
    let (inner, live) = (leases.clone(), live.clone());
    leases.settle(Box::pin(async move {
        if let Some(reporting) = reporting {
            // Bounded by itself; a panic in it must not keep the slot.
            let _ = reporting.await;
        }
        give_back(&inner, vec![live.release()]).await;
        inner.freed(&live.provider, &live.key);
    }));
}

/// Tries until answered, or until the lease would have expired by itself.
async fn give_back(inner: &Inner, asks: Vec<Release>) {
    let until = std::time::Instant::now() + inner.config.ttl;
    let mut pause = PAUSE;
    loop {
        match inner.store.release(asks.clone()).await {
            Ok(_) => return inner.note_store(None),
            Err(error) => inner.note_store(Some(&error)),
        }
        if std::time::Instant::now() + pause > until {
            return;
        }
        tokio::time::sleep(pause.mul_f64(0.5 + rand::random::<f64>())).await;
        pause = (pause * 2).min(LONGEST_PAUSE);
    }
}

/// The outcome of an acquire is unknown: after its deadline nothing more can be granted under its id, so
/// then each candidate it named is released (a mismatch is harmless).
pub(super) fn unknown(leases: &Arc<Inner>, ask: &Acquire) {
    let asks = releases_of(ask);
    let wait = ask.deadline.since(leases.store.now());
    let inner = leases.clone();
    leases.settle(Box::pin(async move {
        tokio::time::sleep(wait).await;
        give_back(&inner, asks).await;
    }));
}

fn releases_of(ask: &Acquire) -> Vec<Release> {
    let lease: LeaseId = ask.lease;
    let each = |candidate: &crate::store::Candidate| Release {
        provider: ask.provider.clone(),
        lease,
        key: candidate.key.clone(),
        pool: candidate.pool.clone(),
    };
    ask.candidates.iter().map(each).collect()
}

/// An acquire under way. Dropped before its answer, it goes on in a task that gives back what it is
/// granted.
pub(super) struct UnderWay {
    leases: Arc<Inner>,
    ask: Option<Acquire>,
    answer: Option<Answer<Acquired>>,
}

impl UnderWay {
    pub(super) fn new(leases: &Arc<Inner>, ask: Acquire) -> Self {
        let answer = leases.store.acquire(ask.clone());
        Self { leases: leases.clone(), ask: Some(ask), answer: Some(answer) }
    }

    /// The answer, or `None` when none came within `bound`: then the outcome is unknown, and is settled.
    pub(super) async fn answer(
        mut self,
        bound: Duration,
    ) -> Option<Result<Acquired, crate::store::StoreError>> {
        let answer = std::future::poll_fn(|cx| match &mut self.answer {
            Some(answer) => answer.as_mut().poll(cx).map(Some),
            None => Poll::Ready(None),
        });
        let answered = bounded(bound, answer).await.flatten();
        let ask = self.ask.take();
        self.answer = None;
        match &answered {
            None | Some(Err(crate::store::StoreError::TimedOut(_))) => {
                if let Some(ask) = ask {
                    unknown(&self.leases, &ask);
                }
            }
            _ => {}
        }
        answered
    }
}

impl Drop for UnderWay {
    fn drop(&mut self) {
        let (Some(ask), Some(answer)) = (self.ask.take(), self.answer.take()) else { return };
        let inner = self.leases.clone();
        self.leases.settle(Box::pin(async move {
            let granted = match answer.await {
                Ok(Acquired::Granted(grant)) => Some(grant.key),
                Ok(_) => return,
                Err(_) => None,
            };
            give_back(&inner, releases_of(&ask)).await;
            if let Some(key) = granted {
                inner.freed(&ask.provider, &key);
            }
        }));
    }
}

/// `work` within `bound`; no timer is made for what is ready at once.
async fn bounded<T>(bound: Duration, work: impl Future<Output = T>) -> Option<T> {
    let mut work = std::pin::pin!(work);
    let first = std::future::poll_fn(|cx| Poll::Ready(work.as_mut().poll(cx))).await;
    match first {
        Poll::Ready(done) => Some(done),
        Poll::Pending => tokio::time::timeout(bound, work).await.ok(),
    }
}

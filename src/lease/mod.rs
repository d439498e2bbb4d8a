//! Holding one slot of a key for exactly as long as one request needs it.
//!
//! A [`Lease`] begins when the store grants the slot and ends with the last byte of the response body,
//! not with its headers: a streamed answer spends the key's quota long after they arrive. All live
//! leases are renewed together, in one call a provider and interval.
//!
//! Dropping an acquire at any await point is safe: a slot already granted, or granted later by a call
//! that was under way, returns. Dropping a lease releases it, exactly once, after its report.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use prometheus_client::metrics::gauge::Gauge;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::config::{LeaseConfig, QueueConfig};
use crate::metrics::Metrics;
use crate::model::{
    AppName, Class, FencingToken, GroupName, KeyId, LeaseId, ModelName, Outcome, OwnerId, PoolName,
    ProviderName,
};
use crate::store::{Candidate, Grant, Release, Report, Store, StoreError, SyncKeys};

mod heartbeat;
mod line;
mod live;
mod settle;
mod waiting;

#[cfg(test)]
mod tests;

use line::Line;
use live::Live;
pub use live::Lost;

/// How the store is told a provider's keys again, when it has lost their settings.
pub type Repair = Arc<dyn Fn(&ProviderName) -> SyncKeys + Send + Sync>;

/// The bound of the end: how long reports and releases under way are waited for.
const LAST_CALLS: Duration = Duration::from_secs(5);

/// What a request wants.
pub struct Want<'a> {
    /// Whose keys.
    pub provider: &'a ProviderName,
    /// The caller.
    pub app: &'a AppName,
    /// The pool asked for, for errors.
    pub pool: &'a PoolName,
    /// The model, where known.
    pub model: Option<&'a ModelName>,
    /// The keys that fit, sorted: with the model, the queue this request stands in.
    pub fitting: Arc<[KeyId]>,
    /// The same as candidates, best first; asked at each try, since load changes.
    pub rank: &'a (dyn Fn() -> Vec<Candidate> + Send + Sync),
    /// The process's own view, after the store's yes and before use; `false`: give back, try the next.
    pub confirm: &'a (dyn Fn(&KeyId) -> bool + Send + Sync),
    /// The end of the wait.
    pub until: Instant,
}

/// Why no key was leased. Full and failing are two errors, for they lead to different next steps.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AcquireError {
    /// Every fitting key is full or cooling.
    #[error("{}", exhausted(pool, *retry_after, *queue_full))]
    PoolExhausted {
        /// The pool.
        pool: PoolName,
        /// When a slot may be free.
        retry_after: Duration,
        /// Too many wait already.
        queue_full: bool,
    },
    /// Every fitting key waits for a person or a check.
    #[error("every fitting key of pool `{pool}` is invalid, disabled or pending; see `lessor keys list`")]
    KeyUnavailable {
        /// The pool.
        pool: PoolName,
    },
    /// The store failed.
    #[error("no key can be leased while the lease store fails")]
    StoreUnavailable {
        /// How.
        #[source]
        cause: StoreError,
    },
    /// lessor is draining.
    #[error("lessor is shutting down; try again, another may serve you")]
    ShuttingDown,
}

fn exhausted(pool: &PoolName, retry_after: Duration, queue_full: bool) -> String {
    if queue_full {
        return format!(
            "too many requests wait for pool `{pool}` (queue.max_waiting); add keys or raise their caps"
        );
    }
    format!(
        "pool `{pool}` has no free slot: every fitting key is full or cooling, try again in {:.1} s; \
         add keys or raise their caps (`lessor status` says which and why)",
        retry_after.as_secs_f64()
    )
}

/// All leases of this process; clones share them.
#[derive(Clone)]
pub struct Leases(Arc<Inner>);

struct Inner {
    store: Arc<dyn Store>,
    config: LeaseConfig,
    queue: QueueConfig,
    owner: OwnerId,
    metrics: Metrics,
    lines: Mutex<HashMap<ProviderName, Line>>,
    live: Mutex<HashMap<LeaseId, Arc<Live>>>,
    waiting: AtomicUsize,
    /// Recent hold times in ms, smoothed: what a full pool's `Retry-After` is guessed from.
    hold_ms: AtomicU64,
    store_up: AtomicBool,
    repair: OnceLock<Repair>,
    gauges: Mutex<HashMap<(ProviderName, KeyId), Gauge>>,
    /// No new leases.
    draining: CancellationToken,
    /// Ends the tasks.
    stop: CancellationToken,
    /// Reports and releases under way.
    settling: TaskTracker,
    /// A new lease has an end of its own for the heartbeat to know.
    bounded: Arc<tokio::sync::Notify>,
    runtime: tokio::runtime::Handle,
}

impl Drop for Leases {
    fn drop(&mut self) {
        // The two tasks hold the last references; without another they have nothing left to do.
        if Arc::strong_count(&self.0) <= 1 {
            self.0.stop.cancel();
        }
    }
}

impl std::fmt::Debug for Leases {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Leases").field("live", &self.live()).field("waiting", &self.waiting()).finish()
    }
}

/// Locks, also after a panic elsewhere: every section leaves the data whole.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Leases {
    /// Starts the heartbeat and the watch for the store's events on this runtime; both end with
    /// [`Leases::shutdown`], or when the last clone goes.
    pub fn new(
        store: Arc<dyn Store>,
        lease: LeaseConfig,
        queue: QueueConfig,
        owner: OwnerId,
        metrics: Metrics,
    ) -> Self {
        let inner = Arc::new(Inner {
            store,
            config: lease,
            queue,
            owner,
            metrics,
            lines: Mutex::default(),
            live: Mutex::default(),
            waiting: AtomicUsize::new(0),
            hold_ms: AtomicU64::new(0),
            store_up: AtomicBool::new(true),
            repair: OnceLock::new(),
            gauges: Mutex::default(),
            draining: CancellationToken::new(),
            stop: CancellationToken::new(),
            settling: TaskTracker::new(),
            bounded: Arc::default(),
            runtime: tokio::runtime::Handle::current(),
        });
        // Weak, so that the tasks do not keep alive what only they would still use.
        tokio::spawn(heartbeat::run(
            Arc::downgrade(&inner),
            inner.bounded.clone(),
            inner.stop.clone(),
            lease.heartbeat,
        ));
        tokio::spawn(heartbeat::watch_events(
            Arc::downgrade(&inner),
            inner.store.subscribe(),
            inner.stop.clone(),
        ));
        Self(inner)
    }

    /// How the store is told keys again; the first call counts.
    pub fn set_repair(&self, repair: Repair) {
        let _ = self.0.repair.set(repair);
    }

    /// Takes a slot, waiting for one up to `want.until`. Safe to drop at any await.
    pub async fn acquire(&self, want: Want<'_>) -> Result<Lease, AcquireError> {
        waiting::acquire(&self.0, want).await
    }

    /// Settings or status changed here: waiters try again.
    pub fn wake(&self, provider: &ProviderName) {
        self.0.ring_heads(provider);
    }

    /// How many requests wait.
    pub fn waiting(&self) -> usize {
        self.0.waiting.load(Ordering::Relaxed)
    }

    /// How many leases are live.
    pub fn live(&self) -> usize {
        lock(&self.0.live).len()
    }

    /// From now on nobody is lent a key, and who waits is told so. Live leases go on being renewed.
    pub fn refuse_new(&self) {
        self.0.draining.cancel();
    }

    /// Releases what is still live in one call a store allows, waits (bounded) for what is under way,
    /// and ends the tasks.
    pub async fn shutdown(&self) {
        self.0.draining.cancel();
        let left: Vec<Arc<Live>> = lock(&self.0.live).drain().map(|(_, live)| live).collect();
        let ending = async {
            if !left.is_empty() {
                let asks: Vec<Release> = left.iter().map(|live| live.release()).collect();
                if let Err(error) = self.0.store.release(asks).await {
                    tracing::warn!(%error, leases = left.len(), "leases are left to expire");
                }
            }
            self.0.settling.close();
            self.0.settling.wait().await;
        };
        if tokio::time::timeout(LAST_CALLS, ending).await.is_err() {
            tracing::warn!("some leases could not be released in time and are left to expire");
        }
        self.0.stop.cancel();
    }
}

impl Inner {
    fn ring_heads(&self, provider: &ProviderName) {
        if let Some(line) = lock(&self.lines).get(provider) {
            line.ring_heads();
        }
    }

    fn freed(&self, provider: &ProviderName, key: &KeyId) {
        if self.waiting.load(Ordering::Acquire) == 0 {
            return;
        }
        if let Some(line) = lock(&self.lines).get_mut(provider) {
            line.freed(key);
        }
    }

    /// One log line per change of state, and the gauge.
    fn note_store(&self, error: Option<&StoreError>) {
        let up = error.is_none();
        if let Some(error) = error {
            self.metrics.store_error();
            if self.store_up.swap(false, Ordering::Relaxed) {
                tracing::warn!(%error, "the lease store fails; no key is lent until it answers");
                self.metrics.store_up(false);
            }
        } else if !self.store_up.load(Ordering::Relaxed) && !self.store_up.swap(true, Ordering::Relaxed) {
            tracing::info!("the lease store answers again");
            self.metrics.store_up(up);
        }
    }

    fn gauge(&self, provider: &ProviderName, pool: &PoolName, key: &KeyId) -> Gauge {
        let mut gauges = lock(&self.gauges);
        let known = gauges.entry((provider.clone(), key.clone()));
        known.or_insert_with(|| self.metrics.leases_active(provider, pool, key)).clone()
    }

    fn note_hold(&self, held: Duration) {
        let held = u64::try_from(held.as_millis()).unwrap_or(u64::MAX);
        let before = self.hold_ms.load(Ordering::Relaxed);
        let after = if before == 0 { held } else { before / 8 * 7 + held / 8 };
        self.hold_ms.store(after.max(1), Ordering::Relaxed);
    }

    /// When a slot of a full pool may come back: from recent hold times, 1 s to the TTL.
    fn guess(&self) -> Duration {
        let held = Duration::from_millis(self.hold_ms.load(Ordering::Relaxed));
        held.clamp(Duration::from_secs(1), self.config.ttl.max(Duration::from_secs(1)))
    }
}

/// One slot of a key, held. Released when dropped, exactly once, after its report.
pub struct Lease {
    leases: Arc<Inner>,
    live: Arc<Live>,
    gauge: Gauge,
    waited: Duration,
    probe: bool,
    wants_success: bool,
    reported: bool,
    /// A report under way, which the release waits for.
    reporting: Option<tokio::task::JoinHandle<()>>,
}

impl std::fmt::Debug for Lease {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Lease")
            .field("id", &self.live.id)
            .field("key", &self.live.key)
            .finish_non_exhaustive()
    }
}

impl Lease {
    fn begin(leases: &Arc<Inner>, live: Live, grant: &Grant, waited: Duration) -> Self {
        let live = Arc::new(live);
        let gauge = leases.gauge(&live.provider, &live.pool, &live.key);
        gauge.inc();
        lock(&leases.live).insert(live.id, live.clone());
        if live.ends_at.is_some() {
            leases.bounded.notify_one();
        }
        let (probe, wants_success) = (grant.probe, grant.wants_success);
        Self {
            leases: leases.clone(),
            live,
            gauge,
            waited,
            probe,
            wants_success,
            reported: false,
            reporting: None,
        }
    }

    /// Its id.
    pub fn id(&self) -> LeaseId {
        self.live.id
    }

    /// The key.
    pub fn key(&self) -> &KeyId {
        &self.live.key
    }

    /// The pool it was found in.
    pub fn pool(&self) -> &PoolName {
        &self.live.pool
    }

    /// Its fencing token.
    pub fn token(&self) -> FencingToken {
        self.live.token
    }

    /// Whether it is the one lease of a subject on probation.
    pub fn probe(&self) -> bool {
        self.probe
    }

    /// How long its request waited for it.
    pub fn waited(&self) -> Duration {
        self.waited
    }

    /// Tells the store what the answer said. The first call counts; it begins at once, off the caller's
    /// path, and the release comes after it. What would change nothing in the store is not sent.
    pub fn report(&mut self, outcome: Outcome, model: Option<&ModelName>, group: Option<&GroupName>) {
        if std::mem::replace(&mut self.reported, true) || !self.is_worth_telling(outcome.class) {
            return;
        }
        let ask = Report {
            provider: self.live.provider.clone(),
            key: self.live.key.clone(),
            group: group.cloned(),
            lease: self.live.id,
            token: self.live.token,
            fingerprint: self.live.fingerprint,
            model: model.cloned(),
            outcome,
        };
        self.reporting = settle::report(&self.leases, ask);
    }

    fn is_worth_telling(&self, class: Class) -> bool {
        match class {
            Class::Success => self.wants_success || self.probe,
            Class::Caller | Class::Cancelled | Class::Network => false,
            _ => true,
        }
    }

    /// Ready when the stream must end: cheap, asked before every chunk. Looks at the local deadline first,
    /// so that after a pause of the whole process no byte passes.
    pub fn poll_lost(&self, cx: &mut Context<'_>) -> Poll<Lost> {
        self.live.poll_lost(cx)
    }

    /// Resolves when the stream must end. Cancel safe.
    pub async fn lost(&self) -> Lost {
        std::future::poll_fn(|cx| self.live.poll_lost(cx)).await
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.gauge.dec();
        self.leases.note_hold(self.live.begun.elapsed());
        // Who takes it out of the registry releases it: this, or the shutdown.
        if lock(&self.leases.live).remove(&self.live.id).is_some() {
            settle::release(&self.leases, &self.live, self.reporting.take());
        }
    }
}

//! Holding one slot of a key for exactly as long as one request needs it.
//!
//! A [`Lease`] begins when the store grants the slot and ends when it is dropped: with the last byte of
//! the response body, the client's going, a panic, or the shutdown. It is released exactly once, after its
//! report, and off the caller's path; until then one renewal call a provider and interval keeps all alive.
//! A lease that the store took away, or that could not be renewed in time, says so ([`Lease::poll_lost`]).
//!
//! Who finds no slot waits, first in first out (`line.rs`), for a bounded time among a bounded number. "All
//! full" and "the store failed" are two errors everywhere; when the store fails, nothing is lent.
//!
//! Dropping an acquire at any await point is safe: it leaves the line and passes its turn on, and a slot
//! that the store may have granted meanwhile is given back.
//!
//! ```text
//! acquire.rs    the walk from a wish to a lease: try, wait, try again
//! kept.rs       why none could be had, summed up
//! line.rs       who waits and who is next, as a pure structure
//! held.rs       the lease in its holder's hand, and what its holder shares with the heartbeat
//! heartbeat.rs  renewals and local deadlines
//! settle.rs     reports, releases, and calls whose outcome nobody saw
//! want.rs       what a request wants, and its own view of the keys
//! ```

use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, RwLock};
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::sync::broadcast::error::RecvError;
use tokio::sync::{Notify, broadcast};
use tokio::time::{Instant, timeout_at};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::config::{LeaseConfig, QueueConfig};
use crate::metrics::Metrics;
use crate::model::{AppName, KeyId, LeaseId, Map, ModelName, OwnerId, PoolName, ProviderName};
use crate::store::{Reason, Release, Report, Reported, Store, StoreError, StoreEvent, StoreTime, SyncKeys};

mod acquire;
mod heartbeat;
mod held;
mod kept;
mod line;
mod settle;
mod want;

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::struct_excessive_bools, reason = "a test that cannot go on fails")]
mod fake;
#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::expect_used, reason = "a test that cannot go on fails")]
mod tests;

pub use acquire::AcquireError;
pub use held::{Lease, Lost, Watch};
pub use kept::{By, Kept};
pub use want::{Choose, Want};

use heartbeat::Beat;
use line::{Ended, Line};

/// How long [`Leases::shutdown`] waits for reports and releases.
const SHUTDOWN_PATIENCE: Duration = Duration::from_secs(5);
/// The part of it that reports may take before the leases still live are released.
const REPORT_PATIENCE: Duration = Duration::from_secs(2);

/// Makes the settings of a provider's keys, for a store that turns out not to have them.
pub type Repair = Arc<dyn Fn(&ProviderName) -> SyncKeys + Send + Sync>;

/// Hears what this room learns on its way, for those who order keys and who tell people. It is called where
/// things happen, so it must not wait.
pub trait Witness: Send + Sync {
    /// The store passed over a key for a request of this model.
    fn passed_over(&self, provider: &ProviderName, model: Option<&ModelName>, key: &KeyId, why: Reason);
    /// The store is in its grace until then: it lends nothing new.
    fn in_grace(&self, provider: &ProviderName, until: StoreTime);
    /// Live leases were registered again, which may have started the grace.
    fn registered_again(&self, provider: &ProviderName);
    /// The store took a report.
    fn reported(&self, report: &Report, found: &Reported);
    /// The store took no report in time.
    fn not_reported(&self, report: &Report);
    /// A lease ended before its request did.
    fn lost(&self, lease: &Gone);
    /// Another sidecar's lease was revoked by a person.
    fn revoked_elsewhere(&self, provider: &ProviderName, lease: LeaseId);
    /// The store answers again, or does not: why.
    fn store_answers(&self, failed: Option<&StoreError>);
}

/// A lease that ended before its request did.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Gone {
    /// Whose key.
    pub provider: ProviderName,
    /// The lease.
    pub lease: LeaseId,
    /// The key.
    pub key: KeyId,
    /// Its pool.
    pub pool: PoolName,
    /// Who had it.
    pub app: AppName,
    /// Why.
    pub why: Lost,
}

/// The lender: all leases of this process and all who wait for one. Clones share everything.
#[derive(Clone)]
pub struct Leases(Arc<Owned>);

impl std::fmt::Debug for Leases {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Leases").field("live", &self.live()).field("waiting", &self.waiting()).finish()
    }
}

/// Ends the tasks when the last clone and the last lease have gone.
struct Owned(Arc<Inner>);

impl Drop for Owned {
    fn drop(&mut self) {
        self.0.stop.cancel();
    }
}

/// What the tasks share with the callers.
struct Inner {
    store: Arc<dyn Store>,
    lease: LeaseConfig,
    queue: QueueConfig,
    owner: OwnerId,
    metrics: Metrics,
    runtime: Handle,
    stations: RwLock<Map<ProviderName, Arc<Station>>>,
    repair: RwLock<Option<Repair>>,
    witness: OnceLock<Arc<dyn Witness>>,
    waiting: AtomicUsize,
    live: AtomicUsize,
    refusing: AtomicBool,
    store_state: AtomicU8,
    /// Whose keys the store last failed to lend, and why. Until it lends them again, or is connected to anew,
    /// other calls that succeed say nothing: a right may lack for this one alone.
    lends_not: Mutex<Option<(ProviderName, StoreError)>>,
    /// The origin of [`Inner::ticks`].
    born: Instant,
    /// Wakes the heartbeat before its time.
    nudge: Notify,
    /// When the heartbeat means to wake, in ticks.
    due: AtomicU64,
    reports: TaskTracker,
    releases: TaskTracker,
    stop: CancellationToken,
}

/// All that concerns one provider.
struct Station {
    provider: ProviderName,
    line: Mutex<Line>,
    /// The length of `line`, so that the way without waiters takes no lock.
    queued: AtomicUsize,
    beat: Mutex<Beat>,
    /// How long leases were held lately, in microseconds; 0 while none has ended.
    hold: AtomicU64,
}

/// A panic under one of these locks would be a mistake of this room; to go on with what it left is better
/// than to fail every request from then on.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Leases {
    /// Spawns the heartbeat and event tasks on the current runtime; they end with [`Leases::shutdown`], or
    /// when the last clone and the last lease have gone.
    ///
    /// # Panics
    /// Outside a Tokio runtime.
    pub fn new(
        store: Arc<dyn Store>,
        lease: LeaseConfig,
        queue: QueueConfig,
        owner: OwnerId,
        metrics: Metrics,
    ) -> Self {
        let inner = Arc::new(Inner {
            store,
            lease,
            queue,
            owner,
            metrics,
            runtime: Handle::current(),
            stations: RwLock::default(),
            repair: RwLock::default(),
            witness: OnceLock::new(),
            waiting: AtomicUsize::new(0),
            live: AtomicUsize::new(0),
            refusing: AtomicBool::new(false),
            store_state: AtomicU8::new(STORE_UNKNOWN),
            lends_not: Mutex::default(),
            born: Instant::now(),
            nudge: Notify::new(),
            due: AtomicU64::new(u64::MAX),
            reports: TaskTracker::new(),
            releases: TaskTracker::new(),
            stop: CancellationToken::new(),
        });
        let events = inner.store.subscribe();
        inner.runtime.spawn(heartbeat::run(Arc::clone(&inner)));
        inner.runtime.spawn(follow(Arc::clone(&inner), events));
        Self(Arc::new(Owned(inner)))
    }

    /// What to sync, once per acquire, when the store has no settings of a key or does not know it as a
    /// member of its pool.
    pub fn set_repair(&self, repair: Repair) {
        *self.inner().repair.write().unwrap_or_else(PoisonError::into_inner) = Some(repair);
    }

    /// Who hears what is learned here; the first one counts.
    pub fn set_witness(&self, witness: Arc<dyn Witness>) {
        let _ = self.inner().witness.set(witness);
    }

    /// Settings or a status changed here: waiters try again.
    pub fn wake(&self, provider: &ProviderName) {
        if let Some(station) = self.inner().known(provider) {
            lock(&station.line).changed();
        }
    }

    /// How many requests wait for a key.
    pub fn waiting(&self) -> usize {
        self.inner().waiting.load(Ordering::Relaxed)
    }

    /// How many leases are held.
    pub fn live(&self) -> usize {
        self.inner().live.load(Ordering::Relaxed)
    }

    /// From now on newcomers, and at once all waiters, get [`AcquireError::ShuttingDown`]. Live leases are
    /// renewed as before.
    pub fn refuse_new(&self) {
        self.inner().refusing.store(true, Ordering::SeqCst);
        for station in self.inner().stations() {
            lock(&station.line).end_all(&Ended::Draining);
        }
    }

    /// Refuses new requests, stops renewing, waits for reports under way, releases all that is still live
    /// in one call and waits for the releases under way: 5 s at most, all together.
    ///
    /// Cancel safe: whatever was not released yet is released by the leases' own drops, or by the TTL.
    pub async fn shutdown(&self) {
        let inner = self.inner();
        let end = Instant::now() + SHUTDOWN_PATIENCE;
        self.refuse_new();
        inner.stop.cancel(); // first, so that no renewal follows a release
        inner.reports.close();
        let _ = timeout_at(Instant::now() + REPORT_PATIENCE, inner.reports.wait()).await;
        let left = inner.take_all();
        if !left.is_empty() {
            tracing::info!(leases = left.len(), "releasing the leases that are still live");
            let _ = timeout_at(end, settle::give_back_all(inner, &left)).await;
        }
        inner.releases.close();
        let _ = timeout_at(end, inner.releases.wait()).await;
    }

    fn inner(&self) -> &Arc<Inner> {
        &self.0.0
    }
}

impl Inner {
    fn known(&self, provider: &ProviderName) -> Option<Arc<Station>> {
        self.stations.read().unwrap_or_else(PoisonError::into_inner).get(provider).cloned()
    }

    fn station(&self, provider: &ProviderName) -> Arc<Station> {
        if let Some(station) = self.known(provider) {
            return station;
        }
        let mut stations = self.stations.write().unwrap_or_else(PoisonError::into_inner);
        let new = || Arc::new(Station::new(provider.clone()));
        Arc::clone(stations.entry(provider.clone()).or_insert_with(new))
    }

    fn stations(&self) -> Vec<Arc<Station>> {
        self.stations.read().unwrap_or_else(PoisonError::into_inner).values().cloned().collect()
    }

    /// Whatever is still live, as releases; nobody else will release these.
    fn take_all(&self) -> Vec<Release> {
        let mut left = Vec::new();
        for station in self.stations() {
            let holds = lock(&station.beat).take_all();
            left.extend(holds.iter().filter(|hold| hold.take_release()).map(|hold| hold.release(&station)));
        }
        self.live.fetch_sub(left.len(), Ordering::Relaxed);
        left
    }

    fn tell(&self, what: impl FnOnce(&dyn Witness)) {
        if let Some(witness) = self.witness.get() {
            what(&**witness);
        }
    }

    /// Monotonic time as a number that fits an atomic.
    fn ticks(&self, at: Instant) -> u64 {
        u64::try_from(at.saturating_duration_since(self.born).as_micros()).unwrap_or(u64::MAX)
    }

    fn at(&self, ticks: u64) -> Option<Instant> {
        (ticks != u64::MAX).then(|| self.born + Duration::from_micros(ticks))
    }

    /// When a lease must end that was last confirmed by a call sent at `sent`; never, where the store
    /// keeps leases as long as their holder.
    fn deadline(&self, sent: Instant) -> u64 {
        if self.store.leases_expire() {
            self.ticks(sent + self.lease.ttl.saturating_sub(self.lease.margin()))
        } else {
            u64::MAX
        }
    }

    /// The same for an answer to an acquire.
    fn saw_lending<T>(&self, provider: &ProviderName, answer: &Result<T, StoreError>) {
        match answer {
            Err(error) => *lock(&self.lends_not) = Some((provider.clone(), error.clone())),
            // What is up has failed to lend nothing, so the usual way takes no lock.
            Ok(_) if self.store_state.load(Ordering::Relaxed) == STORE_UP => return,
            Ok(_) => {
                lock(&self.lends_not).take_if(|(failed, _)| failed == provider);
            }
        }
        self.saw(answer);
    }

    /// Counts what the store's answers say about the store; one log line per change of state.
    fn saw<T>(&self, answer: &Result<T, StoreError>) {
        match answer {
            Ok(_) => {
                let known = self.store_state.load(Ordering::Relaxed) == STORE_UP;
                if known || lock(&self.lends_not).is_some() {
                    return;
                }
                self.metrics.store_up(true);
                if self.store_state.swap(STORE_UP, Ordering::Relaxed) == STORE_DOWN {
                    tracing::info!(store = self.store.kind(), "the store answers again");
                    self.tell(|witness| witness.store_answers(None));
                }
            }
            Err(error) => {
                self.metrics.store_error();
                self.metrics.store_up(false);
                if self.store_state.swap(STORE_DOWN, Ordering::Relaxed) != STORE_DOWN {
                    tracing::warn!(store = self.store.kind(), %error, "the store fails: no key is lent");
                    self.tell(|witness| witness.store_answers(Some(error)));
                }
            }
        }
    }
}

const STORE_UNKNOWN: u8 = 0;
const STORE_UP: u8 = 1;
const STORE_DOWN: u8 = 2;

impl Station {
    fn new(provider: ProviderName) -> Self {
        Self {
            provider,
            line: Mutex::default(),
            queued: AtomicUsize::new(0),
            beat: Mutex::default(),
            hold: AtomicU64::new(0),
        }
    }

    /// A slot of `key` came back.
    fn freed(&self, key: &KeyId) {
        if self.queued.load(Ordering::SeqCst) > 0 {
            lock(&self.line).freed(key);
        }
    }

    /// Fails closed: nobody waits for keys of which nothing is known.
    fn store_failed(&self, cause: &StoreError) {
        if self.queued.load(Ordering::SeqCst) > 0 {
            lock(&self.line).end_all(&Ended::Store(cause.clone()));
        }
    }

    /// Takes one lease's length into the running mean, an eighth at a time.
    fn held_for(&self, held: Duration) {
        let new = u64::try_from(held.as_micros()).unwrap_or(u64::MAX / 8).clamp(1, u64::MAX / 8);
        // A lost race between two releases costs one sample of an estimate.
        let old = self.hold.load(Ordering::Relaxed);
        let mean = if old == 0 { new } else { old - old / 8 + new / 8 };
        self.hold.store(mean.max(1), Ordering::Relaxed);
    }
}

/// Hears what other sidecars, and people, did to the store.
async fn follow(inner: Arc<Inner>, mut events: broadcast::Receiver<StoreEvent>) {
    loop {
        let event = tokio::select! {
            biased;
            () = inner.stop.cancelled() => return,
            event = events.recv() => event,
        };
        match event {
            Ok(StoreEvent::Freed(provider, key)) => {
                if let Some(station) = inner.known(&provider) {
                    station.freed(&key);
                }
            }
            Ok(StoreEvent::Changed(provider)) => {
                if let Some(station) = inner.known(&provider) {
                    lock(&station.line).changed();
                }
            }
            Ok(StoreEvent::Revoked(provider, lease)) => {
                let hold = inner.known(&provider).and_then(|station| lock(&station.beat).get(lease));
                match hold {
                    Some(hold) => hold.revoked_by_hand(&inner),
                    None => inner.tell(|witness| witness.revoked_elsewhere(&provider, lease)),
                }
            }
            Ok(StoreEvent::Resalted) => {} // whoever keeps the fingerprints hears it too
            Ok(StoreEvent::Away(cause)) => {
                inner.saw(&Err::<(), _>(cause.clone()));
                for station in inner.stations() {
                    station.store_failed(&cause);
                }
            }
            Ok(StoreEvent::Reconnected) => {
                lock(&inner.lends_not).take();
                inner.saw(&Ok(()));
                for station in inner.stations() {
                    lock(&station.beat).doubt();
                    lock(&station.line).changed();
                }
                inner.nudge.notify_one();
            }
            // What was missed is unknown, so everyone looks again; a missed revocation is told by the
            // next renewal.
            Err(RecvError::Lagged(_)) => {
                for station in inner.stations() {
                    lock(&station.line).changed();
                }
            }
            Err(RecvError::Closed) => return,
        }
    }
}

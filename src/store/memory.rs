//! The rules behind a lock, for one process.
//!
//! A lease lives as long as its holder's guard: holder and store end together, so nothing expires.
//! Every answer is ready at the first poll, and a future dropped before that has done nothing. The lock
//! is held for the operation alone, never across an await, and there is one per provider.
//!
//! Releases are not announced: the only waiters there can be are in this process, and the room that
//! releases wakes them itself.

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::{Duration, Instant, SystemTime};

use tokio::sync::broadcast;

use super::rules::{Expiry, Ledger};
use super::{
    Acquire, Acquired, Answer, Epoch, Release, Renew, Renewed, Report, Reported, Snapshot, StatusChange,
    Store, StoreEvent, StoreTime, SyncKeys, Synced,
};
use crate::model::{KeyId, LeaseId, Map, ProviderName};

/// Events a slow subscriber may be behind before it misses some and must look again.
const EVENTS: usize = 256;

/// A clock that tests turn by hand.
pub type Clock = Arc<dyn Fn() -> StoreTime + Send + Sync>;

/// Pools and leases of this process.
#[derive(Clone)]
pub struct MemoryStore(Arc<Inner>);

struct Inner {
    ledgers: RwLock<Map<ProviderName, Mutex<Ledger>>>,
    expiry: Expiry,
    clock: Clock,
    epoch: Epoch,
    salt: [u8; 32],
    events: broadcast::Sender<StoreEvent>,
}

impl MemoryStore {
    /// The store of a process of its own.
    pub fn new() -> Self {
        // Wall time for people, anchored once: a step of the wall clock must not end a cooldown.
        let began = Instant::now();
        let wall = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or(Duration::ZERO);
        Self::with(Expiry::Never, Arc::new(move || StoreTime(0).plus(wall + began.elapsed())))
    }

    /// The model of every store: leases expire, and `clock` says when it is.
    pub fn model(clock: Clock) -> Self {
        Self::with(Expiry::Ttl, clock)
    }

    fn with(expiry: Expiry, clock: Clock) -> Self {
        Self(Arc::new(Inner {
            ledgers: RwLock::default(),
            expiry,
            clock,
            epoch: Epoch(uuid::Uuid::now_v7().simple().to_string().into()),
            salt: rand::random(),
            events: broadcast::Sender::new(EVENTS),
        }))
    }

    /// One operation on the ledger of the provider that `ask` is `of`.
    fn on<A: Send + 'static, T: Send + 'static>(
        &self,
        ask: A,
        of: impl FnOnce(&A) -> &ProviderName + Send + 'static,
        act: impl FnOnce(&Inner, &A, &mut Ledger, StoreTime) -> T + Send + 'static,
    ) -> Answer<T> {
        let inner = Arc::clone(&self.0);
        Box::pin(async move { Ok(inner.act(of(&ask), |ledger, now| act(&inner, &ask, ledger, now))) })
    }
}

impl Default for MemoryStore {
    fn default() -> Self {
        Self::new()
    }
}

impl fmt::Debug for MemoryStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The salt would let a reader of the log test guesses of a secret.
        f.debug_struct("MemoryStore").field("expiry", &self.0.expiry).finish_non_exhaustive()
    }
}

/// The rules do not panic; if one did, its operation is half done at worst in one key's counts, and
/// going on with the rest serves users better than every request failing from then on.
fn locked(ledger: &Mutex<Ledger>) -> MutexGuard<'_, Ledger> {
    ledger.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The provider that is asked about with nothing else.
fn own(provider: &ProviderName) -> &ProviderName {
    provider
}

impl Inner {
    /// Acts on one provider's ledger.
    fn act<T>(&self, provider: &ProviderName, act: impl FnOnce(&mut Ledger, StoreTime) -> T) -> T {
        let act = |ledger: &Mutex<Ledger>| {
            let mut ledger = locked(ledger);
            // Read under the lock, so that the ledger never sees time go back.
            let now = (self.clock)();
            act(&mut ledger, now)
        };
        // Poisoned or not, the map is whole: the only change to it is one insert.
        let known = self.ledgers.read().unwrap_or_else(PoisonError::into_inner);
        if let Some(ledger) = known.get(provider) {
            return act(ledger);
        }
        drop(known);
        let mut ledgers = self.ledgers.write().unwrap_or_else(PoisonError::into_inner);
        let fresh = || Mutex::new(Ledger::new(provider.clone(), self.expiry, self.epoch.clone()));
        act(ledgers.entry(provider.clone()).or_insert_with(fresh))
    }

    fn tell(&self, event: StoreEvent) {
        // An error only says that nobody listens.
        let _ = self.events.send(event);
    }
}

impl Store for MemoryStore {
    fn acquire(&self, ask: Acquire) -> Answer<Acquired> {
        self.on(ask, |ask| &ask.provider, |_, ask, ledger, now| ledger.acquire(ask, now))
    }

    fn renew(&self, ask: Renew) -> Answer<Renewed> {
        self.on(ask, |ask| &ask.provider, |_, ask, ledger, now| ledger.renew(ask, now))
    }

    fn release(&self, asks: Vec<Release>) -> Answer<usize> {
        let inner = Arc::clone(&self.0);
        Box::pin(async move {
            let mut freed = 0;
            for ask in asks {
                let released = inner.act(&ask.provider, |ledger, now| ledger.release(&ask, now));
                freed += usize::from(released.freed);
                if released.wakes_all {
                    // Those who wait for its group, or its provider's probe, wait for other keys too.
                    inner.tell(StoreEvent::Changed(ask.provider));
                }
            }
            Ok(freed)
        })
    }

    fn report(&self, ask: Report) -> Answer<Reported> {
        let act = |inner: &Inner, ask: &Report, ledger: &mut Ledger, now| {
            let effect = ledger.report(ask, now);
            if effect.lifted {
                inner.tell(StoreEvent::Changed(ask.provider.clone()));
            }
            effect.reported
        };
        self.on(ask, |ask| &ask.provider, act)
    }

    fn sync_keys(&self, ask: SyncKeys) -> Answer<Synced> {
        let act = |inner: &Inner, ask: &SyncKeys, ledger: &mut Ledger, now| {
            let found = ledger.sync_keys(ask, now);
            inner.tell(StoreEvent::Changed(ask.provider.clone()));
            found
        };
        self.on(ask, |ask| &ask.provider, act)
    }

    fn set_status(&self, provider: ProviderName, key: KeyId, change: StatusChange) -> Answer<bool> {
        self.on(provider, own, move |inner, provider, ledger, now| {
            let known = ledger.set_status(&key, &change, now);
            if known {
                inner.tell(StoreEvent::Changed(provider.clone()));
            }
            known
        })
    }

    fn revoke(&self, provider: ProviderName, lease: LeaseId) -> Answer<bool> {
        self.on(provider, own, move |inner, provider, ledger, now| {
            let known = ledger.revoke(lease, now);
            if known {
                inner.tell(StoreEvent::Revoked(provider.clone(), lease));
            }
            known
        })
    }

    fn snapshot(&self, provider: ProviderName) -> Answer<Snapshot> {
        self.on(provider, own, |_, _, ledger, now| ledger.snapshot(now))
    }

    fn subscribe(&self) -> broadcast::Receiver<StoreEvent> {
        self.0.events.subscribe()
    }

    fn now(&self) -> StoreTime {
        (self.0.clock)()
    }

    fn salt(&self, _known: Option<[u8; 32]>) -> Answer<[u8; 32]> {
        Box::pin(std::future::ready(Ok(self.0.salt)))
    }

    fn reconcile(&self, provider: ProviderName) -> Answer<u64> {
        self.on(provider, own, |_, _, ledger, now| {
            u64::try_from(ledger.forget_unseen(now)).unwrap_or(u64::MAX)
        })
    }

    fn leases_expire(&self) -> bool {
        self.0.expiry == Expiry::Ttl
    }

    fn ping(&self) -> Answer<()> {
        Box::pin(std::future::ready(Ok(())))
    }

    fn kind(&self) -> &'static str {
        "memory"
    }
}

//! A file that the processes of one host share.
//!
//! The rules are those of `memory:`, run on copies of the ledgers; what they change is written as rows in
//! the same transaction that holds the write lock, so that every process decides on what is true at that
//! moment. One thread owns the file (`writer.rs`); callers wait for its answer without holding a worker.
//!
//! Leases end on the clock that the kernel started at boot, so no step of the wall clock ends or prolongs
//! one, and another boot means that all holders are gone. They end by what their row says and not by its
//! deletion, since on a full disk nothing can be deleted. Cooldowns outlive a restart and a boot.
//!
//! The file holds fingerprints and their salt, and never a secret.

use std::fmt;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::broadcast;

use super::{
    Acquire, Acquired, Answer, Release, Renew, RenewAnswer, Renewed, Report, Reported, Snapshot,
    StatusChange, Store, StoreError, StoreEvent, StoreTime, SyncKeys, Synced,
};
use crate::model::{KeyId, LeaseId, ProviderName};

mod book;
mod calls;
mod clock;
mod errors;
mod place;
mod reply;
mod rows;
mod schema;
mod writer;

pub use clock::Clock;
pub use errors::OpenError;

use book::Book;
use calls::{Caller, NotTaken, WAITING};
use clock::StoreClock;
use errors::Fault;
use reply::Bell;
use writer::{Call, Writer};

/// How long a call waits for a lock that another process holds.
const PATIENCE: Duration = Duration::from_secs(2);
/// Events a slow subscriber may be behind before it misses some and must look again.
const EVENTS: usize = 1024;

/// Pools and leases in a file.
#[derive(Clone)]
pub struct SqliteStore(Arc<Inner>);

struct Inner {
    path: Arc<Path>,
    clock: StoreClock,
    calls: Caller,
    bell: Arc<Bell>,
    events: broadcast::Sender<StoreEvent>,
}

impl SqliteStore {
    /// The store in this file, which is made where there is none. Blocks for as long as the disk takes,
    /// and at most some seconds where others hold locks.
    pub fn open(path: &Path) -> Result<Self, OpenError> {
        Self::open_with(path, Clock::of_this_host()?)
    }

    /// The same by another clock, for tests.
    pub fn open_with(path: &Path, clock: Clock) -> Result<Self, OpenError> {
        let clock = StoreClock::new(clock);
        // SQLite keeps its other files beside what a link points to, and so must we look for them there.
        let path = std::fs::canonicalize(path).or_else(|_| std::path::absolute(path));
        let path = path.map_err(|cause| OpenError::NoPath { cause })?;
        let (conn, files) = schema::open(&path, &clock, None)?;
        let path: Arc<Path> = path.into();
        let (calls, taker) = calls::list();
        let events = broadcast::Sender::new(EVENTS);
        let bell = Arc::new(Bell::default());
        let writer = Writer {
            path: Arc::clone(&path),
            clock: clock.clone(),
            events: events.clone(),
            calls: taker,
            bell: Arc::clone(&bell),
        };
        // Detached: it ends once the last handle and the last call under way are gone.
        std::thread::Builder::new()
            .name("lessor-sqlite".into())
            .spawn(move || writer.run(conn, files))
            .map_err(OpenError::NoThread)?;
        Ok(Self(Arc::new(Inner { path, clock, calls, bell, events })))
    }

    /// One call. Nothing happens before its first poll; from then on it runs whether or not its caller
    /// stays, save where it `dies_with_caller` before it began.
    fn call<T: Send + 'static>(
        &self,
        dies_with_caller: bool,
        act: impl FnOnce(&mut Book<'_>) -> Result<T, Fault> + Send + 'static,
    ) -> Answer<T> {
        let inner = Arc::clone(&self.0);
        Box::pin(async move {
            let ended = || StoreError::Unavailable("its thread has ended; restart lessor".into());
            let (reply, answer) = reply::reply(&inner.bell);
            let call = Call {
                arrived: Instant::now(),
                dies_with_caller,
                act: Some(act),
                found: None,
                file: Arc::clone(&inner.path),
                reply,
            };
            let first = inner.calls.call(Box::new(call)).map_err(|why| match why {
                NotTaken::Full => StoreError::Unavailable(format!(
                    "{WAITING} calls wait for {} already",
                    inner.path.display()
                )),
                NotTaken::Ended => ended(),
            })?;
            if first {
                let wakes = Wakes(&inner.calls);
                tokio::task::yield_now().await;
                drop(wakes);
            }
            drop(inner);
            answer.await.unwrap_or_else(|| Err(ended()))
        })
    }
}

/// Wakes the thread when it is dropped: its caller's turn is over, or its caller has gone.
struct Wakes<'a>(&'a Caller);

impl Drop for Wakes<'_> {
    fn drop(&mut self) {
        self.0.wake();
    }
}

impl fmt::Debug for SqliteStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SqliteStore").field("path", &self.0.path).finish_non_exhaustive()
    }
}

impl Store for SqliteStore {
    fn acquire(&self, ask: Acquire) -> Answer<Acquired> {
        self.call(true, move |book| {
            let (ledger, now) = book.ledger(&ask.provider)?;
            let acquired = ledger.acquire(&ask, now);
            match &acquired {
                Acquired::Granted(grant) => book.holds_until(grant.expires_at),
                Acquired::Refused(refusal) if refusal.any_full() || refusal.any_cooling() => {
                    book.somebody_waits();
                }
                Acquired::Refused(_) | Acquired::Late => {}
            }
            Ok(acquired)
        })
    }

    fn renew(&self, ask: Renew) -> Answer<Renewed> {
        self.call(false, move |book| {
            let (ledger, now) = book.ledger(&ask.provider)?;
            let renewed = ledger.renew(&ask, now);
            let ends = renewed.answers.iter().filter_map(|answer| match answer {
                RenewAnswer::Renewed(end) => Some(*end),
                RenewAnswer::Lost | RenewAnswer::Late => None,
            });
            if let Some(end) = ends.max() {
                book.holds_until(end);
            }
            Ok(renewed)
        })
    }

    fn release(&self, asks: Vec<Release>) -> Answer<usize> {
        self.call(false, move |book| {
            let mut freed = 0;
            for ask in asks {
                let (ledger, now) = book.ledger(&ask.provider)?;
                let released = ledger.release(&ask, now);
                freed += usize::from(released.freed);
                if released.wakes_all {
                    // Those who wait for its group, or its provider's probe, wait for other keys too.
                    book.tell(StoreEvent::Changed(ask.provider));
                }
            }
            Ok(freed)
        })
    }

    fn report(&self, ask: Report) -> Answer<Reported> {
        self.call(false, move |book| {
            let (ledger, now) = book.ledger(&ask.provider)?;
            let effect = ledger.report(&ask, now);
            if effect.lifted {
                book.tell(StoreEvent::Changed(ask.provider));
            }
            Ok(effect.reported)
        })
    }

    fn sync_keys(&self, ask: SyncKeys) -> Answer<Synced> {
        self.call(false, move |book| {
            let (ledger, now) = book.ledger(&ask.provider)?;
            let found = ledger.sync_keys(&ask, now);
            book.tell(StoreEvent::Changed(ask.provider));
            Ok(found)
        })
    }

    fn set_status(&self, provider: ProviderName, key: KeyId, change: StatusChange) -> Answer<bool> {
        self.call(false, move |book| {
            let (ledger, now) = book.ledger(&provider)?;
            let known = ledger.set_status(&key, &change, now);
            if known {
                book.tell(StoreEvent::Changed(provider));
            }
            Ok(known)
        })
    }

    fn revoke(&self, provider: ProviderName, lease: LeaseId) -> Answer<bool> {
        self.call(false, move |book| {
            let (ledger, now) = book.ledger(&provider)?;
            let known = ledger.revoke(lease, now);
            if known {
                book.tell(StoreEvent::Revoked(provider, lease));
            }
            Ok(known)
        })
    }

    fn snapshot(&self, provider: ProviderName) -> Answer<Snapshot> {
        self.call(true, move |book| {
            let (ledger, now) = book.ledger(&provider)?;
            Ok(ledger.snapshot(now))
        })
    }

    fn subscribe(&self) -> broadcast::Receiver<StoreEvent> {
        self.0.events.subscribe()
    }

    fn now(&self) -> StoreTime {
        self.0.clock.now()
    }

    fn salt(&self, known: Option<[u8; 32]>) -> Answer<[u8; 32]> {
        self.call(false, move |book| book.salt(known))
    }

    fn reconcile(&self, provider: ProviderName) -> Answer<u64> {
        self.call(false, move |book| book.reconcile(&provider))
    }

    fn leases_expire(&self) -> bool {
        true
    }

    /// Whether the lock can be had, which every call needs.
    fn ping(&self) -> Answer<()> {
        self.call(true, |_| Ok(()))
    }

    fn kind(&self) -> &'static str {
        "sqlite"
    }
}

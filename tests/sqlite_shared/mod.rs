//! Several processes on one file, and the rules' own model as the measure of what they see.

use std::collections::HashMap;
use std::fmt::Debug;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use lessor::model::{KeyId, LeaseId, ProviderName};
use lessor::store::memory::MemoryStore;
use lessor::store::sqlite::SqliteStore;
use lessor::store::{
    Acquire, Acquired, Answer, Epoch, Release, Renew, Renewed, Report, Reported, Snapshot, StatusChange,
    Store, StoreEvent, StoreTime, SyncKeys, Synced,
};
use proptest::prelude::*;
use tokio::sync::broadcast::Receiver;

use super::store_world::{self, Bench, now, step};
use super::{Host, Place};

const HANDLES: usize = 3;

/// Several handles on one file, and a memory store that is told the same: each answer must be the same,
/// save that the two name their lives differently.
#[derive(Clone)]
struct Twin {
    handles: Arc<Mutex<Vec<SqliteStore>>>,
    turn: Arc<AtomicUsize>,
    model: MemoryStore,
    /// The model's name of each life of the file.
    lives: Arc<Mutex<HashMap<Arc<str>, Epoch>>>,
}

impl Twin {
    fn next(&self) -> SqliteStore {
        let handles = self.handles.lock().unwrap_or_else(PoisonError::into_inner);
        handles[self.turn.fetch_add(1, Ordering::SeqCst) % handles.len()].clone()
    }

    fn met(&self, epoch: &mut Epoch, other: &Epoch) {
        let known =
            self.lives.lock().unwrap().entry(Arc::clone(&epoch.0)).or_insert_with(|| other.clone()).clone();
        assert_eq!(known, *other);
        *epoch = known;
    }
}

/// The file's answer, which must be the model's once `same` has made alike what may differ.
fn both<T: Clone + Debug + Send + 'static>(
    file: Answer<T>,
    model: Answer<T>,
    same: impl FnOnce(&mut T, &mut T) + Send + 'static,
) -> Answer<T> {
    Box::pin(async move {
        let (answer, mut by_model) = (file.await?, model.await?);
        let mut by_file = answer.clone();
        same(&mut by_file, &mut by_model);
        assert_eq!(format!("{by_file:?}"), format!("{by_model:?}"));
        Ok(answer)
    })
}

impl Store for Twin {
    fn acquire(&self, ask: Acquire) -> Answer<Acquired> {
        let twin = self.clone();
        both(self.next().acquire(ask.clone()), self.model.acquire(ask), move |file, model| {
            if let (Acquired::Granted(file), Acquired::Granted(model)) = (file, model) {
                twin.met(&mut file.epoch, &model.epoch);
            }
        })
    }
    fn renew(&self, ask: Renew) -> Answer<Renewed> {
        let twin = self.clone();
        let known = |epoch: &Epoch| self.lives.lock().unwrap().get(&epoch.0).cloned();
        let translated = ask.epoch.as_ref().map(|epoch| known(epoch).unwrap_or_else(|| epoch.clone()));
        let for_model = Renew { epoch: translated, ..ask.clone() };
        both(self.next().renew(ask), self.model.renew(for_model), move |file, model| {
            twin.met(&mut file.epoch, &model.epoch);
        })
    }
    fn release(&self, asks: Vec<Release>) -> Answer<usize> {
        both(self.next().release(asks.clone()), self.model.release(asks), |_, _| {})
    }
    fn report(&self, ask: Report) -> Answer<Reported> {
        both(self.next().report(ask.clone()), self.model.report(ask), |_, _| {})
    }
    fn sync_keys(&self, ask: SyncKeys) -> Answer<Synced> {
        both(self.next().sync_keys(ask.clone()), self.model.sync_keys(ask), |file, model| {
            // pairs come in no order
            file.same_secret.sort();
            model.same_secret.sort();
        })
    }
    fn set_status(&self, of: ProviderName, key: KeyId, change: StatusChange) -> Answer<bool> {
        let model = self.model.set_status(of.clone(), key.clone(), change.clone());
        both(self.next().set_status(of, key, change), model, |_, _| {})
    }
    fn revoke(&self, of: ProviderName, lease: LeaseId) -> Answer<bool> {
        both(self.next().revoke(of.clone(), lease), self.model.revoke(of, lease), |_, _| {})
    }
    fn snapshot(&self, of: ProviderName) -> Answer<Snapshot> {
        both(self.next().snapshot(of.clone()), self.model.snapshot(of), |_, _| {})
    }
    /// From here on one process alone speaks: what others do is heard only by those who wait or hold.
    fn subscribe(&self) -> Receiver<StoreEvent> {
        self.handles.lock().unwrap().truncate(1);
        self.next().subscribe()
    }
    fn now(&self) -> StoreTime {
        self.next().now()
    }
    fn salt(&self, known: Option<[u8; 32]>) -> Answer<[u8; 32]> {
        self.next().salt(known)
    }
    fn reconcile(&self, of: ProviderName) -> Answer<u64> {
        self.next().reconcile(of)
    }
    fn leases_expire(&self) -> bool {
        true
    }
    fn ping(&self) -> Answer<()> {
        self.next().ping()
    }
    fn kind(&self) -> &'static str {
        "twin"
    }
}

struct Shared {
    place: Place,
    host: Host,
    now: Arc<AtomicU64>,
    twin: Twin,
}

impl Bench for Shared {
    fn fresh(now: &Arc<AtomicU64>) -> Self {
        let (place, mut host) = (Place::new(), Host::new());
        // one clock: the file's offset is then 0, and its times are the model's
        (host.since_boot, host.wall) = (Arc::clone(now), Arc::clone(now));
        let handles = (0..HANDLES).map(|_| host.open(&place.file)).collect();
        let twin = Twin {
            handles: Arc::new(Mutex::new(handles)),
            turn: Arc::default(),
            model: model(now),
            lives: Arc::default(),
        };
        Self { place, host, now: Arc::clone(now), twin }
    }

    fn store(&self) -> Arc<dyn Store> {
        Arc::new(self.twin.clone())
    }

    fn lose_data(&mut self) {
        self.place.delete();
        self.twin.model = model(&self.now);
    }

    fn crash(&mut self) {
        let mut handles = self.twin.handles.lock().unwrap();
        handles.remove(0);
        handles.push(self.host.open(&self.place.file));
    }

    /// What each process knows is what the file says, in every field.
    fn check(&self) {
        let handles = self.twin.handles.lock().unwrap().clone();
        for handle in handles {
            assert_eq!(now(handle.reconcile(store_world::provider())), 0, "the file and a copy of it differ");
        }
    }
}

fn model(now: &Arc<AtomicU64>) -> MemoryStore {
    let now = Arc::clone(now);
    MemoryStore::model(Arc::new(move || StoreTime(now.load(Ordering::SeqCst))))
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn processes_that_share_a_file_answer_as_one_memory_store_would_and_write_all_they_change(
        steps in prop::collection::vec(step(), 1..100)
    ) {
        let mut world = store_world::World::<Shared>::new();
        for step in &steps {
            world.step(step);
            world.check();
        }
    }
}

impl super::store_contract::Backend for Shared {
    const TTL: Duration = Duration::from_secs(2);
    const SLACK: Duration = Duration::ZERO;

    async fn fresh() -> Self {
        <Self as Bench>::fresh(&Arc::new(AtomicU64::new(1_800_000_000_000)))
    }

    fn store(&self) -> Arc<dyn Store> {
        Bench::store(self)
    }

    async fn pass(&self, time: Duration) -> bool {
        self.now.fetch_add(u64::try_from(time.as_millis()).unwrap(), Ordering::SeqCst);
        true
    }

    async fn lose_data(&mut self) -> bool {
        Bench::lose_data(self);
        true
    }
}

/// The contract where each call is made by another process than the one before, so that none can lean on
/// what was not written; and each answer is the model's.
mod by_several_processes {
    use super::super::store_contract;
    use super::Shared;
    store_contract!(Shared);
}

//! A store held against the rules' own model: every call goes to both, and every answer must be the same.
// Every test binary that takes this module in uses its part, and none exports anything.
#![allow(unreachable_pub, dead_code, clippy::unwrap_used)]

use std::collections::HashMap;
use std::fmt::Debug;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use lessor::model::{KeyId, LeaseId, ProviderName};
use lessor::store::memory::MemoryStore;
use lessor::store::{
    Acquire, Acquired, Answer, Epoch, Release, Renew, Renewed, Report, Reported, Snapshot, StatusChange,
    Store, StoreEvent, StoreTime, SyncKeys, Synced,
};
use tokio::sync::broadcast::Receiver;

/// The rules by this clock.
pub fn model(now: &Arc<AtomicU64>) -> MemoryStore {
    let now = Arc::clone(now);
    MemoryStore::model(Arc::new(move || StoreTime(now.load(Ordering::SeqCst))))
}

/// Several handles on one store, and a memory store that is told the same: each answer must be the same,
/// save that the two name their lives differently.
#[derive(Clone)]
pub struct Twin {
    pub handles: Arc<Mutex<Vec<Arc<dyn Store>>>>,
    turn: Arc<AtomicUsize>,
    pub model: MemoryStore,
    /// The model's name of each life of the data.
    lives: Arc<Mutex<HashMap<Arc<str>, Epoch>>>,
    alone: Arc<AtomicBool>,
}

impl Twin {
    pub fn of(handles: Vec<Arc<dyn Store>>, now: &Arc<AtomicU64>) -> Self {
        let handles = Arc::new(Mutex::new(handles));
        Self {
            handles,
            turn: Arc::default(),
            model: model(now),
            lives: Arc::default(),
            alone: Arc::default(),
        }
    }

    /// From here on the store answers alone: the model can answer alike only calls it hears in the store's
    /// own order, which calls made at once do not tell.
    pub fn without_model(&self) {
        self.alone.store(true, Ordering::SeqCst);
    }

    fn next(&self) -> Arc<dyn Store> {
        let handles = self.handles.lock().unwrap_or_else(PoisonError::into_inner);
        handles[self.turn.fetch_add(1, Ordering::SeqCst) % handles.len()].clone()
    }

    fn met(&self, epoch: &mut Epoch, other: &Epoch) {
        let known =
            self.lives.lock().unwrap().entry(Arc::clone(&epoch.0)).or_insert_with(|| other.clone()).clone();
        assert_eq!(known, *other);
        *epoch = known;
    }

    /// The store's answer, which must be the model's once `same` has made alike what may differ.
    fn both<T: Clone + Debug + Send + 'static>(
        &self,
        store: Answer<T>,
        model: Answer<T>,
        same: impl FnOnce(&mut T, &mut T) + Send + 'static,
    ) -> Answer<T> {
        if self.alone.load(Ordering::SeqCst) {
            return store;
        }
        Box::pin(async move {
            let (answer, mut by_model) = (store.await?, model.await?);
            let mut by_store = answer.clone();
            same(&mut by_store, &mut by_model);
            assert_eq!(format!("{by_store:?}"), format!("{by_model:?}"));
            Ok(answer)
        })
    }
}

impl Store for Twin {
    fn acquire(&self, ask: Acquire) -> Answer<Acquired> {
        let twin = self.clone();
        self.both(self.next().acquire(ask.clone()), self.model.acquire(ask), move |file, model| {
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
        self.both(self.next().renew(ask), self.model.renew(for_model), move |file, model| {
            twin.met(&mut file.epoch, &model.epoch);
        })
    }
    fn release(&self, asks: Vec<Release>) -> Answer<usize> {
        self.both(self.next().release(asks.clone()), self.model.release(asks), |_, _| {})
    }
    fn report(&self, ask: Report) -> Answer<Reported> {
        self.both(self.next().report(ask.clone()), self.model.report(ask), |_, _| {})
    }
    fn sync_keys(&self, ask: SyncKeys) -> Answer<Synced> {
        self.both(self.next().sync_keys(ask.clone()), self.model.sync_keys(ask), |store, model| {
            // of the keys that have one secret a store may name fewer pairs, but none that is none
            assert!(store.same_secret.iter().all(|pair| model.same_secret.contains(pair)));
            assert_eq!(store.same_secret.is_empty(), model.same_secret.is_empty());
            store.same_secret.clear();
            model.same_secret.clear();
        })
    }
    fn set_status(&self, of: ProviderName, key: KeyId, change: StatusChange) -> Answer<bool> {
        let model = self.model.set_status(of.clone(), key.clone(), change.clone());
        self.both(self.next().set_status(of, key, change), model, |_, _| {})
    }
    fn revoke(&self, of: ProviderName, lease: LeaseId) -> Answer<bool> {
        self.both(self.next().revoke(of.clone(), lease), self.model.revoke(of, lease), |_, _| {})
    }
    fn snapshot(&self, of: ProviderName) -> Answer<Snapshot> {
        self.both(self.next().snapshot(of.clone()), self.model.snapshot(of), |_, _| {})
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

//! Redis held against the rules' own model: the same random steps, the same answers.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::pedantic, missing_docs, unreachable_pub)]

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use lessor::config::{HostPort, RedisConfig, Topology};
use lessor::model::{KeyId, LeaseId, ProviderName};
use lessor::store::redis::RedisStore;
use lessor::store::{
    Acquire, Acquired, Answer, Release, Renew, Renewed, Report, Reported, Snapshot, StatusChange, Store,
    StoreEvent, StoreTime, SyncKeys, Synced,
};
use proptest::prelude::*;
use store_twin::{Twin, model};
use store_world::{Bench, World, step};
use support::redis::Redis;
use tokio::runtime::Runtime;
use tokio::sync::broadcast::Receiver;

mod store_twin;
mod store_world;
mod support;

const HANDLES: usize = 3;

/// The scripts read their time from a key, which is written before each call.
const TURNED_BY_HAND: &str = r#"
local NOW = tonumber(redis.call("GET", "clock"))
local NOW_US = NOW * 1000
"#;

/// One server for all cases, on threads of its own, since the steps are made on one that does not drive
/// sockets.
struct Server {
    runtime: Runtime,
    redis: Redis,
}

impl Server {
    fn the_one() -> &'static Self {
        static ONE: std::sync::OnceLock<Server> = std::sync::OnceLock::new();
        ONE.get_or_init(|| {
            let runtime =
                tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
            let redis = runtime.block_on(Redis::start());
            Self { runtime, redis }
        })
    }

    fn empty(&self, now: u64) {
        self.runtime.block_on(async {
            self.redis.command(&["FLUSHALL"]).await;
            self.redis.command(&["SET", "clock", &now.to_string()]).await;
        });
    }
}

/// A handle whose calls run on the server's threads, by the test's clock.
#[derive(Clone)]
struct ByClock {
    store: RedisStore,
    now: Arc<AtomicU64>,
}

impl ByClock {
    fn open(now: &Arc<AtomicU64>) -> Self {
        let server = Server::the_one();
        let addr = server.redis.addr();
        let config =
            RedisConfig::plain(Topology::Single(HostPort { host: addr.ip().to_string(), port: addr.port() }));
        let opened = server.runtime.block_on(RedisStore::open_with_clock(&config, "lessor", TURNED_BY_HAND));
        Self { store: opened.unwrap(), now: Arc::clone(now) }
    }

    fn call<T: Send + 'static>(&self, call: impl FnOnce(&RedisStore) -> Answer<T>) -> Answer<T> {
        let (answer, now) = (call(&self.store), self.now.load(Ordering::SeqCst).to_string());
        let server = Server::the_one();
        let running = server.runtime.spawn(async move {
            server.redis.command(&["SET", "clock", &now]).await;
            answer.await
        });
        Box::pin(async move { running.await.unwrap() })
    }
}

impl Store for ByClock {
    fn acquire(&self, ask: Acquire) -> Answer<Acquired> {
        self.call(|store| store.acquire(ask))
    }
    fn renew(&self, ask: Renew) -> Answer<Renewed> {
        self.call(|store| store.renew(ask))
    }
    fn release(&self, asks: Vec<Release>) -> Answer<usize> {
        self.call(|store| store.release(asks))
    }
    fn report(&self, ask: Report) -> Answer<Reported> {
        self.call(|store| store.report(ask))
    }
    fn sync_keys(&self, ask: SyncKeys) -> Answer<Synced> {
        self.call(|store| store.sync_keys(ask))
    }
    fn set_status(&self, of: ProviderName, key: KeyId, change: StatusChange) -> Answer<bool> {
        self.call(|store| store.set_status(of, key, change))
    }
    fn revoke(&self, of: ProviderName, lease: LeaseId) -> Answer<bool> {
        self.call(|store| store.revoke(of, lease))
    }
    fn snapshot(&self, of: ProviderName) -> Answer<Snapshot> {
        self.call(|store| store.snapshot(of))
    }
    fn subscribe(&self) -> Receiver<StoreEvent> {
        self.store.subscribe()
    }
    fn now(&self) -> StoreTime {
        StoreTime(self.now.load(Ordering::SeqCst))
    }
    fn salt(&self, known: Option<[u8; 32]>) -> Answer<[u8; 32]> {
        self.call(|store| store.salt(known))
    }
    fn reconcile(&self, of: ProviderName) -> Answer<u64> {
        self.call(|store| store.reconcile(of))
    }
    fn leases_expire(&self) -> bool {
        true
    }
    fn ping(&self) -> Answer<()> {
        self.call(|store| store.ping())
    }
    fn kind(&self) -> &'static str {
        "redis"
    }
}

struct Served {
    now: Arc<AtomicU64>,
    twin: Twin,
}

impl Bench for Served {
    fn fresh(now: &Arc<AtomicU64>) -> Self {
        Server::the_one().empty(now.load(Ordering::SeqCst));
        let handles = (0..HANDLES).map(|_| Arc::new(ByClock::open(now)) as Arc<dyn Store>).collect();
        Self { now: Arc::clone(now), twin: Twin::of(handles, now) }
    }

    fn store(&self) -> Arc<dyn Store> {
        Arc::new(self.twin.clone())
    }

    fn lose_data(&mut self) {
        Server::the_one().empty(self.now.load(Ordering::SeqCst));
        self.twin.model = model(&self.now);
    }

    fn crash(&mut self) {
        let mut handles = self.twin.handles.lock().unwrap();
        handles.remove(0);
        handles.push(Arc::new(ByClock::open(&self.now)));
    }

    /// There is nothing to repair, ever.
    fn check(&self) {
        let handle = self.twin.handles.lock().unwrap()[0].clone();
        assert_eq!(store_world::now(handle.reconcile(store_world::provider())), 0);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn sidecars_on_one_redis_are_answered_as_one_memory_store_would_answer(
        steps in prop::collection::vec(step(), 1..100)
    ) {
        let mut world = World::<Served>::new();
        for step in &steps {
            world.step(step);
        }
        world.check();
    }
}

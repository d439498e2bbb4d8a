//! The memory store: the contract on its model, and what holds in production alone.
#![allow(clippy::unwrap_used)]

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use lessor::model::{Class, Scope};
use lessor::store::memory::MemoryStore;
use lessor::store::{Acquire, Acquired, Reason, RenewAnswer, StatusChange, Store, StoreEvent, StoreTime};
use store_contract::{Backend, World, provider, says, says_of, secret};

mod store_contract;

/// The rules on a clock that stands still between steps.
struct Model {
    store: MemoryStore,
    now: Arc<AtomicU64>,
}

fn model(now: &Arc<AtomicU64>) -> MemoryStore {
    let now = Arc::clone(now);
    MemoryStore::model(Arc::new(move || StoreTime(now.load(Ordering::SeqCst))))
}

impl Backend for Model {
    const TTL: Duration = Duration::from_secs(2);
    const SLACK: Duration = Duration::ZERO;

    async fn fresh() -> Self {
        let now = Arc::new(AtomicU64::new(1_800_000_000_000));
        Self { store: model(&now), now }
    }

    fn store(&self) -> Arc<dyn Store> {
        Arc::new(self.store.clone())
    }

    async fn pass(&self, time: Duration) -> bool {
        self.now.fetch_add(u64::try_from(time.as_millis()).unwrap(), Ordering::SeqCst);
        true
    }

    async fn lose_data(&mut self) -> bool {
        self.store = model(&self.now);
        true
    }
}

store_contract!(Model);

fn in_production() -> impl store_contract::Backend {
    struct Production(MemoryStore);
    impl Backend for Production {
        const TTL: Duration = Duration::from_millis(1);
        const SLACK: Duration = Duration::from_secs(1);
        async fn fresh() -> Self {
            Self(MemoryStore::new())
        }
        fn store(&self) -> Arc<dyn Store> {
            Arc::new(self.0.clone())
        }
        async fn pass(&self, time: Duration) -> bool {
            tokio::time::sleep(time).await;
            true
        }
        async fn lose_data(&mut self) -> bool {
            false
        }
    }
    Production(MemoryStore::new())
}

#[tokio::test]
async fn a_lease_of_this_process_lives_until_it_is_released() {
    let world = World::of(in_production());
    assert!(!world.store().leases_expire());
    world.keys([("a", 1)]).await;
    let held = world.lend("a").await;
    assert_eq!(held.grant.expires_at, StoreTime::NEVER);
    assert!(world.backend.pass(Duration::from_millis(20)).await);
    let refusal = world.refuse(world.ask(["a"])).await;
    assert_eq!((refusal.reasons[0].1, refusal.lease_end), (Reason::Full, None));
    assert_eq!(world.renew(world.renewal(&[&held])).await, [RenewAnswer::Renewed(StoreTime::NEVER)]);
    let snapshot = world.store().snapshot(provider()).await.unwrap();
    assert_eq!(snapshot.leases[0].expires_at_ms, None);
    assert_eq!(world.release(&held).await, 1);
    assert!(world.lends_key("a").await);
}

#[tokio::test]
async fn a_release_is_not_announced_unless_it_ends_a_probe_that_others_wait_for() {
    let world = World::of(Model::fresh().await);
    world.keys([("a", 4)]).await;
    let mut events = world.store().subscribe();
    world.lend_and_report("a", says_of(Class::Quota, Scope::ProviderModel, Duration::from_secs(1))).await;
    assert!(events.try_recv().is_err());
    assert!(world.backend.pass(Duration::from_secs(1)).await);
    let probe = world.lend("a").await;
    world.release(&probe).await;
    assert!(matches!(events.try_recv(), Ok(StoreEvent::Changed(_))));
}

#[tokio::test]
async fn an_answer_dropped_before_its_first_poll_has_done_nothing() {
    let world = World::of(Model::fresh().await);
    world.keys([("a", 1)]).await;
    drop(world.store().acquire(world.ask(["a"])));
    assert_eq!(world.in_use("a").await, 0);
}

#[tokio::test]
async fn the_present_secrets_rest_is_never_pushed_out_by_those_of_others() {
    let world = World::of(Model::fresh().await);
    world.keys([("a", 9)]).await;
    world.lend_and_report("a", says(Class::Invalid)).await;
    for number in 2..9 {
        assert!(world.backend.pass(Duration::from_secs(1)).await);
        world
            .set(
                "a",
                StatusChange::CheckedBad {
                    secret: secret(number),
                    status: Some(401),
                    code: Some("no_key".into()),
                },
            )
            .await;
    }
    let why_not = async |number| {
        let mut ask = world.ask(["a"]);
        Arc::make_mut(&mut ask.candidates)[0].fingerprint = secret(number);
        world.acquire(&ask).await
    };
    assert!(matches!(why_not(1).await, Acquired::Refused(_)));
    assert!(matches!(why_not(8).await, Acquired::Refused(_)));
    assert!(matches!(why_not(5).await, Acquired::Granted(_)));
}

#[tokio::test]
async fn a_key_that_nobody_names_for_a_day_goes_once_it_holds_no_lease() {
    let day = Duration::from_hours(24);
    let world = World::of(Model::fresh().await);
    world.keys([("a", 1), ("b", 1)]).await;
    assert!(world.backend.pass(day).await);
    let held = world.take(Acquire { ttl: day * 9, ..world.ask(["b"]) }).await;
    assert!(world.backend.pass(day).await);
    world.keys([("c", 1)]).await;
    let ids = async || {
        let keys = world.store().snapshot(provider()).await.unwrap().keys;
        keys.into_iter().map(|view| view.id.to_string()).collect::<Vec<_>>()
    };
    assert_eq!(ids().await, ["b", "c"]);
    world.release(&held).await;
    world.keys([("c", 1)]).await;
    assert_eq!(ids().await, ["c"]);
}

#[tokio::test]
async fn a_panic_under_the_lock_does_not_stop_later_calls() {
    let broken = Arc::new(AtomicU64::new(0));
    let clock = Arc::clone(&broken);
    let store = MemoryStore::model(Arc::new(move || {
        assert_eq!(clock.load(Ordering::SeqCst), 0, "the clock broke");
        StoreTime(1)
    }));
    broken.store(1, Ordering::SeqCst);
    assert!(tokio::spawn(store.snapshot(provider())).await.is_err());
    broken.store(0, Ordering::SeqCst);
    assert!(store.snapshot(provider()).await.is_ok());
}

#[test]
fn the_store_prints_without_its_salt() {
    assert_eq!(format!("{:?}", MemoryStore::new()), "MemoryStore { expiry: Never, .. }");
}

#[tokio::test]
async fn models_that_callers_make_up_push_out_nothing_that_matters() {
    let world = store_contract::World::of(<Model as store_contract::Backend>::fresh().await);
    store_contract::resting::models_that_callers_make_up_push_out_nothing_that_matters(world).await;
}

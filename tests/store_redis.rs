//! Redis as a store: the contract on a clock that tests turn by hand, and what only a server can do.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::pedantic, missing_docs, unreachable_pub)]

use std::sync::Arc;
use std::time::Duration;

use lessor::config::{HostPort, RedisConfig, Topology};
use lessor::store::redis::RedisStore;
use lessor::store::{Store, StoreTime};
use store_contract::Backend;
use support::redis::Redis;

mod store_contract;
mod support;

/// A clock that stands still between steps: the scripts read it from a key, which the test writes.
const TURNED_BY_HAND: &str = r#"
local NOW = tonumber(redis.call("GET", "clock"))
local NOW_US = NOW * 1000
"#;

/// Far ahead of the real clock, so that Redis' own expiry of hashes never comes first.
const BEGINNING: u64 = 4_000_000_000_000;

fn at(redis: &Redis) -> RedisConfig {
    let addr = redis.addr();
    RedisConfig::plain(Topology::Single(HostPort { host: addr.ip().to_string(), port: addr.port() }))
}

/// A server of its own, and a hand on its time.
struct Served {
    redis: Redis,
    store: RedisStore,
    now: std::sync::atomic::AtomicU64,
}

impl Served {
    async fn set_clock(&self, now: u64) {
        self.redis.command(&["SET", "clock", &now.to_string()]).await;
        self.store.ping().await.unwrap();
    }
}

impl Backend for Served {
    const TTL: Duration = Duration::from_secs(2);
    /// The store's estimate of the clock runs on between answers.
    const SLACK: Duration = Duration::from_millis(400);

    async fn fresh() -> Self {
        let redis = Redis::start().await;
        redis.command(&["SET", "clock", &BEGINNING.to_string()]).await;
        let store = RedisStore::open_with_clock(&at(&redis), "lessor", TURNED_BY_HAND).await.unwrap();
        Self { redis, store, now: BEGINNING.into() }
    }

    fn store(&self) -> Arc<dyn Store> {
        Arc::new(self.store.clone())
    }

    async fn pass(&self, time: Duration) -> bool {
        let ms = u64::try_from(time.as_millis()).unwrap();
        let now = self.now.fetch_add(ms, std::sync::atomic::Ordering::SeqCst) + ms;
        self.set_clock(now).await;
        true
    }

    async fn lose_data(&mut self) -> bool {
        self.redis.command(&["FLUSHALL"]).await;
        self.set_clock(self.now.load(std::sync::atomic::Ordering::SeqCst)).await;
        true
    }
}

store_contract!(Served);

#[tokio::test]
async fn the_stores_time_is_the_servers() {
    let world = Served::fresh().await;
    assert!(world.store.now() >= StoreTime(BEGINNING));
    world.pass(Duration::from_hours(1)).await;
    assert!(world.store.now() >= StoreTime(BEGINNING + 3_600_000));
}

#[tokio::test]
async fn a_key_without_a_cap_may_be_used_once_at_a_time_and_one_that_is_in_no_pool_either_has_no_settings() {
    let world = store_contract::World::of(Served::fresh().await);
    world.keys([("a", 2)]).await;
    let redis = &world.backend.redis;
    redis.command(&["HDEL", "lessor:{openai}:key:a", "max_concurrent_uses"]).await;
    let held = world.lend("a").await;
    assert_eq!(world.why_not_key("a").await, lessor::store::Reason::Full);
    assert_eq!(world.release(&held).await, 1);
    redis.command(&["HDEL", "lessor:{openai}:key:a", "pool"]).await;
    assert_eq!(world.why_not_key("a").await, lessor::store::Reason::NoSettings);
}

#[tokio::test]
async fn values_that_cannot_be_neither_lift_a_cap_nor_take_a_slot_for_ever_nor_stop_the_provider() {
    let world = store_contract::World::of(Served::fresh().await);
    world.keys([("a", 1)]).await;
    let redis = &world.backend.redis;
    let key = "lessor:{openai}:key:a";
    for value in ["1e300", "inf", "nan", "-nan", "9223372036854775807", "hello"] {
        redis.command(&["SET", "lessor:{openai}:fence", value]).await;
        redis.command(&["HSET", key, "max_concurrent_uses", value, "learned_cap", value]).await;
        redis.command(&["HSET", "lessor:{openai}:epoch", "grace_until_ms", value]).await;
        let held = world.lend("a").await;
        assert_eq!(world.why_not_key("a").await, lessor::store::Reason::Full, "{value}");
        assert_eq!(world.release(&held).await, 1);
    }
    redis.command(&["HSET", key, "max_concurrent_uses", "1"]).await;
    redis.command(&["HDEL", key, "learned_cap"]).await;
    for rest in [
        r#"{"class":"rate","until_ms":1,"probation":true,"probe_lease":null}"#,
        r#"{"class":"rate","until_ms":1,"probation":true,"probe_lease":{}}"#,
        r#"{"class":"overloaded"}"#,
        r#"{"class":"rate","until_ms":1e19}"#,
        r#"{"class":"quota","until_ms":1e400}"#,
        r#"{"class":"quota","until_ms":1,"probation":true,"strikes":1e999}"#,
        "[]",
        "{",
    ] {
        redis.command(&["HSET", "lessor:{openai}:cooldowns", "provider", rest]).await;
        let held = world.lend("a").await;
        assert_eq!(world.release(&held).await, 1, "{rest}");
    }
    // and a stray byte hides nothing from who administers
    redis.command(&["HSET", key, "reason", "a \u{fffd} byte"]).await;
    redis.command(&["ZADD", "lessor:{openai}:keys", "1", "NO NAME!"]).await;
    assert_eq!(world.store().snapshot(store_contract::provider()).await.unwrap().keys.len(), 1);
}

#[tokio::test]
async fn models_that_callers_make_up_push_out_nothing_that_matters() {
    let world = store_contract::World::of(<Served as store_contract::Backend>::fresh().await);
    store_contract::resting::models_that_callers_make_up_push_out_nothing_that_matters(world).await;
}

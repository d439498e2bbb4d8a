//! Calls that go to Redis together, and what each of them is still promised by itself.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::pedantic, missing_docs, unreachable_pub)]

use std::collections::HashSet;
use std::time::Duration;

use futures_util::future::join_all;
use lessor::config::{HostPort, RedisConfig, Topology};
use lessor::model::{
    AppName, FencingToken, Fingerprint, KeyId, LeaseId, ModelName, OwnerId, PoolName, ProviderName,
};
use lessor::store::redis::RedisStore;
use lessor::store::{
    Acquire, Acquired, Candidate, Grant, KeySettings, Reason, Release, Store, StoreTime, SyncKeys, SyncMode,
};
use support::redis::Redis;

mod support;

const TTL: Duration = Duration::from_secs(20);

fn provider() -> ProviderName {
    ProviderName::parse("openai").unwrap()
}

fn key(name: &str) -> KeyId {
    KeyId::parse(name).unwrap()
}

/// What is named, as `key` of the default pool, or as `pool/key`.
fn place(name: &str) -> (PoolName, KeyId) {
    match name.split_once('/') {
        Some((pool, name)) => (PoolName::parse(pool).unwrap(), key(name)),
        None => (PoolName::default_pool(), key(name)),
    }
}

/// A fingerprint of the key's own, so that one taken for another's is seen.
fn fingerprint(key: &KeyId) -> Fingerprint {
    Fingerprint([key.as_str().as_bytes()[0]; 32])
}

struct Sidecar {
    store: RedisStore,
    owner: OwnerId,
}

impl Sidecar {
    /// One that serves keys with these caps.
    async fn on(redis: &Redis, keys: &[(&str, u32)]) -> Self {
        let at = HostPort { host: redis.addr().ip().to_string(), port: redis.addr().port() };
        let store = RedisStore::open(&RedisConfig::plain(Topology::Single(at)), "lessor").await.unwrap();
        let owner = OwnerId::fresh();
        let settings = |(name, cap): &(&str, u32)| {
            let (pool, key) = place(name);
            let fingerprint = Some(fingerprint(&key));
            KeySettings { key, pool, group: None, max_concurrent_uses: *cap, fingerprint }
        };
        let keys = keys.iter().map(settings).collect();
        let (provider, mode) = (provider(), SyncMode::Replace);
        store.sync_keys(SyncKeys { provider, owner: owner.clone(), mode, keys }).await.unwrap();
        Self { store, owner }
    }

    fn ask(&self, names: &[&str]) -> Acquire {
        let candidate = |name: &&str| {
            let (pool, key) = place(name);
            let fingerprint = fingerprint(&key);
            Candidate { key, pool, group: None, fingerprint }
        };
        Acquire {
            provider: provider(),
            lease: LeaseId::fresh(),
            owner: self.owner.clone(),
            app: AppName::anonymous(),
            model: None,
            candidates: names.iter().map(candidate).collect(),
            ttl: TTL,
            deadline: self.store.now().plus(Duration::from_secs(2)),
        }
    }

    /// All of them at once.
    async fn acquire(&self, asks: Vec<Acquire>) -> Vec<Acquired> {
        join_all(asks.into_iter().map(|ask| self.store.acquire(ask)))
            .await
            .into_iter()
            .map(Result::unwrap)
            .collect()
    }

    async fn lend(&self, name: &str) -> Release {
        let ask = self.ask(&[name]);
        let lease = ask.lease;
        let grant = granted(self.store.acquire(ask).await.unwrap());
        Release { provider: provider(), lease, key: grant.key, pool: grant.pool, group: None }
    }
}

fn granted(answer: Acquired) -> Grant {
    match answer {
        Acquired::Granted(grant) => grant,
        other => panic!("a slot was due, and there came {other:?}"),
    }
}

#[tokio::test]
async fn each_of_a_call_is_answered_by_its_own_terms_and_order() {
    let redis = Redis::start().await;
    let sidecar = Sidecar::on(&redis, &[("a", 2), ("b", 2), ("vip/c", 1)]).await;
    let orders: [&[&str]; 6] =
        [&["a", "b"], &["a", "b"], &["a", "vip/c", "b"], &["a", "b"], &["b"], &["a", "b"]];
    let mut asks: Vec<Acquire> = orders.iter().map(|names| sidecar.ask(names)).collect();
    for (nth, ask) in asks.iter_mut().enumerate() {
        ask.app = AppName::parse(&format!("app-{nth}")).unwrap();
        ask.model = (nth % 2 == 1).then(|| ModelName::new("gpt-x").unwrap());
        ask.ttl = TTL + Duration::from_secs(nth as u64);
    }
    let late = Acquire { deadline: StoreTime(1), ..sidecar.ask(&["b"]) };
    let leases: Vec<LeaseId> = asks.iter().map(|ask| ask.lease).collect();
    let asked = asks.iter().cloned().chain([late, sidecar.ask(&[])]).collect();
    let mut answers = sidecar.acquire(asked).await;

    let Some(Acquired::Refused(nothing)) = answers.pop() else { panic!("there was no candidate") };
    assert!(nothing.reasons.is_empty());
    assert!(matches!(answers.pop(), Some(Acquired::Late)));
    let Some(Acquired::Refused(full)) = answers.pop() else { panic!("five slots were taken") };
    assert!(
        matches!(&full.reasons[..], [(a, Reason::Full), (b, Reason::Full)] if (a, b) == (&key("a"), &key("b")))
    );
    let grants: Vec<Grant> = answers.into_iter().map(granted).collect();
    let lent: Vec<&str> = grants.iter().map(|grant| grant.key.as_str()).collect();
    assert_eq!(lent, ["a", "a", "c", "b", "b"]);
    assert_eq!(grants[2].pool, PoolName::parse("vip").unwrap());
    assert!(grants.windows(2).all(|two| two[0].token < two[1].token));
    let began = grants[0].expires_at.0 - TTL.as_millis() as u64;
    for (nth, grant) in grants.iter().enumerate() {
        assert_eq!(grant.expires_at.0 - began, asks[nth].ttl.as_millis() as u64);
    }
    // and what was written is what was answered
    for (nth, lease) in leases.iter().take(5).enumerate() {
        let row = format!("lessor:{{openai}}:lease:{lease}");
        let field = async |name| redis.command(&["HGET", &row, name]).await.text().to_owned();
        assert_eq!(field("app").await, format!("app-{nth}"));
        assert_eq!(field("key_id").await, lent[nth]);
        assert_eq!(field("fencing_token").await, grants[nth].token.0.to_string());
        assert_eq!(field("expires_at_ms").await, grants[nth].expires_at.0.to_string());
        let of_key = format!("{:02x}", lent[nth].as_bytes()[0]).repeat(32);
        assert_eq!(field("fingerprint").await, of_key);
    }
}

#[tokio::test]
async fn all_that_can_have_what_they_try_first_get_it_and_one_more_is_refused() {
    let redis = Redis::start().await;
    let sidecar = Sidecar::on(&redis, &[("a", 3), ("b", 2), ("vip/c", 1)]).await;
    let orders: [&[&str]; 6] = [&["b", "a"], &["a"], &["vip/c", "b"], &["a", "b"], &["b"], &["a"]];
    let mut asks: Vec<Acquire> = orders.iter().map(|names| sidecar.ask(names)).collect();
    for (nth, ask) in asks.iter_mut().enumerate() {
        ask.app = AppName::parse(&format!("app-{nth}")).unwrap();
        ask.ttl = TTL + Duration::from_secs(nth as u64 % 3);
    }
    let grants: Vec<Grant> = sidecar.acquire(asks.clone()).await.into_iter().map(granted).collect();
    let lent: Vec<&str> = grants.iter().map(|grant| grant.key.as_str()).collect();
    assert_eq!(lent, ["b", "a", "c", "a", "b", "a"]);
    let tokens: HashSet<FencingToken> = grants.iter().map(|grant| grant.token).collect();
    assert_eq!(tokens.len(), grants.len());
    // and what was written is what was answered
    for (nth, (ask, grant)) in asks.iter().zip(&grants).enumerate() {
        let row = format!("lessor:{{openai}}:lease:{}", ask.lease);
        let field = async |name| redis.command(&["HGET", &row, name]).await.text().to_owned();
        assert_eq!(field("app").await, format!("app-{nth}"));
        assert_eq!(field("key_id").await, lent[nth]);
        assert_eq!(field("pool").await, grant.pool.as_str());
        assert_eq!(field("owner").await, &*sidecar.owner.0);
        assert_eq!(field("fencing_token").await, grant.token.0.to_string());
        assert_eq!(field("expires_at_ms").await, grant.expires_at.0.to_string());
        assert_eq!(field("fingerprint").await, format!("{:02x}", lent[nth].as_bytes()[0]).repeat(32));
        let leases = format!("lessor:{{openai}}:key:{}:leases", lent[nth]);
        let score = redis.command(&["ZSCORE", &leases, &ask.lease.to_string()]).await.text().to_owned();
        assert_eq!(score, grant.expires_at.0.to_string());
        let ttl = redis.command(&["PTTL", &row]).await.int();
        assert!(ttl > 0, "{ttl}");
    }
    let fence = redis.command(&["GET", "lessor:{openai}:fence"]).await.text().to_owned();
    assert_eq!(fence, tokens.iter().map(|token| token.0).max().unwrap().to_string());
    let more = sidecar.acquire(vec![sidecar.ask(&["a"]), sidecar.ask(&["b", "vip/c"])]).await;
    assert!(more.iter().all(|answer| matches!(answer, Acquired::Refused(_))), "{more:?}");
}

#[tokio::test]
async fn one_key_with_two_secrets_is_lent_no_more_often_than_its_cap_by_one_call() {
    let redis = Redis::start().await;
    let sidecar = Sidecar::on(&redis, &[("k", 1)]).await;
    let mut other = sidecar.ask(&["k"]);
    other.candidates = other
        .candidates
        .iter()
        .map(|one| Candidate { fingerprint: Fingerprint([9; 32]), ..one.clone() })
        .collect();
    let answers = sidecar.acquire(vec![sidecar.ask(&["k"]), other]).await;
    assert!(matches!(&answers[..], [Acquired::Granted(_), Acquired::Refused(_)]), "{answers:?}");
}

#[tokio::test]
async fn what_rests_for_one_model_is_passed_over_by_its_requests_alone() {
    let redis = Redis::start().await;
    let sidecar = Sidecar::on(&redis, &[("a", 9), ("b", 9)]).await;
    let subject = format!("key:a@{}|gpt-x", "61".repeat(32));
    let rest =
        format!(r#"{{"class":"access","since_ms":1,"until_ms":{},"token":"1"}}"#, 4_000_000_000_000_u64);
    redis.command(&["HSET", "lessor:{openai}:cooldowns", &subject, &rest]).await;
    let of_model = |names: &[&str], model| {
        let model = Some(ModelName::new(model).unwrap());
        Acquire { model, ..sidecar.ask(names) }
    };
    let lent = async |asks| {
        let grants: Vec<Grant> = sidecar.acquire(asks).await.into_iter().map(granted).collect();
        grants.into_iter().map(|grant| grant.key.to_string()).collect::<Vec<_>>()
    };
    // nothing of it bears on these
    let free = vec![sidecar.ask(&["a"]), of_model(&["a"], "gpt-y"), of_model(&["b"], "gpt-x")];
    assert_eq!(lent(free).await, ["a", "a", "b"]);
    let asks = vec![of_model(&["a", "b"], "gpt-x"), sidecar.ask(&["a", "b"]), of_model(&["a"], "gpt-y")];
    assert_eq!(lent(asks).await, ["b", "a", "a"]);
}

#[tokio::test]
async fn a_lease_asked_for_twice_in_one_call_takes_one_slot() {
    let redis = Redis::start().await;
    let sidecar = Sidecar::on(&redis, &[("k", 2)]).await;
    let ask = sidecar.ask(&["k"]);
    let answers = sidecar.acquire(vec![ask.clone(), ask, sidecar.ask(&["k"]), sidecar.ask(&["k"])]).await;
    let [one, again, other, full] = <[Acquired; 4]>::try_from(answers).unwrap();
    let (one, again, other) = (granted(one), granted(again), granted(other));
    assert_eq!(one.token, again.token);
    assert!(other.token > one.token);
    assert!(matches!(full, Acquired::Refused(_)));
}

#[tokio::test]
async fn a_foreign_value_at_one_keys_name_keeps_the_slots_of_no_other() {
    let redis = Redis::start().await;
    let sidecar = Sidecar::on(&redis, &[("a", 1), ("b", 1), ("c", 1)]).await;
    let lent = [sidecar.lend("a").await, sidecar.lend("b").await, sidecar.lend("c").await];
    redis.command(&["SET", "lessor:{openai}:key:a:leases", "not lessor's"]).await;
    redis.command(&["SET", &format!("lessor:{{openai}}:lease:{}", lent[1].lease), "not lessor's"]).await;
    let error = sidecar.store.release(lent.to_vec()).await.unwrap_err();
    assert!(error.to_string().contains("WRONGTYPE"), "{error}");
    sidecar.lend("c").await;
}

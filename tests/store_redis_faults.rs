//! Redis as a store on a bad day: real servers, a faulty network, the real clock.
//!
//! Everything is seen through the `Store` trait, and through a client that is not the one under test.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::pedantic, missing_docs, unreachable_pub)]

use std::collections::HashSet;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::time::{Duration, Instant};

use lessor::config::{HostPort, RedisConfig, Topology};
use lessor::model::{
    AppName, Class, Fingerprint, KeyId, LeaseId, Outcome, OwnerId, PoolName, ProviderName, Secret,
};
use lessor::store::redis::RedisStore;
use lessor::store::{
    Acquire, Acquired, Candidate, Grant, Held, KeySettings, Reason, Release, Renew, RenewAnswer, Report,
    StatusChange, Store, StoreError, StoreEvent, SyncKeys, SyncMode,
};
use support::fault::FaultProxy;
use support::redis::{Cluster, Redis, Sentinels};
use support::{eventually, eventually_within, ms, within};
use tokio::sync::broadcast::Receiver;

mod support;

/// Everything that lessor needs on one server, and nothing that it does not; to a prefix of its own.
const RIGHTS: &str = "~lessor:* &lessor:events +eval +evalsha +time +exists +get +set +del +hset +hsetnx +hget \
    +hmget +hgetall +hexists +hkeys +hrandfield +hlen +hdel +zadd +zscore +zmscore +zcard +zcount +zrangebyscore \
    +zremrangebyscore +zrem +pexpire +pexpireat +scan +publish +subscribe +info";

/// Of the user `lessor`.
const PASSWORD: &str = "canary-word";
/// And in a cluster.
const CLUSTER_RIGHTS: &str = "+cluster|slots";
/// All that is needed on a sentinel.
const SENTINEL_RIGHTS: &str = "+sentinel|get-master-addr-by-name";

const TTL: Duration = Duration::from_secs(20);
/// What any call may take: its own limit of 600 ms, and some for a busy machine.
const CALL: Duration = ms(850);
/// What a call takes that does not wait: less than one does that waits for a connection (250 ms).
const AT_ONCE: Duration = ms(100);
/// How soon after a fault's end the store works again.
const BACK: Duration = Duration::from_secs(2);

fn host(addr: SocketAddr) -> HostPort {
    HostPort { host: addr.ip().to_string(), port: addr.port() }
}

fn config(topology: Topology) -> RedisConfig {
    RedisConfig::plain(topology)
}

fn at(addr: SocketAddr) -> RedisConfig {
    config(Topology::Single(host(addr)))
}

fn as_user(addr: SocketAddr, name: &str, password: &str) -> RedisConfig {
    RedisConfig { username: Some(name.into()), password: Some(secret(password)), ..at(addr) }
}

fn secret(text: &str) -> Secret {
    Secret::new(text.into())
}

fn key(name: &str) -> KeyId {
    KeyId::parse(name).unwrap()
}

fn fingerprint() -> Fingerprint {
    Fingerprint([7; 32])
}

/// A sidecar of one provider, as far as the store sees one.
#[derive(Clone)]
struct Sidecar {
    store: RedisStore,
    owner: OwnerId,
    provider: ProviderName,
}

/// A lease that was granted.
#[derive(Debug, Clone)]
struct Lent {
    lease: LeaseId,
    grant: Grant,
}

impl Sidecar {
    async fn open(config: &RedisConfig) -> Self {
        Self::of(RedisStore::open(config, "lessor").await.unwrap())
    }

    /// One whose keys the store knows already.
    async fn on(addr: SocketAddr, keys: &[(&str, u32)]) -> Self {
        let sidecar = Self::open(&at(addr)).await;
        sidecar.serve(keys).await.unwrap();
        sidecar
    }

    fn of(store: RedisStore) -> Self {
        Self { store, owner: OwnerId::fresh(), provider: ProviderName::parse("openai").unwrap() }
    }

    fn for_provider(&self, name: &str) -> Self {
        Self { provider: ProviderName::parse(name).unwrap(), ..self.clone() }
    }

    fn name(&self, last: &str) -> String {
        format!("lessor:{{{}}}:{last}", self.provider)
    }

    async fn serve(&self, keys: &[(&str, u32)]) -> Result<(), StoreError> {
        let settings = |(name, cap): &(&str, u32)| KeySettings {
            key: key(name),
            pool: PoolName::default_pool(),
            group: None,
            max_concurrent_uses: *cap,
            fingerprint: Some(fingerprint()),
        };
        let ask = SyncKeys {
            provider: self.provider.clone(),
            owner: self.owner.clone(),
            mode: SyncMode::Replace,
            keys: keys.iter().map(settings).collect(),
        };
        self.store.sync_keys(ask).await.map(|_| ())
    }

    fn ask(&self, name: &str) -> Acquire {
        let candidate = Candidate {
            key: key(name),
            pool: PoolName::default_pool(),
            group: None,
            fingerprint: fingerprint(),
        };
        Acquire {
            provider: self.provider.clone(),
            lease: LeaseId::fresh(),
            owner: self.owner.clone(),
            app: AppName::anonymous(),
            model: None,
            candidates: [candidate].into(),
            ttl: TTL,
            deadline: self.store.now().plus(Duration::from_secs(2)),
        }
    }

    async fn acquire(&self, name: &str) -> Result<Acquired, StoreError> {
        self.store.acquire(self.ask(name)).await
    }

    async fn try_lend(&self, name: &str) -> Result<Option<Lent>, StoreError> {
        let ask = self.ask(name);
        let lease = ask.lease;
        Ok(match self.store.acquire(ask).await? {
            Acquired::Granted(grant) => Some(Lent { lease, grant }),
            _ => None,
        })
    }

    async fn lend(&self, name: &str) -> Lent {
        self.try_lend(name).await.unwrap().expect("a free slot")
    }

    async fn refused_as_full(&self, name: &str) {
        let Acquired::Refused(refusal) = self.acquire(name).await.unwrap() else { panic!("{name} was lent") };
        assert!(matches!(refusal.reasons[0].1, Reason::Full), "{refusal:?}");
    }

    /// Is refused while another holds `k`, which then gives it back.
    async fn refused_as_full_while(&self, other: &Self) {
        let lent = other.lend("k").await;
        self.refused_as_full("k").await;
        other.release(&lent).await.unwrap();
    }

    fn giving_back(&self, lent: &Lent) -> Release {
        let (key, pool) = (lent.grant.key.clone(), lent.grant.pool.clone());
        Release { provider: self.provider.clone(), lease: lent.lease, key, pool, group: None }
    }

    async fn release(&self, lent: &Lent) -> Result<usize, StoreError> {
        self.store.release(vec![self.giving_back(lent)]).await
    }

    fn renewal(&self, lent: &[&Lent]) -> Renew {
        let held = |lent: &&Lent| Held {
            lease: lent.lease,
            key: lent.grant.key.clone(),
            pool: lent.grant.pool.clone(),
            fingerprint: fingerprint(),
            token: lent.grant.token,
            app: AppName::anonymous(),
            group: None,
        };
        Renew {
            provider: self.provider.clone(),
            owner: self.owner.clone(),
            epoch: lent.first().map(|lent| lent.grant.epoch.clone()),
            leases: lent.iter().map(held).collect(),
            ttl: TTL,
            deadline: self.store.now().plus(Duration::from_secs(2)),
            reassert: false,
        }
    }

    async fn renew(&self, lent: &Lent) -> Result<RenewAnswer, StoreError> {
        Ok(self.store.renew(self.renewal(&[lent])).await?.answers[0])
    }

    fn says(&self, lent: &Lent, class: Class) -> Report {
        Report {
            provider: self.provider.clone(),
            key: lent.grant.key.clone(),
            group: None,
            lease: lent.lease,
            token: lent.grant.token,
            fingerprint: fingerprint(),
            model: None,
            outcome: Outcome::plain(class, Some(429)),
        }
    }

    /// Waits until the store works for this sidecar, and gives back what it was lent.
    async fn comes_back(&self, limit: Duration, name: &str) -> Duration {
        let begun = Instant::now();
        let lent = eventually_within(limit, "a lease is granted again", async || {
            self.try_lend(name).await.ok().flatten()
        })
        .await;
        let took = begun.elapsed();
        self.release(&lent).await.unwrap();
        took
    }

    /// Every verb once, on key `k` of a cap of at least 2.
    async fn does_everything(&self) {
        let (store, provider) = (&self.store, || self.provider.clone());
        store.ping().await.unwrap();
        store.salt(None).await.unwrap();
        self.serve(&[("k", 3), ("other", 1)]).await.unwrap();
        let lent = self.lend("k").await;
        assert!(matches!(self.renew(&lent).await.unwrap(), RenewAnswer::Renewed(_)));
        let again = Renew { reassert: true, ..self.renewal(&[&lent]) };
        assert!(matches!(store.renew(again).await.unwrap().answers[0], RenewAnswer::Renewed(_)));
        for class in [Class::Success, Class::Concurrency, Class::Rate, Class::Quota, Class::Caller] {
            store.report(self.says(&lent, class)).await.unwrap();
        }
        let changes = [
            StatusChange::Clear,
            StatusChange::CheckedBad {
                secret: fingerprint(),
                status: Some(401),
                code: Some("no_key".into()),
            },
            StatusChange::CheckedGood(fingerprint()),
            StatusChange::Disable,
            StatusChange::Enable,
        ];
        for change in changes {
            assert!(store.set_status(provider(), key("k"), change).await.unwrap());
        }
        assert!(store.revoke(provider(), lent.lease).await.unwrap());
        let snapshot = store.snapshot(provider()).await.unwrap();
        assert_eq!((snapshot.keys.len(), snapshot.leases.len()), (2, 1));
        assert_eq!(store.reconcile(provider()).await.unwrap(), 0);
        assert_eq!(self.release(&lent).await.unwrap(), 1);
        let held = self.lend("other").await;
        self.refused_as_full("other").await;
        self.release(&held).await.unwrap();
    }

    /// Every verb at once where no answer comes: what each said, and how long it took.
    async fn tries_everything(&self, lent: &Lent) -> Vec<(&'static str, Result<(), StoreError>, Duration)> {
        type Call<'a> = (&'static str, std::pin::Pin<Box<dyn Future<Output = Result<(), StoreError>> + 'a>>);
        let (store, provider) = (&self.store, || self.provider.clone());
        let calls: Vec<Call<'_>> = vec![
            ("acquire", Box::pin(async { self.acquire("k").await.map(|_| ()) })),
            ("renew", Box::pin(async { self.renew(lent).await.map(|_| ()) })),
            ("release", Box::pin(async { self.release(lent).await.map(|_| ()) })),
            ("report", Box::pin(async { store.report(self.says(lent, Class::Rate)).await.map(|_| ()) })),
            ("sync", Box::pin(self.serve(&[("k", 3)]))),
            ("ping", Box::pin(store.ping())),
            ("snapshot", Box::pin(async { store.snapshot(provider()).await.map(|_| ()) })),
            ("reconcile", Box::pin(async { store.reconcile(provider()).await.map(|_| ()) })),
            ("revoke", Box::pin(async { store.revoke(provider(), lent.lease).await.map(|_| ()) })),
            (
                "status",
                Box::pin(async {
                    store.set_status(provider(), key("k"), StatusChange::Clear).await.map(|_| ())
                }),
            ),
        ];
        let timed = calls.into_iter().map(|(what, call)| async move {
            let begun = Instant::now();
            let answer = call.await;
            (what, answer, begun.elapsed())
        });
        futures_util::future::join_all(timed).await
    }
}

/// The text of a refusal.
#[track_caller]
fn refused<T: std::fmt::Debug>(answer: Result<T, StoreError>, word: &str) {
    let error = answer.expect_err("no answer was due");
    assert!(matches!(error, StoreError::Unavailable(_)), "{error:?}");
    assert!(error.to_string().contains(word), "`{error}` does not say {word}");
}

async fn slots(redis: &Redis, name: &str) -> i64 {
    redis.command(&["ZCARD", &format!("lessor:{{openai}}:key:{name}:leases")]).await.int()
}

/// The next event that is not this one's own doing.
async fn hears(events: &mut Receiver<StoreEvent>, what: &str, wanted: impl Fn(&StoreEvent) -> bool) {
    within(BACK, what, async { while !wanted(&events.recv().await.expect("an event")) {} }).await;
}

/// All that was heard up to now.
fn heard(events: &mut Receiver<StoreEvent>) -> Vec<StoreEvent> {
    std::iter::from_fn(|| events.try_recv().ok()).collect()
}

// ---- what the server says --------------------------------------------------------------------------------

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_script_cache_that_is_flushed_under_load_is_noticed_by_nobody() {
    let redis = Redis::start().await;
    let sidecar = Sidecar::on(redis.addr(), &[("k", 64)]).await;
    let done = Instant::now() + ms(1000);
    let tasks: Vec<_> = (0..16)
        .map(|_| {
            let sidecar = sidecar.clone();
            tokio::spawn(async move {
                while Instant::now() < done {
                    let lent = sidecar.lend("k").await;
                    assert!(matches!(sidecar.renew(&lent).await.unwrap(), RenewAnswer::Renewed(_)));
                    sidecar.store.report(sidecar.says(&lent, Class::Success)).await.unwrap();
                    assert_eq!(sidecar.release(&lent).await.unwrap(), 1);
                }
            })
        })
        .collect();
    while Instant::now() < done {
        redis.flush_scripts().await;
    }
    for task in tasks {
        task.await.unwrap();
    }
    assert_eq!(slots(&redis, "k").await, 0);
}

#[tokio::test]
async fn a_primary_that_became_a_replica_is_left_for_the_new_one_within_two_seconds() {
    let builder = || Redis::builder().config("repl-diskless-sync-delay", "0");
    let (old, new) = (builder().start().await, builder().start().await);
    let proxy = FaultProxy::start(old.addr()).await;
    let sidecar = Sidecar::on(proxy.addr(), &[("k", 4)]).await;
    let lent = sidecar.lend("k").await;
    new.command(&["REPLICAOF", "127.0.0.1", &old.port().to_string()]).await;
    let linked = async || (new.info("master_link_status").await == "up").then_some(());
    new.eventually("the replica is in sync", BACK, linked).await;
    // given a change of roles that the address does not follow yet
    new.command(&["REPLICAOF", "NO", "ONE"]).await;
    old.command(&["REPLICAOF", "127.0.0.1", &new.port().to_string()]).await;
    eventually("writes are refused, and why", async || {
        sidecar.acquire("k").await.is_err_and(|error| error.to_string().contains("read-only")).then_some(())
    })
    .await;
    let reads = proxy.connections();
    // when it does, then the new primary is found, and the lease is known there
    proxy.retarget(new.addr());
    let took = sidecar.comes_back(BACK, "k").await;
    assert!(took < BACK, "{took:?}");
    assert!(proxy.connections() - reads < 20, "connects without a pause");
    assert!(matches!(sidecar.renew(&lent).await.unwrap(), RenewAnswer::Renewed(_)));
}

#[tokio::test]
async fn a_server_that_still_loads_is_not_ready_and_then_found() {
    let redis = Redis::builder()
        .config("key-load-delay", "500")
        .config("loading-process-events-interval-bytes", "1024")
        .start()
        .await;
    let sidecar = Sidecar::on(redis.addr(), &[("k", 1)]).await;
    let fill = "for at = 1, 3000 do redis.call('SET', 'filler:' .. at, 'x') end";
    redis.command(&["EVAL", fill, "0"]).await;
    let snapshot = redis.snapshot().await;
    let watching = async {
        eventually("it is named as one that loads", async || {
            let said = sidecar.acquire("k").await;
            said.is_err_and(|error| error.to_string().contains("is loading")).then_some(())
        })
        .await;
        refused(sidecar.acquire("k").await, "not ready");
    };
    tokio::join!(redis.restart_with(&snapshot), watching);
    sidecar.comes_back(BACK, "k").await;
}

#[tokio::test]
async fn a_server_busy_with_a_script_is_named_and_used_again_when_that_is_killed() {
    let redis = Redis::start().await;
    let sidecar = Sidecar::on(redis.addr(), &[("k", 2)]).await;
    redis.command(&["CONFIG", "SET", "busy-reply-threshold", "20"]).await;
    let mut spinning = redis.connect().await.unwrap();
    spinning.send(&["EVAL", "while true do end", "0"]).await.unwrap();
    eventually("BUSY", async || redis.ask(&["GET", "x"]).await.is_err().then_some(())).await;
    let begun = Instant::now();
    refused(sidecar.acquire("k").await, "BUSY");
    assert!(begun.elapsed() < CALL);
    redis.command(&["SCRIPT", "KILL"]).await;
    sidecar.comes_back(BACK, "k").await;
}

#[tokio::test]
async fn a_server_without_memory_refuses_leases_and_takes_slots_back_even_on_a_new_connection() {
    let redis = Redis::start().await;
    let proxy = FaultProxy::start(redis.addr()).await;
    let sidecar = Sidecar::on(proxy.addr(), &[("k", 4)]).await;
    let (one, two) = (sidecar.lend("k").await, sidecar.lend("k").await);
    redis.command(&["CONFIG", "SET", "maxmemory", "1"]).await;
    refused(sidecar.acquire("k").await, "OOM");
    assert_eq!(sidecar.release(&one).await.unwrap(), 1);
    proxy.reset().await;
    assert_eq!(sidecar.release(&two).await.unwrap(), 1);
    assert_eq!(slots(&redis, "k").await, 0);
    refused(sidecar.acquire("k").await, "OOM");
    redis.command(&["CONFIG", "SET", "maxmemory", "0"]).await;
    sidecar.lend("k").await;
}

#[tokio::test]
async fn a_server_that_takes_no_writes_says_why() {
    let redis = Redis::builder().config("enable-protected-configs", "yes").start().await;
    let sidecar = Sidecar::on(redis.addr(), &[("k", 4)]).await;
    redis.command(&["CONFIG", "SET", "min-replicas-to-write", "1"]).await;
    refused(sidecar.acquire("k").await, "NOREPLICAS");
    redis.command(&["CONFIG", "SET", "min-replicas-to-write", "0"]).await;
    sidecar.lend("k").await;
    redis.command(&["CONFIG", "SET", "save", "3600 1000000"]).await;
    redis.command(&["CONFIG", "SET", "dir", "/proc"]).await;
    redis.command(&["BGSAVE"]).await;
    let failed = async || (redis.info("rdb_last_bgsave_status").await == "err").then_some(());
    redis.eventually("a save has failed", BACK, failed).await;
    refused(sidecar.acquire("k").await, "MISCONF");
    redis.command(&["CONFIG", "SET", "stop-writes-on-bgsave-error", "no"]).await;
    sidecar.lend("k").await;
}

#[tokio::test]
async fn rights_that_are_taken_away_and_foreign_values_are_named() {
    let redis = Redis::start().await;
    let sidecar = Sidecar::on(redis.addr(), &[("k", 4)]).await;
    for (taken, given) in [("-evalsha", "+evalsha"), ("-hset", "+hset"), ("resetkeys", "allkeys")] {
        redis.command(&["ACL", "SETUSER", "default", taken]).await;
        refused(sidecar.acquire("k").await, "NOPERM");
        redis.command(&["ACL", "SETUSER", "default", given]).await;
        sidecar.lend("k").await;
    }
    redis.command(&["SET", &sidecar.name("key:wrong:leases"), "not lessor's"]).await;
    sidecar.serve(&[("wrong", 1)]).await.unwrap();
    refused(sidecar.acquire("wrong").await, "WRONGTYPE");
    redis.command(&["SET", "other:store", "not lessor's"]).await;
    refused(RedisStore::open(&at(redis.addr()), "other").await, "WRONGTYPE");
}

#[tokio::test]
async fn a_wrong_password_or_none_is_refused_at_once_and_shown_to_nobody() {
    let redis = Redis::builder().password("the-right-word").start().await;
    let begun = Instant::now();
    for config in [
        at(redis.addr()),
        as_user(redis.addr(), "default", "a-wrong-word"),
        as_user(redis.addr(), "nobody", "a-wrong-word"),
    ] {
        let error = RedisStore::open(&config, "lessor").await.unwrap_err();
        let text = format!("{error} {error:?}");
        assert!(text.contains("store.password"), "{text}");
        assert!(!text.contains("a-wrong"), "{text}");
    }
    assert!(begun.elapsed() < Duration::from_secs(1), "{:?}", begun.elapsed());
}

#[tokio::test]
async fn a_password_is_in_nothing_that_is_shown() {
    let redis = Redis::builder().config("slowlog-log-slower-than", "0").start().await;
    allow(&redis, RIGHTS.split_whitespace()).await;
    let monitor = redis.monitor().await;
    let config = as_user(redis.addr(), "lessor", PASSWORD);
    let sidecar = Sidecar::open(&config).await;
    sidecar.does_everything().await;
    let wrong = as_user(redis.addr(), "lessor", &format!("{PASSWORD}-and-wrong"));
    let error = RedisStore::open(&wrong, "lessor").await.unwrap_err();
    let shown = [
        format!("{:?} {config:?} {error} {error:?}", sidecar.store),
        monitor.lines().await.join("\n"),
        redis.slowlog().await,
        redis.dump().await,
        redis.log(),
    ];
    for text in shown {
        assert!(!text.contains(PASSWORD), "{text}");
    }
    assert!(!monitor.lines().await.is_empty());
}

// ---- rights ----------------------------------------------------------------------------------------------

thread_local! {
    static LOGGED: std::cell::RefCell<Vec<u8>> = const { std::cell::RefCell::new(Vec::new()) };
}

/// Takes what is logged at WARN and above on this thread, which is this test's. One subscriber serves all, for
/// those that come and go on other threads make each other miss events.
struct Logged;

impl Logged {
    fn listen() -> Self {
        static ONCE: std::sync::Once = std::sync::Once::new();
        ONCE.call_once(|| {
            tracing_subscriber::fmt()
                .with_max_level(tracing::Level::WARN)
                .with_ansi(false)
                .with_writer(|| Self)
                .init();
        });
        Self
    }

    fn text(&self) -> String {
        LOGGED.with_borrow(|logged| String::from_utf8_lossy(logged).into_owned())
    }
}

impl std::io::Write for Logged {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        LOGGED.with_borrow_mut(|logged| logged.extend_from_slice(bytes));
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// Makes the user `lessor` anew with these rights.
async fn allow<'a>(redis: &Redis, rights: impl Iterator<Item = &'a str>) {
    let password = format!(">{PASSWORD}");
    let mut command = vec!["ACL", "SETUSER", "lessor", "reset", "on", &password];
    let rights: Vec<&str> = rights.collect();
    command.extend(&rights);
    redis.command(&command).await;
}

#[tokio::test]
async fn the_named_rights_are_enough_and_nothing_is_warned_of() {
    let readme = include_str!("../README.md");
    let line = format!("ACL SETUSER lessor reset on >PASSWORD {RIGHTS}");
    assert!(readme.lines().any(|said| said == line), "the README names these: {line}");
    assert!(readme.contains(CLUSTER_RIGHTS) && readme.contains(SENTINEL_RIGHTS));
    let logged = Logged::listen();
    let redis = Redis::start().await;
    allow(&redis, RIGHTS.split_whitespace()).await;
    let (one, two) = (as_user(redis.addr(), "lessor", PASSWORD), as_user(redis.addr(), "lessor", PASSWORD));
    let (one, two) = (Sidecar::open(&one).await, Sidecar::open(&two).await);
    one.does_everything().await;
    // and a release reaches who waits elsewhere
    let lent = one.lend("other").await;
    let mut events = two.store.subscribe();
    two.refused_as_full("other").await;
    one.release(&lent).await.unwrap();
    hears(&mut events, "a freed slot", |event| matches!(event, StoreEvent::Freed(..))).await;
    assert_eq!(logged.text(), "");
}

#[tokio::test]
async fn each_right_that_lacks_is_named_at_the_start_or_has_a_fallback() {
    let logged = Logged::listen();
    let redis = Redis::start().await;
    allow(&redis, RIGHTS.split_whitespace()).await;
    let config = as_user(redis.addr(), "lessor", PASSWORD);
    Sidecar::open(&config).await.does_everything().await; // so that every script is cached
    for right in RIGHTS.split_whitespace() {
        allow(&redis, RIGHTS.split_whitespace().filter(|other| *other != right)).await;
        let opened = RedisStore::open(&config, "lessor").await;
        let said = logged.text();
        match right {
            // Asked key by key then, as of a server that does not know it.
            "+zmscore" => Sidecar::of(opened.unwrap()).does_everything().await,
            "+info" | "+subscribe" => {
                assert!(said.contains(right), "without {right}: {said}");
                Sidecar::of(opened.unwrap()).does_everything().await;
            }
            _ => {
                let error =
                    opened.err().unwrap_or_else(|| panic!("nothing says that {right} lacks")).to_string();
                assert!(error.contains("lacks"), "without {right}: {error}");
                // The first words on a connection are refused by Redis, which names a command and no pattern.
                let named = error.contains(right)
                    || error.contains(&format!("'{}'", &right[1..]))
                    || (right.starts_with('~') && error.contains("keys"));
                assert!(named, "without {right}: {error}");
            }
        }
    }
}

#[tokio::test]
async fn a_user_without_select_is_told_so_where_a_database_is_named() {
    let redis = Redis::start().await;
    allow(&redis, RIGHTS.split_whitespace()).await;
    let config = RedisConfig { db: 3, ..as_user(redis.addr(), "lessor", PASSWORD) };
    refused(RedisStore::open(&config, "lessor").await, "select");
    allow(&redis, RIGHTS.split_whitespace().chain(["+select"])).await;
    Sidecar::open(&config).await.does_everything().await;
}

// ---- what a store is -------------------------------------------------------------------------------------

#[tokio::test]
async fn a_layout_that_is_newer_is_refused_and_stays_as_it_is() {
    let redis = Redis::start().await;
    redis.command(&["HSET", "lessor:store", "layout", "2"]).await;
    let answer = RedisStore::open(&at(redis.addr()), "lessor").await;
    refused(answer, "has layout 2 and this lessor knows up to 1; update lessor");
    assert_eq!(redis.command(&["HGETALL", "lessor:store"]).await.texts(), ["layout", "2"]);
    assert_eq!(redis.command(&["DBSIZE"]).await, 1);
}

#[tokio::test]
async fn the_salt_outlives_sidecars_and_a_store_that_lost_it_gets_it_from_one_that_runs() {
    let redis = Redis::start().await;
    let first = Sidecar::open(&at(redis.addr())).await.store.salt(None).await.unwrap();
    let sidecar = Sidecar::open(&at(redis.addr())).await;
    assert_eq!(sidecar.store.salt(Some([9; 32])).await.unwrap(), first);
    let mut events = sidecar.store.subscribe();
    redis.restart_empty().await;
    hears(&mut events, "the connection is back", |event| matches!(event, StoreEvent::Reconnected)).await;
    let fresh = Sidecar::open(&at(redis.addr())).await;
    assert_eq!(fresh.store.salt(None).await.unwrap(), first);
    assert!(!heard(&mut events).iter().any(|event| matches!(event, StoreEvent::Resalted)));
}

#[tokio::test]
async fn a_sidecar_whose_salt_was_replaced_hears_of_it_with_its_next_connection() {
    let redis = Redis::start().await;
    let proxy = FaultProxy::start(redis.addr()).await;
    let old = Sidecar::on(proxy.addr(), &[]).await;
    let before = old.store.salt(None).await.unwrap();
    let mut events = old.store.subscribe();
    redis.command(&["FLUSHALL"]).await;
    let fresh = Sidecar::open(&at(redis.addr())).await.store.salt(None).await.unwrap();
    assert_ne!(before, fresh);
    proxy.reset().await;
    hears(&mut events, "another salt", |event| matches!(event, StoreEvent::Resalted)).await;
    assert_eq!(old.store.salt(None).await.unwrap(), fresh);
}

#[tokio::test]
async fn a_store_that_was_emptied_under_a_connection_gets_its_salt_back_with_the_settings() {
    let redis = Redis::start().await;
    let sidecar = Sidecar::on(redis.addr(), &[("k", 1)]).await;
    let salt = sidecar.store.salt(None).await.unwrap();
    redis.command(&["FLUSHALL"]).await;
    sidecar.serve(&[("k", 1)]).await.unwrap();
    assert_eq!(Sidecar::open(&at(redis.addr())).await.store.salt(None).await.unwrap(), salt);
    // and where another was first, this one hears of it as soon
    let mut events = sidecar.store.subscribe();
    redis.command(&["FLUSHALL"]).await;
    let fresh = Sidecar::open(&at(redis.addr())).await.store.salt(None).await.unwrap();
    sidecar.serve(&[("k", 1)]).await.unwrap();
    hears(&mut events, "another salt", |event| matches!(event, StoreEvent::Resalted)).await;
    assert_eq!(sidecar.store.salt(None).await.unwrap(), fresh);
}

#[tokio::test]
async fn databases_and_prefixes_share_nothing() {
    let redis = Redis::start().await;
    let third = RedisConfig { db: 3, ..at(redis.addr()) };
    Sidecar::open(&third).await.does_everything().await;
    assert_eq!(redis.command(&["DBSIZE"]).await, 0);
    assert!(redis.info("db3").await.starts_with("keys="));
    let mut all = Vec::new();
    for prefix in ["one", "two"] {
        let store = RedisStore::open(&at(redis.addr()), prefix).await.unwrap();
        all.push(Sidecar::of(store));
    }
    all[0].serve(&[("k", 1)]).await.unwrap();
    all[0].lend("k").await;
    let names = async || {
        let names = redis.command(&["KEYS", "*"]).await;
        names.texts().into_iter().map(String::from).collect::<HashSet<_>>()
    };
    let before = names().await;
    all[1].does_everything().await;
    let (own, others): (HashSet<_>, HashSet<_>) =
        names().await.into_iter().partition(|name| name.starts_with("two:"));
    assert!(own.len() > 4, "{own:?}");
    assert_eq!(others.len() + usize::from(before.contains("two:store")), before.len(), "{others:?}");
    assert!(others.iter().all(|name| name.starts_with("one:")), "{others:?}");
    assert_ne!(all[0].store.salt(None).await.unwrap(), all[1].store.salt(None).await.unwrap());
}

#[tokio::test]
async fn tls_is_trusted_by_its_ca_alone_and_for_its_own_name() {
    let (redis, other) = (Redis::builder().tls().start().await, Redis::builder().tls().start().await);
    let plain = at(redis.addr());
    let trusting = RedisConfig { tls: true, ca_file: Some(redis.ca_file()), ..plain.clone() };
    Sidecar::open(&trusting).await.does_everything().await;
    let begun = Instant::now();
    for ca_file in [None, Some(other.ca_file())] {
        let config = RedisConfig { ca_file, ..trusting.clone() };
        refused(RedisStore::open(&config, "lessor").await, "store.ca_file");
    }
    let elsewhere = HostPort { host: "127.0.0.2".into(), port: redis.port() };
    let bound = redis.ask(&["CONFIG", "SET", "bind", "127.0.0.1 127.0.0.2"]).await;
    assert!(bound.is_ok(), "{bound:?}");
    let misnamed = RedisConfig { topology: Topology::Single(elsewhere), ..trusting.clone() };
    refused(RedisStore::open(&misnamed, "lessor").await, "host");
    let lost = RedisConfig { ca_file: Some("/nowhere/ca.pem".into()), ..trusting };
    refused(RedisStore::open(&lost, "lessor").await, "/nowhere/ca.pem");
    assert!(begun.elapsed() < BACK, "{:?}", begun.elapsed());
}

// ---- lost and late ---------------------------------------------------------------------------------------

#[tokio::test]
async fn a_call_whose_answer_was_lost_is_answered_on_the_next_connection_and_done_once() {
    let redis = Redis::start().await;
    let proxy = FaultProxy::start(redis.addr()).await;
    let sidecar = Sidecar::on(proxy.addr(), &[("k", 4)]).await;
    // an acquire: the same grant, of which there is one
    let ask = sidecar.ask("k");
    proxy.lose_reply_to(ask.lease.to_string().as_bytes());
    let Acquired::Granted(grant) = sidecar.store.acquire(ask.clone()).await.unwrap() else { panic!("lent") };
    let Acquired::Granted(again) = sidecar.store.acquire(ask.clone()).await.unwrap() else { panic!("lent") };
    assert_eq!(grant, again);
    assert_eq!(slots(&redis, "k").await, 1);
    let lent = Lent { lease: ask.lease, grant };
    // a renewal
    proxy.lose_reply_to(lent.lease.to_string().as_bytes());
    assert!(matches!(sidecar.renew(&lent).await.unwrap(), RenewAnswer::Renewed(_)));
    assert_eq!(slots(&redis, "k").await, 1);
    // a refusal of the provider's: the wait has grown once
    proxy.lose_reply_to(lent.lease.to_string().as_bytes());
    let reported = sidecar.store.report(sidecar.says(&lent, Class::Rate)).await.unwrap();
    assert!(reported.cooling_until.is_some());
    let row = redis.command(&["HGETALL", &sidecar.name("key:k")]).await.to_string();
    assert!(row.contains("\"strikes\":1,") || row.contains("\"strikes\":1}"), "{row}");
    // a release: another's slot stays
    sidecar.store.set_status(sidecar.provider.clone(), key("k"), StatusChange::Clear).await.unwrap();
    let other = sidecar.lend("k").await;
    proxy.lose_reply_to(lent.lease.to_string().as_bytes());
    assert!(sidecar.release(&lent).await.unwrap() <= 1);
    assert_eq!(slots(&redis, "k").await, 1);
    assert!(matches!(sidecar.renew(&other).await.unwrap(), RenewAnswer::Renewed(_)));
    assert_eq!(proxy.connections(), 5, "each loss cost one connection");
}

#[tokio::test]
async fn every_reply_but_the_first_bytes_of_it_may_be_lost() {
    let redis = Redis::start().await;
    let proxy = FaultProxy::start(redis.addr()).await;
    let sidecar = Sidecar::on(proxy.addr(), &[("k", 64)]).await;
    for bytes in [0, 1, 7, 40, 90] {
        proxy.cut_after(bytes);
        let lent = sidecar.lend("k").await;
        proxy.cut_after(bytes);
        sidecar.release(&lent).await.unwrap();
        assert_eq!(slots(&redis, "k").await, 0, "after {bytes} bytes");
    }
}

#[tokio::test]
async fn an_acquire_that_arrives_after_its_deadline_is_late_and_takes_no_slot() {
    let redis = Redis::start().await;
    let proxy = FaultProxy::start(redis.addr()).await;
    let sidecar = Sidecar::on(proxy.addr(), &[("k", 4)]).await;
    sidecar.comes_back(BACK, "k").await; // so that the scripts are known there
    proxy.delay(ms(200));
    let ask = Acquire { deadline: sidecar.store.now().plus(ms(100)), ..sidecar.ask("k") };
    let answer = sidecar.store.acquire(ask).await.unwrap();
    assert!(matches!(answer, Acquired::Late), "{answer:?}");
    proxy.heal().await;
    // and where nobody waits for the answer any more
    redis.pause().await;
    let ask = Acquire { deadline: sidecar.store.now().plus(ms(300)), ..sidecar.ask("k") };
    let lease = ask.lease;
    let answer = sidecar.store.acquire(ask).await;
    assert!(matches!(answer, Err(StoreError::TimedOut(_))), "{answer:?}");
    redis.resume();
    sidecar.comes_back(BACK, "k").await; // by the same connection, behind the late call
    assert_eq!(slots(&redis, "k").await, 0);
    assert_eq!(redis.command(&["EXISTS", &sidecar.name(&format!("lease:{lease}"))]).await, 0);
}

#[tokio::test]
async fn a_renewal_that_arrives_after_its_leases_release_brings_nothing_back() {
    let redis = Redis::start().await;
    let proxy = FaultProxy::start(redis.addr()).await;
    let direct = Sidecar::on(redis.addr(), &[("k", 4)]).await;
    let slow = Sidecar { store: Sidecar::open(&at(proxy.addr())).await.store, ..direct.clone() };
    for reassert in [false, true] {
        let lent = direct.lend("k").await;
        direct.renew(&lent).await.unwrap(); // so that the script is known there
        proxy.delay(ms(200));
        let deadline = slow.store.now().plus(if reassert { ms(100) } else { BACK });
        let ask = Renew { reassert, deadline, ..slow.renewal(&[&lent]) };
        let (renewed, released) = tokio::join!(slow.store.renew(ask), direct.release(&lent));
        assert_eq!(released.unwrap(), 1);
        let wanted = if reassert { RenewAnswer::Late } else { RenewAnswer::Lost };
        assert_eq!(renewed.unwrap().answers, [wanted]);
        assert_eq!(slots(&redis, "k").await, 0);
        proxy.heal().await;
    }
}

// ---- every wait has a bound ------------------------------------------------------------------------------

/// What a call may say when no answer came.
#[track_caller]
fn no_answer<T: std::fmt::Debug>(answer: &Result<T, StoreError>) {
    let failed = matches!(answer, Err(StoreError::TimedOut(_) | StoreError::Unavailable(_)));
    assert!(failed, "{answer:?}");
}

/// Calls in a row, then all kinds at once, then 200 acquires: none waits long. Then the fault ends.
async fn fails_in_time_and_comes_back(sidecar: &Sidecar, lent: &Lent, ends: impl AsyncFnOnce()) {
    for nth in 1..=5 {
        let begun = Instant::now();
        no_answer(&sidecar.acquire("k").await);
        let took = begun.elapsed();
        let bound = if nth < 3 { CALL } else { AT_ONCE };
        assert!(took < bound, "call {nth} took {took:?}");
    }
    let begun = Instant::now();
    let many = futures_util::future::join_all((0..200).map(|_| sidecar.acquire("k"))).await;
    many.iter().for_each(no_answer);
    assert!(begun.elapsed() < ms(300), "{:?}", begun.elapsed());
    ends().await;
    sidecar.comes_back(BACK, "k").await;
    assert!(matches!(sidecar.renew(lent).await.unwrap(), RenewAnswer::Renewed(_)));
}

async fn behind_a_proxy() -> (Redis, FaultProxy, Sidecar, Lent) {
    let redis = Redis::start().await;
    let proxy = FaultProxy::start(redis.addr()).await;
    let sidecar = Sidecar::on(proxy.addr(), &[("k", 1000)]).await;
    let lent = sidecar.lend("k").await;
    (redis, proxy, sidecar, lent)
}

#[tokio::test]
async fn in_a_black_hole_calls_fail_in_time_and_soon_at_once() {
    let (redis, proxy, sidecar, lent) = behind_a_proxy().await;
    proxy.black_hole();
    fails_in_time_and_comes_back(&sidecar, &lent, async || proxy.heal().await).await;
    assert_eq!(slots(&redis, "k").await, 1);
}

#[tokio::test]
async fn where_the_server_is_not_reached_calls_fail_in_time_and_soon_at_once() {
    let (redis, proxy, sidecar, lent) = behind_a_proxy().await;
    proxy.drop_to_server();
    fails_in_time_and_comes_back(&sidecar, &lent, async || proxy.heal().await).await;
    assert_eq!(slots(&redis, "k").await, 1);
}

#[tokio::test]
async fn where_the_server_is_not_heard_calls_fail_in_time_and_soon_at_once() {
    let (_redis, proxy, sidecar, lent) = behind_a_proxy().await;
    proxy.drop_to_client();
    fails_in_time_and_comes_back(&sidecar, &lent, async || proxy.heal().await).await;
}

#[tokio::test]
async fn every_kind_of_call_has_an_end_in_a_black_hole_however_many_there_are() {
    let (redis, proxy, sidecar, lent) = behind_a_proxy().await;
    proxy.black_hole();
    // a release that comes behind one that is under way waits no longer than another
    let behind = async {
        tokio::time::sleep(ms(300)).await;
        let begun = Instant::now();
        let answer = sidecar.release(&lent).await.map(|_| ());
        ("a second release", answer, begun.elapsed())
    };
    let (all, behind) = tokio::join!(sidecar.tries_everything(&lent), behind);
    for (what, answer, took) in all.into_iter().chain([behind]) {
        no_answer(&answer);
        assert!(took < CALL, "{what} took {took:?}");
    }
    proxy.heal().await;
    sidecar.comes_back(BACK, "k").await;
    let lent = sidecar.lend("k").await;
    // given 200 acquires and as many releases in a new one, from its first moment
    proxy.black_hole();
    let begun = Instant::now();
    let acquires = futures_util::future::join_all((0..200).map(|_| sidecar.acquire("k")));
    let releases = futures_util::future::join_all((0..200).map(|_| sidecar.release(&lent)));
    let (acquires, releases) = tokio::join!(acquires, releases);
    acquires.iter().for_each(no_answer);
    releases.iter().for_each(no_answer);
    assert!(begun.elapsed() < Duration::from_secs(1), "{:?}", begun.elapsed());
    let before = redis.calls("evalsha").await;
    proxy.heal().await;
    sidecar.comes_back(BACK, "k").await;
    // then nothing of it was kept to be sent afterwards
    let sent = redis.calls("evalsha").await - before;
    assert!(sent < 20, "{sent} calls");
}

#[tokio::test]
async fn a_server_that_was_killed_is_found_again_and_nothing_waits_meanwhile() {
    let redis = Redis::start().await;
    let sidecar = Sidecar::on(redis.addr(), &[("k", 2)]).await;
    let lent = sidecar.lend("k").await;
    let mut events = sidecar.store.subscribe();
    redis.kill();
    for nth in 1..=4 {
        let begun = Instant::now();
        no_answer(&sidecar.acquire("k").await);
        assert!(begun.elapsed() < if nth < 3 { CALL } else { AT_ONCE }, "call {nth}: {:?}", begun.elapsed());
    }
    redis.restart().await;
    let begun = Instant::now();
    eventually_within(BACK, "the store answers", async || sidecar.store.ping().await.ok()).await;
    assert!(begun.elapsed() < BACK);
    hears(&mut events, "that it is back", |event| matches!(event, StoreEvent::Reconnected)).await;
    // the data are gone: a plain renewal says so, and names another epoch; a reassert brings the lease back
    sidecar.serve(&[("k", 2)]).await.unwrap();
    let renewed = sidecar.store.renew(sidecar.renewal(&[&lent])).await.unwrap();
    assert_eq!(renewed.answers, [RenewAnswer::Lost]);
    assert_ne!(renewed.epoch, lent.grant.epoch);
    let again = Renew { reassert: true, ..sidecar.renewal(&[&lent]) };
    assert!(matches!(sidecar.store.renew(again).await.unwrap().answers[0], RenewAnswer::Renewed(_)));
    assert_eq!(slots(&redis, "k").await, 1);
}

#[tokio::test]
async fn a_server_that_was_frozen_goes_on_and_no_lease_was_granted_twice() {
    let redis = Redis::start().await;
    let sidecar = Sidecar::on(redis.addr(), &[("k", 3)]).await;
    let lent = sidecar.lend("k").await;
    redis.pause().await;
    let begun = Instant::now();
    let mut unknown = Vec::new();
    while begun.elapsed() < Duration::from_secs(3) {
        let ask = Acquire { deadline: sidecar.store.now().plus(ms(500)), ..sidecar.ask("k") };
        unknown.push(ask.lease);
        let asked = Instant::now();
        no_answer(&sidecar.store.acquire(ask).await);
        assert!(asked.elapsed() < CALL, "{:?}", asked.elapsed());
        tokio::time::sleep(ms(20)).await;
    }
    redis.resume();
    sidecar.comes_back(BACK, "k").await;
    assert_eq!(slots(&redis, "k").await, 1, "what came late took nothing");
    for lease in unknown {
        assert_eq!(redis.command(&["EXISTS", &sidecar.name(&format!("lease:{lease}"))]).await, 0);
    }
    assert!(matches!(sidecar.renew(&lent).await.unwrap(), RenewAnswer::Renewed(_)));
}

#[tokio::test]
async fn a_start_while_redis_is_down_ends_in_time_and_works_when_redis_comes() {
    let redis = Redis::start().await;
    redis.kill();
    let begun = Instant::now();
    let store = RedisStore::open(&at(redis.addr()), "lessor").await.unwrap();
    assert!(begun.elapsed() < ms(3500), "{:?}", begun.elapsed());
    let sidecar = Sidecar::of(store);
    let begun = Instant::now();
    refused(sidecar.acquire("k").await, "redis://127.0.0.1:");
    assert!(begun.elapsed() < AT_ONCE, "{:?}", begun.elapsed());
    redis.restart().await;
    eventually_within(BACK, "it works", async || sidecar.serve(&[("k", 1)]).await.ok()).await;
    sidecar.lend("k").await;
    // and where something accepts, and says nothing
    let proxy = FaultProxy::start(redis.addr()).await;
    proxy.black_hole();
    let begun = Instant::now();
    let store = RedisStore::open(&at(proxy.addr()), "lessor").await.unwrap();
    assert!(begun.elapsed() < ms(3500), "{:?}", begun.elapsed());
    proxy.heal().await;
    eventually_within(BACK, "it works", async || store.ping().await.ok()).await;
}

// ---- word of what others did -----------------------------------------------------------------------------

#[tokio::test]
async fn a_slot_that_comes_back_is_told_to_who_was_refused_and_to_nobody_else() {
    let redis = Redis::start().await;
    let one = Sidecar::on(redis.addr(), &[("k", 1)]).await;
    let two = Sidecar::on(redis.addr(), &[("k", 1)]).await;
    let mut events = two.store.subscribe();
    let quiet = redis.calls("publish").await;
    for _ in 0..20 {
        let lent = one.lend("k").await;
        one.renew(&lent).await.unwrap();
        one.store.report(one.says(&lent, Class::Success)).await.unwrap();
        one.release(&lent).await.unwrap();
    }
    let lent = one.lend("k").await;
    one.refused_as_full("k").await; // who waits here needs no message
    one.release(&lent).await.unwrap();
    assert_eq!(redis.calls("publish").await, quiet, "nobody waits elsewhere");
    // nor where somebody waited long ago
    two.refused_as_full_while(&one).await;
    let waiting = one.name("waiting");
    for waiter in redis.command(&["ZRANGE", &waiting, "0", "-1"]).await.texts() {
        redis.command(&["ZADD", &waiting, "1", waiter]).await;
    }
    let lent = one.lend("k").await;
    one.release(&lent).await.unwrap();
    assert_eq!(redis.calls("publish").await, quiet + 1);
    let quiet = quiet + 1;
    let mut took = Vec::new();
    for _ in 0..21 {
        let lent = one.lend("k").await;
        two.refused_as_full("k").await;
        heard(&mut events);
        let begun = Instant::now();
        one.release(&lent).await.unwrap();
        hears(
            &mut events,
            "a freed slot",
            |event| matches!(event, StoreEvent::Freed(_, id) if *id == key("k")),
        )
        .await;
        took.push(begun.elapsed());
    }
    assert_eq!(redis.calls("publish").await, quiet + 21, "one message each");
    took.sort();
    assert!(took[10] < ms(20), "{took:?}");
}

#[tokio::test]
async fn revocations_and_changes_reach_other_sidecars_also_after_a_break() {
    let redis = Redis::start().await;
    let proxy = FaultProxy::start(redis.addr()).await;
    let one = Sidecar::on(redis.addr(), &[("k", 4)]).await;
    let two = Sidecar::on(proxy.addr(), &[("k", 4)]).await;
    let mut events = two.store.subscribe();
    for _ in 0..2 {
        let lent = one.lend("k").await;
        heard(&mut events);
        one.store.revoke(one.provider.clone(), lent.lease).await.unwrap();
        hears(
            &mut events,
            "a revocation",
            |event| matches!(event, StoreEvent::Revoked(_, lease) if *lease == lent.lease),
        )
        .await;
        for change in [StatusChange::Disable, StatusChange::Enable] {
            one.store.set_status(one.provider.clone(), key("k"), change).await.unwrap();
            hears(&mut events, "a change", |event| matches!(event, StoreEvent::Changed(_))).await;
        }
        proxy.reset().await;
        hears(&mut events, "that it is back", |event| matches!(event, StoreEvent::Reconnected)).await;
    }
}

// ---- together --------------------------------------------------------------------------------------------

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_comes_together_goes_together_and_what_comes_alone_goes_at_once() {
    let redis = Redis::start().await;
    let sidecar = Sidecar::on(redis.addr(), &[("k", 2000)]).await;
    let calls = async || redis.calls("evalsha").await + redis.calls("eval").await;
    let alone = sidecar.lend("k").await;
    sidecar.release(&alone).await.unwrap();
    // one call each, where the script is known to the server
    let before = calls().await;
    let alone = sidecar.lend("k").await;
    assert_eq!(calls().await, before + 1);
    sidecar.release(&alone).await.unwrap();
    assert_eq!(calls().await, before + 2);
    // many at once
    let before = calls().await;
    let lent = futures_util::future::join_all((0..64).map(|_| sidecar.lend("k"))).await;
    let acquired = calls().await - before;
    assert!(acquired <= 12, "{acquired} calls for 64 acquires");
    let before = calls().await;
    let freed = futures_util::future::join_all(lent.iter().map(|lent| sidecar.release(lent))).await;
    let released = calls().await - before;
    assert!(released <= 8, "{released} calls for 64 releases");
    assert_eq!(freed.into_iter().map(Result::unwrap).sum::<usize>(), 64);
    // a thousand
    let lent = futures_util::future::join_all((0..1000).map(|_| sidecar.lend("k"))).await;
    sidecar.renew(&lent[0]).await.unwrap();
    let before = calls().await;
    let renewed = sidecar.store.renew(sidecar.renewal(&lent.iter().collect::<Vec<_>>())).await.unwrap();
    assert_eq!(calls().await, before + 1);
    assert!(renewed.answers.iter().all(|answer| matches!(answer, RenewAnswer::Renewed(_))));
    assert_eq!(slots(&redis, "k").await, 1000);
    let before = calls().await;
    let all = lent.iter().map(|lent| sidecar.giving_back(lent)).collect();
    assert_eq!(sidecar.store.release(all).await.unwrap(), 1000);
    assert!(calls().await - before <= 6);
    assert_eq!(slots(&redis, "k").await, 0);
}

#[tokio::test]
async fn thousands_of_candidates_are_refused_one_by_one_in_one_answer() {
    let redis = Redis::start().await;
    let names: Vec<String> = (0..5000).map(|nth| format!("k{nth}")).collect();
    let sidecar = Sidecar::on(redis.addr(), &[]).await;
    let ask = Acquire {
        candidates: names.iter().flat_map(|name| sidecar.ask(name).candidates.to_vec()).collect(),
        ..sidecar.ask("k")
    };
    let Acquired::Refused(refusal) = sidecar.store.acquire(ask).await.unwrap() else {
        panic!("none is known")
    };
    assert_eq!(refusal.reasons.len(), names.len());
    assert!(refusal.reasons.iter().all(|(_, reason)| matches!(reason, Reason::NoSettings)));
}

/// One behind a network that breaks all the time: takes, renews, gives back, and settles what it does not know.
async fn lives_in_a_storm(sidecar: Sidecar, held: Arc<AtomicUsize>, cap: usize, done: Instant) -> u32 {
    let mut granted = 0;
    while Instant::now() < done {
        let ask = Acquire { deadline: sidecar.store.now().plus(ms(400)), ..sidecar.ask("k") };
        let (lease, begun) = (ask.lease, Instant::now());
        let giving_back = Release {
            provider: sidecar.provider.clone(),
            lease,
            key: key("k"),
            pool: PoolName::default_pool(),
            group: None,
        };
        match sidecar.store.acquire(ask).await {
            Ok(Acquired::Granted(grant)) => {
                granted += 1;
                let now = held.fetch_add(1, SeqCst) + 1;
                assert!(now <= cap, "{now} leases are held");
                match sidecar.renew(&Lent { lease, grant }).await {
                    Ok(answer) => assert!(matches!(answer, RenewAnswer::Renewed(_)), "{answer:?}"),
                    Err(error) => no_answer::<()>(&Err(error)),
                }
                held.fetch_sub(1, SeqCst);
            }
            Ok(_) => continue,
            Err(error) => {
                no_answer::<()>(&Err(error));
                tokio::time::sleep_until((begun + ms(450)).into()).await; // its deadline, by the store's clock
            }
        }
        while let Err(error) = sidecar.store.release(vec![giving_back.clone()]).await {
            no_answer::<()>(&Err(error));
            tokio::time::sleep(ms(10)).await;
        }
    }
    granted
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn connections_that_break_all_the_time_cost_no_slot_and_grant_none_twice() {
    const CAP: usize = 6;
    let redis = Redis::start().await;
    let done = Instant::now() + Duration::from_secs(3);
    let held = Arc::new(AtomicUsize::new(0));
    let (mut proxies, mut tasks) = (Vec::new(), Vec::new());
    for _ in 0..3 {
        let proxy = FaultProxy::start(redis.addr()).await;
        let sidecar = Sidecar::on(proxy.addr(), &[("k", CAP as u32)]).await;
        for _ in 0..12 {
            tasks.push(tokio::spawn(lives_in_a_storm(sidecar.clone(), Arc::clone(&held), CAP, done)));
        }
        proxies.push(proxy);
    }
    let mut most = 0;
    while Instant::now() < done {
        let proxy = &proxies[rand::random_range(0..3)];
        match rand::random_range(0..4) {
            0 => proxy.reset().await,
            1 => proxy.close().await,
            _ => proxy.cut_after(rand::random_range(0..400)),
        }
        most = most.max(slots(&redis, "k").await);
        assert!(most <= CAP as i64);
        tokio::time::sleep(ms(rand::random_range(5..60))).await;
    }
    let mut granted = 0;
    for task in tasks {
        granted += task.await.unwrap();
    }
    assert!(granted > 100 && most > 2, "{granted} were granted, {most} at most at once");
    assert_eq!(slots(&redis, "k").await, 0);
    let dump = redis.dump().await;
    assert!(!dump.contains(":lease:"), "{dump}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn three_sidecars_never_hold_more_than_the_cap_together() {
    let redis = Redis::start().await;
    let caps = [("a", 3_u32), ("b", 5)];
    let mut sidecars = Vec::new();
    for _ in 0..3 {
        sidecars.push(Sidecar::on(redis.addr(), &caps).await);
    }
    let held = [Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0))];
    let most = Arc::new(AtomicUsize::new(0));
    let done = Instant::now() + Duration::from_secs(3);
    let tasks: Vec<_> = (0..64)
        .map(|nth| {
            let (sidecar, held, most) = (sidecars[nth % 3].clone(), held.clone(), Arc::clone(&most));
            tokio::spawn(async move {
                while Instant::now() < done {
                    let at = rand::random_range(0..2);
                    let Some(lent) = sidecar.try_lend(caps[at].0).await.unwrap() else { continue };
                    let now = held[at].fetch_add(1, SeqCst) + 1;
                    most.fetch_max(now, SeqCst);
                    assert!(now <= caps[at].1 as usize, "{now} leases of {}", caps[at].0);
                    if rand::random() {
                        assert!(matches!(sidecar.renew(&lent).await.unwrap(), RenewAnswer::Renewed(_)));
                    }
                    held[at].fetch_sub(1, SeqCst);
                    assert_eq!(sidecar.release(&lent).await.unwrap(), 1);
                }
            })
        })
        .collect();
    let mut samples = 0;
    while Instant::now() < done {
        for (name, cap) in caps {
            let leases = format!("lessor:{{openai}}:key:{name}:leases");
            let count = redis.command(&["ZCOUNT", &leases, "-inf", "+inf"]).await;
            assert!(count.int() <= i64::from(cap));
            samples += 1;
        }
    }
    for task in tasks {
        task.await.unwrap();
    }
    assert!(samples > 20 && most.load(SeqCst) >= 4, "{samples} samples, {most:?} at most");
}

// ---- what cannot be --------------------------------------------------------------------------------------

#[tokio::test]
async fn what_cannot_be_is_repaired_and_counted_and_what_lives_is_left_alone() {
    let redis = Redis::start().await;
    let sidecar = Sidecar::on(redis.addr(), &[("k", 9), ("old", 1), ("held", 1), ("seen", 1)]).await;
    let live = sidecar.lend("k").await;
    let held = sidecar.lend("held").await;
    let reconcile = async || sidecar.store.reconcile(sidecar.provider.clone()).await.unwrap();
    assert_eq!(reconcile().await, 0);
    // a slot without a lease, and a lease without a slot
    let (ghost, bare) = (sidecar.lend("k").await, sidecar.lend("k").await);
    redis.command(&["DEL", &sidecar.name(&format!("lease:{}", ghost.lease))]).await;
    redis.command(&["ZREM", &sidecar.name("key:k:leases"), &bare.lease.to_string()]).await;
    assert_eq!(reconcile().await, 2);
    let left = redis.command(&["ZRANGE", &sidecar.name("key:k:leases"), "0", "-1"]).await;
    let left: HashSet<String> = left.texts().into_iter().map(String::from).collect();
    assert_eq!(left, HashSet::from([live.lease.to_string(), bare.lease.to_string()]));
    assert!(matches!(sidecar.renew(&bare).await.unwrap(), RenewAnswer::Renewed(_)));
    // keys that nobody has spoken of for a day: one goes, one is held, one was spoken of since
    let day_ago = (sidecar.store.now().0 - 25 * 3_600_000).to_string();
    for name in ["old", "held", "seen"] {
        let row = sidecar.name(&format!("key:{name}"));
        redis.command(&["HSET", &row, "seen_at_ms", &day_ago]).await;
        redis.command(&["HDEL", &row, "last_used_at_ms"]).await;
    }
    let other = Sidecar::on(redis.addr(), &[("seen", 1)]).await;
    assert_eq!(reconcile().await, 1);
    let snapshot = sidecar.store.snapshot(sidecar.provider.clone()).await.unwrap();
    let names: Vec<&str> = snapshot.keys.iter().map(|view| view.id.as_str()).collect();
    assert_eq!(names, ["held", "k", "seen"]);
    let dump = redis.dump().await;
    assert!(!dump.contains("old"), "{dump}");
    assert_eq!(other.release(&held).await.unwrap(), 1);
    assert_eq!(reconcile().await, 1, "nothing holds it any more");
    assert_eq!(reconcile().await, 0);
    assert!(matches!(sidecar.renew(&live).await.unwrap(), RenewAnswer::Renewed(_)));
}

#[tokio::test]
async fn one_sidecar_at_a_time_repairs() {
    let redis = Redis::start().await;
    let (one, two) = (Sidecar::on(redis.addr(), &[("k", 9)]).await, Sidecar::on(redis.addr(), &[]).await);
    for _ in 0..5 {
        let ghost = one.lend("k").await;
        redis.command(&["DEL", &one.name(&format!("lease:{}", ghost.lease))]).await;
    }
    let lock = one.name("reconcile");
    redis.command(&["SET", &lock, "another"]).await;
    assert_eq!(one.store.reconcile(one.provider.clone()).await.unwrap(), 0);
    assert_eq!(redis.command(&["GET", &lock]).await, "another");
    redis.command(&["DEL", &lock]).await;
    let (first, second) =
        tokio::join!(one.store.reconcile(one.provider.clone()), two.store.reconcile(two.provider.clone()));
    assert_eq!(first.unwrap() + second.unwrap(), 5);
    assert_eq!(slots(&redis, "k").await, 0);
    assert_eq!(redis.command(&["EXISTS", &lock]).await, 0);
}

// ---- many servers ----------------------------------------------------------------------------------------

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_named_rights_are_enough_in_a_cluster() {
    let rights = format!("on >{PASSWORD} {RIGHTS} {CLUSTER_RIGHTS}");
    let cluster = Cluster::with(3, 0, |builder| builder.acl_user("lessor", &rights)).await;
    let at = as_user(cluster.node(0).addr(), "lessor", PASSWORD);
    let nodes = cluster.nodes().iter().map(|node| host(node.addr())).collect();
    let at = RedisConfig { topology: Topology::Cluster(nodes), ..at };
    let sidecar = Sidecar::open(&at).await;
    let other = Sidecar::open(&at).await;
    for provider in PROVIDERS {
        let (one, other) = (sidecar.for_provider(provider), other.for_provider(provider));
        one.does_everything().await;
        let lent = one.lend("other").await;
        let mut events = other.store.subscribe();
        other.refused_as_full("other").await;
        one.release(&lent).await.unwrap();
        hears(&mut events, "a freed slot", |event| matches!(event, StoreEvent::Freed(..))).await;
    }
    for node in cluster.nodes() {
        node.command(&["ACL", "SETUSER", "lessor", "-cluster|slots"]).await;
    }
    let error = RedisStore::open(&at, "lessor").await.err().map(|error| error.to_string());
    assert!(error.as_ref().is_some_and(|text| text.contains("cluster")), "{error:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_named_rights_are_enough_with_sentinels_and_their_own_password_is_used() {
    let rights = format!("on >{PASSWORD} {RIGHTS}");
    let group = Sentinels::with(1, |builder| builder.acl_user("lessor", &rights)).await;
    let password = format!(">{PASSWORD}-of-sentinels");
    let sentinel = &group.sentinels()[0];
    sentinel.command(&["ACL", "SETUSER", "asks", "on", &password, SENTINEL_RIGHTS]).await;
    sentinel.command(&["ACL", "SETUSER", "default", "off"]).await;
    let at = as_user(sentinel.addr(), "lessor", PASSWORD);
    let sentinels: Vec<_> = group.addrs().into_iter().map(host).collect();
    let at = RedisConfig {
        topology: Topology::Sentinel { sentinels, primary: "primary".into() },
        sentinel_username: Some("asks".into()),
        sentinel_password: Some(secret(&password[1..])),
        ..at
    };
    let begun = Instant::now();
    Sidecar::open(&at).await.does_everything().await;
    let wrong = RedisConfig { sentinel_password: Some(secret("no")), ..at.clone() };
    refused(RedisStore::open(&wrong, "lessor").await, "sentinel");
    let Topology::Sentinel { sentinels, .. } = at.topology.clone() else { unreachable!() };
    let misnamed = Topology::Sentinel { sentinels, primary: "another".into() };
    let wrong = RedisConfig { topology: misnamed, ..at };
    refused(RedisStore::open(&wrong, "lessor").await, "no primary named `another`");
    assert!(begun.elapsed() < BACK, "{:?}", begun.elapsed());
}

/// Providers whose keys lie on all nodes of a cluster.
const PROVIDERS: [&str; 6] = ["openai", "anthropic", "mistral", "gemini", "cohere", "groq"];

#[tokio::test]
async fn a_restart_from_an_older_snapshot_brings_no_slot_back_for_longer_than_a_lease_and_loses_none_that_lives()
 {
    let redis = Redis::start().await;
    let sidecar = Sidecar::on(redis.addr(), &[("k", 2)]).await;
    let short = || Acquire { ttl: Duration::from_secs(3), ..sidecar.ask("k") };
    let taken = async |ask: Acquire| match sidecar.store.acquire(ask.clone()).await.unwrap() {
        Acquired::Granted(grant) => Lent { lease: ask.lease, grant },
        other => panic!("{other:?}"),
    };
    // one lease that is in the snapshot and released after it, one that is granted after it
    let ghost = taken(short()).await;
    let snapshot = redis.snapshot().await;
    assert_eq!(sidecar.release(&ghost).await.unwrap(), 1);
    let lives = taken(short()).await;
    redis.kill();
    redis.restart_with(&snapshot).await;
    let of_old = Some(lives.grant.epoch.clone());
    let renew = async |epoch: &Option<_>| {
        let ask = Renew { epoch: epoch.clone(), reassert: true, ..sidecar.renewal(&[&lives]) };
        sidecar.store.renew(ask).await
    };
    let renewed = eventually("it is back", async || renew(&of_old).await.ok()).await;
    assert!(matches!(renewed.answers[0], RenewAnswer::Renewed(_)), "{renewed:?}");
    assert_ne!(renewed.epoch, lives.grant.epoch, "another history of the data");
    // the grace, and the ghost within it: nothing new is lent, and never more than the cap
    sidecar.refused_as_full("k").await;
    assert_eq!(slots(&redis, "k").await, 2);
    // within a lease's life the ghost has gone; the one that is renewed lives on
    let known = Some(renewed.epoch);
    let next = eventually_within(Duration::from_secs(25), "the ghost's slot is lent", async || {
        let answer = renew(&known).await.unwrap().answers[0];
        assert!(matches!(answer, RenewAnswer::Renewed(_)), "{answer:?}");
        sidecar.try_lend("k").await.unwrap()
    });
    let next = next.await;
    assert!(next.grant.token > lives.grant.token, "tokens rise");
    sidecar.refused_as_full("k").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cluster_keeps_each_provider_on_one_node_and_does_everything() {
    let cluster = Cluster::start(3).await;
    let nodes = cluster.nodes().iter().map(|node| host(node.addr())).collect();
    let one = Sidecar::open(&config(Topology::Cluster(nodes))).await;
    let two = Sidecar::open(&config(Topology::Cluster(vec![host(cluster.node(1).addr())]))).await;
    let mut events = two.store.subscribe();
    let mut used = HashSet::new();
    for provider in PROVIDERS {
        let (one, two) = (one.for_provider(provider), two.for_provider(provider));
        one.does_everything().await;
        used.insert(cluster.node_of_key(&one.name("epoch")).await);
        let lent = one.lend("other").await;
        two.refused_as_full("other").await;
        heard(&mut events);
        one.release(&lent).await.unwrap();
        hears(
            &mut events,
            "a freed slot",
            |event| matches!(event, StoreEvent::Freed(freed, _) if freed.as_str() == provider),
        )
        .await;
    }
    assert!(used.len() > 1, "the providers must lie on several nodes: {used:?}");
    let many = PROVIDERS.map(|provider| one.for_provider(provider));
    let lent = futures_util::future::join_all(many.iter().map(|it| it.lend("other"))).await;
    let all = many.iter().zip(&lent).map(|(it, lent)| it.giving_back(lent)).collect();
    assert_eq!(one.store.release(all).await.unwrap(), PROVIDERS.len());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cluster_that_moves_a_master_is_followed_and_leases_are_reasserted_there() {
    let cluster = Cluster::with_replicas(3, 1).await;
    let nodes = cluster.nodes().iter().map(|node| host(node.addr())).collect();
    let sidecar = Sidecar::open(&config(Topology::Cluster(nodes))).await;
    let mut events = sidecar.store.subscribe();
    sidecar.serve(&[("k", 2)]).await.unwrap();
    let lent = sidecar.lend("k").await;
    let master = cluster.node_of_key(&sidecar.name("epoch")).await;
    let before = sidecar.store.renew(sidecar.renewal(&[&lent])).await.unwrap();
    assert_eq!(before.epoch, lent.grant.epoch);
    // an orderly change: nothing is lost, and the epoch in the caller's eyes is another
    let replica = cluster.failover(master).await;
    let took = sidecar.comes_back(BACK, "k").await;
    assert!(took < BACK, "{took:?}");
    let after = sidecar.store.renew(sidecar.renewal(&[&lent])).await.unwrap();
    assert!(matches!(after.answers[0], RenewAnswer::Renewed(_)), "{after:?}");
    assert_ne!(after.epoch, before.epoch, "another server's history");
    let again = Renew { reassert: true, epoch: Some(before.epoch.clone()), ..sidecar.renewal(&[&lent]) };
    let again = sidecar.store.renew(again).await.unwrap();
    assert!(matches!(again.answers[0], RenewAnswer::Renewed(_)), "{again:?}");
    // which starts the grace: nothing new is lent for a while
    sidecar.refused_as_full("k").await;
    let grace = cluster.command_on(replica, &["HGET", &sidecar.name("epoch"), "grace_until_ms"]).await;
    assert!(grace.int() > 0);
    cluster.command_on(replica, &["HSET", &sidecar.name("epoch"), "grace_until_ms", "1"]).await;
    // a death
    let kept = sidecar.lend("k").await;
    let in_sync = async || (cluster.node(master).info("master_link_status").await == "up").then_some(());
    cluster.node(master).eventually("the old master follows", BACK, in_sync).await;
    cluster.command_on(replica, &["WAIT", "1", "1000"]).await;
    cluster.kill(replica);
    let begun = Instant::now();
    let mut longest = Duration::ZERO;
    while sidecar.renew(&kept).await.is_err() {
        longest = longest.max({
            let begun = Instant::now();
            no_answer_or_grant(&sidecar.acquire("k").await);
            begun.elapsed()
        });
        assert!(begun.elapsed() < Duration::from_secs(15), "the cluster does not come back");
    }
    assert!(longest < CALL, "{longest:?}");
    cluster.comes_to_be_master(master).await;
    let took = eventually_took(BACK, async || sidecar.try_lend("k").await.ok()).await;
    assert!(took < BACK, "{took:?}");
    let renewed = Renew { reassert: true, ..sidecar.renewal(&[&kept]) };
    assert!(matches!(sidecar.store.renew(renewed).await.unwrap().answers[0], RenewAnswer::Renewed(_)));
    // and messages still arrive
    heard(&mut events);
    let other = Sidecar::open(&config(Topology::Cluster(vec![host(cluster.node(master).addr())]))).await;
    assert!(other.store.revoke(other.provider.clone(), kept.lease).await.unwrap());
    hears(&mut events, "a revocation", |event| matches!(event, StoreEvent::Revoked(..))).await;
}

#[track_caller]
fn no_answer_or_grant<T: std::fmt::Debug>(answer: &Result<T, StoreError>) {
    assert!(!matches!(answer, Err(StoreError::Nonsense(_))), "{answer:?}");
}

/// How long it took until `probe` had an answer.
async fn eventually_took<T>(limit: Duration, probe: impl AsyncFnMut() -> Option<T>) -> Duration {
    let begun = Instant::now();
    eventually_within(limit, "an answer", probe).await;
    begun.elapsed()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sentinels_are_followed_to_the_new_primary_when_the_old_one_dies() {
    let group = Sentinels::with(3, |builder| builder).await;
    let sentinels = group.addrs().into_iter().map(host).collect();
    let sidecar = Sidecar::open(&config(Topology::Sentinel { sentinels, primary: "primary".into() })).await;
    let mut events = sidecar.store.subscribe();
    sidecar.serve(&[("k", 4)]).await.unwrap();
    let lent = sidecar.lend("k").await;
    group.primary().await.command(&["WAIT", "1", "1000"]).await;
    let old = group.kill_primary().await;
    group.wait_failover(old).await;
    sidecar.comes_back(BACK, "k").await;
    hears(&mut events, "that it is back", |event| matches!(event, StoreEvent::Reconnected)).await;
    let renewed = sidecar.store.renew(sidecar.renewal(&[&lent])).await.unwrap();
    assert!(matches!(renewed.answers[0], RenewAnswer::Renewed(_)));
    assert_ne!(renewed.epoch, lent.grant.epoch);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sentinels_are_followed_when_the_old_primary_freezes_and_it_is_not_written_to_when_it_wakes() {
    let group = Sentinels::start().await;
    let sentinels = group.addrs().into_iter().map(host).collect();
    let sidecar = Sidecar::open(&config(Topology::Sentinel { sentinels, primary: "primary".into() })).await;
    sidecar.serve(&[("k", 4)]).await.unwrap();
    let lent = sidecar.lend("k").await;
    group.primary().await.command(&["WAIT", "1", "1000"]).await;
    let old = group.pause_primary().await;
    let begun = Instant::now();
    while sidecar.try_lend("k").await.is_err() {
        assert!(begun.elapsed() < Duration::from_secs(5), "the new primary is not found"); // 0.5 s to notice

        tokio::time::sleep(ms(20)).await;
    }
    let new = group.wait_failover(old).await;
    old.resume();
    for _ in 0..50 {
        let more = sidecar.lend("k").await;
        sidecar.release(&more).await.unwrap();
        tokio::time::sleep(ms(5)).await;
    }
    let lease = sidecar.lend("k").await.lease.to_string();
    let known = sidecar.name(&format!("lease:{lease}"));
    assert_eq!(new.command(&["EXISTS", &known]).await, 1);
    assert_eq!(
        old.command(&["ZSCORE", &sidecar.name("key:k:leases"), &lease]).await,
        support::redis::Reply::Nil
    );
    assert!(matches!(sidecar.renew(&lent).await.unwrap(), RenewAnswer::Renewed(_)));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_of_a_cluster_that_is_not_heard_stops_its_own_providers_alone() {
    let cluster = Cluster::start(3).await;
    let nodes: Vec<_> = cluster.nodes().iter().map(|node| host(node.addr())).collect();
    let sidecar = Sidecar::open(&config(Topology::Cluster(nodes.clone()))).await;
    let stores = cluster.node_of_key("lessor:store").await;
    let (mut away, mut there) = (None, None);
    for provider in PROVIDERS {
        let one = sidecar.for_provider(provider);
        let node = cluster.node_of_key(&one.name("epoch")).await;
        if node == stores {
            there = Some(one);
        } else {
            away = Some((one, node));
        }
    }
    let ((away, node), there) = (away.unwrap(), there.unwrap());
    let proxy = FaultProxy::start(cluster.node(node).addr()).await;
    cluster.reach_through(node, &proxy).await;
    let seeds = nodes.into_iter().enumerate().filter(|(at, _)| *at != node).map(|(_, seed)| seed).collect();
    let store = Sidecar::open(&config(Topology::Cluster(seeds))).await.store;
    let (away, there) = (Sidecar { store: store.clone(), ..away }, Sidecar { store, ..there });
    for one in [&away, &there] {
        one.serve(&[("k", 1000)]).await.unwrap();
    }
    let lent = away.lend("k").await;
    proxy.black_hole();
    for (what, answer, took) in away.tries_everything(&lent).await {
        if what != "ping" {
            no_answer(&answer); // that one goes where the store's own hash lies
        }
        assert!(took < CALL, "{what} took {took:?}");
    }
    let done = Instant::now() + Duration::from_secs(3);
    let mut events = away.store.subscribe();
    let trying = async {
        let mut at_once = 0;
        while Instant::now() < done {
            let begun = Instant::now();
            no_answer(&away.try_lend("k").await);
            at_once += u32::from(begun.elapsed() < AT_ONCE);
            tokio::time::sleep(ms(20)).await;
        }
        assert!(at_once > 10, "{at_once} calls failed at once");
    };
    let serving = async {
        let mut took = Vec::new();
        while Instant::now() < done {
            let begun = Instant::now();
            let lent = there.lend("k").await;
            took.push(begun.elapsed());
            assert_eq!(there.release(&lent).await.unwrap(), 1);
            tokio::time::sleep(ms(5)).await;
        }
        took.sort();
        assert!(took.len() > 50 && took[took.len() / 2] < ms(20), "{took:?}");
    };
    tokio::join!(trying, serving);
    proxy.heal().await;
    away.comes_back(BACK, "k").await;
    // who holds leases there is told to reassert them
    hears(&mut events, "that it is back", |event| matches!(event, StoreEvent::Reconnected)).await;
    assert!(matches!(away.renew(&lent).await.unwrap(), RenewAnswer::Renewed(_)));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cluster_that_was_down_as_a_whole_is_found_again() {
    let cluster = Cluster::start(3).await;
    let nodes = cluster.nodes().iter().map(|node| host(node.addr())).collect();
    let sidecar = Sidecar::open(&config(Topology::Cluster(nodes))).await;
    let sidecars = PROVIDERS.map(|provider| sidecar.for_provider(provider));
    for one in &sidecars {
        one.serve(&[("k", 2)]).await.unwrap();
        one.lend("k").await;
    }
    let salt = sidecar.store.salt(None).await.unwrap();
    (0..3).for_each(|node| cluster.kill(node));
    for one in &sidecars {
        for nth in 0..4 {
            let begun = Instant::now();
            no_answer(&one.acquire("k").await);
            assert!(
                begun.elapsed() < if nth < 3 { CALL } else { AT_ONCE },
                "call {nth}: {:?}",
                begun.elapsed()
            );
        }
    }
    for node in cluster.nodes() {
        node.restart().await;
    }
    cluster.comes_to_ok().await;
    let begun = Instant::now();
    for one in &sidecars {
        eventually_within(BACK, "the store answers", async || one.serve(&[("k", 2)]).await.ok()).await;
        one.lend("k").await;
    }
    assert!(begun.elapsed() < BACK, "{:?}", begun.elapsed());
    let first = cluster.nodes().iter().map(|node| host(node.addr())).collect();
    let fresh = Sidecar::open(&config(Topology::Cluster(first))).await;
    assert_eq!(fresh.store.salt(None).await.unwrap(), salt);
}

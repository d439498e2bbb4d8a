//! What one acquire and release cost in each store, and what they cost Redis.
//!
//! `cargo bench --bench stores` starts a Redis of its own. Each line: the store, the keys of the pool, the
//! leases in flight, µs of wall time, of this process' CPU and of Redis' CPU per lease.
#![allow(clippy::unwrap_used, clippy::print_stdout, clippy::cast_precision_loss, missing_docs)]

use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use lessor::config::{HostPort, RedisConfig, Topology};
use lessor::model::{AppName, Fingerprint, KeyId, LeaseId, OwnerId, PoolName, ProviderName};
use lessor::store::memory::MemoryStore;
use lessor::store::redis::RedisStore;
use lessor::store::{Acquire, Acquired, Candidate, KeySettings, Release, Store, SyncKeys, SyncMode};

const TIME: Duration = Duration::from_secs(2);
const CANDIDATES: usize = 3;

struct Server(Child, u16);

impl Server {
    fn start() -> Self {
        let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let child = Command::new("redis-server")
            .args(["--port", &port.to_string(), "--save", "", "--appendonly", "no", "--bind", "127.0.0.1"])
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        while std::net::TcpStream::connect(("127.0.0.1", port)).is_err() {
            std::thread::sleep(Duration::from_millis(5));
        }
        Self(child, port)
    }

    /// CPU seconds so far.
    fn cpu(&self) -> f64 {
        cpu_of(&format!("/proc/{}/stat", self.0.id()))
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn cpu_of(stat: &str) -> f64 {
    let text = std::fs::read_to_string(stat).unwrap();
    let fields: Vec<&str> = text.rsplit_once(')').unwrap().1.split_whitespace().collect();
    (fields[11].parse::<f64>().unwrap() + fields[12].parse::<f64>().unwrap()) / 100.0
}

fn main() {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let server = Server::start();
    let at = RedisConfig::plain(Topology::Single(HostPort { host: "127.0.0.1".into(), port: server.1 }));
    println!("store   keys  in flight   leases/s   µs wall   µs CPU   µs Redis CPU   refused");
    for keys in [1, 20, 200] {
        for in_flight in [1, 16, 64] {
            let memory: Arc<dyn Store> = Arc::new(MemoryStore::new());
            runtime.block_on(measure("memory", memory, keys, in_flight, || 0.0));
            let prefix = format!("bench-{keys}-{in_flight}");
            let redis = runtime.block_on(RedisStore::open(&at, &prefix)).unwrap();
            runtime.block_on(measure("redis", Arc::new(redis), keys, in_flight, || server.cpu()));
        }
    }
}

async fn measure(name: &str, store: Arc<dyn Store>, keys: usize, in_flight: usize, cpu: impl Fn() -> f64) {
    let provider = ProviderName::parse("openai").unwrap();
    let owner = OwnerId::fresh();
    let id = |n: usize| KeyId::parse(&format!("key-{n}")).unwrap();
    let secret = Fingerprint([7; 32]);
    let settings = (0..keys).map(|n| KeySettings {
        key: id(n),
        pool: PoolName::default_pool(),
        group: None,
        max_concurrent_uses: 100_000,
        fingerprint: Some(secret),
    });
    let sync = SyncKeys {
        provider: provider.clone(),
        owner: owner.clone(),
        mode: SyncMode::Replace,
        keys: settings.collect(),
    };
    store.sync_keys(sync).await.unwrap();
    let (done, refused) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
    let (began, own_before, server_before) = (Instant::now(), cpu_of("/proc/self/stat"), cpu());
    let tasks: Vec<_> = (0..in_flight)
        .map(|task| {
            let (store, done, refused) = (store.clone(), done.clone(), refused.clone());
            let (provider, owner) = (provider.clone(), owner.clone());
            tokio::spawn(async move {
                let mut turn = task;
                while began.elapsed() < TIME {
                    for _ in 0..20 {
                        turn += 1;
                        let candidates = (0..CANDIDATES.min(keys)).map(|n| Candidate {
                            key: id((turn + n) % keys),
                            pool: PoolName::default_pool(),
                            group: None,
                            fingerprint: secret,
                        });
                        let lease = LeaseId::fresh();
                        let ask = Acquire {
                            provider: provider.clone(),
                            lease,
                            owner: owner.clone(),
                            app: AppName::anonymous(),
                            model: None,
                            candidates: candidates.collect(),
                            ttl: Duration::from_secs(30),
                            deadline: store.now().plus(Duration::from_secs(2)),
                        };
                        let Ok(Acquired::Granted(grant)) = store.acquire(ask).await else {
                            refused.fetch_add(1, Ordering::Relaxed);
                            continue;
                        };
                        let release = Release {
                            provider: provider.clone(),
                            lease,
                            key: grant.key,
                            pool: grant.pool,
                            group: None,
                        };
                        store.release(vec![release]).await.unwrap();
                        done.fetch_add(1, Ordering::Relaxed);
                    }
                    tokio::task::yield_now().await;
                }
            })
        })
        .collect();
    for task in tasks {
        task.await.unwrap();
    }
    let (wall, leases) = (began.elapsed().as_secs_f64(), done.load(Ordering::Relaxed) as f64);
    let per = |seconds: f64| seconds * 1e6 / leases;
    println!(
        "{name:<7} {keys:>4}  {in_flight:>9}   {:>8.0}   {:>7.1}   {:>6.1}   {:>12.1}   {:>7}",
        leases / wall,
        per(wall),
        per(cpu_of("/proc/self/stat") - own_before),
        per(cpu() - server_before),
        refused.load(Ordering::Relaxed),
    );
}

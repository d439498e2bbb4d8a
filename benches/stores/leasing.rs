//! Acquiring and releasing leases in a store as fast as it gives them.

use std::sync::Arc;
use std::time::{Duration, Instant};

use lessor::model::{AppName, Fingerprint, KeyId, LeaseId, OwnerId, PoolName, ProviderName};
use lessor::store::{
    Acquire, Acquired, Candidate, KeySettings, Release, Store, StoreError, SyncKeys, SyncMode,
};
use tokio::task::JoinSet;

/// Keys that an acquire names, as lessor does of the best.
const CANDIDATES: usize = 3;
const SECRET: Fingerprint = Fingerprint([7; 32]);

/// What is asked of a store.
pub(crate) struct Shape {
    pub(crate) keys: usize,
    pub(crate) in_flight: usize,
    pub(crate) time: Duration,
}

/// What it took.
pub(crate) struct Cost {
    /// Leases a second.
    pub(crate) per_second: f64,
    /// CPU of this process, µs a lease.
    pub(crate) own: f64,
    /// CPU of the store's server, µs a lease.
    pub(crate) server: f64,
}

/// Measures it; `own` and `server` say how much CPU this process and the store's server have had, in µs.
pub(crate) async fn measure(
    store: Arc<dyn Store>,
    shape: &Shape,
    own: impl Fn() -> f64,
    server: impl Fn() -> f64,
) -> Result<Cost, Box<dyn std::error::Error + Send + Sync>> {
    let provider = ProviderName::parse("openai")?;
    let owner = OwnerId::fresh();
    let keys: Arc<[KeyId]> =
        (0..shape.keys).map(|nth| KeyId::parse(&format!("key-{nth}"))).collect::<Result<_, _>>()?;
    let sync = SyncKeys {
        provider: provider.clone(),
        owner: owner.clone(),
        mode: SyncMode::Replace,
        keys: keys.iter().cloned().map(settings).collect(),
    };
    store.sync_keys(sync).await?;
    let (began, own_before, server_before) = (Instant::now(), own(), server());
    let mut lending = JoinSet::new();
    for task in 0..shape.in_flight {
        let lender = Lender { store: store.clone(), provider: provider.clone(), owner: owner.clone() };
        lending.spawn(lender.lend(task, keys.clone(), began + shape.time));
    }
    let mut leases = 0;
    while let Some(done) = lending.join_next().await {
        leases += done??;
    }
    let leases = f64::from(leases);
    Ok(Cost {
        per_second: leases / began.elapsed().as_secs_f64(),
        own: (own() - own_before) / leases,
        server: (server() - server_before) / leases,
    })
}

fn settings(key: KeyId) -> KeySettings {
    KeySettings {
        key,
        pool: PoolName::default_pool(),
        group: None,
        max_concurrent_uses: 100_000,
        fingerprint: Some(SECRET),
    }
}

struct Lender {
    store: Arc<dyn Store>,
    provider: ProviderName,
    owner: OwnerId,
}

impl Lender {
    /// One lease after another until then; how many there were.
    async fn lend(self, task: usize, keys: Arc<[KeyId]>, until: Instant) -> Result<u32, StoreError> {
        let mut leases = 0;
        while Instant::now() < until {
            for _ in 0..20 {
                leases += 1;
                let turn = task + leases as usize;
                let candidates = keys.iter().cycle().skip(turn % keys.len()).take(CANDIDATES.min(keys.len()));
                self.once(candidates.cloned()).await?;
            }
            tokio::task::yield_now().await; // a store that never waits would let nobody else run
        }
        Ok(leases)
    }

    async fn once(&self, candidates: impl Iterator<Item = KeyId>) -> Result<(), StoreError> {
        let lease = LeaseId::fresh();
        let candidate =
            |key| Candidate { key, pool: PoolName::default_pool(), group: None, fingerprint: SECRET };
        let ask = Acquire {
            provider: self.provider.clone(),
            lease,
            owner: self.owner.clone(),
            app: AppName::anonymous(),
            model: None,
            candidates: candidates.map(candidate).collect(),
            ttl: Duration::from_secs(30),
            deadline: self.store.now().plus(Duration::from_secs(2)),
        };
        let Acquired::Granted(grant) = self.store.acquire(ask).await? else {
            panic!("there is room for all, and one was refused");
        };
        let provider = self.provider.clone();
        let release = Release { provider, lease, key: grant.key, pool: grant.pool, group: None };
        self.store.release(vec![release]).await.map(|_| ())
    }
}

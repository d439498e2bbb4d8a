//! This process as one of those that share a store: it introduces its keys, hears what others did to them,
//! and helps to keep the store sound.
//!
//! All of it is beside the walk. A store that cannot be reached at the start keeps nobody from starting:
//! the introduction is made as soon as it is there, and until then no key is lent.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rand::Rng as _;
use tokio::sync::Notify;
use tokio::sync::broadcast::error::RecvError;
use tokio::time::{Instant, sleep_until, timeout};
use tokio_util::sync::CancellationToken;

use crate::metrics::Metrics;
use crate::model::{KeyId, KeyStatus, OwnerId, ProviderName};
use crate::route::ring::{ProviderKeys, Ring, RingKey};
use crate::store::{KeySettings, StatusChange, Store, StoreError, StoreEvent, SyncKeys, SyncMode, Synced};

/// How long one call may take.
const LIMIT: Duration = Duration::from_secs(5);
/// How soon an introduction that failed is tried again.
const AGAIN: Duration = Duration::from_secs(1);
/// How often this process says that it serves its keys, and reconciles; jittered by half of it.
const ROUND: Duration = Duration::from_mins(5);
/// How soon after the first word of a change the keys are looked at: changes come in bursts.
const SETTLE: Duration = Duration::from_millis(500);

/// See the module.
#[derive(Clone)]
pub struct Fleet {
    store: Arc<dyn Store>,
    ring: Arc<Ring>,
    owner: OwnerId,
    metrics: Metrics,
    asked: Arc<Asked>,
    told: Arc<Mutex<Told>>,
}

/// What this process told last of each key.
type Told = HashMap<(ProviderName, KeyId), KeySettings>;

/// An introduction that is wanted anew.
#[derive(Default)]
struct Asked {
    now: Notify,
    /// Keys that the configuration switched on again.
    enabled: Mutex<Vec<(ProviderName, KeyId)>>,
}

impl Fleet {
    /// Does nothing yet.
    pub fn new(store: Arc<dyn Store>, ring: Arc<Ring>, owner: OwnerId, metrics: Metrics) -> Self {
        Self { store, ring, owner, metrics, asked: Arc::default(), told: Arc::default() }
    }

    /// The configuration changed: the store is told soon, and these keys are switched on.
    pub fn reintroduce(&self, enabled: Vec<(ProviderName, KeyId)>) {
        self.enabled().extend(enabled);
        self.asked.now.notify_one();
    }

    fn enabled(&self) -> MutexGuard<'_, Vec<(ProviderName, KeyId)>> {
        self.asked.enabled.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What the store is told again when it lacks a key's settings.
    pub fn repair(&self) -> Arc<dyn Fn(&ProviderName) -> SyncKeys + Send + Sync> {
        let this = self.clone();
        Arc::new(move |provider| match this.ring.of(provider.as_str()) {
            Some(keys) => this.settings(&keys, SyncMode::Repair),
            None => SyncKeys {
                provider: provider.clone(),
                owner: this.owner.clone(),
                mode: SyncMode::Repair,
                keys: Vec::new(),
            },
        })
    }

    fn settings(&self, keys: &ProviderKeys, mode: SyncMode) -> SyncKeys {
        SyncKeys {
            provider: keys.provider.name.clone(),
            owner: self.owner.clone(),
            mode,
            keys: keys.keys.iter().map(RingKey::settings).collect(),
        }
    }

    /// Agrees on the salt of fingerprints and writes this process' settings: whoever starts last decides.
    ///
    /// # Errors
    /// The store's. Safe to repeat.
    pub async fn introduce(&self) -> Result<(), StoreError> {
        self.tell(SyncMode::Replace).await
    }

    async fn tell(&self, mode: SyncMode) -> Result<(), StoreError> {
        let salt = bounded(self.store.salt(Some(self.ring.salt()))).await?;
        self.ring.salt_with(&salt);
        for keys in self.ring.all() {
            let settings = self.settings(&keys, mode);
            let found = bounded(self.store.sync_keys(settings.clone())).await?;
            self.say(&settings, &found);
            for key in keys.keys.iter().filter(|key| key.config.disabled) {
                let (provider, id) = (keys.provider.name.clone(), key.config.id.clone());
                bounded(self.store.set_status(provider, id, StatusChange::Disable)).await?;
            }
        }
        loop {
            // Taken out only once the store has heard it.
            let Some((provider, id)) = self.enabled().last().cloned() else { break };
            bounded(self.store.set_status(provider.clone(), id.clone(), StatusChange::Enable)).await?;
            self.enabled().retain(|done| *done != (provider.clone(), id.clone()));
        }
        self.metrics.store_up(true);
        Ok(())
    }

    /// Settings that this process had told itself are its own change, of which the reload speaks.
    fn say(&self, told: &SyncKeys, found: &Synced) {
        let (provider, mut known) =
            (&told.provider, self.told.lock().unwrap_or_else(PoisonError::into_inner));
        for now in &told.keys {
            let own = known.insert((provider.clone(), now.key.clone()), now.clone());
            let former = found.differing.iter().find(|former| former.key == now.key);
            let Some(former) = former.filter(|former| own.as_ref() != Some(former)) else { continue };
            if told.mode == SyncMode::Replace {
                tracing::warn!(
                    %provider, key = %now.key, differs = differences(former, now),
                    "another sidecar, or this one before its start, gave this key other settings; those of this \
                     sidecar count from now on"
                );
            }
        }
        for (key, other) in &found.same_secret {
            tracing::warn!(
                %provider, %key, %other,
                "two keys have one secret, so the provider counts them as one; give each a secret of its own"
            );
        }
    }

    /// The task; ends with `stop`.
    pub async fn run(self, introduced: bool, stop: CancellationToken) {
        let mut events = self.store.subscribe();
        let mut introduced = introduced;
        // Who was introduced once is no newcomer, whose settings would count more than others'.
        let mut mode = if introduced { SyncMode::Repair } else { SyncMode::Replace };
        let mut next_introduction = Instant::now() + AGAIN;
        let mut next_round = Instant::now() + jittered(ROUND);
        let mut changed: HashSet<ProviderName> = HashSet::new();
        let mut next_look: Option<Instant> = None;
        loop {
            tokio::select! {
                biased;
                () = stop.cancelled() => return,
                event = events.recv() => match event {
                    Ok(StoreEvent::Resalted) => {
                        introduced = false;
                        next_introduction = Instant::now();
                    }
                    Ok(StoreEvent::Reconnected) => {
                        if !introduced {
                            next_introduction = Instant::now();
                        }
                        changed.extend(self.providers());
                    }
                    Ok(StoreEvent::Changed(provider)) => {
                        changed.insert(provider);
                    }
                    Ok(StoreEvent::Freed(..) | StoreEvent::Revoked(..) | StoreEvent::Away(_)) => {}
                    Err(RecvError::Lagged(_)) => changed.extend(self.providers()),
                    Err(RecvError::Closed) => return,
                },
                () = self.asked.now.notified() => {
                    (introduced, mode) = (false, SyncMode::Replace);
                    next_introduction = Instant::now();
                }
                () = sleep_until(next_introduction), if !introduced => {
                    introduced = self.tell(mode).await.is_ok();
                    if introduced {
                        mode = SyncMode::Repair;
                    }
                    next_introduction = Instant::now() + AGAIN;
                }
                () = at(next_look), if next_look.is_some() => {
                    next_look = None;
                    for provider in changed.drain() {
                        self.look(&provider).await;
                    }
                }
                () = sleep_until(next_round) => {
                    self.round().await;
                    next_round = Instant::now() + jittered(ROUND);
                }
            }
            if !changed.is_empty() && next_look.is_none() {
                next_look = Some(Instant::now() + SETTLE);
            }
        }
    }

    fn providers(&self) -> impl Iterator<Item = ProviderName> {
        self.ring.all().into_iter().map(|keys| keys.provider.name.clone())
    }

    /// Keys that a person switched on or off at another sidecar are so here too.
    async fn look(&self, provider: &ProviderName) {
        let Some(keys) = self.ring.of(provider.as_str()) else { return };
        let Ok(seen) = bounded(self.store.snapshot(provider.clone())).await else { return };
        for view in &seen.keys {
            keys.switch(&view.id, view.status != KeyStatus::Disabled);
        }
    }

    /// Says that the keys are served still, and repairs what cannot be.
    async fn round(&self) {
        if let Ok(salt) = bounded(self.store.salt(Some(self.ring.salt()))).await {
            self.ring.salt_with(&salt);
        }
        for keys in self.ring.all() {
            let provider = &keys.provider.name;
            // A store that fails has its own log line and metric, by whoever needs it for a request.
            let _ = bounded(self.store.sync_keys(self.settings(&keys, SyncMode::Repair))).await;
            if let Ok(repaired @ 1..) = bounded(self.store.reconcile(provider.clone())).await {
                self.metrics.reconciled(repaired);
                tracing::warn!(%provider, repaired, "the store held what cannot be; it was repaired");
            }
        }
    }
}

async fn bounded<T>(answer: crate::store::Answer<T>) -> Result<T, StoreError> {
    timeout(LIMIT, answer).await.unwrap_or(Err(StoreError::TimedOut(LIMIT)))
}

async fn at(when: Option<Instant>) {
    if let Some(when) = when {
        sleep_until(when).await;
    }
}

fn jittered(time: Duration) -> Duration {
    time.mul_f64(rand::rng().random_range(0.5..1.5))
}

/// In people's words; a secret differs, and nothing more is said of it.
fn differences(former: &KeySettings, now: &KeySettings) -> String {
    let group = |settings: &KeySettings| settings.group.as_ref().map_or("none".into(), ToString::to_string);
    let (uses_were, uses) = (former.max_concurrent_uses, now.max_concurrent_uses);
    let all = [
        (uses_were != uses).then(|| format!("max_concurrent_uses was {uses_were}, is {uses}")),
        (former.pool != now.pool).then(|| format!("pool was {}, is {}", former.pool, now.pool)),
        (former.group != now.group).then(|| format!("group was {}, is {}", group(former), group(now))),
        (former.fingerprint != now.fingerprint).then(|| "another secret".into()),
    ];
    all.into_iter().flatten().collect::<Vec<_>>().join("; ")
}

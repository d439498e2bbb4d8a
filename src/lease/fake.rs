//! A store for tests: counts slots, writes down what it was asked, and fails, hangs or forgets on demand.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::sync::broadcast;
use tokio::time::Instant;

use super::lock;
use crate::model::{Class, FencingToken, GroupName, KeyId, KeyStatus, LeaseId, ModelName, ProviderName};
use crate::store::{
    Acquire, Acquired, Answer, Epoch, Grant, Reason, Refusal, Release, Renew, RenewAnswer, Renewed, Report,
    Reported, Snapshot, StatusChange, Store, StoreError, StoreEvent, StoreTime, SyncKeys, Synced,
};

/// What the store is told to do and what it has seen.
pub(super) struct State {
    pub(super) caps: HashMap<KeyId, usize>,
    pub(super) live: BTreeMap<KeyId, BTreeSet<LeaseId>>,
    pub(super) cooling: HashMap<(KeyId, Option<ModelName>), StoreTime>,
    pub(super) unusable: BTreeSet<KeyId>,
    /// The store has no settings of any key until the next `sync_keys`.
    pub(super) bare: bool,
    pub(super) fails: Option<StoreError>,
    /// Each call takes this long before it has an effect, and as long again until its answer.
    pub(super) latency: Duration,
    /// Calls have their effect, but no answer.
    pub(super) mute: bool,
    /// Yields between the parts of a call.
    pub(super) yields: bool,
    pub(super) wants_success: bool,
    pub(super) probe: bool,
    pub(super) lease_end: Option<StoreTime>,
    pub(super) epoch: &'static str,
    /// Leases that were revoked.
    pub(super) revoked: BTreeSet<LeaseId>,
    /// Every call, in the order of effect: `acquire k1`, `report k1 rate`, `release 1`, `renew 10`,
    /// `reassert 10`, `sync`.
    pub(super) log: Vec<String>,
    /// The wait of each report.
    pub(super) waits: Vec<Option<Duration>>,
    /// What grants tell of the key's group.
    pub(super) group: Option<GroupName>,
    /// The most leases that any key ever had above its cap.
    pub(super) excess: usize,
    tokens: u64,
}

/// See the module.
#[derive(Clone)]
pub(super) struct Recorder {
    pub(super) state: Arc<Mutex<State>>,
    pub(super) events: broadcast::Sender<StoreEvent>,
    born: Instant,
    pub(super) expire: bool,
}

impl Recorder {
    pub(super) fn new(caps: &[(&str, usize)]) -> Self {
        let state = State {
            caps: caps.iter().map(|(key, cap)| (KeyId::parse(key).unwrap(), *cap)).collect(),
            live: BTreeMap::new(),
            cooling: HashMap::new(),
            unusable: BTreeSet::new(),
            bare: false,
            fails: None,
            latency: Duration::ZERO,
            mute: false,
            yields: false,
            wants_success: false,
            probe: false,
            lease_end: None,
            epoch: "one",
            revoked: BTreeSet::new(),
            log: Vec::new(),
            waits: Vec::new(),
            group: None,
            excess: 0,
            tokens: 0,
        };
        Self {
            state: Arc::new(Mutex::new(state)),
            events: broadcast::channel(16).0,
            born: Instant::now(),
            expire: true,
        }
    }

    pub(super) fn set(&self, change: impl FnOnce(&mut State)) {
        change(&mut lock(&self.state));
    }

    /// Live leases of all keys.
    pub(super) fn live(&self) -> usize {
        lock(&self.state).live.values().map(BTreeSet::len).sum()
    }

    pub(super) fn log(&self) -> Vec<String> {
        lock(&self.state).log.clone()
    }

    /// The log's entries that begin with `verb`.
    pub(super) fn logged(&self, verb: &str) -> Vec<String> {
        self.log().into_iter().filter(|entry| entry.starts_with(verb)).collect()
    }

    fn call<T: Send + 'static>(
        &self,
        effect: impl FnOnce(&mut State) -> Result<T, StoreError> + Send + 'static,
    ) -> Answer<T> {
        let state = Arc::clone(&self.state);
        Box::pin(async move {
            let (latency, yields) = {
                let state = lock(&state);
                (state.latency, state.yields)
            };
            pause(latency, yields).await;
            let (answer, mute) = {
                let mut state = lock(&state);
                let answer = match state.fails.clone() {
                    Some(error) => Err(error),
                    None => effect(&mut state),
                };
                (answer, state.mute)
            };
            if mute {
                std::future::pending::<()>().await;
            }
            pause(latency, yields).await;
            answer
        })
    }
}

async fn pause(latency: Duration, yields: bool) {
    if !latency.is_zero() {
        tokio::time::sleep(latency).await;
    }
    if yields {
        tokio::task::yield_now().await;
    }
}

impl State {
    fn why_not(&self, key: &KeyId, model: Option<&ModelName>, now: StoreTime) -> Option<Reason> {
        if self.bare {
            return Some(Reason::NoSettings);
        }
        let Some(cap) = self.caps.get(key) else { return Some(Reason::NotMember) };
        if self.unusable.contains(key) {
            return Some(Reason::Unusable(KeyStatus::Invalid));
        }
        for scope in [None, model.cloned()] {
            if let Some(end) = self.cooling.get(&(key.clone(), scope)).filter(|end| **end > now) {
                return Some(Reason::Cooling { until: *end, class: Class::Rate });
            }
        }
        (self.live.get(key).map_or(0, BTreeSet::len) >= *cap).then_some(Reason::Full)
    }

    fn acquire(&mut self, ask: &Acquire, now: StoreTime) -> Acquired {
        if now > ask.deadline {
            return Acquired::Late;
        }
        let mut refusal = Refusal { lease_end: self.lease_end, ..Refusal::default() };
        for candidate in ask.candidates.iter() {
            let Some(reason) = self.why_not(&candidate.key, ask.model.as_ref(), now) else {
                self.take(&candidate.key, ask.lease);
                self.log.push(format!("acquire {}", candidate.key));
                self.tokens += 1;
                return Acquired::Granted(Grant {
                    key: candidate.key.clone(),
                    pool: candidate.pool.clone(),
                    token: FencingToken(self.tokens),
                    expires_at: now.plus(ask.ttl),
                    probe: self.probe,
                    wants_success: self.wants_success,
                    epoch: Epoch(self.epoch.into()),
                    group: self.group.clone(),
                });
            };
            if let Reason::Cooling { until: end, .. } = reason {
                refusal.cooldown_end = Some(refusal.cooldown_end.map_or(end, |earlier| earlier.min(end)));
            }
            refusal.reasons.push((candidate.key.clone(), reason));
        }
        self.log.push("refuse".into());
        Acquired::Refused(refusal)
    }

    fn take(&mut self, key: &KeyId, lease: LeaseId) {
        let live = self.live.entry(key.clone()).or_default();
        live.insert(lease);
        self.excess = self.excess.max(live.len().saturating_sub(self.caps.get(key).copied().unwrap_or(0)));
    }

    fn renew(&mut self, ask: &Renew, now: StoreTime) -> Renewed {
        let verb = if ask.reassert { "reassert" } else { "renew" };
        self.log.push(format!("{verb} {}", ask.leases.len()));
        let mut answers = Vec::new();
        for held in &ask.leases {
            let known = self.live.get(&held.key).is_some_and(|live| live.contains(&held.lease));
            let revoked = self.revoked.contains(&held.lease);
            if ask.reassert && !known && !revoked && self.why_not(&held.key, None, now).is_none() {
                self.take(&held.key, held.lease);
                answers.push(RenewAnswer::Renewed(now.plus(ask.ttl)));
            } else if known && !revoked {
                answers.push(RenewAnswer::Renewed(now.plus(ask.ttl)));
            } else {
                answers.push(RenewAnswer::Lost);
            }
        }
        Renewed { epoch: Epoch(self.epoch.into()), answers }
    }

    fn release(&mut self, asks: &[Release]) -> usize {
        self.log.push(format!("release {}", asks.len()));
        let mut freed = 0;
        for ask in asks {
            let held = self.live.get_mut(&ask.key).is_some_and(|live| live.remove(&ask.lease));
            freed += usize::from(held);
        }
        freed
    }
}

impl Store for Recorder {
    fn acquire(&self, ask: Acquire) -> Answer<Acquired> {
        let store = self.clone();
        self.call(move |state| Ok(state.acquire(&ask, store.now())))
    }

    fn renew(&self, ask: Renew) -> Answer<Renewed> {
        let store = self.clone();
        self.call(move |state| Ok(state.renew(&ask, store.now())))
    }

    fn release(&self, asks: Vec<Release>) -> Answer<usize> {
        self.call(move |state| Ok(state.release(&asks)))
    }

    fn report(&self, ask: Report) -> Answer<Reported> {
        self.call(move |state| {
            state.log.push(format!("report {} {}", ask.key, ask.outcome.class.as_str()));
            state.waits.push(ask.outcome.wait);
            Ok(Reported::default())
        })
    }

    fn sync_keys(&self, _: SyncKeys) -> Answer<Synced> {
        self.call(|state| {
            state.log.push("sync".into());
            state.bare = false;
            Ok(Synced::default())
        })
    }

    fn set_status(&self, _: ProviderName, _: KeyId, _: StatusChange) -> Answer<bool> {
        self.call(|_| Ok(false))
    }

    fn revoke(&self, _: ProviderName, lease: LeaseId) -> Answer<bool> {
        self.call(move |state| Ok(state.revoked.insert(lease)))
    }

    fn snapshot(&self, _: ProviderName) -> Answer<Snapshot> {
        self.call(|_| Ok(Snapshot::default()))
    }

    fn subscribe(&self) -> broadcast::Receiver<StoreEvent> {
        self.events.subscribe()
    }

    fn now(&self) -> StoreTime {
        StoreTime(1_000_000).plus(self.born.elapsed())
    }

    fn salt(&self, _: Option<[u8; 32]>) -> Answer<[u8; 32]> {
        self.call(|_| Ok([0; 32]))
    }

    fn reconcile(&self, _: ProviderName) -> Answer<u64> {
        self.call(|state| {
            state.log.push("reconcile".into());
            Ok(0)
        })
    }

    fn leases_expire(&self) -> bool {
        self.expire
    }

    fn ping(&self) -> Answer<()> {
        self.call(|_| Ok(()))
    }

    fn kind(&self) -> &'static str {
        "fake"
    }
}

//! The process's own view of the keys: which fit a request, and in which order to try them.
//!
//! The store decides; this view only orders candidates and takes out what would be refused anyway, so
//! a stale value costs a try and never a wrong lease.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use arc_swap::{ArcSwap, ArcSwapOption};

use crate::config::{Config, KeyConfig, Provider, Strategy};
use crate::model::{
    Candidate, Fingerprint, GroupName, KeyId, KeySettings, ModelName, PoolName, ProviderName,
};

/// Idleness counts up to this; longer is not more idle (design, section 6).
const IDLE_SATURATES: Duration = Duration::from_mins(5);

/// All keys of all served providers. What it holds may be replaced while it is in use: whoever has looked
/// goes on with what was found.
#[derive(Debug)]
pub struct Ring {
    providers: ArcSwap<Providers>,
    salt: ArcSwap<Salt>,
    born: Instant,
}

/// Providers with their keys, at one moment.
pub type Providers = HashMap<ProviderName, Arc<ProviderKeys>>;

/// The salt of fingerprints; it prints as nothing, for it would let a reader test guesses of a secret.
struct Salt([u8; 32]);

impl std::fmt::Debug for Salt {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Salt(..)")
    }
}

/// One provider's keys.
#[derive(Debug)]
pub struct ProviderKeys {
    /// The provider.
    pub provider: Arc<Provider>,
    /// Its keys, in the configuration's order.
    pub keys: Vec<RingKey>,
    fallbacks: HashMap<PoolName, Vec<PoolName>>,
    strategy: Strategy,
    turn: AtomicUsize,
    born: Instant,
}

/// One key.
#[derive(Debug)]
pub struct RingKey {
    /// Its settings and secret.
    pub config: KeyConfig,
    /// Its secret's fingerprint under the store's salt.
    fingerprint: ArcSwap<Option<Fingerprint>>,
    state: Arc<KeyState>,
}

/// What this process has seen of a key. It outlives a change of the key's settings.
#[derive(Debug, Default)]
struct KeyState {
    off: AtomicBool,
    in_flight: AtomicU32,
    /// Ms since the ring's birth at which it was last lent, plus one; 0: never.
    last_lent: AtomicU64,
    /// Where its group is `auto`: what answers have named.
    group: ArcSwapOption<GroupName>,
}

/// What is known of a request's model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ModelKnown {
    /// It has none (no body, or a path known as such): every key fits.
    NotNamed,
    /// This one.
    Named(ModelName),
    /// It may have one that could not be read: only keys without `models` fit.
    Unreadable,
}

impl ModelKnown {
    /// The name, where known.
    pub fn name(&self) -> Option<&ModelName> {
        match self {
            Self::Named(name) => Some(name),
            _ => None,
        }
    }
}

/// What one request wants of a key.
#[derive(Debug, Clone)]
pub struct Wish {
    /// The pool asked for.
    pub pool: PoolName,
    /// Its model.
    pub model: ModelKnown,
    /// The very key asked for.
    pub pinned: Option<KeyId>,
    /// Keys with which it was refused.
    refused: Vec<KeyId>,
    /// Groups that were refused whole.
    refused_groups: Vec<GroupName>,
}

impl Wish {
    /// Nothing was refused yet.
    pub fn new(pool: PoolName, model: ModelKnown, pinned: Option<KeyId>) -> Self {
        Self { pool, model, pinned, refused: Vec::new(), refused_groups: Vec::new() }
    }

    /// Rules a key out, and the whole group where the limit is the group's.
    pub fn rule_out(&mut self, key: KeyId, group: Option<GroupName>) {
        self.refused.push(key);
        self.refused_groups.extend(group);
    }

    fn rules_out(&self, key: &RingKey) -> bool {
        self.refused.contains(&key.config.id)
            || (!self.refused_groups.is_empty()
                && key.group().is_some_and(|group| self.refused_groups.contains(&group)))
    }
}

/// The keys that fit one request, in pool order.
#[derive(Debug, Clone)]
pub struct Fitting {
    /// Positions in [`ProviderKeys::keys`], with the rank of the key's pool in the chain.
    members: Vec<(usize, usize)>,
    /// The same as sorted ids: the queue this request stands in.
    pub ids: Arc<[KeyId]>,
}

impl Fitting {
    /// Whether no key fits.
    pub fn is_empty(&self) -> bool {
        self.members.is_empty()
    }
}

fn sorted_ids(keys: &ProviderKeys, members: &[(usize, usize)]) -> Arc<[KeyId]> {
    let mut ids: Vec<KeyId> = members.iter().map(|(at, _)| keys.keys[*at].config.id.clone()).collect();
    ids.sort_unstable();
    ids.into()
}

impl Ring {
    /// From the configuration, with fingerprints under a salt of its own until the store's is known.
    pub fn new(config: &Config) -> Self {
        let salt: [u8; 32] = rand::random();
        let ring = Self {
            providers: ArcSwap::default(),
            salt: ArcSwap::from_pointee(Salt(salt)),
            born: Instant::now(),
        };
        ring.replace(config);
        ring
    }

    /// Takes another configuration. What was seen of a key that stays, stays known.
    pub fn replace(&self, config: &Config) {
        let fallbacks: HashMap<PoolName, Vec<PoolName>> =
            config.pools.iter().map(|(name, to)| (name.clone(), to.clone())).collect();
        let before = self.providers.load();
        let salt = self.salt();
        let made = |key: &KeyConfig| {
            let known = before.get(&key.provider).and_then(|keys| keys.key(&key.id));
            RingKey::new(key, &salt, known)
        };
        let keys_of = |provider: &Arc<Provider>| ProviderKeys {
            provider: provider.clone(),
            keys: config.keys.iter().filter(|key| key.provider == provider.name).map(made).collect(),
            fallbacks: fallbacks.clone(),
            strategy: config.strategy,
            turn: AtomicUsize::new(0),
            born: self.born,
        };
        let keys = config.providers.values().map(|each| (each.name.clone(), Arc::new(keys_of(each))));
        self.providers.store(Arc::new(keys.collect()));
    }

    /// The salt in use.
    pub fn salt(&self) -> [u8; 32] {
        self.salt.load().0
    }

    /// Makes all fingerprints under another salt.
    pub fn salt_with(&self, salt: &[u8; 32]) {
        if self.salt() == *salt {
            return;
        }
        self.salt.store(Arc::new(Salt(*salt)));
        for key in self.all().iter().flat_map(|keys| &keys.keys) {
            key.fingerprint.store(Arc::new(fingerprint_of(&key.config, salt)));
        }
    }

    /// One provider's keys.
    pub fn of(&self, provider: &str) -> Option<Arc<ProviderKeys>> {
        self.providers.load().get(provider).cloned()
    }

    /// What it holds at this moment.
    pub fn providers(&self) -> Arc<Providers> {
        self.providers.load_full()
    }

    /// All providers' keys.
    pub fn all(&self) -> Vec<Arc<ProviderKeys>> {
        self.providers.load().values().cloned().collect()
    }
}

fn fingerprint_of(key: &KeyConfig, salt: &[u8; 32]) -> Option<Fingerprint> {
    key.secret.as_ref().map(|secret| Fingerprint::of(secret, salt))
}

impl RingKey {
    /// `before` is what was known under its id.
    fn new(config: &KeyConfig, salt: &[u8; 32], before: Option<&Self>) -> Self {
        let state = before.map_or_else(Arc::default, |before| before.state.clone());
        // What a person switched by hand stays so until the file says otherwise.
        if before.is_none_or(|before| before.config.disabled != config.disabled) {
            state.off.store(config.disabled, Ordering::Relaxed);
        }
        let fingerprint = ArcSwap::from_pointee(fingerprint_of(config, salt));
        Self { fingerprint, state, config: config.clone() }
    }

    /// Its secret's fingerprint; `None` while it has no secret.
    pub fn fingerprint(&self) -> Option<Fingerprint> {
        **self.fingerprint.load()
    }

    /// What the store is told of it.
    pub fn settings(&self) -> KeySettings {
        KeySettings {
            key: self.config.id.clone(),
            pool: self.config.pool.clone(),
            group: self.config.group.clone(),
            max_concurrent_uses: self.config.max_concurrent_uses,
            fingerprint: self.fingerprint(),
        }
    }

    /// Its group; where that is `auto`, what is known of it here.
    pub fn group(&self) -> Option<GroupName> {
        let known = || self.state.group.load().as_deref().cloned();
        match &self.config.group {
            Some(group) if group.is_auto() => known().or_else(|| Some(group.clone())),
            group => group.clone(),
        }
    }

    /// The store, or an answer, told its group.
    pub fn is_of(&self, group: &GroupName) {
        if self.config.group.as_ref().is_some_and(GroupName::is_auto) && self.group().as_ref() != Some(group)
        {
            self.state.group.store(Some(Arc::new(group.clone())));
        }
    }

    fn serves(&self, model: &ModelKnown) -> bool {
        self.config.models.is_empty()
            || match model {
                ModelKnown::NotNamed => true,
                ModelKnown::Named(name) => {
                    self.config.models.iter().any(|pattern| matches(pattern, name.as_str()))
                }
                ModelKnown::Unreadable => false,
            }
    }
}

impl ProviderKeys {
    /// The pool asked for, then its fallbacks in order, each once.
    fn chain(&self, pool: &PoolName) -> Vec<PoolName> {
        let mut chain = vec![pool.clone()];
        let mut at = 0;
        while at < chain.len() {
            for next in self.fallbacks.get(&chain[at]).into_iter().flatten() {
                if !chain.contains(next) {
                    chain.push(next.clone());
                }
            }
            at += 1;
        }
        chain
    }

    /// Whether some key that could serve this pool names `models`, so that the whole body must be read.
    pub fn models_matter(&self, pool: &PoolName) -> bool {
        let chain = self.chain(pool);
        self.keys.iter().any(|key| !key.config.models.is_empty() && chain.contains(&key.config.pool))
    }

    /// Whether the pool or one of its fallbacks has a key here.
    pub fn has_pool(&self, pool: &PoolName) -> bool {
        let chain = self.chain(pool);
        self.keys.iter().any(|key| chain.contains(&key.config.pool))
    }

    /// The keys that fit.
    pub fn fitting(&self, wish: &Wish) -> Fitting {
        let chain = self.chain(&wish.pool);
        let mut members: Vec<(usize, usize)> = Vec::with_capacity(self.keys.len());
        for (at, key) in self.keys.iter().enumerate() {
            let wanted = wish.pinned.as_ref().is_none_or(|id| *id == key.config.id)
                && key.serves(&wish.model)
                && !wish.rules_out(key);
            if let Some(rank) = chain.iter().position(|pool| *pool == key.config.pool).filter(|_| wanted) {
                members.push((at, rank));
            }
        }
        let ids = sorted_ids(self, &members);
        Fitting { members, ids }
    }

    /// Candidates in the order in which the store shall try them: pools in order, within a pool by the
    /// strategy. Keys switched off here are left out, unless all are; keys without a secret in any case.
    pub fn rank(&self, fitting: &Fitting) -> Vec<Candidate> {
        let mut order: Vec<(usize, usize, f64)> =
            fitting.members.iter().map(|(at, pool)| (*at, *pool, 0.0)).collect();
        if order.iter().any(|(at, ..)| self.usable(*at)) {
            order.retain(|(at, ..)| self.usable(*at));
        }
        let turn =
            if self.strategy == Strategy::RoundRobin { self.turn.fetch_add(1, Ordering::Relaxed) } else { 0 };
        let now = self.now();
        for (at, _, cost) in &mut order {
            *cost = self.cost(*at, turn, now);
        }
        order.sort_by(|a, b| a.1.cmp(&b.1).then(a.2.total_cmp(&b.2)));
        order.into_iter().filter_map(|(at, ..)| self.candidate(at)).collect()
    }

    /// Lower is better.
    fn cost(&self, at: usize, turn: usize, now: u64) -> f64 {
        let key = &self.keys[at];
        let load = f64::from(key.state.in_flight.load(Ordering::Relaxed))
            / f64::from(key.config.max_concurrent_uses.max(1));
        match self.strategy {
            Strategy::FillFirst => 0.0,
            Strategy::LeastInFlight => load,
            Strategy::RoundRobin => {
                let count = self.keys.len().max(1);
                // Positions are small: exact in an f64.
                f64::from(u32::try_from((at + count - turn % count) % count).unwrap_or(u32::MAX))
            }
            Strategy::Weighted => {
                let idle = match key.state.last_lent.load(Ordering::Relaxed) {
                    0 => 1.0,
                    lent => {
                        let idle = Duration::from_millis(now.saturating_sub(lent)).min(IDLE_SATURATES);
                        idle.as_secs_f64() / IDLE_SATURATES.as_secs_f64()
                    }
                };
                2.0 * load - idle + 0.05 * rand::random::<f64>()
            }
        }
    }

    fn now(&self) -> u64 {
        u64::try_from(self.born.elapsed().as_millis()).unwrap_or(u64::MAX).saturating_add(1)
    }

    fn usable(&self, at: usize) -> bool {
        !self.keys[at].state.off.load(Ordering::Relaxed)
    }

    /// `None` for a key whose secret could not be had yet.
    fn candidate(&self, at: usize) -> Option<Candidate> {
        let key = &self.keys[at];
        Some(Candidate {
            key: key.config.id.clone(),
            pool: key.config.pool.clone(),
            group: key.group(),
            fingerprint: key.fingerprint()?,
        })
    }

    /// One key by id.
    pub fn key(&self, id: &KeyId) -> Option<&RingKey> {
        self.keys.iter().find(|key| key.config.id == *id)
    }

    /// Whether a key that the store just lent, with the secret of this fingerprint, may be used: not switched
    /// off, removed or given another secret here meanwhile.
    pub fn confirm(&self, id: &KeyId, fingerprint: Fingerprint) -> bool {
        self.key(id).is_some_and(|key| {
            !key.state.off.load(Ordering::Relaxed) && key.fingerprint() == Some(fingerprint)
        })
    }

    /// A person switched the key on or off.
    pub fn switch(&self, id: &KeyId, on: bool) {
        if let Some(key) = self.key(id) {
            key.state.off.store(!on, Ordering::Relaxed);
        }
    }

    /// A use of the key begins.
    pub fn lent(&self, id: &KeyId) {
        if let Some(key) = self.key(id) {
            key.state.in_flight.fetch_add(1, Ordering::Relaxed);
            key.state.last_lent.store(self.now(), Ordering::Relaxed);
        }
    }

    /// A use of the key has ended.
    pub fn returned(&self, id: &KeyId) {
        if let Some(key) = self.key(id) {
            key.state.in_flight.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

/// Whether `text` fits `pattern`, in which each `*` stands for any text.
fn matches(pattern: &str, text: &str) -> bool {
    let Some((head, rest)) = pattern.split_once('*') else { return pattern == text };
    let Some(mut text) = text.strip_prefix(head) else { return false };
    let mut parts = rest.split('*').peekable();
    while let Some(part) = parts.next() {
        if parts.peek().is_none() {
            return text.ends_with(part);
        }
        match text.find(part) {
            Some(at) => text = &text[at + part.len()..],
            None => return false,
        }
    }
    true
}

#[cfg(test)]
mod tests {
    use super::matches;

    #[test]
    fn a_star_stands_for_any_text() {
        for (pattern, text, fits) in [
            ("gpt-*", "gpt-4o", true),
            ("gpt-*", "o3", false),
            ("*", "anything", true),
            ("gpt-4o", "gpt-4o", true),
            ("gpt-4o", "gpt-4o-mini", false),
            ("*-mini", "gpt-4o-mini", true),
            ("a*b*c", "a1b2c", true),
            ("a*b*c", "a1c2b", false),
            ("ab*ba", "aba", false),
        ] {
            assert_eq!(matches(pattern, text), fits, "{pattern} {text}");
        }
    }
}

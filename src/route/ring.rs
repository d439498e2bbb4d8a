//! The process's own view of the keys: which fit a request, and in which order to try them.
//!
//! The store decides; this view only orders candidates and takes out what would be refused anyway, so
//! a stale value costs a try and never a wrong lease.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use arc_swap::ArcSwap;
use http::HeaderValue;

use super::pattern::Known;
use super::rank::{self, Row, Rule, Terms};
use super::target::host_header;
use super::wish::PoolKeys;
use crate::config::{Config, KeyConfig, Provider, Ranking};
use crate::model::{Candidate, Fingerprint, KeyId, Map, ModelName, PoolName, ProviderName, Scope, Wanted};

pub use super::key::{ModelKnown, RingKey};
pub use super::seen::Ended;
pub use super::wish::{Fitting, Wish};

/// For how long a rest is believed without asking the store again, which lends an exhausted key once in half
/// an hour to see whether it was topped up.
const BELIEVED: Duration = Duration::from_mins(30);

/// All keys of all served providers. What it holds may be replaced while it is in use: whoever has looked
/// goes on with what was found.
#[derive(Debug)]
pub struct Ring {
    providers: ArcSwap<Providers>,
    ranking: ArcSwap<Ranking>,
    salt: ArcSwap<Salt>,
    /// Held while what it holds is made anew.
    changing: Mutex<()>,
    /// How often that was done: whoever has keys of the last change has the present ones.
    changes: AtomicU64,
    clock: Arc<Clock>,
}

/// What all keys are timed by, also when their settings are replaced.
#[derive(Debug)]
struct Clock {
    born: Instant,
    /// Rises with each choice of a key.
    turns: AtomicU64,
    /// Where jitter comes from; another in each process.
    seed: u64,
}

impl Clock {
    /// µs since the ring's birth.
    fn now(&self) -> u64 {
        self.at(Instant::now())
    }

    fn at(&self, time: Instant) -> u64 {
        u64::try_from(time.saturating_duration_since(self.born).as_micros()).unwrap_or(u64::MAX)
    }
}

/// Providers with their keys, at one moment.
pub type Providers = Map<ProviderName, Arc<ProviderKeys>>;

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
    /// What `Host` says to it, at its base URL.
    pub host: HeaderValue,
    /// Its keys, in the configuration's order.
    pub keys: Vec<RingKey>,
    /// Where each is in `keys`.
    places: Map<KeyId, usize>,
    /// Of every pool that a request may ask for.
    pools: Map<PoolName, PoolKeys>,
    ranking: Ranking,
    clock: Arc<Clock>,
    /// Of which of the ring's changes it is.
    change: u64,
}

impl Ring {
    /// From the configuration, with fingerprints under a salt of its own until the store's is known.
    pub fn new(config: &Config) -> Self {
        let salt: [u8; 32] = rand::random();
        let ring = Self {
            providers: ArcSwap::default(),
            ranking: ArcSwap::from_pointee(config.ranking),
            salt: ArcSwap::from_pointee(Salt(salt)),
            changing: Mutex::default(),
            changes: AtomicU64::new(0),
            clock: Arc::new(Clock { born: Instant::now(), turns: AtomicU64::new(1), seed: rand::random() }),
        };
        ring.replace(config);
        ring
    }

    /// Takes another configuration. What was seen of a key that stays, stays known.
    pub fn replace(&self, config: &Config) {
        let fallbacks: Map<PoolName, Vec<PoolName>> =
            config.pools.iter().map(|(name, to)| (name.clone(), to.clone())).collect();
        let alone = self.changing();
        let before = self.providers.load();
        let change = self.changes.load(Ordering::Relaxed) + 1;
        let salt = self.salt();
        let mut patterns = Known::default();
        let mut made = |key| {
            let known: &KeyConfig = key;
            let before = before.get(&known.provider).and_then(|keys| keys.key(&known.id));
            RingKey::new(known, patterns.of(&known.models), &salt, before)
        };
        let mut keys_of = |provider: &Arc<Provider>| {
            let own = config.keys.iter().filter(|key| key.provider == provider.name);
            let keys: Vec<_> = own.map(&mut made).collect();
            let places = keys.iter().enumerate().map(|(at, key)| (key.config.id.clone(), at)).collect();
            let pools: BTreeSet<_> =
                keys.iter().map(|key| &key.config.pool).chain(fallbacks.keys()).collect();
            let of = |pool: &PoolName| PoolKeys::of(pool, &keys, &fallbacks);
            let pools = pools.into_iter().map(|pool| (pool.clone(), of(pool))).collect();
            ProviderKeys {
                provider: provider.clone(),
                host: host_header(&provider.base_url),
                keys,
                places,
                pools,
                ranking: config.ranking,
                clock: self.clock.clone(),
                change,
            }
        };
        let keys = config.providers.values().map(|each| (each.name.clone(), Arc::new(keys_of(each))));
        self.put(keys.collect(), change, &alone);
        self.ranking.store(Arc::new(config.ranking));
    }

    /// Keys that are made anew take the place of those before.
    fn put(&self, keys: Providers, change: u64, _alone: &MutexGuard<'_, ()>) {
        self.providers.store(Arc::new(keys));
        self.changes.store(change, Ordering::Release);
    }

    /// How keys are ordered.
    pub fn ranking(&self) -> Ranking {
        **self.ranking.load()
    }

    /// The salt in use.
    pub fn salt(&self) -> [u8; 32] {
        self.salt.load().0
    }

    /// Makes all fingerprints under another salt.
    pub fn salt_with(&self, salt: &[u8; 32]) {
        let alone = self.changing();
        if self.salt() == *salt {
            return;
        }
        self.salt.store(Arc::new(Salt(*salt)));
        let before = self.providers.load();
        let change = self.changes.load(Ordering::Relaxed) + 1;
        let keys = before.iter().map(|(name, keys)| (name.clone(), Arc::new(keys.salted(salt, change))));
        self.put(keys.collect(), change, &alone);
    }

    /// Nothing is half made where a panic ended a change: what was made is stored whole, at its end.
    fn changing(&self) -> MutexGuard<'_, ()> {
        self.changing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// One provider's keys.
    pub fn of(&self, provider: &str) -> Option<Arc<ProviderKeys>> {
        self.providers.load().get(provider).cloned()
    }

    /// A provider's keys as they are now, where these are of before.
    pub fn newer(&self, than: &Arc<ProviderKeys>) -> Option<Arc<ProviderKeys>> {
        if self.are_present(than) {
            return None;
        }
        let now = self.providers.load();
        now.get(&than.provider.name).filter(|now| !Arc::ptr_eq(now, than)).cloned()
    }

    /// Whether nothing was made anew since these keys were.
    fn are_present(&self, keys: &ProviderKeys) -> bool {
        keys.change == self.changes.load(Ordering::Acquire)
    }

    /// Whether a key out of `known` that the store just lent, with the secret of this fingerprint, may be used: not
    /// switched off, removed or given another secret here meanwhile.
    pub fn confirm(&self, known: &ProviderKeys, id: &KeyId, fingerprint: Fingerprint) -> bool {
        let confirms = |keys: &ProviderKeys| {
            let key = keys.key(id);
            key.is_some_and(|key| key.state.is_on() && key.fingerprint == Some(fingerprint))
        };
        if self.are_present(known) {
            return confirms(known);
        }
        self.providers.load().get(&known.provider.name).is_some_and(|keys| confirms(keys))
    }

    /// Whether a key has this secret here no more: it was rotated, or taken out.
    pub fn is_old(&self, provider: &ProviderName, key: &KeyId, secret: Fingerprint) -> bool {
        let keys = self.of(provider.as_str());
        keys.and_then(|keys| keys.key(key)?.fingerprint) != Some(secret)
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

impl ProviderKeys {
    /// The same under another salt.
    fn salted(&self, salt: &[u8; 32], change: u64) -> Self {
        Self {
            change,
            provider: Arc::clone(&self.provider),
            host: self.host.clone(),
            keys: self.keys.iter().map(|key| key.salted(salt)).collect(),
            places: self.places.clone(),
            pools: self.pools.clone(),
            ranking: self.ranking,
            clock: Arc::clone(&self.clock),
        }
    }

    /// Whether some key that could serve this pool names `models`, so that the whole body must be read.
    pub fn models_matter(&self, pool: &PoolName) -> bool {
        self.pools.get(pool).is_some_and(PoolKeys::models_matter)
    }

    /// Whether keys of other pools serve this one, too.
    pub fn falls_back(&self, pool: &PoolName) -> bool {
        self.pools.get(pool).is_some_and(|pool| pool.falls_back)
    }

    /// Whether the pool or one of its fallbacks has a key here.
    pub fn has_pool(&self, pool: &PoolName) -> bool {
        self.pools.get(pool).is_some_and(|pool| !pool.members.is_empty())
    }

    /// The keys that fit.
    pub fn fitting(&self, wish: &Wish) -> Fitting {
        self.pools.get(&wish.pool).map_or_else(Fitting::default, |pool| pool.fitting(&self.keys, wish))
    }

    /// The ids of the keys that fit, sorted: the queue that the request stands in.
    pub fn ids(&self, fitting: &Fitting) -> Arc<[KeyId]> {
        let mut ids: Vec<KeyId> =
            fitting.members.iter().map(|(at, _)| self.keys[*at].config.id.clone()).collect();
        ids.sort_unstable();
        ids.into()
    }

    /// The best candidates that are wanted, in the order in which the store shall try them (see
    /// `super::rank`). Keys switched off here are left out, unless all are.
    pub fn rank(&self, fitting: &Fitting, model: &ModelKnown, wanted: &Wanted<'_>) -> Arc<[Candidate]> {
        let now = self.clock.at(wanted.at);
        let turn = self.clock.turns.fetch_add(1, Ordering::Relaxed);
        let any_on = fitting.members.iter().any(|(at, _)| self.keys[*at].state.is_on());
        let choosy = wanted.is_choosy();
        let is_wanted = |at: usize| {
            let key = &self.keys[at];
            // Without a secret there is nothing to lend.
            let Some(fingerprint) = &key.fingerprint else { return false };
            (!any_on || key.state.is_on()) && !(choosy && wanted.leaves_out(&key.config.id, fingerprint))
        };
        let members = fitting.members.iter().filter(|(at, _)| is_wanted(*at));
        let first_bytes = members.clone().map(|(at, _)| self.keys[*at].state.first_byte_ms(now));
        let usual_ms = rank::usual_first_byte(first_bytes);
        let rows = members.map(|(at, pool)| self.row(*at, *pool, model.name(), now));
        let rule = Rule {
            strategy: self.ranking.strategy,
            weights: &self.ranking.weights,
            usual_ms,
            seed: self.clock.seed.wrapping_add(turn),
        };
        let mut candidates = Vec::with_capacity(wanted.most.min(fitting.members.len()));
        rank::best(rows, &rule, wanted.most, |at| {
            if candidates.is_empty() && wanted.is_first() {
                self.keys[at].state.chosen(turn, now);
            }
            candidates.extend(self.candidate(at));
        });
        candidates.into()
    }

    #[inline]
    fn row(&self, at: usize, pool: usize, model: Option<&ModelName>, now: u64) -> Row {
        let key = &self.keys[at];
        key.state.row(at, pool, key.config.max_concurrent_uses, model, now)
    }

    /// Why its keys are ranked as they are, for a request without a model: in the configuration's order.
    pub fn explain(&self) -> Vec<Explained> {
        let now = self.clock.now();
        let usual_ms = rank::usual_first_byte(self.keys.iter().map(|key| key.state.first_byte_ms(now)));
        let explained = |(at, key): (usize, &RingKey)| {
            let row = self.row(at, 0, None, now);
            let terms = Terms::of(&row, usual_ms);
            Explained { key: key.config.id.clone(), row, terms, score: terms.score(&self.ranking.weights) }
        };
        self.keys.iter().enumerate().map(explained).collect()
    }

    /// `None` for a key whose secret could not be had yet.
    fn candidate(&self, at: usize) -> Option<Candidate> {
        let key = &self.keys[at];
        Some(Candidate {
            key: key.config.id.clone(),
            pool: key.config.pool.clone(),
            group: key.group(),
            fingerprint: key.fingerprint?,
        })
    }

    /// The first keys that may be lent, in the configuration's order.
    pub fn first_candidates(&self, most: usize) -> Vec<Candidate> {
        let on = (0..self.keys.len()).filter(|at| self.keys[*at].state.is_on());
        on.filter_map(|at| self.candidate(at)).take(most).collect()
    }

    /// One key by id.
    pub fn key(&self, id: &KeyId) -> Option<&RingKey> {
        self.place(id).map(|at| &self.keys[at])
    }

    /// Where a key is in `keys`.
    pub fn place(&self, id: &KeyId) -> Option<usize> {
        self.places.get(id).copied()
    }

    /// A person switched the key on or off.
    pub fn switch(&self, id: &KeyId, on: bool) {
        if let Some(key) = self.key(id) {
            key.state.off.store(!on, Ordering::Relaxed);
        }
    }

    /// A use of the key in this place begins.
    pub fn lent(&self, place: usize, model: &ModelKnown, at: Instant) {
        self.keys[place].state.lent(model.name(), self.clock.at(at));
    }

    /// A use of the key in this place has ended; `first_byte`: how long its answer took to begin.
    pub fn returned(&self, place: usize, ended: Ended, first_byte: Option<Duration>) {
        self.keys[place].state.returned(ended, first_byte, self.clock.now());
    }

    /// The key, or all of its group where the limit is the group's, is known to rest for so long: for this
    /// model (or for requests of which none is known), or for all.
    pub fn rests(&self, id: &KeyId, scope: Scope, model: Option<&ModelName>, left: Duration) {
        let Some(key) = self.key(id) else { return };
        let left = u64::try_from(left.min(BELIEVED).as_micros()).unwrap_or(u64::MAX);
        let until = self.clock.now().saturating_add(left);
        let rests = |key: &RingKey| {
            if scope.names_model() {
                key.state.rests_until(model, until);
            } else {
                key.state.rests_for_all_until(until);
            }
        };
        rests(key);
        if let (Scope::Group | Scope::GroupModel, Some(group)) = (scope, key.group()) {
            self.keys.iter().filter(|other| other.group().as_ref() == Some(&group)).for_each(rests);
        }
    }

    /// What was known to rest may be lent again, for all that is known here: something was lifted.
    pub fn forget_rests(&self) {
        self.keys.iter().for_each(|key| key.state.forget_rests());
    }
}

/// Why a key is ranked as it is.
#[derive(Debug, Clone)]
pub struct Explained {
    /// The key.
    pub key: KeyId,
    /// What was seen of it.
    pub row: Row,
    /// What its score is made of.
    pub terms: Terms,
    /// The score, without jitter.
    pub score: f64,
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a test that fails may panic
mod tests {
    use super::*;

    /// A ring of `openai` with these lines, each of a key.
    fn ring(keys: &[&str]) -> Ring {
        let key = |line: &&str| {
            let id = line.split(' ').next().unwrap();
            let rest = line[id.len()..].trim_start();
            format!("[[keys]]\nid = \"{id}\"\nprovider = \"openai\"\nsecret = {{ env = \"{id}\" }}\n{rest}\n")
        };
        let text: String = keys.iter().map(key).collect();
        let text =
            format!("[ranking]\nstrategy = \"fill_first\"\n[pools.vip]\nfallback = [\"default\"]\n{text}");
        let config = crate::config::load_str(&text, "test.toml", &|name| Some(format!("sk-{name}"))).unwrap();
        Ring::new(&config)
    }

    fn wish(pool: &str) -> Wish {
        Wish::new(PoolName::parse(pool).unwrap(), ModelKnown::NotNamed, None)
    }

    fn id(name: &str) -> KeyId {
        KeyId::parse(name).unwrap()
    }

    fn ranked(keys: &ProviderKeys, pool: &str, wanted: &Wanted<'_>) -> Vec<String> {
        let wish = wish(pool);
        let candidates = keys.rank(&keys.fitting(&wish), &wish.model, wanted);
        candidates.iter().map(|candidate| candidate.key.to_string()).collect()
    }

    #[test]
    fn the_rest_is_what_the_best_were_not_and_nothing_barred() {
        let ring = ring(&["a", "b", "c pool = \"vip\"", "d", "e pool = \"vip\""]);
        let keys = ring.of("openai").unwrap();
        let best = keys.rank(&keys.fitting(&wish("vip")), &ModelKnown::NotNamed, &Wanted::best(3));
        let names: Vec<_> = best.iter().map(|candidate| candidate.key.as_str()).collect();
        assert_eq!(names, ["c", "e", "a"], "the pool first, then its fallback");
        let barred = [id("d")];
        let rest = Wanted { barred: &barred, asked: &best, ..Wanted::best(usize::MAX) };
        assert_eq!(ranked(&keys, "vip", &rest), ["b"]);
        let other_secret = [(id("a"), Fingerprint([0; 32]))];
        let passed = Wanted { passed_over: &other_secret, ..Wanted::best(1) };
        assert_eq!(ranked(&keys, "default", &passed), ["a"], "with another secret it is as another key");
    }

    #[test]
    fn a_groups_rest_is_known_of_all_its_keys_and_a_keys_of_it_alone() {
        let ring = ring(&["a group = \"org\"", "b group = \"org\"", "c", "d"]);
        let keys = ring.of("openai").unwrap();
        keys.rests(&id("a"), Scope::Group, None, Duration::from_secs(9));
        keys.rests(&id("c"), Scope::Key, None, Duration::from_secs(5));
        assert_eq!(ranked(&keys, "default", &Wanted::best(4)), ["d", "a", "b", "c"]);
        keys.forget_rests();
        assert_eq!(ranked(&keys, "default", &Wanted::best(4)), ["a", "b", "c", "d"]);
    }

    #[test]
    fn no_rest_is_believed_for_longer_than_until_the_next_early_probe() {
        let ring = ring(&["a", "b"]);
        let keys = ring.of("openai").unwrap();
        keys.rests(&id("a"), Scope::Key, None, Duration::MAX);
        let row = &keys.explain()[0].row;
        assert!((1..=1_800_000_000).contains(&row.rest_us), "{row:?}");
    }

    #[test]
    fn a_key_is_confirmed_by_what_is_known_now_whichever_keys_it_was_lent_out_of() {
        let ring = ring(&["a", "b"]);
        let keys = ring.of("openai").unwrap();
        let lent = keys.key(&id("a")).unwrap().fingerprint.unwrap();
        assert!(ring.newer(&keys).is_none() && ring.confirm(&keys, &id("a"), lent));
        keys.switch(&id("a"), false);
        assert!(!ring.confirm(&keys, &id("a"), lent), "switched off");
        keys.switch(&id("a"), true);
        ring.salt_with(&[7; 32]);
        let salted = ring.newer(&keys).unwrap();
        assert!(!ring.confirm(&keys, &id("a"), lent), "that is no fingerprint any more");
        assert!(ring.newer(&salted).is_none(), "those are the present ones");
        let without = "[[keys]]\nid = \"b\"\nprovider = \"openai\"\nsecret = { env = \"B\" }\n";
        let config =
            crate::config::load_str(without, "test.toml", &|name| Some(format!("sk-{name}"))).unwrap();
        ring.replace(&config);
        let of_b = salted.key(&id("b")).unwrap().fingerprint.unwrap();
        assert!(!ring.confirm(&salted, &id("a"), of_b), "a is gone");
        assert!(ring.newer(&salted).is_some() && ring.newer(&ring.of("openai").unwrap()).is_none());
    }

    #[test]
    fn what_was_seen_of_a_key_outlives_a_change_of_its_settings() {
        let first = ring(&["a", "b"]);
        let keys = first.of("openai").unwrap();
        keys.lent(0, &ModelKnown::NotNamed, Instant::now());
        let text = "[[keys]]\nid = \"a\"\nprovider = \"openai\"\nsecret = { env = \"A\" }\nmax_concurrent_uses = 2\n";
        let config = crate::config::load_str(text, "test.toml", &|name| Some(format!("sk-{name}"))).unwrap();
        first.replace(&config);
        let now = first.of("openai").unwrap();
        assert_eq!((now.explain()[0].row.in_flight, now.explain()[0].row.cap), (1, 2));
        keys.returned(0, Ended::Badly, None);
        assert!(now.explain()[0].row.failed > 0.0, "what was begun with the old settings counts too");
    }
}

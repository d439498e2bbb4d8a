//! Several sidecars that crash, repeat themselves, lose replies and come too late, on a store that forgets
//! everything now and then; and the book that the test keeps of who holds what.
// Every test binary that takes this module in uses all of it, and none exports anything.
#![allow(unreachable_pub, clippy::unwrap_used, clippy::too_many_lines, clippy::struct_excessive_bools)]

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use lessor::model::{
    AppName, Class, FencingToken, Fingerprint, GroupName, KeyId, LeaseId, ModelName, Outcome, OwnerId,
    PoolName, ProviderName, Scope,
};
use lessor::store::{
    Acquire, Acquired, Answer, Candidate, Epoch, Grant, Held, KeySettings, Release, Renew, RenewAnswer,
    Report, Snapshot, StatusChange, Store, StoreTime, SyncKeys, SyncMode,
};
use proptest::prelude::*;

/// A store under test, by a clock that stands still between steps.
pub trait Bench {
    /// An empty one, by this clock in ms since the epoch.
    fn fresh(now: &Arc<AtomicU64>) -> Self;
    /// The store, as the next sidecar reaches it.
    fn store(&self) -> Arc<dyn Store>;
    /// Loses all data.
    fn lose_data(&mut self);
    /// A sidecar dies.
    fn crash(&mut self);
    /// What else must hold after every step.
    fn check(&self);
}

/// Far ahead of the real clock, so that what Redis expires by itself never comes first.
const BEGINNING: u64 = 4_000_000_000_000;
const TTL: Duration = Duration::from_secs(1);
/// How long an acquire may be under way.
const DEADLINE: Duration = Duration::from_millis(300);
const KEYS: usize = 4;
const SIDECARS: usize = 3;
const ORGANIZATIONS: usize = 2;

/// One step; the numbers choose among what there is, modulo how much there is of it.
#[derive(Debug, Clone)]
pub enum Step {
    Acquire {
        sidecar: usize,
        first: usize,
        reply_lost: bool,
    },
    RepeatAcquire {
        nth: usize,
    },
    Renew {
        sidecar: usize,
        reassert: bool,
    },
    RenewAnothers {
        nth: usize,
        sidecar: usize,
        reassert: bool,
    },
    Release {
        nth: usize,
    },
    ReleaseWrongly {
        nth: usize,
    },
    Report {
        nth: usize,
        class: Class,
        wait: Option<u64>,
        of_group: bool,
        max_uses: Option<u32>,
        organization: Option<usize>,
        with_model: bool,
    },
    ReportWrongly {
        nth: usize,
    },
    Revoke {
        nth: usize,
    },
    Crash {
        sidecar: usize,
    },
    Cap {
        key: usize,
        cap: u32,
    },
    /// A person lifts what rests.
    Clear {
        key: usize,
    },
    Pass {
        ms: u64,
    },
    /// Restarts empty, with settings that may have changed meanwhile.
    LoseData {
        key: usize,
        cap: u32,
    },
}

pub fn step() -> impl Strategy<Value = Step> {
    let class = prop_oneof![
        Just(Class::Rate),
        Just(Class::Quota),
        Just(Class::Concurrency),
        Just(Class::Success),
        Just(Class::Network),
    ];
    let nth = 0..1000_usize;
    prop_oneof![
        8 => (0..SIDECARS, 0..KEYS, prop::bool::weighted(0.2))
            .prop_map(|(sidecar, first, reply_lost)| Step::Acquire { sidecar, first, reply_lost }),
        2 => nth.clone().prop_map(|nth| Step::RepeatAcquire { nth }),
        4 => (0..SIDECARS, any::<bool>()).prop_map(|(sidecar, reassert)| Step::Renew { sidecar, reassert }),
        1 => (nth.clone(), 0..SIDECARS, any::<bool>())
            .prop_map(|(nth, sidecar, reassert)| Step::RenewAnothers { nth, sidecar, reassert }),
        4 => nth.clone().prop_map(|nth| Step::Release { nth }),
        1 => nth.clone().prop_map(|nth| Step::ReleaseWrongly { nth }),
        4 => (
            nth.clone(),
            class,
            prop::option::of(0..400_u64),
            any::<bool>(),
            prop::option::weighted(0.3, 0..5_u32),
            prop::option::weighted(0.3, 0..ORGANIZATIONS),
            any::<bool>(),
        )
            .prop_map(|(nth, class, wait, of_group, max_uses, organization, with_model)| Step::Report {
                nth, class, wait, of_group, max_uses, organization, with_model
            }),
        1 => (0..KEYS).prop_map(|key| Step::Clear { key }),
        1 => nth.clone().prop_map(|nth| Step::ReportWrongly { nth }),
        1 => nth.prop_map(|nth| Step::Revoke { nth }),
        1 => (0..SIDECARS).prop_map(|sidecar| Step::Crash { sidecar }),
        2 => (0..KEYS, 0..4_u32).prop_map(|(key, cap)| Step::Cap { key, cap }),
        5 => (0..600_u64).prop_map(|ms| Step::Pass { ms }),
        2 => (0..KEYS, 0..4_u32).prop_map(|(key, cap)| Step::LoseData { key, cap }),
    ]
}

/// A lease by the book.
#[derive(Debug, Clone)]
struct Entry {
    ask: Acquire,
    grant: Grant,
    /// Until when its holder may use it.
    until: StoreTime,
    /// Given back, or answered as lost.
    given_up: bool,
    revoked: bool,
    /// Whether the store must know it: granted or reasserted in this life of its data, and not released.
    in_store: bool,
    /// Whether somebody lives who knows of it.
    held: bool,
}

struct Sidecar {
    owner: OwnerId,
    epoch: Option<Epoch>,
    /// By key: its group as this sidecar knows it.
    groups: [Option<GroupName>; KEYS],
}

pub struct World<B> {
    now: Arc<AtomicU64>,
    bench: B,
    sidecars: Vec<Sidecar>,
    caps: [u32; KEYS],
    asked: Vec<Acquire>,
    book: BTreeMap<LeaseId, Entry>,
    /// Every lease ever granted, in order.
    granted: Vec<LeaseId>,
    last_token: FencingToken,
    /// By key: how many leases had been granted when it was last refused.
    refused_at: [Option<usize>; KEYS],
    /// By group: the same when it was first refused.
    group_refused_at: BTreeMap<GroupName, usize>,
    crashed: Vec<(OwnerId, StoreTime)>,
}

pub fn now<T>(answer: Answer<T>) -> T {
    thread_local! {
        // No timer and no socket: any executor will do.
        static HERE: tokio::runtime::Runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    }
    HERE.with(|here| here.block_on(answer)).unwrap()
}

pub fn provider() -> ProviderName {
    ProviderName::parse("openai").unwrap()
}

fn key(number: usize) -> KeyId {
    KeyId::parse(&format!("k{number}")).unwrap()
}

/// The first stands alone, the second is in a group, and of the others answers say it.
fn configured(number: usize) -> Option<GroupName> {
    match number {
        0 => None,
        1 => Some(GroupName::parse("org").unwrap()),
        _ => Some(GroupName::auto()),
    }
}

fn number_of(key: &KeyId) -> usize {
    key.as_str()[1..].parse().unwrap()
}

impl<B: Bench> World<B> {
    pub fn new() -> Self {
        let now = Arc::new(AtomicU64::new(BEGINNING));
        let bench = B::fresh(&now);
        let sidecar =
            |_| Sidecar { owner: OwnerId::fresh(), epoch: None, groups: std::array::from_fn(configured) };
        let sidecars = (0..SIDECARS).map(sidecar).collect();
        let world = Self {
            now,
            bench,
            sidecars,
            caps: [1, 2, 3, 3],
            asked: Vec::new(),
            book: BTreeMap::new(),
            granted: Vec::new(),
            last_token: FencingToken(0),
            refused_at: [None; KEYS],
            group_refused_at: BTreeMap::new(),
            crashed: Vec::new(),
        };
        world.sync();
        world
    }

    fn now(&self) -> StoreTime {
        StoreTime(self.now.load(Ordering::SeqCst))
    }

    fn sync(&self) {
        let settings = |number| KeySettings {
            key: key(number),
            pool: PoolName::default_pool(),
            group: configured(number),
            max_concurrent_uses: self.caps[number],
            fingerprint: Some(Fingerprint([1; 32])),
        };
        let keys = (0..KEYS).map(settings).collect();
        now(self.bench.store().sync_keys(SyncKeys {
            provider: provider(),
            owner: self.sidecars[0].owner.clone(),
            mode: SyncMode::Replace,
            keys,
        }));
    }

    fn snapshot(&self) -> Snapshot {
        now(self.bench.store().snapshot(provider()))
    }

    /// The whole state as text.
    fn seen(&self) -> String {
        serde_json::to_string(&self.snapshot()).unwrap()
    }

    fn any_granted(&self, nth: usize) -> Option<LeaseId> {
        let count = self.granted.len();
        (count > 0).then(|| self.granted[count - 1 - nth % count])
    }

    fn is_by_the_book(&self, entry: &Entry) -> bool {
        entry.in_store && entry.until > self.now()
    }

    /// Uses of a key that may be under way: what the store must count, and what holders from before a
    /// loss of data still rely on.
    fn in_use(&self, of: &KeyId) -> usize {
        let live = |entry: &&Entry| {
            let relied_on = entry.held && !entry.given_up && entry.until > self.now();
            &entry.grant.key == of && (relied_on || self.is_by_the_book(entry))
        };
        self.book.values().filter(live).count()
    }

    fn acquire(&mut self, ask: &Acquire, reply_lost: bool) {
        let before = self.seen();
        let at_once = self.book.get(&ask.lease).filter(|entry| self.is_by_the_book(entry)).cloned();
        match now(self.bench.store().acquire(ask.clone())) {
            Acquired::Granted(grant) if at_once.is_some() => {
                let known = at_once.unwrap();
                assert_eq!((&grant.key, grant.token), (&known.grant.key, known.grant.token));
                assert_eq!(self.seen(), before, "a repeated acquire changed something");
            }
            Acquired::Granted(grant) => {
                assert!(self.now() <= ask.deadline, "granted too late");
                assert!(grant.token > self.last_token, "a token did not rise");
                self.last_token = grant.token;
                let of = grant.key.clone();
                for sidecar in self.sidecars.iter_mut().filter(|sidecar| sidecar.owner == ask.owner) {
                    sidecar.groups[number_of(&of)].clone_from(&grant.group);
                }
                let until = grant.expires_at;
                assert_eq!(until, self.now().plus(TTL));
                let ask = ask.clone();
                self.granted.push(ask.lease);
                let lease = ask.lease;
                let held = !reply_lost;
                let entry =
                    Entry { ask, grant, until, given_up: false, revoked: false, in_store: true, held };
                self.book.insert(lease, entry);
                let cap = self.caps[number_of(&of)].max(1) as usize;
                assert!(self.in_use(&of) <= cap, "{} uses of {of}, whose cap is {cap}", self.in_use(&of));
            }
            Acquired::Late => {
                assert!(self.now() > ask.deadline);
                assert_eq!(self.seen(), before, "a late acquire changed something");
            }
            Acquired::Refused(refusal) => assert_eq!(refusal.reasons.len(), KEYS),
        }
    }

    /// What one sidecar would renew: what it holds and still relies on.
    fn renewal(&self, sidecar: usize, reassert: bool) -> (Vec<LeaseId>, Renew) {
        let Sidecar { owner, epoch, .. } = &self.sidecars[sidecar];
        let own = |entry: &&Entry| {
            &entry.ask.owner == owner && entry.held && !entry.given_up && entry.until > self.now()
        };
        let held: Vec<&Entry> = self.book.values().filter(own).collect();
        let renew = Renew {
            provider: provider(),
            owner: owner.clone(),
            epoch: epoch.clone(),
            leases: held.iter().map(|entry| entry.held()).collect(),
            ttl: TTL,
            deadline: self.now().plus(DEADLINE),
            reassert,
        };
        (held.iter().map(|entry| entry.ask.lease).collect(), renew)
    }

    fn renew(&mut self, sidecar: usize, reassert: bool) {
        let (leases, renew) = self.renewal(sidecar, reassert);
        if leases.is_empty() {
            return;
        }
        let known = renew.epoch.clone();
        let renewed = now(self.bench.store().renew(renew));
        self.sidecars[sidecar].epoch = Some(renewed.epoch.clone());
        let foreign = known.is_some_and(|known| known != renewed.epoch);
        let mut came_back = Vec::new();
        for (lease, answer) in leases.iter().zip(renewed.answers) {
            let now = self.now();
            let entry = self.book.get_mut(lease).unwrap();
            match answer {
                RenewAnswer::Renewed(until) => {
                    assert!(!entry.revoked, "a revoked lease was renewed");
                    assert!(entry.in_store || reassert, "a lease came back unasked");
                    assert_eq!(until, now.plus(TTL));
                    if !entry.in_store {
                        came_back.push(entry.grant.key.clone());
                    }
                    entry.until = until;
                    entry.in_store = true;
                }
                RenewAnswer::Lost => {
                    assert!(entry.revoked || !entry.in_store, "a live lease was lost");
                    // a sidecar that meets a new epoch asks again before it believes
                    entry.given_up |= !foreign;
                }
                RenewAnswer::Late => panic!("answered as late inside its deadline"),
            }
        }
        for of in came_back {
            let live = |entry: &&Entry| entry.grant.key == of && self.is_by_the_book(entry);
            let (live, cap) = (self.book.values().filter(live).count(), self.caps[number_of(&of)].max(1));
            assert!(live <= cap as usize, "{live} leases of {of}, whose cap is {cap}, after a reassert");
        }
    }

    pub fn step(&mut self, step: &Step) {
        match *step {
            Step::Acquire { sidecar, first, reply_lost } => {
                let candidates = (0..KEYS).map(|number| Candidate {
                    key: key((first + number) % KEYS),
                    pool: PoolName::default_pool(),
                    group: self.sidecars[sidecar].groups[(first + number) % KEYS].clone(),
                    fingerprint: Fingerprint([1; 32]),
                });
                let ask = Acquire {
                    provider: provider(),
                    lease: LeaseId::fresh(),
                    owner: self.sidecars[sidecar].owner.clone(),
                    app: AppName::anonymous(),
                    model: None,
                    candidates: candidates.collect(),
                    ttl: TTL,
                    deadline: self.now().plus(DEADLINE),
                };
                self.asked.push(ask.clone());
                self.acquire(&ask, reply_lost);
            }
            Step::RepeatAcquire { nth } => {
                let count = self.asked.len();
                if count > 0 {
                    let ask = self.asked[count - 1 - nth % count].clone();
                    self.acquire(&ask, true);
                }
            }
            Step::Renew { sidecar, reassert } => self.renew(sidecar, reassert),
            Step::RenewAnothers { nth, sidecar, reassert } => {
                let Some(lease) = self.any_granted(nth) else { return };
                let entry = &self.book[&lease];
                let owner = self.sidecars[sidecar].owner.clone();
                if owner == entry.ask.owner || !self.is_by_the_book(entry) {
                    return;
                }
                let renew = Renew {
                    owner,
                    leases: vec![entry.held()],
                    epoch: None,
                    ..self.renewal(sidecar, reassert).1
                };
                let before = self.seen();
                assert_eq!(now(self.bench.store().renew(renew)).answers, [RenewAnswer::Lost]);
                assert_eq!(self.seen(), before);
            }
            Step::Release { nth } => {
                let Some(lease) = self.any_granted(nth) else { return };
                let before = self.seen();
                let entry = &self.book[&lease];
                let expected = usize::from(self.is_by_the_book(entry));
                assert_eq!(now(self.bench.store().release(vec![entry.release()])), expected);
                if expected == 0 {
                    assert_eq!(self.seen(), before, "a late release changed something");
                }
                let entry = self.book.get_mut(&lease).unwrap();
                (entry.in_store, entry.given_up, entry.held) = (false, true, false);
            }
            Step::ReleaseWrongly { nth } => {
                let Some(lease) = self.any_granted(nth) else { return };
                let before = self.seen();
                let right = self.book[&lease].release();
                let other = key((number_of(&right.key) + 1) % KEYS);
                let wrong = vec![
                    Release { key: other, ..right.clone() },
                    Release { pool: PoolName::parse("vip").unwrap(), ..right.clone() },
                    Release { lease: LeaseId::fresh(), ..right },
                ];
                assert_eq!(now(self.bench.store().release(wrong)), 0);
                assert_eq!(self.seen(), before);
            }
            Step::Report { nth, class, wait, of_group, max_uses, organization, with_model } => {
                let Some(lease) = self.any_granted(nth) else { return };
                let before = self.seen();
                let entry = &self.book[&lease];
                let number = number_of(&entry.grant.key);
                let wait = wait.map(Duration::from_millis);
                let organization = organization.map(|n| GroupName::of_organization(&format!("org-{n}")));
                let outcome = Outcome {
                    wait,
                    max_uses,
                    organization: organization.clone(),
                    scope: if of_group { Scope::Group } else { Scope::Key },
                    ..Outcome::plain(class, None)
                };
                let model = if with_model { ModelName::new("m") } else { None };
                now(self.bench.store().report(Report { model, ..entry.report(outcome) }));
                let granted = entry.grant.group.clone();
                let learns = granted.as_ref().is_some_and(GroupName::is_auto);
                let named = organization.filter(|_| learns);
                let group = named.clone().or(granted).filter(|group| *group != GroupName::auto());
                // a repeated acquire may be granted anew after its release: then that grant counts
                let granted_at = self.granted.iter().rposition(|id| *id == lease).unwrap();
                let of_its_group = group.as_ref().and_then(|group| self.group_refused_at.get(group));
                let newer = |refused: Option<usize>| refused.is_some_and(|refused| granted_at >= refused);
                let may_lift = newer(self.refused_at[number]) || newer(of_its_group.copied());
                match (class, group.filter(|_| of_group)) {
                    (Class::Rate | Class::Quota, Some(group)) => {
                        self.group_refused_at.entry(group).or_insert(self.granted.len());
                    }
                    (Class::Rate | Class::Quota, None) => self.refused_at[number] = Some(self.granted.len()),
                    (Class::Success, _) if may_lift => {}
                    // a lower cap is seen
                    (Class::Concurrency, _) => {}
                    // so is a group that became known
                    _ if named.is_some() => {}
                    _ => assert_eq!(self.seen(), before, "a {class:?} of an older lease changed something"),
                }
            }
            Step::ReportWrongly { nth } => {
                let Some(lease) = self.any_granted(nth) else { return };
                let entry = &self.book[&lease];
                if !self.is_by_the_book(entry) {
                    return;
                }
                let before = self.seen();
                for class in [Class::Invalid, Class::Rate, Class::Success] {
                    let right = entry.report(Outcome::plain(class, None));
                    let other = key((number_of(&right.key) + 1) % KEYS);
                    now(self.bench.store().report(Report { key: other, ..right.clone() }));
                    now(self
                        .bench
                        .store()
                        .report(Report { fingerprint: Fingerprint([2; 32]), ..right.clone() }));
                    now(self.bench.store().report(Report { token: FencingToken(u64::MAX), ..right }));
                }
                assert_eq!(self.seen(), before);
            }
            Step::Revoke { nth } => {
                let Some(lease) = self.any_granted(nth) else { return };
                let known = now(self.bench.store().revoke(provider(), lease));
                assert_eq!(known, self.is_by_the_book(&self.book[&lease]));
                self.book.get_mut(&lease).unwrap().revoked |= known;
            }
            Step::Crash { sidecar } => {
                let owner = std::mem::replace(&mut self.sidecars[sidecar].owner, OwnerId::fresh());
                self.sidecars[sidecar].epoch = None;
                self.sidecars[sidecar].groups = std::array::from_fn(configured);
                for entry in self.book.values_mut().filter(|entry| entry.ask.owner == owner) {
                    entry.held = false;
                }
                self.crashed.push((owner, self.now()));
                self.bench.crash();
            }
            Step::Clear { key: number } => {
                let clear = self.bench.store().set_status(provider(), key(number), StatusChange::Clear);
                assert!(now(clear), "its settings are there");
            }
            Step::Cap { key, cap } => {
                self.caps[key] = cap;
                self.sync();
            }
            Step::Pass { ms } => {
                self.now.fetch_add(ms, Ordering::SeqCst);
            }
            Step::LoseData { key, cap } => {
                // Sidecars that hold something have renewed once by then: what a lender could do
                // before their first heartbeat is the window that the design leaves open.
                for sidecar in 0..SIDECARS {
                    self.renew(sidecar, false);
                }
                self.now.fetch_add(1, Ordering::SeqCst);
                self.bench.lose_data();
                for entry in self.book.values_mut() {
                    (entry.in_store, entry.revoked) = (false, false);
                }
                self.refused_at = [None; KEYS];
                self.group_refused_at.clear();
                self.caps[key] = cap;
                self.sync();
                for sidecar in 0..SIDECARS {
                    self.renew(sidecar, false);
                }
            }
        }
    }

    /// What must hold after every step.
    pub fn check(&self) {
        self.bench.check();
        let snapshot = self.snapshot();
        let seen: Vec<_> = snapshot
            .leases
            .iter()
            .map(|view| (view.id, view.key_id.clone(), view.owner.clone(), view.expires_at_ms, view.revoked))
            .collect();
        let by_the_book: Vec<_> = self
            .book
            .iter()
            .filter(|(_, entry)| self.is_by_the_book(entry))
            .map(|(id, entry)| {
                (*id, entry.grant.key.clone(), entry.ask.owner.clone(), Some(entry.until), entry.revoked)
            })
            .collect();
        assert_eq!(seen, by_the_book);
        for (owner, at) in &self.crashed {
            if self.now() > at.plus(DEADLINE + TTL) {
                assert!(snapshot.leases.iter().all(|view| view.owner != *owner), "a crash holds its slot");
            }
        }
    }
}

impl Entry {
    fn held(&self) -> Held {
        let Grant { key, pool, token, group, .. } = self.grant.clone();
        Held {
            group,
            lease: self.ask.lease,
            key,
            pool,
            fingerprint: Fingerprint([1; 32]),
            token,
            app: AppName::anonymous(),
        }
    }

    fn release(&self) -> Release {
        let Grant { key, pool, group, .. } = self.grant.clone();
        Release { provider: provider(), lease: self.ask.lease, key, pool, group }
    }

    fn report(&self, outcome: Outcome) -> Report {
        Report {
            provider: provider(),
            key: self.grant.key.clone(),
            group: self.grant.group.clone(),
            lease: self.ask.lease,
            token: self.grant.token,
            fingerprint: Fingerprint([1; 32]),
            model: None,
            outcome,
        }
    }
}

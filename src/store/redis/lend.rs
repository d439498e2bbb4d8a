//! Acquire, renew and release, many at a time.

use std::collections::HashMap;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use redis::Value;
use tokio::time::{Instant, timeout_at};

use super::batch::{Batched, MOST_ACQUIRES};
use super::call::{Call, Few, Many, crowd};
use super::link::Live;
use super::values::{Reader, nonsense};
use super::{CALL_LIMIT, SHARED_LIMIT, Shared, within_limit};
use crate::model::{Class, FencingToken, Fingerprint, GroupName, KeyId, KeyStatus, PoolName, ProviderName};
use crate::store::text::fingerprint_text;
use crate::store::{
    Acquire, Acquired, Candidate, Epoch, Grant, Held, Reason, Refusal, Release, Renew, RenewAnswer, Renewed,
    StoreError, StoreTime,
};

/// How long a sidecar counts as one where somebody waits after it was refused: a lease's life, within these
/// bounds. A queue's head tries again once a heartbeat at least, which is less; and nobody is woken for long who
/// does not wait any more.
const WAITS: (Duration, Duration) = (Duration::from_secs(5), Duration::from_mins(10));

impl Shared {
    pub(super) async fn acquire(self: &Arc<Self>, ask: Acquire) -> Result<Acquired, StoreError> {
        let until = Instant::now() + SHARED_LIMIT;
        match timeout_at(until, self.batcher.acquire(self, ask)).await {
            Ok(Ok(answer)) => answer,
            // Sent or not, it may yet be: its deadline bounds when.
            _ => Err(StoreError::TimedOut(SHARED_LIMIT)),
        }
    }

    pub(super) async fn release(self: &Arc<Self>, asks: Vec<Release>) -> Result<usize, StoreError> {
        let until = Instant::now() + SHARED_LIMIT;
        let mut by_provider: HashMap<ProviderName, Vec<Release>> = HashMap::new();
        for ask in asks {
            by_provider.entry(ask.provider.clone()).or_default().push(ask);
        }
        let mut answers = Vec::new();
        for (provider, asks) in by_provider {
            answers.extend(self.batcher.release(self, &provider, asks));
        }
        let mut freed = 0;
        for answer in answers {
            // What waits in line is sent though nobody waits for its answer.
            let Ok(Ok(answer)) = timeout_at(until, answer).await else {
                return Err(StoreError::TimedOut(SHARED_LIMIT));
            };
            freed += answer?;
        }
        Ok(freed)
    }

    /// The replication id of the server that holds this provider's keys; empty where it is not known.
    pub(super) async fn replication(&self, provider: &ProviderName) -> Result<Arc<str>, StoreError> {
        let live = self.live(Instant::now() + CALL_LIMIT).await?;
        if !live.conn.is_cluster() {
            return Ok(Arc::clone(&live.replication));
        }
        let mut info = redis::cmd("INFO");
        info.arg("replication");
        let answer = self.command(&self.names.of(provider).epoch(), &info).await;
        let text = match answer {
            Ok(value) => super::values::text(value)?,
            Err(StoreError::Unavailable(_)) => return Ok("".into()), // no right to ask; a lost node fails the call itself
            Err(error) => return Err(error),
        };
        let id = text.lines().find_map(|line| line.strip_prefix("master_replid:"));
        let id: Arc<str> = id.map(str::trim).unwrap_or_default().into();
        let mut histories = self.histories.lock().unwrap_or_else(PoisonError::into_inner);
        histories.insert(provider.clone(), Arc::clone(&id));
        Ok(id)
    }

    /// The same as it was last known, without a round trip.
    fn known_replication(&self, live: &Live, provider: &ProviderName) -> Arc<str> {
        if !live.conn.is_cluster() {
            return Arc::clone(&live.replication);
        }
        let histories = self.histories.lock().unwrap_or_else(PoisonError::into_inner);
        histories.get(provider).cloned().unwrap_or_default()
    }

    pub(super) async fn renew(&self, ask: Renew) -> Result<Renewed, StoreError> {
        within_limit(self.renew_all(ask)).await
    }

    async fn renew_all(&self, ask: Renew) -> Result<Renewed, StoreError> {
        let replication = self.replication(&ask.provider).await?;
        let names = self.names.of(&ask.provider);
        let mut order: Vec<&KeyId> = Vec::new();
        let mut index: HashMap<&KeyId, usize> = HashMap::new();
        for held in &ask.leases {
            index.entry(&held.key).or_insert_with(|| {
                order.push(&held.key);
                order.len()
            });
        }
        let mut crowds = Few::default();
        let crowded: Vec<usize> =
            ask.leases.iter().map(|held| crowds.number_or_none(crowd(held.group.as_ref()))).collect();
        let mut call = Call::default();
        for key in [names.epoch(), names.fence(), names.probes(), names.keys()] {
            call.key(key);
        }
        for key in &order {
            call.key(names.key(key));
            call.key(names.leases(key));
        }
        let (known, history) = ask.epoch.as_ref().map_or(("", ""), parts_of);
        // Who knows its leases from this server's present history has seen no failover with them.
        let failed_over = if history == &*replication { "" } else { &*replication };
        call.arg(known).arg(fresh_epoch()).arg(&*ask.owner.0);
        call.number(ask.ttl.as_millis()).number(ask.deadline.0).arg(if ask.reassert { "1" } else { "0" });
        call.arg(failed_over).number(order.len());
        call.number(crowds.list().len()).number(ask.leases.len());
        for key in &order {
            call.arg(key.as_str());
        }
        for group in crowds.list() {
            call.key(names.crowd(group));
            call.arg(group.as_str());
        }
        for (held, crowd) in ask.leases.iter().zip(crowded) {
            call.key(names.lease(held.lease));
            let Held { lease, key, pool, fingerprint, token, app, group: _ } = held;
            call.arg(lease.to_string()).number(index[key]).arg(pool.as_str());
            call.arg(fingerprint_text(*fingerprint)).number(token.0).arg(app.as_str()).number(crowd);
        }
        let mut answer = self.run(&self.scripts.renew, &call).await?;
        let epoch = epoch_of(&answer.text()?, &replication);
        let mut answers = Vec::with_capacity(ask.leases.len());
        for _ in &ask.leases {
            answers.push(match answer.number()? {
                -1 => RenewAnswer::Late,
                0 => RenewAnswer::Lost,
                ends => {
                    RenewAnswer::Renewed(StoreTime(u64::try_from(ends).map_err(|_| nonsense("a bad time"))?))
                }
            });
        }
        Ok(Renewed { epoch, answers })
    }
}

/// The epoch as callers see it: with the server's history, so that a failover is another epoch to them.
fn epoch_of(id: &str, replication: &str) -> Epoch {
    if replication.is_empty() { Epoch(id.into()) } else { Epoch(format!("{id}@{replication}").into()) }
}

/// The id of the data's life, and the server's history or "".
fn parts_of(epoch: &Epoch) -> (&str, &str) {
    epoch.0.rsplit_once('@').unwrap_or((&*epoch.0, ""))
}

/// An id for an epoch, should the store have none.
pub(super) fn fresh_epoch() -> String {
    uuid::Uuid::now_v7().simple().to_string()
}

impl Batched for Acquire {
    type Answer = Acquired;

    async fn call(
        shared: &Arc<Shared>,
        provider: &ProviderName,
        asks: &[Self],
    ) -> Result<Vec<Acquired>, StoreError> {
        let call = acquire_call(shared, provider, asks);
        let live = shared.live(Instant::now() + CALL_LIMIT).await?;
        let replication = shared.known_replication(&live, provider);
        let (now, mut answer) = shared.run_at(&shared.scripts.acquire, &call).await?;
        let epoch = epoch_of(&answer.text()?, &replication);
        let mut answers = Vec::with_capacity(asks.len());
        for ask in asks {
            answers.push(match answer.value()? {
                Value::Int(token) => Acquired::Granted(granted(ask, token, now.plus(ask.ttl), &epoch)?),
                more => acquired(ask, more, &epoch)?,
            });
        }
        Ok(answers)
    }
}

/// A candidate as a call names it.
type Named<'a> = (&'a KeyId, &'a PoolName, Option<&'a GroupName>, Fingerprint);

fn acquire_call(shared: &Shared, provider: &ProviderName, asks: &[Acquire]) -> Call {
    let names = shared.names.of(provider);
    let mut candidates = Many::default();
    let (firsts, others) = orders(asks, &mut candidates);
    let (mut pools, mut groups, mut terms) = (Few::default(), Few::default(), Few::default());
    let mut call = Call::default();
    for key in [names.epoch(), names.fence(), names.cooldowns(), names.probes(), names.waiting()] {
        call.key(key);
    }
    call.key(names.groups());
    let (mut in_pools, mut in_groups, mut rests) = (Vec::new(), Vec::new(), String::new());
    for (key, pool, group, fingerprint) in candidates.list() {
        call.key(names.key(key)).key(names.leases(key));
        in_pools.push(pools.number(*pool));
        in_groups.push(groups.number_or_none(*group));
        rests.extend(["rest:", &fingerprint_text(*fingerprint)]);
    }
    let on: Vec<usize> =
        asks.iter().map(|ask| terms.number((&ask.owner, &ask.app, ask.model.as_ref(), ask.ttl))).collect();
    let ttl = asks.iter().map(|ask| ask.ttl).max().unwrap_or(WAITS.0);
    call.arg(fresh_epoch()).arg(&*shared.name).number(ttl.clamp(WAITS.0, WAITS.1).as_millis());
    call.number(in_pools.len()).number(pools.list().len()).number(groups.list().len());
    call.number(terms.list().len()).number(asks.len());
    call.number(asks.iter().map(|ask| ask.deadline.0).min().unwrap_or(0));
    call.arg(if has_a_lease_twice(asks) { "1" } else { "0" });
    call.arg(numbers_unless_all(1, &in_pools)).arg(numbers_unless_all(0, &in_groups));
    call.arg(numbers_unless_all(1, &on));
    call.arg(asks.iter().fold(String::new(), |text, ask| text + &ask.deadline.0.to_string() + " "));
    let each_its_own = firsts.iter().copied().eq(1..=asks.len());
    call.arg(others).arg(if each_its_own { String::new() } else { bytes(&firsts) });
    call.number(firsts.iter().max().unwrap_or(&0)).arg(rests);
    for pool in pools.list() {
        call.key(names.pool(pool)).arg(pool.as_str());
    }
    for group in groups.list() {
        call.key(names.crowd(group)).arg(group.as_str());
    }
    for (owner, app, model, ttl) in terms.list() {
        call.arg(&*owner.0).arg(app.as_str()).arg(model.map_or("", |model| model.as_str()));
        call.number(ttl.as_millis());
    }
    for ask in asks {
        call.key(names.lease(ask.lease));
    }
    call
}

/// The first candidate of each ask, or 0, and a list of the others, which seldom matter. The firsts are numbered
/// first: where each ask has another, their numbers go without saying.
fn orders<'a>(asks: &'a [Acquire], candidates: &mut Many<Named<'a>>) -> (Vec<usize>, String) {
    let mut number =
        |one: &'a Candidate| candidates.number((&one.key, &one.pool, one.group.as_ref(), one.fingerprint));
    let firsts = asks.iter().map(|ask| ask.candidates.first().map_or(0, &mut number)).collect();
    let mut others = String::new();
    for ask in asks {
        others.extend(ask.candidates.iter().skip(1).flat_map(|one| [number(one).to_string(), " ".into()]));
        others.push(';');
    }
    (firsts, others)
}

/// Each followed by a blank; "" where all are this one.
fn numbers_unless_all(usual: usize, numbers: &[usize]) -> String {
    if numbers.iter().all(|number| *number == usual) {
        return String::new();
    }
    numbers.iter().fold(String::new(), |text, number| text + &number.to_string() + " ")
}

fn has_a_lease_twice(asks: &[Acquire]) -> bool {
    asks.iter().enumerate().any(|(at, ask)| asks[..at].iter().any(|other| other.lease == ask.lease))
}

/// Each as one byte, which the script reads at a fraction of a text's cost: none is above the number of asks.
fn bytes(numbers: &[usize]) -> String {
    const { assert!(MOST_ACQUIRES < 128, "a character below it is one byte") };
    numbers.iter().map(|number| u8::try_from(*number).map_or('\0', char::from)).collect()
}

/// The first candidate, of which there is nothing more to say.
fn granted(ask: &Acquire, token: i64, expires_at: StoreTime, epoch: &Epoch) -> Result<Grant, StoreError> {
    let candidate = ask.candidates.first().ok_or_else(|| nonsense("a candidate of nobody"))?;
    Ok(Grant {
        key: candidate.key.clone(),
        pool: candidate.pool.clone(),
        token: FencingToken(u64::try_from(token).map_err(|_| nonsense("a token below zero"))?),
        expires_at,
        probe: false,
        wants_success: false,
        epoch: epoch.clone(),
        group: group_of(candidate.group.as_ref(), "")?,
    })
}

fn acquired(ask: &Acquire, answer: Value, epoch: &Epoch) -> Result<Acquired, StoreError> {
    let mut answer = Reader::of(answer)?;
    match answer.number()? {
        1 => granted_in_full(ask, &mut answer, epoch).map(Acquired::Granted),
        0 => {
            let mut refusal = Refusal {
                reasons: Vec::with_capacity(ask.candidates.len()),
                cooldown_end: time(answer.count()?),
                lease_end: time(answer.count()?),
                grace_end: time(answer.count()?),
            };
            for candidate in ask.candidates.iter() {
                refusal.reasons.push((candidate.key.clone(), reason(&mut answer)?));
            }
            Ok(Acquired::Refused(refusal))
        }
        2 => Ok(Acquired::Late),
        _ => Err(nonsense("an unknown answer to an acquire")),
    }
}

/// A grant that says more than most, or that an earlier call was given, whose answer was lost.
fn granted_in_full(ask: &Acquire, answer: &mut Reader, epoch: &Epoch) -> Result<Grant, StoreError> {
    let mut grant = Grant {
        key: KeyId::parse(&answer.text()?).map_err(|_| nonsense("a bad key"))?,
        pool: PoolName::parse(&answer.text()?).map_err(|_| nonsense("a bad pool"))?,
        token: FencingToken(answer.count()?),
        expires_at: StoreTime(answer.count()?),
        probe: answer.number()? == 1,
        wants_success: answer.number()? == 1,
        epoch: epoch.clone(),
        group: None,
    };
    let candidate = ask.candidates.iter().find(|candidate| candidate.key == grant.key);
    grant.group = group_of(candidate.and_then(|one| one.group.as_ref()), &answer.text()?)?;
    Ok(grant)
}

/// The group that a grant tells: the one asked for, or where answers say it, what they have named.
fn group_of(asked: Option<&GroupName>, named: &str) -> Result<Option<GroupName>, StoreError> {
    match asked {
        Some(group) if group.is_auto() && named.is_empty() => Ok(Some(GroupName::auto())),
        Some(group) if group.is_auto() => {
            GroupName::parse(named).map(Some).map_err(|_| nonsense("a bad group"))
        }
        group => Ok(group.cloned()),
    }
}

fn time(ms: u64) -> Option<StoreTime> {
    (ms > 0).then_some(StoreTime(ms))
}

/// A rest's class. In a row that another program wrote it may be any word, and such a row rests like others.
fn class(word: &str) -> Class {
    Class::RESTS.into_iter().find(|class| class.as_str() == word).unwrap_or(Class::Rate)
}

fn reason(answer: &mut Reader) -> Result<Reason, StoreError> {
    let word = answer.text()?;
    let value = answer.value()?;
    match word.as_str() {
        "member" => Ok(Reason::NotMember),
        "settings" => Ok(Reason::NoSettings),
        "full" => Ok(Reason::Full),
        "cooling" => {
            let mut rest = Reader::of(value)?;
            Ok(Reason::Cooling { until: StoreTime(rest.count()?), class: class(&rest.text()?) })
        }
        "unusable" => match super::values::text(value)?.as_str() {
            "disabled" => Ok(Reason::Unusable(KeyStatus::Disabled)),
            "invalid" => Ok(Reason::Unusable(KeyStatus::Invalid)),
            _ => Err(nonsense("an unknown status")),
        },
        _ => Err(nonsense("an unknown reason")),
    }
}

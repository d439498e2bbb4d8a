//! Keeping live leases alive, and ending those that cannot be.
//!
//! One task does both. Once an interval it sends one renewal a provider for all of its leases, and it looks
//! at each lease's local deadline: the monotonic time before the last successful renewal was sent + TTL −
//! margin. The task waits for renewals and deadlines at the same time, so that a store which hangs keeps no
//! lease alive past its deadline.
//!
//! Of very many leases a renewal takes several calls, one after the other, those first whose deadline is next. All
//! at once would share one call's time in the store, and where it is slow the last would never be answered; and
//! whoever wants a lease would wait for all of them.
//!
//! A lease that the store does not know is lost, with one exception: where the store's data may have gone
//! (another epoch, or an answer after a failure) the next call re-registers what is still within its
//! deadline, under the cap. It names only what was granted or confirmed before, by the epoch of that time: a
//! lease from the store's present life has nothing to re-register, and must start no grace. Such a call never
//! names a lease whose release has begun; and one that crossed a release on its way is followed by a second
//! release.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use futures_util::StreamExt as _;
use futures_util::stream::FuturesUnordered;
use prometheus_client::metrics::gauge::Gauge;
use tokio::time::{Instant, sleep_until};

use super::held::Hold;
use super::{Inner, Station, lock, settle};
use crate::model::{KeyId, LeaseId, Map, PoolName};
use crate::store::{Epoch, Renew, RenewAnswer, Renewed};

/// Leases in one renewal call.
const CHUNK: usize = 1000;
/// How soon a failed renewal is tried again: a tenth of the heartbeat, within these bounds. The margin
/// between the heartbeat and a lease's local deadline must hold several tries.
const RETRY: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(1));
/// How long the task sleeps when there is nothing to do.
const IDLE: Duration = Duration::from_hours(1);

/// One provider's live leases and its rhythm.
#[derive(Default)]
pub(super) struct Beat {
    leases: Map<LeaseId, Entry>,
    gauges: Map<KeyId, Vec<(PoolName, Gauge)>>,
    /// The store's life that was seen last.
    epoch: Option<Epoch>,
    /// When the next call is due; `None` while it runs, or without leases.
    next: Option<Instant>,
    running: bool,
}

/// A live lease and what the store is known to know of it.
struct Entry {
    hold: Arc<Hold>,
    /// The life of the store in which it was granted, or last registered.
    epoch: Epoch,
    /// The store may not know it: the next call re-registers it.
    in_doubt: bool,
}

impl Beat {
    /// Registers a lease; also when (in ticks) the heartbeat must look at it.
    pub(super) fn add(&mut self, inner: &Inner, station: &Station, hold: &Arc<Hold>) -> (Gauge, u64) {
        let epoch = &hold.grant.epoch;
        if self.epoch.as_ref() != Some(epoch) {
            self.epoch = Some(epoch.clone());
            for entry in self.leases.values_mut().filter(|entry| entry.epoch != *epoch) {
                entry.in_doubt = true;
            }
            if !self.running && self.is_any_in_doubt() {
                self.next = Some(hold.begun);
            }
        }
        let entry = Entry { hold: Arc::clone(hold), epoch: epoch.clone(), in_doubt: false };
        self.leases.insert(hold.id, entry);
        if !self.running {
            let next = hold.begun + inner.lease.heartbeat;
            self.next = Some(self.next.map_or(next, |planned| planned.min(next)));
        }
        let due = self.next.map_or(u64::MAX, |next| inner.ticks(next)).min(hold.due());
        (self.gauge(inner, station, hold), due)
    }

    fn is_any_in_doubt(&self) -> bool {
        self.leases.values().any(|entry| entry.in_doubt && entry.hold.is_sound())
    }

    fn gauge(&mut self, inner: &Inner, station: &Station, hold: &Hold) -> Gauge {
        let (key, pool) = (&hold.grant.key, &hold.grant.pool);
        if let Some((_, gauge)) =
            self.gauges.get(key).and_then(|of_key| of_key.iter().find(|(other, _)| other == pool))
        {
            return gauge.clone();
        }
        let gauge = inner.metrics.leases_active(&station.provider, pool, key);
        self.gauges.entry(key.clone()).or_default().push((pool.clone(), gauge.clone()));
        gauge
    }

    pub(super) fn get(&self, lease: LeaseId) -> Option<Arc<Hold>> {
        self.leases.get(&lease).map(|entry| Arc::clone(&entry.hold))
    }

    pub(super) fn remove(&mut self, lease: LeaseId) {
        self.leases.remove(&lease);
    }

    pub(super) fn take_all(&mut self) -> Vec<Arc<Hold>> {
        self.leases.drain().map(|(_, entry)| entry.hold).collect()
    }

    /// The round that is due now, if one is.
    fn begin(&mut self, now: Instant) -> Option<Round> {
        if self.running || self.next.is_none_or(|next| next > now) {
            return None;
        }
        self.next = None;
        let mut groups: Vec<Part> = Vec::new();
        for entry in self.leases.values_mut().filter(|entry| entry.hold.is_sound()) {
            let reassert = std::mem::take(&mut entry.in_doubt);
            let known = groups.iter_mut().find(|part| part.epoch == entry.epoch && part.reassert == reassert);
            match known {
                Some(part) => part.leases.push(Arc::clone(&entry.hold)),
                None => groups.push(Part {
                    leases: vec![Arc::clone(&entry.hold)],
                    epoch: entry.epoch.clone(),
                    reassert,
                }),
            }
        }
        if groups.is_empty() {
            return None; // the next lease starts the rhythm anew
        }
        let mut parts: Vec<Part> = groups.into_iter().flat_map(Part::in_calls).collect();
        parts.sort_by_cached_key(|part| first_deadline(part.sound()));
        self.running = true;
        Some(Round { parts })
    }

    /// What the store knows of these leases is in doubt: re-register them now.
    pub(super) fn doubt(&mut self) {
        for entry in self.leases.values_mut() {
            entry.in_doubt = true;
        }
        if !self.running && !self.leases.is_empty() {
            self.next = Some(Instant::now());
        }
    }

    fn end(&mut self, inner: &Inner, round: &Round, begun: Instant, saw: &[Saw]) {
        self.running = false;
        let now = Instant::now();
        let mut again = false;
        for (part, saw) in round.parts.iter().zip(saw) {
            again |= saw.failed || saw.late;
            for hold in &part.leases {
                if let Some(entry) = self.leases.get_mut(&hold.id) {
                    entry.learn(part, saw);
                }
            }
            if let Some(epoch) = &saw.epoch {
                self.epoch = Some(epoch.clone());
            }
        }
        let next = if again {
            now + (inner.lease.heartbeat / 10).clamp(RETRY.0, RETRY.1)
        } else if self.is_any_in_doubt() {
            now
        } else {
            (begun + inner.lease.heartbeat).max(now)
        };
        self.next = (!self.leases.is_empty()).then_some(next);
    }

    /// Leases of which a time has passed.
    fn passed(&self, now: u64) -> Vec<Arc<Hold>> {
        let holds = self.leases.values().map(|entry| &entry.hold);
        holds.filter(|hold| hold.due() <= now).cloned().collect()
    }

    /// When the task must look at this provider again, in ticks.
    fn due(&self, inner: &Inner) -> u64 {
        let next = self.next.map_or(u64::MAX, |next| inner.ticks(next));
        self.leases.values().map(|entry| entry.hold.due()).fold(next, u64::min)
    }
}

impl Entry {
    /// What a call that named it told.
    fn learn(&mut self, part: &Part, saw: &Saw) {
        match &saw.epoch {
            _ if saw.failed => self.in_doubt = true,
            // By its old epoch it is to be re-registered, should that be what starts the grace.
            Some(epoch) if *epoch != part.epoch && !part.reassert => self.in_doubt = true,
            _ if saw.late => self.in_doubt |= part.reassert,
            Some(epoch) => self.epoch = epoch.clone(),
            None => {}
        }
    }
}

/// One provider's renewal.
struct Round {
    parts: Vec<Part>,
}

/// Leases of which the store is told in one way, and in one call.
struct Part {
    leases: Vec<Arc<Hold>>,
    epoch: Epoch,
    reassert: bool,
}

impl Part {
    /// The same in parts that are not too large for one call.
    fn in_calls(mut self) -> Vec<Self> {
        self.leases.sort_by_cached_key(|hold| (hold.deadline.load(Ordering::Acquire), hold.id));
        let calls = self.leases.chunks(CHUNK);
        calls.map(|leases| Self { leases: leases.to_vec(), epoch: self.epoch.clone(), ..self }).collect()
    }

    /// Those that have not ended since the round began.
    fn sound(&self) -> Vec<&Hold> {
        self.leases.iter().map(|hold| &**hold).filter(|hold| hold.is_sound() && !hold.is_released()).collect()
    }
}

/// In ticks.
fn first_deadline<'a>(holds: impl IntoIterator<Item = &'a Hold>) -> u64 {
    holds.into_iter().map(|hold| hold.deadline.load(Ordering::Acquire)).min().unwrap_or(u64::MAX)
}

impl Round {
    fn reasserts(&self) -> bool {
        self.parts.iter().any(|part| part.reassert)
    }
}

/// What the answer about one part told.
#[derive(Default)]
struct Saw {
    epoch: Option<Epoch>,
    failed: bool,
    late: bool,
}

/// The heartbeat's task.
pub(super) async fn run(inner: Arc<Inner>) {
    let mut rounds = FuturesUnordered::new();
    loop {
        // Whoever registers while this looks around nudges, and it looks again.
        inner.due.store(u64::MAX, Ordering::Release);
        let now = Instant::now();
        let mut due = inner.ticks(now + IDLE);
        for station in inner.stations() {
            // Deadlines first: after a long stop nothing is renewed that has had its time.
            let passed = lock(&station.beat).passed(inner.ticks(now));
            for hold in passed {
                hold.check(&inner, inner.ticks(now));
            }
            let mut beat = lock(&station.beat);
            let round = beat.begin(now);
            due = due.min(beat.due(&inner));
            drop(beat);
            rounds.extend(round.map(|round| renew(&inner, station, round)));
        }
        inner.due.store(due, Ordering::Release);
        tokio::select! {
            biased;
            () = inner.stop.cancelled() => return,
            Some(()) = rounds.next(), if !rounds.is_empty() => {}
            () = inner.nudge.notified() => {}
            () = sleep_until(inner.at(due).unwrap_or(now + IDLE)) => {}
        }
    }
}

/// Renews all of one provider's leases, one call after the other.
async fn renew(inner: &Arc<Inner>, station: Arc<Station>, round: Round) {
    let begun = Instant::now();
    let limit = inner.lease.heartbeat.min(inner.lease.ttl / 3);
    let knows_keys = !round.reasserts() || tell_keys(inner, &station, limit).await;
    let until = Instant::now() + limit;
    let mut saw = Vec::with_capacity(round.parts.len());
    for part in &round.parts {
        saw.push(if part.reassert && !knows_keys {
            Saw { failed: true, ..Saw::default() }
        } else {
            renew_part(inner, &station, part, until).await
        });
    }
    let failed = saw.iter().any(|saw| saw.failed);
    if failed || saw.iter().any(|saw| saw.late) {
        inner.metrics.heartbeat_failed();
    }
    lock(&station.beat).end(inner, &round, begun, &saw);
    if round.reasserts() {
        inner.tell(|witness| witness.registered_again(&station.provider));
        release_crossed(inner, &station, &round, if failed { until } else { begun });
    }
}

/// One call; none where it comes too late, or all its leases have ended.
async fn renew_part(inner: &Arc<Inner>, station: &Station, part: &Part, until: Instant) -> Saw {
    let sent = Instant::now();
    let (within, holds) = (until.saturating_duration_since(sent), part.sound());
    if within.is_zero() || holds.is_empty() {
        return Saw { late: !holds.is_empty(), ..Saw::default() };
    }
    let ask = ask(inner, station, part, &holds, within);
    let answer = settle::bounded(within, inner.store.renew(ask)).await;
    inner.saw(&answer);
    match answer {
        Ok(renewed) => take_in(inner, part, &holds, renewed, sent),
        Err(cause) => {
            station.store_failed(&cause);
            Saw { failed: true, ..Saw::default() }
        }
    }
}

/// A store that lost its data lost the caps too, and would re-register under a cap of one: all others would be lost.
/// Whether it knows them now.
async fn tell_keys(inner: &Arc<Inner>, station: &Station, limit: Duration) -> bool {
    let repair = inner.repair.read().unwrap_or_else(std::sync::PoisonError::into_inner).clone();
    let Some(repair) = repair else { return true };
    let answer = settle::bounded(limit, inner.store.sync_keys(repair(&station.provider))).await;
    inner.saw(&answer);
    if let Err(cause) = &answer {
        station.store_failed(cause);
    }
    answer.is_ok()
}

fn ask(inner: &Inner, station: &Station, part: &Part, holds: &[&Hold], mut within: Duration) -> Renew {
    // Never may a call that comes late re-create what its holder has given up by then.
    if part.reassert
        && let Some(first) = inner.at(first_deadline(holds.iter().copied()))
    {
        within = within.min(first.saturating_duration_since(Instant::now()));
    }
    Renew {
        provider: station.provider.clone(),
        owner: inner.owner.clone(),
        epoch: Some(part.epoch.clone()),
        leases: holds.iter().map(|hold| hold.as_held()).collect(),
        ttl: inner.lease.ttl,
        deadline: inner.store.now().plus(within),
        reassert: part.reassert,
    }
}

fn take_in(inner: &Inner, part: &Part, holds: &[&Hold], renewed: Renewed, sent: Instant) -> Saw {
    let mut late = false;
    // In another life of the store "not known" says nothing yet: the next call re-registers.
    let moved = part.epoch != renewed.epoch;
    let deadline = inner.deadline(sent);
    for (hold, answer) in holds.iter().zip(&renewed.answers) {
        match answer {
            RenewAnswer::Renewed(_) => hold.deadline.store(deadline, Ordering::Release),
            RenewAnswer::Lost if moved && !part.reassert => {}
            // Its release overtook the renewal: nobody holds it any more.
            RenewAnswer::Lost if hold.is_released() => {}
            RenewAnswer::Lost => hold.lost(inner),
            RenewAnswer::Late => late = true,
        }
    }
    Saw { epoch: Some(renewed.epoch), failed: false, late }
}

/// Leases whose release began while a call that may re-create them was under way.
fn release_crossed(inner: &Arc<Inner>, station: &Arc<Station>, round: &Round, after: Instant) {
    let named = round.parts.iter().filter(|part| part.reassert).flat_map(|part| &part.leases);
    let crossed: Vec<_> = named.filter(|hold| hold.is_released()).map(|hold| hold.release(station)).collect();
    if !crossed.is_empty() {
        settle::release_again(inner, station, crossed, after);
    }
}

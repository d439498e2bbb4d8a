//! The walk from a wish to a lease: try, stand in line, try again when woken.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use rand::Rng as _;
use tokio::sync::Notify;
use tokio::time::{Instant, sleep_until};

use super::held::{Hold, Lease};
use super::kept::Kept;
use super::line::{Blocked, Ended, Entry, QueueId, Seq, Step};
use super::settle::{ACQUIRE_DEADLINE, Asking, bounded};
use super::want::{Choose, Want};
use super::{Inner, Leases, STORE_DOWN, Station, lock};
use crate::metrics::Asked;
use crate::model::{
    AppName, Fingerprint, KeyId, KeyStatus, LeaseId, ModelName, PoolName, ProviderName, Wanted,
};
use crate::store::{Acquire, Acquired, Candidate, Grant, Reason, Refusal, StoreError};

/// How many candidates go to the store first; the rest only if those could not be had.
const FIRST_CANDIDATES: usize = 3;
/// A head's timer never fires sooner than this after a refusal.
const MIN_PAUSE: Duration = Duration::from_millis(20);
/// The most that is added to a head's timer, so that sidecars do not try at the same moment.
const JITTER_MS: u64 = 10;
/// The least that a client is told to wait.
const MIN_RETRY_AFTER: Duration = Duration::from_secs(1);

/// Why no key was leased. Full, without access, unusable and failing are different errors, for they lead to
/// different next steps.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum AcquireError {
    /// Every fitting key is full or cools, and stayed so for the wait; or the queue is full.
    #[error("pool `{pool}` has no key to lend; try again in {retry_after:?}")]
    PoolExhausted {
        /// What was asked for.
        pool: PoolName,
        /// When it is worth trying again.
        retry_after: Duration,
        /// `queue.max_waiting` was reached, so this request did not even wait.
        queue_full: bool,
        /// What keeps the keys; empty where the store was not asked.
        kept: Vec<Kept>,
    },
    /// The provider lets no fitting key do this, by what it said of each: no matter of slots.
    #[error("pool `{pool}` has no key that may do this; try again in {retry_after:?}")]
    NoAccess {
        /// What was asked for.
        pool: PoolName,
        /// When the first of them is tried again.
        retry_after: Duration,
        /// What keeps the keys.
        kept: Vec<Kept>,
    },
    /// The store is in its grace, for longer than the wait.
    #[error(
        "the store has just lost its data or failed over: for up to {}s more keys are lent only to streams that are \
         already open, so that none is lent twice; the first keys are lent after that",
        retry_after.as_millis().div_ceil(1000)
    )]
    StoreGrace {
        /// When it ends.
        retry_after: Duration,
    },
    /// Every fitting key is invalid, disabled or pending.
    #[error(
        "pool `{pool}` has no usable key for this: all are invalid, disabled or pending; `lessor keys` tells why"
    )]
    KeyUnavailable {
        /// What was asked for.
        pool: PoolName,
    },
    /// The store failed; nothing is known about keys, so none is lent.
    #[error("the lease store failed, so no key is lent; is store.url right, and up?")]
    StoreUnavailable {
        /// What it said.
        #[source]
        cause: StoreError,
    },
    /// The process drains.
    #[error("lessor is shutting down and lends no more keys; send the request again")]
    ShuttingDown,
}

/// What one round of asking the store came to.
enum Tried {
    Got(Lease),
    Refused(Refusal),
}

impl Leases {
    /// Leases a slot of the best candidate that has one, waiting in line until `want.until` if need be.
    ///
    /// # Errors
    /// See [`AcquireError`]. A wait that only cooldowns beyond `want.until` could end is refused at once.
    ///
    /// Cancel safe: dropped at any point it leaves the line, its turn goes to the next, and a slot that
    /// the store may have granted meanwhile is given back.
    pub async fn acquire(&self, want: Want<'_>) -> Result<Lease, AcquireError> {
        if self.inner().refusing.load(Ordering::SeqCst) {
            return Err(AcquireError::ShuttingDown);
        }
        let station = self.inner().station(want.provider);
        let mut walk = Walk { leases: self, station: &station, want, begun: Instant::now(), repaired: false };
        let lease = walk.go().await?;
        self.inner().metrics.waited(lease.waited());
        Ok(lease)
    }

    /// Why the store lends no key, where it failed to when it was last asked. It is asked once more, for one of
    /// these, so that who is asked by nobody else does not hold on to an old failure.
    pub async fn lends_not(
        &self,
        candidates: impl FnOnce(&ProviderName) -> Vec<Candidate>,
    ) -> Option<StoreError> {
        let failed = || lock(&self.inner().lends_not).clone();
        let (provider, _) = failed()?;
        let candidates = candidates(&provider);
        let Some(first) = candidates.first() else {
            lock(&self.inner().lends_not).take_if(|(failed, _)| *failed == provider);
            return None; // nobody will ask for these keys again
        };
        let want = Want {
            provider: &provider,
            app: &AppName::anonymous(),
            pool: &first.pool,
            keys: &mut Each(&candidates),
            until: Instant::now(),
        };
        drop(self.acquire(want).await); // what it tells is noted on its way
        failed().map(|(_, cause)| cause)
    }
}

/// These keys, each once.
struct Each<'a>(&'a [Candidate]);

impl Choose for Each<'_> {
    fn model(&self) -> Option<&ModelName> {
        None
    }

    fn fitting(&self) -> Arc<[KeyId]> {
        self.0.iter().map(|candidate| candidate.key.clone()).collect()
    }

    fn rank(&mut self, wanted: &Wanted<'_>) -> Arc<[Candidate]> {
        let asked = |one: &Candidate| wanted.asked.iter().any(|other| other.key == one.key);
        self.0.iter().filter(|one| !asked(one)).cloned().collect()
    }

    fn confirm(&self, _: &KeyId, _: Fingerprint) -> bool {
        true
    }
}

/// One request on its way to a lease.
struct Walk<'a, 'w> {
    leases: &'a Leases,
    station: &'a Arc<Station>,
    want: Want<'w>,
    begun: Instant,
    /// The one repair was made.
    repaired: bool,
}

impl<'a> Walk<'a, '_> {
    async fn go(&mut self) -> Result<Lease, AcquireError> {
        if let Entry::Try { barred } = self.enter() {
            match self.attempt(&barred, self.begun).await? {
                Tried::Got(lease) => return Ok(lease),
                Tried::Refused(refusal) => self.judge(&blocked(&refusal, barred))?,
            }
        }
        self.in_line().await
    }

    fn enter(&self) -> Entry {
        // Registration counts first and tries after, so who reads zero here is ahead of it.
        if self.station.queued.load(Ordering::SeqCst) == 0 {
            return Entry::Try { barred: Vec::new() };
        }
        lock(&self.station.line).enter(&self.queue())
    }

    fn queue(&self) -> QueueId {
        QueueId { fitting: self.want.keys.fitting(), model: self.want.keys.model().cloned() }
    }

    async fn in_line(&mut self) -> Result<Lease, AcquireError> {
        self.check_store().await?;
        let place = self.join()?;
        loop {
            let step = lock(&self.station.line).step(place.seq);
            match step {
                Step::Ended(why) => return Err(ended(why)),
                Step::Try { barred } => match self.attempt(&barred, Instant::now()).await? {
                    Tried::Got(lease) => return place.granted(lease),
                    Tried::Refused(refusal) => {
                        let blocked = blocked(&refusal, barred);
                        place.refused(&blocked, self.retry_at(&refusal));
                        self.judge(&blocked)?;
                    }
                },
                Step::Wait { retry_at, blocked } => {
                    match &blocked {
                        Some(blocked) => self.judge(blocked)?,
                        None if self.want.until <= Instant::now() => return Err(self.exhausted(&[], false)),
                        None => {}
                    }
                    self.sleep(&place, retry_at).await;
                }
            }
        }
    }

    /// Nobody stands in line before a store that is known to fail: who has not just asked it, asks.
    async fn check_store(&self) -> Result<(), AcquireError> {
        let inner = self.leases.inner();
        if inner.store_state.load(Ordering::Relaxed) != STORE_DOWN {
            return Ok(());
        }
        let sent = Instant::now();
        let answer = bounded(ACQUIRE_DEADLINE, inner.store.ping()).await;
        inner.saw(&answer);
        answer.map_err(|cause| self.store_failed(cause, sent.elapsed()))
    }

    /// Until notified, the head's timer, or the end of the wait; the caller looks again in each case.
    async fn sleep(&self, place: &Place<'_>, retry_at: Option<Instant>) {
        let until = retry_at.map_or(self.want.until, |at| at.min(self.want.until));
        tokio::select! {
            biased;
            () = place.seat.notified() => {}
            () = sleep_until(until) => {
                let now = Instant::now();
                let next = now + self.leases.inner().lease.heartbeat;
                lock(&self.station.line).timer(place.seq, now, next);
            }
        }
    }

    /// Whether waiting (on) makes sense after what the store said.
    fn judge(&self, blocked: &Blocked) -> Result<(), AcquireError> {
        let pool = self.want.pool.clone();
        if blocked.is_unusable() {
            return Err(AcquireError::KeyUnavailable { pool });
        }
        let left = self.want.until.saturating_duration_since(Instant::now());
        let inner = self.leases.inner();
        let now = inner.store.now();
        // Nothing that ends meanwhile is lent anew, so that alone makes a shorter wait hopeless.
        let grace = blocked.grace_end.map(|end| end.since(now));
        if let Some(retry_after) = grace.filter(|rest| *rest > left) {
            return Err(AcquireError::StoreGrace { retry_after });
        }
        let cooled = match blocked.cooldown_end {
            Some(end) if blocked.full.is_empty() => Some(end.since(now)),
            _ => None,
        };
        match cooled {
            Some(retry_after) if retry_after > left || left.is_zero() => {
                let kept = Kept::sum(&blocked.reasons, now);
                if kept.iter().all(|kept| kept.by.is_no_access()) {
                    return Err(AcquireError::NoAccess { pool, retry_after, kept });
                }
                Err(AcquireError::PoolExhausted { pool, retry_after, queue_full: false, kept })
            }
            None if left.is_zero() => Err(self.exhausted(&blocked.reasons, false)),
            _ => Ok(()),
        }
    }

    fn exhausted(&self, reasons: &[(KeyId, Reason)], queue_full: bool) -> AcquireError {
        let hold = Duration::from_micros(self.station.hold.load(Ordering::Relaxed));
        let ttl = self.leases.inner().lease.ttl.max(MIN_RETRY_AFTER);
        AcquireError::PoolExhausted {
            pool: self.want.pool.clone(),
            retry_after: hold.clamp(MIN_RETRY_AFTER, ttl),
            queue_full,
            kept: Kept::sum(reasons, self.leases.inner().store.now()),
        }
    }

    /// When the head of a queue tries again by itself: at the first end of a cooldown or a lease that the
    /// store named, and once a heartbeat in any case.
    fn retry_at(&self, refusal: &Refusal) -> Instant {
        let inner = self.leases.inner();
        let now = inner.store.now();
        let ends = [refusal.cooldown_end, refusal.lease_end];
        let wait =
            ends.into_iter().flatten().map(|end| end.since(now)).fold(inner.lease.heartbeat, Duration::min);
        let jitter = Duration::from_millis(rand::rng().random_range(0..=JITTER_MS));
        Instant::now() + wait.max(MIN_PAUSE) + jitter
    }

    /// Asks the store for the candidates that are not barred, the best few first; begins at `now`.
    async fn attempt(&mut self, barred: &[KeyId], mut now: Instant) -> Result<Tried, AcquireError> {
        let mut passed_over: Vec<(KeyId, Fingerprint)> = Vec::new();
        'ranked: loop {
            let mut refusal = Refusal::default();
            let mut asked: Arc<[Candidate]> = Arc::default();
            for most in [FIRST_CANDIDATES, usize::MAX] {
                let wanted =
                    Wanted { at: now.into_std(), most, barred, passed_over: &passed_over, asked: &asked };
                let best = self.want.keys.rank(&wanted);
                if best.is_empty() {
                    break;
                }
                let tried = self.ask(&best, now).await?;
                match tried {
                    Tried::Got(lease) if self.want.keys.confirm(lease.key(), lease.fingerprint()) => {
                        return Ok(Tried::Got(lease));
                    }
                    Tried::Got(lease) => {
                        passed_over.push((lease.key().clone(), lease.fingerprint()));
                        now = Instant::now();
                        continue 'ranked; // the lease is dropped here, and so released
                    }
                    Tried::Refused(more) => merge(&mut refusal, more),
                }
                asked = best;
                now = Instant::now();
            }
            if self.repair(&refusal).await? {
                continue;
            }
            let disabled = |(key, _)| (key, Reason::Unusable(KeyStatus::Disabled));
            refusal.reasons.extend(passed_over.into_iter().map(disabled));
            return Ok(Tried::Refused(refusal));
        }
    }

    /// One call to the store, sent at `sent` or a moment later.
    async fn ask(&self, asked: &Arc<[Candidate]>, sent: Instant) -> Result<Tried, AcquireError> {
        let inner = self.leases.inner();
        let now = inner.store.now();
        let id = LeaseId::fresh_at(now.0);
        let ask = Acquire {
            provider: self.want.provider.clone(),
            lease: id,
            owner: inner.owner.clone(),
            app: self.want.app.clone(),
            model: self.want.keys.model().cloned(),
            candidates: Arc::clone(asked),
            ttl: inner.lease.ttl,
            deadline: now.plus(ACQUIRE_DEADLINE),
        };
        let mut call = Asking::new(inner, self.station, id, asked, sent, inner.store.acquire(ask));
        let answer = call.answer().await;
        inner.saw_lending(self.want.provider, &answer);
        let now = Instant::now();
        let took = now.saturating_duration_since(sent);
        match answer {
            Ok(Acquired::Granted(grant)) => {
                inner.metrics.acquire(Asked::Granted, took);
                self.begin(id, grant, asked, (sent, now)).map(Tried::Got)
            }
            Ok(Acquired::Refused(refusal)) => {
                inner.tell(|witness| {
                    let model = self.want.keys.model();
                    refusal.reasons.iter().for_each(|(key, why)| {
                        witness.passed_over(self.want.provider, model, key, *why);
                    });
                    if let Some(end) = refusal.grace_end {
                        witness.in_grace(self.want.provider, end);
                    }
                });
                let unusable = !refusal.any_full() && !refusal.any_cooling();
                inner.metrics.acquire(if unusable { Asked::Unusable } else { Asked::Exhausted }, took);
                Ok(Tried::Refused(refusal))
            }
            // The call was on its way for longer than it may: as good as no answer.
            Ok(Acquired::Late) => Err(self.store_failed(StoreError::TimedOut(ACQUIRE_DEADLINE), took)),
            Err(cause) => Err(self.store_failed(cause, took)),
        }
    }

    /// Granted `now`, by a call of `sent`.
    fn begin(
        &self,
        id: LeaseId,
        grant: Grant,
        asked: &[Candidate],
        (sent, now): (Instant, Instant),
    ) -> Result<Lease, AcquireError> {
        let inner = self.leases.inner();
        let Some(candidate) = asked.iter().find(|candidate| candidate.key == grant.key) else {
            let nonsense = format!("it granted key `{}`, which was not asked for", grant.key);
            return Err(self.store_failed(StoreError::Nonsense(nonsense), sent.elapsed()));
        };
        let end = inner.lease.max_duration.map_or(u64::MAX, |bound| inner.ticks(now + bound));
        let (fingerprint, app) = (candidate.fingerprint, self.want.app.clone());
        let named = (self.want.provider.clone(), id);
        let waited = now.saturating_duration_since(self.begun);
        let hold = Hold::new(named, grant, fingerprint, app, now, inner.deadline(sent), end);
        Ok(Lease::begin(self.leases, self.station, hold, waited))
    }

    /// Fails closed: for this request and for all who wait for this provider.
    fn store_failed(&self, cause: StoreError, took: Duration) -> AcquireError {
        self.leases.inner().metrics.acquire(Asked::StoreFailed, took);
        self.station.store_failed(&cause);
        AcquireError::StoreUnavailable { cause }
    }

    /// Whether the store was given settings that it lacked, so that one more try is due; once a request.
    async fn repair(&mut self, refusal: &Refusal) -> Result<bool, AcquireError> {
        let lacks = |reason: &Reason| matches!(reason, Reason::NoSettings | Reason::NotMember);
        if self.repaired || !refusal.reasons.iter().any(|(_, reason)| lacks(reason)) {
            return Ok(false);
        }
        let inner = self.leases.inner();
        let repair = inner.repair.read().unwrap_or_else(std::sync::PoisonError::into_inner).clone();
        let Some(repair) = repair else { return Ok(false) };
        self.repaired = true;
        let sent = Instant::now();
        let answer = bounded(ACQUIRE_DEADLINE, inner.store.sync_keys(repair(self.want.provider))).await;
        inner.saw(&answer);
        answer.map(|_| true).map_err(|cause| self.store_failed(cause, sent.elapsed()))
    }

    fn join(&self) -> Result<Place<'a>, AcquireError> {
        let inner = self.leases.inner();
        if self.want.until <= Instant::now() {
            return Err(self.exhausted(&[], false));
        }
        let bound = inner.queue.max_waiting;
        let room = inner.waiting.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |waiting| {
            (waiting < bound).then_some(waiting + 1)
        });
        if room.is_err() {
            return Err(self.exhausted(&[], true));
        }
        let mut line = lock(&self.station.line);
        let (seq, seat) = line.join(self.queue(), Instant::now() + inner.lease.heartbeat);
        self.station.queued.store(line.len(), Ordering::SeqCst);
        drop(line);
        inner.metrics.queue_depth().inc();
        let place = Place { inner, station: self.station, seq, seat };
        // Read after joining: who drains sets this first and empties the line after.
        if inner.refusing.load(Ordering::SeqCst) { Err(AcquireError::ShuttingDown) } else { Ok(place) }
    }
}

/// A place in line; dropping it passes its turn on.
struct Place<'a> {
    inner: &'a Arc<Inner>,
    station: &'a Arc<Station>,
    seq: Seq,
    seat: Arc<Notify>,
}

impl Place<'_> {
    fn refused(&self, blocked: &Blocked, retry_at: Instant) {
        lock(&self.station.line).refused(self.seq, blocked.clone(), retry_at);
    }

    /// Leaves with a lease; while draining none may begin, and it is dropped.
    fn granted(self, lease: Lease) -> Result<Lease, AcquireError> {
        lock(&self.station.line).granted(self.seq, lease.key());
        if self.inner.refusing.load(Ordering::SeqCst) { Err(AcquireError::ShuttingDown) } else { Ok(lease) }
    }
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        let mut line = lock(&self.station.line);
        line.leave(self.seq); // does nothing for one that left with a lease
        self.station.queued.store(line.len(), Ordering::SeqCst);
        drop(line);
        self.inner.waiting.fetch_sub(1, Ordering::SeqCst);
        self.inner.metrics.queue_depth().dec();
    }
}

fn ended(why: Ended) -> AcquireError {
    match why {
        Ended::Store(cause) => AcquireError::StoreUnavailable { cause },
        Ended::Draining => AcquireError::ShuttingDown,
    }
}

/// What a refusal means for the line; keys left to others count as full.
fn blocked(refusal: &Refusal, mut barred: Vec<KeyId>) -> Blocked {
    let left = barred.iter().map(|key| (key.clone(), Reason::Full));
    let reasons = refusal.reasons.iter().cloned().chain(left).collect();
    let full = refusal.reasons.iter().filter(|(_, reason)| matches!(reason, Reason::Full));
    barred.extend(full.map(|(key, _)| key.clone()));
    let cooling = |(_, reason): &(KeyId, Reason)| match reason {
        Reason::Cooling { until, .. } => Some(*until),
        _ => None,
    };
    let end = refusal.cooldown_end.into_iter().chain(refusal.reasons.iter().filter_map(cooling)).min();
    Blocked { full: barred, cooldown_end: end, grace_end: refusal.grace_end, reasons }
}

fn merge(into: &mut Refusal, more: Refusal) {
    let earliest = |a: Option<_>, b: Option<_>| a.into_iter().chain(b).min();
    into.reasons.extend(more.reasons);
    into.cooldown_end = earliest(into.cooldown_end, more.cooldown_end);
    into.lease_end = earliest(into.lease_end, more.lease_end);
    into.grace_end = into.grace_end.or(more.grace_end);
}

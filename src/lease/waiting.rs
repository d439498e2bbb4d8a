//! One request's way to a slot: try, and wait in line.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio::time::Instant;

use crate::model::{KeyId, LeaseId, ProviderName};
use crate::store::{Acquire, Acquired, Candidate, Grant, Reason, Refusal, StoreError};

use super::line::Queue;
use super::live::{Granted, Live};
use super::settle::UnderWay;
use super::{AcquireError, Inner, Lease, Want, lock};

/// How long one acquire may take, at the store and on the way.
const CALL: Duration = Duration::from_secs(2);

/// The shortest pause between two tries of a queue's head, so that no clock error makes it spin.
const FLOOR: Duration = Duration::from_millis(20);

/// What one try came to.
enum Try {
    Leased(Lease),
    /// Why not. `skipped`: keys were left to others who wait for their slots.
    Refused {
        refusal: Refusal,
        skipped: bool,
    },
}

/// One request that wants a slot.
struct Seeker<'a> {
    leases: &'a Arc<Inner>,
    want: Want<'a>,
    queue: Queue,
    begun: Instant,
    /// Keys the process's own view said no to.
    denied: Vec<KeyId>,
    repaired: bool,
}

pub(super) async fn acquire(leases: &Arc<Inner>, want: Want<'_>) -> Result<Lease, AcquireError> {
    let queue = Queue { fitting: want.fitting.clone(), model: want.model.cloned() };
    let begun = Instant::now();
    Seeker { leases, want, queue, begun, denied: Vec::new(), repaired: false }.seek().await
}

impl Seeker<'_> {
    async fn seek(mut self) -> Result<Lease, AcquireError> {
        if self.leases.draining.is_cancelled() {
            return Err(AcquireError::ShuttingDown);
        }
        // Newcomers never pass who stands in their own queue.
        if !self.somebody_waits() {
            match self.try_once(None, None).await? {
                Try::Leased(lease) => return Ok(lease),
                Try::Refused { refusal, skipped } => self.hopeless(&refusal, skipped)?,
            }
        }
        let place = Place::join(self.leases, self.want.provider, &self.queue, self.want.pool)?;
        self.wait(place).await
    }

    fn somebody_waits(&self) -> bool {
        self.leases.waiting.load(Ordering::Acquire) > 0
            && lock(&self.leases.lines).get(self.want.provider).is_some_and(|line| line.has(&self.queue))
    }

    /// In line: the head tries at once, at every bell and at the time the store named; the others when
    /// they are offered a slot.
    async fn wait(&mut self, mut place: Place<'_>) -> Result<Lease, AcquireError> {
        let mut again = place.is_head().then(Instant::now);
        let mut last: Option<Refusal> = None;
        loop {
            let due = again.unwrap_or(self.want.until).min(self.want.until);
            tokio::select! {
                biased;
                () = self.leases.draining.cancelled() => return Err(AcquireError::ShuttingDown),
                () = place.bell.notified() => {}
                () = tokio::time::sleep_until(due) => {}
            }
            if let Some(cause) = place.take_failure() {
                return Err(AcquireError::StoreUnavailable { cause });
            }
            let over = Instant::now() >= self.want.until;
            let offer = place.offer();
            if over && offer.is_none() && !(last.is_none() && place.is_head()) {
                return Err(self.exhausted(last.as_ref(), false));
            }
            if offer.is_none() && !place.is_head() {
                continue;
            }
            match self.try_once(Some(place.number), offer.as_ref()).await? {
                Try::Leased(lease) => {
                    place.served(lease.key());
                    return Ok(lease);
                }
                Try::Refused { refusal, skipped } => {
                    place.refused(offer.as_ref(), &refusal, skipped);
                    self.hopeless(&refusal, skipped)?;
                    again = place.is_head().then(|| self.next_try(&refusal));
                    last = Some(refusal);
                    if over {
                        return Err(self.exhausted(last.as_ref(), false));
                    }
                }
            }
        }
    }

    /// When a head tries by itself: at the earliest end the store named, a little later by chance, so
    /// that sidecars do not all come at once.
    fn next_try(&self, refusal: &Refusal) -> Instant {
        let now = self.leases.store.now();
        let expiring = refusal.lease_end.filter(|_| self.leases.store.leases_expire());
        let named = [refusal.cooldown_end, expiring].into_iter().flatten().min();
        let wait = named.map_or(self.leases.config.heartbeat, |end| end.since(now));
        let wait = wait.clamp(FLOOR, self.leases.config.heartbeat.max(FLOOR));
        Instant::now() + wait + FLOOR.mul_f64(rand::random())
    }

    async fn try_once(&mut self, place: Option<u64>, offer: Option<&KeyId>) -> Result<Try, AcquireError> {
        loop {
            let (candidates, skipped) = self.candidates(place, offer);
            if candidates.is_empty() {
                if skipped {
                    return Ok(Try::Refused { refusal: Refusal::default(), skipped });
                }
                return Err(AcquireError::KeyUnavailable { pool: self.want.pool.clone() });
            }
            let refusal = match self.ask(candidates).await? {
                Ok(lease) if (self.want.confirm)(lease.key()) => return Ok(Try::Leased(lease)),
                Ok(lease) => {
                    // Switched off here meanwhile: it goes back as it is dropped. Ends, since each key can
                    // be denied once.
                    self.denied.push(lease.key().clone());
                    continue;
                }
                Err(refusal) => refusal,
            };
            if self.repair(&refusal).await? {
                continue;
            }
            return Ok(Try::Refused { refusal, skipped });
        }
    }

    /// In rank order, less those that were denied here, and those whose next slot is somebody else's. One
    /// that was offered a slot may take any: offers and free slots match.
    fn candidates(&self, place: Option<u64>, offer: Option<&KeyId>) -> (Vec<Candidate>, bool) {
        let mut candidates = (self.want.rank)();
        candidates.retain(|candidate| !self.denied.contains(&candidate.key));
        if offer.is_some() || self.leases.waiting.load(Ordering::Acquire) == 0 {
            return (candidates, false);
        }
        let lines = lock(&self.leases.lines);
        let Some(line) = lines.get(self.want.provider).filter(|line| !line.is_empty()) else {
            return (candidates, false);
        };
        let before = candidates.len();
        candidates.retain(|candidate| !line.is_contended(&candidate.key, &self.queue, place));
        let skipped = candidates.len() < before;
        (candidates, skipped)
    }

    /// One call to the store.
    async fn ask(&self, candidates: Vec<Candidate>) -> Result<Result<Lease, Refusal>, AcquireError> {
        let leases = self.leases;
        let fingerprints: Vec<_> =
            candidates.iter().map(|each| (each.key.clone(), each.fingerprint)).collect();
        let ask = Acquire {
            provider: self.want.provider.clone(),
            lease: LeaseId::fresh(),
            owner: leases.owner.clone(),
            app: self.want.app.clone(),
            model: self.want.model.cloned(),
            candidates,
            ttl: leases.config.ttl,
            deadline: leases.store.now().plus(CALL),
        };
        let id = ask.lease;
        let asked = Instant::now();
        let answer = UnderWay::new(leases, ask).answer(CALL).await.unwrap_or(Err(StoreError::TimedOut(CALL)));
        let took = asked.elapsed();
        match answer {
            Ok(Acquired::Granted(grant)) => {
                leases.note_store(None);
                leases.metrics.acquire("granted", took);
                let fingerprint = fingerprints.into_iter().find(|(key, _)| *key == grant.key);
                match fingerprint {
                    Some((_, fingerprint)) => Ok(Ok(self.lease(id, &grant, fingerprint, asked))),
                    None => Err(self.failed(StoreError::Nonsense(format!(
                        "lent `{}`, which was not asked for",
                        grant.key
                    )))),
                }
            }
            Ok(Acquired::Refused(refusal)) => {
                leases.note_store(None);
                let usable = refusal.any_full() || refusal.any_cooling();
                leases.metrics.acquire(if usable { "exhausted" } else { "unusable" }, took);
                Ok(Err(refusal))
            }
            Ok(Acquired::Late) => {
                leases.metrics.acquire("store_failed", took);
                Err(self.failed(StoreError::TimedOut(CALL)))
            }
            Err(error) => {
                leases.metrics.acquire("store_failed", took);
                Err(self.failed(error))
            }
        }
    }

    fn lease(
        &self,
        id: LeaseId,
        grant: &Grant,
        fingerprint: crate::model::Fingerprint,
        asked: Instant,
    ) -> Lease {
        let config = &self.leases.config;
        let granted = Granted {
            id,
            provider: self.want.provider.clone(),
            key: grant.key.clone(),
            pool: grant.pool.clone(),
            app: self.want.app.clone(),
            fingerprint,
            token: grant.token,
        };
        let ends_at = config.max_duration.map(|bound| asked + bound);
        let live = Live::new(granted, asked, config.on_lost, ends_at);
        if self.leases.store.leases_expire() {
            live.renewed_until(asked + config.ttl.saturating_sub(config.margin()));
        }
        Lease::begin(self.leases, live, grant, asked.duration_since(self.begun))
    }

    /// The store failed: this request is told at once, and so is everybody who waits for it.
    fn failed(&self, cause: StoreError) -> AcquireError {
        self.leases.note_store(Some(&cause));
        if let Some(line) = lock(&self.leases.lines).get_mut(self.want.provider) {
            line.fail_all(&cause);
        }
        AcquireError::StoreUnavailable { cause }
    }

    /// The store has no settings of some key: it is told them, once a request.
    async fn repair(&mut self, refusal: &Refusal) -> Result<bool, AcquireError> {
        let unknown =
            refusal.reasons.iter().any(|(_, why)| matches!(why, Reason::NotMember | Reason::NoSettings));
        let Some(repair) = self.leases.repair.get().filter(|_| unknown && !self.repaired) else {
            return Ok(false);
        };
        self.repaired = true;
        let telling = self.leases.store.sync_keys(repair(self.want.provider));
        match tokio::time::timeout(CALL, telling).await.unwrap_or(Err(StoreError::TimedOut(CALL))) {
            Ok(()) => Ok(true),
            Err(error) => Err(self.failed(error)),
        }
    }

    /// Refuses at once what no wait can help: only a live lease can end at any moment.
    fn hopeless(&self, refusal: &Refusal, skipped: bool) -> Result<(), AcquireError> {
        if refusal.any_full() || skipped {
            return Ok(());
        }
        if !refusal.any_cooling() {
            return Err(AcquireError::KeyUnavailable { pool: self.want.pool.clone() });
        }
        let left = self.want.until.saturating_duration_since(Instant::now());
        let end = refusal.cooldown_end.map(|end| end.since(self.leases.store.now()));
        if end.is_some_and(|end| end > left) {
            return Err(self.exhausted(Some(refusal), false));
        }
        Ok(())
    }

    fn exhausted(&self, refusal: Option<&Refusal>, queue_full: bool) -> AcquireError {
        let now = self.leases.store.now();
        let cooling = refusal.filter(|refusal| !refusal.any_full()).and_then(|refusal| refusal.cooldown_end);
        let retry_after = cooling.map_or_else(|| self.leases.guess(), |end| end.since(now));
        AcquireError::PoolExhausted { pool: self.want.pool.clone(), retry_after, queue_full }
    }
}

/// A place in line; leaving it, however, passes on what it was offered.
struct Place<'a> {
    leases: &'a Inner,
    provider: &'a ProviderName,
    number: u64,
    bell: Arc<tokio::sync::Notify>,
    served_with: Option<KeyId>,
}

impl<'a> Place<'a> {
    fn join(
        leases: &'a Inner,
        provider: &'a ProviderName,
        queue: &Queue,
        pool: &crate::model::PoolName,
    ) -> Result<Self, AcquireError> {
        let room = leases.waiting.fetch_update(Ordering::AcqRel, Ordering::Acquire, |waiting| {
            (waiting < leases.queue.max_waiting).then_some(waiting + 1)
        });
        if room.is_err() {
            let retry_after = leases.guess();
            return Err(AcquireError::PoolExhausted { pool: pool.clone(), retry_after, queue_full: true });
        }
        leases.metrics.queue_depth().inc();
        let (number, bell) = lock(&leases.lines).entry(provider.clone()).or_default().join(queue.clone());
        Ok(Self { leases, provider, number, bell, served_with: None })
    }

    fn with<T>(&self, look: impl FnOnce(&mut super::line::Line) -> T) -> Option<T> {
        lock(&self.leases.lines).get_mut(self.provider).map(look)
    }

    fn is_head(&self) -> bool {
        self.with(|line| line.is_head(self.number)).unwrap_or(true)
    }

    fn take_failure(&self) -> Option<StoreError> {
        self.with(|line| line.take_failure(self.number)).flatten()
    }

    fn offer(&self) -> Option<KeyId> {
        self.with(|line| line.offer(self.number)).flatten()
    }

    fn refused(&self, offer: Option<&KeyId>, refusal: &Refusal, skipped: bool) {
        let full = |key: &KeyId| refusal.reasons.iter().any(|(id, why)| id == key && *why == Reason::Full);
        let still_free = offer.is_some_and(|key| !full(key));
        let for_slots = skipped || refusal.any_full();
        self.with(|line| line.refused(self.number, offer, for_slots, still_free));
    }

    fn served(&mut self, key: &KeyId) {
        self.served_with = Some(key.clone());
    }
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        self.leases.metrics.queue_depth().dec();
        self.with(|line| line.leave(self.number, self.served_with.as_ref()));
        self.leases.waiting.fetch_sub(1, Ordering::AcqRel);
    }
}

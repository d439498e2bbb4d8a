//! The lease in its holder's hand, and what it shares with the heartbeat.

use std::future::poll_fn;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use atomic_waker::AtomicWaker;
use prometheus_client::metrics::gauge::Gauge;
use tokio::sync::oneshot;
use tokio::time::Instant;

use super::{Gone, Inner, Leases, Station, lock, settle};
use crate::config::OnLost;
use crate::model::{
    AppName, Class, FencingToken, Fingerprint, GroupName, KeyId, LeaseId, ModelName, Outcome, PoolName,
    ProviderName,
};
use crate::store::{Grant, Held, Release, Report};

/// Why a lease ended before its holder was done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Lost {
    /// It could not be renewed before its local deadline.
    Expired,
    /// The store does not know it any more.
    Unknown,
    /// A person revoked it.
    Revoked,
    /// `lease.max_duration` is over.
    TooLong,
}

/// How much longer than named a wait may become.
const WAIT_JITTER: f64 = 0.05;

const HELD: u8 = 0;
const EXPIRED: u8 = 1;
const REVOKED: u8 = 2;
const TOO_LONG: u8 = 3;
const UNKNOWN: u8 = 4;

/// What a lease's holder and the heartbeat both look at.
pub(super) struct Hold {
    pub(super) provider: ProviderName,
    pub(super) id: LeaseId,
    pub(super) grant: Grant,
    pub(super) fingerprint: Fingerprint,
    pub(super) app: AppName,
    pub(super) begun: Instant,
    /// In ticks: when it ends unless renewed; `u64::MAX` for never.
    pub(super) deadline: AtomicU64,
    /// In ticks: when `lease.max_duration` is over; `u64::MAX` for never.
    pub(super) end: u64,
    /// What the holder has been told.
    told: AtomicU8,
    /// Lost or expired, whether the holder was told or runs on (`lease.on_lost`): not renewed again.
    over: AtomicBool,
    /// Somebody has begun to release it.
    released: AtomicBool,
    waker: AtomicWaker,
}

impl Hold {
    pub(super) fn new(
        (provider, id): (ProviderName, LeaseId),
        grant: Grant,
        fingerprint: Fingerprint,
        app: AppName,
        begun: Instant,
        deadline: u64,
        end: u64,
    ) -> Self {
        Self {
            provider,
            id,
            grant,
            fingerprint,
            app,
            begun,
            deadline: AtomicU64::new(deadline),
            end,
            told: AtomicU8::new(HELD),
            over: AtomicBool::new(false),
            released: AtomicBool::new(false),
            waker: AtomicWaker::new(),
        }
    }

    /// Whether it is to be renewed.
    pub(super) fn is_sound(&self) -> bool {
        !self.over.load(Ordering::Acquire)
    }

    /// True for one caller only, who then sees to the release.
    pub(super) fn take_release(&self) -> bool {
        !self.released.swap(true, Ordering::AcqRel)
    }

    pub(super) fn is_released(&self) -> bool {
        self.released.load(Ordering::Acquire)
    }

    pub(super) fn release(&self, station: &Station) -> Release {
        Release {
            provider: station.provider.clone(),
            lease: self.id,
            key: self.grant.key.clone(),
            pool: self.grant.pool.clone(),
            group: self.grant.group.clone(),
        }
    }

    pub(super) fn as_held(&self) -> Held {
        Held {
            lease: self.id,
            key: self.grant.key.clone(),
            pool: self.grant.pool.clone(),
            fingerprint: self.fingerprint,
            token: self.grant.token,
            app: self.app.clone(),
            group: self.grant.group.clone(),
        }
    }

    /// When the heartbeat must look at it next, in ticks.
    pub(super) fn due(&self) -> u64 {
        if self.told.load(Ordering::Acquire) != HELD {
            u64::MAX
        } else if self.is_sound() {
            self.deadline.load(Ordering::Acquire).min(self.end)
        } else {
            self.end
        }
    }

    /// Ends it if one of its times has passed.
    pub(super) fn check(&self, inner: &Inner, now: u64) {
        if now >= self.end && self.tell(TOO_LONG) {
            self.witness(inner, Lost::TooLong);
        }
        if self.is_sound() && now >= self.deadline.load(Ordering::Acquire) {
            self.give_up(inner, EXPIRED);
        }
    }

    /// The store does not know it any more.
    pub(super) fn lost(&self, inner: &Inner) {
        self.give_up(inner, UNKNOWN);
    }

    /// A person took it away: it ends, whatever `lease.on_lost` says.
    pub(super) fn revoked_by_hand(&self, inner: &Inner) {
        if !self.over.swap(true, Ordering::AcqRel) {
            inner.metrics.lost();
            self.witness(inner, Lost::Revoked);
        }
        self.tell(REVOKED);
    }

    fn give_up(&self, inner: &Inner, why: u8) {
        if self.over.swap(true, Ordering::AcqRel) {
            return;
        }
        inner.metrics.lost();
        if why == EXPIRED {
            inner.metrics.expired();
        }
        self.witness(inner, if why == EXPIRED { Lost::Expired } else { Lost::Unknown });
        if inner.lease.on_lost == OnLost::Abort {
            self.tell(why);
        }
    }

    /// Whether this was the first reason; it stays.
    fn tell(&self, why: u8) -> bool {
        let first = self.told.compare_exchange(HELD, why, Ordering::AcqRel, Ordering::Acquire).is_ok();
        self.waker.wake();
        first
    }

    fn witness(&self, inner: &Inner, why: Lost) {
        inner.tell(|witness| {
            witness.lost(&Gone {
                provider: self.provider.clone(),
                lease: self.id,
                key: self.grant.key.clone(),
                pool: self.grant.pool.clone(),
                app: self.app.clone(),
                why,
            });
        });
    }

    fn poll_lost(&self, inner: &Inner, cx: &mut Context<'_>) -> Poll<Lost> {
        // What has no end needs no clock; under `memory:` that is every lease without `lease.max_duration`.
        if self.due() != u64::MAX {
            self.check(inner, inner.ticks(Instant::now()));
        }
        if let Some(lost) = self.told() {
            return Poll::Ready(lost);
        }
        self.waker.register(cx.waker());
        self.told().map_or(Poll::Pending, Poll::Ready)
    }

    fn told(&self) -> Option<Lost> {
        match self.told.load(Ordering::Acquire) {
            EXPIRED => Some(Lost::Expired),
            UNKNOWN => Some(Lost::Unknown),
            REVOKED => Some(Lost::Revoked),
            TOO_LONG => Some(Lost::TooLong),
            _ => None,
        }
    }
}

/// Tells whether a lease is lost, without holding it: for whoever must act while the holder cannot.
pub struct Watch {
    leases: Leases,
    hold: Arc<Hold>,
}

impl Watch {
    /// As [`Lease::poll_lost`]; both must be polled by one task, for one waker is kept.
    pub fn poll_lost(&self, cx: &mut Context<'_>) -> Poll<Lost> {
        if self.hold.is_released() {
            return Poll::Pending;
        }
        self.hold.poll_lost(self.leases.inner(), cx)
    }
}

/// The right to one slot of one key. Dropping it releases the slot, exactly once and after its report.
pub struct Lease {
    leases: Leases,
    station: Arc<Station>,
    hold: Arc<Hold>,
    active: Gauge,
    waited: Duration,
    reported: bool,
    /// Resolves when the report is done with.
    reporting: Option<oneshot::Receiver<()>>,
}

impl std::fmt::Debug for Lease {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Lease")
            .field("id", &self.hold.id)
            .field("key", &self.hold.grant.key)
            .finish_non_exhaustive()
    }
}

impl Lease {
    /// Registers the grant, so that it is renewed from now on.
    pub(super) fn begin(leases: &Leases, station: &Arc<Station>, hold: Hold, waited: Duration) -> Self {
        let inner = leases.inner();
        let hold = Arc::new(hold);
        let (active, due) = lock(&station.beat).add(inner, station, &hold);
        active.inc();
        inner.live.fetch_add(1, Ordering::Relaxed);
        if due < inner.due.load(Ordering::Acquire) {
            inner.nudge.notify_one();
        }
        Self {
            leases: leases.clone(),
            station: Arc::clone(station),
            hold,
            active,
            waited,
            reported: false,
            reporting: None,
        }
    }

    /// Its id, as the store and people see it.
    pub fn id(&self) -> LeaseId {
        self.hold.id
    }

    /// The key whose slot it is.
    pub fn key(&self) -> &KeyId {
        &self.hold.grant.key
    }

    /// The fingerprint of the secret that it was granted for.
    pub fn fingerprint(&self) -> Fingerprint {
        self.hold.fingerprint
    }

    /// The pool the key was found in.
    pub fn pool(&self) -> &PoolName {
        &self.hold.grant.pool
    }

    /// The key's group as the store knows it: `auto` where answers say it and none has yet.
    pub fn group(&self) -> Option<&GroupName> {
        self.hold.grant.group.as_ref()
    }

    /// Rises with each lease of the provider.
    pub fn token(&self) -> FencingToken {
        self.hold.grant.token
    }

    /// Whether it is the one lease of a subject on probation.
    pub fn probe(&self) -> bool {
        self.hold.grant.probe
    }

    /// When it was granted.
    pub fn begun(&self) -> Instant {
        self.hold.begun
    }

    /// From the wish to the grant.
    pub fn waited(&self) -> Duration {
        self.waited
    }

    /// Says what the answer told about the key. The first call counts. It begins at once and off the
    /// caller's path; the release in `Drop` happens after it. What has no effect is not sent: a success
    /// that clears nothing, and (but for a probe) the caller's mistakes, cancellations and broken networks;
    /// unless the answer names the group of a key that waits to be told. A success that announces a refusal is
    /// followed by that.
    ///
    /// A wait that the provider named is made a little longer, so that not everybody who was told it comes
    /// back at one moment; never shorter.
    pub fn report(&mut self, mut outcome: Outcome, model: Option<&ModelName>) {
        if std::mem::replace(&mut self.reported, true) {
            return;
        }
        let has_effect = match outcome.class {
            Class::Success => self.hold.grant.wants_success,
            Class::Caller | Class::Cancelled | Class::Network => false,
            _ => true,
        };
        let grant = &self.hold.grant;
        let group = &grant.group;
        let learns = group.as_ref().is_some_and(GroupName::is_auto);
        let names_group = learns && outcome.organization.is_some() && outcome.organization != *group;
        outcome.wait = outcome.wait.map(|wait| wait + wait.mul_f64(rand::random_range(0.0..WAIT_JITTER)));
        let report = |outcome| Report {
            provider: self.station.provider.clone(),
            key: grant.key.clone(),
            group: group.clone(),
            lease: self.hold.id,
            token: grant.token,
            fingerprint: self.hold.fingerprint,
            model: model.cloned(),
            outcome,
        };
        // A success lifts what rested; what it announces rests only after that.
        let ahead = outcome.ahead();
        let said = (has_effect || grant.probe || names_group).then_some(outcome);
        let reports: Vec<Report> = said.into_iter().chain(ahead).map(report).collect();
        if reports.is_empty() {
            return;
        }
        self.reporting = settle::report(self.leases.inner(), reports);
    }

    /// Ready once the lease may not be used any more; pending for ever where it runs on
    /// (`lease.on_lost = "finish"`, save for a person's revocation and `lease.max_duration`).
    ///
    /// Cheap enough for every body chunk. It looks at the local deadline itself, so that a process that
    /// was stopped for longer than the TTL passes on no byte when it goes on. One waker at a time: the
    /// last poll's task is woken.
    pub fn poll_lost(&self, cx: &mut Context<'_>) -> Poll<Lost> {
        self.hold.poll_lost(self.leases.inner(), cx)
    }

    /// A look at it for somebody else than its holder.
    pub fn watch(&self) -> Watch {
        Watch { leases: self.leases.clone(), hold: Arc::clone(&self.hold) }
    }

    /// [`Lease::poll_lost`] as a future. Cancel safe.
    pub async fn lost(&self) -> Lost {
        poll_fn(|cx| self.poll_lost(cx)).await
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        // Off the registry first: no renewal may name what is being released.
        lock(&self.station.beat).remove(self.hold.id);
        self.active.dec();
        let now = Instant::now();
        self.station.held_for(now.saturating_duration_since(self.hold.begun));
        if self.hold.take_release() {
            self.leases.inner().live.fetch_sub(1, Ordering::Relaxed);
            settle::release(self.leases.inner(), &self.station, &self.hold, now, self.reporting.take());
        }
    }
}

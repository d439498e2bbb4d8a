//! A lease as its holder knows it: when it must have been renewed, and whether it is lost.

use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::task::{Context, Poll};

use atomic_waker::AtomicWaker;
use tokio::time::Instant;

use crate::config::OnLost;
use crate::model::{AppName, FencingToken, Fingerprint, KeyId, LeaseId, PoolName, ProviderName};
use crate::store::{Held, Release};

/// Why a stream must end though neither side has ended it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Lost {
    /// Its local deadline passed unrenewed.
    Expired,
    /// The store does not know it any more, or a person revoked it.
    Revoked,
    /// `lease.max_duration` has passed.
    TooLong,
}

const LIVE: u8 = 0;
const EXPIRED: u8 = 1;
const REVOKED: u8 = 2;
const TOO_LONG: u8 = 3;

/// No deadline.
const NEVER: u64 = u64::MAX;

/// One live lease.
#[derive(Debug)]
pub(super) struct Live {
    pub(super) id: LeaseId,
    pub(super) provider: ProviderName,
    pub(super) key: KeyId,
    pub(super) pool: PoolName,
    pub(super) app: AppName,
    pub(super) fingerprint: Fingerprint,
    pub(super) token: FencingToken,
    pub(super) begun: Instant,
    /// The end of its whole life, where there is a bound.
    pub(super) ends_at: Option<Instant>,
    on_lost: OnLost,
    /// Ms after `begun` by which it must have been renewed.
    deadline: AtomicU64,
    lost: AtomicU8,
    waker: AtomicWaker,
}

/// What a lease is made of.
pub(super) struct Granted {
    pub(super) id: LeaseId,
    pub(super) provider: ProviderName,
    pub(super) key: KeyId,
    pub(super) pool: PoolName,
    pub(super) app: AppName,
    pub(super) fingerprint: Fingerprint,
    pub(super) token: FencingToken,
}

impl Live {
    /// `asked` is when the acquire was sent: the lease's time runs from there at the latest.
    pub(super) fn new(granted: Granted, asked: Instant, on_lost: OnLost, ends_at: Option<Instant>) -> Self {
        let Granted { id, provider, key, pool, app, fingerprint, token } = granted;
        Self {
            id,
            provider,
            key,
            pool,
            app,
            fingerprint,
            token,
            begun: asked,
            ends_at,
            on_lost,
            deadline: AtomicU64::new(NEVER),
            lost: AtomicU8::new(LIVE),
            waker: AtomicWaker::new(),
        }
    }

    /// It lives until `at`, unless renewed.
    pub(super) fn renewed_until(&self, at: Instant) {
        let ms = at.saturating_duration_since(self.begun).as_millis();
        self.deadline.store(u64::try_from(ms).unwrap_or(NEVER), Ordering::Relaxed);
    }

    /// Its local deadline, where it has one.
    pub(super) fn deadline(&self) -> Option<Instant> {
        match self.deadline.load(Ordering::Relaxed) {
            NEVER => None,
            ms => Some(self.begun + std::time::Duration::from_millis(ms)),
        }
    }

    /// Marks it; `true` when this call was the first to.
    fn mark(&self, how: u8) -> bool {
        let first = self.lost.compare_exchange(LIVE, how, Ordering::AcqRel, Ordering::Acquire).is_ok();
        if first {
            self.waker.wake();
        }
        first
    }

    /// The store lost it. Under `finish` the stream runs on, and only the count tells.
    pub(super) fn mark_lost(&self) -> bool {
        self.on_lost == OnLost::Abort && self.mark(REVOKED)
    }

    /// A person revoked it: that ends the stream under every policy.
    pub(super) fn mark_revoked(&self) -> bool {
        self.mark(REVOKED)
    }

    /// Its whole life is over.
    pub(super) fn mark_too_long(&self) -> bool {
        self.mark(TOO_LONG)
    }

    /// Marks it when its local deadline has passed; `true` when it just did. Under `finish` the deadline
    /// is dropped, so that it counts once.
    pub(super) fn expire(&self, now: Instant) -> bool {
        if self.deadline().is_none_or(|deadline| now < deadline) {
            return false;
        }
        match self.on_lost {
            OnLost::Abort => self.mark(EXPIRED),
            OnLost::Finish => self.deadline.swap(NEVER, Ordering::Relaxed) != NEVER,
        }
    }

    pub(super) fn is_lost(&self) -> bool {
        self.lost.load(Ordering::Acquire) != LIVE
    }

    pub(super) fn poll_lost(&self, cx: &mut Context<'_>) -> Poll<Lost> {
        if self.on_lost == OnLost::Abort
            && self.deadline.load(Ordering::Relaxed) != NEVER
            && self.deadline().is_some_and(|deadline| Instant::now() >= deadline)
        {
            // The heartbeat counts it; here nothing more may pass.
            return Poll::Ready(Lost::Expired);
        }
        if let Some(lost) = self.how_lost() {
            return Poll::Ready(lost);
        }
        self.waker.register(cx.waker());
        // Again, for a mark that came between the look and the registration.
        self.how_lost().map_or(Poll::Pending, Poll::Ready)
    }

    fn how_lost(&self) -> Option<Lost> {
        match self.lost.load(Ordering::Acquire) {
            LIVE => None,
            EXPIRED => Some(Lost::Expired),
            TOO_LONG => Some(Lost::TooLong),
            _ => Some(Lost::Revoked),
        }
    }

    pub(super) fn held(&self) -> Held {
        Held {
            lease: self.id,
            key: self.key.clone(),
            pool: self.pool.clone(),
            fingerprint: self.fingerprint,
            token: self.token,
            app: self.app.clone(),
        }
    }

    pub(super) fn release(&self) -> Release {
        Release {
            provider: self.provider.clone(),
            lease: self.id,
            key: self.key.clone(),
            pool: self.pool.clone(),
        }
    }
}

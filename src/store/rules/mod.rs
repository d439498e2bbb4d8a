//! The rules of the lease store as a pure state machine: time is an argument, nothing here waits,
//! locks or fails.
//!
//! A [`Ledger`] is one provider's keys, leases and rests. `memory:` is a ledger behind a lock; the
//! shared backends say the same thing in their own language, and the contract suite holds them to it.
//!
//! What it promises: live leases on a key never exceed the cap in force when each was granted; a lease
//! that nobody renews frees its slot at its end, without anybody's help; a call that names what is not
//! its own changes nothing. Every collection is bounded: leases by caps, keys by configurations seen
//! within a day, rests by [`subject`]'s bounds. No memory of ended leases is kept, since `release` must
//! be able to run where nothing can be written. So a duplicate of an acquire that overtakes its own
//! release may be granted again: its deadline bounds when, and its expiry how long. For the same reason
//! a sidecar must not `reassert` a lease that it has begun to release.

use std::time::Duration;

use super::{Epoch, KeySettings, StatusChange, StoreTime, SyncKeys, SyncMode, Synced};
use crate::model::{
    AppName, Class, FencingToken, Fingerprint, GroupName, KeyId, KeyStatus, LeaseId, OwnerId, PoolName,
    ProviderName, Set,
};

pub(in crate::store) mod cleared;
pub(in crate::store) mod learned;
mod lend;
pub(in crate::store) mod parts;
pub(in crate::store) mod report;
pub mod rest;
pub mod subject;
pub(in crate::store) mod tracked;
pub(in crate::store) mod view;

pub use lend::Released;
pub use report::Effect;

use cleared::Clearings;
use learned::{GroupCaps, Groups, Learned};
use rest::{Evidence, Rest};
use subject::{Rests, Subject};
use tracked::Tracked;

/// How long a key that no sidecar names any more is kept.
const KEPT_UNSEEN: Duration = Duration::from_hours(24);
/// How often it is written that a key is used. Redis' scripts have the same.
const USED_EVERY: Duration = Duration::from_secs(1);

/// Whether an unrenewed lease ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Expiry {
    /// At its time, as in every store that outlives a sidecar.
    Ttl,
    /// Never: holder and store are one process, and the holder's guard always gives back. Leases then
    /// last until [`StoreTime::NEVER`].
    Never,
}

/// One provider's keys, leases and rests.
#[derive(Debug)]
pub struct Ledger {
    provider: ProviderName,
    expiry: Expiry,
    epoch: Epoch,
    /// Set once per epoch, by the first renewal that names another: see [`Ledger::renew`].
    grace_until: Option<StoreTime>,
    last_token: FencingToken,
    keys: Tracked<KeyId, Key>,
    leases: Tracked<LeaseId, Lease>,
    rests: Rests,
    group_caps: GroupCaps,
    cleared: Clearings,
}

/// What the ledger knows of a key beside its rests.
#[derive(Debug, Default, PartialEq)]
pub(in crate::store) struct Key {
    /// `None` while only a reasserted lease speaks of it.
    pub(in crate::store) settings: Option<Settings>,
    pub(in crate::store) disabled: bool,
    /// It was disabled to be drained.
    pub(in crate::store) drained: bool,
    pub(in crate::store) learned: Option<Learned>,
    /// Where the group is `auto`.
    pub(in crate::store) groups: Groups,
    pub(in crate::store) last_used_at: Option<StoreTime>,
    pub(in crate::store) seen_at: StoreTime,
    /// Its leases; some may have expired. What [`Ledger::leases`] says by key, so no row holds it.
    pub(in crate::store) leases: Set<LeaseId>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::store) struct Settings {
    pub(in crate::store) pool: PoolName,
    pub(in crate::store) group: Option<GroupName>,
    pub(in crate::store) cap: u32,
    pub(in crate::store) fingerprint: Option<Fingerprint>,
}

impl Settings {
    /// The group, where it is known: for `auto` what answers with the present secret have named.
    pub(in crate::store) fn group_in<'a>(&'a self, groups: &'a Groups) -> Option<&'a GroupName> {
        match &self.group {
            Some(group) if group.is_auto() => self.fingerprint.and_then(|secret| groups.of(secret)),
            group => group.as_ref(),
        }
    }
}

impl Settings {
    fn of_key(self, key: KeyId) -> KeySettings {
        let Self { pool, group, cap, fingerprint } = self;
        KeySettings { key, pool, group, max_concurrent_uses: cap, fingerprint }
    }
}

impl From<&KeySettings> for Settings {
    fn from(told: &KeySettings) -> Self {
        Self {
            pool: told.pool.clone(),
            group: told.group.clone(),
            cap: told.max_concurrent_uses,
            fingerprint: told.fingerprint,
        }
    }
}

#[derive(Debug, PartialEq, Eq)]
pub(in crate::store) struct Lease {
    pub(in crate::store) key: KeyId,
    pub(in crate::store) pool: PoolName,
    pub(in crate::store) fingerprint: Fingerprint,
    pub(in crate::store) token: FencingToken,
    pub(in crate::store) owner: OwnerId,
    pub(in crate::store) app: AppName,
    /// The group among whose uses it counts.
    pub(in crate::store) group: Option<GroupName>,
    pub(in crate::store) expires_at: StoreTime,
    pub(in crate::store) revoked: bool,
    pub(in crate::store) probe: bool,
    pub(in crate::store) wants_success: bool,
}

impl Lease {
    fn is_live(&self, now: StoreTime) -> bool {
        now < self.expires_at
    }
}

impl Key {
    /// The configured cap: one that is missing or 0 counts as 1.
    fn cap(&self) -> u32 {
        self.settings.as_ref().map_or(1, |settings| settings.cap.max(1))
    }

    /// The cap for new leases.
    fn cap_in_force(&self, now: StoreTime) -> u32 {
        self.learned_cap(now).unwrap_or(self.cap())
    }

    /// Whether its being lent now is to be noted. Once in a while is enough: people read it, and no decision
    /// needs it closer.
    fn notes_use(&self, now: StoreTime) -> bool {
        self.last_used_at.is_none_or(|used| now < used || now >= used.plus(USED_EVERY))
    }

    /// Whether what it learned of its cap says nothing any more.
    fn has_unlearned(&self, now: StoreTime) -> bool {
        self.learned.is_some() && self.learned_cap(now).is_none()
    }
}

impl Ledger {
    /// An empty one, with no grace: whoever finds nothing has nothing to wait for.
    pub fn new(provider: ProviderName, expiry: Expiry, epoch: Epoch) -> Self {
        Self {
            provider,
            expiry,
            epoch,
            grace_until: None,
            last_token: FencingToken(0),
            keys: Tracked::default(),
            leases: Tracked::default(),
            rests: Rests::default(),
            group_caps: GroupCaps::default(),
            cleared: Clearings::default(),
        }
    }

    /// Takes the next token: above all before, and above those of a life whose data is lost.
    fn next_token(&mut self, now: StoreTime) -> FencingToken {
        let last = self.last_token.0;
        self.last_token = FencingToken(last.saturating_add(1).max(now.0.saturating_mul(1000)));
        self.last_token
    }

    fn is_live(&self, lease: LeaseId, now: StoreTime) -> bool {
        self.leases.get(&lease).is_some_and(|lease| lease.is_live(now))
    }

    /// Live leases of a key.
    fn in_use(&self, key: &Key, now: StoreTime) -> u32 {
        let live = match self.expiry {
            Expiry::Never => key.leases.len(),
            Expiry::Ttl => key.leases.iter().filter(|id| self.is_live(**id, now)).count(),
        };
        u32::try_from(live).unwrap_or(u32::MAX)
    }

    /// Forgets a lease, live or not.
    fn forget(&mut self, id: LeaseId) -> Option<Lease> {
        let lease = self.leases.remove(&id)?;
        if let Some(key) = self.keys.derived_mut(&lease.key) {
            key.leases.remove(&id);
        }
        Some(lease)
    }

    /// Writes the settings of the keys named, as the mode says. Live leases stay with a key that moves to
    /// another pool, and above a cap that shrinks: they end by themselves. Keys that no sidecar has named
    /// or used for a day, and that hold no lease, go.
    pub fn sync_keys(&mut self, ask: &SyncKeys, now: StoreTime) -> Synced {
        let mut found = Synced::default();
        for told in &ask.keys {
            let known = self.keys.or_default(told.key.clone());
            known.seen_at = now;
            match &mut known.settings {
                None => known.settings = Some(told.into()),
                Some(settings) if *settings == told.into() => {}
                Some(settings) => {
                    found.differing.push(settings.clone().of_key(told.key.clone()));
                    match ask.mode {
                        SyncMode::Replace => *settings = told.into(),
                        SyncMode::Repair => settings.pool = told.pool.clone(),
                    }
                }
            }
        }
        if self.expiry == Expiry::Never && ask.mode == SyncMode::Replace {
            self.leave_out_all_but(&ask.keys);
        }
        for told in ask.keys.iter().filter(|told| told.fingerprint.is_some()) {
            let same = |(id, key): &(&KeyId, &Key)| {
                **id != told.key
                    && key.settings.as_ref().is_some_and(|key| key.fingerprint == told.fingerprint)
            };
            let others = self.keys.iter().filter(same).map(|(id, _)| (told.key.clone(), id.clone()));
            found.same_secret.extend(others);
        }
        self.forget_unseen(now);
        found
    }

    /// Nobody else can serve the keys of a store that is this process'; leases on one run on, and its rests are
    /// kept, should it come back.
    fn leave_out_all_but(&mut self, named: &[KeySettings]) {
        for id in self.keys.ids() {
            if named.iter().all(|told| told.key != id)
                && let Some(key) = self.keys.get_mut(&id)
            {
                key.settings = None;
            }
        }
    }

    /// Drops keys that nobody has named or used for a day, and that hold no lease; how many.
    pub fn forget_unseen(&mut self, now: StoreTime) -> usize {
        self.forget_group_caps(now);
        self.rests.lift(|_, rest| rest.is_forgotten(now));
        let before = self.keys.len();
        let leases = &mut self.leases;
        let rests = &mut self.rests;
        self.keys.retain(|id, key| {
            let seen = key.last_used_at.map_or(key.seen_at, |used| used.max(key.seen_at));
            let live = |id: &LeaseId| leases.get(id).is_some_and(|lease| lease.is_live(now));
            if now < seen.plus(KEPT_UNSEEN) || key.leases.iter().any(live) {
                return true;
            }
            for lease in &key.leases {
                leases.remove(lease);
            }
            rests.lift(|subject, _| subject.is_of_key(id));
            false
        });
        before - self.keys.len()
    }

    /// Applies a person's or a check's word; `false` when the key is not known.
    ///
    /// `Enable` lifts `invalid` for every secret. `Clear` also lifts the rests of the key's group, for
    /// nothing else does it by hand, and the learned caps of both, for good: leases of before add nothing to
    /// them. It lifts no `invalid`, and not the rests of the provider, which last seconds.
    pub fn set_status(&mut self, id: &KeyId, change: &StatusChange, now: StoreTime) -> bool {
        let Some(key) = self.keys.get_mut(id) else { return false };
        let Some(settings) = &key.settings else { return false };
        match change {
            StatusChange::Disable => (key.disabled, key.drained) = (true, false),
            StatusChange::Drain => (key.disabled, key.drained) = (true, true),
            StatusChange::Enable => {
                (key.disabled, key.drained) = (false, false);
                self.rests.lift(|subject, rest| subject.is_of_key(id) && rest.is_invalid());
            }
            StatusChange::CheckedGood(secret) => {
                self.rests.lift(|subject, rest| {
                    let same = subject.is_of_key(id) && subject.is_of_secret(*secret);
                    same && (rest.is_invalid() || rest.doubt)
                });
            }
            StatusChange::Clear => {
                let group = settings.group_in(&key.groups).cloned();
                key.learned = None;
                group.as_ref().map(|group| self.group_caps.remove(group));
                self.rests.lift(|subject, rest| {
                    let own = subject.is_of_key(id) && !rest.is_invalid();
                    own || group.as_ref().is_some_and(|group| subject.is_of_group(group))
                });
                self.note_clearing(id.clone(), group, now);
            }
            StatusChange::Doubted { secret, status, code }
            | StatusChange::CheckedBad { secret, status, code } => {
                let stamp = self.next_token(now);
                let evidence = Evidence {
                    class: Class::Invalid,
                    wait: None,
                    doubt: matches!(change, StatusChange::Doubted { .. }),
                    by_check: true,
                    status: *status,
                    code: code.clone(),
                    lease: None,
                    token: stamp,
                    of_model: false,
                };
                self.refuse(Subject::Key(id.clone(), *secret), &evidence, stamp, now);
            }
        }
        true
    }

    /// Marks a lease to end; `false` when none such lives. Its slot stays taken until its holder gives
    /// it back or it expires, for until then the holder may still use the key.
    pub fn revoke(&mut self, id: LeaseId, now: StoreTime) -> bool {
        let Some(lease) = self.leases.get_mut(&id).filter(|lease| lease.is_live(now)) else { return false };
        lease.revoked = true;
        true
    }

    /// A key's status with one secret.
    fn status(&self, id: &KeyId, secret: Option<Fingerprint>, now: StoreTime) -> KeyStatus {
        let disabled = self.keys.get(id).is_some_and(|key| key.disabled);
        let rest = secret.and_then(|secret| self.rests.get(&Subject::Key(id.clone(), secret)));
        status(disabled, secret.is_some(), rest, now)
    }

    /// Writes what `evidence` says about a subject; the end of the rest that now covers it, where it is kept.
    fn refuse(
        &mut self,
        subject: Subject,
        evidence: &Evidence,
        stamp: FencingToken,
        now: StoreTime,
    ) -> Option<StoreTime> {
        let rest = Rest::after(self.rests.get(&subject), evidence, stamp, now);
        let until = rest.until;
        let current = match &subject {
            Subject::Key(key, _) => {
                self.keys.get(key).and_then(|key| key.settings.as_ref()).and_then(|key| key.fingerprint)
            }
            _ => None,
        };
        let kept = self.rests.set(subject, rest, current, now);
        (kept && until > now).then_some(until)
    }
}

/// A key's status, from its own rest; one without a secret is pending.
pub(super) fn status(disabled: bool, has_secret: bool, own: Option<&Rest>, now: StoreTime) -> KeyStatus {
    match own {
        _ if disabled => KeyStatus::Disabled,
        _ if !has_secret => KeyStatus::Pending,
        Some(rest) if rest.is_invalid() => KeyStatus::Invalid,
        Some(rest) if rest.is_resting(now) => match rest.class {
            Class::Rate => KeyStatus::RateLimited,
            Class::Quota => KeyStatus::Exhausted,
            _ => KeyStatus::Cooldown,
        },
        Some(rest) if rest.is_probation(now) => KeyStatus::Probation,
        _ => KeyStatus::Available,
    }
}

//! Lending: acquire, renew and release.

use super::rest::Gate;
use super::subject::Subject;
use super::{Expiry, Key, Lease, Ledger};
use crate::model::{Class, FencingToken, GroupName, KeyStatus, LeaseId};
use crate::store::{
    Acquire, Acquired, Candidate, Grant, Held, Reason, Refusal, Release, Renew, RenewAnswer, Renewed,
    StoreTime,
};

/// What a [`Release`] did.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Released {
    /// Whether this call freed a slot.
    pub freed: bool,
    /// Whether others than those who wait for this key may go on: the lease was a probe, or one of a group
    /// whose keys together may have so many and no more.
    pub wakes_all: bool,
}

/// How a candidate may be lent.
struct Pass {
    probe: bool,
    wants_success: bool,
}

/// Why not, and when its slot ends unless renewed.
struct No {
    reason: Reason,
    lease_end: Option<StoreTime>,
    grace_end: Option<StoreTime>,
}

impl From<Reason> for No {
    fn from(reason: Reason) -> Self {
        Self { reason, lease_end: None, grace_end: None }
    }
}

impl Ledger {
    /// Takes the first candidate with a free slot.
    ///
    /// A second call with a live lease's id returns the first's grant and takes nothing. An id that
    /// another owner holds is a mistake, and answered as a call that came too late: nothing changed.
    pub fn acquire(&mut self, ask: &Acquire, now: StoreTime) -> Acquired {
        if now > ask.deadline {
            return Acquired::Late;
        }
        if let Some(lease) = self.leases.get(&ask.lease) {
            if lease.is_live(now) {
                let own = lease.owner == ask.owner;
                let told = self.told(ask, lease);
                return if own { Acquired::Granted(self.grant_of(lease, told)) } else { Acquired::Late };
            }
            self.forget(ask.lease);
        }
        let mut refusal = Refusal::default();
        for candidate in ask.candidates.iter() {
            match self.weigh(ask, candidate, now) {
                Ok(pass) => return Acquired::Granted(self.lend(ask, candidate, &pass, now)),
                Err(no) => {
                    if let Reason::Cooling { until, .. } = no.reason {
                        refusal.cooldown_end = Some(earlier(refusal.cooldown_end, until));
                    }
                    if let Some(end) = no.lease_end {
                        refusal.lease_end = Some(earlier(refusal.lease_end, end));
                    }
                    refusal.grace_end = refusal.grace_end.or(no.grace_end);
                    refusal.reasons.push((candidate.key.clone(), no.reason));
                }
            }
        }
        Acquired::Refused(refusal)
    }

    /// Whether a candidate can be lent now. A key that is off or bad says so first, then one that
    /// cools, then one that is full: the later reasons are the ones worth waiting for.
    fn weigh(&mut self, ask: &Acquire, candidate: &Candidate, now: StoreTime) -> Result<Pass, No> {
        self.drop_expired(candidate, now);
        let Some(key) = self.keys.get(&candidate.key) else { return Err(Reason::NoSettings.into()) };
        let Some(settings) = &key.settings else { return Err(Reason::NoSettings.into()) };
        if settings.pool != candidate.pool {
            return Err(Reason::NotMember.into());
        }
        if key.disabled {
            return Err(Reason::Unusable(KeyStatus::Disabled).into());
        }

        let group = key.group_for(candidate);
        let mut pass = Pass { probe: false, wants_success: false };
        let mut cap = key.cap_in_force(now);
        let (mut cooling, mut probe_out, mut cooling_if_full) = (None, None, None);
        if !self.rests.is_empty() {
            let model = ask.model.as_ref();
            for subject in Subject::bearing(&candidate.key, candidate.fingerprint, group, model) {
                let Some(rest) = self.rests.get(&subject) else { continue };
                let probe_is_live = rest.probe_lease.is_some_and(|lease| self.is_live(lease, now));
                match rest.gate(now, probe_is_live, model.is_some()) {
                    Gate::Open => {}
                    Gate::Invalid => return Err(Reason::Unusable(KeyStatus::Invalid).into()),
                    Gate::Cooling(until, class) => cooling = Some(later(cooling, (until, class))),
                    Gate::ProbeOut(lease) => probe_out = Some(lease),
                    gate @ (Gate::Probe | Gate::EarlyProbe(..)) => {
                        pass.probe = true;
                        if let Gate::EarlyProbe(until, class) = gate {
                            cooling_if_full = Some(later(cooling_if_full, (until, class)));
                        }
                        if subject.is_own() {
                            cap = 1;
                        }
                    }
                }
                pass.wants_success |= !rest.is_forgotten(now) && rest.is_proved_by(model.is_some());
            }
        }
        if let Some((until, class)) = cooling {
            return Err(Reason::Cooling { until, class }.into());
        }
        let full = |lease_end| No { reason: Reason::Full, lease_end, grace_end: None };
        let full = if let Some(grace) = self.grace_at(now) {
            Some(No { grace_end: Some(grace), ..full(Some(grace)) })
        } else if let Some(lease) = probe_out {
            Some(full(self.end_of(lease)))
        } else if self.in_use(key, now) >= cap {
            Some(full(self.first_end(key)))
        } else if let Some(group) = counted(candidate, group)
            && self.crowd(group, now).is_some_and(|(cap, in_use)| in_use >= cap)
        {
            Some(full(self.first_end_in(group, now)))
        } else {
            None
        };
        match (full, cooling_if_full) {
            (None, _) => Ok(pass),
            (Some(_), Some((until, class))) => Err(Reason::Cooling { until, class }.into()),
            (Some(full), None) => Err(full),
        }
    }

    /// The end of the grace, in one.
    pub(super) fn grace_at(&self, now: StoreTime) -> Option<StoreTime> {
        self.grace_until.filter(|grace| now < *grace)
    }

    /// Takes the slot.
    fn lend(&mut self, ask: &Acquire, candidate: &Candidate, pass: &Pass, now: StoreTime) -> Grant {
        let group = self.keys.get(&candidate.key).and_then(|key| key.group_for(candidate)).cloned();
        let group = group.as_ref();
        if !self.rests.is_empty() {
            let model = ask.model.as_ref();
            for subject in Subject::bearing(&candidate.key, candidate.fingerprint, group, model) {
                let Some(rest) = self.rests.get_mut(&subject) else { continue };
                if rest.is_forgotten(now) {
                    self.rests.remove(&subject);
                } else if rest.is_resting(now) || rest.is_probation(now) {
                    rest.probe_lease = Some(ask.lease);
                    rest.probed_at = now;
                }
            }
        }
        let lease = Lease {
            key: candidate.key.clone(),
            pool: candidate.pool.clone(),
            fingerprint: candidate.fingerprint,
            token: self.next_token(now),
            owner: ask.owner.clone(),
            app: ask.app.clone(),
            group: counted(candidate, group).cloned(),
            expires_at: self.end_from(now, ask.ttl),
            revoked: false,
            probe: pass.probe,
            wants_success: pass.wants_success,
        };
        let grant = self.grant_of(&lease, self.told(ask, &lease));
        self.leases.insert(ask.lease, lease);
        self.note_use(candidate, ask.lease, now);
        grant
    }

    /// A key was lent. Its row is touched only where it says something else by that, which is seldom.
    fn note_use(&mut self, candidate: &Candidate, lease: LeaseId, now: StoreTime) {
        let Some(key) = self.keys.derived_mut(&candidate.key) else { return };
        key.leases.insert(lease);
        let (used, unlearned) = (key.notes_use(now), key.has_unlearned(now));
        if (used || unlearned)
            && let Some(key) = self.keys.get_mut(&candidate.key)
        {
            if used {
                key.last_used_at = Some(now);
            }
            if unlearned {
                key.learned = None;
            }
        }
    }

    /// Renews leases that match in id, key, pool and owner. A renewal that names another epoch starts
    /// the grace, once per epoch: for one TTL nothing new is lent, while those who held leases in the
    /// life that was lost reassert them, each under its key's configured cap (a learned one is a guess
    /// and ends no stream). Where the settings are lost too, a cap counts as 1 until `sync_keys`.
    pub fn renew(&mut self, ask: &Renew, now: StoreTime) -> Renewed {
        let epoch = self.epoch.clone();
        if now > ask.deadline {
            return Renewed { epoch, answers: vec![RenewAnswer::Late; ask.leases.len()] };
        }
        if self.grace_until.is_none() && ask.epoch.as_ref().is_some_and(|known| *known != epoch) {
            self.grace_until = Some(now.plus(ask.ttl));
        }
        let answers = ask.leases.iter().map(|held| self.renew_one(ask, held, now)).collect();
        Renewed { epoch, answers }
    }

    fn renew_one(&mut self, ask: &Renew, held: &Held, now: StoreTime) -> RenewAnswer {
        let end = self.end_from(now, ask.ttl);
        if let Some(lease) = self.leases.get_mut(&held.lease) {
            let own = lease.key == held.key && lease.pool == held.pool && lease.owner == ask.owner;
            if !own || lease.revoked {
                return RenewAnswer::Lost;
            }
            if lease.is_live(now) {
                lease.expires_at = lease.expires_at.max(end);
                return RenewAnswer::Renewed(lease.expires_at);
            }
        }
        if !ask.reassert {
            return RenewAnswer::Lost;
        }
        self.forget(held.lease);
        let key = self.keys.or_default(held.key.clone());
        key.seen_at = key.seen_at.max(now);
        if self.keys.get(&held.key).is_some_and(|key| self.in_use(key, now) >= key.cap()) {
            return RenewAnswer::Lost;
        }
        // Tokens keep rising even where the clock of the new life is behind that of the old one.
        self.last_token = self.last_token.max(held.token);
        if let Some(key) = self.keys.derived_mut(&held.key) {
            key.leases.insert(held.lease);
        }
        let lease = Lease {
            key: held.key.clone(),
            pool: held.pool.clone(),
            fingerprint: held.fingerprint,
            token: held.token,
            owner: ask.owner.clone(),
            app: held.app.clone(),
            group: held.group.clone().filter(|group| *group != GroupName::auto()),
            expires_at: end,
            revoked: false,
            probe: false,
            wants_success: false,
        };
        self.leases.insert(held.lease, lease);
        RenewAnswer::Renewed(end)
    }

    /// Gives back one slot. Only deletes; lease, key and pool must match, else nothing changes.
    pub fn release(&mut self, ask: &Release, now: StoreTime) -> Released {
        let held = self.leases.get(&ask.lease);
        if !held.is_some_and(|lease| lease.key == ask.key && lease.pool == ask.pool) {
            return Released::default();
        }
        self.forget(ask.lease).map_or_else(Released::default, |lease| Released {
            freed: lease.is_live(now),
            wakes_all: self.wakes_all(&lease),
        })
    }

    /// Whether others than those who wait for its key may wait for the end of a lease.
    pub(super) fn wakes_all(&self, lease: &Lease) -> bool {
        lease.probe || lease.group.as_ref().is_some_and(|group| self.group_caps.get(group).is_some())
    }

    /// Drops the expired leases of one key.
    fn drop_expired(&mut self, candidate: &Candidate, now: StoreTime) {
        if self.expiry == Expiry::Never {
            return;
        }
        let Some(key) = self.keys.derived_mut(&candidate.key) else { return };
        key.leases.retain(|id| {
            let live = self.leases.get(id).is_some_and(|lease| lease.is_live(now));
            if !live {
                self.leases.remove(id);
            }
            live
        });
    }

    /// The group that the holder of a lease is told.
    fn told(&self, ask: &Acquire, lease: &Lease) -> Option<GroupName> {
        let candidate = ask.candidates.iter().find(|candidate| candidate.key == lease.key)?;
        let asked = candidate.group.clone()?;
        if !asked.is_auto() {
            return Some(asked);
        }
        let known = self.keys.get(&lease.key).and_then(|key| key.group_for(candidate));
        Some(lease.group.as_ref().or(known).cloned().unwrap_or_else(GroupName::auto))
    }

    fn grant_of(&self, lease: &Lease, group: Option<GroupName>) -> Grant {
        Grant {
            key: lease.key.clone(),
            pool: lease.pool.clone(),
            token: lease.token,
            expires_at: lease.expires_at,
            probe: lease.probe,
            wants_success: lease.wants_success,
            epoch: self.epoch.clone(),
            group,
        }
    }

    fn end_from(&self, now: StoreTime, ttl: std::time::Duration) -> StoreTime {
        match self.expiry {
            Expiry::Ttl => now.plus(ttl),
            Expiry::Never => StoreTime::NEVER,
        }
    }

    fn end_of(&self, lease: LeaseId) -> Option<StoreTime> {
        self.leases.get(&lease).map(|lease| lease.expires_at).filter(|end| *end != StoreTime::NEVER)
    }

    /// The first end among a key's leases.
    fn first_end(&self, key: &Key) -> Option<StoreTime> {
        match self.expiry {
            Expiry::Never => None,
            Expiry::Ttl => key.leases.iter().filter_map(|id| self.end_of(*id)).min(),
        }
    }

    /// A token as the ledger believes it: one that it cannot have issued counts as older than all.
    pub(super) fn believed(&self, token: FencingToken, now: StoreTime) -> FencingToken {
        let newest = self.last_token.max(FencingToken(now.0.saturating_mul(1000)));
        if token <= newest { token } else { FencingToken(0) }
    }
}

/// The group among whose uses a lease of this candidate counts: the one that it was asked for with. A caller
/// that does not know a learned group yet is told it with its grant, and counts from the next one on.
fn counted<'a>(candidate: &Candidate, group: Option<&'a GroupName>) -> Option<&'a GroupName> {
    group.filter(|group| candidate.group.as_ref() == Some(*group))
}

fn earlier(known: Option<StoreTime>, other: StoreTime) -> StoreTime {
    known.map_or(other, |known| known.min(other))
}

/// The rest that ends last; of two that end together, the one that was known.
fn later(known: Option<(StoreTime, Class)>, other: (StoreTime, Class)) -> (StoreTime, Class) {
    known.filter(|known| known.0 >= other.0).unwrap_or(other)
}

//! A ledger taken apart, for the backends that keep it as rows.

use std::collections::HashMap;
use std::hash::Hash;

use super::cleared::{Clearable, Clearings};
use super::learned::{GroupCaps, Learned};
use super::rest::Rest;
use super::subject::Subject;
use super::tracked::Tracked;
use super::{Expiry, Key, Lease, Ledger};
use crate::model::{FencingToken, GroupName, KeyId, LeaseId, ProviderName};
use crate::store::{Epoch, StoreEvent, StoreTime};

/// What a provider has once.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::store) struct Head {
    pub(in crate::store) epoch: Epoch,
    pub(in crate::store) grace_until: Option<StoreTime>,
    pub(in crate::store) last_token: FencingToken,
}

/// What was touched since it was last asked for; each with whether it had been there before.
pub(in crate::store) struct Touched {
    pub(in crate::store) keys: HashMap<KeyId, bool>,
    pub(in crate::store) leases: HashMap<LeaseId, bool>,
    pub(in crate::store) rests: HashMap<Subject, bool>,
    pub(in crate::store) group_caps: HashMap<GroupName, bool>,
    pub(in crate::store) cleared: HashMap<Clearable, bool>,
}

impl Ledger {
    /// The ledger of these rows, which expire and whose changes are tracked from now on. A lease of a key
    /// that is not among them holds no slot of anything, and is left out.
    pub(in crate::store) fn of_parts(
        provider: ProviderName,
        head: Head,
        mut keys: HashMap<KeyId, Key>,
        mut leases: HashMap<LeaseId, Lease>,
        rests: HashMap<Subject, Rest>,
        group_caps: HashMap<GroupName, Learned>,
        cleared: HashMap<Clearable, FencingToken>,
    ) -> Self {
        leases.retain(|id, lease| keys.get_mut(&lease.key).map(|key| key.leases.insert(*id)).is_some());
        Self {
            provider,
            expiry: Expiry::Ttl,
            epoch: head.epoch,
            grace_until: head.grace_until,
            last_token: head.last_token,
            keys: Tracked::of(keys),
            leases: Tracked::of(leases),
            rests: rests.into_iter().collect(),
            group_caps: GroupCaps::of(group_caps),
            cleared: Clearings::of(cleared),
        }
    }

    /// What it has once.
    pub(in crate::store) fn head(&self) -> Head {
        Head { epoch: self.epoch.clone(), grace_until: self.grace_until, last_token: self.last_token }
    }

    /// Its key of this id.
    pub(in crate::store) fn key(&self, id: &KeyId) -> Option<&Key> {
        self.keys.get(id)
    }

    /// Its lease of this id.
    pub(in crate::store) fn lease(&self, id: LeaseId) -> Option<&Lease> {
        self.leases.get(&id)
    }

    /// What rests of this subject.
    pub(in crate::store) fn rest(&self, subject: &Subject) -> Option<&Rest> {
        self.rests.get(subject)
    }

    /// What was learned of a group.
    pub(in crate::store) fn group_cap(&self, group: &GroupName) -> Option<&Learned> {
        self.group_caps.get(group)
    }

    /// The newest token as of when a person cleared this.
    pub(in crate::store) fn cleared(&self, what: &Clearable) -> Option<FencingToken> {
        self.cleared.get(what).copied()
    }

    /// What was touched since the last call.
    pub(in crate::store) fn take_touched(&mut self) -> Touched {
        Touched {
            keys: self.keys.take_touched(),
            leases: self.leases.take_touched(),
            rests: self.rests.rows.take_touched(),
            group_caps: self.group_caps.take_touched(),
            cleared: self.cleared.take_touched(),
        }
    }

    /// In how many entries it differs from another: 0 when the two are the same in every field.
    pub(in crate::store) fn differences(&self, other: &Self) -> usize {
        usize::from(self.head() != other.head())
            + differing(&self.keys, &other.keys)
            + differing(&self.leases, &other.leases)
            + differing(&self.rests.rows, &other.rests.rows)
            + differing(&self.group_caps, &other.group_caps)
            + differing(&self.cleared, &other.cleared)
    }

    /// What is left of it once the machine has started anew: every holder is gone, and the wall clock may
    /// have gone back. The epoch stays, for nothing was lost that anybody still holds.
    pub(in crate::store) fn after_boot(&mut self, now: StoreTime) {
        for lease in self.leases.ids() {
            self.forget(lease);
        }
        self.grace_until = self.grace_until.map(|grace| grace.min(now));
        for id in self.keys.ids() {
            let Some(key) = self.keys.get_mut(&id) else { continue };
            key.seen_at = key.seen_at.min(now);
            key.last_used_at = key.last_used_at.map(|used| used.min(now));
            if let Some(learned) = &mut key.learned {
                learned.since = learned.since.min(now);
            }
        }
        for group in self.group_caps.ids() {
            let Some(learned) = self.group_caps.get_mut(&group) else { continue };
            learned.since = learned.since.min(now);
        }
        for subject in self.rests.rows.ids() {
            let Some(rest) = self.rests.get_mut(&subject) else { continue };
            *rest = rest.clone().clamped(now);
        }
    }

    /// What others made of this ledger that somebody here may wait for, given what they left: slots that
    /// came back, leases marked to end, keys and rests that are not as they were.
    pub(in crate::store) fn news(&self, left: &Self) -> Vec<StoreEvent> {
        let mut news = Vec::new();
        let of_keys = |one: &Key, other: &Key| {
            let said = |key: &Key| (key.settings.clone(), key.disabled, key.drained, key.learned);
            said(one) != said(other)
        };
        let keys = self.keys.len() != left.keys.len()
            || self.keys.iter().any(|(id, key)| left.keys.get(id).is_none_or(|other| of_keys(key, other)));
        // Those who wait for a group, or the provider's probe, wait for other keys than a lease's own.
        let gone = |id: &LeaseId| left.leases.get(id).is_none();
        let wakes_all = self.leases.iter().any(|(id, lease)| gone(id) && self.wakes_all(lease));
        let rests = self.rests.rows != left.rests.rows || self.group_caps != left.group_caps;
        if keys || wakes_all || rests || self.epoch != left.epoch {
            news.push(StoreEvent::Changed(self.provider.clone()));
        } else {
            for (id, key) in &self.keys {
                if key.leases.iter().any(|lease| left.leases.get(lease).is_none()) {
                    news.push(StoreEvent::Freed(self.provider.clone(), id.clone()));
                }
            }
        }
        for (id, lease) in &left.leases {
            if lease.revoked && self.leases.get(id).is_none_or(|known| !known.revoked) {
                news.push(StoreEvent::Revoked(self.provider.clone(), *id));
            }
        }
        news
    }
}

fn differing<K: Clone + Eq + Hash, V: PartialEq>(one: &Tracked<K, V>, other: &Tracked<K, V>) -> usize {
    let changed = one.iter().filter(|(key, value)| other.get(key) != Some(value)).count();
    changed + other.iter().filter(|(key, _)| one.get(key).is_none()).count()
}

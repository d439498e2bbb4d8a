//! What answers teach beside rests: how many uses at once the provider allows, and whose key it is.
//!
//! A learned cap goes down at once and comes back one use a minute, so that the price of finding the limit
//! again is one refusal a minute at most. It is a guess about the provider, so it holds for new leases alone
//! and ends none. A cap of a group is one number for all its keys together.
//!
//! Whose key it is, its group, is learned once per secret, from an answer that names the organisation.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::Deserialize;

use super::cleared::Clearable;
use super::tracked::Tracked;
use super::{Key, Ledger};
use crate::model::{Candidate, Fingerprint, GroupName, LeaseId, Scope};
use crate::store::{Report, StoreTime};

/// How long a learned cap stays, and each step of its way back up takes.
const STEP: Duration = Duration::from_mins(1);
/// How long a learned cap is remembered: by then it has come up by more than a thousand.
const KEPT: Duration = Duration::from_hours(24);
/// Groups whose learned caps are remembered at once: answers name organisations, so there is a bound.
const GROUPS: usize = 256;
/// Secrets of one key whose groups are remembered at once; a rotation needs two.
const FINGERPRINTS: usize = 4;

/// A cap that the provider taught: `cap` at `since`, one more with each step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
pub(in crate::store) struct Learned {
    pub(in crate::store) cap: u32,
    #[serde(rename = "since_ms")]
    pub(in crate::store) since: StoreTime,
}

impl Learned {
    /// The cap now; `None` once it is forgotten.
    pub(in crate::store) fn cap_at(self, now: StoreTime) -> Option<u32> {
        let age = now.since(self.since);
        let steps = u32::try_from(age.as_secs() / STEP.as_secs()).unwrap_or(u32::MAX);
        (age < KEPT).then(|| self.cap.max(1).saturating_add(steps))
    }

    /// After the provider has said "too many" to `in_use` uses, and perhaps how many it allows: one use less
    /// than those, never more than was known.
    fn after(old: Option<Self>, in_use: u32, named: Option<u32>, now: StoreTime) -> Self {
        let known = old.and_then(|old| old.cap_at(now)).unwrap_or(u32::MAX);
        let cap = in_use.saturating_sub(1).min(named.unwrap_or(u32::MAX)).min(known).max(1);
        Self { cap, since: now }
    }
}

/// The learned caps of groups.
pub(in crate::store) type GroupCaps = Tracked<GroupName, Learned>;

/// The groups that a key's answers named, by secret.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub(in crate::store) struct Groups(pub(in crate::store) BTreeMap<Fingerprint, GroupName>);

impl Groups {
    pub(in crate::store) fn of(&self, secret: Fingerprint) -> Option<&GroupName> {
        self.0.get(&secret)
    }

    /// Takes a group in; of too many secrets the first goes that is neither this one nor the `current`.
    fn set(&mut self, secret: Fingerprint, group: GroupName, current: Option<Fingerprint>) {
        self.0.insert(secret, group);
        if self.0.len() > FINGERPRINTS {
            let spare = |other: &&Fingerprint| **other != secret && Some(**other) != current;
            let spare = self.0.keys().find(spare).copied();
            spare.map(|spare| self.0.remove(&spare));
        }
    }
}

/// The group that a report is about: what its answer named, where the reporter leaves that to answers.
pub(in crate::store) fn group_of(ask: &Report) -> Option<&GroupName> {
    let granted = ask.group.as_ref();
    match granted {
        Some(group) if group.is_auto() => {
            ask.outcome.organization.as_ref().or_else(|| granted.filter(|group| **group != GroupName::auto()))
        }
        _ => granted,
    }
}

/// The group that a report teaches.
pub(in crate::store) fn taught(ask: &Report) -> Option<&GroupName> {
    ask.outcome.organization.as_ref().filter(|_| ask.group.as_ref().is_some_and(GroupName::is_auto))
}

/// The group whose limit a report speaks of, where "too many at once" is about a group.
pub(in crate::store) fn crowded(ask: &Report) -> Option<&GroupName> {
    match ask.outcome.scope {
        Scope::Group | Scope::GroupModel => group_of(ask),
        Scope::Key | Scope::KeyModel | Scope::ProviderModel => None,
    }
}

impl Key {
    /// The group of a candidate of this key, as the store knows it.
    pub(super) fn group_for<'a>(&'a self, candidate: &'a Candidate) -> Option<&'a GroupName> {
        match &candidate.group {
            Some(group) if group.is_auto() => self.groups.of(candidate.fingerprint),
            group => group.as_ref(),
        }
    }

    /// The learned cap where it is below the key's own.
    pub(super) fn learned_cap(&self, now: StoreTime) -> Option<u32> {
        self.learned.and_then(|learned| learned.cap_at(now)).filter(|cap| *cap < self.cap())
    }
}

impl Ledger {
    /// What a group may have in use at once, and has; `None` where nothing was learned.
    pub(super) fn crowd(&self, group: &GroupName, now: StoreTime) -> Option<(u32, u32)> {
        let cap = self.group_caps.get(group)?.cap_at(now)?;
        // Fewer leases than that of all keys: no need to count those of the group.
        let few = u32::try_from(self.leases.len()).is_ok_and(|all| all < cap);
        (!few).then(|| (cap, self.group_in_use(group, now)))
    }

    fn group_in_use(&self, group: &GroupName, now: StoreTime) -> u32 {
        let live = self
            .leases
            .iter()
            .filter(|(_, lease)| lease.group.as_ref() == Some(group) && lease.is_live(now))
            .count();
        u32::try_from(live).unwrap_or(u32::MAX)
    }

    /// The first end among a group's leases.
    pub(super) fn first_end_in(&self, group: &GroupName, now: StoreTime) -> Option<StoreTime> {
        let live =
            self.leases.iter().filter(|(_, lease)| lease.group.as_ref() == Some(group) && lease.is_live(now));
        live.map(|(_, lease)| lease.expires_at).filter(|end| *end != StoreTime::NEVER).min()
    }

    /// Remembers the group that an answer named.
    pub(super) fn learn_group(&mut self, ask: &Report) {
        let Some(group) = taught(ask) else { return };
        let Some(known) = self.keys.get(&ask.key) else { return };
        if known.groups.of(ask.fingerprint) == Some(group) {
            return;
        }
        let current = known.settings.as_ref().and_then(|settings| settings.fingerprint);
        if let Some(key) = self.keys.get_mut(&ask.key) {
            key.groups.set(ask.fingerprint, group.clone(), current);
        }
    }

    /// Lowers the cap of the key, or of its group where the limit is the group's and this use counts there.
    /// Said of a lease that has ended it tells nothing: how many lived with it is gone.
    pub(super) fn learn(&mut self, ask: &Report, now: StoreTime) {
        if !self.is_live(ask.lease, now) {
            return;
        }
        let named = ask.outcome.max_uses;
        let token = self.believed(ask.token, now);
        if let Some(group) = crowded(ask).filter(|group| self.counts_in(ask.lease, group)) {
            if self.is_from_before(Some(&Clearable::Group(group.clone())), token) {
                return;
            }
            let old = self.group_caps.get(group).copied();
            let learned = Learned::after(old, self.group_in_use(group, now), named, now);
            self.set_group_cap(group.clone(), learned);
            return;
        }
        if self.is_from_before(Some(&Clearable::Key(ask.key.clone())), token) {
            return;
        }
        let Some(key) = self.keys.get(&ask.key) else { return };
        let learned = Learned::after(key.learned, self.in_use(key, now), named, now);
        if let Some(key) = self.keys.get_mut(&ask.key) {
            key.learned = Some(learned);
        }
    }

    fn counts_in(&self, lease: LeaseId, group: &GroupName) -> bool {
        self.leases.get(&lease).is_some_and(|lease| lease.group.as_ref() == Some(group))
    }

    fn set_group_cap(&mut self, group: GroupName, learned: Learned) {
        if self.group_caps.get(&group).is_none() && self.group_caps.len() >= GROUPS {
            let oldest = self.group_caps.iter().min_by_key(|(group, known)| (known.since, *group));
            let oldest = oldest.map(|(group, _)| group.clone());
            oldest.map(|oldest| self.group_caps.remove(&oldest));
        }
        self.group_caps.insert(group, learned);
    }

    /// Forgets caps that are too old to mean anything.
    pub(super) fn forget_group_caps(&mut self, now: StoreTime) {
        self.group_caps.retain(|_, learned| learned.cap_at(now).is_some());
    }
}

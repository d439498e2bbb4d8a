//! The ledger as people see it.

use super::subject::{Rests, Subject};
use super::{Key, Ledger, Settings, status};
use crate::model::{Fingerprint, GroupName, KeyId, KeyStatus, PoolName, ProviderName};
use crate::store::{BY_CHECK, CooldownView, EvidenceView, KeyView, LeaseView, Snapshot, StoreTime};

impl Ledger {
    /// All keys that some sidecar serves, and all live leases, each by id.
    pub fn snapshot(&self, now: StoreTime) -> Snapshot {
        let view = |(id, key): (&KeyId, &Key)| Some(self.key_view(id, key, key.settings.as_ref()?, now));
        let mut keys: Vec<KeyView> = self.keys.iter().filter_map(view).collect();
        keys.sort_by(|a, b| a.id.cmp(&b.id));
        let live = self.leases.iter().filter(|(_, lease)| lease.is_live(now));
        let mut leases: Vec<LeaseView> = live
            .map(|(id, lease)| LeaseView {
                id: *id,
                key_id: lease.key.clone(),
                provider: self.provider.clone(),
                pool: lease.pool.clone(),
                app: lease.app.clone(),
                owner: lease.owner.clone(),
                fencing_token: lease.token,
                expires_at_ms: Some(lease.expires_at).filter(|end| *end != StoreTime::NEVER),
                revoked: lease.revoked,
            })
            .collect();
        leases.sort_by_key(|lease| lease.id);
        Snapshot { keys, leases, grace_until_ms: self.grace_at(now) }
    }

    fn key_view(&self, id: &KeyId, key: &Key, settings: &Settings, now: StoreTime) -> KeyView {
        let facts = Facts {
            id: id.clone(),
            pool: settings.pool.clone(),
            group: settings.group_in(&key.groups).or(settings.group.as_ref()).cloned(),
            fingerprint: settings.fingerprint,
            cap: key.cap(),
            learned: key.learned_cap(now),
            group_learned: settings
                .group_in(&key.groups)
                .and_then(|group| self.group_caps.get(group)?.cap_at(now)),
            disabled: key.disabled,
            drained: key.drained,
            in_use: self.in_use(key, now),
            last_used_at: key.last_used_at,
        };
        facts.view(&self.provider, &self.rests, now)
    }
}

/// What a store knows of a key beside its rests.
pub(in crate::store) struct Facts {
    pub(in crate::store) id: KeyId,
    pub(in crate::store) pool: PoolName,
    pub(in crate::store) group: Option<GroupName>,
    pub(in crate::store) fingerprint: Option<Fingerprint>,
    pub(in crate::store) cap: u32,
    pub(in crate::store) learned: Option<u32>,
    pub(in crate::store) group_learned: Option<u32>,
    pub(in crate::store) disabled: bool,
    pub(in crate::store) drained: bool,
    pub(in crate::store) in_use: u32,
    pub(in crate::store) last_used_at: Option<StoreTime>,
}

impl Facts {
    /// The key as people see it.
    pub(in crate::store) fn view(self, provider: &ProviderName, rests: &Rests, now: StoreTime) -> KeyView {
        let own = self.fingerprint.and_then(|secret| rests.get(&Subject::Key(self.id.clone(), secret)));
        let of_group = self.group.clone().and_then(|group| rests.get(&Subject::Group(group)));
        let (status, setter) = match status(self.disabled, self.fingerprint.is_some(), own, now) {
            // What keeps all of its group from being lent keeps it, too.
            KeyStatus::Available if of_group.is_some() => (status(false, true, of_group, now), of_group),
            status => (status, own),
        };
        let reason = match (status, setter) {
            (KeyStatus::Available | KeyStatus::Pending, _) => None,
            (KeyStatus::Disabled, _) => Some(if self.drained { "drained" } else { "operator" }),
            (_, Some(rest)) if rest.by_check => Some(BY_CHECK),
            (_, rest) => rest.map(|rest| rest.class.as_str()),
        };
        let cause = own.filter(|rest| rest.is_resting(now) || rest.is_probation(now));
        let ends = own.map(|rest| rest.until).filter(|end| *end > now && *end != StoreTime::NEVER);
        let cooldowns = self.scoped(provider, rests, now);
        KeyView {
            id: self.id,
            provider: provider.clone(),
            pool: self.pool,
            group: self.group,
            status,
            reason: reason.map(str::to_owned),
            cooldown_since_ms: cause.map(|rest| rest.since),
            cooldown_until_ms: ends,
            evidence: cause.filter(|rest| rest.status.is_some() || rest.code.is_some()).map(|rest| {
                EvidenceView { status: rest.status, code: rest.code.as_deref().map(str::to_owned) }
            }),
            in_use: self.in_use,
            max_concurrent_uses: self.cap,
            learned_concurrent_uses: self.learned,
            group_concurrent_uses: self.group_learned,
            last_used_at_ms: self.last_used_at,
            cooldowns,
        }
    }

    /// The scoped rests that bear on it with its present secret, whatever the model.
    fn scoped(&self, provider: &ProviderName, rests: &Rests, now: StoreTime) -> Vec<CooldownView> {
        let bears = |subject: &Subject| match subject {
            Subject::Key(..) => false,
            Subject::KeyModel(key, secret, _) => *key == self.id && self.fingerprint == Some(*secret),
            Subject::Group(group) | Subject::GroupModel(group, _) => self.group.as_ref() == Some(group),
            Subject::ProviderModel(_) => true,
        };
        let resting = rests.iter().filter(|(subject, rest)| rest.is_resting(now) && bears(subject));
        let mut views: Vec<CooldownView> = resting
            .map(|(subject, rest)| CooldownView {
                subject: subject.label(provider),
                reason: rest.class.as_str().to_owned(),
                since_ms: rest.since,
                until_ms: rest.until,
                status: rest.status,
                code: rest.code.as_deref().map(str::to_owned),
            })
            .collect();
        views.sort_by(|a, b| a.subject.cmp(&b.subject));
        views
    }
}

//! The ledger as people see it.

use super::subject::Subject;
use super::{Key, Ledger, Settings};
use crate::model::{KeyId, KeyStatus};
use crate::store::{CooldownView, KeyView, LeaseView, Snapshot, StoreTime};

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
        Snapshot { keys, leases }
    }

    fn key_view(&self, id: &KeyId, key: &Key, settings: &Settings, now: StoreTime) -> KeyView {
        let status = self.status(id, settings.fingerprint, now);
        let own = settings.fingerprint.and_then(|secret| self.rests.get(&Subject::Key(id.clone(), secret)));
        let reason = match (status, own) {
            (KeyStatus::Available | KeyStatus::Pending, _) => None,
            (KeyStatus::Disabled, _) => Some("operator"),
            (_, Some(rest)) if rest.by_check => Some("check"),
            (_, rest) => rest.map(|rest| rest.class.as_str()),
        };
        let ends = own.map(|rest| rest.until).filter(|end| *end > now && *end != StoreTime::NEVER);
        KeyView {
            id: id.clone(),
            provider: self.provider.clone(),
            pool: settings.pool.clone(),
            group: settings.group.clone(),
            status,
            reason: reason.map(str::to_owned),
            cooldown_until_ms: ends,
            in_use: self.in_use(key, now),
            max_concurrent_uses: key.cap(),
            last_used_at_ms: key.last_used_at,
            cooldowns: self.scoped(id, settings, now),
        }
    }

    /// The scoped rests that bear on a key with its present secret, whatever the model.
    fn scoped(&self, id: &KeyId, settings: &Settings, now: StoreTime) -> Vec<CooldownView> {
        let bears = |subject: &Subject| match subject {
            Subject::Key(..) => false,
            Subject::KeyModel(key, secret, _) => key == id && settings.fingerprint == Some(*secret),
            Subject::Group(group) | Subject::GroupModel(group, _) => settings.group.as_ref() == Some(group),
            Subject::ProviderModel(_) => true,
        };
        let resting = self.rests.iter().filter(|(subject, rest)| rest.is_resting(now) && bears(subject));
        let mut views: Vec<CooldownView> = resting
            .map(|(subject, rest)| CooldownView {
                subject: subject.label(&self.provider),
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

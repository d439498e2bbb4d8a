//! What is said of keys and leases: reports, settings, a person's word.

use std::sync::Arc;

use redis::Value;

use super::lend::fresh_epoch;
use super::values::{Reader, bytes, nonsense, text};
use super::{Call, Shared, within_limit};
use crate::model::{Class, GroupName, KeyId, KeyStatus, LeaseId, PoolName, ProviderName};
use crate::store::rules::cleared::Clearable;
use crate::store::rules::learned::{crowded, group_of, taught};
use crate::store::rules::report::blamed;
use crate::store::rules::rest::Terms;
use crate::store::rules::subject::Subject;
use crate::store::text::{clearable_text, fingerprint_text, parse_fingerprint, subject_text};
use crate::store::{
    KeySettings, Report, Reported, StatusChange, StoreError, StoreEvent, StoreTime, SyncKeys, SyncMode,
    Synced,
};

/// How often a sync looks again when a key's pool changes under its hands.
const SYNC_TRIES: usize = 4;

impl Shared {
    pub(super) async fn report(&self, ask: Report) -> Result<Reported, StoreError> {
        let names = self.names.of(&ask.provider);
        let mut call = Call::default();
        call.key(names.fence()).key(names.cooldowns()).key(names.key(&ask.key));
        call.key(names.leases(&ask.key)).key(names.lease(ask.lease)).key(names.groups());
        call.key(crowded(&ask).map_or_else(|| names.leases(&ask.key), |group| names.crowd(group)));
        call.key(names.cleared());
        let blamed = blamed(&ask);
        call.arg(match ask.outcome.class {
            Class::Success if ask.outcome.shows_use() => "success",
            Class::Concurrency => "learn",
            Class::Success | Class::Caller | Class::Cancelled | Class::Network => "nothing",
            Class::Rate
            | Class::Quota
            | Class::Invalid
            | Class::Access
            | Class::Region
            | Class::Overloaded => {
                if blamed.is_some() {
                    "rest"
                } else {
                    "nothing"
                }
            }
        });
        call.arg(ask.lease.to_string()).arg(ask.key.as_str()).arg(fingerprint_text(ask.fingerprint));
        call.number(ask.token.0).arg(self.names.channel()).arg(&*self.name).arg(ask.provider.as_str());
        call.arg(taught(&ask).map_or("", GroupName::as_str)).arg(flag(ask.model.is_some()));
        if ask.outcome.class == Class::Success {
            let (group, model) = (group_of(&ask), ask.model.as_ref());
            for subject in Subject::bearing(&ask.key, ask.fingerprint, group, model) {
                if !subject.is_own() {
                    call.arg(subject_text(&subject));
                }
            }
        } else if ask.outcome.class == Class::Concurrency {
            call.arg(crowded(&ask).map_or("", GroupName::as_str));
            call.arg(ask.outcome.max_uses.map(|uses| uses.to_string()).unwrap_or_default());
        } else if let Some(subject) = &blamed {
            evidence(&mut call, &ask, subject);
        }
        let mut answer = self.run(&self.scripts.report, &call).await?;
        let cooling_until = match answer.number()? {
            0 => None,
            -1 => Some(StoreTime::NEVER),
            until => Some(StoreTime(u64::try_from(until).map_err(|_| nonsense("a bad time"))?)),
        };
        let status = answer.text()?;
        if answer.number()? == 1 {
            self.tell(StoreEvent::Changed(ask.provider));
        }
        Ok(Reported { cooling_until, status: status_of(&status)? })
    }

    /// Two steps: which pools the keys are in, then all settings at once. Pools that change between the two
    /// are seen, and looked at again.
    pub(super) async fn sync_keys(&self, ask: SyncKeys) -> Result<Synced, StoreError> {
        within_limit(async {
            self.look_at_salt().await?;
            self.sync(ask).await
        })
        .await
    }

    async fn sync(&self, ask: SyncKeys) -> Result<Synced, StoreError> {
        let replication = self.replication(&ask.provider).await?;
        for _ in 0..SYNC_TRIES {
            if let Some(synced) = self.try_sync(&ask, &replication).await? {
                self.tell(StoreEvent::Changed(ask.provider));
                return Ok(synced);
            }
        }
        Err(StoreError::Unavailable("other sidecars change the same keys' pools without end".into()))
    }

    /// Settings carry fingerprints, and are told anew after a loss of data: then the salt must be known too, or
    /// the next sidecar to start would make another.
    async fn look_at_salt(&self) -> Result<(), StoreError> {
        let store = self.names.store();
        let mut get = redis::cmd("HGET");
        get.arg(&store).arg("salt");
        let mut found = self.command(&store, &get).await?;
        if found == Value::Nil
            && let Some(known) = self.salt()
        {
            let mut setnx = redis::cmd("HSETNX");
            setnx.arg(&store).arg("salt").arg(&known[..]);
            self.command(&store, &setnx).await?;
            found = self.command(&store, &get).await?;
        }
        self.agreed_on(bytes(found)?)
    }

    async fn try_sync(&self, ask: &SyncKeys, replication: &str) -> Result<Option<Synced>, StoreError> {
        let names = self.names.of(&ask.provider);
        let pools = self.pools_of(&ask.provider, ask.keys.iter().map(|told| &told.key)).await?;
        let mut call = Call::default();
        call.key(names.epoch()).key(names.fingerprints()).key(names.keys());
        call.arg(fresh_epoch()).arg(replication);
        call.arg(match ask.mode {
            SyncMode::Replace => "replace",
            SyncMode::Repair => "repair",
        });
        call.arg(self.names.channel()).arg(&*self.name).arg(ask.provider.as_str()).number(ask.keys.len());
        for (told, was_in) in ask.keys.iter().zip(&pools) {
            call.key(names.key(&told.key)).key(names.pool(&told.pool));
            call.key(names.pool(was_in.as_ref().unwrap_or(&told.pool)));
            call.arg(told.key.as_str()).arg(told.pool.as_str());
            call.arg(told.group.as_ref().map_or("", GroupName::as_str)).number(told.max_concurrent_uses);
            call.arg(told.fingerprint.map(fingerprint_text).unwrap_or_default());
            call.arg(was_in.as_ref().map_or("", PoolName::as_str));
        }
        let mut answer = self.run(&self.scripts.sync, &call).await?;
        answer.text()?; // the epoch
        if answer.number()? == 0 {
            return Ok(None);
        }
        let mut synced = Synced::default();
        for told in &ask.keys {
            if let former @ Value::Array(_) = answer.value()? {
                synced.differing.push(former_settings(&told.key, former)?);
            }
            let other = answer.text()?;
            if let Ok(other) = KeyId::parse(&other) {
                synced.same_secret.push((told.key.clone(), other));
            }
        }
        Ok(Some(synced))
    }

    /// The pool that each key is in, as the store knows it.
    pub(super) async fn pools_of(
        &self,
        provider: &ProviderName,
        keys: impl Iterator<Item = &KeyId>,
    ) -> Result<Vec<Option<PoolName>>, StoreError> {
        let names = self.names.of(provider);
        let mut pipe = redis::pipe();
        for key in keys {
            pipe.cmd("HGET").arg(names.key(key)).arg("pool");
        }
        if pipe.is_empty() {
            return Ok(Vec::new());
        }
        let mut answer = self.pipe(&pipe).await?;
        let mut pools = Vec::new();
        while !answer.is_empty() {
            pools.push(PoolName::parse(&text(answer.value()?)?).ok());
        }
        Ok(pools)
    }

    pub(super) async fn set_status(
        self: &Arc<Self>,
        provider: ProviderName,
        key: KeyId,
        change: StatusChange,
    ) -> Result<bool, StoreError> {
        let names = self.names.of(&provider);
        let (word, secret) = match &change {
            StatusChange::Disable => ("disable", None),
            StatusChange::Drain => ("drain", None),
            StatusChange::Enable => ("enable", None),
            StatusChange::Clear => ("clear", None),
            StatusChange::CheckedGood(secret) => ("good", Some(*secret)),
            StatusChange::Doubted { secret, .. } => ("doubted", Some(*secret)),
            StatusChange::CheckedBad { secret, .. } => ("bad", Some(*secret)),
        };
        let mut call = Call::default();
        call.key(names.fence()).key(names.cooldowns()).key(names.key(&key)).key(names.groups());
        call.key(names.cleared());
        call.arg(word).arg(key.as_str()).arg(secret.map(fingerprint_text).unwrap_or_default());
        call.arg(self.names.channel()).arg(&*self.name).arg(provider.as_str()).arg(Class::Invalid.as_str());
        let (status, code) = match &change {
            StatusChange::Doubted { status, code, .. } | StatusChange::CheckedBad { status, code, .. } => {
                (*status, code.as_deref())
            }
            _ => (None, None),
        };
        call.arg(status.map(|status| status.to_string()).unwrap_or_default()).arg(code.unwrap_or_default());
        call.number(Terms::of(Class::Invalid, None, true).first.as_millis());
        self.said_yes(&mut self.run(&self.scripts.status, &call).await?, || StoreEvent::Changed(provider))
    }

    pub(super) async fn revoke(&self, provider: ProviderName, lease: LeaseId) -> Result<bool, StoreError> {
        let mut call = Call::default();
        call.key(self.names.of(&provider).lease(lease));
        call.arg(lease.to_string()).arg(self.names.channel()).arg(&*self.name).arg(provider.as_str());
        self.said_yes(&mut self.run(&self.scripts.revoke, &call).await?, || {
            StoreEvent::Revoked(provider, lease)
        })
    }

    fn said_yes(&self, answer: &mut Reader, event: impl FnOnce() -> StoreEvent) -> Result<bool, StoreError> {
        let known = answer.number()? == 1;
        if known {
            self.tell(event());
        }
        Ok(known)
    }
}

/// What a refusal says, in the terms of its class.
fn evidence(call: &mut Call, ask: &Report, subject: &Subject) {
    let outcome = &ask.outcome;
    let doubt = outcome.class == Class::Invalid && !outcome.proven;
    let terms = Terms::of(outcome.class, outcome.wait, doubt);
    call.arg(if subject.is_own() { String::new() } else { subject_text(subject) });
    call.arg(outcome.class.as_str());
    call.arg(terms.said.map(|said| said.as_millis().to_string()).unwrap_or_default());
    call.number(terms.first.as_millis()).number(terms.most.as_millis());
    call.arg(flag(terms.probation)).arg(flag(terms.forever)).arg(flag(doubt));
    call.arg(outcome.status.map(|status| status.to_string()).unwrap_or_default());
    call.arg(outcome.code.as_deref().unwrap_or_default());
    // What is proven is not cleared by hand either.
    let clearable = Clearable::of(subject).filter(|_| !terms.forever);
    call.arg(clearable.as_ref().map(clearable_text).unwrap_or_default());
}

fn flag(set: bool) -> &'static str {
    if set { "1" } else { "0" }
}

/// What is no setting of this version counts as it is lent by.
fn former_settings(key: &KeyId, listed: Value) -> Result<KeySettings, StoreError> {
    let mut listed = Reader::of(listed)?;
    Ok(KeySettings {
        key: key.clone(),
        pool: PoolName::parse(&listed.text()?).map_err(|_| nonsense("a bad pool"))?,
        group: GroupName::parse(&listed.text()?).ok(),
        max_concurrent_uses: listed.text()?.parse().unwrap_or(1),
        fingerprint: parse_fingerprint(&listed.text()?),
    })
}

fn status_of(word: &str) -> Result<Option<KeyStatus>, StoreError> {
    if word.is_empty() {
        return Ok(None);
    }
    let known = KeyStatus::ALL.into_iter().find(|status| status.as_str() == word);
    known.map(Some).ok_or_else(|| nonsense("an unknown status"))
}

//! The whole state of a provider, for people; and repairing what cannot be.
//!
//! Both look in several steps, and between them the state moves on: a picture for people may mix two
//! moments, and what is to be repaired is looked at again in one step with its repair.

use std::collections::HashMap;

use redis::Value;

use super::values::{Reader, number, text};
use super::{Call, Shared};
use crate::model::{AppName, FencingToken, GroupName, KeyId, LeaseId, OwnerId, PoolName, ProviderName};
use crate::store::rules::learned::Learned;
use crate::store::rules::rest::Rest;
use crate::store::rules::subject::{Rests, Subject};
use crate::store::rules::view::Facts;
use crate::store::text::{parse_fingerprint, parse_rest, parse_subject};
use crate::store::{LeaseView, Snapshot, StoreError, StoreTime};

/// Keys of one provider that are looked at.
const MOST_KEYS: usize = 10_000;
/// Keys asked for in one pipeline.
const AT_ONCE: usize = 200;
/// How long one sidecar has the right to reconcile a provider.
const RECONCILE_LOCK_MS: u64 = 60_000;
/// How long a key is kept that no sidecar speaks of.
const KEPT_UNSEEN_MS: u64 = 24 * 60 * 60 * 1000;
/// Names that one search for leases without a slot looks at, at most.
const SCAN_STEPS: usize = 50;
/// The hint that each of its steps gives.
const SCAN_COUNT: usize = 1000;

/// A hash as Redis gives it.
type Row = HashMap<String, String>;

/// A key and what is in its ZSET.
struct Seen {
    id: KeyId,
    row: Row,
    slots: Vec<LeaseId>,
}

impl Shared {
    pub(super) async fn snapshot(&self, provider: ProviderName) -> Result<Snapshot, StoreError> {
        self.look_at_clock().await?;
        let now = self.clock.now();
        let seen = self.look_at_keys(&provider, now).await?;
        let rests = self.rests(&provider, &seen).await?;
        let leases = seen.iter().flat_map(|key| key.slots.iter().copied()).collect::<Vec<_>>();
        let mut leases: Vec<LeaseView> = self
            .lease_rows(&provider, &leases)
            .await?
            .into_iter()
            .filter_map(|(id, row)| lease_view(&provider, id, &row))
            .filter(|view| view.expires_at_ms.is_some_and(|end| end > now))
            .collect();
        leases.sort_by_key(|lease| lease.id);
        let caps = self.group_caps(&provider, now).await?;
        let facts = seen.iter().filter_map(|key| facts(key, &caps, now));
        let mut keys: Vec<_> = facts.map(|facts| facts.view(&provider, &rests, now)).collect();
        keys.sort_by(|a, b| a.id.cmp(&b.id));
        Ok(Snapshot { keys, leases, grace_until_ms: self.grace(&provider).await?.filter(|end| *end > now) })
    }

    async fn grace(&self, provider: &ProviderName) -> Result<Option<StoreTime>, StoreError> {
        let epoch = self.names.of(provider).epoch();
        let mut ask = redis::cmd("HGET");
        ask.arg(&epoch).arg("grace_until_ms");
        // Scripts take what is no number for no grace, too.
        Ok(number(&self.command(&epoch, &ask).await?)
            .ok()
            .and_then(|ms| u64::try_from(ms).ok())
            .map(StoreTime))
    }

    async fn look_at_keys(&self, provider: &ProviderName, now: StoreTime) -> Result<Vec<Seen>, StoreError> {
        let names = self.names.of(provider);
        let mut range = redis::cmd("ZRANGEBYSCORE");
        range.arg(names.keys()).arg("-inf").arg("+inf").arg("LIMIT").arg(0).arg(MOST_KEYS);
        let mut listed = Reader::of(self.command(&names.keys(), &range).await?)?;
        let mut ids = Vec::new();
        while !listed.is_empty() {
            ids.extend(KeyId::parse(&listed.text()?));
        }
        let mut seen = Vec::with_capacity(ids.len());
        for ids in ids.chunks(AT_ONCE) {
            let mut pipe = redis::pipe();
            for id in ids {
                pipe.cmd("HGETALL").arg(names.key(id));
                pipe.cmd("ZRANGEBYSCORE").arg(names.leases(id)).arg(format!("({}", now.0)).arg("+inf");
            }
            let mut answer = self.pipe(&pipe).await?;
            for id in ids {
                let row = row(answer.value()?)?;
                let mut listed = answer.list()?;
                let mut slots = Vec::new();
                while !listed.is_empty() {
                    slots.extend(listed.text()?.parse().map(LeaseId));
                }
                seen.push(Seen { id: id.clone(), row, slots });
            }
        }
        Ok(seen)
    }

    async fn rests(&self, provider: &ProviderName, seen: &[Seen]) -> Result<Rests, StoreError> {
        let names = self.names.of(provider);
        let mut all = redis::cmd("HGETALL");
        all.arg(names.cooldowns());
        let scoped = row(self.command(&names.cooldowns(), &all).await?)?;
        let scoped =
            scoped.iter().filter_map(|(subject, rest)| Some((parse_subject(subject)?, parse_rest(rest)?)));
        Ok(scoped.chain(seen.iter().flat_map(own_rests)).collect())
    }

    /// What groups may have in use at once, where that was learned.
    async fn group_caps(
        &self,
        provider: &ProviderName,
        now: StoreTime,
    ) -> Result<HashMap<String, u32>, StoreError> {
        let groups = self.names.of(provider).groups();
        let mut all = redis::cmd("HGETALL");
        all.arg(&groups);
        let all = row(self.command(&groups, &all).await?)?;
        let cap = |text: &str| serde_json::from_str::<Learned>(text).ok()?.cap_at(now);
        Ok(all.into_iter().filter_map(|(group, text)| Some((group, cap(&text)?))).collect())
    }

    async fn lease_rows(
        &self,
        provider: &ProviderName,
        leases: &[LeaseId],
    ) -> Result<Vec<(LeaseId, Row)>, StoreError> {
        let names = self.names.of(provider);
        let mut rows = Vec::with_capacity(leases.len());
        for leases in leases.chunks(AT_ONCE) {
            let mut pipe = redis::pipe();
            for lease in leases {
                pipe.cmd("HGETALL").arg(names.lease(*lease));
            }
            let mut answer = self.pipe(&pipe).await?;
            for lease in leases {
                rows.push((*lease, row(answer.value()?)?));
            }
        }
        Ok(rows)
    }

    /// One sidecar at a time; the others find the right taken and do nothing.
    pub(super) async fn reconcile(&self, provider: ProviderName) -> Result<u64, StoreError> {
        let names = self.names.of(&provider);
        let mut lock = redis::cmd("SET");
        lock.arg(names.reconcile()).arg(&self.name).arg("NX").arg("PX").arg(RECONCILE_LOCK_MS);
        if self.command(&names.reconcile(), &lock).await? == Value::Nil {
            return Ok(0);
        }
        let done = self.reconcile_all(&provider).await;
        let mut unlock = redis::cmd("DEL");
        unlock.arg(names.reconcile());
        // Should this fail, the right runs out by itself.
        let _ = self.command(&names.reconcile(), &unlock).await;
        done
    }

    async fn reconcile_all(&self, provider: &ProviderName) -> Result<u64, StoreError> {
        self.look_at_clock().await?;
        let seen = self.look_at_keys(provider, self.clock.now()).await?;
        let mut suspects: HashMap<KeyId, Vec<LeaseId>> = HashMap::new();
        for key in &seen {
            for (lease, row) in self.lease_rows(provider, &key.slots).await? {
                if row.is_empty() {
                    suspects.entry(key.id.clone()).or_default().push(lease);
                }
            }
        }
        let slots: HashMap<LeaseId, &KeyId> =
            seen.iter().flat_map(|key| key.slots.iter().map(|lease| (*lease, &key.id))).collect();
        let found = self.leases_by_name(provider).await?;
        let without_slot: Vec<LeaseId> =
            found.into_iter().filter(|lease| !slots.contains_key(lease)).collect();
        for (lease, row) in self.lease_rows(provider, &without_slot).await? {
            if let Some(key) = row.get("key_id").and_then(|key| KeyId::parse(key).ok()) {
                suspects.entry(key).or_default().push(lease);
            }
        }
        let mut repaired = 0;
        for key in &seen {
            let leases = suspects.remove(&key.id).unwrap_or_default();
            let group = group_in(&key.row).and_then(|group| GroupName::parse(group).ok());
            repaired += self.repair(provider, &key.id, (key.row.get("pool"), group), &leases).await?;
        }
        for (key, leases) in suspects {
            repaired += self.repair(provider, &key, (None, None), &leases).await?;
        }
        Ok(repaired)
    }

    /// Every lease by its name, up to a bound; what was not reached is found the next time, since a search
    /// begins at another place when names come and go.
    async fn leases_by_name(&self, provider: &ProviderName) -> Result<Vec<LeaseId>, StoreError> {
        let names = self.names.of(provider);
        let mut cursor = "0".to_owned();
        let mut found = Vec::new();
        for _ in 0..SCAN_STEPS {
            let mut scan = redis::cmd("SCAN");
            scan.arg(&cursor).arg("MATCH").arg(names.all_leases()).arg("COUNT").arg(SCAN_COUNT);
            let mut answer = Reader::of(self.command(&names.keys(), &scan).await?)?;
            cursor = answer.text()?;
            let mut listed = answer.list()?;
            while !listed.is_empty() {
                found.extend(names.lease_of(&listed.text()?));
            }
            if cursor == "0" {
                break;
            }
        }
        Ok(found)
    }

    async fn repair(
        &self,
        provider: &ProviderName,
        key: &KeyId,
        (pool, group): (Option<&String>, Option<GroupName>),
        leases: &[LeaseId],
    ) -> Result<u64, StoreError> {
        let names = self.names.of(provider);
        let pool = pool.and_then(|pool| PoolName::parse(pool).ok());
        let mut call = Call::default();
        call.key(names.cooldowns()).key(names.fingerprints()).key(names.keys());
        call.key(names.key(key)).key(names.leases(key));
        call.key(names.pool(pool.as_ref().unwrap_or(&PoolName::default_pool())));
        call.key(names.groups());
        call.key(group.map_or_else(|| names.leases(key), |group| names.crowd(&group)));
        call.arg(key.as_str()).arg(pool.as_ref().map_or("", PoolName::as_str)).number(KEPT_UNSEEN_MS);
        for lease in leases {
            call.key(names.lease(*lease)).arg(lease.to_string());
        }
        self.run(&self.scripts.reconcile, &call).await?.count()
    }
}

fn row(value: Value) -> Result<Row, StoreError> {
    let mut listed = Reader::of(value)?;
    let mut row = Row::new();
    while !listed.is_empty() {
        let field = listed.text()?;
        row.insert(field, text(listed.value()?)?);
    }
    Ok(row)
}

fn time_in(row: &Row, field: &str) -> Option<StoreTime> {
    let ms = number(&Value::BulkString(row.get(field)?.clone().into_bytes())).ok()?;
    u64::try_from(ms).ok().map(StoreTime)
}

fn own_rests(key: &Seen) -> impl Iterator<Item = (Subject, Rest)> {
    key.row.iter().filter_map(|(field, rest)| {
        let secret = parse_fingerprint(field.strip_prefix("rest:")?)?;
        Some((Subject::Key(key.id.clone(), secret), parse_rest(rest)?))
    })
}

/// Its group, where it is known: for `auto` what answers with the present secret have named.
fn group_in(row: &Row) -> Option<&str> {
    let group = row.get("group")?;
    if !GroupName::parse(group).ok()?.is_auto() {
        return Some(group);
    }
    row.get(&format!("group:{}", row.get("fingerprint")?)).map(String::as_str)
}

/// `None` for a key that only a reasserted lease speaks of.
fn facts(key: &Seen, group_caps: &HashMap<String, u32>, now: StoreTime) -> Option<Facts> {
    let field = |name: &str| key.row.get(name).map(String::as_str);
    let cap = field("max_concurrent_uses").and_then(|cap| cap.parse().ok()).unwrap_or(1).max(1);
    let learned = || {
        let cap = field("learned_cap")?.parse().ok()?;
        Learned { cap, since: time_in(&key.row, "learned_at_ms")? }.cap_at(now)
    };
    let group = group_in(&key.row);
    Some(Facts {
        id: key.id.clone(),
        pool: PoolName::parse(field("pool")?).ok()?,
        group: group.or(field("group")).and_then(|group| group.parse().ok()),
        fingerprint: field("fingerprint").and_then(parse_fingerprint),
        cap,
        learned: learned().filter(|learned| *learned < cap),
        group_learned: group.and_then(|group| group_caps.get(group).copied()),
        disabled: field("status") == Some("disabled"),
        drained: field("drained").is_some(),
        in_use: u32::try_from(key.slots.len()).unwrap_or(u32::MAX),
        last_used_at: time_in(&key.row, "last_used_at_ms"),
    })
}

fn lease_view(provider: &ProviderName, id: LeaseId, row: &Row) -> Option<LeaseView> {
    let field = |name: &str| row.get(name).map(String::as_str);
    Some(LeaseView {
        id,
        key_id: KeyId::parse(field("key_id")?).ok()?,
        provider: provider.clone(),
        pool: PoolName::parse(field("pool")?).ok()?,
        app: AppName::parse(field("app")?).ok()?,
        owner: OwnerId(field("owner")?.into()),
        fencing_token: FencingToken(field("fencing_token")?.parse().ok()?),
        expires_at_ms: time_in(row, "expires_at_ms"),
        revoked: row.contains_key("revoked"),
    })
}

//! Ledgers as rows.

use std::collections::HashMap;
use std::fmt::Display;
use std::str::FromStr;

use rusqlite::{Connection, OptionalExtension as _, Row, Statement};

use super::errors::Fault;
use crate::model::{FencingToken, Fingerprint, GroupName, LeaseId, OwnerId, ProviderName};
use crate::store::rules::learned::Learned;
use crate::store::rules::parts::Head;
use crate::store::rules::{Key, Lease, Ledger, Settings};
use crate::store::text::{
    clearable_text, groups_text, parse_clearable, parse_groups, parse_rest, parse_subject, rest_text,
    subject_text,
};
use crate::store::{Epoch, StoreTime};

/// A provider's ledger, as far as the file and this process agree on it.
pub(super) struct Kept {
    pub(super) ledger: Ledger,
    /// Which provider it is in the file.
    id: i64,
    /// The file's count of changes that this ledger includes.
    changes: i64,
    /// What the provider's row says.
    head: Head,
}

impl Kept {
    /// Whether the file has not changed since.
    pub(super) fn is_current(&self, changes: i64, epoch: &str) -> bool {
        self.changes == changes && &*self.head.epoch.0 == epoch
    }
}

/// Every statement on the file, prepared once.
pub(super) struct Rows<'c> {
    find_provider: Statement<'c>,
    add_provider: Statement<'c>,
    set_provider: Statement<'c>,
    all_keys: Statement<'c>,
    set_key: Statement<'c>,
    drop_key: Statement<'c>,
    all_leases: Statement<'c>,
    set_lease: Statement<'c>,
    drop_lease: Statement<'c>,
    drop_strays: Statement<'c>,
    all_rests: Statement<'c>,
    set_rest: Statement<'c>,
    drop_rest: Statement<'c>,
    all_group_caps: Statement<'c>,
    set_group_cap: Statement<'c>,
    drop_group_cap: Statement<'c>,
    all_cleared: Statement<'c>,
    set_cleared: Statement<'c>,
    drop_cleared: Statement<'c>,
}

impl<'c> Rows<'c> {
    pub(super) fn new(conn: &'c Connection) -> rusqlite::Result<Self> {
        Ok(Self {
            find_provider: conn.prepare(
                "SELECT id, changes, epoch, grace_until_ms, last_token FROM providers WHERE name = ?",
            )?,
            add_provider: conn
                .prepare("INSERT INTO providers (name, changes, epoch, last_token) VALUES (?, 1, ?, 0) RETURNING id")?,
            set_provider: conn.prepare(
                "UPDATE providers SET changes = ?2, epoch = ?3, grace_until_ms = ?4, last_token = ?5 WHERE id = ?1",
            )?,
            all_keys: conn.prepare(
                "SELECT id, pool, key_group, max_concurrent_uses, fingerprint, disabled, learned_cap,
                 learned_at_ms, last_used_at_ms, seen_at_ms, learned_groups FROM keys WHERE provider = ?",
            )?,
            set_key: conn.prepare(
                "REPLACE INTO keys (provider, id, pool, key_group, max_concurrent_uses, fingerprint, disabled,
                 learned_cap, learned_at_ms, last_used_at_ms, seen_at_ms, learned_groups)
                 VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            )?,
            drop_key: conn.prepare("DELETE FROM keys WHERE provider = ? AND id = ?")?,
            all_leases: conn.prepare(
                "SELECT id, key_id, pool, fingerprint, fencing_token, owner, app, expires_at_boot_ms,
                 revoked, probe, wants_success, key_group FROM leases WHERE provider = ?",
            )?,
            set_lease: conn.prepare(
                "REPLACE INTO leases (provider, id, key_id, pool, fingerprint, fencing_token, owner, app,
                 expires_at_boot_ms, revoked, probe, wants_success, key_group)
                 VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            )?,
            drop_lease: conn.prepare("DELETE FROM leases WHERE provider = ? AND id = ?")?,
            drop_strays: conn.prepare(
                "DELETE FROM leases WHERE provider = ?1
                 AND key_id NOT IN (SELECT id FROM keys WHERE provider = ?1)",
            )?,
            all_rests: conn.prepare("SELECT subject, rest FROM rests WHERE provider = ?")?,
            set_rest: conn.prepare("REPLACE INTO rests VALUES (?, ?, ?)")?,
            drop_rest: conn.prepare("DELETE FROM rests WHERE provider = ? AND subject = ?")?,
            all_group_caps: conn
                .prepare("SELECT key_group, cap, since_ms FROM group_caps WHERE provider = ?")?,
            set_group_cap: conn.prepare(
                "REPLACE INTO group_caps (provider, key_group, cap, since_ms) VALUES (?, ?, ?, ?)",
            )?,
            drop_group_cap: conn.prepare("DELETE FROM group_caps WHERE provider = ? AND key_group = ?")?,
            all_cleared: conn.prepare("SELECT what, token FROM cleared WHERE provider = ?")?,
            set_cleared: conn.prepare("REPLACE INTO cleared (provider, what, token) VALUES (?, ?, ?)")?,
            drop_cleared: conn.prepare("DELETE FROM cleared WHERE provider = ? AND what = ?")?,
        })
    }

    /// How often a provider's rows were written, and its epoch; `None` where it has none.
    pub(super) fn changes(&mut self, name: &ProviderName) -> rusqlite::Result<Option<(i64, String)>> {
        let found = self.find_provider.query_row([name.as_str()], |row| Ok((row.get(1)?, row.get(2)?)));
        found.optional()
    }

    /// A provider's ledger; `None` where the file has none.
    pub(super) fn load(&mut self, name: &ProviderName, offset: u64) -> Result<Option<Kept>, Fault> {
        let found = self.find_provider.query_row([name.as_str()], |row| {
            let head = Head {
                epoch: Epoch(row.get(2)?),
                grace_until: time(row.get(3)?),
                last_token: FencingToken(row.get::<_, i64>(4)?.cast_unsigned()),
            };
            Ok((row.get::<_, i64>(0)?, row.get::<_, i64>(1)?, head))
        });
        let Some((id, changes, head)) = found.optional()? else { return Ok(None) };
        let of_provider = |what: &str| format!("{what} of provider `{name}` cannot be read");
        let mut keys = HashMap::new();
        let mut read = self.all_keys.query([id])?;
        while let Some(row) = read.next()? {
            let key = key_of(row)?;
            keys.insert(named(row, 0)?, key);
        }
        drop(read);
        let mut leases = HashMap::new();
        let mut read = self.all_leases.query([id])?;
        while let Some(row) = read.next()? {
            leases.insert(LeaseId(uuid::Uuid::from_bytes(row.get(0)?)), lease_of(row, offset)?);
        }
        drop(read);
        let mut rests = HashMap::new();
        let mut read = self.all_rests.query([id])?;
        while let Some(row) = read.next()? {
            let (subject, rest): (String, String) = (row.get(0)?, row.get(1)?);
            let subject =
                parse_subject(&subject).ok_or_else(|| Fault::Row(of_provider("a cooldown's subject")))?;
            rests.insert(subject, parse_rest(&rest).ok_or_else(|| Fault::Row(of_provider("a cooldown")))?);
        }
        drop(read);
        let mut group_caps = HashMap::new();
        let mut read = self.all_group_caps.query([id])?;
        while let Some(row) = read.next()? {
            let since = StoreTime(row.get::<_, i64>(2)?.cast_unsigned());
            group_caps.insert(named(row, 0)?, Learned { cap: row.get(1)?, since });
        }
        drop(read);
        let mut cleared = HashMap::new();
        let mut read = self.all_cleared.query([id])?;
        while let Some(row) = read.next()? {
            let (what, token): (String, i64) = (row.get(0)?, row.get(1)?);
            let what = parse_clearable(&what).ok_or_else(|| Fault::Row(of_provider("what was cleared")))?;
            cleared.insert(what, FencingToken(token.cast_unsigned()));
        }
        drop(read);
        let ledger = Ledger::of_parts(name.clone(), head.clone(), keys, leases, rests, group_caps, cleared);
        Ok(Some(Kept { ledger, id, changes, head }))
    }

    /// A provider that the file does not know, in a life of its own.
    pub(super) fn add(&mut self, name: &ProviderName) -> Result<Kept, Fault> {
        let epoch = Epoch(uuid::Uuid::now_v7().simple().to_string().into());
        let id = self.add_provider.query_row((name.as_str(), &*epoch.0), |row| row.get(0))?;
        let head = Head { epoch, grace_until: None, last_token: FencingToken(0) };
        let (keys, leases) = (HashMap::new(), HashMap::new());
        let (rests, group_caps, cleared) = (HashMap::new(), HashMap::new(), HashMap::new());
        let ledger = Ledger::of_parts(name.clone(), head.clone(), keys, leases, rests, group_caps, cleared);
        Ok(Kept { ledger, id, changes: 1, head })
    }

    /// Writes what was touched; whether there was anything.
    pub(super) fn save(&mut self, kept: &mut Kept, offset: u64) -> rusqlite::Result<bool> {
        let Kept { ledger, id, changes, head } = kept;
        let touched = ledger.take_touched();
        let mut wrote = false;
        for (name, was) in touched.keys {
            match ledger.key(&name) {
                Some(key) => self.write_key(*id, name.as_str(), key)?,
                None if was => self.drop_key.execute((*id, name.as_str()))?,
                None => continue,
            };
            wrote = true;
        }
        for (lease, was) in touched.leases {
            match ledger.lease(lease) {
                Some(held) => self.write_lease(*id, lease, held, offset)?,
                None if was => self.drop_lease.execute((*id, &lease.0.as_bytes()[..]))?,
                None => continue,
            };
            wrote = true;
        }
        for (subject, was) in touched.rests {
            let text = subject_text(&subject);
            match ledger.rest(&subject) {
                Some(rest) => self.set_rest.execute((*id, text, rest_text(rest)))?,
                None if was => self.drop_rest.execute((*id, text))?,
                None => continue,
            };
            wrote = true;
        }
        for (group, was) in touched.group_caps {
            match ledger.group_cap(&group) {
                Some(Learned { cap, since }) => {
                    self.set_group_cap.execute((*id, group.as_str(), cap, since.0.cast_signed()))?
                }
                None if was => self.drop_group_cap.execute((*id, group.as_str()))?,
                None => continue,
            };
            wrote = true;
        }
        for (what, was) in touched.cleared {
            let text = clearable_text(&what);
            match ledger.cleared(&what) {
                Some(token) => self.set_cleared.execute((*id, text, token.0.cast_signed()))?,
                None if was => self.drop_cleared.execute((*id, text))?,
                None => continue,
            };
            wrote = true;
        }
        let now = ledger.head();
        if !wrote && now == *head {
            return Ok(false);
        }
        *changes += 1;
        self.set_provider.execute((
            *id,
            *changes,
            &*now.epoch.0,
            now.grace_until.map(|grace| grace.0.cast_signed()),
            now.last_token.0.cast_signed(),
        ))?;
        *head = now;
        Ok(true)
    }

    /// Drops leases of keys that are not known; how many there were.
    pub(super) fn drop_strays(&mut self, kept: &Kept) -> rusqlite::Result<usize> {
        self.drop_strays.execute([kept.id])
    }

    fn write_key(&mut self, provider: i64, name: &str, key: &Key) -> rusqlite::Result<usize> {
        let Key { settings, disabled, drained, learned, groups, last_used_at, seen_at, leases: _ } = key;
        // 2: to be drained; who knows only of disabled keys reads it as that.
        let disabled = i64::from(*disabled) + i64::from(*disabled && *drained);
        let settings = settings.as_ref();
        self.set_key.execute((
            provider,
            name,
            settings.map(|settings| settings.pool.as_str()),
            settings.and_then(|settings| settings.group.as_ref()).map(GroupName::as_str),
            settings.map(|settings| settings.cap),
            settings.and_then(|settings| settings.fingerprint).map(|secret| secret.0),
            disabled,
            learned.map(|learned| learned.cap),
            learned.map(|learned| learned.since.0.cast_signed()),
            last_used_at.map(|used| used.0.cast_signed()),
            seen_at.0.cast_signed(),
            groups_text(groups),
        ))
    }

    fn write_lease(
        &mut self,
        provider: i64,
        id: LeaseId,
        lease: &Lease,
        offset: u64,
    ) -> rusqlite::Result<usize> {
        let Lease {
            key,
            pool,
            fingerprint,
            token,
            owner,
            app,
            group,
            expires_at,
            revoked,
            probe,
            wants_success,
        } = lease;
        self.set_lease.execute((
            provider,
            &id.0.as_bytes()[..],
            key.as_str(),
            pool.as_str(),
            fingerprint.0,
            token.0.cast_signed(),
            &*owner.0,
            app.as_str(),
            expires_at.0.wrapping_sub(offset).cast_signed(),
            revoked,
            probe,
            wants_success,
            group.as_ref().map(GroupName::as_str),
        ))
    }
}

fn key_of(row: &Row<'_>) -> Result<Key, Fault> {
    let settings = match row.get::<_, Option<String>>(1)? {
        None => None,
        Some(_) => Some(Settings {
            pool: named(row, 1)?,
            group: row.get::<_, Option<String>>(2)?.map(|_| named(row, 2)).transpose()?,
            cap: row.get(3)?,
            fingerprint: row.get::<_, Option<[u8; 32]>>(4)?.map(Fingerprint),
        }),
    };
    let learned = match (row.get(6)?, time(row.get(7)?)) {
        (Some(cap), Some(since)) => Some(Learned { cap, since }),
        _ => None,
    };
    let disabled: i64 = row.get(5)?;
    Ok(Key {
        settings,
        disabled: disabled != 0,
        drained: disabled == 2,
        learned,
        groups: row.get::<_, Option<String>>(10)?.as_deref().map(parse_groups).unwrap_or_default(),
        last_used_at: time(row.get(8)?),
        seen_at: StoreTime(row.get::<_, i64>(9)?.cast_unsigned()),
        ..Key::default()
    })
}

fn lease_of(row: &Row<'_>, offset: u64) -> Result<Lease, Fault> {
    Ok(Lease {
        key: named(row, 1)?,
        pool: named(row, 2)?,
        fingerprint: Fingerprint(row.get(3)?),
        token: FencingToken(row.get::<_, i64>(4)?.cast_unsigned()),
        owner: OwnerId(row.get(5)?),
        app: named(row, 6)?,
        expires_at: StoreTime(row.get::<_, i64>(7)?.cast_unsigned().wrapping_add(offset)),
        revoked: row.get(8)?,
        probe: row.get(9)?,
        wants_success: row.get(10)?,
        group: row.get::<_, Option<String>>(11)?.map(|_| named(row, 11)).transpose()?,
    })
}

/// A name of ours in a column.
fn named<N: FromStr<Err: Display>>(row: &Row<'_>, column: usize) -> Result<N, Fault> {
    let text = row.get_ref(column)?.as_str().map_err(rusqlite::Error::from)?;
    text.parse().map_err(|cause| Fault::Row(format!("a name cannot be read: {cause}")))
}

fn time(kept: Option<i64>) -> Option<StoreTime> {
    kept.map(|ms| StoreTime(ms.cast_unsigned()))
}

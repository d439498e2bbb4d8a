//! One open file, and this process's copy of the ledgers in it.
//!
//! The rules work on the copies, in memory. A transaction brings them up to date where another process
//! wrote meanwhile, lets the operations run, and writes the rows they touched. What failed leaves no
//! copy behind: the next use reads the rows again.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::time::Duration;

use rusqlite::{Connection, OptionalExtension as _, Statement};

use super::clock::StoreClock;
use super::errors::Fault;
use super::rows::{Kept, Rows};
use crate::model::ProviderName;
use crate::store::rules::Ledger;
use crate::store::{StoreEvent, StoreTime};

/// How often to look for others' changes while somebody here waits for a key: what a waiter may lose.
const WAITING: Duration = Duration::from_millis(25);
/// How often while leases are held here: how long a revocation elsewhere may go unseen.
const HOLDING: Duration = Duration::from_millis(100);
/// How long somebody who was refused is taken to wait. Who waits longer asks again.
const WAITS: Duration = Duration::from_mins(1);

/// An open file and the ledgers in it.
pub(super) struct Book<'c> {
    conn: &'c Connection,
    begin: Statement<'c>,
    begin_reading: Statement<'c>,
    commit: Statement<'c>,
    version: Statement<'c>,
    meta: Statement<'c>,
    rows: Rows<'c>,
    ledgers: HashMap<ProviderName, Kept>,
    /// SQLite's word for "nobody else wrote since", as of when the ledgers were last compared.
    seen: Option<i64>,
    clock: StoreClock,
    news: Vec<StoreEvent>,
    /// Until when a lease may be held here.
    holding: StoreTime,
    /// Until when somebody may wait here.
    waiting: StoreTime,
}

impl<'c> Book<'c> {
    pub(super) fn new(conn: &'c Connection, clock: StoreClock) -> rusqlite::Result<Self> {
        Ok(Self {
            conn,
            begin: conn.prepare("BEGIN IMMEDIATE")?,
            begin_reading: conn.prepare("BEGIN")?,
            commit: conn.prepare("COMMIT")?,
            version: conn.prepare("PRAGMA data_version")?,
            meta: conn.prepare("SELECT boot_id, offset_ms FROM meta")?,
            rows: Rows::new(conn)?,
            ledgers: HashMap::new(),
            seen: None,
            clock,
            news: Vec::new(),
            holding: StoreTime(0),
            waiting: StoreTime(0),
        })
    }

    /// Takes the write lock, or fails at once.
    pub(super) fn begin(&mut self) -> rusqlite::Result<()> {
        // IMMEDIATE: a transaction that begins by reading cannot write once another has.
        self.begin.execute([]).map(drop)
    }

    /// Compares the ledgers with the file. Inside a transaction, so that nothing changes meanwhile.
    pub(super) fn catch_up(&mut self) -> Result<(), Fault> {
        let version = self.version.query_row([], |row| row.get(0))?;
        if self.seen == Some(version) {
            return Ok(());
        }
        let meta = self.meta.query_row([], |row| Ok((row.get::<_, String>(0)?, row.get::<_, i64>(1)?)));
        let Some((boot, offset)) = meta.optional()? else {
            return Err(Fault::Row("the row that says which boot it is of is missing".into()));
        };
        if boot != self.clock.boot() {
            return Err(Fault::Foreign);
        }
        self.clock.set_offset(offset.cast_unsigned());
        let names: Vec<ProviderName> = self.ledgers.keys().cloned().collect();
        for name in names {
            let Entry::Occupied(mut kept) = self.ledgers.entry(name) else { continue };
            match self.rows.changes(kept.key())? {
                Some((changes, epoch)) if kept.get().is_current(changes, &epoch) => {}
                _ => match self.rows.load(kept.key(), self.clock.offset()) {
                    Ok(Some(fresh)) => {
                        self.news.extend(kept.get().ledger.news(&fresh.ledger));
                        kept.insert(fresh);
                    }
                    // Whoever asks for a provider that cannot be read is told then; the others go on.
                    Ok(None) | Err(Fault::Row(_)) => drop(kept.remove()),
                    Err(fault) => return Err(fault),
                },
            }
        }
        self.seen = Some(version);
        Ok(())
    }

    /// Writes what was touched, and ends the transaction.
    pub(super) fn commit(&mut self) -> rusqlite::Result<()> {
        for kept in self.ledgers.values_mut() {
            self.rows.save(kept, self.clock.offset())?;
        }
        self.commit.execute([]).map(drop)
    }

    /// Ends the transaction, if one is open, as if it had not been.
    pub(super) fn give_up(&mut self) {
        if !self.conn.is_autocommit() {
            // Where even this fails the connection is of no more use, and the next BEGIN says so.
            let _ = self.conn.execute_batch("ROLLBACK");
        }
        self.ledgers.clear();
        self.news.clear();
        self.seen = None;
    }

    /// Looks whether others changed something that is known here.
    pub(super) fn look(&mut self) -> Result<(), Fault> {
        // Without a transaction of our own this opens one for the moment: no write lock, a few µs.
        let version: i64 = self.version.query_row([], |row| row.get(0))?;
        if self.seen == Some(version) {
            return Ok(());
        }
        self.begin_reading.execute([])?;
        self.catch_up()?;
        Ok(self.commit.execute([]).map(drop)?)
    }

    /// A provider's ledger, made where the file has none; and what time it is.
    pub(super) fn ledger(&mut self, name: &ProviderName) -> Result<(&mut Ledger, StoreTime), Fault> {
        let now = self.clock.now();
        let kept = match self.ledgers.entry(name.clone()) {
            Entry::Occupied(kept) => kept.into_mut(),
            Entry::Vacant(vacant) => {
                let kept = match self.rows.load(name, self.clock.offset())? {
                    Some(kept) => kept,
                    None => self.rows.add(name)?,
                };
                vacant.insert(kept)
            }
        };
        Ok((&mut kept.ledger, now))
    }

    /// Holds a provider's ledger against its rows, takes the rows' word, and drops what cannot be or what
    /// nobody needs; how many differences.
    pub(super) fn reconcile(&mut self, name: &ProviderName) -> Result<u64, Fault> {
        let now = self.clock.now();
        self.ledger(name)?;
        let mut found = 0;
        if let Some(kept) = self.ledgers.get_mut(name) {
            self.rows.save(kept, self.clock.offset())?;
            if let Some(fresh) = self.rows.load(name, self.clock.offset())? {
                found += kept.ledger.differences(&fresh.ledger);
                *kept = fresh;
            }
            found += self.rows.drop_strays(kept)?;
            found += kept.ledger.forget_unseen(now);
        }
        Ok(u64::try_from(found).unwrap_or(u64::MAX))
    }

    /// The salt of fingerprints, which is `known` or a fresh one where the file has none.
    pub(super) fn salt(&mut self, known: Option<[u8; 32]>) -> Result<[u8; 32], Fault> {
        let kept =
            self.conn.query_row("SELECT salt FROM meta", [], |row| row.get::<_, Option<[u8; 32]>>(0))?;
        if let Some(salt) = kept {
            return Ok(salt);
        }
        let salt = known.unwrap_or_else(rand::random);
        self.conn.execute("UPDATE meta SET salt = ?", [salt])?;
        Ok(salt)
    }

    /// Says something, once the transaction is through.
    pub(super) fn tell(&mut self, event: StoreEvent) {
        self.news.push(event);
    }

    /// What was said.
    pub(super) fn take_news(&mut self) -> Vec<StoreEvent> {
        std::mem::take(&mut self.news)
    }

    /// A lease may be held here until then: others may revoke it.
    pub(super) fn holds_until(&mut self, end: StoreTime) {
        self.holding = self.holding.max(end);
    }

    /// Somebody was refused here: others may make room.
    pub(super) fn somebody_waits(&mut self) {
        self.waiting = self.clock.now().plus(WAITS);
    }

    /// How often to look for others' changes; `None` while nothing they do matters here.
    pub(super) fn look_every(&self) -> Option<Duration> {
        let now = self.clock.now();
        if now < self.waiting { Some(WAITING) } else { (now < self.holding).then_some(HOLDING) }
    }
}

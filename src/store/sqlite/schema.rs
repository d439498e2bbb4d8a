//! Opening the file: its layout, and what a new boot changes in it.

use std::path::Path;
use std::time::{Duration, Instant};

use rusqlite::{Connection, ErrorCode, OpenFlags, OptionalExtension as _, Transaction, TransactionBehavior};

use super::clock::StoreClock;
use super::errors::{Fault, OpenError};
use super::place::{Files, Folder};
use super::rows::Rows;

/// Marks the file as lessor's: `LSSR`.
const APPLICATION: i64 = 0x4c53_5352;
/// The layout this binary writes. Fields are only ever added; a newer layout is refused.
pub(super) const LAYOUT: i64 = 1;

/// Times are ms since the epoch on the store's clock, save a lease's end, which is ms since boot. Tokens
/// and times are unsigned 64-bit numbers kept by their bits in SQLite's signed ones.
const TABLES: &str = "
CREATE TABLE meta (
    id          INTEGER PRIMARY KEY CHECK (id = 1),
    boot_id     TEXT    NOT NULL, -- the start of the machine that leases belong to
    offset_ms   INTEGER NOT NULL, -- wall clock minus time since boot, fixed once per boot
    salt        BLOB              -- of fingerprints
) STRICT;
CREATE TABLE providers (
    id              INTEGER PRIMARY KEY,
    name            TEXT    NOT NULL UNIQUE,
    changes         INTEGER NOT NULL, -- rises with every write of the provider's rows
    epoch           TEXT    NOT NULL,
    grace_until_ms  INTEGER,
    last_token      INTEGER NOT NULL
) STRICT;
CREATE TABLE keys (
    provider            INTEGER NOT NULL,
    id                  TEXT    NOT NULL,
    pool                TEXT,    -- NULL while only a reasserted lease speaks of the key
    key_group           TEXT,
    max_concurrent_uses INTEGER,
    fingerprint         BLOB,
    disabled            INTEGER NOT NULL,
    learned_cap         INTEGER,
    learned_at_ms       INTEGER,
    last_used_at_ms     INTEGER,
    seen_at_ms          INTEGER NOT NULL,
    PRIMARY KEY (provider, id)
) STRICT, WITHOUT ROWID;
CREATE TABLE leases (
    provider            INTEGER NOT NULL,
    id                  BLOB    NOT NULL,
    key_id              TEXT    NOT NULL,
    pool                TEXT    NOT NULL,
    fingerprint         BLOB    NOT NULL,
    fencing_token       INTEGER NOT NULL,
    owner               TEXT    NOT NULL,
    app                 TEXT    NOT NULL,
    expires_at_boot_ms  INTEGER NOT NULL,
    revoked             INTEGER NOT NULL,
    probe               INTEGER NOT NULL,
    wants_success       INTEGER NOT NULL,
    PRIMARY KEY (provider, id)
) STRICT, WITHOUT ROWID;
CREATE TABLE rests (
    provider  INTEGER NOT NULL,
    subject   TEXT    NOT NULL,
    rest      TEXT    NOT NULL, -- JSON
    PRIMARY KEY (provider, subject)
) STRICT, WITHOUT ROWID;
";

/// What layout 1 has beside that: added to files that were made without it.
const ADDED: &str = "
CREATE TABLE IF NOT EXISTS group_caps ( -- how many uses at once the provider allows a group
    provider  INTEGER NOT NULL,
    key_group TEXT    NOT NULL,
    cap       INTEGER NOT NULL,
    since_ms  INTEGER NOT NULL,
    PRIMARY KEY (provider, key_group)
) STRICT, WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS cleared ( -- what a person cleared, and the newest token as of then
    provider  INTEGER NOT NULL,
    what      TEXT    NOT NULL,
    token     INTEGER NOT NULL,
    PRIMARY KEY (provider, what)
) STRICT, WITHOUT ROWID;
";
/// The same for columns: the groups that answers named, as JSON by fingerprint; the group a lease counts in.
const ADDED_COLUMNS: [(&str, &str); 2] = [("keys", "learned_groups"), ("leases", "key_group")];

/// The file that lies at `path`, ready for use and made where there is none; and which files these are.
/// `left` are those of a database that was open before.
pub(super) fn open(
    path: &Path,
    clock: &StoreClock,
    left: Option<Files>,
) -> Result<(Connection, Files), OpenError> {
    let folder = Folder::of(path)?;
    let before = folder.file(left)?;
    // Not by URI: a path with `?` in it is a path.
    let flags = OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_NO_MUTEX;
    let failed = |cause| OpenError::of(path, cause);
    let mut conn = Connection::open_with_flags(path, flags).map_err(failed)?;
    conn.busy_timeout(super::PATIENCE).map_err(failed)?;
    look(&conn, path)?;
    log_ahead(&conn, path)?;
    {
        let work = conn.transaction_with_behavior(TransactionBehavior::Immediate).map_err(failed)?;
        look(&work, path)?;
        set_up(&work, clock).map_err(|fault| match fault {
            Fault::Sqlite(cause) => OpenError::of(path, cause),
            Fault::Row(_) | Fault::Foreign => OpenError::NotADatabase { file: path.to_path_buf() },
        })?;
        work.commit().map_err(failed)?;
    }
    // From here on the thread waits for locks itself, so that it can answer those who have waited enough.
    conn.busy_timeout(Duration::ZERO).map_err(failed)?;
    let files = Files::at(path);
    if !files.is_database_of(&before) {
        return Err(OpenError::Moved { file: path.to_path_buf() });
    }
    Ok((conn, files))
}

/// Whether it is a file of ours that we can read.
fn look(conn: &Connection, path: &Path) -> Result<(), OpenError> {
    let number = |pragma: &str| {
        let number = conn.query_row(pragma, [], |row| row.get::<_, i64>(0));
        number.map_err(|cause| OpenError::of(path, cause))
    };
    let (application, layout) = (number("PRAGMA application_id")?, number("PRAGMA user_version")?);
    let tables = number("SELECT count(*) FROM sqlite_schema")?;
    let file = || path.to_path_buf();
    match application {
        APPLICATION if layout > LAYOUT => {
            Err(OpenError::Newer { file: file(), found: layout, known: LAYOUT })
        }
        APPLICATION => Ok(()),
        0 if layout == 0 && tables == 0 => Ok(()),
        _ => Err(OpenError::NotOurs { file: file() }),
    }
}

/// Switches to a write-ahead log and sets what holds for this connection.
fn log_ahead(conn: &Connection, path: &Path) -> Result<(), OpenError> {
    let failed = |cause| OpenError::of(path, cause);
    let began = Instant::now();
    // The switch is the one statement that fails at once, whatever the timeout, where another reads.
    let mode = loop {
        match conn.query_row("PRAGMA journal_mode = WAL", [], |row| row.get::<_, String>(0)) {
            Err(cause)
                if cause.sqlite_error_code() == Some(ErrorCode::DatabaseBusy)
                    && began.elapsed() < super::PATIENCE =>
            {
                std::thread::sleep(Duration::from_millis(rand::random_range(1..20)));
            }
            other => break other.map_err(failed)?,
        }
    };
    if mode != "wal" {
        return Err(OpenError::NoLog { file: path.to_path_buf(), mode });
    }
    // NORMAL: after a power cut the last commits may be gone, and with them the boot that their leases
    // belonged to. A log of 1000 pages is 4 MiB; what a burst made of it beyond that is cut off again.
    conn.execute_batch(
        "PRAGMA synchronous = NORMAL;
         PRAGMA wal_autocheckpoint = 1000;
         PRAGMA cache_size = -1024;
         PRAGMA temp_store = MEMORY;
         PRAGMA trusted_schema = OFF;",
    )
    .map_err(failed)?;
    conn.query_row("PRAGMA journal_size_limit = 4194304", [], |_| Ok(())).map_err(failed)
}

/// Makes the tables where there are none, and drops what an earlier boot left.
fn set_up(work: &Transaction<'_>, clock: &StoreClock) -> Result<(), Fault> {
    let made: i64 = work.query_row("SELECT count(*) FROM sqlite_schema", [], |row| row.get(0))?;
    if made == 0 {
        work.execute_batch(TABLES)?;
        work.execute_batch(&format!(
            "PRAGMA application_id = {APPLICATION}; PRAGMA user_version = {LAYOUT};"
        ))?;
    }
    work.execute_batch(ADDED)?;
    for (table, column) in ADDED_COLUMNS {
        let there = format!("SELECT count(*) FROM pragma_table_info('{table}') WHERE name = '{column}'");
        if work.query_row(&there, [], |row| row.get::<_, i64>(0))? == 0 {
            work.execute_batch(&format!("ALTER TABLE {table} ADD COLUMN {column} TEXT"))?;
        }
    }
    let known = work
        .query_row("SELECT boot_id, offset_ms FROM meta", [], |row| {
            Ok((row.get::<_, String>(0)?, row.get::<_, i64>(1)?))
        })
        .optional()?;
    match known {
        Some((boot, offset)) if boot == clock.boot() => {
            clock.set_offset(offset.cast_unsigned());
            return Ok(());
        }
        Some(_) => after_boot(work, clock)?,
        None => {}
    }
    // The clock in use stays, if one is: a file that was lost and made anew must not move time.
    work.execute(
        "INSERT INTO meta (id, boot_id, offset_ms) VALUES (1, ?1, ?2)
         ON CONFLICT (id) DO UPDATE SET boot_id = ?1, offset_ms = ?2",
        (clock.boot(), clock.offset().cast_signed()),
    )?;
    Ok(())
}

/// Leases of an earlier boot are nobody's; what rests goes on resting, within bounds.
fn after_boot(work: &Transaction<'_>, clock: &StoreClock) -> Result<(), Fault> {
    let names = {
        let mut names = work.prepare("SELECT name FROM providers")?;
        let names = names.query_map([], |row| row.get::<_, String>(0))?;
        names.collect::<Result<Vec<_>, _>>()?
    };
    let mut rows = Rows::new(work)?;
    for name in names {
        let name = name
            .parse()
            .map_err(|_| Fault::Row(format!("the provider `{name}` has a name that cannot be")))?;
        if let Some(mut kept) = rows.load(&name, clock.offset())? {
            kept.ledger.after_boot(clock.now());
            rows.save(&mut kept, clock.offset())?;
        }
    }
    work.execute("DELETE FROM leases", [])?;
    Ok(())
}

//! What can be wrong with the file, in words that say what to do next.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rusqlite::ErrorCode;

use crate::store::StoreError;

/// Why the file could not be opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// No file is named.
    #[error("store.url names no file; write sqlite:///var/lib/lessor/state.db, say")]
    NoPath {
        /// Why.
        #[source]
        cause: io::Error,
    },
    /// The folder is not there.
    #[error("{} is no folder; make it, or change store.url", folder.display())]
    NoFolder {
        /// The folder.
        folder: PathBuf,
    },
    /// Nothing can be made in the folder.
    #[error(
        "folder {} cannot be written to, and SQLite keeps files beside the database; change its owner \
         or mode, or store.url", folder.display()
    )]
    FolderUnwritable {
        /// The folder.
        folder: PathBuf,
        /// Why.
        #[source]
        cause: io::Error,
    },
    /// The file is there but not for this user.
    #[error("{} cannot be read and written; change its owner or mode, or store.url", file.display())]
    FileUnwritable {
        /// The file.
        file: PathBuf,
        /// Why.
        #[source]
        cause: io::Error,
    },
    /// The folder is not this host's own.
    #[error(
        "folder {} is on {kind}, where SQLite's locks do not hold; use a local folder, or redis:// \
         for several hosts", folder.display()
    )]
    Remote {
        /// The folder.
        folder: PathBuf,
        /// Its file system.
        kind: String,
    },
    /// Not a database, or a damaged one.
    #[error("{} is not a sound SQLite database; move it away, and lessor starts with an empty one", file.display())]
    NotADatabase {
        /// The file.
        file: PathBuf,
    },
    /// A database, but of something else.
    #[error("{} is the database of another program; name another file in store.url", file.display())]
    NotOurs {
        /// The file.
        file: PathBuf,
    },
    /// A later lessor wrote it.
    #[error(
        "{} was written by a newer lessor (layout {found}, this one knows {known}); run the newer one, \
         or name another file in store.url", file.display()
    )]
    Newer {
        /// The file.
        file: PathBuf,
        /// Its layout.
        found: i64,
        /// The newest that is known here.
        known: i64,
    },
    /// Nothing says which start of the machine this is.
    #[error("{path} cannot be read, so nothing tells leases of this boot from older ones; use another store")]
    NoClock {
        /// Where it should stand.
        path: &'static str,
        /// Why.
        #[source]
        cause: io::Error,
    },
    /// Somebody holds a lock.
    #[error("the database was locked by another process for {waited:?}; see with fuser who holds it")]
    Busy {
        /// How long.
        waited: Duration,
    },
    /// The file was taken away while it was opened.
    #[error("{} was moved or deleted while it was opened; try again", file.display())]
    Moved {
        /// The file.
        file: PathBuf,
    },
    /// This file cannot have a write-ahead log.
    #[error("{} cannot be used with a write-ahead log (got `{mode}`); use a local folder", file.display())]
    NoLog {
        /// The file.
        file: PathBuf,
        /// The mode it has instead.
        mode: String,
    },
    /// The thread that owns the file could not be started.
    #[error("the store's thread could not be started; raise the limit of processes")]
    NoThread(#[source] io::Error),
    /// Whatever else SQLite says.
    #[error("{} could not be opened", file.display())]
    Sqlite {
        /// The file.
        file: PathBuf,
        /// What SQLite said.
        #[source]
        cause: rusqlite::Error,
    },
}

impl OpenError {
    /// What SQLite said while opening, as one of the above.
    pub(super) fn of(file: &Path, cause: rusqlite::Error) -> Self {
        let file = file.to_path_buf();
        match cause.sqlite_error_code() {
            Some(ErrorCode::NotADatabase | ErrorCode::DatabaseCorrupt) => Self::NotADatabase { file },
            Some(ErrorCode::DatabaseBusy | ErrorCode::DatabaseLocked) => {
                Self::Busy { waited: super::PATIENCE }
            }
            _ => Self::Sqlite { file, cause },
        }
    }
}

impl From<OpenError> for StoreError {
    fn from(error: OpenError) -> Self {
        let cause = std::error::Error::source(&error).map(|cause| format!(": {cause}"));
        Self::Unavailable(format!("{error}{}", cause.unwrap_or_default()))
    }
}

/// Why an operation did not run.
#[derive(Debug)]
pub(super) enum Fault {
    /// What SQLite said.
    Sqlite(rusqlite::Error),
    /// What was found in a row.
    Row(String),
    /// The file is used from under another kernel.
    Foreign,
}

impl From<rusqlite::Error> for Fault {
    fn from(cause: rusqlite::Error) -> Self {
        Self::Sqlite(cause)
    }
}

impl Fault {
    /// The same for those who called.
    pub(super) fn told(&self, file: &Path) -> StoreError {
        let file = file.display();
        match self {
            Self::Row(what) => StoreError::Nonsense(format!(
                "{what} in {file}; move it away, and lessor starts with an empty one"
            )),
            Self::Foreign => StoreError::Unavailable(format!(
                "{file} was opened on another machine, or in a sandbox with a kernel of its own; use redis:// \
                 for several hosts"
            )),
            Self::Sqlite(cause) => StoreError::Unavailable(match cause.sqlite_error_code() {
                Some(ErrorCode::DiskFull) => {
                    format!("no space left to write {file}; free some, and it goes on")
                }
                Some(ErrorCode::DatabaseBusy | ErrorCode::DatabaseLocked) => {
                    format!("{file} is locked by another process; see with fuser who holds it")
                }
                Some(ErrorCode::DatabaseCorrupt | ErrorCode::NotADatabase) => {
                    format!("{file} is damaged; move it away, and lessor starts with an empty one")
                }
                _ => format!("{file}: {cause}"),
            }),
        }
    }
}

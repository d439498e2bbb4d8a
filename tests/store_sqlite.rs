//! The SQLite store: the contract, the rules' own model as its measure, several processes on one file,
//! and what a file can suffer.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::pedantic, unreachable_pub)]

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use lessor::store::Store;
use lessor::store::sqlite::{Clock, SqliteStore};
use tempfile::TempDir;

mod sqlite_faults;
mod sqlite_files;
mod sqlite_shared;
mod store_contract;
mod store_twin;
mod store_world;
mod support;

/// A machine whose clocks are turned by hand.
#[derive(Clone)]
struct Host {
    boot: &'static str,
    since_boot: Arc<AtomicU64>,
    wall: Arc<AtomicU64>,
}

impl Host {
    fn new() -> Self {
        let since_boot = Arc::new(AtomicU64::new(5_000_000));
        Self { boot: "first", since_boot, wall: Arc::new(AtomicU64::new(1_800_000_000_000)) }
    }

    fn clock(&self) -> Clock {
        let (since_boot, wall) = (Arc::clone(&self.since_boot), Arc::clone(&self.wall));
        let read = |of: &AtomicU64| of.load(Ordering::SeqCst);
        Clock::new(self.boot, move || read(&since_boot), move || read(&wall))
    }

    fn pass(&self, time: Duration) {
        let ms = u64::try_from(time.as_millis()).unwrap();
        self.since_boot.fetch_add(ms, Ordering::SeqCst);
        self.wall.fetch_add(ms, Ordering::SeqCst);
    }

    /// The same machine, started anew.
    fn restarted(&self) -> Self {
        Self { boot: "second", since_boot: Arc::new(AtomicU64::new(10_000)), wall: Arc::clone(&self.wall) }
    }

    fn open(&self, file: &Path) -> SqliteStore {
        SqliteStore::open_with(file, self.clock()).unwrap()
    }
}

/// A file of its own.
struct Place {
    dir: TempDir,
    file: PathBuf,
}

impl Place {
    fn new() -> Self {
        let dir = TempDir::new().unwrap();
        let file = dir.path().join("state.db");
        Self { dir, file }
    }

    /// Deletes the database with all that belongs to it.
    fn delete(&self) {
        for name in ["state.db", "state.db-wal", "state.db-shm"] {
            let _ = std::fs::remove_file(self.dir.path().join(name));
        }
    }
}

/// A store on a file, by a clock that stands still between steps.
struct OnFile {
    place: Place,
    host: Host,
    store: SqliteStore,
}

impl store_contract::Backend for OnFile {
    const TTL: Duration = Duration::from_secs(2);
    const SLACK: Duration = Duration::ZERO;

    async fn fresh() -> Self {
        let (place, host) = (Place::new(), Host::new());
        let store = host.open(&place.file);
        Self { place, host, store }
    }

    fn store(&self) -> Arc<dyn Store> {
        Arc::new(self.store.clone())
    }

    async fn pass(&self, time: Duration) -> bool {
        self.host.pass(time);
        true
    }

    async fn lose_data(&mut self) -> bool {
        self.place.delete();
        true
    }
}

store_contract!(OnFile);

#[tokio::test]
async fn models_that_callers_make_up_push_out_nothing_that_matters() {
    let world = store_contract::World::of(<OnFile as store_contract::Backend>::fresh().await);
    store_contract::resting::models_that_callers_make_up_push_out_nothing_that_matters(world).await;
}

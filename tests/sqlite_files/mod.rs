//! Opening: what the file must be, and what it keeps across restarts and boots.

use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::sync::atomic::Ordering;

use lessor::model::{Class, Scope};
use lessor::store::sqlite::SqliteStore;
use lessor::store::{Acquired, Reason, RenewAnswer, StatusChange, Store, StoreError, StoreEvent};
use rusqlite::Connection;

use super::store_contract::{Backend, HOUR, MINUTE, World, provider, says, says_of, says_wait};
use super::{Host, OnFile, Place, support};

fn refusal(file: &Path) -> String {
    let error = StoreError::from(SqliteStore::open_with(file, Host::new().clock()).unwrap_err());
    error.to_string()
}

#[test]
fn a_file_that_cannot_be_used_says_what_to_do() {
    let place = Place::new();
    let path = |name: &str| place.dir.path().join(name);

    let text = refusal(&path("nowhere/state.db"));
    assert!(text.ends_with("nowhere is no folder; make it, or change store.url"), "{text}");

    std::fs::create_dir(path("folder.db")).unwrap();
    let text = refusal(&path("folder.db"));
    assert!(text.ends_with("change its owner or mode, or store.url: it is no regular file"), "{text}");

    std::fs::write(path("garbage.db"), "no database, but long enough to be taken for one\n".repeat(99))
        .unwrap();
    let text = refusal(&path("garbage.db"));
    assert!(text.contains("garbage.db is not a sound SQLite database; move it away"), "{text}");

    let other = Connection::open(path("other.db")).unwrap();
    other.execute_batch("CREATE TABLE bookmarks (url TEXT)").unwrap();
    let text = refusal(&path("other.db"));
    assert!(text.contains("other.db is the database of another program"), "{text}");

    drop(Host::new().open(&place.file));
    let newer = Connection::open(&place.file).unwrap();
    newer.execute_batch("PRAGMA user_version = 7").unwrap();
    let text = refusal(&place.file);
    assert!(
        text.contains("written by a newer lessor (layout 7, this one knows 1); run the newer one"),
        "{text}"
    );
}

#[tokio::test]
async fn a_folder_that_cannot_be_written_to_says_so() {
    if !support::sandbox::inside("sqlite_files::a_folder_that_cannot_be_written_to_says_so").await {
        return;
    }
    let place = Place::new();
    let mount = |options: &str| {
        let mut mount = std::process::Command::new("mount");
        mount.args(["-t", "tmpfs", "-o", options, "tmpfs"]).arg(place.dir.path());
        mount.output().unwrap().status.success()
    };
    assert!(mount("size=1m"));
    drop(Host::new().open(&place.file));
    // not before the store's thread has closed its file
    support::eventually("a read-only mount", async || mount("remount,ro").then_some(())).await;
    let text = refusal(&place.file);
    assert!(text.contains("cannot be written to, and SQLite keeps files beside the database"), "{text}");
}

#[tokio::test]
async fn only_its_owner_may_read_what_the_store_writes() {
    let world = World::of(OnFile::fresh().await);
    world.keys([("a", 1)]).await;
    for name in ["state.db", "state.db-wal", "state.db-shm"] {
        let mode = std::fs::metadata(world.backend.place.dir.path().join(name)).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600, "{name}");
    }
}

#[test]
fn many_processes_may_open_a_new_file_at_once() {
    let (place, host) = (Place::new(), Host::new());
    std::thread::scope(|all| {
        let open: Vec<_> = (0..8).map(|_| all.spawn(|| host.open(&place.file))).collect();
        for one in open {
            one.join().unwrap();
        }
    });
}

#[tokio::test]
async fn cooldowns_and_leases_outlive_a_restart() {
    let mut world = World::of(OnFile::fresh().await);
    world.keys([("a", 1), ("b", 1)]).await;
    world.lend_and_report("a", says_wait(Class::Rate, MINUTE)).await;
    let held = world.lend("b").await;
    world.set("b", StatusChange::Disable).await;
    world.backend.store = world.backend.host.open(&world.backend.place.file);
    world.cools_for(world.why_not_key("a").await, MINUTE);
    assert_eq!(world.renew(world.renewal(&[&held])).await, [RenewAnswer::Renewed(held.grant.expires_at)]);
    world.set("b", StatusChange::Enable).await;
    assert_eq!(world.why_not_key("b").await, Reason::Full);
}

#[tokio::test]
async fn another_boot_ends_all_leases_and_no_cooldown() {
    let mut world = World::of(OnFile::fresh().await);
    world.keys([("a", 1), ("b", 1)]).await;
    world.lend_and_report("a", says_wait(Class::Rate, MINUTE)).await;
    let held = world.lend("b").await;
    let host = world.backend.host.restarted();
    world.backend.store = host.open(&world.backend.place.file);
    assert!(world.store().snapshot(provider()).await.unwrap().leases.is_empty());
    world.cools_for(world.why_not_key("a").await, MINUTE);
    assert_eq!(world.renew(world.renewal(&[&held])).await, [RenewAnswer::Lost]);
    let next = world.lend("b").await;
    assert!(next.grant.token > held.grant.token);
}

#[tokio::test]
async fn a_wall_clock_that_was_years_ahead_before_a_boot_locks_no_key_for_years() {
    let mut world = World::of(OnFile::fresh().await);
    let host = world.backend.host.clone();
    host.wall.fetch_add(1000 * 3600 * 24 * 3650, Ordering::SeqCst);
    world.backend.place.delete();
    world.backend.store = host.open(&world.backend.place.file);
    world.keys([("a", 1), ("b", 1)]).await;
    world.lend_and_report("a", says_of(Class::Overloaded, Scope::ProviderModel, MINUTE)).await;
    host.wall.fetch_sub(1000 * 3600 * 24 * 3650, Ordering::SeqCst);
    world.backend.host = host.restarted();
    world.backend.store = world.backend.host.open(&world.backend.place.file);
    world.cools_for(world.why_not_key("b").await, MINUTE);
    assert!(world.backend.pass(MINUTE).await);
    assert!(world.lends_key("b").await);
}

#[tokio::test]
async fn a_step_of_the_wall_clock_changes_nothing() {
    let mut world = World::of(OnFile::fresh().await);
    world.keys([("a", 1), ("b", 1)]).await;
    world.lend_and_report("a", says_wait(Class::Rate, MINUTE)).await;
    let held = world.lend("b").await;
    let before = world.now();
    for step in [HOUR * 24 * 365, HOUR * 24 * 365 * 2] {
        world.backend.host.wall.fetch_add(u64::try_from(step.as_millis()).unwrap(), Ordering::SeqCst);
        assert_eq!(world.now(), before);
        world.cools_for(world.why_not_key("a").await, MINUTE);
        assert_eq!(world.refuse(world.ask(["b"])).await.lease_end, Some(held.grant.expires_at));
        // nor for a process that starts after it
        world.backend.store = world.backend.host.open(&world.backend.place.file);
        world.backend.host.wall.store(1, Ordering::SeqCst);
    }
}

#[tokio::test]
async fn a_file_that_another_kernel_opened_is_used_no_more() {
    let world = World::of(OnFile::fresh().await);
    world.keys([("a", 1)]).await;
    let _other = world.backend.host.restarted().open(&world.backend.place.file);
    for _ in 0..2 {
        let error = world.store().acquire(world.ask(["a"])).await.unwrap_err().to_string();
        assert!(
            error.contains("opened on another machine, or in a sandbox with a kernel of its own"),
            "{error}"
        );
    }
}

#[tokio::test]
async fn a_file_that_is_replaced_is_opened_anew_and_its_holders_hear_of_it() {
    let world = World::of(OnFile::fresh().await);
    let mut events = world.store().subscribe();
    world.keys([("a", 1)]).await;
    let held = world.lend("a").await;
    let other = world.backend.place.dir.path().join("other.db");
    drop(world.backend.host.open(&other));
    let log = other.with_extension("db-wal");
    support::eventually("the last handle closes its file", async || (!log.exists()).then_some(())).await;
    std::fs::rename(&other, &world.backend.place.file).unwrap();
    assert_eq!(world.why_not_key("a").await, Reason::NoSettings);
    let mut heard = std::iter::from_fn(|| events.try_recv().ok());
    assert!(heard.any(|event| matches!(event, StoreEvent::Reconnected)));
    world.keys([("a", 1)]).await;
    assert_ne!(world.lend("a").await.grant.epoch, held.grant.epoch);
}

#[tokio::test]
async fn an_older_copy_of_the_file_holds_slots_no_longer_than_its_leases_last() {
    let world = World::of(OnFile::fresh().await);
    world.keys([("a", 1), ("b", 1)]).await;
    let released = world.lend("a").await;
    let (file, copy) = (world.backend.place.file.clone(), world.backend.place.dir.path().join("copy.db"));
    // as a backup does, without a descriptor of the file that would take the process's locks along
    let backup = Connection::open(&file).unwrap();
    backup.execute("VACUUM INTO ?", [copy.to_str().unwrap()]).unwrap();
    drop(backup);
    world.release(&released).await;
    let after = world.lend("b").await;
    world.backend.place.delete();
    std::fs::rename(&copy, &file).unwrap();
    assert_eq!(world.why_not_key("a").await, Reason::Full);
    assert_eq!(world.renew(world.renewal(&[&after])).await, [RenewAnswer::Lost]);
    assert!(world.backend.pass(OnFile::TTL).await);
    assert!(world.lends_key("a").await);
}

#[tokio::test]
async fn the_first_sidecars_salt_is_everybodys() {
    let place = Place::new();
    let open = || Host::new().open(&place.file);
    let (one, other) = (open(), open());
    assert_eq!(one.salt(Some([7; 32])).await.unwrap(), [7; 32]);
    assert_eq!(other.salt(Some([8; 32])).await.unwrap(), [7; 32]);
    drop((one, other));
    assert_eq!(open().salt(None).await.unwrap(), [7; 32]);
}

#[tokio::test]
async fn the_log_does_not_grow_with_the_number_of_calls() {
    let world = World::of(OnFile::fresh().await);
    world.keys([("a", 1)]).await;
    for _ in 0..3000 {
        let held = world.lend("a").await;
        world.release(&held).await;
    }
    let log = std::fs::metadata(world.backend.place.dir.path().join("state.db-wal")).unwrap().len();
    assert!(log < 5 << 20, "{log}");
}

#[tokio::test]
async fn what_is_under_way_when_the_last_handle_goes_is_done() {
    let (place, host) = (Place::new(), Host::new());
    let mut world = World::of(OnFile { store: host.open(&place.file), place, host });
    world.keys([("a", 1)]).await;
    let held = world.lend("a").await;
    let mut release = world.store().release(vec![held.released()]);
    // polled once, and then nobody waits for it
    assert!(futures_util::poll!(&mut release).is_pending());
    drop(release);
    let again = world.backend.host.open(&world.backend.place.file);
    world.backend.store = again;
    let freed = support::eventually("the slot is free", async || world.lends_key("a").await.then_some(()));
    freed.await;
}

#[tokio::test]
async fn an_acquire_dropped_before_its_first_poll_has_done_nothing() {
    let world = World::of(OnFile::fresh().await);
    world.keys([("a", 1)]).await;
    drop(world.store().acquire(world.ask(["a"])));
    assert_eq!(world.in_use("a").await, 0);
    world.lend_and_report("a", says(Class::Success)).await;
    assert!(matches!(world.acquire(&world.ask(["a"])).await, Acquired::Granted(_)));
}

#[tokio::test]
async fn a_file_that_was_made_before_answers_taught_anything_is_taken_on() {
    let world = World::of(OnFile::fresh().await);
    world.keys([("a", 4)]).await;
    world.lend_and_report("a", says_wait(Class::Rate, MINUTE)).await;
    let OnFile { place, host, store } = world.backend;
    drop(store);
    let old = Connection::open(&place.file).unwrap();
    old.execute_batch(
        "DROP TABLE group_caps; ALTER TABLE keys DROP COLUMN learned_groups;
         ALTER TABLE leases DROP COLUMN key_group;",
    )
    .unwrap();
    drop(old);
    for _ in 0..2 {
        let store = host.open(&place.file);
        let keys = store.snapshot(provider()).await.unwrap().keys;
        assert_eq!(keys[0].reason.as_deref(), Some("rate"));
    }
}

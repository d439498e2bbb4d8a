//! What can go wrong around the file while it is in use.

use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use lessor::model::{AppName, Class, LeaseId, OwnerId, ProviderName};
use lessor::store::sqlite::SqliteStore;
use lessor::store::{Acquire, Acquired, Reason, Release, Store, StoreError, StoreEvent, SyncKeys, SyncMode};
use rusqlite::Connection;

use super::store_contract::{
    Backend, SECOND, World, candidate, key, pool, provider, says, says_wait, setting,
};
use super::support::{eventually, ms, sandbox};
use super::{Host, OnFile, Place};

/// Another process's hand on the file.
fn by_hand(world: &World<OnFile>) -> Connection {
    Connection::open(&world.backend.place.file).unwrap()
}

fn unavailable<T: std::fmt::Debug>(answer: Result<T, StoreError>) -> String {
    match answer {
        Err(StoreError::Unavailable(text)) => text,
        other => panic!("wanted Unavailable, got {other:?}"),
    }
}

#[tokio::test]
async fn on_a_full_disk_nothing_is_lent_leases_end_and_it_heals_by_itself() {
    const NAME: &str = "sqlite_faults::on_a_full_disk_nothing_is_lent_leases_end_and_it_heals_by_itself";
    if !sandbox::inside(NAME).await {
        return;
    }
    let (place, host) = (Place::new(), Host::new());
    let mut mount = Command::new("mount");
    mount.args(["-t", "tmpfs", "-o", "size=400k", "tmpfs"]).arg(place.dir.path());
    assert!(mount.status().unwrap().success());
    let world = World::of(OnFile { store: host.open(&place.file), place, host });
    world.keys([("a", 500), ("b", 1)]).await;
    let held = world.lend("b").await;
    let filler = world.backend.place.dir.path().join("filler");
    let mut full = std::fs::File::create(&filler).unwrap();
    while std::io::Write::write_all(&mut full, &[1; 1024]).is_ok() {}

    let refused = async {
        loop {
            if let Err(error) = world.store().acquire(world.ask(["a"])).await {
                break error;
            }
        }
    };
    let refused = tokio::time::timeout(SECOND * 10, refused).await.unwrap();
    let text = unavailable::<()>(Err(refused));
    assert!(text.contains("no space left to write"), "{text}");
    unavailable(world.store().release(vec![held.released()]).await);
    assert_eq!(world.in_use("b").await, 1);
    assert!(world.backend.pass(OnFile::TTL).await);
    assert_eq!(world.in_use("b").await, 0);
    unavailable(world.store().acquire(world.ask(["b"])).await);

    std::fs::remove_file(&filler).unwrap();
    drop(full);
    assert!(world.lends_key("b").await);
}

#[tokio::test(flavor = "current_thread")]
async fn a_lock_that_another_process_keeps_is_waited_for_two_seconds_and_blocks_no_worker() {
    let world = World::of(OnFile::fresh().await);
    world.keys([("a", 9)]).await;
    let other = by_hand(&world);
    other.execute_batch("BEGIN IMMEDIATE").unwrap();
    let began = Instant::now();
    let ticking = async {
        let mut longest = Duration::ZERO;
        loop {
            let before = Instant::now();
            tokio::time::sleep(ms(5)).await;
            longest = longest.max(before.elapsed());
            if began.elapsed() > ms(2600) {
                return longest;
            }
        }
    };
    let calls = async {
        let first = world.store().acquire(world.ask(["a"]));
        let late = async {
            tokio::time::sleep(ms(300)).await;
            let asked = Instant::now();
            (world.store().acquire(world.ask(["a"])).await, asked.elapsed())
        };
        let ((first, took), (second, second_took)) =
            tokio::join!(async { (first.await, began.elapsed()) }, late);
        for (answer, took) in [(first, took), (second, second_took)] {
            let text = unavailable(answer);
            assert!(text.contains("locked by another process"), "{text}");
            assert!(took > ms(1900) && took < ms(2500), "{took:?}");
        }
    };
    let (longest, ()) = tokio::join!(ticking, calls);
    assert!(longest < ms(200), "the runtime stood still for {longest:?}");
    other.execute_batch("COMMIT").unwrap();
    assert!(world.lends_key("a").await);
    assert_eq!(world.in_use("a").await, 0);
}

#[tokio::test]
async fn a_lock_that_another_process_keeps_for_a_moment_is_not_noticed() {
    let world = World::of(OnFile::fresh().await);
    world.keys([("a", 1)]).await;
    let other = by_hand(&world);
    other.execute_batch("BEGIN IMMEDIATE").unwrap();
    let unlock = std::thread::spawn(move || {
        std::thread::sleep(ms(150));
        other.execute_batch("COMMIT").unwrap();
    });
    assert!(world.lends_key("a").await);
    unlock.join().unwrap();
}

#[tokio::test]
async fn a_row_that_cannot_be_read_stops_its_provider_alone() {
    let world = World::of(OnFile::fresh().await);
    world.keys([("a", 1)]).await;
    let other = ProviderName::parse("anthropic").unwrap();
    world.store().snapshot(other.clone()).await.unwrap();
    by_hand(&world)
        .execute_batch("UPDATE keys SET id = 'No Name'; UPDATE providers SET changes = 99")
        .unwrap();
    let fresh: Arc<dyn Store> = Arc::new(world.backend.host.open(&world.backend.place.file));
    for store in [world.store(), fresh] {
        let broken = store.snapshot(provider()).await.unwrap_err();
        assert!(matches!(&broken, StoreError::Nonsense(text) if text.contains("move it away")), "{broken}");
        store.snapshot(other.clone()).await.unwrap();
    }
}

#[tokio::test]
async fn a_file_that_was_damaged_or_emptied_by_hand_refuses_rather_than_guesses() {
    let world = World::of(OnFile::fresh().await);
    world.keys([("a", 1)]).await;
    by_hand(&world).execute_batch("DROP TABLE leases").unwrap();
    unavailable(world.store().acquire(world.ask(["a"])).await);
    world.backend.place.delete();
    assert_eq!(world.why_not_key("a").await, Reason::NoSettings);
}

#[tokio::test]
async fn a_folder_that_vanishes_is_named_and_one_that_comes_back_is_used() {
    let world = World::of(OnFile::fresh().await);
    world.keys([("a", 1)]).await;
    let (dir, away) = (world.backend.place.dir.path(), world.backend.place.dir.path().with_extension("away"));
    std::fs::rename(dir, &away).unwrap();
    for _ in 0..2 {
        let text = unavailable(world.store().acquire(world.ask(["a"])).await);
        assert!(text.contains("is no folder; make it"), "{text}");
    }
    std::fs::rename(&away, dir).unwrap();
    assert!(world.lends_key("a").await);
}

#[tokio::test]
async fn a_link_to_the_file_is_the_file() {
    let world = World::of(OnFile::fresh().await);
    world.keys([("a", 1)]).await;
    let links = Place::new();
    std::os::unix::fs::symlink(&world.backend.place.file, &links.file).unwrap();
    let linked = world.backend.host.open(&links.file);
    let _held = world.lend("a").await;
    assert!(matches!(linked.acquire(world.ask(["a"])).await, Ok(Acquired::Refused(_))));
}

#[tokio::test]
async fn what_another_process_does_is_heard_by_those_who_wait_or_hold() {
    let mut world = World::of(OnFile::fresh().await);
    let other = world.backend.host.open(&world.backend.place.file);
    world.keys([("a", 1)]).await;
    let mut events = world.store().subscribe();
    let held = world.lend("a").await;
    // a waiter here, a release there
    assert_eq!(world.why_not_key("a").await, Reason::Full);
    while events.try_recv().is_ok() {}
    other.release(vec![held.released()]).await.unwrap();
    let heard = async |events: &mut tokio::sync::broadcast::Receiver<StoreEvent>| {
        tokio::time::timeout(SECOND, events.recv()).await.unwrap().unwrap()
    };
    assert!(matches!(heard(&mut events).await, StoreEvent::Freed(_, freed) if freed == key("a")));
    // a holder here, a revocation there
    let held = world.lend("a").await;
    assert!(other.revoke(provider(), held.lease).await.unwrap());
    assert!(matches!(heard(&mut events).await, StoreEvent::Revoked(_, lease) if lease == held.lease));
    // a person there
    other.set_status(provider(), key("a"), lessor::store::StatusChange::Disable).await.unwrap();
    assert!(matches!(heard(&mut events).await, StoreEvent::Changed(of) if of == provider()));
    // a probe of a group or the provider that ends there
    other.set_status(provider(), key("a"), lessor::store::StatusChange::Enable).await.unwrap();
    world.release(&held).await;
    world.lend_and_report("a", says_wait(Class::Quota, SECOND)).await;
    assert!(world.backend.pass(SECOND).await);
    let probe = world.lend("a").await;
    while events.try_recv().is_ok() {}
    other.release(vec![probe.released()]).await.unwrap();
    assert!(matches!(heard(&mut events).await, StoreEvent::Changed(_)));
    world.backend.store = other;
    world.lend_and_report("a", says(Class::Success)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sixty_four_acquires_by_several_processes_on_a_cap_of_one_have_one_winner() {
    let (place, host) = (Place::new(), Host::new());
    let handles: Vec<SqliteStore> = (0..4).map(|_| host.open(&place.file)).collect();
    let world = World::of(OnFile { store: handles[0].clone(), place, host });
    world.keys([("a", 1)]).await;
    let asks: Vec<_> = (0..64).map(|nth: usize| handles[nth % 4].acquire(world.ask(["a"]))).collect();
    let answers = futures_util::future::join_all(asks.into_iter().map(tokio::spawn)).await;
    let won = answers.into_iter().filter(|answer| matches!(answer, Ok(Ok(Acquired::Granted(_))))).count();
    assert_eq!(won, 1);
}

const CHILD: &str = "LESSOR_TEST_SQLITE_CHILD";
const CAP: usize = 2;

/// Runs this test binary's `child` on a file.
fn child(file: &Path) -> Command {
    let mut child = Command::new(std::env::current_exe().unwrap());
    child.args(["--exact", "sqlite_faults::as_a_child_it_lends_until_it_is_killed", "--nocapture"]);
    child.env(CHILD, file).stdout(Stdio::null()).stderr(Stdio::piped());
    child
}

/// The part of a process that the others compete with: lends, shows its use, looks at the others', ends it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn as_a_child_it_lends_until_it_is_killed() {
    let Some(file) = std::env::var_os(CHILD) else { return };
    let file = Path::new(&file);
    let store = SqliteStore::open(file).unwrap();
    let owner = OwnerId::fresh();
    let uses = file.parent().unwrap().join("uses");
    let tasks = (0..6).map(|_| {
        let (store, owner, uses) = (store.clone(), owner.clone(), uses.clone());
        tokio::spawn(async move {
            loop {
                let ask = Acquire {
                    provider: provider(),
                    lease: LeaseId::fresh(),
                    owner: owner.clone(),
                    app: AppName::anonymous(),
                    model: None,
                    candidates: [candidate("a"), candidate("b")].into(),
                    ttl: SECOND,
                    deadline: store.now().plus(SECOND / 2),
                };
                let lease = ask.lease;
                let Acquired::Granted(grant) = store.acquire(ask).await.unwrap() else {
                    tokio::time::sleep(ms(2)).await;
                    continue;
                };
                // a use is shown after it began and hidden before it ends, so what is seen at once is at once
                let shown = uses.join(grant.key.as_str()).join(lease.to_string());
                std::fs::write(&shown, "").unwrap();
                let seen = std::fs::read_dir(shown.parent().unwrap()).unwrap().count();
                assert!(seen <= CAP, "{seen} uses of {}", grant.key);
                tokio::time::sleep(ms(1)).await;
                std::fs::remove_file(&shown).unwrap();
                let given = Release {
                    provider: provider(),
                    lease,
                    key: grant.key,
                    pool: pool("default"),
                    group: None,
                };
                assert_eq!(store.release(vec![given]).await.unwrap(), 1);
            }
        })
    });
    // a task that ends has failed
    let (Err(failed), ..) = futures_util::future::select_all(tasks).await;
    eprintln!("{failed}");
    std::process::exit(3);
}

#[tokio::test]
async fn processes_that_are_killed_while_they_write_break_no_cap_and_no_file() {
    let place = Place::new();
    for name in ["a", "b"] {
        std::fs::create_dir_all(place.dir.path().join("uses").join(name)).unwrap();
    }
    let store = SqliteStore::open(&place.file).unwrap();
    let cap = u32::try_from(CAP).unwrap();
    let keys = vec![setting("a", cap), setting("b", cap)];
    let ask = SyncKeys { provider: provider(), owner: OwnerId::fresh(), mode: SyncMode::Replace, keys };
    store.sync_keys(ask).await.unwrap();
    let tokens = async || {
        let leases = store.snapshot(provider()).await.unwrap().leases;
        leases.iter().map(|lease| lease.fencing_token).max()
    };
    for _ in 0..2 {
        let mut children: Vec<_> = (0..3).map(|_| child(&place.file).spawn().unwrap()).collect();
        eventually("the children lend", async || tokens().await).await;
        tokio::time::sleep(ms(400)).await;
        for child in &mut children {
            assert!(child.try_wait().unwrap().is_none(), "a child ended by itself");
            child.kill().unwrap();
        }
        for child in children {
            let ended = child.wait_with_output().unwrap();
            assert_eq!(ended.status.code(), None, "{}", String::from_utf8_lossy(&ended.stderr));
        }
        // what they held ends by itself, and only then is there room
        eventually("the dead give back", async || tokens().await.is_none().then_some(())).await;
        for name in ["a", "b"] {
            for left in std::fs::read_dir(place.dir.path().join("uses").join(name)).unwrap() {
                std::fs::remove_file(left.unwrap().path()).unwrap();
            }
        }
    }
    assert_eq!(store.reconcile(provider()).await.unwrap(), 0);
    let sound: String = Connection::open(&place.file)
        .unwrap()
        .query_row("PRAGMA integrity_check", [], |row| row.get(0))
        .unwrap();
    assert_eq!(sound, "ok");
}

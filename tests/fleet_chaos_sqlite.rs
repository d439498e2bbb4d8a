//! The same on one host: two sidecars on one SQLite file, on a disk that fills up.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::pedantic,
    clippy::print_stderr,
    missing_docs,
    unreachable_pub
)]

mod support;

use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rand::rngs::StdRng;
use rand::{Rng as _, SeedableRng as _};
use support::fleet::{
    CAP, CLIENTS, LOAD, Load, Member, TTL, nothing_is_leaked, provider, setup, show, stands_still,
};
use support::oracle::{Window, judge};
use support::{ms, sandbox};
use tokio::time::sleep;

/// The disk: room for the file and its log, and not much more.
const DISK: &str = "size=16m";

/// A small disk of its own for this test.
fn small_disk() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    let mounted = Command::new("mount").args(["-t", "tmpfs", "-o", DISK, "tmpfs"]).arg(dir.path()).status();
    assert!(mounted.unwrap().success());
    dir
}

/// Fills the disk to the last byte.
fn fill(disk: &Path) {
    use std::io::Write as _;
    let mut file = std::fs::File::create(disk.join("fill")).unwrap();
    for size in [65536, 4096, 1] {
        while file.write_all(&vec![0; size]).is_ok() {}
    }
}

async fn happen(what: u32, member: &Member, disk: &Path, windows: &mut Vec<Window>) {
    match what {
        0 => {
            eprintln!("a sidecar is killed");
            member.crash().await;
            sleep(ms(300)).await;
            member.restart().await;
        }
        1 => {
            eprintln!("a sidecar is stopped for two TTLs");
            windows.push(stands_still(member).await);
        }
        2 => {
            eprintln!("the disk is full for two TTLs");
            fill(disk);
            sleep(TTL * 2).await;
            std::fs::remove_file(disk.join("fill")).unwrap();
        }
        _ => {
            eprintln!("another program holds the file's lock for a TTL and a half");
            let file = disk.join("state.db");
            let holding = tokio::task::spawn_blocking(move || {
                let conn = rusqlite::Connection::open(file).unwrap();
                conn.busy_timeout(Duration::from_secs(5)).unwrap();
                conn.execute_batch("BEGIN IMMEDIATE").unwrap();
                std::thread::sleep(TTL * 3 / 2);
                conn.execute_batch("ROLLBACK").unwrap();
            });
            holding.await.unwrap();
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_sidecars_on_one_file_keep_the_caps_through_crashes_stops_and_a_full_disk() {
    let name = "two_sidecars_on_one_file_keep_the_caps_through_crashes_stops_and_a_full_disk";
    if !sandbox::inside(name).await {
        return;
    }
    let seed: u64 = rand::random();
    eprintln!("seed {seed}");
    let mut random = StdRng::seed_from_u64(seed);
    let (provider, disk) = (provider().await, small_disk());
    let url = format!("sqlite://{}", disk.path().join("state.db").display());
    let mut members = Vec::new();
    for _ in 0..2 {
        members.push(Member::start(setup(&provider, &url)).await);
    }
    let began = Instant::now();
    let load = Load::start(&members, CLIENTS);
    let mut windows = Vec::new();
    let mut order = vec![0, 3, 1, 2, 0];
    let end = Instant::now() + LOAD;
    while Instant::now() < end {
        sleep(ms(random.random_range(1000..3000))).await;
        let what = order.pop().unwrap_or_else(|| random.random_range(0..=3));
        let member = Arc::clone(&members[random.random_range(0..members.len())]);
        let at = began.elapsed();
        happen(what, &member, disk.path(), &mut windows).await;
        eprintln!("  from {:.2} s to {:.2} s", at.as_secs_f64(), began.elapsed().as_secs_f64());
    }
    let tally = load.end().await;
    let outside = judge(&provider.seen(), CAP, began, Instant::now(), &windows);
    show(&tally);
    if let Some(outside) = outside {
        panic!("over the cap where nothing excuses it:\n{outside}");
    }
    nothing_is_leaked(&members[0], &provider).await;
    drop(members);
    let unmounted = Command::new("umount").arg("-l").arg(disk.path()).status();
    assert!(unmounted.unwrap().success());
}

//! The caps hold across sidecars, whatever happens to them and to the store: judged by the provider's own
//! count of concurrent requests per key.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::pedantic,
    clippy::print_stderr,
    missing_docs,
    unreachable_pub
)]

mod support;

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use rand::rngs::StdRng;
use rand::{Rng as _, SeedableRng as _};
use support::fault::FaultProxy;
use support::fleet::{Load, Member, Tally};
use support::lessor::chat;
use support::oracle::{Window, judge};
use support::redis::Redis;
use support::{Key, Play, Provider, Setup, eventually_within, ms};
use tokio::time::{sleep, sleep_until};

const TTL: Duration = Duration::from_secs(3);
const HEARTBEAT: Duration = Duration::from_secs(1);
const CAP: usize = 2;
const KEYS: [&str; 3] = ["k1", "k2", "k3"];
const CLIENTS: usize = 60;
const LOAD: Duration = Duration::from_secs(60);
/// How soon a sidecar that goes on after a stop must have cut what it may not use any more.
const AFTER_CONT: Duration = ms(200);
/// How late a renewal may be on a loaded machine.
const LATE: Duration = ms(150);

fn setup(provider: &Provider, url: &str) -> Setup {
    let setup = Setup::openai(provider)
        .set("store.url", &format!("{url:?}"))
        .set("lease.ttl", "\"3s\"")
        .set("lease.heartbeat", "\"1s\"")
        .set("queue.max_wait", "\"5s\"");
    KEYS.iter().fold(setup, |setup, key| setup.key(Key::new(key).cap(u32::try_from(CAP).unwrap())))
}

/// Streams of 50 to 450 ms, and now and then one that outlives a lease's life.
async fn provider() -> Provider {
    Provider::plain(|seen| {
        let length = match seen.number % 25 {
            0 => ms(4500),
            n => ms(50 + 16 * u64::try_from(n).unwrap()),
        };
        Play::sse().event("one").wait(length).event("two").done()
    })
    .await
}

/// After all is over, every slot can be had again: by the store's count and by the provider's.
async fn nothing_is_leaked(member: &Member, provider: &Provider) {
    let lessor = member.lessor.lock().await;
    eventually_within(ms(2500), "it is ready again", async || {
        (lessor.admin("/readyz").await.status == 200).then_some(())
    })
    .await;
    eventually_within(TTL + HEARTBEAT * 3, "all slots come back", async || {
        for key in KEYS {
            if lessor.in_use(key).await != 0 {
                return None;
            }
        }
        Some(())
    })
    .await;
    let before = provider.count();
    let mut streams = Vec::new();
    for _ in 0..KEYS.len() * CAP {
        let mut stream = lessor.open(chat("gpt-4o-mini").header("x-lessor-max-wait", "0s")).await;
        assert_eq!(stream.status, 200, "a slot is leaked");
        stream.read_to("one").await;
        streams.push(stream);
    }
    assert_eq!(provider.count(), before + KEYS.len() * CAP);
}

fn show(tally: &Tally) {
    eprintln!(
        "served {}, refused {} {:?}, cut {}, unreachable {}, hung {}",
        tally.served.load(Ordering::Relaxed),
        tally.refused.load(Ordering::Relaxed),
        tally.codes.lock().unwrap(),
        tally.cut.load(Ordering::Relaxed),
        tally.unreachable.load(Ordering::Relaxed),
        tally.hung.load(Ordering::Relaxed),
    );
    assert_eq!(tally.hung.load(Ordering::Relaxed), 0, "every request ends as served or refused");
    assert!(tally.served.load(Ordering::Relaxed) > 100, "the load went on");
}

/// One thing that happens; the windows in which it allows more than the cap.
async fn happen(what: u32, member: &Member, redis: &Redis, link: &FaultProxy, windows: &mut Vec<Window>) {
    let lost_data =
        |at: Instant| Window { why: "redis lost its data".into(), from: at, to: at + TTL + HEARTBEAT };
    match what {
        0 => {
            eprintln!("a sidecar is killed");
            member.crash().await;
            sleep(ms(300)).await;
            member.restart().await;
        }
        1 => {
            eprintln!("a sidecar is stopped for two TTLs");
            member.stop().await;
            let at = Instant::now();
            sleep(TTL * 2).await;
            member.go_on().await;
            let to = Instant::now() + AFTER_CONT;
            // Its leases end one TTL after their last renewal, which was up to a heartbeat before the stop.
            let from = at + TTL - HEARTBEAT - LATE;
            windows.push(Window { why: "a sidecar stood still".into(), from, to });
        }
        2 => {
            eprintln!("redis is killed and comes back empty");
            redis.kill();
            sleep(ms(500)).await;
            let at = Instant::now();
            redis.restart_empty().await;
            windows.push(lost_data(at));
        }
        3 => {
            eprintln!("redis stands still for half a TTL");
            redis.pause().await;
            sleep(TTL / 2).await;
            redis.resume();
        }
        4 => {
            eprintln!("redis stands still for two TTLs");
            redis.pause().await;
            sleep(TTL * 2).await;
            redis.resume();
        }
        5 => {
            eprintln!("redis forgets its scripts");
            redis.flush_scripts().await;
        }
        _ => {
            eprintln!("the link to redis drops everything for 10 s");
            link.black_hole();
            sleep(Duration::from_secs(10)).await;
            link.heal().await;
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn three_sidecars_on_one_redis_keep_the_caps_through_crashes_pauses_and_cuts() {
    let seed: u64 = rand::random();
    eprintln!("seed {seed}");
    let mut random = StdRng::seed_from_u64(seed);
    let (provider, redis) = (provider().await, Redis::start().await);
    let link = FaultProxy::start(redis.addr()).await;
    let url = format!("redis://{}", link.addr());
    let mut members = Vec::new();
    for _ in 0..3 {
        members.push(Member::start(setup(&provider, &url)).await);
    }
    let began = Instant::now();
    let load = Load::start(&members, CLIENTS);
    let mut windows = Vec::new();
    // Each thing once, in a random order, and then whatever comes, until the time is over.
    let mut order: Vec<u32> = (0..=6).collect();
    for at in (1..order.len()).rev() {
        order.swap(at, random.random_range(0..=at));
    }
    let end = tokio::time::Instant::now() + LOAD;
    while tokio::time::Instant::now() < end {
        sleep(ms(random.random_range(1000..3000))).await;
        let what = order.pop().unwrap_or_else(|| random.random_range(0..=5));
        let member = Arc::clone(&members[random.random_range(0..members.len())]);
        let at = began.elapsed();
        happen(what, &member, &redis, &link, &mut windows).await;
        eprintln!("  from {:.2} s to {:.2} s", at.as_secs_f64(), began.elapsed().as_secs_f64());
    }
    sleep_until(end).await;
    let tally = load.end().await;
    let outside = judge(&provider.seen(), CAP, began, Instant::now(), &windows);
    show(&tally);
    if let Some(outside) = outside {
        panic!("over the cap where nothing excuses it:\n{outside}");
    }
    nothing_is_leaked(&members[0], &provider).await;
}

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
use std::time::{Duration, Instant};

use rand::rngs::StdRng;
use rand::{Rng as _, SeedableRng as _};
use support::fault::FaultProxy;
use support::fleet::{
    CAP, CLIENTS, HEARTBEAT, LOAD, Load, Member, TTL, nothing_is_leaked, provider, setup, show, stands_still,
};
use support::ms;
use support::oracle::{Window, judge};
use support::redis::Redis;
use tokio::time::{sleep, sleep_until};

/// The longest time that one thing may take: the link that drops everything.
const DROPS: Duration = Duration::from_secs(10);

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
            windows.push(stands_still(member).await);
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
            sleep(DROPS).await;
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

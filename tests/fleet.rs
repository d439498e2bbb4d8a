//! One pool for several sidecars: what they share, and what one of them cannot do to another.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::pedantic,
    clippy::print_stderr,
    missing_docs,
    unreachable_pub
)]

mod support;

use std::time::{Duration, Instant};

use futures_util::future::join_all;
use support::lessor::chat;
use support::plays::openai;
use support::redis::Redis;
use support::{Gate, Key, Lessor, Play, Provider, Setup, Stream, eventually, eventually_within, ms};

const TTL: Duration = Duration::from_secs(3);

/// A sidecar with leases of 3 s.
fn on(redis: &Redis, provider: &Provider) -> Setup {
    Setup::openai(provider)
        .set("store.url", &format!("{:?}", redis.url()))
        .set("lease.ttl", "\"3s\"")
        .set("lease.heartbeat", "\"1s\"")
}

async fn streaming(gate: &Gate) -> Provider {
    let gate = gate.clone();
    Provider::plain(move |_| Play::sse().event("one").until(&gate).done()).await
}

/// Opens a stream and reads its first event.
async fn begun(lessor: &Lessor) -> Stream {
    let mut stream = lessor.open(chat("gpt-4o-mini")).await;
    assert_eq!(stream.status, 200, "{}", lessor.log());
    stream.read_to("one").await;
    stream
}

#[tokio::test]
async fn a_new_and_empty_redis_serves_the_first_request_at_once() {
    let (provider, redis) = (Provider::plain(openai).await, Redis::start().await);
    let lessor = on(&redis, &provider).key(Key::new("a")).start().await;
    let began = Instant::now();
    assert_eq!(lessor.chat().await.status, 200);
    assert!(began.elapsed() < ms(500), "{:?}", began.elapsed());
    assert_eq!(lessor.admin("/readyz").await.status, 200);
    assert_eq!(lessor.admin("/v1/status").await.json()["store"]["kind"], "redis");
}

#[tokio::test]
async fn a_cap_counts_the_leases_of_all_sidecars_and_each_shows_them_all() {
    let (gate, redis) = (Gate::default(), Redis::start().await);
    let provider = streaming(&gate).await;
    let setup = on(&redis, &provider).key(Key::new("a").cap(2)).set("queue.max_wait", "\"0s\"");
    let (one, two) = (setup.clone().start().await, setup.start().await);
    let held = (begun(&one).await, begun(&two).await);
    for lessor in [&one, &two] {
        lessor.chat().await.is_error(429, "pool_exhausted");
        assert_eq!(lessor.in_use("a").await, 2);
    }
    let leases = one.admin("/v1/leases").await.json()["leases"].clone();
    let owners: std::collections::BTreeSet<_> =
        leases.as_array().unwrap().iter().map(|lease| lease["owner"].as_str().unwrap()).collect();
    assert_eq!(owners.len(), 2, "{leases}");
    gate.open();
    for stream in [held.0, held.1] {
        stream.whole().await.unwrap();
    }
    assert_eq!(provider.most_at_once("sk-a"), 2);
}

#[tokio::test]
async fn a_slot_freed_at_one_sidecar_is_used_by_a_waiter_of_another_within_20_ms() {
    let redis = Redis::start().await;
    // a stream lasts as long as its request says
    let provider = Provider::plain(|_| Play::sse().event("one").wait(ms(150)).done()).await;
    let setup = on(&redis, &provider).key(Key::new("a").cap(1)).set("queue.max_wait", "\"5s\"");
    let (one, two) = (setup.clone().start().await, setup.start().await);
    let mut gaps = Vec::new();
    for _ in 0..11 {
        let before = provider.count();
        let holder = begun(&one).await;
        let waiter = tokio::spawn({
            let door = two.door().clone();
            async move { support::client::send(&door, chat("gpt-4o-mini")).await.unwrap().whole().await.unwrap() }
        });
        two.comes_to_queue(1).await;
        holder.whole().await.unwrap();
        assert_eq!(waiter.await.unwrap().status, 200);
        let seen = provider.seen();
        gaps.push(seen[before + 1].at.saturating_duration_since(seen[before].finished.unwrap()));
    }
    gaps.sort();
    eprintln!("from a slot's end to its next use elsewhere: {gaps:?}");
    assert!(gaps[gaps.len() / 2] < ms(20), "{gaps:?}");
}

#[tokio::test]
async fn after_a_crash_the_others_have_the_slots_within_a_ttl_and_keep_their_own() {
    let (gate, redis) = (Gate::default(), Redis::start().await);
    let provider = streaming(&gate).await;
    let setup = on(&redis, &provider).key(Key::new("a").cap(12)).set("queue.max_wait", "\"8s\"");
    let (mut one, two) = (setup.clone().start().await, setup.start().await);
    let lost = join_all((0..10).map(|_| begun(&one))).await;
    let own = join_all((0..2).map(|_| begun(&two))).await;
    let waiting = join_all((0..10).map(|_| two.open(chat("gpt-4o-mini"))));
    let (streams, took) = tokio::join!(waiting, async {
        two.comes_to_queue(10).await;
        one.crash();
        let began = Instant::now();
        // by the provider's own count
        eventually_within(TTL * 2, "the slots are used", async || (provider.count() == 22).then_some(()))
            .await;
        began.elapsed()
    });
    eprintln!("ten slots of a killed sidecar are used again after {took:?}");
    assert!(took < TTL + Duration::from_secs(1), "{took:?}");
    gate.open();
    for stream in own.into_iter().chain(streams) {
        assert!(stream.whole().await.unwrap().text().contains("[DONE]"), "none was touched");
    }
    drop(lost);
}

#[tokio::test]
async fn a_sidecar_with_fewer_keys_or_another_secret_takes_nothing_from_the_others() {
    let redis = Redis::start().await;
    let provider =
        Provider::builder().plain().bad_keys_expected().good(&["sk-a", "sk-b"]).start(openai).await;
    let whole = on(&redis, &provider).key(Key::new("a")).key(Key::new("b")).start().await;
    let fewer = on(&redis, &provider).key(Key::new("b")).start().await;
    let ids = |lessor: &Lessor| {
        let asked = lessor.admin_door();
        async move {
            let answer = support::client::send(&asked, support::Request::get("/v1/keys")).await.unwrap();
            let keys = answer.whole().await.unwrap().json()["keys"].clone();
            keys.as_array()
                .unwrap()
                .iter()
                .map(|key| key["id"].as_str().unwrap().to_owned())
                .collect::<Vec<_>>()
        }
    };
    assert_eq!(ids(&fewer).await, ["a", "b"], "what others serve is seen");
    // one whose secret is old is refused, and stops itself alone
    let old = on(&redis, &provider).key(Key::new("b").secret("sk-old")).start().await;
    assert_ne!(old.chat().await.status, 200);
    for lessor in [&whole, &fewer] {
        for key in ["a", "b"] {
            let asked = chat("gpt-4o-mini").header("x-lessor-key", key);
            let status = lessor.ask(asked).await.status;
            assert!(status == 200 || (key == "a" && std::ptr::eq(lessor, &fewer)), "{key}: {status}");
        }
    }
}

#[tokio::test]
async fn keys_and_leases_are_managed_for_the_whole_fleet_from_any_sidecar() {
    let (gate, redis) = (Gate::default(), Redis::start().await);
    let provider = streaming(&gate).await;
    let setup = on(&redis, &provider).key(Key::new("a").cap(2)).set("queue.max_wait", "\"0s\"");
    let (one, two) = (setup.clone().start().await, setup.start().await);
    let held = begun(&one).await;
    let leases = two.cli(&["leases", "list", "--json"]).await.json()["leases"].clone();
    let id = leases[0]["id"].as_str().unwrap().to_owned();
    two.cli(&["leases", "revoke", &id]).await.ok();
    // the stream of the other sidecar is cut, and its slot comes back
    assert!(held.whole().await.is_err());
    two.is_free_within_a_second("a").await;
    two.cli(&["keys", "disable", "openai/a"]).await.ok();
    one.chat().await.is_error(503, "key_unavailable");
    one.cli(&["keys", "enable", "openai/a"]).await.ok();
    for lessor in [&one, &two] {
        eventually("the key is lent again", async || {
            (lessor.open(chat("gpt-4o-mini")).await.status == 200).then_some(())
        })
        .await;
    }
}

#[tokio::test]
async fn without_its_store_a_sidecar_refuses_at_once_and_serves_again_when_it_is_back() {
    let (provider, redis) = (Provider::plain(openai).await, Redis::start().await);
    let lessor = on(&redis, &provider).key(Key::new("a").cap(100)).start().await;
    assert_eq!(lessor.chat().await.status, 200);
    for how in ["killed", "paused"] {
        if how == "killed" {
            redis.kill();
        } else {
            redis.pause().await;
        }
        for _ in 0..3 {
            let began = Instant::now();
            for answer in join_all((0..50).map(|_| lessor.chat())).await {
                answer.is_error(503, "store_unavailable");
            }
            assert!(began.elapsed() < Duration::from_secs(1), "{how}: {:?}", began.elapsed());
        }
        assert_eq!(lessor.admin("/readyz").await.status, 503);
        assert_eq!(lessor.admin("/healthz").await.status, 200);
        assert!(lessor.metric("lessor_store_up").await < 0.5);
        if how == "killed" {
            redis.restart_empty().await;
        } else {
            redis.resume();
        }
        let limit = Duration::from_secs(2);
        eventually_within(limit, "served again", async || (lessor.chat().await.status == 200).then_some(()))
            .await;
        assert_eq!(lessor.admin("/readyz").await.status, 200);
    }
}

/// Restarts the server with its data, which gives these another history.
async fn restarted_with_its_data(redis: &Redis) {
    let snapshot = redis.snapshot().await;
    redis.kill();
    redis.restart_with(&snapshot).await;
}

#[tokio::test]
async fn after_a_restart_with_no_open_stream_nothing_registers_again_and_every_request_is_served() {
    let (gate, redis) = (Gate::default(), Redis::start().await);
    let provider = streaming(&gate).await;
    let setup = on(&redis, &provider).key(Key::new("a").cap(8)).set("queue.max_wait", "\"0s\"");
    let lessor = setup.start().await;
    drop(begun(&lessor).await);
    lessor.is_free_within_a_second("a").await;
    restarted_with_its_data(&redis).await;
    let first = eventually("served again", async || {
        let mut stream = lessor.open(chat("gpt-4o-mini")).await;
        if stream.status != 200 {
            return None;
        }
        stream.read_to("one").await;
        Some(stream)
    })
    .await;
    // not by the next heartbeat either, nor after a connection that broke and came back to the same history
    tokio::time::sleep(ms(1500)).await;
    let second = begun(&lessor).await;
    let connected = redis.info("total_connections_received").await;
    redis.command(&["CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes"]).await;
    redis.command(&["CLIENT", "KILL", "TYPE", "pubsub"]).await;
    eventually("it comes back", async || {
        (redis.info("total_connections_received").await != connected).then_some(())
    })
    .await;
    tokio::time::sleep(ms(1500)).await;
    let third = begun(&lessor).await;
    assert!(lessor.admin("/v1/status").await.json()["graces"].as_array().unwrap().is_empty());
    assert!(!lessor.log().contains("grace"), "{}", lessor.log());
    drop((first, second, third));
}

#[tokio::test]
async fn a_request_that_the_grace_refuses_is_told_so_and_one_that_waits_is_served_at_its_end() {
    let (gate, redis) = (Gate::default(), Redis::start().await);
    let provider = streaming(&gate).await;
    let lessor = on(&redis, &provider).key(Key::new("a").cap(8)).start().await;
    let mut open = begun(&lessor).await;
    restarted_with_its_data(&redis).await;
    let asked = |wait: &str| chat("gpt-4o-mini").header("x-lessor-max-wait", wait);
    let refused = eventually("the open stream's lease registers again", async || {
        let answer = lessor.open(asked("0")).await;
        (answer.status == 429).then_some(answer)
    })
    .await
    .whole()
    .await
    .unwrap();
    refused.is_error(429, "pool_exhausted");
    assert!(
        refused.text().contains("failed over") && refused.text().contains("already open"),
        "{}",
        refused.text()
    );
    let told: u64 = refused.header("retry-after").parse().unwrap();
    assert!((1..=3).contains(&told), "{told}");
    let status = lessor.admin("/v1/status").await.json();
    assert_eq!(status["graces"][0]["provider"], "openai");
    assert!(lessor.cli(&["status"]).await.ok().contains("streams that are already open, for"));
    // who waits long enough is served once it is over, and not before
    let began = Instant::now();
    let waited = lessor.open(asked("9s")).await;
    assert_eq!(waited.status, 200);
    assert!(began.elapsed() >= Duration::from_secs(told - 1) && began.elapsed() < TTL + ms(1000));
    let events = lessor.cli(&["events"]).await;
    assert_eq!(events.ok().matches("has just lost its data or failed over").count(), 1, "{}", events.ok());
    let said = |line: &&str| line.contains("has just lost its data or failed over: until");
    assert_eq!(lessor.log().lines().filter(said).count(), 1);
    // the open stream has lived through it all
    gate.open();
    open.read_to("[DONE]").await;
}

#[tokio::test]
async fn a_store_that_answers_and_does_not_lend_is_told_as_away_until_it_lends() {
    let (gate, redis) = (Gate::default(), Redis::start().await);
    let provider = streaming(&gate).await;
    let lessor = on(&redis, &provider).key(Key::new("a").cap(8)).start().await;
    let open = begun(&lessor).await;
    redis.command(&["ACL", "SETUSER", "default", "-zcard"]).await;
    lessor.chat().await.is_error(503, "store_unavailable");
    let began = Instant::now();
    while began.elapsed() < ms(2500) {
        // the open stream's renewals, which succeed, and readiness' own look make it no better
        let ready = lessor.admin("/readyz").await;
        assert_eq!(ready.status, 503, "{}", ready.text());
        assert!(ready.text().contains("store_unavailable"), "{}", ready.text());
        assert!(lessor.metric("lessor_store_up").await < 0.5);
        tokio::time::sleep(ms(50)).await;
    }
    assert_eq!(lessor.cli(&["status"]).await.code, Some(5));
    assert_eq!(lessor.log().matches("the store fails").count(), 1, "{}", lessor.log());
    assert!(!lessor.log().contains("answers again"), "{}", lessor.log());
    redis.command(&["ACL", "SETUSER", "default", "+zcard"]).await;
    // with no request at all
    let ready = async || (lessor.admin("/readyz").await.status == 200).then_some(());
    eventually("it is ready again", ready).await;
    let told = async || (lessor.log().matches("answers again").count() == 1).then_some(());
    eventually("it is told once", told).await;
    assert!(lessor.metric("lessor_store_up").await > 0.5);
    drop(open);
}

#[tokio::test]
async fn another_sidecars_settings_are_told_with_what_differs_and_ones_own_change_is_not() {
    let (provider, redis) = (Provider::plain(openai).await, Redis::start().await);
    const WARNING: &str = "those of this sidecar count from now on";
    let with = |cap: u32| on(&redis, &provider).key(Key::new("a").cap(cap));
    let uses = async |lessor: &Lessor| lessor.key("a").await["max_concurrent_uses"].as_u64().unwrap();
    let reload = async |lessor: &Lessor, cap: u32| {
        std::fs::write(lessor.home().path().join("lessor.toml"), with(cap).toml()).unwrap();
        lessor.signal(rustix::process::Signal::HUP);
        let there = async || (uses(lessor).await == u64::from(cap)).then_some(());
        eventually("the new cap counts", there).await;
    };
    let one = with(4).start().await;
    reload(&one, 5).await;
    reload(&one, 6).await;
    assert!(!one.log().contains(WARNING), "{}", one.log());
    let two = with(8).start().await;
    assert_eq!(uses(&one).await, 8);
    let differs = |lessor: &Lessor, text: &str| {
        let log = lessor.log();
        assert_eq!(log.matches(WARNING).count(), 1, "{log}");
        assert!(log.contains(text), "{log}");
    };
    differs(&two, "max_concurrent_uses was 6, is 8");
    assert!(!one.log().contains(WARNING), "{}", one.log());
    reload(&one, 7).await;
    let told = async || one.log().contains(WARNING).then_some(());
    eventually("it is told", told).await;
    differs(&one, "max_concurrent_uses was 8, is 7");
}

#[tokio::test]
async fn an_idle_sidecar_says_when_its_store_goes_and_when_it_comes_back() {
    let (provider, redis) = (Provider::plain(openai).await, Redis::start().await);
    let lessor = on(&redis, &provider).key(Key::new("a")).start().await;
    let said = async |text: &str| lessor.log().matches(text).count();
    for round in 1..=2 {
        redis.kill();
        eventually("the loss is told", async || (said("the store fails").await == round).then_some(())).await;
        redis.restart_empty().await;
        eventually("the return is told", async || (said("answers again").await == round).then_some(())).await;
    }
}

#[tokio::test]
async fn who_waits_when_the_store_fails_is_told_at_once() {
    let (gate, redis) = (Gate::default(), Redis::start().await);
    let provider = streaming(&gate).await;
    let lessor =
        on(&redis, &provider).key(Key::new("a").cap(1)).set("queue.max_wait", "\"30s\"").start().await;
    let held = begun(&lessor).await;
    let waiting = join_all((0..20).map(|_| lessor.chat()));
    let (answers, ()) = tokio::join!(waiting, async {
        lessor.comes_to_queue(20).await;
        redis.kill();
    });
    for answer in answers {
        answer.is_error(503, "store_unavailable");
    }
    drop(held);
}

#[tokio::test]
async fn a_sidecar_that_starts_without_its_store_serves_as_soon_as_it_is_there() {
    let (provider, redis) = (Provider::plain(openai).await, Redis::start().await);
    redis.kill();
    let lessor = on(&redis, &provider).key(Key::new("a")).start().await;
    lessor.chat().await.is_error(503, "store_unavailable");
    assert_eq!(lessor.admin("/readyz").await.status, 503);
    redis.restart_empty().await;
    let limit = Duration::from_secs(2);
    eventually_within(limit, "served", async || (lessor.chat().await.status == 200).then_some(())).await;
}

#[tokio::test]
async fn a_wrong_password_ends_the_start_with_words_that_help() {
    let provider = Provider::plain(openai).await;
    let redis = Redis::builder().password("right").start().await;
    let setup =
        on(&redis, &provider).key(Key::new("a")).set("store.password", "{ env = \"REDIS_PASSWORD\" }");
    let mut lessor = setup.clone().env("REDIS_PASSWORD", "wrong").spawn();
    assert_ne!(lessor.ends_within(Duration::from_secs(10)).await.code(), Some(0));
    eventually("the reason is told", async || lessor.log().contains("store.password").then_some(())).await;
    assert!(!lessor.log().contains("wrong"), "{}", lessor.log());
    let lessor = setup.env("REDIS_PASSWORD", "right").start().await;
    assert_eq!(lessor.chat().await.status, 200);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_thousand_open_streams_are_renewed_in_one_call_an_interval() {
    let (gate, redis) = (Gate::default(), Redis::start().await);
    let provider = streaming(&gate).await;
    let lessor = on(&redis, &provider)
        .key(Key::new("a").cap(2000))
        .set("lease.ttl", "\"9s\"")
        .set("lease.heartbeat", "\"3s\"")
        .start()
        .await;
    let mut streams = Vec::new();
    for _ in 0..20 {
        streams.extend(join_all((0..50).map(|_| begun(&lessor))).await);
    }
    assert_eq!(lessor.in_use("a").await, 1000);
    // a quiet time of three intervals: nothing but renewals, and what watches the connection
    let renewals = async || {
        let lines = redis.monitor().await;
        tokio::time::sleep(Duration::from_secs(9)).await;
        let lines = lines.lines().await;
        lines
            .iter()
            .filter(|line| line.to_ascii_lowercase().contains("evalsha") && line.len() > 10_000)
            .count()
    };
    let counted = renewals().await;
    assert!((2..=4).contains(&counted), "{counted} renewals in three intervals");
    assert_eq!(lessor.in_use("a").await, 1000, "all live");
    gate.open();
    for stream in streams {
        stream.whole().await.unwrap();
    }
    lessor.is_free_within_a_second("a").await;
}

#[tokio::test]
async fn no_secret_is_ever_in_the_store_nor_on_its_way_there() {
    const CANARY: &str = "sk-canary-8d1f0c5e2b7a4936";
    let provider = Provider::builder().plain().start(openai).await;
    let redis = Redis::builder().password("store-canary-55e1").start().await;
    redis.command(&["CONFIG", "SET", "slowlog-log-slower-than", "0"]).await;
    let monitor = redis.monitor().await;
    let lessor = on(&redis, &provider)
        .key(Key::new("a").secret(CANARY))
        .set("store.password", "{ env = \"REDIS_PASSWORD\" }")
        .env("REDIS_PASSWORD", "store-canary-55e1")
        .env("RUST_LOG", "trace")
        .start()
        .await;
    for _ in 0..5 {
        assert_eq!(lessor.chat().await.status, 200);
    }
    lessor.cli(&["keys", "disable", "openai/a"]).await.ok();
    lessor.cli(&["status"]).await.ok();
    let said = [monitor.lines().await.join("\n"), redis.dump().await, redis.slowlog().await, lessor.log()];
    assert!(said[1].contains("lessor:{openai}:key:a"), "the dump is one");
    for text in said {
        for canary in [CANARY, "8d1f0c5e2b7a4936", "store-canary-55e1"] {
            assert!(!text.contains(canary), "a secret is in the open: {text}");
        }
    }
}

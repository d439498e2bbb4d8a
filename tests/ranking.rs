//! Which key is tried first: seen from outside, by what the provider gets.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::pedantic, missing_docs, unreachable_pub)]

mod support;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use support::lessor::chat;
use support::plays::{openai, openai_error, rate_limited};
use support::provider::Manners;
use support::{Cut, Key, Lessor, Play, Provider, Request, Setup, eventually, ms};

/// A lessor with so many equal keys, `k0` and on.
fn keys(provider: &Provider, count: usize) -> Setup {
    (0..count).fold(Setup::openai(provider), |setup, nth| setup.key(Key::new(&format!("k{nth}"))))
}

/// Makes `requests` requests, `clients` at a time.
async fn load(lessor: &Arc<Lessor>, clients: usize, requests: usize) {
    let left = Arc::new(AtomicUsize::new(requests));
    let client = || {
        let (lessor, left) = (lessor.clone(), left.clone());
        tokio::spawn(async move {
            let one_less = |left: usize| left.checked_sub(1);
            while left.fetch_update(Ordering::SeqCst, Ordering::SeqCst, one_less).is_ok() {
                lessor.get("/openai/v1/models").await;
            }
        })
    };
    let clients: Vec<_> = (0..clients).map(|_| client()).collect();
    for client in clients {
        client.await.unwrap();
    }
}

/// How often each key was used.
fn uses(provider: &Provider) -> BTreeMap<String, usize> {
    let mut uses = BTreeMap::new();
    for key in provider.keys_seen() {
        *uses.entry(key).or_default() += 1;
    }
    uses
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn twenty_equal_keys_under_load_get_within_a_tenth_of_each_other() {
    let provider = Provider::plain(|_| Play::json(200, &serde_json::json!({})).wait(ms(3))).await;
    let lessor = Arc::new(keys(&provider, 20).start().await);
    load(&lessor, 12, 2000).await;
    let uses = uses(&provider);
    let (least, most) = (uses.values().min().unwrap(), uses.values().max().unwrap());
    assert_eq!(uses.len(), 20, "{uses:?}");
    assert!(*least >= 90 && *most <= 110, "100 each were fair: {uses:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_key_that_fails_gets_less_than_half_of_the_others() {
    let provider = Provider::builder()
        .plain()
        .manners(Manners::Open)
        .start(|seen| {
            let status = if seen.header("x-token") == "sk-k0" { 500 } else { 200 };
            Play::json(status, &serde_json::json!({}))
        })
        .await;
    let own = |setup: Setup, nth: usize| setup.key(Key::new(&format!("k{nth}")).of("own"));
    let setup =
        Setup::new().provider("own", &provider).set("providers.own.inject", "{ header = \"x-token\" }");
    let lessor = (0..4).fold(setup, own).start().await;
    for _ in 0..100 {
        lessor.get("/own/v1/things").await;
    }
    let failed = provider.seen().iter().filter(|seen| seen.header("x-token") == "sk-k0").count();
    assert!((1..=12).contains(&failed), "{failed} of 100 requests went to the key that fails");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_slow_key_gets_less_than_half_of_the_others() {
    let provider = Provider::plain(|seen| {
        let thinks = if seen.key() == "sk-k0" { ms(400) } else { ms(4) };
        Play::new().wait(thinks).then(openai(seen))
    })
    .await;
    let lessor = Arc::new(keys(&provider, 4).start().await);
    load(&lessor, 6, 300).await;
    let uses = uses(&provider);
    let others: usize = (1..4).map(|nth| uses[&format!("sk-k{nth}")]).sum();
    assert!(uses["sk-k0"] * 6 <= others, "{uses:?}");
}

#[tokio::test]
async fn a_key_that_was_never_used_is_used_before_one_that_works() {
    let provider = Provider::start(openai).await;
    let lessor = keys(&provider, 3).start().await;
    for _ in 0..3 {
        for key in ["k0", "k2"] {
            lessor.ask(Request::get("/openai/v1/models").header("x-lessor-key", key)).await;
        }
    }
    assert_eq!(lessor.get("/openai/v1/models").await.header("x-lessor-key"), "k1");
}

#[tokio::test]
async fn keys_in_turn_are_used_in_turn_in_each_pool_also_where_only_some_fit() {
    let provider = Provider::start(openai).await;
    let setup =
        (0..3).fold(keys(&provider, 3), |setup, nth| setup.key(Key::new(&format!("vip{nth}")).pool("vip")));
    let lessor = setup.set("ranking.strategy", "\"round_robin\"").start().await;
    for _ in 0..3 {
        for pool in ["default", "vip", "vip"] {
            lessor.ask(Request::get("/openai/v1/models").header("x-lessor-pool", pool)).await;
        }
    }
    let uses = uses(&provider);
    let of = |key: &str| uses[key];
    assert_eq!([of("sk-k0"), of("sk-k1"), of("sk-k2")], [1, 1, 1], "{uses:?}");
    assert_eq!([of("sk-vip0"), of("sk-vip1"), of("sk-vip2")], [2, 2, 2], "{uses:?}");
}

#[tokio::test]
async fn keys_known_to_rest_are_not_offered_to_the_store_before_those_that_do_not() {
    let provider = Provider::start(|seen| match seen.key() {
        "sk-k0" | "sk-k1" | "sk-k2" => rate_limited("30"),
        _ => openai(seen),
    })
    .await;
    let setup = keys(&provider, 4).set("ranking.strategy", "\"fill_first\"").set("retry.max_attempts", "4");
    let lessor = setup.start().await;
    assert_eq!(lessor.chat().await.header("x-lessor-attempts"), "4");
    let refused = async || lessor.metric("lessor_lease_acquire_total{result=\"exhausted\"}").await;
    let before = refused().await;
    for _ in 0..5 {
        let answer = lessor.chat().await;
        assert_eq!((answer.header("x-lessor-key"), answer.header("x-lessor-attempts")), ("k3", "1"));
    }
    assert_eq!(refused().await, before, "the first candidates could be had");
}

#[tokio::test]
async fn a_key_whose_rest_a_person_lifts_is_tried_in_its_old_place_again() {
    let refused = Arc::new(AtomicUsize::new(0));
    let seen_refusals = refused.clone();
    let provider = Provider::start(move |seen| {
        let first = seen.key() == "sk-k0" && seen_refusals.fetch_add(1, Ordering::SeqCst) == 0;
        if first { rate_limited("60") } else { openai(seen) }
    })
    .await;
    let lessor = keys(&provider, 2).set("ranking.strategy", "\"fill_first\"").start().await;
    assert_eq!(lessor.chat().await.header("x-lessor-key"), "k1");
    assert_eq!(lessor.chat().await.header("x-lessor-key"), "k1");
    lessor.cli(&["keys", "clear", "openai/k0"]).await.ok();
    eventually("`k0` is first again", async || {
        (lessor.chat().await.header("x-lessor-key") == "k0").then_some(())
    })
    .await;
}

#[tokio::test]
async fn a_post_is_sent_again_only_on_the_occasions_that_retry_on_names() {
    for (on, broken, overloaded) in
        [("[]", 502, 503), ("[\"connection\"]", 200, 503), ("[\"overloaded\"]", 502, 200)]
    {
        let asked = Arc::new(AtomicUsize::new(0));
        let counted = asked.clone();
        let provider = Provider::start(move |seen| {
            if counted.fetch_add(1, Ordering::SeqCst) > 0 {
                return openai(seen);
            }
            match seen.json()["model"].as_str() {
                Some("broken") => Play::new().read_body().cut(Cut::Reset),
                _ => Play::json(503, &openai_error("server_error", "overloaded", "busy")),
            }
        })
        .await;
        let lessor = keys(&provider, 2).set("retry.on", on).start().await;
        for (model, status) in [("broken", broken), ("busy", overloaded)] {
            asked.store(0, Ordering::SeqCst);
            let answer = lessor.ask(chat(model)).await;
            assert_eq!(answer.status, status, "{model} with retry.on = {on}: {}", answer.text());
            let sent = if status == 200 { 2 } else { 1 };
            assert_eq!(asked.load(Ordering::SeqCst), sent, "{model} with retry.on = {on}");
        }
    }
}

#[tokio::test]
async fn status_explains_for_each_key_what_its_rank_is_made_of() {
    let provider =
        Provider::start(|seen| if seen.key() == "sk-k1" { rate_limited("30") } else { openai(seen) }).await;
    let lessor = keys(&provider, 3).set("ranking.idle", "0.25").start().await;
    // a time is known after eight of them
    for key in ["k0", "k0", "k0", "k0", "k0", "k0", "k0", "k0", "k1"] {
        let pinned = chat("gpt-4o-mini").header("x-lessor-key", key).header("x-lessor-max-wait", "0s");
        lessor.ask(pinned).await;
    }
    let page = lessor.cli(&["status", "--explain"]).await;
    let page = page.ok();
    let heads = [
        "KEY",
        "SCORE",
        "CAPACITY",
        "IDLE",
        "SUCCESS",
        "ERROR",
        "RATE LIMIT",
        "COOLDOWN",
        "FRESHNESS",
        "IN FLIGHT",
        "FIRST BYTE",
        "RESTS",
    ];
    assert!(heads.iter().all(|head| page.contains(head)), "{page}");
    assert!(page.contains("ranking by weighted"), "{page}");
    let weights = page.lines().find(|line| line.starts_with("weight")).unwrap();
    let weights: Vec<_> = weights.split_whitespace().collect();
    assert_eq!(weights, ["weight", "2.00", "0.25", "1.00", "-1.00", "-1.00", "-1.00", "-2.00"]);
    let json = lessor.cli(&["status", "--explain", "--json"]).await.json();
    let keys = json["ranking"]["keys"].as_array().unwrap();
    let terms: Vec<_> = keys.iter().map(|key| &key["terms"]).collect();
    assert_eq!(keys.iter().map(|key| &key["key"]).collect::<Vec<_>>(), ["k0", "k1", "k2"]);
    let share = |nth: usize, term: &str| (terms[nth][term].as_f64().unwrap() * 10.0).round() / 10.0;
    assert_eq!((share(0, "success"), share(0, "rate_limit")), (1.0, 0.0), "{json}");
    assert_eq!((share(1, "success"), share(1, "rate_limit")), (0.5, 0.5), "{json}");
    assert_eq!((&terms[2]["idle"], &terms[2]["freshness"]), (&1.0.into(), &0.0.into()), "{json}");
    assert!(keys[0]["first_byte_ms"].as_f64().unwrap() > 0.0, "{json}");
    let score = |nth: usize| keys[nth]["score"].as_f64().unwrap();
    assert!(score(2) > score(0) && score(0) > score(1), "{json}");
    assert!(lessor.admin("/v1/status").await.json().get("ranking").is_none(), "only where it is asked for");
}

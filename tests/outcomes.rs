//! What refusals do to keys, their groups and their provider, seen from outside: who is tried, who rests and
//! for how long, who is found to be back.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::pedantic, missing_docs, unreachable_pub)]

mod support;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use serde_json::Value;
use support::lessor::{chat, field};
use support::plays::{
    anthropic, anthropic_error, invalid_key, openai, openai_error, rate_limited, wrong_organization,
};
use support::provider::{Gate, Manners};
use support::redis::Redis;
use support::{Key, Lessor, Play, Provider, Request, Setup, eventually, eventually_within, ms};

/// Keys in the order in which they are tried.
fn in_order(provider: &Provider, keys: impl IntoIterator<Item = Key>) -> Setup {
    let setup = Setup::openai(provider).set("ranking.strategy", "\"fill_first\"");
    keys.into_iter().fold(setup, Setup::key)
}

/// OpenAI's word for an empty account, with the seconds until it is full again.
fn out_of_money(until: Option<u64>) -> Play {
    let message = "You exceeded your current quota, please check your plan and billing details.";
    let error = openai_error("insufficient_quota", "insufficient_quota", message);
    match until {
        Some(seconds) => Play::json_with(429, &[("retry-after", &seconds.to_string())], &error),
        None => Play::json(429, &error),
    }
}

/// An answer that names the organisation of the key that was used.
fn of_organization(name: &str) -> Play {
    let list = serde_json::json!({"object": "list", "data": []});
    Play::json_with(200, &[("openai-organization", name)], &list)
}

/// The key with which a request for the models was served.
async fn served_by(lessor: &Lessor) -> String {
    let answer = lessor.get("/openai/v1/models").await;
    assert_eq!(answer.status, 200, "{}", answer.text());
    answer.header("x-lessor-key").to_owned()
}

/// Uses this very key once.
async fn use_key(lessor: &Lessor, key: &str) -> u16 {
    lessor.ask(Request::get("/openai/v1/models").header("x-lessor-key", key)).await.status
}

async fn group_of(lessor: &Lessor, key: &str) -> Value {
    lessor.key(key).await["group"].clone()
}

#[tokio::test]
async fn six_dead_keys_and_a_good_one_serve_at_the_first_attempt_once_they_are_known_to_be_dead() {
    let provider = Provider::start(|seen| match seen.key() {
        "sk-bad1" | "sk-bad2" => invalid_key(),
        "sk-poor1" | "sk-poor2" => out_of_money(None),
        "sk-slow" => rate_limited("60"),
        "sk-far" => {
            let code = "unsupported_country_region_territory";
            Play::json(403, &openai_error("request_forbidden", code, "Country not supported"))
        }
        _ => openai(seen),
    })
    .await;
    let dead = ["bad1", "bad2", "poor1", "poor2", "slow", "far"];
    let keys = dead.into_iter().chain(["good"]).map(Key::new);
    let lessor = in_order(&provider, keys).start().await;
    // three attempts each: two requests find out that all six are dead
    for _ in 0..2 {
        assert!(lessor.chat().await.status >= 400);
    }
    assert_eq!(provider.count(), 6, "no dead key was tried twice: {:?}", provider.keys_seen());
    for _ in 0..3 {
        let answer = lessor.chat().await;
        let (key, attempts) = (answer.header("x-lessor-key"), answer.header("x-lessor-attempts"));
        assert_eq!((answer.status, key, attempts), (200, "good", "1"));
    }
    assert_eq!(provider.count(), 9);
    let mut found = Vec::new();
    for key in dead {
        found.push(lessor.status(key).await);
    }
    assert_eq!(found, ["invalid", "invalid", "exhausted", "exhausted", "available", "cooldown"]);
    assert_eq!(lessor.key("far").await["reason"], "region");
    assert_eq!(lessor.key("slow").await["cooldowns"][0]["reason"], "rate", "its model rests");
}

#[tokio::test]
async fn a_group_out_of_money_is_tried_once_however_many_keys_it_has() {
    let provider =
        Provider::start(
            |seen| {
                if seen.key().starts_with("sk-poor") { out_of_money(None) } else { openai(seen) }
            },
        )
        .await;
    let poor = (0..5).map(|n| Key::new(&format!("poor{n}")).group("org"));
    let lessor = in_order(&provider, poor.chain([Key::new("rich")])).start().await;
    for _ in 0..3 {
        assert_eq!(lessor.chat().await.header("x-lessor-key"), "rich");
    }
    assert_eq!(provider.keys_seen(), ["sk-poor0", "sk-rich", "sk-rich", "sk-rich"]);
    let key = lessor.key("poor3").await;
    let cooldown = &key["cooldowns"][0];
    assert_eq!((&cooldown["subject"], &cooldown["reason"]), (&"org".into(), &"quota".into()), "{key}");
    assert_eq!((&cooldown["status"], &cooldown["code"]), (&429.into(), &"insufficient_quota".into()));
}

#[tokio::test]
async fn keys_whose_answers_name_one_organisation_are_one_group_in_the_whole_fleet() {
    let poor = Arc::new(AtomicBool::new(false));
    let spent = Arc::clone(&poor);
    let provider = Provider::start(move |seen| {
        let acme = seen.key() != "sk-c";
        match acme && spent.load(Ordering::SeqCst) {
            true => out_of_money(Some(3600)),
            false => of_organization(if acme { "Acme" } else { "other" }),
        }
    })
    .await;
    let redis = Redis::start().await;
    let keys = || ["a", "b", "c"].map(|id| Key::new(id).group("auto"));
    let setup = || in_order(&provider, keys()).set("store.url", &format!("{:?}", redis.url()));
    let (one, two) = (setup().start().await, setup().start().await);
    assert_eq!(group_of(&one, "a").await, "auto");
    // what a caller names himself says nothing of the key
    let asks = Request::get("/openai/v1/models").header("x-lessor-key", "a");
    assert_eq!(one.ask(asks.header("openai-organization", "Acme")).await.status, 200);
    assert_eq!(group_of(&one, "a").await, "auto");
    for key in ["a", "b", "c"] {
        assert_eq!(use_key(&one, key).await, 200);
    }
    let learned = async || {
        let group = group_of(&two, "a").await;
        (group != "auto" && group == group_of(&two, "b").await).then_some(group)
    };
    let acme = eventually("both are known to be Acme's", learned).await;
    assert!(acme.as_str().unwrap().starts_with("auto.acme-"), "{acme}");
    eventually("the third is another's", async || {
        let other = group_of(&two, "c").await;
        (other != "auto" && other != acme).then_some(())
    })
    .await;

    poor.store(true, Ordering::SeqCst);
    let before = provider.count();
    // the one that learned it fails over past the whole group, the other tries none of it at all
    assert_eq!((served_by(&one).await, served_by(&two).await), ("c".into(), "c".into()));
    assert_eq!(provider.keys_seen()[before..], ["sk-a", "sk-c", "sk-c"]);
    assert_eq!(two.key("b").await["cooldowns"][0]["subject"], acme);
    assert_eq!(two.status("b").await, "exhausted", "its group is out of money");
}

#[tokio::test]
async fn while_all_keys_cool_fifty_retries_reach_no_provider_and_move_no_deadline() {
    let provider = Provider::start(|_| rate_limited("120")).await;
    let lessor = in_order(&provider, ["a", "b"].map(Key::new)).start().await;
    assert_eq!(lessor.get("/openai/v1/models").await.status, 429);
    assert_eq!(provider.count(), 2);
    let rests = async || {
        let keys = lessor.admin("/v1/keys").await.json();
        let of = |key: &Value| {
            let rest = &key["cooldowns"][0];
            (rest["since_ms"].clone(), rest["until_ms"].clone())
        };
        keys["keys"].as_array().unwrap().iter().map(of).collect::<Vec<_>>()
    };
    let before = rests().await;
    assert!(before.iter().all(|(since, until)| since.is_u64() && until.is_u64()), "{before:?}");
    for _ in 0..50 {
        lessor.get("/openai/v1/models").await.is_error(429, "pool_exhausted");
    }
    assert_eq!(rests().await, before);
    assert_eq!(provider.count(), 2);
}

#[tokio::test]
async fn a_wait_that_was_named_becomes_a_little_longer_and_never_shorter() {
    let provider = Provider::start(|_| rate_limited("400")).await;
    let keys: Vec<_> = (0..8).map(|n| format!("k{n}")).collect();
    let lessor = in_order(&provider, keys.iter().map(|id| Key::new(id))).start().await;
    let mut waits = Vec::new();
    for key in &keys {
        assert_eq!(use_key(&lessor, key).await, 429);
        let rest = lessor.key(key).await["cooldowns"][0].clone();
        waits.push(rest["until_ms"].as_u64().unwrap() - rest["since_ms"].as_u64().unwrap());
    }
    assert!(waits.iter().all(|wait| (400_000..=420_000).contains(wait)), "{waits:?}");
    assert!(waits.iter().any(|wait| *wait != waits[0]), "not all at one moment: {waits:?}");
}

/// Makes the rest of key `a` as if it had been set, and last been probed, so long ago.
async fn age(redis: &Redis, by: Duration) {
    let row = "lessor:{openai}:key:a";
    let fields = redis.command(&["HKEYS", row]).await;
    let field = fields.texts().into_iter().find(|name| name.starts_with("rest:")).unwrap().to_owned();
    let mut rest: Value = serde_json::from_str(redis.command(&["HGET", row, &field]).await.text()).unwrap();
    for time in ["since_ms", "probed_at_ms"] {
        rest[time] = (rest[time].as_u64().unwrap() - by.as_millis() as u64).into();
    }
    redis.command(&["HSET", row, &field, &rest.to_string()]).await;
}

#[tokio::test]
async fn an_account_that_is_filled_six_days_early_is_found_by_a_probe_within_half_an_hour() {
    let poor = Arc::new(AtomicBool::new(true));
    let spent = Arc::clone(&poor);
    let provider = Provider::start(move |seen| {
        if spent.load(Ordering::SeqCst) { out_of_money(Some(6 * 86_400)) } else { openai(seen) }
    })
    .await;
    let redis = Redis::start().await;
    let setup = in_order(&provider, [Key::new("a")]).set("store.url", &format!("{:?}", redis.url()));
    let lessor = setup.start().await;
    assert_eq!(lessor.chat().await.status, 429);
    // The store hears of it beside the answer.
    let exhausted = async || Some(lessor.key("a").await).filter(|a| a["status"] == "exhausted");
    let a = eventually("it is exhausted", exhausted).await;
    let left = a["cooldown_until_ms"].as_u64().unwrap() - a["cooldown_since_ms"].as_u64().unwrap();
    assert_eq!(left / 86_400_000, 6, "{a}");
    assert_eq!(a["evidence"], serde_json::json!({"status": 429, "code": "insufficient_quota"}));
    // 29 minutes later it still rests; after 31 one request tries it, and finds it as poor as before
    age(&redis, Duration::from_mins(29)).await;
    lessor.chat().await.is_error(429, "pool_exhausted");
    age(&redis, Duration::from_mins(2)).await;
    let answer = lessor.chat().await;
    assert_eq!((answer.status, answer.header("x-lessor-error")), (429, ""), "the provider's own word");
    lessor.chat().await.is_error(429, "pool_exhausted");
    assert_eq!(provider.count(), 2);
    poor.store(false, Ordering::SeqCst);
    age(&redis, Duration::from_mins(31)).await;
    assert_eq!(lessor.chat().await.status, 200);
    eventually("it is available", async || (lessor.status("a").await == "available").then_some(())).await;
    assert_eq!(lessor.chat().await.status, 200);
}

#[tokio::test]
async fn a_probe_whose_sidecar_dies_leaves_the_key_on_probation_and_another_probes_it() {
    let gate = Gate::default();
    let silent = gate.clone();
    let provider = Provider::start(move |seen| match seen.number {
        0 => out_of_money(Some(1)),
        1 => Play::new().until(&silent),
        _ => openai(seen),
    })
    .await;
    let redis = Redis::start().await;
    let setup = || {
        let setup = in_order(&provider, [Key::new("a")]).set("store.url", &format!("{:?}", redis.url()));
        setup.set("lease.ttl", "\"3s\"").set("lease.heartbeat", "\"1s\"")
    };
    let (mut one, two) = (setup().start().await, setup().start().await);
    assert_eq!(one.ask(chat("gpt-4o-mini").header("x-lessor-max-wait", "0s")).await.status, 429);
    eventually("its end", async || (two.status("a").await == "probation").then_some(())).await;
    let probe = tokio::spawn({
        let asking = one.door().clone();
        async move { support::client::send(&asking, chat("gpt-4o-mini")).await.is_ok() }
    });
    provider.request(2).await;
    // the only one: others wait for it
    let refused = two.ask(chat("gpt-4o-mini").header("x-lessor-max-wait", "0s")).await;
    refused.is_error(429, "pool_exhausted");
    one.crash();
    let died = Instant::now();
    probe.abort();
    assert_eq!(two.status("a").await, "probation", "nothing was learned");
    assert_eq!(two.chat().await.status, 200, "it waits for the dead one's lease to end");
    assert!(died.elapsed() < Duration::from_secs(6), "{:?}", died.elapsed());
    assert_eq!(two.status("a").await, "available");
    gate.open();
}

#[tokio::test]
async fn a_busy_provider_rests_and_one_probe_goes_while_its_keys_stay_available() {
    for status in [503, 529] {
        let gate = Gate::default();
        let held = gate.clone();
        let provider = Provider::builder()
            .manners(Manners::Anthropic)
            .start(move |seen| match seen.number {
                0 => Play::json(status, &anthropic_error("overloaded_error", "Overloaded")),
                1 => Play::new().until(&held).then(anthropic(seen)),
                _ => anthropic(seen),
            })
            .await;
        let setup = Setup::new().provider("anthropic", &provider).set("queue.max_wait", "\"20s\"");
        let setup = ["a", "b"].iter().fold(setup, |setup, id| setup.key(Key::new(id).of("anthropic")));
        let lessor = Arc::new(setup.start().await);
        let message = || {
            let body = serde_json::json!({"model": "claude", "max_tokens": 1, "messages": []});
            Request::post("/anthropic/v1/messages", &body)
        };
        assert_eq!(lessor.ask(message()).await.status, status);
        let keys = lessor.admin("/v1/keys").await.json();
        for key in keys["keys"].as_array().unwrap() {
            assert_eq!((&key["status"], &key["reason"]), (&"available".into(), &Value::Null), "{key}");
            assert_eq!(key["cooldowns"][0]["subject"], "anthropic|claude", "{key}");
        }
        let asking: Vec<_> = (0..5)
            .map(|_| {
                let (lessor, message) = (Arc::clone(&lessor), message());
                tokio::spawn(async move { lessor.ask(message).await.status })
            })
            .collect();
        provider.request(2).await;
        lessor.comes_to_queue(4).await;
        assert_eq!(provider.count(), 2, "the probe alone was sent");
        gate.open();
        for answer in asking {
            assert_eq!(answer.await.unwrap(), 200);
        }
        assert_eq!(provider.count(), 6);
    }
}

/// How many requests a key has under way, and how many were one too many.
struct Crowded {
    now: AtomicUsize,
    refused: AtomicUsize,
}

#[tokio::test]
async fn a_key_that_takes_fifty_at_once_is_soon_lent_fifty_times_at_once_and_hardly_ever_refused() {
    const MOST: usize = 50;
    const HOLD: Duration = ms(500);
    let crowd = Arc::new(Crowded { now: AtomicUsize::new(0), refused: AtomicUsize::new(0) });
    let doorman = Arc::clone(&crowd);
    let provider = Provider::start(move |seen| {
        let gate = Gate::default();
        if seen.key() == "sk-small" && doorman.now.fetch_add(1, Ordering::SeqCst) >= MOST {
            doorman.now.fetch_sub(1, Ordering::SeqCst);
            doorman.refused.fetch_add(1, Ordering::SeqCst);
            return Play::json(429, &openai_error("requests", "too_many_at_once", "Too many at once"));
        }
        let (opened, counted) = (gate.clone(), (seen.key() == "sk-small").then(|| Arc::clone(&doorman)));
        tokio::spawn(async move {
            tokio::time::sleep(HOLD).await; // the provider's work
            // it has left before its answer's first byte, so that a slot used again at once counts once
            if let Some(doorman) = counted {
                doorman.now.fetch_sub(1, Ordering::SeqCst);
            }
            opened.open();
        });
        Play::new().until(&gate).then(openai(seen))
    })
    .await;
    let rules = r#"[{ status = [429], code = "too_many_at_once", class = "concurrency", scope = "key" }]"#;
    let keys = ["small", "large"].map(|id| Key::new(id).cap(150));
    let lessor = Arc::new(in_order(&provider, keys).set("providers.openai.rules", rules).start().await);
    // 200 requests a second of half a second each: 100 at once, and all of them for `small` if it took them
    let (mut asking, mut every) = (Vec::new(), tokio::time::interval(ms(5)));
    let mut refused_at_first = 0;
    for number in 0..1600 {
        every.tick().await;
        if number == 400 {
            refused_at_first = crowd.refused.load(Ordering::SeqCst);
        }
        let lessor = Arc::clone(&lessor);
        asking.push(tokio::spawn(async move { lessor.chat().await.status }));
    }
    let learned = lessor.key("small").await["learned_concurrent_uses"].clone();
    for answer in asking {
        assert_eq!(answer.await.unwrap(), 200);
    }
    let refused = crowd.refused.load(Ordering::SeqCst) - refused_at_first;
    println!("refused: {refused_at_first} of the first 400, {refused} of the next 1200; learned: {learned}");
    assert!(refused_at_first > 0, "the load does not reach the limit");
    assert!(refused < 12, "{refused} of 1200 were refused");
    let learned = learned.as_u64().expect("a cap was learned") as usize;
    assert!((MOST * 8 / 10..=MOST).contains(&learned), "{learned}");
    for key in ["small", "large"] {
        assert_eq!(lessor.status(key).await, "available", "too many at once is no cooldown");
    }
}

#[tokio::test]
async fn a_maximum_that_the_provider_names_is_kept_to_by_all_keys_of_its_group() {
    let gate = Gate::default();
    let held = gate.clone();
    let provider = Provider::start(move |seen| {
        if seen.number == 3 {
            let error = serde_json::json!({"detail": {"status": "too_many_concurrent_requests"}});
            return Play::json_with(429, &[("maximum-concurrent-requests", "2")], &error);
        }
        Play::new().until(&held).then(openai(seen))
    })
    .await;
    let setup = in_order(&provider, ["a", "b"].map(|id| Key::new(id).cap(2).group("plan")));
    let rules = r#"[{ status = [429], code = "too_many_concurrent_requests", class = "concurrency", scope = "group" }]"#;
    let lessor = Arc::new(
        setup
            .set("providers.openai.rules", rules)
            .set("providers.openai.max_uses_header", "\"maximum-concurrent-requests\"")
            .start()
            .await,
    );
    let ask = || {
        let lessor = Arc::clone(&lessor);
        tokio::spawn(async move { lessor.chat().await.status })
    };
    let mut asking = Vec::new();
    for number in 1..=3 {
        asking.push(ask());
        provider.request(number).await;
    }
    let refused = ask();
    eventually("the maximum is learned", async || {
        (lessor.key("a").await["group_concurrent_uses"] == 2).then_some(())
    })
    .await;
    // both keys together have three under way, so nobody is sent until two of them are done
    let ahead = [ask(), ask()];
    lessor.comes_to_queue(2).await;
    assert_eq!(provider.count(), 4);
    let text = lessor.cli(&["status"]).await;
    assert!(text.ok().contains("plan: at most 2 at once"), "{}", text.stdout);
    let pool = text.stdout.lines().find(|line| line.starts_with("openai/default ")).expect("the pool's row");
    assert!(pool.contains("/2 of 4"), "{pool}");
    let pools = lessor.admin("/v1/pools").await.json();
    assert_eq!(pools["pools"][0]["learned_concurrent_uses"], 2, "{pools}");
    gate.open();
    for answer in asking.into_iter().chain(ahead) {
        assert_eq!(answer.await.unwrap(), 200);
    }
    assert_eq!(refused.await.unwrap(), 429, "its whole group is full, so nothing else could be tried");
}

#[tokio::test]
async fn a_cooldown_outlives_a_restart_says_why_and_ends_by_hand() {
    let poor = Arc::new(AtomicBool::new(true));
    let spent = Arc::clone(&poor);
    let provider =
        Provider::start(
            move |seen| {
                if spent.load(Ordering::SeqCst) { out_of_money(Some(7200)) } else { openai(seen) }
            },
        )
        .await;
    let dir = tempfile::tempdir().unwrap();
    let url = format!("\"sqlite://{}\"", dir.path().join("state.db").display());
    let setup = || in_order(&provider, [Key::new("a")]).set("store.url", &url);
    let mut lessor = setup().start().await;
    assert_eq!(lessor.chat().await.status, 429);
    let seen = lessor.key("a").await;
    lessor.sigterm();
    lessor.ends_within(Duration::from_secs(10)).await;

    let lessor = setup().start().await;
    let listed = lessor.cli(&["keys", "list", "--json"]).await;
    listed.ok();
    let again = &listed.json()["keys"][0];
    for field in ["status", "reason", "cooldown_since_ms", "cooldown_until_ms", "evidence"] {
        assert_eq!(again[field], seen[field], "{field}");
    }
    assert_eq!((&again["status"], &again["reason"]), (&"exhausted".into(), &"quota".into()));
    let text = lessor.cli(&["status"]).await;
    assert!(text.ok().contains("quota (429 insufficient_quota), ends in 2h"), "{}", text.stdout);
    assert!(!listed.stdout.contains("billing details"), "the answer's text is nobody's");
    lessor.chat().await.is_error(429, "pool_exhausted");
    assert_eq!(provider.count(), 1);

    poor.store(false, Ordering::SeqCst);
    lessor.cli(&["keys", "clear", "openai/a"]).await.ok();
    assert_eq!(lessor.status("a").await, "available");
    assert_eq!(lessor.chat().await.status, 200);
}

#[tokio::test]
async fn only_a_code_that_names_the_key_or_lessors_own_check_makes_a_key_invalid() {
    let revoked = Arc::new(AtomicBool::new(false));
    let gone = Arc::clone(&revoked);
    let provider = Provider::start(move |seen| match seen.path().ends_with("/models") {
        true if gone.load(Ordering::SeqCst) => {
            Play::json(401, &openai_error("", "invalid_api_key", "Unauthorized"))
        }
        true => openai(seen),
        false => wrong_organization(),
    })
    .await;
    let lessor = in_order(&provider, [Key::new("a")]).start().await;
    // doubted: the model rests, the check finds the key good, and so on whatever callers send
    assert_eq!(lessor.chat().await.status, 401);
    eventually("the check says good", async || {
        let a = lessor.key("a").await;
        assert_ne!(a["status"], "invalid");
        a["cooldowns"].as_array().unwrap().is_empty().then_some(())
    })
    .await;
    revoked.store(true, Ordering::SeqCst);
    let checked = lessor.cli(&["keys", "check", "openai/a"]).await;
    let said = "openai/a is not good: the provider refuses the key (invalid, HTTP 401 invalid_api_key)";
    assert_eq!((checked.code, checked.stdout.trim()), (Some(1), said));
    let a = lessor.key("a").await;
    assert_eq!((&a["status"], &a["reason"]), (&"invalid".into(), &"check".into()), "{a}");
    // Who looks sees what the check was answered, and who reads the log is warned.
    let status = lessor.cli(&["status"]).await;
    assert!(status.ok().contains("check (401 invalid_api_key)"), "{status:?}");
    let lines = lessor.log_lines();
    let found =
        |line: &&Value| field(line, "message").starts_with("lessor's own check found that this key is bad");
    let line = lines.iter().find(found).expect("a line of it");
    assert_eq!(
        (field(line, "level"), field(line, "code")),
        ("WARN".into(), "invalid_api_key".into()),
        "{line}"
    );
    // What lifts less than this says so, and what to do.
    let cleared = lessor.cli(&["keys", "clear", "openai/a"]).await;
    cleared.ok();
    assert!(
        cleared.stderr.contains("openai/a is not lent: it is invalid; give it another secret"),
        "{cleared:?}"
    );
    eventually_within(ms(5000), "it is not lent", async || (lessor.chat().await.status == 503).then_some(()))
        .await;
}

/// No such model, in OpenAI's words.
fn no_model() -> Play {
    let message = "The model `gpt-5-typo` does not exist or you do not have access to it.";
    Play::json(404, &openai_error("invalid_request_error", "model_not_found", message))
}

/// What lessor said, and the type of error that it named.
fn told(answer: &support::client::Answer) -> (String, String) {
    let message = answer.json()["error"]["message"].as_str().unwrap_or_default().to_owned();
    let status = answer.header("proxy-status").trim_start_matches("lessor; error=").to_owned();
    (message, status)
}

#[tokio::test]
async fn a_mistyped_model_stays_a_404_that_says_so_and_is_not_worth_a_retry() {
    let provider = Provider::start(|_| no_model()).await;
    let lessor = in_order(&provider, ["a", "b"].map(Key::new)).start().await;
    let first = lessor.ask(chat("gpt-5-typo")).await;
    assert_eq!((first.status, first.header("x-lessor-error")), (404, ""), "the provider's own word");
    let second = lessor.ask(chat("gpt-5-typo")).await;
    second.is_error(404, "no_candidate");
    assert_eq!(second.header("x-should-retry"), "false");
    let wait: u64 = second.header("retry-after").parse().unwrap();
    assert!((1700..=1900).contains(&wait), "{wait}");
    let (message, status) = told(&second);
    let said =
        "lessor: every key of pool `default` lacks access to model `gpt-5-typo` (the provider said so; ";
    assert!(message.starts_with(said), "{message}");
    assert!(!message.contains("caps"), "{message}");
    assert_eq!(status, "destination_not_found");
    assert_eq!(provider.count(), 2);
    // a key that is asked for by name says that it was
    let pinned = lessor.ask(chat("gpt-5-typo").header("x-lessor-key", "b")).await;
    pinned.is_error(404, "no_candidate");
    let (message, _) = told(&pinned);
    let said =
        "lessor: key `openai/b`, the one that X-Lessor-Key asks for, lacks access to model `gpt-5-typo`";
    assert!(message.starts_with(said), "{message}");
}

#[tokio::test]
async fn keys_that_may_not_be_used_from_here_are_a_404_too() {
    let far = openai_error("request_forbidden", "unsupported_country_region_territory", "Not supported");
    let provider = Provider::start(move |_| Play::json(403, &far)).await;
    let lessor = in_order(&provider, [Key::new("a")]).start().await;
    assert_eq!(lessor.chat().await.status, 403);
    let answer = lessor.chat().await;
    answer.is_error(404, "no_candidate");
    assert_eq!(answer.header("x-should-retry"), "false");
    let (message, _) = told(&answer);
    assert!(
        message.starts_with("lessor: every key of pool `default` may not be used from here"),
        "{message}"
    );
}

#[tokio::test]
async fn a_refusal_tells_what_keeps_each_key_and_asks_for_more_slots_only_where_slots_lack() {
    let gate = Gate::default();
    let held = gate.clone();
    let provider = Provider::start(move |seen| match seen.key() {
        "sk-a" | "sk-b" => rate_limited("40"),
        "sk-c" => out_of_money(Some(900)),
        "sk-d" => no_model(),
        _ => Play::new().until(&held).then(openai(seen)),
    })
    .await;
    let setup = || in_order(&provider, ["a", "b", "c", "d"].map(Key::new)).set("retry.max_attempts", "4");
    let lessor = setup().start().await;
    assert_eq!(lessor.chat().await.status, 404);
    let answer = lessor.chat().await;
    answer.is_error(429, "pool_exhausted");
    let (message, status) = told(&answer);
    let said = "lessor: all 4 keys of pool `default` that fit rest: 2 rate limited (the first for ";
    assert!(message.starts_with(said), "{message}");
    let word = "1 without access to model `gpt-4o-mini` (for ";
    for part in ["1 out of quota (for 1", word, "; try again in "] {
        assert!(message.contains(part), "{part}: {message}");
    }
    assert!(!message.contains("caps"), "{message}");
    assert_eq!((status.as_str(), answer.header("retry-after").len()), ("destination_unavailable", 2));

    // one that is asked for by name rests, while another is free
    let lessor = Arc::new(setup().key(Key::new("e").cap(1)).set("retry.max_attempts", "5").start().await);
    assert_eq!(use_key(&lessor, "a").await, 429);
    let pinned = lessor.ask(Request::get("/openai/v1/models").header("x-lessor-key", "a")).await;
    pinned.is_error(429, "pool_exhausted");
    let (message, _) = told(&pinned);
    let said =
        "lessor: key `openai/a`, the one that X-Lessor-Key asks for, rests: rate limited; try again in ";
    assert!(message.starts_with(said), "{message}");
    assert!(message.ends_with(", or without asking for that very key"), "{message}");

    // and where a key is in use, that is said, too
    let before = provider.count();
    let beside = Arc::clone(&lessor);
    let first = tokio::spawn(async move { beside.chat().await });
    provider.request(before + 4).await;
    let answer = lessor.ask(chat("gpt-4o-mini").header("x-lessor-max-wait", "0s")).await;
    answer.is_error(429, "pool_exhausted");
    let (message, status) = told(&answer);
    assert!(
        message.starts_with("lessor: all 5 keys of pool `default` that fit cannot be had now: "),
        "{message}"
    );
    assert!(message.contains("1 without a free slot"), "{message}");
    assert!(message.ends_with(", add keys or raise their caps"), "{message}");
    assert_eq!(status, "connection_limit_reached");
    gate.open();
    assert_eq!(first.await.unwrap().status, 200);
}

#[tokio::test]
async fn a_model_that_is_not_there_rests_no_key_where_only_the_path_names_it() {
    let provider =
        Provider::start(|seen| if seen.path().ends_with("typo") { no_model() } else { openai(seen) }).await;
    let lessor = in_order(&provider, ["a", "b"].map(Key::new)).start().await;
    for _ in 0..2 {
        let answer = lessor.get("/openai/v1/models/gpt-5-typo").await;
        assert_eq!((answer.status, answer.header("x-lessor-error")), (404, ""), "the provider's own word");
    }
    assert_eq!(served_by(&lessor).await, "a");
    assert_eq!(provider.keys_seen(), ["sk-a", "sk-b", "sk-a", "sk-b", "sk-a"]);
}

#[tokio::test]
async fn a_limit_of_the_provider_is_waited_for_or_told_at_once_as_check_explains() {
    for (seconds, tried, status) in [("30", 1, 429), ("1", 2, 200)] {
        let provider = Provider::start(move |seen| match seen.key() {
            "sk-a" => rate_limited(seconds),
            _ => openai(seen),
        })
        .await;
        let rule = "[{ status = [429], class = \"rate\", scope = \"provider_model\" }]";
        let setup = in_order(&provider, ["a", "b"].map(Key::new));
        let setup = setup.set("providers.openai.remove_rules", "[\"*\"]").set("providers.openai.rules", rule);
        let lessor = setup.start().await;
        let answer = lessor.chat().await;
        assert_eq!((answer.status, provider.count()), (status, tried), "{seconds}: {}", answer.text());
        assert_eq!(answer.header("x-lessor-error"), "");
    }
}

#[tokio::test]
async fn the_log_tells_of_a_refusal_what_rests_and_how_long_the_store_lets_it() {
    let provider = Provider::start(|seen| match seen.key() {
        "sk-a" => out_of_money(None),
        _ => openai(seen),
    })
    .await;
    let lessor = in_order(&provider, [Key::new("a").group("org"), Key::new("b")]).start().await;
    assert_eq!(lessor.chat().await.header("x-lessor-key"), "b");
    let line = eventually("the log's line", async || {
        let lines = lessor.log_lines();
        lines.into_iter().find(|line| line.to_string().contains("the provider refused a request"))
    })
    .await;
    let of = |name: &str| line.get(name).or_else(|| line["fields"].get(name)).cloned().unwrap_or_default();
    assert_eq!(["class", "scope", "group", "key"].map(of), ["quota", "group", "org", "a"].map(Value::from));
    let rests = of("rests_ms").as_u64().unwrap();
    assert!((890_000..=900_000).contains(&rests), "fifteen minutes, which nobody named: {line}");
}

#[tokio::test]
async fn a_check_of_a_good_key_that_rests_says_so_and_so_does_what_does_not_lend_it() {
    let provider = Provider::start(|seen| match seen.path().ends_with("/models") {
        true => openai(seen),
        false => out_of_money(None),
    })
    .await;
    let lessor = in_order(&provider, [Key::new("a")]).start().await;
    assert_eq!(lessor.chat().await.status, 429);
    eventually("it is exhausted", async || (lessor.status("a").await == "exhausted").then_some(())).await;
    let rests = "it is exhausted; its rest goes on, and `lessor keys clear openai/a` lifts it";
    let checked = lessor.cli(&["keys", "check", "openai/a"]).await;
    assert!(checked.ok().contains("openai/a is good") && checked.ok().contains(rests), "{checked:?}");
    let enabled = lessor.cli(&["keys", "enable", "openai/a"]).await;
    enabled.ok();
    assert!(enabled.stderr.contains(rests), "{enabled:?}");
    let cleared = lessor.cli(&["keys", "clear", "openai/a"]).await;
    cleared.ok();
    assert_eq!(cleared.stderr, "", "it is lent again");
    lessor.cli(&["keys", "disable", "openai/a"]).await.ok();
    let cleared = lessor.cli(&["keys", "clear", "openai/a"]).await;
    cleared.ok();
    assert!(cleared.stderr.contains("it is disabled; `lessor keys enable openai/a`"), "{cleared:?}");
}

//! What refusals may not do: words of a caller's, a moment's trouble or one caller's mistake keep no key from others,
//! and nobody waits beyond a bound.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::pedantic, missing_docs, unreachable_pub)]

mod support;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use serde_json::Value;
use support::lessor::chat;
use support::plays::{openai, openai_error, wrong_organization};
use support::provider::Manners;
use support::redis::Redis;
use support::{Key, Lessor, Play, Provider, Request, Setup, eventually};

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

/// A key's own rest, aged in Redis by more than it lasts.
async fn is_over(lessor: &Lessor, redis: &Redis) {
    let row = "lessor:{openai}:key:a";
    let fields = redis.command(&["HKEYS", row]).await;
    let field = fields.texts().into_iter().find(|name| name.starts_with("rest:")).unwrap().to_owned();
    let mut rest: Value = serde_json::from_str(redis.command(&["HGET", row, &field]).await.text()).unwrap();
    rest["until_ms"] = (rest["until_ms"].as_u64().unwrap() - 120_000).into();
    redis.command(&["HSET", row, &field, &rest.to_string()]).await;
    assert_eq!(lessor.status("a").await, "available");
}

#[tokio::test]
async fn a_moment_in_which_the_provider_refuses_everybody_makes_no_key_invalid() {
    let down = Arc::new(AtomicBool::new(true));
    let moment = Arc::clone(&down);
    let provider = Provider::start(move |seen| {
        if moment.load(Ordering::SeqCst) {
            Play::json(401, &openai_error("", "", "Unauthorized"))
        } else {
            openai(seen)
        }
    })
    .await;
    let redis = Redis::start().await;
    let setup = in_order(&provider, [Key::new("a")]).set("store.url", &format!("{:?}", redis.url()));
    let lessor = setup.start().await;
    assert_eq!(lessor.chat().await.status, 401);
    // lessor's check is refused as well: a minute's rest, until another decides
    eventually("the check rests it", async || (lessor.key("a").await["reason"] == "check").then_some(()))
        .await;
    let a = lessor.key("a").await;
    assert_eq!(a["status"], "cooldown", "{a}");
    let left = a["cooldown_until_ms"].as_u64().unwrap() - a["cooldown_since_ms"].as_u64().unwrap();
    assert_eq!(left, 60_000, "{a}");
    down.store(false, Ordering::SeqCst);
    is_over(&lessor, &redis).await;
    // the model's own rest came of the first refusal
    assert_eq!(lessor.ask(chat("gpt-4o-another")).await.status, 200);
}

#[tokio::test]
async fn what_one_caller_is_refused_for_keeps_no_key_from_another() {
    let provider = Provider::start(|seen| match seen.path() {
        "/v1/admin" => Play::json(403, &openai_error("", "", "not for you")),
        path if path.ends_with("/models") => openai(seen),
        _ if !seen.header("openai-organization").is_empty() => wrong_organization(),
        _ => openai(seen),
    })
    .await;
    let keys = ["a", "b"].map(Key::new);
    let lessor = in_order(&provider, keys).set("queue.max_wait", "\"0s\"").start().await;
    let wrong = || chat("gpt-4o-mini").header("openai-organization", "org-wrong");
    for round in 0..10 {
        // a path without a model rests nothing, whatever lessor's check says and when
        assert_eq!(lessor.ask(Request::get("/openai/v1/admin")).await.status, 403);
        assert_eq!(lessor.chat().await.status, 200, "{round}");
        for id in ["a", "b"] {
            assert_eq!(lessor.status(id).await, "available", "{round}");
        }
    }
    let checked = || provider.seen().iter().filter(|seen| seen.path().ends_with("/models")).count();
    eventually("both were checked", async || (checked() == 2).then_some(())).await;
    for round in 0..10 {
        // and while the checks' good word is fresh, neither does one with a model
        assert_eq!(lessor.ask(wrong()).await.status, 401, "{round}");
        assert_eq!(lessor.chat().await.status, 200, "{round}");
    }
    assert_eq!(checked(), 2, "a check costs, so there are few");
}

#[tokio::test]
async fn what_a_caller_sent_proves_no_key_bad_when_the_provider_repeats_it() {
    let words = "Incorrect API key provided";
    let provider = Provider::builder()
        .manners(Manners::Open)
        .start(move |seen| {
            if seen.path().ends_with("/models") {
                return openai(seen);
            }
            let input = serde_json::json!([{"type": "string_type", "msg": "a valid string", "input": words}]);
            Play::json(400, &serde_json::json!({ "detail": input }))
        })
        .await;
    let setup = Setup::new().provider("xai", &provider).key(Key::new("a").of("xai"));
    let lessor = setup.start().await;
    let body = serde_json::json!({"model": words, "messages": []});
    assert_eq!(lessor.ask(Request::post("/xai/v1/chat/completions", &body)).await.status, 400);
    let keys = lessor.admin("/v1/keys").await.json();
    assert_eq!(keys["keys"][0]["status"], "available", "{keys}");
}

#[tokio::test]
async fn nobody_waits_longer_than_ten_minutes_whatever_a_request_asks_for() {
    // an account that is empty for an hour: who would wait that long waits for it
    let provider = Provider::start(|_| out_of_money(Some(3600))).await;
    let lessor = in_order(&provider, [Key::new("a")]).start().await;
    assert_eq!(lessor.chat().await.status, 429);
    let refused = lessor.ask(chat("gpt-4o-mini").header("x-lessor-max-wait", "9999h")).await;
    refused.is_error(429, "pool_exhausted");
    let lessor = in_order(&provider, [Key::new("a")]).set("queue.max_wait", "\"2h\"").start().await;
    assert_eq!(lessor.ask(chat("gpt-4o-mini").header("x-lessor-max-wait", "0s")).await.status, 429);
    let lessor = Arc::new(lessor);
    let waits = tokio::spawn({
        let lessor = Arc::clone(&lessor);
        async move { lessor.ask(chat("gpt-4o-mini").header("x-lessor-max-wait", "9999h")).await.status }
    });
    lessor.comes_to_queue(1).await;
    waits.abort();
}

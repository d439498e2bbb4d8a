//! Whom an answer may rest: what one caller makes a provider say stops no other, and frees nobody either.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::pedantic, missing_docs, unreachable_pub)]

mod support;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use futures_util::future::join_all;
use support::client::full;
use support::lessor::chat;
use support::plays::{openai, openai_error};
use support::provider::{Gate, Seen};
use support::{Key, Lessor, Play, Provider, Request, Setup};

const CHAT: &str = "/openai/v1/chat/completions";

fn no_such_model() -> Play {
    Play::json(404, &openai_error("invalid_request_error", "model_not_found", "The model does not exist"))
}

fn model_of(seen: &Seen) -> String {
    let body: serde_json::Value = serde_json::from_slice(&seen.body).unwrap_or_default();
    body["model"].as_str().unwrap_or_default().to_owned()
}

async fn two_keys(provider: &Provider) -> Lessor {
    let setup = Setup::openai(provider).key(Key::new("a").group("org")).key(Key::new("b").group("org"));
    setup.set("queue.max_wait", "\"1s\"").start().await
}

fn asked(body: impl Into<bytes::Bytes>) -> Request {
    Request::new("POST", CHAT).header("content-type", "application/json").body(full(body))
}

#[tokio::test]
async fn a_model_that_cannot_be_read_and_does_not_exist_rests_no_key() {
    let provider = Provider::start(|seen| {
        if seen.path().starts_with("/v1/files") {
            let missing =
                openai_error("invalid_request_error", "missing_scope", "Missing scopes: api.files.read");
            return Play::json(403, &missing);
        }
        if model_of(seen) == "gpt-4o" { openai(seen) } else { no_such_model() }
    })
    .await;
    let lessor = two_keys(&provider).await;
    let handshake = Request::get("/openai/v1/realtime?model=spoken")
        .header("connection", "upgrade")
        .header("upgrade", "websocket")
        .header("sec-websocket-version", "13")
        .header("sec-websocket-key", "dGhlIHNhbXBsZSBub25jZQ==");
    let requests = [
        Request::get("/openai/v1/models/nope"),
        Request::get("/openai/v1/files"),
        handshake,
        asked(format!(r#"{{"model":"{}"}}"#, "x".repeat(300))),
        asked(r#"{"model":"twice","model":"twice"}"#),
        asked(r#"{"model":5}"#),
        asked(r#"{"model":"bytes"}"#).header("content-type", "application/octet-stream"),
        asked("{}"),
    ];
    for request in requests {
        let answer = lessor.ask(request).await;
        assert!([403, 404].contains(&answer.status), "{}", answer.text());
        assert_eq!(answer.header("x-lessor-attempts"), "2", "another key may have what this one lacks");
        let served = lessor.ask(chat("gpt-4o")).await;
        assert_eq!((served.status, served.header("x-lessor-attempts")), (200, "1"), "{}", served.text());
    }
    // What could be read, in a handshake's query too, rests for itself.
    for key in ["a", "b"] {
        let seen = lessor.key(key).await;
        let rests = seen["cooldowns"].as_array().unwrap();
        let subjects: Vec<_> = rests.iter().map(|rest| rest["subject"].as_str().unwrap()).collect();
        assert!(subjects.contains(&format!("{key}|spoken").as_str()), "{seen}");
        assert!(subjects.iter().all(|subject| !subject.ends_with("|-")), "{seen}");
        assert_eq!(seen["status"], "available");
    }
}

#[tokio::test]
async fn a_fault_or_a_limit_of_a_path_without_a_model_rests_only_requests_like_that() {
    let provider = Provider::start(|seen| match seen.path() {
        "/v1/crash" => Play::json(500, &openai_error("server_error", "", "The server had an error")),
        "/v1/busy" => {
            Play::json_with(503, &[("retry-after", "60")], &openai_error("server_error", "overloaded", ""))
        }
        "/v1/limited" => {
            let limit = openai_error("requests", "rate_limit_exceeded", "Rate limit reached for files");
            Play::json_with(429, &[("retry-after", "3600")], &limit)
        }
        _ => openai(seen),
    })
    .await;
    let lessor = two_keys(&provider).await;
    let post = |path: &str| lessor.ask(Request::new("POST", &format!("/openai/v1/{path}")).body(full("x")));
    for _ in 0..3 {
        assert_eq!((post("crash").await.status, lessor.chat().await.status), (500, 200));
        assert_eq!(lessor.get("/openai/v1/models").await.status, 200, "a plain 500 rests nobody");
    }
    for (path, status, subject) in [("limited", 429, "org|-"), ("busy", 503, "openai|-")] {
        assert_eq!(post(path).await.status, status);
        assert_eq!(lessor.chat().await.status, 200, "after {path}");
        let rests = lessor.key("a").await["cooldowns"].clone();
        assert_eq!(rests[0]["subject"], subject, "{rests}");
        lessor.get("/openai/v1/models").await.is_error(429, "pool_exhausted");
        lessor.cli(&["keys", "clear", "openai/a"]).await.ok();
    }
}

#[tokio::test]
async fn a_thousand_made_up_models_do_not_send_one_request_more_to_an_exhausted_account() {
    let sent = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&sent);
    let provider = Provider::start(move |seen| match model_of(seen).as_str() {
        "gpt-4o" if seen.key() != "sk-rich" => {
            count.fetch_add(1, Ordering::SeqCst);
            Play::json(429, &openai_error("insufficient_quota", "insufficient_quota", "No money"))
        }
        "gpt-4o" => openai(seen),
        _ => no_such_model(),
    })
    .await;
    let keys = ["a", "b"].map(|id| Key::new(id).group("org"));
    let setup = keys.into_iter().fold(Setup::openai(&provider), Setup::key).key(Key::new("rich").cap(64));
    let lessor = setup.set("queue.max_wait", "\"0s\"").start().await;
    let with = |key: &str, model: &str| lessor.ask(chat(model).header("x-lessor-key", key));
    assert_eq!(with("a", "gpt-4o").await.status, 429);
    for round in 0..30 {
        let names = (0..40).map(|number| format!("made-up-{round}-{number}"));
        join_all(names.map(async |name| assert_eq!(with("rich", &name).await.status, 404))).await;
    }
    for key in ["a", "b"] {
        with(key, "gpt-4o").await.is_error(429, "pool_exhausted");
    }
    assert_eq!(sent.load(Ordering::SeqCst), 1);
    let rests = lessor.key("rich").await["cooldowns"].as_array().unwrap().len();
    assert!(rests < 1024, "{rests}");
    assert_eq!(with("rich", "gpt-4o").await.status, 200);
}

#[tokio::test]
async fn a_key_that_a_person_cleared_is_rested_by_nothing_that_was_under_way() {
    let gate = Gate::default();
    let held = gate.clone();
    let provider = Provider::start(move |seen| {
        let limit = Play::json_with(
            429,
            &[("retry-after", "600")],
            &openai_error("requests", "rate_limit_exceeded", ""),
        );
        if seen.number < 2 { Play::new().until(&held).then(limit) } else { openai(seen) }
    })
    .await;
    let lessor = Setup::openai(&provider).key(Key::new("a")).set("retry.max_attempts", "1").start().await;
    let (first, second) = (lessor.chat(), lessor.chat());
    let cleared = async {
        lessor.comes_to_use("a", 2).await;
        provider.request(1).await;
        lessor.cli(&["keys", "clear", "openai/a"]).await.ok();
        gate.open();
    };
    let (first, second, ()) = tokio::join!(first, second, cleared);
    assert_eq!((first.status, second.status), (429, 429));
    lessor.is_free_within_a_second("a").await;
    assert_eq!(
        (lessor.chat().await.status, lessor.key("a").await["cooldowns"].clone()),
        (200, serde_json::json!([]))
    );
}

#[tokio::test]
async fn a_success_that_costs_nothing_ends_no_exhaustion() {
    let provider = Provider::start(|seen| {
        if seen.path().ends_with("/models") {
            return openai(seen);
        }
        let empty = openai_error("insufficient_quota", "insufficient_quota", "No money");
        if seen.number == 0 { Play::json_with(429, &[("retry-after", "1")], &empty) } else { openai(seen) }
    })
    .await;
    let lessor = Setup::openai(&provider).key(Key::new("a")).start().await;
    assert_eq!(lessor.chat().await.status, 429);
    support::eventually("the time it named is over", async || {
        (lessor.status("a").await == "probation").then_some(())
    })
    .await;
    assert_eq!(lessor.get("/openai/v1/models").await.status, 200);
    lessor.is_free_within_a_second("a").await;
    assert_eq!(lessor.status("a").await, "probation");
    assert_eq!(lessor.chat().await.status, 200);
    lessor.is_free_within_a_second("a").await;
    assert_eq!(lessor.status("a").await, "available");
}

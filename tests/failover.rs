//! What becomes of a refusal: another key where one may serve, the right rest for the key, the provider's own word else.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::pedantic, missing_docs, unreachable_pub)]

mod support;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant, SystemTime};

use support::client::patterned;
use support::lessor::chat;
use support::plays::{
    anthropic, anthropic_error, invalid_key, openai, openai_error, rate_limited, wrong_organization,
};
use support::provider::Manners;
use support::{Key, Lessor, Play, Provider, Request, Setup, eventually, ms};

/// A lessor that tries `a` before `b`.
async fn two_keys(provider: &Provider) -> Lessor {
    two_keys_and(provider, |setup| setup).await
}

async fn two_keys_and(provider: &Provider, more: impl FnOnce(Setup) -> Setup) -> Lessor {
    let setup = Setup::openai(provider).key(Key::new("a")).key(Key::new("b"));
    more(setup.set("ranking.strategy", "\"fill_first\"")).start().await
}

/// Whether the key rests, for every model or for one.
fn rests(key: &serde_json::Value) -> bool {
    key["status"] == "rate_limited" || key["cooldowns"].as_array().is_some_and(|all| !all.is_empty())
}

fn now_ms() -> u64 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap().as_millis() as u64
}

#[tokio::test]
async fn a_refusal_whose_body_never_ends_is_judged_by_what_there_is() {
    let provider = Provider::start(|seen| match seen.key() {
        "sk-a" => {
            Play::new().head(429, &[("content-length", "1000"), ("retry-after", "20")]).bytes("{").silence()
        }
        _ => openai(seen),
    })
    .await;
    let lessor = two_keys(&provider).await;
    let begun = Instant::now();
    let answer = lessor.get("/openai/v1/models").await;
    assert_eq!((answer.status, answer.header("x-lessor-key")), (200, "b"), "{}", answer.text());
    assert!(begun.elapsed() < Duration::from_secs(15), "{:?}", begun.elapsed());
    assert!(rests(&lessor.key("a").await));
    lessor.is_free_within_a_second("a").await;
}

#[tokio::test]
async fn a_key_the_provider_rate_limits_cools_down_and_the_request_succeeds_with_another() {
    let refused = AtomicBool::new(false);
    let provider = Provider::start(move |seen| {
        // the first request with `a` is refused, and no other
        if seen.key() == "sk-a" && !refused.swap(true, Ordering::SeqCst) {
            rate_limited("2")
        } else {
            openai(seen)
        }
    })
    .await;
    let lessor = two_keys(&provider).await;
    let begun = now_ms();
    let answer = lessor.get("/openai/v1/models").await;
    assert_eq!(
        (answer.status, answer.header("x-lessor-key"), answer.header("x-lessor-attempts")),
        (200, "b", "2")
    );
    assert!(!answer.headers.contains_key("retry-after"), "nothing of the refusal is left");
    assert_eq!(provider.keys_seen(), ["sk-a", "sk-b"]);
    let a = lessor.key("a").await;
    assert_eq!((&a["status"], &a["cooldowns"][0]["subject"]), (&"available".into(), &"a|-".into()), "{a}");
    let until = a["cooldowns"][0]["until_ms"].as_u64().unwrap();
    assert!((begun + 1900..=now_ms() + 2100).contains(&until), "rests for 2 s: {a}");
    assert_eq!(lessor.status("b").await, "available");
    assert_eq!(lessor.get("/openai/v1/models").await.header("x-lessor-key"), "b", "while `a` rests");
    let used_again =
        async || (lessor.get("/openai/v1/models").await.header("x-lessor-key") == "a").then(now_ms);
    let at = eventually("`a` is used again", used_again).await;
    assert!(at + 5 >= until, "used {} ms too early", until - at);
    assert_eq!(lessor.status("a").await, "available");
}

#[tokio::test]
async fn a_rate_limit_on_one_model_leaves_the_key_to_the_others() {
    let provider = Provider::start(|seen| {
        let refused = seen.key() == "sk-a" && seen.json()["model"] == "gpt-4o-mini";
        if refused { rate_limited("20") } else { openai(seen) }
    })
    .await;
    let lessor = two_keys(&provider).await;
    for _ in 0..2 {
        assert_eq!(lessor.ask(chat("gpt-4o-mini")).await.header("x-lessor-key"), "b");
        assert_eq!(lessor.ask(chat("o1-mini")).await.header("x-lessor-key"), "a");
    }
    assert_eq!(provider.keys_seen(), ["sk-a", "sk-b", "sk-a", "sk-b", "sk-a"]);
    let a = lessor.key("a").await;
    assert_eq!((&a["status"], &a["cooldowns"][0]["reason"]), (&"available".into(), &"rate".into()), "{a}");
}

#[tokio::test]
async fn when_all_keys_cool_a_request_waits_if_its_wait_allows() {
    let refused = AtomicBool::new(false);
    let provider =
        Provider::start(
            move |seen| {
                if refused.swap(true, Ordering::SeqCst) { openai(seen) } else { rate_limited("1") }
            },
        )
        .await;
    let lessor = Setup::openai(&provider).key(Key::new("a")).start().await;
    assert_eq!(lessor.ask(chat("gpt-4o-mini").header("x-lessor-max-wait", "0s")).await.status, 429);
    let begun = Instant::now();
    let answer = lessor.chat().await;
    assert_eq!(answer.status, 200);
    assert!(begun.elapsed() > ms(500), "it waited for the cooldown's end");
}

#[tokio::test]
async fn when_all_keys_cool_for_longer_than_the_wait_it_is_429_at_once_with_the_earliest_end() {
    let provider = Provider::start(|seen| rate_limited(if seen.key() == "sk-a" { "20" } else { "40" })).await;
    let lessor = two_keys_and(&provider, |setup| setup.set("queue.max_wait", "\"2s\"")).await;
    assert_eq!(lessor.chat().await.status, 429);
    assert_eq!(provider.count(), 2);
    let begun = Instant::now();
    let answer = lessor.chat().await;
    answer.is_error(429, "pool_exhausted");
    assert!(begun.elapsed() < ms(1500), "hopeless, and so refused at once");
    let retry_after: u64 = answer.header("retry-after").parse().unwrap();
    assert!((17..=21).contains(&retry_after), "{retry_after}");
    assert_eq!(provider.count(), 2);
}

#[tokio::test]
async fn with_one_key_only_the_providers_own_429_comes_through_unchanged() {
    let provider = Provider::start(|_| rate_limited("20")).await;
    let lessor = Setup::openai(&provider).key(Key::new("a")).start().await;
    let answer = lessor.chat().await;
    assert_eq!((answer.status, answer.header("retry-after")), (429, "20"));
    assert_eq!((answer.header("x-request-id"), answer.header("x-lessor-error")), ("req-429", ""));
    let error = openai_error("requests", "rate_limit_exceeded", "Rate limit reached for requests");
    assert_eq!(answer.text(), error.to_string());
    assert!(rests(&lessor.key("a").await));
}

#[tokio::test]
async fn a_key_the_provider_calls_invalid_is_never_tried_again_until_checked() {
    let good = Arc::new(AtomicBool::new(false));
    let now_good = Arc::clone(&good);
    let provider = Provider::start(move |seen| {
        if seen.key() == "sk-a" && !now_good.load(Ordering::SeqCst) { invalid_key() } else { openai(seen) }
    })
    .await;
    let lessor = two_keys(&provider).await;
    for _ in 0..3 {
        assert_eq!(lessor.chat().await.header("x-lessor-key"), "b");
    }
    assert_eq!(provider.keys_seen(), ["sk-a", "sk-b", "sk-b", "sk-b"]);
    assert_eq!(lessor.status("a").await, "invalid");
    lessor.admin_post("/v1/keys/openai/a/check").await;
    eventually("the check", async || {
        (provider.keys_seen().iter().filter(|key| *key == "sk-a").count() == 2).then_some(())
    })
    .await;
    assert_eq!(lessor.status("a").await, "invalid", "still bad");
    good.store(true, Ordering::SeqCst);
    let checked = lessor.admin_post("/v1/keys/openai/a/check").await;
    assert_eq!(checked.status, 200, "{}", checked.text());
    eventually("`a` is available", async || (lessor.status("a").await == "available").then_some(())).await;
    assert_eq!(lessor.chat().await.header("x-lessor-key"), "a");
}

#[tokio::test]
async fn an_app_that_names_a_wrong_organization_cannot_make_a_key_invalid() {
    let provider = Provider::start(|seen| {
        if seen.header("openai-organization") == "org-other" { wrong_organization() } else { openai(seen) }
    })
    .await;
    let lessor = two_keys(&provider).await;
    let answer = lessor.ask(chat("gpt-4o-mini").header("openai-organization", "org-other")).await;
    assert_eq!((answer.status, answer.header("x-lessor-error")), (401, ""), "{}", answer.text());
    for key in ["a", "b"] {
        let healed = async || {
            let status = lessor.status(key).await;
            assert_ne!(status, "invalid");
            (status == "available").then_some(())
        };
        eventually("the key is available, after lessor's own check", healed).await;
    }
    assert_eq!(lessor.chat().await.status, 200);
}

#[tokio::test]
async fn a_replayed_request_is_the_same_to_the_byte() {
    let provider =
        Provider::start(|seen| if seen.key() == "sk-a" { rate_limited("20") } else { openai(seen) }).await;
    let lessor = two_keys(&provider).await;
    let len = (3 << 20) + 17;
    let request =
        Request::new("POST", "/openai/v1/chat/completions?x=1").header("x-mine", "1").body(patterned(len));
    let answer = lessor.ask(request).await;
    assert_eq!((answer.status, answer.header("x-lessor-key")), (200, "b"));
    let seen = provider.seen();
    assert_eq!((seen[0].body_len, seen[0].body_is_pattern), (len, true));
    assert_eq!((seen[1].body_len, seen[1].body_is_pattern), (len, true));
    assert_eq!(seen[0].raw_head.replace("sk-a", "sk-b"), seen[1].raw_head);
}

#[tokio::test]
async fn a_body_beyond_max_body_streams_and_its_refusal_is_passed_on() {
    let provider =
        Provider::start(|seen| if seen.key() == "sk-a" { rate_limited("20") } else { openai(seen) }).await;
    let lessor = two_keys_and(&provider, |setup| setup.set("retry.max_body", "\"64KiB\"")).await;
    let upload = |len| Request::new("POST", "/openai/v1/chat/completions").body(patterned(len));
    let answer = lessor.ask(upload(1 << 20)).await;
    assert_eq!((answer.status, answer.header("x-lessor-error")), (429, ""), "the provider's own");
    assert_eq!(provider.keys_seen(), ["sk-a"]);
    assert!(rests(&lessor.key("a").await));
    assert_eq!(lessor.ask(upload(1 << 20)).await.status, 200, "the next one takes the other key");
}

#[tokio::test]
async fn a_request_is_sent_at_most_max_attempts_times() {
    let provider = Provider::start(|_| rate_limited("20")).await;
    let setup =
        ["a", "b", "c", "d"].iter().fold(Setup::openai(&provider), |setup, id| setup.key(Key::new(id)));
    let lessor = setup.start().await;
    let answer = lessor.chat().await;
    assert_eq!((answer.status, answer.header("retry-after")), (429, "20"));
    assert_eq!(provider.count(), 3);
}

#[tokio::test]
async fn a_key_of_a_group_that_was_just_cooled_is_not_tried() {
    let provider =
        Provider::start(|seen| if seen.key() == "sk-c" { openai(seen) } else { rate_limited("20") }).await;
    let setup = Setup::openai(&provider)
        .key(Key::new("a").group("org-1"))
        .key(Key::new("b").group("org-1"))
        .key(Key::new("c").group("org-2"));
    let lessor = setup.set("ranking.strategy", "\"fill_first\"").start().await;
    assert_eq!(lessor.chat().await.header("x-lessor-key"), "c");
    assert_eq!(provider.keys_seen(), ["sk-a", "sk-c"]);
}

#[tokio::test]
async fn a_key_without_credit_is_exhausted_and_another_serves() {
    let provider = Provider::start(|seen| {
        if seen.key() == "sk-a" {
            let message = "You exceeded your current quota, please check your plan and billing details.";
            return Play::json(429, &openai_error("insufficient_quota", "insufficient_quota", message));
        }
        openai(seen)
    })
    .await;
    let lessor = two_keys(&provider).await;
    assert_eq!(lessor.chat().await.header("x-lessor-key"), "b");
    assert_eq!(lessor.status("a").await, "exhausted");
}

#[tokio::test]
async fn a_providers_failure_is_passed_on_and_blames_no_key() {
    for status in [500, 502, 503] {
        let provider = Provider::start(move |seen| {
            if seen.number == 0 {
                Play::json(status, &openai_error("server_error", "server_error", "The server had an error"))
            } else {
                openai(seen)
            }
        })
        .await;
        let lessor = two_keys(&provider).await;
        let answer = lessor.chat().await;
        assert_eq!((answer.status, answer.header("x-lessor-error")), (status, ""));
        assert_eq!(provider.count(), 1, "a POST that the provider took is not sent again");
        assert_eq!(
            (lessor.status("a").await, lessor.status("b").await),
            ("available".into(), "available".into())
        );
        assert_eq!(lessor.chat().await.status, 200, "after {status}");
    }
}

#[tokio::test]
async fn an_overloaded_provider_blames_no_key() {
    let provider = Provider::builder()
        .manners(Manners::Anthropic)
        .start(|seen| {
            if seen.number == 0 {
                Play::json(529, &anthropic_error("overloaded_error", "Overloaded"))
            } else {
                anthropic(seen)
            }
        })
        .await;
    let lessor =
        Setup::new().provider("anthropic", &provider).key(Key::new("a").of("anthropic")).start().await;
    let message = || {
        Request::post(
            "/anthropic/v1/messages",
            &serde_json::json!({"model": "claude", "max_tokens": 1, "messages": []}),
        )
    };
    let answer = lessor.ask(message()).await;
    assert_eq!((answer.status, answer.header("x-lessor-error")), (529, ""), "{}", answer.text());
    assert_eq!(lessor.status("a").await, "available");
    assert_eq!(lessor.ask(message()).await.status, 200, "after the provider's rest");
}

#[tokio::test]
async fn what_the_caller_did_wrong_is_passed_on_and_blames_no_key() {
    for status in [400, 404, 413, 422] {
        let provider = Provider::start(move |_| {
            Play::json(status, &openai_error("invalid_request_error", "bad", "bad"))
        })
        .await;
        let lessor = two_keys(&provider).await;
        let answer = lessor.chat().await;
        assert_eq!((answer.status, answer.header("x-lessor-error")), (status, ""));
        assert_eq!((provider.count(), lessor.status("a").await.as_str()), (1, "available"));
    }
}

#[tokio::test]
async fn a_provider_that_is_down_is_502_in_bounded_time_and_blames_no_key() {
    let provider = Provider::plain(openai).await;
    let setup = Setup::openai(&provider).key(Key::new("a")).key(Key::new("b"));
    drop(provider);
    let lessor = setup.start().await;
    let begun = Instant::now();
    let answer = lessor.chat().await;
    answer.is_error(502, "upstream_unreachable");
    assert!(begun.elapsed() < Duration::from_secs(8), "{:?}", begun.elapsed());
    assert_eq!(
        (lessor.status("a").await, lessor.status("b").await),
        ("available".into(), "available".into())
    );
    lessor.is_free_within_a_second("a").await;
}

#[tokio::test]
async fn a_stream_that_began_is_never_moved_to_another_key() {
    let provider = Provider::start(|_| Play::sse().event("one").wait(ms(20)).cut(support::Cut::Reset)).await;
    let lessor = two_keys(&provider).await;
    assert!(lessor.open(chat("gpt-4o-mini")).await.whole().await.is_err());
    assert_eq!(provider.count(), 1);
}

#[tokio::test]
async fn a_kept_connection_that_the_provider_closed_meanwhile_fails_no_request() {
    let provider = Provider::start(|seen| openai(seen).cut(support::Cut::Close)).await;
    let lessor = two_keys(&provider).await;
    for _ in 0..10 {
        assert_eq!(lessor.get("/openai/v1/models").await.status, 200);
    }
    assert_eq!(provider.count(), 10);
}

#[tokio::test]
async fn failovers_and_cooldowns_are_counted_by_reason() {
    let provider =
        Provider::start(|seen| if seen.key() == "sk-a" { rate_limited("20") } else { openai(seen) }).await;
    let lessor = two_keys(&provider).await;
    assert_eq!(lessor.chat().await.status, 200);
    let text = lessor.admin("/metrics").await.text();
    for line in ["lessor_failovers_total{reason=\"rate\"} 1", "lessor_key_cooldowns_total{reason=\"rate\"} 1"]
    {
        assert!(text.contains(line), "no {line} in\n{text}");
    }
}

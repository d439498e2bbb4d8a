//! Who gets a key, when, and which: queues, waits, models, pools, apps.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::pedantic, missing_docs, unreachable_pub)]

mod support;

use std::sync::Arc;
use std::time::Instant;

use serde_json::json;
use support::lessor::{Home, chat};
use support::plays::{anthropic, openai};
use support::provider::{Manners, ok};
use support::{Answer, Gate, Key, Lessor, Play, Provider, Request, Setup, eventually, ms};

/// A provider that holds every request until the gate opens.
async fn holding(gate: &Gate) -> Provider {
    let gate = gate.clone();
    Provider::plain(move |seen| Play::new().until(&gate).then(openai(seen))).await
}

/// Sends a request beside the test and gives its answer later.
fn beside(lessor: &Arc<Lessor>, request: Request) -> tokio::task::JoinHandle<Answer> {
    let lessor = Arc::clone(lessor);
    tokio::spawn(async move { lessor.ask(request).await })
}

#[tokio::test]
async fn sixty_four_requests_on_one_slot_are_served_one_at_a_time_in_the_order_they_came() {
    const REQUESTS: usize = 64;
    let provider = Provider::start(|_| Play::new().wait(ms(50)).then(ok())).await;
    let lessor = Setup::openai(&provider).key(Key::new("a").cap(1)).start().await;
    assert_eq!(lessor.get("/openai/v1/models").await.status, 200); // what is done once is done
    let mut answers = Vec::new();
    let begun = Instant::now();
    for n in 0..REQUESTS {
        let mut raw = lessor.raw().await;
        let host = lessor.authority();
        raw.write(format!("GET /openai/v1/models HTTP/1.1\r\nHost: {host}\r\nX-Number: {n}\r\n\r\n")).await;
        answers.push(tokio::spawn(async move { raw.answer().await.0 }));
        tokio::time::sleep(ms(5)).await; // the requests come 5 ms apart
    }
    for answer in answers {
        assert_eq!(answer.await.unwrap(), 200);
    }
    let order: Vec<usize> =
        provider.seen()[1..].iter().map(|seen| seen.header("x-number").parse().unwrap()).collect();
    assert_eq!(order, (0..REQUESTS).collect::<Vec<_>>());
    assert_eq!(provider.most_at_once("sk-a"), 1);
    assert!(begun.elapsed() >= ms(50) * REQUESTS as u32, "the double held each for 50 ms");
}

#[tokio::test]
async fn no_key_is_ever_used_more_often_at_once_than_its_cap() {
    let provider = Provider::start(|_| Play::new().wait(ms(20)).then(ok())).await;
    let setup = Setup::openai(&provider).key(Key::new("a").cap(2)).key(Key::new("b").cap(3));
    let lessor = Arc::new(setup.start().await);
    let asked: Vec<_> = (0..60).map(|_| beside(&lessor, Request::get("/openai/v1/models"))).collect();
    for answer in asked {
        assert_eq!(answer.await.unwrap().status, 200);
    }
    let most = (provider.most_at_once("sk-a"), provider.most_at_once("sk-b"));
    assert_eq!(most, (2, 3), "all slots are used, and none twice");
}

#[tokio::test]
async fn a_wait_too_short_is_429_with_the_time_to_come_back() {
    let gate = Gate::default();
    let provider = holding(&gate).await;
    let lessor = Arc::new(Setup::openai(&provider).key(Key::new("a").cap(1)).start().await);
    let first = beside(&lessor, chat("gpt-4o-mini"));
    provider.request(1).await;
    for (wait, least) in [("200ms", ms(200)), ("1", ms(1000)), ("0s", ms(0))] {
        let begun = Instant::now();
        let answer = lessor.ask(chat("gpt-4o-mini").header("x-lessor-max-wait", wait)).await;
        let waited = begun.elapsed();
        answer.is_error(429, "pool_exhausted");
        assert!(waited >= least && waited < least + ms(3000), "{wait} became {waited:?}");
        let retry_after: u64 = answer.header("retry-after").parse().expect("whole seconds");
        assert!((1..=30).contains(&retry_after), "{retry_after}");
        assert!(answer.header("retry-after-ms").parse::<u64>().unwrap() <= 30_000);
        assert_eq!(answer.json()["error"]["code"], "pool_exhausted");
        assert!(answer.json()["error"]["message"].is_string());
    }
    gate.open();
    assert_eq!(first.await.unwrap().status, 200);
    assert_eq!(provider.count(), 1);
}

#[tokio::test]
async fn a_wait_that_cannot_be_read_is_400() {
    let provider = Provider::plain(openai).await;
    let lessor = Setup::openai(&provider).key(Key::new("a")).start().await;
    let answer = lessor.ask(Request::get("/openai/v1/models").header("x-lessor-max-wait", "soon")).await;
    answer.is_error(400, "bad_request");
}

#[tokio::test]
async fn one_models_waiters_never_stop_anothers() {
    let gate = Gate::default();
    let held = gate.clone();
    let provider = Provider::plain(move |seen| {
        let hold = seen.json()["model"].as_str().is_some_and(|model| model.starts_with("gpt-"));
        if hold { Play::new().until(&held).then(ok()) } else { ok() }
    })
    .await;
    let setup = Setup::openai(&provider)
        .key(Key::new("a").cap(1).models(&["gpt-*"]))
        .key(Key::new("b").cap(1).models(&["o1-*"]));
    let lessor = Arc::new(setup.start().await);
    let first = beside(&lessor, chat("gpt-4o"));
    provider.request(1).await;
    let waiting = beside(&lessor, chat("gpt-4o"));
    lessor.comes_to_queue(1).await;
    let other = lessor.ask(chat("o1-mini")).await;
    assert_eq!((other.status, other.header("x-lessor-key")), (200, "b"));
    gate.open();
    assert_eq!(first.await.unwrap().status, 200);
    assert_eq!(waiting.await.unwrap().header("x-lessor-key"), "a");
}

#[tokio::test]
async fn a_model_that_no_key_serves_is_404() {
    let provider = Provider::plain(openai).await;
    let setup = Setup::openai(&provider).key(Key::new("a").models(&["gpt-*"]));
    let lessor = setup.start().await;
    let answer = lessor.ask(chat("o1-mini")).await;
    answer.is_error(404, "no_candidate");
    assert!(answer.text().contains("o1-mini"), "{}", answer.text());
    assert_eq!(provider.count(), 0);
}

#[tokio::test]
async fn a_model_that_stands_in_the_path_binds_like_one_in_the_body() {
    let provider = Provider::builder().manners(Manners::Open).plain().start(|_| ok()).await;
    let setup = Setup::new().provider("gemini", &provider);
    let lessor = setup.key(Key::new("a").of("gemini").models(&["gemini-flash*"])).start().await;
    let ask = async |model: &str| {
        lessor.ask(Request::new("POST", &format!("/gemini/v1beta/models/{model}:generateContent"))).await
    };
    assert_eq!(ask("gemini-flash-2").await.header("x-lessor-key"), "a");
    for other in ["gemini-pro", "gemini%2Dflash"] {
        assert_eq!(ask(other).await.header("x-lessor-error"), "no_candidate", "{other}");
    }
    assert_eq!(provider.count(), 1);
}

#[tokio::test]
async fn a_model_that_cannot_be_read_gets_only_keys_that_serve_all_models() {
    let provider = Provider::plain(|_| ok()).await;
    let setup = Setup::openai(&provider).key(Key::new("a").models(&["gpt-*"])).key(Key::new("b"));
    let lessor = setup.set("ranking.strategy", "\"fill_first\"").start().await;
    let path = "/openai/v1/chat/completions";
    let json = |body: &str| {
        Request::new("POST", path)
            .header("content-type", "application/json")
            .body(support::client::full(body.to_owned()))
    };
    assert_eq!(lessor.ask(json(r#"{"model":"gpt-4o"}"#)).await.header("x-lessor-key"), "a");
    for unreadable in [
        r#"{"model":"gpt-4o","model":"o1-mini"}"#,
        r#"{"model":"gpt-4o""#,
        r#"{"model":["gpt-4o"]}"#,
        r#"{"mod\u0065l":"o1-mini","model":"gpt-4o"}"#,
        "not json",
    ] {
        let answer = lessor.ask(json(unreadable)).await;
        assert_eq!((answer.status, answer.header("x-lessor-key")), (200, "b"), "{unreadable}");
    }
    let encoded = json(r#"{"model":"gpt-4o"}"#).header("content-encoding", "gzip");
    assert_eq!(lessor.ask(encoded).await.header("x-lessor-key"), "b");
    let nested = lessor.ask(json(r#"{"metadata":{"model":"o1-mini"},"model":"gpt-4o"}"#)).await;
    assert_eq!(nested.header("x-lessor-key"), "a", "only the top-level model counts");
}

#[tokio::test]
async fn a_request_can_ask_for_one_key_or_one_pool() {
    let provider = Provider::plain(openai).await;
    let setup = Setup::openai(&provider)
        .key(Key::new("a"))
        .key(Key::new("b"))
        .key(Key::new("c").pool("vip"))
        .set("pools.vip.fallback", "[\"default\"]");
    let lessor = setup.set("ranking.strategy", "\"fill_first\"").start().await;
    let get = || Request::get("/openai/v1/models");
    let by_key = lessor.ask(get().header("x-lessor-key", "b")).await;
    assert_eq!((by_key.status, by_key.header("x-lessor-key")), (200, "b"));
    let by_pool = lessor.ask(get().header("x-lessor-pool", "vip")).await;
    assert_eq!((by_pool.status, by_pool.header("x-lessor-key")), (200, "c"));
    lessor.ask(get().header("x-lessor-key", "nobody")).await.is_error(404, "no_candidate");
    let no_pool = lessor.ask(get().header("x-lessor-pool", "nowhere")).await;
    assert_eq!(no_pool.status, 404);
    let heads: String = provider.seen().iter().map(|seen| seen.raw_head.to_ascii_lowercase()).collect();
    assert!(!heads.contains("x-lessor"), "{heads}");
}

#[tokio::test]
async fn a_full_pool_falls_back_one_way() {
    let gate = Gate::default();
    let provider = holding(&gate).await;
    let setup = Setup::openai(&provider)
        .key(Key::new("plain").cap(1))
        .key(Key::new("vip").cap(1).pool("vip"))
        .set("pools.vip.fallback", "[\"default\"]");
    let lessor = Arc::new(setup.start().await);
    let vip = || Request::get("/openai/v1/models").header("x-lessor-pool", "vip");
    let first = beside(&lessor, vip());
    assert_eq!(provider.request(1).await.key(), "sk-vip");
    let second = beside(&lessor, vip());
    assert_eq!(provider.request(2).await.key(), "sk-plain");
    let none = Request::get("/openai/v1/models").header("x-lessor-max-wait", "0s");
    lessor.ask(none).await.is_error(429, "pool_exhausted");
    gate.open();
    assert_eq!((first.await.unwrap().status, second.await.unwrap().status), (200, 200));
}

#[tokio::test]
async fn the_queue_is_bounded() {
    let gate = Gate::default();
    let provider = holding(&gate).await;
    let setup = Setup::openai(&provider).key(Key::new("a").cap(1)).set("queue.max_waiting", "1");
    let lessor = Arc::new(setup.start().await);
    let first = beside(&lessor, Request::get("/openai/v1/models"));
    provider.request(1).await;
    let second = beside(&lessor, Request::get("/openai/v1/models"));
    lessor.comes_to_queue(1).await;
    let begun = Instant::now();
    lessor.get("/openai/v1/models").await.is_error(429, "pool_exhausted");
    assert!(begun.elapsed() < ms(2000), "refused at once");
    gate.open();
    assert_eq!((first.await.unwrap().status, second.await.unwrap().status), (200, 200));
}

#[tokio::test]
async fn a_pool_of_disabled_keys_is_another_error_than_a_full_one() {
    let provider = Provider::plain(openai).await;
    let lessor = Setup::openai(&provider).key(Key::new("a")).start().await;
    assert_eq!(lessor.admin_post("/v1/keys/openai/a/disable").await.status, 200);
    assert_eq!(lessor.status("a").await, "disabled");
    lessor.get("/openai/v1/models").await.is_error(503, "key_unavailable");
    assert_eq!(lessor.admin_post("/v1/keys/openai/a/enable").await.status, 200);
    assert_eq!(lessor.get("/openai/v1/models").await.status, 200);
}

#[tokio::test]
async fn errors_have_the_shape_that_the_providers_sdk_shows() {
    let provider = Provider::builder().plain().manners(Manners::Anthropic).start(anthropic).await;
    let lessor =
        Setup::new().provider("anthropic", &provider).key(Key::new("a").of("anthropic")).start().await;
    lessor.admin_post("/v1/keys/anthropic/a/disable").await;
    let message = json!({"model": "claude", "max_tokens": 1, "messages": []});
    let answer = lessor.ask(Request::post("/anthropic/v1/messages", &message)).await;
    answer.is_error(503, "key_unavailable");
    let json = answer.json();
    assert_eq!(json["type"], "error");
    assert!(json["error"]["type"].is_string() && json["error"]["message"].is_string(), "{json}");
}

fn with_apps(provider: &Provider) -> Setup {
    Setup::openai(provider)
        .key(Key::new("a"))
        .key(Key::new("b").pool("vip"))
        .env("CHECKOUT_TOKEN", "token-of-checkout")
        .env("BATCH_TOKEN", "token-of-batch")
        .set("apps.checkout.token", "{ env = \"CHECKOUT_TOKEN\" }")
        .set("apps.checkout.pools", "[\"vip\", \"default\"]")
        .set("apps.batch.token", "{ env = \"BATCH_TOKEN\" }")
        .set("apps.batch.providers", "[\"anthropic\"]")
}

fn basic(user: &str, password: &str) -> String {
    use base64::Engine as _;
    format!("Basic {}", base64::engine::general_purpose::STANDARD.encode(format!("{user}:{password}")))
}

#[tokio::test]
async fn an_app_is_known_by_its_token_in_every_place_and_its_first_pool_is_its_default() {
    let provider = Provider::plain(openai).await;
    let lessor = with_apps(&provider).start().await;
    let get = || Request::get("/openai/v1/models");
    let absolute = || Request::get("http://api.openai.com/v1/models");
    for request in [
        get().header("authorization", "Bearer token-of-checkout"),
        get().header("x-api-key", "token-of-checkout"),
        get().header("x-lessor-app-token", "token-of-checkout"),
        absolute().header("proxy-authorization", &basic("checkout", "token-of-checkout")),
    ] {
        let what = format!("{request:?}");
        let answer = lessor.ask(request).await;
        assert_eq!((answer.status, answer.header("x-lessor-key")), (200, "b"), "{what}: {}", answer.text());
    }
    let other = get().header("x-lessor-app-token", "token-of-checkout").header("x-lessor-pool", "default");
    assert_eq!(lessor.ask(other).await.header("x-lessor-key"), "a");
    for seen in provider.seen() {
        assert!(!seen.raw_head.contains("token-of"), "{}", seen.raw_head);
    }
}

#[tokio::test]
async fn who_shows_no_good_token_is_stopped_before_all_routing() {
    let provider = Provider::plain(openai).await;
    let lessor = with_apps(&provider).start().await;
    for request in [
        Request::get("/openai/v1/models"),
        Request::get("/openai/v1/models").header("authorization", "Bearer token-of-checkouT"),
        Request::get("/nowhere/v1/models").header("x-lessor-app-token", "wrong"),
    ] {
        lessor.ask(request).await.is_error(403, "app_unauthenticated");
    }
    let absolute = Request::get("http://api.openai.com/v1/models");
    let answer = lessor.ask(absolute).await;
    answer.is_error(407, "app_unauthenticated");
    assert!(answer.header("proxy-authenticate").starts_with("Basic"), "{:?}", answer.headers);
    let mut raw = lessor.raw().await;
    raw.write("CONNECT example.test:443 HTTP/1.1\r\nHost: example.test:443\r\n\r\n").await;
    assert!(raw.rest().await.starts_with("HTTP/1.1 407 "));
    assert_eq!(provider.count(), 0);
}

#[tokio::test]
async fn an_app_gets_only_the_providers_and_pools_that_it_may_use() {
    let provider = Provider::plain(openai).await;
    let lessor = with_apps(&provider).start().await;
    let batch = Request::get("/openai/v1/models").header("x-lessor-app-token", "token-of-batch");
    lessor.ask(batch).await.is_error(403, "app_forbidden");
    let foreign = Request::get("/openai/v1/models")
        .header("x-lessor-app-token", "token-of-checkout")
        .header("x-lessor-pool", "secret-pool");
    let answer = lessor.ask(foreign).await;
    assert!([403, 404].contains(&answer.status), "{}", answer.text());
    assert_eq!(provider.count(), 0);
}

#[tokio::test]
async fn a_listener_off_loopback_without_apps_does_not_start() {
    let provider = Provider::plain(openai).await;
    let setup = Setup::openai(&provider).key(Key::new("a")).set("listen.proxy", "\"0.0.0.0:0\"");
    let home = Home::default();
    std::fs::write(home.path().join("lessor.toml"), setup.toml()).unwrap();
    let ran = home.run_with(&["run", "--config", "lessor.toml"], &[("SECRET_OPENAI_A", "sk-a")]).await;
    assert_ne!(ran.code, Some(0));
    assert!(ran.stderr.contains("apps"), "{}", ran.stderr);
}

#[tokio::test]
async fn leases_are_seen_while_they_live() {
    let gate = Gate::default();
    let provider = holding(&gate).await;
    let lessor = Arc::new(Setup::openai(&provider).key(Key::new("a")).start().await);
    let request = beside(&lessor, Request::get("/openai/v1/models"));
    provider.request(1).await;
    let leases = lessor.admin("/v1/leases").await.json();
    let lease = &leases["leases"][0];
    assert_eq!(
        (&lease["key_id"], &lease["provider"], &lease["pool"]),
        (&json!("a"), &json!("openai"), &json!("default"))
    );
    // In `memory:` a lease lives as long as its holder, so it shows no end.
    assert!(lease["fencing_token"].is_u64() && lease["expires_at_ms"].is_null(), "{lease}");
    gate.open();
    assert_eq!(request.await.unwrap().header("x-lessor-lease"), lease["id"].as_str().unwrap());
    lessor.is_free_within_a_second("a").await;
    assert_eq!(lessor.admin("/v1/leases").await.json(), json!({"leases": []}));
}

#[tokio::test]
async fn a_stream_longer_than_the_ttl_keeps_its_lease() {
    let provider = Provider::plain(|_| Play::sse().event("one").wait(ms(3000)).done()).await;
    let setup = Setup::openai(&provider).key(Key::new("a").cap(1));
    let lessor = setup.set("lease.ttl", "\"2s\"").set("lease.heartbeat", "\"500ms\"").start().await;
    let mut stream = lessor.open(chat("gpt-4o-mini")).await;
    stream.read_to("one").await;
    assert_eq!(stream.whole().await.unwrap().status, 200);
    assert_eq!(lessor.metric("lessor_lease_lost_total").await, 0.0);
    assert_eq!(lessor.metric("lessor_lease_heartbeat_failed_total").await, 0.0);
}

#[tokio::test]
async fn a_lease_has_no_longer_life_than_the_user_allows() {
    let provider = Provider::plain(|_| Play::sse().event("one").silence()).await;
    let setup = Setup::openai(&provider).key(Key::new("a").cap(1)).set("lease.max_duration", "\"1s\"");
    let lessor = setup.start().await;
    let mut stream = lessor.open(chat("gpt-4o-mini")).await;
    stream.read_to("one").await;
    assert!(stream.whole().await.is_err(), "a stream that is ended early is no whole one");
    lessor.is_free_within_a_second("a").await;
}

#[tokio::test]
async fn a_revoked_lease_cuts_its_stream() {
    let provider = Provider::plain(|_| Play::sse().event("one").silence()).await;
    let setup = Setup::openai(&provider).key(Key::new("a").cap(1));
    let lessor = setup.set("lease.ttl", "\"2s\"").set("lease.heartbeat", "\"500ms\"").start().await;
    let mut stream = lessor.open(chat("gpt-4o-mini")).await;
    stream.read_to("one").await;
    let lease = stream.header("x-lessor-lease").to_owned();
    lessor.cli(&["leases", "revoke", &lease]).await.ok();
    assert!(stream.whole().await.is_err(), "a revoked stream is no whole one");
    lessor.is_free_within_a_second("a").await;
    assert_eq!(lessor.status("a").await, "available");
}

#[tokio::test]
async fn a_lease_that_is_revoked_before_the_provider_answers_ends_the_request_with_a_word() {
    let provider = Provider::plain(|_| Play::new().silence()).await;
    let lessor = Setup::openai(&provider).key(Key::new("a").cap(1)).start().await;
    let revoking = async {
        provider.request(1).await;
        lessor.comes_to_use("a", 1).await;
        let leases = lessor.admin("/v1/leases").await.json();
        lessor.cli(&["leases", "revoke", leases["leases"][0]["id"].as_str().unwrap()]).await.ok();
    };
    let (answer, ()) = tokio::join!(lessor.chat(), revoking);
    answer.is_error(503, "key_unavailable");
    assert!(answer.text().contains("revoked before the provider answered"), "{}", answer.text());
    lessor.is_free_within_a_second("a").await;
    eventually("the provider sees the end", async || provider.seen()[0].gone).await;
}

#[tokio::test]
async fn of_64_that_ask_for_one_slot_at_once_and_will_not_wait_one_gets_it() {
    let gate = Gate::default();
    let provider = holding(&gate).await;
    let lessor = Arc::new(Setup::openai(&provider).key(Key::new("a").cap(1)).start().await);
    let mut asked = tokio::task::JoinSet::new();
    for _ in 0..64 {
        let lessor = Arc::clone(&lessor);
        let request = Request::get("/openai/v1/models").header("x-lessor-max-wait", "0s");
        asked.spawn(async move { lessor.ask(request).await });
    }
    for _ in 0..63 {
        asked.join_next().await.unwrap().unwrap().is_error(429, "pool_exhausted");
    }
    gate.open();
    assert_eq!(asked.join_next().await.unwrap().unwrap().status, 200);
    assert_eq!((provider.count(), provider.most_at_once("sk-a")), (1, 1));
}

/// Fails when a token of `with_apps` is in anything that this server was sent, plain or in base64.
#[track_caller]
fn saw_no_token(server: &Provider) {
    use base64::Engine as _;
    for seen in server.seen() {
        let body = String::from_utf8_lossy(&seen.body);
        let mut all = format!("{} {body} {:?}", seen.raw_head, seen.trailers);
        for (_, value) in &seen.headers {
            let decoded =
                value.rsplit(' ').next().map(|word| base64::engine::general_purpose::STANDARD.decode(word));
            if let Some(Ok(decoded)) = decoded {
                all.push_str(&String::from_utf8_lossy(&decoded));
            }
        }
        assert!(!all.contains("token-of"), "an app's token was sent on: {all}");
    }
}

#[tokio::test]
async fn an_apps_token_is_not_sent_on_in_a_trailer() {
    let provider = Provider::plain(openai).await;
    let origin = Provider::origin(|_| support::provider::ok()).await;
    let lessor = with_apps(&provider).start().await;
    let elsewhere = format!("http://{}/x", origin.addr());
    for target in ["/openai/v1/files", "http://api.openai.com/v1/files", &elsewhere] {
        let before = provider.count() + origin.count();
        let mut raw = lessor.raw().await;
        let host = if target == elsewhere { origin.addr().to_string() } else { lessor.authority() };
        let proxy = basic("checkout", "token-of-checkout");
        let names = ["x-lessor-app-token", "proxy-authorization", "authorization", "x-api-key", "x-sum"];
        let values = ["token-of-checkout", &proxy, "Bearer token-of-checkout", "token-of-checkout", "1"];
        let trailers: String =
            names.iter().zip(values).map(|(name, value)| format!("{name}: {value}\r\n")).collect();
        raw.write(format!(
            "POST {target} HTTP/1.1\r\nHost: {host}\r\nX-Lessor-App-Token: token-of-checkout\r\n\
             Proxy-Authorization: {proxy}\r\nTransfer-Encoding: chunked\r\nTrailer: {}\r\nConnection: close\r\n\r\n\
             4\r\ndata\r\n0\r\n{trailers}\r\n",
            names.join(", ")
        ))
        .await;
        raw.rest().await;
        assert_eq!(provider.count() + origin.count(), before + 1, "{target}");
        saw_no_token(&provider);
        saw_no_token(&origin);
    }
    let seen = provider.request(1).await;
    assert_eq!((seen.body.as_slice(), seen.trailers), (&b"data"[..], vec![("x-sum".into(), "1".into())]));
}

#[tokio::test]
async fn an_apps_token_is_not_sent_on_in_a_header_that_is_kept() {
    let own = Provider::builder()
        .plain()
        .manners(support::provider::Manners::Open)
        .start(|_| support::provider::ok())
        .await;
    let provider = Provider::plain(openai).await;
    let lessor = with_apps(&provider)
        .provider("own", &own)
        .set("providers.own.inject", "{ header = \"x-token\" }")
        .set("providers.own.keep", "[\"authorization\", \"x-api-key\"]")
        .key(Key::new("c").of("own").pool("vip"))
        .start()
        .await;
    let get = || Request::get("/own/v1/models");
    for request in [
        get().header("authorization", "Bearer token-of-checkout"),
        get().header("authorization", &basic("checkout", "token-of-checkout")),
        get().header("x-api-key", "token-of-checkout"),
        get()
            .header("x-lessor-app-token", "token-of-checkout")
            .header("authorization", "Bearer token-of-checkout"),
        get().header("x-lessor-app-token", "token-of-checkout").header("x-api-key", "token-of-batch"),
    ] {
        let what = format!("{request:?}");
        let answer = lessor.ask(request).await;
        assert!([200, 403, 407].contains(&answer.status), "{what}: {} {}", answer.status, answer.text());
        saw_no_token(&own);
    }
    let before = own.count();
    let kept = get().header("x-lessor-app-token", "token-of-checkout").header("authorization", "Bearer mine");
    assert_eq!(lessor.ask(kept).await.status, 200);
    assert_eq!(own.request(before + 1).await.header("authorization"), "Bearer mine");
}

#[tokio::test]
async fn an_apps_token_is_not_sent_on_to_another_host() {
    let provider = Provider::plain(openai).await;
    let origin = Provider::origin(|_| support::provider::ok()).await;
    let lessor = with_apps(&provider).start().await;
    let login = basic("checkout", "token-of-checkout");
    let get = || Request::get(&format!("http://{}/x", origin.addr()));
    for request in [
        get().header("authorization", &login),
        get().header("authorization", "Bearer token-of-checkout"),
        get().header("x-api-key", "token-of-checkout"),
        get().header("x-lessor-app-token", "token-of-checkout"),
        get().header("proxy-authorization", &login),
        get().header("proxy-authorization", &login).header("authorization", &login),
        get().header("proxy-authorization", &login).header("authorization", "Bearer token-of-checkout"),
        get().header("proxy-authorization", &login).header("x-api-key", "token-of-checkout"),
    ] {
        let what = format!("{request:?}");
        let answer = lessor.ask(request).await;
        assert!([200, 403, 407].contains(&answer.status), "{what}: {} {}", answer.status, answer.text());
        saw_no_token(&origin);
    }
    let before = origin.count();
    let mine = get().header("proxy-authorization", &login).header("authorization", &basic("me", "mine"));
    assert_eq!(lessor.ask(mine).await.status, 200);
    assert_eq!(origin.request(before + 1).await.header("authorization"), basic("me", "mine"));
}

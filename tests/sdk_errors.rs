//! lessor's own errors as the real SDKs raise them: their own exception types, lessor's message, and no retry
//! where none can help.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::pedantic, missing_docs, unreachable_pub)]

mod support;

use serde_json::{Value, json};
use support::lessor::run;
use support::plays::{anthropic, openai, rate_limited};
use support::provider::{Gate, Manners, Seen};
use support::sdk::python;
use support::{Key, Lessor, Play, Provider, Request, Setup, free_port};

const SDKS: [&str; 2] = ["openai", "anthropic"];

/// Both providers, each with one key of one slot, at this double.
fn both(double: &Provider) -> Setup {
    SDKS.into_iter().fold(Setup::new(), |setup, name| {
        setup.provider(name, double).key(Key::new("a").of(name).models(&["m*"]).cap(1))
    })
}

/// A double of both.
async fn double(more: impl Fn(&Seen) -> Option<Play> + Send + Sync + 'static) -> Provider {
    let script = move |seen: &Seen| {
        let usual = || if seen.path().ends_with("/v1/messages") { anthropic(seen) } else { openai(seen) };
        more(seen).unwrap_or_else(usual)
    };
    Provider::builder().manners(Manners::Open).plain().start(script).await
}

/// A call of `sdk` to this lessor, with more of what `tests/sdks/errors.py` knows.
fn call(sdk: &str, lessor: &Lessor, more: Value) -> Value {
    let behind = if sdk == "openai" { "/openai/v1" } else { "/anthropic" };
    let mut call = json!({"sdk": sdk, "base_url": format!("{}{behind}", lessor.url())});
    call.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    call
}

/// What the SDKs raise for these calls, one after the other.
async fn raised(calls: Vec<Value>) -> Vec<Value> {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), Value::from(calls).to_string()).unwrap();
    let mut command = python("tests/sdks/errors.py");
    command.arg(file.path());
    let ran = run(command).await;
    ran.ok();
    serde_json::from_str(&ran.stdout).unwrap()
}

/// The exception that each SDK has for a status.
fn kind(sdk: &str, status: u16) -> &'static str {
    match (sdk, status) {
        (_, 400) => "BadRequestError",
        (_, 403) => "PermissionDeniedError",
        (_, 404) => "NotFoundError",
        (_, 429) => "RateLimitError",
        ("anthropic", 431) => "RequestHeaderFieldsTooLargeError",
        ("anthropic", 501) => "HTTPNotImplementedError",
        ("anthropic", 503) => "ServiceUnavailableError",
        ("anthropic", 504) => "GatewayTimeoutError",
        (_, 500..) => "InternalServerError",
        _ => "APIStatusError",
    }
}

/// Fails unless each call was raised as its SDK's exception for lessor's `code` and status.
async fn are_raised(calls: Vec<(Value, u16, &str)>) {
    let said = raised(calls.iter().map(|(call, ..)| call.clone()).collect()).await;
    assert_eq!(said.len(), calls.len());
    for ((call, status, code), said) in calls.iter().zip(said) {
        let sdk = call["sdk"].as_str().unwrap();
        assert_eq!((&said["lessor"], &said["status"]), (&json!(code), &json!(status)), "{call} {said}");
        assert_eq!(said["kind"], kind(sdk, *status), "{call} {said}");
        assert!(said["message"].as_str().unwrap().contains("lessor: "), "{call} {said}");
        if sdk == "openai" {
            assert_eq!(said["code"], *code, "{call} {said}");
        }
    }
}

#[tokio::test]
async fn each_of_lessors_errors_is_raised_as_the_sdks_own_exception_with_lessors_message() {
    let gate = Gate::default();
    let held = gate.clone();
    let double = double(move |seen| match seen.json()["model"].as_str()? {
        "m-hold" => Some(Play::sse().event("{}").until(&held).done()),
        "m-silent" => Some(Play::new().silence()),
        _ => None,
    })
    .await;
    let lessor = both(&double).set("timeouts.first_byte", "\"1s\"").set("proxy.other_hosts", "\"deny\"");
    let lessor = lessor.start().await;
    let mut calls = Vec::new();
    for sdk in SDKS {
        let denied =
            if sdk == "openai" { "/organization/admin_api_keys" } else { "/v1/organizations/api_keys" };
        let header = |name: &str, value: &str| json!({"headers": {name: value}});
        let mut more = |more: Value, status, code| calls.push((call(sdk, &lessor, more), status, code));
        more(header("x-lessor-max-wait", "soon"), 400, "bad_request");
        more(header("x-big", &"x".repeat(70_000)), 431, "header_too_large");
        more(header("origin", "https://evil.example"), 403, "origin_denied");
        more(header("x-lessor-pool", "nowhere"), 404, "unknown_provider");
        more(json!({"headers": {"connection": "upgrade", "upgrade": "tls/1.0"}}), 501, "upgrade_unsupported");
        more(json!({"path": denied}), 403, "path_denied");
        more(json!({"model": "other"}), 404, "no_candidate");
        more(json!({"model": "m-silent"}), 504, "upstream_timeout");
        let foreign = json!({"base_url": "http://other.example/v1", "proxy": lessor.url()});
        more(foreign, 403, "destination_denied");
    }
    are_raised(calls).await;
    // Both slots are held by streams that are open.
    let mut open = Vec::new();
    for path in ["/openai/v1/chat/completions", "/anthropic/v1/messages"] {
        let mut stream = lessor.open(Request::post(path, &json!({"model": "m-hold"}))).await;
        stream.read_to("{}").await;
        open.push(stream);
    }
    let full =
        |sdk| (call(sdk, &lessor, json!({"headers": {"x-lessor-max-wait": "0s"}})), 429, "pool_exhausted");
    are_raised(SDKS.into_iter().map(full).collect()).await;
    gate.open();
}

#[tokio::test]
async fn errors_of_what_is_wrong_behind_lessor_are_raised_so_too() {
    let double = double(|_| None).await;
    let disabled = both(&double).start().await;
    for sdk in SDKS {
        disabled.admin_post(&format!("/v1/keys/{sdk}/a/disable")).await;
    }
    let closed = format!("\"http://127.0.0.1:{}\"", free_port());
    let unreachable = SDKS
        .into_iter()
        .fold(both(&double), |setup, name| setup.set(&format!("providers.{name}.base_url"), &closed));
    let unreachable = unreachable.start().await;
    let store = format!("\"redis://127.0.0.1:{}\"", free_port());
    let storeless = both(&double).set("store.url", &store).start().await;
    let apps = both(&double)
        .env("TOKEN", "token-of-app")
        .set("apps.app.token", "{ env = \"TOKEN\" }")
        .set("apps.app.pools", "[\"default\"]")
        .start()
        .await;
    let mut calls = Vec::new();
    for sdk in SDKS {
        calls.push((call(sdk, &disabled, json!({})), 503, "key_unavailable"));
        calls.push((call(sdk, &unreachable, json!({})), 502, "upstream_unreachable"));
        calls.push((call(sdk, &storeless, json!({})), 503, "store_unavailable"));
        calls.push((call(sdk, &apps, json!({"key": "wrong"})), 403, "app_unauthenticated"));
        let vip = json!({"key": "token-of-app", "headers": {"x-lessor-pool": "vip"}});
        calls.push((call(sdk, &apps, vip), 403, "app_forbidden"));
    }
    are_raised(calls).await;
}

#[tokio::test]
async fn an_sdk_does_not_retry_what_lessor_says_no_retry_can_help() {
    let double = double(|_| None).await;
    let lessor = both(&double).start().await;
    for sdk in SDKS {
        lessor.admin_post(&format!("/v1/keys/{sdk}/a/disable")).await;
    }
    let calls = SDKS.map(|sdk| call(sdk, &lessor, json!({"retries": 3})));
    for said in raised(calls.into()).await {
        assert_eq!((&said["lessor"], &said["status"]), (&json!("key_unavailable"), &json!(503)), "{said}");
    }
    let metrics = lessor.admin("/metrics").await.text();
    let counts = metrics.lines().filter(|line| line.starts_with("lessor_requests_total{"));
    let counts: Vec<&str> = counts.filter_map(|line| line.rsplit(' ').next()).collect();
    assert_eq!(counts, ["1", "1"], "one request each, though 503 is retried by itself");
}

#[tokio::test]
async fn an_sdk_waits_as_long_as_lessor_says_and_is_served_then() {
    let double = double(|seen| (seen.header("x-refuse") == "1").then(|| rate_limited("2"))).await;
    let lessor = both(&double).start().await;
    for sdk in SDKS {
        let before = double.count();
        // The one key cools for two seconds, and no request waits for it here.
        let refused = call(sdk, &lessor, json!({"headers": {"x-refuse": "1"}}));
        let patient = call(sdk, &lessor, json!({"retries": 1, "headers": {"x-lessor-max-wait": "0s"}}));
        let said = raised(vec![refused, patient]).await;
        assert_eq!((&said[0]["status"], &said[0]["lessor"]), (&json!(429), &Value::Null), "{said:?}");
        assert_eq!(said[1]["kind"], Value::Null, "{said:?}");
        assert!(said[1]["seconds"].as_f64().unwrap() > 1.2, "its own first wait is half a second: {said:?}");
        assert_eq!(double.count(), before + 2, "lessor's own refusal never reached the provider");
    }
}

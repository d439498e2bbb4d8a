//! A key is put in as its kind and its provider say, in exactly those places, and nothing of it comes back.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::pedantic, missing_docs, unreachable_pub)]

mod support;

use std::sync::Arc;

use base64::Engine as _;
use base64::engine::general_purpose::{STANDARD, URL_SAFE_NO_PAD};
use support::lessor::{Home, field};
use support::provider::Manners;
use support::{Key, Lessor, Play, Provider, Request, Seen, Setup, eventually};

const PASSWORD: &str = "CANARY-7f3a/9c51+e2";
const USER: &str = "lessor-user";

/// Every header in which some provider looks for a credential.
const PLACES: [&str; 6] =
    ["authorization", "proxy-authorization", "x-api-key", "api-key", "x-goog-api-key", "xi-api-key"];

/// An origin that takes everybody, and answers with this.
async fn origin(script: impl Fn(&Seen) -> Play + Send + Sync + 'static) -> Provider {
    Provider::builder().plain().manners(Manners::Open).start(script).await
}

/// A request of a caller who shows something in every place there is.
fn with_everything(target: &str) -> Request {
    PLACES.iter().fold(Request::get(target), |request, name| request.header(name, "Bearer mine"))
}

/// Fails unless the last request had these credential headers, and no other.
#[track_caller]
fn had(provider: &Provider, want: &[(&str, &str)]) {
    let seen = provider.seen().last().unwrap().clone();
    let places = PLACES
        .iter()
        .copied()
        .chain(want.iter().map(|(name, _)| *name).filter(|name| !PLACES.contains(name)));
    let found: Vec<(&str, &str)> =
        places.flat_map(|name| seen.all(name).into_iter().map(move |value| (name, value))).collect();
    assert_eq!(found, want, "{}", seen.raw_head);
    assert!(!seen.raw_head.contains("mine"), "{}", seen.raw_head);
}

async fn ok(lessor: &Lessor, request: Request) -> support::Answer {
    let answer = lessor.ask(request).await;
    assert_eq!(answer.status, 200, "{}", answer.text());
    answer
}

#[tokio::test]
async fn a_bearer_token_takes_the_place_of_the_header_that_its_provider_has_for_keys() {
    let provider =
        origin(|_| Play::whole(200, &[("x-api-key", "from there"), ("authorization", "too")], "ok")).await;
    let token =
        Key::new("token").of("anthropic").from("ENV, kind = \"bearer\"").secret("sk-ant-oat-token-0123");
    let key = Key::new("key").of("anthropic").from("ENV, kind = \"api_key\"").secret("sk-ant-api-key-01234");
    let token = token.headers("anthropic-beta = \"oauth-2025-04-20\"");
    let lessor = Setup::new().provider("anthropic", &provider).key(token).key(key).start().await;
    let ask = |key| with_everything("/anthropic/v1/models").header("x-lessor-key", key);
    let answer = ok(&lessor, ask("token")).await;
    assert_eq!((answer.header("x-api-key"), answer.header("authorization")), ("", ""));
    had(
        &provider,
        &[("authorization", "Bearer sk-ant-oat-token-0123"), ("anthropic-beta", "oauth-2025-04-20")],
    );
    ok(&lessor, ask("key")).await;
    had(&provider, &[("x-api-key", "sk-ant-api-key-01234")]);
}

#[tokio::test]
async fn basic_is_encoded_of_user_and_password_and_no_form_of_either_comes_back() {
    let both = format!("{USER}:{PASSWORD}");
    let encoded = STANDARD.encode(&both);
    let echoed = vec![
        both.clone(),
        encoded.clone(),
        PASSWORD.to_owned(),
        URL_SAFE_NO_PAD.encode(&both),
        STANDARD.encode(format!("x{both}")),
        STANDARD.encode(format!("xy{both}")),
        STANDARD.encode(PASSWORD),
        STANDARD.encode(&encoded),
        PASSWORD.replace('/', "%2F").replace('+', "%2B"),
        encoded.bytes().map(|byte| format!("%{byte:02x}")).collect(),
    ];
    let say = echoed.clone();
    let provider = origin(move |seen| {
        let (own, all) = (seen.header("authorization"), say.join(" | "));
        let head = [("authorization", own), ("x-echo", own), ("x-all", all.as_str()), ("x-kept", "1")];
        Play::whole(200, &head, format!("{own} | {all}"))
    })
    .await;
    let home = Arc::new(Home::default());
    home.write("password", &format!("{PASSWORD}\n"));
    let whole = Key::new("whole").from("ENV, kind = \"basic\"").secret(&both);
    let beside = Key::new("beside").of("own").from(&format!("file = \"password\", user = {USER:?}"));
    let setup = Setup::openai(&provider).provider("own", &provider);
    let setup = setup.set("providers.own.inject", "{ kind = \"basic\" }").key(whole).key(beside);
    let mut lessor = setup.env("RUST_LOG", "trace").spawn_in(home);
    lessor.listening().await;
    for path in ["/openai/v1/models", "/own/v1/models"] {
        let answer = ok(&lessor, with_everything(path)).await;
        had(&provider, &[("authorization", &format!("Basic {encoded}"))]);
        assert_eq!((answer.header("authorization"), answer.header("x-kept")), ("", "1"));
        for (what, text) in [("the head", format!("{:?}", answer.headers)), ("the body", answer.text())] {
            for form in &echoed {
                // Of base64 the characters at the edges are not the secret's own.
                let form = &form[2..form.len() - 3];
                let parts: Vec<&str> = (0..form.len() - 8).map(|from| &form[from..from + 8]).collect();
                let there = parts.iter().find(|part| text.contains(**part));
                assert_eq!(there, None, "{what} has a part of {form}: {text}");
            }
        }
    }
    let log = lessor.log();
    for form in &echoed {
        assert!(!log.contains(form.as_str()), "{form} is in the log");
    }
}

#[tokio::test]
async fn the_parts_of_a_secret_go_into_several_headers_which_nobody_else_fills_or_reads() {
    const APP_KEY: &str = "CANARY-app-key-0123456789";
    let provider = origin(|seen| {
        let (id, key) = (seen.header("x-app-id"), seen.header("x-app-key"));
        let head = [("x-app-id", id), ("x-app-key", key), ("x-echo", key), ("x-token", "theirs")];
        Play::whole(200, &head, format!("<{key}>"))
    })
    .await;
    let home = Arc::new(Home::default());
    home.write("parts.json", &format!("{{\n  \"app_id\": \"the-app\",\n  \"app_key\": \"{APP_KEY}\"\n}}\n"));
    let inject = "[{ header = \"x-token\", format = \"{secret.app_key}\", path_prefix = \"/old/\" }, \
                  { header = \"x-app-id\", format = \"{secret.app_id}\" }, \
                  { header = \"x-app-key\", format = \"v1 {secret.app_key}\" }]";
    let setup = Setup::new().provider("own", &provider).set("providers.own.inject", inject);
    let mut lessor = setup.key(Key::new("a").of("own").from("file = \"parts.json\"")).spawn_in(home);
    lessor.listening().await;
    let ask = |path| {
        ["x-app-id", "x-app-key", "x-token"]
            .iter()
            .fold(with_everything(path), |ask, name| ask.header(name, "mine"))
    };
    let answer = ok(&lessor, ask("/own/v1/run")).await;
    had(&provider, &[("x-app-id", "the-app"), ("x-app-key", &format!("v1 {APP_KEY}"))]);
    let said = format!("{:?} {}", answer.headers, answer.text());
    assert!(!said.contains("CANARY"), "{said}");
    for name in ["x-app-id", "x-app-key", "x-token"] {
        assert_eq!(answer.header(name), "", "{name} came back");
    }
    ok(&lessor, ask("/own/old/run")).await;
    had(&provider, &[("x-token", APP_KEY)]);
    let mut raw = lessor.raw().await;
    let host = lessor.authority();
    raw.write(format!(
        "POST /own/v1/run HTTP/1.1\r\nHost: {host}\r\nTransfer-Encoding: chunked\r\nTrailer: x-app-key, x-kept\r\n\r\n\
         2\r\nok\r\n0\r\nx-app-key: mine\r\nx-token: mine\r\nx-kept: 1\r\n\r\n"
    ))
    .await;
    assert_eq!(raw.answer().await.0, 200);
    assert_eq!(provider.seen().last().unwrap().trailers, [("x-kept".to_owned(), "1".to_owned())]);
}

#[tokio::test]
async fn two_places_of_a_query_take_the_parts_of_a_secret_encoded() {
    let provider = origin(|_| Play::whole(200, &[], "ok")).await;
    let home = Arc::new(Home::default());
    home.write("parts.json", "{\"id\": 42, \"key\": \"CANARY/7f3a+9c51=\"}");
    let inject =
        "[{ query = \"id\", format = \"{secret.id}\" }, { query = \"k\", format = \"{secret.key}\" }]";
    let setup = Setup::new().provider("own", &provider).set("providers.own.inject", inject);
    let mut lessor = setup.key(Key::new("a").of("own").from("file = \"parts.json\"")).spawn_in(home);
    lessor.listening().await;
    ok(&lessor, Request::get("/own/v1/run?k=mine&a=b&id=mine")).await;
    assert_eq!(provider.seen()[0].target, "/v1/run?a=b&id=42&k=CANARY%2F7f3a%2B9c51%3D");
}

#[tokio::test]
async fn a_keys_own_headers_replace_the_callers_save_those_that_its_provider_keeps() {
    const GATEWAY: &str = "CANARY-gateway-0123456789";
    let provider = origin(|seen| {
        let head = [
            ("x-gateway", seen.header("x-gateway")),
            ("openai-organization", seen.header("openai-organization")),
        ];
        Play::whole(200, &head, format!("<{}>", seen.header("x-gateway")))
    })
    .await;
    let headers = "OpenAI-Organization = \"org-1\", OpenAI-Project = \"proj-1\", X-Gateway = { env = \"GATEWAY\" }, X-Kept = \"ours\"";
    let setup = Setup::openai(&provider).set("providers.openai.keep", "[\"x-kept\"]");
    let setup = setup.key(Key::new("a").headers(headers)).env("GATEWAY", GATEWAY).env("RUST_LOG", "debug");
    let lessor = setup.start().await;
    let names = ["openai-organization", "openai-project", "x-gateway", "x-kept"];
    let sent = || {
        let seen = provider.seen().last().unwrap().clone();
        names.map(|name| seen.all(name).join(",")).to_vec()
    };
    let answer = ok(&lessor, Request::get("/openai/v1/models")).await;
    assert_eq!(sent(), ["org-1", "proj-1", GATEWAY, "ours"]);
    assert!(
        !format!("{:?} {}", answer.headers, answer.text()).contains("CANARY"),
        "a secret value came back"
    );
    assert_eq!((answer.header("openai-organization"), answer.header("x-gateway")), ("org-1", ""));
    let own = names.iter().fold(Request::get("/openai/v1/models"), |ask, name| {
        ask.header(name, "theirs").header(name, "twice")
    });
    ok(&lessor, own).await;
    assert_eq!(sent(), ["org-1", "proj-1", GATEWAY, "theirs,twice"]);
    let told = |name: &str| {
        let is_it =
            |line: &serde_json::Value| field(line, "header") == name && field(line, "level") == "DEBUG";
        lessor.log_lines().iter().filter(|line| is_it(line)).count()
    };
    eventually("each is told", async || (names.map(told) == [1, 1, 1, 0]).then_some(())).await;
    assert!(!lessor.log().contains("CANARY"));
}

#[tokio::test]
async fn lessors_own_check_of_a_key_puts_it_in_as_requests_do() {
    let provider = origin(|_| Play::json(200, &serde_json::json!({}))).await;
    let key = Key::new("a").from("ENV, kind = \"basic\"").secret("me:CANARY-0123456789");
    let setup = Setup::openai(&provider).key(key.headers("OpenAI-Organization = \"org-1\""));
    let lessor = setup.start().await;
    let answer = lessor.admin_post("/v1/keys/openai/a/check").await;
    assert_eq!(answer.json()["ok"], true, "{}", answer.text());
    let basic = format!("Basic {}", STANDARD.encode("me:CANARY-0123456789"));
    had(&provider, &[("authorization", &basic), ("openai-organization", "org-1")]);
}

#[tokio::test]
async fn a_kubernetes_secret_is_read_through_its_links() {
    let provider = origin(|_| Play::whole(200, &[], "ok")).await;
    let home = Arc::new(Home::default());
    std::fs::create_dir_all(home.path().join("mount/..2026_11_29")).unwrap();
    home.write("mount/..2026_11_29/key", "sk-from-a-mount-0123\n");
    std::os::unix::fs::symlink("..2026_11_29", home.path().join("mount/..data")).unwrap();
    std::os::unix::fs::symlink("..data/key", home.path().join("mount/key")).unwrap();
    let mut lessor = Setup::openai(&provider).key(Key::new("a").from("file = \"mount/key\"")).spawn_in(home);
    lessor.listening().await;
    ok(&lessor, with_everything("/openai/v1/models")).await;
    had(&provider, &[("authorization", "Bearer sk-from-a-mount-0123")]);
}

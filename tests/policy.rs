//! What a key may not be tricked into: denied paths, callers by their user, apps that are revoked.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::pedantic, missing_docs, unreachable_pub)]

mod support;

use support::client::Answer;
use support::lessor::field;
use support::plays::openai;
use support::provider::{Manners, ok};
use support::tunnel::ask;
use support::{Door, Key, Lessor, Provider, Request, Setup, eventually};

#[tokio::test]
async fn a_path_that_mints_keys_is_denied_in_every_way_in_and_leases_nothing() {
    let provider = Provider::start(openai).await;
    let lessor = Setup::openai(&provider).key(Key::new("a")).start().await;
    for method in ["GET", "POST", "PUT", "DELETE"] {
        for path in [
            "/v1/realtime/client_secrets",
            "/v1/organization/admin_api_keys",
            "/v1/organization/admin_api_keys/key_1?after=x",
            "/v1/organization/projects/p1/service_accounts",
            "/v1/realtime/sessions?x=1",
        ] {
            let by_base_url = lessor.ask(Request::new(method, &format!("/openai{path}"))).await;
            by_base_url.is_error(403, "path_denied");
            let text = by_base_url.text();
            assert!(text.contains("[providers.openai] allow_paths = ["), "{text}");
            let forward = Request::new(method, &format!("http://api.openai.com{path}"));
            lessor.ask(forward).await.is_error(403, "path_denied");
            ask(&lessor, "api.openai.com:443", Request::new(method, path)).await.is_error(403, "path_denied");
        }
    }
    assert_eq!((provider.count(), lessor.metric("lessor_lease_acquire_total").await as u32), (0, 0));
    assert_eq!(lessor.get("/openai/v1/models").await.status, 200);
}

#[tokio::test]
async fn no_spelling_of_a_denied_path_gets_through() {
    let provider = Provider::start(openai).await;
    let lessor = Setup::openai(&provider).key(Key::new("a")).start().await;
    for path in [
        "/v1/realtime/client_secrets/",
        "//v1//realtime//client_secrets",
        "/V1/RealTime/client_Secrets",
        "/v1/realtime/client%5Fsecrets",
        "/v1/realtime%2fclient_secrets",
        "/%76%31/realtime/client_secrets",
        "/v1/realtime/client%255fsecrets",
        "/v1/realtime/client%25255fsecrets",
        "/v1/realtime/client_secrets;a=b",
        "/v1/realtime/client_secrets%3fa",
        "/v1/realtime/client_secrets%00",
        "/v1/realtime/x%252f%252e%252e%252fclient_secrets",
    ] {
        for target in [format!("/openai{path}"), format!("http://api.openai.com{path}")] {
            let answer = lessor.ask(Request::new("POST", &target)).await;
            assert_eq!((answer.status, answer.header("x-lessor-error")), (403, "path_denied"), "{target}");
        }
    }
    assert_eq!(provider.count(), 0);
    // What is let through is what came, to the byte.
    lessor.get("/openai/v1/realtime%2Fcalls//x;y?client_secrets=1").await;
    assert_eq!(provider.request(1).await.target, "/v1/realtime%2Fcalls//x;y?client_secrets=1");
}

#[tokio::test]
async fn a_base_url_with_a_path_hides_no_denied_path() {
    let provider = Provider::start(openai).await;
    for (base, path) in [
        ("/v1", "/realtime/client_secrets"),
        ("/gate", "/v1/realtime/client_secrets"),
        ("/gate/v1", "/realtime/client_secrets"),
    ] {
        let base_url = format!("\"{}{base}\"", provider.base_url());
        let setup = Setup::openai(&provider).key(Key::new("a")).set("providers.openai.base_url", &base_url);
        let lessor = setup.start().await;
        lessor.ask(Request::new("POST", &format!("/openai{path}"))).await.is_error(403, "path_denied");
        let forward = Request::new("POST", &format!("http://api.openai.com{path}"));
        lessor.ask(forward).await.is_error(403, "path_denied");
    }
    assert_eq!(provider.count(), 0);
}

#[tokio::test]
async fn the_user_adds_paths_and_makes_exceptions() {
    let provider = Provider::builder().manners(Manners::Open).start(|_| ok()).await;
    let setup = Setup::openai(&provider)
        .provider("own", &provider)
        .key(Key::new("a"))
        .key(Key::new("b").of("own"))
        .set("providers.openai.deny_paths", "[\"/v1/fine_tuning/**\"]")
        .set("providers.openai.allow_paths", "[\"/v1/realtime/client_secrets\"]")
        .set("providers.own.deny_paths", "[\"/admin/*/keys\"]");
    let lessor = setup.start().await;
    let post = |path: &str| lessor.ask(Request::new("POST", path));
    assert_eq!(post("/openai/v1/realtime/client_secrets").await.status, 200);
    for denied in ["/openai/v1/fine_tuning/jobs", "/openai/v1/realtime/sessions", "/own/admin/x/keys"] {
        post(denied).await.is_error(403, "path_denied");
    }
    assert_eq!(post("/own/admin/keys").await.status, 200);
}

#[tokio::test]
async fn a_catalogue_providers_host_under_another_name_denies_the_same() {
    let provider = Provider::start(openai).await;
    let setup = Setup::openai(&provider)
        .key(Key::new("a"))
        .set("providers.other.base_url", "\"https://api.openai.com/v1\"")
        .key(Key::new("b").of("other"));
    let lessor = setup.start().await;
    lessor.ask(Request::new("POST", "/other/realtime/client_secrets")).await.is_error(403, "path_denied");
}

/// A lessor on TCP and on a Unix socket, with what else is set.
async fn on_both(setup: Setup) -> (Lessor, Door) {
    let dir = tempfile::tempdir().unwrap().keep();
    let path = dir.join("proxy.sock");
    let listen = format!("[\"127.0.0.1:0\", \"unix:{}\"]", path.display());
    (setup.set("listen.proxy", &listen).start().await, Door::Unix(path))
}

async fn by(door: &Door, request: Request) -> Answer {
    support::client::send(door, request).await.unwrap().whole().await.unwrap()
}

#[tokio::test]
async fn over_a_unix_socket_the_callers_user_is_token_enough_and_over_tcp_it_is_not() {
    let provider = Provider::start(openai).await;
    let me = rustix::process::getuid().as_raw();
    let setup = Setup::openai(&provider)
        .key(Key::new("a"))
        .set("apps.mine.uid", &me.to_string())
        .set("apps.mine.providers", "[\"openai\"]")
        .env("TOKEN", "token-of-other")
        .set("apps.other.token", "{ env = \"TOKEN\" }")
        .set("apps.other.providers", "[\"anthropic\"]");
    let (lessor, socket) = on_both(setup).await;
    let models = || Request::get("/openai/v1/models");
    assert_eq!(by(&socket, models()).await.status, 200);
    // The placeholder that every SDK sends is nobody's token, and takes nothing away.
    assert_eq!(by(&socket, models().header("authorization", "Bearer placeholder")).await.status, 200);
    assert_eq!(by(&socket, Request::get("http://api.openai.com/v1/models")).await.status, 200);
    // A token says more than the user; a wrong one is told.
    let other = models().header("authorization", "Bearer token-of-other");
    by(&socket, other).await.is_error(403, "app_forbidden");
    by(&socket, models().header("x-lessor-app-token", "nobodys")).await.is_error(403, "app_unauthenticated");
    lessor.get("/openai/v1/models").await.is_error(403, "app_unauthenticated");
    let line = lessor.log_lines().into_iter().find(|line| field(line, "message") == "request").unwrap();
    assert_eq!(field(&line, "app"), "mine");
}

#[tokio::test]
async fn a_user_that_is_no_apps_is_refused_and_told_the_line_to_add() {
    let provider = Provider::start(openai).await;
    let me = rustix::process::getuid().as_raw();
    let setup = Setup::openai(&provider).key(Key::new("a")).set("apps.mine.uid", &(me + 1).to_string());
    let (_lessor, socket) = on_both(setup).await;
    let refused = by(&socket, Request::get("/openai/v1/models")).await;
    refused.is_error(403, "app_unauthenticated");
    assert!(refused.text().contains(&format!("uid = {me}")), "{}", refused.text());
    assert_eq!(provider.count(), 0);
}

#[tokio::test]
async fn a_start_without_apps_says_who_can_use_the_pool_and_what_to_add() {
    let provider = Provider::start(openai).await;
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("open.sock");
    let listen = format!("[\"127.0.0.1:0\", {{ path = {:?}, mode = 0o666 }}]", path.display().to_string());
    let setup = Setup::openai(&provider).key(Key::new("a")).set("listen.proxy", &listen);
    let lessor = setup.clone().start().await;
    eventually("both are said", async || {
        let log = lessor.log();
        let tcp = log.contains("every local process can use this pool; give callers tokens with [apps.NAME]");
        let unix = log.contains("every user that reaches unix:") && log.contains("(mode 0666)");
        (tcp && unix && log.contains("`uid`")).then_some(())
    })
    .await;
    drop(lessor);
    let closed = setup.set("apps.mine.uid", "0").start().await;
    // Lines come in order: after this request's there is none of the start any more.
    closed.get("/openai/v1/models").await.is_error(403, "app_unauthenticated");
    eventually("its line", async || closed.log().contains("app_unauthenticated").then_some(())).await;
    assert!(!closed.log().contains("can use this pool"), "{}", closed.log());
}

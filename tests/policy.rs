//! What a key may not be tricked into: denied paths, callers by their user, apps that are revoked.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::pedantic, missing_docs, unreachable_pub)]

mod support;

use support::plays::openai;
use support::provider::{Manners, ok};
use support::tunnel::ask;
use support::{Key, Provider, Request, Setup};

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

//! The real SDKs and curl, holding a placeholder, against a provider over TLS that wants the key.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::pedantic, missing_docs, unreachable_pub)]

mod support;

use std::process::Command;

use serde_json::{Value, json};
use support::lessor::run;
use support::plays::{anthropic, openai};
use support::provider::Manners;
use support::sdk::{curl, node, python};
use support::{Key, Lessor, Provider, Setup};

async fn openai_and_lessor() -> (Provider, Lessor) {
    let provider = Provider::builder().good(&["sk-real"]).start(openai).await;
    let lessor = Setup::openai(&provider).key(Key::new("a").secret("sk-real")).start().await;
    (provider, lessor)
}

async fn anthropic_and_lessor() -> (Provider, Lessor) {
    let provider =
        Provider::builder().manners(Manners::Anthropic).good(&["sk-ant-real"]).start(anthropic).await;
    let key = Key::new("a").of("anthropic").secret("sk-ant-real");
    let lessor = Setup::new().provider("anthropic", &provider).key(key).start().await;
    (provider, lessor)
}

/// Runs a script and gives what it printed.
async fn says(mut command: Command, env: &[(&str, &str)]) -> Value {
    command.envs(env.iter().copied());
    let ran = run(command).await;
    ran.ok();
    ran.json()
}

fn assert_python(said: &Value) {
    let answer = json!({"whole": "Hello, world", "streamed": "Hello, world"});
    for side in ["sync", "async"] {
        for (name, value) in answer.as_object().unwrap() {
            assert_eq!(&said[side][name], value, "{said}");
        }
        assert!(said[side]["parts"].as_u64().unwrap() >= 3, "in parts, not in one piece: {said}");
    }
}

/// The ways in which an app reaches lessor by its environment: its own base URL variable, the proxy's,
/// and both. `behind` is the path below lessor, `real` the provider's own URL with plain http.
fn ways<'a>(variable: &'a str, behind: &str, real: &str, lessor: &Lessor) -> Vec<Vec<(&'a str, String)>> {
    let by_base_url = (variable, format!("{}{behind}", lessor.url()));
    let proxies = [("HTTP_PROXY", lessor.url()), ("http_proxy", lessor.url())];
    let real = (variable, real.to_owned());
    vec![
        vec![by_base_url.clone()],
        [vec![real], proxies.to_vec()].concat(),
        [vec![by_base_url], proxies.to_vec()].concat(),
    ]
}

async fn works_every_way(script: &str, ways: Vec<Vec<(&str, String)>>, key_variable: &str) {
    for way in ways {
        let mut env: Vec<(&str, &str)> = way.iter().map(|(name, value)| (*name, value.as_str())).collect();
        env.push((key_variable, "placeholder"));
        assert_python(&says(python(script), &env).await);
    }
}

#[tokio::test]
async fn the_openai_python_sdk_works_by_base_url_by_proxy_and_by_both() {
    let (provider, lessor) = openai_and_lessor().await;
    let ways = ways("OPENAI_BASE_URL", "/openai/v1", "http://api.openai.com/v1", &lessor);
    works_every_way("tests/sdks/openai_sdk.py", ways, "OPENAI_API_KEY").await;
    assert_eq!(provider.count(), 3 * 5);
    assert!(
        provider.seen().iter().all(|seen| seen.key() == "sk-real" && !seen.raw_head.contains("placeholder"))
    );
    lessor.is_free_within_a_second("a").await;
}

#[tokio::test]
async fn the_anthropic_python_sdk_works_by_base_url_by_proxy_and_by_both() {
    let (provider, lessor) = anthropic_and_lessor().await;
    let ways = ways("ANTHROPIC_BASE_URL", "/anthropic", "http://api.anthropic.com", &lessor);
    works_every_way("tests/sdks/anthropic_sdk.py", ways, "ANTHROPIC_API_KEY").await;
    assert_eq!(provider.count(), 3 * 4);
    assert!(provider.seen().iter().all(|seen| seen.key() == "sk-ant-real"));
}

#[tokio::test]
async fn the_openai_node_sdk_works_by_base_url_also_where_a_proxy_is_set() {
    // Node's fetch looks at no proxy variable by itself; where it is told to, it sends CONNECT, which
    // tests/intercept.rs tries.
    let (provider, lessor) = openai_and_lessor().await;
    let (base_url, proxy) = (format!("{}/openai/v1", lessor.url()), lessor.url());
    let mut env = vec![("OPENAI_BASE_URL", base_url.as_str()), ("OPENAI_API_KEY", "placeholder")];
    for _ in 0..2 {
        let said = says(node("tests/sdks/openai_sdk.mjs"), &env).await;
        assert_eq!(
            (&said["whole"], &said["streamed"]),
            (&json!("Hello, world"), &json!("Hello, world")),
            "{said}"
        );
        assert!(said["parts"].as_u64().unwrap() >= 3, "{said}");
        env.push(("HTTP_PROXY", &proxy));
    }
    assert_eq!(provider.count(), 2 * 3);
}

#[tokio::test]
async fn an_sdk_shows_the_message_of_lessors_own_error() {
    let (_provider, lessor) = openai_and_lessor().await;
    lessor.admin_post("/v1/keys/openai/a/disable").await;
    let base_url = format!("{}/openai/v1", lessor.url());
    let env = [("OPENAI_BASE_URL", base_url.as_str()), ("OPENAI_API_KEY", "placeholder")];
    let said = says(python("tests/sdks/openai_error.py"), &env).await;
    assert_eq!(said["code"], "key_unavailable", "{said}");
    assert_eq!(said["kind"], "InternalServerError", "{said}");
}

#[tokio::test]
async fn an_app_is_known_by_the_placeholder_key_that_its_sdk_holds() {
    let provider = Provider::builder().good(&["sk-real"]).start(openai).await;
    let setup = Setup::openai(&provider).key(Key::new("a").secret("sk-real")).env("TOKEN", "token-of-app");
    let lessor = setup.set("apps.app.token", "{ env = \"TOKEN\" }").start().await;
    let base_url = format!("{}/openai/v1", lessor.url());
    let env = [("OPENAI_BASE_URL", base_url.as_str()), ("OPENAI_API_KEY", "token-of-app")];
    assert_python(&says(python("tests/sdks/openai_sdk.py"), &env).await);
    let wrong = [("OPENAI_BASE_URL", base_url.as_str()), ("OPENAI_API_KEY", "token-of-another")];
    let said = says(python("tests/sdks/openai_error.py"), &wrong).await;
    assert_eq!(said["code"], "app_unauthenticated", "{said}");
}

#[tokio::test]
async fn curl_works_by_base_url_by_proxy_and_over_a_unix_socket() {
    let provider = Provider::builder().good(&["sk-real"]).start(openai).await;
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("proxy.sock").display().to_string();
    let setup = Setup::openai(&provider).key(Key::new("a").secret("sk-real"));
    let lessor = setup.set("listen.proxy", &format!("[\"127.0.0.1:0\", \"unix:{socket}\"]")).start().await;
    let url = lessor.url();
    let models = format!("{url}/openai/v1/models");
    for args in [
        &[models.as_str()][..],
        &["--proxy", &url, "http://api.openai.com/v1/models"],
        &["--proxy", &url, "--noproxy", "", &models],
        &["--unix-socket", &socket, "http://localhost/openai/v1/models"],
    ] {
        let ran = run(curl(args)).await;
        assert_eq!(ran.json()["data"][0]["id"], "gpt-4o-mini", "{args:?}");
    }
    let ask = r#"{"model": "gpt-4o-mini", "stream": true, "messages": []}"#;
    let chat = format!("{url}/openai/v1/chat/completions");
    let ran =
        run(curl(&["--no-buffer", &chat, "--header", "content-type: application/json", "--data", ask])).await;
    assert!(ran.ok().ends_with("data: [DONE]\n\n"), "{ran:?}");
    let large = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(large.path(), vec![b'x'; 3 << 20]).unwrap();
    let data = format!("@{}", large.path().display());
    let ran = run(curl(&[&chat, "--header", "expect: 100-continue", "--data-binary", &data])).await;
    ran.ok();
    assert_eq!(provider.seen().last().unwrap().body_len, 3 << 20);
}

#[tokio::test]
async fn curl_sees_a_cut_answer_as_an_error() {
    use support::{Cut, Play};
    let provider = Provider::start(|_| Play::sse().event("one").cut(Cut::Close)).await;
    let lessor = Setup::openai(&provider).key(Key::new("a")).start().await;
    let ran = run(curl(&[&format!("{}/openai/v1/models", lessor.url())])).await;
    assert!([Some(18), Some(56)].contains(&ran.code), "{ran:?}");
}

//! What a key may not be tricked into: denied paths, callers by their user, apps that are revoked.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::pedantic, missing_docs, unreachable_pub)]

mod support;

use std::time::Duration;

use serde_json::json;
use support::client::{Answer, send_on};
use support::h2::H2;
use support::lessor::field;
use support::plays::openai;
use support::provider::{Manners, ok};
use support::tunnel::{ask, connect, tls, tls_client, trusted};
use support::{Door, Key, Lessor, Play, Provider, Raw, Request, Setup, eventually, within};
use tokio::io::{AsyncRead, AsyncReadExt as _};

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
            let http_2 = H2::to(&lessor).await;
            http_2.ask(Request::new(method, &format!("/openai{path}"))).await.is_error(403, "path_denied");
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
    let of_mine = |line: &serde_json::Value| field(line, "app") == "mine" && field(line, "status") == "200";
    eventually("its line", async || lessor.log_lines().iter().any(of_mine).then_some(())).await;
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

/// Two apps, each with a token of its own: `one-token` and `two-token`.
fn two_apps(provider: &Provider) -> Setup {
    Setup::openai(provider)
        .key(Key::new("a").cap(1))
        .env("ONE", "one-token")
        .env("TWO", "two-token")
        .set("apps.one.token", "{ env = \"ONE\" }")
        .set("apps.two.token", "{ env = \"TWO\" }")
}

fn models_of(app: &str) -> Request {
    Request::get("/openai/v1/models").header("x-lessor-app-token", &format!("{app}-token"))
}

/// A CONNECT as the app `one`.
async fn connect_as_one(lessor: &Lessor, authority: &str) -> Raw {
    let mut raw = lessor.raw().await;
    let hello = "CONNECT {} HTTP/1.1\r\nHost: {}\r\nX-Lessor-App-Token: one-token\r\n\r\n";
    raw.write(hello.replace("{}", authority)).await;
    let head = raw.read_to("\r\n\r\n").await;
    assert!(head.starts_with("HTTP/1.1 200 "), "{head}");
    raw
}

/// Fails unless the connection is reset within a second, whatever came before.
async fn is_reset(socket: &mut (impl AsyncRead + Unpin), what: &str) {
    let reading = async {
        let mut some = [0; 4096];
        loop {
            match socket.read(&mut some).await {
                Ok(0) => panic!("{what}: a clean end"),
                Ok(_) => {}
                Err(why) => return why,
            }
        }
    };
    let why = within(Duration::from_secs(1), what, reading).await;
    assert_eq!(why.kind(), std::io::ErrorKind::ConnectionReset, "{what}");
}

#[tokio::test]
async fn a_revoked_app_is_refused_until_it_is_restored_and_others_go_on() {
    let provider = Provider::start(openai).await;
    let lessor = two_apps(&provider).start().await;
    assert_eq!(lessor.ask(models_of("one")).await.status, 200);
    let said = lessor.cli(&["apps", "revoke", "one"]).await;
    assert!(said.ok().contains("revoked, until restored or a restart"), "{said:?}");
    let refused = lessor.ask(models_of("one")).await;
    refused.is_error(403, "app_forbidden");
    assert!(refused.text().contains("lessor apps restore one"), "{}", refused.text());
    let forward = Request::get("http://api.openai.com/v1/models").header("x-lessor-app-token", "one-token");
    lessor.ask(forward).await.is_error(403, "app_forbidden");
    let mut raw = lessor.raw().await;
    raw.write("CONNECT api.openai.com:443 HTTP/1.1\r\nHost: x\r\nX-Lessor-App-Token: one-token\r\n\r\n")
        .await;
    assert!(raw.rest().await.starts_with("HTTP/1.1 403 app_forbidden: "));
    assert_eq!(lessor.ask(models_of("two")).await.status, 200);
    let apps = lessor.cli(&["apps", "list", "--json"]).await.json();
    assert_eq!((&apps["apps"][0]["name"], &apps["apps"][0]["revoked"]), (&json!("one"), &json!(true)));
    assert_eq!(apps["apps"][1]["revoked"], false);
    assert!(!apps.to_string().contains("-token"), "{apps}");
    lessor.cli(&["apps", "restore", "one"]).await.ok();
    assert_eq!(lessor.ask(models_of("one")).await.status, 200);
}

#[tokio::test]
async fn only_who_may_change_keys_may_revoke_an_app() {
    let provider = Provider::start(openai).await;
    let lessor = two_apps(&provider).start().await;
    let refused = by(&lessor.admin_door(), Request::new("POST", "/v1/apps/one/revoke")).await;
    assert_eq!((refused.status, refused.header("x-lessor-error")), (403, "admin_forbidden"));
    let unknown = lessor.admin_post("/v1/apps/three/revoke").await;
    assert_eq!((unknown.status, unknown.header("x-lessor-error")), (404, "unknown_app"));
    assert!(unknown.text().contains("one, two"), "{}", unknown.text());
    assert_eq!(lessor.admin("/v1/apps").await.json()["apps"].as_array().unwrap().len(), 2);
    assert_eq!(lessor.ask(models_of("one")).await.status, 200);
}

#[tokio::test]
async fn everybody_without_apps_is_one_app_that_can_be_revoked() {
    let provider = Provider::start(openai).await;
    let lessor = Setup::openai(&provider).key(Key::new("a")).start().await;
    lessor.cli(&["apps", "revoke", "anonymous"]).await.ok();
    lessor.get("/openai/v1/models").await.is_error(403, "app_forbidden");
    lessor.cli(&["apps", "restore", "anonymous"]).await.ok();
    assert_eq!(lessor.get("/openai/v1/models").await.status, 200);
}

#[tokio::test]
async fn revoking_an_app_breaks_its_open_stream_off_and_frees_the_key() {
    let provider = Provider::start(|_| Play::sse().event("first").silence()).await;
    let lessor = two_apps(&provider).start().await;
    let mut stream = lessor.open(models_of("one")).await;
    stream.read_to("first").await;
    lessor.cli(&["apps", "revoke", "one"]).await.ok();
    let next = within(Duration::from_secs(1), "the cut", stream.next()).await;
    assert!(matches!(next, Some(Err(_))), "a cut looks like no end: {next:?}");
    lessor.is_free_within_a_second("a").await;
    eventually("the provider sees it go", async || provider.seen()[0].gone).await;
    eventually("the log says why", async || lessor.log().contains("\"app_revoked\"").then_some(())).await;
}

#[tokio::test]
async fn revoking_an_app_ends_its_requests_in_the_queue_and_at_the_provider_and_no_others() {
    let provider = Provider::start(|_| Play::new().silence()).await;
    let lessor = two_apps(&provider).start().await;
    let (at_provider, queued, others) = (models_of("one"), models_of("one"), models_of("two"));
    let mut held = Box::pin(lessor.ask(at_provider));
    let refused = async {
        provider.request(1).await;
        let mut queued = Box::pin(lessor.ask(queued));
        let mut others = Box::pin(lessor.try_open(others));
        tokio::select! {
            _ = &mut queued => panic!("answered while the key is taken"),
            _ = &mut others => panic!("answered while the key is taken"),
            () = lessor.comes_to_queue(2) => {}
        }
        lessor.cli(&["apps", "revoke", "one"]).await.ok();
        queued.await.is_error(403, "app_forbidden");
        // The other's comes to the provider now.
        tokio::select! {
            _ = &mut others => panic!("the provider says nothing"),
            seen = provider.request(2) => assert_eq!(seen.key(), "sk-a"),
        }
    };
    let (answer, ()) = tokio::join!(&mut held, refused);
    answer.is_error(403, "app_forbidden");
}

#[tokio::test]
async fn revoking_an_app_resets_its_tunnels_blind_and_opened_idle_and_under_way() {
    let provider = Provider::start(|seen| {
        if seen.target.contains("slow") { Play::sse().event("first").silence() } else { ok() }
    })
    .await;
    let origin = Provider::origin(|_| Play::sse().event("first").silence()).await;
    let lessor = two_apps(&provider).start().await;
    // Blind, with nothing in it, and with an answer under way.
    let mut blind = connect_as_one(&lessor, &origin.addr().to_string()).await;
    let mut blind_busy = connect_as_one(&lessor, &origin.addr().to_string()).await;
    blind_busy.write("GET / HTTP/1.1\r\nHost: x\r\n\r\n").await;
    blind_busy.read_to("first").await;
    // Opened: nothing begun, an idle TLS connection after a request, half a head, a stream.
    let mut unbegun = connect_as_one(&lessor, "api.openai.com:443").await;
    let mut idle = connect_as_one(&lessor, "api.openai.com:80").await;
    idle.write("GET /v1/x HTTP/1.1\r\nHost: api.openai.com\r\n\r\n").await;
    assert_eq!(idle.answer().await.0, 200);
    let mut half = connect_as_one(&lessor, "api.openai.com:80").await;
    half.write("GET /v1/x HTTP/1.1\r\nHo").await;
    let raw = connect_as_one(&lessor, "api.openai.com:443").await;
    let mut tls = tls(&lessor, raw, "api.openai.com").await.unwrap();
    let mut busy = connect_as_one(&lessor, "api.openai.com:80").await;
    busy.write("GET /v1/slow HTTP/1.1\r\nHost: api.openai.com\r\n\r\n").await;
    busy.read_to("first").await;
    lessor.cli(&["apps", "revoke", "one"]).await.ok();
    is_reset(&mut blind.0, "a blind tunnel").await;
    is_reset(&mut blind_busy.0, "a blind tunnel under way").await;
    is_reset(&mut unbegun.0, "an opened tunnel with nothing begun").await;
    is_reset(&mut idle.0, "an opened tunnel between requests").await;
    is_reset(&mut half.0, "an opened tunnel in a head").await;
    is_reset(&mut tls, "an opened tunnel under TLS").await;
    is_reset(&mut busy.0, "an opened tunnel with a stream").await;
    lessor.is_free_within_a_second("a").await;
}

#[tokio::test]
async fn revoking_an_app_breaks_off_its_http_2_too_in_a_tunnel_and_beside_one() {
    let provider = Provider::start(|_| Play::sse().event("first").silence()).await;
    let setup = two_apps(&provider).key(Key::new("b").cap(1)).set("proxy.alpn", "[\"h2\", \"http/1.1\"]");
    let lessor = setup.start().await;
    let mut inside = Vec::new();
    for _ in 0..2 {
        let raw = connect_as_one(&lessor, "api.openai.com:443").await;
        let name = rustls::pki_types::ServerName::try_from("api.openai.com").unwrap();
        let stream = tls_client(trusted(&lessor), &["h2"]).connect(name, raw.0).await.unwrap();
        inside.push(H2::over(stream, "https://api.openai.com").await);
    }
    let beside = H2::to(&lessor).await;
    let mut streams = vec![
        inside[0].open(Request::get("/v1/models")).await.unwrap(),
        beside.open(models_of("one")).await.unwrap(),
    ];
    for stream in &mut streams {
        stream.read_to("first").await;
    }
    lessor.cli(&["apps", "revoke", "one"]).await.ok();
    for stream in &mut streams {
        let next = within(Duration::from_secs(1), "the cut", stream.next()).await;
        assert!(matches!(next, Some(Err(_))), "a cut looks like no end: {next:?}");
    }
    for tunnel in inside {
        tunnel.ends_within(Duration::from_secs(1)).await.expect_err("a tunnel's clean end");
    }
    // Other apps' requests may share a connection that is no tunnel.
    assert_eq!(beside.open(models_of("two")).await.unwrap().status, 200);
    beside.ask(models_of("one")).await.is_error(403, "app_forbidden");
}

#[tokio::test]
async fn a_revoked_lease_breaks_its_stream_off_in_a_tunnel_too() {
    let provider = Provider::start(|_| Play::sse().event("first").silence()).await;
    let lessor = Setup::openai(&provider).key(Key::new("a").cap(1)).start().await;
    for port in [80, 443] {
        let raw = connect(&lessor, &format!("api.openai.com:{port}")).await;
        let request = Request::get("/v1/x");
        let sent = match port {
            443 => {
                send_on(tls(&lessor, raw, "api.openai.com").await.unwrap(), "api.openai.com", request).await
            }
            _ => send_on(raw.0, "api.openai.com", request).await,
        };
        let mut stream = sent.unwrap();
        stream.read_to("first").await;
        lessor.cli(&["leases", "revoke", stream.header("x-lessor-lease")]).await.ok();
        let next = within(Duration::from_secs(1), "the cut", stream.next()).await;
        assert!(matches!(next, Some(Err(_))), "a cut looks like no end: {next:?}");
        lessor.is_free_within_a_second("a").await;
    }
    eventually("the provider sees both go", async || {
        provider.seen().iter().all(|seen| seen.gone.is_some()).then_some(())
    })
    .await;
}

#[tokio::test]
async fn a_revoked_lease_is_named_so_in_the_log() {
    let provider = Provider::start(|_| Play::sse().event("first").silence()).await;
    let lessor = Setup::openai(&provider).key(Key::new("a")).start().await;
    let mut stream = lessor.open(Request::get("/openai/v1/models")).await;
    let lease = stream.header("x-lessor-lease").to_owned();
    stream.read_to("first").await;
    lessor.cli(&["leases", "revoke", &lease]).await.ok();
    assert!(stream.next().await.unwrap().is_err());
    eventually("its line", async || lessor.log().contains("\"lease_revoked\"").then_some(())).await;
    assert!(!lessor.log().contains("\"lease_lost\""), "{}", lessor.log());
}

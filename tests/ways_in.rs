//! The ways in: base URL, absolute form, CONNECT, Unix socket; who is let in, and where requests may go.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::pedantic, missing_docs, unreachable_pub)]

mod support;

use serde_json::json;
use support::client::{full, send_on};
use support::lessor::chat;
use support::plays::openai;
use support::provider::ok;
use support::{Door, Key, Lessor, Play, Provider, Raw, Request, Setup, ms};

async fn start(provider: &Provider) -> Lessor {
    Setup::openai(provider).key(Key::new("a")).start().await
}

/// An origin that is no provider; it says what it was sent.
async fn elsewhere() -> Provider {
    Provider::origin(|seen| Play::json(200, &json!({"head": seen.raw_head}))).await
}

#[tokio::test]
async fn by_base_url_path_and_query_reach_the_provider_byte_for_byte_with_a_leased_key() {
    let provider = Provider::start(|_| ok()).await;
    let lessor = start(&provider).await;
    let answer = lessor.get("/openai/v1/models/a%2Fb//c;d=e?limit=2&x=%2f&y=a+b&z").await;
    assert_eq!(answer.status, 200, "{}", answer.text());
    assert_eq!(answer.header("x-lessor-key"), "a");
    assert_eq!(answer.header("x-lessor-attempts"), "1");
    assert!(!answer.header("x-lessor-lease").is_empty());
    let seen = provider.request(1).await;
    assert_eq!(seen.target, "/v1/models/a%2Fb//c;d=e?limit=2&x=%2f&y=a+b&z");
    assert_eq!(seen.key(), "sk-a");
    assert_eq!(seen.header("host"), format!("localhost:{}", provider.addr().port()));
}

#[tokio::test]
async fn a_prefix_in_base_url_stands_before_the_path() {
    let provider = Provider::start(|_| ok()).await;
    let setup = Setup::openai(&provider).key(Key::new("a"));
    let base_url = format!("\"{}/prefix\"", provider.base_url());
    let lessor = setup.set("providers.openai.base_url", &base_url).start().await;
    assert_eq!(lessor.get("/openai/v1/models").await.status, 200);
    assert_eq!(provider.request(1).await.target, "/prefix/v1/models");
}

#[tokio::test]
async fn a_provider_of_the_users_own_is_served_with_its_own_header_and_format() {
    let provider = Provider::builder().manners(support::provider::Manners::Open).start(|_| ok()).await;
    let setup = Setup::new()
        .provider("internal-llm", &provider)
        .set("providers.internal-llm.inject", "{ header = \"x-token\", format = \"Token {secret}\" }")
        .key(Key::new("a").of("internal-llm").secret("s3cret-of-mine"));
    let lessor = setup.start().await;
    assert_eq!(lessor.get("/internal-llm/v2/run").await.status, 200);
    let seen = provider.request(1).await;
    assert_eq!((seen.target.as_str(), seen.header("x-token")), ("/v2/run", "Token s3cret-of-mine"));
}

#[tokio::test]
async fn by_absolute_form_a_providers_host_is_served_over_the_providers_own_scheme() {
    let provider = Provider::start(openai).await;
    let lessor = start(&provider).await;
    let answer = lessor.get("http://api.openai.com/v1/models").await;
    assert_eq!((answer.status, answer.header("x-lessor-key")), (200, "a"), "{}", answer.text());
    assert_eq!(provider.request(1).await.target, "/v1/models");
}

#[tokio::test]
async fn an_absolute_target_that_is_lessor_itself_is_served_as_base_url() {
    let provider = Provider::start(openai).await;
    let lessor = start(&provider).await;
    for host in [lessor.authority(), lessor.authority().replace("127.0.0.1", "localhost")] {
        let answer = lessor.get(&format!("http://{host}/openai/v1/models")).await;
        assert_eq!((answer.status, answer.header("x-lessor-key")), (200, "a"), "{host}: {}", answer.text());
    }
    assert_eq!(provider.seen()[1].target, "/v1/models");
}

#[tokio::test]
async fn in_absolute_form_the_target_counts_and_not_the_host_header() {
    let provider = Provider::start(openai).await;
    let origin = elsewhere().await;
    let lessor = start(&provider).await;
    let to_origin = format!("http://{}/v1/models", origin.addr());
    let answer = lessor.ask(Request::get(&to_origin).header("host", "api.openai.com")).await;
    assert_eq!(answer.status, 200);
    assert_eq!((provider.count(), origin.request(1).await.credentials), (0, 0));
}

#[tokio::test]
async fn other_hosts_are_forwarded_as_they_are_and_nothing_is_injected() {
    let provider = Provider::start(openai).await;
    let origin = elsewhere().await;
    let lessor = start(&provider).await;
    let request = Request::post(&format!("http://{}/x?key=mine", origin.addr()), &json!({"a": 1}))
        .header("authorization", "Bearer mine");
    let answer = lessor.ask(request).await;
    assert_eq!((answer.status, answer.header("x-lessor-key")), (200, ""), "{}", answer.text());
    let seen = origin.request(1).await;
    assert_eq!((seen.target.as_str(), seen.header("authorization")), ("/x?key=mine", "Bearer mine"));
    assert_eq!(seen.json(), json!({"a": 1}));
}

#[tokio::test]
async fn other_hosts_are_refused_where_the_configuration_denies_them() {
    let provider = Provider::start(openai).await;
    let origin = elsewhere().await;
    let setup = Setup::openai(&provider).key(Key::new("a")).set("proxy.other_hosts", "\"deny\"");
    let lessor = setup.start().await;
    lessor.get(&format!("http://{}/", origin.addr())).await.is_error(403, "destination_denied");
    let mut raw = lessor.raw().await;
    raw.write(format!("CONNECT {} HTTP/1.1\r\nHost: {0}\r\n\r\n", origin.addr())).await;
    let refusal = raw.rest().await;
    let first = refusal.lines().next().unwrap().to_ascii_lowercase();
    assert!(
        first.starts_with("http/1.1 403 ") && first != "http/1.1 403 forbidden",
        "the reason is in {first:?}"
    );
    assert_eq!(lessor.get("http://api.openai.com/v1/models").await.status, 200);
    assert_eq!(origin.count(), 0);
}

#[tokio::test]
async fn connect_to_another_host_is_a_blind_tunnel() {
    let provider = Provider::start(openai).await;
    let origin = elsewhere().await;
    let lessor = start(&provider).await;
    for hello in [
        format!("CONNECT {0} HTTP/1.1\r\nHost: {0}\r\n\r\n", origin.addr()),
        format!("CONNECT {0} HTTP/1.0\r\n\r\n", origin.addr()), // Python's requests: no Host at all
    ] {
        let mut raw = lessor.raw().await;
        raw.write(&hello).await;
        let head = raw.read_to("\r\n\r\n").await;
        assert!(head.split(' ').nth(1) == Some("200"), "{head}");
        assert!(!head.to_ascii_lowercase().contains("transfer-encoding"), "{head}");
        let inside =
            Request::get("/inside").header("authorization", "Bearer mine").header("x-lessor-pool", "x");
        let answer = send_on(raw.0, "whatever", inside).await.unwrap().whole().await.unwrap();
        assert_eq!(answer.status, 200);
        let head = answer.json()["head"].as_str().unwrap().to_owned();
        assert!(head.contains("Bearer mine") && head.contains("x-lessor-pool"), "not untouched: {head}");
    }
}

#[tokio::test]
async fn without_interception_connect_to_a_providers_host_is_refused_and_says_how_it_is_reached() {
    let provider = Provider::start(openai).await;
    let lessor = Setup::openai(&provider).key(Key::new("a")).set("proxy.intercept", "false").start().await;
    let mut raw = lessor.raw().await;
    raw.write("CONNECT api.openai.com:443 HTTP/1.1\r\nHost: api.openai.com:443\r\n\r\n").await;
    let refusal = raw.rest().await;
    assert!(refusal.starts_with("HTTP/1.1 403 destination_denied: "), "{refusal}");
    assert!(refusal.contains("proxy.intercept"), "{refusal}");
    assert_eq!(provider.count(), 0);
    let ca = lessor.cli(&["ca", "path"]).await;
    assert!(ca.code == Some(1) && ca.stderr.contains("proxy.intercept"), "{ca:?}");
}

#[tokio::test]
async fn bytes_after_a_refused_connect_are_never_read_as_a_request() {
    let provider = Provider::start(openai).await;
    let setup = Setup::openai(&provider).key(Key::new("a")).set("proxy.other_hosts", "\"deny\"");
    let lessor = setup.start().await;
    let mut raw = lessor.raw().await;
    let host = lessor.authority();
    let smuggled = format!("GET /openai/v1/models HTTP/1.1\r\nHost: {host}\r\n\r\n");
    raw.write(format!("CONNECT example.test:443 HTTP/1.1\r\nHost: example.test:443\r\n\r\n{smuggled}")).await;
    let said = raw.rest().await;
    assert_eq!(said.matches("HTTP/1.1 ").count(), 1, "{said}");
    assert_eq!(provider.count(), 0);
}

#[tokio::test]
async fn an_upgrade_to_anything_but_a_websocket_is_501_and_reaches_no_provider() {
    let provider = Provider::start(openai).await;
    let lessor = start(&provider).await;
    for token in ["h2c, websocket", "websocket, h2c", "TLS/1.0"] {
        let request = Request::get("/openai/v1/realtime")
            .header("connection", "upgrade")
            .header("upgrade", token)
            .header("sec-websocket-version", "13")
            .header("sec-websocket-key", "dGhlIHNhbXBsZSBub25jZQ==");
        lessor.ask(request).await.is_error(501, "upgrade_unsupported");
    }
    assert_eq!(provider.count(), 0);
    assert_eq!(lessor.in_use("a").await, 0);
}

#[tokio::test]
async fn the_offer_of_h2c_that_javas_client_makes_is_passed_over_and_goes_no_further() {
    let provider = Provider::start(openai).await;
    let lessor = start(&provider).await;
    let request = Request::get("/openai/v1/models")
        .header("connection", "Upgrade, HTTP2-Settings")
        .header("upgrade", "h2c")
        .header("http2-settings", "AAEAAEAAAAIAAAABAAMAAABkAAQBAAAAAAUAAEAA");
    let answer = lessor.ask(request).await;
    assert_eq!((answer.status, answer.header("upgrade")), (200, ""), "{}", answer.text());
    let seen = provider.request(1).await;
    for name in ["upgrade", "http2-settings", "connection"] {
        assert_eq!(seen.header(name), "", "{}", seen.raw_head);
    }
}

#[tokio::test]
async fn a_unix_listener_serves_the_same_and_only_its_user() {
    use std::os::unix::fs::PermissionsExt as _;
    let provider = Provider::start(openai).await;
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("proxy.sock");
    let listen = format!("[\"127.0.0.1:0\", \"unix:{}\"]", path.display());
    let lessor = Setup::openai(&provider).key(Key::new("a")).set("listen.proxy", &listen).start().await;
    assert_eq!(lessor.doors().len(), 2);
    assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
    let door = Door::Unix(path);
    let stream = support::client::send(&door, Request::get("/openai/v1/models")).await.unwrap();
    assert_eq!((stream.status, stream.header("x-lessor-key")), (200, "a"));
    assert_eq!(lessor.get("/openai/v1/models").await.status, 200);
}

#[tokio::test]
async fn a_host_that_is_no_name_of_lessors_is_refused_for_it_may_be_a_rebound_name() {
    let provider = Provider::start(openai).await;
    let setup = Setup::openai(&provider).key(Key::new("a")).set("listen.hosts", "[\"lessor.internal\"]");
    let lessor = setup.start().await;
    let port = lessor.authority().rsplit(':').next().unwrap().to_owned();
    let ask = |host: String| lessor.ask(Request::get("/openai/v1/models").header("host", &host));
    for host in
        ["evil.example".into(), format!("evil.example:{port}"), format!("127.0.0.1.evil.example:{port}")]
    {
        let answer = ask(host.clone()).await;
        assert_eq!(answer.status, 403, "{host}");
        assert!(!answer.header("x-lessor-error").is_empty());
    }
    assert_eq!(provider.count(), 0);
    for host in [
        format!("localhost:{port}"),
        format!("[::1]:{port}"),
        "127.0.0.1".into(),
        format!("lessor.internal:{port}"),
        format!("LocalHost:{port}"),
    ] {
        assert_eq!(ask(host.clone()).await.status, 200, "{host}");
    }
}

#[tokio::test]
async fn what_a_foreign_web_page_sends_is_refused_unless_its_origin_is_listed() {
    let provider = Provider::start(openai).await;
    let setup = Setup::openai(&provider).key(Key::new("a"));
    let lessor = setup.set("listen.allow_origins", "[\"https://app.example\"]").start().await;
    let get = || Request::get("/openai/v1/models");
    // What is no browser may call the address that it connects to its origin.
    let own = format!("http://{}", lessor.authority());
    assert_eq!(lessor.ask(get().header("origin", &own)).await.status, 200);
    for foreign in [
        get().header("origin", "http://127.0.0.1:1"),
        get().header("origin", &own.replace("http:", "https:")),
        get().header("origin", "https://evil.example"),
        get().header("origin", "null"),
        get().header("sec-fetch-site", "cross-site"),
    ] {
        lessor.ask(foreign).await.is_error(403, "origin_denied");
    }
    assert_eq!(provider.count(), 1);
    let listed = get().header("origin", "https://app.example").header("sec-fetch-site", "cross-site");
    assert_eq!(lessor.ask(listed).await.status, 200);
}

#[tokio::test]
async fn dot_segments_are_refused_plain_and_encoded() {
    let provider = Provider::start(openai).await;
    let lessor = start(&provider).await;
    for path in [
        "/openai/v1/../admin",
        "/openai/v1/./models",
        "/openai/v1/%2e%2e/admin",
        "/openai/v1/.%2E/admin",
        "/openai/v1/%2e/models",
        "/openai/..",
        "/openai/v1/..%2fadmin",
        "http://api.openai.com/v1/../admin",
    ] {
        let answer = lessor.get(path).await;
        assert_eq!((answer.status, answer.header("x-lessor-error")), (400, "bad_request"), "{path}");
    }
    assert_eq!(provider.count(), 0);
    assert_eq!(lessor.get("/openai/v1/models/a..b/...").await.status, 404, "only whole segments count");
}

#[tokio::test]
async fn trace_is_405_so_that_no_provider_can_read_the_key_back() {
    let provider = Provider::start(openai).await;
    let lessor = start(&provider).await;
    for target in ["/openai/v1/models", "http://api.openai.com/v1/models"] {
        lessor.ask(Request::new("TRACE", target)).await.is_error(405, "method_denied");
    }
    assert_eq!(provider.count(), 0);
}

#[tokio::test]
async fn a_target_in_a_denied_net_is_refused_by_every_way() {
    let provider = Provider::start(openai).await;
    let lessor = start(&provider).await;
    let Door::Tcp(admin) = lessor.admin_door() else { unreachable!() };
    for authority in [
        "169.254.169.254:80".to_owned(),
        "[::ffff:169.254.169.254]:80".to_owned(),
        "[64:ff9b::a9fe:a9fe]:80".to_owned(),
        "[2002:a9fe:a9fe::1]:80".to_owned(),
        "100.100.100.200:80".to_owned(),
        admin.to_string(),
        // The provider's own host, at a port that is not its.
        format!("localhost.:{}", admin.port()),
    ] {
        let answer = lessor.get(&format!("http://{authority}/")).await;
        assert_eq!(
            (answer.status, answer.header("x-lessor-error")),
            (403, "destination_denied"),
            "{authority}"
        );
        let mut raw = lessor.raw().await;
        raw.write(format!("CONNECT {authority} HTTP/1.1\r\nHost: {authority}\r\n\r\n")).await;
        let refusal = raw.rest().await;
        assert!(refusal.starts_with("HTTP/1.1 403 "), "{authority}: {refusal}");
    }
    let denied = Setup::openai(&provider).key(Key::new("a")).set("proxy.deny_nets", "[\"127.0.0.0/8\"]");
    let lessor = denied.start().await;
    let silent = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let at = silent.local_addr().unwrap();
    lessor.get(&format!("http://{at}/")).await.is_error(403, "destination_denied");
    lessor.get(&format!("http://localhost:{}/", at.port())).await.is_error(403, "destination_denied");
    let mut raw = lessor.raw().await;
    raw.write(format!("CONNECT {at} HTTP/1.1\r\nHost: {at}\r\n\r\n")).await;
    assert!(raw.rest().await.starts_with("HTTP/1.1 403 destination_denied: "));
    // Nor is it knocked at: the first connection there is this one.
    let own = tokio::net::TcpStream::connect(at).await.unwrap();
    assert_eq!(silent.accept().await.unwrap().1, own.local_addr().unwrap());
}

#[tokio::test]
async fn a_host_that_anybody_may_own_gets_no_key_and_the_refusal_names_the_line_to_add() {
    let provider = Provider::start(openai).await;
    let setup = Setup::new().provider("azure-openai", &provider).key(Key::new("a").of("azure-openai"));
    let lessor = setup.start().await;
    let answer = lessor.get("http://mine.openai.azure.com/openai/models").await;
    answer.is_error(403, "destination_denied");
    let text = answer.text();
    assert!(text.contains("hosts") && text.contains("mine.openai.azure.com"), "{text}");
    assert!(text.contains("azure-openai"), "{text}");
    assert_eq!(provider.count(), 0);
}

#[tokio::test]
async fn an_unknown_provider_is_404_and_says_which_are_known() {
    let provider = Provider::start(openai).await;
    let lessor = start(&provider).await;
    for path in ["/opnai/v1/models", "/"] {
        let answer = lessor.get(path).await;
        answer.is_error(404, "unknown_provider");
        assert!(answer.text().contains("openai"), "{}", answer.text());
    }
}

#[tokio::test]
async fn every_credential_a_client_sends_is_taken_out_and_exactly_one_goes_on() {
    let provider = Provider::start(|_| ok()).await;
    let lessor = start(&provider).await;
    let request = Request::get("/openai/v1/models?a=1&key=sk-mine&b=2")
        .header("authorization", "Bearer sk-mine")
        .header("authorization", "Basic c2stbWluZQ==")
        .header("x-api-key", "sk-mine")
        .header("api-key", "sk-mine")
        .header("x-goog-api-key", "sk-mine")
        .header("xi-api-key", "sk-mine")
        .header("proxy-authorization", "Basic c2stbWluZQ==");
    assert_eq!(lessor.ask(request).await.status, 200);
    let seen = provider.request(1).await;
    assert_eq!((seen.credentials, seen.key()), (1, "sk-a"));
    assert_eq!(seen.target, "/v1/models?a=1&b=2");
    assert!(!seen.raw_head.contains("mine") && !seen.raw_head.contains("c2stbWluZQ"), "{}", seen.raw_head);
}

#[tokio::test]
async fn nothing_else_is_added_changed_or_left_over() {
    let provider = Provider::start(openai).await;
    let lessor = start(&provider).await;
    let request = chat("gpt-4o-mini")
        .header("user-agent", "Mine/1.0 (tabs\tand \"quotes\")")
        .header("x-stainless-retry-count", "0")
        .header("openai-beta", "a")
        .header("openai-beta", "b")
        .header("accept-encoding", "gzip, br")
        .header("x-lessor-max-wait", "3s")
        .header("x-lessor-pool", "default");
    assert_eq!(lessor.ask(request).await.status, 200);
    let seen = provider.request(1).await;
    let mut names: Vec<_> = seen.headers.iter().map(|(name, _)| name.to_ascii_lowercase()).collect();
    names.sort();
    let expected = [
        "accept-encoding",
        "authorization",
        "content-length",
        "content-type",
        "host",
        "openai-beta",
        "openai-beta",
        "user-agent",
        "x-stainless-retry-count",
    ];
    assert_eq!(names, expected, "{}", seen.raw_head);
    assert_eq!(seen.header("user-agent"), "Mine/1.0 (tabs\tand \"quotes\")");
    assert_eq!(seen.all("openai-beta"), ["a", "b"]);
}

#[tokio::test]
async fn what_lessor_says_of_itself_in_an_answer_can_be_switched_off() {
    let provider = Provider::start(openai).await;
    let setup = Setup::openai(&provider).key(Key::new("a")).set("listen.response_headers", "false");
    let lessor = setup.start().await;
    for target in ["/openai/v1/models", "http://api.openai.com/v1/models"] {
        let answer = lessor.get(target).await;
        assert_eq!(answer.status, 200, "{}", answer.text());
        assert!(!format!("{:?}", answer.headers).contains("x-lessor"), "{:?}", answer.headers);
    }
    lessor.get("/none/v1/models").await.is_error(404, "unknown_provider");
}

#[tokio::test]
async fn redirects_are_passed_on_and_never_followed() {
    let provider =
        Provider::start(|_| Play::whole(307, &[("location", "http://127.0.0.1:1/elsewhere")], "")).await;
    let lessor = start(&provider).await;
    let answer = lessor.ask(Request::new("POST", "/openai/v1/x").body(full("body"))).await;
    assert_eq!((answer.status, answer.header("location")), (307, "http://127.0.0.1:1/elsewhere"));
    assert_eq!(provider.count(), 1);
}

#[tokio::test]
async fn a_provider_whose_certificate_is_not_trusted_gets_no_byte() {
    let provider = Provider::start(openai).await;
    let base_url = format!("{:?}", provider.base_url());
    let setup = Setup::new().set("providers.openai.base_url", &base_url).key(Key::new("a"));
    let lessor = setup.start().await;
    let answer = lessor.get("/openai/v1/models").await;
    answer.is_error(502, "upstream_unreachable");
    assert_eq!(provider.count(), 0);
    assert_eq!(lessor.status("a").await, "available");
}

#[tokio::test]
async fn a_silent_or_slow_client_is_not_kept_for_ever() {
    let provider = Provider::start(openai).await;
    let setup = Setup::openai(&provider).key(Key::new("a")).set("timeouts.header", "\"300ms\"");
    let lessor = setup.set("timeouts.keep_alive", "\"500ms\"").start().await;
    let mut idle = lessor.raw().await;
    idle.write(format!("GET /openai/v1/models HTTP/1.1\r\nHost: {}\r\n\r\n", lessor.authority())).await;
    assert_eq!(idle.answer().await.0, 200);
    assert!(idle.closes_within(ms(3000)).await, "an idle connection is kept open");
    for beginning in
        ["", "GET /openai/v1/mod", "GET /openai/v1/models HTTP/1.1\r\nHost: local", "PRI * HTTP/2.0\r\n"]
    {
        let mut raw: Raw = lessor.raw().await;
        raw.write(beginning).await;
        assert!(raw.closes_within(ms(3000)).await, "{beginning:?} is kept open");
    }
}

#[tokio::test]
async fn a_connection_in_use_is_kept_also_where_lessor_itself_answers_at_once() {
    let provider = Provider::start(openai).await;
    let setup = Setup::openai(&provider).key(Key::new("a")).set("timeouts.header", "\"1s\"");
    let lessor = setup.set("timeouts.keep_alive", "\"1s\"").start().await;
    let mut raw = lessor.raw().await;
    for _ in 0..8 {
        raw.write(format!("GET /nowhere/v1 HTTP/1.1\r\nHost: {}\r\n\r\n", lessor.authority())).await;
        assert_eq!(raw.answer().await.0, 404);
        tokio::time::sleep(ms(250)).await; // of the time that it may lie idle
    }
    assert!(raw.closes_within(ms(3000)).await, "an idle connection is kept open");
}

#[tokio::test]
async fn an_answer_of_lessors_own_says_that_the_connection_ends_where_nobody_reads_the_body() {
    let provider = Provider::start(openai).await;
    let lessor = Setup::openai(&provider).key(Key::new("a").models(&["gpt-*"])).start().await;
    let post = |path: &str, length: usize, more: &str| {
        let host = lessor.authority();
        format!("POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Length: {length}\r\n{more}\r\n")
    };
    let closes = |said: &str| said.to_ascii_lowercase().contains("\r\nconnection: close\r\n");
    let mut raw = lessor.raw().await;
    // What follows a body that was read is the next request: for its model, or because it is small and on its way.
    let body = r#"{"model": "none"}"#;
    for (path, code) in [("/openai/v1/chat/completions", "no_candidate"), ("/nowhere/v1", "unknown_provider")]
    {
        for later in [ms(0), ms(20)] {
            raw.write(post(path, body.len(), "")).await;
            tokio::time::sleep(later).await; // of the time that a small body is waited for
            raw.write(body).await;
            let (status, said) = raw.answer().await;
            assert!(status == 404 && said.contains(code) && !closes(&said), "{said}");
        }
    }
    // One that is large, that does not come, or that the client sends only when it is told to is not.
    for (length, more) in [(1 << 20, ""), (body.len(), ""), (body.len(), "Expect: 100-continue\r\n")] {
        let mut raw = lessor.raw().await;
        raw.write(post("/nowhere/v1", length, more)).await;
        let (status, said) = raw.answer().await;
        assert!(status == 404 && closes(&said), "{said}");
        assert!(raw.closes_within(ms(3000)).await, "it is kept open");
    }
    assert_eq!(provider.count(), 0);
}

#[tokio::test]
async fn both_answers_to_two_requests_on_one_connection_come_in_order() {
    let provider = Provider::start(|seen| Play::json(200, &json!({"path": seen.target}))).await;
    let lessor = start(&provider).await;
    let mut raw = lessor.raw().await;
    let get = |path: &str| format!("GET /openai/{path} HTTP/1.1\r\nHost: {}\r\n\r\n", lessor.authority());
    raw.write(get("one") + &get("two")).await;
    let ((first, one), (second, two)) = (raw.answer().await, raw.answer().await);
    assert_eq!((first, second), (200, 200));
    assert!(one.contains("/one") && two.contains("/two"), "{one}\n{two}");
}

#[tokio::test]
async fn a_malformed_target_is_400_and_a_malformed_host_is_refused() {
    let provider = Provider::start(openai).await;
    let origin = elsewhere().await;
    let lessor = start(&provider).await;
    let (at, own) = (origin.addr(), lessor.authority());
    let (ip, port) = (at.ip(), at.port());
    for (target, host) in [
        (format!("http://{ip}:99999/"), format!("{ip}:99999")),
        (format!("http://{ip}:/"), format!("{ip}:")),
        (format!("ftp://{at}/"), at.to_string()),
        ("/openai/v1/models".into(), "evil@127.0.0.1".into()),
        ("/openai/v1/models".into(), format!("evil@{own}")),
        (format!("http://evil@{at}/"), at.to_string()),
        (format!("http://{ip}:{port}0000/"), at.to_string()),
    ] {
        let mut raw = lessor.raw().await;
        raw.write(format!("GET {target} HTTP/1.1\r\nHost: {host}\r\n\r\n")).await;
        let (status, said) = raw.answer().await;
        // A Host that is not understood is none of lessor's names.
        let right = if target.starts_with('/') { [400, 403].contains(&status) } else { status == 400 };
        assert!(right, "{target} with Host: {host}: {said}");
    }
    assert_eq!((provider.count(), origin.count()), (0, 0));
}

/// A tunnel to `origin`, and the origin's end of it.
async fn tunnel(lessor: &Lessor, origin: &tokio::net::TcpListener) -> (Raw, Raw) {
    let mut raw = lessor.raw().await;
    let at = origin.local_addr().unwrap();
    raw.write(format!("CONNECT {at} HTTP/1.1\r\nHost: {at}\r\n\r\n")).await;
    let (socket, _) = support::within(support::NEVER, "a tunnel", origin.accept()).await.unwrap();
    let head = raw.read_to("\r\n\r\n").await;
    assert_eq!(head.split(' ').nth(1), Some("200"), "{head}");
    (raw, Raw(socket))
}

#[tokio::test]
async fn a_tunnel_in_which_one_side_only_listens_is_not_idle() {
    let provider = Provider::start(openai).await;
    let setup = Setup::openai(&provider).key(Key::new("a")).set("timeouts.idle", "\"1s\"");
    let lessor = setup.start().await;
    let origin = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let (mut up, mut up_end) = tunnel(&lessor, &origin).await;
    let (mut down_end, mut down) = tunnel(&lessor, &origin).await;
    for n in 0..15 {
        let word = format!("tick {n};");
        up.write(&word).await;
        down.write(&word).await;
        up_end.read_to(&word).await;
        down_end.read_to(&word).await;
        tokio::time::sleep(ms(200)).await; // the pace of the traffic
    }
    // And with none at all it ends.
    assert!(up_end.closes_within(ms(3000)).await && down_end.closes_within(ms(3000)).await, "kept for ever");
}

#[tokio::test]
async fn a_reset_on_one_side_of_a_tunnel_ends_the_other() {
    let provider = Provider::start(openai).await;
    let lessor = start(&provider).await;
    let origin = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    for busy in [false, true] {
        for client_resets in [true, false] {
            let (client, server) = tunnel(&lessor, &origin).await;
            let (mut resets, mut other) = if client_resets { (client, server) } else { (server, client) };
            resets.write("hello").await;
            other.read_to("hello").await;
            if busy {
                // What `resets` does not take waits in the tunnel.
                let zeros = vec![0; 64 << 20];
                let flood = tokio::io::AsyncWriteExt::write_all(&mut other.0, &zeros);
                let _ = tokio::time::timeout(ms(300), flood).await;
            }
            socket2::SockRef::from(&resets.0).set_linger(Some(std::time::Duration::ZERO)).unwrap();
            drop(resets);
            let ended = other.closes_within(ms(1000)).await;
            assert!(ended, "the other side stays; the client resets: {client_resets}, busy: {busy}");
        }
    }
}

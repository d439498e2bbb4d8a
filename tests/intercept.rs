//! CONNECT to a provider's host: the tunnel is opened, and what is inside gets a leased key.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::pedantic, missing_docs, unreachable_pub)]

mod support;

use std::process::Command;

use support::client::send_on;
use support::h2::H2;
use support::lessor::run;
use support::plays::openai;
use support::provider::{Certificates, ok};
use support::sdk::{self, curl, python_path};
use support::tunnel::{ask, connect, tls, tls_client, trusted};
use support::{Door, Key, Lessor, NEVER, Play, Provider, Raw, Request, Setup, eventually, ms, within};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

const OPENAI: &str = "api.openai.com:443";

async fn start(provider: &Provider) -> Lessor {
    Setup::openai(provider).key(Key::new("a")).start().await
}

fn models() -> Request {
    Request::get("/v1/models?limit=1&x=%2f")
}

#[tokio::test]
async fn inside_tls_a_providers_host_is_served_with_a_leased_key_and_kept_alive() {
    let provider = Provider::start(openai).await;
    let lessor = start(&provider).await;
    let mut stream = tls(&lessor, connect(&lessor, OPENAI).await, "api.openai.com").await.unwrap();
    assert_eq!(stream.get_ref().1.alpn_protocol(), Some(&b"http/1.1"[..]));
    for n in 1..=2 {
        stream.write_all(b"GET /v1/models?x=%2f HTTP/1.1\r\nHost: API.openai.com\r\n\r\n").await.unwrap();
        let mut seen = String::new();
        while !seen.contains("gpt-4o-mini") {
            let mut part = vec![0; 4096];
            let read = within(NEVER, "an answer", stream.read(&mut part)).await.unwrap();
            assert!(read > 0, "ended after {seen}");
            seen.push_str(&String::from_utf8_lossy(&part[..read]));
        }
        assert!(seen.starts_with("HTTP/1.1 200 ") && seen.contains("x-lessor-key: a\r\n"), "{seen}");
        assert_eq!(provider.request(n).await.target, "/v1/models?x=%2f");
    }
    assert_eq!(provider.request(1).await.key(), "sk-a");
    let own_port = format!("localhost:{}", provider.addr().port());
    let answer = ask(&lessor, &own_port, Request::get("/v1/models")).await;
    assert_eq!(answer.status, 200, "{}", answer.text());
    eventually("it is counted as such", async || {
        let name = "lessor_requests_total{provider=\"openai\",mode=\"connect\",outcome=\"success\"}";
        (lessor.metric(name).await as u32 == 3).then_some(())
    })
    .await;
}

#[tokio::test]
async fn cleartext_inside_is_served_too_as_nodes_fetch_sends_it() {
    let provider = Provider::start(openai).await;
    let lessor = start(&provider).await;
    let raw = connect(&lessor, "api.openai.com:80").await;
    let answer = send_on(raw.0, "api.openai.com", models()).await.unwrap().whole().await.unwrap();
    assert_eq!((answer.status, answer.header("x-lessor-key")), (200, "a"), "{}", answer.text());
}

#[tokio::test]
async fn a_connect_of_http_1_0_without_host_opens_a_tunnel_too() {
    let provider = Provider::start(openai).await;
    let lessor = start(&provider).await;
    let mut raw = lessor.raw().await;
    raw.write("CONNECT api.openai.com:443 HTTP/1.0\r\n\r\n").await;
    let head = raw.read_to("\r\n\r\n").await.to_ascii_lowercase();
    assert!(head.split(' ').nth(1) == Some("200") && !head.contains("transfer-encoding"), "{head}");
    let stream = tls(&lessor, raw, "api.openai.com").await.unwrap();
    let answer = send_on(stream, "api.openai.com", models()).await.unwrap().whole().await.unwrap();
    assert_eq!(answer.status, 200);
}

#[tokio::test]
async fn bytes_that_came_with_the_connect_are_the_insides_first() {
    let provider = Provider::start(openai).await;
    let lessor = start(&provider).await;
    let mut raw = lessor.raw().await;
    raw.write("CONNECT api.openai.com:80 HTTP/1.1\r\nHost: x\r\n\r\nGET /v1/models HTTP/1.1\r\nHost: api.openai.com\r\n\r\n").await;
    assert_eq!(raw.answer().await.0, 200);
    let (status, said) = raw.answer().await;
    assert!(status == 200 && said.contains("gpt-4o-mini"), "{said}");
}

/// Node's fetch sends CONNECT for `http://` targets too: an app with both a base URL and a proxy asks for this.
#[tokio::test]
async fn a_connect_to_lessor_itself_is_served_as_base_url_in_the_clear() {
    let provider = Provider::start(openai).await;
    let lessor =
        Setup::openai(&provider).key(Key::new("a")).set("proxy.other_hosts", "\"deny\"").start().await;
    let own = lessor.authority();
    let on = |host: &str| host.replace("127.0.0.1", "localhost");
    let models = || Request::get("/openai/v1/models?x=%2f");
    for authority in [own.clone(), on(&own)] {
        let raw = connect(&lessor, &authority).await;
        let answer = send_on(raw.0, &authority, models()).await.unwrap().whole().await.unwrap();
        assert_eq!((answer.status, answer.header("x-lessor-key")), (200, "a"), "{}", answer.text());
    }
    let h2 = H2::over(connect(&lessor, &own).await.0, &format!("http://{own}")).await;
    assert_eq!(h2.ask(models()).await.status, 200);
    assert_eq!(provider.request(3).await.target, "/v1/models?x=%2f");
    eventually("it is counted as such", async || {
        let name = "lessor_requests_total{provider=\"openai\",mode=\"base_url\",outcome=\"success\"}";
        (lessor.metric(name).await as u32 == 3).then_some(())
    })
    .await;
    for (request, status, code) in [
        (models().header("host", "evil.example"), 421, "misdirected"),
        (models().header("host", "api.openai.com"), 421, "misdirected"),
        (models().header("host", &on(&own)), 421, "misdirected"),
        (models().header("host", "127.0.0.1"), 421, "misdirected"),
        (Request::get("http://api.openai.com/v1/models"), 421, "misdirected"),
        (models().header("origin", "https://evil.example"), 403, "origin_denied"),
        (Request::get("/v1/models"), 404, "unknown_provider"),
        (Request::new("CONNECT", &own), 405, "method_denied"),
        (Request::new("POST", "/openai/v1/realtime/client_secrets"), 403, "path_denied"),
    ] {
        let raw = connect(&lessor, &own).await;
        send_on(raw.0, &own, request).await.unwrap().whole().await.unwrap().is_error(status, code);
    }
    assert_eq!((provider.count(), lessor.in_use("a").await), (3, 0));
    // No certificate is made for a name of lessor's own.
    tls(&lessor, connect(&lessor, &own).await, "127.0.0.1").await.unwrap_err();
    eventually("the log says why", async || lessor.log().contains("begins with http://").then_some(())).await;
    let Door::Tcp(admin) = lessor.admin_door() else { unreachable!() };
    let mut raw = lessor.raw().await;
    raw.write(format!("CONNECT {admin} HTTP/1.1\r\nHost: {admin}\r\n\r\n")).await;
    assert!(raw.rest().await.starts_with("HTTP/1.1 403 destination_denied: "), "the admin listener is none");
}

#[tokio::test]
async fn the_app_of_a_connect_to_lessor_itself_counts_inside() {
    let provider = Provider::start(openai).await;
    let setup = Setup::openai(&provider).key(Key::new("a")).env("T1", "token-one");
    let lessor = setup.set("apps.one.token", "{ env = \"T1\" }").start().await;
    let own = lessor.authority();
    let ask = async |line: &str| {
        let mut raw = lessor.raw().await;
        raw.write(format!("CONNECT {own} HTTP/1.1\r\nHost: {own}\r\n{line}\r\n")).await;
        let head = raw.read_to("\r\n\r\n").await;
        (raw, head)
    };
    // `:token-one` as user and password.
    let (raw, head) = ask("Proxy-Authorization: Basic OnRva2VuLW9uZQ==\r\n").await;
    assert!(head.starts_with("HTTP/1.1 200 "), "{head}");
    let request = Request::get("/openai/v1/models").header("authorization", "Bearer placeholder");
    assert_eq!(send_on(raw.0, &own, request).await.unwrap().whole().await.unwrap().status, 200);
    assert!(ask("").await.1.starts_with("HTTP/1.1 407 app_unauthenticated: "));
    assert_eq!(provider.keys_seen(), ["sk-a"]);
}

#[tokio::test]
async fn nodes_fetch_reaches_a_base_url_also_where_its_proxy_is_lessor() {
    let provider = Provider::start(openai).await;
    let lessor = start(&provider).await;
    let mut command = Command::new(sdk::node24_path());
    command.env_clear().arg(sdk::root().join("tests/sdks/clients.mjs")).arg("fetch");
    command.arg(format!("{}/openai/v1/models", lessor.url()));
    command.env("NODE_SDKS", sdk::node_dir()).env("NODE_USE_ENV_PROXY", "1").env("HTTP_PROXY", lessor.url());
    let ran = run(command).await;
    assert!(ran.ok().starts_with("answered ") && ran.stdout.contains("gpt-4o-mini"), "{ran:?}");
    assert_eq!(provider.keys_seen(), ["sk-a"]);
}

#[tokio::test]
async fn what_names_another_host_inside_is_421_and_leases_nothing() {
    let provider = Provider::start(openai).await;
    let lessor = start(&provider).await;
    for (target, host) in [
        ("/v1/models", "evil.example"),
        ("/v1/models", "api.openai.com.evil.example"),
        ("/v1/models", "api.openai.com:8443"),
        ("/v1/models", "api.openai.com:80"),
        ("/v1/models", "evil@api.openai.com"),
        ("/v1/models", "evil@api.openai.com:443"),
        ("/v1/models", "localhost"),
        ("https://evil.example/v1/models", "api.openai.com"),
        ("https://api.openai.com/v1/models", "evil.example"),
        ("http://api.openai.com/v1/models", "api.openai.com"),
    ] {
        let answer = ask(&lessor, OPENAI, Request::get(target).header("host", host)).await;
        answer.is_error(421, "misdirected");
        assert_eq!(answer.header("x-should-retry"), "false");
    }
    assert_eq!((provider.count(), lessor.in_use("a").await), (0, 0));
    for (target, host) in [
        ("/v1/models", "API.OpenAI.com:443"),
        ("https://api.openai.com/v1/models", "api.openai.com"),
        ("/v1/models", "api.openai.com."),
    ] {
        assert_eq!(
            ask(&lessor, OPENAI, Request::get(target).header("host", host)).await.status,
            200,
            "{host}"
        );
    }
}

#[tokio::test]
async fn no_host_two_hosts_trace_and_a_nested_connect_are_refused_inside() {
    let provider = Provider::start(openai).await;
    let lessor = start(&provider).await;
    for (head, status) in [
        ("GET /v1/models HTTP/1.1\r\n", 400),
        ("GET /v1/models HTTP/1.1\r\nHost: api.openai.com\r\nHost: api.openai.com\r\n", 400),
        ("GET /v1/models HTTP/1.1\r\nHost: api.openai.com\r\nHost: evil.example\r\n", 400),
        ("TRACE /v1/models HTTP/1.1\r\nHost: api.openai.com\r\n", 405),
        ("CONNECT api.openai.com:80 HTTP/1.1\r\nHost: api.openai.com:80\r\n", 405),
        ("CONNECT 127.0.0.1:1 HTTP/1.1\r\nHost: 127.0.0.1:1\r\n", 405),
        ("GET /v1/../x HTTP/1.1\r\nHost: api.openai.com\r\n", 400),
        ("OPTIONS * HTTP/1.1\r\nHost: api.openai.com\r\n", 400),
        (
            "POST /v1/x HTTP/1.1\r\nHost: api.openai.com\r\nTransfer-Encoding: chunked\r\nContent-Length: 3\r\n",
            400,
        ),
    ] {
        let mut raw = connect(&lessor, "api.openai.com:80").await;
        raw.write(format!("{head}\r\n")).await;
        let (got, said) = raw.answer().await;
        assert_eq!(got, status, "{head}: {said}");
    }
    assert_eq!((provider.count(), lessor.in_use("a").await), (0, 0));
}

#[tokio::test]
async fn a_server_name_of_another_host_is_shown_the_tunnels_certificate_and_told_421() {
    let provider = Provider::start(openai).await;
    let lessor = start(&provider).await;
    // One that checks names does not go on: the certificate is for the host that CONNECT named.
    for name in ["localhost", "evil.example"] {
        tls(&lessor, connect(&lessor, OPENAI).await, name).await.unwrap_err();
    }
    let script = format!(
        "import socket, ssl\nraw = socket.create_connection(('127.0.0.1', {}))\n\
         raw.sendall(b'CONNECT api.openai.com:443 HTTP/1.1\\r\\nHost: x\\r\\n\\r\\n')\nraw.recv(4096)\n\
         context = ssl._create_unverified_context()\ntls = context.wrap_socket(raw, server_hostname='evil.example')\n\
         tls.sendall(b'GET /v1/models HTTP/1.1\\r\\nHost: api.openai.com\\r\\n\\r\\n')\nprint(tls.recv(4096).decode())",
        port(&lessor)
    );
    let ran = run(python(&script)).await;
    assert!(ran.ok().starts_with("HTTP/1.1 421 ") && ran.stdout.contains("misdirected"), "{ran:?}");
    assert_eq!((provider.count(), lessor.in_use("a").await), (0, 0));
}

#[tokio::test]
async fn an_address_may_be_asked_for_by_its_providers_name_and_by_no_other() {
    let provider = Provider::start(openai).await;
    let setup = Setup::openai(&provider).key(Key::new("a"));
    let lessor = setup.set("providers.openai.hosts", "[\"10.1.2.3\"]").start().await;
    let by_address = ask(&lessor, "10.1.2.3:443", models()).await;
    assert_eq!(by_address.status, 200, "{}", by_address.text());
    let stream = tls(&lessor, connect(&lessor, "10.1.2.3:443").await, "api.openai.com").await.unwrap();
    let by_name = send_on(stream, "api.openai.com", models()).await.unwrap().whole().await.unwrap();
    assert_eq!(by_name.status, 200, "{}", by_name.text());
    let stream = tls(&lessor, connect(&lessor, "10.1.2.3:443").await, "api.openai.com").await.unwrap();
    let mixed = send_on(stream, "10.1.2.3", models()).await.unwrap().whole().await.unwrap();
    mixed.is_error(421, "misdirected");
    tls(&lessor, connect(&lessor, "10.1.2.3:443").await, "api.anthropic.com").await.unwrap_err();
}

#[tokio::test]
async fn the_app_of_the_connect_counts_inside_and_without_one_it_is_407() {
    let provider = Provider::start(openai).await;
    let setup = Setup::openai(&provider).key(Key::new("a")).env("T1", "token-one").env("T2", "token-two");
    let setup = setup.set("apps.one.token", "{ env = \"T1\" }").set("apps.two.token", "{ env = \"T2\" }");
    let lessor = setup.set("apps.two.providers", "[\"anthropic\"]").start().await;
    for header in ["", "Proxy-Authorization: Basic b25lOndyb25n\r\n"] {
        let mut raw = lessor.raw().await;
        raw.write(format!("CONNECT {OPENAI} HTTP/1.1\r\nHost: {OPENAI}\r\n{header}\r\n")).await;
        let refusal = raw.rest().await;
        assert!(refusal.starts_with("HTTP/1.1 407 app_unauthenticated: "), "{refusal}");
        assert!(refusal.to_ascii_lowercase().contains("proxy-authenticate: basic"), "{refusal}");
    }
    // `:token-one` and `:token-two` as user and password.
    for (basic, status, code) in [("OnRva2VuLW9uZQ==", 200, ""), ("OnRva2VuLXR3bw==", 403, "app_forbidden")] {
        let mut raw = lessor.raw().await;
        raw.write(format!("CONNECT {OPENAI} HTTP/1.0\r\nProxy-Authorization: Basic {basic}\r\n\r\n")).await;
        raw.read_to("\r\n\r\n").await;
        let stream = tls(&lessor, raw, "api.openai.com").await.unwrap();
        // Inside, another app's token changes nothing, and leaves lessor nowhere.
        let request = models().header("authorization", "Bearer token-two");
        let answer = send_on(stream, "api.openai.com", request).await.unwrap().whole().await.unwrap();
        assert_eq!((answer.status, answer.header("x-lessor-error")), (status, code));
    }
    assert_eq!(provider.request(1).await.key(), "sk-a");
    let is_one = |line: &serde_json::Value| support::lessor::field(line, "app") == "one";
    eventually("the app is named", async || lessor.log_lines().iter().any(is_one).then_some(())).await;
}

#[tokio::test]
async fn a_host_that_anybody_may_own_or_a_foreign_port_is_refused_on_the_connect() {
    let provider = Provider::start(openai).await;
    let setup = Setup::new().provider("azure-openai", &provider).key(Key::new("a").of("azure-openai"));
    let lessor = setup.start().await;
    let mut raw = lessor.raw().await;
    raw.write("CONNECT mine.openai.azure.com:443 HTTP/1.1\r\nHost: x\r\n\r\n").await;
    let refusal = raw.rest().await;
    assert!(refusal.starts_with("HTTP/1.1 403 destination_denied: "), "{refusal}");
    assert!(refusal.contains("[providers.azure-openai] hosts = ["), "{refusal}");
    let lessor = start(&provider).await;
    let mut raw = lessor.raw().await;
    raw.write("CONNECT api.openai.com:22 HTTP/1.1\r\nHost: x\r\n\r\n").await;
    assert!(raw.rest().await.starts_with("HTTP/1.1 403 destination_denied: "));
}

#[tokio::test]
async fn other_hosts_stay_blind_and_show_their_own_certificate() {
    let provider = Provider::start(openai).await;
    let origin = Provider::builder().manners(support::provider::Manners::Open).start(|_| ok()).await;
    let lessor = start(&provider).await;
    let authority = format!("127.0.0.1:{}", origin.addr().port());
    let url = format!("https://{authority}/x");
    let origins_ca = origin.ca_file().display().to_string();
    let ran = run(curl(&["--proxy", &lessor.url(), "--noproxy", "", "--cacert", &origins_ca, &url])).await;
    ran.ok();
    let own = ca_file(&lessor);
    let ran = run(curl(&["--proxy", &lessor.url(), "--noproxy", "", "--cacert", &own, &url])).await;
    assert_eq!(ran.code, Some(60), "lessor's CA says nothing of other hosts: {ran:?}");
    assert_eq!((origin.count(), provider.count()), (1, 0));
}

#[tokio::test]
async fn a_silent_client_and_garbage_end_in_bounded_time() {
    let provider = Provider::start(openai).await;
    let setup = Setup::openai(&provider).key(Key::new("a")).set("timeouts.header", "\"300ms\"");
    let lessor = setup.start().await;
    let mut silent = connect(&lessor, OPENAI).await;
    assert!(silent.closes_within(ms(2000)).await, "nothing at all");
    let mut hello = connect(&lessor, OPENAI).await;
    hello.write([0x16, 3, 1, 2, 0, 1]).await;
    assert!(hello.closes_within(ms(4000)).await, "a ClientHello that stops");
    let mut head = connect(&lessor, OPENAI).await;
    head.write("GET /v1/mo").await;
    let said = head.rest().await;
    assert!(said.starts_with("HTTP/1.1 408 "), "{said}");
    let stream = tls(&lessor, connect(&lessor, OPENAI).await, "api.openai.com").await;
    let mut stream = stream.unwrap();
    stream.write_all(b"GET /v1/mo").await.unwrap();
    let mut said = Vec::new();
    let _ = within(NEVER, "the end", stream.read_to_end(&mut said)).await;
    assert!(said.starts_with(b"HTTP/1.1 408 "), "under TLS too: {:?}", String::from_utf8_lossy(&said));
    let mut garbage = connect(&lessor, OPENAI).await;
    garbage.write([0x80, 0, 1, 0xff, 0, 13, 10, 13, 10]).await;
    let said = garbage.rest().await;
    assert!(said.starts_with("HTTP/1.1 400 ") && said.contains("bad_request"), "{said}");
    let mut bad_tls = connect(&lessor, OPENAI).await;
    bad_tls.write([0x16, 3, 1, 0, 5, 1, 0, 0, 1, 9]).await;
    let mut alert = [0; 7];
    within(NEVER, "an alert", bad_tls.0.read_exact(&mut alert)).await.unwrap();
    assert_eq!(alert[0], 0x15, "an alert: {alert:?}");
    assert_eq!(provider.count(), 0);
}

#[tokio::test]
async fn a_client_gone_in_the_midst_of_a_handshake_leaves_nothing_behind() {
    let provider = Provider::start(openai).await;
    let setup = Setup::openai(&provider).key(Key::new("a")).set("limits.max_connections", "4");
    let lessor = setup.start().await;
    // More than there are places: each must come back long before timeouts.header.
    for _ in 0..16 {
        let mut raw = within(NEVER, "a free place", connect(&lessor, OPENAI)).await;
        raw.write([0x16, 3, 1, 2, 0, 1, 0]).await;
    }
    assert_eq!(lessor.chat().await.status, 200);
}

#[tokio::test]
async fn a_client_that_offers_only_http_2_gets_the_alert_for_that() {
    let provider = Provider::start(openai).await;
    let lessor = start(&provider).await;
    let raw = connect(&lessor, OPENAI).await;
    let name = "api.openai.com".try_into().unwrap();
    let refused = tls_client(trusted(&lessor), &["h2"]).connect(name, raw.0).await.unwrap_err();
    assert!(refused.to_string().contains("NoApplicationProtocol"), "{refused}");
    let raw = connect(&lessor, OPENAI).await;
    let name = "api.openai.com".try_into().unwrap();
    let both = tls_client(trusted(&lessor), &["h2", "http/1.1"]).connect(name, raw.0).await.unwrap();
    assert_eq!(both.get_ref().1.alpn_protocol(), Some(&b"http/1.1"[..]));
}

#[tokio::test]
async fn events_stream_through_and_a_disconnect_frees_the_slot_within_a_second() {
    let gate = support::Gate::default();
    let until = gate.clone();
    let provider =
        Provider::start(move |_| Play::sse().event("one").until(&until).event("two").silence()).await;
    let lessor = start(&provider).await;
    let stream = tls(&lessor, connect(&lessor, OPENAI).await, "api.openai.com").await.unwrap();
    let mut answer = send_on(stream, "api.openai.com", Request::get("/v1/stream")).await.unwrap();
    answer.read_to("one").await;
    assert_eq!(lessor.in_use("a").await, 1);
    gate.open();
    answer.read_to("two").await;
    drop(answer);
    lessor.is_free_within_a_second("a").await;
    // With unread bytes in the tunnel, and before any answer.
    let mut stream = tls(&lessor, connect(&lessor, OPENAI).await, "api.openai.com").await.unwrap();
    let post = "POST /v1/x HTTP/1.1\r\nHost: api.openai.com\r\nContent-Length: 2\r\n\r\n{}\r\n";
    stream.write_all(post.as_bytes()).await.unwrap();
    lessor.comes_to_use("a", 1).await;
    drop(stream);
    lessor.is_free_within_a_second("a").await;
}

#[tokio::test]
async fn a_cut_answer_is_no_complete_one_inside_tls() {
    let provider = Provider::start(|_| Play::sse().event("one").cut(support::Cut::Close)).await;
    let lessor = start(&provider).await;
    let stream = tls(&lessor, connect(&lessor, OPENAI).await, "api.openai.com").await.unwrap();
    let answer = send_on(stream, "api.openai.com", Request::get("/v1/stream")).await.unwrap();
    answer.whole().await.unwrap_err();
}

#[tokio::test]
async fn a_drain_lets_the_stream_inside_end_and_takes_the_ca_files_away() {
    let gate = support::Gate::default();
    let until = gate.clone();
    let provider = Provider::start(move |_| Play::sse().event("one").until(&until).done()).await;
    let mut lessor = start(&provider).await;
    let stream = tls(&lessor, connect(&lessor, OPENAI).await, "api.openai.com").await.unwrap();
    let mut answer = send_on(stream, "api.openai.com", Request::get("/v1/stream")).await.unwrap();
    answer.read_to("one").await;
    let _idle = connect(&lessor, OPENAI).await;
    let files = ["ca.pem", "ca-bundle.pem"].map(|end| lessor.admin_socket().with_extension(end));
    assert!(files.iter().all(|file| file.exists()));
    lessor.sigterm();
    eventually("it drains", async || lessor.log().contains("stopping").then_some(())).await;
    gate.open();
    answer.read_to("[DONE]").await;
    assert!(answer.whole().await.is_ok());
    assert!(lessor.ends_within(NEVER).await.success());
    assert!(files.iter().all(|file| !file.exists()));
}

fn ca_file(lessor: &Lessor) -> String {
    lessor.admin_socket().with_extension("ca.pem").display().to_string()
}

fn bundle(lessor: &Lessor) -> String {
    lessor.admin_socket().with_extension("ca-bundle.pem").display().to_string()
}

fn port(lessor: &Lessor) -> u16 {
    let Door::Tcp(at) = lessor.door() else { unreachable!() };
    at.port()
}

/// Python with the SDKs and nothing in its environment, about to run this.
fn python(code: &str) -> Command {
    let mut command = Command::new(python_path());
    command.env_clear().args(["-c", code]);
    command
}

#[tokio::test]
async fn the_command_line_says_where_the_ca_is_and_prints_it() {
    let provider = Provider::start(openai).await;
    let lessor = start(&provider).await;
    assert_eq!(lessor.cli(&["ca", "path"]).await.ok().trim_end(), ca_file(&lessor));
    assert_eq!(lessor.cli(&["ca", "bundle"]).await.ok().trim_end(), bundle(&lessor));
    let pem = std::fs::read_to_string(ca_file(&lessor)).unwrap();
    assert_eq!(lessor.cli(&["ca", "print"]).await.ok(), pem);
    assert!(std::fs::read_to_string(bundle(&lessor)).unwrap().ends_with(&pem));
    assert!(!pem.contains("PRIVATE"));
    let json = lessor.cli(&["ca", "path", "--json"]).await.json();
    assert_eq!((json["cert_file"].as_str(), json["pem"].as_str()), (Some(&*ca_file(&lessor)), Some(&*pem)));
    let home = support::lessor::Home::default();
    let none = home.run(&["ca", "path", "--admin", "/nowhere/lessor.sock"]).await;
    assert!(none.code == Some(3) && none.stderr.contains("no sidecar answers"), "{none:?}");
    assert!(home.run(&["ca", "--help"]).await.ok().contains("SSL_CERT_FILE"));
}

#[tokio::test]
async fn where_the_files_cannot_be_written_it_is_one_warning_and_tunnels_are_opened_all_the_same() {
    let provider = Provider::start(openai).await;
    let port = support::free_port();
    let home = std::sync::Arc::new(support::lessor::Home::default());
    // A directory stands where the file would.
    std::fs::create_dir(home.path().join(format!("run/lessor-{port}.ca.pem"))).unwrap();
    let setup = Setup::openai(&provider).key(Key::new("a"));
    let mut lessor = setup.set("listen.proxy", &format!("\"127.0.0.1:{port}\"")).spawn_in(home);
    lessor.listening().await;
    assert_eq!(lessor.log().matches("the CA's files could not be written").count(), 1);
    let pem = lessor.cli(&["ca", "print"]).await.ok().to_owned();
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), pem).unwrap();
    let ca = file.path().display().to_string();
    run(curl(&["--proxy", &lessor.url(), "--cacert", &ca, "https://api.openai.com/v1/models"])).await.ok();
    let path = lessor.cli(&["ca", "path"]).await;
    assert!(path.code == Some(1) && path.stdout.is_empty() && path.stderr.contains("ca print"), "{path:?}");
}

#[tokio::test]
async fn curl_trusts_the_ca_when_told_and_else_refuses_and_the_log_says_why() {
    let provider = Provider::start(openai).await;
    let lessor = start(&provider).await;
    let url = "https://api.openai.com/v1/models";
    for trust in [ca_file(&lessor), bundle(&lessor)] {
        let ran = run(curl(&["--proxy", &lessor.url(), "--cacert", &trust, url])).await;
        assert_eq!(ran.json()["data"][0]["id"], "gpt-4o-mini");
    }
    let ran = run(curl(&["--proxy", &lessor.url(), url])).await;
    assert_eq!(ran.code, Some(60), "{ran:?}");
    eventually("the log says why", async || {
        lessor.log().contains("a client does not trust lessor's CA").then_some(())
    })
    .await;
    assert_eq!(provider.count(), 2);
}

#[tokio::test]
async fn requests_urllib_and_the_openai_sdk_work_by_https_proxy() {
    let provider = Provider::start(openai).await;
    let lessor = start(&provider).await;
    let url = "https://api.openai.com/v1/models";
    for code in [
        format!("import requests\nprint(requests.get('{url}', timeout=20).text)"),
        format!("import urllib.request\nprint(urllib.request.urlopen('{url}', timeout=20).read().decode())"),
        "import openai\nprint(openai.OpenAI(api_key='placeholder').models.list().model_dump_json())".into(),
        // As Python 3.13 checks by default.
        format!(
            "import ssl, urllib.request\ncontext = ssl.create_default_context()\n\
             context.verify_flags |= ssl.VERIFY_X509_STRICT | ssl.VERIFY_X509_PARTIAL_CHAIN\n\
             print(urllib.request.urlopen('{url}', timeout=20, context=context).read().decode())"
        ),
    ] {
        let mut command = python(&code);
        command.env("HTTPS_PROXY", lessor.url()).env("SSL_CERT_FILE", bundle(&lessor));
        command.env("REQUESTS_CA_BUNDLE", bundle(&lessor));
        let ran = run(command).await;
        assert!(ran.ok().contains("gpt-4o-mini"), "{code}: {ran:?}");
    }
    assert_eq!(provider.count(), 4);
}

/// What Node 24 does by itself with NODE_USE_ENV_PROXY, an application of an older Node does by undici's agent:
/// CONNECT for https and for http alike.
#[tokio::test]
async fn nodes_fetch_works_by_proxy_variables() {
    let provider = Provider::start(openai).await;
    let lessor = start(&provider).await;
    for scheme in ["https", "http"] {
        let mut command = sdk::node("tests/sdks/proxied.mjs");
        command.env("HTTPS_PROXY", lessor.url()).env("HTTP_PROXY", lessor.url());
        command.env("NODE_EXTRA_CA_CERTS", ca_file(&lessor));
        command.arg(format!("{scheme}://api.openai.com/v1/models"));
        assert!(run(command).await.ok().contains("gpt-4o-mini"));
    }
}

#[tokio::test]
async fn openssl_takes_the_chain_at_its_strictest() {
    let provider = Provider::start(openai).await;
    let lessor = start(&provider).await;
    let proxy = lessor.authority();
    let ca = ca_file(&lessor);
    let mut client = Command::new("openssl");
    client.args(["s_client", "-proxy", &proxy, "-connect", OPENAI, "-servername", "api.openai.com"]);
    client.args([
        "-CAfile",
        &ca,
        "-x509_strict",
        "-verify_return_error",
        "-verify_hostname",
        "api.openai.com",
    ]);
    let ran = run(client).await;
    assert!(ran.ok().contains("Verify return code: 0 (ok)"), "{ran:?}");
    let leaf = ran.stdout.split("-----BEGIN").nth(1).unwrap().split("-----END").next().unwrap();
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), format!("-----BEGIN{leaf}-----END CERTIFICATE-----\n")).unwrap();
    let leaf = file.path().display().to_string();
    let mut verify = Command::new("openssl");
    verify.args(["verify", "-x509_strict", "-purpose", "sslserver", "-CAfile", &ca, &leaf]);
    run(verify).await.ok();
    let text = |file: &str| {
        let mut command = Command::new("openssl");
        command.args(["x509", "-noout", "-text", "-in", file]);
        run(command)
    };
    let leaf = text(&leaf).await.ok().to_owned();
    for part in ["DNS:api.openai.com", "TLS Web Server Authentication", "Authority Key Id", "Subject Key Id"]
    {
        assert!(leaf.contains(part), "{part} in {leaf}");
    }
    assert!(!leaf.contains("CN = api"), "{leaf}");
    let ca = text(&ca).await.ok().to_owned();
    for part in [
        "Basic Constraints: critical",
        "CA:TRUE, pathlen:0",
        "Key Usage: critical",
        "Subject Key Id",
        "P-256",
    ] {
        assert!(ca.contains(part), "{part} in {ca}");
    }
}

/// An operator's CA in a directory, its key with this mode.
fn operator_ca(mode: u32) -> (tempfile::TempDir, Setup) {
    use std::os::unix::fs::PermissionsExt as _;
    let dir = tempfile::tempdir().unwrap();
    let (ca_pem, key_pem) = Certificates::ca();
    let (cert, key) = (dir.path().join("ca.pem"), dir.path().join("ca.key"));
    std::fs::write(&cert, ca_pem).unwrap();
    std::fs::write(&key, key_pem).unwrap();
    std::fs::set_permissions(&key, std::fs::Permissions::from_mode(mode)).unwrap();
    let shown = |path: &std::path::Path| format!("{:?}", path.display().to_string());
    let setup = Setup::new().set("ca.cert_file", &shown(&cert)).set("ca.key_file", &shown(&key));
    (dir, setup)
}

#[tokio::test]
async fn an_operators_ca_signs_instead_and_is_what_clients_find() {
    let provider = Provider::start(openai).await;
    let (dir, setup) = operator_ca(0o600);
    let lessor = setup.provider("openai", &provider).key(Key::new("a")).start().await;
    assert_eq!(ask(&lessor, OPENAI, models()).await.status, 200);
    let own = std::fs::read_to_string(dir.path().join("ca.pem")).unwrap().replace('\r', "");
    assert_eq!(lessor.cli(&["ca", "print"]).await.ok().trim(), own.trim());
    assert!(!lessor.log().contains("PRIVATE KEY"));
}

#[tokio::test]
async fn an_operators_ca_that_is_renewed_is_taken_on_sighup_and_a_bad_pair_is_one_warning() {
    use rustix::process::Signal;
    let provider = Provider::start(openai).await;
    let (dir, setup) = operator_ca(0o600);
    let lessor = setup.provider("openai", &provider).key(Key::new("a")).start().await;
    let (new, _) = operator_ca(0o600);
    let take = |name: &str| std::fs::copy(new.path().join(name), dir.path().join(name)).unwrap();
    let warnings = || lessor.log().matches("[ca] is not taken").count();
    take("ca.pem");
    for _ in 0..3 {
        lessor.signal(Signal::HUP);
        eventually("it is told", async || (warnings() == 1).then_some(())).await;
        assert_eq!(ask(&lessor, OPENAI, models()).await.status, 200, "the old one still signs");
    }
    take("ca.key");
    lessor.signal(Signal::HUP);
    let own = std::fs::read_to_string(new.path().join("ca.pem")).unwrap();
    let shown = || std::fs::read_to_string(ca_file(&lessor)).unwrap_or_default();
    eventually("clients find the new one", async || (shown().trim() == own.trim()).then_some(())).await;
    assert_eq!(ask(&lessor, OPENAI, models()).await.status, 200, "verified by the new one");
    assert_eq!(warnings(), 1);
    assert!(!lessor.log().contains("PRIVATE KEY"));
}

#[tokio::test]
async fn an_operators_ca_is_refused_where_others_read_its_key_or_it_is_none() {
    let provider = Provider::start(openai).await;
    let check = async |setup: Setup, dir: &tempfile::TempDir| {
        let file = dir.path().join("lessor.toml");
        std::fs::write(&file, setup.provider("openai", &provider).toml()).unwrap();
        let home = support::lessor::Home::default();
        home.run(&["check", "--config", file.to_str().unwrap()]).await
    };
    for mode in [0o644, 0o640, 0o604, 0o620] {
        let (dir, setup) = operator_ca(mode);
        let ran = check(setup, &dir).await;
        assert!(ran.code == Some(2) && ran.stderr.contains("chmod 600"), "{mode:o}: {ran:?}");
    }
    let (dir, setup) = operator_ca(0o400);
    check(setup.clone(), &dir).await.ok();
    let (_other_dir, other) = operator_ca(0o600);
    std::fs::copy(_other_dir.path().join("ca.pem"), dir.path().join("ca.pem")).unwrap();
    let ran = check(setup, &dir).await;
    assert!(ran.code == Some(2) && ran.stderr.contains("is not the key of"), "{ran:?}");
    let made = Certificates::make(&["localhost"]);
    std::fs::write(_other_dir.path().join("ca.pem"), made.cert.pem()).unwrap();
    let ran = check(other, &_other_dir).await;
    assert!(ran.code == Some(2) && ran.stderr.contains("is no CA"), "{ran:?}");
    let ran = check(Setup::new().set("ca.cert_file", "\"x.pem\""), &dir).await;
    assert!(ran.code == Some(2) && ran.stderr.contains("needs ca.key_file"), "{ran:?}");
}

#[tokio::test]
async fn what_a_handshake_costs_is_shown() {
    let provider = Provider::start(openai).await;
    let lessor = start(&provider).await;
    ask(&lessor, OPENAI, models()).await;
    let client = tls_client(trusted(&lessor), &["http/1.1"]);
    let begun = std::time::Instant::now();
    for _ in 0..20 {
        let raw: Raw = connect(&lessor, OPENAI).await;
        client.connect("api.openai.com".try_into().unwrap(), raw.0).await.unwrap();
    }
    println!("CONNECT and handshake: {:?} each", begun.elapsed() / 20);
}

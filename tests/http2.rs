//! HTTP/2 from clients: by prior knowledge, and inside a tunnel where it is offered.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::pedantic, missing_docs, unreachable_pub)]

mod support;

use std::time::{Duration, Instant};

use futures_util::future::join_all;
use support::client::{fed, full, patterned};
use support::h2::H2;
use support::lessor::run;
use support::plays::openai;
use support::provider::ok;
use support::sdk::curl;
use support::tunnel::{connect, tls_client, trusted};
use support::{
    Cut, Gate, Key, Lessor, NEVER, Play, Provider, Raw, Request, Setup, eventually, eventually_within, ms,
    within,
};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

const BOTH: &str = "[\"h2\", \"http/1.1\"]";

async fn start(provider: &Provider) -> Lessor {
    Setup::openai(provider).key(Key::new("a")).set("proxy.alpn", BOTH).start().await
}

fn models() -> Request {
    Request::get("/openai/v1/models?x=%2f")
}

#[tokio::test]
async fn by_prior_knowledge_a_base_url_is_served_many_times_on_one_connection() {
    let provider = Provider::start(openai).await;
    let lessor = start(&provider).await;
    let h2 = H2::to(&lessor).await;
    let answers = join_all((0..20).map(|_| h2.ask(models()))).await;
    for answer in &answers {
        assert_eq!((answer.status, answer.header("x-lessor-key")), (200, "a"), "{}", answer.text());
        assert!(answer.text().contains("gpt-4o-mini"));
    }
    for seen in provider.seen() {
        assert_eq!((seen.target.as_str(), seen.key()), ("/v1/models?x=%2f", "sk-a"));
        assert!(seen.raw_head.starts_with("GET /v1/models?x=%2f HTTP/1.1\r\n"), "{}", seen.raw_head);
    }
    assert!(provider.most_at_once("sk-a") <= 8, "the cap holds for streams as for connections");
    lessor.is_free_within_a_second("a").await;
}

#[tokio::test]
async fn the_forward_proxy_takes_it_too_for_a_provider_and_for_other_hosts() {
    let provider = Provider::start(openai).await;
    let origin = Provider::origin(|_| ok()).await;
    let lessor = start(&provider).await;
    let h2 = H2::to(&lessor).await;
    let answer = h2.ask(Request::get("http://api.openai.com/v1/models")).await;
    assert_eq!((answer.status, answer.header("x-lessor-key")), (200, "a"), "{}", answer.text());
    let answer = h2.ask(Request::get(&format!("http://{}/here", origin.addr()))).await;
    assert_eq!((answer.status, answer.header("x-lessor-key")), (200, ""), "{}", answer.text());
    assert_eq!(origin.request(1).await.credentials, 0);
    eventually("each is counted as what it was", async || {
        let count = |mode| {
            format!("lessor_requests_total{{provider=\"openai\",mode=\"{mode}\",outcome=\"success\"}}")
        };
        (lessor.metric(&count("forward")).await as u32 == 1).then_some(())
    })
    .await;
}

#[tokio::test]
async fn inside_a_tunnel_it_is_what_tls_agreed_on_and_offered_only_where_it_is_set() {
    let provider = Provider::start(openai).await;
    let lessor = start(&provider).await;
    let h2 = H2::inside(&lessor, "api.openai.com").await;
    for answer in join_all((0..4).map(|_| h2.ask(Request::get("/v1/models")))).await {
        assert_eq!((answer.status, answer.header("x-lessor-key")), (200, "a"), "{}", answer.text());
    }
    // Who offers HTTP/1.1 alone gets that.
    let raw = connect(&lessor, "api.openai.com:443").await;
    let name = || rustls::pki_types::ServerName::try_from("api.openai.com").unwrap();
    let old = tls_client(trusted(&lessor), &["http/1.1"]).connect(name(), raw.0).await.unwrap();
    assert_eq!(old.get_ref().1.alpn_protocol(), Some(&b"http/1.1"[..]));
    // By default nobody gets it: a WebSocket client that offers both would be lost.
    let plain = Setup::openai(&provider).key(Key::new("a")).start().await;
    let raw = connect(&plain, "api.openai.com:443").await;
    let both = tls_client(trusted(&plain), &["h2", "http/1.1"]).connect(name(), raw.0).await.unwrap();
    assert_eq!(both.get_ref().1.alpn_protocol(), Some(&b"http/1.1"[..]));
    let raw = connect(&plain, "api.openai.com:443").await;
    let refused = tls_client(trusted(&plain), &["h2"]).connect(name(), raw.0).await;
    assert!(refused.is_err(), "no protocol in common");
}

#[tokio::test]
async fn cleartext_inside_a_tunnel_may_begin_with_it_too() {
    let provider = Provider::start(openai).await;
    let lessor = start(&provider).await;
    let raw = connect(&lessor, "api.openai.com:80").await;
    let h2 = H2::over(raw.0, "http://api.openai.com").await;
    let answer = h2.ask(Request::get("/v1/models")).await;
    assert_eq!((answer.status, answer.header("x-lessor-key")), (200, "a"), "{}", answer.text());
}

#[tokio::test]
async fn every_stream_inside_must_name_the_tunnels_host() {
    let provider = Provider::start(openai).await;
    let lessor = start(&provider).await;
    let h2 = H2::inside(&lessor, "api.openai.com").await;
    for (target, host) in [
        ("https://evil.example/v1/models", None),
        ("https://api.openai.com:8443/v1/models", None),
        ("http://api.openai.com/v1/models", None),
        ("https://api.anthropic.com/v1/models", None),
        ("https://api.openai.com/v1/models", Some("evil.example")),
        ("https://evil.example/v1/models", Some("api.openai.com")),
    ] {
        let request = Request::get(target);
        let request = match host {
            Some(host) => request.header("host", host),
            None => request,
        };
        h2.ask(request).await.is_error(421, "misdirected");
        // The streams beside it are served as ever.
        assert_eq!(h2.ask(Request::get("/v1/models")).await.status, 200);
    }
    assert_eq!((provider.count(), lessor.in_use("a").await), (6, 0));
    let outside = H2::to(&lessor).await;
    let own = format!("http://{}/openai/v1/models", lessor.authority());
    outside.ask(Request::get(&own).header("host", "evil.example")).await.is_error(400, "bad_request");
    let answer = outside.ask(Request::get(&own).header("host", &lessor.authority())).await;
    assert_eq!(answer.status, 200);
    assert_eq!(provider.count(), 7);
}

/// One request as bytes, its fields neither indexed nor packed.
fn frame_of(fields: &[(&str, &str)]) -> Vec<u8> {
    let mut block = Vec::new();
    for (name, value) in fields {
        block.extend([0, name.len() as u8]);
        block.extend(name.as_bytes());
        block.push(value.len() as u8);
        block.extend(value.as_bytes());
    }
    // HEADERS with END_STREAM and END_HEADERS, of stream 1, behind preface and settings.
    let head = [0, 0, block.len() as u8, 1, 5, 0, 0, 0, 1];
    [b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0".as_slice(), &head, &block].concat()
}

/// The type and the payload of the frame that ends the wait for an answer on `raw`: of stream 1, or GOAWAY.
async fn answer_to(raw: &mut Raw) -> (u8, Vec<u8>) {
    loop {
        let mut head = [0; 9];
        within(NEVER, "a frame", raw.0.read_exact(&mut head)).await.unwrap();
        let mut payload = vec![0; usize::from(head[1]) << 8 | usize::from(head[2])];
        raw.0.read_exact(&mut payload).await.unwrap();
        if matches!(head[3], GOAWAY | RST_STREAM | HEADERS) {
            return (head[3], payload);
        }
    }
}

const HEADERS: u8 = 1;
const RST_STREAM: u8 = 3;
const GOAWAY: u8 = 7;

/// How HPACK writes `:status: 200`, which stands first.
const OK: u8 = 0x88;

#[tokio::test]
async fn a_request_that_names_two_authorities_or_hosts_is_served_to_neither() {
    let provider = Provider::start(openai).await;
    let origin = Provider::origin(|_| ok()).await;
    let lessor = start(&provider).await;
    let (own, other) = (lessor.authority(), origin.addr().to_string());
    let with = |more: &[(&'static str, &str)]| {
        let mut fields = vec![(":method", "GET"), (":scheme", "http"), (":path", "/openai/v1/models")];
        fields.extend(more);
        frame_of(&fields)
    };
    let refused = [
        with(&[(":authority", &own), (":authority", &other)]),
        with(&[(":authority", &other), (":authority", &own)]),
        with(&[(":authority", &own), (":authority", &own)]),
        with(&[(":authority", &own), ("host", &own), ("host", &other)]),
        with(&[(":authority", &own), ("host", &other)]),
        with(&[(":authority", &other), ("host", &own)]),
        with(&[("host", &own), (":authority", &own)]),
        with(&[]),
    ];
    for bytes in refused {
        let mut raw = lessor.raw().await;
        raw.write(&bytes).await;
        let (kind, payload) = answer_to(&mut raw).await;
        assert!(kind != HEADERS || payload[0] != OK, "served: {bytes:?}");
    }
    let mut raw = lessor.raw().await;
    raw.write(with(&[(":authority", &own), ("host", &own)])).await;
    let (kind, payload) = answer_to(&mut raw).await;
    assert_eq!((kind, payload[0]), (HEADERS, OK), "the frames are good ones");
    assert_eq!(provider.request(1).await.key(), "sk-a");
    assert_eq!((provider.count(), origin.count()), (1, 0));
    lessor.is_free_within_a_second("a").await;
}

/// Its machine may be gone without a word: no byte comes back, and the provider is silent, too.
#[tokio::test]
async fn a_client_that_answers_no_ping_loses_its_streams_within_a_minute() {
    let provider = Provider::plain(|_| Play::sse().event("one").silence()).await;
    let lessor = start(&provider).await;
    let mut raw = lessor.raw().await;
    let own = lessor.authority();
    let fields = [(":method", "GET"), (":scheme", "http"), (":path", "/openai/v1/x"), (":authority", &own)];
    raw.write(frame_of(&fields)).await;
    lessor.comes_to_use("a", 1).await;
    eventually_within(Duration::from_secs(60), "its slot is free", async || {
        (lessor.in_use("a").await == 0).then_some(())
    })
    .await;
    eventually("the provider sees the end", async || provider.seen()[0].gone).await;
}

#[tokio::test]
async fn connect_and_trace_are_refused_and_no_websocket_is_offered() {
    let provider = Provider::start(openai).await;
    let lessor = start(&provider).await;
    let h2 = H2::to(&lessor).await;
    h2.ask(Request::new("CONNECT", "api.openai.com:443")).await.is_error(405, "method_denied");
    h2.ask(Request::new("TRACE", "/openai/v1/models")).await.is_error(405, "method_denied");
    let socket = TcpStream::connect(lessor.authority()).await.unwrap();
    let (sender, connection) = h2::client::handshake(socket).await.unwrap();
    let driving = tokio::spawn(connection);
    let sender = within(NEVER, "settings", sender.ready()).await.unwrap();
    let answer = h2.ask(models()).await;
    assert_eq!(answer.status, 200);
    assert!(!sender.is_extended_connect_protocol_enabled());
    driving.abort();
    assert_eq!(provider.count(), 1);
}

#[tokio::test]
async fn an_app_without_its_token_is_refused_as_the_way_in_asks() {
    let provider = Provider::start(openai).await;
    let lessor = Setup::openai(&provider)
        .key(Key::new("a"))
        .set("apps.shop.token", "{ env = \"SHOP\" }")
        .env("SHOP", "shop-token-1234567890")
        .start()
        .await;
    let h2 = H2::to(&lessor).await;
    h2.ask(models()).await.is_error(403, "app_unauthenticated");
    let forward = Request::get("http://api.openai.com/v1/models");
    h2.ask(forward).await.is_error(407, "app_unauthenticated");
    let answer = h2.ask(models().header("authorization", "Bearer shop-token-1234567890")).await;
    assert_eq!(answer.status, 200);
    assert_eq!(provider.keys_seen(), ["sk-a"]);
}

#[tokio::test]
async fn a_stream_that_is_reset_frees_its_slot_in_every_phase_and_others_go_on() {
    let (head, quiet) = (Gate::default(), Gate::default());
    let provider = Provider::start({
        let (head, quiet) = (head.clone(), quiet.clone());
        move |seen| match seen.path() {
            "/v1/head" => Play::new().until(&head).then(ok()),
            "/v1/quiet" => Play::sse().event("one").until(&quiet).done(),
            _ => ok(),
        }
    })
    .await;
    let lessor = Setup::openai(&provider).key(Key::new("a").cap(1)).start().await;
    let h2 = H2::to(&lessor).await;

    // Silent in the middle of a stream.
    let mut stream = h2.open(Request::get("/openai/v1/quiet")).await.unwrap();
    stream.read_to("one").await;
    // In the queue behind it.
    let queued = h2.open(Request::get("/openai/v1/queued"));
    {
        let mut queued = std::pin::pin!(queued);
        tokio::select! {
            _ = &mut queued => panic!("the one slot is taken"),
            () = lessor.comes_to_queue(1) => {}
        }
    }
    lessor.comes_to_queue(0).await;
    assert_eq!(lessor.in_use("a").await, 1);
    drop(stream);
    lessor.is_free_within_a_second("a").await;
    eventually("the provider sees the end", async || provider.seen()[0].gone).await;

    // Before the head.
    {
        let mut waiting = std::pin::pin!(h2.open(Request::get("/openai/v1/head")));
        tokio::select! {
            _ = &mut waiting => panic!("no head was sent"),
            _ = provider.request(2) => {}
        }
    }
    lessor.is_free_within_a_second("a").await;
    eventually("the provider sees the end", async || provider.seen()[1].gone).await;

    assert_eq!(h2.ask(Request::get("/openai/v1/models")).await.status, 200);
}

#[tokio::test]
async fn a_connection_that_closes_ends_all_of_its_streams() {
    let gate = Gate::default();
    let provider = Provider::start({
        let gate = gate.clone();
        move |_| Play::sse().event("one").until(&gate).done()
    })
    .await;
    let lessor = start(&provider).await;
    let h2 = H2::to(&lessor).await;
    let mut streams = join_all((0..5).map(|_| h2.open(models()))).await;
    for stream in &mut streams {
        stream.as_mut().unwrap().read_to("one").await;
    }
    assert_eq!(lessor.in_use("a").await, 5);
    drop(h2);
    lessor.is_free_within_a_second("a").await;
    eventually("all are seen to be gone", async || {
        provider.seen().iter().all(|seen| seen.gone.is_some()).then_some(())
    })
    .await;
}

#[tokio::test]
async fn a_revoked_lease_resets_its_stream_alone_also_where_the_client_takes_nothing() {
    let provider = Provider::start(|seen| match seen.path() {
        "/v1/flood" => Play::new().head(200, &[("content-length", "1000000000")]).flood(1_000_000_000),
        _ => Play::sse().event("one").silence(),
    })
    .await;
    let lessor = start(&provider).await;
    let h2 = H2::to(&lessor).await;
    let mut quiet = h2.open(Request::get("/openai/v1/quiet")).await.unwrap();
    quiet.read_to("one").await;
    let flood = h2.open(Request::get("/openai/v1/flood")).await.unwrap();
    let lease = flood.header("x-lessor-lease").to_owned();
    // Until the client's window and every buffer are full.
    let mut before = 0;
    eventually("the flood stands still", async || {
        tokio::time::sleep(ms(100)).await;
        let flooded = provider.seen().iter().map(|seen| seen.flooded).max().unwrap();
        (flooded > 0 && std::mem::replace(&mut before, flooded) == flooded).then_some(())
    })
    .await;
    let begun = Instant::now();
    lessor.cli(&["leases", "revoke", &lease]).await.ok();
    eventually("the slot is free", async || (lessor.in_use("a").await == 1).then_some(())).await;
    assert!(begun.elapsed() < ms(2000), "{:?}", begun.elapsed());
    assert!(flood.end().await.is_err(), "a cut answer must not look whole");
    let other = h2.open(Request::get("/openai/v1/quiet")).await.unwrap();
    assert_eq!(other.status, 200, "the connection lives on");
    assert!(tokio::time::timeout(ms(100), quiet.next()).await.is_err(), "and so do its other streams");
}

#[tokio::test]
async fn a_client_that_takes_nothing_for_too_long_loses_its_stream() {
    let provider = Provider::start(|seen| match seen.path() {
        "/v1/flood" => Play::new().head(200, &[("content-length", "1000000000")]).flood(1_000_000_000),
        _ => ok(),
    })
    .await;
    let lessor = Setup::openai(&provider).key(Key::new("a")).set("timeouts.idle", "\"1s\"").start().await;
    let h2 = H2::to(&lessor).await;
    let flood = h2.open(Request::get("/openai/v1/flood")).await.unwrap();
    eventually("the slot is free", async || (lessor.in_use("a").await == 0).then_some(())).await;
    assert!(flood.end().await.is_err(), "a cut answer must not look whole");
    assert_eq!(h2.ask(models()).await.status, 200, "the connection lives on");
    assert!(lessor.resident_kib() < 100 << 10, "{} KiB", lessor.resident_kib());
}

#[tokio::test]
async fn an_answer_that_breaks_off_is_a_reset_and_a_whole_one_keeps_its_trailers() {
    let provider = Provider::start(|seen| match seen.path() {
        "/v1/short" => Play::new().head(200, &[("content-length", "10")]).bytes("12345").cut(Cut::Close),
        "/v1/cut" => Play::sse().event("one").cut(Cut::Close),
        _ => Play::sse().event("one").bytes("0\r\nx-sum: 1\r\nauthorization: Bearer sk-a\r\n\r\n"),
    })
    .await;
    let lessor = start(&provider).await;
    let h2 = H2::to(&lessor).await;
    for path in ["/openai/v1/short", "/openai/v1/cut"] {
        // The break comes with the head, and may overtake it: a reset throws away what is not written yet.
        if let Ok(answer) = h2.open(Request::get(path)).await {
            assert_eq!(answer.status, 200);
            assert!(answer.whole().await.is_err(), "{path} must not look whole");
        }
    }
    let answer = h2.ask(Request::get("/openai/v1/whole").header("te", "trailers")).await;
    let trailers = answer.trailers.unwrap();
    assert_eq!(trailers["x-sum"], "1");
    assert!(!trailers.contains_key("authorization"), "{trailers:?}");
    lessor.is_free_within_a_second("a").await;
}

#[tokio::test]
async fn a_body_that_ends_with_an_empty_frame_is_one_request_upstream() {
    let provider = Provider::start(|_| ok()).await;
    let lessor = start(&provider).await;
    let h2 = H2::to(&lessor).await;
    for n in 1..=3 {
        let (sender, body) = fed();
        let feed = async move {
            sender.send("hel".into()).await.unwrap();
            sender.send("lo".into()).await.unwrap();
        };
        let (answer, ()) = tokio::join!(h2.ask(Request::new("POST", "/openai/v1/files").body(body)), feed);
        assert_eq!(answer.status, 200, "{}", answer.text());
        let seen = provider.request(n).await;
        assert_eq!((seen.body.as_slice(), seen.body_complete), (&b"hello"[..], true));
    }
    // Nothing after the heads of these three came that a provider would take for a fourth.
    assert_eq!(provider.count(), 3);
    assert_eq!(provider.seen()[2].connection, 0, "the connection is of further use each time");
    let answer = h2.ask(Request::new("POST", "/openai/v1/files").body(full(""))).await;
    assert_eq!(answer.status, 200);
    assert_eq!(provider.request(4).await.body_len, 0);
}

#[tokio::test]
async fn cookies_that_came_in_crumbs_go_on_as_one() {
    let provider = Provider::start(|_| ok()).await;
    let lessor = start(&provider).await;
    let h2 = H2::to(&lessor).await;
    h2.ask(models().header("cookie", "a=1").header("cookie", "b=2")).await;
    assert_eq!(provider.request(1).await.all("cookie"), ["a=1; b=2"]);
}

#[tokio::test]
async fn a_head_above_the_limits_is_told_so_in_lessors_words() {
    let provider = Provider::start(|_| ok()).await;
    let lessor = Setup::openai(&provider)
        .key(Key::new("a"))
        .set("limits.max_header_bytes", "\"16KiB\"")
        .set("limits.max_headers", "20")
        .start()
        .await;
    let h2 = H2::to(&lessor).await;
    let large = "x".repeat(20 << 10);
    h2.ask(models().header("x-large", &large)).await.is_error(431, "header_too_large");
    let many = (0..21).fold(models(), |request, n| request.header(&format!("x-{n}"), "1"));
    h2.ask(many).await.is_error(431, "header_too_large");
    // Far above them the codec refuses by itself; the connection goes on.
    let huge = "x".repeat(64 << 10);
    let refused = h2.open(models().header("x-large", &huge)).await;
    assert!(refused.map_or(true, |answer| answer.status == 431), "it is not served");
    assert_eq!(provider.count(), 0);
    let fresh = H2::to(&lessor).await;
    assert_eq!(fresh.ask(models().header("x-large", &"x".repeat(8 << 10))).await.status, 200);
}

#[tokio::test]
async fn silent_and_idle_connections_are_closed_and_one_in_use_is_not() {
    let gate = Gate::default();
    let provider = Provider::start({
        let gate = gate.clone();
        move |seen| match seen.path() {
            "/v1/quiet" => Play::sse().event("one").until(&gate).done(),
            _ => ok(),
        }
    })
    .await;
    let lessor = Setup::openai(&provider)
        .key(Key::new("a"))
        .set("timeouts.header", "\"700ms\"")
        .set("timeouts.keep_alive", "\"700ms\"")
        .start()
        .await;
    // Part of the preface, all of it, and settings without a request.
    for opening in [&b"PRI * HT"[..], b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"] {
        let mut raw = lessor.raw().await;
        raw.write(opening).await;
        assert!(raw.closes_within(ms(4000)).await, "{opening:?} holds a connection open");
    }
    H2::to(&lessor).await.ends_within(ms(4000)).await.unwrap();
    // After a request, idle.
    let h2 = H2::to(&lessor).await;
    assert_eq!(h2.ask(models()).await.status, 200);
    h2.ends_within(ms(4000)).await.unwrap();
    // In use for longer than all that.
    let h2 = H2::to(&lessor).await;
    let mut stream = h2.open(Request::get("/openai/v1/quiet")).await.unwrap();
    stream.read_to("one").await;
    tokio::time::sleep(ms(2000)).await;
    gate.open();
    stream.read_to("[DONE]").await;
}

#[tokio::test]
async fn a_drain_lets_streams_end_and_takes_no_new_ones() {
    let gate = Gate::default();
    let provider = Provider::start({
        let gate = gate.clone();
        move |_| Play::sse().event("one").until(&gate).done()
    })
    .await;
    let mut lessor = start(&provider).await;
    let idle = H2::to(&lessor).await;
    let h2 = H2::to(&lessor).await;
    let mut stream = h2.open(models()).await.unwrap();
    stream.read_to("one").await;
    lessor.sigterm();
    idle.ends_within(ms(4000)).await.unwrap();
    eventually("new streams are refused", async || h2.open(models()).await.is_err().then_some(())).await;
    gate.open();
    stream.read_to("[DONE]").await;
    stream.whole().await.unwrap();
    h2.ends_within(NEVER).await.unwrap();
    assert!(lessor.ends_within(NEVER).await.success());
    assert_eq!(provider.count(), 1);
}

#[tokio::test]
async fn a_drain_does_not_wait_for_a_client_that_answers_no_ping() {
    let provider = Provider::start(|_| ok()).await;
    let mut lessor = start(&provider).await;
    // Preface and settings, one request (HEADERS with END_STREAM), and then nothing is ever said again.
    let mut raw = lessor.raw().await;
    raw.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00").await;
    let host = lessor.authority();
    let mut block = vec![0x82, 0x86, 0x04, "/openai/v1/models".len() as u8];
    block.extend_from_slice(b"/openai/v1/models");
    block.extend_from_slice(&[0x01, host.len() as u8]);
    block.extend_from_slice(host.as_bytes());
    let mut frame = vec![0, 0, block.len() as u8, 0x01, 0x05, 0, 0, 0, 1];
    frame.extend_from_slice(&block);
    raw.write(frame).await;
    provider.request(1).await;
    lessor.is_free_within_a_second("a").await;
    let begun = Instant::now();
    lessor.sigterm();
    assert!(lessor.ends_within(NEVER).await.success());
    assert!(begun.elapsed() < ms(8000), "it waited {:?} for a client that is silent", begun.elapsed());
}

#[tokio::test]
async fn thousands_of_cancelled_streams_leave_nothing_behind() {
    let provider = Provider::plain(|_| Play::new().silence()).await;
    let lessor =
        Setup::openai(&provider).key(Key::new("a").cap(64)).set("queue.max_wait", "\"100ms\"").start().await;
    let mut served = 0;
    let mut h2 = H2::to(&lessor).await;
    for _ in 0..50 {
        let batch = join_all((0..100).map(|_| tokio::time::timeout(ms(20), h2.open(models())))).await;
        // A connection that resets too much may be ended; its client begins another.
        if batch.iter().any(|done| matches!(done, Ok(Err(_)))) {
            h2 = H2::to(&lessor).await;
        }
        served += batch.len();
    }
    assert_eq!(served, 5000);
    lessor.is_free_within_a_second("a").await;
    lessor.comes_to_queue(0).await;
    eventually("the provider is left alone", async || (provider.open() == 0).then_some(())).await;
    assert!(lessor.resident_kib() < 150 << 10, "{} KiB", lessor.resident_kib());
}

#[tokio::test]
async fn an_upload_that_waits_for_a_key_does_not_hold_up_another_on_its_connection() {
    let provider = Provider::start(|seen| match seen.path() {
        "/v1/hold" => Play::sse().event("one").silence(),
        _ => ok(),
    })
    .await;
    let lessor = Setup::openai(&provider)
        .provider("anthropic", &provider)
        .set("providers.anthropic.inject", "{ header = \"authorization\", format = \"Bearer {secret}\" }")
        .key(Key::new("a").cap(1))
        .key(Key::new("b").of("anthropic"))
        .set("retry.max_body", "\"64KiB\"")
        .start()
        .await;
    let h2 = H2::to(&lessor).await;
    let mut held = h2.open(Request::get("/openai/v1/hold")).await.unwrap();
    held.read_to("one").await;
    let waits = |_| {
        let large = Request::new("POST", "/openai/v1/files").header("x-lessor-max-wait", "30s");
        h2.open(large.body(patterned(8 << 20)))
    };
    let mut waiting = std::pin::pin!(join_all((0..20).map(waits)));
    let other = async {
        lessor.comes_to_queue(20).await;
        h2.ask(Request::new("POST", "/anthropic/v1/files").body(patterned(8 << 20))).await
    };
    let answer = tokio::select! {
        _ = &mut waiting => panic!("the one slot is taken"),
        answer = within(NEVER, "the other upload", other) => answer,
    };
    assert_eq!(answer.status, 200, "{}", answer.text());
    let seen = provider.seen().into_iter().find(|seen| seen.body_len > 0).unwrap();
    assert_eq!((seen.body_len, seen.body_is_pattern), (8 << 20, true));
}

#[tokio::test]
async fn no_more_streams_are_open_at_once_than_the_limit() {
    let gate = Gate::default();
    let provider = Provider::start({
        let gate = gate.clone();
        move |seen| if seen.number == 0 { ok() } else { Play::new().until(&gate).then(ok()) }
    })
    .await;
    let lessor =
        Setup::openai(&provider).key(Key::new("a").cap(64)).set("limits.max_streams", "3").start().await;
    let h2 = H2::to(&lessor).await;
    // By then the client knows the limit.
    assert_eq!(h2.ask(models()).await.status, 200);
    let mut all = std::pin::pin!(join_all((0..10).map(|_| h2.ask(models()))));
    tokio::select! {
        _ = &mut all => panic!("nothing was answered yet"),
        () = async {
            provider.request(4).await;
            tokio::time::sleep(ms(300)).await;
        } => {}
    }
    assert_eq!(provider.count(), 4);
    gate.open();
    assert!(all.await.iter().all(|answer| answer.status == 200));
}

#[tokio::test]
async fn garbage_after_the_preface_ends_the_connection_and_nothing_else() {
    let provider = Provider::start(|_| ok()).await;
    let lessor = start(&provider).await;
    let preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec();
    let garbage: [&[u8]; 5] = [
        b"GET / HTTP/1.1\r\n\r\n",
        &[0xff; 64],
        &[0, 0, 4, 1, 4, 0, 0, 0, 0, 1, 2, 3, 4],
        &[0, 0, 0, 4, 1, 0, 0, 0, 0, 0, 0, 0, 4, 1, 0, 0, 0, 0],
        b"",
    ];
    for bytes in garbage {
        let mut raw = lessor.raw().await;
        raw.write([&preface[..], bytes].concat()).await;
        raw.0.shutdown().await.unwrap();
        assert!(raw.closes_within(NEVER).await, "{bytes:?}");
    }
    assert_eq!(provider.count(), 0);
    assert_eq!(lessor.get("/openai/v1/models").await.status, 200);
}

#[tokio::test]
async fn curl_speaks_it_by_prior_knowledge_and_through_the_proxy() {
    let provider = Provider::start(openai).await;
    let lessor = start(&provider).await;
    let version = "%{http_version} %{http_code}";
    let base = format!("{}/openai/v1/models", lessor.url());
    let ran = run(curl(&["-sS", "--http2-prior-knowledge", "-w", version, "-o", "/dev/null", &base])).await;
    assert_eq!(ran.ok(), "2 200");
    let ca = lessor.admin_socket().with_extension("ca.pem").display().to_string();
    let url = "https://api.openai.com/v1/models";
    let proxied =
        ["-sS", "--http2", "-x", &lessor.url(), "--cacert", &ca, "-w", version, "-o", "/dev/null", url];
    assert_eq!(run(curl(&proxied)).await.ok(), "2 200");
    let up = "x".repeat(2 << 20);
    let file = lessor.home().path().join("up");
    std::fs::write(&file, &up).unwrap();
    let file = format!("@{}", file.display());
    let post =
        ["-sS", "--http2-prior-knowledge", "-w", version, "-o", "/dev/null", "--data-binary", &file, &base];
    assert_eq!(run(curl(&post)).await.ok(), "2 200");
    assert_eq!(provider.request(3).await.body_len, 2 << 20);
}

#[tokio::test]
async fn a_base_url_under_another_name_is_not_passed_on_to_whoever_has_that_name() {
    let provider = Provider::start(openai).await;
    let origin = Provider::origin(|_| ok()).await;
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("proxy.sock");
    let listen = format!("[\"127.0.0.1:0\", \"unix:{}\"]", path.display());
    let lessor = Setup::openai(&provider).key(Key::new("a")).set("listen.proxy", &listen).start().await;
    let named = |target: &str| Request::get(&format!("http://127.0.0.2:{}{target}", origin.addr().port()));
    let h2 = H2::to(&lessor).await;
    // 127.0.0.2 is loopback, and so a name of this machine's; another's is refused with the line to add.
    let foreign = h2.ask(Request::get("http://lessor.internal/openai/v1/models")).await;
    foreign.is_error(403, "origin_denied");
    assert!(foreign.text().contains("listen.hosts"), "{}", foreign.text());
    // Over a Unix socket any name will do, as with HTTP/1.1.
    let socket = tokio::net::UnixStream::connect(&path).await.unwrap();
    let h2 = H2::over(socket, "http://lessor.internal").await;
    let answer = h2.ask(Request::get("/openai/v1/models")).await;
    assert_eq!((answer.status, answer.header("x-lessor-key")), (200, "a"), "{}", answer.text());
    let answer = h2.ask(named("/openai/v1/models")).await;
    assert_eq!((answer.status, answer.header("x-lessor-key")), (200, "a"), "{}", answer.text());
    assert_eq!(origin.count(), 0);
}

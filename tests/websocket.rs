//! WebSockets through lessor, in all ways in, from their handshake to their end.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::pedantic, missing_docs, unreachable_pub)]

mod support;

use support::plays::{openai, rate_limited};
use support::socket::{
    BINARY, Far, Frame, KEY, Peer, REALTIME, accept, ask, ask_inside, ask_over, handshake, open, open_with,
};
use support::{Key, Lessor, Provider, eventually, tunnel};

async fn start(far: &Far) -> Lessor {
    far.setup().key(Key::new("a").cap(1)).start().await
}

/// Bytes go both ways, whole.
async fn talk(near: &mut Peer, far: &mut Peer) {
    near.send(Frame::text("Hello").masked()).await;
    assert_eq!(far.frame().await, Frame::text("Hello").masked());
    far.send(Frame::new(BINARY, [0, 1, 2])).await;
    assert_eq!(near.frame().await, Frame::new(BINARY, [0, 1, 2]));
}

fn assert_handed_on(provider: &Peer, target: &str) {
    assert!(provider.head.starts_with(&format!("GET {target} HTTP/1.1\r\n")), "{}", provider.head);
    assert_eq!(provider.headers("authorization"), ["Bearer sk-a"], "{}", provider.head);
    assert_eq!(provider.headers("upgrade"), ["websocket"], "{}", provider.head);
    assert_eq!(provider.headers("connection"), ["Upgrade"], "{}", provider.head);
    assert_eq!(provider.headers("sec-websocket-key"), [KEY], "{}", provider.head);
    assert_eq!(provider.headers("sec-websocket-version"), ["13"], "{}", provider.head);
}

#[tokio::test]
async fn a_socket_opens_by_base_url_with_a_leased_key() {
    for mut far in [Far::plain().await, Far::tls().await] {
        let lessor = start(&far).await;
        let (mut near, mut provider) =
            open_with(&lessor, &mut far, "Authorization: Bearer placeholder\r\n", "").await;
        assert_handed_on(&provider, "/v1/realtime?model=gpt-realtime");
        assert_eq!(near.header("sec-websocket-accept"), accept(KEY));
        assert_eq!(near.headers("upgrade"), ["websocket"]);
        assert_eq!(near.headers("connection"), ["Upgrade"]);
        assert_eq!((near.header("x-lessor-key"), near.header("x-lessor-attempts")), ("a", "1"));
        talk(&mut near, &mut provider).await;
        assert_eq!(lessor.in_use("a").await, 1);
        provider.send(Frame::close(1000, "bye")).await;
        provider.close().await;
        assert_eq!(near.rest().await, (Frame::close(1000, "bye").bytes(), true));
        lessor.is_free_within_a_second("a").await;
    }
}

#[tokio::test]
async fn a_socket_opens_by_absolute_form_and_to_lessor_itself_in_absolute_form() {
    let mut far = Far::tls().await;
    let lessor = start(&far).await;
    for (target, host) in [
        ("http://api.openai.com/v1/realtime?x=%2f".to_owned(), "api.openai.com".to_owned()),
        (format!("http://{}/openai/v1/realtime?x=%2f", lessor.authority()), lessor.authority()),
    ] {
        let near = ask_over(lessor.raw().await.0, &handshake(&target, &host, "")).await;
        let mut provider = far.agreed().await;
        let mut near = near.answered().await;
        assert_eq!(near.status(), 101, "{}", near.head);
        assert_handed_on(&provider, "/v1/realtime?x=%2f");
        talk(&mut near, &mut provider).await;
        near.close().await;
        lessor.is_free_within_a_second("a").await;
    }
}

#[tokio::test]
async fn a_socket_opens_inside_a_connect_in_tls_and_in_the_clear() {
    let mut far = Far::plain().await;
    let lessor = start(&far).await;
    let asks = handshake("/v1/realtime", "api.openai.com", "Origin: https://app.example\r\n");
    for port in [443, 80] {
        let raw = tunnel::connect(&lessor, &format!("api.openai.com:{port}")).await;
        let near = if port == 443 {
            ask_inside(tunnel::tls(&lessor, raw, "api.openai.com").await.unwrap(), &asks).await
        } else {
            ask_over(raw.0, &asks).await
        };
        let mut provider = far.agreed().await;
        let mut near = near.answered().await;
        assert_eq!(near.status(), 101, "{}", near.head);
        assert_handed_on(&provider, "/v1/realtime");
        assert_eq!(provider.header("origin"), "https://app.example");
        talk(&mut near, &mut provider).await;
        provider.send(Frame::close(1000, "")).await;
        provider.close().await;
        assert_eq!(near.rest().await, (Frame::close(1000, "").bytes(), true));
        lessor.is_free_within_a_second("a").await;
    }
    eventually("they are counted once, at their end", async || {
        let name = "lessor_requests_total{provider=\"openai\",mode=\"connect\",outcome=\"success\"}";
        (lessor.metric(name).await as u32 == 2).then_some(())
    })
    .await;
}

#[tokio::test]
async fn to_a_host_that_is_no_providers_a_socket_goes_as_it_is_and_leases_nothing() {
    let (far, mut other) = (Far::plain().await, Far::plain().await);
    let lessor = start(&far).await;
    let host = format!("127.0.0.1:{}", other.port());
    let lines = "Authorization: Bearer mine\r\nSec-WebSocket-Protocol: openai-insecure-api-key.mine, v1\r\n";
    let asks = handshake(&format!("http://{host}/chat?key=mine"), &host, lines);
    let near = ask_over(lessor.raw().await.0, &asks).await;
    let mut peer = other.agreed().await;
    let mut near = near.answered().await;
    assert_eq!((near.status(), near.header("x-lessor-key")), (101, ""), "{}", near.head);
    assert!(peer.head.starts_with("GET /chat?key=mine HTTP/1.1\r\n"), "{}", peer.head);
    assert_eq!(peer.headers("authorization"), ["Bearer mine"]);
    assert_eq!(peer.headers("sec-websocket-protocol"), ["openai-insecure-api-key.mine, v1"]);
    talk(&mut near, &mut peer).await;
    assert_eq!(lessor.in_use("a").await, 0);
    peer.send(Frame::text("sk-a").part()).await;
    peer.close().await;
    assert_eq!(near.rest().await, (Frame::text("sk-a").part().bytes(), true));
}

#[tokio::test]
async fn a_handshake_that_is_not_whole_is_400_and_says_what_is_missing() {
    let mut far = Far::plain().await;
    let lessor = start(&far).await;
    let whole = handshake(REALTIME, &lessor.authority(), "");
    for (from, to, says) in [
        ("Connection: keep-alive, Upgrade\r\n", "", "Connection does not list `upgrade`"),
        ("Sec-WebSocket-Version: 13\r\n", "", "sec-websocket-version is missing"),
        (
            "Sec-WebSocket-Version: 13\r\n",
            "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Version: 8\r\n",
            "twice",
        ),
        ("Sec-WebSocket-Key:", "X-Key:", "sec-websocket-key is missing"),
        ("GET ", "POST ", "GET"),
        ("\r\n\r\n", "\r\nContent-Length: 5\r\n\r\nhello", "no body"),
        ("\r\n\r\n", "\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", "no body"),
        (" HTTP/1.1", " HTTP/1.0", "HTTP/1.1"),
    ] {
        assert!(whole.contains(from), "{from:?}");
        let mut raw = lessor.raw().await;
        raw.write(whole.replacen(from, to, 1)).await;
        let (status, said) = raw.answer().await;
        assert!(status == 400 && said.contains(says), "{from:?} to {to:?}: {said}");
        assert!(said.contains("x-lessor-error: bad_request\r\n"), "{said}");
        assert!(raw.closes_within(support::NEVER).await);
    }
    assert!(far.has_none());
    assert_eq!(lessor.in_use("a").await, 0);
}

#[tokio::test]
async fn another_version_goes_to_the_provider_whose_426_comes_back_and_frees_the_key() {
    let mut far = Far::plain().await;
    let lessor = start(&far).await;
    let asks = handshake(REALTIME, &lessor.authority(), "").replace("Version: 13", "Version: 8");
    let near = ask_over(lessor.raw().await.0, &asks).await;
    let mut provider = far.request().await;
    assert_eq!(provider.header("sec-websocket-version"), "8");
    let refusal =
        "HTTP/1.1 426 Upgrade Required\r\nSec-WebSocket-Version: 13\r\nContent-Length: 3\r\n\r\nno!";
    provider.write(refusal).await;
    let mut near = near.answered().await;
    assert_eq!((near.status(), near.header("sec-websocket-version")), (426, "13"), "{}", near.head);
    assert_eq!(near.read_exact(3).await, b"no!");
    lessor.is_free_within_a_second("a").await;
}

#[tokio::test]
async fn a_socket_that_a_provider_refuses_to_one_key_opens_with_another() {
    let mut far = Far::plain().await;
    let setup = far.setup().key(Key::new("a")).key(Key::new("b")).set("ranking.strategy", "\"fill_first\"");
    let lessor = setup.start().await;
    let near = ask(&lessor, REALTIME, "").await;
    let mut first = far.request().await;
    assert_eq!(first.header("authorization"), "Bearer sk-a");
    let body = r#"{"error":{"code":"rate_limit_exceeded","message":"Rate limit reached"}}"#;
    first
        .write(format!(
            "HTTP/1.1 429 Too Many Requests\r\nRetry-After: 30\r\nConnection: close\r\nContent-Type: application/json\r\n\
             Content-Length: {}\r\n\r\n{body}",
            body.len()
        ))
        .await;
    let mut second = far.agreed().await;
    let mut near = near.answered().await;
    assert_handed_on_as(&second, "sk-b");
    assert_eq!((near.header("x-lessor-key"), near.header("x-lessor-attempts")), ("b", "2"), "{}", near.head);
    talk(&mut near, &mut second).await;
    // The address names the model, whose limit it was.
    let key = lessor.key("a").await;
    assert_eq!(
        (&key["status"], key["cooldowns"].as_array().unwrap().len()),
        (&"available".into(), 1),
        "{key}"
    );
    assert!(key["cooldowns"][0]["subject"].as_str().unwrap().starts_with("a|gpt-"), "{key}");
}

fn assert_handed_on_as(provider: &Peer, secret: &str) {
    assert_eq!(provider.headers("authorization"), [format!("Bearer {secret}")]);
    assert_eq!((provider.header("upgrade"), provider.header("connection")), ("websocket", "Upgrade"));
}

#[tokio::test]
async fn where_no_key_is_left_the_providers_refusal_comes_back_whole() {
    let provider = Provider::plain(|_| rate_limited("30")).await;
    let lessor = support::Setup::openai(&provider).key(Key::new("a")).start().await;
    let mut near = ask(&lessor, REALTIME, "").await.answered().await;
    assert_eq!((near.status(), near.header("x-request-id")), (429, "req-429"), "{}", near.head);
    let length = near.header("content-length").parse().unwrap();
    assert!(String::from_utf8(near.read_exact(length).await).unwrap().contains("rate_limit_exceeded"));
    assert_eq!(provider.seen()[0].header("upgrade"), "websocket");
}

#[tokio::test]
async fn a_101_that_was_not_asked_for_or_is_to_something_else_is_502() {
    let mut far = Far::plain().await;
    let lessor = start(&far).await;
    let models = format!("GET /openai/v1/models HTTP/1.1\r\nHost: {}\r\n\r\n", lessor.authority());
    let asked = handshake(REALTIME, &lessor.authority(), "");
    for (request, upgrade) in [
        (&models, "Upgrade: websocket\r\n"),
        (&asked, "Upgrade: h2c\r\n"),
        (&asked, "Upgrade: websocket, h2c\r\n"),
        (&asked, ""),
    ] {
        let near = ask_over(lessor.raw().await.0, request).await;
        let mut provider = far.request().await;
        provider
            .write(format!("HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\n{upgrade}\r\nraw"))
            .await;
        let near = near.answered().await;
        assert_eq!(
            (near.status(), near.header("x-lessor-error")),
            (502, "upstream_unreachable"),
            "{upgrade:?}: {}",
            near.head
        );
        lessor.is_free_within_a_second("a").await;
        assert!(!provider.rest().await.0.starts_with(b"GET"), "it is not asked again");
    }
}

#[tokio::test]
async fn what_lies_behind_a_handshake_is_a_next_request_unless_the_provider_agreed() {
    let mut far = Far::plain().await;
    let lessor = start(&far).await;
    let host = lessor.authority();
    let smuggled = format!("GET /openai/v1/models?smuggled HTTP/1.1\r\nHost: {host}\r\n\r\n");
    let near = ask_over(lessor.raw().await.0, &(handshake(REALTIME, &host, "") + &smuggled)).await;
    let mut first = far.request().await;
    first.write("HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok").await;
    let mut near = near.answered().await;
    assert_eq!(near.status(), 200, "{}", near.head);
    assert_eq!(near.read_exact(2).await, b"ok");
    // As a request of its own, with a key of its own, and never as it is.
    let mut second = far.request().await;
    assert!(second.head.starts_with("GET /v1/models?smuggled "), "{}", second.head);
    assert_eq!(second.headers("authorization"), ["Bearer sk-a"]);
    assert_eq!(first.rest().await.0, b"");
    second.write("HTTP/1.1 204 No Content\r\n\r\n").await;
    assert_eq!(near.answered().await.status(), 204);
}

#[tokio::test]
async fn no_byte_reaches_the_provider_before_it_agreed_and_none_is_lost_then() {
    let mut far = Far::plain().await;
    let lessor = start(&far).await;
    let early = Frame::text("early").masked().bytes();
    let head = handshake(REALTIME, &lessor.authority(), "");
    let mut near = ask_over(lessor.raw().await.0, &head).await;
    near.write(&early).await;
    let mut provider = far.request().await;
    provider.finds_nothing().await;
    // The first frame comes in one piece with the answer.
    let accept = accept(KEY);
    let answer = format!(
        "HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\
         Sec-WebSocket-Accept: {accept}\r\n\r\n"
    );
    provider.write([answer.as_bytes(), &Frame::text("first").bytes()].concat()).await;
    assert_eq!(provider.frame().await, Frame::text("early").masked());
    let mut near = near.answered().await;
    assert_eq!(near.frame().await, Frame::text("first"));
}

#[tokio::test]
async fn a_key_among_the_subprotocols_is_taken_out_and_the_others_stay_byte_for_byte() {
    let mut far = Far::plain().await;
    let setup = far.setup().set("providers.openai.subprotocols", "[\"openai-insecure-api-key.\", \"mine.\"]");
    let lessor = setup.key(Key::new("a").cap(1)).start().await;
    let lines = "Sec-WebSocket-Protocol: realtime, openai-insecure-api-key.placeholder,  openai-beta.realtime-v1\r\n\
                 Sec-WebSocket-Protocol: xai-client-secret.x, MINE.y\r\nSec-WebSocket-Protocol: last,one\r\n";
    let (near, provider) = open_with(&lessor, &mut far, lines, "Sec-WebSocket-Protocol: chosen\r\n").await;
    assert_eq!(
        provider.headers("sec-websocket-protocol"),
        ["realtime,  openai-beta.realtime-v1", "last,one"],
        "{}",
        provider.head
    );
    assert_handed_on_as(&provider, "sk-a");
    // What the provider chose is the client's to judge.
    assert_eq!(near.header("sec-websocket-protocol"), "chosen");
}

#[tokio::test]
async fn a_subprotocol_that_keep_names_stays_where_it_is() {
    let mut far = Far::plain().await;
    let setup = far.setup().set("providers.openai.keep", "[\"openai-insecure-api-key.\"]");
    let lessor = setup.key(Key::new("a").cap(1)).start().await;
    let lines = "Sec-WebSocket-Protocol: realtime, openai-insecure-api-key.ek_mine, xai-client-secret.x\r\n";
    let (_near, provider) = open_with(&lessor, &mut far, lines, "").await;
    let kept = ["realtime, openai-insecure-api-key.ek_mine"];
    assert_eq!(provider.headers("sec-websocket-protocol"), kept, "{}", provider.head);
}

#[tokio::test]
async fn an_app_is_known_by_its_token_among_the_subprotocols_which_goes_no_further() {
    let mut far = Far::plain().await;
    let mut other = Far::plain().await;
    let setup = far.setup().set("apps.shop.token", "{ env = \"TOKEN\" }").env("TOKEN", "token-of-shop");
    let setup = setup.set("providers.openai.keep", "[\"openai-insecure-api-key.\"]");
    let lessor = setup.key(Key::new("a").cap(1)).start().await;
    let line = |token: &str| format!("Sec-WebSocket-Protocol: realtime, openai-insecure-api-key.{token}\r\n");
    let (near, provider) = open_with(&lessor, &mut far, &line("token-of-shop"), "").await;
    assert_eq!(provider.headers("sec-websocket-protocol"), ["realtime"], "{}", provider.head);
    near.close().await;
    eventually("the log names the app", async || {
        let lines = lessor.log_lines();
        lines.iter().any(|line| support::lessor::field(line, "app") == "shop").then_some(())
    })
    .await;
    for lines in [line("token-of-another"), String::new()] {
        let near = ask(&lessor, REALTIME, &lines).await.answered().await;
        assert_eq!((near.status(), near.header("x-lessor-error")), (403, "app_unauthenticated"));
    }
    // Nor does it go to another host, where a proxy password let the app in.
    let host = format!("127.0.0.1:{}", other.port());
    let lines = format!("{}Proxy-Authorization: Bearer token-of-shop\r\n", line("token-of-shop"));
    let asks = handshake(&format!("http://{host}/chat"), &host, &lines);
    let _near = ask_over(lessor.raw().await.0, &asks).await;
    let peer = other.request().await;
    assert_eq!(peer.headers("sec-websocket-protocol"), ["realtime"], "{}", peer.head);
    assert!(!peer.head.contains("token-of-shop"), "{}", peer.head);
}

#[tokio::test]
async fn a_web_page_elsewhere_opens_no_socket_unless_its_origin_is_allowed() {
    let mut far = Far::plain().await;
    let setup = far.setup().set("listen.allow_origins", "[\"https://good.example\"]");
    let lessor = setup.key(Key::new("a").cap(1)).start().await;
    for lines in ["Origin: https://evil.example\r\n", "Origin: null\r\n", "Sec-Fetch-Site: cross-site\r\n"] {
        let near = ask(&lessor, REALTIME, lines).await.answered().await;
        assert_eq!((near.status(), near.header("x-lessor-error")), (403, "origin_denied"), "{lines}");
    }
    assert!(far.has_none());
    let (_near, provider) = open_with(&lessor, &mut far, "Origin: https://good.example\r\n", "").await;
    assert_eq!(provider.header("origin"), "https://good.example");
}

#[tokio::test]
async fn with_sockets_open_other_requests_go_on_and_the_connection_is_not_reused() {
    let provider = Provider::plain(openai).await;
    let mut far = Far::plain().await;
    let url = format!("\"http://localhost:{}\"", far.port());
    let setup = support::Setup::openai(&provider).set("providers.xai.base_url", &url);
    let lessor = setup.key(Key::new("a")).key(Key::new("x").of("xai")).start().await;
    let near = ask(&lessor, "/xai/v1/realtime", "").await;
    let mut peer = far.agreed().await;
    let mut near = near.answered().await;
    assert_eq!(lessor.get("/openai/v1/models").await.status, 200);
    // A second request to that provider comes on a connection of its own.
    let second = ask(&lessor, "/xai/v1/models", "").await;
    let mut another = far.agreed().await;
    assert!(another.head.starts_with("GET /v1/models "), "{}", another.head);
    let mut second = second.answered().await;
    talk(&mut near, &mut peer).await;
    talk(&mut second, &mut another).await;
}

#[tokio::test]
async fn over_a_unix_socket_too() {
    let mut far = Far::plain().await;
    let dir = tempfile::tempdir().unwrap();
    let listen = format!("\"unix:{}\"", dir.path().join("proxy.sock").display());
    let lessor = far.setup().key(Key::new("a").cap(1)).set("listen.proxy", &listen).start().await;
    let support::Door::Unix(path) = lessor.door().clone() else { panic!("a Unix door") };
    let socket = tokio::net::UnixStream::connect(path).await.unwrap();
    let near = support::socket::ask_unix(socket, &handshake(REALTIME, "localhost", "")).await;
    let mut provider = far.agreed().await;
    let mut near = near.answered().await;
    talk(&mut near, &mut provider).await;
    drop(near);
    lessor.is_free_within_a_second("a").await;
    assert!(provider.rest().await.0.is_empty());
}

#[tokio::test]
async fn two_sockets_share_a_key_of_cap_two() {
    let mut far = Far::plain().await;
    let lessor = far.setup().key(Key::new("a").cap(2)).start().await;
    let (_one, _far_one) = open(&lessor, &mut far).await;
    let (_two, _far_two) = open(&lessor, &mut far).await;
    assert_eq!(lessor.in_use("a").await, 2);
}

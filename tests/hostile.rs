//! What hostile clients tried: heads hidden behind others, targets that are none, uploads nobody takes.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::pedantic, missing_docs, unreachable_pub)]

mod support;

use support::client::fed;
use support::plays::openai;
use support::provider::{Manners, ok};
use support::socket::{REALTIME, ask};
use support::{Gate, Key, Play, Provider, Request, Setup, ms};

#[tokio::test]
async fn a_doubtful_head_hidden_behind_another_request_is_not_repaired() {
    let provider = Provider::plain(openai).await;
    let lessor = Setup::openai(&provider).key(Key::new("a")).start().await;
    let host = lessor.authority();
    for lengths in
        ["Transfer-Encoding: chunked\r\nContent-Length: 5", "Content-Length: 5\r\nTransfer-Encoding: chunked"]
    {
        let before = provider.count();
        let mut raw = lessor.raw().await;
        raw.write(format!(
            "GET /openai/v1/models HTTP/1.1\r\nHost: {host}\r\n\r\n\
             POST /openai/v1/files HTTP/1.1\r\nHost: {host}\r\n{lengths}\r\n\r\n0\r\n\r\n"
        ))
        .await;
        let said = raw.rest().await;
        assert!(said.starts_with("HTTP/1.1 200 "), "{said}");
        assert!(said.contains("HTTP/1.1 400 ") && said.contains("x-lessor-error: bad_request"), "{said}");
        assert_eq!(provider.count(), before + 1, "the second request reached the provider");
    }
}

/// Part of the head lies in the HTTP library's buffer by the time it is looked at.
#[tokio::test]
async fn a_doubtful_head_that_began_while_another_request_was_served_is_not_repaired() {
    for lengths in
        ["Transfer-Encoding: chunked\r\nContent-Length: 5", "Content-Length: 5\r\nTransfer-Encoding: chunked"]
    {
        let gate = Gate::default();
        let held = gate.clone();
        let provider = Provider::plain(move |_| Play::new().until(&held).then(ok())).await;
        let lessor = Setup::openai(&provider).key(Key::new("a")).start().await;
        let host = lessor.authority();
        let mut raw = lessor.raw().await;
        raw.write(format!("GET /openai/v1/models HTTP/1.1\r\nHost: {host}\r\n\r\n")).await;
        provider.request(1).await;
        raw.write(format!("POST /openai/v1/files HTTP/1.1\r\nHost: {host}\r\n{lengths}\r\n")).await;
        // Whenever it is read, it is refused; here it is read meanwhile.
        tokio::time::sleep(ms(100)).await;
        gate.open();
        assert_eq!(raw.answer().await.0, 200);
        raw.write("X-Mine: 1\r\n\r\n0\r\n\r\n").await;
        let (status, said) = raw.answer().await;
        assert!(status == 400 && said.contains("x-lessor-error: bad_request"), "{said}");
        assert_eq!(provider.count(), 1, "the second request reached the provider");
    }
}

#[tokio::test]
async fn a_malformed_head_behind_another_request_is_answered_in_lessors_words() {
    let provider = Provider::plain(openai).await;
    let lessor = Setup::openai(&provider).key(Key::new("a")).start().await;
    let host = lessor.authority();
    let mut raw = lessor.raw().await;
    raw.write(format!(
        "GET /openai/v1/models HTTP/1.1\r\nHost: {host}\r\n\r\nGET / HTTP/1.1\r\nbad name: 1\r\n\r\n"
    ))
    .await;
    let said = raw.rest().await;
    assert!(said.contains("HTTP/1.1 400 ") && said.contains("x-lessor-error: bad_request"), "{said}");
}

#[tokio::test]
async fn a_target_with_a_port_or_scheme_that_is_none_is_400_and_gets_no_key() {
    let provider = Provider::plain(|_| ok()).await;
    let lessor = Setup::openai(&provider).key(Key::new("a")).start().await;
    for (target, host) in [
        ("http://127.0.0.1:99999/v1/models", "127.0.0.1"),
        ("http://127.0.0.1:/v1/models", "127.0.0.1"),
        ("http://127.0.0.1:0/v1/models", "127.0.0.1"),
        ("http://:80/v1/models", "127.0.0.1"),
        ("ftp://127.0.0.1/v1/models", "127.0.0.1"),
        ("/openai/v1/models", "evil@127.0.0.1"),
    ] {
        let mut raw = lessor.raw().await;
        raw.write(format!("GET {target} HTTP/1.1\r\nHost: {host}\r\n\r\n")).await;
        let (status, said) = raw.answer().await;
        assert!(matches!(status, 400 | 403), "{target} {host}: {said}");
    }
    assert_eq!(provider.count(), 0);
}

#[tokio::test]
async fn an_upload_that_the_provider_does_not_take_is_bounded_by_body_idle() {
    let gate = Gate::default();
    let held = gate.clone();
    let provider = Provider::builder()
        .plain()
        .manners(Manners::OpenAi)
        .before_body(move |_| Some(Play::new().until(&held).then(ok())))
        .start(|_| ok())
        .await;
    let setup = Setup::openai(&provider).key(Key::new("a").cap(1)).set("timeouts.body_idle", "\"1s\"");
    let lessor = setup.start().await;
    let (feed, body) = fed();
    let request = Request::new("POST", "/openai/v1/files").body(body);
    let part = support::pattern().slice(..128 * 1024);
    let feeding = async {
        // Feeds until nothing is taken any more.
        while tokio::time::timeout(ms(400), feed.send(part.clone())).await.is_ok_and(|sent| sent.is_ok()) {}
    };
    let (answer, ()) = tokio::join!(lessor.try_open(request), feeding);
    if let Ok(answer) = answer {
        assert_eq!((answer.status, answer.header("x-lessor-error")), (504, "upstream_timeout"));
    }
    lessor.is_free_within_a_second("a").await;
    gate.open();
}

#[tokio::test]
async fn a_body_of_tiny_chunks_takes_no_memory_out_of_proportion() {
    let gate = Gate::default();
    let held = gate.clone();
    let provider = Provider::plain(move |_| Play::new().until(&held).then(ok())).await;
    let lessor = std::sync::Arc::new(Setup::openai(&provider).key(Key::new("a").cap(1)).start().await);
    let first = std::sync::Arc::clone(&lessor);
    let holding = tokio::spawn(async move { first.get("/openai/v1/models").await });
    provider.request(1).await;
    let before = lessor.resident_kib();
    let mut raw = lessor.raw().await;
    let host = lessor.authority();
    raw.write(format!(
        "POST /openai/v1/files HTTP/1.1\r\nHost: {host}\r\nTransfer-Encoding: chunked\r\n\r\n"
    ))
    .await;
    let chunks = "1\r\nx\r\n".repeat(20_000);
    for _ in 0..50 {
        // A million chunks; beyond its bounds lessor stops reading on, and the write stands still.
        if tokio::time::timeout(ms(500), raw.write(&chunks)).await.is_err() {
            break;
        }
    }
    let grown = lessor.resident_kib().saturating_sub(before);
    assert!(grown < 48 * 1024, "{grown} KiB more for a megabyte of body");
    drop(raw);
    gate.open();
    assert_eq!(holding.await.unwrap().status, 200);
}

#[tokio::test]
async fn a_client_hears_what_was_too_much_in_its_providers_answer() {
    let provider = Provider::plain(|seen| match seen.header("x-case") {
        "lines" => Play::whole(429, &vec![("retry-after", "1"); 300], "{}"),
        "bytes" => Play::whole(429, &[("x-big", &"a".repeat(1_000_000))], "{}"),
        _ => openai(seen),
    })
    .await;
    let lessor = Setup::openai(&provider).key(Key::new("a")).start().await;
    for case in ["lines", "bytes"] {
        let answer = lessor.ask(Request::get("/openai/v1/models").header("x-case", case)).await;
        assert_eq!((answer.status, answer.header("x-lessor-error")), (502, "upstream_unreachable"), "{case}");
        let message = answer.json()["error"]["message"].as_str().unwrap().to_owned();
        assert!(message.contains("more than 100 header lines or 256 KiB"), "{case}: {message}");
    }
    assert_eq!(lessor.get("/openai/v1/models").await.status, 200);
}

/// A listener whose queue is full: whoever connects hears nothing.
async fn full() -> (tokio::net::TcpListener, Vec<tokio::net::TcpStream>) {
    let socket = tokio::net::TcpSocket::new_v4().unwrap();
    socket.bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let listener = socket.listen(1).unwrap();
    let (at, mut queued) = (listener.local_addr().unwrap(), Vec::new());
    while let Ok(connected) = tokio::time::timeout(ms(300), tokio::net::TcpStream::connect(at)).await {
        queued.push(connected.unwrap());
    }
    (listener, queued)
}

#[tokio::test]
async fn a_host_to_which_no_connection_comes_about_is_504_in_time_by_every_way() {
    let (listener, _queued) = full().await;
    let at = listener.local_addr().unwrap();
    // Takes connections, and says nothing in them.
    let mute = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let setup = Setup::new().set("timeouts.connect", "\"300ms\"").set("retry.max_attempts", "1");
    let lessor = setup
        .set("providers.openai.base_url", &format!("\"http://localhost:{}\"", at.port()))
        .set(
            "providers.xai.base_url",
            &format!("\"https://localhost:{}\"", mute.local_addr().unwrap().port()),
        )
        .key(Key::new("a").cap(1))
        .key(Key::new("b").of("xai").cap(1))
        .start()
        .await;
    for _ in 0..5 {
        for target in ["/openai/v1/models", "/xai/v1/models", &format!("http://{at}/")] {
            let begun = std::time::Instant::now();
            lessor.get(target).await.is_error(504, "upstream_timeout");
            assert!(begun.elapsed() < ms(4000), "{target}: {:?}", begun.elapsed());
        }
        let mut raw = lessor.raw().await;
        raw.write(format!("CONNECT {at} HTTP/1.1\r\nHost: {at}\r\n\r\n")).await;
        let said = raw.rest().await;
        assert!(said.starts_with("HTTP/1.1 504 upstream_timeout: "), "{said}");
        let near = ask(&lessor, REALTIME, "").await.answered().await;
        assert_eq!(
            (near.status(), near.header("x-lessor-error")),
            (504, "upstream_timeout"),
            "{}",
            near.head
        );
    }
    lessor.is_free_within_a_second("a").await;
    lessor.is_free_within_a_second("b").await;
    assert_eq!(
        (lessor.status("a").await, lessor.status("b").await),
        ("available".into(), "available".into())
    );
}

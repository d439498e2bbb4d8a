//! Bytes that an honest client or provider never sends: refused or put in order, never smuggled.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::pedantic, missing_docs, unreachable_pub)]

mod support;

use support::plays::openai;
use support::provider::ok;
use support::{Cut, Key, Lessor, Play, Provider, Request, Setup, eventually, ms};

async fn start(provider: &Provider) -> Lessor {
    Setup::openai(provider).key(Key::new("a").cap(1)).start().await
}

/// A request's head by hand; `{host}` becomes lessor's authority.
async fn say(lessor: &Lessor, bytes: &str) -> support::Raw {
    let mut raw = lessor.raw().await;
    raw.write(bytes.replace("{host}", &lessor.authority())).await;
    raw
}

const SMUGGLED: &str = "GET /openai/v1/smuggled HTTP/1.1\r\nHost: {host}\r\n\r\n";

/// Sends `request` with another one behind it, and expects a refusal, the end of the connection, and
/// nothing at the provider.
async fn is_refused(lessor: &Lessor, provider: &Provider, request: &str) {
    let mut raw = say(lessor, &format!("{request}{SMUGGLED}")).await;
    let said = raw.rest().await;
    let status: u16 = said.split(' ').nth(1).and_then(|code| code.parse().ok()).unwrap_or(0);
    assert!([400, 501].contains(&status), "{request:?} was answered with {said:?}");
    assert_eq!(said.matches("HTTP/1.1 ").count(), 1, "{request:?}: more than one answer: {said:?}");
    assert_eq!(provider.count(), 0, "{request:?} reached the provider: {:?}", provider.seen());
    assert_eq!(lessor.in_use("a").await, 0, "{request:?} took a slot");
}

#[tokio::test]
async fn a_body_with_two_lengths_is_refused_before_a_key_is_leased() {
    let provider = Provider::start(openai).await;
    let lessor = start(&provider).await;
    let post = "POST /openai/v1/files HTTP/1.1\r\nHost: {host}\r\n";
    for lines in [
        "Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        "Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n",
        "Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
        "Transfer-Encoding: chunked, chunked\r\n\r\n0\r\n\r\n",
        "Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        "Transfer-Encoding: ,chunked\r\n\r\n0\r\n\r\n",
        "Transfer-Encoding: gzip\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        "Transfer-Encoding: identity\r\n\r\n",
        "Transfer-Encoding: chunked, gzip\r\n\r\n0\r\n\r\n",
        "Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
        "Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n",
        "Content-Length: 5, 6\r\n\r\nhello",
        "Content-Length: 5\r\nContent-Length: 6\r\n\r\nhello",
        "Content-Length: +5\r\n\r\nhello",
        "Content-Length: -1\r\n\r\nhello",
        "Content-Length: 0x5\r\n\r\nhello",
        "Content-Length: 99999999999999999999999\r\n\r\nhello",
    ] {
        is_refused(&lessor, &provider, &format!("{post}{lines}")).await;
    }
}

#[tokio::test]
async fn a_malformed_head_is_refused() {
    let provider = Provider::start(openai).await;
    let lessor = start(&provider).await;
    for head in [
        "GET /openai/v1/models HTTP/1.1\r\n\r\n",
        "GET /openai/v1/models HTTP/1.1\r\nHost: {host}\r\nHost: {host}\r\n\r\n",
        "GET /openai/v1/models HTTP/1.1\r\nHost: {host}\r\nHost: evil.example\r\n\r\n",
        "GET /openai/v1/models HTTP/1.1\r\nHost: {host}\r\nX-A : b\r\n\r\n",
        "GET /openai/v1/models HTTP/1.1\r\nHost: {host}\r\nX-A: b\r\n folded\r\n\r\n",
        "GET /openai/v1/models HTTP/1.1\r\nHost: {host}\r\nX-A: b\0c\r\n\r\n",
        "GET /openai/v1/models HTTP/2.0\r\nHost: {host}\r\n\r\n",
        "POST /openai/v1/files HTTP/1.0\r\nHost: {host}\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        "GET http://user:password@api.openai.com/v1/models HTTP/1.1\r\nHost: api.openai.com\r\n\r\n",
        "GET /openai/v1/mo dels HTTP/1.1\r\nHost: {host}\r\n\r\n",
    ] {
        let (status, said) = say(&lessor, head).await.answer().await;
        assert!([400, 501, 505].contains(&status), "{head:?} was answered with {said:?}");
        assert_eq!((provider.count(), lessor.in_use("a").await), (0, 0), "{head:?}");
    }
}

#[tokio::test]
async fn a_head_too_large_is_refused() {
    let provider = Provider::start(openai).await;
    let lessor = start(&provider).await;
    let many: String = (0..500).map(|n| format!("X-{n}: y\r\n")).collect();
    let long = format!("X-Long: {}\r\n", "y".repeat(2 << 20));
    for lines in [many, long] {
        let mut raw = lessor.raw().await;
        let host = lessor.authority();
        let head = format!("GET /openai/v1/models HTTP/1.1\r\nHost: {host}\r\n{lines}\r\n");
        // The refusal may come, and with it the end, before all was written.
        let _ = tokio::io::AsyncWriteExt::write_all(&mut raw.0, head.as_bytes()).await;
        let said = raw.rest().await;
        assert!(said.is_empty() || said.starts_with("HTTP/1.1 431 "), "{said}");
    }
    let uri = format!("GET /openai/{} HTTP/1.1\r\nHost: {{host}}\r\n\r\n", "y".repeat(70_000));
    let said = say(&lessor, &uri).await.rest().await;
    assert!(said.starts_with("HTTP/1.1 414 ") || said.starts_with("HTTP/1.1 431 "), "{said}");
    assert_eq!(provider.count(), 0);
}

#[tokio::test]
async fn a_head_that_is_odd_but_plain_is_put_in_order() {
    let provider = Provider::start(openai).await;
    let lessor = start(&provider).await;
    for (n, request) in [
        "POST /openai/v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nContent-Length: 2\r\nContent-Length: 2\r\n\r\n{}",
        "POST /openai/v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nContent-Length: 02\r\n\r\n{}",
        "POST /openai/v1/chat/completions HTTP/1.1\nHost: {host}\nContent-Length: 2\n\n{}",
    ]
    .into_iter()
    .enumerate()
    {
        let (status, said) = say(&lessor, request).await.answer().await;
        assert_eq!(status, 200, "{request:?}: {said}");
        let seen = provider.request(n + 1).await;
        assert_eq!((seen.all("content-length"), seen.body.as_slice()), (vec!["2"], &b"{}"[..]));
        assert_eq!(seen.raw_head.matches('\n').count(), seen.raw_head.matches("\r\n").count());
    }
}

#[tokio::test]
async fn chunks_that_cannot_be_read_are_400_and_blame_nobody() {
    let provider = Provider::start(openai).await;
    let lessor = start(&provider).await;
    for (method, chunks) in [
        ("POST", "5\nhello\r\n0\r\n\r\n"),
        ("POST", "5;a\nb\r\nhello\r\n0\r\n\r\n"),
        ("POST", "ffffffffffffffffff\r\nhello\r\n0\r\n\r\n"),
        ("POST", "5\r\nhelloXX0\r\n\r\n"),
        ("POST", "zz\r\nhello\r\n0\r\n\r\n"),
        ("POST", "-5\r\nhello\r\n0\r\n\r\n"),
        ("GET", "zz\r\nhello\r\n0\r\n\r\n"),
    ] {
        let head = format!(
            "{method} /openai/v1/files HTTP/1.1\r\nHost: {{host}}\r\nTransfer-Encoding: chunked\r\n\r\n"
        );
        let said = say(&lessor, &format!("{head}{chunks}")).await.rest().await;
        assert!(said.starts_with("HTTP/1.1 400 "), "{method} {chunks:?} was answered with {said:?}");
        let whole = async || provider.seen().iter().any(|seen| seen.body_complete).then_some(());
        assert!(whole().await.is_none(), "{chunks:?} became a whole body");
        lessor.is_free_within_a_second("a").await;
        assert_eq!(lessor.status("a").await, "available");
    }
    assert_eq!(lessor.chat().await.status, 200);
}

#[tokio::test]
async fn a_body_of_unknown_length_goes_on_with_any_method() {
    let provider = Provider::start(|_| ok()).await;
    let lessor = start(&provider).await;
    for (n, method) in ["GET", "DELETE", "OPTIONS", "POST", "PUT", "PATCH"].into_iter().enumerate() {
        let request = format!(
            "{method} /openai/v1/models HTTP/1.1\r\nHost: {{host}}\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n"
        );
        let (status, said) = say(&lessor, &request).await.answer().await;
        assert_eq!(status, 200, "{method}: {said}");
        let seen = provider.request(n + 1).await;
        assert_eq!(
            (seen.method.as_str(), seen.body.as_slice()),
            (method, &b"hello"[..]),
            "{}",
            seen.raw_head
        );
    }
}

#[tokio::test]
async fn a_request_without_a_body_gets_none_on_its_way() {
    let provider = Provider::start(|_| ok()).await;
    let lessor = start(&provider).await;
    assert_eq!(lessor.get("/openai/v1/models").await.status, 200);
    let seen = provider.request(1).await;
    assert_eq!((seen.header("content-length"), seen.header("transfer-encoding")), ("", ""));
    let (status, _) = say(&lessor, "POST /openai/v1/x HTTP/1.1\r\nHost: {host}\r\nContent-Length: 0\r\n\r\n")
        .await
        .answer()
        .await;
    assert_eq!((status, provider.request(2).await.header("content-length")), (200, "0"));
}

#[tokio::test]
async fn hop_by_hop_headers_end_at_lessor_and_never_take_the_key_with_them() {
    let provider = Provider::start(openai).await;
    let lessor = start(&provider).await;
    let (status, said) = say(
        &lessor,
        "GET /openai/v1/models HTTP/1.1\r\nHost: {host}\r\nConnection: authorization, x-mine, content-length, host\r\n\
         X-Mine: 1\r\nX-Kept: 2\r\nKeep-Alive: timeout=5\r\nProxy-Connection: keep-alive\r\nTE: gzip\r\n\
         Proxy-Authorization: Basic YTpi\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\n\r\n",
    )
    .await
    .answer()
    .await;
    assert_eq!(status, 200, "{said}");
    let seen = provider.request(1).await;
    assert_eq!((seen.key(), seen.credentials, seen.header("x-kept")), ("sk-a", 1, "2"));
    for name in
        ["x-mine", "keep-alive", "proxy-connection", "te", "proxy-authorization", "http2-settings", "upgrade"]
    {
        assert_eq!(seen.header(name), "", "{}", seen.raw_head);
    }
}

#[tokio::test]
async fn hop_by_hop_headers_of_an_answer_end_at_lessor() {
    let provider = Provider::start(|_| {
        let headers = [
            ("connection", "x-mine"),
            ("x-mine", "1"),
            ("keep-alive", "timeout=5"),
            ("proxy-authenticate", "Basic"),
            ("x-kept", "2"),
        ];
        Play::whole(200, &headers, "ok")
    })
    .await;
    let lessor = start(&provider).await;
    let answer = lessor.get("/openai/v1/models").await;
    assert_eq!((answer.status, answer.header("x-kept")), (200, "2"));
    for name in ["x-mine", "keep-alive", "proxy-authenticate"] {
        assert_eq!(answer.header(name), "", "{:?}", answer.headers);
    }
}

#[tokio::test]
async fn an_answer_with_two_lengths_is_read_by_its_chunks_and_shown_with_one() {
    let provider = Provider::start(|_| {
        let head = [("content-length", "100"), ("transfer-encoding", "chunked")];
        Play::new().head(200, &head).chunk("abc").last_chunk()
    })
    .await;
    let lessor = start(&provider).await;
    let answer = lessor.get("/openai/v1/models").await;
    assert_eq!((answer.status, answer.text().as_str(), answer.header("content-length")), (200, "abc", ""));
}

#[tokio::test]
async fn an_answer_that_cannot_be_framed_is_502() {
    let provider = Provider::start(|seen| match seen.path() {
        "/v1/gzip" => {
            Play::new().head(200, &[("transfer-encoding", "gzip, chunked")]).chunk("abc").last_chunk()
        }
        "/v1/lengths" => {
            Play::new().bytes("HTTP/1.1 200 OK\r\ncontent-length: 3\r\ncontent-length: 4\r\n\r\nabcd")
        }
        _ => Play::new()
            .bytes("HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n")
            .silence(),
    })
    .await;
    let lessor = start(&provider).await;
    for path in ["gzip", "lengths", "unasked-101"] {
        let request = Request::new("POST", &format!("/openai/v1/{path}"));
        lessor.ask(request).await.is_error(502, "upstream_unreachable");
        lessor.is_free_within_a_second("a").await;
        assert_eq!(lessor.status("a").await, "available", "{path}");
    }
}

#[tokio::test]
async fn bytes_after_an_answer_never_become_the_next_ones() {
    let poison = "HTTP/1.1 200 OK\r\ncontent-length: 6\r\n\r\npoison";
    let provider =
        Provider::start(
            move |seen| if seen.path() == "/v1/extra" { openai(seen).bytes(poison) } else { openai(seen) },
        )
        .await;
    let lessor = start(&provider).await;
    for _ in 0..5 {
        lessor.get("/openai/v1/extra").await;
        let answer = lessor.get("/openai/v1/models").await;
        assert_eq!(answer.status, 200);
        assert!(!answer.text().contains("poison"));
    }
}

#[tokio::test]
async fn answers_without_a_body_have_none() {
    let provider = Provider::start(|seen| match seen.path() {
        "/v1/204" => Play::new().head(204, &[]),
        "/v1/304" => Play::new().head(304, &[("etag", "\"x\"")]),
        _ => Play::new().head(200, &[("content-length", "1000"), ("content-type", "text/plain")]),
    })
    .await;
    let lessor = start(&provider).await;
    for (method, path, status) in [("GET", "204", 204), ("GET", "304", 304), ("HEAD", "head", 200)] {
        let answer = lessor.ask(Request::new(method, &format!("/openai/v1/{path}"))).await;
        assert_eq!((answer.status, answer.body.len()), (status, 0), "{path}");
        lessor.is_free_within_a_second("a").await;
    }
    let head = lessor.ask(Request::new("HEAD", "/openai/v1/head")).await;
    assert_eq!(head.header("content-length"), "1000");
}

#[tokio::test]
async fn an_answer_of_two_lengths_is_a_clear_502_also_to_head() {
    let provider = Provider::start(|_| {
        Play::new().bytes("HTTP/1.1 200 OK\r\ncontent-length: 10\r\ncontent-length: 12\r\n\r\n")
    })
    .await;
    let lessor = start(&provider).await;
    for method in ["GET", "HEAD"] {
        let answer = lessor.ask(Request::new(method, "/openai/v1/models")).await;
        assert_eq!(
            (answer.status, answer.header("x-lessor-error")),
            (502, "upstream_unreachable"),
            "{method}"
        );
    }
}

#[tokio::test]
async fn interim_answers_before_the_final_one_are_stepped_over() {
    let provider = Provider::start(|seen| {
        let interim = "HTTP/1.1 103 Early Hints\r\nlink: </x>\r\n\r\nHTTP/1.1 102 Processing\r\n\r\n";
        Play::new().bytes(interim).wait(ms(20)).then(openai(seen))
    })
    .await;
    let lessor = start(&provider).await;
    assert_eq!(lessor.chat().await.status, 200);
}

#[tokio::test]
async fn an_http_1_0_client_gets_a_body_that_ends_with_the_connection() {
    let provider = Provider::start(|_| Play::sse().event("one").done()).await;
    let lessor = start(&provider).await;
    let said = say(&lessor, "GET /openai/v1/models HTTP/1.0\r\nHost: {host}\r\n\r\n").await.rest().await;
    let lower = said.to_ascii_lowercase();
    assert!(lower.starts_with("http/1.0 200 ") || lower.starts_with("http/1.1 200 "), "{said}");
    assert!(!lower.contains("transfer-encoding"), "{said}");
    assert!(said.ends_with("data: one\n\ndata: [DONE]\n\n"), "{said}");
}

#[tokio::test]
async fn a_target_that_names_no_provider_by_trickery_reaches_none() {
    let provider = Provider::start(openai).await;
    let lessor = start(&provider).await;
    for target in [
        "//evil.example/openai/v1/models",
        "*",
        "/openai@evil.example/v1",
        "/OpenAI/v1/models",
        "/%6fpenai/v1/models",
    ] {
        let method = if target == "*" { "OPTIONS" } else { "GET" };
        let request = format!("{method} {target} HTTP/1.1\r\nHost: {{host}}\r\nConnection: close\r\n\r\n");
        let said = say(&lessor, &request).await.rest().await;
        let status: u16 = said.split(' ').nth(1).unwrap().parse().unwrap();
        assert!((400..=404).contains(&status), "{target}: {said}");
        assert!(said.to_ascii_lowercase().contains("x-lessor-error"), "{target}: {said}");
    }
    assert_eq!(provider.count(), 0);
}

#[tokio::test]
async fn after_a_cut_upload_the_provider_sees_no_whole_body() {
    let provider =
        Provider::builder().before_body(|_| Some(Play::new().read_body().then(ok()))).start(|_| ok()).await;
    let lessor = start(&provider).await;
    for (n, lines) in ["Content-Length: 100\r\n\r\nhalf", "Transfer-Encoding: chunked\r\n\r\n4\r\nhalf\r\n"]
        .into_iter()
        .enumerate()
    {
        let raw = say(&lessor, &format!("POST /openai/v1/files HTTP/1.1\r\nHost: {{host}}\r\n{lines}")).await;
        provider.request(n + 1).await;
        drop(raw);
        let seen = eventually("the provider sees the cut", async || {
            provider.seen().get(n).filter(|seen| seen.over()).cloned()
        })
        .await;
        assert!(seen.gone.is_some() && !seen.body_complete, "{seen:?}");
        lessor.is_free_within_a_second("a").await;
    }
}

#[tokio::test]
async fn a_connection_that_a_provider_spoils_is_not_used_again() {
    let provider = Provider::start(|seen| {
        if seen.number == 0 {
            Play::sse().event("one").bytes("zz\r\n").wait(ms(20)).cut(Cut::Close)
        } else {
            openai(seen)
        }
    })
    .await;
    let lessor = start(&provider).await;
    assert!(lessor.open(Request::get("/openai/v1/models")).await.whole().await.is_err());
    assert_eq!(lessor.get("/openai/v1/models").await.status, 200);
    assert_ne!(provider.seen()[0].connection, provider.seen()[1].connection);
}

#[tokio::test]
async fn a_pipelined_request_with_two_lengths_is_refused_too() {
    let provider = Provider::start(openai).await;
    let origin = Provider::origin(|_| ok()).await;
    let lessor = start(&provider).await;
    let elsewhere = format!("http://{}", origin.addr());
    for (n, to) in ["/openai/v1", &elsewhere].into_iter().enumerate() {
        for lengths in [
            "Content-Length: 5\r\nTransfer-Encoding: chunked",
            "Transfer-Encoding: chunked\r\nContent-Length: 5",
            "transfer-encoding:chunked\r\ncontent-length:0",
        ] {
            let host = if n == 0 { "{host}".to_owned() } else { origin.addr().to_string() };
            let first = format!("GET {to}/models HTTP/1.1\r\nHost: {host}\r\n\r\n");
            let second = format!("POST {to}/files HTTP/1.1\r\nHost: {host}\r\n{lengths}\r\n\r\n0\r\n\r\n");
            let third = format!("GET {to}/smuggled HTTP/1.1\r\nHost: {host}\r\n\r\n");
            let before = provider.count() + origin.count();
            let mut raw = say(&lessor, &format!("{first}{second}{third}")).await;
            let said = raw.rest().await;
            let statuses: Vec<_> = said.split("HTTP/1.1 ").skip(1).map(|answer| &answer[..3]).collect();
            assert!(
                ["200", "400"].starts_with(&statuses) && !statuses.is_empty(),
                "{to}, {lengths:?}: {said}"
            );
            let seen: Vec<_> =
                provider.seen().into_iter().chain(origin.seen()).map(|seen| seen.target).collect();
            assert_eq!(seen.len(), before + 1, "{to}, {lengths:?}: {seen:?}");
            assert!(seen.iter().all(|target| target.ends_with("/models")), "{to}, {lengths:?}: {seen:?}");
        }
    }
}

//! Bodies on their way: flushed as they come, in constant memory, never passed off as whole when cut.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::pedantic, missing_docs, unreachable_pub)]

mod support;

use std::time::{Duration, Instant};

use support::client::{fed, full, patterned};
use support::lessor::chat;
use support::plays::openai;
use support::provider::ok;
use support::{
    Cut, Gate, Key, Lessor, NEVER, Play, Provider, Request, Setup, eventually, eventually_within, ms, tunnel,
    within,
};
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWriteExt as _};

const GIB: u64 = 1 << 30;
const SECOND: Duration = Duration::from_secs(1);

async fn start(provider: &Provider) -> Lessor {
    // Long enough to be looked for in bodies.
    Setup::openai(provider).key(Key::new("a").secret("sk-CANARY-7f3a9c51e2").cap(1)).start().await
}

/// Fails unless the provider sees that request `n` (from 1) was left, and the slot is free, within a second.
async fn left_and_free(provider: &Provider, lessor: &Lessor, n: usize) {
    let gone = async || provider.seen().get(n - 1)?.gone.map(drop);
    eventually_within(SECOND, "the provider sees the close", gone).await;
    lessor.is_free_within_a_second("a").await;
}

#[tokio::test]
async fn an_event_is_at_the_client_within_50_ms_while_the_provider_pauses() {
    let gates: Vec<Gate> = (0..5).map(|_| Gate::default()).collect();
    let held = gates.clone();
    let provider = Provider::start(move |_| {
        let play = Play::sse().event("begin");
        held.iter().fold(play, |play, gate| play.until(gate).event("tick")).silence()
    })
    .await;
    let lessor = start(&provider).await;
    let mut stream = lessor.open(chat("gpt-4o-mini")).await;
    assert_eq!((stream.status, stream.header("content-type")), (200, "text/event-stream"));
    assert_eq!(stream.read_to("\n\n").await, "data: begin\n\n");
    let mut delays = Vec::new();
    for gate in &gates {
        let begun = Instant::now();
        gate.open();
        assert_eq!(stream.read_to("\n\n").await, "data: tick\n\n");
        delays.push(begun.elapsed());
    }
    delays.sort();
    assert!(delays[2] < ms(50), "half of the events took longer than {:?}", delays[2]);
}

#[tokio::test]
async fn a_body_of_any_type_is_flushed_chunk_by_chunk() {
    let gate = Gate::default();
    let held = gate.clone();
    let provider = Provider::start(move |_| {
        Play::new()
            .head(200, &[("content-type", "application/json"), ("content-length", "4")])
            .bytes("ab")
            .until(&held)
            .bytes("cd")
    })
    .await;
    let lessor = start(&provider).await;
    let mut stream = lessor.open(chat("gpt-4o-mini")).await;
    assert_eq!(stream.header("content-length"), "4");
    assert_eq!(stream.next().await.unwrap().unwrap(), "ab");
    gate.open();
    assert_eq!(stream.next().await.unwrap().unwrap(), "cd");
    assert!(stream.next().await.is_none());
}

#[tokio::test]
async fn a_streamed_body_keeps_its_slot_until_the_last_byte() {
    let gate = Gate::default();
    let held = gate.clone();
    let provider = Provider::start(move |_| Play::sse().event("one").until(&held).done()).await;
    let lessor = start(&provider).await;
    let mut stream = lessor.open(chat("gpt-4o-mini")).await;
    stream.read_to("one").await;
    assert_eq!(lessor.in_use("a").await, 1);
    let full = chat("gpt-4o-mini").header("x-lessor-max-wait", "0s");
    lessor.ask(full).await.is_error(429, "pool_exhausted");
    gate.open();
    assert!(stream.whole().await.unwrap().text().contains("[DONE]"));
    lessor.is_free_within_a_second("a").await;
}

#[tokio::test]
async fn a_client_that_leaves_in_a_silent_stream_ends_it_at_the_provider() {
    let provider = Provider::start(|_| Play::sse().event("one").silence()).await;
    let lessor = start(&provider).await;
    let mut stream = lessor.open(chat("gpt-4o-mini")).await;
    stream.read_to("one").await;
    drop(stream);
    left_and_free(&provider, &lessor, 1).await;
    assert_eq!(lessor.status("a").await, "available");
}

#[tokio::test]
async fn a_client_that_leaves_before_the_head_ends_the_request_at_the_provider() {
    let provider = Provider::start(|_| Play::new().silence()).await;
    let lessor = start(&provider).await;
    let mut raw = lessor.raw().await;
    raw.write(format!("GET /openai/v1/models HTTP/1.1\r\nHost: {}\r\n\r\n", lessor.authority())).await;
    provider.request(1).await;
    drop(raw);
    left_and_free(&provider, &lessor, 1).await;
}

#[tokio::test]
async fn a_client_that_leaves_while_queued_is_taken_out_of_the_queue() {
    let provider = Provider::start(|_| Play::sse().event("one").silence()).await;
    let lessor = start(&provider).await;
    let mut first = lessor.open(chat("gpt-4o-mini")).await;
    first.read_to("one").await;
    let mut queued = lessor.raw().await;
    queued.write(format!("GET /openai/v1/models HTTP/1.1\r\nHost: {}\r\n\r\n", lessor.authority())).await;
    lessor.comes_to_queue(1).await;
    drop(queued);
    let empty = async || (lessor.metric("lessor_queue_depth").await == 0.0).then_some(());
    eventually_within(SECOND, "the queue is empty", empty).await;
    drop(first);
    left_and_free(&provider, &lessor, 1).await;
    assert_eq!(provider.count(), 1);
}

/// A chat request by hand, with bytes after its body that stay in lessor's buffer.
fn chat_and(lessor: &Lessor, extra: &str) -> String {
    let body = r#"{"model":"gpt-4o-mini"}"#;
    let (host, length) = (lessor.authority(), body.len());
    format!(
        "POST /openai/v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nContent-Length: {length}\r\n\r\n{body}{extra}"
    )
}

#[tokio::test]
async fn a_client_that_leaves_is_seen_also_with_unread_bytes_in_the_buffer() {
    let provider = Provider::start(|seen| {
        if seen.number < 2 { Play::sse().event("one").silence() } else { Play::new().silence() }
    })
    .await;
    let lessor = start(&provider).await;
    let pipelined = format!("GET /openai/v1/models HTTP/1.1\r\nHost: {}\r\n\r\n", lessor.authority());
    for (n, extra) in ["\r\n", &pipelined, "\r\n", &pipelined].into_iter().enumerate() {
        let mut raw = lessor.raw().await;
        raw.write(chat_and(&lessor, extra)).await;
        if n < 2 {
            raw.read_to("one").await; // in the stream
        } else {
            provider.request(n + 1).await; // before the head
        }
        drop(raw);
        left_and_free(&provider, &lessor, n + 1).await;
    }
    // and while queued
    let mut first = lessor.raw().await;
    first.write(chat_and(&lessor, "")).await;
    provider.request(5).await;
    let mut queued = lessor.raw().await;
    queued.write(chat_and(&lessor, "\r\n")).await;
    lessor.comes_to_queue(1).await;
    drop(queued);
    let empty = async || (lessor.metric("lessor_queue_depth").await == 0.0).then_some(());
    eventually_within(SECOND, "the queue is empty", empty).await;
}

#[tokio::test]
async fn a_queued_client_that_leaves_after_a_large_upload_is_taken_out_of_the_queue() {
    let provider = Provider::start(|_| Play::sse().event("one").silence()).await;
    let lessor = start(&provider).await;
    let mut first = lessor.open(chat("gpt-4o-mini")).await;
    first.read_to("one").await;
    let mut queued = lessor.raw().await;
    let (host, length) = (lessor.authority(), 4 << 20);
    let head = format!("POST /openai/v1/files HTTP/1.1\r\nHost: {host}\r\nContent-Length: {length}\r\n\r\n");
    queued.write(head).await;
    lessor.comes_to_queue(1).await;
    let upload = queued.write(vec![b'x'; length]);
    support::within(support::NEVER, "the upload is taken in while it is queued", upload).await;
    drop(queued);
    let empty = async || (lessor.metric("lessor_queue_depth").await == 0.0).then_some(());
    eventually_within(SECOND, "the queue is empty", empty).await;
    assert_eq!(provider.count(), 1);
}

#[tokio::test]
async fn a_half_closed_client_counts_as_gone() {
    use tokio::io::AsyncWriteExt as _;
    let provider = Provider::start(|_| Play::sse().event("one").silence()).await;
    let lessor = start(&provider).await;
    let mut raw = lessor.raw().await;
    raw.write(chat_and(&lessor, "")).await;
    raw.read_to("one").await;
    raw.0.shutdown().await.unwrap();
    left_and_free(&provider, &lessor, 1).await;
}

/// Fails when memory grew by 32 MiB or more since `before`.
#[track_caller]
fn grew_little(lessor: &Lessor, before: u64) {
    let grown = lessor.peak_kib().saturating_sub(before);
    assert!(grown < 32 * 1024, "resident memory grew by {grown} KiB");
}

#[tokio::test]
async fn one_gib_down_in_constant_memory() {
    let provider = Provider::plain(|seen| {
        if seen.method == "POST" {
            return openai(seen);
        }
        Play::new().head(200, &[("content-length", &GIB.to_string())]).flood(GIB)
    })
    .await;
    let lessor = start(&provider).await;
    assert_eq!(lessor.chat().await.status, 200);
    let before = lessor.resident_kib();
    let stream = lessor.open(Request::get("/openai/v1/files/1/content")).await;
    assert_eq!(stream.pattern_len().await, GIB);
    grew_little(&lessor, before);
}

#[tokio::test]
async fn one_gib_up_in_constant_memory() {
    let provider = Provider::plain(openai).await;
    let lessor = start(&provider).await;
    assert_eq!(lessor.chat().await.status, 200);
    let before = lessor.resident_kib();
    let upload = Request::new("POST", "/openai/v1/chat/completions").body(patterned(GIB));
    let sent = support::client::send(lessor.door(), upload);
    support::within(Duration::from_secs(120), "1 GiB up", sent).await.unwrap().whole().await.unwrap();
    let seen = provider.request(2).await;
    assert_eq!((seen.body_len, seen.body_is_pattern, seen.body_complete), (GIB, true, true));
    assert_eq!(seen.header("content-length"), GIB.to_string());
    grew_little(&lessor, before);
}

#[tokio::test]
async fn large_bodies_go_both_ways_over_tls_unchanged() {
    const LEN: u64 = 48 << 20;
    let provider =
        Provider::start(|_| Play::new().head(200, &[("content-length", &LEN.to_string())]).flood(LEN)).await;
    let lessor = start(&provider).await;
    let upload = Request::new("POST", "/openai/v1/files").body(patterned(LEN));
    let stream = lessor.open(upload).await;
    assert_eq!(stream.pattern_len().await, LEN);
    let seen = provider.request(1).await;
    assert_eq!((seen.body_len, seen.body_is_pattern), (LEN, true));
}

#[tokio::test]
async fn a_slow_reader_slows_the_provider_down() {
    let provider =
        Provider::plain(|_| Play::new().head(200, &[("content-length", &GIB.to_string())]).flood(GIB)).await;
    let lessor = start(&provider).await;
    let before = lessor.resident_kib();
    let stream = lessor.open(Request::get("/openai/v1/files/1/content")).await;
    let mut last = 0;
    let stopped = eventually("the provider stops sending", async || {
        let now = provider.seen()[0].flooded;
        let still = now > 0 && now == last;
        last = now;
        tokio::time::sleep(ms(300)).await; // nothing for so long is a stop
        still.then_some(now)
    })
    .await;
    assert!(stopped < 128 << 20, "{stopped} bytes went out to a client that reads none");
    grew_little(&lessor, before);
    drop(stream);
    left_and_free(&provider, &lessor, 1).await;
}

#[tokio::test]
async fn a_slow_provider_slows_the_client_down() {
    let gate = Gate::default();
    let held = gate.clone();
    let provider = Provider::builder()
        .plain()
        .before_body(move |_| Some(Play::new().read_at_least(1 << 20).until(&held).read_body().then(ok())))
        .start(|_| ok())
        .await;
    let lessor = start(&provider).await;
    let before = lessor.resident_kib();
    let (feed, body) = fed();
    let request = Request::new("POST", "/openai/v1/files").body(body);
    let (answer, ()) = tokio::join!(lessor.try_open(request), async {
        let part = support::pattern().slice(..128 * 1024);
        let mut fed = 0;
        // Feeds until nothing is taken for half a second. The kernel's buffers of both connections may take
        // some 40 MiB each; lessor itself takes next to nothing.
        while fed < 1536 && tokio::time::timeout(ms(500), feed.send(part.clone())).await.is_ok() {
            fed += 1;
        }
        assert!(fed < 1536, "192 MiB were taken though the provider reads nothing");
        grew_little(&lessor, before);
        gate.open();
        drop(feed);
    });
    assert_eq!(answer.unwrap().whole().await.unwrap().status, 200);
}

/// The ways in which an answer breaks off in the middle, each with a name.
fn broken_answers() -> Vec<(&'static str, Play)> {
    let length = || Play::new().head(200, &[("content-length", "100")]).bytes("only this");
    let chunks = || Play::sse().event("only this");
    let to_close = || Play::new().head(200, &[("content-type", "text/plain")]).bytes("only this");
    vec![
        ("length, closed", length().wait(ms(20)).cut(Cut::Close)),
        ("length, truncated", length().wait(ms(20)).cut(Cut::Truncate)),
        ("length, reset", length().wait(ms(20)).cut(Cut::Reset)),
        ("chunks, closed", chunks().wait(ms(20)).cut(Cut::Close)),
        ("chunks, truncated", chunks().wait(ms(20)).cut(Cut::Truncate)),
        ("chunks, reset", chunks().wait(ms(20)).cut(Cut::Reset)),
        ("inside a chunk", Play::sse().bytes("64\r\nonly this").wait(ms(20)).cut(Cut::Close)),
        ("a chunk size that is none", Play::sse().event("only this").wait(ms(20)).bytes("zz\r\n").silence()),
        ("until close, reset", to_close().wait(ms(20)).cut(Cut::Reset)),
    ]
}

#[tokio::test]
async fn an_answer_that_breaks_off_is_an_error_at_the_client_and_blames_no_key() {
    for tls in [true, false] {
        let script = |seen: &support::Seen| {
            let number: usize = seen.header("x-case").parse().unwrap();
            broken_answers().swap_remove(number).1
        };
        let provider = if tls { Provider::start(script).await } else { Provider::plain(script).await };
        let lessor = start(&provider).await;
        for (number, (name, _)) in broken_answers().iter().enumerate() {
            let request = chat("gpt-4o-mini").header("x-case", &number.to_string());
            let stream = lessor.open(request).await;
            assert_eq!(stream.status, 200, "{name}, TLS {tls}");
            let cut = stream.whole().await;
            assert!(cut.is_err(), "{name}, TLS {tls}: shown as whole: {:?}", cut.map(|answer| answer.text()));
            lessor.is_free_within_a_second("a").await;
            assert_eq!(lessor.status("a").await, "available", "{name}, TLS {tls}");
        }
        assert_eq!(provider.count(), broken_answers().len(), "no answer that began is asked for again");
    }
}

/// HTTP/1.0 has no chunks: where a length is not known, the end of the connection is the body's.
#[tokio::test]
async fn an_answer_that_breaks_off_is_a_reset_to_a_client_of_http_1_0() {
    // Each break comes once the part before it is here.
    let gates: [Gate; 4] = Default::default();
    let held = gates.clone();
    let provider = Provider::start(move |seen| {
        let n: usize = seen.path().rsplit('/').next().unwrap().parse().unwrap();
        let play = Play::sse().event("one").until(&held[n]);
        if n == 2 { play.silence() } else { play.cut(Cut::Close) }
    })
    .await;
    let lessor = Setup::openai(&provider).key(Key::new("a")).set("timeouts.idle", "\"1s\"").start().await;
    let get = |target: &str, host: &str| format!("GET {target} HTTP/1.0\r\nHost: {host}\r\n\r\n");
    let own = lessor.authority();
    for (n, target, host) in [
        (0, "/openai/v1/0", own.as_str()),
        (1, "http://api.openai.com/v1/1", "api.openai.com"),
        (2, "/openai/v1/2", own.as_str()),
    ] {
        let mut raw = lessor.raw().await;
        raw.write(get(target, host)).await;
        raw.read_to("one").await;
        gates[n].open();
        is_reset(&mut raw.0, target).await;
    }
    let raw = tunnel::connect(&lessor, "api.openai.com:443").await;
    let mut inside = tunnel::tls(&lessor, raw, "api.openai.com").await.unwrap();
    inside.write_all(get("/v1/3", "api.openai.com").as_bytes()).await.unwrap();
    gates[3].open();
    is_reset(&mut inside, "inside of TLS").await;
    lessor.is_free_within_a_second("a").await;
}

/// Fails unless the connection is reset, whatever came before.
async fn is_reset(socket: &mut (impl AsyncRead + Unpin), what: &str) {
    let mut seen = Vec::new();
    let ended = within(NEVER, what, socket.read_to_end(&mut seen)).await;
    let why = ended.expect_err("a clean end").kind();
    let shown = String::from_utf8_lossy(&seen);
    assert_eq!(why, std::io::ErrorKind::ConnectionReset, "{what}: {shown}");
}

#[tokio::test]
async fn over_tls_an_answer_until_close_is_whole_only_with_a_close_notify() {
    let provider = Provider::start(|seen| {
        let cut = if seen.path() == "/v1/whole" { Cut::Close } else { Cut::Truncate };
        Play::new().head(200, &[("content-type", "text/plain")]).bytes("until close").wait(ms(20)).cut(cut)
    })
    .await;
    let lessor = start(&provider).await;
    let whole = lessor.get("/openai/v1/whole").await;
    assert_eq!((whole.status, whole.text().as_str()), (200, "until close"));
    let cut = lessor.open(Request::get("/openai/v1/cut")).await.whole().await;
    assert!(cut.is_err(), "a truncated answer was shown as whole");
    lessor.is_free_within_a_second("a").await;
}

#[tokio::test]
async fn a_whole_answer_is_whole_though_the_provider_omits_the_close_notify() {
    let provider = Provider::start(|seen| {
        let play = match seen.path() {
            "/v1/length" => Play::whole(200, &[], "all of it"),
            _ => Play::sse().chunk("all of it").last_chunk(),
        };
        play.cut(Cut::Truncate)
    })
    .await;
    let lessor = start(&provider).await;
    for path in ["/openai/v1/length", "/openai/v1/chunks"] {
        let answer = lessor.get(path).await;
        assert_eq!((answer.status, answer.text().as_str()), (200, "all of it"), "{path}");
    }
}

#[tokio::test]
async fn a_provider_that_breaks_before_its_head_is_502_and_blames_no_key() {
    let provider = Provider::start(|seen| match seen.path() {
        "/v1/closed" => Play::new().cut(Cut::Close),
        "/v1/reset" => Play::new().cut(Cut::Reset),
        "/v1/half" => Play::new().bytes("HTTP/1.1 200 OK\r\nconte").cut(Cut::Close),
        _ => Play::new().bytes("SSH-2.0-OpenSSH_9.2\r\n\r\n").cut(Cut::Close),
    })
    .await;
    let lessor = start(&provider).await;
    for path in ["closed", "reset", "half", "garbage"] {
        let request = Request::new("POST", &format!("/openai/v1/{path}")).body(full("{}"));
        lessor.ask(request).await.is_error(502, "upstream_unreachable");
        lessor.is_free_within_a_second("a").await;
        assert_eq!(lessor.status("a").await, "available", "{path}");
    }
    assert_eq!(provider.count(), 4, "a POST that may have been worked on is not sent again");
}

#[tokio::test]
async fn a_provider_that_says_nothing_in_time_is_504() {
    let provider = Provider::start(|_| Play::new().silence()).await;
    let setup = Setup::openai(&provider).key(Key::new("a")).set("timeouts.first_byte", "\"1s\"");
    let lessor = setup.start().await;
    lessor.chat().await.is_error(504, "upstream_timeout");
    left_and_free(&provider, &lessor, 1).await;
    assert_eq!(lessor.status("a").await, "available");
}

#[tokio::test]
async fn a_stream_that_falls_silent_for_too_long_is_cut_and_shown_as_cut() {
    let provider = Provider::start(|_| Play::sse().event("one").silence()).await;
    let setup = Setup::openai(&provider).key(Key::new("a")).set("timeouts.idle", "\"300ms\"");
    let lessor = setup.start().await;
    let stream = lessor.open(chat("gpt-4o-mini")).await;
    assert!(stream.whole().await.is_err());
    left_and_free(&provider, &lessor, 1).await;
}

#[tokio::test]
async fn an_upload_that_stalls_for_too_long_is_408_and_frees_the_slot() {
    let provider = Provider::start(openai).await;
    let setup = Setup::openai(&provider).key(Key::new("a")).set("timeouts.body_idle", "\"300ms\"");
    let lessor = setup.start().await;
    let mut raw = lessor.raw().await;
    let host = lessor.authority();
    raw.write(format!("POST /openai/v1/files HTTP/1.1\r\nHost: {host}\r\nContent-Length: 100\r\n\r\nhalf"))
        .await;
    let said = raw.rest().await;
    assert!(said.starts_with("HTTP/1.1 408 ") && said.contains("request_timeout"), "{said}");
    lessor.is_free_within_a_second("a").await;
    assert_eq!(lessor.status("a").await, "available");
}

#[tokio::test]
async fn an_answer_that_comes_before_the_uploads_end_reaches_the_client_whole() {
    for tls in [true, false] {
        let builder = Provider::builder().before_body(|_| {
            let error = support::plays::openai_error("invalid_request_error", "too_large", "too large");
            Some(Play::new().read_at_least(1024).then(Play::json(413, &error)).cut(Cut::Close))
        });
        let builder = if tls { builder } else { builder.plain() };
        let provider = builder.start(|_| ok()).await;
        let lessor = start(&provider).await;
        // Like curl and httpx, this client reads the answer also when its writing came to an end.
        let (mut from, mut to) = lessor.raw().await.0.into_split();
        let (host, length) = (lessor.authority(), 32 << 20);
        let upload = tokio::spawn(async move {
            use tokio::io::AsyncWriteExt as _;
            let head =
                format!("POST /openai/v1/files HTTP/1.1\r\nHost: {host}\r\nContent-Length: {length}\r\n\r\n");
            let mut written = to.write_all(head.as_bytes()).await;
            for _ in 0..length >> 20 {
                written = written.and(to.write_all(&vec![b'x'; 1 << 20]).await);
            }
            written
        });
        let mut said = Vec::new();
        let reading = tokio::io::AsyncReadExt::read_to_end(&mut from, &mut said);
        let _ = support::within(support::NEVER, "the answer and its end", reading).await;
        let said = String::from_utf8_lossy(&said);
        assert!(said.starts_with("HTTP/1.1 413 ") && said.ends_with('}'), "TLS {tls}: {said:?}");
        assert!(said.contains("too_large") && !said.contains("x-lessor-error"), "TLS {tls}: {said:?}");
        // Without the reading on, a reset would end the upload here, and could overtake the answer.
        support::within(support::NEVER, "the end of the upload", upload).await.unwrap().unwrap();
        lessor.is_free_within_a_second("a").await;
    }
}

#[tokio::test]
async fn the_body_waits_for_100_continue_and_the_provider_never_sees_expect() {
    let provider = Provider::start(openai).await;
    let lessor = start(&provider).await;
    let (host, body) = (lessor.authority(), r#"{"model":"gpt-4o-mini"}"#);
    let mut raw = lessor.raw().await;
    let length = body.len();
    raw.write(format!(
        "POST /openai/v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nExpect: 100-continue\r\nContent-Length: {length}\r\n\r\n"
    ))
    .await;
    let interim = raw.read_to("\r\n\r\n").await;
    assert!(interim.starts_with("HTTP/1.1 100 "), "{interim}");
    raw.write(body).await;
    assert_eq!(raw.answer().await.0, 200);
    let seen = provider.request(1).await;
    assert_eq!((seen.header("expect"), seen.body.as_slice()), ("", body.as_bytes()));
}

#[tokio::test]
async fn trailers_reach_a_client_that_takes_them() {
    let provider = Provider::start(|_| {
        let head = [("transfer-encoding", "chunked"), ("trailer", "x-checksum")];
        Play::new().head(200, &head).chunk("data").bytes("0\r\nx-checksum: abc\r\n\r\n")
    })
    .await;
    let lessor = start(&provider).await;
    let answer = lessor.ask(Request::get("/openai/v1/models").header("te", "trailers")).await;
    let trailers = answer.trailers.expect("trailers");
    assert_eq!((answer.body.as_ref(), trailers["x-checksum"].to_str().unwrap()), (&b"data"[..], "abc"));
    let mut raw = lessor.raw().await;
    let host = lessor.authority();
    raw.write(format!(
        "POST /openai/v1/files HTTP/1.1\r\nHost: {host}\r\nTransfer-Encoding: chunked\r\nTrailer: x-sum\r\n\r\n4\r\ndata\r\n0\r\nx-sum: def\r\n\r\n"
    ))
    .await;
    raw.read_to("0\r\n").await;
    let seen = eventually("the body's end", async || {
        provider.seen().get(1).filter(|seen| seen.body_complete).cloned()
    })
    .await;
    assert_eq!(seen.body, b"data");
    assert_eq!(seen.trailers, [("x-sum".to_owned(), "def".to_owned())]);
}

#[tokio::test]
async fn encoded_bodies_pass_untouched() {
    let odd: Vec<u8> = (0..=255).rev().collect();
    let sent = odd.clone();
    let provider = Provider::start(move |_| {
        Play::whole(200, &[("content-encoding", "gzip"), ("content-type", "text/event-stream")], sent.clone())
    })
    .await;
    let lessor = start(&provider).await;
    let answer = lessor.get("/openai/v1/models").await;
    assert_eq!((answer.header("content-encoding"), answer.body.as_ref()), ("gzip", odd.as_slice()));
}

#[tokio::test]
async fn connections_to_the_provider_are_kept_and_used_again() {
    let provider = Provider::start(openai).await;
    let lessor = start(&provider).await;
    for _ in 0..20 {
        assert_eq!(lessor.chat().await.status, 200);
    }
    // An answer's last byte may be at the client a moment before its connection is free again.
    let connections: std::collections::HashSet<_> =
        provider.seen().iter().map(|seen| seen.connection).collect();
    assert!(connections.len() <= 5, "{} connections for 20 requests one after the other", connections.len());
}

/// Fails unless no slot of `a` is in use within `limit`.
async fn is_free_within(limit: Duration, lessor: &Lessor) {
    let free = async || (lessor.in_use("a").await == 0).then_some(());
    eventually_within(limit, "the slot is free", free).await;
}

/// A client that asks for 1 GiB and takes nothing of it; it is here when its request is at the provider.
async fn takes_nothing(provider: &Provider, lessor: &Lessor) -> support::Raw {
    let mut raw = lessor.raw().await;
    let host = lessor.authority();
    raw.write(format!("GET /openai/v1/files/1/content HTTP/1.1\r\nHost: {host}\r\n\r\n")).await;
    provider.request(1).await;
    lessor.comes_to_use("a", 1).await;
    raw
}

/// Reads what is left, and fails unless it ends before 1 GiB has come.
async fn ends_early(mut raw: support::Raw) {
    let mut buffer = vec![0; 1 << 18];
    let mut came = 0;
    loop {
        let read = tokio::io::AsyncReadExt::read(&mut raw.0, &mut buffer);
        match support::within(support::NEVER, "the end of the connection", read).await {
            Ok(n) if n > 0 => came += n as u64,
            _ => break,
        }
    }
    assert!(came < GIB, "{came} bytes came");
}

async fn flooding() -> Provider {
    Provider::plain(|_| Play::new().head(200, &[("content-length", &GIB.to_string())]).flood(GIB)).await
}

#[tokio::test]
async fn a_client_that_takes_nothing_for_too_long_is_cut_and_loses_its_slot() {
    let provider = flooding().await;
    let setup = Setup::openai(&provider).key(Key::new("a").cap(1)).set("timeouts.idle", "\"1s\"");
    let lessor = setup.start().await;
    let raw = takes_nothing(&provider, &lessor).await;
    is_free_within(3 * SECOND, &lessor).await;
    left_and_free(&provider, &lessor, 1).await;
    ends_early(raw).await;
    assert_eq!(lessor.status("a").await, "available", "no key is blamed for a client");
    eventually("the log blames no provider", async || {
        let outcome = |line: &serde_json::Value| support::lessor::field(line, "outcome") == "cancelled";
        lessor.log_lines().iter().any(outcome).then_some(())
    })
    .await;
    assert!(!lessor.log().contains("upstream_idle"), "{}", lessor.log());
}

#[tokio::test]
async fn a_client_that_takes_nothing_is_cut_when_its_lease_is_revoked() {
    let provider = flooding().await;
    let setup = Setup::openai(&provider).key(Key::new("a").cap(1));
    let lessor = setup.set("lease.ttl", "\"2s\"").set("lease.heartbeat", "\"500ms\"").start().await;
    let raw = takes_nothing(&provider, &lessor).await;
    let leases = lessor.admin("/v1/leases").await.json();
    let lease = leases["leases"][0]["id"].as_str().unwrap().to_owned();
    lessor.cli(&["leases", "revoke", &lease]).await.ok();
    is_free_within(2 * SECOND, &lessor).await;
    left_and_free(&provider, &lessor, 1).await;
    ends_early(raw).await;
}

#[tokio::test]
async fn a_client_that_takes_nothing_is_cut_when_its_lease_has_lived_as_long_as_it_may() {
    let provider = flooding().await;
    let setup = Setup::openai(&provider).key(Key::new("a").cap(1)).set("lease.max_duration", "\"1s\"");
    let lessor = setup.start().await;
    let raw = takes_nothing(&provider, &lessor).await;
    is_free_within(3 * SECOND, &lessor).await;
    left_and_free(&provider, &lessor, 1).await;
    ends_early(raw).await;
}

#[tokio::test]
async fn a_refusal_that_breaks_off_is_never_shown_as_whole() {
    let cases: Vec<(u16, bool, Cut)> = [429, 401, 500]
        .into_iter()
        .flat_map(|status| {
            [true, false].into_iter().flat_map(move |chunked| {
                [Cut::Close, Cut::Truncate, Cut::Reset].map(|cut| (status, chunked, cut))
            })
        })
        .collect();
    let script = cases.clone();
    for tls in [true, false] {
        let script = script.clone();
        let builder = if tls { Provider::builder() } else { Provider::builder().plain() };
        let provider = builder
            .start(move |seen| {
                let Ok(case) = seen.header("x-case").parse::<usize>() else {
                    return ok(); // lessor's own check of a refused key
                };
                let (status, chunked, cut) = script[case];
                let length =
                    if chunked { ("transfer-encoding", "chunked") } else { ("content-length", "100") };
                let play = Play::new().head(status, &[("content-type", "application/json"), length]);
                let half = r#"{"error": {"message""#;
                let play = if chunked { play.chunk(half) } else { play.bytes(half) };
                play.wait(ms(20)).cut(cut)
            })
            .await;
        for (n, (status, chunked, cut)) in cases.iter().enumerate() {
            // A lessor for each, for the key may rest after a refusal.
            let lessor = start(&provider).await;
            let what = format!("{status}, chunked {chunked}, {cut:?}, TLS {tls}");
            let request = chat("gpt-4o-mini")
                .header("x-case", &n.to_string())
                .header("x-lessor-max-wait", "0s")
                .header("connection", "close");
            // The provider's own head comes through, and then the break.
            let stream = lessor.try_open(request).await.expect(&what);
            assert_eq!(stream.status, *status, "{what}");
            let seen = (stream.status, stream.header("x-lessor-error").to_owned());
            let whole = stream.whole().await.map(|answer| answer.text());
            assert!(whole.is_err(), "{what}: shown as whole: {seen:?} {whole:?}");
            lessor.is_free_within_a_second("a").await;
        }
    }
}

#[tokio::test]
async fn an_upload_that_the_provider_does_not_take_is_bounded_in_time() {
    let gate = Gate::default();
    let held = gate.clone();
    let provider = Provider::builder()
        .plain()
        .before_body(move |_| Some(Play::new().read_at_least(1024).until(&held)))
        .start(|_| ok())
        .await;
    let setup = Setup::openai(&provider).key(Key::new("a").cap(1)).set("timeouts.body_idle", "\"1s\"");
    let lessor = std::sync::Arc::new(setup.start().await);
    let client = tokio::spawn({
        let lessor = std::sync::Arc::clone(&lessor);
        async move {
            lessor
                .try_open(Request::new("POST", "/openai/v1/files").body(patterned(GIB)))
                .await
                .map(|answer| answer.status)
        }
    });
    provider.request(1).await;
    lessor.comes_to_use("a", 1).await;
    is_free_within(5 * SECOND, &lessor).await;
    let said = support::within(support::NEVER, "the client is told", client).await.unwrap();
    assert!(said.as_ref().map_or(true, |status| *status >= 400), "{said:?}");
    assert_eq!(lessor.status("a").await, "available", "no key is blamed");
    gate.open();
}

/// How many bytes wait unread in lessor's end of this connection.
fn unread(lessor: &Lessor, ours: std::net::SocketAddr, theirs: std::net::SocketAddr) -> u64 {
    let port = |at: std::net::SocketAddr| format!(":{:04X}", at.port());
    let (ours, theirs) = (port(ours), port(theirs));
    let table = std::fs::read_to_string(format!("/proc/{}/net/tcp", lessor.pid())).unwrap();
    let row = table.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
    let row = row.into_iter().find(|row| row[1].ends_with(&theirs) && row[2].ends_with(&ours));
    let (_, rx) = row.as_ref().expect("the connection is open")[4].split_once(':').unwrap();
    u64::from_str_radix(rx, 16).unwrap()
}

#[tokio::test]
async fn many_queued_uploads_take_no_more_memory_together_than_they_may() {
    const UPLOADS: usize = 64;
    let gate = Gate::default();
    let held = gate.clone();
    let provider =
        Provider::plain(
            move |seen| {
                if seen.number == 0 { Play::sse().event("one").until(&held).done() } else { ok() }
            },
        )
        .await;
    let setup = Setup::openai(&provider).key(Key::new("a").cap(1)).set("queue.max_wait", "\"1m\"");
    let lessor = setup.set("retry.max_total", "\"8MiB\"").start().await;
    let mut first = lessor.open(chat("gpt-4o-mini")).await;
    first.read_to("one").await;
    let before = lessor.resident_kib();
    let host = lessor.authority();
    let head =
        format!("POST /openai/v1/files HTTP/1.1\r\nHost: {host}\r\nContent-Length: {}\r\n\r\n", 8 << 20);
    let mut queued = Vec::new();
    for _ in 0..UPLOADS {
        let mut raw = lessor.raw().await;
        raw.write(&head).await;
        queued.push(raw);
    }
    lessor.comes_to_queue(UPLOADS).await;
    let part = support::pattern().slice(..128 * 1024);
    for raw in &mut queued {
        // As much as is taken: up to the kernel's buffers, beyond lessor's bounds.
        while tokio::time::timeout(ms(20), raw.0.write_all(&part)).await.is_ok_and(|sent| sent.is_ok()) {}
    }
    let grown = lessor.peak_kib().saturating_sub(before);
    assert!(grown < 64 * 1024, "resident memory grew by {grown} KiB");
    drop(queued);
    gate.open();
    lessor.is_free_within_a_second("a").await;
}

#[tokio::test]
async fn a_queued_upload_of_tiny_chunks_takes_little_memory() {
    const CHUNKS: usize = 300_000;
    let gate = Gate::default();
    let held = gate.clone();
    let provider =
        Provider::plain(
            move |seen| {
                if seen.number == 0 { Play::sse().event("one").until(&held).done() } else { ok() }
            },
        )
        .await;
    let setup = Setup::openai(&provider).key(Key::new("a").cap(1)).set("queue.max_wait", "\"1m\"");
    let lessor = setup.start().await;
    let mut first = lessor.open(chat("gpt-4o-mini")).await;
    first.read_to("one").await;
    let before = lessor.resident_kib();
    let mut queued = lessor.raw().await;
    let host = lessor.authority();
    queued
        .write(format!(
            "POST /openai/v1/files HTTP/1.1\r\nHost: {host}\r\nTransfer-Encoding: chunked\r\n\r\n"
        ))
        .await;
    lessor.comes_to_queue(1).await;
    let (mut from, mut to) = queued.0.into_split();
    let upload = tokio::spawn(async move {
        use tokio::io::AsyncWriteExt as _;
        to.write_all(("1\r\nx\r\n".repeat(CHUNKS) + "0\r\n\r\n").as_bytes()).await.map(|()| to)
    });
    let (ours, theirs) = (from.local_addr().unwrap(), from.peer_addr().unwrap());
    let mut last = u64::MAX;
    eventually("lessor takes no more, or has all", async || {
        let still = std::mem::replace(&mut last, unread(&lessor, ours, theirs)) == last;
        tokio::time::sleep(ms(300)).await; // nothing for so long is a stop
        still.then_some(())
    })
    .await;
    let grown = lessor.peak_kib().saturating_sub(before);
    assert!(grown < 40 * 1024, "resident memory grew by {grown} KiB for {CHUNKS} bytes");
    gate.open();
    first.whole().await.unwrap();
    let mut said = [0; 12];
    let answer = tokio::io::AsyncReadExt::read_exact(&mut from, &mut said);
    // Each chunk goes on by itself, and the double takes each by itself.
    support::within(support::NEVER * 6, "the answer", answer).await.unwrap();
    assert_eq!(String::from_utf8_lossy(&said), "HTTP/1.1 200");
    drop(upload.await.unwrap().unwrap());
    let seen = provider.request(2).await;
    assert!(seen.body == vec![b'x'; CHUNKS], "{} bytes came", seen.body_len);
    let grown = lessor.peak_kib().saturating_sub(before);
    assert!(grown < 40 * 1024, "resident memory grew by {grown} KiB for {CHUNKS} bytes");
}

#[tokio::test]
async fn an_early_answer_reaches_the_client_each_time_also_where_a_reset_follows_at_once() {
    for tls in [false, true] {
        let refused = Play::json(413, &serde_json::json!({"error": {"message": "too large"}}));
        let builder = if tls { Provider::builder() } else { Provider::builder().plain() };
        // Closed with bytes unread, a socket resets its peer.
        let early = move |_: &support::Seen| Some(Play::new().read_at_least(1 << 20).then(refused.clone()));
        let provider = builder.before_body(early).start(openai).await;
        let lessor = start(&provider).await;
        for n in 0..30 {
            let upload = Request::new("POST", "/openai/v1/files").body(patterned(64 << 20));
            let answer = lessor.ask(upload).await;
            let said = (answer.status, answer.json()["error"]["message"].clone());
            assert_eq!(said, (413, "too large".into()), "the {n}th, tls: {tls}");
        }
        lessor.is_free_within_a_second("a").await;
    }
}

#[tokio::test]
async fn an_upload_that_a_provider_resets_leaves_nothing_behind_and_its_client_is_let_go() {
    for tls in [false, true] {
        let builder = if tls { Provider::builder() } else { Provider::builder().plain() };
        let reset = |_: &support::Seen| Some(Play::new().read_at_least(1 << 16).cut(Cut::Reset));
        let provider = builder.before_body(reset).start(openai).await;
        let lessor = start(&provider).await;
        for n in 0..20 {
            let raw = lessor.raw().await;
            let (mut reads, mut writes) = tokio::io::split(raw.0);
            let (host, length) = (lessor.authority(), 64 << 20);
            let head =
                format!("POST /openai/v1/files HTTP/1.1\r\nHost: {host}\r\nContent-Length: {length}\r\n\r\n");
            writes.write_all(head.as_bytes()).await.unwrap();
            // A client that sends on until it is let go.
            let sending = async {
                let chunk = vec![b'x'; 1 << 16];
                while writes.write_all(&chunk).await.is_ok() {}
                std::future::pending().await
            };
            let mut said = Vec::new();
            let reading = async {
                let mut buffer = [0; 4096];
                while let Ok(read) = reads.read(&mut buffer).await
                    && read > 0
                {
                    said.extend_from_slice(&buffer[..read]);
                }
            };
            let what = format!("the end of the {n}th, tls: {tls}");
            let ended = async {
                tokio::select! { () = reading => {}, () = sending => {} }
            };
            within(NEVER, &what, ended).await;
            let said = String::from_utf8_lossy(&said).to_ascii_lowercase();
            let is_right = said.starts_with("http/1.1 502 ") && said.contains("\r\nconnection: close\r\n");
            assert!(is_right, "the {n}th, tls: {tls}: {said}");
        }
        lessor.is_free_within_a_second("a").await;
    }
}

#[tokio::test]
async fn an_early_answer_to_an_upload_says_that_the_connection_ends_with_it() {
    let refused = Play::json(413, &serde_json::json!({"error": {"message": "too large"}}));
    let early = move |seen: &support::Seen| {
        seen.target.contains("early").then(|| Play::new().read_at_least(1 << 16).then(refused.clone()))
    };
    let provider = Provider::builder().plain().before_body(early).start(openai).await;
    let lessor = start(&provider).await;
    // The first is far more than all buffers on the way hold.
    for (path, length, closes) in [("/openai/v1/early", 64 << 20, true), ("/openai/v1/files", 1 << 20, false)]
    {
        let answer = lessor.ask(Request::new("POST", path).body(patterned(length))).await;
        assert_eq!(answer.headers.get("connection").is_some_and(|value| value == "close"), closes, "{path}");
    }
}

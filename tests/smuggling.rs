//! A corpus of requests, and of answers, that readers may take in more than one way.
//!
//! Each request goes in by base URL, in absolute form and inside a tunnel, with another one right behind it.
//! It is refused as its line says, or it reaches the provider as its line says, once, with the leased key
//! alone: the provider's bytes are read by a strict parser of the tests' own (`support/strict.rs`).
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::pedantic, missing_docs, unreachable_pub)]

mod support;

use std::time::Duration;

use support::strict::{self, Request, all};
use support::wiretap::{Heard, Reply, Wiretap};
use support::{Key, Lessor, Raw, Setup};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

/// The secret of the one key.
const SECRET: &str = "sk-the-leased-one";

/// How a request comes in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    BaseUrl,
    Absolute,
    Tunnel,
}

const EVERY: &[Way] = &[Way::BaseUrl, Way::Absolute, Way::Tunnel];
const BASE: &[Way] = &[Way::BaseUrl];
const PROXY: &[Way] = &[Way::Absolute];
const INSIDE: &[Way] = &[Way::Tunnel];

/// What must come of it.
#[derive(Debug, Clone, Copy)]
enum Expect {
    /// lessor's own answer, the connection's end, nothing at the provider.
    Refused(u16, &'static str),
    /// The same answer, and the connection goes on.
    Declined(u16, &'static str),
    /// Its head may have gone out; no whole request has. lessor's own answer, the connection's end.
    Broken(u16, &'static str),
    /// It came as method, target and body, and the connection goes on.
    Served(&'static str, &'static str, &'static str),
    /// It came so, and the connection ends behind it.
    Last(&'static str, &'static str, &'static str),
}

use Expect::{Broken, Declined, Last, Refused, Served};

/// One line of the corpus. In the bytes `@/` begins a target of the provider's, and `{H}` is the host that
/// belongs to the way in.
struct Case(&'static str, Expect, &'static [Way]);

impl Way {
    /// The bytes as they come in this way.
    fn write(self, bytes: &str, lessor: &Lessor) -> Vec<u8> {
        let own = lessor.authority();
        let (before, host) = match self {
            Self::BaseUrl => ("/openai", own.as_str()),
            Self::Absolute => ("http://api.openai.com", "api.openai.com"),
            Self::Tunnel => ("", "api.openai.com"),
        };
        // `\u{80}` stands for a byte that is no text.
        let many: String = (0..200).map(|n| format!("X-{n}: y\r\n")).collect();
        let text = bytes.replace("@/", &format!("{before}/")).replace("{H}", host);
        let text = text.replace("<long>", &"y".repeat(20 << 10)).replace("<many>", &many);
        text.chars()
            .flat_map(|c| if c == '\u{80}' { vec![0x80] } else { c.to_string().into_bytes() })
            .collect()
    }

    async fn connect(self, lessor: &Lessor) -> Raw {
        match self {
            Self::Tunnel => support::tunnel::connect(lessor, "api.openai.com:80").await,
            _ => lessor.raw().await,
        }
    }
}

/// Right behind each request.
const BEHIND: &str = "GET @/v1/behind HTTP/1.1\r\nHost: {H}\r\nConnection: close\r\n\r\n";

async fn lessor(provider: &Wiretap) -> Lessor {
    Setup::new()
        .set("providers.openai.base_url", &format!("{:?}", provider.base_url()))
        .set("timeouts.header", "\"1s\"")
        .set("timeouts.body_idle", "\"1s\"")
        .set("limits.max_header_bytes", "\"16KiB\"")
        .key(Key::new("a").secret(SECRET))
        .start()
        .await
}

fn ok(body: &str) -> Reply {
    let length = body.len();
    Reply {
        bytes: format!("HTTP/1.1 200 OK\r\ncontent-length: {length}\r\n\r\n{body}").into_bytes(),
        close: false,
    }
}

/// Writes all, and reads to the end; a reset counts as one.
async fn exchange(mut raw: Raw, bytes: &[u8]) -> Vec<u8> {
    let (mut read, mut write) = raw.0.split();
    let writing = async {
        // A refusal may come, and with it the end, before all was written.
        let _ = write.write_all(bytes).await;
    };
    let reading = async {
        let mut said = Vec::new();
        let mut some = [0; 16 * 1024];
        while let Ok(n @ 1..) = read.read(&mut some).await {
            said.extend_from_slice(&some[..n]);
        }
        said
    };
    let both = async { tokio::join!(writing, reading).1 };
    tokio::time::timeout(Duration::from_secs(10), both).await.expect("the connection ends")
}

/// What is wrong with a request that reached the provider, wherever it came from.
fn fault(request: &Request) -> Option<String> {
    let credentials =
        ["authorization", "proxy-authorization", "x-api-key", "api-key", "x-goog-api-key", "xi-api-key"];
    let shown: Vec<&str> = credentials.iter().flat_map(|name| all(&request.headers, name)).collect();
    let bearer = format!("Bearer {SECRET}");
    if shown != [&bearer] || all(&request.headers, "authorization").len() != 1 {
        return Some(format!("credentials {shown:?}"));
    }
    let own = request.headers.iter().chain(&request.trailers).any(|(name, _)| name.starts_with("x-lessor"));
    let hop = ["connection", "keep-alive", "proxy-connection", "upgrade", "expect", "http2-settings"];
    // `trailers` is the one word of TE that may go on: it says that the client wants them.
    let te = all(&request.headers, "te").iter().any(|value| *value != "trailers");
    if own || te || hop.iter().any(|name| !all(&request.headers, name).is_empty()) {
        return Some(format!("fields that end here: {:?}", request.headers));
    }
    let never = |name: &str| {
        credentials.contains(&name) || ["host", "content-length", "transfer-encoding"].contains(&name)
    };
    if request.trailers.iter().any(|(name, _)| never(&name.to_ascii_lowercase())) {
        return Some(format!("trailers {:?}", request.trailers));
    }
    if request.target.contains("key=") {
        return Some(format!("a credential in {}", request.target));
    }
    None
}

/// Sends one case by one way; what is wrong with what came of it.
async fn play(case: &Case, way: Way, lessor: &Lessor, provider: &Wiretap) -> Result<(), String> {
    let bytes = way.write(&format!("{}{BEHIND}", case.0), lessor);
    let said = exchange(way.connect(lessor).await, &bytes).await;
    let mut heard = provider.heard().await;
    if matches!(case.1, Broken(..)) && heard.broken.is_empty() {
        // What was begun may still be on its way.
        tokio::time::sleep(Duration::from_millis(20)).await;
        heard.broken.extend(provider.heard().await.broken);
    }
    let method = case.0.trim_start().split([' ', '\t']).next().unwrap_or("GET");
    let shown = || format!("\n  client: {:?}\n  provider: {heard:?}", String::from_utf8_lossy(&said));
    let (answers, left) = strict::responses(&said, &[method]).map_err(|why| format!("{why}{}", shown()))?;
    let statuses: Vec<(u16, &str)> = answers
        .iter()
        .map(|answer| (answer.status, all(&answer.headers, "x-lessor-error").first().copied().unwrap_or("")))
        .collect();
    let sent: Vec<(&str, &str, &[u8])> =
        heard.whole.iter().map(|it| (it.method.as_str(), it.target.as_str(), it.body.as_slice())).collect();
    let behind = ("GET", "/v1/behind", &b""[..]);
    let (want_answers, want_sent) = match case.1 {
        Refused(status, code) | Broken(status, code) => (vec![(status, code)], vec![]),
        Declined(status, code) => (vec![(status, code), (200, "")], vec![behind]),
        Served(method, target, body) => {
            (vec![(200, ""), (200, "")], vec![(method, target, body.as_bytes()), behind])
        }
        Last(method, target, body) => (vec![(200, "")], vec![(method, target, body.as_bytes())]),
    };
    if statuses != want_answers || left {
        return Err(format!("answered {statuses:?}, not {want_answers:?} (a part more: {left}){}", shown()));
    }
    if sent != want_sent || !heard.bad.is_empty() {
        return Err(format!("the provider was sent {sent:?}, not {want_sent:?}{}", shown()));
    }
    if !heard.broken.is_empty() && !matches!(case.1, Broken(..)) {
        return Err(format!("a request was begun{}", shown()));
    }
    match heard.whole.iter().find_map(fault) {
        Some(why) => Err(format!("{why}{}", shown())),
        None => Ok(()),
    }
}

async fn play_all(cases: &[Case]) {
    let provider = Wiretap::start(|_| ok("ok")).await;
    let lessor = lessor(&provider).await;
    let mut wrong = Vec::new();
    for case in cases {
        for way in case.2 {
            if let Err(why) = play(case, *way, &lessor, &provider).await {
                wrong.push(format!("{way:?} {:?}: {why}", &case.0[..case.0.len().min(300)]));
            }
        }
    }
    assert_eq!(lessor.in_use("a").await, 0, "a slot is still taken");
    assert!(wrong.is_empty(), "{} of the corpus:\n{}", wrong.len(), wrong.join("\n\n"));
    let left: Heard = provider.heard().await;
    assert!(left.whole.is_empty() && left.broken.is_empty() && left.bad.is_empty(), "{left:?}");
}

#[tokio::test]
async fn a_length_is_one_number_or_the_request_is_refused() {
    play_all(&[
        Case("POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", Refused(400, "bad_request"), EVERY),
        Case("POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nTransfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n", Refused(400, "bad_request"), EVERY),
        Case("POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nContent-Length: 0\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n", Refused(400, "bad_request"), EVERY),
        Case("POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nTransfer-Encoding: chunked\r\nContent-Length: 0\r\n\r\n5\r\nhello\r\n0\r\n\r\n", Refused(400, "bad_request"), EVERY),
        Case("POST @/v1/x HTTP/1.1\r\nHost: {H}\r\ncontent-length: 5\r\nTRANSFER-ENCODING: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n", Refused(400, "bad_request"), EVERY),
        Case("POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhello", Refused(400, "bad_request"), EVERY),
        Case("POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nContent-Length: 6\r\nContent-Length: 5\r\n\r\nhello!", Refused(400, "bad_request"), EVERY),
        Case("POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nContent-Length: 5, 5\r\n\r\nhello", Refused(400, "bad_request"), EVERY),
        Case("POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nContent-Length: 5, 6\r\n\r\nhello", Refused(400, "bad_request"), EVERY),
        Case("POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nContent-Length: +5\r\n\r\nhello", Refused(400, "bad_request"), EVERY),
        Case("POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nContent-Length: -5\r\n\r\nhello", Refused(400, "bad_request"), EVERY),
        Case("POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nContent-Length: 0x5\r\n\r\nhello", Refused(400, "bad_request"), EVERY),
        Case("POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nContent-Length: 5 5\r\n\r\nhello", Refused(400, "bad_request"), EVERY),
        Case("POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nContent-Length: 5;5\r\n\r\nhello", Refused(400, "bad_request"), EVERY),
        Case("POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nContent-Length: 5.0\r\n\r\nhello", Refused(400, "bad_request"), EVERY),
        Case("POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nContent-Length: 1e1\r\n\r\nhello", Refused(400, "bad_request"), EVERY),
        Case("POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nContent-Length: five\r\n\r\nhello", Refused(400, "bad_request"), EVERY),
        Case("POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nContent-Length: \r\n\r\nhello", Refused(400, "bad_request"), EVERY),
        Case("POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nContent-Length: \u{ff15}\r\n\r\nhello", Refused(400, "bad_request"), EVERY),
        Case("POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nContent-Length: 99999999999999999999\r\n\r\nhello", Refused(400, "bad_request"), EVERY),
        Case("POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nContent-Length: 5\0\r\n\r\nhello", Refused(400, "bad_request"), EVERY),
        Case("POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nContent-Length: 5\x0b\r\n\r\nhello", Refused(400, "bad_request"), EVERY),
        Case("POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nContent-Length : 5\r\n\r\nhello", Refused(400, "bad_request"), EVERY),
        Case("POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nContent-Length\t: 5\r\n\r\nhello", Refused(400, "bad_request"), EVERY),
        Case("POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nContent-Length:\r\n 5\r\n\r\nhello", Refused(400, "bad_request"), EVERY),
        Case("POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nX: y\r\n Content-Length: 5\r\n\r\nhello", Refused(400, "bad_request"), EVERY),
        Case("POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nContent-Length: 5\r\nContent-Length: 5\r\n\r\nhello", Served("POST", "/v1/x", "hello"), EVERY),
        Case("POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nContent-Length: 05\r\n\r\nhello", Served("POST", "/v1/x", "hello"), EVERY),
        Case("POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nContent-Length:5\r\n\r\nhello", Served("POST", "/v1/x", "hello"), EVERY),
        Case("POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nContent-Length: \t 5 \t\r\n\r\nhello", Served("POST", "/v1/x", "hello"), EVERY),
        Case("POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nCONTENT-LENGTH: 5\r\n\r\nhello", Served("POST", "/v1/x", "hello"), EVERY),
        Case("POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nContent-Length: 0\r\n\r\n", Served("POST", "/v1/x", ""), EVERY),
        Case("POST @/v1/x HTTP/1.1\r\nHost: {H}\r\n\r\n", Served("POST", "/v1/x", ""), EVERY),
        Case("POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nContent_Length: 7\r\nContent-Length: 5\r\n\r\nhello", Served("POST", "/v1/x", "hello"), EVERY),
        Case("GET @/v1/x HTTP/1.1\r\nHost: {H}\r\nContent-Length: 5\r\n\r\nhello", Served("GET", "/v1/x", "hello"), EVERY),
        Case("DELETE @/v1/x HTTP/1.1\r\nHost: {H}\r\nContent-Length: 5\r\n\r\nhello", Served("DELETE", "/v1/x", "hello"), EVERY),
        Case("HEAD @/v1/x HTTP/1.1\r\nHost: {H}\r\nContent-Length: 5\r\n\r\nhello", Served("HEAD", "/v1/x", "hello"), EVERY),
    ])
    .await;
}

#[tokio::test]
async fn a_transfer_coding_is_one_chunked_or_the_request_is_refused() {
    play_all(&[
        Case("POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n", Refused(501, "upgrade_unsupported"), EVERY),
        Case("POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nTransfer-Encoding: chunked, chunked\r\n\r\n0\r\n\r\n", Refused(501, "upgrade_unsupported"), EVERY),
        Case("POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nTransfer-Encoding: ,chunked\r\n\r\n0\r\n\r\n", Refused(501, "upgrade_unsupported"), EVERY),
        Case("POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nTransfer-Encoding: chunked,\r\n\r\n0\r\n\r\n", Refused(400, "bad_request"), EVERY),
        Case("POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nTransfer-Encoding: chunked, gzip\r\n\r\n0\r\n\r\n", Refused(400, "bad_request"), EVERY),
        Case("POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nTransfer-Encoding: identity\r\n\r\n0\r\n\r\n", Refused(400, "bad_request"), EVERY),
        Case("POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nTransfer-Encoding: gzip\r\n\r\n0\r\n\r\n", Refused(400, "bad_request"), EVERY),
        Case("POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nTransfer-Encoding: xchunked\r\n\r\n0\r\n\r\n", Refused(400, "bad_request"), EVERY),
        Case("POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nTransfer-Encoding: chunkedx\r\n\r\n0\r\n\r\n", Refused(400, "bad_request"), EVERY),
        Case("POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nTransfer-Encoding: chunked;q=1\r\n\r\n0\r\n\r\n", Refused(400, "bad_request"), EVERY),
        Case("POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nTransfer-Encoding: chunked; foo=bar\r\n\r\n0\r\n\r\n", Refused(400, "bad_request"), EVERY),
        Case("POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nTransfer-Encoding: \"chunked\"\r\n\r\n0\r\n\r\n", Refused(400, "bad_request"), EVERY),
        Case("POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nTransfer-Encoding: chun ked\r\n\r\n0\r\n\r\n", Refused(400, "bad_request"), EVERY),
        Case("POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nTransfer-Encoding: cow\r\n\r\n0\r\n\r\n", Refused(400, "bad_request"), EVERY),
        Case("POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nTransfer-Encoding: chunked,identity\r\n\r\n0\r\n\r\n", Refused(400, "bad_request"), EVERY),
        Case("POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nTransfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", Refused(501, "upgrade_unsupported"), EVERY),
        Case("POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nTransfer-Encoding: gzip\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", Refused(501, "upgrade_unsupported"), EVERY),
        Case("POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nTransfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n\r\n0\r\n\r\n", Refused(400, "bad_request"), EVERY),
        Case("POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nTransfer-Encoding: \r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", Refused(501, "upgrade_unsupported"), EVERY),
        Case("POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nTransfer-Encoding : chunked\r\n\r\n0\r\n\r\n", Refused(400, "bad_request"), EVERY),
        Case("POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nTransfer-Encoding\t: chunked\r\n\r\n0\r\n\r\n", Refused(400, "bad_request"), EVERY),
        Case("POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nTransfer-Encoding:\r\n chunked\r\n\r\n0\r\n\r\n", Refused(400, "bad_request"), EVERY),
        Case("POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nTransfer-Encoding: \x0bchunked\r\n\r\n0\r\n\r\n", Refused(400, "bad_request"), EVERY),
        Case("POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nTransfer-Encoding: chunked\0\r\n\r\n0\r\n\r\n", Refused(400, "bad_request"), EVERY),
        Case("POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nTransfer-Encoding: chunked\rX: y\r\n\r\n0\r\n\r\n", Refused(400, "bad_request"), EVERY),
        Case("POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nX: y\n Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n", Refused(400, "bad_request"), EVERY),
        Case("POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nTransfer Encoding: chunked\r\n\r\n0\r\n\r\n", Refused(400, "bad_request"), EVERY),
        Case("POST @/v1/x HTTP/1.1\r\n Transfer-Encoding: chunked\r\nHost: {H}\r\n\r\n0\r\n\r\n", Refused(400, "bad_request"), EVERY),
        Case("POST @/v1/x HTTP/1.0\r\nHost: {H}\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n", Refused(400, "bad_request"), EVERY),
        Case("POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n", Served("POST", "/v1/x", "hello"), EVERY),
        Case("POST @/v1/x HTTP/1.1\r\nHost: {H}\r\ntransfer-encoding:CHUNKED\r\n\r\n5\r\nhello\r\n0\r\n\r\n", Served("POST", "/v1/x", "hello"), EVERY),
        Case("POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nTransfer-Encoding: \tchunked\t \r\n\r\n5\r\nhello\r\n0\r\n\r\n", Served("POST", "/v1/x", "hello"), EVERY),
        Case("POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", Served("POST", "/v1/x", ""), EVERY),
        Case("GET @/v1/x HTTP/1.1\r\nHost: {H}\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n", Served("GET", "/v1/x", "hello"), EVERY),
        Case("POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nTransfer_Encoding: chunked\r\nContent-Length: 5\r\n\r\nhello", Served("POST", "/v1/x", "hello"), EVERY),
        Case("POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nX-Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\nhello", Served("POST", "/v1/x", "hello"), EVERY),
    ])
    .await;
}

#[tokio::test]
async fn chunks_are_taken_apart_and_put_together_anew_or_the_request_breaks() {
    play_all(&[
        Case("POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nTransfer-Encoding: chunked\r\n\r\n5;ext=1\r\nhello\r\n0\r\n\r\n", Served("POST", "/v1/x", "hello"), EVERY),
        Case("POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nTransfer-Encoding: chunked\r\n\r\n5;ext=\"a b\"\r\nhello\r\n0;last\r\n\r\n", Served("POST", "/v1/x", "hello"), EVERY),
        Case("POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nTransfer-Encoding: chunked\r\n\r\n5 ;ext\r\nhello\r\n0\r\n\r\n", Served("POST", "/v1/x", "hello"), EVERY),
        Case("POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nTransfer-Encoding: chunked\r\n\r\n0005\r\nhello\r\n000\r\n\r\n", Served("POST", "/v1/x", "hello"), EVERY),
        Case("POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nTransfer-Encoding: chunked\r\n\r\nA\r\n0123456789\r\n0\r\n\r\n", Served("POST", "/v1/x", "0123456789"), EVERY),
        Case("POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nh\r\n4\r\nello\r\n0\r\n\r\n", Served("POST", "/v1/x", "hello"), EVERY),
        Case("POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\nX-Plain: 1\r\n\r\n", Served("POST", "/v1/x", "hello"), EVERY),
        Case("POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\nAuthorization: Bearer mine\r\n\r\n", Served("POST", "/v1/x", "hello"), EVERY),
        Case("POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nTrailer: Authorization, X-Api-Key\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\nAuthorization: Bearer mine\r\nX-Api-Key: k\r\n\r\n", Served("POST", "/v1/x", "hello"), EVERY),
        Case("POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\nContent-Length: 50\r\n\r\n", Served("POST", "/v1/x", "hello"), EVERY),
        Case("POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nTrailer: Transfer-Encoding, Host\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\nTransfer-Encoding: chunked\r\nHost: evil.example\r\n\r\n", Served("POST", "/v1/x", "hello"), EVERY),
        Case("POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nTrailer: X-Lessor-Key\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\nX-Lessor-Key: b\r\n\r\n", Served("POST", "/v1/x", "hello"), EVERY),
        Case("POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nTransfer-Encoding: chunked\r\n\r\n0x5\r\nhello\r\n0\r\n\r\n", Broken(400, "bad_request"), EVERY),
        Case("POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nTransfer-Encoding: chunked\r\n\r\n+5\r\nhello\r\n0\r\n\r\n", Broken(400, "bad_request"), EVERY),
        Case("POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nTransfer-Encoding: chunked\r\n\r\n-5\r\nhello\r\n0\r\n\r\n", Broken(400, "bad_request"), EVERY),
        Case("POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nTransfer-Encoding: chunked\r\n\r\n5g\r\nhello\r\n0\r\n\r\n", Broken(400, "bad_request"), EVERY),
        Case("POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nTransfer-Encoding: chunked\r\n\r\n 5\r\nhello\r\n0\r\n\r\n", Broken(400, "bad_request"), EVERY),
        Case("POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nTransfer-Encoding: chunked\r\n\r\n\r\nhello\r\n0\r\n\r\n", Broken(400, "bad_request"), EVERY),
        Case("POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nTransfer-Encoding: chunked\r\n\r\n5\nhello\r\n0\r\n\r\n", Broken(400, "bad_request"), EVERY),
        Case("POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nTransfer-Encoding: chunked\r\n\r\n5\rhello\r\n0\r\n\r\n", Broken(400, "bad_request"), EVERY),
        Case("POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nTransfer-Encoding: chunked\r\n\r\n5;a\nb\r\nhello\r\n0\r\n\r\n", Broken(400, "bad_request"), EVERY),
        Case("POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nTransfer-Encoding: chunked\r\n\r\n5;a\rb\r\nhello\r\n0\r\n\r\n", Broken(400, "bad_request"), EVERY),
        Case("POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello0\r\n\r\n", Broken(400, "bad_request"), EVERY),
        Case("POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\n0\r\n\r\n", Broken(400, "bad_request"), EVERY),
        Case("POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhelloworld\r\n0\r\n\r\n", Broken(400, "bad_request"), EVERY),
        Case("POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nTransfer-Encoding: chunked\r\n\r\n6\r\nhello\r\n0\r\n\r\n", Broken(400, "bad_request"), EVERY),
        Case("POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nTransfer-Encoding: chunked\r\n\r\nfffffffffffffffff\r\nhello\r\n0\r\n\r\n", Broken(400, "bad_request"), EVERY),
        Case("POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nTransfer-Encoding: chunked\r\n\r\n10000000000000005\r\nhello\r\n0\r\n\r\n", Broken(400, "bad_request"), EVERY),
        Case("POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\nX : y\r\n\r\n", Broken(400, "bad_request"), EVERY),
        Case("POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\nno field\r\n\r\n", Broken(400, "bad_request"), EVERY),
        Case("POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\nX: a\0b\r\n\r\n", Broken(400, "bad_request"), EVERY),
        Case("POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\n\n", Broken(400, "bad_request"), EVERY),
        Case("POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\n", Broken(400, "bad_request"), EVERY),
        Case("POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nTransfer-Encoding: chunked\r\n\r\n5;<long>\r\nhello\r\n0\r\n\r\n", Broken(400, "bad_request"), EVERY),
    ])
    .await;
}

#[tokio::test]
async fn a_head_has_one_reading_or_is_refused() {
    play_all(&[
        Case("GET @/v1/x HTTP/1.1\r\n\r\n", Refused(400, "bad_request"), EVERY),
        Case("GET @/v1/x HTTP/1.1\r\nHost: {H}\r\nHost: {H}\r\n\r\n", Refused(400, "bad_request"), EVERY),
        Case(
            "GET @/v1/x HTTP/1.1\r\nHost: {H}\r\nHost: evil.example\r\n\r\n",
            Refused(400, "bad_request"),
            EVERY,
        ),
        Case(
            "GET @/v1/x HTTP/1.1\r\nHost: evil.example\r\nHost: {H}\r\n\r\n",
            Refused(400, "bad_request"),
            EVERY,
        ),
        Case("GET @/v1/x HTTP/1.1\r\nHost: evil.example\r\n\r\n", Declined(403, "origin_denied"), BASE),
        Case("GET @/v1/x HTTP/1.1\r\nHost: evil.example\r\n\r\n", Served("GET", "/v1/x", ""), PROXY),
        Case("GET @/v1/x HTTP/1.1\r\nHost: evil.example\r\n\r\n", Declined(421, "misdirected"), INSIDE),
        Case("GET @/v1/x HTTP/1.1\r\nHost: \r\n\r\n", Declined(403, "origin_denied"), BASE),
        Case("GET @/v1/x HTTP/1.1\r\nHost: \r\n\r\n", Declined(421, "misdirected"), INSIDE),
        Case("GET @/v1/x HTTP/1.1\r\nHost: {H}, evil.example\r\n\r\n", Declined(403, "origin_denied"), BASE),
        Case("GET @/v1/x HTTP/1.1\r\nHost: {H}, evil.example\r\n\r\n", Declined(421, "misdirected"), INSIDE),
        Case("GET @/v1/x HTTP/1.1\r\nHost: user:pw\u{40}{H}\r\n\r\n", Declined(403, "origin_denied"), BASE),
        Case("GET @/v1/x HTTP/1.1\r\nHost: {H}/path\r\n\r\n", Declined(403, "origin_denied"), BASE),
        Case("GET @/v1/x HTTP/1.1\r\nHost: {H}/path\r\n\r\n", Declined(421, "misdirected"), INSIDE),
        Case("GET @/v1/x HTTP/1.1\r\nHost: {H}\x0b\r\n\r\n", Refused(400, "bad_request"), EVERY),
        Case("GET @/v1/x HTTP/1.1\r\nHost : {H}\r\n\r\n", Refused(400, "bad_request"), EVERY),
        Case("GET @/v1/x HTTP/1.1\r\nHost:\r\n {H}\r\n\r\n", Refused(400, "bad_request"), EVERY),
        Case("GET @/v1/x HTTP/1.1\r\nHost: {H}\r\nX : y\r\n\r\n", Refused(400, "bad_request"), EVERY),
        Case(
            "GET @/v1/x HTTP/1.1\r\nHost: {H}\r\nX: a\r\n folded\r\n\r\n",
            Refused(400, "bad_request"),
            EVERY,
        ),
        Case(
            "GET @/v1/x HTTP/1.1\r\nHost: {H}\r\nX: a\r\n\tfolded\r\n\r\n",
            Refused(400, "bad_request"),
            EVERY,
        ),
        Case(
            "GET @/v1/x HTTP/1.1\r\n folded: first\r\nHost: {H}\r\n\r\n",
            Refused(400, "bad_request"),
            EVERY,
        ),
        Case("GET @/v1/x HTTP/1.1\r\nHost: {H}\r\nX: a\0b\r\n\r\n", Refused(400, "bad_request"), EVERY),
        Case("GET @/v1/x HTTP/1.1\r\nHost: {H}\r\nX\0: a\r\n\r\n", Refused(400, "bad_request"), EVERY),
        Case("GET @/v1/x HTTP/1.1\r\nHost: {H}\r\nX: a\rb\r\n\r\n", Refused(400, "bad_request"), EVERY),
        Case("GET @/v1/x HTTP/1.1\r\nHost: {H}\r\nX: a\r\rGET /\r\n\r\n", Refused(400, "bad_request"), EVERY),
        Case("GET @/v1/x HTTP/1.1\r\nHost: {H}\r\nno colon\r\n\r\n", Refused(400, "bad_request"), EVERY),
        Case("GET @/v1/x HTTP/1.1\r\nHost: {H}\r\n: empty\r\n\r\n", Refused(400, "bad_request"), EVERY),
        Case("GET @/v1/x HTTP/1.1\r\nHost: {H}\r\nX(: y\r\n\r\n", Refused(400, "bad_request"), EVERY),
        Case("GET @/v1/x HTTP/1.1\r\nHost: {H}\r\nX\u{80}: y\r\n\r\n", Refused(400, "bad_request"), EVERY),
        Case("GET @/v1/x HTTP/1.1\r\nHost: {H}\r\nX y: z\r\n\r\n", Refused(400, "bad_request"), EVERY),
        Case("GET @/v1/x HTTP/1.1\r\nHost: {H}\r\nX: \x7f\r\n\r\n", Refused(400, "bad_request"), EVERY),
        Case("GET @/v1/x HTTP/1.1\r\nHost: {H}\r\nX: a\u{80}b\r\n\r\n", Served("GET", "/v1/x", ""), EVERY),
        Case("GET @/v1/x HTTP/1.1\r\nHost: {H}\r\nX:\r\nY: \t \r\n\r\n", Served("GET", "/v1/x", ""), EVERY),
        Case("GET @/v1/x HTTP/1.1\nHost: {H}\n\n", Served("GET", "/v1/x", ""), EVERY),
        Case("GET @/v1/x HTTP/1.1\r\nHost: {H}\r\nX: y\n\n", Served("GET", "/v1/x", ""), EVERY),
        Case("\r\n\r\nGET @/v1/x HTTP/1.1\r\nHost: {H}\r\n\r\n", Served("GET", "/v1/x", ""), EVERY),
        Case("GET  @/v1/x HTTP/1.1\r\nHost: {H}\r\n\r\n", Refused(400, "bad_request"), EVERY),
        Case("GET @/v1/x  HTTP/1.1\r\nHost: {H}\r\n\r\n", Refused(400, "bad_request"), EVERY),
        Case("GET\t@/v1/x\tHTTP/1.1\r\nHost: {H}\r\n\r\n", Refused(400, "bad_request"), EVERY),
        Case("GET @/v1/x HTTP/1.1 \r\nHost: {H}\r\n\r\n", Refused(400, "bad_request"), EVERY),
        Case(" GET @/v1/x HTTP/1.1\r\nHost: {H}\r\n\r\n", Refused(400, "bad_request"), EVERY),
        Case("GET @/v1/x\r\nHost: {H}\r\n\r\n", Refused(400, "bad_request"), EVERY),
        Case("GET @/v1/x HTTP/0.9\r\nHost: {H}\r\n\r\n", Refused(400, "bad_request"), EVERY),
        Case("GET @/v1/x HTTP/1.2\r\nHost: {H}\r\n\r\n", Refused(400, "bad_request"), EVERY),
        Case("GET @/v1/x HTTP/1.10\r\nHost: {H}\r\n\r\n", Refused(400, "bad_request"), EVERY),
        Case("GET @/v1/x HTTP/2.0\r\nHost: {H}\r\n\r\n", Refused(400, "bad_request"), EVERY),
        Case("GET @/v1/x http/1.1\r\nHost: {H}\r\n\r\n", Refused(400, "bad_request"), EVERY),
        Case("GET @/v1/x HTTP/1,1\r\nHost: {H}\r\n\r\n", Refused(400, "bad_request"), EVERY),
        Case("GET @/v1/x HTTP/1.1\rX: y\r\nHost: {H}\r\n\r\n", Refused(400, "bad_request"), EVERY),
        Case("GET @/v1/x HTTP/1.0\r\nHost: {H}\r\n\r\n", Last("GET", "/v1/x", ""), EVERY),
        Case(
            "POST @/v1/x HTTP/1.0\r\nHost: {H}\r\nContent-Length: 5\r\n\r\nhello",
            Last("POST", "/v1/x", "hello"),
            EVERY,
        ),
        Case(
            "GET @/v1/x HTTP/1.1\r\nHost: {H}\r\nX-Long: <long>\r\n\r\n",
            Refused(431, "header_too_large"),
            EVERY,
        ),
        Case("GET @/v1/x HTTP/1.1\r\nHost: {H}\r\n<many>\r\n", Refused(431, "header_too_large"), EVERY),
        Case("GET @/v1/<long> HTTP/1.1\r\nHost: {H}\r\n\r\n", Refused(431, "header_too_large"), EVERY),
    ])
    .await;
}

#[tokio::test]
async fn a_target_leads_to_the_provider_as_it_is_or_nowhere() {
    play_all(&[
        Case("OPTIONS * HTTP/1.1\r\nHost: {H}\r\n\r\n", Declined(404, "unknown_provider"), BASE),
        Case("OPTIONS * HTTP/1.1\r\nHost: {H}\r\n\r\n", Refused(400, "bad_request"), INSIDE),
        Case("OPTIONS @/v1/x HTTP/1.1\r\nHost: {H}\r\n\r\n", Served("OPTIONS", "/v1/x", ""), EVERY),
        Case(
            "GET //evil.example/v1/x HTTP/1.1\r\nHost: {H}\r\n\r\n",
            Declined(404, "unknown_provider"),
            BASE,
        ),
        Case(
            "GET //evil.example/v1/x HTTP/1.1\r\nHost: {H}\r\n\r\n",
            Served("GET", "//evil.example/v1/x", ""),
            INSIDE,
        ),
        Case(
            "GET @//evil.example/v1/x HTTP/1.1\r\nHost: {H}\r\n\r\n",
            Served("GET", "//evil.example/v1/x", ""),
            EVERY,
        ),
        Case(
            "GET /\\\\evil.example/v1/x HTTP/1.1\r\nHost: {H}\r\n\r\n",
            Declined(404, "unknown_provider"),
            BASE,
        ),
        Case(
            "GET /\\\\evil.example/v1/x HTTP/1.1\r\nHost: {H}\r\n\r\n",
            Served("GET", "/\\\\evil.example/v1/x", ""),
            INSIDE,
        ),
        Case("GET @/v1/x#fragment HTTP/1.1\r\nHost: {H}\r\n\r\n", Served("GET", "/v1/x", ""), EVERY),
        Case("GET @/v1/x?a=b#c?key=d HTTP/1.1\r\nHost: {H}\r\n\r\n", Served("GET", "/v1/x?a=b", ""), EVERY),
        Case("GET @/v1/a b HTTP/1.1\r\nHost: {H}\r\n\r\n", Refused(400, "bad_request"), EVERY),
        Case("GET @/v1/a\0b HTTP/1.1\r\nHost: {H}\r\n\r\n", Refused(400, "bad_request"), EVERY),
        Case("GET @/v1/a\tb HTTP/1.1\r\nHost: {H}\r\n\r\n", Refused(400, "bad_request"), EVERY),
        Case("GET @/v1/a%00b HTTP/1.1\r\nHost: {H}\r\n\r\n", Served("GET", "/v1/a%00b", ""), EVERY),
        Case(
            "GET @/v1/a%0d%0aHost:%20evil HTTP/1.1\r\nHost: {H}\r\n\r\n",
            Served("GET", "/v1/a%0d%0aHost:%20evil", ""),
            EVERY,
        ),
        Case("GET @/v1/%zz% HTTP/1.1\r\nHost: {H}\r\n\r\n", Served("GET", "/v1/%zz%", ""), EVERY),
        Case("GET @/v1/../x HTTP/1.1\r\nHost: {H}\r\n\r\n", Refused(400, "bad_request"), EVERY),
        Case("GET @/v1/%2e%2E%2fx HTTP/1.1\r\nHost: {H}\r\n\r\n", Refused(400, "bad_request"), EVERY),
        Case("GET @/v1/.%2e;p/x HTTP/1.1\r\nHost: {H}\r\n\r\n", Refused(400, "bad_request"), EVERY),
        Case(
            "GET @/v1/x?key=mine&a=1&%6bey=two HTTP/1.1\r\nHost: {H}\r\n\r\n",
            Served("GET", "/v1/x?a=1", ""),
            EVERY,
        ),
        Case(
            "GET @/v1/x?a=%0d%0aX:y&? HTTP/1.1\r\nHost: {H}\r\n\r\n",
            Served("GET", "/v1/x?a=%0d%0aX:y&?", ""),
            EVERY,
        ),
        Case(
            "GET http://user:pw\u{40}api.openai.com/v1/x HTTP/1.1\r\nHost: {H}\r\n\r\n",
            Refused(400, "bad_request"),
            PROXY,
        ),
        Case(
            "GET http://api.openai.com\u{40}evil.example/v1/x HTTP/1.1\r\nHost: {H}\r\n\r\n",
            Refused(400, "bad_request"),
            PROXY,
        ),
        Case(
            "GET HTTP://API.OpenAI.com/v1/x HTTP/1.1\r\nHost: {H}\r\n\r\n",
            Served("GET", "/v1/x", ""),
            PROXY,
        ),
        Case(
            "GET http://api.openai.com./v1/x HTTP/1.1\r\nHost: {H}\r\n\r\n",
            Served("GET", "/v1/x", ""),
            PROXY,
        ),
        Case("GET http://api.openai.com HTTP/1.1\r\nHost: {H}\r\n\r\n", Served("GET", "/", ""), PROXY),
        Case(
            "GET http://api.openai.com?a=1 HTTP/1.1\r\nHost: {H}\r\n\r\n",
            Served("GET", "/?a=1", ""),
            PROXY,
        ),
        Case(
            "GET http://api.openai.com:99999/v1/x HTTP/1.1\r\nHost: {H}\r\n\r\n",
            Refused(400, "bad_request"),
            PROXY,
        ),
        Case(
            "GET http://api.openai.com:8080/v1/x HTTP/1.1\r\nHost: {H}\r\n\r\n",
            Declined(403, "destination_denied"),
            PROXY,
        ),
        Case(
            "GET ftp://api.openai.com/v1/x HTTP/1.1\r\nHost: {H}\r\n\r\n",
            Refused(400, "bad_request"),
            PROXY,
        ),
        Case(
            "GET https://api.openai.com/v1/x HTTP/1.1\r\nHost: {H}\r\n\r\n",
            Served("GET", "/v1/x", ""),
            PROXY,
        ),
        Case(
            "GET http:/api.openai.com/v1/x HTTP/1.1\r\nHost: {H}\r\n\r\n",
            Refused(400, "bad_request"),
            PROXY,
        ),
        Case("GET http:///v1/x HTTP/1.1\r\nHost: {H}\r\n\r\n", Refused(400, "bad_request"), PROXY),
        Case(
            "GET http://evil.example/v1/x HTTP/1.1\r\nHost: {H}\r\n\r\n",
            Declined(421, "misdirected"),
            INSIDE,
        ),
        Case("GET api.openai.com/v1/x HTTP/1.1\r\nHost: {H}\r\n\r\n", Refused(400, "bad_request"), EVERY),
        Case("get @/v1/x HTTP/1.1\r\nHost: {H}\r\n\r\n", Served("get", "/v1/x", ""), EVERY),
        Case("PROPFIND @/v1/x HTTP/1.1\r\nHost: {H}\r\n\r\n", Served("PROPFIND", "/v1/x", ""), EVERY),
        Case("M-SEARCH @/v1/x HTTP/1.1\r\nHost: {H}\r\n\r\n", Served("M-SEARCH", "/v1/x", ""), EVERY),
        Case("G(T @/v1/x HTTP/1.1\r\nHost: {H}\r\n\r\n", Refused(400, "bad_request"), EVERY),
        Case("GET\0 @/v1/x HTTP/1.1\r\nHost: {H}\r\n\r\n", Refused(400, "bad_request"), EVERY),
        Case("TRACE @/v1/x HTTP/1.1\r\nHost: {H}\r\n\r\n", Declined(405, "method_denied"), EVERY),
        Case(
            "TRACE @/v1/x HTTP/1.1\r\nHost: {H}\r\nContent-Length: 5\r\n\r\nhello",
            Declined(405, "method_denied"),
            EVERY,
        ),
        Case(
            "CONNECT api.openai.com:80 HTTP/1.1\r\nHost: api.openai.com:80\r\n\r\n",
            Refused(405, "method_denied"),
            INSIDE,
        ),
        Case(
            "CONNECT 127.0.0.1:1 HTTP/1.1\r\nHost: 127.0.0.1:1\r\n\r\n",
            Refused(405, "method_denied"),
            INSIDE,
        ),
        Case("CONNECT api.openai.com HTTP/1.1\r\nHost: x\r\n\r\n", Refused(400, "bad_request"), BASE),
        Case("CONNECT api.openai.com:0 HTTP/1.1\r\nHost: x\r\n\r\n", Refused(400, "bad_request"), BASE),
        Case(
            "CONNECT u\u{40}api.openai.com:80 HTTP/1.1\r\nHost: x\r\n\r\n",
            Refused(400, "bad_request"),
            BASE,
        ),
        Case("CONNECT /v1/x HTTP/1.1\r\nHost: {H}\r\n\r\n", Refused(400, "bad_request"), BASE),
        Case("CONNECT /v1/x HTTP/1.1\r\nHost: {H}\r\n\r\n", Refused(405, "method_denied"), INSIDE),
        Case(
            "CONNECT http://api.openai.com/ HTTP/1.1\r\nHost: {H}\r\n\r\n",
            Refused(400, "bad_request"),
            BASE,
        ),
    ])
    .await;
}

#[tokio::test]
async fn fields_that_end_here_end_here_and_one_credential_leaves() {
    play_all(&[
        Case("POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nConnection: authorization\r\nAuthorization: Bearer mine\r\nX-Y: z\r\nContent-Length: 5\r\n\r\nhello", Served("POST", "/v1/x", "hello"), EVERY),
        Case("POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nConnection: host\r\nAuthorization: Bearer mine\r\nX-Y: z\r\nContent-Length: 5\r\n\r\nhello", Served("POST", "/v1/x", "hello"), EVERY),
        Case("POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nConnection: content-length\r\nAuthorization: Bearer mine\r\nX-Y: z\r\nContent-Length: 5\r\n\r\nhello", Served("POST", "/v1/x", "hello"), EVERY),
        Case("POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nConnection: transfer-encoding\r\nAuthorization: Bearer mine\r\nX-Y: z\r\nContent-Length: 5\r\n\r\nhello", Served("POST", "/v1/x", "hello"), EVERY),
        Case("POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nConnection: x-api-key\r\nAuthorization: Bearer mine\r\nX-Y: z\r\nContent-Length: 5\r\n\r\nhello", Served("POST", "/v1/x", "hello"), EVERY),
        Case("POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nConnection: close, authorization\r\nAuthorization: Bearer mine\r\nX-Y: z\r\nContent-Length: 5\r\n\r\nhello", Last("POST", "/v1/x", "hello"), EVERY),
        Case("POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nConnection: Authorization, Host\r\nAuthorization: Bearer mine\r\nX-Y: z\r\nContent-Length: 5\r\n\r\nhello", Served("POST", "/v1/x", "hello"), EVERY),
        Case("POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nConnection: keep-alive, x-lessor-key\r\nAuthorization: Bearer mine\r\nX-Y: z\r\nContent-Length: 5\r\n\r\nhello", Served("POST", "/v1/x", "hello"), EVERY),
        Case("POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nConnection: te, trailer\r\nAuthorization: Bearer mine\r\nX-Y: z\r\nContent-Length: 5\r\n\r\nhello", Served("POST", "/v1/x", "hello"), EVERY),
        Case("POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nConnection: proxy-authorization\r\nAuthorization: Bearer mine\r\nX-Y: z\r\nContent-Length: 5\r\n\r\nhello", Served("POST", "/v1/x", "hello"), EVERY),
        Case("POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nConnection: x-y, ,,\r\nAuthorization: Bearer mine\r\nX-Y: z\r\nContent-Length: 5\r\n\r\nhello", Served("POST", "/v1/x", "hello"), EVERY),
        Case("POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nConnection: transfer-encoding\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n", Served("POST", "/v1/x", "hello"), EVERY),
        Case("POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nConnection: content-length, transfer-encoding\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n", Served("POST", "/v1/x", "hello"), EVERY),
        Case("GET @/v1/x HTTP/1.1\r\nHost: {H}\r\nAuthorization: Bearer one\r\nAuthorization: Bearer two\r\n\r\n", Served("GET", "/v1/x", ""), EVERY),
        Case("GET @/v1/x HTTP/1.1\r\nHost: {H}\r\nAuthorization: Bearer one\r\nX-Api-Key: two\r\nApi-Key: three\r\nX-Goog-Api-Key: four\r\nxi-api-key: five\r\n\r\n", Served("GET", "/v1/x", ""), EVERY),
        Case("GET @/v1/x HTTP/1.1\r\nHost: {H}\r\nAUTHORIZATION: \r\nProxy-Authorization: Basic b25lOnR3bw==\r\n\r\n", Served("GET", "/v1/x", ""), EVERY),
        Case("GET @/v1/x HTTP/1.1\r\nHost: {H}\r\nProxy-Connection: keep-alive\r\nKeep-Alive: timeout=5\r\nTE: trailers, gzip\r\n\r\n", Served("GET", "/v1/x", ""), EVERY),
        Case("GET @/v1/x HTTP/1.1\r\nHost: {H}\r\nX-Lessor-Anything: 1\r\nX-Lessor-Max-Wait: 1s\r\n\r\n", Served("GET", "/v1/x", ""), EVERY),
        Case("GET @/v1/x HTTP/1.1\r\nHost: {H}\r\nX-Lessor-Key: a\r\nX-Lessor-Key: b\r\n\r\n", Refused(400, "bad_request"), EVERY),
        Case("GET @/v1/x HTTP/1.1\r\nHost: {H}\r\nForwarded: host=evil.example\r\nX-Forwarded-Host: evil.example\r\nX-Original-URL: /evil\r\nX-HTTP-Method-Override: DELETE\r\n\r\n", Served("GET", "/v1/x", ""), EVERY),
        Case("POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nExpect: 100-continue\r\nContent-Length: 5\r\n\r\nhello", Served("POST", "/v1/x", "hello"), EVERY),
        Case("POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nExpect: 100-continue\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n", Served("POST", "/v1/x", "hello"), EVERY),
        Case("POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nExpect: 100-Continue, x\r\nContent-Length: 5\r\n\r\nhello", Served("POST", "/v1/x", "hello"), EVERY),
        Case("POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nExpect: 200-ok\r\nContent-Length: 5\r\n\r\nhello", Served("POST", "/v1/x", "hello"), EVERY),
        Case("GET @/v1/x HTTP/1.1\r\nHost: {H}\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\n\r\n", Refused(501, "upgrade_unsupported"), EVERY),
        Case("GET @/v1/x HTTP/1.1\r\nHost: {H}\r\nConnection: upgrade\r\nUpgrade: h2c, websocket\r\n\r\n", Refused(501, "upgrade_unsupported"), EVERY),
        Case("GET @/v1/x HTTP/1.1\r\nHost: {H}\r\nConnection: UPGRADE\r\nUpgrade: foo/2\r\n\r\n", Refused(501, "upgrade_unsupported"), EVERY),
        Case("POST @/v1/x HTTP/1.1\r\nHost: {H}\r\nConnection: upgrade\r\nUpgrade: h2c\r\nContent-Length: 5\r\n\r\nhello", Refused(501, "upgrade_unsupported"), EVERY),
        Case("GET @/v1/x HTTP/1.1\r\nHost: {H}\r\nUpgrade: h2c\r\n\r\n", Served("GET", "/v1/x", ""), EVERY),
        Case("GET @/v1/x HTTP/1.1\r\nHost: {H}\r\nConnection: upgrade\r\n\r\n", Served("GET", "/v1/x", ""), EVERY),
        Case("GET @/v1/x HTTP/1.1\r\nHost: {H}\r\nConnection: close\r\n\r\n", Last("GET", "/v1/x", ""), EVERY),
        Case("GET @/v1/x HTTP/1.1\r\nHost: {H}\r\nConnection: keep-alive\r\nConnection: CLOSE\r\n\r\n", Last("GET", "/v1/x", ""), EVERY),
    ])
    .await;
}

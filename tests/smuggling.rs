//! A corpus of requests, and of answers, that readers may take in more than one way.
//!
//! Each request goes in by base URL, in absolute form and inside a tunnel, with another one right behind it.
//! It is refused as its line says, or it reaches the provider as its line says, once, with the leased key
//! alone: the provider's bytes are read by a strict parser of the tests' own (`support/strict.rs`).
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::pedantic, missing_docs, unreachable_pub)]

#[path = "smuggling_corpus/answers.rs"]
mod answers;
#[path = "smuggling_corpus/requests.rs"]
mod requests;
mod support;

use std::time::Duration;

use support::strict::{self, all};
use support::wiretap::{Heard, Reply, Wiretap, exchange, fault, lessor, ok};
use support::{Lessor, Raw};

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

/// Before each request, in a second round.
const BEFORE: &str = "GET @/v1/before HTTP/1.1\r\nHost: {H}\r\n\r\n";

/// Right behind each request.
const BEHIND: &str = "GET @/v1/behind HTTP/1.1\r\nHost: {H}\r\nConnection: close\r\n\r\n";

/// Sends one case by one way; what is wrong with what came of it.
async fn play(
    case: &Case,
    way: Way,
    before: &str,
    lessor: &Lessor,
    provider: &Wiretap,
) -> Result<(), String> {
    let bytes = way.write(&format!("{before}{}{BEHIND}", case.0), lessor);
    let said = exchange(way.connect(lessor).await, &bytes).await?;
    let mut heard = provider.heard().await;
    if matches!(case.1, Broken(..)) && heard.broken.is_empty() {
        // What was begun may still be on its way.
        tokio::time::sleep(Duration::from_millis(20)).await;
        heard.broken.extend(provider.heard().await.broken);
    }
    let method = case.0.trim_start().split([' ', '\t']).next().unwrap_or("GET");
    let shown = || format!("\n  client: {:?}\n  provider: {heard:?}", String::from_utf8_lossy(&said));
    let methods = if before.is_empty() { vec![method] } else { vec!["GET", method] };
    let (answers, left) = strict::responses(&said, &methods).map_err(|why| format!("{why}{}", shown()))?;
    let statuses: Vec<(u16, &str)> = answers
        .iter()
        .map(|answer| (answer.status, all(&answer.headers, "x-lessor-error").first().copied().unwrap_or("")))
        .collect();
    let sent: Vec<(&str, &str, &[u8])> =
        heard.whole.iter().map(|it| (it.method.as_str(), it.target.as_str(), it.body.as_slice())).collect();
    let behind = ("GET", "/v1/behind", &b""[..]);
    let (mut want_answers, mut want_sent) = match case.1 {
        Refused(status, code) | Broken(status, code) => (vec![(status, code)], vec![]),
        Declined(status, code) => (vec![(status, code), (200, "")], vec![behind]),
        Served(method, target, body) => {
            (vec![(200, ""), (200, "")], vec![(method, target, body.as_bytes()), behind])
        }
        Last(method, target, body) => (vec![(200, "")], vec![(method, target, body.as_bytes())]),
    };
    if !before.is_empty() {
        want_answers.insert(0, (200, ""));
        want_sent.insert(0, ("GET", "/v1/before", &b""[..]));
        // See `play_all`: what is chunked may be refused for lying in a buffer, before it is for its coding.
        if matches!(case.1, Refused(501, _)) && statuses.get(1) == Some(&(400, "bad_request")) {
            want_answers[1] = (400, "bad_request");
        }
    }
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
            if let Err(why) = play(case, *way, "", &lessor, &provider).await {
                wrong.push(format!("{way:?} {:?}: {why}", &case.0[..case.0.len().min(300)]));
            }
        }
        // Behind another its head may lie in a buffer, where less is seen of it. What is chunked there is
        // refused for that, if it came in one piece; whether it did is up to the network.
        let chunked = case.0.to_ascii_lowercase().contains("\ntransfer-encoding:");
        let goes_behind =
            case.2.contains(&Way::BaseUrl) && !(chunked && matches!(case.1, Served(..) | Last(..)));
        if goes_behind && let Err(why) = play(case, Way::BaseUrl, BEFORE, &lessor, &provider).await {
            wrong.push(format!("behind another {:?}: {why}", &case.0[..case.0.len().min(300)]));
        }
    }
    assert_eq!(lessor.in_use("a").await, 0, "a slot is still taken");
    assert!(wrong.is_empty(), "{} of the corpus:\n{}", wrong.len(), wrong.join("\n\n"));
    let left: Heard = provider.heard().await;
    assert!(left.whole.is_empty() && left.broken.is_empty() && left.bad.is_empty(), "{left:?}");
}

#[tokio::test]
async fn a_length_is_one_number_or_the_request_is_refused() {
    play_all(requests::LENGTHS).await;
}

#[tokio::test]
async fn a_transfer_coding_is_one_chunked_or_the_request_is_refused() {
    play_all(requests::CODINGS).await;
}

#[tokio::test]
async fn chunks_are_taken_apart_and_put_together_anew_or_the_request_breaks() {
    play_all(requests::CHUNKS).await;
}

#[tokio::test]
async fn a_head_has_one_reading_or_is_refused() {
    play_all(requests::HEADS).await;
}

#[tokio::test]
async fn a_target_leads_to_the_provider_as_it_is_or_nowhere() {
    play_all(requests::TARGETS).await;
}

#[tokio::test]
async fn fields_that_end_here_end_here_and_one_credential_leaves() {
    play_all(requests::FIELDS).await;
}

/// What a client must get of an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Gets {
    /// This status and body, whole.
    Same(u16, &'static str),
    /// This status, and then a break that no reader takes for an end.
    Cut(u16),
    /// lessor's 502.
    Gateway,
}

use Gets::{Cut, Gateway, Same};

/// What a provider answers to a GET of `/v1/case`, and what the client gets.
struct Answer(&'static str, End, Gets);

/// What the provider does behind its answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    Open,
    Close,
}

use End::{Close, Open};

/// Asks for `target` on a connection of its own.
async fn ask(lessor: &Lessor, target: &str) -> Result<(Vec<strict::Response>, bool, Vec<u8>), String> {
    let host = lessor.authority();
    let request = format!("GET /openai{target} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n");
    let said = exchange(lessor.raw().await, request.as_bytes()).await?;
    let (answers, left) = strict::responses(&said, &["GET"])?;
    Ok((answers, left, said))
}

async fn play_answer(case: &Answer, lessor: &Lessor) -> Result<(), String> {
    let (answers, left, said) = ask(lessor, "/v1/case").await?;
    let got = match &answers[..] {
        [one] if !left => {
            let own = all(&one.headers, "x-lessor-error") == ["upstream_unreachable"];
            let body = String::from_utf8_lossy(&one.body).into_owned();
            if own && one.status == 502 { (502, "<lessor's>".into()) } else { (one.status, body) }
        }
        // Cut off in its body: the strict reader finds no whole one.
        [] if left && said.starts_with(b"HTTP/1.1 ") => {
            (String::from_utf8_lossy(&said[9..12]).parse().unwrap(), "<cut>".into())
        }
        _ => return Err(format!("answers {answers:?}, a part more: {left}")),
    };
    let want = match case.2 {
        Same(status, body) => (status, body.to_owned()),
        Cut(status) => (status, "<cut>".into()),
        Gateway => (502, "<lessor's>".into()),
    };
    if got != want {
        return Err(format!("got {got:?}, not {want:?}"));
    }
    // Whatever came behind it is nobody's answer.
    let (next, left, _) = ask(lessor, "/v1/next").await?;
    match &next[..] {
        [one] if !left && one.status == 200 && one.body == b"the next one" => Ok(()),
        _ => Err(format!("the next request got {next:?}")),
    }
}

#[tokio::test]
async fn an_answer_of_odd_framing_keeps_its_meaning_or_visibly_breaks() {
    let now = std::sync::Arc::new(std::sync::Mutex::new((Vec::new(), Open)));
    let set = now.clone();
    let provider = Wiretap::start(move |request| {
        let (bytes, end) = now.lock().unwrap().clone();
        match request.target.as_str() {
            "/v1/case" => Reply { bytes, close: end == Close },
            _ => ok("the next one"),
        }
    })
    .await;
    let lessor = lessor(&provider).await;
    let many: String = (0..5000).map(|n| format!("X-{n}: y\r\n")).collect();
    let mut wrong = Vec::new();
    for case in answers::ANSWERS {
        let bytes = case.0.replace("<many>", &many).into_bytes();
        *set.lock().unwrap() = (bytes, case.1);
        if let Err(why) = play_answer(case, &lessor).await {
            wrong.push(format!("{:?} {:?}: {why}", case.0, case.1));
        }
    }
    assert!(wrong.is_empty(), "{} of the corpus:\n{}", wrong.len(), wrong.join("\n"));
}

//! What must hold for any bytes. Each target runs a while in every test run, all side by side; longer by
//! `LESSOR_FUZZ_SECONDS=3600 cargo test --test fuzz -- --nocapture`. See `tests/support/fuzz.rs`.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::pedantic,
    missing_docs,
    unreachable_pub,
    clippy::print_stdout
)]

mod support;

use std::collections::VecDeque;
use std::sync::Arc;

use lessor::config::{ConfigError, load_str};
use lessor::model::{Code, Secret};
use lessor::route::ring::Ring;
use lessor::route::target::{connect_target, host_key};
use lessor::route::{Caller, From, Plan, Routes};
use lessor::scrub::{Needle, Scrubber};
use rand::prelude::*;
use support::fuzz::{Run, mutate};
use support::masked::{masked, spelled};
use support::strict;
use support::wiretap::{Wiretap, exchange, fault, lessor, ok};

#[test]
fn a_connect_authority_has_one_host_and_one_port_or_is_refused() {
    let seeds = [
        "api.openai.com:443",
        "[::1]:80",
        "API.OpenAI.com.:0443",
        "127.0.0.1:65535",
        "a:b@c:1",
        "[fe80::1%25eth0]:1",
    ];
    let words =
        [":", "::", "@", "[", "]", ".", "..", ":0", ":443", ":65536", "%3a", "/", "user:", "\u{ff0e}"];
    Run::of("authority").run(
        |rng| {
            let seed = seeds.choose(rng).unwrap();
            mutate(rng, seed.as_bytes(), &words)
        },
        |bytes| {
            // As hyper makes it of a request line.
            let Ok(uri) = http::Uri::try_from(bytes) else { return Ok(()) };
            let Ok((host, port)) = connect_target(&uri) else { return Ok(()) };
            let text = std::str::from_utf8(bytes).map_err(|_| "a target that is no text was taken")?;
            let authority =
                text.split_once("://").map_or(text, |(_, rest)| rest.split(['/', '?', '#']).next().unwrap());
            let (name, digits) = authority.rsplit_once(':').ok_or("a target without a port was taken")?;
            if port == 0 || digits.parse() != Ok(port) {
                return Err(format!("port {port} of {digits:?}"));
            }
            let bare = name.strip_prefix('[').and_then(|name| name.strip_suffix(']')).unwrap_or(name);
            let bare = bare.strip_suffix('.').unwrap_or(bare).to_ascii_lowercase();
            if host != bare || host.is_empty() || host.contains(['@', '/', '[', ']', ' ']) {
                return Err(format!("host {host:?} of {name:?}"));
            }
            let shown = if host.contains(':') { format!("[{host}]") } else { host.clone() };
            if !host.ends_with('.') && host_key(&shown) != host {
                return Err(format!("{host:?} is {:?} when it is read again", host_key(&shown)));
            }
            Ok(())
        },
    );
}

const DENIED: [&str; 4] = [
    "/v1/realtime/client_secrets",
    "/v1/organization/admin_api_keys",
    "/v1/organization/projects/p/api_keys/k",
    "/v1/chatkit/sessions/s/cancel",
];

/// One more way in which some server reads the same path.
fn respelled(rng: &mut StdRng, path: &str) -> String {
    let mut out = String::new();
    for c in path.chars() {
        match (c, rng.random_range(0..8)) {
            ('/', 0) => out.push_str("//"),
            ('/', 1) => out.push_str(";p=1/"),
            ('/', 2) => out.push_str("%2f"),
            ('/', 3) => out.push_str("%5C"),
            ('%', _) => out.push_str(["%", "%25", "%2525"].choose(rng).unwrap()),
            (c, 0) => out.push_str(&format!("%{:02x}", u32::from(c))),
            (c, 1) => out.push_str(&format!("%25{:02X}", u32::from(c))),
            (c, 2) if c.is_ascii_lowercase() => out.push(c.to_ascii_uppercase()),
            (c, _) => out.push(c),
        }
    }
    out + ["", "", "/", ";x", "%20", "%00", "?x=1", "%3fx"].choose(rng).unwrap()
}

#[test]
fn a_denied_path_is_denied_in_any_spelling_and_any_target_is_sent_as_it_came() {
    let file = "[[keys]]\nid = \"a\"\nprovider = \"openai\"\nsecret = { env = \"A\" }\n";
    let config = Arc::new(load_str(file, "lessor.toml", &|_| Some("sk-0123456789abcdef".into())).unwrap());
    let routes = Routes::new(config.clone(), &Ring::new(&config), &[], None);
    let words = ["/", "//", "%2f", "%25", "..", "%2e", ";", "?", "*", "\\", "realtime", "v1", "%00", "key="];
    let check = |bytes: &[u8]| {
        // The first byte says whether what follows is a denied path.
        let (kind, target) = bytes.split_first().ok_or("no input")?;
        let target = [b"/openai", target].concat();
        let Ok(uri) = http::Uri::try_from(&target[..]) else { return Ok(()) };
        let request = http::Request::get(uri.clone()).header("host", "localhost").body(()).unwrap();
        let found =
            routes.find(&request.into_parts().0, false, From::Unix { uid: 0 }, &mut Caller::unknown());
        match found {
            Ok(Plan::Lend(_)) if *kind == b'!' => Err("a denied path got through".into()),
            Ok(Plan::Lend(route)) => {
                let sent = route.target.path_and_query().map_or("", |both| both.as_str());
                let asked = uri.path_and_query().map_or("", |both| both.as_str());
                let asked = asked.strip_prefix("/openai").ok_or("another provider's")?;
                let same = sent == asked
                    || (asked.is_empty() && sent == "/")
                    || (asked.starts_with('?') && sent == format!("/{asked}"));
                if same { Ok(()) } else { Err(format!("{sent:?} is sent for {asked:?}")) }
            }
            Ok(other) => Err(format!("{other:?}")),
            Err(fault) if *kind == b'!' && !matches!(fault.code, Code::PathDenied | Code::BadRequest) => {
                Err(format!("{fault:?}"))
            }
            Err(_) => Ok(()),
        }
    };
    Run::of("denied").run(
        |rng| {
            if rng.random_bool(0.5) {
                let mut path = (*DENIED.choose(rng).unwrap()).to_owned();
                for _ in 0..rng.random_range(0..3) {
                    path = format!("/{}", respelled(rng, path[1..].split('?').next().unwrap()));
                }
                return [b"!", path.as_bytes()].concat();
            }
            let seed = ["/v1/models/a%2Fb//c;d=e?limit=2", "/v1/realtime/sessions"].choose(rng).unwrap();
            [b".".to_vec(), mutate(rng, seed.as_bytes(), &words)].concat()
        },
        check,
    );
}

#[test]
fn of_any_secret_in_any_text_nothing_is_left_however_it_is_cut() {
    const LETTERS: &[u8] = b"abcdefghijkmnopqrstuvwxyzABCDEFGHJKLMNPQRSTUVWXYZ0123456789-_+/=.~!%\\\"";
    // The input: the secret's line, the cuts' line, the text.
    let check = |bytes: &[u8]| {
        let mut parts = bytes.splitn(3, |byte| *byte == b'\n');
        let (Some(secret), Some(cuts), Some(text)) = (parts.next(), parts.next(), parts.next()) else {
            return Ok(());
        };
        let Ok(secret) = std::str::from_utf8(secret) else { return Ok(()) };
        if secret.len() < 16 || !secret.bytes().all(|byte| (b'!'..=b'~').contains(&byte)) {
            return Ok(());
        }
        let cuts =
            std::str::from_utf8(cuts).unwrap_or_default().split(' ').filter_map(|cut| cut.parse().ok());
        let mut cuts: Vec<usize> = cuts.map(|cut: usize| cut.min(text.len())).collect();
        cuts.sort_unstable();
        let needle = Arc::new(Needle::new(&Secret::new(secret.to_owned())));
        let want = masked(secret, text);
        let whole = needle.mask(text).map_or_else(|| text.to_vec(), |(masked, _)| masked.to_vec());
        if whole != want {
            return Err(format!("whole: {}, not {}", whole.escape_ascii(), want.escape_ascii()));
        }
        let (mut scrubber, mut out, mut got, mut at) =
            (Scrubber::new(needle), VecDeque::new(), Vec::new(), 0);
        for cut in cuts.iter().copied().chain([text.len()]) {
            scrubber.push(bytes::Bytes::copy_from_slice(&text[at..cut]), &mut out);
            at = cut;
            got.extend(out.drain(..).flatten());
            if got.len() + scrubber.held() != at {
                return Err(format!("{} bytes out and {} held of {at}", got.len(), scrubber.held()));
            }
        }
        scrubber.finish(&mut out);
        got.extend(out.drain(..).flatten());
        if got.len() != want.len() {
            return Err(format!("{} bytes of {}", got.len(), want.len()));
        }
        // The first three bytes of a secret go out where a piece ends behind them: it is not known for one.
        let mut left = 0;
        for (at, (got_byte, want_byte)) in got.iter().zip(&want).enumerate() {
            left = if got_byte == want_byte { 0 } else { left + 1 };
            let begun = cuts.iter().any(|cut| *cut > at && *cut < at + 4);
            let as_it_was = *want_byte == b'*' && *got_byte == text[at];
            if left > 3 || (left > 0 && !(begun && as_it_was)) {
                return Err(format!("at {at}: {}, not {}", got.escape_ascii(), want.escape_ascii()));
            }
        }
        Ok(())
    };
    Run::of("scrub").run(
        |rng| {
            let few = rng.random_bool(0.2);
            let letters = if few { &b"ab"[..] } else { LETTERS };
            let secret: String =
                (0..rng.random_range(16..40)).map(|_| char::from(*letters.choose(rng).unwrap())).collect();
            let mut text = Vec::new();
            for _ in 0..rng.random_range(1..5) {
                match rng.random_range(0..4) {
                    0 => text.extend((0..rng.random_range(0..20)).map(|_| *letters.choose(rng).unwrap())),
                    1 => text.extend_from_slice(&secret.as_bytes()[..rng.random_range(0..=secret.len())]),
                    2 => {
                        let from = rng.random_range(0..secret.len());
                        text.extend(spelled(&secret[from..], |most| rng.random_range(0..most)));
                    }
                    _ => text.extend(spelled(&secret, |most| rng.random_range(0..most))),
                }
            }
            if rng.random_bool(0.3) {
                text = mutate(rng, &text, &["%", "%25", "\\u00", "\\", "="]);
            }
            let cuts: Vec<String> =
                (0..rng.random_range(0..6)).map(|_| rng.random_range(0..=text.len()).to_string()).collect();
            [secret.as_bytes(), b"\n", cuts.join(" ").as_bytes(), b"\n", &text].concat()
        },
        check,
    );
}

/// What is wrong with how a refusal points into the file.
fn points_outside(text: &str, error: &ConfigError) -> Option<String> {
    if error.mistakes.is_empty() {
        return Some("refused for nothing".into());
    }
    // A file may end in a line without a line end, which is one more.
    let lines = text.split('\n').count();
    for mistake in &error.mistakes {
        let line = mistake.line.unwrap_or(1);
        if line == 0 || line > lines || mistake.problem.is_empty() {
            return Some(format!("line {line} of {lines}: {:?}", mistake.problem));
        }
        if let Some((excerpt, caret)) = &mistake.excerpt {
            let len = excerpt.chars().count();
            if caret.start > len || caret.end > len + 1 || caret.start > caret.end || excerpt.contains('\n') {
                return Some(format!("caret {caret:?} under {len} characters: {excerpt:?}"));
            }
        }
    }
    None
}

#[test]
fn any_file_is_a_configuration_or_is_refused_with_its_mistakes_in_it() {
    let reference = include_str!("../config/lessor.toml");
    let opened = reference
        .lines()
        .map(|line| line.strip_prefix('#').filter(|it| !it.starts_with(' ')).unwrap_or(line));
    let opened: String = opened.map(|line| format!("{line}\n")).collect();
    let words: Vec<&str> = reference.split_whitespace().filter(|word| word.len() > 3).collect();
    let env =
        |name: &str| (!name.len().is_multiple_of(5)).then(|| "canary-0123456789".repeat(1 + name.len() % 2));
    Run::of("config").run(
        |rng| {
            let text = if rng.random_bool(0.5) { reference } else { &opened };
            // A few tables of it: shorter files get further.
            let tables: Vec<&str> = text.split("\n[").collect();
            let some: Vec<&str> = tables.choose_multiple(rng, 3).copied().collect();
            mutate(rng, some.join("\n[").as_bytes(), &words)
        },
        |bytes| {
            let text = String::from_utf8_lossy(bytes);
            let Err(error) = load_str(&text, "lessor.toml", &env) else { return Ok(()) };
            if error.to_string().contains("canary") && !text.contains("canary") {
                return Err(format!("a secret is shown: {error}"));
            }
            points_outside(&text, &error).map_or(Ok(()), Err)
        },
    );
}

/// Requests of plain and of doubtful framing.
const HEADS: [&str; 8] = [
    "GET /openai/v1/a HTTP/1.1\r\nHost: {H}\r\nAuthorization: Bearer mine\r\n\r\n",
    "POST /openai/v1/a?key=mine HTTP/1.1\r\nHost: {H}\r\nContent-Length: 5\r\nConnection: authorization\r\n\r\nhello",
    "POST /openai/v1/a HTTP/1.1\r\nHost: {H}\r\nTransfer-Encoding: chunked\r\nTrailer: X-Api-Key\r\n\r\n5;e=1\r\nhello\r\n0\r\nX-Api-Key: k\r\n\r\n",
    "GET http://api.openai.com/v1/a HTTP/1.1\r\nHost: api.openai.com\r\nX-Api-Key: mine\r\n\r\n",
    "POST /openai/v1/a HTTP/1.1\r\nHost: {H}\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
    "GET /openai/v1/a HTTP/1.1\r\nHost: {H}\r\n\r\nGET /openai/v1/b HTTP/1.1\r\nHost: {H}\r\n\r\n",
    "HEAD /openai/v1/a HTTP/1.1\r\nHost: {H}\r\nExpect: 100-continue\r\nContent-Length: 0\r\n\r\n",
    "CONNECT api.openai.com:80 HTTP/1.1\r\nHost: x\r\n\r\nGET /v1/a HTTP/1.1\r\nHost: api.openai.com\r\n\r\n",
];

/// What no strict reader finds different from what the provider was sent: its requests, in order, are among
/// those that the client's bytes plainly are, where these are nothing but plain requests to a base URL.
fn differs(mut bytes: &[u8], sent: &[strict::Request]) -> Option<String> {
    let mut plain = Vec::new();
    while !bytes.is_empty() {
        match strict::request(bytes) {
            strict::Read::Whole(request, len) if request.target.starts_with("/openai/") => {
                bytes = &bytes[len..];
                plain.push(request);
            }
            _ => return None,
        }
    }
    let mut rest = plain.iter();
    sent.iter().find_map(|sent| {
        let same = |plain: &strict::Request| {
            let target = &plain.target["/openai".len()..];
            // A credential in a query is taken out of it.
            let target_is = target == sent.target || target.to_ascii_lowercase().contains(['?', '%']);
            plain.method == sent.method && plain.body == sent.body && target_is
        };
        (!rest.any(same)).then(|| format!("sent {sent:?} of {plain:?}"))
    })
}

#[test]
fn of_any_bytes_of_a_client_the_provider_gets_plain_requests_with_the_leased_key_alone() {
    let words = [
        "\r\n",
        "\n",
        "\r\n\r\n",
        "\r\n ",
        "0\r\n\r\n",
        "Content-Length: 5",
        "Content-Length: 0",
        "Transfer-Encoding: chunked",
        "Host: {H}",
        "Connection: close",
        "Connection: host",
        "Authorization: Bearer x",
        "xi-api-key: k",
        "Expect: 100-continue",
        "HTTP/1.0",
        "HTTP/1.1",
        "http://api.openai.com",
        "/openai/v1/b",
        "X-Lessor-Key: a",
        "GET ",
        "TE: trailers",
        "?key=k",
        "#",
    ];
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    runtime.block_on(async {
        let provider = Wiretap::start(|_| ok("ok")).await;
        let lessor = lessor(&provider).await;
        let mut run = Run::of("head");
        while let Some(input) = run.next(|rng| {
            let seed = HEADS.choose(rng).unwrap();
            mutate(rng, seed.as_bytes(), &words)
        }) {
            let end = b"GET /openai/v1/end HTTP/1.1\r\nHost: {H}\r\nConnection: close\r\n\r\n";
            let text = [&input[..], end].concat();
            let bytes = replaced(&text, b"{H}", lessor.authority().as_bytes());
            let said = match exchange(lessor.raw().await, &bytes).await {
                Ok(said) => said,
                Err(why) => run.found(&input, &why),
            };
            let heard = provider.heard().await;
            if let Some(why) = heard.bad.first() {
                run.found(&input, &format!("no strict reader takes what was sent: {why}"));
            }
            if let Some(why) = heard.whole.iter().find_map(fault).or_else(|| differs(&bytes, &heard.whole)) {
                run.found(&input, &why);
            }
            let answers = memchr::memmem::find_iter(&said, b"x-lessor-lease: ").count();
            if heard.whole.len() < answers {
                run.found(&input, &format!("{answers} answers to {} requests", heard.whole.len()));
            }
        }
        assert_eq!(lessor.in_use("a").await, 0, "a slot is still taken");
        println!("head: {} inputs", run.tried);
    });
}

/// `bytes` with each `from` replaced.
fn replaced(bytes: &[u8], from: &[u8], to: &[u8]) -> Vec<u8> {
    let mut out = Vec::new();
    let mut at = 0;
    for found in memchr::memmem::find_iter(bytes, from) {
        out.extend_from_slice(&bytes[at..found]);
        out.extend_from_slice(to);
        at = found + from.len();
    }
    out.extend_from_slice(&bytes[at..]);
    out
}

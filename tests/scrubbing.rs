//! A key that the provider echoes never reaches the client, and nothing else is changed or delayed by that.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::pedantic, missing_docs, unreachable_pub)]

mod support;

use std::io::Write as _;
use std::time::Instant;

use base64::Engine as _;
use base64::engine::general_purpose::{STANDARD, URL_SAFE_NO_PAD};
use support::lessor::{Home, chat};
use support::{Answer, Cut, Gate, Key, Lessor, Play, Provider, Request, Setup, ms};

const SECRET: &str = "sk-CANARY/7f3a+9c51\"e2?Zq>~";

/// The forms in which it is echoed, each with a name.
fn forms() -> Vec<(&'static str, String)> {
    let each = |spell: fn(u8) -> String| SECRET.bytes().map(spell).collect::<String>();
    let needed = |byte: u8| !byte.is_ascii_alphanumeric() && !b"-._~".contains(&byte);
    let mut all = vec![
        ("plain", SECRET.to_owned()),
        ("percent, all", each(|byte| format!("%{byte:02X}"))),
        ("percent, all, lower", each(|byte| format!("%{byte:02x}"))),
        ("percent, twice", each(|byte| format!("%25{byte:02X}"))),
        ("JSON", serde_json::to_string(SECRET).unwrap().trim_matches('"').to_owned()),
        ("JSON, slashes", SECRET.replace('"', "\\\"").replace('/', "\\/")),
        ("JSON, all", each(|byte| format!("\\u00{byte:02x}"))),
        ("percent, needed", String::new()),
        ("mixed", String::new()),
    ];
    all[7].1 = SECRET
        .bytes()
        .map(|byte| if needed(byte) { format!("%{byte:02X}") } else { char::from(byte).into() })
        .collect();
    all[8].1 = SECRET
        .bytes()
        .enumerate()
        .map(|(at, byte)| match at % 3 {
            0 => char::from(byte).into(),
            1 => format!("%{byte:02x}"),
            _ => format!("\\u00{byte:02X}"),
        })
        .collect();
    for before in ["", "u", "me:"] {
        all.push(("base64", STANDARD.encode(format!("{before}{SECRET}"))));
        all.push(("base64, URL-safe", URL_SAFE_NO_PAD.encode(format!("{before}{SECRET}"))));
    }
    all
}

/// Fails when more of the echo `form` is in `text` than goes out before it is known for one. Base64 shares
/// characters with what stands beside the secret.
#[track_caller]
fn masked(what: &str, form: &str, text: &str) {
    let known = if what.starts_with("base64") { 9 } else { 3 };
    for from in 0..form.len() - known {
        let part = &form[from..=from + known];
        assert!(!text.contains(part), "{what}: {part:?} is in {text:?}");
    }
}

async fn lessor_of(provider: &Provider) -> Lessor {
    Setup::openai(provider).key(Key::new("a").secret(SECRET)).start().await
}

fn number(seen: &support::Seen, name: &str) -> usize {
    seen.header(name).parse().unwrap_or(0)
}

fn ask(path: &str, form: usize) -> Request {
    Request::get(&format!("/openai/v1/{path}")).header("x-form", &form.to_string())
}

#[tokio::test]
async fn an_echo_in_a_body_is_masked_in_every_form_and_wherever_a_chunk_ends_in_it() {
    let provider = Provider::plain(|seen| {
        let body = format!("before {} after", forms()[number(seen, "x-form")].1);
        let (first, second) = body.split_at(number(seen, "x-cut"));
        let play = Play::new().head(200, &[("transfer-encoding", "chunked")]);
        if seen.path() == "/v1/bytes" {
            return body.chars().fold(play, |play, one| play.chunk(&one.to_string())).last_chunk();
        }
        play.chunk(first).chunk(second).last_chunk()
    })
    .await;
    let lessor = lessor_of(&provider).await;
    let mut masks = 0;
    for (n, (name, form)) in forms().iter().enumerate() {
        let sent = format!("before {form} after");
        // Every place, but not twenty bytes of the same kind in one secret's longest forms.
        let step = if form.len() > 60 { 3 } else { 1 };
        for cut in (1..sent.len()).step_by(step) {
            let answer = lessor.ask(ask("cut", n).header("x-cut", &cut.to_string())).await;
            masked(name, form, &answer.text());
            assert_eq!(answer.body.len(), sent.len(), "{name} cut at {cut}");
            assert!(answer.text().starts_with("before ") && answer.text().ends_with(" after"));
            masks += 1;
        }
        masked(name, form, &lessor.ask(ask("bytes", n)).await.text());
        masks += 1;
    }
    let counted = lessor.metric("lessor_scrubbed_total{provider=\"openai\",where=\"body\"}").await;
    assert_eq!(counted as usize, masks);
}

#[tokio::test]
async fn an_echo_in_head_error_body_and_trailers_is_masked_in_every_form_and_at_equal_length() {
    let provider = Provider::plain(|seen| {
        let form = &forms()[number(seen, "x-form")].1;
        let status = match seen.path() {
            "/v1/ok" => "200 OK",
            "/v1/moved" => "302 Found",
            _ => "400 Bad",
        };
        Play::new().bytes(format!(
            "HTTP/1.1 {status} {form}\r\ntransfer-encoding: chunked\r\ntrailer: x-echo\r\nauthorization: x\r\n\
             x-echo: <{form}>\r\nlocation: https://x.test/?key={form}&b=1\r\nset-cookie: a={form}; Path=/\r\n\
             content-type: application/json\r\n\r\n{:x}\r\n{{\"e\":\"{form}\"}}\r\n0\r\nx-echo: {form}\r\n\r\n",
            form.len() + 8
        ))
    })
    .await;
    let lessor = lessor_of(&provider).await;
    let host = lessor.authority();
    for (n, (name, form)) in forms().iter().enumerate() {
        for path in ["ok", "moved", "refused"] {
            let mut raw = lessor.raw().await;
            raw.write(format!(
                "GET /openai/v1/{path} HTTP/1.1\r\nHost: {host}\r\nTE: trailers\r\nX-Form: {n}\r\n\
                 Connection: close\r\n\r\n"
            ))
            .await;
            let said = raw.rest().await;
            masked(name, form, &said);
            assert!(!said.contains("authorization"), "{said}");
            let whole = said.lines().find(|line| line.starts_with("x-echo: <")).unwrap();
            assert_eq!(whole.len(), "x-echo: <>".len() + form.len(), "{said}");
            assert!(said.contains("&b=1\r\n") && said.contains("; Path=/\r\n"), "{said}");
            assert!(
                said.trim_end().ends_with("**") || name.starts_with("base64"),
                "a trailer is there: {said}"
            );
        }
    }
    for place in ["header", "body", "trailer", "reason"] {
        let name = format!("lessor_scrubbed_total{{provider=\"openai\",where=\"{place}\"}}");
        assert!(lessor.metric(&name).await > 0.0, "{place}");
    }
}

#[tokio::test]
async fn events_are_masked_and_none_waits_for_the_next() {
    let gates: Vec<Gate> = (0..5).map(|_| Gate::default()).collect();
    let held = gates.clone();
    let provider = Provider::start(move |seen| {
        let echo = format!("{{\"key\":\"{}\"}}", seen.key());
        // One ends in as much of the key as a line may; its line end decides.
        let almost = &SECRET[..SECRET.len() - 1];
        let play = Play::sse().event(&echo).event(almost);
        held.iter().fold(play, |play, gate| play.until(gate).event(&echo).event(almost)).silence()
    })
    .await;
    let lessor = lessor_of(&provider).await;
    let mut stream = lessor.open(chat("gpt-4o-mini")).await;
    let want = format!(
        "data: {{\"key\":\"{}\"}}\n\ndata: {}\n\n",
        "*".repeat(SECRET.len()),
        &SECRET[..SECRET.len() - 1]
    );
    let mut delays = Vec::new();
    for gate in &gates {
        let begun = Instant::now();
        let mut seen = String::new();
        while seen.len() < want.len() {
            seen += std::str::from_utf8(&stream.next().await.unwrap().unwrap()).unwrap();
        }
        assert_eq!(seen, want);
        delays.push(begun.elapsed());
        gate.open();
    }
    delays.sort();
    assert!(delays[2] < ms(50), "half of the events took longer than {:?}", delays[2]);
}

#[tokio::test]
async fn a_body_that_ends_in_what_might_become_the_key_is_whole() {
    let provider = Provider::plain(|seen| {
        let body = format!("it begins with {}", &SECRET[..number(seen, "x-cut")]);
        match seen.path() {
            "/v1/length" => Play::whole(200, &[], body),
            "/v1/trailers" => Play::new()
                .head(200, &[("transfer-encoding", "chunked"), ("trailer", "x-end")])
                .chunk(&body)
                .bytes("0\r\nx-end: 1\r\n\r\n"),
            "/v1/close" => Play::new().head(200, &[("connection", "close")]).bytes(body).cut(Cut::Close),
            _ => Play::sse().chunk(&body).last_chunk(),
        }
    })
    .await;
    let lessor = lessor_of(&provider).await;
    for path in ["length", "trailers", "close", "chunks"] {
        for cut in 1..SECRET.len() {
            let request = Request::get(&format!("/openai/v1/{path}")).header("te", "trailers");
            let answer = lessor.ask(request.header("x-cut", &cut.to_string())).await;
            assert_eq!(answer.text(), format!("it begins with {}", &SECRET[..cut]), "{path}");
            assert_eq!(answer.trailers.is_some(), path == "trailers");
        }
    }
    lessor.is_free_within_a_second("a").await;
}

#[tokio::test]
async fn an_answer_that_breaks_off_within_an_echo_is_shown_as_cut() {
    let provider = Provider::plain(|seen| {
        let play = match seen.path() {
            "/v1/length" => {
                Play::new().head(200, &[("content-length", "100")]).bytes(format!("a {}", &SECRET[..9]))
            }
            _ => Play::sse().chunk(&format!("a {}", &SECRET[..9])),
        };
        play.wait(ms(20)).cut(if number(seen, "x-form") == 0 { Cut::Close } else { Cut::Reset })
    })
    .await;
    let lessor = lessor_of(&provider).await;
    for path in ["length", "chunks"] {
        for how in 0..2 {
            let mut stream = lessor.open(ask(path, how)).await;
            assert_eq!(stream.next().await.unwrap().unwrap(), "a ", "what is held goes with the break");
            assert!(stream.next().await.is_some_and(|end| end.is_err()), "{path}: a clean end");
            lessor.is_free_within_a_second("a").await;
        }
    }
}

#[tokio::test]
async fn a_refusal_that_was_kept_is_masked_with_the_key_it_was_had_with() {
    let provider = Provider::start(|seen| {
        let said = format!("slow down, {}", seen.key());
        Play::json_with(429, &[("retry-after", "20")], &support::plays::openai_error("requests", "x", &said))
    })
    .await;
    let second = SECRET.replace("CANARY", "SECOND");
    let setup = Setup::openai(&provider).key(Key::new("a").secret(SECRET)).key(Key::new("b").secret(&second));
    let lessor = setup.start().await;
    let answer = lessor.chat().await;
    assert_eq!((answer.status, provider.count()), (429, 2));
    let stars = "*".repeat(SECRET.len());
    assert!(answer.text().contains(&format!("slow down, {stars}")), "{}", answer.text());
}

#[tokio::test]
async fn a_provider_may_be_scrubbed_in_its_headers_only_or_not_at_all() {
    let provider =
        Provider::plain(|seen| Play::whole(200, &[("x-echo", seen.key())], seen.key().to_owned())).await;
    for (said, header, body) in [("on", false, false), ("headers", false, true), ("off", true, true)] {
        let setup = Setup::openai(&provider).key(Key::new("a").secret(SECRET));
        let lessor = setup.set("providers.openai.scrub", &format!("{said:?}")).start().await;
        let answer = lessor.get("/openai/v1/models").await;
        assert_eq!(answer.header("x-echo") == SECRET, header, "{said}");
        assert_eq!(answer.text() == SECRET, body, "{said}");
        assert_eq!(answer.body.len(), SECRET.len());
    }
}

#[tokio::test]
async fn a_short_secret_is_masked_in_headers_only_and_warned_of() {
    const SHORT: &str = "sk-short-secret";
    let provider =
        Provider::plain(|seen| Play::whole(200, &[("x-echo", seen.key())], seen.key().to_owned())).await;
    let setup = Setup::openai(&provider).key(Key::new("a").secret(SHORT));
    let toml = setup.toml();
    let lessor = setup.start().await;
    let answer = lessor.get("/openai/v1/models").await;
    assert_eq!((answer.header("x-echo"), answer.text().as_str()), ("***************", SHORT));
    let warned = "fewer than 16 characters";
    assert!(lessor.log().contains(warned), "{}", lessor.log());
    let home = Home::default();
    std::fs::write(home.path().join("lessor.toml"), toml).unwrap();
    for (secret, warns) in [(SHORT, true), (SECRET, false)] {
        let ran = home.run_with(&["check", "--config", "lessor.toml"], &[("SECRET_OPENAI_A", secret)]).await;
        ran.ok();
        assert_eq!(ran.stderr.contains(warned), warns, "{}", ran.stderr);
        assert!(!ran.stderr.contains(secret));
    }
}

fn gzip(text: &str) -> Vec<u8> {
    let mut to = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::default());
    to.write_all(text.as_bytes()).unwrap();
    to.finish().unwrap()
}

fn head_of(answer: &Answer) -> (&str, &str) {
    (answer.header("content-encoding"), answer.header("content-length"))
}

#[tokio::test]
async fn a_packed_body_passes_as_it_is_or_is_unpacked_and_masked_where_that_is_configured() {
    let provider = Provider::plain(|seen| {
        let body = gzip(&format!("<{}>", seen.key()));
        let packed = [("content-encoding", "gzip"), ("etag", "\"1\"")];
        match seen.path() {
            "/v1/range" => Play::whole(206, &packed, body),
            "/v1/half" => Play::whole(200, &packed, body[..body.len() - 4].to_vec()),
            "/v1/br" => Play::whole(200, &[("content-encoding", "br")], "not looked at"),
            "/v1/none" => Play::new().head(304, &packed),
            _ if seen.method == "HEAD" => {
                let length = body.len().to_string();
                Play::new().head(200, &[packed[0], ("content-length", &length)])
            }
            _ => Play::whole(200, &packed, body),
        }
    })
    .await;
    let setup = || Setup::openai(&provider).key(Key::new("a").secret(SECRET));
    let all = "gzip;q=0.9, br, zstd";
    let get = |path: &str| Request::get(&format!("/openai/v1/{path}")).header("accept-encoding", all);

    let lessor = setup().start().await;
    let answer = lessor.ask(get("models")).await;
    assert_eq!(answer.body, gzip(&format!("<{SECRET}>")));
    assert_eq!(head_of(&answer), ("gzip", answer.body.len().to_string().as_str()));
    assert_eq!(provider.seen().last().unwrap().header("accept-encoding"), all);

    let lessor = setup().set("scrub.compressed", "\"decode\"").start().await;
    let answer = lessor.ask(get("models")).await;
    assert_eq!(answer.text(), format!("<{}>", "*".repeat(SECRET.len())));
    assert_eq!((head_of(&answer), answer.header("etag")), (("", ""), "\"1\""));
    assert_eq!(provider.seen().last().unwrap().header("accept-encoding"), "gzip;q=0.9");
    assert_eq!(lessor.ask(get("range")).await.header("content-encoding"), "gzip");
    assert_eq!(lessor.ask(get("br")).await.text(), "not looked at");
    assert_eq!(head_of(&lessor.ask(get("none")).await), ("", ""));
    assert!(lessor.open(get("half")).await.whole().await.is_err(), "half of a packed body is shown as cut");
    let head = lessor.ask(Request::new("HEAD", "/openai/v1/models")).await;
    assert_eq!(head_of(&head), ("", ""));
    lessor.is_free_within_a_second("a").await;
}

#[tokio::test]
async fn a_packed_event_is_unpacked_when_it_comes() {
    let gate = Gate::default();
    let held = gate.clone();
    let provider = Provider::plain(move |seen| {
        let mut to = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::default());
        to.write_all(format!("data: {}\n\n", seen.key()).as_bytes()).unwrap();
        to.flush().unwrap();
        let first = to.get_ref().clone();
        to.write_all(b"data: two\n\n").unwrap();
        let rest = to.finish().unwrap()[first.len()..].to_vec();
        let head =
            [("content-type", "text/event-stream"), ("content-encoding", "gzip"), ("connection", "close")];
        Play::new().head(200, &head).bytes(first).until(&held).bytes(rest).cut(Cut::Close)
    })
    .await;
    let setup = Setup::openai(&provider).key(Key::new("a").secret(SECRET));
    let lessor = setup.set("scrub.compressed", "\"decode\"").start().await;
    let mut stream = lessor.open(Request::get("/openai/v1/events")).await;
    assert_eq!(stream.read_to("\n\n").await, format!("data: {}\n\n", "*".repeat(SECRET.len())));
    gate.open();
    assert_eq!(stream.whole().await.unwrap().text(), "data: two\n\n");
}

#[tokio::test]
async fn a_range_and_answers_without_a_body_keep_their_lengths() {
    let provider = Provider::plain(|seen| {
        let body = format!("{} tail", seen.key());
        match seen.path() {
            "/v1/range" => Play::whole(206, &[("content-range", "bytes 5-36/100")], body),
            "/v1/head" => Play::new().head(200, &[("content-length", "12345")]),
            "/v1/none" => Play::new().head(204, &[("x-echo", seen.key())]),
            _ => Play::new().head(304, &[("etag", seen.key())]),
        }
    })
    .await;
    let lessor = lessor_of(&provider).await;
    let stars = "*".repeat(SECRET.len());
    let range = lessor.get("/openai/v1/range").await;
    assert_eq!(range.text(), format!("{stars} tail"));
    assert_eq!((range.header("content-range"), range.header("content-length")), ("bytes 5-36/100", "32"));
    let head = lessor.ask(Request::new("HEAD", "/openai/v1/head")).await;
    assert_eq!(head.header("content-length"), "12345");
    assert_eq!(lessor.get("/openai/v1/none").await.header("x-echo"), stars);
    assert_eq!(lessor.get("/openai/v1/unchanged").await.header("etag"), stars);
    lessor.is_free_within_a_second("a").await;
}

//! A secret is in no output: a canary is looked for in every byte that leaves lessor, other than to its
//! provider.
//! What a provider echoes in bodies, and in every form: tests/scrubbing.rs.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::pedantic, missing_docs, unreachable_pub)]

mod support;

use std::sync::Arc;

use serde_json::json;
use support::lessor::{Home, chat};
use support::plays::{invalid_key, openai, rate_limited};
use support::{Cut, Door, Gate, Key, Lessor, Play, Provider, Request, Setup, eventually};

const CANARY: &str = "sk-CANARY-7f3a9c51e2";

/// The forms in which a secret might show: plain, base64 (as in Basic), percent-encoded, by bytes.
fn forms() -> Vec<String> {
    use base64::Engine as _;
    let base64 = base64::engine::general_purpose::STANDARD.encode(CANARY);
    let bytes = format!("{:?}", CANARY.as_bytes());
    vec![
        CANARY.into(),
        "CANARY-7f3a".into(),
        "7f3a9c51e2".into(),
        base64,
        bytes.trim_matches(['[', ']']).into(),
    ]
}

#[track_caller]
fn clean(what: &str, text: &str) {
    for form in forms() {
        if let Some(at) = text.find(&form) {
            let from = text[..at].char_indices().rev().nth(200).map_or(0, |(at, _)| at);
            panic!("the secret is in {what}: …{}", &text[from..at + form.len()]);
        }
    }
}

fn headers(answer: &support::Answer) -> String {
    format!("{:?}", answer.headers)
}

/// Calls every door of the admin API, and every command that prints, and looks at what they say.
async fn all_doors(lessor: &Lessor) {
    for path in [
        "/healthz",
        "/readyz",
        "/metrics",
        "/v1/status",
        "/v1/pools",
        "/v1/keys",
        "/v1/leases",
        "/v1/status?explain=true",
        "/v1/events?follow=false",
        "/openapi.json",
        "/nowhere",
    ] {
        for door in [lessor.admin_door(), Door::Unix(lessor.admin_socket().into())] {
            let answer =
                support::client::send(&door, Request::get(path)).await.unwrap().whole().await.unwrap();
            clean(path, &(headers(&answer) + &answer.text()));
        }
    }
    for path in ["/v1/keys/openai/a/check", "/v1/keys/openai/a/disable", "/v1/keys/openai/a/enable"] {
        let answer = lessor.admin_post(path).await;
        clean(path, &(headers(&answer) + &answer.text()));
    }
    for args in [
        &["status"][..],
        &["status", "--json"],
        &["status", "--explain"],
        &["events"],
        &["keys", "list"],
        &["keys", "list", "--json"],
        &["ready"],
    ] {
        let ran = lessor.cli(args).await;
        clean(&format!("{args:?}"), &(ran.stdout + &ran.stderr));
    }
}

#[tokio::test]
async fn a_secret_is_in_no_log_metric_error_or_admin_answer_even_with_every_trace_on() {
    let provider = Provider::start(|seen| match seen.path() {
        "/v1/limited" => rate_limited("1"),
        "/v1/invalid" => invalid_key(),
        "/v1/cut" => Play::sse().event("one").cut(Cut::Reset),
        "/v1/gone" => Play::new().cut(Cut::Reset),
        "/v1/broken" => {
            Play::new().bytes("HTTP/1.1 200 OK\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n")
        }
        _ => openai(seen),
    })
    .await;
    let setup =
        Setup::openai(&provider).key(Key::new("a").secret(CANARY)).key(Key::new("b").secret(CANARY_2));
    let lessor = setup.env("RUST_LOG", "trace").set("queue.max_wait", "\"100ms\"").start().await;
    for path in ["models", "limited", "models", "gone", "broken", "invalid", "models", "x?key=mine"] {
        for head in ["/openai/v1/", "http://api.openai.com/v1/"] {
            let answer = lessor.get(&format!("{head}{path}")).await;
            clean(path, &(headers(&answer) + &answer.text()));
        }
    }
    if let Ok(stream) = lessor.try_open(Request::get("/openai/v1/cut")).await {
        let _ = stream.whole().await;
    }
    let answer = lessor.ask(chat("gpt-4o-mini").header("x-lessor-key", "a")).await;
    clean("an answer", &(headers(&answer) + &answer.text()));
    all_doors(&lessor).await;
    let log = lessor.log();
    assert!(log.contains("TRACE"), "every trace is on");
    clean("the log", &log);
    clean("stdout", &lessor.stdout());
    let seen = provider.keys_seen();
    assert!(seen.iter().any(|key| key == CANARY), "the canary was used: {seen:?}");
    lessor.sigterm();
}

const CANARY_2: &str = "sk-other-CANARY-7f3a9c51e2";

#[tokio::test]
async fn a_provider_that_echoes_headers_back_does_not_hand_the_key_to_the_client() {
    let provider = Provider::start(|seen| {
        let key = seen.key().to_owned();
        let bearer = seen.header("authorization").to_owned();
        let echo = [
            ("authorization", bearer.as_str()),
            ("x-echo", key.as_str()),
            ("x-echo-inside", &format!("<{key}>; q=1")),
            ("set-cookie", &format!("key={key}")),
            ("location", &format!("https://example.test/?key={key}")),
            ("x-kept", "1"),
        ];
        if seen.path() == "/v1/trailers" {
            let head = [("transfer-encoding", "chunked"), ("trailer", "x-echo")];
            return Play::new().head(200, &head).chunk("ok").bytes(format!("0\r\nx-echo: {key}\r\n\r\n"));
        }
        Play::whole(if seen.path() == "/v1/refused" { 400 } else { 200 }, &echo, "ok")
    })
    .await;
    let setup = Setup::openai(&provider).key(Key::new("a").secret(CANARY)).env("RUST_LOG", "trace");
    let lessor = setup.start().await;
    for path in ["models", "refused"] {
        let answer = lessor.get(&format!("/openai/v1/{path}")).await;
        clean(path, &headers(&answer));
        assert_eq!(answer.header("x-kept"), "1");
    }
    let answer = lessor.ask(Request::get("/openai/v1/trailers").header("te", "trailers")).await;
    clean("the trailers", &format!("{:?}", answer.trailers));
    clean("the log", &lessor.log());
}

/// Of a key whose group is `auto` the organisation in an answer becomes the group's name.
#[tokio::test]
async fn a_provider_that_names_the_key_where_it_names_an_organisation_gives_it_to_nobody() {
    let provider = Provider::start(|seen| {
        let own = [
            ("openai-organization", seen.key()),
            ("retry-after", "1"),
            ("x-ratelimit-reset-requests", seen.key()),
        ];
        let error =
            json!({"message": seen.key(), "type": seen.key(), "code": seen.key(), "param": seen.key()});
        Play::json_with(if seen.path() == "/v1/models" { 200 } else { 429 }, &own, &json!({"error": error}))
    })
    .await;
    let key = Key::new("a").secret(CANARY).group("auto");
    let lessor = Setup::openai(&provider).key(key).env("RUST_LOG", "trace").start().await;
    for path in ["models", "limited", "models"] {
        let request = Request::get(&format!("/openai/v1/{path}")).header("x-lessor-max-wait", "3s");
        let answer = lessor.ask(request).await;
        clean(path, &(headers(&answer) + &answer.text()));
    }
    let shown = lessor.admin("/v1/keys").await.text();
    assert!(shown.contains("auto."), "the group was learnt: {shown}");
    let small = CANARY.to_ascii_lowercase();
    for text in [shown, lessor.admin("/v1/status").await.text(), lessor.log()] {
        assert!(!text.to_ascii_lowercase().contains(&small), "{text}");
    }
    all_doors(&lessor).await;
    clean("the log", &lessor.log());
}

/// Who wants answers as they are wants no key in the log for it.
#[tokio::test]
async fn where_answers_are_not_scrubbed_the_key_names_no_group_all_the_same() {
    let provider = Provider::start(|seen| {
        let named = if seen.path() == "/v1/models" { seen.key() } else { "Acme" };
        Play::json_with(200, &[("openai-organization", named)], &json!({}))
    })
    .await;
    let key = Key::new("a").secret(CANARY).group("auto");
    let setup = Setup::openai(&provider).key(key).env("RUST_LOG", "trace");
    let lessor = setup.set("providers.openai.scrub", "\"off\"").start().await;
    let answer = lessor.get("/openai/v1/models").await;
    assert_eq!(answer.header("openai-organization"), CANARY, "the client gets what the provider said");
    lessor.get("/openai/v1/other").await;
    let learnt = async || lessor.admin("/v1/keys").await.text().contains("auto.acme").then_some(());
    eventually("the group is learnt from an answer that names one", learnt).await;
    let small = CANARY.to_ascii_lowercase();
    for text in [lessor.admin("/v1/keys").await.text(), lessor.admin("/v1/status").await.text(), lessor.log()]
    {
        assert!(!text.to_ascii_lowercase().contains(&small), "{text}");
    }
}

#[tokio::test]
async fn a_kept_refusal_that_is_passed_on_does_not_carry_the_key_in_its_headers() {
    let provider = Provider::start(|seen| {
        let echo = [("x-echo", seen.key()), ("retry-after", "20")];
        Play::json_with(429, &echo, &support::plays::openai_error("requests", "rate_limit_exceeded", "slow"))
    })
    .await;
    let lessor = Setup::openai(&provider).key(Key::new("a").secret(CANARY)).start().await;
    let answer = lessor.chat().await;
    assert_eq!(answer.status, 429);
    clean("the refusal", &headers(&answer));
}

#[tokio::test]
async fn a_secret_is_on_no_command_line_and_in_no_file_that_lessor_makes() {
    let gate = Gate::default();
    let held = gate.clone();
    let provider = Provider::start(move |seen| Play::new().until(&held).then(openai(seen))).await;
    let lessor = Arc::new(Setup::openai(&provider).key(Key::new("a").secret(CANARY)).start().await);
    let asking = Arc::clone(&lessor);
    let asked = tokio::spawn(async move { asking.chat().await });
    provider.request(1).await;
    let command_line = std::fs::read(format!("/proc/{}/cmdline", lessor.pid())).unwrap();
    clean("the command line", &String::from_utf8_lossy(&command_line));
    let mut folders = vec![lessor.home().path().to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).unwrap() {
            let entry = entry.unwrap();
            let kind = entry.file_type().unwrap();
            if kind.is_dir() {
                folders.push(entry.path());
            } else if kind.is_file() {
                let bytes = std::fs::read(entry.path()).unwrap();
                clean(&entry.path().display().to_string(), &String::from_utf8_lossy(&bytes));
            }
        }
    }
    gate.open();
    assert_eq!(asked.await.unwrap().status, 200);
}

#[tokio::test]
async fn a_configuration_error_beside_a_secret_does_not_show_it() {
    let home = Home::default();
    let secret_file = home.path().join("secret");
    std::fs::write(&secret_file, format!("{CANARY}\nsecond line\n")).unwrap();
    for toml in [
        format!("[[keys]]\nid = \"a\"\nprovider = \"openai\"\nsecret = \"{CANARY}\"\n"),
        format!("[[keys]]\nid = \"a\"\nprovider = \"openai\"\nsecret = {{ value = \"{CANARY}\" }}\n"),
        format!(
            "[[keys]]\nid = \"a\"\nprovider = \"openai\"\nsecret = {{ file = {:?} }}\nmodles = []\n",
            secret_file
        ),
        format!("[[keys]]\nid = \"a\"\nprovider = \"openai\"\nsecrt = \"{CANARY}\"\n"),
        "[[keys]]\nid = \"a\"\nprovider = \"openai\"\nsecret = { env = \"C\" }\nmax_concurrent_uses = 0\n"
            .into(),
    ] {
        std::fs::write(home.path().join("lessor.toml"), &toml).unwrap();
        for args in [&["check", "--config", "lessor.toml"][..], &["run", "--config", "lessor.toml"]] {
            let ran = home.run_with(args, &[("C", CANARY)]).await;
            assert_ne!(ran.code, Some(0), "{toml}");
            clean(&toml.replace(CANARY, "…"), &(ran.stdout + &ran.stderr));
        }
    }
}

#[tokio::test]
async fn a_key_the_caller_sent_is_in_no_log_either() {
    let provider = Provider::start(openai).await;
    let lessor = Setup::openai(&provider).key(Key::new("a")).env("RUST_LOG", "trace").start().await;
    let message = json!({"role": "user", "content": CANARY});
    let chat = json!({"model": "gpt-4o-mini", "messages": [message]});
    let request = Request::post(&format!("/openai/v1/chat/completions?key={CANARY}&note={CANARY}"), &chat)
        .header("x-api-key", CANARY)
        .header("authorization", &format!("Bearer {CANARY}"));
    assert_eq!(lessor.ask(request).await.status, 200);
    clean("the log, which shows no credential, body or query", &lessor.log());
}

#[tokio::test]
async fn a_kept_refusal_that_is_passed_on_does_not_carry_the_key_in_its_trailers() {
    // One that is read whole before it is passed on, and one of which the end comes later.
    for padding in [0, 1 << 20] {
        let gate = Gate::default();
        let held = gate.clone();
        let provider = Provider::plain(move |seen| {
            if seen.key() != CANARY {
                return Play::sse().event("one").until(&held).done();
            }
            let error = support::plays::openai_error("requests", "rate_limit_exceeded", "slow").to_string();
            let trailers = ("trailer", "x-echo, x-kept");
            let head = [("transfer-encoding", "chunked"), trailers, ("retry-after", "20")];
            let end = format!("0\r\nx-echo: <{}>\r\nx-kept: 1\r\n\r\n", seen.header("authorization"));
            Play::new().head(429, &head).chunk(&(error + &" ".repeat(padding))).bytes(end)
        })
        .await;
        let first = Key::new("a").secret(CANARY).cap(1);
        let second = Key::new("b").secret("sk-second").cap(1);
        let lessor = Setup::openai(&provider).key(first).key(second).start().await;
        let mut other = lessor.open(chat("gpt-4o-mini").header("x-lessor-key", "b")).await;
        other.read_to("one").await;
        let request = chat("gpt-4o-mini").header("te", "trailers").header("x-lessor-max-wait", "200ms");
        let answer = lessor.ask(request).await;
        assert_eq!((answer.status, answer.header("x-lessor-error")), (429, ""), "{}", answer.text());
        assert_eq!(provider.keys_seen(), ["sk-second", CANARY]);
        clean("the headers", &headers(&answer));
        clean("the trailers", &format!("{:?}", answer.trailers));
        if padding > 0 {
            assert_eq!(answer.trailers.unwrap()["x-kept"], "1", "the others are passed on");
        }
        gate.open();
    }
}

#[tokio::test]
async fn a_key_in_an_answers_reason_phrase_does_not_reach_the_client() {
    let provider = Provider::plain(|seen| {
        let status = if seen.path() == "/v1/refused" { 429 } else { 200 };
        let (key, bearer) = (seen.key(), seen.header("authorization"));
        Play::new().bytes(format!(
            "HTTP/1.1 {status} Bad {bearer} {key}!\r\ncontent-length: 2\r\nretry-after: 20\r\n\r\nok"
        ))
    })
    .await;
    let lessor = Setup::openai(&provider).key(Key::new("a").secret(CANARY)).start().await;
    for (path, status) in [("models", 200), ("refused", 429)] {
        let mut raw = lessor.raw().await;
        let host = lessor.authority();
        raw.write(format!("GET /openai/v1/{path} HTTP/1.1\r\nHost: {host}\r\nX-Lessor-Max-Wait: 0s\r\n\r\n"))
            .await;
        let (seen, said) = raw.answer().await;
        assert_eq!(seen, status, "{said}");
        clean(path, &said);
    }
    clean("the log", &lessor.log());
}

#[tokio::test]
async fn a_key_in_the_query_is_alone_there_and_not_in_a_redirect_to_the_providers_own_url() {
    const SECRET: &str = "sk-CANARY/7f+3a=z";
    let provider = Provider::builder()
        .plain()
        .manners(support::provider::Manners::Open)
        .start(|seen| {
            let own = format!("http://{}{}", seen.header("host"), seen.target);
            let other = format!("/login?to={}", own.replace('/', "%2F"));
            let headers =
                [("location", own.as_str()), ("content-location", seen.target.as_str()), ("x-to", &other)];
            Play::whole(307, &headers, "")
        })
        .await;
    let setup = Setup::new()
        .provider("own", &provider)
        .set("providers.own.inject", "{ query = \"api_tok\" }")
        .key(Key::new("a").of("own").secret(SECRET));
    let lessor = setup.env("RUST_LOG", "trace").start().await;
    for query in
        ["", "?", "?api_tok=mine", "?a=b&api_tok=mine&c=d", "?api%5Ftok=mine&api_tok=mine", "?api_tok"]
    {
        let answer = lessor.get(&format!("/own/v1/run{query}")).await;
        assert_eq!(answer.status, 307, "{query}: {}", answer.text());
        assert!(answer.header("location").contains("/v1/run"), "{query}: {:?}", answer.headers);
        let said = headers(&answer).to_ascii_lowercase();
        for part in ["canary", "7f+3a", "7f%2b3a", "7f%252b3a"] {
            assert!(!said.contains(part), "{query}: {part} is in {said}");
        }
        let target = provider.seen().last().unwrap().target.clone();
        let pairs = url_pairs(&target);
        let tokens: Vec<_> = pairs.iter().filter(|(name, _)| name == "api_tok").collect();
        assert_eq!(tokens, [&("api_tok".to_owned(), SECRET.to_owned())], "{query} became {target}");
        assert!(!target.contains("mine"), "{query} became {target}");
    }
    let log = lessor.log().to_ascii_lowercase();
    assert!(!log.contains("canary"), "the secret is in the log");
}

/// The pairs of a target's query, decoded.
fn url_pairs(target: &str) -> Vec<(String, String)> {
    fn decoded(text: &str) -> String {
        let mut bytes = text.bytes();
        let mut plain = Vec::new();
        while let Some(byte) = bytes.next() {
            if byte != b'%' {
                plain.push(byte);
                continue;
            }
            let digits = [bytes.next().unwrap(), bytes.next().unwrap()];
            plain.push(u8::from_str_radix(std::str::from_utf8(&digits).unwrap(), 16).unwrap());
        }
        String::from_utf8(plain).unwrap()
    }
    let query = target.split_once('?').map_or("", |(_, query)| query);
    let pairs = query.split('&').map(|pair| pair.split_once('=').unwrap_or((pair, "")));
    pairs.map(|(name, value)| (decoded(name), decoded(value))).collect()
}

//! What every known answer of every provider means, from the answers themselves: read in this process, by
//! `lessor check --explain`, and by a sidecar between a client and a provider that gives them.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::pedantic, missing_docs, unreachable_pub)]

mod support;

use std::collections::BTreeMap;
use std::io::Write as _;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use flate2::Compression;
use flate2::write::GzEncoder;
use http::{HeaderMap, HeaderValue, StatusCode};
use lessor::config::Provider as Known;
use lessor::config::catalogue::{RawProvider, builtin};
use lessor::explain::Answer;
use lessor::model::{Class, Outcome, ProviderName};
use lessor::outcome;
use serde_json::{Value, json};
use support::provider::{Manners, Seen, ok};
use support::{Key, Lessor, Play, Provider, Request, Setup};

/// An answer, and what it must mean.
struct Row {
    provider: String,
    what: String,
    /// `class scope wait`.
    meaning: String,
    raw: String,
}

impl Row {
    fn class(&self) -> &str {
        self.meaning.split(' ').next().unwrap().trim_end_matches(['!', '+'])
    }

    fn wait(&self) -> Option<Duration> {
        let text = self.meaning.splitn(3, ' ').nth(2).unwrap();
        (text != "-").then(|| humantime::parse_duration(text).unwrap())
    }

    fn answer(&self) -> Answer {
        Answer::parse(self.raw.as_bytes()).unwrap()
    }
}

fn rows() -> Vec<Row> {
    let text = include_str!("refusals/answers.txt");
    let blocks = text.split("#### ").skip(1);
    blocks
        .map(|block| {
            let (first, raw) = block.split_once('\n').unwrap();
            let [provider, what, meaning] = first.split(" | ").collect::<Vec<_>>().try_into().unwrap();
            let raw = raw.trim_end().to_owned() + if raw.trim_end().contains("\n\n") { "" } else { "\n\n" };
            Row { provider: provider.into(), what: what.into(), meaning: meaning.into(), raw }
        })
        .collect()
}

/// The catalogue's, and those of the users' own that `own.toml` describes.
fn providers() -> BTreeMap<String, Arc<Known>> {
    let own: BTreeMap<String, RawProvider> = toml::from_str(include_str!("refusals/own.toml")).unwrap();
    let own = own.into_iter().map(|(name, raw)| {
        let known = raw.compile(&ProviderName::parse(&name).unwrap(), None).unwrap();
        (name, Arc::new(known))
    });
    builtin().iter().map(|(name, known)| (name.to_string(), known.clone())).chain(own).collect()
}

/// The outcome in the words of the table.
fn meaning(outcome: &Outcome) -> String {
    let proof = if outcome.class == Class::Invalid && outcome.proven { "!" } else { "" };
    let more = if outcome.another_key { "+" } else { "" };
    let scope = serde_json::to_value(outcome.scope).unwrap();
    let wait = outcome.wait.map_or("-".into(), |wait| humantime::format_duration(wait).to_string());
    format!("{}{proof}{more} {} {wait}", outcome.class.as_str(), scope.as_str().unwrap())
}

fn gzip(body: &[u8]) -> Vec<u8> {
    let mut packed = GzEncoder::new(Vec::new(), Compression::default());
    packed.write_all(body).unwrap();
    packed.finish().unwrap()
}

fn zstd(body: &[u8]) -> Vec<u8> {
    ruzstd::encoding::compress_to_vec(body, ruzstd::encoding::CompressionLevel::Fastest)
}

/// The same in chunks.
fn chunked(answer: &Answer) -> Answer {
    let mut raw =
        format!("HTTP/1.1 {}\r\ntransfer-encoding: chunked\r\n", answer.status.unwrap()).into_bytes();
    for (name, value) in &answer.headers {
        raw.extend([name.as_str().as_bytes(), b": ", value.as_bytes(), b"\r\n"].concat());
    }
    raw.extend(b"\r\n");
    for chunk in answer.body.chunks(7) {
        raw.extend([format!("{:x}\r\n", chunk.len()).as_bytes(), chunk, b"\r\n"].concat());
    }
    raw.extend(b"0\r\n\r\n");
    Answer::parse(&raw).unwrap()
}

fn packed(answer: &Answer, coding: &'static str, body: Vec<u8>) -> Answer {
    let mut headers = answer.headers.clone();
    headers.insert("content-encoding", HeaderValue::from_static(coding));
    Answer { status: answer.status, headers, body }
}

#[test]
fn every_known_answer_means_what_its_provider_says_plain_in_chunks_and_packed() {
    let (providers, now) = (providers(), SystemTime::now());
    for row in rows() {
        let answer = row.answer();
        let known = &providers[&row.provider];
        let (gzip, zstd) = (gzip(&answer.body), zstd(&answer.body));
        for (form, answer) in [
            ("in chunks", chunked(&answer)),
            ("in gzip", packed(&answer, "gzip", gzip)),
            ("in zstd", packed(&answer, "zstd", zstd)),
            ("plain", answer),
        ] {
            let outcome = outcome::read(known, answer.status.unwrap(), &answer.headers, &answer.body, now);
            assert_eq!(meaning(&outcome), row.meaning, "{}: {}, {form}", row.provider, row.what);
            assert_eq!(outcome.status, answer.status.map(|status| status.as_u16()));
        }
    }
}

#[test]
fn every_provider_of_the_catalogue_has_answers_in_the_table_and_only_what_is_named_proves_a_key_bad() {
    let rows = rows();
    for (name, known) in providers() {
        assert!(rows.iter().any(|row| row.provider == name), "{name}");
        for status in 400..600 {
            let status = StatusCode::from_u16(status).unwrap();
            let outcome = outcome::read(&known, status, &HeaderMap::new(), b"", SystemTime::now());
            assert!(outcome.class != Class::Invalid || !outcome.proven, "{name} {status}");
        }
    }
}

/// What the provider gives to a request that names this row, with key `a`; anything else is served.
fn played(rows: &[Row], seen: &Seen) -> Play {
    let number: Option<usize> = seen.header("x-row").parse().ok();
    let Some((number, row)) = number.map(|number| (number, &rows[number])) else { return ok() };
    if !seen.raw_head.contains("sk-a") {
        return ok();
    }
    let answer = row.answer();
    let text = |value: &HeaderValue| value.to_str().unwrap().to_owned();
    let headers: Vec<(String, String)> =
        answer.headers.iter().map(|(name, value)| (name.to_string(), text(value))).collect();
    let mut headers: Vec<(&str, &str)> =
        headers.iter().map(|(name, value)| (name.as_str(), value.as_str())).collect();
    let status = answer.status.unwrap().as_u16();
    match number % 3 {
        0 => Play::whole(status, &headers, answer.body),
        1 => {
            headers.push(("content-encoding", "gzip"));
            Play::whole(status, &headers, gzip(&answer.body))
        }
        _ => {
            headers.push(("transfer-encoding", "chunked"));
            Play::new().head(status, &headers).chunk(std::str::from_utf8(&answer.body).unwrap()).last_chunk()
        }
    }
}

/// One lessor with two keys of every provider, all at this double.
async fn with_all(double: &Provider) -> Lessor {
    let mut setup = Setup::new().set("ranking.strategy", "\"fill_first\"");
    for name in providers().keys() {
        setup = setup.provider(name, double).key(Key::new("a").of(name)).key(Key::new("b").of(name));
    }
    let own: toml::Table = include_str!("refusals/own.toml").parse().unwrap();
    for (name, table) in &own {
        if let Some(rules) = table.get("rules") {
            setup = setup.set(&format!("providers.{name}.rules"), &inline(rules));
        }
    }
    setup.start().await
}

/// A value of TOML on one line, in the form of JSON save for the colons.
fn inline(value: &toml::Value) -> String {
    match value {
        toml::Value::Array(all) => format!("[{}]", all.iter().map(inline).collect::<Vec<_>>().join(", ")),
        toml::Value::Table(table) => {
            let fields = table.iter().map(|(name, value)| format!("{name} = {}", inline(value)));
            format!("{{ {} }}", fields.collect::<Vec<_>>().join(", "))
        }
        toml::Value::String(text) => format!("{text:?}"),
        toml::Value::Integer(number) => number.to_string(),
        toml::Value::Boolean(flag) => flag.to_string(),
        other => panic!("{other:?} is not in own.toml"),
    }
}

fn now_ms() -> u64 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap().as_millis() as u64
}

/// Why a key rests for this model, and until when.
fn rest_of(key: &Value, model: &str) -> Option<(String, u64)> {
    let scoped = key["cooldowns"].as_array().unwrap().iter();
    let scoped = scoped.filter(|rest| rest["subject"].as_str().unwrap().contains(model));
    let scoped = scoped.map(|rest| (rest["reason"].clone(), rest["until_ms"].clone())).next();
    let own =
        (key["status"] != "available").then(|| (key["reason"].clone(), key["cooldown_until_ms"].clone()));
    let (reason, until) = scoped.or(own)?;
    Some((reason.as_str().unwrap_or("").to_owned(), until.as_u64().unwrap_or(u64::MAX)))
}

#[tokio::test]
async fn every_known_answer_has_its_effect_on_the_key_and_reaches_the_client_only_where_no_other_key_helps() {
    let table = Arc::new(rows());
    let script = Arc::clone(&table);
    let double =
        Provider::builder().manners(Manners::Open).plain().start(move |seen| played(&script, seen)).await;
    let lessor = with_all(&double).await;
    for (number, row) in table.iter().enumerate() {
        let (name, model) = (&row.provider, format!("m-{number}-"));
        let about = format!("{name}: {}", row.what);
        let begun = now_ms();
        let body = json!({"model": model, "model_id": model});
        let request =
            Request::post(&format!("/{name}/v1/things"), &body).header("x-row", &number.to_string());
        let answer = lessor.ask(request).await;
        let keys = lessor.admin("/v1/keys").await.json();
        let mut keys = keys["keys"].as_array().unwrap().iter();
        let key = keys.find(|key| key["provider"] == **name && key["id"] == "a").unwrap();
        // what the client gets
        let elsewhere =
            ["rate", "quota", "concurrency", "invalid", "access", "region"].contains(&row.class());
        if elsewhere || row.meaning.contains('+') {
            assert_eq!(
                (answer.status, answer.header("x-lessor-key")),
                (200, "b"),
                "{about}: {}",
                answer.text()
            );
            assert_eq!(answer.header("x-lessor-attempts"), "2", "{about}");
        } else {
            let given = row.answer();
            assert_eq!(answer.status, given.status.unwrap().as_u16(), "{about}");
            let bytes = if number % 3 == 1 { gzip(&given.body) } else { given.body };
            assert_eq!(answer.body, bytes, "{about}");
            assert_eq!(answer.headers.get("retry-after"), given.headers.get("retry-after"), "{about}");
        }
        // what the key has of it
        let named = row.wait();
        let rests = match row.class() {
            "rate" => Some(("rate", named.unwrap_or(Duration::from_secs(5)))),
            "quota" => Some(("quota", named.unwrap_or(Duration::from_mins(15)))),
            class @ ("access" | "region") => Some((class, Duration::from_mins(30))),
            "overloaded" => Some(("overloaded", named.unwrap_or(Duration::from_secs(1)))),
            "success" => named.map(|wait| ("rate", wait)),
            _ => None,
        };
        let seen = rest_of(key, &model);
        match rests {
            // Shorter ones may be over by now.
            Some((class, wait)) if wait >= Duration::from_secs(4) => {
                let wait = wait.as_millis() as u64;
                let (reason, until) = seen.unwrap_or_else(|| panic!("{about} rests: {key}"));
                assert_eq!(reason, class, "{about}: {key}");
                // A twentieth of jitter keeps those that were told one time from coming back all at once.
                let latest = now_ms() + wait + wait / 20 + 1;
                assert!((begun + wait..=latest).contains(&until), "{about}: {wait} {key}");
            }
            Some(_) => {}
            None if row.meaning.contains('!') => assert_eq!(key["status"], "invalid", "{about}"),
            // lessor's own check decides; by now it may have.
            None if row.class() == "invalid" => assert_ne!(key["status"], "invalid", "{about}"),
            None => assert_eq!((&key["status"], seen), (&json!("available"), None), "{about}: {key}"),
        }
        for undo in ["clear", "enable"] {
            assert_eq!(lessor.admin_post(&format!("/v1/keys/{name}/a/{undo}")).await.status, 200, "{about}");
        }
    }
}

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

//! `lessor check --explain`: which rule an answer falls under, and what would follow.
//!
//! It reads a saved answer with the very functions that read live ones, so that a rule can be tried before
//! a provider is. Nothing is asked or changed.

use std::fmt;
use std::io::Read;
use std::path::Path;
use std::time::{Duration, SystemTime};

use http::{HeaderMap, HeaderName, HeaderValue, StatusCode, header};
use serde::Serialize;

use crate::config::{Origin, Provider, Rule, StatusRange, Wait, WaitPlace};
use crate::model::{Class, Onward, Outcome, Scope};
use crate::outcome::{self, BodyKind, Reading};

/// The largest answer that is read; of its body far less decides.
const MOST: u64 = 1 << 20;

/// An answer as it was saved.
#[derive(Debug, Default)]
pub struct Answer {
    /// Of its status line, where there is one.
    pub status: Option<StatusCode>,
    /// Its headers.
    pub headers: HeaderMap,
    /// Its body, without chunks.
    pub body: Vec<u8>,
}

impl Answer {
    /// Reads a file, or standard input where it is `-`.
    pub fn load(file: &Path) -> Result<Self, String> {
        let mut bytes = Vec::new();
        let read = if file == Path::new("-") {
            std::io::stdin().take(MOST).read_to_end(&mut bytes)
        } else {
            std::fs::File::open(file).and_then(|file| file.take(MOST).read_to_end(&mut bytes))
        };
        read.map_err(|cause| format!("{} cannot be read: {cause}", file.display()))?;
        Self::parse(&bytes)
    }

    /// A status line, headers, a blank line and a body; or a body alone. Of several heads, as `curl -i`
    /// shows them, the last counts.
    pub fn parse(bytes: &[u8]) -> Result<Self, String> {
        let (mut answer, mut body) = (Self::default(), bytes);
        while body.starts_with(b"HTTP/") {
            let (head, rest) = split_head(body);
            let head = String::from_utf8_lossy(head);
            let mut lines = head.lines();
            let status = lines.next().and_then(|line| line.split_whitespace().nth(1)?.parse().ok());
            let status = status.ok_or("the answer's first line is no status line, such as `HTTP/1.1 429`")?;
            let mut headers = HeaderMap::new();
            for line in lines {
                let parsed = line.split_once(':').and_then(|(name, value)| {
                    let value = HeaderValue::from_str(value.trim()).ok()?;
                    Some((name.trim().parse::<HeaderName>().ok()?, value))
                });
                let (name, value) =
                    parsed.ok_or_else(|| format!("`{line}` is no header; a blank line ends them"))?;
                headers.append(name, value);
            }
            answer = Self { status: Some(status), headers, body: Vec::new() };
            body = rest;
        }
        let codings = answer.headers.get_all(header::TRANSFER_ENCODING).iter();
        if codings.into_iter().any(|coding| coding.as_bytes().eq_ignore_ascii_case(b"chunked"))
            && let Some(whole) = without_chunks(body)
        {
            answer.body = whole;
        } else {
            body.clone_into(&mut answer.body);
        }
        Ok(answer)
    }
}

/// What stands before the first blank line, and what behind it.
fn split_head(bytes: &[u8]) -> (&[u8], &[u8]) {
    let mut ends = memchr::memchr_iter(b'\n', bytes);
    let blank = ends.find_map(|at| {
        let rest = &bytes[at + 1..];
        let behind = rest.strip_prefix(b"\n").or_else(|| rest.strip_prefix(b"\r\n"))?;
        Some((bytes[..at].trim_ascii_end(), behind))
    });
    blank.unwrap_or((bytes, &[]))
}

/// A chunked body's data; `None` where it is not in chunks (as curl shows it).
fn without_chunks(mut rest: &[u8]) -> Option<Vec<u8>> {
    let mut whole = Vec::new();
    loop {
        let end = memchr::memchr(b'\n', rest)?;
        let line = std::str::from_utf8(&rest[..end]).ok()?;
        let size = usize::from_str_radix(line.split(';').next()?.trim(), 16).ok()?;
        rest = &rest[end + 1..];
        if size == 0 {
            return Some(whole);
        }
        whole.extend_from_slice(rest.get(..size)?);
        rest = rest.get(size..)?;
        rest = rest.strip_prefix(b"\r\n").or_else(|| rest.strip_prefix(b"\n"))?;
    }
}

/// What an answer means, and why.
#[derive(Debug, Serialize)]
pub struct Explained {
    provider: String,
    status: u16,
    body: BodyKind,
    rule: Option<RuleSeen>,
    class: Class,
    /// What rests, where something does.
    subject: Option<Scope>,
    proven: bool,
    code: Option<String>,
    wait_ms: Option<u64>,
    wait_from: Option<String>,
    another_key: bool,
    then: String,
    client: &'static str,
}

/// A rule, for people.
#[derive(Debug, Serialize)]
struct RuleSeen {
    origin: Origin,
    status: Vec<String>,
    code: Vec<String>,
    phrase: Vec<String>,
    field: Vec<String>,
}

impl RuleSeen {
    fn of(rule: &Rule) -> Self {
        let range = |StatusRange(first, last): &StatusRange| {
            if first == last { first.to_string() } else { format!("{first}-{last}") }
        };
        Self {
            origin: rule.origin,
            status: rule.status.iter().map(range).collect(),
            code: rule.codes.clone(),
            phrase: rule.phrases.clone(),
            field: rule.fields.clone(),
        }
    }
}

impl fmt::Display for RuleSeen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.origin {
            Origin::User => "your",
            Origin::Provider => "the catalogue's",
            Origin::Generic => "every provider's",
        })?;
        for (name, values) in [("status", &self.status), ("code", &self.code), ("phrase", &self.phrase)] {
            if !values.is_empty() {
                write!(f, " {name} {}", values.join(" | "))?;
            }
        }
        if !self.field.is_empty() {
            write!(f, " in {}", self.field.join(" | "))?;
        }
        Ok(())
    }
}

/// What `provider` means by an answer with `status`, had at `now`.
pub fn explain(provider: &Provider, status: StatusCode, answer: &Answer, now: SystemTime) -> Explained {
    let read = outcome::reading(provider, status, &answer.headers, &answer.body, now);
    let outcome = &read.outcome;
    // What a success announces is a refusal.
    let resting = outcome.ahead().unwrap_or_else(|| outcome.clone());
    let rests = Class::RESTS.contains(&resting.class) && resting.class != Class::Concurrency;
    Explained {
        provider: provider.name.to_string(),
        status: status.as_u16(),
        body: read.body,
        rule: read.rule.map(RuleSeen::of),
        class: outcome.class,
        subject: rests.then(|| resting.blamed_scope()),
        proven: outcome.proven,
        code: outcome.code.as_deref().map(str::to_owned),
        wait_ms: outcome.wait.map(|wait| u64::try_from(wait.as_millis()).unwrap_or(u64::MAX)),
        wait_from: wait_from(&read),
        another_key: matches!(outcome.onward(), Onward::AnotherKey | Onward::AnotherGroup),
        then: effect(&resting),
        client: client(outcome),
    }
}

fn wait_from(read: &Reading<'_>) -> Option<String> {
    let at = |wait: &Wait| match &wait.from {
        WaitPlace::Header(name) => format!("header {name}"),
        WaitPlace::Body(pointer) => format!("body {pointer}"),
        WaitPlace::Phrase(phrase, _) => format!("text behind `{phrase}`"),
    };
    read.outcome.wait.map(|_| read.wait.map_or_else(|| "the rule".to_owned(), at))
}

/// What the class does (the defaults of a wait that is not named are the store's).
fn effect(outcome: &Outcome) -> String {
    let subject = match outcome.blamed_scope() {
        Scope::Key => "the key",
        Scope::KeyModel => "the key, for this model,",
        Scope::Group => "the key's group",
        Scope::GroupModel => "the key's group, for this model,",
        Scope::ProviderModel => "the provider, for this model,",
    };
    let time = |unnamed: &str| outcome.wait.map_or_else(|| unnamed.to_owned(), shown);
    match outcome.class {
        Class::Rate => format!("{subject} rests for {}", time("5s, doubling to 2m")),
        Class::Quota => {
            format!("{subject} is exhausted for {}, then on probation", time("15m, doubling to 6h"))
        }
        Class::Concurrency => "no cooldown; the key is lent to fewer at once for a while".into(),
        Class::Invalid if outcome.proven => {
            "the key is lent no more until a check or a person says so".into()
        }
        Class::Invalid => format!("{subject} rests for 1m, and lessor's own check decides"),
        // Whatever the answer names: whether a right was given is seen by trying.
        Class::Access | Class::Region => format!("{subject} rests for 30m"),
        Class::Overloaded => format!("{subject} rests for {}; no key does", time("1s, doubling to 1m")),
        Class::Caller | Class::Success | Class::Cancelled => "nothing rests".into(),
        Class::Network => "nothing rests; the key's score goes down a little".into(),
    }
}

fn shown(wait: Duration) -> String {
    humantime::format_duration(wait).to_string().replace(' ', "")
}

fn client(outcome: &Outcome) -> &'static str {
    match outcome.onward() {
        Onward::AnotherKey => "another key is tried; where none can be had, this answer comes unchanged",
        Onward::AnotherGroup => {
            "another key is tried, none of the same group; where none can be had, this answer comes unchanged"
        }
        Onward::AfterTheRest => {
            "this answer, unchanged, for no key is lent meanwhile; where the rest ends within queue.max_wait, \
             another key is tried then"
        }
        Onward::Again => "this answer; a request whose method is idempotent is tried again first",
        Onward::Nowhere => "this answer, unchanged",
    }
}

impl fmt::Display for Explained {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let class = self.class.as_str();
        let class = match (self.class, self.proven) {
            (Class::Invalid, true) => format!("{class}, proven"),
            (Class::Invalid, false) => format!("{class}, not proven"),
            _ => class.to_owned(),
        };
        let body = match self.body {
            BodyKind::Json => "JSON",
            BodyKind::Text => "text",
            BodyKind::Unreadable => {
                "cannot be read: absent, cut off, too large, or in a coding that is not known"
            }
            BodyKind::NotAsked => "not looked at: no rule for this status asks",
        };
        writeln!(f, "{} answered {}", self.provider, self.status)?;
        let none = || "none; the status alone decides".to_owned();
        let rule = self.rule.as_ref().map_or_else(none, RuleSeen::to_string);
        writeln!(f, "rule    {rule}")?;
        writeln!(f, "class   {class}")?;
        if let Some(code) = &self.code {
            writeln!(f, "code    {code}")?;
        }
        writeln!(f, "body    {body}")?;
        match (self.wait_ms, &self.wait_from) {
            (Some(wait), Some(from)) => {
                writeln!(f, "wait    {}, from {from}", shown(Duration::from_millis(wait)))?;
            }
            _ => writeln!(f, "wait    none is named")?,
        }
        writeln!(f, "then    {}", self.then)?;
        writeln!(f, "client  {}", self.client)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_is_read_with_and_without_its_head_and_out_of_its_chunks() {
        let bare = Answer::parse(b"{\"a\":1}").unwrap();
        assert_eq!((bare.status, bare.headers.len(), bare.body.as_slice()), (None, 0, &b"{\"a\":1}"[..]));
        let unix = Answer::parse(b"HTTP/2 429\nRetry-After: 3\n\nbusy").unwrap();
        assert_eq!((unix.status.unwrap().as_u16(), unix.body.as_slice()), (429, &b"busy"[..]));
        assert_eq!(unix.headers["retry-after"], "3");
        let two = Answer::parse(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 503 Busy\r\na: b\r\n\r\n").unwrap();
        assert_eq!((two.status.unwrap().as_u16(), two.headers.len(), two.body.len()), (503, 1, 0));
        let chunked = "HTTP/1.1 429 No\r\nTransfer-Encoding: chunked\r\n\r\n";
        for (body, meant) in
            [("3;x=y\r\nabc\r\n2\r\nde\r\n0\r\n\r\n", "abcde"), ("as curl shows it", "as curl shows it")]
        {
            let answer = Answer::parse(format!("{chunked}{body}").as_bytes()).unwrap();
            assert_eq!(answer.body, meant.as_bytes());
        }
    }

    #[test]
    fn what_is_no_answer_is_refused_with_what_is_wrong() {
        assert!(Answer::parse(b"HTTP/1.1 busy\r\n\r\n").unwrap_err().contains("status line"));
        assert!(Answer::parse(b"HTTP/1.1 429\r\nno header\r\n\r\n").unwrap_err().contains("`no header`"));
    }
}

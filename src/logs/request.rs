//! The line that each request writes at its end.

use std::io::Write as _;
use std::sync::OnceLock;
use std::time::{Duration, SystemTime};

use super::lines::Lines;
use crate::model::{AppName, KeyId, LeaseId, Mode, PoolName, ProviderName};

/// Where lines go as JSON. Every request writes one, and its fields are known: to pass them one by one through
/// a subscriber that knows none of them costs more than all else that is counted of a request.
static JSON: OnceLock<Lines> = OnceLock::new();

/// The room that a usual line takes.
const USUAL: usize = 512;

/// From now on requests' lines are written here, as JSON, where their level is logged at all.
pub(super) fn write_to(lines: Lines) {
    // A second one changes nothing, as with all logging.
    let _ = JSON.set(lines);
}

/// What is known of one request at its end. Filled on the way, written once by [`emit`](Self::emit).
#[derive(Debug, Clone)]
pub struct RequestLine {
    /// Who called.
    pub app: AppName,
    /// Whose keys, once known.
    pub provider: Option<ProviderName>,
    /// How it came in.
    pub mode: Mode,
    /// Its method.
    pub method: http::Method,
    /// The pool of the last lease.
    pub pool: Option<PoolName>,
    /// The key of the last lease.
    pub key: Option<KeyId>,
    /// The last lease.
    pub lease: Option<LeaseId>,
    /// How often it was sent.
    pub attempts: u32,
    /// How long it waited for keys, all waits together.
    pub waited: Duration,
    /// The status the client got; `None` when it left before.
    pub status: Option<u16>,
    /// From its head to the answer's head.
    pub first_byte: Option<Duration>,
    /// From its head to the end of everything.
    pub total: Duration,
    /// How it ended: a class, or another word of the outcome metric.
    pub outcome: &'static str,
    /// The code of lessor's own answer, where lessor gave it.
    pub error: Option<&'static str>,
    /// The same in words: what could not be reached, say. Never a query, a body or a secret.
    pub detail: Option<String>,
}

impl RequestLine {
    /// A request of which only this is known.
    pub fn new(app: AppName, mode: Mode, method: http::Method) -> Self {
        Self {
            app,
            provider: None,
            mode,
            method,
            pool: None,
            key: None,
            lease: None,
            attempts: 0,
            waited: Duration::ZERO,
            status: None,
            first_byte: None,
            total: Duration::ZERO,
            outcome: "",
            error: None,
            detail: None,
        }
    }

    /// Writes the line.
    pub fn emit(&self) {
        if !tracing::enabled!(target: "lessor::request", tracing::Level::INFO) {
            return;
        }
        match JSON.get() {
            Some(lines) => lines.put(&self.as_json(SystemTime::now())),
            None => self.trace(),
        }
    }

    /// As any other line.
    fn trace(&self) {
        tracing::info!(
            target: "lessor::request",
            app = %self.app,
            provider = self.provider.as_ref().map(display),
            mode = self.mode.as_str(),
            method = %self.method,
            pool = self.pool.as_ref().map(display),
            key = self.key.as_ref().map(display),
            lease = self.lease.as_ref().map(display),
            attempts = self.attempts,
            waited_ms = millis(self.waited),
            status = self.status,
            first_byte_ms = self.first_byte.map(millis),
            total_ms = millis(self.total),
            outcome = self.outcome,
            error = self.error,
            detail = self.detail.as_deref(),
            "request"
        );
    }

    /// The same line as [`Self::trace`] makes of it where lines are JSON.
    fn as_json(&self, now: SystemTime) -> Vec<u8> {
        let mut line = Json(Vec::with_capacity(USUAL));
        line.put("{\"timestamp\":\"");
        // Nothing that goes into a `Vec` here can fail.
        let _ = write!(line.0, "{}", humantime::format_rfc3339_micros(now));
        line.put("\",\"level\":\"INFO\",\"message\":\"request\"");
        line.name(",\"app\":\"", Some(self.app.as_str()));
        line.name(",\"provider\":\"", self.provider.as_ref().map(ProviderName::as_str));
        line.name(",\"mode\":\"", Some(self.mode.as_str()));
        line.text(",\"method\":", Some(self.method.as_str()));
        line.name(",\"pool\":\"", self.pool.as_ref().map(PoolName::as_str));
        line.name(",\"key\":\"", self.key.as_ref().map(KeyId::as_str));
        if let Some(lease) = self.lease {
            line.name(",\"lease\":\"", Some(lease.text(&mut [0; LeaseId::LENGTH])));
        }
        line.number(",\"attempts\":", Some(self.attempts.into()));
        line.number(",\"waited_ms\":", Some(millis(self.waited)));
        line.number(",\"status\":", self.status.map(u64::from));
        line.number(",\"first_byte_ms\":", self.first_byte.map(millis));
        line.number(",\"total_ms\":", Some(millis(self.total)));
        line.name(",\"outcome\":\"", Some(self.outcome));
        line.name(",\"error\":\"", self.error);
        line.text(",\"detail\":", self.detail.as_deref());
        line.put(",\"target\":\"lessor::request\"}\n");
        line.0
    }
}

/// An object that is being written. A field without a value is left out.
struct Json(Vec<u8>);

impl Json {
    fn put(&mut self, text: &str) {
        self.0.extend_from_slice(text.as_bytes());
    }

    /// A value that holds nothing that must be escaped: a name of the house or the catalogue. Its first quote
    /// stands in `before`.
    fn name(&mut self, before: &str, value: Option<&str>) {
        let Some(value) = value else { return };
        self.put(before);
        self.put(value);
        self.0.push(b'"');
    }

    /// Any value.
    fn text(&mut self, before: &str, value: Option<&str>) {
        let Some(value) = value else { return };
        self.put(before);
        // Any text can be said in JSON.
        let _ = serde_json::to_writer(&mut self.0, value);
    }

    fn number(&mut self, before: &str, value: Option<u64>) {
        let Some(value) = value else { return };
        self.put(before);
        let _ = serde_json::to_writer(&mut self.0, &value);
    }
}

fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a test that fails may panic
mod tests {
    use super::super::tests::logged;
    use super::*;

    /// The line as a subscriber writes it, which is the one written without.
    fn written(line: &RequestLine) -> String {
        let (traced, own) = (logged(|| line.emit()), line.as_json(SystemTime::now()));
        let own = String::from_utf8(own).unwrap();
        let without_time = |line: &str| {
            let rest = line.strip_prefix("{\"timestamp\":\"2").unwrap();
            let (time, rest) = rest.split_at("026-01-01T00:00:00.000000Z".len());
            assert!(time.ends_with('Z'), "{line}");
            rest.to_owned()
        };
        assert_eq!(without_time(&own), without_time(&traced));
        own
    }

    #[test]
    fn a_request_writes_one_line_that_names_everything_and_leaves_out_what_never_was() {
        let lease = LeaseId::fresh();
        let mut line = RequestLine::new(AppName::anonymous(), Mode::BaseUrl, http::Method::POST);
        let bare = written(&line);
        line.provider = ProviderName::parse("openai").ok();
        line.pool = Some(PoolName::default_pool());
        line.key = KeyId::parse("openai-a").ok();
        line.lease = Some(lease);
        line.attempts = 2;
        line.waited = Duration::from_millis(7);
        line.status = Some(200);
        line.first_byte = Some(Duration::from_millis(120));
        line.total = Duration::from_secs(3);
        line.outcome = "success";
        line.detail = Some("\"a\" \\ b\nü\u{7f}".into());
        let full = written(&line);
        assert_eq!((bare.lines().count(), full.lines().count()), (1, 1));
        let bare: serde_json::Value = serde_json::from_str(&bare).unwrap();
        assert!(bare.get("key").is_none() && bare.get("first_byte_ms").is_none(), "{bare}");
        let full: serde_json::Value = serde_json::from_str(&full).unwrap();
        for (field, value) in [
            ("app", "anonymous".into()),
            ("provider", "openai".into()),
            ("mode", "base_url".into()),
            ("method", "POST".into()),
            ("pool", "default".into()),
            ("key", "openai-a".into()),
            ("lease", lease.to_string().into()),
            ("attempts", serde_json::json!(2)),
            ("waited_ms", serde_json::json!(7)),
            ("status", serde_json::json!(200)),
            ("first_byte_ms", serde_json::json!(120)),
            ("total_ms", serde_json::json!(3000)),
            ("outcome", "success".into()),
            ("message", "request".into()),
            ("detail", "\"a\" \\ b\nü\u{7f}".into()),
        ] {
            assert_eq!(full[field], value, "{field} of {full}");
        }
    }
}

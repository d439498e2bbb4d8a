//! What the process says about itself: one line per request, and never a secret, a body or a query.
//!
//! Lines go to stderr, readable on a terminal and JSON elsewhere, by a thread of their own: a reader of
//! stderr that stands still holds nobody up. Some 16,000 lines wait for it; more are dropped, and counted.

use std::io::{IsTerminal as _, Write as _};
use std::panic::PanicHookInfo;
use std::time::Duration;

use tracing_subscriber::EnvFilter;

use crate::model::{AppName, KeyId, LeaseId, Mode, PoolName, ProviderName};

mod lines;

use lines::Lines;
pub use lines::LogEnd;

/// Starts logging to stderr: JSON or not as said, else by whether stderr is a terminal. `RUST_LOG`
/// chooses what is logged (`usual` unless set). A second call changes nothing.
///
/// What is given must live until the process ends: dropping it writes what is still queued.
///
/// # Errors
/// Those of the system, where there can be no thread that writes.
pub fn init(json: Option<bool>, usual: &str) -> std::io::Result<LogEnd> {
    let terminal = std::io::stderr().is_terminal();
    let asked = std::env::var("RUST_LOG").ok().filter(|asked| !asked.trim().is_empty());
    let (filter, refused) = match asked.as_deref().map(str::parse::<EnvFilter>) {
        None => (EnvFilter::new(usual), None),
        Some(Ok(filter)) => (filter, None),
        Some(Err(cause)) => (EnvFilter::new(usual), Some(cause)),
    };
    let (writer, end) = Lines::to(std::io::stderr())?;
    let lines = tracing_subscriber::fmt().with_env_filter(filter).with_writer(writer);
    let started = if json.unwrap_or(!terminal) {
        lines.json().flatten_event(true).with_current_span(false).with_span_list(false).try_init()
    } else {
        lines.with_ansi(terminal && std::env::var_os("NO_COLOR").is_none()).try_init()
    };
    if let (Ok(()), Some(cause)) = (started, refused) {
        tracing::warn!(%cause, "RUST_LOG cannot be read; logging as usual");
    }
    Ok(end)
}

/// From now on a panic logs its place and its thread, and not its payload, which may hold anything.
///
/// Apart from [`init`], because a test that fails needs its payload.
pub fn hide_panic_payloads() {
    std::panic::set_hook(Box::new(panicked));
}

fn panicked(info: &PanicHookInfo<'_>) {
    let place = info.location().map(ToString::to_string).unwrap_or_default();
    let thread = std::thread::current();
    if tracing::dispatcher::has_been_set() {
        tracing::error!(place, thread = thread.name(), "panicked; this is a bug in lessor");
    } else {
        let _ = writeln!(std::io::stderr(), "error: panicked at {place}; this is a bug in lessor");
    }
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
}

fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a test that fails may panic
mod tests {
    use std::io::Write;
    use std::sync::{Arc, Mutex};

    use super::*;

    #[derive(Clone, Default)]
    struct Page(Arc<Mutex<Vec<u8>>>);

    impl Write for Page {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0.lock().unwrap().write(bytes)
        }
        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    fn logged(work: impl FnOnce()) -> String {
        let page = Page::default();
        let to = page.clone();
        let lines = tracing_subscriber::fmt().json().flatten_event(true).with_writer(move || to.clone());
        tracing::subscriber::with_default(lines.finish(), work);
        String::from_utf8(page.0.lock().unwrap().clone()).unwrap()
    }

    #[test]
    fn a_request_writes_one_line_that_names_everything_and_leaves_out_what_never_was() {
        let lease = LeaseId::fresh();
        let mut line = RequestLine::new(AppName::anonymous(), Mode::BaseUrl, http::Method::POST);
        let bare = logged(|| line.emit());
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
        let full = logged(|| line.emit());
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
        ] {
            assert_eq!(full[field], value, "{field} of {full}");
        }
    }

    #[test]
    fn a_panic_logs_its_place_and_never_its_payload() {
        let page = logged(|| {
            // The hook is the process's: other tests that fail meanwhile lose only their text.
            let before = std::panic::take_hook();
            hide_panic_payloads();
            let end = std::panic::catch_unwind(|| panic!("{}", "sk-canary"));
            std::panic::set_hook(before);
            assert!(end.is_err());
        });
        assert!(page.contains("logs.rs:") && page.contains("panicked"), "{page}");
        assert!(!page.contains("canary"), "{page}");
    }
}

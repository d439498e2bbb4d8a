//! What the process says about itself: one line per request, and never a secret, a body or a query.
//!
//! Lines go to stderr, readable on a terminal and JSON elsewhere, by a thread of their own: a reader of
//! stderr that stands still holds nobody up. Some 16,000 lines wait for it; more are dropped, and counted.

use std::io::{IsTerminal as _, Write as _};
use std::panic::PanicHookInfo;

use tracing_subscriber::EnvFilter;

mod lines;
mod request;

use lines::Lines;
pub use lines::LogEnd;
pub use request::RequestLine;

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
    let lines = tracing_subscriber::fmt().with_env_filter(filter).with_writer(writer.clone());
    let json = json.unwrap_or(!terminal);
    let started = if json {
        lines.json().flatten_event(true).with_current_span(false).with_span_list(false).try_init()
    } else {
        lines.with_ansi(terminal && std::env::var_os("NO_COLOR").is_none()).try_init()
    };
    if json && started.is_ok() {
        request::write_to(writer);
    }
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

    pub(super) fn logged(work: impl FnOnce()) -> String {
        let page = Page::default();
        let to = page.clone();
        let lines = tracing_subscriber::fmt().json().flatten_event(true).with_writer(move || to.clone());
        tracing::subscriber::with_default(lines.finish(), work);
        String::from_utf8(page.0.lock().unwrap().clone()).unwrap()
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

//! `lessor doctor`: proof, from end to end, that what is configured works on this machine; and what to do
//! where it does not.
//!
//! Two halves. [`inside`] runs where the secrets, the trust and the store's connection are: in the sidecar,
//! which is asked for it over its admin door, so that what is examined is what serves. [`outside`] runs where
//! applications run: whether the sidecar is reached, what a child would find in its environment, and whether
//! each runtime of this machine trusts the local CA. Where no sidecar runs, one is started for the time of
//! the examination, as `lessor exec` does; where none can, the inside half runs in the command itself.
//!
//! Every step has a bound, and all together end within a minute. No secret is in what a check says: each
//! text is searched for them before it leaves.

use std::collections::BTreeMap;
use std::path::Path;
use std::pin::Pin;
use std::sync::{Arc, Mutex};

use rustls::ClientConfig;
use rustls::pki_types::CertificateDer;
use serde::{Deserialize, Serialize};

use crate::config::Config;
use crate::model::Secret;
use crate::store::Store;

mod canary;
pub mod inside;
mod network;
pub mod outside;
mod page;
mod runtimes;
mod store;

/// How a check came out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Verdict {
    /// As it should be.
    Ok,
    /// Works, or may; somebody should look.
    Warn,
    /// Does not work.
    Fail,
    /// Not looked at, for a reason that is told.
    Skip,
}

impl Verdict {
    fn as_str(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Warn => "warn",
            Self::Fail => "fail",
            Self::Skip => "skip",
        }
    }
}

/// One check, and what it found.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Check {
    /// What was looked at: `store`, `tls api.openai.com`, `trust curl`.
    pub check: String,
    /// How it came out.
    pub verdict: Verdict,
    /// What was found.
    pub found: String,
    /// What to do, where it is not as it should be.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub advice: Option<String>,
}

impl Check {
    fn new(check: impl Into<String>, verdict: Verdict, found: impl Into<String>) -> Self {
        Self { check: check.into(), verdict, found: found.into(), advice: None }
    }

    fn ok(check: impl Into<String>, found: impl Into<String>) -> Self {
        Self::new(check, Verdict::Ok, found)
    }

    fn skip(check: impl Into<String>, found: impl Into<String>) -> Self {
        Self::new(check, Verdict::Skip, found)
    }

    fn warn(check: impl Into<String>, found: impl Into<String>, advice: impl Into<String>) -> Self {
        Self { advice: Some(advice.into()), ..Self::new(check, Verdict::Warn, found) }
    }

    fn fail(check: impl Into<String>, found: impl Into<String>, advice: impl Into<String>) -> Self {
        Self { advice: Some(advice.into()), ..Self::new(check, Verdict::Fail, found) }
    }
}

/// What the sidecar answers when it is asked to examine itself.
#[derive(Debug, Serialize, Deserialize)]
pub struct Examined {
    /// In the order in which they are shown.
    pub checks: Vec<Check>,
}

/// A TLS client that keeps the chain it was shown, also where it refused it.
pub type Shown = (ClientConfig, Arc<Mutex<Vec<CertificateDer<'static>>>>);

/// A store that is being opened.
pub type Opening<'c> = Pin<Box<dyn Future<Output = Result<Arc<dyn Store>, String>> + Send + 'c>>;

/// What the examination borrows from rooms that this one may not import.
#[derive(Debug, Clone, Copy)]
pub struct Tools {
    /// TLS that trusts what forwarding trusts, with this `ca_file`.
    pub tls: fn(Option<&Path>) -> Result<Shown, String>,
    /// Whether a text holds a secret, in any form that is masked in answers.
    pub holds: fn(&Secret, &[u8]) -> bool,
    /// Opens the store that a configuration names.
    pub open_store: for<'c> fn(&'c Config) -> Opening<'c>,
}

/// Shorter values are words, and stand anywhere.
const SHORTEST: usize = 8;

impl Tools {
    /// Whether `text` holds `secret`; one that is too short to tell is not looked for.
    fn finds(self, secret: &Secret, text: &[u8]) -> bool {
        secret.expose().len() >= SHORTEST && (self.holds)(secret, text)
    }
}

/// Takes out what holds a secret. Nothing should: this is the last guard.
fn withhold(checks: &mut [Check], secrets: &[&Secret], tools: Tools) {
    // All texts at once for each: a secret costs more to be made ready than to be looked for.
    let whole = checks.iter().fold(String::new(), |mut whole, check| {
        for text in [&check.check, &check.found].into_iter().chain(&check.advice) {
            whole.push_str(text);
            whole.push('\n');
        }
        whole
    });
    let held: Vec<_> = secrets.iter().filter(|secret| tools.finds(secret, whole.as_bytes())).collect();
    if held.is_empty() {
        return;
    }
    for check in checks {
        for text in [&mut check.check, &mut check.found].into_iter().chain(&mut check.advice) {
            if held.iter().any(|secret| tools.finds(secret, text.as_bytes())) {
                *text = "(withheld: it held a secret)".into();
            }
        }
    }
}

/// `text` on one line, without control characters, and no longer than a line is read.
fn line(text: &str) -> String {
    const LONGEST: usize = 300;
    let plain: String = text.trim().chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
    let mut cut: String = plain.chars().take(LONGEST).collect();
    if cut.len() < plain.len() {
        cut.push('…');
    }
    cut
}

/// How many checks came out how.
fn counts(checks: &[Check]) -> BTreeMap<&'static str, usize> {
    let none =
        [Verdict::Ok, Verdict::Warn, Verdict::Fail, Verdict::Skip].map(|verdict| (verdict.as_str(), 0));
    let mut counts = BTreeMap::from(none);
    for check in checks {
        *counts.entry(check.verdict.as_str()).or_default() += 1;
    }
    counts
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a test that fails may panic
mod tests {
    use super::*;

    #[test]
    fn what_holds_a_secret_in_any_form_is_withheld_and_a_word_is_no_secret() {
        use base64::Engine as _;
        let tools = crate::run::doctors_tools();
        let (secret, word) = (Secret::new("sk-canary-0123456789".into()), Secret::new("store".into()));
        let coded = base64::engine::general_purpose::STANDARD.encode(secret.expose());
        let mut checks = [
            Check::ok("store", "answers"),
            Check::warn("trust curl", format!("curl: {coded}"), format!("see {}", secret.expose())),
        ];
        withhold(&mut checks, &[&secret, &word], tools);
        assert_eq!(checks[0], Check::ok("store", "answers"));
        let withheld = "(withheld: it held a secret)";
        assert_eq!(checks[1], Check::warn("trust curl", withheld, withheld));
    }
}

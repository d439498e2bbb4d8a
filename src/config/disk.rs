//! How the file on disk stands to what runs.

use std::fmt;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};

/// The end of the year 9999.
const LAST_MS: u64 = 253_402_300_799_000;

/// What of the file on disk does not run.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct OnDisk {
    /// All of it: it is refused, and what ran before runs on.
    pub refused: Option<Refused>,
    /// These fields of it, which count from the next start only.
    pub needs_restart: Vec<&'static str>,
}

/// A configuration that was not taken.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Refused {
    /// Since when none was, in ms since the Unix epoch, by this machine's clock.
    pub since_ms: u64,
    /// The first line of why; `lessor check` says all of it.
    pub error: String,
}

impl OnDisk {
    /// It is refused, for this reason; what was refused before is so since then.
    #[must_use]
    pub fn refused(&self, why: &str) -> Self {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let now = u64::try_from(now.as_millis()).unwrap_or(u64::MAX);
        let since_ms = self.refused.as_ref().map_or(now, |refused| refused.since_ms);
        let error = why.lines().next().unwrap_or_default().to_owned();
        Self { refused: Some(Refused { since_ms, error }), needs_restart: self.needs_restart.clone() }
    }
}

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // A sidecar's answer may hold any number, and none of a year past 9999 can be written.
        let since = Duration::from_millis(self.since_ms.min(LAST_MS));
        let since = humantime::format_rfc3339_seconds(UNIX_EPOCH + since);
        write!(f, "the file on disk is refused since {since}: {}", self.error)
    }
}

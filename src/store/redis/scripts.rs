//! The Lua scripts, each put together from `lua/`.
//!
//! `clock.lua` comes first in all that look at the time, so there is one clock, and one place where tests put
//! another.

use sha1_smol::Sha1;

/// The clock of all sidecars: Redis' own.
pub const REDIS_TIME: &str = include_str!("../../../lua/clock.lua");

const RESTS: &str = include_str!("../../../lua/rests.lua");

const EVIDENCE: &str = include_str!("../../../lua/evidence.lua");

/// One script as it is sent.
pub(super) struct Script {
    pub(super) text: String,
    pub(super) sha: String,
}

impl Script {
    fn new(parts: &[&str]) -> Self {
        let text = parts.concat();
        let sha = Sha1::from(&text).digest().to_string();
        Self { text, sha }
    }
}

/// All of them.
pub(super) struct Scripts {
    pub(super) now: Script,
    pub(super) acquire: Script,
    pub(super) renew: Script,
    pub(super) release: Script,
    pub(super) report: Script,
    pub(super) sync: Script,
    pub(super) status: Script,
    pub(super) revoke: Script,
    pub(super) reconcile: Script,
    pub(super) trial: Script,
}

impl Scripts {
    /// With this text as the clock.
    pub(super) fn with_clock(clock: &str) -> Self {
        macro_rules! script {
            ($name:literal $(, $before:expr)*) => {
                Script::new(&[$($before,)* include_str!(concat!("../../../lua/", $name, ".lua"))])
            };
        }
        Self {
            now: script!("now", clock),
            acquire: script!("acquire", clock, RESTS),
            renew: script!("renew", clock, RESTS),
            release: script!("release", clock),
            report: script!("report", clock, RESTS, EVIDENCE),
            sync: script!("sync", clock, RESTS),
            status: script!("status", clock, RESTS, EVIDENCE),
            revoke: script!("revoke", clock),
            reconcile: script!("reconcile", clock, RESTS),
            trial: script!("trial"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The scripts decide who holds a key, in a store that sidecars of several versions share. A change here
    /// is meant to be seen in review: pin the new hash, and say in the commit why old and new may run side by
    /// side.
    #[test]
    fn a_changed_script_is_seen_in_review() {
        let scripts = Scripts::with_clock(REDIS_TIME);
        let all = [
            ("now", &scripts.now),
            ("acquire", &scripts.acquire),
            ("renew", &scripts.renew),
            ("release", &scripts.release),
            ("report", &scripts.report),
            ("sync", &scripts.sync),
            ("status", &scripts.status),
            ("revoke", &scripts.revoke),
            ("reconcile", &scripts.reconcile),
            ("trial", &scripts.trial),
        ];
        let found: Vec<String> = all.iter().map(|(name, script)| format!("{name} {}", script.sha)).collect();
        let pinned: Vec<&str> = include_str!("../../../lua/pinned").lines().collect();
        assert_eq!(found, pinned);
    }
}

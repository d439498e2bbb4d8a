//! A rest: the one mechanism behind every cooldown, whatever its subject and whatever set it.
//!
//! A rest has an end, and remembers why it was set and which tokens had been issued by then. Three
//! rules hold for all of them. The longest evidence wins: nothing shortens a rest but a success, a
//! check or a person. Only a lease granted after the rest was set knows better: its success lifts the
//! rest, and only its refusal makes the next wait longer, since the many answers that were on their
//! way when the first refusal came are one piece of news. Waits the provider named are taken as they
//! are (within the bound of their class) and grow nothing.

use std::sync::Arc;
use std::time::Duration;

use crate::model::{Class, FencingToken, LeaseId};
use crate::store::StoreTime;

const SECOND: Duration = Duration::from_secs(1);
const MINUTE: Duration = Duration::from_mins(1);
const HOUR: Duration = Duration::from_hours(1);
const DAY: Duration = Duration::from_hours(24);

/// How long a rest's growth is remembered after its end when nothing bad happens.
const GROWTH_REMEMBERED: Duration = Duration::from_mins(10);
/// How often an exhausted subject is tried before its named end: people top up their accounts.
const EARLY_PROBE_EVERY: Duration = Duration::from_mins(30);

/// How a class's waits are chosen.
struct Policy {
    /// The first wait when the provider named none.
    first: Duration,
    /// Where doubling stops; equal to `first` where nothing doubles.
    most: Duration,
    /// Whether the rest is followed by a probation.
    probation: bool,
}

impl Policy {
    /// The table of the design's section 7.
    fn of(class: Class) -> Self {
        let (first, most, probation) = match class {
            Class::Rate => (SECOND * 5, MINUTE * 2, false),
            Class::Quota => (MINUTE * 15, HOUR * 6, true),
            Class::Overloaded => (SECOND, MINUTE, true),
            Class::Access | Class::Region => (MINUTE * 30, MINUTE * 30, false),
            // Only doubt comes here: what is proven ends with a check, not with a time.
            Class::Invalid => (MINUTE, MINUTE, false),
            Class::Concurrency | Class::Caller | Class::Success | Class::Cancelled | Class::Network => {
                (Duration::ZERO, Duration::ZERO, false)
            }
        };
        Self { first, most, probation }
    }

    fn grows(&self) -> bool {
        self.most > self.first
    }

    /// The wait after `strikes` refusals in a row that named none.
    fn wait(&self, strikes: u32) -> Duration {
        // 20 doublings of a second are beyond every `most`, so the bound on the shift changes nothing.
        self.first.saturating_mul(1 << strikes.saturating_sub(1).min(20)).min(self.most)
    }
}

/// A wait the provider named, within the bound of its class; `None` where the class takes none.
fn bounded(class: Class, said: Duration) -> Option<Duration> {
    match class {
        // More than minutes is said where the rule names a day's window.
        Class::Rate => Some(said.min(DAY)),
        Class::Quota => Some(said.min(DAY * 32)),
        // One busy answer must not stop a whole provider for long.
        Class::Overloaded => Some(said.min(MINUTE)),
        _ => None,
    }
}

/// What a class says of the rest that it sets, for a store that applies it elsewhere.
#[derive(Debug, Clone, Copy)]
pub(in crate::store) struct Terms {
    /// The wait the provider named, bounded.
    pub(in crate::store) said: Option<Duration>,
    /// The first wait where it named none.
    pub(in crate::store) first: Duration,
    /// Where doubling stops.
    pub(in crate::store) most: Duration,
    /// Whether a probation follows.
    pub(in crate::store) probation: bool,
    /// Whether only a check or a person ends it.
    pub(in crate::store) forever: bool,
}

impl Terms {
    pub(in crate::store) fn of(class: Class, wait: Option<Duration>, doubt: bool) -> Self {
        let Policy { first, most, probation } = Policy::of(class);
        let said = wait.and_then(|said| bounded(class, said));
        Self { said, first, most, probation, forever: class == Class::Invalid && !doubt }
    }
}

/// The longest that a rest of this class may last; `None` where only a check or a person ends it.
fn longest(class: Class, doubt: bool) -> Option<Duration> {
    (class != Class::Invalid || doubt)
        .then(|| Policy::of(class).most.max(bounded(class, Duration::MAX).unwrap_or_default()))
}

/// What was learned about a subject, and from whom.
#[derive(Debug, Clone)]
pub struct Evidence {
    /// The class.
    pub class: Class,
    /// The wait the provider named.
    pub wait: Option<Duration>,
    /// Not proven: lessor's own check decides.
    pub doubt: bool,
    /// lessor's own check said so, not an answer to a caller.
    pub by_check: bool,
    /// The answer's status.
    pub status: Option<u16>,
    /// The body's code.
    pub code: Option<Arc<str>>,
    /// The lease that met it; `None` for a check.
    pub lease: Option<LeaseId>,
    /// The token of that lease.
    pub token: FencingToken,
    /// The refused request named a model.
    pub of_model: bool,
}

impl Evidence {
    /// Whether only a check or a person ends what it sets.
    pub(in crate::store) fn is_proof(&self) -> bool {
        self.class == Class::Invalid && !self.doubt
    }
}

/// A time until which a subject is not lent, and what follows it.
// None of what is true or not of it follows from another.
#[allow(clippy::struct_excessive_bools)]
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rest {
    /// The class that set it.
    pub class: Class,
    /// When it began.
    pub since: StoreTime,
    /// When it ends; [`StoreTime::NEVER`] where a check or a person must end it.
    pub until: StoreTime,
    /// Above every token issued before it was last set, below every one issued after.
    pub token: FencingToken,
    /// Refusals in a row that named no wait: the next wait is the first, doubled as often.
    pub strikes: u32,
    /// Whether a probation follows: one lease at a time until a success.
    pub on_probe_end: bool,
    /// The lease that probes. It is out while that lease lives, so that its end, however it comes,
    /// ends the probe without a write.
    pub probe_lease: Option<LeaseId>,
    /// When it was last probed or set: an early probe is due half an hour later.
    pub probed_at: StoreTime,
    /// Whether lessor's own check lifts it.
    pub doubt: bool,
    /// Whether lessor's own check set it.
    pub by_check: bool,
    /// The status that was evidence.
    pub status: Option<u16>,
    /// The body's code that was evidence.
    pub code: Option<Arc<str>>,
    /// Whether a request that named a model was refused: then no success of one that names none, which may
    /// cost the provider nothing, tells that it is over.
    pub of_model: bool,
}

/// What a rest says to somebody who wants to lend its subject.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Gate {
    /// Lend.
    Open,
    /// Lend once, as the probe.
    Probe,
    /// Lend once, as the probe; where that cannot be, it cools until then.
    EarlyProbe(StoreTime, Class),
    /// The probe is out.
    ProbeOut(LeaseId),
    /// Not before then.
    Cooling(StoreTime, Class),
    /// Not before a check or a person says so.
    Invalid,
}

impl Rest {
    /// What is known after `evidence`: `old` or something longer, never something shorter. `stamp` is
    /// a token newer than all issued so far.
    pub fn after(old: Option<&Self>, evidence: &Evidence, stamp: FencingToken, now: StoreTime) -> Self {
        let old = old.filter(|rest| !rest.is_forgotten(now));
        let policy = Policy::of(evidence.class);
        let Terms { said, forever, .. } = Terms::of(evidence.class, evidence.wait, evidence.doubt);
        let fresh = old.is_none_or(|rest| rest.is_news(evidence, now));
        let known = old.filter(|rest| rest.class == evidence.class).map_or(0, |rest| rest.strikes);
        let counts = policy.grows() && said.is_none() && fresh;
        let strikes = if counts { known.saturating_add(1) } else { known };
        let until = match said {
            _ if forever => StoreTime::NEVER,
            Some(said) => now.plus(said),
            None => now.plus(policy.wait(strikes)),
        };
        if let Some(longer) = old.filter(|rest| rest.until >= until) {
            let mut kept = longer.clone();
            kept.on_probe_end |= policy.probation;
            kept.of_model |= evidence.of_model;
            if fresh {
                kept.token = stamp;
                if kept.class == evidence.class {
                    kept.strikes = strikes;
                }
            }
            return kept;
        }
        Self {
            class: evidence.class,
            since: now,
            until,
            token: stamp,
            strikes,
            // Only a success ends a probation, and a probe that is out stays the only one.
            on_probe_end: policy.probation || old.is_some_and(|rest| rest.on_probe_end),
            probe_lease: old.and_then(|rest| rest.probe_lease),
            probed_at: now,
            doubt: evidence.doubt,
            by_check: evidence.by_check,
            status: evidence.status,
            code: evidence.code.clone(),
            of_model: evidence.of_model || old.is_some_and(|rest| rest.of_model),
        }
    }

    /// Whether a refusal tells more than the one that set this rest: its lease is newer, and it was
    /// not sent into a rest that was known (only a probe is).
    fn is_news(&self, evidence: &Evidence, now: StoreTime) -> bool {
        let probed = self.probe_lease.is_some() && self.probe_lease == evidence.lease;
        evidence.token > self.token && (now >= self.until || probed)
    }

    /// What may still be believed of it where the clock may have gone back since it was set: nothing was
    /// set in the future, and nothing lasts longer from now than its class allows. So a wall clock that was
    /// years ahead locks no key for years.
    #[must_use]
    pub fn clamped(mut self, now: StoreTime) -> Self {
        self.since = self.since.min(now);
        self.probed_at = self.probed_at.min(now);
        if let Some(longest) = longest(self.class, self.doubt) {
            self.until = self.until.min(now.plus(longest));
        }
        self
    }

    /// Whether a success of a lease with `token` lifts it; `with_model`: its request named one.
    pub fn is_lifted_by(&self, token: FencingToken, with_model: bool) -> bool {
        token > self.token && self.is_proved_by(with_model)
    }

    /// Whether a success of a request that names a model, or of one that names none, says anything about it.
    pub fn is_proved_by(&self, with_model: bool) -> bool {
        with_model || !self.of_model
    }

    /// Whether the caller's words alone may have set it, so that others need not make room for it.
    pub fn is_light(&self) -> bool {
        self.class == Class::Access || self.doubt
    }

    /// Whether nothing of it is worth remembering.
    pub fn is_forgotten(&self, now: StoreTime) -> bool {
        now >= self.until
            && !self.on_probe_end
            && (self.strikes == 0 || now >= self.until.plus(GROWTH_REMEMBERED))
    }

    /// Whether it stops lending right now, save for a probe.
    pub fn is_resting(&self, now: StoreTime) -> bool {
        now < self.until
    }

    /// Whether only a check or a person ends it.
    pub fn is_invalid(&self) -> bool {
        self.class == Class::Invalid && !self.doubt
    }

    /// Whether it is over, but a success is still owed.
    pub fn is_probation(&self, now: StoreTime) -> bool {
        now >= self.until && self.on_probe_end
    }

    /// What it says to somebody who wants to lend its subject; `probe_is_live` tells whether the lease
    /// in [`Rest::probe_lease`] lives, `with_model` whether the request names a model.
    pub fn gate(&self, now: StoreTime, probe_is_live: bool, with_model: bool) -> Gate {
        if self.is_invalid() {
            return Gate::Invalid;
        }
        let probe = self.probe_lease.filter(|_| probe_is_live);
        if self.is_resting(now) {
            let due = self.class == Class::Quota && now >= self.probed_at.plus(EARLY_PROBE_EVERY);
            // A probe that can prove nothing would only take the turn of one that can.
            return if due && probe.is_none() && self.is_proved_by(with_model) {
                Gate::EarlyProbe(self.until, self.class)
            } else {
                Gate::Cooling(self.until, self.class)
            };
        }
        match (self.on_probe_end, probe) {
            (false, _) => Gate::Open,
            (true, Some(lease)) => Gate::ProbeOut(lease),
            (true, None) => Gate::Probe,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_clock_that_went_back_leaves_no_rest_longer_than_its_class_allows() {
        let (now, ahead) = (StoreTime(1_000_000_000), StoreTime(9_000_000_000_000));
        let classes = [
            (Class::Rate, DAY),
            (Class::Quota, DAY * 32),
            (Class::Access, MINUTE * 30),
            (Class::Region, MINUTE * 30),
            (Class::Overloaded, MINUTE),
        ];
        let evidence = |class, doubt| Evidence {
            class,
            wait: Some(HOUR),
            doubt,
            by_check: false,
            status: None,
            code: None,
            lease: None,
            token: FencingToken(1),
            of_model: false,
        };
        for (class, longest) in classes {
            let rest = Rest::after(None, &evidence(class, false), FencingToken(2), ahead).clamped(now);
            assert_eq!((rest.since, rest.until), (now, now.plus(longest)), "{class:?}");
        }
        let doubt = Rest::after(None, &evidence(Class::Invalid, true), FencingToken(2), ahead).clamped(now);
        assert_eq!(doubt.until, now.plus(MINUTE));
        let proven = Rest::after(None, &evidence(Class::Invalid, false), FencingToken(2), ahead).clamped(now);
        assert_eq!(proven.until, StoreTime::NEVER);
        let short = Rest::after(None, &evidence(Class::Rate, false), FencingToken(2), now);
        assert_eq!(short.clone().clamped(now), short);
    }
}

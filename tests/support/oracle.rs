//! Judging the caps by the provider double's own clock: how many requests each key carried at every moment,
//! and whether more than its cap only where that cannot be avoided.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::time::{Duration, Instant};

use super::provider::Seen;

/// A time in which more than the cap is allowed, and why.
#[derive(Debug, Clone)]
pub struct Window {
    pub why: String,
    pub from: Instant,
    pub to: Instant,
}

/// More requests at once than the cap.
#[derive(Debug, Clone)]
pub struct Excess {
    pub key: String,
    pub from: Instant,
    pub to: Instant,
    pub at_once: usize,
}

/// When each request of a key began and ended; one that has not ended ends at `until`.
fn spans(seen: &[Seen], until: Instant) -> BTreeMap<String, Vec<(Instant, Instant)>> {
    let mut spans: BTreeMap<String, Vec<(Instant, Instant)>> = BTreeMap::new();
    for request in seen {
        let end = request.finished.or(request.gone).unwrap_or(until);
        spans.entry(request.key().to_owned()).or_default().push((request.at, end));
    }
    spans
}

/// Every time at which a key carried more than `cap`.
pub fn excesses(seen: &[Seen], cap: usize, until: Instant) -> Vec<Excess> {
    let mut found = Vec::new();
    for (key, spans) in spans(seen, until) {
        // At one instant ends come before beginnings: a slot reused at once is not counted twice.
        let mut steps: Vec<(Instant, i32)> =
            spans.iter().flat_map(|(from, to)| [(*from, 1), (*to, -1)]).collect();
        steps.sort_by_key(|(at, step)| (*at, *step));
        let (mut open, mut began) = (0_i32, None);
        let mut most = 0;
        for (at, step) in steps {
            open += step;
            let over = usize::try_from(open).unwrap_or(0) > cap;
            match (over, began) {
                (true, None) => (began, most) = (Some(at), open),
                (true, Some(_)) => most = most.max(open),
                (false, Some(from)) => {
                    let at_once = usize::try_from(most).unwrap();
                    found.push(Excess { key: key.clone(), from, to: at, at_once });
                    began = None;
                }
                (false, None) => {}
            }
        }
    }
    found
}

/// Prints peak and seconds over the cap per window; what lies in no window, as text for a failure.
pub fn judge(
    seen: &[Seen],
    cap: usize,
    began: Instant,
    until: Instant,
    windows: &[Window],
) -> Option<String> {
    let found = excesses(seen, cap, until);
    let second = |at: Instant| at.saturating_duration_since(began).as_secs_f64();
    for window in windows {
        let within: Vec<&Excess> =
            found.iter().filter(|excess| excess.from <= window.to && excess.to >= window.from).collect();
        let over: Duration = within
            .iter()
            .map(|excess| excess.to.min(window.to).saturating_duration_since(excess.from.max(window.from)))
            .sum();
        eprintln!(
            "{:6.2} s to {:6.2} s, {}: peak {}, {:.2} s over the cap of {cap}",
            second(window.from),
            second(window.to),
            window.why,
            within.iter().map(|excess| excess.at_once).max().unwrap_or(0),
            over.as_secs_f64(),
        );
    }
    let mut outside = String::new();
    for excess in &found {
        if !is_covered(excess, windows) {
            let _ = writeln!(
                outside,
                "{} carried {} at once from {:.3} s to {:.3} s",
                excess.key,
                excess.at_once,
                second(excess.from),
                second(excess.to)
            );
        }
    }
    (!outside.is_empty()).then_some(outside)
}

/// Whether windows, one after the other, cover all of it.
fn is_covered(excess: &Excess, windows: &[Window]) -> bool {
    let mut at = excess.from;
    loop {
        let next =
            windows.iter().filter(|window| window.from <= at && window.to > at).map(|window| window.to).max();
        match next {
            _ if at >= excess.to => return true,
            Some(next) => at = next,
            None => return windows.iter().any(|window| window.from <= at && window.to >= excess.to),
        }
    }
}

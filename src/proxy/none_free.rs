//! Why no key could be had, in words for the client: what keeps each of those that fit, and what helps.

use std::time::Duration;

use crate::lease::{By, Kept};
use crate::model::{Class, Code, Fault};
use crate::route::Route;
use crate::route::ring::ModelKnown;

/// Every fitting key is full or rests.
pub(super) fn exhausted(
    route: &Route,
    model: &ModelKnown,
    kept: &[Kept],
    retry_after: Duration,
    queue_full: bool,
) -> Fault {
    let full = kept.iter().any(|kept| kept.by == By::Uses);
    let all_rest = !kept.is_empty() && !full;
    let why = if queue_full {
        "queue.max_waiting requests wait for a key already".to_owned()
    } else if kept.is_empty() {
        format!("no key of {} came free within the wait", place(route))
    } else {
        let verb = match (all_rest, count(kept)) {
            (false, _) => "cannot be had now",
            (true, 1) => "rests",
            (true, _) => "rest",
        };
        format!("{} {verb}: {}", subject(route, kept), reasons(kept, model))
    };
    let help = match &route.pinned {
        Some(_) => ", or without asking for that very key",
        None if all_rest => "",
        None => ", add keys or raise their caps",
    };
    let message = format!("{why}; try again in {}{help}", shown(retry_after));
    Fault { all_rest, ..Fault::new(Code::PoolExhausted, message).retry_after(retry_after) }
}

/// The provider lets none of the fitting keys do this.
pub(super) fn no_access(route: &Route, model: &ModelKnown, kept: &[Kept], retry_after: Duration) -> Fault {
    let whose = match &route.pinned {
        Some(_) => subject(route, kept),
        None => format!("every key of {}", place(route)),
    };
    let lacks = match kept {
        [Kept { by: By::Rest(Class::Region), .. }] => "may not be used from here".to_owned(),
        [_] => format!("lacks access to {}", asked(model)),
        _ => format!("lacks access to {} or may not be used from here", asked(model)),
    };
    let message = format!(
        "{whose} {lacks} (the provider said so; `lessor keys list` shows its answer); the next try is in {}",
        shown(retry_after)
    );
    Fault::new(Code::NoCandidate, message).retry_after(retry_after)
}

/// The keys that are spoken of.
fn subject(route: &Route, kept: &[Kept]) -> String {
    let provider = &route.provider().name;
    match (&route.pinned, count(kept)) {
        (Some(key), _) => format!("key `{provider}/{key}`, the one that X-Lessor-Key asks for,"),
        (None, 1) => format!("the one key of {} that fits", place(route)),
        (None, keys) => format!("all {keys} keys of {} that fit", place(route)),
    }
}

fn place(route: &Route) -> String {
    let fallbacks = if route.keys.falls_back(&route.pool) { " and its fallbacks" } else { "" };
    format!("pool `{}`{fallbacks}", route.pool)
}

fn count(kept: &[Kept]) -> usize {
    kept.iter().map(|kept| kept.keys).sum()
}

/// `2 rate limited (for 12s), 1 out of quota (for 14m)`, and of a single key the bare word.
fn reasons(kept: &[Kept], model: &ModelKnown) -> String {
    if let [Kept { by, keys: 1, .. }] = kept {
        return word(*by, model);
    }
    let one = |kept: &Kept| {
        let first = if kept.keys > 1 { "the first " } else { "" };
        let rest = kept.rest.map(|rest| format!(" ({first}for {})", shown(rest))).unwrap_or_default();
        format!("{} {}{rest}", kept.keys, word(kept.by, model))
    };
    kept.iter().map(one).collect::<Vec<_>>().join(", ")
}

fn word(by: By, model: &ModelKnown) -> String {
    match by {
        By::Uses => "without a free slot".into(),
        By::Rest(Class::Rate) => "rate limited".into(),
        By::Rest(Class::Quota) => "out of quota".into(),
        By::Rest(Class::Access) => format!("without access to {}", asked(model)),
        By::Rest(Class::Region) => "not to be used from here".into(),
        By::Rest(Class::Invalid) => "in doubt until lessor has checked it".into(),
        By::Rest(Class::Overloaded) => "waiting for the provider, which is overloaded".into(),
        By::Rest(class) => format!("resting ({})", class.as_str()),
        By::Status(status) => status.as_str().into(),
        By::Settings => "unknown to the store".into(),
    }
}

fn asked(model: &ModelKnown) -> String {
    model.name().map_or_else(|| "this".into(), |model| format!("model `{model}`"))
}

/// In whole seconds, rounded up: `14m59s`.
fn shown(wait: Duration) -> String {
    let seconds = wait.as_secs() + u64::from(wait.subsec_nanos() > 0);
    humantime::format_duration(Duration::from_secs(seconds.max(1))).to_string().replace(' ', "")
}

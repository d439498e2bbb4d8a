//! What an answer says about its key: the provider's rules in, one word out.
//!
//! Pure functions over the head of an answer and at most [`MAX_BODY`] bytes of its body. They hold for
//! every input: no answer, however hostile, makes them panic, take more than bounded memory, or name a
//! wait past the bound of its class. What they cannot read they do not guess at: such a body is passed
//! over, and the status alone decides.
//!
//! Rules are read in three passes, exact codes first, then phrases, then statuses, because one status
//! means many things: a 429 is a rate limit, an empty account, a full set of slots or a busy provider,
//! and 400, 401, 402 and 403 each carry at least two.
//!
//! Waits are what the provider names, in the order of [`Provider::waits`]; what cannot be read whole, is
//! negative, zero or past names no wait, and the next place is asked. So the floor under "try again at
//! once" is the class's own first wait, which doubles, and no answer can make lessor hammer a provider.

mod body;
mod rules;
mod waits;

use std::time::{Duration, SystemTime};

use http::{HeaderMap, StatusCode};

use self::body::Body;
use crate::config::{Provider, WaitPlace};
use crate::model::{Class, Outcome, Scope};

/// How much of a refusal's body is looked at, before and after decoding.
pub const MAX_BODY: usize = 65536;

/// Whether the body of an answer with `status` can change what the answer means, so that it must be held
/// back and read. Below 400 it never does.
pub fn needs_body(provider: &Provider, status: StatusCode) -> bool {
    if status.as_u16() < 400 {
        return false;
    }
    let rule_reads_it =
        provider.rules.iter().any(|rule| rules::reads_body(rule) && rules::fits(rule, status));
    let wait_is_in_it = || {
        let class = rules::by_status(provider, status).map_or(Class::Network, |rule| rule.class);
        provider.waits.iter().any(|wait| {
            !matches!(wait.from, WaitPlace::Header(_))
                && waits::longest(class).is_some()
                && waits::counts(wait, class)
        })
    };
    rule_reads_it || wait_is_in_it()
}

/// What an answer says about the key it was had with. `body` may be cut off at [`MAX_BODY`], and empty
/// where [`needs_body`] is false.
pub fn read(
    provider: &Provider,
    status: StatusCode,
    headers: &HeaderMap,
    body: &[u8],
    now: SystemTime,
) -> Outcome {
    if status.as_u16() < 400 {
        return Outcome::plain(Class::Success, Some(status.as_u16()));
    }
    let body = if needs_body(provider, status) { Body::decode(headers, body) } else { Body::Unreadable };
    let Some(hit) = rules::find(provider, status, &body) else {
        // Statuses past 599 are nobody's: no usable answer came.
        return Outcome::plain(Class::Network, Some(status.as_u16()));
    };
    let rule = hit.rule;
    let named = waits::named(provider, rule.class, headers, &body, now);
    // Who shares a limit is a question only where there is one.
    let limits = rule.class.blames_key() || rule.class == Class::Overloaded;
    Outcome {
        class: rule.class,
        wait: named.or_else(|| waits::of_rule(rule, headers, now)),
        scope: if limits { rule.scope } else { Scope::Key },
        proven: rule.proven || rule.class != Class::Invalid,
        status: Some(status.as_u16()),
        code: hit.code.and_then(rules::evidence),
    }
}

/// The wait that an answer of `class` names, bounded for that class; `None` where it names none, or where
/// the class knows no wait. See [`longest_wait`].
pub fn wait(
    provider: &Provider,
    class: Class,
    headers: &HeaderMap,
    body: &[u8],
    now: SystemTime,
) -> Option<Duration> {
    waits::named(provider, class, headers, &Body::decode(headers, body), now)
}

/// The longest wait that an answer of `class` can name; `None` for a class that waits for nothing.
pub fn longest_wait(class: Class) -> Option<Duration> {
    waits::longest(class)
}

#[cfg(test)]
mod tests;

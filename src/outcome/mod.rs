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
mod calendar;
mod rules;
mod waits;

use std::time::{Duration, SystemTime};

use http::{HeaderMap, StatusCode};

use self::body::Body;
pub use self::body::BodyKind;
use crate::config::{Provider, Rule, Wait, WaitPlace};
use crate::model::{Class, Outcome, Scope};

/// How much of a refusal's body is looked at, before and after decoding.
pub const MAX_BODY: usize = 65536;

/// Whether the body of an answer can change what the answer means, so that it must be held back and read.
/// Below 400 it never does.
pub fn needs_body(provider: &Provider, status: StatusCode, headers: &HeaderMap) -> bool {
    if status.as_u16() < 400 {
        return false;
    }
    let fits = |rule: &&Rule| rules::fits(rule, status, headers);
    let rule_reads_it = provider.rules.iter().filter(fits).any(rules::reads_body);
    let wait_is_in_it = || {
        let rule = rules::by_status(provider, status, headers);
        let class = rule.map_or_else(|| rules::class_without(status), |rule| rule.class);
        provider.waits.iter().any(|wait| {
            !matches!(wait.from, WaitPlace::Header(_))
                && waits::longest(class).is_some()
                && waits::counts(wait, class)
        })
    };
    rule_reads_it || wait_is_in_it()
}

/// An answer that was read, and by what.
#[derive(Debug)]
pub struct Reading<'a> {
    /// What it says.
    pub outcome: Outcome,
    /// The rule that decided; none for a success, and where no rule speaks of the status.
    pub rule: Option<&'a Rule>,
    /// Where the wait was found; `None` where there is none, or the rule gave it.
    pub wait: Option<&'a Wait>,
    /// What its body turned out to be.
    pub body: BodyKind,
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
    reading(provider, status, headers, body, now).outcome
}

/// The same, and by what it was found.
pub fn reading<'a>(
    provider: &'a Provider,
    status: StatusCode,
    headers: &HeaderMap,
    body: &[u8],
    now: SystemTime,
) -> Reading<'a> {
    if status.as_u16() < 400 {
        return success(provider, status, headers, now);
    }
    let body =
        if needs_body(provider, status, headers) { Body::decode(headers, body) } else { Body::NotAsked };
    let Some(hit) = rules::find(provider, status, headers, &body) else {
        return without_rule(provider, status, headers, &body, now);
    };
    let rule = hit.rule;
    let named = waits::named(provider, (rule.class, rule.window), headers, &body, now);
    // Who shares a limit is a question only where there is one.
    let limits = rule.class.blames_key() || rule.class == Class::Overloaded;
    let outcome = Outcome {
        class: rule.class,
        wait: named.map(|(_, wait)| wait).or_else(|| waits::of_rule(rule, headers, now)),
        scope: if limits { rule.scope } else { Scope::Key },
        proven: rule.proven || rule.class != Class::Invalid,
        status: Some(status.as_u16()),
        code: hit.code.and_then(rules::evidence),
        another_key: rule.another_key,
        max_uses: (rule.class == Class::Concurrency).then(|| max_uses(provider, headers)).flatten(),
        organization: None,
    };
    Reading { outcome, rule: Some(rule), wait: named.map(|(place, _)| place), body: body.kind() }
}

/// By the status alone: the user took all rules for it out, or it is nobody's.
fn without_rule<'a>(
    provider: &'a Provider,
    status: StatusCode,
    headers: &HeaderMap,
    body: &Body,
    now: SystemTime,
) -> Reading<'a> {
    let mut outcome = Outcome::plain(rules::class_without(status), Some(status.as_u16()));
    if outcome.class == Class::Overloaded {
        outcome.scope = Scope::ProviderModel;
    }
    let named = waits::named(provider, (outcome.class, None), headers, body, now);
    outcome.wait = named.map(|(_, wait)| wait);
    Reading { outcome, rule: None, wait: named.map(|(place, _)| place), body: body.kind() }
}

/// A success, and perhaps a word on what comes next: nothing remains until a time. Its scope is then that of
/// the provider's plain rate limit.
fn success<'a>(
    provider: &'a Provider,
    status: StatusCode,
    headers: &HeaderMap,
    now: SystemTime,
) -> Reading<'a> {
    let mut outcome = Outcome::plain(Class::Success, Some(status.as_u16()));
    let limit = || {
        let rule = rules::by_status(provider, StatusCode::TOO_MANY_REQUESTS, headers);
        rule.filter(|rule| rule.class == Class::Rate)
    };
    let window = || limit().and_then(|rule| rule.window);
    let ahead = if status.is_success() { waits::ahead(provider, window, headers, now) } else { None };
    if let Some((_, wait)) = ahead {
        outcome.scope = limit().map_or(Scope::Key, |rule| rule.scope);
        outcome.wait = Some(wait);
    }
    Reading { outcome, rule: None, wait: ahead.map(|(place, _)| place), body: BodyKind::NotAsked }
}

/// How many uses at once an answer says are allowed.
fn max_uses(provider: &Provider, headers: &HeaderMap) -> Option<u32> {
    let text = headers.get(provider.max_uses_header.as_ref()?)?.to_str().ok()?;
    text.trim().parse().ok().filter(|uses| *uses > 0)
}

/// The organisation that an answer names, to a request that named none itself: whose answer it is then follows
/// from the key alone.
pub fn organization<'a>(provider: &Provider, asked: &HeaderMap, answered: &'a HeaderMap) -> Option<&'a str> {
    let name = provider.organization_header.as_ref()?;
    let text = answered.get(name).filter(|_| !asked.contains_key(name))?.to_str().ok()?.trim();
    (!text.is_empty()).then_some(text)
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
    waits::named(provider, (class, None), headers, &Body::decode(headers, body), now).map(|(_, wait)| wait)
}

/// The longest wait that an answer of `class` can name; `None` for a class that waits for nothing.
pub fn longest_wait(class: Class) -> Option<Duration> {
    waits::longest(class)
}

#[cfg(test)]
mod tests;

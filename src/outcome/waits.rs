//! How long an answer says to wait: every way of writing a time that providers have.
//!
//! Each text is parsed whole or not at all: `6m0s` is not 6 and `120ms` is not 120 s. Absolute times are
//! taken from the answer's own `Date`, so a clock that is wrong here, or there, does no harm; where the two are
//! far apart that `Date` may be stale, as of an answer out of a cache, and the shorter wait counts.

use std::time::{Duration, SystemTime};

use http::{HeaderMap, header};

use super::body::{Body, scalar};
use super::calendar::{self, days_since_epoch};
use crate::config::{Provider, Rule, Wait, WaitFormat, WaitPlace, Window};
use crate::fields;
use crate::model::Class;

const MINUTE: Duration = Duration::from_mins(1);
const DAY: Duration = Duration::from_hours(24);

/// No wait is longer: a month's window and a day, for time zones.
const LONGEST: Duration = Duration::from_hours(32 * 24);
/// A rate limit's wait is cut to this, save where its rule or the place of the wait is of a day's window.
const RATE: Duration = Duration::from_mins(10);
/// A sender's clock that is no farther from ours than this is taken for right.
const SKEW: Duration = Duration::from_mins(5);

/// The longest wait an answer of `class` can name.
pub(super) fn longest(class: Class) -> Option<Duration> {
    match class {
        Class::Rate => Some(DAY),
        Class::Quota => Some(LONGEST),
        Class::Concurrency | Class::Overloaded => Some(MINUTE),
        Class::Access | Class::Region => Some(30 * MINUTE),
        // A key that is refused waits for a check, and the rest for nothing.
        Class::Invalid | Class::Caller | Class::Success | Class::Cancelled | Class::Network => None,
    }
}

/// Whether `wait` says anything about an answer of `class`.
pub(super) fn counts(wait: &Wait, class: Class) -> bool {
    wait.classes.is_empty() || wait.classes.contains(&class)
}

/// The wait the answer names, bounded for its class, and where. The first place that can be read counts; of
/// limits that are used up, the one that is so for longest.
pub(super) fn named<'a>(
    provider: &'a Provider,
    (class, window): (Class, Option<Window>),
    headers: &HeaderMap,
    body: &Body,
    now: SystemTime,
) -> Option<(&'a Wait, Duration)> {
    longest(class)?;
    let sent = Sent::of(headers, now);
    let found = || {
        let found = found(provider, class, headers, body, sent);
        found.filter_map(|(wait, named)| Some((wait, bounded(class, wait.window.or(window), named)?)))
    };
    let first = found().next()?;
    if first.0.tells_of_an_end() {
        return found().filter(|(wait, _)| wait.tells_of_an_end()).max_by_key(|(_, named)| *named);
    }
    Some(first)
}

/// Until when an answer that refuses nothing says that nothing remains, bounded as a rate limit.
pub(super) fn ahead<'a>(
    provider: &'a Provider,
    window: impl Fn() -> Option<Window>,
    headers: &HeaderMap,
    now: SystemTime,
) -> Option<(&'a Wait, Duration)> {
    // What most answers say is that something remains: no time need be read of those.
    let tells = |wait: &Wait| wait.tells_of_an_end() && is_there(wait, headers);
    if !provider.waits.iter().any(|wait| tells(wait) && applies(wait, Class::Rate, headers)) {
        return None;
    }
    let ends = found(provider, Class::Rate, headers, &Body::NotAsked, Sent::of(headers, now));
    let ends = ends.filter(|(wait, _)| wait.tells_of_an_end());
    let ends = ends
        .filter_map(|(wait, named)| Some((wait, bounded(Class::Rate, wait.window.or_else(&window), named)?)));
    ends.max_by_key(|(_, named)| *named)
}

/// Whether a wait's place is there at all, as far as a head tells.
fn is_there(wait: &Wait, headers: &HeaderMap) -> bool {
    match &wait.from {
        WaitPlace::Header(name) => fields::has(headers, name),
        WaitPlace::Body(_) | WaitPlace::Phrase(..) => true,
    }
}

/// Every wait that counts for `class` and can be read, in order.
fn found<'a>(
    provider: &'a Provider,
    class: Class,
    headers: &HeaderMap,
    body: &Body,
    sent: Sent,
) -> impl Iterator<Item = (&'a Wait, Duration)> {
    let applying = provider.waits.iter().filter(move |wait| applies(wait, class, headers));
    applying.filter_map(move |wait| Some((wait, at(wait, headers, body, sent)?)))
}

/// Whether a wait says anything in an answer of `class` with this head.
fn applies(wait: &Wait, class: Class, headers: &HeaderMap) -> bool {
    counts(wait, class)
        && wait.only_if_zero.as_ref().is_none_or(|name| number(headers, name) == Some(0.0))
        && !wait.unless.as_ref().is_some_and(|(name, value)| {
            headers.get(name).is_some_and(|said| said.as_bytes().starts_with(value.as_bytes()))
        })
}

fn bounded(class: Class, window: Option<Window>, named: Duration) -> Option<Duration> {
    let bound = match (class, window) {
        (Class::Rate, None) => RATE,
        _ => longest(class)?,
    };
    Some(named.min(bound))
}

/// The wait that a rule gives where the answer names none. It is the catalogue's or the user's own word, so
/// no class bounds it.
pub(super) fn of_rule(rule: &Rule, headers: &HeaderMap, now: SystemTime) -> Option<Duration> {
    longest(rule.class)?;
    let until = || calendar::until(rule.until?, Sent::of(headers, now).at).and_then(whole_ms);
    rule.wait.or_else(until).map(|wait| wait.min(LONGEST))
}

/// When an answer was sent: by its sender's clock, where it says so, and by ours where that is far from it.
#[derive(Debug, Clone, Copy)]
struct Sent {
    at: SystemTime,
    or: Option<SystemTime>,
}

impl Sent {
    fn of(headers: &HeaderMap, now: SystemTime) -> Self {
        let date = headers.get(header::DATE).and_then(|value| value.to_str().ok());
        let at = date.and_then(|text| httpdate::parse_http_date(text).ok()).unwrap_or(now);
        let apart = at.duration_since(now).unwrap_or_else(|earlier| earlier.duration());
        Self { at, or: Some(now).filter(|_| apart > SKEW) }
    }

    /// The least of what `read` makes of the time.
    fn least(self, read: impl Fn(SystemTime) -> Option<Duration>) -> Option<Duration> {
        [Some(self.at), self.or].into_iter().flatten().filter_map(read).min()
    }
}

/// What a header counts: digits with perhaps a fraction. A negative number, which Azure writes where it knows
/// none, is no number.
pub(super) fn number(headers: &HeaderMap, name: &http::HeaderName) -> Option<f64> {
    decimal(headers.get(name)?.to_str().ok()?.trim())
}

/// The wait at one place, if it can be read there.
fn at(wait: &Wait, headers: &HeaderMap, body: &Body, sent: Sent) -> Option<Duration> {
    let parse = |text: &str| sent.least(|sent| parse(text, wait.format, sent));
    match &wait.from {
        WaitPlace::Header(name) => {
            let mut texts = headers.get_all(name).iter().filter_map(|value| value.to_str().ok());
            texts.find_map(parse)
        }
        WaitPlace::Body(pointer) => {
            body.at(pointer).into_iter().filter_map(scalar).find_map(|text| parse(&text))
        }
        WaitPlace::Phrase(phrase, fields) => {
            let after = |text: &str| sent.least(|sent| after(text, phrase, wait.format, sent));
            body.messages(fields).into_iter().find_map(after)
        }
    }
}

/// A whole text as a wait: `None` where it cannot be read, is negative, zero or past.
pub(super) fn parse(text: &str, format: WaitFormat, sent: SystemTime) -> Option<Duration> {
    let text = text.trim();
    let wait = match format {
        WaitFormat::RetryAfter => match decimal(text) {
            Some(secs) => seconds(secs),
            None => httpdate::parse_http_date(text).ok()?.duration_since(sent).ok(),
        },
        WaitFormat::Millis => seconds(decimal(text)? / 1e3),
        WaitFormat::Seconds => seconds(decimal(text)?),
        WaitFormat::Duration => match decimal(text) {
            Some(secs) => seconds(secs),
            None => units(text),
        },
        WaitFormat::Rfc3339 => match date_time(text)? {
            (at, "") => at.duration_since(sent).ok(),
            _ => None,
        },
        WaitFormat::Epoch => epoch(decimal(text)?, sent),
        WaitFormat::RateLimit => used_up(text),
    };
    whole_ms(wait?)
}

/// The wait that stands in `text` after `phrase`: after the last one, for what a provider repeats of the
/// caller's words comes before its own advice.
fn after(text: &str, phrase: &str, format: WaitFormat, sent: SystemTime) -> Option<Duration> {
    let start = text.to_ascii_lowercase().rfind(&phrase.to_ascii_lowercase())? + phrase.len();
    let rest = text.get(start..)?.trim_start_matches([' ', ':', '~', '\n', '\t']);
    if format == WaitFormat::Rfc3339 {
        let (at, rest) = date_time(rest)?;
        let ended = !rest.starts_with(|c: char| c.is_alphanumeric());
        return if ended { whole_ms(at.duration_since(sent).ok()?) } else { None };
    }
    let end =
        rest.find(|c: char| !(c.is_alphanumeric() || matches!(c, '.' | '+' | '-'))).unwrap_or(rest.len());
    let word = rest[..end].trim_end_matches(['.', '-']);
    // Words for units are for people, so they stand in texts only: `in 20 seconds`.
    match (decimal(word), word.len() == end, rest[end..].strip_prefix(' ')) {
        (Some(number), true, Some(next)) if next.starts_with(|c: char| c.is_ascii_alphabetic()) => {
            let unit = next.split(|c: char| !c.is_ascii_alphabetic()).next()?;
            whole_ms(seconds(number * spelt_unit(&unit.to_ascii_lowercase())?)?)
        }
        _ => parse(word, format, sent),
    }
}

/// Digits with perhaps a fraction, and nothing else: no sign, no exponent, no `inf`.
fn decimal(text: &str) -> Option<f64> {
    let (whole, fraction) = text.split_once('.').unwrap_or((text, "0"));
    let digits = |part: &str| !part.is_empty() && part.bytes().all(|b| b.is_ascii_digit());
    (digits(whole) && digits(fraction)).then(|| text.parse().ok()).flatten()
}

/// Seconds as a duration; more than one can hold is no time but garbage.
fn seconds(secs: f64) -> Option<Duration> {
    Duration::try_from_secs_f64(secs).ok()
}

/// `1h2m3.5s`: numbers, each with its unit, to the end.
fn units(text: &str) -> Option<Duration> {
    let mut total = 0.0;
    let mut rest = text;
    while !rest.is_empty() {
        let number_ends = rest.find(|c: char| !(c.is_ascii_digit() || c == '.'))?;
        let (number, tail) = rest.split_at(number_ends);
        let unit_ends = tail.find(|c: char| c.is_ascii_digit()).unwrap_or(tail.len());
        let (unit, tail) = tail.split_at(unit_ends);
        total += decimal(number)? * unit_seconds(unit)?;
        rest = tail;
    }
    if text.is_empty() { None } else { seconds(total) }
}

fn unit_seconds(unit: &str) -> Option<f64> {
    Some(match unit {
        "d" => 86400.0,
        "h" => 3600.0,
        "m" => 60.0,
        "s" => 1.0,
        "ms" => 1e-3,
        "us" | "µs" | "μs" => 1e-6, // both signs for micro are in use
        "ns" => 1e-9,
        _ => return None,
    })
}

fn spelt_unit(word: &str) -> Option<f64> {
    Some(match word.strip_suffix('s').unwrap_or(word) {
        "day" => 86400.0,
        "hour" | "hr" => 3600.0,
        "minute" | "min" => 60.0,
        "second" | "sec" => 1.0,
        "millisecond" => 1e-3,
        _ => return unit_seconds(word),
    })
}

/// Told apart by size: less than 30 days is a wait, more than 1e12 is ms since the epoch, else seconds.
fn epoch(number: f64, sent: SystemTime) -> Option<Duration> {
    if number < 30.0 * 86400.0 {
        return seconds(number);
    }
    let since = seconds(if number > 1e12 { number / 1e3 } else { number })?;
    SystemTime::UNIX_EPOCH.checked_add(since)?.duration_since(sent).ok()
}

/// The longest `t` of the limits of which nothing remains: `"api";r=0;t=55, "pages";r=3;t=9`.
fn used_up(text: &str) -> Option<Duration> {
    let of_limit = |limit: &str| {
        let number = |name: &str| {
            let mut parts = limit.split(';').filter_map(|part| part.trim().split_once('='));
            parts.find(|(key, _)| *key == name).and_then(|(_, value)| decimal(value))
        };
        number("r").filter(|left| *left == 0.0).and_then(|_| seconds(number("t")?))
    };
    text.split(',').filter_map(of_limit).max()
}

/// Up to whole milliseconds, the unit of every cooldown; zero is no wait.
fn whole_ms(wait: Duration) -> Option<Duration> {
    if wait.is_zero() {
        return None;
    }
    let nanos = wait.subsec_nanos().next_multiple_of(1_000_000);
    Duration::from_secs(wait.as_secs()).checked_add(Duration::from_nanos(nanos.into()))
}

/// A date with perhaps a time at the start of `text`, and what follows it. RFC 3339, and the looser form of
/// messages to people: `2026-01-01 at 00:00 UTC`. What names no zone is in UTC.
fn date_time(text: &str) -> Option<(SystemTime, &str)> {
    let mut scan = Scan(text);
    let year = scan.number(4)?;
    let month = scan.then('-')?.number(2)?;
    let day = scan.then('-')?.number(2)?;
    let mut secs = days_since_epoch(year, month, day)? * 86400;
    let mut nanos = 0;
    let mut clock = Scan(scan.0);
    if clock.skip_any(&[" at ", "T", "t", " "]) && clock.0.starts_with(|c: char| c.is_ascii_digit()) {
        let hour = clock.number(2)?;
        let minute = clock.then(':')?.number(2)?;
        let second = if clock.skip_any(&[":"]) { clock.number(2)? } else { 0 };
        if hour > 23 || minute > 59 || second > 60 {
            return None;
        }
        secs += hour * 3600 + minute * 60 + second;
        if clock.0.starts_with('.') && clock.0[1..].starts_with(|c: char| c.is_ascii_digit()) {
            clock.then('.')?;
            nanos = clock.fraction();
        }
        if !clock.skip_any(&["Z", "z", " UTC", " GMT"])
            && let Some(sign) = clock.0.chars().next().filter(|c| matches!(c, '+' | '-'))
        {
            let hours = clock.then(sign)?.number(2)?;
            let minutes = clock.then(':')?.number(2)?;
            let offset = hours * 3600 + minutes * 60;
            secs = if sign == '+' { secs - offset } else { secs + offset };
        }
        scan = clock;
    }
    let since = Duration::new(u64::try_from(secs).ok()?, nanos);
    Some((SystemTime::UNIX_EPOCH.checked_add(since)?, scan.0))
}

/// What is left of a text that is read from the front.
struct Scan<'a>(&'a str);

impl Scan<'_> {
    /// Exactly so many digits.
    fn number(&mut self, digits: usize) -> Option<i64> {
        let number = self.0.get(..digits).filter(|text| text.bytes().all(|b| b.is_ascii_digit()))?;
        self.0 = &self.0[digits..];
        number.parse().ok()
    }

    fn then(&mut self, c: char) -> Option<&mut Self> {
        self.0 = self.0.strip_prefix(c)?;
        Some(self)
    }

    fn skip_any(&mut self, words: &[&str]) -> bool {
        let rest = words.iter().find_map(|word| self.0.strip_prefix(word));
        self.0 = rest.unwrap_or(self.0);
        rest.is_some()
    }

    /// All digits that follow, as nanoseconds; those past the ninth are dropped.
    fn fraction(&mut self) -> u32 {
        let end = self.0.find(|c: char| !c.is_ascii_digit()).unwrap_or(self.0.len());
        let (digits, rest) = self.0.split_at(end);
        self.0 = rest;
        digits.bytes().chain(std::iter::repeat(b'0')).take(9).fold(0, |n, b| n * 10 + u32::from(b - b'0'))
    }
}

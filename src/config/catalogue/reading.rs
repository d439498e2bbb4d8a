//! Rules, waits and usage fields: checked, and taken out again where the user says so.

use std::time::Duration;

use http::HeaderName;

use super::schema::{OneOrMany, RawProvider, RawRule, RawStatus, RawUsage, RawWait};
use super::{FieldError, refuse};
use crate::config::{
    ANY_CODE, Counted, Origin, Rule, StatusRange, Until, Usage, UsagePlace, Wait, WaitFormat, WaitPlace,
};
use crate::model::{Class, Scope};

/// Where codes and types stand in most providers' errors; a rule that names no `field` looks here.
const USUAL_FIELDS: [&str; 6] =
    ["/error/code", "/error/type", "/error/status", "/code", "/type", "/detail/status"];

/// Where errors have the message that their provider wrote; a wait that names no `field` looks for its phrase here.
/// Anywhere else an answer may repeat what its caller sent.
const MESSAGE_FIELDS: [&str; 5] = ["/error/message", "/error", "/message", "/detail", "/detail/message"];

/// What stands before a header's name in `field`.
const HEADER: &str = "header:";

/// What is said of a rule that would take a caller's words for proof.
const UNBOUND: &str = "needs a code, or a phrase with `field`: elsewhere in a body a caller's own words may stand, \
                       and a key would be bad by them";

/// In `remove_rules` and `remove_waits`: all of them.
const ALL: &str = "*";

pub(super) fn compile_rules(raw: &RawProvider, origin: Origin, errors: &mut Vec<FieldError>) -> Vec<Rule> {
    let all = raw.rules.iter().flatten().enumerate();
    all.map(|(i, rule)| {
        let bad = &mut |field: &str, problem: &str| refuse(errors, format!("rules.{i}.{field}"), problem);
        compile_rule(rule, origin, bad)
    })
    .collect()
}

/// Notes a mistake: which field, and what is wrong with it.
type Bad<'a> = &'a mut dyn FnMut(&str, &str);

fn compile_rule(raw: &RawRule, origin: Origin, bad: Bad<'_>) -> Rule {
    let mut status = Vec::new();
    for one in raw.status.iter().flat_map(|all| &all.0) {
        match parse_status(one) {
            Ok(range) => status.push(range),
            Err(problem) => bad("status", &problem),
        }
    }
    let (codes, phrases) = (many(raw.code.as_ref()), many(raw.phrase.as_ref()));
    if raw.status.is_none() && codes.is_empty() && phrases.is_empty() {
        bad("status", "is missing, and neither code nor phrase is given: it would fit every answer");
    }
    if codes.iter().any(String::is_empty) {
        bad("code", "has an empty entry");
    }
    if phrases.iter().any(|phrase| phrase.trim_start_matches('^').is_empty()) {
        bad("phrase", "has an empty entry, which every body contains");
    }
    let fields = compile_fields(raw, &codes, &phrases, bad);
    let mut only_if_left = Vec::new();
    for name in raw.only_if_left.iter().flat_map(|all| &all.0) {
        only_if_left.extend(parse_header("only_if_left", name, bad));
    }
    if matches!(raw.class, Class::Cancelled) {
        bad("class", "is `cancelled`, which no answer means");
    }
    let is_invalid = raw.class == Class::Invalid;
    if raw.proven.is_some() && !is_invalid {
        bad("proven", "is only for class = \"invalid\"");
    }
    if raw.another_key.is_some() && raw.class != Class::Caller {
        bad("another_key", "is only for class = \"caller\": others say by themselves whether one is tried");
    }
    if is_invalid && raw.proven == Some(true) && !is_bound(raw, &codes, &phrases) {
        bad("proven", UNBOUND);
    }
    let proven = raw.proven.unwrap_or(!is_invalid);
    let scope = raw.scope.unwrap_or(match raw.class {
        Class::Overloaded => Scope::ProviderModel,
        Class::Access => Scope::KeyModel,
        Class::Invalid if !proven => Scope::KeyModel,
        _ => Scope::Key,
    });
    if raw.window.is_some() && raw.class != Class::Rate {
        bad("window", "is only for class = \"rate\": the waits of others are theirs");
    }
    let (wait, until) = parse_wait(raw.wait.as_deref(), bad);
    let (class, another_key) = (raw.class, raw.another_key.unwrap_or(false));
    Rule {
        origin,
        status,
        codes,
        fields,
        phrases,
        only_if_left,
        class,
        scope,
        proven,
        wait,
        until,
        window: raw.window,
        another_key,
    }
}

/// Whether a rule goes by a code, which stands at fixed places, or by a phrase that is bound to one: anywhere
/// else the words may be the caller's, repeated.
fn is_bound(raw: &RawRule, codes: &[String], phrases: &[String]) -> bool {
    codes.iter().any(|code| code != ANY_CODE) || (!phrases.is_empty() && raw.field.is_some())
}

fn compile_fields(raw: &RawRule, codes: &[String], phrases: &[String], bad: Bad<'_>) -> Vec<String> {
    let fields = many(raw.field.as_ref());
    if !fields.is_empty() && codes.is_empty() && phrases.is_empty() {
        bad("field", "is given without code or phrase to look for");
    }
    if fields.is_empty() {
        if codes.iter().any(|code| code == ANY_CODE) {
            bad("field", "is missing; `*` would fit every code of every answer");
        }
        return if codes.is_empty() { fields } else { USUAL_FIELDS.map(str::to_owned).into() };
    }
    for field in fields.iter().filter(|field| !field.starts_with('/')) {
        let header = field.strip_prefix(HEADER).filter(|_| phrases.is_empty());
        if header.is_none_or(|name| name.parse::<HeaderName>().is_err()) {
            bad(
                "field",
                &format!("is `{field}`, must be a JSON pointer such as /error/code, or header:NAME"),
            );
        }
    }
    fields
}

fn parse_wait(text: Option<&str>, bad: Bad<'_>) -> (Option<Duration>, Option<Until>) {
    let until = match text {
        None => return (None, None),
        Some("month_end") => Until::MonthEnd,
        Some("day_end") => Until::DayEnd,
        Some("day_end_pacific") => Until::PacificDayEnd,
        Some(text) => {
            let wait = humantime::parse_duration(text).ok().filter(|wait| *wait > Duration::ZERO);
            if wait.is_none() {
                let known = "a time such as 90s or 15m, month_end, day_end or day_end_pacific";
                bad("wait", &format!("is `{text}`, must be {known}"));
            }
            return (wait, None);
        }
    };
    (None, Some(until))
}

fn many(raw: Option<&OneOrMany<String>>) -> Vec<String> {
    raw.map(|all| all.0.clone()).unwrap_or_default()
}

fn parse_status(raw: &RawStatus) -> Result<StatusRange, String> {
    let (first, last) = match raw {
        RawStatus::One(status) => (*status, *status),
        RawStatus::Range(text) => parse_range(text)
            .ok_or_else(|| format!("has `{text}`, must be a status or a range such as \"500-599\""))?,
    };
    if !(400..=599).contains(&first) || !(first..=599).contains(&last) {
        let shown = if first == last { first.to_string() } else { format!("{first}-{last}") };
        return Err(format!("has {shown}; rules read answers of status 400 to 599"));
    }
    Ok(StatusRange(first, last))
}

/// `500-599`, or one status.
fn parse_range(text: &str) -> Option<(u16, u16)> {
    let ends = text.split_once('-').and_then(|(a, b)| Some((a.trim().parse().ok()?, b.trim().parse().ok()?)));
    ends.or_else(|| text.parse().ok().map(|one| (one, one)))
}

fn parse_header(field: &str, text: &str, bad: Bad<'_>) -> Option<HeaderName> {
    let name = text.parse().ok();
    if name.is_none() {
        bad(field, &format!("is `{text}`, which is no header name"));
    }
    name
}

pub(super) fn compile_waits(raw: &RawProvider, errors: &mut Vec<FieldError>) -> Vec<Wait> {
    let all = raw.waits.iter().flatten().enumerate();
    all.filter_map(|(i, wait)| {
        let bad = &mut |field: &str, problem: &str| refuse(errors, format!("waits.{i}.{field}"), problem);
        compile_wait(wait, bad)
    })
    .collect()
}

fn compile_wait(raw: &RawWait, bad: Bad<'_>) -> Option<Wait> {
    let only_if_zero = raw.only_if_zero.as_deref().and_then(|name| parse_header("only_if_zero", name, bad));
    let unless = raw.unless.as_deref().and_then(|text| {
        let Some((name, value)) = text.split_once(':').filter(|(_, value)| !value.trim().is_empty()) else {
            bad("unless", "must be a header and the beginning of its value, such as \"x-status: allowed\"");
            return None;
        };
        Some((parse_header("unless", name.trim(), bad)?, value.trim().to_owned()))
    });
    let from = match (&raw.header, &raw.body, &raw.phrase) {
        (Some(name), None, None) => WaitPlace::Header(parse_header("header", name, bad)?),
        (None, Some(pointer), None) if pointer.starts_with('/') => WaitPlace::Body(pointer.clone()),
        (None, Some(pointer), None) => {
            bad("body", &format!("is `{pointer}`, must be a JSON pointer such as /error/retry_after"));
            return None;
        }
        (None, None, Some(phrase)) if !phrase.is_empty() => {
            let fields = many(raw.field.as_ref());
            for field in fields.iter().filter(|field| !field.starts_with('/')) {
                bad("field", &format!("is `{field}`, must be a JSON pointer such as /error/message"));
            }
            let usual = || MESSAGE_FIELDS.map(str::to_owned).into();
            WaitPlace::Phrase(phrase.clone(), if fields.is_empty() { usual() } else { fields })
        }
        _ => {
            bad("header", "`body` or `phrase` must be given, one of them");
            return None;
        }
    };
    if raw.field.is_some() && !matches!(from, WaitPlace::Phrase(..)) {
        bad("field", "is given without phrase to look for");
    }
    if raw.format == WaitFormat::RateLimit && matches!(from, WaitPlace::Phrase(..)) {
        bad("format", "is `rate_limit`, which stands in headers and no sentence");
    }
    let (format, window) = (raw.format, raw.window);
    Some(Wait { from, format, only_if_zero, unless, classes: raw.classes.clone(), window })
}

pub(super) fn compile_usage(raw: &[RawUsage], errors: &mut Vec<FieldError>) -> Vec<Usage> {
    let mut all = Vec::new();
    for (i, one) in raw.iter().enumerate() {
        let places = [
            ("input", Counted::Input, &one.input),
            ("output", Counted::Output, &one.output),
            ("total", Counted::Total, &one.total),
            ("cache_read", Counted::CacheRead, &one.cache_read),
            ("cache_write", Counted::CacheWrite, &one.cache_write),
            ("reasoning", Counted::Reasoning, &one.reasoning),
            ("cost", Counted::Cost, &one.cost),
            ("characters", Counted::Characters, &one.characters),
            ("seconds", Counted::Seconds, &one.seconds),
        ];
        let mut counts = Vec::new();
        for (field, counted, place) in places {
            let Some(text) = place else { continue };
            let place = if text.starts_with('/') {
                Some(UsagePlace::Body(text.clone()))
            } else {
                text.parse().ok().map(UsagePlace::Header)
            };
            match place {
                Some(place) => counts.push((counted, place)),
                None => refuse(
                    errors,
                    format!("usage.{i}.{field}"),
                    format!("is `{text}`, must be a JSON pointer such as /usage/total_tokens, or a header"),
                ),
            }
        }
        if places.iter().all(|(_, _, place)| place.is_none()) {
            refuse(errors, format!("usage.{i}.input"), "or another count must be given");
        }
        all.push(Usage { event: one.event.clone(), counts });
    }
    all
}

/// Takes out what the user names of the rules that are there: a code or a phrase out of every rule that has
/// it, or a status out of the rules that go by it alone. A rule of which nothing is left is gone.
pub(super) fn remove_rules(rules: &mut Vec<Rule>, names: &[String], errors: &mut Vec<FieldError>) {
    for (i, name) in names.iter().enumerate() {
        if name == ALL {
            rules.clear();
            continue;
        }
        let mut found = false;
        let range = parse_range(name).map(|(first, last)| StatusRange(first, last));
        rules.retain_mut(|rule| {
            let (had_codes, had_phrases) = (!rule.codes.is_empty(), !rule.phrases.is_empty());
            let mut less = take_out(&mut rule.codes, name) | take_out(&mut rule.phrases, name);
            if let Some(range) = range.filter(|_| !had_codes && !had_phrases) {
                less |= take_out(&mut rule.status, &range);
            }
            found |= less;
            // One that asked for a code and a phrase must not become one that asks for less.
            let asks_less = (had_codes && rule.codes.is_empty()) || (had_phrases && rule.phrases.is_empty());
            let fits_nothing = !had_codes && !had_phrases && rule.status.is_empty();
            !(less && (asks_less || fits_nothing))
        });
        if !found {
            let problem = format!(
                "is `{name}`, which is no code, phrase or status of its built-in rules; `lessor check --explain` shows the one that fires"
            );
            refuse(errors, format!("remove_rules.{i}"), problem);
        }
    }
}

/// Takes out what the user names of the waits that are there, by the place they are read from.
pub(super) fn remove_waits(waits: &mut Vec<Wait>, names: &[String], errors: &mut Vec<FieldError>) {
    for (i, name) in names.iter().enumerate() {
        let before = waits.len();
        waits.retain(|wait| {
            let place = match &wait.from {
                WaitPlace::Header(header) => header.as_str().eq_ignore_ascii_case(name),
                WaitPlace::Body(text) | WaitPlace::Phrase(text, _) => text == name,
            };
            !place && name != ALL
        });
        if waits.len() == before && name != ALL {
            let problem = format!("is `{name}`, which is no header, pointer or phrase of its built-in waits");
            refuse(errors, format!("remove_waits.{i}"), problem);
        }
    }
}

fn take_out<T: PartialEq<U>, U: ?Sized>(all: &mut Vec<T>, one: &U) -> bool {
    let before = all.len();
    all.retain(|other| *other != *one);
    all.len() < before
}

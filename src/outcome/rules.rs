//! Which of a provider's rules an answer falls under.

use std::sync::Arc;

use http::{HeaderMap, StatusCode};

use super::body::{Body, scalar};
use super::waits;
use crate::config::{ANY_CODE, Provider, Rule};
use crate::model::Class;

/// The rule that decided, and the code in the body by which it did.
pub(super) struct Hit<'a> {
    pub(super) rule: &'a Rule,
    pub(super) code: Option<&'a str>,
}

/// The first rule that fits: of those with codes, else of those with phrases, else of those with neither.
pub(super) fn find<'a>(
    provider: &'a Provider,
    status: StatusCode,
    headers: &HeaderMap,
    body: &Body,
) -> Option<Hit<'a>> {
    let fitting = || provider.rules.iter().filter(|rule| fits(rule, status, headers));
    let by_code = || {
        fitting().filter(|rule| !rule.codes.is_empty()).find_map(|rule| {
            let code = code_of(rule, headers, body)?;
            says(rule, body).then_some(Hit { rule, code: Some(code).filter(|code| *code != ANY_CODE) })
        })
    };
    let by_phrase = || {
        let rule =
            fitting().find(|rule| rule.codes.is_empty() && !rule.phrases.is_empty() && says(rule, body))?;
        Some(Hit { rule, code: None })
    };
    let by_status = || by_status(provider, status, headers).map(|rule| Hit { rule, code: None });
    by_code().or_else(by_phrase).or_else(by_status)
}

/// The rule for `status` when the body tells nothing.
pub(super) fn by_status<'a>(
    provider: &'a Provider,
    status: StatusCode,
    headers: &HeaderMap,
) -> Option<&'a Rule> {
    let asks_status_alone = |rule: &&Rule| rule.codes.is_empty() && rule.phrases.is_empty();
    provider.rules.iter().filter(asks_status_alone).find(|rule| fits(rule, status, headers))
}

/// What a status means of which no rule speaks. 5xx is the provider's word on itself, and only past 599 is a
/// status nobody's: no usable answer came.
pub(super) fn class_without(status: StatusCode) -> Class {
    match status.as_u16() {
        429 => Class::Rate,
        400..=499 => Class::Caller,
        500..=599 => Class::Overloaded,
        _ => Class::Network,
    }
}

/// Whether the rule is for answers with such a head.
pub(super) fn fits(rule: &Rule, status: StatusCode, headers: &HeaderMap) -> bool {
    let status = status.as_u16();
    (rule.status.is_empty() || rule.status.iter().any(|range| (range.0..=range.1).contains(&status)))
        && rule.only_if_left.iter().all(|name| waits::number(headers, name).is_some_and(|left| left > 0.0))
}

/// Whether the rule looks into the body.
pub(super) fn reads_body(rule: &Rule) -> bool {
    !rule.phrases.is_empty() || rule.fields.iter().any(|field| field.starts_with('/'))
}

/// The rule's code that the answer has in one of the rule's fields. It is the rule's own text that is handed
/// on, never the answer's, so no secret that a provider echoes gets out by this way.
fn code_of<'a>(rule: &'a Rule, headers: &HeaderMap, body: &Body) -> Option<&'a str> {
    let (pointers, names): (Vec<&String>, Vec<&String>) =
        rule.fields.iter().partition(|field| field.starts_with('/'));
    let in_body = pointers.into_iter().flat_map(|field| body.at(field)).filter_map(scalar);
    // AWS writes the place of its error's definition behind a colon.
    let in_head = names.into_iter().filter_map(|field| field.strip_prefix("header:"));
    let in_head = in_head.filter_map(|name| headers.get(name)?.to_str().ok());
    let in_head = in_head.filter_map(|text| text.split(':').next()).map(|text| text.trim().to_owned());
    let values: Vec<String> = in_body.chain(in_head).filter(|text| !text.is_empty()).collect();
    let has = |code: &&String| {
        if *code == ANY_CODE { !values.is_empty() } else { values.contains(code) }
    };
    rule.codes.iter().find(has).map(String::as_str)
}

/// Whether the body has one of the rule's phrases; a rule without phrases asks for none. Beside codes,
/// `fields` says where the codes are, and phrases may stand anywhere.
fn says(rule: &Rule, body: &Body) -> bool {
    if rule.phrases.is_empty() {
        return true;
    }
    let fields = if rule.codes.is_empty() { rule.fields.as_slice() } else { &[] };
    let texts: Vec<String> = body.texts(fields).into_iter().map(str::to_ascii_lowercase).collect();
    rule.phrases.iter().map(|phrase| phrase.to_ascii_lowercase()).any(|phrase| {
        match phrase.strip_prefix('^') {
            Some(start) => texts.iter().any(|text| text.trim_start().starts_with(start)),
            None => texts.iter().any(|text| text.contains(&phrase)),
        }
    })
}

/// A code as evidence for people: printable, and at most 64 bytes.
pub(super) fn evidence(code: &str) -> Option<Arc<str>> {
    let safe: String = code.chars().map(|c| if c.is_ascii_graphic() { c } else { '?' }).take(64).collect();
    (!safe.is_empty()).then(|| safe.into())
}

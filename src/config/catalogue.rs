//! Providers as data: the built-in ones, compiled in from `config/providers.toml`, and the compiler
//! that turns a table of that file, or a user's `[providers.x]`, into a [`Provider`].
//!
//! Both have one schema, [`RawProvider`], so whatever the catalogue says a user can say better. A
//! compiled provider is a sound one: every mistake in its table was found, each with its field.

use std::collections::BTreeMap;
use std::sync::{Arc, LazyLock};

use http::{HeaderName, header};

use super::{Origin, Place, Provider, Rule, Wait, places as places_of};
use crate::model::ProviderName;

mod compile;
mod places;
mod reading;
mod schema;

pub(super) use places::is_framing;
use reading::{compile_rules, compile_waits};
pub use schema::{OneOrMany, RawCheck, RawInject, RawProvider, RawRule, RawStatus, RawUsage, RawWait};

/// The authority that stands for "the user has to set `base_url`"; RFC 2606 keeps it from resolving.
const UNSET: &str = "https://unset.invalid";

/// Query parameters that carry a credential at some provider of the catalogue, beside those injected
/// into. Google takes `key` and `access_token`, Azure's and ElevenLabs' WebSockets take the others.
const CREDENTIAL_QUERIES: [&str; 4] = ["key", "access_token", "api-key", "xi-api-key"];

/// The file as it was compiled in. Its last use is in `builtin`'s and `generic`'s initialisers.
static FILE: LazyLock<BTreeMap<String, RawProvider>> = LazyLock::new(|| {
    // The text is part of the binary, and `the_catalogue_compiles` reads it: a broken one is never built.
    #[allow(clippy::expect_used)]
    toml::from_str(include_str!("../../config/providers.toml")).expect("config/providers.toml is sound")
});

/// What follows every provider's own rules and waits.
static GENERIC: LazyLock<(Vec<Rule>, Vec<Wait>)> = LazyLock::new(|| {
    let mut errors = Vec::new();
    let raw = FILE.get("generic").cloned().unwrap_or_default();
    let read = (compile_rules(&raw, Origin::Generic, &mut errors), compile_waits(&raw, &mut errors));
    assert!(errors.is_empty(), "config/providers.toml: [generic]: {errors:?}"); // seen by the same test
    read
});

/// The built-in providers, by name.
pub fn builtin() -> &'static BTreeMap<ProviderName, Arc<Provider>> {
    static BUILTIN: LazyLock<BTreeMap<ProviderName, Arc<Provider>>> = LazyLock::new(|| {
        let tables = FILE.iter().filter(|(name, _)| *name != "generic");
        // As for `FILE`: compiled in, and compiled once by `the_catalogue_compiles` before it ships.
        #[allow(clippy::expect_used)]
        tables
            .map(|(name, raw)| {
                let name = ProviderName::parse(name).expect("a catalogue name is a name");
                let provider = raw.compile_builtin(&name).expect("a catalogue table compiles");
                (name, Arc::new(provider))
            })
            .collect()
    });
    &BUILTIN
}

/// Suffixes, each with its leading dot, that mark a host as a catalogue provider's. Anybody can own a
/// host under one of them, so they recognise a host and never make a key go there.
pub fn host_patterns() -> Vec<(String, ProviderName)> {
    let of = |p: &Arc<Provider>| {
        let name = p.name.clone();
        p.host_patterns.clone().into_iter().map(move |pattern| (pattern, name.clone()))
    };
    builtin().values().flat_map(of).collect()
}

/// Every header in which some provider of the catalogue looks for a credential. They are taken out of
/// every request, for a client that set one for another provider meant it as a credential too.
pub fn credential_headers() -> &'static [HeaderName] {
    static HEADERS: LazyLock<Vec<HeaderName>> = LazyLock::new(|| {
        let mut all = vec![header::AUTHORIZATION, header::PROXY_AUTHORIZATION];
        for name in builtin().values().flat_map(|p| places_of(&p.inject)).filter_map(Place::header) {
            if !all.contains(name) {
                all.push(name.clone());
            }
        }
        all
    });
    &HEADERS
}

/// Whether a name, in lower case, is one of them. They are so few that to compare them costs less than to hash one.
pub fn is_credential_header(name: &str) -> bool {
    static NAMES: LazyLock<Vec<&str>> =
        LazyLock::new(|| credential_headers().iter().map(HeaderName::as_str).collect());
    NAMES.contains(&name)
}

/// Every query parameter in which some provider of the catalogue looks for a credential.
pub fn credential_queries() -> &'static [String] {
    static QUERIES: LazyLock<Vec<String>> = LazyLock::new(|| {
        let mut all: Vec<String> = CREDENTIAL_QUERIES.map(str::to_owned).into();
        for name in builtin().values().flat_map(|p| places_of(&p.inject)).filter_map(Place::query) {
            if !all.iter().any(|known| known == name) {
                all.push(name.to_owned());
            }
        }
        all
    });
    &QUERIES
}

/// Every prefix of a WebSocket subprotocol behind which some provider of the catalogue looks for a
/// credential.
fn credential_subprotocols() -> &'static [String] {
    static PREFIXES: LazyLock<Vec<String>> =
        LazyLock::new(|| builtin().values().flat_map(|p| p.subprotocols.iter().cloned()).collect());
    &PREFIXES
}

/// What a WebSocket subprotocol has behind its prefix, where that is one of the catalogue's or one of
/// `more`: a credential.
pub fn subprotocol_secret<'m>(member: &'m [u8], more: &[String]) -> Option<&'m [u8]> {
    let member = member.trim_ascii();
    let behind = |prefix: &String| {
        let (head, rest) = member.split_at_checked(prefix.len())?;
        head.eq_ignore_ascii_case(prefix.as_bytes()).then_some(rest)
    };
    credential_subprotocols().iter().chain(more).find_map(behind)
}

/// One mistake in a provider's table.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{field} {problem}")]
pub struct FieldError {
    /// The field, relative to the table, dotted: `base_url`, `rules.0.wait`.
    pub field: String,
    /// What is wrong, so that it reads on from the field's name.
    pub problem: String,
}

fn refuse(errors: &mut Vec<FieldError>, field: impl Into<String>, problem: impl Into<String>) {
    errors.push(FieldError { field: field.into(), problem: problem.into() });
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::expect_used)]
mod tests;

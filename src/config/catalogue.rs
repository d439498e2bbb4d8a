//! Providers as data: the built-in ones, compiled in from `config/providers.toml`, and the compiler
//! that turns a table of that file, or a user's `[providers.x]`, into a [`Provider`].
//!
//! Both have one schema, [`RawProvider`], so whatever the catalogue says a user can say better. A
//! compiled provider is a sound one: every mistake in its table was found, each with its field.

use std::collections::BTreeMap;
use std::fmt;
use std::marker::PhantomData;
use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use http::{HeaderName, HeaderValue, Method, Uri, header};
use serde::de::{self, IntoDeserializer as _, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};

use super::{
    BaseUrlVariable, Check, ErrorShape, Injection, PathPattern, Place, Provider, Rule, Scrub, StatusRange,
    Until, Wait, WaitFormat, WaitPlace,
};
use crate::model::{Class, ProviderName, Scope};

/// The authority that stands for "the user has to set `base_url`"; RFC 2606 keeps it from resolving.
const UNSET: &str = "https://unset.invalid";

/// Where codes and types stand in most providers' errors; a rule that names no `field` looks here.
const USUAL_FIELDS: [&str; 6] =
    ["/error/code", "/error/type", "/error/status", "/code", "/type", "/detail/status"];

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
    let read = (compile_rules(&raw, &mut errors), compile_waits(&raw, &mut errors));
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
        for injection in builtin().values().flat_map(|p| &p.inject) {
            if let Place::Header { name, .. } = &injection.place
                && !all.contains(name)
            {
                all.push(name.clone());
            }
        }
        all
    });
    &HEADERS
}

/// Every query parameter in which some provider of the catalogue looks for a credential.
pub fn credential_queries() -> &'static [String] {
    static QUERIES: LazyLock<Vec<String>> = LazyLock::new(|| {
        let mut all: Vec<String> = CREDENTIAL_QUERIES.map(str::to_owned).into();
        for injection in builtin().values().flat_map(|p| &p.inject) {
            if let Place::Query { name } = &injection.place
                && !all.contains(name)
            {
                all.push(name.clone());
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

/// A provider's table as it is written: every field may be left out.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields)] // a misspelt rule must not become no rule
pub struct RawProvider {
    /// Scheme, authority and perhaps a path that goes before the caller's.
    pub base_url: Option<String>,
    /// Further exact hosts that a key may be sent to.
    pub hosts: Option<Vec<String>>,
    /// Suffixes (`.example.net`) that recognise a host without sending a key there.
    pub host_patterns: Option<Vec<String>>,
    /// Lets `base_url` say `http://` for a host off loopback.
    pub allow_plaintext: Option<bool>,
    /// Certificates trusted for this provider beside the usual ones.
    pub ca_file: Option<PathBuf>,
    /// How the key is put in: one table, or several, each but the last with a `path_prefix`.
    pub inject: Option<OneOrMany<RawInject>>,
    /// Credential places of the client to leave alone: header names, or `?name` for the query.
    pub keep: Option<Vec<String>>,
    /// The shape of errors its SDKs show.
    pub error_shape: Option<ErrorShape>,
    /// Where the leased key is masked in answers: `on` unless said, `headers` or `off`.
    pub scrub: Option<Scrub>,
    /// The request by which lessor checks a key.
    pub check: Option<RawCheck>,
    /// How answers are read; these come before the catalogue's.
    pub rules: Option<Vec<RawRule>>,
    /// Where answers say how long to wait; these come before the catalogue's.
    pub waits: Option<Vec<RawWait>>,
    /// Paths that no leased key is sent to; these come beside the catalogue's.
    pub deny_paths: Option<Vec<String>>,
    /// Exceptions from them.
    pub allow_paths: Option<Vec<String>>,
    /// Path prefixes whose requests need no model.
    pub no_model_paths: Option<Vec<String>>,
    /// See [`Provider::model_after`].
    pub model_after: Option<Vec<String>>,
    /// See [`Provider::subprotocols`].
    pub subprotocols: Option<Vec<String>>,
    /// The usual environment variables of its keys.
    pub env: Option<Vec<String>>,
    /// See [`Provider::env_other`].
    pub env_other: Option<Vec<String>>,
    /// See [`Provider::env_base_url`].
    pub env_base_url: Option<Vec<BaseUrlVariable>>,
}

/// `inject`.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RawInject {
    /// The header that takes the key; or `query`.
    pub header: Option<String>,
    /// The header's value with `{secret}` in it; without, `Bearer {secret}` for `authorization` and
    /// the bare secret elsewhere.
    pub format: Option<String>,
    /// The query parameter that takes the key; or `header`.
    pub query: Option<String>,
    /// Only for paths that begin so.
    pub path_prefix: Option<String>,
}

/// `check`.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RawCheck {
    /// GET unless said.
    pub method: Option<String>,
    /// Path and query below `base_url`.
    pub path: Option<String>,
    /// Headers it needs.
    #[serde(default)]
    pub headers: BTreeMap<String, String>,
}

/// One of `rules`.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RawRule {
    /// Statuses: numbers, or ranges such as `"500-599"`.
    pub status: Option<OneOrMany<RawStatus>>,
    /// Codes or types, one of which must stand in one of `field`.
    pub code: Option<OneOrMany<String>>,
    /// JSON pointers; `*` stands for every element of an array.
    pub field: Option<OneOrMany<String>>,
    /// Phrases, one of which the body (or `field`, if given) must contain.
    pub phrase: Option<OneOrMany<String>>,
    /// What it means.
    pub class: Class,
    /// Who shares the limit.
    pub scope: Option<Scope>,
    /// Whether the answer names the key itself as bad.
    pub proven: Option<bool>,
    /// The wait when the answer names none: `15m`, or `month_end`.
    pub wait: Option<String>,
}

/// One of `waits`.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RawWait {
    /// A header.
    pub header: Option<String>,
    /// A JSON pointer into the body; `*` stands for every element of an array.
    pub body: Option<String>,
    /// A phrase of the body after which the wait stands.
    pub phrase: Option<String>,
    /// How it is written.
    pub format: WaitFormat,
    /// A header that must be 0 for this wait to count.
    pub only_if_zero: Option<String>,
    /// The classes of answers it counts for; left out: all that can wait.
    #[serde(default)]
    pub classes: Vec<Class>,
}

/// A status, or a range of them as text.
#[derive(Debug, Clone, Deserialize)]
#[serde(untagged)]
pub enum RawStatus {
    /// `429`
    One(u16),
    /// `"500-599"`
    Range(String),
}

/// One value, or an array of them. Written by hand because an untagged enum hides which field is wrong.
#[derive(Debug, Clone)]
pub struct OneOrMany<T>(pub Vec<T>);

impl<'de, T: Deserialize<'de>> Deserialize<'de> for OneOrMany<T> {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct Either<T>(PhantomData<T>);
        impl<'de, T: Deserialize<'de>> Visitor<'de> for Either<T> {
            type Value = OneOrMany<T>;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("one value or an array of them")
            }
            fn visit_str<E: de::Error>(self, text: &str) -> Result<Self::Value, E> {
                T::deserialize(text.into_deserializer()).map(|one| OneOrMany(vec![one]))
            }
            fn visit_i64<E: de::Error>(self, number: i64) -> Result<Self::Value, E> {
                T::deserialize(number.into_deserializer()).map(|one| OneOrMany(vec![one]))
            }
            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Self::Value, A::Error> {
                T::deserialize(de::value::MapAccessDeserializer::new(map)).map(|one| OneOrMany(vec![one]))
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Self::Value, A::Error> {
                let mut all = Vec::new();
                while let Some(one) = seq.next_element()? {
                    all.push(one);
                }
                Ok(OneOrMany(all))
            }
        }
        from.deserialize_any(Either(PhantomData))
    }
}

impl RawProvider {
    /// The names of its fields, for "did you mean".
    pub const FIELDS: &[&str] = &[
        "base_url",
        "hosts",
        "host_patterns",
        "allow_plaintext",
        "ca_file",
        "inject",
        "keep",
        "error_shape",
        "scrub",
        "check",
        "rules",
        "waits",
        "deny_paths",
        "allow_paths",
        "no_model_paths",
        "model_after",
        "subprotocols",
        "env",
        "env_other",
        "env_base_url",
    ];

    /// The provider this table describes, over `base` (the catalogue's of that name) where there is one:
    /// `rules`, `waits`, `hosts` and `deny_paths` come beside the base's, its rules and waits first; other
    /// fields replace the base's. Reports every mistake, not only the first.
    pub fn compile(&self, name: &ProviderName, base: Option<&Provider>) -> Result<Provider, Vec<FieldError>> {
        let mut errors = Vec::new();
        let users_url = self.base_url.as_deref().and_then(|text| {
            let plaintext = self.allow_plaintext.unwrap_or(false);
            parse_base_url(text, plaintext).map_err(|problem| refuse(&mut errors, "base_url", problem)).ok()
        });
        if self.base_url.is_none() {
            match base {
                None => refuse(&mut errors, "base_url", "is missing, and the catalogue has no such provider"),
                Some(base) if base.needs_base_url && self.hosts.as_ref().is_none_or(Vec::is_empty) => {
                    refuse(
                        &mut errors,
                        "base_url",
                        "or hosts must be set: this provider has no address of its own",
                    );
                }
                Some(_) => {}
            }
        }
        let mut provider = base.cloned().unwrap_or_else(|| blank(name));
        provider.name = name.clone();
        if let Some(url) = users_url {
            push_new(&mut provider.hosts, host_of(&url));
            provider.base_url = url;
            provider.base_url_is_users = true;
            provider.needs_base_url = false;
        }
        self.fill(&mut provider, &mut errors);
        // Whoever names a host for the proxy modes has said where the provider is; the first of several is
        // where the other mode and lessor's own checks go.
        if provider.needs_base_url
            && let Some(url) = provider.hosts.first().and_then(|host| format!("https://{host}").parse().ok())
        {
            provider.base_url = url;
            provider.needs_base_url = false;
        }
        if errors.is_empty() { Ok(provider) } else { Err(errors) }
    }

    /// A table of the catalogue: it may do without `base_url`, and its `base_url` is not the user's.
    fn compile_builtin(&self, name: &ProviderName) -> Result<Provider, Vec<FieldError>> {
        let raw = Self { base_url: self.base_url.clone().or_else(|| Some(UNSET.to_owned())), ..self.clone() };
        let mut provider = raw.compile(name, None)?;
        provider.base_url_is_users = false;
        provider.needs_base_url = self.base_url.is_none();
        if provider.needs_base_url {
            provider.hosts = self.hosts.clone().unwrap_or_default();
        }
        Ok(provider)
    }

    /// Everything but `base_url`.
    fn fill(&self, provider: &mut Provider, errors: &mut Vec<FieldError>) {
        for (i, host) in self.hosts.iter().flatten().enumerate() {
            match parse_host(host) {
                Ok(host) => push_new(&mut provider.hosts, host),
                Err(problem) => refuse(errors, format!("hosts.{i}"), problem),
            }
        }
        if let Some(patterns) = &self.host_patterns {
            provider.host_patterns.clear();
            for (i, pattern) in patterns.iter().enumerate() {
                let bare = pattern.strip_prefix('*').unwrap_or(pattern);
                match bare.strip_prefix('.').map(parse_host) {
                    Some(Ok(host)) => provider.host_patterns.push(format!(".{host}")),
                    _ => refuse(
                        errors,
                        format!("host_patterns.{i}"),
                        "must be a suffix such as `.example.net`",
                    ),
                }
            }
        }
        if let Some(path) = &self.ca_file {
            provider.ca_file = Some(path.clone());
        }
        if let Some(OneOrMany(inject)) = &self.inject {
            provider.inject = compile_inject(inject, errors);
        }
        if let Some(keep) = &self.keep {
            provider.keep.clear();
            for (i, place) in keep.iter().enumerate() {
                match parse_keep(place) {
                    Ok(place) => provider.keep.push(place),
                    Err(problem) => refuse(errors, format!("keep.{i}"), problem),
                }
            }
        }
        if let Some(shape) = self.error_shape {
            provider.error_shape = shape;
        }
        if let Some(scrub) = self.scrub {
            provider.scrub = scrub;
        }
        if let Some(check) = &self.check {
            provider.check = compile_check(check, errors);
        }
        provider.rules.splice(0..0, compile_rules(self, errors));
        provider.waits.splice(0..0, compile_waits(self, errors));
        provider.deny_paths.extend(compile_paths("deny_paths", self.deny_paths.as_ref(), errors));
        if self.allow_paths.is_some() {
            provider.allow_paths = compile_paths("allow_paths", self.allow_paths.as_ref(), errors);
        }
        if let Some(parts) = &self.model_after {
            provider.model_after.clone_from(parts);
            for (i, part) in
                parts.iter().enumerate().filter(|(_, part)| part.len() < 3 || !part.ends_with('/'))
            {
                refuse(
                    errors,
                    format!("model_after.{i}"),
                    format!("is `{part}`, must be a part of a path such as `/models/`"),
                );
            }
        }
        if let Some(paths) = &self.no_model_paths {
            provider.no_model_paths.clone_from(paths);
            for (i, path) in paths.iter().enumerate().filter(|(_, path)| !path.starts_with('/')) {
                refuse(errors, format!("no_model_paths.{i}"), format!("is `{path}`, must begin with `/`"));
            }
        }
        if let Some(all) = &self.subprotocols {
            provider.subprotocols.clone_from(all);
            for (i, prefix) in all.iter().enumerate().filter(|(_, prefix)| !is_token(prefix)) {
                let problem = format!("is `{prefix}`, must be a prefix such as `provider-api-key.`");
                refuse(errors, format!("subprotocols.{i}"), problem);
            }
        }
        if let Some(env) = &self.env {
            provider.env.clone_from(env);
        }
        if let Some(env) = &self.env_other {
            provider.env_other.clone_from(env);
        }
        if let Some(all) = &self.env_base_url {
            provider.env_base_url.clone_from(all);
            for (i, _) in all.iter().enumerate().filter(|(_, one)| !is_base_url_variable(one)) {
                let problem =
                    "must be { name = \"X_BASE_URL\", path = \"/v1\" }, the path empty or with a `/` first";
                refuse(errors, format!("env_base_url.{i}"), problem);
            }
        }
    }
}

fn compile_paths(field: &str, raw: Option<&Vec<String>>, errors: &mut Vec<FieldError>) -> Vec<PathPattern> {
    let mut all = Vec::new();
    for (i, text) in raw.into_iter().flatten().enumerate() {
        match PathPattern::parse(text) {
            Ok(pattern) => all.push(pattern),
            Err(rule) => refuse(errors, format!("{field}.{i}"), format!("is `{text}`, {rule}")),
        }
    }
    all
}

/// Whether a WebSocket subprotocol may begin so (RFC 9110, section 5.6.2).
fn is_token(text: &str) -> bool {
    let may = |b: u8| b.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&b);
    !text.is_empty() && text.bytes().all(may)
}

/// Its name and path go into lines that a shell evaluates.
fn is_base_url_variable(one: &BaseUrlVariable) -> bool {
    let plain = |b: u8| b.is_ascii_alphanumeric() || b == b'_';
    let named = !one.name.is_empty() && !one.name.as_bytes()[0].is_ascii_digit();
    let path = one.path.is_empty() || one.path.starts_with('/') && !one.path.ends_with('/');
    named && one.name.bytes().all(plain) && path && one.path.bytes().all(|b| plain(b) || b"/-.".contains(&b))
}

/// A provider that says nothing of its own: a Bearer token, and the generic rules.
fn blank(name: &ProviderName) -> Provider {
    let (rules, waits) = GENERIC.clone();
    let bearer =
        Place::Header { name: header::AUTHORIZATION, before: "Bearer ".into(), after: String::new() };
    Provider {
        name: name.clone(),
        base_url: Uri::from_static(UNSET),
        base_url_is_users: false,
        needs_base_url: true,
        hosts: Vec::new(),
        host_patterns: Vec::new(),
        ca_file: None,
        inject: vec![Injection { path_prefix: None, place: bearer }],
        keep: Vec::new(),
        error_shape: ErrorShape::OpenAi,
        scrub: Scrub::On,
        check: None,
        rules,
        waits,
        deny_paths: Vec::new(),
        allow_paths: Vec::new(),
        no_model_paths: Vec::new(),
        model_after: Vec::new(),
        subprotocols: Vec::new(),
        env: Vec::new(),
        env_other: Vec::new(),
        env_base_url: Vec::new(),
    }
}

fn refuse(errors: &mut Vec<FieldError>, field: impl Into<String>, problem: impl Into<String>) {
    errors.push(FieldError { field: field.into(), problem: problem.into() });
}

fn push_new(hosts: &mut Vec<String>, host: String) {
    if !hosts.contains(&host) {
        hosts.push(host);
    }
}

/// The host of a URL that has one, in lower case and without port.
fn host_of(url: &Uri) -> String {
    url.host().unwrap_or_default().to_ascii_lowercase()
}

fn is_loopback(host: &str) -> bool {
    let bare = host.trim_start_matches('[').trim_end_matches(']');
    bare == "localhost"
        || bare.ends_with(".localhost")
        || bare.parse::<IpAddr>().is_ok_and(|ip| ip.to_canonical().is_loopback())
}

/// Scheme, authority and path, with nothing that could send a key elsewhere than it seems. Problems
/// never repeat the text: what stands before an `@` may be a secret.
fn parse_base_url(text: &str, allow_plaintext: bool) -> Result<Uri, String> {
    let text = text.trim_end_matches('/');
    let uri: Uri = text.parse().map_err(|_| "is no URL")?;
    let (Some(scheme), Some(authority)) = (uri.scheme_str(), uri.authority()) else {
        return Err("must be a whole URL, such as https://host/path".into());
    };
    if authority.as_str().contains('@') {
        return Err("must carry no user or password; keys belong in [[keys]]".into());
    }
    if text.contains('?') || text.contains('#') {
        return Err("must have no query and no fragment".into());
    }
    // `http` takes `host:` and ports past 65535 for an authority, and then has no port to connect to.
    let after_host = &authority.as_str()[authority.host().len()..];
    if authority.host().is_empty() || (!after_host.is_empty() && authority.port_u16().is_none_or(|p| p == 0))
    {
        return Err("needs a host, and a port from 1 to 65535 where it names one".into());
    }
    if uri.path().split('/').any(|segment| matches!(segment, "." | "..")) {
        return Err("must have no dot segments".into());
    }
    match scheme {
        "https" => Ok(uri),
        "http" if allow_plaintext || is_loopback(&host_of(&uri)) => Ok(uri),
        "http" => Err("sends keys in the clear; use https://, or set allow_plaintext = true".into()),
        other => Err(format!("has the scheme `{other}`, must be https:// or http://")),
    }
}

fn parse_host(text: &str) -> Result<String, String> {
    let host = text.to_ascii_lowercase();
    let authority: http::uri::Authority =
        host.parse().map_err(|_| format!("is `{text}`, which is no host"))?;
    if authority.host() != host || host.starts_with('.') || host.contains('*') {
        return Err(format!("is `{text}`, must be one exact host without scheme, port or path"));
    }
    Ok(host)
}

fn parse_keep(text: &str) -> Result<String, String> {
    if text.strip_prefix('?').is_some_and(|name| !name.is_empty()) {
        return Ok(text.to_owned());
    }
    let name: HeaderName = text
        .parse()
        .map_err(|_| format!("is `{text}`, must be a header's name, or `?name` for the query"))?;
    Ok(name.as_str().to_owned())
}

fn compile_inject(raw: &[RawInject], errors: &mut Vec<FieldError>) -> Vec<Injection> {
    if raw.is_empty() {
        refuse(errors, "inject", "is empty; a request is never sent without its key");
    }
    let mut all = Vec::new();
    for (i, one) in raw.iter().enumerate() {
        let field =
            |name: &str| if raw.len() == 1 { format!("inject.{name}") } else { format!("inject.{i}.{name}") };
        let last = i + 1 == raw.len();
        match &one.path_prefix {
            Some(_) if last => {
                refuse(
                    errors,
                    field("path_prefix"),
                    "must not stand on the last, which serves all other paths",
                );
            }
            None if !last => {
                refuse(
                    errors,
                    field("path_prefix"),
                    "is missing; only the last goes without, the rest would never be used",
                );
            }
            Some(prefix) if !prefix.starts_with('/') => {
                refuse(errors, field("path_prefix"), format!("is `{prefix}`, must begin with `/`"));
            }
            _ => {}
        }
        match compile_place(one) {
            Ok(place) => all.push(Injection { path_prefix: one.path_prefix.clone(), place }),
            Err((name, problem)) => refuse(errors, field(name), problem),
        }
    }
    all
}

fn compile_place(raw: &RawInject) -> Result<Place, (&'static str, String)> {
    let header = match (&raw.header, &raw.query) {
        (Some(header), None) => header,
        (None, Some(query)) if raw.format.is_some() => {
            return Err((
                "format",
                format!("is for headers; the query parameter `{query}` is the bare secret"),
            ));
        }
        (None, Some(query)) if query.is_empty() => return Err(("query", "is empty".into())),
        (None, Some(query)) => return Ok(Place::Query { name: query.clone() }),
        _ => return Err(("header", "or `query` must be given, one of them".into())),
    };
    let name: HeaderName =
        header.parse().map_err(|_| ("header", format!("is `{header}`, which is no header name")))?;
    // These frame or route the message; a key in one would break it, or not arrive.
    let framing = [
        header::HOST,
        header::CONTENT_LENGTH,
        header::TRANSFER_ENCODING,
        header::CONNECTION,
        header::UPGRADE,
        header::TE,
        header::TRAILER,
        header::EXPECT,
        header::PROXY_AUTHORIZATION,
    ];
    if framing.contains(&name) {
        return Err(("header", format!("is `{header}`, which no provider reads a key from")));
    }
    let format = match &raw.format {
        Some(format) => format.as_str(),
        None if name == header::AUTHORIZATION => "Bearer {secret}",
        None => "{secret}",
    };
    let parts: Vec<&str> = format.split("{secret}").collect();
    let [before, after] = parts.as_slice() else {
        return Err(("format", "must contain {secret} once".into()));
    };
    if !format.bytes().all(|b| (b' '..=b'~').contains(&b)) {
        return Err(("format", "must be printable ASCII".into()));
    }
    Ok(Place::Header { name, before: (*before).into(), after: (*after).into() })
}

fn compile_check(raw: &RawCheck, errors: &mut Vec<FieldError>) -> Option<Check> {
    let before = errors.len();
    let method = raw.method.as_deref().unwrap_or("GET").parse().unwrap_or_else(|_| {
        refuse(errors, "check.method", "is no HTTP method");
        Method::GET
    });
    let path = raw.path.clone().unwrap_or_default();
    if !path.starts_with('/') || path.parse::<http::uri::PathAndQuery>().is_err() {
        refuse(errors, "check.path", "must be a path that begins with `/`");
    }
    let mut headers = Vec::new();
    for (name, value) in &raw.headers {
        match (name.parse::<HeaderName>(), HeaderValue::from_str(value)) {
            (Ok(name), Ok(value)) => headers.push((name, value)),
            _ => refuse(errors, format!("check.headers.{name}"), "is no header"),
        }
    }
    (errors.len() == before).then_some(Check { method, path, headers })
}

fn compile_rules(raw: &RawProvider, errors: &mut Vec<FieldError>) -> Vec<Rule> {
    let mut all = Vec::new();
    for (i, rule) in raw.rules.iter().flatten().enumerate() {
        let mut bad = |field: &str, problem: String| refuse(errors, format!("rules.{i}.{field}"), problem);
        let mut status = Vec::new();
        for one in rule.status.iter().flat_map(|all| &all.0) {
            match parse_status(one) {
                Ok(range) => status.push(range),
                Err(problem) => bad("status", problem),
            }
        }
        let codes = many(rule.code.as_ref());
        let phrases = many(rule.phrase.as_ref());
        let mut fields = many(rule.field.as_ref());
        if rule.status.is_none() && codes.is_empty() && phrases.is_empty() {
            bad(
                "status",
                "is missing, and neither code nor phrase is given: it would fit every answer".into(),
            );
        }
        if codes.iter().any(String::is_empty) {
            bad("code", "has an empty entry".into());
        }
        if phrases.iter().any(|phrase| phrase.trim_start_matches('^').is_empty()) {
            bad("phrase", "has an empty entry, which every body contains".into());
        }
        if let Some(field) = fields.iter().find(|field| !field.starts_with('/')) {
            bad("field", format!("is `{field}`, must be a JSON pointer such as /error/code"));
        }
        if !fields.is_empty() && codes.is_empty() && phrases.is_empty() {
            bad("field", "is given without code or phrase to look for".into());
        }
        if fields.is_empty() && !codes.is_empty() {
            fields = USUAL_FIELDS.map(str::to_owned).into();
        }
        if matches!(rule.class, Class::Cancelled) {
            bad("class", "is `cancelled`, which no answer means".into());
        }
        let is_invalid = rule.class == Class::Invalid;
        if rule.proven.is_some() && !is_invalid {
            bad("proven", "is only for class = \"invalid\"".into());
        }
        let proven = rule.proven.unwrap_or(!is_invalid);
        let scope = rule.scope.unwrap_or(match rule.class {
            Class::Overloaded => Scope::ProviderModel,
            Class::Access => Scope::KeyModel,
            Class::Invalid if !proven => Scope::KeyModel,
            _ => Scope::Key,
        });
        let (wait, until) = match rule.wait.as_deref() {
            None => (None, None),
            Some("month_end") => (None, Some(Until::MonthEnd)),
            Some(text) => match humantime::parse_duration(text) {
                Ok(wait) if wait > Duration::ZERO => (Some(wait), None),
                _ => {
                    bad("wait", format!("is `{text}`, must be a time such as 90s or 15m, or month_end"));
                    (None, None)
                }
            },
        };
        all.push(Rule { status, codes, fields, phrases, class: rule.class, scope, proven, wait, until });
    }
    all
}

fn many(raw: Option<&OneOrMany<String>>) -> Vec<String> {
    raw.map(|all| all.0.clone()).unwrap_or_default()
}

fn parse_status(raw: &RawStatus) -> Result<StatusRange, String> {
    let (first, last) = match raw {
        RawStatus::One(status) => (*status, *status),
        RawStatus::Range(text) => {
            let ends = text
                .split_once('-')
                .and_then(|(a, b)| Some((a.trim().parse().ok()?, b.trim().parse().ok()?)));
            ends.or_else(|| text.parse().ok().map(|one| (one, one)))
                .ok_or_else(|| format!("has `{text}`, must be a status or a range such as \"500-599\""))?
        }
    };
    if !(400..=999).contains(&first) || !(first..=999).contains(&last) {
        return Err(format!("has {first}-{last}; answers are read from status 400 up"));
    }
    Ok(StatusRange(first, last))
}

fn compile_waits(raw: &RawProvider, errors: &mut Vec<FieldError>) -> Vec<Wait> {
    let mut all = Vec::new();
    for (i, wait) in raw.waits.iter().flatten().enumerate() {
        let mut bad = |field: &str, problem: String| refuse(errors, format!("waits.{i}.{field}"), problem);
        let mut header = |field: &str, text: &str| {
            let name = text.parse::<HeaderName>().ok();
            if name.is_none() {
                bad(field, format!("is `{text}`, which is no header name"));
            }
            name
        };
        let only_if_zero = wait.only_if_zero.as_deref().and_then(|name| header("only_if_zero", name));
        let from = match (&wait.header, &wait.body, &wait.phrase) {
            (Some(name), None, None) => header("header", name).map(WaitPlace::Header),
            (None, Some(pointer), None) if pointer.starts_with('/') => Some(WaitPlace::Body(pointer.clone())),
            (None, Some(pointer), None) => {
                bad("body", format!("is `{pointer}`, must be a JSON pointer such as /error/retry_after"));
                None
            }
            (None, None, Some(phrase)) if !phrase.is_empty() => Some(WaitPlace::Phrase(phrase.clone())),
            _ => {
                bad("header", "`body` or `phrase` must be given, one of them".into());
                None
            }
        };
        if let Some(from) = from {
            all.push(Wait { from, format: wait.format, only_if_zero, classes: wait.classes.clone() });
        }
    }
    all
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::expect_used)]
mod tests {
    use super::*;

    const NAMES: [&str; 16] = [
        "anthropic",
        "azure-openai",
        "cohere",
        "deepseek",
        "elevenlabs",
        "fireworks",
        "gemini",
        "groq",
        "huggingface",
        "mistral",
        "openai",
        "openrouter",
        "perplexity",
        "replicate",
        "together",
        "xai",
    ];

    fn name(text: &str) -> ProviderName {
        ProviderName::parse(text).unwrap()
    }

    fn table(toml: &str) -> RawProvider {
        toml::from_str(toml).unwrap()
    }

    /// What a table over the catalogue's provider of that name, if any, is refused for.
    fn refused(provider: &str, toml: &str) -> Vec<String> {
        let name = name(provider);
        let base = builtin().get(&name).map(Arc::as_ref);
        table(toml).compile(&name, base).unwrap_err().into_iter().map(|e| e.field).collect()
    }

    #[test]
    fn the_catalogue_compiles() {
        assert_eq!(builtin().keys().map(ProviderName::as_str).collect::<Vec<_>>(), NAMES);
    }

    #[test]
    fn every_builtin_has_an_exact_host_and_a_bare_base_url_or_asks_for_one() {
        for provider in builtin().values() {
            assert_eq!(provider.base_url.path(), "/", "{}", provider.name);
            assert_eq!(provider.base_url.scheme_str(), Some("https"), "{}", provider.name);
            assert_eq!(provider.needs_base_url, provider.hosts.is_empty(), "{}", provider.name);
            assert!(!provider.hosts.iter().any(|h| h.contains("unset")), "{}", provider.name);
            assert!(!provider.base_url_is_users && !provider.env.is_empty(), "{}", provider.name);
            assert!(provider.inject.last().unwrap().path_prefix.is_none(), "{}", provider.name);
        }
        let asks: Vec<_> = builtin().values().filter(|p| p.needs_base_url).map(|p| p.name.as_str()).collect();
        assert_eq!(asks, ["azure-openai"]);
    }

    #[test]
    fn no_host_belongs_to_two_providers_and_no_exact_host_falls_under_a_pattern() {
        let mut seen = BTreeMap::new();
        for provider in builtin().values() {
            for host in &provider.hosts {
                assert_eq!(seen.insert(host.clone(), provider.name.clone()), None, "{host}");
                assert!(host_patterns().iter().all(|(pattern, _)| !host.ends_with(pattern)), "{host}");
            }
        }
        assert!(host_patterns().contains(&(".openai.azure.com".into(), name("azure-openai"))));
        assert!(host_patterns().contains(&(".endpoints.huggingface.cloud".into(), name("huggingface"))));
    }

    #[test]
    fn every_place_of_a_credential_is_known() {
        for header in
            ["authorization", "proxy-authorization", "x-api-key", "api-key", "x-goog-api-key", "xi-api-key"]
        {
            assert!(credential_headers().iter().any(|h| h == header), "{header}");
        }
        assert!(credential_queries().iter().any(|q| q == "key"));
    }

    #[test]
    fn a_users_address_replaces_the_catalogues_and_both_hosts_stay_the_providers() {
        let raw = table("base_url = 'http://127.0.0.1:9000/v2/'\nhosts = ['Gw.Internal']");
        let openai = raw.compile(&name("openai"), builtin().get("openai").map(Arc::as_ref)).unwrap();
        assert_eq!(openai.base_url, "http://127.0.0.1:9000/v2");
        assert!(openai.base_url_is_users);
        for host in ["api.openai.com", "127.0.0.1", "gw.internal"] {
            assert!(openai.hosts.iter().any(|h| h == host), "{host}");
        }
    }

    #[test]
    fn a_users_rules_and_waits_come_before_the_catalogues() {
        let raw = table(
            "rules = [{ status = 429, class = 'quota', wait = '1h' }]\nwaits = [{ body = '/wait', format = 'seconds' }]",
        );
        let base = builtin().get("openai").unwrap();
        let openai = raw.compile(&name("openai"), Some(base)).unwrap();
        assert_eq!(openai.rules[0].class, Class::Quota);
        assert_eq!(openai.rules[0].wait, Some(Duration::from_hours(1)));
        assert_eq!(openai.rules.len(), base.rules.len() + 1);
        assert_eq!(openai.waits[0].from, WaitPlace::Body("/wait".into()));
        assert_eq!(openai.waits[1..], base.waits);
    }

    #[test]
    fn a_provider_of_the_users_own_needs_an_address_only_and_gets_the_generic_rules() {
        let raw = table("base_url = 'https://llm.internal/v2'");
        let own = raw.compile(&name("internal-llm"), None).unwrap();
        assert_eq!(own.hosts, ["llm.internal"]);
        assert_eq!(own.rules.len(), GENERIC.0.len());
        assert!(matches!(&own.inject[0].place, Place::Header { name, before, .. }
            if name == "authorization" && before == "Bearer "));
        assert_eq!(refused("internal-llm", ""), ["base_url"]);
        assert_eq!(refused("azure-openai", "error_shape = 'openai'"), ["base_url"]);
    }

    #[test]
    fn a_host_of_the_users_is_address_enough_for_a_provider_without_one() {
        let raw = table("hosts = ['mine.openai.azure.com', 'other.openai.azure.com']");
        let azure = raw.compile(&name("azure-openai"), Some(&builtin()["azure-openai"])).unwrap();
        assert_eq!(azure.base_url, "https://mine.openai.azure.com");
        assert!(!azure.needs_base_url && !azure.base_url_is_users);
        assert_eq!(azure.hosts.len(), 2);
    }

    #[test]
    fn a_base_url_that_could_send_a_key_elsewhere_is_refused_and_never_repeated() {
        for url in [
            "http://llm.internal",
            "https://user:hunter2@llm.internal",
            "https://h?x=1",
            "https://h/#x",
            "ftp://h",
            "/v1",
            "h",
            "https://",
            "https://h:",
            "https://h:0",
            "https://h:70000",
            "https://h/a/../b",
            "",
            "http://localhost.evil.example",
        ] {
            let raw = RawProvider { base_url: Some(url.into()), ..RawProvider::default() };
            let errors = raw.compile(&name("own"), None).unwrap_err();
            assert_eq!(errors.len(), 1, "{url}");
            assert_eq!(errors[0].field, "base_url", "{url}");
            assert!(!errors[0].to_string().contains("hunter2"));
        }
        for url in ["http://localhost:1", "http://127.0.0.2", "http://[::1]:80/", "https://h:443/a/b/"] {
            let raw = RawProvider { base_url: Some(url.into()), ..RawProvider::default() };
            assert!(raw.compile(&name("own"), None).is_ok(), "{url}");
        }
        assert!(table("base_url = 'http://h'\nallow_plaintext = true").compile(&name("own"), None).is_ok());
    }

    #[test]
    fn every_mistake_is_named_with_its_field() {
        for (toml, field) in [
            ("hosts = ['https://h']", "hosts.0"),
            ("hosts = ['h:443']", "hosts.0"),
            ("hosts = ['*.h']", "hosts.0"),
            ("host_patterns = ['h']", "host_patterns.0"),
            ("keep = ['a b']", "keep.0"),
            ("no_model_paths = ['v1']", "no_model_paths.0"),
            ("deny_paths = ['v1']", "deny_paths.0"),
            ("allow_paths = ['/a', '/a%20']", "allow_paths.1"),
            ("inject = {}", "inject.header"),
            ("inject = { header = 'x', query = 'y' }", "inject.header"),
            ("inject = { header = 'host' }", "inject.header"),
            ("inject = { header = 'x', format = 'Token' }", "inject.format"),
            ("inject = { header = 'x', format = '{secret}{secret}' }", "inject.format"),
            ("inject = { header = 'x', path_prefix = '/a' }", "inject.path_prefix"),
            ("inject = [{ header = 'x' }, { header = 'y' }]", "inject.0.path_prefix"),
            ("inject = []", "inject"),
            ("check = { path = 'x' }", "check.path"),
            ("check = { path = '/x', method = 'G T' }", "check.method"),
            ("rules = [{ class = 'rate' }]", "rules.0.status"),
            ("rules = [{ status = 200, class = 'rate' }]", "rules.0.status"),
            ("rules = [{ status = '599-500', class = 'rate' }]", "rules.0.status"),
            ("rules = [{ status = 429, phrase = '', class = 'rate' }]", "rules.0.phrase"),
            ("rules = [{ status = 429, field = '/a', class = 'rate' }]", "rules.0.field"),
            ("rules = [{ code = 'x', field = 'a', class = 'rate' }]", "rules.0.field"),
            ("rules = [{ status = 429, class = 'rate', proven = true }]", "rules.0.proven"),
            ("rules = [{ status = 429, class = 'rate', wait = 'soon' }]", "rules.0.wait"),
            ("rules = [{ status = 429, class = 'cancelled' }]", "rules.0.class"),
            ("waits = [{ format = 'millis' }]", "waits.0.header"),
            ("waits = [{ header = 'a b', format = 'millis' }]", "waits.0.header"),
            ("waits = [{ body = 'a', format = 'millis' }]", "waits.0.body"),
        ] {
            assert_eq!(refused("openai", toml), [field], "{toml}");
        }
        assert_eq!(refused("openai", "hosts = ['h:1']\nkeep = ['a b']"), ["hosts.0", "keep.0"]);
    }

    #[test]
    fn a_misspelt_field_is_refused_and_every_field_is_listed() {
        assert!(toml::from_str::<RawProvider>("base_ulr = 'x'").is_err());
        assert!(toml::from_str::<RawProvider>("rules = [{ status = 429, clas = 'rate' }]").is_err());
        let message = toml::from_str::<RawProvider>("zzz = 1").unwrap_err().to_string();
        for field in RawProvider::FIELDS {
            assert!(message.contains(&format!("`{field}`")), "{field}");
        }
        assert_eq!(message.matches('`').count() / 2, RawProvider::FIELDS.len() + 1);
    }
}

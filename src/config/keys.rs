//! `[[keys]]`: whose they are, where their secrets come from, and what they are put in as.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use http::{HeaderName, HeaderValue};
use toml::de::DeValue;

use super::checks::{self, KeysSeen};
use super::commands::{self, SecretCommand};
use super::errors::Span;
use super::file::refuse_empty;
use super::providers::Providers;
use super::secrets::Shape;
use super::tree::{Field, Page, Said, Table};
use super::{Injection, KeyConfig, KeyHeader, Kind, Place, catalogue, defaults, fields, places, sections};
use crate::model::{GroupName, KeyId, PoolName, ProviderName, Secret};

/// Parts of a secret that are shorter are not looked for in answers: a number or a word would be found by
/// chance in any header.
const SHORTEST_PART: usize = 8;

/// What a command may take unless the file says more.
const COMMAND: Duration = Duration::from_secs(10);

/// Reads all keys, and the pools that they name.
pub(super) fn read(
    page: &Page<'_>,
    root: &Table<'_>,
    providers: &Providers,
) -> (Vec<KeyConfig>, BTreeSet<PoolName>) {
    let (mut keys, mut pools) = (Vec::new(), BTreeSet::new());
    let Some(field) = root.get("keys") else { return (keys, pools) };
    let Some(items) = field.items() else {
        field.wrong::<()>("must be tables, each under [[keys]]");
        return (keys, pools);
    };
    let mut seen = KeysSeen::default();
    for item in &items {
        let Some(table) = item.table("keys[]") else { continue };
        let pool = table.name("pool").map_or_else(PoolName::default_pool, |pool| pool.value);
        keys.extend(read_one(page, &table, providers, &pool, &mut seen));
        // Also of a key that is refused: who names its pool is not to blame.
        pools.insert(pool);
    }
    (keys, pools)
}

/// One key. Each field is read before any is missed, so that all mistakes of a key are told.
fn read_one(
    page: &Page<'_>,
    table: &Table<'_>,
    providers: &Providers,
    pool: &PoolName,
    seen: &mut KeysSeen,
) -> Option<KeyConfig> {
    let id: Option<Said<KeyId>> = table.need("id").and_then(|_| table.name("id"));
    let provider = table.need("provider").and_then(|field| provider(&field, providers));
    let owner = id.as_ref().zip(provider.as_ref()).map(|(id, provider)| (provider.clone(), id.value.clone()));
    let inject = provider.as_ref().and_then(|name| providers.all.get(name)).map(|known| &*known.inject);
    let had = table.need("secret").and_then(|field| Had::read(&field, owner, inject.unwrap_or_default()));
    let mut taken: Vec<&HeaderName> = places(inject.unwrap_or_default()).filter_map(Place::header).collect();
    taken.extend(had.iter().flat_map(|had| places(&had.inject)).filter_map(Place::header));
    let (headers, secrets) = headers(table, &taken);
    let group = table.get("group").and_then(|field| group_of(&field));
    let max_concurrent_uses = table.count("max_concurrent_uses", defaults::USES, 1..=1_000_000);
    let models = sections::all(table, "models", pattern, "must be a model or a pattern such as \"gpt-*\"");
    refuse_empty(table, "models", "the key serves all models");
    let disabled = table.flag("disabled", false);
    let (id, provider) = (id?, provider?);
    seen.note_id(page, &provider, &id);
    let (id, had) = (id.value, had?);
    let names_none = providers.all.get(&provider).is_some_and(|p| p.organization_header.is_none());
    if names_none && group == Some(GroupName::auto()) {
        page.warn(format!(
            "key {id} has group = \"auto\", but no answer of {provider} is known to name an organisation: set \
             [providers.{provider}] organization_header, or name the group"
        ));
    }
    let hidden = match &had.secret {
        Some(secret) => {
            seen.note_secret(page, &provider, &id, secret, &had.at);
            hidden(&had.inject, secret, &secrets)
        }
        None => secrets.into(),
    };
    if let (Some(known), Some(_)) = (providers.all.get(&provider), &had.secret)
        && let Some(warning) = checks::short_secret(known, &id, &hidden)
    {
        page.warn(warning);
    }
    Some(KeyConfig {
        id,
        provider,
        pool: pool.clone(),
        group,
        secret: had.secret,
        source: had.source,
        inject: had.inject,
        headers,
        hidden,
        max_concurrent_uses,
        models,
        disabled,
    })
}

fn provider(field: &Field<'_>, providers: &Providers) -> Option<ProviderName> {
    let name: ProviderName = field.name()?;
    if !providers.knows(&name) {
        let hint = fields::hint(name.as_str(), providers.names());
        return field.wrong(&format!("must be a provider of the catalogue or of [providers]; {hint}"));
    }
    if !providers.has_address(&name) {
        let rule = format!(
            "whose address is each customer's own: add [providers.{name}] with base_url, such as \
             \"https://NAME.openai.azure.com\""
        );
        return field.wrong(&rule);
    }
    Some(name)
}

/// `auto`, or a name of the user's own: those that begin with `auto.` are learned from answers.
fn group_of(field: &Field<'_>) -> Option<GroupName> {
    let name: GroupName = field.name()?;
    if name.is_auto() && name != GroupName::auto() {
        return field.wrong("must not begin with `auto.`: such names are given to groups that answers name");
    }
    Some(name)
}

fn pattern(text: &str) -> Option<String> {
    let good = !text.is_empty() && text.len() <= crate::model::ModelName::MAX && text.trim() == text;
    good.then(|| text.to_owned())
}

/// A key's secret, as far as it could be had.
struct Had {
    secret: Option<Secret>,
    source: String,
    at: Span,
    inject: Arc<[Injection]>,
}

impl Had {
    /// Reads `secret`. `owner` is `None` where the key has other mistakes; `usual` is how its provider has keys
    /// put in.
    fn read(field: &Field<'_>, owner: Option<commands::Owner>, usual: &[Injection]) -> Option<Self> {
        field.must_be_elsewhere()?;
        let table = field.table("keys[].secret")?;
        let words = &[("api_key", Kind::ApiKey), ("bearer", Kind::Bearer), ("basic", Kind::Basic)];
        let inject: Arc<[Injection]> = match table.word("kind", words).place() {
            Some(place) => Arc::new([Injection { path_prefix: None, places: vec![place] }]),
            None => usual.into(),
        };
        let shape = Shape::of(&inject, user(&table));
        if let Some(field) = table.get("user").filter(|_| !shape.is_basic()) {
            let problem = format!("{} is only for kind = \"basic\"", field.path);
            field.page.refuse(&field.at, problem);
        }
        let (timeout, refresh) = times(&table);
        let at = field.at.clone();
        match (table.get("env").or_else(|| table.get("file")), table.get("command")) {
            (None, Some(program)) => {
                let (program, (provider, key)) = (command(&program)?, owner?);
                let source = format!("command {}", super::errors::shown(&program[0]).trim_matches('"'));
                let command = SecretCommand { provider, key, program, timeout, refresh, shape };
                Some(Self { secret: field.page.given(command), source, at, inject })
            }
            (Some(_), None) => {
                let (secret, source, at) = table.secret_of_source(field, &shape)?;
                Some(Self { secret: Some(secret), source, at, inject })
            }
            _ => {
                let problem = format!(
                    "{} must be {{ env = \"VARIABLE\" }}, {{ file = \"/path\" }} or {{ command = [\"program\", \"argument\"] }}",
                    field.path
                );
                field.page.refuse(&field.at, problem);
                None
            }
        }
    }
}

/// The user that stands beside a password.
fn user(table: &Table<'_>) -> Option<String> {
    let field = table.get("user")?;
    let text = field.text()?;
    let good = !text.is_empty() && !text.contains(':') && text.bytes().all(|b| (b' '..=b'~').contains(&b));
    good.then(|| text.to_owned()).or_else(|| field.wrong("must be a user's name, of ASCII and without `:`"))
}

/// `timeout` and `refresh`, which only commands have.
fn times(table: &Table<'_>) -> (Duration, Option<Duration>) {
    for name in ["timeout", "refresh"] {
        if let (Some(field), None) = (table.get(name), table.get("command")) {
            field.page.refuse(&field.at, format!("{} is only for a command", field.path));
        }
    }
    let timeout = table.duration("timeout", COMMAND, Duration::from_millis(100)).value;
    let refresh = table.get("refresh").and_then(|field| field.duration(Duration::from_secs(1)));
    (timeout, refresh)
}

/// A program and its arguments. Nothing of it is repeated: an argument may be a secret.
fn command(field: &Field<'_>) -> Option<Vec<String>> {
    let form = "must be a program and its arguments, such as [\"vault\", \"read\", \"-field=key\", \"secret/a\"]; no shell reads it";
    let items = field.items().filter(|items| !items.is_empty());
    let texts: Option<Vec<&str>> =
        items.and_then(|items| items.iter().map(|item| item.value.as_str()).collect());
    let good = |texts: &Vec<&str>| !texts[0].is_empty() && texts.iter().all(|text| !text.contains('\0'));
    let Some(mut program) = texts.filter(good) else {
        field.page.refuse(&field.at, format!("{} {form}", field.path));
        return None;
    };
    // A bare name is looked for in PATH; a relative path starts from the file's directory, as all do.
    let own = program[0].contains('/').then(|| field.page.path(program[0]).to_string_lossy().into_owned());
    let first = own.unwrap_or_else(|| program[0].to_owned());
    let rest = program.split_off(1);
    Some(std::iter::once(first).chain(rest.into_iter().map(str::to_owned)).collect())
}

/// `headers`, and those of their values that are secret. `taken` are the places of credentials.
fn headers(table: &Table<'_>, taken: &[&HeaderName]) -> (Vec<KeyHeader>, Vec<Secret>) {
    let (mut all, mut secrets) = (Vec::<KeyHeader>::new(), Vec::new());
    let Some(section) = table.get("headers").and_then(|field| field.open_table()) else {
        return (all, secrets);
    };
    for (text, at, field) in section.children() {
        let refuse = |why: &str| table.page.refuse(&at, format!("{} {why}", field.path));
        let name = text.parse::<HeaderName>().ok();
        match &name {
            None => refuse("is no header name"),
            Some(name) if catalogue::is_framing(name) || name == http::header::ACCEPT_ENCODING => {
                refuse("belongs to the message and not to a key: lessor sets it by itself");
            }
            Some(name) if taken.contains(&name) || catalogue::credential_headers().contains(name) => {
                refuse("carries a credential; say so by `secret`, its `kind`, or the provider's `inject`");
            }
            Some(name) if all.iter().any(|known| known.name == *name) => refuse("is there twice"),
            Some(_) => {}
        }
        let read = header_value(table, text, &field);
        if let (Some(name), Some((value, secret))) = (name, read) {
            all.push(KeyHeader { name, value });
            secrets.extend(secret);
        }
    }
    (all, secrets)
}

/// A header's value: text, or a secret of its own.
fn header_value(table: &Table<'_>, name: &str, field: &Field<'_>) -> Option<(HeaderValue, Option<Secret>)> {
    const FORM: &str = "must be text of printable ASCII, { env = \"VARIABLE\" } or { file = \"/path\" }";
    let secret = match field.value {
        DeValue::String(text) => {
            let good = !text.trim().is_empty() && text.bytes().all(|b| (b' '..=b'~').contains(&b));
            let value = HeaderValue::from_str(text).ok().filter(|_| good);
            return value.map(|value| (value, None)).or_else(|| field.wrong(FORM));
        }
        DeValue::Table(_) => field.table("secret")?.secret_of_source(field, &Shape::default())?.0,
        _ => return field.wrong(FORM),
    };
    let Ok(mut value) = HeaderValue::from_str(secret.expose()) else {
        table.page.refuse(&field.at, format!("{name} {FORM}"));
        return None;
    };
    value.set_sensitive(true);
    Some((value, Some(secret)))
}

/// All that answers to a key must not bring back: its secret (first, unless it has parts), what that is put in
/// as, and `more`.
pub(super) fn hidden(inject: &[Injection], secret: &Secret, more: &[Secret]) -> Arc<[Secret]> {
    let mut all: Vec<Secret> = Vec::new();
    let mut add = |one: Secret| {
        if !all.iter().any(|known| checks::same(known, &one)) {
            all.push(one);
        }
    };
    let formats = || places(inject).map(Place::format);
    if formats().all(|format| format.parts().next().is_none()) {
        add(secret.clone());
    }
    for shown in formats().flat_map(|format| format.shows(secret)) {
        if shown.len() >= SHORTEST_PART {
            add(Secret::new(shown.to_string()));
        }
    }
    more.iter().cloned().for_each(add);
    all.into()
}

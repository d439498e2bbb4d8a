//! `[providers.x]`: the user's tables, laid over the catalogue's providers.
//!
//! The schema is the catalogue's own `RawProvider`, which stops at its first mistake. So what it refuses
//! is noted, taken out of the table, and the rest read again, until nothing is refused.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde::Deserialize as _;
use serde_spanned::Spanned;
use toml::de::{DeArray, DeValue, ValueDeserializer};

use super::catalogue::{self, RawProvider};
use super::errors::{Span, shown};
use super::tree::{Field, Page, Table};
use super::{Address, Listen, Provider, fields, values};
use crate::model::ProviderName;

/// The catalogue's providers and the user's over them.
pub(super) struct Providers {
    /// All that are sound.
    pub(super) all: BTreeMap<ProviderName, Arc<Provider>>,
    /// Those that have a table in the file, sound or not.
    pub(super) named: Vec<ProviderName>,
    /// Suffixes that recognise a host.
    pub(super) patterns: Vec<(String, ProviderName)>,
}

impl Providers {
    /// Reads `[providers]`.
    pub(super) fn read(page: &Page<'_>, section: &Table<'_>) -> Self {
        let (all, patterns) = (catalogue::builtin().clone(), catalogue::host_patterns());
        let mut read = Self { all, named: Vec::new(), patterns };
        for (text, at, field) in section.children() {
            let Ok(name) = ProviderName::parse(text) else {
                page.refuse(&at, format!("{} is no name: 1 to 64 of a-z 0-9 . _ - are allowed", field.path));
                continue;
            };
            if let Some(provider) = compile(page, &name, &at, &field, read.all.get(&name).map(Arc::as_ref)) {
                read.all.insert(name.clone(), Arc::new(provider));
                // The schema checked them; a user's `*.example.com` is kept as the catalogue keeps its own.
                let table = field.open_table().and_then(|table| table.get("host_patterns"));
                for pattern in table.and_then(|field| field.items()).unwrap_or_default() {
                    let text = pattern.value.as_str().unwrap_or_default().to_ascii_lowercase();
                    read.patterns.push((text.trim_start_matches('*').to_owned(), name.clone()));
                }
            }
            read.named.push(name);
        }
        refuse_shared_hosts(page, section, &read.all);
        read
    }

    /// Whether a key or an app may name it.
    pub(super) fn knows(&self, name: &ProviderName) -> bool {
        self.all.contains_key(name) || self.named.contains(name)
    }

    /// Whether requests for it can go anywhere: the catalogue has no address for Azure.
    pub(super) fn has_address(&self, name: &ProviderName) -> bool {
        let (Some(said), Some(builtin)) = (self.all.get(name), catalogue::builtin().get(name)) else {
            return true;
        };
        name.as_str() != AZURE.0 || said.base_url_is_users || said.hosts != builtin.hosts
    }

    /// Refuses a base URL that is one of lessor's own listeners: it would lend keys to itself for ever.
    pub(super) fn refuse_circles(&self, page: &Page<'_>, section: &Table<'_>, listen: &Listen) {
        for (name, _, field) in section.children() {
            let Some(provider) = self.all.get(name).filter(|p| p.base_url_is_users) else { continue };
            let url = field.value.as_table().and_then(|_| field.open_table()?.get("base_url"));
            if let (Some(url), Some(own)) = (url, own_listener(provider, listen)) {
                page.refuse(&url.at, format!("{} is lessor's own listener {own}, not a provider", url.path));
            }
        }
    }

    /// Every name, for suggestions.
    pub(super) fn names(&self) -> impl Iterator<Item = &str> + Clone {
        let catalogue = self.all.keys().map(ProviderName::as_str);
        catalogue.chain(self.named.iter().map(ProviderName::as_str))
    }
}

/// The listener of lessor's own that a provider's base URL leads to.
pub(super) fn own_listener<'l>(provider: &Provider, listen: &'l Listen) -> Option<&'l Address> {
    let (host, port) = (provider.base_url.host()?, provider.base_url.port_u16());
    listen.proxy.iter().chain([&listen.admin]).find(|own| match own {
        Address::Tcp(at) => {
            let here = at.ip().is_unspecified() || values::is_loopback(at.ip());
            port == Some(at.port()) && here && values::is_loopback_host(host)
        }
        Address::Unix(..) => false,
    })
}

/// The provider that every customer has an address of his own at, and the variable that usually tells it.
pub(super) const AZURE: (&str, &str) = ("azure-openai", "AZURE_OPENAI_ENDPOINT");

/// Most mistakes of one table that are told; each costs one more reading of it.
const MOST: usize = 64;

fn compile(
    page: &Page<'_>,
    name: &ProviderName,
    at: &Span,
    field: &Field<'_>,
    base: Option<&Provider>,
) -> Option<Provider> {
    let table = field.open_table()?;
    let mut tree = Spanned::new(field.at.clone(), field.value.clone());
    // What was taken out, as the file names it.
    let mut removed: Vec<String> = Vec::new();
    let raw = loop {
        match RawProvider::deserialize(ValueDeserializer::from(tree.clone())) {
            Ok(raw) => break raw,
            Err(error) => {
                let place = error.span().unwrap_or_else(|| at.clone());
                let path = path_in(field.value, &place).unwrap_or_default();
                let missing =
                    error.message().strip_prefix("missing field `").and_then(|m| m.strip_suffix('`'));
                // What was refused and taken out is not missing.
                if missing.is_none_or(|name| !removed.contains(&join(&path, name))) {
                    page.refuse(&place, explain(&table.path, &path, error.message()));
                }
                let gone =
                    path_to(tree.get_ref(), &place).is_some_and(|steps| remove(tree.get_mut(), &steps));
                removed.push(path);
                if !gone || removed.len() == MOST {
                    return None;
                }
            }
        }
    };
    let mut provider = match raw.compile(name, base) {
        Ok(provider) => provider,
        Err(mistakes) => {
            for mistake in mistakes {
                let (place, found) = find(&tree, &mistake.field);
                // What is missing after a repair may be what the repair took out.
                if found || removed.is_empty() {
                    let path = path_in(field.value, &place).filter(|_| found).unwrap_or(mistake.field);
                    let place = if place == field.at { at.clone() } else { place };
                    page.refuse(&place, format!("{} {}", join(&table.path, &path), mistake.problem));
                }
            }
            return None;
        }
    };
    take_over_denied_paths(&mut provider);
    warn_of_doubled_path(page, &table.path, &provider, base);
    if let (Some(file), Some(path)) = (table.get("ca_file"), provider.ca_file.as_mut()) {
        *path = page.path_to_read(&path.to_string_lossy());
        if let Err(e) = std::fs::File::open(&path) {
            page.refuse(&file.at, format!("{} {} cannot be read: {e}", file.path, path.display()));
        }
    }
    Some(provider)
}

/// Warns where the provider's own paths begin with what its base URL ends with: the app sends that already.
fn warn_of_doubled_path(page: &Page<'_>, table: &str, provider: &Provider, base: Option<&Provider>) {
    let is_bare = |base: &&Provider| base.base_url.path() == "/";
    let said = provider.base_url.path().trim_end_matches('/');
    let Some(base) = base.filter(is_bare).filter(|_| provider.base_url_is_users && !said.is_empty()) else {
        return;
    };
    let begins =
        |path: &str| path.strip_prefix(said).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'));
    let mut documented = base
        .check
        .iter()
        .map(|check| check.path.as_str())
        .chain(base.env_base_url.iter().map(|one| one.path.as_str()));
    if !documented.any(begins) {
        return;
    }
    let (name, url) = (&provider.name, provider.base_url.to_string());
    let url = url.trim_end_matches('/');
    page.warn(format!(
        "{table}.base_url ends with {said}, with which the paths of {name} begin, too: /{name}{said}/… goes to \
         {url}{said}/…; leave {said} out"
    ));
}

/// Whoever gives a catalogue provider's host a name of his own still may not mint keys there.
fn take_over_denied_paths(provider: &mut Provider) {
    for builtin in catalogue::builtin().values().filter(|builtin| builtin.name != provider.name) {
        let is_its = |host: &String| {
            let suffix = |pattern: &String| host.ends_with(pattern.as_str());
            builtin.hosts.contains(host) || builtin.host_patterns.iter().any(suffix)
        };
        if provider.hosts.iter().any(is_its) {
            provider.deny_paths.extend(builtin.deny_paths.iter().cloned());
        }
    }
}

/// A host belongs to one provider: the proxy modes find the key by it.
fn refuse_shared_hosts(page: &Page<'_>, section: &Table<'_>, all: &BTreeMap<ProviderName, Arc<Provider>>) {
    let mut said: BTreeMap<String, String> = BTreeMap::new();
    for (name, _, field) in section.children() {
        let Some(table) = field.value.as_table().and_then(|_| field.open_table()) else { continue };
        // A list of something else was refused by the catalogue's schema already.
        let hosts = table.get("hosts").and_then(|hosts| hosts.items()).unwrap_or_default();
        for host in hosts {
            let Some(text) = host.value.as_str().map(str::to_ascii_lowercase) else { continue };
            let builtin =
                catalogue::builtin().values().find(|p| p.name.as_str() != name && p.hosts.contains(&text));
            let owner = builtin.map(|p| p.name.to_string()).or_else(|| said.get(&text).cloned());
            if let Some(owner) = owner.filter(|owner| owner != name) {
                page.refuse(&host.at, format!("{} is a host of provider {owner} already", host.path));
            }
            said.entry(text).or_insert_with(|| name.to_owned());
        }
    }
    let mut urls: BTreeMap<String, &ProviderName> = BTreeMap::new();
    for provider in all.values().filter(|p| p.base_url_is_users) {
        let Some(authority) = provider.base_url.authority() else { continue };
        let authority = authority.as_str().to_ascii_lowercase();
        if let Some(first) = urls.get(&authority) {
            page.warn(format!(
                "providers {first} and {} share {authority}: in the proxy modes its requests are {first}'s",
                provider.name
            ));
        }
        urls.entry(authority).or_insert(&provider.name);
    }
}

/// Says what the schema refused, in the words of this file.
fn explain(table: &str, path: &str, message: &str) -> String {
    let place = join(table, path);
    let words: Vec<&str> = message.split('`').skip(1).step_by(2).collect();
    match (message.split(' ').next(), words.as_slice()) {
        (Some("unknown"), [word, known @ ..]) if message.starts_with("unknown field") => {
            let owner = place.strip_suffix(word).and_then(|p| p.strip_suffix('.')).unwrap_or(&place);
            let hint = fields::hint(word, known.iter().copied());
            format!("`{}` is no field of {owner}; {hint}", shown(word).trim_matches('"'))
        }
        (Some("unknown"), [word, known @ ..]) => {
            format!(
                "{place} is {}, which is unknown; {}",
                shown(word),
                fields::hint(word, known.iter().copied())
            )
        }
        (Some("missing"), [word]) => format!("{place} has no `{word}`"),
        _ => format!("{place}: {message}"),
    }
}

/// One step into a tree.
enum Step {
    Field(String),
    Item(usize),
}

/// The dotted way to what stands at `place`, by the file's own indices: a repair shifts those of its tree.
fn path_in(value: &DeValue<'_>, place: &Span) -> Option<String> {
    let words: Vec<String> = path_to(value, place)?
        .iter()
        .map(|step| match step {
            Step::Field(name) => name.clone(),
            Step::Item(n) => n.to_string(),
        })
        .collect();
    Some(words.join("."))
}

fn join(table: &str, field: &str) -> String {
    let dot = if table.is_empty() || field.is_empty() { "" } else { "." };
    format!("{table}{dot}{field}")
}

/// The way to the deepest entry that stands at `place`. What is below a table may stand outside of it:
/// the span of one with a header is its header.
fn path_to(value: &DeValue<'_>, place: &Span) -> Option<Vec<Step>> {
    let within = |span: &Span| span.start <= place.start && place.end <= span.end;
    let below = |step: Step, value: &Spanned<DeValue<'_>>, here: bool| {
        let mut steps = vec![step];
        match path_to(value.get_ref(), place) {
            Some(rest) => steps.extend(rest),
            None if here || within(&value.span()) => {}
            None => return None,
        }
        Some(steps)
    };
    match value {
        DeValue::Table(table) => table.iter().find_map(|(key, value)| {
            below(Step::Field(key.get_ref().to_string()), value, key.span() == *place)
        }),
        DeValue::Array(items) => {
            items.iter().enumerate().find_map(|(n, item)| below(Step::Item(n), item, false))
        }
        _ => None,
    }
}

/// Takes out the entry that `steps` lead to; whether there was one.
fn remove(value: &mut DeValue<'_>, steps: &[Step]) -> bool {
    match (value, steps) {
        (DeValue::Table(table), [Step::Field(name)]) => table.remove(name.as_str()).is_some(),
        (DeValue::Table(table), [Step::Field(name), rest @ ..]) => {
            table.get_mut(name.as_str()).is_some_and(|value| remove(value.get_mut(), rest))
        }
        (DeValue::Array(items), [Step::Item(n)]) => {
            let before = items.len();
            let kept =
                std::mem::replace(items, DeArray::new()).into_iter().enumerate().filter(|(at, _)| at != n);
            *items = kept.map(|(_, item)| item).collect();
            items.len() < before
        }
        (DeValue::Array(items), [Step::Item(n), rest @ ..]) => {
            items.get_mut(*n).is_some_and(|item| remove(item.get_mut(), rest))
        }
        _ => false,
    }
}

/// Where the dotted `path` stands below `tree`: as deep as it goes, and whether all of it is there.
fn find(tree: &Spanned<DeValue<'_>>, path: &str) -> (Span, bool) {
    let mut here = tree;
    for step in path.split(['.', '[', ']']).filter(|step| !step.is_empty()) {
        let next = match here.get_ref() {
            DeValue::Table(table) => table.get(step),
            DeValue::Array(items) => step.parse::<usize>().ok().and_then(|n| items.get(n)),
            _ => None,
        };
        match next {
            Some(next) => here = next,
            None => return (here.span(), false),
        }
    }
    (here.span(), true)
}

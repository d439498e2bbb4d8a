//! The configuration file: parsed once, every mistake named with file, line and caret.
//!
//! The file is read as a tree, section by section, and then looked at as a whole. Nothing stops at the
//! first mistake: a person who fixes a file wants to see all of them.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::Path;
use std::sync::Arc;

use toml::de::DeTable;

use super::checks::{Pools, same};
use super::commands::{Given, SecretCommand};
use super::errors::{ConfigError, Mistake, Source, Span, syntax_mistake};
use super::providers::Providers;
use super::stamps::Stamps;
use super::tree::{Field, Page, Table, dir_of};
use super::{
    AppConfig, Compressed, Config, KeyConfig, Listen, Provider, ca, catalogue, fields, keys, sections, store,
    users,
};
use crate::model::{AppName, ProviderName, Secret};

/// Reads and checks a configuration file, with the variables of this process.
///
/// It runs no command: a key whose secret comes from one is pending. [`super::Loader`] does.
pub fn load_file(path: &Path) -> Result<Config, ConfigError> {
    load_given(path, &Given::none()).map(|(config, _)| config)
}

/// The same with what commands gave before, and which commands there are.
pub(super) fn load_given(path: &Path, given: &Given) -> Result<(Config, Vec<SecretCommand>), ConfigError> {
    let mut own = Stamps::default();
    own.note(path);
    let (name, text) = read_file(path)?;
    let env = |variable: &str| std::env::var(variable).ok();
    let (mut config, commands) = load(&text, &name, &dir_of(path), &env, given)?;
    config.files = own.before(config.files);
    Ok((config, commands))
}

/// Reads only where a sidecar with this file listens. Who asks a running sidecar need not have its secrets,
/// and what is wrong elsewhere in the file does not keep it from answering.
pub fn load_listen(path: &Path) -> Result<Listen, ConfigError> {
    let (name, text) = read_file(path)?;
    let tree = parse(&text, &name)?;
    let page = Page::new(Source::new(&name, &text, &tree), dir_of(path), &|_| None);
    let listen = sections::listen(&page, &Table::lenient_root(&page, &tree).section("listen"), false);
    page.close().map_err(ConfigError::of)?;
    Ok(listen)
}

/// Reads only the token of the app `name`; `None` where the file has no such app. Who starts a child as an
/// app need not have the keys.
pub fn load_app_token(path: &Path, name: &str) -> Result<Option<Secret>, ConfigError> {
    let (file, text) = read_file(path)?;
    let tree = parse(&text, &file)?;
    let env = |variable: &str| std::env::var(variable).ok();
    let page = Page::new(Source::new(&file, &text, &tree), dir_of(path), &env);
    let apps = names_of(&Table::lenient_root(&page, &tree), "apps");
    let app = apps.get(name).and_then(|field| field.open_table());
    let token = app.and_then(|app| app.secret("token")).map(|(token, ..)| token);
    page.close().map_err(ConfigError::of)?;
    Ok(token)
}

/// Reads only what is said of the provider `name`; `None` where neither the file nor the catalogue has it.
/// Who tries a rule need not have the keys.
pub fn load_provider(path: &Path, name: &str) -> Result<Option<Arc<Provider>>, ConfigError> {
    let (file, text) = read_file(path)?;
    let tree = parse(&text, &file)?;
    let page = Page::new(Source::new(&file, &text, &tree), dir_of(path), &|_| None);
    let providers = Providers::read(&page, &names_of(&Table::lenient_root(&page, &tree), "providers"));
    page.close().map_err(ConfigError::of)?;
    Ok(providers.all.get(name).cloned())
}

fn read_file(path: &Path) -> Result<(String, String), ConfigError> {
    let name = path.display().to_string();
    let refuse = |problem: String| ConfigError::of(vec![Mistake::of(&name, problem)]);
    let bytes = std::fs::read(path).map_err(|e| refuse(format!("cannot be read: {e}")))?;
    let text = String::from_utf8(bytes).map_err(|_| refuse("is not UTF-8 text".into()))?;
    Ok((name, text))
}

fn parse<'t>(text: &'t str, name: &str) -> Result<DeTable<'t>, ConfigError> {
    let tree =
        DeTable::parse(text).map_err(|error| ConfigError::of(vec![syntax_mistake(name, text, &error)]))?;
    Ok(tree.into_inner())
}

/// Checks a configuration given as text; `name` stands in front of its mistakes, relative paths start
/// from its directory, and `env` answers for variables.
pub fn load_str(text: &str, name: &str, env: &dyn Fn(&str) -> Option<String>) -> Result<Config, ConfigError> {
    load(text, name, &dir_of(Path::new(name)), env, &Given::none()).map(|(config, _)| config)
}

fn load(
    text: &str,
    name: &str,
    dir: &Path,
    env: &dyn Fn(&str) -> Option<String>,
    given: &Given,
) -> Result<(Config, Vec<SecretCommand>), ConfigError> {
    let tree = parse(text, name)?;
    let page = Page::new(Source::new(name, text, &tree), dir.to_owned(), env).with(given);
    let mut config = read(&page, &Table::root(&page, &tree), name);
    config.secret_variables = page.secret_variables();
    config.files = page.files();
    let commands = page.commands();
    let refused = |mistakes| ConfigError { mistakes, files: config.files.files() };
    config.warnings = page.close().map_err(refused)?;
    Ok((config, commands))
}

fn read(page: &Page<'_>, root: &Table<'_>, name: &str) -> Config {
    let tables = names_of(root, "providers");
    let providers = Providers::read(page, &tables);
    let (keys, pools_of_keys) = keys::read(page, root, &providers);
    let pools = Pools::read(page, &names_of(root, "pools"), pools_of_keys);
    let app_tables = names_of(root, "apps");
    let apps = read_apps(page, &app_tables, &providers, &pools, &keys);
    // An app that is refused is a mistake of its own; an empty [apps] is no app.
    let has_token = |field: &Field<'_>| field.value.as_table().is_some_and(|app| app.contains_key("token"));
    let anybody = !app_tables.children().any(|(_, _, field)| has_token(&field));
    let listen = sections::listen(page, &root.section("listen"), anybody);
    providers.refuse_circles(page, &tables, &listen);
    let admin_token = root.section("admin").secret("token").map(|(secret, ..)| secret);
    sections::warn_of_open_admin(page, &listen.admin, admin_token.is_none());
    let store = store::read(page, &root.section("store"));
    let lease = sections::lease(page, &root.section("lease"));
    store::warn(page, &store, &lease);
    let proxy = root.section("proxy");
    let served: BTreeSet<&ProviderName> =
        keys.iter().map(|key| &key.provider).chain(&providers.named).collect();
    Config {
        listen,
        store,
        lease,
        queue: sections::queue(&root.section("queue")),
        retry: sections::retry(&root.section("retry")),
        timeouts: sections::timeouts(&root.section("timeouts")),
        shutdown: sections::shutdown(page, &root.section("shutdown")),
        ranking: sections::ranking(&root.section("ranking")),
        intercept: proxy.flag("intercept", true),
        proxy: sections::proxy(&proxy),
        ca: ca::read(page, &root.section("ca")),
        compressed: root
            .section("scrub")
            .word("compressed", &[("pass", Compressed::Pass), ("decode", Compressed::Decode)]),
        websocket: sections::websocket(&root.section("websocket")),
        limits: sections::limits(&root.section("limits")),
        admin_token,
        hosts: hosts_of(&providers.all),
        host_patterns: providers.patterns,
        providers: served
            .into_iter()
            .filter_map(|name| Some((name.clone(), providers.all.get(name)?.clone())))
            .collect(),
        keys,
        pools: pools.fallbacks,
        default_pool: None,
        upstreams: Vec::new(),
        ca_dir: None,
        quit: false,
        apps,
        secret_variables: Vec::new(),
        files: Stamps::default(),
        origin: name.to_owned(),
        warnings: Vec::new(),
    }
}

/// A section whose fields are names of the user's own.
fn names_of<'p>(root: &Table<'p>, name: &str) -> Table<'p> {
    root.get(name).and_then(|field| field.open_table()).unwrap_or_else(|| root.absent(name))
}

/// A list that is empty on purpose reads as "none"; where absence means "all", it must not be taken for that.
pub(super) fn refuse_empty(table: &Table<'_>, name: &str, absent: &str) {
    if let Some(field) =
        table.get(name).filter(|field| field.value.as_array().is_some_and(|all| all.is_empty()))
    {
        table.page.refuse(&field.at, format!("{} is empty: leave it out where {absent}", field.path));
    }
}

fn read_apps(
    page: &Page<'_>,
    section: &Table<'_>,
    providers: &Providers,
    pools: &Pools,
    keys: &[KeyConfig],
) -> Vec<AppConfig> {
    let mut apps: Vec<AppConfig> = Vec::new();
    for (text, at, field) in section.children() {
        let name = AppName::parse(text).ok();
        if name.is_none() {
            page.refuse(&at, format!("{} is no name: 1 to 64 of a-z 0-9 . _ - are allowed", field.path));
        }
        if name == Some(AppName::anonymous()) {
            page.refuse(&at, "apps.anonymous is taken: it is the name of callers where there are no apps");
        }
        let Some(table) = field.table("apps.*") else { continue };
        let token = table.secret("token");
        let uid = table.get("uid").map(|field| (users::read(&field), field.at));
        if table.get("token").is_none() && uid.is_none() {
            page.refuse(
                &table.at,
                format!("{} has no `token`, and no `uid` to be known by instead", table.path),
            );
        }
        let app_pools = pools.names_in(&table, "pools").into_iter().map(|(pool, _)| pool).collect();
        refuse_empty(&table, "pools", "the app may use the pool `default`");
        refuse_empty(&table, "providers", "the app may use all providers");
        let mut names = Vec::new();
        for field in table.texts("providers") {
            let Some(name) = field.name::<ProviderName>() else { continue };
            if !providers.knows(&name) {
                let hint = fields::hint(name.as_str(), providers.names());
                field.wrong::<()>(&format!("must be a provider of the catalogue or of [providers]; {hint}"));
            }
            names.push(name);
        }
        let Some(name) = name else { continue };
        if let Some((token, _, at)) = &token {
            refuse_shared_token(page, &name, token, at, &apps, keys);
        }
        let uid = uid.and_then(|(uid, at)| {
            if let Some(other) = apps.iter().find(|other| uid.is_some() && other.uid == uid) {
                page.refuse(&at, format!("apps {} and {name} have one uid; each needs its own", other.name));
            }
            uid
        });
        let token = token.map(|(token, ..)| token);
        apps.push(AppConfig { name, token, uid, pools: app_pools, providers: names });
    }
    apps
}

/// A token is one app's alone, and no key's secret.
fn refuse_shared_token(
    page: &Page<'_>,
    name: &AppName,
    token: &Secret,
    at: &Span,
    apps: &[AppConfig],
    keys: &[KeyConfig],
) {
    let has_it = |app: &&AppConfig| app.token.as_ref().is_some_and(|its| same(its, token));
    if let Some(other) = apps.iter().find(has_it) {
        page.refuse(at, format!("apps {} and {name} have one token; each needs its own", other.name));
    }
    let is_its = |key: &&KeyConfig| key.hidden.iter().any(|hidden| same(hidden, token));
    if let Some(key) = keys.iter().find(is_its) {
        let problem = format!(
            "the token of app {name} is the secret of key {}: the app would hold the very key that it only borrows",
            key.id
        );
        page.refuse(at, problem);
    }
}

/// Every exact host, and whose it is.
pub(super) fn hosts_of(all: &BTreeMap<ProviderName, Arc<Provider>>) -> HashMap<String, ProviderName> {
    let mut hosts = HashMap::new();
    // The catalogue's hosts stay with their providers, whatever a base URL says.
    let builtin = catalogue::builtin().values();
    for provider in builtin.chain(all.values()) {
        for host in &provider.hosts {
            hosts.entry(host.to_ascii_lowercase()).or_insert_with(|| provider.name.clone());
        }
    }
    hosts
}

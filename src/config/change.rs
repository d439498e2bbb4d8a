//! One configuration after another, while lessor runs.

use std::collections::BTreeSet;
use std::sync::Arc;

use super::{AppConfig, Config, KeyConfig};
use crate::model::{AppName, KeyId, ProviderName, Secret};

/// What comes of it when another configuration is read.
#[derive(Debug)]
pub struct Change {
    /// What counts from now on: the new one, save for what can only change at a start.
    pub config: Config,
    /// The fields that were changed and count from the next start only.
    pub needs_restart: Vec<&'static str>,
    /// Keys that are new.
    pub added: Vec<String>,
    /// Keys that are gone.
    pub removed: Vec<String>,
    /// Keys with another secret.
    pub rotated: Vec<String>,
    /// Keys with other settings.
    pub changed: Vec<String>,
    /// Keys that were switched off by the file and are no more.
    pub enabled: Vec<(ProviderName, KeyId)>,
    /// Apps that are gone.
    pub apps_removed: Vec<AppName>,
    /// What else is set otherwise and counts now: names of sections, of providers and of apps.
    pub sections: Vec<String>,
}

impl Config {
    /// What comes of it when `new` is read where this one counts. A provider whose definition is the same
    /// stays the same `Arc`.
    pub fn followed_by(&self, mut new: Self) -> Change {
        let needs_restart = keep_what_needs_a_restart(self, &mut new);
        for (name, provider) in &mut new.providers {
            if let Some(same) = self.providers.get(name).filter(|old| *old == provider) {
                *provider = Arc::clone(same);
            }
        }
        let before = |key: &KeyConfig| self.key(&key.provider, &key.id);
        let named = |keys: Vec<&KeyConfig>| keys.into_iter().map(KeyConfig::called).collect();
        let those = |fits: &dyn Fn(&KeyConfig, &KeyConfig) -> bool| {
            let fitting = |key: &&KeyConfig| before(key).is_some_and(|old| fits(old, key));
            new.keys.iter().filter(fitting).collect::<Vec<_>>()
        };
        let enabled = those(&|old, key| old.disabled && !key.disabled);
        let apps: BTreeSet<&AppName> = new.apps.iter().map(|app| &app.name).collect();
        let gone = self.apps.iter().map(|app| &app.name).filter(|name| !apps.contains(name));
        Change {
            needs_restart,
            added: named(new.keys.iter().filter(|key| before(key).is_none()).collect()),
            removed: named(
                self.keys.iter().filter(|key| new.key(&key.provider, &key.id).is_none()).collect(),
            ),
            rotated: named(those(&|old, key| !old.has_secret_of(key))),
            changed: named(those(&|old, key| !old.is_set_as(key))),
            enabled: enabled.into_iter().map(|key| (key.provider.clone(), key.id.clone())).collect(),
            apps_removed: gone.cloned().collect(),
            sections: sections(self, &new),
            config: new,
        }
    }

    /// Whether every key has the secret that it has in `new`.
    pub fn has_secrets_of(&self, new: &Self) -> bool {
        let same =
            |key: &KeyConfig| self.key(&key.provider, &key.id).is_some_and(|old| old.has_secret_of(key));
        new.keys.iter().all(same)
    }

    fn key(&self, provider: &ProviderName, id: &KeyId) -> Option<&KeyConfig> {
        self.keys.iter().find(|key| key.id == *id && key.provider == *provider)
    }
}

impl KeyConfig {
    /// Its provider and id, as the command line takes them.
    fn called(&self) -> String {
        format!("{}/{}", self.provider, self.id)
    }

    /// Whether all but the secret is the same.
    fn is_set_as(&self, other: &Self) -> bool {
        let Self {
            id: _,
            provider: _,
            pool,
            group,
            secret: _,
            source: _,
            inject,
            headers,
            // It is made of the secrets and of `inject`.
            hidden: _,
            max_concurrent_uses,
            models,
            disabled,
        } = self;
        (pool, group, inject, headers, max_concurrent_uses, models, disabled)
            == (
                &other.pool,
                &other.group,
                &other.inject,
                &other.headers,
                &other.max_concurrent_uses,
                &other.models,
                &other.disabled,
            )
    }

    /// Whether the secret is the same, or there is none in both.
    fn has_secret_of(&self, other: &Self) -> bool {
        self.secret.as_ref().map(Secret::expose) == other.secret.as_ref().map(Secret::expose)
    }
}

/// The names of what differs beside the keys.
fn sections(old: &Config, new: &Config) -> Vec<String> {
    let token = |config: &Config| config.admin_token.as_ref().map(|token| token.expose().to_owned());
    let proxy = |config: &Config| (config.proxy.clone(), config.intercept);
    let differs = [
        ("listen", old.listen != new.listen),
        ("queue", old.queue != new.queue),
        ("retry", old.retry != new.retry),
        ("timeouts", old.timeouts != new.timeouts),
        ("shutdown", old.shutdown != new.shutdown),
        ("ranking", old.ranking != new.ranking),
        ("proxy", proxy(old) != proxy(new)),
        ("scrub", old.compressed != new.compressed),
        ("websocket", old.websocket != new.websocket),
        ("admin", token(old) != token(new)),
        ("pools", old.pools != new.pools),
    ];
    let sections = differs.into_iter().filter(|(_, differs)| *differs).map(|(name, _)| name.to_owned());
    // One that comes or goes with its keys is told by them.
    let told = |name: &ProviderName| old.keys.iter().chain(&new.keys).any(|key| key.provider == *name);
    let both: BTreeSet<&ProviderName> = old.providers.keys().chain(new.providers.keys()).collect();
    let providers =
        both.into_iter().filter(|name| match (old.providers.get(*name), new.providers.get(*name)) {
            (Some(old), Some(new)) => old != new,
            _ => !told(name),
        });
    let is_same = |app: &&AppConfig| old.apps.iter().any(|before| before.is_as(app));
    let apps = new.apps.iter().filter(|app| !is_same(app)).map(|app| format!("apps.{}", app.name));
    sections.chain(providers.map(|name| format!("providers.{name}"))).chain(apps).collect()
}

impl AppConfig {
    /// Whether all of it is the same.
    fn is_as(&self, other: &Self) -> bool {
        let Self { name, token, uid, pools, providers } = self;
        let token = token.as_ref().map(Secret::expose);
        (name, token, uid, pools, providers)
            == (
                &other.name,
                other.token.as_ref().map(Secret::expose),
                &other.uid,
                &other.pools,
                &other.providers,
            )
    }
}

/// Puts back what was decided at the start, and names it: sockets that are bound, a store that is open, leases
/// that are under way.
fn keep_what_needs_a_restart(old: &Config, new: &mut Config) -> Vec<&'static str> {
    let mut kept = Vec::new();
    let mut keep = |field: &'static str, same: bool| {
        if !same {
            kept.push(field);
        }
    };
    keep("listen.proxy", old.listen.proxy == new.listen.proxy);
    keep("listen.admin", old.listen.admin == new.listen.admin);
    let store = |config: &Config| (config.store.url.to_string(), config.store.prefix.clone());
    keep("store", store(old) == store(new));
    keep("lease", old.lease == new.lease);
    keep("queue.max_waiting", old.queue.max_waiting == new.queue.max_waiting);
    keep("retry.max_total", old.retry.max_total == new.retry.max_total);
    keep("limits", old.limits == new.limits);
    let of_clients = |config: &Config| (config.timeouts.header, config.timeouts.keep_alive);
    keep("timeouts.header, timeouts.keep_alive", of_clients(old) == of_clients(new));
    keep("proxy.alpn", old.proxy.alpn == new.proxy.alpn);
    keep("proxy.intercept", old.intercept == new.intercept);
    let ca = |config: &Config| config.ca.as_ref().map(|ca| (ca.cert_file.clone(), ca.key_file.clone()));
    keep("ca", ca(old) == ca(new));
    new.listen.proxy.clone_from(&old.listen.proxy);
    new.listen.admin.clone_from(&old.listen.admin);
    new.store.clone_from(&old.store);
    (new.lease, new.limits, new.intercept) = (old.lease, old.limits, old.intercept);
    new.queue.max_waiting = old.queue.max_waiting;
    new.retry.max_total = old.retry.max_total;
    (new.timeouts.header, new.timeouts.keep_alive) = (old.timeouts.header, old.timeouts.keep_alive);
    new.proxy.alpn.clone_from(&old.proxy.alpn);
    new.ca.clone_from(&old.ca);
    kept
}

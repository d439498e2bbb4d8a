//! The half that runs where the secrets are: configuration, store, clocks, the way to each provider, and a
//! canary request through the own listener.

use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::{Check, Tools, canary, network, store, withhold};
use crate::config::{Address, Config, OnDisk, Provider};
use crate::model::ProviderName;
use crate::store::Store;

/// The bound of all of it: each part's own are shorter.
pub const BOUND: Duration = Duration::from_secs(32);

/// What is to be examined.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Wanted {
    /// This provider alone.
    #[serde(default)]
    pub provider: Option<ProviderName>,
    /// Each key by itself, not one of each provider.
    #[serde(default)]
    pub all_keys: bool,
}

/// What is examined.
#[derive(Clone)]
pub struct Patient {
    /// What lessor runs by.
    pub config: Arc<Config>,
    /// How the file on disk stands to that.
    pub on_disk: Arc<OnDisk>,
    /// The store, or why it could not be opened.
    pub store: Result<Arc<dyn Store>, String>,
    /// The proxy's first listener; `None` where nothing is served.
    pub proxy: Option<Address>,
    /// Borrowed from other rooms.
    pub tools: Tools,
}

/// Examines; the same checks in the same order each time.
pub async fn examine(patient: Patient, wanted: Wanted) -> Vec<Check> {
    let Patient { config, tools, .. } = &patient;
    let served = config.providers.values().filter(|provider| {
        config.keys.iter().any(|key| key.provider == provider.name)
            && wanted.provider.as_ref().is_none_or(|name| *name == provider.name)
    });
    let providers =
        futures_util::future::join_all(served.map(|provider| one(&patient, provider, wanted.all_keys)));
    let store = store::examine(config, &patient.store);
    let (store, providers) = tokio::join!(store, providers);
    let mut checks = settings(config);
    checks.extend(on_disk(&patient.on_disk));
    checks.extend(store);
    checks.extend(providers.into_iter().flatten());
    let keys = config.keys.iter().flat_map(|key| key.hidden.iter());
    let secrets =
        keys.chain(config.apps.iter().filter_map(|app| app.token.as_ref())).chain(&config.admin_token);
    withhold(&mut checks, &secrets.collect::<Vec<_>>(), *tools);
    checks
}

async fn one(patient: &Patient, provider: &Provider, all_keys: bool) -> Vec<Check> {
    let Patient { config, proxy, tools, .. } = patient;
    let canary = async {
        match proxy {
            Some(proxy) => canary::examine(config, provider, proxy, all_keys, *tools).await,
            None => vec![Check::skip(format!("canary {}", provider.name), "no sidecar is there to ask")],
        }
    };
    let (mut checks, canary) = tokio::join!(network::examine(config, provider, *tools), canary);
    checks.extend(canary);
    checks
}

/// What of the file on disk does not run.
fn on_disk(on_disk: &OnDisk) -> Vec<Check> {
    let name = "config on disk";
    let refused = on_disk.refused.as_ref().map(|refused| {
        let advice =
            "correct that; `lessor check` says all of it, and the sidecar takes the file by itself then";
        Check::fail(name, refused.to_string(), advice)
    });
    let fields = on_disk.needs_restart.join(", ");
    let differs = (!fields.is_empty()).then(|| {
        Check::warn(
            name,
            format!("{fields}: the file says something else than what runs"),
            "restart the sidecar",
        )
    });
    refused.into_iter().chain(differs).collect()
}

fn settings(config: &Config) -> Vec<Check> {
    let name = "config";
    if config.keys.is_empty() {
        let advice =
            "add [[keys]], or set a provider's usual variable, such as OPENAI_API_KEY, and use no file";
        return vec![Check::fail(name, format!("{}: there is no key", config.origin), advice)];
    }
    let providers: std::collections::BTreeSet<_> = config.keys.iter().map(|key| &key.provider).collect();
    let counted = |n: usize, one: &str| format!("{n} {one}{}", if n == 1 { "" } else { "s" });
    let what = format!("{} of {}", counted(config.keys.len(), "key"), counted(providers.len(), "provider"));
    let mut checks = vec![Check::ok(name, format!("{}: {what}", config.origin))];
    checks.extend(
        config.warnings.iter().map(|warning| Check::warn(name, "it loads, with a warning", warning.clone())),
    );
    checks
}

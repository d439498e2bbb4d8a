//! What a child needs in its environment so that it reaches its providers through lessor, and must not have.
//!
//! Pure, but for `trust.rs`: from what a sidecar serves, and the environment there is, to variables to set and
//! to remove, and what to say about those that were left as they are. How clients read each variable was measured; the
//! rules here follow from that: both cases of each proxy variable, exact addresses and leading-dot suffixes
//! in `NO_PROXY`, and never `ALL_PROXY`, which would take what is no HTTP to lessor too.
//!
//! Credential variables of a served provider are always replaced. Addresses and proxies that are set already
//! are the caller's word: kept, and said, unless the caller overrides them.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::config::{Address, BaseUrlVariable, Config};
use crate::model::Secret;

mod java;
mod lists;
mod trust;

pub(super) use java::{merged as merged_java, options as java_options};
pub use trust::Loss;

/// What SDKs that refuse to start without a key are given.
pub const PLACEHOLDER: &str = "lessor-placeholder";

/// The shortest value that is searched for in other variables: shorter ones are words, not keys.
pub const SHORTEST_SECRET: usize = 16;

/// Variables that name what a client trusts. Node's adds to the roots that it brings along; the bundle stands
/// there too, for a company's CA that was named in it, or a root above an operator's CA, must not be lost.
pub(super) const TRUST: [&str; 5] =
    ["SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "AWS_CA_BUNDLE", "NODE_EXTRA_CA_CERTS"];
/// The variable that names wget's settings.
pub(super) const WGET: &str = "SYSTEM_WGETRC";
/// Those of [`TRUST`] that add to what a client trusts by itself; the others replace it.
pub(super) const ADDS_TRUST: [&str; 1] = ["NODE_EXTRA_CA_CERTS"];

/// What a sidecar serves, as far as a child is concerned: names only, never a secret.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Served {
    /// The proxy's TCP listeners.
    pub proxy: Vec<SocketAddr>,
    /// Where the admin socket is.
    pub admin: Option<PathBuf>,
    /// The providers that have keys.
    pub providers: Vec<ServedProvider>,
    /// The variables that the sidecar's secrets come from.
    pub secret_variables: Vec<String>,
    /// The callers it tells apart; none: it serves all.
    pub apps: Vec<String>,
    /// Certificates, once it answers for providers' hosts itself.
    pub trust: Option<Trust>,
}

/// One provider that has keys.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ServedProvider {
    /// Its name, as the first part of a base-URL path.
    pub name: String,
    /// Its address where the user gave one.
    pub own_address: Option<String>,
    /// Its hosts.
    pub hosts: Vec<String>,
    /// Its base-URL variables.
    pub base_url: Vec<BaseUrlVariable>,
    /// Its credential variables, the one that SDKs look at first in front.
    pub keys: Vec<String>,
}

/// Files with certificates.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Trust {
    /// lessor's own CA, alone.
    pub ca: PathBuf,
    /// The usual CAs and lessor's.
    pub bundle: PathBuf,
    /// The same as a Java trust store.
    pub java: Option<PathBuf>,
    /// Settings of wget with the bundle in them.
    #[serde(default)]
    pub wgetrc: Option<PathBuf>,
}

impl Trust {
    /// The files in the directory of `--ca-dir`, where they are.
    pub fn inside(dir: &Path) -> Option<Self> {
        let there = |name: &str| Some(dir.join(name)).filter(|file| file.is_file());
        let (ca, bundle) = (there("ca.pem")?, there("ca-bundle.pem")?);
        Some(Self { ca, bundle, java: there("ca-bundle.p12"), wgetrc: there("wgetrc") })
    }

    /// The files beside an admin socket, where they are.
    pub fn beside(socket: &Path) -> Option<Self> {
        let (ca, bundle) = (socket.with_extension("ca.pem"), socket.with_extension("ca-bundle.pem"));
        let beside = |end: &str| Some(socket.with_extension(end)).filter(|file| file.is_file());
        let (java, wgetrc) = (beside("ca-bundle.p12"), beside("wgetrc"));
        (ca.is_file() && bundle.is_file()).then_some(Self { ca, bundle, java, wgetrc })
    }
}

impl Served {
    /// What a sidecar with this configuration serves at these addresses.
    pub fn new(config: &Config, proxy: &[Address], socket: Option<&Path>) -> Self {
        let tcp = proxy.iter().filter_map(|address| match address {
            Address::Tcp(at) => Some(*at),
            Address::Unix(..) => None,
        });
        let with_keys: BTreeSet<_> = config.keys.iter().map(|key| &key.provider).collect();
        let providers = config.providers.values().filter(|provider| with_keys.contains(&provider.name));
        Self {
            proxy: tcp.collect(),
            admin: socket.map(Path::to_path_buf),
            providers: providers
                .map(|provider| ServedProvider {
                    name: provider.name.to_string(),
                    own_address: provider.base_url_is_users.then(|| provider.base_url.to_string()),
                    hosts: provider.hosts.clone(),
                    base_url: provider.env_base_url.clone(),
                    keys: provider.env.iter().chain(&provider.env_other).cloned().collect(),
                })
                .collect(),
            secret_variables: config.secret_variables.clone(),
            apps: config.apps.iter().map(|app| app.name.to_string()).collect(),
            trust: match &config.ca_dir {
                Some(dir) => Trust::inside(dir),
                None => socket.and_then(Trust::beside),
            },
        }
    }
}

impl Served {
    /// Where a child finds the proxy; of several addresses an IPv4 one, which all clients read in `NO_PROXY`.
    pub fn door(&self) -> Option<SocketAddr> {
        self.proxy.iter().find(|at| at.is_ipv4()).or(self.proxy.first()).copied().map(reachable)
    }
}

/// A listener on all addresses is reached by loopback.
pub(super) fn reachable(mut at: SocketAddr) -> SocketAddr {
    if at.ip().is_unspecified() {
        at.set_ip(match at.ip() {
            IpAddr::V4(_) => Ipv4Addr::LOCALHOST.into(),
            IpAddr::V6(_) => Ipv6Addr::LOCALHOST.into(),
        });
    }
    at
}

/// How the child is to call.
#[derive(Debug)]
pub struct Caller<'a> {
    /// Where it reaches the proxy.
    pub proxy: SocketAddr,
    /// The app's name, for people, and its token.
    pub app: Option<(&'a str, &'a Secret)>,
    /// Whether what is set already is replaced too.
    pub overrides: bool,
    /// The environment there is.
    pub present: &'a BTreeMap<String, String>,
    /// What its clients would trust no longer.
    pub loss: Loss,
}

/// What changes.
#[derive(Debug, Default, Serialize)]
pub struct Changes {
    /// Variables to set.
    pub set: BTreeMap<String, String>,
    /// Variables to remove.
    pub unset: BTreeSet<String>,
    /// What to say, one line each; never a secret.
    pub notes: Vec<String>,
}

/// The environment of a child of `caller`.
pub fn changes(served: &Served, caller: &Caller<'_>) -> Changes {
    let mut plan = Plan { caller, changes: Changes::default(), gone: Vec::new() };
    for provider in &served.providers {
        plan.credentials(provider);
        plan.addresses(provider);
    }
    for name in &served.secret_variables {
        plan.remove_secret(name);
    }
    plan.remove_secret("LESSOR_ADMIN_TOKEN");
    plan.proxies(served);
    plan.trust(served.trust.as_ref());
    plan.copies();
    plan.changes
}

struct Plan<'a> {
    caller: &'a Caller<'a>,
    changes: Changes,
    /// The values that were taken out.
    gone: Vec<&'a str>,
}

impl<'a> Plan<'a> {
    fn now(&self, name: &str) -> Option<&'a str> {
        self.caller.present.get(name).map(String::as_str).filter(|value| !value.is_empty())
    }

    fn placeholder(&self) -> &'a str {
        self.caller.app.map_or(PLACEHOLDER, |(_, token)| token.expose())
    }

    fn note(&mut self, text: String) {
        self.changes.notes.push(text);
    }

    fn set(&mut self, name: &str, value: impl Into<String>) {
        self.changes.set.insert(name.to_owned(), value.into());
    }

    /// Takes out the value of a variable that holds a secret.
    fn remove_secret(&mut self, name: &str) {
        if let Some(value) = self.now(name).filter(|value| *value != self.placeholder()) {
            self.gone.push(value);
        }
        if self.caller.present.contains_key(name) && !self.changes.set.contains_key(name) {
            self.changes.unset.insert(name.to_owned());
        }
    }

    fn credentials(&mut self, provider: &ServedProvider) {
        for (at, name) in provider.keys.iter().enumerate() {
            // The first is set for the SDK that refuses to start without; of two that are set, some warn.
            if at == 0 || self.caller.present.contains_key(name) {
                self.set(name, self.placeholder());
                self.remove_secret(name);
            }
            for other in self.caller.present.keys().filter(|other| lists::is_numbered(other, name)) {
                self.remove_secret(other);
            }
        }
    }

    /// Base URLs. Two variables of one provider are one setting: where one is kept, so are all.
    fn addresses(&mut self, provider: &ServedProvider) {
        let base = format!("http://{}/{}", self.caller.proxy, provider.name);
        let ours = |variable: &BaseUrlVariable| format!("{base}{}", variable.path);
        let is_own = |value: &str| provider.own_address.as_deref().is_some_and(|own| same_url(own, value));
        let mut kept = false;
        for variable in &provider.base_url {
            let Some(value) = self.now(&variable.name) else { continue };
            if self.caller.overrides || same_url(value, &ours(variable)) {
                continue;
            }
            if is_own(value) {
                self.note(format!("{} was where lessor sends; it names lessor now", variable.name));
                continue;
            }
            kept = true;
            self.note(format!(
                "{} is kept as {}: {} is asked there, with a placeholder for its key (--override points it at \
                 lessor)",
                variable.name,
                lists::shown(value),
                provider.name
            ));
        }
        if !kept {
            for variable in &provider.base_url {
                self.set(&variable.name, ours(variable));
            }
        }
    }

    fn proxies(&mut self, served: &Served) {
        let proxy = self.proxy_url();
        let plain = self.proxy_pair("http_proxy", "HTTP_PROXY", &proxy);
        // Without our CA a client would refuse our certificate: then https goes its own way.
        let secure = served.trust.is_some() && self.proxy_pair("https_proxy", "HTTPS_PROXY", &proxy);
        if served.trust.is_none() {
            self.note(
                "HTTPS_PROXY is left alone, for this sidecar has no CA: https:// requests to a provider go \
                 around lessor, with a placeholder; base URLs and http:// go through it"
                    .into(),
            );
        }
        // Also where the proxy is the caller's own: a base URL on loopback must not go to it.
        let set = ["no_proxy", "NO_PROXY"].map(|name| self.now(name).unwrap_or_default());
        let no_proxy = lists::no_proxy(&set, self.caller.proxy.ip());
        for provider in &served.providers {
            for host in provider.hosts.iter().filter(|host| lists::matches(&set.join(","), host)) {
                self.note(format!("NO_PROXY names {host}: such requests go around lessor"));
            }
        }
        self.set("no_proxy", no_proxy.clone());
        self.set("NO_PROXY", no_proxy.clone());
        if plain || secure {
            match self.now("NODE_USE_ENV_PROXY") {
                Some(value) if value != "1" && !self.caller.overrides => {
                    self.note(format!("NODE_USE_ENV_PROXY is kept as {}", lists::shown(value)));
                }
                _ => self.set("NODE_USE_ENV_PROXY", "1"),
            }
            if self.caller.proxy.is_ipv6() {
                // It compares the host with its brackets; with brackets in the list httpx would fail at its start.
                self.note(format!(
                    "Node's fetch sends base URLs at {} to the proxy, which refuses its own address; let \
                     listen.proxy have one on 127.0.0.1, too",
                    self.caller.proxy
                ));
            }
        }
        if plain {
            let java = served.trust.as_ref().and_then(|trust| trust.java.as_deref()).filter(|_| secure);
            self.java(java, &no_proxy);
        }
    }

    fn java(&mut self, store: Option<&Path>, no_proxy: &str) {
        let name = "JAVA_TOOL_OPTIONS";
        let ours = java::options(self.caller.proxy, store, no_proxy);
        let now = self.now(name).unwrap_or_default();
        if ours.contains(java::STORE) && now.contains(java::STORE) && !now.contains(&ours) {
            self.note(format!("{name}: its trust store is replaced by one with the usual CAs and lessor's"));
        }
        match java::merged(now, &ours, self.caller.overrides) {
            Some(options) => self.set(name, options),
            None => self.note(format!("{name} is kept: it names a proxy already")),
        }
    }

    fn proxy_url(&self) -> String {
        match self.caller.app {
            // Most clients send this as `Proxy-Authorization` by themselves, at once.
            Some((name, token)) => {
                format!("http://{name}:{}@{}", lists::percent(token.expose()), self.caller.proxy)
            }
            None => format!("http://{}", self.caller.proxy),
        }
    }

    /// Both cases of a proxy variable are one setting. Whether it is ours now.
    fn proxy_pair(&mut self, lower: &str, upper: &str, ours: &str) -> bool {
        let others: Vec<_> = [lower, upper]
            .into_iter()
            .filter_map(|name| Some((name, self.now(name)?)))
            .filter(|(_, value)| !same_url(value, ours) && !self.caller.overrides)
            .collect();
        for (name, value) in &others {
            self.note(format!(
                "{name} is kept as {}: what goes to it goes around lessor (--override points it at lessor)",
                lists::shown(value)
            ));
        }
        if others.is_empty() {
            self.set(lower, ours);
            self.set(upper, ours);
        }
        others.is_empty()
    }

    /// Trust is replaced where it was set, too: with HTTPS through lessor, whoever does not trust its CA
    /// reaches no provider. `SSL_CERT_DIR` stays: OpenSSL, Go and rustls read it beside the file.
    fn trust(&mut self, trust: Option<&Trust>) {
        // Where https goes elsewhere, or another proxy's CA is needed, nothing of ours is.
        let Some(trust) = trust.filter(|_| self.changes.set.contains_key("HTTPS_PROXY")) else { return };
        let bundle = TRUST.map(|name| (name, &trust.bundle));
        let wget = trust.wgetrc.as_ref().map(|file| (WGET, file));
        for (name, file) in bundle.into_iter().chain(wget) {
            self.set(name, file.display().to_string());
        }
        self.say_loss(trust);
        if self.now("SSL_CERT_DIR").is_some() {
            self.note("SSL_CERT_DIR is kept; some clients (httpx) ignore it beside SSL_CERT_FILE".into());
        }
    }

    fn say_loss(&mut self, trust: &Trust) {
        let loss = &self.caller.loss;
        let shown = |name: &String| format!("{name}={}", lists::shown(self.now(name).unwrap_or_default()));
        let named: Vec<_> = loss.variables.iter().map(shown).collect();
        if !named.is_empty() {
            self.note(format!(
                "{}: replaced by {}, which lacks some of it; start the sidecar with the same in its environment",
                named.join(", "),
                trust.bundle.display()
            ));
        }
        if loss.no_roots {
            self.note(
                "this system has no root certificates: hosts that are no provider's will be refused by clients \
                 that go by SSL_CERT_FILE and the like; install them (ca-certificates), and start the sidecar again"
                    .into(),
            );
        }
    }

    /// A key that was taken out may stand in another variable too, alone or in a longer text.
    fn copies(&mut self) {
        let gone: Vec<_> = self.gone.iter().filter(|value| value.len() >= SHORTEST_SECRET).collect();
        for (name, value) in self.caller.present {
            let held = gone.iter().any(|secret| value.contains(**secret));
            if held && !self.changes.set.contains_key(name) && self.changes.unset.insert(name.clone()) {
                self.changes.notes.push(format!("{name} is removed: it holds a key"));
            }
        }
    }
}

fn same_url(a: &str, b: &str) -> bool {
    a.trim().trim_end_matches('/').eq_ignore_ascii_case(b.trim().trim_end_matches('/'))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a test that fails may panic
mod tests;

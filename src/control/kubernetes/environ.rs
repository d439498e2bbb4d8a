//! What an app's container gets in its environment, beside what it has: never over the app's own.
//!
//! Kubernetes takes a name that stands twice and lets the later one count, so a name that is there is not
//! written again; that rule is kept here, for the API server does not. `env` beats `envFrom`, and what that
//! holds cannot be seen from here, so a container with it gets a warning, and `lessor.dev/keep-env` names what
//! is not to be set.

use std::collections::HashSet;

use serde_json::{Value, json};

use super::pod::Container;
use super::settings::Wanted;
use super::sidecar::{CA_DIR, CA_VOLUME, PROXY_PORT};
use crate::config::{Provider, catalogue};
use crate::control::environment::{ADDS_TRUST, PLACEHOLDER, TRUST, WGET, java_options, merged_java};

/// What never goes through the proxy: this pod, the cluster's Services, the cloud's metadata, the API server.
const LOCAL: [&str; 7] = [
    "localhost",
    "127.0.0.1",
    "::1",
    ".svc",
    ".cluster.local",
    "169.254.169.254",
    "$(KUBERNETES_SERVICE_HOST)",
];
/// More variables that name a bundle of CAs in place of the usual ones.
const MORE_TRUST: [&str; 4] = ["GIT_SSL_CAINFO", "PIP_CERT", "DENO_CERT", "CARGO_HTTP_CAINFO"];
const JAVA: &str = "JAVA_TOOL_OPTIONS";

/// What changes in one container.
#[derive(Debug, Default)]
pub(super) struct Changes {
    /// Entries behind those that are there.
    pub(super) added: Vec<(String, String)>,
    /// Entries of the app's own that get ours behind their value, by their place.
    pub(super) extended: Vec<(usize, String)>,
    /// Whether it needs the certificates.
    pub(super) mounts_ca: bool,
    /// What is worth saying.
    pub(super) notes: Vec<String>,
}

impl Changes {
    /// The entries to add, as a pod has them.
    pub(super) fn entries(&self) -> Vec<Value> {
        self.added.iter().map(|(name, value)| json!({ "name": name, "value": value })).collect()
    }

    /// The volume with the certificates, as a container mounts it.
    pub(super) fn ca_mount() -> Value {
        json!({ "name": CA_VOLUME, "mountPath": CA_DIR, "readOnly": true })
    }
}

/// The environment of `container`.
pub(super) fn changes(container: Container<'_>, wanted: &Wanted) -> Changes {
    let mut plan = Plan { container, wanted, changes: Changes::default() };
    for name in &wanted.upstreams {
        if let Some(provider) = catalogue::builtin().get(name) {
            plan.provider(provider);
        }
    }
    if wanted.mode.proxy() {
        plan.proxies();
    } else if PROXIES.iter().flatten().any(|name| container.has_variable(name)) {
        // The base URL on loopback must not go to the app's own proxy.
        plan.no_proxy();
    }
    let mut changes = plan.changes;
    if container.has_env_from() && !changes.added.is_empty() {
        let name = container.name();
        changes.notes.push(format!(
            "container `{name}` has envFrom: what is set here hides the same names there, unless \
             lessor.dev/keep-env has them"
        ));
    }
    changes
}

/// Both cases are one setting; `ALL_PROXY` would take what is no HTTP, too, and is only looked at.
const PROXIES: [[&str; 2]; 3] =
    [["http_proxy", "HTTP_PROXY"], ["https_proxy", "HTTPS_PROXY"], ["all_proxy", "ALL_PROXY"]];

fn door() -> String {
    format!("http://127.0.0.1:{PROXY_PORT}")
}

struct Plan<'a> {
    container: Container<'a>,
    wanted: &'a Wanted,
    changes: Changes,
}

impl Plan<'_> {
    fn note(&mut self, what: &str) {
        self.changes.notes.push(format!("container `{}` {what}", self.container.name()));
    }

    fn told_to_keep(&self, name: &str) -> bool {
        self.wanted.keep_env.contains(name)
    }

    /// Whether it is the app's, and another than `ours`.
    fn is_apps(&self, name: &str, ours: &str) -> bool {
        self.container.has_variable(name)
            && self.container.literal(name).is_none_or(|(_, value)| value != ours)
    }

    /// Whether ours may not stand there.
    fn is_taken(&self, name: &str, ours: &str) -> bool {
        self.told_to_keep(name) || self.is_apps(name, ours)
    }

    fn set(&mut self, name: &str, value: &str) {
        let added = self.changes.added.iter().any(|(added, _)| added == name);
        if !added && !self.container.has_variable(name) && !self.told_to_keep(name) {
            self.changes.added.push((name.into(), value.into()));
        }
    }

    /// Two variables of one provider are one setting: where one is the app's, so are all.
    fn provider(&mut self, provider: &Provider) {
        let base = format!("{}/{}", door(), provider.name);
        let ours: Vec<_> =
            provider.env_base_url.iter().map(|var| (&var.name, format!("{base}{}", var.path))).collect();
        if self.wanted.mode.base_url() {
            if let Some((name, _)) = ours.iter().find(|(name, url)| self.is_taken(name, url)) {
                if !self.told_to_keep(name) {
                    self.note(&format!("has {name} of its own: {} is not asked by it", provider.name));
                }
                if !self.wanted.mode.proxy() {
                    return;
                }
            } else {
                for (name, url) in &ours {
                    self.set(name, url);
                }
            }
        }
        let mut keys = provider.env.iter().chain(&provider.env_other);
        if let Some(name) = keys.find(|name| self.is_taken(name, PLACEHOLDER)) {
            if !self.told_to_keep(name) {
                self.note(&format!("has {name} of its own, which lessor makes needless; take it out"));
            }
        } else if !provider.env.iter().chain(&provider.env_other).any(|n| self.container.has_variable(n))
            && let Some(first) = provider.env.first()
        {
            // SDKs refuse to start without a key.
            self.set(first, PLACEHOLDER);
        }
    }

    fn proxies(&mut self) {
        let [plain, secure, _] = PROXIES;
        let plain = self.proxy_pair(plain);
        let secure = self.proxy_pair(secure);
        self.no_proxy();
        if plain || secure {
            self.set("NODE_USE_ENV_PROXY", "1");
        }
        // Where https goes elsewhere, or another proxy's CA is needed, nothing of ours is.
        if secure {
            self.trust();
        }
        if self.wanted.java && plain {
            self.java(secure);
        }
    }

    /// Whether the pair is ours now.
    fn proxy_pair(&mut self, pair: [&str; 2]) -> bool {
        let ours = door();
        if let Some(name) = pair.into_iter().find(|name| self.is_taken(name, &ours)) {
            if !self.told_to_keep(name) {
                self.note(&format!("has {name} of its own: what goes to that goes around lessor"));
            }
            return false;
        }
        for name in pair {
            self.set(name, &ours);
        }
        true
    }

    fn trust(&mut self) {
        self.changes.mounts_ca = true;
        let bundle = format!("{CA_DIR}/ca-bundle.pem");
        let mut all: Vec<_> =
            TRUST.into_iter().chain(MORE_TRUST).map(|name| (name, bundle.clone())).collect();
        all.push((WGET, format!("{CA_DIR}/wgetrc")));
        let mut others = Vec::new();
        for (name, file) in all {
            // What replaces the roots and is not ours lacks lessor's CA; what adds to them may stand.
            if self.is_apps(name, &file) && !ADDS_TRUST.contains(&name) {
                others.push(name);
            }
            self.set(name, &file);
        }
        if !others.is_empty() {
            self.note(&format!(
                "has {} of its own: clients that go by it refuse https through lessor",
                others.join(", ")
            ));
        }
    }

    /// All of the app's entries, then ours, in both cases.
    fn no_proxy(&mut self) {
        let pair = ["no_proxy", "NO_PROXY"];
        if pair.into_iter().any(|name| self.told_to_keep(name)) {
            return;
        }
        if let Some(name) = pair
            .into_iter()
            .find(|name| self.container.has_variable(name) && self.container.literal(name).is_none())
        {
            self.note(&format!("has {name} from elsewhere: it must have 127.0.0.1 in it"));
            return;
        }
        for name in pair {
            let merged = self.no_proxy_list(name);
            match self.container.literal(name) {
                Some((_, value)) if value == merged => {}
                Some((at, _)) => self.changes.extended.push((at, merged)),
                None => self.set(name, &merged),
            }
        }
    }

    /// What is to stand in `name`: its own entries, those of its other case, then ours.
    fn no_proxy_list(&self, name: &str) -> String {
        let other = if name == "no_proxy" { "NO_PROXY" } else { "no_proxy" };
        let literal = |name| self.container.literal(name).map(|(_, value)| value);
        let star = |list: Option<&str>| list.is_some_and(|list| list.trim() == "*");
        let (own, other) = (literal(name), literal(other));
        // Most clients know this only where it stands alone: with more beside it, it would mean nothing.
        if star(own) || own.is_none() && star(other) {
            return "*".into();
        }
        let set = own.into_iter().chain(other.filter(|list| !star(Some(list))));
        let set = set.flat_map(|list| list.split(|c: char| c == ',' || c.is_ascii_whitespace()));
        let all = set.chain(LOCAL).chain(self.wanted.no_proxy.iter().map(String::as_str));
        let mut seen = HashSet::new();
        let all: Vec<&str> = all.filter(|entry| !entry.is_empty() && seen.insert(*entry)).collect();
        all.join(",")
    }

    /// Java reads no proxy variable. What it reads is one list of options, so ours go behind the app's.
    fn java(&mut self, secure: bool) {
        if self.told_to_keep(JAVA) {
            return;
        }
        let store = format!("{CA_DIR}/ca-bundle.p12");
        let at = std::net::SocketAddr::from(([127, 0, 0, 1], PROXY_PORT));
        let store = secure.then_some(store.as_ref());
        let ours = java_options(at, store, &self.no_proxy_list("no_proxy"));
        let Some((at, value)) = self.container.literal(JAVA) else {
            if self.container.has_variable(JAVA) {
                self.note(&format!("has {JAVA} from elsewhere: its JVMs go around lessor"));
            }
            return self.set(JAVA, &ours);
        };
        match merged_java(value, &ours, false) {
            Some(options) if options == value => {}
            Some(options) => self.changes.extended.push((at, options)),
            None => self.note(&format!("has a proxy in {JAVA}: its JVMs go around lessor")),
        }
    }
}

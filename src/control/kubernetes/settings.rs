//! What a pod's sidecar is to be: what the injector was told for all pods, and what the pod's annotations say.

use std::collections::HashSet;

use serde::Serialize;
use sha2::Digest as _;

use super::pod::Pod;
use super::values::{self, Level, Mode, Quantity};
use crate::config::catalogue;
use crate::model::{PoolName, ProviderName};

/// What labels and annotations of ours begin with.
pub(super) const DOMAIN: &str = "lessor.dev/";
/// The label that asks for a sidecar.
pub(super) const INJECT: &str = "lessor.dev/inject";
/// The label of pods that have one.
pub(super) const INJECTED: &str = "lessor.dev/injected";
/// The annotation that says what was done.
pub(super) const STATUS: &str = "lessor.dev/status";
/// What `share-process-namespace` must say.
const ACCEPT: &str = "accept";
/// The annotations that are read.
const KNOWN: [&str; 17] = [
    "pool",
    "mode",
    "containers",
    "skip-containers",
    "image",
    "log-level",
    "cpu-request",
    "cpu-limit",
    "memory-request",
    "memory-limit",
    "upstreams",
    "native-sidecar",
    "drain",
    "keep-env",
    "secret",
    "share-process-namespace",
    "java",
];
/// How many unknown ones are told of: more than an API server passes on.
const UNKNOWN: usize = 64;
/// The longest name that a known one is looked for; it takes steps by its length times theirs.
const NEAR: usize = 64;
/// What is left of a pod's grace for the process to end after its drain, in seconds.
const MARGIN: u64 = 2;

/// CPU and memory of the sidecar.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Resources {
    /// What the scheduler sets aside.
    pub cpu_request: Quantity,
    /// What it may use at most.
    pub cpu_limit: Quantity,
    /// What the scheduler sets aside.
    pub memory_request: Quantity,
    /// What it may use at most.
    pub memory_limit: Quantity,
}

impl Resources {
    /// Which request is above its limit, as the names of both.
    pub(super) fn crossed(&self) -> Option<(&'static str, &'static str)> {
        if self.cpu_request.exceeds(&self.cpu_limit) {
            return Some(("cpu-request", "cpu-limit"));
        }
        self.memory_request.exceeds(&self.memory_limit).then_some(("memory-request", "memory-limit"))
    }
}

/// What the injector was told for all pods.
#[derive(Debug, Clone, Serialize)]
pub struct Defaults {
    /// The sidecar's image.
    pub image: String,
    /// The Secret with its configuration and keys, in the pod's namespace.
    pub secret: String,
    /// The providers whose variables are set.
    #[serde(serialize_with = "as_texts")]
    pub upstreams: Vec<ProviderName>,
    /// How apps are taken through lessor.
    pub mode: Mode,
    /// Whether the cluster knows native sidecars.
    pub native: bool,
    /// CPU and memory.
    pub resources: Resources,
    /// Seconds for streams under way after TERM.
    pub drain: u64,
    /// More entries of `NO_PROXY`.
    pub no_proxy: Vec<String>,
    /// How much it logs.
    pub log_level: Level,
    /// The pool of callers that name none.
    #[serde(serialize_with = "as_text")]
    pub pool: Option<PoolName>,
    /// Where the injector runs, whose pods it leaves alone.
    #[serde(skip)]
    pub own_namespace: Option<String>,
}

fn as_texts<S: serde::Serializer>(names: &[ProviderName], to: S) -> Result<S::Ok, S::Error> {
    to.collect_seq(names.iter().map(ProviderName::as_str))
}

// Serde hands a reference to the field.
#[allow(clippy::ref_option)]
fn as_text<S: serde::Serializer>(name: &Option<PoolName>, to: S) -> Result<S::Ok, S::Error> {
    name.as_ref().map(PoolName::as_str).serialize(to)
}

impl Defaults {
    /// Tells two injectors apart that would do other things to the same pod.
    pub fn hash(&self) -> String {
        // A struct of texts and numbers: there is nothing in it that JSON could not say.
        let text = serde_json::to_string(self).unwrap_or_default();
        sha2::Sha256::digest(text).iter().take(6).fold(String::new(), |all, byte| format!("{all}{byte:02x}"))
    }
}

/// What one pod's sidecar is to be.
#[derive(Debug, Clone)]
pub(super) struct Wanted {
    pub(super) image: String,
    pub(super) secret: String,
    /// The Secret of pods that name none: the others' keys are in it, whatever this pod has.
    pub(super) usual_secret: String,
    pub(super) mode: Mode,
    pub(super) native: bool,
    pub(super) resources: Resources,
    pub(super) drain: u64,
    pub(super) log_level: Level,
    pub(super) pool: Option<PoolName>,
    /// Whose variables are set.
    pub(super) upstreams: Vec<ProviderName>,
    /// The providers that the sidecar serves; `None`: all that its Secret names.
    pub(super) only_upstreams: Option<Vec<ProviderName>>,
    /// The containers that get an environment; `None`: all.
    pub(super) containers: Option<HashSet<String>>,
    pub(super) skip_containers: HashSet<String>,
    pub(super) keep_env: HashSet<String>,
    pub(super) no_proxy: Vec<String>,
    pub(super) java: bool,
    /// Somebody has read what a shared process namespace gives away.
    pub(super) accepts_sharing: bool,
    /// What is worth saying.
    pub(super) notes: Vec<String>,
}

impl Wanted {
    /// By the defaults and the pod's annotations; a message that names the annotation and what is allowed.
    pub(super) fn of(defaults: &Defaults, pod: Pod<'_>) -> Result<Self, String> {
        let read = Annotations(pod);
        let usual = &defaults.resources;
        let upstreams = read.list("upstreams", values::provider)?;
        let named = upstreams.as_ref().unwrap_or(&defaults.upstreams);
        let mut wanted = Self {
            image: read.or("image", values::image, &defaults.image)?,
            secret: read.or("secret", values::object_name, &defaults.secret)?,
            usual_secret: defaults.secret.clone(),
            mode: read.or("mode", str::parse, &defaults.mode)?,
            native: read.or("native-sidecar", values::truth, &defaults.native)?,
            resources: Resources {
                cpu_request: read.or("cpu-request", values::cpu, &usual.cpu_request)?,
                cpu_limit: read.or("cpu-limit", values::cpu, &usual.cpu_limit)?,
                memory_request: read.or("memory-request", str::parse, &usual.memory_request)?,
                memory_limit: read.or("memory-limit", str::parse, &usual.memory_limit)?,
            },
            drain: read.or("drain", values::drain, &defaults.drain)?,
            log_level: read.or("log-level", str::parse, &defaults.log_level)?,
            pool: read.get("pool", pool)?.or_else(|| defaults.pool.clone()),
            upstreams: each_once(named),
            only_upstreams: upstreams,
            containers: read.set("containers", values::container_name)?,
            skip_containers: read.set("skip-containers", values::container_name)?.unwrap_or_default(),
            keep_env: read.set("keep-env", values::variable)?.unwrap_or_default(),
            no_proxy: defaults.no_proxy.clone(),
            java: read.or("java", values::truth, &false)?,
            accepts_sharing: read.get("share-process-namespace", accept)?.is_some(),
            notes: Vec::new(),
        };
        if let Some((request, limit)) = wanted.resources.crossed() {
            return Err(format!(
                "{DOMAIN}{request} is above {DOMAIN}{limit} (the injector's own where an annotation is not \
                 set); raise the limit, or lower the request"
            ));
        }
        wanted.fit_drain(pod)?;
        wanted.look_at_names(pod);
        Ok(wanted)
    }

    /// A drain that is longer than the pod's grace would end by a kill, with its leases still held.
    fn fit_drain(&mut self, pod: Pod<'_>) -> Result<(), String> {
        let grace = pod.grace();
        let most = grace.saturating_sub(MARGIN).max(1);
        if self.drain <= most {
            return Ok(());
        }
        if pod.annotation(&format!("{DOMAIN}drain")).is_some() {
            return Err(format!(
                "{DOMAIN}drain is {}s, and the pod is killed {grace}s after TERM; it may be {most}s at most, or \
                 raise terminationGracePeriodSeconds to {}",
                self.drain,
                self.drain + MARGIN
            ));
        }
        self.notes.push(format!(
            "streams get {most}s to end and not {}s, for terminationGracePeriodSeconds is {grace}",
            self.drain
        ));
        self.drain = most;
        Ok(())
    }

    fn look_at_names(&mut self, pod: Pod<'_>) {
        let ours = pod.annotations().filter_map(|(key, _)| Some((key, key.strip_prefix(DOMAIN)?)));
        for (key, name) in ours.filter(|(_, name)| !KNOWN.contains(name)).take(UNKNOWN) {
            match name {
                "status" => {}
                "inject" => self.notes.push(format!("{INJECT} is a label; as an annotation it does nothing")),
                _ => self.notes.push(format!("annotation {} is not known{}", values::shown(key), near(name))),
            }
        }
        let containers: HashSet<_> = pod.all_containers().map(super::pod::Container::name).collect();
        let none = HashSet::new();
        for (annotation, names) in [
            ("containers", self.containers.as_ref().unwrap_or(&none)),
            ("skip-containers", &self.skip_containers),
        ] {
            let mut missing: Vec<_> =
                names.iter().filter(|name| !containers.contains(name.as_str())).collect();
            missing.sort_unstable(); // a set has no order, and what is said should not change by chance
            self.notes.extend(
                missing.into_iter().map(|name| format!("{DOMAIN}{annotation}: there is no {name} yet")),
            );
        }
        for name in self.upstreams.iter().filter(|name| !catalogue::builtin().contains_key(*name)) {
            self.notes.push(format!("{name} is not in the catalogue, so no variable is set for it"));
        }
        if self.java && !self.mode.proxy() {
            self.notes.push(format!("{DOMAIN}java does nothing in mode base-url"));
        }
    }

    /// Whether a Secret is for sidecars alone.
    pub(super) fn guards(&self, secret: &str) -> bool {
        secret == self.secret || secret == self.usual_secret
    }

    /// Whether this container gets an environment.
    pub(super) fn selects(&self, container: &str) -> bool {
        if self.skip_containers.contains(container) {
            return false;
        }
        match &self.containers {
            Some(names) => names.contains(container),
            None => !OTHERS.contains(&container),
        }
    }
}

/// Containers that other injectors bring along, which call no provider and must not go through a proxy.
/// `lessor.dev/containers` names one all the same.
const OTHERS: [&str; 13] = [
    "istio-proxy",
    "istio-init",
    "istio-validation",
    "linkerd-proxy",
    "linkerd-init",
    "linkerd-network-validator",
    "vault-agent",
    "vault-agent-init",
    "consul-dataplane",
    "kuma-sidecar",
    "kuma-init",
    "daprd",
    "cloud-sql-proxy",
];

fn pool(text: &str) -> Result<PoolName, String> {
    PoolName::parse(text).map_err(|cause| cause.to_string())
}

fn accept(text: &str) -> Result<(), String> {
    if text == ACCEPT { Ok(()) } else { Err(format!("must be {ACCEPT}, or not there")) }
}

/// Names in their order, each but once.
fn each_once(names: &[ProviderName]) -> Vec<ProviderName> {
    let mut seen = HashSet::new();
    names.iter().filter(|name| seen.insert(*name)).cloned().collect()
}

/// The known annotation that was meant, as the end of a sentence.
fn near(name: &str) -> String {
    if name.len() > NEAR {
        return String::new();
    }
    let slips = |known: &&str| strsim::osa_distance(name, known);
    let nearest = KNOWN.into_iter().min_by_key(slips).filter(|known| slips(known) <= 2);
    nearest.map_or_else(String::new, |known| format!("; {DOMAIN}{known} is"))
}

struct Annotations<'a>(Pod<'a>);

impl Annotations<'_> {
    fn get<T>(&self, name: &str, read: impl Fn(&str) -> Result<T, String>) -> Result<Option<T>, String> {
        let Some(text) = self.0.annotation(&format!("{DOMAIN}{name}")) else { return Ok(None) };
        let refused = |rule| format!("annotation {DOMAIN}{name} is \"{}\": {rule}", values::shown(text));
        read(text.trim()).map(Some).map_err(refused)
    }

    fn or<T: Clone>(
        &self,
        name: &str,
        read: impl Fn(&str) -> Result<T, String>,
        usual: &T,
    ) -> Result<T, String> {
        Ok(self.get(name, read)?.unwrap_or_else(|| usual.clone()))
    }

    fn set(
        &self,
        name: &str,
        one: impl Fn(&str) -> Result<String, String>,
    ) -> Result<Option<HashSet<String>>, String> {
        Ok(self.list(name, one)?.map(HashSet::from_iter))
    }

    fn list<T>(&self, name: &str, one: impl Fn(&str) -> Result<T, String>) -> Result<Option<Vec<T>>, String> {
        self.get(name, |text| values::list(text, &one))
    }
}

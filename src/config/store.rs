//! `[store]`: where pools and leases live, from a URL and the fields beside it.
//!
//! A URL in the file never holds a password: the file is not where secrets are. One that a platform gives
//! whole, as a variable or a file, may, and then nothing of it is ever repeated: what is shown is put
//! together again from its hosts alone.

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use toml::de::DeValue;

use super::errors::{Span, shown};
use super::tree::{Field, Page, Table};
use super::{LeaseConfig, OnLost, defaults, fields, values};
use crate::model::Secret;

mod url;

use url::{KINDS, Parsed, Wrong, parse};

/// `[store]`.
#[derive(Debug, Clone)]
pub struct StoreConfig {
    /// Which store, and how it is reached.
    pub url: StoreUrl,
    /// First part of every key in a shared store: 1 to 64 of `A-Z a-z 0-9 . _ -`.
    pub prefix: String,
}

/// `store.url`. Displays as the URL without credentials.
#[derive(Debug, Clone)]
pub enum StoreUrl {
    /// `memory:`: this process alone.
    Memory,
    /// `sqlite:`: a file that the sidecars of one host share.
    Sqlite(PathBuf),
    /// Redis or Valkey: a fleet.
    Redis(RedisConfig),
}

impl StoreUrl {
    /// The word for its kind: `memory`, `sqlite` or `redis`.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Memory => "memory",
            Self::Sqlite(_) => "sqlite",
            Self::Redis(_) => "redis",
        }
    }
}

impl fmt::Display for StoreUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Memory => f.write_str("memory:"),
            Self::Sqlite(path) if path.is_absolute() => write!(f, "sqlite://{}", path.display()),
            Self::Sqlite(path) => write!(f, "sqlite:{}", path.display()),
            Self::Redis(redis) => f.write_str(&redis.shown),
        }
    }
}

/// How a Redis or Valkey is reached.
#[derive(Debug, Clone)]
pub struct RedisConfig {
    /// Which servers, and how the one to talk to is found.
    pub topology: Topology,
    /// Whether every connection is TLS, those to sentinels included.
    pub tls: bool,
    /// The CAs to trust instead of the system's; only with TLS.
    pub ca_file: Option<PathBuf>,
    /// The database's number; 0 in a cluster.
    pub db: i64,
    /// The ACL user; never without a password.
    pub username: Option<String>,
    /// The password.
    pub password: Option<Secret>,
    /// The user at the sentinels; never without a password.
    pub sentinel_username: Option<String>,
    /// The password at the sentinels.
    pub sentinel_password: Option<Secret>,
    /// The URL without credentials, for logs and errors.
    pub shown: String,
}

impl RedisConfig {
    /// As a URL of nothing but a topology gives it: plain, without user or password, database 0.
    pub fn plain(topology: Topology) -> Self {
        let hosts: Vec<String> = topology.hosts().iter().map(ToString::to_string).collect();
        Self {
            shown: format!("redis://{}", hosts.join(",")),
            topology,
            tls: false,
            ca_file: None,
            db: 0,
            username: None,
            password: None,
            sentinel_username: None,
            sentinel_password: None,
        }
    }
}

/// Which servers, and how the one to talk to is found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Topology {
    /// One server, or a name that leads to the one that counts.
    Single(HostPort),
    /// Sentinels that know who the primary is now.
    Sentinel {
        /// At least one.
        sentinels: Vec<HostPort>,
        /// The name under which they know it.
        primary: String,
    },
    /// Nodes of a cluster, at least one; they name the others.
    Cluster(Vec<HostPort>),
}

impl Topology {
    /// The servers that the URL names.
    pub fn hosts(&self) -> &[HostPort] {
        match self {
            Self::Single(host) => std::slice::from_ref(host),
            Self::Sentinel { sentinels, .. } => sentinels,
            Self::Cluster(nodes) => nodes,
        }
    }
}

/// A server's name or address, and its port. Displays with brackets around IPv6.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostPort {
    /// In lower case; IPv6 without brackets.
    pub host: String,
    /// Not 0.
    pub port: u16,
}

impl fmt::Display for HostPort {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.host.contains(':') {
            write!(f, "[{}]:{}", self.host, self.port)
        } else {
            write!(f, "{}:{}", self.host, self.port)
        }
    }
}

/// The fields that only a Redis has a use for.
const REDIS_FIELDS: &[&str] = &["username", "password", "sentinel_username", "sentinel_password", "ca_file"];

/// Reads `[store]`.
pub(super) fn read(page: &Page<'_>, store: &Table<'_>) -> StoreConfig {
    let default = defaults::store();
    let said = store.get("url").map(|field| Said::read(page, store, field));
    let prefix = store.get("prefix").and_then(|field| prefix(&field)).unwrap_or(default.prefix);
    // What stands beside a URL that was refused has nothing to be measured against, but is read all the
    // same: its own mistakes are told at once.
    let beside = Beside::read(page, store);
    let url = match said {
        None => fit(store, StoreUrl::Memory, None, beside),
        Some(None) => default.url,
        Some(Some(Said { url, at, .. })) => fit(store, url, Some(&at), beside),
    };
    StoreConfig { url, prefix }
}

fn prefix(field: &Field<'_>) -> Option<String> {
    let text = field.text()?;
    // Braces would be taken for Redis's hash tag, and stars for a pattern in its ACL.
    let good = |b: u8| b.is_ascii_alphanumeric() || b"._-".contains(&b);
    if (1..=64).contains(&text.len()) && text.bytes().all(good) {
        return Some(text.to_owned());
    }
    field.wrong("must be 1 to 64 of A-Z a-z 0-9 . _ -")
}

/// A URL that could be read, and where.
struct Said {
    url: StoreUrl,
    at: Span,
}

impl Said {
    fn read(page: &Page<'_>, store: &Table<'_>, field: Field<'_>) -> Option<Self> {
        let (parsed, from) = if let DeValue::String(text) = field.value {
            (parse(text), None)
        } else if field.value.is_table() {
            let (secret, source, _) = store.secret("url")?;
            (parse(secret.expose()), Some(source))
        } else {
            return field.wrong("must be a URL, or { env = \"REDIS_URL\" }");
        };
        let parsed = match (parsed, &from) {
            (Ok(parsed), _) => parsed,
            // A URL from elsewhere may hold a password anywhere, so nothing of it is repeated.
            (Err(Wrong { rule, .. }), Some(source)) => {
                page.refuse(&field.at, format!("{}: what {source} holds {rule}", field.path));
                return None;
            }
            (Err(Wrong { kind: Some(kind), .. }), None) => {
                let hint = fields::hint(&kind, KINDS.iter().copied());
                let problem = format!("{} is of an unknown kind, {}; {hint}", field.path, shown(&kind));
                page.refuse(&field.at, problem);
                return None;
            }
            (Err(Wrong { rule, kind: None }), None) => return field.wrong(&rule),
        };
        let url = match parsed {
            Parsed::Memory => StoreUrl::Memory,
            Parsed::Sqlite(path) => StoreUrl::Sqlite(page.path(&path)),
            Parsed::Redis(redis) if from.is_none() && redis.username.is_some() | redis.password.is_some() => {
                let problem = format!(
                    "{0} must not hold a user or a password in this file: say store.username and \
                     store.password = {{ env = \"REDIS_PASSWORD\" }}, or {0} = {{ env = \"REDIS_URL\" }}",
                    field.path
                );
                page.refuse(&field.at, problem);
                return None;
            }
            Parsed::Redis(redis) => StoreUrl::Redis(redis),
        };
        Some(Self { url, at: field.at })
    }
}

/// What may stand beside the URL.
#[derive(Default)]
struct Beside {
    username: Option<String>,
    password: Option<Secret>,
    sentinel_username: Option<String>,
    sentinel_password: Option<Secret>,
    ca_file: Option<PathBuf>,
}

impl Beside {
    fn read(page: &Page<'_>, store: &Table<'_>) -> Self {
        let user = |name| {
            let field: Field<'_> = store.get(name)?;
            let text = field.text()?;
            let good = !text.is_empty() && text.bytes().all(|b| b.is_ascii_graphic());
            good.then(|| text.to_owned()).or_else(|| field.wrong("must be a user's name, without spaces"))
        };
        let secret = |name| store.secret(name).map(|(secret, ..)| secret);
        let ca_file = store.get("ca_file").and_then(|field| {
            let path = page.path_to_read(field.text()?);
            if let Err(e) = std::fs::File::open(&path) {
                page.refuse(&field.at, format!("{} {} cannot be read: {e}", field.path, path.display()));
            }
            Some(path)
        });
        Self {
            username: user("username"),
            password: secret("password"),
            sentinel_username: user("sentinel_username"),
            sentinel_password: secret("sentinel_password"),
            ca_file,
        }
    }
}

/// The URL with what stands beside it; what it has no use for is a mistake, for somebody means it to do
/// something.
fn fit(store: &Table<'_>, url: StoreUrl, at: Option<&Span>, beside: Beside) -> StoreUrl {
    let unused = |names: &[&str], why: &str| {
        for field in names.iter().filter_map(|name| store.get(name)) {
            store.page.refuse(&field.at, format!("{} has no use: {why}", field.path));
        }
    };
    let StoreUrl::Redis(mut redis) = url else {
        let kind = url.kind();
        unused(REDIS_FIELDS, &format!("store.url is of kind {kind}:, and only Redis is reached with it"));
        return url;
    };
    if !matches!(redis.topology, Topology::Sentinel { .. }) {
        unused(&["sentinel_username", "sentinel_password"], "store.url is not of kind redis-sentinel:");
    }
    if !redis.tls {
        unused(&["ca_file"], "store.url is without TLS; its kind must begin with rediss");
    }
    for (name, both) in [
        ("username", redis.username.is_some() && beside.username.is_some()),
        ("password", redis.password.is_some() && beside.password.is_some()),
    ] {
        if let Some(field) = store.get(name).filter(|_| both) {
            let problem = format!("{} is said twice: store.url holds one too; leave one out", field.path);
            store.page.refuse(&field.at, problem);
        }
    }
    redis.username = redis.username.or(beside.username);
    redis.password = redis.password.or(beside.password);
    redis.sentinel_username = beside.sentinel_username;
    redis.sentinel_password = beside.sentinel_password;
    redis.ca_file = beside.ca_file;
    let lonely = |user: &str, password: &str, there: bool| {
        if there || store.get(password).is_some() {
            return;
        }
        let (at, path) = match (store.get(user), at) {
            (Some(field), _) => (field.at, field.path),
            (None, Some(at)) => (at.clone(), format!("the {user} in store.url")),
            (None, None) => return,
        };
        let problem = format!("{path} needs store.{password} = {{ env = \"VARIABLE\" }} beside it");
        store.page.refuse(&at, problem);
    };
    lonely("username", "password", redis.username.is_none() || redis.password.is_some());
    let there = redis.sentinel_username.is_none() || redis.sentinel_password.is_some();
    lonely("sentinel_username", "sentinel_password", there);
    StoreUrl::Redis(redis)
}

/// Says what the store's shape costs, where that is more than one would think.
pub(super) fn warn(page: &Page<'_>, store: &StoreConfig, lease: &LeaseConfig) {
    let StoreUrl::Redis(redis) = &store.url else { return };
    let elsewhere = redis.topology.hosts().iter().find(|at| !values::is_loopback_host(&at.host));
    if let Some(at) = elsewhere.filter(|_| !redis.tls) {
        page.warn(format!(
            "store.url reaches {at} without TLS: on the way its password and every lease can be read and \
             changed; use rediss… where the network is not yours alone"
        ));
    }
    let (whose, setting, failover) = match redis.topology {
        Topology::Single(_) => return,
        Topology::Sentinel { .. } => ("Sentinel", "down-after-milliseconds, 30s by default,", SENTINEL),
        Topology::Cluster(_) => ("Cluster", "cluster-node-timeout, 15s by default,", CLUSTER),
    };
    let needed = failover + lease.heartbeat * 2;
    if lease.ttl.saturating_sub(lease.margin()) >= needed {
        return;
    }
    let cost = match lease.on_lost {
        OnLost::Abort => "cuts every open stream",
        OnLost::Finish => "lets every open stream run on above its key's cap",
    };
    page.warn(format!(
        "a failover of Redis {whose} takes about {} ({setting} and the election), and with lease.ttl = \"{}\" \
         it {cost}: set lease.ttl = \"{}\", so that leases outlive it and two heartbeats, or lower that setting \
         of the servers",
        values::spell(failover),
        values::spell(lease.ttl),
        values::spell(outliving(needed)),
    ));
}

/// A failover by Sentinel with its defaults: 30 s until a primary counts as down, then votes and promotion.
const SENTINEL: Duration = Duration::from_secs(35);

/// The same by a cluster's nodes: 15 s, then votes and promotion.
const CLUSTER: Duration = Duration::from_secs(20);

/// The least TTL, in steps of 5 s, that less its margin (a tenth) is not below `needed`.
fn outliving(needed: Duration) -> Duration {
    // Of nine tenths; rounding up to whole steps keeps it above the margin's least of 500 ms, too.
    let steps = (needed.as_millis() * 10).div_ceil(9 * 5000);
    Duration::from_secs(5).saturating_mul(u32::try_from(steps).unwrap_or(u32::MAX))
}

//! Files and environment in, checked values out.
//!
//! A [`Config`] in hand is a sound one: every value was checked when it was parsed, and every mistake
//! was reported at once, each with file, line and caret. No other room reads a file of settings or an
//! environment variable.

use std::collections::{BTreeMap, HashMap};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use ipnet::IpNet;
use serde::{Deserialize, Serialize};

use crate::model::{AppName, GroupName, KeyId, PoolName, ProviderName, Secret};

mod ca;
pub mod catalogue;
mod change;
mod checks;
mod commands;
mod credential;
mod defaults;
mod disk;
mod errors;
mod fields;
mod file;
mod format;
mod keys;
mod load;
mod overrides;
mod paths;
mod place;
mod providers;
mod reading;
pub mod roots;
mod secrets;
mod sections;
mod stamps;
mod store;
mod tree;
mod users;
mod values;
mod zero;

pub use ca::CaFiles;
pub use change::Change;
pub use credential::{Credential, Filled};
pub use disk::{OnDisk, Refused};
pub use errors::{ConfigError, Mistake};
pub use file::{load_app_token, load_file, load_listen, load_provider, load_str};
pub use format::{Format, Unfilled};
pub use load::{ConfigSource, Loader};
pub use overrides::Overrides;
pub use paths::PathPattern;
pub use place::{Injection, Kind, Place, places};
pub use reading::{
    ANY_CODE, Counted, Origin, Rule, StatusRange, Until, Usage, UsagePlace, Wait, WaitFormat, WaitPlace,
    Window,
};
pub use stamps::Stamps;
pub use store::{HostPort, RedisConfig, StoreConfig, StoreUrl, Topology};
pub use zero::{ORIGIN as ENVIRONMENT, from_environment};

/// The JSON schema of the file, for editors. What only a look at several fields, or at the machine, can tell is not
/// in it.
pub const SCHEMA: &str = include_str!("../../config/lessor.schema.json");

/// Everything lessor runs by.
#[derive(Debug, Clone)]
pub struct Config {
    /// Where it listens.
    pub listen: Listen,
    /// Where pools and leases live.
    pub store: StoreConfig,
    /// How long a lease lives, and what happens when it is lost.
    pub lease: LeaseConfig,
    /// How long and how many may wait.
    pub queue: QueueConfig,
    /// When a request is sent again.
    pub retry: RetryConfig,
    /// Every wait's bound.
    pub timeouts: Timeouts,
    /// How lessor ends.
    pub shutdown: ShutdownConfig,
    /// How keys are ordered.
    pub ranking: Ranking,
    /// The proxy modes' policy.
    pub proxy: ProxyConfig,
    /// `proxy.intercept`: whether CONNECT to a provider's host is answered with a certificate of
    /// lessor's own; otherwise such a tunnel is refused.
    pub intercept: bool,
    /// `[ca]`: the operator's CA for such certificates; `None`: lessor makes one of its own.
    pub ca: Option<CaFiles>,
    /// `scrub.compressed`: what happens to packed bodies, in which a key cannot be seen.
    pub compressed: Compressed,
    /// How long a WebSocket may be silent, and live.
    pub websocket: WebSocketConfig,
    /// Bounds that protect the process.
    pub limits: Limits,
    /// The admin listener's token, where set.
    pub admin_token: Option<Secret>,
    /// Providers that are served: those with keys, and those the user defined. By name.
    pub providers: BTreeMap<ProviderName, Arc<Provider>>,
    /// Catalogue and user hosts to provider, exact, lower case, without port, whether it has keys or not.
    pub hosts: HashMap<String, ProviderName>,
    /// Catalogue patterns (`.openai.azure.com`) that only *recognise* a host as a provider's.
    pub host_patterns: Vec<(String, ProviderName)>,
    /// All keys, in file order.
    pub keys: Vec<KeyConfig>,
    /// Fallbacks by pool name.
    pub pools: BTreeMap<PoolName, Vec<PoolName>>,
    /// `--default-pool`: the pool of callers that name none, where they may use it.
    pub default_pool: Option<PoolName>,
    /// `--upstreams`: the only providers whose keys are lent; empty: all.
    pub upstreams: Vec<ProviderName>,
    /// `--ca-dir`: where the CA's files are written for users other than this one.
    pub ca_dir: Option<PathBuf>,
    /// `--quit`: whether `POST /quit` ends the process.
    pub quit: bool,
    /// Callers; empty: everyone on loopback is `anonymous`.
    pub apps: Vec<AppConfig>,
    /// Every environment variable that some secret was read from; a child must not inherit them.
    pub secret_variables: Vec<String>,
    /// Every file that it was read from: its own, secrets', certificates', as they were then. A change of one is a change of it.
    pub files: Stamps,
    /// Where it came from, for people: the file's path, or `the environment`.
    pub origin: String,
    /// What to say at start, one line each.
    pub warnings: Vec<String>,
}

/// One address to listen on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Address {
    /// A TCP address; port 0 takes a free one.
    Tcp(SocketAddr),
    /// A Unix socket, with its file mode (default 0600).
    Unix(PathBuf, u32),
}

impl std::fmt::Display for Address {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Tcp(at) => write!(f, "{at}"),
            Self::Unix(path, _) => write!(f, "unix:{}", path.display()),
        }
    }
}

/// `[listen]`.
#[derive(Debug, Clone, PartialEq)]
pub struct Listen {
    /// Proxy listeners, at least one.
    pub proxy: Vec<Address>,
    /// The admin TCP listener.
    pub admin: Address,
    /// Further `Host` names (lower case, no port) for base-URL mode.
    pub hosts: Vec<String>,
    /// Web origins that may call, exact (`https://app.example`).
    pub allow_origins: Vec<String>,
    /// Whether answers carry `X-Lessor-Key`, `-Lease`, `-Attempts`.
    pub response_headers: bool,
}

/// `[lease]`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LeaseConfig {
    /// How long a lease lives unrenewed.
    pub ttl: Duration,
    /// How often all live leases are renewed.
    pub heartbeat: Duration,
    /// What happens to a stream whose lease is lost.
    pub on_lost: OnLost,
    /// The bound of a lease's whole life, where set.
    pub max_duration: Option<Duration>,
}

impl LeaseConfig {
    /// How long before its expiry a lease must have been renewed: a tenth of the TTL, at least 500 ms.
    pub fn margin(&self) -> Duration {
        (self.ttl / 10).max(Duration::from_millis(500))
    }

    /// The longest heartbeat: one more renewal, which may take as long as a call does, must be answered
    /// before the margin.
    pub fn longest_heartbeat(&self) -> Duration {
        let room = self.ttl.saturating_sub(self.margin());
        // With a short TTL a renewal is bounded by a third of it, and by the heartbeat itself.
        let call = STORE_CALL.min(self.ttl / 3);
        room.saturating_sub(call).max((room / 2).min(call))
    }
}

/// The longest that one call to a shared store takes.
pub const STORE_CALL: Duration = Duration::from_millis(640);

/// `lease.on_lost`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OnLost {
    /// Cancel the upstream request; the client sees a broken stream.
    Abort,
    /// Let it run; a metric counts it.
    Finish,
}

/// `[queue]`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct QueueConfig {
    /// How long one request may wait for a key.
    pub max_wait: Duration,
    /// How many may wait, all queues together.
    pub max_waiting: usize,
}

/// `[retry]`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RetryConfig {
    /// Sends of one request, the first included; at least 1.
    pub max_attempts: u32,
    /// Bytes of one request body that are kept for another send.
    pub max_body: usize,
    /// The same, of all requests together.
    pub max_total: usize,
    /// On what else than a refusal of the key.
    pub on: RetryOn,
}

/// `retry.on`: on what a request is sent again that may then be done, and billed, twice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct RetryOn {
    /// The provider said that it is overloaded.
    pub overloaded: bool,
    /// The connection broke off before an answer.
    pub connection: bool,
}

/// `[timeouts]`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Timeouts {
    /// TCP and TLS to the provider.
    pub connect: Duration,
    /// From the last request byte to the answer's head.
    pub first_byte: Duration,
    /// Between chunks of an answer.
    pub idle: Duration,
    /// Between chunks of a request.
    pub body_idle: Duration,
    /// First byte and whole head from a client.
    pub header: Duration,
    /// How long a client's connection may lie idle between requests.
    pub keep_alive: Duration,
}

/// `[shutdown]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ShutdownConfig {
    /// The longest time from SIGTERM to the end; what is open then is cut.
    pub grace: Duration,
    /// New connections are taken until no client has been connected for so long; zero: none is.
    pub linger: Duration,
}

/// `[ranking]`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Ranking {
    /// Which key is tried first.
    pub strategy: Strategy,
    /// What [`Strategy::Weighted`] weighs.
    pub weights: Weights,
}

impl Ranking {
    /// Where the file says nothing.
    pub const DEFAULT: Self = Self { strategy: Strategy::Weighted, weights: Weights::DEFAULT };
}

/// What each term of a key's score counts; each term is in 0..=1.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Weights {
    /// Of the share of free slots.
    pub capacity: f64,
    /// Of the time since a key was lent.
    pub idle: f64,
    /// Of the share of uses that ended well.
    pub success: f64,
    /// Taken off for the share of uses that failed.
    pub error: f64,
    /// Taken off for the share of uses that met a limit.
    pub rate_limit: f64,
    /// Taken off while a key rests.
    pub cooldown: f64,
    /// Taken off for a key that was chosen lately.
    pub freshness: f64,
    /// The most that chance adds.
    pub jitter: f64,
}

impl Weights {
    /// Load and turns come first: they are what spreads requests over keys that are as good as each other. What
    /// failed comes next: of a key that fails half the time, success and error take one together, which is
    /// half of its slots. Idleness only breaks ties between keys that nobody used for long, and jitter those
    /// that are left, so that a fleet which starts together does not go to one key.
    pub const DEFAULT: Self = Self {
        capacity: 2.0,
        idle: 0.5,
        success: 1.0,
        error: 1.0,
        rate_limit: 1.0,
        cooldown: 1.0,
        freshness: 2.0,
        jitter: 0.05,
    };
}

/// `[ranking] strategy`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Strategy {
    /// By score.
    Weighted,
    /// In turn.
    RoundRobin,
    /// The least busy.
    LeastInFlight,
    /// The first of the file until it is full.
    FillFirst,
}

impl Strategy {
    /// The word in the file.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Weighted => "weighted",
            Self::RoundRobin => "round_robin",
            Self::LeastInFlight => "least_in_flight",
            Self::FillFirst => "fill_first",
        }
    }
}

/// `[proxy]`.
#[derive(Debug, Clone, PartialEq)]
pub struct ProxyConfig {
    /// Whether hosts that are no provider's are forwarded (`tunnel`) or refused (`deny`).
    pub tunnel_other_hosts: bool,
    /// Addresses that no tunnel and no plain forwarding may reach, after resolution.
    pub deny_nets: Vec<IpNet>,
    /// What is offered to the TLS clients inside a tunnel, the preferred first; never empty.
    pub alpn: Vec<Alpn>,
}

/// One of `proxy.alpn`: a protocol by its name in TLS (RFC 7301).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Alpn {
    /// `http/1.1`.
    Http1,
    /// `h2`.
    Http2,
}

impl Alpn {
    /// Its name on the wire.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Http1 => "http/1.1",
            Self::Http2 => "h2",
        }
    }
}

/// `[websocket]`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct WebSocketConfig {
    /// Without a byte either way, pings included.
    pub idle: Duration,
    /// The bound of a socket's whole life, where set.
    pub max_duration: Option<Duration>,
}

/// `scrub.compressed`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Compressed {
    /// They go through as they are.
    Pass,
    /// They are unpacked, and only codings that can be are asked for.
    Decode,
}

/// `[providers.x] scrub`: where the leased key is masked in answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Scrub {
    /// In head, body and trailers.
    On,
    /// In head and trailers.
    Headers,
    /// Nowhere.
    Off,
}

/// `[limits]`: named bounds with defaults.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Limits {
    /// Client connections open at once, all listeners together.
    pub max_connections: usize,
    /// Bytes of one request head.
    pub max_header_bytes: usize,
    /// Header lines of one request.
    pub max_headers: usize,
    /// Requests open at once on one HTTP/2 connection.
    pub max_streams: u32,
}

/// `[apps.x]`.
#[derive(Debug, Clone)]
pub struct AppConfig {
    /// Its name.
    pub name: AppName,
    /// The token it shows; `None` where it is known by its user alone.
    pub token: Option<Secret>,
    /// The user it runs as: that is enough over a Unix socket.
    pub uid: Option<u32>,
    /// The pools it may use, the first its default; empty: `default` only.
    pub pools: Vec<PoolName>,
    /// The providers it may use; empty: all.
    pub providers: Vec<ProviderName>,
}

/// `[[keys]]`, with its secret in hand.
#[derive(Debug, Clone)]
pub struct KeyConfig {
    /// Its id.
    pub id: KeyId,
    /// Whose key.
    pub provider: ProviderName,
    /// Its pool.
    pub pool: PoolName,
    /// Its group.
    pub group: Option<GroupName>,
    /// The raw value; `None` while its command has not given one, and the key is pending.
    pub secret: Option<Secret>,
    /// Where the secret comes from, for people: `env OPENAI_API_KEY`, `file /run/…` or `command vault`; never
    /// the value.
    pub source: String,
    /// How it is put in: as its provider says, or as its own kind does.
    pub inject: Arc<[Injection]>,
    /// Headers that every request with it has.
    pub headers: Vec<KeyHeader>,
    /// All that answers must not bring back: the secret, and what it is put in as.
    pub hidden: Arc<[Secret]>,
    /// How many requests at once, at least 1.
    pub max_concurrent_uses: u32,
    /// Patterns (`gpt-*`, `*` at any place) of models it serves; empty: all.
    pub models: Vec<String>,
    /// Starts out disabled.
    pub disabled: bool,
}

/// One of `[[keys]] headers`.
#[derive(Debug, Clone, PartialEq)]
pub struct KeyHeader {
    /// Its name.
    pub name: http::HeaderName,
    /// Its value, marked sensitive where that is secret.
    pub value: http::HeaderValue,
}

/// A provider: where it is, how a key is put in, what its answers mean. Compiled from
/// `config/providers.toml` and the user's `[providers.x]`.
#[derive(Debug, Clone, PartialEq)]
pub struct Provider {
    /// Its name.
    pub name: ProviderName,
    /// Where base-URL mode sends: scheme, authority, and a path prefix without trailing slash.
    pub base_url: http::Uri,
    /// Whether the user set `base_url`: then the proxy modes go there too.
    pub base_url_is_users: bool,
    /// Whether the provider has no address of its own and the user has not given one: `base_url` is then
    /// a placeholder that never resolves.
    pub needs_base_url: bool,
    /// Exact hosts a key may be sent to (lower case, no port), `base_url`'s included.
    pub hosts: Vec<String>,
    /// Suffixes, with their leading dot, that only recognise a host as this provider's.
    pub host_patterns: Vec<String>,
    /// Further trust for this provider only.
    pub ca_file: Option<PathBuf>,
    /// How a key is put in that says nothing else; the first whose `path_prefix` fits the provider-relative path wins, the
    /// last has none.
    pub inject: Vec<Injection>,
    /// Credential places of the client that are left alone.
    pub keep: Vec<String>,
    /// The shape of errors its SDKs show.
    pub error_shape: ErrorShape,
    /// Where the leased key is masked in its answers.
    pub scrub: Scrub,
    /// The request by which lessor itself checks a key.
    pub check: Option<Check>,
    /// How answers are read: rules with codes first, then those with phrases, then those with neither; of
    /// each the first that fits wins.
    pub rules: Vec<Rule>,
    /// Where waits are, in order; the first that can be read wins.
    pub waits: Vec<Wait>,
    /// Where answers say what they used.
    pub usage: Vec<Usage>,
    /// The header in which an answer names the organisation that its key belongs to.
    pub organization_header: Option<http::HeaderName>,
    /// The header in which an answer says how many uses at once are allowed.
    pub max_uses_header: Option<http::HeaderName>,
    /// Paths that no leased key is sent to, in all readings of a path.
    pub deny_paths: Vec<PathPattern>,
    /// Exceptions from them.
    pub allow_paths: Vec<PathPattern>,
    /// Path prefixes known to need no model.
    pub no_model_paths: Vec<String>,
    /// Parts of a path behind which the model stands.
    pub model_after: Vec<ModelAfter>,
    /// The field of a JSON body or a form in which the model stands.
    pub model_field: String,
    /// The parameter of a WebSocket handshake's query in which the model stands.
    pub model_query: Option<String>,
    /// Prefixes of WebSocket subprotocols behind which a credential stands, as sent from browsers.
    pub subprotocols: Vec<String>,
    /// Its usual environment variables (`OPENAI_API_KEY`).
    pub env: Vec<String>,
    /// Further variables in which its SDKs look for a credential, and which lessor takes no key from.
    pub env_other: Vec<String>,
    /// The variables that tell its SDKs where it is.
    pub env_base_url: Vec<BaseUrlVariable>,
}

/// A part of a path behind which a model's name stands.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ModelAfter {
    /// The part, from slash to slash: `/models/`.
    pub part: String,
    /// How many segments the name has, each up to the next `/` or `:`.
    pub segments: usize,
}

/// A variable in which SDKs look for a provider's base URL.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)] // a misspelt path must not become no path
pub struct BaseUrlVariable {
    /// Its name.
    pub name: String,
    /// What its value has behind the provider's own bare address: `/v1`, or nothing.
    #[serde(default)]
    pub path: String,
}

/// The JSON shape of lessor's own errors.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ErrorShape {
    /// `{"error":{"message","type","code","param"}}`.
    OpenAi,
    /// `{"type":"error","error":{"type","message"}}`.
    Anthropic,
    /// `{"error":{"code","message","status"}}`.
    Google,
}

/// The request by which lessor checks a key.
#[derive(Debug, Clone, PartialEq)]
pub struct Check {
    /// Its method.
    pub method: http::Method,
    /// Its path below `base_url`, with query.
    pub path: String,
    /// Headers it needs.
    pub headers: Vec<(http::HeaderName, http::HeaderValue)>,
}

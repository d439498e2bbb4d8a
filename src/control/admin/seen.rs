//! What the admin API's pages show, as the command line reads it.

use serde::{Deserialize, Serialize};

use crate::config::Refused;
use crate::model::{AppName, KeyId, OwnerId, PoolName, ProviderName};
use crate::store::{KeyView, LeaseView, StoreTime};

/// The local CA's certificate, and where clients find it. Its key is in no answer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CaSeen {
    /// The certificate's file; `None` where it could not be written.
    pub cert_file: Option<String>,
    /// The file of the system's roots and the certificate.
    pub bundle_file: Option<String>,
    /// The same as a Java trust store.
    #[serde(default)]
    pub java_file: Option<String>,
    /// The certificate; of two while one follows the other.
    pub pem: String,
}

/// An app, as this sidecar knows it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct AppSeen {
    /// Its name.
    pub name: AppName,
    /// Whether it has a token to be known by.
    pub token: bool,
    /// The user it is known by over a Unix socket.
    pub uid: Option<u32>,
    /// The pools it may use; empty: `default` alone.
    pub pools: Vec<PoolName>,
    /// The providers it may use; empty: all.
    pub providers: Vec<ProviderName>,
    /// Whether a person revoked it: in this sidecar, until it is restored or the sidecar restarts.
    pub revoked: bool,
}

/// What a check of one key found.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CheckResult {
    /// The provider took the key.
    pub ok: bool,
    /// The answer's status; `None` when none came.
    pub status: Option<u16>,
    /// The code or type in its body that decided.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub code: Option<String>,
    /// What the answer says about the key.
    pub class: String,
    /// For people.
    pub message: String,
    /// Why a good key is not lent all the same, and what lends it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub note: Option<String>,
}

/// `GET /v1/status`. Lists are those of the other pages, taken at one time, and so of all sidecars that share
/// the store. While the store does not answer they are empty, and the page is a 503 that says the rest.
#[derive(Debug, Serialize, Deserialize)]
pub struct Status {
    /// lessor's version.
    pub version: String,
    /// Since the process started.
    pub uptime_seconds: u64,
    /// Whether it takes work.
    pub ready: bool,
    /// Why not.
    pub reasons: Vec<String>,
    /// Whether it is shutting down.
    pub draining: bool,
    /// Where the configuration came from.
    pub config: String,
    /// Why the file on disk is not taken, where it is not.
    #[serde(default)]
    pub config_refused: Option<Refused>,
    /// Fields that were changed on disk and count from the next start only.
    #[serde(default)]
    pub needs_restart: Vec<String>,
    /// Where pools and leases live.
    pub store: StoreSeen,
    /// This sidecar, as leases name it.
    pub owner: OwnerId,
    /// The proxy's listeners, as really bound.
    pub proxy: Vec<String>,
    /// Leases this process holds.
    pub live: usize,
    /// Requests that wait for a key.
    pub waiting: usize,
    /// All pools.
    pub pools: Vec<PoolView>,
    /// All keys.
    pub keys: Vec<KeySeen>,
    /// All live leases.
    pub leases: Vec<LeaseSeen>,
    /// Providers of which the store lends nothing new for a while.
    #[serde(default)]
    pub graces: Vec<GraceSeen>,
    /// Why this sidecar ranks keys as it does, where that was asked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ranking: Option<RankingSeen>,
}

/// The store lost a provider's data or failed over: until then its keys are lent only to streams that are
/// already open.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct GraceSeen {
    /// Whose keys.
    pub provider: ProviderName,
    /// When it ends.
    pub until_ms: StoreTime,
}

/// Why keys are ranked as they are: by what this process has seen of them.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RankingSeen {
    /// `ranking.strategy`; the score counts with `weighted` alone.
    pub strategy: String,
    /// What each term counts.
    pub weights: TermsSeen,
    /// The most that chance adds.
    pub jitter: f64,
    /// By provider, in the configuration's order.
    pub keys: Vec<RankSeen>,
}

/// Why one key is ranked as it is, for a request without a model.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RankSeen {
    /// Whose key.
    pub provider: ProviderName,
    /// The key.
    pub key: KeyId,
    /// Higher is better; without jitter.
    pub score: f64,
    /// What it is made of, each from 0 to 1.
    pub terms: TermsSeen,
    /// Its uses by this process.
    pub in_flight: u32,
    /// The mean time to an answer's first byte lately.
    pub first_byte_ms: Option<f64>,
    /// For how long it is known to rest.
    pub rests_ms: Option<u64>,
}

/// One number for each term of a score (`config/lessor.toml`, `[ranking]`).
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[allow(missing_docs)] // they are named as in the file, which says what each is
pub struct TermsSeen {
    pub capacity: f64,
    pub idle: f64,
    pub success: f64,
    pub error: f64,
    pub rate_limit: f64,
    pub cooldown: f64,
    pub freshness: f64,
}

/// The store, as this sidecar sees it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StoreSeen {
    /// `memory`, `sqlite` or `redis`.
    pub kind: String,
    /// Where it is, without credentials.
    pub url: String,
    /// Whether it answered just now.
    pub up: bool,
    /// Why not.
    pub error: Option<String>,
}

/// A key, and whether the sidecar that was asked serves it.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct KeySeen {
    /// As the store sees it.
    #[serde(flatten)]
    pub key: KeyView,
    /// Whether it is in this sidecar's configuration: another may have it in its own, or had it within a day.
    #[serde(default = "yes")]
    pub configured: bool,
}

fn yes() -> bool {
    true
}

/// A live lease, and whose.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct LeaseSeen {
    /// As the store sees it.
    #[serde(flatten)]
    pub lease: LeaseView,
    /// Whether the sidecar that was asked holds it.
    #[serde(default)]
    pub own: bool,
}

/// One pool of one provider.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PoolView {
    /// Whose keys.
    pub provider: ProviderName,
    /// Its name.
    pub pool: PoolName,
    /// Where requests go on when it has nothing free.
    pub fallback: Vec<PoolName>,
    /// How many keys of this sidecar's configuration it has.
    pub keys: usize,
    /// How many of them may be lent now.
    pub available: usize,
    /// Live leases on them.
    pub in_use: u32,
    /// Their caps together.
    pub max_concurrent_uses: u32,
    /// What of them may be in use by what answers taught, where that is less.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub learned_concurrent_uses: Option<u32>,
}

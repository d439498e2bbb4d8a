//! What is counted. Handles are resolved once or by a short locked look-up; memory does not grow
//! between scrapes. Every room may count; nobody here knows a room.

use std::collections::HashSet;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::Duration;

use prometheus_client::encoding::{EncodeLabelSet, EncodeLabelValue, LabelValueEncoder};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;

use crate::model::{Class, KeyId, KeyStatus, Map, Mode, PoolName, ProviderName};

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct RequestLabels {
    provider: OfProvider,
    mode: &'static str,
    outcome: &'static str,
}

/// A provider, or `none` where a request was for none that is known.
#[derive(Clone, Debug, Hash, PartialEq, Eq)]
struct OfProvider(Option<ProviderName>);

impl EncodeLabelValue for OfProvider {
    fn encode(&self, encoder: &mut LabelValueEncoder<'_>) -> std::fmt::Result {
        self.0.as_ref().map_or("none", ProviderName::as_str).encode(encoder)
    }
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct KeyLabels {
    provider: String,
    pool: String,
    key: String,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct StatusLabels {
    provider: String,
    key: String,
    status: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct ResultLabel {
    result: &'static str,
}

/// What an acquire call to the store came to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Asked {
    /// A lease.
    Granted,
    /// All keys that were asked for are full, or rest.
    Exhausted,
    /// None of them may be lent.
    Unusable,
    /// No answer.
    StoreFailed,
}

impl Asked {
    const ALL: [Self; 4] = [Self::Granted, Self::Exhausted, Self::Unusable, Self::StoreFailed];

    fn as_str(self) -> &'static str {
        match self {
            Self::Granted => "granted",
            Self::Exhausted => "exhausted",
            Self::Unusable => "unusable",
            Self::StoreFailed => "store_failed",
        }
    }
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct ReasonLabel {
    reason: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct ScrubbedLabels {
    provider: String,
    r#where: &'static str,
}

/// Where an answer brought a key back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scrubbed {
    /// In a header, or as a part of its name.
    Header,
    /// In the body.
    Body,
    /// In a trailer.
    Trailer,
    /// In the reason phrase.
    Reason,
    /// In what came over a WebSocket.
    WebSocket,
}

impl Scrubbed {
    fn as_str(self) -> &'static str {
        match self {
            Self::Header => "header",
            Self::Body => "body",
            Self::Trailer => "trailer",
            Self::Reason => "reason",
            Self::WebSocket => "websocket",
        }
    }
}

/// Seconds; from a tenth of a millisecond to reasoning models' minutes.
const BUCKETS: [f64; 16] = [
    0.0001, 0.000_25, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.1, 0.25, 1.0, 2.5, 10.0, 30.0, 120.0,
    600.0,
];

fn histogram() -> Histogram {
    Histogram::new(BUCKETS)
}

/// All counters of one process; clones share them.
#[derive(Clone)]
pub struct Metrics(Arc<Inner>);

struct Inner {
    registry: Registry,
    requests: Family<RequestLabels, Counter>,
    /// Those of `requests` that were counted already. A family looks its labels up by a hash that withstands whoever
    /// chooses them; these are the house's own.
    requests_known: RwLock<Map<RequestLabels, Counter>>,
    duration: Histogram,
    overhead: Histogram,
    leases_active: Family<KeyLabels, Gauge>,
    /// In the order of [`Asked::ALL`].
    acquire: [Counter; Asked::ALL.len()],
    acquire_seconds: Histogram,
    wait_seconds: Histogram,
    heartbeat_failed: Counter,
    reloads: Family<ResultLabel, Counter>,
    lost: Counter,
    expired: Counter,
    key_status: Family<StatusLabels, Gauge>,
    /// Keys that have a status there.
    shown: Mutex<HashSet<(ProviderName, KeyId)>>,
    cooldowns: Family<ReasonLabel, Counter>,
    failovers: Family<ReasonLabel, Counter>,
    scrubbed: Family<ScrubbedLabels, Counter>,
    queue_depth: Gauge,
    store_errors: Counter,
    reconciled: Counter,
    store_up: Gauge<u64, AtomicU64>,
}

impl std::fmt::Debug for Metrics {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Metrics")
    }
}

impl Default for Metrics {
    fn default() -> Self {
        Self::new()
    }
}

impl Metrics {
    /// Registers everything under its name of the design, section 10.
    pub fn new() -> Self {
        let acquire = Family::<ResultLabel, Counter>::default();
        let mut inner = Inner {
            registry: Registry::with_prefix("lessor"),
            requests: Family::default(),
            requests_known: RwLock::default(),
            duration: histogram(),
            overhead: histogram(),
            leases_active: Family::default(),
            acquire: Asked::ALL.map(|asked| {
                let label = ResultLabel { result: asked.as_str() };
                acquire.get_or_create_owned(&label)
            }),
            acquire_seconds: histogram(),
            wait_seconds: histogram(),
            heartbeat_failed: Counter::default(),
            reloads: Family::default(),
            lost: Counter::default(),
            expired: Counter::default(),
            key_status: Family::default(),
            shown: Mutex::default(),
            cooldowns: Family::default(),
            failovers: Family::default(),
            scrubbed: Family::default(),
            queue_depth: Gauge::default(),
            store_errors: Counter::default(),
            reconciled: Counter::default(),
            store_up: Gauge::default(),
        };
        let to = &mut inner.registry;
        to.register("requests", "Requests ended, by how they ended", inner.requests.clone());
        to.register(
            "request_duration_seconds",
            "From a request's head to its answer's last byte",
            inner.duration.clone(),
        );
        to.register(
            "overhead_seconds",
            "lessor's own share of the time to the answer's head",
            inner.overhead.clone(),
        );
        to.register("leases_active", "Leases this sidecar holds", inner.leases_active.clone());
        to.register("lease_acquire", "Acquires, by result", acquire);
        to.register(
            "lease_acquire_seconds",
            "Time of one acquire call to the store",
            inner.acquire_seconds.clone(),
        );
        to.register("lease_wait_seconds", "Time requests waited for a key", inner.wait_seconds.clone());
        to.register("config_reloads", "Configurations read while running, by result", inner.reloads.clone());
        to.register("lease_heartbeat_failed", "Renewal calls that failed", inner.heartbeat_failed.clone());
        to.register("lease_lost", "Leases lost while their stream was open", inner.lost.clone());
        to.register("lease_expired", "Leases whose deadline passed unrenewed", inner.expired.clone());
        to.register("key_status", "1 for the status a key has now", inner.key_status.clone());
        to.register("key_cooldowns", "Cooldowns set, by reason", inner.cooldowns.clone());
        to.register("failovers", "Requests sent again with another key, by reason", inner.failovers.clone());
        to.register("scrubbed", "Echoes of a key that were masked in answers", inner.scrubbed.clone());
        to.register("queue_depth", "Requests waiting for a key", inner.queue_depth.clone());
        to.register("store_errors", "Store calls that failed", inner.store_errors.clone());
        to.register(
            "store_reconcile_diff",
            "What was found in the store that cannot be, and was repaired",
            inner.reconciled.clone(),
        );
        to.register("store_up", "1 while the store answers", inner.store_up.clone());
        // Named from the start, so that a graph of them begins at zero.
        for class in Class::RESTS {
            inner.cooldowns.get_or_create_owned(&ReasonLabel { reason: class.as_str() });
            inner.failovers.get_or_create_owned(&ReasonLabel { reason: class.as_str() });
        }
        Self(Arc::new(inner))
    }

    /// The Prometheus text (OpenMetrics).
    pub fn encode(&self) -> String {
        let mut text = String::new();
        // Writing to a `String` cannot fail; an encoder's own error would leave a partial page.
        let _ = prometheus_client::encoding::text::encode(&mut text, &self.0.registry);
        text
    }

    /// One request ended.
    pub fn request(
        &self,
        provider: Option<ProviderName>,
        mode: Mode,
        outcome: &'static str,
        total: Duration,
    ) {
        self.0.duration.observe(total.as_secs_f64());
        let labels = RequestLabels { provider: OfProvider(provider), mode: mode.as_str(), outcome };
        let known = self.0.requests_known.read().unwrap_or_else(PoisonError::into_inner);
        if let Some(counter) = known.get(&labels) {
            counter.inc();
            return;
        }
        drop(known);
        let counter = self.0.requests.get_or_create_owned(&labels);
        counter.inc();
        self.0.requests_known.write().unwrap_or_else(PoisonError::into_inner).insert(labels, counter);
    }

    /// lessor's own share of one request's time to the answer's head.
    pub fn overhead(&self, own: Duration) {
        self.0.overhead.observe(own.as_secs_f64());
    }

    /// One acquire call to the store.
    pub fn acquire(&self, asked: Asked, took: Duration) {
        self.0.acquire[asked as usize].inc();
        self.0.acquire_seconds.observe(took.as_secs_f64());
    }

    /// How long a request waited for its key.
    pub fn waited(&self, wait: Duration) {
        self.0.wait_seconds.observe(wait.as_secs_f64());
    }

    /// The gauge of live leases of one key; resolve once, then `inc` and `dec`.
    pub fn leases_active(&self, provider: &ProviderName, pool: &PoolName, key: &KeyId) -> Gauge {
        let labels =
            KeyLabels { provider: provider.to_string(), pool: pool.to_string(), key: key.to_string() };
        self.0.leases_active.get_or_create_owned(&labels)
    }

    /// Another configuration was taken, or not.
    pub fn reloaded(&self, taken: bool) {
        let result = if taken { "taken" } else { "refused" };
        self.0.reloads.get_or_create_owned(&ResultLabel { result }).inc();
    }

    /// A renewal call failed.
    pub fn heartbeat_failed(&self) {
        self.0.heartbeat_failed.inc();
    }

    /// A lease was lost.
    pub fn lost(&self) {
        self.0.lost.inc();
    }

    /// A lease's local deadline passed unrenewed.
    pub fn expired(&self) {
        self.0.expired.inc();
    }

    /// Replaces the statuses of all keys; one that is not among them has none.
    pub fn key_statuses(&self, keys: impl Iterator<Item = (ProviderName, KeyId, KeyStatus)>) {
        let labels = |(provider, key): &(ProviderName, KeyId), status: KeyStatus| StatusLabels {
            provider: provider.to_string(),
            key: key.to_string(),
            status: status.as_str(),
        };
        let mut shown = self.0.shown.lock().unwrap_or_else(PoisonError::into_inner);
        let mut now = HashSet::new();
        for (provider, key, status) in keys {
            let key = (provider, key);
            for each in KeyStatus::ALL {
                self.0.key_status.get_or_create(&labels(&key, each)).set(i64::from(each == status));
            }
            now.insert(key);
        }
        for gone in shown.difference(&now) {
            for each in KeyStatus::ALL {
                self.0.key_status.remove(&labels(gone, each));
            }
        }
        *shown = now;
    }

    /// A cooldown was set.
    pub fn cooldown(&self, reason: Class) {
        self.0.cooldowns.get_or_create(&ReasonLabel { reason: reason.as_str() }).inc();
    }

    /// A request goes on with another key.
    pub fn failover(&self, reason: Class) {
        self.0.failovers.get_or_create(&ReasonLabel { reason: reason.as_str() }).inc();
    }

    /// So many echoes of a key were masked.
    pub fn scrubbed(&self, provider: &ProviderName, place: Scrubbed, count: u64) {
        let labels = ScrubbedLabels { provider: provider.to_string(), r#where: place.as_str() };
        self.0.scrubbed.get_or_create(&labels).inc_by(count);
    }

    /// The gauge of waiting requests.
    pub fn queue_depth(&self) -> &Gauge {
        &self.0.queue_depth
    }

    /// A store call failed.
    pub fn store_error(&self) {
        self.0.store_errors.inc();
    }

    /// So many differences were found in the store, and repaired.
    pub fn reconciled(&self, differences: u64) {
        self.0.reconciled.inc_by(differences);
    }

    /// Whether the store answers.
    pub fn store_up(&self, up: bool) {
        self.0.store_up.set(u64::from(up));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_request_is_counted_once_under_what_it_was_also_where_that_was_counted_before() {
        let metrics = Metrics::new();
        let provider = ProviderName::parse("openai").ok();
        for (provider, outcome, times) in
            [(provider, "success", 3), (None, "success", 1), (None, "cancelled", 2)]
        {
            for _ in 0..times {
                metrics.request(provider.clone(), Mode::BaseUrl, outcome, Duration::ZERO);
            }
        }
        let page = metrics.encode();
        for (provider, outcome, times) in
            [("openai", "success", 3), ("none", "success", 1), ("none", "cancelled", 2)]
        {
            let line = format!(
                "lessor_requests_total{{provider=\"{provider}\",mode=\"base_url\",outcome=\"{outcome}\"}} {times}"
            );
            assert!(page.lines().any(|one| one == line), "{line} in {page}");
        }
    }
}

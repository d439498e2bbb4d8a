//! What the kubelet and Prometheus ask the injector, in plain HTTP on a port of its own.

use serde_json::json;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::SystemTime;

use http::{Method, Request, Response, StatusCode, header};
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;

use super::certificates::Current;
use super::reply::Reply;

/// Whether reviews can be answered, and why not.
#[derive(Debug)]
pub(super) struct Readiness(Mutex<State>);

#[derive(Debug)]
struct State {
    now: Result<(), String>,
    stopping: bool,
    /// Nobody else can connect.
    crowded: bool,
    /// What was told last, so that each change is told once.
    told: Option<String>,
}

impl Default for Readiness {
    fn default() -> Self {
        let state =
            State { now: Err("it has just begun".into()), stopping: false, crowded: false, told: None };
        Self(Mutex::new(state))
    }
}

impl Readiness {
    fn state(&self) -> std::sync::MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn set(&self, now: Result<(), String>) {
        let mut state = self.state();
        let said = match &now {
            Ok(()) => "ready".to_owned(),
            Err(why) => format!("not ready: {why}"),
        };
        if state.told.as_ref() != Some(&said) {
            tracing::info!("{said}");
            state.told = Some(said);
        }
        state.now = now;
    }

    /// Whether all places for connections are taken.
    pub(super) fn crowd(&self, crowded: bool) {
        if crowded {
            tracing::warn!(
                "no place for another connection is free; a NetworkPolicy can let API servers alone in"
            );
        }
        self.state().crowded = crowded;
    }

    /// From now on it is not ready, whatever else is said.
    pub(super) fn stop(&self) {
        self.state().stopping = true;
    }

    fn get(&self) -> Result<(), String> {
        let state = self.state();
        if state.stopping {
            return Err("it is stopping".into());
        }
        if state.crowded {
            return Err("no place for another connection is free; is it API servers that connect?".into());
        }
        state.now.clone()
    }
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct VerdictLabel {
    verdict: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct StatusLabel {
    status: u16,
}

/// What the injector counts.
pub(super) struct Meters {
    registry: Registry,
    reviews: Family<VerdictLabel, Counter>,
    refused: Family<StatusLabel, Counter>,
    ready: Gauge<u64, AtomicU64>,
    expires: Gauge<u64, AtomicU64>,
}

impl Default for Meters {
    fn default() -> Self {
        let mut meters = Self {
            registry: Registry::with_prefix("lessor_inject"),
            reviews: Family::default(),
            refused: Family::default(),
            ready: Gauge::default(),
            expires: Gauge::default(),
        };
        let to = &mut meters.registry;
        to.register("reviews", "Reviews answered, by what became of the pod", meters.reviews.clone());
        to.register("refused", "Requests that were no review, by status", meters.refused.clone());
        to.register("ready", "1 while reviews can be answered", meters.ready.clone());
        to.register(
            "certificate_expires_seconds",
            "When the certificate ends, as Unix time; 0: there is none",
            meters.expires.clone(),
        );
        meters
    }
}

impl Meters {
    pub(super) fn reviewed(&self, verdict: &'static str) {
        self.reviews.get_or_create_owned(&VerdictLabel { verdict }).inc();
    }

    pub(super) fn refused(&self, status: StatusCode) {
        self.refused.get_or_create_owned(&StatusLabel { status: status.as_u16() }).inc();
    }
}

/// The pages.
pub(super) struct Pages {
    pub(super) ready: Arc<Readiness>,
    pub(super) meters: Arc<Meters>,
    pub(super) current: Arc<Current>,
}

impl Pages {
    pub(super) fn answer<B>(&self, request: &Request<B>) -> Response<Reply> {
        if request.method() != Method::GET && request.method() != Method::HEAD {
            return page(StatusCode::METHOD_NOT_ALLOWED, "there is GET /healthz, /readyz, /metrics\n".into());
        }
        match request.uri().path() {
            "/healthz" => page(StatusCode::OK, "ok\n".into()),
            "/readyz" => match self.ready.get() {
                // As a sidecar says it, for `lessor ready` asks both.
                Ok(()) => page(StatusCode::OK, json!({ "ready": true, "reasons": [] }).to_string()),
                Err(why) => {
                    let said = json!({ "ready": false, "reasons": [why.clone()] });
                    page(StatusCode::SERVICE_UNAVAILABLE, said.to_string())
                }
            },
            "/metrics" => self.metrics(),
            _ => page(StatusCode::NOT_FOUND, "there is GET /healthz, /readyz, /metrics\n".into()),
        }
    }

    fn metrics(&self) -> Response<Reply> {
        self.meters.ready.set(u64::from(self.ready.get().is_ok()));
        let expires = self.current.get().and_then(|served| {
            served.not_after.duration_since(SystemTime::UNIX_EPOCH).ok().map(|since| since.as_secs())
        });
        self.meters.expires.set(expires.unwrap_or_default());
        let mut text = String::new();
        // Writing to a `String` cannot fail.
        let _ = prometheus_client::encoding::text::encode(&mut text, &self.meters.registry);
        let mut page = page(StatusCode::OK, text);
        let kind = "application/openmetrics-text; version=1.0.0; charset=utf-8";
        page.headers_mut().insert(header::CONTENT_TYPE, header::HeaderValue::from_static(kind));
        page
    }
}

/// A short answer for people.
pub(super) fn page(status: StatusCode, text: String) -> Response<Reply> {
    let mut response = Response::new(Reply::of(text));
    *response.status_mut() = status;
    let kind = header::HeaderValue::from_static("text/plain; charset=utf-8");
    response.headers_mut().insert(header::CONTENT_TYPE, kind);
    response
}

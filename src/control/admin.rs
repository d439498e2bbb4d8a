//! The admin API: two doors into one set of answers.
//!
//! The app in the same pod shares loopback, so reaching the TCP door proves nothing. It serves probes
//! and metrics to all who reach it; the rest needs the admin token, or, where none is set, may only
//! be read, and only on loopback. Reaching the Unix socket proves the user, so it serves everything.
//!
//! Web pages reach loopback too. So a request must name a host that is ours (a rebound name is none),
//! what a page elsewhere sent is refused, and no answer ever allows another origin to read it. No
//! secret can be in an answer: nothing here asks for one, save to compare the admin token.
//!
//! Everything ends: heads are bounded in time and size, answers in time, connections in number and
//! age. No handler reads a body, so none is ever collected.

use std::collections::BTreeMap;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use arc_swap::ArcSwap;
use axum::Router;
use axum::body::Body;
use axum::extract::{Path, Query, State};
use axum::response::{IntoResponse, Response};
use axum::routing::{delete, get, post};
use futures_util::future::join_all;
use http::header::{self, HeaderName, HeaderValue};
use http::{Method, Request, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tower::ServiceExt as _;

use crate::config::{Address, Config};
use crate::control::doctor::inside::{self, Patient, Wanted};
use crate::control::doctor::{Examined, Tools};
use crate::control::environment::Served;
use crate::metrics::Metrics;
use crate::model::{AppName, KeyId, KeyStatus, LeaseId, OwnerId, PoolName, ProviderName};
use crate::store::{KeyView, LeaseView, Snapshot, StatusChange, Store, StoreError, StoreTime};

mod gate;
mod socket;

use gate::{Door, admit};
pub use socket::{bind_unix, socket_path, socket_paths};

/// The bound of one answer.
pub const ANSWER: Duration = Duration::from_secs(10);
/// The bound of a check, which waits for the provider.
pub const CHECK: Duration = Duration::from_secs(30);
/// The bound of a whole request head, and of an idle connection.
const HEAD: Duration = Duration::from_secs(10);
/// The bound of what one probe or scrape waits for the store.
const PROBE: Duration = Duration::from_secs(1);
/// The bound of what any other answer waits for one call to the store.
const CALL: Duration = Duration::from_secs(5);
/// Bytes of one request head.
const HEAD_BYTES: usize = 16 * 1024;
/// Connections open at once, for each door.
const CONNECTIONS: usize = 256;
/// A connection's whole life: a peer that never reads its answer holds one no longer than this.
const CONNECTION: Duration = Duration::from_mins(5);
/// How long connections may run on after the stop.
const STOP: Duration = Duration::from_secs(3);

/// The store's clock when the answer was made, in ms: what the times in it are measured against.
pub const NOW: HeaderName = HeaderName::from_static("x-lessor-now-ms");
/// Carries the code of an error.
const ERROR: HeaderName = HeaderName::from_static("x-lessor-error");

/// What the 404 says.
const WHAT_EXISTS: &str = "GET /healthz, /readyz, /metrics, /v1/status, /v1/pools, /v1/keys, /v1/leases, /v1/apps, /v1/ca, \
     /v1/environment; POST /v1/keys/{provider}/{id}/disable, /enable, /check, /clear; \
     POST /v1/apps/{name}/revoke, /restore; DELETE /v1/leases/{id}; POST /v1/doctor";

/// What the admin asks of the running proxy.
pub trait Hands: Send + Sync + 'static {
    /// Runs the provider's check request with this very key, classifies the answer and applies it.
    fn check(
        &self,
        provider: &ProviderName,
        key: &KeyId,
    ) -> Pin<Box<dyn Future<Output = CheckResult> + Send>>;
    /// The process's own view: a person switched the key on or off.
    fn switched(&self, provider: &ProviderName, key: &KeyId, on: bool);
    /// What an examination borrows from the rooms.
    fn doctors_tools(&self) -> Tools;
    /// How many requests wait for a key.
    fn waiting(&self) -> usize;
    /// How many leases this process holds.
    fn live(&self) -> usize;
    /// The apps that may call, or `anonymous`.
    fn apps(&self) -> Vec<AppSeen>;
    /// A person takes an app's place away, which ends what it has under way, or gives it back.
    fn revoke_app(&self, app: &AppName, revoked: bool);
    /// The local CA; `None` where nothing is intercepted.
    fn ca(&self) -> Option<CaSeen>;
}

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
    /// What the answer says about the key.
    pub class: String,
    /// For people.
    pub message: String,
}

/// What the admin API knows.
pub struct AdminState {
    /// What lessor runs by now.
    pub config: Arc<ArcSwap<Config>>,
    /// Where pools and leases live.
    pub store: Arc<dyn Store>,
    /// This sidecar, as leases in the store name it.
    pub owner: OwnerId,
    /// What is counted.
    pub metrics: Metrics,
    /// The running proxy.
    pub hands: Arc<dyn Hands>,
    /// No new work is taken.
    pub draining: Arc<AtomicBool>,
    /// The proxy's listeners, as really bound.
    pub proxy_addresses: Vec<Address>,
    /// When the process started.
    pub started: Instant,
    /// lessor's version.
    pub version: &'static str,
}

/// Serves the TCP door until told to stop.
pub async fn serve_tcp(listener: tokio::net::TcpListener, state: Arc<AdminState>, stop: CancellationToken) {
    let rooms = Rooms::new(state, stop);
    while let Some(place) = rooms.place().await {
        tokio::select! {
            () = rooms.stop.cancelled() => break,
            next = listener.accept() => match next {
                Ok((stream, peer)) => {
                    // The address that was really reached, for `0.0.0.0` is nobody's host.
                    let Ok(here) = stream.local_addr() else { continue };
                    rooms.serve(stream, Door::Tcp { here, peer }, place);
                }
                Err(cause) => rooms.rest(&cause).await,
            },
        }
    }
    drop(listener);
    rooms.close().await;
}

/// Serves the Unix socket until told to stop, and takes its file away then.
pub async fn serve_unix(listener: tokio::net::UnixListener, state: Arc<AdminState>, stop: CancellationToken) {
    let file = socket::OwnFile::of(&listener);
    let rooms = Rooms::new(state, stop);
    while let Some(place) = rooms.place().await {
        tokio::select! {
            () = rooms.stop.cancelled() => break,
            next = listener.accept() => match next {
                Ok((stream, _)) => {
                    // The file's mode keeps others out; this holds also where somebody loosened it.
                    let same_user = stream
                        .peer_cred()
                        .is_ok_and(|peer| peer.uid() == rustix::process::geteuid().as_raw());
                    rooms.serve(stream, Door::Unix { same_user }, place);
                }
                Err(cause) => rooms.rest(&cause).await,
            },
        }
    }
    drop(listener);
    if let Some(file) = file {
        file.remove();
    }
    rooms.close().await;
}

/// The connections of one door.
struct Rooms {
    state: Arc<AdminState>,
    router: Router,
    stop: CancellationToken,
    places: Arc<Semaphore>,
    open: TaskTracker,
}

impl Rooms {
    fn new(state: Arc<AdminState>, stop: CancellationToken) -> Self {
        let router = routes(state.clone());
        let places = Arc::new(Semaphore::new(CONNECTIONS));
        Self { state, router, stop, places, open: TaskTracker::new() }
    }

    /// A place for one more connection, before it is accepted; `None` when told to stop.
    async fn place(&self) -> Option<OwnedSemaphorePermit> {
        tokio::select! {
            () = self.stop.cancelled() => None,
            place = self.places.clone().acquire_owned() => place.ok(),
        }
    }

    /// After a failed accept. Most often there is no file descriptor left: trying again at once would
    /// only spin.
    async fn rest(&self, cause: &std::io::Error) {
        tracing::warn!(%cause, "admin connection could not be accepted");
        tokio::time::sleep(Duration::from_millis(200)).await;
    }

    fn serve<S>(&self, stream: S, door: Door, place: OwnedSemaphorePermit)
    where
        S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let (state, router, stop) = (self.state.clone(), self.router.clone(), self.stop.clone());
        let service = hyper::service::service_fn(move |req| {
            let (state, router) = (state.clone(), router.clone());
            async move { Ok::<_, std::convert::Infallible>(answer(&state, router, door, req).await) }
        });
        self.open.spawn(async move {
            let _place = place;
            let mut http = hyper::server::conn::http1::Builder::new();
            http.timer(TokioTimer::new()).header_read_timeout(HEAD).max_buf_size(HEAD_BYTES);
            let connection = http.serve_connection(TokioIo::new(stream), service);
            let mut connection = std::pin::pin!(connection);
            // A connection's error is its peer's affair: gone, too slow, or no HTTP.
            tokio::select! {
                _ = &mut connection => return,
                () = stop.cancelled() => {}
                () = tokio::time::sleep(CONNECTION) => {}
            }
            connection.as_mut().graceful_shutdown();
            let _ = tokio::time::timeout(CHECK, connection).await;
        });
    }

    /// Lets answers under way be finished, for a moment.
    async fn close(self) {
        self.open.close();
        let _ = tokio::time::timeout(STOP, self.open.wait()).await;
    }
}

/// One request: may it, and then within its bound.
async fn answer<B>(state: &AdminState, router: Router, door: Door, req: Request<B>) -> Response
where
    B: http_body::Body<Data = bytes::Bytes> + Send + 'static,
    B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
{
    let (parts, body) = req.into_parts();
    if let Err(refusal) = admit(&state.config.load(), door, &parts) {
        return refusal.into_response();
    }
    let bound = match parts.uri.path() {
        "/v1/doctor" => inside::BOUND,
        path if parts.method == Method::POST && path.ends_with("/check") => CHECK,
        _ => ANSWER,
    };
    let answer = router.oneshot(Request::from_parts(parts, Body::new(body)));
    let mut answer = match tokio::time::timeout(bound, answer).await {
        Ok(Ok(answer)) => answer,
        Ok(Err(never)) => match never {},
        Err(_) => Refusal::new(
            StatusCode::GATEWAY_TIMEOUT,
            "upstream_timeout",
            format!("no answer within {bound:?}; what was asked for may still have been done"),
        )
        .into_response(),
    };
    let headers = answer.headers_mut();
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
    headers.insert(header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    answer
}

fn routes(state: Arc<AdminState>) -> Router {
    Router::new()
        .route("/healthz", get(async || text("ok\n")))
        .route("/readyz", get(readyz))
        .route("/metrics", get(metrics))
        .route("/v1/status", get(status))
        .route("/v1/pools", get(pools))
        .route("/v1/keys", get(keys))
        .route("/v1/leases", get(leases))
        .route("/v1/apps", get(apps))
        .route("/v1/apps/{name}/revoke", post(revoke_app))
        .route("/v1/apps/{name}/restore", post(restore_app))
        .route("/v1/ca", get(ca))
        .route("/v1/environment", get(environment))
        .route("/v1/keys/{provider}/{id}/disable", post(disable))
        .route("/v1/keys/{provider}/{id}/enable", post(enable))
        .route("/v1/keys/{provider}/{id}/clear", post(clear))
        .route("/v1/keys/{provider}/{id}/check", post(check))
        .route("/v1/leases/{id}", delete(revoke))
        .route("/v1/doctor", post(examine))
        .fallback(async || {
            Refusal::new(StatusCode::NOT_FOUND, "not_found", format!("there is {WHAT_EXISTS}"))
        })
        .method_not_allowed_fallback(async || {
            let message = format!("there is {WHAT_EXISTS}");
            Refusal::new(StatusCode::METHOD_NOT_ALLOWED, "method_denied", message)
        })
        .with_state(state)
}

type Asked = State<Arc<AdminState>>;
type Answered = Result<Response, Refusal>;

/// Why not to send work here; an empty list is ready.
#[derive(Serialize)]
struct Ready {
    ready: bool,
    reasons: Vec<String>,
}

async fn readyz(State(state): Asked) -> Response {
    let reasons = state.reasons().await;
    let status = if reasons.is_empty() { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    state.json(status, &Ready { ready: reasons.is_empty(), reasons })
}

async fn metrics(State(state): Asked) -> Response {
    // A store that is down must not blind whoever watches: then the page has what was last known.
    let seen = state.snapshots(PROBE).await;
    state.metrics.store_up(seen.is_ok());
    for key in seen.iter().flat_map(BTreeMap::values).flat_map(|seen| &seen.keys) {
        state.metrics.key_status(&key.provider, &key.id, key.status);
    }
    let kind = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    ([(header::CONTENT_TYPE, kind)], state.metrics.encode()).into_response()
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
    pub keys: Vec<KeyView>,
    /// All live leases.
    pub leases: Vec<LeaseSeen>,
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
    /// How many keys it has.
    pub keys: usize,
    /// How many of them may be lent now.
    pub available: usize,
    /// Live leases on them.
    pub in_use: u32,
    /// Their caps together.
    pub max_concurrent_uses: u32,
}

async fn status(State(state): Asked) -> Answered {
    let (seen, reasons) = tokio::join!(state.snapshots(CALL), state.reasons());
    let (seen, error) = match seen {
        Ok(seen) => (seen, None),
        Err(cause) => (BTreeMap::new(), Some(cause)),
    };
    let page = Status {
        version: state.version.into(),
        uptime_seconds: state.started.elapsed().as_secs(),
        ready: reasons.is_empty(),
        reasons,
        draining: state.draining.load(Ordering::Relaxed),
        config: state.config.load().origin.clone(),
        store: StoreSeen {
            kind: state.store.kind().into(),
            url: state.config.load().store.url.to_string(),
            up: error.is_none(),
            error: error.as_ref().map(ToString::to_string),
        },
        owner: state.owner.clone(),
        proxy: state.proxy_addresses.iter().map(ToString::to_string).collect(),
        live: state.hands.live(),
        waiting: state.hands.waiting(),
        pools: state.pools(&seen),
        keys: seen.values().flat_map(|seen| seen.keys.clone()).collect(),
        leases: state.leases(&seen),
    };
    let Some(cause) = error else { return Ok(state.json(StatusCode::OK, &page)) };
    // The shape of every other refusal, and beside it what is known without the store.
    let refusal = Refusal::from(cause);
    let mut answer = state.json(refusal.status, &Down { error: refusal.error(), page: &page });
    answer.headers_mut().insert(ERROR, HeaderValue::from_static(refusal.code));
    Ok(answer)
}

/// A status without what only the store knows.
#[derive(Serialize)]
struct Down<'a> {
    error: serde_json::Value,
    #[serde(flatten)]
    page: &'a Status,
}

async fn pools(State(state): Asked) -> Answered {
    let seen = state.snapshots(CALL).await?;
    Ok(state.json(StatusCode::OK, &serde_json::json!({ "pools": state.pools(&seen) })))
}

async fn keys(State(state): Asked) -> Answered {
    let seen = state.snapshots(CALL).await?;
    let keys: Vec<_> = seen.values().flat_map(|seen| &seen.keys).collect();
    Ok(state.json(StatusCode::OK, &serde_json::json!({ "keys": keys })))
}

async fn leases(State(state): Asked) -> Answered {
    let seen = state.snapshots(CALL).await?;
    Ok(state.json(StatusCode::OK, &serde_json::json!({ "leases": state.leases(&seen) })))
}

async fn ca(State(state): Asked) -> Answered {
    let seen = state.hands.ca().ok_or_else(|| {
        let message = "there is no local CA: proxy.intercept is false".into();
        Refusal::new(StatusCode::NOT_FOUND, "no_ca", message)
    })?;
    Ok(state.json(StatusCode::OK, &seen))
}

/// What a child must know of this sidecar: asks no store, so that a child starts while that is away.
async fn environment(State(state): Asked) -> Response {
    let socket = state.proxy_addresses.first().map(socket_path);
    state.json(StatusCode::OK, &Served::new(&state.config.load(), &state.proxy_addresses, socket.as_deref()))
}

async fn disable(state: Asked, path: Path<(String, String)>) -> Answered {
    change(state, path, StatusChange::Disable, Some(false)).await
}

async fn enable(state: Asked, path: Path<(String, String)>) -> Answered {
    change(state, path, StatusChange::Enable, Some(true)).await
}

async fn clear(state: Asked, path: Path<(String, String)>) -> Answered {
    change(state, path, StatusChange::Clear, None).await
}

/// Applies a person's word to the store, then to the process's own view; answers with the key. The store
/// knows which keys there are: another sidecar's, that the lists show too, is changed as well as an own.
async fn change(
    State(state): Asked,
    Path((provider, key)): Path<(String, String)>,
    change: StatusChange,
    on: Option<bool>,
) -> Answered {
    let provider = state.find_provider(&provider)?;
    let key = KeyId::parse(&key).map_err(|_| state.unknown_key(&provider, &key))?;
    // In a task of its own: a caller that leaves half-way must not leave store and process apart.
    let done = tokio::spawn({
        let (state, provider, key) = (state.clone(), provider.clone(), key.clone());
        async move {
            let what = match on {
                Some(true) => "enabled",
                Some(false) => "disabled",
                None => "cleared",
            };
            let change = state.store.set_status(provider.clone(), key.clone(), change);
            let known = bounded(CALL, change).await?;
            if known {
                tracing::info!(%provider, %key, what, "a key was changed by hand");
            }
            if let (true, Some(on)) = (known, on) {
                state.hands.switched(&provider, &key, on);
            }
            Ok::<_, StoreError>(known)
        }
    });
    let known = match done.await {
        Ok(known) => known?,
        Err(_) => return Err(Refusal::internal()),
    };
    let seen = bounded(CALL, state.store.snapshot(provider.clone())).await?;
    match seen.keys.iter().find(|seen| known && seen.id == key) {
        Some(view) => Ok(state.json(StatusCode::OK, view)),
        None => Err(state.unknown_key(&provider, key.as_str())),
    }
}

async fn check(State(state): Asked, Path((provider, key)): Path<(String, String)>) -> Answered {
    let (provider, key) = state.find(&provider, &key)?;
    let result = state.hands.check(&provider, &key).await;
    Ok(state.json(StatusCode::OK, &result))
}

async fn apps(State(state): Asked) -> Response {
    state.json(StatusCode::OK, &serde_json::json!({ "apps": state.hands.apps() }))
}

async fn revoke_app(state: Asked, path: Path<String>) -> Answered {
    change_app(&state, &path, true)
}

async fn restore_app(state: Asked, path: Path<String>) -> Answered {
    change_app(&state, &path, false)
}

/// Twice is as good as once. It is this process's own word, so no store is asked.
fn change_app(state: &AdminState, name: &str, revoked: bool) -> Answered {
    let find = || state.hands.apps().into_iter().find(|app| app.name.as_str() == name);
    let unknown = || {
        let known = listed(state.hands.apps().iter().map(|app| &app.name));
        let message = format!("no such app; there is {known}");
        Refusal::new(StatusCode::NOT_FOUND, "unknown_app", message)
    };
    let app = find().ok_or_else(unknown)?.name;
    state.hands.revoke_app(&app, revoked);
    tracing::info!(%app, what = if revoked { "revoked" } else { "restored" }, "an app was changed by hand");
    Ok(state.json(StatusCode::OK, &find().ok_or_else(unknown)?))
}

/// The inside half of `lessor doctor`.
async fn examine(State(state): Asked, Query(wanted): Query<Wanted>) -> Answered {
    if let Some(provider) = &wanted.provider {
        state.find_provider(provider.as_str())?;
    }
    let patient = Patient {
        config: state.config.load_full(),
        store: Ok(state.store.clone()),
        proxy: state.proxy_addresses.first().cloned(),
        tools: state.hands.doctors_tools(),
    };
    let checks = inside::examine(patient, wanted).await;
    Ok(state.json(StatusCode::OK, &Examined { checks }))
}

async fn revoke(State(state): Asked, Path(id): Path<String>) -> Answered {
    let unknown = || {
        let message = "no such live lease; GET /v1/leases lists them".into();
        Refusal::new(StatusCode::NOT_FOUND, "unknown_lease", message)
    };
    let lease = LeaseId(id.parse().map_err(|_| unknown())?);
    // A lease does not say whose keys it is of, and may be another sidecar's. All at once, so that many
    // providers of a slow store take no longer than one.
    let config = state.config.load_full();
    let asked = config
        .providers
        .keys()
        .map(async |provider| (provider, bounded(CALL, state.store.revoke(provider.clone(), lease)).await));
    let answers = join_all(asked).await;
    if let Some((provider, _)) = answers.iter().find(|(_, answer)| matches!(answer, Ok(true))) {
        tracing::info!(%provider, lease = %lease, "a lease was revoked by hand");
        let answer = serde_json::json!({ "id": lease, "provider": provider, "revoked": true });
        return Ok(state.json(StatusCode::OK, &answer));
    }
    // Only who heard every provider's no may say that there is none.
    for (_, answer) in answers {
        answer?;
    }
    Err(unknown())
}

impl AdminState {
    /// Why not to send work here. A key that only rests comes back by itself and does not count
    /// against it: taking the pod out of service would not bring it back sooner.
    async fn reasons(&self) -> Vec<String> {
        let mut reasons = Vec::new();
        if self.draining.load(Ordering::Relaxed) {
            reasons.push("shutting_down: open streams are being finished".into());
        }
        let looked = async {
            self.store.ping().await?;
            self.snapshots(PROBE).await
        };
        match bounded(PROBE, looked).await {
            Err(cause) => reasons.push(format!("store_unavailable: {cause}")),
            Ok(seen) => reasons.extend(self.no_key_reason(&seen)),
        }
        reasons
    }

    fn no_key_reason(&self, seen: &BTreeMap<ProviderName, Snapshot>) -> Option<String> {
        let config = self.config.load();
        if config.keys.is_empty() {
            return Some("key_unavailable: no key is configured".into());
        }
        let mut refused = Vec::new();
        for key in &config.keys {
            let view = seen.get(&key.provider).and_then(|seen| seen.keys.iter().find(|it| it.id == key.id));
            let status = view.map_or(KeyStatus::Pending, |view| view.status);
            if !matches!(status, KeyStatus::Invalid | KeyStatus::Disabled | KeyStatus::Pending) {
                return None;
            }
            refused.push(format!("{}/{} is {}", key.provider, key.id, status.as_str()));
        }
        let more = refused.len().saturating_sub(8);
        refused.truncate(8);
        let more = if more > 0 { format!(", and {more} more") } else { String::new() };
        Some(format!("key_unavailable: no key is usable: {}{more}", refused.join(", ")))
    }

    /// All providers' keys and leases, or the first failure.
    async fn snapshots(&self, bound: Duration) -> Result<BTreeMap<ProviderName, Snapshot>, StoreError> {
        let config = self.config.load_full();
        let asked = config.providers.keys().map(|provider| async move {
            let seen = bounded(bound, self.store.snapshot(provider.clone())).await?;
            Ok((provider.clone(), seen))
        });
        join_all(asked).await.into_iter().collect()
    }

    fn pools(&self, seen: &BTreeMap<ProviderName, Snapshot>) -> Vec<PoolView> {
        let config = self.config.load();
        let mut pools: BTreeMap<(&ProviderName, &PoolName), PoolView> = BTreeMap::new();
        for key in seen.values().flat_map(|seen| &seen.keys) {
            let pool = pools.entry((&key.provider, &key.pool)).or_insert_with(|| PoolView {
                provider: key.provider.clone(),
                pool: key.pool.clone(),
                fallback: config.pools.get(&key.pool).cloned().unwrap_or_default(),
                keys: 0,
                available: 0,
                in_use: 0,
                max_concurrent_uses: 0,
            });
            pool.keys += 1;
            pool.available += usize::from(key.status == KeyStatus::Available);
            pool.in_use = pool.in_use.saturating_add(key.in_use);
            pool.max_concurrent_uses = pool.max_concurrent_uses.saturating_add(key.max_concurrent_uses);
        }
        pools.into_values().collect()
    }

    /// All live leases, and which are this sidecar's own.
    fn leases(&self, seen: &BTreeMap<ProviderName, Snapshot>) -> Vec<LeaseSeen> {
        let all = seen.values().flat_map(|seen| seen.leases.iter().cloned());
        all.map(|lease| LeaseSeen { own: lease.owner == self.owner, lease }).collect()
    }

    /// A provider that this sidecar serves.
    fn find_provider(&self, provider: &str) -> Result<ProviderName, Refusal> {
        let config = self.config.load();
        config.providers.get_key_value(provider).map(|(provider, _)| provider.clone()).ok_or_else(|| {
            let message = format!("no such provider; there is {}", listed(config.providers.keys()));
            Refusal::new(StatusCode::NOT_FOUND, "unknown_provider", message)
        })
    }

    /// A key that this sidecar serves, and so has the secret of.
    fn find(&self, provider: &str, key: &str) -> Result<(ProviderName, KeyId), Refusal> {
        let provider = self.find_provider(provider)?;
        let keys = &self.config.load().keys;
        match keys.iter().find(|it| it.provider == provider && it.id.as_str() == key) {
            Some(key) => Ok((provider, key.id.clone())),
            None => Err(self.unknown_key(&provider, key)),
        }
    }

    fn unknown_key(&self, provider: &ProviderName, key: &str) -> Refusal {
        let config = self.config.load();
        let ids = config.keys.iter().filter(|key| key.provider == *provider).map(|key| &key.id);
        let message = format!("{provider} has no key {key:?} here; there is {}", listed(ids));
        Refusal::new(StatusCode::NOT_FOUND, "unknown_key", message)
    }

    fn json(&self, status: StatusCode, value: &impl Serialize) -> Response {
        let StoreTime(now) = self.store.now();
        let mut answer = json(status, value);
        answer.headers_mut().insert(NOW, HeaderValue::from(now));
        answer
    }
}

/// Waits for the store, but not for ever: a store's own bound may be longer than a probe's.
async fn bounded<T>(
    bound: Duration,
    call: impl Future<Output = Result<T, StoreError>>,
) -> Result<T, StoreError> {
    tokio::time::timeout(bound, call).await.unwrap_or(Err(StoreError::TimedOut(bound)))
}

fn listed<T: ToString>(names: impl Iterator<Item = T>) -> String {
    let names: Vec<_> = names.map(|name| name.to_string()).collect();
    if names.is_empty() { "none".into() } else { names.join(", ") }
}

fn text(page: &'static str) -> Response {
    ([(header::CONTENT_TYPE, "text/plain; charset=utf-8")], page).into_response()
}

fn json(status: StatusCode, value: &impl Serialize) -> Response {
    match serde_json::to_vec(value) {
        Ok(page) => {
            let kind = HeaderValue::from_static("application/json");
            (status, [(header::CONTENT_TYPE, kind)], page).into_response()
        }
        Err(_) => Refusal::internal().into_response(),
    }
}

/// The admin's own no, in the shape of all of lessor's.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Refusal {
    status: StatusCode,
    code: &'static str,
    message: String,
}

impl Refusal {
    fn new(status: StatusCode, code: &'static str, message: String) -> Self {
        Self { status, code, message }
    }

    /// The body's `error`.
    fn error(&self) -> serde_json::Value {
        serde_json::json!({
            "message": self.message, "type": "lessor_error", "code": self.code, "param": null,
        })
    }

    fn internal() -> Self {
        let message = "lessor made a mistake; its log says where".into();
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, "internal", message)
    }
}

impl From<StoreError> for Refusal {
    fn from(cause: StoreError) -> Self {
        let message = format!("{cause}; no key is lent until it answers again");
        Self::new(StatusCode::SERVICE_UNAVAILABLE, "store_unavailable", message)
    }
}

impl IntoResponse for Refusal {
    fn into_response(self) -> Response {
        let error = serde_json::json!({ "error": self.error() });
        let kind = HeaderValue::from_static("application/json");
        let mut answer = (self.status, [(header::CONTENT_TYPE, kind)], error.to_string()).into_response();
        answer.headers_mut().insert(ERROR, HeaderValue::from_static(self.code));
        if self.status == StatusCode::UNAUTHORIZED {
            let scheme = HeaderValue::from_static("Bearer realm=\"lessor admin\"");
            answer.headers_mut().insert(header::WWW_AUTHENTICATE, scheme);
        }
        answer
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a test that fails may panic
pub(super) mod tests;

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
//! Everything ends: heads are bounded in time and size, answers in time, also that in which they are taken,
//! connections in number, by address, and in age. No handler reads a body, so none is ever collected.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use arc_swap::ArcSwap;
use axum::Router;
use axum::body::Body;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use axum::routing::{delete, get, post};
use http::header::{self, HeaderName, HeaderValue};
use http::{Method, Request, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tower::ServiceExt as _;

use crate::config::{Address, Config, OnDisk};
use crate::control::doctor::{Tools, inside};
use crate::events::Events;
use crate::metrics::Metrics;
use crate::model::{AppName, KeyId, OwnerId, ProviderName};
use crate::store::{Snapshot, Store, StoreError, StoreTime};

mod answers;
mod changes;
mod events;
mod gate;
mod not_lent;
mod pages;
mod patience;
mod peers;
mod seen;
mod socket;

use answers::{Refusal, described, text};
use events::Following;
use gate::{Door, admit};
pub use not_lent::not_lent;
use patience::Patience;
use peers::{Peer, Peers};
pub use seen::{
    AppSeen, CaSeen, CheckResult, GraceSeen, KeySeen, LeaseSeen, PoolView, RankSeen, RankingSeen, Status,
    StoreSeen, TermsSeen,
};
pub use socket::{bind_unix, socket_path, socket_paths};

/// The bound of one answer.
pub const ANSWER: Duration = Duration::from_secs(10);
/// The bound of a check, which waits for the provider.
pub const CHECK: Duration = Duration::from_secs(30);
/// The bound of a whole request head, and of an idle connection.
const HEAD: Duration = Duration::from_secs(5);
/// The bound of what one probe or scrape waits for the store.
const PROBE: Duration = Duration::from_secs(1);
/// The bound of what any other answer waits for one call to the store.
const CALL: Duration = Duration::from_secs(5);
/// Bytes of one request head.
const HEAD_BYTES: usize = 16 * 1024;
/// Connections open at once, for each door.
const CONNECTIONS: usize = 256;
/// What the system keeps of an answer that a peer of the TCP door has not taken: left to itself it is megabytes.
const UNTAKEN: usize = 128 * 1024;
/// A connection's whole life: a peer that never reads its answer holds one no longer than this. One that
/// carries a stream of events lives as long as that.
const CONNECTION: Duration = Duration::from_mins(5);
/// How many may follow events at once, through both doors together.
const FOLLOWERS: usize = 64;
/// How long connections may run on after the stop.
const STOP: Duration = Duration::from_secs(3);

/// The store's clock when the answer was made, in ms: what the times in it are measured against.
pub const NOW: HeaderName = HeaderName::from_static("x-lessor-now-ms");
/// The proxy listeners of the sidecar that answers, for whoever may have reached another than the one he means.
pub const PROXY: HeaderName = HeaderName::from_static("x-lessor-proxy");
/// What the 404 says.
const WHAT_EXISTS: &str = "GET /healthz, /readyz, /metrics, /openapi.json, /v1/status, /v1/pools, /v1/keys, /v1/leases, /v1/apps, \
     /v1/events, /v1/ca, /v1/environment; POST /v1/keys/{provider}/{id}/disable, /enable, /drain, /check, /clear; \
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
    /// Why the store lends no key, as the last request for one saw and one more try confirms.
    fn lends_not(&self) -> Pin<Box<dyn Future<Output = Option<StoreError>> + Send + '_>>;
    /// What the store holds, as it was asked for then, after a person changed something.
    fn saw(&self, provider: &ProviderName, seen: &Snapshot, asked: StoreTime);
    /// What an examination borrows from the rooms.
    fn doctors_tools(&self) -> Tools;
    /// How many requests wait for a key.
    fn waiting(&self) -> usize;
    /// Why keys are ranked as they are.
    fn ranking(&self) -> RankingSeen;
    /// How many leases this process holds.
    fn live(&self) -> usize;
    /// The apps that may call, or `anonymous`.
    fn apps(&self) -> Vec<AppSeen>;
    /// A person takes an app's place away, which ends what it has under way, or gives it back.
    fn revoke_app(&self, app: &AppName, revoked: bool);
    /// The local CA; `None` where nothing is intercepted.
    fn ca(&self) -> Option<CaSeen>;
}

/// What the admin API knows.
pub struct AdminState {
    /// What lessor runs by now.
    pub config: Arc<ArcSwap<Config>>,
    /// How the file on disk stands to that.
    pub on_disk: Arc<ArcSwap<OnDisk>>,
    /// Where pools and leases live.
    pub store: Arc<dyn Store>,
    /// This sidecar, as leases in the store name it.
    pub owner: OwnerId,
    /// What is counted.
    pub metrics: Metrics,
    /// What happens.
    pub events: Events,
    /// The running proxy.
    pub hands: Arc<dyn Hands>,
    /// No new work is to be sent here.
    pub draining: Arc<AtomicBool>,
    /// Cancelled by `POST /quit`; `None` where there is no such path.
    pub quit: Option<CancellationToken>,
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
    let peers = Peers::new(CONNECTIONS);
    loop {
        tokio::select! {
            () = rooms.stop.cancelled() => break,
            next = listener.accept() => match next {
                Ok((stream, peer)) => {
                    // The address that was really reached, for `0.0.0.0` is nobody's host.
                    let Ok(here) = stream.local_addr() else { continue };
                    // Not held back by waiting: whoever comes next may be another.
                    let Some(place) = peers.enter(Peer::of(here.ip(), peer.ip())) else { continue };
                    // A system that refuses has its own bound.
                    let _ = socket2::SockRef::from(&stream).set_send_buffer_size(UNTAKEN);
                    let taken = place.taken.clone();
                    rooms.serve(stream, Door::Tcp { here, peer }, (place, taken));
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
                    rooms.serve(stream, Door::Unix { same_user }, (place, CancellationToken::new()));
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
    /// Places for those who follow events: who fills those of loopback takes none of the socket's.
    followers: Arc<Semaphore>,
    open: TaskTracker,
}

impl Rooms {
    fn new(state: Arc<AdminState>, stop: CancellationToken) -> Self {
        let router = routes(state.clone());
        let places = Arc::new(Semaphore::new(CONNECTIONS));
        let followers = Arc::new(Semaphore::new(FOLLOWERS));
        Self { state, router, stop, places, followers, open: TaskTracker::new() }
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

    /// Serves one connection, which holds its place until it ends, or until that is taken from it.
    fn serve<S, P>(&self, stream: S, door: Door, (place, taken): (P, CancellationToken))
    where
        P: Send + 'static,
        S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let (state, router, stop) = (self.state.clone(), self.router.clone(), self.stop.clone());
        let streams = Arc::new(AtomicBool::new(false));
        let following =
            Following { stop: stop.clone(), streams: streams.clone(), places: self.followers.clone() };
        let service = hyper::service::service_fn(move |mut req: Request<hyper::body::Incoming>| {
            let (state, router) = (state.clone(), router.clone());
            req.extensions_mut().insert(following.clone());
            async move { Ok::<_, std::convert::Infallible>(answer(&state, router, door, req).await) }
        });
        self.open.spawn(async move {
            let _place = place;
            let mut http = hyper::server::conn::http1::Builder::new();
            http.timer(TokioTimer::new()).header_read_timeout(HEAD).max_buf_size(HEAD_BYTES);
            let connection = http.serve_connection(TokioIo::new(Patience::new(stream)), service);
            let mut connection = std::pin::pin!(connection);
            // A connection's error is its peer's affair: gone, too slow, or no HTTP.
            tokio::select! {
                _ = &mut connection => return,
                () = taken.cancelled() => return,
                () = stop.cancelled() => {}
                () = end_of_life(&streams) => {}
            }
            connection.as_mut().graceful_shutdown();
            tokio::select! {
                _ = tokio::time::timeout(CHECK, connection) => {}
                () = taken.cancelled() => {}
            }
        });
    }

    /// Lets answers under way be finished, for a moment.
    async fn close(self) {
        self.open.close();
        let _ = tokio::time::timeout(STOP, self.open.wait()).await;
    }
}

/// Resolves when a connection has lived long enough.
async fn end_of_life(streams: &AtomicBool) {
    loop {
        tokio::time::sleep(CONNECTION).await;
        if !streams.load(Ordering::Relaxed) {
            return;
        }
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
    let proxy = state.proxy_addresses.iter().map(ToString::to_string).collect::<Vec<_>>().join(",");
    // A socket's path may hold what no header can.
    if let Ok(proxy) = HeaderValue::try_from(proxy) {
        headers.insert(PROXY, proxy);
    }
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
    headers.insert(header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    answer
}

fn routes(state: Arc<AdminState>) -> Router {
    let quits = state.quit.is_some();
    let there_is = move || format!("there is {WHAT_EXISTS}{}", if quits { "; POST /quit" } else { "" });
    let quit = if quits { Router::new().route("/quit", post(changes::quit)) } else { Router::new() };
    Router::new()
        .route("/healthz", get(async || text("ok\n")))
        .route("/readyz", get(pages::readyz))
        .route("/metrics", get(pages::metrics))
        .route("/openapi.json", get(async || described()))
        .route("/v1/status", get(pages::status))
        .route("/v1/pools", get(pages::pools))
        .route("/v1/keys", get(pages::keys))
        .route("/v1/leases", get(pages::leases))
        .route("/v1/apps", get(changes::apps))
        .route("/v1/events", get(events::events))
        .route("/v1/apps/{name}/revoke", post(changes::revoke_app))
        .route("/v1/apps/{name}/restore", post(changes::restore_app))
        .route("/v1/ca", get(pages::ca))
        .route("/v1/environment", get(pages::environment))
        .route("/v1/keys/{provider}/{id}/disable", post(changes::disable))
        .route("/v1/keys/{provider}/{id}/drain", post(changes::drain))
        .route("/v1/keys/{provider}/{id}/enable", post(changes::enable))
        .route("/v1/keys/{provider}/{id}/clear", post(changes::clear))
        .route("/v1/keys/{provider}/{id}/check", post(changes::check))
        .route("/v1/leases/{id}", delete(changes::revoke))
        .route("/v1/doctor", post(changes::examine))
        .merge(quit)
        .fallback(async move || Refusal::new(StatusCode::NOT_FOUND, "not_found", there_is()))
        .method_not_allowed_fallback(async move || {
            Refusal::new(StatusCode::METHOD_NOT_ALLOWED, "method_denied", there_is())
        })
        .with_state(state)
}

type Asked = State<Arc<AdminState>>;
type Answered = Result<Response, Refusal>;

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

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a test that fails may panic
pub(super) mod tests;

//! The way to the provider. Bodies stream both ways and are never collected; every chunk goes on as it
//! comes. TLS is always verified; redirects are passed on, never followed; HTTP/1.1 upstream, so that
//! one connection carries one request and an abort is exact.
//!
//! Dropping a send at any await closes its connection; a connection whose answer was read whole is
//! kept for the next request (`pool.rs`).

use std::sync::Arc;
use std::time::Duration;

use http::header::{CONTENT_LENGTH, HOST, TRANSFER_ENCODING, UPGRADE};
use http::uri::Authority;
use http::{HeaderValue, Request, Response, StatusCode, Uri};
use http_body::Body as _;
use hyper::body::Incoming;
use hyper_rustls::{HttpsConnector, HttpsConnectorBuilder};
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;
use tokio::time::Instant;
use tower::util::MapResponse;
use tower_service::Service as _;

use crate::config::roots::Roots;
use crate::config::{Provider, Timeouts};
use crate::model::{Map, ProviderName};

pub mod dial;
pub mod headers;
pub mod held;
mod last_word;
mod pool;
pub mod relay;
pub mod replay;
pub mod tls;
pub mod tunnel;

use dial::{Bounded, BoxError, Denied, Dialer, NotAllowed, Reach, caused_by};
use last_word::LastWord;
use pool::{Failed, Pools};
use replay::{Quiet, Replay, ReplayBody};

/// What of a head is too much. hyper's own bound of header lines is taken: for another it makes room anew with
/// each answer. It tells one bound from the other to nobody.
const TOO_LARGE: &str = "a head of more than 100 header lines or 256 KiB";

/// Why no answer came.
#[derive(Debug, thiserror::Error)]
pub enum SendError {
    /// Nothing was sent: no connection could be made.
    #[error("could not connect to {host}")]
    Connect {
        /// The host.
        host: String,
        /// Why.
        #[source]
        cause: BoxError,
    },
    /// The address may not be reached.
    #[error("{0}")]
    Denied(NotAllowed),
    /// Connecting took too long.
    #[error("could not connect to {host} within {after:?} (timeouts.connect)")]
    ConnectTimeout {
        /// The host.
        host: String,
        /// The bound.
        after: Duration,
    },
    /// The connection broke before the answer's head.
    #[error("{host} broke off before it answered")]
    Broken {
        /// The host.
        host: String,
        /// Why.
        #[source]
        cause: BoxError,
    },
    /// No head in time, or the request's body was not taken in time.
    #[error(
        "{host} did not answer, or take the request's body on, within {after:?} (timeouts.first_byte, timeouts.body_idle)"
    )]
    Timeout {
        /// The host.
        host: String,
        /// The bound.
        after: Duration,
    },
    /// The answer cannot be passed on.
    #[error("{host} answered what cannot be passed on: {what}")]
    Unusable {
        /// The host.
        host: String,
        /// What is wrong.
        what: &'static str,
    },
    /// The client's own body broke off or paused too long.
    #[error("{0}")]
    Body(replay::BodyFault),
}

impl SendError {
    /// Nothing reached the provider.
    pub fn nothing_sent(&self) -> bool {
        matches!(self, Self::Connect { .. } | Self::ConnectTimeout { .. })
    }

    /// The provider broke off before its answer; it may have begun its work.
    pub fn broke_off(&self) -> bool {
        matches!(self, Self::Broken { .. })
    }

    /// Sending again cannot do twice what was meant once, and may help.
    pub fn may_repeat(&self, method: &http::Method) -> bool {
        let of_this_request = matches!(self, Self::Body(_) | Self::Denied(_) | Self::Unusable { .. });
        !of_this_request && (self.nothing_sent() || method.is_idempotent())
    }
}

/// Dials, and hears what is answered out.
type Hearing = MapResponse<Dialer, fn(TokioIo<TcpStream>) -> TokioIo<LastWord<TcpStream>>>;

type Https = Bounded<HttpsConnector<Hearing>>;

/// The connections to each provider, and to all other hosts.
pub struct Upstreams {
    providers: Map<ProviderName, (Arc<Provider>, Arc<Pools>)>,
    others: Pools,
    tunnels: Dialer,
    timeouts: Timeouts,
}

impl std::fmt::Debug for Upstreams {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Upstreams").field("providers", &self.providers.len()).finish_non_exhaustive()
    }
}

impl Upstreams {
    /// Prepares the way to each provider, by which the system's `roots` are trusted. Dials nothing. Where a provider is
    /// as it was in `before`, the connections to it are kept.
    pub fn new<'a>(
        providers: impl Iterator<Item = &'a Arc<Provider>>,
        timeouts: Timeouts,
        denied: Denied,
        before: Option<&Self>,
        roots: &Roots,
    ) -> Result<Self, tls::TrustError> {
        let known = |provider: &Arc<Provider>| {
            let before = before.filter(|before| before.timeouts == timeouts)?;
            let (as_was, pools) = before.providers.get(&provider.name)?;
            // Another certificate may stand in the file by now.
            (as_was == provider && provider.ca_file.is_none()).then(|| pools.clone())
        };
        let roots = tls::root_store(roots);
        let mut ways = Map::default();
        for provider in providers {
            let pools = if let Some(pools) = known(provider) {
                pools
            } else {
                let tls = tls::client_config(&roots, provider.ca_file.as_deref())?;
                let dialer = Dialer::new(Reach::Configured, timeouts.connect);
                Arc::new(Pools::new(connector(dialer, tls, timeouts.connect), Some(&provider.base_url)))
            };
            ways.insert(provider.name.clone(), (provider.clone(), pools));
        }
        let tunnels = Dialer::new(Reach::Named(Arc::new(denied)), timeouts.connect);
        let tls = tls::client_config(&roots, None)?;
        let others = Pools::new(connector(tunnels.clone(), tls, timeouts.connect), None);
        Ok(Self { providers: ways, others, tunnels, timeouts })
    }

    /// Sends to a provider and waits for the answer's head, up to `timeouts.first_byte` after the last
    /// byte of the body went out. The request has its `Host`.
    pub async fn send(
        &self,
        provider: &ProviderName,
        request: Request<()>,
        body: &Replay,
    ) -> Result<Response<Incoming>, SendError> {
        match self.providers.get(provider) {
            Some((_, pools)) => self.answer(pools, request, body).await,
            None => Err(SendError::Unusable {
                host: Host::of(request.uri()).name(),
                what: "the provider is not served",
            }),
        }
    }

    /// The same to a host that is no provider's.
    pub async fn pass(&self, request: Request<()>, body: &Replay) -> Result<Response<Incoming>, SendError> {
        self.answer(&self.others, request, body).await
    }

    async fn answer(
        &self,
        pools: &Pools,
        request: Request<()>,
        body: &Replay,
    ) -> Result<Response<Incoming>, SendError> {
        let (host, upgrade) = (Host::of(request.uri()), asks_upgrade(&request));
        let begun = Instant::now();
        let mut sending = pools.send(with_body(request, body), begun);
        let mut until = begun + self.timeouts.body_idle.min(self.timeouts.first_byte);
        let answer = loop {
            if let Ok(answer) = tokio::time::timeout_at(until, &mut sending).await {
                break answer;
            }
            // A provider may think long before it answers, but not before it takes the request.
            let (quiet, after) = match body.quiet() {
                Quiet::Sent(quiet) => (quiet, self.timeouts.first_byte),
                Quiet::Untaken(quiet) => (quiet, self.timeouts.body_idle),
                Quiet::Client => (Duration::ZERO, self.timeouts.body_idle),
            };
            match after.checked_sub(quiet.min(begun.elapsed())).filter(|left| !left.is_zero()) {
                Some(left) => until = Instant::now() + left,
                None => return Err(SendError::Timeout { host: host.name(), after }),
            }
        };
        let mut answer = answer.map_err(|failed| self.classify(failed, host.name(), body))?;
        if answer.status() == StatusCode::SWITCHING_PROTOCOLS {
            let what = match headers::is_websocket(answer.headers()) {
                true if upgrade => None,
                true => Some("an upgrade that was not asked for"),
                false => Some("an upgrade to something else than `websocket`"),
            };
            if let Some(what) = what {
                return Err(SendError::Unusable { host: host.name(), what });
            }
            // Framing that a 101 cannot have.
            answer.headers_mut().remove(CONTENT_LENGTH);
        }
        let unusable = match answer.headers() {
            headers if headers::has_foreign_coding(headers) => Some("a transfer coding other than chunked"),
            headers if headers::has_foreign_length(headers) => Some("a length that is no number, or several"),
            _ => None,
        };
        if let Some(what) = unusable {
            return Err(SendError::Unusable { host: host.name(), what });
        }
        headers::strip_response(answer.headers_mut());
        Ok(answer)
    }

    fn classify(&self, failed: Failed, host: String, body: &Replay) -> SendError {
        if let Some(fault) = body.fault() {
            return SendError::Body(fault);
        }
        match failed {
            Failed::Connect(cause) => self.unconnected(host, cause),
            Failed::Send(error) if error.is_parse_too_large() => {
                SendError::Unusable { host, what: TOO_LARGE }
            }
            Failed::Send(error) => SendError::Broken { host, cause: error.into() },
        }
    }

    fn unconnected(&self, host: String, cause: BoxError) -> SendError {
        match caused_by::<NotAllowed>(&*cause) {
            Some(denied) => SendError::Denied(*denied),
            None if dial::timed_out(&*cause) => {
                SendError::ConnectTimeout { host, after: self.timeouts.connect }
            }
            None => SendError::Connect { host, cause },
        }
    }

    /// Opens a blind tunnel.
    pub async fn dial(&self, host: &str, port: u16) -> Result<TokioIo<TcpStream>, SendError> {
        let authority =
            if host.contains(':') { format!("[{host}]:{port}") } else { format!("{host}:{port}") };
        let uri = Uri::builder().scheme("http").authority(authority).path_and_query("/").build();
        let uri = uri.map_err(|error| SendError::Connect { host: host.to_owned(), cause: error.into() })?;
        let mut dialer = self.tunnels.clone();
        let after = self.timeouts.connect;
        match tokio::time::timeout(after, dialer.call(uri)).await {
            Ok(dialled) => dialled.map_err(|cause| self.unconnected(host.to_owned(), cause)),
            Err(_) => Err(SendError::ConnectTimeout { host: host.to_owned(), after }),
        }
    }
}

/// What dials within `timeout`, TLS included, where the target is https.
fn connector(dialer: Dialer, tls: rustls::ClientConfig, timeout: Duration) -> Https {
    let hearing: Hearing =
        MapResponse::new(dialer, |io: TokioIo<TcpStream>| TokioIo::new(LastWord::new(io.into_inner())));
    let https = HttpsConnectorBuilder::new().with_tls_config(tls).https_or_http().enable_http1();
    Bounded::new(https.wrap_connector(hearing), timeout)
}

fn asks_upgrade(request: &Request<()>) -> bool {
    request.headers().contains_key(UPGRADE)
}

/// Where a request goes.
struct Host(Option<Authority>);

impl Host {
    fn of(uri: &Uri) -> Self {
        Self(uri.authority().cloned())
    }

    fn name(&self) -> String {
        self.0.as_ref().map_or_else(String::new, Authority::to_string)
    }
}

/// The request with its body, and with framing said where hyper would otherwise drop a body in silence
/// (a GET whose length is not known).
fn with_body(mut request: Request<()>, body: &Replay) -> Request<ReplayBody> {
    let body = body.body();
    let headers = request.headers_mut();
    debug_assert!(headers.contains_key(HOST), "hyper sends what it is given");
    match body.size_hint().exact() {
        // As it was understood, not as it was spelt (`010`, `5, 5`).
        Some(length) if !headers::says_length(headers, length) && headers.contains_key(CONTENT_LENGTH) => {
            headers.insert(CONTENT_LENGTH, length.into());
        }
        Some(_) => {}
        None if body.is_end_stream() => {}
        None => {
            headers.remove(CONTENT_LENGTH);
            headers.insert(TRANSFER_ENCODING, HeaderValue::from_static("chunked"));
        }
    }
    request.map(|()| body)
}

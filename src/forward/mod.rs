//! The way to the provider. Bodies stream both ways and are never collected; every chunk goes on as it
//! comes. TLS is always verified; redirects are passed on, never followed; HTTP/1.1 upstream, so that
//! one connection carries one request and an abort is exact.
//!
//! Dropping a send at any await closes its connection; a connection whose answer was read whole is
//! kept for the next request.

use std::sync::Arc;
use std::time::Duration;

use http::header::{CONTENT_LENGTH, TRANSFER_ENCODING, UPGRADE};
use http::uri::Authority;
use http::{HeaderValue, Request, Response, StatusCode, Uri};
use http_body::Body as _;
use hyper::body::Incoming;
use hyper_rustls::{HttpsConnector, HttpsConnectorBuilder};
use hyper_util::client::legacy::Client;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
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
pub mod relay;
pub mod replay;
pub mod tls;
pub mod tunnel;

use dial::{Bounded, BoxError, Denied, Dialer, NotAllowed, Reach, caused_by};
use last_word::LastWord;
use replay::{Quiet, Replay, ReplayBody};

/// How long an idle connection to a provider is kept: below what providers' balancers keep, since a
/// POST on a connection that is just being closed fails and may not be repeated.
const POOL_IDLE: Duration = Duration::from_secs(30);

/// Idle connections kept per provider host.
const POOL_SIZE: usize = 256;

/// The largest head of an answer.
const MAX_ANSWER_HEAD: usize = 256 * 1024;

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
type Hearing = MapResponse<Dialer, fn(TokioIo<TcpStream>) -> LastWord<TokioIo<TcpStream>>>;

type Https = Bounded<HttpsConnector<Hearing>>;

/// Clients, one a provider, and one for all other hosts.
pub struct Upstreams {
    providers: Map<ProviderName, (Arc<Provider>, Client<Https, ReplayBody>)>,
    others: Client<Bounded<Hearing>, ReplayBody>,
    tunnels: Dialer,
    timeouts: Timeouts,
}

impl std::fmt::Debug for Upstreams {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Upstreams").field("providers", &self.providers.len()).finish_non_exhaustive()
    }
}

impl Upstreams {
    /// Prepares a client for each provider, which trusts the system's `roots`. Dials nothing. Where a provider is as it was in
    /// `before`, so is its client, with the connections it keeps.
    pub fn new<'a>(
        providers: impl Iterator<Item = &'a Arc<Provider>>,
        timeouts: Timeouts,
        denied: Denied,
        before: Option<&Self>,
        roots: &Roots,
    ) -> Result<Self, tls::TrustError> {
        let known = |provider: &Arc<Provider>| {
            let before = before.filter(|before| before.timeouts == timeouts)?;
            let (as_was, client) = before.providers.get(&provider.name)?;
            // Another certificate may stand in the file by now.
            (as_was == provider && provider.ca_file.is_none()).then(|| client.clone())
        };
        let roots = tls::root_store(roots);
        let mut clients = Map::default();
        for provider in providers {
            if let Some(client) = known(provider) {
                clients.insert(provider.name.clone(), (provider.clone(), client));
                continue;
            }
            let tls = tls::client_config(&roots, provider.ca_file.as_deref())?;
            let https = HttpsConnectorBuilder::new()
                .with_tls_config(tls)
                .https_or_http()
                .enable_http1()
                .wrap_connector(hearing(Dialer::new(Reach::Configured, timeouts.connect)));
            let client = builder().build(Bounded::new(https, timeouts.connect));
            clients.insert(provider.name.clone(), (provider.clone(), client));
        }
        let tunnels = Dialer::new(Reach::Named(Arc::new(denied)), timeouts.connect);
        let others = builder().build(Bounded::new(hearing(tunnels.clone()), timeouts.connect));
        Ok(Self { providers: clients, others, tunnels, timeouts })
    }

    /// Sends to a provider and waits for the answer's head, up to `timeouts.first_byte` after the last
    /// byte of the body went out.
    pub async fn send(
        &self,
        provider: &ProviderName,
        request: Request<()>,
        body: &Replay,
    ) -> Result<Response<Incoming>, SendError> {
        let (host, upgrade) = (Host::of(request.uri()), asks_upgrade(&request));
        match self.providers.get(provider) {
            Some((_, client)) => {
                self.answer(client.request(with_body(request, body)), host, body, upgrade).await
            }
            None => Err(SendError::Unusable { host: host.name(), what: "the provider is not served" }),
        }
    }

    /// The same to a host that is no provider's.
    pub async fn pass(&self, request: Request<()>, body: &Replay) -> Result<Response<Incoming>, SendError> {
        let (host, upgrade) = (Host::of(request.uri()), asks_upgrade(&request));
        self.answer(self.others.request(with_body(request, body)), host, body, upgrade).await
    }

    async fn answer(
        &self,
        sending: hyper_util::client::legacy::ResponseFuture,
        host: Host,
        body: &Replay,
        upgrade: bool,
    ) -> Result<Response<Incoming>, SendError> {
        tokio::pin!(sending);
        let begun = Instant::now();
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
        let mut answer = answer.map_err(|error| self.classify(error, host.name(), body))?;
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
        if headers::has_foreign_coding(answer.headers()) {
            return Err(SendError::Unusable {
                host: host.name(),
                what: "a transfer coding other than chunked",
            });
        }
        headers::strip_response(answer.headers_mut());
        Ok(answer)
    }

    fn classify(&self, error: hyper_util::client::legacy::Error, host: String, body: &Replay) -> SendError {
        if let Some(fault) = body.fault() {
            return SendError::Body(fault);
        }
        if let Some(denied) = caused_by::<NotAllowed>(&error) {
            return SendError::Denied(*denied);
        }
        if error.is_connect() && dial::timed_out(&error) {
            return SendError::ConnectTimeout { host, after: self.timeouts.connect };
        }
        if caused_by::<hyper::Error>(&error).is_some_and(hyper::Error::is_parse_too_large) {
            return SendError::Unusable { host, what: TOO_LARGE };
        }
        if error.is_connect() {
            return SendError::Connect { host, cause: error.into() };
        }
        SendError::Broken { host, cause: error.into() }
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
            Ok(Ok(stream)) => Ok(stream),
            Ok(Err(error)) => match caused_by::<NotAllowed>(&*error) {
                Some(denied) => Err(SendError::Denied(*denied)),
                None if dial::timed_out(&*error) => {
                    Err(SendError::ConnectTimeout { host: host.to_owned(), after })
                }
                None => Err(SendError::Connect { host: host.to_owned(), cause: error }),
            },
            Err(_) => Err(SendError::ConnectTimeout { host: host.to_owned(), after }),
        }
    }
}

fn hearing(dialer: Dialer) -> Hearing {
    MapResponse::new(dialer, LastWord::new)
}

fn builder() -> hyper_util::client::legacy::Builder {
    let mut builder = Client::builder(TokioExecutor::new());
    builder
        .timer(TokioTimer::new())
        .pool_timer(TokioTimer::new())
        .pool_idle_timeout(POOL_IDLE)
        .pool_max_idle_per_host(POOL_SIZE)
        .http1_max_buf_size(MAX_ANSWER_HEAD);
    builder
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

//! The injector's listeners: each connection has a place before it is accepted, a bound for its handshake, for
//! each head, body and answer, and an end when nobody asks or the process stops.

use std::convert::Infallible;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use http::{Request, Response};
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use rustls::ServerConfig;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::OwnedSemaphorePermit;
use tokio_rustls::TlsAcceptor;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::health::Readiness;
use super::places::Places;
use super::reply::Reply;
use super::watch::{Over, Watch};

/// Connections open at once, for each listener.
const CONNECTIONS: usize = 256;
/// Of them, those of one address at the door for probes. Reviews all come from a few API servers.
const PROBES_OF_ONE: usize = 32;
/// How long a connection of a probe may be, from its first byte to its end.
const PROBE: Duration = Duration::from_secs(10);
/// How long no place may be free until that is told.
const CROWDED: Duration = Duration::from_secs(3);
/// The bound of a TLS handshake.
const HANDSHAKE: Duration = Duration::from_secs(10);
/// The bound of a whole head, and of an idle HTTP/1 connection.
const HEAD: Duration = Duration::from_secs(10);
/// Bytes of one head.
const HEAD_BYTES: u32 = 16 * 1024;
/// Requests at once on one HTTP/2 connection.
const STREAMS: u32 = 32;
/// How often an HTTP/2 connection is asked whether it is still there, and how long it may take to say so.
const PING: (Duration, Duration) = (Duration::from_secs(15), Duration::from_secs(10));
/// How long answers under way may take once the process stops.
pub(super) const LAST_ANSWERS: Duration = Duration::from_secs(10);

/// Whom a listener is for.
#[derive(Clone)]
pub(super) enum For {
    /// API servers, by TLS; whoever waits for a place makes it unready.
    Reviews(Arc<ServerConfig>, Arc<Readiness>),
    /// The kubelet and Prometheus, in plain HTTP, one request a connection.
    Probes,
}

/// A listener and its connections.
pub(super) struct Door {
    pub(super) listener: TcpListener,
    pub(super) whom: For,
    /// No connection is accepted any more, and those that are open end after their answers.
    pub(super) closing: CancellationToken,
    pub(super) open: TaskTracker,
}

impl Door {
    /// Serves until told to close.
    pub(super) async fn serve<F, A>(self, answer: F)
    where
        F: Fn(Request<Incoming>) -> A + Clone + Send + Sync + 'static,
        A: Future<Output = Response<Reply>> + Send + 'static,
    {
        let of_one = if matches!(self.whom, For::Probes) { PROBES_OF_ONE } else { CONNECTIONS };
        let places = Places::new(CONNECTIONS, of_one);
        loop {
            let place = tokio::select! {
                () = self.closing.cancelled() => return,
                place = self.place(&places) => place,
            };
            let (stream, peer) = tokio::select! {
                () = self.closing.cancelled() => return,
                next = self.listener.accept() => match next {
                    Ok(next) => next,
                    Err(cause) => {
                        tracing::warn!(%cause, "a connection could not be accepted");
                        // Most often there is no file descriptor left: trying again at once would only spin.
                        tokio::time::sleep(Duration::from_millis(200)).await;
                        continue;
                    }
                },
            };
            let Some(place) = place.and_then(|place| places.take(place, peer.ip())) else {
                tracing::debug!(%peer, "a connection was closed: its peer has too many");
                continue;
            };
            let (whom, closing, answer) = (self.whom.clone(), self.closing.clone(), answer.clone());
            self.open.spawn(async move {
                let _place = place;
                connection(stream, whom, answer, closing).await;
            });
        }
    }

    /// A place; that there is none for a while is told.
    async fn place(&self, places: &Places) -> Option<OwnedSemaphorePermit> {
        let mut next = std::pin::pin!(places.any());
        let For::Reviews(_, ready) = &self.whom else { return next.await };
        if let Ok(place) = tokio::time::timeout(CROWDED, next.as_mut()).await {
            return place;
        }
        ready.crowd(true);
        let place = next.await;
        ready.crowd(false);
        place
    }
}

async fn connection<F, A>(stream: TcpStream, whom: For, answer: F, closing: CancellationToken)
where
    F: Fn(Request<Incoming>) -> A + Clone + Send + Sync + 'static,
    A: Future<Output = Response<Reply>> + Send + 'static,
{
    let _ = stream.set_nodelay(true); // a connection that has no such thing works without
    let For::Reviews(tls, _) = whom else {
        // Whether it does not ask, or does not read, its time is up.
        let _ = tokio::time::timeout(PROBE, http1(stream, answer, closing, false)).await;
        return;
    };
    match tokio::time::timeout(HANDSHAKE, TlsAcceptor::from(tls).accept(stream)).await {
        Ok(Ok(stream)) if stream.get_ref().1.alpn_protocol() == Some(b"h2") => {
            http2(stream, answer, closing).await;
        }
        Ok(Ok(stream)) => http1(stream, answer, closing, true).await,
        // The API server's own log says what it did not like; here it is most often a probe of TCP.
        Ok(Err(cause)) => tracing::debug!(%cause, "a TLS handshake failed"),
        Err(_) => tracing::debug!("a TLS handshake took longer than {HANDSHAKE:?}"),
    }
}

async fn http1<S, F, A>(stream: S, answer: F, closing: CancellationToken, keep: bool)
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    F: Fn(Request<Incoming>) -> A + Clone + Send + Sync + 'static,
    A: Future<Output = Response<Reply>> + Send + 'static,
{
    let watch = Watch::default();
    let service = service_fn(watched(&watch, answer));
    let mut http = hyper::server::conn::http1::Builder::new();
    http.timer(TokioTimer::new())
        .header_read_timeout(HEAD)
        .max_buf_size(HEAD_BYTES as usize)
        .keep_alive(keep);
    let connection = http.serve_connection(TokioIo::new(stream), service);
    until_over(connection, hyper::server::conn::http1::Connection::graceful_shutdown, &watch, closing).await;
}

async fn http2<S, F, A>(stream: S, answer: F, closing: CancellationToken)
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    F: Fn(Request<Incoming>) -> A + Clone + Send + Sync + 'static,
    A: Future<Output = Response<Reply>> + Send + 'static,
{
    let watch = Watch::default();
    let service = service_fn(watched(&watch, answer));
    let mut http = hyper::server::conn::http2::Builder::new(TokioExecutor::new());
    http.timer(TokioTimer::new())
        .keep_alive_interval(PING.0)
        .keep_alive_timeout(PING.1)
        .max_concurrent_streams(STREAMS)
        .max_send_buf_size(HEAD_BYTES as usize)
        .max_header_list_size(HEAD_BYTES);
    let connection = http.serve_connection(TokioIo::new(stream), service);
    until_over(connection, hyper::server::conn::http2::Connection::graceful_shutdown, &watch, closing).await;
}

/// An answer to come.
type Coming = Pin<Box<dyn Future<Output = Result<Response<Reply>, Infallible>> + Send>>;

/// `answer`, with each request and its answer under watch.
fn watched<F, A>(watch: &Watch, answer: F) -> impl Fn(Request<Incoming>) -> Coming
where
    F: Fn(Request<Incoming>) -> A,
    A: Future<Output = Response<Reply>> + Send + 'static,
{
    let watch = watch.clone();
    move |request| {
        let (open, answer) = (watch.begin(), answer(request));
        Box::pin(async move { Ok(answer.await.map(|reply| reply.open(open.answered()))) })
    }
}

/// Drives a connection until it ends, nobody needs it, or the process stops. Its error is its peer's affair: gone,
/// too slow, or no HTTP.
async fn until_over<C, E>(connection: C, shut: fn(Pin<&mut C>), watch: &Watch, closing: CancellationToken)
where
    C: Future<Output = Result<(), E>>,
{
    let mut connection = std::pin::pin!(connection);
    let over = tokio::select! {
        _ = &mut connection => return,
        over = watch.over() => over,
        () = closing.cancelled() => Over::Idle,
    };
    if over == Over::NotTaken {
        tracing::debug!("a connection was closed: its peer takes no answer");
        return;
    }
    shut(connection.as_mut());
    let _ = tokio::time::timeout(LAST_ANSWERS, connection).await;
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a test that fails may panic
mod tests {
    use bytes::Bytes;
    use http::StatusCode;
    use http_body_util::{BodyExt as _, Empty};
    use tokio::io::AsyncReadExt as _;
    use tokio::time::{Instant, timeout};

    use super::super::health::page;
    use super::super::watch::{IDLE, SENDING};
    use super::*;

    const NEVER: Duration = Duration::from_hours(1);

    async fn long(_: Request<Incoming>) -> Response<Reply> {
        page(StatusCode::OK, "a".repeat(100_000))
    }

    #[tokio::test(start_paused = true)]
    async fn a_connection_on_which_nobody_asks_ends_though_pings_are_answered() {
        let (ours, theirs) = tokio::io::duplex(1 << 20);
        let served = tokio::spawn(http2(theirs, long, CancellationToken::new()));
        let (mut ask, connection) =
            hyper::client::conn::http2::handshake(TokioExecutor::new(), TokioIo::new(ours)).await.unwrap();
        let driven = tokio::spawn(connection);
        let begun = Instant::now();
        for _ in 0..3 {
            tokio::time::sleep(IDLE / 2).await;
            let answer = ask.send_request(Request::new(Empty::<Bytes>::new())).await.unwrap();
            assert_eq!(answer.into_body().collect().await.unwrap().to_bytes().len(), 100_000);
        }
        timeout(NEVER, served).await.unwrap().unwrap();
        let (took, least) = (begun.elapsed(), IDLE * 5 / 2);
        assert!(took >= least && took <= least + Duration::from_secs(2), "{took:?}");
        driven.await.unwrap().unwrap();
    }

    #[tokio::test(start_paused = true)]
    async fn a_connection_whose_answers_are_not_taken_ends() {
        for window in [0, 1, 50_000] {
            let (ours, theirs) = tokio::io::duplex(1 << 20);
            let served = tokio::spawn(http2(theirs, long, CancellationToken::new()));
            let (mut ask, connection) = h2::client::Builder::new()
                .initial_window_size(window)
                .handshake::<_, Bytes>(ours)
                .await
                .unwrap();
            let driven = tokio::spawn(connection);
            let begun = Instant::now();
            let request = Request::get("http://a.test/").body(()).unwrap();
            let (answer, _) = ask.send_request(request, true).unwrap();
            let _answer = answer.await.unwrap();
            timeout(NEVER, served).await.unwrap().unwrap();
            let took = begun.elapsed();
            assert!(took >= SENDING && took <= SENDING + Duration::from_secs(2), "{window}: {took:?}");
            let _ = driven.await.unwrap(); // how it hears of that is the system's affair
        }
    }

    #[tokio::test(start_paused = true)]
    async fn one_that_asks_by_http1_and_does_not_read_is_let_go() {
        let (mut ours, theirs) = tokio::io::duplex(1024);
        let served = tokio::spawn(http1(theirs, long, CancellationToken::new(), true));
        tokio::io::AsyncWriteExt::write_all(&mut ours, b"GET / HTTP/1.1\r\nhost: a\r\n\r\n").await.unwrap();
        let begun = Instant::now();
        timeout(NEVER, served).await.unwrap().unwrap();
        assert!(begun.elapsed() <= SENDING + Duration::from_secs(2), "{:?}", begun.elapsed());
        let mut rest = Vec::new();
        let _ = ours.read_to_end(&mut rest).await;
        assert!(rest.len() < 100_000);
    }
}

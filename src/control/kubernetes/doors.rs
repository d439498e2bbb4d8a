//! The injector's listeners: each connection has a place before it is accepted, a bound for its handshake, for
//! each head and body, and an end when the process stops.

use std::convert::Infallible;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::{Request, Response};
use http_body_util::Full;
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use rustls::ServerConfig;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio_rustls::TlsAcceptor;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

/// Connections open at once, for each listener.
const CONNECTIONS: usize = 512;
/// The bound of a TLS handshake.
const HANDSHAKE: Duration = Duration::from_secs(10);
/// The bound of a whole head, and of an idle HTTP/1 connection.
const HEAD: Duration = Duration::from_secs(10);
/// Bytes of one head.
const HEAD_BYTES: u32 = 16 * 1024;
/// Requests at once on one HTTP/2 connection.
const STREAMS: u32 = 128;
/// How often an HTTP/2 connection is asked whether it is still there, and how long it may take to say so.
const PING: (Duration, Duration) = (Duration::from_secs(30), Duration::from_secs(10));
/// How long answers under way may take once the process stops.
pub(super) const LAST_ANSWERS: Duration = Duration::from_secs(10);

/// A listener and its connections.
pub(super) struct Door {
    pub(super) listener: TcpListener,
    pub(super) tls: Option<Arc<ServerConfig>>,
    /// No connection is accepted any more, and those that are open end after their answers.
    pub(super) closing: CancellationToken,
    pub(super) open: TaskTracker,
}

impl Door {
    /// Serves until told to close.
    pub(super) async fn serve<F, A>(self, answer: F)
    where
        F: Fn(Request<Incoming>) -> A + Clone + Send + Sync + 'static,
        A: Future<Output = Response<Full<Bytes>>> + Send + 'static,
    {
        let places = Arc::new(Semaphore::new(CONNECTIONS));
        loop {
            let place = tokio::select! {
                () = self.closing.cancelled() => return,
                place = places.clone().acquire_owned() => place,
            };
            let stream = tokio::select! {
                () = self.closing.cancelled() => return,
                next = self.listener.accept() => match next {
                    Ok((stream, _)) => stream,
                    Err(cause) => {
                        tracing::warn!(%cause, "a connection could not be accepted");
                        // Most often there is no file descriptor left: trying again at once would only spin.
                        tokio::time::sleep(Duration::from_millis(200)).await;
                        continue;
                    }
                },
            };
            let (tls, closing, answer) = (self.tls.clone(), self.closing.clone(), answer.clone());
            self.open.spawn(async move {
                let _place = place;
                connection(stream, tls, answer, closing).await;
            });
        }
    }
}

async fn connection<F, A>(
    stream: TcpStream,
    tls: Option<Arc<ServerConfig>>,
    answer: F,
    closing: CancellationToken,
) where
    F: Fn(Request<Incoming>) -> A + Clone + Send + Sync + 'static,
    A: Future<Output = Response<Full<Bytes>>> + Send + 'static,
{
    let _ = stream.set_nodelay(true); // a connection that has no such thing works without
    let Some(tls) = tls else { return http1(stream, answer, closing).await };
    match tokio::time::timeout(HANDSHAKE, TlsAcceptor::from(tls).accept(stream)).await {
        Ok(Ok(stream)) if stream.get_ref().1.alpn_protocol() == Some(b"h2") => {
            http2(stream, answer, closing).await;
        }
        Ok(Ok(stream)) => http1(stream, answer, closing).await,
        // The API server's own log says what it did not like; here it is most often a probe of TCP.
        Ok(Err(cause)) => tracing::debug!(%cause, "a TLS handshake failed"),
        Err(_) => tracing::debug!("a TLS handshake took longer than {HANDSHAKE:?}"),
    }
}

async fn http1<S, F, A>(stream: S, answer: F, closing: CancellationToken)
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    F: Fn(Request<Incoming>) -> A + Clone + Send + Sync + 'static,
    A: Future<Output = Response<Full<Bytes>>> + Send + 'static,
{
    let service = service_fn(move |request| {
        let answer = answer(request);
        async move { Ok::<_, Infallible>(answer.await) }
    });
    let mut http = hyper::server::conn::http1::Builder::new();
    http.timer(TokioTimer::new()).header_read_timeout(HEAD).max_buf_size(HEAD_BYTES as usize);
    let connection = http.serve_connection(TokioIo::new(stream), service);
    let mut connection = std::pin::pin!(connection);
    // A connection's error is its peer's affair: gone, too slow, or no HTTP.
    tokio::select! {
        _ = &mut connection => return,
        () = closing.cancelled() => {}
    }
    connection.as_mut().graceful_shutdown();
    let _ = tokio::time::timeout(LAST_ANSWERS, connection).await;
}

async fn http2<S, F, A>(stream: S, answer: F, closing: CancellationToken)
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    F: Fn(Request<Incoming>) -> A + Clone + Send + Sync + 'static,
    A: Future<Output = Response<Full<Bytes>>> + Send + 'static,
{
    let service = service_fn(move |request| {
        let answer = answer(request);
        async move { Ok::<_, Infallible>(answer.await) }
    });
    let mut http = hyper::server::conn::http2::Builder::new(TokioExecutor::new());
    http.timer(TokioTimer::new())
        .keep_alive_interval(PING.0)
        .keep_alive_timeout(PING.1)
        .max_concurrent_streams(STREAMS)
        .max_header_list_size(HEAD_BYTES);
    let connection = http.serve_connection(TokioIo::new(stream), service);
    let mut connection = std::pin::pin!(connection);
    tokio::select! {
        _ = &mut connection => return,
        () = closing.cancelled() => {}
    }
    connection.as_mut().graceful_shutdown();
    let _ = tokio::time::timeout(LAST_ANSWERS, connection).await;
}

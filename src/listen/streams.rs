//! HTTP/2 from clients: by prior knowledge, or as TLS agreed on it.
//!
//! Each request is a stream with a task of its own, which ends with its connection. What a socket tells of
//! an HTTP/1.1 request is told here by the stream: its reset ends the service of the request, and a lost
//! lease, or a client that takes nothing of its answer, resets it. Extended CONNECT (RFC 8441) is not
//! offered, so that clients open their WebSockets over HTTP/1.1.

use std::convert::Infallible;
use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http::{Request, Response};
use http_body::{Body, Frame, SizeHint};
use hyper::body::Incoming;
use hyper::rt::Executor;
use hyper::server::conn::http2;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::time::{Instant, Sleep};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::bell::Bell;
use super::connection::{Ended, Pace, Serving};
use super::socket::{LINGER, Phase, Signals};
use super::{Conn, HeadFacts, Serve};
use crate::config::Limits;
use crate::model::Inside;

/// How every HTTP/2 connection begins (RFC 9113, section 3.4).
pub(super) const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

/// How often a client is asked whether it is still there, and how long it may take to say so.
const PING_EVERY: Duration = Duration::from_secs(30);
const PING_ANSWER: Duration = Duration::from_secs(20);

/// Bytes of a request's body that may come before they are asked for.
const WINDOW: u32 = 128 << 10;

/// Bytes of one answer that may wait for the client to take them.
const SEND_BUFFER: usize = 128 << 10;

/// Streams that a client may reset before they were begun on: more is an attack (CVE-2023-44487).
const PENDING_RESETS: usize = 50;

/// Streams that lessor itself may reset for a client's errors before the connection is ended.
const OWN_RESETS: usize = 1024;

impl<S: Serve> Serving<S> {
    /// Serves HTTP/2 on `io`, whose client was there at `since`.
    pub(super) async fn http2<T>(&self, io: T, inside: Option<Arc<Inside>>, since: Instant) -> Ended
    where
        T: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let streams = Streams(Arc::new(Shared {
            open: AtomicUsize::new(0),
            called: Mutex::new(None),
            tasks: self.tasks.clone(),
            ended: CancellationToken::new(),
            idle: self.timeouts.idle,
        }));
        let _all_end = streams.0.ended.clone().drop_guard();
        let answer = service_fn(|request| self.stream(request, inside.clone(), &streams));
        let mut serving =
            pin!(builder(self.limits, streams.clone()).serve_connection(TokioIo::new(io), answer));
        let signals = &self.conn.signals;
        let mut gone = pin!(self.socket.gone());
        let mut draining = pin!(self.drain.cancelled());
        let mut drained = false;
        let mut pace = Pace::new(self.timeouts, since);
        let beside = Bell::here().await;
        let ended = std::future::poll_fn(|cx: &mut Context<'_>| {
            if serving.as_mut().poll(cx).is_ready() {
                return Poll::Ready(Ended::Served);
            }
            let mut rung = beside.rang(cx);
            if rung.as_mut().is_some_and(|cx| gone.as_mut().poll(cx).is_ready()) {
                return Poll::Ready(Ended::Gone);
            }
            // Each stream has a watch of its own; this one ends them all.
            if signals.poll_cut_for_good(cx).is_ready() {
                signals.close_by_reset();
                return Poll::Ready(Ended::Cut);
            }
            if !drained && rung.as_mut().is_some_and(|cx| draining.as_mut().poll(cx).is_ready()) {
                drained = true;
                // A client need not answer the ping that a clean end begins with.
                pace.idle_at_most(LINGER);
                serving.as_mut().graceful_shutdown();
                if serving.as_mut().poll(cx).is_ready() {
                    return Poll::Ready(Ended::Served);
                }
            }
            let phase = streams.phase();
            signals.enter(phase);
            if drained && pace.is_fresh() && phase == Phase::Idle {
                return Poll::Ready(Ended::Gone);
            }
            // A stream has a task of its own, so no phase goes by unseen.
            pace.see(phase, 0, signals.stalled_since());
            match &mut rung {
                Some(cx) => pace.poll_too_slow(cx).map(|()| Ended::TooSlow),
                None => Poll::Pending,
            }
        })
        .await;
        if ended == Ended::TooSlow && signals.phase() == Phase::Idle && !drained {
            serving.as_mut().graceful_shutdown();
            let _ = tokio::time::timeout(LINGER, serving).await;
        }
        ended
    }

    /// Answers one stream. The future owns all that it needs, for its task may outlive a poll of the
    /// connection's.
    fn stream(
        &self,
        mut request: Request<Incoming>,
        inside: Option<Arc<Inside>>,
        streams: &Streams,
    ) -> impl Future<Output = Result<Response<Streamed<S::Body>>, Infallible>> + Send + 'static {
        let stream = Arc::new(Stream::default());
        streams.called(stream.clone());
        let too_large = is_too_large(&request, self.limits);
        // The codec has held the length against the body, and refuses transfer codings.
        let facts = HeadFacts { saw_length: false, scanned: true, too_large };
        if let Some(inside) = inside {
            request.extensions_mut().insert(inside);
        }
        let conn = Conn { signals: stream.signals.clone(), ..self.conn.clone() };
        let service = self.service.clone();
        async move {
            let response = service.serve(request, facts, conn).await;
            Ok(response.map(|body| Streamed { body, stream }))
        }
    }
}

fn builder(limits: Limits, streams: Streams) -> http2::Builder<Streams> {
    let mut http = http2::Builder::new(streams);
    http.timer(TokioTimer::new())
        .auto_date_header(false)
        .max_concurrent_streams(limits.max_streams)
        // Above the limit that is enforced, so that what is too large is told in lessor's words.
        .max_header_list_size(u32::try_from(limits.max_header_bytes * 2).unwrap_or(u32::MAX))
        .keep_alive_interval(PING_EVERY)
        .keep_alive_timeout(PING_ANSWER)
        .initial_stream_window_size(WINDOW)
        // Room for all streams: one that waits for a key must not hold up another's upload.
        .initial_connection_window_size(WINDOW.saturating_mul(limits.max_streams).min(MOST_WINDOW))
        .max_send_buf_size(SEND_BUFFER)
        .max_pending_accept_reset_streams(PENDING_RESETS)
        .max_local_error_reset_streams(OWN_RESETS);
    http
}

/// The largest window there is (RFC 9113, section 6.9.1).
const MOST_WINDOW: u32 = (1 << 31) - 1;

/// Whether a head is above the limits, counted as the protocol counts it (RFC 9113, section 10.5.1).
fn is_too_large(request: &Request<Incoming>, limits: Limits) -> bool {
    const EACH: usize = 32;
    let target = request.uri().path().len() + request.uri().query().map_or(0, str::len);
    let fields = request.headers().iter().map(|(name, value)| name.as_str().len() + value.len() + EACH);
    request.headers().len() > limits.max_headers || target + fields.sum::<usize>() > limits.max_header_bytes
}

/// The streams of one connection; starts their tasks for hyper.
#[derive(Clone)]
struct Streams(Arc<Shared>);

struct Shared {
    open: AtomicUsize,
    /// The stream that the service was called for last: hyper makes its task right after.
    called: Mutex<Option<Arc<Stream>>>,
    tasks: TaskTracker,
    /// The connection has ended, and so do its streams.
    ended: CancellationToken,
    idle: Duration,
}

impl Streams {
    fn called(&self, stream: Arc<Stream>) {
        *self.0.called.lock().unwrap_or_else(PoisonError::into_inner) = Some(stream);
    }

    fn phase(&self) -> Phase {
        if self.0.open.load(Ordering::Relaxed) == 0 { Phase::Idle } else { Phase::Busy }
    }
}

impl<F: Future<Output = ()> + Send + 'static> Executor<F> for Streams {
    fn execute(&self, future: F) {
        let stream = self.0.called.lock().unwrap_or_else(PoisonError::into_inner).take().unwrap_or_default();
        self.0.open.fetch_add(1, Ordering::Relaxed);
        let task = StreamTask {
            future,
            stream,
            seen: 0,
            stalled: None,
            idle: self.0.idle,
            _open: Open(self.0.clone()),
        };
        self.0.tasks.spawn(self.0.ended.clone().run_until_cancelled_owned(task));
    }
}

/// Counts a stream as open.
struct Open(Arc<Shared>);

impl Drop for Open {
    fn drop(&mut self) {
        self.0.open.fetch_sub(1, Ordering::Relaxed);
    }
}

/// What the body of an answer and its task tell each other.
struct Stream {
    signals: Arc<Signals>,
    /// Pieces of the answer that hyper was given.
    pieces: AtomicU64,
    /// The last one waits: hyper has not come for another.
    waits: AtomicBool,
}

impl Default for Stream {
    fn default() -> Self {
        let (pieces, waits) = (AtomicU64::new(0), AtomicBool::new(false));
        Self { signals: Arc::new(Signals::new()), pieces, waits }
    }
}

pin_project_lite::pin_project! {
    /// hyper's service of one stream, and what hyper does not look at while the client takes nothing. Given
    /// up before its end, it resets the stream.
    struct StreamTask<F> {
        #[pin]
        future: F,
        stream: Arc<Stream>,
        // How many pieces there were at the last look.
        seen: u64,
        // Runs while nothing is taken.
        stalled: Option<Pin<Box<Sleep>>>,
        idle: Duration,
        _open: Open,
    }
}

impl<F: Future<Output = ()>> Future for StreamTask<F> {
    type Output = ();

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        let this = self.project();
        if this.future.poll(cx).is_ready() || this.stream.signals.poll_cut(cx).is_ready() {
            return Poll::Ready(());
        }
        if !this.stream.waits.load(Ordering::Relaxed) {
            *this.stalled = None;
            return Poll::Pending;
        }
        let pieces = this.stream.pieces.load(Ordering::Relaxed);
        if std::mem::replace(this.seen, pieces) != pieces {
            *this.stalled = None;
        }
        let timer = this.stalled.get_or_insert_with(|| Box::pin(tokio::time::sleep(*this.idle)));
        timer.as_mut().poll(cx)
    }
}

pin_project_lite::pin_project! {
    /// An answer on its way into a stream.
    struct Streamed<B> {
        #[pin]
        body: B,
        stream: Arc<Stream>,
    }

    impl<B> PinnedDrop for Streamed<B> {
        fn drop(this: Pin<&mut Self>) {
            let stream = this.project().stream;
            stream.waits.store(false, Ordering::Relaxed);
            stream.signals.finish();
        }
    }
}

impl<B: Body<Data = Bytes>> Body for Streamed<B> {
    type Data = Bytes;
    type Error = B::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, B::Error>>> {
        let this = self.project();
        let polled = this.body.poll_frame(cx);
        let waits = matches!(polled, Poll::Ready(Some(Ok(_))));
        this.stream.pieces.fetch_add(u64::from(waits), Ordering::Relaxed);
        this.stream.waits.store(waits, Ordering::Relaxed);
        polled
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

//! One connection from its first byte to its end: hyper serves it, and beside it the peer's leaving, the
//! pace and the drain are watched. The inside of a tunnel is served the same way.

use std::convert::Infallible;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::upgrade::OnUpgrade;
use hyper::{Method, Request, StatusCode, Version};
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::bell::{Behind, Bell};
use super::ca::Authority;
use super::inside::Opened;
use super::socket::{LINGER, Phase, Signals, Socket};
use super::streams::PREFACE;
use super::watched::Watched;
use super::wire::Wire;
use super::{Conn, Serve};
use crate::config::{Limits, Timeouts};
use crate::model::{Inside, Site};

/// What ended the service of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Ended {
    /// hyper: the last answer is out, or the connection was handed over or broke.
    Served,
    /// The peer.
    Gone,
    /// The pace.
    TooSlow,
    /// What it was served for must not go on.
    Cut,
}

/// An accepted connection, and what it is served with.
pub(super) struct Serving<S> {
    pub(super) http: http1::Builder,
    pub(super) socket: Arc<Socket>,
    pub(super) conn: Conn,
    pub(super) service: S,
    pub(super) timeouts: Timeouts,
    pub(super) drain: CancellationToken,
    pub(super) limits: Limits,
    /// Where the tasks of HTTP/2 streams are counted.
    pub(super) tasks: TaskTracker,
    /// Certificates for the insides of tunnels.
    pub(super) authority: Option<Arc<Authority>>,
}

impl<S: Serve> Serving<S> {
    /// Serves the connection until its end, its peer's leaving, or a timeout.
    pub(super) async fn run(self) {
        let signals = self.conn.signals.clone();
        let mut wire = Wire::new(self.socket.clone(), signals.clone());
        let since = Instant::now();
        let mut ended = match self.begins_with_http2(&mut wire, since).await {
            // Boxed, so that connections without it do not carry its size.
            Ok(true) => Box::pin(self.http2(wire, None, since)).await,
            Ok(false) => self.http1(Watched::new(wire, signals.clone()), None, since).await,
            Err(ended) => ended,
        };
        if let Some(opened) = signals.take_opened() {
            ended = Box::pin(self.inside(opened)).await;
        }
        match ended {
            Ended::Served if signals.is_handed_over() || signals.closes_by_reset() => {}
            Ended::Served => self.socket.linger().await,
            Ended::TooSlow if signals.phase() == Phase::Busy => signals.close_by_reset(),
            Ended::TooSlow if signals.phase() == Phase::Head => self.socket.linger().await,
            Ended::Gone | Ended::TooSlow | Ended::Cut => {}
        }
    }

    /// Whether the client begins as one does that knows of HTTP/2; or what ended it before that.
    async fn begins_with_http2(&self, wire: &mut Wire, since: Instant) -> Result<bool, Ended> {
        let beginning = tokio::time::timeout_at(since + self.timeouts.header, wire.begins_with(PREFACE));
        let begun = tokio::select! {
            biased;
            begun = beginning => begun,
            () = self.socket.gone() => return Err(Ended::Gone),
            () = self.drain.cancelled() => return Err(Ended::Gone),
        };
        match begun {
            Ok(begun) => begun.map_err(|_broken| Ended::Gone),
            // Who sent something is told, in HTTP/1.1, that it was too slow.
            Err(_) if wire.has_ahead() => Ok(false),
            Err(_) => Err(Ended::TooSlow),
        }
    }

    /// Serves HTTP/1.1 on `io`, whose client was there at `since`. A connection that is too slow was told so.
    pub(super) async fn http1<T>(&self, io: Watched<T>, inside: Option<Arc<Inside>>, since: Instant) -> Ended
    where
        T: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let signals = &self.conn.signals;
        let (asked, beside) = (Bell::here().await, Bell::here().await);
        let answer = service_fn(|request| Behind::new(&asked, self.answer(request, inside.clone())));
        let mut serving = pin!(self.http.serve_connection(TokioIo::new(io), answer).with_upgrades());
        let mut gone = pin!(self.socket.gone());
        let mut draining = pin!(self.drain.cancelled());
        let mut drained = false;
        let mut pace = Pace::new(self.timeouts, since);
        let ended = std::future::poll_fn(|cx: &mut Context<'_>| {
            // hyper first: bytes that came together with the close are still read and judged.
            if serving.as_mut().poll(cx).is_ready() {
                return Poll::Ready(Ended::Served);
            }
            let mut rung = beside.rang(cx);
            if rung.as_mut().is_some_and(|cx| gone.as_mut().poll(cx).is_ready()) {
                return Poll::Ready(Ended::Gone);
            }
            if signals.poll_cut(cx).is_ready() {
                signals.close_by_reset();
                return Poll::Ready(Ended::Cut);
            }
            if !drained && rung.as_mut().is_some_and(|cx| draining.as_mut().poll(cx).is_ready()) {
                drained = true;
                serving.as_mut().graceful_shutdown();
                if serving.as_mut().poll(cx).is_ready() {
                    return Poll::Ready(Ended::Served);
                }
            }
            if drained && pace.is_fresh() && signals.phase() == Phase::Idle {
                // Nothing was ever asked here, and hyper would wait for a first request.
                return Poll::Ready(Ended::Gone);
            }
            pace.see(signals.phase(), signals.begun(), signals.stalled_since());
            match &mut rung {
                Some(cx) => pace.poll_too_slow(cx).map(|()| Ended::TooSlow),
                None => Poll::Pending,
            }
        })
        .await;
        if ended == Ended::TooSlow && signals.phase() == Phase::Head {
            signals.stop_reading();
            // hyper reads on, and so says it, under TLS too.
            let _ = tokio::time::timeout(LINGER, serving).await;
        }
        ended
    }

    /// Answers one request; notes where its tunnel is to be served here.
    async fn answer(
        &self,
        mut request: Request<Incoming>,
        inside: Option<Arc<Inside>>,
    ) -> Result<http::Response<Answered<S::Body>>, Infallible> {
        let signals = self.conn.signals.clone();
        let facts = signals.begin(request.body().is_end_stream());
        let old = request.version() == Version::HTTP_10;
        if let Some(inside) = inside {
            request.extensions_mut().insert(inside);
        }
        let connect = request.method() == Method::CONNECT;
        let upgrade = request.extensions().get::<OnUpgrade>().cloned().filter(|_| connect);
        let mut response = self.service.serve(request, facts, self.conn.clone()).await;
        let switched = response.status() == StatusCode::SWITCHING_PROTOCOLS;
        if switched || (connect && response.status().is_success()) {
            signals.hand_over();
            if let (Some(site), Some(upgrade)) = (response.extensions_mut().remove::<Arc<Site>>(), upgrade) {
                signals.open(Opened { site, upgrade });
            }
        }
        Ok(response.map(|body| Answered { body, signals, old }))
    }
}

/// How long the next head may take, told by the phase; one timer, re-armed only when it fires.
pub(super) struct Pace {
    timeouts: Timeouts,
    phase: Phase,
    /// Requests that had begun when this phase was seen.
    begun: u64,
    since: Instant,
    /// Since when the client takes nothing of its answer.
    stalled: Option<Instant>,
    /// No request has been served yet: then the first byte is due within `header`, too.
    fresh: bool,
    timer: Pin<Box<tokio::time::Sleep>>,
}

impl Pace {
    /// Of a client that was there at `since`.
    pub(super) fn new(timeouts: Timeouts, since: Instant) -> Self {
        let timer = Box::pin(tokio::time::sleep_until(since + timeouts.header));
        Self { timeouts, phase: Phase::Idle, begun: 0, since, stalled: None, fresh: true, timer }
    }

    /// Whether nothing was asked yet.
    pub(super) fn is_fresh(&self) -> bool {
        self.fresh
    }

    /// From now on it may lie idle for so long only.
    pub(super) fn idle_at_most(&mut self, time: Duration) {
        self.timeouts.keep_alive = self.timeouts.keep_alive.min(time);
    }

    /// Takes note of where the connection is now, and how many requests began on it. Whoever waits by
    /// [`Self::poll_too_slow`] need not be woken before it is.
    pub(super) fn see(&mut self, phase: Phase, begun: u64, stalled: Option<Instant>) {
        self.stalled = stalled;
        if phase != self.phase || begun != self.begun {
            self.fresh &= phase == Phase::Head && begun == 0;
            // The first head's time runs from the accept, not from its first byte; a request's is not told here.
            if phase != Phase::Busy && !(self.fresh && phase == Phase::Head) {
                self.since = Instant::now();
            }
            (self.phase, self.begun) = (phase, begun);
        }
        if let Some(due) = self.due().filter(|due| *due < self.timer.deadline()) {
            // It wakes whom it would have woken.
            self.timer.as_mut().reset(due);
        }
    }

    /// Ready when the time of the phase that was last seen is over.
    pub(super) fn poll_too_slow(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        loop {
            if self.timer.as_mut().poll(cx).is_pending() {
                return Poll::Pending;
            }
            match self.due() {
                Some(due) if due <= Instant::now() => return Poll::Ready(()),
                Some(due) => self.timer.as_mut().reset(due),
                // Nothing is due; look again after a while, or when something changes.
                None => self.timer.as_mut().reset(Instant::now() + self.timeouts.keep_alive),
            }
        }
    }

    /// When this phase has taken too long. A request is bounded by its own timeouts, but for a client that
    /// takes nothing of its answer.
    fn due(&self) -> Option<Instant> {
        match self.phase {
            Phase::Busy => self.stalled.map(|since| since + self.timeouts.idle),
            Phase::Idle if !self.fresh => Some(self.since + self.timeouts.keep_alive),
            _ => Some(self.since + self.timeouts.header),
        }
    }
}

pin_project_lite::pin_project! {
    /// An answer on its way to the client; tells the connection when it has ended.
    struct Answered<B> {
        #[pin]
        body: B,
        signals: Arc<Signals>,
        // The client speaks HTTP/1.0: an answer of unknown length ends with the connection, so only a
        // reset tells a broken one from a complete one.
        old: bool,
    }

    impl<B> PinnedDrop for Answered<B> {
        fn drop(this: Pin<&mut Self>) {
            this.project().signals.finish();
        }
    }
}

impl<B: Body<Data = Bytes>> Body for Answered<B> {
    type Data = Bytes;
    type Error = B::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, B::Error>>> {
        let this = self.project();
        let polled = this.body.poll_frame(cx);
        // The whole connection is cut, not this answer alone: hyper would end it in good order.
        if matches!(polled, Poll::Ready(Some(Err(_))))
            && (*this.old || this.signals.poll_cut_for_good(cx).is_ready())
        {
            this.signals.close_by_reset();
        }
        polled
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

//! An answer's body on its way to the client, holding what must be held until its last byte.

use std::collections::VecDeque;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http::HeaderMap;
use http_body::{Body, Frame, SizeHint};
use hyper::body::Incoming;
use tokio::time::{Instant, Sleep};

/// How an answer's body ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ending {
    /// Its last byte was handed to the client's connection.
    Complete,
    /// The client left.
    ClientGone,
    /// The provider broke it off.
    UpstreamBroke,
    /// The provider sent nothing for `timeouts.idle`.
    Idle,
    /// The guard said that it must end (its lease was lost).
    Cut,
}

/// What a body holds while it streams. Dropped with the body, whatever ends it.
pub trait Guard: Send + Unpin + 'static {
    /// Ready when the body must be cut now. Asked before every chunk, so it must be cheap.
    fn poll_cut(&mut self, cx: &mut Context<'_>) -> Poll<()>;
    /// Sees the trailers on their way.
    fn trailers(&mut self, trailers: &mut HeaderMap);
    /// Called once, at the body's end.
    fn ended(&mut self, how: Ending);
}

/// Why a body was broken off; the client sees a broken stream, never a clean end.
#[derive(Debug, thiserror::Error)]
pub enum Broken {
    /// The provider's side.
    #[error("the provider broke off its answer")]
    Upstream(#[source] hyper::Error),
    /// Nothing came for too long.
    #[error("the provider sent nothing for {0:?} (timeouts.idle)")]
    Idle(Duration),
    /// The lease was lost.
    #[error("the lease of this stream was lost")]
    Cut,
}

/// Frames that were read ahead of where a body is passed on, and the error that ended them, if one did:
/// hyper tells it once only.
pub type Ahead = VecDeque<Result<Frame<Bytes>, hyper::Error>>;

/// The body. First what was read ahead of it, then the rest as it comes, chunk by chunk.
pub struct Held<G: Guard> {
    ahead: VecDeque<Result<Frame<Bytes>, hyper::Error>>,
    /// How the provider broke it off, to be told at the next poll.
    broke: Option<hyper::Error>,
    inner: Option<Incoming>,
    guard: Option<G>,
    idle: Duration,
    last: Instant,
    timer: Option<Pin<Box<Sleep>>>,
}

impl<G: Guard> Held<G> {
    /// `ahead` was read off `inner` already, an error included. `inner` is `None` where it ended there.
    pub fn new(ahead: Ahead, inner: Option<Incoming>, idle: Duration, guard: G) -> Self {
        let (last, guard) = (Instant::now(), Some(guard));
        let mut held = Self { ahead, broke: None, inner, guard, idle, last, timer: None };
        if held.is_over() {
            held.end(Ending::Complete);
        }
        held
    }

    fn is_over(&self) -> bool {
        self.ahead.is_empty() && self.inner.as_ref().is_none_or(Body::is_end_stream)
    }

    fn end(&mut self, how: Ending) {
        if let Some(mut guard) = self.guard.take() {
            guard.ended(how);
        }
        if how != Ending::Complete {
            // Dropping it cancels the provider's side at once.
            self.inner = None;
        }
    }

    /// Waits no longer than `idle` since the last chunk; one timer, re-armed only when it fires.
    fn poll_idle(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let (last, idle) = (self.last, self.idle);
        let timer = self.timer.get_or_insert_with(|| Box::pin(tokio::time::sleep_until(last + idle)));
        loop {
            if timer.as_mut().poll(cx).is_pending() {
                return Poll::Pending;
            }
            let due = last + idle;
            if due <= Instant::now() {
                return Poll::Ready(());
            }
            timer.as_mut().reset(due);
        }
    }
}

impl<G: Guard> Body for Held<G> {
    type Data = Bytes;
    type Error = Broken;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Broken>>> {
        let this = &mut *self;
        if let Some(guard) = &mut this.guard
            && guard.poll_cut(cx).is_ready()
        {
            this.end(Ending::Cut);
            return Poll::Ready(Some(Err(Broken::Cut)));
        }
        if let Some(error) = this.broke.take() {
            return Poll::Ready(Some(Err(Broken::Upstream(error))));
        }
        let polled = match (this.ahead.pop_front(), &mut this.inner) {
            (Some(frame), _) => Poll::Ready(Some(frame)),
            (None, Some(inner)) => Pin::new(inner).poll_frame(cx),
            (None, None) => Poll::Ready(None),
        };
        match polled {
            Poll::Ready(Some(Ok(mut frame))) => {
                this.last = Instant::now();
                if let (Some(trailers), Some(guard)) = (frame.trailers_mut(), &mut this.guard) {
                    guard.trailers(trailers);
                }
                if this.is_over() {
                    this.end(Ending::Complete);
                }
                Poll::Ready(Some(Ok(frame)))
            }
            Poll::Ready(Some(Err(error))) => {
                this.end(Ending::UpstreamBroke);
                // hyper throws away what it has not written yet when a body fails: what came before the
                // break, the head above all, is let out first.
                this.broke = Some(error);
                cx.waker().wake_by_ref();
                Poll::Pending
            }
            Poll::Ready(None) => {
                this.end(Ending::Complete);
                Poll::Ready(None)
            }
            Poll::Pending => {
                if this.poll_idle(cx).is_ready() {
                    this.end(Ending::Idle);
                    return Poll::Ready(Some(Err(Broken::Idle(this.idle))));
                }
                Poll::Pending
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        // A guard that is still held has something to say first.
        self.guard.is_none() && self.broke.is_none() && self.is_over()
    }

    fn size_hint(&self) -> SizeHint {
        let rest = self.inner.as_ref().map_or_else(|| SizeHint::with_exact(0), Body::size_hint);
        if self.ahead.is_empty() {
            return rest;
        }
        let ahead =
            self.ahead.iter().flatten().filter_map(Frame::data_ref).map(Bytes::len).sum::<usize>() as u64;
        let mut hint = SizeHint::new();
        hint.set_lower(rest.lower() + ahead);
        if let Some(upper) =
            rest.upper().filter(|_| self.ahead.iter().all(|next| next.as_ref().is_ok_and(Frame::is_data)))
        {
            hint.set_upper(upper + ahead);
        }
        hint
    }
}

impl<G: Guard> Drop for Held<G> {
    fn drop(&mut self) {
        let how = if self.is_over() { Ending::Complete } else { Ending::ClientGone };
        self.end(how);
    }
}

impl<G: Guard> std::fmt::Debug for Held<G> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Held").finish_non_exhaustive()
    }
}

//! An answer's body on its way to the client, holding what must be held until its last byte.
//!
//! Each piece goes through the [`Guard`], which may change it and hold some of it back. Where the body
//! breaks off, what the guard holds back is dropped: the client sees a cut, and not more than was sure.

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
    /// The provider sent nothing for `timeouts.idle`, while something was waited for.
    Idle,
    /// The guard said that it must end (its lease was lost).
    Cut,
}

/// What a body holds while it streams. Dropped with the body, whatever ends it.
pub trait Guard: Send + Unpin + 'static {
    /// Ready when the body must be cut now. Asked before every chunk, so it must be cheap.
    fn poll_cut(&mut self, cx: &mut Context<'_>) -> Poll<()>;
    /// Takes a piece of the body. Called only when [`Guard::take`] has nothing more.
    fn feed(&mut self, data: Bytes);
    /// The body ends here.
    fn finish(&mut self);
    /// The next piece to pass on, or why the body cannot go on.
    fn take(&mut self) -> Option<Result<Bytes, std::io::Error>>;
    /// How many bytes were fed and have not come out; `None` where it cannot be said how many will.
    fn inside(&self) -> Option<usize>;
    /// Whether nothing comes out before something is fed.
    fn is_empty(&self) -> bool;
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
    /// What it sent cannot be read.
    #[error("the provider's answer cannot be passed on")]
    Garbled(#[source] std::io::Error),
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
    broke: Option<Broken>,
    inner: Option<Incoming>,
    /// Whether the guard was told of the body's end.
    finished: bool,
    /// Came, and wait for what the guard still has.
    trailers: Option<HeaderMap>,
    guard: Option<G>,
    idle: Duration,
    /// Since when the provider is waited for. A client that takes nothing is not the provider's fault.
    since: Option<Instant>,
    timer: Option<Pin<Box<Sleep>>>,
}

impl<G: Guard> Held<G> {
    /// `ahead` was read off `inner` already, an error included. `inner` is `None` where it ended there.
    pub fn new(ahead: Ahead, inner: Option<Incoming>, idle: Duration, guard: G) -> Self {
        let guard = Some(guard);
        let (broke, trailers, since, timer) = (None, None, None, None);
        let mut held = Self { ahead, broke, inner, finished: false, trailers, guard, idle, since, timer };
        if held.is_over() {
            held.end(Ending::Complete);
        }
        held
    }

    /// Whether all of it came.
    fn has_come(&self) -> bool {
        self.ahead.is_empty() && self.inner.as_ref().is_none_or(Body::is_end_stream)
    }

    /// Whether all of it was passed on.
    fn is_over(&self) -> bool {
        self.has_come() && self.trailers.is_none() && self.guard.as_ref().is_none_or(Guard::is_empty)
    }

    /// What the guard, and then the trailers behind it, have to pass on.
    fn next_ready(&mut self) -> Option<Result<Frame<Bytes>, std::io::Error>> {
        let guard = self.guard.as_mut()?;
        match guard.take() {
            Some(Ok(data)) => Some(Ok(Frame::data(data))),
            Some(Err(error)) => Some(Err(error)),
            None => {
                let mut trailers = self.trailers.take()?;
                guard.trailers(&mut trailers);
                Some(Ok(Frame::trailers(trailers)))
            }
        }
    }

    /// Gives the guard what came.
    fn take_in(&mut self, frame: Frame<Bytes>) {
        self.since = None;
        let has_come = self.has_come();
        let Some(guard) = &mut self.guard else { return };
        let at_end = match frame.into_data() {
            Ok(data) => {
                guard.feed(data);
                has_come
            }
            Err(frame) => {
                self.trailers = frame.into_trailers().ok();
                true
            }
        };
        if at_end && !std::mem::replace(&mut self.finished, true) {
            guard.finish();
        }
    }

    /// Ends it as broken. hyper throws away what it has not written yet when a body fails: what came before
    /// the break, the head above all, is let out first.
    fn break_off(&mut self, why: Broken, cx: &Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Broken>>> {
        self.ahead.clear();
        self.end(Ending::UpstreamBroke);
        self.broke = Some(why);
        cx.waker().wake_by_ref();
        Poll::Pending
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

    /// Waits no longer than `idle` for the next chunk; one timer, re-armed only when it fires.
    fn poll_idle(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let due = *self.since.get_or_insert_with(Instant::now) + self.idle;
        let timer = self.timer.get_or_insert_with(|| Box::pin(tokio::time::sleep_until(due)));
        loop {
            if timer.as_mut().poll(cx).is_pending() {
                return Poll::Pending;
            }
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
        if let Some(broken) = this.broke.take() {
            return Poll::Ready(Some(Err(broken)));
        }
        loop {
            match this.next_ready() {
                Some(Ok(frame)) => {
                    if this.is_over() {
                        this.end(Ending::Complete);
                    }
                    return Poll::Ready(Some(Ok(frame)));
                }
                Some(Err(error)) => return this.break_off(Broken::Garbled(error), cx),
                None => {}
            }
            let polled = match (this.ahead.pop_front(), &mut this.inner) {
                (Some(frame), _) => Poll::Ready(Some(frame)),
                (None, Some(inner)) => Pin::new(inner).poll_frame(cx),
                (None, None) => Poll::Ready(None),
            };
            match polled {
                Poll::Ready(Some(Ok(frame))) => this.take_in(frame),
                Poll::Ready(Some(Err(error))) => return this.break_off(Broken::Upstream(error), cx),
                Poll::Ready(None) if this.guard.is_some() && !this.finished => {
                    this.finished = true;
                    this.guard.iter_mut().for_each(Guard::finish);
                }
                Poll::Ready(None) => {
                    this.end(Ending::Complete);
                    return Poll::Ready(None);
                }
                Poll::Pending if this.poll_idle(cx).is_ready() => {
                    this.end(Ending::Idle);
                    return Poll::Ready(Some(Err(Broken::Idle(this.idle))));
                }
                Poll::Pending => return Poll::Pending,
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        // A guard that is still held has something to say first.
        self.guard.is_none() && self.broke.is_none() && self.is_over()
    }

    fn size_hint(&self) -> SizeHint {
        let Some(inside) = self.guard.as_ref().map_or(Some(0), Guard::inside) else {
            return SizeHint::default();
        };
        let rest = self.inner.as_ref().map_or_else(|| SizeHint::with_exact(0), Body::size_hint);
        let ahead = self.ahead.iter().flatten().filter_map(Frame::data_ref).map(Bytes::len).sum::<usize>();
        let here = (ahead + inside) as u64;
        let mut hint = SizeHint::new();
        hint.set_lower(rest.lower() + here);
        if let Some(upper) =
            rest.upper().filter(|_| self.ahead.iter().all(|next| next.as_ref().is_ok_and(Frame::is_data)))
        {
            hint.set_upper(upper + here);
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

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a test that fails may panic
mod tests {
    use std::task::Waker;

    use http_body_util::{BodyExt as _, Empty};
    use hyper::Request;
    use hyper_util::rt::TokioIo;
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, DuplexStream};

    use super::*;

    /// Passes all on.
    #[derive(Default)]
    struct Open(Option<Bytes>);

    impl Guard for Open {
        fn poll_cut(&mut self, _: &mut Context<'_>) -> Poll<()> {
            Poll::Pending
        }
        fn feed(&mut self, data: Bytes) {
            self.0 = Some(data);
        }
        fn finish(&mut self) {}
        fn take(&mut self) -> Option<Result<Bytes, std::io::Error>> {
            self.0.take().map(Ok)
        }
        fn inside(&self) -> Option<usize> {
            self.0.as_ref().map(Bytes::len)
        }
        fn is_empty(&self) -> bool {
            self.0.is_none()
        }
        fn trailers(&mut self, _: &mut HeaderMap) {}
        fn ended(&mut self, _: Ending) {}
    }

    /// An answer whose body goes on, and the provider's end of its connection.
    async fn answer() -> (Incoming, DuplexStream) {
        let (near, mut far) = tokio::io::duplex(1 << 10);
        let (mut sender, connection) =
            hyper::client::conn::http1::handshake(TokioIo::new(near)).await.unwrap();
        tokio::spawn(connection);
        let answering = async {
            // An answer before its request would be refused.
            far.read_u8().await.unwrap();
            far.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 6\r\n\r\none").await.unwrap();
        };
        let request = Request::new(Empty::<Bytes>::new());
        let (answer, ()) = tokio::join!(sender.send_request(request), answering);
        (answer.unwrap().into_body(), far)
    }

    #[tokio::test(start_paused = true)]
    async fn the_time_in_which_nobody_asks_for_more_is_not_the_providers() {
        let idle = Duration::from_secs(10);
        let (body, mut provider) = answer().await;
        let mut held = Held::new(Ahead::new(), Some(body), idle, Open::default());
        assert_eq!(held.frame().await.unwrap().unwrap().into_data().unwrap(), "one");
        // The client takes nothing of what came, so nothing more is asked for.
        tokio::time::sleep(idle * 3).await;
        let mut cx = Context::from_waker(Waker::noop());
        assert!(Pin::new(&mut held).poll_frame(&mut cx).is_pending(), "cut when it was first asked");
        tokio::time::sleep(idle / 2).await;
        provider.write_all(b"tw").await.unwrap();
        assert_eq!(held.frame().await.unwrap().unwrap().into_data().unwrap(), "tw");
        let begun = Instant::now();
        let cut = held.frame().await.unwrap().unwrap_err();
        assert!(matches!(cut, Broken::Idle(_)), "{cut}");
        assert_eq!(begun.elapsed().as_secs(), idle.as_secs());
    }
}

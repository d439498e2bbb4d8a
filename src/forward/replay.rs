//! A request body that streams to the provider and is kept, within bounds, so that it can be sent again.
//!
//! The body is read from the client in one place only. What was read is kept until a bound is passed
//! (this body's, or that of all bodies together); from then on it only streams, and cannot be repeated.
//!
//! Where the rest must be read before anything is sent, for what stands in it, one that meets the bound of all
//! waits for room, or for its turn to go beyond it: one body at a time, which then is kept for no other sending.
//! Memory: at most `max_body` a request, and `max_total` and one `max_body` together; the first [`FREE`] bytes of
//! each are not counted, so that small bodies never wait for large ones.

use std::collections::VecDeque;
use std::pin::Pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http::HeaderMap;
use http_body::{Body, Frame, SizeHint};
use hyper::body::Incoming;
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, Sleep};

use crate::config::Provider;

/// What keeping one more chunk costs beside its bytes.
const CHUNK_COST: usize = 64;
/// What each body may have of its own.
pub const FREE: usize = 64 * 1024;

/// Bytes kept by all requests together.
#[derive(Debug, Clone)]
pub struct Budget(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    used: AtomicUsize,
    max: usize,
    /// Told when there is room again.
    room: Notify,
    /// Who may go beyond `max`.
    beyond: Arc<Semaphore>,
}

impl Budget {
    /// At most `max` bytes.
    pub fn new(max: usize) -> Self {
        let (used, room, beyond) = (AtomicUsize::new(0), Notify::new(), Arc::new(Semaphore::new(1)));
        Self(Arc::new(Shared { used, max, room, beyond }))
    }

    /// `beyond`: also where there is no room.
    fn take(&self, bytes: usize, beyond: bool) -> bool {
        let took = self.0.used.fetch_update(Ordering::AcqRel, Ordering::Acquire, |used| {
            used.checked_add(bytes).filter(|sum| beyond || *sum <= self.0.max)
        });
        took.is_ok()
    }

    fn give_back(&self, bytes: usize) {
        if bytes > 0 {
            self.0.used.fetch_sub(bytes, Ordering::AcqRel);
            self.0.room.notify_waiters();
        }
    }
}

/// Why a request body ended before its end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum BodyFault {
    /// The client's framing is broken, or it left.
    #[error("the client's body broke off or is malformed")]
    Broken,
    /// Nothing came for `timeouts.body_idle`.
    #[error("the client sent nothing more of its body in time")]
    Idle,
}

/// Why nothing of a body moves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Quiet {
    /// It is all sent, for so long.
    Sent(Duration),
    /// The client is waited for; the body's own time runs.
    Client,
    /// The provider has taken none of it for so long.
    Untaken(Duration),
}

/// A request's body, to be sent once or several times.
#[derive(Debug)]
pub struct Replay(Option<Arc<Announced>>);

/// A body that the client announced.
#[derive(Debug)]
struct Announced {
    /// What was said of its length.
    hint: SizeHint,
    /// The client waits for `100 Continue`, which reading sends.
    awaited: bool,
    source: Mutex<Source>,
}

impl Announced {
    fn source(&self) -> MutexGuard<'_, Source> {
        // A panic while the lock was held leaves at worst a body that ends in an error.
        self.source.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Takes out of trailers what must not leave, on its way to this provider.
type Strip = fn(&mut HeaderMap, Option<&Provider>);

#[derive(Debug)]
struct Source {
    incoming: Incoming,
    chunks: VecDeque<Bytes>,
    trailers: Option<HeaderMap>,
    kept: usize,
    /// What was taken of the budget: the bytes, and what keeping each chunk costs. Of the first of `chunks`, for as
    /// long as they are there, whether or not they are kept for another sending.
    charged: usize,
    strip: Strip,
    to: Option<Arc<Provider>>,
    max: usize,
    budget: Budget,
    /// Whether, and what of the last chunk, found no room in the budget: the one reason why it is not kept.
    starved: Option<usize>,
    /// Its turn to go beyond the budget; kept for as long as anything is charged.
    beyond: Option<OwnedSemaphorePermit>,
    /// Everything read so far is in `chunks`.
    keeping: bool,
    ended: bool,
    fault: Option<BodyFault>,
    idle: Duration,
    /// Runs while the client is waited for.
    timer: Option<Pin<Box<Sleep>>>,
    /// When a sending last had something of the client, or the end.
    progress: Option<Instant>,
}

impl Replay {
    /// A body that is kept up to `max` bytes, within `budget`, and may pause for `idle`. `awaited`: the client sends
    /// it only once it is read.
    ///
    /// `strip` takes out of its trailers what must not leave, on their way to `to`.
    pub fn new(
        incoming: Incoming,
        awaited: bool,
        max: usize,
        budget: &Budget,
        idle: Duration,
        strip: Strip,
        to: Option<Arc<Provider>>,
    ) -> Self {
        if incoming.is_end_stream() {
            return Self(None);
        }
        let hint = incoming.size_hint();
        // A body known to be too large is not kept at all: half of one is of no use.
        let keeping = hint.lower() <= u64::try_from(max).unwrap_or(u64::MAX);
        let source = Source {
            incoming,
            chunks: VecDeque::new(),
            trailers: None,
            kept: 0,
            charged: 0,
            strip,
            to,
            max,
            budget: budget.clone(),
            starved: None,
            beyond: None,
            keeping,
            ended: false,
            fault: None,
            idle,
            timer: None,
            progress: None,
        };
        Self(Some(Arc::new(Announced { hint, awaited, source: Mutex::new(source) })))
    }

    /// No body at all.
    pub fn none() -> Self {
        Self(None)
    }

    fn source(&self) -> Option<MutexGuard<'_, Source>> {
        self.0.as_deref().map(Announced::source)
    }

    /// Whether the client announced a body.
    pub fn has_body(&self) -> bool {
        self.0.is_some()
    }

    /// Whether the whole body is at hand, so that it can be sent again.
    pub fn is_whole(&self) -> bool {
        self.source().is_none_or(|source| source.ended && source.keeping && source.fault.is_none())
    }

    /// Whether more of the body may be read ahead into the buffer: not where reading is what makes the client
    /// send it.
    pub fn may_read_ahead(&self) -> bool {
        let can_read = |source: &Source| !source.ended && source.keeping && source.fault.is_none();
        self.0.as_deref().is_some_and(|body| !body.awaited && can_read(&body.source()))
    }

    /// Whether more of the body may come of the client.
    pub fn is_unread(&self) -> bool {
        self.source().is_some_and(|source| !source.ended)
    }

    /// Reads what is left of a small body, for so long at most: whether the client has nothing more to send.
    pub async fn read_out(&self, time: Duration) -> bool {
        let is_small = |body: &Arc<Announced>| body.hint.upper().is_some_and(|most| most <= FREE as u64);
        if self.0.as_ref().is_some_and(is_small) && self.may_read_ahead() {
            // What became of it is told by what it has come to.
            let _ = tokio::time::timeout(time, self.read_ahead(|_| false)).await;
        }
        !self.is_unread()
    }

    /// Why the body broke off, if it did.
    pub fn fault(&self) -> Option<BodyFault> {
        self.source().and_then(|source| source.fault)
    }

    /// Who is waited for, and how long ago something of the body last moved on. What was read ahead of a sending
    /// counts as long ago.
    pub fn quiet(&self) -> Quiet {
        let Some(source) = self.source() else { return Quiet::Sent(Duration::MAX) };
        let since = source.progress.map_or(Duration::MAX, |progress| progress.elapsed());
        match () {
            () if source.ended => Quiet::Sent(since),
            () if source.timer.is_some() => Quiet::Client,
            () => Quiet::Untaken(since),
        }
    }

    /// Reads ahead into the buffer until `enough` says so (it sees every chunk once, from the first), the
    /// body ends, or it cannot be kept. `true` when it ended whole. Cancel safe: what was read is kept.
    pub async fn read_ahead(&self, mut enough: impl FnMut(&[u8]) -> bool) -> Result<bool, BodyFault> {
        let mut next = 0;
        std::future::poll_fn(|cx| {
            let Some(mut source) = self.source() else { return Poll::Ready(Ok(true)) };
            loop {
                while let Some(chunk) = source.chunks.get(next) {
                    next += 1;
                    if enough(chunk) {
                        return Poll::Ready(Ok(false));
                    }
                }
                if let Some(fault) = source.fault {
                    return Poll::Ready(Err(fault));
                }
                if source.ended || !source.keeping {
                    return Poll::Ready(Ok(source.ended && source.keeping));
                }
                if source.poll_more(cx).is_pending() {
                    return Poll::Pending;
                }
            }
        })
        .await
    }

    /// Whether reading ahead ended for want of room in the budget, and nothing else.
    pub fn is_starved(&self) -> bool {
        self.source().is_some_and(|source| source.starved.is_some())
    }

    /// Waits until a starved body may be read on, at most until then; whether it may. Cancel safe: who leaves gives
    /// up its turn.
    pub async fn room(&self, until: Instant) -> bool {
        let Some(budget) = self.source().map(|source| source.budget.clone()) else { return true };
        let turn = budget.0.beyond.clone().acquire_owned();
        tokio::pin!(turn);
        loop {
            let freed = budget.0.room.notified();
            tokio::pin!(freed);
            // From here on no room that becomes free is missed.
            freed.as_mut().enable();
            if self.source().is_none_or(|mut source| source.read_on(None)) {
                return true;
            }
            tokio::select! {
                biased;
                turn = &mut turn => {
                    // The semaphore is never closed.
                    return turn.is_ok_and(|turn| self.source().is_none_or(|mut source| source.read_on(Some(turn))));
                }
                () = freed => {}
                () = tokio::time::sleep_until(until) => return false,
            }
        }
    }

    /// What went beyond the budget is sent once only: nothing of it is kept from here on.
    pub fn spare(&self) {
        if let Some(mut source) = self.source()
            && source.beyond.is_some()
        {
            source.stop_keeping();
        }
    }

    /// The body from its start. One that is read beyond what is kept can be had once only.
    pub fn body(&self) -> ReplayBody {
        let done = self.source().is_none_or(|source| source.is_all_before(0));
        ReplayBody { body: self.0.clone(), next: 0, done }
    }
}

impl Source {
    /// Waits for one more frame of the client's and takes it in. Ready without a chunk at the end, on a
    /// fault, or when the frame is only to be streamed (then it is the last of `chunks`).
    fn poll_more(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        match Pin::new(&mut self.incoming).poll_frame(cx) {
            Poll::Ready(Some(Ok(frame))) => {
                self.timer = None;
                match frame.into_data() {
                    Ok(data) => self.take_in(data),
                    Err(frame) => {
                        self.trailers = frame.into_trailers().ok();
                        if let Some(trailers) = &mut self.trailers {
                            (self.strip)(trailers, self.to.as_deref());
                        }
                    }
                }
                self.ended |= self.incoming.is_end_stream();
                Poll::Ready(())
            }
            Poll::Ready(Some(Err(_))) => {
                self.fault = Some(BodyFault::Broken);
                Poll::Ready(())
            }
            Poll::Ready(None) => {
                self.ended = true;
                Poll::Ready(())
            }
            Poll::Pending => {
                let idle = self.idle;
                let timer = self.timer.get_or_insert_with(|| Box::pin(tokio::time::sleep(idle)));
                if timer.as_mut().poll(cx).is_ready() {
                    self.fault = Some(BodyFault::Idle);
                    return Poll::Ready(());
                }
                Poll::Pending
            }
        }
    }

    fn take_in(&mut self, data: Bytes) {
        if self.keeping {
            let (kept, cost) = (self.kept + data.len(), data.len() + CHUNK_COST);
            // A body of tiny chunks costs many times its bytes; it is kept as long as that stays in bounds.
            let tiny = self.chunks.len() * CHUNK_COST > self.max;
            if kept > self.max || tiny {
                self.stop_keeping();
            } else if self.charge(kept, cost) {
                self.kept = kept;
            } else {
                self.stop_keeping();
                self.starved = Some(cost);
            }
        }
        self.chunks.push_back(data);
    }

    /// Takes `cost` more of the budget for a body of which `kept` bytes are kept then.
    fn charge(&mut self, kept: usize, cost: usize) -> bool {
        if self.charged == 0 && kept + (self.chunks.len() + 1) * CHUNK_COST <= FREE {
            return true;
        }
        let took = self.budget.take(cost, self.beyond.is_some());
        self.charged += if took { cost } else { 0 };
        took
    }

    /// Keeps on, where there is room for what found none, or with a turn to go beyond it.
    fn read_on(&mut self, turn: Option<OwnedSemaphorePermit>) -> bool {
        let Some(cost) = self.starved else { return true };
        if !self.budget.take(cost, turn.is_some()) {
            return false;
        }
        (self.starved, self.beyond) = (None, turn);
        self.charged += cost;
        self.kept = self.chunks.iter().map(Bytes::len).sum();
        self.keeping = true;
        true
    }

    /// Whether nothing more comes from the chunk of this number on.
    fn is_all_before(&self, next: usize) -> bool {
        self.ended && self.fault.is_none() && next >= self.chunks.len() && self.trailers.is_none()
    }

    /// What was read stays where it is, and charged for, until it is sent.
    fn stop_keeping(&mut self) {
        self.keeping = false;
        self.kept = 0;
    }

    /// Takes the first chunk out, to be sent and not kept.
    fn take_out(&mut self) -> Option<Bytes> {
        let chunk = self.chunks.pop_front()?;
        let freed = self.charged.min(chunk.len() + CHUNK_COST);
        self.charged -= freed;
        self.budget.give_back(freed);
        if self.charged == 0 {
            self.beyond = None;
        }
        Some(chunk)
    }
}

impl Drop for Source {
    fn drop(&mut self) {
        self.budget.give_back(self.charged);
    }
}

/// One sending of a [`Replay`]. Small, for hyper keeps room for 32 of them with each connection to a provider.
#[derive(Debug)]
pub struct ReplayBody {
    body: Option<Arc<Announced>>,
    next: usize,
    /// All of it was handed on.
    done: bool,
}

impl ReplayBody {
    /// No body at all.
    pub fn empty() -> Self {
        Self { body: None, next: 0, done: true }
    }
}

impl Body for ReplayBody {
    type Data = Bytes;
    type Error = BodyFault;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BodyFault>>> {
        let this = &mut *self;
        let Some(body) = this.body.as_deref().filter(|_| !this.done) else { return Poll::Ready(None) };
        let mut source = body.source();
        loop {
            let chunk = if source.keeping {
                source.chunks.get(this.next).cloned().inspect(|_| this.next += 1)
            } else {
                // It cannot be sent again: what has been sent goes, and each chunk as it is.
                for _ in 0..std::mem::take(&mut this.next) {
                    source.take_out();
                }
                source.take_out()
            };
            if let Some(chunk) = chunk {
                this.done = source.is_all_before(this.next);
                return Poll::Ready(Some(Ok(Frame::data(chunk))));
            }
            if let Some(fault) = source.fault {
                return Poll::Ready(Some(Err(fault)));
            }
            if source.ended {
                this.done = true;
                return Poll::Ready(source.trailers.clone().map(|trailers| Ok(Frame::trailers(trailers))));
            }
            if source.poll_more(cx).is_pending() {
                return Poll::Pending;
            }
            source.progress = Some(Instant::now());
        }
    }

    fn is_end_stream(&self) -> bool {
        self.done
    }

    fn size_hint(&self) -> SizeHint {
        self.body.as_deref().map_or_else(|| SizeHint::with_exact(0), |body| body.hint)
    }
}

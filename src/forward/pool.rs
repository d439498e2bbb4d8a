//! Connections to a provider's host, each kept for the next request once its answer was read whole.
//!
//! A request goes by the connection that came back last, so that those which are not needed grow old: an idle one
//! is closed after [`IDLE`], or beyond [`SIZE`] of them, or with the pool. One that the host closes ends its own
//! task, which takes it out. A connection that hyper does not call ready for another request is never kept, so
//! what a host says beyond its answer reaches nobody.
//!
//! A request that found its connection closed before anything of it was sent goes by a new one, once. Nothing else
//! is sent again here.
//!
//! A connection's task needs no end but its connection's: hyper closes that as soon as nobody can send by it and
//! nobody reads its answer.

use std::collections::VecDeque;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use http::uri::{Authority, Scheme};
use http::{Request, Response, Uri};
use hyper::body::Incoming;
use hyper::client::conn::TrySendError;
use hyper::client::conn::http1::{Builder, SendRequest};
use tokio::sync::oneshot;
use tokio::time::Instant;
use tokio_util::task::AbortOnDropHandle;
use tower::ServiceExt as _;
use tower_service::Service;

use super::Https;
use super::dial::BoxError;
use super::replay::ReplayBody;

/// How long an idle connection is kept: below what providers' balancers keep, since a POST on a connection that is
/// just being closed fails and may not be repeated.
const IDLE: Duration = Duration::from_secs(30);

/// Idle connections kept to one host.
const SIZE: usize = 256;

/// Hosts beside the first to which connections are kept.
const HOSTS: usize = 256;

/// The largest head of an answer.
const MAX_ANSWER_HEAD: usize = 256 * 1024;

/// A connection as it is dialled.
pub(super) type Io = <Https as Service<Uri>>::Response;

type Sender = SendRequest<ReplayBody>;

/// Why no answer's head came.
#[derive(Debug)]
pub(super) enum Failed {
    /// There was no connection, so nothing was sent.
    Connect(BoxError),
    /// The connection broke.
    Send(hyper::Error),
}

/// A request on its way, to the head of its answer. Boxed, for what waits for it is moved about.
pub(super) type Sending = Pin<Box<dyn Future<Output = Result<Response<Incoming>, Failed>> + Send>>;

/// The pools of a provider, or of all hosts that are none's: one a host.
pub(super) struct Pools {
    /// Nearly all requests of a provider go to its `base_url`.
    first: Option<Arc<Pool>>,
    others: Mutex<Vec<Arc<Pool>>>,
    connector: Https,
}

impl Pools {
    /// None yet, but for the one of `first`. Dials nothing.
    pub(super) fn new(connector: Https, first: Option<&Uri>) -> Self {
        let place = first.and_then(place);
        let first = place.map(|(scheme, authority)| Pool::new(scheme, authority, &connector));
        Self { first, others: Mutex::default(), connector }
    }

    /// Sends to the host that `request` names, and waits for the head of its answer. `now` is the time.
    pub(super) fn send(&self, mut request: Request<ReplayBody>, now: Instant) -> Sending {
        let uri = std::mem::take(request.uri_mut());
        let Some((scheme, authority)) = place(&uri) else {
            return Box::pin(std::future::ready(Err(Failed::Connect("the target names no host".into()))));
        };
        let pool = match &self.first {
            Some(first) if first.is_at(scheme, authority) => first.clone(),
            _ => self.other(scheme, authority),
        };
        // What the absolute form says beyond the path, a host hears in `Host`.
        *request.uri_mut() = uri.into_parts().path_and_query.map_or_else(Uri::default, Uri::from);
        pool.send(request, now)
    }

    fn other(&self, scheme: &Scheme, authority: &Authority) -> Arc<Pool> {
        let mut others = locked(&self.others);
        if let Some(known) = others.iter().find(|pool| pool.is_at(scheme, authority)) {
            return known.clone();
        }
        if others.len() >= HOSTS {
            others.retain(|pool| !locked(&pool.state).idle.is_empty());
        }
        if others.len() >= HOSTS {
            others.remove(0);
        }
        let pool = Pool::new(scheme, authority, &self.connector);
        others.push(pool.clone());
        pool
    }
}

fn place(uri: &Uri) -> Option<(&Scheme, &Authority)> {
    uri.scheme().zip(uri.authority())
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // A panic while the lock was held leaves at worst a connection fewer.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The connections to one host.
struct Pool {
    scheme: Scheme,
    authority: Authority,
    connector: Https,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// In the order in which they came.
    idle: Vec<Idle>,
    /// Who dials, and would rather have one that comes back meanwhile.
    waiting: VecDeque<oneshot::Sender<Line>>,
    /// Closes what is too old; there while something may become so.
    sweeper: Option<AbortOnDropHandle<()>>,
}

struct Idle {
    line: Line,
    since: Instant,
}

impl Pool {
    fn new(scheme: &Scheme, authority: &Authority, connector: &Https) -> Arc<Self> {
        let (scheme, authority, connector) = (scheme.clone(), authority.clone(), connector.clone());
        Arc::new(Self { scheme, authority, connector, state: Mutex::default() })
    }

    /// Compared as it is spelt: another spelling has connections of its own.
    fn is_at(&self, scheme: &Scheme, authority: &Authority) -> bool {
        self.authority.as_str() == authority.as_str() && self.scheme == *scheme
    }

    fn send(self: Arc<Self>, request: Request<ReplayBody>, now: Instant) -> Sending {
        match self.take(now) {
            Ok(line) => self.send_by(line, request),
            Err(coming) => Box::pin(async move {
                let line = self.clone().come_by(coming).await?;
                self.send_by(line, request).await
            }),
        }
    }

    fn send_by(self: Arc<Self>, mut line: Line, request: Request<ReplayBody>) -> Sending {
        let sending = line.sender.try_send_request(request);
        Box::pin(async move {
            match sending.await {
                Ok(answer) => {
                    line.await_end(&self);
                    Ok(answer)
                }
                // Apart, for each request has the room that this takes.
                Err(failed) => Box::pin(self.send_again(failed, line.is_new)).await,
            }
        })
    }

    async fn send_again(
        self: Arc<Self>,
        mut failed: TrySendError<Request<ReplayBody>>,
        was_new: bool,
    ) -> Result<Response<Incoming>, Failed> {
        match failed.take_message() {
            Some(unsent) if !was_new => {
                let line = self.clone().dial().await?;
                self.send_by(line, unsent).await
            }
            _ => Err(Failed::Send(failed.into_error())),
        }
    }

    /// The connection that came back last, or a place in the queue for one.
    fn take(&self, now: Instant) -> Result<Line, oneshot::Receiver<Line>> {
        let mut state = locked(&self.state);
        while let Some(Idle { line, since }) = state.idle.pop() {
            if !line.sender.is_closed() && now.saturating_duration_since(since) < IDLE {
                return Ok(line);
            }
        }
        if state.waiting.len() >= SIZE {
            state.waiting.retain(|waiting| !waiting.is_closed());
        }
        let (waiting, coming) = oneshot::channel();
        state.waiting.push_back(waiting);
        Err(coming)
    }

    /// Dials, but takes one that comes back meanwhile; then what was dialled is the next request's.
    async fn come_by(self: Arc<Self>, coming: oneshot::Receiver<Line>) -> Result<Line, Failed> {
        let mut dialling = self.clone().dial();
        tokio::select! {
            biased;
            Ok(line) = coming => {
                // Not for longer than `timeouts.connect`.
                tokio::spawn(async move {
                    if let Ok(line) = dialling.await {
                        self.put(line);
                    }
                });
                Ok(line)
            }
            dialled = &mut dialling => dialled,
        }
    }

    fn dial(self: Arc<Self>) -> Pin<Box<impl Future<Output = Result<Line, Failed>>>> {
        Box::pin(async move {
            let at = Uri::builder().scheme(self.scheme.clone()).authority(self.authority.clone());
            let at = at.path_and_query("/").build().map_err(|error| Failed::Connect(error.into()))?;
            let io = self.connector.clone().oneshot(at).await.map_err(Failed::Connect)?;
            let opening = Builder::new().max_buf_size(MAX_ANSWER_HEAD).handshake(io);
            let (sender, connection) = opening.await.map_err(Failed::Send)?;
            let seat = Arc::new(Seat { pool: Arc::downgrade(&self), sender: Mutex::default() });
            tokio::spawn(run(Box::pin(connection.with_upgrades()), seat.clone()));
            Ok(Line { sender, seat, is_new: true })
        })
    }

    fn put(self: &Arc<Self>, mut line: Line) {
        line.is_new = false;
        let mut state = locked(&self.state);
        while let Some(waiting) = state.waiting.pop_front() {
            match waiting.send(line) {
                Ok(()) => return,
                Err(left) => line = left,
            }
        }
        if state.idle.len() < SIZE {
            state.idle.push(Idle { line, since: Instant::now() });
            state.sweeper.get_or_insert_with(|| {
                AbortOnDropHandle::new(tokio::spawn(sweep(Arc::downgrade(self), Instant::now() + IDLE)))
            });
        }
    }

    /// Closes what is too old; when to look again, if anything is left.
    fn sweep(&self) -> Option<Instant> {
        let mut state = locked(&self.state);
        let now = Instant::now();
        let old = state.idle.partition_point(|idle| idle.since + IDLE <= now);
        state.idle.drain(..old);
        let due = state.idle.first().map(|idle| idle.since + IDLE);
        if due.is_none() {
            state.sweeper = None;
        }
        due
    }
}

async fn sweep(pool: Weak<Pool>, mut due: Instant) {
    loop {
        tokio::time::sleep_until(due).await;
        match pool.upgrade().and_then(|pool| pool.sweep()) {
            Some(next) => due = next,
            None => return,
        }
    }
}

/// A connection by which one request at a time can be sent. It closes when this is dropped, or a request by it.
struct Line {
    sender: Sender,
    seat: Arc<Seat>,
    /// It had no time to be closed again.
    is_new: bool,
}

/// What a connection's own task has of it.
struct Seat {
    pool: Weak<Pool>,
    /// While an answer comes.
    sender: Mutex<Option<Sender>>,
}

impl Line {
    /// The answer's head has come. Unless it is short, its end is for the connection's own task to see.
    fn await_end(self, pool: &Arc<Pool>) {
        if self.sender.is_ready() {
            return pool.put(self);
        }
        *locked(&self.seat.sender) = Some(self.sender);
        // The end may have come meanwhile.
        self.seat.give_back();
    }
}

impl Seat {
    /// Where the answer was read to its end, the next request may come.
    fn give_back(self: &Arc<Self>) {
        let ready = locked(&self.sender).take_if(|sender| sender.is_ready());
        if let Some(sender) = ready
            && let Some(pool) = self.pool.upgrade()
        {
            pool.put(Line { sender, seat: self.clone(), is_new: false });
        }
    }
}

/// `connection` is boxed, for a task keeps the room of what is moved out of it.
async fn run(mut connection: Pin<Box<impl Future<Output = hyper::Result<()>>>>, seat: Arc<Seat>) {
    let ended = std::future::poll_fn(|cx| {
        let ended = connection.as_mut().poll(cx);
        if ended.is_pending() {
            seat.give_back();
        }
        ended
    });
    if let Err(error) = ended.await {
        tracing::debug!(%error, "a connection to a provider ended");
    }
    drop(connection);
    if let Some(pool) = seat.pool.upgrade() {
        locked(&pool.state).idle.retain(|idle| !idle.line.sender.is_closed());
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a test that fails may panic
mod tests;

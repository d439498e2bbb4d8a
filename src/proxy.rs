//! The walk of a request through the rooms, and the only file that knows its order:
//!
//! ```text
//! accept → identify the app → route → read the model → acquire a lease → inject → forward
//!        → read the outcome → stream while the lease is renewed → report, release
//! ```
//!
//! Dropping [`Proxy`]'s answer at any await is a client that left: the upstream request ends with it,
//! and the lease returns.

use std::pin::pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::{Duration, Instant};

use arc_swap::ArcSwap;
use bytes::Bytes;
use http::header::EXPECT;
use http::request::Parts;
use http::{HeaderName, HeaderValue, Method, Request, Response, Version};
use hyper::body::Incoming;
use hyper::upgrade::OnUpgrade;
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::config::{Config, ErrorShape, Provider, RetryOn};
use crate::fields;
use crate::forward::held::Held;
use crate::forward::replay::{Budget, FREE, Replay};
use crate::forward::{SendError, Upstreams, tunnel};
use crate::lease::{Lease, Leases, Want};
use crate::listen::{Conn, HeadFacts, Peer, Serve};
use crate::metrics::Metrics;
use crate::model::{Class, Code, Fault, Onward, Outcome, Site};
use crate::route::ring::{Ring, Wish};
use crate::route::{Caller, From, Plan, Route, Routes, Standing};

mod answers;
mod body;
mod checks;
mod choice;
mod faults;
mod mask;
mod model;
mod none_free;
mod outgoing;
mod reply;
mod socket;
mod trace;

pub use body::AnswerBody;
pub use checks::{CheckOutcome, Checks};
pub use mask::Masks;

use body::{InUse, Ticket};
use choice::Choice;
use outgoing::Outgoing;
use reply::Reply;
use trace::Trace;

/// How long an answer of lessor's own waits for the rest of a small body, which is mostly on its way: the connection
/// can then be kept.
const READ_OUT: Duration = Duration::from_millis(100);

/// How many keys a request was sent with.
const ATTEMPTS: HeaderName = HeaderName::from_static("x-lessor-attempts");

/// Everything the walk needs; clones share it. Each request walks through the rooms as they are when it comes.
#[derive(Clone, Debug)]
pub struct Proxy(Arc<ArcSwap<Rooms>>);

/// The rooms, as they were built at the start.
#[derive(Debug)]
pub struct Rooms {
    /// The settings.
    pub config: Arc<Config>,
    /// Whose request, and where to.
    pub routes: Routes,
    /// The keys.
    pub ring: Arc<Ring>,
    /// Slots.
    pub leases: Leases,
    /// The way out.
    pub upstreams: Arc<Upstreams>,
    /// lessor's own checks of keys.
    pub checks: Checks,
    /// What takes keys out of answers.
    pub masks: Masks,
    /// Bytes kept for another send, all requests together.
    pub budget: Budget,
    /// Counts.
    pub metrics: Metrics,
    /// Tunnels run here, counted as connections.
    pub tunnels: TaskTracker,
    /// Cuts tunnels.
    pub abort: CancellationToken,
}

/// What a walk came to, before its answer is put together.
enum Served {
    /// An answer, with the key it still holds.
    Proxied(Box<Reply>, Option<InUse>),
    /// A tunnel that is opened here.
    Open(Arc<Site>),
    /// An open tunnel.
    Tunnel(OnUpgrade, TokioIo<TcpStream>),
}

/// Why lessor answers itself.
struct Refused {
    fault: Fault,
    /// How the caller's SDK shows errors.
    shape: ErrorShape,
    /// More of the request's body may come.
    unread: bool,
}

impl Proxy {
    /// The walk through these rooms.
    pub fn new(rooms: Rooms) -> Self {
        Self(Arc::new(ArcSwap::from_pointee(rooms)))
    }

    /// The rooms as they are.
    pub fn rooms(&self) -> Arc<Rooms> {
        self.0.load_full()
    }

    /// From now on requests walk through these.
    pub fn replace(&self, rooms: Rooms) {
        self.0.store(Arc::new(rooms));
    }
}

impl Serve for Proxy {
    type Body = AnswerBody;

    async fn serve(&self, request: Request<Incoming>, facts: HeadFacts, conn: Conn) -> Response<AnswerBody> {
        let (head, body) = request.into_parts();
        let rooms = &*self.0.load_full();
        let connect = head.method == Method::CONNECT;
        let upgrade = head.extensions.get::<OnUpgrade>().cloned();
        let mode = rooms.routes.mode_of(&head, came_from(&conn));
        let mut trace = Trace::begin(mode, head.method.clone(), rooms.metrics.clone());
        let mut caller = Caller::unknown();
        // Boxed, for it is large: what serves the connection is kept while the answer streams.
        let served = Box::pin(rooms.walk((head, facts), body, &conn, &mut trace, &mut caller)).await;
        let standing = caller.standing;
        match served {
            Ok(Served::Proxied(reply, in_use)) => match upgrade.filter(|_| reply.is_switch()) {
                Some(client) => rooms.socket(client, *reply, in_use, conn, standing, trace),
                None => rooms.stream(*reply, in_use, &conn, standing, trace),
            },
            Ok(Served::Open(site)) => {
                // Each request inside is told by itself; between them, too, a revoked app is cut off.
                trace.say_nothing();
                conn.cut_for_good_when(Box::new(standing.watch()));
                let mut response = Response::new(AnswerBody::own(Bytes::new()));
                response.extensions_mut().insert(site);
                response
            }
            Ok(Served::Tunnel(client, upstream)) => rooms.tunnel(client, upstream, conn, standing, trace),
            Err(Refused { fault, shape, unread }) => {
                let answer = answers::answer(&fault, shape, trace.mode(), connect, unread);
                trace.refused(answer.status().as_u16(), fault);
                answer.map(AnswerBody::own)
            }
        }
    }
}

impl Rooms {
    /// The whole of it.
    async fn walk(
        &self,
        (head, facts): (Parts, HeadFacts),
        body: Incoming,
        conn: &Conn,
        trace: &mut Trace,
        caller: &mut Caller,
    ) -> Result<Served, Refused> {
        let hint = |head: &Parts| {
            let provider = self.routes.provider_hint(head);
            provider.map_or(ErrorShape::OpenAi, |provider| provider.error_shape)
        };
        // On HTTP/2 reading sends nothing, and no answer ends the connection.
        let http1 = head.version < Version::HTTP_2;
        let awaited = http1 && fields::has(&head.headers, &EXPECT);
        // Unscanned is as good as seen: a chunked request whose head nobody looked at is not repaired.
        let saw_length = facts.saw_length || !facts.scanned;
        if facts.too_large {
            let why = "the request head is larger than limits.max_header_bytes or has more lines than limits.max_headers";
            let fault = Fault::new(Code::HeaderTooLarge, why);
            return Err(Refused { fault, shape: hint(&head), unread: http1 });
        }
        let plan = self.routes.find(&head, saw_length, came_from(conn), caller);
        // Also where the request is refused: people must see which app it was.
        trace.of(&caller.app, None);
        let (shape, body) = match &plan {
            Ok(Plan::Lend(route)) => {
                let (provider, max) = (route.provider(), self.config.retry.max_body);
                (provider.error_shape, self.body(body, awaited, max, Some(provider.clone())))
            }
            Ok(_) => (hint(&head), self.body(body, awaited, 0, None)),
            Err(_) => (hint(&head), self.body(body, awaited, FREE, None)),
        };
        let served = match plan {
            Ok(plan) => tokio::select! {
                biased;
                () = caller.standing.revoked() => Err(caller.revoked()),
                served = self.carry_out(plan, head, &body, trace) => served,
            },
            Err(fault) => Err(fault),
        };
        match served {
            Ok(Served::Proxied(mut reply, in_use)) => {
                if http1 && body.is_unread() {
                    reply.end_connection();
                }
                Ok(Served::Proxied(reply, in_use))
            }
            Ok(served) => Ok(served),
            Err(fault) => Err(Refused { fault, shape, unread: http1 && !body.read_out(READ_OUT).await }),
        }
    }

    /// What was found that the request asks for.
    async fn carry_out(
        &self,
        plan: Plan,
        head: Parts,
        body: &Replay,
        trace: &mut Trace,
    ) -> Result<Served, Fault> {
        match plan {
            Plan::Lend(route) => {
                trace.of(&route.app, Some(&route.provider().name));
                self.lend(head, body, &route, trace).await
            }
            Plan::Pass { target, websocket, app } => {
                trace.of(&app, None);
                let request = outgoing::for_other_host(head, target, websocket, self.routes.apps());
                let answer =
                    self.upstreams.pass(request, body).await.map_err(|error| faults::of_send(&error))?;
                Ok(Served::Proxied(Box::new(Reply::unread(answer)), None))
            }
            Plan::Open(site) => Ok(Served::Open(site)),
            Plan::Tunnel { host, port, app } => {
                trace.of(&app, None);
                let upstream =
                    self.upstreams.dial(&host, port).await.map_err(|error| faults::of_send(&error))?;
                Ok(Served::Tunnel(hyper::upgrade::on(Request::from_parts(head, ())), upstream))
            }
        }
    }

    /// A request for a provider: with a leased key, and with another one where the provider refuses it.
    async fn lend(
        &self,
        head: Parts,
        body: &Replay,
        route: &Route,
        trace: &mut Trace,
    ) -> Result<Served, Fault> {
        let retry = self.config.retry;
        let model = match route.model_in_path().or_else(|| route.model_in_handshake()) {
            Some(model) => model,
            None => self.read_model(route, &head, body).await?,
        };
        let wish = Wish::new(route.pool.clone(), model, route.pinned.clone());
        let mut choice = Choice::new(&self.ring, route.keys.clone(), wish);
        if choice.is_empty() {
            return Err(faults::no_candidate(route, &choice.wish().model));
        }
        let until = tokio::time::Instant::now() + route.max_wait;
        let mut outgoing = Outgoing::new(head, route, self.routes.apps(), self.config.compressed);
        let mut kept: Option<Box<Reply>> = None;
        loop {
            let mut in_use = match self.acquire(route, (&mut choice, until), body).await {
                Ok(lease) => InUse::new(lease, Arc::clone(choice.keys()), &choice.wish().model),
                // What the provider said tells more than that no other key could be had.
                Err(fault) => return kept.map_or(Err(fault), |reply| Ok(Served::Proxied(reply, None))),
            };
            trace.leased(&in_use.lease);
            let last = trace.attempts() >= retry.max_attempts;
            let answer = match self.send(&mut outgoing, route, &mut in_use, body, trace).await? {
                Ok(answer) => answer,
                Err(error) => {
                    in_use.report(Outcome::plain(Class::Network, None), &choice.wish().model);
                    let again =
                        error.may_repeat(outgoing.method()) || (retry.on.connection && error.broke_off());
                    if !last && again && body.is_whole() {
                        continue;
                    }
                    return kept
                        .map_or(Err(faults::of_send(&error)), |reply| Ok(Served::Proxied(reply, None)));
                }
            };
            let mut reply = Box::new(Reply::read(route.provider(), answer).await);
            let mask = in_use.key().and_then(|key| self.masks.of(route.provider(), key));
            let mask = mask.map(|mask| mask.for_offer(outgoing.offers_extensions()));
            reply.sign(&in_use, mask, self.config.listen.response_headers);
            let outcome = if in_use.learns_group() {
                let finds =
                    |name: &str| in_use.key().is_none_or(|key| self.masks.finds(route.provider(), key, name));
                reply.outcome_and_group(route.provider(), outgoing.headers(), finds)
            } else {
                reply.outcome().clone()
            };
            let told = self.told(&in_use, &outcome);
            self.note(&in_use, &outcome, told.rests_something(choice.wish().model.name().is_some()));
            in_use.report(told, &choice.wish().model);
            if outcome.wants_another_key() {
                leave_out(&mut choice, &in_use, &outcome);
            }
            if last || choice.is_empty() || !goes_on(outgoing.method(), &outcome, retry.on) {
                return Ok(Served::Proxied(reply, Some(in_use)));
            }
            drop(in_use);
            if !body.read_ahead(|_| false).await.unwrap_or(false) {
                return Ok(Served::Proxied(reply, None));
            }
            self.metrics.failover(outcome.class);
            kept = Some(reply);
        }
    }

    /// A request's body, on its way to a provider or to another host, kept up to `max` bytes for another send.
    fn body(&self, incoming: Incoming, awaited: bool, max: usize, to: Option<Arc<Provider>>) -> Replay {
        let idle = self.config.timeouts.body_idle;
        Replay::new(incoming, awaited, max, &self.budget, idle, outgoing::strip_trailers, to)
    }

    /// Waits for a slot, up to the request's `until`. Meanwhile the body is read on into the replay
    /// buffer, so that a client that leaves is seen behind what it has sent; not where the client waits
    /// for `100 Continue`, which reading would send.
    async fn acquire(
        &self,
        route: &Route,
        (choice, until): (&mut Choice<'_>, tokio::time::Instant),
        body: &Replay,
    ) -> Result<Lease, Fault> {
        let got = {
            let mut acquiring = pin!(self.leases.acquire(Want {
                provider: &route.provider().name,
                app: &route.app,
                pool: &route.pool,
                keys: choice,
                until,
            }));
            let mut read_on = body.may_read_ahead();
            loop {
                tokio::select! {
                    biased;
                    got = &mut acquiring => break got,
                    read = body.read_ahead(|_| false), if read_on => {
                        read.map_err(faults::of_body)?;
                        read_on = false;
                    }
                }
            }
        };
        got.map_err(|error| faults::of_acquire(&error, route, &choice.wish().model))
    }

    /// One sending, ended at once when its lease is lost.
    async fn send(
        &self,
        outgoing: &mut Outgoing,
        route: &Route,
        in_use: &mut InUse,
        body: &Replay,
        trace: &mut Trace,
    ) -> Result<Result<Response<Incoming>, SendError>, Fault> {
        let request = outgoing.with_key(route, in_use.key())?;
        let begun = Instant::now();
        let sent = tokio::select! {
            biased;
            lost = in_use.lease.lost() => Err(faults::of_lost(lost)),
            sent = self.upstreams.send(&route.provider().name, request, body) => Ok(sent),
        };
        let away = begun.elapsed();
        trace.was_away(away);
        if let Ok(Ok(_)) = sent {
            in_use.began_after(away);
        }
        sent
    }

    /// What the store hears of an answer. While a check has just found the key good a doubt is about the request:
    /// one caller's wrong header must not keep a key from all others.
    fn told(&self, in_use: &InUse, outcome: &Outcome) -> Outcome {
        if !outcome.is_doubt() || !self.is_good(in_use) {
            return outcome.clone();
        }
        let organization = outcome.organization.clone();
        Outcome { organization, ..Outcome::plain(Class::Caller, outcome.status) }
    }

    /// Whether a check has just found good the key that was used.
    fn is_good(&self, in_use: &InUse) -> bool {
        in_use.key().is_some_and(|key| self.checks.found_good(in_use.provider(), key))
    }

    /// Tells people, and asks lessor's own check where an answer only casts doubt on the key. `rests`: something
    /// rests by what the store heard of it.
    fn note(&self, in_use: &InUse, outcome: &Outcome, rests: bool) {
        let (provider, key) = (in_use.provider(), in_use.lease.key());
        let said = outcome.ahead().unwrap_or_else(|| outcome.clone());
        if Class::RESTS.contains(&said.class)
            && said.rests_secret_alone(in_use.lease.group())
            && self.ring.is_old(provider, key, in_use.lease.fingerprint())
        {
            tracing::info!(
                %provider, %key, class = said.class.as_str(), status = said.status, code = said.code.as_deref(),
                "the provider refused a secret that this key has no more; its present one is lent as before"
            );
            return;
        }
        if let Some(wait) = outcome.wait.filter(|_| outcome.class == Class::Success) {
            let wait_ms = u64::try_from(wait.as_millis()).unwrap_or(u64::MAX);
            tracing::info!(%provider, %key, wait_ms, "the provider says that nothing remains until then");
            self.metrics.cooldown(Class::Rate);
        }
        if !Class::RESTS.contains(&outcome.class) {
            return;
        }
        if outcome.class == Class::Invalid && outcome.proven {
            let code = outcome.code.as_deref();
            tracing::warn!(
                %provider, %key, status = outcome.status, code,
                "the provider says that this key is bad; it is not lent before `lessor keys check` finds it good"
            );
        }
        if rests {
            self.metrics.cooldown(outcome.class);
        }
        if outcome.is_doubt() && !self.is_good(in_use) {
            self.checks.in_background(provider.clone(), key.clone());
        }
    }

    /// The answer's head now, its body as it comes.
    fn stream(
        &self,
        reply: Reply,
        in_use: Option<InUse>,
        conn: &Conn,
        standing: Standing,
        mut trace: Trace,
    ) -> Response<AnswerBody> {
        let (lease, of) = (in_use.as_ref().map(|in_use| in_use.lease.watch()), standing.clone());
        // Most answers are out before anything is watched.
        let mut revoked = None;
        conn.cut_when(Box::new(move |cx| {
            let lost = lease.as_ref().is_some_and(|lease| lease.poll_lost(cx).is_ready());
            if lost { Poll::Ready(()) } else { revoked.get_or_insert_with(|| of.watch())(cx) }
        }));
        let class = reply.outcome().class.as_str();
        let (mut head, ahead, rest, mask, filter) = reply.into_parts();
        head.version = Version::HTTP_11;
        trace.answered(head.status.as_u16(), class);
        if self.config.listen.response_headers && trace.attempts() > 0 {
            head.headers.insert(ATTEMPTS, counted(trace.attempts()));
        }
        let ticket = Ticket::new(in_use, standing, trace, mask, filter);
        let body = Held::new(ahead, rest, self.config.timeouts.idle, ticket);
        Response::from_parts(head, AnswerBody::Proxied(Box::new(body)))
    }

    /// Answers 200 and carries bytes until either side ends.
    fn tunnel(
        &self,
        client: OnUpgrade,
        upstream: TokioIo<TcpStream>,
        conn: Conn,
        standing: Standing,
        mut trace: Trace,
    ) -> Response<AnswerBody> {
        trace.answered(200, Class::Success.as_str());
        let (abort, idle) = (self.abort.clone(), self.config.timeouts.idle);
        self.tunnels.spawn(async move {
            // Held for as long as the tunnel lives: the connection's place (`conn`), its line in the log.
            let revoked = async {
                standing.revoked().await;
                conn.close_by_reset();
            };
            tokio::select! {
                biased;
                () = abort.cancelled() => {}
                () = revoked => trace.ended_as("app_revoked"),
                _ = tunnel::carry(client, upstream, idle) => {}
            }
        });
        Response::new(AnswerBody::own(Bytes::new()))
    }
}

/// Attempts, as a header says them; text is made for unusually many alone.
fn counted(attempts: u32) -> HeaderValue {
    match attempts {
        1 => HeaderValue::from_static("1"),
        2 => HeaderValue::from_static("2"),
        3 => HeaderValue::from_static("3"),
        more => more.into(),
    }
}

/// Whether a refusal is worth another key, or another try.
fn goes_on(method: &Method, outcome: &Outcome, on: RetryOn) -> bool {
    match outcome.onward() {
        Onward::AnotherKey | Onward::AnotherGroup | Onward::AfterTheRest => true,
        Onward::Again => on.overloaded || method.is_idempotent(),
        Onward::Nowhere => false,
    }
}

/// Takes out what this answer rules out for this request: the key, and its group where the limit is the
/// group's.
fn leave_out(choice: &mut Choice<'_>, in_use: &InUse, outcome: &Outcome) {
    let whole_group = outcome.onward() == Onward::AnotherGroup;
    let group = in_use.group().filter(|_| whole_group);
    choice.rule_out(in_use.lease.key().clone(), group);
}

/// The door that a connection came in by, in the next room's words.
fn came_from(conn: &Conn) -> From {
    match conn.peer() {
        Peer::Tcp { local, .. } => From::Tcp(local),
        Peer::Unix { uid } => From::Unix { uid },
    }
}

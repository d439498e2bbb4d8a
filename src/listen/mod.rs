//! Sockets: accepting within a bound, watching each for its peer's leaving, draining at the end.
//!
//! A connection is served by hyper and watched by us: a peer that leaves ends the service of its
//! request at once (the future is dropped, and with it the upstream request and the lease), in every
//! phase that the socket can show. Silent, slow and idle connections are closed by [`Timeouts`].
//! Out of descriptors, accepting backs off without spinning; what is open goes on.

use std::io;
use std::net::SocketAddr;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http_body::Body;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::{Request, Response};
use hyper_util::rt::TokioTimer;
use tokio::net::{TcpListener, UnixListener};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::config::{Address, Limits, Timeouts};

mod bell;
pub mod ca;
mod connection;
mod head;
mod inside;
mod socket;
mod streams;
mod watched;
mod wire;

use bell::{Behind, Bell};
use ca::Authority;
use connection::Serving;
pub use socket::CutWatch;
use socket::{Signals, Socket};

/// How long accepting rests after it failed (out of descriptors, mostly).
const ACCEPT_BACK_OFF: Duration = Duration::from_millis(100);

/// Connections the kernel may queue before they are accepted.
const BACKLOG: u32 = 1024;

/// An address could not be listened on; the text says which and what to do.
#[derive(Debug, thiserror::Error)]
pub enum BindError {
    /// Somebody listens there.
    #[error(
        "{address} is already in use by another process; stop it, or set listen.{field} to another address"
    )]
    Taken {
        /// The address.
        address: String,
        /// `proxy` or `admin`.
        field: &'static str,
    },
    /// Anything else.
    #[error("cannot listen on {address} (listen.{field})")]
    Failed {
        /// The address.
        address: String,
        /// `proxy` or `admin`.
        field: &'static str,
        /// Why.
        #[source]
        cause: io::Error,
    },
}

/// The most header lines that hyper takes where it is told nothing.
const HYPERS_MAX_HEADERS: usize = 100;

/// A bound socket that accepts.
#[derive(Debug)]
pub enum Listener {
    /// TCP, with its really bound address.
    Tcp(TcpListener, SocketAddr),
    /// Unix.
    Unix(UnixListener, Address),
}

impl Listener {
    /// Binds `address`. A Unix socket file that nobody answers on is replaced.
    pub async fn bind(address: &Address, field: &'static str) -> Result<Self, BindError> {
        let refuse = |cause: io::Error| {
            let address = address.to_string();
            match cause.kind() {
                io::ErrorKind::AddrInUse => BindError::Taken { address, field },
                _ => BindError::Failed { address, field, cause },
            }
        };
        match address {
            Address::Tcp(at) => {
                let socket = if at.is_ipv4() {
                    tokio::net::TcpSocket::new_v4()
                } else {
                    tokio::net::TcpSocket::new_v6()
                }
                .map_err(refuse)?;
                socket.set_reuseaddr(true).map_err(refuse)?;
                socket.bind(*at).map_err(refuse)?;
                let listener = socket.listen(BACKLOG).map_err(refuse)?;
                let bound = listener.local_addr().map_err(refuse)?;
                Ok(Self::Tcp(listener, bound))
            }
            Address::Unix(path, mode) => {
                Ok(Self::Unix(bind_unix(path, *mode).await.map_err(refuse)?, address.clone()))
            }
        }
    }

    /// Where it really listens.
    pub fn address(&self) -> Address {
        match self {
            Self::Tcp(_, at) => Address::Tcp(*at),
            Self::Unix(_, address) => address.clone(),
        }
    }

    /// The socket alone, for another kind of server.
    pub fn into_inner(self) -> Inner {
        match self {
            Self::Tcp(listener, _) => Inner::Tcp(listener),
            Self::Unix(listener, _) => Inner::Unix(listener),
        }
    }

    async fn accept(&self) -> io::Result<(Socket, Peer)> {
        match self {
            Self::Tcp(listener, _) => {
                let (stream, remote) = listener.accept().await?;
                // Without it small chunks of a stream would wait for the peer's delayed ACK.
                stream.set_nodelay(true)?;
                // The address that was really reached: `0.0.0.0` is nobody's name.
                let local = stream.local_addr()?;
                Ok((Socket::Tcp(stream), Peer::Tcp { local, remote }))
            }
            Self::Unix(listener, _) => {
                let (stream, _) = listener.accept().await?;
                let uid = stream.peer_cred()?.uid();
                Ok((Socket::Unix(stream), Peer::Unix { uid }))
            }
        }
    }
}

/// A bound socket of either family.
#[derive(Debug)]
pub enum Inner {
    /// TCP.
    Tcp(TcpListener),
    /// Unix.
    Unix(UnixListener),
}

async fn bind_unix(path: &Path, mode: u32) -> io::Result<UnixListener> {
    if path.exists() {
        if tokio::net::UnixStream::connect(path).await.is_ok() {
            return Err(io::ErrorKind::AddrInUse.into());
        }
        std::fs::remove_file(path)?;
    }
    let listener = UnixListener::bind(path)?;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode))?;
    Ok(listener)
}

/// Who is at the other end.
#[derive(Debug, Clone, Copy)]
pub enum Peer {
    /// Over TCP.
    Tcp {
        /// The listener's address.
        local: SocketAddr,
        /// The peer's address.
        remote: SocketAddr,
    },
    /// Over a Unix socket.
    Unix {
        /// The peer's user.
        uid: u32,
    },
}

/// One client connection, or one stream of an HTTP/2 connection, as the service sees it. The connection's place under the limit is held for
/// as long as any clone lives, so a tunnel that outlives hyper's part keeps counting.
#[derive(Debug, Clone)]
pub struct Conn {
    peer: Peer,
    signals: Arc<Signals>,
    socket: Arc<Socket>,
    _place: Arc<Place>,
}

/// A connection's place under the limit, and among those that are open.
#[derive(Debug)]
struct Place {
    _permit: OwnedSemaphorePermit,
    open: Arc<watch::Sender<usize>>,
}

impl Place {
    fn take(permit: OwnedSemaphorePermit, open: Arc<watch::Sender<usize>>) -> Self {
        open.send_modify(|open| *open += 1);
        Self { _permit: permit, open }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.open.send_modify(|open| *open = open.saturating_sub(1));
    }
}

impl Conn {
    /// Who is at the other end.
    pub fn peer(&self) -> Peer {
        self.peer
    }

    /// Resolves when the client has closed, or only its writing half, however many bytes of it lie unread.
    /// For whoever took the connection over: hyper's part is watched already. Cancel safe.
    pub async fn gone(&self) {
        self.socket.gone().await;
    }

    /// Until the answer now begun has ended, the connection (the stream, with HTTP/2) is cut when `watch` is ready. It is asked
    /// beside hyper, since hyper does not look at a body while the client takes none of it.
    pub fn cut_when(&self, watch: CutWatch) {
        self.signals.cut_when(watch);
    }

    /// From now on, the connection is cut when `watch` is ready, whether something is being answered or not.
    pub fn cut_for_good_when(&self, watch: CutWatch) {
        self.signals.cut_for_good_when(watch);
    }

    /// The close that follows is a reset, so that it looks like no clean end.
    pub fn close_by_reset(&self) {
        self.signals.close_by_reset();
    }
}

/// What hyper cannot say about a request.
#[derive(Debug, Clone, Copy)]
pub struct HeadFacts {
    /// The head had a `content-length` line, even where hyper dropped it.
    pub saw_length: bool,
    /// The whole head was looked at; else it lay in hyper's buffer behind another request.
    pub scanned: bool,
    /// The head is above `limits.max_header_bytes` or `limits.max_headers`.
    pub too_large: bool,
}

/// Answers one request of a connection. A successful answer to CONNECT that has an `Arc<Site>` among its
/// extensions opens the tunnel here: requests inside come with an `Arc<Inside>` among theirs.
pub trait Serve: Clone + Send + Sync + 'static {
    /// The answer's body.
    type Body: Body<Data = Bytes, Error: Into<Box<dyn std::error::Error + Send + Sync>>> + Send + 'static;
    /// Never fails: an error is an answer too. May be dropped at any point: the client has gone.
    fn serve(
        &self,
        request: Request<Incoming>,
        facts: HeadFacts,
        conn: Conn,
    ) -> impl Future<Output = Response<Self::Body>> + Send;
}

/// All proxy listeners and their connections.
#[derive(Debug)]
pub struct Server {
    limits: Limits,
    timeouts: Timeouts,
    /// Stop accepting; answer what is under way, then close.
    drain: CancellationToken,
    /// Cut what is still open.
    abort: CancellationToken,
    connections: TaskTracker,
    /// How many clients are connected.
    open: Arc<watch::Sender<usize>>,
    /// Certificates for the insides of tunnels; `None` where none is opened.
    authority: Option<Arc<Authority>>,
}

impl Server {
    /// A server under these bounds.
    pub fn new(limits: Limits, timeouts: Timeouts, authority: Option<Arc<Authority>>) -> Self {
        Self {
            limits,
            timeouts,
            authority,
            drain: CancellationToken::new(),
            abort: CancellationToken::new(),
            connections: TaskTracker::new(),
            open: Arc::new(watch::Sender::new(0)),
        }
    }

    /// Fires when everything still open is cut: tunnels, which outlive hyper's part, end by it too.
    pub fn aborted(&self) -> CancellationToken {
        self.abort.clone()
    }

    /// Where tasks that serve a client beyond hyper's part (tunnels) are counted.
    pub fn tracker(&self) -> TaskTracker {
        self.connections.clone()
    }

    /// Accepts on all listeners until [`Server::drain`]; returns at once.
    pub fn start<S: Serve>(&self, listeners: Vec<Listener>, service: &S) {
        let places = Arc::new(Semaphore::new(self.limits.max_connections));
        for listener in listeners {
            let accepting = Accepting {
                listener,
                places: places.clone(),
                limits: self.limits,
                timeouts: self.timeouts,
                drain: self.drain.clone(),
                abort: self.abort.clone(),
                connections: self.connections.clone(),
                open: self.open.clone(),
                authority: self.authority.clone(),
            };
            self.connections.spawn(accepting.run(service.clone()));
        }
    }

    /// Resolves when no client has been connected for `time` without a break. Cancel safe.
    pub async fn deserted(&self, time: Duration) {
        let mut open = self.open.subscribe();
        loop {
            // An error would say that nobody counts any more, and this server does.
            let nobody = open.wait_for(|open| *open == 0).await.is_ok();
            // Who came and went meanwhile is a change, too.
            if nobody && tokio::time::timeout(time, open.changed()).await.is_err() {
                return;
            }
        }
    }

    /// Stops accepting and lets what is open end, up to `grace`; then cuts the rest. `true` when all
    /// ended by themselves.
    pub async fn drain(&self, grace: Duration) -> bool {
        self.drain.cancel();
        self.connections.close();
        let in_time = tokio::time::timeout(grace, self.connections.wait()).await.is_ok();
        self.abort.cancel();
        if !in_time {
            self.connections.wait().await;
        }
        in_time
    }
}

struct Accepting {
    listener: Listener,
    places: Arc<Semaphore>,
    limits: Limits,
    timeouts: Timeouts,
    drain: CancellationToken,
    abort: CancellationToken,
    connections: TaskTracker,
    open: Arc<watch::Sender<usize>>,
    authority: Option<Arc<Authority>>,
}

impl Accepting {
    async fn run<S: Serve>(self, service: S) {
        self.accept_all(service).await;
        if let Address::Unix(path, _) = self.listener.address() {
            // Taken away at the end of accepting; already gone is as good.
            let _ = std::fs::remove_file(path);
        }
    }

    async fn accept_all<S: Serve>(&self, service: S) {
        loop {
            // The place comes first: beyond the limit, connections wait in the kernel's queue.
            let place = tokio::select! {
                biased;
                () = self.drain.cancelled() => return,
                place = self.places.clone().acquire_owned() => match place {
                    Ok(place) => place,
                    Err(_closed) => return,
                },
            };
            let accepted = tokio::select! {
                biased;
                () = self.drain.cancelled() => return,
                accepted = self.listener.accept() => accepted,
            };
            match accepted {
                Ok((socket, peer)) => {
                    let (signals, socket) = (Arc::new(Signals::new()), Arc::new(socket));
                    let place = Arc::new(Place::take(place, self.open.clone()));
                    let conn = Conn { peer, signals, socket, _place: place };
                    self.spawn(conn, service.clone());
                    // The runtime runs the newest task first; in a burst that would let the last of many
                    // connections be served before the first.
                    tokio::task::yield_now().await;
                }
                Err(error) if is_of_one_connection(&error) => {}
                Err(error) => {
                    tracing::warn!(%error, "cannot accept; trying again shortly");
                    tokio::time::sleep(ACCEPT_BACK_OFF).await;
                }
            }
        }
    }

    fn spawn<S: Serve>(&self, conn: Conn, service: S) {
        let mut http = http1::Builder::new();
        // hyper's own head timeout would also close idle connections; ours tells the two apart.
        http.timer(TokioTimer::new())
            .header_read_timeout(None)
            .half_close(false)
            .auto_date_header(false)
            .max_header_size(self.limits.max_header_bytes);
        if self.limits.max_headers != HYPERS_MAX_HEADERS {
            // Only then: hyper makes room on the heap for each head once it is told a number.
            http.max_headers(self.limits.max_headers);
        }
        let abort = self.abort.clone();
        let signals = conn.signals.clone();
        let serving = Serving {
            http,
            socket: conn.socket.clone(),
            conn,
            service,
            timeouts: self.timeouts,
            drain: self.drain.clone(),
            limits: self.limits,
            tasks: self.connections.clone(),
            authority: self.authority.clone(),
        };
        self.connections.spawn(async move {
            let beside = Bell::here().await;
            let cut = Behind::new(&beside, async move {
                abort.cancelled().await;
                // Before the connection is dropped, so that no cut stream looks like one that ended.
                signals.close_by_reset();
            });
            tokio::select! {
                biased;
                () = cut => {}
                () = serving.run() => {}
            }
        });
    }
}

/// Whether an accept error concerns the one connection that was being accepted.
fn is_of_one_connection(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::ConnectionAborted
            | io::ErrorKind::ConnectionReset
            | io::ErrorKind::ConnectionRefused
            | io::ErrorKind::NotConnected
            | io::ErrorKind::InvalidInput
            | io::ErrorKind::Interrupted
    )
}

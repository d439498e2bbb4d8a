//! Bytes both ways between a client and a provider whose connection became a WebSocket.
//!
//! Each way has one buffer, and reads only what the other side has taken, so a slow peer slows the other
//! and costs no memory. What the provider sends goes through a [`Sieve`]; what the client sends goes on
//! as it is. A peer's leaving is seen behind bytes that nobody takes, too.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::{Buf as _, Bytes, BytesMut};
use hyper::upgrade::{OnUpgrade, Upgraded};
use hyper_rustls::MaybeHttpsStream;
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite, Interest, ReadBuf};
use tokio::net::TcpStream;
use tokio::time::{Instant, Sleep};

use super::pool::Io;

/// Bytes read at once, each way.
const BUFFER: usize = 16 * 1024;

/// Reads of one way before the other has its turn: a flood one way must not hold up the other, nor the
/// look at who has left.
const TURN: usize = 8;

/// How long a side that still listens is given to take the last bytes of the one that left.
const FAREWELL: Duration = Duration::from_millis(500);

/// How long a client that was told the end is listened to: a socket closed with bytes unread resets the
/// connection, and the reset can overtake what was just written.
const LINGER: Duration = Duration::from_secs(2);

/// What bytes from the provider go through. It may hold some back.
pub trait Sieve: Send + Unpin {
    /// Takes what came. Called only when [`Sieve::take`] has nothing more.
    fn feed(&mut self, data: Bytes);
    /// The provider ends here.
    fn finish(&mut self);
    /// The next piece to pass on; never empty.
    fn take(&mut self) -> Option<Bytes>;
    /// Whether the provider has said goodbye: then a connection that breaks has merely ended.
    fn said_goodbye(&self) -> bool;
}

/// Why a relay ended by itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// The client closed, or only its writing half; what it sent last may be unread.
    Client,
    /// The provider closed; what it sent last may be unread.
    Upstream,
    /// No byte came or went, either way, for as long as that may be.
    Idle {
        /// The client was to take some: it left them, and nobody else was slow.
        untaken: bool,
    },
}

/// How the way down to the client ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Down {
    /// The provider closed in order, and all it sent was passed on.
    Closed,
    /// The provider's connection broke, and all that came was passed on.
    Broken,
    /// The client takes nothing more.
    ClientGone,
}

trait Duplex: AsyncRead + AsyncWrite + Send + Unpin {}
impl<T: AsyncRead + AsyncWrite + Send + Unpin> Duplex for T {}

/// A connection to a provider, or another host, that was HTTP before.
pub struct Upstream {
    io: Box<dyn Duplex>,
    /// Read already, together with the answer's head.
    ahead: Bytes,
    /// The same connection, to see its close behind unread bytes.
    watch: TcpStream,
}

impl Upstream {
    /// Takes over the connection of an answer of 101.
    pub async fn of(upgrade: OnUpgrade) -> io::Result<Self> {
        let upgraded = upgrade.await.map_err(io::Error::other)?;
        let foreign = |_| io::Error::other("the upgraded connection is of no kind that is dialled");
        let parts = upgraded.downcast::<Io>().map_err(foreign)?;
        let watch = again(match &parts.io {
            MaybeHttpsStream::Http(tcp) => tcp.inner().get_ref(),
            MaybeHttpsStream::Https(tls) => tls.inner().get_ref().0.inner().inner().get_ref(),
        })?;
        Ok(Self { io: Box::new(TokioIo::new(parts.io)), ahead: parts.read_buf, watch })
    }
}

/// A second handle of a connection.
fn again(tcp: &TcpStream) -> io::Result<TcpStream> {
    TcpStream::from_std(socket2::SockRef::from(tcp).try_clone()?.into())
}

/// A socket between two peers.
pub struct Relay<S> {
    ways: Ways<TokioIo<Upgraded>, S>,
    watch: TcpStream,
}

impl<S: Sieve> Relay<S> {
    /// Between these, over after `idle` without a byte.
    pub fn new(client: Upgraded, upstream: Upstream, sieve: S, idle: Duration) -> Self {
        let (client, ahead) = (TokioIo::new(client), upstream.ahead);
        let ways = Ways::new(client, upstream.io, ahead, sieve, Pace::new(idle));
        Self { ways, watch: upstream.watch }
    }

    /// What the provider's bytes go through.
    pub fn sieve(&self) -> &S {
        &self.ways.sieve
    }

    /// Carries both ways until a side ends. `gone` tells that the client has. Cancel safe.
    pub async fn run(&mut self, gone: impl Future<Output = ()>) -> End {
        let ways = &mut self.ways;
        let mut gone = std::pin::pin!(gone);
        // PRIORITY stands for "priority data or read closed": unread bytes alone do not make it ready.
        let mut left = std::pin::pin!(self.watch.ready(Interest::PRIORITY));
        std::future::poll_fn(|cx| {
            match ways.poll_down(cx) {
                Poll::Ready(Down::ClientGone) => return Poll::Ready(End::Client),
                Poll::Ready(Down::Closed | Down::Broken) => return Poll::Ready(End::Upstream),
                Poll::Pending => {}
            }
            if ways.poll_up(cx).is_ready() || gone.as_mut().poll(cx).is_ready() {
                return Poll::Ready(End::Client);
            }
            if left.as_mut().poll(cx).is_ready() {
                return Poll::Ready(End::Upstream);
            }
            ways.pace.poll_idle(cx).map(|()| End::Idle { untaken: ways.waits_for_client() })
        })
        .await
    }

    /// After [`End::Client`]: passes on what the client sent last, and then its end.
    pub async fn see_client_out(&mut self) {
        let ways = &mut self.ways;
        let farewell = async {
            std::future::poll_fn(|cx| ways.poll_up(cx)).await;
            std::future::poll_fn(|cx| Pin::new(&mut ways.upstream).poll_shutdown(cx)).await
        };
        // Whoever does not take it in time sees the connection close.
        let _ = tokio::time::timeout(FAREWELL, farewell).await;
    }

    /// After [`End::Upstream`]: passes on what the provider sent last, and then its end. False where that
    /// cannot be told in order, and the client's connection is to be reset. Cancel safe.
    pub async fn see_upstream_out(&mut self, gone: impl Future<Output = ()>) -> bool {
        let ways = &mut self.ways;
        let mut gone = std::pin::pin!(gone);
        let how = std::future::poll_fn(|cx| {
            if let Poll::Ready(how) = ways.poll_down(cx) {
                return Poll::Ready(how);
            }
            if ways.poll_up(cx).is_ready() || gone.as_mut().poll(cx).is_ready() {
                return Poll::Ready(Down::ClientGone);
            }
            ways.pace.poll_idle(cx).map(|()| Down::Broken)
        });
        match how.await {
            Down::ClientGone => return true,
            Down::Broken if !ways.sieve.said_goodbye() => return false,
            Down::Broken | Down::Closed => {}
        }
        let lingering = async {
            let _ = std::future::poll_fn(|cx| Pin::new(&mut ways.client).poll_shutdown(cx)).await;
            // What the client still says goes to a provider that closed only its own half.
            std::future::poll_fn(|cx| ways.poll_up(cx)).await;
        };
        let _ = tokio::time::timeout(LINGER, lingering).await;
        true
    }

    /// Breaks off: the provider's side is reset, and never ended in order.
    pub fn break_off(self) {
        // Fails only on a socket that is closed already, where nothing is left to reset.
        let _ = socket2::SockRef::from(&self.watch).set_linger(Some(Duration::ZERO));
    }
}

/// What both ways need; polled by one task.
struct Ways<C, S> {
    client: C,
    upstream: Box<dyn Duplex>,
    sieve: S,
    /// Of the provider's bytes, those read with its head.
    ahead: Bytes,
    /// Room for what is read from the provider.
    room: BytesMut,
    /// Being written to the client.
    out: Bytes,
    down_unflushed: bool,
    /// The provider's last byte was read.
    ended: Option<Down>,
    /// What was read from the client, and which part of it is not written yet.
    buffer: Box<[u8]>,
    unsent: std::ops::Range<usize>,
    up_unflushed: bool,
    /// The provider takes nothing more. What comes is thrown away until its own way ends.
    up_broken: bool,
    pace: Pace,
}

impl<C: AsyncRead + AsyncWrite + Unpin, S: Sieve> Ways<C, S> {
    fn new(client: C, upstream: Box<dyn Duplex>, ahead: Bytes, sieve: S, pace: Pace) -> Self {
        Self {
            client,
            upstream,
            sieve,
            ahead,
            room: BytesMut::with_capacity(BUFFER),
            out: Bytes::new(),
            down_unflushed: false,
            ended: None,
            buffer: vec![0; BUFFER].into_boxed_slice(),
            unsent: 0..0,
            up_unflushed: false,
            up_broken: false,
            pace,
        }
    }

    /// Whether the client has yet to take something that is on its way to it.
    fn waits_for_client(&self) -> bool {
        !self.out.is_empty() || self.down_unflushed
    }

    /// Provider to client. Ready when nothing more can be passed on; again and again, then.
    fn poll_down(&mut self, cx: &mut Context<'_>) -> Poll<Down> {
        for _ in 0..TURN {
            if let Err(how) = ready!(self.poll_pass_on(cx)) {
                return Poll::Ready(how);
            }
            if let Some(how) = self.ended {
                return Poll::Ready(how);
            }
            ready!(self.poll_take_in(cx));
        }
        cx.waker().wake_by_ref();
        Poll::Pending
    }

    /// Writes all that came through the sieve.
    fn poll_pass_on(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Down>> {
        loop {
            if self.out.is_empty() {
                match self.sieve.take() {
                    Some(piece) => self.out = piece,
                    None => break,
                }
            }
            match ready!(Pin::new(&mut self.client).poll_write(cx, &self.out)) {
                Ok(n) if n > 0 => self.out.advance(n),
                _ => return Poll::Ready(Err(Down::ClientGone)),
            }
            self.pace.moved();
            self.down_unflushed = true;
        }
        if self.down_unflushed {
            if ready!(Pin::new(&mut self.client).poll_flush(cx)).is_err() {
                return Poll::Ready(Err(Down::ClientGone));
            }
            self.down_unflushed = false;
        }
        Poll::Ready(Ok(()))
    }

    /// Reads from the provider into the sieve.
    fn poll_take_in(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        if !self.ahead.is_empty() {
            let ahead = std::mem::take(&mut self.ahead);
            self.sieve.feed(ahead);
            return Poll::Ready(());
        }
        // All that was read before has gone, so this takes the same memory again.
        self.room.reserve(BUFFER);
        let mut read = std::pin::pin!(tokio::io::AsyncReadExt::read_buf(&mut self.upstream, &mut self.room));
        match ready!(read.as_mut().poll(cx)) {
            Ok(n) if n > 0 => {
                self.pace.moved();
                self.sieve.feed(self.room.split().freeze());
            }
            Ok(_) => {
                self.ended = Some(Down::Closed);
                self.sieve.finish();
            }
            // What is held back stays back: more than was sure is not shown of what broke off.
            Err(_) => self.ended = Some(Down::Broken),
        }
        Poll::Ready(())
    }

    /// Client to provider. Ready when the client has ended; again and again, then.
    fn poll_up(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        for _ in 0..TURN {
            while !self.unsent.is_empty() && !self.up_broken {
                let unsent = &self.buffer[self.unsent.clone()];
                match ready!(Pin::new(&mut self.upstream).poll_write(cx, unsent)) {
                    Ok(n) if n > 0 => self.unsent.start += n,
                    _ => self.up_broken = true,
                }
                self.pace.moved();
                self.up_unflushed = true;
            }
            if self.up_unflushed && !self.up_broken {
                self.up_broken |= ready!(Pin::new(&mut self.upstream).poll_flush(cx)).is_err();
                self.up_unflushed = false;
            }
            let mut read = ReadBuf::new(&mut self.buffer);
            match ready!(Pin::new(&mut self.client).poll_read(cx, &mut read)) {
                Ok(()) if !read.filled().is_empty() => {
                    self.unsent = 0..read.filled().len();
                    self.pace.moved();
                }
                _ => return Poll::Ready(()),
            }
        }
        cx.waker().wake_by_ref();
        Poll::Pending
    }
}

/// When a byte last moved; one timer, re-armed only when it fires.
struct Pace {
    idle: Duration,
    last: Instant,
    timer: Pin<Box<Sleep>>,
}

impl Pace {
    fn new(idle: Duration) -> Self {
        let last = Instant::now();
        Self { idle, last, timer: Box::pin(tokio::time::sleep_until(last + idle)) }
    }

    fn moved(&mut self) {
        self.last = Instant::now();
    }

    fn poll_idle(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        loop {
            ready!(self.timer.as_mut().poll(cx));
            let due = self.last + self.idle;
            if due <= Instant::now() {
                return Poll::Ready(());
            }
            self.timer.as_mut().reset(due);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::task::Waker;

    use super::*;

    /// Takes all, and always has more; counts what was asked of it.
    #[derive(Default)]
    struct Endless(std::sync::Arc<std::sync::atomic::AtomicUsize>);

    impl AsyncRead for Endless {
        fn poll_read(
            self: Pin<&mut Self>,
            _: &mut Context<'_>,
            buf: &mut ReadBuf<'_>,
        ) -> Poll<io::Result<()>> {
            // An end, so that who reads for ever comes back.
            if self.0.fetch_add(1, std::sync::atomic::Ordering::Relaxed) < 10_000 {
                buf.put_slice(&[7; 100]);
            }
            Poll::Ready(Ok(()))
        }
    }

    impl AsyncWrite for Endless {
        fn poll_write(self: Pin<&mut Self>, _: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
            Poll::Ready(Ok(bytes.len()))
        }
        fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
            Poll::Ready(Ok(()))
        }
        fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
            Poll::Ready(Ok(()))
        }
    }

    #[derive(Default)]
    struct Open(Option<Bytes>);

    impl Sieve for Open {
        fn feed(&mut self, data: Bytes) {
            assert!(self.0.replace(data).is_none(), "fed before all was taken");
        }
        fn finish(&mut self) {}
        fn take(&mut self) -> Option<Bytes> {
            self.0.take()
        }
        fn said_goodbye(&self) -> bool {
            false
        }
    }

    #[tokio::test]
    async fn a_way_on_which_bytes_never_end_gives_the_other_its_turn() {
        let (client, upstream) = (Endless::default(), Endless::default());
        let counts = [client.0.clone(), upstream.0.clone()];
        let pace = Pace::new(Duration::from_mins(1));
        let mut ways = Ways::new(client, Box::new(upstream), Bytes::new(), Open::default(), pace);
        let mut cx = Context::from_waker(Waker::noop());
        assert!(ways.poll_down(&mut cx).is_pending() && ways.poll_up(&mut cx).is_pending());
        for count in counts {
            assert_eq!(count.load(std::sync::atomic::Ordering::Relaxed), TURN);
        }
    }
}

//! One accepted socket, shared between hyper and the watcher that sees its peer leave.
//!
//! hyper stops reading while it serves a request with unread bytes in its buffer, and then cannot see
//! the peer's FIN (one stray CRLF after a body is enough). So the socket is shared: hyper reads and
//! writes through [`Io`], and [`Socket::gone`] waits on the same registration for "read closed" alone.

use std::io;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, Interest, ReadBuf};
use tokio::net::{TcpStream, UnixStream};

use tokio::time::Instant;

use super::HeadFacts;
use super::head::HeadScan;

/// How long a connection that lessor ends is read on, see [`Socket::linger`].
const LINGER: std::time::Duration = std::time::Duration::from_secs(2);

/// A connected socket of either family.
#[derive(Debug)]
pub(super) enum Socket {
    /// TCP.
    Tcp(TcpStream),
    /// Unix.
    Unix(UnixStream),
}

macro_rules! on_either {
    ($self:expr, $socket:ident => $call:expr) => {
        match $self {
            Socket::Tcp($socket) => $call,
            Socket::Unix($socket) => $call,
        }
    };
}

impl Socket {
    /// Resolves when the peer has closed its writing side or the connection is broken, however many
    /// bytes lie unread. Cancel safe.
    pub(super) async fn gone(&self) {
        // PRIORITY stands for "priority data or read closed"; plain READABLE would be ready at once
        // while bytes lie unread. Urgent data (none is ever expected) would make this spin, so any
        // readiness that is not a close ends in treating the peer as gone.
        let _ = on_either!(self, socket => socket.ready(Interest::PRIORITY).await);
    }

    fn poll_read_ready(&self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        on_either!(self, socket => socket.poll_read_ready(cx))
    }

    fn poll_write_ready(&self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        on_either!(self, socket => socket.poll_write_ready(cx))
    }

    fn try_read(&self, buf: &mut ReadBuf<'_>) -> io::Result<usize> {
        on_either!(self, socket => socket.try_read_buf(buf))
    }

    fn try_write(&self, bytes: &[u8]) -> io::Result<usize> {
        on_either!(self, socket => socket.try_write(bytes))
    }

    fn try_write_vectored(&self, slices: &[io::IoSlice<'_>]) -> io::Result<usize> {
        on_either!(self, socket => socket.try_write_vectored(slices))
    }

    fn shutdown_write(&self) -> io::Result<()> {
        on_either!(self, socket => socket2::SockRef::from(socket).shutdown(std::net::Shutdown::Write))
    }

    /// Makes the close that follows a reset instead of a clean end.
    fn reset_on_close(&self) {
        if let Self::Tcp(socket) = self {
            // Fails only on a socket that is closed already, where nothing is left to reset.
            let _ = socket2::SockRef::from(socket).set_linger(Some(std::time::Duration::ZERO));
        }
    }

    /// Reads and drops what still comes, until the peer closes or [`LINGER`] is over. A socket closed with
    /// bytes unread resets the connection, and the reset can overtake the answer that was just written
    /// (an early answer to an upload, say).
    pub(super) async fn linger(&self) {
        // hyper ends what it writes only where all went well; the peer must see the end now in any case.
        let _ = self.shutdown_write();
        let mut scratch = vec![0; 16 * 1024];
        let reading = async {
            loop {
                let ready = on_either!(self, socket => socket.readable().await);
                let read = ready.and_then(|()| on_either!(self, socket => socket.try_read(&mut scratch)));
                match read {
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                    Ok(0) | Err(_) => return,
                    Ok(_) => {}
                }
            }
        };
        let _ = tokio::time::timeout(LINGER, reading).await;
    }

    /// Writes what fits at once: a last word to a peer that is being closed on.
    pub(super) fn last_word(&self, bytes: &[u8]) {
        let _ = self.try_write(bytes);
        let _ = self.shutdown_write();
    }
}

/// Where a connection is between requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Phase {
    /// Nothing of the next request has come.
    Idle = 0,
    /// Part of a head has come.
    Head = 1,
    /// A request is being served.
    Busy = 2,
}

/// Asked whether what is being answered must be cut now; registers the waker it is given.
pub type CutWatch = Box<dyn FnMut(&mut Context<'_>) -> Poll<()> + Send>;

/// What the reading side, the service and the watcher of one connection tell each other.
pub(super) struct Signals {
    phase: AtomicU8,
    /// The head just read carried a `content-length` line, whatever hyper made of it.
    saw_length: AtomicBool,
    /// The client takes no bytes: since when, in ms after `born`, plus one; 0 while it does.
    stalled: AtomicU64,
    born: Instant,
    /// Bytes came while a request without a body was served: the next head may lie in hyper's buffer,
    /// unseen by the scan.
    unseen: AtomicBool,
    bodyless: AtomicBool,
    /// Asked beside hyper, which does not look at a body while the client takes none of it.
    cut: Mutex<Option<CutWatch>>,
    /// A tunnel has taken the socket over.
    upgraded: AtomicBool,
    /// The answer broke where its framing could not show it: close by reset.
    reset: AtomicBool,
}

impl std::fmt::Debug for Signals {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Signals").field("phase", &self.phase()).finish_non_exhaustive()
    }
}

impl Signals {
    pub(super) fn new() -> Self {
        Self {
            phase: AtomicU8::new(Phase::Idle as u8),
            saw_length: AtomicBool::new(false),
            stalled: AtomicU64::new(0),
            born: Instant::now(),
            unseen: AtomicBool::new(false),
            bodyless: AtomicBool::new(false),
            cut: Mutex::new(None),
            upgraded: AtomicBool::new(false),
            reset: AtomicBool::new(false),
        }
    }

    pub(super) fn phase(&self) -> Phase {
        match self.phase.load(Ordering::Relaxed) {
            0 => Phase::Idle,
            1 => Phase::Head,
            _ => Phase::Busy,
        }
    }

    pub(super) fn enter(&self, phase: Phase) {
        self.phase.store(phase as u8, Ordering::Relaxed);
    }

    /// A request begins: what was seen of its head.
    pub(super) fn begin(&self, bodyless: bool) -> HeadFacts {
        let scanned = self.phase() == Phase::Head && !self.unseen.swap(false, Ordering::Relaxed);
        self.enter(Phase::Busy);
        self.bodyless.store(bodyless, Ordering::Relaxed);
        HeadFacts { saw_length: self.saw_length.swap(false, Ordering::Relaxed), scanned }
    }

    /// The answer is out of the service's hands.
    pub(super) fn finish(&self) {
        self.cut_when(None);
        self.enter(Phase::Idle);
    }

    pub(super) fn cut_when(&self, watch: Option<CutWatch>) {
        *self.cut.lock().unwrap_or_else(PoisonError::into_inner) = watch;
    }

    pub(super) fn poll_cut(&self, cx: &mut Context<'_>) -> Poll<()> {
        match &mut *self.cut.lock().unwrap_or_else(PoisonError::into_inner) {
            Some(watch) => watch(cx),
            None => Poll::Pending,
        }
    }

    /// Since when the client has taken nothing of what is to be written to it.
    pub(super) fn stalled_since(&self) -> Option<Instant> {
        match self.stalled.load(Ordering::Relaxed) {
            0 => None,
            ms => Some(self.born + Duration::from_millis(ms - 1)),
        }
    }

    fn note_write(&self, blocked: bool) {
        let before = self.stalled.load(Ordering::Relaxed);
        if blocked == (before != 0) {
            return;
        }
        let now = u64::try_from(self.born.elapsed().as_millis()).unwrap_or(u64::MAX - 1) + 1;
        self.stalled.store(if blocked { now } else { 0 }, Ordering::Relaxed);
    }

    pub(super) fn hand_over(&self) {
        self.upgraded.store(true, Ordering::Relaxed);
    }

    pub(super) fn is_handed_over(&self) -> bool {
        self.upgraded.load(Ordering::Relaxed)
    }

    pub(super) fn closes_by_reset(&self) -> bool {
        self.reset.load(Ordering::Relaxed)
    }

    pub(super) fn close_by_reset(&self) {
        self.reset.store(true, Ordering::Relaxed);
    }
}

/// hyper's side of a socket.
#[derive(Debug)]
pub(super) struct Io {
    socket: Arc<Socket>,
    signals: Arc<Signals>,
    scan: HeadScan,
    /// lessor's own words being written in place of hyper's bare error answer, and how far.
    instead: Option<(Vec<u8>, usize)>,
}

impl Io {
    pub(super) fn new(socket: Arc<Socket>, signals: Arc<Signals>) -> Self {
        Self { socket, signals, scan: HeadScan::default(), instead: None }
    }

    /// Looks at what was read while no request is served: it belongs to a head.
    fn note_read(&mut self, bytes: &[u8]) {
        if bytes.is_empty() {
            return;
        }
        if self.signals.phase() == Phase::Busy {
            if self.signals.bodyless.load(Ordering::Relaxed) {
                self.signals.unseen.store(true, Ordering::Relaxed);
            }
            return;
        }
        if self.signals.phase() == Phase::Idle {
            self.signals.enter(Phase::Head);
            self.scan = HeadScan::default();
        }
        if self.scan.feed(bytes) {
            self.signals.saw_length.store(true, Ordering::Relaxed);
        }
    }

    /// Writes once the client takes bytes, and notes since when it has not.
    fn poll_some(
        &self,
        cx: &mut Context<'_>,
        write: impl Fn(&Socket) -> io::Result<usize>,
    ) -> Poll<io::Result<usize>> {
        loop {
            let ready = self.socket.poll_write_ready(cx);
            self.signals.note_write(ready.is_pending());
            ready!(ready)?;
            match write(&self.socket) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                other => return Poll::Ready(other),
            }
        }
    }

    /// Writes the words that stand in for hyper's, whole, before anything else.
    fn poll_instead(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        while let Some((bytes, written)) = &mut self.instead {
            ready!(self.socket.poll_write_ready(cx))?;
            match self.socket.try_write(&bytes[*written..]) {
                Ok(more) => {
                    *written += more;
                    if *written >= bytes.len() {
                        self.instead = None;
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Poll::Ready(Err(error)),
            }
        }
        Poll::Ready(Ok(()))
    }
}

impl AsyncRead for Io {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        loop {
            ready!(self.socket.poll_read_ready(cx))?;
            let before = buf.filled().len();
            match self.socket.try_read(buf) {
                Ok(_) => {
                    let this = &mut *self;
                    this.note_read(&buf.filled()[before..]);
                    return Poll::Ready(Ok(()));
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Poll::Ready(Err(error)),
            }
        }
    }
}

impl AsyncWrite for Io {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        if self.instead.is_none() && self.signals.phase() != Phase::Busy {
            self.instead = super::head::own_error_answer(bytes).map(|answer| (answer, 0));
            if self.instead.is_some() {
                ready!(self.poll_instead(cx))?;
                return Poll::Ready(Ok(bytes.len()));
            }
        } else if self.instead.is_some() {
            ready!(self.poll_instead(cx))?;
            return Poll::Ready(Ok(bytes.len()));
        }
        self.poll_some(cx, |socket| socket.try_write(bytes))
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        if self.signals.phase() != Phase::Busy || self.instead.is_some() {
            // hyper's own error answers are one flat slice; everything else comes while Busy.
            let first = slices.iter().find(|slice| !slice.is_empty()).map_or(&[][..], |slice| slice);
            return self.as_mut().poll_write(cx, first);
        }
        self.poll_some(cx, |socket| socket.try_write_vectored(slices))
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        if self.signals.closes_by_reset() {
            self.socket.reset_on_close();
            return Poll::Ready(Ok(()));
        }
        match self.socket.shutdown_write() {
            Err(error) if error.kind() != io::ErrorKind::NotConnected => Poll::Ready(Err(error)),
            _ => Poll::Ready(Ok(())),
        }
    }
}

impl Drop for Io {
    fn drop(&mut self) {
        if self.signals.closes_by_reset() {
            self.socket.reset_on_close();
        }
    }
}

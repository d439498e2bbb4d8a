//! One accepted socket, shared between hyper and the watcher that sees its peer leave.
//!
//! hyper stops reading while it serves a request with unread bytes in its buffer, and then cannot see
//! the peer's FIN (one stray CRLF after a body is enough). So the socket is shared: hyper reads and
//! writes through a [`super::wire::Wire`], and [`Socket::gone`] waits on the same registration for "read closed" alone.

use std::io;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::io::{Interest, ReadBuf};
use tokio::net::{TcpStream, UnixStream};

use tokio::time::Instant;

use super::HeadFacts;
use super::inside::Opened;

/// How long a connection that lessor ends is read on, see [`Socket::linger`].
pub(super) const LINGER: std::time::Duration = std::time::Duration::from_secs(2);

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

    pub(super) fn poll_read_ready(&self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        on_either!(self, socket => socket.poll_read_ready(cx))
    }

    pub(super) fn poll_write_ready(&self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        on_either!(self, socket => socket.poll_write_ready(cx))
    }

    /// Reads what there is. Where that is less than there is room for, the socket counts as empty until the
    /// kernel tells of more: asking it once more would cost each request a call that says so.
    pub(super) fn try_read(&self, buf: &mut ReadBuf<'_>) -> io::Result<usize> {
        let room = buf.remaining();
        let mut short = None;
        // What `try_io` hears is that the socket would block, and it forgets the readiness that it saw before
        // the read; one that came meanwhile stays.
        let read = on_either!(self, socket => socket.try_io(Interest::READABLE, || {
            let read = socket.try_read_buf(buf)?;
            if (1..room).contains(&read) {
                short = Some(read);
                return Err(io::ErrorKind::WouldBlock.into());
            }
            Ok(read)
        }));
        short.map_or(read, Ok)
    }

    pub(super) fn try_write(&self, bytes: &[u8]) -> io::Result<usize> {
        on_either!(self, socket => socket.try_write(bytes))
    }

    pub(super) fn try_write_vectored(&self, slices: &[io::IoSlice<'_>]) -> io::Result<usize> {
        on_either!(self, socket => socket.try_write_vectored(slices))
    }

    pub(super) fn shutdown_write(&self) -> io::Result<()> {
        on_either!(self, socket => socket2::SockRef::from(socket).shutdown(std::net::Shutdown::Write))
    }

    /// Makes the close that follows a reset instead of a clean end.
    pub(super) fn reset_on_close(&self) {
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
                let read = ready.and_then(|()| self.try_read(&mut ReadBuf::new(&mut scratch)));
                match read {
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                    Ok(0) | Err(_) => return,
                    Ok(_) => {}
                }
            }
        };
        let _ = tokio::time::timeout(LINGER, reading).await;
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
    /// How many requests began here.
    begun: AtomicU64,
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
    cut: Watch,
    /// The same for as long as the connection lives.
    cut_for_good: Watch,
    /// A tunnel has taken the socket over.
    upgraded: AtomicBool,
    /// The answer broke where its framing could not show it: close by reset.
    reset: AtomicBool,
    /// A head did not come in time: that is said, and nothing more is read.
    too_slow: AtomicBool,
    /// A tunnel whose inside is served here.
    opened: Mutex<Option<Opened>>,
}

impl std::fmt::Debug for Signals {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Signals").field("phase", &self.phase()).finish_non_exhaustive()
    }
}

/// A place for a watch. Empty, it costs no lock.
#[derive(Default)]
struct Watch {
    is_set: AtomicBool,
    watch: Mutex<Option<CutWatch>>,
}

impl Watch {
    fn set(&self, watch: CutWatch) {
        *self.lock() = Some(watch);
        self.is_set.store(true, Ordering::Release);
    }

    fn clear(&self) {
        if self.is_set.swap(false, Ordering::AcqRel) {
            *self.lock() = None;
        }
    }

    fn poll(&self, cx: &mut Context<'_>) -> Poll<()> {
        if !self.is_set.load(Ordering::Acquire) {
            return Poll::Pending;
        }
        self.lock().as_mut().map_or(Poll::Pending, |watch| watch(cx))
    }

    fn lock(&self) -> MutexGuard<'_, Option<CutWatch>> {
        self.watch.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Signals {
    pub(super) fn new() -> Self {
        Self {
            phase: AtomicU8::new(Phase::Idle as u8),
            begun: AtomicU64::new(0),
            saw_length: AtomicBool::new(false),
            stalled: AtomicU64::new(0),
            born: Instant::now(),
            unseen: AtomicBool::new(false),
            bodyless: AtomicBool::new(false),
            cut: Watch::default(),
            cut_for_good: Watch::default(),
            upgraded: AtomicBool::new(false),
            reset: AtomicBool::new(false),
            too_slow: AtomicBool::new(false),
            opened: Mutex::new(None),
        }
    }

    pub(super) fn phase(&self) -> Phase {
        match self.phase.load(Ordering::Relaxed) {
            0 => Phase::Idle,
            1 => Phase::Head,
            _ => Phase::Busy,
        }
    }

    /// How many requests began so far: one that is answered at once is over before its phase is seen.
    pub(super) fn begun(&self) -> u64 {
        self.begun.load(Ordering::Relaxed)
    }

    pub(super) fn enter(&self, phase: Phase) {
        self.phase.store(phase as u8, Ordering::Relaxed);
    }

    /// A request begins: what was seen of its head.
    pub(super) fn begin(&self, bodyless: bool) -> HeadFacts {
        let scanned = self.phase() == Phase::Head && !self.unseen.swap(false, Ordering::Relaxed);
        self.enter(Phase::Busy);
        self.begun.fetch_add(1, Ordering::Relaxed);
        self.bodyless.store(bodyless, Ordering::Relaxed);
        // hyper holds HTTP/1 heads to the limits by itself.
        HeadFacts { saw_length: self.saw_length.swap(false, Ordering::Relaxed), scanned, too_large: false }
    }

    /// The answer is out of the service's hands.
    pub(super) fn finish(&self) {
        self.cut.clear();
        // What was handed over has no next head.
        if !self.is_handed_over() {
            self.enter(Phase::Idle);
        }
    }

    pub(super) fn cut_when(&self, watch: CutWatch) {
        self.cut.set(watch);
    }

    pub(super) fn cut_for_good_when(&self, watch: CutWatch) {
        self.cut_for_good.set(watch);
    }

    pub(super) fn poll_cut(&self, cx: &mut Context<'_>) -> Poll<()> {
        match self.cut.poll(cx) {
            Poll::Ready(()) => Poll::Ready(()),
            Poll::Pending => self.poll_cut_for_good(cx),
        }
    }

    pub(super) fn poll_cut_for_good(&self, cx: &mut Context<'_>) -> Poll<()> {
        self.cut_for_good.poll(cx)
    }

    /// Since when the client has taken nothing of what is to be written to it.
    pub(super) fn stalled_since(&self) -> Option<Instant> {
        match self.stalled.load(Ordering::Relaxed) {
            0 => None,
            ms => Some(self.born + Duration::from_millis(ms - 1)),
        }
    }

    /// Bytes came while a request was served.
    pub(super) fn note_unseen(&self) {
        if self.bodyless.load(Ordering::Relaxed) {
            self.unseen.store(true, Ordering::Relaxed);
        }
    }

    /// The head that is being read has a `content-length` line.
    pub(super) fn note_length(&self) {
        self.saw_length.store(true, Ordering::Relaxed);
    }

    /// Whether the client takes bytes.
    pub(super) fn note_write(&self, blocked: bool) {
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

    /// The tunnel that the request just answered asked for is served here.
    pub(super) fn open(&self, opened: Opened) {
        *self.opened.lock().unwrap_or_else(PoisonError::into_inner) = Some(opened);
    }

    /// The tunnel to serve. From here on the connection is as new.
    pub(super) fn take_opened(&self) -> Option<Opened> {
        let opened = self.opened.lock().unwrap_or_else(PoisonError::into_inner).take()?;
        self.upgraded.store(false, Ordering::Relaxed);
        self.saw_length.store(false, Ordering::Relaxed);
        self.unseen.store(false, Ordering::Relaxed);
        self.enter(Phase::Idle);
        Some(opened)
    }

    /// Nothing more is read; the client is told that it was too slow.
    pub(super) fn stop_reading(&self) {
        self.too_slow.store(true, Ordering::Relaxed);
    }

    pub(super) fn stops_reading(&self) -> bool {
        self.too_slow.load(Ordering::Relaxed)
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

//! What hyper reads and writes, in the clear: what it does not tell of heads is seen here, and its bare
//! error answers become lessor's.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::head::{self, HeadScan};
use super::socket::{Phase, Signals};

/// hyper's side of a connection.
#[derive(Debug)]
pub(super) struct Watched<T> {
    inner: T,
    signals: Arc<Signals>,
    scan: HeadScan,
    /// lessor's own words being written in place of hyper's bare error answer, and how far.
    instead: Option<(Vec<u8>, usize)>,
    /// The last word was begun.
    ending: bool,
}

impl<T: AsyncRead + AsyncWrite + Unpin> Watched<T> {
    pub(super) fn new(inner: T, signals: Arc<Signals>) -> Self {
        Self { inner, signals, scan: HeadScan::default(), instead: None, ending: false }
    }

    pub(super) fn into_inner(self) -> T {
        self.inner
    }

    /// Looks at what was read while no request is served: it belongs to a head.
    fn note_read(&mut self, bytes: &[u8]) {
        if bytes.is_empty() {
            return;
        }
        if self.signals.phase() == Phase::Busy {
            self.signals.note_unseen();
            return;
        }
        if self.signals.phase() == Phase::Idle {
            self.signals.enter(Phase::Head);
            self.scan = HeadScan::default();
        }
        if self.scan.feed(bytes) {
            self.signals.note_length();
        }
    }

    /// Takes lessor's own words for hyper's, where `bytes` are an error answer of hyper's own: those come while
    /// no request is served.
    fn stand_in(&mut self, bytes: &[u8]) {
        if self.instead.is_none() && self.signals.phase() != Phase::Busy {
            self.instead = head::own_error_answer(bytes).map(|answer| (answer, 0));
        }
    }

    /// Writes the words that stand in for hyper's, whole, before anything else.
    fn poll_instead(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        while let Some((bytes, written)) = &mut self.instead {
            let more = ready!(Pin::new(&mut self.inner).poll_write(cx, &bytes[*written..]))?;
            *written += more;
            if more == 0 || *written >= bytes.len() {
                self.instead = None;
            }
        }
        Poll::Ready(Ok(()))
    }

    /// Says that the head was too slow; for hyper the connection then is at its end.
    fn poll_last_word(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if !self.ending {
            self.ending = true;
            self.instead = Some((head::too_slow(), 0));
        }
        ready!(self.poll_instead(cx))?;
        Pin::new(&mut self.inner).poll_flush(cx)
    }
}

impl<T: AsyncRead + AsyncWrite + Unpin> AsyncRead for Watched<T> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = &mut *self;
        if this.signals.stops_reading() {
            return this.poll_last_word(cx);
        }
        let before = buf.filled().len();
        ready!(Pin::new(&mut this.inner).poll_read(cx, buf))?;
        this.note_read(&buf.filled()[before..]);
        Poll::Ready(Ok(()))
    }
}

impl<T: AsyncRead + AsyncWrite + Unpin> AsyncWrite for Watched<T> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let this = &mut *self;
        this.stand_in(bytes);
        if this.instead.is_some() {
            ready!(this.poll_instead(cx))?;
            return Poll::Ready(Ok(bytes.len()));
        }
        Pin::new(&mut this.inner).poll_write(cx, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        // hyper's own error answers are one flat slice.
        let mut some = slices.iter().filter(|slice| !slice.is_empty());
        match (some.next(), some.next()) {
            (Some(first), second) if second.is_none() || self.instead.is_some() => self.poll_write(cx, first),
            _ => Pin::new(&mut self.inner).poll_write_vectored(cx, slices),
        }
    }

    fn is_write_vectored(&self) -> bool {
        self.inner.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        // Under TLS a shutdown says `close_notify`, and what was cut would look complete.
        if self.signals.closes_by_reset() {
            return Poll::Ready(Ok(()));
        }
        Pin::new(&mut self.inner).poll_shutdown(cx)
    }
}

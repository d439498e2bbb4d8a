//! The bytes of one accepted socket as they are on the wire, under TLS where there is some.

use std::future::poll_fn;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use bytes::{Buf as _, Bytes};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::socket::{Signals, Socket};

/// Bytes read at once while only the first one matters.
const PEEK: usize = 4096;

/// One reader and writer of a socket that others watch.
#[derive(Debug)]
pub(super) struct Wire {
    socket: Arc<Socket>,
    signals: Arc<Signals>,
    /// Read already, and not yet given on.
    ahead: Bytes,
}

impl Wire {
    pub(super) fn new(socket: Arc<Socket>, signals: Arc<Signals>) -> Self {
        Self { socket, signals, ahead: Bytes::new() }
    }

    /// Gives `bytes` before what the socket has.
    pub(super) fn put_back(&mut self, bytes: Bytes) {
        self.ahead = bytes;
    }

    /// The first byte that will be read; `None` at the end. Cancel safe.
    pub(super) async fn first_byte(&mut self) -> io::Result<Option<u8>> {
        if self.ahead.is_empty() {
            self.look_further().await?;
        }
        Ok(self.ahead.first().copied())
    }

    /// Whether what will be read begins with `opening`; no more of it is waited for than that takes.
    /// Cancel safe.
    pub(super) async fn begins_with(&mut self, opening: &[u8]) -> io::Result<bool> {
        loop {
            let seen = self.ahead.len().min(opening.len());
            if self.ahead[..seen] != opening[..seen] {
                return Ok(false);
            }
            if seen == opening.len() {
                return Ok(true);
            }
            if self.look_further().await? == 0 {
                return Ok(false);
            }
        }
    }

    /// Whether something was read that was not yet given on.
    pub(super) fn has_ahead(&self) -> bool {
        !self.ahead.is_empty()
    }

    /// Reads some more of the socket without giving it on; how much.
    async fn look_further(&mut self) -> io::Result<usize> {
        let mut more = vec![0; PEEK];
        let mut buf = ReadBuf::new(&mut more);
        poll_fn(|cx| self.poll_socket(cx, &mut buf)).await?;
        let read = buf.filled().len();
        more.truncate(read);
        self.ahead =
            if self.ahead.is_empty() { more.into() } else { [&self.ahead[..], &more].concat().into() };
        Ok(read)
    }

    fn poll_socket(&self, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        loop {
            ready!(self.socket.poll_read_ready(cx))?;
            match self.socket.try_read(buf) {
                Ok(_) => return Poll::Ready(Ok(())),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Poll::Ready(Err(error)),
            }
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
}

impl AsyncRead for Wire {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if !self.ahead.is_empty() {
            let n = self.ahead.len().min(buf.remaining());
            buf.put_slice(&self.ahead[..n]);
            self.ahead.advance(n);
            if self.ahead.is_empty() {
                // Else its memory stays for as long as the connection.
                self.ahead = Bytes::new();
            }
            return Poll::Ready(Ok(()));
        }
        self.poll_socket(cx, buf)
    }
}

impl AsyncWrite for Wire {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.poll_some(cx, |socket| socket.try_write(bytes))
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
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

impl Drop for Wire {
    fn drop(&mut self) {
        if self.signals.closes_by_reset() {
            self.socket.reset_on_close();
        }
    }
}

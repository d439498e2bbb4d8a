//! A provider that has heard enough: it answers early, closes, and resets what is still sent to it.
//!
//! The reset fails the next write, and hyper would give the connection up with the answer lying unread. So a
//! write that fails stands still instead, and what was said is read to its end, which then is the error.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use hyper::rt::{Read, ReadBufCursor, Write};
use hyper_util::client::legacy::connect::{Connected, Connection};

/// A connection to a provider.
#[derive(Debug)]
pub(super) struct LastWord<T> {
    inner: T,
    /// The other side takes nothing more.
    deaf: bool,
}

impl<T> LastWord<T> {
    /// Reads `inner` to its end, also after it takes nothing more.
    pub(super) fn new(inner: T) -> Self {
        Self { inner, deaf: false }
    }

    /// The connection itself.
    pub(super) fn get_ref(&self) -> &T {
        &self.inner
    }

    /// What a write came to. Nobody is woken by one that stands still: the end of reading follows at once.
    fn written<O>(&mut self, written: Poll<io::Result<O>>) -> Poll<io::Result<O>> {
        match written {
            Poll::Ready(Err(error)) if is_refusal(&error) => {
                self.deaf = true;
                Poll::Pending
            }
            written => written,
        }
    }
}

fn is_refusal(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe)
}

impl<T: Read + Unpin> Read for LastWord<T> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: ReadBufCursor<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_read(cx, buf)
    }
}

impl<T: Write + Unpin> Write for LastWord<T> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        if self.deaf {
            return Poll::Pending;
        }
        let written = Pin::new(&mut self.inner).poll_write(cx, bytes);
        self.written(written)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        if self.deaf {
            return Poll::Pending;
        }
        let written = Pin::new(&mut self.inner).poll_write_vectored(cx, slices);
        self.written(written)
    }

    fn is_write_vectored(&self) -> bool {
        self.inner.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if self.deaf {
            return Poll::Pending;
        }
        let flushed = Pin::new(&mut self.inner).poll_flush(cx);
        self.written(flushed)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if self.deaf {
            // There is nobody to be told.
            return Poll::Ready(Ok(()));
        }
        match ready!(Pin::new(&mut self.inner).poll_shutdown(cx)) {
            Err(error) if is_refusal(&error) => Poll::Ready(Ok(())),
            done => Poll::Ready(done),
        }
    }
}

impl<T> Connection for LastWord<T> {
    /// Not `inner`'s word, which puts its addresses into the extensions of each answer, where nobody reads them.
    fn connected(&self) -> Connected {
        Connected::new()
    }
}

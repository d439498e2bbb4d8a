//! A provider that has heard enough: it answers early, closes, and resets what is still sent to it.
//!
//! The reset fails the next write, and hyper would give the connection up with the answer lying unread. So a
//! write that fails stands still instead, and what was said is read to its end, which then is the error. With that
//! end writes fail again: hyper keeps a connection for as long as it has something to write.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use hyper_util::client::legacy::connect::{Connected, Connection};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// A connection to a provider.
#[derive(Debug)]
pub(super) struct LastWord<T> {
    inner: T,
    /// How the other side said that it takes nothing more.
    deaf: Option<io::ErrorKind>,
    /// All that it said was read.
    silent: bool,
}

impl<T> LastWord<T> {
    /// Reads `inner` to its end, also after it takes nothing more.
    pub(super) fn new(inner: T) -> Self {
        Self { inner, deaf: None, silent: false }
    }

    /// The connection itself.
    pub(super) fn get_ref(&self) -> &T {
        &self.inner
    }
}

impl<T: Unpin> LastWord<T> {
    /// What a write comes to. Nobody is woken by one that stands still: the end of reading follows at once, and with
    /// it who writes looks again.
    fn write<O>(
        &mut self,
        cx: &mut Context<'_>,
        write: impl FnOnce(Pin<&mut T>, &mut Context<'_>) -> Poll<io::Result<O>>,
    ) -> Poll<io::Result<O>> {
        if let Some(deaf) = self.deaf {
            return if self.silent { Poll::Ready(Err(deaf.into())) } else { Poll::Pending };
        }
        match write(Pin::new(&mut self.inner), cx) {
            Poll::Ready(Err(error)) if is_refusal(&error) && !self.silent => {
                self.deaf = Some(error.kind());
                Poll::Pending
            }
            written => written,
        }
    }
}

fn is_refusal(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe)
}

impl<T: AsyncRead + Unpin> AsyncRead for LastWord<T> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let (before, room) = (buf.filled().len(), buf.remaining());
        let read = ready!(Pin::new(&mut self.inner).poll_read(cx, buf));
        self.silent |= read.is_err() || (buf.filled().len() == before && room > 0);
        Poll::Ready(read)
    }
}

impl<T: AsyncWrite + Unpin> AsyncWrite for LastWord<T> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.write(cx, |inner, cx| inner.poll_write(cx, bytes))
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.write(cx, |inner, cx| inner.poll_write_vectored(cx, slices))
    }

    fn is_write_vectored(&self) -> bool {
        self.inner.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.write(cx, AsyncWrite::poll_flush)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if self.deaf.is_some() {
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

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a test that fails may panic
mod tests {
    use std::task::Waker;

    use super::*;

    /// Resets what is sent to it, and has this to say.
    struct Refuses(&'static [u8]);

    impl AsyncRead for Refuses {
        fn poll_read(
            mut self: Pin<&mut Self>,
            _: &mut Context<'_>,
            buf: &mut ReadBuf<'_>,
        ) -> Poll<io::Result<()>> {
            let (now, later) = self.0.split_at(self.0.len().min(buf.remaining()));
            buf.put_slice(now);
            self.0 = later;
            Poll::Ready(Ok(()))
        }
    }

    impl AsyncWrite for Refuses {
        fn poll_write(self: Pin<&mut Self>, _: &mut Context<'_>, _: &[u8]) -> Poll<io::Result<usize>> {
            Poll::Ready(Err(io::ErrorKind::ConnectionReset.into()))
        }

        fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
            Poll::Ready(Ok(()))
        }

        fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
            Poll::Ready(Ok(()))
        }
    }

    #[test]
    fn writing_stands_still_until_all_was_read_and_then_fails() {
        let mut cx = Context::from_waker(Waker::noop());
        let mut wire = LastWord::new(Refuses(b"enough"));
        for left in [b"eno", b"ugh"] {
            assert!(Pin::new(&mut wire).poll_write(&mut cx, b"more").is_pending());
            assert!(Pin::new(&mut wire).poll_flush(&mut cx).is_pending());
            let mut room = [0; 3];
            assert!(Pin::new(&mut wire).poll_read(&mut cx, &mut ReadBuf::new(&mut room)).is_ready());
            assert_eq!(&room, left);
        }
        assert!(Pin::new(&mut wire).poll_read(&mut cx, &mut ReadBuf::new(&mut [0; 3])).is_ready());
        let written = Pin::new(&mut wire).poll_write(&mut cx, b"more").map_err(|error| error.kind());
        assert_eq!(written, Poll::Ready(Err(io::ErrorKind::ConnectionReset)));
        assert!(matches!(Pin::new(&mut wire).poll_flush(&mut cx), Poll::Ready(Err(_))));
        assert!(matches!(Pin::new(&mut wire).poll_shutdown(&mut cx), Poll::Ready(Ok(()))));
    }
}

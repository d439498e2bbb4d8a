//! The socket of an admin connection: whoever takes nothing of his answer is not waited for.

use std::future::Future as _;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, Waker, ready};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::Sleep;

/// How long a peer may take nothing of what is written to it.
pub(super) const TAKES: Duration = Duration::from_secs(5);

/// A socket whose writes fail where the peer takes nothing for [`TAKES`], and from which nothing more is read until
/// it takes again: no request is begun while the answer to the one before waits.
#[derive(Debug)]
pub(super) struct Patience<S> {
    socket: S,
    /// Since a write had to wait.
    waits: Option<Pin<Box<Sleep>>>,
    reader: Option<Waker>,
}

impl<S> Patience<S> {
    pub(super) fn new(socket: S) -> Self {
        Self { socket, waits: None, reader: None }
    }

    /// Bounds a write that has just been tried.
    fn bound<T>(&mut self, cx: &mut Context<'_>, tried: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        if tried.is_ready() {
            self.waits = None;
            if let Some(reader) = self.reader.take() {
                reader.wake();
            }
            return tried;
        }
        let waits = self.waits.get_or_insert_with(|| Box::pin(tokio::time::sleep(TAKES)));
        ready!(waits.as_mut().poll(cx));
        Poll::Ready(Err(io::Error::new(io::ErrorKind::TimedOut, "the peer takes nothing of its answer")))
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Patience<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if self.waits.is_some() {
            self.reader = Some(cx.waker().clone());
            return Poll::Pending;
        }
        Pin::new(&mut self.socket).poll_read(cx, buf)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Patience<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let tried = Pin::new(&mut self.socket).poll_write(cx, bytes);
        self.bound(cx, tried)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let tried = Pin::new(&mut self.socket).poll_write_vectored(cx, slices);
        self.bound(cx, tried)
    }

    fn is_write_vectored(&self) -> bool {
        self.socket.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        // What a socket was given it has: this does not wait.
        Pin::new(&mut self.socket).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.socket).poll_shutdown(cx)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a test that fails may panic
mod tests {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_peer_that_takes_nothing_is_left_after_five_seconds_and_a_slow_one_is_served() {
        let (near, mut far) = tokio::io::duplex(64);
        let mut socket = Patience::new(near);
        let slow = tokio::spawn(async move {
            let mut some = [0; 64];
            for _ in 0..4 {
                tokio::time::sleep(TAKES / 2).await;
                far.read_exact(&mut some).await.unwrap();
            }
            far
        });
        socket.write_all(&[0; 320]).await.unwrap();
        let _far = slow.await.unwrap();
        let since = tokio::time::Instant::now();
        let error = socket.write_all(b"more").await.unwrap_err();
        assert_eq!((error.kind(), since.elapsed().as_secs()), (io::ErrorKind::TimedOut, TAKES.as_secs()));
    }

    #[tokio::test(start_paused = true)]
    async fn nothing_is_read_from_a_peer_until_it_takes_what_waits_for_it() {
        let (near, mut far) = tokio::io::duplex(64);
        far.write_all(b"next").await.unwrap();
        let (mut reads, mut writes) = tokio::io::split(Patience::new(near));
        let writing = tokio::spawn(async move { writes.write_all(&[0; 128]).await });
        tokio::task::yield_now().await; // the first half is written, the second waits
        let mut next = [0; 4];
        assert!(tokio::time::timeout(TAKES / 2, reads.read_exact(&mut next)).await.is_err(), "read ahead");
        let mut taken = [0; 128];
        far.read_exact(&mut taken).await.unwrap();
        reads.read_exact(&mut next).await.unwrap();
        writing.await.unwrap().unwrap();
    }
}

//! Blind tunnels to hosts that are no provider's: bytes both ways, nothing looked at.

use std::io;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use hyper::upgrade::OnUpgrade;
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::time::Instant;

/// Bytes read at once, each way.
const BUFFER: usize = 16 * 1024;

/// Carries bytes between the client that was answered 200 and `upstream` until both sides have ended,
/// one breaks, or none sends for `idle`. Dropping it cuts both.
pub async fn carry(client: OnUpgrade, upstream: TokioIo<TcpStream>, idle: Duration) -> io::Result<()> {
    let client =
        tokio::time::timeout(idle, client).await.map_err(io::Error::other)?.map_err(io::Error::other)?;
    let (client_read, client_write) = tokio::io::split(TokioIo::new(client));
    let (up_read, up_write) = upstream.into_inner().into_split();
    let moved = Moved::default();
    // The first side that breaks ends both.
    tokio::try_join!(
        one_way(client_read, up_write, idle, &moved),
        one_way(up_read, client_write, idle, &moved)
    )?;
    Ok(())
}

/// When a byte last moved, in either direction.
struct Moved(Mutex<Instant>);

impl Default for Moved {
    fn default() -> Self {
        Self(Mutex::new(Instant::now()))
    }
}

impl Moved {
    fn now(&self) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Instant::now();
    }

    /// `work`, given up when nothing has moved either way for `idle`.
    async fn or_idle<T>(&self, idle: Duration, work: impl Future<Output = io::Result<T>>) -> io::Result<T> {
        let mut work = std::pin::pin!(work);
        loop {
            let due = *self.0.lock().unwrap_or_else(PoisonError::into_inner) + idle;
            match tokio::time::timeout_at(due, &mut work).await {
                Ok(done) => {
                    self.now();
                    return done;
                }
                Err(_) if *self.0.lock().unwrap_or_else(PoisonError::into_inner) + idle > due => {}
                Err(_) => return Err(io::ErrorKind::TimedOut.into()),
            }
        }
    }
}

async fn one_way(
    mut from: impl AsyncRead + Unpin,
    mut to: impl AsyncWrite + Unpin,
    idle: Duration,
    moved: &Moved,
) -> io::Result<()> {
    let mut buffer = vec![0; BUFFER];
    loop {
        let read = moved.or_idle(idle, from.read(&mut buffer)).await?;
        if read == 0 {
            return to.shutdown().await;
        }
        moved.or_idle(idle, to.write_all(&buffer[..read])).await?;
    }
}

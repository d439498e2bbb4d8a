//! Blind tunnels to hosts that are no provider's: bytes both ways, nothing looked at.

use std::io;
use std::time::Duration;

use hyper::upgrade::OnUpgrade;
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::net::TcpStream;

/// Bytes read at once, each way.
const BUFFER: usize = 16 * 1024;

/// Carries bytes between the client that was answered 200 and `upstream` until both sides have ended,
/// one breaks, or none sends for `idle`. Dropping it cuts both.
pub async fn carry(client: OnUpgrade, upstream: TokioIo<TcpStream>, idle: Duration) -> io::Result<()> {
    let client =
        tokio::time::timeout(idle, client).await.map_err(io::Error::other)?.map_err(io::Error::other)?;
    let (client_read, client_write) = tokio::io::split(TokioIo::new(client));
    let (up_read, up_write) = upstream.into_inner().into_split();
    let (up, down) = tokio::join!(one_way(client_read, up_write, idle), one_way(up_read, client_write, idle));
    up.and(down)
}

async fn one_way(
    mut from: impl AsyncRead + Unpin,
    mut to: impl AsyncWrite + Unpin,
    idle: Duration,
) -> io::Result<()> {
    let mut buffer = vec![0; BUFFER];
    loop {
        let read = tokio::time::timeout(idle, from.read(&mut buffer)).await??;
        if read == 0 {
            return to.shutdown().await;
        }
        tokio::time::timeout(idle, to.write_all(&buffer[..read])).await??;
    }
}

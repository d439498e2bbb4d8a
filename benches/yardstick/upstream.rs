//! The provider that all proxies stand before: as little work as an answer can be, so that what is
//! measured is the proxy.
//!
//! What it does is said by the query of the request: `?sse=40,20` sends 40 events, one each 20 ms and with
//! the time at which it was sent; `?hold` sends one and then nothing; `?bytes=N` sends N bytes; `?upload`
//! counts what it gets; `?delay=20` waits 20 ms. Anything else gets a chat completion at once. A request
//! without a credential gets 401.

use std::io;
use std::path::Path;
use std::time::Duration;

use bytes::{Buf as _, BytesMut};
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::TlsAcceptor;

use super::{Result, certs, clock};

const CHAT: &str = r#"{"id":"chatcmpl-bench0123456789","object":"chat.completion","created":1700000000,"model":"gpt-4o-mini","choices":[{"index":0,"message":{"role":"assistant","content":"The quick brown fox jumps over the lazy dog while the five boxing wizards jump quickly, and pack my box with five dozen liquor jugs; sphinx of black quartz, judge my vow. How vexingly quick daft zebras jump! Bright vixens jump; dozy fowl quack."},"logprobs":null,"finish_reason":"stop"}],"usage":{"prompt_tokens":12,"completion_tokens":64,"total_tokens":76},"system_fingerprint":"fp_bench"}"#;
const EVENTS: &str = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncache-control: no-cache\r\n\
                      transfer-encoding: chunked\r\n\r\n";
static SLAB: [u8; 256 << 10] = [b'x'; 256 << 10];

/// Serves on two ports of loopback, which it prints: plain, and TLS with the certificate in `certs`.
pub(crate) async fn serve(certs: &Path) -> Result<()> {
    let tls = TlsAcceptor::from(certs::server(certs)?);
    let (plain, secure) = (TcpListener::bind("127.0.0.1:0").await?, TcpListener::bind("127.0.0.1:0").await?);
    super::say(&format!("{} {}", plain.local_addr()?.port(), secure.local_addr()?.port()));
    tokio::spawn(accept(secure, move |stream| {
        let tls = tls.clone();
        async move { connection(tls.accept(stream).await?).await }
    }));
    accept(plain, connection).await;
    Ok(())
}

async fn accept<F: Future<Output = io::Result<()>> + Send + 'static>(
    listener: TcpListener,
    serve: impl Fn(TcpStream) -> F,
) {
    loop {
        let Ok((stream, _)) = listener.accept().await else { continue };
        let _ = stream.set_nodelay(true); // a slower answer is all that could come of it
        tokio::spawn(serve(stream));
    }
}

async fn connection<S: AsyncRead + AsyncWrite + Unpin>(mut io: S) -> io::Result<()> {
    let mut input = BytesMut::with_capacity(4096);
    let chat = whole("200 OK", CHAT);
    loop {
        let Some(asked) = Asked::read(&mut io, &mut input).await? else { return Ok(()) };
        skip(&mut io, &mut input, asked.length).await?;
        if !asked.authorized {
            io.write_all(&whole("401 Unauthorized", r#"{"error":{"message":"no key"}}"#)).await?;
            continue;
        }
        match asked.wish {
            Wish::Chat => io.write_all(&chat).await?,
            Wish::Later(delay) => {
                tokio::time::sleep(delay).await;
                io.write_all(&chat).await?;
            }
            Wish::Events { count, every } => events(&mut io, count, every).await?,
            Wish::Hold => {
                io.write_all([EVENTS.as_bytes(), &chunk(&event())].concat().as_slice()).await?;
                io.read_u8().await?; // until the proxy leaves
            }
            Wish::Bytes(count) => bytes(&mut io, count).await?,
        }
        io.flush().await?; // TLS keeps some back
    }
}

/// What a request wants.
enum Wish {
    Chat,
    Later(Duration),
    Events { count: u64, every: Duration },
    Hold,
    Bytes(u64),
}

struct Asked {
    wish: Wish,
    length: u64,
    authorized: bool,
}

impl Asked {
    /// Reads one head and takes it out of `input`; `None` at the end of the connection.
    async fn read<S: AsyncRead + Unpin>(io: &mut S, input: &mut BytesMut) -> io::Result<Option<Self>> {
        let mut seen = 0;
        let end = loop {
            if let Some(at) = memchr::memmem::find(&input[seen..], b"\r\n\r\n") {
                break seen + at;
            }
            seen = input.len().saturating_sub(3);
            if io.read_buf(input).await? == 0 {
                return Ok(None);
            }
        };
        let asked = std::str::from_utf8(&input[..end]).ok().and_then(Self::parse);
        input.advance(end + 4);
        asked.map(Some).ok_or_else(|| io::Error::other("a head that no proxy here should send"))
    }

    fn parse(head: &str) -> Option<Self> {
        let mut lines = head.split("\r\n");
        let target = lines.next()?.split(' ').nth(1)?;
        let (mut length, mut authorized) = (0, false);
        for (name, value) in lines.filter_map(|line| line.split_once(':')) {
            if name.eq_ignore_ascii_case("content-length") {
                length = value.trim().parse().ok()?;
            } else if name.eq_ignore_ascii_case("authorization") {
                authorized = value.trim().starts_with("Bearer ");
            } else if name.eq_ignore_ascii_case("transfer-encoding") {
                return None; // what has a length here must keep it
            }
        }
        Some(Self {
            wish: Wish::parse(target.split_once('?').map_or("", |(_, query)| query))?,
            length,
            authorized,
        })
    }
}

impl Wish {
    fn parse(query: &str) -> Option<Self> {
        let ms = |text: &str| text.parse().ok().map(Duration::from_millis);
        Some(match query.split_once('=').unwrap_or((query, "")) {
            ("sse", of) => {
                let (count, every) = of.split_once(',')?;
                Self::Events { count: count.parse().ok()?, every: ms(every)? }
            }
            ("hold", _) => Self::Hold,
            ("bytes", count) => Self::Bytes(count.parse().ok()?),
            ("delay", of) => Self::Later(ms(of)?),
            _ => Self::Chat,
        })
    }
}

/// Takes the rest of a body off the connection.
async fn skip<S: AsyncRead + Unpin>(io: &mut S, input: &mut BytesMut, length: u64) -> io::Result<()> {
    let here = usize::try_from(length).unwrap_or(usize::MAX).min(input.len());
    input.advance(here);
    let mut left = length - here as u64;
    if left > SLAB.len() as u64 {
        let mut room = vec![0; SLAB.len()];
        while left > room.len() as u64 {
            left -= io.read(&mut room).await.and_then(some)? as u64;
        }
    }
    while left > 0 {
        let count = io.read_buf(input).await.and_then(some)?;
        let count = count.min(usize::try_from(left).unwrap_or(usize::MAX));
        input.advance(count);
        left -= count as u64;
    }
    Ok(())
}

fn some(count: usize) -> io::Result<usize> {
    if count == 0 { Err(io::ErrorKind::UnexpectedEof.into()) } else { Ok(count) }
}

async fn events<S: AsyncWrite + Unpin>(io: &mut S, count: u64, every: Duration) -> io::Result<()> {
    let mut next = tokio::time::Instant::now();
    for nth in 0..count {
        let head = if nth == 0 { EVENTS } else { "" };
        if nth > 0 {
            tokio::time::sleep_until(next).await; // not before the first: a sleep lasts 1 ms at least
        }
        next += every;
        io.write_all(&[head.as_bytes(), &chunk(&event())].concat()).await?;
        io.flush().await?;
    }
    io.write_all(&[chunk("data: [DONE]\n\n"), b"0\r\n\r\n".to_vec()].concat()).await
}

/// About 200 bytes, with the time in them.
fn event() -> String {
    format!(
        "data: {{\"id\":\"chatcmpl-bench\",\"object\":\"chat.completion.chunk\",\"created\":1700000000,\
         \"model\":\"gpt-4o-mini\",\"choices\":[{{\"index\":0,\"delta\":{{\"content\":\"@{:020}@ padding\"}},\
         \"finish_reason\":null}}]}}\n\n",
        clock::nanos()
    )
}

fn chunk(text: &str) -> Vec<u8> {
    format!("{:x}\r\n{text}\r\n", text.len()).into_bytes()
}

async fn bytes<S: AsyncWrite + Unpin>(io: &mut S, count: u64) -> io::Result<()> {
    let head = format!(
        "HTTP/1.1 200 OK\r\ncontent-type: application/octet-stream\r\ncontent-length: {count}\r\n\r\n"
    );
    io.write_all(head.as_bytes()).await?;
    let mut left = count;
    while left > 0 {
        let part = usize::try_from(left).unwrap_or(usize::MAX).min(SLAB.len());
        io.write_all(&SLAB[..part]).await?;
        left -= part as u64;
    }
    Ok(())
}

fn whole(status: &str, body: &str) -> Vec<u8> {
    let length = body.len();
    format!("HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n\r\n{body}")
        .into()
}

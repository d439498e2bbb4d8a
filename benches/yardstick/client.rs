//! The client that all proxies are asked by: one prepared request, sent again and again, and as little
//! work per answer as is needed to tell that it was the right one.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use bytes::{Buf as _, BytesMut};
use rustls::ClientConfig;
use rustls::pki_types::ServerName;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;

use super::Result;

/// After so long without an answer the measuring is given up.
const NEVER: Duration = Duration::from_secs(30);
/// The size of a usual request's body.
const BODY: usize = 1024;

/// Where and how a peer is asked.
#[derive(Clone)]
pub(crate) struct Target {
    pub(crate) address: SocketAddr,
    /// The name in `Host`.
    pub(crate) host: String,
    /// What stands before the provider's own path.
    pub(crate) prefix: &'static str,
    /// Further header lines, each with its end.
    pub(crate) headers: &'static str,
    /// Whether to go through CONNECT and TLS to `host`, and whom to trust then.
    pub(crate) tunnel: Option<Arc<ClientConfig>>,
}

impl Target {
    pub(crate) fn new(port: u16, prefix: &'static str) -> Self {
        let address = SocketAddr::from(([127, 0, 0, 1], port));
        Self { address, host: address.to_string(), prefix, headers: "", tunnel: None }
    }

    /// A chat request of 1 KiB with its model at the end, where a proxy that needs it must read everything.
    pub(crate) fn chat(&self, query: &str) -> Vec<u8> {
        let (start, end) =
            (r#"{"messages":[{"role":"user","content":""#, r#""}],"temperature":0.7,"model":"gpt-4o-mini"}"#);
        let body = format!("{start}{}{end}", "word ".repeat(BODY).split_at(BODY - start.len() - end.len()).0);
        [self.head("POST", "/v1/chat/completions", query, BODY as u64), body.into_bytes()].concat()
    }

    /// The head of a request with so long a body.
    pub(crate) fn head(&self, method: &str, path: &str, query: &str, length: u64) -> Vec<u8> {
        let Self { host, prefix, headers, .. } = self;
        let query = if query.is_empty() { String::new() } else { format!("?{query}") };
        format!(
            "{method} {prefix}{path}{query} HTTP/1.1\r\nhost: {host}\r\naccept: application/json\r\n\
             content-type: application/json\r\nuser-agent: OpenAI/Python 1.99.0\r\n\
             authorization: Bearer sk-placeholder\r\n{headers}content-length: {length}\r\n\r\n"
        )
        .into_bytes()
    }

    pub(crate) async fn connect(&self) -> Result<Connection> {
        timeout(NEVER, self.connect_unbounded()).await?
    }

    async fn connect_unbounded(&self) -> Result<Connection> {
        let stream = TcpStream::connect(self.address).await?;
        stream.set_nodelay(true)?;
        let mut connection = Connection { io: Box::new(stream), input: BytesMut::with_capacity(4096) };
        let Some(tls) = &self.tunnel else { return Ok(connection) };
        let connect = format!("CONNECT {0}:443 HTTP/1.1\r\nhost: {0}:443\r\n\r\n", self.host);
        connection.io.write_all(connect.as_bytes()).await?;
        connection.head().await?.expect(200)?;
        let name = ServerName::try_from(self.host.clone())?;
        let inner = TlsConnector::from(tls.clone()).connect(name, connection.io).await?;
        Ok(Connection { io: Box::new(inner), input: connection.input })
    }
}

pub(crate) trait Io: AsyncRead + AsyncWrite + Unpin + Send {}
impl<T: AsyncRead + AsyncWrite + Unpin + Send> Io for T {}

pub(crate) struct Connection {
    io: Box<dyn Io>,
    input: BytesMut,
}

/// The head of an answer.
pub(crate) struct Head {
    pub(crate) status: u16,
    /// `None`: it is sent in chunks.
    pub(crate) length: Option<u64>,
}

impl Head {
    pub(crate) fn expect(self, status: u16) -> Result<Self> {
        if self.status == status {
            Ok(self)
        } else {
            Err(format!("an answer of status {}", self.status).into())
        }
    }
}

impl Connection {
    /// Sends it and reads the whole answer; its status.
    pub(crate) async fn exchange(&mut self, request: &[u8]) -> Result<u16> {
        timeout(NEVER, async {
            self.send(request).await?;
            let head = self.head().await?;
            match head.length {
                Some(length) => self.skip(length).await?,
                None => self.until(b"0\r\n\r\n").await?,
            }
            Ok(head.status)
        })
        .await?
    }

    pub(crate) async fn send(&mut self, bytes: &[u8]) -> Result<()> {
        timeout(NEVER, async {
            self.io.write_all(bytes).await?;
            self.io.flush().await
        })
        .await??;
        Ok(())
    }

    pub(crate) async fn head(&mut self) -> Result<Head> {
        let mut seen = 0;
        let end = loop {
            if let Some(at) = memchr::memmem::find(&self.input[seen..], b"\r\n\r\n") {
                break seen + at;
            }
            seen = self.input.len().saturating_sub(3);
            self.more().await?;
        };
        let text = std::str::from_utf8(&self.input[..end])?;
        let mut lines = text.split("\r\n");
        let status = lines
            .next()
            .and_then(|line| line.split(' ').nth(1))
            .ok_or("an answer without a status")?
            .parse()?;
        let length = lines
            .filter_map(|line| line.split_once(':'))
            .find(|(name, _)| name.eq_ignore_ascii_case("content-length"))
            .map(|(_, value)| value.trim().parse())
            .transpose()?;
        self.input.advance(end + 4);
        Ok(Head { status, length })
    }

    /// Reads so much and forgets it.
    pub(crate) async fn skip(&mut self, mut length: u64) -> Result<()> {
        loop {
            let here = usize::try_from(length).unwrap_or(usize::MAX).min(self.input.len());
            self.input.advance(here);
            length -= here as u64;
            if length == 0 {
                return Ok(());
            }
            self.more().await?;
        }
    }

    /// Reads until the last that came ends so.
    async fn until(&mut self, end: &[u8]) -> Result<()> {
        while !self.input.ends_with(end) {
            self.more().await?;
        }
        self.input.clear();
        Ok(())
    }

    /// Reads what there is, or waits for more; what has come and was not taken yet.
    pub(crate) async fn more(&mut self) -> Result<&mut BytesMut> {
        if self.input.is_empty() {
            self.input.reserve(READ);
        }
        if timeout(NEVER, self.io.read_buf(&mut self.input)).await?? == 0 {
            return Err("the connection ended within an answer".into());
        }
        Ok(&mut self.input)
    }

    /// What has come and was not taken yet.
    pub(crate) fn input(&mut self) -> &mut BytesMut {
        &mut self.input
    }
}

/// How much is read at once, at least.
const READ: usize = 4096;

//! A client that sends what a test says, to the byte where it must, and reports how an answer ended.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http_body::Frame;
use http_body_util::{BodyExt as _, combinators::BoxBody};
use hyper_util::rt::TokioIo;
use serde_json::Value;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpStream, UnixStream};
use tokio::task::JoinHandle;

use super::{NEVER, PatternCheck, pattern, within};

/// Where a server listens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Door {
    /// A TCP address.
    Tcp(SocketAddr),
    /// A Unix socket.
    Unix(PathBuf),
}

impl Door {
    /// What a client says in `Host`.
    pub fn host(&self) -> String {
        match self {
            Self::Tcp(at) => at.to_string(),
            Self::Unix(_) => "localhost".into(),
        }
    }
}

/// A request's body.
pub type Body = BoxBody<Bytes, std::io::Error>;

/// A body of these bytes.
pub fn full(bytes: impl Into<Bytes>) -> Body {
    http_body_util::Full::new(bytes.into()).map_err(|never| match never {}).boxed()
}

/// A body that the test feeds; it ends when the sender is dropped.
pub fn fed() -> (tokio::sync::mpsc::Sender<Bytes>, Body) {
    struct Fed(tokio::sync::mpsc::Receiver<Bytes>);
    impl http_body::Body for Fed {
        type Data = Bytes;
        type Error = std::io::Error;
        fn poll_frame(
            mut self: Pin<&mut Self>,
            cx: &mut Context<'_>,
        ) -> Poll<Option<Result<Frame<Bytes>, std::io::Error>>> {
            self.0.poll_recv(cx).map(|part| part.map(|part| Ok(Frame::data(part))))
        }
    }
    let (sender, receiver) = tokio::sync::mpsc::channel(1);
    (sender, Fed(receiver).boxed())
}

/// A body of `len` bytes of the test pattern, made as it is sent.
pub fn patterned(len: u64) -> Body {
    struct Patterned {
        at: u64,
        len: u64,
    }
    impl http_body::Body for Patterned {
        type Data = Bytes;
        type Error = std::io::Error;
        fn poll_frame(
            mut self: Pin<&mut Self>,
            _: &mut Context<'_>,
        ) -> Poll<Option<Result<Frame<Bytes>, std::io::Error>>> {
            if self.at == self.len {
                return Poll::Ready(None);
            }
            let from = (self.at % super::PERIOD as u64) as usize;
            let n = (256 * 1024).min(self.len - self.at);
            self.at += n;
            Poll::Ready(Some(Ok(Frame::data(pattern().slice(from..from + n as usize)))))
        }
        fn size_hint(&self) -> http_body::SizeHint {
            http_body::SizeHint::with_exact(self.len - self.at)
        }
    }
    Patterned { at: 0, len }.boxed()
}

/// A request as a client means it.
#[derive(Debug)]
pub struct Request {
    pub(super) method: String,
    pub(super) target: String,
    pub(super) headers: Vec<(String, String)>,
    pub(super) body: Body,
}

impl Request {
    /// A request with this method and target (origin-form or absolute-form), without a body.
    pub fn new(method: &str, target: &str) -> Self {
        Self { method: method.into(), target: target.into(), headers: Vec::new(), body: full("") }
    }

    /// A GET.
    pub fn get(target: &str) -> Self {
        Self::new("GET", target)
    }

    /// A POST of this JSON.
    pub fn post(target: &str, json: &Value) -> Self {
        Self::new("POST", target).header("content-type", "application/json").body(full(json.to_string()))
    }

    /// One more header.
    pub fn header(mut self, name: &str, value: &str) -> Self {
        self.headers.push((name.into(), value.into()));
        self
    }

    /// With this body.
    pub fn body(mut self, body: Body) -> Self {
        self.body = body;
        self
    }
}

/// A whole answer.
#[derive(Debug, Clone)]
pub struct Answer {
    pub status: u16,
    pub headers: http::HeaderMap,
    pub body: Bytes,
    pub trailers: Option<http::HeaderMap>,
}

impl Answer {
    /// A header's value as text, empty when it is missing.
    pub fn header(&self, name: &str) -> &str {
        text_of(&self.headers, name)
    }

    /// The body as text.
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }

    /// The body as JSON.
    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|why| panic!("{why} in {:?}", self.text()))
    }

    /// Fails unless this is lessor's own error `code` with `status`, told the way every such error is.
    #[track_caller]
    pub fn is_error(&self, status: u16, code: &str) {
        let seen = (self.status, self.header("x-lessor-error"));
        assert_eq!(seen, (status, code), "{:?} {}", self.headers, self.text());
        let proxy_status = self.header("proxy-status");
        assert!(proxy_status.starts_with("lessor"), "Proxy-Status is {proxy_status:?}");
        assert!(self.json().is_object(), "a JSON body says why");
    }
}

fn text_of<'a>(headers: &'a http::HeaderMap, name: &str) -> &'a str {
    headers.get(name).map_or("", |value| value.to_str().unwrap())
}

/// An answer whose body is still coming. Dropping it closes the connection at once, or resets the stream
/// where the connection is shared.
#[derive(Debug)]
pub struct Stream {
    pub status: u16,
    pub headers: http::HeaderMap,
    body: hyper::body::Incoming,
    /// The connection, where this answer is all that it is for.
    connection: Option<JoinHandle<()>>,
}

impl Drop for Stream {
    fn drop(&mut self) {
        if let Some(connection) = &self.connection {
            connection.abort();
        }
    }
}

impl Stream {
    /// An answer on a connection that others use, too.
    pub(super) fn shared(answer: http::Response<hyper::body::Incoming>) -> Self {
        let (head, body) = answer.into_parts();
        Self { status: head.status.as_u16(), headers: head.headers, body, connection: None }
    }

    /// A header's value as text, empty when it is missing.
    pub fn header(&self, name: &str) -> &str {
        text_of(&self.headers, name)
    }

    /// The next part of the body; `None` at a clean end, an error when it was cut.
    pub async fn next(&mut self) -> Option<Result<Bytes, hyper::Error>> {
        loop {
            match within(NEVER, "the next part of an answer", self.body.frame()).await? {
                Ok(frame) => match frame.into_data() {
                    Ok(data) => return Some(Ok(data)),
                    Err(_trailers) => {}
                },
                Err(why) => return Some(Err(why)),
            }
        }
    }

    /// Reads on until `mark` was seen, and returns what came.
    pub async fn read_to(&mut self, mark: &str) -> String {
        let mut seen = String::new();
        while !seen.contains(mark) {
            match self.next().await {
                Some(Ok(part)) => seen.push_str(&String::from_utf8_lossy(&part)),
                other => panic!("the stream ended before {mark:?}: {other:?} after {seen:?}"),
            }
        }
        seen
    }

    /// Reads to the end; an error when the body was cut.
    pub async fn whole(mut self) -> Result<Answer, hyper::Error> {
        let mut body = Vec::new();
        let mut trailers = None;
        while let Some(frame) = within(NEVER, "the rest of an answer", self.body.frame()).await {
            match frame?.into_data() {
                Ok(data) => body.extend_from_slice(&data),
                Err(frame) => trailers = frame.into_trailers().ok(),
            }
        }
        Ok(Answer { status: self.status, headers: self.headers.clone(), body: body.into(), trailers })
    }

    /// Reads to the end, however long that takes: the caller has a bound of its own.
    pub async fn end(mut self) -> Result<(), hyper::Error> {
        while let Some(frame) = self.body.frame().await {
            frame?;
        }
        Ok(())
    }

    /// Reads to the end and checks that it is the test pattern; the number of bytes.
    pub async fn pattern_len(mut self) -> u64 {
        let mut check = PatternCheck::default();
        while let Some(part) = self.next().await {
            check.take(&part.expect("a whole body"));
        }
        assert!(!check.broken, "bytes changed on their way");
        check.len
    }
}

/// Sends `request` on a connection of its own and returns when the answer's head is here.
pub async fn send(door: &Door, request: Request) -> Result<Stream, hyper::Error> {
    match door {
        Door::Tcp(at) => {
            let socket = TcpStream::connect(at).await.unwrap_or_else(|why| panic!("{at}: {why}"));
            socket.set_nodelay(true).unwrap();
            send_on(socket, &door.host(), request).await
        }
        Door::Unix(path) => {
            let socket = UnixStream::connect(path).await.unwrap_or_else(|why| panic!("{path:?}: {why}"));
            send_on(socket, &door.host(), request).await
        }
    }
}

/// Sends `request` over `socket`.
pub async fn send_on<S>(socket: S, host: &str, request: Request) -> Result<Stream, hyper::Error>
where
    S: tokio::io::AsyncRead + tokio::io::AsyncWrite + Unpin + Send + 'static,
{
    let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(socket)).await?;
    let connection = AbortOnDrop(Some(tokio::spawn(async move {
        let _ = connection.await;
    })));
    let mut built = http::Request::builder().method(request.method.as_str()).uri(&request.target);
    if !request.headers.iter().any(|(name, _)| name.eq_ignore_ascii_case("host")) {
        let target: http::Uri = request.target.parse().unwrap();
        built = built.header("host", target.authority().map_or(host, |authority| authority.as_str()));
    }
    for (name, value) in &request.headers {
        built = built.header(name, value);
    }
    let answer = sender.send_request(built.body(request.body).unwrap()).await?;
    let (head, body) = answer.into_parts();
    let connection = Some(connection.keep());
    Ok(Stream { status: head.status.as_u16(), headers: head.headers, body, connection })
}

/// Closes the connection when a sender is dropped before the head came.
struct AbortOnDrop(Option<JoinHandle<()>>);

impl AbortOnDrop {
    fn keep(mut self) -> JoinHandle<()> {
        self.0.take().unwrap()
    }
}

impl Drop for AbortOnDrop {
    fn drop(&mut self) {
        if let Some(task) = self.0.take() {
            task.abort();
        }
    }
}

/// A TCP connection on which a test writes bytes as they are.
#[derive(Debug)]
pub struct Raw(pub TcpStream);

impl Raw {
    /// Connects to a TCP door.
    pub async fn connect(door: &Door) -> Self {
        let Door::Tcp(at) = door else { panic!("raw bytes go over TCP") };
        let socket = TcpStream::connect(at).await.unwrap();
        socket.set_nodelay(true).unwrap();
        Self(socket)
    }

    /// Writes these bytes.
    pub async fn write(&mut self, bytes: impl AsRef<[u8]>) {
        self.0.write_all(bytes.as_ref()).await.unwrap();
    }

    /// Reads until `mark` was seen, and returns all that came.
    pub async fn read_to(&mut self, mark: &str) -> String {
        let mut seen = Vec::new();
        let mut buffer = [0; 4096];
        loop {
            let text = String::from_utf8_lossy(&seen).into_owned();
            if text.contains(mark) {
                return text;
            }
            match within(NEVER, mark, self.0.read(&mut buffer)).await {
                Ok(n) if n > 0 => seen.extend_from_slice(&buffer[..n]),
                other => panic!("{other:?} before {mark:?}, after {text:?}"),
            }
        }
    }

    /// Reads one answer with a `Content-Length` (or none): its head and body.
    pub async fn answer(&mut self) -> (u16, String) {
        let mut seen = Vec::new();
        let mut byte = [0; 1];
        while !seen.ends_with(b"\r\n\r\n") {
            match within(NEVER, "an answer's head", self.0.read(&mut byte)).await {
                Ok(1) => seen.push(byte[0]),
                other => panic!("{other:?} in a head, after {:?}", String::from_utf8_lossy(&seen)),
            }
        }
        let head = String::from_utf8_lossy(&seen).into_owned();
        let status = head.split(' ').nth(1).and_then(|code| code.parse().ok()).unwrap_or(0);
        let length = head
            .lines()
            .filter_map(|line| line.split_once(':'))
            .find(|(name, _)| name.eq_ignore_ascii_case("content-length"))
            .map_or(0, |(_, value)| value.trim().parse().unwrap());
        let mut body = vec![0; length];
        within(NEVER, "an answer's body", self.0.read_exact(&mut body)).await.unwrap();
        (status, head + &String::from_utf8_lossy(&body))
    }

    /// Reads until the other side closes; everything it said. A reset counts as a close.
    pub async fn rest(&mut self) -> String {
        let mut seen = Vec::new();
        let mut buffer = [0; 4096];
        loop {
            let text = String::from_utf8_lossy(&seen);
            match tokio::time::timeout(NEVER, self.0.read(&mut buffer)).await {
                Ok(Ok(0) | Err(_)) => return text.into_owned(),
                Ok(Ok(n)) => seen.extend_from_slice(&buffer[..n]),
                Err(_) => panic!("the connection stays open after {text:?}"),
            }
        }
    }

    /// Whether the other side closes within `limit`.
    pub async fn closes_within(&mut self, limit: Duration) -> bool {
        tokio::time::timeout(limit, self.rest()).await.is_ok()
    }
}

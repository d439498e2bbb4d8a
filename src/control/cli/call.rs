//! One call to the admin API: which door, the connection, the answer.

use std::fmt;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use http::header::{self, HeaderValue};
use http::{Method, Request, Response, StatusCode};
use http_body_util::{BodyExt as _, Empty, Limited};
use hyper::body::Incoming;
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpStream, UnixStream};
use tokio::time::timeout;

use super::Failure;
use crate::control::admin;
use crate::model::Secret;
use crate::store::StoreTime;

/// The bound of one connect.
const CONNECT: Duration = Duration::from_secs(3);
/// Bytes of one answer: some 100 000 leases.
const ANSWER_BYTES: usize = 64 << 20;

/// What is asked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Call {
    pub(super) method: Method,
    pub(super) path: String,
    /// How long the answer may take.
    pub(super) bound: Duration,
}

/// A door of a sidecar. `named`: a person named it, and means it. `of`: the proxy listeners of the sidecar that is
/// meant; empty: whichever is there.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Endpoint {
    Tcp { at: String, named: bool, of: Vec<String> },
    Unix { path: PathBuf, named: bool },
}

/// A door that did not open.
#[derive(Debug)]
pub(super) struct Tried {
    pub(super) at: String,
    pub(super) cause: String,
}

/// What came back.
#[derive(Debug)]
pub(super) struct Answer {
    pub(super) status: StatusCode,
    /// The store's clock when it was made.
    pub(super) now: StoreTime,
    pub(super) body: Bytes,
    /// Who gave it.
    pub(super) from: String,
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp { at, .. } => write!(f, "http://{at}"),
            Self::Unix { path, .. } => write!(f, "unix:{}", path.display()),
        }
    }
}

impl Endpoint {
    /// `http://HOST:PORT`, `HOST:PORT`, `unix:PATH` or a path.
    pub(super) fn named(text: &str) -> Result<Self, String> {
        if let Some(path) = text.strip_prefix("unix:") {
            let path = path.strip_prefix("//").unwrap_or(path).into();
            return Ok(Self::Unix { path, named: true });
        }
        if text.starts_with("https://") {
            return Err(format!(
                "--admin {text}: the admin listener speaks plain http; use http://, or the socket"
            ));
        }
        if let Some(rest) = text.strip_prefix("http://") {
            return Self::tcp(rest.trim_end_matches('/'), text);
        }
        if text.contains('/') || Path::new(text).extension().is_some_and(|end| end == "sock") {
            return Ok(Self::Unix { path: text.into(), named: true });
        }
        Self::tcp(text, text)
    }

    fn tcp(at: &str, text: &str) -> Result<Self, String> {
        let authority: Option<http::uri::Authority> = at.parse().ok();
        match authority {
            Some(parsed) if parsed.port_u16().is_some() && !at.contains('@') => {
                Ok(Self::Tcp { at: at.into(), named: true, of: Vec::new() })
            }
            _ => Err(format!("--admin {text}: use http://HOST:PORT (8322 by default), or a socket's path")),
        }
    }
}

/// A door that opened.
pub(super) enum Door {
    Tcp(TcpStream, String),
    Unix(UnixStream, PathBuf),
}

impl fmt::Display for Door {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp(_, at) => write!(f, "http://{at}"),
            Self::Unix(_, path) => write!(f, "unix:{}", path.display()),
        }
    }
}

/// The first door that opens, and what to say about it. A TCP door that nobody named only reads unless
/// there is a token for it, so a change is not even tried there.
pub(super) async fn reach(
    doors: Vec<Endpoint>,
    call: &Call,
    token: bool,
) -> Result<(Door, Option<String>), Vec<Tried>> {
    let mut tried = Vec::new();
    for door in doors {
        let at = door.to_string();
        let opened = match door {
            Endpoint::Unix { path, named } => {
                unix(&path, named).await.map(|stream| (Door::Unix(stream, path), None))
            }
            Endpoint::Tcp { named: false, .. } if call.method != Method::GET && !token => {
                Err("not tried: without LESSOR_ADMIN_TOKEN it only reads".into())
            }
            Endpoint::Tcp { at: host, named, of } => meant(&host, &of).await.map(|stream| {
                let note = (!named && !token)
                    .then(|| format!("its admin socket was not found; asking {at}, which only reads"));
                (Door::Tcp(stream, host), note)
            }),
        };
        match opened {
            Ok(opened) => return Ok(opened),
            Err(cause) => tried.push(Tried { at, cause }),
        }
    }
    Err(tried)
}

async fn unix(path: &Path, named: bool) -> Result<UnixStream, String> {
    let about = std::fs::metadata(path).map_err(|cause| short(&cause))?;
    // Where nobody named it, another user may have put it there.
    if !named && about.uid() != rustix::process::geteuid().as_raw() {
        return Err("it is another user's; if you mean it, name it with --admin".into());
    }
    match timeout(CONNECT, UnixStream::connect(path)).await {
        Ok(stream) => stream.map_err(|cause| short(&cause)),
        Err(_) => Err(format!("no connection within {CONNECT:?}")),
    }
}

async fn tcp(at: &str) -> Result<TcpStream, String> {
    match timeout(CONNECT, TcpStream::connect(at)).await {
        Ok(stream) => stream.map_err(|cause| short(&cause)),
        Err(_) => Err(format!("no connection within {CONNECT:?}")),
    }
}

/// A connection to who listens there, if he is the one that is meant: the default admin port of a configuration that
/// names none may be another sidecar's.
async fn meant(at: &str, of: &[String]) -> Result<TcpStream, String> {
    if of.is_empty() {
        return tcp(at).await;
    }
    let request = Request::builder().uri("/healthz").header(header::HOST, at).body(Empty::new());
    let answer = match timeout(CONNECT, exchange(tcp(at).await?, request)).await {
        Ok(answer) => answer.map_err(|cause| cause.to_string())?,
        Err(_) => return Err(format!("no answer within {CONNECT:?}")),
    };
    let serves = answer.headers().get(&admin::PROXY).and_then(|proxy| proxy.to_str().ok());
    match serves {
        Some(proxy) if !proxy.split(',').any(|one| of.iter().any(|own| own == one)) => Err(format!(
            "another sidecar answers there: it serves {proxy}, and that of the configuration file {}; if you mean \
             it, name it with --admin",
            of.join(",")
        )),
        // One that does not say so is older.
        _ => tcp(at).await,
    }
}

/// The common causes in plain words.
fn short(cause: &std::io::Error) -> String {
    match cause.kind() {
        std::io::ErrorKind::NotFound => "not there".into(),
        std::io::ErrorKind::ConnectionRefused => "nobody listens".into(),
        std::io::ErrorKind::PermissionDenied => "permission denied; it serves the user lessor runs as".into(),
        _ => cause.to_string(),
    }
}

impl Door {
    /// Sends the call and waits for its whole answer. The token goes over TCP only: the socket needs none.
    pub(super) async fn ask(self, call: &Call, token: Option<&Secret>) -> Result<Answer, Failure> {
        let from = self.to_string();
        let whole = async {
            let answer = self.send(call, token, None).await?;
            let now = answer.headers().get(&admin::NOW);
            let now = now.and_then(|now| now.to_str().ok()?.parse().ok()).map_or_else(this_clock, StoreTime);
            let status = answer.status();
            let collected = Limited::new(answer.into_body(), ANSWER_BYTES).collect().await;
            let body = collected.map_err(|cause| broke(&from, &*cause))?.to_bytes();
            Ok(Answer { status, now, body, from: from.clone() })
        };
        match timeout(call.bound, whole).await {
            Ok(answer) => answer,
            Err(_) => Err(silent(&from, call.bound)),
        }
    }

    /// Sends the call and waits for its answer's head: the body is a stream of events, behind `last`.
    pub(super) async fn open(
        self,
        call: &Call,
        token: Option<&Secret>,
        last: Option<&str>,
    ) -> Result<(StatusCode, Incoming), Failure> {
        let from = self.to_string();
        match timeout(call.bound, self.send(call, token, last)).await {
            Ok(answer) => answer.map(|answer| (answer.status(), answer.into_body())),
            Err(_) => Err(silent(&from, call.bound)),
        }
    }

    async fn send(
        self,
        call: &Call,
        token: Option<&Secret>,
        last: Option<&str>,
    ) -> Result<Response<Incoming>, Failure> {
        let from = self.to_string();
        let mut request = Request::builder().method(call.method.clone()).uri(call.path.as_str());
        if let Some(last) = last {
            request = request.header("last-event-id", last);
        }
        let answer = match self {
            Self::Unix(stream, _) => {
                request = request.header(header::HOST, "localhost");
                exchange(stream, request.body(Empty::new())).await
            }
            Self::Tcp(stream, at) => {
                request = request.header(header::HOST, at);
                if let Some(token) = token {
                    let value = HeaderValue::try_from(format!("Bearer {}", token.expose()));
                    let mut value = value.map_err(|_| {
                        Failure::Usage("LESSOR_ADMIN_TOKEN holds characters that no header can".into())
                    })?;
                    value.set_sensitive(true);
                    request = request.header(header::AUTHORIZATION, value);
                }
                exchange(stream, request.body(Empty::new())).await
            }
        };
        answer.map_err(|cause| broke(&from, &*cause))
    }
}

fn broke(from: &str, cause: &(dyn std::error::Error + Send + Sync)) -> Failure {
    Failure::Unreachable(vec![Tried { at: from.to_owned(), cause: cause.to_string() }])
}

fn silent(from: &str, bound: Duration) -> Failure {
    let cause = format!("connected, but no answer within {bound:?}");
    Failure::Unreachable(vec![Tried { at: from.to_owned(), cause }])
}

type AnyError = Box<dyn std::error::Error + Send + Sync>;

async fn exchange(
    stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    request: http::Result<Request<Empty<Bytes>>>,
) -> Result<Response<Incoming>, AnyError> {
    let (mut send, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await?;
    tokio::spawn(connection); // its failure shows in the answer
    Ok(send.send_request(request?).await?)
}

fn this_clock() -> StoreTime {
    StoreTime(0).plus(SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a test that fails may panic
mod tests {
    use super::*;

    #[test]
    fn a_sidecar_is_named_by_url_by_host_and_port_or_by_its_sockets_path() {
        let shown = |text| Endpoint::named(text).map(|endpoint| endpoint.to_string());
        assert_eq!(shown("http://10.0.0.7:8322/").unwrap(), "http://10.0.0.7:8322");
        assert_eq!(shown("localhost:8322").unwrap(), "http://localhost:8322");
        assert_eq!(shown("[::1]:8322").unwrap(), "http://[::1]:8322");
        assert_eq!(shown("/run/lessor/lessor-8321.sock").unwrap(), "unix:/run/lessor/lessor-8321.sock");
        assert_eq!(shown("unix:///run/a.sock").unwrap(), "unix:/run/a.sock");
        assert_eq!(shown("unix:a.sock").unwrap(), "unix:a.sock");
        assert_eq!(shown("./a").unwrap(), "unix:./a");
        for wrong in ["https://10.0.0.7:8322", "http://10.0.0.7", "localhost", "http://u@h:1", "http://h:1/x"]
        {
            assert!(shown(wrong).unwrap_err().contains("http://"), "{wrong}");
        }
    }
}

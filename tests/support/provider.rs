//! A provider made for tests: it checks the key like a real one, plays what the script says down to
//! the byte, and remembers every request. Written on the bare socket, so that it can break off
//! anywhere and sees exactly what was sent.

use std::collections::{HashMap, HashSet};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use bytes::Bytes;
use serde_json::{Value, json};
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio_rustls::TlsAcceptor;

use super::{PatternCheck, eventually, pattern};

/// Bodies up to this size are remembered whole.
const KEPT: usize = 16 << 20;

/// Something a script waits for until the test opens it.
#[derive(Debug, Clone)]
pub struct Gate(Arc<watch::Sender<bool>>);

impl Default for Gate {
    fn default() -> Self {
        Self(Arc::new(watch::channel(false).0))
    }
}

impl Gate {
    /// Lets everybody through from now on.
    pub fn open(&self) {
        self.0.send_replace(true);
    }

    async fn passed(&self) {
        let _ = self.0.subscribe().wait_for(|open| *open).await;
    }
}

/// How a connection is broken off.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cut {
    /// An orderly end: `close_notify` in TLS, then FIN.
    Close,
    /// FIN, and no `close_notify`: what a truncation looks like.
    Truncate,
    /// A reset.
    Reset,
}

#[derive(Debug, Clone)]
enum Step {
    Wait(Duration),
    Until(Gate),
    Silence,
    Send(Bytes),
    Flood(u64),
    ReadBody,
    ReadSlowly { part: usize, pause: Duration },
    ReadAtLeast(u64),
    Cut(Cut),
}

/// What a provider does with one request, step by step.
#[derive(Debug, Clone, Default)]
pub struct Play {
    steps: Vec<Step>,
}

impl Play {
    /// Nothing yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// A whole JSON answer.
    pub fn json(status: u16, body: &Value) -> Self {
        Self::json_with(status, &[], body)
    }

    /// A whole JSON answer with more headers.
    pub fn json_with(status: u16, headers: &[(&str, &str)], body: &Value) -> Self {
        let mut headers = headers.to_vec();
        headers.push(("content-type", "application/json"));
        Self::whole(status, &headers, body.to_string())
    }

    /// A whole answer.
    pub fn whole(status: u16, headers: &[(&str, &str)], body: impl Into<Bytes>) -> Self {
        let body = body.into();
        let length = body.len().to_string();
        let mut headers = headers.to_vec();
        headers.push(("content-length", &length));
        Self::new().head(status, &headers).bytes(body)
    }

    /// The head of an event stream in chunks; go on with `event`, end with `done` or `last_chunk`.
    pub fn sse() -> Self {
        let headers = [("content-type", "text/event-stream"), ("transfer-encoding", "chunked")];
        Self::new().head(200, &headers)
    }

    /// An answer's head.
    pub fn head(self, status: u16, headers: &[(&str, &str)]) -> Self {
        let reason = http::StatusCode::from_u16(status).unwrap().canonical_reason().unwrap_or("Odd");
        let mut head = format!("HTTP/1.1 {status} {reason}\r\n");
        for (name, value) in headers {
            head.push_str(&format!("{name}: {value}\r\n"));
        }
        head.push_str("\r\n");
        self.bytes(head)
    }

    /// These bytes as they are.
    pub fn bytes(self, bytes: impl Into<Bytes>) -> Self {
        self.step(Step::Send(bytes.into()))
    }

    /// One chunk.
    pub fn chunk(self, data: &str) -> Self {
        self.bytes(format!("{:x}\r\n{data}\r\n", data.len()))
    }

    /// One server-sent event in a chunk of its own.
    pub fn event(self, data: &str) -> Self {
        self.chunk(&format!("data: {data}\n\n"))
    }

    /// The end of a chunked body.
    pub fn last_chunk(self) -> Self {
        self.bytes("0\r\n\r\n")
    }

    /// The end of an OpenAI stream.
    pub fn done(self) -> Self {
        self.event("[DONE]").last_chunk()
    }

    /// This long, nothing.
    pub fn wait(self, pause: Duration) -> Self {
        self.step(Step::Wait(pause))
    }

    /// Nothing until the test opens `gate`.
    pub fn until(self, gate: &Gate) -> Self {
        self.step(Step::Until(gate.clone()))
    }

    /// Nothing, until the other side closes.
    pub fn silence(self) -> Self {
        self.step(Step::Silence)
    }

    /// So many bytes of the test pattern.
    pub fn flood(self, len: u64) -> Self {
        self.step(Step::Flood(len))
    }

    /// Reads the request's body to its end (only in a script that begins before the body).
    pub fn read_body(self) -> Self {
        self.step(Step::ReadBody)
    }

    /// Reads the request's body to its end, `part` bytes at a time with pauses between.
    pub fn read_slowly(self, part: usize, pause: Duration) -> Self {
        self.step(Step::ReadSlowly { part, pause })
    }

    /// Reads at least so much of the request's body, and no more than needed.
    pub fn read_at_least(self, len: u64) -> Self {
        self.step(Step::ReadAtLeast(len))
    }

    /// Breaks the connection off.
    pub fn cut(self, cut: Cut) -> Self {
        self.step(Step::Cut(cut))
    }

    /// This play, and then `next`.
    pub fn then(mut self, next: Self) -> Self {
        self.steps.extend(next.steps);
        self
    }

    fn step(mut self, step: Step) -> Self {
        self.steps.push(step);
        self
    }
}

/// One request as the provider saw it.
#[derive(Debug, Clone)]
pub struct Seen {
    /// Its number, from 0 in the order of heads.
    pub number: usize,
    /// The connection it came on, from 0.
    pub connection: usize,
    /// When its head was read.
    pub at: Instant,
    pub method: String,
    /// Path and query, to the byte.
    pub target: String,
    /// Names as they were sent.
    pub headers: Vec<(String, String)>,
    /// The head, to the byte.
    pub raw_head: String,
    /// The one credential, where there was exactly one.
    pub key: Option<String>,
    /// How many credentials it carried, in whatever places.
    pub credentials: usize,
    /// The body's first 16 MiB.
    pub body: Vec<u8>,
    pub body_len: u64,
    /// Whether the body is the test pattern from its first byte to its last.
    pub body_is_pattern: bool,
    /// Whether the body's end was seen.
    pub body_complete: bool,
    pub trailers: Vec<(String, String)>,
    /// Bytes of a flood that went out so far.
    pub flooded: u64,
    /// When the play came to its end.
    pub finished: Option<Instant>,
    /// When the other side was seen to be gone before that.
    pub gone: Option<Instant>,
}

impl Seen {
    /// The first header with this name, empty when it is missing.
    pub fn header(&self, name: &str) -> &str {
        self.all(name).first().copied().unwrap_or("")
    }

    /// All headers with this name.
    pub fn all(&self, name: &str) -> Vec<&str> {
        let hits = self.headers.iter().filter(|(other, _)| other.eq_ignore_ascii_case(name));
        hits.map(|(_, value)| value.as_str()).collect()
    }

    /// The key, or nothing.
    pub fn key(&self) -> &str {
        self.key.as_deref().unwrap_or("")
    }

    /// The body as JSON, null when it is none.
    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or(Value::Null)
    }

    /// The path without the query.
    pub fn path(&self) -> &str {
        self.target.split('?').next().unwrap()
    }

    /// Whether it is over, one way or the other.
    pub fn over(&self) -> bool {
        self.finished.is_some() || self.gone.is_some()
    }
}

type Script = Box<dyn Fn(&Seen) -> Option<Play> + Send + Sync>;

/// Whose manners the double has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Manners {
    /// `Authorization: Bearer`, and OpenAI's errors.
    OpenAi,
    /// `x-api-key` with Anthropic's errors.
    Anthropic,
    /// Takes everybody: an origin that knows no keys.
    Open,
}

struct State {
    manners: Manners,
    /// Secrets that are good; empty: every `sk-…` that is no placeholder.
    good: HashSet<String>,
    before_body: Script,
    script: Script,
    seen: Mutex<Vec<Seen>>,
    open: Mutex<HashMap<String, (usize, usize)>>,
    faults: Mutex<Vec<String>>,
    connections: Mutex<(usize, usize)>,
}

/// The double.
pub struct Provider {
    addr: SocketAddr,
    tls: bool,
    ca_file: PathBuf,
    state: Arc<State>,
    accepting: JoinHandle<()>,
    check_faults: bool,
    _dir: tempfile::TempDir,
}

/// A double that is not running yet.
pub struct Builder {
    tls: bool,
    manners: Manners,
    good: HashSet<String>,
    before_body: Script,
    check_faults: bool,
    port: u16,
    names: Vec<String>,
    certificates: Option<Certificates>,
}

impl Builder {
    /// With this certificate, and its CA as the one to trust.
    pub fn certified(mut self, certificates: Certificates) -> Self {
        self.certificates = Some(certificates);
        self
    }

    /// With this name in its certificate, too.
    pub fn named(mut self, name: &str) -> Self {
        self.names.push(name.into());
        self
    }

    /// On this port of loopback: only inside a sandbox, where ports are one's own.
    pub fn port(mut self, port: u16) -> Self {
        self.port = port;
        self
    }

    /// Over plain http.
    pub fn plain(mut self) -> Self {
        self.tls = false;
        self
    }

    /// With these manners.
    pub fn manners(mut self, manners: Manners) -> Self {
        self.manners = manners;
        self
    }

    /// Only these secrets are good.
    pub fn good(mut self, secrets: &[&str]) -> Self {
        self.good = secrets.iter().map(ToString::to_string).collect();
        self
    }

    /// A script that is asked before the body is read; `None` leaves it to the main one.
    pub fn before_body(mut self, script: impl Fn(&Seen) -> Option<Play> + Send + Sync + 'static) -> Self {
        self.before_body = Box::new(script);
        self
    }

    /// A request without exactly one good key is answered with 401, and fails no test.
    pub fn bad_keys_expected(mut self) -> Self {
        self.check_faults = false;
        self
    }

    /// Starts it; `script` says what is done with each request.
    pub async fn start(self, script: impl Fn(&Seen) -> Play + Send + Sync + 'static) -> Provider {
        let dir = tempfile::tempdir().unwrap();
        let ca_file = dir.path().join("ca.pem");
        let usual = || {
            let more = self.names.iter().map(String::as_str);
            Certificates::make(&USUAL_NAMES.into_iter().chain(more).collect::<Vec<_>>())
        };
        let acceptor = acceptor(self.certificates.unwrap_or_else(usual), &ca_file);
        let listener = TcpListener::bind(("127.0.0.1", self.port)).await.unwrap();
        let addr = listener.local_addr().unwrap();
        let state = Arc::new(State {
            manners: self.manners,
            good: self.good,
            before_body: self.before_body,
            script: Box::new(move |seen| Some(script(seen))),
            seen: Mutex::default(),
            open: Mutex::default(),
            faults: Mutex::default(),
            connections: Mutex::default(),
        });
        let (tls, shared) = (self.tls, Arc::clone(&state));
        let accepting = tokio::spawn(async move {
            let mut tasks = tokio::task::JoinSet::new();
            while let Ok((socket, _)) = listener.accept().await {
                let (state, acceptor) = (Arc::clone(&shared), acceptor.clone());
                tasks.spawn(async move {
                    socket.set_nodelay(true).unwrap();
                    let wire = if tls {
                        match acceptor.accept(socket).await {
                            Ok(stream) => Wire::Tls(Box::new(stream)),
                            Err(_) => return,
                        }
                    } else {
                        Wire::Plain(socket)
                    };
                    Connection::new(wire, state).serve().await;
                });
                while tasks.try_join_next().is_some() {}
            }
        });
        Provider { addr, tls, ca_file, state, accepting, check_faults: self.check_faults, _dir: dir }
    }
}

/// A CA of this test's own, and a server certificate of it.
pub struct Certificates {
    pub ca_pem: String,
    pub cert: rcgen::Certificate,
    pub key: rcgen::KeyPair,
}

impl Certificates {
    /// A CA alone: its certificate and its key, PEM.
    pub fn ca() -> (String, String) {
        let key = rcgen::KeyPair::generate().unwrap();
        let mut ca = rcgen::CertificateParams::new(Vec::new()).unwrap();
        ca.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Constrained(0));
        ca.key_usages = vec![rcgen::KeyUsagePurpose::KeyCertSign];
        ca.distinguished_name.push(rcgen::DnType::CommonName, "operator's CA");
        (ca.self_signed(&key).unwrap().pem(), key.serialize_pem())
    }

    /// A CA that a root has signed: the root's certificate, its own, and its key, PEM.
    pub fn ca_below_a_root() -> (String, String, String) {
        let authority = |name: &str, below: u8| {
            let mut ca = rcgen::CertificateParams::new(Vec::new()).unwrap();
            ca.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Constrained(below));
            ca.key_usages = vec![rcgen::KeyUsagePurpose::KeyCertSign];
            ca.distinguished_name = rcgen::DistinguishedName::new();
            ca.distinguished_name.push(rcgen::DnType::CommonName, name);
            ca.use_authority_key_identifier_extension = true;
            (ca, rcgen::KeyPair::generate().unwrap())
        };
        let ((root, root_key), (ca, key)) = (authority("operator's root", 1), authority("operator's CA", 0));
        let root_pem = root.self_signed(&root_key).unwrap().pem();
        let root = rcgen::Issuer::from_params(&root, root_key);
        (root_pem, ca.signed_by(&key, &root).unwrap().pem(), key.serialize_pem())
    }

    /// For these names.
    pub fn make(names: &[&str]) -> Self {
        Self::made(names, |_| {})
    }

    /// A CA's own, shown as a server's.
    pub fn of_a_ca(names: &[&str]) -> Self {
        let key = rcgen::KeyPair::generate().unwrap();
        let names: Vec<String> = names.iter().map(ToString::to_string).collect();
        let mut ca = rcgen::CertificateParams::new(names).unwrap();
        ca.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
        let cert = ca.self_signed(&key).unwrap();
        Self { ca_pem: cert.pem(), cert, key }
    }

    /// The same, over since yesterday.
    pub fn expired(names: &[&str]) -> Self {
        let day = Duration::from_secs(86_400);
        let now = std::time::SystemTime::now();
        Self::made(names, |leaf| {
            (leaf.not_before, leaf.not_after) = ((now - day * 30).into(), (now - day).into());
        })
    }

    fn made(names: &[&str], change: impl FnOnce(&mut rcgen::CertificateParams)) -> Self {
        let ca_key = rcgen::KeyPair::generate().unwrap();
        let mut ca = rcgen::CertificateParams::new(Vec::new()).unwrap();
        ca.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Constrained(0));
        ca.key_usages = vec![rcgen::KeyUsagePurpose::KeyCertSign, rcgen::KeyUsagePurpose::DigitalSignature];
        ca.distinguished_name.push(rcgen::DnType::CommonName, "lessor test CA");
        let ca_pem = ca.self_signed(&ca_key).unwrap().pem();
        let issuer = rcgen::Issuer::from_params(&ca, ca_key);
        let key = rcgen::KeyPair::generate().unwrap();
        let names: Vec<String> = names.iter().map(ToString::to_string).collect();
        let mut leaf = rcgen::CertificateParams::new(names).unwrap();
        leaf.use_authority_key_identifier_extension = true;
        leaf.extended_key_usages = vec![rcgen::ExtendedKeyUsagePurpose::ServerAuth];
        change(&mut leaf);
        let cert = leaf.signed_by(&key, &issuer).unwrap();
        Self { ca_pem, cert, key }
    }
}

/// What a double is called.
pub const USUAL_NAMES: [&str; 4] = ["localhost", "127.0.0.1", "api.openai.com", "api.anthropic.com"];

/// TLS with these.
pub fn acceptor(made: Certificates, ca_file: &Path) -> TlsAcceptor {
    std::fs::write(ca_file, made.ca_pem).unwrap();
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let key = rustls::pki_types::PrivateKeyDer::try_from(made.key.serialize_der()).unwrap();
    let config = rustls::ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(vec![made.cert.der().clone()], key)
        .unwrap();
    TlsAcceptor::from(Arc::new(config))
}

impl Provider {
    /// TLS and OpenAI's manners, unless said otherwise.
    pub fn builder() -> Builder {
        Builder {
            tls: true,
            manners: Manners::OpenAi,
            good: HashSet::new(),
            before_body: Box::new(|_| None),
            check_faults: true,
            port: 0,
            names: Vec::new(),
            certificates: None,
        }
    }

    /// A double over TLS with OpenAI's manners.
    pub async fn start(script: impl Fn(&Seen) -> Play + Send + Sync + 'static) -> Self {
        Self::builder().start(script).await
    }

    /// The same over plain http: cheaper, where TLS is not the point.
    pub async fn plain(script: impl Fn(&Seen) -> Play + Send + Sync + 'static) -> Self {
        Self::builder().plain().start(script).await
    }

    /// An origin over plain http that is no provider and wants no key.
    pub async fn origin(script: impl Fn(&Seen) -> Play + Send + Sync + 'static) -> Self {
        Self::builder().plain().manners(Manners::Open).start(script).await
    }

    /// Where it listens.
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// Its base URL. The name is `localhost`: an origin that is no provider is asked for as 127.0.0.1.
    pub fn base_url(&self) -> String {
        let scheme = if self.tls { "https" } else { "http" };
        format!("{scheme}://localhost:{}", self.addr.port())
    }

    /// Whether it speaks TLS.
    pub fn tls(&self) -> bool {
        self.tls
    }

    /// The certificate to trust.
    pub fn ca_file(&self) -> &Path {
        &self.ca_file
    }

    /// All requests so far, in the order of their heads.
    pub fn seen(&self) -> Vec<Seen> {
        self.state.seen.lock().unwrap().clone()
    }

    /// How many requests came so far.
    pub fn count(&self) -> usize {
        self.state.seen.lock().unwrap().len()
    }

    /// The keys of all requests so far.
    pub fn keys_seen(&self) -> Vec<String> {
        self.seen().into_iter().map(|seen| seen.key.unwrap_or_default()).collect()
    }

    /// Waits until `n` requests have come, and returns the last of these.
    pub async fn request(&self, n: usize) -> Seen {
        eventually(&format!("request {n} at the provider"), async || self.seen().get(n - 1).cloned()).await
    }

    /// How many requests with this key were open at once, at most. A request counts from its head to
    /// just before its answer's last byte goes out, so that a slot reused at once is not counted twice.
    pub fn most_at_once(&self, key: &str) -> usize {
        self.state.open.lock().unwrap().get(key).map_or(0, |(_, most)| *most)
    }

    /// How many requests are open now.
    pub fn open(&self) -> usize {
        self.state.open.lock().unwrap().values().map(|(now, _)| now).sum()
    }

    /// How many connections are open now.
    pub fn open_connections(&self) -> usize {
        self.state.connections.lock().unwrap().1
    }

    /// Credentials that were missing, bad or doubled.
    pub fn faults(&self) -> Vec<String> {
        self.state.faults.lock().unwrap().clone()
    }
}

impl Drop for Provider {
    fn drop(&mut self) {
        self.accepting.abort();
        let faults = self.faults();
        if self.check_faults && !std::thread::panicking() {
            assert!(faults.is_empty(), "the provider was shown wrong credentials: {faults:#?}");
        }
    }
}

/// A plain or encrypted connection.
enum Wire {
    Plain(TcpStream),
    Tls(Box<tokio_rustls::server::TlsStream<TcpStream>>),
}

impl Wire {
    fn tcp(&self) -> &TcpStream {
        match self {
            Self::Plain(tcp) => tcp,
            Self::Tls(tls) => tls.get_ref().0,
        }
    }
}

impl AsyncRead for Wire {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        to: &mut ReadBuf<'_>,
    ) -> Poll<std::io::Result<()>> {
        match self.get_mut() {
            Self::Plain(tcp) => Pin::new(tcp).poll_read(cx, to),
            Self::Tls(tls) => Pin::new(tls).poll_read(cx, to),
        }
    }
}

impl AsyncWrite for Wire {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, from: &[u8]) -> Poll<std::io::Result<usize>> {
        match self.get_mut() {
            Self::Plain(tcp) => Pin::new(tcp).poll_write(cx, from),
            Self::Tls(tls) => Pin::new(tls).poll_write(cx, from),
        }
    }
    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        match self.get_mut() {
            Self::Plain(tcp) => Pin::new(tcp).poll_flush(cx),
            Self::Tls(tls) => Pin::new(tls).poll_flush(cx),
        }
    }
    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        match self.get_mut() {
            Self::Plain(tcp) => Pin::new(tcp).poll_shutdown(cx),
            Self::Tls(tls) => Pin::new(tls).poll_shutdown(cx),
        }
    }
}

/// The other side is gone, or nothing more is to be said on this connection.
struct Over;

impl From<std::io::Error> for Over {
    fn from(_: std::io::Error) -> Self {
        Self
    }
}

/// How much of a request's body is still to come.
enum Left {
    Length(u64),
    Chunks(u64),
    Nothing,
}

struct Connection {
    wire: Wire,
    input: Vec<u8>,
    state: Arc<State>,
    number: usize,
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.state.connections.lock().unwrap().1 -= 1;
    }
}

impl Connection {
    fn new(wire: Wire, state: Arc<State>) -> Self {
        let number = {
            let mut connections = state.connections.lock().unwrap();
            connections.0 += 1;
            connections.1 += 1;
            connections.0 - 1
        };
        Self { wire, input: Vec::new(), state, number }
    }

    async fn serve(mut self) {
        while let Ok(Some(seen)) = self.head().await {
            let number = seen.number;
            let counted = seen.key.clone().unwrap_or_default();
            let mut open = Open { state: Arc::clone(&self.state), key: Some(counted) };
            if let Err(Over) = self.answer(seen, &mut open).await {
                open.end();
                self.note(number, |seen| {
                    if seen.finished.is_none() {
                        seen.gone = Some(Instant::now());
                    }
                });
                return;
            }
        }
    }

    /// Reads more; [`Over`] at the end of the stream.
    async fn more(&mut self) -> Result<(), Over> {
        let mut buffer = vec![0; 64 * 1024];
        let n = self.wire.read(&mut buffer).await?;
        if n == 0 {
            return Err(Over);
        }
        self.input.extend_from_slice(&buffer[..n]);
        Ok(())
    }

    async fn line(&mut self) -> Result<String, Over> {
        loop {
            if let Some(at) = self.input.windows(2).position(|two| two == b"\r\n") {
                let line = String::from_utf8_lossy(&self.input[..at]).into_owned();
                self.input.drain(..at + 2);
                return Ok(line);
            }
            self.more().await?;
        }
    }

    async fn head(&mut self) -> Result<Option<Seen>, Over> {
        let end = loop {
            if let Some(at) = self.input.windows(4).position(|four| four == b"\r\n\r\n") {
                break at + 4;
            }
            self.more().await?;
        };
        let raw_head = String::from_utf8_lossy(&self.input[..end]).into_owned();
        self.input.drain(..end);
        let mut lines = raw_head.split("\r\n");
        let mut first = lines.next().unwrap().split(' ');
        let method = first.next().unwrap_or("").to_owned();
        let target = first.next().unwrap_or("").to_owned();
        let headers: Vec<(String, String)> = lines
            .filter_map(|line| line.split_once(':'))
            .map(|(name, value)| (name.to_owned(), value.trim().to_owned()))
            .collect();
        let credentials = credentials(&target, &headers);
        let mut seen = Seen {
            number: 0,
            connection: self.number,
            at: Instant::now(),
            method,
            target,
            headers,
            raw_head,
            key: (credentials.len() == 1).then(|| credentials[0].1.clone()),
            credentials: credentials.len(),
            body: Vec::new(),
            body_len: 0,
            body_is_pattern: true,
            body_complete: false,
            trailers: Vec::new(),
            flooded: 0,
            finished: None,
            gone: None,
        };
        let mut all = self.state.seen.lock().unwrap();
        seen.number = all.len();
        all.push(seen.clone());
        drop(all);
        let mut open = self.state.open.lock().unwrap();
        let (now, most) = open.entry(seen.key.clone().unwrap_or_default()).or_default();
        *now += 1;
        *most = (*most).max(*now);
        Ok(Some(seen))
    }

    fn note(&self, number: usize, change: impl FnOnce(&mut Seen)) {
        change(&mut self.state.seen.lock().unwrap()[number]);
    }

    async fn answer(&mut self, seen: Seen, open: &mut Open) -> Result<(), Over> {
        let number = seen.number;
        let mut body = Reading { left: left(&seen), check: PatternCheck::default(), complete: false };
        if seen.header("expect").eq_ignore_ascii_case("100-continue") {
            self.wire.write_all(b"HTTP/1.1 100 Continue\r\n\r\n").await?;
            self.wire.flush().await?;
        }
        let play = match self.state.refusal(&seen) {
            Some(refusal) => {
                self.read_body(number, &mut body, u64::MAX).await?;
                refusal
            }
            None => match (self.state.before_body)(&seen) {
                Some(play) => play,
                None => {
                    self.read_body(number, &mut body, u64::MAX).await?;
                    let seen = self.state.seen.lock().unwrap()[number].clone();
                    (self.state.script)(&seen).unwrap()
                }
            },
        };
        let last = play.steps.len();
        for (at, step) in play.steps.into_iter().enumerate() {
            if at + 1 == last && !matches!(step, Step::Silence | Step::Flood(_)) {
                open.end();
                if matches!(step, Step::Send(_) | Step::Cut(_)) {
                    self.note(number, |seen| seen.finished = Some(Instant::now()));
                }
            }
            match step {
                // What is left of a body is not taken in while the play waits.
                Step::Wait(pause) if !body.complete => tokio::time::sleep(pause).await,
                Step::Until(gate) if !body.complete => gate.passed().await,
                Step::Wait(pause) => self.unless_gone(tokio::time::sleep(pause)).await?,
                Step::Until(gate) => self.unless_gone(gate.passed()).await?,
                Step::Silence => self.unless_gone(std::future::pending()).await?,
                Step::Send(bytes) => {
                    self.wire.write_all(&bytes).await?;
                    self.wire.flush().await?;
                }
                Step::Flood(len) => self.flood(number, len).await?,
                Step::ReadBody => self.read_body(number, &mut body, u64::MAX).await?,
                Step::ReadAtLeast(len) => self.read_body(number, &mut body, len).await?,
                Step::ReadSlowly { part, pause } => {
                    while !body.complete {
                        let to = body.check.len + part as u64;
                        self.read_body(number, &mut body, to).await?;
                        tokio::time::sleep(pause).await;
                    }
                }
                Step::Cut(cut) => {
                    match cut {
                        Cut::Close => {
                            let _ = self.wire.shutdown().await;
                            // Wait for the other side, so that nothing unread turns this into a reset.
                            let linger = async { while self.more().await.is_ok() {} };
                            let _ = tokio::time::timeout(Duration::from_secs(1), linger).await;
                        }
                        Cut::Truncate => {}
                        Cut::Reset => {
                            let tcp = socket2::SockRef::from(self.wire.tcp());
                            tcp.set_linger(Some(Duration::ZERO)).unwrap();
                        }
                    }
                    return Err(Over);
                }
            }
        }
        open.end();
        self.note(number, |seen| seen.finished = Some(Instant::now()));
        if !body.complete {
            return Err(Over); // an answer before the body's end: this connection is of no more use
        }
        Ok(())
    }

    async fn flood(&mut self, number: usize, len: u64) -> Result<(), Over> {
        let mut sent = 0;
        while sent < len {
            let from = (sent % super::PERIOD as u64) as usize;
            let n = (256 * 1024).min(len - sent);
            let part = pattern().slice(from..from + n as usize);
            self.wire.write_all(&part).await?;
            sent += n;
            self.note(number, |seen| seen.flooded = sent);
        }
        self.wire.flush().await?;
        Ok(())
    }

    /// Awaits `what` while watching for the other side's end.
    async fn unless_gone(&mut self, what: impl Future<Output = ()>) -> Result<(), Over> {
        tokio::pin!(what);
        loop {
            tokio::select! {
                () = &mut what => return Ok(()),
                more = self.more() => more?,
            }
        }
    }

    /// Reads the body until it ends or `until` bytes of it were read.
    async fn read_body(&mut self, number: usize, body: &mut Reading, until: u64) -> Result<(), Over> {
        loop {
            match &mut body.left {
                Left::Nothing => {
                    if !body.complete {
                        body.complete = true;
                        self.note(number, |seen| seen.body_complete = true);
                    }
                    return Ok(());
                }
                _ if body.check.len >= until => return Ok(()),
                Left::Chunks(0) => {
                    let line = self.line().await?;
                    let size = line.split(';').next().unwrap().trim();
                    let size = u64::from_str_radix(size, 16).map_err(|_| Over)?;
                    if size > 0 {
                        body.left = Left::Chunks(size);
                        continue;
                    }
                    loop {
                        let line = self.line().await?;
                        let Some((name, value)) = line.split_once(':') else { break };
                        let trailer = (name.to_owned(), value.trim().to_owned());
                        self.note(number, |seen| seen.trailers.push(trailer));
                    }
                    body.left = Left::Nothing;
                }
                Left::Length(left) | Left::Chunks(left) => {
                    if self.input.is_empty() {
                        self.more().await?;
                    }
                    let n = (*left).min(self.input.len() as u64);
                    *left -= n;
                    let (at_end, chunked) = (*left == 0, matches!(body.left, Left::Chunks(_)));
                    let rest = self.input.split_off(n as usize);
                    let part = std::mem::replace(&mut self.input, rest);
                    body.check.take(&part);
                    let check = body.check;
                    self.note(number, |seen| {
                        let room = KEPT.saturating_sub(seen.body.len()).min(part.len());
                        if check.len <= KEPT as u64 || seen.body.len() < 1024 {
                            seen.body.extend_from_slice(&part[..room]);
                        } else {
                            seen.body.truncate(1024);
                            seen.body.shrink_to_fit();
                        }
                        seen.body_len = check.len;
                        seen.body_is_pattern = !check.broken;
                    });
                    if at_end && chunked {
                        self.line().await?; // the line end after a chunk's data
                    } else if at_end {
                        body.left = Left::Nothing;
                    }
                }
            }
        }
    }
}

struct Reading {
    left: Left,
    check: PatternCheck,
    complete: bool,
}

/// One request in the count of open ones.
struct Open {
    state: Arc<State>,
    key: Option<String>,
}

impl Open {
    fn end(&mut self) {
        if let Some(key) = self.key.take() {
            self.state.open.lock().unwrap().get_mut(&key).unwrap().0 -= 1;
        }
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        self.end();
    }
}

fn left(seen: &Seen) -> Left {
    if !seen.header("transfer-encoding").is_empty() {
        return Left::Chunks(0);
    }
    match seen.header("content-length").parse() {
        Ok(length) if length > 0 => Left::Length(length),
        _ => Left::Nothing,
    }
}

/// Everything in a request that some provider takes for a key, with the place it stood in.
fn credentials(target: &str, headers: &[(String, String)]) -> Vec<(String, String)> {
    let mut found = Vec::new();
    for (name, value) in headers {
        let name = name.to_ascii_lowercase();
        match name.as_str() {
            "authorization" => {
                let value = value.split_once(' ').map_or(value.as_str(), |(_, rest)| rest);
                found.push((name, value.to_owned()));
            }
            "x-api-key" | "api-key" | "x-goog-api-key" | "xi-api-key" => found.push((name, value.clone())),
            _ => {}
        }
    }
    let query = target.split_once('?').map_or("", |(_, query)| query);
    for pair in query.split('&') {
        if let Some(value) = pair.strip_prefix("key=") {
            found.push(("?key=".into(), value.to_owned()));
        }
    }
    found
}

impl State {
    /// What a provider answers to a request without exactly one good key.
    fn refusal(&self, seen: &Seen) -> Option<Play> {
        let place = match self.manners {
            Manners::Open => return None,
            Manners::OpenAi => "authorization",
            Manners::Anthropic => "x-api-key",
        };
        let found = credentials(&seen.target, &seen.headers);
        let good = |secret: &String| {
            if self.good.is_empty() {
                secret.starts_with("sk-") && !secret.contains("placeholder")
            } else {
                self.good.contains(secret)
            }
        };
        let fault = match found.as_slice() {
            [(at, secret)] if at == place && good(secret) => return None,
            [] => "no credential".to_owned(),
            [(at, secret)] => format!("a bad credential in {at}: {secret}"),
            many => format!("{} credentials", many.len()),
        };
        self.faults.lock().unwrap().push(format!("{fault} with {} {}", seen.method, seen.target));
        Some(match self.manners {
            Manners::Anthropic => {
                Play::json(401, &super::plays::anthropic_error("authentication_error", "invalid x-api-key"))
            }
            _ => Play::json(
                401,
                &super::plays::openai_error(
                    "invalid_request_error",
                    "invalid_api_key",
                    "Incorrect API key provided",
                ),
            ),
        })
    }
}

/// What a script may answer with when it does not care.
pub fn ok() -> Play {
    Play::json(200, &json!({"object": "list", "data": []}))
}

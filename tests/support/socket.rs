//! WebSockets to the byte: a client and a provider that write the frames a test says, and see those that
//! come.

use std::path::Path;
use std::time::Duration;

use base64::Engine as _;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

use super::lessor::{Lessor, Setup};
use super::provider::{Certificates, USUAL_NAMES, acceptor};
use super::{NEVER, within};

pub const CONTINUATION: u8 = 0;
pub const TEXT: u8 = 1;
pub const BINARY: u8 = 2;
pub const CLOSE: u8 = 8;
pub const PING: u8 = 9;
pub const PONG: u8 = 10;

/// What a handshake's key is, where it does not matter.
pub const KEY: &str = "dGhlIHNhbXBsZSBub25jZQ==";

/// A frame as it is on the wire, its payload unmasked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Frame {
    pub fin: bool,
    /// RSV1, RSV2 and RSV3 as bits 4, 2 and 1.
    pub rsv: u8,
    pub opcode: u8,
    pub payload: Vec<u8>,
    pub mask: Option<[u8; 4]>,
}

impl Frame {
    /// A whole message, or a control frame.
    pub fn new(opcode: u8, payload: impl AsRef<[u8]>) -> Self {
        Self { fin: true, rsv: 0, opcode, payload: payload.as_ref().to_vec(), mask: None }
    }

    /// A text message.
    pub fn text(payload: impl AsRef<[u8]>) -> Self {
        Self::new(TEXT, payload)
    }

    /// A Close frame.
    pub fn close(code: u16, reason: &str) -> Self {
        Self::new(CLOSE, [&code.to_be_bytes(), reason.as_bytes()].concat())
    }

    /// More of the message follows.
    pub fn part(mut self) -> Self {
        self.fin = false;
        self
    }

    pub fn rsv(mut self, rsv: u8) -> Self {
        self.rsv = rsv;
        self
    }

    /// As a client sends it.
    pub fn masked(mut self) -> Self {
        self.mask = Some([0x37, 0xfa, 0x21, 0x3d]);
        self
    }

    pub fn bytes(&self) -> Vec<u8> {
        let mask_bit = if self.mask.is_some() { 0x80 } else { 0 };
        let mut bytes = vec![u8::from(self.fin) << 7 | self.rsv << 4 | self.opcode];
        match self.payload.len() {
            n @ 0..126 => bytes.push(mask_bit | n as u8),
            n @ 126..65536 => {
                bytes.push(mask_bit | 126);
                bytes.extend((n as u16).to_be_bytes());
            }
            n => {
                bytes.push(mask_bit | 127);
                bytes.extend((n as u64).to_be_bytes());
            }
        }
        bytes.extend(self.mask.iter().flatten());
        let mask = self.mask.unwrap_or_default();
        bytes.extend(self.payload.iter().zip(mask.iter().cycle()).map(|(byte, mask)| byte ^ mask));
        bytes
    }
}

trait Wire: AsyncRead + AsyncWrite + Send + Unpin {}
impl<T: AsyncRead + AsyncWrite + Send + Unpin> Wire for T {}

/// One end of a connection after the handshake, or before its answer.
pub struct Peer {
    io: Box<dyn Wire>,
    /// The head that the other side sent.
    pub head: String,
    tcp: socket2::Socket,
}

impl Peer {
    /// `tcp` is what `io` runs over.
    fn new(io: impl Wire + 'static, tcp: socket2::Socket) -> Self {
        Self { io: Box::new(io), head: String::new(), tcp }
    }

    /// Reads a head, and no byte behind it.
    async fn read_head(&mut self) -> std::io::Result<()> {
        let mut seen = Vec::new();
        while !seen.ends_with(b"\r\n\r\n") {
            seen.push(within(NEVER, "a head", self.io.read_u8()).await?);
        }
        self.head = String::from_utf8(seen).unwrap();
        Ok(())
    }

    /// The first header with this name, empty when it is missing.
    pub fn header(&self, name: &str) -> &str {
        self.headers(name).first().copied().unwrap_or("")
    }

    /// All headers with this name.
    pub fn headers(&self, name: &str) -> Vec<&str> {
        let lines = self.head.lines().filter_map(|line| line.split_once(':'));
        lines.filter(|(other, _)| other.eq_ignore_ascii_case(name)).map(|(_, value)| value.trim()).collect()
    }

    /// The status of an answer.
    pub fn status(&self) -> u16 {
        self.head.split(' ').nth(1).unwrap().parse().unwrap()
    }

    pub async fn write(&mut self, bytes: impl AsRef<[u8]>) {
        self.io.write_all(bytes.as_ref()).await.unwrap();
        self.io.flush().await.unwrap();
    }

    /// Writes as long as it is taken, and `limit` allows; how much was.
    pub async fn flood(&mut self, chunk: &[u8], limit: Duration) -> u64 {
        let mut taken = 0;
        while let Ok(Ok(n)) = tokio::time::timeout(limit, self.io.write(chunk)).await {
            taken += n as u64;
        }
        taken
    }

    pub async fn send(&mut self, frame: Frame) {
        self.write(frame.bytes()).await;
    }

    pub async fn read_exact(&mut self, n: usize) -> Vec<u8> {
        let mut bytes = vec![0; n];
        within(NEVER, "bytes of the other side", self.io.read_exact(&mut bytes)).await.unwrap();
        bytes
    }

    /// Some bytes; none at a clean end.
    pub async fn read_some(&mut self) -> std::io::Result<Vec<u8>> {
        let mut buffer = vec![0; 64 * 1024];
        let n = within(NEVER, "bytes of the other side", self.io.read(&mut buffer)).await?;
        buffer.truncate(n);
        Ok(buffer)
    }

    /// The next frame.
    pub async fn frame(&mut self) -> Frame {
        let head = self.read_exact(2).await;
        let length = match head[1] & 0x7f {
            126 => u16::from_be_bytes(self.read_exact(2).await.try_into().unwrap()).into(),
            127 => u64::from_be_bytes(self.read_exact(8).await.try_into().unwrap()),
            short => short.into(),
        };
        let mask: Option<[u8; 4]> = match head[1] & 0x80 {
            0 => None,
            _ => Some(self.read_exact(4).await.try_into().unwrap()),
        };
        let mut payload = self.read_exact(length as usize).await;
        let key = mask.unwrap_or_default();
        payload.iter_mut().zip(key.iter().cycle()).for_each(|(byte, key)| *byte ^= key);
        Frame { fin: head[0] & 0x80 != 0, rsv: head[0] >> 4 & 7, opcode: head[0] & 15, payload, mask }
    }

    /// All that still comes, and whether it ended in order (else by a reset or a truncation of TLS).
    pub async fn rest(&mut self) -> (Vec<u8>, bool) {
        let mut seen = Vec::new();
        loop {
            match self.read_some().await {
                Ok(some) if some.is_empty() => return (seen, true),
                Ok(some) => seen.extend(some),
                Err(_) => return (seen, false),
            }
        }
    }

    /// Fails unless the connection was broken off, and not ended in order.
    pub async fn is_cut(&mut self) {
        let (seen, in_order) = self.rest().await;
        assert!(!in_order, "ended in order after {:?}", String::from_utf8_lossy(&seen));
    }

    /// Fails unless nothing comes for a while: long enough for what was sent before to be here.
    pub async fn finds_nothing(&mut self) {
        let mut byte = [0];
        let read = tokio::time::timeout(Duration::from_millis(200), self.io.read(&mut byte)).await;
        assert!(read.is_err(), "{read:?} came: {byte:?}");
    }

    /// Ends its writing half.
    pub async fn half_close(&mut self) {
        self.io.shutdown().await.unwrap();
    }

    /// Its two halves. The connection closes when both are dropped.
    pub fn split(self) -> (impl AsyncRead + Send + Unpin, impl AsyncWrite + Send + Unpin) {
        tokio::io::split(self.io)
    }

    /// Closes in order: in TLS with a farewell.
    pub async fn close(mut self) {
        let _ = self.io.shutdown().await;
    }

    /// Closes by a reset.
    pub fn reset(self) {
        self.tcp.set_linger(Some(Duration::ZERO)).unwrap();
    }
}

/// A provider whose connections a test holds in its hand.
pub struct Far {
    port: u16,
    ca_file: Option<std::path::PathBuf>,
    peers: mpsc::UnboundedReceiver<Peer>,
    accepting: JoinHandle<()>,
    _dir: tempfile::TempDir,
}

impl Drop for Far {
    fn drop(&mut self) {
        self.accepting.abort();
    }
}

impl Far {
    /// Over plain http.
    pub async fn plain() -> Self {
        Self::start(false).await
    }

    /// Over TLS.
    pub async fn tls() -> Self {
        Self::start(true).await
    }

    async fn start(tls: bool) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let ca_file = dir.path().join("ca.pem");
        let acceptor = tls.then(|| acceptor(Certificates::make(&USUAL_NAMES), &ca_file));
        let listener = TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let (sender, peers) = mpsc::unbounded_channel();
        let accepting = tokio::spawn(async move {
            while let Ok((socket, _)) = listener.accept().await {
                let (acceptor, sender) = (acceptor.clone(), sender.clone());
                tokio::spawn(async move {
                    socket.set_nodelay(true).unwrap();
                    let tcp = socket2::SockRef::from(&socket).try_clone().unwrap();
                    let mut peer = match acceptor {
                        Some(acceptor) => match acceptor.accept(socket).await {
                            Ok(stream) => Peer::new(stream, tcp),
                            Err(_) => return,
                        },
                        None => Peer::new(socket, tcp),
                    };
                    if peer.read_head().await.is_ok() {
                        let _ = sender.send(peer);
                    }
                });
            }
        });
        Self { port, ca_file: tls.then_some(ca_file), peers, accepting, _dir: dir }
    }

    pub fn port(&self) -> u16 {
        self.port
    }

    pub fn ca_file(&self) -> Option<&Path> {
        self.ca_file.as_deref()
    }

    /// A lessor whose `openai` it is.
    pub fn setup(&self) -> Setup {
        let scheme = if self.ca_file.is_some() { "https" } else { "http" };
        let url = format!("\"{scheme}://localhost:{}\"", self.port);
        let setup = Setup::new().set("providers.openai.base_url", &url);
        match &self.ca_file {
            Some(file) => setup.set("providers.openai.ca_file", &format!("{:?}", file.display().to_string())),
            None => setup,
        }
    }

    /// The next request: its head was read, and nothing was answered.
    pub async fn request(&mut self) -> Peer {
        within(NEVER, "a request at the provider", self.peers.recv()).await.unwrap()
    }

    /// Whether no request has come that was not taken.
    pub fn has_none(&mut self) -> bool {
        self.peers.try_recv().is_err()
    }

    /// The next request, agreed to.
    pub async fn agreed(&mut self) -> Peer {
        let mut peer = self.request().await;
        peer.agree("").await;
        peer
    }
}

impl Peer {
    /// Answers 101, with these further lines.
    pub async fn agree(&mut self, lines: &str) {
        let accept = accept(self.header("sec-websocket-key"));
        let head = format!(
            "HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\
             Sec-WebSocket-Accept: {accept}\r\n{lines}\r\n"
        );
        self.write(head).await;
    }
}

/// What an answer must show for a handshake's key (RFC 6455, section 4.2.2).
pub fn accept(key: &str) -> String {
    let digest = sha1_smol::Sha1::from(format!("{key}258EAFA5-E914-47DA-95CA-C5AB0DC85B11")).digest();
    base64::engine::general_purpose::STANDARD.encode(digest.bytes())
}

/// A handshake for this target, with these further lines.
pub fn handshake(target: &str, host: &str, lines: &str) -> String {
    format!(
        "GET {target} HTTP/1.1\r\nHost: {host}\r\nConnection: keep-alive, Upgrade\r\nUpgrade: websocket\r\n\
         Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: {KEY}\r\n{lines}\r\n"
    )
}

/// The target that most tests ask for.
pub const REALTIME: &str = "/openai/v1/realtime?model=gpt-realtime";

/// A handshake sent, and its answer not read.
pub async fn ask(lessor: &Lessor, target: &str, lines: &str) -> Peer {
    ask_over(lessor.raw().await.0, &handshake(target, &lessor.authority(), lines)).await
}

/// The same on a connection of one's own.
pub async fn ask_over(socket: TcpStream, head: &str) -> Peer {
    let tcp = socket2::SockRef::from(&socket).try_clone().unwrap();
    let mut peer = Peer::new(socket, tcp);
    peer.write(head).await;
    peer
}

/// The same inside of TLS.
pub async fn ask_inside(stream: tokio_rustls::client::TlsStream<TcpStream>, head: &str) -> Peer {
    let tcp = socket2::SockRef::from(stream.get_ref().0).try_clone().unwrap();
    let mut peer = Peer::new(stream, tcp);
    peer.write(head).await;
    peer
}

/// The same over a Unix socket.
pub async fn ask_unix(socket: tokio::net::UnixStream, head: &str) -> Peer {
    let tcp = socket2::SockRef::from(&socket).try_clone().unwrap();
    let mut peer = Peer::new(socket, tcp);
    peer.write(head).await;
    peer
}

impl Peer {
    /// Reads the answer's head.
    pub async fn answered(mut self) -> Self {
        self.read_head().await.unwrap();
        self
    }
}

/// Both ends of a socket through lessor.
pub async fn open(lessor: &Lessor, far: &mut Far) -> (Peer, Peer) {
    open_with(lessor, far, "", "").await
}

/// The same, with further lines of the request and of the answer.
pub async fn open_with(lessor: &Lessor, far: &mut Far, asks: &str, says: &str) -> (Peer, Peer) {
    let near = ask(lessor, REALTIME, asks).await;
    let mut provider = far.request().await;
    provider.agree(says).await;
    let near = near.answered().await;
    assert_eq!(near.status(), 101, "{}", near.head);
    (near, provider)
}

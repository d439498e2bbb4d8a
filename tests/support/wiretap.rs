//! A provider that keeps what it is sent to the byte, reads it strictly, and answers as it is told.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinHandle;

use super::strict::{self, Read, Request, all};
use super::{Key, Lessor, Raw, Setup, eventually, ms};

/// What came over all connections since it was last asked.
#[derive(Debug, Default, Clone)]
pub struct Heard {
    /// Whole requests.
    pub whole: Vec<Request>,
    /// What was begun, and ended with its connection.
    pub broken: Vec<Vec<u8>>,
    /// What no strict reader takes for a request, and why.
    pub bad: Vec<String>,
}

type Answer = Box<dyn Fn(&Request) -> Reply + Send + Sync>;

/// Bytes to answer with.
#[derive(Debug, Clone)]
pub struct Reply {
    pub bytes: Vec<u8>,
    /// Whether the connection ends behind them.
    pub close: bool,
}

struct State {
    answer: Answer,
    heard: Mutex<Heard>,
    /// Connections on which part of a request has come.
    amid: Mutex<usize>,
}

/// The double.
pub struct Wiretap {
    addr: SocketAddr,
    state: Arc<State>,
    accepting: JoinHandle<()>,
}

impl Drop for Wiretap {
    fn drop(&mut self) {
        self.accepting.abort();
    }
}

impl Wiretap {
    /// Starts it, over plain http.
    pub async fn start(answer: impl Fn(&Request) -> Reply + Send + Sync + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let addr = listener.local_addr().unwrap();
        let answer: Answer = Box::new(answer);
        let state = Arc::new(State { answer, heard: Mutex::default(), amid: Mutex::default() });
        let shared = state.clone();
        let accepting = tokio::spawn(async move {
            let mut tasks = tokio::task::JoinSet::new();
            while let Ok((socket, _)) = listener.accept().await {
                tasks.spawn(shared.clone().serve(socket));
                while tasks.try_join_next().is_some() {}
            }
        });
        Self { addr, state, accepting }
    }

    /// Its base URL.
    pub fn base_url(&self) -> String {
        format!("http://localhost:{}", self.addr.port())
    }

    /// What came since the last call, once nothing is half-way.
    pub async fn heard(&self) -> Heard {
        let quiet = async || (*self.state.amid.lock().unwrap() == 0).then_some(());
        eventually("what was begun is whole or broken", quiet).await;
        std::mem::take(&mut *self.state.heard.lock().unwrap())
    }
}

impl State {
    async fn serve(self: Arc<Self>, mut socket: TcpStream) {
        socket.set_nodelay(true).unwrap();
        let mut input = Vec::new();
        let mut amid = false;
        loop {
            match strict::request(&input) {
                Read::Whole(request, len) => {
                    input.drain(..len);
                    let reply = (self.answer)(&request);
                    self.heard.lock().unwrap().whole.push(request);
                    if socket.write_all(&reply.bytes).await.is_err() || reply.close {
                        break;
                    }
                    continue;
                }
                Read::Bad(why) => {
                    self.heard
                        .lock()
                        .unwrap()
                        .bad
                        .push(format!("{why} in {:?}", String::from_utf8_lossy(&input)));
                    input.clear();
                    break;
                }
                Read::Part => {}
            }
            if amid == input.is_empty() {
                amid = !amid;
                let mut count = self.amid.lock().unwrap();
                *count = if amid { *count + 1 } else { *count - 1 };
            }
            let mut some = [0; 16 * 1024];
            match tokio::time::timeout(ms(60_000), socket.read(&mut some)).await {
                Ok(Ok(n)) if n > 0 => input.extend_from_slice(&some[..n]),
                _ => break,
            }
        }
        if !input.is_empty() {
            self.heard.lock().unwrap().broken.push(input);
        }
        if amid {
            *self.amid.lock().unwrap() -= 1;
        }
    }
}

/// The secret of the one key.
pub const SECRET: &str = "sk-the-leased-one";

/// A lessor with one key of this double's, that waits for nothing long.
pub async fn lessor(provider: &Wiretap) -> Lessor {
    Setup::new()
        .set("providers.openai.base_url", &format!("{:?}", provider.base_url()))
        .set("timeouts.header", "\"1s\"")
        .set("timeouts.body_idle", "\"1s\"")
        .set("timeouts.keep_alive", "\"1s\"")
        .set("limits.max_header_bytes", "\"16KiB\"")
        .key(Key::new("a").secret(SECRET))
        // A line a request would bury what a failed test says.
        .env("RUST_LOG", "info,lessor::request=off")
        .start()
        .await
}

/// A whole answer.
pub fn ok(body: &str) -> Reply {
    let length = body.len();
    Reply {
        bytes: format!("HTTP/1.1 200 OK\r\ncontent-length: {length}\r\n\r\n{body}").into_bytes(),
        close: false,
    }
}

/// Writes all, and reads to the end; a reset counts as one.
pub async fn exchange(mut raw: Raw, bytes: &[u8]) -> Result<Vec<u8>, String> {
    let (mut read, mut write) = raw.0.split();
    let writing = async {
        // A refusal may come, and with it the end, before all was written.
        let _ = write.write_all(bytes).await;
    };
    let reading = async {
        let mut said = Vec::new();
        let mut some = [0; 16 * 1024];
        while let Ok(n @ 1..) = read.read(&mut some).await {
            said.extend_from_slice(&some[..n]);
        }
        said
    };
    let both = async { tokio::join!(writing, reading).1 };
    tokio::time::timeout(Duration::from_secs(5), both).await.map_err(|_| "the connection does not end".into())
}

/// What is wrong with a request that reached the provider, wherever it came from.
pub fn fault(request: &Request) -> Option<String> {
    let credentials =
        ["authorization", "proxy-authorization", "x-api-key", "api-key", "x-goog-api-key", "xi-api-key"];
    let shown: Vec<&str> = credentials.iter().flat_map(|name| all(&request.headers, name)).collect();
    let bearer = format!("Bearer {SECRET}");
    if shown != [&bearer] || all(&request.headers, "authorization").len() != 1 {
        return Some(format!("credentials {shown:?}"));
    }
    let own = request.headers.iter().chain(&request.trailers).any(|(name, _)| name.starts_with("x-lessor"));
    let hop = ["connection", "keep-alive", "proxy-connection", "upgrade", "expect", "http2-settings"];
    // `trailers` is the one word of TE that may go on: it says that the client wants them.
    let te = all(&request.headers, "te").iter().any(|value| *value != "trailers");
    if own || te || hop.iter().any(|name| !all(&request.headers, name).is_empty()) {
        return Some(format!("fields that end here: {:?}", request.headers));
    }
    let never = |name: &str| {
        credentials.contains(&name) || ["host", "content-length", "transfer-encoding"].contains(&name)
    };
    if request.trailers.iter().any(|(name, _)| never(&name.to_ascii_lowercase())) {
        return Some(format!("trailers {:?}", request.trailers));
    }
    let query = request.target.split_once('?').map_or("", |(_, query)| query);
    let is_key = |pair: &str| {
        let name = pair.split('=').next().unwrap_or_default().to_ascii_lowercase();
        ["key", "access_token", "api-key", "xi-api-key"].contains(&name.replace("%6b", "k").as_str())
    };
    if query.split('&').any(is_key) {
        return Some(format!("a credential in {}", request.target));
    }
    None
}

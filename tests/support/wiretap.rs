//! A provider that keeps what it is sent to the byte, reads it strictly, and answers as it is told.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex};

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinHandle;

use super::strict::{self, Read, Request};
use super::{eventually, ms};

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

//! A client that speaks HTTP/2: many requests at once on one connection.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use hyper::client::conn::http2::SendRequest;
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::task::{JoinHandle, JoinSet};

use super::client::{Answer, Body, Door, Request, Stream};
use super::lessor::Lessor;
use super::tunnel::{connect, tls_client, trusted};
use super::{NEVER, within};

/// A connection. Dropping it closes it at once.
#[derive(Debug)]
pub struct H2 {
    sender: SendRequest<Body>,
    connection: JoinHandle<Result<(), hyper::Error>>,
    tasks: Tasks,
    /// What requests with a target in origin form are for: scheme and authority.
    site: String,
}

impl Drop for H2 {
    fn drop(&mut self) {
        self.connection.abort();
        self.tasks.0.lock().unwrap().abort_all();
    }
}

/// The tasks in which hyper carries a connection on.
#[derive(Debug, Clone, Default)]
struct Tasks(Arc<Mutex<JoinSet<()>>>);

impl<F: Future<Output = ()> + Send + 'static> hyper::rt::Executor<F> for Tasks {
    fn execute(&self, future: F) {
        self.0.lock().unwrap().spawn(future);
    }
}

impl H2 {
    /// By prior knowledge, on a connection to lessor itself.
    pub async fn to(lessor: &Lessor) -> Self {
        let Door::Tcp(at) = lessor.door() else { panic!("a TCP door is needed") };
        let socket = TcpStream::connect(at).await.unwrap();
        socket.set_nodelay(true).unwrap();
        Self::over(socket, &format!("http://{at}")).await
    }

    /// In a tunnel to `host:443`, as TLS agreed.
    pub async fn inside(lessor: &Lessor, host: &str) -> Self {
        let raw = connect(lessor, &format!("{host}:443")).await;
        let name = rustls::pki_types::ServerName::try_from(host.to_owned()).unwrap();
        let stream = tls_client(trusted(lessor), &["h2"]).connect(name, raw.0).await.unwrap();
        assert_eq!(stream.get_ref().1.alpn_protocol(), Some(&b"h2"[..]));
        Self::over(stream, &format!("https://{host}")).await
    }

    /// On `io`; `site` is a scheme and an authority.
    pub async fn over<T>(io: T, site: &str) -> Self
    where
        T: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let tasks = Tasks::default();
        let shaking = hyper::client::conn::http2::Builder::new(tasks.clone())
            // Small, so that a client that reads nothing is felt soon.
            .initial_stream_window_size(1 << 20)
            .initial_connection_window_size(64 << 20)
            .handshake(TokioIo::new(io));
        let (sender, connection) = within(NEVER, "an HTTP/2 handshake", shaking).await.unwrap();
        Self { sender, connection: tokio::spawn(connection), tasks, site: site.into() }
    }

    /// Sends `request` and returns when the answer's head is here. Dropping the future resets the stream.
    pub async fn open(&self, request: Request) -> Result<Stream, hyper::Error> {
        let target = match request.target.starts_with('/') {
            true => format!("{}{}", self.site, request.target),
            false => request.target,
        };
        let mut built = http::Request::builder().method(request.method.as_str()).uri(target);
        for (name, value) in &request.headers {
            built = built.header(name, value);
        }
        let mut sender = self.sender.clone();
        sender.ready().await?;
        Ok(Stream::shared(sender.send_request(built.body(request.body).unwrap()).await?))
    }

    /// Sends `request` and reads the whole answer.
    pub async fn ask(&self, request: Request) -> Answer {
        let stream = within(NEVER, "an answer's head", self.open(request)).await.unwrap();
        stream.whole().await.unwrap()
    }

    /// Waits until the other side has ended the connection in good order.
    pub async fn ends_within(mut self, limit: Duration) -> Result<(), hyper::Error> {
        within(limit, "the end of an HTTP/2 connection", &mut self.connection).await.unwrap()
    }
}

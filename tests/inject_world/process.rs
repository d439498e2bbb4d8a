//! `lessor inject` as a process, and an API server's way of asking it.

#![allow(dead_code)] // each test uses a part

use std::io::{BufRead as _, BufReader};
use std::net::SocketAddr;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use http::{Request, StatusCode};
use http_body_util::{BodyExt as _, Full};
use hyper_util::rt::{TokioExecutor, TokioIo};
use rustls::pki_types::{CertificateDer, ServerName};
use serde_json::{Value, json};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

/// Longer than anything takes that works.
pub const NEVER: Duration = Duration::from_secs(40);
/// The name by which API servers know the webhook.
pub const NAME: &str = "injector.lessor.svc";

/// Waits until `found` finds something.
pub async fn eventually<T, F: Future<Output = Option<T>>>(what: &str, mut found: impl FnMut() -> F) -> T {
    let ends = tokio::time::Instant::now() + NEVER;
    loop {
        if let Some(found) = found().await {
            return found;
        }
        assert!(tokio::time::Instant::now() < ends, "never: {what}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// One replica.
pub struct Injector {
    child: Child,
    pub webhook: SocketAddr,
    pub health: SocketAddr,
    lines: Arc<Mutex<Vec<String>>>,
}

impl Drop for Injector {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Injector {
    /// Starts one, and waits until it serves; not until it is ready.
    pub async fn start(args: &[String], env: &[(&str, String)]) -> Self {
        let mut command = Command::new(env!("CARGO_BIN_EXE_lessor"));
        command.args(["inject", "--listen=127.0.0.1:0", "--health=127.0.0.1:0", "--look-every=50ms"]);
        command.args(args).env_clear().envs(env.iter().map(|(name, value)| (name, value)));
        let mut child = command.stderr(Stdio::piped()).spawn().unwrap();
        let lines = Arc::<Mutex<Vec<String>>>::default();
        let (to, from) = (lines.clone(), child.stderr.take().unwrap());
        // Ends with the process, whose end it reads.
        std::thread::spawn(move || {
            BufReader::new(from).lines().map_while(Result::ok).for_each(|line| to.lock().unwrap().push(line));
        });
        let seen = lines.clone();
        let serving = eventually("it serves", async || {
            let all = seen.lock().unwrap().join("\n");
            let line = all.lines().find(|line| line.contains("\"serving\""))?;
            serde_json::from_str::<Value>(line).ok()
        })
        .await;
        let at = |which: &str| serving[which].as_str().unwrap().parse().unwrap();
        Self { child, webhook: at("webhook"), health: at("health"), lines }
    }

    /// The most memory that it had, in MiB.
    pub fn most_memory(&self) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.child.id())).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
        line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() / 1024
    }

    pub fn log(&self) -> String {
        self.lines.lock().unwrap().join("\n")
    }

    /// A page of its health listener.
    pub async fn page(&self, path: &str) -> (StatusCode, String) {
        let stream = TcpStream::connect(self.health).await.unwrap();
        let (mut ask, connection) =
            hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.unwrap();
        tokio::spawn(connection);
        let request = Request::get(path).header("host", "health").body(Full::<Bytes>::default()).unwrap();
        read(ask.send_request(request).await.unwrap()).await
    }

    pub async fn ready(&self) {
        eventually("it is ready", async || (self.page("/readyz").await.0 == StatusCode::OK).then_some(()))
            .await;
    }

    /// Why it is not ready, once it is not.
    pub async fn not_ready(&self, because: &str) {
        eventually(because, async || {
            let (status, why) = self.page("/readyz").await;
            (status == StatusCode::SERVICE_UNAVAILABLE && why.contains(because)).then_some(())
        })
        .await;
    }

    pub fn terminate(&self) {
        let id = rustix::process::Pid::from_child(&self.child);
        rustix::process::kill_process(id, rustix::process::Signal::TERM).unwrap();
    }

    pub async fn ended(&mut self) -> ExitStatus {
        let child = Mutex::new(&mut self.child);
        eventually("it ends", async || child.lock().unwrap().try_wait().unwrap()).await
    }
}

async fn read(response: hyper::Response<hyper::body::Incoming>) -> (StatusCode, String) {
    let status = response.status();
    let body = response.into_body().collect().await.unwrap().to_bytes();
    (status, String::from_utf8_lossy(&body).into_owned())
}

/// An API server that trusts these, as a webhook configuration's `caBundle` says.
#[derive(Clone)]
pub struct ApiServer {
    trusted: Vec<CertificateDer<'static>>,
    h2: bool,
}

impl ApiServer {
    pub fn trusting(trusted: &[CertificateDer<'static>]) -> Self {
        Self { trusted: trusted.to_vec(), h2: true }
    }

    pub fn by_http1(mut self) -> Self {
        self.h2 = false;
        self
    }

    /// A connection, with what was shown on it.
    pub async fn connect(&self, to: SocketAddr) -> Result<TlsStream<TcpStream>, String> {
        let mut roots = rustls::RootCertStore::empty();
        for certificate in &self.trusted {
            roots.add(certificate.clone()).map_err(|cause| cause.to_string())?;
        }
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let mut config = rustls::ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_root_certificates(roots)
            .with_no_client_auth();
        config.alpn_protocols = vec![if self.h2 { b"h2".to_vec() } else { b"http/1.1".to_vec() }];
        let stream = TcpStream::connect(to).await.map_err(|cause| cause.to_string())?;
        let name = ServerName::try_from(NAME).unwrap();
        TlsConnector::from(Arc::new(config)).connect(name, stream).await.map_err(|cause| cause.to_string())
    }

    pub async fn send(
        &self,
        to: SocketAddr,
        request: Request<Full<Bytes>>,
    ) -> Result<(StatusCode, String), String> {
        let stream = TokioIo::new(self.connect(to).await?);
        let said = async {
            let response = if self.h2 {
                let (mut ask, connection) =
                    hyper::client::conn::http2::handshake(TokioExecutor::new(), stream).await?;
                tokio::spawn(connection);
                ask.send_request(request).await?
            } else {
                let (mut ask, connection) = hyper::client::conn::http1::handshake(stream).await?;
                tokio::spawn(connection);
                ask.send_request(request).await?
            };
            Ok::<_, hyper::Error>(read(response).await)
        };
        let said = tokio::time::timeout(NEVER, said).await.map_err(|_| "no answer".to_owned())?;
        said.map_err(|cause| format!("{cause}: {:?}", std::error::Error::source(&cause)))
    }

    /// Asks for a review of a pod; why it was not answered as it should be.
    pub async fn review(&self, to: SocketAddr, uid: &str) -> Result<(), String> {
        let (status, body) = self.send(to, post("/inject", review(uid))).await?;
        let answer: Value = serde_json::from_str(&body).map_err(|_| format!("{status}: {body}"))?;
        let response = &answer["response"];
        let good = response["uid"] == uid && response["allowed"] == true && response["patch"].is_string();
        if good { Ok(()) } else { Err(body) }
    }
}

pub fn review(uid: &str) -> String {
    let pod =
        json!({ "metadata": { "generateName": "web-" }, "spec": { "containers": [{ "name": "app" }] } });
    let request = json!({
        "uid": uid, "kind": { "group": "", "version": "v1", "kind": "Pod" }, "operation": "CREATE",
        "namespace": "shop", "object": pod,
    });
    json!({ "apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": request }).to_string()
}

pub fn post(path: &str, body: impl Into<Bytes>) -> Request<Full<Bytes>> {
    let uri = format!("https://{NAME}{path}");
    let request = Request::post(uri).header("host", NAME).header("content-type", "application/json");
    request.body(Full::new(body.into())).unwrap()
}

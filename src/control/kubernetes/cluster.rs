//! The few calls to the Kubernetes API that a self-managed certificate needs, each with a bound.
//!
//! The service account's token and CA are read anew for each call: the kubelet changes the token every hour. What
//! comes and goes of a Secret stays in memory that is zeroed.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::{Method, Request, StatusCode, header};
use http_body_util::{BodyExt as _, Full};
use hyper_util::rt::TokioIo;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, ServerName};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use zeroize::Zeroizing;

use super::certificates::provider;
use crate::model::Secret;

/// The bound of one whole call.
const CALL: Duration = Duration::from_secs(10);
/// The longest answer that is read: a webhook configuration has some hundred KiB at most, a Secret 1 MiB.
const LONGEST: usize = 4 * 1024 * 1024;
/// The largest file that is read.
const LARGEST: usize = 1 << 20;

/// Why a call brought nothing.
#[derive(Debug, thiserror::Error)]
pub(super) enum ApiError {
    #[error("{} cannot be read; is there a service account for this pod?", path.display())]
    Account { path: PathBuf, source: std::io::Error },
    #[error("{} has no readable certificate", .0.display())]
    NoCa(PathBuf),
    #[error("{0} is no host for a certificate")]
    Host(String),
    #[error("the Kubernetes API at {at} is not reached")]
    Unreachable { at: String, source: std::io::Error },
    #[error("the Kubernetes API at {0} did not answer within {CALL:?}")]
    Late(String),
    #[error("the connection to the Kubernetes API broke")]
    Broken(#[from] hyper::Error),
    #[error("the Kubernetes API's answer is longer than {LONGEST} bytes")]
    TooLong,
    #[error("TLS to the Kubernetes API cannot be spoken")]
    Tls(#[from] rustls::Error),
    #[error("{what} was refused with {status}: {message}{}", hint(*status))]
    Refused { what: String, status: StatusCode, message: String },
    #[error("the Kubernetes API's answer about {what} cannot be read: {cause}")]
    Nonsense { what: String, cause: String },
}

fn hint(status: StatusCode) -> &'static str {
    match status {
        StatusCode::FORBIDDEN | StatusCode::UNAUTHORIZED => {
            "; the service account needs get, create and update of this Secret, and get and patch of this \
             MutatingWebhookConfiguration"
        }
        _ => "",
    }
}

/// How a call ended that may end in more than one good way.
#[derive(Debug)]
pub(super) enum Reply {
    Done(Zeroizing<Vec<u8>>),
    /// It is not there.
    Missing,
    /// Somebody else was first: read again.
    Conflict,
}

/// The API of the cluster that this pod is in.
#[derive(Debug, Clone)]
pub(super) struct Api {
    host: String,
    port: u16,
    /// Where the service account's files are.
    account: PathBuf,
}

/// A call.
pub(super) struct Call<'a> {
    pub(super) method: Method,
    pub(super) path: String,
    /// The body's type, and the body.
    pub(super) body: Option<(&'static str, Bytes)>,
    /// What it is about, for messages.
    pub(super) what: &'a str,
}

impl Api {
    /// By the variables that every pod has.
    pub(super) fn in_cluster(account: &Path) -> Result<Self, String> {
        let variable = |name| std::env::var(name).ok().filter(|value: &String| !value.is_empty());
        let missing = "--self-managed needs the variables KUBERNETES_SERVICE_HOST and KUBERNETES_SERVICE_PORT, \
                       which pods have: is this one?";
        let host = variable("KUBERNETES_SERVICE_HOST").ok_or(missing)?;
        let port = variable("KUBERNETES_SERVICE_PORT").and_then(|port| port.parse().ok()).ok_or(missing)?;
        Ok(Self { host, port, account: account.into() })
    }

    /// The cluster's version.
    pub(super) async fn version(&self) -> Result<(u32, u32), ApiError> {
        let what = "the cluster's version";
        let call = Call { method: Method::GET, path: "/version".into(), body: None, what };
        let nonsense = |cause: String| ApiError::Nonsense { what: what.into(), cause };
        let Reply::Done(body) = self.call(call).await? else {
            return Err(nonsense("it is not there".into()));
        };
        let version: serde_json::Value =
            serde_json::from_slice(&body).map_err(|cause| nonsense(cause.to_string()))?;
        let text = |key: &str| version.get(key).and_then(serde_json::Value::as_str).unwrap_or_default();
        super::options::cluster_version(&format!("{}.{}", text("major"), text("minor"))).map_err(nonsense)
    }

    /// One call, within its bound.
    pub(super) async fn call(&self, call: Call<'_>) -> Result<Reply, ApiError> {
        let late = || ApiError::Late(self.at());
        tokio::time::timeout(CALL, self.asked(call)).await.map_err(|_| late())?
    }

    fn at(&self) -> String {
        format!("{}:{}", self.host, self.port)
    }

    async fn asked(&self, call: Call<'_>) -> Result<Reply, ApiError> {
        let stream = self.connect().await?;
        let token = self.file("token").await?;
        let (mut ask, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await?;
        let exchange = async {
            let mut request = Request::builder()
                .method(call.method)
                .uri(call.path)
                .header(header::HOST, self.host_header())
                .header(header::ACCEPT, "application/json");
            if let Some((kind, _)) = &call.body {
                request = request.header(header::CONTENT_TYPE, *kind);
            }
            let bearer = Zeroizing::new(format!("Bearer {}", token.expose().trim()));
            let mut bearer = header::HeaderValue::try_from(bearer.as_str()).map_err(|_| {
                let source = std::io::Error::other("it is no token");
                ApiError::Account { path: self.account.join("token"), source }
            })?;
            bearer.set_sensitive(true);
            let body = call.body.map(|(_, body)| body).unwrap_or_default();
            let nonsense =
                |cause: http::Error| ApiError::Nonsense { what: call.what.into(), cause: cause.to_string() };
            let request =
                request.header(header::AUTHORIZATION, bearer).body(Full::new(body)).map_err(nonsense)?;
            let response = ask.send_request(request).await?;
            let status = response.status();
            Ok::<_, ApiError>((status, collect(response.into_body()).await?))
        };
        // The connection is driven here, so that no task of it outlives the call. One that has ended has left
        // all that it read behind.
        let mut exchange = std::pin::pin!(exchange);
        let (status, body) = tokio::select! {
            said = &mut exchange => said?,
            _ = connection => exchange.await?,
        };
        reply(status, body, call.what)
    }

    /// The host, which may be an IPv6 address, as a header has it.
    fn host_header(&self) -> String {
        let host = if self.host.contains(':') { format!("[{}]", self.host) } else { self.host.clone() };
        format!("{host}:{}", self.port)
    }

    async fn connect(&self) -> Result<tokio_rustls::client::TlsStream<TcpStream>, ApiError> {
        let ca = self.file("ca.crt").await?;
        let no_ca = || ApiError::NoCa(self.account.join("ca.crt"));
        let mut roots = rustls::RootCertStore::empty();
        for certificate in CertificateDer::pem_slice_iter(ca.expose().as_bytes()) {
            roots.add(certificate.map_err(|_| no_ca())?)?;
        }
        if roots.is_empty() {
            return Err(no_ca());
        }
        let config = rustls::ClientConfig::builder_with_provider(Arc::new(provider()))
            .with_safe_default_protocol_versions()?
            .with_root_certificates(roots)
            .with_no_client_auth();
        let name = ServerName::try_from(self.host.clone()).map_err(|_| ApiError::Host(self.host.clone()))?;
        let unreachable = |source| ApiError::Unreachable { at: self.at(), source };
        let stream = TcpStream::connect((self.host.as_str(), self.port)).await.map_err(unreachable)?;
        TlsConnector::from(Arc::new(config)).connect(name, stream).await.map_err(unreachable)
    }

    async fn file(&self, name: &str) -> Result<Secret, ApiError> {
        let path = self.account.join(name);
        let text = tokio::fs::read_to_string(&path).await.and_then(|text| {
            let text = Zeroizing::new(text);
            if text.len() > LARGEST { Err(std::io::Error::other("it is too large")) } else { Ok(text) }
        });
        match text {
            Ok(mut text) => Ok(Secret::new(std::mem::take(&mut *text))),
            Err(source) => Err(ApiError::Account { path, source }),
        }
    }
}

async fn collect(mut body: hyper::body::Incoming) -> Result<Zeroizing<Vec<u8>>, ApiError> {
    let mut all = Zeroizing::new(Vec::with_capacity(64 * 1024));
    while let Some(frame) = body.frame().await {
        let Ok(data) = frame?.into_data() else { continue };
        if all.len() + data.len() > LONGEST {
            return Err(ApiError::TooLong);
        }
        all.extend_from_slice(&data);
    }
    Ok(all)
}

fn reply(status: StatusCode, body: Zeroizing<Vec<u8>>, what: &str) -> Result<Reply, ApiError> {
    match status {
        status if status.is_success() => Ok(Reply::Done(body)),
        StatusCode::NOT_FOUND => Ok(Reply::Missing),
        StatusCode::CONFLICT => Ok(Reply::Conflict),
        status => {
            let said: Option<serde_json::Value> = serde_json::from_slice(&body).ok();
            let message = said.as_ref().and_then(|said| said.get("message")?.as_str());
            let message = super::values::shown(message.unwrap_or("no message"));
            Err(ApiError::Refused { what: what.into(), status, message })
        }
    }
}

//! A Kubernetes API, as far as a self-managed certificate asks it: one Secret, one webhook configuration, over
//! TLS, with versions that conflict.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use http::{Method, Request, Response, StatusCode};
use http_body_util::{BodyExt as _, Full};
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use rcgen::{CertificateParams, KeyPair, SanType};
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use serde_json::{Value, json};
use tokio::net::TcpListener;

pub struct State {
    pub secret: Option<Value>,
    pub configuration: Option<Value>,
    /// What the API takes.
    pub token: String,
    /// It hangs up.
    pub away: bool,
    /// What it says to every call, if not what it should.
    pub refuses: Option<StatusCode>,
    /// So many writes to come find that somebody else was first.
    pub races: usize,
    pub minor: &'static str,
    /// Methods and paths, in order.
    pub calls: Vec<String>,
    version: u64,
}

pub struct Cluster {
    at: SocketAddr,
    /// The service account's files.
    account: tempfile::TempDir,
    state: Arc<Mutex<State>>,
    serving: tokio::task::JoinHandle<()>,
}

impl Drop for Cluster {
    fn drop(&mut self) {
        self.serving.abort();
    }
}

fn webhook(name: &str, service: &str) -> Value {
    json!({
        "name": name,
        "clientConfig": { "service": { "namespace": "lessor", "name": service, "path": "/inject" } },
        "rules": [{ "apiGroups": [""], "apiVersions": ["v1"], "resources": ["pods"], "operations": ["CREATE"] }],
    })
}

impl Cluster {
    pub async fn start() -> Self {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::default();
        params.subject_alt_names = vec![SanType::IpAddress([127, 0, 0, 1].into())];
        let certificate = params.self_signed(&key).unwrap();
        let account = tempfile::tempdir().unwrap();
        std::fs::write(account.path().join("ca.crt"), certificate.pem()).unwrap();
        std::fs::write(account.path().join("token"), "token-1\n").unwrap();
        let tls = rustls::ServerConfig::builder_with_provider(Arc::new(
            rustls::crypto::aws_lc_rs::default_provider(),
        ))
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(
            vec![certificate.der().clone()],
            PrivateKeyDer::from_pem_slice(key.serialize_pem().as_bytes()).unwrap(),
        )
        .unwrap();
        let configuration = json!({
            "apiVersion": "admissionregistration.k8s.io/v1", "kind": "MutatingWebhookConfiguration",
            "metadata": { "name": "lessor", "resourceVersion": "1" },
            "webhooks": [
                webhook("pods.lessor.dev", "injector"),
                webhook("other.example.test", "somebody-elses"),
                webhook("namespaces.lessor.dev", "injector"),
            ],
        });
        let state = Arc::new(Mutex::new(State {
            secret: None,
            configuration: Some(configuration),
            token: "token-1".into(),
            away: false,
            refuses: None,
            races: 0,
            minor: "33",
            calls: Vec::new(),
            version: 1,
        }));
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let at = listener.local_addr().unwrap();
        let acceptor = tokio_rustls::TlsAcceptor::from(Arc::new(tls));
        let serving = tokio::spawn(accept(listener, acceptor, state.clone()));
        Self { at, account, state, serving }
    }

    pub fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }

    pub fn args(&self) -> Vec<String> {
        let account = self.account.path().display();
        [
            "--self-managed".to_owned(),
            "--namespace=lessor".into(),
            "--service=injector".into(),
            "--tls-secret=injector-tls".into(),
            "--webhook-configuration=lessor".into(),
            format!("--service-account={account}"),
        ]
        .into()
    }

    pub fn env(&self) -> Vec<(&'static str, String)> {
        vec![
            ("KUBERNETES_SERVICE_HOST", self.at.ip().to_string()),
            ("KUBERNETES_SERVICE_PORT", self.at.port().to_string()),
        ]
    }

    /// The kubelet brings a new token, and the API takes no other.
    pub fn change_token(&self, token: &str) {
        std::fs::write(self.account.path().join("token"), token).unwrap();
        self.state().token = token.into();
    }

    /// What a webhook trusts.
    pub fn bundle(&self, webhook: usize) -> Vec<CertificateDer<'static>> {
        let state = self.state();
        let configuration = state.configuration.as_ref().unwrap();
        let bundle =
            configuration["webhooks"][webhook]["clientConfig"]["caBundle"].as_str().unwrap_or_default();
        certificates(&STANDARD.decode(bundle).unwrap())
    }

    /// What the Secret holds there.
    pub fn held(&self, key: &str) -> String {
        let state = self.state();
        let text = state.secret.as_ref().and_then(|secret| secret["data"][key].as_str()).unwrap_or_default();
        String::from_utf8(STANDARD.decode(text).unwrap()).unwrap()
    }

    pub fn roots(&self) -> Vec<CertificateDer<'static>> {
        certificates(self.held("ca.crt").as_bytes())
    }
}

pub fn certificates(pem: &[u8]) -> Vec<CertificateDer<'static>> {
    CertificateDer::pem_slice_iter(pem).map(Result::unwrap).collect()
}

async fn accept(listener: TcpListener, acceptor: tokio_rustls::TlsAcceptor, state: Arc<Mutex<State>>) {
    loop {
        let (stream, _) = listener.accept().await.unwrap();
        let (acceptor, state) = (acceptor.clone(), state.clone());
        if state.lock().unwrap().away {
            continue;
        }
        tokio::spawn(async move {
            let Ok(stream) = acceptor.accept(stream).await else { return };
            let service = service_fn(move |request| {
                let state = state.clone();
                async move { Ok::<_, std::convert::Infallible>(answer(&state, request).await) }
            });
            let _ = hyper::server::conn::http1::Builder::new()
                .serve_connection(TokioIo::new(stream), service)
                .await;
        });
    }
}

async fn answer(state: &Mutex<State>, request: Request<Incoming>) -> Response<Full<Bytes>> {
    let (parts, body) = request.into_parts();
    let body = body.collect().await.map(|body| body.to_bytes()).unwrap_or_default();
    let body: Value = serde_json::from_slice(&body).unwrap_or_default();
    let mut state = state.lock().unwrap();
    state.calls.push(format!("{} {}", parts.method, parts.uri.path()));
    let bearer = format!("Bearer {}", state.token.trim());
    let said = if parts.headers.get("authorization").is_none_or(|given| given.as_bytes() != bearer.as_bytes())
    {
        Err(StatusCode::UNAUTHORIZED)
    } else if let Some(status) = state.refuses {
        Err(status)
    } else {
        state.answer(&parts.method, parts.uri.path(), parts.headers.get("content-type"), body)
    };
    let (status, json) = match said {
        Ok(json) => (StatusCode::OK, json),
        Err(status) => (status, json!({ "kind": "Status", "message": format!("the double says {status}") })),
    };
    let body = Full::new(Bytes::from(json.to_string()));
    Response::builder().status(status).header("content-type", "application/json").body(body).unwrap()
}

const SECRETS: &str = "/api/v1/namespaces/lessor/secrets";
const ONE: &str = "/api/v1/namespaces/lessor/secrets/injector-tls";
const CONFIGURATION: &str = "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations/lessor";

impl State {
    fn next(&mut self) -> Value {
        self.version += 1;
        json!(self.version.to_string())
    }

    /// Whether somebody else was first, who changed nothing but the version, or made an empty Secret.
    fn loses(&mut self, path: &str) -> bool {
        if self.races == 0 {
            return false;
        }
        self.races -= 1;
        let version = self.next();
        if path == CONFIGURATION {
            self.configuration.as_mut().unwrap()["metadata"]["resourceVersion"] = version;
        } else {
            let empty =
                json!({ "apiVersion": "v1", "kind": "Secret", "metadata": { "name": "injector-tls" } });
            self.secret.get_or_insert(empty)["metadata"]["resourceVersion"] = version;
        }
        true
    }

    fn answer(
        &mut self,
        method: &Method,
        path: &str,
        kind: Option<&http::HeaderValue>,
        mut body: Value,
    ) -> Result<Value, StatusCode> {
        match (method.as_str(), path) {
            ("GET", "/version") => Ok(json!({ "major": "1", "minor": self.minor, "gitVersion": "v1" })),
            ("GET", ONE) => self.secret.clone().ok_or(StatusCode::NOT_FOUND),
            ("GET", CONFIGURATION) => self.configuration.clone().ok_or(StatusCode::NOT_FOUND),
            ("POST", SECRETS) => {
                if self.loses(path) || self.secret.is_some() {
                    return Err(StatusCode::CONFLICT);
                }
                assert_eq!(body["metadata"]["name"], "injector-tls");
                body["metadata"]["resourceVersion"] = self.next();
                self.secret = Some(body.clone());
                Ok(body)
            }
            ("PUT", ONE) => {
                let lost = self.loses(path);
                let now = self.secret.as_ref().ok_or(StatusCode::NOT_FOUND)?;
                if lost || now["metadata"]["resourceVersion"] != body["metadata"]["resourceVersion"] {
                    return Err(StatusCode::CONFLICT);
                }
                body["metadata"]["resourceVersion"] = self.next();
                self.secret = Some(body.clone());
                Ok(body)
            }
            ("PATCH", CONFIGURATION) => {
                assert_eq!(kind.unwrap(), "application/strategic-merge-patch+json");
                let lost = self.loses(path);
                let version = self.next();
                let now = self.configuration.as_mut().ok_or(StatusCode::NOT_FOUND)?;
                if lost || now["metadata"]["resourceVersion"] != body["metadata"]["resourceVersion"] {
                    return Err(StatusCode::CONFLICT);
                }
                now["metadata"]["resourceVersion"] = version;
                let webhooks = now["webhooks"].as_array_mut().unwrap();
                for patch in body["webhooks"].as_array().unwrap() {
                    // Merged by name, as the list's key has it.
                    let of = webhooks.iter_mut().find(|webhook| webhook["name"] == patch["name"]).unwrap();
                    of["clientConfig"]["caBundle"] = patch["clientConfig"]["caBundle"].clone();
                }
                Ok(now.clone())
            }
            // Nothing else is in the injector's rights.
            _ => Err(StatusCode::FORBIDDEN),
        }
    }
}

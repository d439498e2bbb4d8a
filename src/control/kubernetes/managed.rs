//! A certificate that the injector makes and renews by itself, together with its other replicas.
//!
//! One named Secret has it; one named MutatingWebhookConfiguration says what API servers trust. The order is what
//! keeps every call good: first the Secret, then the configuration holds the Secret's CAs beside those that it
//! has, then the certificate is served, and only much later do CAs go that nobody needs. A replica is ready when
//! the chain that it serves is one that the configuration, as it was last read, trusts.
//!
//! Nobody leads: whoever finds something due writes it, with the version that it read, and reads again where
//! another was first. While the API is away, what is served stays served.

use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use http::Method;
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject as _;
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;

use super::certificates::{Current, state_of, validity};
use super::cluster::{Api, ApiError, Call, Reply};
use super::health::Readiness;
use super::mint::Terms;
use super::shared::{Object, Shared, is_trusted};

/// A CA's certificate.
type Root = CertificateDer<'static>;

/// How often a lost race is run again before the next look.
const TRIES: u32 = 8;
/// The longest wait after failures in a row.
const LONGEST_WAIT: Duration = Duration::from_secs(30);
/// How long API servers may take to see a changed configuration.
const SETTLE: Duration = Duration::from_secs(2);
/// How long the configuration keeps CAs that are in no Secret any more: other replicas may serve by them.
const KEEP: Duration = Duration::from_mins(10);
/// CAs in a configuration at most; a bundle that only grows would end by being refused.
const MOST: usize = 16;
const JSON: &str = "application/json";
const PATCH: &str = "application/strategic-merge-patch+json";

/// Why a round ended early.
#[derive(Debug, thiserror::Error)]
enum RoundError {
    #[error(transparent)]
    Api(#[from] ApiError),
    #[error("a certificate could not be made")]
    Mint(#[from] rcgen::Error),
    #[error(transparent)]
    Pair(#[from] super::certificates::CertificateError),
    #[error("other replicas were first {TRIES} times in a row")]
    Races,
    #[error("MutatingWebhookConfiguration {0} is not there; is it installed?")]
    NoConfiguration(String),
    #[error("MutatingWebhookConfiguration {0} has no webhook that calls Service {1}/{2}")]
    NoWebhook(String, String, String),
    #[error("what is served is not yet what the webhook configuration trusts")]
    Unmatched,
}

/// Keeps the certificate.
pub(super) struct Managed {
    pub(super) api: Api,
    pub(super) namespace: String,
    pub(super) service: String,
    pub(super) secret: String,
    pub(super) configuration: String,
    pub(super) terms: Terms,
    pub(super) current: Arc<Current>,
    pub(super) ready: Arc<Readiness>,
    pub(super) every: Duration,
}

/// What a replica remembers between rounds.
#[derive(Default)]
struct Memory {
    /// The CAs of the Secret, and since when they are these.
    roots: Option<(Vec<Root>, Instant)>,
    /// The text of the certificate that is served.
    leaf: Option<String>,
    /// The last round that could read found it good.
    matched: bool,
    failures: u32,
    told: Option<String>,
}

impl Managed {
    /// Until told to stop.
    pub(super) async fn keep(self, stop: CancellationToken) {
        let mut memory = Memory::default();
        loop {
            let ended = tokio::select! {
                () = stop.cancelled() => return,
                ended = self.round(&mut memory) => ended,
            };
            let wait = self.tell(ended, &mut memory);
            tokio::select! {
                () = stop.cancelled() => return,
                () = tokio::time::sleep(wait) => {}
            }
        }
    }

    /// Says how a round ended; how long to wait for the next.
    fn tell(&self, ended: Result<(), RoundError>, memory: &mut Memory) -> Duration {
        let why = match ended {
            Ok(()) => {
                (memory.matched, memory.failures, memory.told) = (true, 0, None);
                self.ready.set(state_of(&self.current, None));
                return self.every;
            }
            Err(why) => why,
        };
        // Who cannot read knows nothing new; what was read says what is.
        memory.matched &= matches!(why, RoundError::Api(_) | RoundError::Races);
        let why = crate::run::with_causes(&why);
        if memory.told.as_ref() != Some(&why) {
            tracing::warn!("the webhook's certificate is looked after again soon: {why}");
            memory.told = Some(why.clone());
        }
        let state = if memory.matched { state_of(&self.current, Some(&why)) } else { Err(why) };
        self.ready.set(state);
        memory.failures += 1;
        // Replicas that failed together must not come again together.
        let longer = self.every.saturating_mul(1 << memory.failures.min(8)).min(LONGEST_WAIT.max(self.every));
        longer.mul_f64(rand::random_range(0.5..1.0))
    }

    async fn round(&self, memory: &mut Memory) -> Result<(), RoundError> {
        let shared = self.shared().await?;
        let roots = shared.roots();
        if memory.roots.as_ref().is_none_or(|(known, _)| *known != roots) {
            memory.roots = Some((roots.clone(), Instant::now()));
        }
        let keep = KEEP.min(self.terms.leaf / 4);
        let settled = memory.roots.as_ref().is_some_and(|(_, since)| since.elapsed() > keep);
        let bundles = self.publish(&roots, settled).await?;
        if memory.leaf.as_ref() != Some(&shared.leaf) {
            if self.current.get().is_some() {
                tokio::time::sleep(SETTLE.min(self.terms.leaf / 20)).await;
            }
            self.current.put(shared.served(SystemTime::now())?);
            memory.leaf = Some(shared.leaf);
            tracing::info!("the Secret's certificate is served");
        }
        let served = self.current.get().ok_or(RoundError::Unmatched)?;
        let trusted = |bundle: &Vec<_>| is_trusted(served.chain(), bundle, &self.name(), SystemTime::now());
        if bundles.iter().all(trusted) { Ok(()) } else { Err(RoundError::Unmatched) }
    }

    /// The name by which API servers ask for a Service.
    fn name(&self) -> String {
        format!("{}.{}.svc", self.service, self.namespace)
    }

    /// What the Secret holds, once nothing is due in it.
    async fn shared(&self) -> Result<Shared, RoundError> {
        let all = format!("/api/v1/namespaces/{}/secrets", self.namespace);
        let one = format!("{all}/{}", self.secret);
        let what = format!("Secret {}/{}", self.namespace, self.secret);
        let names = [self.name(), format!("{}.cluster.local", self.name())];
        for _ in 0..TRIES {
            let call = Call { method: Method::GET, path: one.clone(), body: None, what: &what };
            let (object, before) = match self.api.call(call).await? {
                Reply::Done(body) => {
                    let object: Object = serde_json::from_slice(&body).map_err(|cause| {
                        ApiError::Nonsense { what: what.clone(), cause: cause.to_string() }
                    })?;
                    let shared = Shared::of(&object);
                    (Some(object), shared)
                }
                Reply::Missing | Reply::Conflict => (None, None),
            };
            let Some(due) = Shared::due(before.as_ref(), &names, self.terms, SystemTime::now())? else {
                // Nothing is due only where something is there.
                return before.ok_or(RoundError::Unmatched);
            };
            let (method, path) = if object.is_some() { (Method::PUT, &one) } else { (Method::POST, &all) };
            let object = object.unwrap_or_else(|| Object::new(&self.namespace, &self.secret));
            let body = Some((JSON, object.with(&due)));
            let call = Call { method, path: path.clone(), body, what: &what };
            if let Reply::Done(_) = self.api.call(call).await? {
                tracing::info!(cas = due.authorities.len(), "{what} is written");
                return Ok(due);
            }
        }
        Err(RoundError::Races)
    }

    /// Has the configuration trust these; what each webhook of ours in it trusts then.
    async fn publish(&self, roots: &[Root], settled: bool) -> Result<Vec<Vec<Root>>, RoundError> {
        for _ in 0..TRIES {
            let found = self.configuration().await?;
            let webhooks = self.webhooks(&found);
            if webhooks.is_empty() {
                let (namespace, service) = (self.namespace.clone(), self.service.clone());
                return Err(RoundError::NoWebhook(self.configuration.clone(), namespace, service));
            }
            let wanted: Vec<_> = webhooks
                .iter()
                .map(|(_, bundle)| wanted(bundle, roots, settled, SystemTime::now()))
                .collect();
            if webhooks.iter().zip(&wanted).all(|((_, bundle), wanted)| bundle == wanted) {
                return Ok(wanted);
            }
            let changed = webhooks.iter().zip(&wanted).map(|((name, _), wanted)| {
                json!({ "name": name, "clientConfig": { "caBundle": STANDARD.encode(pem_of(wanted)) } })
            });
            // Merged by name, and only into the version that was read.
            let change = json!({
                "metadata": { "resourceVersion": found.pointer("/metadata/resourceVersion") },
                "webhooks": changed.collect::<Vec<_>>(),
            });
            let body = Some((PATCH, change.to_string().into()));
            if let Reply::Done(_) = self.about_configuration(Method::PATCH, body).await? {
                let cas = wanted.first().map_or(0, Vec::len);
                tracing::info!(cas, "MutatingWebhookConfiguration {} has the CA", self.configuration);
                return Ok(wanted);
            }
        }
        Err(RoundError::Races)
    }

    async fn configuration(&self) -> Result<Value, RoundError> {
        let name = || self.configuration.clone();
        let Reply::Done(body) = self.about_configuration(Method::GET, None).await? else {
            return Err(RoundError::NoConfiguration(name()));
        };
        let nonsense =
            |cause: serde_json::Error| ApiError::Nonsense { what: name(), cause: cause.to_string() };
        Ok(serde_json::from_slice(&body).map_err(nonsense)?)
    }

    async fn about_configuration(
        &self,
        method: Method,
        body: Option<(&'static str, bytes::Bytes)>,
    ) -> Result<Reply, ApiError> {
        let all = "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations";
        let path = format!("{all}/{}", self.configuration);
        let what = format!("MutatingWebhookConfiguration {}", self.configuration);
        self.api.call(Call { method, path, body, what: &what }).await
    }

    /// The webhooks that call our Service: the name of each, and what it trusts.
    fn webhooks(&self, configuration: &Value) -> Vec<(String, Vec<Root>)> {
        let all = configuration.get("webhooks").and_then(Value::as_array);
        let ours = all.into_iter().flatten().filter(|webhook| {
            let of = |key: &str| webhook.pointer(&format!("/clientConfig/service/{key}"));
            let is = |key, value: &str| of(key).and_then(Value::as_str) == Some(value);
            is("name", &self.service) && is("namespace", &self.namespace)
        });
        let read = ours.filter_map(|webhook| {
            let bundle = webhook.pointer("/clientConfig/caBundle").and_then(Value::as_str);
            let pem = STANDARD.decode(bundle.unwrap_or_default()).unwrap_or_default();
            let read = CertificateDer::pem_slice_iter(&pem).filter_map(Result::ok).collect();
            Some((webhook.get("name")?.as_str()?.to_owned(), read))
        });
        read.collect()
    }
}

/// What a webhook should trust: the Secret's CAs, and until all is settled those that it trusts already.
fn wanted(present: &[Root], roots: &[Root], settled: bool, now: SystemTime) -> Vec<Root> {
    let valid =
        |certificate: &&Root| validity(certificate).is_some_and(|(begin, end)| (begin..end).contains(&now));
    let others = present.iter().filter(|present| !roots.contains(present) && !settled).filter(valid);
    let mut all: Vec<_> = others.cloned().collect();
    let room = MOST.saturating_sub(roots.len());
    all.drain(..all.len().saturating_sub(room));
    all.extend(roots.iter().cloned());
    all
}

fn pem_of(certificates: &[CertificateDer<'_>]) -> String {
    certificates.iter().fold(String::new(), |mut all, certificate| {
        all.push_str("-----BEGIN CERTIFICATE-----\n");
        let text = STANDARD.encode(certificate);
        for line in text.as_bytes().chunks(64) {
            all.push_str(&String::from_utf8_lossy(line));
            all.push('\n');
        }
        all.push_str("-----END CERTIFICATE-----\n");
        all
    })
}

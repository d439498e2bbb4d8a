//! `AdmissionReview` as `admission.k8s.io/v1` has it, as far as it is needed; the pod itself stays as it came.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::patch::Patch;

/// The version that is served.
const VERSION: &str = "admission.k8s.io/v1";
const KIND: &str = "AdmissionReview";
/// What the API server passes on of one warning; it cuts longer ones by itself.
const WARNING: usize = 250;
/// How many of them: together they may be 4 KiB.
const WARNINGS: usize = 15;

/// Why there is nothing to answer. Each is the sender's mistake, so it is told in the answer's body.
#[derive(Debug, thiserror::Error)]
pub enum BadReview {
    /// Not JSON, or a field of another type.
    #[error("the body cannot be read as an AdmissionReview: {0}")]
    Unreadable(String),
    /// Another kind or version.
    #[error("the body is {0}; lessor reads {VERSION} {KIND} (set admissionReviewVersions: [\"v1\"])")]
    Unknown(String),
    /// No request in it.
    #[error("the AdmissionReview has no request with a uid, so nothing can be answered")]
    Empty,
}

/// What is asked.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Request {
    /// What the answer must name.
    pub uid: String,
    /// The type of `object`.
    #[serde(default)]
    pub kind: Kind,
    /// What is asked of it; a pod's `exec`, say.
    #[serde(default)]
    pub sub_resource: Option<String>,
    /// CREATE, for us.
    #[serde(default)]
    pub operation: String,
    /// Where it will be; the object itself may not say so yet.
    #[serde(default)]
    pub namespace: String,
    /// Nothing will be kept.
    #[serde(default)]
    pub dry_run: Option<bool>,
    /// The pod.
    #[serde(default)]
    pub object: Value,
}

/// A type's name.
#[derive(Debug, Default, Deserialize)]
pub struct Kind {
    /// Empty for the core group.
    #[serde(default)]
    pub group: String,
    /// `Pod`.
    #[serde(default)]
    pub kind: String,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Envelope {
    #[serde(default)]
    api_version: String,
    #[serde(default)]
    kind: String,
    #[serde(default)]
    request: Option<Request>,
}

impl Request {
    /// Reads a whole AdmissionReview.
    pub fn read(body: &[u8]) -> Result<Self, BadReview> {
        let unreadable = |cause: serde_json::Error| BadReview::Unreadable(cause.to_string());
        let envelope: Envelope = serde_json::from_slice(body).map_err(unreadable)?;
        if envelope.kind != KIND || envelope.api_version != VERSION {
            let said = |text: &str| if text.is_empty() { "?".into() } else { super::values::shown(text) };
            let (version, kind) = (said(&envelope.api_version), said(&envelope.kind));
            return Err(BadReview::Unknown(format!("{version} {kind}")));
        }
        envelope.request.filter(|request| !request.uid.is_empty()).ok_or(BadReview::Empty)
    }

    /// As if this pod were just created.
    pub fn of_pod(pod: Value) -> Self {
        let namespace = pod.pointer("/metadata/namespace").and_then(Value::as_str).unwrap_or_default();
        Self {
            uid: "a-pod-from-a-file".into(),
            kind: Kind { group: String::new(), kind: "Pod".into() },
            operation: "CREATE".into(),
            namespace: namespace.into(),
            object: pod,
            ..Self::default()
        }
    }

    /// Whether it is about a pod that is being created.
    pub(super) fn creates_pod(&self) -> bool {
        self.operation == "CREATE"
            && self.kind.kind == "Pod"
            && self.kind.group.is_empty()
            && self.sub_resource.as_deref().unwrap_or_default().is_empty()
    }
}

/// What was decided.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// The pod gets a sidecar.
    Injected,
    /// It has one; containers that were added since got their environment, or nothing was to do.
    Completed,
    /// It is left alone.
    Skipped,
    /// It is refused.
    Denied,
}

impl Verdict {
    /// As it stands in logs and metrics.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Injected => "injected",
            Self::Completed => "completed",
            Self::Skipped => "skipped",
            Self::Denied => "denied",
        }
    }
}

/// The answer to one request.
#[derive(Debug)]
pub struct Answer {
    /// What was decided.
    pub verdict: Verdict,
    /// JSON Patch operations; `None` where nothing changes.
    pub patch: Option<Value>,
    /// What the user sees beside the result of his command.
    pub warnings: Vec<String>,
    /// Why the pod is refused.
    pub refusal: Option<String>,
}

impl Answer {
    pub(super) fn new(verdict: Verdict, patch: Patch, warnings: Vec<String>) -> Self {
        let patch = (!patch.is_empty()).then(|| patch.into_value());
        Self { verdict, patch, warnings: bounded(warnings), refusal: None }
    }

    pub(super) fn skipped(warning: Option<String>) -> Self {
        Self::new(Verdict::Skipped, Patch::default(), warning.into_iter().collect())
    }

    pub(super) fn denied(why: String) -> Self {
        Self { refusal: Some(why), ..Self::new(Verdict::Denied, Patch::default(), Vec::new()) }
    }

    /// The AdmissionReview that is sent.
    pub fn to_review(&self, uid: &str) -> Value {
        let mut response = json!({ "uid": uid, "allowed": self.refusal.is_none() });
        if let Some(patch) = &self.patch {
            response["patchType"] = "JSONPatch".into();
            response["patch"] = STANDARD.encode(patch.to_string()).into();
        }
        if !self.warnings.is_empty() {
            response["warnings"] = json!(self.warnings);
        }
        if let Some(why) = &self.refusal {
            let message = format!("lessor: {why}");
            response["status"] =
                json!({ "status": "Failure", "reason": "Invalid", "code": 422, "message": message });
        }
        json!({ "apiVersion": VERSION, "kind": KIND, "response": response })
    }
}

/// As long and as many as the API server passes on.
fn bounded(mut warnings: Vec<String>) -> Vec<String> {
    let more = warnings.len().saturating_sub(WARNINGS);
    warnings.truncate(WARNINGS);
    for warning in &mut warnings {
        warning.insert_str(0, "lessor: ");
        let end = (0..=WARNING.min(warning.len())).rev().find(|end| warning.is_char_boundary(*end));
        warning.truncate(end.unwrap_or_default());
    }
    if more > 0 {
        warnings.push(format!("lessor: and {more} more of the kind"));
    }
    warnings
}

//! `/inject`: a review in, its answer out. Whatever else comes gets a clear word, and holds no memory for long.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, Method, Request, Response, StatusCode, header};
use http_body_util::{BodyExt as _, Full};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::health::{Meters, page};
use super::options::LONGEST;
use super::values::shown;
use super::{Defaults, answer, pod_name, review};

/// Where reviews are taken.
const PATH: &str = "/inject";
/// The bound of a whole body.
const BODY: Duration = Duration::from_secs(10);
/// Bytes of bodies held at once, in KiB: a pod has a few, so this is hundreds of reviews, or eight of the longest.
const HELD: usize = 64 * 1024;

/// Answers reviews.
pub(super) struct Webhook {
    defaults: Defaults,
    meters: Arc<Meters>,
    held: Arc<Semaphore>,
}

/// Why a request is no review.
struct Refusal(StatusCode, String);

impl Webhook {
    pub(super) fn new(defaults: Defaults, meters: Arc<Meters>) -> Self {
        Self { defaults, meters, held: Arc::new(Semaphore::new(HELD)) }
    }

    pub(super) async fn answer<B>(&self, request: Request<B>) -> Response<Full<Bytes>>
    where
        B: http_body::Body<Data = Bytes> + Unpin,
    {
        match self.review(request).await {
            Ok(json) => {
                let mut response = Response::new(Full::new(Bytes::from(json)));
                let kind = header::HeaderValue::from_static("application/json");
                response.headers_mut().insert(header::CONTENT_TYPE, kind);
                response
            }
            Err(Refusal(status, why)) => {
                self.meters.refused(status);
                tracing::warn!(status = status.as_u16(), "a request was no review: {why}");
                page(status, format!("lessor: {why}\n"))
            }
        }
    }

    async fn review<B>(&self, request: Request<B>) -> Result<String, Refusal>
    where
        B: http_body::Body<Data = Bytes> + Unpin,
    {
        if request.uri().path() != PATH {
            return Err(Refusal(StatusCode::NOT_FOUND, format!("there is POST {PATH}")));
        }
        if request.method() != Method::POST {
            return Err(Refusal(StatusCode::METHOD_NOT_ALLOWED, format!("there is POST {PATH}")));
        }
        if !is_json(request.headers()) {
            let why = "an AdmissionReview has content-type application/json".into();
            return Err(Refusal(StatusCode::UNSUPPORTED_MEDIA_TYPE, why));
        }
        let length =
            request.headers().get(header::CONTENT_LENGTH).and_then(|v| v.to_str().ok()?.parse().ok());
        if length.is_some_and(|length: u64| length > LONGEST as u64) {
            return Err(too_long());
        }
        let body = tokio::time::timeout(BODY, self.collect(request.into_body())).await;
        let late = || Refusal(StatusCode::REQUEST_TIMEOUT, format!("no whole body came within {BODY:?}"));
        let (body, _held) = body.map_err(|_| late())??;
        let read = review::Request::read(&body);
        let request = read.map_err(|why| Refusal(StatusCode::BAD_REQUEST, why.to_string()))?;
        drop(body);
        let answer = answer(&self.defaults, &request);
        self.meters.reviewed(answer.verdict.as_str());
        tracing::info!(
            namespace = shown(&request.namespace),
            pod = shown(&pod_name(&request)),
            uid = shown(&request.uid),
            verdict = answer.verdict.as_str(),
            dry_run = request.dry_run.unwrap_or_default(),
            warnings = answer.warnings.len(),
            why = answer.refusal,
            "reviewed"
        );
        Ok(answer.to_review(&request.uid).to_string())
    }

    /// The body, with its share of what may be held.
    async fn collect<B>(&self, mut body: B) -> Result<(Vec<u8>, OwnedSemaphorePermit), Refusal>
    where
        B: http_body::Body<Data = Bytes> + Unpin,
    {
        let (mut all, mut held) = (Vec::new(), self.share(1)?);
        while let Some(frame) = body.frame().await {
            let broken = |_| Refusal(StatusCode::BAD_REQUEST, "the body broke off".into());
            let Ok(data) = frame.map_err(broken)?.into_data() else { continue };
            if all.len() + data.len() > LONGEST {
                return Err(too_long());
            }
            all.extend_from_slice(&data);
            // Merging cannot fail: both are of one semaphore.
            held.merge(self.share(all.len().div_ceil(1024).saturating_sub(held.num_permits()))?);
        }
        Ok((all, held))
    }

    fn share(&self, kib: usize) -> Result<OwnedSemaphorePermit, Refusal> {
        let busy = || Refusal(StatusCode::SERVICE_UNAVAILABLE, "too many reviews at once; try again".into());
        let kib = u32::try_from(kib).map_err(|_| busy())?;
        self.held.clone().try_acquire_many_owned(kib).map_err(|_| busy())
    }
}

fn too_long() -> Refusal {
    let why = format!("the body is longer than {} MiB, which no review of a pod is", LONGEST >> 20);
    Refusal(StatusCode::PAYLOAD_TOO_LARGE, why)
}

fn is_json(headers: &HeaderMap) -> bool {
    let kind = headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or_default();
    kind.split(';').next().is_some_and(|kind| kind.trim().eq_ignore_ascii_case("application/json"))
}

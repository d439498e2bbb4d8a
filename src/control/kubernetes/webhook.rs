//! `/inject`: a review in, its answer out. Whatever else comes gets a clear word, and holds no memory for long.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, Method, Request, Response, StatusCode, header};
use http_body_util::BodyExt as _;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::health::{Meters, page};
use super::options::LONGEST;
use super::reply::Reply;
use super::values::shown;
use super::work::{NoWork, Work};
use super::{Answer, BadReview, Defaults, answer, pod_name, review};

/// Where reviews are taken.
const PATH: &str = "/inject";
/// The bound of a whole body.
const BODY: Duration = Duration::from_secs(10);
/// Bytes of bodies, and of answers until they are sent, held at once, in KiB: a pod has a few, so this is hundreds
/// of reviews, or five of the longest.
const HELD: usize = 16 * 1024;

/// Answers reviews.
pub(super) struct Webhook {
    defaults: Arc<Defaults>,
    meters: Arc<Meters>,
    held: Arc<Semaphore>,
    work: Work,
}

/// Why a request is no review.
struct Refusal(StatusCode, String);

impl Webhook {
    pub(super) fn new(defaults: Defaults, meters: Arc<Meters>) -> Self {
        let held = Arc::new(Semaphore::new(HELD));
        Self { defaults: Arc::new(defaults), meters, held, work: Work::default() }
    }

    pub(super) async fn answer<B>(&self, request: Request<B>) -> Response<Reply>
    where
        B: http_body::Body<Data = Bytes> + Unpin,
    {
        match self.review(request).await {
            Ok(reply) => {
                let mut response = Response::new(reply);
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

    async fn review<B>(&self, request: Request<B>) -> Result<Reply, Refusal>
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
        let (body, held) = body.map_err(|_| late())??;
        let defaults = self.defaults.clone();
        // What is held goes along: a decision that is late holds its body all the same.
        let done = self.work.done(body, move |body| (decided(&defaults, body), held)).await;
        let (decided, held) = done.map_err(|why| not_done(&why))?;
        let (verdict, text) = decided.map_err(|why| Refusal(StatusCode::BAD_REQUEST, why.to_string()))?;
        self.meters.reviewed(verdict);
        drop(held); // the body is gone; now it is the answer
        let held = self.share(text.len().div_ceil(1024))?;
        Ok(Reply::of(text).holding(held))
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

/// The verdict, and the whole answer.
fn decided(defaults: &Defaults, body: &[u8]) -> Result<(&'static str, String), BadReview> {
    let request = review::Request::read(body)?;
    let answer = answer(defaults, &request);
    tell(&request, &answer);
    Ok((answer.verdict.as_str(), answer.to_review(&request.uid).to_string()))
}

fn tell(request: &review::Request, answer: &Answer) {
    tracing::info!(
        namespace = shown(&request.namespace),
        pod = shown(&pod_name(request)),
        uid = shown(&request.uid),
        verdict = answer.verdict.as_str(),
        dry_run = request.dry_run.unwrap_or_default(),
        warnings = answer.warnings.len(),
        why = answer.refusal,
        "reviewed"
    );
}

fn not_done(why: &NoWork) -> Refusal {
    let status = match why {
        NoWork::Late => StatusCode::SERVICE_UNAVAILABLE,
        NoWork::Broken => StatusCode::INTERNAL_SERVER_ERROR,
        NoWork::TooMany => StatusCode::BAD_REQUEST,
    };
    Refusal(status, why.to_string())
}

fn too_long() -> Refusal {
    let longest = LONGEST >> 20;
    let why =
        format!("the body is longer than {longest} MiB; etcd keeps no object above 1.5 MiB, so no pod is");
    Refusal(StatusCode::PAYLOAD_TOO_LARGE, why)
}

fn is_json(headers: &HeaderMap) -> bool {
    let kind = headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or_default();
    kind.split(';').next().is_some_and(|kind| kind.trim().eq_ignore_ascii_case("application/json"))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a test that fails may panic
mod tests {
    use clap::Parser;
    use http_body_util::Full;

    use super::*;
    use crate::control::kubernetes::Inject;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        inject: Inject,
    }

    fn webhook() -> Webhook {
        let line = Line::try_parse_from(["inject", "--mode=both"]).unwrap();
        Webhook::new(line.inject.defaults(None).unwrap(), Arc::default())
    }

    fn review(padding: usize) -> Request<Full<Bytes>> {
        let env = serde_json::json!([{ "name": "NO_PROXY", "value": "h".repeat(padding) }]);
        let body = serde_json::json!({ "apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": {
            "uid": "u", "kind": { "kind": "Pod" }, "operation": "CREATE",
            "object": { "spec": { "containers": [{ "name": "app", "env": env }] } },
        } });
        let request = Request::post(PATH).header(header::CONTENT_TYPE, "application/json");
        request.body(Full::from(body.to_string())).unwrap()
    }

    #[tokio::test]
    async fn an_answer_counts_as_held_until_it_is_sent() {
        let webhook = webhook();
        let mut kept = Vec::new();
        // Nobody takes these.
        let last = loop {
            let answer = webhook.answer(review(1 << 20)).await;
            if answer.status() != StatusCode::OK || kept.len() > HELD / 1024 {
                break answer;
            }
            kept.push(answer);
        };
        assert_eq!(last.status(), StatusCode::SERVICE_UNAVAILABLE);
        assert!(kept.len() < HELD / 2048, "{} answers of 2 MiB and more are held", kept.len());
        drop((kept, last));
        assert_eq!(webhook.held.available_permits(), HELD);
        let answer = webhook.answer(review(10)).await;
        assert_eq!(answer.status(), StatusCode::OK);
        assert!(webhook.held.available_permits() < HELD);
        answer.into_body().collect().await.unwrap();
        assert_eq!(webhook.held.available_permits(), HELD);
    }
}

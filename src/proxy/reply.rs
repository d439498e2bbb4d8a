//! A provider's answer, read as far as its outcome needs and no further.

use std::time::{Duration, SystemTime};

use bytes::{Bytes, BytesMut};
use http::response::Parts;
use http::{HeaderName, HeaderValue, Response};
use http_body_util::BodyExt as _;
use hyper::body::Incoming;

use crate::config::Provider;
use crate::inject;
use crate::model::{Class, Outcome};
use crate::outcome;

use super::body::InUse;

/// How long a refusal's body may take to come before it is judged by what there is.
const REFUSAL_BODY: Duration = Duration::from_secs(5);

/// An answer's head, what was read of its body, and the rest still to come.
#[derive(Debug)]
pub(super) struct Reply {
    head: Parts,
    ahead: Option<Bytes>,
    rest: Option<Incoming>,
    outcome: Outcome,
}

impl Reply {
    /// An answer that says nothing about a key.
    pub(super) fn unread(answer: Response<Incoming>) -> Self {
        let (head, rest) = answer.into_parts();
        let outcome = Outcome::plain(Class::Success, Some(head.status.as_u16()));
        Self { head, ahead: None, rest: Some(rest), outcome }
    }

    /// Reads the answer's outcome; of its body at most [`outcome::MAX_BODY`], and only where a rule asks.
    pub(super) async fn read(provider: &Provider, answer: Response<Incoming>) -> Self {
        let (head, rest) = answer.into_parts();
        let (ahead, rest) = if outcome::needs_body(provider, head.status) {
            read_ahead(rest).await
        } else {
            (None, Some(rest))
        };
        let seen = ahead.as_deref().unwrap_or_default();
        let outcome = outcome::read(provider, head.status, &head.headers, seen, SystemTime::now());
        Self { head, ahead, rest, outcome }
    }

    pub(super) fn outcome(&self) -> &Outcome {
        &self.outcome
    }

    /// Says whose key answered, if `tell`, and masks that key wherever the provider echoed it.
    pub(super) fn sign(&mut self, in_use: &InUse, tell: bool) {
        let headers = &mut self.head.headers;
        inject::strip_own(headers);
        if let Some(secret) = in_use.secret() {
            inject::mask(headers, secret);
        }
        if tell {
            let id = |text: &str| HeaderValue::from_str(text).ok();
            let key = id(in_use.lease.key().as_str());
            let lease = id(&in_use.lease.id().to_string());
            for (name, value) in [("x-lessor-key", key), ("x-lessor-lease", lease)] {
                if let Some(value) = value {
                    headers.insert(HeaderName::from_static(name), value);
                }
            }
        }
    }

    pub(super) fn into_parts(self) -> (Parts, Option<Bytes>, Option<Incoming>) {
        (self.head, self.ahead, self.rest)
    }
}

/// Up to [`outcome::MAX_BODY`] of a body within [`REFUSAL_BODY`], and what is left of it. A body that
/// breaks off meanwhile is left to break where it is passed on.
async fn read_ahead(mut body: Incoming) -> (Option<Bytes>, Option<Incoming>) {
    let mut seen = BytesMut::new();
    let reading = async {
        while seen.len() < outcome::MAX_BODY {
            match body.frame().await {
                Some(Ok(frame)) => match frame.into_data() {
                    Ok(data) => seen.extend_from_slice(&data),
                    Err(_trailers) => return,
                },
                Some(Err(_)) | None => return,
            }
        }
    };
    // Cancel safe: a frame is either taken in whole or still in the body.
    let _ = tokio::time::timeout(REFUSAL_BODY, reading).await;
    (Some(seen.freeze()), Some(body))
}

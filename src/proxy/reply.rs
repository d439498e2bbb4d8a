//! A provider's answer, read as far as its outcome needs and no further.

use std::time::{Duration, SystemTime};

use bytes::{Bytes, BytesMut};
use http::header::CONNECTION;
use http::response::Parts;
use http::{HeaderMap, HeaderName, HeaderValue, Response, StatusCode};
use http_body::Frame;
use http_body_util::BodyExt as _;
use hyper::body::Incoming;

use crate::config::Provider;
use crate::forward::held::Ahead;
use crate::inject;
use crate::model::{Class, GroupName, LeaseId, Outcome};
use crate::outcome;
use crate::scrub::Filter;

use super::body::InUse;
use super::mask::Mask;

/// Headers that say whose key answered.
const KEY: HeaderName = HeaderName::from_static("x-lessor-key");
const LEASE: HeaderName = HeaderName::from_static("x-lessor-lease");

/// How long a refusal's body may take to come before it is judged by what there is.
const REFUSAL_BODY: Duration = Duration::from_secs(5);

/// An answer's head, what was read of its body, and the rest still to come.
#[derive(Debug)]
pub(super) struct Reply {
    head: Parts,
    ahead: Ahead,
    rest: Option<Incoming>,
    outcome: Outcome,
    /// What masks the key that was used, also where another one was tried later.
    mask: Option<Mask>,
}

impl Reply {
    /// An answer that says nothing about a key.
    pub(super) fn unread(answer: Response<Incoming>) -> Self {
        let (head, rest) = answer.into_parts();
        let outcome = Outcome::plain(Class::Success, Some(head.status.as_u16()));
        Self { head, ahead: Ahead::new(), rest: Some(rest), outcome, mask: None }
    }

    /// Reads the answer's outcome; of its body at most [`outcome::MAX_BODY`], and only where a rule asks.
    pub(super) async fn read(provider: &Provider, answer: Response<Incoming>) -> Self {
        let (head, rest) = answer.into_parts();
        let (ahead, rest) = if outcome::needs_body(provider, head.status, &head.headers) {
            read_ahead(rest).await
        } else {
            (Ahead::new(), Some(rest))
        };
        let seen = bytes_of(&ahead);
        let outcome = outcome::read(provider, head.status, &head.headers, &seen, SystemTime::now());
        Self { head, ahead, rest, outcome, mask: None }
    }

    pub(super) fn outcome(&self) -> &Outcome {
        &self.outcome
    }

    /// The outcome, with the group of the organisation that the answer names; `asked` are the headers that
    /// it answers. One that `holds_key` names nothing.
    pub(super) fn outcome_and_group(
        &self,
        provider: &Provider,
        asked: &HeaderMap,
        holds_key: impl Fn(&str) -> bool,
    ) -> Outcome {
        let organization = outcome::organization(provider, asked, &self.head.headers);
        let organization = organization.filter(|name| !holds_key(name)).map(GroupName::of_organization);
        Outcome { organization, ..self.outcome.clone() }
    }

    /// Says whose key answered, if `tell`, and masks that key wherever the provider echoed it.
    pub(super) fn sign(&mut self, in_use: &InUse, mask: Option<Mask>, tell: bool) {
        match &mask {
            Some(mask) => mask.head(&mut self.head, inject::is_own),
            None => inject::strip_own(&mut self.head.headers),
        }
        self.mask = mask;
        let headers = &mut self.head.headers;
        if tell {
            let key = in_use.key().map(|key| key.shown.clone());
            let lease = HeaderValue::from_str(in_use.lease.id().text(&mut [0; LeaseId::LENGTH])).ok();
            for (name, value) in [(KEY, key), (LEASE, lease)] {
                if let Some(value) = value {
                    headers.insert(name, value);
                }
            }
        }
    }

    /// Says that the connection ends with it: it came while the client still sends, and who answers early mostly reads
    /// no further.
    pub(super) fn end_connection(&mut self) {
        self.head.headers.insert(CONNECTION, HeaderValue::from_static("close"));
    }

    /// Whether the provider agreed to a WebSocket.
    pub(super) fn is_switch(&self) -> bool {
        self.head.status == StatusCode::SWITCHING_PROTOCOLS
    }

    /// The head alone, of an answer that has no body.
    pub(super) fn into_head(self) -> (Parts, Option<Mask>) {
        (self.head, self.mask)
    }

    /// The head, the body as far as it was read and the rest of it, and what the body goes through.
    pub(super) fn into_parts(mut self) -> (Parts, Ahead, Option<Incoming>, Option<Mask>, Filter) {
        let filter = self.mask.as_ref().map_or_else(Filter::none, |mask| mask.filter(&mut self.head));
        (self.head, self.ahead, self.rest, self.mask, filter)
    }
}

/// The data of frames that were read ahead, in one piece; at most a little above [`outcome::MAX_BODY`].
fn bytes_of(ahead: &Ahead) -> Bytes {
    if ahead.is_empty() {
        return Bytes::new();
    }
    let mut seen = BytesMut::new();
    for data in ahead.iter().flatten().filter_map(Frame::data_ref) {
        seen.extend_from_slice(data);
    }
    seen.freeze()
}

/// Up to [`outcome::MAX_BODY`] of a body within [`REFUSAL_BODY`], and what is left of it. An error is kept
/// in its place, for the client must see it where the provider made it.
async fn read_ahead(mut body: Incoming) -> (Ahead, Option<Incoming>) {
    let mut ahead = Ahead::new();
    let mut read = 0;
    let until = tokio::time::Instant::now() + REFUSAL_BODY;
    while read < outcome::MAX_BODY {
        // Cancel safe: a frame is either taken in whole or still in the body.
        let Ok(next) = tokio::time::timeout_at(until, body.frame()).await else { break };
        match next {
            Some(Ok(frame)) => {
                read += frame.data_ref().map_or(0, Bytes::len);
                ahead.push_back(Ok(frame));
            }
            Some(Err(error)) => {
                ahead.push_back(Err(error));
                return (ahead, None);
            }
            None => return (ahead, None),
        }
    }
    (ahead, Some(body))
}

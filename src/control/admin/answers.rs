//! How the admin API says things, and how it says no.

use axum::extract::{self, FromRequestParts};
use axum::response::{IntoResponse, Response};
use http::StatusCode;
use http::header::{self, HeaderName, HeaderValue};
use http::request::Parts;
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::{AdminState, NOW};
use crate::store::{StoreError, StoreTime};

/// Carries the code of an error.
pub(super) const ERROR: HeaderName = HeaderName::from_static("x-lessor-error");

impl AdminState {
    /// With the time that the answer's times are measured against.
    pub(super) fn json(&self, status: StatusCode, value: &impl Serialize) -> Response {
        let StoreTime(now) = self.store.now();
        let mut answer = json(status, value);
        answer.headers_mut().insert(NOW, HeaderValue::from(now));
        answer
    }
}

/// `GET /openapi.json`: all of this, for programs that read such pages.
pub(super) fn described() -> Response {
    ([(header::CONTENT_TYPE, "application/json")], include_str!("openapi.json")).into_response()
}

pub(super) fn text(page: &'static str) -> Response {
    ([(header::CONTENT_TYPE, "text/plain; charset=utf-8")], page).into_response()
}

fn json(status: StatusCode, value: &impl Serialize) -> Response {
    match serde_json::to_vec(value) {
        Ok(page) => {
            let kind = HeaderValue::from_static("application/json");
            (status, [(header::CONTENT_TYPE, kind)], page).into_response()
        }
        Err(_) => Refusal::internal().into_response(),
    }
}

/// The admin's own no, in the shape of all of lessor's.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Refusal {
    pub(super) status: StatusCode,
    pub(super) code: &'static str,
    pub(super) message: String,
}

impl Refusal {
    pub(super) fn new(status: StatusCode, code: &'static str, message: String) -> Self {
        Self { status, code, message }
    }

    /// The body's `error`.
    pub(super) fn error(&self) -> serde_json::Value {
        serde_json::json!({
            "message": self.message, "type": "lessor_error", "code": self.code, "param": null,
        })
    }

    pub(super) fn internal() -> Self {
        let message = "lessor made a mistake; its log says where".into();
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, "internal", message)
    }
}

/// What stands in a path, as axum reads it; what it cannot read is refused in lessor's words.
pub(super) struct Path<T>(pub(super) T);

impl<T: DeserializeOwned + Send, S: Send + Sync> FromRequestParts<S> for Path<T> {
    type Rejection = Refusal;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Refusal> {
        let read = extract::Path::from_request_parts(parts, state).await;
        read.map(|extract::Path(read)| Self(read)).map_err(|cause| unreadable("path", &cause.body_text()))
    }
}

/// The same for a query.
pub(super) struct Query<T>(pub(super) T);

impl<T: DeserializeOwned, S: Send + Sync> FromRequestParts<S> for Query<T> {
    type Rejection = Refusal;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Refusal> {
        let read = extract::Query::from_request_parts(parts, state).await;
        read.map(|extract::Query(read)| Self(read)).map_err(|cause| unreadable("query", &cause.body_text()))
    }
}

fn unreadable(what: &str, why: &str) -> Refusal {
    let message = format!("the {what} cannot be read: {why}; /openapi.json says what is expected");
    Refusal::new(StatusCode::BAD_REQUEST, "bad_request", message)
}

impl From<StoreError> for Refusal {
    fn from(cause: StoreError) -> Self {
        let message = format!("{cause}; no key is lent until it answers again");
        Self::new(StatusCode::SERVICE_UNAVAILABLE, "store_unavailable", message)
    }
}

impl IntoResponse for Refusal {
    fn into_response(self) -> Response {
        let error = serde_json::json!({ "error": self.error() });
        let kind = HeaderValue::from_static("application/json");
        let mut answer = (self.status, [(header::CONTENT_TYPE, kind)], error.to_string()).into_response();
        answer.headers_mut().insert(ERROR, HeaderValue::from_static(self.code));
        if self.status == StatusCode::UNAUTHORIZED {
            let scheme = HeaderValue::from_static("Bearer realm=\"lessor admin\"");
            answer.headers_mut().insert(header::WWW_AUTHENTICATE, scheme);
        }
        answer
    }
}

//! lessor's own answers: one function turns faults into statuses, headers and bodies.

use std::time::Duration;

use bytes::Bytes;
use http::header::{CONNECTION, CONTENT_TYPE, PROXY_AUTHENTICATE, RETRY_AFTER};
use http::{HeaderMap, HeaderName, HeaderValue, Response, StatusCode};
use hyper::ext::ReasonPhrase;
use serde_json::json;

use crate::config::ErrorShape;
use crate::model::{Code, Fault, Mode};

const ERROR: HeaderName = HeaderName::from_static("x-lessor-error");
const PROXY_STATUS: HeaderName = HeaderName::from_static("proxy-status");
const SHOULD_RETRY: HeaderName = HeaderName::from_static("x-should-retry");
const RETRY_AFTER_MS: HeaderName = HeaderName::from_static("retry-after-ms");

/// SDKs wait as long as they are told; a longer wait than this is better told to the user.
const LONGEST_RETRY: Duration = Duration::from_mins(1);

/// The status, the RFC 9209 error type, and whether a retry can help.
fn rendering(fault: &Fault, mode: Mode) -> (StatusCode, &'static str, bool) {
    match fault.code {
        Code::BadRequest => (StatusCode::BAD_REQUEST, "http_request_error", false),
        Code::RequestTimeout => (StatusCode::REQUEST_TIMEOUT, "connection_read_timeout", false),
        Code::HeaderTooLarge => (StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE, "http_request_error", false),
        Code::AppUnauthenticated if mode == Mode::BaseUrl => {
            (StatusCode::FORBIDDEN, "http_request_denied", false)
        }
        Code::AppUnauthenticated => (StatusCode::PROXY_AUTHENTICATION_REQUIRED, "http_request_denied", false),
        Code::AppForbidden | Code::OriginDenied | Code::PathDenied => {
            (StatusCode::FORBIDDEN, "http_request_denied", false)
        }
        Code::DestinationDenied => (StatusCode::FORBIDDEN, "destination_ip_prohibited", false),
        Code::MethodDenied => (StatusCode::METHOD_NOT_ALLOWED, "http_request_denied", false),
        Code::UpgradeUnsupported => (StatusCode::NOT_IMPLEMENTED, "http_upgrade_failed", false),
        Code::UnknownProvider | Code::NoCandidate => (StatusCode::NOT_FOUND, "destination_not_found", false),
        Code::PolicyConflict => (StatusCode::CONFLICT, "http_request_denied", false),
        Code::Misdirected => (StatusCode::MISDIRECTED_REQUEST, "http_request_denied", false),
        Code::PoolExhausted if fault.all_rest => {
            (StatusCode::TOO_MANY_REQUESTS, "destination_unavailable", true)
        }
        Code::PoolExhausted => (StatusCode::TOO_MANY_REQUESTS, "connection_limit_reached", true),
        Code::UpstreamUnreachable => (StatusCode::BAD_GATEWAY, "destination_unavailable", true),
        Code::UpstreamTimeout => (StatusCode::GATEWAY_TIMEOUT, "http_response_timeout", true),
        // With no time named, a person is waited for.
        Code::KeyUnavailable => (StatusCode::SERVICE_UNAVAILABLE, "proxy_internal_error", false),
        Code::StoreUnavailable | Code::ShuttingDown => {
            (StatusCode::SERVICE_UNAVAILABLE, "proxy_internal_error", true)
        }
    }
}

/// The answer to a request that came in by `mode` and whose SDK shows errors of `shape`. `connect`: it is
/// a CONNECT itself. `unread`: more of its body may come.
pub(super) fn answer(
    fault: &Fault,
    shape: ErrorShape,
    mode: Mode,
    connect: bool,
    unread: bool,
) -> Response<Bytes> {
    let (status, kind, may_retry) = rendering(fault, mode);
    let mut response = Response::new(body(fault, shape, status));
    *response.status_mut() = status;
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    headers.insert(ERROR, HeaderValue::from_static(fault.code.as_str()));
    if let Ok(value) = HeaderValue::try_from(format!("lessor; error={kind}")) {
        headers.insert(PROXY_STATUS, value);
    }
    let too_long = fault.retry_after.is_some_and(|wait| wait > LONGEST_RETRY);
    // What no key may do is not had by asking again, also where its rest is nearly over.
    let in_vain = fault.code == Code::NoCandidate || !(may_retry || fault.retry_after.is_some());
    if too_long || in_vain {
        headers.insert(SHOULD_RETRY, HeaderValue::from_static("false"));
    }
    if let Some(wait) = fault.retry_after {
        put_retry_after(headers, wait);
    }
    if status == StatusCode::PROXY_AUTHENTICATION_REQUIRED {
        headers.insert(PROXY_AUTHENTICATE, HeaderValue::from_static("Basic realm=\"lessor\""));
    }
    let unsure_where_it_ends =
        matches!(fault.code, Code::BadRequest | Code::RequestTimeout | Code::UpgradeUnsupported);
    if connect || unread || unsure_where_it_ends {
        // After a refused CONNECT or upgrade, and after doubtful framing, what follows may be no request. And nobody
        // reads the rest of a body to come to the next one: that the connection ends then is to be said before
        // (RFC 9112, section 9.6).
        headers.insert(CONNECTION, HeaderValue::from_static("close"));
    }
    if connect {
        // The phrase is all that most clients show of a refused CONNECT.
        let phrase: String = format!("{}: {}", fault.code.as_str(), fault.message)
            .chars()
            .map(|c| if c.is_ascii_graphic() || c == ' ' { c } else { ' ' })
            .take(200)
            .collect();
        if let Ok(phrase) = ReasonPhrase::try_from(phrase.into_bytes()) {
            response.extensions_mut().insert(phrase);
        }
    }
    response
}

/// Whole seconds, rounded up, and the exact milliseconds beside.
fn put_retry_after(headers: &mut HeaderMap, wait: Duration) {
    let seconds = wait.as_secs() + u64::from(wait.subsec_nanos() > 0);
    headers.insert(RETRY_AFTER, HeaderValue::from(seconds.max(1)));
    headers.insert(
        RETRY_AFTER_MS,
        HeaderValue::from(u64::try_from(wait.as_millis()).unwrap_or(u64::MAX).max(1)),
    );
}

fn body(fault: &Fault, shape: ErrorShape, status: StatusCode) -> Bytes {
    let message = format!("lessor: {}", fault.message);
    let code = fault.code.as_str();
    let value = match shape {
        ErrorShape::OpenAi => {
            json!({ "error": { "message": message, "type": "lessor_error", "code": code, "param": null } })
        }
        ErrorShape::Anthropic => json!({ "type": "error", "error": { "type": code, "message": message } }),
        ErrorShape::Google => {
            json!({ "error": { "code": status.as_u16(), "message": message, "status": code.to_uppercase() } })
        }
    };
    value.to_string().into()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn an_unknown_app_gets_407_in_proxy_modes_and_never_401() {
        let fault = Fault::new(Code::AppUnauthenticated, "who?");
        assert_eq!(answer(&fault, ErrorShape::OpenAi, Mode::BaseUrl, false, false).status(), 403);
        let connect = answer(&fault, ErrorShape::OpenAi, Mode::Connect, true, false);
        assert_eq!(connect.status(), 407);
        assert_eq!(connect.headers()["connection"], "close");
        assert_eq!(connect.headers()["proxy-authenticate"], "Basic realm=\"lessor\"");
    }

    #[test]
    fn a_wait_is_told_in_whole_seconds_and_in_ms_and_a_long_one_is_not_to_be_waited_for() {
        let soon = Fault::new(Code::PoolExhausted, "full").retry_after(Duration::from_millis(1200));
        let soon = answer(&soon, ErrorShape::OpenAi, Mode::BaseUrl, false, false);
        assert_eq!(
            (&soon.headers()["retry-after"], &soon.headers()["retry-after-ms"]),
            (&"2".parse().unwrap(), &"1200".parse().unwrap())
        );
        assert!(!soon.headers().contains_key("x-should-retry"));
        let late = Fault::new(Code::PoolExhausted, "cooling").retry_after(Duration::from_secs(61));
        assert_eq!(
            answer(&late, ErrorShape::OpenAi, Mode::BaseUrl, false, false).headers()["x-should-retry"],
            "false"
        );
    }

    #[test]
    fn bodies_have_the_shape_that_the_sdk_shows() {
        let fault = Fault::new(Code::NoCandidate, "no key serves `m`");
        let parsed = |shape| -> serde_json::Value {
            serde_json::from_slice(answer(&fault, shape, Mode::BaseUrl, false, false).body()).unwrap()
        };
        assert_eq!(parsed(ErrorShape::OpenAi)["error"]["code"], "no_candidate");
        assert_eq!(parsed(ErrorShape::Anthropic)["error"]["message"], "lessor: no key serves `m`");
        assert_eq!(parsed(ErrorShape::Google)["error"]["code"], 404);
    }
}

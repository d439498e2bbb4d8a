//! Which requests ask for a WebSocket, and which upgrades are none (RFC 6455, section 4.1).
//!
//! Whoever stands between two peers that read a handshake differently can be made to send one of them
//! bytes that the other takes for a request. So what is not a whole handshake is refused here.

use http::header::{
    CONNECTION, CONTENT_LENGTH, SEC_WEBSOCKET_KEY, SEC_WEBSOCKET_VERSION, TRANSFER_ENCODING, UPGRADE,
};
use http::{HeaderMap, HeaderName, Method, Version};

use super::Head;
use crate::fields::Rare;
use crate::model::{Code, Fault};

/// Whether these are the headers of a request for an upgrade. Of those, `refuse_bad_upgrade` lets only
/// WebSocket handshakes through. The mere offer of `h2c` is none: Java's client makes it with each request over
/// plain http, and whoever does not take it up answers as if it were not there (RFC 9110, section 7.8). It is
/// taken out on the way like all that is hop-by-hop, so no provider sees it.
pub(super) fn asks_upgrade(head: Head<'_>) -> bool {
    let headers = &head.parts.headers;
    head.rare.has(Rare::UPGRADE) && connection_lists_upgrade(headers) && !is_only(headers, b"h2c")
}

/// Refuses upgrades other than to WebSocket, and handshakes that are not whole.
pub(super) fn refuse_bad_upgrade(head: Head<'_>) -> Result<(), Fault> {
    if !head.rare.has(Rare::UPGRADE) {
        return Ok(());
    }
    let headers = &head.parts.headers;
    let websocket = is_only(headers, b"websocket");
    if !asks_upgrade(head) {
        // Without being listed it is no request for an upgrade, and is taken out like all that is hop-by-hop.
        if websocket && headers.contains_key(SEC_WEBSOCKET_KEY) {
            return Err(malformed("Connection does not list `upgrade`"));
        }
        return Ok(());
    }
    if !websocket {
        let why = "the only upgrade that is known is to `websocket`, alone in Upgrade";
        return Err(Fault::new(Code::UpgradeUnsupported, why));
    }
    if head.parts.method != Method::GET {
        return Err(malformed("its method must be GET"));
    }
    if head.parts.version != Version::HTTP_11 {
        return Err(malformed("its version must be HTTP/1.1"));
    }
    let has_length = headers.get_all(CONTENT_LENGTH).iter().any(|length| length != "0");
    if has_length || headers.contains_key(TRANSFER_ENCODING) {
        return Err(malformed("it must have no body"));
    }
    exactly_one(headers, &SEC_WEBSOCKET_KEY)?;
    exactly_one(headers, &SEC_WEBSOCKET_VERSION)
}

fn malformed(what: &str) -> Fault {
    Fault::new(Code::BadRequest, format!("this is no whole WebSocket handshake: {what}"))
}

fn exactly_one(headers: &HeaderMap, name: &HeaderName) -> Result<(), Fault> {
    let mut all = headers.get_all(name).iter();
    match (all.next(), all.next()) {
        (Some(value), None) if !value.is_empty() => Ok(()),
        (None, _) => Err(malformed(&format!("{name} is missing"))),
        (Some(_), None) => Err(malformed(&format!("{name} is empty"))),
        _ => Err(malformed(&format!("{name} is given twice"))),
    }
}

/// Whether `token` is all that `Upgrade` says.
fn is_only(headers: &HeaderMap, token: &[u8]) -> bool {
    let mut all = headers.get_all(UPGRADE).iter();
    let only = all.next().filter(|_| all.next().is_none());
    only.is_some_and(|value| value.as_bytes().eq_ignore_ascii_case(token))
}

fn connection_lists_upgrade(headers: &HeaderMap) -> bool {
    let lines = headers.get_all(CONNECTION).iter();
    let mut tokens = lines.flat_map(|line| line.as_bytes().split(|byte| *byte == b','));
    tokens.any(|token| token.trim_ascii().eq_ignore_ascii_case(b"upgrade"))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use http::request::Parts;

    use super::*;

    fn head(lines: &[(&str, &str)]) -> Parts {
        let mut request = http::Request::get("/openai/v1/realtime");
        for (name, value) in lines {
            request = request.header(*name, *value);
        }
        request.body(()).unwrap().into_parts().0
    }

    fn refused(head: &Parts) -> Result<(), Fault> {
        refuse_bad_upgrade(Head::of(head))
    }

    const WHOLE: [(&str, &str); 4] = [
        ("connection", "keep-alive, Upgrade"),
        ("upgrade", "WebSocket"),
        ("sec-websocket-key", "dGhlIHNhbXBsZSBub25jZQ=="),
        ("sec-websocket-version", "13"),
    ];

    #[test]
    fn a_whole_handshake_passes_and_one_without_any_of_its_parts_does_not() {
        assert_eq!(refused(&head(&WHOLE)), Ok(()));
        for missing in [0, 2, 3] {
            let mut lines = WHOLE.to_vec();
            lines.remove(missing);
            assert_eq!(refused(&head(&lines)).unwrap_err().code, Code::BadRequest, "{lines:?}");
        }
    }

    #[test]
    fn what_a_handshake_may_not_have_is_refused() {
        for (line, code) in [
            (("content-length", "5"), Code::BadRequest),
            (("transfer-encoding", "chunked"), Code::BadRequest),
            (("sec-websocket-key", "dGhlIHNhbXBsZSBub25jZQ=="), Code::BadRequest),
            (("sec-websocket-version", "8"), Code::BadRequest),
            (("upgrade", "h2c"), Code::UpgradeUnsupported),
        ] {
            let lines = [&WHOLE[..], &[line]].concat();
            assert_eq!(refused(&head(&lines)).unwrap_err().code, code, "{line:?}");
        }
        assert_eq!(refused(&head(&[&WHOLE[..], &[("content-length", "0")]].concat())), Ok(()));
        let mut post = head(&WHOLE);
        post.method = Method::POST;
        assert_eq!(refused(&post).unwrap_err().code, Code::BadRequest);
        let mut old = head(&WHOLE);
        old.version = Version::HTTP_10;
        assert_eq!(refused(&old).unwrap_err().code, Code::BadRequest);
    }

    #[test]
    fn other_upgrades_are_not_supported_and_an_unlisted_one_is_none() {
        for token in ["h2c, websocket", "websocket, h2c", "websocket/13", "websockets", "TLS/1.0"] {
            let lines = [("connection", "upgrade"), ("upgrade", token)];
            assert_eq!(refused(&head(&lines)).unwrap_err().code, Code::UpgradeUnsupported, "{token}");
        }
        assert_eq!(refused(&head(&[("upgrade", "h2c")])), Ok(()));
        // An offer that may be passed over, and so is.
        let offer = head(&[("connection", "Upgrade, HTTP2-Settings"), ("upgrade", "h2c")]);
        assert_eq!((refused(&offer), asks_upgrade(Head::of(&offer))), (Ok(()), false));
    }
}

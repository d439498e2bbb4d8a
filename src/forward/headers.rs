//! Hop-by-hop headers: taken out on both sides (RFC 9110, section 7.6.1). hyper's HTTP/1 path takes
//! out none.

use http::header::{CONNECTION, CONTENT_LENGTH, COOKIE, HOST, TE, TRANSFER_ENCODING, UPGRADE};
use http::{HeaderMap, HeaderName, HeaderValue, Version};

use crate::fields::{self, Rare};

/// Whether a field is meant for the next hop alone (RFC 9110, section 7.6.1).
fn is_hop_by_hop(name: &str) -> bool {
    matches!(
        name,
        "connection"
            | "keep-alive"
            | "proxy-connection"
            | "proxy-authenticate"
            | "proxy-authorization"
            | "te"
            | "transfer-encoding"
            | "upgrade"
    )
}

/// Takes out what `Connection` lists. Framing and `Host` are not a client's to remove by this: they are
/// written anew, and without the length a body would go out in another framing than it came.
fn strip_listed(headers: &mut HeaderMap) {
    let listed: Vec<HeaderName> = headers
        .get_all(CONNECTION)
        .iter()
        // By bytes: beside a member that is no text, another may be a name.
        .flat_map(|value| value.as_bytes().split(|byte| *byte == b','))
        .filter_map(|name| HeaderName::from_bytes(name.trim_ascii()).ok())
        .filter(|name| *name != CONTENT_LENGTH && *name != HOST)
        .collect();
    for name in listed {
        headers.remove(name);
    }
}

/// A request's headers as they go on to `host`, from a client that spoke `version`; without those, too, whose
/// name `goes`. Of what is `rare` they have this.
pub fn strip_request(
    headers: &mut HeaderMap,
    rare: Rare,
    version: Version,
    host: HeaderValue,
    goes: impl Fn(&str) -> bool,
) {
    strip_hop_by_hop(headers, rare, goes);
    // In place of the caller's, which named lessor.
    headers.insert(HOST, host);
    if version == Version::HTTP_2 {
        join_cookies(headers);
    }
}

/// A request's trailers as they go on.
pub fn strip_trailers(trailers: &mut HeaderMap, goes: impl Fn(&str) -> bool) {
    strip_hop_by_hop(trailers, Rare::of(trailers), |name| name == "host" || goes(name));
}

/// HTTP/2 may split a cookie into lines, which HTTP/1.1 does not know (RFC 9113, section 8.2.3).
fn join_cookies(headers: &mut HeaderMap) {
    let crumbs: Vec<&[u8]> = headers.get_all(COOKIE).iter().map(HeaderValue::as_bytes).collect();
    if crumbs.len() < 2 {
        return;
    }
    // Made of pieces of header values, so it is one.
    if let Ok(cookie) = HeaderValue::from_bytes(&crumbs.join(&b"; "[..])) {
        headers.insert(COOKIE, cookie);
    }
}

/// Takes out what is meant for the next hop alone, and what `goes`. `TE: trailers` alone survives, since it is the
/// only way to ask the provider for trailers.
fn strip_hop_by_hop(headers: &mut HeaderMap, rare: Rare, goes: impl Fn(&str) -> bool) {
    let asks = |value: &HeaderValue| {
        let mut tokens = value.to_str().unwrap_or_default().split(',');
        tokens.any(|token| token.trim().eq_ignore_ascii_case("trailers"))
    };
    let wants_trailers = rare.has(Rare::TE) && headers.get_all(TE).iter().any(asks);
    if rare.has(Rare::CONNECTION) {
        strip_listed(headers);
    }
    fields::remove(headers, |name| {
        is_hop_by_hop(name) || matches!(name, "http2-settings" | "expect") || goes(name)
    });
    if wants_trailers {
        headers.insert(TE, HeaderValue::from_static("trailers"));
    }
}

/// An answer's headers as they go on; `Trailer` stays, it is end to end. Where the head carried a transfer coding, a length beside it is
/// false and goes too.
pub fn strip_response(headers: &mut HeaderMap) {
    let coded = fields::has(headers, &TRANSFER_ENCODING);
    if fields::has(headers, &CONNECTION) {
        strip_listed(headers);
    }
    fields::remove(headers, is_hop_by_hop);
    if coded {
        headers.remove(CONTENT_LENGTH);
    }
}

/// What asks for a WebSocket, or agrees to one; put in after what is hop-by-hop was taken out.
pub fn put_websocket(headers: &mut HeaderMap) {
    headers.insert(CONNECTION, HeaderValue::from_static("Upgrade"));
    headers.insert(UPGRADE, HeaderValue::from_static("websocket"));
}

/// Whether an answer switches to WebSocket, and to nothing else.
pub fn is_websocket(headers: &HeaderMap) -> bool {
    let mut all = headers.get_all(UPGRADE).iter();
    let only = all.next().filter(|_| all.next().is_none());
    only.is_some_and(|value| value.as_bytes().eq_ignore_ascii_case(b"websocket"))
}

/// Whether a head says this length, in the only spelling that all read alike.
pub fn says_length(headers: &HeaderMap, length: u64) -> bool {
    let mut all = headers.get_all(CONTENT_LENGTH).iter();
    let only = all.next().filter(|_| all.next().is_none()).map(HeaderValue::as_bytes);
    only.is_some_and(|text| match text {
        b"0" => length == 0,
        [b'1'..=b'9', ..] => std::str::from_utf8(text).is_ok_and(|text| text.parse() == Ok(length)),
        _ => false,
    })
}

/// Whether an answer says different lengths, or one that cannot be read. Where it has a body it was refused for that
/// already; of an answer to HEAD nobody has counted.
pub fn has_foreign_length(headers: &HeaderMap) -> bool {
    let lines = headers.get_all(CONTENT_LENGTH).iter();
    let mut said = lines.flat_map(|line| line.as_bytes().split(|byte| *byte == b',').map(<[u8]>::trim_ascii));
    let is_number = |text: &[u8]| !text.is_empty() && text.iter().all(u8::is_ascii_digit);
    said.next().is_some_and(|first| !is_number(first) || said.any(|more| more != first))
}

/// Whether an answer's body is coded in a way that was lost when it was decoded as chunked.
pub fn has_foreign_coding(headers: &HeaderMap) -> bool {
    if !fields::has(headers, &TRANSFER_ENCODING) {
        return false;
    }
    let mut codings = headers.get_all(TRANSFER_ENCODING).iter();
    let only = codings.next().filter(|_| codings.next().is_none());
    !only.is_some_and(|coding| coding.as_bytes().eq_ignore_ascii_case(b"chunked"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn map(lines: &[(&'static str, &'static str)]) -> HeaderMap {
        lines.iter().map(|(n, v)| (HeaderName::from_static(n), HeaderValue::from_static(v))).collect()
    }

    fn strip(headers: &mut HeaderMap, version: Version) {
        let rare = Rare::of(headers);
        strip_request(headers, rare, version, HeaderValue::from_static("api"), |_| false);
    }

    #[test]
    fn an_answers_length_is_one_number_however_often_it_is_said() {
        for (lines, foreign) in [
            (&[][..], false),
            (&["10"][..], false),
            (&["10", "10"], false),
            (&["10, 10"], false),
            (&["10", "12"], true),
            (&["10, 12"], true),
            (&["ten"], true),
            (&[""], true),
        ] {
            let mut headers = HeaderMap::new();
            for line in lines {
                headers.append(CONTENT_LENGTH, HeaderValue::from_static(line));
            }
            assert_eq!(has_foreign_length(&headers), foreign, "{lines:?}");
        }
    }

    #[test]
    fn what_connection_lists_goes_and_framing_stays() {
        let mut headers = map(&[
            ("connection", "close, x-secret"),
            ("connection", "content-length"),
            ("x-secret", "1"),
            ("content-length", "5"),
            ("te", "gzip, trailers"),
            ("proxy-connection", "keep-alive"),
            ("host", "lessor"),
            ("accept", "*/*"),
        ]);
        strip(&mut headers, Version::HTTP_11);
        let left = [("host", "api"), ("content-length", "5"), ("accept", "*/*"), ("te", "trailers")];
        assert_eq!(headers, map(&left));
    }

    #[test]
    fn a_cookie_that_http2_split_is_one_line_again() {
        let split = [("cookie", "a=1"), ("host", "api"), ("cookie", "b=2")];
        let mut headers = map(&split);
        strip(&mut headers, Version::HTTP_2);
        assert_eq!(headers, map(&[("cookie", "a=1; b=2"), ("host", "api")]));
        let mut headers = map(&split);
        strip(&mut headers, Version::HTTP_11);
        assert_eq!(headers, map(&split));
    }

    #[test]
    fn a_length_is_said_in_one_spelling_alone() {
        assert!(says_length(&map(&[("content-length", "0")]), 0));
        assert!(says_length(&map(&[("content-length", "10")]), 10));
        for other in ["010", "+10", "10, 10", "11", "", " 10", "1_0"] {
            assert!(!says_length(&map(&[("content-length", other)]), 10), "{other}");
        }
        assert!(!says_length(&map(&[("content-length", "10"), ("content-length", "10")]), 10));
        assert!(!says_length(&map(&[]), 0));
    }

    #[test]
    fn a_length_beside_a_transfer_coding_is_dropped_from_an_answer() {
        let mut headers = map(&[("content-length", "100"), ("transfer-encoding", "chunked"), ("x", "1")]);
        strip_response(&mut headers);
        assert_eq!(headers, map(&[("x", "1")]));
    }
}

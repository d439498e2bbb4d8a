//! Out with every credential the caller sent, in with the leased one.
//!
//! Runs last, after hop-by-hop processing: else `Connection: authorization` would remove the key that
//! was just put in. Exactly one credential leaves, in as many places as the provider wants it in; if that
//! cannot be done, the request is refused and never sent bare.

use std::borrow::Cow;
use std::fmt::Write as _;

use http::header::SEC_WEBSOCKET_PROTOCOL;
use http::uri::PathAndQuery;
use http::{HeaderMap, HeaderValue, Uri};
use zeroize::Zeroizing;

use crate::config::{
    Credential, Filled, Injection, KeyConfig, KeyHeader, Place, Provider, catalogue, places,
};
use crate::fields;
use crate::model::{Code, Fault};

/// What one byte becomes at most when it is percent-encoded.
const LONGEST_ENCODED: usize = 3;

/// Headers that steer lessor start so, and are never forwarded.
const OWN_PREFIX: &str = "x-lessor-";

/// Whether a caller's header goes to no provider: one that steers lessor, or a credential for any provider of
/// the catalogue that `keep` does not name.
pub fn never_leaves(name: &str, keep: &[String]) -> bool {
    is_own(name) || (catalogue::is_credential_header(name) && !is_kept(name, keep))
}

/// Whether it steers lessor.
pub fn is_own(name: &str) -> bool {
    name.starts_with(OWN_PREFIX)
}

/// Whether the caller's own header of this name is left alone.
fn is_kept(name: &str, keep: &[String]) -> bool {
    keep.iter().any(|kept| kept.eq_ignore_ascii_case(name))
}

/// Whether one of these ways puts something into a header of this name.
pub fn carries(all: &[Injection], name: &str) -> bool {
    places(all).filter_map(Place::header).any(|place| place.as_str() == name)
}

/// Whether a header of this name carries the provider's credential, and the caller's is not left alone: what is
/// put in takes its place, or it is taken out then.
pub fn is_replaced(name: &str, provider: &Provider) -> bool {
    carries(&provider.inject, name) && !is_kept(name, &provider.keep)
}

/// Removes `X-Lessor-*`.
pub fn strip_own(headers: &mut HeaderMap) {
    fields::remove(headers, is_own);
}

/// Removes the WebSocket subprotocols for which `goes` holds; the others stay byte for byte.
pub fn strip_subprotocols(headers: &mut HeaderMap, goes: impl Fn(&[u8]) -> bool) {
    let members = |line: &HeaderValue| line.as_bytes().split(|byte| *byte == b',').any(&goes);
    if !headers.get_all(SEC_WEBSOCKET_PROTOCOL).iter().any(members) {
        return;
    }
    let lines: Vec<HeaderValue> = headers.get_all(SEC_WEBSOCKET_PROTOCOL).iter().cloned().collect();
    headers.remove(SEC_WEBSOCKET_PROTOCOL);
    for line in lines {
        let kept: Vec<&[u8]> = line.as_bytes().split(|byte| *byte == b',').filter(|m| !goes(m)).collect();
        let kept = kept.join(&b',');
        // Made of pieces of a header's value, so it is one.
        if let Ok(value) = HeaderValue::from_bytes(kept.trim_ascii())
            && !value.is_empty()
        {
            headers.append(SEC_WEBSOCKET_PROTOCOL, value);
        }
    }
}

/// A query without credentials; borrowed, byte for byte, where it has none.
fn strip_query(query: &str, is_credential: impl Fn(&str) -> bool) -> Cow<'_, str> {
    if !query.split('&').any(&is_credential) {
        return Cow::Borrowed(query);
    }
    let kept: Vec<&str> = query.split('&').filter(|pair| !is_credential(pair)).collect();
    Cow::Owned(kept.join("&"))
}

/// Removes the headers that carry this provider's or this key's credential, save those that are `put` in anew.
fn strip_places(headers: &mut HeaderMap, provider: &Provider, key: &KeyConfig, put: &[Filled]) {
    for name in places(&provider.inject).chain(places(&key.inject)).filter_map(Place::header) {
        let comes = put.iter().any(|place| place.header() == Some(name));
        if !comes && !is_kept(name.as_str(), &provider.keep) {
            headers.remove(name);
        }
    }
}

/// Puts the key's own headers in, in place of the caller's of the same names, save those that `keep` names.
fn put_own_headers(provider: &Provider, key: &KeyConfig, headers: &mut HeaderMap) {
    for KeyHeader { name, value } in &key.headers {
        if headers.contains_key(name) && is_kept(name.as_str(), &provider.keep) {
            continue;
        }
        if headers.insert(name, value.clone()).is_some() {
            tracing::debug!(provider = %provider.name, key = %key.id, header = %name, "the key's own header replaced the caller's");
        }
    }
}

/// Puts `key` into a request for `path` (provider-relative), and its own headers, in place of what the caller sent
/// there; `credential` is the key's. Gives the target to send to. `is_secret` tells a query's raw pair that must go.
pub fn put(
    provider: &Provider,
    (key, credential): (&KeyConfig, Option<&Credential>),
    path: &str,
    target: &Uri,
    headers: &mut HeaderMap,
    is_secret: impl Fn(&str) -> bool,
) -> Result<Uri, Fault> {
    let credential = credential.ok_or_else(|| refused("its secret could not be had yet"))?;
    let stripped = target.query().map(|query| strip_query(query, is_secret));
    let mut changed = matches!(stripped, Some(Cow::Owned(_)));
    let mut query = Zeroizing::new(stripped.map_or_else(String::new, Cow::into_owned));
    let places = credential.places(path);
    let places = places.ok_or_else(|| refused("the provider's `inject` has no entry for this path"))?;
    strip_places(headers, provider, key, places);
    put_own_headers(provider, key, headers);
    for place in places {
        match place {
            Filled::Unfit(why) => return Err(refused(why)),
            Filled::Header(name, value) => {
                headers.insert(name, value.clone());
            }
            Filled::Query(name, text) => {
                changed = true;
                // All room at once: a text that grows leaves copies behind that nobody wipes.
                let mut longer = Zeroizing::new(String::with_capacity(
                    query.len() + (name.len() + text.len()) * LONGEST_ENCODED + 2,
                ));
                longer.push_str(&query);
                if !longer.is_empty() {
                    longer.push('&');
                }
                percent_encode(name, &mut longer);
                longer.push('=');
                percent_encode(text, &mut longer);
                query = longer;
            }
        }
    }
    if changed {
        with_query(target, Some(&query).filter(|query| !query.is_empty()))
    } else {
        Ok(target.clone())
    }
}

fn refused(why: &str) -> Fault {
    Fault::new(Code::KeyUnavailable, format!("the key could not be put in, so nothing was sent: {why}"))
}

fn with_query(target: &Uri, query: Option<&Zeroizing<String>>) -> Result<Uri, Fault> {
    let text = match query {
        Some(query) => Zeroizing::new([target.path(), query].join("?")),
        None => Zeroizing::new(target.path().to_owned()),
    };
    let mut parts = target.clone().into_parts();
    parts.path_and_query =
        Some(PathAndQuery::try_from(text.as_str()).map_err(|_| refused("the target would be malformed"))?);
    Uri::from_parts(parts).map_err(|_| refused("the target would be malformed"))
}

/// RFC 3986: everything but the unreserved characters.
fn percent_encode(text: &str, to: &mut String) {
    for byte in text.bytes() {
        if byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'.' | b'_' | b'~') {
            to.push(char::from(byte));
        } else {
            // Writing to a `String` cannot fail.
            let _ = write!(to, "%{byte:02X}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_query_without_credentials_goes_through_byte_for_byte() {
        let is_key = |pair: &str| pair.starts_with("key=");
        assert!(matches!(strip_query("a=%7E&&b=+", is_key), Cow::Borrowed("a=%7E&&b=+")));
        assert_eq!(strip_query("a=1&key=x&b=2", is_key), "a=1&b=2");
        assert_eq!(strip_query("key=x", is_key), "");
    }

    #[test]
    fn subprotocols_that_go_are_taken_out_and_the_others_stay_byte_for_byte() {
        let goes = |member: &[u8]| member.trim_ascii().starts_with(b"key.");
        for (lines, left) in [
            (&["realtime,  v1"][..], &["realtime,  v1"][..]),
            (&["realtime, key.x,  v1"], &["realtime,  v1"]),
            (&["key.x, realtime", "key.y", "v1,key.z"], &["realtime", "v1"]),
            (&["key.x"], &[]),
        ] {
            let mut headers = HeaderMap::new();
            for line in lines {
                headers.append(SEC_WEBSOCKET_PROTOCOL, HeaderValue::from_static(line));
            }
            strip_subprotocols(&mut headers, goes);
            let after: Vec<_> = headers.get_all(SEC_WEBSOCKET_PROTOCOL).iter().collect();
            assert_eq!(after, left, "{lines:?}");
        }
    }

    #[test]
    fn a_header_with_the_secret_shows_it_to_no_debugger() {
        let file = "[[keys]]\nid = \"a\"\nprovider = \"openai\"\nsecret = { env = \"A\" }\n";
        let config = crate::config::load_str(file, "f", &|_| Some("sk-CANARY-0123456789".into())).unwrap();
        let (key, mut headers) = (&config.keys[0], HeaderMap::new());
        let target = Uri::from_static("https://api.openai.com/v1/models");
        let (provider, credential) = (&config.providers[&key.provider], Credential::of(key));
        assert!(!format!("{credential:?}").contains("CANARY"));
        put(provider, (key, credential.as_ref()), "/v1/models", &target, &mut headers, |_| false).unwrap();
        assert_eq!(headers["authorization"], "Bearer sk-CANARY-0123456789");
        assert!(!format!("{headers:?}").contains("CANARY"), "{headers:?}");
    }

    #[test]
    fn a_secret_in_a_query_is_percent_encoded() {
        let mut out = String::new();
        percent_encode("a/b+c=&~é", &mut out);
        assert_eq!(out, "a%2Fb%2Bc%3D%26~%C3%A9");
    }
}

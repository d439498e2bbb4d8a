//! Where a request wants to go: its target taken apart without normalising anything.

use std::borrow::Cow;
use std::net::IpAddr;

use http::uri::Authority;
use http::{HeaderValue, Uri};

use crate::model::{Code, Fault};

/// A host as it is compared: lower case, no brackets, no trailing dot, no port.
pub fn host_key(host: &str) -> String {
    let host = host.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')).unwrap_or(host);
    host.strip_suffix('.').unwrap_or(host).to_ascii_lowercase()
}

/// Whether `host` (see [`host_key`]) names this machine to itself.
pub fn is_loopback_name(host: &str) -> bool {
    host == "localhost"
        || host.ends_with(".localhost")
        || host.parse::<IpAddr>().is_ok_and(|ip| unmapped(ip).is_loopback())
}

/// An IPv4 address in its IPv6-mapped form as itself.
pub fn unmapped(ip: IpAddr) -> IpAddr {
    match ip {
        IpAddr::V6(v6) => v6.to_ipv4_mapped().map_or(ip, IpAddr::V4),
        IpAddr::V4(_) => ip,
    }
}

/// Refuses what could climb out of the path it stands in: dot segments, plain or encoded, also behind
/// encoded slashes and backslashes.
pub fn refuse_dot_segments(path: &str) -> Result<(), Fault> {
    if memchr::memchr2(b'.', b'%', path.as_bytes()).is_none() {
        return Ok(());
    }
    let decoded = decode_dots(path);
    let dotted = decoded.split(['/', '\\']).any(|segment| {
        // Some servers drop a segment's parameters (`..;x`) before they climb.
        matches!(segment.split(';').next(), Some("." | ".."))
    });
    if dotted {
        return Err(Fault::new(
            Code::BadRequest,
            "the path has dot segments, plain or encoded; send the path without them",
        ));
    }
    Ok(())
}

/// Decodes `%2e`, `%2f` and `%5c` alone: all that can make a dot segment.
fn decode_dots(path: &str) -> Cow<'_, str> {
    if !path.contains('%') {
        return Cow::Borrowed(path);
    }
    let mut out = String::with_capacity(path.len());
    let mut rest = path;
    while let Some(at) = rest.find('%') {
        out.push_str(&rest[..at]);
        let decoded = match rest.get(at..at + 3).map(str::to_ascii_lowercase).as_deref() {
            Some("%2e") => Some('.'),
            Some("%2f") => Some('/'),
            Some("%5c") => Some('\\'),
            _ => None,
        };
        out.push(decoded.unwrap_or('%'));
        rest = &rest[at + if decoded.is_some() { 3 } else { 1 }..];
    }
    out.push_str(rest);
    Cow::Owned(out)
}

/// What `Host` says of a target: its host, and its port where that is not the scheme's own.
pub fn host_header(target: &Uri) -> HeaderValue {
    let all = target.authority().map_or("", Authority::as_str);
    let usual = if target.scheme_str() == Some("https") { 443 } else { 80 };
    let text = match target.port_u16() {
        Some(port) if port != usual => all.rsplit_once('@').map_or(all, |(_, host)| host),
        _ => target.host().unwrap_or_default(),
    };
    // An authority has no character that a header cannot have.
    HeaderValue::from_str(text).unwrap_or_else(|_| HeaderValue::from_static(""))
}

/// A CONNECT target: host and port, both needed.
pub fn connect_target(uri: &Uri) -> Result<(String, u16), Fault> {
    let bad = || Fault::new(Code::BadRequest, "CONNECT needs host:port, for example api.example.com:443");
    let authority = uri.authority().ok_or_else(bad)?;
    refuse_userinfo(authority)?;
    let port = authority.port_u16().ok_or_else(bad)?;
    let host = host_key(authority.host());
    if host.is_empty() || port == 0 || !has_one_reading(authority) {
        return Err(bad());
    }
    Ok((host, port))
}

/// Whether brackets stand around an IPv6 address alone, with nothing but a port behind them. The library takes
/// `[any]thing:1` for the host `[any]`, and others may not.
pub fn has_one_reading(authority: &Authority) -> bool {
    let (all, host) = (authority.as_str(), authority.host());
    if !all.contains(['[', ']']) {
        return true;
    }
    let inner = host.strip_prefix('[').and_then(|rest| rest.strip_suffix(']'));
    inner.is_some_and(|inner| inner.parse::<std::net::Ipv6Addr>().is_ok())
        && all.strip_prefix(host).is_some_and(|rest| rest.is_empty() || rest.starts_with(':'))
}

/// Refuses `user:password@` in a target: it would be dropped silently on the way.
pub fn refuse_userinfo(authority: &Authority) -> Result<(), Fault> {
    if authority.as_str().contains('@') {
        return Err(Fault::new(Code::BadRequest, "the target carries user information; send it as a header"));
    }
    Ok(())
}

/// One `name=value` of a query, as sent.
#[derive(Debug, Clone, Copy)]
pub struct Pair<'a> {
    /// The whole pair, percent-encoded as sent.
    pub raw: &'a str,
}

impl Pair<'_> {
    /// Whether the decoded name is `name`, case ignored.
    pub fn name_is(&self, name: &str) -> bool {
        let raw = self.raw.split('=').next().unwrap_or_default();
        decoded(raw).eq_ignore_ascii_case(name.as_bytes())
    }

    /// The value, decoded.
    pub fn decoded_value(&self) -> Vec<u8> {
        decoded(self.raw.split_once('=').map_or("", |(_, value)| value))
    }
}

/// The pairs of a query, in order.
pub fn query_pairs(query: &str) -> impl Iterator<Item = Pair<'_>> {
    query.split('&').map(|raw| Pair { raw })
}

fn decoded(text: &str) -> Vec<u8> {
    let bytes = text.as_bytes();
    let mut out = Vec::with_capacity(bytes.len());
    let mut at = 0;
    while at < bytes.len() {
        let hex = |offset: usize| {
            bytes
                .get(at + offset)
                .and_then(|byte| char::from(*byte).to_digit(16))
                .and_then(|d| u8::try_from(d).ok())
        };
        match (bytes[at], hex(1), hex(2)) {
            (b'%', Some(high), Some(low)) => {
                out.push(high * 16 + low);
                at += 3;
            }
            (b'+', ..) => {
                out.push(b' ');
                at += 1;
            }
            (byte, ..) => {
                out.push(byte);
                at += 1;
            }
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dot_segments_are_refused_in_every_spelling() {
        for path in [
            "/a/../b",
            "/a/.",
            "/./a",
            "/a/%2e%2E/b",
            "/a/.%2e",
            "/a%2f..%2fb",
            "/a/..%5cb",
            "/%2e",
            "/a/..;x/b",
        ] {
            assert!(refuse_dot_segments(path).is_err(), "{path}");
        }
        for path in ["/a/b", "/a/...", "/v1/models/gpt-4.1", "/a/.well-known", "/a%20b/..c", "/100%", "/%é"]
        {
            assert!(refuse_dot_segments(path).is_ok(), "{path}");
        }
    }

    #[test]
    fn host_names_the_port_that_is_not_usual() {
        for (target, host) in [
            ("https://api.example/v1", "api.example"),
            ("https://api.example:443/v1", "api.example"),
            ("https://api.example:80/v1", "api.example:80"),
            ("http://api.example:80/", "api.example"),
            ("http://[::1]:8080/", "[::1]:8080"),
            ("http://[::1]/", "[::1]"),
            ("http://a:b@api.example:8080/", "api.example:8080"),
            ("http://a:b@api.example/", "api.example"),
        ] {
            assert_eq!(host_header(&Uri::from_static(target)), host, "{target}");
        }
    }

    #[test]
    fn brackets_are_for_an_ipv6_address_alone() {
        let read = |text: &str| text.parse::<Authority>().map(|authority| has_one_reading(&authority));
        for good in ["[::1]:443", "[2001:db8::1]", "api.openai.com:443", "127.0.0.1"] {
            assert!(read(good).is_ok_and(|one| one), "{good}");
        }
        for bad in ["[::1].evil.example:443", "[api.openai.com]:443", "[::1]x", "[fe80::h0]:1", "[::1]]:1"] {
            assert!(!read(bad).is_ok_and(|one| one), "{bad}");
        }
    }

    #[test]
    fn a_credential_in_the_query_is_known_by_its_decoded_name() {
        let names: Vec<bool> =
            query_pairs("a=1&key=2&%6Bey=3&KEY=4&keys=5").map(|p| p.name_is("key")).collect();
        assert_eq!(names, [false, true, true, true, false]);
    }
}

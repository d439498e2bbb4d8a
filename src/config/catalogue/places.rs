//! Addresses, and the places of a key in a request: parsed so that a key cannot go elsewhere than it seems.

use std::net::IpAddr;

use http::{HeaderName, HeaderValue, Method, Uri, header};

use super::schema::{RawCheck, RawInject};
use super::{FieldError, refuse};
use crate::config::{Check, Injection, Place};

/// The host of a URL that has one, in lower case and without port.
pub(super) fn host_of(url: &Uri) -> String {
    url.host().unwrap_or_default().to_ascii_lowercase()
}

fn is_loopback(host: &str) -> bool {
    let bare = host.trim_start_matches('[').trim_end_matches(']');
    bare == "localhost"
        || bare.ends_with(".localhost")
        || bare.parse::<IpAddr>().is_ok_and(|ip| ip.to_canonical().is_loopback())
}

/// Scheme, authority and path, with nothing that could send a key elsewhere than it seems. Problems
/// never repeat the text: what stands before an `@` may be a secret.
pub(super) fn parse_base_url(text: &str, allow_plaintext: bool) -> Result<Uri, String> {
    let text = text.trim_end_matches('/');
    let uri: Uri = text.parse().map_err(|_| "is no URL")?;
    let (Some(scheme), Some(authority)) = (uri.scheme_str(), uri.authority()) else {
        return Err("must be a whole URL, such as https://host/path".into());
    };
    if authority.as_str().contains('@') {
        return Err("must carry no user or password; keys belong in [[keys]]".into());
    }
    if text.contains('?') || text.contains('#') {
        return Err("must have no query and no fragment".into());
    }
    // `http` takes `host:` and ports past 65535 for an authority, and then has no port to connect to.
    let after_host = &authority.as_str()[authority.host().len()..];
    if authority.host().is_empty() || (!after_host.is_empty() && authority.port_u16().is_none_or(|p| p == 0))
    {
        return Err("needs a host, and a port from 1 to 65535 where it names one".into());
    }
    if uri.path().split('/').any(|segment| matches!(segment, "." | "..")) {
        return Err("must have no dot segments".into());
    }
    match scheme {
        "https" => Ok(uri),
        "http" if allow_plaintext || is_loopback(&host_of(&uri)) => Ok(uri),
        "http" => Err("sends keys in the clear; use https://, or set allow_plaintext = true".into()),
        other => Err(format!("has the scheme `{other}`, must be https:// or http://")),
    }
}

pub(super) fn parse_host(text: &str) -> Result<String, String> {
    let host = text.to_ascii_lowercase();
    let authority: http::uri::Authority =
        host.parse().map_err(|_| format!("is `{text}`, which is no host"))?;
    if authority.host() != host || host.starts_with('.') || host.contains('*') {
        return Err(format!("is `{text}`, must be one exact host without scheme, port or path"));
    }
    Ok(host)
}

pub(super) fn parse_keep(text: &str) -> Result<String, String> {
    if text.strip_prefix('?').is_some_and(|name| !name.is_empty()) {
        return Ok(text.to_owned());
    }
    let name: HeaderName = text
        .parse()
        .map_err(|_| format!("is `{text}`, must be a header's name, or `?name` for the query"))?;
    Ok(name.as_str().to_owned())
}

pub(super) fn compile_inject(raw: &[RawInject], errors: &mut Vec<FieldError>) -> Vec<Injection> {
    if raw.is_empty() {
        refuse(errors, "inject", "is empty; a request is never sent without its key");
    }
    let mut all = Vec::new();
    for (i, one) in raw.iter().enumerate() {
        let field =
            |name: &str| if raw.len() == 1 { format!("inject.{name}") } else { format!("inject.{i}.{name}") };
        let last = i + 1 == raw.len();
        match &one.path_prefix {
            Some(_) if last => {
                refuse(
                    errors,
                    field("path_prefix"),
                    "must not stand on the last, which serves all other paths",
                );
            }
            None if !last => {
                refuse(
                    errors,
                    field("path_prefix"),
                    "is missing; only the last goes without, the rest would never be used",
                );
            }
            Some(prefix) if !prefix.starts_with('/') => {
                refuse(errors, field("path_prefix"), format!("is `{prefix}`, must begin with `/`"));
            }
            _ => {}
        }
        match compile_place(one) {
            Ok(place) => all.push(Injection { path_prefix: one.path_prefix.clone(), place }),
            Err((name, problem)) => refuse(errors, field(name), problem),
        }
    }
    all
}

fn compile_place(raw: &RawInject) -> Result<Place, (&'static str, String)> {
    let header = match (&raw.header, &raw.query) {
        (Some(header), None) => header,
        (None, Some(query)) if raw.format.is_some() => {
            return Err((
                "format",
                format!("is for headers; the query parameter `{query}` is the bare secret"),
            ));
        }
        (None, Some(query)) if query.is_empty() => return Err(("query", "is empty".into())),
        (None, Some(query)) => return Ok(Place::Query { name: query.clone() }),
        _ => return Err(("header", "or `query` must be given, one of them".into())),
    };
    let name: HeaderName =
        header.parse().map_err(|_| ("header", format!("is `{header}`, which is no header name")))?;
    // These frame or route the message; a key in one would break it, or not arrive.
    let framing = [
        header::HOST,
        header::CONTENT_LENGTH,
        header::TRANSFER_ENCODING,
        header::CONNECTION,
        header::UPGRADE,
        header::TE,
        header::TRAILER,
        header::EXPECT,
        header::PROXY_AUTHORIZATION,
    ];
    if framing.contains(&name) {
        return Err(("header", format!("is `{header}`, which no provider reads a key from")));
    }
    let format = match &raw.format {
        Some(format) => format.as_str(),
        None if name == header::AUTHORIZATION => "Bearer {secret}",
        None => "{secret}",
    };
    let parts: Vec<&str> = format.split("{secret}").collect();
    let [before, after] = parts.as_slice() else {
        return Err(("format", "must contain {secret} once".into()));
    };
    if !format.bytes().all(|b| (b' '..=b'~').contains(&b)) {
        return Err(("format", "must be printable ASCII".into()));
    }
    Ok(Place::Header { name, before: (*before).into(), after: (*after).into() })
}

pub(super) fn compile_check(raw: &RawCheck, errors: &mut Vec<FieldError>) -> Option<Check> {
    let before = errors.len();
    let method = raw.method.as_deref().unwrap_or("GET").parse().unwrap_or_else(|_| {
        refuse(errors, "check.method", "is no HTTP method");
        Method::GET
    });
    let path = raw.path.clone().unwrap_or_default();
    if !path.starts_with('/') || path.parse::<http::uri::PathAndQuery>().is_err() {
        refuse(errors, "check.path", "must be a path that begins with `/`");
    }
    let mut headers = Vec::new();
    for (name, value) in &raw.headers {
        match (name.parse::<HeaderName>(), HeaderValue::from_str(value)) {
            (Ok(name), Ok(value)) => headers.push((name, value)),
            _ => refuse(errors, format!("check.headers.{name}"), "is no header"),
        }
    }
    (errors.len() == before).then_some(Check { method, path, headers })
}

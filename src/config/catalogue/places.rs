//! Addresses, and the places of a key in a request: parsed so that a key cannot go elsewhere than it seems.

use std::net::IpAddr;

use http::{HeaderName, HeaderValue, Method, Uri, header};

use super::schema::{RawCheck, RawInject};
use super::{FieldError, refuse};
use crate::config::{Check, Format, Injection, Place, places};

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

/// Entries with one `path_prefix` belong together: the key is put in all of their places. `base` is what the
/// catalogue says.
pub(super) fn compile_inject(
    raw: &[RawInject],
    base: &[Injection],
    errors: &mut Vec<FieldError>,
) -> Vec<Injection> {
    if raw.is_empty() {
        refuse(errors, "inject", "is empty; a request is never sent without its key");
    }
    let mut all: Vec<Injection> = Vec::new();
    for (i, one) in raw.iter().enumerate() {
        let field =
            |name: &str| if raw.len() == 1 { format!("inject.{name}") } else { format!("inject.{i}.{name}") };
        if let Some(problem) = misplaced(one, raw.last(), &all) {
            refuse(errors, field("path_prefix"), problem);
        }
        let place = match compile_place(one) {
            Ok(place) => place,
            Err((name, problem)) => {
                refuse(errors, field(name), problem);
                continue;
            }
        };
        // A query stands in the logs of everything on the way.
        if let (Place::Query { .. }, Some(header)) = (&place, places(base).filter_map(Place::header).last()) {
            let problem =
                format!("would show the key in logs on the way; this provider takes it in `{header}`");
            refuse(errors, field("query"), problem);
        }
        match all.iter_mut().find(|known| known.path_prefix == one.path_prefix) {
            Some(known) if known.places.iter().any(|other| is_one_place(other, &place)) => {
                let name = if place.header().is_some() { "header" } else { "query" };
                refuse(errors, field(name), "is there twice for one path");
            }
            Some(known) => known.places.push(place),
            None => all.push(Injection { path_prefix: one.path_prefix.clone(), places: vec![place] }),
        }
    }
    all
}

/// Why an entry stands in the wrong place of the list, behind the ways `before` it.
fn misplaced(one: &RawInject, last: Option<&RawInject>, before: &[Injection]) -> Option<String> {
    let is_new = !before.iter().any(|known| known.path_prefix == one.path_prefix);
    match &one.path_prefix {
        Some(prefix) if !prefix.starts_with('/') => Some(format!("is `{prefix}`, must begin with `/`")),
        Some(_) if last.is_some_and(|last| std::ptr::eq(last, one)) => {
            Some("must not stand on the last, which serves all other paths".into())
        }
        Some(_) if is_new && before.iter().any(|known| known.path_prefix.is_none()) => {
            Some("stands behind an entry without one, which serves all other paths".into())
        }
        _ => None,
    }
}

fn is_one_place(one: &Place, other: &Place) -> bool {
    one.header() == other.header() && one.query() == other.query()
}

fn compile_place(raw: &RawInject) -> Result<Place, (&'static str, String)> {
    if let Some(kind) = raw.kind {
        let alone = raw.header.is_none() && raw.query.is_none() && raw.format.is_none();
        return kind.place().filter(|_| alone).ok_or_else(|| {
            ("kind", "is \"bearer\" or \"basic\", and says all: without header, query and format".to_owned())
        });
    }
    let format = |usual: fn() -> Format| match &raw.format {
        Some(format) => Format::parse(format).map_err(|problem| ("format", problem)),
        None => Ok(usual()),
    };
    let header = match (&raw.header, &raw.query) {
        (Some(header), None) => header,
        (None, Some(query)) if query.is_empty() => return Err(("query", "is empty".into())),
        (None, Some(query)) => return Ok(Place::Query { name: query.clone(), value: format(Format::bare)? }),
        _ => return Err(("header", "or `query` or `kind` must be given, one of them".into())),
    };
    let name: HeaderName =
        header.parse().map_err(|_| ("header", format!("is `{header}`, which is no header name")))?;
    if is_framing(&name) || name == header::PROXY_AUTHORIZATION {
        return Err(("header", format!("is `{header}`, which no provider reads a key from")));
    }
    let usual = if name == header::AUTHORIZATION { Format::bearer } else { Format::bare };
    Ok(Place::Header { value: format(usual)?, name })
}

/// Whether a header frames or routes the message, is for the next hop alone, or steers lessor: what a setting
/// puts in one would break the message, or not arrive.
pub(in crate::config) fn is_framing(name: &HeaderName) -> bool {
    const NAMES: [&str; 11] = [
        "host",
        "content-length",
        "transfer-encoding",
        "connection",
        "keep-alive",
        "proxy-connection",
        "upgrade",
        "http2-settings",
        "te",
        "trailer",
        "expect",
    ];
    NAMES.contains(&name.as_str())
        || name.as_str().starts_with("x-lessor-")
        || name.as_str().starts_with("sec-websocket-")
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

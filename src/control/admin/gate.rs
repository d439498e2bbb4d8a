//! Who may ask the admin API what.
//!
//! Pure: the door, the request's head and the configuration in, a refusal out.

use std::net::{IpAddr, SocketAddr};

use http::header::{self, HeaderValue};
use http::request::Parts;
use http::uri::Authority;
use http::{Method, StatusCode};
use subtle::ConstantTimeEq as _;

use super::Refusal;
use crate::config::Config;

/// A body that says it is larger is refused at once; smaller ones are ignored.
const BODY_BYTES: u64 = 64 * 1024;

/// Where a request came in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Door {
    Tcp { here: SocketAddr, peer: SocketAddr },
    Unix { same_user: bool },
}

/// Whether this request may be answered at all.
pub(super) fn admit(config: &Config, door: Door, req: &Parts) -> Result<(), Refusal> {
    if let Door::Tcp { here, .. } = door {
        host_is_ours(config, here, req)?;
    }
    page_is_ours(req)?;
    let length = req.headers.get(header::CONTENT_LENGTH).and_then(|length| length.to_str().ok());
    if length.and_then(|length| length.parse().ok()).unwrap_or(0u64) > BODY_BYTES {
        let message = "the admin API reads no body; send none".into();
        return Err(Refusal::new(StatusCode::PAYLOAD_TOO_LARGE, "body_too_large", message));
    }
    let path = req.uri.path();
    if path == "/quit" && config.quit {
        return caller_is_here(door);
    }
    if path == "/v1" || path.starts_with("/v1/") { caller_is_known(config, door, req) } else { Ok(()) }
}

/// Stops DNS rebinding: a page that made its own name resolve to us still sends that name.
pub(super) fn host_is_ours(config: &Config, here: SocketAddr, req: &Parts) -> Result<(), Refusal> {
    let bad = |message: &str| Refusal::new(StatusCode::BAD_REQUEST, "bad_request", message.into());
    let mut lines = req.headers.get_all(header::HOST).iter();
    let named = match (lines.next(), lines.next()) {
        (Some(host), None) => {
            host.to_str().ok().and_then(host_of).ok_or_else(|| bad("the Host header cannot be read"))?
        }
        (None, _) => return Err(bad("a Host header is needed")),
        (Some(_), Some(_)) => return Err(bad("one Host header is allowed, not two")),
    };
    let target = req.uri.authority().map_or(Some(named.clone()), |to| host_of(to.as_str()));
    for host in [Some(named), target] {
        let ours = host.as_deref().is_some_and(|host| is_our_host(config, here.ip(), host));
        if !ours {
            let message = "this host is not lessor's: use a loopback name or the listener's own address, \
                           or add the name to listen.hosts";
            return Err(Refusal::new(StatusCode::FORBIDDEN, "origin_denied", message.into()));
        }
    }
    Ok(())
}

fn is_our_host(config: &Config, here: IpAddr, host: &str) -> bool {
    if host == "localhost" || host.ends_with(".localhost") {
        return true;
    }
    if let Ok(address) = host.parse::<IpAddr>() {
        let address = address.to_canonical();
        return address.is_loopback() || address == here.to_canonical();
    }
    config.listen.hosts.iter().any(|allowed| allowed == host)
}

/// The host of `host[:port]`, lower case, without brackets and final dot. The port is not looked at:
/// a forwarded port differs, and a page's own name is what gives it away.
fn host_of(authority: &str) -> Option<String> {
    let authority: Authority = authority.parse().ok()?;
    if authority.as_str().contains('@') {
        return None;
    }
    let host = authority.host().trim_start_matches('[').trim_end_matches(']');
    let host = host.strip_suffix('.').unwrap_or(host);
    (!host.is_empty()).then(|| host.to_ascii_lowercase())
}

/// Stops web pages from elsewhere, `http://localhost:3000` among them. What a person typed into the
/// address bar says `none`, and programs say nothing.
fn page_is_ours(req: &Parts) -> Result<(), Refusal> {
    let host = req.headers.get(header::HOST).and_then(|host| host.to_str().ok());
    let own = |origin: &HeaderValue| {
        let origin = origin.to_str().ok().and_then(|origin| origin.strip_prefix("http://"));
        origin.is_some() && origin == host
    };
    let site = req.headers.get_all("sec-fetch-site").iter();
    let mut sites = site.map(HeaderValue::as_bytes);
    if req.headers.get_all(header::ORIGIN).iter().all(own)
        && sites.all(|site| matches!(site, b"same-origin" | b"none"))
    {
        return Ok(());
    }
    let message = "web pages may not call the admin API".into();
    Err(Refusal::new(StatusCode::FORBIDDEN, "origin_denied", message))
}

/// Who may end the process: whoever shares loopback with it, as the apps of its pod do.
fn caller_is_here(door: Door) -> Result<(), Refusal> {
    let here = match door {
        Door::Unix { same_user } => same_user,
        Door::Tcp { here, peer } => {
            here.ip().to_canonical().is_loopback() && peer.ip().to_canonical().is_loopback()
        }
    };
    let message = "/quit is for this machine alone: POST it to the same port of 127.0.0.1";
    here.then_some(()).ok_or_else(|| Refusal::new(StatusCode::FORBIDDEN, "admin_forbidden", message.into()))
}

/// Who may see and change keys.
fn caller_is_known(config: &Config, door: Door, req: &Parts) -> Result<(), Refusal> {
    let forbidden = |message: &str| Refusal::new(StatusCode::FORBIDDEN, "admin_forbidden", message.into());
    let (here, peer) = match door {
        Door::Unix { same_user: true } => return Ok(()),
        Door::Unix { same_user: false } => {
            return Err(forbidden("this socket serves the user that lessor runs as, and no other"));
        }
        Door::Tcp { here, peer } => (here.ip().to_canonical(), peer.ip().to_canonical()),
    };
    if let Some(token) = &config.admin_token {
        let shown = req.headers.get(header::AUTHORIZATION).and_then(|shown| {
            let (scheme, shown) = shown.as_bytes().split_at_checked(7)?;
            scheme.eq_ignore_ascii_case(b"bearer ").then(|| shown.trim_ascii())
        });
        // The length may show in the time; the bytes do not.
        if shown.is_some_and(|shown| shown.ct_eq(token.expose().as_bytes()).into()) {
            return Ok(());
        }
        let message = "send the admin token as `Authorization: Bearer …`, or use the Unix socket".into();
        return Err(Refusal::new(StatusCode::UNAUTHORIZED, "admin_unauthenticated", message));
    }
    if !(here.is_loopback() && peer.is_loopback()) {
        return Err(forbidden("off loopback /v1 needs [admin] token to be set"));
    }
    if !matches!(req.method, Method::GET | Method::HEAD) {
        return Err(forbidden("without [admin] token the TCP listener only reads; use the Unix socket"));
    }
    Ok(())
}

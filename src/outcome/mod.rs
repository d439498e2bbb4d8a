//! Placeholder.
use crate::{config::Provider, model::*};
/// x
pub const MAX_BODY: usize = 65536;
/// x
pub fn needs_body(_: &Provider, s: http::StatusCode) -> bool {
    s.as_u16() >= 400
}
/// x
pub fn read(
    _: &Provider,
    s: http::StatusCode,
    h: &http::HeaderMap,
    b: &[u8],
    _: std::time::SystemTime,
) -> Outcome {
    let text = String::from_utf8_lossy(b);
    let class = match s.as_u16() {
        0..400 => Class::Success,
        401 | 403 => Class::Invalid,
        429 => Class::Rate,
        503 | 529 => Class::Overloaded,
        402 => Class::Quota,
        500.. => Class::Network,
        _ => Class::Caller,
    };
    let mut o = Outcome::plain(class, Some(s.as_u16()));
    o.proven = class != Class::Invalid || text.contains("invalid_api_key");
    if class == Class::Overloaded {
        o.scope = Scope::ProviderModel
    }
    o.wait =
        h.get("retry-after").and_then(|v| v.to_str().ok()?.parse().ok()).map(std::time::Duration::from_secs);
    o
}

//! stub
use crate::{config::Provider, model::*};
pub const MAX_BODY: usize = 65536;
pub fn needs_body(_: &Provider, _: http::StatusCode) -> bool {
    todo!()
}
pub fn read(
    _: &Provider,
    _: http::StatusCode,
    _: &http::HeaderMap,
    _: &[u8],
    _: std::time::SystemTime,
) -> Outcome {
    todo!()
}

//! The fields of a head, as every room that takes some out needs them. Nothing of ours is imported here.

use http::{HeaderMap, HeaderName, HeaderValue};

/// Whether a head has a field of this name: for those that few heads have. To compare a dozen names costs less than
/// to hash one.
pub(crate) fn has(headers: &HeaderMap, name: &HeaderName) -> bool {
    headers.keys().any(|known| known == name)
}

/// The first value of such a field.
pub(crate) fn get<'h>(headers: &'h HeaderMap, name: &HeaderName) -> Option<&'h HeaderValue> {
    if has(headers, name) { headers.get(name) } else { None }
}

/// Removes every field whose name is one that `goes`; how many names there were.
///
/// A head has a dozen names, and there are dozens that must not pass: each that is there is looked at, and not
/// each that may be.
pub(crate) fn remove(headers: &mut HeaderMap, goes: impl Fn(&str) -> bool) -> u64 {
    let mut gone = 0;
    while let Some(name) = headers.keys().find(|name| goes(name.as_str())).cloned() {
        headers.remove(name);
        gone += 1;
    }
    gone
}

//! The fields of a head, as every room that takes some out needs them. Nothing of ours is imported here.

use http::{HeaderMap, HeaderName};

/// Removes every field whose name is one that `goes`; how many names there were.
///
/// A head has a dozen names, and there are dozens that must not pass: each that is there is looked at, and not
/// each that may be.
pub(crate) fn remove(headers: &mut HeaderMap, goes: impl Fn(&HeaderName) -> bool) -> u64 {
    let mut gone = 0;
    while let Some(name) = headers.keys().find(|name| goes(name)).cloned() {
        headers.remove(name);
        gone += 1;
    }
    gone
}

//! Small texts: lists of hosts, names with a number, values as people may see them.

use std::fmt::Write as _;
use std::net::IpAddr;

/// What never goes through the proxy. Exact addresses and a leading dot, which all clients understand.
const LOCAL: [&str; 4] = ["localhost", ".localhost", "127.0.0.1", "::1"];

/// All entries of `set`, then loopback and the proxy's own address; each once.
pub(super) fn no_proxy(set: &[&str], proxy: IpAddr) -> String {
    // Most clients know this only where it stands alone: with more beside it, it would mean nothing.
    if set.iter().any(|list| list.trim() == "*") {
        return "*".into();
    }
    let own = proxy.to_string();
    let mut all: Vec<&str> = Vec::new();
    for entry in set.iter().flat_map(|list| entries(list)).chain(LOCAL).chain([own.as_str()]) {
        if !all.contains(&entry) {
            all.push(entry);
        }
    }
    all.join(",")
}

/// Clients take commas, and some take blanks, too.
fn entries(list: &str) -> impl Iterator<Item = &str> {
    list.split(|c: char| c == ',' || c.is_ascii_whitespace()).filter(|entry| !entry.is_empty())
}

/// Whether some client takes an entry of this list for `host`, which is in lower case.
pub(super) fn matches(list: &str, host: &str) -> bool {
    entries(&list.to_ascii_lowercase()).any(|entry| {
        let suffix = entry.trim_start_matches('*').trim_start_matches('.');
        entry == "*"
            || !suffix.is_empty()
                && host.strip_suffix(suffix).is_some_and(|rest| rest.is_empty() || rest.ends_with('.'))
    })
}

/// Whether `other` is `name` with `_` and a number behind it.
pub(super) fn is_numbered(other: &str, name: &str) -> bool {
    let number = other.strip_prefix(name).and_then(|rest| rest.strip_prefix('_'));
    number.is_some_and(|number| !number.is_empty() && number.bytes().all(|b| b.is_ascii_digit()))
}

/// A value without user, password, query and control characters.
pub(super) fn shown(value: &str) -> String {
    let (scheme, rest) = value.split_once("://").map_or(("", value), |(scheme, rest)| (scheme, rest));
    let rest = rest.split(['?', '#']).next().unwrap_or_default();
    let (authority, path) = rest.find('/').map_or((rest, ""), |at| rest.split_at(at));
    let host = authority.rsplit('@').next().unwrap_or_default();
    let colon = if scheme.is_empty() { "" } else { "://" };
    format!("{scheme}{colon}{host}{path}").chars().filter(|c| !c.is_control()).collect()
}

/// Percent-encodes for the user part of a URL.
pub(super) fn percent(text: &str) -> String {
    text.bytes().fold(String::new(), |mut all, byte| {
        if byte.is_ascii_alphanumeric() || b"-._~".contains(&byte) {
            all.push(char::from(byte));
        } else {
            let _ = write!(all, "%{byte:02X}"); // writing to a `String` cannot fail
        }
        all
    })
}

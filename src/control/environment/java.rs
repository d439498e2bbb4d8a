//! Java reads no proxy variable; `JAVA_TOOL_OPTIONS` is how it is told from outside.

use std::net::SocketAddr;
use std::path::Path;

/// The property that names a trust store.
pub(super) const STORE: &str = "-Djavax.net.ssl.trustStore=";

/// Options for every JVM. `https` only with a trust store: Java reads no PEM file by itself.
pub(in crate::control) fn options(proxy: SocketAddr, store: Option<&Path>, no_proxy: &str) -> String {
    let (host, port) = (proxy.ip(), proxy.port());
    let mut options =
        format!("-Dhttp.proxyHost={host} -Dhttp.proxyPort={port} -Dhttp.nonProxyHosts={}", hosts(no_proxy));
    // The JVM splits at spaces, so a path with one cannot be said.
    if let Some(store) = store.filter(|path| !path.display().to_string().contains(char::is_whitespace)) {
        options = format!(
            "{options} -Dhttps.proxyHost={host} -Dhttps.proxyPort={port} {STORE}{} \
             -Djavax.net.ssl.trustStoreType=PKCS12",
            store.display()
        );
    }
    options
}

/// `now` with ours behind it; `None` where it names a proxy of its own.
pub(in crate::control) fn merged(now: &str, ours: &str, overrides: bool) -> Option<String> {
    if now.contains(ours) {
        return Some(now.to_owned());
    }
    if now.contains("proxyHost") && !overrides {
        return None;
    }
    // Of an option that is given twice the JVM takes the last.
    Some(if now.is_empty() { ours.to_owned() } else { format!("{now} {ours}") })
}

/// `NO_PROXY` as Java writes it: `|` between, `*` for a suffix, brackets around IPv6; no networks.
fn hosts(no_proxy: &str) -> String {
    // A pod's list refers to variables, `$(NAME)`, which Kubernetes puts in.
    let plain = |c: char| c.is_ascii_alphanumeric() || "-._:*$()_".contains(c);
    let entries = no_proxy.split(',').filter(|entry| entry.chars().all(plain));
    let entries = entries.map(|entry| match entry {
        v6 if v6.parse::<std::net::Ipv6Addr>().is_ok() => format!("[{v6}]"),
        suffix if suffix.starts_with('.') => format!("*{suffix}"),
        other => other.to_owned(),
    });
    entries.collect::<Vec<_>>().join("|")
}

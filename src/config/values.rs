//! Durations, sizes, addresses and the like: text in, value out, and what would be right if it is not.

use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use super::Address;

/// The longest duration that is taken; more is a slip, and `Instant` arithmetic must not overflow.
pub(super) const LONGEST: Duration = Duration::from_hours(365 * 24);

/// How a duration is written, for messages.
pub(super) const DURATION_FORM: &str = "must be a duration such as \"500ms\", \"30s\", \"10m\" or \"1h30m\"";

/// How a size is written, for messages.
pub(super) const SIZE_FORM: &str = "must be a size such as \"64KB\", \"8MiB\" or a number of bytes";

/// Reads `500ms`, `30s`, `1h30m`, `1.5s`. A bare number has no unit, so text must name one.
pub(super) fn duration(text: &str) -> Option<Duration> {
    let mut rest = text;
    let mut total = Duration::ZERO;
    while !rest.is_empty() {
        let digits = rest.find(|c: char| !c.is_ascii_digit() && c != '.')?;
        let (number, tail) = rest.split_at(digits);
        let unit = tail.find(|c: char| c.is_ascii_digit()).unwrap_or(tail.len());
        let (unit, tail) = tail.split_at(unit);
        let seconds = match unit {
            "ms" => 0.001,
            "s" => 1.0,
            "m" => 60.0,
            "h" => 3600.0,
            "d" => 86400.0,
            _ => return None,
        };
        if !number.starts_with(|c: char| c.is_ascii_digit()) || number.len() > 12 {
            return None;
        }
        let part = Duration::try_from_secs_f64(number.parse::<f64>().ok()? * seconds).ok()?;
        // A float's rounding must not make 100ms of 0.1s and a bit.
        let micros = u64::try_from((part.as_nanos() + 500) / 1000).ok()?;
        total = total.checked_add(Duration::from_micros(micros))?;
        rest = tail;
    }
    (!text.is_empty()).then_some(total)
}

/// A duration as a person would write it: `45s`, `1m30s`.
pub(super) fn spell(duration: Duration) -> String {
    humantime::format_duration(duration).to_string().replace(' ', "")
}

/// Reads `8MiB`, `64KB`, `512B` or `512`.
pub(super) fn size(text: &str) -> Option<usize> {
    let text = text.trim();
    let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let factor: usize = match unit.trim_start().to_ascii_lowercase().as_str() {
        "" | "b" => 1,
        "kb" => 1000,
        "mb" => 1000 * 1000,
        "gb" => 1000 * 1000 * 1000,
        "kib" => 1 << 10,
        "mib" => 1 << 20,
        "gib" => 1 << 30,
        _ => return None,
    };
    number.parse::<usize>().ok()?.checked_mul(factor)
}

/// The default mode of a Unix socket.
pub(super) const SOCKET_MODE: u32 = 0o600;

/// Reads `127.0.0.1:8321`, `[::1]:8321` or `unix:/path`.
pub(super) fn address(text: &str) -> Result<Address, String> {
    if let Some(path) = text.strip_prefix("unix:") {
        return socket_path(path).map(|path| Address::Unix(path, SOCKET_MODE));
    }
    if let Ok(at) = text.parse::<SocketAddr>() {
        return Ok(Address::Tcp(at));
    }
    let port = text.rsplit_once(':').and_then(|(host, port)| Some((host, port.parse::<u16>().ok()?)));
    Err(match port {
        Some(("localhost", port)) => format!("must be an address, not a name: \"127.0.0.1:{port}\""),
        Some(("" | "*", port)) => {
            format!("must say which address: \"127.0.0.1:{port}\" or \"0.0.0.0:{port}\"")
        }
        _ if text.parse::<IpAddr>().is_ok() => "has no port; must be such as \"127.0.0.1:8321\"".into(),
        _ => "must be an address such as \"127.0.0.1:8321\" or \"unix:/run/lessor/proxy.sock\"".into(),
    })
}

/// Checks the path of a Unix socket.
pub(super) fn socket_path(path: &str) -> Result<PathBuf, String> {
    let path = path.strip_prefix("//").map_or(path, |rest| rest);
    if path.is_empty() || path.ends_with('/') || path.contains('\0') {
        return Err("names no socket; must be such as \"unix:/run/lessor/proxy.sock\"".into());
    }
    // `sun_path` is 108 bytes on Linux, 104 elsewhere, the closing NUL included.
    if path.len() > 103 {
        return Err("is longer than the 103 bytes that a socket's path may have".into());
    }
    Ok(PathBuf::from(path))
}

/// Whether only this machine reaches the address, mapped IPv6 forms included.
pub(super) fn is_loopback(ip: IpAddr) -> bool {
    ip.to_canonical().is_loopback()
}

/// Whether a URL's host is this machine.
pub(super) fn is_loopback_host(host: &str) -> bool {
    let bare = host.trim_start_matches('[').trim_end_matches(']');
    bare.eq_ignore_ascii_case("localhost") || bare.parse().is_ok_and(is_loopback)
}

/// Whether both cannot be listened on at once.
pub(super) fn collide(a: &Address, b: &Address) -> bool {
    match (a, b) {
        (Address::Tcp(a), Address::Tcp(b)) => {
            let everywhere = |x: &SocketAddr, y: &SocketAddr| {
                x.ip().is_unspecified() && (x.is_ipv6() || y.is_ipv4() == x.is_ipv4())
            };
            a.port() != 0
                && a.port() == b.port()
                && (a.ip() == b.ip() || everywhere(a, b) || everywhere(b, a))
        }
        (Address::Unix(a, _), Address::Unix(b, _)) => a == b,
        _ => false,
    }
}

/// Reads a host name without scheme, port or path; in lower case.
pub(super) fn host(text: &str) -> Option<String> {
    let good = (1..=253).contains(&text.len())
        && text.bytes().all(|b| b.is_ascii_alphanumeric() || b"-._".contains(&b))
        && !text.starts_with(['.', '-'])
        || text
            .strip_prefix('[')
            .and_then(|t| t.strip_suffix(']'))
            .is_some_and(|ip| ip.parse::<std::net::Ipv6Addr>().is_ok());
    good.then(|| text.trim_end_matches('.').to_ascii_lowercase())
}

/// Reads a web origin: scheme, host and perhaps a port, in lower case.
pub(super) fn origin(text: &str) -> Option<String> {
    let lower = text.to_ascii_lowercase();
    let rest = lower.strip_prefix("https://").or_else(|| lower.strip_prefix("http://"))?;
    let name = match rest.rsplit_once(':') {
        Some((name, port)) if !port.ends_with(']') => {
            port.parse::<u16>().ok()?;
            name
        }
        _ => rest,
    };
    host(name)?;
    Some(lower)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a test that fails may panic
mod tests {
    use super::*;

    #[test]
    fn durations_need_a_unit_and_may_be_compound_or_fractions() {
        for (text, want) in [
            ("500ms", Some(500)),
            ("30s", Some(30_000)),
            ("10m", Some(600_000)),
            ("1h30m", Some(5_400_000)),
            ("1.5s", Some(1500)),
            ("0.1s", Some(100)),
            ("0s", Some(0)),
            ("2d", Some(172_800_000)),
            ("", None),
            ("30", None),
            ("s", None),
            ("-3s", None),
            ("3 s", None),
            ("1..5s", None),
            (".5s", None),
            ("3x", None),
            ("9999999999999999s", None),
        ] {
            assert_eq!(duration(text), want.map(Duration::from_millis), "{text}");
        }
    }

    #[test]
    fn sizes_tell_decimal_from_binary_units() {
        for (text, want) in [
            ("8MiB", Some(8 << 20)),
            ("64KB", Some(64_000)),
            ("64kb", Some(64_000)),
            ("512", Some(512)),
            ("1 GiB", Some(1 << 30)),
            ("8M", None),
            ("", None),
            ("-1", None),
            ("99999999999999999999", None),
            ("18446744073709551615KiB", None),
        ] {
            assert_eq!(size(text), want, "{text}");
        }
    }

    #[test]
    fn an_address_that_is_not_one_says_what_would_be() {
        assert_eq!(address("[::1]:0").unwrap().to_string(), "[::1]:0");
        assert_eq!(address("unix:/run/l.sock").unwrap().to_string(), "unix:/run/l.sock");
        assert!(address("localhost:8321").unwrap_err().contains("127.0.0.1:8321"));
        assert!(address(":8321").unwrap_err().contains("0.0.0.0:8321"));
        assert!(address("127.0.0.1").unwrap_err().contains("no port"));
        assert!(address("unix:").is_err());
        assert!(address(&format!("unix:/{}", "a".repeat(103))).is_err());
    }

    #[test]
    fn two_listeners_collide_on_one_port_also_through_a_wildcard_but_never_on_port_0() {
        let tcp = |text: &str| address(text).unwrap();
        assert!(collide(&tcp("127.0.0.1:1"), &tcp("127.0.0.1:1")));
        assert!(collide(&tcp("0.0.0.0:1"), &tcp("127.0.0.1:1")));
        assert!(collide(&tcp("127.0.0.1:1"), &tcp("[::]:1")));
        assert!(!collide(&tcp("0.0.0.0:1"), &tcp("[::1]:1")));
        assert!(!collide(&tcp("127.0.0.1:0"), &tcp("127.0.0.1:0")));
        assert!(!collide(&tcp("127.0.0.1:1"), &tcp("127.0.0.2:1")));
        assert!(collide(&tcp("unix:/a"), &tcp("unix:/a")));
    }

    #[test]
    fn hosts_have_no_port_and_origins_no_path() {
        assert_eq!(host("Lessor.Internal").as_deref(), Some("lessor.internal"));
        assert_eq!(host("[::1]").as_deref(), Some("[::1]"));
        for bad in ["", "a:1", "http://a", "a/b", "*.a", ".a"] {
            assert_eq!(host(bad), None, "{bad}");
        }
        assert_eq!(origin("https://App.example:8443").as_deref(), Some("https://app.example:8443"));
        for bad in ["app.example", "https://a/", "*", "null", "ftp://a", "https://", "https://a:x"] {
            assert_eq!(origin(bad), None, "{bad}");
        }
    }
}

//! The way to a provider: its name, TLS as forwarding verifies it, and its clock.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rustls::CertificateError;
use rustls::pki_types::{CertificateDer, ServerName};
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;
use x509_parser::prelude::{FromDer as _, X509Certificate};

use super::{Check, Tools, Verdict, line};
use crate::config::{Config, Provider};
use crate::words::of_tls;

/// The bound of resolving a name.
const RESOLVE: Duration = Duration::from_secs(5);
/// The bound of a connection, and of a handshake.
const CONNECT: Duration = Duration::from_secs(8);
/// The bound of asking for the time.
const DATE: Duration = Duration::from_secs(5);
/// Bytes of an answer's head that are read for its date.
const HEAD: usize = 16 * 1024;
/// Hosts of one provider that are looked at.
const MOST_HOSTS: usize = 8;
/// Clocks may be so far apart.
pub(super) const CLOCK_GAP: Duration = Duration::from_secs(5);

/// One place that a provider's requests go to.
struct Target {
    host: String,
    port: u16,
    tls: bool,
    /// Where base-URL mode sends; a further host matters to those alone who ask for it through the proxy.
    base: bool,
}

impl Target {
    /// As a base URL has them: everything goes to the user's own, else to each of the provider's hosts.
    fn all(provider: &Provider) -> Vec<Self> {
        let base = &provider.base_url;
        let tls = base.scheme_str() != Some("http");
        let own = base.host().unwrap_or_default().trim_matches(['[', ']']);
        let port = base.port_u16().unwrap_or(if tls { 443 } else { 80 });
        let mut all = vec![Self { host: own.to_owned(), port, tls, base: true }];
        if !provider.base_url_is_users {
            let others = provider.hosts.iter().filter(|host| **host != own);
            all.extend(others.map(|host| Self { host: host.clone(), port: 443, tls: true, base: false }));
        }
        all.truncate(MOST_HOSTS);
        all
    }
}

/// Looks at the way to each of a provider's hosts.
pub(super) async fn examine(config: &Config, provider: &Provider, tools: Tools) -> Vec<Check> {
    let each = Target::all(provider).into_iter().map(|target| async move {
        let (dns, addresses) = resolve(config, &target).await;
        let mut checks = vec![dns];
        if !addresses.is_empty() {
            checks.extend(handshake(config, provider, &target, &addresses, tools).await);
        }
        for check in checks.iter_mut().filter(|check| !target.base && check.verdict == Verdict::Fail) {
            check.verdict = Verdict::Warn;
        }
        checks
    });
    futures_util::future::join_all(each).await.into_iter().flatten().collect()
}

async fn resolve(config: &Config, target: &Target) -> (Check, Vec<SocketAddr>) {
    let Target { host, port, .. } = target;
    let name = format!("dns {host}");
    if let Ok(ip) = host.parse::<IpAddr>() {
        return (Check::ok(name, "is an address"), vec![(ip, *port).into()]);
    }
    let found = match timeout(RESOLVE, tokio::net::lookup_host((host.as_str(), *port))).await {
        Ok(Ok(found)) => found.collect::<Vec<_>>(),
        Ok(Err(error)) => return (unresolved(name, &error.to_string()), Vec::new()),
        Err(_) => return (unresolved(name, &format!("no answer within {RESOLVE:?}")), Vec::new()),
    };
    let mut ips: Vec<String> = found.iter().map(|at| at.ip().to_string()).collect();
    ips.dedup();
    ips.truncate(4);
    let shown = format!("resolves to {}", ips.join(", "));
    let any = |is: &dyn Fn(IpAddr) -> bool| found.iter().any(|at| is(at.ip().to_canonical()));
    let local = host == "localhost" || host.ends_with(".localhost");
    let check = if found.is_empty() {
        return (unresolved(name, "it has no address"), Vec::new());
    } else if any(&|ip| ip.is_unspecified()) {
        Check::fail(name, shown, "a filter blocks this name: allow it in the resolver that this machine asks")
    } else if any(&|ip| config.proxy.deny_nets.iter().any(|net| net.contains(&ip))) {
        let advice = "no provider has an address of proxy.deny_nets: see who answers for this name";
        Check::warn(name, shown, advice)
    } else if !local && any(&|ip| ip.is_loopback()) {
        let advice =
            "the name leads to this machine: unless you stand in for the provider, look into /etc/hosts";
        Check::warn(name, shown, advice)
    } else {
        Check::ok(name, shown)
    };
    (check, found)
}

fn unresolved(name: String, why: &str) -> Check {
    let advice = "correct base_url, or see what this machine asks for names (/etc/resolv.conf, a container's \
                  or pod's DNS policy)";
    Check::fail(name, format!("does not resolve: {}", line(why)), advice)
}

/// Connects and shakes hands; then asks for the time on the same connection.
async fn handshake(
    config: &Config,
    provider: &Provider,
    target: &Target,
    addresses: &[SocketAddr],
    tools: Tools,
) -> Vec<Check> {
    let Target { host, port, tls, .. } = target;
    let name = format!("tls {host}");
    let stream = match dial(addresses, config.timeouts.connect.min(CONNECT)).await {
        Ok(stream) => stream,
        Err(why) => {
            let advice = format!(
                "open the way to {host}:{port}: a firewall, or a network that only lets a proxy out, which lessor \
                 does not use for its own requests"
            );
            return vec![Check::fail(name, format!("no connection: {why}"), advice)];
        }
    };
    if !tls {
        let plain = Check::ok(name, "plain http, as base_url says: nothing is encrypted, nobody is verified");
        return std::iter::once(plain).chain(clock(host, date(stream, host).await)).collect();
    }
    // The system's roots are some hundred files on some systems: not on a thread that serves.
    let (tls, ca_file) = (tools.tls, provider.ca_file.clone());
    let client = tokio::task::spawn_blocking(move || tls(ca_file.as_deref())).await;
    let (client, seen) = match client.map_err(|error| error.to_string()).flatten() {
        Ok(client) => client,
        Err(why) => return vec![Check::fail(name, why, "correct the provider's ca_file")],
    };
    let Ok(server) = ServerName::try_from(host.clone()) else {
        return vec![Check::fail(name, "is no name that TLS can verify", "correct base_url")];
    };
    let shaken = timeout(CONNECT, TlsConnector::from(Arc::new(client)).connect(server, stream)).await;
    let chain = seen.lock().unwrap_or_else(std::sync::PoisonError::into_inner).clone();
    match shaken {
        Ok(Ok(stream)) => {
            let good = Check::ok(name, format!("verified: {}", certificate(&chain)));
            std::iter::once(good).chain(clock(host, date(stream, host).await)).collect()
        }
        Ok(Err(error)) => vec![refused(name, provider, host, &error, &chain)],
        Err(_) => vec![Check::fail(
            name,
            format!("no handshake within {CONNECT:?}"),
            format!("see whether {host}:{port} speaks TLS, and what stands between"),
        )],
    }
}

async fn dial(addresses: &[SocketAddr], bound: Duration) -> Result<TcpStream, String> {
    match timeout(bound, TcpStream::connect(addresses)).await {
        Ok(Ok(stream)) => Ok(stream),
        Ok(Err(error)) => Err(error.to_string()),
        Err(_) => Err(format!("no answer within {bound:?}")),
    }
}

/// Why TLS failed: trust, name, time, or something else.
fn refused(
    name: String,
    provider: &Provider,
    host: &str,
    error: &std::io::Error,
    chain: &[CertificateDer<'_>],
) -> Check {
    let tls = error.get_ref().and_then(|inner| inner.downcast_ref::<rustls::Error>());
    let shown = certificate(chain);
    let Some(rustls::Error::InvalidCertificate(why)) = tls else {
        let advice = "see whether it speaks TLS at that port; where it is plain http, base_url says http://";
        return Check::fail(name, format!("no TLS: {}", line(&error.to_string())), advice);
    };
    match why {
        CertificateError::UnknownIssuer => {
            let advice = format!(
                "where a proxy of your network opens TLS, name its CA in [providers.{}] ca_file or add it to the \
                 system's roots; else somebody stands between",
                provider.name
            );
            Check::fail(name, format!("not trusted: {shown}"), advice)
        }
        CertificateError::Expired
        | CertificateError::ExpiredContext { .. }
        | CertificateError::NotValidYet
        | CertificateError::NotValidYetContext { .. } => {
            let now = httpdate::fmt_http_date(SystemTime::now());
            let advice = "see whether this machine's clock is right; if so, the host's owner must renew it";
            Check::fail(name, format!("not valid at this machine's time ({now}): {shown}"), advice)
        }
        CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. } => {
            let advice = "correct base_url, or see whether the name leads to another's address";
            Check::fail(name, format!("is not for {host}: {shown}"), advice)
        }
        other => {
            let advice = "the host's owner must mend its certificate, or somebody stands between";
            Check::fail(name, format!("refused ({}): {shown}", of_tls(&format!("{other:?}"))), advice)
        }
    }
}

/// Whose certificate it is, by whom, and until when.
fn certificate(chain: &[CertificateDer<'_>]) -> String {
    let Some(first) = chain.first() else { return "no certificate was shown".into() };
    let Ok((_, parsed)) = X509Certificate::from_der(first) else {
        return "a certificate that cannot be read".into();
    };
    let names = parsed.subject_alternative_name().ok().flatten().map(|names| {
        let dns = names.value.general_names.iter().filter_map(|name| match name {
            x509_parser::extensions::GeneralName::DNSName(name) => Some((*name).to_owned()),
            _ => None,
        });
        dns.take(3).collect::<Vec<_>>().join(", ")
    });
    let subject = names.filter(|names| !names.is_empty()).unwrap_or_else(|| parsed.subject().to_string());
    let seconds = u64::try_from(parsed.validity().not_after.timestamp()).unwrap_or_default();
    let until = httpdate::fmt_http_date(UNIX_EPOCH + Duration::from_secs(seconds.min(253_402_300_799)));
    line(&format!("{subject}, issued by {}, until {until}", parsed.issuer()))
}

/// The time that the other side says. The request carries nothing: no key is needed to be told the time.
async fn date(mut stream: impl AsyncRead + AsyncWrite + Unpin, host: &str) -> Option<SystemTime> {
    let host = if host.contains(':') { format!("[{host}]") } else { host.to_owned() };
    let request = format!(
        "HEAD / HTTP/1.1\r\nhost: {host}\r\nuser-agent: lessor-doctor/{}\r\nconnection: close\r\n\r\n",
        env!("CARGO_PKG_VERSION")
    );
    let ask = async {
        stream.write_all(request.as_bytes()).await.ok()?;
        stream.flush().await.ok()?;
        let mut head = Vec::new();
        while head.len() < HEAD && !head.windows(4).any(|end| end == b"\r\n\r\n") {
            if stream.read_buf(&mut head).await.ok()? == 0 {
                break;
            }
        }
        let head = String::from_utf8_lossy(&head).into_owned();
        let line =
            head.lines().find(|line| line.get(..5).is_some_and(|name| name.eq_ignore_ascii_case("date:")))?;
        httpdate::parse_http_date(line[5..].trim()).ok()
    };
    timeout(DATE, ask).await.ok().flatten()
}

fn clock(host: &str, there: Option<SystemTime>) -> Option<Check> {
    let since = |at: SystemTime| at.duration_since(UNIX_EPOCH).unwrap_or_default();
    let there = since(there?);
    let name = format!("clock {host}");
    Some(match gap_in_words(since(SystemTime::now()), there) {
        Some((gap, words)) if gap > CLOCK_GAP => Check::warn(
            name,
            format!("this machine's clock is {words} the provider's"),
            "set this machine's clock by NTP: waits that a provider names as a time of day are read by it",
        ),
        _ => Check::ok(name, format!("within {CLOCK_GAP:?} of this machine's")),
    })
}

/// How far `here` is from `there`; `None` within a second.
pub(super) fn gap_in_words(here: Duration, there: Duration) -> Option<(Duration, String)> {
    let gap = here.abs_diff(there);
    let words = if here > there { "ahead of" } else { "behind" };
    let whole = Duration::from_secs(gap.as_secs());
    (!whole.is_zero()).then(|| (gap, format!("{} {words}", humantime::format_duration(whole))))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gap_between_clocks_has_a_direction_and_below_a_second_is_none() {
        let at = Duration::from_millis;
        assert_eq!(gap_in_words(at(10_500), at(10_000)), None);
        assert_eq!(gap_in_words(at(70_000), at(9_900)), Some((at(60_100), "1m ahead of".into())));
        assert_eq!(gap_in_words(at(1_000), at(3_601_000)), Some((at(3_600_000), "1h behind".into())));
    }
}

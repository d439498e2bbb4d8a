//! Dialling: resolved once, checked where a check is due, and that very address is connected to.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use http::Uri;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::client::legacy::connect::dns::Name;
use ipnet::IpNet;
use tower_service::Service;

/// Which addresses may be reached.
#[derive(Debug, Clone)]
pub enum Reach {
    /// All: the provider's host was configured, and its certificate is checked.
    Configured,
    /// All but these: the host was named by a client.
    Named(Arc<Denied>),
}

/// What clients may not reach through lessor.
#[derive(Debug)]
pub struct Denied {
    /// `proxy.deny_nets`.
    pub nets: Vec<IpNet>,
    /// lessor's own listeners: no loops, and no way to the admin doors.
    pub own: Vec<SocketAddr>,
    /// A listener is off loopback: then callers are elsewhere, and this machine's own loopback services
    /// are none of theirs.
    pub loopback: bool,
}

/// A target that may not be reached, found after resolution.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{0} may not be reached through lessor (proxy.deny_nets, or its own listener)")]
pub struct NotAllowed(pub SocketAddr);

impl Denied {
    fn check(&self, at: SocketAddr) -> Result<(), NotAllowed> {
        let carried = match at.ip() {
            IpAddr::V6(ip) => carried(ip),
            IpAddr::V4(_) => None,
        };
        let is_denied = |ip| self.denies(ip, at.port());
        if is_denied(at.ip()) || carried.is_some_and(|ip| is_denied(IpAddr::V4(ip))) {
            return Err(NotAllowed(at));
        }
        Ok(())
    }

    fn denies(&self, ip: IpAddr, port: u16) -> bool {
        let own = self.own.iter().any(|own| {
            own.port() == port
                && (own.ip() == ip
                    || ip.is_unspecified()
                    || (own.ip().is_unspecified() && is_this_machine(ip)))
        });
        let inside = self.nets.iter().any(|net| net.contains(&ip));
        own || inside || ip.is_unspecified() || (self.loopback && ip.is_loopback())
    }
}

/// The IPv4 address that an IPv6 one leads to, where something on the way translates: mapped and compatible ones
/// (RFC 4291), translated (RFC 2765), NAT64 by its two prefixes (RFC 6052, RFC 8215), 6to4 (RFC 3056) and Teredo
/// (RFC 4380, which writes it inverted).
fn carried(ip: Ipv6Addr) -> Option<Ipv4Addr> {
    let whole = ip.to_bits();
    let low = |bits: u128| Ipv4Addr::from_bits(u32::try_from(bits & 0xffff_ffff).unwrap_or_default());
    match ip.segments() {
        [0x2002, ..] => Some(low(whole >> 80)),
        [0x2001, 0, ..] => Some(low(!whole)),
        // `::1` and `::` are addresses of their own.
        [0, 0, 0, 0, 0, 0, ..] => (whole > 1).then(|| low(whole)),
        [0, 0, 0, 0, 0, 0xffff, ..]
        | [0, 0, 0, 0, 0xffff, 0, ..]
        | [0x64, 0xff9b, 0, 0, 0, 0, ..]
        | [0x64, 0xff9b, 1, ..] => Some(low(whole)),
        _ => None,
    }
}

/// Whether an address is one of this machine's: only those can be bound.
fn is_this_machine(ip: IpAddr) -> bool {
    ip.is_loopback() || std::net::UdpSocket::bind((ip, 0)).is_ok()
}

/// The system's resolver, with the check behind it. All of a name's addresses must be allowed ones:
/// a name that points at both is an attempt.
#[derive(Debug, Clone)]
pub struct Resolver(Reach);

type Resolving = Pin<Box<dyn Future<Output = io::Result<std::vec::IntoIter<SocketAddr>>> + Send>>;

impl Service<Name> for Resolver {
    type Response = std::vec::IntoIter<SocketAddr>;
    type Error = io::Error;
    type Future = Resolving;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, name: Name) -> Resolving {
        let reach = self.0.clone();
        Box::pin(async move {
            let found: Vec<SocketAddr> = tokio::net::lookup_host((name.as_str(), 0)).await?.collect();
            if let Reach::Named(denied) = &reach {
                // The port is the connector's to set; own listeners are checked again with it.
                for at in &found {
                    denied
                        .check(*at)
                        .map_err(|error| io::Error::new(io::ErrorKind::PermissionDenied, error))?;
                }
            }
            Ok(found.into_iter())
        })
    }
}

/// A TCP connector under a reach. Literal addresses never pass a resolver, so they are checked first.
#[derive(Debug, Clone)]
pub struct Dialer {
    inner: HttpConnector<Resolver>,
    reach: Reach,
}

/// Any error on the way.
pub type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// A future that connects.
pub type Connecting<T> = Pin<Box<dyn Future<Output = Result<T, BoxError>> + Send>>;

impl Dialer {
    /// Connects within `timeout` an address family.
    pub fn new(reach: Reach, timeout: Duration) -> Self {
        let mut inner = HttpConnector::new_with_resolver(Resolver(reach.clone()));
        inner.enforce_http(false);
        // Small chunks of a stream must not wait for delayed ACKs.
        inner.set_nodelay(true);
        inner.set_connect_timeout(Some(timeout));
        inner.set_keepalive(Some(Duration::from_mins(1)));
        Self { inner, reach }
    }

    fn check_literal(&self, uri: &Uri) -> Result<(), NotAllowed> {
        let Reach::Named(denied) = &self.reach else { return Ok(()) };
        let host = uri.host().unwrap_or_default();
        let bare = host.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')).unwrap_or(host);
        let port = uri.port_u16().unwrap_or(80);
        match bare.parse::<IpAddr>() {
            Ok(ip) => denied.check(SocketAddr::new(ip, port)),
            Err(_) => Ok(()),
        }
    }
}

impl Service<Uri> for Dialer {
    type Response = <HttpConnector<Resolver> as Service<Uri>>::Response;
    type Error = BoxError;
    type Future = Connecting<Self::Response>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        self.inner.poll_ready(cx).map_err(Into::into)
    }

    fn call(&mut self, uri: Uri) -> Self::Future {
        if let Err(error) = self.check_literal(&uri) {
            return Box::pin(std::future::ready(Err(error.into())));
        }
        let reach = self.reach.clone();
        let connecting = self.inner.call(uri);
        Box::pin(async move {
            let stream = connecting.await?;
            if let Reach::Named(denied) = reach {
                // With the port known: a name that led to one of lessor's own listeners.
                denied.check(stream.inner().peer_addr()?)?;
            }
            Ok(stream)
        })
    }
}

/// Bounds a connector's whole work, TLS included.
#[derive(Debug, Clone)]
pub struct Bounded<C> {
    inner: C,
    timeout: Duration,
}

impl<C> Bounded<C> {
    /// `inner` within `timeout`.
    pub fn new(inner: C, timeout: Duration) -> Self {
        Self { inner, timeout }
    }
}

/// Connecting took longer than `timeouts.connect`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("no connection within {0:?} (timeouts.connect)")]
pub struct ConnectTimeout(pub Duration);

impl<C> Service<Uri> for Bounded<C>
where
    C: Service<Uri, Error: Into<BoxError>, Future: Send + 'static>,
    C::Response: 'static,
{
    type Response = C::Response;
    type Error = BoxError;
    type Future = Connecting<C::Response>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        self.inner.poll_ready(cx).map_err(Into::into)
    }

    fn call(&mut self, uri: Uri) -> Self::Future {
        let connecting = self.inner.call(uri);
        let timeout = self.timeout;
        Box::pin(async move {
            match tokio::time::timeout(timeout, connecting).await {
                Ok(connected) => connected.map_err(Into::into),
                Err(_) => Err(ConnectTimeout(timeout).into()),
            }
        })
    }
}

/// Whether no connection came about in time: in all of it, or in the share of it that each of a host's addresses has.
pub fn timed_out(error: &(dyn std::error::Error + 'static)) -> bool {
    caused_by::<ConnectTimeout>(error).is_some()
        || caused_by::<io::Error>(error).is_some_and(|error| error.kind() == io::ErrorKind::TimedOut)
}

/// Whether some cause of `error` is a `T`.
pub fn caused_by<'a, T: std::error::Error + 'static>(
    error: &'a (dyn std::error::Error + 'static),
) -> Option<&'a T> {
    let mut next = Some(error);
    while let Some(error) = next {
        if let Some(found) = error.downcast_ref::<T>() {
            return Some(found);
        }
        // `io::Error` hides the error it was made from behind itself.
        if let Some(inner) = error.downcast_ref::<io::Error>().and_then(io::Error::get_ref)
            && let Some(found) = inner.downcast_ref::<T>()
        {
            return Some(found);
        }
        next = error.source();
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn denied_nets_own_listeners_and_mapped_forms_are_refused() {
        let denied = Denied {
            nets: vec!["169.254.0.0/16".parse().unwrap(), "fe80::/10".parse().unwrap()],
            own: vec!["127.0.0.1:8322".parse().unwrap(), "0.0.0.0:8321".parse().unwrap()],
            loopback: false,
        };
        for at in [
            "169.254.169.254:80",
            "[::ffff:169.254.169.254]:80",
            "[::169.254.169.254]:80",
            "[::ffff:0:169.254.169.254]:80",
            "[64:ff9b::169.254.169.254]:80",
            "[64:ff9b:1::169.254.169.254]:80",
            "[2002:a9fe:a9fe::1]:80",
            "[2001:0:4136:e378:8000:63bf:5601:5601]:80",
            "[64:ff9b::127.0.0.1]:8322",
            "[fe80::1]:80",
            "127.0.0.1:8322",
            "127.0.0.1:8321",
            "0.0.0.0:1",
        ] {
            assert!(denied.check(at.parse().unwrap()).is_err(), "{at}");
        }
        for at in
            ["127.0.0.1:8000", "10.0.0.1:8322", "[2001:db8::1]:443", "[64:ff9b::8.8.8.8]:443", "[::1]:8000"]
        {
            assert!(denied.check(at.parse().unwrap()).is_ok(), "{at}");
        }
        let strict = Denied { nets: vec![], own: vec![], loopback: true };
        assert!(strict.check("127.0.0.2:1".parse().unwrap()).is_err());
        assert!(strict.check("[::1]:1".parse().unwrap()).is_err());
    }
}

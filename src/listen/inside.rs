//! The inside of a CONNECT to a provider's host: TLS by the local CA, or cleartext, as the client begins. To the
//! sidecar itself it is cleartext.
//!
//! Some clients (Node's fetch) send CONNECT for `http://` targets too, so the first byte decides. What
//! comes then is served as on any connection; it is told which host every request must name.

use std::future::poll_fn;
use std::io;
use std::sync::Arc;

use hyper::upgrade::OnUpgrade;
use hyper_util::rt::TokioIo;
use rustls::server::{Acceptor, ClientHello};
use rustls::{AlertDescription, ServerConfig};
use tokio::time::Instant;
use tokio_rustls::LazyConfigAcceptor;
use tokio_rustls::server::TlsStream;

use super::Serve;
use super::connection::{Ended, Serving};
use super::streams::PREFACE;
use super::watched::Watched;
use super::wire::Wire;
use crate::config::Alpn;
use crate::model::{Inside, Site};

/// How a TLS connection begins: the record type of a handshake (RFC 8446, section 5.1).
const HANDSHAKE: u8 = 0x16;

/// A tunnel that was answered with 200 and is served here.
#[derive(Debug)]
pub(super) struct Opened {
    pub(super) site: Arc<Site>,
    pub(super) upgrade: OnUpgrade,
}

/// What came of the client's first bytes.
enum Begun {
    /// Cleartext; whether it is HTTP/2.
    Clear(Wire, Inside, bool),
    Tls(Box<TlsStream<Wire>>, Inside),
    /// Nothing was ever sent.
    Nothing,
}

impl<S: Serve> Serving<S> {
    /// Serves what is inside a tunnel.
    pub(super) async fn inside(&self, opened: Opened) -> Ended {
        let signals = self.conn.signals.clone();
        let site = opened.site.clone();
        let begun = tokio::select! {
            biased;
            begun = tokio::time::timeout(self.timeouts.header, self.begin(opened)) => begun,
            () = self.socket.gone() => return Ended::Gone,
            // Said within: what is begun is dropped before an arm is run.
            () = poll_fn(|cx| signals.poll_cut(cx).map(|()| signals.close_by_reset())) => return Ended::Cut,
            () = self.drain.cancelled() => return Ended::Gone,
        };
        let now = Instant::now();
        match begun {
            Ok(Ok(Begun::Clear(wire, inside, true))) => self.http2(wire, Some(Arc::new(inside)), now).await,
            Ok(Ok(Begun::Clear(wire, inside, false))) => {
                self.http1(Watched::new(wire, signals), Some(Arc::new(inside)), now).await
            }
            Ok(Ok(Begun::Tls(stream, inside))) => {
                let agreed = stream.get_ref().1.alpn_protocol();
                if agreed == Some(Alpn::Http2.as_str().as_bytes()) {
                    self.http2(*stream, Some(Arc::new(inside)), now).await
                } else {
                    self.http1(Watched::new(*stream, signals), Some(Arc::new(inside)), now).await
                }
            }
            Ok(Ok(Begun::Nothing)) => Ended::Gone,
            Ok(Err(error)) => {
                tell(&site, &error);
                // An alert may be on its way, which a reset would overtake.
                Ended::Served
            }
            Err(_) => {
                tracing::info!(host = %site.host, app = %site.app, "nothing was begun inside a tunnel within timeouts.header");
                Ended::Gone
            }
        }
    }

    async fn begin(&self, opened: Opened) -> io::Result<Begun> {
        let upgraded = opened.upgrade.await.map_err(io::Error::other)?;
        let Ok(parts) = upgraded.downcast::<TokioIo<Watched<Wire>>>() else {
            return Err(io::Error::other("the tunnel is not on a connection of this listener"));
        };
        let mut wire = parts.io.into_inner().into_inner();
        wire.put_back(parts.read_buf);
        match wire.first_byte().await? {
            // No certificate is made for the sidecar's own names: it speaks plain http.
            Some(HANDSHAKE) if opened.site.is_own => {
                Err(io::Error::other("a base URL of this sidecar begins with http://, not https://"))
            }
            Some(HANDSHAKE) => self.handshake(wire, opened.site).await,
            Some(_) => {
                let http2 = wire.begins_with(PREFACE).await?;
                let host = opened.site.host.clone();
                let inside = Inside { site: opened.site, host, tls: false, foreign_name: None };
                Ok(Begun::Clear(wire, inside, http2))
            }
            None => Ok(Begun::Nothing),
        }
    }

    async fn handshake(&self, wire: Wire, site: Arc<Site>) -> io::Result<Begun> {
        let hello = LazyConfigAcceptor::new(Acceptor::default(), wire).await?;
        let (host, foreign_name) = named(&site, &hello.client_hello());
        let config = self.config_for(&host)?;
        let stream = hello.into_stream(config).await?;
        Ok(Begun::Tls(Box::new(stream), Inside { site, host, tls: true, foreign_name }))
    }

    fn config_for(&self, host: &str) -> io::Result<Arc<ServerConfig>> {
        let authority = self.authority.as_ref().ok_or_else(|| io::Error::other("there is no local CA"))?;
        authority.serve_as(host).map_err(io::Error::other)
    }
}

/// The host whose certificate is shown, and the name that was asked for where it is another's.
///
/// With another's name the handshake still goes on, as the host that CONNECT named: a client that checks
/// names ends it, and one that does not is told 421 for every request.
fn named(site: &Site, hello: &ClientHello<'_>) -> (String, Option<String>) {
    let Some(name) = hello.server_name() else { return (site.host.clone(), None) };
    let name = name.trim_end_matches('.').to_ascii_lowercase();
    if name == site.host || site.names.contains(&name) {
        return (name, None);
    }
    (site.host.clone(), Some(name))
}

/// Says why no TLS came about. A client that does not trust the CA is the one thing people must see.
fn tell(site: &Site, error: &io::Error) {
    let alert = error.get_ref().and_then(|inner| inner.downcast_ref::<rustls::Error>());
    let distrust = matches!(
        alert,
        Some(rustls::Error::AlertReceived(
            AlertDescription::UnknownCA
                | AlertDescription::BadCertificate
                | AlertDescription::CertificateUnknown
                | AlertDescription::DecryptError
        ))
    );
    let (host, app) = (&site.host, &site.app);
    if distrust {
        tracing::warn!(%host, %app, %error, "a client does not trust lessor's CA; see `lessor ca path` and `lessor ca bundle`");
    } else {
        tracing::info!(%host, %app, %error, "no TLS came about inside a tunnel");
    }
}

//! The inside of a CONNECT, as a client finds it.

use std::sync::Arc;

use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

use super::client::{Answer, Raw, Request, send_on};
use super::lessor::Lessor;

/// A CONNECT that was answered with 200.
pub async fn connect(lessor: &Lessor, authority: &str) -> Raw {
    let mut raw = lessor.raw().await;
    raw.write(format!("CONNECT {authority} HTTP/1.1\r\nHost: {authority}\r\n\r\n")).await;
    let head = raw.read_to("\r\n\r\n").await;
    assert!(head.starts_with("HTTP/1.1 200 "), "{head}");
    raw
}

/// The CA's certificates, as its file has them.
pub fn trusted(lessor: &Lessor) -> Vec<CertificateDer<'static>> {
    let file = lessor.admin_socket().with_extension("ca.pem");
    CertificateDer::pem_file_iter(file).unwrap().map(Result::unwrap).collect()
}

/// A client that trusts these alone.
pub fn tls_client(trusted: Vec<CertificateDer<'static>>, alpn: &[&str]) -> TlsConnector {
    let mut roots = RootCertStore::empty();
    roots.add_parsable_certificates(trusted);
    let crypto = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let mut config = ClientConfig::builder_with_provider(crypto)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    config.alpn_protocols = alpn.iter().map(|name| name.as_bytes().to_vec()).collect();
    TlsConnector::from(Arc::new(config))
}

/// TLS in a tunnel, verified, as this name.
pub async fn tls(lessor: &Lessor, raw: Raw, name: &str) -> std::io::Result<TlsStream<TcpStream>> {
    let name = ServerName::try_from(name.to_owned()).unwrap();
    tls_client(trusted(lessor), &["http/1.1"]).connect(name, raw.0).await
}

/// One request inside of TLS in a tunnel to `host:port`.
pub async fn ask(lessor: &Lessor, authority: &str, request: Request) -> Answer {
    let raw = connect(lessor, authority).await;
    let (name, port) = authority.rsplit_once(':').unwrap();
    let stream = tls(lessor, raw, name.trim_matches(['[', ']'])).await.unwrap();
    let host = if port == "443" { name } else { authority };
    send_on(stream, host, request).await.unwrap().whole().await.unwrap()
}

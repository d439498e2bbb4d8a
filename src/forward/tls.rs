//! TLS to providers: always verified, trust from the system's roots (the bundled ones when the system
//! has none), plus a provider's own `ca_file`. The one place that names the crypto provider.

use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::{ClientConfig, DigitallySignedStruct, RootCertStore, SignatureScheme};

use crate::config::roots::Roots;

/// Trust could not be set up; the text says for what and what to do.
#[derive(Debug, thiserror::Error)]
pub enum TrustError {
    /// `ca_file` could not be read, or has no certificate.
    #[error("ca_file {path} has no readable PEM certificate: {why}")]
    CaFile {
        /// The file.
        path: String,
        /// Why.
        why: String,
    },
    /// rustls refused its own defaults.
    #[error("TLS cannot be set up")]
    Setup(#[from] rustls::Error),
}

/// The roots every provider is checked against: the `system`'s, where it has some.
pub fn root_store(system: &Roots) -> RootCertStore {
    let mut roots = RootCertStore::empty();
    let (added, _ignored) = roots.add_parsable_certificates(system.iter().cloned());
    if added == 0 {
        tracing::info!("the system has no root certificates; using the bundled ones");
        roots.extend(webpki_roots::TLS_SERVER_ROOTS.iter().cloned());
    }
    roots
}

/// A client configuration that trusts `roots` and what is in `ca_file`.
pub fn client_config(roots: &RootCertStore, ca_file: Option<&Path>) -> Result<ClientConfig, TrustError> {
    let crypto = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    Ok(ClientConfig::builder_with_provider(crypto)
        .with_safe_default_protocol_versions()?
        .with_root_certificates(with_file(roots, ca_file)?)
        .with_no_client_auth())
}

/// What the other side showed, its own certificate first.
pub type ShownChain = Arc<Mutex<Vec<CertificateDer<'static>>>>;

/// The same, and what it is shown in a handshake, also where it refuses that: so that a person can be told
/// who stands there.
pub fn telling_config(
    roots: &RootCertStore,
    ca_file: Option<&Path>,
) -> Result<(ClientConfig, ShownChain), TrustError> {
    let crypto = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let roots = Arc::new(with_file(roots, ca_file)?);
    let judge = WebPkiServerVerifier::builder_with_provider(roots, crypto.clone());
    let judge = judge.build().map_err(|error| rustls::Error::General(error.to_string()))?;
    let shown = ShownChain::default();
    let config = ClientConfig::builder_with_provider(crypto)
        .with_safe_default_protocol_versions()?
        .dangerous() // the judge decides, as it does elsewhere; only its witness is new
        .with_custom_certificate_verifier(Arc::new(Telling { judge, shown: shown.clone() }))
        .with_no_client_auth();
    Ok((config, shown))
}

/// Keeps what the judge is shown.
#[derive(Debug)]
struct Telling {
    judge: Arc<WebPkiServerVerifier>,
    shown: ShownChain,
}

impl ServerCertVerifier for Telling {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        server_name: &ServerName<'_>,
        ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        let chain = std::iter::once(end_entity).chain(intermediates);
        *self.shown.lock().unwrap_or_else(PoisonError::into_inner) =
            chain.map(|certificate| certificate.clone().into_owned()).collect();
        self.judge.verify_server_cert(end_entity, intermediates, server_name, ocsp_response, now)
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        self.judge.verify_tls12_signature(message, certificate, signature)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        self.judge.verify_tls13_signature(message, certificate, signature)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.judge.supported_verify_schemes()
    }
}

fn with_file(roots: &RootCertStore, ca_file: Option<&Path>) -> Result<RootCertStore, TrustError> {
    let mut roots = roots.clone();
    if let Some(path) = ca_file {
        add_file(&mut roots, path)?;
    }
    Ok(roots)
}

fn add_file(roots: &mut RootCertStore, path: &Path) -> Result<(), TrustError> {
    let refuse = |why: String| TrustError::CaFile { path: path.display().to_string(), why };
    let certificates = CertificateDer::pem_file_iter(path).map_err(|error| refuse(error.to_string()))?;
    let mut added = 0;
    for certificate in certificates {
        let certificate = certificate.map_err(|error| refuse(error.to_string()))?;
        roots.add(certificate).map_err(|error| refuse(error.to_string()))?;
        added += 1;
    }
    if added == 0 { Err(refuse("it is empty".into())) } else { Ok(()) }
}

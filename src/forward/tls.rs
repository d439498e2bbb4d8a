//! TLS to providers: always verified, trust from the system's roots (the bundled ones when the system
//! has none), plus a provider's own `ca_file`. The one place that names the crypto provider.

use std::path::Path;
use std::sync::Arc;

use rustls::ClientConfig;
use rustls::RootCertStore;
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject as _;

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

/// The roots every provider is checked against.
pub fn system_roots() -> RootCertStore {
    let mut roots = RootCertStore::empty();
    let found = rustls_native_certs::load_native_certs();
    let (added, _ignored) = roots.add_parsable_certificates(found.certs);
    if added == 0 {
        tracing::info!("the system has no root certificates; using the bundled ones");
        roots.extend(webpki_roots::TLS_SERVER_ROOTS.iter().cloned());
    }
    roots
}

/// A client configuration that trusts `roots` and what is in `ca_file`.
pub fn client_config(roots: &RootCertStore, ca_file: Option<&Path>) -> Result<ClientConfig, TrustError> {
    let mut roots = roots.clone();
    if let Some(path) = ca_file {
        add_file(&mut roots, path)?;
    }
    let crypto = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    Ok(ClientConfig::builder_with_provider(crypto)
        .with_safe_default_protocol_versions()?
        .with_root_certificates(roots)
        .with_no_client_auth())
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

//! A CA for one run, and a certificate for everything on loopback.

use std::fs;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;
use std::sync::Arc;

use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyPair, KeyUsagePurpose};
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::{ClientConfig, RootCertStore, ServerConfig};

use super::Result;

pub(crate) const CA: &str = "ca.pem";
pub(crate) const CA_KEY: &str = "ca.key";
const SERVER: &str = "server.pem";
const SERVER_KEY: &str = "server.key";

/// Writes them into `folder`.
pub(crate) fn write(folder: &Path) -> Result<()> {
    let key = KeyPair::generate()?;
    let mut ca = CertificateParams::default();
    ca.distinguished_name.push(DnType::CommonName, "yardstick");
    ca.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    ca.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::DigitalSignature];
    fs::write(folder.join(CA), ca.self_signed(&key)?.pem())?;
    private(&folder.join(CA_KEY), &key.serialize_pem())?;
    let issuer = Issuer::new(ca, key);
    let own = KeyPair::generate()?;
    let server = CertificateParams::new(["localhost".to_owned(), "127.0.0.1".to_owned()])?;
    fs::write(folder.join(SERVER), server.signed_by(&own, &issuer)?.pem())?;
    private(&folder.join(SERVER_KEY), &own.serialize_pem())
}

/// Lessor takes no key that others may read.
fn private(path: &Path, text: &str) -> Result<()> {
    use std::io::Write as _;
    let mut file = fs::OpenOptions::new().create(true).truncate(true).write(true).mode(0o600).open(path)?;
    Ok(file.write_all(text.as_bytes())?)
}

pub(crate) fn server(folder: &Path) -> Result<Arc<ServerConfig>> {
    let chain = vec![CertificateDer::from_pem_file(folder.join(SERVER))?];
    let key = PrivateKeyDer::from_pem_file(folder.join(SERVER_KEY))?;
    Ok(Arc::new(ServerConfig::builder().with_no_client_auth().with_single_cert(chain, key)?))
}

/// Trusts the CA alone.
pub(crate) fn client(folder: &Path) -> Result<ClientConfig> {
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from_pem_file(folder.join(CA))?)?;
    Ok(ClientConfig::builder().with_root_certificates(roots).with_no_client_auth())
}

//! Making certificates: the CA's own and a host's.

use std::net::IpAddr;
use std::time::{Duration, SystemTime};

use base64::Engine as _;
use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer,
    KeyPair, KeyUsagePurpose, PKCS_ECDSA_P256_SHA256, SanType, SerialNumber,
};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer};

use super::{CaError, Terms};
use crate::config::CaFiles;

/// How the names of lessor's own CAs begin.
pub(super) const CA_NAME: &str = "lessor local CA";

/// One CA with its key.
pub(super) struct Signer {
    issuer: Issuer<'static, KeyPair>,
    /// What clients must trust.
    published: Vec<CertificateDer<'static>>,
    /// What stands behind a leaf: nothing where clients trust the signer itself.
    behind: Vec<CertificateDer<'static>>,
    not_before: SystemTime,
    not_after: SystemTime,
}

impl Signer {
    /// A new CA of lessor's own.
    pub(super) fn fresh(terms: Terms, now: SystemTime) -> Result<Self, CaError> {
        let key = KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256)?;
        let (not_before, not_after) = (now - terms.backdate, now + terms.ca);
        let mut params = CertificateParams::default();
        let id = serial();
        // Each has a name of its own: of two with one name in a bundle, a client may try the wrong one.
        let name = format!("{CA_NAME} {:02x}{:02x}{:02x}{:02x}", id[1], id[2], id[3], id[4]);
        params.distinguished_name = DistinguishedName::new();
        params.distinguished_name.push(DnType::CommonName, name);
        params.serial_number = Some(SerialNumber::from_slice(&id));
        params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign];
        (params.not_before, params.not_after) = (not_before.into(), not_after.into());
        let certificate = params.self_signed(&key)?.der().clone();
        let issuer = Issuer::new(params, key);
        Ok(Self { issuer, published: vec![certificate], behind: Vec::new(), not_before, not_after })
    }

    /// The operator's, which the configuration has checked.
    pub(super) fn of_operator(files: &CaFiles) -> Result<Self, CaError> {
        let key = KeyPair::from_pem(files.key.expose())?;
        let first = files.chain.first().ok_or(rcgen::Error::CouldNotParseCertificate)?;
        let issuer = Issuer::from_ca_cert_der(first, key)?;
        // A client that trusts a root above needs what lies between; one that trusts the signer does not.
        let behind = if files.is_root { Vec::new() } else { files.chain.clone() };
        let (not_before, not_after) = files.validity;
        Ok(Self { issuer, published: files.chain.clone(), behind, not_before, not_after })
    }

    /// A certificate for `host`, with what stands behind it, and its key.
    pub(super) fn leaf(
        &self,
        host: &str,
        terms: Terms,
        now: SystemTime,
    ) -> Result<(Vec<CertificateDer<'static>>, PrivateKeyDer<'static>), CaError> {
        let key = KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256)?;
        let mut params = CertificateParams::default();
        // The host stands in the SAN alone, where it is an address as an address. The subject is not
        // empty, for then the SAN would have to be critical, which older clients do not take.
        params.subject_alt_names = vec![match host.parse::<IpAddr>() {
            Ok(ip) => SanType::IpAddress(ip),
            Err(_) => SanType::DnsName(host.try_into()?),
        }];
        params.distinguished_name = DistinguishedName::new();
        params.distinguished_name.push(DnType::OrganizationName, "lessor");
        params.serial_number = Some(SerialNumber::from_slice(&serial()));
        params.is_ca = IsCa::ExplicitNoCa;
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        params.use_authority_key_identifier_extension = true;
        params.not_before = (now - terms.backdate).max(self.not_before).into();
        params.not_after = (now + terms.leaf).min(self.not_after).into();
        let certificate = params.signed_by(&key, &self.issuer)?.der().clone();
        let chain = std::iter::once(certificate).chain(self.behind.iter().cloned()).collect();
        Ok((chain, PrivatePkcs8KeyDer::from(key.serialize_der()).into()))
    }

    /// What clients must trust.
    pub(super) fn published(&self) -> &[CertificateDer<'static>] {
        &self.published
    }

    pub(super) fn is_valid(&self, now: SystemTime) -> bool {
        self.not_before <= now && now < self.not_after
    }

    /// How much of its life is left.
    pub(super) fn left(&self, now: SystemTime) -> Duration {
        self.not_after.duration_since(now).unwrap_or_default()
    }
}

/// A serial number that nobody can foresee, positive and of full length (RFC 5280, section 4.1.2.2).
fn serial() -> [u8; 16] {
    let mut serial: [u8; 16] = rand::random();
    serial[0] = 0x40 | (serial[0] & 0x3f);
    serial
}

/// A certificate as PEM.
pub(super) fn pem_of(certificate: &[u8]) -> String {
    let text = base64::engine::general_purpose::STANDARD.encode(certificate);
    let mut pem = String::with_capacity(text.len() + text.len() / 64 + 64);
    pem.push_str("-----BEGIN CERTIFICATE-----\n");
    let mut rest = text.as_str();
    while !rest.is_empty() {
        // Base64 is ASCII, so every index is a boundary.
        let (line, after) = rest.split_at(rest.len().min(64));
        pem.push_str(line);
        pem.push('\n');
        rest = after;
    }
    pem.push_str("-----END CERTIFICATE-----\n");
    pem
}

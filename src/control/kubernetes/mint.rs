//! The CA and the certificate of a webhook that manages its own.

use std::time::{Duration, SystemTime};

use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer,
    KeyPair, KeyUsagePurpose, PKCS_ECDSA_P256_SHA256, SanType, SerialNumber,
};
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject as _;

use super::certificates::validity;
use crate::model::Secret;

/// How far certificates reach back, for API servers whose clock is behind.
const BACKDATE: Duration = Duration::from_hours(1);

/// How long they live.
#[derive(Debug, Clone, Copy)]
pub(super) struct Terms {
    pub(super) ca: Duration,
    /// Much shorter than a CA's life.
    pub(super) leaf: Duration,
}

/// A CA with its key.
#[derive(Debug, Clone)]
pub(super) struct Authority {
    pub(super) certificate: CertificateDer<'static>,
    /// PEM.
    pub(super) text: String,
    /// PEM.
    pub(super) key: Secret,
    validity: (SystemTime, SystemTime),
}

impl Authority {
    /// A new one.
    pub(super) fn fresh(life: Duration, now: SystemTime) -> Result<Self, rcgen::Error> {
        let key = KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256)?;
        let id = serial();
        let mut params = CertificateParams::default();
        // Each has a name of its own: of two with one name in a bundle, a client may try the wrong one.
        let name = format!("lessor injector CA {:02x}{:02x}{:02x}{:02x}", id[1], id[2], id[3], id[4]);
        params.distinguished_name = DistinguishedName::new();
        params.distinguished_name.push(DnType::CommonName, name);
        params.serial_number = Some(SerialNumber::from_slice(&id));
        params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign];
        (params.not_before, params.not_after) = ((now - BACKDATE).into(), (now + life).into());
        let text = params.self_signed(&key)?.pem();
        Self::of(text, Secret::new(key.serialize_pem())).ok_or(rcgen::Error::CouldNotParseCertificate)
    }

    /// One that was made before; `None` where the texts are no certificate.
    pub(super) fn of(text: String, key: Secret) -> Option<Self> {
        let certificate = CertificateDer::from_pem_slice(text.as_bytes()).ok()?;
        let validity = validity(&certificate)?;
        Some(Self { certificate, text, key, validity })
    }

    pub(super) fn is_valid(&self, now: SystemTime) -> bool {
        (self.validity.0..self.validity.1).contains(&now)
    }

    /// How much of its life is left.
    pub(super) fn left(&self, now: SystemTime) -> Duration {
        self.validity.1.duration_since(now).unwrap_or_default()
    }

    /// A certificate for a server of these names, and its key, both PEM.
    pub(super) fn leaf(
        &self,
        names: &[String],
        life: Duration,
        now: SystemTime,
    ) -> Result<(String, Secret), rcgen::Error> {
        let issuer = Issuer::from_ca_cert_der(&self.certificate, KeyPair::from_pem(self.key.expose())?)?;
        let key = KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256)?;
        let mut params = CertificateParams::default();
        let names = names.iter().map(|name| Ok(SanType::DnsName(name.as_str().try_into()?)));
        params.subject_alt_names = names.collect::<Result<_, rcgen::Error>>()?;
        params.distinguished_name = DistinguishedName::new();
        params.distinguished_name.push(DnType::CommonName, "lessor injector");
        params.serial_number = Some(SerialNumber::from_slice(&serial()));
        params.is_ca = IsCa::ExplicitNoCa;
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        params.use_authority_key_identifier_extension = true;
        params.not_before = (now - BACKDATE).max(self.validity.0).into();
        params.not_after = (now + life).min(self.validity.1).into();
        let text = params.signed_by(&key, &issuer)?.pem();
        Ok((text, Secret::new(key.serialize_pem())))
    }
}

/// A serial number that nobody can foresee, positive and of full length (RFC 5280, section 4.1.2.2).
fn serial() -> [u8; 16] {
    let mut serial: [u8; 16] = rand::random();
    serial[0] = 0x40 | (serial[0] & 0x3f);
    serial
}

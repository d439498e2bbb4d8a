//! A trust store for Java, which reads no PEM file by itself.
//!
//! PKCS#12 (RFC 7292) as `keytool` writes it, with neither encryption nor MAC: what it holds is public, and
//! whoever could change it could change the PEM files beside it as well. A password is not needed to read it,
//! and one that is given is not looked at. The encoding is the DER library's.

use rustls::pki_types::CertificateDer;
use yasna::models::ObjectIdentifier;
use yasna::{DERWriter, Tag};

const DATA: &[u64] = &[1, 2, 840, 113_549, 1, 7, 1];
const CERTIFICATE_BAG: &[u64] = &[1, 2, 840, 113_549, 1, 12, 10, 1, 3];
const X509: &[u64] = &[1, 2, 840, 113_549, 1, 9, 22, 1];
const FRIENDLY_NAME: &[u64] = &[1, 2, 840, 113_549, 1, 9, 20];
/// Java's own mark of what is trusted; without it Java takes a certificate for one of somebody's chain.
const TRUSTED_KEY_USAGE: &[u64] = &[2, 16, 840, 1, 113_894, 746_875, 1, 1];
const ANY_USAGE: &[u64] = &[2, 5, 29, 37, 0];

/// The trust store of these certificates.
pub(super) fn trust_store<'a>(trusted: impl Iterator<Item = &'a CertificateDer<'a>>) -> Vec<u8> {
    let bags = yasna::construct_der(|writer| {
        writer.write_sequence(|bags| {
            for (at, certificate) in trusted.enumerate() {
                // Of two entries with one name Java keeps one.
                bag(bags.next(), certificate, &format!("lessor-{at}"));
            }
        });
    });
    let safe = yasna::construct_der(|writer| {
        writer.write_sequence(|contents| data(contents.next(), &bags));
    });
    yasna::construct_der(|writer| {
        writer.write_sequence(|store| {
            store.next().write_u8(3); // the one version there is
            data(store.next(), &safe);
        });
    })
}

/// A `ContentInfo` of plain data.
fn data(writer: DERWriter<'_>, bytes: &[u8]) {
    writer.write_sequence(|info| {
        info.next().write_oid(&ObjectIdentifier::from_slice(DATA));
        info.next().write_tagged(Tag::context(0), |inside| inside.write_bytes(bytes));
    });
}

/// A `SafeBag` with one trusted certificate.
fn bag(writer: DERWriter<'_>, certificate: &[u8], name: &str) {
    writer.write_sequence(|bag| {
        bag.next().write_oid(&ObjectIdentifier::from_slice(CERTIFICATE_BAG));
        bag.next().write_tagged(Tag::context(0), |inside| {
            inside.write_sequence(|inside| {
                inside.next().write_oid(&ObjectIdentifier::from_slice(X509));
                inside.next().write_tagged(Tag::context(0), |inside| inside.write_bytes(certificate));
            });
        });
        bag.next().write_set_of(|attributes| {
            attribute(attributes.next(), FRIENDLY_NAME, |value| value.write_bmp_string(name));
            attribute(attributes.next(), TRUSTED_KEY_USAGE, |value| {
                value.write_oid(&ObjectIdentifier::from_slice(ANY_USAGE));
            });
        });
    });
}

fn attribute(writer: DERWriter<'_>, kind: &[u64], value: impl FnOnce(DERWriter<'_>)) {
    writer.write_sequence(|attribute| {
        attribute.next().write_oid(&ObjectIdentifier::from_slice(kind));
        attribute.next().write_set_of(|values| value(values.next()));
    });
}

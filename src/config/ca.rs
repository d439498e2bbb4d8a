//! `[ca]`: an operator's own CA, checked whenever it is read, before anything is served with it.

use std::io::Read as _;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use rcgen::KeyPair;
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject as _;
use x509_parser::certificate::X509Certificate;

use super::secrets::is_mounted;
use super::tree::{Field, Page, Table};
use crate::model::Secret;

/// The largest file that is read as a certificate or a key.
const LARGEST: u64 = 1 << 20;

/// An operator's CA.
#[derive(Debug, Clone)]
pub struct CaFiles {
    /// Where its certificate was read.
    pub cert_file: PathBuf,
    /// Where its key was read.
    pub key_file: PathBuf,
    /// The CA's certificate first, then what stands between it and a root.
    pub chain: Vec<CertificateDer<'static>>,
    /// Its key, PEM.
    pub key: Secret,
    /// Whether it is its own root.
    pub is_root: bool,
    /// From when to when it is valid.
    pub validity: (SystemTime, SystemTime),
}

/// Reads `[ca]`; `None` where lessor makes a CA of its own.
pub(super) fn read(page: &Page<'_>, section: &Table<'_>) -> Option<CaFiles> {
    let (cert, key) = match (section.get("cert_file"), section.get("key_file")) {
        (None, None) => return None,
        (Some(cert), Some(key)) => (cert, key),
        (Some(only), None) => return refuse(page, &only, "needs ca.key_file beside it"),
        (None, Some(only)) => return refuse(page, &only, "needs ca.cert_file beside it"),
    };
    let (cert_path, key_path) = (page.path(cert.text()?), page.path(key.text()?));
    match load(cert_path, key_path) {
        Ok(files) => Some(files),
        Err(Wrong { of_key, why }) => refuse(page, if of_key { &key } else { &cert }, &why),
    }
}

/// What is wrong with which of the two.
struct Wrong {
    of_key: bool,
    why: String,
}

fn load(cert_file: PathBuf, key_file: PathBuf) -> Result<CaFiles, Wrong> {
    let of_cert = |why| Wrong { of_key: false, why };
    let of_key = |why| Wrong { of_key: true, why };
    let chain = certificates(&cert_file).map_err(of_cert)?;
    let (pair, key) = key_of(&key_file).map_err(of_key)?;
    let checked = check(&chain[0]).map_err(of_cert)?;
    if checked.public_key != pair.public_key_raw() {
        return Err(of_key("is not the key of ca.cert_file".into()));
    }
    Ok(CaFiles { cert_file, key_file, chain, key, is_root: checked.is_root, validity: checked.validity })
}

impl CaFiles {
    /// Reads both files again: `None` where they say the same, and why they cannot be taken.
    pub fn read_again(&self) -> Result<Option<Self>, String> {
        match load(self.cert_file.clone(), self.key_file.clone()) {
            Ok(new) if new.chain == self.chain && new.key.expose() == self.key.expose() => Ok(None),
            Ok(new) => Ok(Some(new)),
            Err(Wrong { of_key, why }) => {
                Err(format!("{} {why}", if of_key { "ca.key_file" } else { "ca.cert_file" }))
            }
        }
    }
}

fn refuse<T>(page: &Page<'_>, field: &Field<'_>, why: &str) -> Option<T> {
    page.refuse(&field.at, format!("{} {why}", field.path));
    None
}

fn text_of(path: &Path, private: bool) -> Result<zeroize::Zeroizing<String>, String> {
    let shown = path.display();
    let why = |error: std::io::Error| format!("{shown} cannot be read: {error}");
    let file = std::fs::File::open(path).map_err(why)?;
    let meta = file.metadata().map_err(why)?;
    let mode = meta.permissions().mode() & 0o777;
    if private && mode & 0o077 != 0 && !is_mounted(&file, &meta) {
        return Err(format!("{shown} has mode {mode:04o}: others could sign with it; chmod 600 it"));
    }
    let mut text = zeroize::Zeroizing::new(String::new());
    file.take(LARGEST).read_to_string(&mut text).map_err(why)?;
    Ok(text)
}

fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, String> {
    let text = text_of(path, false)?;
    let read: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(text.as_bytes()).collect();
    match read {
        Ok(chain) if chain.is_empty() => Err(format!("{} has no PEM certificate", path.display())),
        Ok(chain) => Ok(chain),
        Err(error) => Err(format!("{} has no readable PEM certificate: {error}", path.display())),
    }
}

fn key_of(path: &Path) -> Result<(KeyPair, Secret), String> {
    let text = text_of(path, true)?;
    // The library's own words could repeat parts of what it read.
    let pair = KeyPair::from_pem(&text)
        .map_err(|_| format!("{} has no PEM key that can sign certificates", path.display()))?;
    Ok((pair, Secret::new(text.to_string())))
}

struct Checked {
    public_key: Vec<u8>,
    is_root: bool,
    validity: (SystemTime, SystemTime),
}

fn check(certificate: &CertificateDer<'_>) -> Result<Checked, String> {
    let (_, parsed) =
        x509_parser::parse_x509_certificate(certificate).map_err(|_| "is no X.509 certificate".to_owned())?;
    if !parsed.is_ca() || !may_sign(&parsed) {
        return Err("is no CA: it needs basicConstraints CA:TRUE and, with keyUsage, keyCertSign".into());
    }
    let time = |seconds: i64| {
        SystemTime::UNIX_EPOCH + Duration::from_secs(u64::try_from(seconds).unwrap_or_default())
    };
    let validity = parsed.validity();
    let validity = (time(validity.not_before.timestamp()), time(validity.not_after.timestamp()));
    if !(validity.0..validity.1).contains(&SystemTime::now()) {
        return Err("is not valid now".into());
    }
    Ok(Checked {
        public_key: parsed.public_key().subject_public_key.data.to_vec(),
        is_root: parsed.subject() == parsed.issuer(),
        validity,
    })
}

fn may_sign(certificate: &X509Certificate<'_>) -> bool {
    certificate.key_usage().is_ok_and(|usage| usage.is_none_or(|usage| usage.value.key_cert_sign()))
}

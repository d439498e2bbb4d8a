//! The system's root certificates. Some systems have them in hundreds of files, so who needs them is given them, and
//! at the start they are read once, beside what else is made ready.

use rustls::pki_types::CertificateDer;

/// Root certificates, as they were read.
pub type Roots = Vec<CertificateDer<'static>>;

/// Reads them; empty where the system has none. Blocks.
pub fn read() -> Roots {
    rustls_native_certs::load_native_certs().certs
}

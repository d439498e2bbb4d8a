//! What a child would no longer trust: the one part that looks into files.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::path::Path;

use rustls::pki_types::CertificateDer;

use super::{TRUST, Trust, WGET};

/// What is lost where the bundle takes the place of what variables name.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Loss {
    /// The variables whose files have something that ours lack.
    pub variables: BTreeSet<String>,
    /// The bundle has lessor's own CA alone: the system has no roots.
    pub no_roots: bool,
}

impl Loss {
    /// Compares the files that are named in this environment with ours.
    pub fn of(trust: &Trust, present: &BTreeMap<String, String>) -> Self {
        let (bundle, own) = (certificates(&trust.bundle), certificates(&trust.ca));
        let lacks_certificates = |value: &str| !certificates(Path::new(value)).is_subset(&bundle);
        let named = |name: &&str| present.get(*name).filter(|value| !value.is_empty());
        let mut variables: BTreeSet<String> = TRUST
            .into_iter()
            .filter(|name| named(name).is_some_and(|value| lacks_certificates(value)))
            .map(str::to_owned)
            .collect();
        if let (Some(ours), Some(value)) = (&trust.wgetrc, named(&WGET))
            && lacks_settings(ours, Path::new(value))
        {
            variables.insert(WGET.to_owned());
        }
        Self { variables, no_roots: bundle == own }
    }
}

/// What is in a file, or a directory; nothing where it cannot be read, for then nothing is trusted by it.
fn certificates(path: &Path) -> HashSet<CertificateDer<'static>> {
    let (file, dir) = if path.is_dir() { (None, Some(path)) } else { (Some(path), None) };
    rustls_native_certs::load_certs_from_paths(file, dir).certs.into_iter().collect()
}

/// Whether wget's settings in `other` have a line that `ours` has not.
fn lacks_settings(ours: &Path, other: &Path) -> bool {
    let text = |path: &Path| std::fs::read_to_string(path).unwrap_or_default();
    let (ours, other) = (text(ours), text(other));
    let ours: HashSet<_> = ours.lines().map(str::trim).collect();
    // What is no setting is not lost.
    let counts = |line: &&str| !line.starts_with('#') && !line.starts_with("ca_certificate");
    other.lines().map(str::trim).filter(counts).any(|line| !ours.contains(line))
}

//! The CA's certificate, and bundles of it with the system's roots, where clients can read them.
//!
//! wget reads no variable that names certificates, but one that names its settings: they are a file more.
//!
//! They stand beside the admin socket, where this user alone reads them, or in a directory that was named for all to
//! read: the apps of a pod run as other users. Only certificates are written, never a key. Each file is replaced whole: a client that reads it
//! while it is renewed sees the old one or the new one.

use std::io::{self, Write as _};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustls::pki_types::CertificateDer;
use tokio_util::sync::CancellationToken;

use super::Authority;
use super::java::trust_store;
use super::mint::{CA_NAME, pem_of};
use super::wget;
use crate::config::roots::{self, Roots};

/// Variables by which clients are told what to trust, besides those that the system's roots go by.
const TRUST_VARIABLES: [&str; 4] =
    ["REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "AWS_CA_BUNDLE", "NODE_EXTRA_CA_CERTS"];

/// Where they are written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CaPaths {
    /// The certificate of the CA; of two while one follows the other.
    pub cert: PathBuf,
    /// The system's roots and the same.
    pub bundle: PathBuf,
    /// wget's settings, with the bundle in them.
    pub wgetrc: PathBuf,
    /// The same as the bundle, as Java reads it.
    pub java: PathBuf,
    /// The directory that was named for them: for all to read, and they stay at the end, for those who still run and
    /// trust them.
    dir: Option<PathBuf>,
}

/// What all users may do in a directory of their own to read, and with a file in it.
const DIR_MODE: u32 = 0o755;
const FILE_MODE: u32 = 0o644;

impl CaPaths {
    /// Where they are written beside this admin socket, under its name.
    pub fn beside(socket: &Path) -> Self {
        Self {
            cert: socket.with_extension("ca.pem"),
            bundle: socket.with_extension("ca-bundle.pem"),
            wgetrc: socket.with_extension("wgetrc"),
            java: socket.with_extension("ca-bundle.p12"),
            dir: None,
        }
    }

    /// In `dir`, which is made where it is not there; says so where other users cannot read in it, or could replace
    /// what is in it.
    pub fn inside(dir: &Path) -> io::Result<Self> {
        if !make(dir)? {
            // One that is there may be anybody's home: its mode is its owner's to choose.
            let about = std::fs::metadata(dir)?;
            let mode = about.mode() & 0o7777;
            for problem in problems(mode, about.uid(), rustix::process::geteuid().as_raw()) {
                tracing::warn!(dir = %dir.display(), mode = format!("{mode:04o}"), owner = about.uid(), "{problem}");
            }
        }
        Ok(Self {
            cert: dir.join("ca.pem"),
            bundle: dir.join("ca-bundle.pem"),
            wgetrc: dir.join("wgetrc"),
            java: dir.join("ca-bundle.p12"),
            dir: Some(dir.to_owned()),
        })
    }

    /// Makes the directory that was named again, where somebody has taken it away.
    fn make_again(&self) -> io::Result<()> {
        if let Some(dir) = &self.dir
            && make(dir)?
        {
            tracing::warn!(dir = %dir.display(), "the directory of the CA's files was gone, and was made again; \
                apps that started meanwhile trust no certificate of lessor's");
        }
        Ok(())
    }

    /// Writes all, with the `system`'s roots; says up to which turn of the CA they are current.
    pub fn write(&self, authority: &Authority, system: Roots) -> io::Result<u64> {
        let (trusted, turn) = authority.trusted();
        let pem = |all: &[CertificateDer<'_>]| -> String { all.iter().map(|one| pem_of(one)).collect() };
        let (own, roots) = (pem(&trusted), usual_roots(system));
        replace(&self.cert, own.as_bytes())?;
        replace(&self.bundle, (pem(&roots) + &own).as_bytes())?;
        replace(&self.wgetrc, wget::settings(&self.bundle, self.dir.is_some()).as_bytes())?;
        replace(&self.java, &trust_store(roots.iter().chain(&trusted)))?;
        Ok(turn)
    }

    /// Removes all.
    pub fn remove(&self) {
        for path in self.all() {
            // Gone already is as good.
            let _ = std::fs::remove_file(path);
        }
    }

    /// Whether all are there.
    pub fn are_there(&self) -> bool {
        self.all().iter().all(|path| path.is_file())
    }

    fn all(&self) -> [&PathBuf; 4] {
        [&self.cert, &self.bundle, &self.wgetrc, &self.java]
    }

    /// Keeps all as they should be until told to stop, then removes those of this process alone. `written` is what [`Self::write`]
    /// said; where it failed, that was told already.
    pub async fn keep(self, authority: Arc<Authority>, mut written: Option<u64>, stop: CancellationToken) {
        let mut told = written.is_none();
        loop {
            tokio::select! {
                biased;
                () = stop.cancelled() => break,
                () = authority.turned() => {}
                () = tokio::time::sleep(authority.look_every()) => {}
            }
            if let Err(error) = authority.turn() {
                tracing::warn!(%error, "the next CA could not be made; trying again shortly");
                continue;
            }
            // Cleaners of temporary files take away what is old.
            if written == Some(authority.trusted().1) && self.are_there() {
                continue;
            }
            let (paths, of) = (self.clone(), authority.clone());
            // The system's roots are some hundred files on some systems: not on a thread that serves.
            let done = tokio::task::spawn_blocking(move || {
                paths.make_again()?;
                paths.write(&of, roots::read())
            })
            .await;
            match done.map_err(io::Error::other).flatten() {
                Ok(turn) => {
                    tracing::info!(path = %self.cert.display(), "the CA's files were renewed");
                    (written, told) = (Some(turn), false);
                }
                Err(error) if !told => {
                    tracing::warn!(path = %self.cert.display(), %error, "the CA's files could not be renewed");
                    told = true;
                }
                Err(_) => {}
            }
        }
        if self.dir.is_none() {
            self.remove();
        }
    }
}

/// The system's roots, and what this process was told that clients trust: `lessor exec` replaces those
/// variables in a child, and the child must not trust less for it.
fn usual_roots(mut found: Roots) -> Roots {
    for path in TRUST_VARIABLES.into_iter().filter_map(std::env::var_os).filter(|path| !path.is_empty()) {
        let path = PathBuf::from(path);
        // requests takes a directory, too.
        let (file, dir) = if path.is_dir() { (None, Some(&*path)) } else { (Some(&*path), None) };
        let also = rustls_native_certs::load_certs_from_paths(file, dir).certs;
        found.extend(also);
    }
    found.sort_unstable_by(|a, b| a.as_ref().cmp(b.as_ref()));
    found.dedup();
    if found.is_empty() {
        tracing::info!("the system has no root certificates; the CA bundle holds lessor's own CA alone");
    }
    // Where a shell that trusts a bundle of lessor's starts lessor again, its CA must not come to stay.
    let own = |certificate: &[u8]| memchr::memmem::find(certificate, CA_NAME.as_bytes()).is_some();
    found.retain(|certificate| !own(certificate));
    found
}

/// Makes `dir` for all to read in; whether it was not there.
fn make(dir: &Path) -> io::Result<bool> {
    match std::fs::create_dir(dir) {
        Ok(()) => {
            // Whatever the umask.
            std::fs::set_permissions(dir, std::fs::Permissions::from_mode(DIR_MODE))?;
            Ok(true)
        }
        Err(cause) if cause.kind() == io::ErrorKind::AlreadyExists => Ok(false),
        Err(cause) => Err(cause),
    }
}

/// What is to be told of a directory with this mode and owner, to the user `own`.
fn problems(mode: u32, owner: u32, own: u32) -> Vec<&'static str> {
    let mut problems = Vec::new();
    if mode & 0o005 != 0o005 {
        problems.push("users other than this one cannot read the CA's files: chmod 0755 the directory");
    }
    // A pod's volume is root's and open to all; who is in the pod is told by who has the mount.
    if owner != own && owner != 0 {
        problems.push(
            "the directory's owner, who is another user, can replace what apps trust: name one that is this user's",
        );
    } else if owner != 0 && mode & 0o1002 == 0o002 {
        problems.push("every user of this machine can replace what apps trust: chmod 0755 the directory");
    }
    problems
}

/// Writes `bytes` beside `path` and moves it there. Whoever may open the directory may read it, whatever the umask.
fn replace(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut beside = path.as_os_str().to_owned();
    beside.push(format!(".{}.new", std::process::id()));
    let beside = PathBuf::from(beside);
    // A name that is there already is no file of ours to write through.
    let _ = std::fs::remove_file(&beside);
    let write = || {
        let mut file =
            std::fs::OpenOptions::new().write(true).create_new(true).mode(FILE_MODE).open(&beside)?;
        file.set_permissions(std::fs::Permissions::from_mode(FILE_MODE))?;
        file.write_all(bytes)?;
        // Not waited for the disk: they are of this process, and made anew by each.
        std::fs::rename(&beside, path)
    };
    write().inspect_err(|_| {
        let _ = std::fs::remove_file(&beside);
    })
}

#[cfg(test)]
mod tests {
    use super::problems;

    #[test]
    fn a_directory_in_which_another_user_can_replace_what_apps_trust_is_warned_of_and_a_pods_volume_is_not() {
        let told = |mode, owner, word: &str| problems(mode, owner, 1000).iter().any(|one| one.contains(word));
        assert!(told(0o755, 1001, "owner") && told(0o1777, 1001, "owner"), "another user's");
        assert!(told(0o777, 1000, "every user"), "ours, and open to all");
        for (mode, owner) in [(0o777, 0), (0o2777, 0), (0o1777, 0), (0o755, 0), (0o755, 1000), (0o1777, 1000)]
        {
            assert!(problems(mode, owner, 1000).is_empty(), "{mode:o} of {owner}");
        }
        assert!(problems(0o777, 0, 0).is_empty(), "root in its own volume");
        assert!(told(0o700, 1000, "cannot read"));
    }
}

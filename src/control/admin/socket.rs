//! The admin socket's file: where it is, whose it is, and when it may be replaced.

use std::io;
use std::os::unix::fs::{DirBuilderExt as _, FileTypeExt as _, MetadataExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

use sha2::Digest as _;
use tokio::net::UnixListener;

use crate::config::Address;

/// Where the sidecar that listens at `proxy` puts its admin socket: in `XDG_RUNTIME_DIR`, or in a directory of this
/// user's own there; else for root in `/run/lessor`, else in such a directory among the temporary files.
///
/// For root this makes `/run/lessor` where it can, for only trying tells whether it may be written.
pub fn socket_path(proxy: &Address) -> PathBuf {
    let name = file_name(proxy);
    let user = rustix::process::geteuid().as_raw();
    if let Some(dir) = runtime_dir(user) {
        return dir.join(name);
    }
    let run = Path::new("/run/lessor");
    if user == 0 && own_dir(run).is_ok() {
        return run.join(name);
    }
    temp_dir(user).join(name)
}

/// Every place where [`socket_path`] may have put it, the likeliest first: who asks may have another
/// environment than the sidecar has.
pub fn socket_paths(proxy: &Address) -> Vec<PathBuf> {
    let name = file_name(proxy);
    let user = rustix::process::geteuid().as_raw();
    let mut dirs: Vec<PathBuf> = runtime_dir(user).into_iter().collect();
    if user == 0 {
        dirs.push("/run/lessor".into());
    }
    dirs.push(temp_dir(user));
    dirs.into_iter().map(|dir| dir.join(&name)).collect()
}

fn runtime_dir(user: u32) -> Option<PathBuf> {
    let dir = PathBuf::from(std::env::var_os("XDG_RUNTIME_DIR")?);
    let about = std::fs::metadata(&dir).ok().filter(|about| dir.is_absolute() && about.is_dir())?;
    let is_own = about.uid() == user;
    if is_own && !is_anybodys(&about) {
        return Some(dir);
    }
    // Volumes of Kubernetes are root's and open to all, save for those that do not have them. Any other that is not
    // ours is left over from another user's session (`su`, `sudo -E`).
    let may_write = || rustix::fs::access(&dir, rustix::fs::Access::WRITE_OK).is_ok();
    ((is_own || about.uid() == 0) && may_write()).then(|| own_part(&dir, user))
}

/// A directory of this user's own in one that is for many.
fn own_part(dir: &Path, user: u32) -> PathBuf {
    dir.join(format!("lessor-{user}"))
}

fn temp_dir(user: u32) -> PathBuf {
    own_part(&std::env::temp_dir(), user)
}

fn file_name(proxy: &Address) -> String {
    match proxy {
        Address::Tcp(at) => format!("lessor-{}.sock", at.port()),
        Address::Unix(path, _) => {
            // Two sockets of one name in two directories are two sidecars.
            let digest = sha2::Sha256::digest(path.as_os_str().as_encoded_bytes());
            format!("lessor-{:02x}{:02x}{:02x}{:02x}.sock", digest[0], digest[1], digest[2], digest[3])
        }
    }
}

/// Binds the admin socket, readable and writable by this user alone.
///
/// What a dead sidecar left is removed; where somebody answers, or the file is no socket, it is an
/// error and nothing is touched.
pub fn bind_unix(path: impl AsRef<Path>) -> io::Result<UnixListener> {
    let path = path.as_ref();
    if let Some(dir) = path.parent().filter(|dir| !dir.as_os_str().is_empty()) {
        own_dir(dir)?;
    }
    match std::fs::symlink_metadata(path) {
        Err(cause) if cause.kind() == io::ErrorKind::NotFound => {}
        Err(cause) => return Err(cause),
        Ok(about) if !about.file_type().is_socket() => {
            return Err(io::Error::new(
                io::ErrorKind::AlreadyExists,
                format!("{} is there and is no socket; move it away", path.display()),
            ));
        }
        Ok(_) => remove_if_stale(path)?,
    }
    let listener = std::os::unix::net::UnixListener::bind(path)?;
    // Between the two calls the umask's mode stands; whoever slips in is told apart by its uid.
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600))?;
    listener.set_nonblocking(true)?;
    UnixListener::from_std(listener)
}

/// Nobody listens only where the connection is *refused*: a full queue is a busy sidecar.
fn remove_if_stale(path: &Path) -> io::Result<()> {
    let probe = socket2::Socket::new(socket2::Domain::UNIX, socket2::Type::STREAM, None)?;
    probe.set_nonblocking(true)?; // a stopped process with a full queue would hold us up for ever
    match probe.connect(&socket2::SockAddr::unix(path)?) {
        Err(cause) if cause.kind() == io::ErrorKind::ConnectionRefused => {
            tracing::info!(path = %path.display(), "removing the admin socket of a sidecar that is gone");
            std::fs::remove_file(path)
        }
        Err(cause) if cause.kind() == io::ErrorKind::NotFound => Ok(()),
        Ok(()) | Err(_) => Err(io::Error::new(
            io::ErrorKind::AddrInUse,
            format!("another process answers at {}", path.display()),
        )),
    }
}

/// Makes `dir` for this user alone, or sees that nobody else can swap files in it.
fn own_dir(dir: &Path) -> io::Result<()> {
    match std::fs::DirBuilder::new().mode(0o700).create(dir) {
        // The umask may have taken more away.
        Ok(()) => return std::fs::set_permissions(dir, std::fs::Permissions::from_mode(0o700)),
        Err(cause) if cause.kind() == io::ErrorKind::AlreadyExists => {}
        Err(cause) => return Err(cause),
    }
    let about = std::fs::metadata(dir)?;
    let owners = [0, rustix::process::geteuid().as_raw()];
    if about.is_dir() && owners.contains(&about.uid()) && !is_anybodys(&about) {
        return Ok(());
    }
    Err(io::Error::new(
        io::ErrorKind::PermissionDenied,
        format!("other users may write to {}; its admin socket could be swapped", dir.display()),
    ))
}

/// Whether others may take away what is in a directory of this kind, and put something else there.
fn is_anybodys(about: &std::fs::Metadata) -> bool {
    let (shared, sticky) = (about.mode() & 0o022 != 0, about.mode() & 0o1000 != 0);
    shared && !sticky
}

/// The file of a bound socket, as it was when bound.
pub(super) struct OwnFile {
    path: PathBuf,
    id: (u64, u64),
}

impl OwnFile {
    pub(super) fn of(listener: &UnixListener) -> Option<Self> {
        let path = listener.local_addr().ok()?.as_pathname()?.to_path_buf();
        let id = Self::id(&path)?;
        Some(Self { path, id })
    }

    fn id(path: &Path) -> Option<(u64, u64)> {
        let about = std::fs::symlink_metadata(path).ok()?;
        Some((about.dev(), about.ino()))
    }

    /// Removes it, unless another sidecar's stands there by now.
    pub(super) fn remove(self) {
        if Self::id(&self.path) == Some(self.id) {
            let _ = std::fs::remove_file(&self.path); // a file left behind counts as stale later
        }
    }
}

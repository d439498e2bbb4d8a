//! Whether a place can hold the file, and which file lies there.

use std::fs;
use std::io;
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use rustix::fs::{Access, FlockOperation};

use super::OpenError;

/// How long to wait for others who open files of the same folder.
const PATIENCE: Duration = Duration::from_secs(2);

/// Which file it is, whatever its name: device and inode.
type Identity = (u64, u64);

fn identity(path: &Path) -> Option<Identity> {
    let found = fs::metadata(path).ok()?;
    Some((found.dev(), found.ino()))
}

/// Which database lies somewhere, and which log belongs to it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Files {
    database: Option<Identity>,
    log: Option<Identity>,
}

impl Files {
    /// Those that lie there now.
    pub(super) fn at(database: &Path) -> Self {
        Self { database: identity(database), log: identity(&beside(database, "-wal")) }
    }

    /// Whether it is the same database, whatever became of its log.
    pub(super) fn is_database_of(&self, other: &Self) -> bool {
        self.database.is_some() && self.database == other.database
    }
}

/// One of the files that SQLite keeps beside a database.
fn beside(database: &Path, suffix: &str) -> PathBuf {
    let mut path = database.as_os_str().to_owned();
    path.push(suffix);
    path.into()
}

/// The folder, held so that nobody else makes or opens a file in it meanwhile.
///
/// Opening a new database takes several steps (make it with the right mode, drop what a deleted one left
/// behind, switch it to WAL), and two processes at once could each undo the other's.
#[derive(Debug)]
pub(super) struct Folder {
    file: PathBuf,
    _lock: fs::File,
}

impl Folder {
    /// Looks whether the folder of `file` will do, and locks it.
    pub(super) fn of(file: &Path) -> Result<Self, OpenError> {
        let path = match file.parent() {
            Some(parent) if parent != Path::new("") => parent.to_path_buf(),
            _ => PathBuf::from("."),
        };
        let found = fs::metadata(&path);
        if !found.is_ok_and(|found| found.is_dir()) {
            return Err(OpenError::NoFolder { folder: path });
        }
        // SQLite makes two files beside the database, so the folder must be writable even where that exists.
        if let Err(cause) = rustix::fs::access(&path, Access::WRITE_OK | Access::EXEC_OK) {
            return Err(OpenError::FolderUnwritable { folder: path, cause: cause.into() });
        }
        if let Some(kind) = remote(&path) {
            return Err(OpenError::Remote { folder: path, kind });
        }
        let failed = |cause| OpenError::FolderUnwritable { folder: path.clone(), cause };
        let lock = fs::File::open(&path).map_err(failed)?;
        let began = Instant::now();
        loop {
            match rustix::fs::flock(&lock, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => return Ok(Self { file: file.to_path_buf(), _lock: lock }),
                Err(rustix::io::Errno::WOULDBLOCK) if began.elapsed() < PATIENCE => {
                    thread::sleep(Duration::from_millis(rand::random_range(1..10)));
                }
                Err(rustix::io::Errno::WOULDBLOCK) => return Err(OpenError::Busy { waited: PATIENCE }),
                Err(cause) => return Err(failed(cause.into())),
            }
        }
    }

    /// Sees to the file, which is made where there is none: readable by its owner alone, as SQLite then
    /// makes the two others. `left` are the files of a database that lay there before.
    pub(super) fn file(&self, left: Option<Files>) -> Result<Files, OpenError> {
        let file = self.file.as_path();
        let unwritable = |cause| OpenError::FileUnwritable { file: file.to_path_buf(), cause };
        match fs::metadata(file) {
            Ok(found) if !found.is_file() => {
                let cause = io::Error::new(io::ErrorKind::InvalidInput, "it is no regular file");
                return Err(unwritable(cause));
            }
            Ok(_) => {
                rustix::fs::access(file, Access::WRITE_OK | Access::READ_OK)
                    .map_err(|cause| unwritable(cause.into()))?;
                let now = Files::at(file);
                if left.is_some_and(|left| {
                    left.log.is_some() && left.log == now.log && left.database != now.database
                }) {
                    drop_log(file).map_err(unwritable)?;
                }
            }
            Err(cause) if cause.kind() == io::ErrorKind::NotFound => {
                drop_log(file).map_err(unwritable)?;
                // Closing any descriptor of a file drops this process's locks on it; on one that is new,
                // under the folder's lock, there are none.
                let made = fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(file);
                drop(made.map_err(unwritable)?);
            }
            Err(cause) => return Err(unwritable(cause)),
        }
        Ok(Files::at(file))
    }
}

/// Drops the log of a database that no longer lies there: SQLite would replay it into the one that does.
fn drop_log(database: &Path) -> io::Result<()> {
    for suffix in ["-wal", "-shm"] {
        match fs::remove_file(beside(database, suffix)) {
            Err(cause) if cause.kind() != io::ErrorKind::NotFound => return Err(cause),
            _ => {}
        }
    }
    Ok(())
}

/// The kind of a file system that several hosts may share, or whose locks and shared memory cannot be
/// trusted; `None` where the folder is this host's own.
#[cfg(target_os = "linux")]
fn remote(folder: &Path) -> Option<String> {
    const KINDS: [(u32, &str); 14] = [
        (0x6969, "nfs"),
        (0x517b, "smb"),
        (0xff53_4d42, "cifs"),
        (0xfe53_4d42, "smb2"),
        (0x0102_1997, "9p"),
        (0x00c3_6400, "ceph"),
        (0x5346_414f, "afs"),
        (0x6b41_4653, "afs"),
        (0x7375_7245, "coda"),
        (0x564c, "ncp"),
        (0x0bd0_0bd0, "lustre"),
        (0x4750_4653, "gpfs"),
        (0x0116_1970, "gfs2"),
        (0x786f_4256, "vboxsf"),
    ];
    const FUSE: u32 = 0x6573_5546;
    let found = rustix::fs::statfs(folder).ok()?;
    // The type is 32 bits wide, sign-extended on some machines.
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
    let magic = found.f_type as u32;
    if magic == FUSE {
        // Behind one number are sshfs and gluster, but also what containers without root live on.
        let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
        let device = fs::metadata(folder).ok()?.dev();
        let kind = kind_of_mount(&mounts, device).unwrap_or("fuse");
        return (!matches!(kind, "fuse.fuse-overlayfs" | "fuseblk")).then(|| kind.to_owned());
    }
    KINDS.iter().find(|(of, _)| *of == magic).map(|(_, name)| (*name).to_owned())
}

#[cfg(not(target_os = "linux"))]
fn remote(_folder: &Path) -> Option<String> {
    None
}

/// The file system's name of the mount with this device number, from the text of `mountinfo`.
#[cfg(target_os = "linux")]
fn kind_of_mount(mounts: &str, device: u64) -> Option<&str> {
    let wanted = format!("{}:{}", rustix::fs::major(device), rustix::fs::minor(device));
    let line = mounts.lines().find(|line| line.split(' ').nth(2) == Some(&wanted))?;
    line.split_once(" - ")?.1.split(' ').next()
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    #[test]
    fn what_lies_behind_fuse_is_told_by_its_mount() {
        let mounts = "36 35 98:0 /mnt1 /mnt2 rw,noatime master:1 - ext3 /dev/root rw\n\
                      37 35 0:52 / /mnt/far rw,nosuid shared:9 - fuse.sshfs host:/ rw\n";
        assert_eq!(kind_of_mount(mounts, rustix::fs::makedev(0, 52)), Some("fuse.sshfs"));
        assert_eq!(kind_of_mount(mounts, rustix::fs::makedev(98, 0)), Some("ext3"));
        assert_eq!(kind_of_mount(mounts, rustix::fs::makedev(0, 5)), None);
    }

    #[test]
    fn a_folder_of_this_host_is_taken() {
        assert_eq!(remote(&std::env::temp_dir()), None);
    }
}

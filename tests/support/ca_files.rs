//! The CA's files as apps see them.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

/// All of them.
pub const CA_FILES: [&str; 4] = ["ca.pem", "ca-bundle.pem", "ca-bundle.p12", "wgetrc"];

/// Whether the file, where it is there, is whole.
fn is_whole(path: &Path) -> bool {
    let Ok(bytes) = std::fs::read(path) else { return true };
    if path.ends_with("ca-bundle.p12") {
        // DER says how long it is.
        let digits = usize::from(bytes[1] & 0x7f);
        let len = bytes[2..2 + digits].iter().fold(0_usize, |len, byte| len << 8 | usize::from(*byte));
        return bytes[0] == 0x30 && bytes.len() == 2 + digits + len;
    }
    let text = String::from_utf8(bytes).unwrap();
    if path.ends_with("wgetrc") {
        return text.contains("ca_certificate = ") && text.ends_with('\n');
    }
    let (begun, ended) = (text.matches("-----BEGIN CERT").count(), text.matches("-----END CERT").count());
    begun > 0 && begun == ended && text.ends_with("-----END CERTIFICATE-----\n")
}

/// Readers that look at the CA's files without a pause, as apps that start meanwhile would.
#[derive(Debug)]
pub struct Readers {
    stop: Arc<AtomicBool>,
    read: Arc<AtomicUsize>,
    threads: Vec<std::thread::JoinHandle<()>>,
}

impl Readers {
    /// One a file.
    pub fn of(dir: &Path) -> Self {
        let (stop, read): (Arc<AtomicBool>, Arc<AtomicUsize>) = Default::default();
        let reader = |name: &&str| {
            let (path, stop, read) = (dir.join(name), Arc::clone(&stop), Arc::clone(&read));
            std::thread::spawn(move || {
                while !stop.load(Ordering::Relaxed) {
                    assert!(is_whole(&path), "half of {} was seen", path.display());
                    read.fetch_add(1, Ordering::Relaxed);
                }
            })
        };
        let threads = CA_FILES.iter().map(reader).collect();
        Self { stop, read, threads }
    }

    /// Ends them; how often they have read. Fails where one saw half a file.
    pub fn end(self) -> usize {
        self.stop.store(true, Ordering::Relaxed);
        self.threads.into_iter().for_each(|thread| thread.join().expect("all that was seen was whole"));
        self.read.load(Ordering::Relaxed)
    }
}

/// All files below a directory, with their modes and owners.
pub fn files_below(dir: &Path) -> Vec<(PathBuf, u32, u32)> {
    use std::os::unix::fs::MetadataExt as _;
    let mut all = Vec::new();
    for entry in std::fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        let about = std::fs::symlink_metadata(&path).unwrap();
        all.push((path.strip_prefix(dir).unwrap().to_owned(), about.mode() & 0o7777, about.uid()));
        if about.is_dir() {
            let name = PathBuf::from(path.file_name().unwrap());
            all.extend(
                files_below(&path).into_iter().map(|(below, mode, uid)| (name.join(below), mode, uid)),
            );
        }
    }
    all.sort();
    all
}

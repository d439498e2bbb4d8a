//! The files of a configuration as they were when it was read, so that a change is seen however soon it comes.

use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

/// Files, and of each, followed through all links, which it is and when it was changed; `None` where it cannot be
/// looked at.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Stamps(Vec<(PathBuf, Option<[i128; 5]>)>);

impl Stamps {
    /// As these files are now. Blocks.
    pub fn of(files: Vec<PathBuf>) -> Self {
        Self(files.into_iter().map(|file| (file.clone(), stamp(&file))).collect())
    }

    /// Notes a file that is about to be read: what happens to it from now on is a change.
    pub(super) fn note(&mut self, file: &Path) {
        self.0.push((file.to_owned(), stamp(file)));
    }

    /// These before the others.
    pub(super) fn before(mut self, others: Self) -> Self {
        self.0.extend(others.0);
        self
    }

    /// The files.
    pub fn files(&self) -> Vec<PathBuf> {
        self.0.iter().map(|(file, _)| file.clone()).collect()
    }

    /// The same of these files; of one that was not looked at nothing is known.
    #[must_use]
    pub fn with(self, files: Vec<PathBuf>) -> Self {
        let known =
            |file: &PathBuf| self.0.iter().find(|(known, _)| known == file).and_then(|(_, stamp)| *stamp);
        Self(files.into_iter().map(|file| (file.clone(), known(&file))).collect())
    }
}

fn stamp(file: &Path) -> Option<[i128; 5]> {
    let about = std::fs::metadata(file).ok()?;
    let nanos = |seconds: i64, nanos: i64| i128::from(seconds) * 1_000_000_000 + i128::from(nanos);
    Some([
        i128::from(about.dev()),
        i128::from(about.ino()),
        i128::from(about.size()),
        nanos(about.mtime(), about.mtime_nsec()),
        nanos(about.ctime(), about.ctime_nsec()),
    ])
}

//! What the process gives up and takes, before it reads its first secret.
//!
//! Secrets lie in this process's memory, so no core file of it is written, and no process of the same
//! user reads its memory or its environment. And a proxy holds two sockets for each stream, so it
//! takes as many file descriptors as it may have.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// The most file descriptors asked for. Some hosts allow a billion, and a child that closes every
/// possible descriptor one by one would then be busy for minutes.
const MOST_FILES: u64 = 1 << 20;

/// Does all of it; call it first in `main`, before any secret is read and any thread is started.
///
/// What could not be done is returned, one line each, for the log that does not yet exist. None of it
/// is a reason not to start.
pub fn harden() -> Vec<String> {
    let mut left = Vec::new();
    let none = Rlimit { current: Some(0), maximum: Some(0) };
    if let Err(cause) = setrlimit(Resource::Core, none) {
        left.push(format!("core files could not be switched off: {cause}"));
    }
    #[cfg(target_os = "linux")]
    if let Err(cause) = rustix::process::set_dumpable_behavior(rustix::process::DumpableBehavior::NotDumpable)
    {
        left.push(format!("other processes of this user may read this one's memory: {cause}"));
    }
    let files = getrlimit(Resource::Nofile);
    if let Some(wanted) = more_files(&files)
        && let Err(cause) = setrlimit(Resource::Nofile, wanted)
    {
        left.push(format!("the limit of open files stays at {:?}: {cause}", files.current));
    }
    left
}

/// The limit to ask for; `None` where the present one is as good.
fn more_files(now: &Rlimit) -> Option<Rlimit> {
    let wanted = now.maximum.unwrap_or(MOST_FILES).min(MOST_FILES);
    (now.current? < wanted).then_some(Rlimit { current: Some(wanted), maximum: now.maximum })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a test that fails may panic
mod tests {
    use super::*;

    #[test]
    fn after_hardening_no_core_file_is_written_and_other_processes_cannot_read_this_one() {
        assert_eq!(harden(), Vec::<String>::new());
        assert_eq!(getrlimit(Resource::Core).current, Some(0));
        #[cfg(target_os = "linux")]
        assert_eq!(
            rustix::process::dumpable_behavior().unwrap(),
            rustix::process::DumpableBehavior::NotDumpable
        );
    }

    #[test]
    fn the_limit_of_open_files_rises_to_the_hard_limit_but_not_without_end_and_never_falls() {
        let rise = |current, maximum| more_files(&Rlimit { current, maximum }).map(|to| to.current);
        assert_eq!(rise(Some(1024), Some(4096)), Some(Some(4096)));
        assert_eq!(rise(Some(1024), None), Some(Some(MOST_FILES)));
        assert_eq!(rise(Some(MOST_FILES * 2), None), None);
        assert_eq!(rise(Some(4096), Some(4096)), None);
        assert_eq!(rise(None, None), None);
    }
}

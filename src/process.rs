//! What the process gives up and takes, before it reads its first secret.
//!
//! Secrets lie in this process's memory, so no core file of it is written, and no process of the same
//! user reads its memory or its environment. And a proxy holds two sockets for each stream, so it
//! takes as many file descriptors as it may have.

use rustix::process::{Pid, Resource, Rlimit, getrlimit, setrlimit};

/// The most file descriptors asked for. Some hosts allow a billion, and a child that closes every
/// possible descriptor one by one would then be busy for minutes.
const MOST_FILES: u64 = 1 << 20;

/// Keeps other processes of this user, and core files, from this one's memory. Call it first in `main`,
/// before any secret is read. It ends with the program: a command that this process becomes is as usual.
///
/// What could not be done is returned, one line each, for the log that does not yet exist. None of it
/// is a reason not to start.
pub fn hide() -> Vec<String> {
    let mut left = Vec::new();
    #[cfg(target_os = "linux")]
    if let Err(cause) = rustix::process::set_dumpable_behavior(rustix::process::DumpableBehavior::NotDumpable)
    {
        left.push(format!("other processes of this user may read this one's memory: {cause}"));
    }
    left
}

/// Sets the limits, which a command would inherit; before any thread is started. Returns as [`hide`] does.
pub fn limit() -> Vec<String> {
    let mut left = Vec::new();
    let none = Rlimit { current: Some(0), maximum: Some(0) };
    if let Err(cause) = setrlimit(Resource::Core, none) {
        left.push(format!("core files could not be switched off: {cause}"));
    }
    let files = getrlimit(Resource::Nofile);
    if let Some(wanted) = more_files(&files)
        && let Err(cause) = setrlimit(Resource::Nofile, wanted)
    {
        left.push(format!("the limit of open files stays at {:?}: {cause}", files.current));
    }
    left
}

/// Returns when the process `id` has ended; an error where it cannot be watched, or is gone already.
///
/// A handle stays with its process, whatever that becomes and whoever gets its number later. A thread waits
/// on it: the runtime's own way to wait for a handle has no safe form.
#[cfg(target_os = "linux")]
pub fn end_of(id: i32) -> std::io::Result<impl Future<Output = ()>> {
    use rustix::event::{PollFd, PollFlags, poll};
    let handle = rustix::process::pidfd_open(pid(id)?, rustix::process::PidfdFlags::empty())?;
    let (ended, end) = tokio::sync::oneshot::channel::<()>();
    std::thread::Builder::new().name("watch".into()).spawn(move || {
        while poll(&mut [PollFd::new(&handle, PollFlags::IN)], None) == Err(rustix::io::Errno::INTR) {}
        drop(ended); // also where it cannot be watched: better no sidecar than one for ever
    })?;
    Ok(async {
        let _ = end.await; // it is dropped, never sent
    })
}

/// Returns when the process `id` has ended.
#[cfg(not(target_os = "linux"))]
pub fn end_of(id: i32) -> std::io::Result<impl Future<Output = ()>> {
    let id = pid(id)?;
    Ok(async move {
        while rustix::process::test_kill_process(id) != Err(rustix::io::Errno::SRCH) {
            tokio::time::sleep(std::time::Duration::from_millis(500)).await;
        }
    })
}

fn pid(id: i32) -> std::io::Result<Pid> {
    // Zero and below mean groups.
    Ok(Pid::from_raw(id.max(0)).ok_or(std::io::ErrorKind::InvalidInput)?)
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
        assert_eq!([hide(), limit()].concat(), Vec::<String>::new());
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

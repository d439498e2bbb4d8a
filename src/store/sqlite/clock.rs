//! The clock of one host: what every local process reads alike, whatever the wall clock does.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

use super::OpenError;
use crate::store::StoreTime;

type Millis = Arc<dyn Fn() -> u64 + Send + Sync>;

/// Time since the machine started, which start that was, and the wall clock, all in ms.
#[derive(Clone)]
pub struct Clock {
    boot: Arc<str>,
    since_boot: Millis,
    wall: Millis,
}

impl Clock {
    /// A clock that tests turn by hand.
    pub fn new(
        boot: &str,
        since_boot: impl Fn() -> u64 + Send + Sync + 'static,
        wall: impl Fn() -> u64 + Send + Sync + 'static,
    ) -> Self {
        Self { boot: boot.into(), since_boot: Arc::new(since_boot), wall: Arc::new(wall) }
    }

    /// The kernel's. Its time since boot goes on while the machine sleeps, so a lease does not outlive a
    /// night with the lid closed.
    #[cfg(target_os = "linux")]
    pub fn of_this_host() -> Result<Self, OpenError> {
        let path = "/proc/sys/kernel/random/boot_id";
        let boot = std::fs::read_to_string(path).map_err(|cause| OpenError::NoClock { path, cause })?;
        let since_boot = || {
            let time = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
            // The kernel counts up from 0, in whole nanoseconds below a second.
            let seconds = u64::try_from(time.tv_sec).unwrap_or(0);
            seconds.saturating_mul(1000).saturating_add(u64::try_from(time.tv_nsec).unwrap_or(0) / 1_000_000)
        };
        let wall = || {
            let wall = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or(Duration::ZERO);
            StoreTime(0).plus(wall).0
        };
        Ok(Self::new(boot.trim(), since_boot, wall))
    }

    /// Without the kernel's word on which start this is, a lease from before would seem to live.
    #[cfg(not(target_os = "linux"))]
    pub fn of_this_host() -> Result<Self, OpenError> {
        let cause = std::io::Error::from(std::io::ErrorKind::Unsupported);
        Err(OpenError::NoClock { path: "/proc/sys/kernel/random/boot_id", cause })
    }

    /// Which start of the machine this is.
    pub(super) fn boot(&self) -> &str {
        &self.boot
    }

    /// What to add to the time since boot to have the wall clock's, as it stands now. Wraps, for a wall
    /// clock before the epoch plus a long uptime is still a number.
    pub(super) fn offset_now(&self) -> u64 {
        (self.wall)().wrapping_sub((self.since_boot)())
    }
}

impl fmt::Debug for Clock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Clock").field("boot", &self.boot).finish_non_exhaustive()
    }
}

/// The store's clock: the host's plus the offset that the file fixed at its first opening in this boot, so
/// that all processes agree and no step of the wall clock moves it.
#[derive(Debug, Clone)]
pub(super) struct StoreClock {
    host: Clock,
    offset: Arc<AtomicU64>,
}

impl StoreClock {
    pub(super) fn new(host: Clock) -> Self {
        let offset = Arc::new(AtomicU64::new(host.offset_now()));
        Self { host, offset }
    }

    pub(super) fn boot(&self) -> &str {
        self.host.boot()
    }

    /// The offset in force: the file's once one is open.
    pub(super) fn offset(&self) -> u64 {
        // One number that changes when a file is opened and orders nothing else.
        self.offset.load(Ordering::Relaxed)
    }

    pub(super) fn set_offset(&self, offset: u64) {
        self.offset.store(offset, Ordering::Relaxed);
    }

    pub(super) fn now(&self) -> StoreTime {
        StoreTime((self.host.since_boot)().wrapping_add(self.offset()))
    }
}

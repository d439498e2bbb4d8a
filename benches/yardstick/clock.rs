//! One clock for all processes of the machine.

use rustix::time::{ClockId, clock_gettime};

/// Nanoseconds since some point that all processes share.
pub(crate) fn nanos() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    // Neither is negative: the monotonic clock counts from the machine's start.
    now.tv_sec.unsigned_abs() * 1_000_000_000 + now.tv_nsec.unsigned_abs()
}

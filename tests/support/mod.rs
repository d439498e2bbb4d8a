//! What the tests from outside stand on: a provider double that checks the key and keeps count, the
//! lessor process on ports of its own, and a client that can tell a clean end from a cut.
//!
//! Nothing here sleeps and hopes: whoever waits names what for, and a bound after which the test fails.

#![allow(dead_code, unused_imports, clippy::print_stderr, clippy::print_stdout)] // each test crate uses its part

pub mod ca_files;
pub mod client;
pub mod fault;
pub mod fleet;
pub mod fuzz;
pub mod h2;
pub mod lessor;
pub mod masked;
pub mod oracle;
pub mod plays;
pub mod pod;
pub mod provider;
pub mod redis;
pub mod sandbox;
pub mod sdk;
pub mod socket;
pub mod strict;
pub mod tunnel;
pub mod wiretap;

use std::time::{Duration, Instant};

pub use client::{Answer, Body, Door, Raw, Request, Stream};
pub use lessor::{Key, Lessor, Setup};
pub use provider::{Cut, Gate, Play, Provider, Seen};

/// The longest that any wait in a test lasts before it counts as never.
pub const NEVER: Duration = Duration::from_secs(10);

/// `ms` milliseconds.
pub const fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

/// Asks again and again until `probe` has an answer.
pub async fn eventually<T>(what: &str, probe: impl AsyncFnMut() -> Option<T>) -> T {
    eventually_within(NEVER, what, probe).await
}

/// Asks again and again until `probe` has an answer, and fails after `limit`.
pub async fn eventually_within<T>(
    limit: Duration,
    what: &str,
    mut probe: impl AsyncFnMut() -> Option<T>,
) -> T {
    let begun = Instant::now();
    loop {
        if let Some(answer) = probe().await {
            return answer;
        }
        assert!(begun.elapsed() < limit, "not within {limit:?}: {what}");
        tokio::time::sleep(ms(5)).await;
    }
}

/// Awaits `future`, and fails after `limit`.
pub async fn within<T>(limit: Duration, what: &str, future: impl Future<Output = T>) -> T {
    let Ok(value) = tokio::time::timeout(limit, future).await else {
        panic!("not within {limit:?}: {what}");
    };
    value
}

/// A port of loopback that was free just now. It lies below the range from which the kernel gives ports
/// to outgoing connections and to listeners on port 0, so that hardly anybody else comes to want it; who
/// binds it tries another if somebody did.
pub fn free_port() -> u16 {
    loop {
        let port = rand::random_range(10_000..30_000);
        if std::net::TcpListener::bind(("127.0.0.1", port)).is_ok() {
            return port;
        }
    }
}

/// One period of the bytes that large transfers carry.
const PERIOD: usize = 251;

/// A block of the test pattern: byte `i` of a transfer is `i % 251`.
pub fn pattern() -> &'static bytes::Bytes {
    static BLOCK: std::sync::OnceLock<bytes::Bytes> = std::sync::OnceLock::new();
    BLOCK.get_or_init(|| (0..PERIOD * 261 * 8).map(|i| (i % PERIOD) as u8).collect())
}

/// Whether `part` is what the pattern has at `offset`.
pub fn fits_pattern(offset: u64, part: &[u8]) -> bool {
    let mut at = (offset % PERIOD as u64) as usize;
    let block = pattern();
    let mut part = part;
    while !part.is_empty() {
        let n = part.len().min(block.len() - at);
        if part[..n] != block[at..at + n] {
            return false;
        }
        at = (at + n) % PERIOD;
        part = &part[n..];
    }
    true
}

/// Counts and checks the bytes of a transfer that carries the pattern.
#[derive(Debug, Default, Clone, Copy)]
pub struct PatternCheck {
    /// Bytes so far.
    pub len: u64,
    /// Whether one did not fit.
    pub broken: bool,
}

impl PatternCheck {
    /// Takes the next part.
    pub fn take(&mut self, part: &[u8]) {
        self.broken |= !fits_pattern(self.len, part);
        self.len += part.len() as u64;
    }
}

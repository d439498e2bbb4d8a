//! What is known of one request, told once at its end: one log line, one count.

use std::time::{Duration, Instant};

use http::Method;

use crate::lease::Lease;
use crate::logs::RequestLine;
use crate::metrics::Metrics;
use crate::model::{AppName, Fault, Mode, ProviderName};

/// Filled on the way; writes the line and counts when dropped, so that a client that left is told too.
#[derive(Debug)]
pub(super) struct Trace {
    line: RequestLine,
    begun: Instant,
    /// Time spent waiting for the provider, up to the answer's head.
    away: Duration,
    metrics: Metrics,
    /// It is no request of its own.
    silent: bool,
}

impl Trace {
    pub(super) fn begin(mode: Mode, method: Method, metrics: Metrics) -> Self {
        let mut line = RequestLine::new(AppName::anonymous(), mode, method);
        // Until something else is known: whoever drops it early is the client's leaving.
        line.outcome = "cancelled";
        Self { line, begun: Instant::now(), away: Duration::ZERO, metrics, silent: false }
    }

    pub(super) fn mode(&self) -> Mode {
        self.line.mode
    }

    pub(super) fn of(&mut self, app: &AppName, provider: Option<&ProviderName>) {
        // Told more than once on the way, and each copy of a name is counted in one place by all cores.
        if self.line.app != *app {
            self.line.app = app.clone();
        }
        self.line.provider = provider.cloned();
    }

    /// One more sending begins, with this lease.
    pub(super) fn leased(&mut self, lease: &Lease) {
        self.line.attempts += 1;
        self.line.pool = Some(lease.pool().clone());
        self.line.key = Some(lease.key().clone());
        self.line.lease = Some(lease.id());
        self.line.waited += lease.waited();
    }

    pub(super) fn attempts(&self) -> u32 {
        self.line.attempts
    }

    /// Time went by at the provider.
    pub(super) fn was_away(&mut self, time: Duration) {
        self.away += time;
    }

    /// The answer's head is on its way.
    pub(super) fn answered(&mut self, status: u16, outcome: &'static str) {
        let first_byte = self.begun.elapsed();
        self.line.status = Some(status);
        self.line.first_byte = Some(first_byte);
        self.line.outcome = outcome;
        self.metrics.overhead(first_byte.saturating_sub(self.away).saturating_sub(self.line.waited));
    }

    /// lessor answered by itself.
    pub(super) fn refused(&mut self, status: u16, fault: Fault) {
        self.line.status = Some(status);
        self.line.error = Some(fault.code.as_str());
        self.line.outcome = fault.code.as_str();
        self.line.detail = Some(fault.message);
    }

    /// What was asked for is told by what follows.
    pub(super) fn say_nothing(mut self) {
        self.silent = true;
    }

    /// It ended otherwise than its head promised.
    pub(super) fn ended_as(&mut self, outcome: &'static str) {
        self.line.outcome = outcome;
    }
}

impl Drop for Trace {
    fn drop(&mut self) {
        if self.silent {
            return;
        }
        self.line.total = self.begun.elapsed();
        self.line.emit();
        self.metrics.request(self.line.provider.take(), self.line.mode, self.line.outcome, self.line.total);
    }
}

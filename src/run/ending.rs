//! The end: who asks for it, and what is still done.
//!
//! With `shutdown.linger` apps are served on, new connections too, for as long as any is connected: an orchestrator
//! tells all processes to stop at the same time, and an app's last requests must not fail for it. All of it, the
//! streams that are open then included, has `shutdown.grace`.

use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::time::{Instant, timeout, timeout_at};

use super::Running;
use crate::config::ShutdownConfig;
use crate::listen::Server;

/// How long the admin doors may take to close at the end.
const CLOSE: Duration = Duration::from_secs(3);

/// The last part of the grace, in which nobody new is served: a tenth of it, but no more than this. Connections that lie
/// idle are then closed in good order, and not cut.
const LAST_PART: Duration = Duration::from_secs(1);

/// SIGTERM, SIGINT and SIGHUP, watched from before the first connection.
pub(super) struct Signals {
    term: Signal,
    int: Signal,
    /// Until somebody takes it.
    pub(super) hangup: Option<Signal>,
}

impl Signals {
    pub(super) fn watch() -> Result<Self, std::io::Error> {
        let watched = |kind| signal(kind);
        Ok(Self {
            term: watched(SignalKind::terminate())?,
            int: watched(SignalKind::interrupt())?,
            hangup: Some(watched(SignalKind::hangup())?),
        })
    }

    pub(super) async fn next(&mut self) {
        tokio::select! {
            _ = self.term.recv() => {}
            _ = self.int.recv() => {}
        }
    }
}

impl Running {
    /// Drains; a second signal ends the process at once. Whoever asked by `POST /quit` sent none: an orchestrator's
    /// SIGTERM may still come then, and is no impatience.
    pub(super) async fn drain(self, mut signals: Signals, by_signal: bool) {
        let shutdown = self.config.load().shutdown;
        let end = Instant::now() + shutdown.grace;
        tracing::info!(
            grace_ms = millis(shutdown.grace),
            linger_ms = millis(shutdown.linger),
            "stopping; a second signal ends it at once"
        );
        self.draining.store(true, Ordering::Relaxed);
        let ending = async {
            serve_on(&self.server, shutdown, end).await;
            self.leases.refuse_new();
            if !self.server.drain(end.saturating_duration_since(Instant::now())).await {
                tracing::warn!("streams were still open at the end of shutdown.grace and were cut");
            }
            self.leases.shutdown().await;
            // Before the socket goes: who has that has these names, too.
            self.stop_ca.cancel();
            for kept in self.ca_kept {
                let _ = timeout(CLOSE, kept).await;
            }
            self.stop_admin.cancel();
            self.admin_tasks.close();
            let _ = timeout(CLOSE, self.admin_tasks.wait()).await;
        };
        let impatience = async {
            if !by_signal {
                signals.next().await;
            }
            signals.next().await;
        };
        tokio::select! {
            () = ending => tracing::info!("stopped"),
            () = impatience => tracing::warn!("stopped at once by a second signal"),
        }
    }
}

/// Goes on as before until no client has been connected for `shutdown.linger`.
async fn serve_on(server: &Server, shutdown: ShutdownConfig, end: Instant) {
    if shutdown.linger.is_zero() {
        return;
    }
    let until = end - (shutdown.grace / 10).min(LAST_PART);
    if timeout_at(until, server.deserted(shutdown.linger)).await.is_ok() {
        tracing::info!("no client is connected any more");
    } else {
        tracing::info!("clients are still connected, and shutdown.grace ends soon: nobody new is served");
    }
}

fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

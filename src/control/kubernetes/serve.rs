//! `lessor inject` as a process: its listeners, its certificate, and how it ends.
//!
//! On SIGTERM it says that it is not ready and goes on answering for a moment, for API servers learn of that
//! with a delay; then it accepts no more, finishes what it has, and ends. A second signal ends it at once.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use tokio::net::TcpListener;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::certificates::{Current, Files};
use super::cluster::Api;
use super::doors::{Door, For, LAST_ANSWERS};
use super::health::{Meters, Pages, Readiness};
use super::managed::Managed;
use super::mint::Terms;
use super::options::Inject;
use super::webhook::Webhook;

/// Why nothing is served.
#[derive(Debug, thiserror::Error)]
pub enum InjectError {
    /// Flags that do not go together.
    #[error("{0}")]
    Usage(String),
    /// An address that is not to be had.
    #[error("{at} cannot be listened on; is it taken? ({flag} is another)")]
    Listen {
        /// Which.
        at: SocketAddr,
        /// Its flag.
        flag: &'static str,
        /// Why.
        source: std::io::Error,
    },
    /// The library refuses.
    #[error("TLS cannot be served")]
    Tls(#[from] rustls::Error),
    /// The system refuses.
    #[error("signals cannot be watched")]
    Signals(#[source] std::io::Error),
}

/// Serves until a signal.
pub async fn serve(inject: &Inject) -> Result<(), InjectError> {
    let mut signals = Signals::watch().map_err(InjectError::Signals)?;
    let current = Arc::<Current>::default();
    let (ready, meters) = (Arc::<Readiness>::default(), Arc::<Meters>::default());
    let tls = current.server()?;
    inject.defaults(None).map_err(InjectError::Usage)?;
    let source = Source::of(inject).map_err(InjectError::Usage)?;
    let health = bind(inject.health, "--health").await?;
    let reviews = bind(inject.listen, "--listen").await?;
    let at = |listener: &TcpListener| listener.local_addr().map(|at| at.to_string()).unwrap_or_default();
    let (webhook_at, health_at) = (at(&reviews), at(&health));

    let (closing, keepers, open) = (CancellationToken::new(), TaskTracker::new(), TaskTracker::new());
    let door = |listener, whom| Door { listener, whom, closing: closing.clone(), open: open.clone() };
    let pages = Arc::new(Pages { ready: ready.clone(), meters: meters.clone(), current: current.clone() });
    keepers.spawn(door(health, For::Probes).serve(move |request| {
        let page = pages.answer(&request);
        async move { page }
    }));
    tracing::info!(webhook = webhook_at, health = health_at, "serving");
    let version = tokio::select! {
        () = signals.next() => return Ok(()),
        version = source.version(inject, &ready) => version,
    };
    let defaults = inject.defaults(version).map_err(InjectError::Usage)?;
    tracing::info!(native = defaults.native, config = defaults.hash(), "pods get their sidecar");
    let webhook = Arc::new(Webhook::new(defaults, meters));
    source.keep(inject, current, ready.clone(), &closing, &keepers);
    keepers.spawn(door(reviews, For::Reviews(tls, ready.clone())).serve(move |request| {
        let webhook = webhook.clone();
        async move { webhook.answer(request).await }
    }));

    signals.next().await;
    ready.stop();
    tracing::info!("stopping; a second signal ends it at once");
    tokio::select! {
        () = signals.next() => tracing::warn!("stopped at once by a second signal"),
        () = end(inject.linger(), &closing, &open, &keepers) => tracing::info!("stopped"),
    }
    Ok(())
}

async fn end(linger: Duration, closing: &CancellationToken, open: &TaskTracker, keepers: &TaskTracker) {
    tokio::time::sleep(linger).await;
    closing.cancel();
    open.close();
    keepers.close();
    let _ = tokio::time::timeout(LAST_ANSWERS, async { tokio::join!(open.wait(), keepers.wait()) }).await;
}

/// Where the certificate comes from.
enum Source {
    Files(Files),
    Managed { api: Api, names: [String; 4], terms: Terms },
}

impl Source {
    fn of(inject: &Inject) -> Result<Self, String> {
        let certificate = &inject.certificate;
        if certificate.self_managed {
            let names = certificate.names()?;
            let api = Api::in_cluster(&certificate.service_account)?;
            return Ok(Self::Managed { api, names, terms: certificate.terms()? });
        }
        match (&certificate.tls_cert, &certificate.tls_key) {
            (Some(chain), Some(key)) => Ok(Self::Files(Files { chain: chain.clone(), key: key.clone() })),
            _ => Err(
                "a webhook is served by TLS: give --tls-cert and --tls-key, or --self-managed (or answer \
                      one review with --review FILE)"
                    .into(),
            ),
        }
    }

    /// The cluster's version, once it is known; nothing where nobody needs it, or can be asked.
    async fn version(&self, inject: &Inject, ready: &Readiness) -> Option<(u32, u32)> {
        let Self::Managed { api, .. } = self else { return None };
        if !inject.must_ask() {
            return None;
        }
        loop {
            match api.version().await {
                Ok(version) => return Some(version),
                // A native sidecar in an older cluster would have every pod refused.
                Err(why) => {
                    ready.set(Err(format!(
                        "the cluster's version is not known: {}",
                        crate::run::with_causes(&why)
                    )));
                }
            }
            tokio::time::sleep(inject.look_every()).await;
        }
    }

    fn keep(
        self,
        inject: &Inject,
        current: Arc<Current>,
        ready: Arc<Readiness>,
        stop: &CancellationToken,
        keepers: &TaskTracker,
    ) {
        let (stop, every) = (stop.clone(), inject.look_every());
        match self {
            Self::Files(files) => keepers.spawn(files.follow(current, ready, every, stop)),
            Self::Managed { api, names, terms } => {
                let [namespace, service, secret, configuration] = names;
                let managed =
                    Managed { api, namespace, service, secret, configuration, terms, current, ready, every };
                keepers.spawn(managed.keep(stop))
            }
        };
    }
}

async fn bind(at: SocketAddr, flag: &'static str) -> Result<TcpListener, InjectError> {
    TcpListener::bind(at).await.map_err(|source| InjectError::Listen { at, flag, source })
}

/// SIGTERM and SIGINT.
struct Signals(Signal, Signal);

impl Signals {
    fn watch() -> std::io::Result<Self> {
        // Who watches no files has nothing to read again, and must not end by this all the same.
        let _ = signal(SignalKind::hangup())?;
        Ok(Self(signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?))
    }

    async fn next(&mut self) {
        tokio::select! {
            _ = self.0.recv() => {}
            _ = self.1.recv() => {}
        }
    }
}

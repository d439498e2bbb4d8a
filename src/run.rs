//! Building the rooms, and running until told to stop.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Instant;

use arc_swap::ArcSwap;
use tokio::net::UnixListener;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::config::roots::{self, Roots};
use crate::config::{self, Address, Config, Loader, OnDisk, StoreUrl};
use crate::control::admin::{self, AdminState};
use crate::control::banner::{Doors, banner, open_to};
use crate::control::doctor::Tools;
use crate::control::environment::Served;
use crate::control::exec;
use crate::events::Events;
use crate::fleet::Fleet;
use crate::forward::dial::Denied;
use crate::forward::replay::Budget;
use crate::forward::{self, Upstreams, tls::TrustError};
use crate::lease::Leases;
use crate::listen::ca::{Authority, CaError};
use crate::listen::{BindError, Inner, Listener, Server};
use crate::metrics::Metrics;
use crate::model::OwnerId;
use crate::process;
use crate::proxy::{Checks, Masks, Proxy, Rooms};
use crate::reload::Reload;
use crate::route::Routes;
use crate::route::ring::Ring;
use crate::scrub::Needle;
use crate::store::memory::MemoryStore;
use crate::store::redis::RedisStore;
use crate::store::sqlite::{OpenError, SqliteStore};
use crate::store::{Store, StoreError};
use crate::watch::Watcher;

mod ending;
mod local_ca;
mod reach;

use ending::Signals;
use local_ca::LocalCa;
use reach::Reach;

/// Why lessor did not start.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// An address could not be had.
    #[error(transparent)]
    Bind(#[from] BindError),
    /// Trust could not be set up.
    #[error(transparent)]
    Trust(#[from] TrustError),
    /// The local CA could not be set up.
    #[error("the local CA could not be set up")]
    Ca(#[from] CaError),
    /// The CA's files could not be written where they were to be.
    #[error("the CA's files could not be written to {} (--ca-dir); may this user write there?", dir.display())]
    CaDir {
        /// The directory.
        dir: PathBuf,
        /// Why.
        #[source]
        cause: std::io::Error,
    },
    /// The store said no.
    #[error("the store could not be opened")]
    Store(#[from] StoreError),
    /// The store's file could not be opened.
    #[error("the store could not be opened")]
    File(#[from] OpenError),
    /// The system said no.
    #[error("signals cannot be watched")]
    Signals(#[from] std::io::Error),
}

/// An error with its causes, in one line.
pub fn with_causes(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text = format!("{text}: {error}");
        cause = error.source();
    }
    text
}

/// Serves until SIGTERM or SIGINT, then drains. `Ok` when it ended as asked. `loader` reads the configuration anew.
pub async fn run(config: Config, loader: Loader, on_terminal: bool) -> Result<(), RunError> {
    let mut signals = Signals::watch()?;
    let config = Arc::new(config);
    let running = Running::start(&config, loader, &mut signals).await?;
    announce(&config, &running, on_terminal);
    let by_signal = tokio::select! {
        () = signals.next() => true,
        () = running.quit.cancelled() => false,
        () = running.terminal_gone.cancelled() => true,
    };
    running.drain(signals, by_signal).await;
    Ok(())
}

/// Serves the process `of` on free ports of loopback until it ends, then drains.
pub async fn accompany(config: Config, mut loader: Loader, of: i32) -> Result<(), RunError> {
    let mut signals = Signals::watch()?;
    let end = process::end_of(of)?;
    let on_free_ports = |mut config: Config| {
        let free = Address::Tcp((std::net::Ipv4Addr::LOCALHOST, 0).into());
        (config.listen.proxy, config.listen.admin) = (vec![free.clone()], free);
        config
    };
    let config = Arc::new(on_free_ports(config));
    loader.adapt(on_free_ports);
    let running = Running::start(&config, loader, &mut signals).await?;
    exec::tell(&Served::new(&config, &running.proxy, running.socket.as_deref()));
    tokio::select! {
        () = end => {}
        () = signals.next() => {}
    }
    running.drain(signals, true).await;
    Ok(())
}

/// What stays while the configuration changes, and what the rooms of each are built around.
struct Frame {
    ring: Arc<Ring>,
    leases: Leases,
    checks: Checks,
    budget: Budget,
    metrics: Metrics,
    tunnels: TaskTracker,
    abort: CancellationToken,
    proxy: Vec<Address>,
    admin: Vec<Address>,
}

impl Frame {
    /// The way out, by this configuration.
    fn upstreams(
        config: &Config,
        proxy: &[Address],
        admin: &[Address],
        before: Option<&Upstreams>,
        roots: &Roots,
    ) -> Result<Arc<Upstreams>, TrustError> {
        let denied = denied(config, proxy, admin);
        Ok(Arc::new(Upstreams::new(config.providers.values(), config.timeouts, denied, before, roots)?))
    }

    fn rooms(&self, config: &Arc<Config>, upstreams: Arc<Upstreams>, before: Option<&Rooms>) -> Rooms {
        let apps = before.map(|before| &**before.routes.apps());
        Rooms {
            config: config.clone(),
            routes: Routes::new(config.clone(), &self.ring, &tcp_of(&self.proxy), apps),
            ring: self.ring.clone(),
            leases: self.leases.clone(),
            upstreams,
            checks: self.checks.clone(),
            masks: Masks::new(config, self.metrics.clone()),
            budget: self.budget.clone(),
            metrics: self.metrics.clone(),
            tunnels: self.tunnels.clone(),
            abort: self.abort.clone(),
        }
    }

    /// Takes another configuration into `walk`. What can fail comes first, so that it is taken whole or not at
    /// all.
    fn take(&self, walk: &Proxy, config: &Arc<Config>, roots: &Roots) -> Result<(), TrustError> {
        let before = walk.rooms();
        let upstreams = Self::upstreams(config, &self.proxy, &self.admin, Some(&before.upstreams), roots)?;
        self.ring.replace(config);
        self.checks.ask_by(upstreams.clone());
        walk.replace(self.rooms(config, upstreams, Some(&before)));
        for keys in self.ring.all() {
            self.leases.wake(&keys.provider.name);
        }
        Ok(())
    }
}

/// A serving lessor.
struct Running {
    server: Server,
    config: Arc<ArcSwap<Config>>,
    /// The terminal that lessor was started on is gone.
    terminal_gone: CancellationToken,
    leases: Leases,
    draining: Arc<AtomicBool>,
    /// Cancelled by `POST /quit`.
    quit: CancellationToken,
    stop_admin: CancellationToken,
    admin_tasks: TaskTracker,
    proxy: Vec<Address>,
    /// One, and perhaps one more for `POST /quit`.
    admin: Vec<Address>,
    socket: Option<PathBuf>,
    ca: Option<LocalCa>,
    stop_ca: CancellationToken,
    ca_kept: Vec<JoinHandle<()>>,
}

impl Running {
    async fn start(config: &Arc<Config>, loader: Loader, signals: &mut Signals) -> Result<Self, RunError> {
        let metrics = Metrics::new();
        let reading = tokio::task::spawn_blocking(roots::read);
        let store = open_store(config).await?;
        let ring = Arc::new(Ring::new(config));
        let owner = OwnerId::fresh();
        let fleet = Fleet::new(store.clone(), ring.clone(), owner.clone(), metrics.clone());
        let introduced = introduce(&fleet, store.kind()).await;
        let (listeners, proxy) = bind_proxy(config).await?;
        let admin_listeners = bind_admin(config).await?;
        let admin: Vec<Address> = admin_listeners.iter().map(Listener::address).collect();
        let leases = Leases::new(store.clone(), config.lease, config.queue, owner.clone(), metrics.clone());
        leases.set_repair(fleet.repair());
        let events = Events::new();
        let watcher = Watcher::new(store.clone(), ring.clone(), events.clone());
        if introduced {
            watcher.begin().await;
        }
        leases.set_witness(Arc::new(watcher.clone()));
        let roots = reading.await.unwrap_or_default();
        let upstreams = Frame::upstreams(config, &proxy, &admin, None, &roots)?;
        let checks = Checks::new(ring.clone(), upstreams.clone(), store.clone(), leases.clone());

        let authority = authority_of(config)?;
        let server = Server::new(config.limits, config.timeouts, authority.clone());
        let frame = Frame {
            ring: ring.clone(),
            leases: leases.clone(),
            checks: checks.clone(),
            budget: Budget::new(config.retry.max_total),
            metrics: metrics.clone(),
            tunnels: server.tracker(),
            abort: server.aborted(),
            proxy: proxy.clone(),
            admin: admin.clone(),
        };
        let walk = Proxy::new(frame.rooms(config, upstreams, None));
        let current = Arc::new(ArcSwap::from(config.clone()));
        let on_disk: Arc<ArcSwap<OnDisk>> = Arc::default();
        let draining = Arc::new(AtomicBool::new(false));
        let socket = bind_socket(&proxy);
        let beside = socket.as_ref().map(|(path, _)| &**path);
        let publish = |authority| LocalCa::publish(authority, config, beside, roots);
        let ca = authority.map(publish).transpose()?;
        let quit = CancellationToken::new();
        let state = Arc::new(AdminState {
            config: current.clone(),
            on_disk: on_disk.clone(),
            store,
            owner,
            metrics: metrics.clone(),
            events: events.clone(),
            hands: Arc::new(Reach {
                watcher: watcher.clone(),
                checks,
                ring,
                walk: walk.clone(),
                leases: leases.clone(),
                ca: ca.clone(),
            }),
            draining: draining.clone(),
            quit: config.quit.then(|| quit.clone()),
            proxy_addresses: proxy.clone(),
            started: Instant::now(),
            version: env!("CARGO_PKG_VERSION"),
        });
        let (stop_admin, admin_tasks) = (CancellationToken::new(), TaskTracker::new());
        admin_tasks.spawn(fleet.clone().run(introduced, stop_admin.clone()));
        admin_tasks.spawn(watcher.run(stop_admin.clone()));
        admin_tasks.spawn(frame.checks.clone().check_again(stop_admin.clone()));
        let terminal_gone = CancellationToken::new();
        if let Some(hangup) = signals.hangup.take() {
            let taken = walk.clone();
            let take = move |config: &Arc<Config>, roots: &Roots| {
                frame.take(&taken, config, roots).map_err(|error| with_causes(&error))
            };
            let (current, take) = (current.clone(), Box::new(take));
            let reload = Reload { loader, current, on_disk, take, fleet, events, metrics, refused: None };
            admin_tasks.spawn(reload.run(hangup, stop_admin.clone(), terminal_gone.clone()));
        }
        // Before the admin doors: who is told that lessor is there is served.
        server.start(listeners, &walk);
        let socket = open_doors(admin_listeners, socket, &state, &stop_admin, &admin_tasks);
        let stop_ca = CancellationToken::new();
        let ca_kept = ca.as_ref().map(|ca| ca.keep(config.ca.as_ref(), &stop_ca)).unwrap_or_default();
        Ok(Self {
            server,
            config: current,
            terminal_gone,
            leases,
            draining,
            quit,
            stop_admin,
            admin_tasks,
            proxy,
            admin,
            socket,
            ca,
            stop_ca,
            ca_kept,
        })
    }
}

/// Tells the store which keys there are; whether it heard, said in the log where it did not.
async fn introduce(fleet: &Fleet, kind: &str) -> bool {
    let introduced = fleet.introduce().await;
    if let Err(error) = &introduced {
        tracing::warn!(store = kind, %error, "the store fails; no key is lent until it answers");
    }
    introduced.is_ok()
}

/// What `lessor doctor` borrows.
pub fn doctors_tools() -> Tools {
    Tools {
        tls: |ca_file| {
            forward::tls::telling_config(&forward::tls::root_store(&roots::read()), ca_file)
                .map_err(|error| error.to_string())
        },
        holds: |secret, text| Needle::new(secret).mask(text).is_some(),
        open_store: |config| {
            Box::pin(async {
                open_store(config).await.map_err(|error| match std::error::Error::source(&error) {
                    Some(cause) => cause.to_string(),
                    None => error.to_string(),
                })
            })
        },
    }
}

/// Opens the store that `[store]` names.
async fn open_store(config: &Config) -> Result<Arc<dyn Store>, RunError> {
    match &config.store.url {
        StoreUrl::Memory => Ok(Arc::new(MemoryStore::new())),
        StoreUrl::Sqlite(path) => {
            let path = path.clone();
            // Opening waits for the disk, and for other processes' locks.
            let opening = tokio::task::spawn_blocking(move || SqliteStore::open(&path));
            let opened = opening.await.map_err(|panic| StoreError::Nonsense(panic.to_string()))?;
            Ok(Arc::new(opened?))
        }
        StoreUrl::Redis(redis) => Ok(Arc::new(RedisStore::open(redis, &config.store.prefix).await?)),
    }
}

/// What makes certificates for the insides of tunnels, where those are looked into.
fn authority_of(config: &Config) -> Result<Option<Arc<Authority>>, CaError> {
    let new = || Ok(Arc::new(Authority::new(config.ca.as_ref())?.offering(&config.proxy.alpn)));
    config.intercept.then(new).transpose()
}

async fn bind_proxy(config: &Config) -> Result<(Vec<Listener>, Vec<Address>), BindError> {
    let mut listeners = Vec::new();
    for address in &config.listen.proxy {
        listeners.push(Listener::bind(address, "proxy").await?);
    }
    let bound = listeners.iter().map(Listener::address).collect();
    Ok((listeners, bound))
}

/// The admin's listeners: the configuration's, and one more where `POST /quit` would not be reached else.
async fn bind_admin(config: &Config) -> Result<Vec<Listener>, BindError> {
    let first = Listener::bind(&config.listen.admin, "admin").await?;
    let bound = first.address();
    let mut listeners = vec![first];
    if let (Some(Address::Tcp(mut door)), Address::Tcp(bound)) = (config.quit_door(), bound) {
        door.set_port(bound.port()); // which may have been 0
        listeners.push(Listener::bind(&Address::Tcp(door), "admin").await?);
    }
    Ok(listeners)
}

fn tcp_of(addresses: &[Address]) -> Vec<SocketAddr> {
    addresses
        .iter()
        .filter_map(|address| match address {
            Address::Tcp(at) => Some(*at),
            Address::Unix(..) => None,
        })
        .collect()
}

/// What clients may not reach: denied nets, lessor's own listeners, and loopback where callers are
/// elsewhere.
fn denied(config: &Config, proxy: &[Address], admin: &[Address]) -> Denied {
    let own = tcp_of(&[proxy, admin].concat());
    let loopback = tcp_of(proxy).iter().any(|at| !at.ip().is_loopback());
    Denied { nets: config.proxy.deny_nets.clone(), own, loopback }
}

/// The admin socket; one that cannot be made is one warning and no reason not to start.
fn bind_socket(proxy: &[Address]) -> Option<(PathBuf, UnixListener)> {
    let path = admin::socket_path(proxy.first()?);
    match admin::bind_unix(&path) {
        Ok(unix) => Some((path, unix)),
        Err(error) => {
            tracing::warn!(path = %path.display(), %error, "no admin socket; the command line needs --admin");
            None
        }
    }
}

/// Serves both admin doors; where the socket is.
fn open_doors(
    listeners: Vec<Listener>,
    socket: Option<(PathBuf, UnixListener)>,
    state: &Arc<AdminState>,
    stop: &CancellationToken,
    tasks: &TaskTracker,
) -> Option<PathBuf> {
    let (state, stop) = (state.clone(), stop.clone());
    for listener in listeners {
        match listener.into_inner() {
            Inner::Tcp(tcp) => tasks.spawn(admin::serve_tcp(tcp, state.clone(), stop.clone())),
            Inner::Unix(unix) => tasks.spawn(admin::serve_unix(unix, state.clone(), stop.clone())),
        };
    }
    let (path, unix) = socket?;
    tasks.spawn(admin::serve_unix(unix, state, stop));
    Some(path)
}

/// Says once which secrets came by variables, which stay in a process' environment for its whole life and go
/// on to whatever it starts. Not to who tries lessor on a terminal with no file at all.
fn warn_of_variables(config: &Config, on_terminal: bool) {
    let trying = on_terminal && config.origin == config::ENVIRONMENT;
    if config.secret_variables.is_empty() || trying {
        return;
    }
    tracing::warn!(
        variables = config.secret_variables.join(","),
        "secrets came by variables and stay in this process's environment; a file is better: secret = {{ file = \"…\" }}"
    );
}

fn announce(config: &Config, running: &Running, on_terminal: bool) {
    warn_of_variables(config, on_terminal);
    let proxy = running.proxy.iter().map(ToString::to_string).collect::<Vec<_>>().join(",");
    let socket = running.socket.as_ref().map(|path| path.display().to_string());
    let ca = running.ca.as_ref().and_then(LocalCa::file);
    let ca_file = ca.map(|file| file.display().to_string());
    let admin = running.admin.first();
    tracing::info!(
        proxy,
        admin = admin.map(tracing::field::display),
        admin_socket = socket,
        ca_file,
        config = config.origin,
        "listening"
    );
    if on_terminal {
        let doors = Doors { tcp: admin, socket: running.socket.as_deref(), ca };
        // The one thing besides the log that `run` prints; stderr, so that pipes stay clean.
        #[allow(clippy::print_stderr)]
        {
            eprint!("{}", banner(config, &running.proxy, doors));
        }
    } else {
        for note in open_to(config, &running.proxy) {
            tracing::info!("{note}");
        }
        for warning in &config.warnings {
            tracing::warn!("{warning}");
        }
    }
}

//! One connection to Redis, from its address to its first answers.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use redis::aio::{ConnectionLike, MultiplexedConnection};
use redis::cluster::ClusterClientBuilder;
use redis::cluster_async::ClusterConnection;
use redis::cluster_routing::{Route, RoutingInfo, SingleNodeRoutingInfo, SlotAddr};
use redis::io::tcp::TcpSettings;
use redis::{
    AsyncConnectionConfig, Client, Cmd, ConnectionAddr, ConnectionInfo, IntoConnectionInfo as _, Pipeline,
    ProtocolVersion, PushInfo, RedisConnectionInfo, RedisError, RedisFuture, TlsCertificates, Value,
};
use tokio::time::timeout;

use crate::config::{HostPort, RedisConfig, Topology};
use crate::model::Secret;

/// How long one address may take to answer a connect.
const CONNECT: Duration = Duration::from_millis(500);
/// How long one sentinel may take to answer.
const SENTINEL: Duration = Duration::from_millis(300);
/// How often a node of a cluster is tried that gives no answer.
const TRY_AWAY_EVERY: Duration = Duration::from_millis(250);
/// How long unacknowledged bytes may wait before the kernel gives the connection up (TCP_USER_TIMEOUT).
const UNACKNOWLEDGED: Duration = Duration::from_secs(2);

/// Takes what Redis pushes: messages, and the word that the connection has gone.
pub(super) type Push = Arc<dyn Fn(PushInfo) + Send + Sync>;

/// A multiplexed connection. Clones share it.
#[derive(Clone)]
pub(super) enum Conn {
    One(MultiplexedConnection),
    Many(ClusterConnection),
}

impl ConnectionLike for Conn {
    fn req_packed_command<'a>(&'a mut self, cmd: &'a Cmd) -> RedisFuture<'a, Value> {
        match self {
            Self::One(conn) => conn.req_packed_command(cmd),
            Self::Many(conn) => conn.req_packed_command(cmd),
        }
    }

    fn req_packed_commands<'a>(
        &'a mut self,
        cmd: &'a Pipeline,
        offset: usize,
        count: usize,
    ) -> RedisFuture<'a, Vec<Value>> {
        match self {
            Self::One(conn) => conn.req_packed_commands(cmd, offset, count),
            Self::Many(conn) => conn.req_packed_commands(cmd, offset, count),
        }
    }

    fn get_db(&self) -> i64 {
        match self {
            Self::One(conn) => conn.get_db(),
            Self::Many(conn) => conn.get_db(),
        }
    }
}

impl Conn {
    /// One command on the node that holds `key`.
    pub(super) async fn on_node_of(&self, key: &str, cmd: Cmd) -> Result<Value, RedisError> {
        match self.clone() {
            Self::One(mut conn) => cmd.query_async(&mut conn).await,
            Self::Many(mut conn) => {
                let route = Route::with_key(key, SlotAddr::Master);
                let routing = RoutingInfo::SingleNode(SingleNodeRoutingInfo::SpecificNode(route));
                conn.route_command(cmd, routing).await
            }
        }
    }

    pub(super) async fn subscribe(&mut self, channel: &str) -> Result<(), RedisError> {
        match self {
            Self::One(conn) => conn.subscribe(channel).await,
            Self::Many(conn) => conn.subscribe(channel).await,
        }
    }

    pub(super) fn is_cluster(&self) -> bool {
        matches!(self, Self::Many(_))
    }
}

/// One life of the connection.
pub(super) struct Live {
    pub(super) conn: Conn,
    /// Rises with each connection.
    pub(super) generation: u64,
    /// Where it leads, where that is one server.
    pub(super) address: Option<HostPort>,
    /// The server's replication id; another one means another history of the data. Empty where it is not
    /// known, or where there are many servers.
    pub(super) replication: Arc<str>,
    /// Calls in a row that got no answer in time.
    timeouts: AtomicU32,
    answers: AtomicU64,
    /// In a cluster: what cannot be reached, by hash tag.
    away: Mutex<HashMap<String, Away>>,
}

/// A hash tag whose node gave no answer.
#[derive(Default)]
struct Away {
    /// Calls in a row.
    calls: u32,
    /// When it is tried next, where it is not tried by every call.
    next_try: Option<Instant>,
}

impl Live {
    pub(super) fn new(conn: Conn, generation: u64, address: Option<HostPort>, replication: &str) -> Self {
        Self {
            conn,
            generation,
            address,
            replication: replication.into(),
            timeouts: AtomicU32::new(0),
            answers: AtomicU64::new(0),
            away: Mutex::default(),
        }
    }

    fn away(&self) -> MutexGuard<'_, HashMap<String, Away>> {
        self.away.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether a call that goes by `tag` is to be tried: one in a while, where the last few had no answer.
    pub(super) fn is_worth_trying(&self, tag: &str) -> bool {
        let mut away = self.away();
        let Some(Away { next_try: Some(next_try), .. }) = away.get_mut(tag) else { return true };
        let due = *next_try <= Instant::now();
        if due {
            *next_try = Instant::now() + TRY_AWAY_EVERY;
        }
        due
    }

    /// The node of `tag` gave no answer; from the `after`th time in a row on, few calls try it.
    pub(super) fn no_answer_for(&self, tag: &str, after: u32) {
        let mut away = self.away();
        let away = away.entry(tag.to_owned()).or_default();
        away.calls += 1;
        if away.calls >= after {
            away.next_try = Some(Instant::now() + TRY_AWAY_EVERY);
        }
    }

    /// The node of `tag` gave an answer; whether it had given none before.
    pub(super) fn answer_for(&self, tag: &str) -> bool {
        self.away().remove(tag).is_some()
    }

    pub(super) fn answered(&self) {
        self.timeouts.store(0, Ordering::Relaxed);
        self.answers.fetch_add(1, Ordering::Relaxed);
    }

    /// Counts a call without an answer; how many there are in a row.
    pub(super) fn timed_out(&self) -> u32 {
        self.timeouts.fetch_add(1, Ordering::Relaxed) + 1
    }

    pub(super) fn answers(&self) -> u64 {
        self.answers.load(Ordering::Relaxed)
    }
}

/// Opens a connection; to the primary, where there are sentinels.
pub(super) async fn open(config: &RedisConfig, push: Push) -> Result<(Conn, Option<HostPort>), RedisError> {
    let certificates = certificates(config)?;
    match &config.topology {
        Topology::Single(at) => Ok((one(config, at, certificates, push).await?, Some(at.clone()))),
        Topology::Sentinel { .. } => {
            let at = primary(config).await?;
            Ok((one(config, &at, certificates, push).await?, Some(at)))
        }
        Topology::Cluster(nodes) => Ok((many(config, nodes, certificates, push).await?, None)),
    }
}

fn certificates(config: &RedisConfig) -> Result<Option<TlsCertificates>, RedisError> {
    if !config.tls {
        return Ok(None);
    }
    let root_cert = match &config.ca_file {
        // Read at each connect, so that a renewed file counts without a restart.
        Some(path) => Some(std::fs::read(path).map_err(|error| {
            let text = format!("store.ca_file {}: {error}", path.display());
            RedisError::from((redis::ErrorKind::InvalidClientConfig, "a file cannot be read", text))
        })?),
        None => None,
    };
    Ok(Some(TlsCertificates { client_tls: None, root_cert }))
}

fn tcp() -> TcpSettings {
    let keepalive = socket2::TcpKeepalive::new()
        .with_time(Duration::from_secs(10))
        .with_interval(Duration::from_secs(3))
        .with_retries(3);
    TcpSettings::default().set_nodelay(true).set_keepalive(keepalive).set_user_timeout(UNACKNOWLEDGED)
}

fn login(username: Option<&str>, password: Option<&Secret>, db: i64) -> RedisConnectionInfo {
    // No library name: setting it needs a right that an ACL may not give.
    let mut info = RedisConnectionInfo::default()
        .set_db(db)
        .set_protocol(ProtocolVersion::RESP3)
        .set_skip_set_lib_name();
    if let Some(username) = username {
        info = info.set_username(username);
    }
    if let Some(password) = password {
        info = info.set_password(password.expose());
    }
    info
}

fn info_of(config: &RedisConfig, at: &HostPort) -> Result<ConnectionInfo, RedisError> {
    let (host, port) = (at.host.clone(), at.port);
    let addr = if config.tls {
        ConnectionAddr::TcpTls { host, port, insecure: false, tls_params: None }
    } else {
        ConnectionAddr::Tcp(host, port)
    };
    Ok(addr.into_connection_info()?.set_tcp_settings(tcp()))
}

fn client(info: ConnectionInfo, certificates: Option<TlsCertificates>) -> Result<Client, RedisError> {
    match certificates {
        Some(certificates) => Client::build_with_tls(info, certificates),
        None => Client::open(info),
    }
}

async fn one(
    config: &RedisConfig,
    at: &HostPort,
    certificates: Option<TlsCertificates>,
    push: Push,
) -> Result<Conn, RedisError> {
    let login = login(config.username.as_deref(), config.password.as_ref(), config.db);
    let client = client(info_of(config, at)?.set_redis_settings(login), certificates)?;
    let settings = AsyncConnectionConfig::new()
        .set_connection_timeout(Some(CONNECT))
        .set_response_timeout(None) // each call has its own
        .set_push_sender(move |info| -> Result<(), ()> {
            push(info);
            Ok(())
        });
    Ok(Conn::One(client.get_multiplexed_async_connection_with_config(&settings).await?))
}

async fn many(
    config: &RedisConfig,
    nodes: &[HostPort],
    certificates: Option<TlsCertificates>,
    push: Push,
) -> Result<Conn, RedisError> {
    let nodes: Vec<ConnectionInfo> = nodes.iter().map(|at| info_of(config, at)).collect::<Result<_, _>>()?;
    let mut builder = ClusterClientBuilder::new(nodes)
        .use_protocol(ProtocolVersion::RESP3)
        .connection_timeout(CONNECT)
        .response_timeout(CONNECT)
        .retries(4)
        .min_retry_wait(10)
        .max_retry_wait(100)
        .tcp_settings(tcp())
        .push_sender(move |info| -> Result<(), ()> {
            push(info);
            Ok(())
        });
    if let Some(username) = &config.username {
        builder = builder.username(username);
    }
    if let Some(password) = &config.password {
        builder = builder.password(password.expose());
    }
    if let Some(certificates) = certificates {
        builder = builder.tls(redis::cluster::TlsMode::Secure).certs(certificates);
    }
    Ok(Conn::Many(builder.build()?.get_async_connection().await?))
}

/// Where the sentinels say that the primary is: the first that answers counts.
pub(super) async fn primary(config: &RedisConfig) -> Result<HostPort, RedisError> {
    let Topology::Sentinel { sentinels, primary } = &config.topology else {
        return Err(RedisError::from((redis::ErrorKind::Client, "there are no sentinels")));
    };
    let mut last = RedisError::from((redis::ErrorKind::EmptySentinelList, "no sentinel is named"));
    for at in sentinels {
        match timeout(SENTINEL, ask_sentinel(config, at, primary)).await {
            Ok(Ok(found)) => return Ok(found),
            Ok(Err(error))
                if error.kind() == redis::ErrorKind::AuthenticationFailed
                    || error.code() == Some("NOAUTH") =>
            {
                let text = format!("{at}; see store.sentinel_username and store.sentinel_password");
                let why = "a sentinel refused the user or the password";
                last = RedisError::from((redis::ErrorKind::InvalidClientConfig, why, text));
            }
            Ok(Err(error)) => last = error,
            Err(_) => {
                let text = format!("sentinel {at} gave no answer within {SENTINEL:?}");
                last = RedisError::from(std::io::Error::new(std::io::ErrorKind::TimedOut, text));
            }
        }
    }
    Err(last)
}

async fn ask_sentinel(config: &RedisConfig, at: &HostPort, name: &str) -> Result<HostPort, RedisError> {
    let login = login(config.sentinel_username.as_deref(), config.sentinel_password.as_ref(), 0)
        .set_protocol(ProtocolVersion::RESP2);
    let client = client(info_of(config, at)?.set_redis_settings(login), certificates(config)?)?;
    let settings = AsyncConnectionConfig::new()
        .set_connection_timeout(Some(SENTINEL))
        .set_response_timeout(Some(SENTINEL));
    let mut conn = client.get_multiplexed_async_connection_with_config(&settings).await?;
    let found: Option<(String, u16)> =
        redis::cmd("SENTINEL").arg("GET-MASTER-ADDR-BY-NAME").arg(name).query_async(&mut conn).await?;
    found.map(|(host, port)| HostPort { host, port }).ok_or_else(|| {
        let text = format!("{at} knows no primary named `{name}`; see store.url");
        RedisError::from((redis::ErrorKind::MasterNameNotFoundBySentinel, "the sentinel", text))
    })
}

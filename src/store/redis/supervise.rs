//! Keeping one connection: connect, greet, watch, connect again.
//!
//! One task owns this. Callers never connect: while there is no connection they are refused at once, save
//! that they wait a moment for the first attempt after a break, which usually ends it.

use std::sync::Arc;
use std::time::Duration;

use rand::Rng as _;
use redis::{PushInfo, PushKind, RedisError, Value};
use tokio::time::{sleep, timeout};

use super::errors::{Verdict, in_words, judge};
use super::link::{self, Conn, Live, Push};
use super::values::Reader;
use super::{CALL_LIMIT, Call, Shared, State};
use crate::config::Topology;
use crate::store::{StoreError, StoreEvent};

/// The whole of connecting and greeting.
const CONNECT_LIMIT: Duration = Duration::from_millis(1500);
/// Pauses between attempts double from here...
const FIRST_PAUSE: Duration = Duration::from_millis(50);
/// ...to here, each jittered: whoever comes back is found within a second.
const LAST_PAUSE: Duration = Duration::from_millis(500);
/// How often a quiet connection is tried, and the sentinels are asked.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// The layout that this version writes and reads.
const LAYOUT: u32 = 1;

/// Why a connection could not be had.
#[derive(Debug, Clone)]
pub(super) struct NotConnected {
    pub(super) why: Arc<str>,
    /// Trying again does not help: a person must act.
    pub(super) lasting: bool,
}

impl From<RedisError> for NotConnected {
    fn from(error: RedisError) -> Self {
        let lasting = matches!(judge(&error), Verdict::Misconfigured(_));
        Self { why: in_words(&error).into(), lasting }
    }
}

impl From<StoreError> for NotConnected {
    fn from(error: StoreError) -> Self {
        Self { why: error.to_string().into(), lasting: true }
    }
}

/// The task. Ends when the last handle of the store has gone.
pub(super) async fn run(shared: Arc<Shared>) {
    let mut pause = FIRST_PAUSE;
    let mut generation = 0;
    loop {
        let attempt = tokio::select! {
            biased;
            () = shared.stop.cancelled() => return,
            attempt = connect(&shared, generation + 1) => attempt,
        };
        match attempt {
            Ok(live) => {
                pause = FIRST_PAUSE;
                generation += 1;
                let live = Arc::new(live);
                shared.state.send_replace(State::Up(Arc::clone(&live)));
                if generation > 1 {
                    shared.tell(StoreEvent::Reconnected);
                }
                watch(&shared, &live).await;
                if shared.stop.is_cancelled() {
                    return;
                }
            }
            Err(failed) => {
                let why = StoreError::Unavailable(failed.why.to_string());
                let before = shared.state.send_replace(State::Down(failed));
                if !matches!(before, State::Down(_)) {
                    shared.tell(StoreEvent::Away(why));
                }
                let jittered = pause.mul_f64(rand::rng().random_range(0.5..1.0));
                tokio::select! {
                    biased;
                    () = shared.stop.cancelled() => return,
                    () = sleep(jittered) => {}
                }
                pause = (pause * 2).min(LAST_PAUSE);
            }
        }
    }
}

/// Until the connection is broken, or leads to the wrong place.
async fn watch(shared: &Arc<Shared>, live: &Live) {
    let mut answers = live.answers();
    loop {
        let jittered = LOOK_EVERY.mul_f64(rand::rng().random_range(0.8..1.2));
        tokio::select! {
            biased;
            () = shared.stop.cancelled() => return,
            () = shared.broke.notified() => {}
            () = sleep(jittered) => look(shared, live, &mut answers).await,
        }
        if !shared.is_up(live.generation) {
            return;
        }
    }
}

/// Tries a quiet connection; asks the sentinels whether it still leads to the primary.
async fn look(shared: &Arc<Shared>, live: &Live, answers: &mut u64) {
    if live.conn.is_cluster() {
        return; // its nodes are the library's care
    }
    let quiet = live.answers() == *answers;
    if quiet && timeout(CALL_LIMIT, shared.now_from(live)).await.is_ok_and(|answer| answer.is_ok()) {
        live.answered();
    } else if quiet && live.timed_out() >= super::BREAK_AFTER {
        shared.silent(live.generation);
    }
    *answers = live.answers();
    if matches!(shared.config.topology, Topology::Sentinel { .. })
        && let Ok(at) = link::primary(&shared.config).await
        && live.address.as_ref().is_some_and(|known| *known != at)
    {
        tracing::info!(primary = %at, "the sentinels name another primary");
        shared.broken(live.generation);
    }
}

async fn connect(shared: &Arc<Shared>, generation: u64) -> Result<Live, NotConnected> {
    let slow = || {
        let tls =
            if shared.config.tls { "; does the port speak TLS? without it the URL is redis://" } else { "" };
        NotConnected { why: format!("no answer within {CONNECT_LIMIT:?}{tls}").into(), lasting: false }
    };
    timeout(CONNECT_LIMIT, async {
        let (mut conn, address) = link::open(&shared.config, pushes(shared, generation)).await?;
        greet(shared, &mut conn, address, generation).await
    })
    .await
    .unwrap_or_else(|_| Err(slow()))
    .map_err(|failed| NotConnected {
        why: format!("no connection to {}: {}", shared.config.shown, failed.why).into(),
        ..failed
    })
}

/// What Redis pushes goes to whoever listens; a connection that has gone is replaced.
fn pushes(shared: &Arc<Shared>, generation: u64) -> Push {
    let shared = Arc::downgrade(shared);
    Arc::new(move |info: PushInfo| {
        let Some(shared) = shared.upgrade() else { return };
        match info.kind {
            // In a cluster one node of several has gone, and the library sees to it.
            PushKind::Disconnection if !matches!(shared.config.topology, Topology::Cluster(_)) => {
                shared.broken(generation);
            }
            PushKind::Message => shared.heard(info.data),
            _ => {}
        }
    })
}

/// The first words on a connection: is this a store that lessor can use?
async fn greet(
    shared: &Arc<Shared>,
    conn: &mut Conn,
    address: Option<crate::config::HostPort>,
    generation: u64,
) -> Result<Live, NotConnected> {
    check_layout(shared, conn).await?;
    agree_on_salt(shared, conn).await?;
    let replication = if conn.is_cluster() { None } else { about_server(shared, conn).await };
    if let Err(error) = conn.subscribe(shared.names.channel()).await {
        if judge(&error) == Verdict::Broken {
            return Err(error.into());
        }
        shared.warn_once(
            "subscribe",
            &format!(
                "redis refuses to subscribe, so waiters here learn of slots freed elsewhere by a timer only; give \
                 the user `&{}` and `+subscribe`: {error}",
                shared.names.channel()
            ),
        );
    }
    let live = Live::new(conn.clone(), generation, address, replication.as_deref().unwrap_or_default());
    try_rights(shared, &live).await?;
    Ok(live)
}

/// What the store's own hash holds; this, where it holds nothing. Looks first, so that a server that takes no
/// writes for now (OOM) can be connected to, and slots be given back there.
async fn known_or(
    shared: &Shared,
    conn: &mut Conn,
    field: &str,
    ours: &[u8],
) -> Result<Vec<u8>, NotConnected> {
    let store = shared.names.store();
    let mut get = redis::cmd("HGET");
    get.arg(&store).arg(field);
    if let Some(known) = get.query_async(conn).await? {
        return Ok(known);
    }
    let mut setnx = redis::cmd("HSETNX");
    setnx.arg(&store).arg(field).arg(ours);
    let _: Value = setnx.query_async(conn).await?;
    Ok(get.query_async(conn).await?)
}

async fn check_layout(shared: &Shared, conn: &mut Conn) -> Result<(), NotConnected> {
    let layout = known_or(shared, conn, "layout", LAYOUT.to_string().as_bytes()).await?;
    let layout = String::from_utf8_lossy(&layout);
    match layout.parse::<u32>() {
        Ok(known) if known <= LAYOUT => Ok(()),
        _ => Err(NotConnected {
            why: format!(
                "the store has layout {layout} and this lessor knows up to {LAYOUT}; update lessor, or give it a \
                 store.prefix of its own"
            )
            .into(),
            lasting: true,
        }),
    }
}

/// Whoever finds no salt writes the one it uses, so a store that lost its data gets it back.
async fn agree_on_salt(shared: &Shared, conn: &mut Conn) -> Result<(), NotConnected> {
    let offered = shared.salt().unwrap_or_else(rand::random);
    let salt = known_or(shared, conn, "salt", &offered).await?;
    Ok(shared.agreed_on(salt)?)
}

/// The server's replication id. Warns of settings under which leases may vanish.
async fn about_server(shared: &Shared, conn: &mut Conn) -> Option<String> {
    let info: Result<String, RedisError> = redis::cmd("INFO").query_async(conn).await;
    let info = match info {
        Ok(info) => info,
        Err(error) => {
            shared.warn_once(
                "info",
                &format!("redis refuses INFO, so a failover is noticed late; give the user `+info`: {error}"),
            );
            return None;
        }
    };
    let field = |name: &str| {
        info.lines()
            .find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))
            .map(|value| value.trim().to_owned())
    };
    if let Some(policy) = field("maxmemory_policy").filter(|policy| policy != "noeviction")
        && field("maxmemory").is_some_and(|bound| bound != "0")
    {
        shared.warn_once(
            "eviction",
            &format!(
                "redis may evict leases: its maxmemory-policy is {policy}; set it to noeviction, or give lessor a \
                 server of its own"
            ),
        );
    }
    field("master_replid")
}

/// Names each command that the user may not run.
async fn try_rights(shared: &Arc<Shared>, live: &Live) -> Result<(), NotConnected> {
    let mut call = Call::default();
    call.key(shared.names.trial()).arg(shared.names.channel()).arg(shared.names.all());
    // By its text, and then another by its hash: both are needed, whatever this server has cached.
    let trial = call.command("EVAL", &shared.scripts.trial.text);
    let mut answer = Reader::of(trial.query_async(&mut live.conn.clone()).await?)?;
    let mut lacking = Vec::new();
    while !answer.is_empty() {
        lacking.push(answer.text()?);
    }
    if lacking.is_empty() {
        return shared.now_from(live).await;
    }
    Err(NotConnected {
        why: format!(
            "the redis user lacks rights that lessor needs: add {} to it; the README has the whole ACL line",
            lacking.join(" ")
        )
        .into(),
        lasting: true,
    })
}

impl Shared {
    /// The connection has gone, or is not to be trusted: callers wait for the next a moment.
    pub(super) fn broken(&self, generation: u64) {
        self.ends(generation, State::Starting);
    }

    /// The server says nothing: another connection is tried, and callers do not wait for it, for it is not
    /// likely to fare better.
    pub(super) fn silent(&self, generation: u64) {
        let why = format!("no answer from {} any more", self.config.shown).into();
        self.ends(generation, State::Down(NotConnected { why, lasting: false }));
    }

    fn ends(&self, generation: u64, next: State) {
        let was_up = self.state.send_if_modified(|state| {
            let this = matches!(state, State::Up(live) if live.generation == generation);
            if this {
                *state = next;
            }
            this
        });
        if was_up {
            self.broke.notify_one();
        }
    }

    pub(super) fn is_up(&self, generation: u64) -> bool {
        matches!(&*self.state.borrow(), State::Up(live) if live.generation == generation)
    }

    /// Says it once in the process' life.
    fn warn_once(&self, what: &'static str, text: &str) {
        let mut said = self.said.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        if !said.iter().any(|(known, _)| *known == what) {
            said.push((what, text.to_owned()));
            tracing::warn!("{text}");
        }
    }

    /// A message of the channel: `<what> <sender> <provider> …`.
    fn heard(&self, data: Vec<Value>) {
        let Some(message) = data.into_iter().nth(1) else { return };
        let Ok(message) = super::values::text(message) else { return };
        let mut words = message.split(' ');
        let (Some(what), Some(sender), Some(provider)) = (words.next(), words.next(), words.next()) else {
            return;
        };
        let Ok(provider) = provider.parse::<crate::model::ProviderName>() else { return };
        if sender == self.name {
            return; // told already, when the call was answered
        }
        match what {
            "freed" => {
                for key in words.filter_map(|word| word.parse().ok()) {
                    self.tell(StoreEvent::Freed(provider.clone(), key));
                }
            }
            "changed" => self.tell(StoreEvent::Changed(provider)),
            "revoked" => {
                if let Some(lease) = words.next().and_then(|word| word.parse().ok()) {
                    self.tell(StoreEvent::Revoked(provider, crate::model::LeaseId(lease)));
                }
            }
            _ => {} // a word of a newer version
        }
    }
}

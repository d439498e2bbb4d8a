//! Redis, or Valkey, for a fleet: the rules in Lua, decided by the server in one step a call.
//!
//! All of a process' calls share one multiplexed connection, which one task keeps. Every call has its own
//! deadline, and fails at once while there is no connection, so nothing piles up. A call that was cut off
//! may have run: each is safe to repeat, by its lease's id, and is repeated on the next connection while its
//! time lasts; where it does not, the error says that the outcome is unknown ([`StoreError::TimedOut`]).
//!
//! ```text
//! names.rs      the names of Redis keys
//! scripts.rs    the Lua scripts
//! link.rs       one connection: address, TLS, sentinels, cluster
//! supervise.rs  keeping one: connect, greet, watch, connect again
//! errors.rs     what an error means
//! batch.rs      calls that arrive together go together
//! call.rs       a script's keys and arguments, what its asks share sent once
//! lend.rs       acquire, renew
//! give_back.rs  release
//! keys.rs       report, settings, status, revocation
//! view.rs       the whole state, for people; and repairing what cannot be
//! values.rs     reading answers
//! ```

use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use redis::{Cmd, Pipeline, RedisError, Value};
use tokio::sync::{Notify, broadcast, watch};
use tokio::time::{Instant as Moment, sleep, timeout, timeout_at};
use tokio_util::sync::CancellationToken;

use super::{
    Acquire, Acquired, Answer, Release, Renew, Renewed, Report, Reported, Snapshot, StatusChange, Store,
    StoreError, StoreEvent, StoreTime, SyncKeys, Synced,
};
use crate::config::RedisConfig;
use crate::model::{KeyId, LeaseId, ProviderName};

mod batch;
mod call;
mod errors;
mod give_back;
mod keys;
mod lend;
mod link;
mod names;
mod scripts;
mod supervise;
mod values;
mod view;

pub use scripts::REDIS_TIME;

use batch::Batcher;
use call::Call;
use errors::{Verdict, in_words, judge};
use link::Live;
use names::Names;
use scripts::{Script, Scripts};
use supervise::NotConnected;
use values::Reader;

/// How long a call may take, repeats and waiting for a connection included.
const CALL_LIMIT: Duration = Duration::from_millis(600);
/// How long a caller waits where its call is one of several, in one batch or one after the other: so much longer
/// that a call without an answer is first seen, and counted, by itself.
const SHARED_LIMIT: Duration = crate::config::STORE_CALL;
/// How much of it may be spent on waiting for the first attempt after a break.
const BREAK_PATIENCE: Duration = Duration::from_millis(250);
/// Calls without an answer, in a row, after which the connection is replaced.
const BREAK_AFTER: u32 = 2;
/// The pause before a call is repeated that Redis was not ready for.
const NOT_NOW: Duration = Duration::from_millis(40);
/// How long the start waits for the first connection.
const START_PATIENCE: Duration = Duration::from_secs(3);
/// Events a slow subscriber may be behind before it misses some and must look again.
const EVENTS: usize = 1024;

/// Pools and leases in Redis. Clones share everything; the connection closes with the last.
#[derive(Clone)]
pub struct RedisStore(Arc<Handle>);

/// Ends the task that keeps the connection.
struct Handle(Arc<Shared>);

impl Drop for Handle {
    fn drop(&mut self) {
        self.0.stop.cancel();
    }
}

/// What the tasks share with the callers.
struct Shared {
    config: RedisConfig,
    names: Names,
    scripts: Scripts,
    /// Random: tells this sidecar's messages from others'.
    name: String,
    state: watch::Sender<State>,
    /// Wakes the supervisor after [`State::Up`] has ended.
    broke: Notify,
    stop: CancellationToken,
    clock: Clock,
    salt: Mutex<Option<[u8; 32]>>,
    /// In a cluster: the replication id of the node that holds a provider's keys.
    histories: Mutex<HashMap<ProviderName, Arc<str>>>,
    events: broadcast::Sender<StoreEvent>,
    batcher: Batcher,
    /// What has been warned of, and how.
    said: Mutex<Vec<(&'static str, String)>>,
}

/// How things stand with the connection.
#[derive(Clone)]
enum State {
    /// The first attempt is under way: worth waiting for.
    Starting,
    Up(Arc<Live>),
    Down(NotConnected),
}

/// The best estimate of Redis' clock: each answer tells it.
struct Clock {
    born: Instant,
    /// Redis' ms since 1970, less ms since `born`.
    offset: AtomicI64,
}

impl Clock {
    fn new() -> Self {
        let wall = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or(Duration::ZERO);
        let offset = AtomicI64::new(i64::try_from(wall.as_millis()).unwrap_or(0));
        Self { born: Instant::now(), offset }
    }

    fn elapsed(&self) -> i64 {
        i64::try_from(self.born.elapsed().as_millis()).unwrap_or(i64::MAX)
    }

    fn saw(&self, now_ms: i64) {
        self.offset.store(now_ms.saturating_sub(self.elapsed()), Ordering::Relaxed);
    }

    fn now(&self) -> StoreTime {
        let now = self.offset.load(Ordering::Relaxed).saturating_add(self.elapsed());
        StoreTime(u64::try_from(now).unwrap_or(0))
    }
}

impl RedisStore {
    /// Connects, and goes on trying in the background where that takes long.
    ///
    /// # Errors
    /// [`StoreError::Unavailable`] where only a person can help: a wrong password, missing rights, a layout
    /// that is newer than this version. A server that cannot be reached is none: the store then fails all
    /// calls until it is there.
    pub async fn open(config: &RedisConfig, prefix: &str) -> Result<Self, StoreError> {
        Self::open_with_clock(config, prefix, REDIS_TIME).await
    }

    /// The same with this Lua text in the place of `lua/clock.lua`.
    pub async fn open_with_clock(
        config: &RedisConfig,
        prefix: &str,
        clock: &str,
    ) -> Result<Self, StoreError> {
        let shared = Arc::new(Shared {
            config: config.clone(),
            names: Names::new(prefix),
            scripts: Scripts::with_clock(clock),
            name: uuid::Uuid::now_v7().simple().to_string(),
            state: watch::Sender::new(State::Starting),
            broke: Notify::new(),
            stop: CancellationToken::new(),
            clock: Clock::new(),
            salt: Mutex::default(),
            histories: Mutex::default(),
            events: broadcast::Sender::new(EVENTS),
            batcher: Batcher::default(),
            said: Mutex::default(),
        });
        let store = Self(Arc::new(Handle(Arc::clone(&shared))));
        tokio::spawn(supervise::run(Arc::clone(&shared)));
        let mut state = shared.state.subscribe();
        let settled =
            timeout(START_PATIENCE, state.wait_for(|state| !matches!(state, State::Starting))).await;
        match settled.ok().and_then(Result::ok).as_deref() {
            Some(State::Up(_)) => {}
            Some(State::Down(failed)) if failed.lasting => {
                return Err(StoreError::Unavailable(failed.why.to_string()));
            }
            Some(State::Down(failed)) => tracing::warn!(
                store = shared.config.shown,
                why = %failed.why,
                "redis cannot be reached; lessor starts without it and lends no key until it is there"
            ),
            _ => {
                tracing::warn!(
                    store = shared.config.shown,
                    "redis gives no answer; lessor starts without it"
                );
            }
        }
        Ok(store)
    }

    fn shared(&self) -> &Arc<Shared> {
        &self.0.0
    }

    /// A call as a future of its own.
    fn call<T, F>(&self, act: impl FnOnce(Arc<Shared>) -> F + Send + 'static) -> Answer<T>
    where
        F: Future<Output = Result<T, StoreError>> + Send + 'static,
    {
        let shared = Arc::clone(self.shared());
        Box::pin(async move { act(shared).await })
    }
}

impl fmt::Debug for RedisStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The salt would let a reader of the log test guesses of a secret.
        f.debug_struct("RedisStore").field("at", &self.shared().config.shown).finish_non_exhaustive()
    }
}

impl Shared {
    fn tell(&self, event: StoreEvent) {
        // An error only says that nobody listens.
        let _ = self.events.send(event);
    }

    fn salt(&self) -> Option<[u8; 32]> {
        *self.salt.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sets the salt; the one before.
    fn set_salt(&self, salt: [u8; 32]) -> Option<[u8; 32]> {
        self.salt.lock().unwrap_or_else(PoisonError::into_inner).replace(salt)
    }

    /// Takes the store's salt for its own, and says so where that changes fingerprints.
    fn agreed_on(&self, salt: Vec<u8>) -> Result<(), StoreError> {
        let salt = salt.try_into().map_err(|_| values::nonsense("a salt of the wrong length"))?;
        if self.set_salt(salt).is_some_and(|known| known != salt) {
            self.tell(StoreEvent::Resalted);
        }
        Ok(())
    }

    /// The connection, waiting for it where it is worth it.
    async fn live(&self, until: Moment) -> Result<Arc<Live>, StoreError> {
        if let State::Up(live) = &*self.state.borrow() {
            return Ok(Arc::clone(live));
        }
        let patience = until.min(Moment::now() + BREAK_PATIENCE);
        let mut state = self.state.subscribe();
        let settled = timeout_at(patience, state.wait_for(|state| !matches!(state, State::Starting))).await;
        match settled.ok().and_then(Result::ok).as_deref() {
            Some(State::Up(live)) => Ok(Arc::clone(live)),
            Some(State::Down(failed)) => Err(StoreError::Unavailable(failed.why.to_string())),
            _ => Err(StoreError::Unavailable(format!("no connection to {}", self.config.shown))),
        }
    }

    /// Runs a script. Repeats what is safe to repeat while the time lasts.
    async fn run(&self, script: &Script, call: &Call) -> Result<Reader, StoreError> {
        self.run_at(script, call).await.map(|(_, reader)| reader)
    }

    /// The same, and when the script ran.
    async fn run_at(&self, script: &Script, call: &Call) -> Result<(StoreTime, Reader), StoreError> {
        let value = self.insist(&Asked::Script(script, call)).await?;
        let mut reader = Reader::of(value)?;
        let now = reader.number()?;
        self.clock.saw(now);
        Ok((StoreTime(u64::try_from(now).unwrap_or(0)), reader))
    }

    /// Runs a pipeline of plain commands on keys of one provider.
    async fn pipe(&self, pipe: &Pipeline) -> Result<Reader, StoreError> {
        Reader::of(self.insist(&Asked::Pipe(pipe)).await?)
    }

    /// One command on the node that holds `key`.
    async fn command(&self, key: &str, cmd: &Cmd) -> Result<Value, StoreError> {
        self.insist(&Asked::Command(key, cmd)).await
    }

    /// The clock, so that what is judged here is judged by the store's time.
    async fn look_at_clock(&self) -> Result<(), StoreError> {
        let mut call = Call::default();
        call.key(self.names.store());
        self.run(&self.scripts.now, &call).await.map(|_| ())
    }

    /// Makes a call on whatever connection there is until it is answered, refused, or out of time.
    async fn insist(&self, asked: &Asked<'_>) -> Result<Value, StoreError> {
        let until = Moment::now() + CALL_LIMIT;
        // Whether a call that was cut off may have run: then its outcome is unknown for good.
        let mut may_have_run = false;
        let failed = |may_have_run: bool, text: String| {
            if may_have_run { StoreError::TimedOut(CALL_LIMIT) } else { StoreError::Unavailable(text) }
        };
        loop {
            let live = match self.live(until).await {
                Ok(live) => live,
                Err(StoreError::Unavailable(text)) => return Err(failed(may_have_run, text)),
                Err(error) => return Err(error),
            };
            // A cluster's connection is many, which the library keeps: one node that is away is no reason to
            // replace the others, and stops its own providers alone.
            let tag = if live.conn.is_cluster() { asked.tag() } else { None };
            if let Some(tag) = tag
                && !live.is_worth_trying(tag)
            {
                let text = format!("the node of `{tag}` in {} gives no answer", self.config.shown);
                return Err(failed(may_have_run, text));
            }
            let answered = || {
                live.answered();
                if tag.is_some_and(|tag| live.answer_for(tag)) {
                    self.tell(StoreEvent::Reconnected);
                }
            };
            let Ok(answer) = timeout_at(until, asked.of(&live)).await else {
                if let Some(tag) = tag {
                    live.no_answer_for(tag, BREAK_AFTER);
                } else if live.timed_out() >= BREAK_AFTER && !live.conn.is_cluster() {
                    self.silent(live.generation);
                }
                return Err(StoreError::TimedOut(CALL_LIMIT));
            };
            let error = match answer {
                Ok(value) => {
                    answered();
                    return Ok(value);
                }
                Err(error) => error,
            };
            match judge(&error) {
                Verdict::Broken if live.conn.is_cluster() => {
                    if let Some(tag) = tag.filter(|_| !may_have_run) {
                        live.no_answer_for(tag, BREAK_AFTER);
                    }
                    may_have_run = true;
                    sleep(NOT_NOW).await;
                }
                Verdict::Broken => {
                    may_have_run = true;
                    self.broken(live.generation);
                }
                Verdict::WrongNode => self.broken(live.generation),
                Verdict::NotNow | Verdict::NoScript => {
                    if Moment::now() + NOT_NOW >= until {
                        if !live.conn.is_cluster() {
                            self.broken(live.generation);
                        }
                        return Err(failed(may_have_run, in_words(&error)));
                    }
                    sleep(NOT_NOW).await;
                }
                Verdict::Refused(text) | Verdict::Misconfigured(text) => {
                    answered();
                    return Err(failed(may_have_run, text));
                }
            }
            if Moment::now() >= until {
                return Err(failed(may_have_run, in_words(&error)));
            }
        }
    }

    /// Asks for the time on this connection.
    async fn now_from(&self, live: &Live) -> Result<(), NotConnected> {
        let mut call = Call::default();
        call.key(self.names.store());
        let answer = Asked::Script(&self.scripts.now, &call).of(live).await?;
        self.clock.saw(Reader::of(answer)?.number()?);
        Ok(())
    }
}

/// Calls that belong together share one limit.
async fn within_limit<T>(calls: impl Future<Output = Result<T, StoreError>>) -> Result<T, StoreError> {
    timeout(SHARED_LIMIT, calls).await.unwrap_or(Err(StoreError::TimedOut(SHARED_LIMIT)))
}

/// What can be asked of a connection.
enum Asked<'a> {
    Script(&'a Script, &'a Call),
    Pipe(&'a Pipeline),
    Command(&'a str, &'a Cmd),
}

impl Asked<'_> {
    /// What chooses the node in a cluster: the hash tag of the first key, or all of it.
    fn tag(&self) -> Option<&str> {
        let key = match self {
            Self::Script(_, call) => call.keys.first()?,
            Self::Command(key, _) => *key,
            Self::Pipe(_) => return None,
        };
        let tag = key.split_once('{').and_then(|(_, rest)| rest.split_once('}'));
        Some(tag.map_or(key, |(tag, _)| tag))
    }

    /// Asks once. A script goes by its hash, and by its text where the server does not have it.
    async fn of(&self, live: &Live) -> Result<Value, RedisError> {
        let mut conn = live.conn.clone();
        match self {
            Self::Script(script, call) => {
                let answer: Result<Value, _> =
                    call.command("EVALSHA", &script.sha).query_async(&mut conn).await;
                match answer {
                    Err(error) if judge(&error) == Verdict::NoScript => {
                        call.command("EVAL", &script.text).query_async(&mut conn).await
                    }
                    answer => answer,
                }
            }
            Self::Pipe(pipe) => pipe.query_async(&mut conn).await,
            Self::Command(key, cmd) => conn.on_node_of(key, (*cmd).clone()).await,
        }
    }
}

impl Store for RedisStore {
    fn acquire(&self, ask: Acquire) -> Answer<Acquired> {
        self.call(|shared| async move { shared.acquire(ask).await })
    }

    fn renew(&self, ask: Renew) -> Answer<Renewed> {
        self.call(|shared| async move { shared.renew(ask).await })
    }

    fn release(&self, asks: Vec<Release>) -> Answer<usize> {
        self.call(|shared| async move { shared.release(asks).await })
    }

    fn report(&self, ask: Report) -> Answer<Reported> {
        self.call(|shared| async move { shared.report(ask).await })
    }

    fn sync_keys(&self, ask: SyncKeys) -> Answer<Synced> {
        self.call(|shared| async move { shared.sync_keys(ask).await })
    }

    fn set_status(&self, provider: ProviderName, key: KeyId, change: StatusChange) -> Answer<bool> {
        self.call(|shared| async move { shared.set_status(provider, key, change).await })
    }

    fn revoke(&self, provider: ProviderName, lease: LeaseId) -> Answer<bool> {
        self.call(move |shared| async move { shared.revoke(provider, lease).await })
    }

    fn snapshot(&self, provider: ProviderName) -> Answer<Snapshot> {
        self.call(|shared| async move { shared.snapshot(provider).await })
    }

    fn subscribe(&self) -> broadcast::Receiver<StoreEvent> {
        self.shared().events.subscribe()
    }

    fn now(&self) -> StoreTime {
        self.shared().clock.now()
    }

    fn salt(&self, known: Option<[u8; 32]>) -> Answer<[u8; 32]> {
        self.call(move |shared| async move {
            if shared.salt().is_none() {
                // Offered to the store by the next connection, where it has none of its own.
                if let Some(known) = known {
                    shared.set_salt(known);
                }
            }
            shared.live(Moment::now() + CALL_LIMIT).await?;
            shared.salt().ok_or_else(|| StoreError::Unavailable("the store has no salt yet".into()))
        })
    }

    fn reconcile(&self, provider: ProviderName) -> Answer<u64> {
        self.call(|shared| async move { shared.reconcile(provider).await })
    }

    fn leases_expire(&self) -> bool {
        true
    }

    fn ping(&self) -> Answer<()> {
        self.call(|shared| async move { shared.look_at_clock().await })
    }

    fn concerns(&self) -> Vec<String> {
        let said = self.shared().said.lock().unwrap_or_else(PoisonError::into_inner);
        said.iter().map(|(_, text)| text.clone()).collect()
    }

    fn kind(&self) -> &'static str {
        "redis"
    }
}

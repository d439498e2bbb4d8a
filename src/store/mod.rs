//! Where pools and leases live.
//!
//! One trait, one set of rules ([`rules`], a pure state machine with time as an argument), and
//! backends that apply them atomically. [`memory::MemoryStore`] is the rules behind a lock. What
//! decides is atomic in the store; the caller's clock decides nothing in a shared one: every time in
//! this module is the *store's* own, in ms since the Unix epoch ([`StoreTime`]).

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::model::{
    AppName, Class, FencingToken, Fingerprint, GroupName, KeyId, KeyStatus, LeaseId, ModelName, Outcome,
    OwnerId, PoolName, ProviderName,
};

pub use crate::model::{Candidate, KeySettings};

pub mod memory;
pub mod redis;
pub mod rules;
pub mod sqlite;
pub mod text;

/// A point on the store's clock, in ms since the Unix epoch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, Default)]
#[serde(transparent)]
pub struct StoreTime(pub u64);

impl StoreTime {
    /// Later than every other time.
    pub const NEVER: Self = Self(u64::MAX);

    /// This time plus `wait`, saturating.
    #[must_use]
    pub fn plus(self, wait: Duration) -> Self {
        Self(self.0.saturating_add(u64::try_from(wait.as_millis()).unwrap_or(u64::MAX)))
    }

    /// How long from `now` until this time; zero when past.
    pub fn since(self, now: Self) -> Duration {
        Duration::from_millis(self.0.saturating_sub(now.0))
    }
}

/// Names one life of the store's data; another value means that what was known is gone.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Epoch(pub Arc<str>);

/// The store failed; nothing is known about keys. Distinct, everywhere, from "nothing free".
#[derive(Debug, Clone, thiserror::Error)]
pub enum StoreError {
    /// No answer within the call's time; the call may still have run.
    #[error("store gave no answer within {0:?}; is store.url right, and up?")]
    TimedOut(Duration),
    /// The store refused or could not be reached; the call did not run.
    #[error("store is unavailable: {0}")]
    Unavailable(String),
    /// The store answered something that cannot be.
    #[error("store answered nonsense: {0}")]
    Nonsense(String),
}

/// What every operation returns. The future owns all it needs: it may be dropped at any point, and the
/// operation then has either run whole or not at all.
pub type Answer<T> = Pin<Box<dyn Future<Output = Result<T, StoreError>> + Send + 'static>>;

/// Asks for a slot of the first candidate that has one free.
#[derive(Debug, Clone)]
pub struct Acquire {
    /// Whose keys.
    pub provider: ProviderName,
    /// Chosen by the sidecar; a second call with the same id returns the first's grant.
    pub lease: LeaseId,
    /// The sidecar.
    pub owner: OwnerId,
    /// The caller.
    pub app: AppName,
    /// The model, where known: its cooldowns are looked at, else those of requests without a known one.
    pub model: Option<ModelName>,
    /// In order.
    pub candidates: Arc<[Candidate]>,
    /// How long the lease lives unrenewed.
    pub ttl: Duration,
    /// A call that reaches the store after this is refused as [`Acquired::Late`] and changes nothing.
    pub deadline: StoreTime,
}

/// What became of an [`Acquire`].
#[derive(Debug, Clone)]
pub enum Acquired {
    /// A slot is held.
    Granted(Grant),
    /// No candidate could be lent.
    Refused(Refusal),
    /// The deadline had passed; nothing changed.
    Late,
}

/// A slot that is held.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Grant {
    /// The key whose slot it is.
    pub key: KeyId,
    /// The pool it was found in.
    pub pool: PoolName,
    /// Rises with each lease of the provider.
    pub token: FencingToken,
    /// When it ends unless renewed.
    pub expires_at: StoreTime,
    /// The one lease of a subject on probation.
    pub probe: bool,
    /// A success would clear something (a past cooldown's growth, a probation), so it is worth reporting.
    pub wants_success: bool,
    /// The store's life in which it was granted.
    pub epoch: Epoch,
    /// The key's group: the candidate's, or where that is `auto` the one that answers have named, and
    /// `auto` while none has.
    pub group: Option<GroupName>,
}

/// Why nothing was lent, candidate by candidate, and when it is worth trying again.
#[derive(Debug, Clone, Default)]
pub struct Refusal {
    /// One reason per candidate, in the order asked.
    pub reasons: Vec<(KeyId, Reason)>,
    /// The earliest time at which a cooldown of any candidate ends.
    pub cooldown_end: Option<StoreTime>,
    /// The earliest time at which a live lease of any full candidate ends unless renewed.
    pub lease_end: Option<StoreTime>,
    /// The end of the grace, where some candidate is full because of it alone.
    pub grace_end: Option<StoreTime>,
}

impl Refusal {
    /// Whether some candidate was only full: its slot may come back at any moment.
    pub fn any_full(&self) -> bool {
        self.reasons.iter().any(|(_, reason)| matches!(reason, Reason::Full))
    }

    /// Whether some candidate only cools: it comes back by itself.
    pub fn any_cooling(&self) -> bool {
        self.reasons.iter().any(|(_, reason)| matches!(reason, Reason::Cooling { .. }))
    }
}

/// Why one candidate was passed over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reason {
    /// Not in the pool it was asked for in.
    NotMember,
    /// The store has no settings of it: one `sync_keys` and one more try are due.
    NoSettings,
    /// Live leases at the cap (on probation: the probe is out; in a grace: not lent yet).
    Full,
    /// It, its group or this model cools until then; where several rests bear on it, the one that ends last
    /// counts.
    Cooling {
        /// Its end.
        until: StoreTime,
        /// What set it.
        class: Class,
    },
    /// It waits for a person or a check: `invalid`, `disabled` or `pending`.
    Unusable(KeyStatus),
}

/// Renews all of one sidecar's live leases of one provider.
#[derive(Debug, Clone)]
pub struct Renew {
    /// Whose keys.
    pub provider: ProviderName,
    /// The sidecar.
    pub owner: OwnerId,
    /// The life of the store in which the sidecar believes to be; `None` at first.
    pub epoch: Option<Epoch>,
    /// The leases.
    pub leases: Vec<Held>,
    /// The new life of each.
    pub ttl: Duration,
    /// A call that reaches the store after this changes nothing: each answer is [`RenewAnswer::Late`].
    pub deadline: StoreTime,
    /// Re-create leases that the store does not know, under the cap. Set only after a new epoch, a
    /// reconnect, READONLY or a failover was seen, inside the local deadline.
    pub reassert: bool,
}

/// A lease as its holder knows it.
#[derive(Debug, Clone)]
pub struct Held {
    /// Its id.
    pub lease: LeaseId,
    /// Its key.
    pub key: KeyId,
    /// Its pool.
    pub pool: PoolName,
    /// The secret it uses.
    pub fingerprint: Fingerprint,
    /// Its token.
    pub token: FencingToken,
    /// Its caller.
    pub app: AppName,
    /// Its key's group, as granted.
    pub group: Option<GroupName>,
}

/// What became of a [`Renew`]: one answer per lease, in order.
#[derive(Debug, Clone)]
pub struct Renewed {
    /// The store's life; another than asked for means that the next call must `reassert`.
    pub epoch: Epoch,
    /// In the order asked.
    pub answers: Vec<RenewAnswer>,
}

/// What became of one lease's renewal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RenewAnswer {
    /// Lives until then.
    Renewed(StoreTime),
    /// Not known, expired, revoked, another's, or no room under the cap: it must end.
    Lost,
    /// The call came too late and changed nothing.
    Late,
}

/// Gives back one slot. Lease, key and pool must match, else nothing changes.
#[derive(Debug, Clone)]
pub struct Release {
    /// Whose keys.
    pub provider: ProviderName,
    /// The lease.
    pub lease: LeaseId,
    /// The key it was granted for.
    pub key: KeyId,
    /// The pool it was granted in.
    pub pool: PoolName,
    /// Its key's group, as granted. Where it is another the slot is freed all the same, and the group counts
    /// it for as long as it would have lived.
    pub group: Option<GroupName>,
}

/// Applies an outcome. Longest evidence wins; nothing shortens a cooldown by accident; a success
/// clears only what was set before its own lease; evidence about another fingerprint touches nothing
/// of this one's.
#[derive(Debug, Clone)]
pub struct Report {
    /// Whose keys.
    pub provider: ProviderName,
    /// The key.
    pub key: KeyId,
    /// Its group, as granted. Where it is `auto`, the organisation that the outcome names becomes the key's
    /// group, for this secret, before anything else is applied.
    pub group: Option<GroupName>,
    /// The lease (ends a probation it is the probe of).
    pub lease: LeaseId,
    /// The lease's token: what an older lease reports never undoes what a newer one did.
    pub token: FencingToken,
    /// The secret that was used.
    pub fingerprint: Fingerprint,
    /// The model, where known.
    pub model: Option<ModelName>,
    /// What was said.
    pub outcome: Outcome,
}

/// What a [`Report`] changed.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Reported {
    /// The end of the cooldown that now covers the subject, where the report set or met one.
    pub cooling_until: Option<StoreTime>,
    /// The key's status afterwards, for this fingerprint.
    pub status: Option<KeyStatus>,
}

/// The settings of the keys one sidecar serves. Never removes another's.
#[derive(Debug, Clone)]
pub struct SyncKeys {
    /// Whose keys.
    pub provider: ProviderName,
    /// The sidecar, whose `seen_at_ms` is stamped.
    pub owner: OwnerId,
    /// Whose word counts where the store knows other settings of a key.
    pub mode: SyncMode,
    /// The keys.
    pub keys: Vec<KeySettings>,
}

/// Why settings are told, and so whose count.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SyncMode {
    /// A sidecar started or was reloaded: the latest to do so decides.
    Replace,
    /// Something was missing: settings that the store has stay, save that a key comes (back) into the pool
    /// it is asked for in. So a sidecar with an old file does not undo a new one by a mere repair.
    Repair,
}

/// What a [`SyncKeys`] found, to be logged.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Synced {
    /// The former settings of keys that the store knew with others.
    pub differing: Vec<KeySettings>,
    /// Pairs of keys that have the same secret: one of the asked, and another. Of several, not all are named.
    pub same_secret: Vec<(KeyId, KeyId)>,
}

/// A person's, or a check's, word on a key.
#[derive(Debug, Clone)]
pub enum StatusChange {
    /// Switch off, for every fingerprint.
    Disable,
    /// The same, so that its last leases may end; says so as the reason, until it is switched on.
    Drain,
    /// Switch on; also lifts `invalid`, keeps cooldowns.
    Enable,
    /// lessor's own check was refused once: the key rests until another decides, for a provider may refuse all
    /// keys for a moment.
    Doubted {
        /// With this secret.
        secret: Fingerprint,
        /// The answer's status.
        status: Option<u16>,
        /// The code or type in its body.
        code: Option<Arc<str>>,
    },
    /// lessor's own check was refused, and that decides.
    CheckedBad {
        /// With this secret.
        secret: Fingerprint,
        /// The answer's status.
        status: Option<u16>,
        /// The code or type in its body that decided.
        code: Option<Arc<str>>,
    },
    /// lessor's own check passed with this secret: lifts `invalid`, and rests set on doubt.
    CheckedGood(Fingerprint),
    /// Lift every cooldown of the key, and of its group, by hand, also those that leases from before would
    /// still set; keeps `invalid`.
    Clear,
}

/// [`KeyView::reason`] where lessor's own check set the status.
pub const BY_CHECK: &str = "check";

/// A key as the store sees it. Field names are those of the admin API.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct KeyView {
    /// Its id.
    pub id: KeyId,
    /// Whose key.
    pub provider: ProviderName,
    /// Its pool.
    pub pool: PoolName,
    /// Its group; where it is `auto` and answers have named one, that.
    pub group: Option<GroupName>,
    /// For the fingerprint the last `sync_keys` named; where that may be lent, and all of its group may not, the
    /// group's.
    pub status: KeyStatus,
    /// The class that set the status, or who.
    pub reason: Option<String>,
    /// When the key's own cooldown was set.
    #[serde(default)]
    pub cooldown_since_ms: Option<StoreTime>,
    /// When the key's own cooldown ends.
    pub cooldown_until_ms: Option<StoreTime>,
    /// What set the status, where an answer did.
    #[serde(default)]
    pub evidence: Option<EvidenceView>,
    /// Live leases.
    pub in_use: u32,
    /// Its cap.
    pub max_concurrent_uses: u32,
    /// The cap that the provider taught, while it is below the key's own.
    #[serde(default)]
    pub learned_concurrent_uses: Option<u32>,
    /// The cap that the provider taught for all keys of the group together.
    #[serde(default)]
    pub group_concurrent_uses: Option<u32>,
    /// When it was last lent, within a second.
    pub last_used_at_ms: Option<StoreTime>,
    /// Scoped cooldowns that bear on it.
    pub cooldowns: Vec<CooldownView>,
}

/// What an answer showed; never more of its body than its code.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct EvidenceView {
    /// Its status.
    pub status: Option<u16>,
    /// The code in its body.
    pub code: Option<String>,
}

/// One scoped cooldown.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct CooldownView {
    /// `key|model`, `group`, `group|model` or `provider|model`; the model is `-` where it was not known.
    pub subject: String,
    /// The class that set it.
    pub reason: String,
    /// When it was set.
    pub since_ms: StoreTime,
    /// When it ends.
    pub until_ms: StoreTime,
    /// The status that was evidence.
    pub status: Option<u16>,
    /// The body's code that was evidence.
    pub code: Option<String>,
}

/// A live lease as the store sees it. Field names are those of the admin API.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct LeaseView {
    /// Its id.
    pub id: LeaseId,
    /// Its key.
    pub key_id: KeyId,
    /// Whose key.
    pub provider: ProviderName,
    /// Its pool.
    pub pool: PoolName,
    /// Its caller.
    pub app: AppName,
    /// Its sidecar.
    pub owner: OwnerId,
    /// Its token.
    pub fencing_token: FencingToken,
    /// When it ends unless renewed; `None` where leases live as long as their holder (`memory:`).
    pub expires_at_ms: Option<StoreTime>,
    /// Marked to end: its next renewal answers LOST.
    pub revoked: bool,
}

/// The whole state of one provider, for people.
#[derive(Debug, Clone, Serialize, Deserialize, Default)]
pub struct Snapshot {
    /// Its keys, by id.
    pub keys: Vec<KeyView>,
    /// Its live leases, by id.
    pub leases: Vec<LeaseView>,
    /// When the grace ends, in one: until then nothing new is lent.
    #[serde(default)]
    pub grace_until_ms: Option<StoreTime>,
}

/// Something changed in the store that somebody may wait for.
#[derive(Debug, Clone)]
pub enum StoreEvent {
    /// A slot of this key came back by another's hand than this sidecar's.
    Freed(ProviderName, KeyId),
    /// Keys, status or cooldowns of this provider changed: waiters may try again.
    Changed(ProviderName),
    /// This lease was revoked: its holder cuts its stream now.
    Revoked(ProviderName, LeaseId),
    /// The store cannot be reached, as its keeper found without being asked.
    Away(StoreError),
    /// The store was away, or another server took its place: what it knows of live leases is in doubt, and
    /// they are to be reasserted now.
    Reconnected,
    /// The salt of fingerprints is another than before: they are to be made anew and told again.
    Resalted,
}

/// The lease store. Every operation is atomic, safe to repeat, and safe to drop.
pub trait Store: Send + Sync + 'static {
    /// Takes the first candidate with a free slot.
    fn acquire(&self, ask: Acquire) -> Answer<Acquired>;
    /// Extends live leases; see [`Renew::reassert`] for those the store does not know.
    fn renew(&self, ask: Renew) -> Answer<Renewed>;
    /// Gives slots back; how many were held by the leases named. Only deletes.
    fn release(&self, asks: Vec<Release>) -> Answer<usize>;
    /// Applies an outcome.
    fn report(&self, ask: Report) -> Answer<Reported>;
    /// Writes the settings of the keys this sidecar serves.
    fn sync_keys(&self, ask: SyncKeys) -> Answer<Synced>;
    /// Applies a person's or a check's word; `false` when the key is not known.
    fn set_status(&self, provider: ProviderName, key: KeyId, change: StatusChange) -> Answer<bool>;
    /// Marks a lease to end; `false` when it is not known.
    fn revoke(&self, provider: ProviderName, lease: LeaseId) -> Answer<bool>;
    /// All keys and live leases of a provider.
    fn snapshot(&self, provider: ProviderName) -> Answer<Snapshot>;
    /// Changes from now on; a slow reader misses some and must then look again.
    fn subscribe(&self) -> tokio::sync::broadcast::Receiver<StoreEvent>;
    /// The best estimate of the store's clock, without a round trip.
    fn now(&self) -> StoreTime;
    /// The salt of fingerprints. Who finds none creates it: from `known`, what the sidecar uses already, so
    /// that a store which lost its data gets back the salt its fingerprints were made with.
    fn salt(&self, known: Option<[u8; 32]>) -> Answer<[u8; 32]>;
    /// Finds and repairs what cannot be (a lease without a slot, a slot without a lease, keys that nobody
    /// has served for a day); how many differences. Bounded; never touches what a live sidecar serves.
    fn reconcile(&self, provider: ProviderName) -> Answer<u64>;
    /// Whether an unrenewed lease expires. `memory:` says no: there a lease lives as long as its guard.
    fn leases_expire(&self) -> bool;
    /// Whether the store answers at all, within a short time.
    fn ping(&self) -> Answer<()>;
    /// What it has warned of since it was opened, and a person should mend; each says how.
    fn concerns(&self) -> Vec<String> {
        Vec::new()
    }
    /// The word for `store.url`'s kind in logs: `memory`, `sqlite`, `redis`.
    fn kind(&self) -> &'static str;
}

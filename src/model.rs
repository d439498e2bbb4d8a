//! The words of the house as plain data: names, keys, secrets, outcomes. No I/O, and nothing of ours
//! is imported here, so that rooms which never import each other can still trade these values.

use std::borrow::Borrow;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::fmt;
use std::sync::{Arc, LazyLock};
use std::time::{Duration, Instant};

use secrecy::{ExposeSecret, SecretString};
use serde::{Deserialize, Serialize, Serializer};
use zeroize::Zeroizing;

/// A map whose keys people or lessor made: looked up several times a request, so by a hash that is quick and
/// seeded, and need not withstand whoever chooses keys to make it slow.
pub type Map<K, V> = HashMap<K, V, foldhash::fast::RandomState>;

/// The same of keys alone.
pub type Set<K> = HashSet<K, foldhash::fast::RandomState>;

/// Why a name was refused; the text says which rule it broke.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is no name: 1 to 64 of a-z 0-9 . _ - are allowed")]
pub struct BadName(pub String);

/// Whether `text` is 1 to 64 of `a-z 0-9 . _ -`.
fn is_name(text: &str) -> bool {
    (1..=64).contains(&text.len())
        && text.bytes().all(|b| matches!(b, b'a'..=b'z' | b'0'..=b'9' | b'.' | b'_' | b'-'))
}

macro_rules! name {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub struct $name(Arc<str>);

        impl $name {
            /// Checks `text` by the rule for names.
            pub fn parse(text: &str) -> Result<Self, BadName> {
                if is_name(text) { Ok(Self(text.into())) } else { Err(BadName(text.into())) }
            }

            /// The name as text.
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Debug::fmt(&self.0, f)
            }
        }

        impl Borrow<str> for $name {
            fn borrow(&self) -> &str {
                &self.0
            }
        }

        impl std::str::FromStr for $name {
            type Err = BadName;
            fn from_str(text: &str) -> Result<Self, BadName> {
                Self::parse(text)
            }
        }

        impl Serialize for $name {
            fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
                to.serialize_str(&self.0)
            }
        }

        impl<'de> Deserialize<'de> for $name {
            fn deserialize<D: serde::Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
                Self::parse(&String::deserialize(from)?).map_err(serde::de::Error::custom)
            }
        }
    };
}

name!(/// An upstream API, for example `openai`.
    ProviderName);
name!(/// One credential of a provider; unique in its provider.
    KeyId);
name!(/// A named set of a provider's keys.
    PoolName);
name!(/// Keys that share one fate at the provider.
    GroupName);
name!(/// A caller: known by its token, or `anonymous`.
    AppName);

impl AppName {
    /// Who calls when no apps are configured.
    pub fn anonymous() -> Self {
        static ANONYMOUS: LazyLock<AppName> = LazyLock::new(|| AppName("anonymous".into()));
        ANONYMOUS.clone()
    }
}

impl GroupName {
    /// The group of a key whose answers say which it is: `group = "auto"`.
    pub fn auto() -> Self {
        static AUTO: LazyLock<GroupName> = LazyLock::new(|| GroupName("auto".into()));
        AUTO.clone()
    }

    /// Whether answers say which group it is: `auto`, or the name that one of them gave it.
    pub fn is_auto(&self) -> bool {
        self.0.strip_prefix("auto").is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
    }

    /// The group of all keys whose answers name this organisation: `auto.<what can be read of it>-<hash>`.
    /// The same in every sidecar, and no name that a person may give.
    pub fn of_organization(organization: &str) -> Self {
        use sha2::Digest as _;
        let hash = sha2::Sha256::digest(organization.as_bytes());
        let readable: String = organization
            .chars()
            .map(|c| if c.is_ascii_alphanumeric() { c.to_ascii_lowercase() } else { '-' })
            .take(40)
            .collect();
        let hash = u32::from_be_bytes([hash[0], hash[1], hash[2], hash[3]]);
        Self(format!("auto.{readable}-{hash:08x}").into())
    }
}

impl PoolName {
    /// The pool of a key that names none.
    pub fn default_pool() -> Self {
        static DEFAULT: LazyLock<PoolName> = LazyLock::new(|| PoolName("default".into()));
        DEFAULT.clone()
    }
}

/// A model's name as a request gives it: any text, at most [`ModelName::MAX`] bytes.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct ModelName(Arc<str>);

impl ModelName {
    /// Longest model name that is told apart; longer ones count as unreadable.
    pub const MAX: usize = 256;

    /// Stands for requests of which no model is known, in what is written about cooldowns.
    pub const NONE: &str = "-";

    /// `None` when `text` is empty, too long to be a model's name, or [`ModelName::NONE`].
    pub fn new(text: &str) -> Option<Self> {
        ((1..=Self::MAX).contains(&text.len()) && text != Self::NONE).then(|| Self(text.into()))
    }

    /// The name as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for ModelName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Secrets of fewer bytes are too likely to stand in a body by chance to be masked there.
pub const SHORT_SECRET: usize = 16;

/// A key's raw value. It has no `Display` and no `Serialize`, prints as `Secret(..)`, and its memory
/// is zeroed when the last clone goes.
#[derive(Clone)]
pub struct Secret(Arc<Raw>);

struct Raw {
    text: SecretString,
    /// By name, where it has any.
    parts: BTreeMap<String, SecretString>,
}

impl Secret {
    /// Takes ownership of the text.
    pub fn new(text: String) -> Self {
        Self(Arc::new(Raw { text: SecretString::from(text), parts: BTreeMap::new() }))
    }

    /// One of several named values. As a whole it is all of them, so that it is the same secret however they
    /// were laid out where they came from.
    pub fn of_parts(parts: BTreeMap<String, Zeroizing<String>>) -> Self {
        let length = parts.iter().map(|(name, value)| name.len() + value.len() + 2).sum();
        let mut text = String::with_capacity(length);
        for (name, value) in &parts {
            // No value has a line end, so no two sets of parts make one text.
            for piece in [name, "=", value, "\n"] {
                text.push_str(piece);
            }
        }
        let parts = parts.into_iter().map(|(name, mut value)| (name, std::mem::take(&mut *value).into()));
        Self(Arc::new(Raw { parts: parts.collect(), text: text.into() }))
    }

    /// The raw value; only injection, masking, fingerprints and token comparison may ask for it.
    pub fn expose(&self) -> &str {
        self.0.text.expose_secret()
    }

    /// The raw value of one of its parts.
    pub fn expose_part(&self, name: &str) -> Option<&str> {
        self.0.parts.get(name).map(ExposeSecret::expose_secret)
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(..)")
    }
}

/// HMAC-SHA-256 of a secret under the store's salt: tells two secrets of one key apart, shows neither.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Fingerprint(pub [u8; 32]);

impl Fingerprint {
    /// The fingerprint of `secret` under the store's `salt`.
    pub fn of(secret: &Secret, salt: &[u8; 32]) -> Self {
        use hmac::Mac as _;
        // HMAC takes a key of any length (RFC 2104), so this cannot fail.
        #[allow(clippy::expect_used)]
        let mut mac = hmac::Hmac::<sha2::Sha256>::new_from_slice(salt).expect("HMAC takes any key");
        mac.update(secret.expose().as_bytes());
        Self(mac.finalize().into_bytes().into())
    }
}

impl fmt::Debug for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Fingerprint({:02x}{:02x}..)", self.0[0], self.0[1])
    }
}

/// A lease's id, chosen by the sidecar (UUIDv7), so that a call whose reply was lost can be settled.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct LeaseId(#[serde(with = "uuid_text")] pub uuid::Uuid);

mod uuid_text {
    use serde::{Deserialize as _, Deserializer, Serializer};
    pub(super) fn serialize<S: Serializer>(id: &uuid::Uuid, to: S) -> Result<S::Ok, S::Error> {
        to.collect_str(id)
    }
    pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<uuid::Uuid, D::Error> {
        String::deserialize(from)?.parse().map_err(serde::de::Error::custom)
    }
}

impl LeaseId {
    /// A fresh id, ordered by time.
    pub fn fresh() -> Self {
        Self(uuid::Uuid::now_v7())
    }

    /// The same, at this time in ms since the Unix epoch: for who knows it without reading a clock.
    pub fn fresh_at(unix_ms: u64) -> Self {
        Self(uuid::Builder::from_unix_timestamp_millis(unix_ms, &rand::random()).into_uuid())
    }

    /// Bytes of its text.
    pub const LENGTH: usize = uuid::fmt::Hyphenated::LENGTH;

    /// As people see it, without an allocation.
    pub fn text<'b>(&self, buffer: &'b mut [u8; Self::LENGTH]) -> &'b str {
        self.0.as_hyphenated().encode_lower(buffer)
    }
}

impl fmt::Display for LeaseId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.0, f)
    }
}

/// Who holds leases: random per process.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct OwnerId(pub Arc<str>);

impl OwnerId {
    /// A random owner for this process.
    pub fn fresh() -> Self {
        Self(uuid::Uuid::now_v7().simple().to_string().into())
    }
}

/// Rises with each lease of a provider, also across a loss of the store's data.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, Default)]
pub struct FencingToken(pub u64);

/// A key's status. Being in use is never a status: only live leases count use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum KeyStatus {
    /// May be lent.
    Available,
    /// The provider's rate limit was hit; heals by itself.
    RateLimited,
    /// Rests for another reason; heals by itself.
    Cooldown,
    /// Out of quota until a time; then on probation.
    Exhausted,
    /// One lease at a time until a success.
    Probation,
    /// The provider said the key is bad; waits for a check or a person.
    Invalid,
    /// Switched off by a person.
    Disabled,
    /// Known, but not yet usable: its secret has not been had.
    Pending,
}

impl KeyStatus {
    /// Every status, for metrics.
    pub const ALL: [Self; 8] = [
        Self::Available,
        Self::RateLimited,
        Self::Cooldown,
        Self::Exhausted,
        Self::Probation,
        Self::Invalid,
        Self::Disabled,
        Self::Pending,
    ];

    /// The word users see.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Available => "available",
            Self::RateLimited => "rate_limited",
            Self::Cooldown => "cooldown",
            Self::Exhausted => "exhausted",
            Self::Probation => "probation",
            Self::Invalid => "invalid",
            Self::Disabled => "disabled",
            Self::Pending => "pending",
        }
    }
}

/// What an answer says about the key (design, section 7).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Class {
    /// A rate limit.
    Rate,
    /// Out of money or quota.
    Quota,
    /// Too many requests at once on this key.
    Concurrency,
    /// The key is refused. [`Outcome::proven`] says whether the answer names the key itself.
    Invalid,
    /// The key may not use this model.
    Access,
    /// The key may not be used from here.
    Region,
    /// The provider is busy; the key is not to blame.
    Overloaded,
    /// The caller's own mistake.
    Caller,
    /// Served.
    Success,
    /// The client went away.
    Cancelled,
    /// No usable answer came.
    Network,
}

impl Class {
    /// The word users see.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Rate => "rate",
            Self::Quota => "quota",
            Self::Concurrency => "concurrency",
            Self::Invalid => "invalid",
            Self::Access => "access",
            Self::Region => "region",
            Self::Overloaded => "overloaded",
            Self::Caller => "caller",
            Self::Success => "success",
            Self::Cancelled => "cancelled",
            Self::Network => "network",
        }
    }

    /// The classes that make something rest.
    pub const RESTS: [Self; 7] = [
        Self::Rate,
        Self::Quota,
        Self::Concurrency,
        Self::Invalid,
        Self::Access,
        Self::Region,
        Self::Overloaded,
    ];

    /// Whether another key may serve what this one was refused.
    pub fn blames_key(self) -> bool {
        matches!(
            self,
            Self::Rate | Self::Quota | Self::Concurrency | Self::Invalid | Self::Access | Self::Region
        )
    }
}

/// Who shares a limit. `Group*` falls back to the key where the key has no group, `*Model` to the
/// unscoped subject where the request names no model.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Scope {
    /// The key alone.
    Key,
    /// The key for this model.
    KeyModel,
    /// All keys of the group.
    Group,
    /// All keys of the group for this model.
    GroupModel,
    /// The provider for this model.
    ProviderModel,
}

impl Scope {
    /// The word users see.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Key => "key",
            Self::KeyModel => "key_model",
            Self::Group => "group",
            Self::GroupModel => "group_model",
            Self::ProviderModel => "provider_model",
        }
    }

    /// Whether the model must be known to apply it.
    pub fn names_model(self) -> bool {
        matches!(self, Self::KeyModel | Self::GroupModel | Self::ProviderModel)
    }
}

/// What one answer said about its key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Outcome {
    /// The class that decides the effect.
    pub class: Class,
    /// Who shares the limit.
    pub scope: Scope,
    /// The wait the provider named, already bounded for its class; `None` when it named none. With a
    /// success: until then nothing remains (see [`Outcome::ahead`]).
    pub wait: Option<Duration>,
    /// For [`Class::Invalid`]: the answer names the *key* as bad, so it may not be used again until
    /// checked. Otherwise the key only rests and lessor's own check decides. Always true elsewhere.
    pub proven: bool,
    /// The answer's status; `None` when none came.
    pub status: Option<u16>,
    /// The code or type in its body that decided, at most 64 bytes; never other body text.
    pub code: Option<Arc<str>>,
    /// The key is not to blame, yet another one may serve the request.
    pub another_key: bool,
    /// For [`Class::Concurrency`]: how many uses at once the answer says are allowed.
    pub max_uses: Option<u32>,
    /// The group of the organisation that the answer names; read only for a key whose group is `auto`.
    pub organization: Option<GroupName>,
}

impl Outcome {
    /// An outcome of `class` that carries no wait and blames at most the key.
    pub fn plain(class: Class, status: Option<u16>) -> Self {
        Self {
            class,
            scope: Scope::Key,
            wait: None,
            proven: true,
            status,
            code: None,
            max_uses: None,
            organization: None,
            another_key: false,
        }
    }

    /// The refusal that a success announces: nothing remains until a time, so the next request would only
    /// be sent to hear that.
    pub fn ahead(&self) -> Option<Self> {
        let announced = self.class == Class::Success && self.wait.is_some();
        announced.then(|| Self { class: Class::Rate, ..self.clone() })
    }

    /// Who is resting by it: for some classes the scope that was read is wider or narrower than what the
    /// answer proves.
    pub fn blamed_scope(&self) -> Scope {
        match (self.class, self.proven) {
            (Class::Invalid, true) => Scope::Key,
            (Class::Invalid, false) | (Class::Access, _) => Scope::KeyModel,
            // From where the key may be used is a question of no model, unless its rule says so.
            (Class::Region, _) if self.scope != Scope::KeyModel => Scope::Key,
            (Class::Overloaded, _) => Scope::ProviderModel,
            _ => self.scope,
        }
    }

    /// Whether it rests nothing but the secret that was used; `group` is the key's, as its lease was told.
    pub fn rests_secret_alone(&self, group: Option<&GroupName>) -> bool {
        let of_group = match group {
            Some(group) if group.is_auto() => self.organization.is_some() || *group != GroupName::auto(),
            group => group.is_some(),
        };
        self.class != Class::Concurrency
            && match self.blamed_scope() {
                Scope::Key | Scope::KeyModel => true,
                Scope::Group | Scope::GroupModel => !of_group,
                Scope::ProviderModel => false,
            }
    }

    /// Whether the answer shows that the key is taken. One that only points elsewhere, or says that nothing
    /// changed, may come from in front of all that counts uses.
    pub fn shows_use(&self) -> bool {
        self.class == Class::Success && !self.status.is_some_and(|status| (300..400).contains(&status))
    }

    /// Whether it has an effect on what is lent; `with_model`: the request's model is known. That a key may not
    /// use a model says nothing where it is not known which, and a mere doubt is about the model alone.
    pub fn rests_something(&self, with_model: bool) -> bool {
        let about_the_model = self.class == Class::Access || self.is_doubt();
        Class::RESTS.contains(&self.class) && (with_model || !about_the_model)
    }

    /// Whether it only casts doubt on the key: lessor's own check decides.
    pub fn is_doubt(&self) -> bool {
        self.class == Class::Invalid && !self.proven
    }

    /// Whether another key may serve what this one did not.
    pub fn wants_another_key(&self) -> bool {
        self.class.blames_key() || self.another_key
    }

    /// Where its request goes on.
    pub fn onward(&self) -> Onward {
        let rests = self.class.blames_key() && self.class != Class::Concurrency;
        match (self.wants_another_key(), self.blamed_scope()) {
            (true, Scope::ProviderModel) if rests => Onward::AfterTheRest,
            (true, Scope::Group | Scope::GroupModel) => Onward::AnotherGroup,
            (true, _) => Onward::AnotherKey,
            (false, _) if self.class == Class::Overloaded => Onward::Again,
            (false, _) => Onward::Nowhere,
        }
    }
}

/// Where a request goes on that was not served.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Onward {
    /// To another key.
    AnotherKey,
    /// To a key that is not of the same group.
    AnotherGroup,
    /// To another key, but all keys rest: where the rest ends within the wait.
    AfterTheRest,
    /// To any key, after the provider's rest, where sending it twice does no harm.
    Again,
    /// Nowhere: the answer is the client's.
    Nowhere,
}

/// A key that fits a request, in the order in which the store shall try them.
#[derive(Debug, Clone)]
pub struct Candidate {
    /// The key.
    pub key: KeyId,
    /// The pool it is asked for in; a key that is no member is passed over.
    pub pool: PoolName,
    /// Its group, whose cooldowns count too. Where it is `auto` ([`GroupName::is_auto`]) the store's word
    /// counts: this is only what the caller knew of it.
    pub group: Option<GroupName>,
    /// The fingerprint of the secret this sidecar would use.
    pub fingerprint: Fingerprint,
}

/// Which candidates are wanted of those that fit a request.
#[derive(Debug, Clone, Copy)]
pub struct Wanted<'a> {
    /// When it is asked.
    pub at: Instant,
    /// At most so many, the best.
    pub most: usize,
    /// Keys that are left to others.
    pub barred: &'a [KeyId],
    /// Keys with which it was tried already, by the secret that was used then: a key that was given another
    /// one meanwhile is as another key.
    pub passed_over: &'a [(KeyId, Fingerprint)],
    /// Candidates that were asked for already, and were refused.
    pub asked: &'a [Candidate],
}

impl Wanted<'_> {
    /// The best `most` of all.
    pub fn best(most: usize) -> Self {
        Self { at: Instant::now(), most, barred: &[], passed_over: &[], asked: &[] }
    }

    /// Whether it opens a round of asking, and so counts as a turn.
    pub fn is_first(&self) -> bool {
        self.asked.is_empty()
    }

    /// Whether it may leave some key out: told once, where there are many keys to ask it of.
    pub fn is_choosy(&self) -> bool {
        !(self.barred.is_empty() && self.passed_over.is_empty() && self.asked.is_empty())
    }

    /// Whether a key is not wanted.
    pub fn leaves_out(&self, key: &KeyId, fingerprint: &Fingerprint) -> bool {
        self.barred.contains(key)
            || self.passed_over.iter().any(|(passed, old)| passed == key && old == fingerprint)
            || self.asked.iter().any(|asked| asked.key == *key && asked.fingerprint == *fingerprint)
    }
}

/// One key's settings.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KeySettings {
    /// Its id.
    pub key: KeyId,
    /// Its pool.
    pub pool: PoolName,
    /// Its group.
    pub group: Option<GroupName>,
    /// Its cap; 0 counts as 1.
    pub max_concurrent_uses: u32,
    /// The secret this sidecar has; `None` while it has none (`pending`).
    pub fingerprint: Option<Fingerprint>,
}

/// How a request came in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Mode {
    /// Origin-form, `/{provider}/…`.
    BaseUrl,
    /// Absolute-form.
    Forward,
    /// CONNECT.
    Connect,
}

impl Mode {
    /// The word users see in metrics.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::BaseUrl => "base_url",
            Self::Forward => "forward",
            Self::Connect => "connect",
        }
    }
}

/// What a CONNECT named whose tunnel is opened here: a provider's host, or the sidecar itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Site {
    /// Lower case, no brackets.
    pub host: String,
    /// Its port.
    pub port: u16,
    /// Further names of the same provider that TLS inside may ask for: where CONNECT named an address.
    pub names: Vec<String>,
    /// Who asked.
    pub app: AppName,
    /// It is the sidecar itself: what is inside is in base-URL mode, and in the clear.
    pub is_own: bool,
}

/// The inside of such a tunnel, as every request in it finds it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Inside {
    /// What CONNECT named.
    pub site: Arc<Site>,
    /// The host that every request must name: the site's, or the one of its names that TLS asked for.
    pub host: String,
    /// TLS, else cleartext.
    pub tls: bool,
    /// The name that TLS asked for, where it is another's.
    pub foreign_name: Option<String>,
}

/// The errors that lessor itself answers with (design, section 8).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Code {
    /// 400: malformed target, conflicting authorities or lengths.
    BadRequest,
    /// 408: the client was too slow.
    RequestTimeout,
    /// 431: above `limits.max_header_bytes` or `limits.max_headers`.
    HeaderTooLarge,
    /// 407 in proxy modes, else 403: no app, or a wrong token.
    AppUnauthenticated,
    /// 403: the app may not use this.
    AppForbidden,
    /// 403: the host may not be reached, or not with a key.
    DestinationDenied,
    /// 403: a foreign web page, or a foreign `Host`.
    OriginDenied,
    /// 403: no leased key is sent to this path.
    PathDenied,
    /// 405: TRACE, nested CONNECT.
    MethodDenied,
    /// 501: an upgrade, or a transfer coding, that is not supported.
    UpgradeUnsupported,
    /// 404: no such provider or pool.
    UnknownProvider,
    /// 404: no key serves this model, or the provider lets none do this.
    NoCandidate,
    /// 409: the request contradicts a policy.
    PolicyConflict,
    /// 421: a request inside a CONNECT names another host.
    Misdirected,
    /// 429: every fitting key full or cooling, or the queue full.
    PoolExhausted,
    /// 502: could not connect, or broke before an answer.
    UpstreamUnreachable,
    /// 504: no answer in time.
    UpstreamTimeout,
    /// 503: the store failed.
    StoreUnavailable,
    /// 503: every fitting key waits for a person or a check.
    KeyUnavailable,
    /// 503: draining.
    ShuttingDown,
}

impl Code {
    /// The word in `X-Lessor-Error` and the body.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::BadRequest => "bad_request",
            Self::RequestTimeout => "request_timeout",
            Self::HeaderTooLarge => "header_too_large",
            Self::AppUnauthenticated => "app_unauthenticated",
            Self::AppForbidden => "app_forbidden",
            Self::DestinationDenied => "destination_denied",
            Self::OriginDenied => "origin_denied",
            Self::PathDenied => "path_denied",
            Self::MethodDenied => "method_denied",
            Self::UpgradeUnsupported => "upgrade_unsupported",
            Self::UnknownProvider => "unknown_provider",
            Self::NoCandidate => "no_candidate",
            Self::PolicyConflict => "policy_conflict",
            Self::Misdirected => "misdirected",
            Self::PoolExhausted => "pool_exhausted",
            Self::UpstreamUnreachable => "upstream_unreachable",
            Self::UpstreamTimeout => "upstream_timeout",
            Self::StoreUnavailable => "store_unavailable",
            Self::KeyUnavailable => "key_unavailable",
            Self::ShuttingDown => "shutting_down",
        }
    }
}

/// Why a request gets lessor's own answer, in words for its reader.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fault {
    /// Which error.
    pub code: Code,
    /// What happened and what to do next; never a secret, a query or a body.
    pub message: String,
    /// When to try again, where that helps.
    pub retry_after: Option<Duration>,
    /// For [`Code::PoolExhausted`]: no use is in the way, the keys rest for what the provider said of them.
    pub all_rest: bool,
}

impl Fault {
    /// An error that trying again does not help.
    pub fn new(code: Code, message: impl Into<String>) -> Self {
        Self { code, message: message.into(), retry_after: None, all_rest: false }
    }

    /// The same, worth trying again after `wait`.
    #[must_use]
    pub fn retry_after(mut self, wait: Duration) -> Self {
        self.retry_after = Some(wait);
        self
    }
}

//! One request a provider, or a key, through the sidecar's own listener: what a client would get. That the
//! provider takes it proves the injection; and no byte that comes back may be the key.

use std::fmt::Write as _;
use std::time::{Duration, Instant};

use bytes::Bytes;
use futures_util::StreamExt as _;
use http::{HeaderMap, HeaderValue, Request, StatusCode};
use http_body_util::{BodyExt as _, Empty, Limited};
use hyper::ext::ReasonPhrase;
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpStream, UnixStream};
use tokio::time::timeout;

use super::{Check, Tools, line};
use crate::config::{Address, AppConfig, Config, KeyConfig, Provider, Scrub};
use crate::control::environment::reachable;
use crate::model::{PoolName, Secret};

/// The bound of one request.
const REQUEST: Duration = Duration::from_secs(15);
/// The bound of all of a provider's.
const ALL: Duration = Duration::from_secs(25);
/// Requests at once, a provider.
const AT_ONCE: usize = 4;
/// How long one may wait for a free slot.
const WAIT: &str = "5s";
/// Bytes of an answer that are searched.
const LARGEST: usize = 4 << 20;

/// Asks with one key of the provider, or with each.
pub(super) async fn examine(
    config: &Config,
    provider: &Provider,
    proxy: &Address,
    all_keys: bool,
    tools: Tools,
) -> Vec<Check> {
    let mut keys: Vec<_> = config.keys.iter().filter(|key| key.provider == provider.name).collect();
    if provider.check.is_none() {
        let name = &provider.name;
        let advice = format!("no request is known by which a key can be tried; set [providers.{name}] check");
        return vec![Check::skip(format!("canary {name}"), advice)];
    }
    if !all_keys {
        keys.truncate(1);
    }
    // Collected, for what a stream is made of is held while it waits.
    let asked: Vec<_> = keys
        .iter()
        .map(|key| {
            let canary = Canary { config, provider, key, pinned: all_keys, tools };
            async move { canary.ask(proxy).await }
        })
        .collect();
    let asked = futures_util::stream::iter(asked).buffered(AT_ONCE).take_until(tokio::time::sleep(ALL));
    let mut checks: Vec<_> = asked.collect().await;
    if checks.len() < keys.len() {
        let left = format!("{} keys were not asked within {ALL:?}", keys.len() - checks.len());
        let advice = format!("ask for one by itself: lessor keys check {}/ID", provider.name);
        checks.push(Check::fail(format!("canary {}", provider.name), left, advice));
    }
    checks
}

/// One request.
struct Canary<'c> {
    config: &'c Config,
    provider: &'c Provider,
    key: &'c KeyConfig,
    /// With this very key, else with any of its pool.
    pinned: bool,
    tools: Tools,
}

/// What came back.
struct Came {
    status: StatusCode,
    headers: HeaderMap,
    body: Bytes,
    /// All of it that a client sees.
    head: Vec<u8>,
    took: Duration,
}

impl Canary<'_> {
    fn name(&self) -> String {
        let Self { provider, key, .. } = self;
        if self.pinned {
            format!("canary {}/{}", provider.name, key.id)
        } else {
            format!("canary {}", provider.name)
        }
    }

    async fn ask(&self, proxy: &Address) -> Check {
        let token = match self.token() {
            Ok(token) => token,
            Err(check) => return check,
        };
        let request = match self.request(token) {
            Ok(request) => request,
            Err(why) => return Check::fail(self.name(), why, "correct the provider's check"),
        };
        match timeout(REQUEST, sent(proxy, request)).await {
            Ok(Ok(came)) => self.judge(&came),
            Ok(Err(why)) => Check::fail(
                self.name(),
                format!("no whole answer through {proxy}: {}", line(&why.to_string())),
                "see the sidecar's log, which has one line a request",
            ),
            Err(_) => Check::fail(
                self.name(),
                format!("no whole answer through {proxy} within {REQUEST:?}"),
                "see the checks of dns and tls, and the sidecar's log",
            ),
        }
    }

    /// The token to call with, where there are apps.
    fn token(&self) -> Result<Option<&Secret>, Check> {
        if self.config.apps.is_empty() {
            return Ok(None);
        }
        let (provider, pool) = (&self.key.provider, &self.key.pool);
        let may = |app: &&AppConfig| {
            (app.providers.is_empty() || app.providers.contains(provider))
                && (app.pools.contains(pool) || app.pools.is_empty() && *pool == PoolName::default_pool())
        };
        let mut apps = self.config.apps.iter().filter(may).peekable();
        if apps.peek().is_none() {
            let why = format!("no app may use pool {pool} of {provider}, so nobody can ask for this key");
            return Err(Check::warn(
                self.name(),
                why,
                "name the pool in [apps.NAME] pools, or remove the key",
            ));
        }
        let token = apps.find_map(|app| app.token.as_ref());
        let by_user =
            || Check::skip(self.name(), "not asked: its apps have no token, and are known by their user");
        token.map(Some).ok_or_else(by_user)
    }

    fn request(&self, token: Option<&Secret>) -> Result<Request<Empty<Bytes>>, String> {
        let check = self.provider.check.as_ref().ok_or("no check is known")?;
        let mut request = Request::builder()
            .method(check.method.clone())
            .uri(format!("/{}{}", self.provider.name, check.path))
            .header("host", "localhost")
            .header("te", "trailers")
            .header("user-agent", concat!("lessor-doctor/", env!("CARGO_PKG_VERSION")))
            .header("x-lessor-max-wait", WAIT)
            .header("x-lessor-pool", self.key.pool.as_str());
        for (name, value) in &check.headers {
            request = request.header(name, value);
        }
        if self.pinned {
            request = request.header("x-lessor-key", self.key.id.as_str());
        }
        if let Some(token) = token {
            let mut token = HeaderValue::from_str(token.expose()).map_err(|error| error.to_string())?;
            token.set_sensitive(true);
            request = request.header("x-lessor-app-token", token);
        }
        request.body(Empty::new()).map_err(|error| error.to_string())
    }

    fn judge(&self, came: &Came) -> Check {
        if let Some(leak) = self.leak(came) {
            return leak;
        }
        let text = |name: &str| came.headers.get(name).and_then(|value| value.to_str().ok());
        if let Some(code) = text("x-lessor-error") {
            return self.refused_here(code, came);
        }
        let by = text("x-lessor-key").map_or("one of its keys".into(), |key| format!("key {key}"));
        let attempts = text("x-lessor-attempts").and_then(|attempts| attempts.parse().ok()).unwrap_or(1);
        let key = text("x-lessor-key").unwrap_or("ID");
        let Self { provider, .. } = self;
        let (name, status) = (&provider.name, came.status.as_u16());
        let found = format!("{status} by {by} in {} ms", came.took.as_millis());
        match status {
            200..300 if attempts > 1 => Check::warn(
                self.name(),
                format!("{found}, after {attempts} attempts; the key did not come back"),
                "another key was refused before: `lessor keys list` shows which, and why",
            ),
            200..300 if came.headers.contains_key("content-encoding") => Check::warn(
                self.name(),
                format!("{found}; the answer is packed, and a key in it could not be seen"),
                "set [scrub] compressed = \"decode\"",
            ),
            200..300 => Check::ok(self.name(), format!("{found}; the key did not come back")),
            401 | 403 => Check::fail(
                self.name(),
                format!("{name} refuses {by} ({status})"),
                format!(
                    "see whether the key is right and may be used for this, then `lessor keys check {name}/{key}`"
                ),
            ),
            429 => Check::warn(
                self.name(),
                format!("{name} limits {by} (429); it rests"),
                "`lessor status` shows until when; ask again then, for no answer proved that the key is good",
            ),
            500.. => Check::warn(
                self.name(),
                format!("{name} was reached and failed ({status})"),
                "ask again later: that is the provider's own trouble",
            ),
            _ => Check::warn(
                self.name(),
                format!("{name} was reached and answered {status} to its check request"),
                format!("see whether [providers.{name}] base_url and check are right"),
            ),
        }
    }

    /// What lessor said itself.
    fn refused_here(&self, code: &str, came: &Came) -> Check {
        let message = message(&came.body);
        let found = format!("lessor answered {}, {code}: {message}", came.status.as_u16());
        let name = &self.provider.name;
        match code {
            "pool_exhausted" => Check::warn(
                self.name(),
                found,
                "every fitting key is full or rests: `lessor status` shows until when; add keys, or raise caps",
            ),
            "no_candidate" => Check::fail(
                self.name(),
                found,
                format!(
                    "give the keys access, or name in [providers.{name}] check a request that they may make"
                ),
            ),
            "key_unavailable" => Check::fail(
                self.name(),
                found,
                format!(
                    "`lessor keys list` says why; `lessor keys enable {name}/ID`, or `check` it, lifts that"
                ),
            ),
            "store_unavailable" => Check::fail(self.name(), found, "see the check of the store"),
            "upstream_unreachable" | "upstream_timeout" => {
                Check::fail(self.name(), found, "see the checks of dns and tls")
            }
            _ => Check::fail(self.name(), found, "see the sidecar's log, which has one line a request"),
        }
    }

    /// The answer's bytes that are some key.
    fn leak(&self, came: &Came) -> Option<Check> {
        let whole = [&came.head[..], b"\n", &came.body].concat();
        let finds = |secret: &Secret, text: &[u8]| self.tools.finds(secret, text);
        let hidden = |key: &'_ &KeyConfig| key.hidden.iter().any(|secret| finds(secret, &whole));
        let key = self.config.keys.iter().find(hidden)?;
        let secret = key.hidden.iter().find(|secret| finds(secret, &whole))?;
        let place = if finds(secret, &came.head) { "head or trailers" } else { "body" };
        let name = &self.provider.name;
        let advice = match self.provider.scrub {
            Scrub::Off => format!("set [providers.{name}] scrub = \"on\", which masks it"),
            Scrub::Headers if place == "body" => {
                format!("set [providers.{name}] scrub = \"on\", which masks it there, too")
            }
            _ if secret.expose().len() < crate::model::SHORT_SECRET => {
                "it is too short to be masked in bodies: use a longer key".into()
            }
            _ => "report this as a bug of lessor, and let no client near this provider until then".into(),
        };
        let found = format!("the raw key {}/{} came back in the answer's {place}", key.provider, key.id);
        Some(Check::fail(self.name(), found, advice))
    }
}

type AnyError = Box<dyn std::error::Error + Send + Sync>;

async fn sent(proxy: &Address, request: Request<Empty<Bytes>>) -> Result<Came, AnyError> {
    match proxy {
        Address::Tcp(at) => exchange(TcpStream::connect(reachable(*at)).await?, request).await,
        Address::Unix(path, _) => exchange(UnixStream::connect(path).await?, request).await,
    }
}

async fn exchange(
    stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    request: Request<Empty<Bytes>>,
) -> Result<Came, AnyError> {
    let begun = Instant::now();
    let (mut send, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await?;
    // Ends with `send`, or with the other side; its failure shows in the answer.
    tokio::spawn(connection);
    let (parts, body) = send.send_request(request).await?.into_parts();
    let took = begun.elapsed();
    let collected = Limited::new(body, LARGEST).collect().await?;
    let mut head = Vec::new();
    if let Some(phrase) = parts.extensions.get::<ReasonPhrase>() {
        head.extend_from_slice(phrase.as_bytes());
    }
    for (name, value) in parts.headers.iter().chain(collected.trailers().into_iter().flatten()) {
        head.extend_from_slice(format!("\n{name}: ").as_bytes());
        head.extend_from_slice(value.as_bytes());
    }
    Ok(Came { status: parts.status, headers: parts.headers, body: collected.to_bytes(), head, took })
}

/// The message of an error of lessor's own, in any provider's shape.
fn message(body: &[u8]) -> String {
    let json: serde_json::Value = serde_json::from_slice(body).unwrap_or_default();
    let said = json.pointer("/error/message").or_else(|| json.pointer("/message"));
    let mut text = said.and_then(serde_json::Value::as_str).map(line).unwrap_or_default();
    if text.is_empty() {
        let _ = write!(text, "{} bytes without a message", body.len()); // writing to a `String` cannot fail
    }
    text
}

//! Whose request it is, and where it goes: the three ways in, told from the request itself.
//!
//! Nothing is normalised: path, query and host go on as they came. What cannot be told apart safely
//! (conflicting lengths, two `Host` lines, dot segments) is refused before any key is leased.

use std::borrow::Cow;
use std::net::SocketAddr;
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use bytes::Bytes;
use http::header::{HOST, ORIGIN, TRANSFER_ENCODING};
use http::uri::{Authority, PathAndQuery, Scheme};
use http::{HeaderName, HeaderValue, Method, Uri, Version, request::Parts};

use crate::config::{AppConfig, Config, ModelAfter, Provider};
use crate::fields::Rare;
use crate::model::{AppName, Code, Fault, Inside, KeyId, Mode, ModelName, PoolName, Site};

pub mod apps;
mod connect;
mod denied;
mod form;
mod key;
mod pattern;
pub mod rank;
pub mod ring;
pub mod scan;
mod seen;
mod standing;
mod steering;
pub mod target;
mod upgrade;
mod wish;

use apps::Apps;
use ring::{ModelKnown, ProviderKeys, Providers, Ring};
pub use standing::Standing;
use steering::Steering;
use target::{host_header, host_key, is_loopback_name, refuse_dot_segments, refuse_userinfo};
use upgrade::asks_upgrade;

/// By which a browser says whether the page that sends is of the place it sends to.
const FETCH_SITE: HeaderName = HeaderName::from_static("sec-fetch-site");

/// The longest wait a request may ask for, where `queue.max_wait` is not longer.
const LONGEST_WAIT: Duration = Duration::from_mins(10);

/// What a request is.
#[derive(Debug)]
pub enum Plan {
    /// For a provider: with a leased key.
    Lend(Box<Route>),
    /// For another host, by plain forwarding.
    Pass {
        /// Absolute, `http`.
        target: Uri,
        /// It asks for a WebSocket.
        websocket: bool,
        /// Who asks.
        app: AppName,
    },
    /// A CONNECT to a provider's host, or to the sidecar itself: its tunnel is opened here.
    Open(Arc<Site>),
    /// For another host, by a blind tunnel.
    Tunnel {
        /// Lower case, no brackets.
        host: String,
        /// Never 0.
        port: u16,
        /// Who asks.
        app: AppName,
    },
}

/// Where a request's connection came in.
#[derive(Debug, Clone, Copy)]
pub enum From {
    /// Over TCP, at this address of the listener's.
    Tcp(SocketAddr),
    /// Over a Unix socket.
    Unix {
        /// The user at the other end, by the kernel's word.
        uid: u32,
    },
}

/// Who asks, and whether he may go on.
#[derive(Debug, Clone)]
pub struct Caller {
    /// The app.
    pub app: AppName,
    /// As it was when this request came.
    pub standing: Standing,
}

impl Caller {
    /// Nobody yet.
    pub fn unknown() -> Self {
        static GOOD: LazyLock<Standing> = LazyLock::new(Standing::default);
        Self { app: AppName::anonymous(), standing: GOOD.clone() }
    }

    /// Why nothing more is done for it, once it was revoked.
    pub fn revoked(&self) -> Fault {
        let app = &self.app;
        Fault::new(
            Code::AppForbidden,
            format!("app `{app}` was revoked by hand; `lessor apps restore {app}` lets it in again"),
        )
    }
}

/// A request's head, and what it has of what few have.
#[derive(Clone, Copy)]
struct Head<'h> {
    parts: &'h Parts,
    rare: Rare,
}

impl<'h> Head<'h> {
    fn of(parts: &'h Parts) -> Self {
        Self { parts, rare: Rare::of(&parts.headers) }
    }
}

/// A request for a provider.
#[derive(Debug)]
pub struct Route {
    /// The provider and its keys.
    pub keys: Arc<ProviderKeys>,
    /// How it came in.
    pub mode: Mode,
    /// Where it goes: absolute, before injection.
    pub target: Uri,
    /// What `Host` says there.
    pub host: HeaderValue,
    /// It asks for a WebSocket.
    pub websocket: bool,
    /// Which rare fields its head has.
    pub rare: Rare,
    /// Where the provider-relative path begins in the target's.
    behind: usize,
    /// Who asks.
    pub app: AppName,
    /// The pool it is served from first.
    pub pool: PoolName,
    /// The very key that was asked for.
    pub pinned: Option<KeyId>,
    /// How long it may wait for a key.
    pub max_wait: Duration,
}

/// How much of the body must be read for its model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ModelNeed {
    /// None of it.
    None,
    /// To the first `model`: only a cooldown's scope depends on it.
    First,
    /// All of it: a key's `models` depend on it.
    All,
}

impl Route {
    /// The provider.
    pub fn provider(&self) -> &Arc<Provider> {
        &self.keys.provider
    }

    /// The provider-relative path, for rules about paths.
    pub fn path(&self) -> &str {
        self.target.path().get(self.behind..).unwrap_or_default()
    }

    /// The model that the path names, where the provider's paths do.
    pub fn model_in_path(&self) -> Option<ModelKnown> {
        let named = |after: &ModelAfter| {
            let at = self.path().find(&after.part)?;
            let rest = &self.path()[at + after.part.len()..];
            let mut segments = rest.split(['/', ':']);
            let len = segments.by_ref().take(after.segments).map(|segment| segment.len() + 1).sum::<usize>();
            let name = rest.get(..len.checked_sub(1)?)?;
            let whole =
                name.split(['/', ':']).filter(|segment| !segment.is_empty()).count() == after.segments;
            whole.then_some(name)
        };
        let name = self.provider().model_after.iter().find_map(named)?;
        // An encoded name may be any: only keys without `models` fit.
        let plain = (!name.contains('%')).then(|| ModelName::new(name)).flatten();
        Some(plain.map_or(ModelKnown::Unreadable, ModelKnown::Named))
    }

    /// The model that a WebSocket handshake names in its query, where the provider's do.
    pub fn model_in_handshake(&self) -> Option<ModelKnown> {
        let name = self.provider().model_query.as_ref().filter(|_| self.websocket)?;
        let pairs = self.target.query()?.split('&').map(|pair| pair.split_once('=').unwrap_or((pair, "")));
        let mut named = pairs.filter(|(parameter, _)| parameter == name).map(|(_, value)| value);
        let only = named.next().map(|value| Some(value).filter(|_| named.next().is_none()))?;
        // Encoded it may be any, and given twice either of two.
        let plain = only.filter(|value| !value.contains(['%', '+'])).and_then(ModelName::new);
        Some(plain.map_or(ModelKnown::Unreadable, ModelKnown::Named))
    }

    /// How much of the body must be read for its model.
    pub fn model_need(&self, method: &Method, has_body: bool) -> ModelNeed {
        let known_as_without =
            self.provider().no_model_paths.iter().any(|prefix| self.path().starts_with(prefix));
        if !has_body || known_as_without || matches!(*method, Method::GET | Method::HEAD | Method::OPTIONS) {
            ModelNeed::None
        } else if self.keys.models_matter(&self.pool) {
            ModelNeed::All
        } else if self.provider().rules.iter().any(|rule| rule.scope.names_model()) {
            ModelNeed::First
        } else {
            ModelNeed::None
        }
    }
}

/// The table of routes.
#[derive(Debug)]
pub struct Routes {
    config: Arc<Config>,
    apps: Arc<Apps>,
    /// As they were when this table was made: it and what it leads to are of one configuration.
    keys: Arc<Providers>,
    /// Ports of lessor's own proxy listeners.
    own_ports: Vec<u16>,
}

impl Routes {
    /// `own` are the addresses really bound, `before` the callers that were known so far.
    pub fn new(config: Arc<Config>, ring: &Ring, own: &[SocketAddr], before: Option<&Apps>) -> Self {
        let own_ports = own.iter().map(SocketAddr::port).collect();
        let apps = Arc::new(Apps::new(&config, before));
        Self { apps, config, keys: ring.providers(), own_ports }
    }

    /// All callers.
    pub fn apps(&self) -> &Arc<Apps> {
        &self.apps
    }

    /// Judges a request.
    /// `caller` is filled in as soon as it is known, also where the request is then refused.
    /// `saw_length`: the head had a `content-length` line, even where the parser dropped it.
    pub fn find(
        &self,
        head: &Parts,
        saw_length: bool,
        from: From,
        caller: &mut Caller,
    ) -> Result<Plan, Fault> {
        let asked = Head::of(head);
        refuse_bad_framing(asked, saw_length)?;
        if let Some(inside) = head.extensions.get::<Arc<Inside>>() {
            return self.inside(asked, inside, caller);
        }
        if head.method == Method::CONNECT {
            if head.version == Version::HTTP_2 {
                let why =
                    "CONNECT is for HTTP/1.1 connections to this listener; what is inside may be HTTP/2";
                return Err(Fault::new(Code::MethodDenied, why));
            }
            return self.connect(head, from, caller);
        }
        refuse_method_and_upgrade(asked)?;
        match head.uri.authority() {
            Some(authority) => self.absolute(asked, authority, from, caller),
            None => self.base_url(asked, from, host_of(head)?, caller),
        }
    }

    /// The mode of a request whose plan could not be made: decides how an error looks.
    pub fn mode_of(&self, head: &Parts, from: From) -> Mode {
        match head.extensions.get::<Arc<Inside>>() {
            Some(inside) if inside.site.is_own => return Mode::BaseUrl,
            Some(_) => return Mode::Connect,
            None if head.method == Method::CONNECT => return Mode::Connect,
            None => {}
        }
        match head.uri.authority() {
            Some(authority) if !self.is_own(head, authority, from) => Mode::Forward,
            _ => Mode::BaseUrl,
        }
    }

    /// Whether a target with an authority is the sidecar itself: an app with both a base URL and a proxy sends
    /// that, and HTTP/2 has no other form. There the port may be another, since something may stand between:
    /// the sidecar's names, and whoever came by a Unix socket, say enough.
    fn is_own(&self, head: &Parts, authority: &Authority, from: From) -> bool {
        let host = host_key(authority.host());
        let own_port = self.own_ports.contains(&authority.port_u16().unwrap_or(80));
        let named = || matches!(from, From::Unix { .. }) || self.config.listen.hosts.contains(&host);
        if matches!(from, From::Unix { .. }) && self.looks_like_base_url(head, &host) {
            return true;
        }
        head.uri.scheme_str().unwrap_or("http") == "http"
            && self.is_own_name(&host, from)
            && (own_port || (head.version == Version::HTTP_2 && named()))
    }

    /// Whether an HTTP/2 request, which has an authority in any case, is hardly meant for the host that it names: its
    /// path begins as in base-URL mode, and the host is no provider's.
    fn looks_like_base_url(&self, head: &Parts, host: &str) -> bool {
        let named = || self.keys.contains_key(first_segment(head.uri.path()).0);
        head.version == Version::HTTP_2 && !self.config.hosts.contains_key(host) && named()
    }

    /// The provider whose errors' shape fits a request, where one can be told.
    pub fn provider_hint(&self, head: &Parts) -> Option<&Arc<Provider>> {
        let by_path = || self.config.providers.get(first_segment(head.uri.path()).0);
        let by_host = |host: &str| self.config.providers.get(self.config.hosts.get(host)?);
        match head.extensions.get::<Arc<Inside>>() {
            Some(inside) if inside.site.is_own => return by_path(),
            Some(inside) => return by_host(&inside.host),
            None => {}
        }
        match head.uri.authority() {
            Some(to) => by_host(&host_key(to.host())).or_else(by_path),
            None => by_path(),
        }
    }

    fn base_url(&self, asked: Head<'_>, from: From, host: &str, caller: &mut Caller) -> Result<Plan, Fault> {
        let head = asked.parts;
        self.refuse_foreign_host(host, from)?;
        self.refuse_foreign_page(asked, host)?;
        let app = self.apps.identify(Mode::BaseUrl, from, &head.headers, head.uri.query(), true)?;
        self.admit(app, caller)?;
        self.by_path(asked, app)
    }

    /// To the provider that the path begins with.
    fn by_path(&self, asked: Head<'_>, app: &AppConfig) -> Result<Plan, Fault> {
        let head = asked.parts;
        let path = head.uri.path();
        refuse_dot_segments(path)?;
        let (name, rest) = first_segment(path);
        let keys = self.served(name)?;
        let base = &keys.provider.base_url;
        let before = base.path().trim_end_matches('/');
        let joined =
            if before.is_empty() { Cow::Borrowed(rest) } else { Cow::Owned([before, rest].concat()) };
        let full = if joined.is_empty() { "/" } else { &*joined };
        let target = build_target(base, None, full, head.uri.query())?;
        let to = (target, keys.host.clone());
        self.lend(asked, keys, Mode::BaseUrl, to, rest, app)
    }

    fn absolute(
        &self,
        asked: Head<'_>,
        authority: &Authority,
        from: From,
        caller: &mut Caller,
    ) -> Result<Plan, Fault> {
        let head = asked.parts;
        refuse_userinfo(authority)?;
        let named = host_of(head)?;
        if head.version == Version::HTTP_2 && !named.eq_ignore_ascii_case(authority.as_str()) {
            return Err(Fault::new(Code::BadRequest, "Host and :authority contradict each other"));
        }
        let host = host_key(authority.host());
        let scheme = head.uri.scheme_str().unwrap_or("http");
        if !matches!(scheme, "http" | "https") {
            return Err(Fault::new(Code::BadRequest, "only http:// and https:// targets are known"));
        }
        refuse_bad_port(authority)?;
        if self.is_own(head, authority, from) {
            return self.base_url(asked, from, authority.as_str(), caller);
        }
        let path = head.uri.path();
        refuse_dot_segments(path)?;
        let provider = self.provider_of(&host);
        // The gate comes first; an app may show its token as the placeholder key to a provider alone.
        let placeholder = matches!(provider, Ok(Some(_)));
        let query = head.uri.query().filter(|_| placeholder);
        let app = self.apps.identify(Mode::Forward, from, &head.headers, query, placeholder)?;
        self.admit(app, caller)?;
        if let Some(keys) = provider? {
            let usual = if scheme == "https" { 443 } else { 80 };
            let port = authority.port_u16().unwrap_or(usual);
            if port != usual {
                refuse_foreign_port(&keys.provider, &host, port)?;
            }
            let to = forward_target(&keys, &host, path, head.uri.query())?;
            return self.lend(asked, keys, Mode::Forward, to, path, app);
        }
        if self.looks_like_base_url(head, &host) {
            // Passed on, the request would go, in the clear, to whoever has that name.
            self.refuse_foreign_host(authority.as_str(), from)?;
        }
        self.refuse_other_host(&host)?;
        if scheme != "http" {
            return Err(Fault::new(
                Code::BadRequest,
                "https targets go through CONNECT; only http:// is forwarded",
            ));
        }
        if head.uri.query().is_some_and(|query| self.apps.is_in_query(query)) {
            return Err(Fault::new(
                Code::BadRequest,
                "the query carries an app token, which is for lessor alone",
            ));
        }
        let websocket = asks_upgrade(asked);
        Ok(Plan::Pass { target: head.uri.clone(), websocket, app: app.name.clone() })
    }

    /// Says who asks, and refuses one that a person revoked.
    fn admit(&self, app: &AppConfig, caller: &mut Caller) -> Result<(), Fault> {
        *caller = Caller { app: app.name.clone(), standing: self.apps.standing(&app.name) };
        if caller.standing.is_revoked() { Err(caller.revoked()) } else { Ok(()) }
    }

    fn lend(
        &self,
        asked: Head<'_>,
        keys: Arc<ProviderKeys>,
        mode: Mode,
        (target, host): (Uri, HeaderValue),
        path: &str,
        app: &AppConfig,
    ) -> Result<Plan, Fault> {
        let provider = &keys.provider.name;
        if !app.providers.is_empty() && !app.providers.contains(provider) {
            return Err(Fault::new(
                Code::AppForbidden,
                format!("app `{}` may not use provider `{provider}`", app.name),
            ));
        }
        denied::refuse_denied(&keys.provider, target.path(), path)?;
        let steering = Steering::of(asked);
        let pool = self.pool_for(&steering, app, &keys)?;
        let pinned = steering.pinned(provider)?;
        let usual_wait = self.config.queue.max_wait;
        let max_wait = steering.max_wait()?.map_or(usual_wait, |wait| wait.min(LONGEST_WAIT.max(usual_wait)));
        Ok(Plan::Lend(Box::new(Route {
            keys,
            mode,
            // The path goes on as it came, so it ends the target's.
            behind: target.path().len().saturating_sub(path.len()),
            target,
            host,
            websocket: asks_upgrade(asked),
            rare: asked.rare,
            app: app.name.clone(),
            pool,
            pinned,
            max_wait,
        })))
    }

    fn pool_for(
        &self,
        steering: &Steering<'_>,
        app: &AppConfig,
        keys: &ProviderKeys,
    ) -> Result<PoolName, Fault> {
        let asked = steering.pool()?;
        let allowed = |pool: &PoolName| {
            !self.apps.required()
                || app.pools.contains(pool)
                || (app.pools.is_empty() && *pool == PoolName::default_pool())
        };
        let default = || {
            // What a pod says for all of its apps lets none into a pool that is closed to it.
            let said = self.config.default_pool.as_ref().filter(|pool| allowed(pool));
            said.or(app.pools.first()).cloned().unwrap_or_else(PoolName::default_pool)
        };
        let pool = asked.unwrap_or_else(default);
        if !allowed(&pool) {
            return Err(Fault::new(
                Code::AppForbidden,
                format!("app `{}` may not use pool `{pool}`", app.name),
            ));
        }
        if !keys.has_pool(&pool) {
            return Err(Fault::new(
                Code::UnknownProvider,
                format!(
                    "provider `{}` has no pool `{pool}` here; see `lessor keys list`",
                    keys.provider.name
                ),
            ));
        }
        Ok(pool)
    }

    fn served(&self, name: &str) -> Result<Arc<ProviderKeys>, Fault> {
        if let Some(keys) = self.keys.get(name).filter(|keys| !keys.keys.is_empty()) {
            return Ok(keys.clone());
        }
        let with_keys = self.keys.values().filter(|keys| !keys.keys.is_empty());
        let mut served: Vec<&str> = with_keys.map(|keys| keys.provider.name.as_str()).collect();
        served.sort_unstable();
        let known = crate::config::catalogue::builtin().get(name);
        let left_out = || {
            let only = &self.config.upstreams;
            let is_known = known.is_some() || self.config.hosts.values().any(|known| known.as_str() == name);
            is_known && !only.is_empty() && only.iter().all(|only| only.as_str() != name)
        };
        let hint = match known.and_then(|provider| provider.env.first()) {
            _ if left_out() => format!("provider `{name}` is not among --upstreams here"),
            Some(variable) => format!("provider `{name}` has no key here; set {variable} or add [[keys]]"),
            None => "the first part of the path names no provider".to_owned(),
        };
        let message = format!("{hint}; served: {}", served.join(", "));
        Err(Fault::new(Code::UnknownProvider, message))
    }

    /// The served provider that a host belongs to, by exact name. One that a pattern only recognises is
    /// refused: anybody can own such a host.
    fn provider_of(&self, host: &str) -> Result<Option<Arc<ProviderKeys>>, Fault> {
        let served = |name: &str| self.keys.get(name).filter(|keys| !keys.keys.is_empty());
        if let Some(name) = self.config.hosts.get(host) {
            return Ok(served(name.as_str()).cloned());
        }
        for (suffix, name) in &self.config.host_patterns {
            if host.ends_with(suffix.as_str()) && served(name.as_str()).is_some() {
                return Err(Fault::new(
                    Code::DestinationDenied,
                    format!(
                        "{host} looks like a host of `{name}` but is not listed, and anybody can own one; \
                         if it is yours, add to the configuration: [providers.{name}] hosts = [\"{host}\"]"
                    ),
                ));
            }
        }
        Ok(None)
    }

    fn refuse_other_host(&self, host: &str) -> Result<(), Fault> {
        if self.config.proxy.tunnel_other_hosts {
            return Ok(());
        }
        Err(Fault::new(
            Code::DestinationDenied,
            format!("{host} is no provider's host, and proxy.other_hosts is \"deny\""),
        ))
    }

    fn is_own_name(&self, host: &str, from: From) -> bool {
        is_loopback_name(host)
            || self.config.listen.hosts.iter().any(|name| name == host)
            || matches!(from, From::Tcp(at) if host.parse().is_ok_and(|ip| target::unmapped(ip) == target::unmapped(at.ip())))
    }

    /// Stops DNS rebinding: a page whose name was pointed here still sends that name. Over a Unix socket
    /// no page can come.
    fn refuse_foreign_host(&self, host: &str, from: From) -> Result<(), Fault> {
        if is_usual_host(host) {
            return Ok(());
        }
        let is_plain =
            |authority: &Authority| !authority.as_str().contains('@') && target::has_one_reading(authority);
        let authority = host.parse::<Authority>().ok().filter(is_plain);
        let name = authority.map(|authority| host_key(authority.host())).unwrap_or_default();
        if matches!(from, From::Unix { .. }) || self.is_own_name(&name, from) {
            return Ok(());
        }
        Err(Fault::new(
            Code::OriginDenied,
            "this Host is not one of the sidecar's; use a loopback name or add it to listen.hosts",
        ))
    }

    /// `host` is the sidecar's, as this request names it: some clients that are no browsers say that their origin
    /// is where they connect to, and lessor has no pages of its own.
    fn refuse_foreign_page(&self, asked: Head<'_>, host: &str) -> Result<(), Fault> {
        let own = |origin: &[u8]| origin.strip_prefix(b"http://").is_some_and(|at| at == host.as_bytes());
        let allowed = |origin: &[u8]| {
            own(origin) || self.config.listen.allow_origins.iter().any(|known| known.as_bytes() == origin)
        };
        if !asked.rare.has(Rare::ORIGIN | Rare::FETCH_SITE) {
            return Ok(());
        }
        let headers = &asked.parts.headers;
        let cross = || headers.get(FETCH_SITE).is_some_and(|site| site == "cross-site");
        match headers.get(ORIGIN) {
            Some(origin) if allowed(origin.as_bytes()) => Ok(()),
            None if !cross() => Ok(()),
            _ => Err(Fault::new(
                Code::OriginDenied,
                "a web page elsewhere sent this; name its origin in listen.allow_origins if it may",
            )),
        }
    }
}

/// What a path begins with, and the rest from its slash on; both empty where it is no path.
fn first_segment(path: &str) -> (&str, &str) {
    let Some(behind) = path.strip_prefix('/') else { return ("", "") };
    behind.split_at(memchr::memchr(b'/', behind.as_bytes()).unwrap_or(behind.len()))
}

/// Whether it is what most clients write as `Host` that have lessor as their base URL: told without taking it apart.
fn is_usual_host(host: &str) -> bool {
    let name = host.trim_end_matches(|c: char| c.is_ascii_digit()).strip_suffix(':').unwrap_or(host);
    matches!(name, "127.0.0.1" | "localhost" | "[::1]")
}

/// Where a proxied request for a provider's host goes: to that host over the provider's own scheme; or,
/// where the user set `base_url`, there. And what `Host` says.
fn forward_target(
    keys: &ProviderKeys,
    host: &str,
    path: &str,
    query: Option<&str>,
) -> Result<(Uri, HeaderValue), Fault> {
    let (provider, base) = (&keys.provider, &keys.provider.base_url);
    if is_base(provider, host) {
        return Ok((build_target(base, None, path, query)?, keys.host.clone()));
    }
    if provider.base_url_is_users {
        let path = format!("{}{path}", base.path().trim_end_matches('/'));
        return Ok((build_target(base, None, &path, query)?, keys.host.clone()));
    }
    let bracketed = if host.contains(':') { format!("[{host}]") } else { host.to_owned() };
    let authority =
        bracketed.parse().map_err(|_| Fault::new(Code::BadRequest, "the target's host is malformed"))?;
    let target = build_target(base, Some(authority), path, query)?;
    let host = host_header(&target);
    Ok((target, host))
}

/// Whether `host` is the one of `base_url`.
fn is_base(provider: &Provider, host: &str) -> bool {
    provider.base_url.host().is_some_and(|name| host_key(name) == host)
}

/// Refuses a port on which the provider is not: what else listens at its host is none of a key's business.
fn refuse_foreign_port(provider: &Provider, host: &str, port: u16) -> Result<(), Fault> {
    if port == 443 || (is_base(provider, host) && Some(port) == provider.base_url.port_u16()) {
        return Ok(());
    }
    Err(Fault::new(
        Code::DestinationDenied,
        format!("`{}` is served at {host} on its own port alone", provider.name),
    ))
}

/// `base`'s scheme and authority (or another authority), with a path and query as they came.
fn build_target(
    base: &Uri,
    authority: Option<Authority>,
    path: &str,
    query: Option<&str>,
) -> Result<Uri, Fault> {
    let malformed = || Fault::new(Code::BadRequest, "the request target is malformed");
    let both = match query {
        Some(query) => [path, "?", query].concat(),
        None => path.to_owned(),
    };
    let both = PathAndQuery::from_maybe_shared(Bytes::from(both));
    let mut parts = http::uri::Parts::default();
    parts.scheme = Some(base.scheme().cloned().unwrap_or(Scheme::HTTPS));
    parts.authority = authority.or_else(|| base.authority().cloned());
    parts.path_and_query = Some(both.map_err(|_| malformed())?);
    Uri::from_parts(parts).map_err(|_| malformed())
}

/// The one `Host` of a request (RFC 9112, section 3.2: none or two are 400); with HTTP/2 `:authority` will do
/// (RFC 9113, section 8.3.1).
fn host_of(head: &Parts) -> Result<&str, Fault> {
    let mut all = head.headers.get_all(HOST).iter();
    match (all.next(), all.next()) {
        (Some(host), None) => {
            host.to_str().map_err(|_| Fault::new(Code::BadRequest, "the Host header is not readable"))
        }
        (None, _) => match head.uri.authority().filter(|_| head.version == Version::HTTP_2) {
            Some(authority) => Ok(authority.as_str()),
            None => Err(Fault::new(Code::BadRequest, "a Host header is needed")),
        },
        _ => Err(Fault::new(Code::BadRequest, "two Host headers contradict each other")),
    }
}

/// Refuses what different parsers read differently: lengths beside transfer codings, codings other than
/// one `chunked` (RFC 9112, section 6).
fn refuse_bad_framing(asked: Head<'_>, saw_length: bool) -> Result<(), Fault> {
    if !asked.rare.has(Rare::TRANSFER_ENCODING) {
        return Ok(());
    }
    let head = asked.parts;
    let mut codings = head.headers.get_all(TRANSFER_ENCODING).iter();
    let Some(coding) = codings.next() else { return Ok(()) };
    if saw_length || head.headers.contains_key(http::header::CONTENT_LENGTH) {
        return Err(Fault::new(
            Code::BadRequest,
            "Content-Length and Transfer-Encoding contradict each other",
        ));
    }
    if codings.next().is_some() || !coding.as_bytes().eq_ignore_ascii_case(b"chunked") {
        return Err(Fault::new(Code::UpgradeUnsupported, "Transfer-Encoding can only be one `chunked`"));
    }
    Ok(())
}

fn refuse_method_and_upgrade(asked: Head<'_>) -> Result<(), Fault> {
    if asked.parts.method == Method::TRACE {
        return Err(Fault::new(Code::MethodDenied, "TRACE would return the key; it is not forwarded"));
    }
    upgrade::refuse_bad_upgrade(asked)
}

/// Refuses `host:` and ports beyond 65535, which would be taken for no port at all.
fn refuse_bad_port(authority: &Authority) -> Result<(), Fault> {
    let after_host = authority.as_str().len() > authority.host().len();
    let no_port = after_host && authority.port_u16().is_none_or(|port| port == 0);
    if no_port || host_key(authority.host()).is_empty() || !target::has_one_reading(authority) {
        return Err(Fault::new(Code::BadRequest, "the target's host or port is none"));
    }
    Ok(())
}

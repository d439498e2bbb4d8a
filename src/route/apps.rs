//! Whose request it is: the one gate before all routing.

use std::sync::Arc;

use arc_swap::ArcSwap;
use base64::Engine as _;
use http::HeaderMap;
use http::header::{PROXY_AUTHORIZATION, SEC_WEBSOCKET_PROTOCOL};
use sha2::{Digest as _, Sha256};
use subtle::{Choice, ConditionallySelectable as _, ConstantTimeEq as _};

use super::From;
use super::standing::Standing;
use crate::config::{AppConfig, Config, catalogue};
use crate::model::{AppName, Code, Fault, Map, Mode};

/// The header that names an app by its token and is never forwarded.
pub const APP_TOKEN: &str = "x-lessor-app-token";

/// All callers. Their tokens are kept as digests: equal length, so comparison takes the same time for all.
#[derive(Debug)]
pub struct Apps {
    known: Vec<AppConfig>,
    /// Digests of tokens, and whose they are.
    tokens: Vec<([u8; 32], usize)>,
    anonymous: AppConfig,
    /// Of every app here; a new one with each restoring.
    standings: Map<AppName, ArcSwap<Standing>>,
}

impl Apps {
    /// From the configuration; without any app everyone is `anonymous`. Whoever was known in `before` keeps
    /// the standing it has, and whoever is no more loses it.
    pub fn new(config: &Config, before: Option<&Self>) -> Self {
        let digest =
            |(at, app): (usize, &AppConfig)| Some((digest(app.token.as_ref()?.expose().as_bytes()), at));
        let names = config.apps.iter().map(|app| app.name.clone());
        let anonymous = config.apps.is_empty().then(AppName::anonymous);
        let standing = |name: AppName| {
            let known = before.and_then(|before| before.standings.get(&name));
            let standing = known.map_or_else(ArcSwap::default, |known| ArcSwap::new(known.load_full()));
            (name, standing)
        };
        let standings: Map<_, _> = names.chain(anonymous).map(standing).collect();
        let gone = before.iter().flat_map(|before| &before.standings);
        for (_, standing) in gone.filter(|(name, _)| !standings.contains_key(*name)) {
            standing.load().revoke();
        }
        Self {
            standings,
            known: config.apps.clone(),
            tokens: config.apps.iter().enumerate().filter_map(digest).collect(),
            anonymous: AppConfig {
                name: AppName::anonymous(),
                token: None,
                uid: None,
                pools: Vec::new(),
                providers: Vec::new(),
            },
        }
    }

    /// Whether callers must be known.
    pub fn required(&self) -> bool {
        !self.known.is_empty()
    }

    /// The app whose token a request shows: as `X-Lessor-App-Token`; as proxy password; or, where
    /// `as_placeholder` says that the request is for a provider, in any credential place. Without one, the
    /// app of the user at the other end of a Unix socket: a token says more, for users may run several apps.
    pub fn identify(
        &self,
        mode: Mode,
        from: From,
        headers: &HeaderMap,
        query: Option<&str>,
        as_placeholder: bool,
    ) -> Result<&AppConfig, Fault> {
        if !self.required() {
            return Ok(&self.anonymous);
        }
        if let Some(token) = headers.get(APP_TOKEN) {
            return self.by_token(token.as_bytes()).ok_or_else(wrong);
        }
        if mode != Mode::BaseUrl && headers.contains_key(PROXY_AUTHORIZATION) {
            return self.by_proxy_password(headers).ok_or_else(wrong);
        }
        if as_placeholder && let Some(app) = self.by_placeholder(headers, query) {
            return Ok(app);
        }
        if let From::Unix { uid } = from
            && let Some(app) = self.known.iter().find(|app| app.uid == Some(uid))
        {
            return Ok(app);
        }
        let in_header = || catalogue::credential_headers().iter().any(|name| headers.contains_key(name));
        if as_placeholder && (in_header() || in_subprotocols(headers).next().is_some()) {
            return Err(wrong());
        }
        let needed = "an app token is needed here: give it as the API key, as the proxy password, or as X-Lessor-App-Token";
        let message = match from {
            From::Unix { uid } => {
                format!("{needed}; or say `uid = {uid}` in an [apps.NAME] of the configuration")
            }
            From::Tcp(_) => needed.to_owned(),
        };
        Err(Fault::new(Code::AppUnauthenticated, message))
    }

    /// The app of this name.
    pub fn by_name(&self, name: &AppName) -> Option<&AppConfig> {
        self.all().find(|app| app.name == *name)
    }

    /// Every app here: those of the configuration, or `anonymous`.
    pub fn all(&self) -> impl Iterator<Item = &AppConfig> {
        self.known.iter().chain((!self.required()).then_some(&self.anonymous))
    }

    /// An app's standing now; of one that is not known, a good one, for nothing is asked as that.
    pub fn standing(&self, name: &AppName) -> Standing {
        self.standings.get(name).map_or_else(Standing::default, |standing| Standing::clone(&standing.load()))
    }

    /// Ends all that this app has under way, and lets it in no more until it is restored.
    pub fn revoke(&self, name: &AppName) {
        self.standing(name).revoke();
    }

    /// Lets it in again. What it had under way stays ended.
    pub fn restore(&self, name: &AppName) {
        if let Some(standing) = self.standings.get(name).filter(|standing| standing.load().is_revoked()) {
            standing.store(Arc::default());
        }
    }

    /// Whether a header's value carries some app's token: then it must not leave.
    pub fn is_token(&self, value: &[u8]) -> bool {
        if !self.required() {
            return false;
        }
        let basic = strip_scheme(value, b"basic ")
            .and_then(|encoded| base64::engine::general_purpose::STANDARD.decode(encoded.trim_ascii()).ok());
        match basic {
            Some(pair) => pair.split(|byte| *byte == b':').any(|part| self.by_token(part).is_some()),
            None => self.by_token(bare(value)).is_some(),
        }
    }

    /// Whether a query carries some app's token.
    pub fn is_in_query(&self, query: &str) -> bool {
        self.required()
            && super::target::query_pairs(query).any(|pair| self.by_token(&pair.decoded_value()).is_some())
    }

    fn by_proxy_password(&self, headers: &HeaderMap) -> Option<&AppConfig> {
        let value = headers.get(PROXY_AUTHORIZATION)?.as_bytes();
        let Some(encoded) = strip_scheme(value, b"basic ") else { return self.by_token(bare(value)) };
        let decoded = base64::engine::general_purpose::STANDARD.decode(encoded.trim_ascii()).ok()?;
        let colon = memchr::memchr(b':', &decoded)?;
        let (user, password) = (&decoded[..colon], &decoded[colon + 1..]);
        // The token decides; a user that names another app is a mix-up to be told, not guessed away.
        let app = self.by_token(if password.is_empty() { user } else { password })?;
        let named_other =
            self.known.iter().any(|other| other.name != app.name && other.name.as_str().as_bytes() == user);
        (!named_other).then_some(app)
    }

    fn by_placeholder(&self, headers: &HeaderMap, query: Option<&str>) -> Option<&AppConfig> {
        let in_headers = catalogue::credential_headers()
            .iter()
            .flat_map(|name| headers.get_all(name))
            .find_map(|value| self.by_token(bare(value.as_bytes())));
        let in_subprotocols = || in_subprotocols(headers).find_map(|secret| self.by_token(secret));
        in_headers.or_else(in_subprotocols).or_else(|| {
            super::target::query_pairs(query?)
                .filter(|pair| catalogue::credential_queries().iter().any(|name| pair.name_is(name)))
                .find_map(|pair| self.by_token(&pair.decoded_value()))
        })
    }

    /// Looks at every app, always, so that timing tells nothing about which token was near.
    fn by_token(&self, token: &[u8]) -> Option<&AppConfig> {
        let shown = digest(token);
        let mut found = Choice::from(0);
        let mut at = 0_u64;
        for (index, (known, _)) in (0_u64..).zip(&self.tokens) {
            let same = known.ct_eq(&shown);
            at = u64::conditional_select(&at, &index, same);
            found |= same;
        }
        let at = usize::try_from(at).ok()?;
        bool::from(found).then(|| &self.known[self.tokens[at].1])
    }
}

/// The credentials among the WebSocket subprotocols that a request offers.
fn in_subprotocols(headers: &HeaderMap) -> impl Iterator<Item = &[u8]> {
    let lines = headers.get_all(SEC_WEBSOCKET_PROTOCOL).iter();
    let members = lines.flat_map(|line| line.as_bytes().split(|byte| *byte == b','));
    members.filter_map(|member| catalogue::subprotocol_secret(member, &[]))
}

fn digest(token: &[u8]) -> [u8; 32] {
    Sha256::digest(token).into()
}

fn wrong() -> Fault {
    Fault::new(Code::AppUnauthenticated, "the app token is not known here; see [apps.*] of the configuration")
}

/// A credential without its scheme (`Bearer`, `Token`, …).
fn bare(value: &[u8]) -> &[u8] {
    for scheme in [&b"bearer "[..], b"token ", b"key "] {
        if let Some(rest) = strip_scheme(value, scheme) {
            return rest.trim_ascii();
        }
    }
    value.trim_ascii()
}

fn strip_scheme<'a>(value: &'a [u8], scheme: &[u8]) -> Option<&'a [u8]> {
    let head = value.get(..scheme.len())?;
    head.eq_ignore_ascii_case(scheme).then(|| &value[scheme.len()..])
}

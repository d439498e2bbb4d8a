//! `[providers.x]` as it is written, in the catalogue and in the user's file alike.

use std::collections::BTreeMap;
use std::fmt;
use std::marker::PhantomData;
use std::path::PathBuf;

use serde::de::{self, IntoDeserializer as _, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};

use crate::config::{BaseUrlVariable, ErrorShape, Kind, Scrub, WaitFormat, Window};
use crate::model::{Class, Scope};

/// A provider's table: every field may be left out.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields)] // a misspelt rule must not become no rule
pub struct RawProvider {
    /// Scheme, authority and perhaps a path that goes before the caller's.
    pub base_url: Option<String>,
    /// Further exact hosts that a key may be sent to.
    pub hosts: Option<Vec<String>>,
    /// Suffixes (`.example.net`) that recognise a host without sending a key there.
    pub host_patterns: Option<Vec<String>>,
    /// Lets `base_url` say `http://` for a host off loopback.
    pub allow_plaintext: Option<bool>,
    /// Certificates trusted for this provider beside the usual ones.
    pub ca_file: Option<PathBuf>,
    /// How the key is put in: one table, or several, each but the last with a `path_prefix`.
    pub inject: Option<OneOrMany<RawInject>>,
    /// Credential places of the client to leave alone: header names, or `?name` for the query.
    pub keep: Option<Vec<String>>,
    /// The shape of errors its SDKs show.
    pub error_shape: Option<ErrorShape>,
    /// Where the leased key is masked in answers: `on` unless said, `headers` or `off`.
    pub scrub: Option<Scrub>,
    /// The request by which lessor checks a key.
    pub check: Option<RawCheck>,
    /// How answers are read; these come before the catalogue's.
    pub rules: Option<Vec<RawRule>>,
    /// Rules of the catalogue that no longer count: codes, phrases or statuses of theirs, or `*` for all.
    pub remove_rules: Option<Vec<String>>,
    /// Where answers say how long to wait; these come before the catalogue's.
    pub waits: Option<Vec<RawWait>>,
    /// Waits of the catalogue that no longer count: headers, pointers or phrases of theirs, or `*` for all.
    pub remove_waits: Option<Vec<String>>,
    /// See [`crate::config::Provider::organization_header`].
    pub organization_header: Option<String>,
    /// See [`crate::config::Provider::max_uses_header`].
    pub max_uses_header: Option<String>,
    /// Where answers say what they used.
    pub usage: Option<Vec<RawUsage>>,
    /// Paths that no leased key is sent to; these come beside the catalogue's.
    pub deny_paths: Option<Vec<String>>,
    /// Exceptions from them.
    pub allow_paths: Option<Vec<String>>,
    /// Path prefixes whose requests need no model.
    pub no_model_paths: Option<Vec<String>>,
    /// See [`crate::config::Provider::model_after`]; `/models/*/*` where a model is two segments.
    pub model_after: Option<Vec<String>>,
    /// See [`crate::config::Provider::model_field`].
    pub model_field: Option<String>,
    /// See [`crate::config::Provider::model_query`].
    pub model_query: Option<String>,
    /// See [`crate::config::Provider::subprotocols`].
    pub subprotocols: Option<Vec<String>>,
    /// The usual environment variables of its keys.
    pub env: Option<Vec<String>>,
    /// See [`crate::config::Provider::env_other`].
    pub env_other: Option<Vec<String>>,
    /// See [`crate::config::Provider::env_base_url`].
    pub env_base_url: Option<Vec<BaseUrlVariable>>,
}

/// `inject`.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RawInject {
    /// The header that takes the key; or `query`, or `kind`.
    pub header: Option<String>,
    /// The value, with `{secret}` or parts such as `{secret.app_id}` in it; without, `Bearer {secret}` for
    /// `authorization` and the bare secret elsewhere.
    pub format: Option<String>,
    /// `bearer` or `basic`: both stand in `authorization`.
    pub kind: Option<Kind>,
    /// The query parameter that takes the key; or `header`.
    pub query: Option<String>,
    /// Only for paths that begin so.
    pub path_prefix: Option<String>,
}

/// `check`.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RawCheck {
    /// GET unless said.
    pub method: Option<String>,
    /// Path and query below `base_url`.
    pub path: Option<String>,
    /// Headers it needs.
    #[serde(default)]
    pub headers: BTreeMap<String, String>,
}

/// One of `rules`.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RawRule {
    /// Statuses: numbers, or ranges such as `"500-599"`.
    pub status: Option<OneOrMany<RawStatus>>,
    /// Codes or types, one of which must stand in one of `field`; `*` is any.
    pub code: Option<OneOrMany<String>>,
    /// JSON pointers, in which `*` stands for every element of an array, or (for codes) `header:` and its name.
    pub field: Option<OneOrMany<String>>,
    /// Phrases, one of which the body (or `field`, if given) must contain.
    pub phrase: Option<OneOrMany<String>>,
    /// Headers that must be there with a number above 0.
    pub only_if_left: Option<OneOrMany<String>>,
    /// What it means.
    pub class: Class,
    /// Who shares the limit.
    pub scope: Option<Scope>,
    /// Whether the answer names the key itself as bad.
    pub proven: Option<bool>,
    /// The wait when the answer names none: `15m`, `month_end`, `day_end` or `day_end_pacific`.
    pub wait: Option<String>,
    /// With `class = "rate"`: the limit's window, which its wait may be as long as.
    pub window: Option<Window>,
    /// With `class = "caller"`: another key is tried all the same.
    pub another_key: Option<bool>,
}

/// One of `waits`.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RawWait {
    /// A header.
    pub header: Option<String>,
    /// A JSON pointer into the body; `*` stands for every element of an array.
    pub body: Option<String>,
    /// A phrase after which the wait stands, in `field` or where errors have their message.
    pub phrase: Option<String>,
    /// JSON pointers to the texts in which `phrase` is looked for.
    pub field: Option<OneOrMany<String>>,
    /// How it is written.
    pub format: WaitFormat,
    /// A header that must be 0 for this wait to count.
    pub only_if_zero: Option<String>,
    /// A header and the beginning of its value, `name: value`, with which this wait does not count.
    pub unless: Option<String>,
    /// The classes of answers it counts for; left out: all that can wait.
    #[serde(default)]
    pub classes: Vec<Class>,
    /// The window of the limit it is about, where that is longer than minutes.
    pub window: Option<Window>,
}

/// One of `usage`: where each count stands, a JSON pointer or a header.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RawUsage {
    /// Only in this event of a stream.
    pub event: Option<String>,
    /// Tokens of the request.
    pub input: Option<String>,
    /// Tokens of the answer.
    pub output: Option<String>,
    /// Both.
    pub total: Option<String>,
    /// Tokens of the request that came from a cache.
    pub cache_read: Option<String>,
    /// Tokens of the request that were put into a cache.
    pub cache_write: Option<String>,
    /// Tokens that were thought and are not shown.
    pub reasoning: Option<String>,
    /// Money.
    pub cost: Option<String>,
    /// Characters of text.
    pub characters: Option<String>,
    /// Seconds of work.
    pub seconds: Option<String>,
}

/// A status, or a range of them as text.
#[derive(Debug, Clone, Deserialize)]
#[serde(untagged)]
pub enum RawStatus {
    /// `429`
    One(u16),
    /// `"500-599"`
    Range(String),
}

/// One value, or an array of them. Written by hand because an untagged enum hides which field is wrong.
#[derive(Debug, Clone)]
pub struct OneOrMany<T>(pub Vec<T>);

impl<'de, T: Deserialize<'de>> Deserialize<'de> for OneOrMany<T> {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct Either<T>(PhantomData<T>);
        impl<'de, T: Deserialize<'de>> Visitor<'de> for Either<T> {
            type Value = OneOrMany<T>;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("one value or an array of them")
            }
            fn visit_str<E: de::Error>(self, text: &str) -> Result<Self::Value, E> {
                T::deserialize(text.into_deserializer()).map(|one| OneOrMany(vec![one]))
            }
            fn visit_i64<E: de::Error>(self, number: i64) -> Result<Self::Value, E> {
                T::deserialize(number.into_deserializer()).map(|one| OneOrMany(vec![one]))
            }
            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Self::Value, A::Error> {
                T::deserialize(de::value::MapAccessDeserializer::new(map)).map(|one| OneOrMany(vec![one]))
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Self::Value, A::Error> {
                let mut all = Vec::new();
                while let Some(one) = seq.next_element()? {
                    all.push(one);
                }
                Ok(OneOrMany(all))
            }
        }
        from.deserialize_any(Either(PhantomData))
    }
}

impl RawProvider {
    /// The names of its fields, for "did you mean".
    pub const FIELDS: &[&str] = &[
        "base_url",
        "hosts",
        "host_patterns",
        "allow_plaintext",
        "ca_file",
        "inject",
        "keep",
        "error_shape",
        "scrub",
        "check",
        "rules",
        "remove_rules",
        "waits",
        "remove_waits",
        "organization_header",
        "max_uses_header",
        "usage",
        "deny_paths",
        "allow_paths",
        "no_model_paths",
        "model_after",
        "model_field",
        "model_query",
        "subprotocols",
        "env",
        "env_other",
        "env_base_url",
    ];
}

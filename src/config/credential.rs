//! What a secret is put in as, made once a key.
//!
//! Every request with a key carries the same text. It is made and judged once, shared by all of them, and wiped when
//! the last has let go of it.

use bytes::Bytes;
use http::{HeaderName, HeaderValue};
use zeroize::Zeroizing;

use super::{Format, Injection, KeyConfig, Place};
use crate::model::Secret;

/// Every way in which one key is put in, ready to be so.
#[derive(Debug)]
pub struct Credential(Vec<Way>);

/// One way: an [`Injection`] with the secret in it.
#[derive(Debug)]
struct Way {
    path_prefix: Option<String>,
    places: Vec<Filled>,
}

/// A place with the secret in it.
pub enum Filled {
    /// A header, marked sensitive.
    Header(HeaderName, HeaderValue),
    /// A query parameter, before it is encoded.
    Query(String, Zeroizing<String>),
    /// The secret does not fit there: why.
    Unfit(String),
}

impl std::fmt::Debug for Filled {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Header(..) => "Header(..)",
            Self::Query(..) => "Query(..)",
            Self::Unfit(_) => "Unfit(..)",
        })
    }
}

impl Credential {
    /// Of this key; `None` while its secret could not be had.
    pub fn of(key: &KeyConfig) -> Option<Self> {
        let secret = key.secret.as_ref()?;
        let way = |one: &Injection| Way {
            path_prefix: one.path_prefix.clone(),
            places: one.places.iter().map(|place| Filled::of(place, secret)).collect(),
        };
        Some(Self(key.inject.iter().map(way).collect()))
    }

    /// Where it goes in a request for this provider-relative path; `None` where no way is for such.
    pub fn places(&self, path: &str) -> Option<&[Filled]> {
        let fits =
            |way: &&Way| way.path_prefix.as_ref().is_none_or(|prefix| path.starts_with(prefix.as_str()));
        self.0.iter().find(fits).map(|way| &*way.places)
    }
}

impl Filled {
    fn of(place: &Place, secret: &Secret) -> Self {
        let filled = |format: &Format| format.fill(secret).map_err(|why| format!("its secret {why}"));
        let filled = match place {
            Place::Query { name, value } => filled(value).map(|text| Self::Query(name.clone(), text)),
            Place::Header { name, value } => {
                filled(value).and_then(header).map(|value| Self::Header(name.clone(), value))
            }
        };
        filled.unwrap_or_else(Self::Unfit)
    }

    /// The header's name, where it is one.
    pub fn header(&self) -> Option<&HeaderName> {
        match self {
            Self::Header(name, _) => Some(name),
            Self::Query(..) | Self::Unfit(_) => None,
        }
    }
}

/// The text itself becomes the value, so that there is no copy to be wiped.
fn header(text: Zeroizing<String>) -> Result<HeaderValue, String> {
    let mut value = HeaderValue::from_maybe_shared(Bytes::from_owner(text))
        .map_err(|_| "it has characters that cannot stand in a header")?;
    value.set_sensitive(true);
    Ok(value)
}

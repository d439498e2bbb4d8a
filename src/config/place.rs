//! Where a key is put in.

use http::{HeaderName, header};
use serde::Deserialize;

use super::Format;

/// One way to put a key in: all of its places together.
#[derive(Debug, Clone, PartialEq)]
pub struct Injection {
    /// Only for provider-relative paths that start so.
    pub path_prefix: Option<String>,
    /// Where it goes, at least one.
    pub places: Vec<Place>,
}

/// Where a key goes.
#[derive(Debug, Clone, PartialEq)]
pub enum Place {
    /// A header.
    Header {
        /// Its name.
        name: HeaderName,
        /// Its value.
        value: Format,
    },
    /// A query parameter (percent-encoded value).
    Query {
        /// Its name.
        name: String,
        /// Its value, before it is encoded.
        value: Format,
    },
}

/// What sort of credential a secret is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// It goes where the provider's `inject` says.
    ApiKey,
    /// `Authorization: Bearer`.
    Bearer,
    /// `Authorization: Basic`, made of `user:password`.
    Basic,
}

impl Kind {
    /// The place that the kind alone decides.
    pub(super) fn place(self) -> Option<Place> {
        let value = match self {
            Self::ApiKey => return None,
            Self::Bearer => Format::bearer(),
            Self::Basic => Format::basic(),
        };
        Some(Place::Header { name: header::AUTHORIZATION, value })
    }
}

impl Place {
    /// What stands there.
    pub fn format(&self) -> &Format {
        match self {
            Self::Header { value, .. } | Self::Query { value, .. } => value,
        }
    }

    /// Its header's name, where it is one.
    pub fn header(&self) -> Option<&HeaderName> {
        match self {
            Self::Header { name, .. } => Some(name),
            Self::Query { .. } => None,
        }
    }

    /// Its query parameter's name, where it is one.
    pub fn query(&self) -> Option<&str> {
        match self {
            Self::Header { .. } => None,
            Self::Query { name, .. } => Some(name),
        }
    }
}

/// Every place of all of these ways.
pub fn places(all: &[Injection]) -> impl Iterator<Item = &Place> {
    all.iter().flat_map(|one| &one.places)
}

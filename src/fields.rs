//! The fields of a head, as every room that takes some out needs them. Nothing of ours is imported here.

use http::{HeaderMap, HeaderName};

/// Which of the fields that few requests have a head has, as it came: each room asks for some, and to look for one is
/// to pass over all.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Rare(u8);

impl Rare {
    pub(crate) const CONNECTION: Self = Self(1);
    pub(crate) const FETCH_SITE: Self = Self(1 << 1);
    pub(crate) const ORIGIN: Self = Self(1 << 2);
    pub(crate) const SUBPROTOCOL: Self = Self(1 << 3);
    pub(crate) const TE: Self = Self(1 << 4);
    pub(crate) const TRANSFER_ENCODING: Self = Self(1 << 5);
    pub(crate) const UPGRADE: Self = Self(1 << 6);
    /// Any that steers lessor.
    pub(crate) const OWN: Self = Self(1 << 7);

    /// Those of this head.
    pub(crate) fn of(headers: &HeaderMap) -> Self {
        headers.keys().fold(Self::default(), |rare, name| rare | Self::named(name.as_str()))
    }

    fn named(name: &str) -> Self {
        match name {
            "connection" => Self::CONNECTION,
            "sec-fetch-site" => Self::FETCH_SITE,
            "origin" => Self::ORIGIN,
            "sec-websocket-protocol" => Self::SUBPROTOCOL,
            "te" => Self::TE,
            "transfer-encoding" => Self::TRANSFER_ENCODING,
            "upgrade" => Self::UPGRADE,
            name if name.starts_with("x-lessor-") => Self::OWN,
            _ => Self::default(),
        }
    }

    /// Whether one of these is there.
    pub(crate) fn has(self, these: Self) -> bool {
        self.0 & these.0 != 0
    }
}

impl std::ops::BitOr for Rare {
    type Output = Self;

    fn bitor(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}

/// Whether a head has a field of this name: for those that few heads have. To compare a dozen names costs less than
/// to hash one.
pub(crate) fn has(headers: &HeaderMap, name: &HeaderName) -> bool {
    headers.keys().any(|known| known == name)
}

/// Removes every field whose name is one that `goes`; of those that stay it may be asked more than once.
///
/// A head has a dozen names, and there are dozens that must not pass: each that is there is looked at, and not
/// each that may be.
pub(crate) fn remove(headers: &mut HeaderMap, mut goes: impl FnMut(&str) -> bool) {
    while let Some(name) = headers.keys().find(|name| goes(name.as_str())).cloned() {
        headers.remove(name);
    }
}

#[cfg(test)]
mod tests {
    use http::HeaderValue;

    use super::*;

    #[test]
    fn each_rare_field_is_known_by_its_name_and_no_other_is() {
        for (name, rare) in [
            ("connection", Rare::CONNECTION),
            ("expect", Rare::default()),
            ("sec-fetch-site", Rare::FETCH_SITE),
            ("origin", Rare::ORIGIN),
            ("sec-websocket-protocol", Rare::SUBPROTOCOL),
            ("te", Rare::TE),
            ("transfer-encoding", Rare::TRANSFER_ENCODING),
            ("upgrade", Rare::UPGRADE),
            ("x-lessor-pool", Rare::OWN),
            ("x-lessor", Rare::default()),
            ("host", Rare::default()),
            ("content-length", Rare::default()),
        ] {
            let mut headers = HeaderMap::new();
            headers.append("accept", HeaderValue::from_static("*/*"));
            headers.append(HeaderName::from_static(name), HeaderValue::from_static("a"));
            assert_eq!(Rare::of(&headers), rare, "{name}");
        }
    }

    #[test]
    fn of_two_it_is_enough_that_one_is_there() {
        let both = Rare::ORIGIN | Rare::TE;
        assert!(both.has(Rare::TE) && Rare::TE.has(both) && !both.has(Rare::UPGRADE | Rare::OWN));
    }
}

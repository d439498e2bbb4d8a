//! What a secret is put in as: `Bearer {secret}`, `{secret.app_id}`, or the base64 of Basic.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use zeroize::Zeroizing;

use crate::model::Secret;

/// A text in which a secret, or parts of it, take their places.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Format(Vec<Piece>);

#[derive(Debug, Clone, PartialEq, Eq)]
enum Piece {
    Text(String),
    /// The whole secret.
    Whole,
    /// One of its named values.
    Part(String),
    /// The base64 of the whole (RFC 7617).
    Base64,
}

/// A secret that has not what a format asks for.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("has no part `{0}`, which `format` names")]
pub struct Unfilled(pub String);

impl Format {
    /// The secret as it is.
    pub(super) fn bare() -> Self {
        Self(vec![Piece::Whole])
    }

    /// `Bearer` and the secret.
    pub(super) fn bearer() -> Self {
        Self(vec![Piece::Text("Bearer ".into()), Piece::Whole])
    }

    /// `Basic` and the encoded secret.
    pub(super) fn basic() -> Self {
        Self(vec![Piece::Text("Basic ".into()), Piece::Base64])
    }

    /// Reads a format; else the rule that it breaks.
    pub(super) fn parse(text: &str) -> Result<Self, String> {
        if !text.bytes().all(|b| (b' '..=b'~').contains(&b)) {
            return Err("must be printable ASCII".into());
        }
        let mut pieces = Vec::new();
        let mut rest = text;
        while let Some((before, behind)) = rest.split_once('{') {
            // One that is not closed names nothing.
            let (name, behind) = behind.split_once('}').unwrap_or_default();
            if !before.is_empty() {
                pieces.push(Piece::Text(before.into()));
            }
            pieces.push(match name.strip_prefix("secret") {
                Some("") => Piece::Whole,
                Some(part) if part.len() > 1 && part.starts_with('.') => Piece::Part(part[1..].into()),
                _ => {
                    return Err(
                        "may have {secret}, or parts of one such as {secret.app_id}, and no other `{`".into(),
                    );
                }
            });
            rest = behind;
        }
        if !rest.is_empty() {
            pieces.push(Piece::Text(rest.into()));
        }
        let whole = pieces.iter().filter(|piece| **piece == Piece::Whole).count();
        let parts = pieces.iter().any(|piece| matches!(piece, Piece::Part(_)));
        match (whole, parts) {
            (1, false) | (0, true) => Ok(Self(pieces)),
            (1.., true) => Err("has {secret} and parts of it; a secret that has parts is no text".into()),
            _ => Err("must contain {secret} once".into()),
        }
    }

    /// The parts that it names.
    pub(super) fn parts(&self) -> impl Iterator<Item = &str> {
        self.0.iter().filter_map(|piece| match piece {
            Piece::Part(name) => Some(name.as_str()),
            _ => None,
        })
    }

    /// Whether it encodes a user and a password.
    pub(super) fn is_basic(&self) -> bool {
        self.0.contains(&Piece::Base64)
    }

    /// The text with `secret` in its places.
    pub fn fill(&self, secret: &Secret) -> Result<Zeroizing<String>, Unfilled> {
        // All room at once: a text that grows leaves copies behind that nobody wipes.
        let mut length = 0;
        for piece in &self.0 {
            length += match piece {
                Piece::Base64 => secret.expose().len().div_ceil(3) * 4,
                piece => piece.of(secret)?.len(),
            };
        }
        let mut text = Zeroizing::new(String::with_capacity(length));
        for piece in &self.0 {
            match piece {
                Piece::Base64 => STANDARD.encode_string(secret.expose(), &mut text),
                piece => text.push_str(piece.of(secret)?),
            }
        }
        Ok(text)
    }

    /// What of `secret` it shows, and in which form.
    pub(super) fn shows(&self, secret: &Secret) -> Vec<Zeroizing<String>> {
        let own = |text: &str| Zeroizing::new(text.to_owned());
        let mut all = Vec::new();
        for piece in &self.0 {
            match piece {
                Piece::Text(_) | Piece::Whole => {}
                Piece::Part(name) => all.extend(secret.expose_part(name).map(own)),
                Piece::Base64 => {
                    all.push(Zeroizing::new(STANDARD.encode(secret.expose())));
                    all.extend(secret.expose().split_once(':').map(|(_, password)| own(password)));
                }
            }
        }
        all
    }
}

impl Piece {
    fn of<'a>(&'a self, secret: &'a Secret) -> Result<&'a str, Unfilled> {
        match self {
            Self::Text(text) => Ok(text),
            Self::Whole | Self::Base64 => Ok(secret.expose()),
            Self::Part(name) => secret.expose_part(name).ok_or_else(|| Unfilled(name.clone())),
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a test that fails may panic
mod tests {
    use super::*;

    fn filled(format: &str, secret: &Secret) -> String {
        Format::parse(format).unwrap().fill(secret).unwrap().to_string()
    }

    #[test]
    fn a_secret_and_its_parts_take_their_places() {
        let whole = Secret::new("s3cret".into());
        assert_eq!(filled("Token {secret};v=1", &whole), "Token s3cret;v=1");
        assert_eq!(*Format::basic().fill(&Secret::new("me:pass".into())).unwrap(), "Basic bWU6cGFzcw==");
        let value = |text: &str| Zeroizing::new(text.to_owned());
        let parts = [("app_id".into(), value("a1")), ("app-key".into(), value("k2"))];
        let parts = Secret::of_parts(parts.into());
        assert_eq!(filled("{secret.app_id}/{secret.app-key}", &parts), "a1/k2");
        let none = Format::parse("{secret.other}").unwrap().fill(&parts);
        assert_eq!(none.unwrap_err(), Unfilled("other".into()));
    }

    #[test]
    fn what_would_put_in_no_secret_or_one_twice_is_no_format() {
        for bad in [
            "",
            "Token",
            "{secret}{secret}",
            "{secert}",
            "{secret.}",
            "{secret",
            "{secret}{secret.a}",
            "{}",
            "é{secret}",
        ] {
            assert!(Format::parse(bad).is_err(), "{bad}");
        }
    }
}

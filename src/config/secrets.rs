//! What a secret is made of: read from a variable, a file or a command, checked, and never repeated.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::io::Read as _;
use std::path::Path;

use serde::de::{self, Deserialize, Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};
use zeroize::Zeroizing;

use super::{Injection, places};
use crate::model::Secret;

/// The largest secret; a key is a line, and `/dev/zero` has no end.
pub(super) const LARGEST: u64 = 64 * 1024;

/// What the text that a source gives must be.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Shape {
    /// Its named values that are put in: it is a JSON object then.
    parts: BTreeSet<String>,
    /// It is a user and a password.
    basic: bool,
    /// The user, where it is the password alone.
    user: Option<String>,
}

impl Shape {
    /// As these ways need it to put it in; `user` stands beside it in the file.
    pub(super) fn of(inject: &[Injection], user: Option<String>) -> Self {
        let formats = || places(inject).map(super::Place::format);
        Self {
            parts: formats().flat_map(super::Format::parts).map(str::to_owned).collect(),
            basic: formats().any(super::Format::is_basic),
            user,
        }
    }

    /// Whether it is a user and a password.
    pub(super) fn is_basic(&self) -> bool {
        self.basic
    }

    /// Whether it is an object.
    pub(super) fn has_parts(&self) -> bool {
        !self.parts.is_empty()
    }

    /// Takes `text` as a secret, or says what is wrong with it without repeating it. Newlines at the end
    /// are no part of it: editors and `echo` add them.
    pub(super) fn take(&self, text: &str) -> Result<Secret, String> {
        if !self.parts.is_empty() {
            return self.take_parts(text);
        }
        let text = check(text)?;
        if !self.basic {
            return Ok(Secret::new(text.to_owned()));
        }
        match &self.user {
            Some(user) => Ok(Secret::new([user, text].join(":"))),
            None if text.contains(':') => Ok(Secret::new(text.to_owned())),
            None => Err("is no user:password, and no `user` stands beside it".into()),
        }
    }

    fn take_parts(&self, text: &str) -> Result<Secret, String> {
        // The parser's own words could repeat some of it.
        let mut said: BTreeMap<String, Part> =
            serde_json::from_str(text).map_err(|_| "is no JSON object, of which `format` names parts")?;
        let mut parts = BTreeMap::new();
        for name in &self.parts {
            let Some(Part(Some(value))) = said.remove(name) else {
                return Err(format!("has no text `{name}`, which `format` names"));
            };
            check(&value).map_err(|why| format!("has a part `{name}` that {why}"))?;
            parts.insert(name.clone(), value);
        }
        Ok(Secret::of_parts(parts))
    }
}

/// A value of an object; `None` where it is neither text nor a whole number.
struct Part(Option<Zeroizing<String>>);

impl<'de> Deserialize<'de> for Part {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct Any;
        impl<'de> Visitor<'de> for Any {
            type Value = Part;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a value")
            }
            fn visit_str<E: de::Error>(self, text: &str) -> Result<Part, E> {
                Ok(Part(Some(Zeroizing::new(text.to_owned()))))
            }
            fn visit_u64<E: de::Error>(self, number: u64) -> Result<Part, E> {
                Ok(Part(Some(Zeroizing::new(number.to_string()))))
            }
            fn visit_i64<E: de::Error>(self, _: i64) -> Result<Part, E> {
                Ok(Part(None))
            }
            fn visit_f64<E: de::Error>(self, _: f64) -> Result<Part, E> {
                Ok(Part(None))
            }
            fn visit_bool<E: de::Error>(self, _: bool) -> Result<Part, E> {
                Ok(Part(None))
            }
            fn visit_unit<E: de::Error>(self) -> Result<Part, E> {
                Ok(Part(None))
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Part, A::Error> {
                while seq.next_element::<IgnoredAny>()?.is_some() {}
                Ok(Part(None))
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Part, A::Error> {
                while map.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {}
                Ok(Part(None))
            }
        }
        from.deserialize_any(Any)
    }
}

/// The one line of `text`, if it can stand in a header.
fn check(text: &str) -> Result<&str, &'static str> {
    let text = text.trim_end_matches(['\n', '\r']);
    if text.is_empty() {
        return Err("is empty");
    }
    if text.starts_with([' ', '\t']) || text.ends_with([' ', '\t']) {
        return Err("begins or ends with a space");
    }
    if text.contains(['\n', '\r']) {
        return Err("holds more than one line");
    }
    if !text.bytes().all(|b| (0x20..0x7f).contains(&b)) {
        return Err("holds a character that cannot stand in a header");
    }
    Ok(text)
}

/// Reads a secret's file. The second value is a warning's text.
pub(super) fn read(path: &Path, shape: &Shape) -> Result<(Secret, Option<&'static str>), String> {
    let why = |e: std::io::Error| format!("cannot be read: {e}");
    let file = std::fs::File::open(path).map_err(why)?;
    let meta = file.metadata().map_err(why)?;
    let warning = warning(&file, &meta);
    let mut bytes = Zeroizing::new(Vec::new());
    file.take(LARGEST + 1).read_to_end(&mut bytes).map_err(why)?;
    if bytes.len() as u64 > LARGEST {
        return Err("is larger than 64 KiB, so no key".into());
    }
    let text = std::str::from_utf8(&bytes).map_err(|_| "is not text".to_owned())?;
    Ok((shape.take(text)?, warning))
}

#[cfg(unix)]
fn warning(file: &std::fs::File, meta: &std::fs::Metadata) -> Option<&'static str> {
    use std::os::unix::fs::PermissionsExt as _;
    let open = meta.is_file() && meta.permissions().mode() & 0o004 != 0;
    (open && !is_mounted(file, meta)).then_some("can be read by every user of this machine; chmod o-r it")
}

/// Whether it is mounted here as Kubernetes and Docker mount secrets: they are root's, and a user that is not root
/// reads them by the mode's last bits alone. Who sees them is told by who has the mount, and nobody here could change
/// the mode.
#[cfg(unix)]
pub(super) fn is_mounted(file: &std::fs::File, meta: &std::fs::Metadata) -> bool {
    use rustix::fs::{StatVfsMountFlags, fstatvfs};
    use std::os::unix::fs::MetadataExt as _;
    let read_only = |about: rustix::fs::StatVfs| about.f_flag.contains(StatVfsMountFlags::RDONLY);
    meta.uid() != rustix::process::geteuid().as_raw() && fstatvfs(file).is_ok_and(read_only)
}

#[cfg(not(unix))]
fn warning(_: &std::fs::File, _: &std::fs::Metadata) -> Option<&'static str> {
    None
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a test that fails may panic
mod tests {
    use super::*;

    fn taken(text: &str) -> Result<Secret, String> {
        Shape::default().take(text)
    }

    #[test]
    fn a_secret_is_one_line_that_fits_into_a_header() {
        assert_eq!(taken("sk-1\r\n").unwrap().expose(), "sk-1");
        assert_eq!(taken("two words").unwrap().expose(), "two words");
        for bad in ["", "\n", " sk", "sk ", "a\nb", "a\u{7f}", "a\tb", "é", "a\0"] {
            assert!(taken(bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn a_user_stands_beside_the_password_or_before_it() {
        let shape =
            |user: Option<&str>| Shape { basic: true, user: user.map(Into::into), ..Shape::default() };
        assert_eq!(shape(Some("me")).take("p:w\n").unwrap().expose(), "me:p:w");
        assert_eq!(shape(None).take("me:pw").unwrap().expose(), "me:pw");
        assert!(shape(None).take("pw").unwrap_err().contains("user"));
    }

    #[test]
    fn the_parts_of_a_secret_are_those_that_are_named_however_it_is_laid_out() {
        let shape = Shape { parts: ["id", "key"].map(Into::into).into(), ..Shape::default() };
        let one = shape.take(r#"{"key":"k\u0031","id":7,"other":{"a":[1,null]},"x":-1.5,"y":true}"#).unwrap();
        let two = shape.take("{\n  \"id\": \"7\",\n  \"key\": \"k1\"\n}\n").unwrap();
        assert_eq!((one.expose_part("id"), one.expose_part("key")), (Some("7"), Some("k1")));
        assert_eq!(one.expose_part("other"), None);
        assert_eq!(one.expose(), two.expose());
        for (bad, why) in [
            ("canary", "JSON object"),
            (r#"["canary"]"#, "JSON object"),
            (r#"{"id":"canary"}"#, "`key`"),
            (r#"{"id":"canary","key":["canary"]}"#, "`key`"),
            (r#"{"id":"canary","key":"a\nb"}"#, "more than one line"),
        ] {
            let said = shape.take(bad).unwrap_err();
            assert!(said.contains(why) && !said.contains("canary"), "{bad}: {said}");
        }
    }

    #[test]
    fn an_endless_file_is_no_secret() {
        assert!(read(Path::new("/dev/zero"), &Shape::default()).is_err());
    }
}

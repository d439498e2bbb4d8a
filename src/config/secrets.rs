//! Where a secret comes from: a variable or a file, read once, checked, and never repeated.

use std::io::Read as _;
use std::path::Path;

use crate::model::Secret;

/// The largest secret file; a key is a line, and `/dev/zero` has no end.
const LARGEST: u64 = 64 * 1024;

/// Takes `text` as a secret, or says what is wrong with it without repeating it. Newlines at the end
/// are no part of it: editors and `echo` add them.
pub(super) fn check(text: &str) -> Result<Secret, &'static str> {
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
    Ok(Secret::new(text.to_owned()))
}

/// Reads a secret's file. The second value is a warning's text.
pub(super) fn read(path: &Path) -> Result<(Secret, Option<&'static str>), String> {
    let why = |e: std::io::Error| format!("cannot be read: {e}");
    let file = std::fs::File::open(path).map_err(why)?;
    let meta = file.metadata().map_err(why)?;
    let mut bytes = zeroize::Zeroizing::new(Vec::new());
    file.take(LARGEST + 1).read_to_end(&mut bytes).map_err(why)?;
    if bytes.len() as u64 > LARGEST {
        return Err("is larger than 64 KiB, so no key".into());
    }
    let text = std::str::from_utf8(&bytes).map_err(|_| "is not text".to_owned())?;
    Ok((check(text)?, warning(&meta)))
}

#[cfg(unix)]
fn warning(meta: &std::fs::Metadata) -> Option<&'static str> {
    use std::os::unix::fs::PermissionsExt as _;
    (meta.is_file() && meta.permissions().mode() & 0o004 != 0)
        .then_some("can be read by every user of this machine; chmod o-r it")
}

#[cfg(not(unix))]
fn warning(_: &std::fs::Metadata) -> Option<&'static str> {
    None
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a test that fails may panic
mod tests {
    use super::*;

    #[test]
    fn a_secret_is_one_line_that_fits_into_a_header() {
        assert_eq!(check("sk-1\r\n").unwrap().expose(), "sk-1");
        assert_eq!(check("two words").unwrap().expose(), "two words");
        for bad in ["", "\n", " sk", "sk ", "a\nb", "a\u{7f}", "a\tb", "é", "a\0"] {
            assert!(check(bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn an_endless_file_is_no_secret() {
        assert!(read(Path::new("/dev/zero")).is_err());
    }
}

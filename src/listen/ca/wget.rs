//! wget's settings, with the bundle in them: a file for all to read, so nothing that is secret comes into it.

use std::io::{self, Read as _};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

/// The largest file of settings that is taken over.
const LARGEST: u64 = 1 << 20;
/// What a setting's name has in it where its value tells who somebody is, or what only he knows.
const PRIVATE: [&str; 6] = ["user", "passw", "login", "header", "postdata", "bodydata"];

/// The system's settings, which this file stands in for, and the `bundle`. `shared`: other users come to where it is
/// written.
pub(super) fn settings(bundle: &Path, shared: bool) -> String {
    let named = std::env::var_os("SYSTEM_WGETRC").filter(|path| !path.is_empty());
    let system = named.map_or_else(|| PathBuf::from("/etc/wgetrc"), PathBuf::from);
    let before = match public_text(&system, shared) {
        Ok(text) => text,
        // Where there is none, wget goes by its defaults.
        Err(cause) if cause.kind() == io::ErrorKind::NotFound => String::new(),
        Err(cause) => {
            tracing::warn!(file = %system.display(), %cause, "wget's settings are not taken over beside the CA");
            String::new()
        }
    };
    let (kept, left_out) = public_lines(&before);
    if left_out > 0 {
        tracing::warn!(file = %system.display(), left_out,
            "wget's settings are taken over beside the CA without their users, passwords and headers; \
             put those into ~/.wgetrc");
    }
    kept + &format!("ca_certificate = {}\n", bundle.display())
}

/// The text of a file that others may read, too: what they may not, is not copied for them.
fn public_text(path: &Path, shared: bool) -> io::Result<String> {
    let file = std::fs::File::open(path)?;
    let mut all_may = file.metadata()?.permissions().mode() & 0o004 != 0;
    if shared {
        // Also a directory on the way keeps them out.
        for dir in path.canonicalize()?.ancestors().skip(1) {
            all_may &= std::fs::metadata(dir)?.permissions().mode() & 0o001 != 0;
        }
    }
    if !all_may {
        return Err(io::Error::new(io::ErrorKind::PermissionDenied, "other users cannot read them"));
    }
    let mut text = String::new();
    file.take(LARGEST).read_to_string(&mut text)?;
    Ok(text)
}

/// The lines that may be read by all, without the certificates, and how many may not.
fn public_lines(text: &str) -> (String, usize) {
    let (mut kept, mut left_out) = (String::new(), 0);
    for line in text.lines() {
        let (name, value) = line.split_once('=').unwrap_or((line, ""));
        // wget takes no notice of case, `-` and `_`.
        let name: String = name.chars().filter(|c| !"-_ \t".contains(*c)).collect::<String>().to_lowercase();
        if name == "cacertificate" {
            continue;
        }
        // A comment may be a setting that somebody has switched off; and a proxy's URL may have a password.
        let private = PRIVATE.iter().any(|word| name.contains(word)) && name != "useragent";
        if private || value.contains('@') {
            left_out += usize::from(!name.starts_with('#'));
            continue;
        }
        kept.push_str(line);
        kept.push('\n');
    }
    (kept, left_out)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a test that fails may panic
mod tests {
    use super::*;

    #[test]
    fn what_tells_a_user_or_a_password_is_not_copied_and_the_rest_is() {
        let kept =
            "# usual\ntries = 3\nuser_agent = by the system\npassive_ftp = on\nhttps_proxy = http://p:3128\n";
        let private = "\
password = canary
  HTTP-Password=canary
http_user = canary
httppasswd = canary
ftp_password=canary
proxy_user = canary
proxy_passwd = canary
login = canary
header = Authorization: Basic canary
Header=X-Api-Key: canary
post_data = canary
http_proxy = http://canary:canary@p:3128
#password = canary
";
        let (text, left_out) = public_lines(&format!("{private}{kept}CA-Certificate = /none.pem\n"));
        assert_eq!((text.as_str(), left_out), (kept, 12));
    }

    #[test]
    fn a_file_that_others_cannot_read_is_not_copied() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("wgetrc");
        let mode = |path: &Path, bits| {
            std::fs::set_permissions(path, std::fs::Permissions::from_mode(bits)).unwrap();
        };
        std::fs::write(&file, "tries = 3\n").unwrap();
        mode(&file, 0o644);
        mode(dir.path(), 0o700);
        assert_eq!(public_text(&file, false).unwrap(), "tries = 3\n", "into a directory as closed");
        assert!(public_text(&file, true).is_err(), "others cannot come to it");
        mode(dir.path(), 0o755);
        assert_eq!(public_text(&file, true).unwrap(), "tries = 3\n");
        mode(&file, 0o640);
        assert!(public_text(&file, true).is_err() && public_text(&file, false).is_err());
    }
}

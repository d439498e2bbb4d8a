//! What an error of Redis means, by its code.

use std::sync::Arc;

use redis::{ErrorKind, RedisError, ServerErrorKind};

use crate::words::of_tls;

/// What to do about an error.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Verdict {
    /// The script is not cached: send its text.
    NoScript,
    /// The connection is gone; the call may have run.
    Broken,
    /// This node takes no writes: find the one that does. The call did not run.
    WrongNode,
    /// Not now, soon perhaps. The call did not run.
    NotNow,
    /// Refused until somebody acts. The call did not run.
    Refused(String),
    /// Redis says that lessor is set up wrongly. The call did not run.
    Misconfigured(String),
}

/// The codes that need words; Redis before 7 puts a script's error code inside the text.
const CODES: [&str; 13] = [
    "OOM",
    "NOREPLICAS",
    "MISCONF",
    "NOPERM",
    "NOAUTH",
    "WRONGPASS",
    "WRONGTYPE",
    "READONLY",
    "MASTERDOWN",
    "LOADING",
    "TRYAGAIN",
    "CLUSTERDOWN",
    "BUSY",
];

pub(super) fn judge(error: &RedisError) -> Verdict {
    if let Some(why) = distrust(error) {
        return Verdict::Misconfigured(format!(
            "the certificate that redis shows is not trusted ({why}); set store.ca_file to the CA that signed it, and \
             name the host in store.url as the certificate does"
        ));
    }
    if let Some(what) = unfit(error) {
        return Verdict::Misconfigured(what.into());
    }
    match error.kind() {
        ErrorKind::Server(ServerErrorKind::NoScript) => Verdict::NoScript,
        ErrorKind::InvalidClientConfig | ErrorKind::MasterNameNotFoundBySentinel => {
            Verdict::Misconfigured(error.to_string())
        }
        ErrorKind::Io | ErrorKind::Parse | ErrorKind::ClusterConnectionNotFound => Verdict::Broken,
        ErrorKind::AuthenticationFailed => by_code("WRONGPASS", error),
        ErrorKind::Server(ServerErrorKind::NoPerm) => by_code("NOPERM", error),
        _ => by_code(code_of(error).unwrap_or_default(), error),
    }
}

/// What the server is not, or has not, that lessor needs: its first answers tell.
fn unfit(error: &RedisError) -> Option<&'static str> {
    let detail = error.detail().unwrap_or_default();
    let no_hello = || detail.starts_with("unknown command") && detail.contains("HELLO");
    if error.kind() == ErrorKind::RESP3NotSupported || error.code() == Some("NOPROTO") || no_hello() {
        return Some(
            "redis speaks no RESP3, which lessor needs: use Redis 6 or later, or Valkey, without a proxy that lacks it",
        );
    }
    detail.contains("DB index is out of range").then_some(
        "redis has no database of the number that stands behind the / of store.url; name a smaller one, or raise its \
         `databases` (16 where nothing is set)",
    )
}

/// Why the server's certificate is not trusted, where that is the error.
fn distrust(error: &RedisError) -> Option<String> {
    let mut next: Option<&(dyn std::error::Error + 'static)> = Some(error);
    while let Some(error) = next {
        if let Some(rustls::Error::InvalidCertificate(why)) = error.downcast_ref() {
            return Some(of_tls(&why.to_string()));
        }
        // Both of these stand for what they hold: their source is that one's source.
        let shared = error.downcast_ref::<Arc<dyn std::error::Error + Send + Sync>>();
        let held = error.downcast_ref::<std::io::Error>().and_then(std::io::Error::get_ref);
        next = shared.map(|it| &**it as _).or_else(|| held.map(|it| it as _)).or_else(|| error.source());
    }
    None
}

fn code_of(error: &RedisError) -> Option<&'static str> {
    let code = error.code().unwrap_or_default();
    if let Some(known) = CODES.into_iter().find(|known| *known == code) {
        return Some(known);
    }
    // A pipeline's error has its commands' errors in its text alone.
    let text = error.to_string();
    let detail = error.detail().unwrap_or(&text);
    // So says Redis 7 where a script lacks a right.
    if detail.contains("The user executing the script can't") {
        return Some("NOPERM");
    }
    CODES.into_iter().find(|known| detail.split(|c: char| !c.is_ascii_uppercase()).any(|word| word == *known))
}

/// So says Redis, in one wording or another, where a pattern of keys lacks and not a command.
fn is_about_keys(detail: &str) -> bool {
    let detail = detail.to_ascii_lowercase();
    detail.contains("no permissions to access") && detail.contains("key")
}

fn by_code(code: &str, error: &RedisError) -> Verdict {
    match code {
        "READONLY" | "MASTERDOWN" => Verdict::WrongNode,
        "LOADING" | "TRYAGAIN" | "CLUSTERDOWN" | "BUSY" => Verdict::NotNow,
        "OOM" => Verdict::Refused(
            "redis is out of memory (OOM); raise its maxmemory, with maxmemory-policy noeviction".into(),
        ),
        "NOREPLICAS" => Verdict::Refused(
            "redis has fewer replicas than its min-replicas-to-write (NOREPLICAS) and takes no writes".into(),
        ),
        "MISCONF" => Verdict::Refused(
            "redis cannot save to its disk and takes no writes (MISCONF); see its log".into(),
        ),
        "NOPERM" if error.detail().is_some_and(is_about_keys) => Verdict::Misconfigured(format!(
            "the redis user lacks the right to the keys under store.prefix (NOPERM): give it `~PREFIX:*` and \
             `&PREFIX:events`, as the ACL line of the README does for the prefix lessor: {error}"
        )),
        "NOPERM" => Verdict::Misconfigured(format!(
            "the redis user lacks a right that lessor needs (NOPERM); the README has the ACL line: {error}"
        )),
        "NOAUTH" | "WRONGPASS" => Verdict::Misconfigured(
            "redis refused the user or the password; see store.username and store.password".into(),
        ),
        "WRONGTYPE" => Verdict::Misconfigured(
            "a key under store.prefix holds something that is not lessor's (WRONGTYPE); give lessor a \
             store.prefix or a database of its own"
                .into(),
        ),
        _ => Verdict::Misconfigured(format!("redis refused a call: {error}")),
    }
}

/// The last words of a call that could not be made in its time.
pub(super) fn in_words(error: &RedisError) -> String {
    match judge(error) {
        Verdict::Refused(text) | Verdict::Misconfigured(text) => text,
        Verdict::WrongNode => "redis answers as a read-only replica; does store.url name the primary?".into(),
        Verdict::NotNow => format!("redis is not ready: {error}"),
        Verdict::Broken if error.kind() == ErrorKind::Parse => {
            "what answers there is no Redis, or its TLS port (then the URL is rediss://); see store.url"
                .into()
        }
        Verdict::Broken | Verdict::NoScript => error.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(code: &str, detail: &str) -> RedisError {
        redis::make_extension_error(code.into(), Some(detail.into()))
    }

    #[test]
    fn each_code_has_its_verdict_also_where_a_script_wraps_it() {
        for code in ["LOADING", "TRYAGAIN", "CLUSTERDOWN", "BUSY"] {
            assert_eq!(judge(&error(code, "wait")), Verdict::NotNow);
        }
        for code in ["READONLY", "MASTERDOWN"] {
            assert_eq!(judge(&error(code, "no")), Verdict::WrongNode);
            let wrapped = format!("Error running script (call to f_1): @user_script:1: -{code} no");
            assert_eq!(judge(&error("ERR", &wrapped)), Verdict::WrongNode);
        }
        for code in ["OOM", "NOREPLICAS", "MISCONF"] {
            assert!(matches!(judge(&error(code, "no")), Verdict::Refused(text) if text.contains(code)));
        }
        for code in ["NOPERM", "NOAUTH", "WRONGPASS", "WRONGTYPE", "ERR"] {
            assert!(matches!(judge(&error(code, "no")), Verdict::Misconfigured(_)));
        }
        let broken = RedisError::from(std::io::Error::from(std::io::ErrorKind::BrokenPipe));
        assert_eq!(judge(&broken), Verdict::Broken);
    }
}

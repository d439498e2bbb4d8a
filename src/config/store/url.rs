//! A store's URL taken apart. No rule that is told repeats any of it, for it may hold a password anywhere.

use super::{HostPort, RedisConfig, Topology};
use crate::config::values;
use crate::model::Secret;

/// How each kind is written, for messages.
const FORMS: &str = "must be \"memory:\", \"sqlite:///path\", \"redis://host\", \
     \"redis-sentinel://host1,host2/primary\" or \"redis-cluster://host1,host2\" (with TLS rediss…)";

/// A URL taken apart.
pub(super) enum Parsed {
    Memory,
    Sqlite(String),
    Redis(RedisConfig),
}

/// What is wrong with a URL: the rule, which repeats nothing of it, and the kind where that is what nobody
/// knows.
pub(super) struct Wrong {
    pub(super) rule: String,
    pub(super) kind: Option<String>,
}

impl From<&str> for Wrong {
    fn from(rule: &str) -> Self {
        Self { rule: rule.into(), kind: None }
    }
}

/// The kinds of URL.
pub(super) const KINDS: &[&str] = &[
    "memory",
    "sqlite",
    "redis",
    "rediss",
    "redis-sentinel",
    "rediss-sentinel",
    "redis-cluster",
    "rediss-cluster",
];

#[derive(Clone, Copy, PartialEq, Eq)]
enum Shape {
    Single,
    Sentinel,
    Cluster,
}

/// Takes a URL apart.
pub(super) fn parse(text: &str) -> Result<Parsed, Wrong> {
    let Some((kind, rest)) = text.split_once(':') else { return Err(FORMS.into()) };
    let (tls, shape) = match kind {
        "memory" if rest.is_empty() => return Ok(Parsed::Memory),
        "memory" => return Err("must be \"memory:\", with nothing behind it".into()),
        "sqlite" => return sqlite(rest).map(Parsed::Sqlite).map_err(Into::into),
        "redis" => (false, Shape::Single),
        "rediss" => (true, Shape::Single),
        "redis-sentinel" => (false, Shape::Sentinel),
        "rediss-sentinel" => (true, Shape::Sentinel),
        "redis-cluster" => (false, Shape::Cluster),
        "rediss-cluster" => (true, Shape::Cluster),
        "valkey" | "valkeys" => {
            return Err(
                "must be of kind redis: or rediss: also where the server is Valkey, which speaks the same"
                    .into(),
            );
        }
        _ => return Err(Wrong { rule: FORMS.into(), kind: Some(kind.into()) }),
    };
    let Some(rest) = rest.strip_prefix("//") else {
        return Err("must have // behind its kind, such as \"redis://host:6379\"".into());
    };
    redis(kind, tls, shape, rest).map(Parsed::Redis).map_err(Into::into)
}

fn sqlite(rest: &str) -> Result<String, &'static str> {
    let path = match rest.strip_prefix("//") {
        Some(path) if path.starts_with('/') => path,
        Some(_) => return Err("must be \"sqlite:///absolute/path\" or \"sqlite:relative/path\""),
        None => rest,
    };
    if path == ":memory:" {
        return Err("must be a file that others can open; for this process alone use \"memory:\"");
    }
    if path.is_empty() || path.ends_with('/') || path.contains('\0') {
        return Err("names no file, must be such as \"sqlite:///var/lib/lessor/state.db\"");
    }
    if path.contains(['?', '#']) {
        return Err("must be a path alone, without ? or # and options behind it");
    }
    Ok(path.to_owned())
}

fn redis(kind: &str, tls: bool, shape: Shape, rest: &str) -> Result<RedisConfig, &'static str> {
    if rest.contains(['?', '#']) {
        return Err("must have no ? and no #: options are fields of [store], and in a password these are \
                    written %3F and %23");
    }
    let (authority, path) = rest.split_once('/').unwrap_or((rest, ""));
    if path.contains('@') {
        return Err("has an @ behind its first /: in a password / is written %2F, and @ is written %40");
    }
    let (username, password, hosts) = match authority.rsplit_once('@') {
        Some((user, hosts)) => {
            let (username, password) = credentials(user)?;
            (username, password, hosts)
        }
        None => (None, None, authority),
    };
    let port = if shape == Shape::Sentinel { 26379 } else { 6379 };
    let mut all: Vec<HostPort> = Vec::new();
    for text in hosts.split(',') {
        let at = host_port(text, port)?;
        if all.contains(&at) {
            return Err("names a server twice");
        }
        all.push(at);
    }
    let (topology, db) = match (shape, path.split_once('/')) {
        (Shape::Sentinel, split) => {
            let (primary, db) = split.unwrap_or((path, ""));
            let named = |b: u8| b.is_ascii_alphanumeric() || b"._-".contains(&b);
            if primary.is_empty() || !primary.bytes().all(named) {
                return Err("must name the primary as the sentinels do, such as \
                            \"redis-sentinel://host1,host2/primary\"");
            }
            (Topology::Sentinel { sentinels: all, primary: primary.into() }, db)
        }
        (_, Some(_)) => return Err("must have no more than a database's number behind its first /"),
        (Shape::Cluster, None) => (Topology::Cluster(all), path),
        (Shape::Single, None) => {
            let [at] = <[HostPort; 1]>::try_from(all).map_err(
                |_| "names several servers, must be of kind redis-sentinel: or redis-cluster: then",
            )?;
            (Topology::Single(at), path)
        }
    };
    let db = match db {
        "" => 0,
        digits if digits.bytes().all(|b| b.is_ascii_digit()) && digits.len() <= 9 => {
            digits.parse().map_err(|_| DATABASE)?
        }
        _ => return Err(DATABASE),
    };
    if db != 0 && shape == Shape::Cluster {
        return Err("must name no database but 0: a cluster has no other");
    }
    let shown = shown_url(kind, &topology, db);
    Ok(RedisConfig {
        topology,
        tls,
        ca_file: None,
        db,
        username,
        password,
        sentinel_username: None,
        sentinel_password: None,
        shown,
    })
}

const DATABASE: &str = "must name its database by a number, such as \"redis://host/2\"";

/// The URL without credentials.
fn shown_url(kind: &str, topology: &Topology, db: i64) -> String {
    let hosts: Vec<String> = topology.hosts().iter().map(ToString::to_string).collect();
    let mut url = format!("{kind}://{}", hosts.join(","));
    if let Topology::Sentinel { primary, .. } = topology {
        url = format!("{url}/{primary}");
    }
    if db != 0 {
        url = format!("{url}/{db}");
    }
    url
}

/// `user:password`, `:password` or `user`, percent-encoded.
fn credentials(text: &str) -> Result<(Option<String>, Option<Secret>), &'static str> {
    let (user, password) = match text.split_once(':') {
        Some((user, password)) => (user, Some(password)),
        None => (text, None),
    };
    let read = |part: &str| -> Result<Option<String>, &'static str> {
        if part.is_empty() {
            return Ok(None);
        }
        decoded(part).map(Some).ok_or("has a user or password that is not percent-encoded text")
    };
    let (user, password) = (read(user)?, read(password.unwrap_or_default())?);
    Ok((user, password.map(Secret::new)))
}

/// Percent-decodes; `None` for a `%` without two digits, and for what is no text.
fn decoded(text: &str) -> Option<String> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.bytes();
    while let Some(byte) = rest.next() {
        if byte != b'%' {
            bytes.push(byte);
            continue;
        }
        let mut digit = || char::from(rest.next()?).to_digit(16);
        let value = digit()? * 16 + digit()?;
        bytes.push(u8::try_from(value).ok()?);
    }
    String::from_utf8(bytes).ok()
}

/// `host`, `host:port`, `[IPv6]` or `[IPv6]:port`.
fn host_port(text: &str, default: u16) -> Result<HostPort, &'static str> {
    const RULE: &str = "must name its servers as host or host:port, with IPv6 in brackets";
    let (host, behind) = if let Some(rest) = text.strip_prefix('[') {
        let (ip, behind) = rest.split_once(']').ok_or(RULE)?;
        ip.parse::<std::net::Ipv6Addr>().map_err(|_| RULE)?;
        (ip.to_ascii_lowercase(), behind)
    } else {
        let (host, behind) = text.split_at(text.find(':').unwrap_or(text.len()));
        (values::host(host).ok_or(RULE)?, behind)
    };
    if behind.is_empty() {
        return Ok(HostPort { host, port: default });
    }
    let digits = behind.strip_prefix(':').filter(|port| port.bytes().all(|b| b.is_ascii_digit()));
    let port = digits.and_then(|digits| digits.parse().ok()).filter(|port| *port != 0).ok_or(RULE)?;
    Ok(HostPort { host, port })
}

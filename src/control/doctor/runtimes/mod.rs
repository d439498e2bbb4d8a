//! Whether each runtime of this machine trusts the local CA, with the environment that `lessor env` prints.
//!
//! Each is a real client of that runtime, which asks for a provider's host over https. The request names a
//! pool that is none, so lessor answers it itself: no key is lent, no provider is asked, and who answered is
//! plain from the answer's `X-Lessor-Error`. Nothing is written to a disk: a program comes as an argument or
//! from memory. Who is not found in `PATH` is told as such.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::PathBuf;
use std::process::Stdio;
use std::time::Duration;

use futures_util::StreamExt as _;
use serde::Deserialize;
use tokio::io::{AsyncRead, AsyncReadExt as _};
use tokio::process::Command;
use tokio::time::timeout;

use super::{Check, line};
use crate::control::environment::Changes;

/// The bound of one runtime; a JVM that compiles its program on a busy machine takes some seconds.
const EACH: Duration = Duration::from_secs(14);
/// The bound of all.
const ALL: Duration = Duration::from_secs(30);
/// Runtimes at once.
const AT_ONCE: usize = 3;
/// Bytes that are read of what one says.
const SAYS: u64 = 64 * 1024;
/// What makes lessor answer by itself: no pool has this name.
const PROBE: (&str, &str) = ("x-lessor-pool", "lessor-doctor.no-such-pool");
/// What it says to that inside the tunnel, to an app or to whom it does not know. Another code is a refusal of
/// the CONNECT, which proves no trust.
const PROBED: [&str; 2] = ["unknown_provider", "app_forbidden"];

/// One runtime, and how it is asked.
struct Runtime {
    /// Its programs, the first that is found is taken.
    programs: &'static [&'static str],
    /// What it is called in the checks.
    name: &'static str,
    /// Its arguments, in which `URL`, `NAME`, `VALUE`, `PROXY`, `HOST` and `AUTHORITY` are filled in.
    args: &'static [&'static str],
    /// What it reads from standard input.
    input: &'static str,
    reads: Reads,
    /// What it reads its trust from.
    variable: &'static str,
}

/// How it says what it found.
#[derive(Clone, Copy)]
enum Reads {
    /// The answer's head, on either output; it ends so where there was an answer.
    Head(i32),
    /// JSON lines of our own making.
    Lines,
    /// A handshake that was verified, by its exit code.
    Handshake,
}

const RUNTIMES: &[Runtime] = &[
    Runtime {
        programs: &["curl"],
        name: "curl",
        args: &[
            "--silent",
            "--show-error",
            "--max-time",
            "10",
            "--output",
            "/dev/null",
            "--suppress-connect-headers",
            "--dump-header",
            "-",
            "--header",
            "NAME: VALUE",
            "URL",
        ],
        input: "",
        reads: Reads::Head(0),
        variable: "CURL_CA_BUNDLE",
    },
    Runtime {
        programs: &["python3", "python"],
        name: "python",
        args: &["-c", include_str!("python.py"), "URL", "NAME", "VALUE"],
        input: "",
        reads: Reads::Lines,
        variable: "SSL_CERT_FILE, for requests REQUESTS_CA_BUNDLE",
    },
    Runtime {
        programs: &["node"],
        name: "node",
        args: &["-e", include_str!("node.js"), "URL", "NAME", "VALUE"],
        input: "",
        reads: Reads::Lines,
        variable: "NODE_EXTRA_CA_CERTS",
    },
    Runtime {
        programs: &["java"],
        name: "java",
        args: &[
            "-XX:TieredStopAtLevel=1",
            "-XX:-UsePerfData",
            "--source",
            "11",
            "/dev/stdin",
            "URL",
            "NAME",
            "VALUE",
        ],
        input: include_str!("Doctor.java"),
        reads: Reads::Lines,
        variable: "JAVA_TOOL_OPTIONS with -Djavax.net.ssl.trustStore",
    },
    Runtime {
        programs: &["wget"],
        name: "wget",
        args: &[
            "--no-verbose",
            "--server-response",
            "--no-hsts",
            "--tries=1",
            "--timeout=8",
            "--output-document=/dev/null",
            "--header=NAME: VALUE",
            "URL",
        ],
        input: "",
        reads: Reads::Head(8),
        variable: "SYSTEM_WGETRC",
    },
    Runtime {
        programs: &["openssl"],
        name: "openssl",
        args: &[
            "s_client",
            "-brief",
            "-proxy",
            "PROXY",
            "-connect",
            "AUTHORITY",
            "-servername",
            "HOST",
            "-verify_hostname",
            "HOST",
            "-verify_return_error",
        ],
        input: "",
        reads: Reads::Handshake,
        variable: "SSL_CERT_FILE",
    },
];

/// What is asked for.
pub(super) struct Asked<'a> {
    /// A provider's host, with its port where that is not 443.
    pub(super) authority: String,
    /// The proxy, without its password.
    pub(super) proxy: String,
    /// The environment of a child.
    pub(super) changes: &'a Changes,
    /// Whether the proxy wants a password.
    pub(super) password: bool,
    /// What is to be trusted.
    pub(super) bundle: String,
}

/// What one of a runtime's clients says.
#[derive(Debug, Default, Deserialize)]
struct Said {
    way: String,
    #[serde(default)]
    version: String,
    /// lessor's code in the answer; empty where it was another's.
    code: Option<String>,
    #[serde(default)]
    absent: bool,
    error: Option<String>,
}

/// Asks with every runtime that is found.
pub(super) async fn examine(asked: &Asked<'_>) -> Vec<Check> {
    let each = RUNTIMES.iter().map(|runtime| runtime.examine(asked));
    let each = futures_util::stream::iter(each).buffered(AT_ONCE).take_until(tokio::time::sleep(ALL));
    let done: Vec<Vec<Check>> = each.collect().await;
    let left = RUNTIMES[done.len()..].iter().map(|runtime| {
        let advice = "ask again when this machine is less busy";
        Check::warn(format!("trust {}", runtime.name), format!("not tried within {ALL:?}"), advice)
    });
    let go = found("go", asked.changes).map(|_| {
        let why = "not tried, for building a program writes to the disk; Go's programs read SSL_CERT_FILE";
        Check::skip("trust go", why)
    });
    let go = go.unwrap_or_else(|| Check::skip("trust go", "go is not in PATH"));
    done.into_iter().flatten().chain(left).chain([go]).collect()
}

/// Where a program is.
fn found(program: &str, changes: &Changes) -> Option<PathBuf> {
    use std::os::unix::fs::PermissionsExt as _;
    let path = changes.set.get("PATH").map(OsString::from).or_else(|| std::env::var_os("PATH"))?;
    std::env::split_paths(&path).map(|dir| dir.join(program)).find(|file| {
        std::fs::metadata(file).is_ok_and(|about| about.is_file() && about.permissions().mode() & 0o111 != 0)
    })
}

impl Runtime {
    async fn examine(&self, asked: &Asked<'_>) -> Vec<Check> {
        let name = format!("trust {}", self.name);
        let Some(program) = self.programs.iter().find_map(|program| found(program, asked.changes)) else {
            return vec![Check::skip(name, format!("{} is not in PATH", self.programs.join(" or ")))];
        };
        if matches!(self.reads, Reads::Handshake) && asked.password {
            return vec![Check::skip(
                name,
                "not tried, for the proxy's password would show in its arguments",
            )];
        }
        match timeout(EACH, self.run(program.clone(), asked)).await {
            Ok(Ok((ended, out))) => self.judge(asked, ended, &out),
            Ok(Err(error)) => {
                vec![Check::warn(
                    name,
                    format!("{} cannot be run: {error}", program.display()),
                    "see whether it is whole",
                )]
            }
            Err(_) => vec![Check::warn(
                name,
                format!("said nothing within {EACH:?}"),
                "see whether it starts at all, and what its own settings (a configuration file, say) add",
            )],
        }
    }

    /// How it ended, and both its outputs. Dropped, it is killed.
    async fn run(&self, program: PathBuf, asked: &Asked<'_>) -> std::io::Result<(Option<i32>, String)> {
        let host = asked.authority.rsplit_once(':').map_or(&*asked.authority, |(host, _)| host);
        let address =
            if asked.authority.contains(':') { asked.authority.clone() } else { format!("{host}:443") };
        let url = format!("https://{}/lessor-doctor", asked.authority);
        let filled = self.args.iter().map(|arg| match *arg {
            "URL" => url.clone(),
            "NAME" => PROBE.0.into(),
            "VALUE" => PROBE.1.into(),
            "PROXY" => asked.proxy.clone(),
            "HOST" => host.into(),
            "AUTHORITY" => address.clone(),
            other => other.replace("NAME: VALUE", &format!("{}: {}", PROBE.0, PROBE.1)),
        });
        let mut command = Command::new(program);
        command.args(filled).envs(&asked.changes.set).env("PYTHONDONTWRITEBYTECODE", "1");
        for name in &asked.changes.unset {
            command.env_remove(name);
        }
        command.stdin(spoken(self.input)?).stdout(Stdio::piped()).stderr(Stdio::piped()).kill_on_drop(true);
        let mut child = command.spawn()?;
        let (out, err) = (child.stdout.take(), child.stderr.take());
        let (out, err) = tokio::join!(read(out), read(err));
        let ended = child.wait().await?.code();
        Ok((ended, out + "\n" + &err))
    }

    fn judge(&self, asked: &Asked<'_>, ended: Option<i32>, out: &str) -> Vec<Check> {
        let way = self.name.to_owned();
        let last =
            || out.lines().rev().find(|line| !line.trim().is_empty()).unwrap_or("it said nothing").to_owned();
        let one = |said: Said| vec![self.check(asked, &said)];
        match self.reads {
            Reads::Handshake if ended == Some(0) => {
                one(Said { way, code: Some(PROBED[0].into()), ..Said::default() })
            }
            Reads::Handshake => {
                let why = out.lines().find(|line| line.contains("verify error"));
                one(Said { way, error: Some(why.map_or_else(last, str::to_owned)), ..Said::default() })
            }
            Reads::Head(answered) if ended == Some(answered) || ended == Some(0) => {
                let field = |line: &str| {
                    let (name, value) = line.split_once(':')?;
                    name.trim().eq_ignore_ascii_case("x-lessor-error").then(|| value.trim().to_owned())
                };
                let code = out.lines().rev().find_map(field).unwrap_or_default();
                one(Said { way, code: Some(code), ..Said::default() })
            }
            Reads::Head(_) => {
                let why = out.lines().find(|line| line.starts_with("curl: ") || line.starts_with("ERROR: "));
                one(Said { way, error: Some(why.map_or_else(last, str::to_owned)), ..Said::default() })
            }
            Reads::Lines => {
                let lines = out.lines().filter_map(|line| serde_json::from_str::<Said>(line).ok());
                let checks: Vec<_> = lines.map(|said| self.check(asked, &said)).collect();
                if checks.is_empty() { self.said_nothing(&way, out, &last()) } else { checks }
            }
        }
    }

    /// A program of ours did not come to its end.
    fn said_nothing(&self, way: &str, out: &str, last: &str) -> Vec<Check> {
        let name = format!("trust {way}");
        // A runtime without its compiler cannot run a source.
        if self.name == "java" && (out.contains("jdk.compiler") || out.contains("--source")) {
            return vec![Check::skip(name, "not tried: this Java cannot run a program from its source")];
        }
        vec![Check::warn(
            name,
            format!("the trial ended with: {}", line(last)),
            "see whether this runtime is whole",
        )]
    }

    fn check(&self, asked: &Asked<'_>, said: &Said) -> Check {
        let name = format!("trust {}", said.way);
        let version = if said.version.is_empty() { String::new() } else { format!("{}: ", said.version) };
        if said.absent {
            return Check::skip(name, "not installed there");
        }
        let why = match (said.code.as_deref(), &said.error) {
            (Some(code), _) if PROBED.contains(&code) => {
                return Check::ok(name, format!("{version}verified, and answered by lessor"));
            }
            (Some(""), _) => {
                let though = if self.name == "node" { ", though it trusts its CA" } else { "" };
                return Check::warn(name, format!("{version}goes around lessor{though}"), self.around());
            }
            (Some(code), _) => format!("the tunnel was refused: {code}"),
            (None, error) => error.clone().unwrap_or_else(|| "it did not say why".into()),
        };
        self.failed(asked, name, format!("{version}{}", line(&why)))
    }

    /// What to do where it does not trust.
    fn failed(&self, asked: &Asked<'_>, name: String, found: String) -> Check {
        let Asked { bundle, .. } = asked;
        match self.name {
            "java" if asked.password => {
                let advice = "Java sends no proxy password by itself: use a base URL, or an Authenticator";
                Check::warn(name, found, advice)
            }
            _ => {
                let advice = format!(
                    "it must trust {bundle}, which {} names: see that this file can be read, and that no setting \
                     of the runtime's own says otherwise",
                    self.variable
                );
                Check::fail(name, found, advice)
            }
        }
    }

    /// What makes it use the proxy.
    fn around(&self) -> &'static str {
        match self.name {
            "node" => {
                "fetch reads NODE_USE_ENV_PROXY from Node 22.21 and 24 on; with an older one use the base URL, or \
                 undici's EnvHttpProxyAgent"
            }
            "java" => {
                "JAVA_TOOL_OPTIONS must hold what `lessor env` prints: --override replaces another proxy"
            }
            _ => "HTTPS_PROXY and NO_PROXY must be what `lessor env` prints: --override replaces others",
        }
    }
}

/// What a program reads from standard input. A file, for Java reads its source twice; in memory, for none is
/// left on a disk.
#[cfg(target_os = "linux")]
fn spoken(text: &str) -> std::io::Result<Stdio> {
    use std::io::{Seek as _, Write as _};
    if text.is_empty() {
        return Ok(Stdio::null());
    }
    let memory = rustix::fs::memfd_create("lessor-doctor", rustix::fs::MemfdFlags::CLOEXEC)?;
    let mut file = std::fs::File::from(memory);
    file.write_all(text.as_bytes())?;
    file.rewind()?;
    Ok(file.into())
}

/// What a program reads from standard input.
#[cfg(not(target_os = "linux"))]
fn spoken(text: &str) -> std::io::Result<Stdio> {
    if text.is_empty() { Ok(Stdio::null()) } else { Err(std::io::ErrorKind::Unsupported.into()) }
}

/// All that comes, up to a bound; what is beyond it is read and dropped, so that nobody waits.
async fn read(from: Option<impl AsyncRead + Unpin>) -> String {
    let Some(mut from) = from else { return String::new() };
    let mut kept = Vec::new();
    // What broke off is as good as its end.
    let _ = (&mut from).take(SAYS).read_to_end(&mut kept).await;
    let _ = tokio::io::copy(&mut from, &mut tokio::io::sink()).await;
    String::from_utf8_lossy(&kept).into_owned()
}

/// The first host of a provider that clients ask through the proxy, as they name it.
pub(super) fn host(served: &crate::control::environment::Served, only: Option<&str>) -> Option<String> {
    let wanted = served.providers.iter().filter(|provider| only.is_none_or(|only| provider.name == only));
    let own: BTreeMap<_, _> = served
        .providers
        .iter()
        .filter_map(|provider| Some((provider.name.as_str(), provider.own_address.as_deref()?)))
        .collect();
    wanted
        .flat_map(|provider| provider.hosts.iter().map(move |host| (provider, host)))
        .filter(|(_, host)| {
            *host != "localhost" && !host.ends_with(".localhost") && host.parse::<std::net::IpAddr>().is_err()
        })
        .find_map(|(provider, host)| {
            let own = own.get(provider.name.as_str()).and_then(|own| own.parse::<http::Uri>().ok());
            match own.filter(|own| own.host() == Some(host)) {
                Some(own) if own.scheme_str() == Some("http") => None,
                Some(own) => own.authority().map(ToString::to_string),
                None => Some(host.clone()),
            }
        })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::control::doctor::Verdict;
    use crate::control::environment::{Served, ServedProvider};

    fn asked(changes: &Changes) -> Asked<'_> {
        Asked {
            authority: "api.openai.com".into(),
            proxy: "127.0.0.1:8321".into(),
            changes,
            password: false,
            bundle: "/run/lessor-8321.ca-bundle.pem".into(),
        }
    }

    fn judged(name: &str, ended: i32, out: &str) -> Verdict {
        let changes = Changes::default();
        let runtime = RUNTIMES.iter().find(|runtime| runtime.name == name);
        let checks = runtime.map(|runtime| runtime.judge(&asked(&changes), Some(ended), out));
        checks.unwrap_or_default()[0].verdict
    }

    #[test]
    fn only_lessors_answer_inside_the_tunnel_is_a_proof_of_trust() {
        let inside = "HTTP/1.1 404 Not Found\r\nX-Lessor-Error: unknown_provider\r\n";
        let refused = "HTTP/1.1 407 x\r\nx-lessor-error: app_unauthenticated\r\n";
        assert_eq!(judged("curl", 0, inside), Verdict::Ok);
        assert_eq!(judged("curl", 0, "HTTP/1.1 401 Unauthorized\r\n"), Verdict::Warn, "around lessor");
        assert_eq!(judged("curl", 0, refused), Verdict::Fail);
        assert_eq!(judged("curl", 60, inside), Verdict::Fail);
        assert_eq!(judged("wget", 8, &format!("{refused}{inside}")), Verdict::Ok);
        assert_eq!(judged("wget", 5, "ERROR: not trusted"), Verdict::Fail);
        assert_eq!(judged("openssl", 0, ""), Verdict::Ok);
        assert_eq!(judged("openssl", 1, "verify error:num=20"), Verdict::Fail);
        let line = |code: &str| format!("{{\"way\": \"python ssl\", \"code\": \"{code}\"}}");
        assert_eq!(judged("python", 0, &line("app_forbidden")), Verdict::Ok);
        assert_eq!(judged("python", 0, &line("")), Verdict::Warn);
        assert_eq!(judged("python", 0, &line("app_unauthenticated")), Verdict::Fail);
        assert_eq!(judged("python", 1, "SyntaxError"), Verdict::Warn);
        assert_eq!(judged("java", 1, "error: jdk.compiler is not there"), Verdict::Skip);
    }

    #[test]
    fn the_host_that_is_asked_for_goes_through_a_proxy_and_speaks_tls() {
        let provider = |name: &str, own: Option<&str>, hosts: &[&str]| ServedProvider {
            name: name.into(),
            own_address: own.map(str::to_owned),
            hosts: hosts.iter().map(|host| (*host).to_owned()).collect(),
            base_url: Vec::new(),
            keys: Vec::new(),
        };
        let served = |providers| Served {
            proxy: Vec::new(),
            admin: None,
            providers,
            secret_variables: Vec::new(),
            apps: Vec::new(),
            trust: None,
        };
        let local = provider("a", Some("https://localhost:1"), &["localhost", "127.0.0.1"]);
        let plain = provider("b", Some("http://llm.internal/v2"), &["llm.internal"]);
        let own = provider("c", Some("https://llm.corp:8443/v2"), &["llm.corp"]);
        let usual = provider("d", None, &["api.openai.com"]);
        let all = served(vec![local, plain, own, usual]);
        assert_eq!(host(&all, None).as_deref(), Some("llm.corp:8443"));
        assert_eq!(host(&all, Some("d")).as_deref(), Some("api.openai.com"));
        assert_eq!(host(&all, Some("a")), None);
        assert_eq!(host(&all, Some("b")), None);
    }
}

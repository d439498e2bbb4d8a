//! The command line, and everything it asks of a running sidecar.
//!
//! `run` and `check` are done by `main`; what talks to a sidecar is done here, over the admin API.
//! Exit codes are part of the contract: see [`Exit`].

use std::ffi::OsString;
use std::fmt::Write as _;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use clap::{Args, Parser, Subcommand};
use http::{Method, StatusCode};
use serde::de::DeserializeOwned;

use crate::config::{Address, Listen};
use crate::control::admin::{self, AppSeen, CaSeen, CheckResult, KeySeen, LeaseSeen, Status, socket_paths};
use crate::control::doctor::outside::Doctor;
use crate::control::environment::Served;
use crate::control::exec::{Companion, Env, Exec};
use crate::control::kubernetes::Inject;
use crate::model::{AppName, KeyId, LeaseId, ProviderName, Secret};

mod asked;
mod call;
mod drain;
mod events;
mod run;
mod tables;

pub(super) use asked::{examined, reasons};
pub use run::Run;

use call::{Answer, Call, Endpoint, Tried};
use drain::Asker;

const EXAMPLES: &str = "\
Examples:
  OPENAI_API_KEY=sk-… lessor run            serve with no configuration file
  lessor run --config config/lessor.toml    serve by a file
  lessor check --config config/lessor.toml  look for mistakes in it, serve nothing
  lessor check --explain openai 429 answer.txt   what this answer would do to its key
  lessor status                             pools, keys, live leases, cooldowns and why
  lessor keys disable openai/openai-a       lend this key no more
  lessor keys drain openai/openai-a         the same, and wait until nobody uses it
  lessor status --explain                   why keys are tried in the order in which they are
  lessor events --follow                    what happens to keys, leases and the store
  lessor leases list --json                 what the admin API says
  lessor apps revoke checkout               refuse this app, and cut what it has open
  curl -x http://127.0.0.1:8321 --cacert \"$(lessor ca path)\" https://api.openai.com/v1/models
  lessor exec -- python app.py              a child with everything set, and no key
  eval \"$(lessor env)\"                      the same for this shell
  lessor doctor                             does all of it work here, and what to do where not?
  lessor ready --admin http://10.0.0.7:8322 is that one ready?
";

const DOCTOR: &str = "\
It asks the sidecar that runs, or one that it starts for the time of the examination. Of each provider one
request is made, its check request, through the sidecar and with a key; runtimes ask what lessor answers itself.
It ends within a minute, whatever does not answer.

Exit codes:
  0  nothing failed; there may be something to look at
  1  a check failed
  2  usage or configuration error
  3  the sidecar that was named was not reached

Examples:
  lessor doctor
  lessor doctor --config config/lessor.toml --all-keys
  lessor doctor --provider openai --json
";

const CA_EXAMPLES: &str = "\
Examples:
  curl -x http://127.0.0.1:8321 --cacert \"$(lessor ca path)\" https://api.openai.com/v1/models
  HTTPS_PROXY=http://127.0.0.1:8321 SSL_CERT_FILE=\"$(lessor ca bundle)\" python app.py
  HTTPS_PROXY=http://127.0.0.1:8321 REQUESTS_CA_BUNDLE=\"$(lessor ca bundle)\" python app.py
  HTTPS_PROXY=http://127.0.0.1:8321 NODE_USE_ENV_PROXY=1 NODE_EXTRA_CA_CERTS=\"$(lessor ca path)\" node app.mjs
  JAVA_TOOL_OPTIONS=\"-Dhttps.proxyHost=127.0.0.1 -Dhttps.proxyPort=8321 -Djavax.net.ssl.trustStore=$(lessor ca java)\" java App
  lessor ca print | openssl x509 -noout -dates
";

const INJECT_EXAMPLES: &str = "\
Pods ask by label (on them, or on their namespace): lessor.dev/inject: \"true\".

Examples:
  lessor inject --tls-cert /tls/tls.crt --tls-key /tls/tls.key --namespace lessor
  lessor inject --self-managed --namespace lessor --service lessor-injector \\
    --tls-secret lessor-injector-tls --webhook-configuration lessor-injector
  kubectl get pod app -o json | lessor inject --review - --print-pod
  lessor inject --review review.json --mode both
";

const EXIT_CODES: &str = "\
Exit codes:
  0  done
  1  failed: the sidecar said no, or a check found a bad key
  2  usage or configuration error
  3  no sidecar was reached
  4  `lessor ready`: not ready
  5  the sidecar was reached, but its lease store does not answer
`lessor exec` ends as its command does; 126 and 127 when that cannot be run, or is not there.

The sidecar is looked for at --admin or LESSOR_ADMIN (http://HOST:PORT or a socket's path),
else at the socket of the configuration's listen.proxy, else at the default one.
LESSOR_ADMIN_TOKEN is sent as the admin token, over TCP only.
";

/// How a command ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Exit {
    /// Done.
    Ok = 0,
    /// The sidecar said no, or a check found a bad key.
    Failed = 1,
    /// Usage or configuration error; clap uses the same.
    Usage = 2,
    /// No sidecar was reached.
    Unreachable = 3,
    /// `lessor ready`: not ready.
    NotReady = 4,
    /// The sidecar was reached, but its lease store does not answer.
    StoreFailed = 5,
}

impl From<Exit> for ExitCode {
    fn from(exit: Exit) -> Self {
        ExitCode::from(exit as u8)
    }
}

/// Lends API keys: leases one from a shared pool, injects it, streams, releases it.
#[derive(Debug, Parser)]
#[command(name = "lessor", version, after_help = EXIT_CODES, after_long_help = format!("{EXAMPLES}\n{EXIT_CODES}"))]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
    /// Where and how.
    #[command(flatten)]
    pub options: Options,
}

/// Options of every command.
#[derive(Debug, Clone, Default, Args)]
pub struct Options {
    /// Print JSON: the admin API's answers, or (`run`) the log.
    #[arg(long, global = true)]
    pub json: bool,
    /// The sidecar to ask: http://HOST:PORT, or the path of its admin socket. Over http, changes need the admin
    /// token, in LESSOR_ADMIN_TOKEN.
    #[arg(long, global = true, value_name = "URL-or-socket", env = "LESSOR_ADMIN")]
    admin: Option<String>,
    /// The configuration file.
    #[arg(long, global = true, value_name = "FILE", env = "LESSOR_CONFIG")]
    #[arg(value_parser = clap::builder::OsStringValueParser::new())]
    config: Option<OsString>,
}

impl Options {
    /// The configuration file. An empty `LESSOR_CONFIG` names none.
    pub fn config(&self) -> Option<&Path> {
        self.config.as_deref().filter(|path| !path.is_empty()).map(Path::new)
    }

    fn admin(&self) -> Option<&str> {
        self.admin.as_deref().map(str::trim).filter(|admin| !admin.is_empty())
    }
}

/// What to do.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Serve until told to stop.
    #[command(after_help = run::EXAMPLES)]
    Run(Box<Run>),
    /// Look for mistakes in the configuration, or read a saved answer by its rules; serve nothing.
    Check(Check),
    /// Run a command with everything set that takes it through lessor, and no key; starts a sidecar
    /// for it where none runs.
    Exec(Exec),
    /// Print the same for a shell to evaluate.
    Env(Env),
    /// The sidecar of `exec`'s own.
    #[command(hide = true)]
    Companion(Companion),
    /// Prove it: configuration, store, clocks, DNS, TLS, each runtime's trust, and that a request gets a
    /// key which does not come back; and say what to do where not.
    #[command(after_help = DOCTOR)]
    Doctor(Doctor),
    /// Serve the Kubernetes webhook that gives labelled pods their sidecar, or answer one review from a file.
    #[command(after_help = INJECT_EXAMPLES)]
    Inject(Box<Inject>),
    /// Print the version.
    Version,
    /// Something that a running sidecar is asked.
    #[command(flatten)]
    Ask(Ask),
}

/// `lessor check …`.
#[derive(Debug, Args)]
pub struct Check {
    /// Say which rule an answer of a provider falls under, and what would follow. FILE is a saved answer
    /// (as `curl -i` prints it) or its body alone, `-` is standard input; STATUS counts, whatever FILE says.
    #[arg(long, num_args = 2..=3, value_names = ["PROVIDER", "STATUS", "FILE"])]
    pub explain: Option<Vec<String>>,
    /// Print the JSON schema of the configuration, for editors.
    #[arg(long, conflicts_with = "explain")]
    pub schema: bool,
}

/// What a running sidecar is asked.
#[derive(Debug, Subcommand)]
pub enum Ask {
    /// Pools, keys, live leases, cooldowns and why.
    Status {
        /// Also why this sidecar ranks its keys as it does: the terms of each key's score.
        #[arg(long)]
        explain: bool,
    },
    /// List keys, check one with its provider, switch one on or off, or drain it.
    #[command(subcommand)]
    Keys(Keys),
    /// List live leases, or revoke one.
    #[command(subcommand)]
    Leases(Leases),
    /// What happened to keys, cooldowns, leases, apps and the store: the last thousand events.
    Events {
        /// Go on with what happens, until stopped.
        #[arg(long, short)]
        follow: bool,
    },
    /// List apps, revoke one, or let it in again.
    #[command(subcommand)]
    Apps(Apps),
    /// The local CA that stands in for providers inside CONNECT: what clients must trust.
    #[command(subcommand, after_help = CA_EXAMPLES)]
    Ca(Ca),
    /// Exit 0 when the sidecar is ready, 4 when it is not (for exec probes).
    Ready,
}

/// `lessor keys …`.
#[derive(Debug, Subcommand)]
pub enum Keys {
    /// List all keys.
    List,
    /// Ask the provider whether it takes this key.
    Check {
        /// The key.
        #[arg(value_name = "PROVIDER/ID")]
        key: KeyPath,
    },
    /// Lend it again; lifts `invalid` too.
    Enable {
        /// The key.
        #[arg(value_name = "PROVIDER/ID")]
        key: KeyPath,
    },
    /// Lend it no more; streams that have it run on.
    Disable {
        /// The key.
        #[arg(value_name = "PROVIDER/ID")]
        key: KeyPath,
    },
    /// Lend it no more, here and in the fleet, and wait until the last request that has it ends.
    Drain {
        /// The key.
        #[arg(value_name = "PROVIDER/ID")]
        key: KeyPath,
        /// How long to wait; it stays disabled either way.
        #[arg(long, default_value = "10m", value_name = "TIME", value_parser = humantime::parse_duration)]
        timeout: Duration,
    },
    /// Lift every cooldown of it.
    Clear {
        /// The key.
        #[arg(value_name = "PROVIDER/ID")]
        key: KeyPath,
    },
}

/// `lessor leases …`.
#[derive(Debug, Subcommand)]
pub enum Leases {
    /// List live leases.
    List,
    /// End a lease now; this cuts its stream.
    Revoke {
        /// The lease.
        #[arg(value_name = "ID", value_parser = lease_id)]
        id: LeaseId,
    },
}

/// `lessor apps …`.
#[derive(Debug, Subcommand)]
pub enum Apps {
    /// List the apps that may call.
    List,
    /// Refuse an app from now on, and cut what it has open: in this sidecar, until it is restored or the
    /// sidecar restarts.
    Revoke {
        /// The app; `anonymous` is everybody where no apps are configured.
        #[arg(value_name = "NAME")]
        name: AppName,
    },
    /// Let a revoked app in again.
    Restore {
        /// The app.
        #[arg(value_name = "NAME")]
        name: AppName,
    },
}

/// `lessor ca …`.
#[derive(Debug, Subcommand)]
pub enum Ca {
    /// Print the path of the CA's certificate.
    Path,
    /// Print the certificate itself.
    Print,
    /// Print the path of a bundle: the system's roots and the CA's certificate.
    Bundle,
    /// Print the path of the same bundle as a Java trust store (PKCS12).
    Java,
}

/// A key as the command line names it: `PROVIDER/ID`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KeyPath {
    /// Whose key.
    pub provider: ProviderName,
    /// Its id.
    pub id: KeyId,
}

impl std::str::FromStr for KeyPath {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        let (provider, id) =
            text.split_once('/').ok_or("a key is named PROVIDER/ID, as `lessor keys list` does")?;
        let provider = ProviderName::parse(provider).map_err(|cause| cause.to_string())?;
        Ok(Self { provider, id: KeyId::parse(id).map_err(|cause| cause.to_string())? })
    }
}

fn lease_id(text: &str) -> Result<LeaseId, String> {
    text.parse().map(LeaseId).map_err(|_| "no lease id; `lessor leases list` shows them".into())
}

/// The command line, parsed. A mistake in it, `--help` and `--version` end the process here.
pub fn parse() -> Cli {
    Cli::parse()
}

/// `lessor version`.
pub fn version(options: &Options) -> ExitCode {
    let version = env!("CARGO_PKG_VERSION");
    print(&if options.json {
        format!("{}\n", serde_json::json!({ "version": version }))
    } else {
        format!("lessor {version}\n")
    });
    Exit::Ok.into()
}

/// Asks a running sidecar and prints its answer. `listen` reads `[listen]` from a configuration file;
/// it is called only when nothing nearer says where the sidecar is.
pub async fn client<F>(ask: Ask, options: &Options, listen: F) -> ExitCode
where
    F: FnOnce(&Path) -> Result<Listen, String>,
{
    let token = std::env::var("LESSOR_ADMIN_TOKEN").ok().filter(|token| !token.is_empty());
    match reply(&ask, options, token.map(Secret::new), listen).await {
        Ok(page) => {
            if let Some(note) = page.note {
                complain(&format!("note: {note}"));
            }
            print(&page.text);
            page.exit.into()
        }
        Err(failure) => {
            if let (true, Failure::Refused { json, .. }) = (options.json, &failure) {
                print(&format!("{json}\n"));
            }
            complain(&format!("error: {failure}"));
            failure.exit().into()
        }
    }
}

/// Why no sidecar said what it serves.
#[derive(Debug)]
pub enum Missing {
    /// Nobody was named, and nobody is there.
    Nobody(String),
    /// One was named and is not there, or it said no.
    Failed(String, Exit),
    /// The configuration file that was named does not say where one is.
    Unread(String),
}

/// What the running sidecar serves. `listen` as for [`client`].
///
/// A TCP port that nobody named is not asked: anybody may listen there, and a child would trust him.
pub async fn served<F>(options: &Options, listen: F) -> Result<Served, Missing>
where
    F: FnOnce(&Path) -> Result<Listen, String>,
{
    let token = std::env::var("LESSOR_ADMIN_TOKEN").ok().filter(|token| !token.is_empty()).map(Secret::new);
    let asked = async {
        let mut doors = doors(options, listen)?;
        doors.retain(|door| !matches!(door, Endpoint::Tcp { named: false, .. }));
        let call = Call {
            method: Method::GET,
            path: "/v1/environment".into(),
            bound: admin::ANSWER + Duration::from_secs(3),
        };
        let (door, _) = call::reach(doors, &call, token.is_some()).await.map_err(Failure::Unreachable)?;
        let from = door.to_string();
        let answer = door.ask(&call, token.as_ref()).await?;
        if !answer.status.is_success() {
            return Err(refused(&answer, token.is_some()));
        }
        parsed(&answer).map_err(|cause| Failure::Nonsense { from, cause: cause.to_string() })
    };
    asked.await.map_err(|failure| match failure {
        Failure::Unread(why) => Missing::Unread(why),
        Failure::Unreachable(_) if options.admin().is_none() => Missing::Nobody(failure.to_string()),
        _ => Missing::Failed(failure.to_string(), failure.exit()),
    })
}

/// To stdout. A reader that has gone (`| head`) is no failure.
pub(crate) fn print(text: &str) {
    let mut out = std::io::stdout().lock();
    let _ = out.write_all(text.as_bytes()).and_then(|()| out.flush());
}

/// To stderr.
pub(crate) fn complain(text: &str) {
    let _ = writeln!(std::io::stderr().lock(), "{text}");
}

/// What is printed.
#[derive(Debug)]
struct Page {
    text: String,
    note: Option<String>,
    exit: Exit,
}

/// The admin API's code for a store that failed.
const STORE: &str = "store_unavailable";

/// Why nothing is.
#[derive(Debug, thiserror::Error)]
enum Failure {
    #[error("{0}")]
    Usage(String),
    /// The configuration file does not say where a sidecar is.
    #[error("{0}")]
    Unread(String),
    #[error("no sidecar answers\n{}start one with `lessor run`, or say where it is: --admin URL-or-socket, \
             LESSOR_ADMIN, or --config FILE", listed(.0))]
    Unreachable(Vec<Tried>),
    #[error("{message} ({code}, says {from})")]
    Refused { code: String, message: String, from: String, json: String },
    #[error(
        "the sidecar could not write its CA's files, as its log says; `lessor ca print` shows the certificate"
    )]
    NoCaFile,
    #[error("{from} answered what this version of lessor cannot read: {cause}")]
    Nonsense { from: String, cause: String },
}

impl Failure {
    fn exit(&self) -> Exit {
        match self {
            Self::Usage(_) | Self::Unread(_) => Exit::Usage,
            Self::Unreachable(_) => Exit::Unreachable,
            Self::Refused { code, .. } if code == STORE => Exit::StoreFailed,
            Self::Refused { .. } | Self::Nonsense { .. } | Self::NoCaFile => Exit::Failed,
        }
    }
}

fn listed(tried: &[Tried]) -> String {
    tried.iter().fold(String::new(), |mut lines, Tried { at, cause }| {
        let _ = writeln!(lines, "  {at}: {cause}"); // writing to a `String` cannot fail
        lines
    })
}

async fn reply<F>(ask: &Ask, options: &Options, token: Option<Secret>, listen: F) -> Result<Page, Failure>
where
    F: FnOnce(&Path) -> Result<Listen, String>,
{
    let doors = doors(options, listen)?;
    let asker = |doors| Asker { doors, token: token.as_ref(), json: options.json };
    match ask {
        Ask::Keys(Keys::Drain { key, timeout }) => return drain::drain(key, *timeout, &asker(doors)).await,
        Ask::Events { follow } => {
            let exit = events::events(*follow, &asker(doors)).await?;
            return Ok(Page { text: String::new(), note: None, exit });
        }
        _ => {}
    }
    let call = request(ask);
    let (door, note) = call::reach(doors, &call, token.is_some()).await.map_err(Failure::Unreachable)?;
    let from = door.to_string();
    let answer = door.ask(&call, token.as_ref()).await?;
    let nonsense = |cause: String| Failure::Nonsense { from: from.clone(), cause };
    let mut exit = Exit::Ok;
    let unavailable = answer.status == StatusCode::SERVICE_UNAVAILABLE;
    if unavailable && matches!(ask, Ask::Ready) {
        exit = Exit::NotReady;
    } else if unavailable && matches!(ask, Ask::Status { .. }) && parsed::<Status>(&answer).is_ok() {
        exit = Exit::StoreFailed;
    } else if !answer.status.is_success() {
        return Err(refused(&answer, token.is_some()));
    }
    let shown = shown(ask, &answer, &mut exit).map_err(|cause| nonsense(cause.to_string()))?;
    if exit == Exit::Failed && matches!(ask, Ask::Ca(_)) && !options.json {
        return Err(Failure::NoCaFile);
    }
    let text = if options.json {
        let json: serde_json::Value = parsed(&answer).map_err(|cause| nonsense(cause.to_string()))?;
        format!("{json:#}\n")
    } else {
        shown
    };
    let note = note.or_else(|| unlent(ask, &answer));
    Ok(Page { text, note, exit })
}

/// What a person should know who just changed a key and finds it not lent all the same.
fn unlent(ask: &Ask, answer: &Answer) -> Option<String> {
    let Ask::Keys(Keys::Enable { key } | Keys::Clear { key }) = ask else { return None };
    let why = admin::not_lent(&parsed(answer).ok()?)?;
    Some(format!("{}/{} is not lent: {why}", key.provider, key.id))
}

/// The call of the admin API that answers it.
fn request(ask: &Ask) -> Call {
    let (method, path) = match ask {
        Ask::Status { explain: false } => (Method::GET, "/v1/status".into()),
        Ask::Status { explain: true } => (Method::GET, "/v1/status?explain=true".into()),
        Ask::Events { .. } => (Method::GET, "/v1/events?follow=false".into()),
        Ask::Ready => (Method::GET, "/readyz".into()),
        Ask::Keys(Keys::List) => (Method::GET, "/v1/keys".into()),
        Ask::Keys(Keys::Check { key }) => (Method::POST, key_path(key, "check")),
        Ask::Keys(Keys::Enable { key }) => (Method::POST, key_path(key, "enable")),
        Ask::Keys(Keys::Disable { key }) => (Method::POST, key_path(key, "disable")),
        Ask::Keys(Keys::Drain { key, .. }) => (Method::POST, key_path(key, "drain")),
        Ask::Keys(Keys::Clear { key }) => (Method::POST, key_path(key, "clear")),
        Ask::Leases(Leases::List) => (Method::GET, "/v1/leases".into()),
        Ask::Apps(Apps::List) => (Method::GET, "/v1/apps".into()),
        Ask::Apps(Apps::Revoke { name }) => (Method::POST, format!("/v1/apps/{name}/revoke")),
        Ask::Apps(Apps::Restore { name }) => (Method::POST, format!("/v1/apps/{name}/restore")),
        Ask::Ca(_) => (Method::GET, "/v1/ca".into()),
        Ask::Leases(Leases::Revoke { id }) => (Method::DELETE, format!("/v1/leases/{id}")),
    };
    let server = if matches!(ask, Ask::Keys(Keys::Check { .. })) { admin::CHECK } else { admin::ANSWER };
    // A little longer than the server's own bound, whose answer says more than ours.
    Call { method, path, bound: server + Duration::from_secs(3) }
}

fn key_path(key: &KeyPath, verb: &str) -> String {
    // Names need no encoding: the rule for names allows unreserved characters only.
    format!("/v1/keys/{}/{}/{verb}", key.provider, key.id)
}

/// Where to look, in order. What was named is the only place; the rest is found by rule.
fn doors<F>(options: &Options, listen: F) -> Result<Vec<Endpoint>, Failure>
where
    F: FnOnce(&Path) -> Result<Listen, String>,
{
    if let Some(admin) = options.admin() {
        return Ok(vec![Endpoint::named(admin).map_err(Failure::Usage)?]);
    }
    let (proxies, tcp, of) = match options.config() {
        Some(file) => {
            let listen = listen(file).map_err(Failure::Unread)?;
            // Which port a free one became is not known here.
            let is_known = |proxy: &Address| !matches!(proxy, Address::Tcp(at) if at.port() == 0);
            let of =
                listen.proxy.iter().filter(|_| listen.proxy.iter().all(is_known)).map(ToString::to_string);
            let of = of.collect();
            (listen.proxy, listen.admin, of)
        }
        None => (vec![local(8321)], local(8322), Vec::new()),
    };
    let mut sockets: Vec<PathBuf> = proxies.iter().flat_map(socket_paths).collect();
    if let Address::Unix(path, _) = &tcp {
        sockets.push(path.clone());
    }
    let mut doors: Vec<_> = sockets.into_iter().map(|path| Endpoint::Unix { path, named: false }).collect();
    if let Address::Tcp(at) = tcp {
        let host = if at.ip().is_unspecified() { format!("127.0.0.1:{}", at.port()) } else { at.to_string() };
        doors.push(Endpoint::Tcp { at: host, named: false, of });
    }
    Ok(doors)
}

fn local(port: u16) -> Address {
    Address::Tcp((std::net::Ipv4Addr::LOCALHOST, port).into())
}

fn parsed<T: DeserializeOwned>(answer: &Answer) -> serde_json::Result<T> {
    serde_json::from_slice(&answer.body)
}

fn list<T: DeserializeOwned>(answer: &Answer, name: &str) -> serde_json::Result<Vec<T>> {
    let mut page: serde_json::Value = parsed(answer)?;
    serde_json::from_value(page.get_mut(name).map(serde_json::Value::take).unwrap_or_default())
}

fn refused(answer: &Answer, token: bool) -> Failure {
    #[derive(serde::Deserialize)]
    struct Shape {
        error: Error,
    }
    #[derive(serde::Deserialize)]
    struct Error {
        code: String,
        message: String,
    }
    let json = String::from_utf8_lossy(&answer.body).into_owned();
    let from = answer.from.clone();
    let Ok(Shape { error: Error { code, message } }) = serde_json::from_str(&json) else {
        let message = format!("HTTP {}; is this lessor's admin listener?", answer.status.as_u16());
        return Failure::Refused { code: "not_lessor".into(), message, from, json };
    };
    let hint = match (answer.status, token) {
        (StatusCode::UNAUTHORIZED, true) => "; LESSOR_ADMIN_TOKEN is not its token",
        (StatusCode::UNAUTHORIZED, false) => "; set LESSOR_ADMIN_TOKEN",
        _ => "",
    };
    let message = tables::plain(&format!("{message}{hint}"));
    Failure::Refused { code: tables::plain(&code), message, from, json }
}

/// The answer for people; also decides how the command ends.
fn shown(ask: &Ask, answer: &Answer, exit: &mut Exit) -> serde_json::Result<String> {
    Ok(match ask {
        Ask::Status { .. } => tables::status(&parsed::<Status>(answer)?, answer.now),
        Ask::Keys(Keys::List) => tables::keys(&list::<KeySeen>(answer, "keys")?, answer.now),
        Ask::Leases(Leases::List) => tables::leases(&list::<LeaseSeen>(answer, "leases")?, answer.now),
        Ask::Keys(Keys::Check { key }) => {
            let found: CheckResult = parsed(answer)?;
            if !found.ok {
                *exit = Exit::Failed;
            }
            tables::check(key, &found)
        }
        Ask::Events { .. } => String::new(), // printed as they come
        Ask::Keys(Keys::Enable { .. } | Keys::Disable { .. } | Keys::Drain { .. } | Keys::Clear { .. }) => {
            tables::keys(&[parsed::<KeySeen>(answer)?], answer.now)
        }
        Ask::Leases(Leases::Revoke { id }) => format!("{id} revoked\n"),
        Ask::Apps(Apps::List) => tables::apps(&list::<AppSeen>(answer, "apps")?),
        Ask::Apps(Apps::Revoke { .. } | Apps::Restore { .. }) => tables::apps(&[parsed::<AppSeen>(answer)?]),
        Ask::Ca(ca) => {
            let seen: CaSeen = parsed(answer)?;
            let line = |file: Option<String>| file.map(|file| tables::plain(&file) + "\n");
            match ca {
                Ca::Path => line(seen.cert_file),
                Ca::Bundle => line(seen.bundle_file),
                Ca::Java => line(seen.java_file),
                Ca::Print => Some(seen.pem),
            }
            .unwrap_or_else(|| {
                *exit = Exit::Failed;
                String::new()
            })
        }
        Ask::Ready => tables::ready(&list::<String>(answer, "reasons")?),
    })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a test that fails may panic
mod tests;

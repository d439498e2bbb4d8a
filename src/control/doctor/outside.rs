//! The half that runs where applications run, and the command that puts both together.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::net::SocketAddr;
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use clap::Args;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::time::timeout;

use super::inside::{Patient, Wanted};
use super::runtimes::{self, Asked};
use super::{Check, Tools, Verdict, inside, page, withhold};
use crate::config::{Config, ConfigError, Listen, catalogue};
use crate::control::cli::{self, Exit, Missing, Options, print};
use crate::control::environment::{Changes, Served};
use crate::control::exec::{self, How};
use crate::model::{ProviderName, Secret};

/// How long a sidecar for this examination may take to listen.
const START: Duration = Duration::from_secs(12);
/// The bound of opening the store where there is no sidecar.
const OPEN: Duration = Duration::from_secs(8);
/// The bound of asking the listener anything.
const LISTENER: Duration = Duration::from_secs(4);

/// `lessor doctor`.
#[derive(Debug, Args)]
pub struct Doctor {
    #[command(flatten)]
    how: How,
    /// Look at this provider alone.
    #[arg(long, value_name = "NAME", value_parser = provider)]
    provider: Option<ProviderName>,
    /// Ask with each key by itself, not with one of each provider.
    #[arg(long)]
    all_keys: bool,
    /// Show what was skipped, too.
    #[arg(long)]
    verbose: bool,
}

fn provider(text: &str) -> Result<ProviderName, String> {
    ProviderName::parse(text).map_err(|cause| cause.to_string())
}

impl Doctor {
    fn wanted(&self) -> Wanted {
        Wanted { provider: self.provider.clone(), all_keys: self.all_keys }
    }
}

/// Examines and prints. `listen` and `settings` read the configuration, the first only as far as needed to
/// find a sidecar.
pub async fn doctor(
    what: &Doctor,
    options: &Options,
    listen: impl FnOnce(&Path) -> Result<Listen, String>,
    settings: impl AsyncFnOnce() -> Result<Config, ConfigError>,
    tools: Tools,
) -> ExitCode {
    let (mut checks, exit) = match cli::served(options, listen).await {
        Ok(served) => (with_sidecar(what, options, &served, None, tools).await, None),
        Err(Missing::Nobody(_)) => match settings().await {
            Ok(config) => (without_sidecar(what, options, config, tools).await, None),
            Err(error) => {
                let advice = "correct that; `lessor check` says it again";
                (vec![Check::fail("config", error.to_string(), advice)], Some(Exit::Usage))
            }
        },
        Err(Missing::Unread(why)) => {
            let advice = "correct that, or name another with --config or LESSOR_CONFIG";
            (vec![Check::fail("config", why, advice)], Some(Exit::Usage))
        }
        Err(Missing::Failed(why, exit)) => {
            let advice = "see whether it runs, and whether --admin or LESSOR_ADMIN names it";
            (vec![Check::fail("listener", why, advice)], Some(exit))
        }
    };
    // Once more, with what this process' own environment holds.
    let token = secrets_here(&["LESSOR_ADMIN_TOKEN"]);
    withhold(&mut checks, &token.iter().collect::<Vec<_>>(), tools);
    print(&if options.json { page::json(&checks) } else { page::text(&checks, what.verbose) });
    let failed = checks.iter().any(|check| check.verdict == Verdict::Fail);
    exit.unwrap_or(if failed { Exit::Failed } else { Exit::Ok }).into()
}

/// The sidecar examines itself while this side is looked at.
async fn with_sidecar(
    what: &Doctor,
    options: &Options,
    served: &Served,
    config: Option<&Config>,
    tools: Tools,
) -> Vec<Check> {
    if let Some(check) = unknown(what, served.providers.iter().map(|provider| provider.name.as_str())) {
        return vec![check];
    }
    let wanted = what.wanted();
    let itself = cli::examined(options, served.admin.as_deref(), &wanted);
    let (itself, reasons, outside) = tokio::join!(
        itself,
        cli::reasons(options, served.admin.as_deref()),
        outside(what, options, served, config, tools)
    );
    let mut checks = itself.unwrap_or_else(|why| {
        let advice = "use its admin socket, or LESSOR_ADMIN_TOKEN; an older sidecar cannot examine itself: restart it \
                      with this version";
        vec![Check::fail("sidecar", format!("it did not examine itself: {why}"), advice)]
    });
    checks.extend(readiness(reasons));
    checks.extend(outside);
    checks
}

/// Whether `--provider` names one that is not served, and so nothing could be said of.
fn unknown<'p>(what: &Doctor, served: impl Iterator<Item = &'p str> + Clone) -> Option<Check> {
    let name = what.provider.as_ref().filter(|name| !served.clone().any(|one| one == name.as_str()))?;
    let served: BTreeSet<&str> = served.collect();
    let (found, advice) = match catalogue::builtin().get(name).and_then(|known| known.env.first()) {
        Some(variable) => (
            format!("`{name}` has no key here"),
            format!("add [[keys]] of it, or set {variable} where there is no file"),
        ),
        None => (
            format!("`{name}` is no provider of this configuration, nor of the catalogue"),
            "correct the name after --provider".to_owned(),
        ),
    };
    let served = served.into_iter().collect::<Vec<_>>().join(", ");
    Some(Check::fail("provider", format!("{found}; served: {served}"), advice))
}

/// Starts a sidecar for this process; where that fails, the inside half runs here.
async fn without_sidecar(what: &Doctor, options: &Options, config: Config, tools: Tools) -> Vec<Check> {
    let started = tokio::task::spawn_blocking({
        let options = options.clone();
        move || exec::start_within(&options, START)
    });
    match started.await.map_err(|error| error.to_string()).and_then(|started| started) {
        Ok(served) => {
            let mut checks = with_sidecar(what, options, &served, Some(&config), tools).await;
            let found = "none runs; this was asked of one that was started for it, and has ended";
            checks.insert(0, Check::warn("sidecar", found, "`lessor run` starts one that stays"));
            checks
        }
        Err(why) => {
            if let Some(check) = unknown(what, config.keys.iter().map(|key| key.provider.as_str())) {
                return vec![check];
            }
            let opened = timeout(OPEN, (tools.open_store)(&config)).await;
            let store = opened.unwrap_or_else(|_| Err(format!("not opened within {OPEN:?}")));
            let patient =
                Patient { config: Arc::new(config), on_disk: Arc::default(), store, proxy: None, tools };
            let mut checks = inside::examine(patient, what.wanted()).await;
            let advice = "see what it said above, and the checks below";
            checks.insert(
                0,
                Check::fail("sidecar", format!("none runs, and none could be started: {why}"), advice),
            );
            checks
        }
    }
}

fn readiness(reasons: Result<Vec<String>, String>) -> Vec<Check> {
    let name = "ready";
    match reasons {
        Ok(reasons) if reasons.is_empty() => vec![Check::ok(name, "/readyz says yes")],
        Ok(reasons) => reasons
            .into_iter()
            .map(|reason| {
                Check::fail(name, format!("/readyz says no: {reason}"), "see the checks of it here")
            })
            .collect(),
        Err(why) => {
            vec![Check::fail(name, format!("/readyz gave no answer: {why}"), "see the sidecar's log")]
        }
    }
}

/// What an application of this user would find.
async fn outside(
    what: &Doctor,
    options: &Options,
    served: &Served,
    config: Option<&Config>,
    tools: Tools,
) -> Vec<Check> {
    let Some(proxy) = served.door() else {
        return vec![Check::skip(
            "listener",
            "it listens on Unix sockets alone, which no environment leads to",
        )];
    };
    let mut checks = vec![listener(proxy).await];
    if checks[0].verdict == Verdict::Fail {
        return checks;
    }
    let changes = match exec::planned(&what.how, options, served, config) {
        Ok(changes) => changes,
        Err(why) => {
            checks.push(Check::warn("environment", why.to_string(), "say as whom to ask, and ask again"));
            return checks;
        }
    };
    checks.extend(environment(&changes, served, config, tools));
    let name = "trust";
    let Some(trust) = &served.trust else {
        let advice = "set proxy.intercept = true, or see that the CA's files can be written and read here; until then \
                      applications need base URLs";
        checks.push(Check::warn(
            name,
            "no certificate of a local CA is here, so https goes around lessor",
            advice,
        ));
        return checks;
    };
    let only = what.provider.as_ref().map(ProviderName::as_str);
    let Some(authority) = runtimes::host(served, only) else {
        checks.push(Check::skip(name, "no provider has a host that clients ask for through a proxy"));
        return checks;
    };
    let asked = Asked {
        authority,
        proxy: proxy.to_string(),
        changes: &changes,
        password: !served.apps.is_empty(),
        bundle: trust.bundle.display().to_string(),
    };
    let mut trusted = runtimes::examine(&asked).await;
    // A client's own words may repeat the proxy's address, and with it the app's token.
    let token =
        changes.set.get("HTTPS_PROXY").and_then(|url| Some(url.rsplit_once('@')?.0.rsplit_once(':')?.1));
    let token = token.map(|token| Secret::new(token.into()));
    withhold(&mut trusted, &token.iter().collect::<Vec<_>>(), tools);
    checks.extend(trusted);
    checks
}

/// Whether lessor answers there: it says so itself on what is no request for it.
async fn listener(at: SocketAddr) -> Check {
    let name = "listener";
    let asked = async {
        let mut stream = TcpStream::connect(at).await?;
        stream.write_all(b"GET / HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n").await?;
        let mut head = Vec::new();
        (&mut stream).take(16 * 1024).read_to_end(&mut head).await?;
        Ok::<_, std::io::Error>(String::from_utf8_lossy(&head).to_ascii_lowercase())
    };
    match timeout(LISTENER, asked).await {
        Ok(Ok(head)) if head.contains("x-lessor-error:") => {
            Check::ok(name, format!("lessor answers at {at}"))
        }
        Ok(Ok(_)) => Check::fail(
            name,
            format!("somebody else answers at {at}"),
            "give listen.proxy a port of its own, or stop who has it",
        ),
        Ok(Err(error)) => Check::fail(
            name,
            format!("{at} cannot be reached from here: {error}"),
            "run this where the application runs, and let listen.proxy be an address that is reached from there",
        ),
        Err(_) => {
            Check::fail(name, format!("{at} gave no answer within {LISTENER:?}"), "see the sidecar's log")
        }
    }
}

/// What a child finds: notes on what was left as it was, and no key.
fn environment(changes: &Changes, served: &Served, config: Option<&Config>, tools: Tools) -> Vec<Check> {
    let name = "environment";
    let see = |note: &String| Check::warn(name, note.clone(), "see `lessor env`, and --override");
    let mut checks: Vec<_> = changes.notes.iter().map(see).collect();
    let names = served.providers.iter().flat_map(|provider| &provider.keys).chain(&served.secret_variables);
    let mut secrets = secrets_here(&names.map(String::as_str).collect::<Vec<_>>());
    // In a shell that is set up already, a placeholder stands where a key would.
    secrets.retain(|secret| !changes.set.values().any(|value| value == secret.expose()));
    secrets.extend(
        config.into_iter().flat_map(|config| &config.keys).flat_map(|key| key.hidden.iter().cloned()),
    );
    let left = |(name, value): (OsString, OsString)| {
        let name = name.into_string().ok()?;
        let is_left = !changes.unset.contains(&name) && !changes.set.contains_key(&name);
        is_left.then(|| (name, value.to_string_lossy().into_owned()))
    };
    let set = changes.set.iter().map(|(name, value)| (name.clone(), value.clone()));
    let child = std::env::vars_os().filter_map(left).chain(set);
    let holds = |value: &String| secrets.iter().any(|secret| tools.finds(secret, value.as_bytes()));
    let holding: Vec<_> = child.filter(|(_, value)| holds(value)).map(|(name, _)| name).collect();
    checks.push(if holding.is_empty() {
        let (set, removed) = (changes.set.len(), changes.unset.len());
        Check::ok(name, format!("{set} variables set, {removed} removed; no key is left in it"))
    } else {
        let advice =
            "unset it before the application starts: only what holds a key whole is removed by itself";
        Check::fail(name, format!("a child would find a key in {}", holding.join(", ")), advice)
    });
    checks
}

/// The values of these variables in this process.
fn secrets_here(names: &[&str]) -> Vec<Secret> {
    names.iter().filter_map(|name| std::env::var(name).ok()).map(Secret::new).collect()
}

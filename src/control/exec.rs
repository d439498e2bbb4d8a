//! `lessor exec` and `lessor env`: a child, or a shell, whose environment leads to a sidecar.
//!
//! `exec` becomes its child: the process that was started is the command's own from then on, so that
//! signals, the terminal, job control and the exit code are the command's without anything in between.
//! Where no sidecar runs, one is started first, in a session of its own, so that the terminal's Ctrl-C
//! does not reach it. It is a grandchild whose parent has gone: a command that waits for all its children
//! must not wait for it. It watches the command's process and drains when that has ended, however it did.
//! Should it end before, by the kernel's or a person's kill, a third process says so: the command sees refused
//! connections only. It has an empty environment, for nobody but the sidecar shall hold a key.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fmt::Write as _;
use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::process::CommandExt as _;
use std::process::{Command, ExitCode, Stdio};
use std::sync::mpsc;
use std::time::Duration;

use clap::{Args, ValueEnum};

use super::cli::{Exit, Missing, Options, complain, print};
use super::environment::{Caller, Changes, Loss, SHORTEST_SECRET, Served, Trust, changes};
use crate::config::{self, Config, ConfigError};
use crate::model::Secret;
use crate::process;

/// How long a sidecar of one's own may take to listen: its store may be far away.
const START: Duration = Duration::from_mins(1);

/// How the environment is made.
#[derive(Debug, Default, Args)]
pub struct How {
    /// Call as this app: its token is read from the configuration.
    #[arg(long, value_name = "NAME")]
    app: Option<String>,
    /// Call with the app token that this variable holds.
    #[arg(long, value_name = "VAR")]
    app_token_env: Option<String>,
    /// Replace base URLs and proxies that are set already, too.
    #[arg(long = "override")]
    overrides: bool,
}

/// `lessor exec`.
#[derive(Debug, Args)]
pub struct Exec {
    #[command(flatten)]
    how: How,
    /// The command and its arguments.
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, required = true, value_name = "COMMAND")]
    #[arg(value_parser = clap::builder::OsStringValueParser::new())]
    command: Vec<OsString>,
}

/// `lessor env`.
#[derive(Debug, Args)]
pub struct Env {
    #[command(flatten)]
    how: How,
    /// Whose syntax to print.
    #[arg(long, value_enum, default_value_t = Shell::Sh)]
    shell: Shell,
}

/// A shell's syntax.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Shell {
    /// POSIX: sh, bash, zsh, dash.
    Sh,
    /// fish.
    Fish,
}

/// The sidecar of one's own, as its command line tells it.
#[derive(Debug, Clone, Copy, Args)]
pub struct Companion {
    /// The process to accompany.
    #[arg(long)]
    pub of: i32,
    /// Already apart from it.
    #[arg(long)]
    pub apart: bool,
    /// Only say when this sidecar of it has ended too early.
    #[arg(long)]
    pub watch: Option<i32>,
}

/// Why there is no child.
#[derive(Debug, thiserror::Error)]
pub(super) enum ExecError {
    #[error("{0}")]
    Usage(String),
    #[error("{0}")]
    Config(#[from] ConfigError),
    #[error("{0}")]
    Missing(String, Exit),
    #[error("no sidecar could be started: {0}")]
    Start(String),
}

impl ExecError {
    fn exit(&self) -> Exit {
        match self {
            Self::Usage(_) | Self::Config(_) => Exit::Usage,
            Self::Missing(_, exit) => *exit,
            Self::Start(_) => Exit::Failed,
        }
    }
}

/// Becomes the command; returns only when that failed. `running` is the sidecar that was found.
pub fn exec(
    exec: &Exec,
    options: &Options,
    running: Result<Served, Missing>,
    settings: impl FnOnce() -> Result<Config, ConfigError>,
) -> ExitCode {
    match ready(exec, options, running, settings) {
        Ok(changes) => become_command(&exec.command, &changes),
        Err(error) => refuse(&error),
    }
}

fn ready(
    exec: &Exec,
    options: &Options,
    running: Result<Served, Missing>,
    settings: impl FnOnce() -> Result<Config, ConfigError>,
) -> Result<Changes, ExecError> {
    let (served, config) = match running {
        Ok(served) => (served, None),
        Err(Missing::Failed(why, exit)) => return Err(ExecError::Missing(why, exit)),
        Err(Missing::Unread(why)) => return Err(ExecError::Missing(why, Exit::Usage)),
        Err(Missing::Nobody(_)) => {
            let config = settings()?; // mistakes in it are told here, where they can be told well
            // Before the start: an app that is not known needs no sidecar.
            token(&exec.how, options, &Served::new(&config, &[], None).apps, Some(&config))?;
            (start(options, START)?, Some(config))
        }
    };
    let mut changes = planned(&exec.how, options, &served, config.as_ref())?;
    if let Some(config) = &config {
        changes.notes.splice(0..0, config.warnings.iter().cloned());
        if let Some(socket) = &served.admin {
            // So that `lessor status` in the child asks this sidecar.
            changes.set.insert("LESSOR_ADMIN".into(), format!("unix:{}", socket.display()));
        }
        // A short secret may be any word.
        let held = |arg: &OsString, secret: &str| {
            secret.len() >= SHORTEST_SECRET && arg.to_string_lossy().contains(secret)
        };
        let hidden = || config.keys.iter().flat_map(|key| key.hidden.iter());
        let held = |arg: &OsString| hidden().any(|secret| held(arg, secret.expose()));
        if exec.command.iter().any(held) {
            changes.notes.push("an argument holds a key; other users can read the command line".into());
        }
    }
    say(&changes);
    Ok(changes)
}

/// Prints what a shell evaluates.
pub fn env(env: &Env, options: &Options, running: Result<Served, Missing>) -> ExitCode {
    let found = match running {
        Ok(served) => planned(&env.how, options, &served, None),
        Err(Missing::Failed(why, exit)) => Err(ExecError::Missing(why, exit)),
        Err(Missing::Unread(why)) => Err(ExecError::Missing(why, Exit::Usage)),
        Err(Missing::Nobody(why)) => Err(ExecError::Missing(why, Exit::Unreachable)),
    };
    match found {
        Ok(changes) if options.json => {
            print(&format!("{:#}\n", serde_json::json!(changes)));
            Exit::Ok.into()
        }
        Ok(changes) => {
            say(&changes);
            print(&lines(&changes, env.shell));
            Exit::Ok.into()
        }
        Err(error) => {
            if !options.json {
                // What evaluates this must fail too, or `eval "$(lessor env)" && app` starts the app bare.
                print("false\n");
            }
            refuse(&error)
        }
    }
}

fn refuse(error: &ExecError) -> ExitCode {
    complain(&format!("error: {error}"));
    error.exit().into()
}

fn say(changes: &Changes) {
    for note in &changes.notes {
        complain(&format!("lessor: {note}"));
    }
}

/// What changes in the environment of a child of this process.
pub(super) fn planned(
    how: &How,
    options: &Options,
    served: &Served,
    config: Option<&Config>,
) -> Result<Changes, ExecError> {
    let no_tcp =
        "this sidecar listens on no TCP address, and no client finds a Unix socket by its environment";
    let proxy = served.door().ok_or_else(|| ExecError::Usage(no_tcp.into()))?;
    let token = token(how, options, &served.apps, config)?;
    let name = how.app.as_deref().unwrap_or("app");
    let text =
        |(name, value): (OsString, OsString)| Some((name.into_string().ok()?, value.into_string().ok()?));
    let present: BTreeMap<_, _> = std::env::vars_os().filter_map(text).collect();
    let app = token.as_ref().map(|token| (name, token));
    let here = |trust: &Trust| trust.ca.is_file() && trust.bundle.is_file();
    // A sidecar in another container has files that are not here.
    let served = Served { trust: served.trust.clone().filter(here), ..served.clone() };
    let loss = served.trust.as_ref().map(|trust| Loss::of(trust, &present)).unwrap_or_default();
    let caller = Caller { proxy, app, overrides: how.overrides, present: &present, loss };
    Ok(changes(&served, &caller))
}

/// The app's token, where there are apps.
fn token(
    how: &How,
    options: &Options,
    apps: &[String],
    config: Option<&Config>,
) -> Result<Option<Secret>, ExecError> {
    if let Some(variable) = &how.app_token_env {
        let token = std::env::var(variable).ok().filter(|token| !token.trim().is_empty());
        let unset = || ExecError::Usage(format!("--app-token-env: {variable} is not set"));
        return Ok(Some(Secret::new(token.ok_or_else(unset)?)));
    }
    let known = apps.join(", ");
    let Some(name) = &how.app else {
        let needed = format!(
            "this sidecar tells its callers apart: give --app NAME ({known}), or --app-token-env VAR"
        );
        return if apps.is_empty() { Ok(None) } else { Err(ExecError::Usage(needed)) };
    };
    let found = match (config, options.config()) {
        (Some(config), _) => {
            config.apps.iter().find(|app| app.name.as_str() == name).and_then(|app| app.token.clone())
        }
        (None, Some(file)) => config::load_app_token(file, name)?,
        (None, None) => {
            let how =
                "--app reads the token from the configuration: give --config FILE, or --app-token-env VAR";
            return Err(ExecError::Usage(how.into()));
        }
    };
    let unknown = || {
        // Known by its user alone, which only a Unix socket tells.
        let why = if apps.contains(name) { "has no token to call with" } else { "is none of the apps" };
        ExecError::Usage(format!("{name} {why}; there is: {known}"))
    };
    found.map(Some).ok_or_else(unknown)
}

/// The same for who says in its own words that there is none.
pub(super) fn start_within(options: &Options, bound: Duration) -> Result<Served, String> {
    start(options, bound).map_err(|error| error.to_string())
}

/// Starts a sidecar for this very process, and waits until it listens.
fn start(options: &Options, bound: Duration) -> Result<Served, ExecError> {
    let failed = |cause: std::io::Error| ExecError::Start(cause.to_string());
    let what = Companion { of: std::process::id().cast_signed(), apart: false, watch: None };
    let command = companion(what, options);
    let mut child = command.map_err(failed)?.stdout(Stdio::piped()).spawn().map_err(failed)?;
    let (told, listens) = mpsc::channel();
    let pipe = child.stdout.take();
    std::thread::spawn(move || {
        let mut line = String::new();
        let read = pipe.map(|pipe| BufReader::new(pipe).read_line(&mut line));
        let _ = told.send(read.and_then(Result::ok).map(|_| line)); // nobody waits any more: too late
    });
    let _ = child.wait(); // it leaves at once: the sidecar is its child
    let line = listens.recv_timeout(bound).ok().flatten().unwrap_or_default();
    serde_json::from_str(&line).map_err(|_| ExecError::Start("it ended, or did not listen in time".into()))
}

fn companion(what: Companion, options: &Options) -> std::io::Result<Command> {
    let mut command = Command::new(std::env::current_exe()?);
    command.arg("companion").arg("--of").arg(what.of.to_string()).stdin(Stdio::null());
    if let Some(file) = options.config() {
        command.arg("--config").arg(file);
    }
    Ok(command)
}

/// The step between the command and its sidecar: in a new session, starts the sidecar and leaves it alone.
pub fn step_apart(what: Companion, options: &Options) -> ExitCode {
    // Fails only for the leader of a group, which a process that was just started is not.
    let _ = rustix::process::setsid();
    let started = companion(what, options).and_then(|mut command| command.arg("--apart").spawn());
    match started {
        Ok(sidecar) => {
            // Without it all works, and an early end is not said.
            let _ = watcher(what, sidecar.id()).and_then(|mut command| command.spawn());
            Exit::Ok.into()
        }
        Err(cause) => {
            complain(&format!("error: {cause}"));
            Exit::Failed.into()
        }
    }
}

fn watcher(what: Companion, sidecar: u32) -> std::io::Result<Command> {
    let mut command = Command::new(std::env::current_exe()?);
    command.args(["companion", "--watch", &sidecar.to_string(), "--of", &what.of.to_string()]);
    command.env_clear().stdin(Stdio::null()).stdout(Stdio::null());
    Ok(command)
}

/// Says when the sidecar `watched` ends while its command `of` runs on.
pub async fn watch(watched: i32, of: i32) {
    // One that cannot be watched is gone by now: `start` says so, or nobody is left to be told.
    let (Ok(sidecar), Ok(command)) = (process::end_of(watched), process::end_of(of)) else { return };
    tokio::select! {
        biased;
        () = command => {}
        () = sidecar => complain(
            "lessor: the sidecar of this command has ended: what it asks of providers fails from here on; end it, \
             and start it again by `lessor exec`",
        ),
    }
}

/// Tells the process that waits in `start` what is served.
pub fn tell(served: &Served) {
    let mut out = std::io::stdout().lock();
    // Who is gone by now is noticed by its process.
    let _ = writeln!(out, "{}", serde_json::json!(served)).and_then(|()| out.flush());
}

fn become_command(words: &[OsString], changes: &Changes) -> ExitCode {
    let Some((program, args)) = words.split_first() else { return Exit::Usage.into() };
    let mut command = Command::new(program);
    command.args(args).envs(&changes.set);
    for name in &changes.unset {
        command.env_remove(name);
    }
    let cause = command.exec();
    complain(&format!("error: {}: {cause}", program.display()));
    // As a shell says it.
    ExitCode::from(if cause.kind() == std::io::ErrorKind::NotFound { 127 } else { 126 })
}

fn lines(changes: &Changes, shell: Shell) -> String {
    // Other programs made some of these names: what is none for a shell would be evaluated as something else.
    let is_name = |name: &&String| {
        name.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_')
            && name.bytes().next().is_some_and(|b| !b.is_ascii_digit())
    };
    let mut text = String::new();
    // Writing to a `String` cannot fail.
    for (name, value) in changes.set.iter().filter(|(name, _)| is_name(name)) {
        let _ = match shell {
            Shell::Sh => writeln!(text, "export {name}='{}'", value.replace('\'', r"'\''")),
            Shell::Fish => {
                let value = value.replace('\\', r"\\").replace('\'', r"\'");
                writeln!(text, "set -gx {name} '{value}'")
            }
        };
    }
    for name in changes.unset.iter().filter(is_name) {
        let _ = match shell {
            Shell::Sh => writeln!(text, "unset {name}"),
            Shell::Fish => writeln!(text, "set -e {name}"),
        };
    }
    text
}

//! Secrets that commands give: run without a shell, bounded in time and size, and kept until they are due
//! again.
//!
//! A command that fails takes nothing away: a secret that was had before stays in use, and a key that never
//! had one is pending. Both are tried again, later each time, and told once per change. What it says on stderr goes nowhere.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::process::Stdio;
use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt as _;
use futures_util::stream;
use rand::Rng as _;
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process_group, waitid};
use tokio::io::{AsyncRead, AsyncReadExt as _};
use tokio::process::{Child, Command};
use tokio::time::{Instant, timeout};
use zeroize::Zeroizing;

use super::errors::shown;
use super::secrets::{LARGEST, Shape};
use super::{catalogue, values};
use crate::model::{KeyId, ProviderName, Secret};

/// How many commands run at once.
const AT_ONCE: usize = 32;
/// How soon a command that failed is tried again, the first time and at most.
const AGAIN: (Duration, Duration) = (Duration::from_secs(1), Duration::from_mins(1));
/// When it is tried again where the configuration that names it has mistakes.
const PUT_OFF: Duration = Duration::from_secs(10);
/// Numbers behind the catalogue's variables (`OPENAI_API_KEY_2`) that are kept from a command.
const NUMBERED: u32 = 64;

/// Whose secret.
pub(super) type Owner = (ProviderName, KeyId);

/// A command that gives a key's secret. It prints as its owner alone, for its arguments may be secret.
#[derive(Clone)]
pub(super) struct SecretCommand {
    pub(super) provider: ProviderName,
    pub(super) key: KeyId,
    /// The program, and its arguments.
    pub(super) program: Vec<String>,
    pub(super) timeout: Duration,
    pub(super) refresh: Option<Duration>,
    /// What its answer must be.
    pub(super) shape: Shape,
}

impl std::fmt::Debug for SecretCommand {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "SecretCommand({}/{})", self.provider, self.key)
    }
}

impl SecretCommand {
    fn owner(&self) -> Owner {
        (self.provider.clone(), self.key.clone())
    }

    /// Whether it gives what `other` gives; how often is another matter.
    fn is_as(&self, other: &Self) -> bool {
        self.program == other.program && self.shape == other.shape
    }
}

/// What commands gave.
#[derive(Debug, Clone, Default)]
pub(super) struct Given(BTreeMap<Owner, Entry>);

#[derive(Debug, Clone)]
struct Entry {
    command: SecretCommand,
    secret: Option<Secret>,
    /// Why its last run gave none.
    problem: Option<String>,
    /// Runs that failed, one after the other.
    failures: u32,
    /// When it is to run; `None`: never again.
    due: Option<Instant>,
}

impl Given {
    /// Nothing.
    pub(super) const fn none() -> Self {
        Self(BTreeMap::new())
    }

    /// What `command` gave.
    pub(super) fn by(&self, command: &SecretCommand) -> Option<Secret> {
        let entry = self.0.get(&command.owner()).filter(|entry| entry.command.is_as(command))?;
        entry.secret.clone()
    }
}

/// What the commands of a configuration gave, from one reading of it to the next.
#[derive(Debug, Default)]
pub(super) struct Secrets(Arc<Given>);

impl Secrets {
    /// When a command is due, so that the configuration is to be read again; `None` where none ever is.
    pub(super) fn next_due(&self) -> Option<Instant> {
        self.0.0.values().filter_map(|entry| entry.due).min()
    }

    /// Makes every command due: a person asked for a reading of everything.
    pub(super) fn make_all_due(&mut self) {
        self.put_all(|_| true, Instant::now());
    }

    /// The keys that have no secret, and why, one line each.
    pub(super) fn pending(&self) -> Vec<String> {
        let none = self.0.0.values().filter(|entry| entry.secret.is_none());
        none.filter_map(|entry| Some(told(&entry.command, entry.problem.as_ref()?))).collect()
    }

    pub(super) fn given(&self) -> Arc<Given> {
        self.0.clone()
    }

    /// The configuration cannot be read, so nothing is to be run for it soon.
    pub(super) fn put_off(&mut self) {
        let now = Instant::now();
        self.put_all(|entry| entry.due.is_some_and(|due| due <= now), now + PUT_OFF);
    }

    fn put_all(&mut self, which: impl Fn(&Entry) -> bool, due: Instant) {
        for entry in Arc::make_mut(&mut self.0).0.values_mut().filter(|entry| which(entry)) {
            entry.due = Some(due);
        }
    }

    /// Takes over the commands there are now, and runs those that are due, or of these only those that never ran;
    /// whether any was.
    ///
    /// Safe to drop: a command that runs is ended with it, and stays due.
    pub(super) async fn run_due(
        &mut self,
        commands: Vec<SecretCommand>,
        variables: &[String],
        only_new: bool,
    ) -> bool {
        self.take_over(commands);
        let now = Instant::now();
        let environment = Arc::new(environment(variables));
        let is_due = |entry: &&Entry| {
            let is_new = entry.secret.is_none() && entry.problem.is_none();
            entry.due.is_some_and(|at| at <= now) && (is_new || !only_new)
        };
        let due: Vec<Entry> = self.0.0.values().filter(is_due).cloned().collect();
        let any = !due.is_empty();
        let mut runs = stream::iter(due)
            .map(|entry| {
                let environment = environment.clone();
                async move {
                    let answer = run(&entry, &environment).await;
                    (entry, answer)
                }
            })
            .buffer_unordered(AT_ONCE);
        while let Some((mut entry, answer)) = runs.next().await {
            entry.note(answer);
            Arc::make_mut(&mut self.0).0.insert(entry.command.owner(), entry);
        }
        any
    }

    fn take_over(&mut self, commands: Vec<SecretCommand>) {
        let mut before = std::mem::take(&mut Arc::make_mut(&mut self.0).0);
        let now = commands.into_iter().map(|command| {
            let owner = command.owner();
            let known = before.remove(&owner).filter(|entry| entry.command.is_as(&command));
            let entry = match known {
                Some(mut entry) => {
                    if entry.command.refresh != command.refresh && entry.failures == 0 {
                        entry.due = command.refresh.map(|refresh| Instant::now() + refresh);
                    }
                    Entry { command, ..entry }
                }
                None => {
                    Entry { command, secret: None, problem: None, failures: 0, due: Some(Instant::now()) }
                }
            };
            (owner, entry)
        });
        self.0 = Arc::new(Given(now.collect()));
    }
}

impl Entry {
    /// Takes what a run came to.
    fn note(&mut self, answer: Result<Secret, String>) {
        let (provider, key) = (&self.command.provider, &self.command.key);
        match answer {
            Ok(secret) => {
                if self.problem.take().is_some() {
                    tracing::info!(%provider, %key, "the command of the key gives its secret again");
                }
                self.secret = Some(secret);
                self.failures = 0;
                self.due = self.command.refresh.map(|refresh| Instant::now() + refresh);
            }
            Err(why) => {
                let (first, most) = AGAIN;
                let wait = first.saturating_mul(1 << self.failures.min(16)).min(most);
                self.failures = self.failures.saturating_add(1);
                self.due = Some(Instant::now() + wait.mul_f64(rand::rng().random_range(0.75..1.25)));
                if self.problem.is_none() {
                    let rest = if self.secret.is_some() {
                        "; the secret that it gave before stays in use"
                    } else {
                        "; until it does, the key is pending"
                    };
                    tracing::warn!(%provider, %key, "{}{rest}", told(&self.command, &why));
                }
                self.problem = Some(why);
            }
        }
    }
}

/// What is said of a command that fails.
fn told(command: &SecretCommand, why: &str) -> String {
    format!(
        "the secret of key {} of provider {} could not be had: its command {} {why}; run it by hand as lessor's \
         user, without a shell, and see to it that it prints the secret alone",
        command.key,
        command.provider,
        shown(&command.program[0])
    )
}

/// The environment of a command: this process's, less everything in which a key may stand.
fn environment(variables: &[String]) -> Vec<(OsString, OsString)> {
    let usual = catalogue::builtin().values().flat_map(|provider| provider.env.iter().cloned());
    let numbered = usual.flat_map(|name| {
        let more: Vec<String> = (2..=NUMBERED).map(|n| format!("{name}_{n}")).collect();
        std::iter::once(name).chain(more)
    });
    let mut hidden: std::collections::BTreeSet<String> = numbered.collect();
    hidden.extend(variables.iter().cloned());
    let is_open = |name: &OsString| name.to_str().is_none_or(|name| !hidden.contains(name));
    std::env::vars_os().filter(|(name, _)| is_open(name)).collect()
}

/// Runs a command to its end, and takes what it printed as a secret; else why it is none, so that it reads on
/// from the command's name.
async fn run(entry: &Entry, environment: &[(OsString, OsString)]) -> Result<Secret, String> {
    let command = &entry.command;
    let child = Command::new(&command.program[0])
        .args(&command.program[1..])
        .env_clear()
        .envs(environment.iter().map(|(name, value)| (name, value)))
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        // Its words may hold the secret in a form that nobody knows, so the log never has them.
        .stderr(Stdio::null())
        .process_group(0)
        .kill_on_drop(true)
        .spawn()
        .map_err(|cause| format!("could not be started ({cause})"))?;
    let mut running = Running::new(child);
    let ended = timeout(command.timeout, running.end()).await;
    let answer = &running.answer;
    match ended {
        Err(_) => Err(format!("did not end within {}", values::spell(command.timeout))),
        Ok(Err(why)) => Err(why),
        Ok(Ok(())) => {
            let text = std::str::from_utf8(answer).map_err(|_| "printed something that is not text")?;
            // One line end is the command's own; a second is a mistake.
            let text = text.strip_suffix('\n').map_or(text, |text| text.strip_suffix('\r').unwrap_or(text));
            let more = text.ends_with(['\n', '\r']) && !command.shape.has_parts();
            let taken = if more { Err("holds more than one line".into()) } else { command.shape.take(text) };
            taken.map_err(|why| format!("printed what {why}"))
        }
    }
}

/// A command that runs. With it ends all that it started, save for what left its group.
struct Running {
    child: Child,
    group: Option<Pid>,
    answer: Zeroizing<Vec<u8>>,
}

impl Running {
    fn new(child: Child) -> Self {
        let group = child.id().and_then(|id| Pid::from_raw(i32::try_from(id).ok()?));
        // All room at once: a vector that grows leaves copies behind that nobody wipes.
        let answer = Zeroizing::new(Vec::with_capacity(usize::try_from(LARGEST).unwrap_or(0) + 1));
        Self { child, group, answer }
    }

    /// Waits for its end, and reads what it prints meanwhile.
    async fn end(&mut self) -> Result<(), String> {
        let read = |cause: std::io::Error| format!("could not be listened to ({cause})");
        let whole = take(self.child.stdout.take(), &mut self.answer).await.map_err(read)?;
        if !whole {
            return Err("printed more than 64 KiB".into());
        }
        if let Some(leader) = self.group {
            // Its end is awaited before it is taken note of: only until then its number is nobody else's, and
            // what it left behind in its group can be ended.
            let ended = tokio::task::spawn_blocking(move || ended(leader)).await;
            ended.map_err(std::io::Error::other).and_then(|ended| ended).map_err(read)?;
            self.end_group();
        }
        let status = self.child.wait().await.map_err(read)?;
        if status.success() { Ok(()) } else { Err(format!("failed ({status})")) }
    }

    /// Nobody has waited for its first process yet, so the group's number is nobody else's.
    fn end_group(&mut self) {
        if let Some(group) = self.group.take() {
            let _ = kill_process_group(group, Signal::KILL); // it may be gone already
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.end_group();
    }
}

/// Blocks until the process has ended, and leaves its end to who waits for it.
fn ended(id: Pid) -> std::io::Result<()> {
    let options = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT;
    rustix::io::retry_on_intr(|| waitid(WaitId::Pid(id), options))?;
    Ok(())
}

/// Reads to the end, or to [`LARGEST`]; whether it was all.
async fn take(from: Option<impl AsyncRead + Unpin>, into: &mut Vec<u8>) -> Result<bool, std::io::Error> {
    let Some(mut from) = from else { return Ok(true) };
    (&mut from).take(LARGEST).read_to_end(into).await?;
    let mut rest = Zeroizing::new([0; 1]);
    Ok(from.read(&mut rest[..]).await? == 0)
}

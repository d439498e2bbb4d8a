//! The configuration as it changes: read anew, judged whole, and taken at once or not at all.
//!
//! SIGHUP asks for it, and so do a change of any file that the configuration was read from and a command that is due
//! to give a secret anew; a command whose secret is the same changes nothing. One that was refused is tried again
//! when a file that it names comes or changes: its secret may come later than it. Files are looked at
//! every `LOOK` rather than watched: what Kubernetes swaps is a link above the file, and some file systems tell
//! of nothing. A file that still changes is given time to settle, for half a file may well be valid.
//!
//! Requests under way keep what they began with. A configuration that cannot be taken changes nothing.

use std::collections::BTreeSet;
use std::io::IsTerminal as _;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use arc_swap::ArcSwap;
use tokio::signal::unix::Signal;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::config::roots::{self, Roots};
use crate::config::{Change, Config, ConfigError, Loader, OnDisk, Stamps};
use crate::events::{Events, What};
use crate::fleet::Fleet;
use crate::metrics::Metrics;

/// How often files are looked at.
const LOOK: Duration = Duration::from_secs(2);

/// How long a file must have stayed as it is.
const SETTLE: Duration = Duration::from_millis(250);

/// How often a file that goes on changing is given that time.
const PATIENCE: usize = 20;

/// How many files are looked at of those that a refused configuration names.
const AWAITED: usize = 1024;

/// Of a file that was emptied, by a full disk or a careless hand, nobody would be served.
const NO_KEY: &str =
    "it has no key any more, so no request would be served; if that is meant, SIGHUP takes it";

/// Takes a new configuration into the running process, or says why it cannot.
pub type Take = Box<dyn Fn(&Arc<Config>, &Roots) -> Result<(), String> + Send + Sync>;

/// The system's roots, as they are by now, read where nothing is served meanwhile.
async fn read_roots() -> Roots {
    tokio::task::spawn_blocking(roots::read).await.unwrap_or_default()
}

/// Keeps the configuration current.
pub struct Reload {
    /// Reads it.
    pub loader: Loader,
    /// What counts now, for all who ask.
    pub current: Arc<ArcSwap<Config>>,
    /// How the file on disk stands to that, for all who ask.
    pub on_disk: Arc<ArcSwap<OnDisk>>,
    /// Takes another one.
    pub take: Take,
    /// Tells the store.
    pub fleet: Fleet,
    /// Told of each that was taken.
    pub events: Events,
    /// Counts.
    pub metrics: Metrics,
    /// Why the last one that was read is none.
    pub refused: Option<ConfigError>,
}

impl Reload {
    /// The task; ends with `stop`. `hangup` is SIGHUP, `lost` is cancelled where it means that the terminal went
    /// away on which lessor was started.
    pub async fn run(mut self, mut hangup: Signal, stop: CancellationToken, lost: CancellationToken) {
        let on_terminal = std::io::stderr().is_terminal();
        // As they were when they were read: one may have changed since.
        let mut seen = self.current.load().files.clone();
        // Whether the last secret that was due could not be taken: told once, and not at every turn.
        let mut failing = false;
        loop {
            let (asked, is_due) = tokio::select! {
                biased;
                () = stop.cancelled() => return,
                _ = hangup.recv() => (true, false),
                () = until(self.loader.next_due()) => (false, true),
                () = tokio::time::sleep(LOOK) => (false, false),
            };
            if asked {
                self.loader.make_all_due();
            }
            if asked && on_terminal && !std::io::stderr().is_terminal() {
                lost.cancel();
                return;
            }
            let mut now = self.stamps().await;
            if now == seen && is_due {
                // Commands take their time: neither the end nor a file that changes meanwhile waits for them.
                let changed = changed(seen.clone());
                let again = tokio::select! {
                    biased;
                    () = stop.cancelled() => return,
                    again = self.rotate() => again,
                    () = changed => continue,
                };
                if let Err(why) = &again
                    && !failing
                {
                    tracing::error!("secrets stay as they are, for the configuration cannot be taken: {why}");
                }
                failing = again.is_err();
                continue;
            }
            if now == seen && !asked {
                continue;
            }
            for _ in 0..PATIENCE {
                tokio::time::sleep(SETTLE).await;
                let again = self.stamps().await;
                if std::mem::replace(&mut now, again.clone()) == again {
                    break;
                }
            }
            if stop.run_until_cancelled(self.reload(asked)).await.is_none() {
                return;
            }
            // The new one may have other files. What a refused one misses may have come while it was read, so that
            // one look more is needed.
            seen = if self.runs_by_the_file() {
                self.current.load().files.clone()
            } else {
                now.with(self.files())
            };
        }
    }

    /// Takes secrets that are due; nothing where they are the same.
    async fn rotate(&mut self) -> Result<(), String> {
        let taken = match self.loader.load().await {
            Ok(new) if self.runs_by_the_file() && self.current.load().has_secrets_of(&new) => return Ok(()),
            Ok(new) => self.take(new, &read_roots().await),
            Err(error) => Err(error.to_string()),
        };
        self.note(&taken);
        if taken.is_ok() {
            self.refused = None;
        }
        taken
    }

    async fn reload(&mut self, asked: bool) {
        let read = self.loader.load_files().await;
        let before = self.refused.take();
        let taken = match read {
            Ok(new) if new.keys.is_empty() && !asked && !self.current.load().keys.is_empty() => {
                Err(NO_KEY.into())
            }
            Ok(new) => self.take(new, &read_roots().await),
            Err(error) => {
                let why = error.to_string();
                self.refused = Some(error);
                Err(why)
            }
        };
        self.note(&taken);
        // One that is read again for a file that it waits for is told again where there is something new.
        let is_news = asked || self.refused.is_none() || self.refused != before;
        if let Err(why) = taken
            && is_news
        {
            tracing::error!("the configuration was not taken, and the old one is kept: {why}");
        }
    }

    fn runs_by_the_file(&self) -> bool {
        self.on_disk.load().refused.is_none()
    }

    /// Counts it, and keeps why the file on disk is refused for as long as it is.
    fn note(&self, taken: &Result<(), String>) {
        self.metrics.reloaded(taken.is_ok());
        let Err(why) = taken else { return };
        let before = self.on_disk.load();
        let now = before.refused(why);
        if now == **before {
            return;
        }
        if let Some(refused) = &now.refused {
            let (config, error) = (self.current.load().origin.clone(), refused.error.clone());
            self.events.tell(What::ConfigRefused { config, error });
        }
        self.on_disk.store(Arc::new(now));
    }

    fn take(&self, new: Config, roots: &Roots) -> Result<(), String> {
        let Change {
            config,
            needs_restart,
            added,
            removed,
            rotated,
            changed,
            enabled,
            apps_removed,
            sections,
        } = self.current.load().followed_by(new);
        let config = Arc::new(config);
        (self.take)(&config, roots)?;
        self.current.store(config.clone());
        self.on_disk.store(Arc::new(OnDisk { refused: None, needs_restart: needs_restart.clone() }));
        self.fleet.reintroduce(enabled);
        self.events.tell(What::ConfigReloaded { config: config.origin.clone() });
        for field in needs_restart {
            tracing::warn!("{field} was changed; that counts from the next start");
        }
        for warning in &config.warnings {
            tracing::warn!("{warning}");
        }
        let list = |names: Vec<String>| names.join(" ");
        let apps_removed: Vec<String> = apps_removed.iter().map(ToString::to_string).collect();
        tracing::info!(
            config = config.origin,
            keys = config.keys.len(),
            added = list(added),
            removed = list(removed),
            rotated = list(rotated),
            changed = list(changed),
            apps_removed = list(apps_removed),
            sections = list(sections),
            "the configuration was taken"
        );
        Ok(())
    }

    /// What is looked at: also what a refused configuration waits for.
    fn files(&self) -> Vec<PathBuf> {
        let mut files = self.current.load().files.files();
        let named = self.refused.iter().flat_map(|error| &error.files).take(AWAITED);
        let more: BTreeSet<_> = named.filter(|file| !files.contains(file)).cloned().collect();
        files.extend(more);
        files
    }

    /// What tells one state of the files from another.
    async fn stamps(&self) -> Stamps {
        stamps(self.files()).await
    }
}

async fn stamps(files: Vec<PathBuf>) -> Stamps {
    // A file system may be slow to answer.
    tokio::task::spawn_blocking(move || Stamps::of(files)).await.unwrap_or_default()
}

/// Ends when one of the files is not as it was.
async fn changed(was: Stamps) {
    loop {
        tokio::time::sleep(LOOK).await;
        if stamps(was.files()).await != was {
            return;
        }
    }
}

/// Never where there is no time.
async fn until(time: Option<Instant>) {
    match time {
        Some(time) => tokio::time::sleep_until(time).await,
        None => std::future::pending().await,
    }
}

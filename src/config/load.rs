//! Reading a configuration with all of its secrets, as often as need be.

use std::path::PathBuf;
use std::time::Duration;

use tokio::time::Instant;

use super::commands::{Given, SecretCommand, Secrets};
use super::errors::Mistake;
use super::{Config, ConfigError, Overrides, file, zero};

/// How long files may take to be read: one may lie on a mount that is gone, or be a pipe without an end.
const READ: Duration = Duration::from_secs(30);

/// Where a configuration comes from.
#[derive(Debug, Clone)]
pub enum ConfigSource {
    /// A file, with the variables of this process.
    File(PathBuf),
    /// The variables of this process alone.
    Environment,
}

/// Reads one configuration again and again, and knows when it is time to. Whoever serves by it keeps one.
#[derive(Debug)]
pub struct Loader {
    source: ConfigSource,
    overrides: Overrides,
    secrets: Secrets,
    adapt: fn(Config) -> Config,
}

impl Loader {
    /// Reads `source`.
    pub fn new(source: ConfigSource) -> Self {
        let (overrides, secrets) = (Overrides::default(), Secrets::default());
        Self { source, overrides, secrets, adapt: |config| config }
    }

    /// The same with what the command line says over it.
    #[must_use]
    pub fn with(mut self, overrides: Overrides) -> Self {
        self.overrides = overrides;
        self
    }

    /// From now on passes what is read through `adapt`.
    pub fn adapt(&mut self, adapt: fn(Config) -> Config) {
        self.adapt = adapt;
    }

    /// Reads and checks the configuration with its secrets as they are now: files are read anew, commands that are
    /// due run, and others have what they gave before.
    ///
    /// # Errors
    /// Every mistake of the configuration. A command that fails is none: its key has what it had, or is pending.
    ///
    /// Safe to drop: what was not finished is due still.
    pub async fn load(&mut self) -> Result<Config, ConfigError> {
        self.load_with(false).await
    }

    /// The same without waiting for commands that gave a secret before, or failed: they stay due. Files must not
    /// wait for a command that hangs.
    ///
    /// # Errors
    /// As above.
    pub async fn load_files(&mut self) -> Result<Config, ConfigError> {
        self.load_with(true).await
    }

    async fn load_with(&mut self, only_new: bool) -> Result<Config, ConfigError> {
        let (config, commands) = match self.read().await {
            Ok(read) => read,
            Err(error) => {
                self.secrets.put_off();
                return Err(error);
            }
        };
        // Only for a configuration that is sound otherwise is anything run.
        let config = if self.secrets.run_due(commands, &config.secret_variables, only_new).await {
            self.read().await?.0
        } else {
            config
        };
        Ok((self.adapt)(config))
    }

    /// Files block, and no thread of the runtime may.
    async fn read(&self) -> Result<(Config, Vec<SecretCommand>), ConfigError> {
        let (source, overrides, given) = (self.source.clone(), self.overrides.clone(), self.secrets.given());
        let reading = tokio::task::spawn_blocking(move || read_now(&source, &overrides, &given));
        let failed = |problem: String| {
            let name = match &self.source {
                ConfigSource::File(path) => path.display().to_string(),
                ConfigSource::Environment => zero::ORIGIN.to_owned(),
            };
            ConfigError::of(vec![Mistake::of(&name, problem)])
        };
        match tokio::time::timeout(READ, reading).await {
            Ok(Ok(read)) => read,
            // A panic's payload could be anything.
            Ok(Err(_panic)) => Err(failed("could not be read: a mistake of lessor's own".into())),
            Err(_) => Err(failed(format!(
                "was not read within {READ:?}: is it, or a file that it names, a pipe or on a mount that is gone?"
            ))),
        }
    }

    /// The same without running a command, for who needs no secret: keys whose secrets come from one are pending.
    ///
    /// # Errors
    /// As above.
    pub fn load_without_commands(&self) -> Result<Config, ConfigError> {
        read_now(&self.source, &self.overrides, &Given::none()).map(|(config, _)| (self.adapt)(config))
    }

    /// When a command is due, so that the configuration is to be read again; `None` where none ever is.
    pub fn next_due(&self) -> Option<Instant> {
        self.secrets.next_due()
    }

    /// Makes every command due: a person asked for a reading of everything.
    pub fn make_all_due(&mut self) {
        self.secrets.make_all_due();
    }

    /// The keys that have no secret, and why, one line each.
    pub fn pending(&self) -> Vec<String> {
        self.secrets.pending()
    }
}

fn read_now(
    source: &ConfigSource,
    overrides: &Overrides,
    given: &Given,
) -> Result<(Config, Vec<SecretCommand>), ConfigError> {
    let (mut config, mut commands) = match source {
        ConfigSource::File(path) => file::load_given(path, given)?,
        ConfigSource::Environment => (zero::from_environment(&|name| std::env::var(name).ok())?, Vec::new()),
    };
    overrides.apply(&mut config)?;
    commands.retain(|command| overrides.serves(&command.provider));
    if config.keys.is_empty() {
        let nothing = "there is no key: every request to a provider will be refused; add [[keys]]";
        config.warnings.push(nothing.into());
    }
    Ok((config, commands))
}

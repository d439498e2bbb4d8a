//! `lessor`: reads its settings, builds the rooms, runs until told to stop.

use std::io::{IsTerminal as _, Write as _};
use std::process::ExitCode;

use lessor::config::{self, Config, ConfigError, ConfigSource, Listen, Loader};
use lessor::control::cli::{self, Cli, Command, Exit, Options};
use lessor::control::doctor::outside as doctor;
use lessor::control::exec::{self, Companion};
use lessor::control::kubernetes;
use lessor::explain::{self, Answer};
use lessor::{logs, process, run};

fn main() -> ExitCode {
    let mut left = process::hide();
    logs::hide_panic_payloads();
    let cli = cli::parse();
    // What is run by `exec` has the limits that its user gave it.
    if !matches!(cli.command, Command::Exec(_)) {
        left.extend(process::limit());
    }
    match &cli.command {
        Command::Exec(what) => with_runtime(false, cli::served(&cli.options, listen))
            .map_or(Exit::Failed.into(), |found| {
                exec::exec(what, &cli.options, found, || loader(&cli.options).load_without_commands())
            }),
        Command::Env(what) => with_runtime(false, cli::served(&cli.options, listen))
            .map_or(Exit::Failed.into(), |found| exec::env(what, &cli.options, found)),
        Command::Companion(what) if what.apart => serve(&cli, &left),
        Command::Companion(Companion { watch: Some(sidecar), of, .. }) => {
            with_runtime(false, exec::watch(*sidecar, *of)).map_or(Exit::Failed, |()| Exit::Ok).into()
        }
        Command::Companion(what) => exec::step_apart(*what, &cli.options),
        Command::Doctor(what) => {
            let settings = async || checked(&cli.options).await;
            let examined = doctor::doctor(what, &cli.options, listen, settings, run::doctors_tools());
            with_runtime(false, examined).unwrap_or(Exit::Failed.into())
        }
        Command::Inject(what) => match &what.review {
            Some(file) => kubernetes::print_review(file, what),
            None => inject(&cli, what, &left),
        },
        Command::Version => cli::version(&cli.options),
        Command::Check(cli::Check { schema: true, .. }) => {
            say(config::SCHEMA.trim_end());
            Exit::Ok.into()
        }
        Command::Check(cli::Check { explain: Some(words), .. }) => explained(&cli, words),
        Command::Check(_) => check(&cli),
        Command::Run(_) => serve(&cli, &left),
        Command::Ask(_) => ask(cli),
    }
}

fn ask(cli: Cli) -> ExitCode {
    let Command::Ask(what) = cli.command else { return Exit::Usage.into() };
    with_runtime(false, cli::client(what, &cli.options, listen)).unwrap_or(Exit::Failed.into())
}

/// Where a file is named it only says where the sidecar listens; its secrets are not needed by who asks.
fn listen(file: &std::path::Path) -> Result<Listen, String> {
    config::load_listen(file).map_err(|error| error.to_string())
}

/// The settings: of the file that was named, else of the environment.
fn loader(options: &Options) -> Loader {
    let named = options.config().map(|path| ConfigSource::File(path.to_owned()));
    Loader::new(named.unwrap_or(ConfigSource::Environment))
}

/// The same with what the command line of `run` says over them.
fn loader_to_serve(cli: &Cli) -> Loader {
    let loader = loader(&cli.options);
    match &cli.command {
        Command::Run(what) => loader.with(what.overrides()),
        _ => loader,
    }
}

/// The same for who only looks: a key without a secret is a warning.
async fn checked(options: &Options) -> Result<Config, ConfigError> {
    let mut loader = loader(options);
    let mut config = loader.load().await?;
    config.warnings.extend(loader.pending());
    Ok(config)
}

fn serve(cli: &Cli, left: &[String]) -> ExitCode {
    let json = cli.options.json || !std::io::stderr().is_terminal();
    // Held to the end: dropping it writes what is still queued.
    let companion = match cli.command {
        Command::Companion(what) => Some(what.of),
        _ => None,
    };
    // The terminal of `exec` is its command's.
    let _lines = match logs::init(Some(json), if companion.is_some() { "warn" } else { "info" }) {
        Ok(lines) => lines,
        Err(error) => return refuse(&format!("lessor: no thread could be started: {error}"), Exit::Failed),
    };
    for line in left {
        tracing::warn!("{line}");
    }
    let work = async {
        let mut loader = loader_to_serve(cli);
        let config = match loader.load().await {
            Ok(config) => config,
            Err(error) => return refuse(&error.to_string(), Exit::Usage),
        };
        let ended = match companion {
            Some(of) => run::accompany(config, loader, of).await,
            None => run::run(config, loader, !json).await,
        };
        match ended {
            Ok(()) => Exit::Ok.into(),
            Err(error) => refuse(&format!("lessor: {}", run::with_causes(&error)), Exit::Failed),
        }
    };
    with_runtime(true, work).unwrap_or_else(|| Exit::Failed.into())
}

/// `lessor inject`, the webhook.
fn inject(cli: &Cli, what: &kubernetes::Inject, left: &[String]) -> ExitCode {
    let json = cli.options.json || !std::io::stderr().is_terminal();
    // Held to the end: dropping it writes what is still queued.
    let _lines = match logs::init(Some(json), "info") {
        Ok(lines) => lines,
        Err(error) => return refuse(&format!("lessor: no thread could be started: {error}"), Exit::Failed),
    };
    for line in left {
        tracing::warn!("{line}");
    }
    match with_runtime(true, kubernetes::serve(what)) {
        Some(Ok(())) => Exit::Ok.into(),
        Some(Err(error @ kubernetes::InjectError::Usage(_))) => {
            refuse(&format!("error: {error}"), Exit::Usage)
        }
        Some(Err(error)) => refuse(&format!("lessor: {}", run::with_causes(&error)), Exit::Failed),
        None => Exit::Failed.into(),
    }
}

fn check(cli: &Cli) -> ExitCode {
    let Some(settings) = with_runtime(false, checked(&cli.options)) else { return Exit::Failed.into() };
    match settings {
        Ok(config) if cli.options.json => {
            let (keys, providers) = (config.keys.len(), config.providers.len());
            let found = serde_json::json!({
                "ok": true, "config": config.origin, "keys": keys, "providers": providers,
                "store": { "kind": config.store.url.kind(), "url": config.store.url.to_string() },
                "warnings": config.warnings,
            });
            say(&found.to_string());
            Exit::Ok.into()
        }
        Err(error) if cli.options.json => {
            say(&serde_json::json!({ "ok": false, "error": error.to_string() }).to_string());
            Exit::Usage.into()
        }
        Ok(config) => {
            for warning in &config.warnings {
                tell(&format!("warning: {warning}"));
            }
            say(&format!(
                "{}: ok, {} of {}, store {}",
                config.origin,
                counted(config.keys.len(), "key"),
                counted(config.providers.len(), "provider"),
                config.store.url
            ));
            Exit::Ok.into()
        }
        Err(error) => refuse(&error.to_string(), Exit::Usage),
    }
}

/// `lessor check --explain PROVIDER STATUS [FILE]`.
fn explained(cli: &Cli, words: &[String]) -> ExitCode {
    let (Some(name), Some(status)) = (words.first(), words.get(1)) else { return Exit::Usage.into() };
    let provider = match cli.options.config() {
        Some(path) => match config::load_provider(path, name) {
            Ok(provider) => provider,
            Err(error) => return refuse(&error.to_string(), Exit::Usage),
        },
        None => config::catalogue::builtin().get(name.as_str()).cloned(),
    };
    let Some(provider) = provider else {
        let why = format!("error: `{name}` is no provider of the catalogue or of --config FILE");
        return refuse(&why, Exit::Usage);
    };
    let Ok(status) = status.parse() else {
        return refuse(&format!("error: `{status}` is no status; it is three digits"), Exit::Usage);
    };
    let answer = words.get(2).map_or_else(|| Ok(Answer::default()), |file| Answer::load(file.as_ref()));
    let answer = match answer {
        Ok(answer) => answer,
        Err(why) => return refuse(&format!("error: {why}"), Exit::Usage),
    };
    let found = explain::explain(&provider, status, &answer, std::time::SystemTime::now());
    let page = if cli.options.json {
        // A struct of texts and numbers: there is nothing in it that JSON could not say.
        serde_json::to_string_pretty(&found).unwrap_or_default()
    } else {
        found.to_string().trim_end().to_owned()
    };
    say(&page);
    Exit::Ok.into()
}

/// Runs `work` on a runtime of its own; `None`, said on stderr, when there can be none. `serves`: on as many
/// threads as there are CPUs for it. Where that is one, as for most sidecars, a runtime that hands nothing to other
/// threads is the cheaper one.
fn with_runtime<T>(serves: bool, work: impl Future<Output = T>) -> Option<T> {
    let cpus = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let mut builder = if serves && cpus > 1 {
        tokio::runtime::Builder::new_multi_thread()
    } else {
        tokio::runtime::Builder::new_current_thread()
    };
    match builder.enable_all().build() {
        Ok(runtime) => {
            let done = runtime.block_on(work);
            // What still runs (a resolver's thread, say) must not hold up the end.
            runtime.shutdown_background();
            Some(done)
        }
        Err(error) => {
            tell(&format!("lessor: no runtime could be started: {error}"));
            None
        }
    }
}

fn counted(count: usize, one: &str) -> String {
    format!("{count} {one}{}", if count == 1 { "" } else { "s" })
}

fn refuse(why: &str, exit: Exit) -> ExitCode {
    tell(why);
    exit.into()
}

/// To stdout. Who has gone (`| head`) is no failure.
fn say(text: &str) {
    let mut out = std::io::stdout().lock();
    let _ = writeln!(out, "{text}").and_then(|()| out.flush());
}

/// To stderr.
fn tell(text: &str) {
    let _ = writeln!(std::io::stderr().lock(), "{text}");
}

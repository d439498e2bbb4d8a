//! How many instructions lessor spends on a request and on an event of a stream, and whether they have become
//! more.
//!
//! `cargo bench --profile dev --bench instructions` builds lessor optimised, runs it under Valgrind, which must be
//! on PATH, and holds the counts against those in `figures.toml`. A count does not depend on how busy a machine
//! is. Each is the difference between two runs, so what a start takes is not in it.
#![allow(clippy::print_stdout, clippy::print_stderr, missing_docs)]

mod traffic;

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use clap::Parser;
use rustix::process::{Pid, Signal, kill_process};
use serde::Deserialize;

use traffic::{Traffic, Upstream};

type Result<T> = std::result::Result<T, Box<dyn std::error::Error + Send + Sync>>;

/// How much more than its figure a count may be. What depends on time (renewals, the log's thread) makes up
/// less than a hundredth.
const TOLERANCE: f64 = 1.05;
/// How long lessor may take to serve, or to end, under Valgrind.
const PATIENCE: Duration = Duration::from_mins(1);
/// What both runs of a count begin with: connections, and all that is made once.
const FEW: u64 = 200;
const MANY: u64 = 1200;

/// Counts lessor's instructions.
#[derive(Debug, Parser)]
struct Options {
    /// The lessor to count; unless said, cargo builds it
    #[arg(long)]
    lessor: Option<PathBuf>,
    /// What cargo says to every benchmark
    #[arg(long, hide = true)]
    bench: bool,
}

/// What was counted when it was last looked at.
#[derive(Debug, Deserialize)]
struct Figures {
    request: f64,
    event: f64,
}

fn main() -> ExitCode {
    match measure(&Options::parse()) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(cause) => {
            eprintln!("instructions: {cause}");
            ExitCode::FAILURE
        }
    }
}

/// Whether all is within its figure.
fn measure(options: &Options) -> Result<bool> {
    let figures: Figures = toml::from_str(include_str!("figures.toml"))?;
    let lessor = options.lessor.clone().map_or_else(build, Ok)?;
    let upstream = Upstream::start()?;
    let each = |traffic: fn(u64) -> Traffic| -> Result<f64> {
        let (few, many) =
            (count(&lessor, &upstream, traffic(FEW))?, count(&lessor, &upstream, traffic(MANY))?);
        #[allow(clippy::cast_precision_loss)] // far below what a float holds
        Ok(many.saturating_sub(few) as f64 / (MANY - FEW) as f64)
    };
    let request = judge("request", each(Traffic::Requests)?, figures.request);
    let event = judge("event", each(Traffic::Events)?, figures.event);
    Ok(request && event)
}

/// Says what was counted, and whether that is no more than it was.
fn judge(what: &str, counted: f64, figure: f64) -> bool {
    println!("instructions per {what}: {counted:.0}, {:.3} of the figure {figure:.0}", counted / figure);
    if counted > figure * TOLERANCE {
        eprintln!(
            "That is more than {TOLERANCE} times as many. Find out by `valgrind --tool=callgrind` what takes them; where \
             they are worth it, write {counted:.0} to benches/instructions/figures.toml."
        );
    } else if counted * TOLERANCE < figure {
        println!(
            "That is less: write {counted:.0} to benches/instructions/figures.toml, so that it stays so."
        );
    }
    counted <= figure * TOLERANCE
}

fn build() -> Result<PathBuf> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut command = Command::new(cargo);
    command.args(["build", "--quiet", "--profile", "counted", "--locked", "--bin", "lessor"]);
    command.args(["--manifest-path", concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml")]);
    if !command.status()?.success() {
        return Err("lessor could not be built".into());
    }
    Ok(Path::new(env!("CARGO_TARGET_TMPDIR")).with_file_name("counted").join("lessor"))
}

/// The instructions of one run of lessor with this traffic.
fn count(lessor: &Path, upstream: &Upstream, traffic: Traffic) -> Result<u64> {
    let folder = tempfile::TempDir::new_in(env!("CARGO_TARGET_TMPDIR"))?;
    let counts = folder.path().join("counts");
    let mut running = Running(start(lessor, upstream, folder.path(), &counts)?);
    let done = running.address(folder.path()).and_then(|port| traffic.send(port, upstream));
    let ended = running.end();
    done.and(ended).map_err(|cause| {
        let said = fs::read_to_string(folder.path().join("stderr")).unwrap_or_default();
        let tail: String = said.lines().rev().take(5).collect::<Vec<_>>().join("\n");
        format!("{cause}\n{tail}")
    })?;
    let said = fs::read_to_string(&counts)?;
    let line = said.lines().find_map(|line| {
        line.split_once("refs:")
            .filter(|(before, _)| before.ends_with('I') || before.trim_end().ends_with('I'))
    });
    let (_, number) = line.ok_or("Valgrind told no count")?;
    Ok(number.replace(',', "").trim().parse()?)
}

fn start(lessor: &Path, upstream: &Upstream, folder: &Path, counts: &Path) -> Result<Child> {
    let key = |nth| {
        format!(
            "\n[[keys]]\nid = \"key-{nth}\"\nprovider = \"openai\"\nsecret = {{ env = \"KEY_{nth}\" }}\n\
             max_concurrent_uses = 100\nmodels = [\"gpt-*\"]\n"
        )
    };
    let keys = (0..8).map(key).collect::<Vec<_>>().concat();
    let config = format!(
        "[listen]\nproxy = \"127.0.0.1:0\"\nadmin = \"127.0.0.1:0\"\n\n[providers.openai]\nbase_url = \
         \"http://127.0.0.1:{}\"\n{keys}",
        upstream.port
    );
    fs::write(folder.join("lessor.toml"), config)?;
    let mut command = Command::new("valgrind");
    command.args(["--tool=cachegrind", "--cache-sim=no", "--cachegrind-out-file=/dev/null"]);
    command.arg(format!("--log-file={}", counts.display())).arg(lessor);
    command.args(["run", "--config"]).arg(folder.join("lessor.toml"));
    command.env_clear().env("XDG_RUNTIME_DIR", folder);
    command.envs((0..8).map(|nth| (format!("KEY_{nth}"), format!("sk-proj-{nth}{}", "aB3x".repeat(39)))));
    command.env("PATH", std::env::var_os("PATH").unwrap_or_default());
    command.stdout(Stdio::null()).stderr(File::create(folder.join("stderr"))?);
    let found = "needs valgrind on PATH; on Debian: apt-get install valgrind";
    command.spawn().map_err(|cause| format!("{cause}; this benchmark {found}").into())
}

/// lessor under Valgrind. Killed with this value, if it has not ended.
struct Running(Child);

impl Running {
    /// The port that it says it listens on.
    fn address(&mut self, folder: &Path) -> Result<u16> {
        let begun = Instant::now();
        while begun.elapsed() < PATIENCE {
            let said = fs::read_to_string(folder.join("stderr"))?;
            let mut lines =
                said.lines().filter_map(|line| serde_json::from_str::<serde_json::Value>(line).ok());
            if let Some(line) = lines.find(|line| line["message"] == "listening") {
                let port = line["proxy"].as_str().and_then(|at| at.rsplit_once(':')?.1.parse().ok());
                return port.ok_or_else(|| "lessor told no port".into());
            }
            if let Some(status) = self.0.try_wait()? {
                return Err(format!("lessor ended with {status}").into());
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        Err(format!("lessor did not listen within {PATIENCE:?}").into())
    }

    /// Ends it, so that Valgrind tells what it counted.
    fn end(&mut self) -> Result<()> {
        let pid = i32::try_from(self.0.id()).ok().and_then(Pid::from_raw).ok_or("no process id")?;
        kill_process(pid, Signal::TERM)?;
        let begun = Instant::now();
        while begun.elapsed() < PATIENCE {
            if let Some(status) = self.0.try_wait()? {
                return if status.success() {
                    Ok(())
                } else {
                    Err(format!("lessor ended with {status}").into())
                };
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        Err(format!("lessor did not end within {PATIENCE:?}").into())
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // It has ended already, unless something failed.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

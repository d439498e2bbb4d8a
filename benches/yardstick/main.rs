//! How fast lessor is, beside nginx that adds a fixed header and beside a bare hyper proxy, the floor.
//!
//! `cargo bench --bench yardstick` runs all parts and prints Markdown; `-- --part cpu --rounds 3` only some,
//! `-- --help` says what else. It needs two CPUs, which nothing else should use meanwhile, and nginx and
//! redis-server on PATH. The proxies run on CPU 0, one at a time; load, upstream and Redis on CPU 1.
//! Figures are `median (least–most)` of the rounds; ratios are between what ran in the same round.
#![allow(clippy::print_stdout, clippy::print_stderr, missing_docs)]

mod certs;
mod client;
mod clock;
mod figures;
mod floor;
#[path = "../stores/leasing.rs"]
mod leasing;
mod load;
mod parts;
mod peers;
mod process;
mod table;
mod upstream;

use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::time::Duration;

use clap::{Parser, Subcommand, ValueEnum};
use tokio::io::AsyncReadExt as _;

use parts::Bench;
use peers::{Store, Upstream, World};

pub(crate) type Result<T> = std::result::Result<T, Box<dyn std::error::Error + Send + Sync>>;

/// Measures lessor beside nginx and a bare hyper proxy.
#[derive(Debug, Parser)]
pub(crate) struct Options {
    /// Parts to run, all unless said
    #[arg(long, value_enum, value_delimiter = ',')]
    part: Vec<Part>,
    /// How often each peer is measured
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u16).range(1..))]
    rounds: u16,
    /// How long each measuring under load lasts
    #[arg(long, default_value = "2", value_parser = seconds)]
    seconds: Duration,
    /// How many streams are open in `memory`
    #[arg(long, default_value_t = 1000)]
    streams: usize,
    /// How long each overload lasts
    #[arg(long, default_value = "8", value_parser = seconds)]
    overload_seconds: Duration,
    /// Come before all other work of the machine, which alone makes figures of a busy one count; needs root
    #[arg(long)]
    first: bool,
    /// Stores to measure lessor with, all unless said
    #[arg(long, value_enum, value_delimiter = ',')]
    only: Vec<Store>,
    /// The lessor to measure; unless said, `cargo build --release` makes it
    #[arg(long)]
    lessor: Option<PathBuf>,
    /// Another lessor to measure beside it
    #[arg(long)]
    other: Option<PathBuf>,
    /// What cargo says to every benchmark
    #[arg(long, hide = true)]
    bench: bool,
    #[command(subcommand)]
    role: Option<Role>,
}

fn seconds(text: &str) -> Result<Duration> {
    Ok(Duration::try_from_secs_f64(text.parse()?)?)
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Part {
    /// CPU a request and requests a second at full load
    Cpu,
    /// What a request waits longer at 200 a second
    Latency,
    /// How late events of streams come
    Sse,
    /// 100 MiB down and up
    Bulk,
    /// Memory of a new process and of each open stream
    Memory,
    /// From start to the first answer
    Start,
    /// As `cpu`, TLS to the provider
    Tls,
    /// A lease in each store
    Stores,
    /// Looking for the key in 100 MiB
    Scrub,
    /// CONNECT and TLS beside base-URL mode
    Intercept,
    /// Ten times as many callers as slots
    Overload,
}

/// What this program is when it starts itself.
#[derive(Debug, Subcommand)]
enum Role {
    #[command(hide = true)]
    ServeUpstream { certs: PathBuf },
    #[command(hide = true)]
    ServeFloor { upstream: http::Uri, certs: PathBuf },
}

fn main() -> ExitCode {
    match start(Options::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(cause) => {
            eprintln!("yardstick: {cause}");
            ExitCode::FAILURE
        }
    }
}

fn start(mut options: Options) -> Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    match options.role.take() {
        Some(role) => runtime.block_on(serve(role)),
        None => runtime.block_on(measure(options)),
    }
}

/// Serves until the process that started this one has ended, however that came.
async fn serve(role: Role) -> Result<()> {
    let ended = async {
        let _ = tokio::io::stdin().read(&mut [0]).await; // nothing is ever sent
        Ok(())
    };
    match role {
        Role::ServeUpstream { certs } => {
            tokio::select! { done = upstream::serve(&certs) => done, done = ended => done }
        }
        Role::ServeFloor { upstream, certs } => {
            tokio::select! { done = floor::serve(upstream, &certs) => done, done = ended => done }
        }
    }
}

async fn measure(options: Options) -> Result<()> {
    let lessor = options.lessor.clone().map_or_else(build, Ok)?;
    process::pin(process::LOAD)?;
    let _first = options.first.then(process::First::take).transpose()?;
    let descriptors = process::take_descriptors();
    let world = World::new(&lessor, descriptors)?;
    introduce(&world, options.first)?;
    let bench = Bench { world, options };
    let asked = match &bench.options.part[..] {
        [] => Part::value_variants(),
        some => some,
    };
    for part in asked {
        match part {
            Part::Cpu => parts::cpu::run(&bench, Upstream::Plain).await?,
            Part::Latency => parts::latency::run(&bench).await?,
            Part::Sse => parts::sse::run(&bench).await?,
            Part::Bulk => parts::bulk::run(&bench).await?,
            Part::Memory => parts::memory::run(&bench).await?,
            Part::Start => parts::start::run(&bench).await?,
            Part::Tls => parts::cpu::run(&bench, Upstream::Tls).await?,
            Part::Stores => parts::stores::run(&bench).await?,
            Part::Scrub => parts::bulk::scrub(&bench).await?,
            Part::Intercept => parts::intercept::run(&bench).await?,
            Part::Overload => parts::overload::run(&bench).await?,
        }
    }
    Ok(())
}

/// What a user runs: the tests' dependencies, which this program has, switch on features that lessor has not.
fn build() -> Result<PathBuf> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut command = Command::new(cargo);
    command.args(["build", "--quiet", "--release", "--locked", "--bin", "lessor"]);
    command.args(["--manifest-path", concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml")]);
    if !command.status()?.success() {
        return Err("lessor could not be built".into());
    }
    Ok(Path::new(env!("CARGO_TARGET_TMPDIR")).with_file_name("release").join("lessor"))
}

/// Says on what and with what it was measured.
fn introduce(world: &World, first: bool) -> Result<()> {
    let first_line = |command: &mut Command| -> Result<String> {
        let output = command.stdin(Stdio::null()).output()?;
        let said = [output.stdout, output.stderr].concat();
        Ok(String::from_utf8_lossy(&said).lines().next().unwrap_or_default().to_owned())
    };
    let load = std::fs::read_to_string("/proc/loadavg")?;
    let load = load.split(' ').take(3).collect::<Vec<_>>().join(" ");
    let cpus = std::fs::read_to_string("/proc/cpuinfo")?;
    let mut models = cpus.lines().filter_map(|line| line.strip_prefix("model name")?.split_once(": "));
    let model = models.next().map_or("CPU", |(_, name)| name);
    let lessor = first_line(Command::new(&world.lessor).arg("version"))?;
    let nginx = first_line(Command::new("nginx").arg("-v")).unwrap_or_else(|_| "no nginx".into());
    let redis = first_line(Command::new("redis-server").arg("-v")).unwrap_or_else(|_| "no Redis".into());
    let priority = if first { "before other processes" } else { "with the priority of others" };
    say(&format!(
        "{lessor}; {nginx}; {redis}\n{model}; load average at the start {load}; run {priority}; {} descriptors \
         a process\n",
        world.descriptors
    ));
    Ok(())
}

pub(crate) fn say(line: &str) {
    println!("{line}");
}

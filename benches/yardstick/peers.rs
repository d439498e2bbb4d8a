//! What is measured: nginx, the floor and lessor, each with its own process on the same CPU.

use std::fs::{self, File};
use std::io::{BufRead as _, BufReader};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::client::Target;
use super::process::{LOAD, PROXY, Running};
use super::{Result, certs};

/// How long a peer may take to serve.
const START: Duration = Duration::from_secs(20);
/// The pool: as many keys, and as long, as a team has.
pub(crate) const KEYS: usize = 8;

/// The folder of one run, and the provider that all peers stand before.
pub(crate) struct World {
    folder: tempfile::TempDir,
    /// The release binary.
    pub(crate) lessor: PathBuf,
    upstream: Running,
    plain: u16,
    tls: u16,
    /// Descriptors of each process.
    pub(crate) descriptors: u64,
}

/// How the provider is reached.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Upstream {
    Plain,
    Tls,
}

/// Where leases live.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Store {
    Memory,
    Sqlite,
    Redis,
}

/// How a lessor differs from one as it comes.
#[derive(Debug, Clone)]
pub(crate) struct Settings {
    pub(crate) store: Store,
    /// Of each key.
    pub(crate) uses: u32,
    /// Further lines for its configuration.
    pub(crate) lines: String,
    /// Further lines for its provider.
    pub(crate) provider: &'static str,
}

impl Settings {
    pub(crate) fn of(store: Store) -> Self {
        Self { store, uses: 2000, lines: String::new(), provider: "" }
    }
}

/// One of those that are measured beside each other.
pub(crate) struct Peer {
    pub(crate) name: String,
    pub(crate) target: Target,
    /// None for the upstream without a proxy.
    pub(crate) process: Option<Running>,
    /// Its Redis.
    pub(crate) redis: Option<Running>,
    /// Where health and metrics are served.
    pub(crate) admin: Option<u16>,
}

impl World {
    pub(crate) fn new(lessor: &Path, descriptors: u64) -> Result<Self> {
        let folder = tempfile::TempDir::new_in(env!("CARGO_TARGET_TMPDIR"))?;
        // A copy: the next build must not change what is measured.
        let copy = folder.path().join("lessor");
        fs::copy(lessor, &copy).map_err(|cause| format!("{}: {cause}", lessor.display()))?;
        certs::write(folder.path())?;
        let (upstream, ports) = own("serve-upstream", &[folder.path().as_os_str()], LOAD)?;
        let [plain, tls] = ports[..] else { return Err("the upstream told no ports".into()) };
        Ok(Self { folder, lessor: copy, upstream, plain, tls, descriptors })
    }

    pub(crate) fn upstream(&self) -> &Running {
        &self.upstream
    }

    pub(crate) fn certs(&self) -> &Path {
        self.folder.path()
    }

    /// The upstream itself.
    pub(crate) fn direct(&self) -> Peer {
        peer("no proxy", Target::new(self.plain, ""), None)
    }

    pub(crate) fn floor(&self, to: Upstream) -> Result<Peer> {
        let arguments = [self.url(to).into(), self.folder.path().as_os_str().to_owned()];
        let (process, ports) = own("serve-floor", &arguments.each_ref().map(AsRef::as_ref), PROXY)?;
        let [port] = ports[..] else { return Err("the floor told no port".into()) };
        Ok(peer("floor (bare hyper)", Target::new(port, ""), Some(process)))
    }

    pub(crate) fn nginx(&self, to: Upstream) -> Result<Peer> {
        let port = free_port()?;
        let folder = self.part("nginx")?;
        fs::write(folder.join("nginx.conf"), self.nginx_conf(to, port, &folder))?;
        let mut command = Command::new("nginx");
        command.arg("-c").arg(folder.join("nginx.conf")).arg("-p").arg(&folder);
        command.stdout(Stdio::null()).stderr(File::create(folder.join("stderr"))?);
        let mut process = Running::start(&mut command, PROXY).map_err(|cause| install("nginx", &*cause))?;
        open(port, &mut process, &folder)?;
        Ok(peer("nginx", Target::new(port, ""), Some(process)))
    }

    /// How many nginx must have room for.
    pub(crate) fn connections(&self) -> u64 {
        self.descriptors.min(20_000) - 100
    }

    /// Streaming settings, no log; the header is one of a key's length.
    fn nginx_conf(&self, to: Upstream, port: u16, folder: &Path) -> String {
        let folder = folder.display();
        let certs = self.folder.path().display();
        let (scheme, to, secret) = match to {
            Upstream::Plain => ("http", self.plain, secret(0)),
            Upstream::Tls => ("https", self.tls, secret(0)),
        };
        let connections = self.connections();
        format!(
            "worker_processes 1; daemon off; pid {folder}/pid; error_log {folder}/errors warn;
events {{ worker_connections {connections}; }}
http {{
  access_log off; tcp_nodelay on; keepalive_requests 100000000; keepalive_timeout 600s;
  client_body_temp_path {folder}/1; proxy_temp_path {folder}/2; fastcgi_temp_path {folder}/3;
  uwsgi_temp_path {folder}/4; scgi_temp_path {folder}/5;
  upstream up {{ server 127.0.0.1:{to}; keepalive 512; keepalive_requests 100000000; keepalive_timeout 600s; }}
  server {{
    listen 127.0.0.1:{port} backlog=4096; client_max_body_size 0;
    location / {{
      proxy_pass {scheme}://up; proxy_http_version 1.1; proxy_set_header Connection \"\";
      proxy_set_header Authorization \"Bearer {secret}\"; proxy_read_timeout 700s;
      proxy_buffering off; proxy_request_buffering off; proxy_max_temp_file_size 0;
      proxy_ssl_trusted_certificate {certs}/{ca}; proxy_ssl_verify on; proxy_ssl_name localhost;
      proxy_ssl_server_name on; proxy_ssl_session_reuse on;
    }}
  }}
}}
",
            ca = certs::CA
        )
    }

    /// Lessor as its user runs it: metrics, request log and response headers on.
    pub(crate) fn lessor(&self, to: Upstream, settings: &Settings) -> Result<Peer> {
        let name = format!("lessor, {:?}", settings.store).to_lowercase();
        self.lessor_of(&self.lessor, &name, to, settings)
    }

    pub(crate) fn lessor_of(
        &self,
        binary: &Path,
        name: &str,
        to: Upstream,
        settings: &Settings,
    ) -> Result<Peer> {
        let (port, admin) = (free_port()?, free_port()?);
        let folder = self.part("lessor")?;
        let (url, redis) = self.store(settings.store, &folder)?;
        fs::write(folder.join("lessor.toml"), self.lessor_toml(to, settings, &url, (port, admin)))?;
        let mut command = Command::new(binary);
        command.args(["run", "--config"]).arg(folder.join("lessor.toml"));
        command.env_clear().env("XDG_RUNTIME_DIR", &folder);
        command.envs((0..KEYS).map(|nth| (format!("KEY_{nth}"), secret(nth))));
        command.stdout(Stdio::null()).stderr(File::create(folder.join("stderr"))?);
        let mut process = Running::start(&mut command, PROXY)?;
        open(port, &mut process, &folder)?;
        let target = Target::new(port, "/openai");
        Ok(Peer { name: name.into(), target, process: Some(process), redis, admin: Some(admin) })
    }

    fn lessor_toml(&self, to: Upstream, settings: &Settings, store: &str, ports: (u16, u16)) -> String {
        use std::fmt::Write as _;
        let Settings { uses, lines, provider, .. } = settings;
        let (upstream, certs) = (self.url(to), self.folder.path().display());
        let (port, admin) = ports;
        let mut text = format!(
            "[listen]\nproxy = \"127.0.0.1:{port}\"\nadmin = \"127.0.0.1:{admin}\"\n\n[store]\nurl = {store:?}\n\n\
             [providers.openai]\nbase_url = \"{upstream}\"\nca_file = \"{certs}/{ca}\"\n{provider}\n\n{lines}\n",
            ca = certs::CA,
        );
        for nth in 0..KEYS {
            let _ = write!(
                text,
                "\n[[keys]]\nid = \"key-{nth}\"\nprovider = \"openai\"\nsecret = {{ env = \"KEY_{nth}\" }}\n\
                 max_concurrent_uses = {uses}\nmodels = [\"gpt-*\"]\n"
            ); // a String takes everything
        }
        text
    }

    fn store(&self, store: Store, folder: &Path) -> Result<(String, Option<Running>)> {
        Ok(match store {
            Store::Memory => ("memory:".into(), None),
            Store::Sqlite => (format!("sqlite://{}", folder.join("state.db").display()), None),
            Store::Redis => {
                let (server, port) = self.redis(LOAD)?;
                (format!("redis://127.0.0.1:{port}"), Some(server))
            }
        })
    }

    /// A Redis of its own that writes nothing to the disk.
    pub(crate) fn redis(&self, cpu: usize) -> Result<(Running, u16)> {
        let port = free_port()?;
        let folder = self.part("redis")?;
        let mut command = Command::new("redis-server");
        command.args([
            "--port",
            &port.to_string(),
            "--bind",
            "127.0.0.1",
            "--save",
            "",
            "--appendonly",
            "no",
        ]);
        command.current_dir(&folder).stdout(File::create(folder.join("stderr"))?).stderr(Stdio::null());
        let mut server =
            Running::start(&mut command, cpu).map_err(|cause| install("redis-server", &*cause))?;
        open(port, &mut server, &folder)?;
        Ok((server, port))
    }

    fn url(&self, to: Upstream) -> String {
        match to {
            Upstream::Plain => format!("http://127.0.0.1:{}", self.plain),
            Upstream::Tls => format!("https://localhost:{}", self.tls),
        }
    }

    /// A new folder inside the run's own.
    fn part(&self, name: &str) -> Result<PathBuf> {
        Ok(tempfile::Builder::new().prefix(name).disable_cleanup(true).tempdir_in(&self.folder)?.keep())
    }
}

impl Peer {
    /// The same peer, but asked through CONNECT for the provider's own host.
    pub(crate) fn tunnelled(&self, certs: &Path) -> Result<Target> {
        let tunnel = Some(Arc::new(certs::client(certs)?));
        Ok(Target { host: "api.openai.com".into(), prefix: "", tunnel, ..self.target.clone() })
    }
}

fn peer(name: &str, target: Target, process: Option<Running>) -> Peer {
    Peer { name: name.into(), target, process, redis: None, admin: None }
}

/// As long as an OpenAI project key, and as mixed.
fn secret(nth: usize) -> String {
    const LETTERS: &[u8] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789";
    let letter = |at: usize| char::from(LETTERS[(nth * 5 + at * at * 7 + at * 3) % LETTERS.len()]);
    format!("sk-proj-{}", (0..156).map(letter).collect::<String>())
}

/// Another process of this very program, and the ports that it tells.
fn own(role: &str, arguments: &[&std::ffi::OsStr], cpu: usize) -> Result<(Running, Vec<u16>)> {
    let mut command = Command::new(std::env::current_exe()?);
    command.arg(role).args(arguments).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut process = Running::start(&mut command, cpu)?;
    let output = process.child().stdout.take().ok_or("its output is no pipe")?;
    let mut line = String::new();
    BufReader::new(output).read_line(&mut line)?;
    let ports = line.split_whitespace().map(str::parse).collect::<std::result::Result<_, _>>()?;
    Ok((process, ports))
}

/// Waits until it listens.
fn open(port: u16, process: &mut Running, folder: &Path) -> Result<()> {
    let begun = Instant::now();
    while TcpStream::connect(("127.0.0.1", port)).is_err() {
        let why = if let Some(status) = process.ended() {
            status.to_string()
        } else if begun.elapsed() > START {
            format!("not listening after {START:?}")
        } else {
            std::thread::sleep(Duration::from_micros(500));
            continue;
        };
        let said = fs::read_to_string(folder.join("stderr")).unwrap_or_default();
        return Err(format!("{}: {why}\n{said}", folder.display()).into());
    }
    Ok(())
}

fn install(
    what: &str,
    cause: &(dyn std::error::Error + Send + Sync),
) -> Box<dyn std::error::Error + Send + Sync> {
    format!("{cause}\nThe yardstick needs {what} on PATH; on Debian: apt-get install {what}").into()
}

/// A port that was free just now, below those that the kernel gives away by itself.
fn free_port() -> Result<u16> {
    (0..100)
        .map(|_| rand::random_range(10_000..30_000))
        .find(|port| TcpListener::bind(("127.0.0.1", *port)).is_ok())
        .ok_or_else(|| "no free port below 30000".into())
}

//! The lessor process of one test: its own directory, its own ports, and gone when the test ends.

use std::io::{BufRead as _, BufReader, Read as _};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, ExitStatus, Stdio};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use serde_json::Value;

use super::client::{Answer, Door, Raw, Request, Stream, send};
use super::provider::Provider;
use super::{NEVER, eventually, eventually_within, within};

/// Five times as long as lines gather in lessor's log.
const GATHERED: Duration = Duration::from_millis(50);

/// One `[[keys]]` entry.
#[derive(Debug, Clone)]
pub struct Key {
    id: String,
    provider: String,
    secret: String,
    /// Where the secret comes from, as TOML; else its own variable.
    source: Option<String>,
    lines: Vec<String>,
}

impl Key {
    /// A key of `openai` with this id; its secret is `sk-` and the id.
    pub fn new(id: &str) -> Self {
        let secret = format!("sk-{id}");
        Self { id: id.into(), provider: "openai".into(), secret, source: None, lines: Vec::new() }
    }

    /// Of this provider.
    pub fn of(mut self, provider: &str) -> Self {
        self.provider = provider.into();
        self
    }

    /// With this secret.
    pub fn secret(mut self, secret: &str) -> Self {
        self.secret = secret.into();
        self
    }

    /// With its secret from there: the fields of the table, as TOML. `ENV` in it is the variable that holds it.
    pub fn from(mut self, source: &str) -> Self {
        self.source = Some(source.replace("ENV", &format!("env = {:?}", self.variable())));
        self
    }

    /// With these headers: the fields of the table, as TOML.
    pub fn headers(self, headers: &str) -> Self {
        self.line(&format!("headers = {{ {headers} }}"))
    }

    /// With so many uses at once.
    pub fn cap(self, uses: u32) -> Self {
        self.line(&format!("max_concurrent_uses = {uses}"))
    }

    /// For these models only.
    pub fn models(self, models: &[&str]) -> Self {
        self.line(&format!("models = {models:?}"))
    }

    /// In this pool.
    pub fn pool(self, pool: &str) -> Self {
        self.line(&format!("pool = {pool:?}"))
    }

    /// In this group.
    pub fn group(self, group: &str) -> Self {
        self.line(&format!("group = {group:?}"))
    }

    fn line(mut self, line: &str) -> Self {
        self.lines.push(line.into());
        self
    }

    /// The variable its secret stands in.
    fn variable(&self) -> String {
        let name = format!("SECRET_{}_{}", self.provider, self.id);
        name.to_ascii_uppercase().replace(['-', '.'], "_")
    }
}

/// What a lessor is started with.
#[derive(Debug, Clone)]
pub struct Setup {
    /// Dotted keys at the root of the file; of two with one name the later counts.
    settings: Vec<(String, String)>,
    keys: Vec<Key>,
    env: Vec<(String, String)>,
}

impl Default for Setup {
    fn default() -> Self {
        let setup = Self { settings: Vec::new(), keys: Vec::new(), env: Vec::new() };
        setup.set("listen.proxy", "\"127.0.0.1:0\"").set("listen.admin", "\"127.0.0.1:0\"")
    }
}

impl Setup {
    /// A lessor with no provider yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// One whose `openai` is this double.
    pub fn openai(provider: &Provider) -> Self {
        Self::new().provider("openai", provider)
    }

    /// With `name` at this double.
    pub fn provider(self, name: &str, provider: &Provider) -> Self {
        let setup = self.set(&format!("providers.{name}.base_url"), &format!("{:?}", provider.base_url()));
        if provider.tls() {
            let ca_file = format!("{:?}", provider.ca_file().display().to_string());
            return setup.set(&format!("providers.{name}.ca_file"), &ca_file);
        }
        setup
    }

    /// With this setting: a dotted name, and its value as TOML.
    pub fn set(mut self, name: &str, toml: &str) -> Self {
        self.settings.retain(|(other, _)| other != name);
        self.settings.push((name.into(), toml.into()));
        self
    }

    /// With this key.
    pub fn key(mut self, key: Key) -> Self {
        self.keys.push(key);
        self
    }

    /// With this variable in its environment.
    pub fn env(mut self, name: &str, value: &str) -> Self {
        self.env.push((name.into(), value.into()));
        self
    }

    /// The configuration file.
    pub fn toml(&self) -> String {
        let mut text = String::new();
        for (name, value) in &self.settings {
            text.push_str(&format!("{name} = {value}\n"));
        }
        for key in &self.keys {
            text.push_str(&format!("\n[[keys]]\nid = {:?}\nprovider = {:?}\n", key.id, key.provider));
            let source = key.source.clone().unwrap_or_else(|| format!("env = {:?}", key.variable()));
            text.push_str(&format!("secret = {{ {source} }}\n"));
            for line in &key.lines {
                text.push_str(&format!("{line}\n"));
            }
        }
        text
    }

    /// Starts it and waits until it listens.
    pub async fn start(self) -> Lessor {
        let mut lessor = self.spawn();
        lessor.listening().await;
        lessor
    }

    /// Starts it in a fresh directory and does not wait.
    pub fn spawn(self) -> Lessor {
        self.spawn_in(Arc::new(Home::default()))
    }

    /// Starts it in this directory and does not wait.
    pub fn spawn_in(self, home: Arc<Home>) -> Lessor {
        let config = home.path().join("lessor.toml");
        std::fs::write(&config, self.toml()).unwrap();
        let has = |key: &&Key| key.source.as_ref().is_none_or(|source| source.contains("env = "));
        let secrets = self.keys.iter().filter(has).map(|key| (key.variable(), key.secret.clone()));
        let env: Vec<_> = secrets.chain(self.env.clone()).collect();
        let args = ["run".into(), "--config".into(), config.display().to_string()];
        Lessor::spawn(home, &args, &env)
    }
}

/// A directory that stands for a user's: runtime directory, home, configuration.
#[derive(Debug)]
pub struct Home(tempfile::TempDir);

impl Default for Home {
    fn default() -> Self {
        use std::os::unix::fs::PermissionsExt as _;
        let dir = tempfile::tempdir().unwrap();
        let run = dir.path().join("run");
        std::fs::create_dir(&run).unwrap();
        std::fs::set_permissions(&run, std::fs::Permissions::from_mode(0o700)).unwrap();
        Self(dir)
    }
}

impl Home {
    /// Writes a file there, executable where it is a script.
    pub fn write(&self, name: &str, text: &str) -> PathBuf {
        use std::os::unix::fs::PermissionsExt as _;
        let (path, new) = (self.path().join(name), self.path().join(format!("{name}.new")));
        std::fs::write(&new, text).unwrap();
        let mode = if text.starts_with("#!") { 0o700 } else { 0o600 };
        std::fs::set_permissions(&new, std::fs::Permissions::from_mode(mode)).unwrap();
        // Whoever runs it meanwhile has the old one or the new one, whole.
        std::fs::rename(&new, &path).unwrap();
        path
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        self.0.path()
    }

    /// `lessor` with nothing in its environment but this directory and a search path.
    pub fn command(&self) -> std::process::Command {
        let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_lessor"));
        command
            .env_clear()
            .env("PATH", std::env::var_os("PATH").unwrap_or_default())
            .env("HOME", self.path())
            .env("XDG_RUNTIME_DIR", self.path().join("run"))
            .current_dir(self.path())
            .stdin(Stdio::null());
        command
    }

    /// Runs `lessor` with these arguments to its end.
    pub async fn run(&self, args: &[&str]) -> Ran {
        self.run_with(args, &[]).await
    }

    /// The same with variables.
    pub async fn run_with(&self, args: &[&str], env: &[(&str, &str)]) -> Ran {
        let mut command = self.command();
        command.args(args).envs(env.iter().copied());
        run(command).await
    }
}

/// Runs a command to its end, in bounded time.
pub async fn run(command: std::process::Command) -> Ran {
    run_within(Duration::from_secs(60), command).await
}

/// The same with a bound of one's own.
pub async fn run_within(limit: Duration, command: std::process::Command) -> Ran {
    let mut command = tokio::process::Command::from(command);
    command.kill_on_drop(true).stdin(Stdio::null());
    let what = format!("{:?}", command.as_std());
    let output = within(limit, &what, command.output()).await;
    let output = output.unwrap_or_else(|why| panic!("{what}: {why}"));
    Ran {
        code: output.status.code(),
        stdout: String::from_utf8_lossy(&output.stdout).into_owned(),
        stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
    }
}

/// How a command ended, and what it said.
#[derive(Debug, Clone)]
pub struct Ran {
    pub code: Option<i32>,
    pub stdout: String,
    pub stderr: String,
}

impl Ran {
    /// Fails unless it exited with 0; then what it printed.
    #[track_caller]
    pub fn ok(&self) -> &str {
        assert_eq!(self.code, Some(0), "{self:#?}");
        &self.stdout
    }

    /// What it printed, as JSON.
    #[track_caller]
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.stdout).unwrap_or_else(|why| panic!("{why} in {self:#?}"))
    }
}

/// A running lessor. Killed when dropped; its log is shown if the test fails.
pub struct Lessor {
    child: Child,
    home: Arc<Home>,
    stderr: Arc<Mutex<String>>,
    stdout: Arc<Mutex<String>>,
    doors: Vec<Door>,
    admin: Option<SocketAddr>,
    socket: PathBuf,
}

impl Drop for Lessor {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        if std::thread::panicking() {
            eprintln!("--- lessor said ---\n{}-------------------", self.log());
        }
    }
}

impl Lessor {
    /// Starts `lessor` with these arguments and variables.
    pub fn spawn(home: Arc<Home>, args: &[String], env: &[(String, String)]) -> Self {
        let mut command = home.command();
        command.args(args).envs(env.iter().map(|(name, value)| (name, value)));
        Self::of(home, command)
    }

    /// Starts it by a command of one's own, which becomes `lessor`.
    pub fn of(home: Arc<Home>, mut command: std::process::Command) -> Self {
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let (stdout, stderr) = (Arc::default(), Arc::default());
        collect(child.stdout.take().unwrap(), Arc::clone(&stdout));
        collect(child.stderr.take().unwrap(), Arc::clone(&stderr));
        let (doors, admin, socket) = (Vec::new(), None, PathBuf::new());
        Self { child, home, stderr, stdout, doors, admin, socket }
    }

    /// Waits until it listens, and learns where.
    pub async fn listening(&mut self) {
        let limit = Duration::from_secs(30); // a loaded machine may take its time to start a process
        let line = eventually_within(limit, "lessor says that it listens", async || {
            if let Some(status) = self.child.try_wait().unwrap() {
                panic!("lessor ended with {status} before it listened: {}", self.log());
            }
            self.log_lines().into_iter().find(|line| field(line, "message") == "listening")
        });
        let line = line.await;
        let proxies = field(&line, "proxy");
        let doors = proxies.split(',').map(|at| match at.trim().strip_prefix("unix:") {
            Some(path) => Door::Unix(path.into()),
            None => Door::Tcp(at.trim().parse().unwrap_or_else(|why| panic!("{why}: {at:?}"))),
        });
        self.doors = doors.collect();
        self.admin = field(&line, "admin").parse().ok();
        self.socket = field(&line, "admin_socket").into();
    }

    /// Its directory.
    pub fn home(&self) -> Arc<Home> {
        Arc::clone(&self.home)
    }

    /// Its process id.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// The first proxy listener.
    pub fn door(&self) -> &Door {
        &self.doors[0]
    }

    /// All proxy listeners.
    pub fn doors(&self) -> &[Door] {
        &self.doors
    }

    /// `host:port` of the first proxy listener.
    pub fn authority(&self) -> String {
        self.door().host()
    }

    /// `http://host:port` of the first proxy listener.
    pub fn url(&self) -> String {
        format!("http://{}", self.authority())
    }

    /// The admin TCP listener.
    pub fn admin_door(&self) -> Door {
        Door::Tcp(self.admin.expect("an admin listener on TCP"))
    }

    /// The admin socket.
    pub fn admin_socket(&self) -> &Path {
        &self.socket
    }

    /// All it wrote to stderr. What was logged by now is in it: lines gather for a moment before they are written.
    pub fn log(&self) -> String {
        std::thread::sleep(GATHERED);
        self.stderr.lock().unwrap().clone()
    }

    /// All it wrote to stdout.
    pub fn stdout(&self) -> String {
        self.stdout.lock().unwrap().clone()
    }

    /// The JSON lines of its log.
    pub fn log_lines(&self) -> Vec<Value> {
        let whole = self.log();
        whole.lines().filter_map(|line| serde_json::from_str(line).ok()).collect()
    }

    /// Sends a request and returns when the answer's head is here.
    pub async fn open(&self, request: Request) -> Stream {
        self.try_open(request).await.unwrap()
    }

    /// The same, where the connection may break.
    pub async fn try_open(&self, request: Request) -> Result<Stream, hyper::Error> {
        within(NEVER * 2, "the head of an answer", send(self.door(), request)).await
    }

    /// Sends a request and reads the whole answer.
    pub async fn ask(&self, request: Request) -> Answer {
        self.open(request).await.whole().await.expect("a whole answer")
    }

    /// A GET.
    pub async fn get(&self, target: &str) -> Answer {
        self.ask(Request::get(target)).await
    }

    /// A chat request to `openai`.
    pub async fn chat(&self) -> Answer {
        self.ask(chat("gpt-4o-mini")).await
    }

    /// A raw connection to the first proxy listener.
    pub async fn raw(&self) -> Raw {
        Raw::connect(self.door()).await
    }

    /// A GET on the admin TCP listener.
    pub async fn admin(&self, path: &str) -> Answer {
        within(NEVER, path, send(&self.admin_door(), Request::get(path)))
            .await
            .unwrap()
            .whole()
            .await
            .unwrap()
    }

    /// A POST on the admin socket.
    pub async fn admin_post(&self, path: &str) -> Answer {
        let door = Door::Unix(self.socket.clone());
        let answer = within(NEVER, path, send(&door, Request::new("POST", path))).await.unwrap();
        answer.whole().await.unwrap()
    }

    /// One key as the admin API shows it.
    pub async fn key(&self, id: &str) -> Value {
        let keys = self.admin("/v1/keys").await.json();
        let keys = keys["keys"].as_array().expect("a list of keys").clone();
        keys.into_iter().find(|key| key["id"] == id).unwrap_or_else(|| panic!("no key {id}"))
    }

    /// A key's status.
    pub async fn status(&self, id: &str) -> String {
        self.key(id).await["status"].as_str().unwrap().to_owned()
    }

    /// How many slots of a key are in use.
    pub async fn in_use(&self, id: &str) -> u64 {
        self.key(id).await["in_use"].as_u64().unwrap()
    }

    /// Waits until so many slots of a key are in use.
    pub async fn comes_to_use(&self, id: &str, uses: u64) {
        let what = format!("{uses} slots of {id} in use");
        eventually(&what, async || (self.in_use(id).await == uses).then_some(())).await;
    }

    /// Fails unless no slot of a key is in use within a second.
    pub async fn is_free_within_a_second(&self, id: &str) {
        let limit = Duration::from_secs(1);
        let what = format!("{id} is free");
        eventually_within(limit, &what, async || (self.in_use(id).await == 0).then_some(())).await;
    }

    /// One number of `/metrics`: the first line that starts with `name`, 0 when there is none.
    pub async fn metric(&self, name: &str) -> f64 {
        let text = self.admin("/metrics").await.text();
        let line = text.lines().find(|line| line.starts_with(name));
        line.and_then(|line| line.rsplit(' ').next()).map_or(0.0, |value| value.parse().unwrap())
    }

    /// Waits until so many requests are queued.
    pub async fn comes_to_queue(&self, waiting: usize) {
        let what = format!("{waiting} requests in the queue");
        let probe = async || (self.metric("lessor_queue_depth").await as usize == waiting).then_some(());
        eventually(&what, probe).await;
    }

    /// Runs another `lessor` of the same user at this one.
    pub async fn cli(&self, args: &[&str]) -> Ran {
        let socket = self.socket.display().to_string();
        let socket = if socket.starts_with("unix:") { socket } else { format!("unix:{socket}") };
        self.home.run_with(args, &[("LESSOR_ADMIN", &socket)]).await
    }

    /// Sends a signal.
    pub fn signal(&self, signal: rustix::process::Signal) {
        let pid = rustix::process::Pid::from_raw(self.child.id().cast_signed()).unwrap();
        rustix::process::kill_process(pid, signal).unwrap();
    }

    /// Asks it to stop.
    pub fn sigterm(&self) {
        self.signal(rustix::process::Signal::TERM);
    }

    /// Kills it, as a crash would.
    pub fn crash(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// Waits for its end.
    pub async fn ends_within(&mut self, limit: Duration) -> ExitStatus {
        let child = &mut self.child;
        eventually_within(limit, "lessor ends", async || child.try_wait().unwrap()).await
    }

    /// Resident memory in KiB.
    pub fn resident_kib(&self) -> u64 {
        self.proc_kib("VmRSS:")
    }

    /// The most resident memory that it ever had, in KiB.
    pub fn peak_kib(&self) -> u64 {
        self.proc_kib("VmHWM:")
    }

    fn proc_kib(&self, name: &str) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.child.id())).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix(name)).unwrap();
        line.trim().trim_end_matches(" kB").parse().unwrap()
    }
}

/// A chat request for this model.
pub fn chat(model: &str) -> Request {
    let message = serde_json::json!({"role": "user", "content": "Hello"});
    Request::post("/openai/v1/chat/completions", &serde_json::json!({"model": model, "messages": [message]}))
}

/// A field of a log line, wherever the format keeps it.
pub fn field(line: &Value, name: &str) -> String {
    let value = line.get(name).or_else(|| line.get("fields")?.get(name));
    value.map_or(String::new(), |value| value.as_str().map_or(value.to_string(), str::to_owned))
}

fn collect(from: impl std::io::Read + Send + 'static, to: Arc<Mutex<String>>) {
    std::thread::spawn(move || {
        let mut from = BufReader::new(from);
        let mut line = Vec::new();
        while from.by_ref().take(1 << 20).read_until(b'\n', &mut line).is_ok_and(|n| n > 0) {
            to.lock().unwrap().push_str(&String::from_utf8_lossy(&line));
            line.clear();
        }
    });
}

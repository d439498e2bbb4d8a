//! Real Redis servers that a test starts itself: one alone, a cluster, or a primary with sentinels. They
//! can be killed, frozen, emptied and put back to an older state, and they are gone when the test ends.
//!
//! Assertions go through a client of a few lines that is written here, so that they do not rest on the
//! client under test. It has a user of its own, `harness`, which stays when the others are changed.

use std::fmt;
use std::fs::File;
use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use tokio::io::{
    AsyncBufReadExt as _, AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _, BufReader,
};
use tokio::net::TcpStream;

use super::fault::FaultProxy;
use super::provider::Certificates;
use super::{NEVER, free_port, ms};

/// The longest that a start, a failover or a merger of a cluster may take on a loaded machine.
const LONG: Duration = Duration::from_secs(30);

/// The user of the harness.
const USER: &str = "harness";
const PASSWORD: &str = "harness-only";

/// What Redis answered.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Reply {
    Nil,
    Int(i64),
    /// A status or a string.
    Text(String),
    Error(String),
    List(Vec<Reply>),
}

impl Reply {
    /// A status or a string.
    #[track_caller]
    pub fn text(&self) -> &str {
        if let Self::Text(text) = self { text } else { panic!("not a text: {self:?}") }
    }

    /// A number, also one that is written as a string.
    #[track_caller]
    pub fn int(&self) -> i64 {
        match self {
            Self::Int(int) => *int,
            other => other.text().parse().unwrap_or_else(|_| panic!("not a number: {self:?}")),
        }
    }

    /// A list.
    #[track_caller]
    pub fn list(&self) -> &[Reply] {
        if let Self::List(list) = self { list } else { panic!("not a list: {self:?}") }
    }

    /// A list of strings.
    #[track_caller]
    pub fn texts(&self) -> Vec<&str> {
        self.list().iter().map(Reply::text).collect()
    }
}

impl fmt::Display for Reply {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Nil => f.write_str("nil"),
            Self::Int(int) => write!(f, "{int}"),
            Self::Text(text) | Self::Error(text) => f.write_str(text),
            Self::List(list) => {
                for (at, item) in list.iter().enumerate() {
                    write!(f, "{}{item}", if at == 0 { "" } else { " " })?;
                }
                Ok(())
            }
        }
    }
}

impl PartialEq<&str> for Reply {
    fn eq(&self, other: &&str) -> bool {
        matches!(self, Self::Text(text) if text == other)
    }
}

impl PartialEq<i64> for Reply {
    fn eq(&self, other: &i64) -> bool {
        *self == Self::Int(*other)
    }
}

trait Wire: AsyncRead + AsyncWrite + Send + Unpin {}
impl<T: AsyncRead + AsyncWrite + Send + Unpin> Wire for T {}

/// A connection of the harness. It waits as long as it is let: bounds are its caller's.
pub struct Connection {
    wire: BufReader<Box<dyn Wire>>,
    /// Its own end, as Redis names it.
    local: String,
}

impl Connection {
    /// To this server or proxy, over plain TCP and as the default user.
    pub async fn open(addr: SocketAddr) -> io::Result<Self> {
        let tcp = TcpStream::connect(addr).await?;
        tcp.set_nodelay(true)?;
        let local = tcp.local_addr()?.to_string();
        Ok(Self { wire: BufReader::new(Box::new(tcp)), local })
    }

    async fn over_tls(addr: SocketAddr, tls: Arc<rustls::ClientConfig>) -> io::Result<Self> {
        let tcp = TcpStream::connect(addr).await?;
        let local = tcp.local_addr()?.to_string();
        let name = rustls::pki_types::ServerName::from(addr.ip());
        let stream = tokio_rustls::TlsConnector::from(tls).connect(name, tcp).await?;
        Ok(Self { wire: BufReader::new(Box::new(stream)), local })
    }

    /// Sends a command and reads its reply.
    pub async fn call(&mut self, command: &[&str]) -> io::Result<Reply> {
        self.send(command).await?;
        self.reply().await
    }

    /// Sends a command.
    pub async fn send(&mut self, command: &[&str]) -> io::Result<()> {
        let mut frame = format!("*{}\r\n", command.len());
        for word in command {
            frame.push_str(&format!("${}\r\n{word}\r\n", word.len()));
        }
        self.wire.write_all(frame.as_bytes()).await?;
        self.wire.flush().await
    }

    /// Reads one reply.
    pub async fn reply(&mut self) -> io::Result<Reply> {
        let mut line = Vec::new();
        self.wire.read_until(b'\n', &mut line).await?;
        let Some(line) = line.strip_suffix(b"\r\n") else {
            return Err(io::ErrorKind::UnexpectedEof.into());
        };
        let line = String::from_utf8_lossy(line).into_owned();
        let (kind, rest) = line.split_at_checked(1).ok_or(io::ErrorKind::InvalidData)?;
        let number = || rest.parse::<i64>().map_err(|_| io::Error::other(format!("not a number: {line:?}")));
        match kind {
            "+" => Ok(Reply::Text(rest.into())),
            "-" => Ok(Reply::Error(rest.into())),
            ":" => Ok(Reply::Int(number()?)),
            "$" | "*" if number()? < 0 => Ok(Reply::Nil),
            "$" => {
                let len = usize::try_from(number()?).map_err(io::Error::other)?;
                let mut bytes = vec![0; len + 2];
                self.wire.read_exact(&mut bytes).await?;
                bytes.truncate(len);
                Ok(Reply::Text(String::from_utf8_lossy(&bytes).into_owned()))
            }
            "*" => {
                let mut list = Vec::new();
                for _ in 0..number()? {
                    list.push(Box::pin(self.reply()).await?);
                }
                Ok(Reply::List(list))
            }
            _ => Err(io::Error::other(format!("no reply: {line:?}"))),
        }
    }
}

/// What a server keeps through restarts.
#[derive(Debug, Clone, Default)]
pub struct Builder {
    lines: Vec<String>,
    args: Vec<String>,
    tls: bool,
    unixsocket: bool,
    sentinel: bool,
    cluster: bool,
}

impl Builder {
    /// With these further arguments on its command line.
    pub fn args<I: IntoIterator<Item: Into<String>>>(mut self, args: I) -> Self {
        self.args.extend(args.into_iter().map(Into::into));
        self
    }

    /// With this line in its configuration; the value is written as it stands.
    pub fn config(mut self, name: &str, value: &str) -> Self {
        self.lines.push(format!("{name} {value}"));
        self
    }

    /// The default user needs this password.
    pub fn password(self, password: &str) -> Self {
        self.config("requirepass", password)
    }

    /// With this user, by the rules of `ACL SETUSER`.
    pub fn acl_user(self, name: &str, rules: &str) -> Self {
        self.config("user", &format!("{name} {rules}"))
    }

    /// Speaks TLS on its port, and nothing else.
    pub fn tls(mut self) -> Self {
        self.tls = true;
        self
    }

    /// Listens on a Unix socket too.
    pub fn unixsocket(mut self) -> Self {
        self.unixsocket = true;
        self
    }

    /// Starts it on a free port and waits until it answers.
    pub async fn start(self) -> Redis {
        let mut tries = 0;
        loop {
            tries += 1;
            let redis = Redis::prepare(self.clone());
            redis.spawn();
            match redis.comes_up().await {
                Ok(()) => return redis,
                Err(Ended) if redis.port_was_taken() && tries < 20 => {}
                Err(Ended) => redis.fail("it ended before it answered"),
            }
        }
    }
}

/// The process ended.
struct Ended;

struct Running {
    child: Child,
    /// Kills the server when the test process itself is killed, and so drops nothing.
    guard: Child,
    paused: bool,
}

impl Drop for Running {
    fn drop(&mut self) {
        for process in [&mut self.guard, &mut self.child] {
            let _ = process.kill();
            let _ = process.wait();
        }
    }
}

/// The data of a server at one moment.
#[derive(Clone)]
pub struct Snapshot(Vec<u8>);

/// A Redis server. Killed when dropped; the end of its log is shown if the test fails.
pub struct Redis {
    port: u16,
    builder: Builder,
    tls: Option<Arc<rustls::ClientConfig>>,
    running: Mutex<Option<Running>>,
    dir: tempfile::TempDir,
}

impl Drop for Redis {
    fn drop(&mut self) {
        *self.running.lock().unwrap() = None;
        if std::thread::panicking() {
            eprintln!("--- redis on {} said ---\n{}\n-------------------", self.port, self.log_tail());
        }
    }
}

impl Redis {
    /// A server that is not running yet.
    pub fn builder() -> Builder {
        Builder::default()
    }

    /// A plain server without persistence, on a free port of loopback.
    pub async fn start() -> Self {
        Self::builder().start().await
    }

    fn prepare(builder: Builder) -> Self {
        let (port, dir) = (free_port(), tempfile::tempdir().unwrap());
        let mut redis = Self { port, builder, tls: None, running: Mutex::new(None), dir };
        let at = |name: &str| redis.dir.path().join(name).display().to_string();
        let mut lines = vec![
            "bind 127.0.0.1".into(),
            format!("dir {}", redis.dir.path().display()),
            format!("user {USER} on >{PASSWORD} ~* &* +@all"),
        ];
        if redis.builder.tls {
            let made = Certificates::make(&["localhost", "127.0.0.1"]);
            std::fs::write(at("ca.pem"), &made.ca_pem).unwrap();
            std::fs::write(at("cert.pem"), made.cert.pem()).unwrap();
            std::fs::write(at("key.pem"), made.key.serialize_pem()).unwrap();
            redis.tls = Some(Arc::new(trusting(&redis.dir.path().join("ca.pem"))));
            lines.extend(["port 0".into(), format!("tls-port {port}"), "tls-auth-clients no".into()]);
            lines.push(format!("tls-ca-cert-file {}", at("ca.pem")));
            lines.push(format!("tls-cert-file {}", at("cert.pem")));
            lines.push(format!("tls-key-file {}", at("key.pem")));
        } else {
            lines.push(format!("port {port}"));
        }
        if redis.builder.unixsocket {
            lines.push(format!("unixsocket {}", at("redis.sock")));
        }
        if redis.builder.cluster {
            lines.extend(["cluster-enabled yes".into(), format!("cluster-port {}", free_port())]);
        }
        if !redis.builder.sentinel {
            lines.extend(["save \"\"", "appendonly no", "enable-debug-command local"].map(String::from));
        }
        lines.extend(redis.builder.lines.iter().cloned());
        std::fs::write(at("redis.conf"), lines.join("\n") + "\n").unwrap();
        redis
    }

    fn spawn(&self) {
        let log = File::options().append(true).create(true).open(self.dir.path().join("log")).unwrap();
        let mut command = Command::new("redis-server");
        command.arg(self.dir.path().join("redis.conf")).args(&self.builder.args);
        command.args(self.builder.sentinel.then_some("--sentinel"));
        command.stdin(Stdio::null()).stdout(log.try_clone().unwrap()).stderr(log);
        let child = command.spawn().unwrap_or_else(|why| {
            panic!("redis-server does not start ({why}); these tests need it: run .ci/setup")
        });
        let mut guard = Command::new("sh");
        guard.args(["-c", "read -r _; kill -9 \"$1\"", "sh"]).arg(child.id().to_string());
        guard.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null());
        let guard = guard.spawn().unwrap();
        *self.running.lock().unwrap() = Some(Running { child, guard, paused: false });
    }

    /// Waits until this very process answers, and not one that came to its port first.
    async fn comes_up(&self) -> Result<(), Ended> {
        let pid = self.pid();
        let begun = Instant::now();
        loop {
            let ended = self.running.lock().unwrap().as_mut().unwrap().child.try_wait().unwrap();
            if ended.is_some() {
                *self.running.lock().unwrap() = None;
                return Err(Ended);
            }
            if let Ok(info) = self.ask(&["INFO", "server"]).await
                && info.text().lines().any(|line| line == format!("process_id:{pid}"))
                && self.ask(&["PING"]).await.is_ok()
            {
                return Ok(());
            }
            if begun.elapsed() > LONG {
                self.fail("it does not answer");
            }
            tokio::time::sleep(ms(5)).await;
        }
    }

    fn port_was_taken(&self) -> bool {
        self.log_tail().contains("Address already in use")
    }

    /// Where it listens.
    pub fn addr(&self) -> SocketAddr {
        ([127, 0, 0, 1], self.port).into()
    }

    /// Its port.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Its URL, without a password.
    pub fn url(&self) -> String {
        let scheme = if self.tls.is_some() { "rediss" } else { "redis" };
        format!("{scheme}://127.0.0.1:{}", self.port)
    }

    /// The CA of a server that speaks TLS.
    pub fn ca_file(&self) -> PathBuf {
        assert!(self.tls.is_some(), "this server speaks no TLS");
        self.dir.path().join("ca.pem")
    }

    /// The Unix socket of a server that has one.
    pub fn socket(&self) -> PathBuf {
        assert!(self.builder.unixsocket, "this server has no Unix socket");
        self.dir.path().join("redis.sock")
    }

    /// Its process id.
    pub fn pid(&self) -> u32 {
        self.running.lock().unwrap().as_ref().expect("a running server").child.id()
    }

    /// Whether it runs and is not paused.
    pub fn is_up(&self) -> bool {
        self.running.lock().unwrap().as_ref().is_some_and(|running| !running.paused)
    }

    /// All that it logged, through all restarts.
    pub fn log(&self) -> String {
        std::fs::read_to_string(self.dir.path().join("log")).unwrap_or_default()
    }

    fn log_tail(&self) -> String {
        let log = self.log();
        let lines: Vec<&str> = log.lines().collect();
        lines[lines.len().saturating_sub(40)..].join("\n")
    }

    #[track_caller]
    fn fail(&self, what: &str) -> ! {
        panic!("redis on port {}: {what}; its log ends with\n{}", self.port, self.log_tail())
    }

    /// A connection of the harness's own user.
    pub async fn connect(&self) -> io::Result<Connection> {
        let mut connection = match &self.tls {
            Some(tls) => Connection::over_tls(self.addr(), Arc::clone(tls)).await?,
            None => Connection::open(self.addr()).await?,
        };
        match connection.call(&["AUTH", USER, PASSWORD]).await? {
            Reply::Error(why) => Err(io::Error::other(why)),
            _ => Ok(connection),
        }
    }

    /// What it answers, or its error, or why there is no answer.
    pub async fn ask(&self, command: &[&str]) -> Result<Reply, String> {
        let asking = async { self.connect().await?.call(command).await };
        match tokio::time::timeout(NEVER, asking).await {
            Ok(Ok(Reply::Error(why))) => Err(why),
            Ok(Ok(reply)) => Ok(reply),
            Ok(Err(why)) => Err(why.to_string()),
            Err(_) => Err(format!("no answer within {NEVER:?}")),
        }
    }

    /// What it answers; an error fails the test.
    pub async fn command(&self, command: &[&str]) -> Reply {
        self.ask(command).await.unwrap_or_else(|why| self.fail(&format!("{command:?}: {why}")))
    }

    /// One field of `INFO`.
    pub async fn info(&self, field: &str) -> String {
        let info = self.command(&["INFO", "everything"]).await;
        let line = info.text().lines().find_map(|line| line.strip_prefix(field)?.strip_prefix(':'));
        line.unwrap_or_else(|| self.fail(&format!("INFO has no {field}"))).to_owned()
    }

    /// `master` or `slave`; `None` while it does not answer. A change of role ends all its connections.
    pub async fn role(&self) -> Option<String> {
        let role = self.ask(&["ROLE"]).await.ok()?;
        Some(role.list()[0].text().to_owned())
    }

    /// How often this command was called, whoever did.
    pub async fn calls(&self, command: &str) -> u64 {
        let stats = self.command(&["INFO", "commandstats"]).await;
        let name = format!("cmdstat_{}:calls=", command.to_lowercase());
        let calls = stats.text().lines().find_map(|line| line.strip_prefix(&name)?.split(',').next());
        calls.map_or(0, |calls| calls.parse().unwrap())
    }

    /// `SCRIPT FLUSH`, as after a restart or a failover.
    pub async fn flush_scripts(&self) {
        self.command(&["SCRIPT", "FLUSH"]).await;
    }

    /// Kills it with -9.
    pub fn kill(&self) {
        *self.running.lock().unwrap() = None;
    }

    /// Kills it if it runs, and starts it again on the same port with what its directory holds: of a server
    /// alone nothing, for it saves nothing by itself; of a replica what it last took over.
    pub async fn restart(&self) {
        self.kill();
        let begun = Instant::now();
        loop {
            let before = self.log().len();
            self.spawn();
            match self.comes_up().await {
                Ok(()) => return,
                // Somebody may have the port for a moment, or the killed one's connections may.
                Err(Ended) if self.log()[before..].contains("Address already in use") => {}
                Err(Ended) => self.fail("it ended before it answered"),
            }
            if begun.elapsed() > NEVER {
                self.fail("its port is taken");
            }
            tokio::time::sleep(ms(20)).await;
        }
    }

    /// Kills it if it runs, and starts it again on the same port with no data.
    pub async fn restart_empty(&self) {
        self.kill();
        let _ = std::fs::remove_file(self.dir.path().join("dump.rdb"));
        self.restart().await;
    }

    /// Kills it if it runs, and starts it again on the same port with this data.
    pub async fn restart_with(&self, snapshot: &Snapshot) {
        self.kill();
        std::fs::write(self.dir.path().join("dump.rdb"), &snapshot.0).unwrap();
        self.restart().await;
    }

    /// Its data as they are now.
    pub async fn snapshot(&self) -> Snapshot {
        self.command(&["SAVE"]).await;
        let file = self.dir.path().join("dump.rdb");
        let snapshot = Snapshot(std::fs::read(&file).unwrap());
        std::fs::remove_file(file).unwrap(); // so that a plain restart stays an empty one
        snapshot
    }

    /// Freezes it: connections stay, and get no answer.
    pub async fn pause(&self) {
        self.signal(Signal::STOP, true);
        let stat = format!("/proc/{}/stat", self.pid());
        let stopped = || {
            let stat = std::fs::read_to_string(&stat).unwrap_or_default();
            stat.rsplit(") ").next().is_some_and(|rest| rest.starts_with('T'))
        };
        self.eventually("it stops", NEVER, async || stopped().then_some(())).await;
    }

    /// Lets it go on.
    pub fn resume(&self) {
        self.signal(Signal::CONT, false);
    }

    fn signal(&self, signal: Signal, paused: bool) {
        let mut running = self.running.lock().unwrap();
        let running = running.as_mut().expect("a running server");
        running.paused = paused;
        kill_process(Pid::from_child(&running.child), signal).unwrap();
    }

    /// Collects every command that it executes, until dropped. The harness's own are among them.
    pub async fn monitor(&self) -> Monitor<'_> {
        let mut connection =
            self.connect().await.unwrap_or_else(|why| self.fail(&format!("no monitor: {why}")));
        let answer = tokio::time::timeout(NEVER, connection.call(&["MONITOR"])).await;
        assert!(matches!(answer, Ok(Ok(Reply::Text(_)))), "MONITOR: {answer:?}");
        let lines = Arc::new(Mutex::new(Vec::new()));
        let collected = Arc::clone(&lines);
        let task = tokio::spawn(async move {
            while let Ok(line) = connection.reply().await {
                collected.lock().unwrap().push(line.to_string());
            }
        });
        Monitor { redis: self, lines, task }
    }

    /// Every key with its type, its time to live and its value, one a line.
    pub async fn dump(&self) -> String {
        let mut dump = String::new();
        let mut keys: Vec<String> = Vec::new();
        let mut cursor = "0".to_owned();
        loop {
            let page = self.command(&["SCAN", &cursor, "COUNT", "1000"]).await;
            keys.extend(page.list()[1].texts().into_iter().map(String::from));
            page.list()[0].text().clone_into(&mut cursor);
            if cursor == "0" {
                break;
            }
        }
        keys.sort();
        keys.dedup();
        for key in keys {
            let kind = self.command(&["TYPE", &key]).await;
            let value = match kind.text() {
                "string" => self.ask(&["GET", &key]).await,
                "hash" => self.ask(&["HGETALL", &key]).await,
                "list" => self.ask(&["LRANGE", &key, "0", "-1"]).await,
                "set" => self.ask(&["SMEMBERS", &key]).await,
                "zset" => self.ask(&["ZRANGE", &key, "0", "-1", "WITHSCORES"]).await,
                "stream" => self.ask(&["XRANGE", &key, "-", "+"]).await,
                _ => continue, // it expired since
            };
            let value = value.unwrap_or_else(|why| self.fail(&why));
            let ttl = self.command(&["PTTL", &key]).await;
            dump.push_str(&format!("{key} {kind} {ttl} {value}\n"));
        }
        dump
    }

    /// Its slow log as text: all commands, when it runs with `slowlog-log-slower-than 0`.
    pub async fn slowlog(&self) -> String {
        let log = self.command(&["SLOWLOG", "GET", "-1"]).await;
        log.list().iter().map(|entry| format!("{entry}\n")).collect()
    }

    /// Asks again and again until `probe` has an answer; fails with the log.
    pub async fn eventually<T>(
        &self,
        what: &str,
        limit: Duration,
        mut probe: impl AsyncFnMut() -> Option<T>,
    ) -> T {
        let begun = Instant::now();
        loop {
            if let Some(answer) = probe().await {
                return answer;
            }
            if begun.elapsed() > limit {
                self.fail(&format!("not within {limit:?}: {what}"));
            }
            tokio::time::sleep(ms(10)).await;
        }
    }
}

/// A client's configuration that trusts this CA alone.
pub fn trusting(ca_file: &Path) -> rustls::ClientConfig {
    use rustls::pki_types::pem::PemObject as _;
    let mut roots = rustls::RootCertStore::empty();
    roots.add(rustls::pki_types::CertificateDer::from_pem_file(ca_file).unwrap()).unwrap();
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let config = rustls::ClientConfig::builder_with_provider(provider);
    let config = config.with_safe_default_protocol_versions().unwrap();
    config.with_root_certificates(roots).with_no_client_auth()
}

/// What a server executes.
pub struct Monitor<'a> {
    redis: &'a Redis,
    lines: Arc<Mutex<Vec<String>>>,
    task: tokio::task::JoinHandle<()>,
}

impl Drop for Monitor<'_> {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Monitor<'_> {
    /// All lines up to now. While the server is up that is exact: a mark of this call's own is awaited, and
    /// taken out again.
    pub async fn lines(&self) -> Vec<String> {
        let mark = format!("mark-{}", rand::random::<u64>());
        let marking = async {
            let mut connection = self.redis.connect().await?;
            connection.call(&["ECHO", &mark]).await?;
            Ok::<_, io::Error>(connection.local)
        };
        if self.redis.is_up()
            && let Ok(Ok(local)) = tokio::time::timeout(NEVER, marking).await
        {
            let seen = async || {
                let lines = self.lines.lock().unwrap();
                (self.task.is_finished() || lines.iter().any(|line| line.contains(&mark))).then_some(())
            };
            self.redis.eventually("MONITOR shows a mark", NEVER, seen).await;
            let origin = format!(" {local}] ");
            self.lines.lock().unwrap().retain(|line| !line.contains(&origin));
        }
        self.lines.lock().unwrap().clone()
    }
}

/// The slots of a cluster.
const SLOTS: usize = 16_384;

/// A Redis Cluster: the masters first, then their replicas.
pub struct Cluster {
    nodes: Vec<Redis>,
    ids: Vec<String>,
}

impl Cluster {
    /// So many masters.
    pub async fn start(masters: usize) -> Self {
        Self::with_replicas(masters, 0).await
    }

    /// So many masters, each with so many replicas: those of master `i` begin at `masters + i * replicas`.
    pub async fn with_replicas(masters: usize, replicas: usize) -> Self {
        Self::with(masters, replicas, |builder| builder).await
    }

    /// The same, with nodes of another configuration.
    pub async fn with(masters: usize, replicas: usize, configure: impl Fn(Builder) -> Builder) -> Self {
        let mut nodes = Vec::new();
        for _ in 0..masters * (1 + replicas) {
            let mut builder = Redis::builder().config("cluster-node-timeout", "1000");
            builder = builder.config("cluster-replica-validity-factor", "0");
            builder = builder.config("repl-diskless-sync-delay", "0");
            builder.cluster = true;
            nodes.push(configure(builder).start().await);
        }
        let mut ids = Vec::new();
        for node in &nodes {
            ids.push(node.command(&["CLUSTER", "MYID"]).await.text().to_owned());
        }
        let cluster = Self { nodes, ids };
        cluster.form(masters, replicas).await;
        cluster
    }

    async fn form(&self, masters: usize, replicas: usize) {
        for (at, node) in self.nodes.iter().enumerate() {
            node.command(&["CLUSTER", "SET-CONFIG-EPOCH", &(at + 1).to_string()]).await;
        }
        for (at, node) in self.nodes[..masters].iter().enumerate() {
            let (first, after) = (at * SLOTS / masters, (at + 1) * SLOTS / masters);
            let range = [first.to_string(), (after - 1).to_string()];
            node.command(&["CLUSTER", "ADDSLOTSRANGE", &range[0], &range[1]]).await;
        }
        for node in &self.nodes[1..] {
            let bus = node.command(&["CONFIG", "GET", "cluster-port"]).await;
            let (port, bus) = (node.port.to_string(), bus.list()[1].text());
            self.nodes[0].command(&["CLUSTER", "MEET", "127.0.0.1", &port, bus]).await;
        }
        for node in &self.nodes {
            let all = self.nodes.len();
            node.eventually("the cluster's nodes know each other", LONG, async || {
                let known = node.ask(&["CLUSTER", "NODES"]).await.ok()?;
                (known.text().lines().count() == all && !known.text().contains("handshake")).then_some(())
            })
            .await;
        }
        for (at, replica) in self.nodes[masters..].iter().enumerate() {
            replica.command(&["CLUSTER", "REPLICATE", &self.ids[at / replicas]]).await;
        }
        for replica in &self.nodes[masters..] {
            replica
                .eventually("a replica has its master's data", LONG, async || {
                    (replica.info("master_link_status").await == "up").then_some(())
                })
                .await;
        }
        for node in &self.nodes {
            node.eventually("all nodes know all replicas", LONG, async || {
                let known = node.ask(&["CLUSTER", "NODES"]).await.ok()?;
                let known = known.text().lines().filter(|line| line.contains("slave"));
                (known.count() == masters * replicas).then_some(())
            })
            .await;
        }
        self.comes_to_ok().await;
    }

    /// Waits until all nodes that are up say that the cluster is.
    pub async fn comes_to_ok(&self) {
        for node in self.nodes.iter().filter(|node| node.is_up()) {
            node.eventually("cluster_state:ok", LONG, async || {
                let info = node.ask(&["CLUSTER", "INFO"]).await.ok()?;
                info.text().contains("cluster_state:ok").then_some(())
            })
            .await;
        }
    }

    /// One node.
    pub fn node(&self, node: usize) -> &Redis {
        &self.nodes[node]
    }

    /// All nodes.
    pub fn nodes(&self) -> &[Redis] {
        &self.nodes
    }

    /// The URLs of all nodes.
    pub fn urls(&self) -> Vec<String> {
        self.nodes.iter().map(Redis::url).collect()
    }

    /// What a node answers; an error fails the test.
    pub async fn command_on(&self, node: usize, command: &[&str]) -> Reply {
        self.nodes[node].command(command).await
    }

    /// The slot of a key.
    pub async fn slot_of(&self, key: &str) -> u16 {
        let slot = self.first_up().command(&["CLUSTER", "KEYSLOT", key]).await;
        u16::try_from(slot.int()).unwrap()
    }

    /// The master of a slot, as the first node that is up sees it.
    pub async fn node_of_slot(&self, slot: u16) -> usize {
        let node = self.seen_by(self.first_up(), slot).await;
        node.unwrap_or_else(|| panic!("slot {slot} has no node"))
    }

    /// The master of a key's slot.
    pub async fn node_of_key(&self, key: &str) -> usize {
        self.node_of_slot(self.slot_of(key).await).await
    }

    /// Kills a node with -9.
    pub fn kill(&self, node: usize) {
        self.nodes[node].kill();
    }

    /// Makes a replica of this master the master in its place, without loss; all nodes know it on return.
    pub async fn failover(&self, node: usize) -> usize {
        let replica = self.replica_of(node).await;
        self.command_on(replica, &["CLUSTER", "FAILOVER"]).await;
        self.comes_to_be_master(replica).await;
        replica
    }

    /// A replica of this master that is up; waits until there is one.
    pub async fn replica_of(&self, node: usize) -> usize {
        let found = async || {
            let replicas = self.command_on(node, &["CLUSTER", "REPLICAS", &self.ids[node]]).await;
            let ids = replicas.texts().into_iter().filter_map(|line| line.split(' ').next());
            ids.filter_map(|id| self.with_id(id)).find(|replica| self.nodes[*replica].is_up())
        };
        self.nodes[node].eventually("it has a replica", LONG, found).await
    }

    /// Waits until a node, once its master's replica, holds slots in the eyes of all that are up.
    pub async fn comes_to_be_master(&self, node: usize) {
        for seer in self.nodes.iter().filter(|node| node.is_up()) {
            let what = format!("node {node} is a master for the one on {}", seer.port);
            self.nodes[node]
                .eventually(&what, LONG, async || self.masters(seer).await.contains(&node).then_some(()))
                .await;
        }
        self.comes_to_ok().await;
    }

    /// Every key of every master, as [`Redis::dump`] has it.
    pub async fn dump(&self) -> String {
        let mut dump = String::new();
        for node in self.masters(self.first_up()).await {
            dump.push_str(&self.nodes[node].dump().await);
        }
        dump
    }

    fn first_up(&self) -> &Redis {
        self.nodes.iter().find(|node| node.is_up()).expect("a node that is up")
    }

    /// Clients are told to find this node behind this proxy, and so are replicas of it.
    pub async fn reach_through(&self, node: usize, proxy: &FaultProxy) {
        let port = proxy.addr().port().to_string();
        self.command_on(node, &["CONFIG", "SET", "cluster-announce-port", &port]).await;
        for seer in self.nodes.iter().filter(|node| node.is_up()) {
            let known = async || {
                let nodes = seer.ask(&["CLUSTER", "NODES"]).await.ok()?;
                nodes.text().contains(&format!("127.0.0.1:{port}@")).then_some(())
            };
            seer.eventually("it knows a node by its new port", LONG, known).await;
        }
    }

    fn with_id(&self, id: &str) -> Option<usize> {
        self.ids.iter().position(|other| other == id)
    }

    /// First and last slot of each range, and its master.
    async fn ranges(&self, seer: &Redis) -> Vec<(i64, i64, usize)> {
        let ranges = seer.command(&["CLUSTER", "SLOTS"]).await;
        let range = |range: &Reply| {
            let range = range.list();
            Some((range[0].int(), range[1].int(), self.with_id(range[2].list()[2].text())?))
        };
        ranges.list().iter().filter_map(range).collect()
    }

    async fn seen_by(&self, seer: &Redis, slot: u16) -> Option<usize> {
        let slot = i64::from(slot);
        let mut ranges = self.ranges(seer).await.into_iter();
        ranges.find(|(first, last, _)| (*first..=*last).contains(&slot)).map(|(.., node)| node)
    }

    /// The masters that hold slots, each once.
    async fn masters(&self, seer: &Redis) -> Vec<usize> {
        let mut masters: Vec<usize> = self.ranges(seer).await.into_iter().map(|(.., node)| node).collect();
        masters.sort_unstable();
        masters.dedup();
        masters
    }
}

/// A primary and a replica, under sentinels that know them as `primary`.
pub struct Sentinels {
    data: [Redis; 2],
    sentinels: Vec<Redis>,
}

impl Sentinels {
    /// Under one sentinel.
    pub async fn start() -> Self {
        Self::with(1, |builder| builder).await
    }

    /// Under so many sentinels, of which most must agree; the two servers with this configuration.
    pub async fn with(sentinels: usize, configure: impl Fn(Builder) -> Builder) -> Self {
        let builder = || configure(Redis::builder().config("repl-diskless-sync-delay", "0"));
        let primary = builder().start().await;
        let replica = builder().config("replicaof", &format!("127.0.0.1 {}", primary.port)).start().await;
        let in_sync = async || (replica.info("master_link_status").await == "up").then_some(());
        replica.eventually("the replica is in sync", LONG, in_sync).await;
        let quorum = sentinels / 2 + 1;
        let mut group = Self { data: [primary, replica], sentinels: Vec::new() };
        for _ in 0..sentinels {
            let mut builder = Redis::builder()
                .config("sentinel monitor primary 127.0.0.1", &format!("{} {quorum}", group.data[0].port))
                .config("sentinel down-after-milliseconds primary", "500")
                .config("sentinel failover-timeout primary", "2000")
                .config("sentinel parallel-syncs primary", "1");
            builder.sentinel = true;
            let sentinel = builder.start().await;
            // Their usual periods make them take ten seconds to meet, and ten more to demote an old primary.
            let periods = ["PUBLISH-PERIOD", "500", "INFO-PERIOD", "500", "ASK-PERIOD", "200"];
            sentinel.command(&[&["SENTINEL", "DEBUG"], &periods[..]].concat()).await;
            group.sentinels.push(sentinel);
        }
        group.comes_to_know_all().await;
        group
    }

    /// Waits until every sentinel knows the others, and both servers in good health: it could do a failover.
    async fn comes_to_know_all(&self) {
        for sentinel in &self.sentinels {
            sentinel
                .eventually("a sentinel knows all", LONG, async || {
                    let ready = sentinel.ask(&["SENTINEL", "CKQUORUM", "primary"]).await.is_ok();
                    let others = sentinel.command(&["SENTINEL", "SENTINELS", "primary"]).await;
                    let replicas = sentinel.command(&["SENTINEL", "REPLICAS", "primary"]).await;
                    let linked = replicas.to_string().contains("master-link-status ok");
                    (ready && linked && others.list().len() + 1 == self.sentinels.len()).then_some(())
                })
                .await;
        }
    }

    /// Where clients ask.
    pub fn addrs(&self) -> Vec<SocketAddr> {
        self.sentinels.iter().map(Redis::addr).collect()
    }

    /// The URLs of the sentinels.
    pub fn urls(&self) -> Vec<String> {
        self.sentinels.iter().map(Redis::url).collect()
    }

    /// The sentinels.
    pub fn sentinels(&self) -> &[Redis] {
        &self.sentinels
    }

    /// Both servers.
    pub fn data(&self) -> &[Redis] {
        &self.data
    }

    /// The primary in the eyes of the first sentinel that is up.
    pub async fn primary(&self) -> &Redis {
        let sentinel = self.sentinels.iter().find(|one| one.is_up()).expect("a sentinel that is up");
        self.seen_by(sentinel).await
    }

    /// The other one.
    pub async fn replica(&self) -> &Redis {
        let primary = self.primary().await.port;
        self.data.iter().find(|one| one.port != primary).unwrap()
    }

    /// Kills the primary with -9, and returns it.
    pub async fn kill_primary(&self) -> &Redis {
        let primary = self.primary().await;
        primary.kill();
        primary
    }

    /// Freezes the primary, and returns it: resumed after the failover it still takes writes, until a
    /// sentinel makes it a replica about two seconds later, and they are lost.
    pub async fn pause_primary(&self) -> &Redis {
        let primary = self.primary().await;
        primary.pause().await;
        primary
    }

    /// Waits until all sentinels name another primary than `old`, and that one knows; it is returned.
    pub async fn wait_failover(&self, old: &Redis) -> &Redis {
        for sentinel in self.sentinels.iter().filter(|one| one.is_up()) {
            let moved = async || (self.seen_by(sentinel).await.port != old.port).then_some(());
            sentinel.eventually("a failover", LONG, moved).await;
        }
        let new = self.primary().await;
        let promoted = async || (new.role().await? == "master").then_some(());
        new.eventually("it is the primary", LONG, promoted).await;
        new
    }

    async fn seen_by(&self, sentinel: &Redis) -> &Redis {
        let at = sentinel.command(&["SENTINEL", "GET-MASTER-ADDR-BY-NAME", "primary"]).await;
        let port = at.list()[1].int();
        let primary = self.data.iter().find(|one| i64::from(one.port) == port);
        primary.unwrap_or_else(|| panic!("the sentinel names a stranger: {at}"))
    }
}

use std::collections::{BTreeMap, HashMap};
use std::net::SocketAddr;
use std::os::unix::fs::PermissionsExt as _;
use std::sync::Mutex;

use serde_json::Value;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream, UnixStream};

use super::gate::host_is_ours;
use super::*;
use arc_swap::ArcSwap;

use crate::config::{
    Alpn, ErrorShape, KeyConfig, LeaseConfig, Limits, Listen, OnLost, Provider, ProxyConfig, QueueConfig,
    Ranking, RetryConfig, RetryOn, ShutdownConfig, StoreConfig, StoreUrl, Timeouts,
};
use crate::model::{AppName, FencingToken, Fingerprint, KeyStatus, LeaseId, OwnerId, PoolName, Secret};
use crate::store::memory::MemoryStore;
use crate::store::{
    Acquire, Acquired, Answer, Candidate, KeySettings, KeyView, LeaseView, Release, Renew, Renewed, Report,
    Reported, StatusChange, StoreEvent, SyncKeys, SyncMode, Synced,
};

/// A configuration with one provider and two keys.
pub(in crate::control) fn config() -> Config {
    let second = Duration::from_secs(1);
    let key = |id: &str| KeyConfig {
        id: KeyId::parse(id).unwrap(),
        provider: ProviderName::parse("openai").unwrap(),
        pool: PoolName::default_pool(),
        group: None,
        secret: Some(Secret::new("sk-canary".into())),
        source: "env OPENAI_API_KEY".into(),
        inject: Arc::new([]),
        headers: Vec::new(),
        hidden: Arc::new([Secret::new("sk-canary".into())]),
        max_concurrent_uses: 8,
        models: Vec::new(),
        disabled: false,
    };
    Config {
        intercept: true,
        ca: None,
        compressed: crate::config::Compressed::Pass,
        websocket: crate::config::WebSocketConfig {
            idle: std::time::Duration::from_secs(1),
            max_duration: None,
        },
        listen: Listen {
            proxy: vec![Address::Tcp("127.0.0.1:8321".parse().unwrap())],
            admin: Address::Tcp("127.0.0.1:8322".parse().unwrap()),
            hosts: vec!["lessor.internal".into()],
            allow_origins: Vec::new(),
            response_headers: true,
        },
        store: StoreConfig { url: StoreUrl::Memory, prefix: "lessor".into() },
        lease: LeaseConfig {
            ttl: second * 30,
            heartbeat: second * 10,
            on_lost: OnLost::Abort,
            max_duration: None,
        },
        queue: QueueConfig { max_wait: second * 10, max_waiting: 1024 },
        retry: RetryConfig { max_attempts: 3, max_body: 1 << 23, max_total: 1 << 28, on: RetryOn::default() },
        timeouts: Timeouts {
            connect: second,
            first_byte: second,
            idle: second,
            body_idle: second,
            header: second,
            keep_alive: second,
        },
        shutdown: ShutdownConfig { grace: second, linger: Duration::ZERO },
        ranking: Ranking::DEFAULT,
        proxy: ProxyConfig { tunnel_other_hosts: true, deny_nets: Vec::new(), alpn: vec![Alpn::Http1] },
        limits: Limits { max_connections: 64, max_header_bytes: 1 << 16, max_headers: 100, max_streams: 200 },
        admin_token: None,
        providers: BTreeMap::from([provider("openai", "https://api.openai.com", Some("/v1/models"))]),
        hosts: HashMap::new(),
        host_patterns: Vec::new(),
        keys: vec![key("openai-a"), key("openai-b")],
        pools: BTreeMap::from([(PoolName::default_pool(), vec![PoolName::parse("vip").unwrap()])]),
        default_pool: None,
        upstreams: Vec::new(),
        ca_dir: None,
        quit: false,
        apps: Vec::new(),
        secret_variables: vec!["OPENAI_API_KEY".into()],
        files: crate::config::Stamps::default(),
        origin: "config/lessor.toml".into(),
        warnings: Vec::new(),
    }
}

pub(in crate::control) fn provider(
    name: &str,
    base_url: &str,
    check: Option<&str>,
) -> (ProviderName, Arc<Provider>) {
    let name = ProviderName::parse(name).unwrap();
    let provider = Provider {
        host_patterns: Vec::new(),
        needs_base_url: false,
        name: name.clone(),
        base_url: base_url.parse().unwrap(),
        base_url_is_users: false,
        hosts: Vec::new(),
        ca_file: None,
        inject: Vec::new(),
        keep: Vec::new(),
        error_shape: ErrorShape::OpenAi,
        scrub: crate::config::Scrub::On,
        check: check.map(|path| crate::config::Check {
            method: Method::GET,
            path: path.into(),
            headers: Vec::new(),
        }),
        rules: Vec::new(),
        organization_header: None,
        max_uses_header: None,
        waits: Vec::new(),
        deny_paths: Vec::new(),
        allow_paths: Vec::new(),
        no_model_paths: Vec::new(),
        model_after: Vec::new(),
        subprotocols: Vec::new(),
        model_field: "model".into(),
        model_query: None,
        usage: Vec::new(),
        env_other: Vec::new(),
        env_base_url: Vec::new(),
        env: Vec::new(),
    };
    (name, Arc::new(provider))
}

/// The sidecar that is asked.
fn here() -> OwnerId {
    OwnerId("this-sidecar".into())
}

/// A store that knows two keys and one lease, and can be made to fail or to say nothing.
pub(in crate::control) struct Fake {
    seen: Mutex<Snapshot>,
    fails: AtomicBool,
    hangs: AtomicBool,
}

impl Fake {
    fn new() -> Self {
        let provider = ProviderName::parse("openai").unwrap();
        let key = |id: &str| KeyView {
            id: KeyId::parse(id).unwrap(),
            provider: provider.clone(),
            pool: PoolName::default_pool(),
            group: None,
            status: KeyStatus::Available,
            reason: None,
            cooldown_since_ms: None,
            cooldown_until_ms: None,
            evidence: None,
            in_use: 1,
            max_concurrent_uses: 8,
            learned_concurrent_uses: None,
            group_concurrent_uses: None,
            last_used_at_ms: Some(StoreTime(1_000)),
            cooldowns: Vec::new(),
        };
        let lease = LeaseView {
            id: LeaseId::fresh(),
            key_id: KeyId::parse("openai-a").unwrap(),
            provider: provider.clone(),
            pool: PoolName::default_pool(),
            app: AppName::anonymous(),
            owner: here(),
            fencing_token: FencingToken(7),
            expires_at_ms: None,
            revoked: false,
        };
        let seen = Snapshot {
            keys: vec![key("openai-a"), key("openai-b")],
            leases: vec![lease],
            grace_until_ms: None,
        };
        Self { seen: Mutex::new(seen), fails: AtomicBool::new(false), hangs: AtomicBool::new(false) }
    }

    /// Another sidecar of the fleet comes: with a key in a pool that is not configured here, and a lease of it.
    pub(in crate::control) fn join(&self) -> LeaseId {
        let mut seen = self.seen.lock().unwrap();
        let mut key = seen.keys[0].clone();
        key.id = KeyId::parse("openai-z").unwrap();
        key.pool = PoolName::parse("batch").unwrap();
        let lease = LeaseView {
            id: LeaseId::fresh(),
            key_id: key.id.clone(),
            pool: key.pool.clone(),
            app: AppName::parse("checkout").unwrap(),
            owner: OwnerId("another-sidecar".into()),
            fencing_token: FencingToken(8),
            expires_at_ms: Some(StoreTime(1_012_000)),
            ..seen.leases[0].clone()
        };
        let id = lease.id;
        seen.keys.push(key);
        seen.leases.push(lease);
        id
    }

    pub(in crate::control) fn fail(&self) {
        self.fails.store(true, Ordering::SeqCst);
    }

    pub(in crate::control) fn set(&self, status: KeyStatus) {
        for key in &mut self.seen.lock().unwrap().keys {
            key.status = status;
        }
    }

    fn say<T: Send + 'static>(&self, value: T) -> Answer<T> {
        let (fails, hangs) = (self.fails.load(Ordering::SeqCst), self.hangs.load(Ordering::SeqCst));
        Box::pin(async move {
            if hangs {
                std::future::pending::<()>().await;
            }
            if fails { Err(StoreError::Unavailable("connection refused".into())) } else { Ok(value) }
        })
    }
}

impl Store for Fake {
    fn acquire(&self, _: Acquire) -> Answer<Acquired> {
        unreachable!("the admin takes no lease")
    }
    fn renew(&self, _: Renew) -> Answer<Renewed> {
        unreachable!("the admin holds no lease")
    }
    fn release(&self, _: Vec<Release>) -> Answer<usize> {
        unreachable!("the admin holds no lease")
    }
    fn report(&self, _: Report) -> Answer<Reported> {
        unreachable!("the admin sees no answer")
    }
    fn sync_keys(&self, _: SyncKeys) -> Answer<Synced> {
        unreachable!("the admin serves no key")
    }
    fn set_status(&self, _: ProviderName, key: KeyId, change: StatusChange) -> Answer<bool> {
        let mut seen = self.seen.lock().unwrap();
        let found = seen.keys.iter_mut().find(|seen| seen.id == key);
        let known = found.is_some();
        if let Some(found) = found {
            found.status = match change {
                StatusChange::Disable => KeyStatus::Disabled,
                _ => KeyStatus::Available,
            };
        }
        self.say(known)
    }
    fn revoke(&self, _: ProviderName, lease: LeaseId) -> Answer<bool> {
        let known = self.seen.lock().unwrap().leases.iter().any(|seen| seen.id == lease);
        self.say(known)
    }
    fn snapshot(&self, _: ProviderName) -> Answer<Snapshot> {
        self.say(self.seen.lock().unwrap().clone())
    }
    fn subscribe(&self) -> tokio::sync::broadcast::Receiver<StoreEvent> {
        tokio::sync::broadcast::channel(1).1
    }
    fn now(&self) -> StoreTime {
        StoreTime(1_000_000)
    }
    fn salt(&self, _: Option<[u8; 32]>) -> Answer<[u8; 32]> {
        self.say([0; 32])
    }
    fn reconcile(&self, _: ProviderName) -> Answer<u64> {
        self.say(0)
    }
    fn leases_expire(&self) -> bool {
        false
    }
    fn ping(&self) -> Answer<()> {
        self.say(())
    }
    fn kind(&self) -> &'static str {
        "memory"
    }
}

/// Remembers what the admin said to the proxy.
#[derive(Default)]
pub(in crate::control) struct FakeHands {
    switched: Mutex<Vec<(String, bool)>>,
    hangs: AtomicBool,
    revoked: AtomicBool,
}

impl Hands for FakeHands {
    fn lends_not(&self) -> Pin<Box<dyn Future<Output = Option<StoreError>> + Send + '_>> {
        Box::pin(std::future::ready(None))
    }

    fn ca(&self) -> Option<CaSeen> {
        let file = |name: &str| Some(format!("/run/lessor/lessor-40404.{name}.pem"));
        Some(CaSeen {
            cert_file: file("ca"),
            bundle_file: file("ca-bundle"),
            java_file: file("p12"),
            pem: "-----BEGIN\n".into(),
        })
    }

    fn check(&self, _: &ProviderName, key: &KeyId) -> Pin<Box<dyn Future<Output = CheckResult> + Send>> {
        let ok = key.as_str() == "openai-a";
        let status = Some(if ok { 200 } else { 401 });
        let class = if ok { "success" } else { "invalid" }.into();
        let hangs = self.hangs.load(Ordering::SeqCst);
        Box::pin(async move {
            if hangs {
                std::future::pending::<()>().await;
            }
            CheckResult { ok, status, code: None, class, message: "asked".into(), note: None }
        })
    }
    fn switched(&self, _: &ProviderName, key: &KeyId, on: bool) {
        self.switched.lock().unwrap().push((key.to_string(), on));
    }
    fn saw(&self, _: &ProviderName, _: &Snapshot, _: StoreTime) {}
    fn apps(&self) -> Vec<AppSeen> {
        vec![AppSeen {
            name: AppName::parse("checkout").unwrap(),
            token: true,
            uid: Some(1000),
            pools: Vec::new(),
            providers: Vec::new(),
            revoked: self.revoked.load(Ordering::SeqCst),
        }]
    }
    fn revoke_app(&self, app: &AppName, revoked: bool) {
        assert_eq!(app.as_str(), "checkout");
        self.revoked.store(revoked, Ordering::SeqCst);
    }
    fn doctors_tools(&self) -> Tools {
        crate::run::doctors_tools()
    }
    fn ranking(&self) -> RankingSeen {
        let of = |capacity, idle, success, freshness| TermsSeen {
            capacity,
            idle,
            success,
            error: 0.0,
            rate_limit: 0.0,
            cooldown: 0.0,
            freshness,
        };
        RankingSeen {
            strategy: "weighted".into(),
            weights: TermsSeen { error: 1.0, rate_limit: 1.0, cooldown: 1.0, ..of(2.0, 0.5, 1.0, 2.0) },
            jitter: 0.05,
            keys: vec![RankSeen {
                provider: ProviderName::parse("openai").unwrap(),
                key: KeyId::parse("openai-a").unwrap(),
                score: 2.625,
                terms: of(0.75, 0.25, 1.0, 0.0),
                in_flight: 2,
                first_byte_ms: Some(312.4),
                rests_ms: None,
            }],
        }
    }
    fn waiting(&self) -> usize {
        2
    }
    fn live(&self) -> usize {
        1
    }
}

pub(in crate::control) struct Admin {
    pub(in crate::control) at: SocketAddr,
    pub(in crate::control) socket: std::path::PathBuf,
    pub(in crate::control) store: Arc<Fake>,
    hands: Arc<FakeHands>,
    pub(in crate::control) draining: Arc<AtomicBool>,
    stop: CancellationToken,
    doors: Vec<tokio::task::JoinHandle<()>>,
    _dir: tempfile::TempDir,
}

fn state(config: Config, store: Arc<dyn Store>, hands: &Arc<FakeHands>) -> AdminState {
    AdminState {
        config: Arc::new(ArcSwap::from_pointee(config)),
        on_disk: Arc::default(),
        store,
        owner: here(),
        metrics: Metrics::new(),
        events: Events::new(),
        hands: hands.clone(),
        draining: Arc::new(AtomicBool::new(false)),
        quit: None,
        proxy_addresses: vec![Address::Tcp("127.0.0.1:40404".parse().unwrap())],
        started: Instant::now(),
        version: "0.0.0",
    }
}

impl Admin {
    pub(in crate::control) async fn start(change: impl FnOnce(&mut Config)) -> Self {
        let mut config = config();
        change(&mut config);
        let (store, hands) = (Arc::new(Fake::new()), Arc::new(FakeHands::default()));
        let state = Arc::new(state(config, store.clone(), &hands));
        let draining = state.draining.clone();
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("admin.sock");
        let stop = CancellationToken::new();
        let tcp = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let at = tcp.local_addr().unwrap();
        let unix = bind_unix(&socket).unwrap();
        let doors = vec![
            tokio::spawn(serve_tcp(tcp, state.clone(), stop.clone())),
            tokio::spawn(serve_unix(unix, state, stop.clone())),
        ];
        Self { at, socket, store, hands, draining, stop, doors, _dir: dir }
    }

    async fn tcp(&self, line: &str, headers: &str) -> Reply {
        let host = format!("Host: {}\r\n{headers}", self.at);
        Reply::read(TcpStream::connect(self.at).await.unwrap(), line, &host).await
    }

    async fn unix(&self, line: &str) -> Reply {
        Reply::read(UnixStream::connect(&self.socket).await.unwrap(), line, "Host: lessor\r\n").await
    }
}

#[derive(Debug)]
struct Reply {
    status: u16,
    head: String,
    body: String,
}

impl Reply {
    async fn read(mut peer: impl AsyncRead + AsyncWrite + Unpin, line: &str, headers: &str) -> Self {
        let request = format!("{line} HTTP/1.1\r\n{headers}Connection: close\r\n\r\n");
        peer.write_all(request.as_bytes()).await.unwrap();
        let mut answer = String::new();
        peer.read_to_string(&mut answer).await.unwrap();
        let (head, body) = answer.split_once("\r\n\r\n").unwrap();
        assert!(!head.contains("access-control"), "no CORS ever: {head}");
        assert!(!answer.contains("canary"), "a secret is out: {answer}");
        Self { status: head[9..12].parse().unwrap(), head: head.into(), body: body.into() }
    }

    fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|cause| panic!("{cause}: {self:?}"))
    }

    /// The code of an error, after a look at its shape.
    fn code(&self) -> String {
        let json = self.json();
        let error = json["error"].as_object().unwrap();
        assert_eq!(error["type"], "lessor_error");
        assert_eq!(error["param"], Value::Null);
        assert!(error["message"].as_str().unwrap().len() > 10);
        let code = error["code"].as_str().unwrap().to_owned();
        assert!(self.head.contains(&format!("x-lessor-error: {code}")), "{self:?}");
        code
    }

    fn refused(&self) -> (u16, String) {
        (self.status, self.code())
    }
}

fn refused(status: u16, code: &str) -> (u16, String) {
    (status, code.into())
}

#[tokio::test]
async fn probes_and_metrics_need_no_token() {
    let admin = Admin::start(|config| config.admin_token = Some(Secret::new("t0ken".into()))).await;
    assert_eq!(admin.tcp("GET /healthz", "").await.status, 200);
    assert_eq!(admin.tcp("GET /readyz", "").await.status, 200);
    let page = admin.tcp("GET /metrics", "").await;
    assert!(page.head.contains("content-type: application/openmetrics-text; version=1.0.0"), "{page:?}");
    assert!(
        page.body.contains(r#"lessor_key_status{provider="openai",key="openai-a",status="available"} 1"#),
        "{}",
        page.body
    );
    assert!(page.body.contains("lessor_store_up 1") && page.body.ends_with("# EOF\n"), "{}", page.body);
}

#[tokio::test]
async fn with_a_token_set_v1_wants_it_even_on_loopback_even_for_a_get() {
    let admin = Admin::start(|config| config.admin_token = Some(Secret::new("t0ken".into()))).await;
    for wrong in
        ["", "Authorization: Bearer t0kex\r\n", "Authorization: t0ken\r\n", "Authorization: Bearer \r\n"]
    {
        for line in ["GET /v1/keys", "GET /v1", "GET /v1/nothing", "DELETE /v1/leases/1"] {
            let reply = admin.tcp(line, wrong).await;
            assert_eq!(reply.refused(), refused(401, "admin_unauthenticated"), "{line} {wrong}");
            assert!(reply.head.contains("www-authenticate: Bearer"), "{reply:?}");
        }
    }
    for right in ["Authorization: Bearer t0ken\r\n", "authorization: bearer t0ken\r\n"] {
        assert_eq!(admin.tcp("GET /v1/keys", right).await.status, 200);
        assert_eq!(admin.tcp("POST /v1/keys/openai/openai-a/disable", right).await.status, 200);
    }
}

#[tokio::test]
async fn without_a_token_the_tcp_door_only_reads() {
    let admin = Admin::start(|_| {}).await;
    assert_eq!(admin.tcp("GET /v1/keys", "").await.status, 200);
    assert_eq!(admin.tcp("HEAD /v1/keys", "").await.status, 200);
    for line in ["POST /v1/keys/openai/openai-a/disable", "DELETE /v1/leases/1", "PUT /v1/keys"] {
        assert_eq!(admin.tcp(line, "").await.refused(), refused(403, "admin_forbidden"), "{line}");
    }
    assert!(admin.hands.switched.lock().unwrap().is_empty());
}

#[test]
fn without_a_token_nobody_off_loopback_reads_v1_and_the_listener_must_be_on_loopback_too() {
    let admitted = |here: &str, peer: &str, path: &str| {
        let host = here.rsplit_once(':').unwrap().0;
        let (parts, ()) = Request::get(path).header("host", host).body(()).unwrap().into_parts();
        let door = Door::Tcp { here: here.parse().unwrap(), peer: peer.parse().unwrap() };
        admit(&config(), door, &parts).map_err(|refusal| refusal.code)
    };
    assert_eq!(admitted("127.0.0.1:1", "127.0.0.9:2", "/v1/keys"), Ok(()));
    assert_eq!(admitted("[::1]:1", "[::1]:2", "/v1/keys"), Ok(()));
    assert_eq!(admitted("10.0.0.1:1", "10.0.0.2:2", "/v1/keys"), Err("admin_forbidden"));
    assert_eq!(admitted("10.0.0.1:1", "10.0.0.1:2", "/v1/keys"), Err("admin_forbidden"));
    assert_eq!(admitted("127.0.0.1:1", "10.0.0.2:2", "/v1/keys"), Err("admin_forbidden"));
    assert_eq!(admitted("10.0.0.1:1", "127.0.0.1:2", "/v1/keys"), Err("admin_forbidden"));
    assert_eq!(admitted("10.0.0.1:1", "10.0.0.2:2", "/readyz"), Ok(()));
}

#[test]
fn only_the_user_of_the_process_is_served_on_the_socket() {
    let (parts, ()) = Request::get("/v1/keys").body(()).unwrap().into_parts();
    let admitted =
        |same_user| admit(&config(), Door::Unix { same_user }, &parts).map_err(|refusal| refusal.code);
    assert_eq!(admitted(true), Ok(()));
    assert_eq!(admitted(false), Err("admin_forbidden"));
}

#[test]
fn a_host_is_ours_by_loopback_name_by_the_address_reached_or_by_listen_hosts() {
    let here: SocketAddr = "10.1.2.3:8322".parse().unwrap();
    let host = |host: &str| {
        let (parts, ()) = Request::get("/").header("host", host).body(()).unwrap().into_parts();
        host_is_ours(&config(), here, &parts).map_err(|refusal| refusal.code)
    };
    for ours in [
        "localhost",
        "LocalHost:8322",
        "localhost.:1",
        "api.localhost",
        "127.0.0.1:8322",
        "127.8.8.8",
        "[::1]:8322",
        "[::ffff:127.0.0.1]",
        "10.1.2.3:8322",
        "lessor.internal",
        "LESSOR.internal:99",
    ] {
        assert_eq!(host(ours), Ok(()), "{ours}");
    }
    for foreign in [
        "evil.example",
        "localhost.evil.example",
        "127.0.0.1.evil.example",
        "10.1.2.4",
        "evil.example:8322",
        "notlocalhost",
    ] {
        assert_eq!(host(foreign), Err("origin_denied"), "{foreign}");
    }
    for broken in ["", "a b", "localhost@evil.example", "evil.example@localhost"] {
        assert_eq!(host(broken), Err("bad_request"), "{broken}");
    }
}

#[tokio::test]
async fn a_rebound_name_a_second_host_or_none_gets_nothing_not_even_health() {
    let admin = Admin::start(|_| {}).await;
    let raw = async |line: &str, headers: &str| {
        Reply::read(TcpStream::connect(admin.at).await.unwrap(), line, headers).await.refused()
    };
    for path in ["/healthz", "/metrics", "/v1/keys"] {
        let line = format!("GET {path}");
        assert_eq!(raw(&line, "Host: evil.example\r\n").await, refused(403, "origin_denied"));
        assert_eq!(raw(&line, "").await, refused(400, "bad_request"));
        assert_eq!(raw(&line, "Host: localhost\r\nHost: localhost\r\n").await, refused(400, "bad_request"));
    }
    let absolute = raw("GET http://evil.example/v1/keys", "Host: localhost\r\n").await;
    assert_eq!(absolute, refused(403, "origin_denied"));
}

#[tokio::test]
async fn a_web_page_from_elsewhere_is_refused_and_an_address_bar_is_not() {
    let admin = Admin::start(|_| {}).await;
    for page in [
        "Origin: https://evil.example\r\n",
        "Origin: null\r\n",
        "Origin: http://localhost:3000\r\n",
        "Sec-Fetch-Site: cross-site\r\n",
        "Sec-Fetch-Site: same-site\r\n",
        "Sec-Fetch-Site: none\r\nSec-Fetch-Site: cross-site\r\n",
    ] {
        for line in ["GET /v1/keys", "GET /metrics", "OPTIONS /v1/keys"] {
            assert_eq!(admin.tcp(line, page).await.refused(), refused(403, "origin_denied"), "{line} {page}");
        }
    }
    assert_eq!(admin.tcp("GET /v1/keys", "Sec-Fetch-Site: none\r\n").await.status, 200);
    let own = format!("Origin: http://{}\r\nSec-Fetch-Site: same-origin\r\n", admin.at);
    assert_eq!(admin.tcp("GET /v1/keys", &own).await.status, 200);
}

#[tokio::test]
async fn lists_carry_the_fields_of_the_contract() {
    let admin = Admin::start(|_| {}).await;
    let fields =
        |value: &Value| value.as_object().unwrap().keys().cloned().collect::<std::collections::BTreeSet<_>>();
    let keys = admin.tcp("GET /v1/keys", "").await;
    assert!(keys.head.contains("x-lessor-now-ms: 1000000") && keys.head.contains("cache-control: no-store"));
    let keys = keys.json();
    assert_eq!(fields(&keys), ["keys".to_owned()].into());
    let names = "id provider pool group status reason cooldown_since_ms cooldown_until_ms evidence in_use \
                 max_concurrent_uses learned_concurrent_uses group_concurrent_uses last_used_at_ms cooldowns \
                 configured";
    assert_eq!(fields(&keys["keys"][0]), names.split_whitespace().map(str::to_owned).collect());
    let leases = admin.tcp("GET /v1/leases", "").await.json();
    let names = "id key_id provider pool app owner fencing_token expires_at_ms revoked own";
    assert_eq!(fields(&leases["leases"][0]), names.split_whitespace().map(str::to_owned).collect());
    let pools = admin.tcp("GET /v1/pools", "").await.json();
    assert_eq!(
        pools,
        serde_json::json!({ "pools": [{
            "provider": "openai", "pool": "default", "fallback": ["vip"],
            "keys": 2, "available": 2, "in_use": 2, "max_concurrent_uses": 16,
        }]})
    );
    let status = admin.tcp("GET /v1/status", "").await.json();
    assert_eq!(status["ready"], true);
    let store = serde_json::json!({ "kind": "memory", "url": "memory:", "up": true, "error": null });
    assert_eq!((&status["store"], &status["owner"]), (&store, &"this-sidecar".into()));
    assert_eq!(status["proxy"], serde_json::json!(["127.0.0.1:40404"]));
    assert_eq!((&status["waiting"], &status["live"]), (&2.into(), &1.into()));
    assert_eq!(status["keys"], keys["keys"]);
    assert_eq!(status["leases"], leases["leases"]);
    assert_eq!(status["pools"], pools["pools"]);
}

#[tokio::test]
async fn the_lists_show_the_whole_fleet_and_which_leases_are_this_sidecars() {
    let admin = Admin::start(|_| {}).await;
    let lease = admin.store.join();
    let page = admin.unix("GET /v1/leases").await.json();
    let own: Vec<_> = page["leases"].as_array().unwrap().iter().map(|lease| &lease["own"]).collect();
    assert_eq!(own, [&Value::from(true), &Value::from(false)]);
    assert_eq!(
        page["leases"][1],
        serde_json::json!({
            "id": lease, "key_id": "openai-z", "provider": "openai", "pool": "batch", "app": "checkout",
            "owner": "another-sidecar", "fencing_token": 8, "expires_at_ms": 1_012_000, "revoked": false,
            "own": false,
        })
    );
    let keys = admin.unix("GET /v1/keys").await.json();
    assert_eq!((&keys["keys"][2]["id"], &keys["keys"][2]["pool"]), (&"openai-z".into(), &"batch".into()));
    let configured: Vec<_> = keys["keys"].as_array().unwrap().iter().map(|key| &key["configured"]).collect();
    assert_eq!(configured, [&Value::from(true), &Value::from(true), &Value::from(false)]);
    // What is counted is what may serve requests here.
    let pools = admin.unix("GET /v1/pools").await.json();
    assert_eq!(pools["pools"].as_array().unwrap().len(), 1);
    assert_eq!((&pools["pools"][0]["pool"], &pools["pools"][0]["keys"]), (&"default".into(), &2.into()));
    let metrics = admin.unix("GET /metrics").await.body;
    assert!(metrics.contains("openai-a") && !metrics.contains("openai-z"), "{metrics}");
    let status = admin.unix("GET /v1/status").await.json();
    assert_eq!((&status["leases"], &status["keys"]), (&page["leases"], &keys["keys"]));
    assert_eq!((&status["pools"], &status["live"]), (&pools["pools"], &1.into()));
    // What the lists show can be changed: the word is the store's, and so the fleet's.
    let off = admin.unix("POST /v1/keys/openai/openai-z/disable").await.json();
    assert_eq!(off["status"], "disabled");
    // Save a check: the secret is with the others.
    let refusal = admin.unix("POST /v1/keys/openai/openai-z/check").await.refused();
    assert_eq!(refusal, refused(404, "unknown_key"));
    let gone = admin.unix(&format!("DELETE /v1/leases/{lease}")).await.json();
    assert_eq!((&gone["provider"], &gone["revoked"]), (&"openai".into(), &true.into()));
}

#[tokio::test]
async fn a_status_without_its_store_is_a_503_that_says_what_is_known() {
    let admin = Admin::start(|_| {}).await;
    admin.store.fail();
    let reply = admin.unix("GET /v1/status").await;
    assert_eq!(reply.refused(), refused(503, "store_unavailable"));
    let page = reply.json();
    let why = "store is unavailable: connection refused";
    assert_eq!(
        page["store"],
        serde_json::json!({ "kind": "memory", "url": "memory:", "up": false, "error": why })
    );
    assert_eq!((&page["ready"], &page["live"], &page["waiting"]), (&false.into(), &1.into(), &2.into()));
    assert!(page["error"]["message"].as_str().unwrap().contains("no key is lent until it answers"), "{page}");
    assert_eq!(page["leases"], serde_json::json!([]));
}

#[tokio::test]
async fn a_key_switched_on_the_socket_changes_in_the_store_and_in_the_process() {
    let admin = Admin::start(|_| {}).await;
    let off = admin.unix("POST /v1/keys/openai/openai-a/disable").await.json();
    assert_eq!((&off["id"], &off["status"]), (&"openai-a".into(), &"disabled".into()));
    let on = admin.unix("POST /v1/keys/openai/openai-a/enable").await.json();
    assert_eq!(on["status"], "available");
    assert_eq!(admin.unix("POST /v1/keys/openai/openai-b/clear").await.json()["id"], "openai-b");
    assert_eq!(
        *admin.hands.switched.lock().unwrap(),
        [("openai-a".into(), false), ("openai-a".into(), true)]
    );
}

#[tokio::test]
async fn the_real_store_lends_no_key_that_was_disabled_and_ends_a_lease_that_was_revoked() {
    let store = Arc::new(MemoryStore::new());
    let config = config();
    let (openai, fingerprint) = (config.keys[0].provider.clone(), Fingerprint([1; 32]));
    let settings = config.keys.iter().map(|key| KeySettings {
        key: key.id.clone(),
        pool: key.pool.clone(),
        group: None,
        max_concurrent_uses: 8,
        fingerprint: Some(fingerprint),
    });
    let owner = OwnerId::fresh();
    let sync = SyncKeys {
        provider: openai.clone(),
        owner: owner.clone(),
        mode: SyncMode::Replace,
        keys: settings.collect(),
    };
    store.sync_keys(sync).await.unwrap();
    let acquire = || {
        store.acquire(Acquire {
            provider: openai.clone(),
            lease: LeaseId::fresh(),
            owner: owner.clone(),
            app: AppName::anonymous(),
            model: None,
            candidates: [Candidate {
                key: config.keys[0].id.clone(),
                pool: PoolName::default_pool(),
                group: None,
                fingerprint,
            }]
            .into(),
            ttl: Duration::from_secs(30),
            deadline: StoreTime::NEVER,
        })
    };
    let state = Arc::new(state(config.clone(), store.clone(), &Arc::new(FakeHands::default())));
    let ask = async |method: Method, path: &str| {
        let request = Request::builder().method(method).uri(path).body(Body::empty()).unwrap();
        let reply = answer(&state, routes(state.clone()), Door::Unix { same_user: true }, request).await;
        let (status, body) =
            (reply.status(), axum::body::to_bytes(reply.into_body(), 1 << 20).await.unwrap());
        assert_eq!(status, 200, "{body:?}");
        serde_json::from_slice::<Value>(&body).unwrap()
    };
    assert!(matches!(acquire().await.unwrap(), Acquired::Granted(_)));
    let off = ask(Method::POST, "/v1/keys/openai/openai-a/disable").await;
    assert_eq!((&off["status"], &off["in_use"]), (&"disabled".into(), &1.into()));
    assert!(matches!(acquire().await.unwrap(), Acquired::Refused(_)));
    let mut events = store.subscribe();
    let leases = ask(Method::GET, "/v1/leases").await;
    let lease = leases["leases"][0]["id"].as_str().unwrap();
    assert_eq!(ask(Method::DELETE, &format!("/v1/leases/{lease}")).await["revoked"], true);
    assert!(matches!(events.recv().await.unwrap(), StoreEvent::Revoked(_, id) if id.to_string() == lease));
    assert_eq!(ask(Method::POST, "/v1/keys/openai/openai-a/enable").await["status"], "available");
    assert!(matches!(acquire().await.unwrap(), Acquired::Granted(_)));
}

#[tokio::test]
async fn a_check_answers_with_what_the_provider_said() {
    let admin = Admin::start(|_| {}).await;
    let good: CheckResult =
        serde_json::from_value(admin.unix("POST /v1/keys/openai/openai-a/check").await.json()).unwrap();
    assert!(good.ok && good.status == Some(200));
    let bad = admin.unix("POST /v1/keys/openai/openai-b/check").await.json();
    assert_eq!((&bad["ok"], &bad["class"]), (&false.into(), &"invalid".into()));
}

#[tokio::test]
async fn a_lease_is_revoked_once_it_is_found() {
    let admin = Admin::start(|_| {}).await;
    let lease = admin.store.seen.lock().unwrap().leases[0].id.to_string();
    let gone = admin.unix(&format!("DELETE /v1/leases/{lease}")).await.json();
    assert_eq!((&gone["id"], &gone["revoked"]), (&lease.into(), &true.into()));
    let other = format!("DELETE /v1/leases/{}", LeaseId::fresh());
    assert_eq!(admin.unix(&other).await.refused(), refused(404, "unknown_lease"));
    assert_eq!(admin.unix("DELETE /v1/leases/x").await.refused(), refused(404, "unknown_lease"));
}

#[tokio::test]
async fn what_does_not_exist_is_answered_with_what_does() {
    let admin = Admin::start(|_| {}).await;
    for (line, status, code, hint) in [
        ("GET /", 404, "not_found", "/v1/keys"),
        ("GET /v1/nothing", 404, "not_found", "/v1/status"),
        ("PUT /v1/keys", 405, "method_denied", "/v1/keys"),
        ("TRACE /v1/keys", 405, "method_denied", "/v1/keys"),
        ("POST /v1/keys/openai/nope/disable", 404, "unknown_key", "openai-a, openai-b"),
        ("POST /v1/keys/nope/openai-a/check", 404, "unknown_provider", "openai"),
        ("POST /v1/keys/%2e%2e/openai-a/check", 404, "unknown_provider", "openai"),
    ] {
        let reply = admin.unix(line).await;
        assert_eq!(reply.refused(), refused(status, code), "{line}");
        assert!(reply.body.contains(hint), "{line}: {reply:?}");
    }
}

#[tokio::test]
async fn readyz_says_every_reason_why_not() {
    let admin = Admin::start(|_| {}).await;
    let ready = admin.tcp("GET /readyz", "").await;
    assert_eq!((ready.status, ready.json()), (200, serde_json::json!({ "ready": true, "reasons": [] })));
    admin.store.set(KeyStatus::RateLimited);
    assert_eq!(admin.tcp("GET /readyz", "").await.status, 200, "a key that rests comes back by itself");
    admin.store.set(KeyStatus::Invalid);
    admin.draining.store(true, Ordering::SeqCst);
    let not = admin.tcp("GET /readyz", "").await;
    let json = not.json();
    let reasons: Vec<_> =
        json["reasons"].as_array().unwrap().iter().map(|reason| reason.as_str().unwrap()).collect();
    assert_eq!((not.status, reasons.len()), (503, 2), "{json}");
    assert!(reasons[0].starts_with("shutting_down"));
    assert!(reasons[1].starts_with("key_unavailable") && reasons[1].contains("openai/openai-a is invalid"));
    admin.store.fails.store(true, Ordering::SeqCst);
    let down = admin.tcp("GET /readyz", "").await.json();
    assert!(down["reasons"][1].as_str().unwrap().starts_with("store_unavailable"), "{down}");
    assert_eq!(admin.tcp("GET /healthz", "").await.status, 200, "alive all the same");
}

#[tokio::test]
async fn a_store_that_fails_is_a_503_and_metrics_go_on() {
    let admin = Admin::start(|_| {}).await;
    admin.store.fails.store(true, Ordering::SeqCst);
    let revoke = format!("DELETE /v1/leases/{}", LeaseId::fresh());
    for line in [
        "GET /v1/keys",
        "GET /v1/leases",
        "GET /v1/pools",
        "GET /v1/status",
        "POST /v1/keys/openai/openai-a/disable",
        &revoke,
    ] {
        assert_eq!(admin.unix(line).await.refused(), refused(503, "store_unavailable"), "{line}");
    }
    assert!(admin.hands.switched.lock().unwrap().is_empty(), "the process follows the store, not the wish");
    assert!(admin.tcp("GET /metrics", "").await.body.contains("lessor_store_up 0"));
}

#[tokio::test]
async fn a_store_that_never_answers_holds_up_a_probe_for_about_a_second() {
    let admin = Admin::start(|_| {}).await;
    admin.store.hangs.store(true, Ordering::SeqCst);
    let began = Instant::now();
    let (ready, metrics) = tokio::join!(admin.tcp("GET /readyz", ""), admin.tcp("GET /metrics", ""));
    assert_eq!((ready.status, metrics.status), (503, 200));
    assert!(began.elapsed() < Duration::from_secs(4), "{:?}", began.elapsed());
}

#[tokio::test]
async fn a_body_that_says_it_is_large_is_refused_at_once() {
    let admin = Admin::start(|_| {}).await;
    let reply = admin.tcp("GET /v1/keys", "Content-Length: 70000\r\n").await;
    assert_eq!(reply.refused(), refused(413, "body_too_large"));
}

#[tokio::test(start_paused = true)]
async fn an_answer_ends_within_its_bound_whatever_the_store_and_the_provider_do() {
    let (store, hands) = (Arc::new(Fake::new()), Arc::new(FakeHands::default()));
    store.hangs.store(true, Ordering::SeqCst);
    hands.hangs.store(true, Ordering::SeqCst);
    let state = Arc::new(state(config(), store.clone(), &hands));
    for (method, path, bound, status) in [
        (Method::GET, "/healthz", Duration::ZERO, 200),
        (Method::GET, "/readyz", PROBE, 503),
        (Method::GET, "/metrics", PROBE, 200),
        (Method::GET, "/v1/keys", ANSWER, 503),
        (Method::GET, "/v1/status", ANSWER, 503),
        (Method::POST, "/v1/keys/openai/openai-a/disable", ANSWER, 503),
        (Method::POST, "/v1/keys/openai/openai-a/check", CHECK, 504),
        (Method::DELETE, "/v1/leases/0199c0de-0000-7000-8000-000000000000", ANSWER, 503),
    ] {
        let request = Request::builder().method(method).uri(path).body(Body::empty()).unwrap();
        let began = tokio::time::Instant::now();
        let reply = answer(&state, routes(state.clone()), Door::Unix { same_user: true }, request).await;
        assert_eq!(reply.status().as_u16(), status, "{path}");
        assert!(began.elapsed() <= bound + Duration::from_millis(5), "{path}: {:?}", began.elapsed());
    }
}

#[tokio::test]
async fn past_256_connections_the_next_waits_until_one_ends() {
    let admin = Admin::start(|_| {}).await;
    let mut held = Vec::new();
    for _ in 0..CONNECTIONS {
        held.push(UnixStream::connect(&admin.socket).await.unwrap());
    }
    let mut next = std::pin::pin!(admin.unix("GET /healthz"));
    let early = tokio::time::timeout(Duration::from_millis(200), &mut next).await;
    assert!(early.is_err(), "served past the bound");
    held.pop();
    assert_eq!(next.await.status, 200);
}

#[tokio::test]
async fn past_32_connections_of_one_address_a_further_one_is_closed_at_once() {
    let admin = Admin::start(|_| {}).await;
    let mut held = Vec::new();
    for _ in 0..peers::EACH {
        held.push(TcpStream::connect(admin.at).await.unwrap());
    }
    let from = tokio::net::TcpSocket::new_v4().unwrap();
    from.bind("127.0.0.2:0".parse().unwrap()).unwrap();
    let mut further = from.connect(admin.at).await.unwrap();
    let mut end = [0];
    let ends = tokio::time::timeout(Duration::from_secs(2), further.read(&mut end)).await;
    assert!(ends.is_ok_and(|read| !matches!(read, Ok(1..))), "held, or served");
    held.pop();
    let asked = format!("GET /healthz HTTP/1.1\r\nHost: {}\r\n\r\n", admin.at);
    let served = async || {
        let mut peer = TcpStream::connect(admin.at).await.unwrap();
        let _ = peer.write_all(asked.as_bytes()).await;
        matches!(peer.read(&mut [0; 64]).await, Ok(1..))
    };
    let until = Instant::now() + Duration::from_secs(3); // before the idle ones end by themselves
    while !served().await {
        assert!(Instant::now() < until, "a place that was left is not given again");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_connection_that_is_not_used_after_its_answer_ends_in_five_seconds() {
    let admin = Admin::start(|_| {}).await;
    let mut peer = TcpStream::connect(admin.at).await.unwrap();
    let asked = format!("GET /healthz HTTP/1.1\r\nHost: {}\r\n\r\n", admin.at);
    peer.write_all(asked.as_bytes()).await.unwrap();
    let mut rest = Vec::new();
    let end = tokio::time::timeout(HEAD + Duration::from_secs(1), peer.read_to_end(&mut rest)).await;
    assert!(end.is_ok_and(|read| read.is_ok()) && rest.starts_with(b"HTTP/1.1 200"), "still open");
}

#[tokio::test(start_paused = true)]
async fn a_peer_that_says_nothing_is_shut_out_when_the_time_for_a_head_is_over() {
    let admin = Admin::start(|_| {}).await;
    for half in ["", "GET /healthz HTTP/1.1\r\nHost: lo"] {
        let mut peer = TcpStream::connect(admin.at).await.unwrap();
        peer.write_all(half.as_bytes()).await.unwrap();
        let mut rest = Vec::new();
        let end = tokio::time::timeout(HEAD * 2, peer.read_to_end(&mut rest)).await;
        assert!(end.is_ok(), "still open after {half:?}");
    }
}

#[tokio::test]
async fn the_socket_is_for_this_user_alone_and_its_file_goes_with_the_server() {
    let admin = Admin::start(|_| {}).await;
    let mode = std::fs::metadata(&admin.socket).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    assert_eq!(admin.unix("GET /v1/keys").await.status, 200);
    admin.stop.cancel();
    for door in admin.doors {
        door.await.unwrap();
    }
    assert!(!admin.socket.exists());
}

#[tokio::test]
async fn a_stale_socket_is_replaced_and_a_live_one_is_not() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("lessor-1.sock");
    drop(std::os::unix::net::UnixListener::bind(&path).unwrap()); // std leaves the file behind
    let first = bind_unix(&path).unwrap();
    let cause = bind_unix(&path).unwrap_err();
    assert_eq!(cause.kind(), std::io::ErrorKind::AddrInUse);
    assert!(UnixStream::connect(&path).await.is_ok(), "the live one still serves");
    drop(first);
    assert!(bind_unix(&path).is_ok());
}

#[tokio::test]
async fn a_file_that_is_no_socket_is_left_alone() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("lessor-1.sock");
    std::fs::write(&path, "notes").unwrap();
    assert_eq!(bind_unix(&path).unwrap_err().kind(), std::io::ErrorKind::AlreadyExists);
    assert_eq!(std::fs::read_to_string(&path).unwrap(), "notes");
}

#[tokio::test]
async fn a_directory_that_others_may_write_to_holds_no_admin_socket() {
    let dir = tempfile::tempdir().unwrap();
    let shared = dir.path().join("shared");
    std::fs::create_dir(&shared).unwrap();
    std::fs::set_permissions(&shared, std::fs::Permissions::from_mode(0o777)).unwrap();
    let cause = bind_unix(shared.join("lessor-1.sock")).unwrap_err();
    assert_eq!(cause.kind(), std::io::ErrorKind::PermissionDenied);
}

#[test]
fn a_socket_carries_the_proxys_port_and_is_where_the_cli_looks() {
    let tcp = Address::Tcp("127.0.0.1:8321".parse().unwrap());
    let path = socket_path(&tcp);
    assert_eq!(path.file_name().unwrap(), "lessor-8321.sock");
    assert!(socket_paths(&tcp).contains(&path), "{path:?}");
    let one = socket_path(&Address::Unix("/a/proxy.sock".into(), 0o600));
    let two = socket_path(&Address::Unix("/b/proxy.sock".into(), 0o600));
    assert_ne!(one, two);
}

#[tokio::test]
async fn the_openapi_page_describes_every_route_and_no_other() {
    let admin = Admin::start(|config| config.admin_token = Some(Secret::new("t0ken".into()))).await;
    let page = admin.tcp("GET /openapi.json", "").await.json();
    let mut described: Vec<(String, String)> = Vec::new();
    for (path, item) in page["paths"].as_object().unwrap() {
        let verbs = item.as_object().unwrap().keys().filter(|name| *name != "parameters");
        described.extend(verbs.map(|verb| (path.clone(), verb.clone())));
        let named = path.matches('{').count();
        let shown = item["parameters"].as_array().map_or(0, Vec::len);
        assert_eq!(named, shown, "{path} names its parameters");
    }
    described.sort();
    let mut served: Vec<(String, String)> = include_str!("../admin.rs")
        .lines()
        .filter_map(|line| line.split_once(".route(\"")?.1.split_once("\", "))
        .map(|(path, rest)| (path.to_owned(), rest.split('(').next().unwrap().to_owned()))
        .collect();
    served.sort();
    assert!(served.len() > 15, "the routes are found: {served:?}");
    assert_eq!(described, served);
}

#[tokio::test]
async fn what_cannot_be_read_in_a_path_or_a_query_is_refused_in_json() {
    let admin = Admin::start(|_| {}).await;
    for asked in
        ["POST /v1/keys/%00/%ff/disable", "GET /v1/events?follow=maybe", "GET /v1/status?explain=1,2"]
    {
        let answer = admin.unix(asked).await;
        assert_eq!(answer.refused(), refused(400, "bad_request"), "{asked}");
    }
}

#[tokio::test]
async fn past_the_places_for_followers_one_more_is_told_so_and_gets_one_when_another_leaves() {
    let admin = Admin::start(|_| {}).await;
    let follow = async || {
        let mut peer = UnixStream::connect(&admin.socket).await.unwrap();
        peer.write_all(b"GET /v1/events HTTP/1.1\r\nHost: lessor\r\n\r\n").await.unwrap();
        let mut head = [0; 12];
        peer.read_exact(&mut head).await.unwrap();
        (peer, String::from_utf8_lossy(&head).into_owned())
    };
    let mut following = Vec::new();
    for _ in 0..FOLLOWERS {
        let (peer, head) = follow().await;
        assert_eq!(head, "HTTP/1.1 200");
        following.push(peer);
    }
    assert_eq!(follow().await.1, "HTTP/1.1 503");
    let loopback = admin.tcp("GET /v1/events?follow=false", "").await;
    assert_eq!(loopback.status, 200, "the other door has places of its own");
    drop(following.pop());
    let until = Instant::now() + Duration::from_secs(10);
    while follow().await.1 != "HTTP/1.1 200" {
        assert!(Instant::now() < until, "a place that was left is not given again");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

//! Clients as they are installed, under `lessor exec` with nothing set by hand: each reaches the provider with a
//! leased key, still reaches other hosts, and still refuses those that it has no reason to trust.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::pedantic, missing_docs, unreachable_pub)]

mod support;

use std::path::Path;
use std::process::Command;
use std::sync::Arc;

use support::lessor::{Home, Ran, run};
use support::plays::{anthropic, openai};
use support::provider::{Certificates, Manners};
use support::sdk::{node_dir, node24_path, python_path, root};
use support::tunnel::connect;
use support::{Key, Lessor, Play, Provider, Seen, Setup};
use tokio::net::TcpListener;
use tokio::sync::Semaphore;
use tokio::task::JoinSet;

const OPENAI_KEY: &str = "sk-canary-0123456789abcdef";
const ANTHROPIC_KEY: &str = "sk-ant-canary-0123456789abcdef";

/// How many run side by side: each is a process that mostly starts up.
const AT_ONCE: usize = 3;

/// What a client asks for at every host: the path tells whose request it was.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Asks {
    Models,
    Messages,
}

/// One client.
#[derive(Debug, Clone)]
struct Row {
    name: &'static str,
    words: Vec<String>,
    asks: Asks,
    /// Whether it has a base-URL variable.
    has_base_url: bool,
    /// Whether it speaks plain http through a proxy, too.
    plain: bool,
}

impl Row {
    /// A client of this script, which `program` runs.
    fn new(program: impl std::fmt::Display, script: &str, name: &'static str, client: &str) -> Self {
        let script = root().join("tests/sdks").join(script);
        let words = vec![program.to_string(), script.display().to_string(), client.into()];
        Self { name, words, asks: Asks::Models, has_base_url: false, plain: true }
    }

    fn sh(name: &'static str) -> Self {
        Self::new("sh", "clients.sh", name, name)
    }

    fn python(name: &'static str, client: &str) -> Self {
        Self::new(python_path().display(), "clients.py", name, client)
    }

    fn node(name: &'static str, client: &str) -> Self {
        Self::new(node24_path().display(), "clients.mjs", name, client)
    }

    /// It is given the way to the proxy for https alone, and knows no password of it.
    fn java() -> Self {
        let mut row = Self::new("java", "Trust.java", "java", "").only_tls();
        row.words.pop();
        row
    }

    fn by_base_url(self) -> Self {
        Self { has_base_url: true, ..self }
    }

    fn messages(self) -> Self {
        Self { asks: Asks::Messages, ..self }
    }

    fn only_tls(self) -> Self {
        Self { plain: false, ..self }
    }

    fn path(&self) -> String {
        let end = if self.asks == Asks::Models { "models" } else { "v1/messages" };
        format!("/rows/{}/{end}", self.name)
    }

    fn provider_host(&self) -> &'static str {
        if self.asks == Asks::Models { "api.openai.com" } else { "api.anthropic.com" }
    }
}

fn rows() -> Vec<Row> {
    vec![
        Row::sh("curl"),
        Row::sh("wget"),
        Row::java(),
        Row::python("requests", "requests"),
        Row::python("urllib", "urllib"),
        Row::python("httpx", "httpx"),
        Row::python("httpx-async", "httpx_async"),
        Row::python("aiohttp", "aiohttp"),
        Row::python("boto3", "boto3"),
        Row::python("bare-connect", "bare_connect").only_tls(),
        Row::python("openai-python", "openai").by_base_url(),
        Row::python("anthropic-python", "anthropic").messages().by_base_url(),
        Row::node("node-fetch", "fetch"),
        Row::node("node-https", "https").only_tls(),
        Row::node("undici-env", "undici_env"),
        Row::node("undici-proxy", "undici_proxy"),
        Row::node("axios", "axios"),
        Row::node("openai-node", "openai").by_base_url(),
        Row::node("anthropic-node", "anthropic").messages().by_base_url(),
    ]
}

/// Two providers, two other hosts, and a sidecar whose system knows the root of the one and not the other's.
struct World {
    openai: Provider,
    anthropic: Provider,
    known: Provider,
    unknown: Provider,
    lessor: Lessor,
    /// Options of `lessor exec`, and what stands in its environment.
    how: (&'static [&'static str], &'static [(&'static str, &'static str)]),
    _roots: tempfile::NamedTempFile,
}

fn either(seen: &Seen) -> Play {
    if seen.path().ends_with("/v1/messages") { anthropic(seen) } else { openai(seen) }
}

async fn other_host(name: &str) -> Provider {
    Provider::builder().manners(Manners::Open).named(name).start(either).await
}

/// `roots` are PEM, of what the system knows besides.
async fn world(setup: Setup, roots: &str) -> World {
    let anthropic = Provider::builder().manners(Manners::Anthropic).good(&[ANTHROPIC_KEY]);
    let anthropic = anthropic.start(either).await;
    let openai = Provider::builder().good(&[OPENAI_KEY]).start(either).await;
    let (known, unknown) = (other_host("known.test").await, other_host("unknown.test").await);
    let setup = setup.provider("openai", &openai).provider("anthropic", &anthropic);
    let setup = setup.key(Key::new("a").secret(OPENAI_KEY));
    let setup = setup.key(Key::new("b").of("anthropic").secret(ANTHROPIC_KEY));
    let system = tempfile::NamedTempFile::new().unwrap();
    let own = std::fs::read_to_string(known.ca_file()).unwrap();
    std::fs::write(system.path(), own + roots).unwrap();
    // Where the system's roots are looked for, on every system.
    let lessor = setup.env("SSL_CERT_FILE", &system.path().display().to_string()).start().await;
    World { openai, anthropic, known, unknown, lessor, how: (&[], &[]), _roots: system }
}

impl World {
    fn provider(&self, asks: Asks) -> (&Provider, &'static str) {
        match asks {
            Asks::Models => (&self.openai, OPENAI_KEY),
            Asks::Messages => (&self.anthropic, ANTHROPIC_KEY),
        }
    }

    /// What a row is told to ask for, and whether that must be answered.
    fn addresses(&self, row: &Row) -> Vec<(String, bool)> {
        let (host, path) = (row.provider_host(), row.path());
        let port = |of: &Provider| of.addr().port();
        let mut all = vec![
            (format!("https://{host}{path}"), true),
            (format!("https://known.test:{}{path}", port(&self.known)), true),
            (format!("https://unknown.test:{}{path}", port(&self.unknown)), false),
        ];
        if row.plain {
            all.push((format!("http://{host}{path}"), true));
        }
        if row.has_base_url {
            all.push((String::new(), true));
        }
        all
    }

    /// `lessor exec` through the sidecar that runs; the command is to follow.
    fn exec(&self) -> Command {
        let home: Arc<Home> = self.lessor.home();
        let mut command = home.command();
        command.arg("exec").arg("--admin").arg(self.lessor.admin_socket()).args(self.how.0).arg("--");
        command
            .env("NODE_SDKS", node_dir())
            .env("PYTHONDONTWRITEBYTECODE", "1")
            .envs(self.how.1.iter().copied());
        command
    }

    /// `lessor exec` with a sidecar of its own, for the same providers; the command is to follow.
    fn exec_alone(&self, home: &Home) -> Command {
        let config = home.path().join("lessor.toml");
        std::fs::copy(self.lessor.home().path().join("lessor.toml"), &config).unwrap();
        let mut command = home.command();
        command.arg("exec").arg("--config").arg(config).arg("--");
        command.env("SECRET_OPENAI_A", OPENAI_KEY).env("SECRET_ANTHROPIC_B", ANTHROPIC_KEY);
        command.env("NODE_SDKS", node_dir()).env("PYTHONDONTWRITEBYTECODE", "1");
        command
    }

    /// Runs these rows side by side; fails with all that went wrong.
    async fn all_work(&self, rows: &[Row]) {
        let wrong = self.try_all(rows).await;
        assert!(wrong.is_empty(), "{} of {} rows:\n{}", wrong.len(), rows.len(), wrong.join("\n"));
    }

    async fn try_all(&self, rows: &[Row]) -> Vec<String> {
        let places = Arc::new(Semaphore::new(AT_ONCE));
        let mut running = JoinSet::new();
        for row in rows.iter().cloned() {
            let addresses = self.addresses(&row);
            let mut command = self.exec();
            command.args(&row.words).args(addresses.iter().map(|(url, _)| url));
            let places = Arc::clone(&places);
            running.spawn(async move {
                let _place = places.acquire_owned().await.unwrap();
                (row, addresses, run(command).await)
            });
        }
        let mut wrong = Vec::new();
        while let Some(done) = running.join_next().await {
            let (row, addresses, ran) = done.unwrap();
            let why = judge(&addresses, &ran).or_else(|| self.seen_wrong(&row));
            wrong.extend(why.map(|why| format!("{}: {why}\n{ran:#?}", row.name)));
        }
        wrong
    }

    /// What the servers must have seen of a row besides its own word.
    fn seen_wrong(&self, row: &Row) -> Option<String> {
        let path = row.path();
        let of = |provider: &Provider| provider.seen().into_iter().filter(|seen| seen.path() == path);
        let (provider, key) = self.provider(row.asks);
        let keys: Vec<_> = of(provider).map(|seen| seen.key().to_owned()).collect();
        let expected = vec![key; 1 + usize::from(row.plain)];
        let (known, unknown) = (of(&self.known).count(), of(&self.unknown).count());
        let wrong = keys != expected || (known, unknown) != (1, 0);
        wrong.then(|| {
            format!("the provider saw {keys:?}, the known host {known} requests, the unknown {unknown}")
        })
    }
}

/// What is wrong with what a client said.
fn judge(addresses: &[(String, bool)], ran: &Ran) -> Option<String> {
    let lines: Vec<_> = ran.stdout.lines().collect();
    if ran.code != Some(0) || lines.len() != addresses.len() {
        return Some(format!("it ended with {:?} after {} lines", ran.code, lines.len()));
    }
    let wrong = |((url, answered), line): (&(String, bool), &str)| {
        let url = if url.is_empty() { "-" } else { url.as_str() };
        let (start, said) = if *answered {
            (
                format!("answered {url} "),
                ["gpt-4o-mini", "Hello, world"].iter().any(|word| line.contains(word)),
            )
        } else {
            // A refused connection, or a refusal by lessor, would be another reason.
            let line = line.to_ascii_lowercase();
            (format!("failed {url} "), ["certificate", "certpath"].iter().any(|word| line.contains(word)))
        };
        !line.starts_with(&start) || !said
    };
    let bad = addresses.iter().zip(lines).find(|&(address, line)| wrong((address, line)));
    bad.map(|(address, line)| format!("{address:?}: {line}"))
}

#[tokio::test]
async fn every_client_reaches_the_provider_by_a_leased_key_and_trusts_others_as_before() {
    let name = "every_client_reaches_the_provider_by_a_leased_key_and_trusts_others_as_before";
    if !support::sandbox::inside(name).await {
        return;
    }
    let world = world(Setup::new(), "").await;
    let rows = rows();
    world.all_work(&rows).await;
    for (asks, provider) in [(Asks::Models, "openai"), (Asks::Messages, "anthropic")] {
        let expected = rows.iter().filter(|row| row.has_base_url && row.asks == asks).count();
        let name =
            format!("lessor_requests_total{{provider=\"{provider}\",mode=\"base_url\",outcome=\"success\"}}");
        assert_eq!(world.lessor.metric(&name).await as usize, expected, "{provider}");
    }
}

/// gron is of Go and knows no proxy: its connection is led into a tunnel, and what it trusts is the environment's.
#[tokio::test]
async fn gos_verifier_takes_the_chain_and_no_other_than_before() {
    if !support::sandbox::inside("gos_verifier_takes_the_chain_and_no_other_than_before").await {
        return;
    }
    let world = Arc::new(world(Setup::new(), "").await);
    let (listener, leading) = (TcpListener::bind("127.0.0.1:443").await.unwrap(), world.clone());
    tokio::spawn(async move {
        while let Ok((mut client, _)) = listener.accept().await {
            let mut tunnel = connect(&leading.lessor, "api.openai.com:443").await;
            tokio::spawn(async move { tokio::io::copy_bidirectional(&mut client, &mut tunnel.0).await });
        }
    });
    let row = Row::sh("gron").only_tls();
    let addresses = world.addresses(&row);
    let mut command = world.exec();
    command.args(&row.words).args(addresses.iter().map(|(url, _)| url));
    let ran = run(command).await;
    assert_eq!(judge(&addresses, &ran).or_else(|| world.seen_wrong(&row)), None, "{ran:#?}");
}

/// The token stands in the proxy's address, which not all clients read alike.
#[tokio::test]
async fn every_client_is_known_by_its_apps_token_also_where_http_2_is_offered() {
    let name = "every_client_is_known_by_its_apps_token_also_where_http_2_is_offered";
    if !support::sandbox::inside(name).await {
        return;
    }
    const TOKEN: &str = "t0ken/of+the:checkout@";
    let setup = Setup::new().set("proxy.alpn", "[\"h2\", \"http/1.1\"]");
    let setup = setup.set("apps.checkout.token", "{ env = \"CHECKOUT\" }").env("CHECKOUT", TOKEN);
    let mut world = world(setup, "").await;
    world.how = (&["--app-token-env", "CHECKOUT"], &[("CHECKOUT", TOKEN)]);
    let rows: Vec<_> =
        rows().into_iter().filter(|row| !["bare-connect", "java"].contains(&row.name)).collect();
    world.all_work(&rows).await;
}

/// A setup whose CA is the operator's.
fn with_ca(dir: &Path, certificate: &str, key: &str) -> Setup {
    use std::os::unix::fs::PermissionsExt as _;
    let (cert_file, key_file) = (dir.join("ca.pem"), dir.join("ca.key"));
    std::fs::write(&cert_file, certificate).unwrap();
    std::fs::write(&key_file, key).unwrap();
    std::fs::set_permissions(&key_file, std::fs::Permissions::from_mode(0o600)).unwrap();
    let shown = |path: &Path| format!("{:?}", path.display().to_string());
    Setup::new().set("ca.cert_file", &shown(&cert_file)).set("ca.key_file", &shown(&key_file))
}

/// The clients that read another variable each, or another way.
fn one_of_a_kind() -> Vec<Row> {
    let some = ["curl", "wget", "requests", "urllib", "httpx", "boto3", "node-fetch", "axios"];
    rows().into_iter().filter(|row| some.contains(&row.name)).collect()
}

#[tokio::test]
async fn an_operators_own_root_is_trusted_by_every_kind_of_client() {
    if !support::sandbox::inside("an_operators_own_root_is_trusted_by_every_kind_of_client").await {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let (certificate, key) = Certificates::ca();
    let world = world(with_ca(dir.path(), &certificate, &key), "").await;
    world.all_work(&one_of_a_kind()).await;
}

#[tokio::test]
async fn an_operators_ca_below_a_root_of_the_systems_is_trusted_by_every_kind_of_client() {
    let name = "an_operators_ca_below_a_root_of_the_systems_is_trusted_by_every_kind_of_client";
    if !support::sandbox::inside(name).await {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let (root, certificate, key) = Certificates::ca_below_a_root();
    let world = world(with_ca(dir.path(), &certificate, &key), &root).await;
    world.all_work(&one_of_a_kind()).await;
}

#[tokio::test]
async fn what_a_variable_made_a_client_trust_it_trusts_with_a_sidecar_of_its_own_too() {
    if !support::sandbox::inside(
        "what_a_variable_made_a_client_trust_it_trusts_with_a_sidecar_of_its_own_too",
    )
    .await
    {
        return;
    }
    let world = world(Setup::new(), "").await;
    let mut running = JoinSet::new();
    for (variable, client) in [
        ("SSL_CERT_FILE", "urllib"),
        ("REQUESTS_CA_BUNDLE", "requests"),
        ("CURL_CA_BUNDLE", "curl"),
        ("AWS_CA_BUNDLE", "boto3"),
        ("NODE_EXTRA_CA_CERTS", "node-fetch"),
    ] {
        let home = Home::default();
        let row = rows().into_iter().find(|row| row.name == client).unwrap();
        let addresses = world.addresses(&row);
        let mut command = world.exec_alone(&home);
        command.env(variable, world.known.ca_file());
        command.args(&row.words).args(addresses.iter().map(|(url, _)| url));
        running.spawn(async move { (variable, addresses, run(command).await, home) });
    }
    while let Some(done) = running.join_next().await {
        let (variable, addresses, ran, _home) = done.unwrap();
        assert_eq!(judge(&addresses, &ran), None, "{variable}: {ran:#?}");
        assert_eq!(ran.stderr, "", "{variable}: nothing is lost, and nothing said");
    }
    // A sidecar that ran already knows nothing of it.
    let mut command = world.exec();
    command.arg("true").env("REQUESTS_CA_BUNDLE", world.unknown.ca_file());
    let ran = run(command).await;
    assert!(
        ran.stderr.contains("REQUESTS_CA_BUNDLE=/") && ran.stderr.contains("lacks some of it"),
        "{ran:?}"
    );
}

#[tokio::test]
async fn wgets_settings_of_the_system_count_on_in_the_child() {
    if !support::sandbox::inside("wgets_settings_of_the_system_count_on_in_the_child").await {
        return;
    }
    let (world, home) = (world(Setup::new(), "").await, Home::default());
    let settings = home.path().join("system.wgetrc");
    std::fs::write(&settings, "user_agent = by the system\nca_certificate = /none.pem").unwrap();
    let mut command = world.exec_alone(&home);
    command.env("SYSTEM_WGETRC", &settings);
    command.args(["wget", "--quiet", "--tries=1", "--output-document=-", "https://api.openai.com/v1/models"]);
    assert!(run(command).await.ok().contains("gpt-4o-mini"));
    assert_eq!(world.openai.request(1).await.header("user-agent"), "by the system");
}

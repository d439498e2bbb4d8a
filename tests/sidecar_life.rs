//! A pod's sidecar from its start to its end, as processes and without a cluster.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::pedantic, missing_docs, unreachable_pub)]

mod support;

use std::path::Path;
use std::time::{Duration, Instant};

use tokio::io::AsyncWriteExt as _;

use support::ca_files::{CA_FILES, Readers, files_below};
use support::lessor::{Home, chat, field};
use support::plays::openai;
use support::pod::{self, IP, IP6, Pod, ask, door};
use support::provider::Certificates;
use support::tunnel::connect;
use support::{
    Answer, Door, Gate, Key, NEVER, Play, Provider, Request, Setup, client, eventually, ms, within,
};

const NATIVE: [&str; 2] = ["--grace=25s", "--linger=1s"];
const SECRET: &str = "sk-canary-0123456789abcdef";

fn admin() -> Door {
    door(&format!("{IP}:8322"))
}

/// A pod whose secret has one key of this provider.
fn pod(provider: &Provider) -> Pod {
    let key = Key::new("a").from("file = \"$etc/openai-a\"");
    let setup = Setup::openai(provider).set("listen.admin", "\"127.0.0.1:8322\"").key(key);
    Pod::new(&setup.toml(), &[("openai-a", SECRET)])
}

/// A provider whose streams go on when the gate opens, and which answers other requests at once.
async fn pausing(gate: &Gate) -> Provider {
    let gate = gate.clone();
    Provider::plain(move |seen| match seen.path() {
        path if path.ends_with("/models") => openai(seen),
        _ => Play::sse().event("one").until(&gate).done(),
    })
    .await
}

async fn probe(path: &str) -> Option<u16> {
    ask(&admin(), Request::get(path)).await.map(|answer| answer.status)
}

/// A new connection's request, as an app makes it.
async fn models() -> Option<Answer> {
    ask(&door("127.0.0.1:8321"), Request::get("/openai/v1/models")).await
}

async fn is_draining() {
    eventually("not ready", async || (probe("/readyz").await == Some(503)).then_some(())).await;
}

/// The command of an app that goes through CONNECT and trusts this file alone.
fn curl(trusts: &Path) -> Vec<String> {
    let trusts = trusts.display().to_string();
    let all = ["-sS", "--noproxy", "", "-x", "http://127.0.0.1:8321", "--cacert", &trusts];
    all.into_iter().chain(["https://api.openai.com/v1/models"]).map(str::to_owned).collect()
}

async fn app_verifies(pod: &Pod, trusts: &Path) {
    let args = curl(trusts);
    let ran = pod.app("curl", &args.iter().map(String::as_str).collect::<Vec<_>>()).await;
    assert!(ran.ok().contains("gpt-4o-mini"), "{ran:?}");
}

#[tokio::test]
async fn the_startup_probe_passes_only_once_it_serves_and_the_cas_files_are_whole() {
    if !pod::inside("the_startup_probe_passes_only_once_it_serves_and_the_cas_files_are_whole").await {
        return;
    }
    let provider = Provider::plain(openai).await;
    let pod = pod(&provider);
    let readers = Readers::of(&pod.path("ca"));
    let mut before = Vec::new();
    for start in 0..6 {
        assert_eq!(probe("/healthz").await, None, "nothing answers before");
        let mut sidecar = pod.sidecar(IP, &NATIVE);
        // As kubelet does, but without a pause: from the first 200 on, apps start.
        let at_first = eventually("the startup probe passes", async || {
            (probe("/healthz").await? == 200)
                .then(|| CA_FILES.map(|file| pod.path("ca").join(file).is_file()))
        });
        assert_eq!(at_first.await, [true; 4], "at start {start}");
        assert_eq!(models().await.map(|answer| answer.status), Some(200), "at start {start}");
        let ca = std::fs::read(pod.path("ca/ca.pem")).unwrap();
        app_verifies(&pod, &pod.path("ca/ca.pem")).await; // with this process's CA, not with one that was left
        assert!(!before.contains(&ca), "each start has a CA of its own");
        before.push(ca);
        if start % 2 == 0 {
            sidecar.crash();
        } else {
            sidecar.sigterm();
            assert_eq!(sidecar.ends_within(NEVER).await.code(), Some(0));
        }
        assert!(CA_FILES.iter().all(|file| pod.path("ca").join(file).is_file()), "apps may still run");
    }
    assert!(readers.end() > 100, "the files were looked at");
}

#[tokio::test]
async fn on_term_apps_are_served_until_their_connections_are_gone_and_their_leases_given_back() {
    if !pod::inside("on_term_apps_are_served_until_their_connections_are_gone_and_their_leases_given_back")
        .await
    {
        return;
    }
    let gate = Gate::default();
    let provider = pausing(&gate).await;
    let pod = pod(&provider);
    let mut sidecar = pod.sidecar(IP, &NATIVE);
    sidecar.listening().await;
    let mut stream = sidecar.open(chat("gpt-4o-mini")).await;
    stream.read_to("one").await;
    let idle = sidecar.raw().await; // an app's pool of connections
    let tunnel = connect(&sidecar, &provider.addr().to_string()).await; // and what is only passed on
    sidecar.sigterm();
    is_draining().await;
    let begun = Instant::now();
    while begun.elapsed() < ms(1500) {
        // For longer than the linger.
        assert_eq!(models().await.map(|answer| answer.status), Some(200), "{:?}", begun.elapsed());
    }
    assert_eq!(probe("/healthz").await, Some(200), "it lives");
    gate.open();
    assert!(stream.whole().await.expect("the stream ends cleanly").text().contains("[DONE]"));
    eventually("the lease is given back before the end", async || {
        let page = ask(&admin(), Request::get("/metrics")).await.expect("it has not ended").text();
        let mut active = page.lines().filter(|line| line.starts_with("lessor_leases_active{"));
        active.next().is_some_and(|line| line.ends_with(" 0")).then_some(())
    })
    .await;
    assert!(provider.seen().iter().all(|seen| seen.gone.is_none()), "no request was cut");
    drop(idle);
    let begun = Instant::now();
    while begun.elapsed() < ms(1500) {
        assert_eq!(probe("/healthz").await, Some(200), "a tunnel is a connection, too");
    }
    drop(tunnel);
    let alone = Instant::now();
    assert_eq!(sidecar.ends_within(NEVER).await.code(), Some(0));
    assert!((ms(900)..ms(5000)).contains(&alone.elapsed()), "after the linger: {:?}", alone.elapsed());
    assert!(models().await.is_none());
    let log = sidecar.log();
    assert!(log.contains("no client is connected any more") && log.contains("\"stopped\""), "{log}");
}

#[tokio::test]
async fn with_nobody_connected_it_ends_promptly_and_exits_with_0() {
    if !pod::inside("with_nobody_connected_it_ends_promptly_and_exits_with_0").await {
        return;
    }
    let provider = Provider::plain(openai).await;
    let mut sidecar = pod(&provider).sidecar(IP, &NATIVE);
    sidecar.listening().await;
    assert_eq!(models().await.map(|answer| answer.status), Some(200));
    let begun = Instant::now();
    sidecar.sigterm();
    assert_eq!(sidecar.ends_within(ms(3000)).await.code(), Some(0));
    assert!(begun.elapsed() >= ms(900), "an app may still come: {:?}", begun.elapsed());
}

#[tokio::test]
async fn the_grace_bounds_it_where_a_stream_never_ends_and_idle_connections_are_not_cut() {
    if !pod::inside("the_grace_bounds_it_where_a_stream_never_ends_and_idle_connections_are_not_cut").await {
        return;
    }
    let provider = pausing(&Gate::default()).await;
    let mut sidecar = pod(&provider).sidecar(IP, &["--grace=4s", "--linger=1s"]);
    sidecar.listening().await;
    let mut stream = sidecar.open(chat("gpt-4o-mini")).await;
    stream.read_to("one").await;
    let mut kept = sidecar.raw().await;
    kept.write("GET /openai/v1/models HTTP/1.1\r\nHost: 127.0.0.1:8321\r\n\r\n").await;
    kept.read_to("gpt-4o-mini").await;
    let begun = Instant::now();
    sidecar.sigterm();
    let mut rest = Vec::new();
    tokio::select! {
        biased;
        end = stream.next() => panic!("cut with the streams, or before: {end:?}"),
        read = tokio::io::AsyncReadExt::read_to_end(&mut kept.0, &mut rest) => {
            read.expect("the idle connection ends, and is not reset");
        }
    }
    let idle_ended = Instant::now();
    assert!(stream.whole().await.is_err(), "a cut stream is no whole one");
    // A tenth of the grace is for that; many connections need some time.
    assert!(idle_ended.elapsed() >= ms(100), "{:?}", idle_ended.elapsed());
    assert!(begun.elapsed() >= ms(3900), "not before the grace was over: {:?}", begun.elapsed());
    assert_eq!(sidecar.ends_within(NEVER).await.code(), Some(0));
    assert!(begun.elapsed() < ms(8000), "{:?}", begun.elapsed());
    eventually("the provider sees the close", async || {
        provider.seen().iter().find_map(|seen| seen.gone.map(drop))
    })
    .await;
}

#[tokio::test]
async fn a_second_term_ends_it_at_once() {
    if !pod::inside("a_second_term_ends_it_at_once").await {
        return;
    }
    let provider = pausing(&Gate::default()).await;
    let mut sidecar = pod(&provider).sidecar(IP, &NATIVE);
    sidecar.listening().await;
    let mut stream = sidecar.open(chat("gpt-4o-mini")).await;
    stream.read_to("one").await;
    sidecar.sigterm();
    is_draining().await;
    sidecar.sigterm();
    sidecar.ends_within(Duration::from_secs(2)).await;
}

/// A refusal of the admin API.
async fn refusal(door: &Door, request: Request) -> (u16, String) {
    let answer = ask(door, request).await.expect("an answer");
    (answer.status, answer.header("x-lessor-error").to_owned())
}

#[tokio::test]
async fn a_jobs_app_ends_it_by_quit_which_is_for_loopback_alone() {
    if !pod::inside("a_jobs_app_ends_it_by_quit_which_is_for_loopback_alone").await {
        return;
    }
    let gate = Gate::default();
    let provider = pausing(&gate).await;
    let pod = pod(&provider);
    let mut plain = pod.sidecar(IP, &NATIVE);
    plain.listening().await;
    let unknown = refusal(&admin(), Request::new("POST", "/quit")).await;
    assert_eq!(unknown, (404, "not_found".into()), "without --quit there is no such path");
    let loopback = door("127.0.0.1:8322");
    assert!(ask(&loopback, Request::get("/healthz")).await.is_none(), "nor a listener for it");
    plain.sigterm();
    assert_eq!(plain.ends_within(NEVER).await.code(), Some(0));

    let mut sidecar = pod.sidecar(IP, &["--grace=25s", "--linger=1s", "--quit"]);
    sidecar.listening().await;
    let post = || Request::new("POST", "/quit");
    assert_eq!(refusal(&admin(), post()).await, (403, "admin_forbidden".into()), "by the pod's address");
    let socket = tokio::net::TcpSocket::new_v4().unwrap();
    socket.bind(format!("{IP}:0").parse().unwrap()).unwrap();
    let from_outside = socket.connect("127.0.0.1:8322".parse().unwrap()).await.unwrap();
    let answer = support::client::send_on(from_outside, "127.0.0.1:8322", post()).await.unwrap();
    assert_eq!(answer.status, 403, "from another address");
    assert_eq!(refusal(&loopback, Request::get("/quit")).await, (405, "method_denied".into()));
    let page = post().header("origin", "https://elsewhere.example");
    assert_eq!(refusal(&loopback, page).await, (403, "origin_denied".into()));
    assert_eq!(refusal(&loopback, post().header("host", "rebound.example")).await.0, 403);
    assert_eq!(probe("/readyz").await, Some(200), "none of them did anything");
    // The door for it does not open more than it was opened for, nor to who is proxied.
    assert_eq!(refusal(&loopback, Request::new("POST", "/v1/keys/openai/a/disable")).await.0, 403);
    let proxied = ask(&door("127.0.0.1:8321"), Request::new("POST", "http://127.0.0.1:8322/quit")).await;
    assert_ne!(proxied.expect("an answer").status, 200);

    let mut stream = sidecar.open(chat("gpt-4o-mini")).await;
    stream.read_to("one").await;
    let ran = pod.app("curl", &["-sS", "-X", "POST", "http://127.0.0.1:8322/quit"]).await;
    assert_eq!(ran.ok(), "stopping\n");
    is_draining().await;
    sidecar.sigterm(); // the pod's own end, which is the first that comes by a signal
    assert_eq!(models().await.map(|answer| answer.status), Some(200), "other apps are served still");
    gate.open();
    assert!(stream.whole().await.expect("the stream ends cleanly").text().contains("[DONE]"));
    assert_eq!(sidecar.ends_within(NEVER).await.code(), Some(0));
}

#[tokio::test]
async fn an_app_of_another_user_reads_the_ca_and_neither_key_nor_socket_nor_secret() {
    if !pod::inside("an_app_of_another_user_reads_the_ca_and_neither_key_nor_socket_nor_secret").await {
        return;
    }
    let provider = Provider::plain(openai).await;
    let pod = pod(&provider);
    let mut sidecar = pod.sidecar(IP, &NATIVE);
    sidecar.listening().await;
    for file in ["ca.pem", "ca-bundle.pem"] {
        app_verifies(&pod, &pod.path("ca").join(file)).await;
    }
    for file in CA_FILES {
        pod.app("cat", &[&pod.path("ca").join(file).display().to_string()]).await.ok();
    }
    // Its umask leaves nothing to others; these are for them all the same.
    let public: Vec<_> =
        files_below(&pod.path("ca")).into_iter().map(|(name, mode, _)| (name, mode)).collect();
    let expected = ["ca-bundle.p12", "ca-bundle.pem", "ca.pem", "wgetrc"].map(|name| (name.into(), 0o644));
    assert_eq!(public, expected, "and nothing else is there");
    for (name, ..) in public {
        let bytes = std::fs::read(pod.path("ca").join(name)).unwrap();
        assert!(memchr::memmem::find(&bytes, b"PRIVATE").is_none(), "certificates and no key");
    }
    let private = files_below(&pod.path("private"));
    let uid = private[0].2;
    let own = format!("lessor-{uid}");
    let socket = pod.path("private").join(&own).join("lessor-8321.sock");
    assert_eq!(sidecar.admin_socket(), socket);
    let expected = [(own.clone().into(), 0o700, uid), (Path::new(&own).join("lessor-8321.sock"), 0o600, uid)];
    assert_eq!(private, expected, "a socket and nothing else, for its own user");
    if !pod::has_users() {
        return; // the modes tell what another user could do
    }
    let socket = socket.display().to_string();
    let ran = pod.app("curl", &["-sS", "--unix-socket", &socket, "http://lessor/v1/keys"]).await;
    assert!(ran.code != Some(0) && !ran.stdout.contains("openai"), "{ran:?}");
    let secret = pod.path("etc/openai-a").display().to_string();
    let private = pod.path("private").join(&own).display().to_string();
    let of_process = |file: &str| format!("/proc/{}/{file}", sidecar.pid());
    for path in
        [&secret, &format!("{}{secret}", of_process("root")), &of_process("environ"), &of_process("mem")]
    {
        let ran = pod.app("cat", &[path]).await;
        assert!(ran.code != Some(0) && !ran.stdout.contains("canary"), "{path}: {ran:?}");
    }
    assert_ne!(pod.app("ls", &[&private]).await.code, Some(0));
    // It is the mount alone that keeps the secret: all may read the file, for its user is not its owner.
    let ran = pod.app_with_the_mounts_of(&sidecar, "cat", &[&secret]).await;
    assert_eq!(ran.ok(), SECRET);
}

#[tokio::test]
async fn a_ca_in_the_secret_signs_and_one_that_somebody_could_write_does_not() {
    if !pod::inside("a_ca_in_the_secret_signs_and_one_that_somebody_could_write_does_not").await {
        return;
    }
    if !pod::has_users() {
        return; // the secret would be the sidecar's own, whose mode it could change
    }
    let provider = Provider::plain(openai).await;
    let (cert, key) = Certificates::ca();
    let of_key = Key::new("a").from("file = \"$etc/openai-a\"");
    let setup = Setup::openai(&provider).set("listen.admin", "\"127.0.0.1:8322\"").key(of_key);
    let setup = setup.set("ca.cert_file", "\"$etc/tls.crt\"").set("ca.key_file", "\"$etc/tls.key\"");
    let pod = Pod::new(&setup.toml(), &[("openai-a", SECRET), ("tls.crt", &cert), ("tls.key", &key)]);
    let mut sidecar = pod.sidecar(IP, &NATIVE);
    sidecar.listening().await;
    assert_eq!(std::fs::read_to_string(pod.path("ca/ca.pem")).unwrap(), cert);
    app_verifies(&pod, &pod.path("ca/ca.pem")).await;
    sidecar.sigterm();
    assert_eq!(sidecar.ends_within(NEVER).await.code(), Some(0));
    // The same file of the same owner, on a mount where somebody may write.
    let loose = pod.path("private/tls.key");
    std::fs::write(&loose, &key).unwrap();
    std::fs::set_permissions(&loose, std::os::unix::fs::PermissionsExt::from_mode(0o444)).unwrap();
    let toml = setup.toml().replace("$etc/tls.key", &loose.display().to_string());
    pod.set("lessor.toml", &toml.replace("$etc", &pod.path("etc").display().to_string()));
    let mut sidecar = pod.sidecar(IP, &NATIVE);
    assert_ne!(sidecar.ends_within(NEVER).await.code(), Some(0));
    let told = async || sidecar.log().contains("others could sign with it").then_some(());
    eventually("the reason is told", told).await;
}

#[tokio::test]
async fn it_writes_nothing_but_its_two_volumes_and_needs_no_home() {
    if !pod::inside("it_writes_nothing_but_its_two_volumes_and_needs_no_home").await {
        return;
    }
    let provider = Provider::plain(openai).await;
    let pod = pod(&provider);
    let mut sidecar = pod.sidecar(IP, &NATIVE);
    sidecar.listening().await;
    for dir in ["/tmp".into(), "/dev/shm".into(), "/var/tmp".into(), pod.path("etc"), pod.path("")] {
        let file = dir.join("written").display().to_string();
        let ran = pod.app_with_the_mounts_of(&sidecar, "touch", &[&file]).await;
        assert!(ran.code != Some(0) && !Path::new(&file).exists(), "{file} can be written: {ran:?}");
    }
    let environment = std::fs::read_to_string(format!("/proc/{}/environ", sidecar.pid())).unwrap();
    let names: Vec<_> = environment.split('\0').filter_map(|pair| pair.split('=').next()).collect();
    assert_eq!(names, ["XDG_RUNTIME_DIR", ""]);
    app_verifies(&pod, &pod.path("ca/ca.pem")).await;
    assert!(pod.exec(&sidecar, &["keys", "list"]).await.ok().contains("available"), "by its socket");
    pod.exec(&sidecar, &["ready"]).await.ok();
    assert_eq!(
        pod.exec(&sidecar, &["ca", "path"]).await.ok().trim(),
        pod.path("ca/ca.pem").to_str().unwrap()
    );
    let trust = pod.exec(&sidecar, &["env", "--json"]).await.json();
    let bundle = pod.path("ca/ca-bundle.pem");
    assert_eq!(trust["set"]["SSL_CERT_FILE"], bundle.to_str().unwrap(), "{trust:#}");
    sidecar.sigterm();
    assert_eq!(sidecar.ends_within(NEVER).await.code(), Some(0));
    let bad: Vec<_> = sidecar
        .log_lines()
        .into_iter()
        .filter(|line| ["WARN", "ERROR"].contains(&field(line, "level").as_str()))
        .collect();
    // Without another user than root, the file is its own.
    assert!(bad.is_empty() || !pod::has_users(), "{bad:#?}");
    let left: Vec<_> = files_below(&pod.path("private")).into_iter().map(|(name, ..)| name).collect();
    assert_eq!(left.len(), 1, "the socket is gone: {left:?}");
    assert_eq!(files_below(&pod.path("ca")).len(), 4, "and the CA's files are still there");
}

#[tokio::test]
async fn probes_and_metrics_are_on_the_pods_address_of_either_kind_and_v1_is_not() {
    if !pod::inside("probes_and_metrics_are_on_the_pods_address_of_either_kind_and_v1_is_not").await {
        return;
    }
    let provider = Provider::plain(openai).await;
    let pod = pod(&provider);
    for (ip, host) in [(IP, format!("{IP}:8322")), (IP6, format!("[{IP6}]:8322"))] {
        let mut sidecar = pod.sidecar(ip, &NATIVE);
        sidecar.listening().await;
        let door = door(&host);
        assert_eq!(sidecar.admin_door(), door);
        for path in ["/healthz", "/readyz", "/metrics"] {
            let answer = ask(&door, Request::get(path).header("host", &host)).await.expect("an answer");
            assert_eq!(answer.status, 200, "{host}{path}: {}", answer.text());
        }
        let elsewhere = ask(&door, Request::get("/metrics").header("host", "rebound.example")).await;
        assert_eq!(elsewhere.expect("an answer").status, 403);
        for path in ["/v1/keys", "/v1/status", "/v1/events"] {
            assert_eq!(refusal(&door, Request::get(path)).await, (403, "admin_forbidden".into()), "{path}");
        }
        assert_eq!(models().await.map(|answer| answer.status), Some(200));
        sidecar.sigterm();
        assert_eq!(sidecar.ends_within(NEVER).await.code(), Some(0));
    }
}

/// Connections from `from` to the admin listener that ask for much and take nothing, and such as say nothing.
async fn hoard(from: &str, number: usize) -> Vec<tokio::net::TcpStream> {
    let asks = format!("GET /metrics HTTP/1.1\r\nHost: {IP}:8322\r\n\r\n").repeat(2000);
    let mut held = Vec::new();
    for index in 0..number {
        let mut socket = from_address(from).await;
        if index % 2 == 0 {
            // As much as fits; one that was closed takes nothing.
            let _ = tokio::time::timeout(ms(20), socket.write_all(asks.as_bytes())).await;
        }
        held.push(socket);
    }
    held
}

async fn from_address(from: &str) -> tokio::net::TcpStream {
    let socket = tokio::net::TcpSocket::new_v4().unwrap();
    socket.bind(format!("{from}:0").parse().unwrap()).unwrap();
    within(NEVER, "a connection", socket.connect(format!("{IP}:8322").parse().unwrap())).await.unwrap()
}

#[tokio::test]
async fn an_app_that_hoards_the_admin_listener_keeps_no_probe_of_the_node_out() {
    if !pod::inside("an_app_that_hoards_the_admin_listener_keeps_no_probe_of_the_node_out").await {
        return;
    }
    const NODE: &str = "10.77.0.1";
    let mut add = std::process::Command::new("ip");
    add.args(["addr", "add", &format!("{NODE}/32"), "dev", "lo"]);
    support::lessor::run(add).await.ok();
    let provider = Provider::plain(openai).await;
    let pod = pod(&provider);
    let mut sidecar = pod.sidecar(IP, &NATIVE);
    sidecar.listening().await;
    let _held = hoard("127.0.0.1", 260).await;
    let _more = hoard(IP, 40).await;
    let asked = async {
        let probe = Request::get("/healthz").header("host", &format!("{IP}:8322"));
        client::send_on(from_address(NODE).await, &admin().host(), probe)
            .await
            .unwrap()
            .whole()
            .await
            .unwrap()
    };
    // As long as the kubelet waits, unless told otherwise.
    assert_eq!(within(ms(1000), "the node's probe", asked).await.status, 200);
    // Nor for long itself: what takes nothing, or says nothing, ends.
    eventually("a place for the app", async || (probe("/healthz").await == Some(200)).then_some(())).await;
    sidecar.sigterm();
    assert_eq!(sidecar.ends_within(NEVER).await.code(), Some(0));
}

#[tokio::test]
async fn what_the_command_line_says_holds_after_a_reload_too() {
    if !pod::inside("what_the_command_line_says_holds_after_a_reload_too").await {
        return;
    }
    let provider = Provider::plain(openai).await;
    let file = |name: &str| format!("file = \"$etc/{name}\"");
    let setup = Setup::openai(&provider)
        .provider("groq", &provider)
        .set("listen.admin", "\"127.0.0.1:8322\"")
        .set("shutdown.linger", "\"5s\"")
        .key(Key::new("a").from(&file("openai-a")))
        .key(Key::new("v").pool("vip").from(&file("openai-v")))
        .key(Key::new("g").of("groq").from(&file("groq-g")));
    let secrets =
        [("openai-a", SECRET), ("openai-v", "sk-v-0123456789abcd"), ("groq-g", "gsk-0123456789abcd")];
    let pod = Pod::new(&setup.toml(), &secrets);
    let more = ["--grace=20s", "--linger=1s", "--default-pool=vip", "--upstreams=openai,anthropic"];
    let mut sidecar = pod.sidecar(IP, &more);
    sidecar.listening().await;
    let holds = async || {
        assert_eq!(models().await.unwrap().header("x-lessor-key"), "v", "the pool of who names none");
        let named = Request::get("/openai/v1/models").header("x-lessor-pool", "default");
        assert_eq!(ask(&door("127.0.0.1:8321"), named).await.unwrap().header("x-lessor-key"), "a");
        let other = ask(&door("127.0.0.1:8321"), Request::get("/groq/v1/models")).await.unwrap();
        other.is_error(404, "unknown_provider");
        assert!(
            other.text().contains("`groq` is not among --upstreams here; served: openai"),
            "{}",
            other.text()
        );
        assert_eq!(probe("/readyz").await, Some(200));
    };
    holds().await;
    assert!(sidecar.log().contains("--upstreams names anthropic, which has no key here"));
    let changed = setup.set("queue.max_wait", "\"7s\"").set("shutdown.linger", "\"9s\"");
    pod.set("lessor.toml", &changed.toml().replace("$etc", &pod.path("etc").display().to_string()));
    sidecar.signal(rustix::process::Signal::HUP);
    let taken = eventually("the new file is taken", async || {
        let mut lines = sidecar.log_lines().into_iter();
        lines.find(|line| field(line, "message") == "the configuration was taken")
    });
    assert_eq!(field(&taken.await, "sections"), "queue", "what the options say was not changed");
    assert!(!sidecar.log().contains("counts from the next start"));
    holds().await;
    pod.set("lessor.toml", &changed.toml().replace("$etc", "/nowhere"));
    sidecar.signal(rustix::process::Signal::HUP);
    eventually("a bad one is refused", async || sidecar.log().contains("the old one is kept").then_some(()))
        .await;
    holds().await;
    sidecar.sigterm();
    assert_eq!(sidecar.ends_within(ms(4000)).await.code(), Some(0), "by the option's linger");
}

#[tokio::test]
async fn an_option_that_cannot_be_taken_is_named_and_nothing_is_served() {
    let home = Home::default();
    let variables = [("OPENAI_API_KEY", "sk-0123456789abcdef")];
    home.write("free.toml", &Setup::new().toml());
    for (args, code, said) in [
        (&["--grace", "soon"][..], 2, "--grace <TIME>"),
        (&["--linger", "31s"], 2, "--linger is 31s, must be at most shutdown.grace (30s)"),
        (&["--admin-ip", "$(POD_IP)"], 2, "--admin-ip <IP>"),
        (&["--proxy", "127.0.0.1"], 2, "--proxy <ADDR>"),
        (&["--proxy", "0.0.0.0:0"], 2, "--proxy is 0.0.0.0:0, which other machines may reach"),
        (&["--default-pool", "vip"], 2, "--default-pool is vip, must be a pool of some key"),
        (&["--upstreams", "openai,antropic"], 2, "did you mean `anthropic`?"),
        (&["--ca-dir", "/proc/nowhere", "--config", "free.toml"], 1, "(--ca-dir)"),
    ] {
        let all: Vec<_> = ["run"].iter().chain(args).copied().collect();
        let ran = home.run_with(&all, &variables).await;
        assert!(ran.code == Some(code) && ran.stderr.contains(said), "{args:?}: {ran:#?}");
    }
    let help = home.run(&["run", "--help"]).await;
    for part in ["--ca-dir <DIR>", "Examples:", "--linger 1s", "curl -X POST http://127.0.0.1:8322/quit"] {
        assert!(help.ok().contains(part), "no {part} in {}", help.stdout);
    }
}

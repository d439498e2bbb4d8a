//! Start, stop, crash and start again.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::pedantic, missing_docs, unreachable_pub)]

mod support;

use std::sync::Arc;
use std::time::{Duration, Instant};

use support::lessor::{Home, chat};
use support::plays::openai;
use support::{Door, Gate, Key, Lessor, Play, Provider, Request, Setup, eventually, eventually_within, ms};

const LONG: Duration = Duration::from_secs(10);

/// A provider whose streams go on when the gate opens.
async fn pausing(gate: &Gate) -> Provider {
    let gate = gate.clone();
    Provider::start(move |_| Play::sse().event("one").until(&gate).done()).await
}

/// Whether a new connection is refused, or at least gets no answer but an error.
async fn takes_nobody(door: &Door) -> bool {
    let Door::Tcp(at) = door else { unreachable!() };
    tokio::net::TcpStream::connect(at).await.is_err()
}

#[tokio::test]
async fn on_sigterm_open_streams_finish_nobody_new_is_let_in_and_the_exit_is_clean() {
    let gate = Gate::default();
    let provider = pausing(&gate).await;
    let mut lessor = Setup::openai(&provider).key(Key::new("a")).start().await;
    let mut stream = lessor.open(chat("gpt-4o-mini")).await;
    stream.read_to("one").await;
    lessor.sigterm();
    let door = lessor.door().clone();
    eventually("new connections are refused", async || takes_nobody(&door).await.then_some(())).await;
    gate.open();
    assert!(stream.whole().await.expect("the stream ends cleanly").text().contains("[DONE]"));
    let status = lessor.ends_within(LONG).await;
    assert_eq!(status.code(), Some(0));
    assert!(provider.seen()[0].gone.is_none());
}

#[tokio::test]
async fn while_draining_it_is_not_ready_and_a_kept_connection_is_told_to_close() {
    let gate = Gate::default();
    let provider = pausing(&gate).await;
    let mut lessor = Setup::openai(&provider).key(Key::new("a")).start().await;
    let mut stream = lessor.open(chat("gpt-4o-mini")).await;
    stream.read_to("one").await;
    assert_eq!(lessor.admin("/readyz").await.status, 200);
    lessor.sigterm();
    let door = lessor.admin_door();
    eventually("not ready", async || match support::client::send(&door, Request::get("/readyz")).await {
        Ok(answer) => (answer.status == 503).then_some(()),
        Err(_) => Some(()),
    })
    .await;
    gate.open();
    stream.whole().await.unwrap();
    assert_eq!(lessor.ends_within(LONG).await.code(), Some(0));
}

#[tokio::test]
async fn after_the_grace_open_streams_are_cut_and_shown_as_cut() {
    let provider = Provider::start(|_| Play::sse().event("one").silence()).await;
    let setup = Setup::openai(&provider).key(Key::new("a")).set("shutdown.grace", "\"500ms\"");
    let mut lessor = setup.start().await;
    let mut stream = lessor.open(chat("gpt-4o-mini")).await;
    stream.read_to("one").await;
    lessor.sigterm();
    let begun = Instant::now();
    assert!(stream.whole().await.is_err(), "a cut stream is no whole one");
    assert_eq!(lessor.ends_within(LONG).await.code(), Some(0));
    assert!(begun.elapsed() >= ms(400), "not before the grace was over");
    eventually("the provider sees the close", async || provider.seen()[0].gone.map(drop)).await;
}

#[tokio::test]
async fn a_request_that_waits_for_a_key_at_sigterm_is_answered() {
    let gate = Gate::default();
    let provider = pausing(&gate).await;
    let lessor = Arc::new(Setup::openai(&provider).key(Key::new("a").cap(1)).start().await);
    let mut stream = lessor.open(chat("gpt-4o-mini")).await;
    stream.read_to("one").await;
    let asking = Arc::clone(&lessor);
    let queued = tokio::spawn(async move { asking.chat().await });
    lessor.comes_to_queue(1).await;
    lessor.sigterm();
    gate.open();
    stream.whole().await.unwrap();
    let answer = queued.await.unwrap();
    let refused = (answer.status, answer.header("x-lessor-error")) == (503, "shutting_down");
    assert!(answer.status == 200 || refused, "{} {}", answer.status, answer.text());
}

#[tokio::test]
async fn a_second_signal_exits_at_once() {
    let provider = Provider::start(|_| Play::sse().event("one").silence()).await;
    let mut lessor = Setup::openai(&provider).key(Key::new("a")).start().await;
    let mut stream = lessor.open(chat("gpt-4o-mini")).await;
    stream.read_to("one").await;
    lessor.sigterm();
    let door = lessor.door().clone();
    eventually("the drain has begun", async || takes_nobody(&door).await.then_some(())).await;
    lessor.sigterm();
    lessor.ends_within(Duration::from_secs(2)).await;
}

#[tokio::test]
async fn sigint_stops_it_as_sigterm_does() {
    let provider = Provider::start(openai).await;
    let mut lessor = Setup::openai(&provider).key(Key::new("a")).start().await;
    lessor.signal(rustix::process::Signal::INT);
    assert_eq!(lessor.ends_within(LONG).await.code(), Some(0));
}

/// A lessor on the very port of another.
fn on_the_port_of(first: &Lessor, provider: &Provider) -> Setup {
    let port = format!("{:?}", first.authority());
    Setup::openai(provider).key(Key::new("a")).set("listen.proxy", &port)
}

#[tokio::test]
async fn a_port_that_is_taken_is_an_error_that_names_it_and_it_starts_when_the_first_has_gone() {
    let provider = Provider::start(openai).await;
    let mut first = Setup::openai(&provider).key(Key::new("a")).start().await;
    assert_eq!(first.chat().await.status, 200);
    let mut second = on_the_port_of(&first, &provider).spawn();
    let status = second.ends_within(LONG).await;
    assert_ne!(status.code(), Some(0));
    let said = eventually("the error", async || {
        let said = second.log() + &second.stdout();
        said.contains(&first.authority()).then_some(said)
    })
    .await;
    assert!(said.contains("in use") && said.contains("listen.proxy"), "{said}");
    first.sigterm();
    assert_eq!(first.ends_within(LONG).await.code(), Some(0));
    let third = on_the_port_of(&first, &provider).start().await;
    assert_eq!(third.authority(), first.authority());
    assert_eq!(third.chat().await.status, 200);
}

#[tokio::test]
async fn after_a_crash_it_starts_on_the_same_ports_and_sockets_and_serves() {
    let provider = Provider::start(|_| Play::sse().event("one").silence()).await;
    let home = Arc::new(Home::default());
    let socket = home.path().join("proxy.sock");
    let listen = |tcp: &str| format!("[{tcp:?}, \"unix:{}\"]", socket.display());
    let setup = Setup::openai(&provider).key(Key::new("a").cap(1));
    let mut first = setup.clone().set("listen.proxy", &listen("127.0.0.1:0")).spawn_in(Arc::clone(&home));
    first.listening().await;
    let mut stream = first.open(chat("gpt-4o-mini")).await;
    stream.read_to("one").await;
    first.crash();
    assert!(stream.whole().await.is_err(), "the client sees the crash");
    eventually("the provider sees it", async || provider.seen()[0].gone.map(drop)).await;
    let mut second = setup.set("listen.proxy", &listen(&first.authority())).spawn_in(home);
    second.listening().await;
    assert_eq!(second.authority(), first.authority());
    let mut stream = second.open(chat("gpt-4o-mini")).await;
    stream.read_to("one").await;
    let by_socket = Request::get("/openai/v1/models").header("x-lessor-max-wait", "0s");
    let answer = support::client::send(&Door::Unix(socket), by_socket).await.unwrap();
    assert_eq!(answer.status, 429, "the one slot is taken by the new process's own stream");
    assert!(!second.admin_socket().as_os_str().is_empty());
    assert_eq!(second.cli(&["ready"]).await.code, Some(0));
}

#[tokio::test]
async fn without_a_file_it_serves_the_providers_whose_variables_are_set_on_the_usual_ports() {
    if !support::sandbox::inside(
        "without_a_file_it_serves_the_providers_whose_variables_are_set_on_the_usual_ports",
    )
    .await
    {
        return;
    }
    let variables =
        [("OPENAI_API_KEY", "sk-first"), ("OPENAI_API_KEY_2", "sk-second"), ("ANTHROPIC_API_KEY", "sk-ant")];
    let env: Vec<_> = variables.iter().map(|(name, value)| (name.to_string(), value.to_string())).collect();
    let mut lessor = Lessor::spawn(Arc::default(), &["run".into()], &env);
    lessor.listening().await;
    assert_eq!(
        (lessor.authority(), lessor.admin_door().host()),
        ("127.0.0.1:8321".into(), "127.0.0.1:8322".into())
    );
    let keys = lessor.admin("/v1/keys").await.json();
    let mut ids: Vec<_> =
        keys["keys"].as_array().unwrap().iter().map(|key| key["id"].as_str().unwrap()).collect();
    ids.sort_unstable();
    assert_eq!(ids, ["anthropic-1", "openai-1", "openai-2"]);
    assert_eq!(keys["keys"][0]["max_concurrent_uses"], 8);
    lessor.home().run(&["ready"]).await.ok(); // found at its usual place
}

#[tokio::test]
async fn without_a_file_and_without_a_variable_it_says_what_to_set() {
    let home = Home::default();
    let ran = home.run(&["run"]).await;
    assert_ne!(ran.code, Some(0));
    assert!(ran.stderr.contains("OPENAI_API_KEY"), "{}", ran.stderr);
}

#[tokio::test]
async fn one_line_is_logged_for_each_request() {
    let provider = Provider::start(openai).await;
    let lessor = Setup::openai(&provider).key(Key::new("a")).start().await;
    let answer = lessor.chat().await;
    let lease = answer.header("x-lessor-lease").to_owned();
    let of_lease = || {
        lessor.log_lines().into_iter().filter(|line| line.to_string().contains(&lease)).collect::<Vec<_>>()
    };
    eventually_within(Duration::from_secs(2), "the line", async || (!of_lease().is_empty()).then_some(()))
        .await;
    let lines = of_lease();
    assert_eq!(lines.len(), 1, "{lines:#?}");
    let line = lines[0].to_string();
    for part in ["anonymous", "openai", "default", "\"a\"", "200"] {
        assert!(line.contains(part), "no {part} in {line}");
    }
}

#[tokio::test]
async fn when_connections_run_out_the_next_waits_and_is_served() {
    let provider = Provider::start(openai).await;
    let setup = Setup::openai(&provider).key(Key::new("a")).set("limits.max_connections", "2");
    let lessor = setup.start().await;
    let (one, two) = (lessor.raw().await, lessor.raw().await);
    let mut third = lessor.raw().await;
    third.write(format!("GET /openai/v1/models HTTP/1.1\r\nHost: {}\r\n\r\n", lessor.authority())).await;
    let early = tokio::time::timeout(ms(300), third.answer()).await;
    assert!(early.is_err(), "served beyond the bound: {early:?}");
    drop((one, two));
    assert_eq!(third.answer().await.0, 200);
}

#[tokio::test]
async fn when_descriptors_run_out_open_streams_go_on_and_it_does_not_spin() {
    let gate = Gate::default();
    let provider = pausing(&gate).await;
    let lessor = Setup::openai(&provider).key(Key::new("a")).start().await;
    let mut stream = lessor.open(chat("gpt-4o-mini")).await;
    stream.read_to("one").await;
    let open = std::fs::read_dir(format!("/proc/{}/fd", lessor.pid())).unwrap().count() as u64;
    let pid = rustix::process::Pid::from_raw(lessor.pid().cast_signed()).unwrap();
    let limit = rustix::process::Rlimit { current: Some(open + 4), maximum: Some(open + 4) };
    rustix::process::prlimit(Some(pid), rustix::process::Resource::Nofile, limit).unwrap();
    let mut clients = Vec::new();
    for _ in 0..40 {
        clients.push(lessor.raw().await);
    }
    let ticks = || {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", lessor.pid())).unwrap();
        let fields: Vec<_> = stat.rsplit(')').next().unwrap().split_whitespace().map(str::to_owned).collect();
        fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap()
    };
    let before = ticks();
    tokio::time::sleep(Duration::from_secs(1)).await; // the time over which it is measured
    let used = ticks() - before;
    assert!(used < 50, "{used} ticks of 100 were used on nothing");
    drop(clients);
    gate.open();
    assert!(stream.whole().await.unwrap().text().contains("[DONE]"));
    let served = async || match lessor.try_open(Request::get("/openai/v1/models")).await {
        Ok(answer) => (answer.status == 200).then_some(()),
        Err(_) => None,
    };
    eventually("new clients are served again", served).await;
}

#[tokio::test]
async fn it_serves_and_stops_also_where_nobody_reads_its_log() {
    use tokio::io::AsyncBufReadExt as _;
    let provider = Provider::plain(openai).await;
    for (level, requests) in [("trace", 200), ("info", 1000)] {
        let home = Home::default();
        let config = home.path().join("lessor.toml");
        std::fs::write(&config, Setup::openai(&provider).key(Key::new("a")).toml()).unwrap();
        let mut command = tokio::process::Command::from(home.command());
        command.args(["run", "--config"]).arg(config).env("SECRET_OPENAI_A", "sk-a").env("RUST_LOG", level);
        command.kill_on_drop(true).stderr(std::process::Stdio::piped());
        let mut child = command.spawn().unwrap();
        let mut lines = tokio::io::BufReader::new(child.stderr.take().unwrap()).lines();
        let door = loop {
            let line = support::within(LONG, "lessor listens", lines.next_line()).await.unwrap().unwrap();
            let line: serde_json::Value = serde_json::from_str(&line).unwrap_or_default();
            if support::lessor::field(&line, "message") == "listening" {
                break Door::Tcp(support::lessor::field(&line, "proxy").parse().unwrap());
            }
        };
        // From here on the log stays in the pipe, which soon is full.
        for n in 0..requests {
            let sent = support::client::send(&door, chat("gpt-4o-mini"));
            let answer = support::within(LONG, &format!("{level}: answer {n}"), sent).await.unwrap();
            assert_eq!(answer.whole().await.unwrap().status, 200, "{level}: request {n}");
        }
        let pid = rustix::process::Pid::from_raw(child.id().unwrap().cast_signed()).unwrap();
        rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
        let status = support::within(LONG, &format!("{level}: lessor ends"), child.wait()).await.unwrap();
        assert!(status.success(), "{level}: {status}");
        drop(lines);
    }
}

/// A lessor of another user than this one where that can be: only then does it show who may read its memory.
#[tokio::test]
async fn it_writes_no_core_file_and_its_memory_and_environment_are_roots_alone() {
    use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
    use std::os::unix::process::CommandExt as _;
    let provider = Provider::start(openai).await;
    let home = Home::default();
    let open = std::fs::Permissions::from_mode(0o755);
    std::fs::set_permissions(home.path(), open.clone()).unwrap();
    // A copy, for another user need not reach where this was built.
    let binary = home.path().join("lessor");
    std::fs::copy(env!("CARGO_BIN_EXE_lessor"), &binary).unwrap();
    std::fs::set_permissions(&binary, open).unwrap();
    let config = home.path().join("lessor.toml");
    let setup = Setup::new().set("providers.openai.base_url", &format!("{:?}", provider.base_url()));
    std::fs::write(&config, setup.key(Key::new("a")).toml()).unwrap();
    let own = rustix::process::geteuid().as_raw();
    let uid = if own == 0 { 65534 } else { own };
    let mut command = std::process::Command::new(&binary);
    command
        .arg("run")
        .arg("--config")
        .arg(&config)
        .env_clear()
        .env("SECRET_OPENAI_A", "sk-of-another-0123456789");
    command.current_dir("/").stderr(std::process::Stdio::piped());
    if own == 0 {
        command.uid(uid).gid(uid);
    }
    let mut child = command.spawn().unwrap();
    let stderr = child.stderr.take().unwrap();
    let listens = tokio::task::spawn_blocking(move || {
        use std::io::BufRead as _;
        std::io::BufReader::new(stderr)
            .lines()
            .map_while(Result::ok)
            .any(|line| line.contains("\"listening\""))
    });
    let seen = support::within(LONG * 3, "it listens", listens).await.unwrap();
    let proc = format!("/proc/{}", child.id());
    let owner = |file: &str| std::fs::metadata(format!("{proc}/{file}")).unwrap().uid();
    let owners = ["environ", "mem", "maps"].map(owner);
    let limits = std::fs::read_to_string(format!("{proc}/limits")).unwrap();
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(seen);
    assert!(owners.iter().all(|owner| *owner != uid), "{owners:?}: its own user could read them");
    let core = limits.lines().find(|line| line.starts_with("Max core file size")).unwrap();
    assert_eq!(core.split_whitespace().skip(4).take(2).collect::<Vec<_>>(), ["0", "0"], "{core}");
}

#[tokio::test]
async fn secrets_that_came_by_variables_are_one_warning_with_their_names_and_a_files_are_none() {
    const SECRET: &str = "sk-canary-0123456789abcdef";
    let provider = Provider::start(openai).await;
    let lessor = Setup::openai(&provider).key(Key::new("a").secret(SECRET)).start().await;
    let line = |lessor: &Lessor| {
        let all = lessor.log_lines().into_iter();
        all.filter(|line| support::lessor::field(line, "message").contains("by variables"))
            .collect::<Vec<_>>()
    };
    let said = line(&lessor);
    assert_eq!(said.len(), 1, "{}", lessor.log());
    assert_eq!(support::lessor::field(&said[0], "variables"), "SECRET_OPENAI_A");
    assert!(!lessor.log().contains("canary"));
    let home = Arc::new(Home::default());
    std::fs::write(home.path().join("key"), SECRET).unwrap();
    let mut toml = Setup::openai(&provider).toml();
    toml.push_str("[[keys]]\nid = \"a\"\nprovider = \"openai\"\nsecret = { file = \"key\" }\n");
    let file = home.path().join("lessor.toml");
    std::fs::write(&file, toml).unwrap();
    let args = ["run".into(), "--config".into(), file.display().to_string()];
    let mut quiet = Lessor::spawn(home, &args, &[]);
    quiet.listening().await;
    assert!(line(&quiet).is_empty(), "{}", quiet.log());
}

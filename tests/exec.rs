//! `lessor exec` and `lessor env`: real children and shells that reach the provider with nothing set by hand,
//! hold no key, and end as if nothing stood between.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::pedantic, missing_docs, unreachable_pub)]

mod support;

use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;

use rustix::process::{Pid, Signal, kill_process, kill_process_group};
use serde_json::json;
use support::lessor::{Home, Ran, run};
use support::plays::{anthropic, openai};
use support::provider::Manners;
use support::sdk::{node_dir, python_path, root};
use support::{Key, Lessor, Play, Provider, Setup, eventually};

const CANARY: &str = "sk-canary-0123456789abcdef";

/// A provider, and a directory with the configuration of a sidecar for it that nobody has started.
async fn at_rest() -> (Provider, Home) {
    at_rest_with(CANARY).await
}

async fn at_rest_with(secret: &str) -> (Provider, Home) {
    let provider = Provider::builder().good(&[secret]).start(openai).await;
    let home = Home::default();
    let setup = Setup::openai(&provider).key(Key::new("a").secret(secret));
    // The sidecar of the file listens elsewhere; it is not there.
    let setup = setup.set("listen.proxy", &format!("\"127.0.0.1:{}\"", support::free_port()));
    std::fs::write(home.path().join("lessor.toml"), setup.toml()).unwrap();
    (provider, home)
}

/// `lessor exec` in this home, with the key where the configuration looks for it and where a shell has it.
fn exec(home: &Home, words: &[&str]) -> Command {
    let mut command = home.command();
    command.args(["exec", "--config", "lessor.toml", "--"]).args(words);
    for name in ["SECRET_OPENAI_A", "OPENAI_API_KEY", "OPENAI_API_KEY_2", "A_COPY"] {
        command.env(name, CANARY);
    }
    command
}

async fn sh(home: &Home, script: &str) -> Ran {
    run(exec(home, &["sh", "-c", script])).await
}

/// A child that runs on, with what it printed first.
struct Running {
    child: Child,
    first: String,
    rest: Option<std::io::BufReader<std::process::ChildStdout>>,
}

impl Running {
    fn start(mut command: Command) -> Self {
        use std::io::BufRead as _;
        use std::os::unix::process::CommandExt as _;
        // An open pipe keeps one that reads alive; between two programs of one process its environment is empty.
        command.process_group(0).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let mut rest = std::io::BufReader::new(child.stdout.take().unwrap());
        let mut first = String::new();
        rest.read_line(&mut first).unwrap();
        Self { child, first: first.trim().into(), rest: Some(rest) }
    }

    fn pid(&self) -> Pid {
        Pid::from_child(&self.child)
    }

    /// The sidecar of this child: the process that was told to accompany it.
    fn sidecar(&self) -> Option<u32> {
        let wanted = format!("companion\0--of\0{}\0", self.child.id());
        std::fs::read_dir("/proc").unwrap().find_map(|entry| {
            let pid = entry.ok()?.file_name().to_str()?.parse().ok()?;
            let line = std::fs::read(format!("/proc/{pid}/cmdline")).ok()?;
            String::from_utf8_lossy(&line).contains(&wanted).then_some(pid)
        })
    }

    /// Lets its `read` go on.
    fn go_on(&mut self) {
        use std::io::Write as _;
        self.child.stdin.take().unwrap().write_all(b"\n").unwrap();
    }

    /// All that it prints from here on, read beside the provider, which answers on this thread.
    async fn says(&mut self) -> String {
        use std::io::Read as _;
        let mut rest = self.rest.take().unwrap();
        let reading = tokio::task::spawn_blocking(move || {
            let mut text = String::new();
            rest.read_to_string(&mut text).unwrap();
            text
        });
        support::within(support::NEVER, "the end of what the child prints", reading).await.unwrap()
    }

    async fn ends(&mut self) -> std::process::ExitStatus {
        let child = &mut self.child;
        let ended = eventually("the child ends", async || child.try_wait().unwrap()).await;
        eventually("its sidecar ends", async || self.sidecar().is_none().then_some(())).await;
        ended
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[tokio::test]
async fn curl_reaches_the_provider_by_base_url_and_by_proxy_through_a_sidecar_of_its_own() {
    let (provider, home) = at_rest().await;
    let ran =
        sh(&home, "curl -sSf $OPENAI_BASE_URL/models && curl -sSf http://api.openai.com/v1/models").await;
    assert_eq!(ran.ok().matches("gpt-4o-mini").count(), 2, "{ran:?}");
    assert_eq!(provider.count(), 2);
    assert!(provider.seen().iter().all(|seen| seen.key() == CANARY));
    let left: Vec<PathBuf> = eventually("the socket is gone", async || {
        let all = std::fs::read_dir(home.path().join("run")).unwrap().map(|entry| entry.unwrap().path());
        let all: Vec<_> = all.collect();
        all.is_empty().then_some(all)
    })
    .await;
    assert!(left.is_empty());
}

#[tokio::test]
async fn the_openai_sdks_of_python_and_node_work_with_nothing_set_by_hand() {
    let (provider, home) = at_rest().await;
    let (python, script) = (python_path().display().to_string(), root().join("tests/sdks/openai_sdk.py"));
    let said = run(exec(&home, &[&python, &script.display().to_string()])).await;
    said.ok();
    for side in ["sync", "async"] {
        assert_eq!(said.json()[side]["streamed"], "Hello, world", "{said:?}");
    }
    let script = root().join("tests/sdks/openai_sdk.mjs").display().to_string();
    let mut node = exec(&home, &["node", &script]);
    node.env("NODE_SDKS", node_dir());
    let said = run(node).await;
    said.ok();
    assert_eq!(
        (&said.json()["whole"], &said.json()["streamed"]),
        (&json!("Hello, world"), &json!("Hello, world"))
    );
    assert!(provider.seen().iter().all(|seen| seen.key() == CANARY));
}

#[tokio::test]
async fn the_anthropic_sdk_works_through_a_sidecar_that_runs_already() {
    let provider = Provider::builder().manners(Manners::Anthropic).good(&[CANARY]).start(anthropic).await;
    let key = Key::new("a").of("anthropic").secret(CANARY);
    let lessor = Setup::new().provider("anthropic", &provider).key(key).start().await;
    let script = root().join("tests/sdks/anthropic_sdk.py").display().to_string();
    let said = lessor.cli(&["exec", &python_path().display().to_string(), &script]).await;
    said.ok();
    assert_eq!(said.json()["sync"]["streamed"], "Hello, world", "{said:?}");
    assert_eq!(provider.count(), 4);
}

#[tokio::test]
async fn javas_client_trusts_the_intercepted_host_and_what_the_system_trusts_with_nothing_set_in_code() {
    let (provider, home) = at_rest().await;
    // What the system trusts is this origin's CA; loopback goes around the proxy.
    let origin =
        Provider::builder().manners(Manners::Open).start(|_| Play::json(200, &json!("direct"))).await;
    let script = root().join("tests/sdks/Trust.java").display().to_string();
    let direct = format!("https://127.0.0.1:{}/x", origin.addr().port());
    let mut java = exec(&home, &["java", &script, "https://api.openai.com/v1/models", &direct]);
    java.env("SSL_CERT_FILE", origin.ca_file());
    let said = run(java).await;
    let lines: Vec<_> = said.ok().lines().collect();
    assert!(lines[0].starts_with("answered ") && lines[0].contains("gpt-4o-mini"), "{said:?}");
    assert_eq!(lines[1], format!("answered {direct} \"direct\""), "{said:?}");
    assert_eq!((provider.count(), origin.count()), (1, 1));
    assert_eq!(provider.request(1).await.key(), CANARY);
}

#[tokio::test]
async fn the_childs_environment_and_command_line_hold_no_key_and_its_limits_are_the_callers() {
    let (_provider, home) = at_rest().await;
    let child = Running::start(exec(&home, &["sh", "-c", "echo ready; read x"]));
    assert_eq!(child.first, "ready");
    for page in ["environ", "cmdline"] {
        let bytes = std::fs::read(format!("/proc/{}/{page}", child.child.id())).unwrap();
        let text = String::from_utf8_lossy(&bytes).replace('\0', "\n");
        assert!(!text.contains(CANARY), "{text}");
        assert!(page == "cmdline" || text.contains("OPENAI_API_KEY=lessor-placeholder"), "{text}");
        for gone in ["OPENAI_API_KEY_2=", "SECRET_OPENAI_A=", "A_COPY="] {
            assert!(!text.contains(gone), "{text}");
        }
    }
    let sidecar = child.sidecar().expect("a sidecar");
    let line = std::fs::read(format!("/proc/{sidecar}/cmdline")).unwrap();
    assert!(!String::from_utf8_lossy(&line).contains(CANARY));
    let limits = |pid: &str| {
        let text = std::fs::read_to_string(format!("/proc/{pid}/limits")).unwrap();
        let wanted = |line: &&str| line.starts_with("Max open files") || line.starts_with("Max core");
        text.lines().filter(wanted).map(str::to_owned).collect::<Vec<_>>()
    };
    assert_eq!(limits(&child.child.id().to_string()), limits("self"));
}

/// The processes whose environment or command line has this text, and those that could be looked at.
fn holders(text: &str) -> (Vec<u32>, Vec<u32>) {
    let mut all = (Vec::new(), Vec::new());
    for entry in std::fs::read_dir("/proc").unwrap() {
        let Ok(pid) = entry.unwrap().file_name().to_string_lossy().parse::<u32>() else { continue };
        let pages = ["environ", "cmdline"].map(|page| std::fs::read(format!("/proc/{pid}/{page}")));
        if pages.iter().all(Result::is_ok) {
            all.1.push(pid);
        }
        if pages.iter().flatten().any(|page| String::from_utf8_lossy(page).contains(text)) {
            all.0.push(pid);
        }
    }
    all
}

#[tokio::test]
async fn however_deep_the_command_forks_no_process_but_the_sidecar_holds_a_key() {
    let secret = format!("sk-of-this-test-{}", std::process::id());
    let (_provider, home) = at_rest_with(&secret).await;
    let below = "import subprocess; subprocess.run(['sh', '-c', 'echo ready \\$\\$; read x'])";
    let script = format!("{} -c \"{below}\"; exit $?", python_path().display());
    let mut command = exec(&home, &["sh", "-c", &script]);
    for name in ["SECRET_OPENAI_A", "OPENAI_API_KEY", "OPENAI_API_KEY_2", "A_COPY"] {
        command.env(name, &secret);
    }
    let child = Running::start(command);
    let deepest = child.first.strip_prefix("ready ").unwrap().parse().unwrap();
    let sidecar = child.sidecar().unwrap();
    let (holders, seen) = holders(&secret);
    assert!(holders.iter().all(|pid| *pid == sidecar), "{holders:?} beside {sidecar}");
    assert!(seen.contains(&deepest) && seen.contains(&child.child.id()) && deepest != child.child.id());
    let mut bare = Command::new("sh");
    bare.args(["-c", "echo ready; read x"]);
    let bare = Running::start(bare);
    let (open, as_without) = (open_files(child.child.id()), open_files(bare.child.id()));
    assert_eq!(open, as_without, "nothing of lessor's is open in the command");
}

/// The numbers of what a process has open.
fn open_files(pid: u32) -> Vec<std::ffi::OsString> {
    let open = std::fs::read_dir(format!("/proc/{pid}/fd")).unwrap().map(|entry| entry.unwrap().file_name());
    let mut open: Vec<_> = open.collect();
    open.sort();
    open
}

#[tokio::test]
async fn exit_codes_are_the_commands_and_a_missing_one_is_127_and_no_program_126() {
    let (_provider, home) = at_rest().await;
    assert_eq!(sh(&home, "exit 7").await.code, Some(7));
    assert_eq!(run(exec(&home, &["no-such-command"])).await.code, Some(127));
    let none = run(exec(&home, &["/etc/passwd"])).await;
    assert_eq!(none.code, Some(126), "{none:?}");
    let through = run(exec(&home, &["sh", "-c", "echo \"$1\"", "sh", "--json a 'b'"])).await;
    assert_eq!(through.ok(), "--json a 'b'\n", "arguments are the command's own");
}

#[tokio::test]
async fn signals_reach_the_command_which_may_outlive_ctrl_c_with_its_sidecar() {
    use std::io::BufRead as _;
    let (provider, home) = at_rest().await;
    let script = "trap 'curl -sSf $OPENAI_BASE_URL/models >/dev/null && echo asked' INT; \
                  trap 'echo told; exit 9' TERM; echo ready; while :; do sleep 0.05; done";
    let mut child = Running::start(exec(&home, &["sh", "-c", script]));
    // What a terminal does: the whole foreground group is told.
    kill_process_group(child.pid(), Signal::INT).unwrap();
    // Read on another thread: the provider answers on this one.
    let mut rest = child.rest.take().unwrap();
    let line = tokio::task::spawn_blocking(move || {
        let mut line = String::new();
        rest.read_line(&mut line).unwrap();
        (line, rest)
    });
    let (line, _rest) = support::within(support::NEVER, "what the trap prints", line).await.unwrap();
    assert_eq!((line.trim(), provider.count()), ("asked", 1), "the sidecar serves on");
    kill_process(child.pid(), Signal::TERM).unwrap();
    assert_eq!(child.ends().await.code(), Some(9));
    // Without a trap it is the signal that ends it, as a shell shows by 128 and its number.
    let mut child = Running::start(exec(&home, &["sh", "-c", "echo ready; exec sleep 60"]));
    kill_process(child.pid(), Signal::HUP).unwrap();
    use std::os::unix::process::ExitStatusExt as _;
    assert_eq!(child.ends().await.signal(), Some(1));
}

/// A shell that runs this command and says how it ended.
async fn as_a_shell_shows_it(command: Command) -> String {
    let mut shell = Command::new("sh");
    shell
        .args(["-c", "\"$0\" \"$@\"; echo \"ended with $?\""])
        .arg(command.get_program())
        .args(command.get_args());
    shell.env_clear().envs(command.get_envs().filter_map(|(name, value)| Some((name, value?))));
    shell.current_dir(command.get_current_dir().unwrap());
    run(shell).await.stdout
}

#[tokio::test]
async fn a_shell_shows_the_signal_that_ended_the_command() {
    let (_provider, home) = at_rest().await;
    for (signal, code) in [("HUP", 129), ("INT", 130), ("KILL", 137), ("TERM", 143)] {
        let said = as_a_shell_shows_it(exec(&home, &["sh", "-c", &format!("kill -{signal} $$")])).await;
        assert_eq!(said, format!("ended with {code}\n"), "{signal}");
    }
}

#[tokio::test]
async fn a_command_that_takes_no_notice_of_sigterm_runs_on_with_its_sidecar() {
    let (provider, home) = at_rest().await;
    let script = "trap '' TERM; echo ready; read x; curl -sSf $OPENAI_BASE_URL/models";
    let mut child = Running::start(exec(&home, &["sh", "-c", script]));
    kill_process(child.pid(), Signal::TERM).unwrap();
    child.go_on();
    let said = child.says().await;
    assert!(said.contains("gpt-4o-mini") && provider.count() == 1, "{said}");
    assert_eq!(child.ends().await.code(), Some(0));
}

#[tokio::test]
async fn when_its_sidecar_is_killed_the_command_sees_errors_and_is_told_why() {
    let (provider, home) = at_rest().await;
    let script = "echo ready; read x; curl -sS $OPENAI_BASE_URL/models; echo curl $?; \
                  curl -sS https://api.openai.com/v1/models; echo curl $?; $LESSOR status; echo status $?";
    let mut command = exec(&home, &["sh", "-c", &format!("exec 2>&1; {script}")]);
    let told = tempfile::NamedTempFile::new().unwrap();
    command.env("LESSOR", env!("CARGO_BIN_EXE_lessor")).stderr(told.reopen().unwrap());
    let mut child = Running::start(command);
    let sidecar = Pid::from_raw(child.sidecar().unwrap().cast_signed()).unwrap();
    kill_process(sidecar, Signal::KILL).unwrap();
    eventually("exec says that it is gone", async || {
        let told = std::fs::read_to_string(told.path()).unwrap();
        told.contains("the sidecar of this command has ended").then_some(())
    })
    .await;
    assert!(child.sidecar().is_none());
    child.go_on();
    let said = child.says().await;
    assert_eq!(said.matches("curl 7\n").count(), 2, "refused, by base URL and by proxy: {said}");
    assert!(said.contains("no sidecar answers") && said.ends_with("status 3\n"), "{said}");
    assert_eq!((child.ends().await.code(), provider.count()), (Some(0), 0));
}

#[tokio::test]
async fn what_a_crashed_sidecar_left_behind_is_in_nobodys_way() {
    let provider = Provider::builder().good(&[CANARY]).start(openai).await;
    let (port, home) = (support::free_port(), Arc::new(Home::default()));
    let setup = Setup::openai(&provider).key(Key::new("a").secret(CANARY));
    let setup = setup.set("listen.proxy", &format!("\"127.0.0.1:{port}\""));
    let mut lessor = setup.spawn_in(Arc::clone(&home));
    lessor.listening().await;
    let ask = "curl -sSf https://api.openai.com/v1/models && echo $HTTPS_PROXY";
    let through = sh(&home, ask).await;
    assert!(through.ok().ends_with(&format!("http://127.0.0.1:{port}\n")), "the one that runs: {through:?}");
    lessor.crash();
    assert!(lessor.admin_socket().exists() && lessor.admin_socket().with_extension("ca.pem").exists());
    let alone = sh(&home, ask).await;
    assert!(!alone.ok().ends_with(&format!("http://127.0.0.1:{port}\n")), "one of its own: {alone:?}");
    assert_eq!(provider.count(), 2);
    let mut named = exec(&home, &["true"]);
    named.env("LESSOR_ADMIN", socket(&lessor));
    let named = run(named).await;
    assert!(named.code == Some(3) && named.stderr.contains(&socket(&lessor)[5..]), "{named:?}");
}

#[tokio::test]
async fn a_kill_that_nothing_can_catch_leaves_no_command_and_no_sidecar() {
    let (_provider, home) = at_rest().await;
    let mut child = Running::start(exec(&home, &["sh", "-c", "echo ready; exec sleep 60"]));
    assert!(child.sidecar().is_some());
    kill_process(child.pid(), Signal::KILL).unwrap();
    assert_eq!(child.ends().await.code(), None);
}

#[tokio::test]
async fn the_command_has_no_child_that_it_did_not_start() {
    let (_provider, home) = at_rest().await;
    let python = "import os\ntry:\n  os.wait()\nexcept ChildProcessError:\n  print('none')";
    let ran = run(exec(&home, &[&python_path().display().to_string(), "-c", python])).await;
    assert_eq!(ran.ok(), "none\n", "{ran:?}");
}

#[tokio::test]
async fn what_is_set_is_kept_and_said_and_no_proxy_is_merged() {
    let (_provider, home) = at_rest().await;
    let script = "echo $OPENAI_BASE_URL $HTTP_PROXY,$http_proxy, $NO_PROXY $no_proxy";
    let mut command = exec(&home, &["sh", "-c", script]);
    command
        .env("OPENAI_BASE_URL", "http://gateway.test/v1")
        .env("HTTP_PROXY", "http://u:hidden@proxy.test:1");
    command.env("NO_PROXY", ".corp.test");
    let ran = run(command).await;
    let merged = ".corp.test,localhost,.localhost,127.0.0.1,::1";
    let expected = format!("http://gateway.test/v1 http://u:hidden@proxy.test:1,, {merged} {merged}\n");
    assert_eq!(ran.ok(), expected);
    for part in
        ["OPENAI_BASE_URL is kept as http://gateway.test/v1", "HTTP_PROXY is kept as http://proxy.test:1"]
    {
        assert!(ran.stderr.contains(part), "{ran:?}");
    }
    assert!(!ran.stderr.contains("hidden") && !ran.stderr.contains(CANARY), "{ran:?}");
}

#[tokio::test]
async fn what_env_prints_a_shell_evaluates_whatever_the_values_hold() {
    let provider = Provider::builder().good(&[CANARY]).start(openai).await;
    let setup =
        Setup::openai(&provider).key(Key::new("a").secret(CANARY)).env("TOKEN", "it's a \"$HOME\" `x`");
    let lessor = setup.set("apps.checkout.token", "{ env = \"TOKEN\" }").start().await;
    let home = lessor.home();
    let script = "out=$(lessor env --app-token-env TOKEN 2>/dev/null) && eval \"$out\" && \
                  printf '%s\\n' \"$OPENAI_API_KEY\" \"${OPENAI_API_KEY_2-gone}\" \"${TOKEN-gone}\" && \
                  curl -sSf http://api.openai.com/v1/models";
    let mut command = Command::new("sh");
    let bin = PathBuf::from(env!("CARGO_BIN_EXE_lessor"));
    let path = format!("{}:{}", bin.parent().unwrap().display(), std::env::var("PATH").unwrap());
    command.args(["-c", script]).env_clear().env("PATH", path).env("HOME", home.path());
    command.env("XDG_RUNTIME_DIR", home.path().join("run")).env("LESSOR_ADMIN", socket(&lessor));
    command.env("TOKEN", "it's a \"$HOME\" `x`").env("OPENAI_API_KEY_2", CANARY);
    let ran = run(command).await;
    let said: Vec<_> = ran.ok().lines().take(3).collect();
    assert_eq!(said, ["it's a \"$HOME\" `x`", "gone", "gone"], "{ran:?}");
    assert!(ran.stdout.contains("gpt-4o-mini"), "the token went as the proxy's password: {ran:?}");
    let without = lessor.cli(&["env"]).await;
    assert!(without.code == Some(2) && without.stderr.contains("--app NAME (checkout)"), "{without:?}");
    let file = home.path().join("lessor.toml").display().to_string();
    let (socket, token) = (socket(&lessor), ("TOKEN", "it's a \"$HOME\" `x`"));
    let variables = [("LESSOR_ADMIN", socket.as_str()), token];
    let fish = ["env", "--app", "checkout", "--config", &file, "--shell", "fish"];
    let fish = home.run_with(&fish, &variables).await;
    assert!(fish.ok().contains(r#"set -gx OPENAI_API_KEY 'it\'s a "$HOME" `x`'"#), "{fish:?}");
    assert!(fish.stdout.contains("set -e TOKEN\n"), "{fish:?}");
}

/// Exact addresses and leading dots are what all clients read alike; what was set is the caller's.
#[tokio::test]
async fn no_proxy_is_printed_in_both_cases_with_what_was_set_in_either() {
    const LOCAL: &str = "localhost,.localhost,127.0.0.1,::1";
    let provider = Provider::builder().good(&[CANARY]).start(openai).await;
    let lessor = Setup::openai(&provider).key(Key::new("a").secret(CANARY)).start().await;
    let (home, socket) = (lessor.home(), socket(&lessor));
    for (upper, lower, expected, warns) in [
        (None, None, LOCAL.to_owned(), false),
        (Some(""), Some(" "), LOCAL.to_owned(), false),
        (Some(".corp.test"), None, format!(".corp.test,{LOCAL}"), false),
        (None, Some("corp.test,10.1.2.3"), format!("corp.test,10.1.2.3,{LOCAL}"), false),
        (Some("b.test, a.test"), Some("a.test c.test"), format!("a.test,c.test,b.test,{LOCAL}"), false),
        (Some("127.0.0.1,x.test"), None, "127.0.0.1,x.test,localhost,.localhost,::1".into(), false),
        (Some("10.0.0.0/8,*.y.test"), None, format!("10.0.0.0/8,*.y.test,{LOCAL}"), false),
        (Some("x.test, .OpenAI.com"), None, format!("x.test,.OpenAI.com,{LOCAL}"), true),
        (Some("api.openai.com"), None, format!("api.openai.com,{LOCAL}"), true),
        (Some("*"), None, "*".into(), true),
        (None, Some(" * "), "*".into(), true),
    ] {
        let set = [("NO_PROXY", upper), ("no_proxy", lower), ("LESSOR_ADMIN", Some(&*socket))];
        let set: Vec<_> = set.into_iter().filter_map(|(name, value)| Some((name, value?))).collect();
        let ran = home.run_with(&["env"], &set).await;
        for name in ["NO_PROXY", "no_proxy"] {
            let line = format!("export {name}='{expected}'\n");
            assert!(ran.ok().contains(&line), "{line} in {ran:#?}");
        }
        assert_eq!(ran.stderr.contains("NO_PROXY names api.openai.com"), warns, "{set:?}: {ran:#?}");
    }
}

fn socket(lessor: &Lessor) -> String {
    format!("unix:{}", lessor.admin_socket().display())
}

#[tokio::test]
async fn without_a_sidecar_env_says_so_and_without_a_key_exec_does() {
    let home = Arc::new(Home::default());
    let env = home.run(&["env"]).await;
    assert!(env.code == Some(3) && env.stderr.contains("lessor run"), "{env:?}");
    // What evaluates it must fail too, or what comes after `&&` would run bare.
    assert_eq!(env.stdout, "false\n");
    let exec = home.run(&["exec", "--", "touch", "ran"]).await;
    assert!(exec.code == Some(2) && exec.stderr.contains("no keys found"), "{exec:?}");
    let named = home
        .run_with(&["exec", "--admin", "unix:nowhere.sock", "touch", "ran"], &[("OPENAI_API_KEY", CANARY)]);
    assert_eq!(named.await.code, Some(3), "who names a sidecar means it");
    assert!(!home.path().join("ran").exists());
}

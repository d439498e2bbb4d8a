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
use support::{Key, Lessor, Provider, Setup, eventually};

const CANARY: &str = "sk-canary-0123456789abcdef";

/// A provider, and a directory with the configuration of a sidecar for it that nobody has started.
async fn at_rest() -> (Provider, Home) {
    let provider = Provider::builder().good(&[CANARY]).start(openai).await;
    let home = Home::default();
    let setup = Setup::openai(&provider).key(Key::new("a").secret(CANARY));
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

fn socket(lessor: &Lessor) -> String {
    format!("unix:{}", lessor.admin_socket().display())
}

#[tokio::test]
async fn without_a_sidecar_env_says_so_and_without_a_key_exec_does() {
    let home = Arc::new(Home::default());
    let env = home.run(&["env"]).await;
    assert!(env.code == Some(3) && env.stderr.contains("lessor run") && env.stdout.is_empty(), "{env:?}");
    let exec = home.run(&["exec", "--", "touch", "ran"]).await;
    assert!(exec.code == Some(2) && exec.stderr.contains("no keys found"), "{exec:?}");
    let named = home
        .run_with(&["exec", "--admin", "unix:nowhere.sock", "touch", "ran"], &[("OPENAI_API_KEY", CANARY)]);
    assert_eq!(named.await.code, Some(3), "who names a sidecar means it");
    assert!(!home.path().join("ran").exists());
}

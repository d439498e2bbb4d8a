//! Every command of the README runs, in its order, as it stands there.
//!
//! They run on a private machine in which `api.openai.com` is the double and lessor's usual ports are
//! free. A command that this test does not know fails it, and so does one that the README has no more.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::pedantic, missing_docs, unreachable_pub)]

mod support;

use std::process::Command;
use std::sync::Arc;

use support::lessor::{Home, Lessor, run};
use support::plays::{anthropic, openai};
use support::provider::Manners;
use support::sdk::{node_dir, python_path, root};
use support::{Play, Provider, eventually};

/// How a command of the README is run.
enum Runner {
    /// It serves until the test ends; the commands after it ask it.
    Serves,
    /// It ends with 0 and prints this.
    Prints(&'static str),
    /// It is what runs this test, and the last line of that script.
    RunsThis(&'static str),
}

/// All commands, in the order in which they stand there.
fn known() -> Vec<(&'static str, Runner)> {
    use Runner::{Prints, RunsThis, Serves};
    let base_url = "OPENAI_BASE_URL=http://127.0.0.1:8321/openai/v1 OPENAI_API_KEY=placeholder";
    let with_base_url = |rest: &str| -> &'static str { format!("{base_url} {rest}").leak() };
    vec![
        ("OPENAI_API_KEY=sk-… cargo run --release -- run", Serves),
        ("curl http://127.0.0.1:8321/openai/v1/models", Prints("gpt-4o-mini")),
        ("./.ci/setup && cargo test", RunsThis(".ci/run")),
        ("curl http://127.0.0.1:8321/openai/v1/models", Prints("gpt-4o-mini")),
        ("curl -x http://127.0.0.1:8321 http://api.openai.com/v1/models", Prints("gpt-4o-mini")),
        (
            "curl -x http://127.0.0.1:8321 --cacert \"$(lessor ca path)\" https://api.openai.com/v1/models",
            Prints("gpt-4o-mini"),
        ),
        (with_base_url("python examples/python/openai_chat.py"), Prints("Hello, world")),
        (
            "ANTHROPIC_BASE_URL=http://127.0.0.1:8321/anthropic ANTHROPIC_API_KEY=placeholder python examples/python/anthropic_chat.py",
            Prints("Hello, world"),
        ),
        (with_base_url("node examples/node/openai_chat.mjs"), Prints("Hello, world")),
        ("bash examples/curl.sh", Prints("data: [DONE]")),
        ("lessor exec -- python examples/python/openai_chat.py", Prints("Hello, world")),
        ("eval \"$(lessor env)\" && node examples/node/openai_chat.mjs", Prints("Hello, world")),
        ("lessor check --config config/lessor.toml", Prints("")),
        (
            "curl -si http://127.0.0.1:8321/openai/v1/nothing | lessor check --explain openai 404 -",
            Prints("class   caller"),
        ),
        ("lessor status", Prints("openai-1")),
        ("lessor status --explain", Prints("ranking by weighted")),
        ("lessor events", Prints("")),
        ("lessor keys list --json", Prints("\"openai-1\"")),
        ("lessor keys disable openai/openai-1", Prints("")),
        ("lessor keys drain openai/openai-1", Prints("openai/openai-1 is drained")),
        ("lessor keys enable openai/openai-1", Prints("")),
        ("lessor keys check openai/openai-1", Prints("")),
        ("lessor ready", Prints("")),
        ("curl http://127.0.0.1:8322/metrics", Prints("lessor_store_up 1")),
        ("lessor version", Prints(env!("CARGO_PKG_VERSION"))),
        ("lessor doctor", Prints(" 0 failed")),
    ]
}

/// The commands of the README: the `$ ` lines of its `console` blocks.
fn commands() -> Vec<String> {
    let text = std::fs::read_to_string(root().join("README.md")).unwrap();
    let mut commands = Vec::new();
    let mut inside = false;
    for line in text.lines() {
        match line.strip_prefix("```") {
            Some(language) => {
                assert!(
                    ["", "console", "toml"].contains(&language),
                    "a block of {language:?} is not looked at"
                );
                inside = language == "console";
            }
            None if inside => {
                let command = line.strip_prefix("$ ").unwrap_or_else(|| panic!("{line:?} is no command"));
                commands.push(command.to_owned());
            }
            None => {}
        }
    }
    commands
}

#[test]
fn every_command_of_the_readme_is_known_here_and_the_other_way_round() {
    let known: Vec<_> = known().into_iter().map(|(command, _)| command.to_owned()).collect();
    assert_eq!(commands(), known);
}

/// A copy of the repository's examples beside the SDKs, as in a project that uses them, and `lessor`,
/// `python` and `node` on the search path.
fn workplace() -> (tempfile::TempDir, String) {
    use std::os::unix::fs::symlink;
    let dir = tempfile::tempdir().unwrap();
    let bin = dir.path().join("bin");
    std::fs::create_dir(&bin).unwrap();
    symlink(env!("CARGO_BIN_EXE_lessor"), bin.join("lessor")).unwrap();
    symlink(node_dir().join("node_modules"), dir.path().join("node_modules")).unwrap();
    symlink(root().join("config"), dir.path().join("config")).unwrap();
    for folder in ["examples", "examples/python", "examples/node"] {
        std::fs::create_dir(dir.path().join(folder)).unwrap();
        for entry in std::fs::read_dir(root().join(folder)).unwrap() {
            let from = entry.unwrap().path();
            if from.is_file() {
                std::fs::copy(&from, dir.path().join(folder).join(from.file_name().unwrap())).unwrap();
            }
        }
    }
    let python = python_path();
    let path = format!(
        "{}:{}:{}",
        bin.display(),
        python.parent().unwrap().display(),
        std::env::var("PATH").unwrap()
    );
    (dir, path)
}

#[tokio::test]
async fn the_commands_of_the_readme_do_what_it_says() {
    if !support::sandbox::inside("the_commands_of_the_readme_do_what_it_says").await {
        return;
    }
    // Both providers answer on the one port that their names lead to.
    let provider = Provider::builder()
        .port(443)
        .manners(Manners::Open)
        .start(|seen| {
            if seen.method == "HEAD" && seen.credentials == 0 {
                return Play::whole(404, &[], ""); // the doctor asks for the time
            }
            let (expected, place) = if seen.header("host") == "api.anthropic.com" {
                ("sk-ant-real".to_owned(), seen.header("x-api-key").to_owned())
            } else {
                ("Bearer sk-real".to_owned(), seen.header("authorization").to_owned())
            };
            assert_eq!((seen.credentials, place), (1, expected), "{}", seen.raw_head);
            if seen.path() == "/v1/messages" { anthropic(seen) } else { openai(seen) }
        })
        .await;
    let ca_file = provider.ca_file().display().to_string();
    let home = Arc::new(Home::default());
    let (workplace, path) = workplace();
    let secrets = [("CHECKOUT_TOKEN", "token-of-checkout"), ("OPENAI_API_KEY", "sk-real")];
    let mut serving = None;
    for (command, runner) in known() {
        match runner {
            Runner::Serves => {
                // The build has its own step; here the very binary runs that cargo would have built.
                let (variable, rest) = command.split_once(' ').unwrap();
                let (name, value) = variable.split_once('=').unwrap();
                let args = rest.strip_prefix("cargo run --release -- ").expect("a run of lessor");
                let env = [
                    (name.to_owned(), value.replace("sk-…", "sk-real")),
                    ("ANTHROPIC_API_KEY".to_owned(), "sk-ant-real".to_owned()),
                    ("SSL_CERT_FILE".to_owned(), ca_file.clone()), // what the double's name is signed with
                ];
                let args: Vec<_> = args.split(' ').map(str::to_owned).collect();
                let mut lessor = Lessor::spawn(Arc::clone(&home), &args, &env);
                lessor.listening().await;
                assert_eq!(lessor.authority(), "127.0.0.1:8321");
                assert_eq!(lessor.admin_door().host(), "127.0.0.1:8322");
                serving = Some(lessor);
            }
            Runner::Prints(expected) => {
                let mut bash = Command::new("bash");
                bash.arg("-c").arg(command).current_dir(workplace.path()).env_clear().env("PATH", &path);
                bash.env("HOME", home.path()).env("XDG_RUNTIME_DIR", home.path().join("run"));
                if command.contains("--config") {
                    bash.envs(secrets); // the secrets that the reference names
                }
                let ran = run(bash).await;
                assert!(ran.ok().contains(expected), "`{command}` said {ran:#?}");
            }
            Runner::RunsThis(script) => {
                let text = std::fs::read_to_string(root().join(script)).unwrap();
                assert_eq!(text.trim_end().lines().last().unwrap(), command);
            }
        }
    }
    let lessor = serving.expect("one of the commands serves");
    let keys = lessor.admin("/v1/keys").await.json();
    let mut ids: Vec<_> =
        keys["keys"].as_array().unwrap().iter().map(|key| key["id"].as_str().unwrap()).collect();
    ids.sort_unstable();
    assert_eq!(ids, ["anthropic-1", "openai-1"], "the keys whose variables were set, and no more");
    assert_eq!(keys["keys"][0]["max_concurrent_uses"], 8);
    eventually("all is over", async || (provider.open() == 0).then_some(())).await;
}

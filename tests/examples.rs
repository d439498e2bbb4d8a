//! Every file under examples/ runs as a user would run it.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::pedantic, missing_docs, unreachable_pub)]

mod support;

use std::process::Command;

use support::lessor::{Ran, run};
use support::plays::{anthropic, openai};
use support::provider::Manners;
use support::sdk::{node, node_dir, python, python_path, root};
use support::{Key, Provider, Setup};

const CURL: &str = "examples/curl.sh";
const COMPOSE: &str = "examples/docker-compose.yml";
const NODE: &str = "examples/node/openai_chat.mjs";
const ANTHROPIC: &str = "examples/python/anthropic_chat.py";
const OPENAI: &str = "examples/python/openai_chat.py";

/// Examples that a test here runs; those for Kubernetes are held to what they say in `kubernetes_manifests.rs`.
const RUN: [&str; 10] = [
    CURL,
    COMPOSE,
    "examples/kubernetes/app.yaml",
    "examples/kubernetes/cronjob.yaml",
    "examples/kubernetes/deployment.yaml",
    "examples/kubernetes/job.yaml",
    "examples/kubernetes/secret.yaml",
    NODE,
    ANTHROPIC,
    OPENAI,
];

#[test]
fn no_example_is_forgotten_and_each_says_first_what_it_is() {
    let mut found = Vec::new();
    let mut folders = vec![root().join("examples")];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
                continue;
            }
            let text = std::fs::read_to_string(&path).unwrap();
            let first = text.lines().find(|line| !line.starts_with("#!")).unwrap();
            assert!(first.starts_with("# ") || first.starts_with("// "), "{path:?} begins with {first:?}");
            found.push(path.strip_prefix(root()).unwrap().display().to_string());
        }
    }
    found.sort();
    assert_eq!(found, RUN);
}

/// Runs an example against lessor and a double of OpenAI.
async fn with_openai(mut command: Command) -> Ran {
    let provider = Provider::builder().good(&["sk-real"]).start(openai).await;
    let lessor = Setup::openai(&provider).key(Key::new("a").secret("sk-real")).start().await;
    command.env("LESSOR", lessor.url());
    command
        .env("OPENAI_BASE_URL", format!("{}/openai/v1", lessor.url()))
        .env("OPENAI_API_KEY", "placeholder");
    let ran = run(command).await;
    ran.ok();
    assert!(provider.count() > 0);
    ran
}

#[tokio::test]
async fn curl_sh_prints_models_and_a_stream() {
    let mut command = Command::new("bash");
    command.arg(root().join(CURL));
    let ran = with_openai(command).await;
    assert!(ran.stdout.contains("gpt-4o-mini") && ran.stdout.contains("data: [DONE]"), "{}", ran.stdout);
    assert_eq!(
        ran.stdout.matches("\"object\":\"list\"").count(),
        2,
        "by base URL and by proxy: {}",
        ran.stdout
    );
}

#[tokio::test]
async fn openai_chat_py_prints_the_answer() {
    let ran = with_openai(python(OPENAI)).await;
    assert_eq!(ran.stdout, "Hello, world\n");
}

#[tokio::test]
async fn anthropic_chat_py_prints_the_answer() {
    let provider =
        Provider::builder().manners(Manners::Anthropic).good(&["sk-ant-real"]).start(anthropic).await;
    let key = Key::new("a").of("anthropic").secret("sk-ant-real");
    let lessor = Setup::new().provider("anthropic", &provider).key(key).start().await;
    let mut command = python(ANTHROPIC);
    command
        .env("ANTHROPIC_BASE_URL", format!("{}/anthropic", lessor.url()))
        .env("ANTHROPIC_API_KEY", "placeholder");
    assert_eq!(run(command).await.ok(), "Hello, world\n");
}

#[tokio::test]
async fn openai_chat_mjs_prints_the_answer() {
    // Its import by name finds the SDK in a folder above it, as in a user's project.
    let dir = tempfile::tempdir().unwrap();
    std::os::unix::fs::symlink(node_dir().join("node_modules"), dir.path().join("node_modules")).unwrap();
    let script = dir.path().join("openai_chat.mjs");
    std::fs::copy(root().join(NODE), &script).unwrap();
    let ran = with_openai(node(script.to_str().unwrap())).await;
    assert_eq!(ran.stdout, "Hello, world\n");
}

#[tokio::test]
async fn in_the_compose_file_only_the_sidecar_holds_the_key_and_the_app_shares_its_network() {
    let check = r#"
import json, sys, yaml
print(json.dumps(yaml.safe_load(open(sys.argv[1]))))
"#;
    let mut command = Command::new(python_path());
    command.args(["-c", check]).arg(root().join(COMPOSE));
    let compose = run(command).await.json();
    let (lessor, app) = (&compose["services"]["lessor"], &compose["services"]["app"]);
    assert_eq!(lessor["build"], "..");
    assert!(root().join("Dockerfile").exists());
    assert!(lessor["environment"]["OPENAI_API_KEY"].as_str().unwrap().starts_with("${OPENAI_API_KEY"));
    assert_eq!(app["network_mode"], "service:lessor");
    assert_eq!(app["environment"]["OPENAI_API_KEY"], "placeholder");
    assert_eq!(app["environment"]["OPENAI_BASE_URL"], "http://127.0.0.1:8321/openai/v1");
    assert_eq!(app["depends_on"]["lessor"]["condition"], "service_healthy");
    let command = app["command"].as_str().unwrap();
    assert!(command.contains("/app/openai_chat.py") && app["volumes"][0] == "./python:/app:ro", "{app}");
}

//! helm, kubectl and what judges their output, as `.ci/setup` laid them out under `target/sdk/kubernetes`.

#![allow(dead_code)] // each test crate uses its part

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Output, Stdio};
use std::time::Duration;

use serde_json::Value;
use tempfile::NamedTempFile;
use tokio::process::Command;

/// The oldest Kubernetes that is supported, and the newest there are schemas for.
pub const OLDEST_AND_NEWEST: &str = "1.29,1.37";
/// Those that know `MutatingAdmissionPolicy` as v1.
pub const WITH_POLICIES: &str = "1.36,1.37";

/// The root of the repository.
pub fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

pub fn chart() -> PathBuf {
    root().join("deploy/helm/lessor")
}

/// A tool that is there, or a failure that says how it gets there.
pub fn tool(path: &str) -> PathBuf {
    let tool = root().join("target/sdk").join(path);
    assert!(tool.exists(), "{} is missing; ./.ci/setup makes it", tool.display());
    tool
}

/// Runs a command to its end, in bounded time.
pub async fn run(mut command: Command) -> Output {
    let home = tempfile::tempdir().unwrap(); // helm and kubectl keep caches
    command.kill_on_drop(true).stdin(Stdio::null()).current_dir(root());
    command.env_clear().env("PATH", std::env::var_os("PATH").unwrap_or_default()).env("HOME", home.path());
    command
        .env("HELM", tool("kubernetes/bin/helm"))
        .env("KUBERNETES_TOOLS", root().join("target/sdk/kubernetes"));
    command.env("PYTHONDONTWRITEBYTECODE", "1");
    let done = tokio::time::timeout(Duration::from_secs(60), command.output()).await;
    done.unwrap_or_else(|_| panic!("not within a minute: {command:?}")).unwrap()
}

/// What it printed; a failure shows what it said.
pub async fn said(command: Command) -> String {
    let what = format!("{command:?}");
    let done = run(command).await;
    assert!(done.status.success(), "{what}\n{}", String::from_utf8_lossy(&done.stderr));
    String::from_utf8(done.stdout).unwrap()
}

fn helm<S: AsRef<std::ffi::OsStr>>(verb: &[&str], args: &[S]) -> Command {
    let mut command = Command::new(tool("kubernetes/bin/helm"));
    command.args(verb).args(args);
    command
}

/// `helm lint`.
pub fn lint(args: &[&str]) -> Command {
    let chart = chart();
    helm(&["lint", "--strict", chart.to_str().unwrap()], args)
}

/// `helm template` of a release `lessor` in the namespace `lessor`.
pub fn template<S: AsRef<std::ffi::OsStr>>(args: &[S]) -> Command {
    let chart = chart();
    helm(&["template", "lessor", chart.to_str().unwrap(), "--namespace", "lessor"], args)
}

/// `kubectl kustomize` of a folder of the repository.
pub fn kustomize(folder: &str) -> Command {
    let mut command = Command::new(tool("kubernetes/bin/kubectl"));
    command.arg("kustomize").arg(root().join(folder));
    command
}

/// The objects in these files, each valid in strict mode for these versions.
pub async fn objects_in(versions: &str, files: &[PathBuf]) -> Vec<Value> {
    let mut command = Command::new(tool("kubernetes/bin/python"));
    command.arg(root().join("tests/kubernetes/manifests.py")).arg(versions).args(files);
    serde_json::from_str(&said(command).await).unwrap()
}

/// The objects in this text, each valid in strict mode for these versions.
pub async fn objects(versions: &str, text: &str) -> Vec<Value> {
    let mut file = NamedTempFile::new().unwrap();
    file.write_all(text.as_bytes()).unwrap();
    objects_in(versions, &[file.path().into()]).await
}

/// The objects of a release with these settings.
pub async fn release<S: AsRef<std::ffi::OsStr>>(versions: &str, args: &[S]) -> Vec<Value> {
    objects(versions, &said(template(args)).await).await
}

/// The one object of this kind.
pub fn of_kind<'a>(objects: &'a [Value], kind: &str) -> &'a Value {
    let found = all_of_kind(objects, kind);
    assert_eq!(found.len(), 1, "{kind}");
    found[0]
}

pub fn all_of_kind<'a>(objects: &'a [Value], kind: &str) -> Vec<&'a Value> {
    objects.iter().filter(|object| object["kind"] == kind).collect()
}

/// A YAML file that is no manifest, such as a chart's values.
pub async fn yaml(file: &Path) -> Value {
    let mut command = Command::new(tool("kubernetes/bin/python"));
    command.args(["-c", "import json, sys, yaml; json.dump(yaml.safe_load(open(sys.argv[1])), sys.stdout)"]);
    command.arg(file);
    serde_json::from_str(&said(command).await).unwrap()
}

/// Whether a label selector takes these labels.
pub fn selects(selector: &Value, labels: &[(&str, &str)]) -> bool {
    selector["matchExpressions"].as_array().into_iter().flatten().all(|rule| {
        let value = labels.iter().find(|(key, _)| rule["key"] == *key).map(|(_, value)| *value);
        let is_in =
            || rule["values"].as_array().unwrap().iter().any(|one| Some(one.as_str().unwrap()) == value);
        match rule["operator"].as_str().unwrap() {
            "In" => is_in(),
            "NotIn" => !is_in(),
            "Exists" => value.is_some(),
            other => panic!("{other}"),
        }
    })
}

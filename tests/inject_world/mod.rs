//! Cases of `tests/inject_cases`, and what is asked of every pod that came out.

use std::collections::BTreeMap;
use std::sync::Mutex;

use clap::Parser;
use lessor::control::kubernetes::{Answer, Defaults, Inject, Request, answer, patched};
use serde::Deserialize;
use serde_json::{Map, Value, json};

pub mod chance;
pub mod restricted;

/// One file.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Case {
    #[serde(skip)]
    pub name: String,
    /// What it is about.
    pub what: String,
    /// The injector's command line.
    #[serde(default)]
    pub flags: Vec<String>,
    /// Fields of the request beside the object.
    pub request: Map<String, Value>,
    /// The pod.
    pub object: Value,
    pub expect: Expect,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Expect {
    pub verdict: String,
    /// A part of each warning, in their order.
    #[serde(default)]
    pub warnings: Vec<String>,
    /// Parts of the refusal.
    #[serde(default)]
    pub refusal: Vec<String>,
    /// What stands at a JSON pointer of the pod that came out; null: nothing.
    #[serde(default)]
    pub at: Map<String, Value>,
    /// By container, the values of variables; null: not there.
    #[serde(default)]
    pub env: Map<String, Value>,
    /// By container, how often a variable is there.
    #[serde(default)]
    pub count: Map<String, Value>,
    /// The pod fits PodSecurity's `restricted`.
    #[serde(default)]
    pub restricted: bool,
}

pub fn cases() -> Vec<Case> {
    let dir = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/inject_cases");
    let mut cases: Vec<_> =
        std::fs::read_dir(dir).unwrap().map(|entry| read(&entry.unwrap().path())).collect();
    cases.sort_by(|a, b| a.name.cmp(&b.name));
    cases
}

fn read(path: &std::path::Path) -> Case {
    let text = std::fs::read_to_string(path).unwrap();
    let mut case: Case =
        serde_json::from_str(&text).unwrap_or_else(|cause| panic!("{}: {cause}", path.display()));
    case.name = path.file_stem().unwrap().to_string_lossy().into_owned();
    case
}

#[derive(Parser)]
struct Line {
    #[command(flatten)]
    inject: Inject,
}

/// The injector's settings by its command line, which is read once.
pub fn defaults(flags: &[String]) -> Defaults {
    static READ: Mutex<BTreeMap<Vec<String>, Defaults>> = Mutex::new(BTreeMap::new());
    let mut read = READ.lock().unwrap();
    let parse = || {
        let words = std::iter::once("inject").chain(flags.iter().map(String::as_str));
        Line::try_parse_from(words).unwrap().inject.defaults(None).unwrap()
    };
    read.entry(flags.to_vec()).or_insert_with(parse).clone()
}

impl Case {
    /// The AdmissionReview, with this pod in it.
    pub fn review_of(&self, pod: &Value) -> Value {
        let mut request = json!({
            "uid": self.name,
            "kind": { "group": "", "version": "v1", "kind": "Pod" },
            "resource": { "group": "", "version": "v1", "resource": "pods" },
            "operation": "CREATE",
            "userInfo": { "username": "system:serviceaccount:kube-system:replicaset-controller" },
            "object": pod,
            "oldObject": null,
            "dryRun": false,
            "options": { "kind": "CreateOptions", "apiVersion": "meta.k8s.io/v1" },
        });
        request.as_object_mut().unwrap().extend(self.request.clone());
        json!({ "apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": request })
    }

    pub fn answer_to(&self, pod: &Value) -> Answer {
        let request = Request::read(self.review_of(pod).to_string().as_bytes()).unwrap();
        answer(&defaults(&self.flags), &request)
    }
}

/// The pod that came of it.
pub fn outcome(pod: &Value, answer: &Answer) -> Value {
    patched(pod, answer).unwrap()
}

pub fn containers(pod: &Value) -> Vec<Value> {
    let list = |at: &str| pod.pointer(at).and_then(Value::as_array).cloned().unwrap_or_default();
    [list("/spec/initContainers"), list("/spec/containers")].concat()
}

pub fn container(pod: &Value, name: &str) -> Value {
    let found = containers(pod).into_iter().find(|container| container["name"] == name);
    found.unwrap_or_else(|| panic!("no container {name} in {pod:#}"))
}

/// The values of a variable, of all its entries.
pub fn values(container: &Value, name: &str) -> Vec<Value> {
    let env = container["env"].as_array().cloned().unwrap_or_default();
    env.into_iter().filter(|entry| entry["name"] == name).map(|entry| entry["value"].clone()).collect()
}

/// Names of volumes that a container mounts.
pub fn mounts(container: &Value) -> Vec<String> {
    let mounts = container["volumeMounts"].as_array().cloned().unwrap_or_default();
    mounts.iter().map(|mount| mount["name"].as_str().unwrap_or_default().to_owned()).collect()
}

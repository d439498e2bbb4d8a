//! Pods in, pods out: what `lessor inject` makes of them, by a table and by chance.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::pedantic, missing_docs, unreachable_pub)]

mod inject_world;

use std::io::Write as _;
use std::process::{Command, Stdio};

use base64::Engine as _;
use clap::Parser as _;
use inject_world::restricted::violations;
use inject_world::{Case, cases, chance, container, containers, defaults, mounts, outcome, values};
use lessor::control::cli::{self, Cli};
use lessor::control::kubernetes::{Answer, Request, answer};
use proptest::prelude::*;
use serde_json::{Value, json};

fn assert_case(case: &Case, answer: &Answer, pod: &Value) {
    let (name, expect) = (&case.name, &case.expect);
    assert_eq!(answer.verdict.as_str(), expect.verdict, "{name}: {answer:?}");
    assert_eq!(answer.warnings.len(), expect.warnings.len(), "{name}: {:?}", answer.warnings);
    for (said, part) in answer.warnings.iter().zip(&expect.warnings) {
        assert!(said.contains(part), "{name}: {part}: {said}");
    }
    let refusal = answer.refusal.as_deref().unwrap_or_default();
    assert!(expect.refusal.iter().all(|part| refusal.contains(part)), "{name}: {refusal}");
    assert!(!expect.refusal.is_empty() || refusal.is_empty(), "{name}: {refusal}");
    for (at, value) in &expect.at {
        assert_eq!(pod.pointer(at).unwrap_or(&Value::Null), value, "{name}: {at} in {pod:#}");
    }
    for (of, names) in &expect.env {
        for (variable, value) in names.as_object().unwrap() {
            let wanted = if value.is_null() { vec![] } else { vec![value.clone()] };
            assert_eq!(values(&container(pod, of), variable), wanted, "{name}: {of}: {variable}");
        }
    }
    for (of, names) in &expect.count {
        for (variable, count) in names.as_object().unwrap() {
            assert_eq!(
                json!(values(&container(pod, of), variable).len()),
                *count,
                "{name}: {of}: {variable}"
            );
        }
    }
    if expect.restricted {
        assert_eq!(violations(pod), [""; 0], "{name}");
    }
}

#[test]
fn every_case_of_the_table_comes_out_as_it_says() {
    let cases = cases();
    assert!(cases.len() >= 100, "{} cases", cases.len());
    for case in &cases {
        assert!(!case.what.is_empty(), "{}", case.name);
        let answer = case.answer_to(&case.object);
        let pod = outcome(&case.object, &answer);
        assert_case(case, &answer, &pod);
        assert_sound(case, &answer, &pod);
    }
}

/// What holds for every pod there is.
fn assert_sound(case: &Case, answer: &Answer, after: &Value) {
    let (name, before) = (&case.name, &case.object);
    let operations = answer.patch.as_ref().map_or(vec![], |patch| patch.as_array().unwrap().clone());
    assert!(operations.iter().all(|operation| operation["op"] == "add"), "{name}");
    assert!(answer.refusal.is_none() || answer.patch.is_none(), "{name}: refused, and patched");
    if answer.verdict.as_str() == "injected" {
        let sidecar = container(after, "lessor");
        for which in ["requests", "limits"] {
            for what in ["cpu", "memory"] {
                assert!(sidecar["resources"][which][what].is_string(), "{name}: {which} {what}");
            }
        }
    }
    if matches!(answer.verdict.as_str(), "skipped" | "denied") {
        assert_eq!(answer.patch, None, "{name}");
        return;
    }
    for container in containers(after).iter().filter(|container| container["name"] != "lessor") {
        let mounts = mounts(container);
        assert!(!mounts.iter().any(|volume| volume == "lessor-config" || volume == "lessor-run"), "{name}");
    }
    // Nothing that the profile refuses is new.
    let known = violations(before);
    let new: Vec<_> = violations(after).into_iter().filter(|found| !known.contains(found)).collect();
    assert_eq!(new, [""; 0], "{name}");
    // A second pass finds nothing to do, and is silent about it.
    let again = case.answer_to(after);
    assert_eq!(again.patch, None, "{name}");
    assert!(again.refusal.is_none(), "{name}: {again:?}");
    if answer.verdict.as_str() == "injected" {
        assert_eq!((again.verdict.as_str(), again.warnings.len()), ("completed", 0), "{name}: {again:?}");
    }
}

#[test]
fn what_comes_out_is_valid_in_strict_mode_for_the_oldest_and_the_newest_kubernetes() {
    let pods = cases().into_iter().filter_map(|case| {
        let answer = case.answer_to(&case.object);
        (answer.patch.is_some()).then(|| outcome(&case.object, &answer))
    });
    let pods: Vec<_> = pods.collect();
    let (good, said) = validate(&pods);
    assert!(good, "{said}");
    assert!(said.contains(&format!("{} objects against 1.29 and 1.", pods.len())), "{said}");
    // The validator does find what is wrong.
    let mut wrong = pods[0].clone();
    wrong["spec"]["initContainers"][0]["restartPolcy"] = json!("Always");
    assert!(!validate(&[wrong]).0);
}

#[test]
fn the_sidecars_command_line_is_one_that_lessor_takes() {
    let mut parsed = 0;
    for case in cases() {
        let answer = case.answer_to(&case.object);
        if answer.refusal.is_some() {
            continue;
        }
        let after = outcome(&case.object, &answer);
        let Some(sidecar) = containers(&after).into_iter().find(|one| one["name"] == "lessor") else {
            continue;
        };
        let Some(args) = sidecar["args"].as_array() else { continue };
        for ip in ["10.77.0.5", "fd00:77::5"] {
            let args = args.iter().map(|arg| arg.as_str().unwrap().replace("$(POD_IP)", ip));
            let read = Cli::try_parse_from(std::iter::once("lessor".to_owned()).chain(args));
            assert!(matches!(read.unwrap().command, cli::Command::Run(_)), "{}", case.name);
            parsed += 1;
        }
    }
    assert!(parsed > 100, "{parsed}");
}

fn validate(objects: &[Value]) -> (bool, String) {
    let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR"));
    let python = root.join("target/sdk/kubernetes/bin/python");
    assert!(python.exists(), "{} is missing; ./.ci/setup makes it", python.display());
    let mut command = Command::new(python);
    command.arg(root.join("tests/kubernetes/validate.py")).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut child = command.env("PYTHONDONTWRITEBYTECODE", "1").spawn().unwrap();
    child.stdin.take().unwrap().write_all(json!(objects).to_string().as_bytes()).unwrap();
    let done = child.wait_with_output().unwrap();
    (done.status.success(), String::from_utf8(done.stdout).unwrap())
}

/// The variables whose values are lists, which ours are put behind.
const MERGED: [&str; 3] = ["NO_PROXY", "no_proxy", "JAVA_TOOL_OPTIONS"];

/// Whether `after` is `before` with things added: members, elements at the end, ours behind a list.
fn only_adds(before: &Value, after: &Value, at: &str) -> Result<(), String> {
    match (before, after) {
        (Value::Null, _) => Ok(()), // a list that was null is one that was not there
        (Value::Object(old), Value::Object(new)) => old.iter().try_for_each(|(key, value)| {
            let merges = key == "value" && MERGED.iter().any(|name| old.get("name") == Some(&json!(name)));
            let found = new.get(key).ok_or_else(|| format!("{at}/{key} is gone"))?;
            let ours = key == "lessor.dev/status" || key == "lessor.dev/injected";
            if merges && keeps_entries(value, found) || ours {
                return Ok(());
            }
            only_adds(value, found, &format!("{at}/{key}"))
        }),
        (Value::Array(old), Value::Array(new)) => {
            // A native sidecar goes before the others.
            let first = usize::from(at == "/spec/initContainers" && new.len() > old.len());
            old.iter().enumerate().try_for_each(|(index, value)| {
                let found = new.get(index + first).ok_or_else(|| format!("{at}/{index} is gone"))?;
                only_adds(value, found, &format!("{at}/{index}"))
            })
        }
        _ if before == after => Ok(()),
        _ => Err(format!("{at} was {before} and is {after}")),
    }
}

fn keeps_entries(before: &Value, after: &Value) -> bool {
    let words = |value: &Value| -> Vec<String> {
        let text = value.as_str().unwrap_or_default();
        text.split([',', ' ']).filter(|word| !word.is_empty()).map(str::to_owned).collect()
    };
    let (old, new) = (words(before), words(after));
    // An entry that stood twice may stand once.
    old.iter().all(|word| new.contains(word))
}

fn names_more_than_once(container: &Value) -> Vec<String> {
    let env = container["env"].as_array().cloned().unwrap_or_default();
    let names: Vec<_> = env.iter().map(|entry| entry["name"].as_str().unwrap().to_owned()).collect();
    let mut twice: Vec<_> =
        names.iter().filter(|name| names.iter().filter(|other| other == name).count() > 1).cloned().collect();
    twice.dedup();
    twice
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1000, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn whatever_the_pod_the_patch_applies_and_what_the_app_set_stays(
        pod in chance::pod(),
        flags in prop::sample::select(vec![vec![], vec!["--mode=both"], vec!["--native=false", "--mode=proxy"]]),
    ) {
        let flags: Vec<_> = flags.into_iter().map(str::to_owned).collect();
        let case = Case {
            name: "chance".into(),
            what: String::new(),
            flags,
            request: serde_json::Map::new(),
            object: pod,
            expect: serde_json::from_value(json!({ "verdict": "" })).unwrap(),
        };
        let answer = case.answer_to(&case.object);
        let after = outcome(&case.object, &answer);
        assert_sound(&case, &answer, &after);
        only_adds(&case.object, &after, "").map_err(TestCaseError::fail)?;
        for container in containers(&case.object) {
            let found = inject_world::container(&after, container["name"].as_str().unwrap());
            prop_assert_eq!(names_more_than_once(&container), names_more_than_once(&found));
        }
    }

    #[test]
    fn whatever_the_json_a_review_of_it_is_answered(text in "[\\[{\"a-z:,0-9}\\]]{0,40}", deep in 0..200_usize) {
        let _ = Request::read(text.as_bytes());
        let object: Value = serde_json::from_str(&text).unwrap_or(Value::Null);
        let object = (0..deep).fold(object, |inner, _| json!({ "metadata": inner, "spec": {} }));
        for pod in [object.clone(), json!({ "spec": object }), json!({ "spec": { "containers": [object] } })] {
            let said = answer(&defaults(&[]), &Request::of_pod(pod));
            prop_assert!(said.refusal.is_some());
        }
    }
}

/// An answer to a pod with these annotations and this spec, within a time in which only work that grows with the
/// pod, and not with its square, is done.
fn answered_soon(annotations: Value, spec: Value) -> Answer {
    let pod = json!({ "metadata": { "annotations": annotations }, "spec": spec });
    let (request, defaults) = (Request::of_pod(pod), defaults(&["--mode=both".to_owned()]));
    let begun = std::time::Instant::now();
    let said = answer(&defaults, &request);
    let took = begun.elapsed();
    assert!(took < std::time::Duration::from_secs(2), "{took:?}");
    said
}

fn refused_soon(annotations: Value, spec: Value, part: &str) {
    let said = answered_soon(annotations, spec).refusal.unwrap_or_default();
    assert!(said.contains(part), "{part}: {said}");
}

#[test]
fn work_grows_with_a_pod_and_not_with_its_square() {
    let app = json!({ "containers": [{ "name": "app" }] });
    // A list of hosts as long as a pod can be.
    let hosts: Vec<_> = (0..200_000).map(|n| format!("h{n}")).collect();
    let env = json!([{ "name": "NO_PROXY", "value": hosts.join(",") }]);
    let said = answered_soon(json!({}), json!({ "containers": [{ "name": "app", "env": env }] }));
    assert_eq!(said.verdict.as_str(), "injected", "{:?}", said.refusal);
    // A name of megabytes, and many of them.
    let long = format!("lessor.dev/{}", "mode".repeat(500_000));
    assert_eq!(answered_soon(json!({ long: "" }), app.clone()).verdict.as_str(), "injected");
    let many: serde_json::Map<_, _> =
        (0..100_000).map(|n| (format!("lessor.dev/{:060}", n), json!(""))).collect();
    assert_eq!(answered_soon(many.into(), app).verdict.as_str(), "injected");
}

#[test]
fn a_pod_that_is_larger_than_pods_are_is_refused_with_a_clear_word() {
    let app = json!({ "containers": [{ "name": "app" }] });
    for name in ["upstreams", "containers", "skip-containers", "keep-env", "status", "else"] {
        let list = |length: usize| "a,".repeat(length / 2);
        refused_soon(
            json!({ format!("lessor.dev/{name}"): list(4098) }),
            app.clone(),
            "is 4098 bytes long; it may be 4096",
        );
        let longest = json!({ format!("lessor.dev/{name}"): list(4096) });
        assert!(answered_soon(longest, app.clone()).refusal.is_none(), "{name}");
    }
    let many = |count: usize, env: usize| {
        let env: Vec<_> = (0..env).map(|n| json!({ "name": format!("V{n}"), "value": "" })).collect();
        let all = (0..count).map(|n| json!({ "name": format!("c{n}"), "env": env }));
        json!({ "containers": all.collect::<Vec<_>>() })
    };
    refused_soon(json!({}), many(257, 0), "has 257 containers; with a sidecar it may have 256");
    refused_soon(json!({}), many(1, 10_001), "have 10001 variables; with a sidecar they may have 10000");
    refused_soon(json!({}), many(200, 51), "have 10200 variables");
    for (count, env) in [(256, 39), (1, 10_000)] {
        assert!(answered_soon(json!({}), many(count, env)).refusal.is_none(), "{count} {env}");
    }
}

/// Runs `lessor inject` with a file at its standard input.
fn command(args: &[&str], stdin: &str) -> (Option<i32>, String, String) {
    command_with(&[], args, stdin)
}

#[test]
fn yaml_or_a_workload_is_answered_with_what_to_give_instead() {
    let workload = json!({ "apiVersion": "apps/v1", "kind": "Deployment", "spec": {} }).to_string();
    for (given, is) in [("kind: Pod\n", "is no JSON: "), (&workload, "is apps/v1 Deployment, no ")] {
        let (code, said, why) = command(&["--review", "-", "--print-pod"], given);
        assert_eq!((code, said.as_str()), (Some(2), ""), "{why}");
        assert!(why.contains(is) && why.contains("give the Pod, or a workload's pod template"), "{why}");
    }
}

fn command_with(env: &[(&str, &str)], args: &[&str], stdin: &str) -> (Option<i32>, String, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_lessor"));
    command.arg("inject").args(args).env_clear().envs(env.iter().copied());
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    // One that refuses its command line does not read it.
    let _ = child.stdin.take().unwrap().write_all(stdin.as_bytes());
    let done = child.wait_with_output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (done.status.code(), text(done.stdout), text(done.stderr))
}

#[test]
fn a_review_from_a_file_is_answered_as_the_api_server_would_be() {
    let case = cases().into_iter().find(|case| case.name == "annotations").unwrap();
    let (code, said, _) = command(&["--review", "-"], &case.review_of(&case.object).to_string());
    let review: Value = serde_json::from_str(&said).unwrap();
    let response = &review["response"];
    assert_eq!((code, &review["apiVersion"]), (Some(0), &json!("admission.k8s.io/v1")));
    assert_eq!((&response["uid"], &response["allowed"]), (&json!("annotations"), &json!(true)));
    assert_eq!(response["patchType"], "JSONPatch");
    let patch =
        base64::engine::general_purpose::STANDARD.decode(response["patch"].as_str().unwrap()).unwrap();
    let patch: Value = serde_json::from_slice(&patch).unwrap();
    assert_eq!(Some(patch), case.answer_to(&case.object).patch);
    // A refusal has a message, and nothing else is done.
    let denied = cases().into_iter().find(|case| case.name == "wrong_mode").unwrap();
    let (code, said, _) = command(&["--review", "-"], &denied.review_of(&denied.object).to_string());
    let review: Value = serde_json::from_str(&said).unwrap();
    assert_eq!((code, &review["response"]["allowed"]), (Some(0), &json!(false)));
    let message = review["response"]["status"]["message"].as_str().unwrap();
    assert!(message.contains("lessor.dev/mode") && message.contains("base-url, proxy or both"), "{message}");
    assert!(review["response"].get("patch").is_none());
}

#[test]
fn a_pod_from_a_file_is_printed_as_it_would_become() {
    let case = cases().into_iter().find(|case| case.name == "annotations").unwrap();
    let (code, said, _) = command(&["--review", "-", "--print-pod"], &case.object.to_string());
    let pod: Value = serde_json::from_str(&said).unwrap();
    assert_eq!((code, pod), (Some(0), outcome(&case.object, &case.answer_to(&case.object))));
    // What flags leave out may stand in the environment.
    let plain =
        json!({ "kind": "Pod", "metadata": {}, "spec": { "containers": [{ "name": "app" }] } }).to_string();
    let env = [("LESSOR_INJECT_SECRET", "from-the-environment")];
    for (more, secret) in [(&[][..], "from-the-environment"), (&["--secret=flag"][..], "flag")] {
        let args = [&["--review", "-", "--print-pod"][..], more].concat();
        let (_, said, _) = command_with(&env, &args, &plain);
        let pod: Value = serde_json::from_str(&said).unwrap();
        assert_eq!(pod["spec"]["volumes"][0]["secret"]["secretName"], secret);
    }
    let mut refused = case.object.clone();
    refused["spec"]["shareProcessNamespace"] = json!(true);
    let (code, said, why) = command(&["--review", "-", "--print-pod"], &refused.to_string());
    assert_eq!((code, said.as_str()), (Some(1), ""));
    assert!(why.contains("shareProcessNamespace"), "{why}");
    for (text, part) in [("apiVersion: v1", "give the Pod"), ("{}", "admission.k8s.io/v1")] {
        let (code, _, why) = command(&["--review", "-"], text);
        assert_eq!(code, Some(2), "{why}");
        assert!(why.contains(part), "{why}");
    }
    assert!(command(&["--review", "/nowhere/at/all"], "").2.contains("/nowhere/at/all"));
    assert!(command(&["--review", "-", "--mode", "transparent"], "").2.contains("base-url, proxy or both"));
}

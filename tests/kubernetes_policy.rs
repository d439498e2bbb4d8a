//! The admission policy gives the same pod as `lessor inject`: its expressions are evaluated on every case of the table.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::pedantic, missing_docs, unreachable_pub)]

#[allow(dead_code)] // a part of it
mod inject_world;
mod kubernetes_world;

use std::collections::{BTreeMap, BTreeSet};
use std::io::Write as _;
use std::process::Output;

use inject_world::{Case, cases, chance, container, outcome};
use kubernetes_world::{WITH_POLICIES, release, root, run, said, tool};
use proptest::strategy::{Strategy as _, ValueTree as _};
use proptest::test_runner::TestRunner;
use serde_json::{Value, json};
use tokio::process::Command;

/// Cases whose reviews never get to a policy, and why.
const NOT_ASKED: [(&str, &str); 3] = [
    ("ephemeral_thief", "the API server itself takes no ephemeral containers with a new pod"),
    ("no_pod", "the API server itself refuses a pod without containers before any policy"),
    ("another_kind", "the policy's resourceRules name pods alone, as the webhook's rules do"),
];

/// Cases in which the pod comes out otherwise, and why.
const OTHER_POD: [(&str, &str); 1] =
    [("own_namespace", "no pods of ours run with the policy, so no namespace is left out for their sake")];

/// Cases in which the webhook says more than the policy, by a part of the warning, and why.
const SAID_BY_THE_WEBHOOK_ALONE: [(&str, &str); 10] = [
    (
        "of its own",
        "a policy that warns sees the pod after the change, and cannot tell what the app has from what others set",
    ),
    ("from elsewhere", "the same"),
    ("has a proxy in JAVA_TOOL_OPTIONS", "the same"),
    (
        "does nothing in mode base-url",
        "a remark on the user's annotations, of which CEL would need one expression each",
    ),
    ("no container is selected", "the same"),
    ("yet", "the same: names of containers that are not there"),
    ("is not known", "the same; the nearest name cannot be reckoned in CEL"),
    ("is not in the catalogue", "the same"),
    ("runs before lessor", "said of a second pass only; the first one puts the sidecar in front"),
    (
        "get none",
        "the binding leaves such namespaces out, so nothing is evaluated there; nor does the webhook's",
    ),
];

/// What an injector is told by a flag, as a value of the chart.
fn value_of(flag: &str) -> Option<String> {
    let (name, value) = flag.trim_start_matches("--").split_once('=').unwrap();
    let list = || format!("--set-json=sidecar.{name}={}", json!(value.split(',').collect::<Vec<_>>()));
    let amount = |path: &str| format!("--set-string=sidecar.resources.{path}={value}");
    Some(match name {
        "upstreams" => {
            format!("{},{}", list(), list().replace("--set-json=sidecar.upstreams", "sidecar.ownProviders"))
        }
        "no-proxy" => list().replace("no-proxy", "noProxy"),
        "cpu-request" => amount("requests.cpu"),
        "cpu-limit" => amount("limits.cpu"),
        "memory-request" => amount("requests.memory"),
        "memory-limit" => amount("limits.memory"),
        "log-level" => format!("--set-string=sidecar.logLevel={value}"),
        "image" | "secret" | "mode" | "native" | "pool" | "drain" => {
            format!("--set-string=sidecar.{name}={value}")
        }
        // What a chart does not know of a cluster, it is told as what follows.
        "cluster-version" => {
            let minor: u32 = value.trim_start_matches("1.").parse().unwrap();
            format!("--set-string=sidecar.native={}", minor >= 29)
        }
        "namespace" => return None,
        other => panic!("--{other}: say here which value of the chart that is"),
    })
}

/// A review as the API server has it: in a namespace that opted in.
fn review(case: &Case) -> Value {
    let mut review = case.review_of(&case.object)["request"].clone();
    let namespace =
        [&review["namespace"], &case.object["metadata"]["namespace"]].map(|one| one.as_str().unwrap_or(""));
    let namespace = namespace.into_iter().find(|name| !name.is_empty()).unwrap_or("default").to_owned();
    review["namespace"] = namespace.into();
    review["namespaceLabels"] = json!({ "lessor.dev/inject": "enabled" });
    review
}

async fn evaluate(policies: &[Value], reviews: &[Value]) -> Output {
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(json!({ "policies": policies, "reviews": reviews }).to_string().as_bytes()).unwrap();
    let mut command = Command::new(tool("node/node_modules/.bin/node"));
    command.arg(root().join("tests/kubernetes/policy.mjs")).arg(file.path());
    run(command).await
}

async fn evaluated(policies: &[Value], reviews: &[Value]) -> Vec<Value> {
    let done = evaluate(policies, reviews).await;
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    serde_json::from_slice(&done.stdout).unwrap()
}

/// As an API server keeps it: what is null is not there.
fn kept(value: &Value) -> Value {
    match value {
        Value::Object(members) => members
            .iter()
            .filter(|(_, member)| !member.is_null())
            .map(|(name, member)| (name.clone(), kept(member)))
            .collect(),
        Value::Array(items) => items.iter().map(kept).collect(),
        other => other.clone(),
    }
}

async fn policies(flags: &[String]) -> Vec<Value> {
    let args: Vec<_> = flags.iter().filter_map(|flag| value_of(flag)).collect();
    let args = std::iter::once("--set=injection.method=policy".to_owned()).chain(args);
    release(WITH_POLICIES, &args.collect::<Vec<_>>()).await
}

#[tokio::test]
async fn the_policy_gives_the_same_pod_as_the_webhook_in_every_case_of_the_table() {
    let mut by_flags: BTreeMap<Vec<String>, Vec<Case>> = BTreeMap::new();
    for case in cases().into_iter().filter(|case| !NOT_ASKED.iter().any(|(name, _)| *name == case.name)) {
        by_flags.entry(case.flags.clone()).or_default().push(case);
    }
    let (mut same, mut changed, mut refused) = (0, 0, 0);
    let mut silent = BTreeSet::new();
    for (flags, cases) in &by_flags {
        let reviews: Vec<_> = cases.iter().map(review).collect();
        let results = evaluated(&policies(flags).await, &reviews).await;
        for (case, result) in cases.iter().zip(&results) {
            let (name, answer) = (&case.name, case.answer_to(&case.object));
            if OTHER_POD.iter().any(|(other, _)| other == name) {
                assert_ne!(kept(&outcome(&case.object, &answer)), result["pod"], "{name} is the same now");
                continue;
            }
            let denied = result["denied"].as_array().unwrap();
            assert_eq!(
                denied.is_empty(),
                answer.refusal.is_none(),
                "{name}: {denied:?} {:?}",
                answer.refusal
            );
            let webhooks = kept(&outcome(&case.object, &answer));
            assert_eq!(webhooks, result["pod"], "{name}: the webhook's, and the policy's");
            assert_eq!(result["pod"], result["again"], "{name}: a second pass changes something");
            same += 1;
            changed += usize::from(answer.patch.is_some());
            refused += usize::from(!denied.is_empty());
            if denied.is_empty() {
                compare_warnings(name, &answer.warnings, &result["warnings"], &mut silent);
            }
        }
    }
    assert!(same > 95 && changed > 40 && refused > 25, "{same} cases, {changed} changed, {refused} refused");
    let known: BTreeSet<_> = SAID_BY_THE_WEBHOOK_ALONE.iter().map(|(part, _)| *part).collect();
    assert_eq!(silent, known, "what stands in the list of differences, and is none");
}

/// The policy says nothing that the webhook does not say, and all of it but what is listed.
fn compare_warnings(name: &str, webhooks: &[String], policies: &Value, silent: &mut BTreeSet<&'static str>) {
    let policies: Vec<_> = policies.as_array().unwrap().iter().map(|one| one.as_str().unwrap()).collect();
    for said in &policies {
        assert!(webhooks.iter().any(|other| other == said), "{name}: the policy alone says {said}");
    }
    let never_asked = webhooks.iter().any(|said| said.contains("the webhook's rule should be"));
    for said in webhooks.iter().filter(|said| !never_asked && !policies.contains(&said.as_str())) {
        let part = SAID_BY_THE_WEBHOOK_ALONE.iter().find(|(part, _)| said.contains(part));
        silent.insert(part.unwrap_or_else(|| panic!("{name}: the webhook alone says {said}")).0);
    }
}

#[tokio::test]
async fn the_mark_of_the_settings_is_the_same_whoever_made_it() {
    let flags =
        ["--pool=shared", "--drain=10", "--no-proxy=.corp.test,10.0.0.1", "--native=false", "--mode=both"];
    let flags = flags.map(str::to_owned).to_vec();
    let pod = json!({ "metadata": { "labels": { "lessor.dev/inject": "true" } },
        "spec": { "containers": [{ "name": "app", "image": "app:1" }] } });
    let mut case = cases().into_iter().find(|case| case.name == "label_true").unwrap();
    (case.flags, case.object) = (flags.clone(), pod);
    let results = evaluated(&policies(&flags).await, &[review(&case)]).await;
    let webhooks = outcome(&case.object, &case.answer_to(&case.object));
    let at = "/metadata/annotations/lessor.dev~1status";
    assert!(webhooks.pointer(at).is_some());
    assert_eq!(webhooks.pointer(at), results[0]["pod"].pointer(at));
    assert_eq!(webhooks, results[0]["pod"]);
}

#[tokio::test]
async fn a_provider_that_is_named_twice_gives_its_variables_once() {
    let mut case = cases().into_iter().find(|case| case.name == "label_true").unwrap();
    case.object["metadata"]["annotations"] = json!({ "lessor.dev/upstreams": "openai, openai" });
    let results = evaluated(&policies(&[]).await, &[review(&case)]).await;
    let app = container(&results[0]["pod"], "app");
    assert_eq!(app["env"].as_array().unwrap().len(), 3, "{app:#}");
}

#[tokio::test]
async fn constructed_objects_are_turned_into_maps_and_nothing_else_is() {
    for (written, rewritten) in [
        ("Object.spec.a{b: 1}", "constructed({\"b\": dyn( 1)})"),
        (
            "[JSONPatch{op: 'add', value: x ? y : z}]",
            "[operation({\"op\": dyn( 'add'), \"value\": dyn( x ? y : z)})]",
        ),
        ("Object.a{}", "constructed({})"),
        (
            "Object.a{b: Object.a.b{c: {'d': e}}, f: [1, 2]}",
            "constructed({\"b\": dyn( constructed({\"c\": dyn( {'d': e})})), \"f\": dyn( [1, 2])})",
        ),
        ("'Object.a{b: 1} variables.c' + variables.c", "'Object.a{b: 1} variables.c' + variables_c"),
        ("object.variables.c == \"it's, {\" + '\\''", "object.variables.c == \"it's, {\" + '\\''"),
        ("{'a': b.map(c, {'d': c})}", "{'a': b.map(c, {'d': c})}"),
        (
            "Object.a{\n  b: f(1, 2),\n  c: 3\n}",
            "constructed({\n  \"b\": dyn( f(1, 2)),\n  \"c\": dyn( 3\n)})",
        ),
    ] {
        let mut command = Command::new(tool("node/node_modules/.bin/node"));
        command.arg(root().join("tests/kubernetes/policy.mjs")).args(["rewrite", written]);
        assert_eq!(said(command).await.trim_end_matches('\n'), rewritten);
    }
}

#[tokio::test]
async fn an_expression_of_a_wrong_type_or_an_unknown_name_does_not_pass() {
    let good = policies(&[]).await;
    let at = good.iter().position(|object| object["kind"] == "MutatingAdmissionPolicy").unwrap();
    for (expression, word) in [
        ("[JSONPatch{op: 'add', path: '/a', value: 1}] + ['x']", "mutation"),
        ("{'a': 1, 'b': 'x'}.map(k, JSONPatch{op: 'add', path: k, value: 1})", "wrong type"),
        ("variables.unheardOf", "variables_unheardOf"),
        ("[1, 2]", "list<int>"),
    ] {
        let mut wrong = good.clone();
        wrong[at]["spec"]["mutations"][0]["jsonPatch"]["expression"] = expression.into();
        let done = evaluate(&wrong, &[]).await;
        let said = String::from_utf8_lossy(&done.stderr);
        assert!(!done.status.success() && said.contains(word), "{expression}: {said}");
    }
}

/// Pods by chance, always the same ones: any mix of what an app may have set.
fn pods(count: usize) -> Vec<Value> {
    let mut runner = TestRunner::deterministic();
    (0..count).map(|_| chance::pod().new_tree(&mut runner).unwrap().current()).collect()
}

#[tokio::test]
async fn the_policy_gives_the_same_pod_as_the_webhook_whatever_the_pod() {
    let mut case = cases().into_iter().find(|case| case.name == "label_true").unwrap();
    let mut refused = 0;
    for flags in [vec![], vec!["--mode=both"], vec!["--native=false", "--mode=proxy"]] {
        case.flags = flags.into_iter().map(str::to_owned).collect();
        let policies = policies(&case.flags).await;
        let (mut reviews, mut answers) = (Vec::new(), Vec::new());
        for pod in pods(200) {
            case.object = kept(&pod);
            reviews.push(review(&case));
            let answer = case.answer_to(&case.object);
            let pod = kept(&outcome(&case.object, &answer));
            answers.push((answer.refusal, pod));
        }
        for (result, (refusal, pod)) in evaluated(&policies, &reviews).await.iter().zip(answers) {
            let denied = result["denied"].as_array().unwrap();
            assert_eq!(denied.is_empty(), refusal.is_none(), "{denied:?} {refusal:?} {pod:#}");
            refused += usize::from(refusal.is_some());
            assert_eq!(result["pod"], pod);
            assert_eq!(result["again"], pod);
        }
    }
    assert!((50..400).contains(&refused), "{refused} of 600 refused");
}

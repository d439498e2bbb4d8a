//! What the chart installs, seen at work: the injector does with the rights that the chart gives it.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::pedantic, missing_docs, unreachable_pub)]

#[allow(dead_code)] // a part of it
#[path = "inject_world/cluster.rs"]
mod cluster;
mod kubernetes_world;
#[path = "inject_world/process.rs"]
mod process;

use cluster::Cluster;
use kubernetes_world::{OLDEST_AND_NEWEST, of_kind, release, run};
use process::Injector;
use serde_json::Value;
use tokio::process::Command;

/// What a call asks for, as rules name it: verb, group, resource, and the one that it names.
fn asked(call: &str) -> (&'static str, String, String, Option<String>) {
    let (method, path) = call.split_once(' ').unwrap();
    let steps: Vec<_> = path.split('/').skip(1).map(str::to_owned).collect();
    let (group, rest) = match steps[0].as_str() {
        "api" => (String::new(), &steps[2..]),
        _ => (steps[1].clone(), &steps[3..]),
    };
    let rest = if rest[0] == "namespaces" { &rest[2..] } else { rest };
    let verb = match method {
        "GET" => "get",
        "POST" => "create",
        "PUT" => "update",
        "PATCH" => "patch",
        other => panic!("{other} is no verb that a role here has"),
    };
    (verb, group, rest[0].clone(), rest.get(1).cloned())
}

fn allows(rule: &Value, call: &str) -> bool {
    let (verb, group, resource, name) = asked(call);
    let has = |key: &str, value: &str| rule[key].as_array().unwrap().iter().any(|one| one == value);
    let names = rule["resourceNames"].as_array();
    let named = names.is_none_or(|names| name.is_some_and(|name| names.iter().any(|one| *one == name)));
    has("verbs", verb) && has("apiGroups", &group) && has("resources", &resource) && named
}

#[tokio::test(flavor = "multi_thread")]
async fn a_self_managed_injector_needs_no_right_beyond_its_roles_and_every_one_of_them() {
    let cluster = Cluster::start().await;
    cluster.state().races = 2; // so that it has to read and write again
    let injector = Injector::start(&cluster.args(), &cluster.env()).await;
    injector.ready().await;
    // The double's names in place of the chart's.
    let objects = release(OLDEST_AND_NEWEST, &[""; 0]).await;
    let mut rules = Vec::new();
    for (kind, chart, double) in
        [("Role", "lessor-injector-tls", "injector-tls"), ("ClusterRole", "lessor-injector", "lessor")]
    {
        let text = of_kind(&objects, kind)["rules"].to_string().replace(chart, double);
        rules.extend(serde_json::from_str::<Vec<Value>>(&text).unwrap());
    }
    // The version is told to every service account.
    let calls: Vec<_> =
        cluster.state().calls.iter().filter(|call| !call.ends_with(" /version")).cloned().collect();
    assert!(calls.len() >= 4, "{calls:?}");
    for call in &calls {
        assert!(rules.iter().any(|rule| allows(rule, call)), "{call} is not in {rules:#?}");
    }
    for rule in &rules {
        for verb in rule["verbs"].as_array().unwrap() {
            let used = calls.iter().any(|call| asked(call).0 == verb && allows(rule, call));
            assert!(used, "{verb} is in a role and not needed: {calls:?}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_helm_test_asks_is_answered_by_an_injector_that_is_ready_and_by_no_other() {
    let objects = release(OLDEST_AND_NEWEST, &[""; 0]).await;
    let pod = &of_kind(&objects, "Pod")["spec"];
    // Asked again until it is ready, for a minute at least: 10, 20 and 40 s are between tries.
    assert_eq!((&pod["restartPolicy"], &pod["activeDeadlineSeconds"]), (&"OnFailure".into(), &120.into()));
    let args = pod["containers"][0]["args"].clone();
    let cluster = Cluster::start().await;
    let injector = Injector::start(&cluster.args(), &cluster.env()).await;
    injector.ready().await;
    let ask = async |at: String| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_lessor"));
        let args = args.as_array().unwrap().iter().map(|arg| arg.as_str().unwrap());
        command.args(args.map(|arg| arg.replace("lessor-injector.lessor.svc:8080", &at)));
        run(command).await.status.code()
    };
    assert_eq!(ask(injector.health.to_string()).await, Some(0));
    // The port on which nothing of the kind is served.
    assert_ne!(ask(injector.webhook.to_string()).await, Some(0));
}

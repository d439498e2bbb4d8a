//! Pods by chance: any mix of what an app may have set, names of lessor's own included.

use proptest::collection::vec;
use proptest::option::{of, weighted};
use proptest::prelude::*;
use proptest::sample::select;
use serde_json::{Value, json};

const VARIABLES: [&str; 18] = [
    "PORT",
    "OPENAI_BASE_URL",
    "OPENAI_API_BASE",
    "OPENAI_API_KEY",
    "ANTHROPIC_BASE_URL",
    "ANTHROPIC_API_KEY",
    "ANTHROPIC_AUTH_TOKEN",
    "HTTP_PROXY",
    "http_proxy",
    "HTTPS_PROXY",
    "https_proxy",
    "ALL_PROXY",
    "NO_PROXY",
    "no_proxy",
    "SSL_CERT_FILE",
    "NODE_EXTRA_CA_CERTS",
    "NODE_USE_ENV_PROXY",
    "JAVA_TOOL_OPTIONS",
];
const VALUES: [&str; 10] = [
    "",
    "x",
    "*",
    "a.test, b.test",
    "localhost,.svc",
    "http://127.0.0.1:8321",
    "http://127.0.0.1:8321/openai/v1",
    "lessor-placeholder",
    "-Xmx1g",
    "-Dhttp.proxyHost=corp",
];
const NAMES: [&str; 7] = ["app", "web", "helper", "istio-proxy", "migrate", "a", "lessor"];
const VOLUMES: [&str; 6] = ["tmp", "data", "config", "lessor-config", "lessor-ca", "lessor-run"];
const PATHS: [&str; 5] = ["/tmp", "/data", "/run/lessor/ca", "/run/lessor/ca/", "/etc/lessor"];
const ANNOTATIONS: [(&str, &[&str]); 14] = [
    ("lessor.dev/mode", &["base-url", "proxy", "both", "proxy", "both", "none"]),
    ("lessor.dev/containers", &["app", "app,helper", "nobody", ","]),
    ("lessor.dev/skip-containers", &["helper", "app"]),
    ("lessor.dev/upstreams", &["openai", "openai,anthropic,gemini", "openai, openai", "inhouse"]),
    ("lessor.dev/native-sidecar", &["true", "false"]),
    ("lessor.dev/drain", &["5", "20s", "200s"]),
    ("lessor.dev/keep-env", &["OPENAI_BASE_URL", "NO_PROXY,HTTP_PROXY", "JAVA_TOOL_OPTIONS"]),
    ("lessor.dev/java", &["true", "true", "false"]),
    ("lessor.dev/share-process-namespace", &["accept"]),
    ("lessor.dev/cpu-limit", &["2", "10m"]),
    ("lessor.dev/status", &["{}", "not json", "{\"mode\":\"both\"}"]),
    ("lessor.dev/secret", &["lessor", "other"]),
    ("lessor.dev/unknown", &["x"]),
    ("kubectl.kubernetes.io/default-container", &["app"]),
];

fn entry() -> impl Strategy<Value = Value> {
    let value = prop_oneof![
        8 => select(&VALUES[..]).prop_map(|value| json!({ "value": value })),
        1 => Just(json!({})),
        1 => Just(json!({ "valueFrom": { "secretKeyRef": { "name": "apps", "key": "k" } } })),
        1 => Just(json!({ "valueFrom": { "fieldRef": { "fieldPath": "status.hostIP" } } })),
    ];
    (select(&VARIABLES[..]), value).prop_map(|(name, mut entry)| {
        entry["name"] = json!(name);
        entry
    })
}

fn mount() -> impl Strategy<Value = Value> {
    // Names of lessor's own are seldom, for such pods are refused.
    let volume = prop_oneof![30 => select(&VOLUMES[..3]), 1 => select(&VOLUMES[..])];
    let path = prop_oneof![30 => select(&PATHS[..2]), 1 => select(&PATHS[..])];
    (volume, path, weighted(0.5, any::<bool>())).prop_map(|(name, path, read_only)| {
        let mut mount = json!({ "name": name, "mountPath": path });
        if let Some(read_only) = read_only {
            mount["readOnly"] = json!(read_only);
        }
        mount
    })
}

/// A list that is not there, null, or has up to `most` members.
fn list(one: impl Strategy<Value = Value>, most: usize) -> impl Strategy<Value = Option<Value>> {
    prop_oneof![
        2 => Just(None),
        1 => Just(Some(Value::Null)),
        7 => vec(one, 0..=most).prop_map(|all| Some(Value::Array(all))),
    ]
}

fn container() -> impl Strategy<Value = Value> {
    let env_from = of(Just(json!([{ "configMapRef": { "name": "settings" } }])));
    let security = of(Just(json!({ "runAsNonRoot": true, "allowPrivilegeEscalation": false })));
    let port = weighted(0.2, prop_oneof![20 => Just(8080), 1 => Just(8321)]);
    (list(entry(), 8), list(mount(), 3), env_from, security, port, any::<u16>()).prop_map(
        |(env, mounts, env_from, security, port, strange)| {
            let mut container = json!({ "image": "app:1", "unknownField": { "kept": strange } });
            for (key, value) in
                [("env", env), ("volumeMounts", mounts), ("envFrom", env_from), ("securityContext", security)]
            {
                if let Some(value) = value {
                    container[key] = value;
                }
            }
            if let Some(port) = port {
                container["ports"] = json!([{ "containerPort": port }]);
            }
            container
        },
    )
}

/// Containers with names that differ, of these; ours among them seldom.
fn named(most: usize, from: usize) -> impl Strategy<Value = Vec<Value>> {
    let names = prop_oneof![30 => Just(6), 1 => Just(7)];
    (vec(container(), 0..=most), names, any::<prop::sample::Index>()).prop_map(
        move |(mut all, names, start)| {
            let start = start.index(names);
            for (at, container) in all.iter_mut().enumerate() {
                let name = NAMES[(start + at) % names];
                container["name"] = json!(if from == 0 { name.to_owned() } else { format!("init-{name}") });
                if from > 0 && name == "lessor" {
                    container["name"] = json!("lessor");
                }
            }
            all
        },
    )
}

fn annotations() -> impl Strategy<Value = Option<Value>> {
    let one = select(&ANNOTATIONS[..]).prop_flat_map(|(key, values)| (Just(key), select(values)));
    let some = vec(one, 0..4).prop_map(|all| {
        all.into_iter().map(|(key, value)| (key.to_owned(), json!(value))).collect::<Value>()
    });
    prop_oneof![1 => Just(None), 1 => Just(Some(Value::Null)), 8 => some.prop_map(Some)]
}

fn labels() -> impl Strategy<Value = Option<Value>> {
    let one = prop_oneof![
        20 => Just(json!({ "app": "web", "lessor.dev/inject": "true" })),
        1 => Just(json!({ "lessor.dev/inject": "perhaps" })),
        1 => Just(json!({ "lessor.dev/injected": "true" })),
        1 => Just(Value::Null),
    ];
    of(one)
}

fn volume() -> impl Strategy<Value = Value> {
    let name = prop_oneof![40 => select(&VOLUMES[..3]), 1 => select(&VOLUMES[..])];
    let what = prop_oneof![
        20 => Just(json!({ "emptyDir": {} })),
        1 => Just(json!({ "secret": { "secretName": "lessor" } })),
        1 => Just(json!({ "projected": { "sources": [{ "secret": { "name": "lessor" } }] } })),
    ];
    (name, what).prop_map(|(name, mut volume)| {
        volume["name"] = json!(name);
        volume
    })
}

/// A pod.
pub fn pod() -> impl Strategy<Value = Value> {
    let apps = named(4, 0).prop_filter("a pod has a container", |all| !all.is_empty());
    let inits = of(named(3, 1));
    let spec = (apps, inits, list(volume(), 3), of(0_u64..120), weighted(0.05, Just(true)));
    (spec, annotations(), labels(), any::<bool>()).prop_map(|(spec, annotations, labels, shares)| {
        let (apps, inits, volumes, grace, host) = spec;
        let mut pod = json!({
            "apiVersion": "v1", "kind": "Pod", "metadata": { "generateName": "x-" },
            "spec": { "containers": apps, "futureField": [1, { "kept": null }] },
        });
        for (at, value) in [("annotations", annotations), ("labels", labels)] {
            if let Some(value) = value {
                pod["metadata"][at] = value;
            }
        }
        if let Some(inits) = inits {
            pod["spec"]["initContainers"] = json!(inits);
        }
        if let Some(volumes) = volumes {
            pod["spec"]["volumes"] = volumes;
        }
        if let Some(grace) = grace {
            pod["spec"]["terminationGracePeriodSeconds"] = json!(grace);
        }
        if let Some(host) = host {
            pod["spec"][if shares { "shareProcessNamespace" } else { "hostNetwork" }] = json!(host);
        }
        pod
    })
}

//! What is there beside the chart: plain manifests, overlays, the snippet and the examples, each held to its source.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::pedantic, missing_docs, unreachable_pub)]

#[allow(dead_code)] // a part of it
mod inject_world;
mod kubernetes_world;

use std::path::{Path, PathBuf};

use inject_world::{container, containers, defaults, restricted::violations, values};
use kubernetes_world::{
    OLDEST_AND_NEWEST, WITH_POLICIES, all_of_kind, chart, kustomize, objects, objects_in, of_kind, release,
    root, said, tool, yaml,
};
use lessor::control::kubernetes::{Request, answer, patched};
use serde_json::{Map, Value, json};
use tokio::process::Command;

/// Folders of `deploy/manifests`, with the versions for which they are.
const MANIFESTS: [(&str, &str); 3] =
    [("webhook", OLDEST_AND_NEWEST), ("cert-manager", OLDEST_AND_NEWEST), ("policy", WITH_POLICIES)];

fn file_of(name: &str) -> PathBuf {
    root().join(format!("deploy/manifests/{name}/lessor.yaml"))
}

/// By kind, namespace and name, without what only a release of Helm has.
fn sorted(objects: &[Value]) -> Vec<Value> {
    let mut objects = objects.to_vec();
    for object in &mut objects {
        for at in ["/metadata/labels", "/spec/template/metadata/labels"] {
            if let Some(labels) = object.pointer_mut(at).and_then(Value::as_object_mut) {
                labels.remove("helm.sh/chart");
                labels.remove("app.kubernetes.io/managed-by");
            }
        }
    }
    objects.retain(|object| object["metadata"]["annotations"]["helm.sh/hook"].is_null());
    objects.sort_by_key(|object| format!("{} {}", object["kind"], object["metadata"]));
    objects
}

#[tokio::test]
async fn plain_manifests_are_what_the_chart_renders() {
    let fresh = tempfile::tempdir().unwrap();
    let mut command = Command::new(root().join("deploy/render.sh"));
    command.arg(fresh.path());
    said(command).await;
    for (name, versions) in MANIFESTS {
        let now = std::fs::read_to_string(file_of(name)).unwrap();
        let rendered = std::fs::read_to_string(fresh.path().join(name).join("lessor.yaml")).unwrap();
        assert!(now == rendered, "deploy/manifests/{name} lags behind; run HELM=… deploy/render.sh");
        let objects = objects_in(versions, &[file_of(name)]).await;
        assert!(objects.len() > 7, "{name}");
        assert!(all_of_kind(&objects, "Secret").is_empty(), "{name}: a manifest with a secret in it");
        assert_eq!(all_of_kind(&objects, "Namespace").len(), usize::from(name != "policy"), "{name}");
    }
}

#[tokio::test]
async fn kustomize_gives_the_same_as_the_manifests_and_the_chart() {
    for (name, versions) in MANIFESTS {
        let built = objects(versions, &said(kustomize(&format!("deploy/manifests/{name}"))).await).await;
        let plain = objects_in(versions, &[file_of(name)]).await;
        assert_eq!(sorted(&built), sorted(&plain), "{name}");
    }
    let values = chart().join("values-ha.yaml");
    let chart = release(OLDEST_AND_NEWEST, &["--values", values.to_str().unwrap()]).await;
    let built = objects(OLDEST_AND_NEWEST, &said(kustomize("deploy/kustomize/ha")).await).await;
    let built: Vec<_> = built.into_iter().filter(|object| object["kind"] != "Namespace").collect();
    assert_eq!(sorted(&built), sorted(&chart));
    assert_eq!(of_kind(&built, "Deployment")["spec"]["replicas"], 3);
}

#[tokio::test]
async fn an_overlays_image_and_namespace_reach_the_arguments_the_selectors_and_the_certificate() {
    for (base, follow) in [
        ("manifests/webhook", "webhook"),
        ("kustomize/ha", "webhook"),
        ("manifests/cert-manager", "cert-manager"),
    ] {
        // Kustomize takes relative paths alone.
        let overlay = tempfile::tempdir_in(root().join("target")).unwrap();
        let text = json!({ "apiVersion": "kustomize.config.k8s.io/v1beta1", "kind": "Kustomization",
            "resources": [format!("../../deploy/{base}")],
            "transformers": [format!("../../deploy/kustomize/follow/{follow}")],
            "namespace": "sidecars",
            "images": [{ "name": "lessor", "newName": "registry.test:5000/key/lessor", "newTag": "2" }] });
        std::fs::write(overlay.path().join("kustomization.yaml"), text.to_string()).unwrap();
        let text = said(kustomize(overlay.path().to_str().unwrap())).await;
        let built = objects(OLDEST_AND_NEWEST, &text).await;
        let injector = &of_kind(&built, "Deployment")["spec"]["template"]["spec"]["containers"][0];
        assert_eq!(injector["image"], "registry.test:5000/key/lessor:2", "{base}");
        let args: Vec<String> = serde_json::from_value(injector["args"].clone()).unwrap();
        let settings = defaults(&args[1..]);
        assert_eq!(settings.image, "registry.test:5000/key/lessor:2", "{base}");
        assert_eq!(settings.own_namespace.as_deref(), Some("sidecars"), "{base}");
        let service =
            format!("--service={}", of_kind(&built, "Service")["metadata"]["name"].as_str().unwrap());
        assert_eq!(args.contains(&service), follow == "webhook", "{base}: {args:?}");
        for webhook in of_kind(&built, "MutatingWebhookConfiguration")["webhooks"].as_array().unwrap() {
            assert_eq!(webhook["clientConfig"]["service"]["namespace"], "sidecars", "{base}");
            let rules = webhook["namespaceSelector"]["matchExpressions"].as_array().unwrap();
            let left_out = rules.iter().find(|rule| rule["key"] == "kubernetes.io/metadata.name").unwrap();
            let wanted = json!(["kube-system", "kube-node-lease", "kube-public", "sidecars"]);
            assert_eq!(left_out["values"], wanted, "{base}");
        }
        // What still says where it was: labels, the Secret of keys, and names of objects.
        for word in [".lessor.svc", "lessor/lessor", "=lessor:", "namespace: lessor"] {
            assert!(!text.contains(word), "{base}: {word} in {text}");
        }
    }
}

/// The pod that `lessor inject` makes of a template, told these flags.
fn injected(template: &Value, flags: &[&str]) -> Value {
    let mut pod = template.clone();
    (pod["apiVersion"], pod["kind"]) = ("v1".into(), "Pod".into());
    let flags: Vec<_> = flags.iter().map(|flag| (*flag).to_owned()).collect();
    let said = answer(&defaults(&flags), &Request::of_pod(pod.clone()));
    assert_eq!((said.verdict.as_str(), &said.warnings), ("injected", &vec![]), "{said:?}");
    patched(&pod, &said).unwrap()
}

#[tokio::test]
async fn the_snippet_has_the_sidecar_that_inject_gives() {
    let file = root().join("deploy/snippets/native-sidecar.yaml");
    let snippet = objects_in(OLDEST_AND_NEWEST, &[file]).await;
    let snippet = of_kind(&snippet, "Deployment")["spec"]["template"].clone();
    let mut bare = snippet.clone();
    bare["metadata"]["labels"]["lessor.dev/inject"] = "enabled".into();
    for list in ["initContainers", "volumes"] {
        bare["spec"].as_object_mut().unwrap().remove(list);
    }
    bare["spec"]["containers"][0].as_object_mut().unwrap().remove("env");
    let given = injected(&bare, &["--upstreams=openai"]);
    for at in ["/spec/initContainers", "/spec/volumes", "/spec/containers"] {
        assert!(snippet.pointer(at).is_some());
        assert_eq!(snippet.pointer(at), given.pointer(at), "{at}");
    }
}

fn example(name: &str) -> PathBuf {
    root().join("examples/kubernetes").join(name)
}

#[tokio::test]
async fn each_example_gets_its_sidecar_and_fits_the_restricted_profile() {
    let at = "/spec/template";
    for (file, at) in
        [("deployment.yaml", at), ("job.yaml", at), ("cronjob.yaml", "/spec/jobTemplate/spec/template")]
    {
        let objects = objects_in(OLDEST_AND_NEWEST, &[example(file)]).await;
        let template = objects[0].pointer(at).unwrap();
        assert_eq!(template["metadata"]["labels"]["lessor.dev/inject"], "enabled", "{file}");
        let text = std::fs::read_to_string(example(file)).unwrap();
        assert!(
            !text.contains("_API_KEY") && !text.contains("127.0.0.1"),
            "{file} sets what the label gives"
        );
        let pod = injected(template, &[]);
        assert_eq!(violations(&pod), [""; 0], "{file}");
        assert_eq!(containers(&pod)[0]["name"], "lessor", "{file}");
        let app = container(&pod, "chat");
        let variable = if file == "cronjob.yaml" { "HTTPS_PROXY" } else { "OPENAI_BASE_URL" };
        assert_eq!(values(&app, variable).len(), 1, "{file}");
        assert_eq!(values(&app, "OPENAI_API_KEY"), ["lessor-placeholder"], "{file}");
        let args = container(&pod, "lessor")["args"].to_string();
        let (grace, upstreams) = (args.contains("--grace=10s"), args.contains("--upstreams=openai"));
        assert_eq!((grace, upstreams), (file == "job.yaml", file == "job.yaml"), "{file}: {args}");
    }
}

#[tokio::test]
async fn the_examples_app_is_the_one_for_every_other_way() {
    let objects = objects_in(OLDEST_AND_NEWEST, &[example("app.yaml")]).await;
    let script = std::fs::read_to_string(root().join("examples/python/openai_chat.py")).unwrap();
    assert_eq!(objects[0]["data"]["openai_chat.py"], script);
}

/// Lays the files of a Secret out, and asks `lessor check` about the configuration among them.
async fn checked(files: &Map<String, Value>) {
    let dir = tempfile::tempdir().unwrap();
    let place = dir.path().to_str().unwrap();
    for (name, text) in files {
        std::fs::write(dir.path().join(name), text.as_str().unwrap().replace("/etc/lessor", place)).unwrap();
    }
    let mut command = Command::new(env!("CARGO_BIN_EXE_lessor"));
    command.args(["check", "--config"]).arg(dir.path().join("lessor.toml"));
    said(command).await;
}

#[tokio::test]
async fn the_secrets_hold_configurations_that_lessor_takes_and_only_placeholders() {
    let example = objects_in(OLDEST_AND_NEWEST, &[example("secret.yaml")]).await;
    let files = example[0]["stringData"].as_object().unwrap();
    for (name, text) in files.iter().filter(|(name, _)| *name != "lessor.toml") {
        assert!(text.as_str().unwrap().starts_with("put-the-"), "{name} holds {text}");
    }
    assert_eq!(example[0]["metadata"]["name"], defaults(&[]).secret);
    checked(files).await;
    let test = release(WITH_POLICIES, &["--set=injection.method=policy"]).await;
    checked(of_kind(&test, "Secret")["stringData"].as_object().unwrap()).await;
}

#[test]
fn the_chart_knows_the_catalogues_providers() {
    let catalogue: toml::Table =
        toml::from_str(&std::fs::read_to_string(root().join("config/providers.toml")).unwrap()).unwrap();
    let mut wanted = Map::new();
    for (name, provider) in catalogue.iter().filter(|(_, provider)| provider.get("env").is_some()) {
        let list = |key: &str| provider.get(key).and_then(toml::Value::as_array).cloned().unwrap_or_default();
        let addresses = list("env_base_url").into_iter().map(|variable| {
            let path = variable.get("path").and_then(toml::Value::as_str).unwrap_or_default();
            json!(format!("{}={path}", variable["name"].as_str().unwrap()))
        });
        let keys = list("env").into_iter().chain(list("env_other")).map(|key| json!(key.as_str().unwrap()));
        let provider =
            json!({ "addresses": addresses.collect::<Vec<_>>(), "keys": keys.collect::<Vec<_>>() });
        wanted.insert(name.clone(), provider);
    }
    let known = std::fs::read_to_string(chart().join("files/providers.json")).unwrap();
    assert_eq!(serde_json::from_str::<Map<String, Value>>(&known).unwrap(), wanted);
}

#[test]
fn nothing_under_deploy_is_without_its_test_and_each_file_says_first_what_it_is() {
    let mut folders = vec![root().join("deploy")];
    let known = ["render.sh", "helm/lessor", "manifests", "kustomize", "snippets/native-sidecar.yaml"];
    let known = known.map(|place| Path::new("deploy").join(place));
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            let short = path.strip_prefix(root()).unwrap();
            if path.is_dir() {
                folders.push(path);
                continue;
            }
            assert!(known.iter().any(|place| short.starts_with(place)), "{short:?} is in no test");
            let is_plain =
                !short.starts_with("deploy/helm") && path.extension().is_some_and(|end| end == "yaml");
            let text = std::fs::read_to_string(&path).unwrap();
            assert!(!is_plain || text.starts_with("# "), "{short:?} does not begin with what it is");
        }
    }
}

fn doc(name: &str) -> String {
    std::fs::read_to_string(root().join("docs").join(name)).unwrap()
}

#[test]
fn the_page_on_kubernetes_lists_every_annotation_that_is_read_and_no_other() {
    let page = doc("kubernetes.md");
    let rows = page.lines().filter_map(|line| line.strip_prefix("| `lessor.dev/")?.split('`').next());
    let listed: Vec<_> = rows.collect();
    assert!(listed.len() > 15, "{listed:?}");
    let warnings = |annotation: &str| {
        let pod = json!({ "apiVersion": "v1", "kind": "Pod",
            "metadata": { "labels": { "lessor.dev/inject": "true" }, "annotations": { annotation: "?" } },
            "spec": { "containers": [{ "name": "app", "image": "app:1" }] } });
        answer(&defaults(&[]), &Request::of_pod(pod)).warnings
    };
    for name in &listed {
        let said = warnings(&format!("lessor.dev/{name}"));
        assert!(!said.iter().any(|one| one.contains("is not known")), "{said:?}");
    }
    // Those that are read stand in one list of the injector's.
    let source = std::fs::read_to_string(root().join("src/control/kubernetes/settings.rs")).unwrap();
    let known = source.split("const KNOWN").nth(1).unwrap().split("];").next().unwrap();
    let known: Vec<_> = known.split('"').skip(1).step_by(2).collect();
    for name in known {
        assert!(listed.contains(&name), "the page does not say what lessor.dev/{name} is for");
    }
}

#[tokio::test]
async fn what_the_page_says_of_a_look_without_a_cluster_works_on_the_examples() {
    let page = doc("kubernetes.md");
    let lines: Vec<_> = page
        .lines()
        .skip_while(|line| !line.starts_with("python3 -c "))
        .take_while(|line| *line != "```")
        .collect();
    assert_eq!(lines.len(), 2, "{lines:?}");
    let dir = tempfile::tempdir().unwrap();
    std::fs::copy(example("deployment.yaml"), dir.path().join("deployment.yaml")).unwrap();
    let (python, lessor) = (tool("kubernetes/bin/python"), Path::new(env!("CARGO_BIN_EXE_lessor")));
    let words = lines.join("\n").replace("python3 ", "\"$1\" ").replace("lessor inject", "\"$2\" inject");
    let mut command = Command::new("sh");
    command.args(["-euc", &format!("cd \"$3\"\n{words}"), "sh"]).arg(python).arg(lessor).arg(dir.path());
    let pod: Value = serde_json::from_str(&said(command).await).unwrap();
    assert_eq!(containers(&pod)[0]["name"], "lessor");
}

#[tokio::test]
async fn a_guaranteed_pod_stays_so_by_the_four_annotations_that_the_page_names_and_by_no_less() {
    let amounts = json!({ "cpu": "1", "memory": "1Gi" });
    let mut pod = json!({ "metadata": { "labels": { "lessor.dev/inject": "true" }, "annotations": {} },
        "spec": { "containers": [{ "name": "app", "image": "app:1",
            "resources": { "requests": amounts, "limits": amounts } }] } });
    let guaranteed = |pod: &Value| {
        let pod = injected(pod, &[]);
        containers(&pod).iter().all(|one| one["resources"]["requests"] == one["resources"]["limits"])
    };
    let page = doc("kubernetes.md");
    for (what, amount) in [("cpu", "500m"), ("memory", "128Mi")] {
        for side in ["request", "limit"] {
            assert!(!guaranteed(&pod));
            let name = format!("lessor.dev/{what}-{side}");
            assert!(
                page.contains(&format!("`{name}` as")) || page.contains(&format!("`{name}`, ")),
                "{name}"
            );
            pod["metadata"]["annotations"][name] = amount.into();
        }
    }
    assert!(guaranteed(&pod));
}

#[tokio::test]
async fn values_and_files_that_the_pages_name_are_there() {
    let values = yaml(&chart().join("values.yaml")).await;
    let tables: Vec<_> = values.as_object().unwrap().keys().cloned().collect();
    for page in [doc("kubernetes.md"), doc("threat-model.md")] {
        for word in page.split('`').skip(1).step_by(2) {
            let word = word.split(['=', ':']).next().unwrap();
            let is_value =
                word.split_once('.').is_some_and(|(table, _)| tables.iter().any(|one| one == table));
            if is_value {
                assert!(!values[word.split('.').next().unwrap()].is_null());
                assert!(values.pointer(&format!("/{}", word.replace('.', "/"))).is_some(), "{word}");
            }
            if word.starts_with("deploy/") || word.starts_with("examples/") {
                assert!(root().join(word).exists(), "{word}");
            }
        }
    }
}

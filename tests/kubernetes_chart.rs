//! The chart: that it renders, to what an API server takes, and refuses what it does not know.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::pedantic, missing_docs, unreachable_pub)]

#[allow(dead_code)] // a part of it
mod inject_world;
mod kubernetes_world;

use base64::Engine as _;
use inject_world::{defaults, restricted::violations};
use kubernetes_world::{
    OLDEST_AND_NEWEST, WITH_POLICIES, all_of_kind, chart, lint, objects, of_kind, release, root, run, said,
    selects, template, yaml,
};
use lessor::control::kubernetes::Mode;
use serde_json::{Value, json};

const CA: &str = "-----BEGIN CERTIFICATE-----\nZm9y\n-----END CERTIFICATE-----\n";

/// A way of installing it, the versions of Kubernetes for which it must be right, and the settings.
type Way = (&'static str, &'static str, Vec<String>);

fn ways() -> Vec<Way> {
    let way =
        |name, versions, args: &[&str]| (name, versions, args.iter().map(|arg| (*arg).into()).collect());
    let file = |path: &str| format!("--values={}", root().join(path).display());
    let issuer = r#"--set-json=certificates.certManager.issuerRef={"kind":"ClusterIssuer","name":"corp"}"#;
    let ca = format!("--set-string=certificates.given.caBundle={CA}");
    let beta = "--set=injection.policy.apiVersion=v1beta1";
    vec![
        way("webhook", OLDEST_AND_NEWEST, &[]),
        way("for many", OLDEST_AND_NEWEST, &[&file("deploy/helm/lessor/values-ha.yaml")]),
        way("cert-manager", OLDEST_AND_NEWEST, &["--set=certificates.mode=certManager"]),
        way("an issuer", OLDEST_AND_NEWEST, &["--set=certificates.mode=certManager", issuer]),
        way("given", OLDEST_AND_NEWEST, &["--set=certificates.mode=given,certificates.secretName=tls", &ca]),
        way("policy", WITH_POLICIES, &["--set=injection.method=policy"]),
        way("policy in beta", "1.34,1.35", &["--set=injection.method=policy", beta, "--kube-version=1.34"]),
        way("all else", OLDEST_AND_NEWEST, &[&file("tests/kubernetes/values-all.yaml")]),
    ]
}

#[tokio::test]
async fn it_passes_lint_with_its_own_values_and_with_those_for_many() {
    said(lint(&[])).await;
    said(lint(&["--values", chart().join("values-ha.yaml").to_str().unwrap()])).await;
}

#[tokio::test]
async fn each_way_renders_twice_to_the_same_bytes_and_to_valid_objects_that_hold_no_secret() {
    for (name, versions, args) in ways() {
        let (once, twice) = (said(template(&args)).await, said(template(&args)).await);
        assert_eq!(once, twice, "{name}");
        let objects = objects(versions, &once).await;
        assert!(objects.len() >= 6, "{name}: {}", objects.len());
        for secret in all_of_kind(&objects, "Secret") {
            // What `helm test` of the policy lends: a word.
            assert_eq!(secret["metadata"]["annotations"]["helm.sh/hook"], "test", "{name}");
            assert_eq!(secret["stringData"]["placeholder"], "lessor-placeholder", "{name}");
        }
        assert!(!once.contains("tls.key:") && !once.contains("PRIVATE KEY"), "{name}");
        for webhook in all_of_kind(&objects, "MutatingWebhookConfiguration") {
            let bundles =
                webhook["webhooks"].as_array().unwrap().iter().map(|one| &one["clientConfig"]["caBundle"]);
            let given = base64::engine::general_purpose::STANDARD.encode(CA);
            let wanted = if name == "given" { json!(given) } else { Value::Null };
            assert!(bundles.into_iter().all(|bundle| *bundle == wanted), "{name}");
        }
        for object in &objects {
            let is_namespaced = !object["metadata"]["namespace"].is_null();
            assert!(!is_namespaced || object["metadata"]["namespace"].is_string(), "{name}: {object}");
        }
    }
}

/// What leads to each member of a values file that is no table itself.
fn leaves(path: &str, value: &Value, found: &mut Vec<(String, Value)>) {
    match value.as_object().filter(|table| !table.is_empty()) {
        Some(table) => {
            for (name, member) in table {
                let path = if path.is_empty() { name.clone() } else { format!("{path}.{name}") };
                leaves(&path, member, found);
            }
        }
        None => found.push((path.to_owned(), value.clone())),
    }
}

async fn refused(arg: &str) {
    let done = run(template(&[arg])).await;
    let said = String::from_utf8_lossy(&done.stderr);
    assert!(!done.status.success(), "{arg} was taken");
    assert!(said.contains("don't meet the specifications of the schema"), "{arg}: {said}");
}

#[tokio::test]
async fn a_value_of_another_type_or_of_an_unknown_name_is_refused_everywhere() {
    let values = yaml(&chart().join("values.yaml")).await;
    let mut all = Vec::new();
    leaves("", &values, &mut all);
    assert!(all.len() > 60, "{}", all.len());
    for (path, value) in &all {
        // Keys of a user's own, such as a node's labels.
        let path = path.split(".kubernetes").next().unwrap().split(".app.").next().unwrap();
        let wrong = if value.is_object() { json!("x") } else { json!({"x": {}}) };
        refused(&format!("--set-json={path}={wrong}")).await;
        if let Some((table, _)) = path.rsplit_once('.').filter(|(table, _)| !table.ends_with("podLabels")) {
            refused(&format!("--set-string={table}.unheardOf=?")).await;
        }
    }
    refused("--set-string=unheardOf=?").await;
    for arg in ["injection.method=magic", "certificates.mode=self", "injector.replicas=0", "sidecar.drain=1h"]
    {
        refused(&format!("--set={arg}")).await;
    }
}

#[tokio::test]
async fn what_cannot_work_is_refused_with_what_to_set() {
    let lacks_ca = "--set=certificates.mode=given,certificates.secretName=tls";
    for (arg, word) in [
        (lacks_ca, "certificates.given.caBundle must be"),
        (
            "--set=certificates.mode=given",
            "Secret with tls.crt and tls.key; and certificates.given.caBundle must be",
        ),
        ("--set=podDisruptionBudget.minAvailable=2", "minAvailable is 2 of injector.replicas 2"),
        ("--set-string=podDisruptionBudget.minAvailable=51%", "minAvailable is 51% of injector.replicas 2"),
        ("--set-string=podDisruptionBudget.minAvailable=100%", "minAvailable is 100% of"),
        (
            r"--set-string=injector.podLabels.lessor\.dev/inject=true",
            "injector.podLabels has lessor.dev/inject",
        ),
        (
            r"--set-string=injector.podLabels.app\.kubernetes\.io/name=x",
            "podLabels has app.kubernetes.io/name",
        ),
        (
            r"--set-string=commonLabels.app\.kubernetes\.io/instance=x",
            "commonLabels has app.kubernetes.io/inst",
        ),
        ("--set=sidecar.upstreams={opnai}", "sidecar.upstreams has opnai, which the catalogue does not know"),
        ("--set=certificates.mode=given,certificates.given.caBundle=x", "certificates.secretName must name"),
        ("--set=serviceAccount.create=false", "serviceAccount.name must be set"),
        ("--set=injection.method=policy", "needs Kubernetes 1.36; this is v1.35"),
        ("--set=injection.method=policy,injection.policy.apiVersion=v1beta1", "1.34; this is v1.33"),
    ] {
        let version = if arg.contains("v1beta1") { "1.33" } else { "1.35" };
        let done = run(template(&[arg, "--kube-version", version])).await;
        let said = String::from_utf8_lossy(&done.stderr);
        assert!(!done.status.success() && said.contains(word), "{arg}: {said}");
    }
}

#[tokio::test]
async fn an_amount_in_a_values_file_may_be_a_number_and_one_that_the_injector_refuses_fails_with_its_name() {
    let values = async |requests: &str, limits: &str, method: &str| {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("values.yaml");
        let text = format!("sidecar: {{resources: {{requests: {{{requests}}}, limits: {{{limits}}}}}}}\n");
        std::fs::write(&file, text).unwrap();
        let method = format!("--set=injection.method={method}");
        let args = ["--values", file.to_str().unwrap(), &method, "--kube-version=1.36"];
        run(template(&args)).await
    };
    for method in ["webhook", "policy"] {
        let done = values("cpu: 0.5, memory: 67108864", "cpu: 2, memory: 1073741824", method).await;
        let text = String::from_utf8(done.stdout).unwrap();
        assert!(text.contains("67108864") && text.contains("1073741824") && !text.contains("e+"), "{method}");
        if method == "webhook" {
            let objects = objects(OLDEST_AND_NEWEST, &text).await;
            let args = &of_kind(&objects, "Deployment")["spec"]["template"]["spec"]["containers"][0]["args"];
            let args: Vec<String> = serde_json::from_value(args.clone()).unwrap();
            assert_eq!(defaults(&args[1..]).resources.cpu_request.to_string(), "0.5");
        }
        for (requests, limits, word) in [
            ("cpu: 0, memory: 1Mi", "cpu: 1, memory: 1Mi", "requests.cpu is 0, must be an amount above 0"),
            ("cpu: 1m, memory: 0Mi", "cpu: 1, memory: 1Mi", "requests.memory is 0Mi, must be"),
            ("cpu: 0.0000001, memory: 1Mi", "cpu: 1, memory: 1Mi", "requests.cpu is 1e-07, must be"),
            ("cpu: 1m, memory: 1Mi", "cpu: -1, memory: 1Mi", "limits.cpu is -1, must be"),
            ("cpu: 2, memory: 1Mi", "cpu: 1999m, memory: 1Mi", "requests.cpu is above"),
            ("cpu: 1, memory: 1Gi", "cpu: 1, memory: 1000Mi", "requests.memory is above"),
            ("cpu: 1, memory: 65Mi", "cpu: 1, memory: 67108864", "requests.memory is above"),
        ] {
            let done = values(requests, limits, method).await;
            let said = String::from_utf8_lossy(&done.stderr);
            assert!(!done.status.success() && said.contains(word), "{method} {requests} {limits}: {said}");
        }
    }
}

#[tokio::test]
async fn an_injector_without_a_token_is_told_the_clusters_version_and_one_with_it_asks() {
    let given = format!("--set-string=certificates.given.caBundle={CA}");
    let modes: [&[&str]; 3] = [
        &["--set=certificates.mode=certManager"],
        &["--set=certificates.mode=given,certificates.secretName=tls", &given],
        &["--set=certificates.mode=selfManaged"],
    ];
    let args = async |mode: &[&str], more: &[&str]| -> Vec<String> {
        let objects = release(OLDEST_AND_NEWEST, &[mode, more].concat()).await;
        let pod = &of_kind(&objects, "Deployment")["spec"]["template"]["spec"];
        serde_json::from_value(pod["containers"][0]["args"].clone()).unwrap()
    };
    for mode in modes {
        let asks = mode[0].ends_with("selfManaged");
        for (version, is_native) in [("v1.28.3-gke.100", false), ("1.29", true), ("1.35", true)] {
            let args = args(mode, &["--kube-version", version]).await;
            let told = args.iter().any(|arg| arg.starts_with("--cluster-version=1."));
            assert_eq!(told, !asks, "{mode:?} {args:?}");
            assert!(asks || defaults(&args[1..]).native == is_native, "{mode:?} {version} {args:?}");
        }
        // Said once, or the injector would not start.
        let own = ["--set=injector.extraArgs={--cluster-version=1.28}", "--kube-version=1.35"];
        assert!(!defaults(&args(mode, &own).await[1..]).native);
        let forced = args(mode, &["--set-string=sidecar.native=true", "--kube-version=1.28"]).await;
        assert!(!forced.iter().any(|arg| arg.contains("cluster-version")), "{forced:?}");
    }
}

#[tokio::test]
async fn cert_manager_renews_the_certificate_under_a_ca_that_stays_and_that_the_webhook_trusts() {
    let issuer = r#"--set-json=certificates.certManager.issuerRef={"kind":"ClusterIssuer","name":"corp"}"#;
    for args in
        [vec!["--set=certificates.mode=certManager"], vec!["--set=certificates.mode=certManager", issuer]]
    {
        let objects = release(OLDEST_AND_NEWEST, &args).await;
        let named = |kind: &str, name: &Value| {
            let all = all_of_kind(&objects, kind).into_iter();
            all.filter(|one| one["metadata"]["name"] == *name).collect::<Vec<_>>()
        };
        let pod = &of_kind(&objects, "Deployment")["spec"]["template"]["spec"];
        let secret = &pod["volumes"][0]["secret"]["secretName"];
        let certificates = all_of_kind(&objects, "Certificate");
        let leaf = certificates.iter().find(|one| one["spec"]["secretName"] == *secret).unwrap();
        let webhook = of_kind(&objects, "MutatingWebhookConfiguration");
        let from = webhook["metadata"]["annotations"]["cert-manager.io/inject-ca-from"].as_str().unwrap();
        let trusted = named("Certificate", &from.strip_prefix("lessor/").unwrap().into())[0];
        if args.len() == 2 {
            assert_eq!((certificates.len(), all_of_kind(&objects, "Issuer").len()), (1, 0));
            assert_eq!((&leaf["spec"]["issuerRef"]["name"], trusted), (&json!("corp"), *leaf));
            continue;
        }
        // The leaf is signed by the CA that is trusted, and only that one signs itself.
        assert_ne!(leaf["spec"]["isCA"], true);
        let signer = named("Issuer", &leaf["spec"]["issuerRef"]["name"])[0];
        assert_eq!(signer["spec"]["ca"]["secretName"], trusted["spec"]["secretName"]);
        assert_ne!(trusted["spec"]["secretName"], *secret);
        assert_eq!(trusted["spec"]["isCA"], true);
        assert_eq!(trusted["spec"]["privateKey"]["rotationPolicy"], "Never");
        let root = named("Issuer", &trusted["spec"]["issuerRef"]["name"])[0];
        assert_eq!(root["spec"], json!({ "selfSigned": {} }));
        let hours = |one: &Value| -> u32 {
            one["spec"]["duration"].as_str().unwrap().trim_end_matches('h').parse().unwrap()
        };
        assert!(hours(trusted) > 10 * hours(leaf));
    }
}

#[tokio::test]
async fn what_stands_close_to_a_mistake_is_taken() {
    for (args, kube) in [
        (vec!["--set-json=injection.excludedNamespaces=null,sidecar.noProxy=null"], "1.36"),
        (vec!["--set-string=podDisruptionBudget.minAvailable=50%"], "1.36"),
        (vec!["--set=podDisruptionBudget.minAvailable=2,injector.replicas=3"], "1.36"),
        (vec!["--set=podDisruptionBudget.minAvailable=1,injector.replicas=1"], "1.36"),
        (vec!["--set=sidecar.upstreams={openai,inhouse},sidecar.ownProviders={inhouse}"], "1.36"),
        // A label that every object has may be another.
        (vec![r"--set-string=commonLabels.app\.kubernetes\.io/part-of=shop"], "1.36"),
    ] {
        for method in ["webhook", "policy"] {
            let more = [format!("--set=injection.method={method}"), format!("--kube-version={kube}")];
            let args: Vec<String> = args.iter().map(|arg| (*arg).to_owned()).chain(more).collect();
            let objects = release(WITH_POLICIES, &args).await;
            let is_shop = args[0].ends_with("=shop");
            let labels = |object: &Value| object["metadata"]["labels"]["app.kubernetes.io/part-of"] == "shop";
            let of_release = |object: &&Value| object["metadata"]["annotations"]["helm.sh/hook"].is_null();
            assert!(objects.iter().filter(of_release).all(|object| labels(object) == is_shop), "{args:?}");
        }
    }
}

#[tokio::test]
async fn on_a_nodes_network_the_injector_gives_up_its_ports_before_the_next_one_needs_them() {
    for (arg, unavailable, surge) in
        [("--set=injector.hostNetwork=true", 1, 0), ("--set=injector.hostNetwork=false", 0, 1)]
    {
        let objects = release(OLDEST_AND_NEWEST, &[arg]).await;
        let rolling = &of_kind(&objects, "Deployment")["spec"]["strategy"]["rollingUpdate"];
        assert_eq!(*rolling, json!({ "maxUnavailable": unavailable, "maxSurge": surge }), "{arg}");
    }
}

#[tokio::test]
async fn networks_that_are_no_providers_are_excepted_in_their_family_and_what_is_none_is_refused() {
    let base = "--set=networkPolicy.enabled=true,networkPolicy.apps.namespaces={shop}";
    let with = |list: &Value| format!("--set-json=networkPolicy.apps.exceptCidrs={list}");
    let mixed =
        json!(["fd00:ec2::254/128", "10.0.0.0/8", "2001:db8:1:2:3:4:5:6/128", "169.254.169.254/32", "::/1"]);
    for (list, four, six) in [
        (&mixed, json!([mixed[1], mixed[3]]), json!([mixed[0], mixed[2], mixed[4]])),
        (&json!(["10.0.0.0/8"]), json!(["10.0.0.0/8"]), Value::Null),
        (&json!([]), Value::Null, Value::Null),
    ] {
        let objects = release(OLDEST_AND_NEWEST, &[base, &with(list)]).await;
        let policies = all_of_kind(&objects, "NetworkPolicy");
        let apps = policies.iter().find(|one| one["metadata"]["namespace"] == "shop").unwrap();
        let to = &apps["spec"]["egress"][2]["to"];
        assert_eq!((&to[0]["ipBlock"]["cidr"], &to[0]["ipBlock"]["except"]), (&json!("0.0.0.0/0"), &four));
        assert_eq!((&to[1]["ipBlock"]["cidr"], &to[1]["ipBlock"]["except"]), (&json!("::/0"), &six));
    }
    for wrong in [
        "10.0.0.0",
        "10.0.0.0/0",
        "10.0.0/8",
        "10.0.0.256/32",
        "10.0.0.0/33",
        "010.0.0.0/8",
        "fd00::/0",
        "fd00::/129",
        "fd00:::1/64",
        "1::2::3/64",
        "1:2:3/64",
        "1:2:3:4:5:6:7::8/64",
        "fd00::g/64",
        "",
        "metadata",
    ] {
        let done = run(template(&[base, &with(&json!([wrong]))])).await;
        let said = String::from_utf8_lossy(&done.stderr);
        assert!(!done.status.success() && said.contains("which is no network such as"), "{wrong}: {said}");
    }
}

#[test]
fn every_value_has_a_comment_above_it_and_the_schema_knows_the_same_names() {
    let text = std::fs::read_to_string(chart().join("values.yaml")).unwrap();
    let mut before = "";
    for line in text.lines() {
        let is_comment = line.trim_start().starts_with('#');
        let (name, rest) = line.split_once(':').unwrap_or((line, ""));
        let is_leaf = !rest.trim().is_empty();
        // A value that stands in a list or table which has its comment needs none of its own.
        let inside =
            ["requests", "limits", "app.kubernetes.io/name", "kubernetes.io/os"].contains(&name.trim());
        if !is_comment && is_leaf && !inside {
            assert!(before.trim_start().starts_with('#'), "{line} has no comment");
        }
        before = line;
    }
}

#[tokio::test]
async fn the_schema_names_what_the_values_name() {
    let values = yaml(&chart().join("values.yaml")).await;
    let schema: Value =
        serde_json::from_str(&std::fs::read_to_string(chart().join("values.schema.json")).unwrap()).unwrap();
    fn names(schema: &Value, path: &str, found: &mut Vec<String>) {
        for (name, member) in schema["properties"].as_object().into_iter().flatten() {
            let path = format!("{path}.{name}");
            assert_eq!(schema["additionalProperties"], false, "{path}");
            if member["properties"].is_object() { names(member, &path, found) } else { found.push(path) }
        }
    }
    let mut known = Vec::new();
    names(&schema, "", &mut known);
    let optional = [".global", ".enabled", ".issuerRef.name", ".issuerRef.kind", ".issuerRef.group"];
    for path in known
        .iter()
        .filter(|path| !optional.iter().any(|one| path.ends_with(one) && path.matches('.').count() != 2))
    {
        let pointer = path.replace('.', "/");
        assert!(values.pointer(&pointer).is_some(), "values.yaml has no {path}");
    }
}

#[tokio::test]
async fn a_webhook_is_called_for_pods_that_ask_and_no_others_and_the_pods_word_counts_more() {
    for arg in ["--set=injection.method=webhook", "--set=injection.method=policy"] {
        let objects = release(WITH_POLICIES, &[arg]).await;
        let selectors: Vec<(Value, Value)> = if arg.ends_with("webhook") {
            let webhooks = of_kind(&objects, "MutatingWebhookConfiguration")["webhooks"].as_array().unwrap();
            assert!(
                webhooks.iter().all(|one| one["failurePolicy"] == "Fail" && one["sideEffects"] == "None")
            );
            webhooks
                .iter()
                .map(|one| (one["namespaceSelector"].clone(), one["objectSelector"].clone()))
                .collect()
        } else {
            assert_eq!(of_kind(&objects, "MutatingAdmissionPolicy")["spec"]["failurePolicy"], "Fail");
            let bindings = all_of_kind(&objects, "MutatingAdmissionPolicyBinding").into_iter();
            let bindings = bindings.map(|one| &one["spec"]["matchResources"]);
            bindings.map(|one| (one["namespaceSelector"].clone(), one["objectSelector"].clone())).collect()
        };
        assert_eq!(selectors.len(), 2, "{arg}");
        let called = |namespace: &str, of_namespace: Option<&str>, of_pod: Option<&str>| {
            let key = "lessor.dev/inject";
            let mut labels = vec![("kubernetes.io/metadata.name", namespace)];
            labels.extend(of_namespace.map(|value| (key, value)));
            let pod: Vec<_> = of_pod.map(|value| (key, value)).into_iter().collect();
            selectors
                .iter()
                .filter(|(space, object)| selects(space, &labels) && selects(object, &pod))
                .count()
        };
        let (yes, no, odd) =
            ([Some("true"), Some("enabled")], [Some("false"), Some("disabled")], Some("maybe"));
        for of_namespace in yes.into_iter().chain(no).chain([None, odd]) {
            let silent = usize::from(yes.contains(&of_namespace));
            assert_eq!(called("shop", of_namespace, None), silent, "{arg} {of_namespace:?}");
            for of_pod in yes.into_iter().chain([odd]) {
                // A word that nobody knows is called for, too: somebody has to say that it is none.
                assert_eq!(called("shop", of_namespace, of_pod), 1, "{arg} {of_namespace:?} {of_pod:?}");
                for system in ["kube-system", "kube-node-lease", "kube-public"] {
                    assert_eq!(called(system, of_namespace, of_pod), 0, "{arg} {system}");
                }
                let own = usize::from(arg.ends_with("policy")); // nothing of it waits for itself
                assert_eq!(called("lessor", of_namespace, of_pod), own, "{arg}");
            }
            for of_pod in no {
                assert_eq!(called("shop", of_namespace, of_pod), 0, "{arg} {of_namespace:?} {of_pod:?}");
            }
        }
    }
}

#[tokio::test]
async fn the_injector_may_touch_one_webhook_configuration_and_secrets_of_its_namespace_and_nothing_else() {
    let objects = release(OLDEST_AND_NEWEST, &[""; 0]).await;
    let cluster = &of_kind(&objects, "ClusterRole")["rules"];
    assert_eq!(
        *cluster,
        json!([{ "apiGroups": ["admissionregistration.k8s.io"], "resources": ["mutatingwebhookconfigurations"],
            "resourceNames": ["lessor-injector"], "verbs": ["get", "patch"] }])
    );
    assert_eq!(
        of_kind(&objects, "Role")["rules"],
        json!([
            { "apiGroups": [""], "resources": ["secrets"], "resourceNames": ["lessor-injector-tls"],
                "verbs": ["get", "update"] },
            { "apiGroups": [""], "resources": ["secrets"], "verbs": ["create"] }
        ])
    );
    let pod = &of_kind(&objects, "Deployment")["spec"]["template"]["spec"];
    assert_eq!(pod["automountServiceAccountToken"], true);
    for (name, versions, args) in
        ways().into_iter().filter(|(name, ..)| !["webhook", "for many", "all else"].contains(name))
    {
        let objects = release(versions, &args).await;
        for kind in ["ClusterRole", "ClusterRoleBinding", "Role", "RoleBinding"] {
            assert!(all_of_kind(&objects, kind).is_empty(), "{name}: {kind}");
        }
        for deployment in all_of_kind(&objects, "Deployment") {
            assert_eq!(
                deployment["spec"]["template"]["spec"]["automountServiceAccountToken"], false,
                "{name}"
            );
        }
    }
}

#[tokio::test]
async fn the_injector_runs_twice_restricted_and_with_a_command_line_that_it_knows() {
    let mut seen = 0;
    for (name, versions, args) in ways() {
        let objects = release(versions, &args).await;
        for deployment in all_of_kind(&objects, "Deployment") {
            seen += 1;
            let pod = &deployment["spec"]["template"];
            let host: Vec<_> =
                violations(pod).into_iter().filter(|found| !found.contains("hostNetwork")).collect();
            assert_eq!(host, [""; 0], "{name}");
            assert_eq!(pod["metadata"]["labels"]["lessor.dev/inject"], "disabled", "{name}");
            let args = pod["spec"]["containers"][0]["args"].as_array().unwrap();
            let args: Vec<String> = args.iter().map(|arg| arg.as_str().unwrap().to_owned()).collect();
            assert_eq!(args[0], "inject");
            // Parsed as the program parses it: a flag that it does not know would fail here.
            let settings = defaults(&args[1..]);
            let wanted = if name == "all else" { (Mode::Both, 10, false) } else { (Mode::BaseUrl, 25, true) };
            assert_eq!((settings.mode, settings.drain, settings.native), wanted, "{name}");
            if name != "all else" {
                assert!(deployment["spec"]["replicas"].as_u64().unwrap() >= 2, "{name}");
                assert_eq!(all_of_kind(&objects, "PodDisruptionBudget").len(), 1, "{name}");
            }
        }
        for pod in all_of_kind(&objects, "Pod") {
            assert_eq!(violations(pod), [""; 0], "{name}");
        }
    }
    assert_eq!(seen, 6, "all but the policies");
}

#[tokio::test]
async fn the_chart_is_of_this_version() {
    let about = yaml(&chart().join("Chart.yaml")).await;
    assert_eq!(
        (&about["version"], &about["appVersion"]),
        (&json!(env!("CARGO_PKG_VERSION")), &json!(env!("CARGO_PKG_VERSION")))
    );
}

use super::*;

fn served(trust: bool) -> Served {
    let provider = |name: &str, variable: &str, path: &str, keys: &[&str]| ServedProvider {
        name: name.into(),
        own_address: None,
        hosts: vec![format!("api.{name}.com")],
        base_url: vec![BaseUrlVariable { name: variable.into(), path: path.into() }],
        keys: keys.iter().map(|key| (*key).to_owned()).collect(),
    };
    let files = Trust {
        ca: "/run/lessor-1.ca.pem".into(),
        bundle: "/run/lessor-1.bundle.pem".into(),
        java: None,
        wgetrc: Some("/run/lessor-1.wgetrc".into()),
    };
    Served {
        proxy: vec!["127.0.0.1:8321".parse().unwrap()],
        admin: None,
        providers: vec![
            provider("openai", "OPENAI_BASE_URL", "/v1", &["OPENAI_API_KEY"]),
            provider("anthropic", "ANTHROPIC_BASE_URL", "", &["ANTHROPIC_API_KEY", "ANTHROPIC_AUTH_TOKEN"]),
        ],
        secret_variables: vec!["REDIS_PASSWORD".into()],
        apps: Vec::new(),
        trust: trust.then_some(files),
    }
}

fn planned(served: &Served, present: &[(&str, &str)], overrides: bool) -> Changes {
    let present = present.iter().map(|(name, value)| ((*name).into(), (*value).into())).collect();
    let loss = Loss::default();
    changes(served, &Caller { proxy: served.proxy[0], app: None, overrides, present: &present, loss })
}

#[test]
fn a_bare_child_gets_addresses_proxies_in_both_cases_and_placeholders() {
    let plan = planned(&served(false), &[], false);
    let set = |name: &str| plan.set.get(name).map(String::as_str);
    assert_eq!(set("OPENAI_BASE_URL"), Some("http://127.0.0.1:8321/openai/v1"));
    assert_eq!(set("ANTHROPIC_BASE_URL"), Some("http://127.0.0.1:8321/anthropic"));
    assert_eq!((set("OPENAI_API_KEY"), set("ANTHROPIC_API_KEY")), (Some(PLACEHOLDER), Some(PLACEHOLDER)));
    for name in ["http_proxy", "HTTP_PROXY"] {
        assert_eq!(set(name), Some("http://127.0.0.1:8321"));
    }
    for name in ["no_proxy", "NO_PROXY"] {
        assert_eq!(set(name), Some("localhost,.localhost,127.0.0.1,::1"));
    }
    assert_eq!(set("NODE_USE_ENV_PROXY"), Some("1"));
    assert_eq!(
        set("JAVA_TOOL_OPTIONS"),
        Some(
            "-Dhttp.proxyHost=127.0.0.1 -Dhttp.proxyPort=8321 \
             -Dhttp.nonProxyHosts=localhost|*.localhost|127.0.0.1|[::1]"
        )
    );
    for name in ["HTTPS_PROXY", "ALL_PROXY", "SSL_CERT_FILE", "ANTHROPIC_AUTH_TOKEN"] {
        assert_eq!(set(name), None, "{name}");
    }
    assert!(plan.unset.is_empty());
    assert!(plan.notes.len() == 1 && plan.notes[0].starts_with("HTTPS_PROXY"), "{:?}", plan.notes);
}

#[test]
fn with_a_ca_https_goes_through_too_and_each_trust_variable_gets_the_file_that_it_means() {
    let plan = planned(&served(true), &[("SSL_CERT_DIR", "/certs"), ("CURL_CA_BUNDLE", "/mine.pem")], false);
    assert_eq!(plan.set["HTTPS_PROXY"], "http://127.0.0.1:8321");
    assert_eq!(plan.set["https_proxy"], "http://127.0.0.1:8321");
    for name in
        ["SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "AWS_CA_BUNDLE", "NODE_EXTRA_CA_CERTS"]
    {
        assert_eq!(plan.set[name], "/run/lessor-1.bundle.pem", "{name}");
    }
    assert_eq!(plan.set["SYSTEM_WGETRC"], "/run/lessor-1.wgetrc");
    assert!(plan.notes[0].starts_with("SSL_CERT_DIR is kept") && plan.notes.len() == 1, "{:?}", plan.notes);
    assert!(!plan.set["JAVA_TOOL_OPTIONS"].contains("https."), "no trust store, no https in Java");
}

#[test]
fn no_secret_is_left_not_under_its_name_nor_numbered_nor_in_another_variable() {
    let present = [
        ("OPENAI_API_KEY", "sk-canary-0123456789"),
        ("OPENAI_API_KEY_2", "sk-b"),
        ("OPENAI_API_KEY_17", "sk-c"),
        ("OPENAI_API_KEY_FILE", "/run/key"),
        ("ANTHROPIC_AUTH_TOKEN", "sk-ant-d"),
        ("MY_COPY", "Bearer sk-canary-0123456789"),
        ("REDIS_PASSWORD", "hunter2"),
        ("LESSOR_ADMIN_TOKEN", "t"),
        ("GROQ_API_KEY", "gsk-not-served"),
    ];
    let plan = planned(&served(false), &present, false);
    let gone: Vec<_> = plan.unset.iter().map(String::as_str).collect();
    let expected =
        ["LESSOR_ADMIN_TOKEN", "MY_COPY", "OPENAI_API_KEY_17", "OPENAI_API_KEY_2", "REDIS_PASSWORD"];
    assert_eq!(gone, expected);
    assert_eq!(plan.set["ANTHROPIC_AUTH_TOKEN"], PLACEHOLDER);
    assert!(!format!("{plan:?}").contains("canary"));
}

#[test]
fn what_is_set_already_is_kept_and_said_without_its_password_unless_overridden() {
    let present = [
        ("OPENAI_BASE_URL", "https://u:hunter2@gateway.corp/v1?key=x"),
        ("HTTP_PROXY", "http://u:hunter2@proxy.corp:3128"),
        ("ANTHROPIC_BASE_URL", "http://127.0.0.1:8321/anthropic/"),
        ("NO_PROXY", "corp.example,.openai.com"),
        ("no_proxy", "10.0.0.0/8"),
    ];
    let plan = planned(&served(false), &present, false);
    for name in ["OPENAI_BASE_URL", "HTTP_PROXY", "http_proxy"] {
        assert!(!plan.set.contains_key(name) && !plan.unset.contains(name), "{name}");
    }
    assert_eq!(
        plan.set["NO_PROXY"],
        "10.0.0.0/8,corp.example,.openai.com,localhost,.localhost,127.0.0.1,::1"
    );
    let notes = plan.notes.join("\n");
    for part in [
        "OPENAI_BASE_URL is kept as https://gateway.corp/v1:",
        "HTTP_PROXY is kept as http://proxy.corp:3128:",
    ] {
        assert!(notes.contains(part), "{part} in {notes}");
    }
    assert!(notes.contains("NO_PROXY names api.openai.com"), "{notes}");
    assert!(!notes.contains("hunter2") && !notes.contains("ANTHROPIC_BASE_URL"), "{notes}");
    let plan = planned(&served(false), &present, true);
    assert_eq!(plan.set["OPENAI_BASE_URL"], "http://127.0.0.1:8321/openai/v1");
    assert_eq!(plan.set["http_proxy"], "http://127.0.0.1:8321");
}

#[test]
fn an_address_that_lessor_took_for_its_own_is_replaced() {
    let mut served = served(false);
    served.providers[0].own_address = Some("https://mine.openai.azure.com/".into());
    let plan = planned(&served, &[("OPENAI_BASE_URL", "https://Mine.openai.azure.com")], false);
    assert_eq!(plan.set["OPENAI_BASE_URL"], "http://127.0.0.1:8321/openai/v1");
}

#[test]
fn an_apps_token_is_its_placeholder_and_its_proxy_password() {
    let (served, present, token) = (served(false), BTreeMap::new(), Secret::new("t0ken/@".into()));
    let caller = Caller {
        proxy: served.proxy[0],
        app: Some(("checkout", &token)),
        overrides: false,
        present: &present,
        loss: Loss::default(),
    };
    let plan = changes(&served, &caller);
    assert_eq!(plan.set["OPENAI_API_KEY"], "t0ken/@");
    assert_eq!(plan.set["HTTP_PROXY"], "http://checkout:t0ken%2F%40@127.0.0.1:8321");
}

#[test]
fn of_several_listeners_a_child_gets_one_of_ipv4_and_of_all_addresses_loopback() {
    for (listeners, expected) in [
        (&["[::1]:1", "127.0.0.1:2", "10.0.0.1:3"][..], Some("127.0.0.1:2")),
        (&["[::1]:1"], Some("[::1]:1")),
        (&["[::]:1"], Some("[::1]:1")),
        (&["0.0.0.0:1"], Some("127.0.0.1:1")),
        (&[], None),
    ] {
        let mut served = served(true);
        served.proxy = listeners.iter().map(|at| at.parse().unwrap()).collect();
        assert_eq!(served.door(), expected.map(|at| at.parse().unwrap()), "{listeners:?}");
    }
    let mut served = served(true);
    served.proxy = vec!["[::1]:1".parse().unwrap()];
    let plan = planned(&served, &[], false);
    assert_eq!(plan.set["NO_PROXY"], "localhost,.localhost,127.0.0.1,::1");
    assert_eq!(plan.set["OPENAI_BASE_URL"], "http://[::1]:1/openai/v1");
    assert!(plan.notes.len() == 1 && plan.notes[0].starts_with("Node's fetch"), "{:?}", plan.notes);
}

#[test]
fn java_goes_by_https_only_with_a_trust_store_whose_path_can_be_said_and_that_replaces_another() {
    let mut served = served(true);
    let options = |served: &Served, now: &str| planned(served, &[("JAVA_TOOL_OPTIONS", now)], false);
    let trust = served.trust.as_mut().unwrap();
    trust.java = Some("/run/lessor-1.ca-bundle.p12".into());
    let plan = options(&served, "-Xmx1g -Djavax.net.ssl.trustStore=/corp.jks");
    let said = &plan.set["JAVA_TOOL_OPTIONS"];
    assert!(said.starts_with("-Xmx1g ") && said.contains(" -Dhttps.proxyHost=127.0.0.1 "), "{said}");
    assert!(said.ends_with(
        "-Djavax.net.ssl.trustStore=/run/lessor-1.ca-bundle.p12 -Djavax.net.ssl.trustStoreType=PKCS12"
    ));
    assert!(plan.notes.iter().any(|note| note.contains("its trust store is replaced")), "{:?}", plan.notes);
    assert!(options(&served, said).notes.is_empty(), "a second time nothing is new");
    served.trust.as_mut().unwrap().java = Some("/my run/lessor-1.ca-bundle.p12".into());
    assert!(!options(&served, "").set["JAVA_TOOL_OPTIONS"].contains("https."));
}

#[test]
fn a_second_run_changes_nothing_and_says_nothing_new() {
    let served = served(true);
    let first = planned(&served, &[], false);
    let present: Vec<_> = first.set.iter().map(|(name, value)| (name.as_str(), value.as_str())).collect();
    let second = planned(&served, &present, false);
    assert_eq!(second.set, first.set);
    assert_eq!((second.unset, second.notes), (BTreeSet::new(), Vec::new()));
}

#[test]
fn what_would_be_trusted_no_longer_is_said_and_what_is_in_the_bundle_too_is_not() {
    let dir = tempfile::tempdir().unwrap();
    let authorities = [(); 3].map(|()| authority());
    let pem = |which: &[usize]| -> String { which.iter().map(|at| authorities[*at].as_str()).collect() };
    let file = |name: &str, text: String| {
        std::fs::write(dir.path().join(name), text).unwrap();
        dir.path().join(name).display().to_string()
    };
    let mut served = served(true);
    let trust = served.trust.as_mut().unwrap();
    (trust.ca, trust.bundle) = (file("ca", pem(&[0])).into(), file("bundle", pem(&[1, 0])).into());
    trust.wgetrc = Some(file("wgetrc", "user_agent = x\nca_certificate = y\n".into()).into());
    let trust = served.trust.clone().unwrap();
    let loss = |set: &[(&str, String)]| {
        Loss::of(&trust, &set.iter().map(|(name, value)| ((*name).into(), value.clone())).collect())
    };
    let covered = [
        ("SSL_CERT_FILE", file("roots", pem(&[1]))),
        ("CURL_CA_BUNDLE", "/not-there.pem".to_owned()),
        ("AWS_CA_BUNDLE", String::new()),
        ("SYSTEM_WGETRC", file("covered", " user_agent = x\nca_certificate = z\n".into())),
    ];
    assert_eq!(loss(&covered), Loss::default());
    let uncovered = [
        ("NODE_EXTRA_CA_CERTS", file("corp", pem(&[1, 2]))),
        ("REQUESTS_CA_BUNDLE", trust.bundle.display().to_string()),
        ("SYSTEM_WGETRC", file("more", "timeout = 3\n".into())),
    ];
    let found = loss(&uncovered);
    let names: Vec<_> = found.variables.iter().map(String::as_str).collect();
    assert_eq!((names, found.no_roots), (vec!["NODE_EXTRA_CA_CERTS", "SYSTEM_WGETRC"], false));
    std::fs::write(&trust.bundle, pem(&[0])).unwrap();
    assert!(loss(&[]).no_roots);
    let present: BTreeMap<_, _> =
        uncovered.iter().map(|(name, value)| ((*name).into(), value.clone())).collect();
    let loss = Loss { no_roots: true, ..found };
    let caller = Caller { proxy: served.proxy[0], app: None, overrides: false, present: &present, loss };
    let notes = changes(&served, &caller).notes;
    assert!(
        notes[0].starts_with(&format!("NODE_EXTRA_CA_CERTS={}, SYSTEM_WGETRC=", uncovered[0].1)),
        "{notes:?}"
    );
    assert!(notes[1].contains("install them (ca-certificates)") && notes.len() == 2, "{notes:?}");
}

fn authority() -> String {
    let key = rcgen::KeyPair::generate().unwrap();
    rcgen::CertificateParams::new(Vec::new()).unwrap().self_signed(&key).unwrap().pem()
}

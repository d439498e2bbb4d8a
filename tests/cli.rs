//! The commands: what they print, for people and for programs, and how they exit.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::pedantic, missing_docs, unreachable_pub)]

mod support;

use support::lessor::Home;
use support::plays::openai;
use support::{Key, Lessor, Play, Provider, Setup};

async fn start() -> (Provider, Lessor) {
    let provider = Provider::start(openai).await;
    let lessor = Setup::openai(&provider).key(Key::new("a")).key(Key::new("b")).start().await;
    (provider, lessor)
}

fn home_with(toml: &str) -> Home {
    let home = Home::default();
    std::fs::write(home.path().join("lessor.toml"), toml).unwrap();
    home
}

const KEY: &str = "[[keys]]\nid = \"a\"\nprovider = \"openai\"\nsecret = { env = \"A\" }\n";

#[tokio::test]
async fn version_names_itself() {
    let home = Home::default();
    let version = env!("CARGO_PKG_VERSION");
    assert!(home.run(&["version"]).await.ok().contains(version));
    assert!(home.run(&["--version"]).await.ok().contains(version));
    assert!(home.run(&["version", "--json"]).await.json().to_string().contains(version));
}

#[tokio::test]
async fn help_shows_every_command() {
    let home = Home::default();
    let ran = home.run(&["--help"]).await;
    for command in ["run", "check", "status", "keys", "ready", "inject", "version"] {
        assert!(ran.ok().contains(command), "{command}");
        home.run(&[command, "--help"]).await.ok();
    }
    let unknown = home.run(&["stauts"]).await;
    assert_eq!(unknown.code, Some(2));
    assert!(unknown.stderr.contains("status"), "names the nearest: {}", unknown.stderr);
}

const QUOTA: &str = "HTTP/1.1 429 Too Many Requests\r\nretry-after: 7\r\ncontent-type: application/json\r\n\r\n\
    {\"error\":{\"message\":\"You exceeded your current quota.\",\"type\":\"insufficient_quota\",\"code\":\"insufficient_quota\"}}";

#[tokio::test]
async fn check_explains_a_saved_answer_with_the_rule_that_fires_and_what_would_follow() {
    let home = Home::default();
    std::fs::write(home.path().join("answer.txt"), QUOTA).unwrap();
    let ran = home.run(&["check", "--explain", "openai", "429", "answer.txt"]).await;
    for line in [
        "openai answered 429",
        "the catalogue's status 429 code insufficient_quota",
        "class   quota",
        "code    insufficient_quota",
        "wait    7s, from header retry-after",
        "the key's group is exhausted for 7s",
        "another key is tried",
    ] {
        assert!(ran.ok().contains(line), "{line}: {}", ran.stdout);
    }
    let json = home.run(&["check", "--json", "--explain", "openai", "429", "answer.txt"]).await.json();
    let said =
        (&json["class"], &json["subject"], &json["wait_ms"], &json["rule"]["origin"], &json["another_key"]);
    assert_eq!(said, (&"quota".into(), &"group".into(), &7000.into(), &"provider".into(), &true.into()));
    // The status of the command line counts, and a body may come alone, by standard input, or not at all.
    let other = home.run(&["check", "--json", "--explain", "openai", "503", "answer.txt"]).await.json();
    assert_eq!((&other["class"], &other["status"]), (&"overloaded".into(), &503.into()));
    let mut command = std::process::Command::new("sh");
    let script =
        "printf '%s' '{\"code\":\"invalid_api_key\"}' | \"$LESSOR\" check --json --explain openai 401 -";
    command.args(["-c", script]).env("LESSOR", env!("CARGO_BIN_EXE_lessor"));
    let bad = support::lessor::run(command).await.json();
    assert_eq!(
        (&bad["class"], &bad["proven"], &bad["wait_ms"]),
        (&"invalid".into(), &true.into(), &().into())
    );
    let bare = home.run(&["check", "--json", "--explain", "openai", "429"]).await.json();
    assert_eq!((&bare["class"], &bare["body"]), (&"rate".into(), &"unreadable".into()));
}

#[test]
fn whoever_reads_a_page_may_have_gone_before_it_is_printed() {
    use std::process::{Command, Stdio};
    for told_to in [&["check", "--explain", "openai", "429", "-"][..], &["version", "--json"]] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_lessor"));
        command.args(told_to).env_clear().stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut running = command.spawn().unwrap();
        drop(running.stdout.take());
        drop(running.stdin.take());
        let ended = running.wait_with_output().unwrap();
        let said = String::from_utf8_lossy(&ended.stderr);
        assert!(ended.status.success() && said.is_empty(), "{told_to:?}: {} {said}", ended.status);
    }
}

#[tokio::test]
async fn the_schema_takes_the_reference_and_the_catalogue_and_refuses_what_check_refuses() {
    let home = Home::default();
    home.write("schema.json", home.run(&["check", "--schema"]).await.ok());
    // With every setting said, each once: of alternatives below each other the first.
    let mut seen = std::collections::BTreeSet::new();
    let mut table = "";
    let said = include_str!("../config/lessor.toml").lines().filter_map(|line| {
        let line =
            line.strip_prefix('#').filter(|rest| !rest.is_empty() && !rest.starts_with(' ')).unwrap_or(line);
        table = if line.starts_with('[') { line } else { table };
        let field = line.split_once(" = ").map(|(field, _)| (table, field));
        field.is_none_or(|field| seen.insert(field)).then_some(line)
    });
    home.write("reference.toml", &said.collect::<Vec<_>>().join("\n"));
    let catalogue = include_str!("../config/providers.toml");
    let catalogue: Vec<String> = catalogue
        .lines()
        .map(|line| {
            line.strip_prefix('[').map_or(line.to_owned(), |rest| match rest {
                rest if rest.starts_with('[') => format!("[[providers.{}", &rest[1..]),
                rest => format!("[providers.{rest}"),
            })
        })
        .collect();
    home.write("catalogue.toml", &catalogue.join("\n"));
    let wrong = [
        "[lease]\nttl = \"30 seconds\"\n",
        "[leases]\n",
        "[[keys]]\nid = \"a\"\nprovider = \"openai\"\nsecret = \"sk-raw\"\n",
        "[[keys]]\nid = \"a\"\nprovider = \"openai\"\n",
        "[ranking]\nstrategy = \"best\"\n",
        "[providers.x]\nrules = [{ status = 999, class = \"rate\" }]\n",
        "[proxy]\nalpn = [\"h3\"]\n",
    ];
    let mut files = vec!["reference.toml".to_owned(), "catalogue.toml".to_owned()];
    for (number, text) in wrong.iter().enumerate() {
        home.write(&format!("{number}.toml"), text);
        files.push(format!("{number}.toml"));
        let ran = home.run(&["check", "--config", &format!("{number}.toml")]).await;
        assert_eq!(ran.code, Some(2), "{text}: {ran:?}");
    }
    let mut python = support::sdk::python("tests/sdks/schema.py");
    python.current_dir(home.path()).arg("schema.json").args(&files);
    let found = support::lessor::run(python).await.ok().to_owned();
    let found: Vec<Vec<String>> = found.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(found.len(), files.len());
    assert_eq!((&found[0], &found[1]), (&vec![], &vec![]));
    for (found, text) in found[2..].iter().zip(wrong) {
        assert!(!found.is_empty(), "it takes {text}");
    }
}

#[tokio::test]
async fn check_explains_where_a_request_goes_and_what_a_status_means_without_any_rule() {
    let one = |name: &str, more: &str| {
        format!("[providers.{name}]\nbase_url = \"https://{name}.example\"\n{more}\n")
    };
    let shared = "rules = [{ status = [429], class = \"rate\", scope = \"provider_model\" }]";
    let tables = one("shared", shared) + &one("bare", "remove_rules = [\"*\"]");
    let home = home_with(&format!("{tables}{KEY}"));
    let explain = async |provider: &str, status: &str| {
        let args = ["check", "--config", "lessor.toml", "--explain", provider, status];
        let said = home.run(&args).await.ok().to_owned();
        (said, home.run(&[&args[..], &["--json"]].concat()).await.json())
    };
    let (said, json) = explain("shared", "429").await;
    let client =
        "this answer, unchanged, for no key is lent meanwhile; where the rest ends within queue.max_wait";
    assert!(said.contains(client), "{said}");
    assert_eq!((&json["subject"], &json["another_key"]), (&"provider_model".into(), &false.into()));
    for (status, class) in [("429", "rate"), ("401", "caller"), ("500", "overloaded"), ("503", "overloaded")]
    {
        let (said, json) = explain("bare", status).await;
        assert!(said.contains("none; the status alone decides"), "{said}");
        assert_eq!(json["class"], class, "{status}");
    }
}

#[tokio::test]
async fn check_explains_by_the_files_rules_without_its_secrets() {
    let table = "[providers.openai]\nremove_rules = [\"insufficient_quota\"]\nremove_waits = [\"retry-after\"]\n\
        rules = [{ status = [429], phrase = [\"current quota\"], class = \"overloaded\" }]\n";
    let home = home_with(&format!("{table}{KEY}[providers.mine]\nbase_url = \"https://mine.example\"\n"));
    std::fs::write(home.path().join("answer.txt"), QUOTA).unwrap();
    let explain = async |args: &[&str]| {
        home.run(&[&["check", "--config", "lessor.toml", "--json", "--explain"], args].concat()).await
    };
    let json = explain(&["openai", "429", "answer.txt"]).await.json();
    let said = (&json["class"], &json["rule"]["origin"], &json["wait_ms"]);
    assert_eq!(said, (&"overloaded".into(), &"user".into(), &().into()), "{json}");
    assert_eq!(explain(&["mine", "402"]).await.json()["rule"]["origin"], "generic");
    for (args, why) in [
        (&["openia", "429"][..], "openia"),
        (&["openai", "many"], "many"),
        (&["openai", "429", "missing.txt"], "missing.txt"),
        (&["openai"], "PROVIDER"),
    ] {
        let ran = explain(args).await;
        assert_eq!(ran.code, Some(2), "{ran:?}");
        assert!(ran.stderr.contains(why), "{ran:?}");
    }
}

#[tokio::test]
async fn check_accepts_a_good_file_without_serving() {
    let home = home_with(KEY);
    home.run_with(&["check", "--config", "lessor.toml"], &[("A", "sk-a")]).await.ok();
    let json = home.run_with(&["check", "--config", "lessor.toml", "--json"], &[("A", "sk-a")]).await;
    assert_eq!(json.code, Some(0));
    assert!(json.json().is_object());
    let by_variable = home.run_with(&["check"], &[("A", "sk-a"), ("LESSOR_CONFIG", "lessor.toml")]).await;
    by_variable.ok();
}

#[tokio::test]
async fn check_says_which_store_without_its_credentials() {
    let home = home_with(&format!("[store]\nurl = {{ env = \"REDIS_URL\" }}\n{KEY}"));
    let variables = [("A", "sk-a"), ("REDIS_URL", "rediss://lessor:canary@redis.internal/2")];
    let ran = home.run_with(&["check", "--config", "lessor.toml"], &variables).await;
    assert!(ran.ok().contains("store rediss://redis.internal:6379/2"), "{ran:?}");
    let json = home.run_with(&["check", "--config", "lessor.toml", "--json"], &variables).await.json();
    assert_eq!(json["store"]["kind"], "redis");
    assert_eq!(json["store"]["url"], "rediss://redis.internal:6379/2");
    assert!(!format!("{ran:?}{json}").contains("canary"));
}

#[tokio::test]
async fn check_names_every_mistake_at_once_with_line_caret_and_the_nearest_name() {
    let toml = format!(
        "[lease]\nttl = \"30s\"\nheartbeat = \"45s\"\n\n[queue]\nmax_wiat = \"10s\"\n\n{KEY}max_concurrent_uses = 0\n"
    );
    let home = home_with(&toml);
    let ran = home.run_with(&["check", "--config", "lessor.toml"], &[("A", "sk-a")]).await;
    assert!(ran.code == Some(2), "{ran:?}");
    let said = ran.stdout.clone() + &ran.stderr;
    for part in [
        "lessor.toml:3",
        "lease.heartbeat",
        "lessor.toml:6",
        "max_wiat",
        "max_wait",
        "lessor.toml:12",
        "max_concurrent_uses",
        "^",
    ] {
        assert!(said.contains(part), "no {part} in\n{said}");
    }
}

#[tokio::test]
async fn check_names_a_secret_that_cannot_be_had_and_two_keys_with_one_secret() {
    let home = home_with(KEY);
    let ran = home.run(&["check", "--config", "lessor.toml"]).await;
    assert!(ran.code == Some(2));
    assert!((ran.stdout + &ran.stderr).contains('A'));
    let twice = home_with(&format!("{KEY}{}", KEY.replace("id = \"a\"", "id = \"b\"")));
    let ran = twice.run_with(&["check", "--config", "lessor.toml"], &[("A", "sk-a")]).await;
    assert!(ran.code == Some(2), "two keys with one secret");
    let said = ran.stdout + &ran.stderr;
    assert!(said.contains("secret") && !said.contains("sk-a"), "{said}");
}

#[tokio::test]
async fn check_says_so_when_the_file_is_missing_or_no_toml() {
    let home = home_with("[listen\n");
    for file in ["lessor.toml", "nowhere.toml"] {
        let ran = home.run(&["check", "--config", file]).await;
        assert!(ran.code == Some(2));
        assert!((ran.stdout + &ran.stderr).contains(file));
    }
}

#[tokio::test]
async fn the_reference_configuration_is_a_good_one() {
    let home = Home::default();
    let file = concat!(env!("CARGO_MANIFEST_DIR"), "/config/lessor.toml");
    let text = std::fs::read_to_string(file).unwrap();
    for section in
        ["[listen]", "[store]", "[lease]", "[queue]", "[retry]", "[timeouts]", "[shutdown]", "[[keys]]"]
    {
        assert!(text.contains(section), "no {section}");
    }
    let variables =
        [("OPENAI_API_KEY", "sk-a"), ("OPENAI_API_KEY_B", "sk-b"), ("CHECKOUT_TOKEN", "token-of-checkout")];
    home.run_with(&["check", "--config", file], &variables).await.ok();
}

#[tokio::test]
async fn status_and_keys_show_what_lessor_holds() {
    let (_provider, lessor) = start().await;
    let status = lessor.cli(&["status"]).await;
    for part in ["openai", "a", "available"] {
        assert!(status.ok().contains(part), "no {part} in\n{}", status.stdout);
    }
    assert!(lessor.cli(&["status", "--json"]).await.json().is_object());
    let list = lessor.cli(&["keys", "list"]).await;
    assert!(list.ok().contains("available"), "{}", list.stdout);
    let json = lessor.cli(&["keys", "list", "--json"]).await.json();
    let ids: Vec<_> =
        json["keys"].as_array().unwrap().iter().map(|key| key["id"].as_str().unwrap()).collect();
    assert_eq!(ids, ["a", "b"]);
    assert_eq!(json["keys"][0]["in_use"], 0);
}

#[tokio::test]
async fn a_key_can_be_disabled_enabled_and_checked() {
    let (provider, lessor) = start().await;
    lessor.cli(&["keys", "disable", "openai/a"]).await.ok();
    assert_eq!(lessor.status("a").await, "disabled");
    for _ in 0..4 {
        assert_eq!(lessor.chat().await.header("x-lessor-key"), "b");
    }
    lessor.cli(&["keys", "enable", "openai/a"]).await.ok();
    assert_eq!(lessor.status("a").await, "available");
    let before = provider.count();
    lessor.cli(&["keys", "check", "openai/a"]).await.ok();
    let seen = provider.request(before + 1).await;
    assert_eq!((seen.key(), seen.method.as_str()), ("sk-a", "GET"));
    let unknown = lessor.cli(&["keys", "disable", "openai/nobody"]).await;
    assert!(unknown.code == Some(1) && unknown.stderr.contains("nobody"), "{unknown:?}");
}

#[tokio::test]
async fn ready_exits_with_0_only_when_ready() {
    let (_provider, mut lessor) = start().await;
    lessor.cli(&["ready"]).await.ok();
    for key in ["openai/a", "openai/b"] {
        lessor.cli(&["keys", "disable", key]).await.ok();
    }
    assert_eq!(lessor.cli(&["ready"]).await.code, Some(4), "no usable key");
    assert_eq!(lessor.admin("/readyz").await.status, 503);
    assert_eq!(lessor.admin("/healthz").await.status, 200);
    lessor.crash();
    let ran = lessor.cli(&["ready"]).await;
    assert_eq!(ran.code, Some(3), "nobody there");
    let ran = lessor.cli(&["status"]).await;
    assert!(ran.code == Some(3) && !ran.stderr.is_empty(), "{ran:?}");
}

#[tokio::test]
async fn a_store_that_is_away_is_named_by_every_command_and_the_sidecar_is_alive_but_not_ready() {
    let provider = Provider::start(openai).await;
    // A port that was free a moment ago: nobody listens there.
    let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let setup = Setup::openai(&provider).key(Key::new("a"));
    let lessor = setup.set("store.url", &format!("\"redis://{free}\"")).start().await;
    let status = lessor.cli(&["status"]).await;
    assert_eq!(status.code, Some(5), "{status:?}");
    for part in [format!("redis://{free}, down"), "store_unavailable".into(), "not known".into()] {
        assert!(status.stdout.contains(&part), "no {part} in\n{}", status.stdout);
    }
    for command in [&["keys", "list"][..], &["leases", "list"], &["keys", "disable", "openai/a"]] {
        let ran = lessor.cli(command).await;
        assert!(ran.code == Some(5) && ran.stderr.contains("store_unavailable"), "{command:?}: {ran:?}");
    }
    let ready = lessor.cli(&["ready"]).await;
    assert!(ready.code == Some(4) && ready.stdout.contains("store_unavailable"), "{ready:?}");
    assert_eq!(lessor.admin("/readyz").await.status, 503);
    assert_eq!(lessor.admin("/healthz").await.status, 200);
    assert_eq!(lessor.chat().await.header("x-lessor-error"), "store_unavailable");
}

#[tokio::test]
async fn the_cli_finds_its_sidecar_by_url_too() {
    let (_provider, lessor) = start().await;
    let url = format!("http://{}", lessor.admin_door().host());
    let home = lessor.home();
    home.run(&["status", "--admin", &url]).await.ok();
    home.run_with(&["status"], &[("LESSOR_ADMIN", &url)]).await.ok();
    let socket = lessor.admin_socket().display().to_string();
    home.run(&["status", "--admin", &format!("unix:{}", socket.trim_start_matches("unix:"))]).await.ok();
}

#[tokio::test]
async fn the_admin_listener_serves_gets_on_loopback_and_no_more_without_a_token() {
    use support::Request;
    let (_provider, lessor) = start().await;
    let door = lessor.admin_door();
    let ask =
        async |request: Request| support::client::send(&door, request).await.unwrap().whole().await.unwrap();
    assert_eq!(ask(Request::get("/v1/keys")).await.status, 200);
    let post = ask(Request::new("POST", "/v1/keys/openai/a/disable")).await;
    assert!([401, 403].contains(&post.status), "{}", post.status);
    assert_eq!(lessor.status("a").await, "available");
    let rebound = ask(Request::get("/v1/keys").header("host", "evil.example")).await;
    assert!([400, 403, 421].contains(&rebound.status), "{}", rebound.status);
    let foreign = ask(Request::get("/v1/keys").header("origin", "https://evil.example")).await;
    assert_eq!(foreign.status, 403);
}

#[tokio::test]
async fn with_an_admin_token_v1_needs_it_and_the_rest_does_not() {
    use support::Request;
    let provider = Provider::start(openai).await;
    let setup = Setup::openai(&provider).key(Key::new("a")).env("ADMIN_TOKEN", "token-of-admin");
    let lessor = setup.set("admin.token", "{ env = \"ADMIN_TOKEN\" }").start().await;
    let door = lessor.admin_door();
    let ask =
        async |request: Request| support::client::send(&door, request).await.unwrap().whole().await.unwrap();
    for path in ["/healthz", "/readyz", "/metrics"] {
        assert_eq!(ask(Request::get(path)).await.status, 200, "{path}");
    }
    assert_eq!(ask(Request::get("/v1/keys")).await.status, 401);
    assert_eq!(ask(Request::get("/v1/keys").header("authorization", "Bearer wrong")).await.status, 401);
    let token = "Bearer token-of-admin";
    assert_eq!(ask(Request::get("/v1/keys").header("authorization", token)).await.status, 200);
    let post = Request::new("POST", "/v1/keys/openai/a/disable").header("authorization", token);
    assert_eq!(ask(post).await.status, 200);
}

#[tokio::test]
async fn the_admin_socket_is_the_users_alone() {
    use std::os::unix::fs::PermissionsExt as _;
    let (_provider, lessor) = start().await;
    let socket = lessor.admin_socket().to_owned();
    assert_eq!(std::fs::metadata(&socket).unwrap().permissions().mode() & 0o777, 0o600);
    let port = lessor.authority().rsplit(':').next().unwrap().to_owned();
    assert!(socket.display().to_string().contains(&port), "{socket:?} carries the proxy's port");
    assert!(socket.starts_with(lessor.home().path().join("run")), "{socket:?} is in the runtime directory");
}

#[tokio::test]
async fn metrics_count_what_happened() {
    let provider = Provider::start(|seen| {
        if seen.path() == "/v1/held" { Play::sse().event("one").silence() } else { openai(seen) }
    })
    .await;
    let lessor = Setup::openai(&provider).key(Key::new("a")).start().await;
    assert_eq!(lessor.chat().await.status, 200);
    let mut held = lessor.open(support::Request::get("/openai/v1/held")).await;
    held.read_to("one").await;
    let text = lessor.admin("/metrics").await.text();
    for part in [
        "lessor_requests_total{",
        "lessor_request_duration_seconds",
        "lessor_overhead_seconds",
        "lessor_leases_active{",
        "lessor_lease_acquire_total{",
        "lessor_lease_acquire_seconds",
        "lessor_lease_wait_seconds",
        "lessor_lease_heartbeat_failed_total",
        "lessor_lease_lost_total",
        "lessor_lease_expired_total",
        "lessor_key_status{",
        "lessor_queue_depth 0",
        "lessor_store_errors_total",
        "lessor_store_up 1",
    ] {
        assert!(text.contains(part), "no {part} in\n{text}");
    }
    let active = text.lines().find(|line| line.starts_with("lessor_leases_active{")).unwrap();
    assert!(active.ends_with(" 1") && active.contains("key=\"a\""), "{active}");
}

#[tokio::test]
async fn a_file_that_cannot_be_read_is_told_as_that_by_every_command_that_is_given_one() {
    let home = Home::default();
    let nobody = "nofile.toml: cannot be read: No such file";
    for args in [
        &["run"][..],
        &["check"],
        &["status"],
        &["ready"],
        &["keys", "list"],
        &["events"],
        &["ca", "path"],
        &["env"],
        &["exec", "--", "true"],
        &["check", "--explain", "openai", "429"],
    ] {
        let ran = home.run(&[&["--config", "nofile.toml"], args].concat()).await;
        assert_eq!(ran.code, Some(2), "{args:?}: {ran:?}");
        assert!(ran.stderr.contains(nobody), "{args:?}: {ran:?}");
    }
    let ran = home.run(&["doctor", "--config", "nofile.toml"]).await;
    assert_eq!(ran.code, Some(2), "{ran:?}");
    assert!(ran.stdout.starts_with("fail  config  nofile.toml: cannot be read"), "{ran:?}");
    assert!(!ran.stdout.contains("listener"), "{ran:?}");
}

#[tokio::test]
async fn a_sidecar_of_another_file_is_not_asked_in_place_of_the_one_that_the_file_describes() {
    let (_provider, lessor) = start().await;
    let support::Door::Tcp(admin) = lessor.admin_door() else { panic!("the admin listener is on TCP") };
    // A user for whom neither sidecar's socket is where it is looked for.
    let listening =
        |proxy: &str| home_with(&format!("listen = {{ proxy = {proxy:?}, admin = \"{admin}\" }}\n{KEY}"));
    let other = listening(&format!("127.0.0.1:{}", support::free_port()));
    for args in [&["status"][..], &["ready"], &["keys", "list"], &["events"], &["ca", "path"]] {
        let ran = other.run(&[&["--config", "lessor.toml"], args].concat()).await;
        assert_eq!(ran.code, Some(3), "{args:?}: {ran:?}");
        let said = format!("http://{admin}: another sidecar answers there: it serves {}", lessor.authority());
        assert!(ran.stderr.contains(&said), "{said} is not in {ran:?}");
    }
    let own = listening(&lessor.authority()).run(&["status", "--config", "lessor.toml"]).await;
    assert!(own.ok().contains("openai/a") && own.stderr.contains(&admin.to_string()), "{own:?}");
    // A no says whose it is.
    let nobody = lessor.cli(&["keys", "check", "openai/nosuch"]).await;
    let from = format!("(unknown_key, says unix:{})", lessor.admin_socket().display());
    assert!(nobody.code == Some(1) && nobody.stderr.contains(&from), "{nobody:?}");
}

#[tokio::test]
async fn check_counts_one_as_one_and_warns_of_a_base_url_that_doubles_the_path() {
    let at = |url: &str| format!("providers.openai.base_url = {url:?}\n{KEY}");
    let home = home_with(&at("https://api.openai.com/v1"));
    let ran = home.run_with(&["check", "--config", "lessor.toml"], &[("A", "sk-a")]).await;
    assert_eq!(ran.ok(), "lessor.toml: ok, 1 key of 1 provider, store memory:\n");
    let warning = "warning: providers.openai.base_url ends with /v1, with which the paths of openai begin, too: \
                   /openai/v1/… goes to https://api.openai.com/v1/v1/…; leave /v1 out";
    assert!(ran.stderr.contains(warning), "{ran:?}");
    for fine in ["https://api.openai.com", "https://gateway.internal/openai", "https://gateway.internal/v12"]
    {
        std::fs::write(home.path().join("lessor.toml"), at(fine)).unwrap();
        let ran = home.run_with(&["check", "--config", "lessor.toml"], &[("A", "sk-a")]).await;
        ran.ok();
        assert!(!ran.stderr.contains("base_url"), "{fine}: {ran:?}");
    }
}

#[tokio::test]
async fn a_key_is_asked_for_by_its_id_or_by_the_name_that_commands_print() {
    let (_provider, lessor) = start().await;
    let ask = |key: &str| lessor.ask(support::Request::get("/openai/v1/models").header("x-lessor-key", key));
    for key in ["b", "openai/b"] {
        assert_eq!(ask(key).await.header("x-lessor-key"), "b", "{key}");
    }
    let foreign = ask("anthropic/b").await;
    foreign.is_error(400, "bad_request");
    assert!(foreign.text().contains("this request is for `openai`") && foreign.text().contains("write `b`"));
    ask("openai/b/c").await.is_error(400, "bad_request");
}

#[tokio::test]
async fn status_says_of_a_key_with_many_rests_a_few_and_how_many_more_and_json_says_all() {
    let provider = Provider::start(|seen| match seen.path() {
        "/v1/chat/completions" => support::plays::rate_limited("60"),
        _ => openai(seen),
    })
    .await;
    let lessor = Setup::openai(&provider).key(Key::new("a")).start().await;
    for model in 0..7 {
        lessor.ask(support::lessor::chat(&format!("gpt-{model}"))).await;
    }
    let rests = async || {
        let rests = lessor.key("a").await["cooldowns"].as_array().unwrap().len();
        (rests == 7).then_some(())
    };
    support::eventually("seven models rest", rests).await;
    let page = lessor.cli(&["keys", "list"]).await;
    assert_eq!(page.ok().matches("rate (429").count(), 4, "{page:?}");
    assert!(page.stdout.contains("and 3 more: --json shows them"), "{page:?}");
}

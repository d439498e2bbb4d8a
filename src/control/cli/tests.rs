use std::sync::atomic::Ordering;

use super::*;
use crate::control::admin::tests::Admin;
use crate::model::KeyStatus;

fn parsed_from(line: &str) -> Result<Cli, clap::Error> {
    Cli::try_parse_from(line.split_whitespace())
}

fn ask(line: &str) -> (Ask, Options) {
    match parsed_from(line).unwrap() {
        Cli { command: Command::Ask(ask), options } => (ask, options),
        other => panic!("{other:?}"),
    }
}

async fn said(line: &str, token: Option<&str>) -> Result<Page, Failure> {
    let (ask, options) = ask(line);
    let listen = |_: &Path| Err("no file here".to_owned());
    reply(&ask, &options, token.map(|token| Secret::new(token.into())), listen).await
}

#[test]
fn the_command_line_is_sound_and_its_help_names_examples_and_exit_codes() {
    use clap::CommandFactory as _;
    let mut command = Cli::command();
    command.clone().debug_assert();
    let help = command.render_long_help().to_string();
    for part in ["Examples:", "Exit codes:", "3  no sidecar was reached", "LESSOR_ADMIN", "LESSOR_CONFIG"] {
        assert!(help.contains(part), "{part} in {help}");
    }
    for name in ["run", "check", "status", "keys", "leases", "ca", "ready", "version"] {
        assert!(command.find_subcommand(name).is_some(), "{name}");
    }
}

#[test]
fn options_stand_before_or_after_the_command() {
    let after = parsed_from("lessor run --config a.toml --json").unwrap();
    let before = parsed_from("lessor --json --config a.toml run").unwrap();
    for cli in [after, before] {
        assert!(matches!(cli.command, Command::Run(_)) && cli.options.json);
        assert_eq!(cli.options.config(), Some(Path::new("a.toml")));
    }
    let empty = Options { config: Some(OsString::new()), admin: Some(" ".into()), json: false };
    assert!(empty.config().is_none() && empty.admin().is_none(), "an empty variable names nothing");
}

#[test]
fn a_key_is_named_provider_slash_id_and_anything_else_is_a_usage_error() {
    let (ask, _) = ask("lessor keys disable openai/openai-a");
    assert_eq!(request(&ask).path, "/v1/keys/openai/openai-a/disable");
    for wrong in ["openai-a", "openai/", "openai/a/b", "OPENAI/a", "openai/../status"] {
        let refused = parsed_from(&format!("lessor keys disable {wrong}")).unwrap_err();
        assert_eq!(refused.exit_code(), 2, "{wrong}");
    }
    assert_eq!(parsed_from("lessor leases revoke 7").unwrap_err().exit_code(), 2);
}

#[tokio::test]
async fn status_shows_pools_keys_and_leases_in_columns() {
    let admin = Admin::start(|_| {}).await;
    let page = said(&format!("lessor status --admin {}", admin.socket.display()), None).await.unwrap();
    assert_eq!(page.exit, Exit::Ok);
    for line in [
        "lessor   0.0.0, up ",
        "ready    yes\n",
        "store    memory:, up\n",
        "owner    this-sidecar\n",
        "proxy    127.0.0.1:40404\n",
        "requests 1 hold a key, 2 wait for one\n",
        "POOL            KEYS  AVAILABLE  IN USE  FALLBACK\n",
        "openai/default  2     2          2/16    vip\n",
        "openai/openai-a  default  available  1/8     16m 39s ago\n",
        "with its request",
    ] {
        assert!(page.text.contains(line), "{line:?} in\n{}", page.text);
    }
}

#[tokio::test]
async fn leases_of_the_whole_fleet_stand_with_app_end_token_and_whose_they_are() {
    let admin = Admin::start(|_| {}).await;
    let lease = admin.store.join();
    let at = admin.socket.display();
    let page = said(&format!("lessor leases list --admin {at}"), None).await.unwrap().text;
    let mut lines = page.lines();
    assert_eq!(
        lines.next().unwrap().split_whitespace().collect::<Vec<_>>(),
        ["LEASE", "KEY", "POOL", "APP", "ENDS", "TOKEN", "OWNER"]
    );
    assert!(lines.next().unwrap().ends_with("anonymous  with its request  7      this sidecar"), "{page}");
    let other =
        format!("{lease}  openai/openai-z  batch    checkout   in 12s            8      another-sidecar");
    assert_eq!(lines.next().unwrap(), other);
    let gone = said(&format!("lessor leases revoke {lease} --admin {at}"), None).await.unwrap();
    assert_eq!((gone.exit, gone.text), (Exit::Ok, format!("{lease} revoked\n")));
    let keys = said(&format!("lessor keys list --admin {at}"), None).await.unwrap().text;
    assert!(keys.contains("openai/openai-z  batch    available, not configured here"), "{keys}");
}

#[tokio::test]
async fn a_store_that_is_down_is_said_and_exits_5_and_status_shows_what_is_known_without_it() {
    let admin = Admin::start(|_| {}).await;
    admin.store.fail();
    let at = admin.socket.display();
    let status = said(&format!("lessor status --admin {at}"), None).await.unwrap();
    assert_eq!(status.exit, Exit::StoreFailed);
    for line in [
        "ready    no\n         store_unavailable: store is unavailable: connection refused\n",
        "store    memory:, down\n",
        "requests 1 hold a key, 2 wait for one\n",
        "not known while the store does not answer",
    ] {
        assert!(status.text.contains(line), "{line:?} in\n{}", status.text);
    }
    assert!(!status.text.contains("no live leases"), "nothing is said of what is not known");
    let json = said(&format!("lessor status --json --admin {at}"), None).await.unwrap();
    assert!(json.text.contains("\"up\": false") && json.exit == Exit::StoreFailed, "{}", json.text);
    for line in ["leases list", "keys list", "keys disable openai/openai-a"] {
        let failure = said(&format!("lessor {line} --admin {at}"), None).await.unwrap_err();
        assert_eq!(failure.exit(), Exit::StoreFailed, "{line}");
        let expected = "store is unavailable: connection refused; no key is lent until it answers again \
                        (store_unavailable, says unix:";
        assert_eq!(failure.to_string(), format!("{expected}{at})"), "{line}");
    }
    assert_eq!(said(&format!("lessor ready --admin {at}"), None).await.unwrap().exit, Exit::NotReady);
}

#[tokio::test]
async fn json_is_the_apis_own() {
    let admin = Admin::start(|_| {}).await;
    let page = said(&format!("lessor keys list --json --admin {}", admin.at), None).await.unwrap();
    let json: serde_json::Value = serde_json::from_str(&page.text).unwrap();
    assert_eq!(json["keys"][0]["id"], "openai-a");
}

#[tokio::test]
async fn a_key_is_switched_off_over_the_socket_and_its_row_shown() {
    let admin = Admin::start(|_| {}).await;
    let line = format!("lessor keys disable openai/openai-a --admin {}", admin.socket.display());
    let page = said(&line, None).await.unwrap();
    assert!(page.text.contains("disabled"), "{}", page.text);
}

#[tokio::test]
async fn a_check_that_finds_a_bad_key_fails() {
    let admin = Admin::start(|_| {}).await;
    let line = |key| format!("lessor keys check openai/{key} --admin {}", admin.socket.display());
    assert_eq!(said(&line("openai-a"), None).await.unwrap().exit, Exit::Ok);
    let bad = said(&line("openai-b"), None).await.unwrap();
    assert_eq!(bad.exit, Exit::Failed);
    assert_eq!(bad.text, "openai/openai-b is not good: asked (invalid, HTTP 401)\n");
}

#[tokio::test]
async fn a_lease_that_is_not_there_is_a_failure_with_the_apis_words() {
    let admin = Admin::start(|_| {}).await;
    let line = format!("lessor leases revoke {} --admin {}", LeaseId::fresh(), admin.socket.display());
    let failure = said(&line, None).await.unwrap_err();
    assert_eq!(failure.exit(), Exit::Failed);
    assert!(
        failure.to_string().contains("no such live lease") && failure.to_string().contains("unknown_lease")
    );
}

#[tokio::test]
async fn ready_exits_0_when_ready_and_4_with_the_reasons_when_not() {
    let admin = Admin::start(|_| {}).await;
    let line = format!("lessor ready --admin http://{}", admin.at);
    let ready = said(&line, None).await.unwrap();
    assert_eq!((ready.exit, ready.text.as_str()), (Exit::Ok, "ready\n"));
    admin.store.set(KeyStatus::Disabled);
    admin.draining.store(true, Ordering::SeqCst);
    let not = said(&line, None).await.unwrap();
    assert_eq!(not.exit, Exit::NotReady);
    assert!(not.text.starts_with("not ready\n  shutting_down") && not.text.contains("key_unavailable"));
}

#[tokio::test]
async fn the_token_opens_the_tcp_door_and_its_lack_is_named() {
    let admin = Admin::start(|config| config.admin_token = Some(Secret::new("t0ken".into()))).await;
    let line = format!("lessor keys disable openai/openai-a --admin http://{}", admin.at);
    let without = said(&line, None).await.unwrap_err();
    assert_eq!(without.exit(), Exit::Failed);
    assert!(without.to_string().contains("set LESSOR_ADMIN_TOKEN"), "{without}");
    let wrong = said(&line, Some("other")).await.unwrap_err().to_string();
    assert!(wrong.contains("LESSOR_ADMIN_TOKEN is not its token") && !wrong.contains("other"), "{wrong}");
    assert_eq!(said(&line, Some("t0ken")).await.unwrap().exit, Exit::Ok);
}

#[tokio::test]
async fn a_sidecar_that_is_not_there_is_named_with_what_to_do() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("none.sock");
    let failure = said(&format!("lessor status --admin {}", path.display()), None).await.unwrap_err();
    assert_eq!(failure.exit(), Exit::Unreachable);
    let text = failure.to_string();
    assert!(
        text.contains(&format!("unix:{}: not there", path.display())) && text.contains("lessor run"),
        "{text}"
    );
}

#[tokio::test]
async fn without_a_socket_the_tcp_door_is_read_with_a_note_and_never_asked_for_a_change() {
    let admin = Admin::start(|_| {}).await;
    let doors = || {
        let none = PathBuf::from("/nonexistent/lessor-1.sock");
        vec![
            Endpoint::Unix { path: none, named: false },
            Endpoint::Tcp { at: admin.at.to_string(), named: false, of: Vec::new() },
        ]
    };
    let (door, note) =
        call::reach(doors(), &request(&Ask::Status { explain: false }), false).await.ok().unwrap();
    assert_eq!(door.to_string(), format!("http://{}", admin.at));
    assert!(note.unwrap().contains("only reads"));
    let (change, _) = ask("lessor keys disable openai/openai-a");
    let tried = call::reach(doors(), &request(&change), false).await.err().unwrap();
    assert_eq!(tried.len(), 2);
    assert!(tried[1].cause.contains("LESSOR_ADMIN_TOKEN"), "{tried:?}");
    assert!(call::reach(doors(), &request(&change), true).await.is_ok());
}

#[test]
fn the_configuration_says_where_the_sidecar_is_and_admin_overrules_it() {
    let listen = |proxy: &str, admin: &str| Listen {
        proxy: vec![Address::Tcp(proxy.parse().unwrap())],
        admin: Address::Tcp(admin.parse().unwrap()),
        ..crate::control::admin::tests::config().listen
    };
    let (_, options) = ask("lessor status --config a.toml");
    let found = doors(&options, |_| Ok(listen("127.0.0.1:9001", "0.0.0.0:9002"))).unwrap();
    assert!(found[0].to_string().ends_with("lessor-9001.sock"), "{found:?}");
    assert_eq!(found.last().unwrap().to_string(), "http://127.0.0.1:9002");
    let refused = doors(&options, |_| Err("a.toml:1: no such field".into())).unwrap_err();
    assert_eq!(refused.exit(), Exit::Usage);
    let (_, options) = ask("lessor status --config a.toml --admin 10.0.0.7:8322");
    let found = doors(&options, |_| Err("never read".into())).unwrap();
    assert_eq!(found, [Endpoint::named("http://10.0.0.7:8322").unwrap()]);
}

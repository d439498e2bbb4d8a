//! Secrets that commands give: at the start, again when they are due, and not at all while they fail.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::pedantic, missing_docs, unreachable_pub)]

mod support;

use std::sync::Arc;
use std::time::Duration;

use support::lessor::{Home, chat, field};
use support::plays::{invalid_key, openai};
use support::{Gate, Key, Lessor, Play, Provider, Request, Setup, eventually, ms};

const CANARY: &str = "sk-CANARY-of-command-7f3a9c51e2";

/// A script that prints this.
fn printing(text: &str) -> String {
    format!("#!/bin/sh\nprintf '%s\\n' '{text}'\n")
}

/// The key `a`, whose secret is printed by `./secret.sh` of the home.
fn key(more: &str) -> Key {
    Key::new("a").from(&format!("command = [\"./secret.sh\", \"first\", \"$HOME `id` 'x'\"]{more}"))
}

async fn started(setup: Setup, home: &Arc<Home>) -> Lessor {
    let mut lessor = setup.spawn_in(home.clone());
    lessor.listening().await;
    lessor
}

fn warnings(lessor: &Lessor) -> Vec<String> {
    let lines = lessor.log_lines();
    let warned = lines.iter().filter(|line| field(line, "level") == "WARN");
    warned.map(|line| field(line, "message")).filter(|text| text.contains("command")).collect()
}

/// Waits until a key has this status.
async fn comes_to(lessor: &Lessor, id: &str, status: &str) {
    eventually(&format!("{id} is {status}"), async || (lessor.status(id).await == status).then_some(()))
        .await;
}

#[tokio::test]
async fn a_command_runs_without_a_shell_and_sees_no_other_key_and_its_secret_is_nowhere() {
    let provider = Provider::start(openai).await;
    let home = Arc::new(Home::default());
    let script = format!(
        "#!/bin/sh\nfor one in \"$0\" \"$@\"; do printf '<%s>' \"$one\"; done >args\n\
         tr '\\0' '\\n' </proc/$$/environ >environ\ntr '\\0' '\\n' </proc/$$/cmdline >cmdline\n\
         wc -c >stdin\nls -l /proc/$$/fd >fds\necho 'asking for it' >&2\nprintf '%s\\n' '{CANARY}'\n"
    );
    home.write("secret.sh", &script);
    let setup = Setup::openai(&provider).key(key("")).key(Key::new("b").secret("sk-of-b-CANARY-0123456"));
    let setup = setup.set("apps.x.token", "{ env = \"APP_TOKEN\" }").env("APP_TOKEN", "token-of-CANARY-app");
    let setup = setup.env("ANTHROPIC_API_KEY_2", "sk-ant-CANARY-unused").env("VAULT_ADDR", "http://v");
    let lessor = started(setup.env("RUST_LOG", "trace"), &home).await;
    let ask =
        chat("gpt-4o-mini").header("x-lessor-key", "a").header("x-lessor-app-token", "token-of-CANARY-app");
    let answer = lessor.ask(ask).await;
    assert_eq!(answer.status, 200, "{}", answer.text());
    assert_eq!(provider.keys_seen(), [CANARY]);
    let read = |name: &str| std::fs::read_to_string(home.path().join(name)).unwrap();
    assert!(read("args").ends_with("secret.sh><first><$HOME `id` 'x'>"), "{}", read("args"));
    assert_eq!(read("stdin").trim(), "0");
    let environ = read("environ");
    assert!(environ.contains("VAULT_ADDR=http://v") && environ.contains("PATH="), "{environ}");
    let log = lessor.log();
    let shown = [lessor.cli(&["keys", "list", "--json"]).await, lessor.cli(&["status"]).await];
    let shown = shown.map(|ran| ran.stdout + &ran.stderr).concat();
    let metrics = lessor.admin("/metrics").await.text();
    for (what, text) in [
        ("environ", environ),
        ("cmdline", read("cmdline")),
        ("the log", log),
        ("what is shown", shown),
        ("metrics", metrics),
    ] {
        assert!(!text.contains("CANARY"), "a secret is in {what}: {text}");
    }
}

#[tokio::test]
async fn a_key_whose_command_fails_is_pending_until_it_gives_a_secret() {
    let provider = Provider::start(openai).await;
    let home = Arc::new(Home::default());
    home.write("secret.sh", "#!/bin/sh\nexit 3\n");
    let lessor = started(Setup::openai(&provider).key(key("")), &home).await;
    assert_eq!(lessor.status("a").await, "pending");
    let answer = lessor.chat().await;
    assert_eq!(
        (answer.status, answer.header("x-lessor-error")),
        (503, "key_unavailable"),
        "{}",
        answer.text()
    );
    assert!(answer.text().contains("pending"), "{}", answer.text());
    home.write("secret.sh", &printing(CANARY));
    comes_to(&lessor, "a", "available").await;
    assert_eq!(lessor.chat().await.status, 200);
    assert_eq!(provider.keys_seen(), [CANARY]);
    let warned = warnings(&lessor);
    assert_eq!(warned.len(), 1, "{warned:?}");
    for part in ["key a of provider openai", "exit status: 3", "by hand", "pending"] {
        assert!(warned[0].contains(part), "{part} is not in {warned:?}");
    }
}

#[tokio::test]
async fn another_key_serves_while_one_is_pending() {
    let provider = Provider::start(openai).await;
    let home = Arc::new(Home::default());
    home.write("secret.sh", "#!/bin/sh\nexit 1\n");
    let setup = Setup::openai(&provider).set("ranking.strategy", "\"fill_first\"");
    let lessor = started(setup.key(key("")).key(Key::new("b")), &home).await;
    assert_eq!(lessor.chat().await.status, 200);
    assert_eq!(provider.keys_seen(), ["sk-b"]);
}

#[tokio::test]
async fn a_new_secret_serves_new_requests_and_those_in_flight_end_with_the_old_one() {
    const NEW: &str = "sk-NEW-of-command-0123456789";
    let gate = Gate::default();
    let held = gate.clone();
    // The old one is refused once the new one is in use: what then is said of it is not of the new one.
    let provider = Provider::start(move |seen| match (seen.key(), seen.path()) {
        (CANARY, "/v1/held") => Play::sse().event("one").until(&held).event(CANARY).event("two").done(),
        (CANARY, "/v1/late") => Play::new().until(&held).then(invalid_key()),
        (key, "/v1/echo") => Play::whole(200, &[("x-echo", key)], key.to_owned()),
        _ => openai(seen),
    })
    .await;
    let home = Arc::new(Home::default());
    home.write("secret.sh", &printing(CANARY));
    let lessor = Arc::new(started(Setup::openai(&provider).key(key(", refresh = \"1s\"")), &home).await);
    let mut stream = lessor.open(Request::get("/openai/v1/held")).await;
    stream.read_to("one").await;
    let asking = lessor.clone();
    let late = tokio::spawn(async move { asking.get("/openai/v1/late").await });
    provider.request(2).await;
    home.write("secret.sh", &printing(NEW));
    eventually("a request has the new secret", async || {
        assert_eq!(lessor.chat().await.status, 200);
        (provider.keys_seen().last().unwrap() == NEW).then_some(())
    })
    .await;
    gate.open();
    let rest = stream.whole().await.unwrap().text();
    assert!(
        rest.contains("two") && !rest.contains("CANARY"),
        "the old secret is masked where it came from: {rest}"
    );
    let late = late.await.unwrap();
    assert_eq!(lessor.status("a").await, "available", "{}", late.text());
    assert_eq!(lessor.chat().await.status, 200);
    let echo = lessor.get("/openai/v1/echo").await;
    assert_eq!(provider.keys_seen().last().unwrap(), NEW);
    let stars = "*".repeat(NEW.len());
    assert_eq!((echo.header("x-echo"), echo.text()), (&*stars, stars.clone()), "and so is the new one");
    assert!(!lessor.log().contains("CANARY") && !lessor.log().contains("sk-NEW"));
}

#[tokio::test]
async fn a_request_that_waits_for_the_key_is_served_with_its_new_secret() {
    const NEW: &str = "sk-NEW-of-command-0123456789";
    let gate = Gate::default();
    let held = gate.clone();
    let provider = Provider::start(move |seen| match seen.key() {
        CANARY => Play::new().until(&held).then(openai(seen)),
        key => Play::whole(200, &[("x-echo", key)], key.to_owned()),
    })
    .await;
    let home = Arc::new(Home::default());
    home.write("secret.sh", &printing(CANARY));
    let setup = Setup::openai(&provider).key(key(", refresh = \"1s\"").cap(1));
    let lessor = Arc::new(started(setup, &home).await);
    let ask = || {
        let lessor = lessor.clone();
        tokio::spawn(async move { lessor.ask(chat("gpt-4o-mini").header("x-lessor-max-wait", "30s")).await })
    };
    let first = ask();
    provider.request(1).await;
    let second = ask();
    lessor.comes_to_queue(1).await;
    home.write("secret.sh", &printing(NEW));
    let told = || lessor.log_lines().iter().any(|line| field(line, "rotated") == "openai/a");
    eventually("the secret is new", async || told().then_some(())).await;
    assert_eq!(lessor.in_use("a").await, 1, "the cap is the key's, whatever its secret");
    gate.open();
    for asked in [first, second] {
        let answer = asked.await.unwrap();
        assert_eq!(answer.status, 200, "{}", answer.text());
        // It came before the secret did, and yet that is masked.
        assert!(!answer.text().contains("sk-NEW") && !answer.header("x-echo").contains("sk-NEW"));
    }
    assert_eq!(provider.keys_seen(), [CANARY, NEW]);
}

#[tokio::test]
async fn a_refresh_that_fails_keeps_the_old_secret_and_is_told_once_and_so_is_its_end() {
    let provider = Provider::start(openai).await;
    let home = Arc::new(Home::default());
    let counting = |then: &str| format!("#!/bin/sh\necho x >>runs\n{then}\n");
    let runs = || std::fs::read_to_string(home.path().join("runs")).unwrap().lines().count();
    let good = counting(&format!("printf '%s\\n' '{CANARY}'"));
    home.write("secret.sh", &good);
    let lessor = started(Setup::openai(&provider).key(key(", refresh = \"1s\"")), &home).await;
    home.write("secret.sh", &counting("exit 1"));
    let before = runs();
    eventually("it fails twice", async || (runs() >= before + 2).then_some(())).await;
    eventually("it is told", async || (!warnings(&lessor).is_empty()).then_some(())).await;
    assert_eq!(lessor.chat().await.status, 200);
    assert_eq!((lessor.status("a").await.as_str(), provider.keys_seen()), ("available", vec![CANARY.into()]));
    home.write("secret.sh", &good);
    let told =
        |text: &str| lessor.log_lines().iter().filter(|line| field(line, "message").contains(text)).count();
    eventually("its end is told", async || (told("gives its secret again") == 1).then_some(())).await;
    let warned = warnings(&lessor);
    assert_eq!(warned.len(), 1, "{warned:?}");
    assert!(warned[0].contains("stays in use"), "{warned:?}");
}

#[tokio::test]
async fn a_command_that_hangs_is_ended_with_all_that_it_started() {
    let provider = Provider::start(openai).await;
    let home = Arc::new(Home::default());
    home.write("secret.sh", "#!/bin/sh\nsleep 1000 &\necho $! >child\necho $$ >parent\nwait\n");
    let lessor = started(Setup::openai(&provider).key(key(", timeout = \"300ms\"")), &home).await;
    assert_eq!(lessor.status("a").await, "pending");
    eventually("it is told", async || (!warnings(&lessor).is_empty()).then_some(())).await;
    assert!(warnings(&lessor)[0].contains("did not end within 300ms"), "{:?}", warnings(&lessor));
    // The next run may be under way: what counts is that of each run nothing is left.
    let id = |name: &str| std::fs::read_to_string(home.path().join(name)).unwrap_or_default();
    let (child, parent) = (id("child"), id("parent"));
    assert!(!child.is_empty() && !parent.is_empty());
    is_gone(&child).await;
    is_gone(&parent).await;
}

async fn is_gone(process: &str) {
    let path = format!("/proc/{}/stat", process.trim());
    let gone = async || match std::fs::read_to_string(&path) {
        Ok(stat) => stat.rsplit(") ").next().unwrap().starts_with('Z').then_some(()),
        Err(_) => Some(()),
    };
    eventually(&format!("process {process} is gone"), gone).await;
}

#[tokio::test]
async fn a_command_that_runs_ends_with_lessor_and_does_not_hold_it_up() {
    let provider = Provider::start(openai).await;
    let home = Arc::new(Home::default());
    home.write("secret.sh", &printing(CANARY));
    let mut lessor =
        started(Setup::openai(&provider).key(key(", refresh = \"1s\", timeout = \"1h\"")), &home).await;
    home.write("secret.sh", "#!/bin/sh\necho $$ >running\nexec sleep 1000\n");
    let running = home.path().join("running");
    let id = eventually("the command runs", async || {
        std::fs::read_to_string(&running).ok().filter(|id| id.ends_with('\n'))
    })
    .await;
    // Requests are served meanwhile.
    assert_eq!(lessor.chat().await.status, 200);
    lessor.sigterm();
    assert!(lessor.ends_within(Duration::from_secs(5)).await.success());
    let path = format!("/proc/{}/stat", id.trim());
    eventually("the command is gone", async || match std::fs::read_to_string(&path) {
        Ok(stat) => stat.rsplit(") ").next().unwrap().starts_with('Z').then_some(()),
        Err(_) => Some(()),
    })
    .await;
}

#[tokio::test]
async fn what_is_no_secret_is_told_without_repeating_it() {
    let home = Home::default();
    let file = |more: &str| {
        format!(
            "[[keys]]\nid = \"a\"\nprovider = \"openai\"\nsecret = {{ command = [\"./secret.sh\"]{more} }}\n"
        )
    };
    for (script, more, want) in [
        ("#!/bin/sh\n", "", "printed what is empty"),
        ("#!/bin/sh\nprintf 'CANARY-1\\nCANARY-2\\n'\n", "", "more than one line"),
        ("#!/bin/sh\nprintf 'CANARY-1\\n\\n'\n", "", "more than one line"),
        ("#!/bin/sh\nprintf 'CANARY\\377'\n", "", "not text"),
        ("#!/bin/sh\nprintf 'CANARY\\001'\n", "", "cannot stand in a header"),
        ("#!/bin/sh\nprintf CANARY\n", ", kind = \"basic\"", "no user:password"),
        ("#!/bin/sh\nyes CANARY\n", "", "more than 64 KiB"),
        ("#!/bin/sh\nprintf CANARY; kill -9 $$\n", "", "signal: 9"),
        ("#!/bin/sh\nprintf CANARY; exit 7\n", "", "exit status: 7"),
        ("#!/nowhere/sh\n", "", "could not be started"),
        ("#!/bin/sh\nsleep 100\n", ", timeout = \"200ms\"", "did not end within 200ms"),
    ] {
        home.write("secret.sh", script);
        home.write("lessor.toml", &file(more));
        let ran = home.run(&["check", "--config", "lessor.toml"]).await;
        // It is no mistake of the configuration: the key will be pending.
        assert_eq!(ran.code, Some(0), "{script}: {ran:?}");
        assert!(
            ran.stderr.contains(want) && ran.stderr.contains("key a of provider openai"),
            "{script}: {ran:?}"
        );
        assert!(!(ran.stdout + &ran.stderr).contains("CANARY"), "{script}");
    }
    // One line end is a command's own.
    for end in ["", "\\n", "\\r\\n"] {
        home.write("secret.sh", &format!("#!/bin/sh\nprintf 'sk-0123456789abcdef{end}'\n"));
        home.write("lessor.toml", &file(""));
        let ran = home.run(&["check", "--config", "lessor.toml"]).await;
        assert!(ran.ok().contains("ok, 1 key") && ran.stderr.is_empty(), "{end}: {ran:?}");
    }
}

#[tokio::test]
async fn a_commands_own_words_are_in_no_log_for_they_may_hold_the_secret_in_any_form() {
    const CANARY: &str = "correct-horse-CANARY-staple";
    let provider = Provider::builder().plain().manners(support::provider::Manners::Open).start(openai).await;
    let home = Arc::new(Home::default());
    let words = format!("echo the key is {CANARY}, or part of it: horse-CANARY >&2\n");
    home.write("secret.sh", &format!("#!/bin/sh\n{words}printf %s '{CANARY}'\n"));
    let lessor =
        started(Setup::openai(&provider).key(key(", refresh = \"1s\"")).env("RUST_LOG", "trace"), &home)
            .await;
    assert_eq!(lessor.chat().await.status, 200);
    home.write("secret.sh", &format!("#!/bin/sh\n{words}exit 7\n"));
    eventually("it is told", async || (!warnings(&lessor).is_empty()).then_some(())).await;
    assert!(warnings(&lessor)[0].contains("failed (exit status: 7)"), "{:?}", warnings(&lessor));
    assert!(!lessor.log().contains("CANARY"), "{}", lessor.log());
}

#[tokio::test]
async fn what_a_command_leaves_behind_ends_with_it() {
    let provider = Provider::start(openai).await;
    let home = Arc::new(Home::default());
    home.write(
        "secret.sh",
        &format!("#!/bin/sh\nsleep 1000 >/dev/null 2>&1 &\necho $! >child\nprintf %s '{CANARY}'\n"),
    );
    let lessor = started(Setup::openai(&provider).key(key("")), &home).await;
    assert_eq!(lessor.chat().await.status, 200);
    let child = std::fs::read_to_string(home.path().join("child")).unwrap();
    is_gone(&child).await;
}

#[tokio::test]
async fn keys_that_are_given_one_secret_are_refused_at_the_start_and_later_stay_as_they_were() {
    let provider = Provider::start(openai).await;
    let home = Arc::new(Home::default());
    home.write("secret.sh", &printing(CANARY));
    let setup = || Setup::openai(&provider).key(key(", refresh = \"1s\"")).key(Key::new("b").secret(CANARY));
    let mut refused = setup().spawn_in(home.clone());
    assert_eq!(refused.ends_within(Duration::from_secs(30)).await.code(), Some(2));
    eventually("why", async || refused.log().contains("keys a and b have one secret").then_some(())).await;
    assert!(!refused.log().contains("CANARY"));
    home.write("secret.sh", &printing("sk-of-a-0123456789"));
    let lessor = started(setup(), &home).await;
    home.write("secret.sh", &printing(CANARY));
    let told =
        || lessor.log_lines().iter().filter(|line| field(line, "message").contains("secrets stay")).count();
    eventually("it is told", async || (told() == 1).then_some(())).await;
    assert_eq!(lessor.ask(chat("gpt-4o-mini").header("x-lessor-key", "a")).await.status, 200);
    assert_eq!(provider.keys_seen(), ["sk-of-a-0123456789"]);
}

#[tokio::test]
async fn nothing_is_run_for_a_configuration_that_has_mistakes() {
    let home = Home::default();
    home.write("secret.sh", "#!/bin/sh\ntouch ran\necho sk-0123456789abcdef\n");
    let text = "[lease]\nttl = 1\nheartbeat = 2\n[[keys]]\nid = \"a\"\nprovider = \"openai\"\nsecret = { command = [\"./secret.sh\"] }\n";
    home.write("lessor.toml", text);
    let ran = home.run(&["check", "--config", "lessor.toml"]).await;
    assert_eq!(ran.code, Some(2), "{ran:?}");
    assert!(!home.path().join("ran").exists());
}

#[tokio::test]
async fn commands_run_beside_each_other() {
    let home = Home::default();
    home.write("secret.sh", "#!/bin/sh\nsleep 1\necho sk-0123456789-$1\n");
    let keys: String = (0..8)
        .map(|n| format!("[[keys]]\nid = \"k{n}\"\nprovider = \"openai\"\nsecret = {{ command = [\"./secret.sh\", \"{n}\"] }}\n"))
        .collect();
    home.write("lessor.toml", &keys);
    let begun = std::time::Instant::now();
    let ran = home.run(&["check", "--config", "lessor.toml"]).await;
    assert!(ran.ok().contains("8 keys"), "{ran:?}");
    assert!(begun.elapsed() < ms(6000), "they ran one after the other: {:?}", begun.elapsed());
}

#[tokio::test]
async fn the_file_of_one_key_does_not_wait_for_the_command_of_another_that_hangs() {
    let provider = Provider::start(openai).await;
    let home = Arc::new(Home::default());
    home.write("secret.sh", &printing(CANARY));
    home.write("b", "sk-of-b-first-0123456789");
    let file = home.path().join("b").display().to_string();
    let own = Setup::openai(&provider).key(key(", refresh = \"1s\", timeout = \"1h\"")).key(Key::new("b"));
    let toml = own.toml().replace("{ env = \"SECRET_OPENAI_B\" }", &format!("{{ file = {file:?} }}"));
    home.write("lessor.toml", &toml);
    let config = home.path().join("lessor.toml").display().to_string();
    let mut lessor = Lessor::spawn(home.clone(), &["run".into(), "--config".into(), config], &[]);
    lessor.listening().await;
    home.write("secret.sh", "#!/bin/sh\ntouch hangs\nexec sleep 1000\n");
    eventually("the command hangs", async || home.path().join("hangs").exists().then_some(())).await;
    home.write("b", "sk-of-b-second-0123456789");
    eventually("the new secret of the other key counts", async || {
        lessor.ask(chat("gpt-4o-mini").header("x-lessor-key", "b")).await;
        (provider.keys_seen().last().unwrap() == "sk-of-b-second-0123456789").then_some(())
    })
    .await;
}

#[tokio::test]
async fn a_configuration_that_is_read_again_runs_what_is_due_and_nothing_else() {
    use lessor::config::{ConfigSource, Loader};
    let home = Home::default();
    home.write("secret.sh", "#!/bin/sh\necho x >>\"$1\"\necho sk-0123456789-$1-$(wc -l <\"$1\")\n");
    let runs =
        |name: &str| std::fs::read_to_string(home.path().join(name)).map_or(0, |runs| runs.lines().count());
    let file = |name: &str| home.path().join(name).display().to_string();
    let key = |id: &str, more: &str| {
        let command = ["./secret.sh".to_owned(), file(id)];
        format!("[[keys]]\nid = {id:?}\nprovider = \"openai\"\nsecret = {{ command = {command:?}{more} }}\n")
    };
    let script = home.path().join("secret.sh");
    std::fs::write(
        &script,
        std::fs::read_to_string(&script).unwrap().replace("sk-0123456789-$1", "sk-${1##*/}"),
    )
    .unwrap();
    let text = key("once", "") + &key("often", ", refresh = \"1h\"");
    let mut loader = Loader::new(ConfigSource::File(home.write("lessor.toml", &text)));
    let secrets_of = |config: &lessor::config::Config| -> Vec<String> {
        config.keys.iter().map(|key| key.secret.as_ref().unwrap().expose().to_owned()).collect()
    };
    let config = loader.load().await.unwrap();
    assert_eq!(secrets_of(&config), ["sk-once-1", "sk-often-1"]);
    assert_eq!(config.files.files(), [home.path().join("lessor.toml")]);
    // Another reading changes nothing before the hour is over.
    let due = loader.next_due().unwrap().duration_since(tokio::time::Instant::now());
    assert!(due > Duration::from_secs(3500) && due <= Duration::from_secs(3600), "{due:?}");
    assert_eq!(secrets_of(&loader.load().await.unwrap()), ["sk-once-1", "sk-often-1"]);
    loader.make_all_due();
    assert!(loader.next_due().unwrap() <= tokio::time::Instant::now());
    // Where the file has mistakes nothing is run, and soon is not now: whoever waits for it must not spin.
    home.write("lessor.toml", "[lease]\nttl = 0\n");
    loader.load().await.unwrap_err();
    assert!(loader.next_due().unwrap() > tokio::time::Instant::now() + Duration::from_secs(5));
    assert_eq!((runs("once"), runs("often")), (1, 1));
    loader.make_all_due();
    home.write("lessor.toml", &text);
    assert_eq!(secrets_of(&loader.load().await.unwrap()), ["sk-once-2", "sk-often-2"]);
    // Another command is another source; a key that is gone takes its command along.
    home.write("lessor.toml", &key("once", "").replace("secret.sh", "./secret.sh"));
    assert_eq!(secrets_of(&loader.load().await.unwrap()), ["sk-once-3"]);
    assert_eq!(loader.next_due(), None);
    assert_eq!(loader.pending(), Vec::<String>::new());
}

//! The configuration as it changes under load: taken whole, or not at all.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::pedantic, missing_docs, unreachable_pub)]

mod support;

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::process::Signal;
use support::plays::{invalid_key, openai};
use support::provider::{Manners, ok};
use support::redis::Redis;
use support::{Gate, Key, Lessor, Play, Provider, Request, Setup, eventually, ms};

/// Writes what `setup` says where `lessor` was started from.
fn write(lessor: &Lessor, setup: &Setup) {
    std::fs::write(lessor.home().path().join("lessor.toml"), setup.toml()).unwrap();
}

fn hang_up(lessor: &Lessor) {
    lessor.signal(Signal::HUP);
}

async fn says(lessor: &Lessor, words: &str) {
    eventually(words, async || lessor.log().contains(words).then_some(())).await;
}

const TAKEN: &str = "the configuration was taken";

#[tokio::test]
async fn at_sighup_new_keys_are_lent_and_streams_go_on() {
    let gate = Gate::default();
    let provider = Provider::start({
        let gate = gate.clone();
        move |seen| match seen.path() {
            "/v1/quiet" => Play::sse().event("one").until(&gate).done(),
            _ => ok(),
        }
    })
    .await;
    let before = Setup::openai(&provider).key(Key::new("a").cap(1)).env("SECRET_OPENAI_B", "sk-b");
    let lessor = before.clone().start().await;
    let mut stream = lessor.open(Request::get("/openai/v1/quiet")).await;
    stream.read_to("one").await;
    write(&lessor, &before.key(Key::new("b").cap(1)));
    hang_up(&lessor);
    says(&lessor, "\"added\":\"openai/b\"").await;
    let answer = lessor.get("/openai/v1/models").await;
    assert_eq!((answer.status, answer.header("x-lessor-key")), (200, "b"), "{}", answer.text());
    gate.open();
    stream.read_to("[DONE]").await;
    lessor.is_free_within_a_second("a").await;
    assert_eq!(lessor.metric("lessor_config_reloads_total{result=\"taken\"}").await as u32, 1);
}

#[tokio::test]
async fn a_changed_file_is_taken_by_itself_and_settings_count_at_once() {
    let provider = Provider::start(|_| Play::sse().event("one").silence()).await;
    let setup = |cap| Setup::openai(&provider).key(Key::new("a").cap(cap));
    let lessor = setup(1).start().await;
    let mut held = lessor.open(Request::get("/openai/v1/x")).await;
    held.read_to("one").await;
    let short = || Request::get("/openai/v1/x").header("x-lessor-max-wait", "0s");
    lessor.ask(short()).await.is_error(429, "pool_exhausted");
    write(&lessor, &setup(2));
    says(&lessor, "\"changed\":\"openai/a\"").await;
    eventually("the store knows the new cap", async || {
        (lessor.key("a").await["max_concurrent_uses"] == 2).then_some(())
    })
    .await;
    let mut second = lessor.open(short()).await;
    second.read_to("one").await;
    assert_eq!(lessor.in_use("a").await, 2);
    // Lowered again, nobody is cut.
    write(&lessor, &setup(1));
    eventually("the store knows the old cap", async || {
        (lessor.key("a").await["max_concurrent_uses"] == 1).then_some(())
    })
    .await;
    assert_eq!(lessor.in_use("a").await, 2);
    lessor.ask(short()).await.is_error(429, "pool_exhausted");
}

#[tokio::test]
async fn a_request_that_waits_is_served_by_a_key_that_comes_meanwhile() {
    let provider = Provider::start(|seen| match seen.key() {
        "sk-a" => Play::sse().event("one").silence(),
        _ => ok(),
    })
    .await;
    let before = Setup::openai(&provider).key(Key::new("a").cap(1)).env("SECRET_OPENAI_B", "sk-b");
    let lessor = before.clone().start().await;
    let mut held = lessor.open(Request::get("/openai/v1/x")).await;
    held.read_to("one").await;
    let waiting = lessor.ask(Request::get("/openai/v1/x").header("x-lessor-max-wait", "20s"));
    let change = async {
        lessor.comes_to_queue(1).await;
        write(&lessor, &before.key(Key::new("b")));
        hang_up(&lessor);
    };
    let (answer, ()) = tokio::join!(waiting, change);
    assert_eq!((answer.status, answer.header("x-lessor-key")), (200, "b"), "{}", answer.text());
}

#[tokio::test]
async fn a_file_that_is_wrong_changes_nothing_and_is_told_with_line_and_caret() {
    let provider = examined_provider().await;
    let good = Setup::openai(&provider).key(Key::new("a"));
    let lessor = good.clone().start().await;
    let file = lessor.home().path().join("lessor.toml");
    std::fs::write(&file, format!("{}\n[lease]\nttll = \"5s\"\n", good.toml())).unwrap();
    hang_up(&lessor);
    says(&lessor, "the old one is kept").await;
    let log = lessor.log();
    assert!(log.contains("did you mean `ttl`?") && log.contains('^'), "{log}");
    assert_eq!(lessor.chat().await.status, 200);
    assert_eq!(lessor.metric("lessor_config_reloads_total{result=\"refused\"}").await as u32, 1);
    // It shows until it is corrected: in what is asked, what is told and what examines.
    let refused = "the file on disk is refused since 2";
    let status = lessor.cli(&["status"]).await;
    assert!(status.ok().contains(refused) && status.ok().contains("did you mean `ttl`?"), "{status:?}");
    let shown = lessor.admin("/v1/status").await.json();
    let error = shown["config_refused"]["error"].as_str().unwrap();
    assert!(shown["config_refused"]["since_ms"].as_u64() > Some(1_600_000_000_000), "{shown}");
    assert!(error.contains("did you mean `ttl`?") && !error.contains('\n'), "{error}");
    let told = lessor.cli(&["events", "--json"]).await;
    assert!(told.ok().contains("\"event\":\"config_refused\""), "{told:?}");
    let examined = examined(&lessor).await;
    assert_eq!(examined["verdict"], "fail", "{examined}");
    assert!(examined["found"].as_str().unwrap().contains(refused), "{examined}");
    // No file at all is as wrong.
    std::fs::remove_file(&file).unwrap();
    hang_up(&lessor);
    says(&lessor, "cannot be read").await;
    assert_eq!(lessor.chat().await.status, 200);
    std::fs::write(&file, good.toml()).unwrap();
    says(&lessor, TAKEN).await;
    assert!(!lessor.cli(&["status"]).await.ok().contains("refused since"));
    assert_eq!(self::examined(&lessor).await, serde_json::Value::Null);
}

/// One that an examination may also ask for the time, without a key.
async fn examined_provider() -> Provider {
    Provider::builder().manners(Manners::Open).start(openai).await
}

/// What the sidecar's own examination says of the file on disk.
async fn examined(lessor: &Lessor) -> serde_json::Value {
    let checks = lessor.admin_post("/v1/doctor").await.json();
    let checks = checks["checks"].as_array().unwrap().clone();
    checks.into_iter().find(|check| check["check"] == "config on disk").unwrap_or_default()
}

#[tokio::test]
async fn what_only_a_start_can_change_is_named_and_stays() {
    let provider = examined_provider().await;
    let setup = Setup::openai(&provider).key(Key::new("a"));
    let lessor = setup.clone().start().await;
    let changed = setup
        .set("listen.proxy", "\"127.0.0.1:1\"")
        .set("lease.ttl", "\"45s\"")
        .set("limits.max_streams", "7")
        .set("store.url", "\"redis://127.0.0.1:1\"");
    write(&lessor, &changed);
    hang_up(&lessor);
    says(&lessor, TAKEN).await;
    for field in ["listen.proxy", "lease", "limits", "store"] {
        says(&lessor, &format!("{field} was changed; that counts from the next start")).await;
    }
    let status = lessor.cli(&["status"]).await;
    assert!(status.ok().contains("says something else of listen.proxy, store, lease, limits"), "{status:?}");
    let examined = examined(&lessor).await;
    assert_eq!(examined["verdict"], "warn", "{examined}");
    assert!(examined["found"].as_str().unwrap().starts_with("listen.proxy, store,"), "{examined}");
    assert_eq!(lessor.chat().await.status, 200);
}

#[tokio::test]
async fn an_app_that_is_taken_out_is_cut_off_and_a_new_one_is_let_in() {
    let provider = Provider::start(|_| Play::sse().event("one").silence()).await;
    let setup = |apps: &[&str]| {
        let setup = Setup::openai(&provider).key(Key::new("a"));
        let with = |setup: Setup, app: &&str| {
            let (name, variable) = (format!("apps.{app}.token"), app.to_ascii_uppercase());
            setup.set(&name, &format!("{{ env = \"{variable}\" }}"))
        };
        let setup = apps.iter().fold(setup, with);
        setup.env("SHOP", "token-of-the-shop").env("WEB", "token-of-the-web").env("JOBS", "token-of-the-jobs")
    };
    let lessor = setup(&["shop", "web"]).start().await;
    let ask = |token: &str| Request::get("/openai/v1/x").header("authorization", &format!("Bearer {token}"));
    let mut shop = lessor.open(ask("token-of-the-shop")).await;
    shop.read_to("one").await;
    let mut web = lessor.open(ask("token-of-the-web")).await;
    web.read_to("one").await;
    lessor.ask(ask("token-of-the-jobs")).await.is_error(403, "app_unauthenticated");
    write(&lessor, &setup(&["web", "jobs"]));
    hang_up(&lessor);
    says(&lessor, "\"apps_removed\":\"shop\",\"sections\":\"apps.jobs\"").await;
    assert!(shop.whole().await.is_err(), "a cut stream must not look whole");
    assert!(tokio::time::timeout(ms(200), web.next()).await.is_err(), "the other app's stream runs on");
    lessor.ask(ask("token-of-the-shop")).await.is_error(403, "app_unauthenticated");
    let mut jobs = lessor.open(ask("token-of-the-jobs")).await;
    jobs.read_to("one").await;
    // Who was revoked by hand stays so.
    lessor.cli(&["apps", "revoke", "web"]).await.ok();
    write(&lessor, &setup(&["web", "jobs", "shop"]));
    hang_up(&lessor);
    let back =
        async || (lessor.try_open(ask("token-of-the-shop")).await.unwrap().status == 200).then_some(());
    eventually("the shop is back", back).await;
    lessor.ask(ask("token-of-the-web")).await.is_error(403, "app_forbidden");
}

#[tokio::test]
async fn a_key_that_was_taken_out_is_counted_no_more_and_where_others_may_have_it_shown_as_theirs() {
    let redis = Redis::start().await;
    for store in ["memory:".to_owned(), redis.url()] {
        let gate = Gate::default();
        let provider = Provider::start({
            let gate = gate.clone();
            move |_| Play::sse().event("one").until(&gate).done()
        })
        .await;
        let with = |keys: &[&str]| {
            let setup = Setup::openai(&provider).set("store.url", &format!("{store:?}"));
            let setup = keys.iter().fold(setup, |setup, id| setup.key(Key::new(id)));
            setup.set("ranking.strategy", "\"fill_first\"").env("SECRET_OPENAI_B", "sk-b")
        };
        let lessor = with(&["b", "a"]).start().await;
        let mut open = lessor.open(support::lessor::chat("gpt-4o-mini")).await;
        assert_eq!((open.status, open.header("x-lessor-key")), (200, "b"), "{}", lessor.log());
        open.read_to("one").await;
        let metric = async |id: &str| {
            let page = lessor.admin("/metrics").await.text();
            page.lines()
                .any(|line| line.starts_with("lessor_key_status") && line.contains(&format!("key=\"{id}\"")))
        };
        assert!(metric("a").await && metric("b").await);
        write(&lessor, &with(&["a"]));
        hang_up(&lessor);
        says(&lessor, "\"removed\":\"openai/b\"").await;
        let keys = async || lessor.admin("/v1/keys").await.json()["keys"].as_array().unwrap().clone();
        if store == "memory:" {
            let gone = async || keys().await.iter().all(|key| key["id"] != "b").then_some(());
            eventually("it is gone", gone).await;
        } else {
            let found = keys().await;
            let found: Vec<_> =
                found.iter().map(|key| (key["id"].as_str(), key["configured"].as_bool())).collect();
            assert_eq!(found, [(Some("a"), Some(true)), (Some("b"), Some(false))]);
            let shown = lessor.cli(&["keys", "list"]).await;
            assert!(shown.ok().contains("available, not configured here"), "{}", shown.ok());
        }
        let pools = lessor.admin("/v1/pools").await.json();
        assert_eq!(
            (&pools["pools"][0]["keys"], &pools["pools"][0]["max_concurrent_uses"]),
            (&1.into(), &8.into())
        );
        assert!(metric("a").await && !metric("b").await);
        // its stream runs on, and its lease is shown and given back
        assert_eq!(lessor.admin("/v1/leases").await.json()["leases"][0]["key_id"], "b");
        gate.open();
        open.read_to("[DONE]").await;
        let back = async || {
            lessor.admin("/v1/leases").await.json()["leases"].as_array().unwrap().is_empty().then_some(())
        };
        eventually("the slot is given back", back).await;
        // and it may come back
        write(&lessor, &with(&["b", "a"]));
        hang_up(&lessor);
        let served = async || (lessor.chat().await.header("x-lessor-key") == "b").then_some(());
        eventually("it is lent again", served).await;
    }
}

#[tokio::test]
async fn a_key_switched_off_by_the_file_is_not_lent_and_back_on_it_is() {
    let provider = Provider::start(openai).await;
    let setup = Setup::openai(&provider).key(Key::new("a"));
    let lessor = setup.clone().start().await;
    assert_eq!(lessor.chat().await.status, 200);
    let off = setup.toml().replace("id = \"a\"", "id = \"a\"\ndisabled = true");
    std::fs::write(lessor.home().path().join("lessor.toml"), off).unwrap();
    hang_up(&lessor);
    eventually("it is off", async || (lessor.status("a").await == "disabled").then_some(())).await;
    lessor.chat().await.is_error(503, "key_unavailable");
    write(&lessor, &setup);
    hang_up(&lessor);
    eventually("it is on", async || (lessor.status("a").await == "available").then_some(())).await;
    assert_eq!(lessor.chat().await.status, 200);
}

#[tokio::test]
async fn a_provider_that_moves_is_asked_at_its_new_place_with_its_new_key() {
    let old = Provider::builder().good(&["sk-old"]).start(|_| ok()).await;
    let new = Provider::builder().good(&["sk-new"]).start(|_| ok()).await;
    let setup = |provider: &Provider, secret: &str| {
        Setup::openai(provider).key(Key::new("a").secret(secret)).env("OTHER", "sk-new")
    };
    let lessor = setup(&old, "sk-old").start().await;
    assert_eq!(lessor.get("/openai/v1/models").await.status, 200);
    let moved = setup(&new, "unused").toml().replace("SECRET_OPENAI_A", "OTHER");
    std::fs::write(lessor.home().path().join("lessor.toml"), moved).unwrap();
    hang_up(&lessor);
    says(&lessor, "\"rotated\":\"openai/a\"").await;
    for _ in 0..5 {
        assert_eq!(lessor.get("/openai/v1/models").await.status, 200);
    }
    assert_eq!((old.count(), new.count()), (1, 5));
    says(&lessor, "\"sections\":\"providers.openai\"").await;
    assert!(!lessor.log().contains("sk-new") && !lessor.log().contains("sk-old"));
}

/// A volume as Kubernetes makes it: files are links through `..data`, which is swapped in one step.
struct Volume<'d> {
    dir: &'d Path,
    turn: std::cell::Cell<u32>,
}

impl<'d> Volume<'d> {
    fn new(dir: &'d Path, file: &str, content: &str) -> Self {
        let volume = Self { dir, turn: std::cell::Cell::new(0) };
        volume.swap(file, content);
        std::os::unix::fs::symlink(format!("..data/{file}"), dir.join(file)).unwrap();
        volume
    }

    fn swap(&self, file: &str, content: &str) {
        let turn = self.turn.replace(self.turn.get() + 1);
        let data = format!("..2026_{turn}");
        std::fs::create_dir(self.dir.join(&data)).unwrap();
        std::fs::write(self.dir.join(&data).join(file), content).unwrap();
        std::os::unix::fs::symlink(&data, self.dir.join("..data_tmp")).unwrap();
        std::fs::rename(self.dir.join("..data_tmp"), self.dir.join("..data")).unwrap();
        if turn > 0 {
            std::fs::remove_dir_all(self.dir.join(format!("..2026_{}", turn - 1))).unwrap();
        }
    }
}

fn with_secret_file(provider: &Provider, file: &Path) -> String {
    let toml = Setup::openai(provider).key(Key::new("a").cap(16)).toml();
    toml.replace("{ env = \"SECRET_OPENAI_A\" }", &format!("{{ file = {:?} }}", file.display().to_string()))
}

async fn start_with(toml: &str) -> Lessor {
    let mut lessor = spawn_with(toml);
    lessor.listening().await;
    lessor
}

/// One that may not listen yet.
fn spawn_with(toml: &str) -> Lessor {
    let home = Arc::new(support::lessor::Home::default());
    let config = home.path().join("lessor.toml");
    std::fs::write(&config, toml).unwrap();
    Lessor::spawn(home, &["run".into(), "--config".into(), config.display().to_string()], &[])
}

#[tokio::test]
async fn a_secret_that_changes_while_lessor_starts_is_taken_too() {
    let provider = Provider::start(|_| ok()).await;
    for after in [20, 80, 150, 250] {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("key");
        std::fs::write(&file, "sk-first\n").unwrap();
        let mut lessor = spawn_with(&with_secret_file(&provider, &file));
        tokio::time::sleep(ms(after)).await; // somewhere in the start, which takes about that long
        let new = format!("sk-after-{after}");
        std::fs::write(&file, &new).unwrap();
        lessor.listening().await;
        eventually("the new secret is used", async || {
            lessor.get("/openai/v1/models").await;
            provider.keys_seen().last().is_some_and(|key| *key == new).then_some(())
        })
        .await;
    }
}

#[tokio::test]
async fn a_file_that_loses_all_its_keys_by_itself_changes_nothing_and_at_sighup_counts() {
    let provider = Provider::start(|_| ok()).await;
    let lessor = Setup::openai(&provider).key(Key::new("a")).start().await;
    std::fs::write(lessor.home().path().join("lessor.toml"), "").unwrap();
    says(&lessor, "it has no key any more").await;
    assert_eq!(lessor.get("/openai/v1/models").await.status, 200);
    lessor.signal(rustix::process::Signal::HUP);
    eventually("it counts", async || (lessor.get("/openai/v1/models").await.status != 200).then_some(()))
        .await;
}

#[tokio::test]
async fn a_secret_swapped_by_kubernetes_under_load_fails_no_request() {
    let provider = Provider::start(|_| ok()).await;
    let dir = tempfile::tempdir().unwrap();
    let volume = Volume::new(dir.path(), "key", "sk-first\n");
    let lessor = start_with(&with_secret_file(&provider, &dir.path().join("key"))).await;
    let done = AtomicBool::new(false);
    let load = async {
        let mut served = 0;
        while !done.load(Ordering::Relaxed) {
            let all = (0..8).map(|_| lessor.get("/openai/v1/models"));
            for answer in futures_util::future::join_all(all).await {
                assert_eq!(answer.status, 200, "{}", answer.text());
                served += 1;
            }
        }
        served
    };
    let swap = async {
        provider.request(20).await;
        volume.swap("key", "sk-second\n");
        let new = async || provider.keys_seen().last().is_some_and(|key| key == "sk-second").then_some(());
        eventually("the new secret is used", new).await;
        done.store(true, Ordering::Relaxed);
    };
    let (served, ()) = tokio::join!(load, swap);
    assert!(served > 20);
    let keys = provider.keys_seen();
    let turn = keys.iter().position(|key| key == "sk-second").unwrap();
    // What was under way at the turn may come after it.
    assert!(keys.iter().skip(turn + 8).all(|key| key == "sk-second"), "new requests take the new one");
    says(&lessor, "\"rotated\":\"openai/a\"").await;
    let log = lessor.log();
    assert!(!log.contains("sk-first") && !log.contains("sk-second"));
}

#[tokio::test]
async fn a_refusal_of_the_old_secret_is_told_as_that_and_as_nothing_else() {
    for (status, code) in [(401, "invalid_api_key"), (429, "insufficient_quota")] {
        let gate = Gate::default();
        let play =
            Play::json(status, &serde_json::json!({"error": {"message": "no", "type": code, "code": code}}));
        let provider = Provider::builder()
            .bad_keys_expected()
            .start({
                let gate = gate.clone();
                move |seen| match seen.key() {
                    "sk-first" => Play::new().until(&gate).then(play.clone()),
                    _ => ok(),
                }
            })
            .await;
        let dir = tempfile::tempdir().unwrap();
        let volume = Volume::new(dir.path(), "key", "sk-first");
        let lessor = start_with(&with_secret_file(&provider, &dir.path().join("key"))).await;
        let (_, ()) = tokio::join!(lessor.get("/openai/v1/models"), async {
            provider.request(1).await;
            volume.swap("key", "sk-second");
            says(&lessor, "\"rotated\":\"openai/a\"").await;
            gate.open();
        });
        says(&lessor, "a secret that this key has no more").await;
        assert_eq!(lessor.get("/openai/v1/models").await.status, 200);
        lessor.is_free_within_a_second("a").await; // a lease ends after its report
        assert!(!lessor.log().contains("this key is bad"), "{}", lessor.log());
        let events = lessor.cli(&["events"]).await;
        assert!(!events.ok().contains("openai/a is") && !events.ok().contains("cooldown"), "{}", events.ok());
        for reason in ["invalid", "quota"] {
            let counted = lessor.metric(&format!("lessor_key_cooldowns_total{{reason=\"{reason}\"}}")).await;
            assert_eq!(counted as u32, 0, "{code}: {reason}");
        }
        assert_eq!(lessor.status("a").await, "available");
    }
}

#[tokio::test]
async fn a_refusal_of_the_old_secret_touches_nothing_of_the_new() {
    let gate = Gate::default();
    let provider = Provider::builder()
        .bad_keys_expected()
        .start({
            let gate = gate.clone();
            move |seen| match seen.key() {
                "sk-first" => Play::new().until(&gate).then(invalid_key()),
                _ => ok(),
            }
        })
        .await;
    let dir = tempfile::tempdir().unwrap();
    let volume = Volume::new(dir.path(), "key", "sk-first");
    let lessor = start_with(&with_secret_file(&provider, &dir.path().join("key"))).await;
    let (answer, ()) = tokio::join!(lessor.get("/openai/v1/models"), async {
        provider.request(1).await;
        volume.swap("key", "sk-second");
        says(&lessor, "\"rotated\":\"openai/a\"").await;
        gate.open();
    });
    // The key was refused under its old secret: with the new one the same request may go on, and does.
    assert!([200, 401].contains(&answer.status), "{} {}", answer.status, answer.text());
    for _ in 0..3 {
        assert_eq!(lessor.get("/openai/v1/models").await.status, 200);
    }
    assert_eq!(lessor.status("a").await, "available");
}

#[tokio::test]
async fn two_sidecars_take_a_new_secret_at_different_times_and_none_fails() {
    let redis = Redis::start().await;
    let retired = Arc::new(AtomicBool::new(false));
    let provider = Provider::builder()
        .bad_keys_expected()
        .start({
            let retired = retired.clone();
            move |seen| match seen.key() {
                "sk-first" if retired.load(Ordering::Relaxed) => invalid_key(),
                _ => ok(),
            }
        })
        .await;
    let (left_dir, right_dir) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let left_volume = Volume::new(left_dir.path(), "key", "sk-first");
    let right_volume = Volume::new(right_dir.path(), "key", "sk-first");
    let toml = |dir: &Path| {
        format!("store.url = {:?}\n{}", redis.url(), with_secret_file(&provider, &dir.join("key")))
    };
    let left = start_with(&toml(left_dir.path())).await;
    let right = start_with(&toml(right_dir.path())).await;
    let all_served = async || {
        for lessor in [&left, &right] {
            for _ in 0..5 {
                let answer = lessor.get("/openai/v1/models").await;
                assert_eq!(answer.status, 200, "{}", answer.text());
            }
        }
    };
    all_served().await;
    left_volume.swap("key", "sk-second");
    says(&left, "\"rotated\":\"openai/a\"").await;
    // One has the new one, the other the old: both are good.
    all_served().await;
    right_volume.swap("key", "sk-second");
    says(&right, "\"rotated\":\"openai/a\"").await;
    retired.store(true, Ordering::Relaxed);
    all_served().await;
    assert!(provider.keys_seen().iter().rev().take(10).all(|key| key == "sk-second"));
}

#[tokio::test]
async fn a_configuration_that_came_before_its_secret_is_taken_when_that_comes() {
    let provider = Provider::start(openai).await;
    let dir = tempfile::tempdir().unwrap();
    let lessor = Setup::openai(&provider).key(Key::new("a")).start().await;
    let file = dir.path().join("later");
    let config = lessor.home().path().join("lessor.toml");
    std::fs::write(&config, with_secret_file(&provider, &file)).unwrap();
    hang_up(&lessor);
    says(&lessor, "the old one is kept").await;
    let refused = lessor.admin("/v1/status").await.json()["config_refused"]["error"].to_string();
    assert!(refused.contains(file.to_str().unwrap()), "{refused}");
    // Empty is as wrong as none, and another reason.
    std::fs::write(&file, "").unwrap();
    says(&lessor, "later is empty").await;
    std::fs::write(&file, "sk-later").unwrap();
    says(&lessor, "\"rotated\":\"openai/a\"").await;
    assert_eq!(lessor.chat().await.status, 200);
    assert_eq!(provider.keys_seen(), ["sk-later"]);
    assert_eq!(lessor.admin("/v1/status").await.json()["config_refused"], serde_json::Value::Null);
}

#[tokio::test]
async fn what_was_changed_beside_the_keys_is_named_and_nothing_of_its_values() {
    let provider = Provider::start(openai).await;
    let setup = Setup::openai(&provider).key(Key::new("a"));
    let lessor = setup.clone().start().await;
    let changed = setup
        .set("queue.max_wait", "\"7s\"")
        .set("retry.max_attempts", "2")
        .set("timeouts.idle", "\"7m\"")
        .set("ranking.jitter", "0")
        .set("shutdown.grace", "\"7s\"")
        .set("proxy.other_hosts", "\"deny\"")
        .set("websocket.idle", "\"7m\"")
        .set("scrub.compressed", "\"decode\"")
        .set("admin.token", "{ env = \"SECRET_OPENAI_A\" }")
        .set("pools.vip.fallback", "[\"default\"]");
    write(&lessor, &changed);
    hang_up(&lessor);
    let names = "queue retry timeouts shutdown ranking proxy scrub websocket admin pools";
    says(&lessor, &format!("\"changed\":\"\",\"apps_removed\":\"\",\"sections\":\"{names}\"")).await;
    // Read once more, nothing is new.
    hang_up(&lessor);
    says(&lessor, "\"apps_removed\":\"\",\"sections\":\"\"").await;
}

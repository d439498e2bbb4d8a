//! What happens to keys, leases, apps and the store, as people follow it; and keys that are drained.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::pedantic, missing_docs, unreachable_pub)]

mod support;

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use serde_json::{Value, json};
use support::client::send;
use support::plays::{openai, rate_limited};
use support::redis::Redis;
use support::{
    Door, Gate, Key, Lessor, NEVER, Play, Provider, Request, Setup, Stream, eventually, ms, within,
};

const CANARY: &str = "sk-CANARY-7f3a9c51e2";

/// A stream of events, and what of it was not looked at yet.
struct Events {
    stream: Stream,
    text: String,
    /// All that came.
    whole: String,
}

impl Events {
    async fn open(door: &Door, last: Option<&str>) -> Self {
        let mut request = Request::get("/v1/events");
        if let Some(last) = last {
            request = request.header("last-event-id", last);
        }
        let mut stream = within(NEVER, "a stream of events", send(door, request)).await.unwrap();
        assert_eq!(stream.status, 200);
        assert_eq!(stream.header("content-type"), "text/event-stream");
        let text = stream.read_to("\n\n").await;
        assert!(text.starts_with(": lessor events") || text.contains("retry:"), "{text}");
        let (_, rest) = text.split_once("\n\n").unwrap();
        Self { stream, text: rest.to_owned(), whole: text.clone() }
    }

    async fn of(lessor: &Lessor) -> Self {
        Self::open(&lessor.admin_door(), None).await
    }

    /// The next one: its id, and its data.
    async fn next(&mut self) -> (String, Value) {
        loop {
            if let Some((block, rest)) = self.text.split_once("\n\n") {
                let block = block.to_owned();
                self.text = rest.to_owned();
                let field = |name: &str| block.lines().find_map(|line| line.strip_prefix(name));
                let Some(data) = field("data: ") else { continue };
                let data: Value = serde_json::from_str(data).unwrap();
                assert_eq!(field("event: "), data["event"].as_str(), "{block}");
                return (field("id: ").unwrap_or_default().to_owned(), data);
            }
            let part = self.stream.next().await.expect("the stream goes on").unwrap();
            let part = String::from_utf8_lossy(&part).into_owned();
            self.whole.push_str(&part);
            self.text.push_str(&part);
        }
    }

    /// The next one of this kind; what came before it is passed over.
    async fn next_of(&mut self, kind: &str) -> Value {
        loop {
            let (_, event) = self.next().await;
            if event["event"] == kind {
                return event;
            }
        }
    }
}

#[tokio::test]
async fn a_rest_and_a_keys_status_are_told_when_they_begin_and_when_they_end_with_the_reason() {
    let refused = AtomicBool::new(false);
    let provider = Provider::start(move |seen| {
        if seen.key() == "sk-a" && !refused.swap(true, Ordering::SeqCst) {
            rate_limited("1")
        } else {
            openai(seen)
        }
    })
    .await;
    let setup = Setup::openai(&provider).key(Key::new("a")).key(Key::new("b"));
    // A limit of the whole key.
    let rule = "[{ status = [429], code = [\"rate_limit_exceeded\"], class = \"rate\", scope = \"key\" }]";
    let setup = setup.set("providers.openai.rules", rule);
    let lessor = setup.set("ranking.strategy", "\"fill_first\"").start().await;
    let mut events = Events::of(&lessor).await;
    assert_eq!(lessor.get("/openai/v1/models").await.header("x-lessor-key"), "b");
    let (_, began) = events.next().await;
    assert_eq!(began["event"], "cooldown_began");
    assert_eq!(
        (&began["subject"], &began["reason"], &began["status"]),
        (&json!("a"), &json!("rate"), &json!(429))
    );
    assert_eq!(began["code"], "rate_limit_exceeded");
    assert!(began["until_ms"].as_u64().unwrap() > began["at_ms"].as_u64().unwrap());
    let (_, status) = events.next().await;
    assert_eq!(status["event"], "key_status");
    assert_eq!((&status["provider"], &status["key"]), (&json!("openai"), &json!("a")));
    assert_eq!((&status["from"], &status["to"]), (&json!("available"), &json!("rate_limited")));
    assert_eq!(status["reason"], "rate");
    let (_, ended) = events.next().await;
    assert_eq!((&ended["event"], &ended["subject"]), (&json!("cooldown_ended"), &json!("a")));
    let (_, healed) = events.next().await;
    assert_eq!((&healed["event"], &healed["to"]), (&json!("key_status"), &json!("available")));
}

#[tokio::test]
async fn what_a_person_does_to_a_key_a_lease_and_an_app_is_told_through_both_doors() {
    let gate = Gate::default();
    let held = gate.clone();
    let provider = Provider::start(move |seen| match seen.path() {
        "/v1/stream" => Play::sse().event("one").until(&held).done(),
        _ => openai(seen),
    })
    .await;
    let lessor = Setup::openai(&provider).key(Key::new("a")).start().await;
    let doors = [lessor.admin_door(), Door::Unix(lessor.admin_socket().into())];
    let mut tcp = Events::open(&doors[0], None).await;
    let mut unix = Events::open(&doors[1], None).await;
    let mut stream = lessor.open(Request::get("/openai/v1/stream")).await;
    stream.read_to("one").await;
    let lease = stream.header("x-lessor-lease").to_owned();
    lessor.cli(&["keys", "disable", "openai/a"]).await.ok();
    lessor.cli(&["keys", "enable", "openai/a"]).await.ok();
    lessor.cli(&["leases", "revoke", &lease]).await.ok();
    lessor.cli(&["apps", "revoke", "anonymous"]).await.ok();
    lessor.cli(&["apps", "revoke", "anonymous"]).await.ok();
    lessor.cli(&["apps", "restore", "anonymous"]).await.ok();
    for events in [&mut tcp, &mut unix] {
        let disabled = events.next_of("key_status").await;
        assert_eq!((&disabled["to"], &disabled["reason"]), (&json!("disabled"), &json!("operator")));
        let enabled = events.next_of("key_status").await;
        assert_eq!((&enabled["to"], &enabled["reason"]), (&json!("available"), &Value::Null));
        let revoked = events.next_of("lease_revoked").await;
        assert_eq!((&revoked["lease"], &revoked["key"]), (&json!(lease), &json!("a")));
        assert_eq!(revoked["app"], "anonymous");
        assert_eq!(events.next().await.1["event"], "app_revoked");
        assert_eq!(events.next().await.1["event"], "app_restored", "what changes nothing is not told");
    }
    gate.open();
}

#[tokio::test]
async fn who_comes_back_gets_what_he_missed_and_is_told_how_much_is_not_there_any_more() {
    let provider = Provider::start(openai).await;
    let lessor = Setup::openai(&provider).key(Key::new("a")).start().await;
    let mut events = Events::of(&lessor).await;
    let turn = async |what: &str| {
        assert_eq!(lessor.admin_post(&format!("/v1/apps/anonymous/{what}")).await.status, 200);
    };
    turn("revoke").await;
    let (first, _) = events.next().await;
    turn("restore").await;
    drop(events);
    let mut again = Events::open(&lessor.admin_door(), Some(&first)).await;
    assert_eq!(again.next().await.1["event"], "app_restored", "nothing twice, and nothing is lost");
    drop(again);
    for _ in 0..550 {
        turn("revoke").await;
        turn("restore").await;
    }
    let mut late = Events::open(&lessor.admin_door(), Some(&first)).await;
    let (id, missed) = late.next().await;
    assert_eq!((id.as_str(), &missed["event"], &missed["count"]), ("", &json!("missed"), &json!(101)));
    for _ in 0..1000 {
        let (id, event) = late.next().await;
        assert!(!id.is_empty() && event["event"].as_str().unwrap().starts_with("app_"));
    }
    let mut other = Events::open(&lessor.admin_door(), Some("00000000-5")).await;
    let (_, missed) = other.next().await;
    assert_eq!((&missed["event"], &missed["count"]), (&json!("missed"), &Value::Null), "another process' id");
    let door = lessor.admin_door();
    let wrong = Request::get("/v1/events").header("last-event-id", "yesterday");
    assert_eq!(send(&door, wrong).await.unwrap().status, 400);
}

#[tokio::test]
async fn where_a_group_rests_every_key_of_it_is_told_shown_and_counted_as_what_the_group_is() {
    let provider = Provider::start(|seen| match seen.key() {
        "sk-other" => openai(seen),
        _ => {
            let error = json!({"error": {"message": "no", "type": "insufficient_quota", "code": "insufficient_quota"}});
            Play::json(429, &error)
        }
    })
    .await;
    let setup = ["a", "b", "c"]
        .into_iter()
        .fold(Setup::openai(&provider), |setup, id| setup.key(Key::new(id).group("org")));
    let setup = setup.key(Key::new("other").group("else")).set("ranking.strategy", "\"fill_first\"");
    let lessor = setup.start().await;
    let mut events = Events::of(&lessor).await;
    let answer = lessor.chat().await;
    assert_eq!((answer.status, answer.header("x-lessor-key")), (200, "other"), "{}", answer.text());
    assert_eq!(events.next().await.1["subject"], "org");
    let mut told = Vec::new();
    for _ in 0..3 {
        let (_, event) = events.next().await;
        assert_eq!((&event["event"], &event["to"]), (&json!("key_status"), &json!("exhausted")), "{event}");
        assert_eq!(event["reason"], "quota");
        told.push(event["key"].as_str().unwrap().to_owned());
    }
    told.sort();
    assert_eq!(told, ["a", "b", "c"]);
    for id in ["a", "b", "c"] {
        assert_eq!(lessor.status(id).await, "exhausted");
        for (status, here) in [("exhausted", 1), ("available", 0)] {
            let name = format!("lessor_key_status{{provider=\"openai\",key=\"{id}\",status=\"{status}\"}}");
            assert_eq!(lessor.metric(&name).await as u32, here, "{name}");
        }
    }
    assert_eq!(lessor.status("other").await, "available");
    let pools = lessor.admin("/v1/pools").await.json();
    assert_eq!((&pools["pools"][0]["keys"], &pools["pools"][0]["available"]), (&json!(4), &json!(1)));
    let shown = lessor.cli(&["status"]).await;
    assert!(shown.ok().contains("org: quota (429 insufficient_quota), ends in"), "{}", shown.ok());
    // lifted by hand, all are told as available again
    lessor.cli(&["keys", "enable", "openai/a"]).await.ok();
    lessor.admin_post("/v1/keys/openai/a/clear").await;
    assert_eq!(events.next_of("cooldown_ended").await["subject"], "org");
    for _ in 0..3 {
        assert_eq!(events.next_of("key_status").await["to"], "available");
    }
}

#[tokio::test]
async fn a_store_that_goes_away_and_comes_back_is_told() {
    let provider = Provider::start(openai).await;
    let redis = Redis::start().await;
    let setup = Setup::openai(&provider).key(Key::new("a")).set("store.url", &format!("\"{}\"", redis.url()));
    let lessor = setup.start().await;
    let mut events = Events::of(&lessor).await;
    assert_eq!(lessor.get("/openai/v1/models").await.status, 200);
    redis.kill();
    eventually("the store is missed", async || {
        (lessor.get("/openai/v1/models").await.status == 503).then_some(())
    })
    .await;
    let away = events.next_of("store_away").await;
    assert_eq!(away["store"], "redis");
    assert!(!away["reason"].as_str().unwrap().is_empty());
    redis.restart().await;
    events.next_of("store_back").await;
}

#[tokio::test]
async fn a_configuration_that_was_read_again_is_told_and_the_stream_goes_on() {
    let provider = Provider::start(openai).await;
    let setup = Setup::openai(&provider).key(Key::new("a"));
    let lessor = setup.clone().start().await;
    let mut events = Events::of(&lessor).await;
    let file = lessor.home().path().join("lessor.toml");
    std::fs::write(&file, setup.set("ranking.jitter", "0").toml()).unwrap();
    lessor.signal(rustix::process::Signal::HUP);
    let (_, taken) = events.next().await;
    assert_eq!(
        (&taken["event"], &taken["config"]),
        (&json!("config_reloaded"), &json!(file.to_str().unwrap()))
    );
    let weights = lessor.admin("/v1/status?explain=true").await.json();
    assert_eq!(weights["ranking"]["jitter"], 0.0, "and counts at once");
}

#[tokio::test]
async fn the_streams_end_when_lessor_stops_and_do_not_hold_it_up() {
    let provider = Provider::start(openai).await;
    let mut lessor = Setup::openai(&provider).key(Key::new("a")).start().await;
    let events = Events::of(&lessor).await;
    let begun = Instant::now();
    lessor.sigterm();
    assert!(lessor.ends_within(NEVER).await.success());
    assert!(begun.elapsed() < ms(3000), "{:?}", begun.elapsed());
    events.stream.end().await.expect("a clean end");
}

#[tokio::test]
async fn the_command_prints_what_happened_for_people_and_for_programs() {
    let provider = Provider::start(openai).await;
    let lessor = Setup::openai(&provider).key(Key::new("a")).start().await;
    assert_eq!(lessor.cli(&["events"]).await.ok(), "", "nothing happened");
    lessor.cli(&["keys", "disable", "openai/a"]).await.ok();
    let lines = eventually("it is told", async || {
        let lines = lessor.cli(&["events", "--json"]).await.ok().to_owned();
        (!lines.is_empty()).then_some(lines)
    })
    .await;
    let events: Vec<Value> = lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!((&events[0]["event"], &events[0]["key"]), (&json!("key_status"), &json!("a")));
    let page = lessor.cli(&["events"]).await;
    assert!(page.ok().contains("key openai/a is disabled, was available: operator"), "{page:?}");
}

#[tokio::test]
async fn a_followed_stream_is_printed_as_it_comes_until_nobody_reads() {
    use std::io::{BufRead as _, BufReader};
    let provider = Provider::start(openai).await;
    let lessor = Setup::openai(&provider).key(Key::new("a")).start().await;
    let mut command = lessor.home().command();
    command.args(["events", "--follow", "--json", "--admin"]).arg(lessor.admin_socket());
    let mut child = command.stdout(std::process::Stdio::piped()).spawn().unwrap();
    let mut out = BufReader::new(child.stdout.take().unwrap());
    lessor.admin_post("/v1/apps/anonymous/revoke").await;
    let first = tokio::task::spawn_blocking(move || {
        let mut line = String::new();
        out.read_line(&mut line).unwrap();
        line // and the reader is gone
    });
    let first: Value = serde_json::from_str(&within(NEVER, "a line", first).await.unwrap()).unwrap();
    assert_eq!(first["event"], "app_revoked");
    let ended = eventually("the command ends", async || {
        lessor.admin_post("/v1/apps/anonymous/restore").await;
        lessor.admin_post("/v1/apps/anonymous/revoke").await;
        child.try_wait().unwrap()
    })
    .await;
    assert_eq!(ended.code(), Some(0));
}

#[tokio::test]
async fn a_drained_key_gets_no_new_request_and_the_command_waits_for_its_last_one() {
    let gate = Gate::default();
    let held = gate.clone();
    let provider = Provider::start(move |seen| match seen.path() {
        "/v1/stream" => Play::sse().event("one").until(&held).done(),
        _ => openai(seen),
    })
    .await;
    let setup = Setup::openai(&provider).key(Key::new("a")).key(Key::new("b"));
    let lessor = setup.set("ranking.strategy", "\"fill_first\"").start().await;
    let mut stream = lessor.open(Request::get("/openai/v1/stream")).await;
    stream.read_to("one").await;
    let (lease, key) = (stream.header("x-lessor-lease").to_owned(), stream.header("x-lessor-key").to_owned());
    assert_eq!(key, "a");
    let waited = lessor.cli(&["keys", "drain", "openai/a", "--timeout", "300ms"]).await;
    assert_eq!(waited.code, Some(1), "{waited:?}");
    assert!(waited.stdout.contains("1 still live") && waited.stdout.contains(&lease), "{waited:?}");
    let a = lessor.key("a").await;
    assert_eq!(
        (&a["status"], &a["reason"], &a["in_use"]),
        (&json!("disabled"), &json!("drained"), &json!(1))
    );
    assert_eq!(lessor.get("/openai/v1/models").await.header("x-lessor-key"), "b");
    let drained = async { lessor.cli(&["keys", "drain", "openai/a", "--json"]).await };
    let ending = async {
        gate.open();
        stream.whole().await.expect("a whole answer: draining cuts nothing");
    };
    let (drained, ()) = tokio::join!(drained, ending);
    assert_eq!(drained.code, Some(0), "{drained:?}");
    assert_eq!(drained.json(), json!({"provider": "openai", "key": "a", "drained": true, "leases": []}));
    assert_eq!(lessor.key("a").await["reason"], "drained", "until it is enabled");
    lessor.cli(&["keys", "enable", "openai/a"]).await.ok();
    assert_eq!(lessor.status("a").await, "available");
    assert_eq!(lessor.get("/openai/v1/models").await.header("x-lessor-key"), "a");
}

#[tokio::test]
async fn draining_at_one_sidecar_waits_for_the_requests_of_another_that_shares_the_store() {
    let gate = Gate::default();
    let held = gate.clone();
    let provider = Provider::start(move |_| Play::sse().event("one").until(&held).done()).await;
    let dir = tempfile::tempdir().unwrap();
    let url = format!("\"sqlite://{}\"", dir.path().join("state.db").display());
    let setup = Setup::openai(&provider).key(Key::new("a")).set("store.url", &url);
    let (here, there) = (setup.clone().start().await, setup.start().await);
    let mut stream = there.open(Request::get("/openai/v1/stream")).await;
    stream.read_to("one").await;
    let waited = here.cli(&["keys", "drain", "openai/a", "--timeout", "0s"]).await;
    assert_eq!(waited.code, Some(1), "{waited:?}");
    let refused = Request::get("/openai/v1/stream").header("x-lessor-max-wait", "0s");
    assert_eq!(there.ask(refused).await.header("x-lessor-error"), "key_unavailable");
    gate.open();
    stream.whole().await.unwrap();
    here.cli(&["keys", "drain", "openai/a", "--timeout", "10s"]).await.ok();
}

#[tokio::test]
async fn no_secret_is_in_any_event() {
    let provider = Provider::start(|seen| {
        let error = support::plays::openai_error("requests", "rate_limit_exceeded", seen.key());
        Play::json_with(429, &[("retry-after", "1"), ("x-echo", seen.key())], &error)
    })
    .await;
    let lessor = Setup::openai(&provider).key(Key::new("a").secret(CANARY)).start().await;
    let mut events = Events::of(&lessor).await;
    assert_eq!(lessor.get("/openai/v1/models").await.status, 429);
    events.next_of("cooldown_began").await;
    events.next_of("cooldown_ended").await;
    lessor.cli(&["keys", "disable", "openai/a"]).await.ok();
    events.next_of("key_status").await;
    let said = events.whole
        + &lessor.cli(&["events"]).await.stdout
        + &lessor.cli(&["events", "--json"]).await.stdout;
    assert!(!said.contains("CANARY") && !said.contains("7f3a9c51e2"), "{said}");
}

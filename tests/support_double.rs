//! The provider double, checked by itself: a test that leans on it may trust what it reports.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::pedantic, missing_docs, unreachable_pub)]

mod support;

use support::client::{patterned, send};
use support::provider::ok;
use support::{Cut, Door, Gate, Play, Provider, Request, eventually, ms};

fn door(provider: &Provider) -> Door {
    Door::Tcp(provider.addr())
}

fn get(key: &str) -> Request {
    Request::get("/v1/models").header("authorization", &format!("Bearer {key}"))
}

#[tokio::test]
async fn a_request_without_exactly_one_good_key_gets_401_and_is_reported() {
    let provider = Provider::builder().plain().bad_keys_expected().start(|_| ok()).await;
    let bare = send(&door(&provider), Request::get("/v1/models")).await.unwrap();
    assert_eq!(bare.status, 401);
    let placeholder = send(&door(&provider), get("sk-placeholder")).await.unwrap();
    assert_eq!(placeholder.status, 401);
    let doubled = send(&door(&provider), get("sk-a").header("x-api-key", "sk-a")).await.unwrap();
    assert_eq!(doubled.status, 401);
    let good = send(&door(&provider), get("sk-a")).await.unwrap();
    assert_eq!(good.status, 200);
    assert_eq!(provider.faults().len(), 3);
    assert_eq!(provider.seen()[3].key(), "sk-a");
}

#[tokio::test]
async fn open_requests_are_counted_by_key_and_at_their_most() {
    let gate = Gate::default();
    let held = gate.clone();
    let provider = Provider::plain(move |_| Play::new().until(&held).then(ok())).await;
    let at = door(&provider);
    let (a, b) = (
        tokio::spawn({
            let at = at.clone();
            async move { send(&at, get("sk-a")).await }
        }),
        tokio::spawn(async move { send(&at, get("sk-a")).await }),
    );
    eventually("two open requests", async || (provider.open() == 2).then_some(())).await;
    gate.open();
    a.await.unwrap().unwrap().whole().await.unwrap();
    b.await.unwrap().unwrap().whole().await.unwrap();
    assert_eq!((provider.open(), provider.most_at_once("sk-a"), provider.most_at_once("sk-b")), (0, 2, 0));
}

#[tokio::test]
async fn a_client_that_leaves_is_seen_while_the_double_holds_back() {
    let provider = Provider::plain(|_| Play::sse().event("one").silence()).await;
    let mut stream = send(&door(&provider), get("sk-a")).await.unwrap();
    stream.read_to("one").await;
    drop(stream);
    eventually("the client's end", async || provider.seen()[0].gone.map(drop)).await;
    assert_eq!(provider.open(), 0);
}

#[tokio::test]
async fn each_way_to_break_off_is_an_error_for_a_client() {
    let provider = Provider::plain(|seen| {
        let play = match seen.target.as_str() {
            "/length" => Play::new().head(200, &[("content-length", "100")]).bytes("short"),
            _ => Play::sse().event("one"),
        };
        play.wait(ms(20)).cut(if seen.target == "/reset" { Cut::Reset } else { Cut::Close })
    })
    .await;
    for target in ["/length", "/chunks", "/reset"] {
        let request = Request::get(target).header("authorization", "Bearer sk-a");
        let cut = send(&door(&provider), request).await.unwrap().whole().await;
        assert!(cut.is_err(), "{target}: {cut:?}");
    }
}

#[tokio::test]
async fn bodies_are_counted_and_compared_with_the_pattern_both_ways() {
    const LEN: u64 = 3_000_001;
    let provider =
        Provider::plain(|_| Play::new().head(200, &[("content-length", &LEN.to_string())]).flood(LEN)).await;
    let request =
        Request::new("POST", "/v1/files").header("authorization", "Bearer sk-a").body(patterned(LEN));
    let answer = send(&door(&provider), request).await.unwrap();
    assert_eq!(answer.pattern_len().await, LEN);
    let seen = provider.request(1).await;
    assert_eq!((seen.body_len, seen.body_is_pattern, seen.body_complete), (LEN, true, true));
}

#[tokio::test]
async fn the_sdks_are_content_with_the_double_itself() {
    use support::provider::Manners;
    use support::sdk::{node, python};
    let openai = Provider::builder().plain().start(support::plays::openai).await;
    let anthropic = Provider::builder().plain().manners(Manners::Open).start(support::plays::anthropic).await;
    let openai_url = format!("{}/v1", openai.base_url());
    for mut command in [
        python("tests/sdks/openai_sdk.py"),
        node("tests/sdks/openai_sdk.mjs"),
        python("tests/sdks/anthropic_sdk.py"),
    ] {
        command.env("OPENAI_BASE_URL", &openai_url).env("OPENAI_API_KEY", "sk-a");
        command.env("ANTHROPIC_BASE_URL", anthropic.base_url()).env("ANTHROPIC_API_KEY", "sk-a");
        let ran = support::lessor::run(command).await;
        assert_eq!(ran.ok().matches("\"whole\"").count(), ran.stdout.matches("Hello, world").count() / 2);
    }
    assert_eq!((openai.count(), anthropic.count()), (5 + 3, 4));
}

#[tokio::test]
async fn in_the_sandbox_usual_ports_are_free_and_a_providers_name_is_loopback() {
    let test = "in_the_sandbox_usual_ports_are_free_and_a_providers_name_is_loopback";
    if !support::sandbox::inside(test).await {
        return;
    }
    let provider = Provider::builder().port(443).start(|_| ok()).await;
    let url = "https://api.openai.com/v1/models";
    let ca = provider.ca_file().display().to_string();
    let curl = support::sdk::curl(&[url, "--cacert", &ca, "--header", "authorization: Bearer sk-a"]);
    support::lessor::run(curl).await.ok();
    assert_eq!(provider.count(), 1);
}

//! The gate of models: what a request names decides its key, and what cannot be read gets no key of a few models.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::pedantic, missing_docs, unreachable_pub)]

mod support;

use support::client::{fed, full};
use support::plays::openai;
use support::provider::{Manners, ok};
use support::{Key, Lessor, Provider, Request, Setup};
use tokio::io::AsyncWriteExt as _;

const CHAT: &str = "/openai/v1/chat/completions";

/// `a` serves `gpt-*` alone; `b`, where there is one, everything.
async fn lessor(provider: &Provider, with_b: bool, more: impl FnOnce(Setup) -> Setup) -> Lessor {
    let mut setup = Setup::openai(provider).key(Key::new("a").models(&["gpt-*", "whisper-1"]));
    if with_b {
        setup = setup.key(Key::new("b"));
    }
    more(setup.set("ranking.strategy", "\"fill_first\"")).start().await
}

fn json(body: impl Into<bytes::Bytes>) -> Request {
    Request::new("POST", CHAT).header("content-type", "application/json").body(full(body))
}

/// Images of that many MiB, and behind them the model.
fn images(mib: usize) -> Vec<u8> {
    let mut body = br#"{"messages":[{"role":"user","content":"data:image/png;base64,"#.to_vec();
    body.resize(body.len() + (mib << 20), b'A');
    body.extend(br#""}],"model":"gpt-4o"}"#);
    body
}

#[tokio::test]
async fn a_request_without_a_model_is_served_by_a_key_of_a_few() {
    let provider = Provider::plain(openai).await;
    let lessor = lessor(&provider, false, |setup| setup).await;
    assert_eq!(lessor.get("/openai/v1/models").await.status, 200);
    let upload = Request::new("POST", "/openai/v1/files").body(full("x"));
    assert_eq!(lessor.ask(upload).await.header("x-lessor-key"), "a", "a path that is known as such");
}

#[tokio::test]
async fn two_models_a_packed_body_or_one_past_the_bound_get_only_keys_without_models() {
    let provider = Provider::plain(|_| ok()).await;
    let packed = || json(r#"{"model":"gpt-4o"}"#).header("content-encoding", "gzip");
    let twice = || json(r#"{"model":"gpt-4o","model":"o1"}"#);
    let nested = || json(r#"{"model":"gpt-4o","messages":[{"model":"o1"}]}"#);
    let with_b = lessor(&provider, true, |setup| setup).await;
    let alone = lessor(&provider, false, |setup| setup).await;
    assert_eq!(with_b.ask(nested()).await.header("x-lessor-key"), "a");
    for ask in [twice, packed, || json(images(20))] {
        let answer = with_b.ask(ask()).await;
        assert_eq!((answer.status, answer.header("x-lessor-key")), (200, "b"));
        alone.ask(ask()).await.is_error(404, "no_candidate");
    }
    assert_eq!(provider.seen().last().unwrap().body_len, images(20).len() as u64, "it streams, whole");
}

#[tokio::test]
async fn twenty_mebibytes_of_images_before_the_model_are_read_where_the_bound_allows() {
    let provider = Provider::plain(|_| ok()).await;
    let larger = lessor(&provider, true, |setup| setup.set("retry.max_body", "\"32MiB\"")).await;
    assert_eq!(larger.ask(json(images(20))).await.header("x-lessor-key"), "a");
    // Where no key has models the body is looked at only for a cooldown's scope, and never refused for it.
    let setup = Setup::openai(&provider).key(Key::new("c"));
    let open = setup.start().await;
    assert_eq!(open.ask(json(images(20))).await.header("x-lessor-key"), "c");
    assert!(provider.seen().iter().all(|seen| seen.body_len == images(20).len() as u64));
}

#[tokio::test]
async fn where_only_a_cooldown_needs_the_model_the_body_is_read_no_further_than_it() {
    let provider = Provider::builder()
        .plain()
        .before_body(|seen| (seen.header("x-early") == "1").then(ok))
        .start(|_| ok())
        .await;
    let open = Setup::openai(&provider).key(Key::new("c")).start().await;
    let (send, body) = fed();
    send.send(r#"{"model":"gpt-4o","messages":["#.into()).await.unwrap();
    // The rest never comes before the answer does.
    let answer = open.ask(Request::new("POST", CHAT).header("x-early", "1").body(body)).await;
    assert_eq!(answer.status, 200);
    drop(send);
}

/// A form with a file of `size` bytes, then the model.
fn form(size: usize, model: &str) -> Vec<u8> {
    let mut body =
        b"--Xyz\r\nContent-Disposition: form-data; name=\"file\"; filename=\"a.wav\"\r\nContent-Type: audio/wav\r\n\r\n"
            .to_vec();
    body.resize(body.len() + size, b'-');
    body.extend(b"\r\n--Xyz\r\nContent-Disposition: form-data; name=\"model\"\r\n\r\n");
    body.extend(model.as_bytes());
    body.extend(b"\r\n--Xyz--\r\n");
    body
}

#[tokio::test]
async fn the_model_of_a_form_binds_like_one_in_json() {
    let provider = Provider::plain(|_| ok()).await;
    let ask = |body: Vec<u8>| {
        Request::new("POST", "/openai/v1/audio/transcriptions")
            .header("content-type", "multipart/form-data; boundary=Xyz")
            .body(full(body))
    };
    let alone = lessor(&provider, false, |setup| setup).await;
    let sent = form(3 << 20, "whisper-1");
    assert_eq!(alone.ask(ask(sent.clone())).await.header("x-lessor-key"), "a");
    assert_eq!(provider.seen()[0].body, sent, "to the byte");
    alone.ask(ask(form(100, "other-1"))).await.is_error(404, "no_candidate");
    let twice = [&form(9, "whisper-1")[..form(9, "whisper-1").len() - 9], &form(9, "other-1")].concat();
    alone.ask(ask(twice)).await.is_error(404, "no_candidate");
    let other = ask(sent).header("content-type", "multipart/form-data; boundary=Xyz; boundary=Zyx");
    assert_eq!(alone.ask(other).await.status, 404, "two types, or two boundaries, are unreadable");
    assert_eq!(provider.count(), 1);
}

#[tokio::test]
async fn a_model_of_two_segments_and_one_in_another_field_bind() {
    let provider = Provider::builder().manners(Manners::Open).plain().start(|_| ok()).await;
    let lessor = Setup::new()
        .provider("replicate", &provider)
        .provider("elevenlabs", &provider)
        .key(Key::new("r").of("replicate").models(&["meta/*"]))
        .key(Key::new("e").of("elevenlabs").models(&["eleven_*"]))
        .start()
        .await;
    let post = |path: &str, body: &'static str| lessor.ask(Request::new("POST", path).body(full(body)));
    let predict = |model: &str| format!("/replicate/v1/models/{model}/predictions");
    assert_eq!(post(&predict("meta/llama-3"), "{}").await.header("x-lessor-key"), "r");
    post(&predict("mata/llama-3"), "{}").await.is_error(404, "no_candidate");
    post(&predict("meta%2Fx/llama-3"), "{}").await.is_error(404, "no_candidate");
    let speak = "/elevenlabs/v1/text-to-speech/voice";
    assert_eq!(post(speak, r#"{"model_id":"eleven_v3","model":"x"}"#).await.header("x-lessor-key"), "e");
    post(speak, r#"{"model_id":"other","model":"eleven_v3"}"#).await.is_error(404, "no_candidate");
}

/// Starts a body of 8 MiB and sends 7 of them: what stands behind them is the model.
async fn stalled(lessor: &Lessor) -> support::Raw {
    let mut raw = lessor.raw().await;
    let head = format!(
        "POST {CHAT} HTTP/1.1\r\nHost: {}\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n",
        lessor.authority(),
        8 << 20
    );
    raw.write(&head).await;
    raw.0.write_all(&images(7)[..7 << 20]).await.unwrap();
    raw
}

#[tokio::test]
async fn bodies_that_together_are_too_large_to_be_kept_go_one_after_the_other_and_none_is_refused() {
    let provider = Provider::plain(openai).await;
    let lessor = lessor(&provider, false, |setup| setup.set("retry.max_total", "\"8MiB\"")).await;
    let all = futures_util::future::join_all((0..12).map(|_| lessor.ask(json(images(5))))).await;
    let all: Vec<u16> = all.iter().map(|answer| answer.status).collect();
    assert_eq!(all, [200; 12]);
    assert_eq!(provider.count(), 12, "each reached the provider once");
}

#[tokio::test]
async fn where_stalled_bodies_fill_all_room_small_ones_go_on_and_a_large_one_is_told_to_come_again() {
    let provider = Provider::plain(openai).await;
    let lessor = lessor(&provider, false, |setup| setup.set("retry.max_total", "\"8MiB\"")).await;
    // The first fills it, the second has the turn to go beyond it.
    let filling = [stalled(&lessor).await, stalled(&lessor).await];
    let large = || json(images(2)).header("x-lessor-max-wait", "200ms");
    let refused = support::eventually("no room is left", async || {
        let answer = lessor.ask(large()).await;
        (answer.status != 200).then_some(answer)
    });
    let refused = refused.await;
    assert_eq!((refused.status, refused.header("x-lessor-error")), (429, "pool_exhausted"));
    assert_ne!(refused.header("retry-after"), "");
    assert!(refused.text().contains("retry.max_total (8388608 bytes)"), "{}", refused.text());
    let small = format!("{{\"messages\":\"{}\",\"model\":\"gpt-4o\"}}", "x".repeat(30_000));
    assert_eq!(lessor.ask(json(small)).await.status, 200);
    drop(filling);
    let served = async || (lessor.ask(large()).await.status == 200).then_some(());
    support::eventually("room is given back", served).await;
}

//! What refusals may not do: words of a caller's, a moment's trouble or one caller's mistake keep no key from others,
//! and nobody waits beyond a bound.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::pedantic, missing_docs, unreachable_pub)]

mod support;

use support::plays::openai;
use support::provider::Manners;
use support::{Key, Play, Provider, Request, Setup};

#[tokio::test]
async fn what_a_caller_sent_proves_no_key_bad_when_the_provider_repeats_it() {
    let words = "Incorrect API key provided";
    let provider = Provider::builder()
        .manners(Manners::Open)
        .start(move |seen| {
            if seen.path().ends_with("/models") {
                return openai(seen);
            }
            let input = serde_json::json!([{"type": "string_type", "msg": "a valid string", "input": words}]);
            Play::json(400, &serde_json::json!({ "detail": input }))
        })
        .await;
    let setup = Setup::new().provider("xai", &provider).key(Key::new("a").of("xai"));
    let lessor = setup.start().await;
    let body = serde_json::json!({"model": words, "messages": []});
    assert_eq!(lessor.ask(Request::post("/xai/v1/chat/completions", &body)).await.status, 400);
    let keys = lessor.admin("/v1/keys").await.json();
    assert_eq!(keys["keys"][0]["status"], "available", "{keys}");
}

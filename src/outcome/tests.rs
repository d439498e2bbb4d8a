#![allow(clippy::unwrap_used)]

use std::io::Write as _;
use std::sync::Arc;

use flate2::Compression;
use flate2::write::{DeflateEncoder, GzEncoder, ZlibEncoder};
use http::{HeaderName, HeaderValue};
use proptest::prelude::*;

use super::*;
use crate::config::WaitFormat;
use crate::config::catalogue::{RawProvider, builtin};
use crate::model::{GroupName, ProviderName};

/// 2026-02-10 12:00:00 UTC.
const NOW: u64 = 1_770_724_800;

fn now() -> SystemTime {
    SystemTime::UNIX_EPOCH + Duration::from_secs(NOW)
}

fn provider(name: &str) -> Arc<Provider> {
    Arc::clone(&builtin()[name])
}

/// A provider of the user's own: `toml` over nothing but the generic rules.
fn own(toml: &str) -> Arc<Provider> {
    let raw: RawProvider = toml::from_str(&format!("base_url = 'https://own.example'\n{toml}")).unwrap();
    Arc::new(raw.compile(&ProviderName::parse("own").unwrap(), None).unwrap())
}

fn headers(lines: &str) -> HeaderMap {
    let lines = lines.split('|').filter_map(|line| line.split_once(':'));
    lines
        .map(|(name, value)| {
            (name.trim().parse::<HeaderName>().unwrap(), HeaderValue::from_str(value.trim()).unwrap())
        })
        .collect()
}

fn read_at(provider: &Provider, status: u16, lines: &str, body: impl AsRef<[u8]>) -> Outcome {
    read(provider, StatusCode::from_u16(status).unwrap(), &headers(lines), body.as_ref(), now())
}

/// An answer, and what it must mean: `class scope wait`, `!` after the class where it proves the key bad.
type Row<'a> = (u16, &'a str, &'a str, &'a str);

fn holds(provider: &Provider, rows: &[Row<'_>]) {
    for (status, lines, body, meant) in rows {
        let outcome = read_at(provider, *status, lines, body);
        let class = outcome.class.as_str();
        let proof = if outcome.class == Class::Invalid && outcome.proven { "!" } else { "" };
        let scope = serde_json::to_value(outcome.scope).unwrap();
        let got = format!("{class}{proof} {}", scope.as_str().unwrap());
        let (word, wait) = meant.split_at(meant.match_indices(' ').nth(1).unwrap().0);
        let wait = Some(wait.trim()).filter(|wait| *wait != "-");
        let wait = wait.map(|wait| humantime::parse_duration(wait).unwrap());
        assert_eq!((got.as_str(), outcome.wait), (word, wait), "{} {status} {lines} {body}", provider.name);
        assert_eq!(outcome.status, Some(*status));
    }
}

/// An error of OpenAI's shape.
macro_rules! openai {
    ($type:literal, $code:literal) => {
        openai!($type, $code, "")
    };
    ($type:literal, $code:literal, $message:literal) => {
        concat!(
            r#"{"error":{"message":""#,
            $message,
            r#"","type":""#,
            $type,
            r#"","param":null,"code":""#,
            $code,
            r#""}}"#
        )
    };
}

/// An error of Anthropic's shape.
macro_rules! anthropic {
    ($type:literal) => {
        anthropic!($type, "")
    };
    ($type:literal, $message:literal) => {
        concat!(r#"{"type":"error","error":{"type":""#, $type, r#"","message":""#, $message, r#""}}"#)
    };
}

#[test]
fn every_refusal_of_openai_means_what_its_documents_say() {
    holds(
        &provider("openai"),
        &[
            (401, "", openai!("invalid_request_error", "invalid_api_key"), "invalid! key -"),
            (401, "", openai!("invalid_request_error", "account_deactivated"), "invalid! key -"),
            (
                401,
                "",
                r#"{"error":{"message":"Incorrect API key provided: sk-x.","code":null}}"#,
                "invalid! key -",
            ),
            (401, "", openai!("invalid_request_error", "ip_not_authorized"), "region key -"),
            (429, "retry-after: 2", openai!("tokens", "rate_limit_exceeded"), "rate group_model 2s"),
            (429, "", openai!("requests", ""), "rate group_model -"),
            (429, "", openai!("tokens", ""), "rate group_model -"),
            (429, "", "", "rate group_model -"),
            (429, "", openai!("requests", "slow_down"), "rate group_model 1m"),
            (503, "", openai!("server_error", "slow_down"), "rate group_model 1m"),
            (429, "", openai!("insufficient_quota", "insufficient_quota"), "quota group -"),
            (429, "", openai!("insufficient_quota", ""), "quota group -"),
            (429, "", openai!("", "credit_balance_exhausted"), "quota group -"),
            (429, "", openai!("", "billing_not_active"), "quota group -"),
            // from 10 February noon to 1 March
            (429, "", openai!("", "organization_spend_limit_exceeded"), "quota group 18days 12h"),
            (429, "", openai!("", "organization_usage_limit_exceeded"), "quota group 18days 12h"),
            (429, "", openai!("", "project_spend_limit_exceeded"), "quota key 18days 12h"),
            (403, "", openai!("request_forbidden", "unsupported_country_region_territory"), "region key -"),
            (404, "", openai!("invalid_request_error", "model_not_found"), "access key_model -"),
            (403, "", openai!("invalid_request_error", "model_not_found"), "access key_model -"),
            (503, "", openai!("", "overloaded"), "overloaded provider_model -"),
            (503, "", openai!("", "server_is_overloaded"), "overloaded provider_model -"),
            (503, "retry-after: 5", "", "overloaded provider_model 5s"),
            (500, "", openai!("server_error", ""), "network key -"),
            (500, "", openai!("server_error", "overloaded"), "overloaded provider_model -"),
            (502, "", "<html>bad gateway</html>", "network key -"),
            (404, "", openai!("invalid_request_error", ""), "caller key -"),
            (400, "retry-after: 5", openai!("invalid_request_error", "insufficient_quota"), "caller key -"),
        ],
    );
}

#[test]
fn a_callers_wrong_organisation_header_never_proves_a_key_bad() {
    let openai = provider("openai");
    holds(
        &openai,
        &[
            (401, "", openai!("invalid_request_error", "missing_scope"), "access key_model -"),
            (401, "", openai!("invalid_request_error", "mismatched_organization"), "invalid key_model -"),
            (401, "", openai!("invalid_request_error", "invalid_organization"), "invalid key_model -"),
            (401, "", openai!("invalid_request_error", "mismatched_project"), "invalid key_model -"),
            (401, "", openai!("invalid_request_error", "a_code_of_tomorrow"), "invalid key_model -"),
            (401, "", "", "invalid key_model -"),
            (403, "", openai!("invalid_request_error", ""), "invalid key_model -"),
            // what is said of the key in passing, where a caller's words may stand, proves nothing
            (
                401,
                "",
                openai!("x", "", "No such organization: Incorrect API key provided"),
                "invalid key_model -",
            ),
        ],
    );
}

#[test]
fn every_refusal_of_anthropic_means_what_its_documents_say() {
    let spend = r#"{"type":"error","error":{"type":"rate_limit_error","message":"","details":{"error_code":"enforced_spend_limit_reached"}}}"#;
    holds(
        &provider("anthropic"),
        &[
            (401, "", anthropic!("authentication_error", "invalid x-api-key"), "invalid! key -"),
            (401, "", "", "invalid key_model -"),
            (402, "", anthropic!("billing_error"), "quota group -"),
            (402, "", "", "quota group -"),
            (
                400,
                "",
                anthropic!("invalid_request_error", "Your credit balance is too low to access the API."),
                "quota group -",
            ),
            (
                400,
                "",
                anthropic!(
                    "invalid_request_error",
                    "You have reached your specified API usage limits. You will regain access on 2026-03-01 at 00:00 UTC."
                ),
                "quota group 18days 12h",
            ),
            (
                400,
                "",
                anthropic!(
                    "invalid_request_error",
                    "You have reached your specified workspace API usage limits. You will regain access on 2026-02-11 at 12:00 UTC"
                ),
                "quota key 1day",
            ),
            (429, "retry-after: 13", anthropic!("rate_limit_error"), "rate group_model 13s"),
            (429, "", anthropic!("rate_limit_error"), "rate group_model -"),
            (429, "", spend, "quota group 18days 12h"),
            (
                403,
                "",
                anthropic!("permission_error", "Your API key does not have permission"),
                "access key_model -",
            ),
            (
                403,
                "",
                anthropic!("permission_error", "This API key has been disabled"),
                "invalid key_model -",
            ),
            (
                400,
                "",
                anthropic!("invalid_request_error", "This organization has been disabled."),
                "invalid! key -",
            ),
            (529, "", anthropic!("overloaded_error"), "overloaded provider_model -"),
            (500, "", anthropic!("overloaded_error"), "overloaded provider_model -"),
            (529, "", "", "overloaded provider_model -"),
            (500, "", anthropic!("api_error"), "network key -"),
            (404, "", anthropic!("not_found_error"), "caller key -"),
            (400, "", anthropic!("invalid_request_error", "max_tokens: required"), "caller key -"),
        ],
    );
}

#[test]
fn a_refusal_that_repeats_the_callers_words_is_not_taken_for_the_providers_own() {
    holds(
        &provider("anthropic"),
        &[
            (
                400,
                "",
                anthropic!(
                    "invalid_request_error",
                    "messages.0.type: Input tag 'Your credit balance is too low' found"
                ),
                "caller key -",
            ),
            (
                400,
                "",
                anthropic!("invalid_request_error", "tag 'This organization has been disabled'"),
                "caller key -",
            ),
        ],
    );
}

#[test]
fn a_provider_of_the_users_own_is_read_by_status() {
    holds(
        &own(""),
        &[
            (429, "", "", "rate key -"),
            (429, "retry-after: 7", "{}", "rate key 7s"),
            (429, "", openai!("insufficient_quota", "insufficient_quota"), "quota key -"),
            (402, "", "", "quota key -"),
            (401, "", "", "invalid key_model -"),
            (401, "", openai!("", "invalid_api_key"), "invalid key_model -"),
            (403, "", "", "invalid key_model -"),
            (408, "", "", "network key -"),
            (503, "", "", "overloaded provider_model -"),
            (529, "", "", "overloaded provider_model -"),
            (500, "", "", "network key -"),
            (502, "", "", "network key -"),
            (504, "retry-after: 7", "", "network key -"),
            (599, "", "", "network key -"),
            (999, "", "", "network key -"),
            (400, "", "", "caller key -"),
            (404, "", "", "caller key -"),
            (407, "", "", "caller key -"),
            (499, "", "", "caller key -"),
        ],
    );
}

#[test]
fn statuses_that_lie_at_other_providers_are_seen_through() {
    let bad_key = r#"{"error":{"code":400,"message":"API key not valid.","status":"INVALID_ARGUMENT","details":[{"@type":"type.googleapis.com/google.rpc.ErrorInfo","reason":"API_KEY_INVALID"}]}}"#;
    let limited = r#"{"error":{"code":429,"status":"RESOURCE_EXHAUSTED","details":[{"@type":"type.googleapis.com/google.rpc.QuotaFailure"},{"@type":"type.googleapis.com/google.rpc.RetryInfo","retryDelay":"26s"}]}}"#;
    holds(
        &provider("gemini"),
        &[
            (400, "", bad_key, "invalid! key -"),
            (400, "", &format!("[{bad_key}]"), "invalid! key -"),
            (400, "", r#"{"error":{"code":400,"status":"INVALID_ARGUMENT"}}"#, "caller key -"),
            (429, "", limited, "rate group_model 26s"),
            (429, "", &limited.replace("26s", "143h4m52.73s"), "rate group_model 10m"),
        ],
    );
    holds(
        &provider("elevenlabs"),
        &[
            (401, "", r#"{"detail":{"status":"quota_exceeded"}}"#, "quota group -"),
            (401, "", r#"{"detail":{"status":"invalid_api_key"}}"#, "invalid! key -"),
            (401, "", r#"{"detail":{"status":"missing_permissions"}}"#, "access key_model -"),
            (429, "", r#"{"detail":{"status":"too_many_concurrent_requests"}}"#, "concurrency group -"),
            (429, "", r#"{"detail":{"status":"system_busy"}}"#, "overloaded provider_model -"),
        ],
    );
    let limit =
        |source| serde_json::json!({ "error": { "code": 402, "metadata": { "limit_source": source } } });
    let spent = serde_json::json!({ "error": { "code": 403, "metadata": {
        "limit_source": "openrouter_key_limit", "resets_at": "2026-02-10T14:00:00Z",
    } } });
    let too_large = r#"{"error":{"code":402,"metadata":{"limit_source":"openrouter_credits","error_type":"weight_exceeds_budget"}}}"#;
    holds(
        &provider("openrouter"),
        &[
            (
                402,
                "retry-after: 4",
                &limit("openrouter_in_flight_budget").to_string(),
                "concurrency group 4s",
            ),
            (402, "", &limit("openrouter_credits").to_string(), "quota group -"),
            (402, "", &limit("openrouter_key_limit").to_string(), "quota key -"),
            (402, "", too_large, "caller key -"),
            (403, "", &spent.to_string(), "quota key 2h"),
            (403, "", r#"{"error":{"code":403}}"#, "invalid key_model -"),
        ],
    );
    holds(
        &provider("groq"),
        &[
            (429, "retry-after: 3", openai!("tokens", "rate_limit_exceeded"), "rate group_model 3s"),
            (400, "", openai!("", "blocked_api_access"), "quota group -"),
            (400, "", openai!("", "organization_restricted"), "invalid! key -"),
            (498, "", "", "overloaded provider_model -"),
        ],
    );
    let wrong =
        r#"{"code":"Client specified an invalid argument","error":"Incorrect API key provided: xa***"}"#;
    holds(&provider("xai"), &[(400, "", wrong, "invalid! key -"), (400, "", "{}", "caller key -")]);
    holds(&provider("fireworks"), &[(412, "", "", "quota group -")]);
}

#[test]
fn below_400_every_answer_is_a_success_and_no_body_is_read() {
    for name in builtin().keys() {
        for status in [101, 200, 204, 206, 301, 304, 399] {
            let outcome =
                read_at(&provider(name.as_str()), status, "retry-after: 9", openai!("", "invalid_api_key"));
            assert_eq!(outcome, Outcome::plain(Class::Success, Some(status)));
            assert!(!needs_body(
                &provider(name.as_str()),
                StatusCode::from_u16(status).unwrap(),
                &HeaderMap::new()
            ));
        }
    }
}

#[test]
fn a_body_is_asked_for_exactly_where_it_can_change_the_word() {
    let needs = |provider: &Provider, status| {
        needs_body(provider, StatusCode::from_u16(status).unwrap(), &HeaderMap::new())
    };
    let openai = provider("openai");
    for status in [400, 401, 403, 404, 429, 500, 503] {
        assert!(needs(&openai, status), "{status}");
    }
    for status in [402, 409, 422, 502, 504] {
        assert!(!needs(&openai, status), "{status}");
    }
    assert!(needs(&provider("anthropic"), 400));
    let own = own("waits = [{ body = '/wait', format = 'seconds', classes = ['quota'] }]");
    assert!(needs(&own, 402) && !needs(&own, 503) && !needs(&own, 400));
}

#[test]
fn codes_go_before_phrases_and_phrases_before_statuses() {
    let own = own("rules = [
            { status = 400, class = 'network' },
            { status = 400, phrase = 'Out Of Money', class = 'quota' },
            { status = 400, phrase = 'out of', class = 'region' },
            { status = '400-409', code = ['17', 'full'], field = '/errors/*/no', class = 'concurrency' },
            { code = 'down', class = 'overloaded' },
        ]");
    holds(
        &own,
        &[
            (400, "", r#"{"errors":[{"no":1},{"no":17}],"error":"out of money"}"#, "concurrency key -"),
            (409, "", r#"{"errors":[{"no":"full"}]}"#, "concurrency key -"),
            (400, "", r#"{"error":"You are OUT of money"}"#, "quota key -"),
            (400, "", r#"{"error":"you are out\u0020of luck"}"#, "region key -"),
            (400, "", "<p>out of money</p>", "quota key -"),
            (400, "", r#"{"error":"x"}"#, "network key -"),
            (418, "", r#"{"code":"down"}"#, "overloaded provider_model -"),
        ],
    );
    assert_eq!(read_at(&own, 400, "", r#"{"errors":[{"no":17}]}"#).code.as_deref(), Some("17"));
    assert_eq!(read_at(&own, 400, "", r#"{"error":"out of money"}"#).code, None);
}

#[test]
fn a_code_is_shown_in_printable_ascii_of_at_most_64_bytes() {
    let code = "é\n".repeat(60);
    let own = own(&format!("rules = [{{ status = 400, code = {code:?}, class = 'quota' }}]"));
    let shown = read_at(&own, 400, "", serde_json::json!({ "code": code }).to_string()).code.unwrap();
    assert!(shown.len() <= 64 && shown.bytes().all(|b| b.is_ascii_graphic()));
}

#[test]
fn only_the_first_elements_of_an_array_are_looked_at() {
    let own = own("rules = [{ status = 400, code = 'x', field = '/all/*/code', class = 'quota' }]");
    let body = |before: usize| {
        let mut all = vec![serde_json::json!({ "code": "y" }); before];
        all.push(serde_json::json!({ "code": "x" }));
        serde_json::json!({ "all": all }).to_string()
    };
    assert_eq!(read_at(&own, 400, "", body(63)).class, Class::Quota);
    assert_eq!(read_at(&own, 400, "", body(64)).class, Class::Caller);
}

#[test]
fn a_packed_body_is_read_and_a_broken_one_falls_to_its_status() {
    let body = openai!("insufficient_quota", "insufficient_quota").as_bytes();
    let mut gzip = GzEncoder::new(Vec::new(), Compression::default());
    gzip.write_all(body).unwrap();
    let gzip = gzip.finish().unwrap();
    let mut zlib = ZlibEncoder::new(Vec::new(), Compression::default());
    zlib.write_all(body).unwrap();
    let mut bare = DeflateEncoder::new(Vec::new(), Compression::default());
    bare.write_all(body).unwrap();
    let mut bomb = GzEncoder::new(Vec::new(), Compression::best());
    let padded = format!("{}{}", " ".repeat(MAX_BODY), openai!("insufficient_quota", "insufficient_quota"));
    bomb.write_all(padded.as_bytes()).unwrap();

    let class = |coding: &str, body: &[u8]| read_at(&provider("openai"), 429, coding, body).class;
    assert_eq!(class("content-encoding: gzip", &gzip), Class::Quota);
    assert_eq!(class("content-encoding: GZIP", &gzip), Class::Quota);
    assert_eq!(class("content-encoding: deflate", &zlib.finish().unwrap()), Class::Quota);
    assert_eq!(class("content-encoding: deflate", &bare.finish().unwrap()), Class::Quota);
    assert_eq!(class("content-encoding: identity", body), Class::Quota);

    assert_eq!(class("content-encoding: gzip", &gzip[..gzip.len() - 9]), Class::Rate);
    assert_eq!(class("content-encoding: gzip", body), Class::Rate);
    assert_eq!(class("content-encoding: br", body), Class::Rate);
    assert_eq!(class("content-encoding: gzip, gzip", &gzip), Class::Rate);
    assert_eq!(class("content-encoding: gzip", &bomb.finish().unwrap()), Class::Rate);
    assert_eq!(class("", &body[..body.len() - 1]), Class::Rate);
    assert_eq!(class("", &[b"[".repeat(60000).as_slice(), b"\xff"].concat()), Class::Rate);
    assert_eq!(class("", padded.as_bytes()), Class::Rate);
}

#[test]
fn each_way_of_writing_a_wait_is_parsed_whole_or_not_at_all() {
    use WaitFormat::{Duration as Dur, Epoch, Millis, RateLimit, RetryAfter, Rfc3339, Seconds};
    let ms = |format, text: &str| waits::parse(text, format, now()).map(|wait| wait.as_millis());
    for (format, text, meant) in [
        (RetryAfter, "7", 7_000),
        (RetryAfter, " 1.5 ", 1_500),
        (RetryAfter, "Tue, 10 Feb 2026 12:00:30 GMT", 30_000),
        (Millis, "274579000", 274_579_000),
        (Millis, "0.2", 1),
        (Seconds, "33011.38", 33_011_380),
        (Dur, "6m0s", 360_000),
        (Dur, "120ms", 120),
        (Dur, "12us", 1),
        (Dur, "1h2m3.5s", 3_723_500),
        (Dur, "8.64s", 8_640),
        (Dur, "2m59.56s", 179_560),
        (Dur, "1d2h", 93_600_000),
        (Dur, "143h4m52.73s", 515_092_730),
        (Dur, "9", 9_000),
        (Rfc3339, "2026-02-10T12:00:01Z", 1_000),
        (Rfc3339, "2026-02-10t12:00:01.25z", 1_250),
        (Rfc3339, "2026-02-10T13:00:02+01:00", 2_000),
        (Rfc3339, "2026-02-10T11:30:02-00:30", 2_000),
        (Rfc3339, "2026-02-11", 43_200_000),
        (Rfc3339, "2028-02-29T12:00:00Z", 64_713_600_000),
        (RateLimit, "\"api\";r=0;t=55", 55_000),
        (RateLimit, "\"a\";r=0;t=5, \"b\";t=9;r=0, \"c\";r=1;t=99", 9_000),
        (Epoch, "55", 55_000),
        (Epoch, "1770724810", 10_000),
        (Epoch, "1770724810250", 10_250),
    ] {
        assert_eq!(ms(format, text), Some(meant), "{text}");
    }
    for (format, text) in [
        (RetryAfter, "-1"),
        (RetryAfter, "0"),
        (RetryAfter, "+5"),
        (RetryAfter, "5s"),
        (RetryAfter, "5, 6"),
        (RetryAfter, "1e9"),
        (RetryAfter, "inf"),
        (RetryAfter, "NaN"),
        (RetryAfter, "0x10"),
        (RetryAfter, "Tue, 10 Feb 2026 11:59:30 GMT"),
        (RetryAfter, "99999999999999999999999999"),
        (Millis, "12ms"),
        (Seconds, "6m0s"),
        (Seconds, "1."),
        (Seconds, ".5"),
        (Dur, "-6m"),
        (Dur, "6m-3s"),
        (Dur, "6m3"),
        (Dur, "6x"),
        (Dur, "m"),
        (Dur, "1.2.3s"),
        (Dur, "6 m"),
        (Dur, "0s"),
        (Dur, ""),
        (Rfc3339, "2026-02-30T00:00:00Z"),
        (Rfc3339, "2027-02-29T00:00:00Z"),
        (Rfc3339, "2026-13-01T00:00:00Z"),
        (Rfc3339, "2026-03-01T24:00:00Z"),
        (Rfc3339, "2026-03-01T00:00:00Z, x"),
        (Rfc3339, "2026-02-10T11:00:00Z"),
        (Rfc3339, "1770724810"),
        (RateLimit, "\"api\";r=1;t=55"),
        (RateLimit, "\"api\";r=-0;t=55"),
        (RateLimit, "\"api\";r=0"),
        (RateLimit, "\"api\";r=0;t=-5"),
        (RateLimit, "r=0, t=55"),
        (RateLimit, "55"),
        (Epoch, "-1"),
        (Epoch, "0"),
        (Epoch, "1770724700"),
        (Epoch, "2026-03-01"),
    ] {
        assert_eq!(ms(format, text), None, "{text}");
    }
}

#[test]
fn of_two_waits_the_first_counts_and_what_names_none_is_passed_over() {
    let openai = provider("openai");
    for (lines, meant) in [
        ("retry-after: 9|retry-after-ms: 250", "rate group_model 250ms"),
        ("retry-after: 9|retry-after-ms: soon", "rate group_model 9s"),
        ("retry-after: 9|retry-after-ms: -1", "rate group_model 9s"),
        ("retry-after: 9|retry-after-ms: 0", "rate group_model 9s"),
        ("retry-after: 0", "rate group_model -"),
        ("retry-after: -1", "rate group_model -"),
        ("retry-after: Tue, 10 Feb 2026 11:00:00 GMT", "rate group_model -"),
        ("x-ratelimit-reset-requests: 6m0s|x-ratelimit-remaining-requests: 4", "rate group_model -"),
        ("x-ratelimit-reset-requests: 6m0s", "rate group_model -"),
        ("x-ratelimit-reset-requests: 6m0s|x-ratelimit-remaining-requests: 0", "rate group_model 6m"),
        ("x-ratelimit-reset-tokens: 12ms|x-ratelimit-remaining-tokens: 0", "rate group_model 12ms"),
        ("x-ratelimit-reset-tokens: 0|x-ratelimit-remaining-tokens: -1", "rate group_model -"),
    ] {
        holds(&openai, &[(429, lines, "", meant)]);
    }
}

#[test]
fn a_full_bucket_of_an_empty_account_is_no_wait() {
    let lines = "x-ratelimit-reset-requests: 6m0s|x-ratelimit-remaining-requests: 0";
    holds(&provider("openai"), &[(429, lines, openai!("insufficient_quota", ""), "quota group -")]);
}

#[test]
fn an_absolute_time_is_taken_from_the_answers_own_clock() {
    // The provider's clock is an hour ahead of ours.
    let date = "date: Tue, 10 Feb 2026 13:00:00 GMT";
    let lines = format!("{date}|retry-after: Tue, 10 Feb 2026 13:00:20 GMT");
    holds(&provider("openai"), &[(429, &lines, "", "rate group_model 20s")]);
    let lines = format!(
        "{date}|anthropic-ratelimit-tokens-reset: 2026-02-10T13:00:21Z|anthropic-ratelimit-tokens-remaining: 0"
    );
    holds(&provider("anthropic"), &[(429, &lines, "", "rate group_model 21s")]);
    let lines = format!("{date}|anthropic-ratelimit-unified-reset: 1770728422");
    holds(&provider("anthropic"), &[(429, &lines, "", "rate group_model 22s")]);
}

#[test]
fn a_date_of_an_answer_that_is_far_from_our_clock_makes_no_wait_longer() {
    for (date, retry_after, meant) in [
        // stale, as of a cache
        ("Thu, 01 Jan 1970 00:00:01 GMT", "Tue, 10 Feb 2026 12:00:10 GMT", "10s"),
        ("Tue, 10 Feb 2026 11:54:00 GMT", "Tue, 10 Feb 2026 12:00:10 GMT", "10s"),
        // within a few minutes the sender's clock counts
        ("Tue, 10 Feb 2026 11:56:00 GMT", "Tue, 10 Feb 2026 12:00:10 GMT", "4m 10s"),
        // their clock is ahead, or ours is: by one of them it is past
        ("Tue, 10 Feb 2026 13:00:00 GMT", "Tue, 10 Feb 2026 13:00:20 GMT", "20s"),
        ("Tue, 10 Feb 2026 11:00:00 GMT", "Tue, 10 Feb 2026 11:00:20 GMT", "20s"),
        ("Fri, 31 Dec 9999 23:59:59 GMT", "Tue, 10 Feb 2026 12:01:00 GMT", "1m"),
    ] {
        let lines = format!("date: {date}|retry-after: {retry_after}");
        holds(&own(""), &[(429, &lines, "", &format!("rate key {meant}"))]);
    }
}

#[test]
fn a_wait_is_read_from_the_message_and_nowhere_else() {
    let said = "Please try again in 9m.";
    let own = own("waits = [{ phrase = 'try again in', field = '/fault/*/text', format = 'duration' }]");
    let openai = provider("openai");
    for (known, body, scope, meant) in [
        (&openai, serde_json::json!({ "error": { "message": said } }), "group_model", "9m"),
        (&openai, serde_json::json!({ "error": said }), "group_model", "9m"),
        (&openai, serde_json::json!({ "error": { "input": said } }), "group_model", "-"),
        (&openai, serde_json::json!({ "error": { "message": [said] } }), "group_model", "-"),
        (&openai, serde_json::json!({ "messages": said }), "group_model", "-"),
        (&own, serde_json::json!({ "fault": [{ "text": said }] }), "key", "9m"),
        (&own, serde_json::json!({ "error": { "message": said } }), "key", "-"),
    ] {
        holds(known, &[(429, "", &body.to_string(), &format!("rate {scope} {meant}"))]);
    }
    holds(&openai, &[(429, "", "Slow down; try again in 31d", "rate group_model 10m")]);
}

#[test]
fn each_anthropic_bucket_counts_only_while_it_is_empty() {
    let lines = "anthropic-ratelimit-requests-reset: 2026-02-10T12:00:05Z|anthropic-ratelimit-requests-remaining: 3\
        |anthropic-ratelimit-output-tokens-reset: 2026-02-10T12:00:40Z|anthropic-ratelimit-output-tokens-remaining: 0";
    holds(&provider("anthropic"), &[(429, lines, anthropic!("rate_limit_error"), "rate group_model 40s")]);
}

#[test]
fn a_wait_in_a_sentence_is_found_with_its_unit() {
    for (sentence, meant) in [
        ("Limit 10. Please try again in 41.724s. Visit us.", "41s 724ms"),
        ("Please try again in 6m0s.", "6m"),
        ("Please Try Again In 120ms", "120ms"),
        ("Please try again in ~30s", "30s"),
        ("try again in 20 seconds", "20s"),
        ("try again in 1 minute.", "1m"),
        ("try again in 20", "20s"),
        ("no such model `try again in 9d`; try again in 3s", "3s"),
        ("try again in 3 attempts", "-"),
        ("try again in a while", "-"),
        ("try again in -5s", "-"),
        ("try again in", "-"),
    ] {
        let body = serde_json::json!({ "error": { "message": sentence, "code": "rate_limit_exceeded" } });
        holds(&provider("openai"), &[(429, "", &body.to_string(), &format!("rate group_model {meant}"))]);
    }
}

#[test]
fn a_wait_in_the_body_may_be_a_number_or_a_text() {
    let own = own("waits = [{ body = '/error/wait_ms', format = 'millis' }]");
    holds(
        &own,
        &[
            (429, "", r#"{"error":{"wait_ms":1500}}"#, "rate key 1s 500ms"),
            (429, "", r#"{"error":{"wait_ms":"1500"}}"#, "rate key 1s 500ms"),
            (429, "", r#"{"error":{"wait_ms":-1500}}"#, "rate key -"),
            (429, "", r#"{"error":{"wait_ms":true}}"#, "rate key -"),
        ],
    );
}

#[test]
fn a_wait_is_cut_to_its_class_and_a_days_window_is_believed_where_the_rule_names_it() {
    let own = own("rules = [
            { status = 418, class = 'concurrency' },
            { status = 404, class = 'access' },
            { status = 430, class = 'rate', window = 'day' },
        ]
        waits = [{ header = 'x-day', format = 'seconds', window = 'day', classes = ['rate'] }]");
    holds(
        &own,
        &[
            (429, "retry-after: 900", "", "rate key 10m"),
            (429, "retry-after: 3600", "", "rate key 10m"),
            (429, "retry-after: 3601", "", "rate key 10m"),
            (429, "retry-after: 7200", "", "rate key 10m"),
            (429, "retry-after-ms: 274579000", "", "rate key 10m"),
            (429, "retry-after: 1000000000000000000", "", "rate key 10m"),
            (429, "retry-after: Fri, 31 Dec 9999 23:59:59 GMT", "", "rate key 10m"),
            (430, "retry-after: 1800", "", "rate key 30m"),
            (430, "retry-after: 7200", "", "rate key 2h"),
            (430, "retry-after: 99999999", "", "rate key 1day"),
            (429, "x-day: 1800", "", "rate key 30m"),
            (429, "x-day: 99999999", "", "rate key 1day"),
            (402, "retry-after: 5", "", "quota key 5s"),
            (402, "retry-after: 99999999", "", "quota key 32days"),
            (503, "retry-after: 7200", "", "overloaded provider_model 1m"),
            (418, "retry-after: 7200", "", "concurrency key 1m"),
            (404, "retry-after: 7200", "", "access key_model 30m"),
            (401, "retry-after: 7200", "", "invalid key_model -"),
        ],
    );
}

#[test]
fn a_rules_own_wait_stands_in_where_the_answer_names_none() {
    let own = own("rules = [{ status = 404, class = 'access', wait = '2h' }]");
    holds(&own, &[(404, "", "", "access key_model 2h"), (404, "retry-after: 3", "", "access key_model 3s")]);
}

#[test]
fn a_month_ends_on_the_first_of_the_next_in_every_month() {
    for (date, days) in [
        ("Sat, 31 Jan 2026 00:00:00 GMT", 1),
        ("Sun, 01 Feb 2026 00:00:00 GMT", 28),
        ("Tue, 29 Feb 2028 00:00:00 GMT", 1),
        ("Thu, 31 Dec 2026 00:00:00 GMT", 1),
        ("Tue, 01 Dec 2026 00:00:00 GMT", 31),
    ] {
        let body = openai!("", "organization_spend_limit_exceeded");
        let outcome = read_at(&provider("openai"), 429, &format!("date: {date}"), body);
        assert_eq!(outcome.wait, Some(Duration::from_hours(24 * days)), "{date}");
    }
}

#[test]
fn a_success_that_says_nothing_remains_announces_a_rate_limit_until_the_last_end() {
    let openai = provider("openai");
    let both = "x-ratelimit-remaining-requests: 0|x-ratelimit-reset-requests: 2s\
        |x-ratelimit-remaining-tokens: 0|x-ratelimit-reset-tokens: 8.64s";
    let outcome = read_at(&openai, 200, both, "");
    assert_eq!((outcome.class, outcome.wait), (Class::Success, Some(Duration::from_millis(8640))));
    let ahead = outcome.ahead().unwrap();
    assert_eq!((ahead.class, ahead.scope, ahead.wait), (Class::Rate, Scope::GroupModel, outcome.wait));
    for (status, lines, wait) in [
        // bounded as a refusal's wait is
        (200, "x-ratelimit-remaining-requests: 0|x-ratelimit-reset-requests: 20m", Some(600)),
        (200, "x-ratelimit-remaining-requests: 0|x-ratelimit-reset-requests: 8760h", Some(600)),
        (200, "x-ratelimit-remaining-requests-day: 0|x-ratelimit-reset-requests-day: 72000", Some(72_000)),
        (201, "x-ratelimit-remaining-requests: 0|x-ratelimit-reset-requests: 3s", Some(3)),
        // no word of an end
        (200, "x-ratelimit-remaining-requests: 1|x-ratelimit-reset-requests: 20m", None),
        (200, "x-ratelimit-remaining-requests: -1|x-ratelimit-reset-requests: 20m", None),
        (200, "x-ratelimit-remaining-requests: 0", None),
        (200, "retry-after: 20", None),
        // no success
        (304, "x-ratelimit-remaining-requests: 0|x-ratelimit-reset-requests: 3s", None),
    ] {
        assert_eq!(
            read_at(&openai, status, lines, "").wait,
            wait.map(Duration::from_secs),
            "{status} {lines}"
        );
    }
    let lines = "x-ratelimit-remaining-requests: 0|x-ratelimit-reset-requests: 3s";
    let own = own("rules = [{ status = 429, class = 'quota', scope = 'group' }]");
    assert_eq!(read_at(&own, 200, lines, "").ahead().unwrap().scope, Scope::Key);
    assert_eq!(read_at(&own, 200, "", "").ahead(), None);
}

#[test]
fn a_code_may_stand_in_a_header_and_then_no_body_is_asked_for() {
    let own = own("rules = [{ status = 400, code = 'Throttled', field = 'header:x-error', class = 'rate' }]");
    holds(
        &own,
        &[
            (400, "x-error: Throttled", "", "rate key -"),
            (400, "x-error: Throttled:http://place", "", "rate key -"),
            (400, "x-error: NotThrottled", "", "caller key -"),
            (400, "", r#"{"x-error":"Throttled"}"#, "caller key -"),
        ],
    );
    assert!(!needs_body(&own, StatusCode::BAD_REQUEST, &HeaderMap::new()));
}

#[test]
fn what_the_user_removes_no_longer_counts() {
    let of = |toml: &str| {
        let raw: RawProvider = toml::from_str(toml).unwrap();
        raw.compile(&ProviderName::parse("openai").unwrap(), Some(&provider("openai"))).unwrap()
    };
    let quota = openai!("insufficient_quota", "insufficient_quota");
    let spent = openai!("x", "credit_balance_exhausted");
    let less = of("remove_rules = ['insufficient_quota', 'server_is_overloaded']");
    holds(
        &less,
        &[
            (429, "", quota, "rate group_model -"),
            (429, "", spent, "quota group -"),
            (500, "", openai!("x", "server_is_overloaded"), "network key -"),
            (500, "", openai!("x", "overloaded"), "overloaded provider_model -"),
        ],
    );
    let none = of("remove_rules = ['*']\nrules = [{ status = 429, class = 'caller' }]");
    holds(&none, &[(429, "", quota, "caller key -"), (401, "", "", "caller key -")]);
    let none = of("remove_rules = ['*']");
    holds(
        &none,
        &[
            (429, "retry-after: 7", quota, "rate key 7s"),
            (429, "", quota, "rate key -"),
            (402, "", "", "caller key -"),
            (500, "", "", "overloaded provider_model -"),
            (503, "retry-after: 7", "", "overloaded provider_model 7s"),
            (600, "", "", "network key -"),
        ],
    );
    let waits = of("remove_waits = ['Retry-After', 'try again in']");
    let text = openai!("tokens", "rate_limit_exceeded", "Please try again in 9s.");
    let lines = "retry-after: 7";
    holds(
        &waits,
        &[(429, lines, text, "rate group_model -"), (429, "retry-after-ms: 5", "", "rate group_model 5ms")],
    );
    holds(&of("remove_waits = ['*']"), &[(429, "retry-after-ms: 5", text, "rate group_model -")]);
}

/// Header values near what providers write, and far from it.
fn header_value() -> impl Strategy<Value = Vec<u8>> {
    prop_oneof![
        "[-+]?[0-9]{0,25}(\\.[0-9]{0,12})?(d|h|m|s|ms|us|ns|µs)?".prop_map(String::into_bytes),
        "([0-9]{1,9}(d|h|m|s|ms|us)){1,4}".prop_map(String::into_bytes),
        "[0-9]{4}-[0-9]{2}-[0-9]{2}(T| at )[0-9]{2}:[0-9]{2}(:[0-9]{2}(\\.[0-9]{0,12})?)?(Z|[+-][0-9]{2}:[0-9]{2}| UTC)?"
            .prop_map(String::into_bytes),
        "(Mon|Tue|Sun), [0-9]{2} (Jan|Feb|Dec) [0-9]{4} [0-9]{2}:[0-9]{2}:[0-9]{2} GMT".prop_map(String::into_bytes),
        proptest::collection::vec(any::<u8>(), 0..40),
        Just(b"0".to_vec()),
        Just(b"gzip".to_vec()),
        "\"a\";r=[0-9-]{1,3};t=[0-9.-]{1,12}".prop_map(String::into_bytes),
    ]
}

fn header_name() -> impl Strategy<Value = &'static str> {
    proptest::sample::select(vec![
        "retry-after",
        "retry-after-ms",
        "date",
        "content-encoding",
        "x-ratelimit-reset",
        "x-ratelimit-remaining",
        "x-ratelimit-reset-requests",
        "x-ratelimit-remaining-requests",
        "x-ratelimit-reset-tokens",
        "x-ratelimit-remaining-tokens",
        "ratelimit",
        "anthropic-ratelimit-unified-status",
        "anthropic-ratelimit-tokens-reset",
        "anthropic-ratelimit-tokens-remaining",
        "anthropic-ratelimit-unified-reset",
    ])
}

fn any_body() -> impl Strategy<Value = Vec<u8>> {
    prop_oneof![
        proptest::collection::vec(any::<u8>(), 0..200),
        "(Please try again in|regain access on) ?.{0,40}".prop_map(|message| {
            serde_json::json!({ "error": { "message": message, "type": "rate_limit_exceeded" } })
                .to_string()
                .into()
        }),
        ".{0,30}".prop_map(|delay| {
            serde_json::json!([{ "error": { "details": [{ "retryDelay": delay }, 1, null] } }])
                .to_string()
                .into()
        }),
        "[a-z_]{0,20}".prop_map(|code| serde_json::json!({ "error": { "code": code } }).to_string().into()),
        "[\\[{]{0,300}".prop_map(String::into_bytes),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn no_answer_makes_reading_panic_or_name_a_wait_past_its_bound(
        name in proptest::sample::select(builtin().keys().cloned().collect::<Vec<_>>()),
        status in 100_u16..1000,
        lines in proptest::collection::vec((header_name(), header_value()), 0..8),
        body in any_body(),
        now in 0_u64..5_000_000_000,
    ) {
        let mut headers = HeaderMap::new();
        for (name, value) in lines {
            if let Ok(value) = HeaderValue::from_bytes(&value) {
                headers.append(name, value);
            }
        }
        let provider = provider(name.as_str());
        let status = StatusCode::from_u16(status).unwrap();
        let now = SystemTime::UNIX_EPOCH + Duration::from_secs(now);
        let outcome = read(&provider, status, &headers, &body, now);
        prop_assert_eq!(outcome.class == Class::Success, status.as_u16() < 400);
        prop_assert!(outcome.proven || outcome.class == Class::Invalid);
        if let Some(wait) = outcome.wait {
            prop_assert!(!wait.is_zero());
            // What a success announces is a rate limit.
            let class = outcome.ahead().map_or(outcome.class, |ahead| ahead.class);
            prop_assert!(Some(wait) <= longest_wait(class));
        }
        for class in [Class::Rate, Class::Quota, Class::Overloaded, Class::Caller] {
            let wait = wait(&provider, class, &headers, &body, now);
            prop_assert!(wait.is_none() || wait <= longest_wait(class));
        }
    }

    #[test]
    fn any_text_is_parsed_or_refused_in_every_format(text in ".{0,60}", now in 0_u64..300_000_000_000) {
        let now = SystemTime::UNIX_EPOCH + Duration::from_secs(now);
        for format in [
            WaitFormat::RetryAfter,
            WaitFormat::Millis,
            WaitFormat::Seconds,
            WaitFormat::Duration,
            WaitFormat::Rfc3339,
            WaitFormat::Epoch,
            WaitFormat::RateLimit,
        ] {
            prop_assert_ne!(waits::parse(&text, format, now), Some(Duration::ZERO));
        }
    }

    #[test]
    fn a_duration_reads_back_as_it_was_written(h in 0_u64..100, m in 0_u64..60, s in 0_u64..60, ms in 1_u64..1000) {
        let text = format!("{h}h{m}m{s}.{ms:03}s");
        let meant = Duration::from_millis(((h * 60 + m) * 60 + s) * 1000 + ms);
        prop_assert_eq!(waits::parse(&text, WaitFormat::Duration, now()), Some(meant));
    }
}

#[test]
fn an_answer_names_an_organisation_only_to_a_request_that_named_none() {
    let headers = |lines: &[(&'static str, &'static str)]| {
        let pair = |(name, value): &(&'static str, &'static str)| {
            (http::HeaderName::from_static(name), http::HeaderValue::from_static(value))
        };
        lines.iter().map(pair).collect::<HeaderMap>()
    };
    let of =
        |name: &str, asked: &[(&'static str, &'static str)], answered: &[(&'static str, &'static str)]| {
            let answered = headers(answered);
            organization(&provider(name), &headers(asked), &answered).map(GroupName::of_organization)
        };
    let acme = [("openai-organization", "Acme, Inc."), ("anthropic-organization-id", "Acme, Inc.")];
    let group = GroupName::of_organization("Acme, Inc.");
    assert!(group.as_str().starts_with("auto.acme--inc--") && group.is_auto(), "{group}");
    assert_eq!(of("openai", &[("accept", "*/*")], &acme), Some(group.clone()));
    assert_eq!(of("anthropic", &[], &acme), Some(group.clone()));
    assert_eq!(of("openai", &acme, &acme), None);
    for empty in [&[("openai-organization", "  ")][..], &[]] {
        assert_eq!(of("openai", &[], empty), None);
    }
    assert_eq!(of("mistral", &[], &acme), None);
    // whatever it is called, its group has a name, and another's has another
    let long = GroupName::of_organization(&"é".repeat(900));
    assert_eq!(GroupName::parse(long.as_str()), Ok(long));
    assert_ne!(GroupName::of_organization("acme, inc."), group);
}

#[test]
fn only_a_refusal_for_too_many_at_once_says_how_many_are_allowed() {
    let says = |status, header, body: &str| read_at(&provider("elevenlabs"), status, header, body).max_uses;
    let full = r#"{"detail":{"status":"too_many_concurrent_requests"}}"#;
    assert_eq!(says(429, "maximum-concurrent-requests: 15", full), Some(15));
    for unreadable in ["maximum-concurrent-requests: 0", "maximum-concurrent-requests: 1.5", ""] {
        assert_eq!(says(429, unreadable, full), None, "{unreadable}");
    }
    assert_eq!(says(429, "maximum-concurrent-requests: 15", "{}"), None);
    assert_eq!(says(200, "maximum-concurrent-requests: 15", full), None);
}

//! `lessor doctor`: says ok where all works, and what to do for each thing that does not; never a secret.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::pedantic, missing_docs, unreachable_pub)]

mod support;

use std::time::{Duration, SystemTime};

use serde_json::Value;
use support::lessor::{Home, Ran};
use support::plays::{openai, openai_error, rate_limited};
use support::provider::{Builder, Certificates, Manners};
use support::{Key, Lessor, Play, Provider, Seen, Setup, free_port};

const CANARY: &str = "sk-canary-0123456789abcdef";
const OTHER: &str = "sk-other-0123456789abcdef";

/// OpenAI to those with one of the two keys; who has none is told the time.
fn provider() -> Builder {
    Provider::builder().manners(Manners::Open)
}

fn by_key(seen: &Seen) -> Play {
    if seen.method == "HEAD" && seen.credentials == 0 {
        let now = httpdate::fmt_http_date(SystemTime::now());
        return Play::whole(404, &[("date", &now)], "");
    }
    match seen.key() {
        CANARY | OTHER => openai(seen),
        _ => Play::json(401, &openai_error("invalid_request_error", "invalid_api_key", "Incorrect API key")),
    }
}

async fn good() -> Provider {
    provider().start(by_key).await
}

fn setup(provider: &Provider) -> Setup {
    Setup::openai(provider).key(Key::new("a").secret(CANARY))
}

/// What the doctor said.
struct Said {
    ran: Ran,
    checks: Vec<Value>,
}

impl Said {
    fn of(ran: Ran) -> Self {
        for text in [&ran.stdout, &ran.stderr] {
            assert!(
                !text.contains(CANARY) && !text.contains(OTHER) && !text.contains("0123456789"),
                "{ran:?}"
            );
        }
        let checks = ran.json()["checks"].as_array().expect("checks").clone();
        for check in &checks {
            let good = check["verdict"] == "ok" || check["verdict"] == "skip";
            assert!(good || check["advice"].as_str().is_some_and(|advice| !advice.is_empty()), "{check}");
        }
        Self { ran, checks }
    }

    async fn by(lessor: &Lessor, more: &[&str]) -> Self {
        Self::of(lessor.cli(&[&["doctor", "--json"], more].concat()).await)
    }

    /// Without a runtime in sight, which is quicker.
    async fn quick(lessor: &Lessor, more: &[&str]) -> Self {
        let socket = format!("unix:{}", lessor.admin_socket().display());
        let args = [&["doctor", "--json"], more].concat();
        let env = [("LESSOR_ADMIN", socket.as_str()), ("PATH", "/nowhere")];
        Self::of(lessor.home().run_with(&args, &env).await)
    }

    /// The verdict and the text of a check, and what to do.
    #[track_caller]
    fn is(&self, name: &str, verdict: &str, part: &str) -> &Value {
        let named = || self.checks.iter().filter(|check| check["check"] == name);
        let found = named().find(|check| {
            let said = format!(
                "{} {}",
                check["found"].as_str().unwrap(),
                check["advice"].as_str().unwrap_or_default()
            );
            check["verdict"] == verdict && said.contains(part)
        });
        found.unwrap_or_else(|| panic!("no {name} {verdict} with {part:?} in {:#?}", self.checks))
    }

    #[track_caller]
    fn exits(&self, code: i32) {
        assert_eq!(self.ran.code, Some(code), "{:#?}", self.checks);
    }
}

#[tokio::test]
async fn where_all_works_each_check_says_so_and_one_request_reaches_the_provider() {
    let provider = good().await;
    let lessor = setup(&provider).start().await;
    let said = Said::by(&lessor, &[]).await;
    said.is("config", "ok", "1 key of 1 provider");
    said.is("store", "ok", "memory:");
    said.is("dns localhost", "ok", "127.0.0.1");
    said.is("tls localhost", "ok", "lessor test CA");
    said.is("clock localhost", "ok", "within");
    said.is("canary openai", "ok", "200 by key a");
    said.is("ready", "ok", "");
    said.is("listener", "ok", &lessor.authority());
    said.is("environment", "ok", "no key is left");
    for runtime in ["curl", "python ssl", "python ssl, strict", "java", "wget", "openssl"] {
        said.is(&format!("trust {runtime}"), "ok", "");
    }
    said.exits(0);
    let keys: Vec<_> = provider.seen().into_iter().filter_map(|seen| seen.key).collect();
    assert_eq!(keys, [CANARY], "one request with a key, and no runtime's");
    let text = lessor.cli(&["doctor"]).await;
    assert!(text.ok().contains("\nok    canary openai"), "{text:?}");
    assert!(text.stdout.lines().last().unwrap().contains(" 0 failed"), "{text:?}");
}

#[tokio::test]
async fn a_name_that_does_not_resolve_is_told_apart_from_a_host_that_does_not_answer() {
    let setup = Setup::new().set("providers.openai.base_url", "\"https://no-such-host.invalid\"");
    let lessor = setup.key(Key::new("a").secret(CANARY)).start().await;
    let said = Said::quick(&lessor, &[]).await;
    said.is("dns no-such-host.invalid", "fail", "does not resolve");
    said.is("canary openai", "fail", "upstream_unreachable");
    said.exits(1);
    let at = format!("\"https://localhost:{}\"", free_port());
    let setup = Setup::new().set("providers.openai.base_url", &at);
    let lessor = setup.key(Key::new("a").secret(CANARY)).start().await;
    let said = Said::quick(&lessor, &[]).await;
    said.is("dns localhost", "ok", "");
    said.is("tls localhost", "fail", "no connection: ");
}

#[tokio::test]
async fn a_certificate_of_a_foreign_ca_one_that_is_over_and_one_of_another_name_are_told_apart() {
    let foreign = good().await;
    let base = format!("{:?}", foreign.base_url());
    let setup = Setup::new().set("providers.openai.base_url", &base).key(Key::new("a").secret(CANARY));
    let said = Said::quick(&setup.start().await, &[]).await;
    said.is("tls localhost", "fail", "lessor test CA");
    said.is("tls localhost", "fail", "[providers.openai] ca_file");
    let over = provider().certified(Certificates::expired(&["localhost"])).start(by_key).await;
    let said = Said::quick(&setup_of(&over).await, &[]).await;
    said.is("tls localhost", "fail", "not valid at this machine's time");
    said.is("tls localhost", "fail", "clock");
    let other = provider().certified(Certificates::make(&["other.example"])).start(by_key).await;
    let said = Said::quick(&setup_of(&other).await, &[]).await;
    said.is("tls localhost", "fail", "is not for localhost: other.example");
    said.exits(1);
    // A CA's own certificate as the server's is what a hand-made one often is.
    let ca = provider().certified(Certificates::of_a_ca(&["localhost"])).start(by_key).await;
    let lessor = setup_of(&ca).await;
    let words = "the server shows the certificate of a CA as its own";
    let said = Said::quick(&lessor, &[]).await;
    said.is("tls localhost", "fail", words);
    let refused = lessor.chat().await;
    refused.is_error(502, "upstream_unreachable");
    assert!(refused.text().contains(words) && !refused.text().contains("CaUsedAs"), "{}", refused.text());
}

#[tokio::test]
async fn a_provider_that_is_not_served_is_told_with_those_that_are() {
    let provider = good().await;
    let lessor = setup_of(&provider).await;
    let said = Said::quick(&lessor, &["--provider", "nosuch"]).await;
    said.is(
        "provider",
        "fail",
        "`nosuch` is no provider of this configuration, nor of the catalogue; served: openai",
    );
    said.is("provider", "fail", "correct the name after --provider");
    said.exits(1);
    let known = Said::quick(&lessor, &["--provider", "mistral"]).await;
    known.is("provider", "fail", "set MISTRAL_API_KEY where there is no file");
}

async fn setup_of(provider: &Provider) -> Lessor {
    setup(provider).start().await
}

#[tokio::test]
async fn plain_http_is_said_to_be_that() {
    let provider = provider().plain().start(by_key).await;
    let said = Said::quick(&setup_of(&provider).await, &[]).await;
    said.is("tls localhost", "ok", "plain http");
    said.is("clock localhost", "ok", "");
    said.is("canary openai", "ok", "200");
}

#[tokio::test]
async fn a_refused_key_is_named_and_with_all_keys_each_is_asked() {
    let provider = provider()
        .start(|seen| {
            let refused = openai_error("invalid_request_error", "some_code", "no");
            if seen.key() == CANARY { Play::json(403, &refused) } else { by_key(seen) }
        })
        .await;
    let lessor = setup(&provider).key(Key::new("b").secret(OTHER)).start().await;
    let said = Said::quick(&lessor, &["--all-keys"]).await;
    said.is("canary openai/a", "fail", "refuses key a (403)");
    said.is("canary openai/a", "fail", "lessor keys check openai/a");
    said.is("canary openai/b", "ok", "200 by key b");
    said.exits(1);
}

#[tokio::test]
async fn a_limited_key_is_no_failure_and_no_proof() {
    let provider =
        provider().start(|seen| if seen.credentials == 0 { by_key(seen) } else { rate_limited("20") });
    let provider = provider.await;
    let lessor = setup_of(&provider).await;
    let said = Said::quick(&lessor, &[]).await;
    said.is("canary openai", "warn", "429");
    said.exits(0);
    let again = Said::quick(&lessor, &[]).await;
    again.is("canary openai", "warn", "pool_exhausted");
}

#[tokio::test]
async fn a_key_that_lacks_a_right_or_is_not_served_from_here_is_a_failure_also_while_it_rests_for_that() {
    for (code, then) in
        [("missing_scope", "403"), ("unsupported_country_region_territory", "may not be used from here")]
    {
        let refusal = openai_error("invalid_request_error", code, "You have insufficient permissions");
        let provider = provider()
            .start(move |seen| if seen.credentials == 0 { by_key(seen) } else { Play::json(403, &refusal) });
        let provider = provider.await;
        let lessor = setup_of(&provider).await;
        let said = Said::quick(&lessor, &[]).await;
        said.is("canary openai", "fail", "403");
        // A right that is missing rests nothing where no model is named; a region rests the key.
        let again = Said::quick(&lessor, &[]).await;
        again.is("canary openai", "fail", then);
        again.exits(1);
    }
}

#[tokio::test]
async fn a_key_that_comes_back_is_a_failure_wherever_it_stands_and_masking_it_is_the_advice() {
    for (scrub, place) in [("off", "head or trailers"), ("off", "body"), ("headers", "body")] {
        let echo = provider().start(move |seen| match seen.credentials {
            0 => by_key(seen),
            _ if place == "body" => {
                use base64::Engine as _;
                let text = format!("Bearer {}", seen.key());
                Play::whole(200, &[], base64::engine::general_purpose::STANDARD.encode(text))
            }
            _ => {
                let head = [("transfer-encoding", "chunked"), ("trailer", "x-echo")];
                Play::new().head(200, &head).chunk("ok").bytes(format!("0\r\nx-echo: {}\r\n\r\n", seen.key()))
            }
        });
        let echo = echo.await;
        let lessor = setup(&echo).set("providers.openai.scrub", &format!("{scrub:?}")).start().await;
        let said = Said::quick(&lessor, &[]).await;
        said.is("canary openai", "fail", &format!("openai/a came back in the answer's {place}"));
        said.is("canary openai", "fail", "[providers.openai] scrub = \"on\"");
        said.exits(1);
        let masked = setup_of(&echo).await;
        Said::quick(&masked, &[]).await.is("canary openai", "ok", "did not come back");
    }
}

#[tokio::test]
async fn a_clock_that_is_not_the_providers_is_warned_of() {
    let provider = provider().start(|seen| {
        let date = httpdate::fmt_http_date(SystemTime::now() + Duration::from_secs(3600));
        if seen.method == "HEAD" { Play::whole(404, &[("date", &date)], "") } else { by_key(seen) }
    });
    let said = Said::quick(&setup_of(&provider.await).await, &[]).await;
    said.is("clock localhost", "warn", "behind the provider's");
    said.is("clock localhost", "warn", "NTP");
    said.exits(0);
}

#[tokio::test]
async fn a_store_that_is_away_fails_by_itself_and_where_a_key_is_needed() {
    let provider = good().await;
    let url = format!("\"redis://127.0.0.1:{}\"", free_port());
    let lessor = setup(&provider).set("store.url", &url).start().await;
    let said = Said::quick(&lessor, &[]).await;
    said.is("store", "fail", "store.url");
    said.is("canary openai", "fail", "store_unavailable");
    said.is("ready", "fail", "store_unavailable");
    said.is("tls localhost", "ok", "");
    said.exits(1);
}

#[tokio::test]
async fn redis_shows_its_time_its_clock_and_what_it_warns_of_and_a_file_can_be_written() {
    let redis = support::redis::Redis::start().await;
    redis.command(&["CONFIG", "SET", "maxmemory", "50mb"]).await;
    redis.command(&["CONFIG", "SET", "maxmemory-policy", "allkeys-lru"]).await;
    let provider = good().await;
    let lessor = setup(&provider).set("store.url", &format!("{:?}", redis.url())).start().await;
    let said = Said::quick(&lessor, &[]).await;
    said.is("store", "ok", "answers in");
    said.is("store", "warn", "noeviction");
    said.is("clock store", "ok", "");
    said.exits(0);
    let home = std::sync::Arc::new(Home::default());
    let file = format!("\"sqlite://{}/state.db\"", home.path().display());
    let mut lessor = setup(&provider).set("store.url", &file).spawn_in(home);
    lessor.listening().await;
    Said::quick(&lessor, &[]).await.is("store", "ok", "state.db answers in");
}

/// The file of a sidecar that nobody has started.
fn at_rest(provider: &Provider, change: impl FnOnce(Setup) -> Setup) -> Home {
    let home = Home::default();
    let setup = setup(provider).set("listen.proxy", &format!("\"127.0.0.1:{}\"", free_port()));
    std::fs::write(home.path().join("lessor.toml"), change(setup).toml()).unwrap();
    home
}

const FILE: [&str; 4] = ["doctor", "--json", "--config", "lessor.toml"];

#[tokio::test]
async fn where_none_runs_one_is_started_for_it_that_ends_with_it() {
    let provider = good().await;
    let home = at_rest(&provider, |setup| setup);
    let env = [("SECRET_OPENAI_A", CANARY), ("OPENAI_API_KEY", CANARY), ("PATH", "/nowhere")];
    let said = Said::of(home.run_with(&FILE, &env).await);
    said.is("sidecar", "warn", "lessor run");
    said.is("canary openai", "ok", "200");
    said.is("environment", "ok", "no key is left");
    said.exits(0);
    let run = home.path().join("run");
    support::eventually("its socket is gone", async || {
        (std::fs::read_dir(&run).unwrap().count() == 0).then_some(())
    })
    .await;
}

#[tokio::test]
async fn a_form_of_the_key_in_another_variable_is_found_and_only_its_name_is_said() {
    use base64::Engine as _;
    let provider = good().await;
    let home = at_rest(&provider, |setup| setup);
    let copy = base64::engine::general_purpose::STANDARD.encode(format!("user:{CANARY}"));
    let env = [("SECRET_OPENAI_A", CANARY), ("BASIC_AUTH", copy.as_str()), ("PATH", "/nowhere")];
    let said = Said::of(home.run_with(&FILE, &env).await);
    said.is("environment", "fail", "BASIC_AUTH");
    assert!(!said.ran.stdout.contains(&copy));
    said.exits(1);
}

#[tokio::test]
async fn a_store_that_keeps_the_sidecar_from_starting_is_looked_at_all_the_same() {
    let provider = good().await;
    let home = at_rest(&provider, |setup| setup.set("store.url", "\"sqlite:///nowhere/at/all/state.db\""));
    let said = Said::of(home.run_with(&FILE, &[("SECRET_OPENAI_A", CANARY)]).await);
    said.is("sidecar", "fail", "none could be started");
    said.is("store", "fail", "/nowhere/at/all");
    said.is("tls localhost", "ok", "");
    said.is("canary openai", "skip", "no sidecar");
    said.exits(1);
}

#[tokio::test]
async fn without_a_configuration_it_is_2_and_a_named_sidecar_that_is_not_there_is_3() {
    let home = Home::default();
    let none = Said::of(home.run(&["doctor", "--json"]).await);
    none.is("config", "fail", "no keys found");
    none.exits(2);
    let away = Said::of(home.run(&["doctor", "--json", "--admin", "unix:nowhere.sock"]).await);
    away.is("listener", "fail", "no sidecar answers");
    away.exits(3);
}

#[tokio::test]
async fn with_apps_it_asks_as_one_and_no_token_is_shown() {
    const TOKEN: &str = "token-0123456789-of-checkout";
    let provider = good().await;
    let setup = setup(&provider).env("TOKEN", TOKEN).set("apps.checkout.token", "{ env = \"TOKEN\" }");
    let lessor = setup.start().await;
    let said = Said::quick(&lessor, &[]).await;
    said.is("canary openai", "ok", "200");
    said.is("environment", "warn", "--app NAME (checkout)");
    let socket = format!("unix:{}", lessor.admin_socket().display());
    let env = [("LESSOR_ADMIN", socket.as_str()), ("TOKEN", TOKEN)];
    let ran = lessor.home().run_with(&["doctor", "--json", "--app-token-env", "TOKEN"], &env).await;
    let said = Said::of(ran);
    for runtime in ["curl", "python ssl", "python requests"] {
        said.is(&format!("trust {runtime}"), "ok", "");
    }
    said.is("trust java", "warn", "proxy password");
    said.exits(0);
}

#[tokio::test]
async fn a_runtime_that_trusts_something_else_is_told_which_variable_names_the_bundle() {
    let provider = good().await;
    let lessor = setup_of(&provider).await;
    // curl's own file says another CA than the variable does.
    let rc = format!("cacert = {}\n", provider.ca_file().display());
    std::fs::write(lessor.home().path().join(".curlrc"), rc).unwrap();
    let said = Said::by(&lessor, &[]).await;
    said.is("trust curl", "fail", "CURL_CA_BUNDLE");
    said.is("trust curl", "fail", "ca-bundle.pem");
    said.is("trust python ssl", "ok", "");
    said.exits(1);
    let blind = setup(&provider).set("proxy.intercept", "false").start().await;
    Said::quick(&blind, &[]).await.is("trust", "warn", "proxy.intercept = true");
}

#[tokio::test]
async fn where_nothing_answers_it_ends_within_its_minute() {
    let silent = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let base = format!("\"https://localhost:{}\"", silent.local_addr().unwrap().port());
    let setup = Setup::new().set("providers.openai.base_url", &base).key(Key::new("a").secret(CANARY));
    let lessor = setup.set("timeouts.connect", "\"50s\"").start().await;
    // A runtime that hangs, and ignores that it is told to end.
    let bin = lessor.home().path().join("bin");
    std::fs::create_dir(&bin).unwrap();
    std::fs::write(bin.join("curl"), "#!/bin/sh\ntrap '' TERM\nexec /bin/sleep 300\n").unwrap();
    use std::os::unix::fs::PermissionsExt as _;
    std::fs::set_permissions(bin.join("curl"), std::fs::Permissions::from_mode(0o755)).unwrap();
    let socket = format!("unix:{}", lessor.admin_socket().display());
    let (path, begun) = (bin.display().to_string(), std::time::Instant::now());
    let env = [("LESSOR_ADMIN", socket.as_str()), ("PATH", path.as_str())];
    let said = Said::of(lessor.home().run_with(&["doctor", "--json"], &env).await);
    assert!(begun.elapsed() < Duration::from_secs(45), "{:?}", begun.elapsed());
    said.is("tls localhost", "fail", "no handshake within");
    said.is("canary openai", "fail", "no whole answer");
    said.is("trust curl", "warn", "said nothing within");
    said.exits(1);
}

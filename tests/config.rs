//! Whole configuration files: what they become, and what is said about their mistakes.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::pedantic)] // a test that fails may panic

use std::time::Duration;

use lessor::config::{
    self, Address, Config, HostPort, OnLost, RedisConfig, StoreUrl, Topology, load_file, load_listen,
    load_str,
};
use proptest::prelude::*;

/// The environment of every test here. The canary must never be seen in a message.
const CANARY: &str = "CANARY9f8e7d6c5b4a";

fn env(name: &str) -> Option<String> {
    match name {
        "OPENAI_API_KEY" => Some(format!("sk-{CANARY}")),
        "OPENAI_API_KEY_2" => Some(format!("sk-{CANARY}-2")),
        "COPY" => Some(format!("sk-{CANARY}")),
        "INTERNAL_KEY" => Some("internal-1".into()),
        "CHECKOUT_TOKEN" => Some("checkout-token".into()),
        "ADMIN_TOKEN" => Some("admin-token".into()),
        "EMPTY" => Some(String::new()),
        "REDIS_PASSWORD" => Some(format!("p/{CANARY}")),
        "SENTINEL_PASSWORD" => Some(format!("s/{CANARY}")),
        "REDIS_URL" => Some(format!("rediss://lessor:p%2F%40{CANARY}@Redis.internal:6380/2")),
        "REDIS_URL_USER" => Some("redis://lessor@127.0.0.1".into()),
        "REDIS_URL_BAD" => Some(format!("redis://:{CANARY}/x@host")),
        "REDIS_URL_KIND" => Some(format!("{CANARY}://host")),
        "TWO_LINES" => Some(format!("{CANARY}\n{CANARY}")),
        _ => None,
    }
}

fn load(text: &str) -> Result<Config, String> {
    load_str(text, "config/lessor.toml", &env).map_err(|error| {
        let text = error.to_string();
        assert!(!text.contains(CANARY), "a secret is shown:\n{text}");
        text
    })
}

fn refused(text: &str) -> String {
    load(text).expect_err("these settings must be refused")
}

const KEY: &str = r#"
[[keys]]
id = "openai-a"
provider = "openai"
secret = { env = "OPENAI_API_KEY" }
"#;

#[test]
fn an_empty_file_is_all_defaults() {
    let config = load("").unwrap();
    assert_eq!(config.listen.proxy, [Address::Tcp("127.0.0.1:8321".parse().unwrap())]);
    assert_eq!(config.listen.admin.to_string(), "127.0.0.1:8322");
    assert!(config.listen.response_headers && config.intercept && config.proxy.tunnel_other_hosts);
    assert!(matches!(config.store.url, StoreUrl::Memory));
    assert_eq!((config.store.url.to_string().as_str(), config.store.prefix.as_str()), ("memory:", "lessor"));
    assert_eq!(config.lease.ttl, Duration::from_secs(30));
    assert_eq!(config.lease.heartbeat, Duration::from_secs(10));
    assert_eq!((config.lease.on_lost, config.lease.max_duration), (OnLost::Abort, None));
    assert_eq!((config.queue.max_wait, config.queue.max_waiting), (Duration::from_secs(10), 1024));
    assert_eq!(config.retry.max_attempts, 3);
    assert_eq!((config.retry.max_body, config.retry.max_total), (8 << 20, 256 << 20));
    assert_eq!(config.timeouts.connect, Duration::from_secs(5));
    assert_eq!(config.timeouts.first_byte, Duration::from_secs(600));
    assert_eq!(config.timeouts.idle, Duration::from_secs(600));
    assert_eq!(config.timeouts.body_idle, Duration::from_secs(60));
    assert_eq!(config.timeouts.header, Duration::from_secs(10));
    assert_eq!(config.timeouts.keep_alive, Duration::from_secs(120));
    assert_eq!(config.shutdown.grace, Duration::from_secs(30));
    assert_eq!(config.ranking, config::Ranking::DEFAULT);
    assert_eq!(config.retry.on, config::RetryOn::default());
    let nets: Vec<_> = config.proxy.deny_nets.iter().map(ToString::to_string).collect();
    let want = ["169.254.0.0/16", "fe80::/10", "fd00:ec2::254/128", "100.100.100.200/32", "168.63.129.16/32"];
    assert_eq!(nets, want);
    let limits = config.limits;
    assert_eq!((limits.max_connections, limits.max_header_bytes, limits.max_headers), (4096, 65536, 100));
    assert!(config.keys.is_empty() && config.providers.is_empty() && config.apps.is_empty());
    assert_eq!(config.hosts["api.openai.com"].as_str(), "openai");
    assert_eq!(config.origin, "config/lessor.toml");
}

#[test]
fn every_value_that_is_said_is_taken() {
    let config = load(
        r#"
[listen]
proxy = ["0.0.0.0:1", { path = "/run/lessor/p.sock", mode = 0o660 }, "unix:/run/q.sock"]
admin = "10.0.0.1:2"
hosts = ["Lessor.Internal"]
allow_origins = ["https://app.example"]
response_headers = false
[lease]
ttl = "1m30s"
heartbeat = 20
on_lost = "finish"
max_duration = "2h"
[queue]
max_wait = "500ms"
max_waiting = 0
[retry]
max_attempts = 1
max_body = "64KB"
max_total = 1000
on = ["connection"]
[timeouts]
connect = "1s"
keep_alive = "30s"
[shutdown]
grace = "5s"
linger = "5s"
[ranking]
strategy = "fill_first"
capacity = 3
freshness = 0.25
jitter = 0
[proxy]
other_hosts = "deny"
deny_nets = ["10.0.0.0/8", "::1"]
intercept = false
[limits]
max_connections = 10
max_header_bytes = "16KiB"
max_headers = 20
[admin]
token = { env = "ADMIN_TOKEN" }
[providers.internal-llm]
base_url = "https://llm.internal/v2"
[pools.vip]
fallback = ["default"]
[[keys]]
id = "openai-a"
provider = "openai"
pool = "vip"
group = "org-1"
secret = { env = "OPENAI_API_KEY" }
max_concurrent_uses = 3
models = ["gpt-*"]
disabled = true
[[keys]]
id = "internal"
provider = "internal-llm"
secret = { env = "INTERNAL_KEY" }
[apps.checkout]
token = { env = "CHECKOUT_TOKEN" }
pools = ["vip", "default"]
providers = ["openai"]
"#,
    )
    .unwrap();
    let at: Vec<_> = config.listen.proxy.iter().map(ToString::to_string).collect();
    assert_eq!(at, ["0.0.0.0:1", "unix:/run/lessor/p.sock", "unix:/run/q.sock"]);
    assert_eq!(config.listen.proxy[1], Address::Unix("/run/lessor/p.sock".into(), 0o660));
    assert_eq!(config.listen.proxy[2], Address::Unix("/run/q.sock".into(), 0o600));
    assert_eq!(config.listen.hosts, ["lessor.internal"]);
    assert!(!config.listen.response_headers && !config.intercept && !config.proxy.tunnel_other_hosts);
    assert_eq!(config.lease.heartbeat, Duration::from_secs(20));
    assert_eq!(config.lease.max_duration, Some(Duration::from_secs(7200)));
    assert_eq!(config.lease.on_lost, OnLost::Finish);
    assert_eq!(config.queue.max_wait, Duration::from_millis(500));
    assert_eq!(config.shutdown.linger, Duration::from_secs(5));
    assert_eq!((config.retry.max_body, config.retry.max_total), (64_000, 1000));
    assert!(config.retry.on.connection && !config.retry.on.overloaded);
    assert_eq!(config.ranking.strategy, config::Strategy::FillFirst);
    let weights = config::Weights { capacity: 3.0, freshness: 0.25, jitter: 0.0, ..config::Weights::DEFAULT };
    assert_eq!(config.ranking.weights, weights);
    assert_eq!(config.limits.max_header_bytes, 16384);
    assert_eq!(config.admin_token.unwrap().expose(), "admin-token");
    assert_eq!(config.pools["vip"][0].as_str(), "default");
    let key = &config.keys[0];
    assert_eq!((key.id.as_str(), key.pool.as_str(), key.max_concurrent_uses), ("openai-a", "vip", 3));
    assert_eq!(key.group.as_ref().unwrap().as_str(), "org-1");
    assert_eq!((key.source.as_str(), key.disabled), ("env OPENAI_API_KEY", true));
    assert_eq!(config.keys[1].max_concurrent_uses, 8);
    assert_eq!(config.keys[1].pool.as_str(), "default");
    assert_eq!(config.apps[0].pools[0].as_str(), "vip");
    let served: Vec<_> = config.providers.keys().map(|name| name.as_str()).collect();
    assert_eq!(served, ["internal-llm", "openai"]);
    assert_eq!(config.hosts["llm.internal"].as_str(), "internal-llm");
}

#[test]
fn a_mistake_names_file_and_line_and_points_at_the_value() {
    let text = refused("[lease]\nttl = \"30s\"\n\theartbeat = \"45s\"  # slow\n");
    let want = "\
config/lessor.toml:3: lease.heartbeat is 45s, must be below lease.ttl (30s), at most 26s360ms
  3 | heartbeat = \"45s\"
    |             ^^^^^";
    assert_eq!(text, want);
}

#[test]
fn a_linger_that_the_grace_would_always_cut_short_is_refused() {
    let text = refused("[shutdown]\ngrace = \"5s\"\nlinger = \"6s\"\n");
    assert!(
        text.contains("config/lessor.toml:3: shutdown.linger is 6s, must be at most shutdown.grace (5s)")
    );
}

#[test]
fn all_mistakes_are_told_at_once_in_the_order_of_the_file() {
    let text = refused(
        r#"leese = 1
[listen]
proxy = "localhost:8321"
admn = "127.0.0.1:1"
[lease]
ttl = "3 parsecs"
[retry]
max_attempts = 0
[[keys]]
id = "Openai A"
provider = "opanai"
secret = { env = "NO_SUCH_VARIABLE" }
[apps.x]
token = { env = "CHECKOUT_TOKEN" }
pools = ["defalt"]
"#,
    );
    let want = r#"config/lessor.toml:1: `leese` is no section; did you mean `lease`?
  1 | leese = …
    | ^^^^^
config/lessor.toml:3: listen.proxy is "localhost:8321", must be an address, not a name: "127.0.0.1:8321"
  3 | proxy = "localhost:8321"
    |         ^^^^^^^^^^^^^^^^
config/lessor.toml:4: `admn` is no field of listen; did you mean `admin`?
  4 | admn = …
    | ^^^^
config/lessor.toml:6: lease.ttl is "3 parsecs", must be a duration such as "500ms", "30s", "10m" or "1h30m"
  6 | ttl = "3 parsecs"
    |       ^^^^^^^^^^^
config/lessor.toml:8: retry.max_attempts is 0, must be a whole number from 1 to 100
  8 | max_attempts = 0
    |                ^
config/lessor.toml:10: keys[0].id is "Openai A", must be 1 to 64 of a-z 0-9 . _ -
  10 | id = "Openai A"
     |      ^^^^^^^^^^
config/lessor.toml:11: keys[0].provider is "opanai", must be a provider of the catalogue or of [providers]; did you mean `openai`?
  11 | provider = "opanai"
     |            ^^^^^^^^
config/lessor.toml:12: keys[0].secret: the environment variable NO_SUCH_VARIABLE is not set
  12 | secret = { env = "NO_SUCH_VARIABLE" }
     |                  ^^^^^^^^^^^^^^^^^^
config/lessor.toml:15: apps.x.pools[0] is "defalt", must be a pool of some key or of [pools]; did you mean `default`?
  15 | pools = ["defalt"]
     |          ^^^^^^^^"#;
    assert_eq!(text, want);
}

#[test]
fn a_raw_key_in_the_file_is_refused_with_the_way_out_and_never_repeated() {
    let text = refused(&format!("[[keys]]\nid = \"a\"\nprovider = \"openai\"\nsecret = \"sk-{CANARY}\"\n"));
    let want = r#"config/lessor.toml:4: keys[0].secret must not stand in this file itself: say { env = "VARIABLE" } or { file = "/path" }
  4 | secret = …
    |          ^"#;
    assert_eq!(text, want);
}

/// What is said of a key with these fields, beside `id` and `provider`.
fn refused_key(fields: &str) -> String {
    refused(&format!("[[keys]]\nid = \"a\"\nprovider = \"openai\"\n{fields}\n"))
}

#[test]
fn what_is_wrong_with_a_keys_source_kind_or_headers_is_shown_with_line_and_caret() {
    let said = refused_key(
        "secret = { command = [\"vault\"], timeout = \"soon\", refresh = \"10ms\", kind = \"digest\", user = \"me\" }\n\
         headers = { Host = \"h\", authorization = \"x\", OpenAI-Project = \"\", \"no header\" = \"x\", X-A = \"1\", x-a = \"2\" }",
    );
    let want = r#"config/lessor.toml:4: keys[0].secret.timeout is "soon", must be a duration such as "500ms", "30s", "10m" or "1h30m"
  4 | secret = { command = […], timeout = "soon", refresh = "10ms", kind = "digest", user = … }
    |                                     ^^^^^^
config/lessor.toml:4: keys[0].secret.refresh is 10ms, must be at least 1s
  4 | secret = { command = […], timeout = "soon", refresh = "10ms", kind = "digest", user = … }
    |                                                       ^^^^^^
config/lessor.toml:4: keys[0].secret.kind is "digest", must be "api_key", "bearer" or "basic"
  4 | secret = { command = […], timeout = "soon", refresh = "10ms", kind = "digest", user = … }
    |                                                                      ^^^^^^^^
config/lessor.toml:4: keys[0].secret.user is only for kind = "basic"
  4 | secret = { command = […], timeout = "soon", refresh = "10ms", kind = "digest", user = … }
    |                                                                                       ^
config/lessor.toml:5: keys[0].headers.Host belongs to the message and not to a key: lessor sets it by itself
  5 | headers = { Host = …, authorization = …, OpenAI-Project = …, "no header" = …, X-A = …, x-a = … }
    |             ^^^^
config/lessor.toml:5: keys[0].headers.authorization carries a credential; say so by `secret`, its `kind`, or the provider's `inject`
  5 | headers = { Host = …, authorization = …, OpenAI-Project = …, "no header" = …, X-A = …, x-a = … }
    |                       ^^^^^^^^^^^^^
config/lessor.toml:5: keys[0].headers.OpenAI-Project is a text, must be text of printable ASCII, { env = "VARIABLE" } or { file = "/path" }
  5 | headers = { Host = …, authorization = …, OpenAI-Project = …, "no header" = …, X-A = …, x-a = … }
    |                                                           ^
config/lessor.toml:5: keys[0].headers.no header is no header name
  5 | headers = { Host = …, authorization = …, OpenAI-Project = …, "no header" = …, X-A = …, x-a = … }
    |                                                              ^^^^^^^^^^^
config/lessor.toml:5: keys[0].headers.x-a is there twice
  5 | headers = { Host = …, authorization = …, OpenAI-Project = …, "no header" = …, X-A = …, x-a = … }
    |                                                                                        ^^^"#;
    assert_eq!(said, want);
}

#[test]
fn a_secret_has_one_source_and_a_command_is_a_list_of_texts() {
    let form = "must be a program and its arguments";
    for (secret, want) in [
        ("{}", "must be { env = \"VARIABLE\" }, { file = \"/path\" } or { command ="),
        ("{ env = \"A\", command = [\"x\"] }", "or { command ="),
        ("{ env = \"A\", file = \"/x\" }", "must be { env ="),
        ("{ command = [] }", form),
        ("{ command = \"vault read x\" }", form),
        ("{ command = [\"\"] }", form),
        ("{ command = [\"vault\", 1] }", form),
        ("{ env = \"A\", timeout = \"1s\" }", "keys[0].secret.timeout is only for a command"),
        ("{ env = \"A\", refresh = \"1h\" }", "keys[0].secret.refresh is only for a command"),
        (
            "{ env = \"A\", kind = \"basic\", user = \"a:b\" }",
            "keys[0].secret.user is a text, must be a user's name",
        ),
        (
            "{ env = \"OPENAI_API_KEY\", kind = \"basic\" }",
            "the environment variable OPENAI_API_KEY is no user:password",
        ),
        ("{ env = \"A\", comand = [\"x\"] }", "did you mean `command`?"),
    ] {
        let said = refused_key(&format!("secret = {secret}"));
        assert!(said.contains(want), "{secret}: {said}");
        assert!(said.contains("config/lessor.toml:4: ") && said.contains('^'), "{said}");
    }
    // Tokens are read once, at the start.
    let said = refused("[admin]\ntoken = { command = [\"x\"] }\n");
    assert!(said.contains("`command` is no field of admin.token"), "{said}");
}

#[test]
fn a_key_never_stands_in_a_query_where_its_provider_takes_it_in_a_header() {
    let said = refused("[providers.gemini]\ninject = { query = \"key\" }\n");
    let want = r#"config/lessor.toml:2: providers.gemini.inject.query would show the key in logs on the way; this provider takes it in `x-goog-api-key`
  2 | inject = { query = "key" }
    |                    ^^^^^"#;
    assert_eq!(said, want);
}

#[test]
fn no_message_shows_a_secret_wherever_it_was_pasted() {
    // `load` looks for the canary in what is said.
    for text in [
        format!("[[keys]]\nsecret = \"{CANARY}\"\n"),
        format!("[[keys]]\nsecret = {CANARY}\n"),
        format!("[[keys]]\nsecret = \"{CANARY}\n"),
        format!("[[keys]]\nsecret = '''\n{CANARY}\n"),
        format!("[[keys]]\nsecret = [\"{CANARY}\"]\n"),
        format!("[[keys]]\nsecret = {{ env = \"{CANARY}\" }}\n"),
        format!("[[keys]]\nsecret = {{ env = \"A\", file = \"{CANARY}\" }}\n"),
        format!("[[keys]]\nsecret = {{ file = \"{CANARY}\" }}\n"),
        format!("[[keys]]\nsecret = {{ evn = \"{CANARY}\" }}\n"),
        format!("[[keys]]\nsecret = {{ value = \"{CANARY}\" }}, x = 1\n"),
        format!("[[keys]]\nsecret = {{ command = \"{CANARY}\" }}\n"),
        format!("[[keys]]\nsecret = {{ command = [\"x\", \"{CANARY}\"], timeout = 0 }}\n"),
        format!("[[keys]]\nsecret = {{ command = [\"x\", \"{CANARY}\" }}\n"),
        format!(
            "[[keys]]\nsecret = {{ command = [\"{CANARY}\"], timeout = \"{CANARY}\", refresh = \"sk-{CANARY}\" }}\n"
        ),
        format!("[[keys]]\nsecret = {{ env = \"A\", kind = \"{CANARY}\", user = \"{CANARY}\" }}\n"),
        format!("[[keys]]\nsecret = {{ env = \"A\", kind = \"basic\", user = \"{CANARY}:x\" }}\n"),
        format!("[[keys]]\nheaders = {{ X-A = \"{CANARY}\\n\", Host = \"{CANARY}\" }}\n"),
        format!("[[keys]]\nheaders = {{ \"sk-{CANARY}\" = \"{CANARY}\" }}\n"),
        format!("[[keys]]\nheaders = \"{CANARY}\"\n"),
        format!("[[keys]]\nsecert = \"{CANARY}\"\n"),
        format!("[[keys]]\nsecert = {CANARY}\n"),
        format!("[[keys]]\napi_key = \"{CANARY}\"\nid = 1\n"),
        format!("[[keys]]\nid = \"sk-{CANARY}\"\n"),
        format!("[[keys]]\n\"sk-{CANARY}\" = 1\n"),
        format!("[[keys]]\nid = 1 # was {CANARY}\n"),
        format!("[[keys]]\nid = # was {CANARY}\n"),
        format!("keys = [{{ secret = \"{CANARY}\", id = 1, provder = 2 }}]\n"),
        format!("keys = [{{ secret = \"{CANARY}\" id = 1 }}]\n"),
        format!("keys = \"{CANARY}\"\nsecret = \"{CANARY}\"\n"),
        format!("[keys]\nsecret = \"{CANARY}\"\n"),
        format!("[[keys]]\nprovider = \"openai\"secret = \"{CANARY}\"\n"),
        format!("[[keys]]\nprovider = \"openai\"\"{CANARY}\"\n"),
        format!("[[keys]]\nsecret = \"\"\"\n{CANARY}\n\"\"\"\nid = 1\n"),
        format!("[[keys]]\n{CANARY}\n"),
        format!("[[keys]]\n{CANARY}==\n"),
        format!("[{CANARY}\n"),
        format!("apps.a = \"{CANARY}\"\n"),
        format!("providers.openai = \"{CANARY}\"\n"),
        format!("[providers.openai]\ninject = \"{CANARY}\"\n"),
        format!("[admin]\ntoken = \"{CANARY}\"\n"),
        format!("[admin]\ntoken = {{ env = \"sk-{CANARY}\" }}\n"),
        format!("[admin.token]\nenv = sk-{CANARY}\n"),
        format!("[apps.a]\ntoken = \"{CANARY}\"\n"),
        format!("[apps.a]\ntoken.env = \"TWO_LINES\"\npools = [\"{CANARY}\", \"sk-{CANARY}\"]\n")
            .replace(&format!("\"{CANARY}\", "), ""),
        format!("[apps.\"sk-{CANARY}\"]\n"),
        format!("[store]\nurl = \"redis://:{CANARY}@host\"\n"),
        format!("[store]\nurl = \"foo://u:{CANARY}@host\"\nprefix = 1\n"),
        format!("[store]\nurl = \"redis://u:{CANARY}\"\n"),
        format!("[store]\nurl = \"redis:u:{CANARY}@host\"\n"),
        format!("[store]\nurl = \"redis://u:{CANARY}/x@host\"\n"),
        format!("[store]\nurl = \"redis://host?password={CANARY}\"\n"),
        format!("[store]\nurl = \"redis-sentinel://a,u:{CANARY}@b/primary\"\n"),
        "[store]\nurl = { env = \"REDIS_URL_BAD\" }\n".into(),
        "[store]\nurl = { env = \"REDIS_URL_KIND\" }\n".into(),
        "[store]\nurl = { env = \"REDIS_URL\" }\npassword = 3\n".into(),
        "[store]\nurl = { env = \"REDIS_URL\" }\npassword = { env = \"REDIS_PASSWORD\" }\n".into(),
        format!("[store]\nurl = \"redis://h\"\npassword = \"{CANARY}\"\n"),
        format!("[store]\nurl = \"redis://h\"\nsentinel_password = \"{CANARY}\"\n"),
        format!("[store]\nurl = \"redis://h\"\npasswrd = \"{CANARY}\"\n"),
        format!("[providers.x]\nbase_url = \"https://u:{CANARY}@host/\"\nhosts = 3\n"),
        format!("[providers.x]\nsecret = \"{CANARY}\"\nbase_url = 3\n"),
        format!("[providers.x]\nbase_url = 3\ninject = {{ header = 1, token = \"{CANARY}\" }}\n"),
        format!("[providers.x]\nallow_plaintext = \"sk-{CANARY}\"\n"),
        format!(
            "[providers.openai]\ncheck = {{ method = \"GET\", headers = {{ x-key = \"{CANARY}\" }}, z = 1 }}\n"
        ),
    ] {
        let said = refused(&text);
        assert!(!said.is_empty(), "{text}");
    }
}

#[test]
fn a_syntax_error_stands_alone_with_line_and_caret() {
    let text = refused("[lease]\nttl = 30s\nnonsense = 1\n");
    let mut lines = text.lines();
    let first = lines.next().unwrap();
    assert!(first.starts_with("config/lessor.toml:2: this is not TOML: "), "{first}");
    assert_eq!(lines.next().unwrap(), "  2 | ttl = 30s");
    assert!(lines.next().unwrap().contains('^'));
    assert_eq!(lines.next(), None);
}

#[test]
fn an_unknown_field_anywhere_is_named_with_the_nearest_known_one() {
    for (text, want) in [
        ("[listen]\nproxi = 1\n", "`proxi` is no field of listen; did you mean `proxy`?"),
        (
            "[listen]\nproxy = { path = \"/a\", mod = 1 }\n",
            "`mod` is no field of listen.proxy; did you mean `mode`?",
        ),
        ("[limits]\nmax_header = 1\n", "did you mean `max_headers`?"),
        ("[[keys]]\nmodel = 1\n", "`model` is no field of keys[0]; did you mean `models`?"),
        (
            "[[keys]]\nsecret = { envv = \"A\" }\n",
            "`envv` is no field of keys[0].secret; did you mean `env`?",
        ),
        ("[apps.a]\npool = []\n", "`pool` is no field of apps.a; did you mean `pools`?"),
        ("[pools.a]\nfalback = []\n", "`falback` is no field of pools.a; did you mean `fallback`?"),
        (
            "[providers.openai]\nbase_ulr = 1\n",
            "`base_ulr` is no field of providers.openai; did you mean `base_url`?",
        ),
        (
            "[providers.openai.inject]\nheadr = 1\n",
            "`headr` is no field of providers.openai.inject; did you mean `header`?",
        ),
        (
            "[providers.openai]\nerror_shape = \"opnai\"\n",
            "providers.openai.error_shape is \"opnai\", which is unknown; did you mean `openai`?",
        ),
        ("[[providers.openai.rules]]\nstatus = [402]\n", "providers.openai.rules.0 has no `class`"),
        ("[zzz]\n", "`zzz` is no section; known are `listen`, `store`, `lease`"),
    ] {
        let said = refused(text);
        assert!(said.contains(want), "{text}\n{said}");
    }
}

#[test]
fn all_mistakes_of_one_provider_are_told() {
    let said = refused(
        "[providers.openai]\nbase_ulr = 1\nhosts = 3\nallow_plaintext = true\n[providers.openai.check]\nmethd = \"GET\"\n",
    );
    for want in
        ["lessor.toml:2: `base_ulr`", "lessor.toml:3: providers.openai.hosts", "lessor.toml:6: `methd`"]
    {
        assert!(said.contains(want), "{want}\n{said}");
    }
}

#[test]
fn what_is_taken_out_of_a_providers_table_neither_moves_nor_hides_its_other_mistakes() {
    let said = refused(
        r#"[providers.openai]
[[providers.openai.rules]]
class = "rte"
[[providers.openai.rules]]
status = [402]
[[providers.openai.rules]]
class = "rate"
wait = "soon"
[[providers.openai.rules]]
phrase = "^bad key"
class = "invalid"
proven = true
"#,
    );
    let want = r#"config/lessor.toml:3: providers.openai.rules.0.class is "rte", which is unknown; did you mean `rate`?
  3 | class = "rte"
    |         ^^^^^
config/lessor.toml:4: providers.openai.rules.1 has no `class`
  4 | [[providers.openai.rules]]
    | ^^^^^^^^^^^^^^^^^^^^^^^^^^
config/lessor.toml:8: providers.openai.rules.2.wait is `soon`, must be a time such as 90s or 15m, month_end, day_end or day_end_pacific
  8 | wait = "soon"
    |        ^^^^^^
config/lessor.toml:12: providers.openai.rules.3.proven needs a code, or a phrase with `field`: elsewhere in a body a caller's own words may stand, and a key would be bad by them
  12 | proven = true
     |          ^^^^"#;
    assert_eq!(said, want);
}

#[test]
fn values_that_do_not_fit_each_other_are_refused() {
    for (text, want) in [
        ("[lease]\nttl = \"500ms\"\n", "lease.ttl is 500ms, must be at least 1s"),
        (
            "[lease]\nheartbeat = \"26s361ms\"\n",
            "lease.heartbeat is 26s361ms, must be at most 26s360ms: lease.ttl (30s) less the margin (3s)",
        ),
        ("[timeouts]\nidle = \"0s\"\n", "timeouts.idle is 0s, must be at least 1ms"),
        ("[timeouts]\nidle = \"9999d\"\n", "must be at most"),
        ("[limits]\nmax_header_bytes = 100\n", "must be at least 8192 bytes"),
        ("[store]\nprefix = \"a{b}\"\n", "must be 1 to 64 of"),
        ("[proxy]\nother_hosts = \"allow\"\n", "must be \"tunnel\" or \"deny\""),
        (
            "[proxy]\ndeny_nets = [\"10.0.0.0/33\"]\n",
            "proxy.deny_nets[0] is \"10.0.0.0/33\", must be a network",
        ),
        ("[proxy]\nintercept = \"yes\"\n", "proxy.intercept is \"yes\", must be true or false"),
        ("[listen]\nproxy = []\n", "must name at least one address"),
        ("[listen]\nproxy = { path = \"/a\", mode = 660 }\n", "must be octal"),
        ("[listen]\nproxy = [\"127.0.0.1:1\", \"127.0.0.1:1\"]\n", "127.0.0.1:1 is listened on already"),
        (
            "[listen]\nproxy = \"127.0.0.1:8322\"\n",
            "listen.admin is 127.0.0.1:8322 (the default), must differ",
        ),
        ("[listen]\nadmin = \"unix:/a\"\n", "the admin's Unix socket is made by itself"),
        ("[listen]\nhosts = [\"http://a\"]\n", "must be a host name"),
        ("[listen]\nallow_origins = [\"*\"]\n", "must be an origin"),
        ("[pools.a]\nfallback = [\"b\"]\n[pools.b]\nfallback = [\"a\"]\n", "fallbacks are one-way"),
        ("[pools.a]\nfallback = [\"nowhere\"]\n", "pools.a.fallback[0] is \"nowhere\", must be a pool"),
        ("[apps.anonymous]\ntoken = { env = \"CHECKOUT_TOKEN\" }\n", "apps.anonymous is taken"),
        ("[apps.a]\n", "apps.a has no `token`"),
        ("[apps.a]\nuid = \"nobody-has-this-name\"\n", "must be a user of /etc/passwd, or a number"),
        ("[apps.a]\nuid = -1\n", "apps.a.uid is -1, must be a whole number"),
        ("[apps.a]\nuid = true\n", "must be a user's number or name"),
        ("[apps.a]\nuid = 0\n[apps.b]\nuid = \"root\"\n", "apps a and b have one uid"),
        ("[apps.a]\nproviders = []\n", "apps.a.providers is empty: leave it out where"),
        ("[apps.a]\npools = []\n", "apps.a.pools is empty: leave it out where"),
        (
            "[[keys]]\nid = \"k\"\nprovider = \"openai\"\nsecret.env = \"COPY\"\n[apps.a]\ntoken.env = \"OPENAI_API_KEY\"\n",
            "the token of app a is the secret of key k",
        ),
        ("[apps.a]\ntoken = { env = \"EMPTY\" }\n", "the environment variable EMPTY is empty"),
        ("[apps.a]\ntoken = { env = \"TWO_LINES\" }\n", "TWO_LINES holds more than one line"),
        (
            "[apps.a]\ntoken = { env = \"COPY\" }\n[apps.b]\ntoken = { env = \"COPY\" }\n",
            "apps a and b have one token",
        ),
        ("[apps.a]\ntoken = { env = \"COPY\" }\nproviders = [\"gemni\"]\n", "did you mean `gemini`?"),
        ("keys = 3\n", "keys is a number, must be tables, each under [[keys]]"),
        ("lease = 3\n", "lease is a number, must be a table"),
        ("providers = 3\n", "providers is a number, must be a table"),
        ("[[keys]]\nid = \"a\"\n", "keys[0] has no `provider`"),
        ("[[keys]]\nmodels = []\n", "keys[0].models is empty"),
        ("[[keys]]\nmodels = [\"\"]\n", "keys[0].models[0] is \"\", must be a model"),
        ("[[keys]]\nmax_concurrent_uses = 0\n", "must be a whole number from 1"),
        ("[providers.UP]\n", "providers.UP is no name"),
        (
            "[providers.x]\nbase_url = \"http://llm.internal\"\n",
            "providers.x.base_url sends keys in the clear",
        ),
        (
            "[providers.x]\nbase_url = \"https://x.internal\"\nhosts = [\"api.openai.com\"]\n",
            "providers.x.hosts[0] is a host of provider openai already",
        ),
        (
            "[providers.openai]\nca_file = \"/no/such.pem\"\n",
            "providers.openai.ca_file /no/such.pem cannot be read",
        ),
    ] {
        let said = refused(text);
        assert!(said.contains(want), "{text}\n{said}");
    }
}

/// What `[store]` with these lines becomes.
fn store(lines: &str) -> StoreUrl {
    load(&format!("[store]\n{lines}\n")).unwrap_or_else(|said| panic!("{lines}\n{said}")).store.url
}

fn redis(lines: &str) -> RedisConfig {
    match store(lines) {
        StoreUrl::Redis(redis) => redis,
        other => panic!("{lines} is {other:?}"),
    }
}

fn at(host: &str, port: u16) -> HostPort {
    HostPort { host: host.into(), port }
}

#[test]
fn every_kind_of_store_is_read_and_shown_as_it_was_understood() {
    for (url, kind, shown) in [
        ("memory:", "memory", "memory:"),
        ("sqlite:///var/lib/lessor/state.db", "sqlite", "sqlite:///var/lib/lessor/state.db"),
        ("sqlite:/var/x.db", "sqlite", "sqlite:///var/x.db"),
        // As all paths here: from the directory of the file.
        ("sqlite:state/x.db", "sqlite", "sqlite:config/state/x.db"),
        ("redis://h", "redis", "redis://h:6379"),
        ("redis://H.internal:7000/3", "redis", "redis://h.internal:7000/3"),
        ("redis://h/", "redis", "redis://h:6379"),
        ("rediss://[2001:DB8::1]:7000", "redis", "rediss://[2001:db8::1]:7000"),
        ("redis://[::1]/0", "redis", "redis://[::1]:6379"),
        ("redis-sentinel://a,b:7/main", "redis", "redis-sentinel://a:26379,b:7/main"),
        ("rediss-sentinel://a/main/2", "redis", "rediss-sentinel://a:26379/main/2"),
        ("redis-cluster://a,[::2]:7", "redis", "redis-cluster://a:6379,[::2]:7"),
        ("rediss-cluster://a/0", "redis", "rediss-cluster://a:6379"),
    ] {
        let read = store(&format!("url = \"{url}\""));
        assert_eq!((read.kind(), read.to_string().as_str()), (kind, shown), "{url}");
    }
    let single = redis("url = \"redis://h:7/2\"");
    assert_eq!((single.topology, single.tls, single.db), (Topology::Single(at("h", 7)), false, 2));
    let sentinels = redis("url = \"rediss-sentinel://a,[::2]:7/main/3\"");
    let all = vec![at("a", 26379), at("::2", 7)];
    assert_eq!(sentinels.topology, Topology::Sentinel { sentinels: all, primary: "main".into() });
    assert_eq!((sentinels.tls, sentinels.db), (true, 3));
    let cluster = redis("url = \"redis-cluster://a,b:7\"");
    assert_eq!(cluster.topology, Topology::Cluster(vec![at("a", 6379), at("b", 7)]));
}

#[test]
fn the_credentials_of_a_store_stand_beside_its_url_and_debug_shows_none() {
    let read = redis(
        "url = \"rediss-sentinel://a/main\"\nusername = \"lessor\"\npassword = { env = \"REDIS_PASSWORD\" }\n\
         sentinel_username = \"watch\"\nsentinel_password = { env = \"SENTINEL_PASSWORD\" }",
    );
    assert_eq!(read.username.as_deref(), Some("lessor"));
    assert_eq!(read.password.as_ref().unwrap().expose(), format!("p/{CANARY}"));
    assert_eq!(read.sentinel_username.as_deref(), Some("watch"));
    assert_eq!(read.sentinel_password.as_ref().unwrap().expose(), format!("s/{CANARY}"));
    assert!(!format!("{read:?}").contains(CANARY));
    // A password needs no user: it is the default user's then.
    let read = redis("url = \"rediss://h\"\npassword = { env = \"REDIS_PASSWORD\" }");
    assert!(read.username.is_none() && read.password.is_some());
}

#[test]
fn a_url_from_a_variable_or_a_file_may_hold_its_credentials_which_are_decoded_and_never_shown() {
    let read = redis("url = { env = \"REDIS_URL\" }");
    assert_eq!(read.topology, Topology::Single(at("redis.internal", 6380)));
    assert_eq!((read.username.as_deref(), read.db, read.tls), (Some("lessor"), 2, true));
    assert_eq!(read.password.as_ref().unwrap().expose(), format!("p/@{CANARY}"));
    assert_eq!(read.shown, "rediss://redis.internal:6380/2");
    assert!(!format!("{read:?}").contains(CANARY));
    // The user there, the password here.
    let read = redis("url = { env = \"REDIS_URL_USER\" }\npassword = { env = \"REDIS_PASSWORD\" }");
    assert_eq!(read.username.as_deref(), Some("lessor"));
    let dir = tempfile::tempdir().unwrap();
    let (file, ca) = (dir.path().join("url"), dir.path().join("ca.pem"));
    std::fs::write(&file, "rediss-cluster://:s%25@a,b\n").unwrap();
    std::fs::write(&ca, "").unwrap();
    let lines = format!("url = {{ file = \"{}\" }}\nca_file = \"{}\"", file.display(), ca.display());
    let read = redis(&lines);
    assert_eq!(
        (read.password.unwrap().expose(), read.shown.as_str()),
        ("s%", "rediss-cluster://a:6379,b:6379")
    );
    assert_eq!(read.ca_file.unwrap(), ca);
}

#[test]
fn what_cannot_be_a_store_is_refused_with_the_rule_and_a_password_in_the_file_with_the_way_out() {
    let text = refused(&format!("[store]\nurl = \"redis://lessor:{CANARY}@h\"\n"));
    let want = r#"config/lessor.toml:2: store.url must not hold a user or a password in this file: say store.username and store.password = { env = "REDIS_PASSWORD" }, or store.url = { env = "REDIS_URL" }
  2 | url = …
    |       ^"#;
    assert_eq!(text, want);
    let secret = "password = { env = \"REDIS_PASSWORD\" }";
    for (lines, want) in [
        ("url = \"mysql://h\"", "store.url is of an unknown kind, \"mysql\"; known are `memory`, `sqlite`"),
        ("url = \"redis-sentinal://h/p\"", "\"redis-sentinal\"; did you mean `redis-sentinel`?"),
        ("url = \"memory\"", "store.url is \"memory\", must be \"memory:\""),
        ("url = \"memory://\"", "must be \"memory:\", with nothing behind it"),
        ("url = 3", "store.url is 3, must be a URL"),
        ("url = { evn = \"A\" }", "`evn` is no field of store.url; did you mean `env`?"),
        ("url = { env = \"NO_SUCH\" }", "store.url: the environment variable NO_SUCH is not set"),
        ("url = \"sqlite://state.db\"", "must be \"sqlite:///absolute/path\" or \"sqlite:relative/path\""),
        ("url = \"sqlite:\"", "names no file"),
        ("url = \"sqlite:///var/lib/\"", "names no file"),
        ("url = \"sqlite::memory:\"", "for this process alone use \"memory:\""),
        ("url = \"sqlite:///a?mode=rwc\"", "must be a path alone"),
        ("url = \"redis:h\"", "must have // behind its kind"),
        ("url = \"redis://\"", "must name its servers"),
        ("url = \"redis://h:\"", "must name its servers"),
        ("url = \"redis://h:0\"", "must name its servers"),
        ("url = \"redis://h:65536\"", "must name its servers"),
        ("url = \"redis://::1\"", "with IPv6 in brackets"),
        ("url = \"redis://[::1\"", "with IPv6 in brackets"),
        ("url = \"redis://h1,h2\"", "names several servers"),
        ("url = \"redis-cluster://h1,,h2\"", "must name its servers"),
        ("url = \"redis-cluster://h,H:6379\"", "names a server twice"),
        ("url = \"redis://h/x\"", "must name its database by a number"),
        ("url = \"redis://h/-1\"", "must name its database by a number"),
        ("url = \"redis://h/1/2\"", "no more than a database's number"),
        ("url = \"redis-cluster://h/1\"", "must name no database but 0"),
        ("url = \"valkey://h\"", "must be of kind redis: or rediss: also where the server is Valkey"),
        ("url = \"redis-sentinel://h\"", "must name the primary as the sentinels do"),
        ("url = \"redis-sentinel://h/\"", "must name the primary as the sentinels do"),
        ("url = \"redis-sentinel://h/p/x\"", "must name its database by a number"),
        ("url = \"redis://h/0?timeout=1\"", "options are fields of [store]"),
        (
            "url = { env = \"REDIS_URL_BAD\" }",
            "store.url: what env REDIS_URL_BAD holds has an @ behind its first /",
        ),
        ("url = { env = \"REDIS_URL_KIND\" }", "what env REDIS_URL_KIND holds must be \"memory:\","),
        ("url = { env = \"REDIS_URL_USER\" }", "the username in store.url needs store.password"),
        ("url = \"redis://h\"\nusername = \"u\"", "store.username needs store.password = { env = "),
        ("url = \"redis://h\"\nusername = \"a b\"", "must be a user's name, without spaces"),
        ("url = \"redis://h\"\npassword = \"p\"", "store.password must not stand in this file itself"),
        (secret, "store.password has no use: store.url is of kind memory:"),
        ("url = \"sqlite:a\"\nusername = \"u\"", "store.username has no use: store.url is of kind sqlite:"),
        ("url = \"redis://h\"\nsentinel_username = \"u\"", "store.sentinel_username has no use"),
        ("url = \"redis-sentinel://h/p\"\nsentinel_username = \"u\"", "needs store.sentinel_password"),
        (
            "url = \"redis://h\"\nca_file = \"/dev/null\"",
            "store.ca_file has no use: store.url is without TLS",
        ),
        ("url = \"rediss://h\"\nca_file = \"/no/such.pem\"", "store.ca_file /no/such.pem cannot be read"),
        ("prefix = \"a{b}\"", "must be 1 to 64 of A-Z a-z 0-9 . _ -"),
        ("prefix = \"\"", "must be 1 to 64 of"),
    ] {
        let said = refused(&format!("[store]\n{lines}\n"));
        assert!(said.contains(want), "{lines}\n{said}");
        assert!(said.starts_with("config/lessor.toml:"), "{said}");
    }
    let twice = refused(&format!("[store]\nurl = {{ env = \"REDIS_URL\" }}\nusername = \"u\"\n{secret}\n"));
    assert!(twice.contains("toml:3: store.username is said twice"), "{twice}");
    assert!(twice.contains("toml:4: store.password is said twice"), "{twice}");
}

#[test]
fn a_store_whose_failover_outlasts_the_leases_or_that_is_reached_in_the_clear_is_warned_of() {
    let warnings = |text: &str| load(text).unwrap_or_else(|said| panic!("{said}")).warnings;
    let sentinel = "[store]\nurl = \"rediss-sentinel://h/p\"\n[lease]\n";
    let [said] = &warnings(sentinel)[..] else { panic!("one warning") };
    for part in [
        "a failover of Redis Sentinel takes about 35s",
        "down-after-milliseconds",
        "lease.ttl = \"30s\" it cuts every open stream",
        "set lease.ttl = \"1m5s\"",
    ] {
        assert!(said.contains(part), "{part}: {said}");
    }
    // What it says to set is enough, and no less would be.
    assert_eq!(warnings(&format!("{sentinel}ttl = \"1m5s\"\n")), [""; 0]);
    assert_eq!(warnings(&format!("{sentinel}ttl = \"1m\"\n")).len(), 1);
    let finish = warnings(&format!("{sentinel}on_lost = \"finish\"\n")).concat();
    assert!(finish.contains("run on above its key's cap"), "{finish}");
    let cluster = "[store]\nurl = \"rediss-cluster://h\"\n[lease]\n";
    let said = warnings(cluster).concat();
    assert!(said.contains("Redis Cluster takes about 20s (cluster-node-timeout, 15s"), "{said}");
    assert!(said.contains("set lease.ttl = \"45s\""), "{said}");
    assert_eq!(warnings(&format!("{cluster}ttl = \"45s\"\n")), [""; 0]);
    let clear = warnings("[store]\nurl = \"redis://h\"\n").concat();
    assert!(
        clear.contains("store.url reaches h:6379 without TLS") && clear.contains("use rediss"),
        "{clear}"
    );
    for quiet in
        ["redis://127.0.0.1", "redis://[::1]", "redis://localhost", "rediss://h", "sqlite:a", "memory:"]
    {
        assert_eq!(warnings(&format!("[store]\nurl = \"{quiet}\"\n")), [""; 0], "{quiet}");
    }
}

#[test]
fn a_proxy_listener_that_others_reach_needs_apps_and_says_what_to_add() {
    for open in ["0.0.0.0:8321", "[::]:8321", "10.0.0.1:8321"] {
        let text = format!("[listen]\nproxy = \"{open}\"\n");
        let said = refused(&text);
        assert!(said.contains("add [apps.NAME] with token = { env = \"NAME_TOKEN\" }"), "{said}");
        assert_eq!(said, refused(&format!("{text}[apps]\n")), "an empty [apps] is no app");
        assert_eq!(said, refused(&format!("{text}[apps.a]\nuid = 0\n")), "no user shows over TCP");
        load(&format!("{text}[apps.a]\ntoken = {{ env = \"CHECKOUT_TOKEN\" }}\n")).unwrap();
    }
    load("[listen]\nproxy = [\"[::1]:8321\", \"unix:/run/p.sock\"]\n").unwrap();
}

#[test]
fn an_admin_listener_that_others_reach_without_a_token_is_allowed_and_warned_of() {
    let config = load("[listen]\nadmin = \"0.0.0.0:8322\"\n").unwrap();
    assert!(config.warnings[0].contains("admin.token"), "{:?}", config.warnings);
    assert!(load("").unwrap().warnings.is_empty());
}

#[test]
fn two_keys_with_one_id_or_one_secret_are_refused_by_their_ids() {
    let said = refused(&format!("{KEY}{KEY}"));
    assert!(said.contains("key openai-a of provider openai is there twice"), "{said}");
    let said =
        refused(&format!("{KEY}{}", KEY.replace("openai-a", "openai-b").replace("OPENAI_API_KEY", "COPY")));
    let want = r#"config/lessor.toml:10: keys openai-a and openai-b have one secret; a key may be listed only once
  10 | secret = { env = "COPY" }
     |          ^^^^^^^^^^^^^^^^"#;
    assert_eq!(said, want);
    // One id at two providers is no conflict.
    load(&format!(
        "{KEY}{}",
        KEY.replace("\"openai\"", "\"gemini\"").replace("OPENAI_API_KEY", "OPENAI_API_KEY_2")
    ))
    .unwrap();
}

#[test]
fn azure_is_served_once_it_has_an_address() {
    let key = KEY.replace("\"openai\"", "\"azure-openai\"");
    for address in ["base_url = \"https://mine.openai.azure.com\"", "hosts = [\"mine.openai.azure.com\"]"] {
        let config = load(&format!("[providers.azure-openai]\n{address}\n{key}")).unwrap();
        assert_eq!(config.hosts["mine.openai.azure.com"].as_str(), "azure-openai");
    }
}

#[test]
fn a_shorter_ttl_alone_brings_its_own_heartbeat() {
    let lease = load("[lease]\nttl = \"1s\"\n").unwrap().lease;
    assert!(lease.margin() < lease.ttl - lease.heartbeat);
}

#[test]
fn the_longest_heartbeat_leaves_room_for_a_renewal_that_takes_as_long_as_it_may() {
    for (ttl, most) in
        [("1s", 250), ("1s500ms", 500), ("2s", 860), ("5s", 3860), ("30s", 26_360), ("1h", 3_239_360)]
    {
        let with = |ms: u64| load(&format!("[lease]\nttl = \"{ttl}\"\nheartbeat = \"{ms}ms\"\n"));
        let lease = with(most).unwrap().lease;
        let call = Duration::from_millis(640).min(lease.ttl / 3).min(lease.heartbeat);
        assert_eq!(lease.heartbeat + call, lease.ttl - lease.margin(), "{ttl}");
        let refused = with(most + 1).unwrap_err().to_string();
        assert!(refused.contains("must be at most"), "{refused}");
        let own = load(&format!("[lease]\nttl = \"{ttl}\"\n")).unwrap().lease;
        assert!(own.heartbeat <= own.longest_heartbeat(), "{ttl}");
    }
}

#[test]
fn plain_http_is_for_loopback_unless_the_user_says_so() {
    for base in ["http://127.0.0.1:9/v1", "http://localhost:9", "http://[::1]:9"] {
        load(&format!("[providers.x]\nbase_url = \"{base}\"\n")).unwrap();
    }
    load("[providers.x]\nbase_url = \"http://llm.internal\"\nallow_plaintext = true\n").unwrap();
}

#[test]
fn where_base_url_is_set_both_its_host_and_the_catalogues_are_the_providers() {
    let config = load("[providers.openai]\nbase_url = \"https://gateway.internal/openai\"\n").unwrap();
    assert_eq!(config.hosts["gateway.internal"].as_str(), "openai");
    assert_eq!(config.hosts["api.openai.com"].as_str(), "openai");
    assert!(config.providers["openai"].base_url_is_users);
}

#[test]
fn secret_files_are_read_from_beside_the_configuration_and_trimmed() {
    let dir = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &str| std::fs::write(dir.path().join(name), text).unwrap();
    write("key.txt", &format!("sk-{CANARY}\n"));
    write("empty.txt", "\n");
    let file = |secret: &str| {
        write(
            "lessor.toml",
            &format!("[[keys]]\nid = \"a\"\nprovider = \"openai\"\nsecret = {{ file = \"{secret}\" }}\n"),
        );
        load_file(&dir.path().join("lessor.toml")).map_err(|e| e.to_string())
    };
    let config = file("./key.txt").unwrap();
    assert_eq!(config.keys[0].secret.as_ref().unwrap().expose(), format!("sk-{CANARY}"));
    assert_eq!(config.keys[0].source, "file ./key.txt");
    assert!(!format!("{config:?}").contains(CANARY));
    let said = file("./empty.txt").unwrap_err();
    let problem = format!("the file {} is empty", dir.path().join("empty.txt").display());
    assert!(said.contains(&format!("lessor.toml:4: keys[0].secret: {problem}")), "{said}");
    assert!(file("/no/such/file").unwrap_err().contains("the file /no/such/file cannot be read: "));
    let said = load_file(&dir.path().join("none.toml")).unwrap_err().to_string();
    assert!(said.contains("none.toml: cannot be read: "), "{said}");
}

#[cfg(unix)]
#[test]
fn what_is_wrong_with_a_secret_file_is_told_with_its_path_and_what_may_be_a_key_is_no_path() {
    let dir = tempfile::tempdir().unwrap();
    let said = |file: &str| {
        let text = format!("[[keys]]\nid = 'a'\nprovider = 'openai'\nsecret = {{ file = '{file}' }}\n");
        std::fs::write(dir.path().join("lessor.toml"), text).unwrap();
        load_file(&dir.path().join("lessor.toml")).unwrap_err().to_string()
    };
    std::fs::create_dir(dir.path().join("secrets")).unwrap();
    for (file, content, problem) in [
        ("secrets/openai-a", None, "cannot be read: No such file"),
        ("secrets/openai-a", Some(""), "is empty"),
        ("openai_2.key", Some("one\ntwo\n"), "holds more than one line"),
        ("./key", Some(" x"), "begins or ends with a space"),
    ] {
        let path: std::path::PathBuf = dir.path().join(file).components().collect();
        if let Some(content) = content {
            std::fs::write(&path, content).unwrap();
        }
        for named in [file, path.to_str().unwrap()] {
            let said = said(named);
            let want = format!("the file {} {problem}", path.display());
            assert!(said.contains(&want), "{want} is not in {said}");
        }
    }
    for key in [
        "0fe3a1c2-9b7d-4c21-8e5f-6a7b8c9d0e1f",
        "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY",
        "c29tZS1rZXk/aXMtaGVyZQ==",
        "correct-horse-battery",
    ] {
        let said = said(key);
        assert!(said.contains("the file that it names cannot be read") && !said.contains(key), "{said}");
    }
}

#[test]
fn a_secret_file_that_every_user_can_read_is_warned_of() {
    use std::os::unix::fs::PermissionsExt as _;
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("key");
    std::fs::write(&path, "sk-0123456789abcdef").unwrap();
    for (mode, warned) in [(0o600, 0), (0o640, 0), (0o644, 1)] {
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
        let text = format!(
            "[[keys]]\nid = \"a\"\nprovider = \"openai\"\nsecret = {{ file = \"{}\" }}\n",
            path.display()
        );
        assert_eq!(load(&text).unwrap().warnings.len(), warned, "{mode:o}");
    }
}

/// `text` after some edits: at a place, so many bytes cut, and something put there.
fn edited(mut text: String, edits: &[(prop::sample::Index, usize, String)]) -> String {
    for (at, cut, put) in edits {
        let mut from = at.index(text.len() + 1);
        while !text.is_char_boundary(from) {
            from -= 1;
        }
        let mut to = (from + cut).min(text.len());
        while !text.is_char_boundary(to) {
            to += 1;
        }
        text.replace_range(from..to, put);
    }
    text
}

/// The reference with its settings said, each once.
fn every_setting() -> String {
    let settings =
        include_str!("../config/lessor.toml").lines().filter_map(|line| match line.strip_prefix('#') {
            Some(rest) if rest.is_empty() || rest.starts_with([' ', '#']) => None,
            Some(rest) if rest.starts_with("proxy") || rest.starts_with("secret") => None,
            Some(rest) => Some(rest),
            None => Some(line),
        });
    settings.collect::<Vec<_>>().join("\n")
}

fn edits() -> impl Strategy<Value = Vec<(prop::sample::Index, usize, String)>> {
    let piece = "[\\[\\]{}=\"'a-z0-9.,#\n é]{0,6}";
    proptest::collection::vec((any::<prop::sample::Index>(), 0usize..12, piece), 1..8)
}

#[test]
fn where_a_sidecar_listens_is_read_without_its_secrets_and_whatever_else_is_wrong() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("lessor.toml");
    let text = "leese = 1\n[listen]\nproxy = \"0.0.0.0:9\"\nadmin = \"127.0.0.1:10\"\n[apps.a]\ntoken = { env = \"NO\" }\n";
    std::fs::write(&path, text).unwrap();
    assert_eq!(load_listen(&path).unwrap().admin.to_string(), "127.0.0.1:10");
    std::fs::write(&path, "[listen]\nadmin = 3\n").unwrap();
    assert!(
        load_listen(&path).unwrap_err().to_string().contains("lessor.toml:2: listen.admin is 3, must be")
    );
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_text_is_read_without_a_panic(text in "\\PC*|[\\[\\]{}=\"'a-z0-9.,#\n ]{0,200}") {
        let _ = load(&text);
    }

    #[test]
    fn a_file_with_pieces_cut_swapped_or_overwritten_is_read_without_a_panic(edits in edits()) {
        let _ = load(&edited(every_setting(), &edits));
    }

    #[test]
    fn a_raw_key_in_a_file_with_any_further_mistakes_is_never_shown(edits in edits()) {
        let text = format!(
            "[listen]\nproxy = \"127.0.0.1:1\"\n[[keys]]\nid = \"a\"\nprovider = \"openai\"\n\
             secret = \"{CANARY}\"\nmodels = [\"a\"]\n[admin]\ntoken = {{ env = \"{CANARY}\" }}\n\
             [apps.a]\ntoken = {{ file = \"{CANARY}\" }}\npools = [\"default\"]\n"
        );
        let _ = load(&edited(text, &edits));
    }
}

#[test]
fn a_group_that_answers_name_is_no_name_to_give_and_none_where_no_answer_names_one() {
    let with = |group: &str, more: &str| load(&format!("{KEY}group = \"{group}\"\n{more}"));
    let config = with("auto", "").unwrap();
    assert!(config.keys[0].group.as_ref().unwrap().is_auto() && config.warnings.is_empty());
    let said = with("auto.acme", "").unwrap_err();
    assert!(said.contains("keys[0].group is \"auto.acme\", must not begin with `auto.`"), "{said}");
    assert!(!with("automatic", "").unwrap().keys[0].group.as_ref().unwrap().is_auto());

    let mistral = KEY.replace("\"openai\"", "\"mistral\"") + "group = \"auto\"\n";
    let warned = load(&mistral).unwrap().warnings.concat();
    assert!(warned.contains("[providers.mistral] organization_header"), "{warned}");
    let header = "[providers.mistral]\norganization_header = \"X-Org\"\n";
    let told = load(&format!("{mistral}{header}")).unwrap();
    assert!(told.warnings.is_empty(), "{:?}", told.warnings);
    let said = refused("[providers.mistral]\norganization_header = \"x org\"\n");
    assert!(said.contains("organization_header is `x org`, which is no header's name"), "{said}");
}

#[test]
fn a_weight_that_is_none_and_an_occasion_that_is_not_known_are_named() {
    for (lines, want) in [
        ("[ranking]\nidle = -1", "ranking.idle is -1, must be a number from 0 to 100"),
        ("[ranking]\nidle = 1e9", "ranking.idle is 1e9, must be a number from 0 to 100"),
        ("[ranking]\nidle = nan", "ranking.idle is nan, must be a number from 0 to 100"),
        ("[ranking]\nidle = \"much\"", "ranking.idle is \"much\", must be a number from 0 to 100"),
        ("[ranking]\nidel = 1", "`idel` is no field of ranking; did you mean `idle`?"),
        ("[retry]\non = [\"timeout\"]", "is \"timeout\", must be \"overloaded\" or \"connection\""),
        ("[retry]\non = true", "retry.on is true, must be a list of texts"),
    ] {
        let said = load(&format!("{lines}\n")).unwrap_err();
        assert!(said.contains(want), "{lines}\n{said}");
    }
}

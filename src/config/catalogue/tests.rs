use std::time::Duration;

use super::*;
use crate::config::{Format, Injection, WaitPlace, places};
use crate::model::Class;

const NAMES: [&str; 17] = [
    "anthropic",
    "azure-openai",
    "cohere",
    "deepseek",
    "elevenlabs",
    "fireworks",
    "gemini",
    "groq",
    "huggingface",
    "mistral",
    "openai",
    "openrouter",
    "perplexity",
    "replicate",
    "runway",
    "together",
    "xai",
];

fn name(text: &str) -> ProviderName {
    ProviderName::parse(text).unwrap()
}

fn table(toml: &str) -> RawProvider {
    toml::from_str(toml).unwrap()
}

/// What a table over the catalogue's provider of that name, if any, is refused for.
fn refused(provider: &str, toml: &str) -> Vec<String> {
    let name = name(provider);
    let base = builtin().get(&name).map(Arc::as_ref);
    table(toml).compile(&name, base).unwrap_err().into_iter().map(|e| e.field).collect()
}

#[test]
fn the_catalogue_compiles() {
    assert_eq!(builtin().keys().map(ProviderName::as_str).collect::<Vec<_>>(), NAMES);
}

#[test]
fn every_builtin_has_an_exact_host_and_a_bare_base_url_or_asks_for_one() {
    for provider in builtin().values() {
        assert_eq!(provider.base_url.path(), "/", "{}", provider.name);
        assert_eq!(provider.base_url.scheme_str(), Some("https"), "{}", provider.name);
        assert_eq!(provider.needs_base_url, provider.hosts.is_empty(), "{}", provider.name);
        assert!(!provider.hosts.iter().any(|h| h.contains("unset")), "{}", provider.name);
        assert!(!provider.base_url_is_users && !provider.env.is_empty(), "{}", provider.name);
        assert!(provider.inject.last().unwrap().path_prefix.is_none(), "{}", provider.name);
    }
    let asks: Vec<_> = builtin().values().filter(|p| p.needs_base_url).map(|p| p.name.as_str()).collect();
    assert_eq!(asks, ["azure-openai"]);
}

#[test]
fn no_host_belongs_to_two_providers_and_no_exact_host_falls_under_a_pattern() {
    let mut seen = BTreeMap::new();
    for provider in builtin().values() {
        for host in &provider.hosts {
            assert_eq!(seen.insert(host.clone(), provider.name.clone()), None, "{host}");
            assert!(host_patterns().iter().all(|(pattern, _)| !host.ends_with(pattern)), "{host}");
        }
    }
    assert!(host_patterns().contains(&(".openai.azure.com".into(), name("azure-openai"))));
    assert!(host_patterns().contains(&(".endpoints.huggingface.cloud".into(), name("huggingface"))));
}

#[test]
fn every_place_of_a_credential_is_known() {
    for header in
        ["authorization", "proxy-authorization", "x-api-key", "api-key", "x-goog-api-key", "xi-api-key"]
    {
        assert!(credential_headers().iter().any(|h| h == header), "{header}");
    }
    assert!(credential_queries().iter().any(|q| q == "key"));
}

#[test]
fn a_users_address_replaces_the_catalogues_and_both_hosts_stay_the_providers() {
    let raw = table("base_url = 'http://127.0.0.1:9000/v2/'\nhosts = ['Gw.Internal']");
    let openai = raw.compile(&name("openai"), builtin().get("openai").map(Arc::as_ref)).unwrap();
    assert_eq!(openai.base_url, "http://127.0.0.1:9000/v2");
    assert!(openai.base_url_is_users);
    for host in ["api.openai.com", "127.0.0.1", "gw.internal"] {
        assert!(openai.hosts.iter().any(|h| h == host), "{host}");
    }
}

#[test]
fn a_users_rules_and_waits_come_before_the_catalogues() {
    let raw = table(
        "rules = [{ status = 429, class = 'quota', wait = '1h' }]\nwaits = [{ body = '/wait', format = 'seconds' }]",
    );
    let base = builtin().get("openai").unwrap();
    let openai = raw.compile(&name("openai"), Some(base)).unwrap();
    assert_eq!(openai.rules[0].class, Class::Quota);
    assert_eq!(openai.rules[0].wait, Some(Duration::from_hours(1)));
    assert_eq!(openai.rules.len(), base.rules.len() + 1);
    assert_eq!(openai.waits[0].from, WaitPlace::Body("/wait".into()));
    assert_eq!(openai.waits[1..], base.waits);
}

#[test]
fn a_provider_of_the_users_own_needs_an_address_only_and_gets_the_generic_rules() {
    let raw = table("base_url = 'https://llm.internal/v2'");
    let own = raw.compile(&name("internal-llm"), None).unwrap();
    assert_eq!(own.hosts, ["llm.internal"]);
    assert_eq!(own.rules.len(), GENERIC.0.len());
    let bearer = Place::Header { name: header::AUTHORIZATION, value: Format::bearer() };
    assert_eq!(own.inject, [Injection { path_prefix: None, places: vec![bearer] }]);
    assert_eq!(refused("internal-llm", ""), ["base_url"]);
    assert_eq!(refused("azure-openai", "error_shape = 'openai'"), ["base_url"]);
}

#[test]
fn a_host_of_the_users_is_address_enough_for_a_provider_without_one() {
    let raw = table("hosts = ['mine.openai.azure.com', 'other.openai.azure.com']");
    let azure = raw.compile(&name("azure-openai"), Some(&builtin()["azure-openai"])).unwrap();
    assert_eq!(azure.base_url, "https://mine.openai.azure.com");
    assert!(!azure.needs_base_url && !azure.base_url_is_users);
    assert_eq!(azure.hosts.len(), 2);
}

#[test]
fn a_base_url_that_could_send_a_key_elsewhere_is_refused_and_never_repeated() {
    for url in [
        "http://llm.internal",
        "https://user:hunter2@llm.internal",
        "https://h?x=1",
        "https://h/#x",
        "ftp://h",
        "/v1",
        "h",
        "https://",
        "https://h:",
        "https://h:0",
        "https://h:70000",
        "https://h/a/../b",
        "",
        "http://localhost.evil.example",
    ] {
        let raw = RawProvider { base_url: Some(url.into()), ..RawProvider::default() };
        let errors = raw.compile(&name("own"), None).unwrap_err();
        assert_eq!(errors.len(), 1, "{url}");
        assert_eq!(errors[0].field, "base_url", "{url}");
        assert!(!errors[0].to_string().contains("hunter2"));
    }
    for url in ["http://localhost:1", "http://127.0.0.2", "http://[::1]:80/", "https://h:443/a/b/"] {
        let raw = RawProvider { base_url: Some(url.into()), ..RawProvider::default() };
        assert!(raw.compile(&name("own"), None).is_ok(), "{url}");
    }
    assert!(table("base_url = 'http://h'\nallow_plaintext = true").compile(&name("own"), None).is_ok());
}

#[test]
fn every_mistake_is_named_with_its_field() {
    for (toml, field) in [
        ("hosts = ['https://h']", "hosts.0"),
        ("hosts = ['h:443']", "hosts.0"),
        ("hosts = ['*.h']", "hosts.0"),
        ("host_patterns = ['h']", "host_patterns.0"),
        ("keep = ['a b']", "keep.0"),
        ("no_model_paths = ['v1']", "no_model_paths.0"),
        ("deny_paths = ['v1']", "deny_paths.0"),
        ("allow_paths = ['/a', '/a%20']", "allow_paths.1"),
        ("inject = {}", "inject.header"),
        ("inject = { header = 'x', query = 'y' }", "inject.header"),
        ("inject = { header = 'host' }", "inject.header"),
        ("inject = { header = 'x', format = 'Token' }", "inject.format"),
        ("inject = { header = 'x', format = '{secret}{secret}' }", "inject.format"),
        ("inject = { header = 'x', path_prefix = '/a' }", "inject.path_prefix"),
        ("inject = [{ header = 'x' }, { header = 'X' }]", "inject.1.header"),
        (
            "inject = [{ header = 'x' }, { header = 'y', path_prefix = '/a' }, { header = 'z' }]",
            "inject.1.path_prefix",
        ),
        ("inject = [{ header = 'x', path_prefix = 'a' }, { header = 'y' }]", "inject.0.path_prefix"),
        ("inject = { query = 'key' }", "inject.query"),
        ("inject = { kind = 'basic', header = 'x' }", "inject.kind"),
        ("inject = { kind = 'api_key' }", "inject.kind"),
        ("inject = { header = 'x', format = '{secret}{secret.a}' }", "inject.format"),
        ("inject = { header = 'x-lessor-key' }", "inject.header"),
        ("inject = []", "inject"),
        ("check = { path = 'x' }", "check.path"),
        ("check = { path = '/x', method = 'G T' }", "check.method"),
        ("rules = [{ class = 'rate' }]", "rules.0.status"),
        ("rules = [{ status = 200, class = 'rate' }]", "rules.0.status"),
        ("rules = [{ status = '599-500', class = 'rate' }]", "rules.0.status"),
        ("rules = [{ status = 600, class = 'rate' }]", "rules.0.status"),
        ("rules = [{ status = '500-600', class = 'rate' }]", "rules.0.status"),
        ("rules = [{ status = 429, phrase = '', class = 'rate' }]", "rules.0.phrase"),
        ("rules = [{ status = 429, field = '/a', class = 'rate' }]", "rules.0.field"),
        ("rules = [{ code = 'x', field = 'a', class = 'rate' }]", "rules.0.field"),
        ("rules = [{ status = 429, class = 'rate', proven = true }]", "rules.0.proven"),
        ("rules = [{ status = 401, class = 'invalid', proven = true }]", "rules.0.proven"),
        (
            "rules = [{ status = 401, phrase = '^bad key', class = 'invalid', proven = true }]",
            "rules.0.proven",
        ),
        (
            "rules = [{ status = 401, code = '*', field = '/error/x', class = 'invalid', proven = true }]",
            "rules.0.proven",
        ),
        ("rules = [{ status = 429, class = 'rate', wait = 'soon' }]", "rules.0.wait"),
        ("rules = [{ status = 429, class = 'cancelled' }]", "rules.0.class"),
        ("rules = [{ code = '*', class = 'rate' }]", "rules.0.field"),
        ("rules = [{ phrase = 'x', field = 'header:x', class = 'rate' }]", "rules.0.field"),
        ("rules = [{ code = 'x', field = 'header:a b', class = 'rate' }]", "rules.0.field"),
        ("rules = [{ status = 429, class = 'rate', only_if_left = 'a b' }]", "rules.0.only_if_left"),
        ("rules = [{ status = 429, class = 'rate', another_key = true }]", "rules.0.another_key"),
        ("remove_rules = ['insufficient_quotas']", "remove_rules.0"),
        ("remove_rules = ['429', '429']", "remove_rules.1"),
        ("remove_waits = ['x-nothing']", "remove_waits.0"),
        ("model_after = ['/models']", "model_after.0"),
        ("model_after = ['/models/*']", "model_after.0"),
        ("model_after = ['/*/*']", "model_after.0"),
        ("model_field = 'a b'", "model_field"),
        ("model_query = ''", "model_query"),
        ("usage = [{}]", "usage.0.input"),
        ("usage = [{ input = 'a b' }]", "usage.0.input"),
        ("waits = [{ header = 'x', format = 'seconds', unless = 'x' }]", "waits.0.unless"),
        ("waits = [{ phrase = 'x', format = 'rate_limit' }]", "waits.0.format"),
        ("rules = [{ status = 402, class = 'quota', window = 'day' }]", "rules.0.window"),
        ("waits = [{ phrase = 'x', field = 'message', format = 'duration' }]", "waits.0.field"),
        ("waits = [{ header = 'x', field = '/message', format = 'duration' }]", "waits.0.field"),
        ("waits = [{ format = 'millis' }]", "waits.0.header"),
        ("waits = [{ header = 'a b', format = 'millis' }]", "waits.0.header"),
        ("waits = [{ body = 'a', format = 'millis' }]", "waits.0.body"),
    ] {
        assert_eq!(refused("openai", toml), [field], "{toml}");
    }
    assert_eq!(refused("openai", "hosts = ['h:1']\nkeep = ['a b']"), ["hosts.0", "keep.0"]);
}

#[test]
fn a_misspelt_field_is_refused_and_every_field_is_listed() {
    assert!(toml::from_str::<RawProvider>("base_ulr = 'x'").is_err());
    assert!(toml::from_str::<RawProvider>("rules = [{ status = 429, clas = 'rate' }]").is_err());
    let message = toml::from_str::<RawProvider>("zzz = 1").unwrap_err().to_string();
    for field in RawProvider::FIELDS {
        assert!(message.contains(&format!("`{field}`")), "{field}");
    }
    assert_eq!(message.matches('`').count() / 2, RawProvider::FIELDS.len() + 1);
}

#[test]
fn every_provider_says_where_answers_count_what_they_used_save_those_whose_jobs_do() {
    let silent: Vec<_> = builtin().values().filter(|p| p.usage.is_empty()).map(|p| p.name.as_str()).collect();
    assert_eq!(silent, ["runway"]);
}

#[test]
fn entries_for_one_path_are_put_in_together_and_those_for_others_instead() {
    let raw = table(
        "base_url = 'https://h'\ninject = [{ query = 'k', path_prefix = '/q' }, \
             { header = 'x-id', format = '{secret.id}' }, { header = 'x-key', format = 'v1 {secret.key}' }]",
    );
    let own = raw.compile(&name("own"), None).unwrap();
    let places: Vec<_> =
        own.inject.iter().map(|one| (one.path_prefix.as_deref(), one.places.len())).collect();
    assert_eq!(places, [(Some("/q"), 1), (None, 2)]);
}

#[test]
fn a_key_of_the_catalogue_goes_into_one_header_and_never_into_a_query() {
    for provider in builtin().values() {
        for way in &provider.inject {
            assert_eq!(way.places.len(), 1, "{}", provider.name);
            assert!(way.places[0].header().is_some(), "{}", provider.name);
        }
    }
    // Where a provider takes several, this is the one.
    let usual =
        |name: &str| places(&builtin()[name].inject).filter_map(Place::header).last().unwrap().as_str();
    for (name, header) in [
        ("anthropic", "x-api-key"),
        ("gemini", "x-goog-api-key"),
        ("azure-openai", "api-key"),
        ("deepseek", "authorization"),
        ("elevenlabs", "xi-api-key"),
    ] {
        assert_eq!(usual(name), header, "{name}");
    }
}

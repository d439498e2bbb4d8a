//! A configuration from the environment alone.
//!
//! Every provider of the catalogue whose usual variable is set is served: `OPENAI_API_KEY` is key
//! `openai-1`, `OPENAI_API_KEY_2` is `openai-2`, and so on, gaps allowed. A base-URL variable such as
//! `OPENAI_BASE_URL` is never read as a provider's address: it usually points at lessor itself, and the
//! two would talk in a circle.

use std::collections::BTreeMap;
use std::sync::Arc;

use zeroize::Zeroizing;

use super::catalogue::{self, RawProvider};
use super::errors::{ConfigError, Mistake, shown};
use super::providers::AZURE;
use super::secrets::Shape;
use super::{Compressed, Config, Injection, KeyConfig, Provider, Ranking, Stamps};
use super::{checks, defaults, file, keys};
use crate::model::{KeyId, PoolName, ProviderName};

/// What stands in front of mistakes, and in [`Config::origin`].
pub const ORIGIN: &str = "the environment";

/// The highest number behind a variable's name that is looked for.
const HIGHEST: u32 = 64;

/// The configuration of `lessor run` without a file.
pub fn from_environment(env: &dyn Fn(&str) -> Option<String>) -> Result<Config, ConfigError> {
    let mut found = Found::default();
    for provider in catalogue::builtin().values() {
        found.keys_of(provider, env);
    }
    if found.keys.is_empty() && found.mistakes.is_empty() {
        found.mistakes.push(Mistake::of(ORIGIN, nothing_found(&found.warnings)));
    }
    if !found.mistakes.is_empty() {
        return Err(ConfigError::of(found.mistakes));
    }
    let mut all = catalogue::builtin().clone();
    all.extend(found.providers.iter().map(|(name, provider)| (name.clone(), provider.clone())));
    Ok(Config {
        listen: defaults::listen(),
        store: defaults::store(),
        lease: defaults::LEASE,
        queue: defaults::QUEUE,
        retry: defaults::RETRY,
        timeouts: defaults::TIMEOUTS,
        shutdown: defaults::SHUTDOWN,
        ranking: Ranking::DEFAULT,
        proxy: defaults::proxy(),
        intercept: true,
        ca: None,
        compressed: Compressed::Pass,
        websocket: defaults::WEBSOCKET,
        limits: defaults::LIMITS,
        admin_token: None,
        hosts: file::hosts_of(&all),
        host_patterns: catalogue::host_patterns(),
        providers: found.providers,
        secret_variables: found.variables,
        files: Stamps::default(),
        keys: found.keys,
        pools: BTreeMap::new(),
        default_pool: None,
        upstreams: Vec::new(),
        ca_dir: None,
        quit: false,
        apps: Vec::new(),
        origin: ORIGIN.into(),
        warnings: found.warnings,
    })
}

/// What the environment holds.
#[derive(Default)]
struct Found {
    providers: BTreeMap<ProviderName, Arc<Provider>>,
    keys: Vec<KeyConfig>,
    variables: Vec<String>,
    warnings: Vec<String>,
    mistakes: Vec<Mistake>,
}

impl Found {
    fn keys_of(&mut self, provider: &Arc<Provider>, env: &dyn Fn(&str) -> Option<String>) {
        // Unset and empty are one here: `OPENAI_API_KEY= lessor run` is how a shell leaves one out.
        let read = |variable: String| {
            let text = env(&variable)?;
            (!text.trim().is_empty()).then_some((variable, text))
        };
        let numbered = |n: u32| {
            provider
                .env
                .iter()
                .find_map(|name| read(if n == 1 { name.clone() } else { format!("{name}_{n}") }))
        };
        let all: Vec<_> = (1..=HIGHEST).filter_map(|n| Some((n, numbered(n)?))).collect();
        if all.is_empty() {
            return;
        }
        let Some(provider) = self.placed(provider, env) else { return };
        let first = self.keys.len();
        for (n, (variable, text)) in all {
            self.variables.push(variable.clone());
            let shape = Shape::of(&provider.inject, None);
            let secret = match shape.take(&Zeroizing::new(text)) {
                Ok(secret) => secret,
                Err(problem) => {
                    self.mistakes.push(Mistake::of(ORIGIN, format!("{variable} {problem}")));
                    continue;
                }
            };
            let is_twin =
                |key: &&KeyConfig| key.secret.as_ref().is_some_and(|its| checks::same(its, &secret));
            if let Some(twin) = self.keys[first..].iter().find(is_twin) {
                let known = twin.source.trim_start_matches("env ");
                self.warnings.push(format!("{variable} is the key that {known} is; left out"));
                continue;
            }
            let Ok(id) = KeyId::parse(&format!("{}-{n}", provider.name)) else { continue };
            let inject: Arc<[Injection]> = provider.inject.clone().into();
            let hidden = keys::hidden(&inject, &secret, &[]);
            self.warnings.extend(checks::short_secret(&provider, &id, &hidden));
            self.keys.push(KeyConfig {
                id,
                provider: provider.name.clone(),
                pool: PoolName::default_pool(),
                group: None,
                secret: Some(secret),
                source: format!("env {variable}"),
                inject,
                headers: Vec::new(),
                hidden,
                max_concurrent_uses: defaults::USES,
                models: Vec::new(),
                disabled: false,
            });
        }
        self.providers.insert(provider.name.clone(), provider);
    }

    /// The provider with an address: Azure's is the customer's own.
    fn placed(
        &mut self,
        provider: &Arc<Provider>,
        env: &dyn Fn(&str) -> Option<String>,
    ) -> Option<Arc<Provider>> {
        let (name, variable) = AZURE;
        if provider.name.as_str() != name {
            return Some(provider.clone());
        }
        let Some(url) = env(variable).filter(|url| !url.trim().is_empty()) else {
            self.warnings.push(format!(
                "{name} is left out: its keys are set, but {variable} (https://NAME.openai.azure.com) is not"
            ));
            return None;
        };
        let text = serde_json::json!({ "base_url": url.trim().trim_end_matches('/') });
        let compiled =
            serde_json::from_value::<RawProvider>(text).map_err(|e| e.to_string()).and_then(|raw| {
                raw.compile(&provider.name, Some(provider))
                    .map_err(|all| all.into_iter().map(|one| one.problem).collect::<Vec<_>>().join("; "))
            });
        match compiled {
            Ok(placed) if placed.base_url.scheme_str() == Some("https") => Some(Arc::new(placed)),
            Ok(_) => {
                self.mistakes.push(Mistake::of(ORIGIN, format!("{variable} must begin with https://")));
                None
            }
            Err(problem) => {
                self.mistakes.push(Mistake::of(ORIGIN, format!("{variable} is {}: {problem}", shown(&url))));
                None
            }
        }
    }
}

fn nothing_found(warnings: &[String]) -> String {
    let variables: Vec<String> = catalogue::builtin()
        .values()
        .filter(|provider| !provider.env.is_empty())
        .map(|provider| provider.env.join(" or "))
        .collect();
    let mut text = format!(
        "no keys found; set one of these variables (and _2, _3, … for more keys), or give a file with --config\n  \
         {}\nfor example:\n  OPENAI_API_KEY=sk-… lessor run",
        variables.join("\n  ")
    );
    for warning in warnings {
        text.push('\n');
        text.push_str(warning);
    }
    text
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a test that fails may panic
mod tests {
    use super::*;

    fn read(variables: &[(&str, &str)]) -> Result<Config, ConfigError> {
        from_environment(&|name| {
            variables.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned())
        })
    }

    fn ids(config: &Config) -> Vec<&str> {
        config.keys.iter().map(|key| key.id.as_str()).collect()
    }

    #[test]
    fn numbered_variables_become_numbered_keys_and_gaps_are_allowed() {
        let config = read(&[
            ("OPENAI_API_KEY", "sk-a"),
            ("OPENAI_API_KEY_2", "sk-b"),
            ("OPENAI_API_KEY_64", "sk-c"),
            ("OPENAI_API_KEY_65", "sk-d"),
            ("ANTHROPIC_API_KEY_3", "sk-e\n"),
            ("GEMINI_API_KEY", ""),
        ])
        .unwrap();
        assert_eq!(ids(&config), ["anthropic-3", "openai-1", "openai-2", "openai-64"]);
        assert_eq!(config.keys[0].secret.as_ref().unwrap().expose(), "sk-e");
        assert_eq!(config.keys[1].source, "env OPENAI_API_KEY");
        assert!(config.keys.iter().all(|key| key.max_concurrent_uses == 8 && !key.disabled));
        let served: Vec<_> = config.providers.keys().map(ProviderName::as_str).collect();
        assert_eq!(served, ["anthropic", "openai"]);
        assert_eq!(config.origin, "the environment");
        assert_eq!(config.hosts["generativelanguage.googleapis.com"].as_str(), "gemini");
    }

    #[test]
    fn without_keys_the_error_names_the_variables_and_shows_a_line_to_type() {
        let text = read(&[]).unwrap_err().to_string();
        assert!(
            text.contains("ANTHROPIC_API_KEY") && text.contains("OPENAI_API_KEY=sk-… lessor run"),
            "{text}"
        );
    }

    #[test]
    fn a_base_url_variable_is_never_taken_for_the_provider() {
        let config =
            read(&[("OPENAI_API_KEY", "sk-a"), ("OPENAI_BASE_URL", "http://127.0.0.1:8321")]).unwrap();
        assert_eq!(config.providers["openai"].base_url.host(), Some("api.openai.com"));
    }

    #[test]
    fn azure_needs_its_endpoint_and_is_left_out_with_a_warning_else() {
        let keys = [("AZURE_OPENAI_API_KEY", "a1"), ("OPENAI_API_KEY", "sk-a")];
        let config = read(&keys).unwrap();
        assert_eq!(ids(&config), ["openai-1"]);
        assert!(config.warnings[0].contains("AZURE_OPENAI_ENDPOINT"), "{:?}", config.warnings);

        let endpoint = ("AZURE_OPENAI_ENDPOINT", "https://Mine.openai.azure.com/");
        let config = read(&[keys[0], keys[1], endpoint]).unwrap();
        assert_eq!(ids(&config), ["azure-openai-1", "openai-1"]);
        assert_eq!(config.hosts["mine.openai.azure.com"].as_str(), "azure-openai");

        assert!(read(&[keys[0], ("AZURE_OPENAI_ENDPOINT", "http://mine.example")]).is_err());
        let alone = read(&[keys[0]]).unwrap_err().to_string();
        assert!(alone.contains("AZURE_OPENAI_ENDPOINT"), "{alone}");
    }

    #[test]
    fn one_key_in_two_variables_is_lent_once() {
        let config =
            read(&[("OPENAI_API_KEY", "sk-0123456789abc"), ("OPENAI_API_KEY_2", "sk-0123456789abc")])
                .unwrap();
        assert_eq!(ids(&config), ["openai-1"]);
        assert_eq!(config.warnings, ["OPENAI_API_KEY_2 is the key that OPENAI_API_KEY is; left out"]);
    }

    #[test]
    fn a_key_that_cannot_stand_in_a_header_is_named_and_not_shown() {
        let text = read(&[("OPENAI_API_KEY", "canary\u{1}x")]).unwrap_err().to_string();
        assert_eq!(text, "the environment: OPENAI_API_KEY holds a character that cannot stand in a header");
    }

    #[test]
    fn a_secret_too_short_to_be_looked_for_in_bodies_is_warned_of() {
        let config = read(&[("OPENAI_API_KEY", "sk-0123456789ab")]).unwrap();
        assert!(config.warnings[0].contains("openai-1"), "{:?}", config.warnings);
        assert!(!config.warnings[0].contains("0123"), "{:?}", config.warnings);
        assert!(read(&[("OPENAI_API_KEY", "sk-0123456789abc")]).unwrap().warnings.is_empty());
    }
}

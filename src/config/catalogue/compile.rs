//! From a table as it is written to a [`Provider`], every mistake named with its field.

use http::{Uri, header};

use super::places::{compile_check, compile_inject, host_of, parse_base_url, parse_host, parse_keep};
use super::reading::{compile_rules, compile_usage, compile_waits, remove_rules, remove_waits};
use super::schema::{OneOrMany, RawProvider};
use super::{FieldError, GENERIC, UNSET, refuse};
use crate::config::{
    BaseUrlVariable, ErrorShape, Format, Injection, ModelAfter, Origin, PathPattern, Place, Provider, Scrub,
};
use crate::model::ProviderName;

impl RawProvider {
    /// The provider this table describes, over `base` (the catalogue's of that name) where there is one:
    /// `rules`, `waits`, `hosts` and `deny_paths` come beside the base's, its rules and waits first; other
    /// fields replace the base's. Reports every mistake, not only the first.
    pub fn compile(&self, name: &ProviderName, base: Option<&Provider>) -> Result<Provider, Vec<FieldError>> {
        self.compile_as(name, base, Origin::User)
    }

    fn compile_as(
        &self,
        name: &ProviderName,
        base: Option<&Provider>,
        origin: Origin,
    ) -> Result<Provider, Vec<FieldError>> {
        let mut errors = Vec::new();
        let users_url = self.base_url.as_deref().and_then(|text| {
            let plaintext = self.allow_plaintext.unwrap_or(false);
            parse_base_url(text, plaintext).map_err(|problem| refuse(&mut errors, "base_url", problem)).ok()
        });
        if self.base_url.is_none() {
            match base {
                None => refuse(&mut errors, "base_url", "is missing, and the catalogue has no such provider"),
                Some(base) if base.needs_base_url && self.hosts.as_ref().is_none_or(Vec::is_empty) => {
                    refuse(
                        &mut errors,
                        "base_url",
                        "or hosts must be set: this provider has no address of its own",
                    );
                }
                Some(_) => {}
            }
        }
        let mut provider = base.cloned().unwrap_or_else(|| blank(name));
        provider.name = name.clone();
        if let Some(url) = users_url {
            push_new(&mut provider.hosts, host_of(&url));
            provider.base_url = url;
            provider.base_url_is_users = true;
            provider.needs_base_url = false;
        }
        self.fill(&mut provider, base, &mut errors);
        self.fill_reading(&mut provider, origin, &mut errors);
        // Whoever names a host for the proxy modes has said where the provider is; the first of several is
        // where the other mode and lessor's own checks go.
        if provider.needs_base_url
            && let Some(url) = provider.hosts.first().and_then(|host| format!("https://{host}").parse().ok())
        {
            provider.base_url = url;
            provider.needs_base_url = false;
        }
        if errors.is_empty() { Ok(provider) } else { Err(errors) }
    }

    /// A table of the catalogue: it may do without `base_url`, and its `base_url` is not the user's.
    pub(super) fn compile_builtin(&self, name: &ProviderName) -> Result<Provider, Vec<FieldError>> {
        let raw = Self { base_url: self.base_url.clone().or_else(|| Some(UNSET.to_owned())), ..self.clone() };
        let mut provider = raw.compile_as(name, None, Origin::Provider)?;
        provider.base_url_is_users = false;
        provider.needs_base_url = self.base_url.is_none();
        if provider.needs_base_url {
            provider.hosts = self.hosts.clone().unwrap_or_default();
        }
        Ok(provider)
    }

    /// Everything but `base_url`.
    fn fill(&self, provider: &mut Provider, base: Option<&Provider>, errors: &mut Vec<FieldError>) {
        for (i, host) in self.hosts.iter().flatten().enumerate() {
            match parse_host(host) {
                Ok(host) => push_new(&mut provider.hosts, host),
                Err(problem) => refuse(errors, format!("hosts.{i}"), problem),
            }
        }
        if let Some(patterns) = &self.host_patterns {
            provider.host_patterns.clear();
            for (i, pattern) in patterns.iter().enumerate() {
                let suffix = pattern.strip_prefix('*').unwrap_or(pattern);
                match suffix.strip_prefix('.').map(parse_host) {
                    Some(Ok(host)) => provider.host_patterns.push(format!(".{host}")),
                    _ => refuse(
                        errors,
                        format!("host_patterns.{i}"),
                        "must be a suffix such as `.example.net`",
                    ),
                }
            }
        }
        if let Some(path) = &self.ca_file {
            provider.ca_file = Some(path.clone());
        }
        if let Some(OneOrMany(inject)) = &self.inject {
            provider.inject = compile_inject(inject, base.map_or(&[], |base| &base.inject), errors);
        }
        if let Some(keep) = &self.keep {
            provider.keep.clear();
            for (i, place) in keep.iter().enumerate() {
                match parse_keep(place) {
                    Ok(place) => provider.keep.push(place),
                    Err(problem) => refuse(errors, format!("keep.{i}"), problem),
                }
            }
        }
        if let Some(shape) = self.error_shape {
            provider.error_shape = shape;
        }
        if let Some(scrub) = self.scrub {
            provider.scrub = scrub;
        }
        if let Some(check) = &self.check {
            provider.check = compile_check(check, errors);
        }
        provider.deny_paths.extend(compile_paths("deny_paths", self.deny_paths.as_ref(), errors));
        if self.allow_paths.is_some() {
            provider.allow_paths = compile_paths("allow_paths", self.allow_paths.as_ref(), errors);
        }
        if let Some(paths) = &self.no_model_paths {
            provider.no_model_paths.clone_from(paths);
            for (i, path) in paths.iter().enumerate().filter(|(_, path)| !path.starts_with('/')) {
                refuse(errors, format!("no_model_paths.{i}"), format!("is `{path}`, must begin with `/`"));
            }
        }
        if let Some(all) = &self.subprotocols {
            provider.subprotocols.clone_from(all);
            for (i, prefix) in all.iter().enumerate().filter(|(_, prefix)| !is_token(prefix)) {
                let problem = format!("is `{prefix}`, must be a prefix such as `provider-api-key.`");
                refuse(errors, format!("subprotocols.{i}"), problem);
            }
        }
        if let Some(env) = &self.env {
            provider.env.clone_from(env);
        }
        if let Some(env) = &self.env_other {
            provider.env_other.clone_from(env);
        }
        if let Some(all) = &self.env_base_url {
            provider.env_base_url.clone_from(all);
            for (i, _) in all.iter().enumerate().filter(|(_, one)| !is_base_url_variable(one)) {
                let problem =
                    "must be { name = \"X_BASE_URL\", path = \"/v1\" }, the path empty or with a `/` first";
                refuse(errors, format!("env_base_url.{i}"), problem);
            }
        }
    }

    /// How answers are read, and where the model stands.
    fn fill_reading(&self, provider: &mut Provider, origin: Origin, errors: &mut Vec<FieldError>) {
        remove_rules(&mut provider.rules, self.remove_rules.as_deref().unwrap_or_default(), errors);
        remove_waits(&mut provider.waits, self.remove_waits.as_deref().unwrap_or_default(), errors);
        provider.rules.splice(0..0, compile_rules(self, origin, errors));
        provider.waits.splice(0..0, compile_waits(self, errors));
        if let Some(usage) = &self.usage {
            provider.usage = compile_usage(usage, errors);
        }
        for (field, text, header) in [
            ("organization_header", &self.organization_header, &mut provider.organization_header),
            ("max_uses_header", &self.max_uses_header, &mut provider.max_uses_header),
        ] {
            let Some(text) = text else { continue };
            match text.to_ascii_lowercase().parse() {
                Ok(name) => *header = Some(name),
                Err(_) => refuse(errors, field, format!("is `{text}`, which is no header's name")),
            }
        }
        if let Some(parts) = &self.model_after {
            provider.model_after.clear();
            for (i, text) in parts.iter().enumerate() {
                match parse_model_after(text) {
                    Some(after) => provider.model_after.push(after),
                    None => refuse(
                        errors,
                        format!("model_after.{i}"),
                        format!("is `{text}`, must be a part of a path such as `/models/` or `/models/*/*`"),
                    ),
                }
            }
        }
        for (name, field) in [("model_field", &self.model_field), ("model_query", &self.model_query)] {
            let sound = |text: &String| {
                !text.is_empty() && text.bytes().all(|b| b.is_ascii_alphanumeric() || b"_-.".contains(&b))
            };
            if field.as_ref().is_some_and(|text| !sound(text)) {
                refuse(errors, name, "must be a name, such as `model`");
            }
        }
        provider.model_field = self.model_field.clone().unwrap_or(std::mem::take(&mut provider.model_field));
        provider.model_query = self.model_query.clone().or(provider.model_query.take());
    }
}

/// `/models/`, or `/models/*/*` for a name of two segments.
fn parse_model_after(text: &str) -> Option<ModelAfter> {
    let bare = text.trim_end_matches('*');
    let (part, segments) = match text.strip_suffix("/*/*") {
        Some(part) => (format!("{part}/"), 2),
        None => (bare.strip_suffix('/').filter(|_| bare == text).map(|part| format!("{part}/"))?, 1),
    };
    let sound = part.len() > 2 && part.starts_with('/') && !part.contains('*');
    sound.then_some(ModelAfter { part, segments })
}

fn compile_paths(field: &str, raw: Option<&Vec<String>>, errors: &mut Vec<FieldError>) -> Vec<PathPattern> {
    let mut all = Vec::new();
    for (i, text) in raw.into_iter().flatten().enumerate() {
        match PathPattern::parse(text) {
            Ok(pattern) => all.push(pattern),
            Err(rule) => refuse(errors, format!("{field}.{i}"), format!("is `{text}`, {rule}")),
        }
    }
    all
}

/// Whether a WebSocket subprotocol may begin so (RFC 9110, section 5.6.2).
fn is_token(text: &str) -> bool {
    let may = |b: u8| b.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&b);
    !text.is_empty() && text.bytes().all(may)
}

/// Its name and path go into lines that a shell evaluates.
fn is_base_url_variable(one: &BaseUrlVariable) -> bool {
    let plain = |b: u8| b.is_ascii_alphanumeric() || b == b'_';
    let named = !one.name.is_empty() && !one.name.as_bytes()[0].is_ascii_digit();
    let path = one.path.is_empty() || one.path.starts_with('/') && !one.path.ends_with('/');
    named && one.name.bytes().all(plain) && path && one.path.bytes().all(|b| plain(b) || b"/-.".contains(&b))
}

/// A provider that says nothing of its own: a Bearer token, and the generic rules.
fn blank(name: &ProviderName) -> Provider {
    let (rules, waits) = GENERIC.clone();
    let bearer = Place::Header { name: header::AUTHORIZATION, value: Format::bearer() };
    Provider {
        name: name.clone(),
        base_url: Uri::from_static(UNSET),
        base_url_is_users: false,
        needs_base_url: true,
        hosts: Vec::new(),
        host_patterns: Vec::new(),
        ca_file: None,
        inject: vec![Injection { path_prefix: None, places: vec![bearer] }],
        keep: Vec::new(),
        error_shape: ErrorShape::OpenAi,
        scrub: Scrub::On,
        check: None,
        rules,
        waits,
        organization_header: None,
        max_uses_header: None,
        usage: Vec::new(),
        deny_paths: Vec::new(),
        allow_paths: Vec::new(),
        no_model_paths: Vec::new(),
        model_after: Vec::new(),
        model_field: "model".into(),
        model_query: None,
        subprotocols: Vec::new(),
        env: Vec::new(),
        env_other: Vec::new(),
        env_base_url: Vec::new(),
    }
}
fn push_new(hosts: &mut Vec<String>, host: String) {
    if !hosts.contains(&host) {
        hosts.push(host);
    }
}

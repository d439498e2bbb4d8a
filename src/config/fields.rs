//! Every field the file may have. What is not here is a mistake, and `config/lessor.toml` shows all.

/// The fields of each table: by its path, with `*` for a name of the user's own and `[]` for an array.
pub(super) const FIELDS: &[(&str, &[&str])] = &[
    (
        "",
        &[
            "listen",
            "store",
            "lease",
            "queue",
            "retry",
            "timeouts",
            "shutdown",
            "ranking",
            "proxy",
            "ca",
            "scrub",
            "websocket",
            "limits",
            "admin",
            "providers",
            "pools",
            "keys",
            "apps",
        ],
    ),
    ("listen", &["proxy", "admin", "hosts", "allow_origins", "response_headers"]),
    ("listen.proxy", &["path", "mode"]),
    (
        "store",
        &["url", "prefix", "username", "password", "sentinel_username", "sentinel_password", "ca_file"],
    ),
    ("lease", &["ttl", "heartbeat", "on_lost", "max_duration"]),
    ("queue", &["max_wait", "max_waiting"]),
    ("retry", &["max_attempts", "max_body", "max_total", "on"]),
    ("timeouts", &["connect", "first_byte", "idle", "body_idle", "header", "keep_alive"]),
    ("shutdown", &["grace", "linger"]),
    (
        "ranking",
        &[
            "strategy",
            "capacity",
            "idle",
            "success",
            "error",
            "rate_limit",
            "cooldown",
            "freshness",
            "jitter",
        ],
    ),
    ("proxy", &["other_hosts", "deny_nets", "intercept", "alpn"]),
    ("ca", &["cert_file", "key_file"]),
    ("scrub", &["compressed"]),
    ("websocket", &["idle", "max_duration"]),
    ("limits", &["max_connections", "max_header_bytes", "max_headers", "max_streams"]),
    ("admin", &["token"]),
    ("providers.*", PROVIDER),
    ("pools.*", &["fallback"]),
    (
        "keys[]",
        &[
            "id",
            "provider",
            "pool",
            "group",
            "secret",
            "headers",
            "max_concurrent_uses",
            "models",
            "disabled",
        ],
    ),
    ("keys[].secret", &["env", "file", "command", "timeout", "refresh", "kind", "user"]),
    ("apps.*", &["token", "uid", "pools", "providers"]),
    ("secret", &["env", "file"]),
];

/// The fields of `[providers.x]`, which the catalogue reads.
pub(super) const PROVIDER: &[&str] = super::catalogue::RawProvider::FIELDS;

/// Fields inside a provider's tables whose values are never secret.
const PROVIDER_INNER: &[&str] = &[
    "header",
    "format",
    "query",
    "path_prefix",
    "method",
    "path",
    "status",
    "code",
    "field",
    "phrase",
    "class",
    "scope",
    "proven",
    "wait",
    "window",
    "body",
    "only_if_zero",
    "unless",
    "only_if_left",
    "another_key",
    "event",
    "input",
    "output",
    "total",
    "cache_read",
    "cache_write",
    "reasoning",
    "cost",
    "characters",
    "seconds",
];

/// The fields of one table.
pub(super) fn of(table: &str) -> &'static [&'static str] {
    FIELDS.iter().find(|(name, _)| *name == table).map_or(&[], |(_, fields)| fields)
}

/// Whether a value of a field of this name may be shown.
pub(super) fn is_plain(field: &str) -> bool {
    const HIDDEN: [&str; 9] =
        ["secret", "token", "password", "sentinel_password", "env", "file", "command", "user", "headers"];
    !HIDDEN.contains(&field)
        && (PROVIDER_INNER.contains(&field) || FIELDS.iter().any(|(_, fields)| fields.contains(&field)))
}

/// The known word nearest to `word`, if one is near enough to be meant: a letter or so away, else alike as a
/// whole (`hosts_patterns`, `token_env`), which says little of short words.
pub(super) fn nearest<'a>(word: &str, known: impl IntoIterator<Item = &'a str> + Clone) -> Option<&'a str> {
    let slips = |other: &str| strsim::osa_distance(word, other);
    let few = (word.chars().count() / 3).clamp(1, 3);
    let typo = known.clone().into_iter().filter(|_| word.len() > 1).min_by_key(|other| slips(other));
    typo.filter(|other| slips(other) <= few).or_else(|| {
        let alike = known.into_iter().map(|other| (strsim::jaro_winkler(word, other), other));
        let (likeness, other) = alike.max_by(|a, b| a.0.total_cmp(&b.0))?;
        (likeness > 0.75).then_some(other)
    })
}

/// What a message says behind an unknown `word`: the nearest known one, else all.
pub(super) fn hint<'a>(word: &str, known: impl IntoIterator<Item = &'a str> + Clone) -> String {
    if let Some(near) = nearest(word, known.clone()) {
        return format!("did you mean `{near}`?");
    }
    let all: Vec<String> = known.into_iter().map(|name| format!("`{name}`")).collect();
    match all.len() {
        0 => "there are none".into(),
        1..=20 => format!("known are {}", all.join(", ")),
        _ => format!("known are {} and {} more", all[..20].join(", "), all.len() - 20),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a test that fails may panic
mod tests {
    use std::collections::BTreeSet;

    use serde_json::Value;
    use toml::de::{DeTable, DeValue};

    use super::*;

    /// The reference with every setting said: lines that begin with `#` and no space are settings.
    fn opened() -> String {
        let mut seen = BTreeSet::new();
        let mut table = String::new();
        let mut text = String::new();
        for line in include_str!("../../config/lessor.toml").lines() {
            let setting = line.strip_prefix('#').filter(|rest| !rest.is_empty() && !rest.starts_with(' '));
            let line = setting.unwrap_or(line);
            if line.starts_with('[') {
                line.clone_into(&mut table);
            }
            // Alternatives of one field stand below each other; the first counts.
            let field = line.split_once(" = ").map(|(field, _)| format!("{table} {field}"));
            if field.is_none_or(|field| seen.insert(field)) {
                text.push_str(line);
                text.push('\n');
            }
        }
        text
    }

    fn collect(path: &str, table: &DeTable<'_>, into: &mut BTreeSet<(String, String)>) {
        for (key, value) in table {
            into.insert((path.to_owned(), key.get_ref().to_string()));
            let named = matches!(path, "providers" | "pools" | "apps");
            let key = if named { "*" } else { key.get_ref() };
            let below = if path.is_empty() { key.to_owned() } else { format!("{path}.{key}") };
            walk(&below, value.get_ref(), into);
        }
    }

    fn walk(path: &str, value: &DeValue<'_>, into: &mut BTreeSet<(String, String)>) {
        match value {
            DeValue::Table(table) => collect(path, table, into),
            DeValue::Array(items) => {
                items.iter().for_each(|item| walk(&format!("{path}[]"), item.get_ref(), into));
            }
            _ => {}
        }
    }

    #[test]
    fn every_field_that_is_known_stands_in_the_reference() {
        let text = opened();
        let tree = DeTable::parse(&text).unwrap();
        let plain = include_str!("../../config/lessor.toml");
        let secrets: Vec<&str> =
            plain.lines().filter(|line| line.trim_start_matches('#').starts_with("secret = ")).collect();
        let mut there = BTreeSet::new();
        collect("", tree.get_ref(), &mut there);
        for (table, fields) in FIELDS {
            for field in *fields {
                let found = there.iter().any(|(path, name)| {
                    let path = path.replace("listen.proxy[]", "listen.proxy");
                    name == field && (path == *table || *table == "secret")
                });
                // A secret is of one kind, and the first that is shown counts.
                let shown = || secrets.iter().any(|line| line.contains(&format!("{field} = ")));
                assert!(
                    found || (table.ends_with("secret") && shown()),
                    "`{field}` of [{table}] is not in config/lessor.toml"
                );
            }
        }
    }

    /// What may stand at a place of the schema: as it says itself, by reference, or as one of several.
    fn meant<'a>(schema: &'a Value, at: &'a Value) -> Vec<&'a Value> {
        let named = at["$ref"].as_str().and_then(|name| schema.pointer(&name[1..]));
        let either =
            ["anyOf", "oneOf"].into_iter().flat_map(|word| at[word].as_array().into_iter().flatten());
        let more = named.into_iter().chain(either).flat_map(|at| meant(schema, at));
        [at].into_iter().chain(more).collect()
    }

    #[test]
    fn the_schema_has_the_fields_that_are_known_and_no_others() {
        let schema: Value = serde_json::from_str(crate::config::SCHEMA).unwrap();
        for (table, fields) in FIELDS {
            let path = if *table == "secret" { "admin.token".to_owned() } else { table.replace("[]", ".[]") };
            let steps = path.split('.').filter(|step| !step.is_empty());
            let at = steps.fold(meant(&schema, &schema), |at, step| {
                let below = at.into_iter().map(|at| match step {
                    "*" => &at["additionalProperties"],
                    "[]" => &at["items"],
                    name => &at["properties"][name],
                });
                below.flat_map(|at| meant(&schema, at)).collect()
            });
            let found = at.iter().filter_map(|at| at["properties"].as_object());
            let found: BTreeSet<&str> = found.flat_map(|fields| fields.keys()).map(String::as_str).collect();
            assert_eq!(found, fields.iter().copied().collect(), "[{table}]");
        }
    }

    #[test]
    fn the_reference_is_sound_as_it_stands_and_with_every_setting_said() {
        let env = |name: &str| Some(format!("value-of-{name}"));
        let plain = include_str!("../../config/lessor.toml");
        let as_is =
            crate::config::load_str(plain, "config/lessor.toml", &env).unwrap_or_else(|e| panic!("{e}"));
        assert_eq!(as_is.keys.len(), 1);
        assert!(as_is.warnings.is_empty(), "{:?}", as_is.warnings);
        // The files it names are not on the machine that runs the tests.
        let all = opened();
        let all: Vec<&str> = all
            .lines()
            .filter(|line| {
                !line.starts_with("ca_file")
                    && !line.starts_with("cert_file")
                    && !line.starts_with("key_file")
            })
            .collect();
        let all = crate::config::load_str(&all.join("\n"), "config/lessor.toml", &env)
            .unwrap_or_else(|e| panic!("{e}"));
        assert_eq!((all.apps.len(), all.providers.len(), all.listen.proxy.len()), (1, 2, 2));
        // What is said is the default, save for what is noted.
        assert_eq!(all.lease.heartbeat, as_is.lease.heartbeat);
        assert_eq!(all.timeouts.keep_alive, as_is.timeouts.keep_alive);
        assert_eq!(all.proxy.deny_nets, as_is.proxy.deny_nets);
        assert_eq!(all.limits.max_header_bytes, as_is.limits.max_header_bytes);
    }

    #[test]
    fn every_way_that_the_reference_shows_to_have_a_secret_or_put_it_in_is_sound() {
        let plain = include_str!("../../config/lessor.toml");
        let env = |_: &str| Some("value-of-a-variable".to_owned());
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(
            dir.path().join("secret"),
            "{\"app_id\": \"the-app-id\", \"app_key\": \"the-app-key\"}",
        )
        .unwrap();
        let shown = |start: &str| {
            let all =
                plain.lines().map(|line| line.trim_start_matches('#')).filter(|line| line.starts_with(start));
            all.map(str::to_owned).collect::<Vec<_>>()
        };
        let (secrets, ways) = (shown("secret = "), shown("inject = "));
        assert_eq!((secrets.len(), ways.len()), (4, 2));
        let plain_secret = "secret = { env = \"A\" }".to_owned();
        let parts = "secret = { file = \"secret\" }".to_owned();
        let with_parts =
            |way: &String| if way.contains("app_id") { parts.clone() } else { plain_secret.clone() };
        let all = secrets.iter().map(|secret| (secret.clone(), String::new()));
        for (secret, way) in all.chain(ways.iter().map(|way| (with_parts(way), way.clone()))) {
            let file = dir.path().join("secret").display().to_string();
            let secret =
                secret.replace("/run/secrets/openai-a", &file).replace("/run/secrets/password", &file);
            let headers = shown("headers = ").remove(0);
            let text = format!(
                "[providers.own]\nbase_url = \"https://h\"\n{way}\n\n[[keys]]\nid = \"a\"\nprovider = \"own\"\n{secret}\n{headers}\n"
            );
            let name = dir.path().join("lessor.toml").display().to_string();
            crate::config::load_str(&text, &name, &env).unwrap_or_else(|e| panic!("{e}"));
        }
    }

    #[test]
    fn the_fields_of_a_provider_are_those_that_the_catalogue_reads() {
        let error = toml::from_str::<crate::config::catalogue::RawProvider>("no_such_field = 1").unwrap_err();
        let known: BTreeSet<&str> = error.message().split('`').skip(3).step_by(2).collect();
        assert_eq!(known, PROVIDER.iter().copied().collect());
    }

    #[test]
    fn a_slip_of_the_pen_finds_its_field_and_nonsense_finds_none() {
        assert_eq!(nearest("hartbeat", of("lease").iter().copied()), Some("heartbeat"));
        assert_eq!(nearest("on-lost", of("lease").iter().copied()), Some("on_lost"));
        assert_eq!(nearest("ky", ["key_model", "key"]), Some("key"));
        assert_eq!(nearest("zzz", of("lease").iter().copied()), None);
    }
}

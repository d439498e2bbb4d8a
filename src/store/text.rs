//! What the shared stores write about cooldowns: subjects and rests as text.
//!
//! The Lua scripts read and write the same text, so its field names are part of the store's layout:
//! fields are only ever added, and a reader that meets what it does not know takes the rest as unreadable
//! rather than guess.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::StoreTime;
use super::rules::cleared::Clearable;
use super::rules::learned::Groups;
use super::rules::rest::Rest;
use super::rules::subject::{Subject, model_text};
use crate::model::{Class, FencingToken, Fingerprint, GroupName, KeyId, LeaseId, ModelName};

/// A fingerprint in hex.
pub fn fingerprint_text(fingerprint: Fingerprint) -> String {
    use std::fmt::Write as _;
    fingerprint.0.iter().fold(String::with_capacity(64), |mut text, byte| {
        let _ = write!(text, "{byte:02x}"); // a String takes all
        text
    })
}

/// The fingerprint of 64 hex digits.
pub fn parse_fingerprint(text: &str) -> Option<Fingerprint> {
    let digits = text.as_bytes();
    if digits.len() != 64 || !digits.iter().all(u8::is_ascii_hexdigit) {
        return None;
    }
    let mut bytes = [0; 32];
    for (at, byte) in bytes.iter_mut().enumerate() {
        *byte = u8::from_str_radix(&text[2 * at..2 * at + 2], 16).ok()?;
    }
    Some(Fingerprint(bytes))
}

/// The groups that a key's answers named, as JSON by fingerprint; `None` where there are none.
pub(in crate::store) fn groups_text(groups: &Groups) -> Option<String> {
    let all: BTreeMap<String, &GroupName> =
        groups.0.iter().map(|(secret, group)| (fingerprint_text(*secret), group)).collect();
    // Names and hex digits: there is nothing that JSON cannot hold.
    if all.is_empty() { None } else { serde_json::to_string(&all).ok() }
}

/// The groups that [`groups_text`] wrote; what cannot be read is learned again.
pub(in crate::store) fn parse_groups(text: &str) -> Groups {
    let all: BTreeMap<String, GroupName> = serde_json::from_str(text).unwrap_or_default();
    let read = |(secret, group): (String, GroupName)| Some((parse_fingerprint(&secret)?, group));
    Groups(all.into_iter().filter_map(read).collect())
}

/// A subject as text: `key:<key>@<fingerprint>`, the same and `|<model>`, `group:<group>`,
/// `group:<group>|<model>`, `provider|<model>`. No name holds `:`, `@` or `|`, so the first of each ends it; a
/// model's name may hold anything. Where no model is known it is `-`, and for the provider it is left out, as
/// in a time when that meant all models.
pub fn subject_text(subject: &Subject) -> String {
    match subject {
        Subject::Key(key, secret) => format!("key:{key}@{}", fingerprint_text(*secret)),
        Subject::KeyModel(key, secret, model) => {
            format!("key:{key}@{}|{}", fingerprint_text(*secret), model_text(model.as_ref()))
        }
        Subject::Group(group) => format!("group:{group}"),
        Subject::GroupModel(group, model) => format!("group:{group}|{}", model_text(model.as_ref())),
        Subject::ProviderModel(None) => "provider".into(),
        Subject::ProviderModel(Some(model)) => format!("provider|{model}"),
    }
}

/// The subject that [`subject_text`] wrote.
pub fn parse_subject(text: &str) -> Option<Subject> {
    // Of no model: all of them, or none in particular.
    let (what, model) = match text.split_once('|') {
        Some((what, ModelName::NONE)) => (what, Some(None)),
        Some((what, model)) => (what, Some(Some(ModelName::new(model)?))),
        None => (text, None),
    };
    if what == "provider" {
        return Some(Subject::ProviderModel(model.flatten()));
    }
    if let Some(group) = what.strip_prefix("group:") {
        let group = GroupName::parse(group).ok()?;
        return Some(match model {
            Some(model) => Subject::GroupModel(group, model),
            None => Subject::Group(group),
        });
    }
    let (key, secret) = what.strip_prefix("key:")?.split_once('@')?;
    let (key, secret) = (KeyId::parse(key).ok()?, parse_fingerprint(secret)?);
    Some(match model {
        Some(model) => Subject::KeyModel(key, secret, model),
        None => Subject::Key(key, secret),
    })
}

/// What a person can clear, as text: `key:<key>` or `group:<group>`.
pub(in crate::store) fn clearable_text(what: &Clearable) -> String {
    match what {
        Clearable::Key(key) => format!("key:{key}"),
        Clearable::Group(group) => format!("group:{group}"),
    }
}

/// The thing that [`clearable_text`] wrote.
pub(in crate::store) fn parse_clearable(text: &str) -> Option<Clearable> {
    match text.split_once(':')? {
        ("key", key) => KeyId::parse(key).ok().map(Clearable::Key),
        ("group", group) => GroupName::parse(group).ok().map(Clearable::Group),
        _ => None,
    }
}

/// A rest as JSON. Tokens are text, for Lua prints large numbers inexactly; what is false, zero or absent
/// is left out.
#[allow(clippy::struct_excessive_bools)] // as in what it is of
#[derive(Serialize, Deserialize)]
struct Row {
    class: Class,
    since_ms: StoreTime,
    /// Absent: until a check or a person says otherwise.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    until_ms: Option<StoreTime>,
    token: String,
    #[serde(default, skip_serializing_if = "is_default")]
    strikes: u32,
    /// A probation follows.
    #[serde(default, skip_serializing_if = "is_default")]
    probation: bool,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    probe_lease: Option<LeaseId>,
    #[serde(default)]
    probed_at_ms: StoreTime,
    #[serde(default, skip_serializing_if = "is_default")]
    doubt: bool,
    #[serde(default, skip_serializing_if = "is_default")]
    by_check: bool,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    status: Option<u16>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    code: Option<Arc<str>>,
    #[serde(default, skip_serializing_if = "is_default")]
    of_model: bool,
}

fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

/// A rest as text.
pub fn rest_text(rest: &Rest) -> String {
    let row = Row {
        class: rest.class,
        since_ms: rest.since,
        until_ms: Some(rest.until).filter(|until| *until != StoreTime::NEVER),
        token: rest.token.0.to_string(),
        strikes: rest.strikes,
        probation: rest.on_probe_end,
        probe_lease: rest.probe_lease,
        probed_at_ms: rest.probed_at,
        doubt: rest.doubt,
        by_check: rest.by_check,
        status: rest.status,
        code: rest.code.clone(),
        of_model: rest.of_model,
    };
    // A row is plain text and numbers: there is nothing that JSON cannot hold.
    serde_json::to_string(&row).unwrap_or_default()
}

/// The rest that [`rest_text`] wrote.
pub fn parse_rest(text: &str) -> Option<Rest> {
    let row: Row = serde_json::from_str(text).ok()?;
    Some(Rest {
        class: row.class,
        since: row.since_ms,
        until: row.until_ms.unwrap_or(StoreTime::NEVER),
        token: FencingToken(row.token.parse().ok()?),
        strikes: row.strikes,
        on_probe_end: row.probation,
        probe_lease: row.probe_lease,
        probed_at: row.probed_at_ms,
        doubt: row.doubt,
        by_check: row.by_check,
        status: row.status,
        code: row.code,
        of_model: row.of_model,
    })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn every_subject_is_read_back_whatever_its_model_is_called() {
        let (key, secret) = (KeyId::parse("k").unwrap(), Fingerprint([0xa7; 32]));
        let group = GroupName::parse("provider").unwrap();
        let mut subjects = vec![
            Subject::Key(key.clone(), secret),
            Subject::Group(group.clone()),
            Subject::ProviderModel(None),
        ];
        for model in ["m", "a|b", "key:k@x", "group:g", "provider", "ü\n|", "--", "-"] {
            let model = ModelName::new(model);
            subjects.push(Subject::KeyModel(key.clone(), secret, model.clone()));
            subjects.push(Subject::GroupModel(group.clone(), model.clone()));
            subjects.push(Subject::ProviderModel(model));
        }
        for subject in &subjects {
            assert_eq!(parse_subject(&subject_text(subject)).as_ref(), Some(subject));
        }
        for bad in ["", "key:k", "key:k@1", "group:", "group:A", "other", "provider|"] {
            assert_eq!(parse_subject(bad), None, "{bad}");
        }
    }

    #[test]
    fn every_rest_is_read_back() {
        let full = Rest {
            class: Class::Quota,
            since: StoreTime(1_764_000_000_001),
            until: StoreTime(1_764_000_000_002),
            token: FencingToken(1_764_000_000_000_123),
            strikes: 3,
            on_probe_end: true,
            probe_lease: Some(LeaseId::fresh()),
            probed_at: StoreTime(7),
            doubt: true,
            by_check: true,
            status: Some(429),
            code: Some("a \"code\"".into()),
            of_model: true,
        };
        let least = Rest {
            class: Class::Invalid,
            until: StoreTime::NEVER,
            strikes: 0,
            on_probe_end: false,
            probe_lease: None,
            doubt: false,
            by_check: false,
            status: None,
            code: None,
            of_model: false,
            ..full.clone()
        };
        for rest in [full, least] {
            assert_eq!(parse_rest(&rest_text(&rest)).as_ref(), Some(&rest));
        }
        assert_eq!(parse_rest("{}"), None);
    }
}

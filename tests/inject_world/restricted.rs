//! PodSecurity's `restricted`, read from `tests/kubernetes/restricted.json`.

use std::sync::LazyLock;

use serde::Deserialize;
use serde_json::Value;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Profile {
    #[serde(rename = "what")]
    _what: String,
    rules: Vec<Rule>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Rule {
    rule: String,
    of: Of,
    at: String,
    or_pod: Option<String>,
    allow: Option<Vec<Value>>,
    refuse: Option<Vec<Value>>,
    includes: Option<Vec<Value>>,
    only: Option<Vec<Value>>,
    only_keys: Option<Vec<String>>,
}

#[derive(Deserialize)]
#[serde(rename_all = "lowercase")]
enum Of {
    Pod,
    Container,
    Volume,
}

/// What of the pod the profile refuses, one text each.
pub fn violations(pod: &Value) -> Vec<String> {
    static PROFILE: LazyLock<Profile> = LazyLock::new(|| {
        serde_json::from_str(include_str!("../kubernetes/restricted.json")).expect("the rules are readable")
    });
    let list = |at: &str| pod.pointer(at).and_then(Value::as_array).cloned().unwrap_or_default();
    let mut found = Vec::new();
    for rule in &PROFILE.rules {
        let things = match rule.of {
            Of::Pod => vec![pod.clone()],
            Of::Container => [list("/spec/initContainers"), list("/spec/containers")].concat(),
            Of::Volume => list("/spec/volumes"),
        };
        for thing in things {
            let name = thing["name"].as_str().unwrap_or("pod");
            let or_pod = rule.or_pod.as_ref().and_then(|at| pod.pointer(at)).unwrap_or(&Value::Null);
            let steps: Vec<_> = rule.at.split('/').skip(1).collect();
            for value in looked_up(&thing, &steps) {
                let value = if value.is_null() { or_pod } else { value };
                if !rule.takes(value) {
                    found.push(format!("{}: {name}: {} is {value}", rule.rule, rule.at));
                }
            }
        }
    }
    found
}

/// What is there; nothing is null, and of an empty list there is none.
fn looked_up<'a>(thing: &'a Value, steps: &[&str]) -> Vec<&'a Value> {
    match steps {
        [] => vec![thing],
        ["*", rest @ ..] => {
            thing.as_array().into_iter().flatten().flat_map(|one| looked_up(one, rest)).collect()
        }
        [step, rest @ ..] => looked_up(thing.get(*step).unwrap_or(&Value::Null), rest),
    }
}

impl Rule {
    fn takes(&self, value: &Value) -> bool {
        let items = value.as_array().map_or(&[][..], Vec::as_slice);
        let keys = value.as_object().into_iter().flatten().map(|(key, _)| key);
        self.allow.as_ref().is_none_or(|allowed| allowed.contains(value))
            && self.refuse.as_ref().is_none_or(|refused| !refused.contains(value))
            && self.includes.as_ref().is_none_or(|needed| needed.iter().all(|one| items.contains(one)))
            && self.only.as_ref().is_none_or(|known| items.iter().all(|one| known.contains(one)))
            && self.only_keys.as_ref().is_none_or(|known| keys.into_iter().all(|key| known.contains(key)))
    }
}

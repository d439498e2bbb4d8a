//! A JSON Patch (RFC 6902) that only adds: it never removes, and never replaces what others may hold on to.
//!
//! `add` at a member that is there replaces its value; that is used for one thing alone, the app's own
//! `NO_PROXY` with ours behind it.

use serde_json::{Value, json};

/// Operations, in their order.
#[derive(Debug, Default)]
pub(super) struct Patch(Vec<Value>);

impl Patch {
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(super) fn into_value(self) -> Value {
        Value::Array(self.0)
    }

    pub(super) fn add<S: AsRef<str>>(&mut self, path: &[S], value: impl Into<Value>) {
        self.0.push(json!({ "op": "add", "path": pointer(path), "value": value.into() }));
    }

    /// Behind what the list holds; `exists` says whether there is a list.
    pub(super) fn append<S: AsRef<str>>(&mut self, list: &[S], exists: bool, values: Vec<Value>) {
        if values.is_empty() {
            return;
        }
        if !exists {
            return self.add(list, values);
        }
        for value in values {
            let end = list.iter().map(AsRef::as_ref).chain(["-"]).collect::<Vec<_>>();
            self.add(&end, value);
        }
    }

    /// Members of an object at `path`; `exists` says whether there is one.
    pub(super) fn members(&mut self, path: &[&str], exists: bool, members: Vec<(&str, Value)>) {
        if members.is_empty() {
            return;
        }
        if !exists {
            let all = members.into_iter().map(|(key, value)| (key.to_owned(), value));
            return self.add(path, Value::Object(all.collect()));
        }
        for (key, value) in members {
            let path: Vec<_> = path.iter().copied().chain([key]).collect();
            self.add(&path, value);
        }
    }
}

/// RFC 6901: `~` and `/` within a step are written `~0` and `~1`.
fn pointer<S: AsRef<str>>(path: &[S]) -> String {
    path.iter().fold(String::new(), |mut all, step| {
        all.push('/');
        all.push_str(&step.as_ref().replace('~', "~0").replace('/', "~1"));
        all
    })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a test that fails may panic
mod tests {
    use super::*;

    #[test]
    fn keys_are_escaped_and_parents_are_made_where_there_are_none() {
        let mut patch = Patch::default();
        patch.members(&["metadata", "labels"], true, vec![("a.test/x~y", json!("1"))]);
        patch.members(&["metadata", "annotations"], false, vec![("a.test/z", json!("2"))]);
        patch.append(&["spec", "volumes"], true, vec![json!(3), json!(4)]);
        patch.append(&["spec", "none"], false, vec![json!(5)]);
        patch.append(&["spec", "nothing"], false, Vec::new());
        let paths: Vec<_> =
            patch.0.iter().map(|op| (op["path"].as_str().unwrap(), op["value"].clone())).collect();
        assert_eq!(
            paths,
            [
                ("/metadata/labels/a.test~1x~0y", json!("1")),
                ("/metadata/annotations", json!({ "a.test/z": "2" })),
                ("/spec/volumes/-", json!(3)),
                ("/spec/volumes/-", json!(4)),
                ("/spec/none", json!([5])),
            ]
        );
    }
}

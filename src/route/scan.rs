//! Reads the model that a body names while it streams by: the top-level `model` of a JSON object, without a
//! parse of the rest, or the field of that name of a form (`FormScan`).
//!
//! Two depths of care: to the *first* `model` where only a cooldown's scope depends on it; to the
//! *end* where a key's `models` do, since a second `model` later in the body must not slip past.

use std::borrow::Cow;

use http::HeaderMap;
use http::header::{CONTENT_ENCODING, CONTENT_TYPE};

use super::form::FormScan;
use crate::model::ModelName;

/// A body that is looked into, by its type.
#[derive(Debug)]
pub enum BodyScan<'f> {
    /// A JSON object.
    Json(ModelScan<'f>),
    /// A form.
    Form(FormScan),
}

impl<'f> BodyScan<'f> {
    /// The look for `field` in a body with these headers; `None` where it cannot be read: encoded, or of
    /// another type. A body whose type is not said counts as JSON.
    pub fn of(headers: &HeaderMap, field: &'f str) -> Option<Self> {
        if headers.get_all(CONTENT_ENCODING).iter().any(|value| value != "identity") {
            return None;
        }
        let kind = headers.get(CONTENT_TYPE).map_or(Ok(""), |value| value.to_str()).ok()?;
        let kind = kind.split_once(';').map_or(kind, |(kind, _)| kind).trim();
        let is = |other: &str| kind.eq_ignore_ascii_case(other);
        let json_like =
            || kind.len() >= 5 && kind.as_bytes()[kind.len() - 5..].eq_ignore_ascii_case(b"+json");
        if is("application/json") || is("text/plain") || kind.is_empty() || json_like() {
            return Some(Self::Json(ModelScan::new(field)));
        }
        FormScan::of(headers, field).map(Self::Form)
    }

    /// Reads on. Once [`Scan::Unreadable`], always so.
    pub fn feed(&mut self, bytes: &[u8]) -> Scan {
        match self {
            Self::Json(scan) => scan.feed(bytes),
            Self::Form(scan) => scan.feed(bytes),
        }
    }

    /// The last word, at the end of the body.
    pub fn end(self) -> Scan {
        match self {
            Self::Json(scan) => scan.end(),
            Self::Form(scan) => scan.end(),
        }
    }
}

/// What is known so far.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Scan {
    /// More of the body is needed.
    Unsure,
    /// The model, read once; final only at the end of the body.
    Model(ModelName),
    /// A valid object that names no model; only at its end.
    Absent,
    /// Not well-formed, or the model given twice, not as text, or too long.
    Unreadable,
}

/// A streaming look for the top-level `model`. Feed every byte in order, then ask for [`ModelScan::end`].
#[derive(Debug)]
pub struct ModelScan<'f> {
    /// The key that is looked for.
    field: &'f str,
    state: State,
    /// Open `{` and `[`: bit set for an object. At most [`MAX_DEPTH`] deep.
    stack: Vec<bool>,
    /// Of a top-level key, or of the value of `model`, what stands in the body before the piece that is read,
    /// quotes excluded.
    text: Vec<u8>,
    /// Whether `text` is being collected.
    collect: bool,
    /// The top-level key just read was `model`.
    at_model: bool,
    model: Option<ModelName>,
}

/// Deeper bodies are unreadable: bounds the memory a hostile body can take.
const MAX_DEPTH: usize = 512;

/// Longer keys and values than this are not looked at.
const MAX_TEXT: usize = 4 * ModelName::MAX + 64;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// Before the opening brace.
    Start,
    /// A key or `}` may come.
    KeyOrEnd,
    /// A key must come.
    Key,
    /// Inside a string that is a key.
    InKey { escaped: bool },
    /// `:` must come.
    Colon,
    /// A value must come.
    Value,
    /// A value or `]` may come.
    ValueOrEnd,
    /// Inside a string that is a value.
    InString { escaped: bool },
    /// Inside a number or a word.
    InBare,
    /// `,` or a closing bracket must come.
    After,
    /// The top-level object is closed.
    Done,
    /// Not JSON, or not readable.
    Broken,
}

impl<'f> ModelScan<'f> {
    /// A look for the top-level key `field`.
    pub fn new(field: &'f str) -> Self {
        Self {
            field,
            state: State::Start,
            stack: Vec::new(),
            text: Vec::new(),
            collect: false,
            at_model: false,
            model: None,
        }
    }

    /// Reads on. Once [`Scan::Unreadable`], always so.
    pub fn feed(&mut self, bytes: &[u8]) -> Scan {
        let mut rest = bytes;
        while !rest.is_empty() {
            rest = self.step(rest);
        }
        match (&self.model, self.state) {
            (_, State::Broken) => Scan::Unreadable,
            (Some(model), _) => Scan::Model(model.clone()),
            (None, _) => Scan::Unsure,
        }
    }

    /// The last word, at the end of the body.
    pub fn end(self) -> Scan {
        match (self.state, self.model) {
            (State::Done, Some(model)) => Scan::Model(model),
            (State::Done, None) => Scan::Absent,
            _ => Scan::Unreadable,
        }
    }

    fn step<'a>(&mut self, rest: &'a [u8]) -> &'a [u8] {
        match self.state {
            State::InKey { escaped } => self.in_string(rest, escaped, true),
            State::InString { escaped } => self.in_string(rest, escaped, false),
            State::InBare => {
                let end =
                    rest.iter().position(|b| matches!(b, b',' | b'}' | b']' | b' ' | b'\t' | b'\r' | b'\n'));
                let bare = &rest[..end.unwrap_or(rest.len())];
                if !bare.iter().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'+' | b'-' | b'.')) {
                    self.state = State::Broken;
                } else if end.is_some() {
                    self.state = State::After;
                }
                &rest[bare.len()..]
            }
            State::Broken => &[],
            _ => {
                self.token(rest[0]);
                &rest[1..]
            }
        }
    }

    /// One byte between strings and numbers.
    fn token(&mut self, byte: u8) {
        if matches!(byte, b' ' | b'\t' | b'\r' | b'\n') {
            return;
        }
        self.state = match (self.state, byte) {
            (State::Start, b'{') => self.open(true),
            (State::KeyOrEnd | State::Key, b'"') => {
                self.begin_text(self.stack.len() == 1);
                State::InKey { escaped: false }
            }
            (State::KeyOrEnd | State::After, b'}') => self.close(true),
            (State::ValueOrEnd | State::After, b']') => self.close(false),
            (State::Colon, b':') => State::Value,
            (State::After, b',') => {
                if self.stack.last() == Some(&true) {
                    State::Key
                } else {
                    State::Value
                }
            }
            (State::Value | State::ValueOrEnd, _) => self.value(byte),
            _ => State::Broken,
        };
    }

    fn value(&mut self, byte: u8) -> State {
        let of_model = std::mem::take(&mut self.at_model) && self.stack.len() == 1;
        if of_model && byte != b'"' {
            return State::Broken;
        }
        match byte {
            b'{' => self.open(true),
            b'[' => self.open(false),
            b'"' => {
                self.begin_text(of_model);
                State::InString { escaped: false }
            }
            b'-' | b'0'..=b'9' | b't' | b'f' | b'n' => State::InBare,
            _ => State::Broken,
        }
    }

    fn open(&mut self, object: bool) -> State {
        if self.stack.len() >= MAX_DEPTH {
            return State::Broken;
        }
        self.stack.push(object);
        if object { State::KeyOrEnd } else { State::ValueOrEnd }
    }

    fn close(&mut self, object: bool) -> State {
        if self.stack.pop() != Some(object) {
            return State::Broken;
        }
        if self.stack.is_empty() { State::Done } else { State::After }
    }

    fn begin_text(&mut self, collect: bool) {
        self.text.clear();
        self.collect = collect;
    }

    fn in_string<'a>(&mut self, rest: &'a [u8], escaped: bool, key: bool) -> &'a [u8] {
        if escaped {
            self.keep(&rest[..1]);
            self.state =
                if key { State::InKey { escaped: false } } else { State::InString { escaped: false } };
            return &rest[1..];
        }
        let Some(at) = memchr::memchr2(b'"', b'\\', rest) else {
            self.keep(rest);
            return &[];
        };
        if rest[at] == b'\\' {
            self.keep(&rest[..=at]);
            self.state = if key { State::InKey { escaped: true } } else { State::InString { escaped: true } };
        } else {
            self.end_text(key, &rest[..at]);
        }
        &rest[at + 1..]
    }

    fn keep(&mut self, bytes: &[u8]) {
        if self.collect && self.text.len() <= MAX_TEXT {
            self.text.extend_from_slice(&bytes[..bytes.len().min(MAX_TEXT + 1)]);
        }
    }

    /// `last` is its last piece, and mostly the only one: then it is looked at where it is.
    fn end_text(&mut self, key: bool, last: &[u8]) {
        if self.text.is_empty() {
            // It would have been cut at an escape.
            self.judge_text(key, last, plain);
        } else {
            self.keep(last);
            let text = std::mem::take(&mut self.text);
            self.judge_text(key, &text, unescaped);
        }
    }

    fn judge_text(&mut self, key: bool, text: &[u8], read: fn(&[u8]) -> Option<Cow<'_, str>>) {
        let collected = std::mem::take(&mut self.collect);
        if key {
            self.state = State::Colon;
            if collected && text.len() <= MAX_TEXT {
                match read(text) {
                    Some(name) => self.at_model = *name == *self.field,
                    None => self.state = State::Broken,
                }
                // A second one must not slip past, whatever a parser at the other end would make of it.
                if self.at_model && self.model.is_some() {
                    self.state = State::Broken;
                }
            }
            return;
        }
        self.state = State::After;
        if collected {
            self.model = read(text).and_then(|text| ModelName::new(&text));
            if self.model.is_none() || text.len() > MAX_TEXT {
                self.state = State::Broken;
            }
        }
    }
}

/// The text of a JSON string in which nothing is escaped; `None` when it is not valid.
fn plain(raw: &[u8]) -> Option<Cow<'_, str>> {
    // Control characters must be escaped (RFC 8259, section 7).
    let sound = raw.iter().all(|byte| *byte >= b' ');
    std::str::from_utf8(raw).ok().filter(|_| sound).map(Cow::Borrowed)
}

/// A JSON string's text; `None` when it is not valid.
fn unescaped(raw: &[u8]) -> Option<Cow<'_, str>> {
    if !raw.contains(&b'\\') {
        return plain(raw);
    }
    let mut quoted = Vec::with_capacity(raw.len() + 2);
    quoted.push(b'"');
    quoted.extend_from_slice(raw);
    quoted.push(b'"');
    serde_json::from_slice(&quoted).ok().map(Cow::Owned)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn whole(body: &str) -> Scan {
        let mut scan = ModelScan::new("model");
        scan.feed(body.as_bytes());
        scan.end()
    }

    fn model(name: &str) -> Scan {
        ModelName::new(name).map_or(Scan::Unreadable, Scan::Model)
    }

    #[test]
    fn the_top_level_model_is_read_wherever_it_stands() {
        assert_eq!(whole(r#"{"model":"gpt-4o","messages":[]}"#), model("gpt-4o"));
        assert_eq!(
            whole(r#" { "messages" : [ {"model":"no"} , 1.5e3, null ], "model" : "m\u0031" } "#),
            model("m1")
        );
        assert_eq!(whole(r#"{"\u006dodel":"x"}"#), model("x"));
    }

    #[test]
    fn a_second_model_a_nested_one_or_a_foreign_type_is_not_taken_for_it() {
        assert_eq!(whole(r#"{"model":"a","model":"b"}"#), Scan::Unreadable);
        assert_eq!(whole(r#"{"model":"a","mo\u0064el":"b"}"#), Scan::Unreadable);
        assert_eq!(whole(r#"{"model":["a"]}"#), Scan::Unreadable);
        assert_eq!(whole(r#"{"model":""}"#), Scan::Unreadable);
        assert_eq!(whole(r#"{"x":{"model":"a"}}"#), Scan::Absent);
    }

    #[test]
    fn what_is_no_whole_object_is_unreadable() {
        for body in [
            "",
            "[]",
            "\"model\"",
            "{",
            r#"{"model":"a""#,
            r#"{"model":"a"}{}"#,
            r#"{"a" 1}"#,
            "{]",
            "\u{feff}{}",
        ] {
            assert_eq!(whole(body), Scan::Unreadable, "{body}");
        }
        assert_eq!(whole(&format!("{{\"a\":{}", "[".repeat(100_000))), Scan::Unreadable);
    }

    #[test]
    fn the_first_model_is_known_before_the_body_ends() {
        let mut scan = ModelScan::new("model");
        assert_eq!(scan.feed(br#"{"stream":true,"mod"#), Scan::Unsure);
        assert_eq!(scan.feed(br#"el":"gpt-4o","messages":[{"#), model("gpt-4o"));
    }

    proptest! {
        #[test]
        fn cuts_change_nothing_and_a_parser_agrees(
            keys in proptest::collection::vec("[a-z\"\\\\é]{0,4}", 0..4),
            name in "[a-z0-9.\\-\"\\\\é]{1,12}",
            cut in 0_usize..200,
        ) {
            let mut object = serde_json::Map::new();
            for key in keys.iter().filter(|key| *key != "model") {
                object.insert(key.clone(), serde_json::json!([{"model": key}, 1, true]));
            }
            object.insert("model".into(), name.clone().into());
            let body = serde_json::Value::Object(object).to_string().into_bytes();
            let mut scan = ModelScan::new("model");
            let at = cut.min(body.len());
            scan.feed(&body[..at]);
            scan.feed(&body[at..]);
            prop_assert_eq!(scan.end(), model(&name));
        }

        #[test]
        fn random_bytes_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            let mut scan = ModelScan::new("model");
            scan.feed(&bytes);
            scan.end();
        }
    }
}

//! Mistakes of a configuration, each with its place, and never with a secret.
//!
//! An excerpt shows the line as it stands in the file, save for what could be a raw key: values of
//! `secret`, `token` and `password` fields, values of fields nobody knows (a misspelt `secret` is one), whatever
//! looks like a key, and comments. The same pieces are taken out of every message, so that a parser's
//! own wording cannot carry one either.

use std::fmt;
use std::ops::Range;
use std::path::PathBuf;

use serde_spanned::Spanned;
use toml::de::{DeTable, DeValue};

use super::fields;

/// Bytes of the file.
pub(super) type Span = Range<usize>;

/// What stands where something was taken out.
const HIDDEN: &str = "…";

/// The longest excerpt, in characters; longer lines are cut around the caret.
const WIDEST: usize = 160;

/// The longest word beside a secret that is shown; raw keys are longer.
const LONGEST_WORD: usize = 12;

/// One mistake of a configuration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mistake {
    /// The file's name as it was given, or `the environment`.
    pub origin: String,
    /// The line, counted from 1, where the mistake has one.
    pub line: Option<usize>,
    /// What is wrong, and what would be right.
    pub problem: String,
    /// The line's text, with possible secrets taken out, and the characters of it to point at.
    pub excerpt: Option<(String, Range<usize>)>,
}

impl Mistake {
    /// A mistake without a line.
    pub(super) fn of(origin: &str, problem: impl Into<String>) -> Self {
        Self { origin: origin.into(), line: None, problem: problem.into(), excerpt: None }
    }
}

impl fmt::Display for Mistake {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Some(line) = self.line else {
            return write!(f, "{}: {}", self.origin, self.problem);
        };
        write!(f, "{}:{line}: {}", self.origin, self.problem)?;
        if let Some((text, caret)) = &self.excerpt {
            let number = line.to_string();
            let (before, under) = (" ".repeat(caret.start), "^".repeat(caret.len().max(1)));
            write!(f, "\n  {number} | {text}\n  {:1$} | {before}{under}", "", number.len())?;
        }
        Ok(())
    }
}

/// Why a configuration was refused: every mistake at once, in the order of the file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConfigError {
    /// At least one.
    pub mistakes: Vec<Mistake>,
    /// The files that it names, as far as it could be read: one of them may be what is missing.
    pub files: Vec<PathBuf>,
}

impl ConfigError {
    pub(super) fn of(mistakes: Vec<Mistake>) -> Self {
        Self { mistakes, files: Vec::new() }
    }
}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (n, mistake) in self.mistakes.iter().enumerate() {
            if n > 0 {
                f.write_str("\n")?;
            }
            mistake.fmt(f)?;
        }
        Ok(())
    }
}

impl std::error::Error for ConfigError {}

/// The text of a file, and which parts of it are never shown.
pub(super) struct Source<'t> {
    /// The name in front of every mistake.
    pub(super) name: &'t str,
    text: &'t str,
    /// Where possible secrets stand, in order, without overlaps.
    hidden: Vec<Span>,
    /// Their contents, to keep them out of messages.
    hidden_texts: Vec<String>,
    /// Where strings stand: a `#` in one begins no comment.
    strings: Vec<Span>,
}

impl<'t> Source<'t> {
    /// The text with what its tree says about possible secrets.
    pub(super) fn new(name: &'t str, text: &'t str, tree: &DeTable<'_>) -> Self {
        let mut source =
            Self { name, text, hidden: Vec::new(), hidden_texts: Vec::new(), strings: Vec::new() };
        source.survey(tree, &Place::root());
        source.hidden.sort_by_key(|span| (span.start, span.end));
        source
    }

    fn survey(&mut self, table: &DeTable<'_>, place: &Place) {
        for (key, value) in table {
            if looks_secret(key.get_ref()) {
                self.hide(key.span(), key.get_ref());
            }
            self.strings.push(key.span());
            self.survey_value(value, &place.below(key.get_ref()));
        }
    }

    fn survey_value(&mut self, value: &Spanned<DeValue<'_>>, place: &Place) {
        match value.get_ref() {
            DeValue::Table(table) => self.survey(table, place),
            DeValue::Array(items) => items.iter().for_each(|item| self.survey_value(item, place)),
            DeValue::String(text) => {
                self.strings.push(value.span());
                if place.hides(text) || looks_secret(text) {
                    self.hide(value.span(), text);
                }
            }
            // A key may be all digits, or look like a date.
            DeValue::Integer(_) | DeValue::Float(_) | DeValue::Datetime(_) if place.hides("") => {
                let text = self.text.get(value.span()).unwrap_or_default().to_owned();
                self.hide(value.span(), &text);
            }
            _ => {}
        }
    }

    fn hide(&mut self, at: Span, content: &str) {
        self.hidden.push(at);
        // Shorter ones would take ordinary words apart; no message repeats a secret field on purpose.
        if content.len() >= 6 {
            self.hidden_texts.push(content.to_owned());
            let escaped = content.escape_debug().to_string();
            if escaped != content {
                self.hidden_texts.push(escaped);
            }
        }
    }

    /// Whether what stands at `at` must not be repeated.
    pub(super) fn hides(&self, at: &Span) -> bool {
        self.hidden.iter().any(|hole| hole.start < at.end && at.start < hole.end)
    }

    /// A mistake at `at`.
    pub(super) fn mistake(&self, at: &Span, problem: &str) -> Mistake {
        let mut problem = problem.to_owned();
        for secret in &self.hidden_texts {
            if problem.contains(secret.as_str()) {
                problem = problem.replace(secret.as_str(), HIDDEN);
            }
        }
        let (number, line) = line_of(self.text, at.start);
        let line = line.start..self.code_end(&line);
        let mut shown = Excerpt::new(at);
        let mut from = line.start;
        for hole in &self.hidden {
            if hole.end <= from || hole.start >= line.end {
                continue;
            }
            shown.push(from.min(hole.start), self.text.get(from..hole.start).unwrap_or_default());
            shown.push_hole(hole.start.max(from)..hole.end.min(line.end));
            from = hole.end.min(line.end);
        }
        shown.push(from, self.text.get(from..line.end).unwrap_or_default());
        let excerpt = Some(shown.finish());
        Mistake { origin: self.name.into(), line: Some(number), problem, excerpt }
    }

    /// Where the line's comment begins, or its end. A comment may hold yesterday's key.
    fn code_end(&self, line: &Span) -> usize {
        let text = self.text.get(line.clone()).unwrap_or_default();
        let end = text
            .match_indices('#')
            .map(|(n, _)| line.start + n)
            .find(|at| !self.strings.iter().any(|string| string.contains(at)))
            .unwrap_or(line.end);
        line.start + self.text.get(line.start..end).unwrap_or_default().trim_end().len()
    }
}

/// What TOML's own parser refused. There is no tree to say where secrets stand, so a value is shown only
/// behind a field that is known and holds none.
pub(super) fn syntax_mistake(name: &str, text: &str, error: &toml::de::Error) -> Mistake {
    let at = error.span().unwrap_or(0..0);
    let (number, line) = line_of(text, at.start);
    let whole = text.get(line.clone()).unwrap_or_default();
    let open = match whole.split_once('=') {
        Some((key, value)) if is_plain_value(value) && key_fields(key).all(fields::is_plain) => whole.len(),
        Some((key, _)) if key_fields(key).all(is_like_a_field) => key.len() + 1,
        None if whole.starts_with('[') && key_fields(whole).all(is_like_a_field) => whole.len(),
        _ => 0,
    };
    let mut shown = Excerpt::new(&at);
    shown.push(line.start, whole.get(..open).unwrap_or_default().trim_end());
    if !whole.get(open..).unwrap_or_default().trim().is_empty() {
        shown.push(line.start + open, " ");
        shown.push_hole(line.start + open..line.end);
    }
    Mistake {
        origin: name.into(),
        line: Some(number),
        problem: format!("this is not TOML: {}", error.message()),
        excerpt: Some(shown.finish()),
    }
}

/// The names in a key or a table's header.
fn key_fields(key: &str) -> impl Iterator<Item = &str> {
    key.split('.').map(|field| field.trim_matches(|c: char| c.is_whitespace() || "[]\"'".contains(c)))
}

/// Whether it may be repeated though nothing is known of where it stands: a raw key pasted on a line of its
/// own, or one that ends with `=`, must not be.
fn is_like_a_field(word: &str) -> bool {
    let all = || fields::FIELDS.iter().flat_map(|(_, fields)| fields.iter().copied());
    let spelt = |b: u8| b.is_ascii_lowercase() || b == b'_' || b == b'-';
    word.len() <= 20 && word.bytes().all(spelt) && fields::nearest(word, all()).is_some()
}

/// Whether it is one short value: more on the line could be what a lost line break or quote brought there.
fn is_plain_value(value: &str) -> bool {
    let words = || value.split(|c: char| !(c.is_ascii_alphanumeric() || "-_+/".contains(c)));
    !value.contains(['{', '#', '='])
        && value.matches(['"', '\'']).count() <= 2
        && words().all(|word| word.len() < 16 && !looks_secret(word))
}

/// The number, from 1, and the bytes of the line at `at`, without its end.
fn line_of(text: &str, at: usize) -> (usize, Span) {
    let bytes = text.as_bytes();
    let at = at.min(bytes.len());
    let start = bytes[..at].iter().rposition(|b| *b == b'\n').map_or(0, |n| n + 1);
    let end = memchr::memchr(b'\n', &bytes[start..]).map_or(bytes.len(), |n| start + n);
    let end = if end > start && bytes[end - 1] == b'\r' { end - 1 } else { end };
    (memchr::memchr_iter(b'\n', &bytes[..start]).count() + 1, start..end)
}

/// A line under construction, and which of its characters the caret goes under.
struct Excerpt<'a> {
    at: &'a Span,
    text: Vec<char>,
    caret: Option<Range<usize>>,
}

impl<'a> Excerpt<'a> {
    fn new(at: &'a Span) -> Self {
        Self { at, text: Vec::new(), caret: None }
    }

    /// Adds text that begins at byte `from` of the file. Control characters would reach a terminal.
    fn push(&mut self, from: usize, text: &str) {
        for (n, c) in text.char_indices() {
            if self.at.contains(&(from + n)) {
                self.point();
            }
            self.text.push(if c == '\t' {
                ' '
            } else if c.is_control() {
                '\u{fffd}'
            } else {
                c
            });
        }
    }

    fn push_hole(&mut self, hole: Span) {
        if hole.contains(&self.at.start) || (self.at.start < hole.end && self.at.end > hole.start) {
            self.point();
        }
        self.text.extend(HIDDEN.chars());
    }

    fn point(&mut self) {
        let here = self.text.len();
        let from = self.caret.as_ref().map_or(here, |caret| caret.start);
        self.caret = Some(from..here + 1);
    }

    fn finish(self) -> (String, Range<usize>) {
        let caret = self.caret.unwrap_or(self.text.len()..self.text.len() + 1);
        let indent = self.text.iter().take_while(|c| **c == ' ').count().min(caret.start);
        let (text, caret) = (&self.text[indent..], caret.start - indent..caret.end - indent);
        if text.len() <= WIDEST {
            return (text.iter().collect(), caret);
        }
        let from = caret.start.saturating_sub(WIDEST / 4);
        let end = (from + WIDEST).min(text.len());
        let caret = caret.start - from..caret.end.min(end + 1) - from;
        (text[from..end].iter().collect(), caret)
    }
}

/// Where the survey is: what the field's name says about its values.
#[derive(Clone, Copy)]
struct Place {
    depth: usize,
    /// Whether this is `apps`, `providers` or `pools`: its children are the user's own names.
    named_children: bool,
    /// Whether only a table can be right here, so that a text is something else: a token, perhaps.
    wants_table: bool,
    kind: Kind,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Plain,
    /// Inside a `secret`, `token` or `password`, or below a field nobody knows.
    Hidden,
    /// `env` or `file` of a secret: shown only if it is what it should be.
    Variable,
    File,
    /// A word or a time beside them: shown only if it is no longer than one.
    Word,
}

impl Place {
    fn root() -> Self {
        Self { depth: 0, named_children: false, wants_table: true, kind: Kind::Plain }
    }

    fn below(self, key: &str) -> Self {
        let kind = match (self.kind, key) {
            (_, "env") => Kind::Variable,
            (_, "file") => Kind::File,
            (Kind::Hidden, "timeout" | "refresh" | "kind") => Kind::Word,
            (Kind::Plain, _) if self.named_children || fields::is_plain(key) => Kind::Plain,
            _ => Kind::Hidden,
        };
        let named_children = self.depth == 0 && matches!(key, "apps" | "providers" | "pools");
        let wants_table = self.depth == 0 || self.named_children || matches!(key, "inject" | "check");
        Self { depth: self.depth + 1, named_children, wants_table, kind }
    }

    fn hides(self, text: &str) -> bool {
        match self.kind {
            Kind::Plain => self.wants_table,
            Kind::Hidden => true,
            Kind::Variable => !is_plain_variable(text),
            Kind::File => !is_plain_path(text),
            Kind::Word => text.len() > LONGEST_WORD || looks_secret(text),
        }
    }
}

/// Whether `name` may be repeated as an environment variable's: a raw key pasted there must not be.
pub(super) fn is_plain_variable(name: &str) -> bool {
    (1..=64).contains(&name.len())
        && name.bytes().all(|b| matches!(b, b'A'..=b'Z' | b'0'..=b'9' | b'_'))
        && !name.starts_with(|c: char| c.is_ascii_digit())
        && (name.contains('_') || name.len() <= 16)
}

/// Whether `path` may be repeated as a secret file's: a raw key pasted there must not be. A relative path is
/// known by words that are short, for in a key they are long or mixed.
pub(super) fn is_plain_path(path: &str) -> bool {
    let is_word = |word: &str| {
        let (letters, digits) = (|b: u8| b.is_ascii_alphabetic(), |b: u8| b.is_ascii_digit());
        let all = |test: fn(u8) -> bool, most| word.len() <= most && word.bytes().all(test);
        all(letters, 16) || all(digits, 4) || all(|b| b.is_ascii_alphanumeric(), 3)
    };
    let is_relative =
        path.contains(['/', '.']) && !looks_secret(path) && path.split(['/', '.', '_', '-']).all(is_word);
    ["/", "./", "../"].iter().any(|start| path.starts_with(start)) || is_relative
}

/// Whether the text has a known key's prefix, the shape of one, or is a URL that may carry a password.
pub(super) fn looks_secret(text: &str) -> bool {
    const PREFIXES: &[&str] =
        &["sk-", "sk_", "gsk_", "xai-", "hf_", "r8_", "AIza", "pplx-", "fw_", "ghp_", "eyJ", "Bearer "];
    if text.len() >= 8 && PREFIXES.iter().any(|prefix| text.starts_with(prefix)) {
        return true;
    }
    if text.split_once("://").is_some_and(|(_, rest)| rest.contains(['@', '?'])) || is_open_redis_url(text) {
        return true;
    }
    text.split(|c: char| !(c.is_ascii_alphanumeric() || "+=_-".contains(c))).any(is_random)
}

/// Whether it begins as a Redis URL, and something in it is no host and port: the rest of a password, perhaps.
fn is_open_redis_url(text: &str) -> bool {
    let Some((_, rest)) = text.split_once(':').filter(|_| text.starts_with("redis")) else { return false };
    let authority = rest.trim_start_matches('/').split('/').next().unwrap_or_default();
    let is_port = |text: &str| text.bytes().all(|b| b.is_ascii_digit());
    let is_open =
        |at: &str| !at.starts_with('[') && at.split_once(':').is_some_and(|(_, port)| !is_port(port));
    text.contains('@') || authority.split(',').any(is_open)
}

/// Whether a word is long and mixed as keys are, and names, models and variables hardly ever.
fn is_random(word: &str) -> bool {
    let bytes = word.as_bytes();
    let has = |test: fn(&u8) -> bool| bytes.iter().any(test);
    let mixed = || has(u8::is_ascii_lowercase) && has(u8::is_ascii_uppercase);
    let hex = || bytes.len() >= 28 && bytes.iter().all(u8::is_ascii_hexdigit);
    bytes.len() >= 16 && has(u8::is_ascii_digit) && (mixed() || hex())
}

/// A value in a message: quoted, short, without control characters, and never what looks like a key.
pub(super) fn shown(text: &str) -> String {
    if looks_secret(text) {
        return HIDDEN.into();
    }
    let mut short: String = text.chars().take(80).collect();
    if short.len() < text.len() {
        short.push_str(HIDDEN);
    }
    format!("\"{}\"", short.escape_debug())
}

//! Which models a key serves.

use std::sync::Arc;

use super::key::ModelKnown;
use crate::model::Map;

/// The patterns of one key; none where it serves all models.
pub(super) type Patterns = Arc<[Pattern]>;

/// Whether a key with these patterns serves a model.
pub(super) fn serves(patterns: &[Pattern], model: &ModelKnown) -> bool {
    patterns.is_empty()
        || match model {
            ModelKnown::NotNamed => true,
            ModelKnown::Named(name) => patterns.iter().any(|pattern| pattern.fits(name.as_str())),
            ModelKnown::Unreadable => false,
        }
}

/// Lists that were made already: keys with the same one share it, so that a model is held against each list
/// once, and not once a key.
#[derive(Default)]
pub(super) struct Known<'a>(Map<&'a [String], Patterns>);

impl<'a> Known<'a> {
    pub(super) fn of(&mut self, models: &'a [String]) -> Patterns {
        let made = || models.iter().map(|text| Pattern::of(text)).collect();
        Arc::clone(self.0.entry(models).or_insert_with(made))
    }
}

/// What a model's name must be like: what stands before, between and behind each `*`, which stands for any
/// text.
#[derive(Debug)]
pub(super) struct Pattern {
    head: String,
    /// Empty where there is no `*`.
    parts: Vec<String>,
}

impl Pattern {
    fn of(text: &str) -> Self {
        let mut parts = text.split('*').map(str::to_owned);
        Self { head: parts.next().unwrap_or_default(), parts: parts.collect() }
    }

    pub(super) fn fits(&self, text: &str) -> bool {
        let Some(mut text) = text.strip_prefix(self.head.as_str()) else { return false };
        let Some((last, between)) = self.parts.split_last() else { return text.is_empty() };
        for part in between {
            match text.find(part.as_str()) {
                Some(at) => text = &text[at + part.len()..],
                None => return false,
            }
        }
        text.ends_with(last.as_str())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_star_stands_for_any_text() {
        for (pattern, text, fits) in [
            ("gpt-*", "gpt-4o", true),
            ("gpt-*", "o3", false),
            ("*", "anything", true),
            ("gpt-4o", "gpt-4o", true),
            ("gpt-4o", "gpt-4o-mini", false),
            ("*-mini", "gpt-4o-mini", true),
            ("a*b*c", "a1b2c", true),
            ("a*b*c", "a1c2b", false),
            ("ab*ba", "aba", false),
        ] {
            assert_eq!(Pattern::of(pattern).fits(text), fits, "{pattern} {text}");
        }
    }
}

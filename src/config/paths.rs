//! Patterns of paths: `/v1/keys`, `/v1/projects/*/api_keys`, `/v1/keys/**`.
//!
//! They are held against a path as a server may read it, not as it was written (see
//! [`crate::route`]), so a pattern has no encoding, no case and no trailing slash of its own.

use std::fmt;

/// A pattern of paths, made of whole segments: `*` stands for any one of them, and a trailing `/**` (or
/// `/`) for the path itself and all below it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PathPattern {
    text: String,
    /// In lower case.
    segments: Vec<String>,
    /// All below it is meant too.
    below: bool,
}

impl PathPattern {
    /// Reads a pattern; else the rule that it breaks.
    pub fn parse(text: &str) -> Result<Self, &'static str> {
        const FORM: &str = "must be such as `/v1/keys`, `/v1/projects/*/api_keys` or `/v1/keys/**`";
        let Some(rest) = text.strip_prefix('/') else { return Err("must begin with `/`") };
        if rest.is_empty() {
            return Err("names no path; `/**` stands for all of them");
        }
        if text.bytes().any(|byte| byte <= b' ' || b"%?#;\\\x7f".contains(&byte)) {
            return Err(
                "must be a plain path, without encoding, query or parameters: it is held against the decoded one",
            );
        }
        let (rest, below) = match rest.strip_suffix("**").or_else(|| rest.ends_with('/').then_some(rest)) {
            Some("") => ("", true),
            Some(above) if above.starts_with('/') => return Err(FORM),
            Some(above) => (above.strip_suffix('/').ok_or(FORM)?, true),
            None => (rest, false),
        };
        let segments: Vec<String> = match rest {
            "" => Vec::new(),
            rest => rest.split('/').map(str::to_lowercase).collect(),
        };
        let sound =
            |one: &String| !matches!(one.as_str(), "" | "." | "..") && (one == "*" || !one.contains('*'));
        if !segments.iter().all(sound) {
            return Err(FORM);
        }
        Ok(Self { text: text.to_owned(), segments, below })
    }

    /// Whether it fits a path of these segments, which are in lower case.
    pub fn fits(&self, path: &[impl AsRef<[u8]>]) -> bool {
        let long_enough =
            if self.below { path.len() >= self.segments.len() } else { path.len() == self.segments.len() };
        let fits = |at: usize| self.segments[at].as_bytes() == path[at].as_ref() || self.segments[at] == "*";
        // From the last: most paths begin alike.
        long_enough && (0..self.segments.len()).rev().all(fits)
    }
}

impl fmt::Display for PathPattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a test that fails may panic
mod tests {
    use super::*;

    fn fits(pattern: &str, path: &str) -> bool {
        let path: Vec<&str> = path.split('/').filter(|one| !one.is_empty()).collect();
        PathPattern::parse(pattern).unwrap().fits(&path)
    }

    #[test]
    fn a_star_is_one_segment_and_two_are_the_path_and_all_below() {
        for (pattern, path, fit) in [
            ("/v1/keys", "/v1/keys", true),
            ("/v1/keys", "/v1/keys/a", false),
            ("/v1/keys", "/v1", false),
            ("/v1/Keys", "/v1/keys", true),
            ("/v1/keys/**", "/v1/keys", true),
            ("/v1/keys/**", "/v1/keys/a/b", true),
            ("/v1/keys/**", "/v1/keys2", false),
            ("/v1/keys/", "/v1/keys/a", true),
            ("/v1/*/keys", "/v1/a/keys", true),
            ("/v1/*/keys", "/v1/keys", false),
            ("/v1/*/keys", "/v1/a/b/keys", false),
            ("/*/auth_tokens", "/v1alpha/auth_tokens", true),
            ("/**", "", true),
            ("/**", "/a/b", true),
        ] {
            assert_eq!(fits(pattern, path), fit, "{pattern} {path}");
        }
    }

    #[test]
    fn what_is_no_pattern_is_refused() {
        for bad in [
            "", "v1", "/", "//", "/a//b", "/a*", "/a/**/b", "/a**", "/a%2fb", "/a?b", "/a/../b", "/a b",
            "/***",
        ] {
            assert!(PathPattern::parse(bad).is_err(), "{bad}");
        }
    }
}

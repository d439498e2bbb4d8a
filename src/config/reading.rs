//! How a provider's answers are read: what its rules, waits and usage fields look like once they are checked.

use std::time::Duration;

use http::HeaderName;
use serde::{Deserialize, Serialize};

use crate::model::{Class, Scope};

/// How one kind of answer is read. All conditions that are given must hold.
#[derive(Debug, Clone, PartialEq)]
pub struct Rule {
    /// Who says so.
    pub origin: Origin,
    /// Statuses it is for; empty: any of 400 and above.
    pub status: Vec<StatusRange>,
    /// Exact values, one of which the answer's code or type (see [`Rule::fields`]) must equal; [`ANY_CODE`]
    /// is any text or number.
    pub codes: Vec<String>,
    /// Where `codes` and `phrases` are looked for: JSON pointers, such as `/error/code`, in which `*` stands
    /// for every element of an array, or (codes only) `header:` and its name. Empty: phrases are looked for in the
    /// whole body.
    pub fields: Vec<String>,
    /// Phrases, one of which the body must contain (ASCII case ignored). One that begins with `^` must
    /// begin a string of the body, where no words of the caller's stand.
    pub phrases: Vec<String>,
    /// Headers that must be there with a number above 0: what they count is not used up.
    pub only_if_left: Vec<HeaderName>,
    /// What it means.
    pub class: Class,
    /// Who shares the limit.
    pub scope: Scope,
    /// The answer names the key itself (see [`crate::model::Outcome::proven`]).
    pub proven: bool,
    /// The wait when the answer names none.
    pub wait: Option<Duration>,
    /// The same, where it is a date of the calendar.
    pub until: Option<Until>,
    /// The window of the limit.
    pub window: Option<Window>,
    /// For [`Class::Caller`]: the key is not to blame, yet another one may serve the request.
    pub another_key: bool,
}

/// In [`Rule::codes`]: whatever stands there.
pub const ANY_CODE: &str = "*";

/// Who a rule comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Origin {
    /// The user's `[providers.x]`.
    User,
    /// The catalogue's table of the provider.
    Provider,
    /// What the catalogue says of every provider.
    Generic,
}

/// A time that providers mean without naming it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Until {
    /// The first of the next month, 00:00 UTC: when monthly limits begin anew.
    MonthEnd,
    /// The next midnight UTC.
    DayEnd,
    /// The next midnight in California, where Google's days begin.
    PacificDayEnd,
}

/// How long a limit counts before it begins anew, where that is longer than a rate limit's usual minutes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Window {
    /// A day.
    Day,
}

/// An inclusive range of statuses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StatusRange(pub u16, pub u16);

/// Where an answer says how long to wait.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Wait {
    /// Where it stands.
    pub from: WaitPlace,
    /// How it is written.
    pub format: WaitFormat,
    /// A header that must be 0 for this one to count ("time to a full bucket").
    pub only_if_zero: Option<HeaderName>,
    /// A header, and the beginning of a value of it with which this one does not count.
    pub unless: Option<(HeaderName, String)>,
    /// The classes it counts for; empty: all that can wait.
    pub classes: Vec<Class>,
    /// The window of the limit that it is about.
    pub window: Option<Window>,
}

/// Where a wait stands.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum WaitPlace {
    /// In a header.
    Header(HeaderName),
    /// At a JSON pointer.
    Body(String),
    /// After a phrase in the texts at one of these JSON pointers, or in a body that is all text.
    Phrase(String, Vec<String>),
}

/// How a wait is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum WaitFormat {
    /// Seconds, or an HTTP date.
    RetryAfter,
    /// Milliseconds.
    Millis,
    /// Seconds, fractions allowed.
    Seconds,
    /// `6m0s`, `120ms`, `1h2m3.5s`, or bare seconds.
    Duration,
    /// RFC 3339.
    Rfc3339,
    /// Seconds or ms since the epoch, told apart by size; small numbers are seconds from now.
    Epoch,
    /// `"api";r=0;t=55`: the longest `t` (seconds) among the limits of which nothing remains (`r` is 0).
    RateLimit,
}

impl Wait {
    /// Whether it says that nothing remains until a time, also in an answer that refuses nothing.
    pub fn tells_of_an_end(&self) -> bool {
        self.only_if_zero.is_some() || self.format == WaitFormat::RateLimit
    }
}

/// Where answers say what they used. Of several answers' parts (a stream's events) the last that has a
/// count is right.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Usage {
    /// Only in this event of a stream, by its `type`.
    pub event: Option<String>,
    /// What is counted, and where.
    pub counts: Vec<(Counted, UsagePlace)>,
}

/// What is counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Counted {
    /// Tokens of the request, those from a cache included or not as the provider counts.
    Input,
    /// Tokens of the answer.
    Output,
    /// Both.
    Total,
    /// Tokens of the request that came from a cache.
    CacheRead,
    /// Tokens of the request that were put into a cache.
    CacheWrite,
    /// Tokens that were thought and are not shown.
    Reasoning,
    /// Money, in the provider's own unit.
    Cost,
    /// Characters of text.
    Characters,
    /// Seconds of work.
    Seconds,
}

/// Where a count stands.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum UsagePlace {
    /// In a header.
    Header(HeaderName),
    /// At a JSON pointer.
    Body(String),
}

//! Values of flags and annotations: both are read by these rules, so both say the same about a mistake.
//!
//! A wrong value is refused and never replaced by a usual one: a pod that is silently other than it was asked
//! to be is found out much later than one that is refused.

use std::fmt;
use std::str::FromStr;

use serde::Serialize;

use crate::model::ProviderName;

/// How apps are taken through lessor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Mode {
    /// By the variables in which SDKs look for a provider's address.
    BaseUrl,
    /// By the proxy variables, with lessor's CA.
    Proxy,
    /// Both.
    Both,
}

impl Mode {
    /// As it is written.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::BaseUrl => "base-url",
            Self::Proxy => "proxy",
            Self::Both => "both",
        }
    }

    /// Whether base-URL variables are set.
    pub fn base_url(self) -> bool {
        self != Self::Proxy
    }

    /// Whether proxy variables are set.
    pub fn proxy(self) -> bool {
        self != Self::BaseUrl
    }
}

impl FromStr for Mode {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        [Self::BaseUrl, Self::Proxy, Self::Both]
            .into_iter()
            .find(|mode| mode.as_str() == text)
            .ok_or_else(|| "must be base-url, proxy or both".into())
    }
}

/// How much the sidecar logs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(transparent)]
pub struct Level(&'static str);

impl FromStr for Level {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        let levels = ["error", "warn", "info", "debug", "trace"];
        let known = levels.into_iter().find(|level| *level == text);
        known.map(Self).ok_or_else(|| format!("must be one of {}", levels.join(", ")))
    }
}

impl fmt::Display for Level {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.0)
    }
}

/// An amount as Kubernetes writes it: `50m`, `64Mi`, `1`.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(transparent)]
pub struct Quantity {
    text: String,
    #[serde(skip)]
    amount: f64,
}

/// What may stand behind a quantity's number, and how much it is.
const SUFFIXES: [(&str, f64); 16] = [
    ("Ki", 1024.0),
    ("Mi", 1_048_576.0),
    ("Gi", 1_073_741_824.0),
    ("Ti", 1_099_511_627_776.0),
    ("Pi", 1_125_899_906_842_624.0),
    ("Ei", 1_152_921_504_606_846_976.0),
    ("n", 1e-9),
    ("u", 1e-6),
    ("m", 1e-3),
    ("k", 1e3),
    ("M", 1e6),
    ("G", 1e9),
    ("T", 1e12),
    ("P", 1e15),
    ("E", 1e18),
    ("", 1.0),
];

impl Quantity {
    /// Whether it is more than `other`.
    pub fn exceeds(&self, other: &Self) -> bool {
        self.amount > other.amount
    }
}

impl FromStr for Quantity {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        let read = || {
            let (number, factor) =
                SUFFIXES.iter().find_map(|(end, factor)| Some((text.strip_suffix(end)?, factor)))?;
            let plain = number.starts_with(|c: char| c.is_ascii_digit())
                && number.bytes().all(|byte| byte.is_ascii_digit() || byte == b'.')
                && number.len() <= 18;
            let amount = number.parse::<f64>().ok().filter(|_| plain)? * factor;
            (amount > 0.0).then(|| Self { text: text.into(), amount })
        };
        read().ok_or_else(|| "must be an amount above 0 such as 50m or 1 (CPU), 64Mi or 1Gi (memory)".into())
    }
}

/// An amount of CPU: `64Mi` is one of memory, and 67 million cores to a scheduler.
pub(super) fn cpu(text: &str) -> Result<Quantity, String> {
    let of_cpu = text.ends_with(|c: char| c.is_ascii_digit() || "num.".contains(c));
    let amount = text.parse::<Quantity>().ok().filter(|_| of_cpu);
    amount.ok_or_else(|| "must be an amount of CPU above 0 such as 50m or 1".into())
}

impl fmt::Display for Quantity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

/// The longest drain; more is a slip.
const LONGEST_DRAIN: u64 = 3600;

/// Whole seconds of a drain: `25` or `25s`.
pub(super) fn drain(text: &str) -> Result<u64, String> {
    let seconds = text.strip_suffix('s').unwrap_or(text);
    let digits = !seconds.is_empty() && seconds.bytes().all(|byte| byte.is_ascii_digit());
    let seconds = seconds.parse().ok().filter(|seconds| digits && (1..=LONGEST_DRAIN).contains(seconds));
    seconds.ok_or_else(|| format!("must be whole seconds from 1 to {LONGEST_DRAIN}, such as 25 or 25s"))
}

/// `true` or `false`, which are texts in an annotation.
pub(super) fn truth(text: &str) -> Result<bool, String> {
    text.parse().map_err(|_| "must be \"true\" or \"false\"".into())
}

/// A reference to an image. What it names only the node can tell; its form is looked at.
pub(super) fn image(text: &str) -> Result<String, String> {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-._/:@+".contains(&byte);
    let good = text.starts_with(|c: char| c.is_ascii_alphanumeric())
        && text.bytes().all(plain)
        && !text.ends_with(['/', ':', '@'])
        && text.len() <= 512;
    if good { Ok(text.into()) } else { Err("must be an image such as lessor:1.0 or host/lessor:1.0".into()) }
}

/// The name of an object that is named like a DNS subdomain, as a Secret is.
pub(super) fn object_name(text: &str) -> Result<String, String> {
    let edge = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit();
    let inner = |c: char| edge(c) || c == '-' || c == '.';
    let good = text.len() <= 253 && text.starts_with(edge) && text.ends_with(edge) && text.chars().all(inner);
    if good { Ok(text.into()) } else { Err("must be a name of lower-case letters, digits, - and .".into()) }
}

/// Names with commas between, blanks around them ignored.
pub(super) fn list<T>(text: &str, one: impl Fn(&str) -> Result<T, String>) -> Result<Vec<T>, String> {
    let names: Vec<_> = text.split(',').map(str::trim).filter(|name| !name.is_empty()).collect();
    if names.is_empty() {
        return Err("must be one name or several with commas between".into());
    }
    names.into_iter().map(one).collect()
}

/// A container's name, as Kubernetes allows it.
pub(super) fn container_name(text: &str) -> Result<String, String> {
    let label = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
    let good = (1..=63).contains(&text.len()) && text.chars().all(label);
    if good { Ok(text.into()) } else { Err("must be names of containers with commas between".into()) }
}

/// A variable's name.
pub(super) fn variable(text: &str) -> Result<String, String> {
    let good = text.bytes().all(|byte| byte.is_ascii_graphic() && byte != b'=');
    if good { Ok(text.into()) } else { Err("must be names of variables with commas between".into()) }
}

/// A provider's name; the Secret may define others than the catalogue has.
pub(super) fn provider(text: &str) -> Result<ProviderName, String> {
    ProviderName::parse(text).map_err(|cause| cause.to_string())
}

/// An entry of `NO_PROXY`: nothing that would end it.
pub(super) fn no_proxy(text: &str) -> Result<String, String> {
    let good = text.bytes().all(|byte| byte.is_ascii_graphic());
    if good { Ok(text.into()) } else { Err("must be hosts with commas between".into()) }
}

/// Somebody's text as it may stand in a message: short, and on one line.
pub(super) fn shown(text: &str) -> String {
    const LONGEST: usize = 60;
    let mut shown: String = text.chars().filter(|c| !c.is_control()).take(LONGEST).collect();
    if text.chars().count() > LONGEST {
        shown.push('…');
    }
    shown
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a test that fails may panic
mod tests {
    use super::*;

    #[test]
    fn quantities_are_those_of_kubernetes() {
        for good in ["50m", "1", "0.5", "64Mi", "1Gi", "100M", "1.5Gi", "250000u"] {
            assert_eq!(good.parse::<Quantity>().unwrap().to_string(), good);
        }
        for bad in ["", "0", "m", "-1", "64MB", "1 Gi", ".5", "1e400", "64mi", "NaN", "inf", "+1", "1.2.3"] {
            assert!(bad.parse::<Quantity>().is_err(), "{bad}");
        }
        let amount = |text: &str| text.parse::<Quantity>().unwrap();
        assert!(amount("2").exceeds(&amount("1999m")));
        assert!(amount("1Gi").exceeds(&amount("1000Mi")));
        assert!(!amount("1024Mi").exceeds(&amount("1Gi")));
    }

    #[test]
    fn an_amount_of_cpu_has_no_unit_of_memory() {
        for good in ["50m", "1", "0.5", "250000u", "100000000n"] {
            assert!(cpu(good).is_ok(), "{good}");
        }
        for bad in ["64Mi", "1Gi", "1k", "1M", "2E", "0", "m", ""] {
            assert!(cpu(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_drain_is_whole_seconds_with_or_without_their_unit() {
        assert_eq!((drain("25"), drain("25s")), (Ok(25), Ok(25)));
        for bad in ["", "s", "0", "-1", "+5", "1m", "25.5s", "3601", "99999999999999999999"] {
            assert!(drain(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn an_image_has_the_form_of_one() {
        for good in ["lessor", "lessor:0.1.0", "example.test:5000/team/lessor@sha256:0a"] {
            assert!(image(good).is_ok(), "{good}");
        }
        for bad in ["", "a b", "lessor:", "/lessor", "lessor;x", "lessor\n"] {
            assert!(image(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn lists_ignore_blanks_and_refuse_nothing_at_all() {
        assert_eq!(list(" app, worker ,", container_name).unwrap(), ["app", "worker"]);
        assert!(list(" , ", container_name).is_err());
        assert!(list("App", container_name).is_err());
    }
}

//! The arithmetic: one value a round, ratios between what ran in the same round, and when no ratio counts.
//!
//! A machine that others use too makes every figure of a round wrong in much the same way. So a ratio is
//! taken round by round, and only then the median of the ratios.

use std::fmt;

/// What one peer showed of one figure, a value a round.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Series(Vec<f64>);

impl Series {
    pub(crate) fn push(&mut self, value: f64) {
        self.0.push(value);
    }

    /// The middle value, or the mean of the two in the middle; not a number where there is none.
    pub(crate) fn median(&self) -> f64 {
        let mut sorted = self.0.clone();
        sorted.sort_by(f64::total_cmp);
        let middle = sorted.len() / 2;
        match sorted.len() {
            0 => f64::NAN,
            length if length % 2 == 1 => sorted[middle],
            _ => f64::midpoint(sorted[middle - 1], sorted[middle]),
        }
    }

    pub(crate) fn least(&self) -> f64 {
        self.0.iter().copied().fold(f64::NAN, f64::min)
    }

    pub(crate) fn most(&self) -> f64 {
        self.0.iter().copied().fold(f64::NAN, f64::max)
    }

    /// This over `base`, round by round.
    pub(crate) fn over(&self, base: &Self) -> Self {
        self.with(base, |own, other| own / other)
    }

    /// What this has more than `base`, round by round.
    pub(crate) fn beyond(&self, base: &Self) -> Self {
        self.with(base, |own, other| own - other)
    }

    fn with(&self, base: &Self, merge: impl Fn(f64, f64) -> f64) -> Self {
        Self(self.0.iter().zip(&base.0).map(|(own, other)| merge(*own, *other)).collect())
    }
}

impl FromIterator<f64> for Series {
    fn from_iter<T: IntoIterator<Item = f64>>(values: T) -> Self {
        Self(values.into_iter().collect())
    }
}

/// `median (least–most)`, with as many digits as the median's size deserves.
impl fmt::Display for Series {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let median = self.median();
        if median.is_nan() {
            return f.write_str("–");
        }
        let digits = digits(median);
        write!(f, "{median:.digits$} ({:.digits$}–{:.digits$})", self.least(), self.most())
    }
}

fn digits(value: f64) -> usize {
    match value.abs() {
        size if size >= 100.0 => 0,
        size if size >= 10.0 => 1,
        _ => 2,
    }
}

/// The value below which `share` of all lie (nearest rank); not a number where there is none.
pub(crate) fn percentile(values: &mut [f64], share: f64) -> f64 {
    values.sort_by(f64::total_cmp);
    #[allow(clippy::cast_precision_loss, clippy::cast_possible_truncation, clippy::cast_sign_loss)]
    let rank = (values.len() as f64 * share).ceil() as usize;
    values.get(rank.saturating_sub(1)).copied().unwrap_or(f64::NAN)
}

/// How far the floor may be above what it was measured at on a quiet machine.
const SLACK: f64 = 1.3;

/// Why the figures of a part do not count, if so: the bare proxy is dearer beside nginx than `usual`, the
/// most that it cost on a quiet machine, explains. Then it was the machine, or the build, that was measured.
pub(crate) fn void(floor_over_nginx: f64, usual: f64) -> Option<String> {
    let most = usual * SLACK;
    let sound = floor_over_nginx <= most; // what is not a number is not sound
    (!sound).then(|| {
        format!(
            "VOID: the floor came to {floor_over_nginx:.2} × nginx; above {most:.2} it is the machine that is \
             measured. Run it again when nothing else runs."
        )
    })
}

//! In which order keys are tried: a pure function over a table of numbers.
//!
//! Nothing here decides: the store lends or refuses, and a number that is out of date costs a try. So the
//! table is read without locks, and only as much of it is ordered as is asked for: the best three of two
//! hundred keys are found in one pass.
//!
//! Before any score come three things. A key that is known to rest goes last; one whose slots this process
//! has all taken goes behind those that have some left; and the pool asked for goes before its fallbacks.

use std::cmp::Ordering;

use crate::config::{Strategy, Weights};

/// Idleness counts up to this; longer is not more idle (design, section 6).
const IDLE_SATURATES_US: u64 = 300_000_000;

/// When a key counts as not fresh any more. The scale below it is logarithmic, so that turns are told apart
/// at a thousand requests a second as well as at one.
const FRESH_US: u64 = 10_000_000;

/// A key is slow when its answers begin this many times later than is usual for those it stands beside. Below
/// that it is chance: a short prompt here, a long one there.
const SLOW: f32 = 2.0;

/// And by at least so many ms: what is less is the machine's and the network's, and no user sees it.
const NOTICEABLE_MS: f32 = 100.0;

/// How slow it was counts half after this long: a key that is not used because it was slow must be tried
/// again to be seen to be fast.
const SLOW_HALVES_US: f32 = 10_000_000.0;

/// How many candidates are found without sorting all.
const FEW: usize = 4;

/// What is known of one key at the time of a choice.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Row {
    /// Its place among the keys.
    pub at: usize,
    /// The place of its pool in the chain; the pool asked for is 0.
    pub pool: usize,
    /// Its uses by this process.
    pub in_flight: u32,
    /// Its `max_concurrent_uses`.
    pub cap: u32,
    /// µs since it was lent; `None`: never.
    pub idle_us: Option<u64>,
    /// µs since it was ranked first; `None`: never.
    pub fresh_us: Option<u64>,
    /// When it last had its turn; rises.
    pub turn: u64,
    /// µs for which it is known to rest.
    pub rest_us: u64,
    /// Uses that ended well lately; they count beside others alone, so 0 where there are none of those.
    pub served: f32,
    /// Uses that ended in an error lately.
    pub failed: f32,
    /// Uses that met a limit lately.
    pub limited: f32,
    /// ms to an answer's first byte lately; 0: not known.
    pub first_byte_ms: f32,
    /// µs since that was seen.
    pub first_byte_age_us: u64,
}

/// What a key's score is made of, each in 0..=1.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Terms {
    /// Its share of free slots; less where it is slow.
    pub capacity: f64,
    /// For how long it was not lent; never is 1.
    pub idle: f64,
    /// The share of uses that ended well; without history 1.
    pub success: f64,
    /// The share of uses that failed.
    pub error: f64,
    /// The share of uses that met a limit.
    pub rate_limit: f64,
    /// Whether it rests: above a half while it does, the longer the more.
    pub cooldown: f64,
    /// How lately it was chosen.
    pub freshness: f64,
}

impl Terms {
    /// Of one row, where first bytes usually take `usual_ms` (0: not known).
    // All of it is shares and times of which a float's precision is far more than needed.
    #[allow(clippy::cast_precision_loss)]
    #[inline]
    pub fn of(row: &Row, usual_ms: f32) -> Self {
        let cap = row.cap.max(1);
        let free = f64::from(cap.saturating_sub(row.in_flight)) / f64::from(cap);
        let (mut success, mut error, mut rate_limit) = (1.0, 0.0, 0.0);
        if row.failed > 0.0 || row.limited > 0.0 {
            // One use that never was: a single failure must not be all that is known.
            let all = f64::from(row.served + row.failed + row.limited) + 1.0;
            success = (f64::from(row.served) + 1.0) / all;
            error = f64::from(row.failed) / all;
            rate_limit = f64::from(row.limited) / all;
        }
        let minute = 60_000_000.0;
        Self {
            capacity: free * speed(row, usual_ms),
            idle: row
                .idle_us
                .map_or(1.0, |idle| idle.min(IDLE_SATURATES_US) as f64 / IDLE_SATURATES_US as f64),
            success,
            error,
            rate_limit,
            cooldown: match row.rest_us {
                0 => 0.0,
                left => 0.5 + 0.5 * (left as f64 / (left as f64 + minute)),
            },
            freshness: row.fresh_us.map_or(0.0, freshness),
        }
    }

    /// The score, to which jitter is added: higher is better.
    #[inline]
    pub fn score(&self, weights: &Weights) -> f64 {
        self.capacity * weights.capacity + self.idle * weights.idle + self.success * weights.success
            - self.error * weights.error
            - self.rate_limit * weights.rate_limit
            - self.cooldown * weights.cooldown
            - self.freshness * weights.freshness
    }
}

/// 1, and less for a key whose answers began much later than is usual.
#[inline]
#[allow(clippy::cast_precision_loss)]
fn speed(row: &Row, usual_ms: f32) -> f64 {
    let slow_ms = (usual_ms * SLOW).max(usual_ms + NOTICEABLE_MS);
    if usual_ms <= 0.0 || row.first_byte_ms <= slow_ms { 1.0 } else { slowness(row, usual_ms, slow_ms) }
}

/// The same of one that was slow, less so the longer ago that is.
#[allow(clippy::cast_precision_loss)]
fn slowness(row: &Row, usual_ms: f32, slow_ms: f32) -> f64 {
    let left = (-(row.first_byte_age_us as f32) / SLOW_HALVES_US).exp2();
    let believed_ms = usual_ms + (row.first_byte_ms - usual_ms) * left;
    if believed_ms > slow_ms { f64::from(slow_ms / believed_ms) } else { 1.0 }
}

/// 1 just now, 0 from [`FRESH_US`] on; as much less with each doubling of the time.
#[inline]
fn freshness(us: u64) -> f64 {
    if us < FRESH_US { 1.0 - doublings(us + 1) / doublings(FRESH_US) } else { 0.0 }
}

/// The logarithm to base 2 of a number above 0, straight between the powers of two, as a float's bits are: it only
/// orders.
#[inline]
#[allow(clippy::cast_precision_loss)]
const fn doublings(number: u64) -> f64 {
    ((number as f64).to_bits() - 1.0_f64.to_bits()) as f64 / (1_u64 << (f64::MANTISSA_DIGITS - 1)) as f64
}

/// What first bytes usually take among these keys: the harmonic mean, which one slow key hardly moves.
pub fn usual_first_byte(all_ms: impl Iterator<Item = f32>) -> f32 {
    let (mut known, mut rates) = (0.0_f32, 0.0_f32);
    all_ms.for_each(|ms| {
        if ms > 0.0 {
            known += 1.0;
            rates += 1.0 / ms;
        }
    });
    if rates > 0.0 { known / rates } else { 0.0 }
}

/// How a choice is made.
#[derive(Debug, Clone, Copy)]
pub struct Rule<'a> {
    /// The strategy.
    pub strategy: Strategy,
    /// Of [`Strategy::Weighted`].
    pub weights: &'a Weights,
    /// What first bytes usually take among the keys to choose from; 0: not known.
    pub usual_ms: f32,
    /// Where jitter comes from; another with each choice.
    pub seed: u64,
}

/// A key's place in the order.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Place {
    tier: u8,
    pool: usize,
    score: f64,
    at: usize,
}

impl Place {
    #[inline]
    fn of(row: &Row, rule: &Rule<'_>) -> Self {
        let tier = match row {
            Row { rest_us: 1.., .. } => 2,
            row if row.in_flight >= row.cap.max(1) => 1,
            _ => 0,
        };
        Self { tier, pool: row.pool, score: score(row, rule), at: row.at }
    }

    /// The better one is less.
    #[inline]
    fn compare(&self, other: &Self) -> Ordering {
        (self.tier.cmp(&other.tier))
            .then_with(|| self.pool.cmp(&other.pool))
            .then_with(|| other.score.total_cmp(&self.score))
            .then_with(|| self.at.cmp(&other.at))
    }
}

#[inline]
#[allow(clippy::cast_precision_loss)]
fn score(row: &Row, rule: &Rule<'_>) -> f64 {
    match rule.strategy {
        Strategy::Weighted => {
            let jitter = rule.weights.jitter * fraction(rule.seed, row.at);
            Terms::of(row, rule.usual_ms).score(rule.weights) + jitter
        }
        // Who had a turn longest ago; also right where only some of the keys fit.
        Strategy::RoundRobin => -(row.turn as f64),
        Strategy::LeastInFlight => {
            let load = f64::from(row.in_flight) / f64::from(row.cap.max(1));
            // Of those with equal load the one that waited longest: caps are far too small for this to weigh.
            -load - 1e-9 * row.fresh_us.map_or(0.0, freshness)
        }
        Strategy::FillFirst => 0.0,
    }
}

/// A number in 0..1 for this place: the high bits of a mixed counter (SplitMix64).
#[allow(clippy::cast_precision_loss)]
#[inline]
fn fraction(seed: u64, at: usize) -> f64 {
    let mut mixed = seed.wrapping_add((at as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    (mixed >> 11) as f64 / (1_u64 << 53) as f64
}

/// Calls `take` with the places among the keys of the best `most` rows, the best first.
pub fn best(rows: impl Iterator<Item = Row>, rule: &Rule<'_>, most: usize, take: impl FnMut(usize)) {
    let places = rows.map(|row| Place::of(&row, rule));
    if most <= FEW {
        let mut few = Few::new();
        places.for_each(|place| few.offer(place, most));
        few.places().iter().map(|place| place.at).for_each(take);
        return;
    }
    let mut all: Vec<Place> = places.collect();
    all.sort_unstable_by(Place::compare);
    all.iter().take(most).map(|place| place.at).for_each(take);
}

/// The best few so far, in order.
struct Few {
    kept: [Place; FEW],
    len: usize,
}

impl Few {
    fn new() -> Self {
        let none = Place { tier: u8::MAX, pool: usize::MAX, score: 0.0, at: usize::MAX };
        Self { kept: [none; FEW], len: 0 }
    }

    #[inline]
    fn offer(&mut self, place: Place, most: usize) {
        if self.len < most.min(FEW) {
            self.len += 1;
        } else if self.len == 0 || place.compare(&self.kept[self.len - 1]).is_ge() {
            return;
        }
        let mut at = self.len - 1;
        while at > 0 && place.compare(&self.kept[at - 1]).is_lt() {
            self.kept[at] = self.kept[at - 1];
            at -= 1;
        }
        self.kept[at] = place;
    }

    fn places(&self) -> &[Place] {
        &self.kept[..self.len]
    }
}

#[cfg(test)]
#[allow(clippy::float_cmp, clippy::type_complexity)] // numbers that a float has exactly, and a table
mod tests {
    use proptest::prelude::*;
    use proptest::strategy::Strategy as Generated;

    use super::*;
    use crate::config::Strategy;

    const SECOND: u64 = 1_000_000;

    /// A healthy key, lent and chosen a while ago.
    fn row(at: usize) -> Row {
        Row {
            at,
            pool: 0,
            in_flight: 0,
            cap: 8,
            idle_us: Some(SECOND),
            fresh_us: Some(SECOND),
            turn: at as u64 + 1,
            rest_us: 0,
            served: 10.0,
            failed: 0.0,
            limited: 0.0,
            first_byte_ms: 300.0,
            first_byte_age_us: 0,
        }
    }

    fn order_by(strategy: Strategy, rows: &[Row], most: usize) -> Vec<usize> {
        let usual_ms = usual_first_byte(rows.iter().map(|row| row.first_byte_ms));
        let weights = Weights { jitter: 0.0, ..Weights::DEFAULT };
        let rule = Rule { strategy, weights: &weights, usual_ms, seed: 7 };
        let mut order = Vec::new();
        best(rows.iter().copied(), &rule, most, |at| order.push(at));
        order
    }

    fn order(rows: &[Row]) -> Vec<usize> {
        order_by(Strategy::Weighted, rows, usize::MAX)
    }

    #[test]
    fn by_score_the_better_of_two_keys_goes_first() {
        let two = [row(0), row(1)];
        let cases: [(&str, fn(&mut Row)); 9] = [
            ("busier", |key| key.in_flight = 1),
            ("busier for its cap", |key| (key.in_flight, key.cap) = (1, 4)),
            ("lent a moment ago", |key| key.idle_us = Some(0)),
            ("chosen a moment ago", |key| key.fresh_us = Some(1000)),
            ("failing", |key| key.failed = 1.0),
            ("limited", |key| key.limited = 1.0),
            ("slow", |key| key.first_byte_ms = 3000.0),
            ("resting", |key| key.rest_us = 1),
            ("in a fallback", |key| key.pool = 1),
        ];
        for (what, worse) in cases {
            let mut rows = two;
            worse(&mut rows[0]);
            assert_eq!(order(&rows), [1, 0], "the {what} one goes last");
        }
    }

    #[test]
    fn a_key_never_lent_goes_before_those_that_work() {
        let mut fresh = row(2);
        (fresh.idle_us, fresh.fresh_us, fresh.served, fresh.first_byte_ms) = (None, None, 0.0, 0.0);
        assert_eq!(order(&[row(0), row(1), fresh])[0], 2);
    }

    #[test]
    fn pools_go_in_order_whatever_the_scores_save_for_keys_that_rest_or_are_full() {
        let (mut bad, mut good) = (row(0), row(1));
        (bad.failed, bad.served, bad.in_flight, good.pool) = (50.0, 0.0, 7, 1);
        assert_eq!(order(&[bad, good]), [0, 1], "a bad key of the pool before a good one of its fallback");
        bad.in_flight = 8;
        assert_eq!(order(&[bad, good]), [1, 0], "but not one that has no slot left");
        bad = Row { rest_us: SECOND, ..row(0) };
        good.in_flight = 8;
        assert_eq!(order(&[bad, good]), [1, 0], "and a rest is the last of all");
    }

    #[test]
    fn of_keys_that_rest_the_one_that_is_back_first_goes_first() {
        let rests = [90, 5, 30].map(|seconds| Row { rest_us: seconds * SECOND, ..row(0) });
        let rows: Vec<_> = rests.iter().enumerate().map(|(at, rest)| Row { at, ..*rest }).collect();
        assert_eq!(order(&rows), [1, 2, 0]);
    }

    #[test]
    fn the_strategies_order_as_their_names_say() {
        let mut rows = [row(0), row(1), row(2)];
        (rows[0].in_flight, rows[1].in_flight, rows[2].in_flight) = (3, 2, 1);
        (rows[0].turn, rows[1].turn, rows[2].turn) = (5, 3, 4);
        assert_eq!(order_by(Strategy::FillFirst, &rows, 9), [0, 1, 2]);
        assert_eq!(order_by(Strategy::LeastInFlight, &rows, 9), [2, 1, 0]);
        assert_eq!(order_by(Strategy::RoundRobin, &rows, 9), [1, 2, 0]);
        let mut equal = [row(0), row(1)];
        equal[0].fresh_us = Some(10);
        assert_eq!(
            order_by(Strategy::LeastInFlight, &equal, 9),
            [1, 0],
            "of equals the one chosen longest ago"
        );
    }

    #[test]
    fn twice_as_slow_is_chance_and_ten_times_is_not() {
        let usual = usual_first_byte([300.0, 300.0, 3000.0, 0.0].into_iter());
        assert!((300.0..450.0).contains(&usual), "one slow key hardly moves it: {usual}");
        let of = |ms| Terms::of(&Row { first_byte_ms: ms, ..row(0) }, 300.0).capacity;
        assert_eq!([of(0.0), of(30.0), of(600.0), of(1200.0), of(4800.0)], [1.0, 1.0, 1.0, 0.5, 0.125]);
        let of = |ms| Terms::of(&Row { first_byte_ms: ms, ..row(0) }, 4.0).capacity;
        assert_eq!([of(40.0), of(104.0), of(208.0)], [1.0, 1.0, 0.5], "a few ms are nobody's fault");
    }

    #[test]
    fn a_key_that_was_slow_is_believed_to_be_less_so_as_time_goes_on() {
        let after = |seconds| {
            let slow = Row { first_byte_ms: 2700.0, first_byte_age_us: seconds * SECOND, ..row(0) };
            Terms::of(&slow, 300.0).capacity
        };
        assert_eq!(
            [after(0), after(10), after(20), after(30)],
            [2.0 / 9.0_f32, 0.4, 2.0 / 3.0, 1.0].map(f64::from)
        );
    }

    #[test]
    fn one_failure_is_not_all_that_is_known() {
        let once = Terms::of(&Row { served: 0.0, failed: 1.0, ..row(0) }, 0.0);
        assert_eq!((once.success, once.error), (0.5, 0.5));
        let nothing = Terms::of(&Row { served: 0.0, ..row(0) }, 0.0);
        assert_eq!((nothing.success, nothing.error), (1.0, 0.0));
    }

    #[test]
    fn each_weight_moves_its_own_term_alone() {
        let terms = Terms {
            capacity: 0.5,
            idle: 0.25,
            success: 0.75,
            error: 0.125,
            rate_limit: 0.0625,
            cooldown: 0.375,
            freshness: 0.875,
        };
        let none = Weights {
            capacity: 0.0,
            idle: 0.0,
            success: 0.0,
            error: 0.0,
            rate_limit: 0.0,
            cooldown: 0.0,
            freshness: 0.0,
            jitter: 0.0,
        };
        let cases = [
            (Weights { capacity: 2.0, ..none }, 1.0),
            (Weights { idle: 2.0, ..none }, 0.5),
            (Weights { success: 2.0, ..none }, 1.5),
            (Weights { error: 2.0, ..none }, -0.25),
            (Weights { rate_limit: 2.0, ..none }, -0.125),
            (Weights { cooldown: 2.0, ..none }, -0.75),
            (Weights { freshness: 2.0, ..none }, -1.75),
            (Weights { jitter: 2.0, ..none }, 0.0),
        ];
        for (weights, score) in cases {
            assert_eq!(terms.score(&weights), score, "{weights:?}");
        }
    }

    fn any_row() -> impl Generated<Value = Row> {
        let times = (prop::option::of(0..u64::MAX), prop::option::of(0..u64::MAX), 0..4_u64, any::<u64>());
        let counts = (0.0..1e6_f32, 0.0..1e6_f32, 0.0..1e6_f32, 0.0..1e7_f32);
        ((0..3_usize, 0..12_u32, 0..12_u32), times, counts).prop_map(
            |((pool, in_flight, cap), times, counts)| {
                let (idle_us, fresh_us, rests, rest) = times;
                let (served, failed, limited, first_byte_ms) = counts;
                let rest_us = if rests == 0 { rest } else { 0 };
                let at = 0;
                Row {
                    at,
                    pool,
                    in_flight,
                    cap,
                    idle_us,
                    fresh_us,
                    turn: rest,
                    rest_us,
                    served,
                    failed,
                    limited,
                    first_byte_ms,
                    first_byte_age_us: rest,
                }
            },
        )
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]
        #[test]
        fn terms_stay_between_0_and_1_whatever_was_seen(row in any_row(), usual in 0.0..1e7_f32) {
            let Terms { capacity, idle, success, error, rate_limit, cooldown, freshness } = Terms::of(&row, usual);
            for term in [capacity, idle, success, error, rate_limit, cooldown, freshness] {
                prop_assert!((0.0..=1.0).contains(&term), "{row:?}: {term}");
            }
            prop_assert!((success + error + rate_limit - 1.0).abs() < 1e-3);
        }

        #[test]
        fn the_best_few_are_the_first_of_all_in_the_same_order(
            rows in prop::collection::vec(any_row(), 0..40), most in 0..6_usize,
            strategy in prop::sample::select(vec![
                Strategy::Weighted, Strategy::RoundRobin, Strategy::LeastInFlight, Strategy::FillFirst,
            ])
        ) {
            let rows: Vec<_> = rows.into_iter().enumerate().map(|(at, row)| Row { at, ..row }).collect();
            let all = order_by(strategy, &rows, usize::MAX);
            let mut each = all.clone();
            each.sort_unstable();
            prop_assert_eq!(each, (0..rows.len()).collect::<Vec<_>>(), "each key once");
            prop_assert_eq!(order_by(strategy, &rows, most), &all[..most.min(all.len())]);
            let rests = |at: &usize| rows[*at].rest_us > 0;
            prop_assert!(all.is_sorted_by_key(rests), "what rests goes last");
        }

        #[test]
        fn jitter_stays_between_0_and_1_and_differs_from_key_to_key(seed in any::<u64>(), at in 0..1000_usize) {
            let here = fraction(seed, at);
            prop_assert!((0.0..1.0).contains(&here));
            prop_assert!(here.to_bits() != fraction(seed, at + 1).to_bits());
        }
    }
}

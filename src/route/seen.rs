//! What this process has seen of a key, in atomics: written at the end of each use, read at each choice, and
//! never waited for.
//!
//! A race between two writers costs one sample of an average at most; what is counted exactly (uses under
//! way) is an atomic of its own. Times are µs since the ring's birth.

use arc_swap::ArcSwapOption;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use arc_swap::ArcSwap;

use super::rank::Row;
use crate::model::{Class, GroupName, ModelName};

/// What was seen counts half after this long. A few minutes: shorter forgets a key that fails once in a while,
/// longer punishes one that was mended.
const HALF_LIFE: Duration = Duration::from_mins(2);
/// A first byte seen longer ago than this, in µs, tells nothing about now.
const STALE_US: u64 = 600_000_000;
/// So many samples make a mean of first bytes, and so many it follows.
const SAMPLES: u32 = 8;
/// Models of one key whose rests are remembered. Callers name models, so there must be a bound; past it the
/// rest that ends first goes, which costs a try.
const MODELS: usize = 16;
/// The resolution of stored times, in µs: 32 bits of it last for 13 years.
const TICK_US: u64 = 100_000;

/// How a use of a key ended, as far as the order of keys depends on it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ended {
    /// The key did what it should.
    Well,
    /// It did not.
    Badly,
    /// It met a limit.
    Limited,
    /// Nothing was learned of the key.
    Untold,
}

impl Ended {
    /// What an answer of this class says.
    pub fn of(class: Class) -> Self {
        match class {
            // A caller's mistake was answered as such: the key was taken.
            Class::Success | Class::Caller => Self::Well,
            Class::Rate | Class::Quota | Class::Concurrency => Self::Limited,
            Class::Invalid | Class::Access | Class::Region | Class::Network => Self::Badly,
            Class::Overloaded | Class::Cancelled => Self::Untold,
        }
    }
}

/// What is known of one key. It outlives a change of the key's settings.
#[derive(Debug, Default)]
pub(super) struct KeyState {
    pub(super) off: AtomicBool,
    in_flight: AtomicU32,
    /// When it was last lent, plus one; 0: never.
    lent: AtomicU64,
    /// When it was last ranked first, plus one; 0: never.
    chosen: AtomicU64,
    turn: AtomicU64,
    served: Fading,
    failed: Fading,
    limited: Fading,
    first_byte: Mean,
    rests: Rests,
    /// Where its group is `auto`: what answers have named.
    pub(super) group: ArcSwapOption<GroupName>,
}

impl KeyState {
    #[inline]
    pub(super) fn is_on(&self) -> bool {
        !self.off.load(Ordering::Relaxed)
    }

    /// A use begins. The store lent it, so whatever was known to rest does not.
    pub(super) fn lent(&self, model: Option<&ModelName>, now: u64) {
        self.in_flight.fetch_add(1, Ordering::Relaxed);
        self.lent.store(now + 1, Ordering::Relaxed);
        self.rests.are_over(model, now);
    }

    /// A use has ended.
    pub(super) fn returned(&self, ended: Ended, first_byte: Option<Duration>, now: u64) {
        self.in_flight.fetch_sub(1, Ordering::Relaxed);
        match ended {
            Ended::Well => self.served.add(now),
            Ended::Badly => self.failed.add(now),
            Ended::Limited => self.limited.add(now),
            Ended::Untold => {}
        }
        if let Some(first_byte) = first_byte.filter(|_| ended == Ended::Well) {
            self.first_byte.add(first_byte, now);
        }
    }

    /// It is the one to be tried first.
    pub(super) fn chosen(&self, turn: u64, now: u64) {
        self.chosen.store(now + 1, Ordering::Relaxed);
        self.turn.store(turn, Ordering::Relaxed);
    }

    /// It is known to rest until then, for every request.
    pub(super) fn rests_for_all_until(&self, until: u64) {
        self.rests.all.fetch_max(until, Ordering::Relaxed);
    }

    /// It is known to rest until then, for this model, or for requests of which none is known.
    pub(super) fn rests_until(&self, model: Option<&ModelName>, until: u64) {
        self.rests.note(model, until);
    }

    /// What was known to rest may be lent again.
    pub(super) fn forget_rests(&self) {
        self.rests.forget();
    }

    /// The mean time to the first byte, in ms; 0: not known.
    #[inline]
    pub(super) fn first_byte_ms(&self, now: u64) -> f32 {
        self.first_byte.at(now).0
    }

    /// All of it as numbers.
    #[inline(always)]
    #[allow(clippy::inline_always, reason = "a choice makes one a key, and reads but some of it")]
    pub(super) fn row(&self, at: usize, pool: usize, cap: u32, model: Option<&ModelName>, now: u64) -> Row {
        let since = |time: &AtomicU64| {
            time.load(Ordering::Relaxed).checked_sub(1).map(|time| now.saturating_sub(time))
        };
        let (failed, limited) = (self.failed.at(now), self.limited.at(now));
        let served = if failed > 0.0 || limited > 0.0 { self.served.at(now) } else { 0.0 };
        let first_byte = self.first_byte.at(now);
        Row {
            at,
            pool,
            in_flight: self.in_flight.load(Ordering::Relaxed),
            cap,
            idle_us: since(&self.lent),
            fresh_us: since(&self.chosen),
            turn: self.turn.load(Ordering::Relaxed),
            rest_us: self.rests.until(model, now).saturating_sub(now),
            served,
            failed,
            limited,
            first_byte_ms: first_byte.0,
            first_byte_age_us: first_byte.1,
        }
    }
}

/// A number and when it was true, in one atomic.
#[derive(Debug, Default)]
struct Stamped(AtomicU64);

impl Stamped {
    /// The number, and its age in µs.
    #[inline]
    fn load(&self, now: u64) -> (f32, u64) {
        Self::unpack(self.0.load(Ordering::Relaxed), now)
    }

    #[allow(clippy::cast_possible_truncation)] // two halves of 32 bits
    fn unpack(packed: u64, now: u64) -> (f32, u64) {
        let at = u64::from(packed as u32) * TICK_US;
        (f32::from_bits((packed >> 32) as u32), now.saturating_sub(at))
    }

    fn update(&self, now: u64, change: impl Fn(f32, u64) -> f32) {
        let tick = u32::try_from(now / TICK_US).unwrap_or(u32::MAX);
        // Who comes second sees what the first wrote: no count is lost.
        let _ = self.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |packed| {
            let (value, age) = Self::unpack(packed, now);
            Some(u64::from(change(value, age).to_bits()) << 32 | u64::from(tick))
        });
    }
}

/// A count that halves with each [`HALF_LIFE`].
#[derive(Debug, Default)]
struct Fading(Stamped);

impl Fading {
    fn add(&self, now: u64) {
        self.0.update(now, |count, age| faded(count, age) + 1.0);
    }

    #[inline]
    fn at(&self, now: u64) -> f32 {
        match self.0.load(now) {
            // Most keys never fail.
            (0.0, _) => 0.0,
            (count, age) => faded(count, age),
        }
    }
}

#[allow(clippy::cast_precision_loss)] // a share of a half-life
#[inline(never)] // most keys have nothing that fades, and a choice looks at many
fn faded(count: f32, age: u64) -> f32 {
    // Below a tick nothing has faded that could be told.
    if age < 2 * TICK_US { count } else { count * (-(age as f32) / HALF_LIFE.as_micros() as f32).exp2() }
}

/// A running geometric mean of times: one that took a hundred times as long, when a machine stood
/// still, does not even double it. It is forgotten when nothing more comes. In one atomic: the mean, the second in
/// which it was true (27 bits, four years), and how many samples it is of (5 bits, up to [`SAMPLES`]).
#[derive(Debug, Default)]
struct Mean(AtomicU64);

impl Mean {
    fn add(&self, sample: Duration, now: u64) {
        let sample = (sample.as_secs_f32() * 1e3).max(0.001);
        let _ = self.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |packed| {
            let (mean, age, count) = Self::unpack(packed, now);
            let count = if Self::is_stale(age) { 1 } else { (count + 1).min(u64::from(SAMPLES)) };
            #[allow(clippy::cast_precision_loss)] // at most SAMPLES
            let mean = if count == 1 { sample } else { mean * (sample / mean).powf(1.0 / count as f32) };
            let second = (now / 1_000_000) & 0x07ff_ffff;
            Some(u64::from(mean.to_bits()) << 32 | second << 5 | count)
        });
    }

    /// In ms, and its age in µs; 0: too little is known.
    #[inline]
    fn at(&self, now: u64) -> (f32, u64) {
        let (mean, age, count) = Self::unpack(self.0.load(Ordering::Relaxed), now);
        let known = count >= u64::from(SAMPLES) && !Self::is_stale(age);
        (if known { mean } else { 0.0 }, age)
    }

    #[allow(clippy::cast_possible_truncation)] // the upper half
    fn unpack(packed: u64, now: u64) -> (f32, u64, u64) {
        let second = (packed >> 5) & 0x07ff_ffff;
        (f32::from_bits((packed >> 32) as u32), now.saturating_sub(second * 1_000_000), packed & 0x1f)
    }

    fn is_stale(age: u64) -> bool {
        age > STALE_US
    }
}

/// Until when a key is known to rest: for every request, and for some models or where none is known.
#[derive(Debug, Default)]
struct Rests {
    all: AtomicU64,
    models: ArcSwap<Vec<(Option<ModelName>, u64)>>,
    /// The latest end in `models`, so that a choice looks into the list only where something rests.
    latest: AtomicU64,
}

impl Rests {
    #[inline]
    fn until(&self, model: Option<&ModelName>, now: u64) -> u64 {
        let all = self.all.load(Ordering::Relaxed);
        if self.latest.load(Ordering::Relaxed) <= now {
            return all;
        }
        let models = self.models.load();
        all.max(models.iter().find(|(name, _)| name.as_ref() == model).map_or(0, |(_, until)| *until))
    }

    fn note(&self, model: Option<&ModelName>, until: u64) {
        self.models.rcu(|models| {
            let is_it = |name: &Option<ModelName>| name.as_ref() == model;
            let before = models.iter().find(|(name, _)| is_it(name)).map_or(0, |(_, until)| *until);
            let mut others: Vec<_> = models.iter().filter(|(name, _)| !is_it(name)).cloned().collect();
            if others.len() >= MODELS {
                others.sort_unstable_by_key(|(_, until)| *until);
                others.remove(0);
            }
            others.push((model.cloned(), until.max(before)));
            others
        });
        self.latest.fetch_max(until, Ordering::Relaxed);
    }

    /// A key was lent for this model.
    fn are_over(&self, model: Option<&ModelName>, now: u64) {
        self.all.store(0, Ordering::Relaxed);
        if self.latest.load(Ordering::Relaxed) > now {
            let is_another = |(name, _): &&(Option<ModelName>, u64)| name.as_ref() != model;
            self.models.rcu(|models| models.iter().filter(is_another).cloned().collect::<Vec<_>>());
        }
    }

    fn forget(&self) {
        self.all.store(0, Ordering::Relaxed);
        if self.latest.swap(0, Ordering::Relaxed) > 0 {
            self.models.store(std::sync::Arc::default());
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::float_cmp)] // a test that fails may panic; numbers that a float has exactly
mod tests {
    use super::*;

    const SECOND: u64 = 1_000_000;

    fn model(name: &str) -> ModelName {
        ModelName::new(name).unwrap()
    }

    #[test]
    fn what_was_seen_counts_half_after_each_half_life_and_no_count_is_lost_on_the_way() {
        let state = KeyState::default();
        for _ in 0..8 {
            state.lent(None, 0);
            state.returned(Ended::Badly, None, 0);
        }
        let half = u64::try_from(HALF_LIFE.as_micros()).unwrap();
        for (halves, left) in [(0, 8.0), (1, 4.0), (2, 2.0), (20, 0.0)] {
            let failed = state.row(0, 0, 8, None, halves * half).failed;
            assert!((failed - left).abs() < 0.01, "{failed} after {halves}, {left} was expected");
        }
        assert_eq!(state.row(0, 0, 8, None, half).served, 0.0, "none ended well");
        state.lent(None, half);
        state.returned(Ended::Well, None, half);
        assert_eq!(state.row(0, 0, 8, None, half).served, 1.0, "it counts beside those that did not");
        state.returned(Ended::Badly, None, half);
        assert!((state.row(0, 0, 8, None, half).failed - 5.0).abs() < 0.01, "four of before, and one");
    }

    #[test]
    fn uses_that_end_at_once_on_many_threads_are_all_counted() {
        let state = KeyState::default();
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..1000 {
                        state.lent(None, 5);
                        state.returned(Ended::Well, Some(Duration::from_millis(20)), 5);
                    }
                });
            }
        });
        let row = state.row(0, 0, 8, None, 5);
        assert_eq!((row.in_flight, state.served.at(5)), (0, 4000.0));
        assert!((row.first_byte_ms - 20.0).abs() < 0.1, "{row:?}");
    }

    #[test]
    fn a_first_byte_is_known_after_some_and_one_stall_among_them_does_not_even_double_it() {
        let state = KeyState::default();
        let took = |ms, ended, now| {
            state.lent(None, now);
            state.returned(ended, Some(Duration::from_millis(ms)), now);
        };
        took(20_000, Ended::Well, SECOND);
        (0..6).for_each(|_| took(100, Ended::Well, SECOND));
        (0..6).for_each(|_| took(1, Ended::Badly, SECOND));
        assert_eq!(state.first_byte_ms(SECOND), 0.0, "too few, and nothing is learned from failures");
        took(100, Ended::Well, SECOND);
        let known = state.first_byte_ms(SECOND);
        assert!((100.0..200.0).contains(&known), "{known}");
        (0..40).for_each(|_| took(800, Ended::Well, 3 * SECOND));
        let row = state.row(0, 0, 8, None, 5 * SECOND);
        assert!((780.0..=801.0).contains(&row.first_byte_ms), "it follows: {row:?}");
        assert_eq!(row.first_byte_age_us, 2 * SECOND);
        assert_eq!(state.first_byte_ms(SECOND * 700), 0.0, "that was long ago");
        took(100, Ended::Well, SECOND * 700);
        assert_eq!(state.first_byte_ms(SECOND * 700), 0.0, "and begins anew");
    }

    #[test]
    fn a_rest_is_known_for_its_model_or_for_all_until_it_is_over_or_the_key_is_lent() {
        let state = KeyState::default();
        let (a, b) = (model("a"), model("b"));
        let left = |model, now| state.row(0, 0, 8, model, now).rest_us;
        state.rests_until(Some(&a), 10);
        assert_eq!((left(Some(&a), 4), left(Some(&b), 4), left(None, 4)), (6, 0, 0));
        state.rests_until(None, 6);
        assert_eq!((left(Some(&b), 4), left(None, 4)), (0, 2), "no model is like another one");
        state.rests_for_all_until(8);
        assert_eq!((left(Some(&a), 4), left(Some(&b), 4), left(None, 4)), (6, 4, 4));
        state.rests_until(Some(&a), 7);
        assert_eq!(left(Some(&a), 4), 6, "the longer one counts");
        assert_eq!((left(Some(&a), 10), left(None, 8)), (0, 0), "it is back");
        state.lent(Some(&a), 4);
        assert_eq!((left(Some(&a), 4), left(None, 4)), (0, 2), "the store lent it");
        state.rests_until(Some(&b), 10);
        state.forget_rests();
        assert_eq!(left(Some(&b), 4), 0);
    }

    #[test]
    fn rests_of_made_up_models_take_no_more_than_their_bound() {
        let state = KeyState::default();
        for nth in 0..100 {
            state.rests_until(Some(&model(&format!("m{nth}"))), 1000 + nth);
        }
        assert_eq!(state.rests.models.load().len(), MODELS);
        assert_eq!(state.row(0, 0, 8, Some(&model("m99")), 0).rest_us, 1099, "the latest are kept");
    }
}

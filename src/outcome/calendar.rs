//! The times that providers mean without naming them: the ends of days and months.

use std::time::{Duration, SystemTime};

use crate::config::Until;

const DAY: i64 = 86400;
const HOUR: i64 = 3600;

/// From `at` to the next time of that name; `None` past the calendar's end.
pub(super) fn until(until: Until, at: SystemTime) -> Option<Duration> {
    let since = at.duration_since(SystemTime::UNIX_EPOCH).ok()?;
    let now = i64::try_from(since.as_secs()).ok()?;
    let end = match until {
        Until::MonthEnd => month_end(now / DAY)? * DAY,
        Until::DayEnd => (now / DAY + 1) * DAY,
        Until::PacificDayEnd => pacific_day_end(now)?,
    };
    Duration::from_secs(u64::try_from(end).ok()?).checked_sub(since)
}

/// The first day of the next month.
fn month_end(today: i64) -> Option<i64> {
    let year = year_of(today)?;
    let mut firsts = (year..=year + 1).flat_map(|year| (1..=12).map(move |month| (year, month)));
    firsts.find_map(|(year, month)| days_since_epoch(year, month, 1).filter(|first| *first > today))
}

/// The next midnight in California. Its clocks change at two in the morning, so every midnight is there once.
fn pacific_day_end(now: i64) -> Option<i64> {
    let midnight = ((now - pacific_offset(now)?).div_euclid(DAY) + 1) * DAY;
    [7 * HOUR, 8 * HOUR]
        .into_iter()
        .map(|offset| (midnight + offset, offset))
        .find_map(|(at, offset)| (pacific_offset(at)? == offset).then_some(at))
}

/// How far California is behind UTC: seven hours from the second Sunday of March to the first of November.
fn pacific_offset(at: i64) -> Option<i64> {
    let year = year_of(at.div_euclid(DAY))?;
    let summer = sunday_from(days_since_epoch(year, 3, 8)?) * DAY + 10 * HOUR;
    let winter = sunday_from(days_since_epoch(year, 11, 1)?) * DAY + 9 * HOUR;
    Some(if (summer..winter).contains(&at) { 7 * HOUR } else { 8 * HOUR })
}

/// The first Sunday from `day` on; the epoch was a Thursday.
fn sunday_from(day: i64) -> i64 {
    day + (3 - day).rem_euclid(7)
}

/// The year of a day.
fn year_of(day: i64) -> Option<i64> {
    // Never too late, and too early by no more than one in 1,400 years.
    let mut year = 1970 + day.max(0) / 366;
    while days_since_epoch(year + 1, 1, 1)? <= day {
        year += 1;
    }
    Some(year)
}

/// Days from 1970-01-01 to a date of the Gregorian calendar; `None` for a day that does not exist.
pub(super) fn days_since_epoch(year: i64, month: i64, day: i64) -> Option<i64> {
    let leap = year % 4 == 0 && (year % 100 != 0 || year % 400 == 0);
    let in_month = match month {
        1 | 3 | 5 | 7 | 8 | 10 | 12 => 31,
        4 | 6 | 9 | 11 => 30,
        2 if leap => 29,
        2 => 28,
        _ => return None,
    };
    if !(1970..=9999).contains(&year) || !(1..=in_month).contains(&day) {
        return None;
    }
    // Years are counted from March, so that the leap day comes last.
    let (y, m) = if month > 2 { (year, month - 3) } else { (year - 1, month + 9) };
    Some(365 * y + y / 4 - y / 100 + y / 400 + (153 * m + 2) / 5 + day - 1 - 719_468)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn from(at: &str, end: Until) -> Duration {
        until(end, humantime::parse_rfc3339(at).unwrap()).unwrap()
    }

    fn hours(hours: u64) -> Duration {
        Duration::from_hours(hours)
    }

    #[test]
    fn a_day_ends_at_the_next_midnight() {
        assert_eq!(from("2026-02-10T12:00:00Z", Until::DayEnd), hours(12));
        assert_eq!(from("2026-02-10T00:00:00Z", Until::DayEnd), hours(24));
    }

    #[test]
    fn a_day_in_california_ends_at_its_own_midnight_in_winter_in_summer_and_when_clocks_change() {
        for (at, left) in [
            ("2026-02-10T12:00:00Z", 20), // 04:00
            ("2026-07-10T12:00:00Z", 19), // 05:00
            ("2026-02-10T07:00:00Z", 1),
            ("2026-02-10T08:00:00Z", 24),
            // 8 March 2026: its day has 23 hours.
            ("2026-03-08T08:00:00Z", 23),
            ("2026-03-08T09:00:00Z", 22),
            ("2026-03-08T10:00:00Z", 21),
            ("2026-03-09T07:00:00Z", 24),
            // 1 November 2026: its day has 25.
            ("2026-11-01T07:00:00Z", 25),
            ("2026-11-01T09:00:00Z", 23),
            ("2026-11-02T08:00:00Z", 24),
            // New year comes there last.
            ("2026-12-31T23:00:00Z", 9),
            ("2027-01-01T02:00:00Z", 6),
            // The earliest and the latest Sundays.
            ("2015-03-08T08:00:00Z", 23),
            ("2027-03-14T08:00:00Z", 23),
            ("2015-11-01T07:00:00Z", 25),
            ("2027-11-07T07:00:00Z", 25),
        ] {
            assert_eq!(from(at, Until::PacificDayEnd), hours(left), "{at}");
        }
    }

    proptest! {
        #[test]
        fn every_end_is_ahead_and_within_its_span(secs in 0_u64..300_000_000_000) {
            let at = SystemTime::UNIX_EPOCH + Duration::from_secs(secs);
            for (end, longest) in [
                (Until::DayEnd, hours(24)),
                (Until::PacificDayEnd, hours(25)),
                (Until::MonthEnd, hours(31 * 24)),
            ] {
                if let Some(left) = until(end, at) {
                    prop_assert!(!left.is_zero() && left <= longest, "{:?} {:?}", end, left);
                }
            }
        }
    }
}

//! Answers for people: aligned columns, times from now, and why.

use std::fmt::Write as _;
use std::time::Duration;

use super::KeyPath;
use crate::control::admin::{
    AppSeen, CheckResult, KeySeen, LeaseSeen, PoolView, RankingSeen, Status, TermsSeen,
};
use crate::store::{CooldownView, KeyView, StoreTime};

/// Leases that `status` shows; the list shows all.
const FEW: usize = 20;

/// Scoped rests of one key that are shown.
const FEW_RESTS: usize = 4;

/// Without control characters: a provider's word must not move the cursor.
pub(super) fn plain(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { '?' } else { c }).collect()
}

pub(super) fn status(status: &Status, now: StoreTime) -> String {
    let mut page = String::new();
    let mut line = |label: &str, text: &str| {
        let _ = writeln!(page, "{label:<9}{}", plain(text)); // writing to a `String` cannot fail
    };
    let up = duration(Duration::from_secs(status.uptime_seconds));
    line("lessor", &format!("{}, up {up}, by {}", status.version, status.config));
    if let Some(refused) = &status.config_refused {
        line("", &refused.to_string());
    }
    if !status.needs_restart.is_empty() {
        let fields = status.needs_restart.join(", ");
        line(
            "",
            &format!("the file on disk says something else of {fields}, which counts from the next start"),
        );
    }
    line("ready", if status.ready { "yes" } else { "no" });
    for reason in &status.reasons {
        line("", reason);
    }
    line("store", &format!("{}, {}", status.store.url, if status.store.up { "up" } else { "down" }));
    for grace in &status.graces {
        let rest = duration(grace.until_ms.since(now));
        let text = "lost its data or failed over: keys are lent only to streams that are already open, for";
        line("", &format!("{}: {text} {rest}", grace.provider));
    }
    line("owner", &status.owner.0);
    for (at, proxy) in status.proxy.iter().enumerate() {
        line(if at == 0 { "proxy" } else { "" }, proxy);
    }
    line("requests", &format!("{} hold a key, {} wait for one", status.live, status.waiting));
    if !status.store.up {
        let _ = writeln!(page, "\npools, keys and leases are not known while the store does not answer");
        return page;
    }
    let ranking = status.ranking.as_ref().map(ranking).unwrap_or_default();
    let few = &status.leases[..status.leases.len().min(FEW)];
    page = format!("{page}\n{}\n{}\n{}", pools(&status.pools), keys(&status.keys, now), leases(few, now));
    let more = status.leases.len() - few.len();
    if more > 0 {
        let _ = writeln!(page, "and {more} more: lessor leases list");
    }
    page + &ranking
}

/// Why keys are ranked as they are, below the weights of the terms.
fn ranking(ranking: &RankingSeen) -> String {
    let numbers = |terms: &TermsSeen| {
        let TermsSeen { capacity, idle, success, error, rate_limit, cooldown, freshness } = *terms;
        [capacity, idle, success, -error, -rate_limit, -cooldown, -freshness].map(|number| {
            // No negative nothing.
            if number == 0.0 { "0.00".into() } else { format!("{number:.2}") }
        })
    };
    let row = |first: String, score: String, terms: &TermsSeen, last: [String; 3]| {
        [first, score].into_iter().chain(numbers(terms)).chain(last).collect::<Vec<_>>()
    };
    let none = || [String::new(), String::new(), String::new()];
    let weights = row("weight".into(), String::new(), &ranking.weights, none());
    let keys = ranking.keys.iter().map(|key| {
        let first_byte = key.first_byte_ms.map(|ms| format!("{ms:.0}ms")).unwrap_or_default();
        let rests = key.rests_ms.map(|ms| duration(Duration::from_millis(ms))).unwrap_or_default();
        let last = [key.in_flight.to_string(), first_byte, rests];
        row(format!("{}/{}", key.provider, key.key), format!("{:.2}", key.score), &key.terms, last)
    });
    let head = [
        "KEY",
        "SCORE",
        "CAPACITY",
        "IDLE",
        "SUCCESS",
        "ERROR",
        "RATE LIMIT",
        "COOLDOWN",
        "FRESHNESS",
        "IN FLIGHT",
        "FIRST BYTE",
        "RESTS",
    ];
    let rows = std::iter::once(weights).chain(keys).collect();
    let only = if ranking.strategy == "weighted" { "" } else { ", which does not look at the score" };
    format!(
        "\nranking by {}{only}, as this sidecar sees its keys; jitter up to {:.2}\n{}",
        plain(&ranking.strategy),
        ranking.jitter,
        table("keys", &head, rows)
    )
}

fn pools(pools: &[PoolView]) -> String {
    let rows = pools.iter().map(|pool| {
        let fallback: Vec<_> = pool.fallback.iter().map(ToString::to_string).collect();
        vec![
            format!("{}/{}", pool.provider, pool.pool),
            pool.keys.to_string(),
            pool.available.to_string(),
            uses(pool.in_use, pool.max_concurrent_uses, pool.learned_concurrent_uses),
            fallback.join(", "),
        ]
    });
    table("pools", &["POOL", "KEYS", "AVAILABLE", "IN USE", "FALLBACK"], rows.collect())
}

/// `1/8`, or `1/3 of 8` where answers taught that only so many go.
fn uses(in_use: u32, most: u32, learned: Option<u32>) -> String {
    match learned.filter(|learned| *learned < most) {
        Some(learned) => format!("{in_use}/{learned} of {most}"),
        None => format!("{in_use}/{most}"),
    }
}

pub(super) fn keys(keys: &[KeySeen], now: StoreTime) -> String {
    let mut rows = Vec::new();
    for KeySeen { key, configured } in keys {
        let mut why = why(key, now).into_iter();
        rows.push(vec![
            format!("{}/{}", key.provider, key.id),
            key.pool.to_string(),
            format!("{}{}", key.status.as_str(), if *configured { "" } else { ", not configured here" }),
            uses(key.in_use, key.max_concurrent_uses, key.learned_concurrent_uses),
            key.last_used_at_ms.map_or("never".into(), |at| ago(at, now)),
            why.next().unwrap_or_default(),
        ]);
        for more in why {
            let mut row = vec![String::new(); 5];
            row.push(more);
            rows.push(row);
        }
    }
    table("keys", &["KEY", "POOL", "STATUS", "IN USE", "LAST USED", "WHY"], rows)
}

/// Why a key is not lent, and until when, one line a cause.
fn why(key: &KeyView, now: StoreTime) -> Vec<String> {
    let end = key.cooldown_until_ms.map(|until| ends(until, now));
    let shown = key.evidence.as_ref().map(|seen| evidence(seen.status, seen.code.as_deref()));
    let shown_nothing = shown.is_none();
    let reason = key.reason.as_ref().map(|reason| plain(&format!("{reason}{}", shown.unwrap_or_default())));
    // Where it only shares its group's rest, that is said by the group's own line.
    let by_group = |cooldown: &CooldownView| {
        key.group.as_ref().is_some_and(|group| group.as_str() == cooldown.subject)
            && key.reason.as_ref() == Some(&cooldown.reason)
    };
    let said_below = end.is_none() && shown_nothing && key.cooldowns.iter().any(by_group);
    let own: Vec<_> = reason.filter(|_| !said_below).into_iter().chain(end).collect();
    let own = (!own.is_empty()).then(|| own.join(", "));
    let taught = |whose: &str, uses: u32| format!("{whose}: at most {uses} at once, as its answers taught");
    let learned = key.learned_concurrent_uses.map(|uses| taught(key.id.as_str(), uses));
    let of_group = key.group.as_ref().zip(key.group_concurrent_uses);
    let of_group = of_group.map(|(group, uses)| taught(group.as_str(), uses));
    let few = key.cooldowns.iter().take(FEW_RESTS).map(|cooldown| scoped(cooldown, now));
    let more = key.cooldowns.len().saturating_sub(FEW_RESTS);
    let more = (more > 0).then(|| format!("and {more} more: --json shows them"));
    own.into_iter().chain(learned).chain(of_group).chain(few).chain(more).collect()
}

/// ` (429 insufficient_quota)`
fn evidence(status: Option<u16>, code: Option<&str>) -> String {
    let status = status.map(|status| status.to_string());
    let shown: Vec<_> = status.as_deref().into_iter().chain(code).collect();
    if shown.is_empty() { String::new() } else { format!(" ({})", shown.join(" ")) }
}

fn scoped(cooldown: &CooldownView, now: StoreTime) -> String {
    let evidence = evidence(cooldown.status, cooldown.code.as_deref());
    plain(&format!("{}: {}{evidence}, {}", cooldown.subject, cooldown.reason, ends(cooldown.until_ms, now)))
}

pub(super) fn leases(leases: &[LeaseSeen], now: StoreTime) -> String {
    let rows = leases.iter().map(|LeaseSeen { lease, own }| {
        let end = match (lease.revoked, lease.expires_at_ms) {
            (true, _) => "revoked".into(),
            (false, Some(at)) => format!("in {}", duration(at.since(now))),
            (false, None) => "with its request".into(),
        };
        vec![
            lease.id.to_string(),
            format!("{}/{}", lease.provider, lease.key_id),
            lease.pool.to_string(),
            lease.app.to_string(),
            end,
            lease.fencing_token.0.to_string(),
            if *own { "this sidecar".into() } else { plain(&lease.owner.0) },
        ]
    });
    table("live leases", &["LEASE", "KEY", "POOL", "APP", "ENDS", "TOKEN", "OWNER"], rows.collect())
}

pub(super) fn apps(apps: &[AppSeen]) -> String {
    let named =
        |names: Vec<String>, none: &str| if names.is_empty() { none.into() } else { names.join(", ") };
    let rows = apps.iter().map(|app| {
        let by = app.token.then(|| "token".into()).into_iter().chain(app.uid.map(|uid| format!("uid {uid}")));
        vec![
            app.name.to_string(),
            named(by.collect(), "nothing"),
            named(app.pools.iter().map(ToString::to_string).collect(), "default"),
            named(app.providers.iter().map(ToString::to_string).collect(), "all"),
            if app.revoked { "revoked, until restored or a restart" } else { "may call" }.into(),
        ]
    });
    table("apps", &["APP", "KNOWN BY", "POOLS", "PROVIDERS", "STATUS"], rows.collect())
}

pub(super) fn check(key: &KeyPath, found: &CheckResult) -> String {
    let word = if found.ok { "good" } else { "not good" };
    let status = found.status.map(|status| format!(", HTTP {status}")).unwrap_or_default();
    let code = found.code.as_ref().map(|code| format!(" {code}")).unwrap_or_default();
    let note = found.note.as_ref().map(|note| format!("; {note}")).unwrap_or_default();
    let (message, class) = (&found.message, &found.class);
    plain(&format!("{}/{} is {word}: {message} ({class}{status}{code}){note}", key.provider, key.id)) + "\n"
}

pub(super) fn ready(reasons: &[String]) -> String {
    if reasons.is_empty() {
        return "ready\n".into();
    }
    let lines: Vec<_> = reasons.iter().map(|reason| format!("  {}\n", plain(reason))).collect();
    format!("not ready\n{}", lines.concat())
}

/// Columns as wide as their widest cell, two spaces apart; no space at a line's end.
fn table(what: &str, head: &[&str], rows: Vec<Vec<String>>) -> String {
    if rows.is_empty() {
        return format!("no {what}\n");
    }
    let head = head.iter().map(ToString::to_string).collect();
    let rows: Vec<Vec<String>> = std::iter::once(head).chain(rows).collect();
    let width = |column: usize| {
        rows.iter().filter_map(|row| row.get(column)).map(|cell| cell.chars().count()).max().unwrap_or(0)
    };
    let widths: Vec<_> = (0..rows[0].len()).map(width).collect();
    let mut page = String::new();
    for row in &rows {
        let cells = row.iter().zip(&widths).map(|(cell, width)| format!("{cell:<width$}"));
        let line = cells.collect::<Vec<_>>().join("  ");
        let _ = writeln!(page, "{}", line.trim_end());
    }
    page
}

fn ends(until: StoreTime, now: StoreTime) -> String {
    const YEAR: Duration = Duration::from_hours(24 * 365);
    match until.since(now) {
        Duration::ZERO => "over: heals at its next use".into(),
        left if left > YEAR => "until lifted by hand".into(),
        left => format!("ends in {}", duration(left)),
    }
}

fn ago(at: StoreTime, now: StoreTime) -> String {
    match now.since(at) {
        short if short < Duration::from_secs(1) => "now".into(),
        past => format!("{} ago", duration(past)),
    }
}

/// The two largest units; what is begun counts as whole, so that a wait is never shown as nothing.
pub(super) fn duration(time: Duration) -> String {
    let all = time.as_secs() + u64::from(time.subsec_nanos() > 0);
    let (days, hours, minutes, seconds) = (all / 86_400, all / 3600 % 24, all / 60 % 60, all % 60);
    let units = [(days, 'd'), (hours, 'h'), (minutes, 'm'), (seconds, 's')];
    let first = units.iter().position(|(count, _)| *count > 0).unwrap_or(3);
    let shown =
        units[first..].iter().take(2).filter(|(count, unit)| *count > 0 || (all == 0 && *unit == 's'));
    shown.map(|(count, unit)| format!("{count}{unit}")).collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a test that fails may panic
mod tests {
    use super::*;
    use crate::control::admin::RankSeen;
    use crate::model::{GroupName, KeyId, KeyStatus, PoolName, ProviderName};
    use crate::store::EvidenceView;

    #[test]
    fn a_time_is_shown_by_its_two_largest_units() {
        for (ms, shown) in [
            (0, "0s"),
            (1, "1s"),
            (42_000, "42s"),
            (60_000, "1m"),
            (190_000, "3m 10s"),
            (3_600_000, "1h"),
            (3_605_000, "1h"),
            (90_000_000, "1d 1h"),
        ] {
            assert_eq!(duration(Duration::from_millis(ms)), shown, "{ms}");
        }
        assert_eq!(ends(StoreTime::NEVER, StoreTime(5)), "until lifted by hand");
        assert_eq!(ends(StoreTime(5), StoreTime(5)), "over: heals at its next use");
    }

    #[test]
    fn a_key_that_rests_says_why_and_until_when_and_cannot_move_the_cursor() {
        let key = KeyView {
            id: KeyId::parse("openai-a").unwrap(),
            provider: ProviderName::parse("openai").unwrap(),
            pool: PoolName::default_pool(),
            group: Some(GroupName::parse("org").unwrap()),
            status: KeyStatus::RateLimited,
            reason: Some("rate".into()),
            cooldown_since_ms: None,
            cooldown_until_ms: Some(StoreTime(42_000)),
            evidence: Some(EvidenceView { status: Some(429), code: Some("evil\u{1b}[2J".into()) }),
            in_use: 3,
            max_concurrent_uses: 8,
            learned_concurrent_uses: Some(3),
            group_concurrent_uses: Some(5),
            last_used_at_ms: None,
            cooldowns: vec![CooldownView {
                subject: "openai-a|gpt-4o".into(),
                reason: "rate".into(),
                since_ms: StoreTime(0),
                until_ms: StoreTime(190_000),
                status: Some(429),
                code: Some("evil\u{1b}[2J".into()),
            }],
        };
        let expected = "\
KEY              POOL     STATUS        IN USE    LAST USED  WHY
openai/openai-a  default  rate_limited  3/3 of 8  never      rate (429 evil?[2J), ends in 42s
                                                             openai-a: at most 3 at once, as its answers taught
                                                             org: at most 5 at once, as its answers taught
                                                             openai-a|gpt-4o: rate (429 evil?[2J), ends in 3m 10s
";
        assert_eq!(keys(&[KeySeen { key, configured: true }], StoreTime(0)), expected);
    }

    #[test]
    fn an_empty_list_says_that_it_is_empty() {
        assert_eq!(keys(&[], StoreTime(0)), "no keys\n");
        assert_eq!(leases(&[], StoreTime(0)), "no live leases\n");
    }

    #[test]
    fn a_ranking_stands_below_its_weights_with_what_is_taken_off_as_less_than_nothing() {
        let terms = |error: f64| TermsSeen {
            capacity: 0.75,
            idle: 0.0,
            success: 1.0 - error,
            error,
            rate_limit: 0.0,
            cooldown: 0.0,
            freshness: 0.5,
        };
        let key = |id: &str, error, rests_ms| RankSeen {
            provider: ProviderName::parse("openai").unwrap(),
            key: KeyId::parse(id).unwrap(),
            score: 1.5,
            terms: terms(error),
            in_flight: 2,
            first_byte_ms: Some(312.4),
            rests_ms,
        };
        let seen = RankingSeen {
            strategy: "weighted".into(),
            weights: TermsSeen { idle: 0.5, rate_limit: 1.0, cooldown: 1.0, freshness: 2.0, ..terms(1.0) },
            jitter: 0.05,
            keys: vec![key("a", 0.0, None), key("b", 0.25, Some(61_000))],
        };
        let expected = "
ranking by weighted, as this sidecar sees its keys; jitter up to 0.05
KEY       SCORE  CAPACITY  IDLE  SUCCESS  ERROR  RATE LIMIT  COOLDOWN  FRESHNESS  IN FLIGHT  FIRST BYTE  RESTS
weight           0.75      0.50  0.00     -1.00  -1.00       -1.00     -2.00
openai/a  1.50   0.75      0.00  1.00     0.00   0.00        0.00      -0.50      2          312ms
openai/b  1.50   0.75      0.00  0.75     -0.25  0.00        0.00      -0.50      2          312ms       1m 1s
";
        assert_eq!(ranking(&seen), expected);
        let other = RankingSeen { strategy: "fill_first".into(), keys: Vec::new(), ..seen };
        assert!(ranking(&other).contains("ranking by fill_first, which does not look at the score"));
    }
}

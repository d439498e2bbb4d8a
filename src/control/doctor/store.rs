//! The lease store: whether it answers, how fast, by which clock, and what it warns of.

use std::time::{Duration, Instant, SystemTime};

use tokio::time::timeout;

use super::Check;
use super::network::{CLOCK_GAP, gap_in_words};
use crate::config::{Config, StoreUrl};
use crate::model::LeaseId;
use crate::store::{Release, Store, StoreError};

/// The bound of one call.
const CALL: Duration = Duration::from_secs(3);
/// Calls whose time is taken.
const CALLS: usize = 5;
/// Each request waits for one call; from here on people notice.
const SLOW: Duration = Duration::from_millis(50);

/// Looks at the store.
pub(super) async fn examine(
    config: &Config,
    store: &Result<std::sync::Arc<dyn Store>, String>,
) -> Vec<Check> {
    let url = config.store.url.to_string();
    let store = match store {
        Ok(store) => store,
        Err(why) => return vec![Check::fail("store", format!("{url}: {why}"), advice(config))],
    };
    let took = match times(&**store).await {
        Ok(took) => took,
        Err(error) => return vec![Check::fail("store", format!("{url}: {error}"), advice(config))],
    };
    if let Err(error) = write(config, &**store).await {
        return vec![Check::fail("store", format!("{url} takes no change: {error}"), advice(config))];
    }
    let found = format!("{url} answers in {:.1} ms", took.as_secs_f64() * 1000.0);
    let mut checks = vec![if took > SLOW {
        Check::warn("store", found, "each request waits for one call to the store: bring it nearer")
    } else {
        Check::ok("store", found)
    }];
    checks.extend(
        store
            .concerns()
            .into_iter()
            .map(|concern| Check::warn("store", "it works, and was warned of", concern)),
    );
    checks.extend(clock(config, &**store));
    checks
}

/// The median time of a call.
async fn times(store: &dyn Store) -> Result<Duration, StoreError> {
    let mut times = Vec::with_capacity(CALLS);
    for _ in 0..CALLS {
        let begun = Instant::now();
        bounded(store.ping()).await?;
        times.push(begun.elapsed());
    }
    times.sort_unstable();
    Ok(times[CALLS / 2])
}

/// Gives back a lease that nobody has: it goes the way of every change, and changes nothing.
async fn write(config: &Config, store: &dyn Store) -> Result<(), StoreError> {
    let Some(key) = config.keys.first() else { return Ok(()) };
    let release = Release {
        provider: key.provider.clone(),
        lease: LeaseId::fresh(),
        key: key.id.clone(),
        pool: key.pool.clone(),
        group: key.group.clone(),
    };
    bounded(store.release(vec![release])).await.map(|_| ())
}

async fn bounded<T>(call: impl Future<Output = Result<T, StoreError>>) -> Result<T, StoreError> {
    timeout(CALL, call).await.unwrap_or(Err(StoreError::TimedOut(CALL)))
}

/// A shared store's clock against this machine's. The call before told it.
fn clock(config: &Config, store: &dyn Store) -> Option<Check> {
    let here = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    let shared = matches!(config.store.url, StoreUrl::Redis(_));
    shared.then(|| compared(here, Duration::from_millis(store.now().0)))
}

fn compared(here: Duration, there: Duration) -> Check {
    let name = "clock store";
    match gap_in_words(here, there) {
        None => Check::ok(name, "the store's clock is this machine's, within a second"),
        Some((gap, words)) if gap <= CLOCK_GAP => {
            Check::ok(name, format!("this machine's clock is {words} the store's"))
        }
        Some((_, words)) => Check::warn(
            name,
            format!("this machine's clock is {words} the store's"),
            "set both by NTP: leases go by the store's clock, waits that a provider names as a time of day by \
             this machine's",
        ),
    }
}

fn advice(config: &Config) -> &'static str {
    match &config.store.url {
        StoreUrl::Memory => "restart lessor, and report this",
        StoreUrl::Sqlite(_) => {
            "see that the directory is on a local disk with room and lessor's user may write there, or correct \
             store.url"
        }
        StoreUrl::Redis(_) => {
            "see that it runs, that store.url, the user and the password are right, and that the user has the \
             rights of the README's ACL line; until then no key is lent"
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::control::doctor::Verdict;

    #[test]
    fn a_stores_clock_that_is_off_by_more_than_five_seconds_is_warned_of_either_way() {
        let at = Duration::from_secs;
        for (here, there, verdict) in [
            (100, 100, Verdict::Ok),
            (105, 100, Verdict::Ok),
            (106, 100, Verdict::Warn),
            (100, 4000, Verdict::Warn),
        ] {
            assert_eq!(compared(at(here), at(there)).verdict, verdict, "{here} {there}");
        }
    }
}

//! Keeping leases alive: one call a provider and interval for all of them, and the local deadline.
//!
//! The deadline is on the monotonic clock: the time before the last successful renewal was sent, plus
//! the TTL, less a margin. A lease that passes it is given up without asking anyone.

use std::collections::HashMap;
use std::sync::{Arc, Weak};
use std::time::Duration;

use futures_util::future::join_all;
use tokio::sync::{Notify, broadcast};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::model::ProviderName;
use crate::store::{Epoch, Renew, RenewAnswer, Renewed, StoreError, StoreEvent};

use super::live::Live;
use super::{Inner, lock};

/// Leases renewed in one call; more go in further calls.
const BATCH: usize = 1000;

/// What the heartbeat believes of one provider's store.
#[derive(Debug, Default, Clone)]
struct Belief {
    epoch: Option<Epoch>,
    /// The next call re-registers what the store does not know: its data, or the way to it, changed.
    reassert: bool,
}

/// Renews until stopped, or until nobody is left to renew for.
/// `bounded` rings when a lease came that has an end of its own.
pub(super) async fn run(leases: Weak<Inner>, bounded: Arc<Notify>, stop: CancellationToken, every: Duration) {
    let mut beliefs: HashMap<ProviderName, Belief> = HashMap::new();
    let mut tick = Instant::now() + every;
    loop {
        // Not held while it sleeps: the last user's leaving ends this task.
        let Some(end) = leases.upgrade().map(|inner| next_end(&inner)) else { return };
        let wake = end.map_or(tick, |end| end.min(tick));
        tokio::select! {
            biased;
            () = stop.cancelled() => return,
            () = tokio::time::sleep_until(wake) => {}
            () = bounded.notified() => continue,
        }
        let Some(inner) = leases.upgrade() else { return };
        let now = Instant::now();
        end_overdue(&inner, now);
        if now >= tick {
            // From when it was due, so that slow calls do not stretch the interval.
            tick = (tick + every).max(now);
            beat(&inner, &mut beliefs).await;
        }
    }
}

/// The earliest end of any live lease: its local deadline, or the bound of its life.
fn next_end(inner: &Inner) -> Option<Instant> {
    let live = lock(&inner.live);
    live.values()
        .filter(|live| !live.is_lost())
        .flat_map(|live| [live.deadline(), live.ends_at])
        .flatten()
        .min()
}

fn end_overdue(inner: &Inner, now: Instant) {
    for live in lock(&inner.live).values() {
        if live.expire(now) {
            inner.metrics.expired();
            inner.metrics.lost();
            tracing::warn!(lease = %live.id, key = %live.key, "a lease could not be renewed in time");
        }
        if live.ends_at.is_some_and(|end| now >= end) && live.mark_too_long() {
            tracing::info!(lease = %live.id, key = %live.key, "a lease reached lease.max_duration");
        }
    }
}

/// Renews all live leases, all providers at once.
async fn beat(inner: &Arc<Inner>, beliefs: &mut HashMap<ProviderName, Belief>) {
    let mut by_provider: HashMap<ProviderName, Vec<Arc<Live>>> = HashMap::new();
    for live in lock(&inner.live).values().filter(|live| !live.is_lost()) {
        by_provider.entry(live.provider.clone()).or_default().push(live.clone());
    }
    let renewing = by_provider.into_iter().map(|(provider, leases)| {
        let belief = beliefs.get(&provider).cloned().unwrap_or_default();
        async move { (provider.clone(), renew(inner, &provider, belief, leases).await) }
    });
    for (provider, belief) in join_all(renewing).await {
        beliefs.insert(provider, belief);
    }
}

/// Renews one provider's leases, and once more, with `reassert`, when the store turns out to have lost
/// its data.
async fn renew(inner: &Inner, provider: &ProviderName, mut belief: Belief, leases: Vec<Arc<Live>>) -> Belief {
    for batch in leases.chunks(BATCH) {
        for _ in 0..2 {
            if belief.reassert {
                tell_keys(inner, provider).await;
            }
            let sent = Instant::now();
            match call(inner, provider, &belief, batch).await {
                Ok(renewed) => {
                    inner.note_store(None);
                    let moved = belief.epoch.as_ref().is_some_and(|epoch| *epoch != renewed.epoch);
                    let asked_again = belief.reassert;
                    belief.epoch = Some(renewed.epoch.clone());
                    belief.reassert = moved && !asked_again;
                    if belief.reassert {
                        continue;
                    }
                    apply(inner, batch, &renewed, sent);
                }
                Err(error) => {
                    inner.note_store(Some(&error));
                    inner.metrics.heartbeat_failed();
                    belief.reassert = true;
                }
            }
            break;
        }
    }
    belief
}

/// A store that lost its data has lost the caps too, and re-registers under a cap of 1 until it is told.
async fn tell_keys(inner: &Inner, provider: &ProviderName) {
    let Some(repair) = inner.repair.get() else { return };
    let bound = inner.config.heartbeat.min(inner.config.ttl / 3);
    match tokio::time::timeout(bound, inner.store.sync_keys(repair(provider))).await {
        Ok(Ok(())) => {}
        Ok(Err(error)) => inner.note_store(Some(&error)),
        Err(_) => inner.note_store(Some(&StoreError::TimedOut(bound))),
    }
}

async fn call(
    inner: &Inner,
    provider: &ProviderName,
    belief: &Belief,
    batch: &[Arc<Live>],
) -> Result<Renewed, StoreError> {
    let bound = inner.config.heartbeat.min(inner.config.ttl / 3);
    let ask = Renew {
        provider: provider.clone(),
        owner: inner.owner.clone(),
        epoch: belief.epoch.clone(),
        leases: batch.iter().map(|live| live.held()).collect(),
        ttl: inner.config.ttl,
        deadline: inner.store.now().plus(bound),
        reassert: belief.reassert,
    };
    let answer = tokio::time::timeout(bound, inner.store.renew(ask)).await;
    let renewed = answer.unwrap_or(Err(StoreError::TimedOut(bound)))?;
    if renewed.answers.len() != batch.len() {
        return Err(StoreError::Nonsense(format!(
            "{} answers to {} renewals",
            renewed.answers.len(),
            batch.len()
        )));
    }
    Ok(renewed)
}

fn apply(inner: &Inner, batch: &[Arc<Live>], renewed: &Renewed, sent: Instant) {
    let until = sent + inner.config.ttl.saturating_sub(inner.config.margin());
    for (live, answer) in batch.iter().zip(&renewed.answers) {
        match answer {
            RenewAnswer::Renewed(_) if inner.store.leases_expire() => live.renewed_until(until),
            RenewAnswer::Lost if lock(&inner.live).contains_key(&live.id) => {
                inner.metrics.lost();
                live.mark_lost();
                tracing::warn!(lease = %live.id, key = %live.key, "the store does not know a lease any more");
            }
            // A lost one that began to be released meanwhile is nobody's any more.
            RenewAnswer::Renewed(_) | RenewAnswer::Late | RenewAnswer::Lost => {}
        }
    }
}

/// Passes the store's events on to who waits for them.
pub(super) async fn watch_events(
    leases: Weak<Inner>,
    mut events: broadcast::Receiver<StoreEvent>,
    stop: CancellationToken,
) {
    loop {
        let event = tokio::select! {
            biased;
            () = stop.cancelled() => return,
            event = events.recv() => event,
        };
        let Some(inner) = leases.upgrade() else { return };
        match event {
            Ok(StoreEvent::Freed(provider, key)) => inner.freed(&provider, &key),
            Ok(StoreEvent::Changed(provider)) => inner.ring_heads(&provider),
            Ok(StoreEvent::Revoked(_, lease)) => {
                let live = lock(&inner.live).get(&lease).cloned();
                if live.is_some_and(|live| live.mark_revoked()) {
                    inner.metrics.lost();
                    tracing::info!(%lease, "a lease was revoked");
                }
            }
            Err(broadcast::error::RecvError::Lagged(_)) => {
                // Missed some: everybody looks again.
                for line in lock(&inner.lines).values() {
                    line.ring_heads();
                }
            }
            Err(broadcast::error::RecvError::Closed) => return,
        }
    }
}

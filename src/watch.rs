//! What happens to keys, leases and the store, put together: for the order in which keys are tried, and as
//! events for people.
//!
//! What the lease room learns on its way comes here at once. What others did to the store is found by
//! looking: when the store says that something changed, when a rest is due to end, and every half minute, for
//! a rest that another sidecar's report began is told by nobody.

use std::collections::HashSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures_util::future::join_all;
use tokio::sync::Notify;
use tokio::sync::broadcast::error::RecvError;
use tokio::time::{Instant, sleep_until, timeout};
use tokio_util::sync::CancellationToken;

use crate::events::{Events, What};
use crate::lease::{Gone, Lost, Witness};
use crate::model::{Class, GroupName, KeyId, KeyStatus, LeaseId, ModelName, ProviderName, Scope};
use crate::route::ring::Ring;
use crate::store::{Reason, Report, Reported, Snapshot, Store, StoreError, StoreEvent, StoreTime};

mod book;

use book::{Book, Rest};

/// How long one look may take.
const LIMIT: Duration = Duration::from_secs(5);
/// How soon after the first word of a change its provider is looked at: changes come in bursts.
const SETTLE: Duration = Duration::from_millis(20);
/// How often one provider is looked at, at most.
const PAUSE: Duration = Duration::from_millis(250);
/// How often all are looked at.
const ROUND: Duration = Duration::from_secs(30);
/// A key that waits for a person or a check is tried last for so long; a change is told sooner.
const UNUSABLE: Duration = Duration::from_secs(10);

/// See the module. Clones share everything.
#[derive(Clone)]
pub struct Watcher(Arc<Inner>);

struct Inner {
    store: Arc<dyn Store>,
    ring: Arc<Ring>,
    events: Events,
    book: Mutex<Book>,
    /// Providers of which something may have changed.
    dirty: Mutex<HashSet<ProviderName>>,
    nudge: Notify,
}

impl Watcher {
    /// Does nothing yet.
    pub fn new(store: Arc<dyn Store>, ring: Arc<Ring>, events: Events) -> Self {
        let (book, dirty) = (Mutex::default(), Mutex::default());
        Self(Arc::new(Inner { store, ring, events, book, dirty, nudge: Notify::new() }))
    }

    /// Looks at every provider once: what is so at the start is no event. A store that fails is looked at
    /// when it answers.
    pub async fn begin(&self) {
        let all = self.0.ring.all();
        join_all(all.iter().map(|keys| self.0.look(&keys.provider.name))).await;
    }

    /// Somebody else looked, and `asked` then: what a person just changed is told before he hears that it is
    /// done, so that it is also seen where the next change follows at once.
    pub fn saw(&self, provider: &ProviderName, seen: &Snapshot, asked: StoreTime) {
        let mut book = self.0.book();
        let happened = book.saw(provider, seen, asked, self.0.store.now());
        self.0.events.tell_all(happened);
    }

    /// The task; ends with `stop`.
    pub async fn run(self, stop: CancellationToken) {
        let inner = &*self.0;
        let mut events = inner.store.subscribe();
        let mut round = Instant::now() + ROUND;
        let mut next_look: Option<Instant> = None;
        loop {
            let end =
                inner.book().next_end().map(|end| Instant::now() + end.since(inner.store.now()) + SETTLE);
            let due = [next_look, end].into_iter().flatten().fold(round, Instant::min);
            tokio::select! {
                biased;
                () = stop.cancelled() => return,
                event = events.recv() => match event {
                    Ok(StoreEvent::Changed(provider)) => {
                        // What was lifted must not go on ranking last.
                        if let Some(keys) = inner.ring.of(provider.as_str()) {
                            keys.forget_rests();
                        }
                        inner.mark(&provider);
                    }
                    Ok(StoreEvent::Reconnected) | Err(RecvError::Lagged(_)) => inner.mark_all(),
                    Ok(_) => {}
                    Err(RecvError::Closed) => return,
                },
                () = inner.nudge.notified() => {}
                () = sleep_until(due) => {
                    let now = Instant::now();
                    if now >= round {
                        inner.mark_all();
                        round = now + ROUND;
                    }
                    inner.mark_ended();
                    for provider in inner.take_marked() {
                        inner.look(&provider).await;
                    }
                    // The next look keeps its distance from this one, however much there is to see.
                    next_look = inner.any_marked().then_some(now + PAUSE);
                    continue;
                }
            }
            if inner.any_marked() && next_look.is_none() {
                next_look = Some(Instant::now() + SETTLE);
            }
        }
    }
}

impl Inner {
    /// A panic while it is held would be a mistake of this room; an event too few or too many is better than
    /// none from then on.
    fn book(&self) -> MutexGuard<'_, Book> {
        self.book.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn dirty(&self) -> MutexGuard<'_, HashSet<ProviderName>> {
        self.dirty.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn mark(&self, provider: &ProviderName) {
        if self.dirty().insert(provider.clone()) {
            self.nudge.notify_one();
        }
    }

    fn mark_all(&self) {
        for keys in self.ring.all() {
            self.mark(&keys.provider.name);
        }
    }

    /// Providers of which a rest should be over.
    fn mark_ended(&self) {
        let ended = self.book().ended(self.store.now());
        self.dirty().extend(ended);
    }

    fn any_marked(&self) -> bool {
        !self.dirty().is_empty()
    }

    fn take_marked(&self) -> Vec<ProviderName> {
        self.dirty().drain().collect()
    }

    /// Told once, whoever finds it first.
    fn grace(&self, book: &mut Book, provider: &ProviderName, until: StoreTime) {
        let Some(began) = book.grace(provider, until) else { return };
        let rest = until.since(self.store.now());
        tracing::warn!(
            %provider, ends_in_ms = u64::try_from(rest.as_millis()).unwrap_or(u64::MAX),
            "the store has just lost its data or failed over: until the grace ends keys are lent only to streams \
             that are already open"
        );
        self.events.tell(began);
    }

    async fn look(&self, provider: &ProviderName) {
        let asked = self.store.now();
        let answer = timeout(LIMIT, self.store.snapshot(provider.clone())).await;
        let (mut book, now) = (self.book(), self.store.now());
        let found = match &answer {
            Ok(Ok(seen)) => book.saw(provider, seen, asked, now),
            _ => Vec::new(), // a store that fails tells so itself
        };
        // What should have ended by our clock, and has not by the store's, is asked for again in a while.
        book.put_off(provider, now.plus(if matches!(answer, Ok(Ok(_))) { PAUSE } else { LIMIT }));
        // Told while the book is held, so that events come in the order of what they tell.
        self.events.tell_all(found);
        if let Ok(Ok(Snapshot { grace_until_ms: Some(until), .. })) = answer {
            self.grace(&mut book, provider, until);
        }
    }
}

impl Witness for Watcher {
    fn passed_over(&self, provider: &ProviderName, model: Option<&ModelName>, key: &KeyId, why: Reason) {
        let inner = &*self.0;
        let Some(keys) = inner.ring.of(provider.as_str()) else { return };
        match why {
            Reason::Cooling { until, .. } => {
                keys.rests(key, Scope::KeyModel, model, until.since(inner.store.now()));
                if !inner.book().knows_end(provider, until) {
                    inner.mark(provider);
                }
            }
            Reason::Unusable(status) => {
                keys.rests(key, Scope::Key, None, UNUSABLE);
                if !inner.book().knows_status(provider, key, status) {
                    inner.mark(provider);
                }
            }
            Reason::NotMember | Reason::NoSettings | Reason::Full => {}
        }
    }

    fn in_grace(&self, provider: &ProviderName, until: StoreTime) {
        self.0.grace(&mut self.0.book(), provider, until);
    }

    fn registered_again(&self, provider: &ProviderName) {
        self.0.mark(provider);
    }

    fn reported(&self, report: &Report, found: &Reported) {
        let inner = &*self.0;
        let (provider, now) = (&report.provider, inner.store.now());
        let is_old = inner.ring.is_old(provider, &report.key, report.fingerprint);
        if is_old && report.outcome.rests_secret_alone(report.group.as_ref()) {
            return;
        }
        let until = found.cooling_until.filter(|until| *until != StoreTime::NEVER);
        say_refusal(report, until.map(|until| until.since(now)));
        let mut book = inner.book();
        if let (Some(until), Some((subject, own))) = (until, report.subject()) {
            if let Some(keys) = inner.ring.of(provider.as_str()) {
                keys.rests(
                    &report.key,
                    report.outcome.blamed_scope(),
                    report.model.as_ref(),
                    until.since(now),
                );
            }
            let rest = Rest { reason: report.outcome.class.as_str().into(), until, noted: now };
            let began = book.rests(provider, (own, subject), rest, &report.outcome);
            inner.events.tell_all(began);
            if report.rests_group() {
                inner.mark(provider); // every other key of the group has another status, too
            }
            inner.nudge.notify_one(); // it may end before all others
        }
        let Some(status) = found.status.filter(|_| !is_old) else { return };
        if status == KeyStatus::Available {
            // Of itself, while its group may rest: a look tells both.
            if !book.knows_status(provider, &report.key, status) {
                inner.mark(provider);
            }
        } else {
            let reason = report.outcome.class.as_str();
            let changed = book.has_status(provider, &report.key, status, Some(reason), now);
            inner.events.tell_all(changed);
        }
    }

    fn not_reported(&self, report: &Report) {
        say_refusal(report, None);
    }

    fn lost(&self, gone: &Gone) {
        let Gone { provider, lease, key, pool, app, why } = gone.clone();
        let reason = match why {
            Lost::Revoked => {
                let (key, app) = (Some(key), Some(app));
                self.0.events.tell(What::LeaseRevoked { provider, lease, key, app });
                return;
            }
            Lost::Expired => "expired",
            Lost::Unknown => "unknown",
            Lost::TooLong => "too_long",
        };
        self.0.events.tell(What::LeaseLost { provider, lease, key, pool, app, reason: reason.into() });
    }

    fn revoked_elsewhere(&self, provider: &ProviderName, lease: LeaseId) {
        self.0.events.tell(What::LeaseRevoked { provider: provider.clone(), lease, key: None, app: None });
    }

    fn store_answers(&self, failed: Option<&StoreError>) {
        let store = self.0.store.kind().to_owned();
        self.0.events.tell(match failed {
            Some(error) => What::StoreAway { store, reason: error.to_string() },
            None => What::StoreBack { store },
        });
    }
}

/// The log's line of a refusal: what it is about and, where the store took it, how long that rests now. Only
/// the store knows, for it lengthens what was named, doubles what was not, and keeps what ends later.
fn say_refusal(report: &Report, rest: Option<Duration>) {
    let outcome = &report.outcome;
    if !Class::RESTS.contains(&outcome.class) {
        return;
    }
    tracing::info!(
        provider = %report.provider, key = %report.key, group = report.group.as_ref().map(GroupName::as_str),
        class = outcome.class.as_str(), scope = outcome.blamed_scope().as_str(),
        status = outcome.status, code = outcome.code.as_deref(),
        rests_ms = rest.map(|rest| u64::try_from(rest.as_millis()).unwrap_or(u64::MAX)),
        "the provider refused a request"
    );
}

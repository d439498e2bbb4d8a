//! What happens to keys, leases, apps and the store, for whoever wants to follow it.
//!
//! The last thousand are kept, and nothing else: who follows has a place in them and no queue of its own. So
//! any number of slow readers costs nothing, and one that falls behind by more than is kept loses events and
//! is told how many. Every room may tell; nobody here knows a room. There is no secret in an event, for
//! none of its fields can hold one.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};
use tokio::sync::watch;

use crate::model::{AppName, KeyId, KeyStatus, LeaseId, PoolName, ProviderName};

/// How many events are kept.
pub const KEPT: usize = 1000;

/// What happened.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum What {
    /// A key has another status.
    KeyStatus {
        /// Whose key.
        provider: ProviderName,
        /// The key.
        key: KeyId,
        /// Its status before.
        from: KeyStatus,
        /// Its status now.
        to: KeyStatus,
        /// The class that set it, or who.
        reason: Option<String>,
    },
    /// Something rests.
    CooldownBegan {
        /// Whose.
        provider: ProviderName,
        /// `key`, `key|model`, `group`, `group|model`, `provider` or `provider|model`.
        subject: String,
        /// The class that set it.
        reason: String,
        /// When it ends, in ms of the store's clock.
        until_ms: u64,
        /// The status that was evidence.
        status: Option<u16>,
        /// The body's code that was evidence.
        code: Option<String>,
    },
    /// It rests no more.
    CooldownEnded {
        /// Whose.
        provider: ProviderName,
        /// As when it began.
        subject: String,
        /// The class that had set it.
        reason: String,
    },
    /// A lease ended before its request did.
    LeaseLost {
        /// Whose key.
        provider: ProviderName,
        /// The lease.
        lease: LeaseId,
        /// The key.
        key: KeyId,
        /// Its pool.
        pool: PoolName,
        /// Who had it.
        app: AppName,
        /// `expired` (not renewed in time), `unknown` (the store does not know it), `too_long`
        /// (`lease.max_duration`).
        reason: String,
    },
    /// A person revoked a lease. Of another sidecar's only its id is known.
    LeaseRevoked {
        /// Whose key.
        provider: ProviderName,
        /// The lease.
        lease: LeaseId,
        /// The key.
        key: Option<KeyId>,
        /// Who had it.
        app: Option<AppName>,
    },
    /// The store does not answer: no key is lent.
    StoreAway {
        /// What it is.
        store: String,
        /// What was seen.
        reason: String,
    },
    /// The store answers again.
    StoreBack {
        /// What it is.
        store: String,
    },
    /// The store lost its data or failed over: until then keys are lent only to streams that are already open.
    GraceBegan {
        /// Whose keys.
        provider: ProviderName,
        /// When it ends, in ms of the store's clock.
        until_ms: u64,
    },
    /// A person revoked an app.
    AppRevoked {
        /// The app.
        app: AppName,
    },
    /// A person let it in again.
    AppRestored {
        /// The app.
        app: AppName,
    },
    /// Another configuration is in use.
    ConfigReloaded {
        /// Where it came from.
        config: String,
    },
    /// The configuration on disk is refused, and the one before stays in use.
    ConfigRefused {
        /// Where it came from.
        config: String,
        /// The first line of why.
        error: String,
    },
}

/// One event, in its place.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Event {
    /// Rises by one with each event of this process; with the process's own mark, see [`EventId`].
    pub id: EventId,
    /// When, in ms since the Unix epoch, by this machine's clock.
    pub at_ms: u64,
    /// What.
    #[serde(flatten)]
    pub what: What,
}

/// Where an event stands: the mark of the process that told it, and its number there. As text `mark-number`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EventId {
    mark: u32,
    number: u64,
}

impl std::fmt::Display for EventId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:08x}-{}", self.mark, self.number)
    }
}

impl std::str::FromStr for EventId {
    type Err = ();
    fn from_str(text: &str) -> Result<Self, ()> {
        let (mark, number) = text.split_once('-').ok_or(())?;
        let mark = u32::from_str_radix(mark, 16).map_err(|_| ())?;
        Ok(Self { mark, number: number.parse().map_err(|_| ())? })
    }
}

impl Serialize for EventId {
    fn serialize<S: serde::Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for EventId {
    fn deserialize<D: serde::Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        String::deserialize(from)?.parse().map_err(|()| serde::de::Error::custom("no event's id"))
    }
}

/// Where to begin to read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum From {
    /// With the oldest that is kept.
    Start,
    /// With what happens from now on.
    Now,
    /// Behind this one.
    After(EventId),
}

/// What a reader finds next.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Next {
    /// An event.
    Event(Arc<Event>),
    /// So many were not kept long enough.
    Missed(u64),
    /// The last one read was another process's: nobody can say what happened since.
    Unknown,
}

/// All events of one process; clones share them.
#[derive(Clone)]
pub struct Events(Arc<Inner>);

struct Inner {
    mark: u32,
    kept: Mutex<VecDeque<Arc<Event>>>,
    /// How many were told so far.
    told: watch::Sender<u64>,
}

impl std::fmt::Debug for Events {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Events").field("told", &*self.0.told.borrow()).finish_non_exhaustive()
    }
}

impl Default for Events {
    fn default() -> Self {
        Self::new()
    }
}

impl Events {
    /// None yet.
    pub fn new() -> Self {
        let kept = Mutex::new(VecDeque::with_capacity(KEPT));
        Self(Arc::new(Inner { mark: rand::random(), kept, told: watch::Sender::new(0) }))
    }

    /// Something happened.
    pub fn tell(&self, what: What) {
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let at_ms = u64::try_from(since.as_millis()).unwrap_or(u64::MAX);
        let mut kept = self.kept();
        let number = *self.0.told.borrow() + 1;
        if kept.len() == KEPT {
            kept.pop_front();
        }
        let id = EventId { mark: self.0.mark, number };
        kept.push_back(Arc::new(Event { id, at_ms, what }));
        // Under the lock, so that numbers are told in order.
        self.0.told.send_replace(number);
    }

    /// All of these happened, in this order.
    pub fn tell_all(&self, all: impl IntoIterator<Item = What>) {
        for what in all {
            self.tell(what);
        }
    }

    /// A place from which events are read, one after another.
    pub fn read(&self, from: From) -> Reader {
        let mut told = self.0.told.subscribe();
        let (read, stranger) = match from {
            From::Start => (self.before_first(), false),
            From::Now => (*told.borrow_and_update(), false),
            From::After(id) if id.mark == self.0.mark => (id.number.min(*told.borrow()), false),
            From::After(_) => (self.before_first(), true),
        };
        Reader { events: self.clone(), told, read, stranger }
    }

    fn before_first(&self) -> u64 {
        self.kept().front().map_or(*self.0.told.borrow(), |first| first.id.number - 1)
    }

    /// A panic while it is held would be a mistake here; the events are whole in any case.
    fn kept(&self) -> MutexGuard<'_, VecDeque<Arc<Event>>> {
        self.0.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A place among the events.
#[derive(Debug)]
pub struct Reader {
    events: Events,
    told: watch::Receiver<u64>,
    /// The number of the last one read.
    read: u64,
    /// It comes from another process, and was not told so yet.
    stranger: bool,
}

impl Reader {
    /// What is there already; `None`: nothing more yet.
    pub fn ready(&mut self) -> Option<Next> {
        if std::mem::take(&mut self.stranger) {
            return Some(Next::Unknown);
        }
        let kept = self.events.kept();
        let first = kept.front()?.id.number;
        if self.read + 1 < first {
            let missed = first - 1 - self.read;
            self.read = first - 1;
            return Some(Next::Missed(missed));
        }
        // Numbers have no gaps, so the place is known.
        let at = usize::try_from(self.read + 1 - first).ok()?;
        let event = kept.get(at)?.clone();
        drop(kept);
        self.read += 1;
        Some(Next::Event(event))
    }

    /// What is there, or what happens next; `None` never comes while `Events` lives. Cancel safe.
    pub async fn next(&mut self) -> Option<Next> {
        loop {
            // Marked as seen before looking: what is told after the look wakes the wait below.
            self.told.mark_unchanged();
            if let Some(next) = self.ready() {
                return Some(next);
            }
            self.told.changed().await.ok()?;
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a test that fails may panic
mod tests {
    use super::*;

    fn app(nth: u64) -> What {
        What::AppRevoked { app: AppName::parse(&format!("app-{nth}")).unwrap() }
    }

    fn numbers(reader: &mut Reader) -> (Vec<u64>, Vec<Option<u64>>) {
        let (mut numbers, mut missed) = (Vec::new(), Vec::new());
        while let Some(next) = reader.ready() {
            match next {
                Next::Event(event) => {
                    assert_eq!(event.what, app(event.id.number));
                    numbers.push(event.id.number);
                }
                Next::Missed(count) => missed.push(Some(count)),
                Next::Unknown => missed.push(None),
            }
        }
        (numbers, missed)
    }

    #[test]
    fn who_reads_from_the_start_sees_all_that_is_kept_and_who_reads_from_now_only_what_comes() {
        let events = Events::new();
        (1..=3).for_each(|nth| events.tell(app(nth)));
        let (mut start, mut now) = (events.read(From::Start), events.read(From::Now));
        events.tell(app(4));
        assert_eq!(numbers(&mut start), (vec![1, 2, 3, 4], vec![]));
        assert_eq!(numbers(&mut now), (vec![4], vec![]));
        assert_eq!(numbers(&mut start), (vec![], vec![]), "each once");
    }

    #[test]
    fn who_reads_too_slowly_loses_the_oldest_and_is_told_how_many() {
        let events = Events::new();
        let kept = KEPT as u64;
        let mut slow = events.read(From::Now);
        (1..=kept + 7).for_each(|nth| events.tell(app(nth)));
        let (seen, missed) = numbers(&mut slow);
        assert_eq!(missed, [Some(7)]);
        assert_eq!((seen.len(), seen[0], *seen.last().unwrap()), (KEPT, 8, kept + 7));
    }

    #[test]
    fn who_comes_back_goes_on_behind_what_he_has_read_and_one_of_another_process_from_the_start() {
        let events = Events::new();
        (1..=3).for_each(|nth| events.tell(app(nth)));
        let id = EventId { mark: events.0.mark, number: 2 };
        let again: EventId = id.to_string().parse().unwrap();
        assert_eq!(numbers(&mut events.read(From::After(again))), (vec![3], vec![]));
        let other = EventId { mark: !events.0.mark, number: 2 };
        assert_eq!(numbers(&mut events.read(From::After(other))), (vec![1, 2, 3], vec![None]));
        let ahead = EventId { number: u64::MAX, ..id };
        let mut ahead = events.read(From::After(ahead));
        events.tell(app(4));
        assert_eq!(numbers(&mut ahead), (vec![4], vec![]), "a number that never was blinds nobody");
    }

    #[tokio::test(start_paused = true)]
    async fn a_reader_that_waits_is_woken_by_what_comes() {
        let events = Events::new();
        let mut reader = events.read(From::Now);
        let telling = events.clone();
        let waiting = tokio::spawn(async move { reader.next().await });
        tokio::task::yield_now().await;
        telling.tell(app(1));
        let Some(Next::Event(event)) = waiting.await.unwrap() else { panic!("an event is there") };
        assert_eq!(event.what, app(1));
    }
}

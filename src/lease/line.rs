//! Who waits for a key of one provider, and who is next: a pure structure, locked by its owner.
//!
//! Waiters stand first in, first out in the queue of their fitting keys and model; a sequence number
//! orders them across queues. A queue *claims* the keys it awaits because they are full, never those that
//! only cool, and nobody with a later number may take a claimed key ahead of it. So newcomers never pass
//! waiters, and a model that rests stops no other.
//!
//! No wake is lost: it is kept with its waiter until a try that begins after it has an answer, and what
//! that try did not use goes on to the next whom it may serve.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use tokio::sync::Notify;
use tokio::time::Instant;

use crate::model::{KeyId, ModelName};
use crate::store::{Reason, StoreError, StoreTime};

/// More wakes than this for one waiter become one that makes all heads try.
const MAX_WAKES: usize = 16;

/// Which queue a request stands in.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct QueueId {
    pub(super) fitting: Arc<[KeyId]>,
    pub(super) model: Option<ModelName>,
}

/// A waiter's number; lower waits longer.
pub(super) type Seq = u64;

/// What the last refusal in a queue said.
#[derive(Debug, Clone, Default)]
pub(super) struct Blocked {
    /// Keys whose slot may come back at any moment.
    pub(super) full: Vec<KeyId>,
    /// When the first cooldown ends.
    pub(super) cooldown_end: Option<StoreTime>,
    /// What keeps each fitting key.
    pub(super) reasons: Arc<[(KeyId, Reason)]>,
    /// When the store's grace ends, in one: no slot comes back before.
    pub(super) grace_end: Option<StoreTime>,
}

impl Blocked {
    /// Neither full nor cooling: waiting helps nobody.
    pub(super) fn is_unusable(&self) -> bool {
        self.full.is_empty() && self.cooldown_end.is_none()
    }
}

/// Why waiters were sent away before their time.
#[derive(Debug, Clone)]
pub(super) enum Ended {
    /// The store failed.
    Store(StoreError),
    /// The process drains.
    Draining,
}

/// What a newcomer may do.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Entry {
    /// Its own queue has waiters: stand behind them.
    Join,
    /// Try, but leave these keys to those who wait for them.
    Try { barred: Vec<KeyId> },
}

/// What a waiter does next.
#[derive(Debug)]
pub(super) enum Step {
    /// Go away.
    Ended(Ended),
    /// Try now, without these keys, which waiters ahead claim.
    Try { barred: Vec<KeyId> },
    /// Sleep until notified, and the head of a queue until `retry_at` at most.
    Wait { retry_at: Option<Instant>, blocked: Option<Blocked> },
}

/// Reasons to try that a waiter has not used yet.
#[derive(Debug, Default)]
struct Wakes {
    /// Slots that came back.
    keys: Vec<KeyId>,
    /// Something changed: should this try succeed, another might too.
    heads: bool,
    /// The try that follows registration.
    first: bool,
}

impl Wakes {
    fn is_empty(&self) -> bool {
        self.keys.is_empty() && !self.heads && !self.first
    }

    fn add(&mut self, key: &KeyId) {
        if self.keys.len() < MAX_WAKES {
            self.keys.push(key.clone());
        } else {
            self.heads = true;
        }
    }
}

#[derive(Debug)]
struct Waiter {
    queue: QueueId,
    seat: Arc<Notify>,
    /// Not used yet.
    wakes: Wakes,
    /// In use by the try that runs.
    trying: Wakes,
    /// Slots that came back during that try and were not awaited here, by what the last answer said. The
    /// answer under way may say otherwise, for it may be older than they are.
    missed: Wakes,
    ended: Option<Ended>,
}

#[derive(Debug)]
struct Queue {
    members: BTreeSet<Seq>,
    /// `None` until a member has had an answer: then every fitting key counts as awaited.
    blocked: Option<Blocked>,
    retry_at: Instant,
}

impl Queue {
    fn claims(&self, id: &QueueId, key: &KeyId) -> bool {
        id.fitting.contains(key) && self.blocked.as_ref().is_none_or(|blocked| blocked.full.contains(key))
    }

    fn claimed<'a>(&'a self, id: &'a QueueId) -> &'a [KeyId] {
        self.blocked.as_ref().map_or(&id.fitting, |blocked| &blocked.full)
    }

    fn head(&self) -> Option<Seq> {
        self.members.first().copied()
    }
}

/// All waiters of one provider.
#[derive(Debug, Default)]
pub(super) struct Line {
    next: Seq,
    queues: HashMap<QueueId, Queue>,
    waiters: BTreeMap<Seq, Waiter>,
    /// Who tries at this moment.
    trying: BTreeSet<Seq>,
}

impl Line {
    /// How many wait.
    pub(super) fn len(&self) -> usize {
        self.waiters.len()
    }

    /// What one who is not in line yet may do.
    pub(super) fn enter(&self, id: &QueueId) -> Entry {
        if self.queues.contains_key(id) {
            return Entry::Join;
        }
        Entry::Try { barred: self.claimed_ahead(id, Seq::MAX, &[]) }
    }

    /// Stands at the tail. Whoever opens a queue tries once more after this, for a slot that came back
    /// between its refusal and now woke nobody.
    pub(super) fn join(&mut self, id: QueueId, retry_at: Instant) -> (Seq, Arc<Notify>) {
        let seq = self.next;
        self.next += 1;
        let queue = self.queues.entry(id.clone()).or_insert_with(|| Queue {
            members: BTreeSet::new(),
            blocked: None,
            retry_at,
        });
        let wakes = Wakes { first: queue.members.is_empty(), ..Wakes::default() };
        queue.members.insert(seq);
        let seat = Arc::new(Notify::new());
        let (trying, missed) = (Wakes::default(), Wakes::default());
        let waiter = Waiter { queue: id, seat: Arc::clone(&seat), wakes, trying, missed, ended: None };
        self.waiters.insert(seq, waiter);
        (seq, seat)
    }

    /// What `seq` does now. A [`Step::Try`] takes its wakes with it.
    pub(super) fn step(&mut self, seq: Seq) -> Step {
        let Some(waiter) = self.waiters.get_mut(&seq) else {
            return Step::Wait { retry_at: None, blocked: None };
        };
        if let Some(ended) = waiter.ended.clone() {
            return Step::Ended(ended);
        }
        if !waiter.wakes.is_empty() {
            waiter.trying = std::mem::take(&mut waiter.wakes);
            self.trying.insert(seq);
            let waiter = &self.waiters[&seq];
            return Step::Try { barred: self.claimed_ahead(&waiter.queue, seq, &waiter.trying.keys) };
        }
        let Some(queue) = self.queues.get(&waiter.queue) else {
            return Step::Wait { retry_at: None, blocked: None };
        };
        let retry_at = (queue.head() == Some(seq)).then_some(queue.retry_at);
        Step::Wait { retry_at, blocked: queue.blocked.clone() }
    }

    /// The head's timer: it tries again when its time has come.
    pub(super) fn timer(&mut self, seq: Seq, now: Instant, next: Instant) {
        let Some(waiter) = self.waiters.get_mut(&seq) else { return };
        let Some(queue) = self.queues.get_mut(&waiter.queue) else { return };
        if queue.head() == Some(seq) && queue.retry_at <= now {
            queue.retry_at = next;
            waiter.wakes.heads = true;
        }
    }

    /// `seq` was refused and keeps its place; what it could not use goes on.
    pub(super) fn refused(&mut self, seq: Seq, blocked: Blocked, retry_at: Instant) {
        let Some(waiter) = self.waiters.get_mut(&seq) else { return };
        self.trying.remove(&seq);
        let tried = std::mem::take(&mut waiter.trying);
        let missed = std::mem::take(&mut waiter.missed);
        waiter.wakes.heads |= missed.heads;
        let id = waiter.queue.clone();
        let Some(queue) = self.queues.get_mut(&id) else { return };
        let is_full = |key: &&KeyId| blocked.full.contains(key);
        let mut onward: Vec<KeyId> = tried.keys.iter().filter(|key| !is_full(key)).cloned().collect();
        let given_up = queue.claimed(&id).iter().filter(|key| !is_full(key) && !tried.keys.contains(key));
        onward.extend(given_up.cloned());
        onward.extend(missed.keys.into_iter().filter(|key| blocked.full.contains(key)));
        let nobody_waits_for_slots = blocked.full.is_empty();
        queue.blocked = Some(blocked);
        queue.retry_at = retry_at;
        for other in queue.members.iter().filter(|other| **other != seq) {
            // The head's timer changed; and where nothing is full, some may now be without hope.
            self.waiters[other].seat.notify_one();
            if !nobody_waits_for_slots {
                break;
            }
        }
        for key in &onward {
            self.freed(key);
        }
    }

    /// `seq` has a slot of `key` and leaves.
    pub(super) fn granted(&mut self, seq: Seq, key: &KeyId) {
        self.depart(seq, Some(key));
    }

    /// `seq` leaves without a slot: gave up, or was dropped at any point.
    pub(super) fn leave(&mut self, seq: Seq) {
        self.depart(seq, None);
    }

    fn depart(&mut self, seq: Seq, got: Option<&KeyId>) {
        let Some(mut waiter) = self.waiters.remove(&seq) else { return };
        self.trying.remove(&seq);
        if let Some(at) = got.and_then(|got| waiter.trying.keys.iter().position(|key| key == got)) {
            waiter.trying.keys.swap_remove(at);
        }
        let mut onward = std::mem::take(&mut waiter.trying.keys);
        onward.append(&mut waiter.wakes.keys);
        if let Some(queue) = self.queues.get_mut(&waiter.queue) {
            queue.members.remove(&seq);
            if queue.blocked.is_none() {
                // Others left all these keys to it, and it never said whether they were full.
                onward.extend(waiter.queue.fitting.iter().cloned());
            }
            match queue.head() {
                Some(head) => self.waiters[&head].seat.notify_one(), // inherits the timer
                None => drop(self.queues.remove(&waiter.queue)),
            }
        }
        for key in &onward {
            self.freed(key);
        }
        if waiter.trying.heads || waiter.wakes.heads {
            self.changed();
        }
    }

    /// A slot of `key` came back: the earliest who awaits it, and has no wake yet, tries.
    pub(super) fn freed(&mut self, key: &KeyId) {
        let asleep = |seq: &&Seq| self.waiters[*seq].wakes.is_empty();
        let awaiting = || self.queues.iter().filter(|(id, queue)| queue.claims(id, key)).map(|(_, q)| q);
        let target = awaiting()
            .filter_map(|queue| queue.members.iter().find(asleep))
            .min()
            .or_else(|| awaiting().filter_map(|queue| queue.members.first()).min())
            .copied();
        if let Some(waiter) = target.and_then(|seq| self.waiters.get_mut(&seq)) {
            waiter.wakes.add(key);
            waiter.seat.notify_one();
        }
        for seq in &self.trying {
            let Some(waiter) = self.waiters.get_mut(seq) else { continue };
            let claims = self.queues.get(&waiter.queue).is_some_and(|queue| queue.claims(&waiter.queue, key));
            if !claims && waiter.queue.fitting.contains(key) {
                waiter.missed.add(key);
            }
        }
    }

    /// Anything may have changed: all heads try, and after a success all heads again.
    pub(super) fn changed(&mut self) {
        for head in self.queues.values().filter_map(Queue::head) {
            if let Some(waiter) = self.waiters.get_mut(&head) {
                waiter.wakes.heads = true;
                waiter.seat.notify_one();
            }
        }
    }

    /// Sends all away.
    pub(super) fn end_all(&mut self, why: &Ended) {
        self.queues.clear();
        self.trying.clear();
        for waiter in self.waiters.values_mut() {
            waiter.ended = Some(why.clone());
            waiter.seat.notify_one();
        }
    }

    /// Keys that queues other than `own`, with a head before `seq`, wait for; save for those of which
    /// `seq` was given a slot.
    fn claimed_ahead(&self, own: &QueueId, seq: Seq, given: &[KeyId]) -> Vec<KeyId> {
        let mut keys: Vec<KeyId> = Vec::new();
        for (id, queue) in &self.queues {
            if id != own && queue.head().is_some_and(|head| head < seq) {
                for key in queue.claimed(id) {
                    // Each once: what is left to others is claimed in turn, and would double each time.
                    if own.fitting.contains(key) && !given.contains(key) && !keys.contains(key) {
                        keys.push(key.clone());
                    }
                }
            }
        }
        keys
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const KEYS: [&str; 2] = ["k1", "k2"];
    const MODELS: [&str; 2] = ["a", "b"];

    fn key(nth: usize) -> KeyId {
        KeyId::parse(KEYS[nth % KEYS.len()]).unwrap()
    }

    /// Where one request is on its way; each step of it is one step of the test.
    #[derive(Debug, Clone)]
    enum At {
        Entering(Vec<KeyId>),
        InLine(Seq),
        Asking(Option<Seq>, Vec<KeyId>),
        Answered(Option<Seq>, Result<KeyId, Blocked>),
        Holding(KeyId),
        Released(KeyId),
        Gone,
    }

    struct Request {
        id: QueueId,
        at: At,
    }

    /// A line before a store of one slot a key, with every call in three steps: sent, decided, answered.
    #[derive(Default)]
    struct World {
        line: Line,
        taken: BTreeSet<KeyId>,
        resting: BTreeSet<(KeyId, Option<ModelName>)>,
        requests: Vec<Request>,
    }

    impl World {
        fn arrive(&mut self, mask: usize, model: usize) {
            let fitting: Vec<_> = (0..KEYS.len()).filter(|nth| mask & (1 << nth) != 0).map(key).collect();
            let id = QueueId { fitting: fitting.into(), model: ModelName::new(MODELS[model % 2]) };
            let at = match self.line.enter(&id) {
                Entry::Try { barred } => At::Entering(barred),
                Entry::Join => At::InLine(self.line.join(id.clone(), Instant::now()).0),
            };
            self.requests.push(Request { id, at });
        }

        fn decide(&mut self, id: &QueueId, barred: &[KeyId]) -> Result<KeyId, Blocked> {
            let mut blocked =
                Blocked { full: barred.to_vec(), cooldown_end: Some(StoreTime(1)), ..Blocked::default() };
            for key in id.fitting.iter().filter(|key| !barred.contains(key)) {
                if self.resting.contains(&(key.clone(), id.model.clone())) {
                    continue;
                }
                if self.taken.insert(key.clone()) {
                    return Ok(key.clone());
                }
                blocked.full.push(key.clone());
            }
            Err(blocked)
        }

        fn present(&self) -> impl Iterator<Item = usize> {
            self.requests.iter().enumerate().filter(|(_, it)| !matches!(it.at, At::Gone)).map(|(nth, _)| nth)
        }

        /// One step of one request; false when it can only wait.
        fn advance(&mut self, nth: usize) -> bool {
            let id = self.requests[nth].id.clone();
            let next = match self.requests[nth].at.clone() {
                At::Entering(barred) => At::Asking(None, barred),
                At::InLine(seq) => match self.line.step(seq) {
                    Step::Try { barred } => At::Asking(Some(seq), barred),
                    _ => return false,
                },
                At::Asking(seq, barred) => At::Answered(seq, self.decide(&id, &barred)),
                At::Answered(seq, Ok(key)) => {
                    if let Some(seq) = seq {
                        self.line.granted(seq, &key);
                    }
                    At::Holding(key)
                }
                At::Answered(Some(seq), Err(blocked)) => {
                    self.line.refused(seq, blocked, Instant::now());
                    At::InLine(seq)
                }
                At::Answered(None, Err(_)) => At::InLine(self.line.join(id, Instant::now()).0),
                At::Released(key) => {
                    self.line.freed(&key);
                    At::Gone
                }
                At::Holding(_) | At::Gone => return false,
            };
            self.requests[nth].at = next;
            true
        }

        /// The holder is done, or the requester goes away, wherever it is.
        fn end(&mut self, nth: usize) {
            let seq = match &self.requests[nth].at {
                At::InLine(seq) | At::Asking(Some(seq), _) | At::Answered(Some(seq), _) => Some(*seq),
                _ => None,
            };
            let held = match &self.requests[nth].at {
                At::Holding(key) | At::Answered(_, Ok(key)) => Some(key.clone()),
                At::Released(_) => return,
                _ => None,
            };
            if let Some(seq) = seq {
                self.line.leave(seq);
            }
            self.requests[nth].at = match held {
                Some(key) => {
                    self.taken.remove(&key);
                    At::Released(key)
                }
                None => At::Gone,
            };
        }

        fn rest(&mut self, nth: usize, model: usize) {
            let subject = (key(nth), ModelName::new(MODELS[model % 2]));
            if !self.resting.remove(&subject) {
                self.resting.insert(subject);
                return;
            }
            self.line.changed();
        }

        /// Every request goes as far as it can; false when there is no end to that.
        fn come_to_rest(&mut self) -> bool {
            let many = self.requests.len();
            (0..1000).any(|_| (0..many).filter(|nth| self.advance(*nth)).count() == 0)
        }

        /// A waiter and a key that it could have, though nothing is on its way to either.
        fn forgotten(&self) -> Option<(QueueId, KeyId)> {
            self.requests.iter().filter(|request| matches!(request.at, At::InLine(_))).find_map(|request| {
                let usable = |key: &&KeyId| {
                    !self.taken.contains(*key)
                        && !self.resting.contains(&((*key).clone(), request.id.model.clone()))
                };
                request.id.fitting.iter().find(usable).map(|key| (request.id.clone(), key.clone()))
            })
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 4000, failure_persistence: None, ..ProptestConfig::default() })]
        #[test]
        fn whatever_happens_in_whatever_order_no_free_slot_is_left_beside_a_waiter(
            ops in prop::collection::vec((0..10_u8, any::<prop::sample::Index>(), 1..4_usize, 0..2_usize), 1..150)
        ) {
            let mut world = World::default();
            for (op, which, mask, model) in ops {
                // A few at a time: in a crowd most steps would touch nothing.
                let here: Vec<_> = world.present().collect();
                match op {
                    0 | 1 if here.len() < 6 => world.arrive(mask, model),
                    2 | 3 if !here.is_empty() => world.end(here[which.index(here.len())]),
                    4 if mask == 1 => world.rest(which.index(KEYS.len()), model),
                    5 => {
                        prop_assert!(world.come_to_rest(), "they wake each other for ever");
                        prop_assert_eq!(world.forgotten(), None);
                    }
                    _ if !here.is_empty() => drop(world.advance(here[which.index(here.len())])),
                    _ => world.arrive(mask, model),
                }
            }
            prop_assert!(world.come_to_rest(), "they wake each other for ever");
            prop_assert_eq!(world.forgotten(), None);
        }
    }
}

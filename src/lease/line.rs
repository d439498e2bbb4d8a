//! Who waits for which keys, in which order: a pure structure, no clock and no store.
//!
//! Waiters stand first in, first out per queue (the same fitting keys, the same model). A slot that
//! comes back is offered to the earliest waiter of any queue that could use it; an offer that is not
//! taken is passed on, so that offers and free slots always match. A waiter that only waits for a
//! cooldown is offered nothing and stands in nobody's way.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use tokio::sync::Notify;

use crate::model::{KeyId, ModelName};
use crate::store::StoreError;

/// The queue a request stands in.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct Queue {
    pub(super) fitting: Arc<[KeyId]>,
    pub(super) model: Option<ModelName>,
}

impl Queue {
    fn fits(&self, key: &KeyId) -> bool {
        self.fitting.binary_search(key).is_ok()
    }

    fn overlaps(&self, other: &Self) -> bool {
        self.fitting.iter().any(|key| other.fits(key))
    }
}

#[derive(Debug)]
struct Waiter {
    queue: Queue,
    bell: Arc<Notify>,
    /// The key whose slot it was offered, until it has tried.
    offered: Option<KeyId>,
    /// It waits for a slot, not only for a cooldown's end.
    for_slots: bool,
    /// The store failed while it waited.
    failed: Option<StoreError>,
}

/// All waiters of one provider.
#[derive(Debug, Default)]
pub(super) struct Line {
    waiters: BTreeMap<u64, Waiter>,
    queues: HashMap<Queue, BTreeSet<u64>>,
    next: u64,
}

impl Line {
    pub(super) fn is_empty(&self) -> bool {
        self.waiters.is_empty()
    }

    pub(super) fn has(&self, queue: &Queue) -> bool {
        self.queues.contains_key(queue)
    }

    /// Whether waiters of other queues, that came before `place` (all, for a newcomer), wait for a slot
    /// of `key`: then it is theirs first.
    pub(super) fn is_contended(&self, key: &KeyId, queue: &Queue, place: Option<u64>) -> bool {
        self.waiters
            .range(..place.unwrap_or(u64::MAX))
            .any(|(_, waiter)| waiter.for_slots && waiter.queue != *queue && waiter.queue.fits(key))
    }

    /// Joins the tail. Gives the place and the bell that tells it to try.
    pub(super) fn join(&mut self, queue: Queue) -> (u64, Arc<Notify>) {
        let place = self.next;
        self.next += 1;
        let bell = Arc::new(Notify::new());
        self.queues.entry(queue.clone()).or_default().insert(place);
        let waiter = Waiter { queue, bell: bell.clone(), offered: None, for_slots: true, failed: None };
        self.waiters.insert(place, waiter);
        (place, bell)
    }

    pub(super) fn is_head(&self, place: u64) -> bool {
        let queue = self.waiters.get(&place).and_then(|waiter| self.queues.get(&waiter.queue));
        queue.and_then(BTreeSet::first) == Some(&place)
    }

    /// Why the store failed while it waited, once.
    pub(super) fn take_failure(&mut self, place: u64) -> Option<StoreError> {
        self.waiters.get_mut(&place)?.failed.take()
    }

    /// It tried and was refused. `for_slots`: some key was full. An offer that it could not use because
    /// the key cools for it goes to the next; one that found the key full was taken by somebody else.
    pub(super) fn refused(&mut self, place: u64, offer: Option<&KeyId>, for_slots: bool, still_free: bool) {
        if let Some(waiter) = self.waiters.get_mut(&place) {
            waiter.for_slots = for_slots;
            if waiter.offered.as_ref() == offer {
                waiter.offered = None;
            }
        }
        if let Some(key) = offer.filter(|_| still_free) {
            self.freed_after(key, place + 1);
        }
    }

    /// The offer it has now, to be named again in [`Line::refused`].
    pub(super) fn offer(&self, place: u64) -> Option<KeyId> {
        self.waiters.get(&place)?.offered.clone()
    }

    /// It is served (with this key), or gives up. What it was offered and did not take is offered on; who
    /// stood behind it tries.
    pub(super) fn leave(&mut self, place: u64, served_with: Option<&KeyId>) {
        let Some(waiter) = self.waiters.remove(&place) else { return };
        let mut was_head = false;
        if let Some(queue) = self.queues.get_mut(&waiter.queue) {
            was_head = queue.first() == Some(&place);
            queue.remove(&place);
            if queue.is_empty() {
                self.queues.remove(&waiter.queue);
            }
        }
        if let Some(key) = waiter.offered.filter(|key| served_with != Some(key)) {
            self.freed(&key);
        }
        if was_head {
            self.ring_where(|queue| *queue == waiter.queue);
        }
        if waiter.for_slots {
            self.ring_where(|queue| *queue != waiter.queue && queue.overlaps(&waiter.queue));
        }
    }

    /// A slot of `key` came back: the earliest that can use it is offered it.
    pub(super) fn freed(&mut self, key: &KeyId) {
        self.freed_after(key, 0);
    }

    fn freed_after(&mut self, key: &KeyId, from: u64) {
        let next = self
            .waiters
            .range_mut(from..)
            .map(|(_, waiter)| waiter)
            .find(|waiter| waiter.offered.is_none() && waiter.for_slots && waiter.queue.fits(key));
        if let Some(waiter) = next {
            waiter.offered = Some(key.clone());
            waiter.bell.notify_one();
        }
    }

    /// Something changed that may let anybody be served: the head of each queue tries.
    pub(super) fn ring_heads(&self) {
        self.ring_where(|_| true);
    }

    fn ring_where(&self, which: impl Fn(&Queue) -> bool) {
        for (_, places) in self.queues.iter().filter(|(queue, _)| which(queue)) {
            if let Some(waiter) = places.first().and_then(|place| self.waiters.get(place)) {
                waiter.bell.notify_one();
            }
        }
    }

    /// The store failed: nobody waits for it.
    pub(super) fn fail_all(&mut self, error: &StoreError) {
        for waiter in self.waiters.values_mut() {
            waiter.failed = Some(error.clone());
            waiter.bell.notify_one();
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    impl Line {
        fn is_offered(&self, place: u64) -> bool {
            self.offer(place).is_some()
        }
    }

    fn key(id: &str) -> KeyId {
        KeyId::parse(id).unwrap()
    }

    fn queue(ids: &[&str], model: Option<&str>) -> Queue {
        Queue { fitting: ids.iter().map(|id| key(id)).collect(), model: model.and_then(ModelName::new) }
    }

    #[test]
    fn a_freed_slot_is_offered_to_the_earliest_that_can_use_it() {
        let mut line = Line::default();
        let (other, _) = line.join(queue(&["b"], None));
        let (first, _) = line.join(queue(&["a", "b"], None));
        let (second, _) = line.join(queue(&["a"], None));
        line.freed(&key("a"));
        assert!(!line.is_offered(other) && line.is_offered(first) && !line.is_offered(second));
        line.freed(&key("a"));
        assert!(line.is_offered(second));
    }

    #[test]
    fn an_offer_that_is_not_taken_is_passed_on() {
        let mut line = Line::default();
        let (first, _) = line.join(queue(&["a"], None));
        let (second, _) = line.join(queue(&["a"], None));
        line.freed(&key("a"));
        line.leave(first, None);
        assert!(line.is_offered(second));
        let (third, _) = line.join(queue(&["a", "b"], Some("m")));
        line.leave(second, Some(&key("a")));
        assert!(!line.is_offered(third), "the offer was taken");
    }

    #[test]
    fn one_served_by_another_key_than_it_was_offered_passes_its_offer_on() {
        let mut line = Line::default();
        let (first, _) = line.join(queue(&["a", "b"], None));
        let (second, _) = line.join(queue(&["a"], None));
        line.freed(&key("a"));
        line.leave(first, Some(&key("b")));
        assert!(line.is_offered(second));
    }

    #[test]
    fn who_waits_for_a_cooldown_alone_is_offered_nothing_and_contends_for_nothing() {
        let mut line = Line::default();
        let cooling = queue(&["a"], Some("m1"));
        let (first, _) = line.join(cooling.clone());
        line.refused(first, None, false, false);
        let other = queue(&["a"], Some("m2"));
        assert!(!line.is_contended(&key("a"), &other, None));
        let (second, _) = line.join(other);
        line.freed(&key("a"));
        assert!(!line.is_offered(first) && line.is_offered(second));
    }

    #[test]
    fn who_stands_behind_the_one_that_leaves_becomes_the_head() {
        let mut line = Line::default();
        let (first, _) = line.join(queue(&["a"], None));
        let (second, _) = line.join(queue(&["a"], None));
        assert!(line.is_head(first) && !line.is_head(second));
        line.leave(first, None);
        assert!(line.is_head(second));
        line.leave(second, None);
        assert!(line.is_empty());
    }
}

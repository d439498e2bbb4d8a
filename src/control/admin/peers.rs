//! The places of the TCP door, shared out by address: whoever takes many leaves some for the others.
//!
//! Whatever a pod's app does with its connections, the kubelet, which asks from the node's address, must find a
//! place: a probe that finds none has the sidecar restarted. So an address has few places, and where all of the
//! door's are taken a newcomer takes that of the oldest connection among those of whoever holds the most.

use std::collections::{BTreeMap, HashMap};
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

/// Connections that one peer may have open at once.
pub(super) const EACH: usize = 32;
/// How often it is told that one has too many.
const TOLD_EVERY: Duration = Duration::from_mins(1);

/// Whose connections are counted together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Peer {
    /// This machine, or this pod: it has a whole net of loopback addresses to come from.
    Own,
    /// One address elsewhere.
    Other(IpAddr),
}

impl Peer {
    /// Who comes from `peer` to the address `here`.
    pub(super) fn of(here: IpAddr, peer: IpAddr) -> Self {
        let (here, peer) = (here.to_canonical(), peer.to_canonical());
        if peer.is_loopback() || peer == here { Self::Own } else { Self::Other(peer) }
    }
}

/// Who holds which places.
#[derive(Debug)]
pub(super) struct Peers {
    all: usize,
    table: Arc<Mutex<Table>>,
}

#[derive(Debug, Default)]
struct Table {
    /// Rises with each connection: the least is the oldest.
    next: u64,
    of: HashMap<Peer, BTreeMap<u64, CancellationToken>>,
    told: Option<Instant>,
}

/// One connection's place, given back when dropped.
#[derive(Debug)]
pub(super) struct Place {
    peer: Peer,
    number: u64,
    /// Cancelled when another has taken the place.
    pub(super) taken: CancellationToken,
    table: Arc<Mutex<Table>>,
}

impl Peers {
    /// `all` places.
    pub(super) fn new(all: usize) -> Self {
        Self { all, table: Arc::default() }
    }

    /// A place for one more connection of `peer`; `None` where it has its share.
    pub(super) fn enter(&self, peer: Peer) -> Option<Place> {
        let mut table = lock(&self.table);
        if table.of.get(&peer).is_some_and(|own| own.len() >= EACH) {
            table.tell(peer);
            return None;
        }
        if table.of.values().map(BTreeMap::len).sum::<usize>() >= self.all {
            table.make_room();
        }
        let (number, taken) = (table.next, CancellationToken::new());
        table.next += 1;
        table.of.entry(peer).or_default().insert(number, taken.clone());
        Some(Place { peer, number, taken, table: self.table.clone() })
    }
}

impl Table {
    /// Ends the oldest connection of whoever holds the most.
    fn make_room(&mut self) {
        let oldest = |own: &BTreeMap<u64, CancellationToken>| own.keys().next().copied().unwrap_or(u64::MAX);
        let most = self.of.iter().max_by_key(|(_, own)| (own.len(), std::cmp::Reverse(oldest(own))));
        let Some((peer, number)) = most.map(|(peer, own)| (*peer, oldest(own))) else { return };
        if let Some(taken) = self.leave(peer, number) {
            taken.cancel();
        }
    }

    fn leave(&mut self, peer: Peer, number: u64) -> Option<CancellationToken> {
        let own = self.of.get_mut(&peer)?;
        let left = own.remove(&number);
        if own.is_empty() {
            self.of.remove(&peer);
        }
        left
    }

    fn tell(&mut self, peer: Peer) {
        if self.told.is_none_or(|told| told.elapsed() >= TOLD_EVERY) {
            self.told = Some(Instant::now());
            tracing::warn!(
                ?peer,
                "has {EACH} connections to the admin listener; more are closed at once until some of them end"
            );
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        lock(&self.table).leave(self.peer, self.number);
    }
}

/// No code that holds it can panic halfway.
fn lock(table: &Mutex<Table>) -> MutexGuard<'_, Table> {
    table.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a test that fails may panic
mod tests {
    use super::*;

    fn at(last: u8) -> Peer {
        Peer::of([10, 0, 0, 5].into(), [10, 0, 0, last].into())
    }

    #[test]
    fn an_address_has_its_share_and_gets_more_when_some_of_it_ends() {
        let peers = Peers::new(256);
        let mut held: Vec<_> = (0..EACH).map(|_| peers.enter(at(1)).unwrap()).collect();
        assert!(peers.enter(at(1)).is_none());
        assert!(peers.enter(at(2)).is_some(), "another address has its own");
        held.pop();
        assert!(peers.enter(at(1)).is_some());
        drop(held);
        assert!(lock(&peers.table).of.is_empty(), "nothing is kept of who is gone");
    }

    #[test]
    fn where_all_is_taken_the_oldest_of_whoever_has_the_most_makes_room() {
        let peers = Peers::new(4);
        let held: Vec<_> = [1, 2, 2, 3].map(|peer| peers.enter(at(peer)).unwrap()).into();
        let taken = |of: &[Place]| of.iter().map(|one| one.taken.is_cancelled()).collect::<Vec<_>>();
        let _one = peers.enter(at(9)).unwrap();
        assert_eq!(taken(&held), [false, true, false, false]);
        let _two = peers.enter(at(8)).unwrap();
        assert_eq!(taken(&held), [true, true, false, false], "all have one: the oldest");
        drop(held);
        let left: usize = lock(&peers.table).of.values().map(BTreeMap::len).sum();
        assert_eq!(left, 2, "a place that was taken is not given back twice: {:?}", peers.table);
    }

    #[test]
    fn this_machine_is_one_peer_however_many_addresses_it_comes_from() {
        let own = |peer: &str| Peer::of("10.0.0.5".parse().unwrap(), peer.parse().unwrap()) == Peer::Own;
        assert!(
            ["127.0.0.1", "127.3.2.1", "::1", "::ffff:127.0.0.9", "::ffff:10.0.0.5", "10.0.0.5"].map(own)
                == [true; 6]
        );
        assert!(!own("10.0.0.1"));
    }
}

//! Places for connections: so many in all, and so many of one peer where peers are many.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, PoisonError};

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// The places of one listener.
pub(super) struct Places {
    all: Arc<Semaphore>,
    of_one: usize,
    peers: Arc<Peers>,
}

/// How many connections each has; who has none is not in it, so it is never longer than there are places.
type Peers = Mutex<HashMap<IpAddr, usize>>;

impl Places {
    pub(super) fn new(all: usize, of_one: usize) -> Self {
        Self { all: Arc::new(Semaphore::new(all)), of_one, peers: Arc::default() }
    }

    /// Waits for a place.
    pub(super) async fn any(&self) -> Option<OwnedSemaphorePermit> {
        self.all.clone().acquire_owned().await.ok() // it is never closed
    }

    /// The place as this peer's; `None` where it has its share.
    pub(super) fn take(&self, place: OwnedSemaphorePermit, peer: IpAddr) -> Option<Place> {
        let peer = peer.to_canonical();
        let mut peers = self.peers.lock().unwrap_or_else(PoisonError::into_inner);
        let count = peers.entry(peer).or_default();
        if *count >= self.of_one {
            return None;
        }
        *count += 1;
        Some(Place { _all: place, peers: self.peers.clone(), peer })
    }
}

/// One, until it is dropped.
pub(super) struct Place {
    _all: OwnedSemaphorePermit,
    peers: Arc<Peers>,
    peer: IpAddr,
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut peers = self.peers.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(count) = peers.get_mut(&self.peer) {
            *count -= 1;
            if *count == 0 {
                peers.remove(&self.peer);
            }
        }
    }
}

//! The parts of a run, each a table.

pub(crate) mod bulk;
pub(crate) mod cpu;
pub(crate) mod intercept;
pub(crate) mod latency;
pub(crate) mod memory;
pub(crate) mod overload;
pub(crate) mod sse;
pub(crate) mod start;
pub(crate) mod stores;

use super::figures::{self, Series};
use super::peers::{Peer, Settings, Store, Upstream, World};
use super::{Options, Result, say};

/// What every part has at hand.
pub(crate) struct Bench {
    pub(crate) world: World,
    pub(crate) options: Options,
}

/// A peer and its figures, each a value a round. The first two are nginx and the floor.
pub(crate) struct Row<const N: usize> {
    pub(crate) peer: Peer,
    pub(crate) figures: [Series; N],
}

impl Bench {
    /// nginx, the floor, and lessor with each store that was asked for.
    pub(crate) fn peers(&self, to: Upstream) -> Result<Vec<Peer>> {
        let mut peers = vec![self.world.nginx(to)?, self.world.floor(to)?];
        for store in self.stores() {
            peers.push(self.world.lessor(to, &Settings::of(store))?);
        }
        if let Some(other) = &self.options.other {
            let memory = Settings::of(Store::Memory);
            peers.push(self.world.lessor_of(other, "other lessor, memory", to, &memory)?);
        }
        Ok(peers)
    }

    pub(crate) fn stores(&self) -> Vec<Store> {
        match &self.options.only[..] {
            [] => vec![Store::Memory, Store::Sqlite, Store::Redis],
            only => only.to_vec(),
        }
    }

    /// Has `measure` look at each peer in turn, round by round.
    pub(crate) async fn rounds<const N: usize>(
        &self,
        peers: Vec<Peer>,
        measure: impl AsyncFn(&Peer) -> Result<[f64; N]>,
    ) -> Result<Vec<Row<N>>> {
        let row = |peer| Row { peer, figures: std::array::from_fn(|_| Series::default()) };
        let mut rows: Vec<Row<N>> = peers.into_iter().map(row).collect();
        for _ in 0..self.options.rounds {
            for Row { peer, figures } in &mut rows {
                let values = measure(peer).await.map_err(|cause| format!("{}: {cause}", peer.name))?;
                figures.iter_mut().zip(values).for_each(|(figure, value)| figure.push(value));
            }
        }
        Ok(rows)
    }
}

/// Says so where the floor is too far from nginx for the figures above to count.
pub(crate) fn judge(floor: &Series, nginx: &Series, usual: f64) {
    if let Some(why) = figures::void(floor.over(nginx).median(), usual) {
        say(&format!("**{why}**\n"));
    }
}

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
use super::process::Urgent;
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
    /// All that are measured beside each other.
    pub(crate) fn peers(&self, to: Upstream) -> Result<Vec<Peer>> {
        (0..self.count()).map(|nth| self.peer(nth, to, "")).collect()
    }

    /// How many these are.
    pub(crate) fn count(&self) -> usize {
        2 + self.stores().len() + usize::from(self.options.other.is_some())
    }

    /// nginx, the floor, lessor with each store that was asked for, and the other lessor, by their number;
    /// a lessor with these lines more in its configuration.
    pub(crate) fn peer(&self, nth: usize, to: Upstream, lines: &str) -> Result<Peer> {
        let settings = |store| Settings { lines: lines.to_owned(), ..Settings::of(store) };
        match nth {
            0 => self.world.nginx(to),
            1 => self.world.floor(to),
            _ => match (self.stores().get(nth - 2), &self.options.other) {
                (None, Some(other)) => {
                    self.world.lessor_of(other, "other lessor, memory", to, &settings(Store::Memory))
                }
                (store, _) => self.world.lessor(to, &settings(store.copied().unwrap_or(Store::Memory))),
            },
        }
    }

    /// For parts that measure waiting: where `--first` is said, what is started while this lives is urgent.
    pub(crate) fn urgent(&self) -> Result<Option<Urgent>> {
        let processes = || vec![std::process::id(), self.world.upstream().id()];
        self.options.first.then(|| Urgent::take(processes())).transpose()
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

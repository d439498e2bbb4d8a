//! What one lease, acquired and released, costs each store. Client on CPU 1, Redis on CPU 0.

use std::sync::Arc;
use std::time::Duration;

use lessor::config::{HostPort, RedisConfig, Topology};
use lessor::store::Store;
use lessor::store::memory::MemoryStore;
use lessor::store::redis::RedisStore;
use lessor::store::sqlite::SqliteStore;

use super::super::figures::Series;
use super::super::leasing::{Cost, Shape, measure};
use super::super::peers::Store as Kind;
use super::super::process::{PROXY, Running, cpu_of};
use super::super::table::Table;
use super::super::{Result, say};
use super::Bench;

const TIME: Duration = Duration::from_secs(1);
/// Of all that a run asks; the figures hardly move.
const ROUNDS: u16 = 3;

pub(crate) async fn run(bench: &Bench) -> Result<()> {
    say("### A lease, acquired and released\n");
    let mut table =
        Table::new(["store", "keys", "in flight", "leases/s", "µs each", "client CPU µs", "Redis CPU µs"]);
    let (server, port) = bench.world.redis(PROXY)?;
    for kind in bench.stores() {
        for keys in [1, 200] {
            for in_flight in [1, 64] {
                let shape = Shape { keys, in_flight, time: TIME };
                table.row(row(bench, kind, &shape, (&server, port)).await?);
            }
        }
    }
    table.print();
    Ok(())
}

async fn row(bench: &Bench, kind: Kind, shape: &Shape, redis: (&Running, u16)) -> Result<Vec<String>> {
    let mut figures: [Series; 4] = Default::default();
    for round in 0..ROUNDS.min(bench.options.rounds) {
        let folder = tempfile::TempDir::new_in(bench.world.certs())?;
        let store: Arc<dyn Store> = match kind {
            Kind::Memory => Arc::new(MemoryStore::new()),
            Kind::Sqlite => Arc::new(SqliteStore::open(&folder.path().join("state.db"))?),
            Kind::Redis => {
                let at = HostPort { host: "127.0.0.1".into(), port: redis.1 };
                let prefix = format!("round-{round}-{}-{}", shape.keys, shape.in_flight);
                Arc::new(RedisStore::open(&RedisConfig::plain(Topology::Single(at)), &prefix).await?)
            }
        };
        let server = || if kind == Kind::Redis { redis.0.cpu() } else { f64::NAN };
        let own = || cpu_of(&[std::process::id()]);
        let Cost { per_second, own, server } = measure(store, shape, own, server).await?;
        let found = [per_second, 1e6 / per_second, own, server];
        figures.iter_mut().zip(found).for_each(|(figure, value)| figure.push(value));
    }
    let name = format!("{kind:?}").to_lowercase();
    let cells = [name, shape.keys.to_string(), shape.in_flight.to_string()];
    Ok(cells.into_iter().chain(figures.iter().map(Series::to_string)).collect())
}

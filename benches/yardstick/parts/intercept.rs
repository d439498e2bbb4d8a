//! What CONNECT with TLS inside costs beside base-URL mode, connections kept alive.

use super::super::peers::{Settings, Store, Upstream};
use super::super::{Result, certs, say};
use super::{Bench, cpu};

pub(crate) async fn run(bench: &Bench) -> Result<()> {
    say("### Interception, full load\n");
    let world = &bench.world;
    let mut peers = vec![world.nginx(Upstream::Plain)?, world.floor(Upstream::Plain)?];
    // A CA of the run's own, for the client must trust it.
    let folder = world.certs().display();
    let lines =
        format!("[ca]\ncert_file = \"{folder}/{}\"\nkey_file = \"{folder}/{}\"", certs::CA, certs::CA_KEY);
    let settings = Settings { lines, ..Settings::of(Store::Memory) };
    for name in ["lessor, base URL", "lessor, CONNECT and TLS"] {
        peers.push(world.lessor_of(&world.lessor, name, Upstream::Plain, &settings)?);
    }
    peers[3].target = peers[3].tunnelled(world.certs())?;
    let rows = bench.rounds(peers, async |peer| cpu::measure(bench, peer).await).await?;
    cpu::print(&rows);
    let cost = rows[3].figures[0].over(&rows[2].figures[0]);
    say(&format!("CPU a request through CONNECT and TLS, × base URL: {cost}\n"));
    cpu::judge_rows(&rows, Upstream::Plain);
    Ok(())
}

//! Large bodies, 100 MiB on one connection, and what looking for the key in them costs.

use std::time::Instant;

use super::super::peers::{Peer, Settings, Store, Upstream};
use super::super::process::Running;
use super::super::table::{Bases, Table};
use super::super::{Result, say};
use super::{Bench, Row, judge};

const SIZE: u64 = 100 << 20;
/// The most CPU that the floor took for a download beside nginx on a quiet machine.
const USUAL: f64 = 0.69;
/// What is sent at once.
static SLAB: [u8; 64 << 10] = [b'x'; 64 << 10];

/// All peers, both ways.
pub(crate) async fn run(bench: &Bench) -> Result<()> {
    say("### Large bodies, 100 MiB on one connection\n");
    let rows = bench.rounds(bench.peers(Upstream::Plain)?, measure).await?;
    print(&rows);
    judge(&rows[1].figures[1], &rows[0].figures[1], USUAL);
    Ok(())
}

/// Lessor as it comes and lessor that does not look for the key in bodies.
pub(crate) async fn scrub(bench: &Bench) -> Result<()> {
    say("### Looking for the key in 100 MiB\n");
    let mut peers = vec![bench.world.nginx(Upstream::Plain)?, bench.world.floor(Upstream::Plain)?];
    for scrub in ["scrub = \"on\"", "scrub = \"off\""] {
        let settings = Settings { provider: scrub, ..Settings::of(Store::Memory) };
        let name = format!("lessor, {scrub}");
        peers.push(bench.world.lessor_of(&bench.world.lessor, &name, Upstream::Plain, &settings)?);
    }
    let rows = bench.rounds(peers, measure).await?;
    print(&rows);
    let cost = rows[2].figures[1].over(&rows[3].figures[1]);
    say(&format!("CPU of a download with scrub on, × the same with it off: {cost}\n"));
    judge(&rows[1].figures[1], &rows[0].figures[1], USUAL);
    Ok(())
}

/// GB/s and CPU ns a KiB, down and then up.
async fn measure(peer: &Peer) -> Result<[f64; 4]> {
    let cpu = || peer.process.as_ref().map_or(f64::NAN, Running::cpu);
    let start = (Instant::now(), cpu());
    down(peer).await?;
    let middle = (Instant::now(), cpu());
    up(peer).await?;
    let end = (Instant::now(), cpu());
    #[allow(clippy::cast_precision_loss)]
    let size = SIZE as f64;
    let speed = |from: (Instant, f64), to: (Instant, f64)| size / (to.0 - from.0).as_secs_f64() / 1e9;
    let cost = |from: (Instant, f64), to: (Instant, f64)| (to.1 - from.1) * 1e3 / (size / 1024.0);
    Ok([speed(start, middle), cost(start, middle), speed(middle, end), cost(middle, end)])
}

async fn down(peer: &Peer) -> Result<()> {
    let mut connection = peer.target.connect().await?;
    connection.send(&peer.target.chat(&format!("bytes={SIZE}"))).await?;
    let head = connection.head().await?.expect(200)?;
    if head.length != Some(SIZE) {
        return Err(format!("a body of {:?} bytes", head.length).into());
    }
    connection.skip(SIZE).await
}

/// To a path that has no model, for only such bodies may be larger than what is kept to be read and sent again.
async fn up(peer: &Peer) -> Result<()> {
    let mut connection = peer.target.connect().await?;
    connection.send(&peer.target.head("POST", "/v1/files", "", SIZE)).await?;
    for _ in 0..SIZE / SLAB.len() as u64 {
        connection.send(&SLAB).await?;
    }
    match connection.exchange(&[]).await? {
        200 => Ok(()),
        other => Err(format!("an upload was answered with {other}").into()),
    }
}

fn print(rows: &[Row<4>]) {
    let figures = ["down GB/s", "down CPU ns/KiB", "up GB/s", "up CPU ns/KiB"];
    for pair in [[0, 1], [2, 3]] {
        let [speed, cost] = pair;
        let mut table =
            Table::new(["", figures[speed], "× nginx", "× floor", figures[cost], "× nginx", "× floor"]);
        for Row { peer, figures } in rows {
            let base = |nth: usize| Bases { nginx: &rows[0].figures[nth], floor: &rows[1].figures[nth] };
            let cells = pair.into_iter().flat_map(|nth| base(nth).cells(&figures[nth]));
            table.row(std::iter::once(peer.name.clone()).chain(cells));
        }
        table.print();
    }
}

//! What a request waits longer for a proxy when there is little to do: 200 requests a second, evenly, on 8
//! connections.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::task::JoinSet;

use super::super::client::Target;
use super::super::figures::percentile;
use super::super::peers::{Peer, Upstream};
use super::super::process::Running;
use super::super::table::{Bases, Table};
use super::super::{Result, say};
use super::{Bench, judge};

const CONNECTIONS: u32 = 8;
/// Between two requests of one connection: 200 a second on all.
const EVERY: Duration = Duration::from_millis(40);
/// Of each connection; 800 in a round.
const REQUESTS: u32 = 100;
/// The most that the floor added beside nginx on a quiet machine.
const USUAL: f64 = 1.09;

pub(crate) async fn run(bench: &Bench) -> Result<()> {
    say("### Little load, 200 requests/s\n");
    let _urgent = bench.urgent()?;
    let mut peers = bench.peers(Upstream::Plain)?;
    peers.push(bench.world.direct()); // last, so that nginx and the floor stay the first
    let rows = bench.rounds(peers, measure).await?;
    let direct = rows.last().map(|row| row.figures.clone()).ok_or("no peers")?;
    let added = |row: usize, nth: usize| rows[row].figures[nth].beyond(&direct[nth]);
    let base = [0, 1].map(|nth| (added(0, nth), added(1, nth)));
    let mut table = Table::new([
        "",
        "added p50 µs",
        "× nginx",
        "× floor",
        "added p99 µs",
        "× nginx",
        "× floor",
        "CPU µs/request",
    ]);
    for (row, shown) in rows[..rows.len() - 1].iter().enumerate() {
        let cells =
            [0, 1].map(|nth| Bases { nginx: &base[nth].0, floor: &base[nth].1 }.cells(&added(row, nth)));
        let cpu = shown.figures[2].to_string();
        table.row(std::iter::once(shown.peer.name.clone()).chain(cells.into_iter().flatten()).chain([cpu]));
    }
    table.print();
    say(&format!("Without a proxy: p50 {} µs, p99 {} µs.\n", direct[0], direct[1]));
    judge(&base[0].1, &base[0].0, USUAL);
    Ok(())
}

/// p50 and p99 in µs, CPU µs a request.
async fn measure(peer: &Peer) -> Result<[f64; 3]> {
    let cpu = || peer.process.as_ref().map_or(f64::NAN, Running::cpu);
    let before = cpu();
    let mut all = ask(&peer.target).await?;
    let cpu = (cpu() - before) / f64::from(CONNECTIONS * REQUESTS);
    Ok([percentile(&mut all, 0.5), percentile(&mut all, 0.99), cpu])
}

/// How long each answer took, in µs.
async fn ask(target: &Target) -> Result<Vec<f64>> {
    let request: Arc<[u8]> = target.chat("").into();
    let begun = tokio::time::Instant::now();
    let mut asking = JoinSet::new();
    for nth in 0..CONNECTIONS {
        let (target, request) = (target.clone(), request.clone());
        asking.spawn(async move {
            let mut connection = target.connect().await?;
            connection.exchange(&request).await?; // the first makes the way to the provider
            let mut took = Vec::new();
            for turn in 1..=REQUESTS {
                tokio::time::sleep_until(begun + EVERY * turn + EVERY * nth / CONNECTIONS).await;
                let sent = Instant::now();
                match connection.exchange(&request).await? {
                    200 => took.push(sent.elapsed().as_secs_f64() * 1e6),
                    other => return Err(format!("an answer of status {other}").into()),
                }
            }
            Ok::<_, Box<dyn std::error::Error + Send + Sync>>(took)
        });
    }
    let mut all = Vec::new();
    while let Some(took) = asking.join_next().await {
        all.extend(took??);
    }
    Ok(all)
}

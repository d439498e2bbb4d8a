//! Memory of a proxy that has just started, and of each stream that is open and says nothing.

use std::time::Duration;

use super::super::client::{Connection, Target};
use super::super::figures::Series;
use super::super::peers::{Peer, Upstream};
use super::super::process::Running;
use super::super::table::{Bases, Table};
use super::super::{Result, say};
use super::Bench;

/// Streams that are opened at once.
const TOGETHER: usize = 50;
/// What a proxy may do when the last stream was opened, before one looks.
const SETTLE: Duration = Duration::from_millis(500);
/// Each from a new process; the figures hardly move.
const ROUNDS: u16 = 3;
/// Above so many connections lessor must be told to take them.
const USUAL_MOST: usize = 4000;
/// What a process has open besides two connections a stream.
const OTHERS: usize = 200;

pub(crate) async fn run(bench: &Bench) -> Result<()> {
    let streams = bench.options.streams;
    if (streams * 2 + OTHERS) as u64 > bench.world.descriptors {
        let most = bench.world.descriptors;
        return Err(format!("--streams {streams} needs two descriptors each, and there are {most}").into());
    }
    for to in [Upstream::Plain, Upstream::Tls] {
        let over = if to == Upstream::Tls { ", TLS to the provider" } else { "" };
        say(&format!("### Memory, {streams} quiet streams{over}\n"));
        table(bench, to).await?;
    }
    Ok(())
}

async fn table(bench: &Bench, to: Upstream) -> Result<()> {
    let streams = bench.options.streams;
    let lines = if streams > USUAL_MOST {
        format!("[limits]\nmax_connections = {}", streams + OTHERS)
    } else {
        String::new()
    };
    let mut rows: Vec<(String, [Series; 3])> = Vec::new();
    for round in 0..ROUNDS.min(bench.options.rounds) {
        for nth in 0..bench.count() {
            let peer = bench.peer(nth, to, &lines)?;
            let found = measure(&peer, streams).await;
            let found = found.map_err(|cause| format!("{}: {cause}", peer.name))?;
            if round == 0 {
                rows.push((peer.name, Default::default()));
            }
            rows[nth].1.iter_mut().zip(found).for_each(|(figure, value)| figure.push(value));
        }
    }
    let mut table =
        Table::new(["", "idle MiB", "× nginx", "× floor", "KiB/stream", "× nginx", "× floor", "all MiB"]);
    for (name, figures) in &rows {
        let base = |nth: usize| Bases { nginx: &rows[0].1[nth], floor: &rows[1].1[nth] };
        let cells = [0, 1].into_iter().flat_map(|nth| base(nth).cells(&figures[nth]));
        table.row(std::iter::once(name.clone()).chain(cells).chain([figures[2].to_string()]));
    }
    table.print();
    let places = bench.world.connections();
    say(&format!("In nginx's idle memory is a table of {places} connections, for that many may come.\n"));
    Ok(())
}

/// Idle MiB, KiB a stream, MiB of all.
async fn measure(peer: &Peer, streams: usize) -> Result<[f64; 3]> {
    let memory = || peer.process.as_ref().map_or(f64::NAN, Running::memory);
    let served = peer.target.connect().await?.exchange(&peer.target.chat("")).await?;
    if served != 200 {
        return Err(format!("an answer of status {served}").into());
    }
    tokio::time::sleep(SETTLE).await;
    let idle = memory();
    let mut open = Vec::new();
    while open.len() < streams {
        let some = (open.len()..streams).take(TOGETHER).map(|_| hold(&peer.target));
        open.append(&mut futures_util::future::try_join_all(some).await?);
    }
    tokio::time::sleep(SETTLE).await;
    let all = memory();
    #[allow(clippy::cast_precision_loss)]
    Ok([idle / 1024.0, (all - idle) / streams as f64, all / 1024.0])
}

/// A stream whose first event has come.
async fn hold(target: &Target) -> Result<Connection> {
    let mut connection = target.connect().await?;
    connection.send(&target.chat("hold")).await?;
    connection.head().await?.expect(200)?;
    while !connection.input().ends_with(b"\n\n\r\n") {
        connection.more().await?;
    }
    Ok(connection)
}

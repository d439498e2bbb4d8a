//! CPU per request and requests a second at full load: 64 connections, 1 KiB to the provider, 0.6 KB back.

use super::super::load::{self, Load};
use super::super::peers::{Peer, Upstream};
use super::super::table::{Bases, Table};
use super::super::{Result, say};
use super::{Bench, Row, judge};

const CONNECTIONS: usize = 64;
/// The most that the floor cost beside nginx on a quiet machine, to a plain upstream and over TLS.
const USUAL: [f64; 2] = [1.17, 1.07];

pub(crate) async fn run(bench: &Bench, to: Upstream) -> Result<()> {
    let over = if to == Upstream::Tls { ", TLS to the provider" } else { "" };
    say(&format!("### Full load, {CONNECTIONS} connections{over}\n"));
    let mut peers = bench.peers(to)?;
    peers.push(bench.world.direct()); // last, so that nginx and the floor stay the first
    let mut rows = bench.rounds(peers, async |peer| measure(bench, peer).await).await?;
    let direct = rows.pop().ok_or("no peers")?;
    print(&rows);
    say(&format!(
        "Without a proxy, and without TLS: {} requests/s; more is not to be had.\n",
        direct.figures[1]
    ));
    judge_rows(&rows, to);
    Ok(())
}

/// Whether they count.
pub(crate) fn judge_rows(rows: &[Row<3>], to: Upstream) {
    judge(&rows[1].figures[0], &rows[0].figures[0], USUAL[usize::from(to == Upstream::Tls)]);
}

/// CPU µs a request, requests a second, CPU µs a request of its Redis.
pub(crate) async fn measure(bench: &Bench, peer: &Peer) -> Result<[f64; 3]> {
    let watched: Vec<_> = peer.process.iter().chain(&peer.redis).collect();
    let Load { per_second, refused, cpu } =
        load::saturate(&peer.target, "", CONNECTIONS, bench.options.seconds, &watched).await?;
    if refused > 0.0 {
        return Err("a request was refused, where there are slots for all".into());
    }
    let of = |nth| cpu.get(nth).copied().unwrap_or(f64::NAN);
    Ok([of(0), per_second, of(1)])
}

pub(crate) fn print(rows: &[Row<3>]) {
    let head = ["", "CPU µs/request", "× nginx", "× floor", "requests/s", "× nginx", "× floor"];
    let mut table = Table::new(head);
    for Row { peer, figures } in rows {
        let base = |nth| Bases { nginx: &rows[0].figures[nth], floor: &rows[1].figures[nth] };
        let cells = (0..2).flat_map(|nth| base(nth).cells(&figures[nth]));
        table.row(std::iter::once(peer.name.clone()).chain(cells));
    }
    table.print();
    for Row { peer, figures } in rows.iter().filter(|row| row.peer.redis.is_some()) {
        say(&format!("Redis itself, for {}: {} µs of CPU a request.\n", peer.name, figures[2]));
    }
}

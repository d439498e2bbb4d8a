//! The time from a process' start to the first request that it served.

use std::time::Duration;

use super::super::figures::Series;
use super::super::peers::{Peer, Upstream};
use super::super::table::{Bases, Table};
use super::super::{Result, say};
use super::Bench;

/// Between two tries of a proxy that listens and does not serve yet.
const AGAIN: Duration = Duration::from_millis(1);
const TRIES: usize = 5000;

pub(crate) async fn run(bench: &Bench) -> Result<()> {
    say("### From start to the first answer\n");
    let mut rows: Vec<(String, Series)> = Vec::new();
    for round in 0..bench.options.rounds {
        for nth in 0..bench.count() {
            let peer = bench.peer(nth, Upstream::Plain, "")?;
            let took = served(&peer).await.map_err(|cause| format!("{}: {cause}", peer.name))?;
            if round == 0 {
                rows.push((peer.name, Series::default()));
            }
            rows[nth].1.push(took.as_secs_f64() * 1e3);
        }
    }
    let mut table = Table::new(["", "ms", "× nginx", "× floor"]);
    let base = Bases { nginx: &rows[0].1, floor: &rows[1].1 };
    for (name, figure) in &rows {
        table.row(std::iter::once(name.clone()).chain(base.cells(figure)));
    }
    table.print();
    Ok(())
}

async fn served(peer: &Peer) -> Result<Duration> {
    let process = peer.process.as_ref().ok_or("it is no process")?;
    let request = peer.target.chat("");
    let mut last = String::new();
    for _ in 0..TRIES {
        let tried = async { peer.target.connect().await?.exchange(&request).await };
        match tried.await {
            Ok(200) => return Ok(process.age()),
            Ok(status) => last = format!("an answer of status {status}"),
            Err(cause) => last = cause.to_string(),
        }
        tokio::time::sleep(AGAIN).await;
    }
    Err(last.into())
}

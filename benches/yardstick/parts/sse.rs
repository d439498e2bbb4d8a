//! How late events come through a proxy: 16 streams of 40 events, one each 20 ms, each with the time at
//! which the provider sent it.

use std::time::{Duration, Instant};

use tokio::task::JoinSet;

use super::super::client::{Connection, Target};
use super::super::figures::percentile;
use super::super::peers::{Peer, Upstream};
use super::super::process::Running;
use super::super::table::{Bases, Table};
use super::super::{Result, clock, say};
use super::{Bench, judge};

const STREAMS: u32 = 16;
/// One after another on each connection; the first is not counted.
const TURNS: u32 = 3;
const EVENTS: u32 = 40;
const EVERY: Duration = Duration::from_millis(20);
/// The most that the floor added beside nginx on a quiet machine.
const USUAL: f64 = 1.14;

pub(crate) async fn run(bench: &Bench) -> Result<()> {
    say("### Streams, 16 × 50 events/s\n");
    let _urgent = bench.urgent()?;
    let mut peers = bench.peers(Upstream::Plain)?;
    peers.push(bench.world.direct()); // last, so that nginx and the floor stay the first
    let rows = bench.rounds(peers, measure).await?;
    let direct = rows.last().map(|row| row.figures.clone()).ok_or("no peers")?;
    let added = |row: usize, nth: usize| rows[row].figures[nth].beyond(&direct[nth]);
    let base = [0, 1].map(|nth| (added(0, nth), added(1, nth)));
    let mut table = Table::new([
        "",
        "first event, added p50 µs",
        "× nginx",
        "× floor",
        "each event, added p50 µs",
        "× nginx",
        "× floor",
        "added p99 µs",
        "CPU µs/event",
    ]);
    for (row, shown) in rows[..rows.len() - 1].iter().enumerate() {
        let cells =
            [0, 1].map(|nth| Bases { nginx: &base[nth].0, floor: &base[nth].1 }.cells(&added(row, nth)));
        let rest = [added(row, 2).to_string(), shown.figures[3].to_string()];
        table.row(std::iter::once(shown.peer.name.clone()).chain(cells.into_iter().flatten()).chain(rest));
    }
    table.print();
    say(&format!("Without a proxy: first event p50 {} µs, each event p50 {} µs.\n", direct[0], direct[1]));
    judge(&base[1].1, &base[1].0, USUAL);
    Ok(())
}

/// What one stream or many showed, in µs.
#[derive(Default)]
struct Delays {
    first: Vec<f64>,
    each: Vec<f64>,
}

/// p50 of the first event, p50 and p99 of each, CPU µs an event.
async fn measure(peer: &Peer) -> Result<[f64; 4]> {
    let cpu = || peer.process.as_ref().map_or(f64::NAN, Running::cpu);
    let before = cpu();
    let mut all = streams(&peer.target).await?;
    let cpu = (cpu() - before) / f64::from(STREAMS * TURNS * EVENTS);
    let p99 = percentile(&mut all.each, 0.99);
    Ok([percentile(&mut all.first, 0.5), percentile(&mut all.each, 0.5), p99, cpu])
}

async fn streams(target: &Target) -> Result<Delays> {
    let mut reading = JoinSet::new();
    for nth in 0..STREAMS {
        let target = target.clone();
        reading.spawn(async move {
            tokio::time::sleep(EVERY * nth / STREAMS).await; // apart, as users' streams are
            let mut connection = target.connect().await?;
            let request = target.chat(&format!("sse={EVENTS},{}", EVERY.as_millis()));
            let mut counted = Delays::default();
            for turn in 0..TURNS {
                let sent = Instant::now();
                connection.send(&request).await?;
                connection.head().await?.expect(200)?;
                let mut delays = read(&mut connection, sent).await?;
                if turn > 0 {
                    counted.first.append(&mut delays.first);
                    counted.each.append(&mut delays.each);
                }
            }
            Ok::<_, Box<dyn std::error::Error + Send + Sync>>(counted)
        });
    }
    let mut all = Delays::default();
    while let Some(delays) = reading.join_next().await {
        let mut delays = delays??;
        all.first.append(&mut delays.first);
        all.each.append(&mut delays.each);
    }
    Ok(all)
}

/// Reads one stream to its end.
async fn read(connection: &mut Connection, sent: Instant) -> Result<Delays> {
    let mut delays = Delays::default();
    loop {
        let input = connection.input();
        let now = clock::nanos();
        while let Some((stamp, end)) = stamp(input) {
            if delays.first.is_empty() {
                delays.first.push(sent.elapsed().as_secs_f64() * 1e6);
            }
            #[allow(clippy::cast_precision_loss)]
            delays.each.push(now.saturating_sub(stamp) as f64 / 1e3);
            let _ = input.split_to(end);
        }
        if input.ends_with(b"0\r\n\r\n") {
            input.clear();
            break;
        }
        connection.more().await?;
    }
    if delays.each.len() == EVENTS as usize { Ok(delays) } else { Err("an event is missing".into()) }
}

/// The first time in it, and where that ends: `@`, 20 digits, `@`.
fn stamp(input: &[u8]) -> Option<(u64, usize)> {
    let from = memchr::memchr(b'@', input)? + 1;
    let digits = input.get(from..from + 20)?;
    Some((std::str::from_utf8(digits).ok()?.parse().ok()?, from + 21))
}

//! Ten times as many callers as there are slots: what is still answered, what it takes, and whether health
//! and metrics can be read meanwhile.
//!
//! The provider takes 20 ms an answer, so that the slots and not the CPU are what is short. Patient callers
//! wait as long as lessor lets them, and then all are served; hasty ones wait 50 ms, are refused, and come
//! again at once, which is the worst that they can do.

use std::time::{Duration, Instant};

use super::super::client::Target;
use super::super::figures::{Series, percentile};
use super::super::load::{self, Load};
use super::super::peers::{KEYS, Peer, Settings, Upstream};
use super::super::process::Running;
use super::super::table::Table;
use super::super::{Result, say};
use super::Bench;

const PROVIDER: &str = "delay=20";
/// Of each key, as is the default.
const USES: u32 = 8;
const SLOTS: usize = KEYS * USES as usize;
const TIMES: usize = 10;
/// Between two looks at health, metrics and memory.
const LOOK: Duration = Duration::from_millis(100);
const HASTY: &str = "x-lessor-max-wait: 50ms\r\n";

pub(crate) async fn run(bench: &Bench) -> Result<()> {
    say(&format!("### Overload, {} callers for {SLOTS} slots\n", SLOTS * TIMES));
    let mut table = Table::new([
        "",
        "answered/s at the cap",
        "answered/s overloaded",
        "× the cap",
        "refused %",
        "CPU µs/answer",
        "idle MiB",
        "most MiB",
        "/readyz p50, p99 ms",
        "/metrics p50, p99 ms",
    ]);
    for store in bench.stores() {
        let settings = Settings { uses: USES, ..Settings::of(store) };
        let peer = bench.world.lessor(Upstream::Plain, &settings)?;
        let time = bench.options.overload_seconds;
        let peak = load::saturate(&peer.target, PROVIDER, SLOTS, time, &[]).await?.per_second;
        for (who, headers) in [("patient", ""), ("hasty", HASTY)] {
            let name = format!("{}, {who}", peer.name);
            let cells = row(&peer, headers, peak, time).await.map_err(|cause| format!("{name}: {cause}"))?;
            table.row(std::iter::once(name).chain(cells));
        }
    }
    table.print();
    Ok(())
}

async fn row(peer: &Peer, headers: &'static str, peak: f64, time: Duration) -> Result<[String; 9]> {
    let process = peer.process.as_ref().ok_or("it is no process")?;
    let target = Target { headers, ..peer.target.clone() };
    let idle = process.memory() / 1024.0;
    let mut seen = Seen::default();
    let watched = [process];
    let (over, looked) = tokio::join!(
        load::saturate(&target, PROVIDER, SLOTS * TIMES, time, &watched),
        seen.look(peer, process, time)
    );
    let Load { per_second, refused, cpu } = over?;
    looked?;
    let times = |of: &mut [f64]| format!("{:.1}, {:.1}", percentile(of, 0.5), percentile(of, 0.99));
    Ok([
        format!("{peak:.0}"),
        format!("{per_second:.0}"),
        format!("{:.2}", per_second / peak),
        format!("{:.0}", refused * 100.0),
        format!("{:.0}", cpu[0]),
        format!("{idle:.1}"),
        format!("{:.1}", seen.memory.most()),
        times(&mut seen.ready),
        times(&mut seen.metrics),
    ])
}

/// What was seen while the load ran.
#[derive(Default)]
struct Seen {
    ready: Vec<f64>,
    metrics: Vec<f64>,
    memory: Series,
}

impl Seen {
    async fn look(&mut self, peer: &Peer, process: &Running, time: Duration) -> Result<()> {
        let admin = Target::new(peer.admin.ok_or("it has no admin listener")?, "");
        let begun = Instant::now();
        while begun.elapsed() < load::WARM + time {
            self.ready.push(get(&admin, "/readyz").await?);
            self.metrics.push(get(&admin, "/metrics").await?);
            self.memory.push(process.memory() / 1024.0);
            tokio::time::sleep(LOOK).await;
        }
        Ok(())
    }
}

/// How long it took, in ms, with a connection of its own as probes make.
async fn get(admin: &Target, path: &str) -> Result<f64> {
    let begun = Instant::now();
    match admin.connect().await?.exchange(&admin.head("GET", path, "", 0)).await? {
        200 => Ok(begun.elapsed().as_secs_f64() * 1e3),
        other => Err(format!("{path} answered {other}").into()),
    }
}

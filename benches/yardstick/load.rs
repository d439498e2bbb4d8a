//! Load of a fixed number of connections, each of which asks again as soon as it is answered.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use tokio::task::JoinSet;

use super::Result;
use super::client::Target;
use super::process::Running;

/// Before the measuring: connections are made, pools and caches filled.
pub(crate) const WARM: Duration = Duration::from_millis(500);

/// What a time of load came to.
pub(crate) struct Load {
    pub(crate) per_second: f64,
    /// Requests that were refused, of all.
    pub(crate) refused: f64,
    /// CPU of each process that was looked at, µs a request.
    pub(crate) cpu: Vec<f64>,
}

struct Counted {
    stop: AtomicBool,
    done: AtomicU64,
    refused: AtomicU64,
}

/// Asks for `time` on so many connections. A refusal (429) is counted; any other failure ends it.
pub(crate) async fn saturate(
    target: &Target,
    query: &str,
    connections: usize,
    time: Duration,
    watched: &[&Running],
) -> Result<Load> {
    let counted =
        Arc::new(Counted { stop: false.into(), done: AtomicU64::new(0), refused: AtomicU64::new(0) });
    let request: Arc<[u8]> = target.chat(query).into();
    let mut asking = JoinSet::new();
    for _ in 0..connections {
        asking.spawn(ask(target.clone(), request.clone(), counted.clone()));
    }
    let measured = measure(&counted, time, watched);
    let load = tokio::select! {
        load = measured => load,
        Some(ended) = asking.join_next() => return Err(ended?.err().unwrap_or("the load ended early".into())),
    };
    counted.stop.store(true, Ordering::Relaxed);
    while let Some(ended) = asking.join_next().await {
        ended??;
    }
    Ok(load)
}

async fn measure(counted: &Counted, time: Duration, watched: &[&Running]) -> Load {
    tokio::time::sleep(WARM).await;
    let look = || {
        let cpu: Vec<f64> = watched.iter().map(|process| process.cpu()).collect();
        let count = |of: &AtomicU64| of.load(Ordering::Relaxed);
        (Instant::now(), count(&counted.done), count(&counted.refused), cpu)
    };
    let before = look();
    tokio::time::sleep(time).await;
    let after = look();
    #[allow(clippy::cast_precision_loss)]
    let (done, refused) = ((after.1 - before.1) as f64, (after.2 - before.2) as f64);
    let cpu = after.3.iter().zip(&before.3);
    Load {
        per_second: done / (after.0 - before.0).as_secs_f64(),
        refused: refused / (done + refused),
        cpu: cpu.map(|(after, before)| (after - before) / done).collect(),
    }
}

async fn ask(target: Target, request: Arc<[u8]>, counted: Arc<Counted>) -> Result<()> {
    let mut connection = target.connect().await?;
    while !counted.stop.load(Ordering::Relaxed) {
        match connection.exchange(&request).await? {
            200 => counted.done.fetch_add(1, Ordering::Relaxed),
            429 => counted.refused.fetch_add(1, Ordering::Relaxed),
            other => return Err(format!("an answer of status {other}").into()),
        };
    }
    Ok(())
}

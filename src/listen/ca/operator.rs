//! An operator's CA that is renewed while lessor runs: its files are read again, and taken whole or not at
//! all.

use std::sync::Arc;
use std::time::Duration;

use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio_util::sync::CancellationToken;

use super::Authority;
use crate::config::CaFiles;

/// How often the files are looked at; SIGHUP has them read at once.
pub const LOOK_EVERY: Duration = Duration::from_secs(30);

/// Keeps `authority` by what the files say, until told to stop. What is no sound pair, as it is for a moment
/// while one file is new and the other old, leaves the CA that signs as it is; each such reason is told once.
///
/// SIGHUP is watched from the call on, not from the first poll: before that it would end the process.
pub fn follow(
    authority: Arc<Authority>,
    files: CaFiles,
    every: Duration,
    stop: CancellationToken,
) -> impl Future<Output = ()> + Send {
    // Without it there is still the look at the files.
    let asked = signal(SignalKind::hangup()).ok();
    async move {
        tokio::select! {
            biased;
            () = stop.cancelled() => {}
            () = look(authority, files, every, asked) => {}
        }
    }
}

async fn look(authority: Arc<Authority>, mut files: CaFiles, every: Duration, mut asked: Option<Signal>) {
    let mut told = None;
    loop {
        let by_hand = async {
            match &mut asked {
                Some(asked) => asked.recv().await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            _ = by_hand => {}
            () = tokio::time::sleep(every) => {}
        }
        // A file system may take its time: not on a thread that serves.
        let known = files.clone();
        let Ok(read) = tokio::task::spawn_blocking(move || known.read_again()).await else { continue };
        let taken = read.and_then(|new| {
            new.map(|new| authority.adopt(&new).map(|()| new)).transpose().map_err(|error| error.to_string())
        });
        match taken {
            Ok(None) => told = None,
            Ok(Some(new)) => {
                tracing::info!(cert_file = %new.cert_file.display(), "the operator's CA was renewed");
                (files, told) = (new, None);
            }
            Err(why) if told.as_ref() != Some(&why) => {
                tracing::warn!("[ca] is not taken, and the CA that was read before still signs: {why}");
                told = Some(why);
            }
            Err(_) => {}
        }
    }
}

//! Where reviews are decided: not on the threads that serve, so many at once, and within a time.
//!
//! JSON in memory is many times its text: a list of `{"a":0}` takes about 90 bytes for each one of the body. How
//! many objects, lists and values there are is bounded before they are read, so the largest review takes some
//! 60 MiB, and one such is read at a time; beside it a small one for each CPU, with 6 MiB at most. Large ones have one
//! thread of their own: an allocator keeps for a thread what that has freed, so many would keep it many times.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::{SyncSender, sync_channel};
use std::time::Duration;

use tokio::sync::{Semaphore, oneshot};

/// The bound of one decision, its wait for a CPU included. The API server waits for 10 s, or as the webhook's
/// configuration says.
const DECISION: Duration = Duration::from_secs(5);
/// Reviews read at once, however many CPUs there are.
const MOST: usize = 4;
/// A body above this is a large one.
const LARGE: usize = 64 * 1024;
/// Objects and lists of one review; a pod with ten thousand variables has half as many.
const NODES: usize = 50_000;
/// Commas of one review, which part values; texts may have some, too.
const COMMAS: usize = 200_000;

/// Threads for decisions.
pub(super) struct Work {
    cpus: Arc<Semaphore>,
    large: Arc<Semaphore>,
    /// To the thread for large ones, which ends with this.
    thread: SyncSender<Job>,
}

type Job = Box<dyn FnOnce() + Send>;

/// Why there is no decision.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum NoWork {
    #[error("the review was not decided within {DECISION:?}; try again, or give the injector more CPU")]
    Late,
    #[error("the review could not be decided: lessor has a defect, see its log")]
    Broken,
    #[error(
        "the body has more than {NODES} objects and lists, or {COMMAS} commas, which no review of a pod has"
    )]
    TooMany,
}

impl Default for Work {
    fn default() -> Self {
        let cpus = std::thread::available_parallelism().map_or(1, usize::from).min(MOST);
        let (thread, jobs) = sync_channel::<Job>(1);
        let run = move || {
            for job in jobs {
                // Whoever waits for it hears of a panic by what it held; the next one needs the thread.
                let _ = catch_unwind(AssertUnwindSafe(job));
            }
        };
        if let Err(cause) = std::thread::Builder::new().name("large-reviews".into()).spawn(run) {
            tracing::error!(%cause, "there is no thread for large reviews, so none is decided");
        }
        Self { cpus: Arc::new(Semaphore::new(cpus)), large: Arc::new(Semaphore::new(1)), thread }
    }
}

impl Work {
    /// Does `work` on a body. It cannot be broken off: what is late goes on, in its place, and is thrown away.
    pub(super) async fn done<T, W>(&self, body: Vec<u8>, work: W) -> Result<T, NoWork>
    where
        T: Send + 'static,
        W: FnOnce(&[u8]) -> T + Send + 'static,
    {
        let nodes = memchr::memchr2_iter(b'{', b'[', &body).count();
        if nodes > NODES || memchr::memchr_iter(b',', &body).count() > COMMAS {
            return Err(NoWork::TooMany);
        }
        let done = async {
            // The large one first: those that wait for it must not have the CPUs.
            let large = if body.len() > LARGE {
                Some(self.large.clone().acquire_owned().await.map_err(|_| NoWork::Broken)?)
            } else {
                None
            };
            let place = self.cpus.clone().acquire_owned().await.map_err(|_| NoWork::Broken)?;
            let (to, done) = oneshot::channel();
            let on_its_own = large.is_some();
            let job: Job = Box::new(move || {
                let _places = (place, large);
                let _ = to.send(work(&body)); // it was late, and nobody waits for it
            });
            if on_its_own {
                // There is room for one, and whoever has the place for large ones is the only one.
                self.thread.try_send(job).map_err(|_| NoWork::Broken)?;
            } else {
                drop(tokio::task::spawn_blocking(job)); // it ends by itself, and says so by the channel
            }
            done.await.map_err(|_| NoWork::Broken)
        };
        tokio::time::timeout(DECISION, done).await.map_err(|_| NoWork::Late)?
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a test that fails may panic
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn what_gets_no_cpu_in_time_is_told_so() {
        let work = Work::default();
        let all = work.cpus.clone().acquire_many_owned(u32::try_from(work.cpus.available_permits()).unwrap());
        let taken = all.await.unwrap();
        assert_eq!(work.done(b"{}".to_vec(), <[u8]>::len).await, Err(NoWork::Late));
        drop(taken);
        assert_eq!(work.done(b"{}".to_vec(), <[u8]>::len).await, Ok(2));
    }

    #[tokio::test]
    async fn large_ones_wait_for_each_other_and_small_ones_go_by() {
        let work = Work::default();
        let large = work.large.clone().acquire_owned().await.unwrap();
        let mut waiting = std::pin::pin!(work.done(vec![b' '; LARGE + 1], <[u8]>::len));
        assert!(futures_util::poll!(waiting.as_mut()).is_pending());
        assert_eq!(work.done(vec![b' '; LARGE], <[u8]>::len).await, Ok(LARGE));
        assert!(futures_util::poll!(waiting.as_mut()).is_pending());
        drop(large);
        assert_eq!(waiting.await, Ok(LARGE + 1));
    }

    #[tokio::test]
    async fn a_body_of_nothing_but_objects_is_not_read() {
        let body = |count| b"{[".repeat(count / 2);
        assert_eq!(Work::default().done(body(NODES + 2), <[u8]>::len).await, Err(NoWork::TooMany));
        assert_eq!(Work::default().done(body(NODES), <[u8]>::len).await, Ok(NODES));
        let commas = Work::default().done(vec![b','; COMMAS + 1], <[u8]>::len).await;
        assert_eq!(commas, Err(NoWork::TooMany));
        let broken = Work::default().done(Vec::new(), |_| panic!("as a defect would")).await;
        assert_eq!(broken, Err::<(), _>(NoWork::Broken));
        // A large one that breaks leaves the thread to the next.
        let (work, large) = (Work::default(), vec![b' '; LARGE + 1]);
        let broken = work.done(large.clone(), |_| panic!("as a defect would")).await;
        assert_eq!(broken, Err::<(), _>(NoWork::Broken));
        assert_eq!(work.done(large, <[u8]>::len).await, Ok(LARGE + 1));
    }
}

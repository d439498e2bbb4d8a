//! What happens after a request: reports, releases, and calls whose outcome nobody saw.
//!
//! Each is a future that is polled once where it begins. A store in this process answers there and then,
//! and nothing is spawned; for any other the future goes on as a tracked task, which the shutdown awaits.
//! All are safe to repeat, and are repeated until answered or until the TTL has settled the matter.

use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use rand::Rng as _;
use tokio::sync::oneshot;
use tokio::time::{Instant, sleep, sleep_until};
use tokio_util::task::TaskTracker;

use super::held::Hold;
use super::{Inner, Station};
use crate::model::LeaseId;
use crate::store::{Acquired, Answer, Candidate, Release, Report, StoreError};

/// How long an acquire may take; the store refuses one that reaches it later.
pub(super) const ACQUIRE_DEADLINE: Duration = Duration::from_secs(2);
/// What is added before an acquire counts as refused by its deadline: the store's clock is an estimate.
const CLOCK_SLACK: Duration = Duration::from_millis(250);
/// How long one release or report may take.
const CALL_LIMIT: Duration = Duration::from_secs(2);
/// How long a release waits for its report, retries included.
const REPORT_LIMIT: Duration = Duration::from_secs(4);
/// Waits between attempts double from here...
const FIRST_PAUSE: Duration = Duration::from_millis(50);
/// ...to here, each jittered.
const LAST_PAUSE: Duration = Duration::from_secs(1);

type Settling = Pin<Box<dyn Future<Output = ()> + Send>>;

/// Polls `work` here and now; what does not end at once goes on as a task of `tracker`.
fn begin(inner: &Inner, tracker: &TaskTracker, mut work: Settling) {
    let _runtime = inner.runtime.enter(); // a drop may happen on any thread
    if work.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending() {
        tracker.spawn_on(work, &inner.runtime);
    }
}

/// One after the other. `None` when it is done already.
pub(super) fn report(inner: &Arc<Inner>, reports: Vec<Report>) -> Option<oneshot::Receiver<()>> {
    let (done, mut reporting) = oneshot::channel();
    let shared = Arc::clone(inner);
    let work = async move {
        let until = Instant::now() + REPORT_LIMIT;
        for report in reports {
            match insist(&shared, until, || shared.store.report(report.clone()), |_| {}).await {
                Some(found) => shared.tell(|witness| witness.reported(&report, &found)),
                None => shared.tell(|witness| witness.not_reported(&report)),
            }
        }
        let _ = done.send(()); // nobody listens when the lease runs on
    };
    begin(inner, &inner.reports, Box::pin(work));
    reporting.try_recv().is_err().then_some(reporting)
}

/// Gives one slot back after its report, and wakes who waits for it.
pub(super) fn release(
    inner: &Arc<Inner>,
    station: &Arc<Station>,
    hold: &Arc<Hold>,
    mut now: Instant,
    reporting: Option<oneshot::Receiver<()>>,
) {
    let (shared, station, hold) = (Arc::clone(inner), Arc::clone(station), Arc::clone(hold));
    let work = async move {
        if let Some(reporting) = reporting {
            let _ = reporting.await; // a report that was given up has dropped its end
            now = Instant::now();
        }
        let release = || vec![hold.release(&station)];
        insist_on_release(&shared, &station, now, release).await;
        station.freed(&hold.grant.key);
    };
    begin(inner, &inner.releases, Box::pin(work));
}

/// Gives slots back again that a re-registration under way may have re-created.
pub(super) fn release_again(
    inner: &Arc<Inner>,
    station: &Arc<Station>,
    releases: Vec<Release>,
    after: Instant,
) {
    let (shared, station) = (Arc::clone(inner), Arc::clone(station));
    let work = async move {
        sleep_until(after).await;
        give_back(&shared, &station, releases).await;
    };
    begin(inner, &inner.releases, Box::pin(work));
}

/// Gives slots back, of any provider; whoever waits for one is not woken.
pub(super) async fn give_back_all(inner: &Inner, releases: &[Release]) {
    let until = Instant::now() + inner.lease.ttl;
    insist(inner, until, || inner.store.release(releases.to_vec()), |_| {}).await;
}

async fn give_back(inner: &Inner, station: &Station, releases: Vec<Release>) {
    insist_on_release(inner, station, Instant::now(), || releases.clone()).await;
    for release in &releases {
        station.freed(&release.key);
    }
}

/// Whether the store takes it or not: once this ends the slots are free, at the latest by the TTL.
async fn insist_on_release(
    inner: &Inner,
    station: &Station,
    now: Instant,
    releases: impl Fn() -> Vec<Release>,
) {
    let failed = |cause: &StoreError| station.store_failed(cause);
    insist(inner, now + inner.lease.ttl, || inner.store.release(releases()), failed).await;
}

/// Calls until answered, or until `until`: the answer, if one came.
async fn insist<T>(
    inner: &Inner,
    until: Instant,
    call: impl Fn() -> Answer<T>,
    failed: impl Fn(&StoreError),
) -> Option<T> {
    let mut pause = FIRST_PAUSE;
    loop {
        let answer = bounded(CALL_LIMIT, call()).await;
        inner.saw(&answer);
        match answer {
            Ok(answer) => return Some(answer),
            Err(cause) => failed(&cause),
        }
        let jittered = pause.mul_f64(rand::rng().random_range(0.5..1.0));
        if Instant::now() + jittered >= until {
            return None;
        }
        sleep(jittered).await;
        pause = (pause * 2).min(LAST_PAUSE);
    }
}

/// An answer within `limit`, or [`StoreError::TimedOut`].
pub(super) async fn bounded<T>(limit: Duration, answer: Answer<T>) -> Result<T, StoreError> {
    in_time(limit, answer).await.unwrap_or(Err(StoreError::TimedOut(limit)))
}

/// What `answer` comes to within `limit`. No timer is made where it has come already, as in `memory:` it has.
async fn in_time<T>(limit: Duration, mut answer: impl Future<Output = T> + Unpin) -> Option<T> {
    if let Poll::Ready(answer) = futures_util::poll!(&mut answer) {
        return Some(answer);
    }
    let mut timer = pin!(sleep(limit));
    // A second poll in the same turn would find nothing, and take from a store what it does between turns.
    let mut polled = true;
    poll_fn(|context| {
        if !std::mem::take(&mut polled)
            && let Poll::Ready(answer) = Pin::new(&mut answer).poll(context)
        {
            return Poll::Ready(Some(answer));
        }
        timer.as_mut().poll(context).map(|()| None)
    })
    .await
}

/// An acquire under way. Whatever becomes of its requester, a slot it is granted does not stay taken: when
/// this is dropped before its answer, or the answer is unknown, a task settles it.
pub(super) struct Asking<'a> {
    inner: &'a Arc<Inner>,
    station: &'a Arc<Station>,
    id: LeaseId,
    asked: &'a [Candidate],
    sent: Instant,
    call: Option<Answer<Acquired>>,
}

impl<'a> Asking<'a> {
    pub(super) fn new(
        inner: &'a Arc<Inner>,
        station: &'a Arc<Station>,
        id: LeaseId,
        asked: &'a [Candidate],
        sent: Instant,
        call: Answer<Acquired>,
    ) -> Self {
        Self { inner, station, id, asked, sent, call: Some(call) }
    }

    /// The answer, at most [`ACQUIRE_DEADLINE`] later. Cancel safe.
    pub(super) async fn answer(&mut self) -> Result<Acquired, StoreError> {
        let Some(call) = self.call.as_mut() else {
            return Err(StoreError::Nonsense("asked twice".into()));
        };
        let Some(answer) = in_time(ACQUIRE_DEADLINE, call).await else {
            return Err(StoreError::TimedOut(ACQUIRE_DEADLINE)); // the call is still here, for `Drop`
        };
        self.call = None;
        if matches!(answer, Err(StoreError::TimedOut(_) | StoreError::Nonsense(_))) {
            self.settle(None);
        }
        answer
    }

    fn settle(&self, call: Option<Answer<Acquired>>) {
        let (inner, station) = (Arc::clone(self.inner), Arc::clone(self.station));
        let (releases, sent) = (self.releases(), self.sent);
        begin(self.inner, &self.inner.releases, Box::pin(settle(inner, station, releases, sent, call)));
    }

    fn releases(&self) -> Vec<Release> {
        let release = |candidate: &Candidate| Release {
            provider: self.station.provider.clone(),
            lease: self.id,
            key: candidate.key.clone(),
            pool: candidate.pool.clone(),
            group: candidate.group.clone(),
        };
        self.asked.iter().map(release).collect()
    }
}

impl Drop for Asking<'_> {
    fn drop(&mut self) {
        if let Some(call) = self.call.take() {
            self.settle(Some(call));
        }
    }
}

/// Waits for the answer of a call that nobody waits for any more. A grant is released at once. Where no
/// answer comes, the call can have no effect after its deadline: what it did before is released then, under
/// each name it may have.
async fn settle(
    inner: Arc<Inner>,
    station: Arc<Station>,
    releases: Vec<Release>,
    sent: Instant,
    call: Option<Answer<Acquired>>,
) {
    let deadline = sent + ACQUIRE_DEADLINE + CLOCK_SLACK;
    let answer = match call {
        Some(call) => tokio::time::timeout_at(deadline, call).await.ok(),
        None => None,
    };
    match answer {
        Some(Ok(Acquired::Refused(_) | Acquired::Late) | Err(StoreError::Unavailable(_))) => return,
        Some(Ok(Acquired::Granted(_))) => {}
        Some(Err(StoreError::TimedOut(_) | StoreError::Nonsense(_))) | None => sleep_until(deadline).await,
    }
    give_back(&inner, &station, releases).await;
}

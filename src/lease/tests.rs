//! What the room promises, on a fake store and a paused clock; the last tests run on real threads.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use tokio::task::{JoinHandle, yield_now};
use tokio::time::{Instant, sleep, timeout};

use super::fake::{Recorder, State};
use super::*;
use crate::config::OnLost;
use crate::model::{
    AppName, Class, Fingerprint, GroupName, LeaseId, ModelName, Outcome, PoolName, ProviderName, Wanted,
};
use crate::store::{Candidate, SyncMode};

const TTL: Duration = Duration::from_secs(30);
const HEARTBEAT: Duration = Duration::from_secs(10);
const LONG: Duration = Duration::from_mins(1);
const MOMENT: Duration = Duration::from_millis(1);

/// These keys, in this order.
struct InOrder<'a> {
    keys: &'a [&'a str],
    model: Option<ModelName>,
    confirms: &'a Confirms,
}

impl Choose for InOrder<'_> {
    fn model(&self) -> Option<&ModelName> {
        self.model.as_ref()
    }

    fn fitting(&self) -> Arc<[KeyId]> {
        self.keys.iter().map(|key| key_id(key)).collect()
    }

    fn rank(&mut self, wanted: &Wanted<'_>) -> Arc<[Candidate]> {
        let all = self.keys.iter().map(|key| candidate(key));
        let left = all.filter(|one| !wanted.leaves_out(&one.key, &one.fingerprint));
        left.take(wanted.most).collect()
    }

    fn confirm(&self, key: &KeyId, fingerprint: Fingerprint) -> bool {
        (self.confirms)(key, fingerprint)
    }
}

#[derive(Clone)]
struct Bench {
    store: Recorder,
    leases: Leases,
    metrics: Metrics,
    /// What the process's own view says of each key.
    confirms: Arc<Confirms>,
}

type Confirms = dyn Fn(&KeyId, Fingerprint) -> bool + Send + Sync;
type Wish = Result<Lease, AcquireError>;

impl Bench {
    fn new(caps: &[(&str, usize)]) -> Self {
        Self::with(Recorder::new(caps), |_| {}, 1024)
    }

    fn with(store: Recorder, change: impl FnOnce(&mut LeaseConfig), max_waiting: usize) -> Self {
        let mut lease =
            LeaseConfig { ttl: TTL, heartbeat: HEARTBEAT, on_lost: OnLost::Abort, max_duration: None };
        change(&mut lease);
        let queue = QueueConfig { max_wait: LONG, max_waiting };
        let metrics = Metrics::new();
        let owner = OwnerId::fresh();
        let leases = Leases::new(Arc::new(store.clone()), lease, queue, owner, metrics.clone());
        Self { store, leases, metrics, confirms: Arc::new(|_, _| true) }
    }

    async fn ask(&self, keys: &[&str], model: Option<&str>, wait: Duration) -> Wish {
        let model = model.and_then(ModelName::new);
        self.leases
            .acquire(Want {
                provider: &openai(),
                app: &AppName::anonymous(),
                pool: &PoolName::default_pool(),
                keys: &mut InOrder { keys, model, confirms: &*self.confirms },
                until: Instant::now() + wait,
            })
            .await
    }

    async fn get(&self, keys: &[&str]) -> Lease {
        self.ask(keys, None, LONG).await.unwrap()
    }

    /// Asks in a task, and lets it come as far as it can.
    async fn start(&self, keys: &'static [&'static str], model: Option<&'static str>) -> JoinHandle<Wish> {
        self.start_for(keys, model, LONG).await
    }

    async fn start_for(
        &self,
        keys: &'static [&'static str],
        model: Option<&'static str>,
        wait: Duration,
    ) -> JoinHandle<Wish> {
        let bench = self.clone();
        let task = tokio::spawn(async move { bench.ask(keys, model, wait).await });
        calm().await;
        task
    }

    /// Lets the store be told its keys.
    fn can_repair(&self) {
        let owner = OwnerId::fresh();
        self.leases.set_repair(Arc::new(move |provider| SyncKeys {
            provider: provider.clone(),
            owner: owner.clone(),
            mode: SyncMode::Repair,
            keys: Vec::new(),
        }));
    }

    fn set(&self, change: impl FnOnce(&mut State)) {
        self.store.set(change);
    }

    fn counts(&self, metric: &str, value: u64) -> bool {
        self.metrics.encode().lines().any(|line| line == format!("{metric} {value}"))
    }

    fn cool(&self, key: &str, model: Option<&str>, rest: Duration) {
        let end = self.store.now().plus(rest);
        self.set(|state| {
            state.cooling.insert((key_id(key), model.and_then(ModelName::new)), end);
        });
    }
}

fn openai() -> ProviderName {
    ProviderName::parse("openai").unwrap()
}

fn key_id(key: &str) -> KeyId {
    KeyId::parse(key).unwrap()
}

fn candidate(key: &str) -> Candidate {
    let pool = PoolName::default_pool();
    Candidate { key: key_id(key), pool, group: None, fingerprint: Fingerprint([1; 32]) }
}

fn said(class: Class) -> Outcome {
    Outcome::plain(class, Some(200))
}

/// Lets every task run until none can.
async fn calm() {
    for _ in 0..50 {
        yield_now().await;
    }
}

fn lost_now(lease: &Lease) -> Poll<Lost> {
    lease.poll_lost(&mut Context::from_waker(Waker::noop()))
}

fn retry_after(wish: Wish) -> Duration {
    match wish {
        Err(AcquireError::PoolExhausted { retry_after, queue_full: false, .. }) => retry_after,
        other => panic!("not exhausted: {other:?}"),
    }
}

// ---- waiting in line ----

#[tokio::test(start_paused = true)]
async fn a_free_slot_is_granted_by_one_call_and_released_by_one() {
    let bench = Bench::new(&[("k1", 1)]);
    let lease = bench.get(&["k1"]).await;
    assert_eq!((bench.leases.live(), bench.store.live()), (1, 1));
    drop(lease);
    assert_eq!((bench.leases.live(), bench.store.live()), (0, 0));
    assert_eq!(bench.store.log(), ["acquire k1", "release 1"]);
}

#[tokio::test(start_paused = true)]
async fn waiters_of_one_slot_are_served_in_the_order_they_came() {
    let bench = Bench::new(&[("k1", 1)]);
    let mut held = bench.get(&["k1"]).await;
    let mut tasks = Vec::new();
    for _ in 0..5 {
        tasks.push(bench.start(&["k1"], None).await);
    }
    for nth in 0..5 {
        drop(held);
        calm().await;
        let done: Vec<_> = tasks.iter().map(JoinHandle::is_finished).collect();
        assert_eq!(done.iter().filter(|done| **done).count(), 1, "after release {nth}");
        held = tasks.remove(0).await.unwrap().unwrap();
    }
    assert_eq!(bench.leases.waiting(), 0);
}

#[tokio::test(start_paused = true)]
async fn a_waiter_for_one_model_does_not_stop_anothers() {
    // given k1 resting for model a, and one who waits for that
    let bench = Bench::new(&[("k1", 1)]);
    bench.cool("k1", Some("a"), Duration::from_secs(20));
    let waits = bench.start(&["k1"], Some("a")).await;
    assert_eq!(bench.leases.waiting(), 1);
    // when another model is asked for, then it is served at once, first time and again
    let lease = bench.ask(&["k1"], Some("b"), Duration::ZERO).await.unwrap();
    let behind = bench.start(&["k1"], Some("b")).await;
    drop(lease);
    calm().await;
    assert!(behind.is_finished());
    assert!(!waits.is_finished());
}

#[tokio::test(start_paused = true)]
async fn newcomers_never_pass_waiters() {
    let bench = Bench::new(&[("k1", 1), ("k2", 1)]);
    let (one, _two) = (bench.get(&["k1"]).await, bench.get(&["k2"]).await);
    let first = bench.start(&["k1"], Some("a")).await;
    // when the slot is back, but the waiter has not run yet, and a newcomer of another queue comes
    drop(one);
    let newcomer = bench.ask(&["k1", "k2"], Some("b"), Duration::ZERO).await;
    // then the slot is the waiter's
    assert!(matches!(newcomer, Err(AcquireError::PoolExhausted { .. })));
    assert_eq!(first.await.unwrap().unwrap().key(), &key_id("k1"));
}

#[tokio::test(start_paused = true)]
async fn newcomers_take_what_no_waiter_waits_for() {
    let bench = Bench::new(&[("k1", 1), ("k2", 1)]);
    let _one = bench.get(&["k1"]).await;
    let _waits = bench.start(&["k1"], None).await;
    let lease = bench.ask(&["k1", "k2"], None, Duration::ZERO).await.unwrap();
    assert_eq!(lease.key(), &key_id("k2"));
}

#[tokio::test(start_paused = true)]
async fn a_dropped_waiter_passes_its_wake_on() {
    let bench = Bench::new(&[("k1", 1)]);
    let held = bench.get(&["k1"]).await;
    let first = bench.start(&["k1"], None).await;
    let second = bench.start(&["k1"], Some("other")).await;
    drop(held); // wakes the first,
    first.abort(); // which never runs again
    assert_eq!(second.await.unwrap().unwrap().waited(), Duration::ZERO);
}

#[tokio::test(start_paused = true)]
async fn two_slots_that_come_back_at_once_serve_two() {
    let bench = Bench::new(&[("k1", 2)]);
    let (one, two) = (bench.get(&["k1"]).await, bench.get(&["k1"]).await);
    let first = bench.start(&["k1"], Some("a")).await;
    let second = bench.start(&["k1"], Some("b")).await;
    drop((one, two));
    calm().await;
    assert!(first.is_finished() && second.is_finished());
}

#[tokio::test(start_paused = true)]
async fn a_wake_its_waiter_cannot_use_goes_to_the_next_who_can() {
    // given k1 full, and waited for under two models
    let bench = Bench::new(&[("k1", 1)]);
    let held = bench.get(&["k1"]).await;
    let first = bench.start(&["k1"], Some("a")).await;
    let second = bench.start(&["k1"], Some("b")).await;
    // when it comes back resting for the first one's model, then the second has it
    bench.cool("k1", Some("a"), Duration::from_secs(20));
    drop(held);
    calm().await;
    assert!(second.is_finished());
    assert!(!first.is_finished());
}

#[tokio::test(start_paused = true)]
async fn a_slot_freed_elsewhere_or_a_change_wakes_waiters() {
    let bench = Bench::new(&[("k1", 1)]);
    let held = bench.get(&["k1"]).await;
    let first = bench.start(&["k1"], None).await;
    bench.set(|state| state.caps.extend([(key_id("k1"), 2)]));
    bench.store.events.send(StoreEvent::Freed(openai(), key_id("k1"))).unwrap();
    calm().await;
    assert!(first.is_finished());
    // and a change lets all have a try who may have one, head after head
    let rest = [bench.start(&["k1"], None).await, bench.start(&["k1"], None).await];
    bench.set(|state| state.caps.extend([(key_id("k1"), 4)]));
    bench.store.events.send(StoreEvent::Changed(openai())).unwrap();
    calm().await;
    assert!(rest.iter().all(JoinHandle::is_finished));
    // and so does the process itself, across queues
    let more = [bench.start(&["k1"], Some("a")).await, bench.start(&["k1"], Some("b")).await];
    bench.set(|state| state.caps.extend([(key_id("k1"), 6)]));
    bench.leases.wake(&openai());
    calm().await;
    assert!(more.iter().all(JoinHandle::is_finished));
    drop(held);
}

#[tokio::test(start_paused = true)]
async fn missed_events_make_all_heads_try() {
    let bench = Bench::new(&[("k1", 1)]);
    let _held = bench.get(&["k1"]).await;
    let first = bench.start(&["k1"], None).await;
    bench.set(|state| state.caps.extend([(key_id("k1"), 2)]));
    let noise = StoreEvent::Changed(ProviderName::parse("other").unwrap());
    for _ in 0..40 {
        bench.store.events.send(noise.clone()).unwrap(); // more than the channel keeps
    }
    calm().await;
    assert!(first.is_finished());
}

#[tokio::test(start_paused = true)]
async fn the_queue_is_bounded() {
    let bench = Bench::with(Recorder::new(&[("k1", 1)]), |_| {}, 2);
    let _held = bench.get(&["k1"]).await;
    let _waits = [bench.start(&["k1"], None).await, bench.start(&["k1"], Some("a")).await];
    let third = bench.ask(&["k1"], None, LONG).await;
    assert!(matches!(third, Err(AcquireError::PoolExhausted { queue_full: true, .. })));
    assert_eq!(bench.leases.waiting(), 2);
}

#[tokio::test(start_paused = true)]
async fn a_wait_that_only_cooldowns_could_end_too_late_is_refused_at_once() {
    let bench = Bench::new(&[("k1", 1), ("k2", 1)]);
    bench.cool("k1", None, Duration::from_mins(2));
    bench.cool("k2", None, Duration::from_mins(3));
    let asked = Instant::now();
    let wish = bench.ask(&["k1", "k2"], None, LONG).await;
    assert_eq!(retry_after(wish), Duration::from_mins(2));
    assert_eq!(asked.elapsed(), Duration::ZERO);
}

#[tokio::test(start_paused = true)]
async fn who_waits_already_is_refused_once_waiting_is_hopeless() {
    let bench = Bench::new(&[("k1", 1)]);
    let held = bench.get(&["k1"]).await;
    let waits = [bench.start(&["k1"], None).await, bench.start(&["k1"], None).await];
    bench.cool("k1", None, Duration::from_mins(2));
    drop(held);
    calm().await;
    for wait in waits {
        assert!(wait.is_finished());
        assert_eq!(retry_after(wait.await.unwrap()).as_secs(), 120);
    }
}

#[tokio::test(start_paused = true)]
async fn the_head_tries_again_when_the_first_cooldown_ends() {
    let bench = Bench::new(&[("k1", 1)]);
    let rest = Duration::from_secs(3);
    bench.cool("k1", None, rest);
    let lease = bench.get(&["k1"]).await;
    assert!((rest..rest + Duration::from_millis(50)).contains(&lease.waited()), "{:?}", lease.waited());
    assert_eq!(bench.store.logged("refuse").len(), 2); // as a newcomer, and once more in line
}

#[tokio::test(start_paused = true)]
async fn the_next_head_inherits_the_timer() {
    let bench = Bench::new(&[("k1", 1)]);
    bench.cool("k1", None, Duration::from_secs(3));
    let first = bench.start(&["k1"], None).await;
    let second = bench.start(&["k1"], None).await;
    first.abort();
    let lease = second.await.unwrap().unwrap();
    assert_eq!(lease.waited().as_secs(), 3);
}

#[tokio::test(start_paused = true)]
async fn a_slot_that_nobody_announces_is_found_at_the_lease_end_the_store_named_or_within_a_heartbeat() {
    for (named, at_most) in
        [(Some(Duration::from_secs(4)), Duration::from_millis(4_050)), (None, HEARTBEAT * 2)]
    {
        let bench = Bench::new(&[("k1", 1)]);
        let end = named.map(|named| bench.store.now().plus(named));
        bench.set(|state| {
            state.live.entry(key_id("k1")).or_default().insert(LeaseId::fresh()); // another sidecar's
            state.lease_end = end;
        });
        let waits = bench.start(&["k1"], None).await;
        sleep(Duration::from_secs(3)).await;
        bench.set(|state| state.live.clear()); // that one expired
        assert!(waits.await.unwrap().unwrap().waited() <= at_most);
    }
}

#[tokio::test(start_paused = true)]
async fn the_wait_ends_at_its_bound_and_names_an_estimate() {
    let bench = Bench::new(&[("k1", 1)]);
    let short = bench.get(&["k1"]).await;
    sleep(Duration::from_secs(7)).await;
    drop(short);
    let _held = bench.get(&["k1"]).await;
    let asked = Instant::now();
    let wish = bench.ask(&["k1"], None, Duration::from_secs(2)).await;
    assert_eq!(asked.elapsed().as_secs(), 2);
    assert_eq!(retry_after(wish).as_secs(), 7);
    assert_eq!(bench.leases.waiting(), 0);
}

#[tokio::test(start_paused = true)]
async fn unusable_keys_are_refused_at_once_and_mixed_ones_count_as_cooling() {
    let bench = Bench::new(&[("k1", 1), ("k2", 1)]);
    bench.set(|state| state.unusable.extend([key_id("k1")]));
    let wish = bench.ask(&["k1"], None, LONG).await;
    assert!(matches!(wish, Err(AcquireError::KeyUnavailable { .. })));
    assert!(matches!(bench.ask(&[], None, LONG).await, Err(AcquireError::KeyUnavailable { .. })));
    bench.cool("k2", None, Duration::from_mins(2));
    assert_eq!(retry_after(bench.ask(&["k1", "k2"], None, LONG).await).as_secs(), 120);
}

#[tokio::test(start_paused = true)]
async fn a_store_that_was_away_is_told_of_live_leases_at_once() {
    let bench = Bench::new(&[("k1", 2)]);
    let held = bench.get(&["k1"]).await;
    sleep(MOMENT).await;
    bench.store.events.send(StoreEvent::Reconnected).unwrap();
    sleep(MOMENT).await;
    assert_eq!(bench.store.logged("reassert"), ["reassert 1"]);
    drop(held);
}

#[tokio::test(start_paused = true)]
async fn missing_settings_are_repaired_once() {
    let bench = Bench::new(&[("k1", 1)]);
    bench.set(|state| state.bare = true);
    assert!(matches!(bench.ask(&["k1"], None, LONG).await, Err(AcquireError::KeyUnavailable { .. })));
    bench.can_repair();
    drop(bench.get(&["k1"]).await);
    // a repair that does not help is not repeated
    assert!(matches!(bench.ask(&["gone"], None, LONG).await, Err(AcquireError::KeyUnavailable { .. })));
    assert_eq!(bench.store.logged("sync").len(), 2);
}

#[tokio::test(start_paused = true)]
async fn a_key_the_process_does_not_confirm_is_given_back_and_the_next_is_tried() {
    let mut bench = Bench::new(&[("k1", 1), ("k2", 1)]);
    bench.confirms = Arc::new(|key, _| key.as_str() != "k1");
    let lease = bench.get(&["k1", "k2"]).await;
    assert_eq!(lease.key(), &key_id("k2"));
    assert_eq!(bench.store.live(), 1);
    assert!(matches!(bench.ask(&["k1"], None, LONG).await, Err(AcquireError::KeyUnavailable { .. })));
}

#[tokio::test(start_paused = true)]
async fn the_best_few_candidates_go_to_the_store_first_and_the_rest_after() {
    let bench = Bench::new(&[("k1", 0), ("k2", 0), ("k3", 0), ("k4", 1)]);
    let lease = bench.get(&["k1", "k2", "k3", "k4"]).await;
    assert_eq!(lease.key(), &key_id("k4"));
    assert_eq!(bench.store.log(), ["refuse", "acquire k4"]);
}

// ---- the store fails ----

#[tokio::test(start_paused = true)]
async fn a_failing_store_fails_the_caller_and_all_waiters_at_once() {
    let bench = Bench::new(&[("k1", 1)]);
    let _held = bench.get(&["k1"]).await;
    let waits = [bench.start(&["k1"], None).await, bench.start(&["k1"], Some("a")).await];
    bench.set(|state| state.fails = Some(StoreError::Unavailable("down".into())));
    let asked = Instant::now();
    let newcomer = bench.ask(&["k2"], None, LONG).await;
    assert_eq!(asked.elapsed(), Duration::ZERO);
    assert!(matches!(newcomer, Err(AcquireError::StoreUnavailable { .. })));
    calm().await;
    for wait in waits {
        assert!(wait.is_finished());
        assert!(matches!(wait.await.unwrap(), Err(AcquireError::StoreUnavailable { .. })));
    }
    assert_eq!(bench.leases.waiting(), 0);
    assert!(bench.counts("lessor_store_up", 0));
    bench.set(|state| state.fails = None);
    assert!(bench.start_for(&["k1"], None, Duration::ZERO).await.await.unwrap().is_err());
    assert!(bench.counts("lessor_store_up", 1));
}

#[tokio::test(start_paused = true)]
async fn waiters_hear_of_a_failing_store_from_a_release_or_a_renewal_too() {
    let bench = Bench::new(&[("k1", 1), ("k2", 1)]);
    let (_held, other) = (bench.get(&["k1"]).await, bench.get(&["k2"]).await);
    let waits = bench.start(&["k1"], None).await;
    bench.set(|state| state.fails = Some(StoreError::Unavailable("down".into())));
    drop(other);
    calm().await;
    assert!(waits.is_finished());
    bench.set(|state| state.fails = None);
    let waits = bench.start(&["k1"], None).await;
    sleep(Duration::from_secs(9)).await; // the heartbeat comes before this one's timer
    bench.set(|state| state.fails = Some(StoreError::Unavailable("down".into())));
    assert!(matches!(waits.await.unwrap(), Err(AcquireError::StoreUnavailable { .. })));
}

#[tokio::test(start_paused = true)]
async fn nobody_stands_in_line_before_a_store_that_is_known_to_fail() {
    let bench = Bench::new(&[("k1", 1)]);
    let _held = bench.get(&["k1"]).await;
    let _waits = bench.start(&["k1"], None).await;
    let down: Result<(), _> = Err(StoreError::Unavailable("down".into()));
    bench.set(|state| state.fails = down.clone().err());
    bench.leases.inner().saw(&down); // another provider's call failed
    let asked = Instant::now();
    let newcomer = bench.ask(&["k1"], None, LONG).await;
    assert!(matches!(newcomer, Err(AcquireError::StoreUnavailable { .. })));
    assert_eq!(asked.elapsed(), Duration::ZERO);
}

#[tokio::test(start_paused = true)]
async fn a_grant_whose_answer_was_lost_is_released_after_the_deadline() {
    let bench = Bench::new(&[("k1", 1)]);
    bench.set(|state| state.mute = true);
    let asked = Instant::now();
    let wish = bench.ask(&["k1"], None, LONG).await;
    assert!(matches!(wish, Err(AcquireError::StoreUnavailable { cause: StoreError::TimedOut(_) })));
    assert_eq!(asked.elapsed().as_secs(), 2);
    assert_eq!(bench.store.live(), 1);
    bench.set(|state| state.mute = false);
    sleep(Duration::from_secs(1)).await;
    assert_eq!(bench.store.live(), 0);
}

#[tokio::test(start_paused = true)]
async fn a_slot_comes_back_wherever_its_acquire_is_dropped() {
    let latency = Duration::from_millis(10);
    for dropped_after in [0, 1, 5, 10, 11, 15, 19, 20, 21, 40, 55, 60, 65, 75, 79, 80, 81, 100] {
        // given a slow store, and a slot that another holds until the second try
        let bench = Bench::new(&[("k1", 1)]);
        let held = bench.get(&["k1"]).await;
        bench.set(|state| state.latency = latency);
        let after = Duration::from_millis(dropped_after);
        let other = bench.start(&["k1"], Some("other")).await;
        tokio::spawn(async move {
            sleep(Duration::from_millis(50)).await;
            drop(held);
        });
        // when an acquire is dropped at some point of its way
        let dropped = timeout(after, bench.ask(&["k1"], None, LONG)).await;
        drop(dropped);
        // then the other waiter is served, and in the end nothing is held
        drop(timeout(Duration::from_secs(1), other).await.unwrap().unwrap().unwrap());
        sleep(Duration::from_secs(5)).await;
        assert_eq!(bench.store.live(), 0, "dropped after {after:?}");
        assert_eq!((bench.leases.live(), bench.leases.waiting()), (0, 0));
    }
}

#[tokio::test(start_paused = true)]
async fn a_release_is_repeated_until_the_store_answers() {
    let bench = Bench::new(&[("k1", 1)]);
    let lease = bench.get(&["k1"]).await;
    bench.set(|state| state.fails = Some(StoreError::Unavailable("down".into())));
    drop(lease);
    sleep(Duration::from_secs(5)).await;
    assert_eq!(bench.store.live(), 1);
    bench.set(|state| state.fails = None);
    sleep(Duration::from_secs(2)).await;
    assert_eq!(bench.store.live(), 0);
    assert_eq!(bench.store.logged("release"), ["release 1"]);
}

// ---- reports and releases ----

#[tokio::test(start_paused = true)]
async fn a_lease_is_released_exactly_once_and_after_its_report() {
    for latency in [Duration::ZERO, Duration::from_millis(30)] {
        let bench = Bench::new(&[("k1", 1)]);
        let mut lease = bench.get(&["k1"]).await;
        bench.set(|state| state.latency = latency);
        lease.report(said(Class::Rate), None);
        lease.report(said(Class::Invalid), None); // the first counts
        bench.set(|state| state.latency = Duration::ZERO); // the release could be there first
        drop(lease);
        sleep(Duration::from_secs(1)).await;
        bench.leases.shutdown().await;
        assert_eq!(bench.store.log(), ["acquire k1", "report k1 rate", "release 1"]);
    }
}

#[tokio::test(start_paused = true)]
async fn a_release_spawns_nothing_where_the_store_answers_at_once() {
    let bench = Bench::new(&[("k1", 1)]);
    let mut lease = bench.get(&["k1"]).await;
    lease.report(said(Class::Rate), None);
    drop(lease);
    let inner = bench.leases.inner();
    assert!(inner.reports.is_empty() && inner.releases.is_empty());
}

#[tokio::test]
async fn a_lease_may_be_dropped_on_a_thread_that_knows_no_runtime() {
    let bench = Bench::new(&[("k1", 1)]);
    let mut lease = bench.get(&["k1"]).await;
    bench.set(|state| state.latency = MOMENT);
    let dropping = std::thread::spawn(move || {
        lease.report(said(Class::Rate), None);
        drop(lease);
    });
    dropping.join().unwrap();
    bench.leases.shutdown().await;
    assert_eq!(bench.store.log(), ["acquire k1", "report k1 rate", "release 1"]);
}

#[tokio::test(start_paused = true)]
async fn only_reports_that_can_change_something_are_sent() {
    let bench = Bench::new(&[("k1", 9)]);
    let quiet = [Class::Success, Class::Caller, Class::Cancelled, Class::Network];
    for class in quiet {
        bench.get(&["k1"]).await.report(said(class), None);
    }
    assert!(bench.store.logged("report").is_empty());
    bench.set(|state| state.wants_success = true);
    bench.get(&["k1"]).await.report(said(Class::Success), None);
    assert_eq!(bench.store.logged("report"), ["report k1 success"]);
    bench.set(|state| (state.wants_success, state.probe) = (false, true));
    for class in quiet {
        bench.get(&["k1"]).await.report(said(class), None);
    }
    assert_eq!(bench.store.logged("report").len(), 5);
}

#[tokio::test(start_paused = true)]
async fn an_answer_that_names_a_group_is_told_once_and_only_of_a_key_that_waits_for_it() {
    let org = || GroupName::of_organization("acme");
    let names_it = || Outcome { organization: Some(org()), ..said(Class::Success) };
    for (group, told) in [
        (None, 0),
        (Some(GroupName::parse("mine").unwrap()), 0),
        (Some(GroupName::auto()), 1),
        (Some(GroupName::of_organization("other")), 1),
        (Some(org()), 0),
    ] {
        let bench = Bench::new(&[("k1", 1)]);
        bench.set(|state| state.group = group);
        bench.get(&["k1"]).await.report(names_it(), None);
        assert_eq!(bench.store.logged("report").len(), told);
    }
}

#[tokio::test(start_paused = true)]
async fn a_wait_that_was_named_becomes_up_to_a_twentieth_longer_and_never_shorter() {
    let bench = Bench::new(&[("k1", 200)]);
    let named = Duration::from_secs(100);
    for _ in 0..100 {
        bench.get(&["k1"]).await.report(Outcome { wait: Some(named), ..said(Class::Rate) }, None);
    }
    bench.get(&["k1"]).await.report(said(Class::Rate), None);
    let mut waits = std::mem::take(&mut lock(&bench.store.state).waits);
    assert_eq!(waits.pop(), Some(None));
    assert!(waits.iter().all(|wait| (named..named * 105 / 100).contains(&wait.unwrap())), "{waits:?}");
    waits.sort_unstable();
    waits.dedup();
    assert!(waits.len() > 50, "they are spread: {waits:?}");
}

#[tokio::test(start_paused = true)]
async fn a_panic_while_holding_a_lease_releases_it() {
    let bench = Bench::new(&[("k1", 1)]);
    let lease = bench.get(&["k1"]).await;
    let task = tokio::spawn(async move {
        let _held = lease;
        panic!("on purpose");
    });
    assert!(task.await.unwrap_err().is_panic());
    assert_eq!(bench.store.live(), 0);
}

#[tokio::test(start_paused = true)]
async fn the_gauge_of_active_leases_follows() {
    let bench = Bench::new(&[("k1", 2)]);
    let gauge = r#"lessor_leases_active{provider="openai",pool="default",key="k1"}"#;
    let leases = (bench.get(&["k1"]).await, bench.get(&["k1"]).await);
    assert!(bench.counts(gauge, 2));
    drop(leases);
    assert!(bench.counts(gauge, 0));
}

// ---- the heartbeat ----

#[tokio::test(start_paused = true)]
async fn ten_live_leases_share_one_renewal_an_interval_and_none_follows_their_end() {
    let bench = Bench::new(&[("k1", 10)]);
    let mut leases = Vec::new();
    for _ in 0..10 {
        leases.push(bench.get(&["k1"]).await);
    }
    sleep(HEARTBEAT * 5 / 2).await;
    drop(leases);
    sleep(HEARTBEAT * 10).await;
    assert_eq!(bench.store.logged("renew"), ["renew 10", "renew 10"]);
}

/// More leases than one call renews, and a store that has a fifth of a second of work with each call from the first
/// heartbeat on.
async fn very_many(bench: &Bench) -> Vec<Lease> {
    let mut leases = Vec::new();
    for _ in 0..2500 {
        leases.push(bench.get(&["k1"]).await);
    }
    bench.set(|state| {
        state.log.clear();
        state.latency = Duration::from_millis(100);
    });
    sleep(HEARTBEAT).await;
    leases
}

#[tokio::test(start_paused = true)]
async fn the_renewals_of_very_many_leases_go_one_after_another() {
    let bench = Bench::new(&[("k1", 2500)]);
    let _leases = very_many(&bench).await;
    sleep(Duration::from_millis(150)).await;
    assert_eq!(bench.store.log(), ["renew 1000"]);
    sleep(Duration::from_millis(200)).await;
    assert_eq!(bench.store.log(), ["renew 1000", "renew 1000"]);
    sleep(Duration::from_millis(200)).await;
    assert_eq!(bench.store.log(), ["renew 1000", "renew 1000", "renew 500"]);
}

#[tokio::test(start_paused = true)]
async fn leases_that_have_ended_before_their_renewal_is_sent_are_not_named() {
    let bench = Bench::new(&[("k1", 2500)]);
    let leases = very_many(&bench).await;
    sleep(Duration::from_millis(120)).await; // the first call is under way
    drop(leases);
    sleep(Duration::from_secs(1)).await;
    assert_eq!(bench.store.logged("renew"), ["renew 1000"]);
}

#[tokio::test(start_paused = true)]
async fn a_renewal_that_fails_puts_only_the_leases_it_names_in_doubt_and_they_come_first_the_next_time() {
    let bench = Bench::new(&[("k1", 2500)]);
    let _leases = very_many(&bench).await;
    sleep(Duration::from_millis(250)).await; // the first is answered, the second under way
    bench.set(|state| state.fails = Some(StoreError::TimedOut(MOMENT)));
    sleep(Duration::from_millis(100)).await;
    bench.set(|state| state.fails = None);
    sleep(Duration::from_secs(3)).await;
    let calls = ["renew 1000", "renew 500", "reassert 1000", "renew 1000", "renew 500"];
    assert_eq!(bench.store.log(), calls);
}

#[tokio::test(start_paused = true)]
async fn a_renewed_lease_lives_on() {
    let bench = Bench::new(&[("k1", 1)]);
    let lease = bench.get(&["k1"]).await;
    assert!(timeout(TTL * 10, lease.lost()).await.is_err());
}

#[tokio::test(start_paused = true)]
async fn a_lease_the_store_cannot_renew_expires_at_its_local_deadline() {
    let bench = Bench::new(&[("k1", 1)]);
    let lease = bench.get(&["k1"]).await;
    bench.set(|state| state.fails = Some(StoreError::Unavailable("down".into())));
    let begun = Instant::now();
    assert_eq!(lease.lost().await, Lost::Expired);
    assert_eq!(begun.elapsed().as_secs(), 27); // the TTL less its tenth
    assert!(bench.counts("lessor_lease_expired_total", 1) && bench.counts("lessor_lease_lost_total", 1));
    assert!(!bench.counts("lessor_lease_heartbeat_failed_total", 0));
}

#[tokio::test(start_paused = true)]
async fn where_leases_live_as_long_as_their_holder_none_expires() {
    let mut store = Recorder::new(&[("k1", 1)]);
    store.expire = false;
    let bench = Bench::with(store, |_| {}, 9);
    let lease = bench.get(&["k1"]).await;
    bench.set(|state| state.mute = true);
    assert!(timeout(TTL * 3, lease.lost()).await.is_err());
}

#[tokio::test(start_paused = true)]
async fn a_store_that_hangs_keeps_no_lease_past_its_deadline() {
    let bench = Bench::new(&[("k1", 1)]);
    let lease = bench.get(&["k1"]).await;
    bench.set(|state| state.mute = true);
    let begun = Instant::now();
    assert_eq!(lease.lost().await, Lost::Expired);
    assert_eq!(begun.elapsed().as_secs(), 27);
}

#[tokio::test(start_paused = true)]
async fn after_a_long_stop_the_first_poll_says_expired() {
    let bench = Bench::new(&[("k1", 1)]);
    let lease = bench.get(&["k1"]).await;
    assert_eq!(lost_now(&lease), Poll::Pending);
    let mut stopped = Box::pin(tokio::time::advance(TTL));
    let _ = futures_util::poll!(stopped.as_mut()); // once: the clock jumps, and no other task runs
    assert_eq!(lost_now(&lease), Poll::Ready(Lost::Expired));
}

#[tokio::test(start_paused = true)]
async fn a_lease_the_store_does_not_know_is_lost() {
    let bench = Bench::new(&[("k1", 1)]);
    let lease = bench.get(&["k1"]).await;
    bench.set(|state| state.live.clear());
    let begun = Instant::now();
    assert_eq!(lease.lost().await, Lost::Unknown);
    assert_eq!(begun.elapsed().as_secs(), 10);
    assert!(bench.counts("lessor_lease_lost_total", 1));
    sleep(HEARTBEAT * 3).await;
    assert_eq!(bench.store.logged("renew").len(), 1); // and it is not asked for again
}

#[tokio::test(start_paused = true)]
async fn a_lease_whose_release_overtakes_its_renewal_is_not_counted_as_lost() {
    let bench = Bench::new(&[("k1", 1)]);
    let lease = bench.get(&["k1"]).await;
    sleep(HEARTBEAT.saturating_sub(MOMENT)).await;
    // when the renewal has its effect a moment after the release had its own
    bench.set(|state| state.latency = MOMENT * 2);
    sleep(MOMENT * 2).await;
    bench.set(|state| state.latency = Duration::ZERO);
    drop(lease);
    sleep(MOMENT * 5).await;
    assert_eq!((bench.store.logged("release").len(), bench.store.logged("renew").len()), (1, 1));
    assert!(bench.counts("lessor_lease_lost_total", 0));
}

#[tokio::test(start_paused = true)]
async fn a_revoked_lease_is_lost_at_once() {
    let bench = Bench::new(&[("k1", 2)]);
    let (lease, other) = (bench.get(&["k1"]).await, bench.get(&["k1"]).await);
    bench.store.events.send(StoreEvent::Revoked(openai(), lease.id())).unwrap();
    assert_eq!(timeout(MOMENT, lease.lost()).await, Ok(Lost::Revoked));
    assert_eq!(lost_now(&other), Poll::Pending);
}

#[tokio::test(start_paused = true)]
async fn with_on_lost_finish_a_lost_lease_runs_on_and_is_counted_once() {
    let finish = |lease: &mut LeaseConfig| lease.on_lost = OnLost::Finish;
    let bench = Bench::with(Recorder::new(&[("k1", 1), ("k2", 1)]), finish, 9);
    let lease = bench.get(&["k1"]).await;
    bench.set(|state| state.live.clear());
    assert!(timeout(TTL * 3, lease.lost()).await.is_err());
    assert!(bench.counts("lessor_lease_lost_total", 1) && bench.counts("lessor_lease_expired_total", 0));
    // the same where it expires
    let unrenewed = bench.get(&["k2"]).await;
    bench.set(|state| state.fails = Some(StoreError::Unavailable("down".into())));
    assert!(timeout(TTL * 3, unrenewed.lost()).await.is_err());
    assert!(bench.counts("lessor_lease_lost_total", 2) && bench.counts("lessor_lease_expired_total", 1));
    // but a person's word ends it
    bench.store.events.send(StoreEvent::Revoked(openai(), lease.id())).unwrap();
    assert_eq!(timeout(MOMENT, lease.lost()).await, Ok(Lost::Revoked));
}

#[tokio::test(start_paused = true)]
async fn no_lease_outlives_max_duration_under_either_policy() {
    for policy in [OnLost::Abort, OnLost::Finish] {
        let bound = |lease: &mut LeaseConfig| {
            lease.max_duration = Some(Duration::from_secs(45));
            lease.on_lost = policy;
        };
        let bench = Bench::with(Recorder::new(&[("k1", 1)]), bound, 9);
        let lease = bench.get(&["k1"]).await;
        let begun = Instant::now();
        assert_eq!(lease.lost().await, Lost::TooLong);
        assert_eq!(begun.elapsed().as_secs(), 45);
    }
}

#[tokio::test(start_paused = true)]
async fn a_bound_shorter_than_the_heartbeat_is_kept() {
    let bound = |lease: &mut LeaseConfig| lease.max_duration = Some(Duration::from_secs(1));
    let bench = Bench::with(Recorder::new(&[("k1", 2)]), bound, 9);
    for _ in 0..3 {
        let lease = bench.get(&["k1"]).await;
        assert_eq!(timeout(Duration::from_millis(1001), lease.lost()).await, Ok(Lost::TooLong));
    }
}

#[tokio::test(start_paused = true)]
async fn in_a_new_life_of_the_store_live_leases_register_again_at_once() {
    let bench = Bench::new(&[("k1", 3)]);
    let leases = [bench.get(&["k1"]).await, bench.get(&["k1"]).await];
    bench.set(|state| {
        state.live.clear();
        state.epoch = "two";
    });
    sleep(HEARTBEAT + MOMENT).await;
    assert_eq!(bench.store.live(), 2);
    assert!(leases.iter().all(|lease| lost_now(lease).is_pending()));
    sleep(HEARTBEAT).await;
    assert_eq!(bench.store.log()[2..], ["renew 2", "reassert 2", "renew 2"]);
}

#[tokio::test(start_paused = true)]
async fn leases_register_again_only_once_the_store_has_been_told_the_keys() {
    // given a store that lost its data, the settings of its keys too
    let bench = Bench::new(&[("k1", 3)]);
    bench.can_repair();
    let leases = [bench.get(&["k1"]).await, bench.get(&["k1"]).await];
    bench.set(|state| {
        state.live.clear();
        state.bare = true;
        state.epoch = "two";
        state.log.clear();
        state.latency = Duration::from_millis(100);
    });
    // when the call fails that tells it the keys
    sleep(HEARTBEAT + Duration::from_millis(250)).await; // the renewal has come back, that call is under way
    bench.set(|state| state.fails = Some(StoreError::TimedOut(MOMENT)));
    sleep(Duration::from_millis(100)).await;
    bench.set(|state| state.fails = None);
    sleep(Duration::from_secs(3)).await;
    // then the leases come after the next such call
    assert_eq!(bench.store.log(), ["renew 2", "sync", "reassert 2"]);
    assert!(leases.iter().all(|lease| lost_now(lease).is_pending()));
}

#[tokio::test(start_paused = true)]
async fn a_grant_from_a_new_life_makes_older_leases_register_again() {
    let bench = Bench::new(&[("k1", 3)]);
    let older = bench.get(&["k1"]).await;
    bench.set(|state| {
        state.live.clear();
        state.epoch = "two";
    });
    let _newer = bench.get(&["k1"]).await;
    sleep(MOMENT).await;
    assert_eq!(bench.store.live(), 2);
    sleep(HEARTBEAT * 3).await;
    assert!(lost_now(&older).is_pending());
}

#[tokio::test(start_paused = true)]
async fn the_first_renewal_after_failures_registers_again_once() {
    let bench = Bench::new(&[("k1", 1)]);
    let lease = bench.get(&["k1"]).await;
    bench.set(|state| state.fails = Some(StoreError::Unavailable("failover".into())));
    sleep(Duration::from_secs(15)).await;
    bench.set(|state| {
        state.fails = None;
        state.live.clear();
    });
    sleep(Duration::from_secs(2)).await;
    assert_eq!(bench.store.live(), 1);
    sleep(HEARTBEAT * 2).await;
    assert!(lost_now(&lease).is_pending());
    let calls = bench.store.log();
    assert_eq!(calls[1..], ["reassert 1", "renew 1", "renew 1"]);
}

#[tokio::test(start_paused = true)]
async fn a_release_that_crosses_a_registration_is_repeated() {
    // given a store that lost its data, and re-registration on its way to it
    let bench = Bench::new(&[("k1", 2)]);
    let (lease, _other) = (bench.get(&["k1"]).await, bench.get(&["k1"]).await);
    bench.set(|state| {
        state.live.clear();
        state.epoch = "two";
    });
    sleep(Duration::from_millis(9_999)).await;
    bench.set(|state| state.latency = Duration::from_millis(100));
    sleep(Duration::from_millis(250)).await; // the renewal has come back, the other call is under way
    // when the lease ends, and its release overtakes that call
    bench.set(|state| state.latency = Duration::ZERO);
    drop(lease);
    sleep(Duration::from_secs(1)).await;
    // then no slot stays taken
    assert_eq!(bench.store.logged("release").len(), 2);
    assert_eq!(bench.store.live(), 1);
}

// ---- the end ----

#[tokio::test(start_paused = true)]
async fn shutdown_releases_all_live_leases_in_one_call_and_their_drops_none() {
    let bench = Bench::new(&[("k1", 5), ("k2", 5)]);
    let mut leases = Vec::new();
    for _ in 0..7 {
        leases.push(bench.get(&["k1", "k2"]).await);
    }
    leases[0].report(said(Class::Rate), None);
    bench.leases.shutdown().await;
    assert_eq!((bench.store.live(), bench.leases.live()), (0, 0));
    drop(leases);
    sleep(HEARTBEAT * 3).await;
    assert_eq!(bench.store.events.receiver_count(), 0); // the tasks have ended
    assert_eq!(bench.store.log()[7..], ["report k1 rate", "release 7"]);
    assert!(matches!(bench.ask(&["k1"], None, LONG).await, Err(AcquireError::ShuttingDown)));
}

#[tokio::test(start_paused = true)]
async fn shutdown_is_bounded_when_the_store_hangs() {
    let bench = Bench::new(&[("k1", 5)]);
    let mut lease = bench.get(&["k1"]).await;
    drop(bench.get(&["k1"]).await);
    bench.set(|state| state.mute = true);
    lease.report(said(Class::Rate), None);
    let begun = Instant::now();
    bench.leases.shutdown().await;
    assert!(begun.elapsed() <= Duration::from_millis(5001));
}

#[tokio::test(start_paused = true)]
async fn draining_refuses_waiters_and_newcomers_and_keeps_renewing() {
    let bench = Bench::new(&[("k1", 1)]);
    let lease = bench.get(&["k1"]).await;
    let waits = bench.start(&["k1"], None).await;
    bench.leases.refuse_new();
    calm().await;
    assert!(waits.is_finished());
    assert!(matches!(waits.await.unwrap(), Err(AcquireError::ShuttingDown)));
    assert!(matches!(bench.ask(&["k1"], None, LONG).await, Err(AcquireError::ShuttingDown)));
    sleep(TTL * 2 + MOMENT).await;
    assert!(lost_now(&lease).is_pending());
    assert_eq!(bench.store.logged("renew").len(), 6);
}

#[tokio::test(start_paused = true)]
async fn the_tasks_end_with_the_last_clone_and_the_last_lease() {
    let Bench { store, leases, .. } = Bench::new(&[("k1", 1)]);
    let inner = Arc::downgrade(leases.inner());
    drop(leases);
    calm().await;
    assert!(inner.upgrade().is_none());
    assert_eq!(store.events.receiver_count(), 0);
}

// ---- real threads ----

/// Many tasks, few slots, several queues: everyone is served, and no cap is ever passed.
async fn crowd(store: Recorder, tasks: usize, rounds: usize, dropping: bool) {
    const SETS: [&[&str]; 4] = [&["k1"], &["k1", "k2"], &["k2"], &["k1", "k2", "k3"]];
    let bench = Bench::with(store, |_| {}, 1024);
    let served = Arc::new(AtomicUsize::new(0));
    let workers = (0..tasks).map(|nth| {
        let (bench, served) = (bench.clone(), Arc::clone(&served));
        tokio::spawn(async move {
            for round in 0..rounds {
                let keys = SETS[(nth + round) % SETS.len()];
                let model = ["a", "b"][nth % 2];
                if dropping && (nth + round).is_multiple_of(3) {
                    let wait = Duration::from_micros((round as u64 % 7) * 50);
                    drop(timeout(wait, bench.ask(keys, Some(model), LONG)).await);
                    continue;
                }
                let lease = bench.ask(keys, Some(model), LONG).await.expect("served");
                assert!(lease.waited() < Duration::from_secs(5), "a wake was lost");
                yield_now().await;
                drop(lease);
                served.fetch_add(1, Ordering::Relaxed);
            }
        })
    });
    for worker in workers.collect::<Vec<_>>() {
        worker.await.unwrap();
    }
    for _ in 0..1000 {
        if bench.store.live() == 0 {
            break;
        }
        sleep(MOMENT).await;
    }
    assert_eq!(bench.store.live(), 0);
    assert_eq!(bench.leases.waiting(), 0);
    assert_eq!(lock(&bench.store.state).excess, 0);
    assert!(dropping || served.load(Ordering::Relaxed) == tasks * rounds);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn in_a_crowd_for_one_slot_each_no_wake_is_lost_and_no_cap_is_passed() {
    crowd(Recorder::new(&[("k1", 1), ("k2", 1), ("k3", 1)]), 64, 100, false).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_slow_store_loses_no_wake_either() {
    let store = Recorder::new(&[("k1", 1), ("k2", 2), ("k3", 1)]);
    store.set(|state| state.yields = true);
    crowd(store, 64, 60, false).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn acquires_dropped_at_any_point_lose_no_wake_and_no_slot() {
    let store = Recorder::new(&[("k1", 1), ("k2", 2), ("k3", 1)]);
    store.set(|state| state.yields = true);
    crowd(store, 64, 60, true).await;
}

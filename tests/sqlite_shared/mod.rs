//! Several processes on one file, and the rules' own model as the measure of what they see.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use lessor::store::Store;
use proptest::prelude::*;

use super::store_twin::{Twin, model};
use super::store_world::{self, Bench, now, step};
use super::{Host, Place};

const HANDLES: usize = 3;

struct Shared {
    place: Place,
    host: Host,
    now: Arc<AtomicU64>,
    twin: Twin,
}

impl Bench for Shared {
    fn fresh(now: &Arc<AtomicU64>) -> Self {
        let (place, mut host) = (Place::new(), Host::new());
        // one clock: the file's offset is then 0, and its times are the model's
        (host.since_boot, host.wall) = (Arc::clone(now), Arc::clone(now));
        let handles = (0..HANDLES).map(|_| Arc::new(host.open(&place.file)) as Arc<dyn Store>).collect();
        let twin = Twin::of(handles, now);
        Self { place, host, now: Arc::clone(now), twin }
    }

    fn store(&self) -> Arc<dyn Store> {
        Arc::new(self.twin.clone())
    }

    fn lose_data(&mut self) {
        self.place.delete();
        self.twin.model = model(&self.now);
    }

    fn crash(&mut self) {
        let mut handles = self.twin.handles.lock().unwrap();
        handles.remove(0);
        handles.push(Arc::new(self.host.open(&self.place.file)));
    }

    /// What each process knows is what the file says, in every field.
    fn check(&self) {
        let handles = self.twin.handles.lock().unwrap().clone();
        for handle in handles {
            assert_eq!(now(handle.reconcile(store_world::provider())), 0, "the file and a copy of it differ");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn processes_that_share_a_file_answer_as_one_memory_store_would_and_write_all_they_change(
        steps in prop::collection::vec(step(), 1..100)
    ) {
        let mut world = store_world::World::<Shared>::new();
        for step in &steps {
            world.step(step);
            world.check();
        }
    }
}

impl super::store_contract::Backend for Shared {
    const TTL: Duration = Duration::from_secs(2);
    const SLACK: Duration = Duration::ZERO;

    async fn fresh() -> Self {
        <Self as Bench>::fresh(&Arc::new(AtomicU64::new(1_800_000_000_000)))
    }

    fn store(&self) -> Arc<dyn Store> {
        Bench::store(self)
    }

    async fn pass(&self, time: Duration) -> bool {
        self.now.fetch_add(u64::try_from(time.as_millis()).unwrap(), Ordering::SeqCst);
        true
    }

    async fn lose_data(&mut self) -> bool {
        Bench::lose_data(self);
        true
    }

    fn calls_race(&self) {
        self.twin.without_model();
    }
}

/// The contract where each call is made by another process than the one before, so that none can lean on
/// what was not written; and each answer is the model's.
mod by_several_processes {
    use super::super::store_contract;
    use super::Shared;
    store_contract!(Shared);
}

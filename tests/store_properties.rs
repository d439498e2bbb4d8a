//! What must hold whatever happens: several sidecars that crash, repeat themselves, lose replies and
//! come too late, on a store that forgets everything now and then.
//!
//! The test keeps its own book of who holds what, from the answers alone, and after every step the
//! store must agree with it lease by lease. So whatever a step is not entitled to change, it does not.
#![allow(clippy::unwrap_used)]

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use lessor::model::{Class, FencingToken, LeaseId};
use lessor::store::memory::MemoryStore;
use lessor::store::rules::rest::{Evidence, Rest};
use lessor::store::{Store, StoreTime};
use proptest::prelude::*;
use store_world::{Bench, World, step};

mod store_world;

/// The rules on a clock that stands still between steps.
struct Model {
    store: MemoryStore,
    now: Arc<AtomicU64>,
}

impl Bench for Model {
    fn fresh(now: &Arc<AtomicU64>) -> Self {
        let clock = Arc::clone(now);
        let store = MemoryStore::model(Arc::new(move || StoreTime(clock.load(Ordering::SeqCst))));
        Self { store, now: Arc::clone(now) }
    }

    fn store(&self) -> Arc<dyn Store> {
        Arc::new(self.store.clone())
    }

    fn lose_data(&mut self) {
        *self = Self::fresh(&self.now);
    }

    fn crash(&mut self) {}

    fn check(&self) {}
}

fn evidence() -> impl Strategy<Value = (Evidence, u64)> {
    let class = prop_oneof![
        Just(Class::Rate),
        Just(Class::Quota),
        Just(Class::Invalid),
        Just(Class::Access),
        Just(Class::Overloaded),
    ];
    let wait = prop::option::of((0..4_000_000_u64).prop_map(Duration::from_millis));
    let told = (class, wait, any::<bool>(), any::<bool>(), 0..40_u64, 0..4_000_000_u64);
    told.prop_map(|(class, wait, doubt, of_model, token, pass)| {
        let evidence = Evidence {
            class,
            wait,
            doubt,
            by_check: false,
            status: None,
            code: None,
            lease: Some(LeaseId(uuid::Uuid::from_u128(token.into()))),
            token: FencingToken(token),
            of_model,
        };
        (evidence, pass)
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 500, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn no_interleaving_breaks_a_cap_keeps_a_dead_holders_slot_or_touches_anothers_lease(
        steps in prop::collection::vec(step(), 1..150)
    ) {
        let mut world = World::<Model>::new();
        for step in &steps {
            world.step(step);
            world.check();
        }
    }

    #[test]
    fn no_evidence_shortens_a_rest_or_lets_an_old_token_lift_it(
        news in prop::collection::vec(evidence(), 1..40)
    ) {
        let mut now = StoreTime(1_800_000_000_000);
        let mut rest: Option<Rest> = None;
        for (number, (evidence, pass)) in news.into_iter().enumerate() {
            // as the ledger does: a stamp is newer than every token issued before
            let stamp = FencingToken(number as u64);
            let next = Rest::after(rest.as_ref(), &evidence, stamp, now);
            if let Some(old) = &rest {
                let resting = old.is_resting(now);
                prop_assert!(!resting || next.until >= old.until);
                prop_assert!(next.token >= old.token);
                prop_assert!(next.on_probe_end || !old.on_probe_end);
                prop_assert!(next.of_model || !old.of_model || old.is_forgotten(now));
                prop_assert!(next.strikes <= old.strikes + 1);
                // what was sent before, or into the rest, grows nothing
                let stale = evidence.token <= old.token || resting;
                prop_assert!(!stale || old.is_forgotten(now) || next.class != old.class
                    || next.strikes <= old.strikes);
            }
            prop_assert!(next.until >= now);
            rest = Some(next);
            now = StoreTime(now.0 + pass);
        }
    }
}

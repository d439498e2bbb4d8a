//! Giving back, many leases at a time.

use std::sync::Arc;

use super::Shared;
use super::batch::Batched;
use super::call::{Call, Few, crowd};
use crate::model::{GroupName, KeyId, LeaseId, PoolName, ProviderName};
use crate::store::{Release, StoreError, StoreEvent};

/// Where a lease lies.
type Place<'a> = (&'a PoolName, Option<&'a GroupName>, &'a KeyId);

fn place(ask: &Release) -> Place<'_> {
    (&ask.pool, crowd(ask.group.as_ref()), &ask.key)
}

impl Batched for Release {
    /// Slots freed: 0 or 1. Which of a batch was freed is not told apart, only how many were.
    type Answer = usize;

    async fn call(
        shared: &Arc<Shared>,
        provider: &ProviderName,
        asks: &[Self],
    ) -> Result<Vec<usize>, StoreError> {
        let names = shared.names.of(provider);
        let mut sorted: Vec<(Place<'_>, LeaseId)> = asks.iter().map(|ask| (place(ask), ask.lease)).collect();
        sorted.sort(); // so that what shares a key comes together
        let mut call = Call::default();
        call.key(names.probes()).key(names.waiting()).key(names.groups());
        let (mut crowds, mut pools, mut counts) = (Few::default(), Vec::new(), Vec::new());
        for of_pool in
            sorted.chunk_by(|((pool, crowd, _), _), (other, _)| (*pool, *crowd) == (other.0, other.1))
        {
            let keys = counts.len();
            for of_key in of_pool.chunk_by(|(place, _), (other, _)| place == other) {
                call.key(names.leases(of_key[0].0.2));
                for (_, lease) in of_key {
                    call.key(names.lease(*lease));
                }
                counts.push(of_key.len());
            }
            let (pool, crowd, _) = of_pool[0].0;
            pools.push((pool, crowds.number_or_none(crowd), counts.len() - keys));
        }
        call.arg(shared.names.channel()).arg(&*shared.name).arg(provider.as_str());
        call.number(pools.len()).number(crowds.list().len());
        for (pool, crowd, keys) in pools {
            call.arg(pool.as_str()).number(crowd).number(keys);
        }
        if counts.iter().any(|count| *count != 1) {
            call.numbers(counts);
        }
        for group in crowds.list() {
            call.key(names.crowd(group)).arg(group.as_str());
        }
        let mut answer = shared.run(&shared.scripts.release, &call).await?;
        let freed = usize::try_from(answer.count()?).unwrap_or(usize::MAX);
        if answer.number()? == 1 {
            // Those who wait for its group, or its provider's probe, wait for other keys too.
            shared.tell(StoreEvent::Changed(provider.clone()));
        }
        Ok((0..asks.len()).map(|nth| usize::from(nth < freed)).collect())
    }
}

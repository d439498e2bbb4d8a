//! Renewal, revocation, and what happens when the store has lost its data.

use super::*;
use lessor::store::StoreEvent;

fn renewed(answer: RenewAnswer) -> StoreTime {
    match answer {
        RenewAnswer::Renewed(end) => end,
        other => panic!("wanted a renewal, got {other:?}"),
    }
}

pub async fn one_renewal_extends_every_lease_it_names<B: Backend>(world: World<B>) {
    world.keys([("a", 2), ("b", 1)]).await;
    let held = [world.lend("a").await, world.lend("a").await, world.lend("b").await];
    pass!(world, B::TTL / 2);
    let answers = world.renew(world.renewal(&[&held[0], &held[2]])).await;
    assert_eq!(answers.len(), 2);
    for answer in answers {
        assert!(world.is_in(renewed(answer), B::TTL));
    }
    pass!(world, B::TTL / 2 + B::SLACK);
    assert_eq!((world.in_use("a").await, world.in_use("b").await), (1, 1));
}

pub async fn a_renewal_never_brings_a_lease_closer_to_its_end<B: Backend>(world: World<B>) {
    world.keys([("a", 1)]).await;
    let held = world.lend("a").await;
    let shorter = Renew { ttl: B::TTL / 2, ..world.renewal(&[&held]) };
    assert_eq!(renewed(world.renew(shorter).await[0]), held.grant.expires_at);
}

pub async fn a_renewal_past_its_deadline_is_late_and_extends_nothing<B: Backend>(world: World<B>) {
    world.keys([("a", 1)]).await;
    let held = world.lend("a").await;
    let late = Renew {
        deadline: StoreTime(world.now().0 - 1000),
        ttl: B::TTL * 9,
        epoch: Some(another_epoch()),
        reassert: true,
        ..world.renewal(&[&held])
    };
    assert_eq!(world.renew(late).await, [RenewAnswer::Late]);
    let snapshot = world.store().snapshot(provider()).await.unwrap();
    assert_eq!(snapshot.leases[0].expires_at_ms, Some(held.grant.expires_at));
    world.release(&held).await;
    assert!(world.lends_key("a").await, "a late renewal started a grace");
}

pub async fn a_renewal_of_what_is_anothers_is_lost_and_extends_nothing<B: Backend>(mut world: World<B>) {
    world.keys([("a", 1), ("b", 1)]).await;
    let held = world.lend("a").await;
    for reassert in [false, true] {
        let mut wrong = Renew { ttl: B::TTL * 9, reassert, ..world.renewal(&[&held, &held, &held]) };
        wrong.leases[0].key = key("b");
        wrong.leases[1].pool = pool("vip");
        wrong.leases.truncate(2);
        assert_eq!(world.renew(wrong).await, [RenewAnswer::Lost; 2]);
        world
            .as_another(async |other| {
                let ask = Renew { ttl: B::TTL * 9, reassert, ..other.renewal(&[&held]) };
                assert_eq!(other.renew(ask).await, [RenewAnswer::Lost]);
            })
            .await;
    }
    let snapshot = world.store().snapshot(provider()).await.unwrap();
    assert_eq!(snapshot.leases[0].expires_at_ms, Some(held.grant.expires_at));
    assert_eq!((world.in_use("a").await, world.in_use("b").await), (1, 0));
}

pub async fn an_expired_lease_is_lost<B: Backend>(world: World<B>) {
    world.keys([("a", 1)]).await;
    let held = world.lend("a").await;
    pass!(world, B::TTL + B::SLACK);
    assert_eq!(world.renew(world.renewal(&[&held])).await, [RenewAnswer::Lost]);
    assert!(world.lends_key("a").await);
}

pub async fn a_revoked_lease_is_lost_and_keeps_its_slot_until_its_holder_releases_it(
    world: World<impl Backend>,
) {
    world.keys([("a", 1)]).await;
    let held = world.lend("a").await;
    assert!(world.store().revoke(provider(), held.lease).await.unwrap());
    assert!(world.store().snapshot(provider()).await.unwrap().leases[0].revoked);
    for reassert in [false, true] {
        let ask = Renew { reassert, ..world.renewal(&[&held]) };
        assert_eq!(world.renew(ask).await, [RenewAnswer::Lost]);
    }
    assert_eq!(world.why_not_key("a").await, Reason::Full);
    assert_eq!(world.release(&held).await, 1);
    assert!(world.lends_key("a").await);
}

pub async fn a_revoked_lease_that_nobody_releases_ends_at_its_time<B: Backend>(world: World<B>) {
    world.keys([("a", 1)]).await;
    let held = world.lend("a").await;
    world.store().revoke(provider(), held.lease).await.unwrap();
    pass!(world, B::TTL + B::SLACK);
    assert!(!world.store().revoke(provider(), held.lease).await.unwrap());
    assert!(world.lends_key("a").await);
}

pub async fn a_revocation_is_announced_and_one_of_nothing_is_not(world: World<impl Backend>) {
    world.keys([("a", 1)]).await;
    let held = world.lend("a").await;
    let mut events = world.store().subscribe();
    assert!(!world.store().revoke(provider(), LeaseId::fresh()).await.unwrap());
    assert!(world.store().revoke(provider(), held.lease).await.unwrap());
    let event = tokio::time::timeout(SECOND * 5, events.recv()).await.unwrap().unwrap();
    assert!(matches!(event, StoreEvent::Revoked(of, lease) if of == provider() && lease == held.lease));
}

pub async fn lost_leases_come_back_by_a_reassert_and_only_by_one(mut world: World<impl Backend>) {
    world.keys([("a", 2)]).await;
    let held = [world.lend("a").await, world.lend("a").await];
    let before = held[0].grant.epoch.clone();
    if !world.backend.lose_data().await {
        return;
    }
    world.keys([("a", 2)]).await;
    let ask = Renew { epoch: Some(before), ..world.renewal(&[&held[0], &held[1]]) };
    let answer = world.store().renew(ask.clone()).await.unwrap();
    assert_eq!(answer.answers, [RenewAnswer::Lost; 2]);
    assert_ne!(Some(&answer.epoch), ask.epoch.as_ref());
    assert_eq!(world.in_use("a").await, 0);

    let ask = Renew { epoch: Some(answer.epoch), reassert: true, ..ask };
    for _ in 0..2 {
        assert!(matches!(
            world.renew(ask.clone()).await[..],
            [RenewAnswer::Renewed(_), RenewAnswer::Renewed(_)]
        ));
    }
    assert_eq!(world.in_use("a").await, 2);
    let snapshot = world.store().snapshot(provider()).await.unwrap();
    let mut tokens: Vec<_> = snapshot.leases.iter().map(|lease| lease.fencing_token).collect();
    tokens.sort();
    assert_eq!(tokens, held.each_ref().map(|taken| taken.grant.token));
    assert_eq!(world.release(&held[0]).await, 1);
}

pub async fn a_reassert_never_goes_above_the_cap(mut world: World<impl Backend>) {
    world.keys([("a", 3)]).await;
    let held = [world.lend("a").await, world.lend("a").await, world.lend("a").await];
    if !world.backend.lose_data().await {
        return;
    }
    world.keys([("a", 2)]).await;
    let ask = Renew { reassert: true, ..world.renewal(&[&held[0], &held[1], &held[2]]) };
    let answers = world.renew(ask).await;
    assert!(matches!(answers[..], [RenewAnswer::Renewed(_), RenewAnswer::Renewed(_), RenewAnswer::Lost]));
    assert_eq!(world.in_use("a").await, 2);
}

pub async fn a_reassert_does_not_take_a_slot_that_was_lent_meanwhile<B: Backend>(world: World<B>) {
    world.keys([("a", 1)]).await;
    let paused = world.lend("a").await;
    pass!(world, B::TTL + B::SLACK);
    let next = world.lend("a").await;
    let ask = Renew { reassert: true, ..world.renewal(&[&paused]) };
    assert_eq!(world.renew(ask).await, [RenewAnswer::Lost]);
    assert_eq!(world.release(&next).await, 1);
}

pub async fn a_foreign_epoch_starts_one_grace_in_which_nothing_new_is_lent<B: Backend>(world: World<B>) {
    world.keys([("a", 2)]).await;
    let held = world.lend("a").await;
    world.release(&held).await;
    let foreign = Renew { epoch: Some(another_epoch()), ..world.renewal(&[&held]) };
    world.renew(foreign.clone()).await;
    let refusal = world.refuse(world.ask(["a"])).await;
    assert_eq!(refusal.reasons[0].1, Reason::Full);
    assert!(world.is_in(refusal.lease_end.unwrap(), B::TTL));
    // those who were there before come back meanwhile
    let reassert = Renew { reassert: true, ..world.renewal(&[&held]) };
    renewed(world.renew(reassert).await[0]);
    pass!(world, B::TTL / 2);
    assert_eq!(world.why_not_key("a").await, Reason::Full);
    // a second sidecar that learns of it later does not make it longer
    world.renew(foreign.clone()).await;
    pass!(world, B::TTL / 2 + B::SLACK);
    assert!(world.lends_key("a").await);
    world.renew(foreign).await;
    assert!(world.lends_key("a").await);
}

pub async fn the_own_epoch_or_none_starts_no_grace(world: World<impl Backend>) {
    world.keys([("a", 2)]).await;
    let held = world.lend("a").await;
    for epoch in [None, Some(held.grant.epoch.clone())] {
        let ask = Renew { epoch: epoch.clone(), ..world.renewal(&[&held]) };
        assert_eq!(world.store().renew(ask).await.unwrap().epoch, held.grant.epoch);
        assert!(world.lends_key("a").await, "{epoch:?} started a grace");
    }
}

pub async fn tokens_rise_above_those_of_reasserted_leases<B: Backend>(world: World<B>) {
    world.keys([("a", 2)]).await;
    let mut held = world.lend("a").await;
    world.release(&held).await;
    // the life that was lost ran on a clock an hour ahead
    held.grant.token.0 += 3_600_000_000;
    renewed(world.renew(Renew { reassert: true, ..world.renewal(&[&held]) }).await[0]);
    assert!(world.lend("a").await.grant.token > held.grant.token);
}

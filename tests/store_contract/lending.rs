//! Acquire and release.

use super::*;

pub async fn the_first_candidate_with_a_free_slot_is_lent(world: World<impl Backend>) {
    world.keys([("a", 1), ("b", 2)]).await;
    assert_eq!(world.take(world.ask(["a", "b"])).await.grant.key, key("a"));
    assert_eq!(world.take(world.ask(["a", "b"])).await.grant.key, key("b"));
    assert_eq!(world.take(world.ask(["a", "b"])).await.grant.key, key("b"));
    let refusal = world.refuse(world.ask(["b", "a"])).await;
    assert_eq!(refusal.reasons, [(key("b"), Reason::Full), (key("a"), Reason::Full)]);
    assert_eq!(refusal.cooldown_end, None);
}

pub async fn sixty_four_acquires_at_once_on_a_cap_of_one_have_one_winner(world: World<impl Backend>) {
    world.keys([("a", 1)]).await;
    world.backend.calls_race();
    let tasks: Vec<_> = (0..64).map(|_| tokio::spawn(world.store().acquire(world.ask(["a"])))).collect();
    let mut granted = 0;
    for task in tasks {
        granted += usize::from(matches!(task.await.unwrap().unwrap(), Acquired::Granted(_)));
    }
    assert_eq!(granted, 1);
    assert_eq!(world.in_use("a").await, 1);
}

pub async fn a_repeated_acquire_returns_the_same_grant_and_takes_no_second_slot(world: World<impl Backend>) {
    world.keys([("a", 2), ("b", 2)]).await;
    let ask = world.ask(["a", "b"]);
    let first = world.take(ask.clone()).await.grant;
    // even where the order of the candidates has changed meanwhile
    let again = Acquire { candidates: [candidate("b"), candidate("a")].into(), ..ask };
    assert_eq!(world.take(again).await.grant, first);
    assert_eq!((world.in_use("a").await, world.in_use("b").await), (1, 0));
}

pub async fn a_lease_id_held_by_another_sidecar_is_never_granted_again(mut world: World<impl Backend>) {
    world.keys([("a", 2)]).await;
    let held = world.lend("a").await;
    world
        .as_another(async |other| {
            let ask = Acquire { lease: held.lease, ..other.ask(["a"]) };
            assert!(matches!(other.acquire(&ask).await, Acquired::Late));
        })
        .await;
    assert_eq!(world.in_use("a").await, 1);
    assert_eq!(world.release(&held).await, 1);
}

pub async fn an_acquire_past_its_deadline_is_late_and_changes_nothing(world: World<impl Backend>) {
    world.keys([("a", 1)]).await;
    let ask = Acquire { deadline: StoreTime(world.now().0 - 1000), ..world.ask(["a"]) };
    assert!(matches!(world.acquire(&ask).await, Acquired::Late));
    let view = world.view("a").await;
    assert_eq!((view.in_use, view.last_used_at_ms), (0, None));
}

pub async fn a_key_of_another_pool_is_passed_over(world: World<impl Backend>) {
    world.sync(vec![KeySettings { pool: pool("vip"), ..setting("a", 1) }, setting("b", 1)]).await;
    assert_eq!(world.why_not_key("a").await, Reason::NotMember);
    assert_eq!(world.take(world.ask(["a", "b"])).await.grant.key, key("b"));
    let vip = Candidate { pool: pool("vip"), ..candidate("a") };
    let taken = world.take(Acquire { candidates: [vip].into(), ..world.ask(["a"]) }).await;
    assert_eq!(taken.grant.pool, pool("vip"));
}

pub async fn a_key_without_settings_is_named_as_such(world: World<impl Backend>) {
    world.keys([("a", 1)]).await;
    assert_eq!(world.why_not_key("b").await, Reason::NoSettings);
    assert_eq!(world.take(world.ask(["b", "a"])).await.grant.key, key("a"));
}

pub async fn a_cap_of_zero_counts_as_one(world: World<impl Backend>) {
    world.keys([("a", 0)]).await;
    world.lend("a").await;
    assert_eq!(world.why_not_key("a").await, Reason::Full);
    assert_eq!(world.view("a").await.max_concurrent_uses, 1);
}

pub async fn a_full_key_says_when_its_first_lease_ends<B: Backend>(world: World<B>) {
    world.keys([("a", 2)]).await;
    let first = world.lend("a").await;
    pass!(world, B::TTL / 2);
    let second = world.lend("a").await;
    assert_eq!(world.refuse(world.ask(["a"])).await.lease_end, Some(first.grant.expires_at));
    // one that is over does not count
    pass!(world, B::TTL / 2 + B::SLACK);
    world.lend("a").await;
    assert_eq!(world.refuse(world.ask(["a"])).await.lease_end, Some(second.grant.expires_at));
}

pub async fn an_unrenewed_lease_frees_its_slot_at_its_end_without_anybodys_help<B: Backend>(world: World<B>) {
    world.keys([("a", 1)]).await;
    let crashed = world.lend("a").await;
    assert!(world.is_in(crashed.grant.expires_at, B::TTL));
    pass!(world, B::TTL / 2);
    assert_eq!(world.why_not_key("a").await, Reason::Full);
    pass!(world, B::TTL / 2 + B::SLACK);
    assert_eq!(world.in_use("a").await, 0);
    assert!(world.store().snapshot(provider()).await.unwrap().leases.is_empty());
    world.lend("a").await;
    assert_eq!(world.in_use("a").await, 1);
}

pub async fn fencing_tokens_rise_with_every_lease_and_across_a_loss_of_data(mut world: World<impl Backend>) {
    world.keys([("a", 9), ("b", 9)]).await;
    let mut last = FencingToken(0);
    for name in ["a", "b", "a", "a"] {
        let token = world.lend(name).await.grant.token;
        assert!(token > last, "{token:?} is not above {last:?}");
        last = token;
    }
    pass!(world, Duration::from_millis(1));
    if world.backend.lose_data().await {
        world.keys([("a", 9)]).await;
        assert!(world.lend("a").await.grant.token > last);
    }
}

pub async fn a_lease_and_its_key_are_seen_as_they_are<B: Backend>(world: World<B>) {
    let grouped = KeySettings { group: Some(group("org")), ..setting("a", 3) };
    world.sync(vec![setting("b", 1), grouped]).await;
    let app = AppName::parse("checkout").unwrap();
    let taken = world.take(Acquire { app: app.clone(), ..world.ask(["a"]) }).await;

    let snapshot = world.store().snapshot(provider()).await.unwrap();
    assert_eq!(snapshot.keys.iter().map(|view| view.id.as_str()).collect::<Vec<_>>(), ["a", "b"]);
    let view = &snapshot.keys[0];
    assert_eq!(
        (&view.provider, &view.pool, &view.group),
        (&provider(), &pool("default"), &Some(group("org")))
    );
    assert_eq!((view.status, &view.reason), (KeyStatus::Available, &None));
    assert_eq!((view.in_use, view.max_concurrent_uses), (1, 3));
    assert!(world.is_in(view.last_used_at_ms.unwrap(), Duration::ZERO));
    assert_eq!(snapshot.keys[1].last_used_at_ms, None);

    let [lease] = &snapshot.leases[..] else { panic!("wanted one lease") };
    assert_eq!((lease.id, &lease.key_id, &lease.app), (taken.lease, &key("a"), &app));
    assert_eq!((&lease.owner, lease.fencing_token), (&world.owner, taken.grant.token));
    assert_eq!((lease.expires_at_ms, lease.revoked), (Some(taken.grant.expires_at), false));
}

pub async fn providers_share_nothing(world: World<impl Backend>) {
    world.keys([("a", 1)]).await;
    let held = world.lend("a").await;
    let other = ProviderName::parse("anthropic").unwrap();
    let ask = Acquire { provider: other.clone(), ..world.ask(["a"]) };
    assert_eq!(world.why_not(ask).await, Reason::NoSettings);
    let release = Release { provider: other.clone(), ..held.released() };
    assert_eq!(world.store().release(vec![release]).await.unwrap(), 0);
    let renewal = Renew { provider: other.clone(), ..world.renewal(&[&held]) };
    assert_eq!(world.renew(renewal).await, [RenewAnswer::Lost]);
    assert!(!world.store().revoke(other, held.lease).await.unwrap());
    assert_eq!(world.in_use("a").await, 1);
}

pub async fn a_release_frees_its_slot_at_once_and_only_once(world: World<impl Backend>) {
    world.keys([("a", 1), ("b", 1)]).await;
    let (a, b) = (world.lend("a").await, world.lend("b").await);
    assert_eq!(world.store().release(vec![a.released(), b.released()]).await.unwrap(), 2);
    let next = world.lend("a").await;
    assert_eq!(world.store().release(vec![a.released(), b.released()]).await.unwrap(), 0);
    assert_eq!(world.in_use("a").await, 1);
    assert_eq!(world.release(&next).await, 1);
}

pub async fn a_release_that_names_another_lease_key_or_pool_frees_nothing(world: World<impl Backend>) {
    world.keys([("a", 1), ("b", 1)]).await;
    let held = world.lend("a").await;
    let wrong = vec![
        Release { lease: LeaseId::fresh(), ..held.released() },
        Release { key: key("b"), ..held.released() },
        Release { pool: pool("vip"), ..held.released() },
    ];
    assert_eq!(world.store().release(wrong).await.unwrap(), 0);
    assert_eq!(world.in_use("a").await, 1);
    assert!(matches!(world.renew(world.renewal(&[&held])).await[..], [RenewAnswer::Renewed(_)]));
}

pub async fn a_late_release_does_not_free_the_slot_of_whoever_came_next<B: Backend>(world: World<B>) {
    world.keys([("a", 1)]).await;
    let paused = world.lend("a").await;
    pass!(world, B::TTL + B::SLACK);
    world.lend("a").await;
    world.release(&paused).await;
    assert_eq!(world.why_not_key("a").await, Reason::Full);
}

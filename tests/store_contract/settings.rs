//! What people, checks and configuration say.

use super::*;
use lessor::store::StoreEvent;

pub async fn a_disabled_key_is_lent_with_no_secret_and_its_leases_run_on(world: World<impl Backend>) {
    world.keys([("a", 4)]).await;
    let held = world.lend("a").await;
    world.set("a", StatusChange::Disable).await;
    assert_eq!(world.why_not_key("a").await, Reason::Unusable(KeyStatus::Disabled));
    let other = Candidate { fingerprint: secret(2), ..candidate("a") };
    let ask = Acquire { candidates: [other].into(), ..world.ask(["a"]) };
    assert_eq!(world.why_not(ask).await, Reason::Unusable(KeyStatus::Disabled));
    let view = world.view("a").await;
    assert_eq!((view.status, view.reason.as_deref()), (KeyStatus::Disabled, Some("operator")));
    assert!(matches!(world.renew(world.renewal(&[&held])).await[..], [RenewAnswer::Renewed(_)]));
    // a restart of a sidecar does not switch it on again
    world.keys([("a", 4)]).await;
    assert_eq!(world.status("a").await, KeyStatus::Disabled);
    world.set("a", StatusChange::Enable).await;
    assert!(world.lends_key("a").await);
}

pub async fn a_drained_key_is_disabled_with_that_reason_until_it_is_enabled_or_disabled(
    world: World<impl Backend>,
) {
    world.keys([("a", 4)]).await;
    let held = world.lend("a").await;
    let shown = async || {
        let view = world.view("a").await;
        (view.status, view.reason, view.in_use)
    };
    world.set("a", StatusChange::Drain).await;
    assert_eq!(world.why_not_key("a").await, Reason::Unusable(KeyStatus::Disabled));
    assert_eq!(shown().await, (KeyStatus::Disabled, Some("drained".into()), 1));
    world.release(&held).await;
    world.keys([("a", 4)]).await;
    assert_eq!(shown().await, (KeyStatus::Disabled, Some("drained".into()), 0));
    world.set("a", StatusChange::Disable).await;
    assert_eq!(shown().await, (KeyStatus::Disabled, Some("operator".into()), 0));
    world.set("a", StatusChange::Drain).await;
    world.set("a", StatusChange::Enable).await;
    assert_eq!(shown().await, (KeyStatus::Available, None, 0));
    world.set("a", StatusChange::Disable).await;
    assert_eq!(shown().await.1.as_deref(), Some("operator"), "an old drain is forgotten");
}

pub async fn enabling_lifts_invalid_and_keeps_cooldowns(world: World<impl Backend>) {
    world.keys([("a", 4), ("b", 4)]).await;
    world.lend_and_report("a", says(Class::Invalid)).await;
    world.lend_and_report("b", says_wait(Class::Rate, MINUTE)).await;
    world.set("a", StatusChange::Enable).await;
    world.set("b", StatusChange::Enable).await;
    assert!(world.lends_key("a").await);
    world.cools_for(world.why_not_key("b").await, MINUTE);
}

pub async fn clearing_lifts_every_cooldown_of_the_key_but_not_invalid(world: World<impl Backend>) {
    let grouped = |name| KeySettings { group: Some(group("org")), ..setting(name, 4) };
    world.sync(vec![grouped("a"), setting("b", 4), setting("c", 4), setting("d", 4)]).await;
    let of_group = Candidate { group: Some(group("org")), ..candidate("a") };
    let ask = || Acquire { candidates: [of_group.clone()].into(), ..world.ask_for_model("a", "m") };
    let [first, second] = [world.take(ask()).await, world.take(ask()).await];
    for scope in [Scope::Key, Scope::KeyModel, Scope::Group, Scope::GroupModel] {
        world.report(&first, says_of(Class::Quota, scope, HOUR)).await;
    }
    world.report(&second, says(Class::Concurrency)).await;
    world.lend_and_report("b", says(Class::Invalid)).await;
    world.lend_and_report("c", says_wait(Class::Rate, MINUTE)).await;
    for name in ["a", "b"] {
        world.set(name, StatusChange::Clear).await;
    }
    let free = world.take(ask()).await;
    assert!(!free.grant.probe && !free.grant.wants_success);
    assert_eq!(world.view("a").await.cooldowns.len(), 0);
    assert_eq!(world.status("b").await, KeyStatus::Invalid);
    assert_eq!(world.status("c").await, KeyStatus::RateLimited);
}

pub async fn clearing_lifts_what_was_learned_of_a_groups_uses(world: World<impl Backend>) {
    let grouped = |name| KeySettings { group: Some(group("org")), ..setting(name, 4) };
    world.sync(vec![grouped("a"), grouped("b")]).await;
    let of_group = |name| Candidate { group: Some(group("org")), ..candidate(name) };
    let ask = |name| Acquire { candidates: [of_group(name)].into(), ..world.ask([name]) };
    let held = world.take(ask("a")).await;
    for scope in [Scope::Key, Scope::Group] {
        world.report(&held, Outcome { scope, ..says(Class::Concurrency) }).await;
    }
    assert_eq!(world.why_not(ask("b")).await, Reason::Full);
    world.set("b", StatusChange::Clear).await;
    assert!(world.lends(ask("b")).await);
    // that of another key is its own
    assert_eq!(world.why_not(ask("a")).await, Reason::Full);
    world.set("a", StatusChange::Clear).await;
    assert!(world.lends(ask("a")).await);
}

pub async fn what_was_under_way_when_a_person_cleared_a_key_rests_it_no_more(world: World<impl Backend>) {
    let grouped = |name| KeySettings { group: Some(group("org")), ..setting(name, 8) };
    world.sync(vec![grouped("a"), grouped("b"), setting("c", 8)]).await;
    let of_group = |name| Candidate { group: Some(group("org")), ..candidate(name) };
    let ask = |name| Acquire { candidates: [of_group(name)].into(), ..world.ask_for_model(name, "m") };
    let [first, late] = [world.take(ask("a")).await, world.take(ask("a")).await];
    let [of_sibling, of_other] = [world.take(ask("b")).await, world.lend("c").await];
    world.report(&first, says_of(Class::Quota, Scope::Group, HOUR)).await;
    world.set("a", StatusChange::Clear).await;
    for scope in [Scope::Key, Scope::KeyModel, Scope::Group, Scope::GroupModel] {
        for class in [Class::Quota, Class::Concurrency] {
            let reported = world.report(&late, says_of(class, scope, HOUR)).await;
            assert_eq!(reported.cooling_until, None, "{class:?} {scope:?}");
        }
    }
    let seen = world.view("a").await;
    assert_eq!((seen.status, seen.cooldowns.len()), (KeyStatus::Available, 0));
    assert_eq!((seen.learned_concurrent_uses, seen.group_concurrent_uses), (None, None));
    // the group is cleared for its other keys too, and they and the rest of the world are not
    world.report(&of_sibling, says_of(Class::Quota, Scope::Group, HOUR)).await;
    assert!(world.lends(ask("a")).await);
    world.report(&of_sibling, says_wait(Class::Rate, HOUR)).await;
    world.report(&of_other, says_wait(Class::Rate, HOUR)).await;
    for name in ["b", "c"] {
        assert_eq!(world.status(name).await, KeyStatus::RateLimited);
    }
    // what was lent since knows better, and no clearing makes a bad key good
    let since = world.take(ask("a")).await;
    world.report(&since, says_wait(Class::Rate, HOUR)).await;
    assert_eq!(world.status("a").await, KeyStatus::RateLimited);
    world.set("a", StatusChange::Clear).await;
    world.report(&late, says(Class::Invalid)).await;
    assert_eq!(world.status("a").await, KeyStatus::Invalid);
}

pub async fn a_failed_check_makes_the_key_invalid_with_that_secret_alone(world: World<impl Backend>) {
    world.keys([("a", 4)]).await;
    let old = world.lend("a").await;
    world
        .set(
            "a",
            StatusChange::CheckedBad { secret: secret(2), status: Some(401), code: Some("no_key".into()) },
        )
        .await;
    assert_eq!(world.status("a").await, KeyStatus::Available);
    world
        .set(
            "a",
            StatusChange::CheckedBad { secret: secret(1), status: Some(401), code: Some("no_key".into()) },
        )
        .await;
    let view = world.view("a").await;
    assert_eq!((view.status, view.reason.as_deref()), (KeyStatus::Invalid, Some("check")));
    let seen = view.evidence.map(|seen| (seen.status, seen.code));
    assert_eq!(seen, Some((Some(401), Some("no_key".into()))), "what the check was answered");
    world.report(&old, says(Class::Success)).await;
    assert_eq!(world.why_not_key("a").await, Reason::Unusable(KeyStatus::Invalid));
    world.set("a", StatusChange::CheckedGood(secret(1))).await;
    assert!(world.lends_key("a").await);
}

pub async fn a_key_that_a_check_doubts_rests_a_minute_until_another_decides<B: Backend>(world: World<B>) {
    let doubted =
        |number| StatusChange::Doubted { secret: secret(number), status: Some(401), code: Some("no".into()) };
    world.keys([("a", 4)]).await;
    for _ in 0..2 {
        world.set("a", doubted(2)).await;
        assert_eq!(world.status("a").await, KeyStatus::Available);
        world.set("a", doubted(1)).await;
        let view = world.view("a").await;
        assert_eq!((view.status, view.reason.as_deref()), (KeyStatus::Cooldown, Some("check")));
        world.cools_for(world.why_not_key("a").await, MINUTE);
        world.set("a", StatusChange::CheckedGood(secret(1))).await;
        assert!(world.lends_key("a").await);
    }
    world.set("a", doubted(1)).await;
    pass!(world, MINUTE + B::SLACK);
    assert!(world.lends_key("a").await, "no other check: it heals by itself");
    world.set("a", doubted(1)).await;
    world.set("a", StatusChange::CheckedBad { secret: secret(1), status: None, code: None }).await;
    assert_eq!(world.status("a").await, KeyStatus::Invalid);
}

pub async fn a_word_on_an_unknown_key_is_refused(world: World<impl Backend>) {
    for change in [StatusChange::Disable, StatusChange::Enable, StatusChange::Clear] {
        assert!(!world.store().set_status(provider(), key("a"), change).await.unwrap());
    }
    world.keys([("a", 1)]).await;
    assert!(world.lends_key("a").await);
}

pub async fn a_key_without_a_secret_is_pending(world: World<impl Backend>) {
    world.sync(vec![KeySettings { fingerprint: None, ..setting("a", 1) }]).await;
    assert_eq!(world.status("a").await, KeyStatus::Pending);
    // a sidecar that has a secret goes on with its own
    assert!(world.lends_key("a").await);
    world.keys([("a", 1)]).await;
    assert_eq!(world.status("a").await, KeyStatus::Available);
}

pub async fn new_settings_replace_the_named_keys_and_no_others(world: World<impl Backend>) {
    world.keys([("a", 1), ("b", 2)]).await;
    let moved = KeySettings {
        pool: pool("vip"),
        group: Some(group("org")),
        fingerprint: Some(secret(2)),
        ..setting("a", 3)
    };
    world.sync(vec![moved]).await;
    let [a, b] = [world.view("a").await, world.view("b").await];
    assert_eq!((a.pool, a.group, a.max_concurrent_uses), (pool("vip"), Some(group("org")), 3));
    assert_eq!((b.pool, b.group, b.max_concurrent_uses), (pool("default"), None, 2));
}

pub async fn a_cap_that_shrinks_ends_no_lease_and_lends_none_until_it_is_kept(world: World<impl Backend>) {
    world.keys([("a", 3)]).await;
    let held = [world.lend("a").await, world.lend("a").await, world.lend("a").await];
    world.keys([("a", 2)]).await;
    assert_eq!(world.in_use("a").await, 3);
    let answers = world.renew(world.renewal(&[&held[0], &held[1], &held[2]])).await;
    assert!(answers.iter().all(|answer| matches!(answer, RenewAnswer::Renewed(_))));
    world.release(&held[0]).await;
    assert_eq!(world.why_not_key("a").await, Reason::Full);
    world.release(&held[1]).await;
    assert!(world.lends_key("a").await);
}

pub async fn a_key_that_moves_to_another_pool_keeps_its_leases(world: World<impl Backend>) {
    world.keys([("a", 1)]).await;
    let held = world.lend("a").await;
    world.sync(vec![KeySettings { pool: pool("vip"), ..setting("a", 1) }]).await;
    assert_eq!(world.why_not_key("a").await, Reason::NotMember);
    let vip = Candidate { pool: pool("vip"), ..candidate("a") };
    let ask = || Acquire { candidates: [vip.clone()].into(), ..world.ask(["a"]) };
    assert_eq!(world.why_not(ask()).await, Reason::Full);
    assert!(matches!(world.renew(world.renewal(&[&held])).await[..], [RenewAnswer::Renewed(_)]));
    assert_eq!(world.release(&held).await, 1);
    assert!(world.lends(ask()).await);
}

pub async fn a_repair_brings_back_what_is_missing_and_overrules_nothing_else(world: World<impl Backend>) {
    world.keys([("a", 3), ("b", 3)]).await;
    let told = [setting("a", 1), KeySettings { pool: pool("vip"), ..setting("b", 1) }, setting("c", 1)];
    let found = world.tell(SyncMode::Repair, told.to_vec()).await;
    assert_eq!(found.differing, [setting("a", 3), setting("b", 3)], "what it was");
    // the caps stay as the last start named them; the key is in the pool it is asked for in
    assert_eq!(world.view("a").await.max_concurrent_uses, 3);
    let moved = world.view("b").await;
    assert_eq!((moved.max_concurrent_uses, moved.pool), (3, pool("vip")));
    assert_eq!(world.why_not_key("b").await, Reason::NotMember);
    assert!(world.lends_key("c").await);
}

pub async fn keys_with_other_settings_or_with_one_secret_are_named(world: World<impl Backend>) {
    let found = world.tell(SyncMode::Replace, vec![setting("a", 1)]).await;
    assert_eq!(found, Synced::default());
    assert_eq!(world.tell(SyncMode::Replace, vec![setting("a", 1)]).await, Synced::default());
    let other = KeySettings { fingerprint: Some(secret(2)), ..setting("b", 1) };
    assert_eq!(world.tell(SyncMode::Replace, vec![other.clone()]).await, Synced::default());
    let found = world.tell(SyncMode::Replace, vec![setting("b", 1)]).await;
    assert_eq!(found.differing, [other], "what it was");
    assert_eq!(found.same_secret, [(key("b"), key("a"))]);
    let none = KeySettings { fingerprint: None, ..setting("b", 1) };
    assert_eq!(world.tell(SyncMode::Replace, vec![none.clone()]).await.same_secret, []);
    assert_eq!(world.tell(SyncMode::Replace, vec![none]).await, Synced::default());
}

pub async fn a_scoped_cooldown_is_seen_with_its_evidence(world: World<impl Backend>) {
    world.sync(vec![KeySettings { group: Some(group("org")), ..setting("a", 8) }, setting("b", 8)]).await;
    let of_group = Candidate { group: Some(group("org")), ..candidate("a") };
    let ask = Acquire { candidates: [of_group].into(), ..world.ask_for_model("a", "m") };
    let taken = world.take(ask).await;
    for scope in [Scope::Key, Scope::KeyModel, Scope::Group, Scope::GroupModel, Scope::ProviderModel] {
        let code = Some("tokens_per_min".into());
        world.report(&taken, Outcome { code, ..says_of(Class::Rate, scope, MINUTE) }).await;
    }
    let cooldowns = world.view("a").await.cooldowns;
    let subjects: Vec<_> = cooldowns.iter().map(|view| view.subject.as_str()).collect();
    assert_eq!(subjects, ["a|m", "openai|m", "org", "org|m"]);
    for view in &cooldowns {
        assert_eq!((view.reason.as_str(), view.status), ("rate", Some(429)));
        assert_eq!(view.code.as_deref(), Some("tokens_per_min"));
        assert!(world.is_in(view.since_ms, Duration::ZERO) && world.is_in(view.until_ms, MINUTE));
    }
    let others: Vec<_> = world.view("b").await.cooldowns.into_iter().map(|view| view.subject).collect();
    assert_eq!(others, ["openai|m"]);
}

pub async fn what_waiters_may_wait_for_is_announced<B: Backend>(world: World<B>) {
    let mut events = world.store().subscribe();
    let mut changed = async || {
        while let Ok(event) = tokio::time::timeout(SECOND * 5, events.recv()).await {
            if let StoreEvent::Changed(of) = event.unwrap() {
                assert_eq!(of, provider());
                return true;
            }
        }
        false
    };
    world.keys([("a", 4)]).await;
    assert!(changed().await, "new settings");
    for change in [StatusChange::Disable, StatusChange::Enable, StatusChange::Clear] {
        world.set("a", change.clone()).await;
        assert!(changed().await, "{change:?}");
    }
    let probe = {
        world.lend_and_report("a", says_wait(Class::Quota, SECOND)).await;
        pass!(world, SECOND + B::SLACK);
        world.lend("a").await
    };
    world.report(&probe, says(Class::Success)).await;
    assert!(changed().await, "a success that ended a probation");
    // who waits for a crowded group waits for any of its keys
    world.sync(vec![KeySettings { group: Some(group("org")), ..setting("b", 4) }]).await;
    assert!(changed().await);
    let of_group = Candidate { group: Some(group("org")), ..candidate("b") };
    let taken = world.take(Acquire { candidates: [of_group].into(), ..world.ask(["b"]) }).await;
    world.report(&taken, Outcome { scope: Scope::Group, ..says(Class::Concurrency) }).await;
    world.release(&taken).await;
    assert!(changed().await, "a use of a crowded group has ended");
}

pub async fn the_salt_stays_the_same(world: World<impl Backend>) {
    let salt = world.store().salt(None).await.unwrap();
    assert_ne!(salt, [0; 32]);
    assert_eq!(world.store().salt(None).await.unwrap(), salt);
    world.store().ping().await.unwrap();
    assert!(world.store().leases_expire());
}

//! What answers do to keys, groups, models and providers.

use lessor::store::EvidenceView;

use super::*;

/// Long enough to outlive every test, for leases that stay out while time passes.
const LONG: Duration = Duration::from_hours(24 * 365);

/// Lends for long, so that the lease does not expire under the test.
async fn lend_long<B: Backend>(world: &World<B>, name: &str) -> Taken {
    world.take(Acquire { ttl: LONG, ..world.ask([name]) }).await
}

fn grouped(name: &str) -> KeySettings {
    KeySettings { group: Some(group("org")), ..setting(name, 4) }
}

fn ask_in_group<B: Backend>(world: &World<B>, name: &str, for_model: &str) -> Acquire {
    let one = Candidate { group: Some(group("org")), ..candidate(name) };
    Acquire { candidates: [one].into(), ..world.ask_for_model(name, for_model) }
}

pub async fn a_rate_limited_key_rests_as_long_as_it_was_told_and_heals_by_itself<B: Backend>(
    world: World<B>,
) {
    world.keys([("a", 1), ("b", 1)]).await;
    let reported = world.lend_and_report("a", says_wait(Class::Rate, SECOND)).await;
    assert!(world.is_in(reported.cooling_until.unwrap(), SECOND));
    assert_eq!(reported.status, Some(KeyStatus::RateLimited));

    let refusal = world.refuse(world.ask(["a"])).await;
    assert_eq!(
        refusal.reasons,
        [(key("a"), Reason::Cooling { until: reported.cooling_until.unwrap(), class: Class::Rate })]
    );
    assert_eq!(refusal.cooldown_end, reported.cooling_until);
    assert_eq!(world.take(world.ask(["a", "b"])).await.grant.key, key("b"));
    let view = world.view("a").await;
    assert_eq!((view.status, view.reason.as_deref()), (KeyStatus::RateLimited, Some("rate")));
    assert_eq!(view.cooldown_until_ms, reported.cooling_until);
    assert!(world.is_in(view.cooldown_since_ms.unwrap(), Duration::ZERO));
    assert_eq!(view.evidence, Some(EvidenceView { status: Some(429), code: None }));

    pass!(world, SECOND + B::SLACK);
    let taken = world.lend("a").await;
    assert!(!taken.grant.probe && !taken.grant.wants_success);
    let view = world.view("a").await;
    assert_eq!((view.status, view.reason, view.cooldown_until_ms), (KeyStatus::Available, None, None));
    assert_eq!((view.cooldown_since_ms, view.evidence), (None, None));
}

pub async fn waits_that_nobody_named_double_up_to_two_minutes<B: Backend>(world: World<B>) {
    world.keys([("a", 1)]).await;
    for seconds in [5, 10, 20, 40, 80, 120, 120] {
        world.lend_and_report("a", says(Class::Rate)).await;
        world.cools_for(world.why_not_key("a").await, SECOND * seconds);
        pass!(world, SECOND * seconds + B::SLACK);
    }
    // a wait that was named neither grows nor takes part in the growth
    world.lend_and_report("a", says_wait(Class::Rate, SECOND)).await;
    world.cools_for(world.why_not_key("a").await, SECOND);
    pass!(world, SECOND + B::SLACK);
    assert!(world.lend("a").await.grant.wants_success);
}

pub async fn refusals_already_on_their_way_grow_nothing<B: Backend>(world: World<B>) {
    world.keys([("a", 3)]).await;
    let [first, second, third] =
        [lend_long(&world, "a").await, lend_long(&world, "a").await, lend_long(&world, "a").await];
    world.report(&first, says(Class::Rate)).await;
    world.report(&first, says(Class::Rate)).await;
    world.report(&second, says(Class::Rate)).await;
    world.cools_for(world.why_not_key("a").await, SECOND * 5);
    pass!(world, SECOND * 6);
    // nor where the answer comes after the end; but the rest begins again
    world.report(&third, says(Class::Rate)).await;
    world.release(&first).await;
    world.cools_for(world.why_not_key("a").await, SECOND * 5);
    pass!(world, SECOND * 6);
    world.lend_and_report("a", says(Class::Rate)).await;
    world.cools_for(world.why_not_key("a").await, SECOND * 10);
}

pub async fn the_longest_evidence_wins(world: World<impl Backend>) {
    world.keys([("a", 4)]).await;
    let held = [world.lend("a").await, world.lend("a").await, world.lend("a").await];
    world.report(&held[1], says_wait(Class::Rate, MINUTE)).await;
    for shorter in [says_wait(Class::Rate, SECOND), says(Class::Rate)] {
        let reported = world.report(&held[2], shorter).await;
        assert!(world.is_in(reported.cooling_until.unwrap(), MINUTE));
    }
    world.cools_for(world.why_not_key("a").await, MINUTE);
    world.report(&held[0], says_wait(Class::Rate, MINUTE * 2)).await;
    world.cools_for(world.why_not_key("a").await, MINUTE * 2);
    // another class with the longer word names the status
    world.report(&held[0], says_wait(Class::Quota, HOUR)).await;
    world.report(&held[1], says_wait(Class::Rate, MINUTE)).await;
    assert_eq!(world.status("a").await, KeyStatus::Exhausted);
    world.cools_for(world.why_not_key("a").await, HOUR);
}

pub async fn who_is_refused_hears_what_set_the_rest_that_ends_last(world: World<impl Backend>) {
    world.sync(vec![grouped("a")]).await;
    let taken = world.take(ask_in_group(&world, "a", "m")).await;
    let reports = [
        (says_wait(Class::Rate, MINUTE), Class::Rate),
        (says_of(Class::Rate, Scope::GroupModel, MINUTE * 2), Class::Rate),
        (says(Class::Access), Class::Access),
        (says_of(Class::Quota, Scope::Group, HOUR), Class::Quota),
        (says_of(Class::Overloaded, Scope::ProviderModel, SECOND), Class::Quota),
    ];
    for (outcome, last) in reports {
        world.report(&taken, outcome).await;
        let reason = world.why_not(ask_in_group(&world, "a", "m")).await;
        let Reason::Cooling { class, .. } = reason else { panic!("{reason:?}") };
        assert_eq!(class, last);
    }
    let reason = world.why_not(ask_in_group(&world, "a", "n")).await;
    assert!(matches!(reason, Reason::Cooling { class: Class::Quota, .. }), "{reason:?}");
}

pub async fn growth_is_forgotten_after_ten_good_minutes<B: Backend>(world: World<B>) {
    world.keys([("a", 1), ("b", 2)]).await;
    for (good_minutes, seconds) in [(0, 5), (9, 10), (11, 20), (0, 5)] {
        world.lend_and_report("a", says(Class::Rate)).await;
        world.cools_for(world.why_not_key("a").await, SECOND * seconds);
        pass!(world, SECOND * seconds + B::SLACK + MINUTE * good_minutes);
    }
    // nobody need lend it for that: here the answer to an old request is the first news again
    let old = lend_long(&world, "b").await;
    for _ in 0..2 {
        world.lend_and_report("b", says(Class::Rate)).await;
        pass!(world, SECOND * 10 + B::SLACK);
    }
    pass!(world, MINUTE * 11);
    world.report(&old, says(Class::Rate)).await;
    world.cools_for(world.why_not_key("b").await, SECOND * 5);
}

pub async fn only_a_success_of_a_newer_lease_lifts_what_was_set<B: Backend>(world: World<B>) {
    world.keys([("a", 3)]).await;
    let old = lend_long(&world, "a").await;
    let refused = lend_long(&world, "a").await;
    // granted before the refusal was known, though after the lease that was refused
    let between = lend_long(&world, "a").await;
    world.report(&refused, says(Class::Rate)).await;
    for taken in [&old, &refused, &between] {
        world.report(taken, says(Class::Success)).await;
    }
    world.cools_for(world.why_not_key("a").await, SECOND * 5);
    world.release(&refused).await;
    pass!(world, SECOND * 5 + B::SLACK);

    let newer = lend_long(&world, "a").await;
    assert!(newer.grant.wants_success);
    world.report(&newer, says(Class::Success)).await;
    world.release(&newer).await;
    let next = world.lend("a").await;
    assert!(!next.grant.wants_success);
    world.report(&next, says(Class::Rate)).await;
    world.cools_for(world.why_not_key("a").await, SECOND * 5);
}

pub async fn named_waits_are_bounded_by_their_class(world: World<impl Backend>) {
    let day = HOUR * 24;
    let said = [
        (Class::Rate, MINUTE * 9, MINUTE * 9),
        // how long a rate limit may name is its rule's word; a day is the most
        (Class::Rate, MINUTE * 45, MINUTE * 45),
        (Class::Rate, HOUR * 9, HOUR * 9),
        (Class::Rate, day * 99, day),
        (Class::Quota, MINUTE, MINUTE),
        (Class::Quota, day * 31, day * 31),
        (Class::Quota, day * 99, day * 32),
        (Class::Overloaded, SECOND * 30, SECOND * 30),
        (Class::Overloaded, HOUR, MINUTE),
    ];
    for (number, (class, named, kept)) in said.into_iter().enumerate() {
        let name = format!("k{number}");
        world.keys([(name.as_str(), 1)]).await;
        let taken = world.take(world.ask_for_model(&name, &name)).await;
        let reported = world.report(&taken, says_wait(class, named)).await;
        let until = reported.cooling_until.unwrap();
        assert!(world.is_in(until, kept), "{class:?} {named:?}: {:?}", until.since(world.now()));
    }
}

pub async fn each_scope_stops_what_it_names_and_nothing_else(world: World<impl Backend>) {
    // which of these are lent afterwards: a's model m, a's model n, its sibling's m, its sibling's n,
    // a stranger's m, a stranger's n
    let scopes = [
        (Scope::Key, [false, false, true, true, true, true]),
        (Scope::KeyModel, [false, true, true, true, true, true]),
        (Scope::Group, [false, false, false, false, true, true]),
        (Scope::GroupModel, [false, true, false, true, true, true]),
        (Scope::ProviderModel, [false, true, false, true, false, true]),
    ];
    for (number, (scope, expected)) in scopes.into_iter().enumerate() {
        let [a, sibling, stranger] = ["a", "s", "x"].map(|name| format!("{name}{number}"));
        let org = Some(group(&format!("org{number}")));
        let [m, n] = ["m", "n"].map(|name| format!("{name}{number}"));
        let of_org = |name: &str| KeySettings { group: org.clone(), ..setting(name, 4) };
        world.sync(vec![of_org(&a), of_org(&sibling), setting(&stranger, 4)]).await;
        let ask = |name: &str, for_model: &str| {
            let group = if name == stranger { None } else { org.clone() };
            let one = Candidate { group, ..candidate(name) };
            Acquire { candidates: [one].into(), ..world.ask_for_model(name, for_model) }
        };
        let taken = world.take(ask(&a, &m)).await;
        world.report(&taken, says_of(Class::Rate, scope, MINUTE)).await;
        let mut lent = Vec::new();
        for name in [&a, &sibling, &stranger] {
            for for_model in [&m, &n] {
                lent.push(world.lends(ask(name, for_model)).await);
            }
        }
        assert_eq!(lent, expected, "{scope:?}");
        // what rests it, or all of its group, for every model is its status
        let rests = matches!(scope, Scope::Key | Scope::Group);
        let status = if rests { KeyStatus::RateLimited } else { KeyStatus::Available };
        assert_eq!(world.status(&a).await, status, "{scope:?}");
    }
}

pub async fn a_scope_that_names_what_the_request_lacks_falls_back_to_what_it_has(world: World<impl Backend>) {
    world.sync(vec![setting("a", 4), setting("b", 4), setting("c", 4), grouped("d"), grouped("e")]).await;
    let limit = |scope| says_of(Class::Rate, scope, MINUTE);
    // no group: the key
    world.lend_and_report("a", limit(Scope::Group)).await;
    assert_eq!(world.status("a").await, KeyStatus::RateLimited);
    // no known model: the key, for requests like that
    world.lend_and_report("b", limit(Scope::KeyModel)).await;
    assert_eq!(world.status("b").await, KeyStatus::Available);
    assert!(!world.lends_key("b").await && world.lends(world.ask_for_model("b", "m")).await);
    assert_eq!(world.view("b").await.cooldowns[0].subject, "b|-");
    // no group: the key and the model
    let taken = world.take(world.ask_for_model("c", "m")).await;
    world.report(&taken, limit(Scope::GroupModel)).await;
    assert!(!world.lends(world.ask_for_model("c", "m")).await);
    assert!(world.lends(world.ask_for_model("c", "n")).await);
    // no known model: the group, for requests like that
    let unknown = |name| Acquire { model: None, ..ask_in_group(&world, name, "m") };
    let taken = world.take(unknown("d")).await;
    world.report(&taken, limit(Scope::GroupModel)).await;
    assert!(!world.lends(unknown("e")).await && world.lends(ask_in_group(&world, "e", "m")).await);
    assert_eq!(world.view("e").await.cooldowns[0].subject, "org|-");
    // no known model: the provider, for requests like that
    world.keys([("f", 4), ("g", 4)]).await;
    world.lend_and_report("f", limit(Scope::ProviderModel)).await;
    assert!(!world.lends_key("g").await && world.lends(world.ask_for_model("g", "m")).await);
    assert_eq!(world.view("g").await.cooldowns[0].subject, "openai|-");
}

pub async fn evidence_about_one_secret_touches_no_other(world: World<impl Backend>) {
    world.keys([("a", 4)]).await;
    let with = |number, for_model: &str| {
        let one = Candidate { fingerprint: secret(number), ..candidate("a") };
        Acquire { candidates: [one].into(), ..world.ask_for_model("a", for_model) }
    };
    let taken = world.take(with(2, "m")).await;
    world.report(&taken, says_of(Class::Rate, Scope::KeyModel, MINUTE)).await;
    assert!(!world.lends(with(2, "m")).await);
    assert!(world.lends(with(1, "m")).await);
    assert!(world.view("a").await.cooldowns.is_empty());
    let reported = world.report(&taken, says(Class::Invalid)).await;
    assert_eq!(reported.status, Some(KeyStatus::Invalid));
    assert_eq!(world.why_not(with(2, "n")).await, Reason::Unusable(KeyStatus::Invalid));
    assert!(world.lends(with(1, "n")).await);
    assert_eq!(world.status("a").await, KeyStatus::Available);
    // but the slots are shared
    world.keys([("a", 1)]).await;
    assert_eq!(world.why_not(with(1, "n")).await, Reason::Full);
}

pub async fn a_refusal_names_each_candidates_longest_end_and_the_earliest_of_all(world: World<impl Backend>) {
    world.keys([("a", 4), ("b", 4), ("c", 1), ("d", 1)]).await;
    let a = world.take(world.ask_for_model("a", "m")).await;
    let b = world.take(world.ask_for_model("b", "m")).await;
    let c = world.lend("c").await;
    world.report(&a, says_wait(Class::Rate, MINUTE)).await;
    world.report(&a, says_of(Class::Rate, Scope::KeyModel, MINUTE * 3)).await;
    world.report(&b, says_wait(Class::Rate, MINUTE * 5)).await;
    world.report(&b, says_of(Class::Rate, Scope::KeyModel, MINUTE * 4)).await;
    let ask = Acquire { model: model("m"), ..world.ask(["b", "a", "c"]) };
    let refusal = world.refuse(ask).await;
    assert_eq!(refusal.reasons.len(), 3);
    world.cools_for(refusal.reasons[0].1, MINUTE * 5);
    world.cools_for(refusal.reasons[1].1, MINUTE * 3);
    assert_eq!(refusal.reasons[2], (key("c"), Reason::Full));
    assert!(world.is_in(refusal.cooldown_end.unwrap(), MINUTE * 3));
    assert_eq!(refusal.lease_end, Some(c.grant.expires_at));
}

pub async fn an_exhausted_key_is_on_probation_after_its_end_until_a_success<B: Backend>(world: World<B>) {
    world.keys([("a", 4)]).await;
    let before = world.lend("a").await;
    world.report(&before, says_wait(Class::Quota, SECOND)).await;
    world.release(&before).await;
    assert_eq!(world.status("a").await, KeyStatus::Exhausted);
    world.cools_for(world.why_not_key("a").await, SECOND);
    pass!(world, SECOND + B::SLACK);
    assert_eq!(world.status("a").await, KeyStatus::Probation);

    let probe = world.lend("a").await;
    assert!(probe.grant.probe && probe.grant.wants_success);
    let refusal = world.refuse(world.ask(["a"])).await;
    assert_eq!((refusal.reasons[0].1, refusal.lease_end), (Reason::Full, Some(probe.grant.expires_at)));
    // an answer to what was sent before the exhaustion does not count
    world.report(&before, says(Class::Success)).await;
    assert_eq!(world.status("a").await, KeyStatus::Probation);

    let reported = world.report(&probe, says(Class::Success)).await;
    assert_eq!(reported.status, Some(KeyStatus::Available));
    let free = world.lend("a").await;
    assert!(!free.grant.probe);
    assert!(world.lends_key("a").await);
}

pub async fn a_refused_probe_doubles_the_wait_and_a_rate_limited_one_stays_on_probation<B: Backend>(
    world: World<B>,
) {
    world.keys([("a", 4)]).await;
    for minutes in [15, 30, 60, 120, 240, 360, 360] {
        world.lend_and_report("a", says(Class::Quota)).await;
        world.cools_for(world.refuse(world.ask(["a"])).await.reasons[0].1, MINUTE * minutes);
        pass!(world, MINUTE * minutes + B::SLACK);
    }
    world.lend_and_report("a", says_wait(Class::Rate, MINUTE)).await;
    assert_eq!(world.status("a").await, KeyStatus::RateLimited);
    pass!(world, MINUTE + B::SLACK);
    assert_eq!(world.status("a").await, KeyStatus::Probation);
}

pub async fn a_probe_that_ends_without_a_success_leaves_the_probation<B: Backend>(world: World<B>) {
    world.keys([("a", 4)]).await;
    world.lend_and_report("a", says_wait(Class::Quota, SECOND)).await;
    pass!(world, SECOND + B::SLACK);
    for class in [Class::Cancelled, Class::Network, Class::Caller] {
        let probe = world.lend("a").await;
        assert!(probe.grant.probe);
        assert!(!world.lends_key("a").await);
        world.report(&probe, says(class)).await;
        world.release(&probe).await;
        assert_eq!(world.status("a").await, KeyStatus::Probation, "after {class:?}");
    }
}

pub async fn a_probe_that_crashes_is_followed_by_another_within_a_ttl<B: Backend>(world: World<B>) {
    world.sync(vec![grouped("a"), grouped("b")]).await;
    let taken = world.take(ask_in_group(&world, "a", "m")).await;
    world.report(&taken, says_of(Class::Quota, Scope::Group, SECOND)).await;
    world.release(&taken).await;
    pass!(world, SECOND + B::SLACK);
    world.take(ask_in_group(&world, "a", "m")).await;
    assert_eq!(world.why_not(ask_in_group(&world, "b", "m")).await, Reason::Full);
    pass!(world, B::TTL + B::SLACK);
    assert!(world.take(ask_in_group(&world, "b", "m")).await.grant.probe);
}

pub async fn an_exhausted_key_is_probed_every_half_hour_before_its_end<B: Backend>(world: World<B>) {
    world.keys([("a", 4)]).await;
    world.lend_and_report("a", says_wait(Class::Quota, HOUR * 24)).await;
    pass!(world, MINUTE * 29);
    assert!(matches!(world.why_not_key("a").await, Reason::Cooling { .. }));
    pass!(world, MINUTE);
    let probe = lend_long(&world, "a").await;
    assert!(probe.grant.probe);
    assert_eq!(world.status("a").await, KeyStatus::Exhausted);
    // while it is out, and until half an hour after it began, none other is
    pass!(world, MINUTE * 29);
    assert!(matches!(world.why_not_key("a").await, Reason::Cooling { .. }));
    world.report(&probe, says(Class::Quota)).await;
    world.release(&probe).await;
    world.cools_for(world.why_not_key("a").await, MINUTE * (24 * 60 - 59));
    pass!(world, MINUTE);
    let probe = lend_long(&world, "a").await;
    world.report(&probe, says(Class::Success)).await;
    assert_eq!(world.status("a").await, KeyStatus::Available);
    assert!(world.lends_key("a").await);
}

pub async fn an_exhausted_key_with_a_live_lease_is_not_probed_early<B: Backend>(world: World<B>) {
    world.keys([("a", 4)]).await;
    let running = lend_long(&world, "a").await;
    world.lend_and_report("a", says_wait(Class::Quota, HOUR)).await;
    pass!(world, MINUTE * 31);
    world.cools_for(world.why_not_key("a").await, MINUTE * 29);
    world.release(&running).await;
    assert!(world.lends_key("a").await);
}

pub async fn an_exhausted_group_is_probed_by_one_key_alone<B: Backend>(world: World<B>) {
    world.sync(vec![grouped("a"), grouped("b")]).await;
    let taken = world.take(ask_in_group(&world, "a", "m")).await;
    world.report(&taken, says_of(Class::Quota, Scope::Group, SECOND)).await;
    world.release(&taken).await;
    assert!(matches!(world.why_not(ask_in_group(&world, "b", "m")).await, Reason::Cooling { .. }));
    pass!(world, SECOND + B::SLACK);
    let probe = world.take(ask_in_group(&world, "a", "m")).await;
    assert!(probe.grant.probe);
    assert_eq!(world.why_not(ask_in_group(&world, "a", "m")).await, Reason::Full);
    assert_eq!(world.why_not(ask_in_group(&world, "b", "m")).await, Reason::Full);
    world.report(&probe, says(Class::Success)).await;
    assert!(world.lends(ask_in_group(&world, "b", "m")).await);
}

pub async fn too_many_at_once_lowers_the_cap_for_a_minute_and_then_step_by_step_raises_it<B: Backend>(
    world: World<B>,
) {
    world.keys([("a", 6)]).await;
    let mut held = Vec::new();
    for _ in 0..4 {
        held.push(lend_long(&world, "a").await);
    }
    let reported = world.report(&held[0], says(Class::Concurrency)).await;
    assert_eq!((reported.cooling_until, reported.status), (None, Some(KeyStatus::Available)));
    world.release(&held[0]).await;
    assert_eq!(world.why_not_key("a").await, Reason::Full);
    let view = world.view("a").await;
    assert_eq!((view.max_concurrent_uses, view.learned_concurrent_uses), (6, Some(3)));
    world.release(&held[1]).await;
    held.push(lend_long(&world, "a").await);
    assert_eq!(world.why_not_key("a").await, Reason::Full);

    pass!(world, SECOND * 59);
    assert_eq!(world.why_not_key("a").await, Reason::Full);
    for _ in 0..3 {
        pass!(world, MINUTE);
        lend_long(&world, "a").await;
        assert_eq!(world.why_not_key("a").await, Reason::Full);
    }
    assert_eq!(world.view("a").await.learned_concurrent_uses, None);
    // a lone lease is never the one too many
    world.keys([("b", 2)]).await;
    let alone = lend_long(&world, "b").await;
    world.report(&alone, says(Class::Concurrency)).await;
    assert_eq!(world.why_not_key("b").await, Reason::Full);
    world.release(&alone).await;
    assert!(world.lends_key("b").await);
}

pub async fn too_many_at_once_said_of_an_ended_lease_teaches_nothing(world: World<impl Backend>) {
    world.keys([("a", 4)]).await;
    let ended = world.lend("a").await;
    world.release(&ended).await;
    world.lend("a").await;
    world.report(&ended, says(Class::Concurrency)).await;
    assert!(world.lends_key("a").await);
}

fn crowded(scope: Scope, max_uses: Option<u32>) -> Outcome {
    Outcome { scope, max_uses, ..says(Class::Concurrency) }
}

pub async fn too_many_at_once_in_a_group_lowers_the_cap_of_all_its_keys_together<B: Backend>(
    world: World<B>,
) {
    world.sync(vec![grouped("a"), grouped("b"), setting("c", 4)]).await;
    let ask = |name| Acquire { ttl: LONG, ..ask_in_group(&world, name, "m") };
    let mut held = Vec::new();
    for name in ["a", "a", "b", "b"] {
        held.push(world.take(ask(name)).await);
    }
    world.report(&held[3], crowded(Scope::Group, None)).await;
    let view = world.view("a").await;
    assert_eq!((view.learned_concurrent_uses, view.group_concurrent_uses), (None, Some(3)));
    assert_eq!(world.view("c").await.group_concurrent_uses, None);
    world.release(&held[3]).await;
    // three of the group are in use, whosoever they are, and no more are lent
    let refusal = world.refuse(ask("b")).await;
    assert_eq!((refusal.reasons[0].1, refusal.lease_end), (Reason::Full, Some(held[0].grant.expires_at)));
    assert_eq!(world.why_not(ask("a")).await, Reason::Full);
    assert!(world.lends_key("c").await);
    world.release(&held[0]).await;
    held[0] = world.take(ask("b")).await;
    assert_eq!(world.why_not(ask("b")).await, Reason::Full);
    // a renewal keeps its place among them
    let answers = world.renew(world.renewal(&[&held[0], &held[1], &held[2]])).await;
    assert!(answers.iter().all(|answer| matches!(answer, RenewAnswer::Renewed(_))));
    assert_eq!(world.why_not(ask("a")).await, Reason::Full);
    pass!(world, MINUTE);
    world.take(ask("a")).await;
    assert_eq!(world.why_not(ask("a")).await, Reason::Full);
    // who has crashed leaves his place to others
    pass!(world, LONG + B::SLACK);
    world.take(ask("a")).await;
}

pub async fn a_maximum_that_an_answer_names_is_learned_and_no_refusal_raises_what_was_learned(
    world: World<impl Backend>,
) {
    world.keys([("a", 8)]).await;
    let mut held = Vec::new();
    for _ in 0..6 {
        held.push(lend_long(&world, "a").await);
    }
    let learned = async || world.view("a").await.learned_concurrent_uses;
    world.report(&held[5], crowded(Scope::Key, Some(2))).await;
    assert_eq!(learned().await, Some(2));
    // those under way are answered still: what they say is older news
    world.report(&held[4], crowded(Scope::Key, None)).await;
    world.report(&held[3], crowded(Scope::Key, Some(7))).await;
    assert_eq!(learned().await, Some(2));
    for taken in &held[2..] {
        world.release(taken).await;
    }
    assert_eq!(world.why_not_key("a").await, Reason::Full);
    world.release(&held[1]).await;
    assert!(world.lends_key("a").await);
    // others may use the account, too: refused below the maximum, less is learned
    world.keys([("b", 8)]).await;
    let [first, _second] = [lend_long(&world, "b").await, lend_long(&world, "b").await];
    world.report(&first, crowded(Scope::Key, Some(5))).await;
    assert_eq!(world.view("b").await.learned_concurrent_uses, Some(1));
}

pub async fn a_learned_cap_ends_no_lease_and_is_forgotten_after_a_day<B: Backend>(world: World<B>) {
    world.sync(vec![KeySettings { max_concurrent_uses: 4000, ..grouped("a") }]).await;
    let ask = || Acquire { ttl: LONG, ..ask_in_group(&world, "a", "m") };
    let held = [world.take(ask()).await, world.take(ask()).await, world.take(ask()).await];
    for scope in [Scope::Group, Scope::Key] {
        world.report(&held[0], crowded(scope, Some(1))).await;
    }
    let answers = world.renew(world.renewal(&[&held[0], &held[1], &held[2]])).await;
    assert!(answers.iter().all(|answer| matches!(answer, RenewAnswer::Renewed(_))));
    let learned = async || {
        let view = world.view("a").await;
        (view.learned_concurrent_uses, view.group_concurrent_uses)
    };
    assert_eq!(learned().await, (Some(1), Some(1)));
    pass!(world, (HOUR * 24).saturating_sub(SECOND));
    assert_eq!(learned().await, (Some(1440), Some(1440)));
    pass!(world, SECOND + B::SLACK);
    assert_eq!(learned().await, (None, None));
}

/// A key whose group answers say.
fn learning(name: &str) -> KeySettings {
    KeySettings { group: Some(GroupName::auto()), ..setting(name, 4) }
}

/// What a sidecar asks with that knows the key's group only as it was told.
fn ask_as_told<B: Backend>(world: &World<B>, name: &str, told: &GroupName) -> Acquire {
    let one = Candidate { group: Some(told.clone()), ..candidate(name) };
    Acquire { candidates: [one].into(), ttl: LONG, ..world.ask_for_model(name, "m") }
}

pub async fn keys_whose_answers_name_one_organisation_share_its_limits_from_then_on(
    world: World<impl Backend>,
) {
    world.sync(vec![learning("a"), learning("b"), learning("c")]).await;
    let (auto, org) = (GroupName::auto(), GroupName::of_organization("Acme, Inc."));
    let ask = |name: &str, told: &GroupName| ask_as_told(&world, name, told);
    let names = |class, of: &GroupName| Outcome { organization: Some(of.clone()), ..says(class) };
    // unknown yet: the limit is the key's
    let first = world.take(ask("a", &auto)).await;
    assert_eq!(first.grant.group, Some(auto.clone()));
    assert_eq!(world.view("a").await.group, Some(auto.clone()));
    for (name, of) in [("a", &org), ("b", &org), ("c", &GroupName::of_organization("another"))] {
        let taken = world.take(ask(name, &auto)).await;
        world.report(&taken, names(Class::Success, of)).await;
        world.release(&taken).await;
        assert_eq!(world.view(name).await.group.as_ref(), Some(of));
    }
    // who does not know it is told it, and again when the reply was lost
    let untold = ask("b", &auto);
    let taken = world.take(untold.clone()).await;
    assert_eq!(taken.grant.group, Some(org.clone()));
    assert_eq!(world.take(untold).await.grant, taken.grant);
    world.report(&taken, says_of(Class::Rate, Scope::GroupModel, MINUTE)).await;
    for told in [&auto, &org] {
        world.cools_for(world.why_not(ask("a", told)).await, MINUTE);
    }
    assert!(world.lends(ask("c", &auto)).await);
    assert_eq!(world.view("a").await.cooldowns[0].subject, format!("{org}|m"));
    // the very answer that names it may be the refusal
    let refused = names(Class::Quota, &org);
    world.report(&first, Outcome { scope: Scope::Group, ..refused }).await;
    assert_eq!(world.status("a").await, KeyStatus::Exhausted);
    assert_eq!(world.view("b").await.cooldowns.len(), 2);
    // and a person clears it by any of its keys
    world.set("b", StatusChange::Clear).await;
    assert!(world.lends(ask("a", &org)).await);
}

pub async fn a_learned_group_is_that_of_one_secret_alone(world: World<impl Backend>) {
    world.sync(vec![learning("a")]).await;
    let auto = GroupName::auto();
    let of = |number: u8| GroupName::of_organization(&format!("org-{number}"));
    let ask = |number| ask_as_told(&world, "a", &auto).with_secret(number);
    let told = async |number| {
        let taken = world.take(ask(number)).await;
        world.release(&taken).await;
        taken.grant.group.unwrap()
    };
    for number in 1..7 {
        let taken = world.take(ask(number)).await;
        world.report(&taken, Outcome { organization: Some(of(number)), ..says(Class::Success) }).await;
        world.release(&taken).await;
    }
    // the present one stays known, and the latest; of the others some
    assert_eq!((told(1).await, told(6).await, told(2).await), (of(1), of(6), auto.clone()));
    assert_eq!(told(9).await, auto);
    // an answer says it once for all: nobody else's word is taken
    let mine = Candidate { group: Some(group("mine")), ..candidate("a") };
    let ask = Acquire { candidates: [mine].into(), ..world.ask(["a"]) };
    let taken = world.take(ask).await;
    assert_eq!(taken.grant.group, Some(group("mine")));
    world.report(&taken, Outcome { organization: Some(of(8)), ..says(Class::Success) }).await;
    assert_eq!(told(1).await, of(1));
}

pub async fn a_key_the_provider_proved_bad_waits_for_a_check<B: Backend>(world: World<B>) {
    world.keys([("a", 4)]).await;
    let old = lend_long(&world, "a").await;
    // whatever scope came with it: a bad key is bad for all
    let proven = Outcome { scope: Scope::KeyModel, ..says_wait(Class::Invalid, SECOND) };
    let taken = world.take(world.ask_for_model("a", "m")).await;
    let reported = world.report(&taken, proven).await;
    assert_eq!(reported.status, Some(KeyStatus::Invalid));
    world.report(&old, says(Class::Success)).await;
    world.report(&old, says_wait(Class::Rate, MINUTE)).await;
    let refusal = world.refuse(world.ask(["a"])).await;
    assert_eq!(refusal.reasons[0].1, Reason::Unusable(KeyStatus::Invalid));
    assert_eq!(refusal.cooldown_end, None);
    let view = world.view("a").await;
    assert_eq!((view.status, view.reason.as_deref()), (KeyStatus::Invalid, Some("invalid")));
    assert_eq!(view.cooldown_until_ms, None);
    world.set("a", StatusChange::CheckedGood(secret(2))).await;
    assert_eq!(world.status("a").await, KeyStatus::Invalid);
    world.set("a", StatusChange::CheckedGood(secret(1))).await;
    assert!(world.lends_key("a").await);

    world.lend_and_report("a", says(Class::Invalid)).await;
    pass!(world, LONG);
    assert_eq!(world.status("a").await, KeyStatus::Invalid);
}

pub async fn a_doubted_key_rests_for_the_model_until_a_check_says_good<B: Backend>(world: World<B>) {
    world.keys([("a", 4)]).await;
    let doubt = || Outcome { proven: false, ..says_wait(Class::Invalid, HOUR) };
    let taken = world.take(world.ask_for_model("a", "m")).await;
    let reported = world.report(&taken, doubt()).await;
    assert_eq!(reported.status, Some(KeyStatus::Available));
    world.cools_for(world.why_not(world.ask_for_model("a", "m")).await, MINUTE);
    assert!(world.lends(world.ask_for_model("a", "n")).await);
    world.set("a", StatusChange::CheckedGood(secret(2))).await;
    assert!(!world.lends(world.ask_for_model("a", "m")).await);
    world.set("a", StatusChange::CheckedGood(secret(1))).await;
    assert!(world.lends(world.ask_for_model("a", "m")).await);
    // where none is known nothing rests: what was refused may be any path
    world.lend_and_report("a", doubt()).await;
    assert_eq!(world.status("a").await, KeyStatus::Available);
    assert!(world.lends_key("a").await && world.lends(world.ask_for_model("a", "m")).await);
    // a check lifts what was set on doubt, not what was said
    let held = world.take(world.ask_for_model("a", "m").with_secret(3)).await;
    world.report(&held, says_of(Class::Rate, Scope::KeyModel, MINUTE)).await;
    world.set("a", StatusChange::CheckedGood(secret(3))).await;
    assert!(!world.lends(world.ask_for_model("a", "m").with_secret(3)).await);
    pass!(world, MINUTE + B::SLACK);
    assert!(world.lends_key("a").await);
}

trait WithSecret {
    fn with_secret(self, number: u8) -> Self;
}

impl WithSecret for Acquire {
    fn with_secret(mut self, number: u8) -> Self {
        Arc::make_mut(&mut self.candidates)[0].fingerprint = secret(number);
        self
    }
}

pub async fn a_model_that_a_key_may_not_use_rests_for_half_an_hour_with_this_key<B: Backend>(
    world: World<B>,
) {
    world.keys([("a", 4), ("b", 4)]).await;
    for (class, scope, for_model) in [(Class::Access, Scope::Key, "m"), (Class::Region, Scope::KeyModel, "n")]
    {
        let taken = world.take(world.ask_for_model("a", for_model)).await;
        world.report(&taken, Outcome { scope, ..says_wait(class, SECOND) }).await;
        world.cools_for(world.why_not(world.ask_for_model("a", for_model)).await, MINUTE * 30);
        assert!(world.lends(world.ask_for_model("b", for_model)).await);
    }
    assert!(world.lends(world.ask_for_model("a", "o")).await);
    // where it is not known which model, nothing is known
    let reported = world.lend_and_report("b", says(Class::Access)).await;
    assert_eq!(reported, Reported { cooling_until: None, status: Some(KeyStatus::Available) });
    assert!(world.lends_key("b").await);
    pass!(world, MINUTE * 30 + B::SLACK);
    assert!(!world.take(world.ask_for_model("a", "m")).await.grant.wants_success);
}

pub async fn a_key_that_may_not_be_used_from_here_rests_for_every_model<B: Backend>(world: World<B>) {
    world.keys([("a", 4), ("b", 4)]).await;
    let taken = world.take(world.ask_for_model("a", "m")).await;
    world.report(&taken, says(Class::Region)).await;
    world.cools_for(world.why_not(world.ask_for_model("a", "n")).await, MINUTE * 30);
    assert!(world.lends(world.ask_for_model("b", "m")).await);
    let view = world.view("a").await;
    assert_eq!((view.status, view.reason.as_deref()), (KeyStatus::Cooldown, Some("region")));
    pass!(world, MINUTE * 30 + B::SLACK);
    assert!(world.lends(world.ask_for_model("a", "m")).await);
}

pub async fn an_overloaded_provider_rests_the_model_and_then_sends_one_probe<B: Backend>(world: World<B>) {
    world.keys([("a", 4), ("b", 4)]).await;
    let busy = || Outcome { status: Some(503), ..Outcome::plain(Class::Overloaded, Some(503)) };
    for seconds in [1, 2, 4, 8, 16, 32, 60, 60] {
        let taken = world.take(world.ask_for_model("a", "m")).await;
        let reported = world.report(&taken, busy()).await;
        assert_eq!(reported.status, Some(KeyStatus::Available));
        world.release(&taken).await;
        world.cools_for(world.why_not(world.ask_for_model("b", "m")).await, SECOND * seconds);
        assert!(world.lends(world.ask_for_model("b", "n")).await);
        pass!(world, SECOND * seconds + B::SLACK);
        let probe = world.take(world.ask_for_model("b", "m")).await;
        assert!(probe.grant.probe);
        assert_eq!(world.why_not(world.ask_for_model("a", "m")).await, Reason::Full);
        world.release(&probe).await;
    }
    let probe = world.take(world.ask_for_model("a", "m")).await;
    world.report(&probe, says(Class::Success)).await;
    assert!(!world.take(world.ask_for_model("b", "m")).await.grant.probe);
    assert!(!world.take(world.ask_for_model("b", "m")).await.grant.probe);
}

pub async fn what_does_not_blame_the_key_changes_nothing(world: World<impl Backend>) {
    world.keys([("a", 4)]).await;
    for class in [Class::Caller, Class::Success, Class::Cancelled, Class::Network] {
        let reported = world.lend_and_report("a", says_wait(class, MINUTE)).await;
        assert_eq!(reported, Reported { cooling_until: None, status: Some(KeyStatus::Available) });
        assert!(world.lends_key("a").await, "{class:?}");
    }
}

pub async fn a_report_that_contradicts_its_lease_changes_nothing(world: World<impl Backend>) {
    world.keys([("a", 4), ("b", 4)]).await;
    let held = world.lend("a").await;
    let right = held.reported(says(Class::Invalid));
    let wrong = [
        Report { key: key("b"), ..right.clone() },
        Report { token: FencingToken(held.grant.token.0 - 1), ..right.clone() },
        Report { fingerprint: secret(2), ..right.clone() },
        Report { key: key("nobody"), lease: LeaseId::fresh(), ..right.clone() },
    ];
    for report in wrong {
        assert_eq!(world.store().report(report).await.unwrap(), Reported::default());
    }
    assert!(world.lends_key("a").await && world.lends_key("b").await);
    assert!(world.lends(world.ask_for_model("a", "m").with_secret(2)).await);
}

pub async fn a_token_that_was_never_issued_lifts_nothing(world: World<impl Backend>) {
    world.keys([("a", 4)]).await;
    let held = world.lend("a").await;
    world.report(&held, says_wait(Class::Rate, MINUTE)).await;
    let forged =
        Report { lease: LeaseId::fresh(), token: FROM_THE_FUTURE, ..held.reported(says(Class::Success)) };
    world.store().report(forged).await.unwrap();
    world.cools_for(world.why_not_key("a").await, MINUTE);
}

pub async fn an_exhaustion_within_a_longer_rest_still_ends_in_a_probation<B: Backend>(world: World<B>) {
    world.keys([("a", 4)]).await;
    let held = [world.lend("a").await, world.lend("a").await];
    world.report(&held[0], says_wait(Class::Rate, SECOND * 3)).await;
    world.report(&held[1], says_wait(Class::Quota, SECOND)).await;
    assert_eq!(world.status("a").await, KeyStatus::RateLimited);
    pass!(world, SECOND * 3 + B::SLACK);
    assert_eq!(world.status("a").await, KeyStatus::Probation);
}

pub async fn growth_of_one_class_is_not_anothers<B: Backend>(world: World<B>) {
    world.keys([("a", 1)]).await;
    for seconds in [5, 10, 20] {
        world.lend_and_report("a", says(Class::Rate)).await;
        pass!(world, SECOND * seconds + B::SLACK);
    }
    world.lend_and_report("a", says(Class::Quota)).await;
    world.cools_for(world.why_not_key("a").await, MINUTE * 15);
}

pub async fn a_refusal_sent_into_a_rest_grows_nothing<B: Backend>(world: World<B>) {
    world.keys([("a", 4)]).await;
    let limit = || Outcome { scope: Scope::KeyModel, ..says(Class::Rate) };
    let first = world.take(world.ask_for_model("a", "m")).await;
    world.report(&first, limit()).await;
    // lent while the model was not known yet
    let blind = world.lend("a").await;
    let report = Report { model: model("m"), ..blind.reported(limit()) };
    world.store().report(report).await.unwrap();
    world.cools_for(world.why_not(world.ask_for_model("a", "m")).await, SECOND * 5);
    pass!(world, SECOND * 5 + B::SLACK);
    let next = world.take(world.ask_for_model("a", "m")).await;
    world.report(&next, limit()).await;
    world.cools_for(world.why_not(world.ask_for_model("a", "m")).await, SECOND * 10);
}

pub async fn only_an_exhaustion_is_probed_before_its_end<B: Backend>(world: World<B>) {
    world.keys([("a", 4)]).await;
    world.lend_and_report("a", says_wait(Class::Rate, HOUR * 9)).await;
    pass!(world, MINUTE * 31);
    assert!(matches!(world.why_not_key("a").await, Reason::Cooling { .. }));
}

pub async fn a_refused_early_probe_counts_for_the_growth_and_outdates_the_probe_before_it<B: Backend>(
    world: World<B>,
) {
    world.keys([("a", 4)]).await;
    world.lend_and_report("a", says_wait(Class::Quota, HOUR)).await;
    pass!(world, MINUTE * 30);
    let first = lend_long(&world, "a").await;
    world.report(&first, says(Class::Quota)).await;
    world.release(&first).await;
    // the late word of the probe that was refused since lifts nothing
    world.report(&first, says(Class::Success)).await;
    world.cools_for(world.why_not_key("a").await, MINUTE * 30);
    pass!(world, MINUTE * 30);
    world.lend_and_report("a", says(Class::Quota)).await;
    world.cools_for(world.why_not_key("a").await, MINUTE * 30);
    // what a probe meets of another class does not
    world.keys([("b", 4)]).await;
    world.lend_and_report("b", says_wait(Class::Quota, HOUR)).await;
    pass!(world, MINUTE * 30);
    world.lend_and_report("b", says(Class::Rate)).await;
    pass!(world, MINUTE * 30);
    world.lend_and_report("b", says(Class::Quota)).await;
    world.cools_for(world.why_not_key("b").await, MINUTE * 15);
}

pub async fn a_probe_stays_the_only_one_however_long_it_takes<B: Backend>(world: World<B>) {
    world.sync(vec![grouped("a"), grouped("b")]).await;
    let ask = |name| Acquire { ttl: LONG, ..ask_in_group(&world, name, "m") };
    let old = world.take(ask("a")).await;
    world.report(&old, says_of(Class::Quota, Scope::Group, SECOND)).await;
    pass!(world, SECOND + B::SLACK);
    world.take(ask("b")).await;
    // news from before the probation makes the rest longer, and the probe no less out
    world.report(&old, says_of(Class::Quota, Scope::Group, SECOND * 2)).await;
    assert!(matches!(world.why_not(ask("a")).await, Reason::Cooling { .. }));
    pass!(world, SECOND * 2 + B::SLACK);
    assert_eq!(world.why_not(ask("a")).await, Reason::Full);
    // nor is there a second one before the end
    world.report(&old, says_of(Class::Quota, Scope::Group, HOUR * 24)).await;
    pass!(world, HOUR);
    assert!(matches!(world.why_not(ask("a")).await, Reason::Cooling { .. }));
}

pub async fn an_exhaustion_that_is_already_over_is_a_probation(world: World<impl Backend>) {
    world.keys([("a", 4)]).await;
    let reported = world.lend_and_report("a", says_wait(Class::Quota, Duration::ZERO)).await;
    assert_eq!(reported, Reported { cooling_until: None, status: Some(KeyStatus::Probation) });
    let reported = world.lend_and_report("a", says_wait(Class::Quota, Duration::ZERO)).await;
    assert_eq!(reported.status, Some(KeyStatus::Probation));
}

pub async fn models_that_callers_make_up_push_out_nothing_that_matters<B: Backend>(world: World<B>) {
    world.sync(vec![grouped("a"), setting("b", 4), setting("c", 4)]).await;
    let taken = world.take(ask_in_group(&world, "a", "m")).await;
    world.report(&taken, says_of(Class::Quota, Scope::Group, MINUTE * 5)).await;
    let taken = world.lend("b").await;
    for scope in [Scope::KeyModel, Scope::Key] {
        world.report(&taken, says_of(Class::Rate, scope, MINUTE * 5)).await;
    }
    let rests = |number: usize, outcome: Outcome| {
        let (ask, world) = (world.ask_for_model("c", &format!("made-up-{number}")), &world);
        async move {
            let taken = world.take(ask).await;
            let reported = world.report(&taken, outcome).await;
            world.release(&taken).await;
            reported.cooling_until.is_some()
        }
    };
    for number in 0..1022 {
        assert!(rests(number, says(Class::Access)).await, "{number}");
    }
    // with those of the group and of unknown models they are as many as there may be
    for number in 1022..1100 {
        assert!(!rests(number, says(Class::Access)).await, "{number}");
    }
    assert_eq!(world.view("c").await.cooldowns.len(), 1022);
    assert!(matches!(world.why_not(ask_in_group(&world, "a", "m")).await, Reason::Cooling { .. }));
    assert!(matches!(world.why_not_key("b").await, Reason::Cooling { .. }));
    // what is known already goes on
    assert!(!world.lends(world.ask_for_model("c", "made-up-7")).await);
    // a limit takes the place of what a caller may have made up, and one of no known model needs none
    let limit = || says_of(Class::Rate, Scope::KeyModel, MINUTE * 5);
    for number in 2000..2010 {
        assert!(rests(number, limit()).await, "{number}");
    }
    assert_eq!(world.view("c").await.cooldowns.len(), 1022);
    world.lend_and_report("c", limit()).await;
    assert_eq!(world.view("c").await.cooldowns.len(), 1023);
    // what has healed makes room
    pass!(world, MINUTE * 31);
    assert!(rests(3000, says(Class::Access)).await);
}

pub async fn a_success_without_a_model_proves_nothing_of_what_a_request_with_one_met<B: Backend>(
    world: World<B>,
) {
    world.keys([("a", 4), ("b", 4)]).await;
    let with_model = |name| Acquire { ttl: LONG, ..world.ask_for_model(name, "m") };
    let taken = world.take(with_model("a")).await;
    world.report(&taken, says_wait(Class::Quota, HOUR)).await;
    world.release(&taken).await;
    // nor is it the early probe, whose turn it would take
    pass!(world, MINUTE * 31);
    assert!(matches!(world.why_not_key("a").await, Reason::Cooling { .. }));
    assert!(world.lends(with_model("a")).await);
    pass!(world, MINUTE * 29 + B::SLACK);
    assert_eq!(world.status("a").await, KeyStatus::Probation);
    let free = world.lend("a").await;
    assert!(free.grant.probe && !free.grant.wants_success);
    world.report(&free, says(Class::Success)).await;
    world.release(&free).await;
    assert_eq!(world.status("a").await, KeyStatus::Probation);
    // an answer that only points elsewhere does not show that the key is taken
    let probe = world.take(with_model("a")).await;
    world.report(&probe, Outcome::plain(Class::Success, Some(304))).await;
    assert_eq!(world.status("a").await, KeyStatus::Probation);
    world.report(&probe, Outcome::plain(Class::Success, Some(200))).await;
    assert_eq!(world.status("a").await, KeyStatus::Available);
    // what one without a model met, one without lifts; but not once one with a model has met it too
    for met_too in [false, true] {
        world.lend_and_report("b", says_wait(Class::Quota, Duration::ZERO)).await;
        if met_too {
            let probe = world.take(with_model("b")).await;
            world.report(&probe, says_wait(Class::Quota, Duration::ZERO)).await;
            world.release(&probe).await;
        }
        pass!(world, B::SLACK);
        world.lend_and_report("b", says(Class::Success)).await;
        let left = if met_too { KeyStatus::Probation } else { KeyStatus::Available };
        assert_eq!(world.status("b").await, left);
    }
}

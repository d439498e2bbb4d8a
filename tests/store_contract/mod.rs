//! What every lease store promises, as tests that know only the `Store` trait.
//!
//! A backend joins by implementing [`Backend`] and calling `store_contract!(Its)`. Where it cannot wait
//! as long as a promise needs (a shared clock does not jump), [`Backend::pass`] says so and the test ends
//! there: what it would have shown is then shown on the model alone.
// Every backend's test binary takes this module in, and none exports anything.
#![allow(unreachable_pub, clippy::unwrap_used)]

use std::sync::Arc;
use std::time::Duration;

use lessor::model::{
    AppName, Class, FencingToken, Fingerprint, GroupName, KeyId, KeyStatus, LeaseId, ModelName, Outcome,
    OwnerId, PoolName, ProviderName, Scope,
};
use lessor::store::{
    Acquire, Acquired, Candidate, Epoch, Grant, Held, KeySettings, KeyView, Reason, Refusal, Release, Renew,
    RenewAnswer, Report, Reported, StatusChange, Store, StoreTime, SyncKeys, SyncMode, Synced,
};

pub mod lending;
pub mod renewing;
pub mod resting;
pub mod settings;

pub const SECOND: Duration = Duration::from_secs(1);
pub const MINUTE: Duration = Duration::from_mins(1);
pub const HOUR: Duration = Duration::from_hours(1);

/// A store under test, and a hand on its time.
pub trait Backend: Sized {
    /// A lease's life in these tests: as short as the backend's time can tell apart with ease.
    const TTL: Duration;
    /// How far a time may be off what was asked for: nothing where the clock stands still between steps.
    const SLACK: Duration;

    /// An empty store.
    async fn fresh() -> Self;
    /// The store.
    fn store(&self) -> Arc<dyn Store>;
    /// Lets time pass; `false` where that would take too long.
    async fn pass(&self, time: Duration) -> bool;
    /// Loses all data, as a restart without persistence does; `false` where that cannot be done. Time
    /// goes on.
    async fn lose_data(&mut self) -> bool;
    /// From here on calls are made at once. Which of them the store heard first nobody knows, so whoever
    /// holds its answers against a model's must stop.
    fn calls_race(&self) {}
}

/// Lets time pass in a world, or ends the test where its backend cannot.
macro_rules! pass {
    ($world:ident, $time:expr) => {
        if !$world.backend.pass($time).await {
            return;
        }
    };
}
pub(crate) use pass;

/// One test a promise, for one backend.
#[macro_export]
macro_rules! store_contract {
    ($backend:ty) => {
        store_contract! { @tests $backend; lending:
            the_first_candidate_with_a_free_slot_is_lent
            sixty_four_acquires_at_once_on_a_cap_of_one_have_one_winner
            a_repeated_acquire_returns_the_same_grant_and_takes_no_second_slot
            a_lease_id_held_by_another_sidecar_is_never_granted_again
            an_acquire_past_its_deadline_is_late_and_changes_nothing
            a_key_of_another_pool_is_passed_over
            a_key_without_settings_is_named_as_such
            a_cap_of_zero_counts_as_one
            a_full_key_says_when_its_first_lease_ends
            an_unrenewed_lease_frees_its_slot_at_its_end_without_anybodys_help
            fencing_tokens_rise_with_every_lease_and_across_a_loss_of_data
            a_lease_and_its_key_are_seen_as_they_are
            providers_share_nothing
            a_release_frees_its_slot_at_once_and_only_once
            a_release_that_names_another_lease_key_or_pool_frees_nothing
            a_late_release_does_not_free_the_slot_of_whoever_came_next
        }
        store_contract! { @tests $backend; renewing:
            one_renewal_extends_every_lease_it_names
            a_renewal_never_brings_a_lease_closer_to_its_end
            a_renewal_past_its_deadline_is_late_and_extends_nothing
            a_renewal_of_what_is_anothers_is_lost_and_extends_nothing
            an_expired_lease_is_lost
            a_revoked_lease_is_lost_and_keeps_its_slot_until_its_holder_releases_it
            a_revoked_lease_that_nobody_releases_ends_at_its_time
            a_revocation_is_announced_and_one_of_nothing_is_not
            lost_leases_come_back_by_a_reassert_and_only_by_one
            a_reassert_never_goes_above_the_cap
            a_reassert_does_not_take_a_slot_that_was_lent_meanwhile
            a_foreign_epoch_starts_one_grace_in_which_nothing_new_is_lent
            the_own_epoch_or_none_starts_no_grace
            tokens_rise_above_those_of_reasserted_leases
        }
        store_contract! { @tests $backend; resting:
            a_rate_limited_key_rests_as_long_as_it_was_told_and_heals_by_itself
            waits_that_nobody_named_double_up_to_two_minutes
            refusals_already_on_their_way_grow_nothing
            the_longest_evidence_wins
            who_is_refused_hears_what_set_the_rest_that_ends_last
            growth_is_forgotten_after_ten_good_minutes
            only_a_success_of_a_newer_lease_lifts_what_was_set
            named_waits_are_bounded_by_their_class
            each_scope_stops_what_it_names_and_nothing_else
            a_scope_that_names_what_the_request_lacks_falls_back_to_what_it_has
            evidence_about_one_secret_touches_no_other
            a_refusal_names_each_candidates_longest_end_and_the_earliest_of_all
            an_exhausted_key_is_on_probation_after_its_end_until_a_success
            a_refused_probe_doubles_the_wait_and_a_rate_limited_one_stays_on_probation
            a_probe_that_ends_without_a_success_leaves_the_probation
            a_probe_that_crashes_is_followed_by_another_within_a_ttl
            an_exhausted_key_is_probed_every_half_hour_before_its_end
            an_exhausted_key_with_a_live_lease_is_not_probed_early
            an_exhausted_group_is_probed_by_one_key_alone
            too_many_at_once_lowers_the_cap_for_a_minute_and_then_step_by_step_raises_it
            too_many_at_once_said_of_an_ended_lease_teaches_nothing
            too_many_at_once_in_a_group_lowers_the_cap_of_all_its_keys_together
            a_maximum_that_an_answer_names_is_learned_and_no_refusal_raises_what_was_learned
            a_learned_cap_ends_no_lease_and_is_forgotten_after_a_day
            keys_whose_answers_name_one_organisation_share_its_limits_from_then_on
            a_learned_group_is_that_of_one_secret_alone
            a_key_the_provider_proved_bad_waits_for_a_check
            a_doubted_key_rests_for_the_model_until_a_check_says_good
            a_model_that_a_key_may_not_use_rests_for_half_an_hour_with_this_key
            a_key_that_may_not_be_used_from_here_rests_for_every_model
            an_overloaded_provider_rests_the_model_and_then_sends_one_probe
            what_does_not_blame_the_key_changes_nothing
            a_report_that_contradicts_its_lease_changes_nothing
            a_token_that_was_never_issued_lifts_nothing
            an_exhaustion_within_a_longer_rest_still_ends_in_a_probation
            growth_of_one_class_is_not_anothers
            a_refusal_sent_into_a_rest_grows_nothing
            only_an_exhaustion_is_probed_before_its_end
            a_refused_early_probe_counts_for_the_growth_and_outdates_the_probe_before_it
            a_probe_stays_the_only_one_however_long_it_takes
            an_exhaustion_that_is_already_over_is_a_probation
            a_success_without_a_model_proves_nothing_of_what_a_request_with_one_met
        }
        store_contract! { @tests $backend; settings:
            a_disabled_key_is_lent_with_no_secret_and_its_leases_run_on
            a_drained_key_is_disabled_with_that_reason_until_it_is_enabled_or_disabled
            enabling_lifts_invalid_and_keeps_cooldowns
            clearing_lifts_every_cooldown_of_the_key_but_not_invalid
            clearing_lifts_what_was_learned_of_a_groups_uses
            what_was_under_way_when_a_person_cleared_a_key_rests_it_no_more
            a_failed_check_makes_the_key_invalid_with_that_secret_alone
            a_key_that_a_check_doubts_rests_a_minute_until_another_decides
            a_word_on_an_unknown_key_is_refused
            a_key_without_a_secret_is_pending
            new_settings_replace_the_named_keys_and_no_others
            a_cap_that_shrinks_ends_no_lease_and_lends_none_until_it_is_kept
            a_key_that_moves_to_another_pool_keeps_its_leases
            a_repair_brings_back_what_is_missing_and_overrules_nothing_else
            keys_with_other_settings_or_with_one_secret_are_named
            a_scoped_cooldown_is_seen_with_its_evidence
            what_waiters_may_wait_for_is_announced
            the_salt_stays_the_same
        }
    };
    (@tests $backend:ty; $room:ident: $($promise:ident)*) => {
        $(
            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $promise() {
                let backend = <$backend as store_contract::Backend>::fresh().await;
                store_contract::$room::$promise(store_contract::World::of(backend)).await;
            }
        )*
    };
}

/// A store, and a sidecar that speaks to it.
pub struct World<B> {
    pub backend: B,
    pub owner: OwnerId,
}

/// A lease as its holder remembers it.
#[derive(Clone)]
pub struct Taken {
    pub lease: LeaseId,
    pub grant: Grant,
    pub secret: Fingerprint,
    pub group: Option<GroupName>,
    pub model: Option<ModelName>,
}

pub fn provider() -> ProviderName {
    ProviderName::parse("openai").unwrap()
}

pub fn key(name: &str) -> KeyId {
    KeyId::parse(name).unwrap()
}

pub fn pool(name: &str) -> PoolName {
    PoolName::parse(name).unwrap()
}

pub fn group(name: &str) -> GroupName {
    GroupName::parse(name).unwrap()
}

pub fn model(name: &str) -> Option<ModelName> {
    ModelName::new(name)
}

pub fn secret(number: u8) -> Fingerprint {
    Fingerprint([number; 32])
}

/// What an answer of this class says of the key alone.
pub fn says(class: Class) -> Outcome {
    Outcome::plain(class, Some(429))
}

pub fn says_wait(class: Class, wait: Duration) -> Outcome {
    Outcome { wait: Some(wait), ..says(class) }
}

pub fn says_of(class: Class, scope: Scope, wait: Duration) -> Outcome {
    Outcome { scope, ..says_wait(class, wait) }
}

/// A key in the default pool, without a group, with secret 1.
pub fn setting(name: &str, cap: u32) -> KeySettings {
    KeySettings {
        key: key(name),
        pool: PoolName::default_pool(),
        group: None,
        max_concurrent_uses: cap,
        fingerprint: Some(secret(1)),
    }
}

pub fn candidate(name: &str) -> Candidate {
    Candidate { key: key(name), pool: PoolName::default_pool(), group: None, fingerprint: secret(1) }
}

impl<B: Backend> World<B> {
    pub fn of(backend: B) -> Self {
        Self { backend, owner: OwnerId::fresh() }
    }

    pub fn store(&self) -> Arc<dyn Store> {
        self.backend.store()
    }

    pub fn now(&self) -> StoreTime {
        self.store().now()
    }

    /// Keys by name and cap.
    pub async fn keys<const N: usize>(&self, keys: [(&str, u32); N]) {
        self.sync(keys.iter().map(|(name, cap)| setting(name, *cap)).collect()).await;
    }

    pub async fn sync(&self, keys: Vec<KeySettings>) {
        self.tell(SyncMode::Replace, keys).await;
    }

    pub async fn tell(&self, mode: SyncMode, keys: Vec<KeySettings>) -> Synced {
        let ask = SyncKeys { provider: provider(), owner: self.owner.clone(), mode, keys };
        self.store().sync_keys(ask).await.unwrap()
    }

    /// An acquire of the first of these keys.
    pub fn ask<const N: usize>(&self, keys: [&str; N]) -> Acquire {
        Acquire {
            provider: provider(),
            lease: LeaseId::fresh(),
            owner: self.owner.clone(),
            app: AppName::anonymous(),
            model: None,
            candidates: keys.iter().map(|name| candidate(name)).collect(),
            ttl: B::TTL,
            deadline: self.now().plus(HOUR),
        }
    }

    pub fn ask_for_model(&self, name: &str, for_model: &str) -> Acquire {
        Acquire { model: model(for_model), ..self.ask([name]) }
    }

    pub async fn acquire(&self, ask: &Acquire) -> Acquired {
        self.store().acquire(ask.clone()).await.unwrap()
    }

    /// What must be granted.
    pub async fn take(&self, ask: Acquire) -> Taken {
        match self.acquire(&ask).await {
            Acquired::Granted(grant) => {
                let chosen = ask.candidates.iter().find(|candidate| candidate.key == grant.key).unwrap();
                let (secret, group) = (chosen.fingerprint, grant.group.clone());
                Taken { lease: ask.lease, grant, secret, group, model: ask.model }
            }
            other => panic!("wanted a grant, got {other:?}"),
        }
    }

    pub async fn lend(&self, name: &str) -> Taken {
        self.take(self.ask([name])).await
    }

    /// Lends a key and gives it back after a word from the provider.
    pub async fn lend_and_report(&self, name: &str, outcome: Outcome) -> Reported {
        let taken = self.lend(name).await;
        let reported = self.report(&taken, outcome).await;
        self.release(&taken).await;
        reported
    }

    /// What must be refused.
    pub async fn refuse(&self, ask: Acquire) -> Refusal {
        match self.acquire(&ask).await {
            Acquired::Refused(refusal) => refusal,
            other => panic!("wanted a refusal, got {other:?}"),
        }
    }

    /// Why this key alone is not lent.
    pub async fn why_not(&self, ask: Acquire) -> Reason {
        self.refuse(ask).await.reasons[0].1
    }

    pub async fn why_not_key(&self, name: &str) -> Reason {
        self.why_not(self.ask([name])).await
    }

    /// Whether this would be lent; gives it back.
    pub async fn lends(&self, ask: Acquire) -> bool {
        let Acquired::Granted(grant) = self.acquire(&ask).await else { return false };
        let Grant { key, pool, group, .. } = grant;
        let ask = Release { provider: provider(), lease: ask.lease, key, pool, group };
        self.store().release(vec![ask]).await.unwrap();
        true
    }

    pub async fn lends_key(&self, name: &str) -> bool {
        self.lends(self.ask([name])).await
    }

    pub async fn release(&self, taken: &Taken) -> usize {
        self.store().release(vec![taken.released()]).await.unwrap()
    }

    pub async fn report(&self, taken: &Taken, outcome: Outcome) -> Reported {
        self.store().report(taken.reported(outcome)).await.unwrap()
    }

    pub fn renewal(&self, leases: &[&Taken]) -> Renew {
        Renew {
            provider: provider(),
            owner: self.owner.clone(),
            epoch: None,
            leases: leases.iter().map(|taken| taken.held()).collect(),
            ttl: B::TTL,
            deadline: self.now().plus(HOUR),
            reassert: false,
        }
    }

    pub async fn renew(&self, ask: Renew) -> Vec<RenewAnswer> {
        self.store().renew(ask).await.unwrap().answers
    }

    pub async fn set(&self, name: &str, change: StatusChange) {
        assert!(self.store().set_status(provider(), key(name), change).await.unwrap());
    }

    pub async fn view(&self, name: &str) -> KeyView {
        let snapshot = self.store().snapshot(provider()).await.unwrap();
        snapshot.keys.into_iter().find(|view| view.id == key(name)).unwrap()
    }

    pub async fn status(&self, name: &str) -> KeyStatus {
        self.view(name).await.status
    }

    pub async fn in_use(&self, name: &str) -> u32 {
        self.view(name).await.in_use
    }

    /// Whether `end` is `wait` from now, as near as this backend's time can tell.
    pub fn is_in(&self, end: StoreTime, wait: Duration) -> bool {
        end.0.abs_diff(self.now().plus(wait).0) <= u64::try_from(B::SLACK.as_millis()).unwrap()
    }

    /// Asserts that a reason is a cooldown that ends `wait` from now.
    #[track_caller]
    pub fn cools_for(&self, reason: Reason, wait: Duration) {
        let Reason::Cooling { until: end, .. } = reason else { panic!("wanted a cooldown, got {reason:?}") };
        let left = end.since(self.now());
        assert!(self.is_in(end, wait), "wanted a cooldown of {wait:?}, got one of {left:?}");
    }

    /// Another sidecar on the same store.
    pub async fn as_another<T>(&mut self, act: impl AsyncFnOnce(&Self) -> T) -> T {
        let own = std::mem::replace(&mut self.owner, OwnerId::fresh());
        let done = act(self).await;
        self.owner = own;
        done
    }
}

impl Taken {
    pub fn released(&self) -> Release {
        let Grant { key, pool, group, .. } = self.grant.clone();
        Release { provider: provider(), lease: self.lease, key, pool, group }
    }

    pub fn reported(&self, outcome: Outcome) -> Report {
        Report {
            provider: provider(),
            key: self.grant.key.clone(),
            group: self.group.clone(),
            lease: self.lease,
            token: self.grant.token,
            fingerprint: self.secret,
            model: self.model.clone(),
            outcome,
        }
    }

    pub fn held(&self) -> Held {
        let Grant { key, pool, token, group, .. } = self.grant.clone();
        let app = AppName::anonymous();
        Held { lease: self.lease, key, pool, fingerprint: self.secret, token, app, group }
    }
}

/// A life of the store that is not this one.
pub fn another_epoch() -> Epoch {
    Epoch("an epoch before".into())
}

/// A token that no clock has reached.
pub const FROM_THE_FUTURE: FencingToken = FencingToken(u64::MAX / 2);

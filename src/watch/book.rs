//! What was last known of every key and rest, so that a change can be told: pure, time is an argument.

use std::collections::HashMap;

use crate::events::What;
use crate::model::{KeyId, KeyStatus, Outcome, ProviderName};
use crate::store::{KeyView, Snapshot, StoreTime};

/// What rests, in people's words; and whether it is the key itself, for a group may have a key's name.
pub(super) type Subject = (bool, String);

/// What is known of a rest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Rest {
    /// The class that set it.
    pub(super) reason: String,
    /// When it ends.
    pub(super) until: StoreTime,
    /// When this was known: a look that began before says nothing about it.
    pub(super) noted: StoreTime,
}

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Book(HashMap<ProviderName, Page>);

/// One provider's. Bounded by its keys, and by the rests that a store keeps.
#[derive(Debug, Default)]
struct Page {
    /// Whether it was looked at: what is found by the first look did not happen then.
    looked: bool,
    statuses: HashMap<KeyId, (KeyStatus, StoreTime)>,
    rests: HashMap<Subject, Rest>,
    /// When the last look was asked for: one that began before it and comes after it is out of date.
    asked: StoreTime,
    /// When the last grace that was told ends.
    grace: Option<StoreTime>,
    /// Not to be looked at for an end before then.
    put_off: Option<StoreTime>,
}

impl Book {
    fn page(&mut self, provider: &ProviderName) -> &mut Page {
        self.0.entry(provider.clone()).or_default()
    }

    /// A rest was set, or met, by this process; what to tell of it.
    pub(super) fn rests(
        &mut self,
        provider: &ProviderName,
        subject: Subject,
        rest: Rest,
        evidence: &Outcome,
    ) -> Option<What> {
        let (status, code) = (evidence.status, evidence.code.as_deref().map(str::to_owned));
        self.page(provider).rests(provider, subject, rest, status, code)
    }

    /// A key has this status, as this process just heard; what to tell of it.
    pub(super) fn has_status(
        &mut self,
        provider: &ProviderName,
        key: &KeyId,
        status: KeyStatus,
        reason: Option<&str>,
        now: StoreTime,
    ) -> Option<What> {
        self.page(provider).has_status(provider, key, status, reason, now)
    }

    /// The store is in its grace until then; what to tell of it.
    pub(super) fn grace(&mut self, provider: &ProviderName, until: StoreTime) -> Option<What> {
        let before = self.page(provider).grace.replace(until);
        (before != Some(until)).then(|| What::GraceBegan { provider: provider.clone(), until_ms: until.0 })
    }

    /// Whether some rest is known to end then: a refusal that names that end is no news.
    pub(super) fn knows_end(&self, provider: &ProviderName, until: StoreTime) -> bool {
        self.0.get(provider).is_some_and(|page| page.rests.values().any(|rest| rest.until == until))
    }

    /// Whether a key is known to have this status.
    pub(super) fn knows_status(&self, provider: &ProviderName, key: &KeyId, status: KeyStatus) -> bool {
        self.0
            .get(provider)
            .and_then(|page| page.statuses.get(key))
            .is_some_and(|(known, _)| *known == status)
    }

    /// When the next rest ends.
    pub(super) fn next_end(&self) -> Option<StoreTime> {
        self.0.values().filter_map(Page::next_end).min()
    }

    /// Providers of which a rest should be over by now.
    pub(super) fn ended(&self, now: StoreTime) -> Vec<ProviderName> {
        let over = self.0.iter().filter(|(_, page)| page.next_end().is_some_and(|end| end <= now));
        over.map(|(provider, _)| provider.clone()).collect()
    }

    /// After a look: the next one for an end comes not before `until`.
    pub(super) fn put_off(&mut self, provider: &ProviderName, until: StoreTime) {
        self.page(provider).put_off = Some(until);
    }

    /// What a look that was `asked` for then found, and what to tell of it.
    pub(super) fn saw(
        &mut self,
        provider: &ProviderName,
        seen: &Snapshot,
        asked: StoreTime,
        now: StoreTime,
    ) -> Vec<What> {
        let page = self.page(provider);
        let mut happened = Vec::new();
        if asked < page.asked {
            return happened;
        }
        page.asked = asked;
        let found = seen.keys.iter().flat_map(rests_of);
        let mut there: HashMap<Subject, _> = HashMap::new();
        for (subject, evidence) in found {
            there.insert(subject, evidence);
        }
        page.rests.retain(|subject, rest| {
            let over = !there.contains_key(subject) && rest.noted <= asked;
            if over {
                let (subject, reason) = (subject.1.clone(), rest.reason.clone());
                happened.push(What::CooldownEnded { provider: provider.clone(), subject, reason });
            }
            !over
        });
        for (subject, (reason, until, status, code)) in there {
            let rest = Rest { reason, until, noted: now };
            happened.extend(page.rests(provider, subject, rest, status, code));
        }
        for key in &seen.keys {
            if page.statuses.get(&key.id).is_some_and(|(_, noted)| *noted > asked) {
                continue;
            }
            happened.extend(page.has_status(provider, &key.id, key.status, key.reason.as_deref(), now));
        }
        page.statuses.retain(|id, _| seen.keys.iter().any(|key| key.id == *id));
        if std::mem::replace(&mut page.looked, true) { happened } else { Vec::new() }
    }
}

impl Page {
    fn rests(
        &mut self,
        provider: &ProviderName,
        subject: Subject,
        rest: Rest,
        status: Option<u16>,
        code: Option<String>,
    ) -> Option<What> {
        let (reason, until) = (rest.reason.clone(), rest.until);
        let before = self.rests.insert(subject.clone(), rest);
        // One that was made longer has begun before.
        before.is_none().then(|| What::CooldownBegan {
            provider: provider.clone(),
            subject: subject.1,
            reason,
            until_ms: until.0,
            status,
            code,
        })
    }

    fn has_status(
        &mut self,
        provider: &ProviderName,
        key: &KeyId,
        to: KeyStatus,
        reason: Option<&str>,
        now: StoreTime,
    ) -> Option<What> {
        let before = self.statuses.insert(key.clone(), (to, now));
        let from = before.map_or(KeyStatus::Available, |(status, _)| status);
        let reason = reason.filter(|_| to != KeyStatus::Available).map(str::to_owned);
        let (provider, key) = (provider.clone(), key.clone());
        (from != to).then_some(What::KeyStatus { provider, key, from, to, reason })
    }

    fn next_end(&self) -> Option<StoreTime> {
        let first = self.rests.values().map(|rest| rest.until).min()?;
        Some(self.put_off.map_or(first, |put_off| first.max(put_off)))
    }
}

type Found = (Subject, (String, StoreTime, Option<u16>, Option<String>));

/// Everything that rests and bears on a key.
fn rests_of(key: &KeyView) -> impl Iterator<Item = Found> {
    let own = key.cooldown_until_ms.map(|until| {
        let reason = key.reason.clone().unwrap_or_default();
        ((true, key.id.to_string()), (reason, until, None, None))
    });
    let scoped = key.cooldowns.iter().map(|rest| {
        let evidence = (rest.reason.clone(), rest.until_ms, rest.status, rest.code.clone());
        ((false, rest.subject.clone()), evidence)
    });
    own.into_iter().chain(scoped)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a test that fails may panic
mod tests {
    use super::*;
    use crate::model::{Class, PoolName};
    use crate::store::CooldownView;

    fn openai() -> ProviderName {
        ProviderName::parse("openai").unwrap()
    }

    fn key(status: KeyStatus, until: Option<u64>) -> KeyView {
        KeyView {
            id: KeyId::parse("a").unwrap(),
            provider: openai(),
            pool: PoolName::default_pool(),
            group: None,
            status,
            reason: (status != KeyStatus::Available).then(|| "rate".into()),
            cooldown_since_ms: until.map(|_| StoreTime(0)),
            cooldown_until_ms: until.map(StoreTime),
            evidence: None,
            in_use: 0,
            max_concurrent_uses: 8,
            learned_concurrent_uses: None,
            group_concurrent_uses: None,
            last_used_at_ms: None,
            cooldowns: Vec::new(),
        }
    }

    fn of(key: KeyView) -> Snapshot {
        Snapshot { keys: vec![key], ..Snapshot::default() }
    }

    fn rest(until: u64, noted: u64) -> Rest {
        Rest { reason: "rate".into(), until: StoreTime(until), noted: StoreTime(noted) }
    }

    fn names(happened: &[What]) -> Vec<&'static str> {
        let name = |what: &What| match what {
            What::KeyStatus { .. } => "status",
            What::CooldownBegan { .. } => "began",
            What::CooldownEnded { .. } => "ended",
            _ => "other",
        };
        happened.iter().map(name).collect()
    }

    #[test]
    fn what_is_so_at_the_first_look_did_not_happen_then() {
        let mut book = Book::default();
        let resting = of(key(KeyStatus::RateLimited, Some(50)));
        assert_eq!(book.saw(&openai(), &resting, StoreTime(1), StoreTime(2)), []);
        assert_eq!(book.next_end(), Some(StoreTime(50)), "but its end will");
        let healed = of(key(KeyStatus::Available, None));
        let happened = book.saw(&openai(), &healed, StoreTime(51), StoreTime(52));
        assert_eq!(names(&happened), ["ended", "status"]);
        assert_eq!(book.saw(&openai(), &healed, StoreTime(53), StoreTime(54)), [], "each once");
    }

    #[test]
    fn a_rest_that_was_told_by_its_report_is_not_told_again_by_a_look() {
        let mut book = Book::default();
        book.saw(&openai(), &of(key(KeyStatus::Available, None)), StoreTime(1), StoreTime(1));
        let outcome = Outcome::plain(Class::Rate, Some(429));
        let subject = || (true, "a".to_owned());
        let told = book.rests(&openai(), subject(), rest(50, 3), &outcome);
        assert_eq!(names(&told.into_iter().collect::<Vec<_>>()), ["began"]);
        let id = KeyId::parse("a").unwrap();
        let told = book.has_status(&openai(), &id, KeyStatus::RateLimited, Some("rate"), StoreTime(3));
        assert_eq!(names(&told.into_iter().collect::<Vec<_>>()), ["status"]);
        let seen = of(key(KeyStatus::RateLimited, Some(50)));
        assert_eq!(book.saw(&openai(), &seen, StoreTime(4), StoreTime(5)), []);
        assert_eq!(book.rests(&openai(), subject(), rest(90, 6), &outcome), None, "longer is no beginning");
        assert_eq!(book.next_end(), Some(StoreTime(90)));
        assert!(book.knows_end(&openai(), StoreTime(90)) && !book.knows_end(&openai(), StoreTime(50)));
    }

    #[test]
    fn a_look_that_began_before_a_report_does_not_undo_it() {
        let mut book = Book::default();
        let free = of(key(KeyStatus::Available, None));
        book.saw(&openai(), &free, StoreTime(1), StoreTime(1));
        book.rests(&openai(), (true, "a".into()), rest(50, 5), &Outcome::plain(Class::Rate, Some(429)));
        let id = KeyId::parse("a").unwrap();
        book.has_status(&openai(), &id, KeyStatus::RateLimited, Some("rate"), StoreTime(5));
        assert_eq!(book.saw(&openai(), &free, StoreTime(4), StoreTime(6)), []);
        assert_eq!(names(&book.saw(&openai(), &free, StoreTime(7), StoreTime(8))), ["ended", "status"]);
    }

    #[test]
    fn a_look_that_is_overtaken_by_a_later_one_says_nothing() {
        let mut book = Book::default();
        let (on, off) = (of(key(KeyStatus::Available, None)), of(key(KeyStatus::Disabled, None)));
        book.saw(&openai(), &on, StoreTime(1), StoreTime(1));
        assert_eq!(names(&book.saw(&openai(), &off, StoreTime(5), StoreTime(6))), ["status"]);
        assert_eq!(book.saw(&openai(), &on, StoreTime(4), StoreTime(7)), []);
    }

    #[test]
    fn a_rest_of_a_group_is_told_once_however_many_keys_it_bears_on() {
        let mut book = Book::default();
        let mut two = of(key(KeyStatus::Available, None));
        two.keys.push(KeyView { id: KeyId::parse("b").unwrap(), ..two.keys[0].clone() });
        book.saw(&openai(), &two, StoreTime(1), StoreTime(1));
        for key in &mut two.keys {
            key.cooldowns.push(CooldownView {
                subject: "org|gpt-4o".into(),
                reason: "rate".into(),
                since_ms: StoreTime(2),
                until_ms: StoreTime(9),
                status: Some(429),
                code: None,
            });
        }
        assert_eq!(names(&book.saw(&openai(), &two, StoreTime(3), StoreTime(3))), ["began"]);
    }

    #[test]
    fn after_a_look_the_next_for_an_end_is_put_off() {
        let mut book = Book::default();
        book.saw(&openai(), &of(key(KeyStatus::RateLimited, Some(50))), StoreTime(1), StoreTime(1));
        assert_eq!(book.ended(StoreTime(50)), [openai()]);
        book.put_off(&openai(), StoreTime(80));
        assert_eq!((book.ended(StoreTime(60)), book.next_end()), (vec![], Some(StoreTime(80))));
        assert_eq!(book.ended(StoreTime(80)), [openai()]);
    }
}

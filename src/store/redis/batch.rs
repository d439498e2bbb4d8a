//! Calls that arrive together go together.
//!
//! What is asked of a provider's keys goes in trips. One that finds the way free is sent at once, and so is one
//! that comes while the trips are of a few; where they are of many, those that come wait, and go when the trip
//! that is under way is answered, or beside it where there are as many as one takes. So at a low rate nothing
//! waits, and at a high one the cost of a trip is shared (a batch of 32 costs Redis a third as much a lease).
//! Then also those are let in first whom the last answers have set going. A trip is one call that gives leases
//! back and one that acquires, each as there is need: written together, and answered together.
//!
//! An acquire that nobody waits for any more is not sent. A release is.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::oneshot;

use super::Shared;
use crate::model::ProviderName;
use crate::store::{Acquire, Release, StoreError};

/// How many acquires one trip takes. Lua's `unpack` and Redis' patience are both far beyond it.
pub(super) const MOST_ACQUIRES: usize = 64;
/// The same of releases, which cost Redis a third.
const MOST_RELEASES: usize = 256;
/// Trips under way at once, per provider.
const AT_ONCE: usize = 2;
/// How many asks a trip may be of, and still not be worth waiting for.
const FEW: usize = 4;

/// Something that can be asked for many at a time.
pub(super) trait Batched: Send + Sized + 'static {
    /// The answer to one.
    type Answer: Send + 'static;

    /// Asks for all of `asks`, of one provider; one answer each, in order.
    fn call(
        shared: &Arc<Shared>,
        provider: &ProviderName,
        asks: &[Self],
    ) -> impl Future<Output = Result<Vec<Self::Answer>, StoreError>> + Send;
}

type Reply<B> = oneshot::Sender<Result<<B as Batched>::Answer, StoreError>>;
/// Where the answer to one comes.
pub(super) type Awaited<B> = oneshot::Receiver<Result<<B as Batched>::Answer, StoreError>>;
type Waiting<B> = VecDeque<(B, Reply<B>)>;
/// What goes in one call, and who waits for each answer.
type Batch<B> = (Vec<B>, Vec<Reply<B>>);

/// What waits to be sent, by provider.
#[derive(Default)]
pub(super) struct Batcher(Mutex<HashMap<ProviderName, Line>>);

#[derive(Default)]
struct Line {
    acquires: Waiting<Acquire>,
    releases: Waiting<Release>,
    /// Trips under way.
    under_way: usize,
    /// Asks of one of the last trips: as many as of the last, or not much fewer than of the one before.
    lately: usize,
}

impl Line {
    /// Whether a trip is to go while so many others are under way.
    fn is_due_beside(&self, others: usize) -> bool {
        let is_full = self.acquires.len() >= MOST_ACQUIRES || self.releases.len() >= MOST_RELEASES;
        others == 0 || (others < AT_ONCE && (is_full || self.lately <= FEW))
    }
}

impl Batcher {
    fn lines(&self) -> MutexGuard<'_, HashMap<ProviderName, Line>> {
        // Nothing under this lock can panic half way.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Puts an acquire in line.
    pub(super) fn acquire(&self, shared: &Arc<Shared>, ask: Acquire) -> Awaited<Acquire> {
        let provider = ask.provider.clone();
        self.put(shared, &provider, |line| push(&mut line.acquires, ask))
    }

    /// Puts releases of one provider in line.
    pub(super) fn release(
        &self,
        shared: &Arc<Shared>,
        provider: &ProviderName,
        asks: Vec<Release>,
    ) -> Vec<Awaited<Release>> {
        self.put(shared, provider, |line| asks.into_iter().map(|ask| push(&mut line.releases, ask)).collect())
    }

    fn put<A>(&self, shared: &Arc<Shared>, provider: &ProviderName, put: impl FnOnce(&mut Line) -> A) -> A {
        let mut lines = self.lines();
        if let Some(line) = lines.get_mut(provider) {
            return put_in(line, shared, provider, put);
        }
        put_in(lines.entry(provider.clone()).or_default(), shared, provider, put)
    }

    /// Whether trips are of several, so that others are about to come.
    fn has_company(&self, provider: &ProviderName) -> bool {
        self.lines().get(provider).is_some_and(|line| line.lately > FEW)
    }

    /// The next trip; `None` when there is nothing for one, or another that is under way will take it along, and
    /// then the way is free again.
    fn next(&self, provider: &ProviderName) -> Option<(Batch<Acquire>, Batch<Release>)> {
        let mut lines = self.lines();
        let line = lines.get_mut(provider)?;
        if !line.is_due_beside(line.under_way - 1) {
            line.under_way -= 1;
            return None;
        }
        let acquires = take(&mut line.acquires, MOST_ACQUIRES, |reply| !reply.is_closed());
        let releases = take(&mut line.releases, MOST_RELEASES, |_| true);
        let asks = acquires.0.len() + releases.0.len();
        if asks == 0 {
            line.under_way -= 1;
            return None;
        }
        line.lately = asks.max(line.lately - line.lately.div_ceil(4));
        Some((acquires, releases))
    }
}

fn put_in<A>(
    line: &mut Line,
    shared: &Arc<Shared>,
    provider: &ProviderName,
    put: impl FnOnce(&mut Line) -> A,
) -> A {
    let awaited = put(line);
    if line.is_due_beside(line.under_way) {
        line.under_way += 1;
        // A task of its own, since the caller may be dropped and others wait for the same call. It ends when
        // the line is empty.
        tokio::spawn(drive(Arc::clone(shared), provider.clone()));
    }
    awaited
}

fn push<B: Batched>(waiting: &mut Waiting<B>, ask: B) -> Awaited<B> {
    let (reply, answer) = oneshot::channel();
    waiting.push_back((ask, reply));
    answer
}

/// Up to so many of those that are worth sending.
fn take<B: Batched>(waiting: &mut Waiting<B>, most: usize, is_due: fn(&Reply<B>) -> bool) -> Batch<B> {
    let mut batch = (Vec::new(), Vec::new());
    while batch.0.len() < most
        && let Some((ask, reply)) = waiting.pop_front()
    {
        if is_due(&reply) {
            batch.0.push(ask);
            batch.1.push(reply);
        }
    }
    batch
}

/// Keeps the way from staying taken, should a call panic.
struct Way {
    shared: Arc<Shared>,
    provider: ProviderName,
    done: bool,
}

impl Drop for Way {
    fn drop(&mut self) {
        if !self.done
            && let Some(line) = self.shared.batcher.lines().get_mut(&self.provider)
        {
            line.under_way -= 1;
        }
    }
}

async fn drive(shared: Arc<Shared>, provider: ProviderName) {
    let mut way = Way { shared: Arc::clone(&shared), provider: provider.clone(), done: false };
    loop {
        if shared.batcher.has_company(&provider) {
            tokio::task::yield_now().await;
        }
        let Some((acquires, releases)) = shared.batcher.next(&provider) else { break };
        // What is given back first may be what the acquires find free.
        tokio::join!(ask(&shared, &provider, releases), ask(&shared, &provider, acquires));
    }
    way.done = true; // `next` has freed it
}

async fn ask<B: Batched>(shared: &Arc<Shared>, provider: &ProviderName, (asks, replies): Batch<B>) {
    if asks.is_empty() {
        return;
    }
    match B::call(shared, provider, &asks).await {
        Ok(answers) if answers.len() == replies.len() => {
            for (reply, answer) in replies.into_iter().zip(answers) {
                let _ = reply.send(Ok(answer)); // who has gone settles it by itself
            }
        }
        Ok(_) => answer_all(replies, &super::values::nonsense("too few answers")),
        Err(error) => answer_all(replies, &error),
    }
}

fn answer_all<A>(replies: Vec<oneshot::Sender<Result<A, StoreError>>>, error: &StoreError) {
    for reply in replies {
        let _ = reply.send(Err(error.clone()));
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;
    use crate::model::{KeyId, LeaseId, PoolName};

    fn line(lately: usize) -> Line {
        Line { lately, ..Line::default() }
    }

    #[test]
    fn one_alone_never_waits_and_one_among_few_only_for_two_others() {
        for lately in [0, 1, FEW, FEW + 1, 200] {
            assert!(line(lately).is_due_beside(0), "{lately}");
        }
        assert!(line(FEW).is_due_beside(1));
        assert!(!line(FEW).is_due_beside(AT_ONCE));
    }

    #[test]
    fn where_many_come_the_next_trip_waits_for_the_one_under_way_until_it_is_full() {
        let mut line = line(FEW + 1);
        assert!(!line.is_due_beside(1));
        for ask in 0..MOST_RELEASES {
            assert!(!line.is_due_beside(1), "{ask}");
            drop(push(&mut line.releases, release()));
        }
        assert!(line.is_due_beside(1));
        assert!(!line.is_due_beside(AT_ONCE));
    }

    #[test]
    fn a_trip_takes_no_more_than_it_may_and_leaves_out_whom_nobody_waits_for() {
        let mut waiting: Waiting<Release> = VecDeque::new();
        for _ in 0..5 {
            drop(push(&mut waiting, release()));
        }
        let kept = push(&mut waiting, release());
        assert_eq!(take(&mut waiting, 2, |_| true).0.len(), 2);
        assert_eq!(take(&mut waiting, 2, |reply| !reply.is_closed()).0.len(), 1);
        assert!(waiting.is_empty());
        drop(kept);
    }

    fn release() -> Release {
        Release {
            provider: ProviderName::parse("openai").unwrap(),
            lease: LeaseId::fresh(),
            key: KeyId::parse("k").unwrap(),
            pool: PoolName::default_pool(),
            group: None,
        }
    }
}

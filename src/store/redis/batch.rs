//! Calls that arrive together go together.
//!
//! A call that finds the way free is sent at once. While two are under way those that come wait, and go in
//! one call when the first of the two is answered: so at a low rate nothing waits, and at a high one the cost
//! of a round trip is shared (a batch of 32 costs Redis a third as much a lease). A call that nobody waits for
//! any more is not sent where it says so ([`Batched::MAY_BE_LEFT_OUT`]).

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::oneshot;

use super::Shared;
use crate::model::ProviderName;
use crate::store::StoreError;

/// Something that can be asked for many at a time.
pub(super) trait Batched: Send + Sized + 'static {
    /// The answer to one.
    type Answer: Send + 'static;
    /// How many go in one call.
    const MOST: usize;
    /// Calls under way at once, per provider.
    const AT_ONCE: usize;
    /// Whether one whose caller has gone is better not sent.
    const MAY_BE_LEFT_OUT: bool;

    /// Asks for all of `asks`, of one provider; one answer each, in order.
    fn call(
        shared: &Arc<Shared>,
        provider: &ProviderName,
        asks: &[Self],
    ) -> impl Future<Output = Result<Vec<Self::Answer>, StoreError>> + Send;
}

type Reply<A> = oneshot::Sender<Result<A, StoreError>>;

/// What goes in one call, and who waits for each answer.
type Batch<B> = (Vec<B>, Vec<Reply<<B as Batched>::Answer>>);

/// What waits to be sent, by provider.
pub(super) struct Batcher<B: Batched>(Mutex<HashMap<ProviderName, Line<B>>>);

struct Line<B: Batched> {
    waiting: VecDeque<(B, Reply<B::Answer>)>,
    under_way: usize,
}

impl<B: Batched> Default for Batcher<B> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

impl<B: Batched> Batcher<B> {
    fn lines(&self) -> MutexGuard<'_, HashMap<ProviderName, Line<B>>> {
        // Nothing under this lock can panic half way.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Puts `asks` in line. `batcher` says which of the shared batchers this is.
    pub(super) fn push(
        &self,
        shared: &Arc<Shared>,
        batcher: fn(&Shared) -> &Self,
        provider: &ProviderName,
        asks: impl IntoIterator<Item = B>,
    ) -> Vec<oneshot::Receiver<Result<B::Answer, StoreError>>> {
        let mut lines = self.lines();
        if !lines.contains_key(provider) {
            lines.insert(provider.clone(), Line { waiting: VecDeque::new(), under_way: 0 });
        }
        let Some(line) = lines.get_mut(provider) else { return Vec::new() };
        let answers = asks
            .into_iter()
            .map(|ask| {
                let (reply, answer) = oneshot::channel();
                line.waiting.push_back((ask, reply));
                answer
            })
            .collect();
        if line.under_way < B::AT_ONCE {
            line.under_way += 1;
            // A task of its own, since the caller may be dropped and others wait for the same call. It ends
            // when the line is empty.
            tokio::spawn(drive(Arc::clone(shared), batcher, provider.clone()));
        }
        answers
    }

    /// The next call's asks; `None` when there is none, and then the way is free again.
    fn next(&self, provider: &ProviderName) -> Option<Batch<B>> {
        let mut lines = self.lines();
        let line = lines.get_mut(provider)?;
        let (mut asks, mut replies) = (Vec::new(), Vec::new());
        while asks.len() < B::MOST
            && let Some((ask, reply)) = line.waiting.pop_front()
        {
            if B::MAY_BE_LEFT_OUT && reply.is_closed() {
                continue;
            }
            asks.push(ask);
            replies.push(reply);
        }
        if asks.is_empty() {
            line.under_way -= 1;
            return None;
        }
        Some((asks, replies))
    }
}

/// Keeps the way from staying taken, should a call panic.
struct Way<B: Batched> {
    shared: Arc<Shared>,
    batcher: fn(&Shared) -> &Batcher<B>,
    provider: ProviderName,
    done: bool,
}

impl<B: Batched> Drop for Way<B> {
    fn drop(&mut self) {
        if !self.done
            && let Some(line) = (self.batcher)(&self.shared).lines().get_mut(&self.provider)
        {
            line.under_way -= 1;
        }
    }
}

async fn drive<B: Batched>(shared: Arc<Shared>, batcher: fn(&Shared) -> &Batcher<B>, provider: ProviderName) {
    let mut way = Way { shared: Arc::clone(&shared), batcher, provider: provider.clone(), done: false };
    while let Some((asks, replies)) = batcher(&shared).next(&provider) {
        match B::call(&shared, &provider, &asks).await {
            Ok(answers) if answers.len() == replies.len() => {
                for (reply, answer) in replies.into_iter().zip(answers) {
                    let _ = reply.send(Ok(answer)); // who has gone settles it by itself
                }
            }
            Ok(_) => answer_all(replies, &super::values::nonsense("too few answers")),
            Err(error) => answer_all(replies, &error),
        }
    }
    way.done = true; // `next` has freed it
}

fn answer_all<A>(replies: Vec<Reply<A>>, error: &StoreError) {
    for reply in replies {
        let _ = reply.send(Err(error.clone()));
    }
}

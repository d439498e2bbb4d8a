//! The calls that wait for the thread that uses the file.
//!
//! A locked list and not a channel of the standard library: that one wakes its reader while it holds the lock
//! which the reader takes first, and gives calls out one by one. Here the reader takes all there are.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::writer::Job;

/// Calls that may wait. Beyond that the thread cannot keep up, and to say so at once is kinder than to let
/// everyone wait.
pub(super) const WAITING: usize = 4096;
/// Calls in one transaction: enough to share its cost, few enough to let other processes in between.
const MOST: usize = 256;

/// Why a call cannot wait here.
pub(super) enum NotTaken {
    Full,
    Ended,
}

/// What came of waiting for calls.
#[derive(PartialEq, Eq)]
pub(super) enum Waited {
    /// There are some.
    Some,
    /// There were none for so long.
    InVain,
    /// There will be none any more.
    Ended,
}

/// An empty list, as its two sides.
pub(super) fn list() -> (Caller, Taker) {
    let list = Arc::new(List::default());
    (Caller(Arc::clone(&list)), Taker(list))
}

#[derive(Default)]
struct List {
    state: Mutex<State>,
    came: Condvar,
}

#[derive(Default)]
struct State {
    jobs: Vec<Box<dyn Job>>,
    /// The taker waits for the next one.
    awaited: bool,
    /// One of the sides has gone.
    ended: bool,
}

impl List {
    fn lock(&self) -> MutexGuard<'_, State> {
        // Nothing under this lock panics.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The side of those who call.
pub(super) struct Caller(Arc<List>);

impl Caller {
    pub(super) fn call(&self, job: Box<dyn Job>) -> Result<(), NotTaken> {
        let mut state = self.0.lock();
        if state.ended {
            return Err(NotTaken::Ended);
        }
        if state.jobs.len() >= WAITING {
            return Err(NotTaken::Full);
        }
        state.jobs.push(job);
        let awaited = std::mem::take(&mut state.awaited);
        drop(state); // whoever is woken needs it at once
        if awaited {
            self.0.came.notify_one();
        }
        Ok(())
    }
}

impl Drop for Caller {
    fn drop(&mut self) {
        self.0.lock().ended = true;
        self.0.came.notify_one();
    }
}

/// The side of the thread.
pub(super) struct Taker(Arc<List>);

impl Taker {
    /// Waits until there are calls, or for so long.
    pub(super) fn wait(&self, patience: Option<Duration>) -> Waited {
        let mut state = self.0.lock();
        state.awaited = state.jobs.is_empty() && !state.ended;
        let idle = |state: &mut State| state.jobs.is_empty() && !state.ended;
        let mut state = match patience {
            Some(patience) => {
                let waited = self.0.came.wait_timeout_while(state, patience, idle);
                waited.unwrap_or_else(PoisonError::into_inner).0
            }
            None => self.0.came.wait_while(state, idle).unwrap_or_else(PoisonError::into_inner),
        };
        state.awaited = false;
        match (state.jobs.is_empty(), state.ended) {
            (false, _) => Waited::Some,
            (true, false) => Waited::InVain,
            (true, true) => Waited::Ended,
        }
    }

    /// Takes what waits, as far as `jobs` has room for it.
    pub(super) fn take(&self, jobs: &mut Vec<Box<dyn Job>>) {
        let mut state = self.0.lock();
        if jobs.is_empty() && state.jobs.len() <= MOST {
            std::mem::swap(jobs, &mut state.jobs); // no list is made anew, turn by turn
        } else {
            let room = MOST.saturating_sub(jobs.len()).min(state.jobs.len());
            jobs.extend(state.jobs.drain(..room));
        }
    }
}

impl Drop for Taker {
    fn drop(&mut self) {
        let mut state = self.0.lock();
        state.ended = true;
        let left = std::mem::take(&mut state.jobs);
        drop(state);
        drop(left); // which tells those who wait for them
    }
}

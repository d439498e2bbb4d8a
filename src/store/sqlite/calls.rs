//! The calls that wait for the thread that uses the file.
//!
//! A locked list and not a channel of the standard library: that one wakes its reader while it holds the lock
//! which the reader takes first, and gives calls out one by one. Here the reader takes all there are.
//!
//! Who finds it asleep does not wake it at once: on one CPU that would stop the runtime in the middle of its
//! turn, for a transaction of one call. The first to call is told to wake it when the runtime's turn is over,
//! and by then all have called who can. Later ones do not rely on it: they wake the thread themselves once
//! that has been due for [`SOON`], or [`ENOUGH`] wait.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::reply::SOON;
use super::writer::Job;

/// Calls that may wait. Beyond that the thread cannot keep up, and to say so at once is kinder than to let
/// everyone wait.
pub(super) const WAITING: usize = 4096;
/// So many wait for no others.
const ENOUGH: usize = 64;
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
    /// Since when it is to be woken, by the one who called then.
    due: Option<Instant>,
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
    /// Whether the caller is to [`wake`](Self::wake) the thread, or to see that it has gone on.
    pub(super) fn call(&self, job: Box<dyn Job>) -> Result<bool, NotTaken> {
        let mut state = self.0.lock();
        if state.ended {
            return Err(NotTaken::Ended);
        }
        if state.jobs.len() >= WAITING {
            return Err(NotTaken::Full);
        }
        let arrived = job.arrived();
        state.jobs.push(job);
        let first = std::mem::take(&mut state.awaited);
        if first {
            state.due = Some(arrived);
        }
        let enough = state.jobs.len() >= ENOUGH;
        let overdue =
            state.due.take_if(|due| enough || arrived.saturating_duration_since(*due) >= SOON).is_some();
        drop(state); // whoever is woken needs it at once
        if overdue {
            self.0.came.notify_one();
        }
        Ok(first)
    }

    /// Wakes the thread, unless that has happened already.
    pub(super) fn wake(&self) {
        let due = self.0.lock().due.take();
        if due.is_some() {
            self.0.came.notify_one();
        }
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
        (state.awaited, state.due) = (false, None);
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

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::task::Waker;
    use std::thread;

    use super::super::book::Book;
    use super::super::errors::Fault;
    use super::*;
    use crate::store::StoreError;

    struct Idle(Instant);

    impl Job for Idle {
        fn arrived(&self) -> Instant {
            self.0
        }

        fn is_wanted(&self) -> bool {
            true
        }

        fn run(&mut self, _: &mut Book<'_>) -> Result<(), Fault> {
            Ok(())
        }

        fn answer(self: Box<Self>, _: Option<&StoreError>) -> Option<Waker> {
            None
        }
    }

    /// A thread that says how many calls it was woken for, once it sleeps.
    fn asleep() -> (Caller, mpsc::Receiver<usize>) {
        let (caller, taker) = list();
        let (tell, told) = mpsc::channel();
        thread::spawn(move || {
            let mut jobs = Vec::new();
            taker.wait(None);
            taker.take(&mut jobs);
            let _ = tell.send(jobs.len());
        });
        while !caller.0.lock().awaited {
            thread::yield_now();
        }
        (caller, told)
    }

    #[test]
    fn calls_of_one_turn_wait_for_its_end_and_are_taken_together() {
        let (caller, woken) = asleep();
        let now = Instant::now();
        let asked = [(); 3].map(|()| caller.call(Box::new(Idle(now))).ok());
        assert_eq!(asked, [Some(true), Some(false), Some(false)]); // the first wakes the thread
        caller.wake();
        assert_eq!(woken.recv(), Ok(3));
        caller.wake(); // a second time is nothing
    }

    #[test]
    fn a_call_does_not_rely_on_one_that_should_have_woken_the_thread_long_ago_nor_do_many() {
        let (caller, woken) = asleep();
        let now = Instant::now();
        assert_eq!(caller.call(Box::new(Idle(now))).ok(), Some(true));
        assert_eq!(caller.call(Box::new(Idle(now + SOON))).ok(), Some(false));
        assert_eq!(woken.recv(), Ok(2));
        let (caller, woken) = asleep();
        for _ in 0..ENOUGH {
            assert!(caller.call(Box::new(Idle(now))).is_ok());
        }
        assert_eq!(woken.recv(), Ok(ENOUGH));
    }

    #[test]
    fn no_more_calls_are_taken_than_may_wait_or_once_the_thread_has_gone() {
        let (caller, taker) = list();
        let now = Instant::now();
        for _ in 0..WAITING {
            assert!(caller.call(Box::new(Idle(now))).is_ok());
        }
        assert!(matches!(caller.call(Box::new(Idle(now))), Err(NotTaken::Full)));
        let mut jobs = Vec::new();
        taker.take(&mut jobs);
        assert_eq!(jobs.len(), MOST);
        drop(taker);
        assert!(matches!(caller.call(Box::new(Idle(now))), Err(NotTaken::Ended)));
    }
}

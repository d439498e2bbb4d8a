//! The way of an answer from the thread to its caller, and how many callers are woken at once.
//!
//! To wake a task of a runtime from another thread costs a system call and often a switch to that thread; to
//! wake it from the runtime's own is a push to a list. So of all whom a transaction answered the thread wakes
//! the first alone, and that one, once it runs, wakes the others ([`Bell`]). Should it not run, the next
//! transaction's first wakes them, or the thread itself within [`SOON`].

use std::collections::VecDeque;
use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

/// How long what is left to another to wake may be left so.
pub(super) const SOON: Duration = Duration::from_millis(1);

/// Nothing under these locks panics.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Those who are answered but not yet woken.
#[derive(Default)]
pub(super) struct Bell(Mutex<Vec<Waker>>);

impl Bell {
    /// Wakes the first, and leaves the others to it.
    pub(super) fn ring(&self, answered: impl Iterator<Item = Waker>) {
        let mut answered: VecDeque<Waker> = answered.collect();
        let Some(first) = answered.pop_front() else { return };
        lock(&self.0).extend(answered);
        first.wake();
    }

    /// Wakes all who are left.
    pub(super) fn ring_on(&self) {
        let left = std::mem::take(&mut *lock(&self.0));
        left.into_iter().for_each(Waker::wake);
    }

    /// Whether nobody is left.
    pub(super) fn is_still(&self) -> bool {
        lock(&self.0).is_empty()
    }
}

/// Where an answer is put.
enum Letter<T> {
    Awaited(Option<Waker>),
    Come(T),
    /// One of the sides has gone, or the answer was taken.
    Void,
}

/// The two sides of an answer to come.
pub(super) fn reply<T>(bell: &Arc<Bell>) -> (Reply<T>, Answered<T>) {
    let letter = Arc::new(Mutex::new(Letter::Awaited(None)));
    (Reply(Arc::clone(&letter)), Answered { letter, bell: Arc::clone(bell) })
}

/// The thread's side.
pub(super) struct Reply<T>(Arc<Mutex<Letter<T>>>);

impl<T> Reply<T> {
    /// Whether somebody waits for it.
    pub(super) fn is_awaited(&self) -> bool {
        matches!(*lock(&self.0), Letter::Awaited(_))
    }

    /// Answers; who is to be woken.
    pub(super) fn send(self, answer: T) -> Option<Waker> {
        let mut letter = lock(&self.0);
        match std::mem::replace(&mut *letter, Letter::Void) {
            Letter::Awaited(waiter) => {
                *letter = Letter::Come(answer);
                waiter
            }
            Letter::Come(_) | Letter::Void => None, // the caller has gone
        }
    }
}

impl<T> Drop for Reply<T> {
    fn drop(&mut self) {
        let mut letter = lock(&self.0);
        if let Letter::Awaited(waiter) = &mut *letter {
            let waiter = waiter.take();
            *letter = Letter::Void;
            drop(letter);
            if let Some(waiter) = waiter {
                waiter.wake();
            }
        }
    }
}

/// The caller's side: comes to the answer, or to nothing where the thread has ended without one.
pub(super) struct Answered<T> {
    letter: Arc<Mutex<Letter<T>>>,
    bell: Arc<Bell>,
}

impl<T> Future for Answered<T> {
    type Output = Option<T>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<T>> {
        let mut letter = lock(&self.letter);
        match &mut *letter {
            Letter::Awaited(Some(waiter)) => {
                waiter.clone_from(context.waker());
                return Poll::Pending;
            }
            Letter::Awaited(waiter) => {
                *waiter = Some(context.waker().clone());
                return Poll::Pending;
            }
            Letter::Come(_) | Letter::Void => {}
        }
        match std::mem::replace(&mut *letter, Letter::Void) {
            Letter::Come(answer) => Poll::Ready(Some(answer)),
            Letter::Awaited(_) | Letter::Void => Poll::Ready(None),
        }
    }
}

impl<T> Drop for Answered<T> {
    fn drop(&mut self) {
        *lock(&self.letter) = Letter::Void;
        // Answered or given up, it may be the one to whom the others were left.
        self.bell.ring_on();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::task::Wake;

    use super::*;

    #[derive(Default)]
    struct Sleeper(AtomicBool);

    impl Wake for Sleeper {
        fn wake(self: Arc<Self>) {
            self.0.store(true, Ordering::SeqCst);
        }
    }

    impl Sleeper {
        fn is_awake(&self) -> bool {
            self.0.load(Ordering::SeqCst)
        }
    }

    fn poll<T>(answered: &mut Answered<T>, sleeper: &Arc<Sleeper>) -> Poll<Option<T>> {
        Pin::new(answered).poll(&mut Context::from_waker(&Arc::clone(sleeper).into()))
    }

    #[test]
    fn the_first_who_is_answered_wakes_the_others_even_if_it_goes_unheard() {
        let (bell, first, second) = (Arc::new(Bell::default()), Arc::default(), Arc::default());
        let (to_first, mut by_first) = reply::<u8>(&bell);
        let (to_second, mut by_second) = reply::<u8>(&bell);
        assert!(poll(&mut by_first, &first).is_pending() && poll(&mut by_second, &second).is_pending());
        bell.ring([to_first.send(1), to_second.send(2)].into_iter().flatten());
        assert!(first.is_awake() && !second.is_awake() && !bell.is_still());
        drop(by_first);
        assert!(second.is_awake() && bell.is_still());
        assert_eq!(poll(&mut by_second, &second), Poll::Ready(Some(2)));
    }

    #[test]
    fn who_waits_for_a_thread_that_ends_is_told() {
        let (bell, sleeper) = (Arc::new(Bell::default()), Arc::default());
        let (reply, mut answered) = reply::<u8>(&bell);
        assert!(poll(&mut answered, &sleeper).is_pending());
        drop(reply);
        assert!(sleeper.is_awake());
        assert_eq!(poll(&mut answered, &sleeper), Poll::Ready(None));
    }

    #[test]
    fn an_answer_that_nobody_waits_for_wakes_nobody() {
        let (reply, answered) = reply::<u8>(&Arc::default());
        assert!(reply.is_awaited());
        drop(answered);
        assert!(!reply.is_awaited() && reply.send(1).is_none());
    }
}

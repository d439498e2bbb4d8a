//! Polls what waits only once it was woken.
//!
//! A connection's task is woken for each thing that happens on it, and polled as a whole: what waits beside for
//! the drain, for the peer's leaving or for a timer would take its locks each time, to say that nothing came. A
//! [`Bell`] is a waker of its own, which tells whether something behind it is to be looked at.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Wake, Waker};

/// What is polled with it is woken through it.
#[derive(Debug)]
pub(super) struct Bell {
    cord: Arc<Cord>,
    waker: Waker,
}

#[derive(Debug)]
struct Cord {
    rung: AtomicBool,
    /// The task that hears it.
    task: Waker,
}

impl Wake for Cord {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.rung.store(true, Ordering::Release);
        self.task.wake_by_ref();
    }
}

impl Bell {
    /// One that this task hears. It has rung, since nothing was looked at yet.
    pub(super) async fn here() -> Self {
        let task = std::future::poll_fn(|cx| Poll::Ready(cx.waker().clone())).await;
        let cord = Arc::new(Cord { rung: AtomicBool::new(true), task });
        Self { waker: cord.clone().into(), cord }
    }

    /// What is behind it is to be looked at.
    fn ring(&self) {
        self.cord.rung.store(true, Ordering::Release);
    }

    /// Where it rang since it was last asked: what to poll with. Another task than its own hears nothing of it,
    /// and so must look each time.
    pub(super) fn rang<'a, 'w: 'a>(&'a self, cx: &Context<'w>) -> Option<Context<'a>> {
        if !self.cord.task.will_wake(cx.waker()) {
            return Some(Context::from_waker(cx.waker()));
        }
        // The first is a mere look; the second sees all that came before the ringing.
        let rung = self.cord.rung.load(Ordering::Relaxed) && self.cord.rung.swap(false, Ordering::Acquire);
        rung.then(|| Context::from_waker(&self.waker))
    }
}

pin_project_lite::pin_project! {
    /// A future behind a bell, which is no other's while this lasts.
    pub(super) struct Behind<'a, F> {
        bell: &'a Bell,
        #[pin]
        future: F,
    }
}

impl<'a, F> Behind<'a, F> {
    pub(super) fn new(bell: &'a Bell, future: F) -> Self {
        bell.ring();
        Self { bell, future }
    }
}

impl<F: Future> Future for Behind<'_, F> {
    type Output = F::Output;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<F::Output> {
        let this = self.project();
        match this.bell.rang(cx) {
            Some(mut cx) => this.future.poll(&mut cx),
            None => Poll::Pending,
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a test that fails may panic
mod tests {
    use std::cell::Cell;
    use std::future::poll_fn;

    use tokio::sync::oneshot;

    use super::*;

    #[tokio::test]
    async fn a_future_is_polled_first_and_when_it_is_woken_and_at_no_other_time() {
        let bell = Bell::here().await;
        for polls in 1..=3 {
            let (tell, mut told) = oneshot::channel();
            let polled = Cell::new(0);
            let mut behind = std::pin::pin!(Behind::new(
                &bell,
                poll_fn(|cx| {
                    polled.set(polled.get() + 1);
                    Pin::new(&mut told).poll(cx)
                })
            ));
            let mut tell = Some(tell);
            let mut looks = 0;
            let got = poll_fn(|cx| {
                let got = behind.as_mut().poll(cx);
                looks += 1;
                match looks {
                    1..=2 => cx.waker().wake_by_ref(),
                    // From here on only what is waited for wakes this task.
                    3 => tell.take().unwrap().send(polls).unwrap(),
                    _ => {}
                }
                got
            });
            assert_eq!((got.await.unwrap(), polled.get(), looks), (polls, 2, 4));
        }
    }

    #[tokio::test]
    async fn another_task_polls_each_time() {
        let bell = Bell::here().await;
        let mut cx = Context::from_waker(Waker::noop());
        for _ in 0..2 {
            assert!(bell.rang(&cx).is_some());
        }
        let mut behind = std::pin::pin!(Behind::new(&bell, std::future::ready(())));
        assert!(behind.as_mut().poll(&mut cx).is_ready());
    }
}

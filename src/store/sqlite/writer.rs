//! The one thread that uses the file.
//!
//! It takes all calls that wait, runs them in one transaction and answers them once that is committed, so
//! that what a busy sidecar pays per call falls as its load rises. Nobody waits for a lock longer than
//! [`PATIENCE`], whatever another process does.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::Arc;
use std::task::Waker;
use std::time::{Duration, Instant};

use rusqlite::{Connection, ErrorCode};
use tokio::sync::broadcast;

use super::book::Book;
use super::calls::{Taker, Waited};
use super::clock::StoreClock;
use super::errors::Fault;
use super::place::Files;
use super::reply::{Bell, Reply, SOON};
use super::{PATIENCE, schema};
use crate::store::{StoreError, StoreEvent};

/// The longest pause between two tries for the lock, in µs. SQLite's own would be up to 100 ms.
const LONGEST_PAUSE: u64 = 10_000;

/// A call under way.
pub(super) trait Job: Send {
    /// When it was made.
    fn arrived(&self) -> Instant;
    /// Whether it must still run.
    fn is_wanted(&self) -> bool;
    /// Runs it. An error fails the whole transaction.
    fn run(&mut self, book: &mut Book<'_>) -> Result<(), Fault>;
    /// Tells its caller what came of it, or why the transaction failed; who is to be woken.
    fn answer(self: Box<Self>, failed: Option<&StoreError>) -> Option<Waker>;
}

/// A call that does `act`.
pub(super) struct Call<T, F> {
    pub(super) arrived: Instant,
    /// Whether it need not run once its caller has gone.
    pub(super) dies_with_caller: bool,
    pub(super) act: Option<F>,
    pub(super) found: Option<Result<T, Fault>>,
    pub(super) file: Arc<Path>,
    pub(super) reply: Reply<Result<T, StoreError>>,
}

impl<T, F> Job for Call<T, F>
where
    T: Send,
    F: FnOnce(&mut Book<'_>) -> Result<T, Fault> + Send,
{
    fn arrived(&self) -> Instant {
        self.arrived
    }

    fn is_wanted(&self) -> bool {
        !self.dies_with_caller || self.reply.is_awaited()
    }

    fn run(&mut self, book: &mut Book<'_>) -> Result<(), Fault> {
        match self.act.take().map(|act| act(book)) {
            Some(Err(fault @ (Fault::Sqlite(_) | Fault::Foreign))) => Err(fault),
            // A row that cannot be read is one provider's trouble, and nothing was changed.
            found => {
                self.found = found;
                Ok(())
            }
        }
    }

    fn answer(self: Box<Self>, failed: Option<&StoreError>) -> Option<Waker> {
        let answer = match (failed, self.found) {
            (Some(error), _) => Err(error.clone()),
            (None, Some(found)) => found.map_err(|fault| fault.told(&self.file)),
            (None, None) => Err(StoreError::Unavailable("the call was not run".into())),
        };
        self.reply.send(answer)
    }
}

/// Why an open file is put aside.
enum End {
    /// The last handle went.
    Done,
    /// Another file lies there, or none.
    Moved,
    /// It failed in a way that a fresh opening may mend.
    Broken,
}

/// What the thread owns beside the open file.
pub(super) struct Writer {
    pub(super) path: Arc<Path>,
    pub(super) clock: StoreClock,
    pub(super) events: broadcast::Sender<StoreEvent>,
    pub(super) calls: Taker,
    pub(super) bell: Arc<Bell>,
}

impl Writer {
    /// Serves calls until the last handle is gone and what it asked for is done.
    pub(super) fn run(self, conn: Connection, files: Files) {
        let mut open = Some((conn, files));
        let mut left = files;
        let mut moved = false;
        let mut jobs = Vec::new();
        loop {
            if let Some((conn, files)) = open.take() {
                let end = self.serve(&conn, files, &mut jobs);
                // Closing checkpoints, if this is the last connection; else another's will.
                drop(conn);
                match end {
                    End::Done => return,
                    End::Moved => moved = true,
                    End::Broken => {}
                }
            }
            self.bell.ring_on(); // opening may take its time
            match schema::open(&self.path, &self.clock, Some(left)) {
                Ok(opened) => {
                    left = opened.1;
                    open = Some(opened);
                    // After a mere failure the leases are where they were, and nobody need doubt them.
                    if std::mem::take(&mut moved) {
                        let file = self.path.display();
                        tracing::warn!(
                            "{file} was replaced or deleted; lessor goes on with what lies there now"
                        );
                        self.tell(vec![StoreEvent::Reconnected]);
                    }
                }
                Err(error) => {
                    self.answer(&mut jobs, Some(&error.into()));
                    if self.wait(None) == Waited::Ended {
                        return;
                    }
                    self.calls.take(&mut jobs);
                }
            }
        }
    }

    fn serve(&self, conn: &Connection, files: Files, jobs: &mut Vec<Box<dyn Job>>) -> End {
        let mut book = match Book::new(conn, self.clock.clone()) {
            Ok(book) => book,
            Err(cause) => {
                self.answer(jobs, Some(&Fault::from(cause).told(&self.path)));
                // One call, one try: what cannot be opened must not be tried without end.
                let waited = self.wait(None);
                self.calls.take(jobs);
                return if waited == Waited::Ended { End::Done } else { End::Broken };
            }
        };
        loop {
            if jobs.is_empty() {
                let look_every = book.look_every().filter(|_| self.events.receiver_count() > 0);
                if self.wait(look_every) == Waited::Ended {
                    return End::Done;
                }
            }
            self.calls.take(jobs);
            // Costs two µs, and keeps two files from being lent from at once.
            if Files::at(&self.path) != files {
                return End::Moved;
            }
            if jobs.is_empty() {
                match book.look() {
                    Ok(()) => self.tell(book.take_news()),
                    // Whoever calls next is told.
                    Err(_) => book.give_up(),
                }
            } else if let Err(Fault::Sqlite(cause)) = self.batch(&mut book, jobs)
                && !passes(&cause)
            {
                return End::Broken;
            }
        }
    }

    /// Runs all that waits in one transaction, and answers it.
    fn batch(&self, book: &mut Book<'_>, jobs: &mut Vec<Box<dyn Job>>) -> Result<(), Fault> {
        let ran = catch_unwind(AssertUnwindSafe(|| -> Result<(), Fault> {
            if !self.begin(book, jobs)? {
                return Ok(());
            }
            book.catch_up()?;
            for job in jobs.iter_mut() {
                job.run(book)?;
            }
            Ok(book.commit()?)
        }));
        match ran {
            Ok(Ok(())) => {
                self.tell(book.take_news());
                self.answer(jobs, None);
                Ok(())
            }
            Ok(Err(fault)) => {
                book.give_up();
                self.answer(jobs, Some(&fault.told(&self.path)));
                Err(fault)
            }
            // The rules do not panic; if one did, going on serves users better than a thread that is gone.
            Err(_) => {
                book.give_up();
                let broke_off = StoreError::Unavailable("an operation broke off; it changed nothing".into());
                self.answer(jobs, Some(&broke_off));
                Ok(())
            }
        }
    }

    /// Takes the write lock for those who wait; `false` when nobody is left who does.
    fn begin(&self, book: &mut Book<'_>, jobs: &mut Vec<Box<dyn Job>>) -> Result<bool, Fault> {
        let mut pause = 200;
        loop {
            jobs.retain(|job| job.is_wanted());
            if jobs.is_empty() {
                return Ok(false);
            }
            let cause = match book.begin() {
                Ok(()) => return Ok(true),
                Err(cause) => cause,
            };
            if cause.sqlite_error_code() != Some(ErrorCode::DatabaseBusy) {
                return Err(cause.into());
            }
            let locked = Fault::Sqlite(cause).told(&self.path);
            let waited_enough = |job: &mut Box<dyn Job>| job.arrived().elapsed() >= PATIENCE;
            self.bell.ring(jobs.extract_if(.., waited_enough).filter_map(|job| job.answer(Some(&locked))));
            // Jitter, so that processes which were refused together do not come back together.
            std::thread::sleep(Duration::from_micros(rand::random_range(pause / 2..=pause)));
            pause = (pause * 2).min(LONGEST_PAUSE);
            self.bell.ring_on();
            self.calls.take(jobs);
        }
    }

    /// Waits for calls, or for so long, and sees to it that nobody who was answered waits on.
    fn wait(&self, patience: Option<Duration>) -> Waited {
        if !self.bell.is_still() {
            let waited = self.calls.wait(Some(SOON));
            if waited == Waited::Some {
                return waited;
            }
            self.bell.ring_on();
        }
        self.calls.wait(patience)
    }

    fn answer(&self, jobs: &mut Vec<Box<dyn Job>>, failed: Option<&StoreError>) {
        self.bell.ring(jobs.drain(..).filter_map(|job| job.answer(failed)));
    }

    fn tell(&self, news: Vec<StoreEvent>) {
        for event in news {
            // An error only says that nobody listens.
            let _ = self.events.send(event);
        }
    }
}

/// Whether it passes by itself, with the file as it is.
fn passes(cause: &rusqlite::Error) -> bool {
    matches!(
        cause.sqlite_error_code(),
        Some(ErrorCode::DiskFull | ErrorCode::DatabaseBusy | ErrorCode::DatabaseLocked)
    )
}

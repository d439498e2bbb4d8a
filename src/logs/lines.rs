//! The way of a line to stderr: whoever logs leaves it in a buffer, and a thread writes what has gathered.
//!
//! To wake that thread for each line would cost a busy sidecar more than the line itself, and the request whose
//! line it is some time. So while lines come the thread looks for them by itself, and only when none has come for
//! a while does it wait to be woken.

use std::io::{self, Write};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tracing_subscriber::fmt::MakeWriter;

/// Bytes that may wait for stderr's reader: some 16,000 lines of requests.
const MOST: usize = 8 * 1024 * 1024;

/// How long lines gather before they are written.
const GATHER: Duration = Duration::from_millis(25);

/// Looks without a line after which the thread waits to be woken.
const PATIENCE: u32 = 40;

/// How long the end waits for stderr's reader.
const LAST_WORDS: Duration = Duration::from_secs(1);

/// Memory that is kept between two writes.
const KEPT: usize = 64 * 1024;

/// Where lines are left; clones share it.
#[derive(Clone, Debug)]
pub(super) struct Lines(Arc<Shared>);

#[derive(Debug, Default)]
struct Shared {
    gathered: Mutex<Gathered>,
    /// There is something, or there will be nothing more.
    more: Condvar,
    /// All was written after the end.
    over: Condvar,
}

#[derive(Debug, Default)]
struct Gathered {
    bytes: Vec<u8>,
    /// Lines that found no room.
    dropped: u64,
    /// The thread waits to be woken.
    asleep: bool,
    /// No more is waited for.
    ending: bool,
    /// The thread has written everything.
    ended: bool,
}

/// Writes what still waits when dropped, for a second at most.
#[derive(Debug)]
#[must_use = "dropping it ends the log"]
pub struct LogEnd(Arc<Shared>);

impl Lines {
    /// Lines that a thread writes to `out`.
    ///
    /// # Errors
    /// Those of the system, where there can be no thread.
    pub(super) fn to(out: impl Write + Send + 'static) -> io::Result<(Self, LogEnd)> {
        let shared = Arc::new(Shared::default());
        let writes = shared.clone();
        std::thread::Builder::new().name("lessor-log".into()).spawn(move || writes.write_to(out))?;
        Ok((Self(shared.clone()), LogEnd(shared)))
    }

    /// Takes one line whole, or drops it: never waits.
    pub(super) fn put(&self, line: &[u8]) {
        let mut gathered = self.0.lock();
        if gathered.bytes.len() + line.len() > MOST {
            gathered.dropped += 1;
            return;
        }
        gathered.bytes.extend_from_slice(line);
        let asleep = std::mem::take(&mut gathered.asleep);
        drop(gathered);
        if asleep {
            self.0.more.notify_one();
        }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Gathered> {
        self.gathered.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn write_to(&self, mut out: impl Write) {
        let mut page = Vec::new();
        while let Some(dropped) = self.next(&mut page) {
            // Where stderr is closed there is nobody to tell.
            let _ = out.write_all(&page).and_then(|()| out.flush());
            page.clear();
            page.shrink_to(KEPT);
            if dropped > 0 {
                tracing::warn!(lines = dropped, "log lines were dropped: the reader of stderr is too slow");
            }
        }
        let mut gathered = self.lock();
        gathered.ended = true;
        self.over.notify_all();
    }

    /// Waits for lines and moves them into `page`, which is empty; how many found no room meanwhile. `None`
    /// at the end.
    fn next(&self, page: &mut Vec<u8>) -> Option<u64> {
        let mut gathered = self.lock();
        for look in 0.. {
            let going_on = |gathered: &mut Gathered| !gathered.ending;
            let gathering = self.more.wait_timeout_while(gathered, GATHER, going_on);
            gathered = gathering.unwrap_or_else(PoisonError::into_inner).0;
            if !gathered.bytes.is_empty() || gathered.ending {
                break;
            }
            if look >= PATIENCE {
                gathered.asleep = true;
                let asleep = |gathered: &mut Gathered| gathered.asleep && !gathered.ending;
                gathered = self.more.wait_while(gathered, asleep).unwrap_or_else(PoisonError::into_inner);
            }
        }
        std::mem::swap(&mut gathered.bytes, page);
        let dropped = std::mem::take(&mut gathered.dropped);
        (!page.is_empty()).then_some(dropped)
    }
}

impl Write for Lines {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        self.put(line);
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl<'a> MakeWriter<'a> for Lines {
    type Writer = Self;

    fn make_writer(&'a self) -> Self {
        self.clone()
    }
}

impl Drop for LogEnd {
    fn drop(&mut self) {
        let mut gathered = self.0.lock();
        gathered.ending = true;
        self.0.more.notify_one();
        let writing = |gathered: &mut Gathered| !gathered.ended;
        // A reader that stands still must not hold up the end.
        let _ = self.0.over.wait_timeout_while(gathered, LAST_WORDS, writing);
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a test that fails may panic
mod tests {
    use std::sync::mpsc::{Receiver, Sender, channel};

    use super::*;

    /// A reader that takes a page only when it is told to.
    struct Slow {
        pages: Sender<Vec<u8>>,
        go: Receiver<()>,
    }

    impl Write for Slow {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.go.recv().map_err(io::Error::other)?;
            self.pages.send(bytes.to_vec()).map_err(io::Error::other)?;
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    fn slow() -> (Lines, LogEnd, Sender<()>, Receiver<Vec<u8>>) {
        let (go, waits) = channel();
        let (pages, written) = channel();
        let (lines, end) = Lines::to(Slow { pages, go: waits }).unwrap();
        (lines, end, go, written)
    }

    #[test]
    fn lines_are_written_in_order_and_the_last_ones_at_the_end() {
        let (mut lines, end, go, written) = slow();
        for _ in 0..100 {
            go.send(()).unwrap();
        }
        let mut expected = String::new();
        for number in 0..100 {
            let line = format!("{number}\n");
            lines.write_all(line.as_bytes()).unwrap();
            expected.push_str(&line);
        }
        drop(end);
        drop(go);
        let all: Vec<u8> = written.try_iter().flatten().collect();
        assert_eq!(String::from_utf8(all).unwrap(), expected);
    }

    #[test]
    fn a_reader_that_stands_still_holds_up_neither_who_logs_nor_the_end() {
        let (mut lines, end, _go, _written) = slow();
        let line = vec![b'x'; 1024];
        for _ in 0..3 * MOST / line.len() {
            lines.write_all(&line).unwrap();
        }
        let (waiting, dropped) = {
            let gathered = lines.0.lock();
            (gathered.bytes.len(), usize::try_from(gathered.dropped).unwrap())
        };
        assert!(waiting <= MOST && dropped >= MOST / line.len(), "{waiting} bytes, {dropped} lines");
        drop(end);
    }
}

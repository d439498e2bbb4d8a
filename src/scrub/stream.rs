//! One secret's forms masked in a text that comes in chunks.

use std::collections::VecDeque;
use std::sync::Arc;

use bytes::{Bytes, BytesMut};
use zeroize::Zeroizing;

use super::needle::{Needle, Sink};
use super::{HOLD, MASK};

/// Masks one secret in one stream. What it gives out is, put together, as long as what it was given, and
/// the same but for what is masked.
///
/// Between chunks it keeps the text's end from where the first live prefix begins, which is shorter than
/// the longest form. Its first bytes may have gone out already: up to three of a young prefix, and those
/// that are masked whatever comes.
#[derive(Debug)]
pub struct Scrubber {
    needle: Arc<Needle>,
    /// The kept end as it came.
    raw: Zeroizing<Vec<u8>>,
    /// The same, masked so far.
    shown: Zeroizing<Vec<u8>>,
    /// How much of it has gone out.
    gone: usize,
    masked: u64,
}

impl Scrubber {
    /// At the beginning of a text.
    pub fn new(needle: Arc<Needle>) -> Self {
        let (raw, shown) = (Zeroizing::default(), Zeroizing::default());
        Self { needle, raw, shown, gone: 0, masked: 0 }
    }

    /// Takes the next chunk and adds what may go on to `out`: what was held before it, now decided, and as
    /// much of the chunk as is decided. The chunk is copied only where something in it is masked.
    pub fn push(&mut self, chunk: Bytes, out: &mut VecDeque<Bytes>) {
        let kept = self.raw.len();
        let (free, live, body) = self.look(chunk);
        let whole = kept + body.len();
        let live = live.unwrap_or(whole);
        let free = if whole - live < HOLD { whole } else { free.max(live) };
        if self.gone < free.min(kept) {
            out.push_back(Bytes::copy_from_slice(&self.shown[self.gone..free.min(kept)]));
        }
        if free > kept {
            out.push_back(body.0.slice(..free - kept));
        }
        self.keep(live, &body);
        self.gone = free - live;
    }

    /// The text ends: what is held was no secret, and goes out.
    pub fn finish(&mut self, out: &mut VecDeque<Bytes>) {
        if self.gone < self.shown.len() {
            out.push_back(Bytes::copy_from_slice(&self.shown[self.gone..]));
        }
        self.raw.clear();
        self.shown.clear();
        self.gone = 0;
    }

    /// What is held cannot wait for what it may become: it goes out masked, and what follows is looked at as
    /// if it had stayed.
    pub fn give_up(&mut self, out: &mut VecDeque<Bytes>) {
        if self.gone < self.shown.len() {
            self.shown[self.gone..].fill(MASK);
            out.push_back(Bytes::copy_from_slice(&self.shown[self.gone..]));
            self.gone = self.shown.len();
            self.masked += 1;
        }
    }

    /// How many bytes are held back.
    pub fn held(&self) -> usize {
        self.shown.len() - self.gone
    }

    /// How many forms were masked since the last asking.
    pub fn take_masked(&mut self) -> u64 {
        std::mem::take(&mut self.masked)
    }

    /// Masks what is whole in the kept end and the chunk behind it. Gives up to where all is decided, where
    /// the first live prefix begins, both counted from the kept end's beginning, and the chunk.
    fn look(&mut self, chunk: Bytes) -> (usize, Option<usize>, Body) {
        let kept = self.raw.len();
        let near = &chunk[..chunk.len().min(self.needle.longest())];
        let joint = (kept > 0).then(|| {
            let mut joint = Zeroizing::new(Vec::with_capacity(kept + near.len()));
            joint.extend_from_slice(&self.raw);
            joint.extend_from_slice(near);
            joint
        });
        let mut marks = Marks {
            shown: &mut self.shown,
            chunk: &chunk,
            copy: None,
            offset: 0,
            free: self.gone,
            live: None,
            masked: 0,
        };
        if let Some(joint) = joint {
            self.needle.try_all(&joint, 0..kept, &mut marks);
        }
        marks.offset = kept;
        self.needle.scan(&chunk, &mut marks);
        let (free, live, masked, copy) = (marks.free, marks.live, marks.masked, marks.copy);
        self.masked += masked;
        let shown = copy.map_or_else(|| chunk.clone(), BytesMut::freeze);
        (free, live, Body(shown, chunk))
    }

    /// Keeps the end from `live` on.
    fn keep(&mut self, live: usize, body: &Body) {
        let kept = self.raw.len();
        self.raw.drain(..live.min(kept));
        self.shown.drain(..live.min(kept));
        let from = live.saturating_sub(kept);
        if from < body.len() {
            // All room at once: a vector that grows leaves copies behind that nobody wipes.
            let more = self.needle.longest().saturating_sub(self.raw.len());
            self.raw.reserve_exact(more);
            self.shown.reserve_exact(more);
            self.raw.extend_from_slice(&body.1[from..]);
            self.shown.extend_from_slice(&body.0[from..]);
        }
    }
}

/// A chunk: masked, and as it came.
struct Body(Bytes, Bytes);

impl Body {
    fn len(&self) -> usize {
        self.1.len()
    }
}

/// Masks what is found, in the kept end and in a copy of the chunk.
struct Marks<'a> {
    shown: &'a mut [u8],
    chunk: &'a Bytes,
    copy: Option<BytesMut>,
    /// Where the text begins that is looked at, from the kept end's beginning.
    offset: usize,
    /// All before it may go out, if something live is found at or before it.
    free: usize,
    live: Option<usize>,
    masked: u64,
}

impl Sink for Marks<'_> {
    fn form(&mut self, from: usize, to: usize) {
        let (from, to, kept) = (from + self.offset, to + self.offset, self.shown.len());
        if from < kept {
            self.shown[from..to.min(kept)].fill(MASK);
        }
        if to > kept {
            let copy = self.copy.get_or_insert_with(|| BytesMut::from(self.chunk.as_ref()));
            copy[from.saturating_sub(kept)..to - kept].fill(MASK);
            // What ends in the kept part was counted when it came.
            self.masked += 1;
        }
        // Masked whatever comes, and nothing before it waits.
        if self.live.is_none() || from <= self.free {
            self.free = self.free.max(to);
        }
    }

    fn live(&mut self, from: usize) {
        let from = from + self.offset;
        if self.live.is_none() {
            self.live = Some(from);
            self.free = self.free.max(from);
        }
    }
}

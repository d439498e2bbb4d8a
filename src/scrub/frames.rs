//! One secret masked in what comes over a WebSocket (RFC 6455, section 5.2), at equal length, so that all
//! frames stay what they are.
//!
//! Frames are read as they come and no payload is collected, but for control frames, which are 125 bytes at
//! most. The text that is looked into is a message: over its fragments, and past the control frames between
//! them, to its end. What is held back of it holds back only what comes behind it, and that within a bound:
//! past [`MOST_BEHIND`] the held bytes go out masked, and nothing waits.
//!
//! What no server may send, a client must fail the connection for (section 5.1), and real ones differ in what they
//! take for that. So that one frame goes on, looked into like a part of the message, for the client to see, and
//! nothing behind it: what stands there could be the key in a form that only some client reads. Of a masked
//! frame, which cannot be looked into, it is the head alone. A length that is longer than it need be is merely read.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;

use super::needle::Needle;
use super::stream::Scrubber;

/// The most memory that waits behind held bytes: other frames, and heads of the message's own.
const MOST_BEHIND: usize = 64 * 1024;

/// What a piece that waits takes beside its bytes.
const PIECE: usize = 64;

/// The longest head of a frame that is not masked.
const LONGEST_HEAD: usize = 10;

/// One connection's way from the server. Feed what came, then take pieces until there are none.
#[derive(Debug)]
pub struct Frames {
    masking: Option<Masking>,
    /// Messages may say that they are packed, for both sides agreed to it.
    packed: bool,
    state: State,
    /// The head that is being read.
    head: [u8; LONGEST_HEAD],
    head_len: usize,
    /// The message that has begun says that it is packed.
    message_packed: bool,
    out: Output,
    goodbye: bool,
}

#[derive(Debug)]
struct Masking {
    needle: Arc<Needle>,
    scrubber: Scrubber,
    /// Bytes of messages that went into the scrubber, and that came out.
    fed: u64,
    came: u64,
    /// What waits until so many have come out.
    behind: VecDeque<(u64, Bytes)>,
    behind_len: usize,
    scratch: VecDeque<Bytes>,
    /// What was read so far of a control frame's payload, behind its head.
    control: Vec<u8>,
    masked: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// In a frame's head.
    Head,
    /// In a frame's payload, with so much of it to come.
    Payload { left: u64, last: bool, plain: bool },
    /// In the payload of a frame that no server may send, with so much of it to come.
    Odd { left: u64 },
    /// In a control frame's payload, with so much of it to come.
    Control { left: usize },
    /// No frames any more: nothing goes on.
    Mute,
}

/// What a head says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Head {
    /// More of it must come.
    Part,
    /// A masked frame's: no server may send it, nor can it be looked into.
    Foreign,
    /// Another's that no server may send.
    Odd {
        length: u64,
    },
    Frame {
        last: bool,
        packed: bool,
        opcode: u8,
        length: u64,
    },
}

impl Frames {
    /// Masks nothing.
    pub fn open() -> Self {
        Self {
            masking: None,
            packed: false,
            state: State::Head,
            head: [0; LONGEST_HEAD],
            head_len: 0,
            message_packed: false,
            out: Output::default(),
            goodbye: false,
        }
    }

    /// Masks `needle`; not in messages that say they are packed, where `packed`.
    pub fn new(needle: Arc<Needle>, packed: bool) -> Self {
        let masking = Masking {
            scrubber: Scrubber::new(needle.clone()),
            needle,
            fed: 0,
            came: 0,
            behind: VecDeque::new(),
            behind_len: 0,
            scratch: VecDeque::new(),
            control: Vec::new(),
            masked: 0,
        };
        Self { masking: Some(masking), packed, ..Self::open() }
    }

    /// Takes what came.
    pub fn feed(&mut self, data: Bytes) {
        self.out.begin(data.clone());
        let mut rest = data;
        while !rest.is_empty() {
            match self.state {
                State::Head => self.read_head(&mut rest),
                State::Payload { left, last, plain } => {
                    let n = usize::try_from(left).unwrap_or(usize::MAX).min(rest.len());
                    let piece = rest.split_to(n);
                    if plain {
                        self.text(piece);
                    } else {
                        self.pass(piece);
                    }
                    self.state = State::Payload { left: left - n as u64, last, plain };
                    self.end_frame();
                }
                State::Control { left } => self.read_control(left, &mut rest),
                State::Odd { left } => {
                    let n = usize::try_from(left).unwrap_or(usize::MAX).min(rest.len());
                    let piece = rest.split_to(n);
                    self.text(piece);
                    self.begin_odd(left - n as u64);
                }
                State::Mute => rest.clear(),
            }
        }
        self.out.end();
    }

    /// The server ends here. What is held back of a message that it did not finish stays back.
    pub fn finish(&mut self) {
        match self.state {
            State::Head if self.masking.as_ref().is_none_or(Masking::is_through) => {
                let begun = Bytes::copy_from_slice(&self.head[..std::mem::take(&mut self.head_len)]);
                self.out.push(begun);
            }
            _ => {}
        }
    }

    /// The next piece to pass on.
    pub fn take(&mut self) -> Option<Bytes> {
        self.out.ready.pop_front()
    }

    /// How many forms were masked since the last asking.
    pub fn take_masked(&mut self) -> u64 {
        let Some(masking) = &mut self.masking else { return 0 };
        std::mem::take(&mut masking.masked) + masking.scrubber.take_masked()
    }

    /// Whether the server sent a Close frame.
    pub fn said_goodbye(&self) -> bool {
        self.goodbye
    }

    /// Reads on in a head, and begins what it stands before.
    fn read_head(&mut self, rest: &mut Bytes) {
        let whole_from = (self.head_len == 0).then(|| rest.clone());
        let (mut taken, mut head) = (0, Head::Part);
        while head == Head::Part && taken < rest.len() {
            self.head[self.head_len] = rest[taken];
            (self.head_len, taken) = (self.head_len + 1, taken + 1);
            head = judge(&self.head[..self.head_len]);
        }
        let _ = rest.split_to(taken);
        if head == Head::Part {
            return;
        }
        let bytes = match whole_from {
            Some(data) => data.slice(..taken),
            None => Bytes::copy_from_slice(&self.head[..self.head_len]),
        };
        self.head_len = 0;
        match head {
            Head::Frame { opcode: opcode @ 8.., length, .. } => self.begin_control(opcode, length, bytes),
            Head::Frame { last, packed, opcode, length } => {
                if opcode != 0 {
                    self.message_packed = packed && self.packed;
                }
                if self.message_packed {
                    // A message that was never finished is over.
                    self.end_message();
                }
                self.pass(bytes);
                let plain = self.masking.is_some() && !self.message_packed;
                self.state = State::Payload { left: length, last, plain };
                self.end_frame();
            }
            Head::Odd { length } if self.masking.is_some() => {
                self.pass(bytes);
                self.begin_odd(length);
            }
            Head::Foreign | Head::Odd { .. } | Head::Part if self.masking.is_none() => {
                self.state = State::Payload { left: u64::MAX, last: false, plain: false };
                self.pass(bytes);
            }
            Head::Foreign | Head::Odd { .. } | Head::Part => {
                self.state = State::Mute;
                self.give_up();
                self.pass(bytes);
            }
        }
    }

    /// So much of an odd frame is still to come; behind it nothing is.
    fn begin_odd(&mut self, left: u64) {
        self.state = if left > 0 { State::Odd { left } } else { State::Mute };
        if left == 0 {
            self.give_up();
        }
    }

    fn begin_control(&mut self, opcode: u8, length: u64, head: Bytes) {
        if opcode == 8 {
            self.goodbye = true;
            // No message goes on behind it.
            self.end_message();
        }
        self.pass(head);
        self.state = match usize::try_from(length) {
            Ok(left) if left > 0 && self.masking.is_some() => State::Control { left },
            _ => State::Payload { left: length, last: false, plain: false },
        };
        self.end_frame();
    }

    /// Collects a control frame's payload, and masks it when it is whole.
    fn read_control(&mut self, left: usize, rest: &mut Bytes) {
        let mut piece = rest.split_to(left.min(rest.len()));
        let still = left - piece.len();
        // Control frames are only read so where something is masked.
        let Some(masking) = &mut self.masking else { return self.pass(piece) };
        if still > 0 || !masking.control.is_empty() {
            masking.control.extend_from_slice(&piece);
            piece = Bytes::new();
        }
        self.state = State::Control { left: still };
        if still > 0 {
            return;
        }
        if piece.is_empty() {
            piece = std::mem::take(&mut masking.control).into();
        }
        if let Some((masked, count)) = masking.needle.mask(&piece) {
            masking.masked += count;
            piece = Bytes::copy_from_slice(&masked);
        }
        self.pass(piece);
        self.state = State::Head;
    }

    fn end_frame(&mut self) {
        if let State::Payload { left: 0, last, plain } = self.state {
            self.state = State::Head;
            if last && plain {
                self.end_message();
            }
        }
    }

    /// A piece of what is looked into.
    fn text(&mut self, piece: Bytes) {
        match &mut self.masking {
            Some(masking) => {
                masking.fed += piece.len() as u64;
                masking.scrubber.push(piece, &mut masking.scratch);
                masking.drain(&mut self.out);
            }
            None => self.out.push(piece),
        }
    }

    /// What is held was no secret.
    fn end_message(&mut self) {
        if let Some(masking) = &mut self.masking {
            masking.scrubber.finish(&mut masking.scratch);
            masking.drain(&mut self.out);
        }
    }

    /// What is held goes out masked, whatever it was.
    fn give_up(&mut self) {
        if let Some(masking) = &mut self.masking {
            masking.scrubber.give_up(&mut masking.scratch);
            masking.drain(&mut self.out);
        }
    }

    /// A piece that is not looked into goes on behind all that came before it.
    fn pass(&mut self, piece: Bytes) {
        match &mut self.masking {
            Some(masking) if !masking.is_through() && !piece.is_empty() => {
                masking.behind_len += piece.len() + PIECE;
                // A copy: the piece itself would keep all that came with it.
                masking.behind.push_back((masking.fed, Bytes::copy_from_slice(&piece)));
                if masking.behind_len > MOST_BEHIND {
                    self.give_up();
                }
            }
            _ => self.out.push(piece),
        }
    }
}

impl Masking {
    /// Whether nothing is held back.
    fn is_through(&self) -> bool {
        self.fed == self.came
    }

    /// Puts what came out of the scrubber, and what waited for it, in their order.
    fn drain(&mut self, out: &mut Output) {
        while let Some(mut piece) = self.scratch.pop_front() {
            while !piece.is_empty() {
                self.release(out);
                let next = self.behind.front().map_or(u64::MAX, |(at, _)| *at);
                let room = usize::try_from(next - self.came).unwrap_or(usize::MAX).min(piece.len());
                out.push(piece.split_to(room));
                self.came += room as u64;
            }
        }
        self.release(out);
    }

    fn release(&mut self, out: &mut Output) {
        while self.behind.front().is_some_and(|(at, _)| *at <= self.came) {
            let Some((_, piece)) = self.behind.pop_front() else { return };
            self.behind_len -= piece.len() + PIECE;
            out.push(piece);
        }
    }
}

/// Pieces in their order. Neighbours in what came last become one again, so that a read that is passed on
/// whole is one write.
#[derive(Debug, Default)]
struct Output {
    ready: VecDeque<Bytes>,
    data: Bytes,
    /// A part of `data` that is the newest piece.
    run: Range<usize>,
}

impl Output {
    fn begin(&mut self, data: Bytes) {
        self.data = data;
        self.run = 0..0;
    }

    fn push(&mut self, piece: Bytes) {
        if piece.is_empty() {
            return;
        }
        let (base, at) = (self.data.as_ptr().addr(), piece.as_ptr().addr());
        let inside = at >= base && at + piece.len() <= base + self.data.len();
        if inside && !self.run.is_empty() && self.run.end == at - base {
            self.run.end += piece.len();
            return;
        }
        self.close_run();
        if inside {
            self.run = at - base..at - base + piece.len();
        } else {
            self.ready.push_back(piece);
        }
    }

    fn close_run(&mut self) {
        if !self.run.is_empty() {
            self.ready.push_back(self.data.slice(std::mem::take(&mut self.run)));
        }
    }

    fn end(&mut self) {
        self.close_run();
        // Else the memory could not be read into again.
        self.data = Bytes::new();
    }
}

#[cfg(test)]
mod tests;

/// Big endian.
fn number(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0, |number, byte| number << 8 | u64::from(*byte))
}

/// Reads the beginning of a frame.
fn judge(head: &[u8]) -> Head {
    let [first, behind @ ..] = head else { return Head::Part };
    let (last, opcode) = (first & 0x80 != 0, first & 0x0f);
    let control = opcode >= 8;
    let [second, rest @ ..] = behind else { return Head::Part };
    let length = match (second, rest) {
        // Only clients mask.
        (128.., _) => return Head::Foreign,
        (126, long) if long.len() >= 2 => number(&long[..2]),
        (127, long) if long.len() >= 8 => number(&long[..8]),
        (126.., _) => return Head::Part,
        (short, _) => u64::from(*short),
    };
    // Judged by the whole head: a client looks at that before it says what is wrong.
    let known = matches!(opcode, 0..=2 | 8..=10);
    if !known || length >> 63 == 1 || (control && (!last || length > 125)) {
        return Head::Odd { length };
    }
    Head::Frame { last, packed: first & 0x40 != 0, opcode, length }
}

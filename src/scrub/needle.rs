//! Finding the forms of one key's secrets in a text, fast where there are none.

use zeroize::Zeroizing;

use super::MASK;
use super::forms::{self, Form, Found, LONGEST};
use crate::model::Secret;

/// Bytes of a text that one sample looks at.
const WINDOW: usize = 8;

/// Bytes of a form that are looked at together.
const PART: usize = 4;

/// The set of four-byte parts of all forms is a filter of so many bits.
const FILTER_BITS: usize = 1 << 16;

/// One key's secrets, made ready to be looked for: most have one. Made once a key: it takes some 8 KiB, wiped
/// at its end.
pub struct Needle {
    forms: Vec<Form>,
    secrets: Vec<Secret>,
    /// How many symbols, and so bytes at least, the shortest form has.
    shortest: usize,
    /// The longest that a form can be when every symbol is spelt at its longest.
    longest: usize,
    /// From sample to sample. A form is never shorter than `stride` and a window, less one, so one sample
    /// at least lies wholly in each. 0: the forms are too short to be sampled.
    stride: usize,
    /// Bytes with which a form may begin.
    first: Zeroizing<[bool; 256]>,
    /// Bytes with which one may begin as it is spelt.
    begins: Zeroizing<[bool; 256]>,
    /// Bytes that stand in some form.
    holds: Zeroizing<[bool; 256]>,
    /// What four literal bytes in a row may be: a Bloom filter with two hashes.
    parts: Zeroizing<Vec<u64>>,
}

impl std::fmt::Debug for Needle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Needle(..)")
    }
}

/// Hears what is found, in the order of where it begins.
pub(super) trait Sink {
    /// A form stands at `from..to`.
    fn form(&mut self, from: usize, to: usize);
    /// What begins at `from` may become one.
    fn live(&mut self, from: usize);
}

impl Needle {
    /// For `secret`, which must not be empty.
    pub fn new(secret: &Secret) -> Self {
        Self::of(std::slice::from_ref(secret))
    }

    /// For all of `secrets`, of which none may be empty.
    pub fn of(secrets: &[Secret]) -> Self {
        let forms: Vec<Form> =
            secrets.iter().flat_map(|secret| forms::of(secret.expose().as_bytes())).collect();
        let shortest = forms.iter().map(|form| form.0.len()).min().unwrap_or(0);
        let longest = forms.iter().map(|form| form.0.len()).max().unwrap_or(0) * LONGEST;
        let mut first = Zeroizing::new([false; 256]);
        let mut holds = Zeroizing::new([false; 256]);
        let mut parts = Zeroizing::new(vec![0; FILTER_BITS / 64]);
        for form in &forms {
            for byte in form.0.first().into_iter().flatten() {
                first[usize::from(*byte)] = true;
            }
            for byte in form.0.iter().flatten() {
                holds[usize::from(*byte)] = true;
            }
            for part in form.0.windows(PART) {
                // Which of its two bytes each symbol takes: mostly they are one.
                for mix in 0..16 {
                    let byte = |at: usize| part[at][mix >> at & 1];
                    for bit in bits([byte(0), byte(1), byte(2), byte(3)]) {
                        parts[bit / 64] |= 1 << (bit % 64);
                    }
                }
            }
        }
        let mut begins = first.clone();
        for sign in [b'%', b'\\'] {
            begins[usize::from(sign)] = true;
        }
        let stride = (shortest + 1).saturating_sub(WINDOW);
        Self { forms, secrets: secrets.to_vec(), shortest, longest, stride, first, begins, holds, parts }
    }

    /// `text` with every form masked, and how many there were; `None` where there is none.
    pub fn mask(&self, text: &[u8]) -> Option<(Zeroizing<Vec<u8>>, u64)> {
        struct Masked<'t>(&'t [u8], Option<Zeroizing<Vec<u8>>>, u64);
        impl Sink for Masked<'_> {
            fn form(&mut self, from: usize, to: usize) {
                self.1.get_or_insert_with(|| Zeroizing::new(self.0.to_vec()))[from..to].fill(MASK);
                self.2 += 1;
            }
            fn live(&mut self, _: usize) {}
        }
        if text.len() < self.shortest {
            return None;
        }
        let mut masked = Masked(text, None, 0);
        self.scan(text, &mut masked);
        let Masked(_, text, count) = masked;
        text.map(|text| (text, count))
    }

    /// Whether a header of this name (always lower case) carries a secret in it, as it is or percent-encoded.
    pub fn is_in_name(&self, name: &str) -> bool {
        self.secrets.iter().any(|secret| is_in_name(secret.expose().as_bytes(), name))
    }

    pub(super) fn longest(&self) -> usize {
        self.longest
    }

    /// Tells `sink` every place of `text` at which a form begins, or may begin.
    pub(super) fn scan(&self, text: &[u8], sink: &mut impl Sink) {
        let (mut at, mut tried) = (0, 0);
        while self.stride > 0 && at + WINDOW <= text.len() {
            if self.is_suspect(text, at) {
                let from = tried.max((at + 1).saturating_sub(self.longest));
                tried = at + 1;
                self.try_all(text, from..tried, sink);
            }
            at += self.stride;
        }
        // What begins behind the last sample has none in it. What begins before it and is still live holds
        // it, so it was suspect.
        let behind = if at == 0 { 0 } else { at - self.stride + 1 };
        self.try_all(text, tried.max(behind)..text.len(), sink);
    }

    pub(super) fn try_all(&self, text: &[u8], places: std::ops::Range<usize>, sink: &mut impl Sink) {
        let from = places.start;
        let hopeful = text[places].iter().enumerate().filter(|(_, byte)| self.begins[usize::from(**byte)]);
        for (offset, _) in hopeful {
            let place = from + offset;
            let found = self.try_at(text, place);
            if found.end > 0 {
                sink.form(place, found.end);
            }
            if found.live {
                sink.live(place);
            }
        }
    }

    /// Whether a form stands at `place`, or may.
    #[inline]
    pub(super) fn try_at(&self, text: &[u8], place: usize) -> Found {
        let mut found = Found::default();
        let begins = match text[place] {
            b'%' | b'\\' => may_be_spelt(text, place, &self.first),
            byte => self.first[usize::from(byte)],
        };
        if begins && self.may_begin(text, place) {
            for form in &self.forms {
                form.at(text, place, &mut found);
            }
        }
        found
    }

    /// Whether the four bytes at `place` may be the first of a form: a cheap look, not the last word.
    #[inline]
    fn may_begin(&self, text: &[u8], place: usize) -> bool {
        let Some(part) = text[place..].first_chunk::<PART>().filter(|_| self.shortest >= PART) else {
            return true;
        };
        part.contains(&b'%') || part.contains(&b'\\') || self.is_part(*part)
    }

    /// Whether four literal bytes may stand in a form.
    #[inline]
    fn is_part(&self, part: [u8; PART]) -> bool {
        bits(part).into_iter().all(|bit| self.parts[bit / 64] >> (bit % 64) & 1 == 1)
    }

    /// Whether the window at `at` may lie wholly in a form.
    #[inline]
    fn is_suspect(&self, text: &[u8], at: usize) -> bool {
        let Some(window) = text[at..].first_chunk::<WINDOW>() else { return false };
        let word = u64::from_le_bytes(*window);
        if has(word, b'%') || has(word, b'\\') {
            let mut signs = (at..at + WINDOW).filter(|at| matches!(text[*at], b'%' | b'\\'));
            return signs.all(|at| may_be_spelt(text, at, &self.holds));
        }
        // No spelling begins in it; at most the end of one that began before is at its beginning, and that
        // is longer than four bytes only in one case.
        let [.., a, b, c, d] = *window;
        self.is_part([a, b, c, d])
            || (at > 0 && text[at - 1] == b'\\' && may_be_spelt(text, at - 1, &self.holds))
    }
}

/// `text` with its percent-encoding taken off; `None` where it has none.
fn decoded_once(text: &[u8]) -> Option<Zeroizing<Vec<u8>>> {
    let (mut decoded, mut at) = (Zeroizing::new(Vec::with_capacity(text.len())), 0);
    while at < text.len() {
        let byte = (text[at] == b'%').then(|| text.get(at + 1..at + 3).and_then(forms::hex)).flatten();
        decoded.push(byte.unwrap_or(text[at]));
        at += if byte.is_some() { 3 } else { 1 };
    }
    (decoded.len() < text.len()).then_some(decoded)
}

fn is_in_name(secret: &[u8], name: &str) -> bool {
    if name.len() < secret.len() {
        return false;
    }
    let mut name = Zeroizing::new(name.as_bytes().to_vec());
    loop {
        if name.windows(secret.len()).any(|part| part.eq_ignore_ascii_case(secret)) {
            return true;
        }
        // Each round takes signs out, so there is a last one.
        let Some(decoded) = decoded_once(&name) else { return false };
        name = decoded;
    }
}

/// Whether the `%` or `\` at `at` may begin the spelling of one of `symbols`. A cheap look, not the last
/// word: also yes where the text ends too early.
fn may_be_spelt(text: &[u8], at: usize, symbols: &[bool; 256]) -> bool {
    let holds = |byte: u8| symbols[usize::from(byte)];
    let digits = |from: usize| match text.get(from..from + 2) {
        // `%25` begins what is encoded twice over.
        Some(digits) => forms::hex(digits).is_some_and(|byte| holds(byte) || byte == b'%'),
        None => true,
    };
    if holds(text[at]) {
        return true;
    }
    match (text[at], text.get(at + 1)) {
        (_, None) => true,
        (b'%', _) => digits(at + 1),
        (_, Some(b'u' | b'U')) => match text.get(at + 2..at + 4) {
            Some(b"00") => digits(at + 4),
            Some(_) => false,
            None => true,
        },
        (_, Some(escaped)) => matches!(escaped, b'/' | b'"' | b'\\') && holds(*escaped),
    }
}

/// The bits of a part in the filter.
#[inline]
fn bits(part: [u8; PART]) -> [usize; 2] {
    // Fibonacci hashing: the upper bits of the product are well mixed.
    let mixed = u64::from(u32::from_le_bytes(part)).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    let [a, b, c, d, ..] = mixed.to_be_bytes();
    [usize::from(u16::from_be_bytes([a, b])), usize::from(u16::from_be_bytes([c, d]))]
}

/// Whether some byte of `word` is `byte`.
#[inline]
fn has(word: u64, byte: u8) -> bool {
    const ONES: u64 = u64::MAX / 255;
    let same = word ^ (ONES * u64::from(byte));
    same.wrapping_sub(ONES) & !same & (ONES << 7) != 0
}

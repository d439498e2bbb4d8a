//! The forms of a secret, and whether a text has one of them at a place.

use zeroize::Zeroizing;

/// A character of a form: one of two bytes (the same twice, save where the alphabets of base64 differ).
pub(super) type Symbol = [u8; 2];

/// The longest spelling of one symbol.
pub(super) const LONGEST: usize = 6;

/// One form of a secret, symbol by symbol. Each symbol may be spelt in several ways.
pub(super) struct Form(pub(super) Zeroizing<Vec<Symbol>>);

/// What a text has at a place.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(super) struct Found {
    /// Where the longest form that begins here ends; 0: none does.
    pub(super) end: usize,
    /// Whether the text ends before it is decided.
    pub(super) live: bool,
}

/// Bases of base64 text shorter than this are no evidence.
const SHORTEST_BASE64: usize = 8;

/// All forms of `secret`.
pub(super) fn of(secret: &[u8]) -> Vec<Form> {
    let plain: Zeroizing<Vec<Symbol>> = Zeroizing::new(secret.iter().map(|byte| [*byte; 2]).collect());
    let mut forms = vec![Form(plain)];
    for before in 0..3 {
        let form = base64(secret, before);
        if form.len() >= SHORTEST_BASE64 {
            forms.push(Form(form));
        }
    }
    forms
}

/// The characters of base64 that `secret` alone decides where `before` bytes (modulo 3) stand before it.
fn base64(secret: &[u8], before: usize) -> Zeroizing<Vec<Symbol>> {
    let (from, to) = (before * 8, (before + secret.len()) * 8);
    let bit = |at: usize| secret[(at - from) / 8] >> (7 - at % 8) & 1;
    let mut form = Zeroizing::new(Vec::with_capacity(to / 6));
    for character in from.div_ceil(6)..to / 6 {
        let value = (character * 6..character * 6 + 6).fold(0, |value, at| value << 1 | bit(at));
        form.push(match value {
            0..26 => [b'A' + value; 2],
            26..52 => [b'a' + value - 26; 2],
            52..62 => [b'0' + value - 52; 2],
            62 => [b'+', b'-'],
            _ => [b'/', b'_'],
        });
    }
    form
}

/// The hex digits' value.
pub(super) fn hex(digits: &[u8]) -> Option<u8> {
    let digit = |byte: &u8| char::from(*byte).to_digit(16).and_then(|value| u8::try_from(value).ok());
    match digits {
        [high, low] => Some(digit(high)? << 4 | digit(low)?),
        _ => None,
    }
}

/// Ways to go on behind one symbol.
struct Step {
    /// How long each spelling is that the text has here.
    lengths: [usize; 4],
    count: usize,
    live: bool,
}

/// How `symbol` stands at the beginning of `rest`, where `rest` begins with `%` or `\`.
fn spelt(symbol: Symbol, rest: &[u8]) -> Step {
    let mut step = Step { lengths: [0; 4], count: 0, live: false };
    let mut try_one = |spelling: &[u8]| {
        let seen = &rest[..rest.len().min(spelling.len())];
        if !spelling[..seen.len()].eq_ignore_ascii_case(seen) {
        } else if seen.len() < spelling.len() {
            step.live = true;
        } else if !step.lengths[..step.count].contains(&seen.len()) && step.count < step.lengths.len() {
            step.lengths[step.count] = seen.len();
            step.count += 1;
        }
    };
    for byte in &symbol[..if symbol[0] == symbol[1] { 1 } else { 2 }] {
        const DIGITS: &[u8; 16] = b"0123456789abcdef";
        let (high, low) = (DIGITS[usize::from(byte >> 4)], DIGITS[usize::from(byte & 15)]);
        if matches!(byte, b'%' | b'\\') {
            try_one(&[*byte]);
        }
        if rest[0] == b'%' {
            try_one(&[b'%', high, low]);
            try_one(&[b'%', b'2', b'5', high, low]);
        } else {
            try_one(&[b'\\', b'u', b'0', b'0', high, low]);
            if matches!(byte, b'/' | b'"' | b'\\') {
                try_one(&[b'\\', *byte]);
            }
        }
    }
    step
}

impl Form {
    /// Adds to `found` what this form has to say of `text` from `from` on.
    pub(super) fn at(&self, text: &[u8], from: usize, found: &mut Found) {
        let mut at = from;
        for (done, symbol) in self.0.iter().enumerate() {
            let Some(byte) = text.get(at) else {
                found.live = true;
                return;
            };
            if symbol.contains(byte) && !matches!(byte, b'%' | b'\\') {
                at += 1;
                continue;
            }
            if !matches!(byte, b'%' | b'\\') {
                return;
            }
            let step = spelt(*symbol, &text[at..]);
            found.live |= step.live;
            match step.lengths[..step.count] {
                [] => return,
                [length] => at += length,
                _ => return self.branch(text, at, done, found),
            }
        }
        found.end = found.end.max(at);
    }

    /// The same from symbol `done` on, where more than one spelling fits: only a secret that itself holds
    /// `%` or `\` comes here. All ways go on together, so that their number stays below the text's length.
    fn branch(&self, text: &[u8], at: usize, done: usize, found: &mut Found) {
        let mut ways = vec![at];
        for symbol in &self.0[done..] {
            let mut next = Vec::new();
            for at in ways {
                match text.get(at) {
                    None => found.live = true,
                    Some(b'%' | b'\\') => {
                        let step = spelt(*symbol, &text[at..]);
                        found.live |= step.live;
                        next.extend(step.lengths[..step.count].iter().map(|length| at + length));
                    }
                    Some(byte) if symbol.contains(byte) => next.push(at + 1),
                    Some(_) => {}
                }
            }
            next.sort_unstable();
            next.dedup();
            ways = next;
        }
        found.end = found.end.max(ways.last().copied().unwrap_or(0));
    }
}

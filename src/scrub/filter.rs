//! What a body goes through on its way: perhaps unpacking, perhaps masking, in most cases neither or the
//! latter.

use std::collections::VecDeque;
use std::io::Result;
use std::sync::Arc;

use bytes::Bytes;
use http::header::{ACCEPT_ENCODING, CONTENT_ENCODING};
use http::{HeaderMap, HeaderValue};

use super::decode::{Coding, Decoder};
use super::needle::Needle;
use super::stream::Scrubber;
use crate::fields;

/// One body's way. Feed a piece, then take pieces until there are none.
#[derive(Debug, Default)]
pub struct Filter {
    decoder: Option<Decoder>,
    scrubber: Option<Scrubber>,
    ready: VecDeque<Bytes>,
    /// Whether the body's end was said, and not yet worked off.
    ending: bool,
}

impl Filter {
    /// Passes all on as it is.
    pub fn none() -> Self {
        Self::default()
    }

    /// Masks `needle`, in what is unpacked first if it is `packed`.
    pub fn new(needle: Arc<Needle>, packed: Option<Coding>) -> Self {
        let (decoder, scrubber) = (packed.map(Decoder::new), Some(Scrubber::new(needle)));
        Self { decoder, scrubber, ..Self::default() }
    }

    /// Takes a piece of the body.
    pub fn feed(&mut self, piece: Bytes) {
        match &mut self.decoder {
            Some(decoder) => decoder.push(piece),
            None => self.pass(piece),
        }
    }

    /// Says that the body ends here.
    pub fn finish(&mut self) {
        self.ending = true;
    }

    /// The next piece to pass on, or why there can be none.
    pub fn take(&mut self) -> Option<Result<Bytes>> {
        loop {
            if let Some(piece) = self.ready.pop_front() {
                return Some(Ok(piece));
            }
            match self.decoder.as_mut().and_then(Decoder::step) {
                Some(Ok(plain)) => self.pass(plain),
                Some(Err(error)) => return Some(Err(error)),
                None if std::mem::take(&mut self.ending) => {
                    if let Some(mut decoder) = self.decoder.take() {
                        match decoder.finish() {
                            Ok(plain) => self.pass(plain),
                            Err(error) => return Some(Err(error)),
                        }
                    }
                    if let Some(scrubber) = &mut self.scrubber {
                        scrubber.finish(&mut self.ready);
                    }
                }
                None => return None,
            }
        }
    }

    /// How many bytes went in and are still to come out; `None` where that cannot be said.
    pub fn inside(&self) -> Option<usize> {
        if self.decoder.is_some() {
            return None;
        }
        let held = self.scrubber.as_ref().map_or(0, Scrubber::held);
        Some(self.ready.iter().map(Bytes::len).sum::<usize>() + held)
    }

    /// Whether nothing more comes out of it before something is fed.
    pub fn is_empty(&self) -> bool {
        let unpacking = self.decoder.as_ref().is_some_and(|decoder| self.ending || decoder.has_input());
        self.ready.is_empty() && !unpacking && self.scrubber.as_ref().is_none_or(|it| it.held() == 0)
    }

    /// How many forms were masked since the last asking.
    pub fn take_masked(&mut self) -> u64 {
        self.scrubber.as_mut().map_or(0, Scrubber::take_masked)
    }

    fn pass(&mut self, piece: Bytes) {
        match &mut self.scrubber {
            _ if piece.is_empty() => {}
            Some(scrubber) => scrubber.push(piece, &mut self.ready),
            None => self.ready.push_back(piece),
        }
    }
}

/// How a body is packed, by its headers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Packed {
    /// Not at all, or in a coding that nobody knows for one.
    No,
    /// In one that can be taken off.
    As(Coding),
    /// In another, or in several.
    Otherwise,
}

/// Reads `content-encoding`.
pub fn compression(headers: &HeaderMap) -> Packed {
    const OTHERS: [&str; 6] = ["br", "zstd", "compress", "x-compress", "dcb", "dcz"];
    if !fields::has(headers, &CONTENT_ENCODING) {
        return Packed::No;
    }
    let mut packed = Packed::No;
    if unreadable(headers, &CONTENT_ENCODING) {
        return Packed::Otherwise;
    }
    for coding in members(headers, &CONTENT_ENCODING) {
        let is = |other: &&str| coding.eq_ignore_ascii_case(other);
        let known = match () {
            () if ["gzip", "x-gzip"].iter().any(is) => Packed::As(Coding::Gzip),
            () if is(&"deflate") => Packed::As(Coding::Deflate),
            () if OTHERS.iter().any(is) => Packed::Otherwise,
            () => continue,
        };
        packed = if packed == Packed::No { known } else { Packed::Otherwise };
    }
    packed
}

/// Leaves only codings that can be taken off in a request's `accept-encoding`. Who names none gets none.
pub fn keep_decodable(headers: &mut HeaderMap) {
    const KEPT: [&str; 4] = ["gzip", "x-gzip", "deflate", "identity"];
    let decodable = |member: &&str| {
        let coding = member.split(';').next().unwrap_or_default().trim();
        KEPT.iter().any(|kept| kept.eq_ignore_ascii_case(coding))
    };
    let all: Vec<&str> = members(headers, &ACCEPT_ENCODING).collect();
    let kept: Vec<&str> = all.iter().copied().filter(decodable).collect();
    // Of a line that cannot be read, a provider may read something all the same.
    if kept.len() == all.len() && !unreadable(headers, &ACCEPT_ENCODING) {
        return;
    }
    let text = if kept.is_empty() { "identity".to_owned() } else { kept.join(", ") };
    // Made of pieces of a header's value, so it is one.
    if let Ok(value) = HeaderValue::from_str(&text) {
        headers.insert(ACCEPT_ENCODING, value);
    }
}

/// Whether a line of this header holds bytes that are no text.
fn unreadable(headers: &HeaderMap, name: &http::HeaderName) -> bool {
    headers.get_all(name).iter().any(|value| value.to_str().is_err())
}

/// The members of a header that is a list, over all its lines that can be read.
fn members<'h>(headers: &'h HeaderMap, name: &http::HeaderName) -> impl Iterator<Item = &'h str> {
    let values = headers.get_all(name).iter().filter_map(|value| value.to_str().ok());
    values.flat_map(|value| value.split(',')).map(str::trim).filter(|member| !member.is_empty())
}

//! Packed bodies, unpacked a little at a time.

use std::collections::VecDeque;
use std::io::{Result, Write as _};

use bytes::Bytes;
use flate2::write::{DeflateDecoder, MultiGzDecoder, ZlibDecoder};

use super::garbled;

/// How many packed bytes are unpacked in one step: they become at most a thousand times as many.
const STEP: usize = 512;

/// A content coding that can be taken off.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Coding {
    /// `gzip`.
    Gzip,
    /// `deflate`: zlib by the standard; some servers send the bare stream.
    Deflate,
}

/// Unpacks one body.
pub(super) struct Decoder {
    input: VecDeque<Bytes>,
    engine: Engine,
}

enum Engine {
    /// Nothing came yet; an empty body is whole in any coding.
    Unbegun(Coding),
    /// The first byte of a `deflate`: two are needed to tell its kind.
    First(u8),
    Gzip(Box<MultiGzDecoder<Vec<u8>>>),
    Zlib(Box<ZlibDecoder<Vec<u8>>>),
    Bare(Box<DeflateDecoder<Vec<u8>>>),
}

impl Decoder {
    pub(super) fn new(coding: Coding) -> Self {
        Self { input: VecDeque::new(), engine: Engine::Unbegun(coding) }
    }

    pub(super) fn push(&mut self, packed: Bytes) {
        self.input.push_back(packed);
    }

    pub(super) fn has_input(&self) -> bool {
        !self.input.is_empty()
    }

    /// The next unpacked bytes of what was pushed; `None` when it is used up.
    pub(super) fn step(&mut self) -> Option<Result<Bytes>> {
        while let Some(front) = self.input.front_mut() {
            let part = front.split_to(front.len().min(STEP));
            if front.is_empty() {
                self.input.pop_front();
            }
            match self.engine.take(&part) {
                Ok(plain) if plain.is_empty() => {}
                Ok(plain) => return Some(Ok(plain.into())),
                Err(error) => return Some(Err(garbled(error))),
            }
        }
        None
    }

    /// The last bytes. An error where the packed body is not whole: half of one is never passed off as all.
    pub(super) fn finish(&mut self) -> Result<Bytes> {
        self.engine.finish().map(Bytes::from).map_err(garbled)
    }
}

impl Engine {
    fn take(&mut self, packed: &[u8]) -> Result<Vec<u8>> {
        match (&*self, packed) {
            (_, []) => return Ok(Vec::new()),
            (Self::Unbegun(Coding::Gzip), _) => *self = Self::Gzip(Box::new(MultiGzDecoder::new(Vec::new()))),
            (Self::Unbegun(Coding::Deflate), [first]) => *self = Self::First(*first),
            (Self::Unbegun(Coding::Deflate), [first, second, ..]) => *self = Self::deflate(*first, *second),
            (Self::First(first), [second, ..]) => {
                let first = *first;
                *self = Self::deflate(first, *second);
                self.write(&[first])?;
            }
            _ => {}
        }
        self.write(packed)
    }

    /// A zlib stream's first two bytes name its method and, as one number, are a multiple of 31.
    fn deflate(first: u8, second: u8) -> Self {
        if first & 15 == 8 && u16::from_be_bytes([first, second]).is_multiple_of(31) {
            Self::Zlib(Box::new(ZlibDecoder::new(Vec::new())))
        } else {
            Self::Bare(Box::new(DeflateDecoder::new(Vec::new())))
        }
    }

    /// Writes and flushes: an event must not wait in the unpacker for the next one.
    fn write(&mut self, packed: &[u8]) -> Result<Vec<u8>> {
        match self {
            Self::Unbegun(_) | Self::First(_) => Ok(Vec::new()),
            Self::Gzip(it) => {
                it.write_all(packed)?;
                it.flush()?;
                Ok(std::mem::take(it.get_mut()))
            }
            Self::Zlib(it) => {
                it.write_all(packed)?;
                it.flush()?;
                Ok(std::mem::take(it.get_mut()))
            }
            Self::Bare(it) => {
                it.write_all(packed)?;
                it.flush()?;
                Ok(std::mem::take(it.get_mut()))
            }
        }
    }

    fn finish(&mut self) -> Result<Vec<u8>> {
        match self {
            Self::Unbegun(_) => Ok(Vec::new()),
            Self::First(_) => Err(std::io::ErrorKind::UnexpectedEof.into()),
            Self::Gzip(it) => it.try_finish().map(|()| std::mem::take(it.get_mut())),
            Self::Zlib(it) => it.try_finish().map(|()| std::mem::take(it.get_mut())),
            Self::Bare(it) => it.try_finish().map(|()| std::mem::take(it.get_mut())),
        }
    }
}

impl std::fmt::Debug for Decoder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Decoder")
    }
}

//! What an answer must not bring back: the leased secret, masked at equal length wherever the provider
//! echoes it.
//!
//! One [`Needle`] a key knows every form of its secret, or of several where a key is put in as more than one
//! text (Basic: its base64, and the password in it): as it is, each character percent-encoded (once or
//! twice over) or escaped as in JSON or not, in any mix, and the base64 of any text that holds it, in
//! either alphabet. It masks what is whole ([`Needle::mask`]: header values, reason phrases, trailers, a
//! WebSocket's messages) and, through a [`Scrubber`], what streams.
//!
//! **What is held back.** At a chunk's end, only what may yet become the secret: a live prefix of a form,
//! from its fourth byte on and never longer than the form. All else goes on at once, uncopied. The held
//! bytes follow when the next chunk decides, or at the body's end. No timer lets them go: four bytes of a
//! random key that are followed by silence are practically always the key, and its first part would be out
//! before the rest could be masked. Events and lines end in a line end, which no form holds, so no event
//! ever waits; a stream of bare text that falls silent right after such a prefix waits for its next byte.
//!
//! **What it does not see.** A secret that is divided (over two events, two ranges, two answers), packed,
//! encrypted, or written in another form than those above. At most the first three bytes of a secret go
//! out before it is known for one, and of its base64 the two characters at its edges, which it shares with
//! its neighbours and of which no more than four bits each are its own.
//!
//! **Why no crate.** With each character in several spellings, an automaton over all mixes is exponential
//! (a set of plain needles too), a stream through `aho-corasick` is buffered, and its tables are copies of
//! the secret that nobody wipes. So the text is sampled at a stride for what a form may hold, which costs
//! less than reading all of it, and only where a sample is suspect are forms tried, byte by byte.

use std::io::{Error, ErrorKind};

mod decode;
mod filter;
mod forms;
mod frames;
mod needle;
mod stream;
#[cfg(test)]
mod tests;

pub use filter::{Filter, Packed, compression, keep_decodable};
pub use frames::Frames;
pub use needle::Needle;
pub use stream::Scrubber;

pub use decode::Coding;

/// Secrets shorter than this are masked in headers only: in a body they would mask innocent text.
pub const LEAST: usize = crate::model::SHORT_SECRET;

/// What stands where the secret stood.
const MASK: u8 = b'*';

/// Live prefixes from this length on are held back.
const HOLD: usize = 4;

/// Why packed bytes could not be read.
fn garbled(why: impl std::fmt::Display) -> Error {
    Error::new(ErrorKind::InvalidData, format!("its compressed answer is broken: {why}"))
}

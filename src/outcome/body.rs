//! A refusal's body, decoded once and never past a bound.

use std::io::Read;

use flate2::read::{DeflateDecoder, MultiGzDecoder, ZlibDecoder};
use http::{HeaderMap, header};
use serde::Serialize;
use serde_json::Value;

use super::MAX_BODY;

/// How many elements of an array are looked at. Providers send a handful; an array as long as a body can
/// be, times every rule and field, would hold up the other requests of the thread.
const ELEMENTS: usize = 64;

/// What a body turned out to be.
#[derive(Debug)]
pub(super) enum Body {
    /// JSON: codes and phrases can be read.
    Json(Value),
    /// Something else, such as a gateway's HTML: only phrases can.
    Text(String),
    /// Absent, cut off, garbage, or in a coding that is not decoded here: the status alone decides.
    Unreadable,
    /// No rule and no wait looks into it.
    NotAsked,
}

/// The same in a word.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum BodyKind {
    /// Codes and phrases were looked for.
    Json,
    /// Phrases were.
    Text,
    /// It could not be read: absent, cut off, larger than [`super::MAX_BODY`], garbage, or in another coding.
    Unreadable,
    /// No rule and no wait looks into it.
    NotAsked,
}

impl Body {
    /// Decodes `bytes` as the headers say. Half a JSON text counts as unreadable: which half is missing
    /// cannot be known, and the part that is there may be the caller's own words.
    pub(super) fn decode(headers: &HeaderMap, bytes: &[u8]) -> Self {
        let plain = match unpack(headers, &bytes[..bytes.len().min(MAX_BODY)]) {
            Some(plain) if !plain.trim_ascii().is_empty() => plain,
            _ => return Self::Unreadable,
        };
        let plain = plain.strip_prefix(b"\xef\xbb\xbf").unwrap_or(&plain).trim_ascii();
        // The parser bounds its own depth.
        match serde_json::from_slice(plain) {
            Ok(value) => Self::Json(value),
            Err(_) if matches!(plain.first(), Some(b'{' | b'[')) => Self::Unreadable,
            Err(_) => Self::Text(String::from_utf8_lossy(plain).into_owned()),
        }
    }

    /// What it turned out to be.
    pub(super) fn kind(&self) -> BodyKind {
        match self {
            Self::Json(_) => BodyKind::Json,
            Self::Text(_) => BodyKind::Text,
            Self::Unreadable => BodyKind::Unreadable,
            Self::NotAsked => BodyKind::NotAsked,
        }
    }

    /// The values at a JSON pointer in which `*` stands for every element of an array. A body that is
    /// itself an array counts as each of its elements: some providers wrap the error of a streamed call.
    pub(super) fn at(&self, pointer: &str) -> Vec<&Value> {
        let Self::Json(root) = self else { return Vec::new() };
        let mut found: Vec<&Value> = match root {
            Value::Array(all) => all.iter().take(ELEMENTS).collect(),
            one => vec![one],
        };
        for step in pointer.split('/').skip(1) {
            let name = step.replace("~1", "/").replace("~0", "~");
            found = found
                .into_iter()
                .flat_map(|value| match value {
                    Value::Array(all) if name == "*" => all.iter().take(ELEMENTS).collect(),
                    Value::Array(all) => {
                        name.parse().ok().and_then(|i: usize| all.get(i)).into_iter().collect()
                    }
                    Value::Object(map) => map.get(&name).into_iter().collect::<Vec<_>>(),
                    _ => Vec::new(),
                })
                .take(ELEMENTS)
                .collect();
        }
        found
    }

    /// Every text in the body in which a phrase may stand; at `fields` only where any are given.
    pub(super) fn texts(&self, fields: &[String]) -> Vec<&str> {
        let mut texts = Vec::new();
        match self {
            Self::Json(root) if fields.is_empty() => collect_texts(root, &mut texts),
            Self::Json(_) => {
                for value in fields.iter().flat_map(|field| self.at(field)) {
                    collect_texts(value, &mut texts);
                }
            }
            Self::Text(text) if fields.is_empty() => texts.push(text.as_str()),
            Self::Text(_) | Self::Unreadable | Self::NotAsked => {}
        }
        texts
    }
}

/// A string or a number as text; nothing else is a code or a wait.
pub(super) fn scalar(value: &Value) -> Option<String> {
    match value {
        Value::String(text) => Some(text.clone()),
        Value::Number(number) => Some(number.to_string()),
        _ => None,
    }
}

/// The strings below `value`; its depth is bounded by the parser's.
fn collect_texts<'a>(value: &'a Value, texts: &mut Vec<&'a str>) {
    match value {
        Value::String(text) => texts.push(text),
        Value::Array(all) => all.iter().for_each(|one| collect_texts(one, texts)),
        Value::Object(map) => map.values().for_each(|one| collect_texts(one, texts)),
        _ => {}
    }
}

/// `None` where the coding is not known here, the packed bytes are cut off or broken, or what they hold is
/// larger than [`MAX_BODY`].
fn unpack(headers: &HeaderMap, bytes: &[u8]) -> Option<Vec<u8>> {
    let mut codings = headers.get_all(header::CONTENT_ENCODING).iter();
    let coding = codings.next().map(http::HeaderValue::as_bytes).unwrap_or_default().trim_ascii();
    if codings.next().is_some() {
        return None;
    }
    match coding.to_ascii_lowercase().as_slice() {
        b"" | b"identity" => Some(bytes.to_vec()),
        b"gzip" | b"x-gzip" => bounded(MultiGzDecoder::new(bytes)),
        // RFC 9110 means zlib by it; some servers send the bare stream.
        b"deflate" => bounded(ZlibDecoder::new(bytes)).or_else(|| bounded(DeflateDecoder::new(bytes))),
        b"br" => bounded(brotli_decompressor::Decompressor::new(bytes, 4096)),
        b"zstd" => unpack_zstd(bytes),
        _ => None,
    }
}

/// The largest window of a zstd frame that a decoder has to have (RFC 9659). A frame that asks for more
/// would have it allocated before its first byte is seen.
const ZSTD_WINDOW: u64 = 8 << 20;

fn unpack_zstd(bytes: &[u8]) -> Option<Vec<u8>> {
    if zstd_window(bytes)? > ZSTD_WINDOW {
        return None;
    }
    bounded(ruzstd::decoding::StreamingDecoder::new(bytes).ok()?)
}

/// The window that a frame's header asks for (RFC 8878, section 3.1.1.1); the whole of the content where it
/// is said to be one segment.
fn zstd_window(frame: &[u8]) -> Option<u64> {
    let rest = frame.strip_prefix(&[0x28, 0xb5, 0x2f, 0xfd])?;
    let (&about, rest) = rest.split_first()?;
    let single_segment = about & 0x20 != 0;
    if !single_segment {
        let &window = rest.first()?;
        let base = 1_u64 << (10 + (window >> 3));
        return Some(base + base / 8 * u64::from(window & 7));
    }
    let dictionary = [0, 1, 2, 4][usize::from(about & 3)];
    let size = [1, 2, 4, 8][usize::from(about >> 6)];
    let field = rest.get(dictionary..dictionary + size)?;
    let mut number = [0; 8];
    number[..size].copy_from_slice(field);
    Some(u64::from_le_bytes(number))
}

fn bounded(packed: impl Read) -> Option<Vec<u8>> {
    let mut plain = Vec::new();
    let read = packed.take(MAX_BODY as u64 + 1).read_to_end(&mut plain);
    (read.is_ok() && plain.len() <= MAX_BODY).then_some(plain)
}

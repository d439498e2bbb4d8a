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

    /// Every text in the body in which a phrase may stand; where `fields` are given, the texts that stand right
    /// there: below them an answer may list what its caller sent.
    pub(super) fn texts(&self, fields: &[String]) -> Vec<&str> {
        let mut texts = Vec::new();
        match self {
            Self::Json(root) if fields.is_empty() => collect_texts(root, &mut texts),
            Self::Json(_) => {
                texts.extend(fields.iter().flat_map(|field| self.at(field)).filter_map(Value::as_str));
            }
            Self::Text(text) if fields.is_empty() => texts.push(text.as_str()),
            Self::Text(_) | Self::Unreadable | Self::NotAsked => {}
        }
        texts
    }

    /// The texts at `fields`; all of a body that is no JSON, for it is nothing but a message.
    pub(super) fn messages(&self, fields: &[String]) -> Vec<&str> {
        match self {
            Self::Text(text) => vec![text],
            _ => self.texts(fields),
        }
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

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const PLAIN: &str = r#"{"error":{"message":"You exceeded your current quota.","type":"insufficient_quota","param":null,"code":"insufficient_quota"}}"#;

    /// Brotli of `PLAIN`, by another implementation.
    const BROTLI: &str = "1b7c00e08cd315f32384750fca6da98ecb62eb2691edf3101c082b9d3e9d1c307fdf2eb70e9c48647986c10ed8711e16a529341ae3032bcbf45d0a0547fa66deca772683a91620c43b81c874c0c605cf68d5";

    /// The same of 70,000 spaces and `PLAIN`.
    const BROTLI_BOMB: &str = "5bec1101c07160c7322b0cf97030ddbc1a21c9ac6e2ed5d1c5d64d226a1e3f5f7889ec954e9f4e0e98bfe3a51507984589e5097a4514cd5a48fb531202b0c86537f5c3542328dc426d3b0b9fbaa643f388af9c11ea5dc09c28032025b090fc5e9a13fb";

    fn bytes(hex: &str) -> Vec<u8> {
        (0..hex.len()).step_by(2).map(|at| u8::from_str_radix(&hex[at..at + 2], 16).unwrap()).collect()
    }

    fn zstd(plain: &[u8]) -> Vec<u8> {
        ruzstd::encoding::compress_to_vec(plain, ruzstd::encoding::CompressionLevel::Fastest)
    }

    fn kind(coding: &'static str, packed: &[u8]) -> BodyKind {
        let headers = [(header::CONTENT_ENCODING, http::HeaderValue::from_static(coding))];
        Body::decode(&headers.into_iter().collect(), packed).kind()
    }

    #[test]
    fn brotli_and_zstd_are_read_to_the_bound_and_not_past_it() {
        for (coding, packed, bomb) in [
            ("br", bytes(BROTLI), bytes(BROTLI_BOMB)),
            ("zstd", zstd(PLAIN.as_bytes()), zstd(format!("{}{PLAIN}", " ".repeat(70_000)).as_bytes())),
        ] {
            assert_eq!(kind(coding, &packed), BodyKind::Json, "{coding}");
            assert_eq!(kind(coding, &packed[..packed.len() / 2]), BodyKind::Unreadable, "half of {coding}");
            assert_eq!(kind(coding, PLAIN.as_bytes()), BodyKind::Unreadable, "no {coding}");
            assert_eq!(kind(coding, &bomb), BodyKind::Unreadable, "a bomb of {coding}");
        }
    }

    #[test]
    fn a_zstd_frame_that_asks_for_a_large_window_is_refused_before_it_is_had() {
        let magic = [0x28, 0xb5, 0x2f, 0xfd];
        let frame = |rest: &[u8]| [&magic, rest].concat();
        // A descriptor without one segment, then exponent and mantissa.
        assert_eq!(zstd_window(&frame(&[0x00, 13 << 3])), Some(8 << 20));
        assert_eq!(zstd_window(&frame(&[0x00, (13 << 3) | 1])), Some(9 << 20));
        assert_eq!(zstd_window(&frame(&[0x00, 0xff])), Some((1 << 41) / 8 * 15));
        // One segment: the content's size, in 1, 2, 4 or 8 bytes, behind a dictionary's id.
        assert_eq!(zstd_window(&frame(&[0x20, 200])), Some(200));
        assert_eq!(zstd_window(&frame(&[0xa3, 1, 2, 3, 4, 0, 0, 0, 1])), Some(1 << 24));
        assert_eq!(zstd_window(&frame(&[0xa3, 1])), None);
        assert_eq!(zstd_window(b"\x28\xb5"), None);
        assert_eq!(unpack_zstd(&frame(&[0x00, 0xff, 1, 0, 0])), None);
    }

    proptest! {
        #[test]
        fn no_packed_bytes_make_it_panic_or_give_more_than_the_bound(
            mut packed in proptest::collection::vec(any::<u8>(), 0..200),
            coding in proptest::sample::select(vec!["br", "zstd", "gzip", "deflate"]),
            keep in 0_usize..200,
        ) {
            let real = if coding == "br" { bytes(BROTLI) } else { zstd(PLAIN.as_bytes()) };
            packed.splice(0..0, real[..keep.min(real.len())].iter().copied());
            let headers = [(header::CONTENT_ENCODING, http::HeaderValue::from_static(coding))];
            let plain = unpack(&headers.into_iter().collect(), &packed);
            prop_assert!(plain.is_none_or(|plain| plain.len() <= MAX_BODY));
        }
    }
}

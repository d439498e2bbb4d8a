//! The matcher against a reference that looks at whole texts and knows no tricks.
#![allow(clippy::unwrap_used, clippy::expect_used)] // a test that fails may panic

use std::collections::VecDeque;
use std::io::Write as _;
use std::sync::Arc;

use base64::Engine as _;
use bytes::Bytes;
use http::HeaderMap;
use http::header::{ACCEPT_ENCODING, CONTENT_ENCODING};
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::Index;

use super::*;
use crate::model::Secret;

const SECRET: &str = "sk-proj-4fT9+xQ/2mB=7Lw0Zc8Kd5";

fn needle(secret: &str) -> Arc<Needle> {
    Arc::new(Needle::new(&Secret::new(secret.to_owned())))
}

/// Every spelling of one byte.
fn spellings(byte: u8) -> Vec<String> {
    let mut all = vec![char::from(byte).to_string()];
    for hex in [format!("{byte:02x}"), format!("{byte:02X}")] {
        all.extend([format!("%{hex}"), format!("%25{hex}"), format!("\\u00{hex}")]);
    }
    if matches!(byte, b'/' | b'"' | b'\\') {
        all.push(format!("\\{}", char::from(byte)));
    }
    all
}

/// The texts that hold nothing but the secret, by the definition of base64: encoded behind each number of
/// bytes, what is the same whatever stands around it.
fn bases(secret: &str) -> Vec<Vec<Vec<u8>>> {
    let mut all = vec![secret.bytes().map(|byte| vec![byte]).collect()];
    for before in 0..3 {
        let encoded = |filler: u8| {
            let text = [vec![filler; before], secret.into(), vec![filler; 3]].concat();
            base64::engine::general_purpose::STANDARD.encode(text).into_bytes()
        };
        let (one, other) = (encoded(0), encoded(255));
        let same: Vec<Vec<u8>> = one
            .iter()
            .zip(&other)
            .filter(|(a, b)| a == b)
            .map(|(byte, _)| match byte {
                b'+' | b'/' => vec![*byte, if *byte == b'+' { b'-' } else { b'_' }],
                _ => vec![*byte],
            })
            .filter(|symbol| symbol != b"=")
            .collect();
        if same.len() >= 8 {
            all.push(same);
        }
    }
    all
}

/// Where each form that begins at `from` ends.
fn ends(text: &[u8], from: usize, form: &[Vec<u8>]) -> Vec<usize> {
    let mut ways = vec![from];
    for symbol in form {
        let mut next = Vec::new();
        for at in ways {
            for spelling in symbol.iter().flat_map(|byte| spellings(*byte)) {
                let end = at + spelling.len();
                if text.get(at..end).is_some_and(|part| part.eq_ignore_ascii_case(spelling.as_bytes()))
                    && (spelling.len() > 1 || text[at] == spelling.as_bytes()[0])
                {
                    next.push(end);
                }
            }
        }
        next.sort_unstable();
        next.dedup();
        ways = next;
    }
    ways
}

fn reference(secret: &str, text: &[u8]) -> Vec<u8> {
    let mut masked = text.to_vec();
    for form in bases(secret) {
        for from in 0..text.len() {
            for end in ends(text, from, &form) {
                masked[from..end].fill(b'*');
            }
        }
    }
    masked
}

/// Whether the text's end, from `from` on, begins a form.
fn is_live(secret: &str, text: &[u8], from: usize) -> bool {
    bases(secret).iter().any(|form| {
        (1..=form.len()).any(|symbols| {
            // What is cut off inside a spelling is live if some symbol would complete it.
            let (last, whole) = form[..symbols].split_last().unwrap();
            ends(text, from, whole).iter().any(|at| {
                *at == text.len()
                    || last.iter().flat_map(|byte| spellings(*byte)).any(|spelling| {
                        let rest = &text[*at..];
                        rest.len() < spelling.len()
                            && spelling.as_bytes()[..rest.len()].eq_ignore_ascii_case(rest)
                    })
            })
        })
    })
}

/// Feeds `text` in `chunks` and checks at each step what is held back.
fn stream(secret: &str, text: &[u8], cuts: &[usize]) -> Vec<u8> {
    let mut scrubber = Scrubber::new(needle(secret));
    let (mut out, mut all) = (VecDeque::new(), Vec::new());
    let mut at = 0;
    for cut in cuts.iter().copied().chain([text.len()]) {
        scrubber.push(Bytes::copy_from_slice(&text[at..cut]), &mut out);
        at = cut;
        all.extend(out.drain(..).flatten());
        let held = scrubber.held();
        assert_eq!(all.len() + held, at, "nothing is lost");
        if held > 0 {
            let begins =
                (0..=at - held).rev().any(|from| at - from >= HOLD && is_live(secret, &text[..at], from));
            assert!(begins, "{held} bytes are held that begin no form");
        }
        let longest = bases(secret).iter().map(|form| form.len() * 6).max().unwrap();
        assert!(held < longest);
    }
    scrubber.finish(&mut out);
    all.extend(out.drain(..).flatten());
    all
}

/// What may differ from the reference: the first bytes of a form that had gone out before it was known.
fn agrees(secret: &str, text: &[u8], cuts: &[usize]) {
    let (got, want) = (stream(secret, text, cuts), reference(secret, text));
    assert_eq!(got.len(), text.len());
    let mut unmasked = 0;
    for at in 0..text.len() {
        if got[at] == want[at] {
            unmasked = 0;
            continue;
        }
        let lossy = || format!("{:?} for {:?}", String::from_utf8_lossy(&got), String::from_utf8_lossy(text));
        assert_eq!((want[at], got[at]), (b'*', text[at]), "{}", lossy());
        unmasked += 1;
        assert!(unmasked < HOLD, "{unmasked} bytes of the secret are out: {}", lossy());
        let cut_behind = cuts.iter().any(|cut| *cut > at && *cut - at < HOLD);
        assert!(cut_behind, "byte {at} is out though no chunk ended there: {}", lossy());
    }
}

fn secrets() -> impl Strategy<Value = String> {
    prop_oneof![
        Just(SECRET.to_owned()),
        "[ -~]{16,40}",
        "[a-b]{16,20}", // overlaps itself
        "[%25]{16,18}", // is its own spelling
        r#"[\\u0/"]{16,18}"#,
        Just("abcabcabcabcabcabc".to_owned()),
    ]
}

/// One piece of a text: what, and choices for its spelling.
fn pieces() -> impl Strategy<Value = Vec<(u8, Vec<Index>, Index)>> {
    vec((0..8_u8, vec(any::<Index>(), 8), any::<Index>()), 0..8)
}

fn text_of(secret: &str, pieces: &[(u8, Vec<Index>, Index)]) -> Vec<u8> {
    let forms = bases(secret);
    let mut text = Vec::new();
    for (kind, choices, cut) in pieces {
        let form = &forms[choices[0].index(forms.len())];
        let spelt: Vec<u8> = form
            .iter()
            .enumerate()
            .flat_map(|(at, symbol)| {
                let choice = choices[at % choices.len()];
                let all = spellings(symbol[choice.index(symbol.len())]);
                // Mostly as it is, so that all kinds of mixes come.
                let plain = kind % 2 == 0 || choice.index(3) > 0;
                all[if plain { 0 } else { choice.index(all.len()) }].clone().into_bytes()
            })
            .collect();
        match kind {
            0..4 => text.extend(spelt),
            4 | 5 => text.extend(&spelt[..cut.index(spelt.len())]),
            6 => text.extend(&spelt[cut.index(spelt.len())..]),
            _ => text.extend(choices.iter().map(|choice| b"ab%\\u025/\"sk \n"[choice.index(13)])),
        }
    }
    text
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_text_in_any_chunks_comes_out_as_the_reference_masks_it_whole(
        secret in secrets(), pieces in pieces(), cuts in vec(any::<Index>(), 0..12),
    ) {
        let text = text_of(&secret, &pieces);
        let mut cuts: Vec<usize> = cuts.iter().map(|cut| cut.index(text.len() + 1)).collect();
        cuts.sort_unstable();
        agrees(&secret, &text, &cuts);
        agrees(&secret, &text, &[]);
        agrees(&secret, &text, &(1..text.len()).collect::<Vec<_>>());
        let whole = needle(&secret).mask(&text).map_or(text.clone(), |(masked, _)| masked.to_vec());
        prop_assert_eq!(whole, reference(&secret, &text));
    }

    #[test]
    fn a_short_secret_is_masked_in_a_whole_text(secret in "[ -~]{1,9}", noise in "[ -~]{0,30}", at in any::<Index>()) {
        let at = at.index(noise.len() + 1);
        let text = format!("{}{secret}{}", &noise[..at], &noise[at..]);
        let (masked, _) = needle(&secret).mask(text.as_bytes()).unwrap();
        prop_assert_eq!(masked.to_vec(), reference(&secret, text.as_bytes()));
    }
}

#[test]
fn a_secret_split_at_any_byte_is_masked_and_only_a_prefix_below_four_goes_out() {
    let text = format!("before {SECRET} after");
    for cut in 0..text.len() {
        let out = String::from_utf8(stream(SECRET, text.as_bytes(), &[cut])).unwrap();
        let begun = cut.checked_sub(7).filter(|begun| *begun < HOLD).unwrap_or(0);
        assert_eq!(out, format!("before {}{} after", &SECRET[..begun], "*".repeat(SECRET.len() - begun)));
    }
}

#[test]
fn a_chunk_without_a_trace_of_it_goes_on_as_the_very_same_memory() {
    let mut scrubber = Scrubber::new(needle(SECRET));
    let mut out = VecDeque::new();
    for text in ["data: {\"a\": \"sk-proj-other\"}\n\n", "s", "k", "-", " ends with sk", "%", "\\u0"] {
        let chunk = Bytes::from(text);
        let at = chunk.as_ptr();
        scrubber.push(chunk, &mut out);
        let got: Vec<Bytes> = out.drain(..).collect();
        assert_eq!(got, [text]);
        assert_eq!(got[0].as_ptr(), at, "{text:?} was copied");
    }
    assert_eq!(scrubber.held(), 0);
}

#[test]
fn a_prefix_is_let_go_with_the_byte_that_decides_or_at_the_end() {
    let mut scrubber = Scrubber::new(needle(SECRET));
    let mut out = VecDeque::new();
    scrubber.push(Bytes::from("id sk-proj-4"), &mut out);
    assert_eq!(out.drain(..).collect::<Vec<_>>(), ["id "]);
    scrubber.push(Bytes::from("2\n"), &mut out);
    assert_eq!(out.drain(..).collect::<Vec<_>>(), ["sk-proj-4", "2\n"]);
    scrubber.push(Bytes::from("sk-proj-4"), &mut out);
    assert!(out.is_empty());
    scrubber.finish(&mut out);
    assert_eq!(out, ["sk-proj-4"]);
    assert_eq!(scrubber.take_masked(), 0);
}

#[test]
fn a_name_is_found_whatever_its_case() {
    let needle = needle("sk-ABC");
    assert!(needle.is_in_name("x-sk-abc-y") && !needle.is_in_name("x-sk-ab"));
}

fn packed(coding: &str, text: &[u8]) -> Vec<u8> {
    let level = flate2::Compression::default();
    match coding {
        "gzip" => {
            let mut to = flate2::write::GzEncoder::new(Vec::new(), level);
            to.write_all(text).unwrap();
            to.finish().unwrap()
        }
        "zlib" => {
            let mut to = flate2::write::ZlibEncoder::new(Vec::new(), level);
            to.write_all(text).unwrap();
            to.finish().unwrap()
        }
        _ => {
            let mut to = flate2::write::DeflateEncoder::new(Vec::new(), level);
            to.write_all(text).unwrap();
            to.finish().unwrap()
        }
    }
}

fn run(filter: &mut Filter, body: &[u8], chunk: usize) -> std::io::Result<Vec<u8>> {
    let mut all = Vec::new();
    for part in body.chunks(chunk) {
        filter.feed(Bytes::copy_from_slice(part));
        while let Some(piece) = filter.take() {
            all.extend(piece?);
        }
    }
    filter.finish();
    while let Some(piece) = filter.take() {
        all.extend(piece?);
    }
    assert!(filter.is_empty());
    Ok(all)
}

#[test]
fn a_packed_body_is_unpacked_and_masked_in_chunks_of_any_size_and_half_of_one_is_an_error() {
    let text = format!("{}{SECRET} and more", "padding ".repeat(1000)).into_bytes();
    let masked = reference(SECRET, &text);
    for (name, coding) in [("gzip", Coding::Gzip), ("zlib", Coding::Deflate), ("bare", Coding::Deflate)] {
        let body = packed(name, &text);
        for chunk in [1, 7, 100_000] {
            let filter = || Filter::new(needle(SECRET), Some(coding));
            let out = run(&mut filter(), &body, chunk).unwrap();
            // Unpacked in small pieces, up to three of its first bytes go out.
            let young = if chunk < 100 { HOLD - 1 } else { 0 };
            assert_eq!(out.len(), masked.len());
            assert!(out.starts_with(&masked[..8000]), "{name} by {chunk}");
            assert!(out.ends_with(&masked[8000 + young..]), "{name} by {chunk}");
            assert!(run(&mut filter(), &body[..body.len() - 9], chunk).is_err(), "{name} by {chunk}, cut");
        }
    }
    assert_eq!(run(&mut Filter::new(needle(SECRET), Some(Coding::Gzip)), b"", 1).unwrap(), b"");
    assert!(run(&mut Filter::new(needle(SECRET), Some(Coding::Gzip)), b"plain text", 3).is_err());
}

#[test]
fn what_unpacks_to_very_much_comes_in_small_pieces() {
    let body = packed("gzip", &vec![b'a'; 64 << 20]);
    let mut filter = Filter::new(needle(SECRET), Some(Coding::Gzip));
    filter.feed(body.into());
    let mut len = 0;
    while let Some(piece) = filter.take() {
        let piece = piece.unwrap();
        assert!(piece.len() <= 1 << 20, "{} bytes at once", piece.len());
        len += piece.len();
    }
    assert_eq!(len, 64 << 20);
}

#[test]
fn content_encoding_is_read_as_it_is_written() {
    for (text, packed) in [
        ("gzip", Packed::As(Coding::Gzip)),
        ("X-GZIP", Packed::As(Coding::Gzip)),
        ("deflate", Packed::As(Coding::Deflate)),
        ("identity", Packed::No),
        ("utf-8", Packed::No),
        ("br", Packed::Otherwise),
        ("gzip, gzip", Packed::Otherwise),
        ("identity, gzip", Packed::As(Coding::Gzip)),
    ] {
        let headers: HeaderMap = [(CONTENT_ENCODING, text.parse().unwrap())].into_iter().collect();
        assert_eq!(compression(&headers), packed, "{text}");
    }
}

#[test]
fn only_codings_that_can_be_taken_off_are_asked_for() {
    for (text, kept) in [
        ("gzip, deflate, br, zstd", "gzip, deflate"),
        ("br;q=1.0, gzip;q=0.8, *;q=0.1", "gzip;q=0.8"),
        ("gzip,deflate", "gzip,deflate"),
        ("br", "identity"),
        ("*", "identity"),
    ] {
        let mut headers: HeaderMap = [(ACCEPT_ENCODING, text.parse().unwrap())].into_iter().collect();
        keep_decodable(&mut headers);
        assert_eq!(headers[ACCEPT_ENCODING], kept);
    }
    let mut none = HeaderMap::new();
    keep_decodable(&mut none);
    assert!(none.is_empty());
}

#[test]
fn a_coding_beside_bytes_that_are_no_text_is_not_asked_for_nor_taken_for_none() {
    let mut headers = http::HeaderMap::new();
    let odd = http::HeaderValue::from_bytes(b"br, \xe9").unwrap();
    headers.insert(http::header::ACCEPT_ENCODING, odd.clone());
    super::keep_decodable(&mut headers);
    assert_eq!(headers[http::header::ACCEPT_ENCODING], "identity");
    headers.append(http::header::ACCEPT_ENCODING, odd.clone());
    headers.append(http::header::ACCEPT_ENCODING, "gzip".parse().unwrap());
    super::keep_decodable(&mut headers);
    assert_eq!(headers.get_all(http::header::ACCEPT_ENCODING).iter().collect::<Vec<_>>(), ["identity, gzip"]);
    headers.insert(http::header::CONTENT_ENCODING, odd);
    assert_eq!(super::compression(&headers), super::Packed::Otherwise);
}

#[test]
fn a_name_that_carries_the_secret_is_known_also_percent_encoded() {
    let needle = Needle::new(&Secret::new("sk-AbCdEf-0123456789".to_owned()));
    for name in [
        "x-sk-abcdef-0123456789",
        "x-%73%6b-abcdef-0123456789",
        "x-sk-%41bcdef-0123456789-y",
        "x-%2573k-abcdef-0123456789",
    ] {
        assert!(needle.is_in_name(name), "{name}");
    }
    for name in ["x-sk-abcdef-012345678", "x-%", "content-type", "x-%73%6b-%7"] {
        assert!(!needle.is_in_name(name), "{name}");
    }
}

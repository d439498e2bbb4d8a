//! Frames against a reference that has them whole.
#![allow(clippy::unwrap_used, clippy::expect_used)] // a test that fails may panic

use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::Index;

use super::*;
use crate::model::Secret;

const SECRET: &str = "sk-proj-4fT9+xQ/2mB=7Lw0Zc8Kd5";

fn needle() -> Arc<Needle> {
    Arc::new(Needle::new(&Secret::new(SECRET.to_owned())))
}

/// A frame as a server sends it: `first` is its first byte.
fn frame(first: u8, payload: impl AsRef<[u8]>) -> Vec<u8> {
    let payload = payload.as_ref();
    let mut bytes = vec![first];
    match payload.len() {
        n @ 0..126 => bytes.push(u8::try_from(n).unwrap()),
        n @ 126..65536 => {
            bytes.push(126);
            bytes.extend(u16::try_from(n).unwrap().to_be_bytes());
        }
        n => {
            bytes.push(127);
            bytes.extend((n as u64).to_be_bytes());
        }
    }
    bytes.extend(payload);
    bytes
}

const FIN: u8 = 0x80;
const TEXT: u8 = 1;
const PING: u8 = FIN | 9;
const PONG: u8 = FIN | 0x0a;
const CLOSE: u8 = FIN | 8;

/// What comes out when `pieces` go in one by one; what came with each.
fn through(frames: &mut Frames, pieces: &[&[u8]]) -> Vec<Vec<u8>> {
    let mut all = Vec::new();
    for piece in pieces {
        frames.feed(Bytes::copy_from_slice(piece));
        all.push(taken(frames));
    }
    all
}

fn taken(frames: &mut Frames) -> Vec<u8> {
    std::iter::from_fn(|| frames.take()).flatten().collect()
}

fn masked(text: impl AsRef<[u8]>) -> Vec<u8> {
    let text = text.as_ref();
    needle().mask(text).map_or_else(|| text.to_vec(), |(masked, _)| masked.to_vec())
}

/// Fails unless `out` is `expected`, but for at most three bytes that went out before they were known for
/// the secret's.
#[track_caller]
fn assert_masked(out: &[u8], expected: &[u8], came: &[u8], what: &str) {
    let show = || format!("{what}: {:?}", String::from_utf8_lossy(out));
    assert_eq!(out.len(), expected.len(), "{}", show());
    let early: Vec<usize> = (0..out.len()).filter(|at| out[*at] != expected[*at]).collect();
    assert!(early.len() <= 3 && early.iter().all(|at| out[*at] == came[*at]), "{}", show());
}

#[test]
fn a_secret_in_one_frame_is_masked_wherever_the_bytes_are_cut() {
    let text = format!("before {SECRET} after");
    for first in [FIN | TEXT, FIN | 2] {
        let (came, expected) = (frame(first, &text), frame(first, masked(&text)));
        for cut in 0..=came.len() {
            let mut frames = Frames::new(needle(), false);
            let out = through(&mut frames, &[&came[..cut], &came[cut..]]).concat();
            assert_masked(&out, &expected, &came, &format!("cut at {cut}"));
            assert_eq!(frames.take_masked(), 1);
        }
    }
}

#[test]
fn a_secret_over_two_fragments_is_masked_with_control_frames_between_that_are_masked_too() {
    let text = format!("before {SECRET} after");
    let ping = format!("[{SECRET}]");
    for cut in 0..=text.len() {
        let came = [
            frame(TEXT, &text[..cut]),
            frame(PING, &ping),
            frame(PING, "innocent"),
            frame(FIN, &text[cut..]),
        ]
        .concat();
        let whole = masked(&text);
        let expected = [
            frame(TEXT, &whole[..cut]),
            frame(PING, masked(&ping)),
            frame(PING, "innocent"),
            frame(FIN, &whole[cut..]),
        ]
        .concat();
        let mut frames = Frames::new(needle(), false);
        let out = through(&mut frames, &came.chunks(3).collect::<Vec<_>>()).concat();
        assert_masked(&out, &expected, &came, &format!("cut at {cut}"));
    }
}

#[test]
fn each_byte_in_a_fragment_of_its_own_is_still_masked() {
    let mut frames = Frames::new(needle(), false);
    let mut pieces = vec![frame(TEXT, "")];
    for byte in SECRET.bytes() {
        pieces.push(frame(0, [byte]));
        pieces.push(frame(PING, ""));
    }
    pieces.push(frame(FIN, ""));
    let pieces: Vec<&[u8]> = pieces.iter().map(Vec::as_slice).collect();
    let out = through(&mut frames, &pieces).concat();
    assert_eq!(out.len(), pieces.concat().len());
    let payload: Vec<u8> =
        out.chunks(1).flatten().copied().filter(|byte| !matches!(*byte, 0 | 1 | FIN | PING)).collect();
    assert_eq!(String::from_utf8(payload).unwrap(), format!("sk-{}", "*".repeat(SECRET.len() - 3)));
}

#[test]
fn only_what_stands_behind_held_bytes_waits_and_a_messages_end_lets_them_go() {
    let mut frames = Frames::new(needle(), false);
    let (part, ping, rest) = (frame(TEXT, "see sk-proj-"), frame(PING, "?"), frame(FIN, "x"));
    let out = through(&mut frames, &[&part, &ping, &rest]);
    assert_eq!(
        out,
        [part[..part.len() - 8].to_vec(), vec![], [&part[part.len() - 8..], &ping, &rest].concat()]
    );
    // Nothing of the message is held: what stands between its fragments goes at once.
    let (part, ping) = (frame(TEXT, "see you"), frame(PING, "?"));
    assert_eq!(through(&mut frames, &[&part, &ping]), [part, ping]);
    // The end of a message, or a goodbye in the middle of it, decides.
    for last in [frame(FIN, "sk-proj-"), frame(CLOSE, [3, 232])] {
        let mut frames = Frames::new(needle(), false);
        let part = frame(TEXT, "sk-proj-");
        assert_eq!(through(&mut frames, &[&part, &last]).concat(), [part, last].concat());
    }
    let mut frames = Frames::new(needle(), false);
    let whole = frame(FIN | TEXT, "it begins with sk-proj-");
    assert_eq!(through(&mut frames, &[&whole]), [whole]);
}

#[test]
fn past_its_bound_what_waits_goes_and_the_held_bytes_are_masked() {
    let mut frames = Frames::new(needle(), false);
    let (head, tail) = SECRET.split_at(12);
    let mut came = frame(TEXT, head);
    let mut most = 0;
    let mut out = through(&mut frames, &[&came]).concat();
    for _ in 0..2000 {
        let ping = frame(PING, [b'.'; 100]);
        came.extend(&ping);
        frames.feed(ping.into());
        out.extend(taken(&mut frames));
        most = most.max(came.len() - out.len());
    }
    assert!(most <= MOST_BEHIND + 200, "{most} bytes wait");
    let last = frame(FIN, tail);
    came.extend(&last);
    out.extend(through(&mut frames, &[&last]).concat());
    let mut expected = came.clone();
    expected[2..14].fill(b'*');
    let end = came.len();
    expected[end - tail.len()..].fill(b'*');
    assert!(out == expected, "{}", String::from_utf8_lossy(&out[..40]));
}

#[test]
fn a_close_reason_is_masked_and_a_goodbye_is_noted() {
    let mut frames = Frames::new(needle(), false);
    assert!(!frames.said_goodbye());
    let reason = |text: &str| [&[3, 232][..], text.as_bytes()].concat();
    let (came, expected) = (frame(CLOSE, reason(SECRET)), frame(CLOSE, reason(&"*".repeat(SECRET.len()))));
    let out = through(&mut frames, &came.chunks(1).collect::<Vec<_>>()).concat();
    assert_eq!(out, expected);
    assert!(frames.said_goodbye());
    assert_eq!(frames.take_masked(), 1);
}

#[test]
fn a_packed_message_passes_where_that_was_agreed_on_and_only_there() {
    let text = frame(FIN | 0x40 | TEXT, SECRET);
    let more = [frame(0x40 | TEXT, SECRET), frame(PING, SECRET), frame(FIN, SECRET)].concat();
    let mut agreed = Frames::new(needle(), true);
    assert_eq!(through(&mut agreed, &[&text]).concat(), text);
    let masked_ping = [frame(0x40 | TEXT, SECRET), frame(PING, masked(SECRET)), frame(FIN, SECRET)].concat();
    assert_eq!(through(&mut agreed, &[&more]).concat(), masked_ping);
    // The next one is not packed.
    assert_eq!(
        through(&mut agreed, &[&frame(FIN | TEXT, SECRET)]).concat(),
        frame(FIN | TEXT, masked(SECRET))
    );
    let mut foreign = Frames::new(needle(), false);
    assert_eq!(through(&mut foreign, &[&text]).concat(), frame(FIN | 0x40 | TEXT, masked(SECRET)));
}

#[test]
fn what_no_server_may_send_goes_on_once_and_nothing_behind_it() {
    for (foreign, head) in [
        (vec![FIN | TEXT, 0x80 | 3, 1, 2, 3, 4, 5, 6, 7], 2),
        (frame(FIN | 3, "abc"), 5),
        (frame(FIN | 0x0b, "abc"), 5),
        (frame(9, "no part of a message may be"), 2 + 27),
        (frame(FIN | 9, "x".repeat(126)), 4 + 126),
    ] {
        let before = frame(FIN | TEXT, "hello");
        let parts = [frame(TEXT, &SECRET[..20]), frame(FIN, &SECRET[20..])].concat();
        let came = [&before[..], &foreign, &frame(FIN | TEXT, SECRET), &parts].concat();
        let expected = [&before[..], &foreign[..head]].concat();
        for size in [1, 2, 7, 1000] {
            let mut frames = Frames::new(needle(), false);
            let mut out = through(&mut frames, &came.chunks(size).collect::<Vec<_>>()).concat();
            frames.finish();
            out.extend(taken(&mut frames));
            assert_eq!(out, expected, "{foreign:?} by {size}");
        }
        // Where nothing is masked, all goes on.
        assert_eq!(through(&mut Frames::open(), &[&came]).concat(), came);
    }
}

#[test]
fn a_frame_that_no_server_may_send_hides_no_key() {
    let long = [&[FIN | 2, 127][..], &(1_u64 << 63).to_be_bytes()].concat();
    let split = [frame(TEXT, &SECRET[..20]), frame(FIN | 3, &SECRET[20..])].concat();
    let http = b"HTTP/1.1 400 Bad Request\r\n\r\n".to_vec();
    for came in [
        [long, SECRET.into()].concat(),
        frame(FIN | 3, SECRET),
        frame(FIN | 9, SECRET.repeat(4)),
        frame(9, SECRET),
        split,
        [http, frame(FIN | TEXT, SECRET)].concat(),
    ] {
        for size in [1, 7, 1000] {
            let mut frames = Frames::new(needle(), false);
            let mut out = through(&mut frames, &came.chunks(size).collect::<Vec<_>>()).concat();
            frames.finish();
            out.extend(taken(&mut frames));
            let halves = [SECRET.as_bytes(), &SECRET.as_bytes()[20..]];
            for half in halves {
                assert!(!out.windows(half.len()).any(|part| part == half), "{came:?} by {size}");
            }
        }
    }
}

#[test]
fn a_length_that_is_longer_than_it_need_be_hides_no_key() {
    let spelt = |first: u8, text: &str, wide: bool| {
        let length = (text.len() as u64).to_be_bytes();
        let length = if wide { [&[127][..], &length].concat() } else { [&[126][..], &length[6..]].concat() };
        [&[first][..], &length, text.as_bytes()].concat()
    };
    for wide in [false, true] {
        let message = |text: &str| [spelt(TEXT, &text[..20], wide), spelt(FIN, &text[20..], wide)].concat();
        let hidden = String::from_utf8(masked(SECRET)).unwrap();
        let mut frames = Frames::new(needle(), false);
        assert_eq!(through(&mut frames, &[&message(SECRET)]).concat(), message(&hidden), "{wide}");
    }
}

#[test]
fn of_a_message_that_breaks_off_what_was_held_stays_back_and_all_else_comes() {
    for (came, held) in [
        (frame(TEXT, "all of it")[..6].to_vec(), 0),
        (vec![FIN | TEXT], 0),
        (vec![FIN | TEXT, 127, 0, 0], 0),
        (frame(TEXT, "and sk-proj-"), 8),
        ([frame(TEXT, "and sk-proj-"), frame(PING, "")].concat(), 10),
        (frame(CLOSE, "reason")[..5].to_vec(), 3),
    ] {
        let mut frames = Frames::new(needle(), false);
        let mut out = through(&mut frames, &[&came]).concat();
        frames.finish();
        out.extend(taken(&mut frames));
        assert_eq!(out, came[..came.len() - held]);
    }
}

#[test]
fn a_read_without_a_trace_of_the_secret_goes_on_as_the_very_same_memory() {
    let mut frames = Frames::new(needle(), false);
    let came: Bytes =
        [frame(FIN | TEXT, "one"), frame(PING, "two"), frame(FIN | 2, vec![0; 70_000])].concat().into();
    frames.feed(came.clone());
    let out = frames.take().unwrap();
    assert_eq!((out.as_ptr(), out.len()), (came.as_ptr(), came.len()));
    assert_eq!(frames.take(), None);
}

fn any_frame() -> impl Strategy<Value = Vec<u8>> {
    any_part().prop_map(|(first, payload)| frame(first, payload))
}

/// A frame in which the secret cannot stand, nor a part of it that counts.
fn any_harmless_frame() -> impl Strategy<Value = Vec<u8>> {
    any_part().prop_map(|(first, mut payload)| {
        for byte in payload.iter_mut().filter(|byte| **byte == b'k') {
            *byte = b'K';
        }
        frame(first, payload)
    })
}

/// A frame's first byte and its payload.
fn any_part() -> impl Strategy<Value = (u8, Vec<u8>)> {
    let payload = prop_oneof![
        4 => vec(prop::sample::select(b"sk-proj-4fT9 .".to_vec()), 0..40),
        1 => vec(any::<u8>(), 0..300),
        1 => Just(SECRET.as_bytes().to_vec()),
        1 => (0..SECRET.len()).prop_map(|at| SECRET.as_bytes()[..at].to_vec()),
        1 => (0..SECRET.len()).prop_map(|at| SECRET.as_bytes()[at..].to_vec()),
    ];
    let first = prop::sample::select(vec![TEXT, FIN | TEXT, 2, 0, 0, FIN, FIN, PING, PONG]);
    (first, payload).prop_map(|(first, mut payload)| {
        if first & 8 != 0 {
            payload.truncate(125);
        }
        (first, payload)
    })
}

/// Cuts at these places.
fn pieces<'b>(bytes: &'b [u8], cuts: &[Index]) -> Vec<&'b [u8]> {
    let mut at: Vec<usize> = cuts.iter().map(|cut| cut.index(bytes.len() + 1)).collect();
    at.extend([0, bytes.len()]);
    at.sort_unstable();
    at.windows(2).map(|pair| &bytes[pair[0]..pair[1]]).collect()
}

proptest! {
    #[test]
    fn any_frames_in_any_pieces_keep_their_shape_and_show_no_secret(
        all in vec(any_frame(), 1..12),
        cuts in vec(any::<Index>(), 0..30),
    ) {
        let came = all.concat();
        let mut frames = Frames::new(needle(), false);
        let mut out = Vec::new();
        let mut at_once = Vec::new();
        for piece in pieces(&came, &cuts) {
            out.extend(through(&mut frames, &[piece]).concat());
        }
        // However it was cut, the same comes out.
        let mut whole = Frames::new(needle(), false);
        at_once.extend(through(&mut whole, &[&came]).concat());
        let goodbye = frame(CLOSE, "");
        out.extend(through(&mut frames, &[&goodbye]).concat());
        at_once.extend(through(&mut whole, &[&goodbye]).concat());
        prop_assert_eq!(&out.len(), &(came.len() + goodbye.len()));
        prop_assert!(!out.windows(SECRET.len()).any(|part| part == SECRET.as_bytes()));
        // Heads stay what they are, and payloads but for what is masked.
        for (was, is) in came.iter().zip(&out) {
            prop_assert!(was == is || *is == b'*');
        }
        // Pieces decide only how much of a prefix was out before it was known: three bytes at most.
        for (one, other) in out.iter().zip(&at_once) {
            prop_assert!(one == other || *one == b'*' || *other == b'*');
        }
    }

    #[test]
    fn any_bytes_in_any_pieces_pass_unchanged_where_nothing_is_to_be_masked(
        frames in vec(any_harmless_frame(), 1..12),
        bytes in vec(any::<u8>(), 0..20),
        cuts in vec(any::<Index>(), 0..30),
        open in any::<bool>(),
    ) {
        // What no server may send goes on only where nothing is looked into.
        let came = if open { [frames.concat(), bytes, frames.concat()].concat() } else { frames.concat() };
        let mut frames = if open { Frames::open() } else { Frames::new(needle(), false) };
        let mut out = Vec::new();
        for piece in pieces(&came, &cuts) {
            out.extend(through(&mut frames, &[piece]).concat());
        }
        // At most a control frame that was cut in the middle is not here yet.
        prop_assert!(came.starts_with(&out));
        let control = came.len() - out.len();
        prop_assert!(control <= 125, "{} bytes wait", control);
    }
}

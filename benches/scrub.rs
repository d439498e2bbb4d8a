//! What looking for a key costs per byte of an answer.
//!
//! `cargo bench --bench scrub`: for some lengths of keys and kinds of data, GB/s through a scrubber in
//! chunks of 64 KiB, beside reading each byte once (a sum) as the yardstick.
#![allow(clippy::unwrap_used, clippy::print_stdout, clippy::cast_precision_loss, missing_docs)]

use std::collections::VecDeque;
use std::fmt::Write as _;
use std::hint::black_box;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use lessor::model::Secret;
use lessor::scrub::{Needle, Scrubber};
use rand::{Rng as _, SeedableRng as _};

const LEN: usize = 4 << 20;
const CHUNK: usize = 64 << 10;
const TIME: Duration = Duration::from_millis(300);

fn repeated(text: &[u8]) -> Bytes {
    text.iter().copied().cycle().take(LEN).collect()
}

/// An event stream as chat completions send it: much JSON, some escapes.
fn events(random: &mut impl rand::Rng) -> Bytes {
    let words = [
        "the ",
        "key ",
        "is ",
        "sk-proj-",
        " a\\n\\n",
        "\\\"word\\\" ",
        "caf\\u00e9 ",
        "https:\\/\\/x ",
        "50%",
        "token",
    ];
    let mut text = String::new();
    while text.len() < LEN {
        let word = words[random.random_range(0..words.len())];
        let _ = write!(
            text,
            "data: {{\"id\":\"chatcmpl-{:024x}\",\"object\":\"chat.completion.chunk\",\"created\":1700000000,\
             \"model\":\"gpt-4o-mini\",\"choices\":[{{\"index\":0,\"delta\":{{\"content\":\"{word}\"}},\
             \"finish_reason\":null}}]}}\n\n",
            random.random::<u64>()
        );
    }
    text.truncate(LEN);
    text.into()
}

fn speed(data: &Bytes, mut pass: impl FnMut(Bytes)) -> f64 {
    let (begun, mut done) = (Instant::now(), 0);
    while begun.elapsed() < TIME {
        for from in (0..LEN).step_by(CHUNK) {
            pass(data.slice(from..(from + CHUNK).min(LEN)));
        }
        done += LEN;
    }
    done as f64 / begun.elapsed().as_secs_f64() / 1e9
}

fn main() {
    let mut random = rand::rngs::StdRng::seed_from_u64(1);
    let alphabet = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_-";
    for length in [16, 32, 51, 108, 164] {
        let mut secret = String::from("sk-proj-");
        while secret.len() < length {
            secret.push(char::from(alphabet[random.random_range(0..alphabet.len())]));
        }
        let needle = Arc::new(Needle::new(&Secret::new(secret.clone())));
        let almost = &secret.as_bytes()[..length - 1];
        let mut percent = String::new();
        for byte in almost {
            let _ = write!(percent, "%{byte:02X}");
        }
        let mut noise = vec![0; LEN];
        random.fill(&mut noise[..]);
        let base64: Bytes = noise.iter().map(|byte| alphabet[usize::from(byte % 64)]).collect();
        let kinds: [(&str, Bytes); 9] = [
            ("random bytes", noise.into()),
            ("base64", base64),
            ("events", events(&mut random)),
            ("one letter", repeated(b"a")),
            ("its first eight, again and again", repeated(b"sk-proj-")),
            ("all but its last, again and again", repeated(&[almost, b"#"].concat())),
            ("the same percent-encoded", repeated(&[percent.as_bytes(), b"#"].concat())),
            ("percent signs", repeated(b"%73")),
            ("the key, again and again", repeated(secret.as_bytes())),
        ];
        for (name, data) in kinds {
            let mut scrubber = Scrubber::new(needle.clone());
            let mut out = VecDeque::new();
            let masked = speed(&data, |chunk| {
                scrubber.push(chunk, &mut out);
                black_box(&out);
                out.clear();
            });
            let read = speed(&data, |chunk| {
                black_box(chunk.iter().fold(0_u64, |sum, byte| sum.wrapping_add(u64::from(*byte))));
            });
            println!("key of {length:3} bytes, {name:34} {masked:7.2} GB/s (a sum: {read:5.1})");
        }
    }
}

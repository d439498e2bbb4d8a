//! A fuzzer of a few lines: kept inputs first, then seeds changed at random until its time is over.
//!
//! `LESSOR_FUZZ_SECONDS` says how long each target runs; `LESSOR_FUZZ_SEED` repeats a run. A finding is
//! written to a file that can be kept among `tests/fuzz_inputs/TARGET`.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rand::prelude::*;

/// Seconds that each target runs where nothing is said.
const USUAL: u64 = 5;

/// One run of one target.
pub struct Run {
    target: &'static str,
    seed: u64,
    pub rng: StdRng,
    until: Instant,
    kept: Vec<Vec<u8>>,
    pub tried: u64,
}

fn number(variable: &str) -> Option<u64> {
    let text = std::env::var(variable).ok().filter(|text| !text.is_empty())?;
    Some(text.parse().unwrap_or_else(|why| panic!("{variable} is {text:?}: {why}")))
}

impl Run {
    pub fn of(target: &'static str) -> Self {
        let seed = number("LESSOR_FUZZ_SEED").unwrap_or_else(rand::random);
        let seconds = number("LESSOR_FUZZ_SECONDS").unwrap_or(USUAL);
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fuzz_inputs").join(target);
        let files = std::fs::read_dir(&folder).unwrap_or_else(|why| panic!("{}: {why}", folder.display()));
        let mut files: Vec<PathBuf> = files.map(|file| file.unwrap().path()).collect();
        files.sort();
        let kept = files.iter().rev().map(|file| std::fs::read(file).unwrap()).collect();
        let (rng, until) = (StdRng::seed_from_u64(seed), Instant::now() + Duration::from_secs(seconds));
        Self { target, seed, rng, until, kept, tried: 0 }
    }

    /// The next input: a kept one, or what `make` makes; `None` when the time is over.
    pub fn next(&mut self, make: impl FnOnce(&mut StdRng) -> Vec<u8>) -> Option<Vec<u8>> {
        self.tried += 1;
        self.kept.pop().or_else(|| (Instant::now() < self.until).then(|| make(&mut self.rng)))
    }

    /// Fails with what was found, and says how it is tried again.
    pub fn found(&self, input: &[u8], why: &str) -> ! {
        let name = input.iter().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
            (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3)
        });
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("fuzz").join(self.target);
        std::fs::create_dir_all(&folder).unwrap();
        let file = folder.join(format!("{name:016x}"));
        std::fs::write(&file, input).unwrap();
        panic!(
            "{}: {why}\n  input: b\"{}\"\n  to try it first in every run: cp {} tests/fuzz_inputs/{}/\n  this run: \
             LESSOR_FUZZ_SEED={}, input {}",
            self.target,
            input.escape_ascii(),
            file.display(),
            self.target,
            self.seed,
            self.tried
        )
    }

    /// Runs `check` on inputs until the time is over; an error or a panic is a finding.
    pub fn run(
        mut self,
        mut make: impl FnMut(&mut StdRng) -> Vec<u8>,
        check: impl Fn(&[u8]) -> Result<(), String>,
    ) {
        while let Some(input) = self.next(&mut make) {
            match catch_unwind(AssertUnwindSafe(|| check(&input))) {
                Ok(Ok(())) => {}
                Ok(Err(why)) => self.found(&input, &why),
                Err(_) => self.found(&input, "panicked (above)"),
            }
        }
        println!("{}: {} inputs, LESSOR_FUZZ_SEED={}", self.target, self.tried, self.seed);
        assert!(self.tried > 100, "{} inputs are none", self.tried);
    }
}

/// Changes `input` in one to eight places: bytes, runs of them, and what `words` has.
pub fn mutate(rng: &mut StdRng, input: &[u8], words: &[&str]) -> Vec<u8> {
    let mut out = input.to_vec();
    for _ in 0..rng.random_range(1..=8) {
        let at = rng.random_range(0..=out.len());
        let end = (at + rng.random_range(0..12)).min(out.len());
        match rng.random_range(0..8) {
            0 => out.insert(at, rng.random()),
            1 if at < out.len() => out[at] ^= 1 << rng.random_range(0..8),
            2 if at < out.len() => {
                out[at] = *b"\0\t\n\r :;,%/\\@#?*\"'=[]{}.-0A\x7f\xff".choose(rng).unwrap()
            }
            3 => drop(out.drain(at..end)),
            4 => {
                let part = out[at..end].to_vec();
                let to = rng.random_range(0..=out.len());
                out.splice(to..to, part);
            }
            5 if at < out.len() && out[at].is_ascii_alphabetic() => out[at] ^= 0x20,
            _ => {
                let word = words.choose(rng).map_or(&b""[..], |word| word.as_bytes());
                out.splice(at..end, word.iter().copied());
            }
        }
        out.truncate(32 << 10);
    }
    out
}

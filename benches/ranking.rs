//! What it costs to order the keys of one request.
//!
//! `cargo bench --bench ranking`. Each line: the keys of the pool, and ns for finding those that fit and
//! for finding the best three of them.
#![allow(clippy::unwrap_used, clippy::print_stdout, missing_docs)]

use std::hint::black_box;
use std::time::Instant;

use lessor::config;
use lessor::model::{PoolName, Wanted};
use lessor::route::ring::{ModelKnown, Ring, Wish};

const TURNS: u32 = 20_000;

fn main() {
    println!("keys   ns fitting   ns rank");
    for count in [3, 20, 200] {
        let keys: Vec<String> = (0..count)
            .map(|nth| {
                format!("[[keys]]\nid = \"k{nth}\"\nprovider = \"openai\"\nsecret = {{ env = \"K{nth}\" }}\n")
            })
            .collect();
        let keys = keys.concat();
        let config = config::load_str(&keys, "bench.toml", &|name| Some(format!("sk-{name}"))).unwrap();
        let ring = Ring::new(&config);
        let keys = ring.of("openai").unwrap();
        let wish = Wish::new(PoolName::default_pool(), ModelKnown::NotNamed, None);
        let fitting = keys.fitting(&wish);
        let begun = Instant::now();
        for _ in 0..TURNS {
            black_box(keys.fitting(black_box(&wish)));
        }
        let fit = begun.elapsed() / TURNS;
        let begun = Instant::now();
        for _ in 0..TURNS {
            black_box(keys.rank(black_box(&fitting), &wish.model, &Wanted::best(3)));
        }
        let rank = begun.elapsed() / TURNS;
        println!("{count:>4}   {:>10}   {:>7}", fit.as_nanos(), rank.as_nanos());
    }
}

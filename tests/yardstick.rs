//! The arithmetic of the yardstick (`cargo bench --bench yardstick`), which says what counts.

#[path = "../benches/yardstick/figures.rs"]
mod figures;

use figures::{Series, percentile, void};

fn series(values: &[f64]) -> Series {
    values.iter().copied().collect()
}

#[test]
fn a_median_is_the_middle_or_the_mean_of_the_two_in_the_middle() {
    assert!((series(&[9.0, 1.0, 2.0]).median() - 2.0).abs() < 1e-9);
    assert!((series(&[9.0, 1.0, 2.0, 4.0]).median() - 3.0).abs() < 1e-9);
    assert!(series(&[]).median().is_nan());
}

#[test]
fn ratios_are_taken_round_by_round_and_not_between_medians() {
    // given a machine that was half as fast in the second round, for both alike
    let (peer, nginx) = (series(&[20.0, 40.0, 22.0]), series(&[10.0, 20.0, 10.0]));
    // then nothing of that is seen in the ratio
    let ratio = peer.over(&nginx);
    assert_eq!(ratio, series(&[2.0, 2.0, 2.2]));
    assert_eq!(ratio.to_string(), "2.00 (2.00–2.20)");
    assert_eq!(peer.beyond(&nginx), series(&[10.0, 20.0, 12.0]));
}

#[test]
fn a_series_tells_median_least_and_most_in_the_digits_that_its_size_deserves() {
    let mut taken = series(&[123.4, 99.0]);
    taken.push(150.6);
    assert_eq!(taken.to_string(), "123 (99–151)");
    assert_eq!(series(&[12.34]).to_string(), "12.3 (12.3–12.3)");
    assert_eq!(series(&[]).to_string(), "–");
    assert_eq!(series(&[f64::NAN]).to_string(), "–");
}

#[test]
fn a_percentile_is_a_value_that_was_seen() {
    let mut hundred: Vec<f64> = (1..=100).rev().map(f64::from).collect();
    assert!((percentile(&mut hundred, 0.5) - 50.0).abs() < 1e-9);
    assert!((percentile(&mut hundred, 0.99) - 99.0).abs() < 1e-9);
    assert!((percentile(&mut [7.0], 0.99) - 7.0).abs() < 1e-9);
    assert!(percentile(&mut [], 0.5).is_nan());
}

#[test]
fn figures_are_void_when_the_floor_is_far_above_what_a_quiet_machine_showed() {
    assert_eq!(void(1.17, 1.17), None);
    assert_eq!(void(1.5, 1.17), None); // 1.3 times it is 1.521
    assert!(void(1.53, 1.17).is_some_and(|why| why.starts_with("VOID: the floor came to 1.53 × nginx")));
    assert!(void(f64::NAN, 1.17).is_some());
}

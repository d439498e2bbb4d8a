//! What was found, for people and for programs.

use std::fmt::Write as _;

use super::{Check, Verdict, counts, line};

/// One aligned line a check, what to do below it, and a summary. What was skipped is shown where asked for.
pub(super) fn text(checks: &[Check], verbose: bool) -> String {
    let shown: Vec<_> = checks.iter().filter(|check| verbose || check.verdict != Verdict::Skip).collect();
    let width = shown.iter().map(|check| check.check.chars().count()).max().unwrap_or(0);
    let mut page = String::new();
    for check in shown {
        // Writing to a `String` cannot fail.
        let _ = writeln!(
            page,
            "{:<4}  {:<width$}  {}",
            check.verdict.as_str(),
            line(&check.check),
            line(&check.found)
        );
        if let Some(advice) = &check.advice {
            let _ = writeln!(page, "{:>width$}  -> {}", "", line(advice), width = width + 6);
        }
    }
    let counts = counts(checks);
    let _ = writeln!(
        page,
        "\n{} ok, {} to look at, {} failed, {} skipped{}",
        counts["ok"],
        counts["warn"],
        counts["fail"],
        counts["skip"],
        if verbose || counts["skip"] == 0 { "" } else { " (--verbose shows them)" }
    );
    page
}

/// The same for programs.
pub(super) fn json(checks: &[Check]) -> String {
    let ok = !checks.iter().any(|check| check.verdict == Verdict::Fail);
    format!("{:#}\n", serde_json::json!({ "ok": ok, "counts": counts(checks), "checks": checks }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_check_is_a_line_with_what_to_do_below_and_skipped_ones_are_counted() {
        let checks = [
            Check::ok("store", "memory:"),
            Check::fail("tls api.openai.com", "not trusted\u{1b}[2J", "set ca_file"),
            Check::skip("trust go", "not tried"),
        ];
        let expected = "ok    store               memory:\n\
                        fail  tls api.openai.com  not trusted [2J\n                          -> set ca_file\n\
                        \n1 ok, 0 to look at, 1 failed, 1 skipped (--verbose shows them)\n";
        assert_eq!(text(&checks, false), expected);
        assert!(text(&checks, true).contains("skip  trust go            not tried\n"));
        assert!(json(&checks).contains("\"ok\": false"));
    }
}

//! Markdown.

use super::figures::Series;
use super::say;

/// Rows under a head, printed in columns.
pub(crate) struct Table(Vec<Vec<String>>);

impl Table {
    pub(crate) fn new<const N: usize>(head: [&str; N]) -> Self {
        Self(vec![head.map(str::to_owned).to_vec()])
    }

    pub(crate) fn row(&mut self, cells: impl IntoIterator<Item = String>) {
        self.0.push(cells.into_iter().collect());
    }

    pub(crate) fn print(&self) {
        let wide = |column: usize| self.0.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
        let widths: Vec<usize> = (0..self.0[0].len()).map(wide).collect();
        let line = |row: &[String]| {
            let cells = row.iter().zip(&widths).map(|(cell, width)| format!("{cell:<width$}"));
            format!("| {} |", cells.collect::<Vec<_>>().join(" | "))
        };
        say(&line(&self.0[0]));
        say(&line(&widths.iter().map(|width| "-".repeat(*width)).collect::<Vec<_>>()));
        self.0[1..].iter().for_each(|row| say(&line(row)));
        say("");
    }
}

/// What one figure is for nginx and for the floor, by which the others are told.
pub(crate) struct Bases<'a> {
    pub(crate) nginx: &'a Series,
    pub(crate) floor: &'a Series,
}

impl Bases<'_> {
    /// The figure itself, and what it is beside both.
    pub(crate) fn cells(&self, figure: &Series) -> [String; 3] {
        [figure.to_string(), figure.over(self.nginx).to_string(), figure.over(self.floor).to_string()]
    }
}

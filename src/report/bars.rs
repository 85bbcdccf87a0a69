//! Bar charts: one column per snapshot, each of one or more stacked parts.
//!
//! Horizontal places are percentages, heights are pixels: the chart is as wide as the page while its text keeps its
//! size, on a phone and on a wall display. The values of the grid lines are in a separate margin.

use maud::{Markup, html};

/// Heights in pixels: of the plot, and of the line of labels below it.
const PLOT: f64 = 150.0;
const LABELS: f64 = 18.0;
/// Space above the plot for half the height of a label.
const TOP: f64 = 8.0;
/// Width of the margin: room for `1000.0 GiB`.
const MARGIN: f64 = 76.0;
/// Minimum number of columns for which space is reserved, so that a few columns are not wide.
const COLUMNS_LEAST: usize = 24;
/// Minimum height of a part, so that it is visible.
const PART_LEAST: f64 = 1.0;
/// Share of a column's width that is drawn.
const FILLED: f64 = 0.8;

/// A part of a column: its CSS class and its value.
pub(super) type Part = (&'static str, f64);

/// A column.
pub(super) struct Column {
    /// Label below the column.
    pub label: String,
    /// Tooltip of the column.
    pub hint: String,
    /// Parts of the column, from the bottom up.
    pub parts: Vec<Part>,
    /// True if every part starts at the bottom and overlaps the others; otherwise the parts are stacked.
    pub nested: bool,
}

impl Column {
    fn height(&self) -> f64 {
        let values = self.parts.iter().map(|(_, value)| *value);
        if self.nested {
            values.fold(0.0, f64::max)
        } else {
            values.sum()
        }
    }
}

/// The unit of the values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Unit {
    /// Durations.
    Seconds,
    /// Sizes.
    Bytes,
}

/// Draws the columns.
pub(super) fn chart(name: &str, unit: Unit, columns: &[Column]) -> Markup {
    let most = columns.iter().map(Column::height).fold(0.0, f64::max);
    let lines = lines(most, unit);
    let top = lines
        .last()
        .copied()
        .unwrap_or(1.0)
        .max(most)
        .max(f64::MIN_POSITIVE);
    let slots = columns.len().max(COLUMNS_LEAST);
    let height = TOP + PLOT + LABELS;
    let y = |line: f64| TOP + PLOT * (1.0 - line / top);
    html! {
        div.plot {
            svg.margin width=(MARGIN) height=(height) aria-hidden="true" {
                @for line in &lines {
                    text.tick.end x=(MARGIN - 8.0) y=(number(y(*line) + 4.0)) { (label(*line, unit)) }
                }
            }
            svg.chart width="100%" height=(height) role="img" aria-label=(name) {
                @for line in &lines {
                    line.grid x1="0" x2="100%" y1=(number(y(*line))) y2=(number(y(*line))) {}
                }
                line.axis x1="0" x2="100%" y1=(TOP + PLOT) y2=(TOP + PLOT) {}
                @for (place, column) in columns.iter().enumerate() {
                    (drawn(column, place, slots, top))
                }
                (labels(columns, slots))
            }
        }
    }
}

fn drawn(column: &Column, place: usize, slots: usize, top: f64) -> Markup {
    let (each, place) = (100.0 / count(slots), count(place));
    let x = format!("{:.3}%", place * each);
    let width = format!("{:.3}%", each * FILLED);
    let mut below = 0.0;
    let parts: Vec<(&str, f64, f64)> = column
        .parts
        .iter()
        .filter(|(_, value)| *value > 0.0)
        .map(|(class, value)| {
            let height = (PLOT * value / top).max(PART_LEAST);
            let y = (TOP + PLOT - below - height).max(0.0);
            below += if column.nested { 0.0 } else { height };
            (*class, y, height)
        })
        .collect();
    html! {
        g {
            title { (column.hint) }
            @for (class, y, height) in parts {
                rect class=(class) x=(x) width=(width) y=(number(y)) height=(number(height)) {}
            }
        }
    }
}

/// Draws the labels of the first column and of the last one; only the first if they are close to each other.
fn labels(columns: &[Column], slots: usize) -> Markup {
    let y = TOP + PLOT + LABELS - 4.0;
    let last = columns.len().saturating_sub(1);
    let end = 100.0 * count(last + 1) / count(slots);
    html! {
        @if let Some(column) = columns.first() {
            text.tick x="0" y=(y) { (column.label) }
        }
        @if let Some(column) = columns.last().filter(|_| end > 40.0) {
            text.tick.end x=(format!("{end:.3}%")) y=(y) { (column.label) }
        }
    }
}

/// Returns two to four round values for the grid lines.
fn lines(most: f64, unit: Unit) -> Vec<f64> {
    if most <= 0.0 {
        return Vec::new();
    }
    let base = match unit {
        Unit::Seconds => 1.0,
        Unit::Bytes => 1024.0_f64.powf(most.log(1024.0).floor().max(0.0)),
    };
    let power = 10.0_f64.powf((most / base).log10().floor());
    let steps = [0.5, 1.0, 2.0, 5.0].map(|step| step * power * base);
    let step = steps
        .into_iter()
        .find(|step| most / step <= 3.5)
        .unwrap_or(most);
    let values = (1..=4).map(|number| step * f64::from(number));
    values.take_while(|value| *value <= most).collect()
}

fn label(value: f64, unit: Unit) -> String {
    match unit {
        Unit::Seconds => crate::history::time_in_words(value),
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "saturates, and is not negative"
        )]
        Unit::Bytes => crate::run::size(value as u64),
    }
}

/// Formats a coordinate with two decimals, to keep the page short.
pub(super) fn number(value: f64) -> String {
    format!("{value:.2}")
}

#[expect(clippy::cast_precision_loss, reason = "some hundreds")]
fn count(number: usize) -> f64 {
    number as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_few_and_at_round_values() {
        assert!(lines(0.0, Unit::Seconds).is_empty());
        assert_eq!(lines(0.9, Unit::Seconds).len(), 1);
        assert_eq!(lines(3.0, Unit::Seconds), [1.0, 2.0, 3.0]);
        assert_eq!(lines(7.0, Unit::Seconds), [2.0, 4.0, 6.0]);
        let gib = 1024.0 * 1024.0 * 1024.0;
        assert_eq!(lines(2.5 * gib, Unit::Bytes), [gib, 2.0 * gib]);
        for most in [1e-9, 0.003, 1.0, 59.9, 1e9, 1e18] {
            for unit in [Unit::Seconds, Unit::Bytes] {
                let lines = lines(most, unit);
                assert!(
                    (1..=4).contains(&lines.len()) || most < 1.0,
                    "{most} {lines:?}"
                );
            }
        }
    }

    #[test]
    fn a_column_is_as_high_as_its_parts_and_never_out_of_the_chart() {
        let column = |parts: Vec<Part>, nested| Column {
            label: "1".to_owned(),
            hint: "<b>".to_owned(),
            parts,
            nested,
        };
        let text = chart(
            "x",
            Unit::Seconds,
            &[column(vec![("a", 1.0), ("b", 3.0)], false)],
        )
        .into_string();
        assert!(
            text.contains("height=\"37.50\"") && text.contains("height=\"112.50\""),
            "{text}"
        );
        assert!(text.contains("&lt;b&gt;"));
        let text = chart(
            "x",
            Unit::Bytes,
            &[column(vec![("a", 4.0), ("b", 1.0)], true)],
        )
        .into_string();
        assert!(
            text.contains("height=\"150.00\"") && text.contains("height=\"37.50\""),
            "{text}"
        );
    }
}

//! The run on a time axis: the state of the job, and the times of the events.

use maud::{Markup, html};

use super::bars::number;
use super::story::{MarkKind, Span, SpanKind, Story};
use crate::history::time_in_words;

/// Heights in pixels: `LANE` is a lane with its name above it.
const LANE: f64 = 34.0;
const NAME: f64 = 13.0;
const BAND: f64 = 12.0;
const AXIS: f64 = 20.0;
/// Minimum width of a visible span, in percent.
const SPAN_LEAST: f64 = 0.15;

const LANES: [(MarkKind, &str, &str); 4] = [
    (MarkKind::Snapshot, "snapshots", "m-snapshot"),
    (MarkKind::SnapshotFailed, "failed snapshots", "m-failed"),
    (MarkKind::Crash, "crashes", "m-crash"),
    (MarkKind::Restore, "restores", "m-restore"),
];

/// Draws the timeline. Lanes without events are left out.
pub(super) fn timeline(story: &Story) -> Markup {
    let happened = |kind| story.marks.iter().any(|mark| mark.kind == kind);
    let lanes: Vec<_> = LANES
        .into_iter()
        .filter(|(kind, ..)| happened(*kind))
        .collect();
    let mut height = LANE;
    let mut rows = Vec::new();
    for lane in lanes {
        rows.push((height, lane));
        height += LANE;
    }
    html! {
        svg.chart width="100%" height=(height + AXIS) role="img" aria-label="Timeline of the run" {
            (band(story))
            @for (y, (kind, name, class)) in rows {
                text.tick x="0" y=(number(y + NAME)) { (name) }
                line.grid x1="0" x2="100%" y1=(number(y + NAME + 11.0)) y2=(number(y + NAME + 11.0)) {}
                @for mark in story.marks.iter().filter(|mark| mark.kind == kind) {
                    circle class=(class) cx=(percent(mark.at, story)) cy=(number(y + NAME + 11.0)) r="4" {
                        title { (mark.text) " after " (time_in_words(mark.at)) }
                    }
                }
            }
            (axis(story, height))
        }
    }
}

fn band(story: &Story) -> Markup {
    // The other spans are drawn last, so that a long computing span does not hide a short interruption.
    let (computing, others): (Vec<&Span>, Vec<&Span>) = story
        .spans
        .iter()
        .partition(|span| span.kind == SpanKind::Computing);
    let (computing, others) = (computing.into_iter(), others.into_iter());
    let width = |from: f64, to: f64| (share(to, story) - share(from, story)).max(SPAN_LEAST);
    html! {
        text.tick x="0" y=(number(NAME)) { "the job" }
        rect.s-none x="0" width="100%" y=(number(NAME + 5.0)) height=(BAND) {}
        @for span in computing.chain(others) {
            @let (class, name) = named(span.kind);
            rect class=(class) x=(percent(span.from, story)) width=(format!("{:.3}%", width(span.from, span.to)))
                y=(number(NAME + 5.0)) height=(BAND) {
                title { (name) " for " (time_in_words(span.to - span.from)) }
            }
        }
    }
}

/// Returns the CSS class and the name of a state of the job.
pub(super) fn named(kind: SpanKind) -> (&'static str, &'static str) {
    match kind {
        SpanKind::Computing => ("s-computing", "computing"),
        SpanKind::Paused => ("s-paused", "paused"),
        SpanKind::Down => ("s-down", "down"),
    }
}

fn axis(story: &Story, y: f64) -> Markup {
    let y = number(y + AXIS - 5.0);
    html! {
        text.tick x="0" y=(y) { "0" }
        text.tick.middle x="50%" y=(y) { (time_in_words(story.seconds / 2.0)) }
        text.tick.end x="100%" y=(y) { (time_in_words(story.seconds)) }
    }
}

/// Returns a place on the axis, 0 to 100.
fn share(at: f64, story: &Story) -> f64 {
    if story.seconds > 0.0 {
        (100.0 * at / story.seconds).clamp(0.0, 100.0)
    } else {
        0.0
    }
}

fn percent(at: f64, story: &Story) -> String {
    format!("{:.3}%", share(at, story))
}

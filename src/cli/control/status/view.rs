//! The picture of a run: a pure function of its status and events, for any size of a terminal.
//!
//! ```text
//! ┌ current state, next snapshot, work at risk ─────┐
//! │ timeline of snapshots, crashes and restores     │   from 9 lines
//! │ freeze and size of the last snapshots           │   from 16 lines
//! │ last events                                     │   remaining lines
//! └ keys ───────────────────────────────────────────┘
//! ```

use jiff::Timestamp;
use jiff::tz::TimeZone;
use ratatui::Frame;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::{Line, Span};
use ratatui::widgets::{Block, Borders, Paragraph, Sparkline, Wrap};

use super::{back, headline, next};
use crate::history::{Entry, Event, counted, time_in_words};
use crate::run::size;
use crate::supervisor::{State, Status};

mod words;

use words::{Kind, in_words, kind};

/// Height of the terminal, in lines, from which the timeline and the charts are shown.
const TIMELINE_FROM: u16 = 9;
const CHARTS_FROM: u16 = 16;
/// Height, in lines, from which the sentence about the run may take two lines.
const ROOMY_FROM: u16 = 20;
/// Width, in columns, from which two charts are shown side by side, and from which a chart makes sense.
const CHARTS_WIDE: u16 = 50;

/// The data to draw.
pub(super) struct View {
    pub status: Status,
    /// The events, oldest first.
    pub events: Vec<Entry>,
    /// The reason why the status is not current.
    pub trouble: Option<String>,
    pub now: Timestamp,
    pub zone: TimeZone,
    pub colors: bool,
}

impl View {
    fn style(&self, color: Color) -> Style {
        if self.colors {
            Style::new().fg(color)
        } else {
            Style::new()
        }
    }

    /// Returns the events of the displayed run, including those from before it was started again from the beginning.
    fn run(&self) -> &[Entry] {
        let opened = |entry: &Entry| matches!(entry.event, Event::Opened { .. });
        let last = self.events.iter().map(|entry| entry.run).next_back();
        let others = self
            .events
            .iter()
            .rposition(|entry| opened(entry) && Some(entry.run) != last);
        // The first event after the last start of another run's supervisor.
        let after = others.map_or(0, |others| others + 1);
        let own = self.events[after..].iter().position(opened);
        &self.events[after + own.filter(|_| others.is_some()).unwrap_or(0)..]
    }
}

/// Draws the run.
pub(super) fn draw(frame: &mut Frame, view: &View) {
    let area = frame.area();
    let height = |from: u16, lines: u16| if area.height >= from { lines } else { 0 };
    let [head, timeline, charts, events, keys] = Layout::vertical([
        Constraint::Length(if area.height >= ROOMY_FROM { 5 } else { 4 }),
        Constraint::Length(height(TIMELINE_FROM, 3)),
        Constraint::Length(height(CHARTS_FROM, 5)),
        Constraint::Min(0),
        Constraint::Length(height(TIMELINE_FROM, 1)),
    ])
    .areas(area);
    draw_head(frame, view, head);
    draw_timeline(frame, view, timeline);
    draw_charts(frame, view, charts);
    draw_events(frame, view, events);
    let keys_text = Line::from(" q quits, the run continues").style(Modifier::DIM);
    frame.render_widget(keys_text, keys);
}

fn color_of(state: State) -> Color {
    match state {
        State::Running | State::Finished => Color::Green,
        State::Starting | State::Snapshotting | State::Restoring => Color::Cyan,
        State::Paused | State::Waiting | State::Ending | State::Saved => Color::Yellow,
        State::Failed | State::Killed | State::Error => Color::Red,
        State::None => Color::Gray,
    }
}

fn draw_head(frame: &mut Frame, view: &View, area: Rect) {
    let status = &view.status;
    let state = view
        .style(color_of(status.state))
        .add_modifier(Modifier::BOLD);
    let head: Vec<String> = [Some(headline(status)), back(status)]
        .into_iter()
        .flatten()
        .collect();
    let mut first = vec![Span::styled(head.join(", "), state)];
    if !status.command.is_empty() {
        first.push(Span::raw(format!("  {}", status.command.join(" "))));
    }
    let second = view.trouble.as_ref().map_or_else(
        || Line::from(facts(status).join("  ·  ")),
        |trouble| Line::styled(trouble.clone(), view.style(Color::Red)),
    );
    let so_far = status.run.map(|_| status.summary.in_words());
    let block = Block::new().borders(Borders::BOTTOM);
    let inner = block.inner(area);
    frame.render_widget(block, area);
    let [one, two, rest] = Layout::vertical([
        Constraint::Length(1),
        Constraint::Length(1),
        Constraint::Min(0),
    ])
    .areas(inner);
    frame.render_widget(Line::from(first), one);
    frame.render_widget(second, two);
    let so_far = Paragraph::new(so_far.unwrap_or_default()).wrap(Wrap { trim: true });
    frame.render_widget(so_far, rest);
}

/// Returns the next snapshot and the cost of losing it.
fn facts(status: &Status) -> Vec<String> {
    let at_risk = status.work_at_risk_seconds;
    let restarts = status.restarts_left;
    let stored = status
        .usage
        .map(|usage| format!("{}, {}", counted(usage.images, "image"), size(usage.bytes)));
    [
        next(status),
        at_risk.map(|seconds| format!("{} at risk", time_in_words(seconds))),
        restarts.map(|left| format!("{} left", counted(left.into(), "restart"))),
        stored,
    ]
    .into_iter()
    .flatten()
    .collect()
}

fn titled(title: String) -> Block<'static> {
    Block::new().borders(Borders::TOP).title(title)
}

fn color_of_kind(kind: Kind) -> Color {
    match kind {
        Kind::Good => Color::Green,
        Kind::Bad => Color::Red,
        Kind::Back => Color::Cyan,
        Kind::Rest => Color::Yellow,
        Kind::Plain => Color::Gray,
    }
}

/// Returns the mark of an event on the timeline; of two events in one column, the more serious one is shown.
fn mark(event: &Event) -> Option<(u8, char)> {
    match event {
        Event::Crashed { .. } | Event::Hung { .. } => Some((5, 'X')),
        Event::RestoreFailed { .. } | Event::SnapshotFailed { .. } => Some((4, '!')),
        Event::Restored { .. } => Some((3, 'R')),
        Event::Started { .. } => Some((2, '>')),
        Event::Paused { .. } => Some((2, 'P')),
        Event::Snapshot { .. } => Some((1, 'o')),
        Event::Opened { .. }
        | Event::SnapshotBegan { .. }
        | Event::Computing { .. }
        | Event::RestoreBegan { .. }
        | Event::Unpaused { .. }
        | Event::Interval { .. }
        | Event::Hook { .. }
        | Event::Preempted { .. }
        | Event::Ended { .. }
        | Event::Unknown => None,
    }
}

fn draw_timeline(frame: &mut Frame, view: &View, area: Rect) {
    let events = view.run();
    let (Some(first), width) = (events.first(), usize::from(area.width)) else {
        return;
    };
    if area.height == 0 || width == 0 {
        return;
    }
    let end = if view.status.state.is_supervised() {
        view.now
    } else {
        events.last().map_or(view.now, |last| last.time)
    };
    let span = (end.as_millisecond() - first.time.as_millisecond()).max(1);
    let mut columns: Vec<Option<(u8, char, Color)>> = vec![None; width];
    for entry in events {
        let Some((weight, mark)) = mark(&entry.event) else {
            continue;
        };
        let column = column(
            entry.time.as_millisecond() - first.time.as_millisecond(),
            span,
            width,
        );
        if columns[column].is_none_or(|(there, ..)| weight > there) {
            columns[column] = Some((weight, mark, color_of_kind(kind(&entry.event))));
        }
    }
    let line: Line = columns
        .into_iter()
        .map(|column| match column {
            Some((_, mark, color)) => Span::styled(mark.to_string(), view.style(color)),
            None => Span::raw("─"),
        })
        .collect();
    let legend = "o snapshot  X crash  R restored  ! failed  > started  P paused";
    let title = format!("since {}", clock_time(first.time, &view.zone));
    let lines = vec![line, Line::from(legend).style(Modifier::DIM)];
    frame.render_widget(Paragraph::new(lines).block(titled(title)), area);
}

/// Returns the column of a time on a line of `width` columns. The column is within the line even if the clock was
/// changed.
fn column(since: i64, span: i64, width: usize) -> usize {
    let last = width.saturating_sub(1);
    let wide = i64::try_from(last).unwrap_or(0);
    let place = since.clamp(0, span).saturating_mul(wide) / span;
    usize::try_from(place).unwrap_or(0).min(last)
}

fn draw_charts(frame: &mut Frame, view: &View, area: Rect) {
    let images = view.run().iter().filter_map(|entry| {
        let Event::Snapshot {
            freeze_seconds,
            raw_bytes,
            ..
        } = &entry.event
        else {
            return None;
        };
        Some((*freeze_seconds, *raw_bytes))
    });
    let (freezes, sizes): (Vec<f64>, Vec<u64>) = images.unzip();
    let (Some(freeze), Some(bytes)) = (freezes.last(), sizes.last()) else {
        return;
    };
    let longest = freezes.iter().copied().fold(0.0, f64::max);
    let freeze = format!(
        "freeze {}, longest {}",
        time_in_words(*freeze),
        time_in_words(longest)
    );
    let bytes = format!("size {}", size(*bytes));
    let areas: Vec<Rect> = if area.width >= CHARTS_WIDE {
        Layout::horizontal([
            Constraint::Fill(1),
            Constraint::Length(2),
            Constraint::Fill(1),
        ])
        .split(area)
        .to_vec()
    } else {
        vec![area]
    };
    // A bar is a whole number; microseconds are precise enough.
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "saturating is right for a bar"
    )]
    let micros: Vec<u64> = freezes
        .iter()
        .map(|seconds| (seconds * 1e6) as u64)
        .collect();
    chart(frame, freeze, &micros, view.style(Color::Cyan), areas[0]);
    if let Some(area) = areas.get(2) {
        chart(frame, bytes, &sizes, view.style(Color::Blue), *area);
    }
}

/// Draws the last values, as many as there are columns.
fn chart(frame: &mut Frame, title: String, values: &[u64], style: Style, area: Rect) {
    let first = values.len().saturating_sub(usize::from(area.width));
    let bars = Sparkline::default().data(&values[first..]).style(style);
    frame.render_widget(bars.block(titled(title)), area);
}

fn draw_events(frame: &mut Frame, view: &View, area: Rect) {
    let room = usize::from(area.height.saturating_sub(1));
    let told: Vec<Line> = view
        .events
        .iter()
        .rev()
        .filter_map(|entry| {
            let words = in_words(&entry.event)?;
            let time = clock_time(entry.time, &view.zone);
            let style = view.style(color_of_kind(kind(&entry.event)));
            Some(Line::from(vec![
                Span::raw(format!("{time}  ")),
                Span::styled(words, style),
            ]))
        })
        .take(room)
        .collect();
    let lines: Vec<Line> = told.into_iter().rev().collect();
    frame.render_widget(
        Paragraph::new(lines).block(titled("events".to_owned())),
        area,
    );
}

fn clock_time(time: Timestamp, zone: &TimeZone) -> String {
    time.to_zoned(zone.clone())
        .strftime("%m-%d %H:%M:%S")
        .to_string()
}

/// Returns the content of a terminal of this size.
#[cfg(any(fuzzing, test))]
pub(super) fn drawn(view: &View, width: u16, height: u16) -> ratatui::buffer::Buffer {
    let backend = ratatui::backend::TestBackend::new(width, height);
    let mut terminal = ratatui::Terminal::new(backend).unwrap();
    terminal.draw(|frame| draw(frame, view)).unwrap();
    terminal.backend().buffer().clone()
}

#[cfg(test)]
mod tests;

//! The progress line on the terminal, and the line that reports that the job computes again.
//!
//! A thread draws a few times a second while a snapshot or restore is under way. The thread may block on the terminal
//! (Ctrl-S); only writers to the same terminal wait for it.

use std::thread;
use std::time::Duration;

use crate::clock;
use crate::config::ShowProgress;
use crate::job::{Patience, Shown, StatusLine};
use crate::run::format::seconds;
use crate::run::progress::Ongoing;
use crate::run::streams::Streams;

/// Time between two drawings: faster than that nobody reads. What takes less is not drawn at all.
const DRAW_INTERVAL: Duration = Duration::from_millis(200);

/// A job that the freeze caught as it wrote to its terminal has written the rest by then: a line of ours would stand in
/// the middle.
const SETTLE_TIME: Duration = Duration::from_millis(100);

/// Time after which work without a progress line deserves a line at its end.
const LONG: Duration = Duration::from_secs(5);

/// The status line. Dropped, it goes away for good.
#[derive(Debug)]
pub(crate) struct ProgressLine {
    ongoing: Ongoing,
    line: std::sync::Arc<StatusLine>,
}

impl ProgressLine {
    /// Begins to show what is under way, where that is wanted and there is a terminal for it.
    pub fn start(wanted: ShowProgress, streams: &Streams, ongoing: &Ongoing) -> Option<Self> {
        let wanted = wanted.is_wanted(tracing::enabled!(tracing::Level::INFO));
        let line = std::sync::Arc::new(streams.status_line().filter(|_| wanted)?);
        let display = Self {
            ongoing: ongoing.clone(),
            line: std::sync::Arc::clone(&line),
        };
        let ongoing = ongoing.clone();
        let draw = move || {
            while ongoing.wait_for_work(DRAW_INTERVAL) {
                let shown = line.show(Patience::Skip, || ongoing.line(clock::now()));
                tell_untold(&ongoing, shown);
            }
        };
        // Without a thread there is no line, and all else as ever.
        let thread = thread::Builder::new()
            .name("progress".to_owned())
            .spawn(draw);
        thread.is_ok().then_some(display)
    }

    /// Draws now; returns the result.
    fn show(&self) -> Shown {
        let compose = || self.ongoing.line(clock::now());
        self.line.show(Patience::Wait, compose)
    }
}

impl Drop for ProgressLine {
    fn drop(&mut self) {
        self.ongoing.close();
        self.line.show(Patience::Wait, || None);
    }
}

/// Reports that the job of a snapshot computes again after `freeze`; the snapshot has taken `took` so far.
pub(crate) fn report_computing(line: Option<&ProgressLine>, freeze: Duration, took: Duration) {
    let shown = line.map(ProgressLine::show);
    tracing::debug!(freeze = ?freeze, ?shown, "the freeze is over");
    match line.zip(shown) {
        None if took > LONG => tell(freeze),
        Some((line, Shown::Hidden)) => line.ongoing.tell_later(freeze),
        // The progress line, or the line about the image, which follows, is enough.
        None | Some((_, Shown::Drawn | Shown::Over)) => {}
    }
}

/// Reports the end of a freeze that the status line does not show because it has no room.
fn tell_untold(ongoing: &Ongoing, shown: Shown) {
    match (ongoing.untold(SETTLE_TIME), shown) {
        (Some(freeze), Shown::Hidden) => tell(freeze),
        (Some(_), Shown::Drawn | Shown::Over) | (None, _) => {}
    }
}

fn tell(freeze: Duration) {
    tracing::info!(freeze = %seconds(freeze), "the job computes again");
}

//! A bar for what takes its time; drawn on a terminal only.

use std::sync::Mutex;

use indicatif::{ProgressBar, ProgressStyle};

const TEMPLATE: &str = "{prefix} {bar:30} {bytes}/{total_bytes} {binary_bytes_per_sec}";

/// Bytes done of a total.
pub(super) struct Progress {
    bar: Mutex<ProgressBar>,
}

impl Progress {
    /// `what` is done, as in "verify".
    pub(super) fn new(what: &'static str) -> Self {
        let mut bar = ProgressBar::new(0).with_prefix(what);
        if let Ok(style) = ProgressStyle::with_template(TEMPLATE) {
            bar = bar.with_style(style);
        }
        Self {
            bar: Mutex::new(bar),
        }
    }

    pub(super) fn show(&self, done: u64, total: u64) {
        if let Ok(bar) = self.bar.lock() {
            bar.set_length(total);
            bar.set_position(done);
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if let Ok(bar) = self.bar.lock() {
            bar.finish_and_clear();
        }
    }
}

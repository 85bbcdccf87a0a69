//! A bar for what takes its time: on a terminal, where `log.progress` wants one, and not beside JSON.

use std::sync::Mutex;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use super::Global;
use crate::config::{Config, LogLevel};

const TEMPLATE: &str = "{prefix} {bar:30} {bytes}/{total_bytes} {binary_bytes_per_sec}";

/// Bytes done of a total.
pub(super) struct Progress {
    bar: Mutex<ProgressBar>,
}

impl Progress {
    /// `what` is done, as in "verify".
    pub(super) fn new(what: &'static str, global: &Global, config: &Config) -> Self {
        let info_is_shown = global.log_level(config) >= LogLevel::Info;
        let wanted = !global.json && config.log.progress.is_wanted(info_is_shown);
        let target = if wanted {
            // Draws nothing where that is no terminal, or a dumb one.
            ProgressDrawTarget::stderr()
        } else {
            ProgressDrawTarget::hidden()
        };
        let mut bar = ProgressBar::with_draw_target(Some(0), target).with_prefix(what);
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

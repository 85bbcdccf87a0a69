//! What the verbs print: data to stdout, talk to stderr.

use std::io::{self, Write};
use std::process::ExitCode;
use std::sync::Mutex;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde::Serialize;

use super::global::{Failure, Global};
use crate::config::{Config, LogLevel};

/// Says something to the user.
pub(super) fn say(text: &str) {
    // Without a stderr there is nobody to tell.
    let _ = writeln!(io::stderr(), "ckpt-run: {text}");
}

/// Says what went wrong, in the manner of all our errors.
pub(super) fn fail(text: &str) {
    say(&format!("error: {text}"));
}

/// Prints data. A reader that went away, as in `list | head`, has seen what it wanted.
pub(super) fn print(text: &str) -> Result<ExitCode, Failure> {
    match io::stdout().write_all(text.as_bytes()) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => {
            Err(io::Error::new(error.kind(), format!("cannot write to stdout: {error}")).into())
        }
        Ok(()) | Err(_) => Ok(ExitCode::SUCCESS),
    }
}

/// Prints data as JSON.
pub(super) fn print_json(data: &impl Serialize) -> Result<ExitCode, Failure> {
    print(&format!("{}\n", serde_json::to_string_pretty(data)?))
}

/// The text on one line, without what could steer a terminal.
pub(super) fn plain(text: &str) -> String {
    let plain = |c: char| if c.is_control() { ' ' } else { c };
    text.chars().map(plain).collect()
}

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

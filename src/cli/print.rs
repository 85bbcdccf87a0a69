//! Output of the verbs: data to stdout, messages to stderr.

use std::io::{self, Write};
use std::process::ExitCode;
use std::sync::Mutex;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde::Serialize;

use super::global::{Failure, Global};
use crate::config::{Config, LogLevel};
use crate::printable::{Keep, escaped};

/// Prints a message to the user.
pub(super) fn say(text: &str) {
    // Without a stderr the message is lost.
    let _ = writeln!(io::stderr(), "ckpt-run: {}", escaped(text, Keep::Lines));
}

/// Prints an error in the format of all errors of ckpt-run.
pub(super) fn fail(text: &str) {
    say(&format!("error: {text}"));
}

/// Prints data. A closed pipe, as in `list | head`, is no error: the reader has all it needs.
pub(super) fn print(text: &str) -> Result<ExitCode, Failure> {
    match io::stdout().write_all(escaped(text, Keep::Lines).as_bytes()) {
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

/// Returns the text on one line, without characters that could control a terminal.
pub(super) fn plain(text: &str) -> String {
    let plain = |c: char| if c.is_control() { ' ' } else { c };
    text.chars().map(plain).collect()
}

const TEMPLATE: &str = "{prefix} {bar:30} {bytes}/{total_bytes} {binary_bytes_per_sec}";

/// A progress bar of bytes out of a total.
pub(super) struct Progress {
    bar: Mutex<ProgressBar>,
}

impl Progress {
    /// Creates the bar; `what` names the operation, as in "verify".
    pub(super) fn new(what: &'static str, global: &Global, config: &Config) -> Self {
        let info_is_shown = global.log_level(config) >= LogLevel::Info;
        let wanted = !global.json && config.log.progress.is_wanted(info_is_shown);
        let target = if wanted {
            // Draws nothing if stderr is not a terminal, or a dumb one.
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

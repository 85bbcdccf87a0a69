//! Observers of the run: the log on stderr, the journal, systemd, Prometheus, the status and the terminal.

pub(super) mod fan_out;
pub(super) mod journal;
pub(super) mod keyboard;
mod log_lines;
pub(super) mod metrics;
pub(super) mod progress_line;
pub(super) mod run_phase;
pub(super) mod run_status;
pub(super) mod systemd;

//! Observers of the run: the journal, systemd, Prometheus, the status and the terminal.

pub(super) mod journal;
pub(super) mod keyboard;
pub(super) mod metrics;
pub(super) mod progress_line;
pub(super) mod run_phase;
pub(super) mod run_status;
pub(super) mod systemd;

//! The metrics in Prometheus' text format (0.0.4, which the textfile collector reads; not `OpenMetrics`).
//!
//! A pure function of the status. Every metric carries the store as a label, because a machine may have several runs.

use std::fmt::{Display, Write};

use jiff::Timestamp;

use crate::clock;
use crate::history::FREEZE_BOUNDS;
use crate::supervisor::observers::run_phase::State;
use crate::supervisor::observers::run_status::Status;

/// The text, which grows by a figure at a time.
struct Page {
    text: String,
    /// The label of every figure.
    store: String,
}

/// Returns all metrics of a run.
pub(crate) fn of(status: &Status) -> String {
    let store = escaped(&status.store.to_string_lossy());
    let mut page = Page {
        text: String::new(),
        store: format!("store=\"{store}\""),
    };
    page.supervisor(status);
    page.snapshots(status);
    page.last_snapshot(status);
    page.schedule(status);
    page.crashes(status);
    page.store(status);
    page.text
}

impl Page {
    fn supervisor(&mut self, status: &Status) {
        let version = format!("version=\"{}\"", escaped(&status.version));
        self.header("info", "gauge", "Always 1; the version is a label.");
        self.sample("info", &version, 1);
        let up = u8::from(status.state.is_supervised());
        self.gauge(
            "up",
            "Whether a supervisor runs; 0 after its end.",
            Some(up),
        );
        let now = seconds(clock::timestamp());
        self.gauge(
            "updated_timestamp_seconds",
            "When these figures were taken.",
            Some(now),
        );
        self.header(
            "state",
            "gauge",
            "1 for what the run is at, 0 for the other states.",
        );
        // Each as 0 or 1; a run that is not there has no metrics.
        for state in State::ALL.into_iter().filter(|state| *state != State::None) {
            let label = format!("state=\"{}\"", state.as_str());
            self.sample("state", &label, u8::from(state == status.state));
        }
        let summary = &status.summary;
        self.counter(
            "supervised_seconds_total",
            "How long supervisors of this run ran.",
            summary.run_seconds,
        );
        self.gauge(
            "exit_code",
            "Exit code of ckpt-run, once it has ended.",
            status.exit_code,
        );
    }

    fn snapshots(&mut self, status: &Status) {
        let summary = &status.summary;
        self.counter(
            "snapshots_total",
            "Snapshots that became durable images.",
            summary.snapshots,
        );
        self.counter(
            "snapshots_failed_total",
            "Snapshots that came to nothing.",
            summary.failed_snapshots,
        );
        self.gauge(
            "snapshots_failed_in_a_row",
            "Snapshots that have failed since the newest image.",
            Some(status.failed_in_a_row),
        );
        let name = "snapshot_freeze_seconds";
        self.header(
            name,
            "histogram",
            "How long the job stood still for a snapshot after which it went on.",
        );
        let mut count = 0;
        for (bound, more) in FREEZE_BOUNDS.iter().zip(summary.freeze_counts) {
            count += more;
            self.sample(&format!("{name}_bucket"), &format!("le=\"{bound}\""), count);
        }
        let all: u64 = summary.freeze_counts.iter().sum();
        self.sample(&format!("{name}_bucket"), "le=\"+Inf\"", all);
        self.sample(&format!("{name}_sum"), "", summary.freeze_seconds);
        self.sample(&format!("{name}_count"), "", all);
    }

    fn last_snapshot(&mut self, status: &Status) {
        let last = status.last_snapshot();
        self.gauge(
            "last_snapshot_timestamp_seconds",
            "When the newest image became durable.",
            last.map(|last| seconds(last.time)),
        );
        self.gauge(
            "last_snapshot_freeze_seconds",
            "How long the job stood still for it.",
            last.map(|last| last.freeze_seconds),
        );
        self.gauge(
            "last_snapshot_durable_seconds",
            "From its beginning until it was durable.",
            last.map(|last| last.durable_seconds),
        );
        self.gauge(
            "last_snapshot_raw_bytes",
            "What it holds.",
            last.map(|last| last.raw_bytes),
        );
        self.gauge(
            "last_snapshot_stored_bytes",
            "What it added to the store.",
            last.map(|last| last.stored_bytes),
        );
    }

    fn schedule(&mut self, status: &Status) {
        self.gauge(
            "snapshot_interval_seconds",
            "Time between scheduled snapshots.",
            status.interval_seconds,
        );
        self.gauge(
            "next_snapshot_timestamp_seconds",
            "When the next scheduled snapshot is due.",
            status.next_snapshot.map(seconds),
        );
        self.gauge(
            "work_at_risk_seconds",
            "Computing time that a crash now would lose.",
            status.work_at_risk_seconds,
        );
    }

    fn crashes(&mut self, status: &Status) {
        let summary = &status.summary;
        self.counter("crashes_total", "Crashes of the job.", summary.crashes);
        self.counter(
            "hangs_total",
            "How often the job was taken for hung.",
            summary.hangs,
        );
        self.counter(
            "restores_total",
            "Images that became the running job.",
            summary.restores,
        );
        self.counter(
            "restore_seconds_total",
            "How long that took, all together.",
            summary.restore_seconds,
        );
        self.counter(
            "restores_failed_total",
            "Images that could not be restored.",
            summary.failed_restores,
        );
        self.counter(
            "lost_work_seconds_total",
            "Computing time that was done again.",
            summary.lost_seconds,
        );
        self.gauge(
            "saved_work_seconds",
            "Computing time that would have been done again without images.",
            Some(summary.saved_seconds),
        );
        self.gauge(
            "restarts_used",
            "Restarts since the newest image.",
            status.restarts_used,
        );
        self.gauge(
            "restarts_left",
            "Restarts that are left without getting further.",
            status.restarts_left,
        );
    }

    fn store(&mut self, status: &Status) {
        let usage = status.usage.as_ref();
        self.gauge(
            "store_images",
            "Images in the store.",
            usage.map(|usage| usage.images),
        );
        self.gauge(
            "store_bytes",
            "Disk space that images and their data take.",
            usage.map(|usage| usage.bytes),
        );
        self.gauge(
            "store_free_bytes",
            "Disk space that is free where the store is.",
            status.free_bytes,
        );
    }

    fn counter(&mut self, name: &str, help: &str, value: impl Display) {
        self.header(name, "counter", help);
        self.sample(name, "", value);
    }

    /// Adds a gauge. An unknown value is left out.
    fn gauge(&mut self, name: &str, help: &str, value: Option<impl Display>) {
        if let Some(value) = value {
            self.header(name, "gauge", help);
            self.sample(name, "", value);
        }
    }

    fn header(&mut self, name: &str, kind: &str, help: &str) {
        // Writing into a String does not fail, here and below.
        let _ = writeln!(
            self.text,
            "# HELP ckpt_run_{name} {help}\n# TYPE ckpt_run_{name} {kind}"
        );
    }

    fn sample(&mut self, name: &str, label: &str, value: impl Display) {
        let store = &self.store;
        let comma = if label.is_empty() { "" } else { "," };
        let _ = writeln!(
            self.text,
            "ckpt_run_{name}{{{store}{comma}{label}}} {value}"
        );
    }
}

fn seconds(time: Timestamp) -> f64 {
    time.as_duration().as_secs_f64()
}

/// Escapes a label's value as the format requires.
fn escaped(text: &str) -> String {
    text.replace('\\', "\\\\")
        .replace('"', "\\\"")
        .replace('\n', "\\n")
}

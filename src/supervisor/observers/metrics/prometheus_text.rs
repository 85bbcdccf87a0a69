//! The metrics in Prometheus' text format (0.0.4, which the textfile collector reads; not `OpenMetrics`).
//!
//! A pure function of the status. Every value carries the store as a label, because a machine may have several runs.

use std::fmt::{Display, Write};

use jiff::Timestamp;

use crate::clock;
use crate::history::{FREEZE_BOUNDS, Summary};
use crate::supervisor::observers::run_phase::State;
use crate::supervisor::observers::run_status::Status;

/// Help text of a metric.
fn help(name: &str) -> &'static str {
    match name {
        "info" => "Always 1; the version is a label.",
        "up" => "1 while a supervisor runs, 0 after its end.",
        "updated_timestamp_seconds" => "Time of these values.",
        "state" => "1 for the present state of the run, 0 for the other states.",
        "supervised_seconds_total" => "Running time of this run's supervisors.",
        "exit_code" => "Exit code of ckpt-run, once it has ended.",
        "snapshots_total" => "Snapshots that became durable images.",
        "snapshots_failed_total" => "Snapshots that failed.",
        "snapshots_failed_in_a_row" => "Snapshots that have failed since the newest image.",
        "snapshot_freeze_seconds" => "Freezes of the job by snapshots after which it continued.",
        "last_snapshot_timestamp_seconds" => "Time at which the newest image became durable.",
        "last_snapshot_freeze_seconds" => "Freeze of the job for the newest image.",
        "last_snapshot_durable_seconds" => {
            "Time from its begin until the newest image was durable."
        }
        "last_snapshot_raw_bytes" => "Size of the newest image's data.",
        "last_snapshot_stored_bytes" => "Bytes that the newest image added to the store.",
        "snapshot_interval_seconds" => "Time between scheduled snapshots.",
        "next_snapshot_timestamp_seconds" => "Time of the next scheduled snapshot.",
        "work_at_risk_seconds" => "Computing time that a crash now would lose.",
        "crashes_total" => "Crashes of the job.",
        "hangs_total" => "Hangs of the job.",
        "restores_total" => "Images that became the running job.",
        "restore_seconds_total" => "Duration of those restores.",
        "restores_failed_total" => "Images that could not be restored.",
        "lost_work_seconds_total" => "Computing time that was done again.",
        "saved_work_seconds" => "Computing time that would have been done again without images.",
        "restarts_used" => "Restarts since the newest image.",
        "restarts_left" => "Restarts that are left until there is progress.",
        "store_images" => "Images in the store.",
        "store_bytes" => "Disk space that images and their data use.",
        "store_free_bytes" => "Free disk space of the store's file system.",
        "remote_sent_bytes_total" => "Bytes that this supervisor has uploaded.",
        "remote_behind" => "1 while an image waits for its upload, or is being uploaded.",
        "remote_failing" => "1 if the latest upload has failed.",
        _ => unreachable!("{name} has no help text"),
    }
}

/// Page of metrics.
struct Page {
    text: String,
    /// Label of every value.
    store: String,
}

/// Returns all metrics of a run.
pub(crate) fn of(status: &Status) -> String {
    let store = escaped(&status.store.to_string_lossy());
    let mut page = Page {
        text: String::new(),
        store: format!("store=\"{store}\""),
    };
    page.run(status);
    page.snapshots(status);
    page.crashes(status);
    let usage = status.usage.as_ref();
    page.add("store_images", usage.map(|usage| usage.images));
    page.add("store_bytes", usage.map(|usage| usage.bytes));
    page.add("store_free_bytes", status.free_bytes);
    let remote = status.remote.as_ref();
    page.add(
        "remote_sent_bytes_total",
        remote.map(|remote| remote.sent_bytes),
    );
    let behind = remote.map(|remote| u8::from(remote.waiting.is_some()));
    page.add("remote_behind", behind);
    let failing = remote.map(|remote| u8::from(remote.failure.is_some()));
    page.add("remote_failing", failing);
    page.text
}

impl Page {
    fn run(&mut self, status: &Status) {
        let version = format!("version=\"{}\"", escaped(&status.version));
        self.header("info", "gauge");
        self.sample("info", &version, 1);
        self.add("up", Some(u8::from(status.state.is_supervised())));
        let now = seconds(clock::timestamp());
        self.add("updated_timestamp_seconds", Some(now));
        self.header("state", "gauge");
        // A store without a run has no metrics.
        for state in State::ALL.into_iter().filter(|state| *state != State::None) {
            let label = format!("state=\"{}\"", state.as_str());
            self.sample("state", &label, u8::from(state == status.state));
        }
        let supervised = status.summary.run_seconds;
        self.add("supervised_seconds_total", Some(supervised));
        self.add("exit_code", status.exit_code);
    }

    fn snapshots(&mut self, status: &Status) {
        let summary = &status.summary;
        self.add("snapshots_total", Some(summary.snapshots));
        self.add("snapshots_failed_total", Some(summary.failed_snapshots));
        let in_a_row = status.failed_in_a_row;
        self.add("snapshots_failed_in_a_row", Some(in_a_row));
        self.freezes(summary);
        let last = status.last_snapshot();
        let durable_at = last.map(|last| seconds(last.time));
        self.add("last_snapshot_timestamp_seconds", durable_at);
        let freeze = last.map(|last| last.freeze_seconds);
        self.add("last_snapshot_freeze_seconds", freeze);
        let durable = last.map(|last| last.durable_seconds);
        self.add("last_snapshot_durable_seconds", durable);
        self.add("last_snapshot_raw_bytes", last.map(|last| last.raw_bytes));
        let stored = last.map(|last| last.stored_bytes);
        self.add("last_snapshot_stored_bytes", stored);
        self.add("snapshot_interval_seconds", status.interval_seconds);
        let next = status.next_snapshot.map(seconds);
        self.add("next_snapshot_timestamp_seconds", next);
        self.add("work_at_risk_seconds", status.work_at_risk_seconds);
    }

    fn freezes(&mut self, summary: &Summary) {
        let name = "snapshot_freeze_seconds";
        self.header(name, "histogram");
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

    fn crashes(&mut self, status: &Status) {
        let summary = &status.summary;
        self.add("crashes_total", Some(summary.crashes));
        self.add("hangs_total", Some(summary.hangs));
        self.add("restores_total", Some(summary.restores));
        self.add("restore_seconds_total", Some(summary.restore_seconds));
        self.add("restores_failed_total", Some(summary.failed_restores));
        self.add("lost_work_seconds_total", Some(summary.lost_seconds));
        self.add("saved_work_seconds", Some(summary.saved_seconds));
        self.add("restarts_used", status.restarts_used);
        self.add("restarts_left", status.restarts_left);
    }

    /// Adds a metric with one value. An unknown value is left out.
    fn add(&mut self, name: &str, value: Option<impl Display>) {
        if let Some(value) = value {
            let is_counter = name.ends_with("_total");
            self.header(name, if is_counter { "counter" } else { "gauge" });
            self.sample(name, "", value);
        }
    }

    fn header(&mut self, name: &str, kind: &str) {
        let help = help(name);
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

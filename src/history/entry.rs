//! The schema of the event log. Fields are added, never renamed or removed; readers ignore unknown fields.

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

/// A line of the log.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Entry {
    /// Time of the entry, UTC.
    pub time: Timestamp,
    /// Seconds since its supervisor was opened, by a clock that cannot be set; time stopped by the terminal is left
    /// out.
    #[serde(default)]
    pub elapsed: f64,
    /// The run that the entry belongs to: the time of its first start, in milliseconds since 1970.
    pub run: u64,
    /// The event.
    #[serde(flatten)]
    pub event: Event,
}

/// A part of a snapshot or restore.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Phase {
    /// Its name, as in the log.
    pub name: String,
    /// Duration of the phase.
    pub seconds: f64,
}

/// An event of a run. Durations are seconds, sizes bytes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "kebab-case")]
pub enum Event {
    /// A supervisor began its work on the run.
    Opened {
        /// Version of ckpt-run.
        version: String,
        /// Pid of the supervisor.
        pid: u32,
        /// The job's command line.
        command: Vec<String>,
    },
    /// The job was started from the beginning.
    Started {
        /// Host pid of its first process; none if that had already exited.
        #[serde(default)]
        pid: Option<i32>,
    },
    /// A cloud announced that it takes the machine back.
    Preempted {
        /// `aws`, `gcp` or `azure`.
        cloud: String,
        /// `terminate`, `stop`, `hibernate`, `preempt` or `other`.
        action: String,
        /// Earliest time of the action.
        deadline: Timestamp,
    },
    /// A snapshot begins; the job still computes.
    SnapshotBegan {
        /// `schedule`, `signal`, `request` or `stop`.
        trigger: String,
    },
    /// The job continues; the image is not durable yet.
    Computing {
        /// Duration of the freeze.
        freeze_seconds: f64,
    },
    /// An image is durable.
    Snapshot {
        /// Its id.
        image: String,
        /// The same words as in `snapshot-began`.
        trigger: String,
        /// Duration of the freeze.
        freeze_seconds: f64,
        /// Time from the beginning until the image was durable.
        durable_seconds: f64,
        /// Size of the image's content.
        raw_bytes: u64,
        /// Bytes that the image added to the store.
        stored_bytes: u64,
        /// Durations of the phases.
        phases: Vec<Phase>,
    },
    /// A snapshot failed; older images are untouched.
    SnapshotFailed {
        /// Kind of the failure, one word; `ended` if the job exited meanwhile, which is not a failure.
        kind: String,
        /// The reason in words.
        reason: String,
        /// True if the job continues as before; otherwise it is ended and restored.
        job_goes_on: bool,
    },
    /// The job exited in a way that leads to a restart or to giving up.
    Crashed {
        /// Its exit code; 128+n for signal n.
        code: u8,
        /// Its end in words: `exit code 1`, `SIGSEGV`.
        how: String,
        /// Computing time since the newest image, which has to be repeated.
        lost_seconds: f64,
    },
    /// The job was considered hung; it is ended and restored.
    Hung {
        /// The sign of the hang, in words.
        reason: String,
        /// Duration of that sign.
        silent_seconds: f64,
    },
    /// An image is about to become the job. The job's processes do not run yet.
    RestoreBegan {
        /// Its id.
        image: String,
    },
    /// An image became the running job.
    Restored {
        /// Its id.
        image: String,
        /// Time from the beginning of the restore until the job computed.
        seconds: f64,
        /// Durations of the phases.
        phases: Vec<Phase>,
    },
    /// An image could not be restored; the next older one is tried.
    RestoreFailed {
        /// Its id.
        image: String,
        /// The reason in words.
        reason: String,
    },
    /// The job is paused and holds no GPU.
    Paused {
        /// The image that the job was saved as.
        image: String,
    },
    /// The paused job computes again.
    Unpaused {
        /// Duration of the resumption.
        seconds: f64,
    },
    /// A new time between snapshots was chosen (`interval = "auto"`).
    Interval {
        /// The time between two snapshots.
        seconds: f64,
        /// The calculation, in words.
        why: String,
    },
    /// A hook ended.
    Hook {
        /// Name of the hook, as in the settings.
        hook: String,
        /// Its result: `done`, `failed`, `timed-out`, `veto`.
        outcome: String,
        /// Its running time.
        seconds: f64,
    },
    /// The supervisor ends.
    Ended {
        /// `finished`, `failed`, `saved` or `error`.
        how: String,
        /// Exit code of ckpt-run.
        code: u8,
    },
    /// An event of a newer version.
    #[serde(other)]
    Unknown,
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    const GUIDE: &str = include_str!("../../docs/guide/events.md");

    /// Returns the names of the variants, as in this file.
    fn variants() -> BTreeSet<String> {
        let source = include_str!("entry.rs");
        let (_, body) = source.split_once("pub enum Event {").unwrap();
        let (body, _) = body.split_once("\n}\n").unwrap();
        let names = body.lines().filter_map(|line| line.strip_suffix(" {"));
        names.map(|name| name.trim().to_owned()).collect()
    }

    #[test]
    fn the_guide_shows_every_event_with_all_its_fields() {
        let mut shown = BTreeSet::new();
        for line in GUIDE.lines().filter(|line| line.starts_with('{')) {
            let entry: Entry = serde_json::from_str(line).unwrap();
            assert_ne!(entry.event, Event::Unknown, "{line}");
            let given: serde_json::Value = serde_json::from_str(line).unwrap();
            let known = serde_json::to_value(&entry).unwrap();
            let keys = |value: &serde_json::Value| -> Vec<String> {
                value.as_object().unwrap().keys().cloned().collect()
            };
            assert_eq!(keys(&given), keys(&known), "{line}");
            let name = format!("{:?}", entry.event);
            shown.insert(name.split(' ').next().unwrap().to_owned());
        }
        assert_eq!(shown, variants());
    }
}

//! The schema of the event log. Fields are added, never renamed or removed; readers ignore what they do not know.

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

/// A line of the log.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Entry {
    /// When it was written, UTC.
    pub time: Timestamp,
    /// Seconds since its supervisor was opened, by a clock that nobody sets; time stopped by the terminal is left out.
    #[serde(default)]
    pub elapsed: f64,
    /// The run it belongs to: when that was first started, milliseconds since 1970.
    pub run: u64,
    /// What happened.
    #[serde(flatten)]
    pub event: Event,
}

/// A part of a snapshot or restore.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Phase {
    /// Its name, as in the log.
    pub name: String,
    /// How long it took.
    pub seconds: f64,
}

/// What happened. Durations are seconds, sizes bytes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "kebab-case")]
pub enum Event {
    /// A supervisor began its work on the run.
    Opened {
        /// Version of ckpt-run.
        version: String,
        /// The supervisor's process.
        pid: u32,
        /// The job's command line.
        command: Vec<String>,
    },
    /// The job was started anew.
    Started {
        /// Its first process, as the machine sees it; none where it had ended already.
        #[serde(default)]
        pid: Option<i32>,
    },
    /// A snapshot begins; the job still computes.
    SnapshotBegan {
        /// `schedule`, `signal`, `request` or `stop`.
        trigger: String,
    },
    /// The job computes again; the image is not durable yet.
    Computing {
        /// How long it stood still.
        freeze_seconds: f64,
    },
    /// An image is durable.
    Snapshot {
        /// Its id.
        image: String,
        /// As in `snapshot-began`.
        trigger: String,
        /// How long the job stood still.
        freeze_seconds: f64,
        /// From the beginning until the image was durable.
        durable_seconds: f64,
        /// What the image holds.
        raw_bytes: u64,
        /// What it added to the store.
        stored_bytes: u64,
        /// What the time was spent on.
        phases: Vec<Phase>,
    },
    /// A snapshot came to nothing; older images are untouched.
    SnapshotFailed {
        /// Kind of the failure, a word; `ended` where the job ended meanwhile, which is no failure.
        kind: String,
        /// The reason in words.
        reason: String,
        /// True if the job computes as before; otherwise it is ended and restored.
        job_goes_on: bool,
    },
    /// The job ended in a way that is restarted, or gave up.
    Crashed {
        /// Its exit code; 128+n for signal n.
        code: u8,
        /// How, in words: `exit code 1`, `SIGSEGV`.
        how: String,
        /// Computing time since the newest image, which is done again.
        lost_seconds: f64,
    },
    /// The job was taken for hung; it is ended and restored.
    Hung {
        /// Which sign, in words.
        reason: String,
        /// How long that had lasted.
        silent_seconds: f64,
    },
    /// An image became the running job.
    Restored {
        /// Its id.
        image: String,
        /// From the beginning of the restore until the job computed.
        seconds: f64,
        /// What the time was spent on.
        phases: Vec<Phase>,
    },
    /// An image could not be restored here; the next older one is tried.
    RestoreFailed {
        /// Its id.
        image: String,
        /// The reason in words.
        reason: String,
    },
    /// The job stands still and holds no GPU.
    Paused {
        /// The image that it is.
        image: String,
    },
    /// The paused job computes again.
    Unpaused {
        /// How long that took.
        seconds: f64,
    },
    /// The time between snapshots was chosen anew (`interval = "auto"`).
    Interval {
        /// The time between two snapshots.
        seconds: f64,
        /// The arithmetic, in words.
        why: String,
    },
    /// A hook ended.
    Hook {
        /// Which one, as in the settings.
        hook: String,
        /// How: `done`, `failed`, `timed-out`, `veto`.
        outcome: String,
        /// How long it ran.
        seconds: f64,
    },
    /// The supervisor ends.
    Ended {
        /// `finished`, `failed`, `saved` or `error`.
        how: String,
        /// Our exit code.
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

    /// Names of the variants, as in this file.
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

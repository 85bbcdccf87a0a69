//! What a rehearsal has found.

use serde::Serialize;

/// How a step went.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Outcome {
    /// As it should.
    Ok,
    /// Nothing speaks against it, and not all could be told.
    Note,
    /// It failed, and the rehearsal with it.
    Failed,
}

/// A step of the rehearsal.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Step {
    /// Its name, in one or two words.
    pub name: &'static str,
    /// How it went.
    pub outcome: Outcome,
    /// What was seen.
    pub detail: String,
}

/// Why the job cannot be kept alive, or could not be tried.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Failure {
    /// Kind of a snapshot's failure, as in the event log; null for other failures.
    pub kind: Option<String>,
    /// What happened.
    pub reason: String,
    /// What to do.
    pub remedy: String,
}

/// What was measured, as far as it came to that. Durations are seconds, sizes bytes.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Figures {
    /// How long the job stood still for each snapshot.
    pub freeze_seconds: Vec<f64>,
    /// From the beginning of each snapshot until its image was durable.
    pub durable_seconds: Vec<f64>,
    /// From the beginning of the restore until the job computed.
    pub restore_seconds: Option<f64>,
    /// What the first image holds.
    pub raw_bytes: Option<u64>,
    /// What the first image takes in the store.
    pub stored_bytes: Option<u64>,
    /// What the second image added to it.
    pub added_bytes: Option<u64>,
    /// The suggested time between snapshots.
    pub interval_seconds: Option<u64>,
    /// Its arithmetic, in words.
    pub interval_why: Option<String>,
    /// The time between two failures that it assumes (`snapshot.mtbf`).
    pub assumed_mtbf_seconds: Option<f64>,
}

/// A stream of the job's, between the snapshot and the kill, and again after the restore.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Compared {
    /// "stdout" or "stderr".
    pub stream: &'static str,
    /// How the two are to each other.
    pub result: Equality,
    /// Bytes from the snapshot on that are the same.
    pub bytes: usize,
}

/// How the output after a restore is to that before the kill.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Equality {
    /// What was there before the snapshot is not there any more as it was.
    Damaged,
    /// Nothing was printed, the first time or the second: there is nothing to compare.
    Nothing,
    /// As far as both go.
    Same,
    /// They differ, as with times or random numbers.
    Differs,
}

/// The result.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Report {
    /// True if the job can be kept alive, as far as a rehearsal tells.
    pub pass: bool,
    /// Why not.
    pub failure: Option<Failure>,
    /// The job's command line.
    pub command: Vec<String>,
    /// What was done and seen, in order.
    pub steps: Vec<Step>,
    /// What was compared of the job's output, if it came to that: stdout and stderr.
    pub output: Vec<Compared>,
    /// What was measured.
    pub figures: Figures,
    /// Where the images, logs and the output are, if they were to be kept.
    pub kept: Option<std::path::PathBuf>,
}

//! Report of a rehearsal.

use serde::Serialize;

/// Outcome of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Outcome {
    /// The step succeeded.
    Ok,
    /// The step succeeded, as far as it could be checked.
    Note,
    /// The step failed, and the rehearsal with it.
    Failed,
}

/// A step of the rehearsal.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Step {
    /// Its name, in one or two words.
    pub name: &'static str,
    /// Its outcome.
    pub outcome: Outcome,
    /// The observation.
    pub detail: String,
}

/// Why the job cannot be kept alive, or could not be tried.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Failure {
    /// Kind of a snapshot's failure, as in the event log; null for other failures.
    pub kind: Option<String>,
    /// The event.
    pub reason: String,
    /// The remedy.
    pub remedy: String,
}

/// Measurements, as far as the rehearsal came. Durations are seconds, sizes bytes.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Figures {
    /// Freeze of each snapshot.
    pub freeze_seconds: Vec<f64>,
    /// Time from the beginning of each snapshot until its image was durable.
    pub durable_seconds: Vec<f64>,
    /// Time from the beginning of the restore until the job computed.
    pub restore_seconds: Option<f64>,
    /// Size of the first image's content.
    pub raw_bytes: Option<u64>,
    /// Size of the first image in the store.
    pub stored_bytes: Option<u64>,
    /// Bytes that the second image added to the store.
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
    /// Result of the comparison.
    pub result: Equality,
    /// Bytes from the snapshot on that are the same.
    pub bytes: usize,
}

/// Relation between the output after a restore and the output before the kill.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Equality {
    /// Output from before the snapshot was changed or lost.
    Damaged,
    /// Nothing to compare: one of the two printed nothing.
    Nothing,
    /// Equal outputs, as far as both go.
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
    /// The steps, in order.
    pub steps: Vec<Step>,
    /// Comparisons of the job's stdout and stderr, if the rehearsal came that far.
    pub output: Vec<Compared>,
    /// The measurements.
    pub figures: Figures,
    /// Folder of the images, logs and the output, if they are kept.
    pub kept: Option<std::path::PathBuf>,
}

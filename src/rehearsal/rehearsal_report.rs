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

/// The reason why the job cannot be kept alive, or could not be tried.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Failure {
    /// Kind of a snapshot's failure, as in the event log; null for other failures.
    pub kind: Option<String>,
    /// The failure in words.
    pub reason: String,
    /// The remedy.
    pub remedy: String,
}

/// Measurements, up to the step that the rehearsal reached. Durations are seconds, sizes bytes.
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
    /// The calculation of that time, in words.
    pub interval_why: Option<String>,
    /// The time between two failures that the calculation assumes (`snapshot.mtbf`).
    pub assumed_mtbf_seconds: Option<f64>,
}

/// Comparison of one of the job's streams between the snapshot and the kill with the same stream after the restore.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Compared {
    /// "stdout" or "stderr".
    pub stream: &'static str,
    /// Result of the comparison.
    pub result: Equality,
    /// Number of equal bytes from the snapshot on.
    pub bytes: usize,
}

/// Relation between the output after a restore and the output before the kill.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Equality {
    /// Output from before the snapshot was changed or lost.
    Damaged,
    /// No data to compare: one of the two outputs is empty.
    Nothing,
    /// Equal outputs, up to the end of the shorter one.
    Same,
    /// The outputs differ, as with times or random numbers.
    Differs,
}

/// The result.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Report {
    /// True if the job can be kept alive, as far as a rehearsal can show.
    pub pass: bool,
    /// The reason if it cannot.
    pub failure: Option<Failure>,
    /// The job's command line.
    pub command: Vec<String>,
    /// The steps, in order.
    pub steps: Vec<Step>,
    /// Comparisons of the job's stdout and stderr, if the rehearsal reached that step.
    pub output: Vec<Compared>,
    /// The measurements.
    pub figures: Figures,
    /// Folder of the images, the logs and the output, if they are kept.
    pub kept: Option<std::path::PathBuf>,
}

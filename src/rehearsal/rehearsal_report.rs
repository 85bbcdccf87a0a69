//! Report of a rehearsal.

use serde::Serialize;

/// Outcome of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Outcome {
    /// The step succeeded.
    Ok,
    /// The step has nothing to check.
    Skipped,
    /// The step cannot decide if the restored job is correct.
    Unclear,
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

/// The verdict.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "UPPERCASE")]
pub enum Verdict {
    /// The restored job equals two uninterrupted ones in everything that the report lists as checked.
    Pass,
    /// The job cannot be snapshotted or restored, or the restored job differs.
    Fail,
    /// The comparison proves nothing: the uninterrupted runs differ, or could not be compared.
    Inconclusive,
}

/// The reason why the verdict is not PASS.
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

/// Comparison of one stream of the restored job with that of the uninterrupted runs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Compared {
    /// "stdout" or "stderr".
    pub stream: &'static str,
    /// Result of the comparison.
    pub result: Equality,
    /// Number of equal bytes, from the beginning.
    pub bytes: u64,
    /// Number of equal lines, from the beginning.
    pub lines: u64,
}

/// Relation between the output of the restored job and that of the uninterrupted runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Equality {
    /// No output to compare after the snapshot.
    Nothing,
    /// Equal outputs, up to the end of the shortest one.
    Same,
    /// The outputs differ, after a restore or without one.
    Differs,
}

/// The result.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Report {
    /// True if the verdict is PASS.
    pub pass: bool,
    /// The verdict.
    pub verdict: Verdict,
    /// The reason if the verdict is not PASS.
    pub failure: Option<Failure>,
    /// Checks on which a PASS is based, and their extent.
    pub checked: Vec<String>,
    /// Files of the job whose content the image does not have.
    pub not_kept: Vec<super::NotKept>,
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

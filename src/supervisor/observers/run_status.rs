//! Status of a run: from its supervisor, or from its store if no supervisor runs.

use std::path::{Path, PathBuf};
use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use serde::{Deserialize, Serialize};

use super::run_phase::State;
use crate::clock;
use crate::history::{self, Account, Freeze, Summary};
use crate::path_text;
use crate::remote_run::UploadProgress;
use crate::run::machine;
use crate::run::progress::WorkProgress;
use crate::run::run_state::{Progress, RunState, RunStateError};
use crate::store::Usage;
use crate::store::usage;
use crate::supervisor::policy::schedule::Moment;
use crate::supervisor::preemption::announcement::Announcement;

/// Limit on the shown command line: enough to recognize it.
const COMMAND_BYTES_MAX: usize = 4096;

/// Status of a run. Unknown or inapplicable values are null; durations are seconds.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Status {
    /// The phase of the run.
    pub state: State,
    /// Since when.
    pub since: Option<Timestamp>,
    /// Time in this phase, by the monotonic clock.
    pub since_seconds: Option<f64>,
    /// Version of ckpt-run.
    pub version: String,
    /// Folder of the images.
    #[serde(with = "path_text")]
    pub store: PathBuf,
    /// The supervisor's process.
    pub pid: Option<u32>,
    /// Running time of the run, all its supervisors together: `run_seconds` of the summary.
    pub uptime_seconds: Option<f64>,
    /// Time at which the present attempt was restored; null if it was started.
    pub restored: Option<Timestamp>,
    /// Time since the restore, by the monotonic clock.
    pub restored_seconds: Option<f64>,
    /// The image that it was restored from.
    pub restored_image: Option<String>,
    /// The job's first process, as the machine sees it.
    pub job_pid: Option<i32>,
    /// The job's command line; of a very long one, the first part.
    pub command: Vec<String>,
    /// The run: when it was first started, milliseconds since 1970.
    pub run: Option<u64>,
    /// Time of the next scheduled snapshot.
    pub next_snapshot: Option<Timestamp>,
    /// Time until then.
    pub next_snapshot_seconds: Option<f64>,
    /// Time between scheduled snapshots; of a cron schedule, from the next to the one after it.
    pub interval_seconds: Option<f64>,
    /// Time until the job is restarted, if a restart is due.
    pub next_restart_seconds: Option<f64>,
    /// The last snapshots, at most ten, oldest first.
    pub snapshots: Vec<Freeze>,
    /// Snapshots that have failed since the newest image.
    pub failed_in_a_row: u64,
    /// Computing time that a crash now would lose.
    pub work_at_risk_seconds: Option<f64>,
    /// Restarts since the newest image.
    pub restarts_used: Option<u32>,
    /// Restarts that are left until the job gets further than before; null where there is no limit.
    pub restarts_left: Option<u32>,
    /// Disk usage of the store.
    pub usage: Option<Usage>,
    /// Free bytes of its disk.
    pub free_bytes: Option<u64>,
    /// Notice of the cloud that takes this machine back; null without one.
    pub preemption: Option<Announcement>,
    /// Uploads to the remote store; null without one.
    pub remote: Option<UploadProgress>,
    /// Progress of the snapshot or restore under way.
    pub progress: Option<WorkProgress>,
    /// Summary of the run so far.
    pub summary: Summary,
    /// The last supervisor's exit code, where none runs.
    pub exit_code: Option<u8>,
}

impl Status {
    /// The newest snapshot that the log knows of.
    #[must_use]
    pub fn last_snapshot(&self) -> Option<&Freeze> {
        self.snapshots.last()
    }

    /// Adds the disk usage, which takes a look at every file of the store.
    pub(crate) fn measured(self) -> Self {
        Self {
            usage: usage(&self.store).ok(),
            free_bytes: machine::free_disk(&self.store).ok(),
            ..self
        }
    }
}

/// Returns the status from a store whose supervisor does not run.
///
/// # Errors
/// When the run's state cannot be read.
pub fn status_of_store(store: &Path) -> Result<Status, RunStateError> {
    let nothing = Status {
        version: env!("CARGO_PKG_VERSION").to_owned(),
        store: store.to_owned(),
        ..Status::default()
    }
    .measured();
    let Some(state) = RunState::load(store)? else {
        return Ok(nothing);
    };
    let account = Account::of(history::entries(&history::path(store)));
    let account = Some(account).filter(|account| account.run() == Some(state.started_unix_ms));
    let account = account.unwrap_or_default();
    let ended = account.ended();
    Ok(Status {
        state: match state.progress {
            Progress::Running if ended.is_none() => State::Killed,
            progress => State::at_end(progress),
        },
        since: ended.map(|(_, _, time)| time),
        command: beginning(&state.command.shown()),
        run: Some(state.started_unix_ms),
        snapshots: account.freezes().cloned().collect(),
        failed_in_a_row: account.failed_in_a_row(),
        summary: account.summary_then(),
        exit_code: ended.map(|(_, code, _)| code),
        ..nothing
    })
}

/// Returns the time at which this wait is over.
pub(crate) fn after(now: Moment, wait: Duration) -> Option<Timestamp> {
    let wait = SignedDuration::try_from(wait).ok()?;
    clock::timestamp_of(now.unix_ms).checked_add(wait).ok()
}

/// Returns as many words of a command line as a status has.
pub(crate) fn beginning(command: &[String]) -> Vec<String> {
    let mut left = COMMAND_BYTES_MAX;
    let fits = |word: &&String| {
        let fits = word.len() <= left;
        left = left.saturating_sub(word.len());
        fits
    };
    command.iter().take_while(fits).cloned().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_guide_names_every_field_and_every_state() {
        let guide = include_str!("../../../docs/guide/status.md");
        let status = Status {
            usage: Some(Usage::default()),
            ..Status::default()
        };
        let status = serde_json::to_value(status).unwrap();
        for part in [&status, &status["usage"], &status["summary"]] {
            for field in part.as_object().unwrap().keys() {
                assert!(guide.contains(&format!("`{field}`")), "{field}");
            }
        }
        for state in State::ALL {
            assert!(guide.contains(&format!("`{}`", state.as_str())));
            assert_eq!(serde_json::to_value(state).unwrap(), state.as_str());
        }
    }

    #[test]
    fn status_of_newer_and_older_supervisors_is_understood() {
        let text = r#"{"state":"running","mood":"good","summary":{"snapshots":3,"naps":1}}"#;
        let status: Status = serde_json::from_str(text).unwrap();
        assert_eq!(
            (status.state, status.summary.snapshots),
            (State::Running, 3)
        );
        assert_eq!(status.pid, None);
    }

    #[test]
    fn a_long_command_line_is_told_in_part() {
        let words = vec!["x".repeat(1000); 10];
        assert_eq!(beginning(&words).len(), 4);
        assert_eq!(beginning(&["a".to_owned()]), ["a"]);
    }
}

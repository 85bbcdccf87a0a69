//! Signs that the job computes, or has exited.

use std::fmt;
use std::time::Duration;

use super::RehearsalError;
use super::job_sample::JobSample;
use super::trial::Trial;
use crate::clock;
use crate::history::Event;
use crate::supervisor::request_status;

/// Minimum time of watching a job: its output in that time is enough for a comparison.
pub(super) const LEAST: Duration = Duration::from_secs(1);
/// Computing time of a job without output before its first snapshot: it may be loading its data.
pub(super) const QUIET_START: Duration = Duration::from_secs(10);
/// CPU time that shows that a job without output has begun: a program that only waits needs less to load.
const CPU_AT_FIRST_SECONDS: f64 = 1.0;
/// CPU time that shows that the job continues.
const CPU_MORE_SECONDS: f64 = 0.1;
/// Limit on the time that a supervisor takes to exit after its job.
const END_LIMIT: Duration = Duration::from_secs(30);

/// The sign by which a job shows that it computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Sign {
    Output,
    Cpu,
    /// The job gave no sign within the time limit.
    None,
    /// The job has exited.
    End,
}

/// The end of a job.
pub(super) struct Ending {
    code: Option<u8>,
    how: Option<String>,
}

impl Ending {
    pub(super) fn is_success(&self) -> bool {
        self.code == Some(0)
    }
}

impl fmt::Display for Ending {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (&self.how, self.code) {
            (Some(how), _) => f.write_str(how),
            (None, Some(code)) => write!(f, "exit code {code}"),
            (None, None) => f.write_str("with ckpt-run"),
        }
    }
}

/// Waits until the job has begun to compute: at least `after`, and at most about `patience`.
pub(super) fn of_beginning(
    trial: &mut Trial<'_>,
    after: Duration,
    patience: Duration,
) -> Result<Sign, RehearsalError> {
    let begun = clock::now();
    let (least, limit) = (after.max(LEAST), patience.max(after).max(LEAST));
    let sign = trial.wait(limit.saturating_add(LEAST), |trial| {
        let age = begun.elapsed();
        if is_over(trial)? {
            return Ok(Some(Sign::End));
        }
        if age < least {
            return Ok(None);
        }
        if trial.output_bytes().iter().any(|bytes| *bytes > 0) {
            return Ok(Some(Sign::Output));
        }
        let computes = age >= QUIET_START.min(limit)
            && sample(trial).is_some_and(|sample| sample.cpu_seconds >= CPU_AT_FIRST_SECONDS);
        Ok(computes.then_some(Sign::Cpu))
    })?;
    Ok(sign.unwrap_or(Sign::None))
}

/// Waits until the job has computed a little more.
pub(super) fn of_progress(
    trial: &mut Trial<'_>,
    patience: Duration,
) -> Result<Sign, RehearsalError> {
    let begun = clock::now();
    let output = trial.output_bytes();
    let mut cpu = sample(trial).map(|sample| sample.cpu_seconds);
    let sign = trial.wait(patience.max(LEAST), |trial| {
        if is_over(trial)? {
            return Ok(Some(Sign::End));
        }
        if begun.elapsed() < LEAST {
            return Ok(None);
        }
        if trial.output_bytes() != output {
            return Ok(Some(Sign::Output));
        }
        let now = sample(trial).map(|sample| sample.cpu_seconds);
        let before = *cpu.get_or_insert(now.unwrap_or(0.0));
        let computes = now.is_some_and(|now| now >= before + CPU_MORE_SECONDS);
        Ok(computes.then_some(Sign::Cpu))
    })?;
    Ok(sign.unwrap_or(Sign::None))
}

/// Returns true if the job has exited for another reason than the rehearsal's own kill.
pub(super) fn is_over(trial: &mut Trial<'_>) -> Result<bool, RehearsalError> {
    let (mut crashes, mut ended) = (0, false);
    for event in trial.events() {
        match event {
            Event::Crashed { .. } => crashes += 1,
            Event::Ended { .. } => ended = true,
            _ => {}
        }
    }
    Ok(crashes > trial.crashes_known || ended || trial.has_ended()?)
}

/// Determines the end of the job.
pub(super) fn end(trial: &mut Trial<'_>) -> Result<Ending, RehearsalError> {
    // The supervisor logs the end at once or a moment later. A supervisor that would restore the job is not waited for.
    trial.wait(END_LIMIT, |trial| Ok(is_over(trial)?.then_some(())))?;
    let mut ending = Ending {
        code: None,
        how: None,
    };
    for event in trial.events() {
        match event {
            Event::Crashed { code, how, .. } => {
                ending = Ending {
                    code: Some(code),
                    how: Some(how),
                }
            }
            Event::Ended { how, code } if how == "finished" => {
                ending = Ending {
                    code: Some(code),
                    how: None,
                }
            }
            _ => {}
        }
    }
    Ok(ending)
}

/// Returns the host pid of the job's first process; none if the job has exited.
pub(super) fn job(trial: &Trial<'_>) -> Option<i32> {
    request_status(&trial.store()).ok()?.job_pid
}

/// Inspects the job at this moment.
pub(super) fn sample(trial: &Trial<'_>) -> Option<JobSample> {
    JobSample::at(job(trial)?)
}

//! The rehearsal, from the check of the machine to the verdict.
//!
//! ```text
//! machine → start → computes → snapshot → continues → kill → restore → continues → compare → snapshot again → end
//! ```
//! Each step adds a line to the report; the first failed step ends the rehearsal.

use std::ffi::OsString;
use std::io::Write;
use std::path::PathBuf;
use std::time::Duration;

use super::RehearsalError;
use super::acts::Acts;
use super::rehearsal_report::{Failure, Outcome, Report, Step};
use super::trial::{Setup, Trial};
use crate::config::Config;
use crate::criu::Search;
use crate::doctor::{self, Status};
use crate::supervisor::policy::interval::{Cost, Rules, Seen, choose};

/// Subject and options of a rehearsal.
pub struct Options<'a> {
    /// ckpt-run's own program.
    pub program: PathBuf,
    /// The user's settings. Images go beside its store, not into it.
    pub config: Config,
    /// The job's command line.
    pub command: Vec<OsString>,
    /// Shortest computing time of the job before its first snapshot.
    pub after: Duration,
    /// Limit on the time in which the job must show that it computes, at each step.
    pub patience: Duration,
    /// Destination of a copy of the job's output, besides its files.
    pub show: Option<Box<dyn Write + 'a>>,
    /// True if images, logs and output are kept.
    pub keep: bool,
    /// Number of the signal that requested the end of the rehearsal, if any.
    pub interrupted: &'a dyn Fn() -> Option<i32>,
}

/// End of a rehearsal before its last step.
pub(super) enum End {
    /// The job, or the machine, failed.
    Failed(Failure),
    /// ckpt-run failed.
    Error(RehearsalError),
}

impl From<RehearsalError> for End {
    fn from(error: RehearsalError) -> Self {
        Self::Error(error)
    }
}

impl End {
    pub(super) fn failed(reason: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self::Failed(Failure {
            kind: None,
            reason: reason.into(),
            remedy: remedy.into(),
        })
    }
}

/// The report under construction.
pub(super) struct Book<'a> {
    pub report: Report,
    tell: &'a mut dyn FnMut(&Step),
}

impl Book<'_> {
    pub(super) fn note(&mut self, name: &'static str, outcome: Outcome, detail: impl Into<String>) {
        let detail = detail.into();
        let step = Step {
            name,
            outcome,
            detail,
        };
        (self.tell)(&step);
        self.report.steps.push(step);
    }

    /// Notes that a step failed, with its reason.
    pub(super) fn failed(&mut self, name: &'static str, end: End) -> End {
        if let End::Failed(failure) = &end {
            let reason = failure.reason.clone();
            self.note(name, Outcome::Failed, reason);
        }
        end
    }
}

/// Runs the job in a trial and reports whether it can be kept alive. `tell` is called after each step.
///
/// Must be called from the process's main thread: the trial's supervisor ends with the thread that started it.
///
/// # Errors
/// The rehearsal could not be completed; limitations of the job are in the report. In every case the job is ended, and
/// nothing is left except the files to be kept.
pub fn rehearse(
    options: Options<'_>,
    tell: &mut dyn FnMut(&Step),
) -> Result<Report, RehearsalError> {
    let words = options.command.iter();
    let report = Report {
        pass: false,
        failure: None,
        command: words
            .map(|word| word.to_string_lossy().into_owned())
            .collect(),
        steps: Vec::new(),
        output: Vec::new(),
        figures: super::Figures::default(),
        kept: None,
    };
    let mut book = Book { report, tell };
    let end = machine(&options.config, &mut book).and_then(|()| trial(options, &mut book));
    let mut report = book.report;
    match end {
        Ok(()) => report.pass = true,
        Err(End::Failed(mut failure)) => {
            if report.kept.is_none() {
                failure.reason = without_log(&failure.reason);
            }
            report.failure = Some(failure);
        }
        Err(End::Error(error)) => return Err(error),
    }
    Ok(report)
}

/// Checks the machine, so that a hopeless rehearsal fails at once.
fn machine(config: &Config, book: &mut Book<'_>) -> Result<(), End> {
    const NAME: &str = "machine";
    let checks = doctor::examine(&config.store, &Search::new(config.criu.path.clone()));
    let Some(problem) = checks.iter().find(|check| check.status == Status::Problem) else {
        book.note(NAME, Outcome::Ok, "it can snapshot and restore jobs");
        return Ok(());
    };
    let reason = format!("{}: {}", problem.name, problem.detail);
    let end = End::failed(reason, problem.remedy.clone().unwrap_or_default());
    Err(book.failed(NAME, end))
}

fn trial(options: Options<'_>, book: &mut Book<'_>) -> Result<(), End> {
    let mut trial = Trial::start(Setup {
        program: &options.program,
        config: &options.config,
        command: &options.command,
        show: options.show,
        interrupted: options.interrupted,
    })?;
    let mut acts = Acts {
        trial: &mut trial,
        book,
        after: options.after,
        patience: options.patience,
    };
    let played = acts.play();
    book.report.kept = trial.end(options.keep);
    played?;
    suggest(Rules::from(&options.config.snapshot), book);
    Ok(())
}

/// Suggests the interval that `interval = "auto"` would choose.
fn suggest(rules: Rules, book: &mut Book<'_>) {
    let figures = &mut book.report.figures;
    let longest = |times: &[f64]| {
        let longest = times.iter().copied().fold(0.0, f64::max);
        Duration::try_from_secs_f64(longest).unwrap_or(Duration::MAX)
    };
    let freeze = longest(&figures.freeze_seconds);
    let cost = Cost {
        freeze,
        slowdown: Duration::ZERO,
        writing: longest(&figures.durable_seconds).saturating_sub(freeze),
    };
    let seen = Seen {
        cost: Some(cost),
        ..Seen::default()
    };
    let chosen = choose(rules, seen);
    figures.interval_seconds = Some(rounded(chosen.interval));
    figures.interval_why = Some(chosen.to_string());
    figures.assumed_mtbf_seconds = Some(chosen.mtbf.as_secs_f64());
}

/// Rounds to seconds, never to 0. The assumed time between failures is no more exact than that.
fn rounded(time: Duration) -> u64 {
    let seconds = time.as_secs();
    let step = match seconds {
        ..60 => 5,
        60..300 => 10,
        300..3600 => 60,
        3600.. => 600,
    };
    (seconds.saturating_add(step / 2) / step * step).max(step)
}

/// Removes the path of a log that is deleted with the trial.
fn without_log(reason: &str) -> String {
    match reason.split_once(" (log: ") {
        Some((reason, log)) => {
            let rest = log.split_once(')').map_or("", |(_, rest)| rest);
            format!("{reason}{rest}")
        }
        None => reason.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_interval_is_rounded_to_what_people_say() {
        for (seconds, expected) in [
            (0, 5),
            (7, 5),
            (46, 45),
            (208, 210),
            (929, 900),
            (5000, 4800),
        ] {
            assert_eq!(rounded(Duration::from_secs(seconds)), expected, "{seconds}");
        }
    }

    #[test]
    fn a_log_that_is_gone_is_not_named() {
        assert_eq!(
            without_log("cannot dump: x (CRIU: y); do z (log: /t/logs/1.log)"),
            "cannot dump: x (CRIU: y); do z"
        );
        assert_eq!(without_log("plain"), "plain");
    }
}

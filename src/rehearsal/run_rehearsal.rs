//! The rehearsal, from the check of the machine to the verdict.
//!
//! ```text
//! machine → start → computes → snapshot → continues → kill → restore → continues → snapshot again → end
//!         → first uninterrupted run → second uninterrupted run → compare
//! ```
//! Each step adds a line to the report; the first failed step ends the rehearsal. The trial comes first, so that a job
//! that cannot be snapshotted fails soon.

use std::ffi::OsString;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::RehearsalError;
use super::acts::{Acts, Restored};
use super::agreement::Runs;
use super::copies::Copies;
use super::not_kept::NotKept;
use super::rehearsal_report::{Failure, Outcome, Report, Step, Verdict};
use super::trial::{AfterCrash, Setup, Trial, folder};
use super::uninterrupted::{self, Completed, Ran, Uninterrupted};
use crate::clock;
use crate::config::{Config, Loaded};
use crate::criu::Search;
use crate::doctor::{self, Status};
use crate::supervisor::policy::interval::{Cost, Rules, Seen, choose};

/// Streams to compare.
pub(super) const STREAMS: [&str; 2] = ["stdout", "stderr"];

/// Subject and options of a rehearsal.
pub struct Options<'a> {
    /// ckpt-run's own program.
    pub program: PathBuf,
    /// The user's settings. Images go beside its store, not into it.
    pub settings: Loaded,
    /// The job's command line.
    pub command: Vec<OsString>,
    /// Shortest computing time of the job before its first snapshot.
    pub after: Duration,
    /// Limit on the time in which the job must show that it computes, at each step.
    pub patience: Duration,
    /// Time after the second snapshot in which the job may end by itself.
    pub end_within: Duration,
    /// Destination of a copy of the restored job's output, besides its files.
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
    /// The comparison proved nothing.
    Unclear(Failure),
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
        Self::Failed(because(reason, remedy))
    }

    pub(super) fn unclear(reason: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self::Unclear(because(reason, remedy))
    }
}

fn because(reason: impl Into<String>, remedy: impl Into<String>) -> Failure {
    Failure {
        kind: None,
        reason: reason.into(),
        remedy: remedy.into(),
    }
}

/// Report under construction.
pub(super) struct Book<'a> {
    pub report: Report,
    /// Paths of the copy and of the working folder itself, which the report names instead of the copy.
    pub renamed: Option<[String; 2]>,
    tell: &'a mut dyn FnMut(&Step),
}

impl Book<'_> {
    pub(super) fn note(&mut self, name: &'static str, outcome: Outcome, detail: impl Into<String>) {
        let detail = self.as_named(&detail.into());
        let step = Step {
            name,
            outcome,
            detail,
        };
        (self.tell)(&step);
        self.report.steps.push(step);
    }

    /// Adds the files that the image does not contain to the report.
    pub(super) fn not_kept(&mut self, files: &[NotKept]) {
        for file in files {
            let path = self.as_named(&file.path.to_string_lossy()).into();
            if self.report.not_kept.iter().all(|known| known.path != path) {
                let file = file.clone();
                self.report.not_kept.push(NotKept { path, ..file });
            }
        }
    }

    /// Replaces the path of the copy by that of the working folder.
    fn as_named(&self, text: &str) -> String {
        match &self.renamed {
            Some([copy, folder]) => text.replace(copy, folder),
            None => text.to_owned(),
        }
    }

    /// Notes that a step failed or is unclear, with its reason.
    pub(super) fn failed(&mut self, name: &'static str, end: End) -> End {
        match &end {
            End::Failed(failure) => self.note(name, Outcome::Failed, failure.reason.clone()),
            End::Unclear(failure) => self.note(name, Outcome::Unclear, failure.reason.clone()),
            End::Error(_) => {}
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
        verdict: Verdict::Fail,
        failure: None,
        checked: Vec::new(),
        not_kept: Vec::new(),
        command: words
            .map(|word| word.to_string_lossy().into_owned())
            .collect(),
        steps: Vec::new(),
        output: Vec::new(),
        figures: super::Figures::default(),
        kept: None,
    };
    let mut book = Book {
        report,
        renamed: None,
        tell,
    };
    let end = machine(&options.settings.config, &mut book).and_then(|()| trial(options, &mut book));
    let (verdict, failure) = match end {
        Ok(()) => (Verdict::Pass, None),
        Err(End::Failed(failure)) => (Verdict::Fail, Some(failure)),
        Err(End::Unclear(failure)) => (Verdict::Inconclusive, Some(failure)),
        Err(End::Error(error)) => return Err(error),
    };
    let failure = failure.map(|mut failure| {
        failure.reason = book.as_named(&failure.reason);
        if book.report.kept.is_none() {
            failure.reason = without_log(&failure.reason);
        }
        failure
    });
    Ok(Report {
        pass: verdict == Verdict::Pass,
        verdict,
        failure,
        ..book.report
    })
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

fn trial(mut options: Options<'_>, book: &mut Book<'_>) -> Result<(), End> {
    let copies = Copies::of_working_folder(&options.settings.config.store);
    let parent = copies.as_ref().ok().map(Copies::place_for_trial);
    let mut place = folder(&options.settings.config.store, parent)?;
    let result = in_place(&mut options, book, place.path(), copies);
    if options.keep && !matches!(result, Err(End::Error(_))) {
        place.disable_cleanup(true);
        book.report.kept = Some(place.path().to_owned());
    }
    result
}

/// Runs the trial and the uninterrupted runs with their files in `place`, and compares them.
fn in_place(
    options: &mut Options<'_>,
    book: &mut Book<'_>,
    place: &Path,
    mut copies: Result<Copies, String>,
) -> Result<(), End> {
    if let Ok(copies) = &mut copies {
        copies.renew()?;
        let paths = [copies.path(), copies.original()];
        book.renamed = Some(paths.map(|path| path.display().to_string()));
    }
    let begun = clock::now();
    let mut trial = Trial::start(Setup {
        program: &options.program,
        settings: &options.settings,
        command: &options.command,
        folder: place,
        directory: copies.as_ref().ok().map(Copies::path),
        variable: copies.as_ref().ok().and_then(Copies::variable),
        after_crash: AfterCrash::Restore,
        show: options.show.take(),
        interrupted: options.interrupted,
    })?;
    let mut acts = Acts {
        trial: &mut trial,
        book,
        config: &options.settings.config,
        after: options.after,
        patience: options.patience,
        end_within: options.end_within,
    };
    let played = acts.play();
    let (outputs, store) = (trial.outputs(), trial.store());
    trial.end();
    let restored = played?;
    suggest(Rules::from(&options.settings.config.snapshot), book);
    let mut copies = copies.map_err(|reason| {
        let end = uncopied(&reason, restored.image.missing());
        book.failed("copies", end)
    })?;
    let completed = Completed {
        place,
        store: &store,
        paths: outputs,
        lengths: restored.lengths,
        has_ended: restored.has_ended,
    };
    let ran = Ran::of(&copies, completed)?;
    let (enough, trial_took) = (restored.enough(), begun.elapsed());
    let mut run = |name, folder: &str| {
        let run = Uninterrupted {
            name,
            folder: &place.join(folder),
            enough,
            trial_took,
        };
        uninterrupted::run(options, book, &mut copies, run)
    };
    let uninterrupted = [run("first run", "first")?, run("second run", "second")?];
    compare(&restored, ran, uninterrupted, book)
}

/// Compares the runs. If the image lacks some files, a difference is attributed to them.
fn compare(
    restored: &Restored,
    ran: Ran,
    uninterrupted: [Ran; 2],
    book: &mut Book<'_>,
) -> Result<(), End> {
    let runs = Runs {
        restored: ran,
        uninterrupted,
        positions: restored.image.positions,
    };
    let compared = runs.compare(book);
    let Some((reason, remedy)) = restored.image.missing() else {
        return compared;
    };
    match compared {
        Err(End::Failed(failure)) => {
            Err(End::failed(format!("{}; {reason}", failure.reason), remedy))
        }
        Ok(()) if restored.image.has_reported_files() => {
            book.note("files", Outcome::Ok, reason);
            Ok(())
        }
        Ok(()) => {
            // The files were not needed this time, but they may have changed after another crash.
            let reason = format!(
                "{reason}; a restore needs the changes that the job makes there after a snapshot"
            );
            Err(book.failed("files", End::unclear(reason, remedy)))
        }
        other => other,
    }
}

/// Returns the end of a rehearsal without copies.
fn uncopied(reason: &str, missing: Option<(String, String)>) -> End {
    let mut reason = format!(
        "the job was restored, but not compared with uninterrupted runs: the working folder is not copied, because \
         {reason}"
    );
    let mut remedy =
        "rehearse in a smaller folder that is not a mount point, with links to the data".to_owned();
    if let Some((missing, setting)) = missing {
        reason = format!("{reason}; {missing}");
        remedy = format!("{remedy}; {setting}");
    }
    End::unclear(reason, remedy)
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

/// Rounds to seconds, never to 0. The assumed time between failures is not more precise.
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
    fn interval_is_rounded_to_common_values() {
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

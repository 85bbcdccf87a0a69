//! Uninterrupted run of the job in its own copy of the working folder, and the record of a run for the comparison.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::copies::Copies;
use super::folder_content::FolderContent;
use super::output_match::Output;
use super::outside::written_outside;
use super::rehearsal_report::Outcome;
use super::run_rehearsal::{Book, End, Options};
use super::signs;
use super::trial::{AfterCrash, Setup, Speaker, Trial, file_error};
use crate::clock;
use crate::history::time_in_words;

/// Time limit of an uninterrupted run beyond twice the time of the trial: a job on a loaded machine starts slowly.
const MORE_TIME: Duration = Duration::from_secs(30);

/// Record of a run for the comparison.
#[derive(Debug)]
pub(super) struct Ran {
    /// stdout and stderr.
    pub outputs: [Output; 2],
    /// True if the job ended by itself, with exit code 0.
    pub has_ended: bool,
    /// The working folder at the end, if the job ended by itself.
    pub content: Option<FolderContent>,
    /// Files outside of the working folder that the job wrote.
    pub outside: FolderContent,
}

/// Condition for ending an uninterrupted run.
#[derive(Clone, Copy, Debug)]
pub(super) enum Enough {
    /// The job has ended by itself.
    End,
    /// The job has written this many bytes to stdout and stderr.
    Output([u64; 2]),
}

/// A completed run.
pub(super) struct Completed<'a> {
    /// The folder of the rehearsal.
    pub place: &'a Path,
    /// The run's store in that folder.
    pub store: &'a Path,
    /// The files of stdout and stderr.
    pub paths: [PathBuf; 2],
    /// The compared lengths of these files.
    pub lengths: [u64; 2],
    /// True if the job ended by itself, with exit code 0.
    pub has_ended: bool,
}

impl Ran {
    /// Records a completed run.
    pub(super) fn of(copies: &Copies, run: Completed<'_>) -> Result<Self, End> {
        let Completed {
            place,
            store,
            paths: [stdout, stderr],
            lengths,
            has_ended,
        } = run;
        let output = |path, length| Output {
            path,
            length,
            is_complete: has_ended,
        };
        let outside = written_outside(store, [copies.path(), place]).map_err(file_error(store))?;
        Ok(Self {
            outputs: [output(stdout, lengths[0]), output(stderr, lengths[1])],
            has_ended,
            content: has_ended.then(|| copies.content()).transpose()?,
            outside,
        })
    }
}

/// An uninterrupted run to be made.
#[derive(Clone, Copy)]
pub(super) struct Uninterrupted<'a> {
    /// The name of the step in the report.
    pub name: &'static str,
    /// The run's folder, which is created.
    pub folder: &'a Path,
    /// The condition on which the run is long enough.
    pub enough: Enough,
    /// The time that the trial took.
    pub trial_took: Duration,
}

/// Runs the job until it has done enough, with a limit of twice the time of the trial and a margin.
pub(super) fn run(
    options: &Options<'_>,
    book: &mut Book<'_>,
    copies: &mut Copies,
    run: Uninterrupted<'_>,
) -> Result<Ran, End> {
    let Uninterrupted {
        name,
        folder,
        enough,
        trial_took,
    } = run;
    copies.renew()?;
    fs::create_dir(folder).map_err(file_error(folder))?;
    let mut trial = Trial::start(Setup {
        program: &options.program,
        settings: &options.settings,
        command: &options.command,
        folder,
        directory: Some(copies.path()),
        variable: copies.variable(),
        after_crash: AfterCrash::End,
        show: None,
        interrupted: options.interrupted,
    })?;
    let begun = clock::now();
    let limit = trial_took.saturating_mul(2).saturating_add(MORE_TIME);
    trial.wait(limit, |trial| {
        let output = trial.output_bytes();
        let is_enough = match enough {
            Enough::End => false,
            Enough::Output(wanted) => (0..2).all(|stream| output[stream] >= wanted[stream]),
        };
        Ok((trial.has_ended()? || is_enough).then_some(()))
    })?;
    let lengths = trial.output_bytes();
    let has_ended = trial.has_ended()?;
    if has_ended {
        let ending = signs::end(&mut trial)?;
        if !ending.is_success() {
            let said = trial
                .last_words(Speaker::Job)
                .or_else(|| trial.last_words(Speaker::Supervisor));
            let said = said.map_or_else(String::new, |words| format!("; its last output: {words}"));
            let reason =
                format!("the job ended by itself ({ending}) in an uninterrupted run{said}");
            let end = End::unclear(
                reason,
                "check if it holds something outside of its folder, such as a port or a lock, and rehearse again",
            );
            return Err(book.failed(name, end));
        }
    }
    let (paths, store) = (trial.outputs(), trial.store());
    trial.end();
    let took = time_in_words(begun.elapsed().as_secs_f64());
    let detail = if has_ended {
        format!("the job ran uninterrupted for {took}, until it exited")
    } else {
        format!("the job ran uninterrupted for {took}")
    };
    book.note(name, Outcome::Ok, detail);
    let place = folder.parent().unwrap_or(folder);
    let completed = Completed {
        place,
        store: &store,
        paths,
        lengths,
        has_ended,
    };
    Ran::of(copies, completed)
}

//! The acts of a rehearsal, one after the other, on a running trial.

use std::sync::mpsc::channel;
use std::thread;
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::compare::{Files, Part};
use super::look::Look;
use super::rehearsal_report::{Failure, Outcome};
use super::run_rehearsal::{Book, End};
use super::signs::{self, LEAST, QUIET_START, Sign};
use super::trial::Trial;
use super::{RehearsalError, remedy};
use crate::history::{Event, time_in_words};
use crate::run::{chain, size};
use crate::supervisor::request_snapshot;

/// Limit on a snapshot or restore: a slow disk takes that long for a terabyte.
const WORK_LIMIT: Duration = Duration::from_secs(3600);
/// Limit on the time that the supervisor takes to start the job, or to notice its end.
const NEWS_LIMIT: Duration = Duration::from_secs(60);
/// Maximum number of attempts for a snapshot with a transient failure: a supervisor repeats it, too.
const ATTEMPTS: usize = 3;

const MORE_TO_DO: &str = "rehearse with more for the job to do: it has to compute for some ten seconds, a large job for longer";
const LOOK_AT_THE_JOB: &str =
    "see whether it ends so without ckpt-run, too; --show-output shows what it says";
pub(super) const KEEP_AND_LOOK: &str = "rehearse again with --keep and look at the logs";

/// A trial and its report.
pub(super) struct Acts<'a, 'b, 'c> {
    pub trial: &'a mut Trial<'b>,
    pub book: &'a mut Book<'c>,
    pub after: Duration,
    pub patience: Duration,
}

/// The state of the job before the kill.
pub(super) struct Before {
    sign: Sign,
    look: Look,
    files: Files,
    /// Maximum lengths of stdout and stderr at the snapshot.
    pub places: [u64; 2],
    pub output: [Part; 2],
}

impl Acts<'_, '_, '_> {
    pub(super) fn play(&mut self) -> Result<(), End> {
        let begun = self.begin();
        let (look, places) = self.noted("start", begun)?;
        let files = look.files();
        let taken = self.take_snapshot();
        self.noted("snapshot", taken)?;
        let gone_on = self.go_on(look, &files, places);
        let mut before = self.noted("goes on", gone_on)?;
        let output = self.kill(places);
        before.output = self.noted("kill", output)?;
        let restored = self.restore();
        self.noted("restore", restored)?;
        let back = self.come_back(&before);
        let computes = self.noted("comes back", back)?;
        let equal = self.compare_output(&before);
        self.noted("output", equal)?;
        let intact = self.compare_files(&before.files);
        self.noted("files", intact)?;
        if !computes {
            return Ok(());
        }
        let again = self.take_snapshot();
        self.noted("again", again)
    }

    fn noted<T>(&mut self, name: &'static str, result: Result<T, End>) -> Result<T, End> {
        result.map_err(|end| self.book.failed(name, end))
    }

    /// Waits until the job computes.
    fn begin(&mut self) -> Result<(Look, [u64; 2]), End> {
        let started = self.trial.wait(NEWS_LIMIT, |trial| {
            let events = trial.events();
            let is_started = |event: &Event| matches!(event, Event::Started { .. });
            let started = events.iter().any(is_started);
            Ok((started || trial.has_ended()?).then_some(started))
        })?;
        if started != Some(true) {
            let why = self.trial.last_words(true);
            let why = why.unwrap_or_else(|| "the supervisor did not start the job".to_owned());
            return Err(End::failed(why, "mend the command line or the settings"));
        }
        let (outcome, text) = match signs::of_beginning(self.trial, self.after, self.patience)? {
            Sign::Output => (Outcome::Ok, "the job computes and prints"),
            Sign::Cpu => (Outcome::Ok, "the job computes"),
            Sign::None => (
                Outcome::Note,
                "the job has neither printed nor computed yet, and is taken as it is",
            ),
            Sign::End => return Err(self.ended_by_itself("before it could be snapshotted")?),
        };
        let Some(look) = signs::look(self.trial) else {
            return Err(self.ended_by_itself("before it could be snapshotted")?);
        };
        let (processes, memory) = (look.processes.len() as u64, size(look.memory));
        let processes = if processes == 1 {
            "1 process".to_owned()
        } else {
            format!("{processes} processes")
        };
        self.book.note(
            "start",
            outcome,
            format!("{text}: {processes}, {memory} of memory"),
        );
        Ok((look, self.trial.output_bytes()))
    }

    /// Takes a snapshot, and notes its figures.
    fn take_snapshot(&mut self) -> Result<(), End> {
        let mut attempts = 1;
        let image = loop {
            match self.ask_for_snapshot()? {
                Ok(image) => break image,
                Err(failure) if attempts == ATTEMPTS || !passes(&failure) => {
                    return Err(End::Failed(failure));
                }
                Err(_) => attempts += 1,
            }
            self.trial.wait(LEAST, |_| Ok(None::<()>))?;
        };
        self.note_snapshot(&image, attempts)
    }

    fn ask_for_snapshot(&mut self) -> Result<Result<String, Failure>, End> {
        let store = self.trial.store();
        let (send, answers) = channel();
        thread::Builder::new()
            .name("ask".to_owned())
            .spawn(move || send.send(request_snapshot(&store)))
            .map_err(RehearsalError::Thread)?;
        let answer = self
            .trial
            .wait(WORK_LIMIT, |_| Ok(answers.try_recv().ok()))?;
        let reason = match answer {
            Some(Ok(id)) => return Ok(Ok(id.to_string())),
            Some(Err(error)) => chain(&error),
            None => format!(
                "no image within {}",
                time_in_words(WORK_LIMIT.as_secs_f64())
            ),
        };
        let mut events = self.trial.events().into_iter().rev();
        let kind = events.find_map(|event| match event {
            Event::SnapshotFailed { kind, .. } => Some(kind),
            _ => None,
        });
        if kind.as_deref() == Some("ended") || signs::is_over(self.trial)? {
            return Err(self.ended_by_itself("during its snapshot")?);
        }
        let remedy = remedy::of_snapshot(kind.as_deref()).to_owned();
        Ok(Err(Failure {
            kind,
            reason,
            remedy,
        }))
    }

    fn note_snapshot(&mut self, image: &str, attempts: usize) -> Result<(), End> {
        let mut events = self.trial.events().into_iter();
        let told = events.find_map(|event| match event {
            Event::Snapshot {
                image: id,
                freeze_seconds,
                durable_seconds,
                raw_bytes,
                stored_bytes,
                ..
            } if id == image => Some((freeze_seconds, durable_seconds, raw_bytes, stored_bytes)),
            _ => None,
        });
        let Some((freeze, durable, raw, stored)) = told else {
            let reason = format!("the event log does not tell of image {image}");
            return Err(End::failed(reason, KEEP_AND_LOOK));
        };
        let figures = &mut self.book.report.figures;
        let name = if figures.raw_bytes.is_none() {
            (figures.raw_bytes, figures.stored_bytes) = (Some(raw), Some(stored));
            "snapshot"
        } else {
            figures.added_bytes = Some(stored);
            "again"
        };
        figures.freeze_seconds.push(freeze);
        figures.durable_seconds.push(durable);
        let (outcome, tries) = match attempts {
            1 => (Outcome::Ok, String::new()),
            _ => (Outcome::Note, format!("; it took {attempts} attempts")),
        };
        let detail = format!(
            "frozen {}, durable after {}, {}, {} new in the store{tries}",
            time_in_words(freeze),
            time_in_words(durable),
            size(raw),
            size(stored)
        );
        self.book.note(name, outcome, detail);
        Ok(())
    }

    /// Lets the job compute a little more.
    fn go_on(&mut self, look: Look, files: &Files, places: [u64; 2]) -> Result<Before, End> {
        let sign = signs::of_going_on(self.trial, self.patience.min(QUIET_START))?;
        let (outcome, text) = match sign {
            Sign::Output => (Outcome::Ok, "the job computes and prints"),
            Sign::Cpu => (Outcome::Ok, "the job computes"),
            Sign::None => (
                Outcome::Note,
                "the job is there; it neither prints nor computes at the moment",
            ),
            Sign::End => return Err(self.ended_by_itself("before it could be killed")?),
        };
        let Some(now) = signs::look(self.trial) else {
            return Err(self.ended_by_itself("before it could be killed")?);
        };
        self.book.note("goes on", outcome, text);
        Ok(Before {
            sign,
            files: files.that_grow(&now.files()),
            look: look.still_there(&now),
            places,
            output: Default::default(),
        })
    }

    /// Kills the job. Returns its output up to that point.
    fn kill(&mut self, places: [u64; 2]) -> Result<[Part; 2], End> {
        let job = signs::job(self.trial);
        let killed = job.is_some_and(|job| kill(Pid::from_raw(job), Signal::SIGKILL).is_ok());
        let over = self
            .trial
            .wait(NEWS_LIMIT, |trial| Ok(signs::is_over(trial)?.then_some(())))?;
        if over.is_none() {
            return Err(End::failed("the job did not end by SIGKILL", KEEP_AND_LOOK));
        }
        self.trial.crashes_known = 1;
        if !killed || signs::is_over(self.trial)? {
            return Err(self.ended_by_itself("before it could be killed")?);
        }
        // The restore truncates the files, and it begins some time later. If it began earlier, there would be less to
        // compare.
        let output = self.trial.output_around(places)?;
        self.book
            .note("kill", Outcome::Ok, "the job was ended by SIGKILL");
        Ok(output)
    }

    fn restore(&mut self) -> Result<(), End> {
        let news = self.trial.wait(WORK_LIMIT, |trial| {
            let mut events = trial.events().into_iter();
            let news = events.find_map(|event| match event {
                Event::Restored { seconds, .. } => Some(Ok(seconds)),
                Event::RestoreFailed { reason, .. } => Some(Err(reason)),
                _ => None,
            });
            if news.is_none() && signs::is_over(trial)? {
                let why = trial.last_words(true);
                return Ok(Some(Err(
                    why.unwrap_or_else(|| "the supervisor ended".to_owned())
                )));
            }
            Ok(news)
        })?;
        let limit = time_in_words(WORK_LIMIT.as_secs_f64());
        match news.unwrap_or_else(|| Err(format!("not restored within {limit}"))) {
            Ok(seconds) => {
                self.book.report.figures.restore_seconds = Some(seconds);
                let detail = format!(
                    "the job is back, {} after the restore began",
                    time_in_words(seconds)
                );
                self.book.note("restore", Outcome::Ok, detail);
                Ok(())
            }
            Err(reason) => Err(End::failed(
                format!("the image was not restored: {reason}"),
                KEEP_AND_LOOK,
            )),
        }
    }

    /// Checks that the restored job computes. Returns false if the job has exited successfully.
    fn come_back(&mut self, before: &Before) -> Result<bool, End> {
        const NAME: &str = "comes back";
        let first = signs::look(self.trial).unwrap_or_default();
        let sign = signs::of_going_on(self.trial, self.patience)?;
        let (outcome, text) = match sign {
            Sign::Output => (Outcome::Ok, "the job computes and prints"),
            Sign::Cpu => (Outcome::Ok, "the job computes"),
            Sign::None if before.sign == Sign::None => (
                Outcome::Note,
                "the job is there; it neither prints nor computes, as before",
            ),
            Sign::None => {
                let reason = format!(
                    "the restored job neither prints nor computes within {}, and did before",
                    time_in_words(self.patience.as_secs_f64())
                );
                return Err(End::failed(
                    reason,
                    "where it pauses for longer by itself, rehearse again with a larger --seconds",
                ));
            }
            Sign::End => return self.ended_after_restore(),
        };
        let missing = before.look.processes.difference(&first.processes).count();
        if missing > 0 {
            let detail =
                format!("{text}; {missing} of its processes have ended since the snapshot");
            self.book.note(NAME, Outcome::Note, detail);
        } else {
            self.book.note(NAME, outcome, text);
        }
        Ok(true)
    }

    fn ended_after_restore(&mut self) -> Result<bool, End> {
        if signs::end(self.trial)?.is_success() {
            let detail = "the job ended after the restore, with exit code 0; a second snapshot was not tried";
            self.book.note("comes back", Outcome::Note, detail);
            return Ok(false);
        }
        Err(self.ended_by_itself("after its restore")?)
    }

    fn ended_by_itself(&mut self, when: &str) -> Result<End, End> {
        let end = signs::end(self.trial)?;
        let remedy = if end.is_success() {
            MORE_TO_DO
        } else {
            LOOK_AT_THE_JOB
        };
        let said = match self.trial.last_words(false) {
            Some(words) if !end.is_success() => format!("; the last it said: {words}"),
            Some(_) | None => String::new(),
        };
        Ok(End::failed(
            format!("the job ended by itself ({end}) {when}{said}"),
            remedy,
        ))
    }
}

/// Returns true if the next attempt may succeed.
fn passes(failure: &Failure) -> bool {
    matches!(failure.kind.as_deref(), Some("busy" | "changed" | "criu"))
}

//! Acts of a rehearsal, in order, on a running trial.

use std::sync::mpsc::channel;
use std::thread;
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::before_kill::{Files, Part};
use super::job_sample::JobSample;
use super::not_kept::TrialImage;
use super::rehearsal_report::{Failure, Outcome};
use super::run_rehearsal::{Book, End};
use super::signs::{self, LEAST, QUIET_START, Sign};
use super::trial::{Speaker, Trial};
use super::uninterrupted::Enough;
use super::{RehearsalError, remedy};
use crate::config::Config;
use crate::history::{Event, time_in_words};
use crate::run::{chain, size};
use crate::supervisor::request_snapshot;

/// Limit on a snapshot or restore: a slow disk takes that long for a terabyte.
pub(super) const WORK_LIMIT: Duration = Duration::from_secs(3600);
/// Limit on the time that the supervisor takes to start the job, or to notice its end.
const NEWS_LIMIT: Duration = Duration::from_secs(60);
/// Maximum number of attempts for a snapshot with a transient failure: a supervisor repeats it, too.
const ATTEMPTS: usize = 3;

const MORE_TO_DO: &str = "rehearse with more work for the job: it has to compute for about ten seconds, a large job for longer";
const LOOK_AT_THE_JOB: &str =
    "check if it ends in the same way without ckpt-run; --show-output shows its output";
pub(super) const KEEP_AND_LOOK: &str = "rehearse again with --keep and look at the logs";

/// A trial and its report.
pub(super) struct Acts<'a, 'b, 'c> {
    pub trial: &'a mut Trial<'b>,
    pub book: &'a mut Book<'c>,
    pub config: &'a Config,
    pub after: Duration,
    pub patience: Duration,
    pub end_within: Duration,
}

/// The state of the job before the kill.
pub(super) struct Before {
    pub sign: Sign,
    pub look: JobSample,
    files: Files,
    /// Maximum lengths of stdout and stderr at the snapshot.
    pub places: [u64; 2],
    pub output: [Part; 2],
}

/// The restored job, at the end of its trial.
pub(super) struct Restored {
    /// Facts of the image that it was restored from.
    pub image: TrialImage,
    /// True if it ended by itself, with exit code 0.
    pub has_ended: bool,
    /// Lengths of stdout and stderr after the second snapshot.
    reached: [u64; 2],
    /// Lengths of stdout and stderr at the end.
    pub lengths: [u64; 2],
}

impl Restored {
    /// Returns the progress that an uninterrupted run must reach: beyond the snapshot, but no further than necessary.
    pub(super) fn enough(&self) -> Enough {
        let has_new = |lengths: [u64; 2]| (0..2).any(|at| lengths[at] > self.image.positions[at]);
        if self.has_ended {
            Enough::End
        } else if has_new(self.reached) {
            Enough::Output(self.reached)
        } else {
            Enough::Output(self.lengths)
        }
    }
}

impl Acts<'_, '_, '_> {
    pub(super) fn play(&mut self) -> Result<Restored, End> {
        let begun = self.begin();
        let (look, places) = self.noted("start", begun)?;
        let files = look.files();
        let image = self.first_snapshot();
        let mut image = self.noted("snapshot", image)?;
        let gone_on = self.let_continue(look, &files, places);
        let mut before = self.noted("continues", gone_on)?;
        let output = self.kill(places);
        before.output = self.noted("kill", output)?;
        let restored = self.restore(&image);
        self.noted("restore", restored)?;
        let back = self.check_restored(&before);
        let computes = self.noted("runs again", back)?;
        let intact = self.check_old_output(&before);
        self.noted("output", intact)?;
        let intact = self.check_open_files(&before.files);
        self.noted("files", intact)?;
        let again = if computes {
            self.second_snapshot(&mut image)
        } else {
            Ok(false)
        };
        let computes = self.noted("again", again)?;
        let reached = self.trial.output_bytes();
        let ended = if computes {
            self.wait_for_end()
        } else {
            Ok(true)
        };
        let has_ended = self.noted("end", ended)?;
        if has_ended {
            // All output is in the files when the supervisor has ended.
            self.trial
                .wait(NEWS_LIMIT, |trial| Ok(trial.has_ended()?.then_some(())))?;
        }
        Ok(Restored {
            image,
            has_ended,
            reached,
            lengths: self.trial.output_bytes(),
        })
    }

    fn noted<T>(&mut self, name: &'static str, result: Result<T, End>) -> Result<T, End> {
        result.map_err(|end| self.book.failed(name, end))
    }

    /// Waits until the job computes.
    fn begin(&mut self) -> Result<(JobSample, [u64; 2]), End> {
        let started = self.trial.wait(NEWS_LIMIT, |trial| {
            let events = trial.events();
            let is_started = |event: &Event| matches!(event, Event::Started { .. });
            let started = events.iter().any(is_started);
            Ok((started || trial.has_ended()?).then_some(started))
        })?;
        if started != Some(true) {
            let why = self.trial.last_words(Speaker::Supervisor);
            let why = why.unwrap_or_else(|| "the supervisor did not start the job".to_owned());
            return Err(End::failed(why, "correct the command line or the settings"));
        }
        let (outcome, text) = match signs::of_beginning(self.trial, self.after, self.patience)? {
            Sign::Output => (Outcome::Ok, "the job computes and prints"),
            Sign::Cpu => (Outcome::Ok, "the job computes"),
            Sign::None => (
                Outcome::Ok,
                "the job has neither printed nor computed yet; the rehearsal continues",
            ),
            Sign::End => return Err(self.ended_by_itself("before it could be snapshotted")?),
        };
        let Some(look) = signs::sample(self.trial) else {
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

    fn first_snapshot(&mut self) -> Result<TrialImage, End> {
        let Some(image) = self.take_snapshot()? else {
            return Err(self.ended_by_itself("during its snapshot")?);
        };
        self.read_image(&image)
    }

    /// Reads the facts of an image.
    pub(super) fn read_image(&mut self, image: &str) -> Result<TrialImage, End> {
        let look = TrialImage::at(self.config, &self.trial.store(), image);
        let look = look.map_err(|reason| {
            End::failed(
                format!("image {image} cannot be read: {reason}"),
                KEEP_AND_LOOK,
            )
        })?;
        self.book.not_kept(&look.not_kept);
        Ok(look)
    }

    /// Takes a snapshot, and notes its figures. Returns the image; `None` if the job exited meanwhile.
    pub(super) fn take_snapshot(&mut self) -> Result<Option<String>, End> {
        let mut attempts = 1;
        let image = loop {
            match self.ask_for_snapshot()? {
                Asked::Image(image) => break image,
                Asked::HasEnded => return Ok(None),
                Asked::Failed(failure) if attempts == ATTEMPTS || !passes(&failure) => {
                    return Err(End::Failed(failure));
                }
                Asked::Failed(_) => attempts += 1,
            }
            self.trial.wait(LEAST, |_| Ok(None::<()>))?;
        };
        self.note_snapshot(&image, attempts)?;
        Ok(Some(image))
    }

    fn ask_for_snapshot(&mut self) -> Result<Asked, End> {
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
            Some(Ok(id)) => return Ok(Asked::Image(id.to_string())),
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
            return Ok(Asked::HasEnded);
        }
        let remedy = remedy::of_snapshot(kind.as_deref()).to_owned();
        Ok(Asked::Failed(Failure {
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
            let reason = format!("the event log has no entry for image {image}");
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
        let tries = match attempts {
            1 => String::new(),
            _ => format!("; it took {attempts} attempts"),
        };
        let detail = format!(
            "frozen {}, durable after {}, {}, {} new in the store{tries}",
            time_in_words(freeze),
            time_in_words(durable),
            size(raw),
            size(stored)
        );
        self.book.note(name, Outcome::Ok, detail);
        Ok(())
    }

    /// Lets the job compute a little longer.
    fn let_continue(
        &mut self,
        look: JobSample,
        files: &Files,
        places: [u64; 2],
    ) -> Result<Before, End> {
        let sign = signs::of_progress(self.trial, self.patience.min(QUIET_START))?;
        let (outcome, text) = match sign {
            Sign::Output => (Outcome::Ok, "the job computes and prints"),
            Sign::Cpu => (Outcome::Ok, "the job computes"),
            Sign::None => (
                Outcome::Ok,
                "the job exists; it neither prints nor computes at the moment",
            ),
            Sign::End => return Err(self.ended_by_itself("before it could be killed")?),
        };
        let Some(now) = signs::sample(self.trial) else {
            return Err(self.ended_by_itself("before it could be killed")?);
        };
        self.book.note("continues", outcome, text);
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
            .note("kill", Outcome::Ok, "the job was killed with SIGKILL");
        Ok(output)
    }

    pub(super) fn ended_by_itself(&mut self, when: &str) -> Result<End, End> {
        let end = signs::end(self.trial)?;
        let remedy = if end.is_success() {
            MORE_TO_DO
        } else {
            LOOK_AT_THE_JOB
        };
        let said = match self.trial.last_words(Speaker::Job) {
            Some(words) if !end.is_success() => format!("; its last output: {words}"),
            Some(_) | None => String::new(),
        };
        Ok(End::failed(
            format!("the job ended by itself ({end}) {when}{said}"),
            remedy,
        ))
    }
}

/// Answer to a request for a snapshot.
enum Asked {
    Image(String),
    Failed(Failure),
    HasEnded,
}

/// Returns true if the next attempt may succeed.
fn passes(failure: &Failure) -> bool {
    matches!(failure.kind.as_deref(), Some("busy" | "changed" | "criu"))
}

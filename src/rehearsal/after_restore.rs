//! Acts after the kill: the restore, checks of the restored job, and its end.

use super::acts::{Acts, Before, KEEP_AND_LOOK, WORK_LIMIT};
use super::before_kill::Files;
use super::not_kept::TrialImage;
use super::rehearsal_report::Outcome;
use super::run_rehearsal::{End, STREAMS};
use super::signs::{self, LEAST, Sign};
use super::trial::Speaker;
use crate::history::{Event, time_in_words};

impl Acts<'_, '_, '_> {
    pub(super) fn restore(&mut self, image: &TrialImage) -> Result<(), End> {
        let news = self.trial.wait(WORK_LIMIT, |trial| {
            let mut events = trial.events().into_iter();
            let news = events.find_map(|event| match event {
                Event::Restored { seconds, .. } => Some(Ok(seconds)),
                Event::RestoreFailed { reason, .. } => Some(Err(reason)),
                _ => None,
            });
            if news.is_none() && signs::is_over(trial)? {
                let why = trial.last_words(Speaker::Supervisor);
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
                    "the job computes again, {} after the restore began",
                    time_in_words(seconds)
                );
                self.book.note("restore", Outcome::Ok, detail);
                Ok(())
            }
            Err(reason) => {
                let reason = format!("the image was not restored: {reason}");
                let missing = image.missing();
                Err(missing.map_or_else(
                    || End::failed(reason.clone(), KEEP_AND_LOOK),
                    |(missing, remedy)| End::failed(format!("{reason}; {missing}"), remedy),
                ))
            }
        }
    }

    /// Checks that the restored job computes. Returns false if the job has exited successfully.
    pub(super) fn check_restored(&mut self, before: &Before) -> Result<bool, End> {
        const NAME: &str = "runs again";
        let first = signs::sample(self.trial).unwrap_or_default();
        let sign = signs::of_progress(self.trial, self.patience)?;
        let (outcome, text) = match sign {
            Sign::Output => (Outcome::Ok, "the job computes and prints"),
            Sign::Cpu => (Outcome::Ok, "the job computes"),
            Sign::None if before.sign == Sign::None => (
                Outcome::Ok,
                "the job exists; it neither prints nor computes, as before",
            ),
            Sign::None => {
                let reason = format!(
                    "the restored job neither prints nor computes within {}, but did so before the snapshot",
                    time_in_words(self.patience.as_secs_f64())
                );
                return Err(End::failed(
                    reason,
                    "if the job pauses for longer by itself, rehearse again with a larger --seconds",
                ));
            }
            Sign::End => return self.ended_after_restore(NAME),
        };
        let missing = before.look.processes.difference(&first.processes).count();
        if missing > 0 {
            let detail =
                format!("{text}; {missing} of its processes have ended since the snapshot");
            self.book.note(NAME, Outcome::Ok, detail);
        } else {
            self.book.note(NAME, outcome, text);
        }
        Ok(true)
    }

    /// Checks that the output from before the snapshot is still there.
    pub(super) fn check_old_output(&mut self, before: &Before) -> Result<(), End> {
        let after = self.trial.output_around(before.places)?;
        for (stream, name) in STREAMS.into_iter().enumerate() {
            if before.output[stream].old != after[stream].old {
                let reason =
                    format!("the job's output to {name} from before the snapshot has changed");
                return Err(End::failed(reason, KEEP_AND_LOOK));
            }
        }
        Ok(())
    }

    /// Checks that no file that the job keeps open is shorter than at the snapshot.
    pub(super) fn check_open_files(&mut self, before: &Files) -> Result<(), End> {
        let Some(look) = signs::sample(self.trial) else {
            return Ok(());
        };
        // A file that the job truncates and rewrites is complete at a later look.
        let mut shorter = None;
        let whole = self.trial.wait(LEAST, |_| {
            let found = before.first_shorter(&look.files());
            shorter = found.map(|(path, then, now)| {
                let path = path.display();
                format!("{path} has {now} bytes; it had {then} at the snapshot")
            });
            Ok(shorter.is_none().then_some(()))
        })?;
        if let (None, Some(reason)) = (whole, shorter) {
            let remedy = "check if the job itself or another program truncates the file";
            return Err(End::failed(reason, remedy));
        }
        Ok(())
    }

    /// Takes the snapshot of the restored job. Returns false if the job has exited successfully.
    pub(super) fn second_snapshot(&mut self, first: &mut TrialImage) -> Result<bool, End> {
        if let Some(image) = self.take_snapshot()? {
            first.add(self.read_image(&image)?);
            return Ok(true);
        }
        self.ended_after_restore("again")
    }

    /// Waits for the end of the restored job, because its files are compared only then. Returns false if it does not
    /// end.
    pub(super) fn wait_for_end(&mut self) -> Result<bool, End> {
        const NAME: &str = "end";
        let limit = self.end_within;
        let over = self
            .trial
            .wait(limit, |trial| Ok(signs::is_over(trial)?.then_some(())))?;
        if over.is_none() {
            let limit = time_in_words(limit.as_secs_f64());
            let detail = format!("the job did not exit by itself within {limit} and is killed");
            self.book.note(NAME, Outcome::Skipped, detail);
            return Ok(false);
        }
        if !signs::end(self.trial)?.is_success() {
            return Err(self.ended_by_itself("after its restore")?);
        }
        self.book.note(
            NAME,
            Outcome::Ok,
            "the job ended by itself, with exit code 0",
        );
        Ok(true)
    }

    /// Notes the successful exit of the restored job, and returns false.
    fn ended_after_restore(&mut self, step: &'static str) -> Result<bool, End> {
        if signs::end(self.trial)?.is_success() {
            let detail =
                "the job ended after the restore, with exit code 0, before a second snapshot";
            self.book.note(step, Outcome::Ok, detail);
            return Ok(false);
        }
        Err(self.ended_by_itself("after its restore")?)
    }
}

//! The act that compares: what the job has written, before the kill and after the restore.

use super::acts::{Acts, Before, KEEP_AND_LOOK};
use super::compare::{Files, Outputs, outputs};
use super::rehearse::End;
use super::report::Outcome;
use super::signs::{self, LEAST};
use crate::history::counted;

impl Acts<'_, '_, '_> {
    pub(super) fn compare_output(&mut self, before: &Before) -> Result<(), End> {
        let after = self.trial.output_around(before.place)?;
        let (outcome, detail) = match outputs(&before.output, &after) {
            Outputs::Damaged => {
                return Err(End::failed(
                    "what the job had printed before the snapshot has changed",
                    KEEP_AND_LOOK,
                ));
            }
            Outputs::Nothing => (
                Outcome::Note,
                "nothing was printed between snapshot and kill, so there is nothing to compare".to_owned(),
            ),
            Outputs::Same(bytes) => (
                Outcome::Ok,
                format!("the {} since the snapshot came again, the same", counted(bytes as u64, "byte")),
            ),
            Outputs::Differs(_) => (
                Outcome::Note,
                "what it printed since the snapshot came again, but not the same (times, random numbers?): whether a line \
                 is missing cannot be told".to_owned(),
            ),
        };
        self.book.note("output", outcome, detail);
        Ok(())
    }

    pub(super) fn compare_files(&mut self, before: &Files) -> Result<(), End> {
        let Some(look) = signs::look(self.trial) else {
            return Ok(());
        };
        // One that the job cuts and writes anew is whole at another look.
        let mut shorter = None;
        let whole = self.trial.wait(LEAST, |_| {
            shorter = before
                .first_shorter(&look.files())
                .map(|(path, then, now)| {
                    format!(
                        "{} has {now} bytes, and had {then} at the snapshot",
                        path.display()
                    )
                });
            Ok(shorter.is_none().then_some(()))
        })?;
        if let (None, Some(reason)) = (whole, shorter) {
            return Err(End::failed(
                reason,
                "see whether the job itself cuts the file, or something else on the machine",
            ));
        }
        let detail = match before.len() {
            0 => "the job writes to no file that it keeps open".to_owned(),
            count => format!(
                "{} that the job writes to: nothing is missing",
                counted(count as u64, "file")
            ),
        };
        self.book.note("files", Outcome::Ok, detail);
        Ok(())
    }
}

//! The act that compares the job's output and files before the kill and after the restore.

use super::acts::{Acts, Before, KEEP_AND_LOOK};
use super::compare::{Files, Outputs, outputs};
use super::rehearsal_report::{Compared, Equality, Outcome};
use super::run_rehearsal::End;
use super::signs::{self, LEAST};
use crate::history::counted;

const STREAMS: [&str; 2] = ["stdout", "stderr"];

impl Acts<'_, '_, '_> {
    pub(super) fn compare_output(&mut self, before: &Before) -> Result<(), End> {
        let after = self.trial.output_around(before.places)?;
        let found = [0, 1].map(|stream| outputs(&before.output[stream], &after[stream]));
        let streams = STREAMS.into_iter().zip(found);
        self.book.report.output = streams.clone().map(Compared::from).collect();
        if let Some((stream, _)) = streams
            .clone()
            .find(|(_, found)| *found == Outputs::Damaged)
        {
            return Err(End::failed(
                format!("what the job had printed to {stream} before the snapshot has changed"),
                KEEP_AND_LOOK,
            ));
        }
        let (outcome, detail) = if found == [Outputs::Nothing; 2] {
            let detail =
                "nothing was printed between snapshot and kill, so there is nothing to compare";
            (Outcome::Note, detail.to_owned())
        } else {
            let differs = |found: &Outputs| matches!(found, Outputs::Differs(_));
            let outcome = if found.iter().any(differs) {
                Outcome::Note
            } else {
                Outcome::Ok
            };
            let details = streams.map(|(stream, found)| format!("{stream}: {}", in_words(found)));
            (outcome, details.collect::<Vec<_>>().join("; "))
        };
        self.book.note("output", outcome, detail);
        Ok(())
    }

    pub(super) fn compare_files(&mut self, before: &Files) -> Result<(), End> {
        let Some(look) = signs::look(self.trial) else {
            return Ok(());
        };
        // A file that the job truncates and rewrites is whole at a later look.
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

impl From<(&'static str, Outputs)> for Compared {
    fn from((stream, found): (&'static str, Outputs)) -> Self {
        let (result, bytes) = match found {
            Outputs::Damaged => (Equality::Damaged, 0),
            Outputs::Nothing => (Equality::Nothing, 0),
            Outputs::Same(bytes) => (Equality::Same, bytes),
            Outputs::Differs(bytes) => (Equality::Differs, bytes),
        };
        Self {
            stream,
            result,
            bytes,
        }
    }
}

fn in_words(found: Outputs) -> String {
    match found {
        Outputs::Damaged => "what was there before the snapshot has changed".to_owned(),
        Outputs::Nothing => "nothing to compare".to_owned(),
        Outputs::Same(bytes) => {
            let bytes = counted(bytes as u64, "byte");
            format!("the {bytes} since the snapshot came again, the same")
        }
        Outputs::Differs(_) => {
            "what came since the snapshot came again, but not the same (times, random numbers?), so whether a line is \
             missing cannot be told"
                .to_owned()
        }
    }
}

//! Comparison of the restored job with two uninterrupted runs.
//!
//! If the uninterrupted runs differ, the job is not deterministic, and a difference after a restore proves nothing.

use std::io;

use super::folder_content::FolderContent;
use super::output_match::{LineDifference, Match, compare, lines_in};
use super::outside::named;
use super::rehearsal_report::{Compared, Equality, Outcome};
use super::run_rehearsal::{Book, End, STREAMS};
use super::trial::file_error;
use super::uninterrupted::Ran;
use crate::history::counted;

const MAKE_DETERMINISTIC: &str =
    "rehearse the job with fixed seeds and without times or random values in its output and files";
const NO_OUTPUT: &str = "rehearse with less work for the job, or give it more time with --end-within, so that it exits and its files can be compared";

/// Runs to compare.
pub(super) struct Runs {
    pub restored: Ran,
    pub uninterrupted: [Ran; 2],
    /// Lengths of the output at the snapshot.
    pub positions: [u64; 2],
}

/// Difference between two runs.
struct Differs {
    step: &'static str,
    /// True if the restore may have caused it.
    is_ours: bool,
    reason: String,
}

impl Runs {
    /// Compares the runs, and notes what was compared. The result is FAIL if the restored job differs from two equal
    /// runs, and unclear if these differ from each other.
    pub(super) fn compare(&self, book: &mut Book<'_>) -> Result<(), End> {
        let found = self.outputs(book).map_err(|error| {
            // All outputs are in the rehearsal's folder.
            End::from(file_error(&self.restored.outputs[0].path)(error))
        })?;
        if let Some(differs) = found
            .or_else(|| self.files())
            .or_else(|| self.files_outside())
        {
            let outside = self.outside();
            let end = if differs.is_ours && outside.len() > 0 {
                End::unclear(
                    format!(
                        "the restored job differs from two uninterrupted ones, perhaps because of files that it left \
                         outside of the working folder ({}): {}",
                        named(&outside),
                        differs.reason
                    ),
                    "let the job write only into its working folder, of which each run has a copy, and rehearse again",
                )
            } else if differs.is_ours {
                End::failed(
                    format!(
                        "the restored job differs from two uninterrupted ones: {}",
                        differs.reason
                    ),
                    "the job needs state outside of its memory and of the files in its images; rehearse again with \
                     --keep and look at the logs and the output",
                )
            } else {
                End::unclear(
                    format!(
                        "the job is not deterministic, so the comparison proves nothing: {}",
                        differs.reason
                    ),
                    MAKE_DETERMINISTIC,
                )
            };
            return Err(book.failed(differs.step, end));
        }
        self.note(book)
    }

    /// Compares the streams, and puts the results into the report. Returns the first difference.
    fn outputs(&self, book: &mut Book<'_>) -> io::Result<Option<Differs>> {
        let mut first = None;
        for (stream, name) in STREAMS.into_iter().enumerate() {
            let output = |ran: &Ran| ran.outputs[stream].clone();
            let restored = output(&self.restored);
            let [one, other] = self.uninterrupted.each_ref().map(output);
            let without = compare(&one, &other)?;
            let with = [compare(&restored, &one)?, compare(&restored, &other)?];
            let shortest = with
                .iter()
                .chain([&without])
                .min_by_key(|found| found.bytes);
            let (bytes, lines) = shortest.map_or((0, 0), |found| (found.bytes, found.lines));
            let differs = self.output_difference(stream, &without, &with);
            let result = match &differs {
                Some(_) => Equality::Differs,
                None if bytes > self.positions[stream] || self.all_ended() && bytes > 0 => {
                    Equality::Same
                }
                None => Equality::Nothing,
            };
            book.report.output.push(Compared {
                stream: name,
                result,
                bytes,
                lines,
            });
            first = first.or(differs);
        }
        Ok(first)
    }

    fn output_difference(
        &self,
        stream: usize,
        without: &Match,
        with: &[Match; 2],
    ) -> Option<Differs> {
        let name = STREAMS[stream];
        let told = |is_ours, at: &LineDifference, between: &str| Differs {
            step: "output",
            is_ours,
            reason: format!("{name} {at}, {between}"),
        };
        if let Some(at) = &without.difference {
            return Some(told(false, at, "in two uninterrupted runs"));
        }
        let found = with.iter().find(|found| found.difference.is_some())?;
        let at = found.difference.as_ref()?;
        // Before the snapshot, ckpt-run has not affected the job.
        let is_ours = found.bytes >= self.positions[stream];
        let between = if is_ours {
            "with a restore and without one"
        } else {
            "in two runs, before any snapshot"
        };
        Some(told(is_ours, at, between))
    }

    fn files(&self) -> Option<Differs> {
        let content = |ran: &Ran| ran.content.clone();
        let [one, other] = self.uninterrupted.each_ref().map(content);
        let (one, other) = (one?, other?);
        let told = |is_ours, reason| Differs {
            step: "files",
            is_ours,
            reason,
        };
        if let Some(reason) =
            one.difference(&other, "in one of two uninterrupted runs", "in the other")
        {
            return Some(told(false, reason));
        }
        let restored = self.restored.content.as_ref()?;
        let reason = restored.difference(&one, "after the restore", "without one")?;
        Some(told(true, reason))
    }

    /// Compares the files outside of the working folder that every run wrote. The runs share these files, so a
    /// difference is never certain to result from the restore.
    fn files_outside(&self) -> Option<Differs> {
        if !self.all_ended() {
            return None;
        }
        let common = self.outside();
        let runs = [
            &self.restored,
            &self.uninterrupted[0],
            &self.uninterrupted[1],
        ];
        let [restored, one, other] = runs.map(|ran| ran.outside.common(&common));
        let reason = restored
            .difference(&one, "first", "later")
            .or_else(|| one.difference(&other, "first", "later"))?;
        Some(Differs {
            step: "files",
            is_ours: false,
            reason: format!("outside of the working folder, {reason}"),
        })
    }

    /// Returns the files outside of the working folder that every run wrote.
    fn outside(&self) -> FolderContent {
        let [one, other] = &self.uninterrupted;
        let of_restored = &self.restored.outside;
        of_restored.common(&one.outside).common(&other.outside)
    }

    fn all_ended(&self) -> bool {
        self.restored.has_ended && self.uninterrupted.iter().all(|ran| ran.has_ended)
    }

    /// Notes what was compared and how far; the result is unclear if nothing was compared.
    fn note(&self, book: &mut Book<'_>) -> Result<(), End> {
        if self.restored.has_ended && !self.all_ended() {
            let end = End::unclear(
                "the restored job exited by itself, but the uninterrupted runs did not within twice its time",
                "rehearse again when the machine is less busy",
            );
            return Err(book.failed("output", end));
        }
        let described: io::Result<Vec<String>> = book
            .report
            .output
            .iter()
            .map(|one| self.in_words(one))
            .collect();
        let described = described
            .map_err(file_error(&self.restored.outputs[0].path))?
            .join("; ");
        let compared = book
            .report
            .output
            .iter()
            .any(|one| one.result == Equality::Same);
        let files = self.restored.content.as_ref();
        let Some(files) = files.filter(|_| self.all_ended()) else {
            if !compared {
                let reason = "the job did not exit by itself, and printed nothing after the snapshot, so nothing can be compared";
                return Err(book.failed("output", End::unclear(reason, NO_OUTPUT)));
            }
            book.note("output", Outcome::Ok, described.clone());
            let skipped = "not compared, because the job did not end by itself";
            book.note("files", Outcome::Skipped, skipped);
            book.report.checked = vec![described, format!("files: {skipped}")];
            return Ok(());
        };
        book.note("output", Outcome::Ok, described.clone());
        let mut equal = format!(
            "all {} in the working folder are equal",
            counted(files.len() as u64, "file")
        );
        let outside = self.outside().len();
        if outside > 0 {
            equal += ", and so are the files that the job wrote elsewhere";
        }
        book.note("files", Outcome::Ok, equal.clone());
        book.report.checked = vec![
            described,
            format!("files: {equal}"),
            "exit code: 0".to_owned(),
        ];
        Ok(())
    }

    fn in_words(&self, compared: &Compared) -> io::Result<String> {
        let stream = usize::from(compared.stream == STREAMS[1]);
        let output = &self.restored.outputs[stream];
        let name = compared.stream;
        if compared.result != Equality::Same {
            return Ok(if output.length == 0 {
                format!("{name}: empty")
            } else {
                format!("{name}: nothing to compare after the snapshot")
            });
        }
        let at = lines_in(output, self.positions[stream])?;
        let how_far = if self.all_ended() {
            format!("all {} are equal", counted(compared.lines, "line"))
        } else {
            format!("equal up to line {}", compared.lines)
        };
        Ok(format!("{name}: {how_far}, the snapshot at line {at}"))
    }
}

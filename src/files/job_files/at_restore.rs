//! The job's files at a restore.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;

use super::super::file_comparison::{Place, SpareContents};
use super::super::file_set::{KeptFiles, Writer};
use super::super::lost::RollbackError;
use super::super::marker;
use super::super::record_line::{Line, append};
use super::super::rollback::Rollback;
use super::{JobFiles, NO_WATCHER};
use crate::clock;
use crate::sync::locked;

/// The job's files in an image, with facts about them.
#[derive(Debug)]
pub struct ImageFiles<'a> {
    /// Number of the image.
    pub id: u64,
    /// True if it came from another machine.
    pub has_come: bool,
    /// Its list.
    pub set: &'a KeptFiles,
    /// Files that its processes have open or mapped, with true if they had locked them.
    pub open: &'a BTreeMap<&'a Path, bool>,
    /// Contents of files that the job appends to, and that are not as they were.
    pub spare: &'a SpareContents,
}

impl JobFiles {
    /// Plans the rollback to the files of an image; see [`Rollback::plan`].
    ///
    /// # Errors
    /// See [`Rollback::plan`]; also if the record cannot be read.
    pub fn plan(&self, image: &ImageFiles<'_>) -> Result<Rollback, RollbackError> {
        let mut state = locked(&self.state);
        let path = state.record.path().to_owned();
        let caught_up = marker::locked_record(&path).and_then(|_lock| {
            state.record.catch_up()?;
            state.record.end_last_line()?;
            // Before anything is written: until then, the file has the time of the watcher's last update.
            let seen_ns = match self.seen_ns.load(Ordering::Relaxed) {
                // Its report is on the way.
                0 => clock::unix_ns(),
                seen_ns => seen_ns,
            };
            state.record.end_cut(Some(seen_ns))?;
            self.record_reports(&mut state.record, image.set.frozen_ns)?;
            append(&path, &self.output_lines().collect::<Vec<_>>())?;
            state.record.catch_up()
        });
        caught_up.map_err(|source| RollbackError::System {
            operation: "read",
            path,
            source,
        })?;
        let place = Place {
            folder: &self.folder,
            ours: &self.ours,
            open: image.open,
            spare: image.spare,
            held: &self.held,
            included: &self.included,
            excluded: &self.excluded,
            shared: &self.shared,
            on_lost: self.on_lost,
            ended_ns: state.record.ended_ns(),
            is_elsewhere: image.has_come && !state.record.has(image.id),
        };
        Rollback::plan(image.set, state.record.since(image.id), place)
    }

    /// Notes in the record that the files are those of an image: from now on, the job's changes are known. To be called
    /// before the job runs.
    ///
    /// # Errors
    /// The record cannot be written.
    pub fn begin_from(&self, id: u64, set: &KeptFiles) -> io::Result<()> {
        let mut state = locked(&self.state);
        if state.record.has(id) {
            return Ok(());
        }
        let mark = state.next_mark();
        let boot = clock::boot().to_owned();
        // Files that were not restored, as they are equal, are the job's too: it may rename their folder.
        let of_job = set.files.iter();
        let of_job = of_job.filter(|(_, file)| file.writer == Writer::Job);
        let touched = of_job.map(|(path, _)| Line::Touched {
            path: path.clone(),
            is_jobs_own: false,
        });
        let begin = [Line::Begin { boot }].into_iter();
        let lines = begin
            .chain(touched)
            .chain([Line::Image { id, mark }, Line::End]);
        append(state.record.path(), &lines.collect::<Vec<_>>())
    }

    /// Notes that the job was killed while it was frozen for the image, the last one.
    pub fn note_stop(&self, id: u64) {
        let path = locked(&self.state).record.path().to_owned();
        if let Err(error) = append(
            &path,
            &[Line::Stopped {
                id,
                at_ns: clock::unix_ns(),
            }],
        ) {
            tracing::debug!(%error, "later changes by other programs are not told apart");
        }
    }

    /// Notes that the job runs again, if it was stopped, and what only other programs have changed until now, with true for
    /// new files: after another restore from the same image, that could not be told any more. To be called before the job
    /// runs.
    ///
    /// # Errors
    /// The record cannot be written.
    pub fn note_run(&self, by_others: &[(PathBuf, bool)]) -> io::Result<()> {
        let mut state = locked(&self.state);
        let running = state.record.is_stopped().then_some(Line::Running);
        let others = by_others.iter().map(|(path, created)| Line::Other {
            path: path.clone(),
            created: *created,
        });
        let lines: Vec<Line> = running.into_iter().chain(others).collect();
        if lines.is_empty() {
            return Ok(());
        }
        append(state.record.path(), &lines)?;
        state.record.catch_up()
    }

    /// Notes that changes by the job are missing from here on, if no watcher runs. To be called before the job runs.
    ///
    /// # Errors
    /// The record cannot be written.
    pub fn note_missing_watcher(&self) -> io::Result<()> {
        let mut state = locked(&self.state);
        if state.marker.is_some() || state.record.has_gap() {
            return Ok(());
        }
        let reason = NO_WATCHER.to_owned();
        append(state.record.path(), &[Line::Gap { reason }])?;
        state.record.catch_up()
    }

    /// Notes that ckpt-run itself has changed files since the job's end.
    pub fn note_own_changes(&self) {
        let path = locked(&self.state).record.path().to_owned();
        let at_ns = clock::unix_ns();
        if let Err(error) = append(&path, &[Line::Ended { at_ns }]) {
            tracing::debug!(%error, "cannot note in the record of the job's files that ckpt-run has changed some");
        }
    }
}

//! Warnings at snapshots about the job's files, each given once: of files that are not kept, and of files for which a
//! restore may have to be refused.

use std::path::{Path, PathBuf};

use super::super::file_set::{KeptFiles, Kind};
use super::{JobFiles, Kept, State};
use crate::sync::locked;

impl JobFiles {
    /// Returns true if the files of an image give a reason for a warning that the previous image did not have.
    pub fn is_news(&self, kept: &Kept) -> bool {
        let names = kept.named.iter().map(|(path, ..)| path.clone()).collect();
        let warned = Some((names, kept.gap.clone()));
        let mut state = locked(&self.state);
        let is_news = (!kept.named.is_empty() || kept.gap.is_some()) && state.warned != warned;
        state.warned = warned;
        is_news
    }

    /// Returns the files of a new image's `set` that the job and another program have both changed since the image before;
    /// each is returned once, and those of `files.shared` never. Call it before [`JobFiles::now_at`].
    #[must_use]
    pub fn newly_contested(&self, set: &KeptFiles) -> Vec<PathBuf> {
        let mut state = locked(&self.state);
        let State {
            record,
            newest: Some(newest),
            contested,
            ..
        } = &mut *state
        else {
            return Vec::new();
        };
        let since = record.since(newest.id);
        let is_contested = |path: &&Path| {
            since.by_job(path)
                && since.by_others(path)
                && set
                    .files
                    .get(*path)
                    .is_some_and(|file| matches!(file.kind, Kind::File { .. }))
                && !self.shared.matches(path)
        };
        let others = record.touched_by_others().map(|(path, _)| path);
        let found: Vec<PathBuf> = others
            .filter(is_contested)
            .filter(|path| !contested.contains(*path))
            .map(Path::to_owned)
            .collect();
        contested.extend(found.iter().cloned());
        found
    }
}

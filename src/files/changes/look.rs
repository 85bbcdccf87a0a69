//! Input of a comparison of the job's files with an earlier set, and questions about it.

use std::collections::{BTreeSet, HashSet};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use super::super::describe::FileId;
use super::super::file_set::{KeptFile, Kind};
use super::super::patterns::Patterns;
use super::super::record::Record;
use super::{Earlier, OpenUses, SoFar};

/// Input of a comparison with an earlier set.
#[derive(Clone, Copy, Debug)]
pub struct Look<'a> {
    /// The record, read up to now.
    pub record: &'a Record,
    /// The earlier set.
    pub earlier: &'a Earlier,
    /// Time in the record from which changes count: that of the earlier set, or of `so_far`.
    pub since: usize,
    /// Changes found before the freeze.
    pub so_far: Option<&'a SoFar>,
    /// The files that the job has open for writing.
    pub open: &'a OpenUses<'a>,
    /// `files.include`.
    pub included: &'a Patterns,
    /// `files.exclude`.
    pub excluded: &'a Patterns,
    /// Paths that a scan found changed; empty if the record is complete.
    pub scanned: &'a BTreeSet<PathBuf>,
}

impl<'a> Look<'a> {
    /// Returns true if any program has changed the path since.
    pub(super) fn is_touched(self, path: &Path) -> bool {
        self.record.last_change(path) >= Some(self.since)
    }

    /// Returns true if the path is the folder of the earlier set.
    pub(super) fn is_same_folder(self, path: &Path) -> bool {
        let then = self.earlier.set.files.get(path);
        let then = then.filter(|then| then.kind == Kind::Folder);
        let now = path.symlink_metadata().map(|now| FileId::of(&now));
        then.is_some_and(|then| now.is_ok_and(|now| then.id() == now))
    }

    /// Returns the files with several names that the job has changed since, or may have changed because it has them open.
    pub(super) fn written_files(self) -> HashSet<FileId> {
        let open = self.open.keys();
        let open = open.filter_map(|path| path.symlink_metadata().ok());
        let open = open.filter(|found| found.nlink() > 1);
        let open = open.map(|found| FileId::of(&found));
        open.chain(self.record.changed_files_since(self.since))
            .collect()
    }

    /// Returns the names of these files. Usually there are none; a set may have many files, and the job is frozen.
    pub(super) fn names_of(self, written: &HashSet<FileId>) -> impl Iterator<Item = &'a Path> {
        let known = self.earlier.set.files.iter();
        let copied = self.so_far.into_iter().flat_map(|it| &it.files);
        let copied = copied.filter_map(|(path, file)| Some((path, file.as_ref()?)));
        let is_any = !written.is_empty();
        let all = is_any.then(|| known.chain(copied)).into_iter().flatten();
        let names = all.filter(|(_, file)| written.contains(&file.id()));
        names.map(|(path, _)| path.as_path())
    }

    /// Returns the file whose content was copied before the freeze, if it cannot have changed since: no event was
    /// recorded, and no mapping could change it without an event.
    pub(super) fn copied(self, written: &HashSet<FileId>, path: &Path) -> Option<&'a KeptFile> {
        let copied = self.so_far?.files.get(path)?.as_ref()?;
        let is_mapped = self.open.get(path).is_some_and(|open| open.is_mapped);
        let is_touched = self.is_touched(path) || written.contains(&copied.id());
        (!copied.has_no_content() && !is_mapped && !is_touched).then_some(copied)
    }
}

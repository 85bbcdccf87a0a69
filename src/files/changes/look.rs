//! Input of a comparison of the job's files with an earlier set, and questions about it.

use std::collections::{BTreeSet, HashMap};
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
    fn is_touched(self, path: &Path) -> bool {
        self.record.last_change(path) >= Some(self.since)
    }

    /// Returns true if names in the folder cannot have changed by its being renamed or replaced.
    pub(super) fn is_same_folder(self, path: &Path) -> bool {
        match self.earlier.set.files.get(path) {
            Some(then) if then.kind == Kind::Folder => {
                let now = path.symlink_metadata().map(|now| FileId::of(&now));
                now.is_ok_and(|now| then.id() == now)
            }
            Some(_) => true,
            None => false,
        }
    }

    /// Returns the files with several names that the job has changed since, or may have changed because it has them open
    /// by one of the names, and if they are mapped. What is only appended to has its content in the file itself.
    pub(super) fn written_files(self) -> HashMap<FileId, bool> {
        let recorded = self.record.changed_files_since(self.since);
        let mut written: HashMap<FileId, bool> = recorded.map(|id| (id, false)).collect();
        let id = |path: &Path| {
            let found = path.symlink_metadata().ok()?;
            (found.nlink() > 1).then(|| FileId::of(&found))
        };
        let (appended, open): (Vec<_>, Vec<_>) = self.open.iter().partition(|it| it.1.appends);
        for (path, _) in appended {
            id(path).map(|id| written.remove(&id));
        }
        let was_open = self.earlier.unsettled.iter();
        let was_open = was_open.filter(|path| !self.open.contains_key(path.as_path()));
        written.extend(was_open.filter_map(|path| Some((id(path)?, false))));
        for (path, open) in open {
            if let Some(id) = id(path) {
                *written.entry(id).or_default() |= open.is_mapped;
            }
        }
        written
    }

    /// Returns the names of these files. Usually there are none; a set may have many files, and the job is frozen.
    pub(super) fn names_of(
        self,
        written: &HashMap<FileId, bool>,
    ) -> impl Iterator<Item = &'a Path> {
        let known = self.earlier.set.files.iter();
        let copied = self.so_far.into_iter().flat_map(|it| &it.files);
        let copied = copied.filter_map(|(path, file)| Some((path, file.as_ref()?)));
        let is_any = !written.is_empty();
        let all = is_any.then(|| known.chain(copied)).into_iter().flatten();
        let names = all.filter(|(_, file)| written.contains_key(&file.id()));
        names.map(|(path, _)| path.as_path())
    }

    /// Returns the file whose content was copied before the freeze, if it cannot have changed since: no event was
    /// recorded, and no mapping could change it without an event.
    pub(super) fn copied(
        self,
        written: &HashMap<FileId, bool>,
        path: &Path,
    ) -> Option<&'a KeptFile> {
        let copied = self.so_far?.files.get(path)?.as_ref()?;
        let is_mapped = self.open.get(path).is_some_and(|open| open.is_mapped);
        let is_touched = self.is_touched(path) || written.contains_key(&copied.id());
        (!copied.has_no_content() && !is_mapped && !is_touched).then_some(copied)
    }
}

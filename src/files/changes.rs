//! Changes of the job's files since the set of an earlier image.

use std::collections::{BTreeSet, HashMap};
use std::path::{Path, PathBuf};

use super::file_set::{Content, KeptFile, KeptFiles, Kind, Writer};
use super::patterns::Patterns;
use super::record::Record;

/// A path whose entry in the set is not the earlier one any more.
#[derive(Debug)]
pub struct Changed {
    /// The path.
    pub path: PathBuf,
    /// What is there; `None` when nothing is that can be kept.
    pub file: Option<KeptFile>,
}

impl Changed {
    /// Returns true if the job has the file open for writing.
    #[must_use]
    pub fn is_open(&self) -> bool {
        let file = self.file.as_ref();
        file.is_some_and(|file| file.writer == Writer::Open)
    }
}

/// The job's use of a file that it has open for writing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OpenUse {
    /// True if every write goes to the end of the file.
    pub appends: bool,
    /// True if the file is mapped, shared and writable, or in memory: its times do not show every change.
    pub is_mapped: bool,
}

/// The files that the job has open for writing.
pub type OpenUses<'a> = HashMap<&'a Path, OpenUse>;

/// Input of a comparison with an earlier set.
#[derive(Clone, Copy, Debug)]
pub struct Look<'a> {
    /// The record, read up to now.
    pub record: &'a Record,
    /// The earlier set.
    pub earlier: &'a KeptFiles,
    /// The record's time of the earlier set.
    pub earlier_time: usize,
    /// The files that the job has open for writing.
    pub open: &'a OpenUses<'a>,
    /// `files.include`.
    pub included: &'a Patterns,
    /// `files.exclude`.
    pub excluded: &'a Patterns,
    /// Paths that a scan found changed; empty if all changes are on record.
    pub scanned: &'a BTreeSet<PathBuf>,
}

/// Compares the job's files with an earlier set. Only what the record or the scan says was touched is looked at: the job
/// is frozen meanwhile.
#[must_use]
pub fn changed_since(look: Look<'_>) -> Vec<Changed> {
    let touched = look.record.touched();
    let touched = touched.filter(|(_, touch)| touch.last >= look.earlier_time);
    let mut paths: BTreeSet<&Path> = touched.map(|(path, _)| path).collect();
    // What was open may be closed by now, and the other way round; neither is a change on record.
    let unsettled = |file: &KeptFile| file.is_appended() || file.is_mapped;
    let earlier = look.earlier.files.iter();
    paths.extend(earlier.filter_map(|(path, file)| unsettled(file).then_some(path.as_path())));
    paths.extend(look.open.keys().copied());
    paths.extend(look.scanned.iter().map(PathBuf::as_path));
    let is_concern = |path: &&Path| look.open.contains_key(*path) || !look.excluded.matches(path);
    let changed = paths.into_iter().filter(is_concern);
    changed.map(|path| describe(look, path)).collect()
}

fn describe(look: Look<'_>, path: &Path) -> Changed {
    let known = look.earlier.files.get(path);
    let file = KeptFile::of(path).map(|mut file| {
        let open = look.open.get(path);
        file.writer = match open {
            Some(_) => Writer::Open,
            None if look.record.is_jobs(path) => Writer::Job,
            None if look.included.matches(path) => Writer::Included,
            None => known.map_or(Writer::Unknown, |known| known.writer),
        };
        file.is_mapped = open.is_some_and(|open| open.is_mapped);
        let unchanged = known.filter(|known| known.is_unchanged(&file, look.earlier.frozen_ns));
        if let Kind::File { content, .. } = &mut file.kind {
            if open.is_some_and(|open| open.appends) {
                *content = Content::Appended;
            } else if let Some(Kind::File { content: kept, .. }) = unchanged.map(|it| &it.kind)
                && matches!(kept, Content::Kept { .. } | Content::Held { .. })
            {
                *content = kept.clone();
            }
        }
        file
    });
    Changed {
        path: path.to_owned(),
        file,
    }
}

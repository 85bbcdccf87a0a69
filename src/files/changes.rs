//! Changes of the job's files since the set of an earlier image.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::{Path, PathBuf};

use super::describe::Describer;
use super::file_set::{Content, KeptFile, KeptFiles, Kind, TICK_NS, Writer};
use super::patterns::Patterns;
use super::record::Record;

/// A path whose file may differ from the earlier set.
#[derive(Debug)]
pub struct Changed {
    /// The path.
    pub path: PathBuf,
    /// The file at the path; `None` if there is no file that can be kept.
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
    /// True if the file has a shared writable mapping or is in memory, so that its times do not show every change.
    pub is_mapped: bool,
}

/// The files that the job has open for writing.
pub type OpenUses<'a> = HashMap<&'a Path, OpenUse>;

/// Changes of the job's files up to a mark shortly before the freeze. Files without later changes on record are as
/// described here.
#[derive(Debug)]
pub struct SoFar {
    /// Time of the mark in the record.
    pub(super) time: usize,
    /// Files by path; `None` if there is no file that can be kept. A file without content is inspected again.
    pub files: BTreeMap<PathBuf, Option<KeptFile>>,
}

/// Input of a comparison with an earlier set.
#[derive(Clone, Copy, Debug)]
pub struct Look<'a> {
    /// The record, read up to now.
    pub record: &'a Record,
    /// The earlier set.
    pub earlier: &'a KeptFiles,
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

/// Compares the job's files with an earlier set. Only files that the record or the scan reports as changed are
/// inspected, because the job is frozen.
#[must_use]
pub fn changed_since(look: Look<'_>) -> Vec<Changed> {
    let touched = look.record.touched();
    let touched = touched.filter(|(_, touch)| touch.last >= look.since);
    let mut paths: BTreeSet<&Path> = touched.map(|(path, _)| path).collect();
    // Files may have been opened or closed since. Neither is a change on record.
    let earlier = look.earlier.files.iter();
    paths.extend(earlier.filter_map(|(path, file)| file.is_unsettled().then_some(path.as_path())));
    paths.extend(look.open.keys().copied());
    paths.extend(look.scanned.iter().map(PathBuf::as_path));
    let so_far = look.so_far.into_iter().flat_map(|it| &it.files);
    let is_unknown = |(path, file): &(&PathBuf, &Option<KeptFile>)| {
        let file = file.as_ref();
        file.is_some_and(KeptFile::has_no_content) || look.is_touched(path)
    };
    paths.extend(so_far.filter(is_unknown).map(|(path, _)| path.as_path()));
    let is_concern = |path: &&Path| look.open.contains_key(*path) || !look.excluded.matches(path);
    let changed = paths.into_iter().filter(is_concern);
    let mut describer = Describer::default();
    changed
        .map(|path| describe(look, path, &mut describer))
        .collect()
}

impl<'a> Look<'a> {
    /// Returns true if any program has changed the path since.
    fn is_touched(self, path: &Path) -> bool {
        self.record.last_change(path) >= Some(self.since)
    }

    /// Returns the file whose content was copied before the freeze, if it cannot have changed since: no event was
    /// recorded, and no mapping could change it without an event.
    fn copied(self, path: &Path) -> Option<&'a KeptFile> {
        let copied = self.so_far?.files.get(path)?.as_ref();
        let is_mapped = self.open.get(path).is_some_and(|open| open.is_mapped);
        copied.filter(|it| !it.has_no_content() && !is_mapped && !self.is_touched(path))
    }
}

fn describe(look: Look<'_>, path: &Path, describer: &mut Describer) -> Changed {
    let known = look.earlier.files.get(path);
    let shows_attributes = |it: &&KeptFile| it.changed_ns < look.earlier.frozen_ns - TICK_NS;
    let described = describer.describe(path, known.filter(shows_attributes));
    let file = described.map(|mut file| {
        let open = look.open.get(path);
        file.writer = match open {
            Some(_) => Writer::Open,
            None if look.record.is_jobs(path) => Writer::Job,
            None if look.included.matches(path) => Writer::Included,
            None => known.map_or(Writer::Unknown, |known| known.writer),
        };
        file.is_mapped = open.is_some_and(|open| open.is_mapped);
        let unchanged = known.filter(|known| known.is_unchanged(&file, look.earlier.frozen_ns));
        let copied = look.copied(path).filter(|it| it.looks_unchanged(&file));
        let unchanged = copied.or(unchanged);
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

#[cfg(test)]
mod tests {
    use std::fs;

    use super::super::record_line::{JobChange, Line, append};
    use super::*;

    /// Compares files of a job that were copied at time 1 with their state at the freeze.
    fn found(open: &[(&str, bool)], later: &[Line], place: &Path) -> Vec<(String, bool)> {
        let path = |name: &str| place.join(name);
        let record = place.join("record");
        let before = ["a", "b"].map(|name| Line::Job {
            path: path(name),
            change: JobChange::Created,
        });
        append(&record, &before).unwrap();
        append(&record, &[Line::Image { id: 4 }]).unwrap();
        append(&record, later).unwrap();
        let names = ["a", "b", "empty"];
        let files = names.map(|name| {
            fs::write(path(name), "x").unwrap();
            let mut file = KeptFile::of(&path(name)).unwrap();
            if let Kind::File { content, .. } = &mut file.kind
                && name != "empty"
            {
                let stream = "own".to_owned();
                *content = Content::Kept { stream, offset: 0 };
            }
            (path(name), Some(file))
        });
        let so_far = SoFar {
            time: 1,
            files: files.into(),
        };
        let paths: Vec<_> = open.iter().map(|(name, _)| path(name)).collect();
        let uses = paths.iter().zip(open).map(|(path, (_, is_mapped))| {
            let is_mapped = *is_mapped;
            let appends = false;
            (&**path, OpenUse { appends, is_mapped })
        });
        let none = Patterns::new(&[], place).unwrap();
        let changed = changed_since(Look {
            record: &Record::open(&record).unwrap(),
            earlier: &KeptFiles::default(),
            since: 1,
            so_far: Some(&so_far),
            open: &uses.collect(),
            included: &none,
            excluded: &none,
            scanned: &BTreeSet::new(),
        });
        let about = |it: Changed| {
            let name = it.path.file_name().unwrap().to_str().unwrap().to_owned();
            (name, !it.file.unwrap().has_no_content())
        };
        changed.into_iter().map(about).collect()
    }

    #[test]
    fn only_changes_after_the_copy_are_inspected_again() {
        let place = tempfile::tempdir().unwrap();
        let path = place.path().join("b");
        let empty = || ("empty".to_owned(), false);
        let found = |open: &[_], later: &[_]| {
            let _ = fs::remove_file(place.path().join("record"));
            found(open, later, place.path())
        };
        assert_eq!(found(&[], &[]), [empty()]);
        for line in [
            Line::Job {
                path: path.clone(),
                change: JobChange::Changed,
            },
            Line::Other {
                path: path.clone(),
                created: false,
            },
        ] {
            assert_eq!(found(&[], &[line]), [("b".to_owned(), false), empty()]);
        }
        // Writes through a mapping are not on record.
        let open = [("a", true), ("b", false)];
        let expected = [("a".to_owned(), false), ("b".to_owned(), true), empty()];
        assert_eq!(found(&open, &[]), expected);
    }
}

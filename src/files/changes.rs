//! Changes of the job's files since the set of an earlier image.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::describe::Describer;
use super::file_set::{Content, KeptFile, KeptFiles, Kind, TICK_NS, Writer};
use super::job_links::JobLinks;
use super::patterns::Patterns;
use super::record::Record;
use crate::sync::in_parts;

/// The set of the newest image. What a snapshot needs from all of its files is collected when the image is complete,
/// because a set may have many files, and the job is frozen during the next snapshot.
#[derive(Debug, Default)]
pub struct Earlier {
    /// Number of the image.
    pub id: u64,
    /// The set.
    pub set: Arc<KeptFiles>,
    /// Bytes of all contents in the image.
    pub kept_bytes: u64,
    /// Files that can change without a change on record.
    unsettled: Vec<PathBuf>,
    /// The job's links.
    links: Vec<PathBuf>,
}

impl Earlier {
    /// Collects the facts of a set.
    pub(super) fn new(id: u64, set: Arc<KeptFiles>) -> Self {
        let files = || set.files.iter();
        let unsettled = files().filter(|(_, file)| file.is_unsettled());
        let links = files().filter(|(_, file)| is_job_link(file));
        Self {
            id,
            kept_bytes: files().filter_map(|(_, file)| Some(file.kept()?.1)).sum(),
            unsettled: unsettled.map(|(path, _)| path.clone()).collect(),
            links: links.map(|(path, _)| path.clone()).collect(),
            set,
        }
    }

    /// Returns the bytes of a path's content in the image.
    fn kept_bytes_of(&self, path: &Path) -> u64 {
        let file = self.set.files.get(path);
        file.and_then(KeptFile::kept).map_or(0, |(_, bytes)| bytes)
    }
}

/// A path whose file may differ from the earlier set.
#[derive(Debug)]
pub struct Changed {
    /// The path.
    pub path: PathBuf,
    /// The file at the path; `None` if there is no file that can be kept.
    pub file: Option<KeptFile>,
    /// Bytes of the path's content in the earlier image.
    pub earlier_bytes: u64,
}

impl Changed {
    /// Returns the state of a path that was determined before the freeze.
    pub(super) fn known(path: PathBuf, file: Option<KeptFile>, earlier: &Earlier) -> Self {
        Self {
            earlier_bytes: earlier.kept_bytes_of(&path),
            path,
            file,
        }
    }

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
    /// Files by path; `None` if there is no file that can be kept.
    pub files: BTreeMap<PathBuf, Option<KeptFile>>,
    /// Files without content, which are inspected again.
    pub(super) unread: Vec<PathBuf>,
}

impl SoFar {
    pub(super) fn new(time: usize, files: BTreeMap<PathBuf, Option<KeptFile>>) -> Self {
        let unread = Vec::new();
        Self {
            time,
            files,
            unread,
        }
    }

    /// Separates the files without content, once all others were copied.
    pub fn complete(&mut self) {
        self.files.retain(|path, file| {
            let is_unread = file.as_ref().is_some_and(KeptFile::has_no_content);
            if is_unread {
                self.unread.push(path.clone());
            }
            !is_unread
        });
    }
}

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

/// Returns the reason why changes since the set of an earlier image, or since the beginning, may be missing.
pub(super) fn gap_since(record: &Record, earlier: Option<&Earlier>) -> Option<String> {
    earlier.map_or_else(|| record.gap_since(0), |it| record.since(it.id).gap())
}

/// Returns the record's time of an earlier image, or of the beginning.
pub(super) fn time_of(record: &Record, earlier: Option<&Earlier>) -> usize {
    earlier.map_or(0, |it| record.time_of(it.id))
}

/// Compares the job's files with an earlier set. Only files that the record or the scan reports as changed are
/// inspected, because the job is frozen.
#[must_use]
pub fn changed_since(look: Look<'_>) -> Vec<Changed> {
    let touched = look.record.touched();
    let touched = touched.filter(|(_, touch)| touch.last >= look.since);
    let mut paths = BTreeSet::new();
    for (path, _) in touched {
        paths.insert(path);
        // The folder may have been renamed or replaced.
        paths.extend(look.earlier.set.below(path));
    }
    paths.extend(look.changed_by_another_name());
    // Files may have been opened or closed since. Neither is a change on record.
    paths.extend(look.earlier.unsettled.iter().map(PathBuf::as_path));
    paths.extend(look.open.keys().copied());
    paths.extend(look.scanned.iter().map(PathBuf::as_path));
    if let Some(so_far) = look.so_far {
        paths.extend(so_far.unread.iter().map(PathBuf::as_path));
        // Changes by the job are in the list already. A file that nobody has touched since it was copied is not
        // inspected, unless it is open for writing: not every write causes an event (asynchronous I/O, mappings).
        let others = look.record.touched_by_others();
        let others = others.filter(|(_, last)| *last >= look.since);
        paths.extend(
            others.filter_map(|(path, _)| Some(so_far.files.get_key_value(path)?.0.as_path())),
        );
    }
    let is_concern = |path: &&Path| look.open.contains_key(*path) || !look.excluded.matches(path);
    let changed: Vec<&Path> = paths.into_iter().filter(is_concern).collect();
    let parts = in_parts(&changed, |part| {
        let mut describer = Describer::default();
        let described = part.iter().map(|path| describe(look, path, &mut describer));
        described.collect::<Vec<_>>()
    });
    let mut all: Vec<Changed> = parts.into_iter().flatten().collect();
    hide_beyond_links(&mut all, look);
    all
}

fn is_job_link(file: &KeptFile) -> bool {
    matches!(file.kind, Kind::Link { .. }) && file.writer == Writer::Job
}

/// Takes files out of the list that are at another path, to which a link of the job leads.
fn hide_beyond_links(all: &mut [Changed], look: Look<'_>) {
    let now = |it: &&Changed| it.file.as_ref().is_some_and(is_job_link);
    let links: Vec<PathBuf> = all.iter().filter(now).map(|it| it.path.clone()).collect();
    let earlier = look.earlier.links.iter();
    let links = JobLinks::of(links.iter().chain(earlier).map(PathBuf::as_path));
    // `files.include` may name files by a link.
    let is_named = |path: &Path| look.scanned.contains(path) || look.included.matches(path);
    for changed in all.iter_mut().filter(|it| links.lead(&it.path)) {
        if !is_named(&changed.path) {
            changed.file = None;
        }
    }
}

impl<'a> Look<'a> {
    /// Returns true if any program has changed the path since.
    fn is_touched(self, path: &Path) -> bool {
        self.record.last_change(path) >= Some(self.since)
    }

    /// Returns true if the job has changed the file since by one of several names.
    fn is_written(self, file: &KeptFile) -> bool {
        self.record.last_change_of(file.id()) >= Some(self.since)
    }

    /// Returns the names of files that the job has changed since by other names.
    fn changed_by_another_name(self) -> impl Iterator<Item = &'a Path> {
        let is_any = self.record.changed_files_since(self.since).next().is_some();
        let known = self.earlier.set.files.iter();
        let copied = self.so_far.into_iter().flat_map(|it| &it.files);
        let copied = copied.filter_map(|(path, file)| Some((path, file.as_ref()?)));
        let all = is_any.then(|| known.chain(copied)).into_iter().flatten();
        let written = all.filter(move |(_, file)| self.is_written(file));
        written.map(|(path, _)| path.as_path())
    }

    /// Returns the file whose content was copied before the freeze, if it cannot have changed since: no event was
    /// recorded, and no mapping could change it without an event.
    fn copied(self, path: &Path) -> Option<&'a KeptFile> {
        let copied = self.so_far?.files.get(path)?.as_ref()?;
        let is_mapped = self.open.get(path).is_some_and(|open| open.is_mapped);
        let is_touched = self.is_touched(path) || self.is_written(copied);
        (!copied.has_no_content() && !is_mapped && !is_touched).then_some(copied)
    }
}

fn describe(look: Look<'_>, path: &Path, describer: &mut Describer) -> Changed {
    let earlier = &look.earlier.set;
    let known = earlier.files.get(path);
    let shows_attributes = |it: &&KeptFile| it.changed_ns < earlier.frozen_ns - TICK_NS;
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
        let unchanged = known.filter(|known| known.is_unchanged(&file, earlier.frozen_ns));
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
        earlier_bytes: known.and_then(KeptFile::kept).map_or(0, |(_, bytes)| bytes),
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
        let mut so_far = SoFar::new(1, files.into());
        so_far.complete();
        let paths: Vec<_> = open.iter().map(|(name, _)| path(name)).collect();
        let uses = paths.iter().zip(open).map(|(path, (_, is_mapped))| {
            let is_mapped = *is_mapped;
            let appends = false;
            (&**path, OpenUse { appends, is_mapped })
        });
        let none = Patterns::new(&[], place).unwrap();
        let changed = changed_since(Look {
            record: &Record::open(&record).unwrap(),
            earlier: &Earlier::default(),
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

    /// Compares with an earlier set by the record in `place`, from its beginning.
    fn found_since(earlier: &Earlier, place: &Path) -> Vec<Changed> {
        let none = Patterns::new(&[], place).unwrap();
        changed_since(Look {
            record: &Record::open(&place.join("record")).unwrap(),
            earlier,
            since: 0,
            so_far: None,
            open: &OpenUses::new(),
            included: &none,
            excluded: &none,
            scanned: &BTreeSet::new(),
        })
    }

    #[test]
    fn replaced_bytes_of_the_earlier_image_are_reported() {
        let place = tempfile::tempdir().unwrap();
        let path = |name: &str| place.path().join(name);
        let files = ["a", "b"].map(|name| {
            fs::write(path(name), name.repeat(5)).unwrap();
            let mut file = KeptFile::of(&path(name)).unwrap();
            if let Kind::File { content, .. } = &mut file.kind {
                let stream = "own".to_owned();
                *content = Content::Kept { stream, offset: 0 };
            }
            (path(name), file)
        });
        let set = KeptFiles {
            frozen_ns: 0,
            files: files.into(),
        };
        let earlier = Earlier::new(4, Arc::new(set));
        assert_eq!(earlier.kept_bytes, 10);
        let changes = ["a", "new"].map(|name| Line::Job {
            path: path(name),
            change: JobChange::Changed,
        });
        fs::write(path("new"), "new").unwrap();
        append(&path("record"), &changes).unwrap();
        let changed = found_since(&earlier, place.path());
        let found = changed.iter().map(|it| (&*it.path, it.earlier_bytes));
        let expected = [(path("a"), 5), (path("new"), 0)];
        assert!(found.eq(expected.iter().map(|(path, bytes)| (&**path, *bytes))));
    }

    /// Neither path is on record: the first file was only opened, the second changed by another name.
    #[test]
    fn files_whose_folder_or_other_name_changed_are_inspected() {
        let place = tempfile::tempdir().unwrap();
        let path = |name: &str| place.path().join(name);
        fs::create_dir(path("folder")).unwrap();
        let names = ["folder/opened", "linked", "other"];
        let files = names.map(|name| {
            fs::write(path(name), "x").unwrap();
            (path(name), KeptFile::of(&path(name)).unwrap())
        });
        let id = files[1].1.id();
        let set = KeptFiles {
            frozen_ns: 0,
            files: files.into(),
        };
        fs::rename(path("folder"), path("renamed")).unwrap();
        let gone = Line::Job {
            path: path("folder"),
            change: JobChange::FolderGone,
        };
        append(&path("record"), &[gone, Line::File { id }]).unwrap();
        let found = found_since(&Earlier::new(4, Arc::new(set)), place.path());
        let found: Vec<_> = found
            .iter()
            .map(|it| (&*it.path, it.file.is_some()))
            .collect();
        let expected = [
            ("folder", false),
            ("folder/opened", false),
            ("linked", true),
        ];
        assert_eq!(found.len(), expected.len());
        for ((path, is_there), (name, expected)) in found.into_iter().zip(expected) {
            assert_eq!((path, is_there), (&*place.path().join(name), expected));
        }
    }

    #[test]
    fn a_link_in_the_place_of_a_folder_leads_to_no_further_files() {
        let place = tempfile::tempdir().unwrap();
        let path = |name: &str| place.path().join(name);
        fs::create_dir(path("now")).unwrap();
        fs::write(path("now/file"), "x").unwrap();
        std::os::unix::fs::symlink("now", path("then")).unwrap();
        let names = ["now", "now/file", "then", "then/file"];
        let job = |name: &str| Line::Job {
            path: path(name),
            change: JobChange::Created,
        };
        append(&path("record"), &names.map(job)).unwrap();
        let found = |earlier: &Earlier| {
            let changed = found_since(earlier, place.path()).into_iter();
            changed.map(|it| (it.path, it.file)).collect::<Vec<_>>()
        };
        let first = found(&Earlier::default());
        let there: Vec<bool> = first.iter().map(|(_, file)| file.is_some()).collect();
        assert_eq!(there, [true, true, true, false]);
        let link = first.into_iter().nth(2).unwrap();
        let files = [(link.0, link.1.unwrap())].into();
        let set = KeptFiles {
            frozen_ns: 0,
            files,
        };
        let last = Line::Job {
            path: path("then/file"),
            change: JobChange::Changed,
        };
        fs::remove_file(path("record")).unwrap();
        append(&path("record"), &[last]).unwrap();
        let again = found(&Earlier::new(4, Arc::new(set)));
        assert_eq!(again, [(path("then/file"), None)]);
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

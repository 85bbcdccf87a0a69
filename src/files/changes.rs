//! Changes of the job's files since the set of an earlier image.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::describe::{Describer, FileId};
use super::file_set::{Content, KeptFile, KeptFiles, Kind, TICK_NS, Writer, is_in_memory};
use super::job_links::JobLinks;
use super::record::Record;
use crate::sync::in_parts;
pub use look::Look;

mod look;

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
            kept_bytes: files().map(|(_, file)| file.kept_bytes()).sum(),
            unsettled: unsettled.map(|(path, _)| path.clone()).collect(),
            links: links.map(|(path, _)| path.clone()).collect(),
            set,
        }
    }

    /// Returns the bytes of a path's content in the image.
    fn kept_bytes_of(&self, path: &Path) -> u64 {
        let file = self.set.files.get(path);
        file.map_or(0, KeptFile::kept_bytes)
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
        // If the folder was renamed or replaced, names in it have no changes of their own on record.
        if !look.is_same_folder(path) {
            paths.extend(look.earlier.set.below(path));
        }
    }
    let written = look.written_files();
    paths.extend(look.names_of(&written));
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
        let of = |path: &&Path| describe((look, &written), path, &mut describer);
        let described = part.iter().map(of);
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

fn describe(
    (look, written): (Look<'_>, &HashMap<FileId, bool>),
    path: &Path,
    describer: &mut Describer,
) -> Changed {
    let earlier = &look.earlier.set;
    let known = earlier.files.get(path);
    let shows_attributes = |it: &&KeptFile| it.changed_ns < earlier.frozen_ns - TICK_NS;
    let described = describer.describe(path, known.filter(shows_attributes));
    let touch = look.record.touch_of(path);
    // A pipe or socket to which the job only writes is another program's.
    let is_jobs_own = || known.is_some() || touch.is_some_and(|touch| touch.is_jobs_own);
    let described =
        described.filter(|file| !file.is_special() || is_jobs_own() || look.included.matches(path));
    let file = described.map(|mut file| {
        let open = look.open.get(path);
        file.writer = match open {
            Some(_) => Writer::Open,
            None if touch.is_some() => Writer::Job,
            None if look.included.matches(path) => Writer::Included,
            None => known.map_or(Writer::Unknown, |known| known.writer),
        };
        let is_mapped_by_others = written.get(&file.id()).is_some_and(|is_mapped| *is_mapped);
        file.is_mapped = is_mapped_by_others || open.is_some_and(|open| open.is_mapped);
        let unchanged = known.filter(|known| known.is_unchanged(&file, earlier.frozen_ns));
        // In memory, stores through a mapping do not change the times.
        let is_touched =
            touch.is_some_and(|touch| touch.last >= look.record.time_of(look.earlier.id));
        let may_have_changed = is_mapped_by_others || is_touched && is_in_memory(path);
        let unchanged = unchanged.filter(|_| !may_have_changed);
        let copied = look
            .copied(written, path)
            .filter(|it| it.looks_unchanged(&file));
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
        earlier_bytes: known.map_or(0, KeptFile::kept_bytes),
    }
}

#[cfg(test)]
mod tests;

//! Comparison of the job's files with the set of an image: its input, and who has changed a file since.

use std::collections::{BTreeMap, HashSet};
use std::fs::Metadata;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use nix::unistd::geteuid;

use super::describe::FileId;
use super::file_set::{Content, KeptFile, KeptFiles, Kind, Writer, born_ns, is_in_memory};
use super::held::Held;
use super::job_links::JobLinks;
use super::lost::OnLost;
use super::patterns::Patterns;
use super::record::Since;

/// Time that a killed job may take to end, in nanoseconds.
const END_NS: i64 = 2_000_000_000;

/// Places of contents, by the path of the file.
pub type SpareContents = BTreeMap<PathBuf, Content>;

/// Input of a plan besides the set and the record.
#[derive(Clone, Copy, Debug)]
pub struct Place<'a> {
    /// The job's working folder.
    pub folder: &'a Path,
    /// Paths that belong to ckpt-run: the store, and the files that receive its output.
    pub ours: &'a [PathBuf],
    /// Files that the image's processes have open or mapped, with true if they had locked them.
    pub open: &'a BTreeMap<&'a Path, bool>,
    /// Contents in the image of files that the job appends to, and that are not as they were.
    pub spare: &'a SpareContents,
    /// Files held in the store.
    pub held: &'a Held,
    /// `files.include`.
    pub included: &'a Patterns,
    /// `files.exclude`.
    pub excluded: &'a Patterns,
    /// `files.shared`.
    pub shared: &'a Patterns,
    /// Treatment of a file that cannot be restored.
    pub on_lost: OnLost,
    /// Time from which the job has not run, if a watcher saw its end, in nanoseconds since 1970.
    pub ended_ns: Option<i64>,
    /// True if the image came from another machine and the job has not run here since: no file here is newer by the
    /// job's doing.
    pub is_elsewhere: bool,
}

impl Place<'_> {
    /// Returns true if a file that the image lacks stays there.
    pub(super) fn leaves_out(&self, path: &Path) -> bool {
        self.excluded.matches(path) || self.shared.matches(path)
    }
}

/// A comparison in progress.
#[derive(Clone, Copy)]
pub(super) struct Comparison<'a> {
    pub set: &'a KeptFiles,
    pub since: Since<'a>,
    pub place: Place<'a>,
    pub links: &'a JobLinks<'a>,
    /// Files that the job has changed since by any of their names.
    pub written_files: &'a HashSet<FileId>,
    /// Reason why changes may be missing.
    pub gap: Option<&'a str>,
}

impl Comparison<'_> {
    /// Describes the file that is at a path now.
    pub fn now(&self, path: &Path) -> Option<KeptFile> {
        let is_elsewhere = self.links.lead(path);
        (!is_elsewhere).then(|| KeptFile::of(path)).flatten()
    }

    /// Returns true if changes in this folder may be missing in the record.
    pub fn is_unsure(&self, folder: &Path) -> bool {
        self.is_unwatched(folder) || self.since.has_cuts()
    }

    /// Returns true if the last change of this path may be missing in the record. `changed_ns` is its time; `None` if
    /// the path does not exist.
    pub fn may_miss(&self, path: &Path, changed_ns: Option<i64>) -> bool {
        self.is_unwatched(path)
            || changed_ns.map_or_else(|| self.since.has_cuts(), |at| self.since.may_miss(at))
    }

    /// Returns true if only the job's last seconds are missing in the record, before a power failure or its end, and the
    /// change is from these.
    pub fn is_of_last_seconds(&self, path: &Path, changed_ns: i64) -> bool {
        !self.is_unwatched(path) && self.since.may_miss_of_job(changed_ns)
    }

    /// Returns true if the folder of a missing file is on another file system than at the snapshot, or is newer than that: a
    /// file system in memory was lost in a boot, or the container is another one.
    pub fn is_lost_with_its_folder(&self, path: &Path, then: &KeptFile) -> bool {
        let mut folders = path.ancestors().skip(1);
        let folder = folders.find_map(|folder| folder.symlink_metadata().ok());
        let is_another = |folder: Metadata| {
            folder.dev() != then.identity.0 || born_ns(&folder) > self.set.frozen_ns
        };
        !self.since.by_others(path) && folder.is_some_and(is_another)
    }

    /// Returns the folders in which the job has changed something.
    pub fn jobs_folders(&self) -> HashSet<PathBuf> {
        let kept = self.set.files.iter();
        let kept = kept.filter(|(_, file)| file.writer != Writer::Unknown);
        let touched = self.since.ever_touched().map(|(path, _)| path);
        let paths = kept.map(|(path, _)| path.as_path()).chain(touched);
        paths.filter_map(Path::parent).map(Path::to_owned).collect()
    }

    /// Returns the users to whom files of the job belong.
    pub fn jobs_users(&self) -> HashSet<u32> {
        let files = self.set.files.values();
        let files = files.filter(|file| file.writer != Writer::Unknown);
        let users = files.map(|file| file.owner.0);
        users.chain([geteuid().as_raw()]).collect()
    }

    /// Returns true if the job had locked the file at the snapshot.
    pub fn was_locked(&self, path: &Path) -> bool {
        self.place.open.get(path).is_some_and(|locked| *locked)
    }

    /// Returns false for a file that can change while its times stay: in memory, stores through a mapping change none.
    pub fn shows_changes(path: &Path, then: &KeptFile) -> bool {
        !(then.is_mapped || then.kept().is_some() && is_in_memory(path))
    }

    /// Returns true if the file cannot have changed since.
    pub fn is_unchanged(&self, path: &Path, then: &KeptFile, now: &KeptFile) -> bool {
        then.is_unchanged(now, self.set.frozen_ns)
            && (Self::shows_changes(path, then) || !self.is_recorded(path, Some(now)))
    }

    /// Returns true if the file is as it was, and the record would have any change of it.
    pub fn has_no_change(&self, path: &Path, then: &KeptFile, now: &KeptFile) -> bool {
        then.looks_unchanged(now)
            && !then.is_mapped
            && !self.may_miss(path, Some(now.changed_ns))
            && !self.since.by_job(path)
            && !self.since.by_others(path)
    }

    /// Returns true if the job has another file open at this path, or the path no longer leads to a file.
    pub fn is_replaced(&self, path: &Path, then: &KeptFile, now: &KeptFile) -> bool {
        let is_same = self.place.is_elsewhere || then.is_same_file(now);
        !matches!(now.kind, Kind::File { .. }) || self.place.open.contains_key(path) && !is_same
    }

    /// Returns true if the job has not run since, and the file is still the same one: on another machine, or in another
    /// container, a path can lead elsewhere. Not a file that the end of the job may have changed: the kernel marks robust
    /// mutexes in the mapped memory of a process that ends.
    pub fn is_by_others_alone(&self, then: &KeptFile, now: Option<&KeptFile>) -> bool {
        let until_ns = self.since.stopped_ns() + END_NS;
        let may_be_put_back = then.is_mapped && then.kept().is_some();
        let is_by_end = |now: &KeptFile| may_be_put_back && now.modified_ns <= until_ns;
        let may_be_others = |now: &KeptFile| then.is_same_file(now) && !is_by_end(now);
        self.since.is_stopped() && now.is_some_and(may_be_others)
    }

    /// Returns true if another program has changed the file since, also after the job's end.
    pub fn is_by_others(&self, path: &Path, then: &KeptFile, now: Option<&KeptFile>) -> bool {
        let end = self.place.ended_ns.filter(|_| !self.is_unwatched(path));
        // A program can set any time of modification. A rename of another file shows in its time of change.
        let is_after = |now: &KeptFile, end| {
            let is_moved = now.changed_ns > end && !then.is_same_file(now);
            now.modified_ns.min(now.changed_ns) > end || now.born_ns > end || is_moved
        };
        let is_after_end = || end.zip(now).is_some_and(|(end, now)| is_after(now, end));
        self.since.by_others(path) || !self.since.is_rolled_back(path) && is_after_end()
    }

    /// Returns true if another program has made a log longer.
    pub fn is_continued_by_others(&self, path: &Path, then: &KeptFile, now: &KeptFile) -> bool {
        !self.place.is_elsewhere
            && then.is_same_file(now)
            && now.size() > then.size()
            && (self.is_by_others(path, then, Some(now)) || self.since.is_stopped())
    }

    /// Returns true if the job may have written to a log since.
    pub fn is_continued_by_job(&self, path: &Path, now: &KeptFile) -> bool {
        !self.since.is_stopped()
            && (self.is_recorded(path, Some(now)) || self.may_miss(path, Some(now.changed_ns)))
    }

    /// Returns true if the record has a change by the job since, by this name or another one.
    fn is_recorded(&self, path: &Path, now: Option<&KeptFile>) -> bool {
        // A file that an earlier restore has created has another inode than in the set.
        let by_another_name = || now.is_some_and(|now| self.written_files.contains(&now.id()));
        self.since.by_job(path) || by_another_name()
    }

    pub fn is_unwatched(&self, path: &Path) -> bool {
        self.gap.is_some() || self.since.unwatched_mount(path).is_some()
    }

    /// Returns true if the job has changed a file of the set since, according to the record, or may have done so
    /// without a record.
    pub fn is_by_job(&self, path: &Path, then: &KeptFile, now: Option<&KeptFile>) -> bool {
        // The job's creation of another file here would be on record.
        let may_be_another = |now: &KeptFile| {
            then.is_same_file(now)
                || self.since.is_rolled_back(path)
                || !self.since.is_stopped() && self.may_miss(path, Some(now.changed_ns))
        };
        let by_unrecorded = || match then.writer {
            // The path in the record may differ if a folder is mounted twice.
            Writer::Open => !self.since.by_others(path) && now.is_none_or(may_be_another),
            Writer::Included => true,
            Writer::Job => {
                now.is_some_and(|now| self.is_of_last_seconds(path, now.changed_ns))
                    || self.place.included.matches(path)
            }
            Writer::Unknown => self.place.included.matches(path),
        };
        if self.since.is_stopped() && self.since.is_rolled_back(path) {
            return true;
        }
        let may_be_job = || then.is_mapped || self.is_recorded(path, now) || by_unrecorded();
        !self.is_by_others_alone(then, now) && may_be_job()
    }
}

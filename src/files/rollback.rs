//! Rollback of the job's files to the set of an image.
//!
//! The plan is a pure comparison: it checks everything and changes nothing. Before its execution, every path that it
//! changes is added to the record in the store. A rollback interrupted by a kill or a full disk is therefore planned
//! again from the intermediate state, and has the same result.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::fs::Metadata;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};

use super::describe::FileId;
use super::file_comparison::{Comparison, Place};
use super::file_set::{Content, KeptFile, KeptFiles, Kind, Writer};
use super::folder_scan::is_special;
use super::job_links::JobLinks;
use super::lost::{Lost, OnLost, RollbackError, Why};
use super::record::{Since, Touch};
use crate::safe_path::is_denied;

mod names;
mod unrecorded;

/// Steps that make the job's files equal to a set.
#[derive(Debug, Default)]
pub struct Rollback {
    /// Files and links created by the job since the snapshot. They are set aside.
    pub(super) aside: Vec<PathBuf>,
    /// New files and folders of the last seconds before a power failure or the job's end, which are not on record, in
    /// folders of the job. They count as the job's.
    pub presumed: Vec<PathBuf>,
    /// Folders created by the job since the snapshot, contents before their folder. They are removed.
    pub(super) folders: Vec<PathBuf>,
    /// Files renamed by the job whose content exists nowhere else: present name, earlier name.
    pub(super) moves: Vec<(PathBuf, PathBuf)>,
    /// Files to restore in the order of their paths: folders before their contents.
    pub(super) put_back: Vec<(PathBuf, KeptFile)>,
    /// Append-only files with changed attributes. Their content is rolled back by `job::rewind`.
    pub(super) appended: Vec<(PathBuf, KeptFile)>,
    /// Files with several names of which one stays as it is.
    pub(super) siblings: HashMap<FileId, PathBuf>,
    /// Files that stay different from the snapshot.
    pub lost: Vec<Lost>,
    /// Files that stay as they are although they have changed: those of `files.shared`, and those that only other programs
    /// have changed.
    pub shared: HashSet<PathBuf>,
    /// Files that only other programs have changed since, with true for new ones.
    pub by_others: Vec<(PathBuf, bool)>,
    /// Files of the set that the settings exclude now, so that they are neither compared nor put back.
    pub left_out: HashSet<PathBuf>,
}

impl Rollback {
    /// Compares the files with the set of an image and with the changes since.
    ///
    /// # Errors
    /// [`RollbackError::Lost`] with all files that would differ, unless the user accepts that; [`RollbackError::Scan`].
    pub fn plan(
        set: &KeptFiles,
        since: Since<'_>,
        place: Place<'_>,
    ) -> Result<Self, RollbackError> {
        let touched: Vec<(&Path, Touch)> = if place.is_elsewhere {
            since.ever_touched().collect()
        } else {
            since.touched().collect()
        };
        let changed = || touched.iter().map(|(path, _)| *path);
        let paths = set.files.keys().map(PathBuf::as_path).chain(changed());
        let links = JobLinks::find(changed(), paths);
        // A path that is in the set may be another file now, and a new path may be another name of a file of the set.
        let written = || {
            let touches = touched.iter();
            touches
                .filter(|(_, touch)| since.has_changed(touch))
                .map(|(path, _)| *path)
        };
        let then = written().filter_map(|path| Some(set.files.get(path)?.id()));
        let now = written().filter(|path| !links.lead(path));
        let now = now.filter_map(|path| path.symlink_metadata().ok());
        let now = now.map(|found| FileId::of(&found));
        // Writes by a descriptor are in no report.
        let open = set.files.values();
        let open = open.filter(|file| file.writer == Writer::Open);
        let open = open.map(KeptFile::id);
        let written_files = then
            .chain(now)
            .chain(since.changed_files())
            .chain(open)
            .collect();
        let gap = since.gap();
        let comparison = Comparison {
            set,
            since,
            place,
            links: &links,
            written_files: &written_files,
            gap: gap.as_deref(),
        };
        let mut plan = Self::default();
        let concerns = |path: &Path, file: &KeptFile| {
            file.writer == Writer::Open || !place.excluded.matches(path)
        };
        for (path, file) in &set.files {
            if concerns(path, file) {
                plan.compare(path, file, comparison);
            } else {
                plan.left_out.insert(path.clone());
            }
        }
        let new = touched
            .into_iter()
            .filter(|(path, _)| !set.files.contains_key(*path) && !place.leaves_out(path))
            .filter(|(path, _)| !links.lead(path));
        for (path, touch) in new {
            let found = path.symlink_metadata();
            let is_hidden = is_denied(&found);
            let found = found.ok();
            let is_folder = found.as_ref().is_some_and(Metadata::is_dir);
            match (since.was_not_jobs(&touch), found) {
                // The path did not exist at the snapshot.
                (true, _) if since.is_of_others(path) => {}
                // Files that the job creates in another program's folder do not make that folder lost. Devices, named
                // pipes and sockets have no content to lose.
                (true, Some(found)) if is_folder || is_special(&found) => {}
                (true, _) => plan.lose(path, Why::NotYetJobs),
                (false, Some(_)) if is_folder => plan.folders.push(path.to_owned()),
                // A set has no devices: this one may have existed. So may another program's pipe or socket.
                (false, Some(found)) if is_device(&found) && !since.is_first(&touch) => {}
                (false, Some(found)) if is_special(&found) && !touch.is_jobs_own => {}
                (false, None) if !is_hidden => {}
                (false, _) => plan.aside.push(path.to_owned()),
            }
        }
        if !place.is_elsewhere {
            plan.add_unrecorded(comparison)?;
        }
        plan.leave_other_names(set);
        plan.find_renamed(comparison);
        plan.find_siblings(comparison);
        plan.add_parents(set);
        plan.aside.sort();
        plan.aside.dedup();
        plan.folders.sort_by(|left, right| right.cmp(left));
        if plan.lost.is_empty() || place.on_lost == OnLost::Warn {
            return Ok(plan);
        }
        Err(RollbackError::Lost {
            lost: plan.lost,
            gap,
        })
    }

    /// Determines the steps for a file of the set.
    fn compare(&mut self, path: &Path, then: &KeptFile, comparison: Comparison<'_>) {
        let now = comparison.now(path);
        if now
            .as_ref()
            .is_some_and(|now| comparison.is_unchanged(path, then, now) || then.is_same_folder(now))
        {
            // The folder's time is that of the job's last change in it. An interrupted rollback may have set another
            // one.
            let is_late = now.is_some_and(|now| now.modified_ns != then.modified_ns);
            if then.kind == Kind::Folder && is_late && comparison.since.by_job(path) {
                self.put_back.push((path.to_owned(), then.clone()));
            }
            return;
        }
        if let Some(now) = &now
            && comparison.place.shared.matches(path)
        {
            if comparison.is_replaced(path, then, now) {
                return self.lose(path, Why::Replaced);
            }
            // Under a lock, a program trusts what it has read before.
            if comparison.was_locked(path) && !comparison.has_no_change(path, then, now) {
                return self.lose(path, Why::Locked);
            }
            self.shared.insert(path.to_owned());
            return;
        }
        if then.is_appended() {
            if let Some(content) = comparison.place.spare.get(path)
                && comparison.is_by_job(path, then, now.as_ref())
                && !comparison.is_by_others(path, then, now.as_ref())
            {
                return self.compare(path, &then.with_content(content.clone()), comparison);
            }
            match now
                .as_ref()
                .filter(|now| comparison.is_continued_by_others(path, then, now))
            {
                // Nothing to cut.
                None if now.as_ref().is_some_and(|now| then.looks_unchanged(now)) => {}
                None => self.appended.push((path.to_owned(), then.clone())),
                Some(now) if comparison.is_continued_by_job(path, now) => {
                    self.lose(path, Why::OthersToo);
                }
                // An uninterrupted job would find what the other program has written.
                Some(_) => self.leave_to_others(path, true),
            }
            return;
        }
        if comparison.place.is_elsewhere {
            if now.is_some_and(|now| now.owner.0 != then.owner.0) {
                return self.lose(path, Why::Owner);
            }
            return self.decide_content(path, then, false, comparison);
        }
        let is_there = Comparison::shows_changes(path, then)
            && now.as_ref().is_some_and(|it| then.has_same_content(it));
        if !comparison.is_by_job(path, then, now.as_ref()) {
            let changed_ns = now.as_ref().map(|now| now.changed_ns);
            let may_be_job = !comparison.is_by_others_alone(then, now.as_ref())
                && (comparison.may_miss(path, changed_ns) || then.writer == Writer::Unknown);
            match &now {
                None if comparison.is_lost_with_its_folder(path, then) => {
                    self.decide_content(path, then, false, comparison);
                }
                // Another program has changed the file. An uninterrupted job would see that change, too, unless it has
                // the former file of this name open.
                _ if !may_be_job => {
                    // CRIU opens named pipes and binds sockets by their names.
                    let is_same = now.as_ref().is_some_and(|now| then.is_same_file(now));
                    let is_changed = !now.as_ref().is_some_and(|now| then.looks_unchanged(now));
                    // Lock files are empty, and programs that wait for the lock truncate them.
                    let is_empty = now
                        .as_ref()
                        .is_some_and(|now| then.size() + now.size() == 0);
                    if is_changed && !is_empty && comparison.was_locked(path) {
                        return self.lose(path, Why::Locked);
                    }
                    if !is_same && !then.is_special() && comparison.place.open.contains_key(path) {
                        return self.lose(path, Why::Replaced);
                    }
                    // Not if only its times, links or attributes have changed: ckpt-run and CRIU link files.
                    if is_changed && !is_there {
                        self.leave_to_others(path, is_same);
                    }
                }
                Some(_) if is_there => {}
                Some(_) => self.lose(path, Why::Unknown),
                // The creation overwrites nothing.
                None => self.decide_content(path, then, false, comparison),
            }
            return;
        }
        let has_content = then.kind != Kind::Folder && !then.is_special();
        if has_content && !is_there && comparison.is_by_others(path, then, now.as_ref()) {
            self.lose(path, Why::OthersToo);
        } else if now.is_some_and(|now| now.owner.0 != then.owner.0) {
            self.lose(path, Why::Owner);
        } else {
            self.decide_content(path, then, is_there, comparison);
        }
    }

    /// Leaves a path as other programs have changed it. `is_same`: it still leads to the same file.
    fn leave_to_others(&mut self, path: &Path, is_same: bool) {
        if is_same {
            self.shared.insert(path.to_owned());
        }
        self.by_others.push((path.to_owned(), false));
    }

    fn decide_content(
        &mut self,
        path: &Path,
        then: &KeptFile,
        is_there: bool,
        comparison: Comparison<'_>,
    ) {
        if let Kind::File { size, content } = &then.kind {
            match content {
                Content::Unkept(reason) if !is_there => {
                    return self.lose(path, Why::Unkept(*reason));
                }
                Content::Held { name, .. } if !is_there => {
                    if !comparison.place.held.has(name, *size, then.modified_ns) {
                        return self.lose(path, Why::HeldChanged);
                    }
                }
                Content::Appended
                | Content::Kept { .. }
                | Content::Held { .. }
                | Content::Unkept(_) => {}
            }
        }
        self.put_back.push((path.to_owned(), then.clone()));
    }

    /// Adds folders whose times change because the rollback changes files in them.
    fn add_parents(&mut self, set: &KeptFiles) {
        let parents: BTreeSet<PathBuf> = self
            .paths()
            .filter_map(Path::parent)
            .map(Path::to_owned)
            .collect();
        let planned: BTreeSet<PathBuf> =
            self.put_back.iter().map(|(path, _)| path.clone()).collect();
        for path in parents.difference(&planned) {
            let folder = set.files.get(path).filter(|file| file.kind == Kind::Folder);
            let is_of_others =
                |then: &KeptFile| KeptFile::of(path).is_some_and(|now| now.owner.0 != then.owner.0);
            match folder {
                Some(folder) if is_of_others(folder) => self.lose(path, Why::Owner),
                Some(folder) => self.put_back.push((path.clone(), folder.clone())),
                None => {}
            }
        }
        self.put_back.sort_by(|left, right| left.0.cmp(&right.0));
    }

    /// Returns true if the file at a path is put back from the image or the store.
    #[must_use]
    pub fn puts_back(&self, path: &Path) -> bool {
        self.put_back.iter().any(|(known, _)| known == path)
    }

    /// Returns the path of a file before the rollback.
    #[must_use]
    pub fn present_path<'a>(&'a self, path: &'a Path) -> &'a Path {
        let mut moves = self.moves.iter();
        let found = moves.find(|(_, to)| to == path);
        found.map_or(path, |(from, _)| from)
    }

    /// Returns the paths of files in whose place is nothing afterwards, or a folder or named pipe.
    #[must_use]
    pub fn moved_away(&self) -> HashSet<&Path> {
        let is_kind = |path: &Path, kind: &Kind| {
            let found = path.symlink_metadata();
            found.is_ok_and(|found| match kind {
                Kind::Folder => found.is_dir(),
                Kind::Pipe => found.file_type().is_fifo(),
                Kind::File { .. } | Kind::Link { .. } | Kind::Socket => true,
            })
        };
        let replaced = self.put_back.iter();
        let replaced = replaced.filter(|(path, file)| !is_kind(path, &file.kind));
        let replaced = replaced.map(|(path, _)| path);
        let moved = self.moves.iter().map(|(from, _)| from);
        let aside = self.aside.iter().chain(moved).chain(replaced);
        aside.map(PathBuf::as_path).collect()
    }

    /// Returns the paths that the rollback changes.
    pub fn paths(&self) -> impl Iterator<Item = &Path> {
        let put_back = self.put_back.iter().map(|(path, _)| path.as_path());
        let moved = self.moves.iter().flat_map(|(from, to)| [from, to]);
        let created = self.aside.iter().chain(&self.folders);
        let appended = self.appended.iter().map(|(path, _)| path);
        let aside = created.chain(moved).chain(appended).map(PathBuf::as_path);
        aside.chain(put_back)
    }

    /// Returns the contents that the rollback needs: stream, offset, bytes.
    pub fn contents(&self) -> impl Iterator<Item = (&str, u64, u64)> {
        let files = self.put_back.iter().filter_map(|(_, file)| file.kept());
        files.map(|(stream, place, bytes)| (stream, place.offset(), bytes))
    }
}

fn is_device(found: &Metadata) -> bool {
    found.file_type().is_char_device() || found.file_type().is_block_device()
}

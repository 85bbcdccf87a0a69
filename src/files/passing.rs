//! Files that the job creates and removes again at once, such as those through which processes hand over memory: a
//! hundred a second, of which the record would grow without an end. No image has them, so no line is written.

use std::collections::{HashMap, HashSet};
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use super::record_line::JobChange;

/// Time that a file has to exist for to be written down.
const HOLD: Duration = Duration::from_secs(1);
/// Limit on the names that are remembered of a folder. Every file in a larger folder is written down.
const NAMES_MAX: usize = 10_000;
/// Limit on the files that are held back.
const HELD_BACK_MAX: usize = 10_000;

/// The changes of new files that are not written down yet.
#[derive(Debug, Default)]
pub(super) struct Passing {
    folders: HashMap<PathBuf, Names>,
    new: HashMap<PathBuf, New>,
}

/// The names in a folder that exist or existed.
#[derive(Debug)]
struct Names {
    names: HashSet<OsString>,
    /// True if all earlier events of the folder were read after it was listed. Before that, a name may have existed that
    /// the list does not have.
    is_complete: bool,
}

#[derive(Debug)]
struct New {
    since: Instant,
    changes: Vec<JobChange>,
}

impl Passing {
    /// Remembers the names that a folder had when it was listed.
    pub fn list(&mut self, folder: &Path, names: impl Iterator<Item = OsString>) {
        let names: HashSet<OsString> = names.take(NAMES_MAX).collect();
        if names.len() < NAMES_MAX {
            let names = Names {
                names,
                is_complete: false,
            };
            self.folders.insert(folder.to_owned(), names);
        }
    }

    /// Notes that every event up to now has been read.
    pub fn caught_up(&mut self) {
        for folder in self.folders.values_mut() {
            folder.is_complete = true;
        }
    }

    /// Notes that a name exists or existed.
    pub fn know(&mut self, path: &Path) {
        let folder = path.parent().unwrap_or(path);
        let (Some(names), Some(name)) = (self.folders.get_mut(folder), path.file_name()) else {
            return;
        };
        names.names.insert(name.to_owned());
        if names.names.len() >= NAMES_MAX {
            self.folders.remove(folder);
        }
    }

    /// Forgets a folder that has another name now, or none, with everything in it.
    pub fn forget(&mut self, folder: &Path) {
        self.folders.retain(|path, _| !path.starts_with(folder));
    }

    /// Takes a change of a file by the job. Returns false if it is to be written down at once.
    pub fn take(&mut self, path: &Path, change: JobChange, now: Instant) -> bool {
        if let Some(new) = self.new.get_mut(path) {
            if change == JobChange::Gone && path.symlink_metadata().is_err() {
                self.new.remove(path);
            } else if !new.changes.contains(&change) {
                // The kernel merges a removal and a creation into one event, in either order.
                new.changes.push(change);
            }
            return true;
        }
        if change != JobChange::Created || self.existed(path) || self.new.len() >= HELD_BACK_MAX {
            return false;
        }
        let new = New {
            since: now,
            changes: vec![change],
        };
        self.new.insert(path.to_owned(), new);
        true
    }

    fn existed(&self, path: &Path) -> bool {
        let folder = path.parent().and_then(|folder| self.folders.get(folder));
        let name = path.file_name();
        folder
            .zip(name)
            .is_none_or(|(folder, name)| !folder.is_complete || folder.names.contains(name))
    }

    /// Returns what is to be written down of the files that have existed for a while.
    pub fn settled(&mut self, now: Instant) -> Vec<(PathBuf, Vec<JobChange>)> {
        self.release(|new| now.saturating_duration_since(new.since) >= HOLD)
    }

    /// Returns what is to be written down of all files that exist.
    pub fn all(&mut self) -> Vec<(PathBuf, Vec<JobChange>)> {
        self.release(|_| true)
    }

    fn release(&mut self, is_due: impl Fn(&New) -> bool) -> Vec<(PathBuf, Vec<JobChange>)> {
        let due: Vec<_> = self.new.extract_if(|_, new| is_due(new)).collect();
        for (path, _) in &due {
            self.know(path);
        }
        due.into_iter()
            .map(|(path, new)| (path, new.changes))
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    fn scene() -> (tempfile::TempDir, Passing, Instant) {
        let folder = tempfile::tempdir().unwrap();
        let mut passing = Passing::default();
        passing.list(folder.path(), ["old".into()].into_iter());
        (folder, passing, Instant::now())
    }

    #[test]
    fn a_file_that_came_and_went_is_not_written_down() {
        let (folder, mut passing, now) = scene();
        passing.caught_up();
        let [new, stays] = ["new", "stays"].map(|name| folder.path().join(name));
        fs::write(&stays, "x").unwrap();
        for path in [&new, &stays] {
            assert!(passing.take(path, JobChange::Created, now));
            assert!(passing.take(path, JobChange::Changed, now));
        }
        assert!(passing.take(&new, JobChange::Gone, now));
        assert!(passing.settled(now).is_empty());
        let lines = vec![JobChange::Created, JobChange::Changed];
        assert_eq!(passing.settled(now + HOLD), [(stays.clone(), lines)]);
        // It is known from here on, so its removal is written down.
        assert!(!passing.take(&stays, JobChange::Created, now));
        assert!(!passing.take(&stays, JobChange::Gone, now));
    }

    #[test]
    fn a_name_that_may_have_existed_is_written_down_at_once() {
        let (folder, mut passing, now) = scene();
        let take = |passing: &mut Passing, name: &str| {
            passing.take(&folder.path().join(name), JobChange::Created, now)
        };
        assert!(
            !take(&mut passing, "new"),
            "events before the list are not all read"
        );
        passing.caught_up();
        assert!(!take(&mut passing, "old"));
        assert!(take(&mut passing, "new"));
        passing.forget(folder.path());
        assert!(!take(&mut passing, "newer"));
        assert!(!passing.take(Path::new("/elsewhere/x"), JobChange::Created, now));
    }

    #[test]
    fn a_removal_merged_with_a_later_creation_is_kept() {
        let (folder, mut passing, now) = scene();
        passing.caught_up();
        let path = folder.path().join("new");
        fs::write(&path, "x").unwrap();
        for change in [JobChange::Created, JobChange::Gone] {
            assert!(passing.take(&path, change, now));
        }
        let changes = vec![JobChange::Created, JobChange::Gone];
        assert_eq!(passing.all(), [(path, changes)]);
    }
}

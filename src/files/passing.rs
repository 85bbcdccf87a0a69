//! Short-lived files that the job creates and removes again, such as those by which processes hand over memory. With a
//! hundred of them per second, the record would grow without limit. No image contains them, so they are not recorded.

use std::collections::{HashMap, HashSet};
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use super::record_line::JobChange;

/// Minimum age of a file for its changes to be recorded.
const HOLD: Duration = Duration::from_secs(1);
/// Limit on the names stored for a folder. Every file in a larger folder is recorded.
const NAMES_MAX: usize = 10_000;
/// Limit on the files whose changes are held back.
const HELD_BACK_MAX: usize = 10_000;

/// Changes of new files that are not recorded yet.
#[derive(Debug, Default)]
pub(super) struct Passing {
    folders: HashMap<PathBuf, Names>,
    new: HashMap<PathBuf, New>,
}

/// Names in a folder that exist or have existed.
#[derive(Debug)]
struct Names {
    names: HashSet<OsString>,
    /// True if all events from before the listing were read. Until then, a name missing in the list may have existed.
    is_complete: bool,
}

#[derive(Debug)]
struct New {
    since: Instant,
    changes: Vec<JobChange>,
}

impl Passing {
    /// Stores the names in a folder at its listing.
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

    /// Records that every event up to now has been read.
    pub fn caught_up(&mut self) {
        for folder in self.folders.values_mut() {
            folder.is_complete = true;
        }
    }

    /// Adds a name that exists or has existed.
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

    /// Removes a folder that was renamed or removed, with its contents.
    pub fn forget(&mut self, folder: &Path) {
        self.folders.retain(|path, _| !path.starts_with(folder));
    }

    /// Accepts a change of a file by the job. Returns false if it must be recorded immediately.
    pub fn take(&mut self, path: &Path, change: JobChange, now: Instant) -> bool {
        if let Some(new) = self.new.get_mut(path) {
            if change == JobChange::Gone && path.symlink_metadata().is_err() {
                self.new.remove(path);
            } else if !new.changes.contains(&change) {
                // The kernel may merge a removal and a creation into one event, in either order.
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

    /// Returns the changes to be recorded of files above the minimum age.
    pub fn settled(&mut self, now: Instant) -> Vec<(PathBuf, Vec<JobChange>)> {
        self.release(|new| now.saturating_duration_since(new.since) >= HOLD)
    }

    /// Returns the changes to be recorded of all files that exist.
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
    fn a_short_lived_file_is_not_recorded() {
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
        // The file is known from here on, so its removal is recorded.
        assert!(!passing.take(&stays, JobChange::Created, now));
        assert!(!passing.take(&stays, JobChange::Gone, now));
    }

    #[test]
    fn a_name_that_may_have_existed_is_recorded_immediately() {
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

//! The job's output and open files before the kill and after the restore of one trial: pure functions of the data read.

use std::collections::BTreeMap;
use std::path::PathBuf;

use crate::job::OpenFile;

/// A part of the job's output.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Part {
    /// Output from before the request for the snapshot, or the end of it.
    pub old: Vec<u8>,
    /// Later output, or the beginning of it.
    pub new: Vec<u8>,
}

/// Files that the job writes, each with its inode and its minimum size.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Files(BTreeMap<PathBuf, (u64, u64)>);

impl Files {
    /// Selects the open files that the job writes, with inode and size.
    pub(super) fn of(open: &[OpenFile]) -> Self {
        let written = open.iter().filter(|file| file.written());
        Self(
            written
                .map(|file| (file.path.clone(), (file.inode, file.size)))
                .collect(),
        )
    }

    /// Keeps the files that are still open in `later` and have not shrunk: a file that the job truncates itself proves
    /// nothing.
    pub(super) fn that_grow(&self, later: &Self) -> Self {
        let grows = |path: &PathBuf, (inode, size): &(u64, u64)| {
            later
                .0
                .get(path)
                .is_some_and(|(same, then)| same == inode && then >= size)
        };
        let kept = self.0.iter().filter(|(path, file)| grows(path, file));
        Self(kept.map(|(path, file)| (path.clone(), *file)).collect())
    }

    /// Returns the first file that is still open and shorter than before, with both sizes.
    pub(super) fn first_shorter(&self, now: &Self) -> Option<(&PathBuf, u64, u64)> {
        self.0.iter().find_map(|(path, (inode, size))| {
            let (same, present) = now.0.get(path)?;
            (same == inode && present < size).then_some((path, *size, *present))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn files(list: &[(&str, u64, u64)]) -> Files {
        let list = list.iter().copied();
        Files(
            list.map(|(path, inode, size)| (PathBuf::from(path), (inode, size)))
                .collect(),
        )
    }

    #[test]
    fn a_file_that_lost_bytes_is_found_and_others_are_not() {
        let before = files(&[("a", 1, 10), ("b", 2, 10), ("c", 3, 10), ("d", 4, 10)]);
        let now = files(&[("a", 1, 10), ("b", 2, 11), ("c", 9, 1)]);
        assert_eq!(before.first_shorter(&now), None, "d is closed, c another");
        let now = files(&[("a", 1, 12), ("b", 2, 9)]);
        assert_eq!(
            before.first_shorter(&now),
            Some((&PathBuf::from("b"), 10, 9))
        );
    }

    #[test]
    fn file_truncated_by_the_job_proves_nothing() {
        let first = files(&[("a", 1, 10), ("b", 2, 10), ("c", 3, 10)]);
        let later = files(&[("a", 1, 10), ("b", 2, 3), ("c", 4, 20)]);
        assert_eq!(first.that_grow(&later), files(&[("a", 1, 10)]));
    }
}

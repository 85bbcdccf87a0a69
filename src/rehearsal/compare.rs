//! Compares what the job has written, before it was killed and after it was restored: pure functions of what was read.

use std::collections::BTreeMap;
use std::path::PathBuf;

use crate::job::OpenFile;

/// A part of the job's output.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Part {
    /// What was there before the snapshot was asked for, or the end of it.
    pub old: Vec<u8>,
    /// What came later, or the beginning of it.
    pub new: Vec<u8>,
}

/// What became of the output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Outputs {
    /// What the job had written before the snapshot is not there any more as it was.
    Damaged,
    /// Nothing was written after the snapshot, before the kill or after the restore.
    Nothing,
    /// The job wrote the same bytes again, so many, and went on from there.
    Same(usize),
    /// It wrote something else the second time, after so many bytes.
    Differs(usize),
}

/// Compares the output before the kill with that after the restore.
pub(super) fn outputs(before: &Part, after: &Part) -> Outputs {
    if before.old != after.old {
        return Outputs::Damaged;
    }
    let pairs = before.new.iter().zip(&after.new);
    let same = pairs.take_while(|(one, other)| one == other).count();
    match before.new.len().min(after.new.len()) {
        0 => Outputs::Nothing,
        shorter if shorter == same => Outputs::Same(same),
        _ => Outputs::Differs(same),
    }
}

/// Files that the job writes, with the size that each has at least.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Files(BTreeMap<PathBuf, (u64, u64)>);

impl Files {
    /// Those among the open ones that the job writes; the inode and the size.
    pub(super) fn of(open: &[OpenFile]) -> Self {
        let written = open.iter().filter(|file| file.written());
        Self(
            written
                .map(|file| (file.path.clone(), (file.inode, file.size)))
                .collect(),
        )
    }

    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    /// Those that were open before, too, and have not shrunk since: a file that the job cuts by itself tells nothing.
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

    /// The first file that is still open and shorter than it was.
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

    fn part(old: &str, new: &str) -> Part {
        Part {
            old: old.into(),
            new: new.into(),
        }
    }

    #[test]
    fn output_that_is_repeated_goes_on_without_a_gap() {
        let before = part("1\n2\n", "3\n4\n");
        assert_eq!(
            outputs(&before, &part("1\n2\n", "3\n4\n5\n")),
            Outputs::Same(4)
        );
        assert_eq!(outputs(&before, &part("1\n2\n", "3\n")), Outputs::Same(2));
        assert_eq!(outputs(&before, &part("1\n2\n", "")), Outputs::Nothing);
        assert_eq!(
            outputs(&before, &part("1\n2\n", "3\n5\n")),
            Outputs::Differs(2)
        );
        assert_eq!(outputs(&before, &part("1\n", "2\n3\n")), Outputs::Damaged);
        assert_eq!(
            outputs(&before, &part("1\nX\n", "3\n4\n")),
            Outputs::Damaged
        );
    }

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
    fn a_file_that_the_job_cuts_by_itself_tells_nothing() {
        let first = files(&[("a", 1, 10), ("b", 2, 10), ("c", 3, 10)]);
        let later = files(&[("a", 1, 10), ("b", 2, 3), ("c", 4, 20)]);
        assert_eq!(first.that_grow(&later), files(&[("a", 1, 10)]));
    }
}

//! Files that a rollback cannot make equal to the snapshot, and the errors of a rollback.

use std::collections::HashSet;
use std::fmt::{self, Write as _};
use std::path::{Path, PathBuf};

use super::describe::FileId;
use super::file_set::{KeptFile, KeptFiles, Unkept};
use super::folder_scan::TooMany;
use super::rollback::Rollback;

/// Treatment of a file that cannot be restored (`files.on_lost`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnLost {
    /// The image is refused.
    Refuse,
    /// The job is restored with the file as it is, and a warning names it.
    Warn,
}

/// A file that cannot be made equal to the snapshot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Lost {
    /// Path of the file.
    pub path: PathBuf,
    /// The reason.
    pub why: Why,
}

/// Reasons why a file cannot be made equal to the snapshot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Why {
    /// The file's content at the snapshot is not in the image.
    Unkept(Unkept),
    /// The store held the file by a hard link, and the job has changed it in place.
    HeldChanged,
    /// The file existed before the job first changed it, which was after the snapshot.
    NotYetJobs,
    /// The job and another program have both changed the file.
    OthersToo,
    /// Another program has replaced or removed the file, and the job has it open or mapped.
    Replaced,
    /// The file was changed by an unknown program.
    Unknown,
    /// The file belonged to another user at the snapshot.
    Owner,
    /// Another program has changed the file, and the job had locked it.
    Locked,
}

impl fmt::Display for Why {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unkept(reason) => {
                write!(f, "changed since, and its content was not kept: {reason}")
            }
            Self::HeldChanged => {
                f.write_str("changed in place since, and it is larger than files.keep_content")
            }
            Self::NotYetJobs => f.write_str(
                "the job first changed it after the snapshot; files.include keeps such files from the start",
            ),
            Self::OthersToo => f.write_str(
                "changed since by the job and by another program; files.shared leaves such files as they are",
            ),
            Self::Replaced => {
                f.write_str("replaced or removed by another program, and the job has it open")
            }
            Self::Unknown => f.write_str(
                "changed or created since by an unknown program; if the job writes it, list it in files.include, so that it is rolled back, otherwise in files.exclude, so that it stays",
            ),
            Self::Owner => f.write_str("belongs to another user now"),
            Self::Locked => {
                f.write_str("changed since, and the job had it locked at the snapshot")
            }
        }
    }
}

impl Rollback {
    pub(super) fn lose(&mut self, path: &Path, why: Why) {
        let path = path.to_owned();
        self.lost.push(Lost { path, why });
    }

    /// Leaves the other names of files that stay as they are.
    pub(super) fn leave_other_names(&mut self, set: &KeptFiles) {
        let left = self.shared.iter().filter_map(|path| set.files.get(path));
        let left: HashSet<FileId> = left.map(KeptFile::id).collect();
        let is_left = |(path, file): &(PathBuf, KeptFile)| {
            left.contains(&file.id())
                && KeptFile::of(path).is_some_and(|now| file.is_same_file(&now))
        };
        let put_back = std::mem::take(&mut self.put_back).into_iter();
        let (stay, put_back): (Vec<_>, Vec<_>) = put_back.partition(is_left);
        self.put_back = put_back;
        self.shared.extend(stay.into_iter().map(|(path, _)| path));
    }

    /// Returns true if the file stays as it is.
    #[must_use]
    pub fn leaves(&self, path: &Path) -> bool {
        self.shared.contains(path) || self.lost.iter().any(|lost| lost.path == path)
    }

    /// Returns the files that stay as they are, although the image has others.
    pub fn left(&self) -> impl Iterator<Item = &Path> {
        let lost = self.lost.iter().map(|lost| &*lost.path);
        lost.chain(self.shared.iter().map(PathBuf::as_path))
    }
}

/// Limit on the files that a message names.
const NAMED_MAX: usize = 5;

/// Reasons why files cannot be rolled back.
#[derive(Debug, thiserror::Error)]
pub enum RollbackError {
    /// Some files would differ from the snapshot.
    #[error("cannot put back {}; put them back yourself, restore an older image, or accept them as they are with files.on_lost = \"warn\"{}", named(lost), gap.as_ref().map_or(String::new(), |gap| format!(" (not all changes are known: {gap})")))]
    Lost {
        /// The files.
        lost: Vec<Lost>,
        /// Reason why not all changes are known, if there is one.
        gap: Option<String>,
    },
    /// The folders cannot be searched for changes.
    #[error("cannot determine the changes since the snapshot ({gap})")]
    Scan {
        /// Reason why the record is incomplete.
        gap: String,
        /// The reason.
        #[source]
        source: TooMany,
    },
    /// A system call failed.
    #[error("cannot {operation} {}", path.display())]
    System {
        /// The operation.
        operation: &'static str,
        /// The file.
        path: PathBuf,
        /// The system's error.
        #[source]
        source: std::io::Error,
    },
}

fn named(lost: &[Lost]) -> String {
    let mut text = String::new();
    for (number, one) in lost.iter().take(NAMED_MAX).enumerate() {
        let between = if number == 0 { "" } else { "; " };
        let _ = write!(text, "{between}{} ({})", one.path.display(), one.why);
    }
    if lost.len() > NAMED_MAX {
        let _ = write!(text, "; and {} more", lost.len() - NAMED_MAX);
    }
    text
}

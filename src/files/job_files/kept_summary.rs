//! Summary of the job's files in an image, for the user.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::super::file_set::{Content, KeptFiles, Kind, Unkept};

impl KeptFiles {
    /// Returns a summary of the set.
    #[must_use]
    pub fn summary(&self) -> Kept {
        let mut kept = Kept::default();
        for (path, file) in &self.files {
            let Kind::File { size, content } = &file.kind else {
                continue;
            };
            let shown = PathBuf::from(path.to_string_lossy().into_owned());
            match content {
                Content::Kept { place, .. } => {
                    kept.files += 1;
                    kept.bytes = kept.bytes.saturating_add(place.bytes(*size));
                }
                Content::Appended => {}
                Content::Held { is_clone, .. } => {
                    kept.held += 1;
                    kept.held_bytes = kept.held_bytes.saturating_add(*size);
                    if !is_clone && kept.named.len() < NAMED_MAX {
                        kept.named.push((shown, *size, Unkept::Linked));
                    }
                }
                Content::Unkept(reason) => {
                    kept.unkept += 1;
                    if kept.named.len() < NAMED_MAX {
                        kept.named.push((shown, *size, *reason));
                    }
                }
            }
        }
        kept
    }
}

/// Limit on the files without content that a summary names.
const NAMED_MAX: usize = 10;

/// Summary of a set, for the user.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Kept {
    /// Files whose content is in the image.
    pub files: usize,
    /// Their bytes in the image.
    pub bytes: u64,
    /// Files whose content is not in the image.
    pub unkept: usize,
    /// The first of these and of those held by a link: path (as text, for the user), bytes, reason.
    pub named: Vec<(PathBuf, u64, Unkept)>,
    /// Large files that the store holds by a clone or a link.
    #[serde(default)]
    pub held: usize,
    /// Their bytes.
    #[serde(default)]
    pub held_bytes: u64,
    /// Files whose content was taken over from the image before, without being read.
    #[serde(default)]
    pub unread: usize,
    /// Time for which the job was frozen for them, in seconds.
    pub freeze_seconds: f64,
    /// The reason why not everything that the job writes is known, if there is one.
    pub gap: Option<String>,
}

impl Kept {
    /// Returns a warning that names the files whose content is not in the image.
    #[must_use]
    pub fn warning(&self) -> String {
        let mut parts = Vec::new();
        if !self.named.is_empty() {
            let name = |(path, _, reason): &(PathBuf, u64, Unkept)| {
                format!("{} ({reason})", path.display())
            };
            let named: Vec<String> = self.named.iter().map(name).collect();
            parts.push(format!(
                "the image does not have the content of these files of the job, and is refused once they change: {}",
                named.join("; ")
            ));
        }
        if let Some(gap) = &self.gap {
            parts.push(format!(
                "not all changes of files are known ({gap}): an image is refused if a file that is not open changes \
                 after it and no program of the job has reported that; list such files in files.include"
            ));
        }
        parts.join("; ")
    }
}

//! The set of files that an image keeps: what each was at the snapshot, and where its content is.

use std::collections::BTreeMap;
use std::fmt;
use std::fs::{self, Metadata};
use std::io::{self, BufRead, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

/// A file, folder or link that the job has written.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct KeptFile {
    /// Its kind, with what makes it up.
    #[serde(flatten)]
    pub kind: Kind,
    /// Device and inode.
    pub identity: (u64, u64),
    /// Time of the last change of content, in nanoseconds since 1970.
    pub modified_ns: i64,
    /// Time of the last change of content, mode, owner or links, in nanoseconds since 1970.
    pub changed_ns: i64,
    /// Permission bits.
    pub mode: u32,
    /// Owner and group.
    pub owner: (u32, u32),
    /// Extended attributes.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub attributes: Vec<(String, Vec<u8>)>,
}

/// The kind of a kept file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "kind")]
pub enum Kind {
    /// A regular file.
    File {
        /// Bytes.
        size: u64,
        /// The place of its content.
        content: Content,
    },
    /// A folder; what is in it is kept by itself.
    Folder,
    /// A symbolic link.
    Link {
        /// The link's text.
        target: PathBuf,
    },
}

/// The place of a file's content.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Content {
    /// In a stream of the image, from this offset on.
    Kept {
        /// Name of the stream.
        stream: String,
        /// Bytes before it.
        offset: u64,
    },
    /// The job has the file open for writing, so that the list of open files has it.
    Open,
    /// Nowhere.
    Unkept(Unkept),
}

/// The reason why a content was not kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Unkept {
    /// The file is larger than `files.keep_content`.
    TooLarge,
    /// The files together are larger than `files.keep_total`.
    TooMuch,
    /// It could not be read.
    Unreadable,
    /// It changed while it was copied, after the time in which the job may be frozen for it.
    ChangedMeanwhile,
}

impl fmt::Display for Unkept {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::TooLarge => "larger than files.keep_content",
            Self::TooMuch => "beyond files.keep_total",
            Self::Unreadable => "ckpt-run may not read it",
            Self::ChangedMeanwhile => "changed while it was copied; files.freeze was too short",
        })
    }
}

impl KeptFile {
    /// Describes what is at a path; the content is still to be kept. `None` for sockets, named pipes and devices, and
    /// where nothing is.
    #[must_use]
    pub fn of(path: &Path) -> Option<Self> {
        let found = fs::symlink_metadata(path).ok()?;
        let kind = found.file_type();
        let kind = if kind.is_file() {
            Kind::File {
                size: found.size(),
                content: Content::Unkept(Unkept::ChangedMeanwhile),
            }
        } else if kind.is_dir() {
            Kind::Folder
        } else if kind.is_symlink() {
            let target = fs::read_link(path).ok()?;
            Kind::Link { target }
        } else {
            return None;
        };
        Some(Self {
            kind,
            identity: (found.dev(), found.ino()),
            modified_ns: modified_ns(&found),
            changed_ns: changed_ns(&found),
            mode: found.mode() & 0o7777,
            owner: (found.uid(), found.gid()),
            attributes: super::attributes::of(path),
        })
    }

    /// Returns true if nothing can have changed between two descriptions.
    #[must_use]
    pub fn is_unchanged(&self, now: &Self) -> bool {
        let size = |file: &Self| match file.kind {
            Kind::File { size, .. } => Some(size),
            Kind::Folder | Kind::Link { .. } => None,
        };
        let times = |file: &Self| (file.identity, file.modified_ns, file.changed_ns);
        times(self) == times(now) && size(self) == size(now)
    }

    /// Returns true if the content is the same for all that its size and its times say: only mode, owner or links
    /// changed.
    #[must_use]
    pub fn has_same_content(&self, now: &Self) -> bool {
        match (&self.kind, &now.kind) {
            (Kind::File { size, .. }, Kind::File { size: other, .. }) => {
                let about = |file: &Self| (file.identity.1, file.modified_ns);
                size == other && about(self) == about(now)
            }
            (Kind::Folder, Kind::Folder) => true,
            (Kind::Link { target }, Kind::Link { target: other }) => target == other,
            _ => false,
        }
    }
}

pub(super) fn modified_ns(found: &Metadata) -> i64 {
    found.mtime() * 1_000_000_000 + found.mtime_nsec()
}

pub(super) fn changed_ns(found: &Metadata) -> i64 {
    found.ctime() * 1_000_000_000 + found.ctime_nsec()
}

/// The files of an image.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct KeptFiles {
    /// Time of the freeze, in nanoseconds since 1970.
    pub frozen_ns: i64,
    /// The files, by path.
    pub files: BTreeMap<PathBuf, KeptFile>,
}

#[derive(Serialize, Deserialize)]
struct Head {
    frozen_ns: i64,
}

impl KeptFiles {
    /// Writes the set, a line of JSON for each file.
    ///
    /// # Errors
    /// The sink's, or a path is not UTF-8.
    pub fn write(&self, sink: &mut impl Write) -> io::Result<()> {
        let head = Head {
            frozen_ns: self.frozen_ns,
        };
        serde_json::to_writer(&mut *sink, &head)?;
        for one in &self.files {
            sink.write_all(b"\n")?;
            serde_json::to_writer(&mut *sink, &one)?;
        }
        sink.write_all(b"\n")
    }

    /// Reads a set that [`KeptFiles::write`] wrote. Paths that no snapshot records are refused.
    ///
    /// # Errors
    /// A line is none of its.
    pub fn read(source: impl BufRead) -> io::Result<Self> {
        let mut lines = source.lines();
        let first = lines
            .next()
            .unwrap_or(Err(io::ErrorKind::UnexpectedEof.into()))?;
        let head: Head = serde_json::from_str(&first)?;
        let mut files = BTreeMap::new();
        for line in lines {
            let (path, file): (PathBuf, KeptFile) = serde_json::from_str(&line?)?;
            let is_plain = |path: &Path| {
                let mut parts = path.components();
                path.is_absolute()
                    && parts.all(|part| !matches!(part, std::path::Component::ParentDir))
            };
            if !is_plain(&path) {
                return Err(io::ErrorKind::InvalidData.into());
            }
            files.insert(path, file);
        }
        Ok(Self {
            frozen_ns: head.frozen_ns,
            files,
        })
    }

    /// Returns what the set has, in numbers.
    #[must_use]
    pub fn summary(&self) -> Kept {
        let mut kept = Kept::default();
        for (path, file) in &self.files {
            let Kind::File { size, content } = &file.kind else {
                continue;
            };
            match content {
                Content::Kept { .. } => {
                    kept.files += 1;
                    kept.bytes += size;
                }
                Content::Open => {}
                Content::Unkept(reason) => {
                    kept.unkept += 1;
                    if kept.named.len() < NAMED_MAX {
                        kept.named.push((path.clone(), *size, *reason));
                    }
                }
            }
        }
        kept
    }
}

/// Files without content that a summary names.
const NAMED_MAX: usize = 10;

/// A set in numbers, for the user.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Kept {
    /// Closed files whose content is in the image.
    pub files: usize,
    /// Their bytes.
    pub bytes: u64,
    /// Closed files whose content is not.
    pub unkept: usize,
    /// The first of these: path, bytes, reason.
    pub named: Vec<(PathBuf, u64, Unkept)>,
    /// Time that the job stood still for them, in seconds.
    pub freeze_seconds: f64,
    /// The reason why not everything that the job writes is known, if there is one.
    pub gap: Option<String>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_set_is_read_as_it_was_written() {
        let folder = tempfile::tempdir().unwrap();
        let (file, link) = (folder.path().join("a"), folder.path().join("l"));
        fs::write(&file, "text").unwrap();
        std::os::unix::fs::symlink("a", &link).unwrap();
        let paths = [file, link, folder.path().to_owned()];
        let set = KeptFiles {
            frozen_ns: 7,
            files: paths
                .into_iter()
                .map(|path| (path.clone(), KeptFile::of(&path).unwrap()))
                .collect(),
        };
        let mut text = Vec::new();
        set.write(&mut text).unwrap();
        assert_eq!(KeptFiles::read(&text[..]).unwrap(), set);
        assert_eq!(set.summary().unkept, 1);
    }

    #[test]
    fn a_path_that_leads_elsewhere_is_refused() {
        for path in ["a", "/a/../b"] {
            let file = KeptFile::of(Path::new("/")).unwrap();
            let files = BTreeMap::from([(PathBuf::from(path), file)]);
            let set = KeptFiles {
                frozen_ns: 0,
                files,
            };
            let mut text = Vec::new();
            set.write(&mut text).unwrap();
            assert!(KeptFiles::read(&text[..]).is_err(), "{path}");
        }
    }
}

//! The set of files that an image keeps: the state of each file at the snapshot, and the place of its content.

use std::collections::BTreeMap;
use std::fmt;
use std::fs::{File, Metadata};
use std::io::{self, BufRead, Write};
use std::ops::Range;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use nix::sys::statfs::{TMPFS_MAGIC, statfs};
use serde::{Deserialize, Serialize};

use super::attributes;
use super::describe::{Describer, FileId};
use crate::safe_path::Spot;
use crate::{checked, clock, path_text};

/// A file, folder or link that the job has written.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct KeptFile {
    /// Kind of the file, with its data.
    #[serde(flatten)]
    pub kind: Kind,
    /// Device and inode.
    pub identity: (u64, u64),
    /// Time of creation, in nanoseconds since 1970; 0 if the file system does not record it. With device and inode it
    /// identifies the file, because inode numbers are reused.
    pub born_ns: i64,
    /// Time of the last change of content, in nanoseconds since 1970.
    pub modified_ns: i64,
    /// Time of the last change of content, mode, owner or links, in nanoseconds since 1970.
    pub changed_ns: i64,
    /// Permission bits.
    #[serde(deserialize_with = "checked::mode")]
    pub mode: u32,
    /// Owner and group.
    #[serde(deserialize_with = "checked::owner")]
    pub owner: (u32, u32),
    /// Extended attributes.
    #[serde(
        default,
        skip_serializing_if = "Vec::is_empty",
        deserialize_with = "attributes::checked"
    )]
    pub attributes: Vec<(String, Vec<u8>)>,
    /// Reason why the file counts as the job's.
    pub writer: Writer,
    /// True if its times do not show every later change, because the job has it mapped or it is in memory.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub is_mapped: bool,
}

/// The program that wrote a file, as far as known.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Writer {
    /// The job: a change was recorded.
    Job,
    /// The job: it has the file open for writing.
    Open,
    /// The job, by `files.include`.
    Included,
    /// An unknown program: the file changed while no watcher was running.
    Unknown,
}

/// The kind of a kept file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "kind")]
pub enum Kind {
    /// A regular file.
    File {
        /// Size in bytes.
        #[serde(deserialize_with = "checked::size")]
        size: u64,
        /// Place of its content.
        content: Content,
    },
    /// A folder. Its files are kept separately.
    Folder,
    /// A symbolic link.
    Link {
        /// Target of the link.
        #[serde(with = "path_text")]
        target: PathBuf,
    },
    /// A named pipe. Its data are those of the processes that have it open.
    Pipe,
    /// The name of a unix socket. CRIU binds those that are open once more.
    Socket,
}

/// The place of a file's content.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Content {
    /// In a stream of the image.
    Kept {
        /// Name of the stream.
        stream: String,
        /// Place in the stream. A program that knows no holes expects a number here, and refuses the image.
        #[serde(rename = "offset")]
        place: StreamPlace,
    },
    /// In the file itself: the job has it open and appends to it. The list of open files has its size.
    Appended,
    /// In a file of the store's folder `held`: a clone, or a hard link to the file.
    Held {
        /// Name of the held file: the image's folder, and a number.
        name: String,
        /// True if later changes of the file do not affect the held one.
        is_clone: bool,
    },
    /// The content was not kept.
    Unkept(Unkept),
}

/// The place of a content in a stream.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum StreamPlace {
    /// All bytes, from this offset on.
    Whole(#[serde(deserialize_with = "checked::size")] u64),
    /// Only the data of a file with holes.
    Sparse {
        /// Offset of the first of them in the stream.
        #[serde(deserialize_with = "checked::size")]
        first: u64,
        /// Their positions in the file, from and to, in order. They follow each other in the stream.
        #[serde(deserialize_with = "checked::ranges")]
        ranges: Vec<(u64, u64)>,
    },
}

impl StreamPlace {
    /// Returns the offset in the stream.
    #[must_use]
    pub fn offset(&self) -> u64 {
        match self {
            Self::Whole(offset) | Self::Sparse { first: offset, .. } => *offset,
        }
    }

    /// Sets the offset in the stream.
    pub fn move_to(&mut self, to: u64) {
        match self {
            Self::Whole(offset) | Self::Sparse { first: offset, .. } => *offset = to,
        }
    }

    /// Returns the positions in the file, which has this size.
    pub(crate) fn ranges(&self, size: u64) -> Vec<Range<u64>> {
        match self {
            Self::Whole(_) => vec![0..size],
            Self::Sparse { ranges, .. } => ranges.iter().map(|(from, to)| *from..*to).collect(),
        }
    }

    /// Returns the number of bytes in the stream of a file of this size.
    #[must_use]
    pub fn bytes(&self, size: u64) -> u64 {
        match self {
            Self::Whole(_) => size,
            Self::Sparse { ranges, .. } => ranges.iter().map(|(from, to)| to - from).sum(),
        }
    }
}

/// Reason why a content was not kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Unkept {
    /// The file is larger than `files.keep_content`.
    TooLarge,
    /// The files together are larger than `files.keep_total`.
    TooMuch,
    /// The file is too large by either limit, and the store holds a hard link. The content exists unless the job
    /// changes it in place.
    Linked,
    /// The file could not be read.
    Unreadable,
    /// The file could not be copied within `files.freeze`, and may have changed after that.
    TooSlow,
}

impl fmt::Display for Unkept {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::TooLarge => "larger than files.keep_content",
            Self::TooMuch => "beyond files.keep_total",
            Self::Linked => {
                "beyond files.keep_content or files.keep_total; held by a hard link, which changes in place affect"
            }
            Self::Unreadable => "ckpt-run has no permission to read it",
            Self::TooSlow => "not copied within files.freeze",
        })
    }
}

impl KeptFile {
    /// Describes the file at a path. Its content is not kept yet. Returns `None` for devices, and if there is no file.
    #[must_use]
    pub fn of(path: &Path) -> Option<Self> {
        Describer::default().describe(path, None)
    }

    /// Opens the file for reading, provided that the path still leads to the same file. Links are not followed.
    pub(crate) fn open_same(&self, path: &Path) -> io::Result<File> {
        let spot = Spot::of(path)?;
        let file = spot.open(File::options().read(true), 0)?;
        if self.is(&file) {
            Ok(file)
        } else {
            Err(io::ErrorKind::NotFound.into())
        }
    }

    /// Returns true if this regular file is open there.
    pub(crate) fn is(&self, opened: &File) -> bool {
        let found = opened.metadata();
        found.is_ok_and(|found| found.is_file() && FileId::of(&found) == self.id())
    }

    /// Returns true if the file cannot have changed between two descriptions. `frozen_ns` is the time of this one:
    /// after a change shortly before it, another one may have the same timestamp.
    #[must_use]
    pub fn is_unchanged(&self, now: &Self, frozen_ns: i64) -> bool {
        self.shows_changes(frozen_ns) && self.looks_unchanged(now)
    }

    /// Returns true if every later change of the file changes its times.
    #[must_use]
    pub fn shows_changes(&self, frozen_ns: i64) -> bool {
        !self.is_mapped && self.changed_ns.max(self.modified_ns) < frozen_ns - TICK_NS
    }

    /// Returns true if size and times are the same.
    #[must_use]
    pub fn looks_unchanged(&self, now: &Self) -> bool {
        let times = |file: &Self| (file.modified_ns, file.changed_ns);
        self.is_same_file(now) && times(self) == times(now) && self.size() == now.size()
    }

    /// Returns true if both are names of one file, even if its content has changed.
    #[must_use]
    pub fn is_same_file(&self, now: &Self) -> bool {
        self.id() == now.id()
    }

    pub(super) fn id(&self) -> FileId {
        FileId::new(self.identity, self.born_ns)
    }

    /// Returns the size in bytes; 0 for other files than regular ones.
    #[must_use]
    pub fn size(&self) -> u64 {
        match self.kind {
            Kind::File { size, .. } => size,
            Kind::Folder | Kind::Link { .. } | Kind::Pipe | Kind::Socket => 0,
        }
    }

    /// Returns the file with another place of its content.
    pub(super) fn with_content(&self, place: Content) -> Self {
        let mut file = self.clone();
        if let Kind::File { content, .. } = &mut file.kind {
            *content = place;
        }
        file
    }

    /// Returns stream, place and number of bytes of a content in the image.
    #[must_use]
    pub fn kept(&self) -> Option<(&str, &StreamPlace, u64)> {
        match &self.kind {
            Kind::File {
                size,
                content: Content::Kept { stream, place },
            } => Some((stream, place, place.bytes(*size))),
            _ => None,
        }
    }

    /// Returns the number of bytes that the image has of the content.
    #[must_use]
    pub fn kept_bytes(&self) -> u64 {
        self.kept().map_or(0, |(_, _, bytes)| bytes)
    }

    /// Returns true if both are folders with the same mode, owner and attributes.
    #[must_use]
    pub fn is_same_folder(&self, now: &Self) -> bool {
        let about = |file: &Self| (file.kind == Kind::Folder, file.mode, file.owner);
        let is_same = about(self) == about(now) && self.attributes == now.attributes;
        self.kind == Kind::Folder && is_same
    }

    /// Returns true for a named pipe or a socket.
    #[must_use]
    pub fn is_special(&self) -> bool {
        matches!(self.kind, Kind::Pipe | Kind::Socket)
    }

    /// Returns true if the file can change without a change on record.
    #[must_use]
    pub fn is_unsettled(&self) -> bool {
        self.is_appended() || self.is_mapped
    }

    /// Returns true if the file's content is not stored yet.
    #[must_use]
    pub fn has_no_content(&self) -> bool {
        matches!(
            self.kind,
            Kind::File {
                content: Content::Unkept(_),
                ..
            }
        )
    }

    /// Returns true if the file's content is in the file itself.
    #[must_use]
    pub fn is_appended(&self) -> bool {
        matches!(
            self.kind,
            Kind::File {
                content: Content::Appended,
                ..
            }
        )
    }

    /// Returns true if only mode, owner or links changed, according to size and times.
    #[must_use]
    pub fn has_same_content(&self, now: &Self) -> bool {
        match (&self.kind, &now.kind) {
            (Kind::File { size, .. }, Kind::File { size: other, .. }) => {
                size == other && self.modified_ns == now.modified_ns
            }
            (then, now) => then == now,
        }
    }
}

/// Upper bound on the resolution of file timestamps, in nanoseconds.
pub(super) const TICK_NS: i64 = 20_000_000;

/// Returns true if a path is on a file system in memory (tmpfs).
pub fn is_in_memory(path: &Path) -> bool {
    statfs(path).is_ok_and(|about| about.filesystem_type() == TMPFS_MAGIC)
}

pub(super) fn born_ns(found: &Metadata) -> i64 {
    let born = found.created().ok();
    let since = born.and_then(|born| born.duration_since(std::time::UNIX_EPOCH).ok());
    since.map_or(0, |since| {
        i64::try_from(since.as_nanos()).unwrap_or(i64::MAX)
    })
}

pub(super) fn modified_ns(found: &Metadata) -> i64 {
    clock::file_time_ns(found.mtime(), found.mtime_nsec())
}

pub(super) fn changed_ns(found: &Metadata) -> i64 {
    clock::file_time_ns(found.ctime(), found.ctime_nsec())
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
    #[serde(deserialize_with = "checked::time_ns")]
    frozen_ns: i64,
}

/// A file of the set for serialization.
#[derive(Serialize)]
struct LineOf<'a>(#[serde(with = "path_text")] &'a Path, &'a KeptFile);

/// A file of the set for deserialization.
#[derive(Deserialize)]
struct Line(#[serde(with = "path_text")] PathBuf, KeptFile);

impl KeptFiles {
    /// Writes the set as one line of JSON for each file.
    ///
    /// # Errors
    /// The sink cannot be written.
    pub fn write(&self, sink: &mut impl Write) -> io::Result<()> {
        let head = Head {
            frozen_ns: self.frozen_ns,
        };
        serde_json::to_writer(&mut *sink, &head)?;
        for (path, file) in &self.files {
            sink.write_all(b"\n")?;
            serde_json::to_writer(&mut *sink, &LineOf(path, file))?;
        }
        sink.write_all(b"\n")
    }

    /// Reads a set written by [`KeptFiles::write`]. Refuses paths that no snapshot records.
    ///
    /// # Errors
    /// A line is not valid.
    pub fn read(source: impl BufRead) -> io::Result<Self> {
        let mut lines = source.lines();
        let first = lines
            .next()
            .unwrap_or(Err(io::ErrorKind::UnexpectedEof.into()))?;
        let head: Head = serde_json::from_str(&first)?;
        let mut files = BTreeMap::new();
        for line in lines {
            let Line(path, file): Line = serde_json::from_str(&line?)?;
            if !checked::is_path(&path) {
                return Err(io::ErrorKind::InvalidData.into());
            }
            files.insert(path, file);
        }
        Ok(Self {
            frozen_ns: head.frozen_ns,
            files,
        })
    }

    /// Returns the files at and below a path.
    pub(super) fn below<'a>(&'a self, top: &'a Path) -> impl Iterator<Item = &'a Path> {
        let from = self.files.range(top.to_owned()..);
        let paths = from.map(|(path, _)| path.as_path());
        paths.take_while(move |path| path.starts_with(top))
    }

    /// Sets the identities of the present files, after the set was restored on another machine.
    pub fn identify(&mut self) {
        for (path, file) in &mut self.files {
            if let Ok(found) = path.symlink_metadata() {
                file.identity = (found.dev(), found.ino());
                file.born_ns = born_ns(&found);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

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

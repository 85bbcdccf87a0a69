//! The lines of the record of the job's files.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::fs::File;
use std::io::{self, BufRead, BufReader, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use serde::{Deserialize, Serialize};

use super::describe::FileId;
use super::fanotify::Change;
use crate::path_text;

/// A line of the record.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Line {
    /// A watcher starts, on this boot of the machine.
    Begin { boot: String },
    /// File systems at these mount points, watched or not watchable.
    Mounts {
        #[serde(with = "path_text::list")]
        watched: Vec<PathBuf>,
        #[serde(with = "path_text::list")]
        unwatched: Vec<PathBuf>,
    },
    /// The job changed a path.
    Job {
        #[serde(with = "path_text")]
        path: PathBuf,
        change: JobChange,
    },
    /// The job changed the content or attributes of this file, which has other names, or no longer has the one by which
    /// it was changed.
    File { id: FileId },
    /// Another program changed a path in a folder in which the job has changed something.
    Other {
        #[serde(with = "path_text")]
        path: PathBuf,
        #[serde(default)]
        created: bool,
    },
    /// Start of a compacted record, which replaces this many bytes of the log.
    Base { read: u64 },
    /// The job changed a path, in a compacted record or in that of another machine.
    Touched {
        #[serde(with = "path_text")]
        path: PathBuf,
        is_jobs_own: bool,
    },
    /// Names in a folder at the job's first change in it.
    Names {
        #[serde(with = "path_text")]
        folder: PathBuf,
        #[serde(with = "path_text::list")]
        names: Vec<OsString>,
    },
    /// Mark of an image: all earlier lines belong to it or to earlier ones. A mark with a lower number than an earlier one
    /// was written too late and does not count.
    Image {
        id: u64,
        #[serde(default)]
        mark: u64,
    },
    /// A rollback is about to change this path. It counts as a change by the job.
    RollsBack {
        #[serde(with = "path_text")]
        path: PathBuf,
        change: JobChange,
    },
    /// The job has ended by this time, in nanoseconds since 1970.
    Ended { at_ns: i64 },
    /// The job was killed while it was frozen for this image, the last one: it has changed nothing since.
    Stopped {
        id: u64,
        /// Time when it was killed, in nanoseconds since 1970; 0 in records made before it was noted.
        #[serde(default)]
        at_ns: i64,
    },
    /// The stopped job runs again from here on.
    Running,
    /// Changes are missing here.
    Gap { reason: String },
    /// The watcher ended together with the job, without its last line. Changes between these times are missing, in
    /// nanoseconds since 1970.
    Cut {
        from_ns: i64,
        until_ns: i64,
        /// True if these changes count as the job's: the machine has booted since, so that no other program can have
        /// changed anything after the job's end, or the supervisor saw that end soon after the record's last update.
        #[serde(default, alias = "booted")]
        is_jobs: bool,
    },
    /// End of a complete part: the watcher has recorded everything up to here.
    End,
}

/// Change of a path by the job.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum JobChange {
    Created,
    MovedTo,
    Changed,
    Gone,
    /// A folder lost this name. The same applies to everything in it.
    FolderGone,
}

#[cfg(test)]
impl Line {
    pub fn image(id: u64) -> Self {
        Self::Image { id, mark: 0 }
    }
}

impl JobChange {
    pub fn of(change: Change, is_folder: bool) -> Self {
        match (change, is_folder) {
            (Change::Created, _) => Self::Created,
            (Change::MovedTo, _) => Self::MovedTo,
            (Change::Changed | Change::Closed, _) => Self::Changed,
            (Change::Gone, false) => Self::Gone,
            (Change::Gone, true) => Self::FolderGone,
        }
    }
}

/// Returns the line that pid 1 writes to the record if the watcher is killed and the job is not.
#[must_use]
pub fn obituary() -> Vec<u8> {
    let reason = "the process that watches the job's files was killed".to_owned();
    let lines = [Line::Gap { reason }, Line::End];
    let texts = lines.map(|line| serde_json::to_vec(&line).unwrap_or_default());
    [&b"\n"[..], &texts[0], b"\n", &texts[1], b"\n"].concat()
}

/// Returns the folders of which the names are in an open record.
pub(super) fn listed_folders(record: &File) -> io::Result<BTreeSet<PathBuf>> {
    let record = File::open(format!("/proc/self/fd/{}", record.as_raw_fd()))?;
    let mut folders = BTreeSet::new();
    for line in BufReader::new(record).split(b'\n') {
        if let Ok(Line::Names { folder, .. }) = serde_json::from_slice(&line?) {
            folders.insert(folder);
        }
    }
    Ok(folders)
}

/// A record that a watcher writes.
#[derive(Debug)]
pub(super) struct Log {
    file: File,
    text: Vec<u8>,
    is_dirty: bool,
}

impl Log {
    pub fn new(file: File) -> Self {
        Self {
            file,
            text: Vec::new(),
            is_dirty: false,
        }
    }

    pub fn file(&self) -> &File {
        &self.file
    }

    /// Begins a new line: an earlier watcher may have left the last one incomplete.
    pub fn begin_line(&mut self) {
        self.text.push(b'\n');
    }

    pub fn add(&mut self, line: &Line) {
        // JSON cannot represent paths that are not UTF-8.
        match serde_json::to_vec(line) {
            Ok(text) => self.text.extend_from_slice(&text),
            Err(error) => {
                let reason = format!("cannot record a path: {error}");
                let gap = serde_json::to_vec(&Line::Gap { reason });
                self.text.extend_from_slice(&gap.unwrap_or_default());
            }
        }
        self.text.push(b'\n');
    }

    /// Updates the time of the record, up to which it is complete, and makes new lines durable.
    pub fn sign_of_life(&mut self) -> io::Result<()> {
        self.file.set_modified(SystemTime::now())?;
        if std::mem::take(&mut self.is_dirty) {
            self.file.sync_data()?;
        }
        Ok(())
    }

    pub fn flush(&mut self) -> io::Result<()> {
        if !self.text.is_empty() {
            self.file.write_all(&self.text)?;
            self.text.clear();
            self.is_dirty = true;
        }
        Ok(())
    }

    /// Makes the lines durable.
    pub fn sync(&self) -> io::Result<()> {
        self.file.sync_data()
    }
}

/// Appends lines to a record.
pub(super) fn append(record: &Path, lines: &[Line]) -> io::Result<()> {
    // The record may end within a line.
    let mut text = vec![b'\n'];
    for line in lines {
        serde_json::to_writer(&mut text, line)?;
        text.push(b'\n');
    }
    let mut file = File::options()
        .append(true)
        .create(true)
        .mode(0o600)
        .custom_flags(nix::libc::O_NOFOLLOW)
        .open(record)?;
    file.write_all(&text)?;
    file.sync_all()
}

//! The log's file: lines are appended and read, and both are bounded.
//!
//! Each line is one write to a file opened for appending, so that lines of two writers do not mix. A line that a crash
//! tore is ended by the next writer and skipped by readers, as is all that is no entry. Past [`FILE_BYTES_MAX`] the
//! file gets a second name, `events.1.ndjson`, and what had that is gone.

use std::fs::{self, File, OpenOptions};
use std::io::{self, BufRead, BufReader, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use serde_json::Value;

use super::Entry;

/// The file's name in a store.
const FILE: &str = "events.ndjson";
/// Two such files are some 100,000 events, and are read in a second.
const FILE_BYTES_MAX: u64 = 16 << 20;
/// Longest line: what is left of the longest event when it was clipped, in which each byte may take six.
const LINE_BYTES_MAX: usize = 128 << 10;
/// The end of a log that is looked at again and again: more events than a screen has room for.
const TAIL_BYTES: u64 = 256 << 10;
/// Longest text in an event that would be too long.
const TEXT_BYTES_MAX: usize = 256;
/// Longest list in an event that would be too long.
const ITEMS_MAX: usize = 64;

/// A line that was not written. What was there is untouched.
#[derive(Debug, thiserror::Error)]
pub enum LogError {
    /// The file cannot be opened, or begun anew.
    #[error("cannot open the event log {}", path.display())]
    Open {
        /// The file.
        path: PathBuf,
        /// The reason.
        #[source]
        source: io::Error,
    },
    /// The file cannot be written.
    #[error("cannot write to the event log {}", path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// The reason.
        #[source]
        source: io::Error,
    },
}

/// Where the log of a store is.
#[must_use]
pub fn path(store: &Path) -> PathBuf {
    store.join(FILE)
}

/// A log that is written to. Its file is opened for each line: events are rare, and somebody may move it away.
#[derive(Debug)]
pub struct Log {
    path: PathBuf,
    bytes_max: u64,
}

impl Log {
    /// The log at a path; nothing is touched before the first line.
    #[must_use]
    pub fn new(path: PathBuf) -> Self {
        Self {
            path,
            bytes_max: FILE_BYTES_MAX,
        }
    }

    /// Adds an entry.
    ///
    /// # Errors
    /// When the file cannot be opened or written; on a full disk a part of the line may be there, which readers skip.
    pub fn append(&self, entry: &Entry) -> Result<(), LogError> {
        let open = |source| LogError::Open {
            path: self.path.clone(),
            source,
        };
        let mut line = line(entry);
        let mut file = self.open().map_err(open)?;
        let metadata = file.metadata().map_err(open)?;
        let added = u64::try_from(line.len()).unwrap_or(u64::MAX);
        if metadata.is_file() && metadata.len().saturating_add(added) > self.bytes_max {
            fs::rename(&self.path, older(&self.path)).map_err(open)?;
            file = self.open().map_err(open)?;
        } else if metadata.is_file() && is_torn(&mut file, metadata.len()).unwrap_or(false) {
            line.insert(0, b'\n');
        }
        let written = file.write(&line);
        let written = written.and_then(|count| match count {
            count if count == line.len() => Ok(()),
            _ => Err(io::ErrorKind::WriteZero.into()),
        });
        written.map_err(|source| LogError::Write {
            path: self.path.clone(),
            source,
        })
    }

    fn open(&self) -> io::Result<File> {
        OpenOptions::new()
            .read(true)
            .append(true)
            .create(true)
            .mode(0o600)
            // A named pipe that nobody reads must not stop the run.
            .custom_flags(nix::libc::O_NONBLOCK)
            .open(&self.path)
    }
}

/// `events.1.ndjson` for `events.ndjson`.
fn older(path: &Path) -> PathBuf {
    match path.extension() {
        Some(extension) => {
            let mut extended = std::ffi::OsString::from("1.");
            extended.push(extension);
            path.with_extension(extended)
        }
        None => path.with_extension("1"),
    }
}

/// Whether the last line has no end.
fn is_torn(file: &mut File, len: u64) -> io::Result<bool> {
    let Some(last) = len.checked_sub(1) else {
        return Ok(false);
    };
    let mut byte = [0];
    file.seek(SeekFrom::Start(last))?;
    file.read_exact(&mut byte)?;
    Ok(byte != *b"\n")
}

fn line(entry: &Entry) -> Vec<u8> {
    // A struct of strings and numbers always becomes JSON.
    let mut line = serde_json::to_vec(entry).unwrap_or_default();
    if line.len() >= LINE_BYTES_MAX {
        let mut value = serde_json::to_value(entry).unwrap_or_default();
        clip(&mut value);
        line = serde_json::to_vec(&value).unwrap_or_default();
    }
    line.push(b'\n');
    line
}

/// Cuts what is too long for a line of the log, and says so by its end.
fn clip(value: &mut Value) {
    match value {
        Value::String(text) if text.len() > TEXT_BYTES_MAX => {
            let end = (0..=TEXT_BYTES_MAX).rev();
            let end = end.into_iter().find(|end| text.is_char_boundary(*end));
            text.truncate(end.unwrap_or(0));
            text.push('…');
        }
        Value::Array(items) => {
            let plain = items.iter().all(Value::is_string);
            if items.len() > ITEMS_MAX {
                items.truncate(ITEMS_MAX);
                items.extend(plain.then(|| Value::from("…")));
            }
            items.iter_mut().for_each(clip);
        }
        Value::Object(fields) => fields.values_mut().for_each(clip),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {}
    }
}

/// The entries of a log, oldest first, with those of its older part; none where there is no log, or it cannot be read.
#[must_use]
pub fn entries(path: &Path) -> Entries {
    let files = [older(path), path.to_owned()].map(|path| {
        let file = OpenOptions::new()
            .read(true)
            .custom_flags(nix::libc::O_NONBLOCK)
            .open(path)
            .ok()?;
        let regular = file.metadata().is_ok_and(|metadata| metadata.is_file());
        // One that grows under our hands is read no further.
        regular.then(|| BufReader::new(file.take(FILE_BYTES_MAX + LINE_BYTES_MAX as u64)))
    });
    Entries {
        files: files.into_iter().flatten().collect::<Vec<_>>().into_iter(),
        file: None,
    }
}

/// The last entries of a log, oldest first: those in its last 256 KiB, for a look every second.
#[must_use]
pub fn latest(path: &Path) -> Vec<Entry> {
    let read = || -> io::Result<Vec<u8>> {
        let mut file = OpenOptions::new()
            .read(true)
            .custom_flags(nix::libc::O_NONBLOCK)
            .open(path)?;
        let len = file.metadata()?.len();
        file.seek(SeekFrom::Start(len.saturating_sub(TAIL_BYTES)))?;
        let mut tail = Vec::new();
        file.take(TAIL_BYTES).read_to_end(&mut tail)?;
        Ok(tail)
    };
    // A line of which the beginning is not there is no entry.
    let tail = read().unwrap_or_default();
    let lines = tail.split(|byte| *byte == b'\n');
    lines
        .filter_map(|line| serde_json::from_slice(line).ok())
        .collect()
}

/// What [`entries`] reads.
#[derive(Debug)]
pub struct Entries {
    files: std::vec::IntoIter<BufReader<io::Take<File>>>,
    file: Option<BufReader<io::Take<File>>>,
}

impl Iterator for Entries {
    type Item = Entry;

    fn next(&mut self) -> Option<Entry> {
        loop {
            if let Some(file) = &mut self.file {
                while let Some(line) = next_line(file) {
                    if let Ok(entry) = serde_json::from_slice(&line) {
                        return Some(entry);
                    }
                }
            }
            self.file = Some(self.files.next()?);
        }
    }
}

/// The next line; empty for one that is too long, `None` at the end of what can be read.
fn next_line(file: &mut impl BufRead) -> Option<Vec<u8>> {
    let mut line = Vec::new();
    let mut limited = file.by_ref().take(LINE_BYTES_MAX as u64);
    limited.read_until(b'\n', &mut line).ok()?;
    if line.is_empty() {
        return None;
    }
    if line.len() == LINE_BYTES_MAX && !line.ends_with(b"\n") {
        line.clear();
        file.skip_until(b'\n').ok()?;
    }
    Some(line)
}

#[cfg(test)]
mod tests;

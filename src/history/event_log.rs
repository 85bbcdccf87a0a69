//! The log's file: lines are appended and read, and both operations are bounded.
//!
//! Each line is one write to a file opened for appending, so that lines of two writers do not mix. A line that a crash
//! cut short is ended by the next writer and skipped by readers, as is every line that is not an entry. A file that
//! would exceed [`FILE_BYTES_MAX`] is renamed to `events.1.ndjson`, which replaces the earlier file of that name.

use std::fs::{self, File, OpenOptions};
use std::io::{self, BufRead, BufReader, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use serde_json::Value;

use super::Entry;

/// Name of the file in a store.
const FILE: &str = "events.ndjson";
/// Maximum size of a file: two such files hold some 100,000 events and are read in a second.
const FILE_BYTES_MAX: u64 = 16 << 20;
/// Maximum length of a line: the longest event after clipping, in which each byte may take six bytes.
const LINE_BYTES_MAX: usize = 128 << 10;
/// Size of the end of a log that is read repeatedly: more events than fit on a screen.
const TAIL_BYTES: u64 = 256 << 10;
/// Maximum length of a text in a clipped event.
const TEXT_BYTES_MAX: usize = 256;
/// Maximum length of a list in a clipped event.
const ITEMS_MAX: usize = 64;

/// An error that prevented writing a line. The existing lines are untouched.
#[derive(Debug, thiserror::Error)]
pub enum LogError {
    /// The file cannot be opened or rotated.
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

/// Returns the path of a store's log.
#[must_use]
pub fn path(store: &Path) -> PathBuf {
    store.join(FILE)
}

/// A log for writing. Its file is opened for each line: events are rare, and another program may move it away.
#[derive(Debug)]
pub struct Log {
    path: PathBuf,
    bytes_max: u64,
}

impl Log {
    /// Makes a log at a path; the file is not touched before the first line.
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
    /// The file cannot be opened or written. On a full disk a part of the line may have been written, which readers
    /// skip.
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
            // A named pipe without a reader must not stop the run.
            .custom_flags(nix::libc::O_NONBLOCK)
            .open(&self.path)
    }
}

/// Returns the path of the older file: `events.1.ndjson` for `events.ndjson`.
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

/// Returns true if the last line is incomplete.
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
    // A struct of strings and numbers can always be converted to JSON.
    let mut line = serde_json::to_vec(entry).unwrap_or_default();
    if line.len() >= LINE_BYTES_MAX {
        let mut value = serde_json::to_value(entry).unwrap_or_default();
        clip(&mut value);
        line = serde_json::to_vec(&value).unwrap_or_default();
    }
    line.push(b'\n');
    line
}

/// Cuts texts and lists that are too long for a line of the log, and marks the cut with `…`.
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

/// Returns the entries of a log, oldest first, including those of its older file; none if there is no log, or it cannot
/// be read.
#[must_use]
pub fn entries(path: &Path) -> Entries {
    let files = [older(path), path.to_owned()].map(|path| {
        let file = OpenOptions::new()
            .read(true)
            .custom_flags(nix::libc::O_NONBLOCK)
            .open(path)
            .ok()?;
        let regular = file.metadata().is_ok_and(|metadata| metadata.is_file());
        // A file that grows during the read is read only up to this limit.
        regular.then(|| BufReader::new(file.take(FILE_BYTES_MAX + LINE_BYTES_MAX as u64)))
    });
    Entries {
        files: files.into_iter().flatten().collect::<Vec<_>>().into_iter(),
        file: None,
    }
}

/// Returns the last entries of a log, oldest first: those in its last 256 KiB, for polling every second.
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
    // A line whose beginning is missing is not an entry.
    let tail = read().unwrap_or_default();
    let lines = tail.split(|byte| *byte == b'\n');
    lines
        .filter_map(|line| serde_json::from_slice(line).ok())
        .collect()
}

/// Iterator of [`entries`].
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

/// Reads the next line; empty if the line is too long, `None` at the end of the readable data.
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
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use jiff::Timestamp;
    use proptest::prelude::*;

    use super::*;
    use crate::history::Event;

    fn entry(run: u64, event: Event) -> Entry {
        Entry {
            time: Timestamp::from_second(1_790_000_000).unwrap(),
            elapsed: 1.5,
            run,
            event,
        }
    }

    fn ended(run: u64) -> Entry {
        entry(
            run,
            Event::Ended {
                how: "finished".to_owned(),
                code: 0,
            },
        )
    }

    fn place() -> (tempfile::TempDir, PathBuf) {
        let folder = tempfile::tempdir().unwrap();
        let path = path(folder.path());
        (folder, path)
    }

    #[test]
    fn appended_lines_are_read_by_the_owner_only() {
        let (_folder, path) = place();
        let log = Log::new(path.clone());
        for run in 0..3 {
            log.append(&ended(run)).unwrap();
        }
        let read: Vec<Entry> = entries(&path).collect();
        assert_eq!(read, [ended(0), ended(1), ended(2)]);
        let mode = fs::metadata(&path).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        assert_eq!(
            fs::read_to_string(&path).unwrap().lines().next().unwrap(),
            r#"{"time":"2026-09-21T14:13:20Z","elapsed":1.5,"run":0,"event":"ended","how":"finished","code":0}"#
        );
    }

    #[test]
    fn a_full_file_becomes_the_older_one_and_both_are_read() {
        let (_folder, path) = place();
        let log = Log {
            path: path.clone(),
            bytes_max: 250,
        };
        for run in 0..5 {
            log.append(&ended(run)).unwrap();
        }
        let runs: Vec<u64> = entries(&path).map(|entry| entry.run).collect();
        assert_eq!(runs, [2, 3, 4], "the oldest are gone");
        assert!(fs::metadata(&path).unwrap().len() <= 250);
        assert_eq!(older(&path).file_name().unwrap(), "events.1.ndjson");
    }

    #[test]
    fn a_torn_last_line_is_skipped_and_spoils_no_later_one() {
        let (_folder, path) = place();
        let log = Log::new(path.clone());
        log.append(&ended(1)).unwrap();
        let mut file = OpenOptions::new().append(true).open(&path).unwrap();
        file.write_all(br#"{"time":"2026-09-2"#).unwrap();
        assert_eq!(entries(&path).count(), 1);
        log.append(&ended(2)).unwrap();
        let runs: Vec<u64> = entries(&path).map(|entry| entry.run).collect();
        assert_eq!(runs, [1, 2]);
    }

    #[test]
    fn events_and_fields_of_a_newer_version_are_tolerated() {
        let (_folder, path) = place();
        let text = r#"{"time":"2026-09-21T14:13:20Z","run":4,"event":"teleported","to":{"x":[1]}}
{"time":"2026-09-21T14:13:20Z","run":5,"colour":"red","event":"started","pid":7,"more":[]}
{"time":"2026-09-21T14:13:20Z","run":6,"event":"started","pid":"seven"}
"#;
        fs::write(&path, text).unwrap();
        let read: Vec<Entry> = entries(&path).collect();
        assert_eq!(read.len(), 2);
        assert_eq!((read[0].run, &read[0].event), (4, &Event::Unknown));
        assert_eq!(
            (read[1].run, &read[1].event),
            (5, &Event::Started { pid: Some(7) })
        );
    }

    #[test]
    fn an_event_too_long_for_a_line_is_clipped() {
        let (_folder, path) = place();
        let log = Log::new(path.clone());
        let event = Event::Opened {
            version: "1".to_owned(),
            pid: 1,
            command: vec!["\u{1}é".repeat(1000); 500],
        };
        log.append(&entry(1, event)).unwrap();
        assert!(fs::metadata(&path).unwrap().len() <= LINE_BYTES_MAX as u64);
        let read: Vec<Entry> = entries(&path).collect();
        let Event::Opened { command, .. } = &read[0].event else {
            panic!("{read:?}");
        };
        assert_eq!((command.len(), command[64].as_str()), (65, "…"));
        assert!(command[0].ends_with('…'));
    }

    #[test]
    fn a_line_too_long_to_be_ours_is_skipped() {
        let (_folder, path) = place();
        let mut text = vec![b'x'; 3 * LINE_BYTES_MAX];
        text.push(b'\n');
        text.extend(line(&ended(3)));
        fs::write(&path, text).unwrap();
        let runs: Vec<u64> = entries(&path).map(|entry| entry.run).collect();
        assert_eq!(runs, [3]);
    }

    #[test]
    fn pipe_is_not_read_and_folder_is_an_error() {
        let (_folder, path) = place();
        nix::unistd::mkfifo(&path, nix::sys::stat::Mode::S_IRWXU).unwrap();
        assert_eq!(entries(&path).count(), 0, "and did not wait for a writer");
        fs::remove_file(&path).unwrap();
        fs::create_dir(&path).unwrap();
        let error = Log::new(path.clone()).append(&ended(1)).unwrap_err();
        assert!(matches!(error, LogError::Open { .. }), "{error:?}");
        assert_eq!(entries(&path).count(), 0);
    }

    #[test]
    fn the_latest_entries_are_those_at_the_end() {
        let (_folder, path) = place();
        assert!(latest(&path).is_empty());
        let mut text = vec![b'x'; 300 << 10];
        text.push(b'\n');
        text.extend(line(&ended(7)));
        text.extend(line(&ended(8)));
        fs::write(&path, text).unwrap();
        assert_eq!(latest(&path), [ended(7), ended(8)]);
    }

    #[test]
    fn unread_pipe_blocks_no_writer() {
        let (_folder, path) = place();
        nix::unistd::mkfifo(&path, nix::sys::stat::Mode::S_IRWXU).unwrap();
        // A reader of the pipe would come and go with each line; the test only requires that this call returns.
        Log::new(path).append(&ended(1)).unwrap();
    }

    proptest! {
        #[test]
        fn no_content_makes_reading_panic(bytes in prop::collection::vec(any::<u8>(), 0..400), cut in 0..90_usize) {
            let (_folder, path) = place();
            let mut content = line(&ended(1));
            content.truncate(cut);
            content.extend(bytes);
            fs::write(&path, content).unwrap();
            let read = entries(&path).count();
            prop_assert!(read <= 400);
        }
    }
}

//! Reports of the job's own programs about the names that they change, where the job has no watcher.
//!
//! ```text
//! witness (preloaded) ── symlink ──▶ STORE/writes/HASH ── take ──▶ STORE/writes.taken/HASH ── lines ──▶ record
//!                                                                  STORE/writes.recorded ◀── recorded
//! ```
//! A supervisor that is killed on the way leaves the reports to the next one.
//!
//! A report shows that the job has changed a path, or was killed just before. A missing report proves nothing: some programs make none. Reports
//! do not show what other programs change.

use std::collections::{HashMap, HashSet};
use std::ffi::OsStr;
use std::fs::{self, DirBuilder};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Component, Path, PathBuf};
use std::time::UNIX_EPOCH;

use nix::sys::stat::{major, minor};

use super::super::file_set::{TICK_NS, changed_ns, is_in_memory};
use super::super::folder_scan::everything_in;
use super::super::record_line::{JobChange, Line};

/// Variable with the path of the folder for reports, which the witness reads (`src/witness/report.rs`).
pub const VARIABLE: &str = "_CKPT_RUN_WRITES";
/// Variable with the mount points of the file systems of which changes are to be reported; all if it is not set.
pub(crate) const MOUNTS_VARIABLE: &str = "_CKPT_RUN_MOUNTS";
/// Names of the folder in the store, of the folder with reports on their way into the record, and of that with reports
/// that are in the record.
const FOLDER: &str = "writes";
const TAKEN: &str = "writes.taken";
const RECORDED: &str = "writes.recorded";
/// Hexadecimal digits of a number in a report.
const DIGITS: usize = 16;

/// The folder of reports.
#[derive(Debug)]
pub struct Evidence {
    folder: PathBuf,
    taken: PathBuf,
    recorded: PathBuf,
}

impl Evidence {
    /// Returns the folder in a store.
    #[must_use]
    pub fn of(store: &Path) -> Self {
        Self {
            folder: store.join(FOLDER),
            taken: store.join(TAKEN),
            recorded: store.join(RECORDED),
        }
    }

    /// Creates the folder, and returns the variable that makes the job's programs report.
    ///
    /// # Errors
    /// The folder cannot be created.
    pub fn begin(&self) -> io::Result<(&'static str, &Path)> {
        self.create()?;
        Ok((VARIABLE, &self.folder))
    }

    /// Returns true if the job's programs have been made to report.
    #[must_use]
    pub fn is_used(&self) -> bool {
        self.folder.symlink_metadata().is_ok()
    }

    /// Removes all reports, because the job starts from the beginning.
    ///
    /// # Errors
    /// They cannot be removed.
    pub fn clear(&self) -> io::Result<()> {
        self.forget()?;
        remove(&self.taken)?;
        if !self.is_used() {
            return Ok(());
        }
        remove(&self.folder)?;
        self.create()
    }

    /// Hands the reports since the last call about paths of concern to `record`, as lines of the record in the order of the
    /// changes. `since_ns` is the time of that call or earlier. Reports made during this function may be lost.
    ///
    /// # Errors
    /// The folder cannot be read or created, or `record` failed: then the next call hands the same lines over.
    pub fn take(
        &self,
        is_concern: impl Fn(&Path) -> bool,
        since_ns: i64,
        record: impl Fn(&[Line]) -> io::Result<()>,
    ) -> io::Result<()> {
        let take_over = || {
            record(&self.lines(&is_concern, since_ns)?)?;
            let moved = self.forget();
            let moved = moved.and_then(|()| fs::rename(&self.taken, &self.recorded));
            // Recorded once more, they would count as changes after the next image.
            moved.or_else(|_| remove(&self.taken))
        };
        // Those that a killed supervisor has left.
        if self.taken.symlink_metadata().is_ok() {
            self.create()?;
            take_over()?;
        }
        match fs::rename(&self.folder, &self.taken) {
            // The job makes no reports.
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            renamed => renamed?,
        }
        self.create()?;
        take_over()
    }

    /// Returns the taken reports as lines of the record.
    fn lines(&self, is_concern: impl Fn(&Path) -> bool, since_ns: i64) -> io::Result<Vec<Line>> {
        let entries = self.taken.read_dir()?;
        let texts = entries.filter_map(|entry| fs::read_link(entry.ok()?.path()).ok());
        let mut reports: Vec<Report> = texts.filter_map(|text| Report::parse(&text)).collect();
        reports.sort_by_key(|report| report.time_ns);
        reports.retain(|report| is_concern(&report.path));
        let mut lines = Vec::new();
        for report in &reports {
            report.add_to(&mut lines, since_ns);
        }
        add_silent_renames(&reports, &mut lines);
        Ok(lines)
    }

    /// Removes the reports that are in the record.
    ///
    /// # Errors
    /// They cannot be removed.
    pub fn forget(&self) -> io::Result<()> {
        remove(&self.recorded)
    }

    fn create(&self) -> io::Result<()> {
        DirBuilder::new()
            .mode(0o700)
            .recursive(true)
            .create(&self.folder)
    }
}

fn remove(folder: &Path) -> io::Result<()> {
    match fs::remove_dir_all(folder) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        Ok(()) | Err(_) => Ok(()),
    }
}

/// Adds the new names of files that the job has created and renamed within their folder without a report. Rust programs
/// often write a temporary file and rename it by a system call of their own (crate `tempfile`).
fn add_silent_renames(reports: &[Report], lines: &mut Vec<Line>) {
    let gone: HashSet<&Path> = reports
        .iter()
        .filter(|report| report.kind == b'g')
        .map(|report| &*report.path)
        .collect();
    let mut missing: HashMap<&Path, HashSet<Identity>> = HashMap::new();
    for report in reports {
        if let (Some(born), Some(folder)) = (report.identity, report.path.parent())
            && !gone.contains(&*report.path)
            && identity(&report.path) != Some(born)
        {
            missing.entry(folder).or_default().insert(born);
        }
    }
    for (folder, missing) in missing {
        let entries = folder.read_dir().into_iter().flatten().flatten();
        for path in entries.map(|entry| entry.path()) {
            if identity(&path).is_some_and(|found| missing.contains(&found)) {
                let change = JobChange::MovedTo;
                lines.push(Line::Job { path, change });
            }
        }
    }
}

/// Device (major number in the upper half), inode, and time of creation in nanoseconds. Unlike the inode alone, all three are
/// never used again for another file.
type Identity = [u64; 3];

/// Returns the identity of a file, not of a link's target; `None` if the file system does not know it.
fn identity(path: &Path) -> Option<Identity> {
    let found = path.symlink_metadata().ok()?;
    let device = major(found.dev()) << 32 | minor(found.dev());
    let born = found.created().ok()?.duration_since(UNIX_EPOCH).ok()?;
    Some([device, found.ino(), u64::try_from(born.as_nanos()).ok()?])
}

struct Report {
    kind: u8,
    /// Time of the first such change, of the job's monotonic clock: after a restore, it may be earlier than before.
    time_ns: u64,
    /// Identity of the created file in a report of kind `i`.
    identity: Option<Identity>,
    path: PathBuf,
}

impl Report {
    /// Parses a link's text: the kind, the time, for `i` three numbers that identify the file, the path.
    fn parse(text: &Path) -> Option<Self> {
        let (kind, rest) = text.as_os_str().as_bytes().split_first()?;
        let (time_ns, mut rest) = number(rest)?;
        let mut identity = None;
        if *kind == b'i' {
            let mut numbers = Identity::default();
            for one in &mut numbers {
                (*one, rest) = number(rest)?;
            }
            identity = Some(numbers);
        }
        let path = Path::new(OsStr::from_bytes(rest));
        Some(Self {
            kind: *kind,
            time_ns,
            identity,
            path: resolved(path, matches!(kind, b'o' | b'w' | b'i'))?,
        })
    }

    fn add_to(&self, lines: &mut Vec<Line>, since_ns: i64) {
        let mut add = |path: &Path, change| {
            let path = path.to_owned();
            lines.push(Line::Job { path, change });
        };
        match self.kind {
            b'c' | b'o' => add(&self.path, JobChange::Created),
            b'w' | b'l' if has_changed(&self.path, since_ns) => add(&self.path, JobChange::Changed),
            b'n' => {
                add(&self.path, JobChange::Created);
                self.add_contents(JobChange::Created, lines);
            }
            b'm' => {
                add(&self.path, JobChange::MovedTo);
                // A folder replaces an empty one only.
                self.add_contents(JobChange::Created, lines);
            }
            b'x' => {
                add(&self.path, JobChange::FolderGone);
                add(&self.path, JobChange::MovedTo);
                self.add_contents(JobChange::MovedTo, lines);
            }
            // The same for a file, which has nothing below.
            b'g' => add(&self.path, JobChange::FolderGone),
            _ => {}
        }
    }

    /// Adds the files and folders in a folder that was renamed: all of them have new paths.
    fn add_contents(&self, change: JobChange, lines: &mut Vec<Line>) {
        match everything_in(&self.path) {
            Ok(paths) => lines.extend(paths.into_iter().map(|path| Line::Job { path, change })),
            Err(error) => lines.push(Line::Gap {
                reason: format!("a folder was renamed: {error}"),
            }),
        }
    }
}

/// Parses the first number of a report; returns it and what follows.
fn number(text: &[u8]) -> Option<(u64, &[u8])> {
    let (digits, rest) = text.split_at_checked(DIGITS)?;
    let number = u64::from_str_radix(str::from_utf8(digits).ok()?, 16).ok()?;
    Some((number, rest))
}

/// Returns true if a file that was open for writing may have changed. Writes through a mapping do not change the times of
/// a file in memory.
fn has_changed(path: &Path, since_ns: i64) -> bool {
    let found = path.symlink_metadata();
    found.is_ok_and(|found| is_in_memory(path) || changed_ns(&found) >= since_ns - TICK_NS)
}

/// Returns a path without links, dots and double slashes; `None` if it cannot be known. `follows` is true if the call
/// followed a link at the path itself.
fn resolved(path: &Path, follows: bool) -> Option<PathBuf> {
    if follows && let Ok(found) = path.canonicalize() {
        return Some(found);
    }
    let (folder, name) = (path.parent()?, path.file_name()?);
    if let Ok(folder) = folder.canonicalize() {
        return Some(folder.join(name));
    }
    // The folder is gone.
    let is_plain = |part| matches!(part, Component::RootDir | Component::Normal(_));
    path.components()
        .all(is_plain)
        .then(|| path.components().collect())
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::os::unix::fs::symlink;

    use super::*;

    fn report(evidence: &Evidence, name: &str, kind: char, time: u64, path: &Path) {
        let text = format!("{kind}{time:016x}{}", path.display());
        symlink(text, evidence.folder.join(name)).unwrap();
    }

    fn taken(evidence: &Evidence, is_concern: impl Fn(&Path) -> bool, since_ns: i64) -> Vec<Line> {
        let all = RefCell::new(Vec::new());
        let record = |lines: &[Line]| {
            all.borrow_mut().extend_from_slice(lines);
            Ok(())
        };
        evidence.take(is_concern, since_ns, record).unwrap();
        all.into_inner()
    }

    fn job(path: &Path, change: JobChange) -> Line {
        let path = path.to_owned();
        Line::Job { path, change }
    }

    #[test]
    fn reports_become_lines_in_the_order_of_their_times() {
        let place = tempfile::tempdir().unwrap();
        let top = place.path().canonicalize().unwrap();
        let evidence = Evidence::of(&top);
        assert!(taken(&evidence, |_| true, 0).is_empty());
        evidence.begin().unwrap();
        let path = |name: &str| top.join(name);
        fs::write(path("new"), "x").unwrap();
        fs::create_dir(path("folder")).unwrap();
        fs::write(path("folder/x"), "x").unwrap();
        symlink("new", path("link")).unwrap();
        report(&evidence, "1", 'g', 9, &path("old"));
        report(&evidence, "2", 'o', 5, &path("./new"));
        report(&evidence, "8", 'c', 6, &path("link"));
        report(&evidence, "3", 'w', 7, &path("link"));
        report(&evidence, "4", 'n', 8, &path("folder"));
        report(&evidence, "5", 'c', 6, &path("ours/x"));
        report(&evidence, "6", 'c', 6, &path("gone/../x"));
        symlink("damaged", evidence.folder.join("7")).unwrap();
        let lines = taken(&evidence, |it| !it.starts_with(path("ours")), 0);
        let expected = [
            job(&path("new"), JobChange::Created),
            job(&path("link"), JobChange::Created),
            job(&path("new"), JobChange::Changed),
            job(&path("folder"), JobChange::Created),
            job(&path("folder/x"), JobChange::Created),
            job(&path("old"), JobChange::FolderGone),
        ];
        assert_eq!(lines, expected);
        assert!(taken(&evidence, |_| true, 0).is_empty());
        report(&evidence, "1", 'c', 1, &path("new"));
        evidence.clear().unwrap();
        assert!(taken(&evidence, |_| true, 0).is_empty());
    }

    #[test]
    fn reports_of_a_killed_supervisor_are_recorded_by_the_next() {
        let place = tempfile::tempdir().unwrap();
        let top = place.path().canonicalize().unwrap();
        let evidence = Evidence::of(&top);
        evidence.begin().unwrap();
        report(&evidence, "1", 'c', 1, &top.join("first"));
        let killed = evidence.take(|_| true, 0, |_| Err(io::ErrorKind::Interrupted.into()));
        assert_eq!(killed.unwrap_err().kind(), io::ErrorKind::Interrupted);
        report(&evidence, "1", 'c', 1, &top.join("second"));
        let expected = ["first", "second"].map(|name| job(&top.join(name), JobChange::Created));
        assert_eq!(taken(&evidence, |_| true, 0), expected);
        // Killed before it could make the new folder.
        report(&evidence, "1", 'c', 1, &top.join("third"));
        fs::rename(&evidence.folder, &evidence.taken).unwrap();
        let expected = [job(&top.join("third"), JobChange::Created)];
        assert_eq!(taken(&evidence, |_| true, 0), expected);
        assert!(evidence.is_used());
        assert!(taken(&evidence, |_| true, 0).is_empty());
    }

    #[test]
    fn contents_of_a_moved_folder_are_in_the_record() {
        let place = tempfile::tempdir().unwrap();
        let top = place.path().canonicalize().unwrap();
        let evidence = Evidence::of(&top);
        evidence.begin().unwrap();
        let path = |name: &str| top.join(name);
        for name in ["onto", "exchanged"] {
            fs::create_dir(path(name)).unwrap();
            fs::write(path(name).join("x"), "x").unwrap();
        }
        report(&evidence, "1", 'm', 1, &path("onto"));
        report(&evidence, "2", 'x', 2, &path("exchanged"));
        let expected = [
            job(&path("onto"), JobChange::MovedTo),
            job(&path("onto/x"), JobChange::Created),
            job(&path("exchanged"), JobChange::FolderGone),
            job(&path("exchanged"), JobChange::MovedTo),
            job(&path("exchanged/x"), JobChange::MovedTo),
        ];
        assert_eq!(taken(&evidence, |_| true, 0), expected);
    }

    #[test]
    fn a_created_file_is_found_after_an_unreported_rename() {
        let place = tempfile::tempdir().unwrap();
        let top = place.path().canonicalize().unwrap();
        let evidence = Evidence::of(&top);
        evidence.begin().unwrap();
        let path = |name: &str| top.join(name);
        for (number, name) in ["kept", "temporary", "removed"].iter().enumerate() {
            fs::write(path(name), "x").unwrap();
            let [device, inode, born] = identity(&path(name)).unwrap();
            let text = format!(
                "i{number:016x}{device:016x}{inode:016x}{born:016x}{}",
                path(name).display()
            );
            symlink(text, evidence.folder.join(name)).unwrap();
        }
        fs::rename(path("temporary"), path("final")).unwrap();
        fs::remove_file(path("removed")).unwrap();
        // The file of another program may get the number of the removed one.
        fs::write(path("foreign"), "x").unwrap();
        let expected = [job(&path("final"), JobChange::MovedTo)];
        assert_eq!(taken(&evidence, |_| true, 0), expected);
    }

    #[test]
    fn a_file_opened_without_a_change_is_not_the_jobs() {
        let place = tempfile::tempdir().unwrap();
        let top = place.path().canonicalize().unwrap();
        let evidence = Evidence::of(&top);
        evidence.begin().unwrap();
        fs::write(top.join("old"), "x").unwrap();
        let later_ns = changed_ns(&top.join("old").metadata().unwrap()) + 10 * TICK_NS;
        report(&evidence, "1", 'w', 1, &top.join("old"));
        assert!(taken(&evidence, |_| true, later_ns).is_empty());
    }
}

//! The record of changes by path and program: lines that the watcher writes to the store, and the resulting table.
//!
//! ```text
//! begin │ job /w/a created │ other /w/notes │ image 1 │ job /w/a changed │ … │ end
//! ```
//! Changes between two lines `image` happened between these images. A part without `end` was cut short because the
//! machine or the watcher stopped; the last changes may be missing.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::ffi::OsString;
use std::fs::File;
use std::io::{self, BufRead, BufReader, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use super::describe::FileId;
use super::file_set::modified_ns;
use super::marker;
use super::record_line::{JobChange, Line, append};
use crate::clock;
pub use evidence::Evidence;
pub(crate) use evidence::MOUNTS_VARIABLE;
pub use since::Since;

mod compaction;
mod evidence;
mod since;

/// Changes of one path. Times are counts of images: a path touched at 3 was touched after the third line `image`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Touch {
    /// First change by the job.
    pub first: usize,
    /// Last change by the job.
    pub last: usize,
    /// Last change of content or attributes by the job.
    pub changed: Option<usize>,
    /// True if the path did not exist before the job's first change.
    pub is_jobs_own: bool,
}

/// Time around the watcher's last update of the record in which changes may be missing: three intervals.
const ALIVE_MARGIN_NS: i64 = 3_000_000_000;
/// Limit on the time from the record's last update to an end that the supervisor saw, in which changes count as the job's.
const SEEN_MARGIN_NS: i64 = 10_000_000_000;
/// Limit on the time from the record's last update that has reached the disk until the machine lost its power.
const UNWRITTEN_NS: i64 = 60_000_000_000;

/// The record of a run.
#[derive(Debug, Default)]
pub struct Record {
    path: PathBuf,
    /// Bytes read from the file.
    read: u64,
    /// Lines read from the file, without those that the compacted form replaces.
    lines: usize,
    now: usize,
    images: HashMap<u64, usize>,
    /// Number of the last mark.
    mark: u64,
    touched: BTreeMap<PathBuf, Touch>,
    /// Times of the last changes of files for which the path is not enough: they have other names or lost that one.
    changed_files: HashMap<FileId, usize>,
    others: HashMap<PathBuf, usize>,
    created_by_others: HashMap<PathBuf, usize>,
    names: HashMap<PathBuf, HashSet<OsString>>,
    gaps: Vec<(usize, String)>,
    /// Spans of time in which changes are missing, with true if these count as the job's.
    cuts: Vec<(usize, (i64, i64), bool)>,
    /// Time by which the job has ended, in nanoseconds since 1970; `None` while it runs, or if that is not on record.
    ended_ns: Option<i64>,
    /// Paths that a rollback since has changed, or may have.
    rolled_back: HashSet<PathBuf>,
    /// Time of the image at which the job was stopped, until it runs again.
    stopped: Option<usize>,
    /// Time when it was, in nanoseconds since 1970; 0 if that is not known.
    stopped_ns: i64,
    boot: String,
    /// Mount points; the value is true if the file system is watched.
    mounts: BTreeMap<PathBuf, bool>,
    pub(super) watching: bool,
}

impl Record {
    /// Reads the record in the file `path`; empty if the file does not exist.
    ///
    /// # Errors
    /// The file cannot be read.
    pub fn open(path: &Path) -> io::Result<Self> {
        let mut record = Self {
            path: path.to_owned(),
            ..Self::default()
        };
        if let Some(base) = open(&record.base())? {
            record.read_lines(base, |_, _| ())?;
        }
        record.catch_up()?;
        Ok(record)
    }

    /// Returns the path of the file.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Removes all lines, because the job starts from the beginning.
    ///
    /// # Errors
    /// The file cannot be truncated.
    pub fn clear(&mut self) -> io::Result<()> {
        // A log without its base has a gap.
        marker::empty(&self.base())?;
        marker::empty(&self.path)?;
        *self = Self {
            path: std::mem::take(&mut self.path),
            ..Self::default()
        };
        Ok(())
    }

    /// Reads the lines added since the last read.
    ///
    /// # Errors
    /// The file cannot be read.
    pub fn catch_up(&mut self) -> io::Result<()> {
        let Some(mut file) = open(&self.path)? else {
            return Ok(());
        };
        if file.metadata()?.len() < self.read {
            self.gaps.push((self.now, "the log was removed".to_owned()));
            self.read = 0;
        }
        file.seek(SeekFrom::Start(self.read))?;
        self.read_lines(file, |record, bytes| {
            record.read += bytes as u64;
            record.lines += usize::from(bytes > 1);
        })
    }

    /// Adds the lines of a file and calls `count` with the bytes of each.
    fn read_lines(&mut self, file: File, count: impl Fn(&mut Self, usize)) -> io::Result<()> {
        let mut lines = BufReader::new(file);
        let mut text = Vec::new();
        loop {
            text.clear();
            let got = lines.read_until(b'\n', &mut text)?;
            if text.last() != Some(&b'\n') {
                // The line is incomplete. The next writer begins a new line after it.
                return Ok(());
            }
            count(self, got);
            match serde_json::from_slice(&text) {
                Ok(line) => self.add(line),
                // The line is the end of an incomplete one.
                Err(_) if text.len() == 1 => {}
                Err(_) => self.gaps.push((self.now, "a line is damaged".to_owned())),
            }
        }
    }

    fn add(&mut self, line: Line) {
        match line {
            Line::Begin { boot } => {
                if self.watching {
                    self.gaps
                        .push((self.now, "a watcher did not finish".to_owned()));
                }
                self.boot = boot;
                self.watching = true;
                self.runs();
                self.mounts.clear();
            }
            Line::Mounts { watched, unwatched } => {
                let all = watched.into_iter().map(|mount| (mount, true));
                self.mounts
                    .extend(all.chain(unwatched.into_iter().map(|mount| (mount, false))));
            }
            Line::Base { read } => self.read = read,
            Line::Touched { path, is_jobs_own } => {
                self.touch_as(path, |_, _| is_jobs_own);
            }
            // Those of its end.
            Line::Job { .. } | Line::File { .. } if self.is_stopped() => {}
            Line::Job { path, change } => self.job(path, change),
            Line::RollsBack { path, change } => {
                self.rolled_back.insert(path.clone());
                self.job(path, change);
            }
            Line::File { id } => {
                self.changed_files.insert(id, self.now);
            }
            Line::Other { path, created } => {
                // A name that the job has changed before existed, or was the job's.
                if created && !self.touched.contains_key(&path) {
                    self.created_by_others.insert(path.clone(), self.now);
                }
                self.others.insert(path, self.now);
            }
            Line::Names { folder, names } => {
                self.names.entry(folder).or_default().extend(names);
            }
            // Lines of older versions have no number.
            Line::Image {
                mark: mark @ 1.., ..
            } if mark < self.mark => {}
            Line::Image { id, mark } => {
                self.mark = self.mark.max(mark);
                self.now += 1;
                self.images.insert(id, self.now);
                self.runs();
            }
            Line::Ended { at_ns } => self.ended_ns = Some(at_ns),
            Line::Stopped { id, at_ns } => {
                self.stopped_ns = at_ns;
                let time = self.images.get(&id).copied();
                self.stopped = time.filter(|time| *time == self.now);
            }
            Line::Running => self.runs(),
            Line::Gap { reason } => self.gaps.push((self.now, reason)),
            Line::Cut {
                from_ns,
                until_ns,
                is_jobs,
            } => {
                self.watching = false;
                // A failed restore may have put files back since: that time is on record.
                self.ended_ns = self.ended_ns.max(Some(until_ns));
                self.cuts.push((self.now, (from_ns, until_ns), is_jobs));
            }
            Line::End => self.watching = false,
        }
    }

    fn runs(&mut self) {
        self.stopped = None;
        self.ended_ns = None;
        self.rolled_back.clear();
    }

    /// Removes an incomplete last line, which a power failure has left. No watcher may be running.
    ///
    /// # Errors
    /// The file cannot be truncated.
    pub fn end_last_line(&self) -> io::Result<()> {
        match File::options().write(true).open(&self.path) {
            Ok(file) if file.metadata()?.len() > self.read => {
                let modified = file.metadata()?.modified()?;
                file.set_len(self.read)?;
                // The time shows how long the watcher was running.
                file.set_modified(modified)
            }
            Ok(_) => Ok(()),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// Records that the watcher ended with the job, if its last line is missing. The machine may have stopped, or
    /// everything in a container was killed. The watcher updates the time of the record as long as it is running.
    /// `seen_ns` is the time at which this supervisor saw the job's end.
    ///
    /// # Errors
    /// The record cannot be written.
    pub fn end_cut(&mut self, seen_ns: Option<i64>) -> io::Result<()> {
        if !self.watching {
            return Ok(());
        }
        let mut alive_ns = modified_ns(&std::fs::metadata(&self.path)?);
        let (until_ns, is_jobs) = match seen_ns {
            Some(seen_ns) => {
                // A compaction may have changed the file's time since.
                alive_ns = alive_ns.min(seen_ns);
                (seen_ns, seen_ns - alive_ns <= SEEN_MARGIN_NS)
            }
            // After a power failure, the record's time is one that had reached the disk.
            None if self.boot != clock::boot() => {
                (clock::boot_ns().min(alive_ns + UNWRITTEN_NS), true)
            }
            None => (alive_ns + ALIVE_MARGIN_NS, false),
        };
        let cut = Line::Cut {
            from_ns: alive_ns - ALIVE_MARGIN_NS,
            until_ns,
            is_jobs,
        };
        append(&self.path, &[cut])?;
        self.catch_up()
    }

    fn job(&mut self, path: PathBuf, change: JobChange) {
        if change == JobChange::FolderGone {
            let below: Vec<PathBuf> = self.below(&path).cloned().collect();
            for path in below {
                self.touch(path, JobChange::Gone);
            }
        }
        self.touch(path, change);
    }

    fn below<'a>(&'a self, folder: &'a Path) -> impl Iterator<Item = &'a PathBuf> {
        let from = self.touched.range(folder.to_owned()..);
        from.map(|(path, _)| path)
            .take_while(move |path| path.starts_with(folder))
    }

    fn touch(&mut self, path: PathBuf, change: JobChange) {
        let now = self.now;
        // The file may have another name by the time its creation is read, if its folder was renamed.
        let touch = self.touch_as(path, |record, path| {
            change == JobChange::Created || !record.existed(path)
        });
        if change == JobChange::Changed {
            touch.changed = Some(now);
        }
    }

    fn touch_as(
        &mut self,
        path: PathBuf,
        is_jobs_own: impl FnOnce(&Self, &Path) -> bool,
    ) -> &mut Touch {
        let now = self.now;
        let is_jobs_own = !self.touched.contains_key(&path) && is_jobs_own(self, &path);
        let touch = self.touched.entry(path).or_insert(Touch {
            first: now,
            last: now,
            changed: None,
            is_jobs_own,
        });
        touch.last = now;
        touch
    }

    /// Returns true if a path that the job has not touched may have existed.
    fn existed(&self, path: &Path) -> bool {
        if self.others.contains_key(path) {
            return true;
        }
        let (Some(folder), Some(name)) = (path.parent(), path.file_name()) else {
            return true;
        };
        // A folder created by the job was empty, unless another program created a part of the path.
        for above in folder.ancestors() {
            if self.others.contains_key(above) {
                break;
            }
            if self.touched.get(above).is_some_and(|it| it.is_jobs_own) {
                return false;
            }
        }
        self.names
            .get(folder)
            .is_none_or(|names| names.contains(name))
    }

    /// Returns all paths that the job has touched, with their changes.
    pub fn touched(&self) -> impl Iterator<Item = (&Path, Touch)> {
        self.touched
            .iter()
            .map(|(path, touch)| (path.as_path(), *touch))
    }

    /// Returns the paths that other programs have touched, with the times of their last changes.
    pub fn touched_by_others(&self) -> impl Iterator<Item = (&Path, usize)> {
        let others = self.others.iter();
        others.map(|(path, last)| (path.as_path(), *last))
    }

    /// Returns the job's changes of a path.
    #[must_use]
    pub fn touch_of(&self, path: &Path) -> Option<&Touch> {
        self.touched.get(path)
    }

    /// Returns the time of the last change of a path, by the job or another program.
    #[must_use]
    pub fn last_change(&self, path: &Path) -> Option<usize> {
        let by_job = self.touched.get(path).map(|touch| touch.last);
        by_job.max(self.others.get(path).copied())
    }

    /// Returns the number of the last mark.
    pub(super) fn mark(&self) -> u64 {
        self.mark
    }

    /// Returns the time of an image; the beginning for an image without a line.
    #[must_use]
    pub fn time_of(&self, image: u64) -> usize {
        self.images.get(&image).copied().unwrap_or(0)
    }

    /// Returns the mount point of a file system that cannot be watched, if the path is on one.
    #[must_use]
    pub fn unwatched_mount(&self, path: &Path) -> Option<&Path> {
        let mut mounts = path
            .ancestors()
            .filter_map(|mount| self.mounts.get_key_value(mount));
        let (mount, is_watched) = mounts.next()?;
        (!is_watched).then_some(mount.as_path())
    }

    /// Returns true if a watcher watches the file system of the path.
    #[must_use]
    pub fn is_watched(&self, path: &Path) -> bool {
        !self.mounts.is_empty() && self.unwatched_mount(path).is_none()
    }

    /// Returns the mount points of file systems that cannot be watched.
    pub fn unwatched_mounts(&self) -> impl Iterator<Item = &Path> {
        let unwatched = self.mounts.iter().filter(|(_, is_watched)| !**is_watched);
        unwatched.map(|(mount, _)| mount.as_path())
    }

    /// Returns true if a file system that cannot be watched is mounted at this path.
    #[must_use]
    pub fn is_unwatched_mount(&self, path: &Path) -> bool {
        self.mounts.get(path).is_some_and(|is_watched| !is_watched)
    }

    /// Returns the reason why changes from a time on may be missing.
    #[must_use]
    pub fn gap_since(&self, time: usize) -> Option<String> {
        let mut gaps = self.gaps.iter();
        let gap = gaps.find(|(when, _)| *when >= time);
        gap.map(|(_, reason)| reason.clone())
    }

    /// Returns true if changes since the last image may be missing.
    #[must_use]
    pub fn has_gap(&self) -> bool {
        self.gap_since(self.now).is_some()
    }

    /// Returns true if the record contains the mark of an image.
    #[must_use]
    pub fn has(&self, image: u64) -> bool {
        self.images.contains_key(&image)
    }

    /// Returns the time by which the job has ended; `None` if that is not on record.
    #[must_use]
    pub fn ended_ns(&self) -> Option<i64> {
        self.ended_ns
    }

    /// Returns true if the job was stopped at the last image and has not run since.
    #[must_use]
    pub fn is_stopped(&self) -> bool {
        self.stopped.is_some()
    }

    /// Returns the changes since an image.
    #[must_use]
    pub fn since(&self, image: u64) -> Since<'_> {
        Since {
            record: self,
            image: self.images.get(&image).copied(),
        }
    }
}

/// Returns the paths that the job has changed, according to the record in a file.
///
/// # Errors
/// The record cannot be read.
pub fn changed_by_job(record: &Path) -> io::Result<Vec<PathBuf>> {
    Ok(Record::open(record)?.touched.into_keys().collect())
}

/// Opens a file for reading, if it exists.
fn open(path: &Path) -> io::Result<Option<File>> {
    match File::open(path) {
        Ok(file) => Ok(Some(file)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests;

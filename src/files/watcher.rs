#![allow(unsafe_code, reason = "descriptors are inherited by number")]
//! The watcher of a job's files: a child of the sandbox's pid 1, outside of the job's tree.
//!
//! The watcher is in the job's PID namespace. The kernel reports processes outside of the namespace as pid 0, and the
//! job's processes by their number even after they have exited. The watcher writes lines of the record, each once
//! between two images, and exits when pid 1 tells it to on its standard input.

use std::collections::{HashSet, VecDeque};
use std::ffi::OsString;
use std::fs::{File, Metadata};
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, FromRawFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::SigSet;

use super::describe::FileId;
use super::fanotify::{Batch, Change, Event, FileKey, Found, Group};
use super::file_set::{TICK_NS, born_ns, changed_ns, modified_ns};
use super::folder_scan::everything_in;
use super::marker::{DONE, REQUEST_BYTES, Request};
use super::marks::watch_all;
use super::passing::Passing;
use super::record_line::{JobChange, Line, Log, listed_folders};
use crate::clock;

/// First argument that makes the binary a watcher. Paths follow below which nothing is the job's.
pub const WATCHER_ARGUMENT: &str = "__watch";
/// Descriptor of the record. The next number is the connection to the supervisor.
pub const LOG_DESCRIPTOR: RawFd = 200;
/// Pid 1 of the sandbox, which changes no file of the job.
const INIT: i32 = 1;
/// Interval between two updates of the record's time, at which new lines are made durable.
const ALIVE_EVERY: Duration = Duration::from_secs(1);
/// The same if there are always new changes to read.
const ALIVE_AT_LEAST_EVERY: Duration = Duration::from_secs(5);
/// Limit on the reads for a mark, so that it is answered on a busy machine.
const DRAIN_READS_MAX: usize = 10_000;
/// Limit on the listed entries of the working folder before the job starts.
const LISTED_MAX: usize = 50_000;
/// Limit on the files that are remembered as recorded since the last mark.
const FILES_MAX: usize = 65_536;
/// Prefixes of names that CRIU creates and removes beside the job's files and in `/tmp`.
const CRIU_PREFIXES: [&[u8]; 2] = [b"link_remap.", b".criu."];

/// Watches until pid 1 has ended the job. Nothing below the paths `ours` is the job's.
#[must_use]
pub fn main(ours: Vec<PathBuf>) -> ExitCode {
    // Signals sent to all processes of the sandbox are for the job.
    let _ = SigSet::all().thread_block();
    let _ = nix::sys::prctl::set_name(c"ckpt-run-files");
    // SAFETY: pid 1 has put both descriptors there for this process alone.
    let (log, socket) = unsafe {
        (
            File::from_raw_fd(LOG_DESCRIPTOR),
            UnixStream::from_raw_fd(LOG_DESCRIPTOR + 1),
        )
    };
    let mut log = Log::new(log);
    let result =
        Watcher::begin(ours, &mut log).and_then(|mut watcher| watcher.run(&socket, &mut log));
    if let Err(error) = result {
        log.add(&Line::Gap {
            reason: format!("cannot watch the file systems: {error}"),
        });
        let _ = log.flush();
        return ExitCode::FAILURE;
    }
    let _ = log.sync();
    ExitCode::SUCCESS
}

struct Watcher {
    group: Group,
    mounts: File,
    ours: Vec<PathBuf>,
    /// Changes recorded since the last mark.
    written: HashSet<(PathBuf, Option<JobChange>)>,
    /// Files that the job has changed since the last mark; limited, so some may be recorded twice.
    files: HashSet<FileKey>,
    /// Folders in which the job has changed something.
    folders: HashSet<PathBuf>,
    passing: Passing,
    /// Time of the last image.
    since_ns: i64,
    /// Time of the last mark.
    marked_ns: i64,
}

impl Watcher {
    fn begin(ours: Vec<PathBuf>, log: &mut Log) -> io::Result<Self> {
        let used = ours.iter().cloned().chain(std::env::current_dir());
        let mut group = Group::new(used.collect())?;
        let mounts = watch_all(&mut group)?;
        log.begin_line();
        let boot = clock::boot().to_owned();
        log.add(&Line::Begin { boot });
        log.add(&mounts);
        let mut watcher = Self {
            group,
            mounts: File::open("/proc/self/mountinfo")?,
            ours,
            written: HashSet::new(),
            files: HashSet::new(),
            folders: HashSet::new(),
            passing: Passing::default(),
            since_ns: clock::unix_ns() - TICK_NS,
            marked_ns: clock::unix_ns(),
        };
        watcher.list_folders(log);
        for folder in listed_folders(log.file())? {
            watcher.list_new(&folder, log);
        }
        log.flush()?;
        // After a power failure, the record must show that the job was running.
        log.sync()?;
        Ok(watcher)
    }

    /// Lists the names in the working folder and below. A listing at the job's first change would be too late, as the job may
    /// create and rename files faster.
    fn list_folders(&mut self, log: &mut Log) {
        let mut left = LISTED_MAX;
        let mut folders: VecDeque<PathBuf> = std::env::current_dir().into_iter().collect();
        while let Some(folder) = folders.pop_front() {
            let mut names = Vec::new();
            for entry in folder.read_dir().into_iter().flatten().flatten() {
                left -= 1;
                if left == 0 {
                    return;
                }
                if entry.file_type().is_ok_and(|kind| kind.is_dir()) && !self.is_ours(&entry.path())
                {
                    folders.push_back(entry.path());
                }
                names.push(entry.file_name());
            }
            self.list(folder, names, log);
        }
    }

    /// Records the names in a folder of which they are not recorded yet.
    fn list_new(&mut self, folder: &Path, log: &mut Log) {
        if !self.folders.contains(folder) {
            self.list(folder.to_owned(), names_in(folder), log);
        }
    }

    /// Records the names in a folder.
    fn list(&mut self, folder: PathBuf, names: Vec<OsString>, log: &mut Log) {
        log.add(&Line::Names {
            folder: folder.clone(),
            names: names.clone(),
        });
        self.group.know(&folder);
        self.passing.list(&folder, names.into_iter());
        self.folders.insert(folder);
    }

    fn is_ours(&self, path: &Path) -> bool {
        self.ours.iter().any(|ours| path.starts_with(ours))
    }

    fn run(&mut self, socket: &UnixStream, log: &mut Log) -> io::Result<()> {
        let stdin = io::stdin();
        // The parent waits for this answer: from here on, no change is missed.
        (&*socket).write_all(&[DONE])?;
        let mut alive = clock::now();
        loop {
            let mut watched = [
                PollFd::new(self.group.as_fd(), PollFlags::POLLIN),
                PollFd::new(socket.as_fd(), PollFlags::POLLIN),
                PollFd::new(stdin.as_fd(), PollFlags::POLLIN),
                PollFd::new(self.mounts.as_fd(), PollFlags::POLLPRI),
            ];
            let left = ALIVE_EVERY.saturating_sub(alive.elapsed());
            let limit = PollTimeout::try_from(left).unwrap_or(PollTimeout::ZERO);
            match poll(&mut watched, limit) {
                Ok(_) | Err(Errno::EINTR) => {}
                Err(errno) => return Err(errno.into()),
            }
            let [changed, asked, ends, mounted] =
                watched.map(|one| one.revents().is_some_and(|events| !events.is_empty()));
            let is_caught_up =
                !changed || alive.elapsed() >= ALIVE_AT_LEAST_EVERY && self.drain(log)?;
            if alive.elapsed() >= ALIVE_EVERY && is_caught_up {
                self.passing.caught_up();
                self.settle(|passing| passing.settled(clock::now()), log);
                log.flush()?;
                log.sign_of_life()?;
                alive = clock::now();
            }
            if mounted {
                self.watch_new_mounts(log)?;
            }
            if changed {
                self.take_once(log)?;
            }
            if asked {
                self.mark(socket, log)?;
            }
            if ends {
                self.drain(log)?;
                if !is_told_to_end(&stdin)? {
                    return self.run_until_killed(log);
                }
                self.settle(Passing::all, log);
                let at_ns = clock::unix_ns();
                log.add(&Line::Ended { at_ns });
                log.add(&Line::End);
                return log.flush();
            }
        }
    }

    /// Records changes until the kernel kills this process and the job, after pid 1 was killed. The kernel first closes pid
    /// 1's end of the pipe, so that the job may still be running: the record must not have the line of its end.
    fn run_until_killed(&mut self, log: &mut Log) -> io::Result<()> {
        loop {
            self.settle(Passing::all, log);
            log.flush()?;
            let mut changed = [PollFd::new(self.group.as_fd(), PollFlags::POLLIN)];
            let _ = poll(&mut changed, PollTimeout::NONE);
            self.drain(log)?;
        }
    }

    fn watch_new_mounts(&mut self, log: &mut Log) -> io::Result<()> {
        let mut text = String::new();
        // The next change is reported only after the file was read to its end.
        self.mounts = File::open("/proc/self/mountinfo")?;
        let _ = (&self.mounts).read_to_string(&mut text);
        log.add(&watch_all(&mut self.group)?);
        Ok(())
    }

    fn take_once(&mut self, log: &mut Log) -> io::Result<bool> {
        let Some(batch) = self.group.read()? else {
            return Ok(false);
        };
        self.take(batch, log);
        log.flush()?;
        Ok(true)
    }

    /// Returns true if all changes so far were read.
    fn drain(&mut self, log: &mut Log) -> io::Result<bool> {
        for _ in 0..DRAIN_READS_MAX {
            if !self.take_once(log)? {
                return Ok(true);
            }
        }
        Ok(false)
    }

    fn mark(&mut self, socket: &UnixStream, log: &mut Log) -> io::Result<()> {
        let Some(request) = asked(socket) else {
            wait_for_end();
            return Ok(());
        };
        self.drain(log)?;
        self.settle(Passing::all, log);
        log.add(&Line::Image {
            id: request.image,
            mark: request.mark,
        });
        log.flush()?;
        let now_ns = clock::unix_ns();
        // The job may be frozen until this answer, and the lists are long.
        let answered = (&*socket).write_all(&[DONE]);
        self.written.clear();
        self.files.clear();
        self.marked_ns = now_ns;
        // The image of this mark may fail. The newest one may have the time of another machine.
        self.since_ns = self.since_ns.max(request.newest_ns.min(now_ns) - TICK_NS);
        if answered.is_err() {
            wait_for_end();
        }
        Ok(())
    }

    fn take(&mut self, batch: Batch, log: &mut Log) {
        for event in batch.events {
            self.take_event(&event, log);
        }
        for nameless in batch.nameless {
            if nameless.pid != INIT {
                self.is_change(nameless.change, Some(&nameless.file), None, log);
            }
        }
        if let Some(reason) = batch.lost {
            log.add(&Line::Gap { reason });
        }
    }

    fn take_event(&mut self, event: &Event, log: &mut Log) {
        if event.pid == INIT
            || self.is_ours(&event.folder)
            || CRIU_PREFIXES
                .iter()
                .any(|prefix| event.name.as_bytes().starts_with(prefix))
        {
            return;
        }
        // An event for a folder's own mode or times has the name ".".
        let path = match event.name.as_bytes() {
            b"." | b"" => event.folder.clone(),
            _ => event.folder.join(&event.name),
        };
        if event.pid == 0 {
            self.passing.know(&path);
            let theirs = event.change != Change::Closed;
            let created = matches!(event.change, Change::Created | Change::MovedTo);
            if theirs && self.written.insert((path.clone(), None)) {
                log.add(&Line::Other { path, created });
            }
            return;
        }
        if !self.is_change(event.change, event.file.as_ref(), Some(&path), log) {
            return;
        }
        self.list_new(&event.folder, log);
        let change = JobChange::of(event.change, event.is_folder);
        if event.is_folder && matches!(event.change, Change::Gone | Change::MovedTo) {
            self.settle(Passing::all, log);
            self.passing.forget(&path);
        } else if !event.is_folder && self.passing.take(&path, change, clock::now()) {
            return;
        }
        self.add_change(path.clone(), change, log);
        if event.is_folder && event.change == Change::MovedTo {
            // All files in the folder have a new path.
            match everything_in(&path) {
                Ok(below) => {
                    for path in below {
                        self.add_change(path, change, log);
                    }
                }
                Err(error) => log.add(&Line::Gap {
                    reason: format!("a folder was renamed: {error}"),
                }),
            }
        }
    }

    /// Records changes of files that were held back.
    fn settle(
        &mut self,
        which: impl Fn(&mut Passing) -> Vec<(PathBuf, Vec<JobChange>)>,
        log: &mut Log,
    ) {
        for (path, changes) in which(&mut self.passing) {
            for change in changes {
                self.add_change(path.clone(), change, log);
            }
        }
    }

    fn add_change(&mut self, path: PathBuf, change: JobChange, log: &mut Log) {
        self.passing.know(&path);
        if self.written.insert((path.clone(), Some(change))) {
            log.add(&Line::Job { path, change });
        }
    }

    /// Returns true if an event by the job, with a path or without, is to be recorded. If the file has other names, or no
    /// longer has this path, also records the file itself: the change counts for all of its names.
    fn is_change(
        &mut self,
        change: Change,
        file: Option<&FileKey>,
        path: Option<&Path>,
        log: &mut Log,
    ) -> bool {
        // A name that was being removed can have passed for the only one of a changed file.
        if let (Change::Gone, Some(file)) = (change, file)
            && self.files.contains(file)
            && let Ok(Some(found)) = self.group.find(file)
            && !self.is_newer(&found)
        {
            let id = FileId::of(&found.about);
            log.add(&Line::File { id });
        }
        let Some(file) = file.filter(|_| matches!(change, Change::Changed | Change::Closed)) else {
            return true;
        };
        if self.files.contains(file) {
            return true;
        }
        let found = match self.group.find(file) {
            Ok(Some(found)) => found,
            // Other events report that its names have gone.
            Ok(None) => return false,
            // The file system was unmounted.
            Err(error) if error.kind() == io::ErrorKind::NotFound => return true,
            Err(error) => {
                let reason = format!("cannot find a changed file: {error}");
                log.add(&Line::Gap { reason });
                return true;
            }
        };
        if change == Change::Closed && !self.has_changed(&found) {
            return false;
        }
        let is_only = |path: &Path| {
            let there = path.symlink_metadata();
            let has_one_name = |about: &Metadata| about.nlink() == 1;
            let is_same = |there: &Metadata| FileId::of(there) == FileId::of(&found.about);
            has_one_name(&found.about)
                && there.is_ok_and(|there| has_one_name(&there) && is_same(&there))
        };
        if !self.is_newer(&found) && !path.is_some_and(is_only) {
            let id = FileId::of(&found.about);
            log.add(&Line::File { id });
        }
        if self.files.len() >= FILES_MAX {
            self.files.clear();
        }
        self.files.insert(file.clone());
        true
    }

    /// Returns true for a file that is in no image, and whose names are recorded as created.
    fn is_newer(&self, found: &Found) -> bool {
        (self.marked_ns..=clock::unix_ns()).contains(&born_ns(&found.about))
    }

    /// Returns true if a closed file may have changed since the last image. Writes through a mapping cause no event.
    fn has_changed(&self, found: &Found) -> bool {
        let changed_ns = changed_ns(&found.about).max(modified_ns(&found.about));
        // Writes through a mapping do not change the times of a file in memory.
        found.is_in_memory || changed_ns >= self.since_ns
    }
}

fn names_in(folder: &Path) -> Vec<OsString> {
    let entries = folder.read_dir().into_iter().flatten().flatten();
    entries.map(|entry| entry.file_name()).collect()
}

/// Returns the next request; `None` if the supervisor has exited.
fn asked(mut socket: &UnixStream) -> Option<Request> {
    let mut request = [0; REQUEST_BYTES];
    // A supervisor that was killed with an unread answer causes an error instead of an end.
    socket.read_exact(&mut request).ok()?;
    Some(Request::from_bytes(request))
}

/// Waits until there is something to read from standard input, after the supervisor has exited: pid 1 ends the job.
fn wait_for_end() {
    let stdin = io::stdin();
    let mut ends = [PollFd::new(stdin.as_fd(), PollFlags::POLLIN)];
    while poll(&mut ends, PollTimeout::NONE) == Err(Errno::EINTR) {}
}

/// Returns true if pid 1 has written a byte before the end: the job has ended.
fn is_told_to_end(mut stdin: impl Read) -> io::Result<bool> {
    Ok(stdin.read(&mut [0])? > 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_byte_from_pid_1_means_that_the_job_has_ended() {
        assert!(is_told_to_end(&[DONE][..]).unwrap());
        assert!(!is_told_to_end(&[][..]).unwrap());
    }

    #[test]
    fn killed_supervisor_with_an_unread_answer_has_exited() {
        let (socket, supervisor) = UnixStream::pair().unwrap();
        (&socket).write_all(&[DONE]).unwrap();
        drop(supervisor);
        assert!(asked(&socket).is_none());
    }
}

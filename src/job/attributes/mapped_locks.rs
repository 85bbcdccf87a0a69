//! Record locks (`fcntl`) on files that their process has mapped shared. `SQLite` has such ones on the index of its log.
//!
//! CRIU (4.2) takes them before it maps the files, and closes its descriptors of these files afterwards: the kernel then
//! removes all record locks of the process on the file. They are taken again before the restored processes run.

use std::collections::HashSet;

use nix::libc;
use procfs::process::{MMPermissions, MMapPath, MemoryMap};

use crate::job::descriptors::{Descriptor, Descriptors};
use crate::job::tree;

/// A record lock of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MappedLock {
    /// Pid as the job sees it.
    pub pid: i32,
    /// Descriptor of the file.
    pub descriptor: i32,
    /// True if the others must not read.
    pub is_exclusive: bool,
    /// First byte.
    pub start: i64,
    /// Number of bytes; 0 up to the end of the file, however long it becomes.
    pub len: i64,
}

impl MappedLock {
    /// Returns the lock as words of a `struct flock`: kind and origin, first byte, length, and nothing.
    #[must_use]
    pub fn range(&self) -> [i64; 4] {
        // The origin is the beginning of the file (`SEEK_SET`, 0).
        let kind = if self.is_exclusive {
            libc::F_WRLCK
        } else {
            libc::F_RDLCK
        };
        [kind.into(), self.start, self.len, 0]
    }
}

/// Returns the locks of frozen processes.
#[must_use]
pub fn mapped_locks(open: &[Descriptors]) -> Vec<MappedLock> {
    open.iter().flat_map(of_process).collect()
}

fn of_process(open: &Descriptors) -> Vec<MappedLock> {
    let files = open.all.iter().filter(|one| one.target.is_absolute());
    let held = files.flat_map(|one| held_by(one, open.process.pid).map(move |lock| (one, lock)));
    let mut held = held.peekable();
    if held.peek().is_none() {
        return Vec::new();
    }
    let maps = tree::maps(open.process.host_pid).into_iter().flatten();
    let mapped: HashSet<String> = maps.filter_map(|map| shared_file(&map)).collect();
    // Each descriptor of a file shows all locks on it.
    let mut seen = HashSet::new();
    let is_lost = |(file, lock): &(&Descriptor, MappedLock)| {
        let name = file.target.to_string_lossy();
        mapped.contains(&*name) && seen.insert((name.into_owned(), lock.start, lock.len))
    };
    let lost = held.filter(is_lost);
    lost.map(|(_, lock)| lock).collect()
}

fn shared_file(map: &MemoryMap) -> Option<String> {
    let is_shared = map.perms.contains(MMPermissions::SHARED);
    match &map.pathname {
        MMapPath::Path(path) if is_shared => Some(path.to_string_lossy().into_owned()),
        _ => None,
    }
}

/// Returns the locks that a process has on an open file and can take by this descriptor.
fn held_by(file: &Descriptor, pid: i32) -> impl Iterator<Item = MappedLock> {
    let mut lines = file.info().lines();
    let access = lines.find_map(|line| line.strip_prefix("flags:"));
    let access = access.and_then(|flags| u32::from_str_radix(flags.trim(), 8).ok());
    let locks = file.info().lines().filter_map(parse);
    locks.filter_map(move |(is_exclusive, start, len)| {
        // Reading, writing, both.
        let needed = if is_exclusive { [1, 2] } else { [0, 2] };
        needed.contains(&(access? & 3)).then_some(MappedLock {
            pid,
            descriptor: file.number,
            is_exclusive,
            start,
            len,
        })
    })
}

/// Parses a line of `/proc/PID/fdinfo/FD` about a record lock that is held: whether it is exclusive, first byte, length.
fn parse(line: &str) -> Option<(bool, i64, i64)> {
    let line = line.strip_prefix("lock:")?;
    let words: Vec<&str> = line.split_whitespace().collect();
    let [_, "POSIX", _, kind, _, _, start, end] = words[..] else {
        return None;
    };
    let start: i64 = start.parse().ok()?;
    let len = match end {
        "EOF" => 0,
        end => end
            .parse::<i64>()
            .ok()?
            .checked_sub(start)?
            .checked_add(1)?,
    };
    Some((kind == "WRITE", start, len))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_about_record_locks_are_read() {
        for (line, expected) in [
            (
                "lock:\t1: POSIX  ADVISORY  WRITE 14193 fe:00:1003 0 EOF",
                Some((true, 0, 0)),
            ),
            (
                "lock:\t2: POSIX  ADVISORY  READ 14193 fe:00:1003 120 127",
                Some((false, 120, 8)),
            ),
            ("lock:\t1: OFDLCK ADVISORY  WRITE -1 fe:00:1003 0 EOF", None),
            (
                "lock:\t1: FLOCK  ADVISORY  WRITE 14193 fe:00:1003 0 EOF",
                None,
            ),
            ("flags:\t02120002", None),
        ] {
            assert_eq!(parse(line), expected, "{line}");
        }
    }
}

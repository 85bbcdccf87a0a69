//! Facts about the job's processes in an image: parents, command lines, and memory by kind.
//!
//! The facts are read from `/proc` while the job is frozen. They inform the user; no restore depends on them.

use std::collections::HashMap;
use std::fs::File;
use std::io::Read;

use serde::{Deserialize, Serialize};

use super::tree::{self, Process};
use crate::checked;

/// Limit on the described processes. Of a larger job, the first ones of the tree are described.
const DESCRIBED_MAX: usize = 512;
/// Limit on the recorded bytes of a command line, enough for a few lines of a terminal.
const COMMAND_BYTES_MAX: u64 = 1024;
/// Limit on the bytes of all command lines together. JSON may encode each byte as six, and all facts of an image are
/// limited to 32 MiB.
const COMMANDS_BYTES_MAX: u64 = 256 << 10;
/// Limit on the recorded words of a command line.
const WORDS_MAX: usize = 64;
/// The unit of `/proc/PID/status`.
const KIB: u64 = 1024;

/// A process of the job at a snapshot.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcessAccount {
    /// Pid as the job sees it.
    #[serde(deserialize_with = "checked::pid")]
    pub pid: i32,
    /// Pid of the parent; 0 for the first process of the tree.
    pub parent: i32,
    /// Number of threads.
    pub threads: u64,
    /// The kernel's name for the process.
    pub name: String,
    /// The command line; empty for a process that has overwritten it, and for a zombie.
    pub arguments: Vec<String>,
    /// True if the command line is truncated.
    #[serde(default)]
    pub cut: bool,
    /// The process's memory.
    pub memory: MemoryUse,
}

/// Resident memory by kind, in bytes. Pages shared by several processes count for each of them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemoryUse {
    /// Anonymous memory: heaps, stacks, and data that the driver moved there from the GPU.
    pub anonymous: u64,
    /// Memory backed by files: programs, libraries, mapped data.
    pub file: u64,
    /// Shared memory: shared mappings without a file, tmpfs, System V.
    pub shared: u64,
    /// Swapped-out memory.
    pub swapped: u64,
}

impl MemoryUse {
    /// Returns the total of resident and swapped memory.
    #[must_use]
    pub fn and(self, other: Self) -> Self {
        Self {
            anonymous: self.anonymous.saturating_add(other.anonymous),
            file: self.file.saturating_add(other.file),
            shared: self.shared.saturating_add(other.shared),
            swapped: self.swapped.saturating_add(other.swapped),
        }
    }
}

/// Describes `processes`, parents before children. A process that has exited is left out.
#[must_use]
pub fn account(processes: &[Process]) -> Vec<ProcessAccount> {
    let pids: HashMap<i32, i32> = processes
        .iter()
        .map(|process| (process.host_pid, process.pid))
        .collect();
    let mut room = COMMANDS_BYTES_MAX;
    let described = processes.iter().take(DESCRIBED_MAX);
    described
        .filter_map(|process| describe(*process, &pids, &mut room))
        .collect()
}

/// Describes a process; `room` is the space left for command lines.
fn describe(process: Process, pids: &HashMap<i32, i32>, room: &mut u64) -> Option<ProcessAccount> {
    let status = tree::status(process.host_pid).ok()?;
    let bytes = |kib: Option<u64>| kib.unwrap_or(0).saturating_mul(KIB);
    let line = command_line(process.host_pid);
    let (arguments, cut) = words(&line, COMMAND_BYTES_MAX.min(*room));
    *room -= (line.len() as u64).min(COMMAND_BYTES_MAX).min(*room);
    Some(ProcessAccount {
        pid: process.pid,
        parent: pids.get(&status.ppid).copied().unwrap_or(0),
        threads: status.threads,
        name: status.name,
        arguments,
        cut,
        memory: MemoryUse {
            anonymous: bytes(status.rssanon),
            file: bytes(status.rssfile),
            shared: bytes(status.rssshmem),
            swapped: bytes(status.vmswap),
        },
    })
}

/// Returns the command line of a process (a host pid), up to one byte more than is recorded.
fn command_line(pid: i32) -> Vec<u8> {
    let mut line = Vec::new();
    let read = File::open(format!("/proc/{pid}/cmdline"))
        .and_then(|file| file.take(COMMAND_BYTES_MAX + 1).read_to_end(&mut line));
    if let Err(error) = read {
        tracing::debug!(pid, %error, "cannot read the command line");
    }
    line
}

/// Splits a command line at its zero bytes, within the limits. The flag is true if the line is truncated.
fn words(line: &[u8], bytes_max: u64) -> (Vec<String>, bool) {
    let kept = usize::try_from(bytes_max).map_or(line.len(), |max| max.min(line.len()));
    let all = line[..kept].strip_suffix(b"\0").unwrap_or(&line[..kept]);
    let is_cut = kept < line.len();
    if all.is_empty() {
        return (Vec::new(), is_cut);
    }
    let mut words = all.split(|byte| *byte == 0);
    let first = words.by_ref().take(WORDS_MAX);
    let first = first.map(|word| String::from_utf8_lossy(word).into_owned());
    (first.collect(), is_cut || words.next().is_some())
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};

    use super::super::tree::tree;
    use super::*;

    #[test]
    fn a_child_is_described_with_parent_words_and_memory() {
        let mut child = Command::new("cat")
            .args(["-u", "--", "-"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        // The child answers once it runs the new program.
        std::io::Write::write_all(child.stdin.as_mut().unwrap(), b"x").unwrap();
        child.stdout.as_mut().unwrap().read_exact(&mut [0]).unwrap();
        let me = i32::try_from(std::process::id()).unwrap();
        let pid = i32::try_from(child.id()).unwrap();
        let accounts = account(&tree(me).unwrap());
        let of = |pid| accounts.iter().find(|one| one.pid == pid).unwrap();
        assert_eq!((of(me).parent, of(pid).parent), (0, me));
        assert_eq!(of(pid).arguments, ["cat", "-u", "--", "-"]);
        assert_eq!((of(pid).name.as_str(), of(pid).threads), ("cat", 1));
        assert!(!of(pid).cut && of(pid).memory.anonymous > 0 && of(pid).memory.file > 0);
        drop(child.stdin.take());
        child.wait().unwrap();
        assert_eq!(
            account(&[Process {
                host_pid: pid,
                pid,
                resident: 0
            }]),
            []
        );
    }

    #[test]
    fn long_command_lines_are_marked_as_truncated() {
        let parsed = |line: &[u8]| words(line, COMMAND_BYTES_MAX);
        assert_eq!(parsed(b""), (vec![], false));
        let three = ["a", "", "b"].map(String::from).to_vec();
        assert_eq!(parsed(b"a\0\0b\0"), (three, false));
        let (kept, cut) = parsed(&[b'x'; 1025]);
        assert_eq!((kept[0].len(), cut), (1024, true));
        let (kept, cut) = parsed(&b"y\0".repeat(WORDS_MAX + 1));
        assert_eq!((kept.len(), cut), (WORDS_MAX, true));
        let (kept, cut) = parsed(&b"y\0".repeat(WORDS_MAX));
        assert_eq!((kept.len(), cut), (WORDS_MAX, false));
        assert_eq!(words(b"abc\0", 0), (vec![], true));
    }

    #[test]
    fn command_lines_are_truncated_at_their_total_limit() {
        let me = i32::try_from(std::process::id()).unwrap();
        let processes = tree(me).unwrap();
        let mut room = 3;
        let parsed = describe(processes[0], &HashMap::new(), &mut room).unwrap();
        assert_eq!((parsed.arguments[0].len(), parsed.cut, room), (3, true, 0));
        let parsed = describe(processes[0], &HashMap::new(), &mut room).unwrap();
        assert!(parsed.arguments.is_empty() && parsed.cut);
    }
}

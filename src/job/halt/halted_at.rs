//! Place at which a thread was halted: its system call, its program counter, and the end of its stack.

use std::fs;
use std::io::IoSliceMut;
use std::ops::Range;

use nix::libc;
use nix::sys::uio::{RemoteIoVec, process_vm_readv};
use nix::unistd::Pid;
use procfs::process::MMPermissions;

use super::Halted;
use crate::job::process::is_of;
use crate::job::tree;

/// Bytes at the end of a stack that are searched for return addresses. This covers the frames of the C library's
/// functions that a library calls (ioctl, malloc, memcpy). A longer search would find addresses that are left from
/// earlier calls.
const STACK_BYTES: usize = 512;

/// System calls that malloc and free make while they hold a heap's lock, and drivers while they hold theirs. A thread
/// halted in one of them stops when the call returns.
const BRIEF: [i64; 7] = [
    libc::SYS_brk,
    libc::SYS_mmap,
    libc::SYS_munmap,
    libc::SYS_mremap,
    libc::SYS_mprotect,
    libc::SYS_madvise,
    libc::SYS_ioctl,
];

/// System call in which a thread waits or was interrupted.
pub(super) struct Call {
    /// Number of the system call; -1 for none.
    pub number: i64,
    /// Arguments of the system call, if there is one. The last two words are the stack pointer and the program counter.
    pub words: Vec<u64>,
}

impl Call {
    /// Returns the system call; `None` for a running thread.
    pub fn of(process: Pid, thread: i32) -> Option<Self> {
        let text = fs::read_to_string(format!("/proc/{process}/task/{thread}/syscall")).ok()?;
        let mut words = text.split_whitespace();
        let number = words.next()?.parse().ok()?;
        let word = |word: &str| u64::from_str_radix(word.strip_prefix("0x")?, 16).ok();
        Some(Self {
            number,
            words: words.map(word).collect::<Option<_>>()?,
        })
    }

    /// Returns the program counter.
    pub fn counter(&self) -> Option<u64> {
        self.words.last().copied()
    }

    /// Returns the program counter of a thread that computes; `None` in a blocking system call.
    pub fn address_at_work(&self) -> Option<u64> {
        let works = self.number == -1 || BRIEF.contains(&self.number);
        self.counter().filter(|_| works)
    }

    fn stack_pointer(&self) -> Option<u64> {
        self.words.iter().rev().nth(1).copied()
    }
}

/// Returns the code of the libraries whose file names begin with `prefix` in a process (host pid); nothing if it has
/// exited.
#[must_use]
pub fn code_of(pid: i32, prefix: &str) -> Vec<Range<u64>> {
    let Ok(maps) = tree::maps(pid) else {
        return Vec::new();
    };
    let code = maps
        .iter()
        .filter(|map| map.perms.contains(MMPermissions::EXECUTE) && is_of(map, prefix));
    code.map(|map| map.address.0..map.address.1).collect()
}

impl Halted {
    /// Returns true if a thread was halted at work in this code or in a function that it had just called. A thread that
    /// waits in a blocking system call is not at work.
    #[must_use]
    pub fn works_in(&self, code: &[Range<u64>]) -> bool {
        let mut threads = self.threads.iter();
        !code.is_empty() && threads.any(|thread| is_at_work_in(self.process, thread.id, code))
    }
}

fn is_at_work_in(process: Pid, thread: Pid, code: &[Range<u64>]) -> bool {
    let is_inside = |at: &u64| code.iter().any(|range| range.contains(at));
    let Some(call) = Call::of(process, thread.as_raw()) else {
        return false;
    };
    let Some(at) = call.address_at_work() else {
        return false;
    };
    is_inside(&at)
        || call
            .stack_pointer()
            .is_some_and(|stack| words_at(process, stack).iter().any(is_inside))
}

/// Reads the words at an address; fewer at the end of a mapping.
fn words_at(process: Pid, address: u64) -> Vec<u64> {
    let mut bytes = [0; STACK_BYTES];
    let base = usize::try_from(address).unwrap_or(0);
    let remote = [RemoteIoVec {
        base,
        len: STACK_BYTES,
    }];
    let read = process_vm_readv(process, &mut [IoSliceMut::new(&mut bytes)], &remote).unwrap_or(0);
    let (words, _) = bytes[..read].as_chunks();
    words.iter().map(|word| u64::from_ne_bytes(*word)).collect()
}

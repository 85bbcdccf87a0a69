//! Which pids the processes of a sandbox get.
//!
//! Every sandbox has its own pids, and yet the jobs of a machine should not all have the same: what
//! a program names by its pid in a place that sandboxes share is then another's. The CUDA driver does:
//! it binds an abstract socket `cuda-uvmfd-<inode of the PID namespace>-<pid>` in the network namespace,
//! and a restored process keeps its name while the kernel gives the inode to the next sandbox. With equal
//! pids `cuInit` in that one fails with 304 (`CUDA_ERROR_OPERATING_SYSTEM`), or a restore with "address in use".

use std::fs;
use std::io;
use std::ops::Range;

/// Where a job's first process may be. After a wrap-around Linux never hands out a pid below 300 (`RESERVED_PIDS`),
/// so those stay free for CRIU at a restore; and an image comes back on machines with the least usual
/// `pid_max`, 32768, where the job has room before it wraps.
const FIRST: Range<u32> = 300..30_000;

/// A pid for the job's first process, by chance.
pub(super) fn draw() -> io::Result<i32> {
    let mut bytes = [0; 4];
    getrandom::fill(&mut bytes)?;
    let pid = FIRST.start + u32::from_ne_bytes(bytes) % (FIRST.end - FIRST.start);
    i32::try_from(pid).map_err(io::Error::other)
}

/// The next process of this PID namespace gets the next free pid after this one.
pub(super) fn go_on_after(pid: i32) -> io::Result<()> {
    fs::write("/proc/sys/kernel/ns_last_pid", pid.to_string())
}

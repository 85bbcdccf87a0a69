#![allow(unsafe_code, reason = "process_madvise, which no library has")]
//! Transparent huge pages for a restored process.
//!
//! CRIU fills memory with small pages. With its defaults, the kernel's own thread converts 16 MiB to huge pages every
//! 10 s, and the job is slower until then. This module requests the conversion immediately (`MADV_COLLAPSE`, Linux
//! 6.1). It selects memory that the kernel would convert too, and that occupies no additional memory: all small pages
//! are present and not shared. The memory's content does not change.

use std::fs;
use std::io;
use std::ops::Range;
use std::os::fd::AsRawFd;

use nix::errno::Errno;
use nix::libc;
use procfs::ProcResult;
use procfs::process::{
    MMPermissions, MMapPath, MemoryMap, MemoryPageFlags, PageInfo, PageMap, Process as ProcessEntry,
};
use rustix::process::{Pid, PidfdFlags, pidfd_open};

use super::tree::smaps;

/// File with the size of a huge page in bytes.
const LENGTH: &str = "/sys/kernel/mm/transparent_hugepage/hpage_pmd_size";
/// Limit on one request in bytes: some milliseconds of copying.
const STEP_MAX: u64 = 32 << 20;
/// Limit on requests that fail for lack of memory. Each makes the kernel search for memory.
const REFUSED_MAX: u32 = 8;
/// The advice to convert to huge pages, since Linux 6.1.
const MADV_COLLAPSE: libc::c_int = 25;

/// Requests huge pages in a process (a host pid) in steps, with a `pause` before each. Returns the number of bytes in
/// huge pages.
///
/// # Errors
/// The process cannot be inspected, or ckpt-run lacks the permission (`EPERM`).
pub fn make_huge_pages(host_pid: i32, mut pause: impl FnMut()) -> io::Result<u64> {
    let Some(huge) = length() else {
        return Ok(0);
    };
    let pid = Pid::from_raw(host_pid).ok_or(io::ErrorKind::InvalidInput)?;
    let process = pidfd_open(pid, PidfdFlags::empty())?;
    let (mut done, mut refused) = (0, 0);
    for range in ranges(host_pid, huge).map_err(io::Error::other)? {
        pause();
        match advise(process.as_raw_fd(), &range) {
            Ok(()) => done += range.end - range.start,
            // Some of the memory is in use, or the kernel never converts it.
            Err(Errno::EAGAIN | Errno::EINVAL) => {}
            // No huge page is free, the job may have no more, or the memory was unmapped.
            Err(Errno::ENOMEM | Errno::EBUSY) if refused < REFUSED_MAX => refused += 1,
            Err(Errno::ENOMEM | Errno::EBUSY | Errno::ESRCH) => break,
            Err(errno) => return Err(errno.into()),
        }
    }
    Ok(done)
}

/// Returns the length of a huge page; `None` if the kernel has none.
fn length() -> Option<u64> {
    let text = fs::read_to_string(LENGTH).ok()?;
    let length = text.trim().parse().ok();
    length.filter(|length: &u64| length.is_power_of_two() && *length >= procfs::page_size())
}

/// Returns the parts of a process's memory that can become huge pages.
fn ranges(host_pid: i32, huge: u64) -> ProcResult<Vec<Range<u64>>> {
    let process = ProcessEntry::new(host_pid)?;
    let mut pages = process.pagemap()?;
    let mut ranges = Vec::new();
    for map in smaps(host_pid)?.iter().filter(|map| is_eligible(map)) {
        let (start, end) = map.address;
        let mut at = start.next_multiple_of(huge);
        while at + huge <= end {
            if is_whole(&mut pages, at, huge)? {
                add(&mut ranges, at..at + huge);
            }
            at += huge;
        }
    }
    Ok(ranges)
}

/// Returns true if the kernel would use huge pages there.
fn is_eligible(map: &MemoryMap) -> bool {
    let own = MMPermissions::PRIVATE | MMPermissions::WRITE;
    let is_anonymous = match &map.pathname {
        MMapPath::Anonymous | MMapPath::Heap => true,
        // A mapping with a name that the process gave it.
        MMapPath::Other(name) => name.starts_with("anon:"),
        _ => false,
    };
    is_anonymous && map.perms.contains(own) && map.extension.map.get("THPeligible") == Some(&1)
}

/// Returns true if all small pages are present and not shared: a forked child shares them until one of both writes.
fn is_whole(pages: &mut PageMap, at: u64, huge: u64) -> ProcResult<bool> {
    let index = |address: u64| usize::try_from(address / procfs::page_size()).unwrap_or(usize::MAX);
    let own = MemoryPageFlags::PRESENT | MemoryPageFlags::MMAP_EXCLUSIVE;
    let is_own = |page: &PageInfo| match page {
        PageInfo::MemoryPage(flags) => {
            flags.contains(own) && !flags.contains(MemoryPageFlags::FILE)
        }
        PageInfo::SwapPage(_) => false,
    };
    let pages = pages.get_range_info(index(at)..index(at + huge))?;
    Ok(pages.iter().all(is_own))
}

/// Adds a part, and merges it with the previous one if they meet.
fn add(ranges: &mut Vec<Range<u64>>, part: Range<u64>) {
    match ranges.last_mut() {
        Some(last) if last.end == part.start && part.end - last.start <= STEP_MAX => {
            last.end = part.end;
        }
        _ => ranges.push(part),
    }
}

fn advise(process: libc::c_int, range: &Range<u64>) -> nix::Result<()> {
    let remote = libc::iovec {
        iov_base: range.start as *mut libc::c_void,
        iov_len: usize::try_from(range.end - range.start).unwrap_or(usize::MAX),
    };
    // SAFETY: the address is another process's, where no byte changes by this call; the structure outlives the call.
    let advised = unsafe {
        libc::syscall(
            libc::SYS_process_madvise,
            process,
            &raw const remote,
            1_usize,
            MADV_COLLAPSE,
            0_u32,
        )
    };
    Errno::result(advised).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn adjacent_parts_are_requested_together_up_to_a_step() {
        let huge = 2 << 20;
        let mut ranges = Vec::new();
        for at in (0..20).chain(30..31) {
            add(&mut ranges, at * huge..(at + 1) * huge);
        }
        let lengths: Vec<u64> = ranges
            .iter()
            .map(|range| (range.end - range.start) / huge)
            .collect();
        assert_eq!(lengths, [16, 4, 1]);
    }
}

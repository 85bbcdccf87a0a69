#![allow(unsafe_code, reason = "called by CRIU through C")]
//! Lines of files and entries of folders in `/proc`, without an allocator.

use core::ffi::{CStr, c_int, c_long};

use super::kernel::{ENOENT, ESRCH, O_CLOEXEC, O_DIRECTORY, close, openat, read_some};
use super::system_call::{AT_FDCWD, address, system_call};
use super::text::{Text, number};

/// Bytes of a part of a folder's list.
const LIST_BYTES: usize = 4096;
/// Longest line: a path of 4096 bytes, nearly all of which may be escaped by four.
const LINE_BYTES_MAX: usize = 16 << 10;

#[cfg(target_arch = "x86_64")]
const GETDENTS64: c_long = 217;
#[cfg(target_arch = "aarch64")]
const GETDENTS64: c_long = 61;

/// Opens a file of a process or thread in `/proc`, and calls `act` with it. Returns `None` if it cannot be opened.
pub fn with_file<R>(
    thread: c_int,
    name: &[u8],
    flags: c_int,
    act: impl FnOnce(c_int) -> R,
) -> Option<R> {
    let mut path = Text::new();
    path.push(b"/proc/");
    path.push_number(thread);
    path.push(name);
    let file = openat(AT_FDCWD, path.as_c(), flags | O_CLOEXEC).ok()?;
    let result = act(file);
    // SAFETY: nobody else has it.
    unsafe { close(file) };
    Some(result)
}

/// Calls `act` with each thread of a process until that returns `None`. Returns `None` then, and if the threads cannot be
/// listed.
pub fn for_each_thread(pid: c_int, mut act: impl FnMut(c_int) -> Option<()>) -> Option<()> {
    with_file(pid, b"/task", O_DIRECTORY, |folder| {
        let mut is_good = true;
        let is_whole = for_each_number(folder, |thread| {
            is_good = act(thread).is_some();
            is_good
        });
        (is_whole && is_good).then_some(())
    })?
}

/// Calls `act` with each entry of a folder that is a number, as [`for_each_entry`] does.
pub fn for_each_number(folder: c_int, mut act: impl FnMut(c_int) -> bool) -> bool {
    for_each_entry(folder, |_, name| {
        let number = number(name.to_bytes()).and_then(|number| c_int::try_from(number).ok());
        number.is_none_or(&mut act)
    })
}

/// Calls `act` with each entry of a folder, its inode and its name, until that returns false. Returns false if the folder
/// cannot be read to its end; that of a process that has exited has none.
pub fn for_each_entry(folder: c_int, mut act: impl FnMut(u64, &CStr) -> bool) -> bool {
    let mut list = [0_u8; LIST_BYTES];
    loop {
        let bytes = LIST_BYTES.cast_signed() as c_long;
        let arguments = [folder.into(), address(list.as_mut_ptr()), bytes, 0, 0, 0];
        // SAFETY: the kernel writes at most so many bytes.
        let length = unsafe { system_call(GETDENTS64, arguments) };
        let Some(mut rest) = usize::try_from(length).ok().and_then(|n| list.get(..n)) else {
            return length == -c_long::from(ENOENT);
        };
        if rest.is_empty() {
            return true;
        }
        // `struct linux_dirent64`: the inode at 0, the length of the entry at 16, its name at 19.
        while let Some(&[low, high]) = rest.get(16..18) {
            let (entry, after) = rest
                .split_at_checked(usize::from(u16::from_ne_bytes([low, high])))
                .unwrap_or((rest, &[]));
            let inode = entry.first_chunk().copied().map(u64::from_ne_bytes);
            let name = entry
                .get(19..)
                .and_then(|name| CStr::from_bytes_until_nul(name).ok());
            if let (Some(inode), Some(name)) = (inode, name)
                && !act(inode, name)
            {
                return true;
            }
            rest = after;
        }
    }
}

/// Calls `act` with each line of a file until that returns false. Returns false if the file cannot be read, has a line of
/// more than [`LINE_BYTES_MAX`], or does not end with one. A process that has exited has no lines.
pub fn for_each_line(file: c_int, mut act: impl FnMut(&[u8]) -> bool) -> bool {
    let mut buffer = [0_u8; LINE_BYTES_MAX];
    let mut filled = 0;
    loop {
        let Some(room) = buffer.get_mut(filled..).filter(|room| !room.is_empty()) else {
            return false;
        };
        let length = match read_some(file, room) {
            Ok(length) => length,
            Err(error) => return error == ESRCH,
        };
        if length == 0 {
            return filled == 0;
        }
        filled += length;
        let mut begin = 0;
        while let Some(end) = buffer[begin..filled].iter().position(|byte| *byte == b'\n') {
            if !act(&buffer[begin..begin + end]) {
                return true;
            }
            begin += end + 1;
        }
        buffer.copy_within(begin..filled, 0);
        filled -= begin;
    }
}

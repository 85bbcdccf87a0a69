#![allow(unsafe_code, reason = "called by CRIU through C")]
//! Memory protection keys (`pkey_alloc`), which CRIU (4.2) does not restore: the keys that a process has allocated, and the
//! memory that has them. The threads' rights are registers, which CRIU restores.

use core::ffi::c_int;

use super::listing::{for_each_line, with_file};
use super::mapping::range;
use super::remote_calls::Remote;
use super::text::number;

/// Keys, without that of all other memory.
const KEYS: core::ops::Range<u32> = 1..16;
/// A thread's rights at its beginning: none to memory with keys.
pub const INITIAL_RIGHTS: u32 = 0x5555_5554;
/// Address that no process maps.
const NOWHERE: u64 = 0x1000_u64.wrapping_neg() << 1;
const PAGE: u64 = 4096;

const ENOMEM: i64 = 12;
pub const SYS_MPROTECT: u64 = 329;
const SYS_ALLOCATE: u64 = 330;
const SYS_FREE: u64 = 331;

/// Rights to a mapping: the bits of `mprotect`.
const READ: u32 = 1;
const WRITE: u32 = 2;
const EXECUTE: u32 = 4;

/// A mapping with a key.
#[derive(Clone, Copy)]
pub struct Keyed {
    pub start: u64,
    pub end: u64,
    pub rights: u32,
    pub key: u32,
}

impl Keyed {
    /// True for memory to which the kernel gives a key of its own, because it may be executed and not read.
    pub fn is_of_kernel(&self) -> bool {
        self.rights == EXECUTE
    }
}

/// Returns the set of keys that a process has allocated.
pub fn allocated(remote: &mut Remote) -> Option<u32> {
    let mut set = 0;
    for key in KEYS {
        // The kernel looks at the key first; nothing is mapped there.
        let answer = remote.call(SYS_MPROTECT, [NOWHERE, PAGE, 0, key.into()])?;
        if answer == -ENOMEM {
            set |= 1 << key;
        }
    }
    Some(set)
}

/// Allocates the keys of a set. The process has no others afterwards.
pub fn allocate(remote: &mut Remote, wanted: u32) -> Option<()> {
    let mut set = allocated(remote)?;
    // The kernel gives the lowest free key.
    while set & wanted != wanted {
        let key = remote.call(SYS_ALLOCATE, [0; 4])?;
        set |= 1 << u32::try_from(key).ok().filter(|key| KEYS.contains(key))?;
    }
    for key in KEYS.filter(|key| set & !wanted & 1 << key != 0) {
        remote.call(SYS_FREE, [key.into(), 0, 0, 0])?;
    }
    (allocated(remote)? == wanted).then_some(())
}

/// Gives a mapping its key.
pub fn protect(remote: &mut Remote, keyed: &Keyed) -> Option<()> {
    let len = keyed.end.checked_sub(keyed.start)?;
    let arguments = [keyed.start, len, keyed.rights.into(), keyed.key.into()];
    (remote.call(SYS_MPROTECT, arguments)? == 0).then_some(())
}

/// Calls `act` with each mapping of a process that has a key. Returns false if the list cannot be read, or `act` returned
/// false.
pub fn for_each_keyed(pid: c_int, mut act: impl FnMut(&Keyed) -> bool) -> bool {
    let (mut last, mut is_good) = (None, true);
    let read = |file| {
        for_each_line(file, |line| {
            if let Some(key) = line.strip_prefix(b"ProtectionKey:") {
                let key = number(key.trim_ascii()).unwrap_or(0);
                let keyed = last.take().map(|keyed| Keyed { key, ..keyed });
                is_good = key == 0 || keyed.is_some_and(|keyed| act(&keyed));
            } else if let Some(first) = first_line(line) {
                last = Some(first);
            }
            is_good
        })
    };
    with_file(pid, b"/smaps", 0, read) == Some(true) && is_good
}

/// Reads the first line about a mapping, which begins with `START-END RIGHTS`.
fn first_line(line: &[u8]) -> Option<Keyed> {
    let mut words = line.split(|byte| *byte == b' ');
    let (start, end) = range(words.next()?)?;
    let letters = words.next()?;
    let right = |place, letter, bit| {
        if letters.get(place) == Some(&letter) {
            bit
        } else {
            0
        }
    };
    Some(Keyed {
        start,
        end,
        rights: right(0, b'r', READ) | right(1, b'w', WRITE) | right(2, b'x', EXECUTE),
        key: 0,
    })
}

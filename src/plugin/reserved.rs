#![allow(unsafe_code, reason = "called by CRIU through C")]
//! An `mmap` that replaces the C library's in a restoring CRIU with this library preloaded.
//!
//! CRIU (4.2) maps all private memory writable at first, because it may have to fill it, and sets its access at the end.
//! The kernel refuses more writable memory at once than the machine has, but lets a program reserve any number of
//! addresses without access: `MariaDB` reserves 8 TiB and .NET 256 GiB, of which they use parts. Such a mapping is made
//! here with `MAP_NORESERVE`, so the kernel does not count it. Where it counts all (`vm.overcommit_memory` 2), the flag has
//! no effect, and CRIU reports the kernel's error.

use core::ffi::{c_int, c_long, c_void};
use core::ptr;

use super::interposed::as_library;
use super::kernel::{ENOMEM, error};
use super::system_call::{address, system_call};

const PROT_WRITE: c_int = 2;
const MAP_PRIVATE: c_int = 2;
const MAP_FIXED: c_int = 0x10;
const MAP_ANONYMOUS: c_int = 0x20;
const MAP_NORESERVE: c_int = 0x4000;
/// Flags with which CRIU maps such addresses.
const RESERVED: c_int = MAP_PRIVATE | MAP_FIXED | MAP_ANONYMOUS;

#[cfg(target_arch = "x86_64")]
const MMAP: c_long = 9;
#[cfg(target_arch = "aarch64")]
const MMAP: c_long = 222;

/// Maps memory like the C library's function.
///
/// # Safety
/// The same as for that function.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mmap64(
    at: *mut c_void,
    len: usize,
    access: c_int,
    flags: c_int,
    file: c_int,
    offset: i64,
) -> *mut c_void {
    let map = |flags: c_int| {
        let arguments = [
            address(at),
            len.cast_signed() as c_long,
            access.into(),
            flags.into(),
            file.into(),
            offset,
        ];
        // SAFETY: by the contract above.
        unsafe { system_call(MMAP, arguments) }
    };
    let mut mapped = map(flags);
    // Without CRIU's addition, there is no access.
    let is_reserved = access == PROT_WRITE && flags & RESERVED == RESERVED;
    if mapped < 0 && error(mapped) == ENOMEM && is_reserved {
        mapped = map(flags | MAP_NORESERVE);
    }
    #[allow(clippy::cast_possible_truncation, reason = "an address")]
    let mapped = as_library(mapped).cast_unsigned() as usize;
    ptr::with_exposed_provenance_mut(mapped)
}

/// The same for a CRIU that calls the function by this name: one of a C library without `mmap64`.
///
/// # Safety
/// The same as for the C library's function.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mmap(
    at: *mut c_void,
    len: usize,
    access: c_int,
    flags: c_int,
    file: c_int,
    offset: i64,
) -> *mut c_void {
    // SAFETY: by the contract above.
    unsafe { mmap64(at, len, access, flags, file, offset) }
}

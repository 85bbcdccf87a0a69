#![allow(unsafe_code, reason = "called by CRIU through C")]
//! Kind and identity of a file, without opening it.

use core::ffi::{CStr, c_char, c_int, c_uint};

const AT_EMPTY_PATH: c_int = 0x1000;
const AT_SYMLINK_NOFOLLOW: c_int = 0x100;
const STATX_TYPE: c_uint = 1;
const STATX_NLINK: c_uint = 4;
const STATX_INO: c_uint = 0x100;
const S_IFMT: u32 = 0o170_000;
const S_IFIFO: u32 = 0o010_000;
const S_IFSOCK: u32 = 0o140_000;
const S_IFCHR: u32 = 0o020_000;
const S_IFREG: u32 = 0o100_000;

/// Treatment of a link at the end of a path.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Links {
    Followed,
    NotFollowed,
}

/// `struct statx`, the same on every machine (Linux, `uapi/linux/stat.h`).
#[repr(C)]
#[derive(Default)]
pub struct Inode {
    mask: u32,
    _before_names: [u32; 3],
    /// Number of its names.
    pub names: u32,
    _after_names: [u32; 2],
    mode: u16,
    _after_mode: u16,
    pub number: u64,
    _before_device: [u64; 11],
    device_file_major: u32,
    device_file_minor: u32,
    major: u32,
    minor: u32,
    _after_device: [u64; 14],
}

const _: () = assert!(size_of::<Inode>() == 256);
const _: () = assert!(core::mem::offset_of!(Inode, names) == 16);
const _: () = assert!(core::mem::offset_of!(Inode, mode) == 28);
const _: () = assert!(core::mem::offset_of!(Inode, number) == 32);
const _: () = assert!(core::mem::offset_of!(Inode, device_file_major) == 128);
const _: () = assert!(core::mem::offset_of!(Inode, major) == 136);

impl Inode {
    /// Looks at an open file, also one without access (`O_PATH`).
    pub fn of_descriptor(descriptor: c_int) -> Option<Self> {
        Self::ask(descriptor, c"", AT_EMPTY_PATH)
    }

    /// Looks at a file by its path, from a folder on.
    pub fn of_path(folder: c_int, path: &CStr, links: Links) -> Option<Self> {
        match links {
            Links::Followed => Self::ask(folder, path, 0),
            Links::NotFollowed => Self::ask(folder, path, AT_SYMLINK_NOFOLLOW),
        }
    }

    fn ask(folder: c_int, path: &CStr, flags: c_int) -> Option<Self> {
        let mut inode = Self::default();
        let wanted = STATX_TYPE | STATX_NLINK | STATX_INO;
        // SAFETY: the path ends with a zero, and `inode` is as large as the kernel's structure.
        let result = unsafe { statx(folder, path.as_ptr(), flags, wanted, &raw mut inode) };
        (result == 0 && inode.mask & wanted == wanted).then_some(inode)
    }

    /// Returns the driver's number and that of the device, if it is a character device.
    pub fn character_device(&self) -> Option<(u32, u32)> {
        let device = (self.device_file_major, self.device_file_minor);
        (u32::from(self.mode) & S_IFMT == S_IFCHR).then_some(device)
    }

    pub fn is_pipe(&self) -> bool {
        u32::from(self.mode) & S_IFMT == S_IFIFO
    }

    pub fn is_socket(&self) -> bool {
        u32::from(self.mode) & S_IFMT == S_IFSOCK
    }

    pub fn is_regular(&self) -> bool {
        u32::from(self.mode) & S_IFMT == S_IFREG
    }

    /// Returns the number of the device that it is on.
    pub fn device(&self) -> (u32, u32) {
        (self.major, self.minor)
    }
}

// Of the C library that CRIU runs with (glibc 2.28); none is linked.
unsafe extern "C" {
    fn statx(
        folder: c_int,
        path: *const c_char,
        flags: c_int,
        mask: c_uint,
        status: *mut Inode,
    ) -> c_int;
}

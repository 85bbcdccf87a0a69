#![allow(unsafe_code, reason = "called by CRIU through C")]
//! Protection of a restore against users who replace folders by links while CRIU, as root, uses their paths.
//!
//! ```text
//! init                  disables symbolic links on the listed mounts (MOUNT_ATTR_NOSYMFOLLOW)
//! CRIU                  opens, binds and creates files by the paths of the image, which have no links
//! RESUME_DEVICES_LATE   enables links again; the supervisor checks the tasks, none of which has run yet
//! ```

use core::ffi::{CStr, c_int, c_long};

use super::kernel::{MOUNT_SETATTR, variable};
use super::system_call::{AT_FDCWD, address, system_call};
use super::variables::NO_LINKS;

/// `CR_PLUGIN_STAGE__RESTORE`.
const RESTORE: c_int = 2;
/// Longest path of a mount point.
const PATH_BYTES_MAX: usize = 4096;
const NOSYMFOLLOW: u64 = 0x0020_0000;
const ENOENT: c_long = 2;
const EINVAL: c_long = 22;

/// `struct mount_attr`.
#[repr(C)]
#[derive(Default)]
struct MountAttributes {
    set: u64,
    clear: u64,
    propagation: u64,
    user_namespace: u64,
}

/// Begins the protection. Returns 0, or -1 if a mount cannot be protected. Nothing is restored then.
pub extern "C" fn begin(stage: c_int) -> c_int {
    if stage != RESTORE {
        return 0;
    }
    for_each_mount(|path| set(path, true))
}

/// Ends the protection, before the first task runs.
pub fn end() {
    for_each_mount(|path| set(path, false));
}

fn for_each_mount(act: impl Fn(&CStr) -> c_long) -> c_int {
    let Some(list) = variable(NO_LINKS) else {
        return 0;
    };
    let mut path = [0_u8; PATH_BYTES_MAX];
    for point in list.to_bytes().split(|byte| *byte == b'\n') {
        if point.is_empty() || point.len() >= PATH_BYTES_MAX {
            continue;
        }
        path[..point.len()].copy_from_slice(point);
        path[point.len()] = 0;
        match CStr::from_bytes_until_nul(&path) {
            // Another mount covers this one, so no path leads to it.
            Ok(path) if [0, -ENOENT, -EINVAL].contains(&act(path)) => {}
            Ok(_) | Err(_) => return -1,
        }
    }
    0
}

fn set(path: &CStr, protected: bool) -> c_long {
    let mut attributes = MountAttributes::default();
    if protected {
        attributes.set = NOSYMFOLLOW;
    } else {
        attributes.clear = NOSYMFOLLOW;
    }
    let arguments = [
        AT_FDCWD.into(),
        address(path.as_ptr()),
        0,
        address(&raw const attributes),
        size_of::<MountAttributes>().cast_signed() as c_long,
        0,
    ];
    // SAFETY: the path ends with a zero, and the structure is as large as is said.
    unsafe { system_call(MOUNT_SETATTR, arguments) }
}

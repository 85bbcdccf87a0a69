//! Selection of the mounted file systems for a watcher.

use std::ffi::OsString;
use std::io;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::Path;

use super::fanotify::Group;
use super::record_line::Line;
use crate::mount_table::Mount;

/// Kernel file systems, which contain no files of a job.
const KERNEL_FILE_SYSTEMS: [&str; 20] = [
    "autofs",
    "binfmt_misc",
    "bpf",
    "cgroup",
    "cgroup2",
    "configfs",
    "debugfs",
    "devpts",
    "devtmpfs",
    "efivarfs",
    "fusectl",
    "hugetlbfs",
    "mqueue",
    "nsfs",
    "proc",
    "pstore",
    "rpc_pipefs",
    "securityfs",
    "sysfs",
    "tracefs",
];

/// Watches all file systems that can contain files of the job. Returns the watched mount points, and those that cannot
/// be watched.
pub(super) fn watch_all(group: &mut Group) -> io::Result<Line> {
    let mounts = Mount::all_of("self")?;
    let (mut watched, mut unwatched) = (Vec::new(), Vec::new());
    for mount in mounts.into_iter().filter(may_have_files) {
        if !is_open_folder(&mount.point) {
            continue;
        }
        if group.watch(&mount.point).is_ok() {
            watched.push(mount.point);
        } else {
            unwatched.push(mount.point);
        }
    }
    Ok(Line::Mounts { watched, unwatched })
}

/// Returns the mount points of the file systems of which a watcher would not learn all changes, each after a plus sign, and of
/// the others, after a minus sign, in lines; `None` if all can be watched. The witness reads them (`src/witness/report.rs`).
pub(crate) fn mounts_to_report() -> Option<OsString> {
    let watched = Group::new(Vec::new()).and_then(|mut group| watch_all(&mut group));
    let Ok(Line::Mounts { watched, unwatched }) = watched else {
        return Some("+/".into());
    };
    if unwatched.is_empty() {
        return None;
    }
    let unwatched = unwatched.iter().map(|mount| (b"+", mount));
    let all = unwatched.chain(watched.iter().map(|mount| (b"-", mount)));
    let mut text = Vec::new();
    for (sign, mount) in all {
        text.extend_from_slice(sign);
        text.extend_from_slice(mount.as_os_str().as_bytes());
        text.push(b'\n');
    }
    Some(OsString::from_vec(text))
}

/// Returns false for a file, as for a mount that is hidden below another one, and for a folder that even root may not enter: a
/// FUSE mount of another user.
fn is_open_folder(path: &Path) -> bool {
    match path.symlink_metadata() {
        Ok(found) => found.is_dir(),
        Err(error) => error.kind() != io::ErrorKind::PermissionDenied,
    }
}

/// Returns true unless the file system is read-only, a kernel file system or one of device files.
fn may_have_files(mount: &Mount) -> bool {
    let is_devices = mount.point == Path::new("/dev");
    !mount.is_read_only() && !is_devices && !KERNEL_FILE_SYSTEMS.contains(&mount.kind.as_str())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernels_own_file_systems_are_left_out() {
        let mut found = Mount::all_of("self").unwrap();
        found.retain(may_have_files);
        assert!(!found.iter().any(|mount| mount.kind == "proc"));
        let root = Path::new("/");
        assert!(found.iter().any(|mount| mount.point == root));
    }
}

//! The mounted file systems that a watcher has to watch.

use std::io;
use std::path::Path;

use procfs::process::{MountInfo, Process};

use super::fanotify::Group;
use super::record_line::Line;

/// File systems of the kernel's own, in which a job has no files.
const KERNELS_OWN: [&str; 20] = [
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

/// Watches every file system on which the job can have files. Returns the mount points that are watched, and those that
/// cannot be.
pub(super) fn watch_all(group: &mut Group) -> io::Result<Line> {
    let mounts = Process::myself()
        .and_then(|process| process.mountinfo())
        .map_err(io::Error::other)?;
    let (mut watched, mut unwatched) = (Vec::new(), Vec::new());
    for mount in mounts.into_iter().filter(may_have_files) {
        // A mount hidden below another is reached by the name of the upper one only.
        if is_file(&mount.mount_point) {
            continue;
        }
        if group.watch(&mount.mount_point).is_ok() {
            watched.push(mount.mount_point);
        } else {
            unwatched.push(mount.mount_point);
        }
    }
    Ok(Line::Mounts { watched, unwatched })
}

fn is_file(path: &Path) -> bool {
    path.symlink_metadata().is_ok_and(|found| !found.is_dir())
}

/// Returns true unless the file system is read-only, the kernel's own or that of the device files.
fn may_have_files(mount: &MountInfo) -> bool {
    let is_read_only =
        mount.super_options.contains_key("ro") || mount.mount_options.contains_key("ro");
    let is_devices = mount.mount_point == Path::new("/dev");
    !is_read_only && !is_devices && !KERNELS_OWN.contains(&mount.fs_type.as_str())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernels_own_file_systems_are_left_out() {
        let mounts = Process::myself().unwrap().mountinfo().unwrap();
        let found: Vec<MountInfo> = mounts.into_iter().filter(may_have_files).collect();
        assert!(!found.iter().any(|mount| mount.fs_type == "proc"));
        let root = Path::new("/");
        assert!(found.iter().any(|mount| mount.mount_point == root));
    }
}

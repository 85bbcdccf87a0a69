//! The mounted file systems that a watcher has to watch.

use std::io;
use std::path::Path;

use super::fanotify::Group;
use super::record_line::Line;
use crate::mount_table::Mount;

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
    let mounts = Mount::all_of("self")?;
    let (mut watched, mut unwatched) = (Vec::new(), Vec::new());
    for mount in mounts.into_iter().filter(may_have_files) {
        // A mount hidden below another is reached by the name of the upper one only.
        if is_file(&mount.point) {
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

fn is_file(path: &Path) -> bool {
    path.symlink_metadata().is_ok_and(|found| !found.is_dir())
}

/// Returns true unless the file system is read-only, the kernel's own or that of the device files.
fn may_have_files(mount: &Mount) -> bool {
    let is_devices = mount.point == Path::new("/dev");
    !mount.is_read_only() && !is_devices && !KERNELS_OWN.contains(&mount.kind.as_str())
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

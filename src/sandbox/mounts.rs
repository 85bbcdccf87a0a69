//! Mounts that the job has created or changed in its sandbox. A new sandbox does not have them, so after a restore
//! paths would lead to other files.

use std::collections::HashSet;
use std::io;
use std::path::{Path, PathBuf};

use crate::mount_table::Mount;

/// Path, type and root of mounts created by the sandbox (`init::mount_proc`, `init::mount_terminals`).
const SANDBOXS_OWN: [(&str, &str, &str); 3] = [
    ("/proc", "proc", "/"),
    ("/dev/pts", "devpts", "/"),
    ("/dev/ptmx", "devpts", "/ptmx"),
];

/// Returns the first mount point that is neither the machine's nor the sandbox's. `sandbox` is the host pid of pid 1.
///
/// # Errors
/// A list of mounts cannot be read.
pub fn own_mount(sandbox: i32) -> io::Result<Option<PathBuf>> {
    Ok(difference(Mount::all_of("self")?, Mount::all_of(sandbox)?))
}

fn difference(machines: Vec<Mount>, jobs: Vec<Mount>) -> Option<PathBuf> {
    let about = |mount: Mount| {
        let is_read_only = mount.has("ro");
        (mount.point, mount.device, mount.root, is_read_only)
    };
    let known: HashSet<_> = machines.into_iter().map(about).collect();
    let own = jobs.into_iter().filter(|mount| !is_sandboxs(mount));
    own.map(about)
        .find(|mount| !known.contains(mount))
        .map(|(path, ..)| path)
}

fn is_sandboxs(mount: &Mount) -> bool {
    SANDBOXS_OWN.iter().any(|(point, kind, root)| {
        mount.point == Path::new(point) && mount.kind == *kind && mount.root == Path::new(root)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mounts(more: &[&str]) -> Vec<Mount> {
        let machines = [
            "20 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda rw",
            "21 20 0:5 / /proc rw - proc proc rw",
            "22 20 0:6 / /dev rw - devtmpfs dev rw",
        ];
        let lines = machines.iter().chain(more);
        let mounts = lines.map(|line| Mount::parse(line.as_bytes()).unwrap());
        mounts.collect()
    }

    #[test]
    fn a_mount_of_the_job_is_found_and_those_of_the_sandbox_are_not() {
        let own = |more: &[&str]| difference(mounts(&[]), mounts(more));
        let sandboxs = [
            "30 21 0:99 / /proc rw,nosuid - proc proc rw",
            "31 22 0:98 / /dev/pts rw - devpts devpts rw",
            "32 22 0:98 /ptmx /dev/ptmx rw - devpts devpts rw",
        ];
        assert_eq!(own(&sandboxs), None);
        for (line, point) in [
            (
                "33 20 0:9 / /work/scr\\040atch rw - tmpfs none rw",
                "/work/scr atch",
            ),
            ("33 30 0:99 /sys /proc/sys ro - proc proc rw", "/proc/sys"),
            ("33 30 0:9 / /proc rw - tmpfs none rw", "/proc"),
            (
                "33 31 0:98 /0 /dev/pts/7 rw - devpts devpts rw",
                "/dev/pts/7",
            ),
            ("33 22 8:1 /home /dev/shm rw - ext4 /dev/sda rw", "/dev/shm"),
            ("20 1 8:1 / / ro,relatime shared:1 - ext4 /dev/sda rw", "/"),
        ] {
            let all = [&sandboxs[..], &[line]].concat();
            assert_eq!(own(&all).as_deref(), Some(Path::new(point)), "{line}");
        }
    }
}

//! The sandbox's own mounts, and those that the job has created or changed in it. A new sandbox does not have the job's
//! mounts, so after a restore paths would lead to other files.

use std::collections::HashSet;
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use nix::mount::{MsFlags, mount};

use super::own_network::RESOLVER_COPY;
use crate::mount_table::Mount;

/// Device that creates new terminals.
const MAKER: &str = "/dev/ptmx";

/// Path, type and root of mounts created by [`mount_proc`] and [`mount_terminals`].
const SANDBOXS_OWN: [(&str, &str, &str); 3] = [
    ("/proc", "proc", "/"),
    ("/dev/pts", "devpts", "/"),
    ("/dev/ptmx", "devpts", "/ptmx"),
];

/// Makes mounts of the host propagate into the sandbox, but not the reverse.
pub(super) fn slave_mounts() -> io::Result<()> {
    mount(
        None::<&str>,
        "/",
        None::<&str>,
        MsFlags::MS_REC | MsFlags::MS_SLAVE,
        None::<&str>,
    )?;
    Ok(())
}

/// Mounts the `/proc` of the sandbox's PID namespace.
pub(super) fn mount_proc() -> io::Result<()> {
    let flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV | MsFlags::MS_NOEXEC;
    mount(Some("proc"), "/proc", Some("proc"), flags, None::<&str>)?;
    Ok(())
}

/// Mounts terminals of the job's own. CRIU restores their numbers, which are free in a new sandbox.
pub(super) fn mount_terminals(in_user_namespace: bool) -> io::Result<()> {
    let flags = MsFlags::MS_NOSUID | MsFlags::MS_NOEXEC;
    // 5 is the group "tty" everywhere. It is not mapped in a user namespace.
    let options = if in_user_namespace {
        "newinstance,ptmxmode=0666,mode=0620"
    } else {
        "newinstance,ptmxmode=0666,mode=0620,gid=5"
    };
    mount(
        Some("devpts"),
        "/dev/pts",
        Some("devpts"),
        flags,
        Some(options),
    )?;
    let filesystem = |path: &str| fs::metadata(path).map(|found| found.dev());
    let leads_to = filesystem(MAKER)?;
    // CRIU restores the owner of the node, and the machine's root is not mapped in a user namespace.
    let is_foreign = in_user_namespace && leads_to != filesystem("/dev/pts")?;
    // A node in the folder's parent finds the folder, and a link leads into it. In some containers the node is a mount
    // of the machine's.
    if is_foreign || (leads_to != filesystem("/dev")? && leads_to != filesystem("/dev/pts")?) {
        let (source, bind) = (Some("/dev/pts/ptmx"), MsFlags::MS_BIND);
        mount(source, MAKER, None::<&str>, bind, None::<&str>)?;
    }
    Ok(())
}

/// Returns the first mount point that is neither the machine's nor the sandbox's. `sandbox` is the host pid of pid 1.
///
/// # Errors
/// A list of mounts cannot be read.
pub fn own_mount(sandbox: i32) -> io::Result<Option<PathBuf>> {
    let own = found_twice(|| Ok(difference(Mount::all_of("self")?, Mount::all_of(sandbox)?)))?;
    Ok(own.map(|(path, ..)| path))
}

/// Path, file system and folder of a mount, and whether it is read-only: together they identify it.
type Identity = (PathBuf, String, PathBuf, bool);

/// Returns a mount that both of two looks find. The sandbox's mounts follow the machine's, and the two tables cannot be
/// read at one time: a mount that another program makes in between seems to be the job's, but not in the next look.
fn found_twice(look: impl Fn() -> io::Result<Vec<Identity>>) -> io::Result<Option<Identity>> {
    let first = look()?;
    if first.is_empty() {
        return Ok(None);
    }
    let second = look()?;
    Ok(first.into_iter().find(|mount| second.contains(mount)))
}

fn difference(machines: Vec<Mount>, jobs: Vec<Mount>) -> Vec<Identity> {
    let about = |mount: Mount| {
        let is_read_only = mount.has("ro");
        (mount.point, mount.device, mount.root, is_read_only)
    };
    let known: HashSet<_> = machines.into_iter().map(about).collect();
    let own = jobs.into_iter().filter(|mount| !is_sandboxs(mount));
    own.map(about)
        .filter(|mount| !known.contains(mount))
        .collect()
}

fn is_sandboxs(mount: &Mount) -> bool {
    let is_resolver = mount.root == Path::new("/").join(RESOLVER_COPY) && mount.kind == "tmpfs";
    is_resolver
        || SANDBOXS_OWN.iter().any(|(point, kind, root)| {
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
        let own = |more: &[&str]| {
            let found = difference(mounts(&[]), mounts(more));
            found.into_iter().next().map(|(point, ..)| point)
        };
        let sandboxs = [
            "30 21 0:99 / /proc rw,nosuid - proc proc rw",
            "31 22 0:98 / /dev/pts rw - devpts devpts rw",
            "32 22 0:98 /ptmx /dev/ptmx rw - devpts devpts rw",
            "34 20 0:97 /ckpt-run-resolv.conf /etc/resolv.conf rw - tmpfs none rw",
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
    #[test]
    fn a_mount_made_between_the_readings_is_not_the_jobs() {
        let line = |point: &str| format!("33 20 0:9 / {point} rw - tmpfs none rw");
        let (late, own) = (line("/late"), line("/own"));
        let found = |looks: [&[&str]; 2]| {
            let next = std::cell::Cell::new(0);
            let look = || Ok(difference(mounts(&[]), mounts(looks[next.replace(1)])));
            let found = found_twice(look).unwrap();
            found.map(|(point, ..)| point)
        };
        assert_eq!(found([&[&late], &[]]), None);
        // Another program mounts and unmounts all the time.
        assert_eq!(found([&[&late], &[&line("/later")]]), None);
        let of_the_job = found([&[&late, &own], &[&own]]);
        assert_eq!(of_the_job.as_deref(), Some(Path::new("/own")));
    }
}

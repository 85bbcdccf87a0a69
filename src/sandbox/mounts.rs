//! The sandbox's own mounts, those that the job has created or changed in it, and those that the machine no longer has.
//! A new sandbox has neither of the latter, so after a restore paths would lead to other files.
//!
//! Mounts of the machine propagate into the sandbox where the machine's are shared, as systemd makes them. Elsewhere, as
//! in most containers, the sandbox keeps the mounts that it has begun with.

use std::collections::HashSet;
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;

use nix::mount::{MsFlags, mount};

use crate::mount_table::Mount;

/// Device that creates new terminals.
const MAKER: &str = "/dev/ptmx";

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

/// Path, file system and folder of a mount, and whether it is read-only: together they identify it.
type Identity = (PathBuf, String, PathBuf, bool);

/// The mounts of a sandbox before its job begins.
#[derive(Debug)]
pub(super) struct FirstMounts {
    /// Those of the machine.
    machines: HashSet<Identity>,
    /// Those that only the sandbox has.
    own: HashSet<Identity>,
}

/// Mounts that a job sees and the machine does not have.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MountChanges {
    /// Mount points of the job's own.
    pub made: Vec<PathBuf>,
    /// Mount points that the machine has unmounted or remounted since the job began.
    pub unmounted: Vec<PathBuf>,
}

impl FirstMounts {
    /// Reads the mounts. `sandbox` is the host pid of its pid 1, which has no job yet.
    pub fn of(sandbox: i32) -> io::Result<Self> {
        let all = identities(Mount::all_of(sandbox)?);
        let machines = identities(Mount::all_of("self")?);
        let (machines, own) = all.into_iter().partition(|mount| machines.contains(mount));
        Ok(Self { machines, own })
    }

    /// Compares the present mounts.
    pub fn changes(&self, sandbox: i32) -> io::Result<MountChanges> {
        let look = || {
            let machines = identities(Mount::all_of("self")?);
            Ok(&identities(Mount::all_of(sandbox)?) - &machines)
        };
        Ok(self.sort(found_twice(look)?))
    }

    fn sort(&self, more: HashSet<Identity>) -> MountChanges {
        let more = more.into_iter().filter(|mount| !self.own.contains(mount));
        let (unmounted, made) = more.partition::<Vec<_>, _>(|mount| self.machines.contains(mount));
        let [made, unmounted] = [made, unmounted].map(|mounts| {
            let mut points: Vec<_> = mounts.into_iter().map(|(point, ..)| point).collect();
            points.sort();
            points
        });
        MountChanges { made, unmounted }
    }
}

fn identities(mounts: Vec<Mount>) -> HashSet<Identity> {
    let about = |mount: Mount| {
        let is_read_only = mount.has("ro");
        (mount.point, mount.device, mount.root, is_read_only)
    };
    mounts.into_iter().map(about).collect()
}

/// Returns the mounts that both of two looks find. The sandbox's mounts follow the machine's, and the two tables cannot be
/// read at one time: a mount that another program makes in between seems to be the job's, but not in the next look.
fn found_twice(look: impl Fn() -> io::Result<HashSet<Identity>>) -> io::Result<HashSet<Identity>> {
    let first = look()?;
    if first.is_empty() {
        return Ok(first);
    }
    Ok(&first & &look()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MACHINES: [&str; 4] = [
        "20 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda rw",
        "21 20 0:5 / /proc rw - proc proc rw",
        "22 20 0:6 / /dev rw - devtmpfs dev rw",
        "23 20 8:2 / /mnt/data rw - ext4 /dev/sdb rw",
    ];
    const SANDBOXS: [&str; 3] = [
        "30 21 0:99 / /proc rw,nosuid - proc proc rw",
        "31 22 0:98 / /dev/pts rw - devpts devpts rw",
        "32 22 0:98 /ptmx /dev/ptmx rw - devpts devpts rw",
    ];

    fn mounts(lines: &[&str]) -> HashSet<Identity> {
        let mounts = lines
            .iter()
            .map(|line| Mount::parse(line.as_bytes()).unwrap());
        identities(mounts.collect())
    }

    fn first() -> FirstMounts {
        let (machines, own) = (mounts(&MACHINES), mounts(&SANDBOXS));
        FirstMounts { machines, own }
    }

    #[test]
    fn a_mount_of_the_job_is_found_and_those_of_the_sandbox_are_not() {
        let made = |more: &[&str]| first().sort(&mounts(more) - &mounts(&MACHINES)).made;
        assert!(made(&SANDBOXS).is_empty());
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
            let all = [&SANDBOXS[..], &[line]].concat();
            assert_eq!(made(&all), [PathBuf::from(point)], "{line}");
        }
    }

    #[test]
    fn a_mount_that_the_machine_no_longer_has_is_not_the_jobs() {
        let [root, processes, devices, data] = MACHINES;
        let now = |machines: &[&str]| first().sort(&mounts(&MACHINES) - &mounts(machines));
        let unmounted = MountChanges {
            made: Vec::new(),
            unmounted: vec!["/mnt/data".into()],
        };
        assert_eq!(now(&[root, processes, devices]), unmounted);
        let read_only = data.replace(" rw ", " ro ");
        assert_eq!(now(&[root, processes, devices, &read_only]), unmounted);
        assert_eq!(now(&MACHINES), MountChanges::default());
    }

    #[test]
    fn a_mount_made_between_the_readings_is_not_the_jobs() {
        let line = |point: &str| format!("33 20 0:9 / {point} rw - tmpfs none rw");
        let (late, own) = (line("/late"), line("/own"));
        let found = |looks: [&[&str]; 2]| {
            let next = std::cell::Cell::new(0);
            let found = found_twice(|| Ok(mounts(looks[next.replace(1)]))).unwrap();
            first().sort(found).made
        };
        assert!(found([&[&late], &[]]).is_empty());
        // Another program mounts and unmounts all the time.
        assert!(found([&[&late], &[&line("/later")]]).is_empty());
        assert_eq!(found([&[&late, &own], &[&own]]), [PathBuf::from("/own")]);
    }
}

//! The sandbox's own mounts, those that the job has created or changed in it, and those that the machine no longer has.
//! A new sandbox has only its own and the machine's, so after a restore paths would lead to other files.
//!
//! Mounts of the machine propagate into the sandbox where the machine's are shared, as systemd makes them. Elsewhere, as
//! in most containers, the sandbox keeps the mounts that it has begun with.

use std::collections::{HashMap, HashSet};
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

/// Mounts of a namespace, with their numbers in it.
type Mounts = HashMap<Identity, u64>;

/// Mounts in a sandbox that the job has not made.
#[derive(Debug)]
pub(super) struct KnownMounts {
    /// Those that the machine has or had.
    machines: HashSet<Identity>,
    /// Those that only the sandbox had before its job began.
    own: HashSet<Identity>,
    /// Those of the machine's that are known to be gone.
    gone: HashSet<Identity>,
}

/// Mounts that a job sees and the machine does not have.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MountChanges {
    /// Mount points of the job's own.
    pub made: Vec<PathBuf>,
    /// Numbers of the mounts that the machine has unmounted or remounted since the job began.
    pub unmounted: Vec<u64>,
    /// The mount points of those that were not gone at the last look.
    pub newly_unmounted: Vec<PathBuf>,
}

/// The mounts at a moment.
struct Look {
    machines: Mounts,
    sandboxs: Mounts,
}

impl Look {
    fn at(sandbox: i32) -> io::Result<Self> {
        Ok(Self {
            machines: of_the_machine()?,
            sandboxs: identified(Mount::all_of(sandbox)?),
        })
    }
}

/// Reads the machine's mounts.
pub(super) fn of_the_machine() -> io::Result<Mounts> {
    Ok(identified(Mount::all_of("self")?))
}

impl KnownMounts {
    /// Reads the mounts of a sandbox that has no job yet. `sandbox` is the host pid of its pid 1; `before` are the machine's
    /// mounts before it was started.
    pub fn of(sandbox: i32, before: &Mounts) -> io::Result<Self> {
        let all = identified(Mount::all_of(sandbox)?).into_keys();
        let machines = of_the_machine()?;
        let (machines, own) =
            all.partition(|mount| machines.contains_key(mount) || before.contains_key(mount));
        Ok(Self {
            machines,
            own,
            gone: HashSet::new(),
        })
    }

    /// Compares the present mounts.
    pub fn changes(&mut self, sandbox: i32) -> io::Result<MountChanges> {
        Ok(self.compare(&Look::at(sandbox)?, Look::at(sandbox)?))
    }

    /// Compares two looks at the machine's mounts and those of the sandbox. The sandbox's follow the machine's, and the two
    /// tables cannot be read at one time: a mount that another program makes in between seems to be the job's, but not in
    /// the next look.
    fn compare(&mut self, first: &Look, second: Look) -> MountChanges {
        let mut changes = MountChanges::default();
        for (mount, number) in second.sandboxs {
            let was_alone =
                first.sandboxs.contains_key(&mount) && !first.machines.contains_key(&mount);
            if second.machines.contains_key(&mount) {
                // The machine has mounted it while the job runs, or again.
                self.gone.remove(&mount);
                self.machines.insert(mount);
                continue;
            }
            if !was_alone || self.own.contains(&mount) {
                continue;
            }
            if self.machines.contains(&mount) {
                changes.unmounted.push(number);
                if self.gone.insert(mount.clone()) {
                    changes.newly_unmounted.push(mount.0);
                }
            } else {
                changes.made.push(mount.0);
            }
        }
        changes.made.sort();
        changes.newly_unmounted.sort();
        changes
    }
}

fn identified(mounts: Vec<Mount>) -> Mounts {
    let about = |mount: Mount| {
        let is_read_only = mount.has("ro");
        let identity = (mount.point, mount.device, mount.root, is_read_only);
        (identity, mount.id)
    };
    mounts.into_iter().map(about).collect()
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

    fn mounts(lines: &[&str]) -> Mounts {
        let mounts = lines
            .iter()
            .map(|line| Mount::parse(line.as_bytes()).unwrap());
        identified(mounts.collect())
    }

    fn look(machines: &[&str], sandboxs: &[&str]) -> Look {
        let [machines, sandboxs] = [machines, sandboxs].map(mounts);
        Look { machines, sandboxs }
    }

    fn known() -> KnownMounts {
        let identities = |lines| mounts(lines).into_keys().collect();
        KnownMounts {
            machines: identities(&MACHINES),
            own: identities(&SANDBOXS),
            gone: HashSet::new(),
        }
    }

    /// What is found in a sandbox with the machine's mounts and `more`.
    fn in_sandbox(known: &mut KnownMounts, machines: &[&str], more: &[&str]) -> MountChanges {
        let more = [&MACHINES, more].concat();
        known.compare(&look(machines, &more), look(machines, &more))
    }

    #[test]
    fn a_mount_of_the_job_is_found_and_those_of_the_sandbox_are_not() {
        let made = |more: &[&str]| in_sandbox(&mut known(), &MACHINES, more).made;
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
        let without = [root, processes, devices];
        let read_only = data.replace(" rw ", " ro ");
        let remounted = [root, processes, devices, &read_only];
        let mut known = known();
        for machines in [&without[..], &remounted] {
            let changes = in_sandbox(&mut known, machines, &[]);
            assert_eq!((changes.made, changes.unmounted), (Vec::new(), vec![23]));
        }
        let again = in_sandbox(&mut known, &MACHINES, &[]);
        assert_eq!(again, MountChanges::default());
    }

    #[test]
    fn a_mount_is_newly_gone_once() {
        let late = "33 20 8:9 / /mnt/late rw - ext4 /dev/sdc rw";
        let mut known = known();
        let present = [&MACHINES[..], &[late]].concat();
        let begun = in_sandbox(&mut known, &present, &[late]);
        assert_eq!(begun, MountChanges::default(), "the machine mounts it");
        for newly in [vec![PathBuf::from("/mnt/late")], Vec::new()] {
            let gone = in_sandbox(&mut known, &MACHINES, &[late]);
            assert_eq!((gone.unmounted, gone.newly_unmounted), (vec![33], newly));
        }
    }

    #[test]
    fn a_mount_made_between_the_readings_is_not_the_jobs() {
        let line = |point: &str| format!("33 20 0:9 / {point} rw - tmpfs none rw");
        let (late, own) = (line("/late"), line("/own"));
        let made = |looks: [&[&str]; 2]| {
            let [first, second] = looks.map(|more| look(&[], more));
            known().compare(&first, second).made
        };
        assert!(made([&[&late], &[]]).is_empty());
        // Another program mounts and unmounts all the time.
        assert!(made([&[&late], &[&line("/later")]]).is_empty());
        assert_eq!(made([&[&late, &own], &[&own]]), [PathBuf::from("/own")]);
    }
}

//! Control groups (cgroups) of a process: limits on its memory, processors and number of tasks.
//!
//! CRIU restores processes in ckpt-run's own groups. That is right unless the job has moved itself into others, for example
//! to limit a part of it. The groups are folders, and exist after the job's end unless someone removes them.

use std::fmt::Display;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Component, Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::mount_table::Mount;

/// A process's place in one hierarchy of groups.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ControlGroup {
    /// Controllers of the hierarchy, separated by commas; none for that of version 2.
    pub controllers: String,
    /// Path of the group in the hierarchy; in an image, without a slash at its beginning if it is below ckpt-run's own group.
    pub path: PathBuf,
}

impl ControlGroup {
    /// Returns the groups of a process, `self` or a host pid; none if it has exited.
    pub(super) fn all_of(process: impl Display) -> Vec<Self> {
        let text = fs::read_to_string(format!("/proc/{process}/cgroup")).unwrap_or_default();
        text.lines().filter_map(Self::parse).collect()
    }

    /// Reads a line: number, controllers, path.
    fn parse(line: &str) -> Option<Self> {
        let (_, rest) = line.split_once(':')?;
        let (controllers, path) = rest.split_once(':')?;
        Some(Self {
            controllers: controllers.to_owned(),
            path: path.into(),
        })
    }

    /// Returns this group as an image records it; `None` if it is one of ckpt-run's `own`.
    pub(super) fn besides(self, own: &[Self]) -> Option<Self> {
        let same = own.iter().find(|it| it.controllers == self.controllers);
        match same.map(|own| self.path.strip_prefix(&own.path)) {
            Some(Ok(below)) if below.as_os_str().is_empty() => None,
            Some(Ok(below)) => Some(Self {
                path: below.to_owned(),
                ..self
            }),
            Some(Err(_)) | None => Some(self),
        }
    }

    /// Moves a process into this recorded group, by its host pid.
    ///
    /// # Errors
    /// The group does not exist, or belongs to another user.
    pub(super) fn take(&self, pid: i32) -> io::Result<()> {
        let mut group = self.clone();
        if self.path.is_relative() {
            let own = Self::all_of("self");
            let own = own.iter().find(|it| it.controllers == self.controllers);
            group.path = own.ok_or(io::ErrorKind::NotFound)?.path.join(&self.path);
        }
        let folder = group.folder(&Mount::all_of("self")?);
        let folder = folder.ok_or(io::ErrorKind::NotFound)?;
        let list = File::options()
            .write(true)
            .open(folder.join("cgroup.procs"));
        list?.write_all(pid.to_string().as_bytes())
    }

    /// Returns the group's folder.
    fn folder(&self, mounts: &[Mount]) -> Option<PathBuf> {
        let is_plain = |part| matches!(part, Component::RootDir | Component::Normal(_));
        if !self.path.components().all(is_plain) {
            // It is outside of ckpt-run's namespace of groups.
            return None;
        }
        let mut mounts = mounts.iter().filter(|mount| self.is_in(mount));
        mounts.find_map(|mount| {
            let below = self.path.strip_prefix(&mount.root).ok()?;
            Some(mount.point.join(below))
        })
    }

    fn is_in(&self, mount: &Mount) -> bool {
        if self.controllers.is_empty() {
            return mount.kind == "cgroup2";
        }
        let mut controllers = self.controllers.split(',');
        mount.kind == "cgroup" && controllers.all(|one| mount.is_of_file_system(one))
    }

    /// Returns the hierarchy and the path, for a message.
    pub(super) fn name(&self) -> String {
        let path = Path::new(&self.path).display();
        if self.controllers.is_empty() {
            path.to_string()
        } else {
            format!("{path} ({})", self.controllers)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn group(line: &str) -> ControlGroup {
        ControlGroup::parse(line).unwrap()
    }

    #[test]
    fn a_group_is_found_below_the_mount_of_its_hierarchy() {
        let mounts: Vec<Mount> = [
            "1 0 0:1 / /sys/fs/cgroup rw - tmpfs tmpfs rw",
            "2 1 0:2 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw,nsdelegate",
            "3 1 0:3 /docker/1 /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct",
            "4 1 0:4 / /sys/fs/cgroup/systemd rw - cgroup cgroup rw,xattr,name=systemd",
        ]
        .iter()
        .map(|line| Mount::parse(line.as_bytes()).unwrap())
        .collect();
        for (line, expected) in [
            ("0::/a/b c", Some("/sys/fs/cgroup/unified/a/b c")),
            ("0::/", Some("/sys/fs/cgroup/unified/")),
            ("0::/../b", None),
            (
                "3:cpu,cpuacct:/docker/1/a:b",
                Some("/sys/fs/cgroup/cpu,cpuacct/a:b"),
            ),
            ("3:cpu,cpuacct:/docker/2", None),
            ("4:name=systemd:/x", Some("/sys/fs/cgroup/systemd/x")),
            ("5:memory:/x", None),
        ] {
            let folder = group(line).folder(&mounts);
            assert_eq!(folder.as_deref(), expected.map(Path::new), "{line}");
        }
        assert_eq!(ControlGroup::parse("0"), None);
        assert_eq!(group("5:memory:/x").name(), "/x (memory)");
    }

    #[test]
    fn groups_below_the_own_one_are_recorded_from_there() {
        let own = [group("0::/user/a"), group("3:pids:/")];
        for (line, expected) in [
            ("0::/user/a", None),
            ("3:pids:/", None),
            ("0::/user/a/b/c", Some("b/c")),
            ("3:pids:/x", Some("x")),
            ("0::/user/ab", Some("/user/ab")),
            ("0::/", Some("/")),
            ("4:cpu:/x", Some("/x")),
        ] {
            let recorded = group(line).besides(&own).map(|group| group.path);
            assert_eq!(recorded.as_deref(), expected.map(Path::new), "{line}");
        }
    }

    #[test]
    fn this_process_can_be_moved_to_where_it_is() {
        let own = i32::try_from(std::process::id()).unwrap();
        for group in ControlGroup::all_of(own) {
            match group.take(own) {
                Ok(()) => {}
                // The hierarchy is not mounted, or belongs to root.
                Err(error) => println!("SKIPPED: {}: {error}", group.name()),
            }
        }
    }
}

//! Environment and loaded files of a process, read from `/proc`. They determine the kind of the process.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::fs::File;
use std::io::Read;
use std::os::unix::ffi::OsStrExt;

use procfs::process::{MMapPath, MemoryMap, Status};

use super::tree;

/// Limit on the environment in bytes. The kernel limits arguments and environment to a quarter of the stack's limit,
/// usually 2 MiB and at most 6 MiB.
const ENVIRONMENT_BYTES_MAX: u64 = 6 << 20;

/// Returns the initial environment of a process (a host pid): entries that each end with a zero byte. Variables set
/// later are not included. Empty if it cannot be read.
#[must_use]
pub fn environment(pid: i32) -> Vec<u8> {
    let mut environment = Vec::new();
    let read = File::open(format!("/proc/{pid}/environ")).and_then(|file| {
        file.take(ENVIRONMENT_BYTES_MAX)
            .read_to_end(&mut environment)
    });
    if let Err(error) = read {
        tracing::debug!(pid, %error, "cannot read the environment");
    }
    environment
}

/// Returns a variable of an [`environment`].
#[must_use]
pub fn variable(environment: &[u8], name: &str) -> Option<String> {
    environment.split(|byte| *byte == 0).find_map(|entry| {
        let value = entry.strip_prefix(name.as_bytes())?.strip_prefix(b"=")?;
        Some(String::from_utf8_lossy(value).into_owned())
    })
}

/// Returns the real user of a process (a host pid), which the kernel reports to receivers of its messages. The owner of
/// its folder in `/proc` differs if the process has changed its user. Returns `None` if it has exited.
#[must_use]
pub fn user(pid: i32) -> Option<u32> {
    tree::status(pid).ok().map(|status| status.ruid)
}

/// Returns the effective users of processes (host pids) without duplicates.
#[must_use]
pub fn users(pids: &[i32]) -> Vec<u32> {
    let of = |pid: &i32| tree::status(*pid).ok();
    let statuses = pids.iter().filter_map(of);
    let all = statuses.flat_map(|it| [it.ruid, it.euid, it.suid, it.fuid]);
    all.collect::<BTreeSet<u32>>().into_iter().collect()
}

/// Returns the groups of the users as which processes (host pids) act, each one's primary group first. A process that acts
/// as several users counts for the one whose files it opens, if no other process acts as that user alone. The group of a
/// setgid program is no group of its user.
#[must_use]
pub fn groups(pids: &[i32]) -> BTreeMap<u32, Vec<u32>> {
    let mut groups = BTreeMap::<u32, Vec<u32>>::new();
    let statuses = pids.iter().filter_map(|pid| tree::status(*pid).ok());
    let is_alone = |status: &Status| [status.euid, status.suid, status.fuid] == [status.ruid; 3];
    let (alone, several): (Vec<_>, Vec<_>) = statuses.partition(is_alone);
    let users_alone: BTreeSet<u32> = alone.iter().map(|status| status.ruid).collect();
    let several = several
        .into_iter()
        .filter(|status| !users_alone.contains(&status.fuid));
    for status in alone.into_iter().chain(several) {
        let known = groups.entry(status.fuid).or_default();
        for group in std::iter::once(status.rgid).chain(status.groups) {
            if !known.contains(&group) {
                known.push(group);
            }
        }
    }
    groups
}

/// Returns true if a process (a host pid) has a file mapped whose name begins with `prefix`.
#[must_use]
pub fn has_mapped(pid: i32, prefix: &str) -> bool {
    tree::maps(pid).is_ok_and(|maps| maps.iter().any(|map| is_of(map, prefix)))
}

/// Returns true if the name of a mapping's file begins with `prefix`.
pub(super) fn is_of(map: &MemoryMap, prefix: &str) -> bool {
    let MMapPath::Path(path) = &map.pathname else {
        return false;
    };
    let name = path.file_name().map(OsStr::as_bytes);
    name.is_some_and(|name| name.starts_with(prefix.as_bytes()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_child_shows_its_environment_and_its_libraries() {
        let mut child = std::process::Command::new("cat")
            .env_clear()
            .env("GIVEN", "a b")
            .stdin(std::process::Stdio::piped())
            .stdout(std::process::Stdio::piped())
            .spawn()
            .unwrap();
        // The child answers once it runs the new program.
        std::io::Write::write_all(child.stdin.as_mut().unwrap(), b"x").unwrap();
        child.stdout.as_mut().unwrap().read_exact(&mut [0]).unwrap();
        let pid = i32::try_from(child.id()).unwrap();
        assert_eq!(environment(pid), b"GIVEN=a b\0");
        assert!(has_mapped(pid, "libc.so") && !has_mapped(pid, "libnccl.so"));
        drop(child.stdin.take());
        child.wait().unwrap();
        assert!(environment(pid).is_empty() && !has_mapped(pid, "libc.so"));
    }
}

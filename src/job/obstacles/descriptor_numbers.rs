//! Descriptors with numbers close to the limit, with which no restore succeeds.
//!
//! CRIU (4.2, `choose_service_fd_base`) keeps its own descriptors above the highest one of each process that it restores.
//! CRIU raises its limit only with `CAP_SYS_RESOURCE` in the machine's own user namespace.

use std::fs;

use nix::sys::resource::{Resource, getrlimit};

use super::{Finding, Obstacle};
use crate::job::descriptors::Descriptors;

/// Descriptors of CRIU above the job's, and its margin.
const ABOVE: u64 = 16 + 16;
/// CRIU uses a multiple of this number, because the kernel allocates tables of descriptors in such steps.
const STEP: u64 = 1024 / 8;
/// Bit of `CAP_SYS_RESOURCE`.
const SYS_RESOURCE: u64 = 1 << 24;
/// `/proc/self/uid_map` of a process in the machine's own user namespace, without spaces.
const ALL_USERS: [&str; 3] = ["0", "0", "4294967295"];

/// Searches for a process with such a descriptor.
pub(super) fn find(open: &[Descriptors]) -> Option<Obstacle> {
    let limit = limit()?;
    open.iter().find_map(|Descriptors { process, all }| {
        let number = all.iter().map(|one| one.number).max()?;
        let fits = u64::try_from(number).is_ok_and(|number| fits(number, limit));
        (!fits).then(|| Obstacle::of(process, Finding::DescriptorNumber { number, limit }))
    })
}

fn fits(number: u64, limit: u64) -> bool {
    number + ABOVE <= limit / STEP * STEP
}

/// Returns the limit on descriptors of a CRIU that this process starts; `None` if the kernel does not report it.
fn limit() -> Option<u64> {
    let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE).ok()?;
    if !may_raise_limits() {
        return Some(hard);
    }
    let most = fs::read_to_string("/proc/sys/fs/nr_open").ok()?;
    Some(hard.max(most.trim().parse().ok()?))
}

fn may_raise_limits() -> bool {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mut lines = status.lines();
    let effective = lines.find_map(|line| line.strip_prefix("CapEff:\t"));
    let effective = effective.and_then(|mask| u64::from_str_radix(mask, 16).ok());
    let users = fs::read_to_string("/proc/self/uid_map").unwrap_or_default();
    let has_all_users = users.split_whitespace().eq(ALL_USERS);
    effective.is_some_and(|mask| mask & SYS_RESOURCE != 0) && has_all_users
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn criu_needs_room_above_the_last_descriptor() {
        // CRIU's own words for 299 below a limit of 300: "Can't chose service_fd_base: 256 331".
        assert!(!fits(299, 300));
        assert!(fits(224, 300) && !fits(225, 300));
        assert!(fits(992, 1024) && !fits(993, 1024));
        assert!(!fits(0, 100));
        let own = Descriptors::of(i32::try_from(std::process::id()).unwrap());
        assert_eq!(find(&[own.unwrap()]), None);
    }
}

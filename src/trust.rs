//! Users that may control the files and programs used by this process.

use std::fs;

use nix::unistd::{Gid, Group, Uid, User, geteuid};

/// Variable in which sudo stores the calling user. A user who may run ckpt-run by sudo may run everything.
const SUDO_VARIABLE: &str = "SUDO_UID";

/// User on whose behalf this process acts.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ActingFor {
    pub user: u32,
    /// User who became root by sudo.
    pub caller: Option<u32>,
    /// Number that the kernel shows for all users without a number in this user namespace, if root is one of them. Root
    /// cannot be told from them in there.
    pub unmapped: Option<u32>,
}

impl ActingFor {
    pub fn of_this_process() -> Self {
        let user = geteuid();
        let caller = std::env::var(SUDO_VARIABLE).ok();
        Self {
            user: user.as_raw(),
            caller: caller
                .filter(|_| user.is_root())
                .and_then(|id| id.parse().ok()),
            unmapped: unmapped(),
        }
    }

    /// Returns true if a user may choose the programs that this process runs.
    pub fn is_trusted(self, user: u32) -> bool {
        user == 0 || user == self.user || [self.caller, self.unmapped].contains(&Some(user))
    }
}

fn unmapped() -> Option<u32> {
    let map = fs::read_to_string("/proc/self/uid_map").ok()?;
    let overflow = fs::read_to_string("/proc/sys/kernel/overflowuid").ok()?;
    without_root(&map).then(|| overflow.trim().parse().ok())?
}

/// Returns true if user 0 has no number in a user namespace with this map: lines of first number, number outside, count.
fn without_root(map: &str) -> bool {
    let outside = |line: &str| line.split_whitespace().nth(1)?.parse().ok();
    map.lines().filter_map(outside).all(|first: u32| first != 0)
}

/// Returns true if a group is its owner's private group, which most systems create for each user: it has the owner's
/// name and no other member. A file writable for this group is as safe as one writable for its owner alone.
pub(crate) fn is_private_group(group: u32, owner: u32) -> bool {
    let (Ok(Some(group)), Ok(Some(owner))) = (
        Group::from_gid(Gid::from_raw(group)),
        User::from_uid(Uid::from_raw(owner)),
    ) else {
        return false;
    };
    group.name == owner.name && group.mem.iter().all(|member| *member == owner.name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn root_trusts_itself_and_who_called_it() {
        let root = ActingFor {
            user: 0,
            caller: Some(1000),
            unmapped: None,
        };
        assert!(root.is_trusted(0) && root.is_trusted(1000) && !root.is_trusted(1001));
        let alice = ActingFor {
            user: 1000,
            caller: None,
            unmapped: None,
        };
        assert!(alice.is_trusted(0) && alice.is_trusted(1000) && !alice.is_trusted(1001));
    }

    #[test]
    fn unmapped_users_are_trusted_only_without_root() {
        assert!(without_root("      1000       1000          1\n"));
        assert!(!without_root("         0          0 4294967295\n"));
        assert!(!without_root("0 1000 1\n1 0 65536\n"));
        let alice = ActingFor {
            user: 1000,
            caller: None,
            unmapped: Some(65534),
        };
        assert!(alice.is_trusted(65534) && !alice.is_trusted(1001));
    }

    #[test]
    fn roots_group_is_its_own_and_unknown_groups_are_nobodys() {
        assert!(is_private_group(0, 0));
        assert!(!is_private_group(3_999_999, 0));
        assert!(!is_private_group(0, 65534));
    }
}

//! Users that may control the files and programs used by this process.

use std::ffi::OsString;
use std::fs;
use std::io;
use std::path::Path;

use nix::unistd::{Gid, Group, Uid, User, geteuid};

/// Variable in which sudo stores the calling user. A user who may run ckpt-run by sudo may run everything.
const SUDO_VARIABLE: &str = "SUDO_UID";

/// Variable with the user namespace before which a parent process, or the user, checked the owners of folders. It is no
/// setting, so it lacks their prefix.
pub(crate) const CHECKED_VARIABLE: &str = "_CKPT_RUN_OWNERS_CHECKED";

/// Name and value of a variable.
pub(crate) type Variable = (&'static str, OsString);

/// Link to the user namespace of this process.
pub(crate) const NAMESPACE: &str = "/proc/self/ns/user";

/// User on whose behalf this process acts.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ActingFor {
    pub user: u32,
    /// User who became root by sudo.
    pub caller: Option<u32>,
    /// Number that the kernel shows for root and other users without a number in this user namespace, if a parent process
    /// checked the owners of folders before it entered the namespace.
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

/// Returns the variable for programs that run on behalf of this process in a user namespace without root, which it has
/// entered after it checked the owners of folders. It counts in this namespace only.
pub(crate) fn owners_checked() -> io::Result<Variable> {
    Ok((CHECKED_VARIABLE, fs::read_link(NAMESPACE)?.into()))
}

fn unmapped() -> Option<u32> {
    let checked_in = std::env::var_os(CHECKED_VARIABLE)?;
    let is_here = fs::read_link(NAMESPACE).is_ok_and(|here| here == Path::new(&checked_in));
    is_here.then(overflow_user)?
}

/// Returns the number that the kernel shows for users without a number in this user namespace.
fn overflow_user() -> Option<u32> {
    let number = fs::read_to_string("/proc/sys/kernel/overflowuid").ok()?;
    number.trim().parse().ok()
}

/// Returns true for the number of users who have none in this user namespace. Where all have one, it is that of a user.
pub(crate) fn has_no_number(user: u32) -> bool {
    let map = fs::read_to_string("/proc/self/uid_map").unwrap_or_default();
    let has_all = map.split_whitespace().eq(["0", "0", "4294967295"]);
    !has_all && overflow_user() == Some(user)
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
    fn unmapped_users_are_trusted_only_after_a_check() {
        let alice = ActingFor {
            user: 1000,
            caller: None,
            unmapped: Some(65534),
        };
        assert!(alice.is_trusted(65534) && !alice.is_trusted(1001));
        assert_eq!(ActingFor::of_this_process().unmapped, None);
    }

    #[test]
    fn roots_group_is_its_own_and_unknown_groups_are_nobodys() {
        assert!(is_private_group(0, 0));
        assert!(!is_private_group(3_999_999, 0));
        assert!(!is_private_group(0, 65534));
    }
}

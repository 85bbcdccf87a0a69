//! The users with whose rights ckpt-run acts on a job's files.
//!
//! Root's ckpt-run may supervise a job of another user, who can exchange folders and files at any moment. Where that
//! is possible, it acts with that user's rights ([`Actor`]): the kernel refuses what the user could not do, whatever
//! the path leads to by then.

use std::collections::BTreeMap;
use std::io;
use std::sync::{Arc, OnceLock};

use nix::sys::prctl;
use nix::unistd::{Gid, Uid, geteuid, getgroups, setfsgid, setfsuid};
use rustix::thread::{CapabilitiesSecureBits, capabilities_secure_bits, set_thread_groups};

use super::way::is_us;

/// Group of users whose groups are unknown: nobody's.
const NO_GROUP: u32 = 65_534;

/// The users as which a job's processes act.
#[derive(Clone, Debug, Default)]
pub struct JobUsers {
    /// Users other than root and this process's user.
    others: Vec<Arc<Rights>>,
}

/// A user and the user's groups, the primary one first.
#[derive(Debug)]
pub(super) struct Rights {
    user: u32,
    groups: Vec<u32>,
}

impl JobUsers {
    /// Returns these users with their groups, as far as they are known.
    #[must_use]
    pub fn new(users: &[u32], groups: &BTreeMap<u32, Vec<u32>>) -> Self {
        let others = users.iter().filter(|user| !is_us(**user));
        let rights = others.map(|user| {
            let groups = groups.get(user).cloned().unwrap_or_default();
            Arc::new(Rights {
                user: *user,
                groups,
            })
        });
        Self {
            others: rights.collect(),
        }
    }

    /// Returns true if the job acts as another user than root and this process's user.
    #[must_use]
    pub fn has_others(&self) -> bool {
        !self.others.is_empty()
    }

    /// Returns the actors for a file of this owner at a path that other users can change, the best one first: the owner, if
    /// it is a user of the job, then other users of the job. There are none for a job that has no other user than root, and
    /// if this process is not root.
    pub(super) fn actors(&self, owner: u32) -> impl Iterator<Item = Actor> {
        let is_owner = move |rights: &&Arc<Rights>| rights.user == owner;
        let others = self.others.iter();
        let others = others
            .clone()
            .filter(is_owner)
            .chain(others.filter(move |it| !is_owner(it)));
        let others = others.filter(|_| geteuid().is_root());
        others.map(|rights| Actor::Other(Arc::clone(rights)))
    }
}

/// The user with whose rights something is done.
#[derive(Clone, Debug)]
pub(super) enum Actor {
    /// This process's user.
    Us,
    Other(Arc<Rights>),
}

impl Actor {
    /// Returns the user's id.
    pub fn user(&self) -> u32 {
        match self {
            Self::Us => geteuid().as_raw(),
            Self::Other(rights) => rights.user,
        }
    }

    /// Returns true if permissions of files apply to the actor.
    pub fn needs_permission(&self) -> bool {
        self.user() != 0
    }

    /// Gives this thread the user's rights to files, as long as the result lives.
    ///
    /// # Errors
    /// ckpt-run has no right to change its user (`CAP_SETUID`, `CAP_SETGID`).
    pub fn act(&self) -> io::Result<Option<Acting>> {
        match self {
            Self::Us => Ok(None),
            Self::Other(rights) => Acting::begin(rights).map(Some),
        }
    }
}

/// False if other processes may not inspect this one. The kernel sets its own default at each change of the user
/// (`fs.suid_dumpable`).
static IS_DUMPABLE: OnceLock<bool> = OnceLock::new();

/// Rights of another user, which the thread loses again by the drop.
#[derive(Debug)]
pub(super) struct Acting {
    user: Uid,
    group: Gid,
    groups: Vec<Gid>,
    is_dumpable: bool,
}

impl Acting {
    fn begin(rights: &Rights) -> io::Result<Self> {
        if capabilities_secure_bits()?.contains(CapabilitiesSecureBits::NO_SETUID_FIXUP) {
            let message = "ckpt-run cannot act as the job's user, because it keeps root's rights then (SECBIT_NO_SETUID_FIXUP)";
            return Err(io::Error::new(io::ErrorKind::PermissionDenied, message));
        }
        let groups = getgroups()?;
        let is_dumpable = *IS_DUMPABLE.get_or_init(|| prctl::get_dumpable().unwrap_or(false));
        set_groups(rights.groups.iter().copied())?;
        let group = rights.groups.first().copied().unwrap_or(NO_GROUP);
        let acting = Self {
            group: setfsgid(Gid::from_raw(group)),
            user: setfsuid(Uid::from_raw(rights.user)),
            groups,
            is_dumpable,
        };
        keep_dumpable(is_dumpable);
        // Both calls return the former id, also if they fail.
        let is_user = setfsuid(Uid::from_raw(rights.user)).as_raw() == rights.user;
        let is_group = setfsgid(Gid::from_raw(group)).as_raw() == group;
        if is_user && is_group {
            Ok(acting)
        } else {
            let message = "ckpt-run may not act as the job's user (CAP_SETUID, CAP_SETGID)";
            Err(io::Error::new(io::ErrorKind::PermissionDenied, message))
        }
    }
}

impl Drop for Acting {
    fn drop(&mut self) {
        setfsuid(self.user);
        setfsgid(self.group);
        if let Err(error) = set_groups(self.groups.iter().map(|group| group.as_raw())) {
            tracing::error!(%error, "a thread cannot get its groups back");
        }
        keep_dumpable(self.is_dumpable);
    }
}

fn keep_dumpable(is_dumpable: bool) {
    if let Err(error) = prctl::set_dumpable(is_dumpable) {
        tracing::error!(%error, "cannot keep other processes from inspecting this one");
    }
}

/// Sets the groups of this thread only.
fn set_groups(groups: impl Iterator<Item = u32>) -> io::Result<()> {
    let groups: Vec<_> = groups.map(rustix::process::Gid::from_raw).collect();
    Ok(set_thread_groups(&groups)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::{self, File, Permissions};
    use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};

    #[test]
    fn an_actor_has_the_rights_of_the_user_and_no_others() {
        if !geteuid().is_root() {
            println!("SKIPPED: only root acts as others");
            return;
        }
        let (user, group) = (65_533, 65_532);
        let place = tempfile::tempdir().unwrap();
        fs::set_permissions(place.path(), Permissions::from_mode(0o711)).unwrap();
        let (open, closed) = (place.path().join("open"), place.path().join("closed"));
        for (folder, mode) in [(&open, 0o770), (&closed, 0o700)] {
            fs::create_dir(folder).unwrap();
            fs::set_permissions(folder, Permissions::from_mode(mode)).unwrap();
        }
        chown(&open, Some(0), Some(group)).unwrap();
        let was_dumpable = prctl::get_dumpable().unwrap();
        let users = JobUsers::new(&[0, user], &BTreeMap::from([(user, vec![9, group])]));
        for owner in [0, 1, user] {
            let actor = users.actors(owner).next().unwrap();
            assert_eq!(actor.user(), user, "{owner}");
            let acting = actor.act().unwrap();
            let made = File::create(open.join(owner.to_string())).unwrap();
            assert!(File::create(closed.join("file")).is_err());
            assert_eq!(prctl::get_dumpable(), Ok(was_dumpable));
            drop(acting);
            assert_eq!(prctl::get_dumpable(), Ok(was_dumpable));
            let made = made.metadata().unwrap();
            assert_eq!((made.uid(), made.gid()), (user, 9));
            File::create(closed.join("file")).unwrap();
            fs::remove_file(closed.join("file")).unwrap();
        }
        let roots = JobUsers::new(&[0], &BTreeMap::new());
        assert!(roots.actors(user).next().is_none() && !roots.has_others());
        let several = JobUsers::new(&[7, 8], &BTreeMap::new());
        let order: Vec<u32> = several.actors(8).map(|actor| actor.user()).collect();
        assert_eq!(order, [8, 7]);
    }
}

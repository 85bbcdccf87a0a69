//! Checks of the folders above a store, against replacement of the store by another user.
//!
//! The store's own folder is closed to others. But a user who can rename it in its parent folder could put another
//! store there, with an agent and programs that the job and CRIU open by path. So each folder on the path must belong
//! to a trusted user and must not be writable for others:
//!
//! | folder | is accepted |
//! |---|---|
//! | of another user | if the user is root, or became root by sudo |
//! | writable for a group or for all | with the sticky bit, if the entry in it belongs to a trusted user |
//! | writable for a group | if the group has the name of the folder's owner and no other member; or, without root, if this user is a member |
//! | of a user without a number in this user namespace | `rehearse`, or the user, checked it (`trust::CHECKED_VARIABLE`) |
//! | in a container's volume | always: the container's creator is responsible |

use std::ffi::OsStr;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use nix::unistd::{Gid, getegid, getgroups};
use rustix::fs::Stat;

use crate::path_walk::{self, Entry, WalkError};
use crate::trust::{self, ActingFor, CHECKED_VARIABLE, NAMESPACE};

/// Files that container engines create in a container, and the variable that Kubernetes sets.
const CONTAINER_MARKS: [&str; 2] = ["/.dockerenv", "/run/.containerenv"];
const CONTAINER_VARIABLE: &str = "KUBERNETES_SERVICE_HOST";

const STICKY: u32 = 0o1000;
const ALL_WRITE: u32 = 0o002;
const GROUP_WRITE: u32 = 0o020;

/// Error for a path at which another user could replace the store.
#[derive(Debug, thiserror::Error)]
pub enum PlaceError {
    /// A folder on the path belongs to another user.
    #[error(
        "{folder} belongs to user {owner}, who could put another store at {store}: use a --store whose folders belong \
         to user {user} or root"
    )]
    Owner {
        /// The store.
        store: PathBuf,
        /// The folder.
        folder: PathBuf,
        /// The owner of the folder.
        owner: u32,
        /// User id of this process.
        user: u32,
    },
    /// A folder on the path belongs to a user who has no number in this user namespace.
    #[error(
        "{folder} belongs to root or to another user without a number in this user namespace, who could put another store \
         at {store}: if all folders above it are root's or your own, confirm that by `export \
         {CHECKED_VARIABLE}=$(readlink {NAMESPACE})`; otherwise use another --store"
    )]
    Unmapped {
        /// The store.
        store: PathBuf,
        /// The folder.
        folder: PathBuf,
    },
    /// A folder on the path is writable for others.
    #[error(
        "others can write to {folder} (mode {mode:04o}) and could put another store at {store}: run `chmod +t {folder}` \
         or `chmod go-w {folder}`, or use another --store"
    )]
    Writable {
        /// The store.
        store: PathBuf,
        /// The folder.
        folder: PathBuf,
        /// Permission bits of the folder.
        mode: u32,
    },
    /// An entry in a folder that is writable for others belongs to another user.
    #[error(
        "{entry} belongs to user {owner}, in a folder that others can write to, and could be redirected at any time: \
         use another --store than {store}"
    )]
    Entry {
        /// The store.
        store: PathBuf,
        /// The folder or link.
        entry: PathBuf,
        /// Its owner.
        owner: u32,
    },
    /// A folder on the path cannot be opened.
    #[error("cannot check the folders above the store {store}")]
    Io {
        /// The store.
        store: PathBuf,
        /// The cause.
        source: io::Error,
    },
}

/// Checks the folders above a store.
pub(crate) fn check(store: &Path) -> Result<(), PlaceError> {
    let us = Us::of_this_process();
    us.walk(store, store).map(drop)
}

/// Checks the path of a store that may not exist yet: the existing folders on the path, and permission to create the
/// store in the last of them.
pub(crate) fn check_new(store: &Path) -> Result<(), PlaceError> {
    let us = Us::of_this_process();
    if store.is_dir() {
        return us.walk(store, store).map(drop);
    }
    let parents = store.ancestors().skip(1);
    let there = parents
        .filter(|path| !path.as_os_str().is_empty())
        .find(|path| path.exists())
        .unwrap_or(Path::new("."));
    let folder = us.walk(store, there)?;
    let folder_stat = rustix::fs::fstat(&folder).map_err(|errno| PlaceError::Io {
        store: store.to_owned(),
        source: errno.into(),
    })?;
    let mut ours = folder_stat;
    ours.st_uid = us.acting_for.user;
    us.judge(&Entry {
        folder: there,
        folder_stat: &folder_stat,
        name: OsStr::new(""),
        stat: &ours,
    })
    .map_err(|refusal| refusal.error(store, us.acting_for.user))
}

/// Identity and environment of this process.
struct Us {
    acting_for: ActingFor,
    groups: Vec<Gid>,
    /// Device of a container's root folder; folders on other devices belong to volumes.
    container: Option<u64>,
}

/// Reason for refusing a folder, with the folder or entry.
#[derive(Debug, PartialEq, Eq)]
enum Refusal {
    Owner(PathBuf, u32),
    Writable(PathBuf, u32),
    Entry(PathBuf, u32),
}

impl Us {
    fn of_this_process() -> Self {
        let in_container = std::env::var_os(CONTAINER_VARIABLE).is_some()
            || CONTAINER_MARKS.iter().any(|mark| Path::new(mark).exists());
        let root = in_container.then(|| rustix::fs::stat("/").ok()).flatten();
        let groups = getgroups().unwrap_or_default();
        Self {
            acting_for: ActingFor::of_this_process(),
            groups: groups.into_iter().chain([getegid()]).collect(),
            container: root.map(|stat| stat.st_dev),
        }
    }

    fn walk(&self, store: &Path, folder: &Path) -> Result<OwnedFd, PlaceError> {
        path_walk::open_folder(folder, |entry| self.judge(entry)).map_err(|error| match error {
            WalkError::Refused(refusal) => refusal.error(store, self.acting_for.user),
            WalkError::Io { source, .. } => PlaceError::Io {
                store: store.to_owned(),
                source,
            },
        })
    }

    fn judge(&self, entry: &Entry<'_>) -> Result<(), Refusal> {
        let (folder, mode) = (entry.folder_stat, entry.folder_stat.st_mode & 0o7777);
        if self.container.is_some_and(|root| root != folder.st_dev) {
            return Ok(());
        }
        if !self.acting_for.is_trusted(folder.st_uid) {
            return Err(Refusal::Owner(entry.folder.to_owned(), folder.st_uid));
        }
        let by_group = mode & GROUP_WRITE != 0 && !self.is_harmless(folder);
        if mode & ALL_WRITE == 0 && !by_group {
            return Ok(());
        }
        if mode & STICKY == 0 {
            return Err(Refusal::Writable(entry.folder.to_owned(), mode));
        }
        if !self.acting_for.is_trusted(entry.stat.st_uid) {
            let path = entry.folder.join(entry.name);
            return Err(Refusal::Entry(path, entry.stat.st_uid));
        }
        Ok(())
    }

    /// Returns true if write access for the folder's group is harmless: the group is private, or, without root, this
    /// user is a member.
    fn is_harmless(&self, folder: &Stat) -> bool {
        let is_member = self.groups.contains(&Gid::from_raw(folder.st_gid));
        (self.acting_for.user != 0 && is_member)
            || trust::is_private_group(folder.st_gid, folder.st_uid)
    }
}

impl Refusal {
    fn error(self, store: &Path, user: u32) -> PlaceError {
        let store = store.to_owned();
        match self {
            Self::Owner(folder, owner) if trust::has_no_number(owner) => {
                PlaceError::Unmapped { store, folder }
            }
            Self::Owner(folder, owner) => PlaceError::Owner {
                store,
                folder,
                owner,
                user,
            },
            Self::Writable(folder, mode) => PlaceError::Writable {
                store,
                folder,
                mode,
            },
            Self::Entry(entry, owner) => PlaceError::Entry {
                store,
                entry,
                owner,
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALICE: u32 = 1000;
    const BOB: u32 = 1001;
    /// Group id that exists on no machine.
    const LAB: u32 = 3_999_999;

    fn stat(owner: u32, group: u32, mode: u32, device: u64) -> Stat {
        let mut stat = rustix::fs::stat("/").unwrap();
        (stat.st_uid, stat.st_gid, stat.st_dev) = (owner, group, device);
        stat.st_mode = 0o040_000 | mode;
        stat
    }

    fn us(user: u32, caller: Option<u32>, container: Option<u64>) -> Us {
        Us {
            acting_for: ActingFor {
                user,
                caller,
                unmapped: None,
            },
            groups: vec![Gid::from_raw(LAB)],
            container,
        }
    }

    /// Checks an entry of `entry_owner` in a folder.
    fn judge(us: &Us, folder: &Stat, entry_owner: u32) -> Result<(), Refusal> {
        us.judge(&Entry {
            folder: Path::new("/f"),
            folder_stat: folder,
            name: OsStr::new("e"),
            stat: &stat(entry_owner, 0, 0o755, folder.st_dev),
        })
    }

    #[test]
    fn folders_that_others_decide_on_are_refused() {
        let root = us(0, None, None);
        let folder = || PathBuf::from("/f");
        for (owner, group, mode, entry, expected) in [
            (0, 0, 0o755, 0, Ok(())),
            (0, 0, 0o755, ALICE, Ok(())), // judged when it is entered
            (0, 0, 0o775, 0, Ok(())),
            (0, 0, 0o1777, 0, Ok(())),
            (0, LAB, 0o3775, 0, Ok(())),
            (ALICE, 0, 0o755, 0, Err(Refusal::Owner(folder(), ALICE))),
            (0, 0, 0o777, 0, Err(Refusal::Writable(folder(), 0o777))),
            (0, LAB, 0o2775, 0, Err(Refusal::Writable(folder(), 0o2775))),
            (
                0,
                0,
                0o1777,
                ALICE,
                Err(Refusal::Entry(folder().join("e"), ALICE)),
            ),
        ] {
            let found = judge(&root, &stat(owner, group, mode, 1), entry);
            assert_eq!(found, expected, "{owner} {group} {mode:o} {entry}");
        }
    }

    #[test]
    fn folders_of_who_calls_and_of_a_volume_are_taken() {
        let folder = stat(ALICE, LAB, 0o777, 2);
        assert!(judge(&us(0, None, Some(1)), &folder, BOB).is_ok());
        assert!(judge(&us(0, None, Some(2)), &folder, BOB).is_err());
        let home = stat(ALICE, LAB, 0o755, 1);
        assert!(judge(&us(0, Some(ALICE), None), &home, 0).is_ok());
        assert!(judge(&us(0, Some(BOB), None), &home, 0).is_err());
        assert!(judge(&us(ALICE, None, None), &home, ALICE).is_ok());
        // Shared folder of a project, checked for a member of its group.
        let project = stat(0, LAB, 0o2775, 1);
        assert!(judge(&us(ALICE, None, None), &project, ALICE).is_ok());
    }

    #[test]
    fn the_refusal_names_folder_owner_and_remedy() {
        let store = Path::new("/f/store");
        let text = Refusal::Writable("/f".into(), 0o777)
            .error(store, 0)
            .to_string();
        assert!(text.contains("`chmod +t /f`"), "{text}");
        let text = Refusal::Owner("/f".into(), 7).error(store, 0).to_string();
        assert!(text.contains("/f belongs to user 7"), "{text}");
    }
}

//! Creation of folders and named pipes that existed at the snapshot and are missing.
//!
//! Existing nodes are left alone. Nothing is created through a link: recorded paths contain no links, so an existing
//! link was created after the snapshot and may lead elsewhere.

use std::fs::{File, Metadata};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Component, Path, PathBuf};

use nix::errno::Errno;
use nix::fcntl::{OFlag, open, openat};
use nix::libc::{O_PATH, PATH_MAX};
use nix::sys::stat::{Mode, SFlag};

use super::{NODES_MAX, Node, NodeKind};
use crate::safe_path::{JobUsers, Spot, Way, give, is_just_made, is_of_kind};

/// Mode bits of a folder, such as `/tmp`, in which every user may create files but not remove those of others.
const SHARED: u32 = 0o1002;

/// Reasons why folders and named pipes cannot be recreated.
#[derive(Debug, thiserror::Error)]
pub enum NodesError {
    /// A file of another kind has the path.
    #[error("cannot recreate {}, which the job needs: {} is now a file of another type; move it away, or restore an older image", path.display(), obstacle.display())]
    Obstructed {
        /// The node to create.
        path: PathBuf,
        /// Path that is not a folder, or not of the recorded kind.
        obstacle: PathBuf,
    },
    /// Another user has created a folder of that name in a folder shared by all users.
    #[error("cannot use {}: user {owner} has created a folder of that name since the snapshot; remove it", path.display())]
    Foreign {
        /// The folder.
        path: PathBuf,
        /// Its owner.
        owner: u32,
    },
    /// A snapshot would not have recorded the node.
    #[error("cannot recreate {}: the image contains a path that no snapshot records; restore an older image", .0.display())]
    Senseless(PathBuf),
    /// The image has more nodes than a snapshot records.
    #[error(
        "cannot recreate {0} folders: a snapshot records at most {NODES_MAX}; restore an older image"
    )]
    TooMany(usize),
    /// The file of a former socket of the job cannot be removed.
    #[error("cannot remove {}, the file of a socket of the job that will be bound again", path.display())]
    Socket {
        /// The file.
        path: PathBuf,
        /// The system's error.
        #[source]
        source: io::Error,
    },
    /// The file of a restored socket cannot get its name.
    #[error("cannot rename {}, the file of a socket of the job, to the name that it had", path.display())]
    Names {
        /// The file.
        path: PathBuf,
        /// The system's error.
        #[source]
        source: io::Error,
    },
    /// A system call failed.
    #[error("cannot recreate {}, which the job needs", path.display())]
    System {
        /// The node to create.
        path: PathBuf,
        /// The system's error.
        #[source]
        source: io::Error,
    },
}

/// Checks that a snapshot can have recorded the nodes.
pub(in crate::job) fn check(nodes: &[Node]) -> Result<(), NodesError> {
    if nodes.len() > NODES_MAX {
        return Err(NodesError::TooMany(nodes.len()));
    }
    match nodes.iter().find(|node| !is_sensible(node)) {
        Some(node) => Err(NodesError::Senseless(node.path.clone())),
        None => Ok(()),
    }
}

/// Returns the missing `nodes`, each after its parent folder. Changes nothing.
pub(in crate::job) fn missing(nodes: &[Node]) -> Result<Vec<Node>, NodesError> {
    check(nodes)?;
    let mut gone = Vec::new();
    for node in nodes {
        if node.kind == NodeKind::Socket {
            continue;
        }
        if is_missing(node)? {
            gone.push(node.clone());
        }
    }
    gone.sort_unstable_by(|one, other| one.path.cmp(&other.path));
    Ok(gone)
}

/// Creates the `missing` nodes. A node that another program has created since is left alone.
pub(in crate::job) fn remake(nodes: &[Node], users: &JobUsers) -> Result<(), NodesError> {
    for node in nodes {
        let failed = |source| NodesError::System {
            path: node.path.clone(),
            source,
        };
        let Some(parent) = node.path.parent() else {
            return Err(NodesError::Senseless(node.path.clone()));
        };
        // No link leads to it.
        open_folder(node, parent)?.ok_or_else(|| failed(Errno::ENOENT.into()))?;
        let spot = Spot::of_job(&node.path, node.owner.0, users).map_err(failed)?;
        let allowed = spot.allows(node.owner.0);
        let allowed = allowed.and_then(|()| spot.may_make_for(node.owner.0));
        allowed.map_err(failed)?;
        let kind = match node.kind {
            NodeKind::Folder => SFlag::S_IFDIR,
            NodeKind::Fifo => SFlag::S_IFIFO,
            NodeKind::Socket => continue,
        };
        // Other users have no access until the owner is set.
        let made = match node.kind {
            NodeKind::Folder => spot.in_folder(|| spot.make_folder()),
            NodeKind::Fifo | NodeKind::Socket => spot.in_folder(|| spot.make_special(kind)),
        };
        match made {
            Ok(()) => {}
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists && !is_missing(node)? => {
                continue;
            }
            Err(error) => return Err(failed(error)),
        }
        hand_over(node, &spot, kind).map_err(failed)?;
        tracing::debug!(path = %node.path.display(), "created again");
    }
    Ok(())
}

/// Removes the files of the job's former sockets among the nodes, so that CRIU can bind them.
///
/// # Errors
/// A file cannot be removed.
pub fn clear_sockets(nodes: &[Node], users: &JobUsers) -> Result<(), NodesError> {
    for node in nodes.iter().filter(|node| node.kind == NodeKind::Socket) {
        let cleared = Spot::of_job(&node.path, node.owner.0, users).and_then(|spot| {
            let there = spot.metadata()?;
            let is_jobs = is_of_kind(&there, SFlag::S_IFSOCK) && there.uid() == node.owner.0;
            // CRIU reports another file.
            if !is_jobs || spot.is_lent(&there)? {
                return Ok(());
            }
            spot.allows(node.owner.0)?;
            spot.in_folder(|| spot.remove_file())
        });
        match cleared {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                let path = node.path.clone();
                return Err(NodesError::Socket {
                    path,
                    source: error,
                });
            }
            Ok(()) | Err(_) => {}
        }
    }
    Ok(())
}

fn hand_over(node: &Node, spot: &Spot, kind: SFlag) -> io::Result<()> {
    let made = spot.in_folder(|| spot.open(File::options().read(true), O_PATH))?;
    if !is_just_made(&made.metadata()?, kind, spot.user()) {
        return Err(io::ErrorKind::AlreadyExists.into());
    }
    give(&made, node.owner, node.mode)
}

/// Returns true if [`super::needed`] can have recorded this node.
fn is_sensible(node: &Node) -> bool {
    let path = &node.path;
    let mut components = path.components();
    let plain = components.next() == Some(Component::RootDir)
        && components.all(|component| matches!(component, Component::Normal(_)))
        // `components` normalizes "/a/." and "/a//b".
        && path.components().collect::<PathBuf>().as_os_str() == path.as_os_str();
    let length = path.as_os_str().len();
    plain && (2..PATH_MAX.cast_unsigned() as usize).contains(&length) && node.mode <= 0o7777
}

fn is_missing(node: &Node) -> Result<bool, NodesError> {
    let obstructed = |obstacle: &Path| NodesError::Obstructed {
        path: node.path.clone(),
        obstacle: obstacle.to_owned(),
    };
    match find(&node.path) {
        Ok(metadata) if NodeKind::of(&metadata) == Some(node.kind) => {
            refuse_foreign(node)?;
            Ok(false)
        }
        Ok(_) => Err(obstructed(&node.path)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            if Spot::of(&node.path).is_ok_and(|spot| spot.metadata().is_ok()) {
                return Err(obstructed(&node.path));
            }
            // An ancestor that is not a folder is refused before any change.
            open_folder(node, node.path.parent().unwrap_or(&node.path))?;
            Ok(true)
        }
        Err(error) if is_obstacle(&error) => {
            open_folder(node, node.path.parent().unwrap_or(&node.path))?;
            Err(obstructed(&node.path))
        }
        Err(source) => Err(NodesError::System {
            path: node.path.clone(),
            source,
        }),
    }
}

/// Inspects the node at a path. Follows a link only where no other user can have created it: an administrator may have
/// moved a folder and left a link in its place.
fn find(path: &Path) -> io::Result<Metadata> {
    let spot = Spot::of(path)?;
    let found = spot.metadata()?;
    if found.is_symlink() {
        return File::from(Way::to(path)?.into_folder()).metadata();
    }
    Ok(found)
}

fn is_obstacle(error: &io::Error) -> bool {
    matches!(
        error.raw_os_error(),
        Some(nix::libc::ENOTDIR | nix::libc::ELOOP)
    )
}

/// Refuses a node that another user has created in a shared folder in place of a node that the job has removed.
fn refuse_foreign(node: &Node) -> Result<(), NodesError> {
    let parent = node.path.parent().map(find);
    let shared = parent.is_some_and(|parent| parent.is_ok_and(|it| it.mode() & SHARED == SHARED));
    match Spot::of(&node.path).and_then(|spot| spot.metadata()) {
        Ok(there) if shared && ![0, node.owner.0].contains(&there.uid()) => {
            Err(NodesError::Foreign {
                path: node.path.clone(),
                owner: there.uid(),
            })
        }
        Ok(_) | Err(_) => Ok(()),
    }
}

/// Opens a folder, component by component, without following links. Returns `None` if it does not exist.
fn open_folder(node: &Node, folder: &Path) -> Result<Option<OwnedFd>, NodesError> {
    let flags = OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
    let failed = |errno: Errno| NodesError::System {
        path: node.path.clone(),
        source: errno.into(),
    };
    let mut opened = open("/", flags, Mode::empty()).map_err(failed)?;
    let mut path = PathBuf::from("/");
    for component in folder.components().skip(1) {
        path.push(component);
        opened = match openat(&opened, component.as_os_str(), flags, Mode::empty()) {
            Ok(next) => next,
            Err(Errno::ENOENT) => return Ok(None),
            Err(Errno::ENOTDIR | Errno::ELOOP) => {
                return Err(NodesError::Obstructed {
                    path: node.path.clone(),
                    obstacle: path,
                });
            }
            Err(errno) => return Err(failed(errno)),
        };
    }
    Ok(Some(opened))
}

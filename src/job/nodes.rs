//! Folders and named pipes that a restore needs, recorded while the job is frozen.
//!
//! A job removes temporary files when it exits: Python's multiprocessing removes `/tmp/pymp-XXXX`, which contains its
//! sockets. CRIU (4.2.1) creates socket files again and removes existing ones; the plugin allows that by paths without links
//! only. CRIU does not create the folder of a socket, folders that processes work in or have open, or named pipes. `remake`
//! restores these.

mod bound;
mod mapped_files;
mod moved_sockets;
mod remake;

use std::collections::{BTreeMap, HashSet};
use std::ffi::OsString;
use std::fs::{self, Metadata};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::descriptors::Descriptors;
use super::files::{OpenFile, is_deleted};
use crate::{checked, path_text};
pub(super) use bound::{Borrower, BoundFile, Use};
pub(super) use mapped_files::map_link;
pub use moved_sockets::{MovedSocket, name_sockets};
pub use remake::{NodesError, clear_sockets};
pub(super) use remake::{check, missing, remake};

/// Limit on the nodes of an image. A job needs few; nodes beyond the limit are not recorded.
const NODES_MAX: usize = 65_536;
/// Folders in which only the kernel can create nodes.
const KERNEL_FOLDERS: [&str; 2] = ["/proc", "/sys"];

/// A folder or named pipe that a restore creates again if it is missing.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Node {
    /// Absolute path, without links.
    #[serde(
        serialize_with = "path_text::serialize",
        deserialize_with = "checked::path"
    )]
    pub path: PathBuf,
    /// The kind of the node.
    pub kind: NodeKind,
    /// Permission bits.
    #[serde(deserialize_with = "checked::mode")]
    pub mode: u32,
    /// Owner and group.
    #[serde(deserialize_with = "checked::owner")]
    pub owner: (u32, u32),
}

/// The kind of a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum NodeKind {
    /// A folder.
    Folder,
    /// A named pipe.
    Fifo,
    /// The file of a unix socket that was bound by a name that differs from its path. CRIU makes it, and does not remove the one
    /// that is there.
    Socket,
}

impl NodeKind {
    fn of(metadata: &Metadata) -> Option<Self> {
        let kind = metadata.file_type();
        if kind.is_dir() {
            Some(Self::Folder)
        } else {
            kind.is_fifo().then_some(Self::Fifo)
        }
    }
}

/// Lists the nodes needed to restore frozen processes, which have `open` open and write to `files`, by path.
///
/// Nodes without a name are left out, because CRIU restores them. Nodes that cannot be inspected are left out too: the
/// restore needs a node only if it is missing by then.
#[must_use]
pub fn needed(open: &[Descriptors], files: &[OpenFile]) -> Needed {
    let mut recording = Recording::default();
    for file in files.iter().filter(|file| file.written()) {
        recording.add_parent(&file.path);
    }
    for one in open {
        recording.add_process(one);
    }
    if recording.nodes.len() >= NODES_MAX {
        tracing::warn!(
            max = NODES_MAX,
            "too many open folders: not all can be recreated in a restore"
        );
    }
    Needed {
        nodes: recording.nodes.into_values().collect(),
        moved_sockets: recording.moved,
    }
}

/// Nodes and names that a restore needs.
#[derive(Debug)]
pub struct Needed {
    /// Folders, named pipes, and files of sockets that CRIU does not remove.
    pub nodes: Vec<Node>,
    /// Sockets whose files have other names than those by which CRIU binds them.
    pub moved_sockets: Vec<MovedSocket>,
}

#[derive(Default)]
struct Recording {
    nodes: BTreeMap<PathBuf, Node>,
    /// Targets of the descriptors of processes handled before.
    seen: HashSet<OsString>,
    moved: Vec<MovedSocket>,
}

impl Recording {
    fn add_process(&mut self, open: &Descriptors) {
        let pid = open.process.host_pid;
        for link in ["cwd", "root"] {
            let link = format!("/proc/{pid}/{link}");
            if let (Ok(path), Ok(metadata)) = (fs::read_link(&link), fs::metadata(&link)) {
                self.add_named(&path, &metadata);
            }
        }
        let borrower = Borrower::new(pid);
        for descriptor in &open.all {
            let target = &descriptor.target;
            let is_socket = is_socket(target);
            if !(is_socket || target.is_absolute())
                || !self.seen.insert(target.clone().into_os_string())
            {
                continue;
            }
            if is_deleted(target) {
                // CRIU temporarily creates the file again in its folder.
                self.add_parent(target);
            } else if !is_socket {
                if let Some(metadata) = descriptor.metadata() {
                    self.add_named(target, metadata);
                }
            } else if let Some((file, usage)) = borrower
                .as_ref()
                .and_then(|it| it.named_socket(descriptor.number))
            {
                self.add_socket(&file, usage);
            }
        }
    }

    fn add_socket(&mut self, file: &BoundFile, usage: Use) {
        let is_bound = matches!(usage, Use::Bound | Use::BoundAndConnected);
        match file {
            BoundFile::At { path, is_indirect } => {
                self.add_parent(path);
                if *is_indirect
                    && is_bound
                    && let Ok(metadata) = fs::symlink_metadata(path)
                {
                    self.add(path, NodeKind::Socket, &metadata);
                }
            }
            BoundFile::Moved(moved) => {
                self.add_parent(&moved.bound);
                moved.paths.iter().for_each(|path| self.add_parent(path));
                if is_bound && !self.moved.contains(moved) {
                    self.moved.push(moved.clone());
                }
            }
            BoundFile::Elsewhere(_) | BoundFile::Removed(_) | BoundFile::Lost(_) => {}
        }
    }

    /// Adds the node at this path, or the one that was opened by this path.
    fn add_named(&mut self, path: &Path, metadata: &Metadata) {
        if let Some(kind) = NodeKind::of(metadata).filter(|_| has_name(metadata, path)) {
            self.add_parent(path);
            self.add(path, kind, metadata);
        }
    }

    /// Adds the folder of `path` and all folders above it.
    fn add_parent(&mut self, path: &Path) {
        // Many files are in few folders, and a folder is added after those above it.
        if path
            .parent()
            .is_some_and(|parent| self.nodes.contains_key(parent))
        {
            return;
        }
        let folders: Vec<&Path> = path.ancestors().skip(1).collect();
        for folder in folders.into_iter().rev() {
            if self.nodes.contains_key(folder) {
                continue;
            }
            match fs::symlink_metadata(folder) {
                Ok(metadata) if metadata.is_dir() => self.add(folder, NodeKind::Folder, &metadata),
                Ok(_) | Err(_) => return,
            }
        }
    }

    fn add(&mut self, path: &Path, kind: NodeKind, metadata: &Metadata) {
        let ours =
            path.parent().is_some() && !KERNEL_FOLDERS.iter().any(|own| path.starts_with(own));
        if !ours || self.nodes.len() >= NODES_MAX {
            return;
        }
        let node = Node {
            path: path.to_owned(),
            kind,
            mode: metadata.mode() & 0o7777,
            owner: (metadata.uid(), metadata.gid()),
        };
        self.nodes.insert(node.path.clone(), node);
    }
}

/// Returns true if a link in `/proc/PID/fd` names a socket.
pub(super) fn is_socket(target: &Path) -> bool {
    target.as_os_str().as_bytes().starts_with(b"socket:")
}

fn has_name(metadata: &Metadata, path: &Path) -> bool {
    let identity = |one: &Metadata| (one.dev(), one.ino());
    fs::symlink_metadata(path).is_ok_and(|named| identity(&named) == identity(metadata))
}

#[cfg(test)]
mod tests;

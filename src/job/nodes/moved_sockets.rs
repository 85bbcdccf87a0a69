//! Unix sockets whose file was renamed, or has other names by hard links, as `supervisord` makes them: it binds a temporary name,
//! links the file to its final one, and removes the first.
//!
//! CRIU (4.2) binds a socket by the name by which it was bound. Afterwards, before the tasks run, its file gets the names that it
//! had. The plugin keeps CRIU from taking a file with another name for a removed one (`socket_names`).

use std::fs::Metadata;
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::NodesError;
use crate::job::files::names_beside;
use crate::safe_path::{JobUsers, Spot};
use crate::{checked, path_text};

/// A socket whose file has other names than that by which it was bound.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MovedSocket {
    /// Path at which CRIU binds it.
    #[serde(
        serialize_with = "path_text::serialize",
        deserialize_with = "checked::path"
    )]
    pub bound: PathBuf,
    /// Paths of its file, at least one.
    #[serde(
        serialize_with = "path_text::list::serialize",
        deserialize_with = "checked::paths"
    )]
    pub paths: Vec<PathBuf>,
    /// Its owner.
    pub owner: u32,
}

impl MovedSocket {
    /// Finds the names of a socket's file, which was bound by `name`. `known` is its path, or its former one. Returns `None` if
    /// there are others, or if something else has the name that CRIU will bind.
    #[must_use]
    pub fn find(name: &Path, known: &Path, metadata: &Metadata) -> Option<Self> {
        let bound = if name.is_absolute() {
            name.parent()?.canonicalize().ok()?.join(name.file_name()?)
        } else if known.ends_with(name) {
            known.to_owned()
        } else {
            return None;
        };
        let mut paths: Vec<PathBuf> = names_beside(&bound, metadata).collect();
        if bound.parent() != known.parent() {
            paths.extend(names_beside(known, metadata));
        }
        let is_free = paths.contains(&bound) || bound.symlink_metadata().is_err();
        (is_free && paths.len() as u64 == metadata.nlink()).then_some(Self {
            bound,
            paths,
            owner: metadata.uid(),
        })
    }

    fn is_jobs(&self, found: &Metadata) -> bool {
        found.file_type().is_socket() && found.uid() == self.owner
    }

    fn give_names(&self, users: &JobUsers) -> io::Result<()> {
        let bound = Spot::of_job(&self.bound, self.owner, users)?;
        bound.allows(self.owner)?;
        if !self.is_jobs(&bound.metadata()?) {
            return Err(io::ErrorKind::AlreadyExists.into());
        }
        for path in self.paths.iter().filter(|path| **path != self.bound) {
            let spot = Spot::of_job(path, self.owner, users)?;
            match spot.metadata() {
                // That of the former socket.
                Ok(there) if self.is_jobs(&there) => spot.in_folder(|| spot.remove_file())?,
                Ok(_) => return Err(io::ErrorKind::AlreadyExists.into()),
                Err(_) => spot.allows(self.owner)?,
            }
            spot.in_folder(|| bound.link_to(&spot))?;
        }
        if !self.paths.contains(&self.bound) {
            bound.in_folder(|| bound.remove_file())?;
        }
        Ok(())
    }
}

/// Gives the files of restored sockets the names that they had.
///
/// # Errors
/// The first file that cannot get a name.
pub fn name_sockets(sockets: &[MovedSocket], users: &JobUsers) -> Result<(), NodesError> {
    for socket in sockets {
        let named = socket.give_names(users);
        named.map_err(|source| NodesError::Names {
            path: socket.bound.clone(),
            source,
        })?;
    }
    Ok(())
}

//! A prefix: a folder with a CRIU and its own C library.
//!
//! This module lists the folders of prefixes, returns the command of a prefix, and checks if a prefix that the user did
//! not name is trusted, because it runs with ckpt-run's privileges. It starts nothing.

use std::ffi::OsString;
use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use super::FindError;
use crate::trust::{ActingFor, is_private_group};

/// Prefix of a manual installation.
pub(super) const LOCAL_PREFIX: &str = "/usr/local/lib/ckpt-run/criu";

/// Last folder in the path of a program built in a checkout: `target/release/ckpt-run`.
const BUILD_FOLDERS: [&str; 2] = ["release", "debug"];

/// Write permission of the file's group.
const GROUP_WRITES: u32 = 0o020;
/// Write permission of users who are neither the owner nor in the group.
const OTHERS_WRITE: u32 = 0o002;

/// The CRIU of a prefix.
#[derive(Debug)]
pub(super) struct Prefix {
    root: PathBuf,
    program: PathBuf,
    libraries: PathBuf,
    loader: PathBuf,
}

impl Prefix {
    /// Opens the prefix `root`.
    pub fn open(root: &Path) -> Result<Self, FindError> {
        let program = root.join("usr/sbin/criu");
        let folders = fs::read_dir(root.join("usr/lib")).into_iter().flatten();
        let found = folders
            .filter_map(|entry| Some(entry.ok()?.path()))
            .find_map(|folder| Some((folder.clone(), loader_in(&folder)?)))
            .filter(|_| is_program(&program));
        let Some((libraries, loader)) = found else {
            let path = root.to_owned();
            return Err(FindError::NotAPrefix { path });
        };
        Ok(Self {
            root: root.to_owned(),
            program,
            libraries,
            loader,
        })
    }

    /// Returns the prefix if no other user can change its programs.
    pub fn trusted(self) -> Result<Self, FindError> {
        let parts = [&self.program, &self.loader].into_iter();
        let weak = parts
            .flat_map(|part| part.ancestors().take_while(|p| p.starts_with(&self.root)))
            .find(|part| !is_ours_alone(part));
        match weak.map(Path::to_owned) {
            None => Ok(self),
            Some(part) => Err(FindError::Untrusted {
                path: self.root,
                part,
            }),
        }
    }

    /// Returns the command line: the loader, with the path of the libraries.
    pub fn argv(&self) -> Vec<OsString> {
        vec![
            self.loader.clone().into(),
            "--library-path".into(),
            self.libraries.clone().into(),
            self.program.clone().into(),
        ]
    }
}

/// Returns the prefixes that belong to the installation of `program`.
pub(super) fn beside(program: &Path) -> Vec<PathBuf> {
    let Some(folder) = program.parent() else {
        return Vec::new();
    };
    let built = BUILD_FOLDERS.iter().any(|name| folder.ends_with(name));
    let checkout = folder.ancestors().nth(2).filter(|_| built);
    let installed = folder.parent();
    let prefixes = [
        checkout.map(|root| root.join(".criu")),
        installed.map(|root| root.join("lib/ckpt-run/criu")),
    ];
    prefixes.into_iter().flatten().collect()
}

/// Returns true if the path belongs to a trusted user and no other user can write to it. With umask 002, pip makes
/// files writable for the user's private group, which is permitted.
fn is_ours_alone(path: &Path) -> bool {
    let us = ActingFor::of_this_process();
    fs::metadata(path).is_ok_and(|meta| {
        let by_group = meta.mode() & GROUP_WRITES == 0 || is_private_group(meta.gid(), meta.uid());
        us.is_trusted(meta.uid()) && meta.mode() & OTHERS_WRITE == 0 && by_group
    })
}

/// Returns the dynamic loader in a folder, such as `ld-linux-x86-64.so.2`; its name depends on the architecture.
fn loader_in(folder: &Path) -> Option<PathBuf> {
    fs::read_dir(folder)
        .ok()?
        .filter_map(|entry| Some(entry.ok()?.path()))
        .find(|path| {
            path.file_name()
                .is_some_and(|n| n.to_string_lossy().starts_with("ld-linux-"))
                && is_program(path)
        })
}

fn is_program(path: &Path) -> bool {
    path.metadata()
        .is_ok_and(|meta| meta.is_file() && meta.permissions().mode() & 0o111 != 0)
}

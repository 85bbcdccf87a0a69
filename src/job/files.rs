//! Regular files that a frozen job has open or mapped.
//!
//! CRIU records descriptors and offsets, but not a file's content. This list is made while the job is frozen and
//! records the state of each file.

use std::collections::{BTreeMap, HashMap};
use std::ffi::OsStr;
use std::fs::{self, Metadata};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use nix::fcntl::OFlag;
use nix::sys::statfs::{TMPFS_MAGIC, statfs};
use procfs::ProcError;
use procfs::process::{MMPermissions, MMapPath};
use serde::{Deserialize, Serialize};

use super::descriptors::{Descriptor, Descriptors};
use super::nodes::map_link;
use super::obstacles::is_proc_file;
use super::tree;
use crate::sync::in_parts;
use crate::{checked, clock, path_text};

/// Prefix of the names of CRIU's temporary hard links; a number follows.
pub(super) const LINK_PREFIX: &str = "link_remap.";
/// End of the target of a link in `/proc` to a removed file.
const DELETED: &[u8] = b" (deleted)";

/// The job's access to a file, combined over all its descriptors and mappings.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Access {
    /// The file is only read.
    Read,
    /// The file is mapped but not open, as programs and libraries usually are.
    Map,
    /// The file is written but never read.
    Write,
    /// The file is read and written.
    Update,
}

/// The state of a file at the freeze.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[allow(
    clippy::struct_excessive_bools,
    reason = "facts that do not depend on each other"
)]
pub struct OpenFile {
    /// Absolute path.
    #[serde(
        serialize_with = "path_text::serialize",
        deserialize_with = "checked::path"
    )]
    pub path: PathBuf,
    /// The job's access to the file.
    pub access: Access,
    /// Inode number.
    pub inode: u64,
    /// Size in bytes.
    #[serde(deserialize_with = "checked::size")]
    pub size: u64,
    /// Time of the last change of content, in nanoseconds since 1970.
    pub modified_ns: i64,
    /// Permission bits.
    #[serde(deserialize_with = "checked::mode")]
    pub mode: u32,
    /// Owner and group.
    #[serde(deserialize_with = "checked::owner")]
    pub owner: (u32, u32),
    /// True if the file is in memory (tmpfs) and is lost in a reboot.
    pub in_memory: bool,
    /// Hash of the ends of the content: of a file that the job only appends to, and of mapped files, programs and libraries
    /// that it does not write.
    #[serde(default)]
    pub sample: Option<u64>,
    /// True if such a mapped file, program or library was changed after the freeze, before its sample was taken.
    #[serde(default)]
    pub changed: bool,
    /// True if the job had locked the file or a part of it.
    #[serde(default)]
    pub is_locked: bool,
    /// Hard links needed during a restore.
    #[serde(
        default,
        serialize_with = "path_text::list::serialize",
        deserialize_with = "checked::paths"
    )]
    pub links: Vec<PathBuf>,
    /// True if some descriptor writes at any offset, not only at the end. Unused after the snapshot.
    #[serde(skip)]
    pub rewrites: bool,
    /// True if the file is mapped, shared and writable. Unused after the snapshot.
    #[serde(skip)]
    pub is_mapped: bool,
}

impl OpenFile {
    /// Returns true if the job may have changed the file since the snapshot.
    #[must_use]
    pub fn written(&self) -> bool {
        match self.access {
            Access::Write | Access::Update => true,
            Access::Read | Access::Map => false,
        }
    }

    /// Returns true if the job cannot change the file's content at the snapshot, only append to it.
    #[must_use]
    pub fn is_appended(&self) -> bool {
        self.written() && !self.rewrites
    }
}

/// The reason why the open files could not be listed.
#[derive(Debug, thiserror::Error)]
pub enum FilesError {
    /// An eventfd has semaphore semantics. CRIU (4.2.1) would restore it as a plain counter, and the job would
    /// misbehave without an error.
    #[error(
        "process {pid} has an eventfd with semaphore semantics (EFD_SEMAPHORE), which CRIU cannot restore; let the job \
         close it before snapshots"
    )]
    Semaphore {
        /// Pid as the host sees it.
        pid: i32,
    },
    /// The path leads to a different file outside of the job, because a process of the job has private mounts.
    #[error(
        "cannot open {} from outside of the job, which has it open: a process of the job has mounted a file system \
         over it; mount the file system before ckpt-run starts, or unmount it", .0.display()
    )]
    Elsewhere(PathBuf),
    /// `/proc` of a process could not be read.
    #[error("cannot list the open files of process {pid}")]
    Process {
        /// Pid as the host sees it.
        pid: i32,
        /// The reason.
        #[source]
        source: ProcError,
    },
}

/// Lists the regular files that frozen processes with these descriptors have open or mapped, by path.
///
/// Unlinked files are left out, because CRIU saves their content. Files of `/proc` are left out, because they have no
/// content to save and differ in the supervisor's `/proc`.
///
/// # Errors
/// A process has exited.
pub fn collect(open: &[Descriptors]) -> Result<Vec<OpenFile>, FilesError> {
    let mut found = Found::default();
    for one in open {
        let pid = one.process.host_pid;
        if one.all.iter().any(is_semaphore) {
            return Err(FilesError::Semaphore { pid });
        }
        let collected = found.collect(one);
        collected.map_err(|source| FilesError::Process { pid, source })?;
    }
    let found: Vec<OpenFile> = found.files.into_values().collect();
    // The supervisor will open and change a written file by its path.
    let is_elsewhere = |file: &&OpenFile| {
        let there = || fs::symlink_metadata(&file.path);
        file.written() && !there().is_ok_and(|there| there.ino() == file.inode)
    };
    let elsewhere = in_parts(&found, |part| part.iter().find(is_elsewhere).cloned());
    match elsewhere.into_iter().flatten().next() {
        Some(file) => Err(FilesError::Elsewhere(file.path)),
        None => Ok(found),
    }
}

/// Returns true if a process (a host pid) has a file open whose path begins with `prefix`.
#[must_use]
pub fn has_open(pid: i32, prefix: &str) -> bool {
    let Ok(descriptors) = fs::read_dir(format!("/proc/{pid}/fd")) else {
        return false;
    };
    // Only links are read: the check covers every process while the job is frozen.
    descriptors.flatten().any(|one| {
        fs::read_link(one.path())
            .is_ok_and(|path| path.as_os_str().as_bytes().starts_with(prefix.as_bytes()))
    })
}

/// The files that were found, by path.
#[derive(Default)]
struct Found {
    files: BTreeMap<PathBuf, OpenFile>,
    /// File systems by device; the value is true if they are in memory.
    in_memory: HashMap<u64, bool>,
}

impl Found {
    fn collect(&mut self, open: &Descriptors) -> Result<(), ProcError> {
        for descriptor in &open.all {
            let path = &descriptor.target;
            if !path.is_absolute() || is_proc_file(&descriptor.link(), path) {
                continue;
            }
            let Some(metadata) = descriptor.metadata().filter(|it| it.is_file()) else {
                continue;
            };
            let usage = Usage::of_descriptor(flags(descriptor)?, is_locked(descriptor));
            if is_deleted(path) {
                self.note_linked(path, metadata, usage);
            } else {
                self.note(path, metadata, usage);
            }
        }
        self.collect_mapped(open.process.host_pid)
    }

    fn collect_mapped(&mut self, pid: i32) -> Result<(), ProcError> {
        for map in tree::maps(pid)? {
            let MMapPath::Path(mut path) = map.pathname.clone() else {
                continue;
            };
            let link = || map_link(pid, &map);
            if path.to_string_lossy().contains(char::REPLACEMENT_CHARACTER)
                && let Ok(named) = fs::read_link(link())
            {
                path = named;
            }
            let usage = Usage::of_mapping(map.perms);
            if self
                .files
                .get(&path)
                .is_some_and(|known| usage.is_of(known))
            {
                continue;
            }
            match fs::metadata(&path) {
                Ok(metadata) if metadata.ino() == map.inode => self.note(&path, &metadata, usage),
                found => {
                    let has_name = fs::metadata(link())
                        .is_ok_and(|metadata| self.note_linked(&path, &metadata, usage));
                    // Overlays on several file systems (before Linux 6.8) name other inodes in `maps`. A written file is
                    // not taken for another one at its path.
                    let may_be_it = !has_name && usage.access == Access::Map && !is_deleted(&path);
                    if let Ok(metadata) = found
                        && may_be_it
                    {
                        self.note(&path, &metadata, usage);
                    }
                }
            }
        }
        self.collect_program(pid);
        Ok(())
    }

    /// Adds the program itself, which need not be mapped any more. A zombie has none.
    fn collect_program(&mut self, pid: i32) {
        let link = PathBuf::from(format!("/proc/{pid}/exe"));
        let usage = Usage::of_mapping(MMPermissions::READ);
        if let Ok(path) = fs::read_link(&link)
            && !self.files.contains_key(&path)
            && let Ok(metadata) = fs::metadata(&link)
        {
            if is_deleted(&path) {
                self.note_linked(&path, &metadata, usage);
            } else {
                self.note(&path, &metadata, usage);
            }
        }
    }

    fn note(&mut self, path: &Path, metadata: &Metadata, usage: Usage) {
        if !metadata.is_file() || metadata.nlink() == 0 || !path.is_absolute() {
            return;
        }
        let is_in_memory = usage.access > Access::Map
            && *self
                .in_memory
                .entry(metadata.dev())
                .or_insert_with(|| in_memory(path));
        let access = usage.access;
        let file = self
            .files
            .entry(path.to_owned())
            .or_insert_with(|| OpenFile {
                path: path.to_owned(),
                access,
                inode: metadata.ino(),
                size: metadata.size(),
                modified_ns: modified_ns(metadata),
                mode: metadata.mode() & 0o7777,
                owner: (metadata.uid(), metadata.gid()),
                in_memory: false,
                sample: None,
                changed: false,
                is_locked: false,
                links: Vec::new(),
                rewrites: false,
                is_mapped: false,
            });
        file.access = file.access.max(access);
        file.in_memory |= is_in_memory;
        file.rewrites |= usage.rewrites;
        file.is_locked |= usage.is_locked;
        file.is_mapped |= usage.is_mapped;
    }

    /// Records a file whose name was removed after it was opened but that has other names: the C library creates named
    /// semaphores in this way. A file without any name is left out, because CRIU saves its content. Returns false if no name
    /// was found.
    fn note_linked(&mut self, path: &Path, metadata: &Metadata, usage: Usage) -> bool {
        if !metadata.is_file() || metadata.nlink() == 0 {
            return false;
        }
        let (links, names): (Vec<_>, Vec<_>) =
            names_beside(path, metadata).partition(|path| is_helper(path));
        let Some(name) = names.first().or(links.first()) else {
            return false;
        };
        self.note(name, metadata, usage);
        if let Some(file) = self.files.get_mut(name) {
            file.links = links;
        }
        true
    }
}

/// Returns true for an eventfd with semaphore semantics. Kernels before 6.9 do not report them.
fn is_semaphore(descriptor: &Descriptor) -> bool {
    descriptor.is_kernels("eventfd") && descriptor.info().contains("eventfd-semaphore: 1")
}

/// Returns the flags of a descriptor.
pub(super) fn flags(descriptor: &Descriptor) -> Result<OFlag, ProcError> {
    let mut lines = descriptor.info().lines();
    let octal = lines.find_map(|line| line.strip_prefix("flags:"));
    let bits = i32::from_str_radix(octal.unwrap_or_default().trim(), 8)
        .map_err(|error| ProcError::Other(error.to_string()))?;
    Ok(OFlag::from_bits_truncate(bits))
}

/// Returns the time of the last change of content, in nanoseconds since 1970.
pub(super) fn modified_ns(metadata: &Metadata) -> i64 {
    clock::file_time_ns(metadata.mtime(), metadata.mtime_nsec())
}

/// Returns true if `/proc` marks the name as deleted.
pub(super) fn is_deleted(path: &Path) -> bool {
    path.as_os_str().as_bytes().ends_with(DELETED)
}

/// Returns the former path of an open or mapped file if CRIU cannot find it by a name: that path was removed, and the file has
/// other names, but not in the same folder.
pub(super) fn path_without_names(path: &Path, metadata: &Metadata) -> Option<PathBuf> {
    let former = path.as_os_str().as_bytes().strip_suffix(DELETED)?;
    let is_linked = metadata.is_file() && metadata.nlink() > 0;
    let has_none = is_linked && names_beside(path, metadata).all(|path| is_helper(&path));
    has_none.then(|| OsStr::from_bytes(former).into())
}

/// Returns the names of a file in the folder of this path.
pub(super) fn names_beside(path: &Path, metadata: &Metadata) -> impl Iterator<Item = PathBuf> {
    let entries = path.parent().map(fs::read_dir).into_iter().flatten();
    let names = entries.flatten().flatten().map(|entry| entry.path());
    let file = (metadata.dev(), metadata.ino());
    names.filter(move |path| {
        let found = fs::symlink_metadata(path);
        found.is_ok_and(|one| (one.dev(), one.ino()) == file)
    })
}

/// Returns true for a hard link that CRIU creates during a dump or restore for a file whose name was removed.
fn is_helper(path: &Path) -> bool {
    path.file_name()
        .is_some_and(|name| name.as_bytes().starts_with(LINK_PREFIX.as_bytes()))
}

fn in_memory(path: &Path) -> bool {
    statfs(path).is_ok_and(|about| about.filesystem_type() == TMPFS_MAGIC)
}

/// Access to a file through one descriptor or mapping.
#[derive(Clone, Copy)]
struct Usage {
    pub access: Access,
    /// True for writes at any offset.
    pub rewrites: bool,
    /// True for a writable mapping.
    pub is_mapped: bool,
    pub is_locked: bool,
}

impl Usage {
    pub fn of_descriptor(flags: OFlag, is_locked: bool) -> Self {
        let access = match flags & OFlag::O_ACCMODE {
            OFlag::O_RDWR => Access::Update,
            OFlag::O_WRONLY => Access::Write,
            _ => Access::Read,
        };
        Self {
            access,
            rewrites: access > Access::Read && !flags.contains(OFlag::O_APPEND),
            is_mapped: false,
            is_locked,
        }
    }

    /// Returns the access of a mapping. Writes to a private mapping never reach the file.
    pub fn of_mapping(permissions: MMPermissions) -> Self {
        let rewrites = permissions.contains(MMPermissions::SHARED | MMPermissions::WRITE);
        let access = if rewrites {
            Access::Update
        } else {
            Access::Map
        };
        Self {
            access,
            rewrites,
            is_mapped: rewrites,
            is_locked: false,
        }
    }

    /// Returns true if the known access of the file already includes this one.
    pub fn is_of(self, known: &OpenFile) -> bool {
        known.access >= self.access
            && known.rewrites >= self.rewrites
            && known.is_mapped >= self.is_mapped
    }
}

/// Returns true if the process has locked the file, or a part of it. A lease is no lock.
fn is_locked(descriptor: &Descriptor) -> bool {
    let mut lines = descriptor.info().lines();
    lines.any(|line| line.starts_with("lock:") && !line.contains(" LEASE "))
}

#[cfg(test)]
mod tests {
    use super::super::file_sample::sample_appended;
    use super::*;
    use std::fs::File;
    use std::io::Write;

    #[test]
    fn own_files_are_listed_with_their_access_and_size() {
        let folder = tempfile::tempdir().unwrap();
        let (log, both, gone) = (
            folder.path().join("log"),
            folder.path().join("both"),
            folder.path().join("gone"),
        );
        let mut log_file = File::create(&log).unwrap();
        log_file.write_all(b"hello").unwrap();
        let _both = File::options()
            .read(true)
            .write(true)
            .create(true)
            .truncate(true)
            .open(&both)
            .unwrap();
        let appended = folder.path().join("appended");
        let mut long = File::options()
            .append(true)
            .create(true)
            .open(&appended)
            .unwrap();
        long.write_all(&[b'x'; 4096]).unwrap();
        let _reader = File::open(&log).unwrap();
        let _gone = File::create(&gone).unwrap();
        fs::remove_file(&gone).unwrap();

        let me = i32::try_from(std::process::id()).unwrap();
        // Other tests of this process close files at the same time.
        let look = || collect(&[Descriptors::of(me).ok()?]).ok();
        let mut files = (0..100).find_map(|_| look()).unwrap();
        sample_appended(&mut files);
        let of = |path: &Path| files.iter().find(|file| file.path == path);
        assert_eq!(
            of(&log).map(|file| (file.access, file.size)),
            Some((Access::Write, 5))
        );
        assert_eq!(of(&both).map(|file| file.access), Some(Access::Update));
        assert!(of(&gone).is_none());
        // Data written before the end of the file may be a result of the job.
        let sampled = |path| of(path).map(|file| file.sample.is_some());
        assert_eq!(sampled(&appended), Some(true));
        assert_eq!(sampled(&log), Some(false));
        assert!(files.iter().any(|file| file.access == Access::Map));
    }
}

#![allow(
    unsafe_code,
    reason = "fanotify and file handles have no safe interface"
)]
//! A fanotify group that reports changes by folder, name and file, and the resolution of file handles.
//!
//! The format of events is that of fanotify(7): metadata, then records, each with a file handle and perhaps a name.

use std::cmp::Reverse;
use std::collections::{HashMap, HashSet};
use std::ffi::{CString, OsString};
use std::fs::{self, File, Metadata};
use std::io::{self, Read};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::libc;
use nix::sys::statfs::{TMPFS_MAGIC, fstatfs};

/// Reported changes.
const MASK: u64 = libc::FAN_CREATE
    | libc::FAN_MODIFY
    | libc::FAN_ATTRIB
    | libc::FAN_CLOSE_WRITE
    | libc::FAN_MOVED_FROM
    | libc::FAN_MOVED_TO
    | libc::FAN_DELETE
    | libc::FAN_ONDIR;
/// Bytes per read, room for about a thousand events.
const READ_BYTES: usize = 128 << 10;
/// Bytes of an event's metadata.
const HEAD_BYTES: usize = size_of::<libc::fanotify_event_metadata>();
/// Bytes of a record before its file handle: type, padding, length, file system.
const RECORD_BYTES: usize = 12;
/// Bytes of a file handle before its opaque part: length, type.
const HANDLE_BYTES: usize = 8;
/// Largest opaque part of a file handle (`MAX_HANDLE_SZ`).
const HANDLE_BYTES_MAX: usize = 128;
/// Limit on the attempts to resolve the path of a folder that is renamed continuously.
const PATH_TRIES: usize = 100;
/// Limit on the cached paths of folders.
const FOLDERS_MAX: usize = 65_536;

/// Pid that the kernel reports for processes outside of this PID namespace.
const OUTSIDE: i32 = 0;

/// Identifier of a file system in events (`statfs.f_fsid`).
pub(super) type FilesystemId = [u8; 8];

/// Kind of a change of a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) enum Change {
    /// A file or folder was created.
    Created,
    /// A file or folder was renamed to this name, perhaps replacing another one.
    MovedTo,
    /// The content, mode, owner or times changed.
    Changed,
    /// A file that was open for writing was closed.
    Closed,
    /// The file or folder was removed, or renamed to another name.
    Gone,
}

/// File system and file handle of a file or folder.
pub(super) type FileKey = (FilesystemId, Vec<u8>);

/// A change of one name.
#[derive(Clone, Debug)]
pub(super) struct Event {
    /// Process that made the change, as numbered in this PID namespace; 0 for a process outside of it.
    pub pid: i32,
    pub change: Change,
    pub is_folder: bool,
    pub folder: PathBuf,
    pub name: OsString,
    /// The file that had the name; `None` for folders, and for changes of names on kernels before 5.17.
    pub file: Option<FileKey>,
}

/// A change of a file by a process of the job, without a name: its folder has gone or has no path here.
#[derive(Clone, Debug)]
pub(super) struct Nameless {
    pub pid: i32,
    /// [`Change::Changed`] or [`Change::Closed`].
    pub change: Change,
    pub file: FileKey,
}

/// A file of an event.
pub(super) struct Found {
    pub about: Metadata,
    /// True if it is in memory (tmpfs).
    pub is_in_memory: bool,
}

/// Result of one read.
#[derive(Debug, Default)]
pub(super) struct Batch {
    pub events: Vec<Event>,
    pub nameless: Vec<Nameless>,
    /// Reason for missing events: the kernel dropped some, or one could not be resolved.
    pub lost: Option<String>,
}

/// The group, with all mount points of each watched file system, because a folder may be visible at only one of them.
/// The mount points are not held open, so that they can be unmounted.
pub(super) struct Group {
    fanotify: File,
    filesystems: HashMap<FilesystemId, Vec<PathBuf>>,
    /// Paths by whose mount points the job and ckpt-run know their folders. Other mount points may show the same ones.
    used: Vec<PathBuf>,
    /// Cached paths of folders by file system and handle. The rename of a folder empties it.
    folders: HashMap<FileKey, PathBuf>,
    /// Folders in which changes by other programs are reported.
    known: HashSet<FileKey>,
    buffer: Vec<u8>,
}

impl Group {
    /// # Errors
    /// `EPERM` without `CAP_SYS_ADMIN` in the initial user namespace, `EINVAL` on kernels before 5.9.
    pub fn new(used: Vec<PathBuf>) -> io::Result<Self> {
        let flags = libc::FAN_CLASS_NOTIF
            | libc::FAN_CLOEXEC
            | libc::FAN_NONBLOCK
            | libc::FAN_UNLIMITED_QUEUE
            | libc::FAN_UNLIMITED_MARKS;
        let init = |flags| {
            // SAFETY: a system call with two numbers; the descriptor is ours.
            unsafe {
                let descriptor = libc::fanotify_init(flags, libc::O_RDONLY as u32);
                Ok::<_, Errno>(File::from_raw_fd(Errno::result(descriptor)?))
            }
        };
        let fanotify = match init(flags | libc::FAN_REPORT_DFID_NAME_TARGET) {
            // Kernels before 5.17 report the file only for changes of its content and attributes.
            Err(Errno::EINVAL) => init(flags | libc::FAN_REPORT_DFID_NAME | libc::FAN_REPORT_FID),
            other => other,
        };
        Ok(Self {
            fanotify: fanotify?,
            filesystems: HashMap::new(),
            used,
            folders: HashMap::new(),
            known: HashSet::new(),
            buffer: vec![0; READ_BYTES],
        })
    }

    /// Watches the file system that is mounted at `path`.
    pub fn watch(&mut self, path: &Path) -> io::Result<()> {
        let id = filesystem_id(&File::open(path)?)?;
        if id == FilesystemId::default() {
            return Err(io::ErrorKind::Unsupported.into());
        }
        let name = CString::new(path.as_os_str().as_bytes())?;
        let flags = libc::FAN_MARK_ADD | libc::FAN_MARK_FILESYSTEM;
        let group = self.fanotify.as_raw_fd();
        // A file system that was unmounted meanwhile has lost its mark. A second mark has no effect.
        // SAFETY: a system call; the name ends with a zero and lives as long as the call.
        Errno::result(unsafe {
            libc::fanotify_mark(group, flags, MASK, libc::AT_FDCWD, name.as_ptr())
        })?;
        let roots = self.filesystems.entry(id).or_default();
        if !roots.iter().any(|known| known == path) {
            roots.push(path.to_owned());
            let depth = |root: &PathBuf| {
                let is_used = self.used.iter().any(|path| path.starts_with(root));
                is_used.then(|| root.components().count())
            };
            roots.sort_by_key(|root| Reverse(depth(root)));
        }
        Ok(())
    }

    /// Reads the next events; `None` if there are none.
    pub fn read(&mut self) -> io::Result<Option<Batch>> {
        let mut buffer = std::mem::take(&mut self.buffer);
        let got = self.fanotify.read(&mut buffer);
        let batch = got.as_ref().map(|got| self.parse(&buffer[..*got]));
        self.buffer = buffer;
        match batch {
            Ok(batch) => Ok(Some(batch)),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(None),
            Err(_) => Err(got.err().unwrap_or(io::ErrorKind::Other.into())),
        }
    }

    fn parse(&mut self, mut bytes: &[u8]) -> Batch {
        let mut batch = Batch::default();
        while bytes.len() >= HEAD_BYTES {
            let len = number(bytes, 0) as usize;
            if len < HEAD_BYTES || len > bytes.len() {
                batch.lost = Some("an event of fanotify is truncated".to_owned());
                break;
            }
            let (event, rest) = bytes.split_at(len);
            bytes = rest;
            self.parse_event(event, &mut batch);
        }
        batch
    }

    fn parse_event(&mut self, event: &[u8], batch: &mut Batch) {
        // Offsets of `fanotify_event_metadata`: length 0, version 4, metadata length 6, mask 8, descriptor 16, pid 20.
        let mask = u64::from(number(event, 8)) | u64::from(number(event, 12)) << 32;
        let pid = number(event, 20).cast_signed();
        if mask & libc::FAN_Q_OVERFLOW != 0 {
            batch.lost = Some("fanotify dropped events".to_owned());
            return;
        }
        let mut records = &event[HEAD_BYTES..];
        let (mut named, mut file) = (None, None);
        while records.len() >= RECORD_BYTES {
            let (kind, len) = (
                records[0],
                usize::from(u16::from_ne_bytes([records[2], records[3]])),
            );
            if len < RECORD_BYTES || len > records.len() {
                return;
            }
            let (record, rest) = records.split_at(len);
            records = rest;
            match kind {
                libc::FAN_EVENT_INFO_TYPE_DFID_NAME => named = Some(record),
                libc::FAN_EVENT_INFO_TYPE_FID => file = Some(record),
                _ => {}
            }
        }
        let is_folder = mask & libc::FAN_ONDIR != 0;
        let file = file.filter(|_| !is_folder);
        let file = file.and_then(|record| split(record).ok());
        let file = file.map(|(id, handle, _)| (id, handle.to_vec()));
        let nameless = |file: Option<FileKey>, mask| {
            let file = file.filter(|_| pid != OUTSIDE)?;
            let mut changes = changes(mask);
            let change = changes.find(|it| matches!(it, Change::Changed | Change::Closed))?;
            Some(Nameless { pid, change, file })
        };
        let Some(named) = named else {
            // Without a name, `FAN_ATTRIB` means that the number of names has changed.
            batch
                .nameless
                .extend(nameless(file, mask & !libc::FAN_ATTRIB));
            return;
        };
        // Changes by other programs matter only in the job's folders. On a busy machine, they are the majority.
        if pid == OUTSIDE && !self.is_known(named) {
            return;
        }
        match self.named(named) {
            // The folder was removed, or it has no path in the sandbox: another mount covers it, or it belongs to a layer
            // of an overlay, whose file system cannot be watched.
            Err(error) if is_gone(&error) || error.kind() == io::ErrorKind::NotFound => {
                batch.nameless.extend(nameless(file, mask));
            }
            Err(error) => {
                batch.lost = Some(format!("cannot find the folder of a change: {error}"));
            }
            Ok((folder, name)) => {
                let renames = libc::FAN_MOVED_FROM | libc::FAN_MOVED_TO | libc::FAN_DELETE;
                if is_folder && mask & renames != 0 {
                    self.folders.clear();
                }
                let events = changes(mask).map(|change| Event {
                    pid,
                    change,
                    is_folder,
                    folder: folder.clone(),
                    name: name.clone(),
                    file: file.clone(),
                });
                batch.events.extend(events);
            }
        }
    }

    /// Adds a folder in which changes by other programs are reported.
    pub fn know(&mut self, folder: &Path) {
        if let Ok(key) = key_of(folder) {
            self.known.insert(key);
        }
    }

    fn is_known(&self, record: &[u8]) -> bool {
        split(record).is_ok_and(|(id, handle, _)| self.known.contains(&(id, handle.to_vec())))
    }

    /// Returns the folder and the name of a record.
    fn named(&mut self, record: &[u8]) -> io::Result<(PathBuf, OsString)> {
        let (id, handle, name) = split(record)?;
        let key = (id, handle.to_vec());
        if let Some(known) = self.folders.get(&key) {
            return Ok((known.clone(), name));
        }
        let roots = self.filesystems.get(&id).into_iter().flatten();
        let mut failure = io::Error::from(io::ErrorKind::NotFound);
        let found = roots.map(|root| path_below(root, id, handle));
        let mut found = found.filter_map(|path| path.map_err(|error| failure = error).ok());
        let Some(folder) = found.next() else {
            return Err(failure);
        };
        if self.folders.len() >= FOLDERS_MAX {
            self.folders.clear();
        }
        self.folders.insert(key, folder.clone());
        Ok((folder, name))
    }

    /// Finds a file of an event; `None` if it has no name any more.
    pub fn find(&self, (id, handle): &FileKey) -> io::Result<Option<Found>> {
        let mut roots = self.filesystems.get(id).into_iter().flatten();
        // A handle is valid below each mount point of its file system.
        let root = roots.find_map(|root| root_of(root, *id).ok());
        let root = root.ok_or(io::ErrorKind::NotFound)?;
        let file = match open_below(&root, handle) {
            Err(error) if is_gone(&error) => return Ok(None),
            opened => File::from(opened?),
        };
        let found = Found {
            about: file.metadata()?,
            is_in_memory: fstatfs(&file)?.filesystem_type() == TMPFS_MAGIC,
        };
        Ok((found.about.nlink() > 0).then_some(found))
    }
}

impl AsFd for Group {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fanotify.as_fd()
    }
}

/// Returns the changes of an event. The kernel merges the events of one name, file and process. Their order is lost; the
/// order here is always possible. Of a change and the end of writing, only the change counts.
fn changes(mask: u64) -> impl Iterator<Item = Change> {
    let change = libc::FAN_MODIFY | libc::FAN_ATTRIB;
    let closed = if mask & change == 0 {
        libc::FAN_CLOSE_WRITE
    } else {
        0
    };
    let changes = [
        (libc::FAN_CREATE, Change::Created),
        (libc::FAN_MOVED_TO, Change::MovedTo),
        (change, Change::Changed),
        (closed, Change::Closed),
        (libc::FAN_MOVED_FROM | libc::FAN_DELETE, Change::Gone),
    ];
    let present = changes
        .into_iter()
        .filter(move |(bits, _)| mask & bits != 0);
    present.map(|(_, change)| change)
}

/// Returns true if a file or folder cannot be found because it was removed; for what a folder contained there were earlier
/// events. The kernel reports `ESTALE`, and the other errors while it is being removed or its inode number is being reused.
fn is_gone(error: &io::Error) -> bool {
    matches!(
        error.raw_os_error(),
        Some(libc::ESTALE | libc::ENOENT | libc::ENOMEM)
    )
}

/// Splits a record into file system, file handle and name.
fn split(record: &[u8]) -> io::Result<(FilesystemId, &[u8], OsString)> {
    let mut id = FilesystemId::default();
    id.copy_from_slice(&record[4..RECORD_BYTES]);
    let handle = &record[RECORD_BYTES..];
    let opaque = number(handle, 0) as usize;
    let end = HANDLE_BYTES + opaque;
    if opaque > HANDLE_BYTES_MAX || end > handle.len() {
        return Err(io::ErrorKind::InvalidData.into());
    }
    let (handle, name) = handle.split_at(end);
    let name = name.split(|byte| *byte == 0).next().unwrap_or_default();
    Ok((id, handle, OsString::from_vec(name.to_vec())))
}

/// Returns the file system and the file handle of a folder, in the form of events. By now, something else may have its name:
/// to open a named pipe would wait.
fn key_of(folder: &Path) -> io::Result<FileKey> {
    let root = File::options()
        .read(true)
        .custom_flags(libc::O_PATH | libc::O_DIRECTORY | libc::O_NOFOLLOW)
        .open(folder)?;
    let id = filesystem_id(&root)?;
    let mut handle = Handle([0; HANDLE_BYTES + HANDLE_BYTES_MAX]);
    handle.0[..4].copy_from_slice(&u32::try_from(HANDLE_BYTES_MAX).unwrap_or(0).to_ne_bytes());
    let mut mount = 0;
    // SAFETY: the handle has as much room as it declares; the name is empty, and the descriptor is ours.
    Errno::result(unsafe {
        libc::name_to_handle_at(
            root.as_raw_fd(),
            c"".as_ptr(),
            std::ptr::from_mut(&mut handle).cast(),
            &raw mut mount,
            libc::AT_EMPTY_PATH,
        )
    })?;
    let len = HANDLE_BYTES + number(&handle.0, 0) as usize;
    Ok((id, handle.0[..len.min(handle.0.len())].to_vec()))
}

/// A file handle (`struct file_handle`).
#[repr(C, align(8))]
struct Handle([u8; HANDLE_BYTES + HANDLE_BYTES_MAX]);

fn number(bytes: &[u8], at: usize) -> u32 {
    let part = bytes.get(at..at + 4).and_then(|part| part.try_into().ok());
    part.map_or(0, u32::from_ne_bytes)
}

fn filesystem_id(root: &File) -> io::Result<FilesystemId> {
    let about = fstatfs(root)?;
    let id = about.filesystem_id();
    // SAFETY: `fsid_t` is two numbers of four bytes, which libc keeps private.
    Ok(unsafe { std::mem::transmute::<libc::fsid_t, FilesystemId>(id) })
}

/// Opens the mount point `root` if the file system is mounted there.
fn root_of(root: &Path, id: FilesystemId) -> io::Result<File> {
    let root = File::open(root)?;
    if filesystem_id(&root)? != id {
        return Err(io::ErrorKind::NotFound.into());
    }
    Ok(root)
}

/// Opens a file or folder of the root's file system by its handle, without access to its content.
fn open_below(root: &File, handle: &[u8]) -> io::Result<OwnedFd> {
    let mut copy = Handle([0; HANDLE_BYTES + HANDLE_BYTES_MAX]);
    copy.0[..handle.len()].copy_from_slice(handle);
    let flags = libc::O_PATH | libc::O_CLOEXEC;
    // SAFETY: the handle has the length that it names, and outlives the call; the descriptor is ours.
    unsafe {
        let handle = std::ptr::from_mut(&mut copy).cast();
        let descriptor = libc::open_by_handle_at(root.as_raw_fd(), handle, flags);
        Ok(OwnedFd::from_raw_fd(Errno::result(descriptor)?))
    }
}

/// Returns the current path of a folder of a file system that is mounted at `root`.
fn path_below(root: &Path, id: FilesystemId, handle: &[u8]) -> io::Result<PathBuf> {
    let folder = open_below(&root_of(root, id)?, handle)?;
    let descriptor = format!("/proc/self/fd/{}", folder.as_raw_fd());
    let about = |path: &Path| fs::metadata(path).map(|found| (found.dev(), found.ino()));
    let folder = about(Path::new(&descriptor))?;
    for _ in 0..PATH_TRIES {
        let path = fs::read_link(&descriptor)?;
        if path.is_absolute() && about(&path).is_ok_and(|found| found == folder) {
            return Ok(path);
        }
        if path.as_os_str().as_bytes().ends_with(b" (deleted)") || !path.is_absolute() {
            return Err(io::Error::from_raw_os_error(libc::ESTALE));
        }
        // The folder may have been renamed meanwhile.
    }
    // A folder outside the mounted subtree has no path, or the path of another folder.
    Err(io::ErrorKind::NotFound.into())
}

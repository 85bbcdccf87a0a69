//! Carries a rollback out. Every step can be done again: one that was cut short is planned and done anew.

use std::collections::HashMap;
use std::fs::{self, DirBuilder, File, Permissions};
use std::io::{self, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt, fchown, lchown, symlink};
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::fcntl::{AT_FDCWD, OFlag, OpenHow, ResolveFlag, openat2};
use nix::sys::stat::{UtimensatFlags, utimensat};
use nix::sys::time::TimeSpec;

use super::attributes;
use super::kept::{Content, KeptFile, Kind};
use super::record::{JobChange, Line};
use super::rollback::{Rollback, RollbackError};

/// Name of the folder for what the job made since the snapshot, in the folder of the restore.
const MADE_SINCE: &str = "made-since";

/// A folder of the job's that is held open, with a name in it: no link that somebody puts in the way leads elsewhere.
struct Spot {
    folder: OwnedFd,
    name: PathBuf,
}

impl Spot {
    fn of(path: &Path) -> io::Result<Self> {
        let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else {
            return Err(io::ErrorKind::InvalidInput.into());
        };
        let how = OpenHow::new()
            .flags(OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC)
            .resolve(ResolveFlag::RESOLVE_NO_SYMLINKS);
        let folder = openat2(AT_FDCWD, parent, how)?;
        Ok(Self {
            folder,
            name: name.into(),
        })
    }

    /// A path to the name that resolves no link but the kernel's own to the held folder.
    fn path(&self) -> PathBuf {
        Path::new(&format!("/proc/self/fd/{}", self.folder.as_raw_fd())).join(&self.name)
    }
}

fn system<T>(
    operation: &'static str,
    path: &Path,
    result: io::Result<T>,
) -> Result<T, RollbackError> {
    result.map_err(|source| RollbackError::System {
        operation,
        path: path.to_owned(),
        source,
    })
}

impl Rollback {
    /// Makes the files equal to the set. First `record`, the file of the record, is told which they are. `content`
    /// writes so many bytes of a stream, from an offset on. What the job made since goes into the folder `aside`.
    ///
    /// # Errors
    /// The first step that fails. What was done stays done: the same rollback is planned again.
    pub fn carry_out(
        &self,
        record: &Path,
        aside: &Path,
        content: impl Fn(&str, u64, u64, &mut dyn Write) -> io::Result<()>,
    ) -> Result<(), RollbackError> {
        if self.paths().next().is_none() {
            return Ok(());
        }
        system("write to", record, self.announce(record))?;
        for path in &self.aside {
            system("keep aside", path, set_aside(path, &aside.join(MADE_SINCE)))?;
        }
        for (from, to) in &self.moves {
            system("rename", from, move_back(from, to, &aside.join(MADE_SINCE)))?;
        }
        let mut made = HashMap::new();
        for (path, file) in &self.put_back {
            let done = put_back(path, file, &mut made, &content);
            system("put back", path, done)?;
        }
        // Files change the times of their folders.
        for (path, file) in self.put_back.iter().rev() {
            if file.kind == Kind::Folder {
                let spot = system("find", path, Spot::of(path))?;
                system("set the time of", path, set_time(&spot.path(), file))?;
            }
        }
        Ok(())
    }

    fn announce(&self, record: &Path) -> io::Result<()> {
        let mut text = vec![b'\n'];
        for path in self.paths() {
            let line = Line::Job {
                path: path.to_owned(),
                change: JobChange::Changed,
            };
            serde_json::to_writer(&mut text, &line)?;
            text.push(b'\n');
        }
        let mut file = File::options()
            .append(true)
            .create(true)
            .mode(0o600)
            .open(record)?;
        file.write_all(&text)?;
        file.sync_all()
    }
}

/// Moves a file, link or empty folder below `aside`, under its whole path.
fn set_aside(path: &Path, aside: &Path) -> io::Result<()> {
    let Ok(spot) = Spot::of(path) else {
        return Ok(()); // its folder went aside
    };
    let from = spot.path();
    let found = match fs::symlink_metadata(&from) {
        Ok(found) => found,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error),
    };
    if found.is_dir() {
        return match fs::remove_dir(&from) {
            // What is in it is not the job's, or was not made since.
            Err(error) if error.raw_os_error() == Some(nix::libc::ENOTEMPTY) => Ok(()),
            done => done,
        };
    }
    let to = aside.join(path.strip_prefix("/").unwrap_or(path));
    let folder = to.parent().unwrap_or(aside);
    DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(folder)?;
    match fs::rename(&from, &to) {
        Err(error) if error.raw_os_error() == Some(nix::libc::EXDEV) => {
            if found.is_file() {
                let mut source = File::options()
                    .read(true)
                    .custom_flags(nix::libc::O_NOFOLLOW)
                    .open(&from)?;
                let mut target = File::create(&to)?;
                io::copy(&mut source, &mut target)?;
                target.sync_all()?;
            } else if found.is_symlink() {
                symlink(fs::read_link(&from)?, &to)?;
            }
            fs::remove_file(&from)
        }
        done => done,
    }
}

/// Gives a file its name back; what has the name now goes aside.
fn move_back(from: &Path, to: &Path, aside: &Path) -> io::Result<()> {
    set_aside(to, aside)?;
    let (from, to) = (Spot::of(from)?, Spot::of(to)?);
    fs::rename(from.path(), to.path())
}

fn put_back(
    path: &Path,
    file: &KeptFile,
    made: &mut HashMap<(u64, u64), PathBuf>,
    content: &impl Fn(&str, u64, u64, &mut dyn Write) -> io::Result<()>,
) -> io::Result<()> {
    let spot = Spot::of(path)?;
    let at = spot.path();
    let now = fs::symlink_metadata(&at).ok();
    let is_kind = now.as_ref().is_some_and(|now| match file.kind {
        Kind::File { .. } => now.is_file(),
        Kind::Folder => now.is_dir(),
        Kind::Link { .. } => false,
    });
    if let Some(now) = now.filter(|_| !is_kind) {
        // Of another kind, or a link: the job made it.
        if now.is_dir() {
            fs::remove_dir(&at)?;
        } else {
            fs::remove_file(&at)?;
        }
    }
    match &file.kind {
        Kind::Folder if is_kind => {}
        Kind::Folder => DirBuilder::new().mode(0o700).create(&at)?,
        Kind::Link { target } => symlink(target, &at)?,
        Kind::File {
            size,
            content: place,
        } => {
            if let Some(first) = made.get(&file.identity).filter(|_| !is_kind) {
                // Another name of a file that was missing as well.
                fs::hard_link(Spot::of(first)?.path(), &at)?;
                return Ok(());
            }
            if !is_kind {
                made.insert(file.identity, path.to_owned());
            }
            let target = File::options()
                .write(true)
                .create(!is_kind)
                .mode(0o600)
                .custom_flags(nix::libc::O_NOFOLLOW | nix::libc::O_NONBLOCK)
                .open(&at)?;
            if let Content::Kept { stream, offset } = place {
                let mut sink = Sparse::new(&target);
                content(stream, *offset, *size, &mut sink)?;
                target.set_len(*size)?;
            }
            fchown(&target, Some(file.owner.0), Some(file.owner.1))?;
            target.set_permissions(Permissions::from_mode(file.mode))?;
            attributes::set(&at, &file.attributes)?;
            return set_time(&at, file);
        }
    }
    lchown(&at, Some(file.owner.0), Some(file.owner.1))?;
    if file.kind == Kind::Folder {
        fs::set_permissions(&at, Permissions::from_mode(file.mode))?;
        attributes::set(&at, &file.attributes)?;
        return Ok(());
    }
    set_time(&at, file)
}

fn set_time(path: &Path, file: &KeptFile) -> io::Result<()> {
    let (seconds, ns) = (
        file.modified_ns.div_euclid(1_000_000_000),
        file.modified_ns.rem_euclid(1_000_000_000),
    );
    let modified = TimeSpec::new(seconds, ns);
    let flag = UtimensatFlags::NoFollowSymlink;
    Ok(utimensat(
        AT_FDCWD,
        path,
        &TimeSpec::UTIME_OMIT,
        &modified,
        flag,
    )?)
}

/// A writer into a file from its beginning that makes holes of pages without data.
struct Sparse<'a> {
    file: &'a File,
    at: u64,
}

/// A page without data.
static EMPTY_PAGE: [u8; 4096] = [0; 4096];

impl<'a> Sparse<'a> {
    fn new(file: &'a File) -> Self {
        Self { file, at: 0 }
    }

    /// Makes a hole; where the file system has none, zeros.
    fn punch(&self, bytes: &[u8]) -> io::Result<()> {
        use nix::fcntl::{FallocateFlags, fallocate};
        let flags = FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
        let offset = i64::try_from(self.at).map_err(io::Error::other)?;
        let len = i64::try_from(bytes.len()).map_err(io::Error::other)?;
        match fallocate(self.file, flags, offset, len) {
            Ok(()) => Ok(()),
            Err(Errno::EOPNOTSUPP) => {
                std::os::unix::fs::FileExt::write_all_at(self.file, bytes, self.at)
            }
            Err(errno) => Err(errno.into()),
        }
    }
}

impl Write for Sparse<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let is_empty = |page: &[u8]| page == &EMPTY_PAGE[..page.len()];
        let first = bytes.chunks(EMPTY_PAGE.len()).next().is_none_or(is_empty);
        let run = bytes.chunks(EMPTY_PAGE.len());
        let len: usize = run
            .take_while(|page| is_empty(page) == first)
            .map(<[u8]>::len)
            .sum();
        let part = &bytes[..len];
        if first {
            self.punch(part)?;
        } else {
            std::os::unix::fs::FileExt::write_all_at(self.file, part, self.at)?;
        }
        self.at += len as u64;
        Ok(len)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

//! Execution of a rollback. Every step can be repeated: an interrupted rollback is planned and executed again.

use std::collections::HashMap;
use std::ffi::OsString;
use std::fs::{self, DirBuilder, File, Permissions};
use std::io::{self, Write};
use std::os::unix::fs::{
    DirBuilderExt, FileTypeExt, MetadataExt, OpenOptionsExt, PermissionsExt, fchown, lchown,
    symlink,
};
use std::path::{Path, PathBuf};

use nix::fcntl::AT_FDCWD;
use nix::sys::stat::{Mode, SFlag, UtimensatFlags, mknod, utimensat};
use nix::sys::time::TimeSpec;

use super::attributes;
use super::describe::FileId;
use super::file_set::{Content, KeptFile, Kind, born_ns};
use super::held::{Held, clone_into};
use super::lost::RollbackError;
use super::record_line::{JobChange, Line, append};
use super::rollback::Rollback;
use crate::known_errors::is_disk_full;
use crate::safe_path::{Spot, give, is_denied, is_just_made, is_of_kind};
use crate::sparse_writer::SparseWriter;

/// Name of the folder for files that the job created since the snapshot, in the folder of the restore.
const CREATED: &str = "created";
/// Name of the folder for copies of overwritten contents.
const OVERWRITTEN: &str = "overwritten";
/// Limit on the overwritten bytes that are saved. The job writes them again.
const OVERWRITTEN_MAX: u64 = 256 << 20;

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

/// Sources of contents for a rollback, and the place for the files that it replaces.
pub struct Sources<'a, F> {
    /// The file of the record.
    pub record: &'a Path,
    /// Folder for replaced files, created when it is needed.
    pub aside: &'a Path,
    /// Files held in the store.
    pub held: &'a Held,
    /// Writes the given number of bytes of a stream, from an offset on.
    pub content: F,
    /// Called before each step; tests fail here.
    pub before_step: &'a dyn Fn() -> io::Result<()>,
}

/// Result of a rollback.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Done {
    /// Files that were set aside.
    pub aside: usize,
    /// Files that were restored or renamed back.
    pub put_back: usize,
    /// Files whose overwritten content was not saved, because there was too much of it.
    pub not_saved: usize,
}

impl Rollback {
    /// Makes the files equal to the set. First, the affected files are recorded.
    ///
    /// # Errors
    /// The first step that fails. Completed steps are not reverted, and the same rollback can be planned again.
    pub fn execute<F>(&self, sources: &Sources<'_, F>) -> Result<Done, RollbackError>
    where
        F: Fn(&str, u64, u64, &mut dyn Write) -> io::Result<()>,
    {
        if self.paths().next().is_none() {
            return Ok(Done::default());
        }
        let step = sources.before_step;
        let record = sources.record;
        system(
            "write to",
            record,
            step().and_then(|()| self.announce(record)),
        )?;
        let created = sources.aside.join(CREATED);
        for path in &self.aside {
            let done = step().and_then(|()| in_folder(path, || set_aside(path, &created)));
            system("set aside", path, done)?;
        }
        let mut putting = PutBack {
            sources,
            created: &created,
            seen: self.siblings.clone(),
            saved: 0,
            not_saved: 0,
        };
        let is_folder = |file: &KeptFile| file.kind == Kind::Folder;
        for (path, file) in self.put_back.iter().filter(|(_, file)| is_folder(file)) {
            system(
                "put back",
                path,
                in_folder(path, || putting.put_back(path, file)),
            )?;
        }
        self.move_back(&created, step)?;
        for path in &self.folders {
            let done = step().and_then(|()| in_folder(path, || set_aside(path, &created)));
            system("remove", path, done)?;
        }
        for (path, file) in self.put_back.iter().filter(|(_, file)| !is_folder(file)) {
            system(
                "put back",
                path,
                in_folder(path, || putting.put_back(path, file)),
            )?;
        }
        // Changes of files change the times of their folders.
        for (path, file) in self.put_back.iter().rev() {
            if file.kind == Kind::Folder {
                let spot = system("find", path, Spot::of(path))?;
                system("set the time of", path, set_time(&spot.path(), file))?;
            }
        }
        Ok(Done {
            aside: self.aside.len(),
            put_back: self.put_back.len(),
            not_saved: putting.not_saved,
        })
    }

    /// Restores the attributes of append-only files, after their sizes.
    ///
    /// # Errors
    /// The first file that cannot be changed.
    pub fn settle(&self) -> Result<(), RollbackError> {
        for (path, file) in &self.appended {
            let settled = Spot::of(path).and_then(|spot| {
                let at = spot.path();
                let target = spot.open_as_owner(File::options().append(true), 0)?;
                not_of_others(&spot, &target, file)?;
                target.set_permissions(Permissions::from_mode(file.mode))?;
                attributes::set(&at, &file.attributes)?;
                set_time(&at, file)
            });
            system("set the attributes of", path, settled)?;
        }
        Ok(())
    }

    /// Renames files back. The earlier name may be another such file's present name, so all files get a temporary name
    /// first.
    fn move_back(
        &self,
        created: &Path,
        step: &dyn Fn() -> io::Result<()>,
    ) -> Result<(), RollbackError> {
        for (from, to) in &self.moves {
            let done = step().and_then(|()| rename(from, &between(to)));
            system("rename", from, done)?;
        }
        for (_, to) in &self.moves {
            let aside = step().and_then(|()| in_folder(to, || set_aside(to, created)));
            system("set aside", to, aside)?;
            let done = step().and_then(|()| rename(&between(to), to));
            system("rename to", to, done)?;
        }
        Ok(())
    }

    fn announce(&self, record: &Path) -> io::Result<()> {
        let line = |path: &Path, change| Line::RollsBack {
            path: path.to_owned(),
            change,
        };
        // Files that are set aside belong to the job, even if their creation was not recorded.
        let created = self.aside.iter().chain(&self.folders);
        let created = created.map(|path| line(path, JobChange::Created));
        // Temporary names left by an interrupted rollback are found by the next one.
        let between = self.moves.iter().map(|(_, to)| between(to));
        let between = between.map(|path| line(&path, JobChange::Created));
        let changed = self.paths().map(|path| line(path, JobChange::Changed));
        let lines = created.chain(between).chain(changed);
        append(record, &lines.collect::<Vec<_>>())
    }
}

/// Acts on a name, again if the user may not change names in its folder but owns it.
fn in_folder(path: &Path, mut act: impl FnMut() -> io::Result<()>) -> io::Result<()> {
    let done = act();
    if !is_denied(&done) {
        return done;
    }
    let _granted = Spot::of(path)?.grant_folder();
    act()
}

/// Moves a file, link or empty folder below `aside`, under its whole path.
fn set_aside(path: &Path, aside: &Path) -> io::Result<()> {
    let Ok(spot) = Spot::of(path) else {
        return Ok(()); // its folder was set aside
    };
    let from = spot.path();
    let found = match fs::symlink_metadata(&from) {
        Ok(found) => found,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error),
    };
    spot.allows(found.uid())?;
    if found.is_dir() {
        return match fs::remove_dir(&from) {
            // The folder contains files of other programs, or older ones.
            Err(error) if error.raw_os_error() == Some(nix::libc::ENOTEMPTY) => Ok(()),
            done => done,
        };
    }
    let to = aside_path(path, aside)?;
    match fs::rename(&from, &to) {
        Err(error) if error.raw_os_error() == Some(nix::libc::EXDEV) => {
            if found.is_file() {
                let mut source = spot.open_as_owner(File::options().read(true), 0)?;
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

/// Returns the temporary name of a file that will be renamed to `to`.
fn between(to: &Path) -> PathBuf {
    let mut name = OsString::from(".ckpt-run-moved-");
    name.push(to.file_name().unwrap_or_default());
    to.with_file_name(name)
}

fn rename(from: &Path, to: &Path) -> io::Result<()> {
    let (source, target) = (Spot::of(from)?, Spot::of(to)?);
    let owner = source.metadata()?.uid();
    source.allows(owner)?;
    target.allows(owner)?;
    let rename = || fs::rename(source.path(), target.path());
    in_folder(from, || in_folder(to, rename))
}

struct PutBack<'a, F> {
    sources: &'a Sources<'a, F>,
    created: &'a Path,
    /// Restored paths by file, so that hard links are restored as such.
    seen: HashMap<FileId, PathBuf>,
    /// Overwritten bytes that were saved.
    saved: u64,
    not_saved: usize,
}

impl<F> PutBack<'_, F>
where
    F: Fn(&str, u64, u64, &mut dyn Write) -> io::Result<()>,
{
    fn put_back(&mut self, path: &Path, file: &KeptFile) -> io::Result<()> {
        (self.sources.before_step)()?;
        let spot = Spot::of(path)?;
        let at = spot.path();
        let now = fs::symlink_metadata(&at).ok();
        let is_kind = now.as_ref().is_some_and(|now| match file.kind {
            Kind::File { .. } => now.is_file(),
            Kind::Folder => now.is_dir(),
            Kind::Link { .. } => false,
            Kind::Pipe => now.file_type().is_fifo(),
            Kind::Socket => now.file_type().is_socket(),
        });
        if now.is_none() {
            spot.allows(file.owner.0)?;
        }
        if now.is_some() && !is_kind {
            // The job created a file of another kind, or a link with another target.
            set_aside(path, self.created)?;
            if fs::symlink_metadata(&at).is_ok() {
                let message = "a folder with files of other programs is in its place; move it away";
                return Err(io::Error::new(io::ErrorKind::DirectoryNotEmpty, message));
            }
        }
        match &file.kind {
            Kind::Folder => {
                if !is_kind {
                    DirBuilder::new().mode(0o700).create(&at)?;
                }
                // The folder is opened, so that a rename cannot affect the following steps.
                let folder =
                    spot.open_as_owner(File::options().read(true), nix::libc::O_DIRECTORY)?;
                fchown(&folder, Some(file.owner.0), Some(file.owner.1))?;
                folder.set_permissions(Permissions::from_mode(file.mode))?;
                attributes::set(&at, &file.attributes)
            }
            Kind::Link { target } => {
                symlink(target, &at)?;
                lchown(&at, Some(file.owner.0), Some(file.owner.1))?;
                set_time(&at, file)
            }
            Kind::Pipe => put_back_special(&spot, file, SFlag::S_IFIFO, is_kind),
            Kind::Socket => put_back_special(&spot, file, SFlag::S_IFSOCK, is_kind),
            Kind::File { size, content } => {
                if let Some(first) = self.seen.get(&file.id())
                    && is_on_one_device(first, path)?
                {
                    return link_to(first, path, self.created);
                }
                self.seen.insert(file.id(), path.to_owned());
                let now = now.as_ref().filter(|_| is_kind);
                self.put_back_file(path, &spot, (file, *size, content), now)
            }
        }
    }

    fn put_back_file(
        &mut self,
        path: &Path,
        spot: &Spot,
        (file, size, content): (&KeptFile, u64, &Content),
        now: Option<&fs::Metadata>,
    ) -> io::Result<()> {
        let at = &spot.path();
        let is_there = now.is_some_and(|now| {
            let modified = super::file_set::modified_ns(now);
            !file.is_mapped && (now.size(), modified) == (size, file.modified_ns)
        });
        let held = match content {
            Content::Held { name, .. } if !is_there => self.sources.held.path(name),
            Content::Held { .. }
            | Content::Kept { .. }
            | Content::Appended
            | Content::Unkept(_) => None,
        };
        let held = held.map(|path| File::open(&path).map(|file| (path, file)));
        let held = held.transpose()?;
        let is_same =
            |now: &fs::Metadata| (now.ino(), born_ns(now)) == (file.identity.1, file.born_ns);
        let is_other = now.is_some_and(|now| now.nlink() > 1 && !is_same(now));
        if is_other && (held.is_some() || matches!(content, Content::Kept { .. })) {
            // The job has given this name to another file, which must not be overwritten.
            set_aside(path, self.created)?;
        }
        if let Some((held, source)) = &held
            && source.metadata()?.ino() == file.identity.1
        {
            // The name is another name of the file itself.
            set_aside(path, self.created)?;
            fs::hard_link(held, at)?;
        }
        let mut options = File::options();
        options.read(true).write(true).mode(0o600);
        let target = match spot.open_as_owner(&mut options, 0) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                spot.allows(file.owner.0)?;
                spot.open_as_owner(options.create_new(true), 0)?
            }
            opened => {
                let opened = opened?;
                not_of_others(spot, &opened, file)?;
                opened
            }
        };
        match (content, &held) {
            (Content::Kept { stream, offset }, _) => {
                self.save(path, &target)?;
                let mut sink = SparseWriter::new(&target);
                (self.sources.content)(stream, *offset, size, &mut sink)?;
                target.set_len(size)?;
            }
            (Content::Held { .. }, Some((_, source)))
                if source.metadata()?.ino() != file.identity.1 =>
            {
                target.set_len(0)?;
                clone_into(source, &target)
                    .or_else(|_| io::copy(&mut &*source, &mut &target).map(drop))?;
            }
            _ => {}
        }
        fchown(&target, Some(file.owner.0), Some(file.owner.1))?;
        target.set_permissions(Permissions::from_mode(file.mode))?;
        attributes::set(at, &file.attributes)?;
        set_time(at, file)
    }

    /// Saves a content that will be overwritten, within the limit.
    fn save(&mut self, path: &Path, target: &File) -> io::Result<()> {
        let bytes = target.metadata()?.len();
        if bytes == 0 {
            return Ok(());
        }
        if self.saved.saturating_add(bytes) > OVERWRITTEN_MAX {
            self.not_saved += 1;
            return Ok(());
        }
        self.saved += bytes;
        let copy = aside_path(path, &self.sources.aside.join(OVERWRITTEN))?;
        let saved = File::create(&copy)?;
        if clone_into(target, &saved).is_err() {
            let copied = io::copy(&mut &*target, &mut &saved);
            std::io::Seek::rewind(&mut &*target)?;
            if copied.is_err_and(|error| is_disk_full(&error)) {
                // The disk is full. The job writes this content again, and its files need the space.
                self.not_saved += 1;
                return fs::remove_file(copy);
            }
        }
        Ok(())
    }
}

/// Makes a named pipe or the name of a socket, if it is not there, and sets its attributes.
fn put_back_special(spot: &Spot, file: &KeptFile, kind: SFlag, is_there: bool) -> io::Result<()> {
    if !is_there {
        // Other users have no access until the owner is set.
        mknod(&spot.path(), kind, Mode::S_IRUSR | Mode::S_IWUSR, 0)?;
    }
    let opened = spot.open(File::options().read(true), nix::libc::O_PATH)?;
    let now = opened.metadata()?;
    let is_right = if is_there {
        is_of_kind(&now, kind) && now.uid() == file.owner.0 && !spot.is_lent(&now)?
    } else {
        is_just_made(&now, kind)
    };
    if !is_right {
        return Err(is_of_others());
    }
    give(&opened, file.owner, file.mode)?;
    attributes::set(&spot.path(), &file.attributes)?;
    set_time(&spot.path(), file)
}

/// Refuses a file that another user can have put in the place of the job's file: its owner differs.
fn not_of_others(spot: &Spot, opened: &File, file: &KeptFile) -> io::Result<()> {
    let now = opened.metadata()?;
    if !now.is_file() || now.uid() != file.owner.0 || spot.is_lent(&now)? {
        return Err(is_of_others());
    }
    Ok(())
}

fn is_of_others() -> io::Error {
    let message = "another user's file is in its place";
    io::Error::new(io::ErrorKind::PermissionDenied, message)
}

/// Returns true if a file and a name are on one file system. Clones of a file system have files with the same inode
/// numbers and times of creation.
fn is_on_one_device(first: &Path, path: &Path) -> io::Result<bool> {
    let folder = path.parent().unwrap_or(path);
    Ok(first.symlink_metadata()?.dev() == folder.metadata()?.dev())
}

/// Makes `path` a hard link to the file at `first`.
fn link_to(first: &Path, path: &Path, created: &Path) -> io::Result<()> {
    let (source, target) = (Spot::of(first)?, Spot::of(path)?);
    let inode = |spot: &Spot| fs::symlink_metadata(spot.path()).map(|found| found.ino());
    if inode(&target).ok() == Some(inode(&source)?) {
        return Ok(());
    }
    set_aside(path, created)?;
    target.allows(source.metadata()?.uid())?;
    fs::hard_link(source.path(), target.path())
}

/// Returns the full path of a file below the folder `aside`, and creates its parent folders.
fn aside_path(path: &Path, aside: &Path) -> io::Result<PathBuf> {
    let to = aside.join(path.strip_prefix("/").unwrap_or(path));
    let folder = to.parent().unwrap_or(aside);
    DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(folder)?;
    Ok(to)
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

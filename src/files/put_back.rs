//! Execution of a rollback. Every step can be repeated: an interrupted rollback is planned and executed again.

use std::collections::HashMap;
use std::fs::{self, File, Permissions};
use std::io::{self, Write};
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use nix::libc::O_PATH;
use nix::sys::stat::SFlag;

use super::attributes;
use super::describe::FileId;
use super::file_set::{Content, KeptFile, Kind, StreamPlace, born_ns};
use super::held::{Held, clone_into};
use super::lost::RollbackError;
use super::record_line::{JobChange, Line, append};
use super::rollback::Rollback;
use crate::known_errors::is_disk_full;
use crate::safe_path::{JobUsers, Spot, give, link_to};
use crate::sparse_file::{SparseWriter, copy_data};
use moving::{aside_path, between, check_removal, is_of_others, link, rename, set_aside};
use settling::{not_of_others, put_back_folder, put_back_link, put_back_special, set_time};

mod moving;
mod settling;

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
    /// Users as which the job's processes act.
    pub users: &'a JobUsers,
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
        let (step, users) = (sources.before_step, sources.users);
        if users.has_others() {
            self.check_removals(users)?;
        }
        let record = sources.record;
        system(
            "write to",
            record,
            step().and_then(|()| self.announce(record)),
        )?;
        let created = sources.aside.join(CREATED);
        for path in &self.aside {
            let done = step().and_then(|()| set_aside(path, &created, users));
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
            system("put back", path, putting.put_back(path, file))?;
        }
        self.move_back(&created, step, users)?;
        for path in &self.folders {
            let done = step().and_then(|()| set_aside(path, &created, users));
            system("remove", path, done)?;
        }
        for (path, file) in self.put_back.iter().filter(|(_, file)| !is_folder(file)) {
            system("put back", path, putting.put_back(path, file))?;
        }
        // Changes of files change the times of their folders.
        for (path, file) in self.put_back.iter().rev() {
            if file.kind == Kind::Folder {
                let timed = Spot::of_job(path, file.owner.0, users)
                    .and_then(|spot| spot.open(File::options().read(true), O_PATH))
                    .and_then(|folder| {
                        if folder.metadata()?.uid() == file.owner.0 {
                            set_time(&folder, file)
                        } else {
                            Err(is_of_others())
                        }
                    });
                system("set the time of", path, timed)?;
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
    pub fn settle(&self, users: &JobUsers) -> Result<(), RollbackError> {
        for (path, file) in &self.appended {
            let settled = Spot::of_job(path, file.owner.0, users).and_then(|spot| {
                let target = spot.in_folder(|| spot.open(File::options().read(true), O_PATH))?;
                not_of_others(&spot, &target, file)?;
                let is_same = FileId::of(&target.metadata()?) == file.id();
                if !is_same && spot.is_for_other() && spot.user() != file.owner.0 {
                    return Err(is_of_others());
                }
                fs::set_permissions(link_to(&target), Permissions::from_mode(file.mode))?;
                attributes::set(&target, &file.attributes)?;
                set_time(&target, file)
            });
            system("set the attributes of", path, settled)?;
        }
        Ok(())
    }

    /// Checks the files that will be set aside or renamed, before any change.
    fn check_removals(&self, users: &JobUsers) -> Result<(), RollbackError> {
        let moved = self.moves.iter().map(|(from, _)| from);
        for path in self.aside.iter().chain(&self.folders).chain(moved) {
            system("set aside", path, check_removal(path, users))?;
        }
        Ok(())
    }

    /// Renames files back. The earlier name may be another such file's present name, so all files get a temporary name
    /// first.
    fn move_back(
        &self,
        created: &Path,
        step: &dyn Fn() -> io::Result<()>,
        users: &JobUsers,
    ) -> Result<(), RollbackError> {
        for (from, to) in &self.moves {
            let done = step().and_then(|()| rename(from, &between(to), users));
            system("rename", from, done)?;
        }
        for (_, to) in &self.moves {
            let aside = step().and_then(|()| set_aside(to, created, users));
            system("set aside", to, aside)?;
            let done = step().and_then(|()| rename(&between(to), to, users));
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
        let spot = Spot::of_job(path, file.owner.0, self.sources.users)?;
        spot.in_folder(|| self.put_back_at(path, &spot, file))
    }

    fn put_back_at(&mut self, path: &Path, spot: &Spot, file: &KeptFile) -> io::Result<()> {
        let users = self.sources.users;
        let now = match spot.metadata() {
            Ok(now) => Some(now),
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            Err(error) => return Err(error),
        };
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
        if !is_kind {
            spot.may_make_for(file.owner.0)?;
        }
        if now.is_some() && !is_kind {
            // The job created a file of another kind, or a link with another target.
            set_aside(path, self.created, users)?;
            if spot.metadata().is_ok() {
                let message = "a folder with files of other programs is in its place; move it away";
                return Err(io::Error::new(io::ErrorKind::DirectoryNotEmpty, message));
            }
        }
        match &file.kind {
            Kind::Folder => put_back_folder(spot, file, is_kind),
            Kind::Link { target } => put_back_link(spot, file, target),
            Kind::Pipe => put_back_special(spot, file, SFlag::S_IFIFO, is_kind),
            Kind::Socket => put_back_special(spot, file, SFlag::S_IFSOCK, is_kind),
            Kind::File { size, content } => {
                if let Some(first) = self.seen.get(&file.id())
                    && is_on_one_device(first, path)?
                {
                    return link(first, path, self.created, (file.owner.0, users));
                }
                let now = now.as_ref().filter(|_| is_kind);
                self.put_back_file(path, spot, (file, *size, content), now)?;
                self.seen.insert(file.id(), path.to_owned());
                Ok(())
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
        let users = self.sources.users;
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
            set_aside(path, self.created, users)?;
        }
        if let Some((held, source)) = &held
            && source.metadata()?.ino() == file.identity.1
        {
            // The name is another name of the file itself.
            set_aside(path, self.created, users)?;
            spot.allows(file.owner.0)?;
            fs::hard_link(held, spot.path())?;
        }
        let mut options = File::options();
        options.read(true).write(true).mode(0o600);
        let target = match spot.open_as_owner(&mut options, 0) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                spot.allows(file.owner.0)?;
                spot.may_make_for(file.owner.0)?;
                spot.open_as_owner(options.create_new(true), 0)?
            }
            opened => {
                let opened = opened?;
                not_of_others(spot, &opened, file)?;
                opened
            }
        };
        match (content, &held) {
            (Content::Kept { stream, place }, _) => {
                self.save(path, &target)?;
                if matches!(place, StreamPlace::Sparse { .. }) {
                    target.set_len(0)?;
                }
                let mut sink = SparseWriter::new(&target, place.ranges(size));
                (self.sources.content)(stream, place.offset(), place.bytes(size), &mut sink)?;
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
        give(&target, file.owner, file.mode)?;
        attributes::set(&target, &file.attributes)?;
        set_time(&target, file)
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
            let copied = copy_data(target, 0..bytes, &saved, 0);
            io::Seek::rewind(&mut &*target)?;
            if copied.is_err_and(|error| is_disk_full(&error)) {
                // The disk is full. The job writes this content again, and its files need the space.
                self.not_saved += 1;
                return fs::remove_file(copy);
            }
        }
        Ok(())
    }
}

/// Returns true if a file and a name are on one file system. Clones of a file system have files with the same inode
/// numbers and times of creation.
fn is_on_one_device(first: &Path, path: &Path) -> io::Result<bool> {
    let folder = path.parent().unwrap_or(path);
    Ok(first.symlink_metadata()?.dev() == folder.metadata()?.dev())
}

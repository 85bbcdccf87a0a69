//! Storage of data that a rollback truncates or overwrites.

use std::fs::{self, File};
use std::io;
use std::ops::Range;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use super::error::{RewindError, system};
use crate::job::files::OpenFile;
use crate::known_errors::is_disk_full;
use crate::safe_path::Spot;
use crate::sparse_file::copy_data;

/// Data that was truncated or overwritten, and the file that it was saved in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CutAway {
    /// The job's file.
    pub path: PathBuf,
    /// Number of saved bytes.
    pub bytes: u64,
    /// File with the saved bytes.
    pub kept: PathBuf,
    /// Length of the job's file without the bytes.
    pub size: u64,
    /// Device and inode of the job's file.
    pub identity: (u64, u64),
}

impl CutAway {
    /// Writes the bytes back. Returns false if another program has written to the file since, or replaced it.
    fn put_back(&self) -> io::Result<bool> {
        let target = without_links(&self.path)?;
        let now = target.metadata()?;
        if (now.dev(), now.ino()) != self.identity || now.size() != self.size {
            return Ok(false);
        }
        let kept = File::open(&self.kept)?;
        copy_data(&kept, 0..self.bytes, &target, self.size)?;
        target.sync_all()?;
        discard(&self.kept)?;
        Ok(true)
    }
}

/// Writes the truncated data back after a failed restore, because newer images need the files whole. Returns false if
/// some data could not be written back. Such data stays where it was saved, and this is logged.
pub fn undo(cut: &[CutAway]) -> bool {
    let mut is_whole = true;
    for one in cut {
        let (path, kept) = (one.path.display(), one.kept.display());
        match one.put_back() {
            Ok(true) => continue,
            Ok(false) => {
                tracing::warn!(%path, %kept, "cannot write the file's saved end back: another program has written to the file since, or replaced it");
            }
            Err(error) => {
                tracing::warn!(%path, %kept, "cannot write the file's saved end back: {error}");
            }
        }
        is_whole = false;
    }
    is_whole
}

/// Limit on the bytes of a file's name in the name of its saved part. A name can have 255 bytes, and a number precedes
/// it.
const NAME_BYTES_MAX: usize = 200;

/// Returns the name of a saved part: a number and the file's own name, truncated to the limit.
pub(super) fn aside_name(index: usize, path: &Path) -> String {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let fits = |(at, char): &(usize, char)| at + char.len_utf8() <= NAME_BYTES_MAX;
    let start: String = name
        .char_indices()
        .take_while(fits)
        .map(|(_, char)| char)
        .collect();
    format!("{index}-{start}")
}

/// Copies all bytes beyond the file's size at the snapshot into `kept`. Returns `None` if there are none.
pub(super) fn keep_cut(
    file: &OpenFile,
    source: &mut File,
    kept: PathBuf,
) -> Result<Option<CutAway>, RewindError> {
    let bytes = keep_end(&file.path, source, file.size, &kept)?;
    let found = source.metadata().map_err(system("inspect", &file.path))?;
    Ok((bytes > 0).then(|| CutAway {
        path: file.path.clone(),
        bytes,
        kept,
        size: file.size,
        identity: (found.dev(), found.ino()),
    }))
}

/// Copies all bytes from `from` on of the file at `path`, open as `source`, into `kept`, which is created if there are
/// any. Returns the number of bytes.
pub(in crate::job) fn keep_end(
    path: &Path,
    source: &mut File,
    from: u64,
    kept: &Path,
) -> Result<u64, RewindError> {
    let end = source.metadata().map_err(system("inspect", path))?.size();
    if end <= from {
        return Ok(0);
    }
    let folder = kept.parent().unwrap_or(kept);
    copy_to_new(source, from..end, folder, kept).map_err(|error| {
        // A partial copy is useless, and the disk may be full.
        let _ = discard(kept);
        if is_disk_full(&error) {
            let (path, folder) = (path.to_owned(), folder.to_owned());
            return RewindError::NoRoom {
                path,
                folder,
                source: error,
            };
        }
        system("save the end of", path)(error)
    })?;
    Ok(end - from)
}

/// Removes a saved part, and its folder if that is empty. An empty folder would count as one of the newest and displace
/// an older one.
pub(in crate::job) fn discard(kept: &Path) -> io::Result<()> {
    fs::remove_file(kept)?;
    // The folder usually contains other files.
    let _ = kept.parent().map(fs::remove_dir);
    Ok(())
}

fn copy_to_new(source: &mut File, range: Range<u64>, folder: &Path, kept: &Path) -> io::Result<()> {
    fs::create_dir_all(folder)?;
    let target = File::options()
        .write(true)
        .create(true)
        .truncate(true)
        .mode(0o600)
        .open(kept)?;
    copy_data(source, range, &target, 0)?;
    target.sync_all()
}

/// Opens a file without following links. Recorded paths contained no links, so an existing link leads elsewhere. A hard
/// link that another user can have created is refused.
pub(super) fn without_links(path: &Path) -> io::Result<File> {
    let spot = Spot::of(path)?;
    let file = spot.open_as_owner(File::options().read(true).write(true), 0)?;
    let found = file.metadata()?;
    if !found.is_file() || spot.is_lent(&found)? {
        return Err(io::ErrorKind::PermissionDenied.into());
    }
    Ok(file)
}

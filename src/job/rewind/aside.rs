//! What is cut off files or overwritten in them, and where it is kept.

use std::fs::{self, File};
use std::io::{self, Read, Seek, SeekFrom};
use std::ops::Range;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::unistd::{Whence, lseek64};

use super::error::{RewindError, system};
use crate::job::files::OpenFile;
use crate::known_errors::is_disk_full;

/// Something that was cut off a file, or overwritten, and where it is now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CutAway {
    /// The job's file.
    pub path: PathBuf,
    /// Bytes kept aside.
    pub bytes: u64,
    /// The file that holds them.
    pub kept: PathBuf,
    /// Where in the job's file they were.
    pub from: u64,
    /// The length of the job's file without them, or with what took their place.
    pub size: u64,
}

impl CutAway {
    /// Puts the bytes back where they were, unless somebody has written there since.
    fn put_back(&self) -> io::Result<()> {
        let mut target = without_links(&self.path)?;
        if target.metadata()?.size() != self.size {
            return Ok(());
        }
        let mut kept = File::open(&self.kept)?;
        copy_data(&mut kept, 0, self.bytes, &mut target, self.from)?;
        target.sync_all()?;
        discard(&self.kept)
    }
}

/// Puts back what was cut off for a restore that failed: images newer than that one want their files whole. What cannot
/// be put back stays where it was kept, and is named.
pub fn undo(cut: &[CutAway]) {
    for one in cut {
        if let Err(error) = one.put_back() {
            let (path, kept) = (one.path.display(), one.kept.display());
            tracing::warn!(%path, %kept, "cannot put back what was cut off: {error}");
        }
    }
}

/// Bytes of a file's name that its kept part is called by; a name has 255, and a number goes before it.
const NAME_BYTES_MAX: usize = 200;

/// The name under which a part of a file is kept: as much of its own as a file's name has room for.
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

/// Copies everything from `from` on into `kept`. `None` when there is nothing.
pub(super) fn keep_from(
    file: &OpenFile,
    source: &mut File,
    from: u64,
    kept: PathBuf,
) -> Result<Option<CutAway>, RewindError> {
    let bytes = keep_end(&file.path, source, from, &kept)?;
    Ok((bytes > 0).then(|| CutAway {
        path: file.path.clone(),
        bytes,
        kept,
        from,
        size: file.size,
    }))
}

/// Copies everything from `from` on of the file at `path`, open as `source`, into `kept`, which is made if there is
/// anything. How many bytes that are.
pub(in crate::job) fn keep_end(
    path: &Path,
    source: &mut File,
    from: u64,
    kept: &Path,
) -> Result<u64, RewindError> {
    let end = source.metadata().map_err(system("look at", path))?.size();
    if end <= from {
        return Ok(0);
    }
    let folder = kept.parent().unwrap_or(kept);
    copy_to_new(source, from..end, folder, kept).map_err(|error| {
        // A part of it helps nobody, and the disk may be full.
        let _ = discard(kept);
        if is_disk_full(&error) {
            let (path, folder) = (path.to_owned(), folder.to_owned());
            return RewindError::NoRoom {
                path,
                folder,
                source: error,
            };
        }
        system("keep aside the end of", path)(error)
    })?;
    Ok(end - from)
}

/// Removes something kept, and its folder if that is empty: as one of the newest it would take the place of an older one.
fn discard(kept: &Path) -> io::Result<()> {
    fs::remove_file(kept)?;
    // Most often others are in it.
    let _ = kept.parent().map(fs::remove_dir);
    Ok(())
}

fn copy_to_new(source: &mut File, range: Range<u64>, folder: &Path, kept: &Path) -> io::Result<()> {
    fs::create_dir_all(folder)?;
    let mut target = File::options()
        .write(true)
        .create(true)
        .truncate(true)
        .mode(0o600)
        .open(kept)?;
    copy_data(source, range.start, range.end, &mut target, 0)?;
    target.sync_all()
}

/// Copies a range of `source` to the end of `target`, which is at `at`, and holes as holes.
fn copy_data(source: &mut File, from: u64, end: u64, target: &mut File, at: u64) -> io::Result<()> {
    target.set_len(at)?;
    target.set_len(at + (end - from))?;
    let seek = |source: &File, place: u64, whence| {
        let place = i64::try_from(place).map_err(io::Error::other)?;
        match lseek64(source, place, whence) {
            Ok(found) => u64::try_from(found).map_err(io::Error::other),
            // Behind it are holes alone.
            Err(Errno::ENXIO) => Ok(end),
            Err(errno) => Err(errno.into()),
        }
    };
    let mut place = from;
    while place < end {
        let data = seek(source, place, Whence::SeekData)?.min(end);
        let hole = seek(source, data, Whence::SeekHole)?.min(end);
        source.seek(SeekFrom::Start(data))?;
        target.seek(SeekFrom::Start(at + (data - from)))?;
        io::copy(&mut source.take(hole - data), target)?;
        place = hole;
    }
    Ok(())
}

/// Recorded paths were free of links; one that is there now leads elsewhere.
pub(super) fn without_links(path: &Path) -> io::Result<File> {
    let mut options = File::options();
    options.custom_flags(nix::libc::O_NOFOLLOW);
    options.read(true).write(true).open(path)
}

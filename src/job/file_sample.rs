//! Identification of files by a hash of a part of their content: append-only files, and programs, libraries and other
//! mapped files that the job does not write.
//!
//! Appending does not change the hashed part. A copy of the file has the same hash.

use std::collections::BTreeSet;
use std::fs::File;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

use nix::sys::statfs::{TMPFS_MAGIC, fstatfs};
use xxhash_rust::xxh3::xxh3_64;

use super::OpenFile;
use super::files::{Access, modified_ns};
use super::rewind::error::{RewindError, system};
use crate::safe_path::Spot;
use crate::sync::in_parts_from;

/// Bytes read at the beginning and at the end. The number is small because the job is frozen during the read.
const END_BYTES: usize = 64 << 10;
/// Smallest size of a file that a hash identifies. A shorter file may contain only a heading that other files share.
pub(in crate::job) const IDENTIFYING_BYTES_MIN: u64 = 4096;
/// Limit on the sampled append-only files, those with content first, in order of paths. They stay open for a while, and at
/// most 32 MiB are read while the job is frozen.
const FILES_MAX: usize = 256;
/// Fewest files that the job does not write for which a thread is started.
const PART_MIN: usize = 16;
/// First bytes of a program or library.
const ELF: &[u8] = b"\x7fELF";

/// Samples the append-only files, and returns them. A file that cannot be read is identified by
/// its inode alone.
pub fn sample_appended(files: &mut [OpenFile]) -> Vec<AppendedFile> {
    let appended = files.iter_mut().filter(|file| file.is_appended());
    let (telling, empty): (Vec<_>, Vec<_>) = appended.partition(|file| file.size > 0);
    let first = telling.into_iter().chain(empty).take(FILES_MAX);
    let sampled = first.filter_map(|file| {
        let opened = open_file(&file.path).ok()?;
        file.sample = Some(sample(&opened, file.size).ok()?);
        let path = file.path.clone();
        Some(AppendedFile { path, opened })
    });
    sampled.collect()
}

/// An append-only file, which the job may rename or remove meanwhile.
#[derive(Debug)]
pub struct AppendedFile {
    /// Its path at the snapshot.
    pub path: PathBuf,
    /// The file, open for reading.
    pub opened: File,
}

/// Samples the files that the job has mapped, and the programs and libraries that it has open, unless it writes them. Those
/// at the positions in `kept` are left out: their content is in the image. The job may compute meanwhile.
///
/// Some systems give all installed files the same time, so that size and time do not tell two builds apart. CRIU would
/// compare their build IDs, but opens and maps every open file for it while the job is frozen.
pub fn sample_unwritten(files: &mut [OpenFile], kept: &BTreeSet<usize>) {
    let positions = 0..files.len();
    let compared = positions.filter(|at| !kept.contains(at) && may_need_sample(&files[*at]));
    let compared: Vec<usize> = compared.collect();
    let look = |part: &[usize]| {
        part.iter()
            .map(|at| look_at(&files[*at]))
            .collect::<Vec<_>>()
    };
    let found = in_parts_from(PART_MIN, &compared, look);
    for (at, look) in compared.into_iter().zip(found.into_iter().flatten()) {
        match look {
            Look::NotCompared => {}
            Look::Same(sample) => files[at].sample = Some(sample),
            Look::Changed => files[at].changed = true,
        }
    }
}

/// Checks that the files sampled by [`sample_unwritten`] are those of the snapshot.
///
/// # Errors
/// A file that is not.
pub fn check_unwritten<'a>(
    files: impl IntoIterator<Item = &'a OpenFile>,
) -> Result<(), RewindError> {
    let is_known = |file: &&OpenFile| !file.written() && (file.sample.is_some() || file.changed);
    let known: Vec<&OpenFile> = files.into_iter().filter(is_known).collect();
    let failed = |part: &[&OpenFile]| part.iter().find_map(|file| check(file).err());
    let failures = in_parts_from(PART_MIN, &known, failed);
    failures.into_iter().flatten().next().map_or(Ok(()), Err)
}

fn check(file: &OpenFile) -> Result<(), RewindError> {
    let path = || file.path.clone();
    if file.changed {
        return Err(RewindError::Unknown(path()));
    }
    let found = open_file(&file.path)
        .and_then(|opened| Ok((opened.metadata()?, sample(&opened, file.size)?)));
    match found {
        Ok((about, now)) => {
            let is_same = file.sample == Some(now)
                && about.size() == file.size
                && (file.access != Access::Map || modified_ns(&about) == file.modified_ns);
            is_same.then_some(()).ok_or(RewindError::Replaced(path()))
        }
        Err(error) => Err(match error.kind() {
            io::ErrorKind::NotFound => RewindError::Vanished(path()),
            io::ErrorKind::UnexpectedEof => RewindError::Replaced(path()),
            _ => system("read", &file.path)(error),
        }),
    }
}

/// Result of the look at a file after the freeze.
enum Look {
    /// A file that needs no sample, or that cannot be read.
    NotCompared,
    Same(u64),
    /// Another file, or another version of it.
    Changed,
}

/// Returns false for a file that need not even be opened: a job may have thousands of open data files on a slow file
/// system.
fn may_need_sample(file: &OpenFile) -> bool {
    // The kernel makes the content of its own files when they are read.
    let has_content = file.size > 0 && !file.path.starts_with("/sys");
    let name = || file.path.file_name().unwrap_or_default().as_bytes();
    let is_like_program = || file.mode & 0o111 != 0 || find(name(), b".so") || find(name(), b".ko");
    match file.access {
        Access::Map => has_content,
        Access::Read => has_content && is_like_program(),
        Access::Write | Access::Update => false,
    }
}

fn find(name: &[u8], part: &[u8]) -> bool {
    name.windows(part.len()).any(|window| window == part)
}

fn look_at(file: &OpenFile) -> Look {
    let found = open_file(&file.path).and_then(|opened| Ok((opened.metadata()?, opened)));
    let (about, opened) = match found {
        Ok(found) => found,
        // Where it was removed, another one may take its place.
        Err(error) if error.kind() == io::ErrorKind::NotFound && file.access == Access::Map => {
            return Look::Changed;
        }
        Err(_) => return Look::NotCompared,
    };
    let now = (about.ino(), about.size(), modified_ns(&about));
    let is_same = now == (file.inode, file.size, file.modified_ns);
    let mut magic = [0; ELF.len()];
    let is_program = opened.read_exact_at(&mut magic, 0).is_ok() && magic == ELF;
    // In memory, a write through another program's mapping leaves no trace in the file's time, and is its own affair.
    let is_data = !is_program && (file.access == Access::Read || is_same && is_in_memory(&opened));
    match is_same {
        _ if is_data => Look::NotCompared,
        false => Look::Changed,
        true => sample(&opened, file.size).map_or(Look::NotCompared, Look::Same),
    }
}

fn is_in_memory(opened: &File) -> bool {
    fstatfs(opened).is_ok_and(|about| about.filesystem_type() == TMPFS_MAGIC)
}

/// Opens a regular file to read it. Nothing else is opened: a device may act on that.
fn open_file(path: &Path) -> io::Result<File> {
    let spot = Spot::of(path)?;
    if !spot.metadata()?.is_file() {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    spot.open(File::options().read(true), 0)
}

/// Returns the hash of both ends of the first `size` bytes, or of all of them if the ends overlap.
pub(in crate::job) fn sample(file: &File, size: u64) -> io::Result<u64> {
    sample_by(size, |bytes, at| file.read_exact_at(bytes, at))
}

impl OpenFile {
    /// Returns true if an append-only file begins with the bytes that it had at the snapshot, as far as a sample shows.
    pub(crate) fn has_same_bytes(&self, file: &File) -> bool {
        self.are_same_bytes(|bytes, at| file.read_exact_at(bytes, at))
    }

    /// Same as [`has_same_bytes`](Self::has_same_bytes), for bytes supplied by `read`, which fills a buffer from an offset.
    pub(crate) fn are_same_bytes(
        &self,
        read: impl FnMut(&mut [u8], u64) -> io::Result<()>,
    ) -> bool {
        self.size == 0 || self.sample.is_some() && sample_by(self.size, read).ok() == self.sample
    }
}

/// Same as [`sample`], for the job's file at a path.
pub(in crate::job) fn sample_at(path: &Path, size: u64) -> io::Result<u64> {
    sample(&open_file(path)?, size)
}

/// Same as [`sample`], for bytes supplied by `read`, which fills a buffer from an offset.
pub(in crate::job) fn sample_by(
    size: u64,
    mut read: impl FnMut(&mut [u8], u64) -> io::Result<()>,
) -> io::Result<u64> {
    let len = usize::try_from(size).map_or(2 * END_BYTES, |size| size.min(2 * END_BYTES));
    let mut bytes = vec![0; len];
    let (start, end) = bytes.split_at_mut(len.min(END_BYTES));
    read(start, 0)?;
    read(end, size - end.len() as u64)?;
    Ok(xxh3_64(&bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sample_covers_both_ends_and_no_appended_data() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let mut content: Vec<u8> = (0..=250).cycle().take(4 * END_BYTES).collect();
        let size = content.len() as u64;
        let mut sample_of = |change: Option<usize>, size| {
            if let Some(at) = change {
                content[at] ^= 1;
            }
            std::fs::write(file.path(), &content).unwrap();
            sample_at(file.path(), size).ok()
        };
        let whole = sample_of(None, size);
        assert!(whole.is_some());
        assert_eq!(sample_of(Some(2 * END_BYTES), size), whole);
        for at in [0, END_BYTES - 1, 3 * END_BYTES, 4 * END_BYTES - 1] {
            assert_ne!(sample_of(Some(at), size), whole, "{at}");
            assert_eq!(sample_of(Some(at), size), whole, "{at}");
        }
        for size in [0, 1, END_BYTES + 1, 2 * END_BYTES, 2 * END_BYTES + 1] {
            let before = sample_of(None, size as u64);
            assert!(before.is_some());
            assert_eq!(sample_of(Some(size), size as u64), before);
            sample_of(Some(size), 0);
            if let Some(last) = size.checked_sub(1) {
                assert_ne!(sample_of(Some(last), size as u64), before, "{size}");
                sample_of(Some(last), 0);
            }
        }
        assert_eq!(sample_of(None, size + 1), None);
    }
}

//! Identification of files by a hash of a part of their content: append-only files, and programs, libraries and other
//! mapped files that the job does not write.
//!
//! Appending does not change the hashed part. A copy of the file has the same hash.

use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;

use xxhash_rust::xxh3::xxh3_64;

use super::OpenFile;
use super::files::{Access, modified_ns};
use crate::safe_path::Spot;
use crate::sync::in_parts;

/// Bytes read at the beginning and at the end. The number is small because the job is frozen during the read.
const END_BYTES: usize = 64 << 10;
/// Smallest size of a file that a hash identifies. A shorter file may contain only a heading that other files share.
pub(in crate::job) const IDENTIFYING_BYTES_MIN: u64 = 4096;
/// Limit on the sampled append-only files, in order of paths. At most 8 MiB are read while the job is frozen.
const FILES_MAX: usize = 64;
/// First bytes of a program or library.
const ELF: &[u8] = b"\x7fELF";

/// Samples the append-only files whose content is not saved. A file that cannot be read is identified by its inode
/// alone.
pub fn sample_appended(files: &mut [OpenFile]) {
    let is_telling = |file: &&mut OpenFile| file.is_appended() && file.size > 0;
    let appended = files.iter_mut().filter(is_telling);
    for file in appended.take(FILES_MAX) {
        file.sample = sample_at(&file.path, file.size).ok();
    }
}

/// Samples the files that the job has mapped, and the programs and libraries that it has open, unless it writes them. It
/// computes meanwhile. A file that changed since the freeze is not sampled: its size or time is no longer that of the
/// snapshot.
///
/// Some systems give all installed files the same time, so that size and time do not tell two builds apart. CRIU would
/// compare their build IDs, but opens and maps every open file for it while the job is frozen.
pub fn sample_unwritten(files: &mut [OpenFile]) {
    let sample_all = |part: &[OpenFile]| part.iter().map(sample_one_unwritten).collect::<Vec<_>>();
    let samples = in_parts(files, sample_all);
    for (file, sample) in files.iter_mut().zip(samples.into_iter().flatten()) {
        file.sample = file.sample.or(sample);
    }
}

fn sample_one_unwritten(file: &OpenFile) -> Option<u64> {
    if file.written() {
        return None;
    }
    let opened = Spot::of(&file.path).ok()?;
    let opened = opened.open(File::options().read(true), 0).ok()?;
    let about = opened.metadata().ok()?;
    let is_same = (about.ino(), about.size(), modified_ns(&about))
        == (file.inode, file.size, file.modified_ns);
    let mut magic = [0; ELF.len()];
    let is_compared = is_same
        && (file.access == Access::Map
            || opened.read_exact_at(&mut magic, 0).is_ok() && magic == ELF);
    is_compared.then(|| sample(&opened, file.size).ok())?
}

/// Returns the hash of both ends of the first `size` bytes, or of all of them if the ends overlap.
pub(in crate::job) fn sample(file: &File, size: u64) -> io::Result<u64> {
    sample_by(size, |bytes, at| file.read_exact_at(bytes, at))
}

impl OpenFile {
    /// Returns true if an append-only file begins with the bytes that it had at the snapshot, as far as a sample shows.
    pub(crate) fn has_same_bytes(&self, file: &File) -> bool {
        self.size == 0 || self.sample.is_some() && sample(file, self.size).ok() == self.sample
    }
}

/// Same as [`sample`], for the job's file at a path.
pub(in crate::job) fn sample_at(path: &Path, size: u64) -> io::Result<u64> {
    let file = Spot::of(path)?.open(File::options().read(true), 0)?;
    sample(&file, size)
}

/// Same as [`sample`], for bytes supplied by `read`, which fills a buffer from an offset.
pub(in crate::job) fn sample_by(
    size: u64,
    read: impl Fn(&mut [u8], u64) -> io::Result<()>,
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

//! Files with holes: where their data are, a writer that leaves holes, and copies that keep them.

use std::collections::VecDeque;
use std::fs::{File, Metadata};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::ops::Range;
use std::os::unix::fs::{FileExt, MetadataExt};

use nix::errno::Errno;
use nix::fcntl::{FallocateFlags, fallocate};
use nix::unistd::{Whence, lseek64};

/// Writer that fills ranges of a file, one after the other, and leaves holes for pages of zeros.
#[derive(Debug)]
pub(crate) struct SparseWriter<'a> {
    file: &'a File,
    /// Ranges that are still to be filled, in order.
    ranges: VecDeque<Range<u64>>,
}

/// Page of zeros.
static EMPTY_PAGE: [u8; 4096] = [0; 4096];

impl<'a> SparseWriter<'a> {
    pub fn new(file: &'a File, ranges: impl IntoIterator<Item = Range<u64>>) -> Self {
        let ranges = ranges.into_iter().collect();
        Self { file, ranges }
    }

    /// Punches a hole; writes zeros if the file system has no holes.
    fn punch(&self, bytes: &[u8], at: u64) -> io::Result<()> {
        let flags = FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
        let offset = i64::try_from(at).map_err(io::Error::other)?;
        let len = i64::try_from(bytes.len()).map_err(io::Error::other)?;
        match fallocate(self.file, flags, offset, len) {
            Ok(()) => Ok(()),
            Err(Errno::EOPNOTSUPP) => self.file.write_all_at(bytes, at),
            Err(errno) => Err(errno.into()),
        }
    }
}

impl Write for SparseWriter<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let Some(range) = self.ranges.pop_front() else {
            return Ok(0);
        };
        let room = usize::try_from(range.end - range.start).unwrap_or(usize::MAX);
        let bytes = &bytes[..bytes.len().min(room)];
        let is_empty = |page: &[u8]| page == &EMPTY_PAGE[..page.len()];
        let first = bytes.chunks(EMPTY_PAGE.len()).next().is_none_or(is_empty);
        let run = bytes.chunks(EMPTY_PAGE.len());
        let len: usize = run
            .take_while(|page| is_empty(page) == first)
            .map(<[u8]>::len)
            .sum();
        let part = &bytes[..len];
        if first {
            self.punch(part, range.start)?;
        } else {
            self.file.write_all_at(part, range.start)?;
        }
        let rest = range.start + len as u64..range.end;
        if !rest.is_empty() {
            self.ranges.push_front(rest);
        }
        Ok(len)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Returns the bytes that a file has on its disk: holes have none.
pub(crate) fn allocated_bytes(found: &Metadata) -> u64 {
    const BLOCK_BYTES: u64 = 512;
    found.blocks() * BLOCK_BYTES
}

/// Returns the parts of a range of a file that are no holes, in order.
///
/// # Errors
/// The file cannot be searched.
pub(crate) fn data_ranges(file: &File, range: Range<u64>) -> io::Result<Vec<Range<u64>>> {
    let end = range.end;
    let seek = |place: u64, whence| {
        let place = i64::try_from(place).map_err(io::Error::other)?;
        match lseek64(file, place, whence) {
            Ok(found) => u64::try_from(found).map_err(io::Error::other),
            // Only holes follow.
            Err(Errno::ENXIO) => Ok(end),
            Err(errno) => Err(errno.into()),
        }
    };
    let mut found = Vec::new();
    let mut place = range.start;
    while place < end {
        let data = seek(place, Whence::SeekData)?.min(end);
        place = seek(data, Whence::SeekHole)?.min(end);
        if data < place {
            found.push(data..place);
        }
    }
    Ok(found)
}

/// Copies a range of `source` to offset `at`, the end of `target`. Holes are preserved.
pub(crate) fn copy_data(
    mut source: &File,
    range: Range<u64>,
    mut target: &File,
    at: u64,
) -> io::Result<()> {
    target.set_len(at)?;
    target.set_len(at + (range.end - range.start))?;
    for data in data_ranges(source, range.clone())? {
        source.seek(SeekFrom::Start(data.start))?;
        target.seek(SeekFrom::Start(at + (data.start - range.start)))?;
        io::copy(&mut source.take(data.end - data.start), &mut target)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn pages_of_zeros_become_holes_and_the_rest_is_written() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        fs::write(&path, vec![b'x'; 3 << 20]).unwrap();
        let file = File::options().write(true).open(&path).unwrap();
        let mut content = vec![0; 3 << 20];
        content[(2 << 20) + 7] = 1;
        SparseWriter::new(&file, [0..3 << 20])
            .write_all(&content)
            .unwrap();
        assert_eq!(fs::read(&path).unwrap(), content);
        let found = fs::metadata(&path).unwrap();
        assert!(found.blocks() * 512 < 1 << 20, "{} blocks", found.blocks());
    }

    #[test]
    fn ranges_of_data_are_found_and_filled() {
        let source = tempfile::tempfile().unwrap();
        source.set_len(1 << 40).unwrap();
        let ranges = [4096..8192, 1 << 30..(1 << 30) + 4096];
        for range in &ranges {
            source.write_all_at(&[7; 4096], range.start).unwrap();
        }
        assert_eq!(
            data_ranges(&source, 0..1 << 40).unwrap(),
            [4096..8192, 1 << 30..(1 << 30) + 4096]
        );
        assert_eq!(data_ranges(&source, 6000..7000).unwrap(), [6000..7000]);
        assert_eq!(data_ranges(&source, 8192..1 << 30).unwrap(), []);
        let target = tempfile::tempfile().unwrap();
        let mut writer = SparseWriter::new(&target, [4096..8192, 1 << 30..(1 << 30) + 4096]);
        writer.write_all(&[7; 8192]).unwrap();
        assert!(
            writer.write_all(&[7]).is_err(),
            "nothing belongs after the last range"
        );
        assert_eq!(data_ranges(&target, 0..1 << 40).unwrap(), ranges);
    }
}

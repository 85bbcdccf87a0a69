//! Files with holes: a writer that replaces pages of zeros by holes, and copies that keep holes.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::ops::Range;
use std::os::unix::fs::FileExt;

use nix::errno::Errno;
use nix::fcntl::{FallocateFlags, fallocate};
use nix::unistd::{Whence, lseek64};

/// Writer that fills a file from its beginning and leaves holes for pages of zeros.
#[derive(Debug)]
pub(crate) struct SparseWriter<'a> {
    file: &'a File,
    at: u64,
}

/// Page of zeros.
static EMPTY_PAGE: [u8; 4096] = [0; 4096];

impl<'a> SparseWriter<'a> {
    pub fn new(file: &'a File) -> Self {
        Self { file, at: 0 }
    }

    /// Punches a hole; writes zeros if the file system has no holes.
    fn punch(&self, bytes: &[u8]) -> io::Result<()> {
        let flags = FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
        let offset = i64::try_from(self.at).map_err(io::Error::other)?;
        let len = i64::try_from(bytes.len()).map_err(io::Error::other)?;
        match fallocate(self.file, flags, offset, len) {
            Ok(()) => Ok(()),
            Err(Errno::EOPNOTSUPP) => self.file.write_all_at(bytes, self.at),
            Err(errno) => Err(errno.into()),
        }
    }
}

impl Write for SparseWriter<'_> {
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
            self.file.write_all_at(part, self.at)?;
        }
        self.at += len as u64;
        Ok(len)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Copies a range of `source` to offset `at`, the end of `target`. Holes are preserved.
pub(crate) fn copy_data(
    mut source: &File,
    range: Range<u64>,
    mut target: &File,
    at: u64,
) -> io::Result<()> {
    let (from, end) = (range.start, range.end);
    target.set_len(at)?;
    target.set_len(at + (end - from))?;
    let seek = |source: &File, place: u64, whence| {
        let place = i64::try_from(place).map_err(io::Error::other)?;
        match lseek64(source, place, whence) {
            Ok(found) => u64::try_from(found).map_err(io::Error::other),
            // Only holes follow.
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
        io::copy(&mut source.take(hole - data), &mut target)?;
        place = hole;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::MetadataExt;

    #[test]
    fn pages_of_zeros_become_holes_and_the_rest_is_written() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        fs::write(&path, vec![b'x'; 3 << 20]).unwrap();
        let file = File::options().write(true).open(&path).unwrap();
        let mut content = vec![0; 3 << 20];
        content[(2 << 20) + 7] = 1;
        SparseWriter::new(&file).write_all(&content).unwrap();
        assert_eq!(fs::read(&path).unwrap(), content);
        let found = fs::metadata(&path).unwrap();
        assert!(found.blocks() * 512 < 1 << 20, "{} blocks", found.blocks());
    }
}

//! File writer that replaces pages of zeros by holes, for the contents of the job's files.

use std::fs::File;
use std::io::{self, Write};
use std::os::unix::fs::FileExt;

use nix::errno::Errno;
use nix::fcntl::{FallocateFlags, fallocate};

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

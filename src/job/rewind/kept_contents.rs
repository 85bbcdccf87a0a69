//! The writing of saved contents into files.

use std::fs::File;
use std::io::{self, Seek, SeekFrom, Write};

use super::error::{RewindError, system};
use crate::job::files::OpenFile;

/// Writes the saved content of a file into it.
pub(super) fn refill(
    file: &OpenFile,
    target: &mut File,
    content: &impl Fn(&str, &mut dyn Write) -> io::Result<()>,
) -> Result<(), RewindError> {
    let Some(stream) = &file.content else {
        return Ok(());
    };
    let system = |operation| system(operation, &file.path);
    if file.in_memory {
        // Pages that are not written take no memory.
        target.set_len(0).map_err(system("empty"))?;
    }
    target.rewind().map_err(system("write"))?;
    let mut sink = Sparse {
        file: target,
        holes: file.in_memory,
    };
    content(stream, &mut sink).map_err(system("put back the content of"))?;
    target.set_len(file.size).map_err(system("cut"))
}

/// A writer that starts at the file's beginning. With `holes`, the file is empty and blocks of zeros are skipped.
struct Sparse<'a> {
    file: &'a mut File,
    holes: bool,
}

/// A page of memory without any data.
static EMPTY_PAGE: [u8; 4096] = [0; 4096];

impl Write for Sparse<'_> {
    /// Writes as many consecutive pages of one kind as there are: zeros, or others.
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if !self.holes {
            return self.file.write(bytes);
        }
        let is_empty = |page: &&[u8]| **page == EMPTY_PAGE[..page.len()];
        let pages = bytes.chunks(EMPTY_PAGE.len());
        let empty: usize = pages.clone().take_while(is_empty).map(<[u8]>::len).sum();
        if empty > 0 {
            let len = i64::try_from(empty).map_err(io::Error::other)?;
            self.file.seek(SeekFrom::Current(len))?;
            return Ok(empty);
        }
        let full = pages.take_while(|page| !is_empty(page));
        let full: usize = full.map(<[u8]>::len).sum();
        self.file.write(&bytes[..full])
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

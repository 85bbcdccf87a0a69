//! The archive: entries that follow each other in a known order, each with the one header that it can have.
//!
//! A reader compares each block with the block that a writer would have written. So it needs no rules for paths, links,
//! owners, extensions or entries that come twice: an archive with any of them is another file.

use std::io::{self, Read, Write};

use tar::{EntryType, Header};

use super::error::{ExportError, FileDamage, ImportError};

/// Unit of a tar archive.
pub(super) const BLOCK: usize = 512;
/// Length of the zeros that end an archive.
const END: usize = 2 * BLOCK;

/// Returns the header of an entry.
pub(super) fn header(name: &str, len: u64) -> [u8; BLOCK] {
    let mut header = Header::new_gnu();
    header.set_entry_type(EntryType::Regular);
    header.set_mode(0o600);
    header.set_uid(0);
    header.set_gid(0);
    header.set_mtime(0);
    header.set_size(len);
    header
        .set_path(name)
        .expect("the names of a store's files fit into a header");
    header.set_cksum();
    *header.as_bytes()
}

/// Length of the zeros behind an entry of `len` bytes.
fn padding(len: u64) -> usize {
    let used = usize::try_from(len % BLOCK as u64).unwrap_or(0);
    (BLOCK - used) % BLOCK
}

/// A writer of entries.
pub(super) struct ArchiveWriter<'a, W> {
    sink: &'a mut W,
    /// Bytes written so far.
    pub(super) bytes: u64,
}

impl<'a, W: Write> ArchiveWriter<'a, W> {
    pub(super) fn new(sink: &'a mut W) -> Self {
        Self { sink, bytes: 0 }
    }

    pub(super) fn entry(&mut self, name: &str, content: &[u8]) -> Result<(), ExportError> {
        let len = content.len() as u64;
        self.write(&header(name, len))?;
        self.write(content)?;
        self.pad(len)
    }

    pub(super) fn write(&mut self, bytes: &[u8]) -> Result<(), ExportError> {
        self.bytes += bytes.len() as u64;
        self.sink.write_all(bytes).map_err(ExportError::Write)
    }

    /// Ends an entry of `len` bytes.
    pub(super) fn pad(&mut self, len: u64) -> Result<(), ExportError> {
        self.write(&[0; BLOCK][..padding(len)])
    }

    pub(super) fn end(mut self) -> Result<u64, ExportError> {
        self.write(&[0; END])?;
        self.sink.flush().map_err(ExportError::Write)?;
        Ok(self.bytes)
    }
}

/// A reader of entries.
pub(super) struct ArchiveReader<R> {
    source: R,
    /// Bytes read so far.
    at: u64,
}

impl<R: Read> ArchiveReader<R> {
    pub(super) fn new(source: R) -> Self {
        Self { source, at: 0 }
    }

    /// Begins the next entry, which must have one of these names; returns the name and the entry's length.
    pub(super) fn begin(
        &mut self,
        names: &[&'static str],
    ) -> Result<(&'static str, u64), ImportError> {
        let mut block = [0; BLOCK];
        self.fill(&mut block)?;
        let len = Header::from_byte_slice(&block).entry_size().unwrap_or(0);
        let found = names.iter().find(|name| header(name, len) == block);
        match found {
            Some(name) => Ok((name, len)),
            None => Err(self.damaged(FileDamage::Entry(names[0]))),
        }
    }

    /// Reads all of an entry, which has at most `limit` bytes.
    pub(super) fn content(&mut self, len: u64, limit: u64) -> Result<Vec<u8>, ImportError> {
        if len > limit {
            return Err(self.damaged(FileDamage::Senseless("an entry has an impossible length")));
        }
        // Memory grows with what comes, not with what the header says.
        let mut content = Vec::new();
        let read = (&mut self.source).take(len).read_to_end(&mut content);
        read.map_err(ImportError::Read)?;
        self.at += content.len() as u64;
        if content.len() as u64 != len {
            return Err(self.damaged(FileDamage::Short));
        }
        self.skip_padding(len)?;
        Ok(content)
    }

    pub(super) fn fill(&mut self, bytes: &mut [u8]) -> Result<(), ImportError> {
        self.source
            .read_exact(bytes)
            .map_err(|error| match error.kind() {
                io::ErrorKind::UnexpectedEof => self.damaged(FileDamage::Short),
                _ => ImportError::Read(error),
            })?;
        self.at += bytes.len() as u64;
        Ok(())
    }

    /// Ends an entry of `len` bytes.
    pub(super) fn skip_padding(&mut self, len: u64) -> Result<(), ImportError> {
        self.zeros(padding(len))
    }

    /// Returns an error unless the archive and the source end here.
    pub(super) fn end(mut self) -> Result<(), ImportError> {
        self.zeros(END)?;
        let mut more = Vec::new();
        let read = (&mut self.source).take(1).read_to_end(&mut more);
        match read.map_err(ImportError::Read)? {
            0 => Ok(()),
            _ => Err(self.damaged(FileDamage::Long)),
        }
    }

    fn zeros(&mut self, len: usize) -> Result<(), ImportError> {
        let mut bytes = [0; END];
        self.fill(&mut bytes[..len])?;
        if bytes.iter().all(|byte| *byte == 0) {
            Ok(())
        } else {
            Err(self.damaged(FileDamage::Senseless(
                "the padding of the archive is not zero",
            )))
        }
    }

    pub(super) fn damaged(&self, damage: FileDamage) -> ImportError {
        ImportError::Damaged {
            at: self.at,
            damage,
        }
    }
}

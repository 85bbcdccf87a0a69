//! Writer of a pack's file from buffers.
//!
//! Buffers bypass the page cache (`O_DIRECT`) and go to preallocated space. This reaches the disk's speed with little
//! processor time, and the job's cached data stay in the cache. On file systems without `O_DIRECT` the cache is used,
//! and the kernel is advised to drop the pages. This module is independent of chunks and of the threads that fill the
//! buffers.

use std::fs::File;
use std::io;
use std::path::PathBuf;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, OFlag, PosixFadviseAdvice, fcntl, posix_fadvise};

use crate::store::error::WriteError;
use crate::store::format::pack::{Pack, PackName};
use crate::store::fs::ops;
use crate::sync::locked;

/// Length after which the next pack begins: small enough that the removal of an image frees most of its space, and
/// large enough to keep packs few. Tests need several packs without a gibibyte each.
const PACK_BYTES_MAX: u64 = if cfg!(test) { 2 << 20 } else { 1 << 30 };

/// Size of a write, large enough that the disk takes most of the time (`benches/results/disk.txt`).
pub(crate) const STAGING_BYTES: usize = if cfg!(test) { 512 << 10 } else { 4 << 20 };

/// Step of preallocation. Writes wait for it, so it is large. Unused space is freed when the pack is completed.
const STEP_BYTES: u64 = if cfg!(test) { 1 << 20 } else { 256 << 20 };
/// Length below which no space is preallocated, as in most packs of small jobs.
const STEP_FROM_BYTES: u64 = if cfg!(test) { 1 << 20 } else { 8 << 20 };

/// Alignment of addresses, offsets and lengths for `O_DIRECT`. Few disks have larger blocks, and those refuse
/// `O_DIRECT`.
const ALIGNMENT: usize = 4096;

/// Pack with an open file.
#[derive(Debug)]
pub(crate) struct PackWriter {
    name: PackName,
    path: PathBuf,
    file: File,
    /// Number of bytes appended, whether written or not.
    len: AtomicU64,
    /// End of the allocated space.
    ahead: Mutex<u64>,
    is_direct: AtomicBool,
}

/// Buffer with its position in the pack.
#[derive(Debug)]
pub(crate) struct Staging {
    memory: Vec<u8>,
    /// Offset of the aligned part in `memory`.
    begin: usize,
    filled: usize,
    offset: u64,
}

impl PackWriter {
    pub(crate) fn create(name: PackName, path: PathBuf) -> Result<Self, WriteError> {
        let file = match ops::create_new(&path, 0o600) {
            Ok(file) => file,
            Err(source) => return Err(WriteError::Pack { path, source }),
        };
        // Set after the creation, because a file system that refuses the flag leaves the new file behind.
        let is_direct = fcntl(&file, FcntlArg::F_SETFL(OFlag::O_DIRECT)).is_ok();
        Ok(Self {
            name,
            path,
            file,
            len: AtomicU64::new(0),
            ahead: Mutex::new(STEP_FROM_BYTES),
            is_direct: AtomicBool::new(is_direct),
        })
    }

    pub(crate) fn name(&self) -> PackName {
        self.name
    }

    pub(crate) fn has_room(&self, bytes: usize) -> bool {
        self.len() + bytes as u64 <= PACK_BYTES_MAX
    }

    pub(crate) fn len(&self) -> u64 {
        self.len.load(Ordering::Relaxed)
    }

    /// Adds `bytes` to the length. Called by one thread at a time.
    pub(crate) fn grow(&self, bytes: usize) {
        self.len.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    /// Writes a buffer. Only the last buffer of a pack may be partly empty.
    pub(crate) fn write(&self, staging: &mut Staging) -> Result<(), WriteError> {
        let offset = staging.offset;
        let bytes = staging.padded();
        self.keep_ahead(offset + bytes.len() as u64);
        let written = match ops::write_at(&self.file, bytes, offset) {
            Err(error) if is_refusal(&error) => self
                .leave_direct()
                .and_then(|()| ops::write_at(&self.file, bytes, offset)),
            written => written,
        };
        if !self.is_direct.load(Ordering::Relaxed) {
            // Starts the writeback of the dirty pages there.
            self.let_go(offset, bytes.len() as u64);
        }
        written.map_err(|source| self.error(source))
    }

    /// Makes the pack durable. Its name is durable after a sync of the folder.
    pub(crate) fn seal(self) -> Result<Pack, WriteError> {
        // Removes the padding and frees unused space.
        ops::set_len(&self.file, self.len())
            .and_then(|()| ops::sync(&self.file))
            .map_err(|source| self.error(source))?;
        if !self.is_direct.load(Ordering::Relaxed) {
            self.let_go(0, 0);
        }
        Ok(Pack {
            name: self.name,
            len: self.len(),
        })
    }

    /// Preallocates space, as a hint: without it files are more fragmented, and a lack of space is reported by the
    /// write.
    fn keep_ahead(&self, end: u64) {
        let mut ahead = locked(&self.ahead);
        while *ahead < end {
            let _ = ops::allocate(&self.file, signed(*ahead), signed(STEP_BYTES));
            *ahead += STEP_BYTES;
        }
    }

    /// Advises the kernel to drop cached pages. Length 0 means up to the end of the file.
    fn let_go(&self, offset: u64, len: u64) {
        let advice = PosixFadviseAdvice::POSIX_FADV_DONTNEED;
        let _ = posix_fadvise(&self.file, signed(offset), signed(len), advice);
    }

    fn leave_direct(&self) -> io::Result<()> {
        self.is_direct.store(false, Ordering::Relaxed);
        fcntl(&self.file, FcntlArg::F_SETFL(OFlag::empty()))?;
        Ok(())
    }

    fn error(&self, source: io::Error) -> WriteError {
        WriteError::Pack {
            path: self.path.clone(),
            source,
        }
    }
}

/// Returns true if a write failed because it bypassed the page cache. All concurrent writes may fail in this way.
fn is_refusal(error: &io::Error) -> bool {
    error.raw_os_error() == Some(Errno::EINVAL as i32)
}

/// Converts a length, which is about `PACK_BYTES_MAX` at most, to the signed type.
fn signed(bytes: u64) -> i64 {
    i64::try_from(bytes).unwrap_or(i64::MAX)
}

impl Staging {
    pub(crate) fn new() -> Self {
        let memory = vec![0; STAGING_BYTES + ALIGNMENT];
        Self {
            begin: memory.as_ptr().align_offset(ALIGNMENT),
            memory,
            filled: 0,
            offset: 0,
        }
    }

    /// Empties the buffer, for the bytes of a pack that start at `offset`.
    pub(crate) fn restart(&mut self, offset: u64) {
        self.filled = 0;
        self.offset = offset;
    }

    pub(crate) fn room(&self) -> usize {
        STAGING_BYTES - self.filled
    }

    /// Copies as many bytes as fit; returns the rest.
    pub(crate) fn take<'a>(&mut self, bytes: &'a [u8]) -> &'a [u8] {
        let (taken, rest) = bytes.split_at(bytes.len().min(self.room()));
        let at = self.begin + self.filled;
        self.memory[at..at + taken.len()].copy_from_slice(taken);
        self.filled += taken.len();
        rest
    }

    /// Returns all bytes, with zeros up to the next boundary.
    fn padded(&mut self) -> &[u8] {
        let end = self.begin + self.filled.next_multiple_of(ALIGNMENT);
        self.memory[self.begin + self.filled..end].fill(0);
        &self.memory[self.begin..end]
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::MetadataExt;

    use super::*;
    use crate::store::ImageId;
    use crate::store::format::codec::tests::noise;

    const NAME: PackName = PackName {
        image: ImageId::FIRST,
        number: 0,
    };

    fn append(pack: &PackWriter, staging: &mut Staging, bytes: &[u8]) {
        staging.restart(pack.len());
        assert_eq!(staging.take(bytes), [0; 0]);
        pack.grow(bytes.len());
        pack.write(staging).unwrap();
    }

    #[test]
    fn a_sealed_pack_has_its_length_and_no_space_taken_ahead() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("pack");
        let pack = PackWriter::create(NAME, path.clone()).unwrap();
        let bytes = noise(1, STAGING_BYTES);
        let mut staging = Staging::new();
        for _ in 0..3 {
            append(&pack, &mut staging, &bytes);
        }
        append(&pack, &mut staging, b"the end");
        assert_eq!(path.metadata().unwrap().len(), STEP_FROM_BYTES + STEP_BYTES);
        let sealed = pack.seal().unwrap();
        assert_eq!(sealed.len, 3 * STAGING_BYTES as u64 + 7);
        let found = path.metadata().unwrap();
        assert_eq!((found.len(), found.mode() & 0o777), (sealed.len, 0o600));
        assert!(found.blocks() * 512 < sealed.len + 65536, "{found:?}");
        assert!(fs::read(&path).unwrap() == [&bytes[..], &bytes, &bytes, b"the end"].concat());
    }

    #[test]
    fn a_file_system_that_refuses_direct_writes_gets_others() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("pack");
        let pack = PackWriter::create(NAME, path.clone()).unwrap();
        let mut staging = Staging::new();
        // File systems without `O_DIRECT` refuse all writes as this one is refused.
        staging.begin += 1;
        append(&pack, &mut staging, b"first");
        append(&pack, &mut staging, b"second");
        assert!(
            !pack.is_direct.load(Ordering::Relaxed),
            "no direct writes here, or none refused"
        );
        pack.seal().unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"firstsecond");
    }

    #[test]
    fn a_pack_is_never_overwritten() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("pack");
        PackWriter::create(NAME, path.clone()).unwrap();
        let error = PackWriter::create(NAME, path).unwrap_err();
        assert!(
            matches!(&error, WriteError::Pack { source, .. } if source.kind() == io::ErrorKind::AlreadyExists),
            "{error}"
        );
    }
}

//! A pack being written: its file, and the buffers on their way there.
//!
//! Buffers are written past the page cache (`O_DIRECT`), into space that was taken ahead:
//! the disk's speed for little processor time, and what the job has in the cache stays
//! there. Where a file system refuses that, the cache is used and the kernel told to let
//! go. Knows nothing of chunks, nor of who fills the buffers.

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

/// A pack is followed by another after this: small enough that removing an image gives
/// back most of its space, large enough that packs stay few.
/// Tests want several packs without a gibibyte each.
const PACK_BYTES_MAX: u64 = if cfg!(test) { 2 << 20 } else { 1 << 30 };

/// Size of a write: so large that the disk takes most of the time (`benches/results/disk.txt`).
pub(crate) const STAGING_BYTES: usize = if cfg!(test) { 512 << 10 } else { 4 << 20 };

/// Disk space is taken in steps of this, for which the writes wait: few of them. What is
/// not used is given back when the pack is sealed.
const STEP_BYTES: u64 = if cfg!(test) { 1 << 20 } else { 256 << 20 };
/// No space is taken ahead for less than this: most packs of small jobs.
const STEP_FROM_BYTES: u64 = if cfg!(test) { 1 << 20 } else { 8 << 20 };

/// Alignment that `O_DIRECT` requires of addresses, offsets and lengths: few disks have larger blocks, and those
/// refuse.
const ALIGNMENT: usize = 4096;

/// A pack that has a file.
#[derive(Debug)]
pub(crate) struct PackWriter {
    name: PackName,
    path: PathBuf,
    file: File,
    /// Bytes appended, written or not.
    len: AtomicU64,
    /// End of the allocated space.
    ahead: Mutex<u64>,
    is_direct: AtomicBool,
}

/// A buffer, and where in the pack it belongs.
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
        // Not when it is opened: a file system that refuses leaves the new file there.
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

    /// The next `bytes` are taken. One thread at a time.
    pub(crate) fn grow(&self, bytes: usize) {
        self.len.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    /// Writes a buffer. Only the last one of a pack may have room left.
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
            // Starts to write what is dirty there.
            self.let_go(offset, bytes.len() as u64);
        }
        written.map_err(|source| self.error(source))
    }

    /// Makes the pack durable; its name is, once the folder is synced.
    pub(crate) fn seal(self) -> Result<Pack, WriteError> {
        // Cuts off the padding and gives back what was taken ahead.
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

    /// A hint: without it files are in more pieces, and where space runs out the write
    /// itself says so.
    fn keep_ahead(&self, end: u64) {
        let mut ahead = locked(&self.ahead);
        while *ahead < end {
            let _ = ops::allocate(&self.file, signed(*ahead), signed(STEP_BYTES));
            *ahead += STEP_BYTES;
        }
    }

    /// Asks the kernel to drop cached pages, which is only a hint. Length 0 means up to the end of the file.
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

/// Returns true if a write failed because it went past the page cache. All writes that are on
/// their way may learn so.
fn is_refusal(error: &io::Error) -> bool {
    error.raw_os_error() == Some(Errno::EINVAL as i32)
}

/// A pack is about as long as `PACK_BYTES_MAX` at most, far from the sign.
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

    /// Empties the buffer, for the bytes of a pack from `offset` on.
    pub(crate) fn restart(&mut self, offset: u64) {
        self.filled = 0;
        self.offset = offset;
    }

    pub(crate) fn room(&self) -> usize {
        STAGING_BYTES - self.filled
    }

    /// Takes as many bytes as there is room for; returns the rest.
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
        // What is not aligned is refused as everything is elsewhere.
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

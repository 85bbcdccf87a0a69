//! Memory shared by two processes: one creates it, both map it. The processes must coordinate their accesses.
#![allow(
    unsafe_code,
    reason = "maps memory, and lends parts of it whose use two processes agree on"
)]

use std::fmt;
use std::io;
use std::num::NonZeroUsize;
use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};
use std::ptr::NonNull;
use std::slice;

use nix::fcntl::{FcntlArg, SealFlag, fcntl};
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::mman::{MapFlags, ProtFlags, mmap, munmap};

/// A mapping of shared memory, fully populated from the start. The memory exists as long as a mapping or a descriptor
/// does.
pub(crate) struct SharedMemory {
    start: NonNull<u8>,
    len: NonZeroUsize,
}

impl SharedMemory {
    /// Creates `len` zero bytes, and a descriptor by which another process maps them.
    pub(crate) fn create(len: NonZeroUsize) -> io::Result<(Self, OwnedFd)> {
        let flags = MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING;
        let descriptor = memfd_create(c"ckpt-run", flags)?;
        nix::unistd::ftruncate(
            &descriptor,
            i64::try_from(len.get()).map_err(io::Error::other)?,
        )?;
        fcntl(&descriptor, FcntlArg::F_ADD_SEALS(seals()))?;
        Ok((Self::map(&descriptor, len)?, descriptor))
    }

    /// Maps the memory of another process. Refuses memory that has not `len` bytes or can shrink, because access to
    /// removed memory would kill this process.
    pub(crate) fn open(descriptor: &OwnedFd, len: NonZeroUsize) -> io::Result<Self> {
        let wrong = |what| Err(io::Error::new(io::ErrorKind::InvalidData, what));
        let sealed = fcntl(descriptor, FcntlArg::F_GET_SEALS).unwrap_or(0);
        if !SealFlag::from_bits_truncate(sealed).contains(seals()) {
            return wrong("the descriptor does not refer to shared memory");
        }
        let found = nix::sys::stat::fstat(descriptor)?.st_size;
        if usize::try_from(found) != Ok(len.get()) {
            return wrong("the shared memory has a different length");
        }
        Self::map(descriptor, len)
    }

    fn map(descriptor: &OwnedFd, len: NonZeroUsize) -> io::Result<Self> {
        let both = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
        let flags = MapFlags::MAP_SHARED | MapFlags::MAP_POPULATE;
        // SAFETY: a new mapping at an address of the kernel's choice affects no existing memory; the file keeps its
        // length.
        let start = unsafe { mmap(None, len, both, flags, descriptor.as_fd(), 0) }?;
        let start = start.cast();
        Ok(Self { start, len })
    }

    /// Returns the length in bytes.
    pub(crate) fn len(&self) -> usize {
        self.len.get()
    }

    /// Returns the address of the first byte.
    pub(crate) fn start(&self) -> NonNull<u8> {
        self.start
    }

    /// Borrows a part of the memory.
    ///
    /// # Safety
    /// While the part is borrowed, no other process writes to it.
    pub(crate) unsafe fn part(&self, part: Range<usize>) -> &[u8] {
        let len = self.check(&part);
        // SAFETY: within the mapping, which lives as long as `self`; the caller guarantees that no process writes.
        unsafe { slice::from_raw_parts(self.start.as_ptr().add(part.start), len) }
    }

    /// Borrows a part of the memory for writing.
    ///
    /// # Safety
    /// While the part is borrowed, no other process uses it.
    pub(crate) unsafe fn part_mut(&mut self, part: Range<usize>) -> &mut [u8] {
        let len = self.check(&part);
        // SAFETY: as in `part`, and `&mut self` makes the access exclusive in this process.
        unsafe { slice::from_raw_parts_mut(self.start.as_ptr().add(part.start), len) }
    }

    fn check(&self, part: &Range<usize>) -> usize {
        assert!(part.start <= part.end && part.end <= self.len());
        part.len()
    }
}

/// Returns the seals: no process can shrink or grow the memory, nor remove the seals.
fn seals() -> SealFlag {
    SealFlag::F_SEAL_SHRINK | SealFlag::F_SEAL_GROW | SealFlag::F_SEAL_SEAL
}

// SAFETY: an address and a length; the memory belongs to no particular thread.
unsafe impl Send for SharedMemory {}
// SAFETY: `&SharedMemory` gives shared reads only.
unsafe impl Sync for SharedMemory {}

impl Drop for SharedMemory {
    fn drop(&mut self) {
        // SAFETY: this is the whole mapping, which `self` owns; every part that was lent borrowed `self`.
        let unmapped = unsafe { munmap(self.start.cast(), self.len()) };
        debug_assert!(unmapped.is_ok(), "the mapping is ours and whole");
    }
}

impl fmt::Debug for SharedMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SharedMemory")
            .field("len", &self.len)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LEN: NonZeroUsize = NonZeroUsize::new(8192).unwrap();

    #[test]
    fn both_mappings_share_their_content() {
        let (mut one, descriptor) = SharedMemory::create(LEN).unwrap();
        let other = SharedMemory::open(&descriptor, LEN).unwrap();
        // SAFETY: only this process has the memory, and it borrows one mapping after the other.
        unsafe { one.part_mut(4000..4003) }.copy_from_slice(b"abc");
        // SAFETY: as above.
        assert_eq!(unsafe { other.part(4000..4004) }, b"abc\0");
    }

    #[test]
    fn shrinkable_or_differently_sized_memory_is_not_mapped() {
        let (_memory, descriptor) = SharedMemory::create(LEN).unwrap();
        let longer = LEN.saturating_add(1);
        assert!(SharedMemory::open(&descriptor, longer).is_err());
        assert!(nix::unistd::ftruncate(&descriptor, 0).is_err());
        let file = tempfile::tempfile().unwrap();
        file.set_len(8192).unwrap();
        assert!(SharedMemory::open(&file.into(), LEN).is_err());
    }
}

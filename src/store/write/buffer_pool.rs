//! Chunk-sized stream buffers, cut from large mappings.
//!
//! A slab is mapped once, backed by huge pages if available, and divided into buffers that circulate between readers
//! and workers. It is populated before the job is frozen, because page faults take a third of the time of a copy. This
//! module is independent of streams.
#![allow(
    unsafe_code,
    reason = "anonymous mappings, and slices of them that have one owner each"
)]

use std::io;
use std::num::NonZeroUsize;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::sync::Arc;

use nix::libc::c_void;
use nix::sys::mman::{MapFlags, MmapAdvise, ProtFlags, madvise, mmap_anonymous, munmap};

use crate::store::format::chunk::CHUNK_BYTES;

/// Number of buffers in a full slab: 64 MiB are enough to keep mappings few (the kernel allows 65,530), and small
/// enough to be populated by several threads.
pub(crate) const SLAB_BUFFERS: usize = 256;

/// Alignment of slabs, so that they can consist of huge pages.
const HUGE_PAGE_BYTES: usize = 2 << 20;

/// Time of populating a slab's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Populate {
    /// Pages are populated at the first access.
    Later,
    /// Pages are populated at once. Kernels before 5.14 do not support this and populate them later.
    Now,
}

/// Exclusively owned memory for a chunk.
#[derive(Debug)]
pub(crate) struct Buffer {
    memory: Memory,
}

#[derive(Debug)]
enum Memory {
    Slab {
        start: NonNull<u8>,
        _slab: Arc<Slab>,
    },
    Heap(Box<[u8]>),
}

#[derive(Debug)]
struct Slab {
    start: NonNull<c_void>,
    bytes: usize,
}

impl Buffer {
    /// Creates a buffer that belongs to no slab.
    pub(crate) fn on_heap() -> Self {
        Self {
            memory: Memory::Heap(vec![0; CHUNK_BYTES].into_boxed_slice()),
        }
    }

    /// Returns true if the buffer belongs to a slab and should be reused.
    pub(crate) fn is_pooled(&self) -> bool {
        match self.memory {
            Memory::Slab { .. } => true,
            Memory::Heap(_) => false,
        }
    }
}

impl Deref for Buffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match &self.memory {
            Memory::Slab { start, .. } => {
                // SAFETY: `start` begins CHUNK_BYTES of a mapping that `_slab` keeps
                // alive; the kernel filled it with zeros; no other Buffer has this part
                // (see `map_slab`), and `&self` keeps writers of this one away.
                unsafe { std::slice::from_raw_parts(start.as_ptr(), CHUNK_BYTES) }
            }
            Memory::Heap(bytes) => bytes,
        }
    }
}

impl DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        match &mut self.memory {
            Memory::Slab { start, .. } => {
                // SAFETY: as in `deref`, and `&mut self` makes the access exclusive.
                unsafe { std::slice::from_raw_parts_mut(start.as_ptr(), CHUNK_BYTES) }
            }
            Memory::Heap(bytes) => bytes,
        }
    }
}

// SAFETY: a Buffer owns its part of the slab alone, and memory has no home thread.
unsafe impl Send for Buffer {}
// SAFETY: `&Buffer` gives shared reads only.
unsafe impl Sync for Buffer {}
// SAFETY: a Slab is an address and a length; only Drop uses them, once.
unsafe impl Send for Slab {}
// SAFETY: `&Slab` allows nothing.
unsafe impl Sync for Slab {}

impl Drop for Slab {
    fn drop(&mut self) {
        // SAFETY: `start` and `bytes` are those of the mapping, and every Buffer in it
        // held an Arc to this Slab, so none is left.
        let unmapped = unsafe { munmap(self.start, self.bytes) };
        debug_assert!(unmapped.is_ok(), "the mapping is ours and whole");
    }
}

/// Maps memory for `count` buffers (1 to [`SLAB_BUFFERS`]) and divides it.
pub(crate) fn map_slab(count: usize, populate: Populate) -> io::Result<Vec<Buffer>> {
    assert!((1..=SLAB_BUFFERS).contains(&count), "a slab of {count}");
    let used = count * CHUNK_BYTES;
    let bytes = used + HUGE_PAGE_BYTES;
    let length = NonZeroUsize::new(bytes).ok_or(io::ErrorKind::InvalidInput)?;
    // SAFETY: a new private mapping at an address of the kernel's choice touches
    // nothing that exists.
    let start = unsafe {
        mmap_anonymous(
            None,
            length,
            ProtFlags::PROT_READ | ProtFlags::PROT_WRITE,
            MapFlags::MAP_PRIVATE | MapFlags::MAP_NORESERVE,
        )
    }?;
    let slab = Arc::new(Slab { start, bytes });
    let first = start.cast::<u8>();
    let skipped = first.as_ptr().align_offset(HUGE_PAGE_BYTES);
    assert!(skipped <= HUGE_PAGE_BYTES, "bytes can be aligned");
    // SAFETY: `skipped + used` is at most `bytes`, the length of the mapping.
    let first = unsafe { first.add(skipped) };
    advise(first, used, populate);
    let buffers = (0..count).map(|index| Buffer {
        memory: Memory::Slab {
            // SAFETY: `index * CHUNK_BYTES` is less than `used`, inside the mapping.
            // Each index is used once: no two Buffers overlap.
            start: unsafe { first.add(index * CHUNK_BYTES) },
            _slab: Arc::clone(&slab),
        },
    });
    Ok(buffers.collect())
}

/// Advises the kernel about the memory. The advice affects the speed only.
fn advise(start: NonNull<u8>, bytes: usize, populate: Populate) {
    let mut wanted = vec![MmapAdvise::MADV_HUGEPAGE, MmapAdvise::MADV_DONTDUMP];
    if populate == Populate::Now {
        wanted.push(MmapAdvise::MADV_POPULATE_WRITE);
    }
    for advice in wanted {
        // SAFETY: the range lies in the new mapping, and none of these three changes
        // what it reads as.
        if let Err(errno) = unsafe { madvise(start.cast(), bytes, advice) } {
            tracing::debug!(%errno, ?advice, "the kernel does not take advice on a buffer");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_of_a_slab_are_zero_apart_and_outlive_each_other() {
        let mut buffers = map_slab(3, Populate::Now).unwrap();
        assert_eq!(buffers.len(), 3);
        for (value, buffer) in (1..).zip(&mut buffers) {
            assert_eq!(buffer.len(), CHUNK_BYTES);
            assert!(buffer.iter().all(|byte| *byte == 0));
            buffer.fill(value);
        }
        for (value, buffer) in (1..).zip(&buffers) {
            assert!(buffer.iter().all(|byte| *byte == value));
        }
        let last = buffers.pop().unwrap();
        drop(buffers);
        std::thread::spawn(move || assert!(last.iter().all(|byte| *byte == 3)))
            .join()
            .unwrap();
    }

    #[test]
    fn slabs_start_at_huge_pages() {
        let buffers = map_slab(1, Populate::Later).unwrap();
        assert_eq!(buffers[0].as_ptr().align_offset(HUGE_PAGE_BYTES), 0);
        assert!(buffers[0].is_pooled() && !Buffer::on_heap().is_pooled());
    }
}

#![allow(
    unsafe_code,
    reason = "mlock and madvise of a mapping, which no safe interface has"
)]
//! Memory for a key: a single copy, excluded from swap, core dumps and child processes, and wiped on drop.

use std::io;
use std::num::NonZeroUsize;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;

use nix::libc::c_void;
use nix::sys::mman::{MapFlags, MmapAdvise, ProtFlags, madvise, mlock, mmap_anonymous, munmap};
use nix::sys::prctl;
use zeroize::Zeroize;

/// Length of the mapping: one page, the smallest lockable unit.
const PAGE_BYTES: NonZeroUsize = NonZeroUsize::new(4096).unwrap();

/// Buffer of `N` secret bytes, at most a page.
pub(crate) struct Secret<const N: usize> {
    page: NonNull<c_void>,
}

// SAFETY: the mapping belongs to this value alone, and shared references only read it.
unsafe impl<const N: usize> Send for Secret<N> {}
// SAFETY: as above.
unsafe impl<const N: usize> Sync for Secret<N> {}

impl<const N: usize> Secret<N> {
    /// Creates a buffer of zeros, to be filled in place.
    ///
    /// # Panics
    /// No page can be mapped; a failed allocation panics, too.
    pub fn zeros() -> Self {
        const { assert!(N <= PAGE_BYTES.get()) };
        let access = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
        // SAFETY: a new mapping at an address that the kernel chooses.
        let page = unsafe { mmap_anonymous(None, PAGE_BYTES, access, MapFlags::MAP_PRIVATE) };
        let page = page.expect("a page of memory");
        // If the limit on locked memory is exhausted, the key may be swapped out.
        // SAFETY: the mapping is ours and has this length.
        let locked = unsafe { mlock(page, PAGE_BYTES.get()) };
        let advice = [MmapAdvise::MADV_DONTDUMP, MmapAdvise::MADV_WIPEONFORK];
        let advised = advice.map(|advice| {
            // SAFETY: as above; the advice changes dumps and children only.
            unsafe { madvise(page, PAGE_BYTES.get(), advice) }
        });
        for error in [locked].into_iter().chain(advised).filter_map(Result::err) {
            tracing::debug!(%error, "cannot protect the memory of a key completely");
        }
        Self { page }
    }

    /// Copies these bytes; the caller must wipe the original.
    pub fn copy_of(bytes: &[u8; N]) -> Self {
        let mut secret = Self::zeros();
        secret.copy_from_slice(bytes);
        secret
    }
}

impl<const N: usize> Deref for Secret<N> {
    type Target = [u8; N];

    fn deref(&self) -> &[u8; N] {
        // SAFETY: the page is mapped as long as this value, longer than N bytes, and all of its bytes are initialized.
        unsafe { self.page.cast::<[u8; N]>().as_ref() }
    }
}

impl<const N: usize> DerefMut for Secret<N> {
    fn deref_mut(&mut self) -> &mut [u8; N] {
        // SAFETY: as in `deref`, and the reference is the only one.
        unsafe { self.page.cast::<[u8; N]>().as_mut() }
    }
}

impl<const N: usize> Drop for Secret<N> {
    fn drop(&mut self) {
        self.zeroize();
        // SAFETY: the mapping is ours, and nothing refers to it any more.
        let _ = unsafe { munmap(self.page, PAGE_BYTES.get()) };
    }
}

/// Protects this process from other processes of the same user: no core dump, no `ptrace`, and its files in `/proc`
/// belong to root. Programs that it starts are not protected.
pub(crate) fn close_process() -> io::Result<()> {
    Ok(prctl::set_dumpable(false)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_secrets_page_is_locked_and_in_no_dump_and_no_child() {
        let secret = Secret::copy_of(&[7; 32]);
        assert_eq!(*secret, [7; 32]);
        let start = format!("{:x}-", secret.page.as_ptr().addr());
        let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let mapping = maps.split(start.as_str()).nth(1).expect("the mapping");
        let flags = mapping.lines().find(|line| line.starts_with("VmFlags:"));
        let flags: Vec<&str> = flags.expect("flags").split_whitespace().collect();
        for flag in ["lo", "dd", "wf"] {
            assert!(flags.contains(&flag), "{flag} in {flags:?}");
        }
    }

    #[test]
    fn secrets_are_apart_and_can_be_sent() {
        let mut one = Secret::<32>::zeros();
        let other = Secret::copy_of(&[1; 16]);
        one[0] = 9;
        let sum = std::thread::spawn(move || one[0] + other[15])
            .join()
            .unwrap();
        assert_eq!(sum, 10);
    }
}

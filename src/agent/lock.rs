//! Lock of the agent, for its state and its driver calls that change memory.
//!
//! ```text
//! free ── lock, try_lock ──▶ held ── a second thread ──▶ awaited
//! ```
//! Threads of the job wait for the lock. The agent's own thread only tries, because a stopped thread may hold it. The
//! agent's thread holds it while memory is released, so that allocating threads of the job wait here, without any lock
//! of the driver, until all memory is mapped again.

use core::cell::UnsafeCell;
use core::ops::{Deref, DerefMut};
use core::sync::atomic::{AtomicU32, Ordering};

use super::sys;

const FREE: u32 = 0;
const HELD: u32 = 1;
const AWAITED: u32 = 2;

/// Value that one thread may access at a time.
pub struct Lock<T> {
    word: AtomicU32,
    value: UnsafeCell<T>,
}

// SAFETY: the word gives access to one thread at a time.
unsafe impl<T: Send> Sync for Lock<T> {}

/// Exclusive access to the value, released on drop.
pub struct Guard<'a, T> {
    lock: &'a Lock<T>,
}

impl<T> Lock<T> {
    pub const fn new(value: T) -> Self {
        Self {
            word: AtomicU32::new(FREE),
            value: UnsafeCell::new(value),
        }
    }

    /// Waits for the lock without a limit.
    pub fn lock(&self) -> Guard<'_, T> {
        if let Some(guard) = self.try_lock() {
            return guard;
        }
        while self.word.swap(AWAITED, Ordering::Acquire) != FREE {
            sys::futex_wait(self.word.as_ptr(), AWAITED);
        }
        Guard { lock: self }
    }

    /// Returns `None` if the lock is held.
    pub fn try_lock(&self) -> Option<Guard<'_, T>> {
        self.word
            .compare_exchange(FREE, HELD, Ordering::Acquire, Ordering::Relaxed)
            .ok()
            .map(|_| Guard { lock: self })
    }

    /// Takes the value in a process with a single thread, whatever thread held it before the fork.
    ///
    /// # Safety
    /// Called only in the child of a fork, before any other use of the lock there.
    pub unsafe fn seize(&self) -> Guard<'_, T> {
        self.word.store(HELD, Ordering::Relaxed);
        Guard { lock: self }
    }
}

impl<T> Deref for Guard<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        // SAFETY: the guard has exclusive access.
        unsafe { &*self.lock.value.get() }
    }
}

impl<T> DerefMut for Guard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: the guard has exclusive access.
        unsafe { &mut *self.lock.value.get() }
    }
}

impl<T> Drop for Guard<'_, T> {
    fn drop(&mut self) {
        if self.lock.word.swap(FREE, Ordering::Release) == AWAITED {
            sys::futex_wake(self.lock.word.as_ptr());
        }
    }
}

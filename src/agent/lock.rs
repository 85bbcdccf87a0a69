//! The one lock of the agent: everything that it remembers, and all its calls of the driver that change memory.
//!
//! ```text
//! free ── lock, try_lock ──▶ held ── a second thread ──▶ awaited
//! ```
//! Threads of the job wait for it. The agent's own thread only tries: a thread that was stopped may hold it. While
//! memory is released the agent's thread keeps it, so that threads of the job that want memory wait where nothing of
//! the driver is held, until all is mapped again.

use core::cell::UnsafeCell;
use core::ops::{Deref, DerefMut};
use core::sync::atomic::{AtomicU32, Ordering};

use super::sys;

const FREE: u32 = 0;
const HELD: u32 = 1;
const AWAITED: u32 = 2;

/// A value that one thread has at a time.
pub struct Lock<T> {
    word: AtomicU32,
    value: UnsafeCell<T>,
}

// SAFETY: the word lets one thread at a time to the value.
unsafe impl<T: Send> Sync for Lock<T> {}

/// The right to the value; given back when dropped.
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

    /// Waits as long as it takes.
    pub fn lock(&self) -> Guard<'_, T> {
        if let Some(guard) = self.try_lock() {
            return guard;
        }
        while self.word.swap(AWAITED, Ordering::Acquire) != FREE {
            sys::futex_wait(self.word.as_ptr(), AWAITED);
        }
        Guard { lock: self }
    }

    /// `None` when somebody has it.
    pub fn try_lock(&self) -> Option<Guard<'_, T>> {
        self.word
            .compare_exchange(FREE, HELD, Ordering::Acquire, Ordering::Relaxed)
            .ok()
            .map(|_| Guard { lock: self })
    }

    /// The value in a process that has this thread alone, whoever had it before the fork.
    ///
    /// # Safety
    /// To be called in the child of a fork only, before anything else there asks for the lock.
    pub unsafe fn seize(&self) -> Guard<'_, T> {
        self.word.store(HELD, Ordering::Relaxed);
        Guard { lock: self }
    }
}

impl<T> Deref for Guard<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        // SAFETY: the guard is the one way to the value.
        unsafe { &*self.lock.value.get() }
    }
}

impl<T> DerefMut for Guard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: the guard is the one way to the value.
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

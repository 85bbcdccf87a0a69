//! Locks that ignore poisoning. Every lock of this crate guards data that is valid between any two statements, and the
//! failure of a panicked thread is reported by other means.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

pub(crate) fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

pub(crate) fn wait<'a, T>(condition: &Condvar, guard: MutexGuard<'a, T>) -> MutexGuard<'a, T> {
    condition
        .wait(guard)
        .unwrap_or_else(PoisonError::into_inner)
}

/// Waits like [`wait`], for at most `limit`; the flag is true if the limit expired.
pub(crate) fn wait_for<'a, T>(
    condition: &Condvar,
    guard: MutexGuard<'a, T>,
    limit: Duration,
) -> (MutexGuard<'a, T>, bool) {
    let waited = condition.wait_timeout(guard, limit);
    let (guard, waited) = waited.unwrap_or_else(PoisonError::into_inner);
    (guard, waited.timed_out())
}

//! Locks that ignore poisoning, and work on several threads. Every lock of this crate guards data that is valid between
//! any two statements, and the failure of a panicked thread is reported by other means.

use std::io;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, Builder};
use std::time::Duration;

/// Smallest part of a list for a thread: for a few system calls each, longer than the start of the thread.
const PART_MIN: usize = 256;
/// Limit on the threads for a list. The job is frozen meanwhile, and CRIU works for it on other cores.
const PARTS_MAX: usize = 4;
/// Threads and processes that a snapshot or restore of a small job has at a time, on top of ckpt-run's own.
const THREADS: usize = 24;

/// The kernel does not start as many threads as are needed.
#[derive(Debug, thiserror::Error)]
#[error(
    "cannot start enough threads and processes (up to {THREADS} at a time): the user (ulimit -u) or the cgroup (pids.max) has as \
     many as its limit allows; raise the limit"
)]
pub struct ThreadsError(#[from] io::Error);

/// Starts as many threads as a snapshot or restore needs, and ends them, before anything depends on that.
pub(crate) fn try_threads() -> Result<(), ThreadsError> {
    let end = Mutex::new(());
    thread::scope(|scope| {
        let _not_yet = locked(&end);
        for _ in 0..THREADS {
            Builder::new().spawn_scoped(scope, || drop(locked(&end)))?;
        }
        Ok(())
    })
}

pub(crate) fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

pub(crate) fn wait<'a, T>(condition: &Condvar, guard: MutexGuard<'a, T>) -> MutexGuard<'a, T> {
    condition
        .wait(guard)
        .unwrap_or_else(PoisonError::into_inner)
}

/// Applies `act` to consecutive parts of a list, on several threads if the list is long. Returns the results in order.
///
/// # Panics
/// If `act` panics.
pub(crate) fn in_parts<T: Sync, R: Send>(items: &[T], act: impl Fn(&[T]) -> R + Sync) -> Vec<R> {
    in_parts_from(PART_MIN, items, act)
}

/// Same as [`in_parts`], with parts of at least `least`, which is not 0.
///
/// # Panics
/// If `act` panics.
pub(crate) fn in_parts_from<T: Sync, R: Send>(
    least: usize,
    items: &[T],
    act: impl Fn(&[T]) -> R + Sync,
) -> Vec<R> {
    let cores = thread::available_parallelism().map_or(1, usize::from);
    let part = items.len().div_ceil(cores.min(PARTS_MAX)).max(least);
    in_parts_of(part, items, act)
}

/// Applies `act` to consecutive parts of this length, each on a thread. Returns the results in order.
///
/// # Panics
/// If `act` panics, or the length is 0.
pub(crate) fn in_parts_of<T: Sync, R: Send>(
    len: usize,
    items: &[T],
    act: impl Fn(&[T]) -> R + Sync,
) -> Vec<R> {
    let act = &act;
    let mut parts = items.chunks(len);
    let first = parts.next().unwrap_or_default();
    thread::scope(|scope| {
        let started: Vec<_> = parts
            .map(|part| (part, Builder::new().spawn_scoped(scope, move || act(part))))
            .collect();
        let mut results = vec![act(first)];
        results.extend(started.into_iter().map(|(part, thread)| {
            match thread {
                Ok(thread) => thread
                    .join()
                    .unwrap_or_else(|panic| std::panic::resume_unwind(panic)),
                // There are too many threads.
                Err(_) => act(part),
            }
        }));
        results
    })
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

/// Guard that acts if a panic drops it.
pub(crate) struct OnPanic<F: Fn()>(pub(crate) F);

impl<F: Fn()> Drop for OnPanic<F> {
    fn drop(&mut self) {
        if thread::panicking() {
            (self.0)();
        }
    }
}

/// Waits until `is_done`, for at most `limit`.
pub(crate) fn wait_until<'a, T>(
    condition: &Condvar,
    guard: MutexGuard<'a, T>,
    limit: Duration,
    is_done: impl Fn(&T) -> bool,
) -> MutexGuard<'a, T> {
    let waited = condition.wait_timeout_while(guard, limit, |value| !is_done(value));
    waited.unwrap_or_else(PoisonError::into_inner).0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_consecutive_and_in_order() {
        for len in [0, 1, PART_MIN, PART_MIN + 1, 10 * PART_MIN] {
            let items: Vec<usize> = (0..len).collect();
            let parts = in_parts(&items, <[usize]>::to_vec);
            assert!((1..=PARTS_MAX).contains(&parts.len()), "{len}");
            assert_eq!(parts.concat(), items);
        }
    }
}

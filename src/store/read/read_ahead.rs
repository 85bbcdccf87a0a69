//! Parallel preparation of a sequence's items: threads prepare them, and one consumer receives them in order.
//!
//! The window limits the number of items that are ready or in preparation. The consumer's thread prepares the next item
//! itself if no thread has begun it.

use std::sync::{Condvar, Mutex};
use std::thread::Builder;

use crate::sync::{locked, wait};

/// Extent of the parallel work.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Extent {
    /// Number of threads, including the consumer's.
    pub(crate) workers: usize,
    /// Maximum distance between the fastest worker and the consumer, at least one item.
    pub(crate) window: usize,
}

/// Runs `prepare` for the items 0 to `len` and `consume` in this thread, in order. `begin` creates the state of each
/// thread. Returns early if `consume` fails.
pub(crate) fn in_order<S: Send, T: Send, E>(
    len: usize,
    extent: Extent,
    begin: impl Fn() -> Result<S, E>,
    prepare: impl Fn(&mut S, usize) -> T + Sync,
    mut consume: impl FnMut(T) -> Result<(), E>,
) -> Result<(), E> {
    let window = Window::new(len, extent.window.max(1));
    let (window, prepare) = (&window, &prepare);
    let mut own = begin()?;
    std::thread::scope(|scope| {
        let _stop = Stop(window);
        for _ in 1..extent.workers.min(len).min(extent.window) {
            let mut state = begin()?;
            let work = move || {
                let stop = Stop(window);
                while let Some(item) = window.take() {
                    window.put(item, prepare(&mut state, item));
                }
                // The guard stops the other threads after a panic only.
                std::mem::forget(stop);
            };
            // A missing thread only reduces the speed.
            let _ = Builder::new().spawn_scoped(scope, work);
        }
        while let Some(step) = window.step() {
            let item = match step {
                Step::Ready(item) => item,
                Step::Prepare(item) => prepare(&mut own, item),
            };
            consume(item)?;
            window.consumed();
        }
        Ok(())
    })
}

/// Next step of the consumer.
enum Step<T> {
    Ready(T),
    Prepare(usize),
}

struct Window<T> {
    len: usize,
    size: usize,
    state: Mutex<State<T>>,
    /// Signals that a worker may take an item.
    room: Condvar,
    /// Signals that the consumer may proceed.
    ready: Condvar,
}

struct State<T> {
    /// First item that no thread has taken.
    next: usize,
    /// Item that the consumer needs next.
    needed: usize,
    /// Prepared items, each at its number modulo the size of the window.
    ready: Vec<Option<T>>,
    stopped: bool,
}

impl<T> Window<T> {
    fn new(len: usize, size: usize) -> Self {
        Self {
            len,
            size,
            state: Mutex::new(State {
                next: 0,
                needed: 0,
                ready: (0..size).map(|_| None).collect(),
                stopped: false,
            }),
            room: Condvar::new(),
            ready: Condvar::new(),
        }
    }

    /// Returns an item for a worker; `None` if the worker must exit.
    fn take(&self) -> Option<usize> {
        let mut state = locked(&self.state);
        while !state.stopped && state.next < self.len {
            if state.next < state.needed + self.size {
                state.next += 1;
                return Some(state.next - 1);
            }
            state = wait(&self.room, state);
        }
        None
    }

    fn put(&self, item: usize, prepared: T) {
        let mut state = locked(&self.state);
        state.ready[item % self.size] = Some(prepared);
        if item == state.needed {
            self.ready.notify_one();
        }
    }

    /// Waits for the item that the consumer needs; `None` after the last.
    fn step(&self) -> Option<Step<T>> {
        let mut state = locked(&self.state);
        loop {
            let needed = state.needed;
            if state.stopped || needed == self.len {
                return None;
            }
            if let Some(item) = state.ready[needed % self.size].take() {
                return Some(Step::Ready(item));
            }
            if state.next == needed {
                state.next += 1;
                return Some(Step::Prepare(needed));
            }
            state = wait(&self.ready, state);
        }
    }

    fn consumed(&self) {
        let mut state = locked(&self.state);
        state.needed += 1;
        self.room.notify_one();
    }

    fn stop(&self) {
        locked(&self.state).stopped = true;
        self.room.notify_all();
        self.ready.notify_all();
    }
}

/// Guard that stops all threads on drop.
struct Stop<'a, T>(&'a Window<T>);

impl<T> Drop for Stop<'_, T> {
    fn drop(&mut self) {
        self.0.stop();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    const TWO: Extent = Extent {
        workers: 2,
        window: 64,
    };

    fn numbers(len: usize, extent: Extent) -> Vec<usize> {
        let mut seen = Vec::new();
        let result: Result<(), ()> = in_order(
            len,
            extent,
            || Ok(()),
            |(), item| item,
            |item| {
                seen.push(item);
                Ok(())
            },
        );
        result.unwrap();
        seen
    }

    #[test]
    fn items_come_in_order_and_each_once() {
        for len in [0, 1, 2, 63, 64, 65, 1000] {
            for (workers, window) in [(0, 64), (1, 1), (2, 64), (7, 0), (7, 3)] {
                let extent = Extent { workers, window };
                assert_eq!(numbers(len, extent), (0..len).collect::<Vec<_>>());
            }
        }
    }

    #[test]
    fn preparation_stays_within_the_window_and_ends_early() {
        let prepared = AtomicUsize::new(0);
        let mut consumed = 0;
        let result = in_order(
            10_000,
            Extent { workers: 4, ..TWO },
            || Ok(()),
            |(), _| prepared.fetch_add(1, Ordering::SeqCst),
            |_| {
                consumed += 1;
                assert!(prepared.load(Ordering::SeqCst) <= consumed + TWO.window);
                if consumed == 100 {
                    Err("enough")
                } else {
                    Ok(())
                }
            },
        );
        assert_eq!(result, Err("enough"));
        assert!(prepared.load(Ordering::SeqCst) < 100 + TWO.window + 4);
    }

    #[test]
    #[should_panic(expected = "a scoped thread panicked")]
    fn a_panic_while_preparing_is_passed_on() {
        let other = std::sync::OnceLock::new();
        let here = std::thread::current().id();
        let result: Result<(), ()> = in_order(
            2,
            TWO,
            || Ok(()),
            |(), _| {
                if std::thread::current().id() == here {
                    return *other.wait();
                }
                other.get_or_init(|| ());
                panic!("the other thread");
            },
            |()| Ok(()),
        );
        result.unwrap();
    }
}

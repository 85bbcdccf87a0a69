//! Postponement: a lock by which the job delays snapshots (`ckpt_run.postpone()` in Python).
//!
//! The job holds a shared `flock` on the store's folder. A snapshot waits for its release, for a limited time, and
//! holds the lock alone until the job computes again. The kernel releases the lock of a process that exits.

use std::fs::File;
use std::path::Path;
use std::thread;
use std::time::Duration;

use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};

use super::take_snapshot::Afterwards;
use crate::clock;

/// Maximum time by which a job may postpone a snapshot.
const POSTPONED_MAX: Duration = Duration::from_secs(30);
/// Maximum time for a snapshot after which the run ends: a part of the grace time that schedulers grant.
const STOP_POSTPONED_MAX: Duration = Duration::from_secs(5);
/// Pause between two attempts at the lock.
const PAUSE: Duration = Duration::from_millis(10);

/// Returns the longest time by which the job may postpone a snapshot.
pub(super) fn limit(afterwards: Afterwards) -> Duration {
    match afterwards {
        Afterwards::Stop => STOP_POSTPONED_MAX,
        Afterwards::Continue | Afterwards::Pause => POSTPONED_MAX,
    }
}

/// Waits until the job does not postpone snapshots, for `limit` at most. The job cannot postpone a snapshot while the
/// returned lock is held. Returns `None` if the job still postpones snapshots, or the file system has no such locks.
pub(super) fn hold_off(store: &Path, limit: Duration) -> Option<Flock<File>> {
    let begun = clock::now();
    let mut folder = File::open(store).ok()?;
    loop {
        folder = match Flock::lock(folder, FlockArg::LockExclusiveNonblock) {
            Ok(lock) => return Some(lock),
            Err((folder, Errno::EWOULDBLOCK)) => folder,
            Err(_) => return None,
        };
        if clock::now() - begun >= limit {
            let limit = limit.as_secs();
            tracing::warn!("the job has postponed the snapshot for {limit} s; it is taken now");
            return None;
        }
        thread::sleep(PAUSE);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shared(store: &Path) -> Result<Flock<File>, (File, Errno)> {
        Flock::lock(File::open(store).unwrap(), FlockArg::LockSharedNonblock)
    }

    #[test]
    fn a_snapshot_waits_for_all_holders() {
        let store = tempfile::tempdir().unwrap();
        let store = store.path();
        let (one, other) = (shared(store).unwrap(), shared(store).unwrap());
        thread::scope(|scope| {
            let waiting = scope.spawn(|| hold_off(store, Duration::MAX));
            drop(one);
            assert!(!waiting.is_finished());
            drop(other);
            let held = waiting.join().unwrap().expect("nobody holds it");
            assert!(shared(store).is_err(), "the job waits for the snapshot");
            drop(held);
            assert!(shared(store).is_ok());
        });
    }

    #[test]
    fn the_wait_ends_after_its_limit() {
        let store = tempfile::tempdir().unwrap();
        let _held = shared(store.path()).unwrap();
        assert!(hold_off(store.path(), Duration::from_millis(1)).is_none());
    }
}

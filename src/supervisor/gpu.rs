//! The job's CUDA processes, for a snapshot and after a restore.

use std::time::Duration;

use super::image::Stopwatch;
use super::machine;
use super::snapshot_error::SnapshotError;
use super::workshop::Workshop;
use crate::cuda;
use crate::job::{self, Process};

/// Longest attempt to lock all CUDA processes at once; then all are let go and tried again.
const LOCK_ATTEMPT: Duration = Duration::from_millis(400);
/// Device files of the driver.
const DEVICES: &str = "/dev/nvidia";

/// The job's CUDA processes.
pub(super) struct Gpu<'a> {
    driver: &'a cuda::Driver,
    users: Vec<i32>,
    /// Device memory that moves into host memory.
    pub bytes: u64,
}

impl<'a> Gpu<'a> {
    /// Looks for CUDA processes; none on a machine without a driver. A driver that cannot suspend them matters
    /// only when there are some.
    pub fn of(shop: &'a Workshop, processes: &[Process]) -> Result<Option<Self>, SnapshotError> {
        if !cuda::available() {
            return Ok(None);
        }
        let pids: Vec<i32> = processes.iter().map(|process| process.host_pid).collect();
        let driver = match shop.driver() {
            Ok(driver) => driver,
            Err(error) if pids.iter().any(|pid| job::has_open(*pid, DEVICES)) => {
                return Err(error.into());
            }
            Err(error) => {
                tracing::debug!(%error, "no CUDA process can be suspended, and none is there");
                return Ok(None);
            }
        };
        let users = cuda::find(driver, &pids);
        if users.is_empty() {
            return Ok(None);
        }
        let bytes = machine::gpu_memory_of(&users);
        Ok(Some(Self {
            driver,
            users,
            bytes,
        }))
    }

    /// Moves the GPU state into host memory.
    pub fn suspend(
        self,
        shop: &Workshop,
        watch: &mut Stopwatch,
    ) -> Result<cuda::Suspended, SnapshotError> {
        let options = cuda::SuspendOptions {
            attempt: LOCK_ATTEMPT,
            total: shop.config.snapshot.lock_timeout,
        };
        let failed = |error| SnapshotError::Suspend(Box::new(error));
        let locked = cuda::lock_all(self.driver, &self.users, &options).map_err(failed)?;
        watch.lap("lock");
        let suspended = locked.suspend().map_err(failed)?;
        watch.lap("suspend");
        Ok(suspended)
    }
}

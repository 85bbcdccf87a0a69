//! Processes of the job that hold the GPU's device files and do not use CUDA: children that a CUDA process forked.
//!
//! CRIU cannot dump such files; our plugin leaves them out of the image. That is correct only for files that no process
//! uses, so three checks make sure of this:
//!
//! - Before the suspend: no program unknown to the driver has such files.
//! - Before the freeze, or after the suspend if there is one, which takes all device files from the processes that use
//!   CUDA or NVML (measured with driver 580.159.04): the driver knows none of the holders, and each of them was forked
//!   and has not executed a program since. A process that has executed one may be entering `cuInit`, and opens the
//!   files before the driver knows it. A suspended process that keeps some uses the GPU in another way as well.
//! - While the tasks are frozen: the holders and their numbers of files are unchanged.
//!
//! The driver answers a query about a stopped CUDA process only after that process continues (580.159.04), so it is
//! asked about none that is stopped.

use super::error::GpuError;
use crate::cuda;
use crate::job::{self, Descriptors, Holder, ProcessName};
use crate::run::run_context::RunContext;

/// Prefix of the driver's names in `/proc/devices` (470 to 580: nvidia, nvidia-frontend, nvidia-uvm, nvidia-modeset,
/// nvidia-caps, nvidiactl and others).
const DRIVER: &str = "nvidia";

/// Checks, before the first process is suspended, that no program unknown to the driver has opened the GPU; `users` are
/// the processes that the driver knows. Such a program may be about to use NCCL, and other processes of the job may
/// wait for it.
pub(crate) fn check_newcomers(open: &[Descriptors], users: &[i32]) -> Result<(), GpuError> {
    let holders = job::holders(open, &job::majors(DRIVER))?;
    let arrives = |holder: &&Holder| !holder.forked && !users.contains(&holder.host_pid);
    refuse(holders.iter().find(arrives))
}

/// Returns the devices that CRIU's plugin may leave out if no process is found to use them.
pub(crate) fn majors() -> Vec<u32> {
    job::majors(DRIVER)
}

/// Device files that CRIU may leave out of a snapshot.
#[derive(Debug, Default)]
pub(crate) struct InheritedDevices {
    majors: Vec<u32>,
    holders: Vec<Holder>,
}

impl InheritedDevices {
    /// Finds the files, after the suspend if there is one; `suspended` are the host pids of the stopped CUDA processes.
    pub fn of(context: &RunContext, root: i32, suspended: &[i32]) -> Result<Self, GpuError> {
        let majors = job::majors(DRIVER);
        if majors.is_empty() {
            return Ok(Self::default());
        }
        let open = Descriptors::of_present(&job::tree(root)?);
        let holders = job::holders(&open, &majors)?;
        if holders.is_empty() {
            return Ok(Self { majors, holders });
        }
        all_given_back(&holders, suspended)?;
        let stopped = |holder: &&Holder| job::is_stopped(holder.host_pid);
        if let Some(holder) = holders.iter().find(stopped) {
            return Err(GpuError::Stopped { pid: holder.pid });
        }
        // Only the driver knows which processes use CUDA.
        let driver = context.driver()?;
        let pids: Vec<i32> = holders.iter().map(|holder| holder.host_pid).collect();
        let users = cuda::find(driver, &pids);
        admit(&holders, &users)?;
        tracing::debug!(?holders, "unused device files are left out of the image");
        Ok(Self { majors, holders })
    }

    /// Checks that nothing has changed, after the tasks were frozen: `open` are all their descriptors.
    pub fn check(&self, open: &[Descriptors]) -> Result<(), GpuError> {
        let holders = job::holders(open, &self.majors)?;
        refuse(holders.iter().find(|one| !self.holders.contains(one)))
    }
}

/// Refuses suspended processes that still have device files.
fn all_given_back(holders: &[Holder], suspended: &[i32]) -> Result<(), GpuError> {
    let keeps = |holder: &&Holder| suspended.contains(&holder.host_pid);
    holders.iter().find(keeps).map_or(Ok(()), |one| {
        let process = ProcessName::of(one.host_pid, one.pid);
        Err(GpuError::Kept { process })
    })
}

/// Admits holders that do not use CUDA; `users` are the processes that the driver knows.
fn admit(holders: &[Holder], users: &[i32]) -> Result<(), GpuError> {
    let doubtful = |holder: &&Holder| !holder.forked || users.contains(&holder.host_pid);
    refuse(holders.iter().find(doubtful))
}

/// Returns the error for a holder, if there is one.
fn refuse(holder: Option<&Holder>) -> Result<(), GpuError> {
    holder.map_or(Ok(()), |one| {
        let process = ProcessName::of(one.host_pid, one.pid);
        Err(GpuError::Holder { process })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const WORKER: Holder = Holder {
        host_pid: 1310,
        pid: 310,
        forked: true,
        open: 20,
        mapped: 40,
    };

    #[test]
    fn suspended_processes_that_keep_device_files_are_named() {
        assert!(all_given_back(&[WORKER], &[1301]).is_ok());
        let error = all_given_back(&[WORKER], &[1301, 1310]).unwrap_err();
        assert!(
            matches!(&error, GpuError::Kept { process } if process.pid == 310),
            "{error}"
        );
    }

    #[test]
    fn only_forked_processes_without_cuda_are_bystanders() {
        let program = Holder {
            host_pid: 1311,
            pid: 311,
            forked: false,
            ..WORKER
        };
        assert!(admit(&[], &[1310]).is_ok());
        assert!(admit(&[WORKER], &[1301]).is_ok());
        for (holders, users, named) in [
            (&[WORKER, program][..], &[][..], 311),
            (&[WORKER], &[1310], 310),
        ] {
            let error = admit(holders, users).unwrap_err();
            assert!(
                matches!(&error, GpuError::Holder { process } if process.pid == named),
                "{error}"
            );
        }
    }

    #[test]
    fn new_device_holders_at_the_freeze_are_refused() {
        let pid = i32::try_from(std::process::id()).unwrap();
        let null = std::fs::File::open("/dev/null").unwrap();
        let open = [Descriptors::of(pid).unwrap()];
        let majors = job::majors("mem");
        let seen = InheritedDevices {
            holders: job::holders(&open, &majors).unwrap(),
            majors: majors.clone(),
        };
        assert_eq!(seen.holders[0].host_pid, pid);
        let unseen = InheritedDevices {
            majors,
            holders: Vec::new(),
        };
        let error = unseen.check(&open).unwrap_err();
        assert!(matches!(error, GpuError::Holder { .. }), "{error}");
        assert!(InheritedDevices::default().check(&open).is_ok());
        drop(null);
    }
}

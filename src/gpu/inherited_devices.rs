//! Processes of the job that hold the GPU's device files and do not use CUDA: children that a CUDA process forked.
//!
//! CRIU cannot dump such files; our plugin leaves them out of the image. That is right only for files that nobody
//! uses, so it is checked that no others are there:
//!
//! - Before anything is suspended: no program has such files that the driver does not know.
//! - After the suspend, which takes all device files from the processes that use CUDA or NVML (measured with driver
//!   580.159.04): the driver knows none of the holders, and each of them was forked and has executed no program
//!   since. One that did may be on its way into `cuInit`: then it has files before the driver knows it.
//! - While the tasks are frozen: the holders are the same, with as many files. The driver is not asked again: its
//!   answer about a stopped process that uses CUDA does not come before that goes on (580.159.04).

use super::error::GpuError;
use crate::cuda;
use crate::job::{self, Holder, Process, ProcessName};
use crate::run::run_context::RunContext;

/// Prefix of the driver's names in `/proc/devices` (470 to 580: nvidia, nvidia-frontend, nvidia-uvm, nvidia-modeset,
/// nvidia-caps, nvidiactl and others).
const DRIVER: &str = "nvidia";

/// Looks for programs that have come to the GPU and whom the driver does not know yet, before any other is suspended:
/// `users` are those that it knows. Others of the job may be about to meet them there (NCCL), and wait.
pub(crate) fn nobody_arrives(processes: &[Process], users: &[i32]) -> Result<(), GpuError> {
    let holders = job::holders(processes, &job::majors(DRIVER))?;
    let arrives = |holder: &&Holder| !holder.forked && !users.contains(&holder.host_pid);
    refuse(holders.iter().find(arrives))
}

/// Devices that CRIU's plugin may leave out, if nobody is found to use them.
pub(crate) fn majors() -> Vec<u32> {
    job::majors(DRIVER)
}

/// Device files that CRIU may leave out of this snapshot.
#[derive(Debug, Default)]
pub(crate) struct InheritedDevices {
    majors: Vec<u32>,
    holders: Vec<Holder>,
}

impl InheritedDevices {
    /// Looks for them, after the suspend.
    pub fn of(context: &RunContext, root: i32) -> Result<Self, GpuError> {
        let majors = job::majors(DRIVER);
        if majors.is_empty() {
            return Ok(Self::default());
        }
        let holders = job::holders(&job::tree(root)?, &majors)?;
        if holders.is_empty() {
            return Ok(Self { majors, holders });
        }
        // Nobody else can tell who uses CUDA.
        let driver = context.driver()?;
        let pids: Vec<i32> = holders.iter().map(|holder| holder.host_pid).collect();
        let users = cuda::find(driver, &pids);
        admit(&holders, &users)?;
        tracing::debug!(?holders, "device files that nobody uses are left out");
        Ok(Self { majors, holders })
    }

    /// Checks that nothing has changed, now that the tasks are frozen.
    pub fn check(&self, frozen: &[Process]) -> Result<(), GpuError> {
        let holders = job::holders(frozen, &self.majors)?;
        refuse(holders.iter().find(|one| !self.holders.contains(one)))
    }
}

/// `users` are those that the driver knows.
fn admit(holders: &[Holder], users: &[i32]) -> Result<(), GpuError> {
    let doubtful = |holder: &&Holder| !holder.forked || users.contains(&holder.host_pid);
    refuse(holders.iter().find(doubtful))
}

/// No snapshot because of this one, if there is one.
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
    fn whoever_holds_a_device_at_the_freeze_was_seen_before() {
        let pid = i32::try_from(std::process::id()).unwrap();
        let processes = job::tree(pid).unwrap();
        let majors = job::majors("mem");
        let null = std::fs::File::open("/dev/null").unwrap();
        let seen = InheritedDevices {
            holders: job::holders(&processes[..1], &majors).unwrap(),
            majors: majors.clone(),
        };
        assert_eq!(seen.holders[0].host_pid, pid);
        let unseen = InheritedDevices {
            majors,
            holders: Vec::new(),
        };
        let error = unseen.check(&processes[..1]).unwrap_err();
        assert!(matches!(error, GpuError::Holder { .. }), "{error}");
        assert!(InheritedDevices::default().check(&processes).is_ok());
        drop(null);
    }
}

//! The kinds of failed snapshots, for logs and counters.

use crate::cuda::{CallError, TreeError};
use crate::job;

/// `CUresult` codes that give the reason why a process could not be suspended.
const CUDA_ERROR_OUT_OF_MEMORY: i32 = 2;
const CUDA_ERROR_OPERATING_SYSTEM: i32 = 304;
const CUDA_ERROR_NOT_PERMITTED: i32 = 800;
const CUDA_ERROR_NOT_SUPPORTED: i32 = 801;

/// The reason for a failed snapshot, as one word for logs and counters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FailureKind {
    /// The GPU work did not stop in time.
    Busy,
    /// New processes kept starting to use the GPU.
    Changed,
    /// The job uses a feature that cannot be restored.
    Unsupported,
    /// Too little host memory.
    Memory,
    /// Too little disk space.
    Disk,
    /// ckpt-run may not control the job's processes.
    Privilege,
    /// The CUDA driver does not support the operation, or failed.
    Driver,
    /// CRIU does not support the operation, or failed.
    Criu,
    /// The store failed.
    Store,
    /// A hook cancelled the snapshot.
    Vetoed,
    /// The job exited.
    Ended,
    /// A failure of the operating system, or a bug in ckpt-run.
    System,
}

impl FailureKind {
    /// Returns the word.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Busy => "busy",
            Self::Changed => "changed",
            Self::Unsupported => "unsupported",
            Self::Memory => "memory",
            Self::Disk => "disk",
            Self::Privilege => "privilege",
            Self::Driver => "driver",
            Self::Criu => "criu",
            Self::Store => "store",
            Self::Vetoed => "vetoed",
            Self::Ended => "ended",
            Self::System => "system",
        }
    }
}

impl FailureKind {
    /// Returns the kind of a failed halt.
    pub(crate) fn of_halt(error: &job::HaltError) -> Self {
        match error {
            job::HaltError::Trace { .. } => Self::Privilege,
            job::HaltError::Slow { .. } | job::HaltError::Inside { .. } => Self::Busy,
            job::HaltError::Exited { .. }
            | job::HaltError::Lacks { .. }
            | job::HaltError::Threads { .. } => Self::Ended,
        }
    }

    /// Returns the kind of a failed suspend.
    pub(crate) fn of(error: &TreeError) -> Self {
        match error {
            TreeError::TimedOut { .. } => Self::Busy,
            TreeError::Lock { source, .. }
            | TreeError::Suspend { source, .. }
            | TreeError::Query(source) => kind_of(source),
            TreeError::Map(_)
            | TreeError::NotRunning { .. }
            | TreeError::Mixed { .. }
            | TreeError::TooMany { .. }
            | TreeError::Resume { .. } => Self::Driver,
        }
    }
}

/// Returns the kind of failure for a code of the driver, from a call that was to stop a process.
fn kind_of(error: &CallError) -> FailureKind {
    match error.code.number {
        CUDA_ERROR_NOT_SUPPORTED => FailureKind::Unsupported,
        CUDA_ERROR_NOT_PERMITTED | CUDA_ERROR_OPERATING_SYSTEM => FailureKind::Privilege,
        CUDA_ERROR_OUT_OF_MEMORY => FailureKind::Memory,
        _ => FailureKind::Driver,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::{Aftermath, Call, Code};

    #[test]
    fn failure_kind_follows_from_the_drivers_code() {
        let cases = [
            (CUDA_ERROR_NOT_SUPPORTED, FailureKind::Unsupported),
            (CUDA_ERROR_NOT_PERMITTED, FailureKind::Privilege),
            (CUDA_ERROR_OPERATING_SYSTEM, FailureKind::Privilege),
            (CUDA_ERROR_OUT_OF_MEMORY, FailureKind::Memory),
            (999, FailureKind::Driver),
        ];
        for (number, kind) in cases {
            let source = CallError {
                pid: 7,
                call: Call::Checkpoint,
                code: Code {
                    number,
                    name: String::new(),
                    meaning: String::new(),
                },
            };
            let aftermath = Aftermath::default();
            let error = TreeError::Suspend { source, aftermath };
            assert_eq!(FailureKind::of(&error), kind, "{number}");
        }
    }
}

//! The state of a process as the driver reports it.

use std::fmt;

/// The state of a process as the driver reports it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum State {
    /// The process computes.
    Running,
    /// The process's CUDA calls block; its submitted work is finished.
    Locked,
    /// The process's GPU memory is in host memory, and it holds no GPU.
    Checkpointed,
    /// The driver reports the process as failed, which is final.
    Failed,
    /// The GPU memory is being moved into the storage of another program, which must complete the operation (documented
    /// for CUDA 13.4; ckpt-run takes no step from here).
    Checkpointing,
    /// The GPU memory is being moved back from such storage.
    Restoring,
    /// A state newer than this program: the driver's number.
    Unknown(i32),
}

impl State {
    /// Converts a `CUprocessState`.
    pub(super) fn from_raw(raw: i32) -> Self {
        match raw {
            0 => Self::Running,
            1 => Self::Locked,
            2 => Self::Checkpointed,
            3 => Self::Failed,
            4 => Self::Checkpointing,
            5 => Self::Restoring,
            other => Self::Unknown(other),
        }
    }
}

impl fmt::Display for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Running => f.write_str("running"),
            Self::Locked => f.write_str("locked"),
            Self::Checkpointed => f.write_str("checkpointed"),
            Self::Failed => f.write_str("failed"),
            Self::Checkpointing => f.write_str("checkpointing"),
            Self::Restoring => f.write_str("restoring"),
            Self::Unknown(raw) => write!(f, "in CUDA state {raw}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn states_newer_than_this_program_are_kept() {
        let named = [
            "running",
            "locked",
            "checkpointed",
            "failed",
            "checkpointing",
            "restoring",
        ];
        for (raw, name) in (0..).zip(named) {
            assert_eq!(State::from_raw(raw).to_string(), name);
        }
        for raw in [6, -1, i32::MAX] {
            assert_eq!(State::from_raw(raw), State::Unknown(raw));
        }
        assert_eq!(State::Unknown(6).to_string(), "in CUDA state 6");
    }
}

//! Errors of requests to an agent. The pid in each error is in the process's own namespace.

use std::io;

/// `CUresult` returned after the driver has shut down in its process.
const CUDA_ERROR_DEINITIALIZED: i32 = 4;

/// Error of a request to an agent.
#[derive(Debug, thiserror::Error)]
pub enum AgentError {
    /// A stopped thread holds a lock that the agent needs; nothing was changed.
    #[error(
        "cannot {request} of process {pid}: a stopped thread is inside the agent; let it continue for a moment, then try \
         again"
    )]
    Busy {
        /// The request.
        request: &'static str,
        /// Pid of the process.
        pid: i32,
    },
    /// There is no reply yet: the request may still be carried out.
    #[error(
        "cannot {request} of process {pid}: no reply in time; repeat the request, because it may still be carried out"
    )]
    TimedOut {
        /// The request.
        request: &'static str,
        /// Pid of the process.
        pid: i32,
    },
    /// No process has the agent's name.
    #[error(
        "cannot {request} of process {pid}: it has no agent (any more); its memory is left to the driver"
    )]
    Gone {
        /// The request.
        request: &'static str,
        /// Pid of the process.
        pid: i32,
    },
    /// The request is not valid for the agent's state; nothing was changed.
    #[error("cannot {request} of process {pid}: refused by its agent; its memory is unchanged")]
    Refused {
        /// The request.
        request: &'static str,
        /// Pid of the process.
        pid: i32,
    },
    /// The driver failed; the changes were undone.
    #[error(
        "cannot {request} of process {pid}: the driver returned {code} to its agent; its memory is unchanged"
    )]
    Driver {
        /// The request.
        request: &'static str,
        /// Pid of the process.
        pid: i32,
        /// `CUresult`.
        code: i32,
    },
    /// The driver failed, and so did the undoing.
    #[error(
        "cannot {request} of process {pid}: the driver returned {code} to its agent, and device memory is missing; \
         restore the job"
    )]
    Lost {
        /// The request.
        request: &'static str,
        /// Pid of the process.
        pid: i32,
        /// `CUresult`.
        code: i32,
    },
    /// The memory was released earlier, and its descriptors were not kept.
    #[error(
        "cannot {request} of process {pid}: an earlier request has released its memory; restore the job"
    )]
    AlreadyReleased {
        /// The request.
        request: &'static str,
        /// Pid of the process.
        pid: i32,
    },
    /// The reply is not valid.
    #[error(
        "cannot {request} of process {pid}: its agent sent an invalid reply ({what}); restore the job"
    )]
    Malformed {
        /// The request.
        request: &'static str,
        /// Pid of the process.
        pid: i32,
        /// Defect of the reply.
        what: &'static str,
    },
    /// The socket failed.
    #[error("cannot {request} of process {pid}: communication with its agent failed")]
    Io {
        /// The request.
        request: &'static str,
        /// Pid of the process.
        pid: i32,
        /// The system's error.
        #[source]
        source: io::Error,
    },
}

impl AgentError {
    /// Returns true if the driver has shut down in the process, which is about to exit and needs its memory no more.
    #[must_use]
    pub fn has_shut_down(&self) -> bool {
        let (Self::Driver { code, .. } | Self::Lost { code, .. }) = self else {
            return false;
        };
        *code == CUDA_ERROR_DEINITIALIZED
    }
}

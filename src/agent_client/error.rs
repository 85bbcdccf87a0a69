//! Failures of requests to an agent. The pid in each error is the process's own view of it.

use std::io;

/// A request that an agent did not carry out.
#[derive(Debug, thiserror::Error)]
pub enum AgentError {
    /// A thread that was stopped holds what the agent needs; nothing was changed.
    #[error(
        "{request} of process {pid}: a stopped thread is inside the agent; let it go on for a moment, then try again"
    )]
    Busy {
        /// The request.
        request: &'static str,
        /// Whom.
        pid: i32,
    },
    /// No answer, yet: the request may still be carried out.
    #[error(
        "{request} of process {pid}: no answer in time; ask again, for it may still be carried out"
    )]
    TimedOut {
        /// The request.
        request: &'static str,
        /// Whom.
        pid: i32,
    },
    /// No process has the agent's name.
    #[error(
        "{request} of process {pid}: it has no agent (any more); treat its memory as the driver's own"
    )]
    Gone {
        /// The request.
        request: &'static str,
        /// Whom.
        pid: i32,
    },
    /// The request made no sense to the agent; nothing was changed.
    #[error("{request} of process {pid}: refused by its agent; its memory is as it was")]
    Refused {
        /// The request.
        request: &'static str,
        /// Whom.
        pid: i32,
    },
    /// The driver failed; what was begun was undone.
    #[error(
        "{request} of process {pid}: the driver answered {code} to its agent; its memory is as it was"
    )]
    Driver {
        /// The request.
        request: &'static str,
        /// Whom.
        pid: i32,
        /// `CUresult`.
        code: i32,
    },
    /// The driver failed and undoing failed as well.
    #[error(
        "{request} of process {pid}: the driver answered {code} to its agent, and device memory is missing; restore the job"
    )]
    Lost {
        /// The request.
        request: &'static str,
        /// Whom.
        pid: i32,
        /// `CUresult`.
        code: i32,
    },
    /// Its memory was released before, and the descriptors were not kept.
    #[error(
        "{request} of process {pid}: its memory was released before, to others; restore the job"
    )]
    AlreadyReleased {
        /// The request.
        request: &'static str,
        /// Whom.
        pid: i32,
    },
    /// An answer that makes no sense.
    #[error(
        "{request} of process {pid}: its agent answered what makes no sense ({what}); restore the job"
    )]
    Malformed {
        /// The request.
        request: &'static str,
        /// Whom.
        pid: i32,
        /// The defect of the answer.
        what: &'static str,
    },
    /// The socket failed.
    #[error("{request} of process {pid}: cannot talk to its agent")]
    Io {
        /// The request.
        request: &'static str,
        /// Whom.
        pid: i32,
        /// The system's error.
        #[source]
        source: io::Error,
    },
}

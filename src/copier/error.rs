//! Errors of the copier's client.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use thiserror::Error;

use super::wire::Refusal;

/// Error of a request to the copier. The job is never harmed: the copier works on its own memory, or on memory that the
/// job has released and others hold as well.
#[derive(Debug, Error)]
pub enum CopierError {
    /// The program could not be started.
    #[error("cannot start {} as the copier of GPU memory", program.display())]
    Start {
        /// The program.
        program: PathBuf,
        /// The system's error.
        #[source]
        source: io::Error,
    },
    /// The started program does not reply like a copier of this version.
    #[error(
        "cannot use {} as the copier of GPU memory: it does not reply like a copier of this version (a program that uses \
         the library has to call ckpt_run::helper_main first)",
        program.display()
    )]
    NotACopier {
        /// The program.
        program: PathBuf,
    },
    /// A connection broke, or an unexpected message arrived. The copier is ended.
    #[error("cannot {operation}: communication with the copier failed")]
    Talk {
        /// The operation.
        operation: &'static str,
        /// The system's error.
        #[source]
        source: io::Error,
    },
    /// The process has exited. Start another one.
    #[error("cannot {operation}: the copier has exited")]
    Gone {
        /// The operation.
        operation: &'static str,
    },
    /// No reply came in time. The copier is ended, because its further actions are unknown.
    #[error("cannot {operation} within {limit:?}: the copier does not reply")]
    Slow {
        /// The operation.
        operation: &'static str,
        /// Time limit.
        limit: Duration,
    },
    /// A GPU has too little free memory. Nothing was allocated.
    #[error("cannot {operation}: {reason}")]
    OutOfMemory {
        /// The operation.
        operation: &'static str,
        /// Reason given by the copier.
        reason: String,
    },
    /// The CUDA driver refused the request, or does not work.
    #[error("cannot {operation}: {reason}")]
    Device {
        /// The operation.
        operation: &'static str,
        /// Reason given by the copier.
        reason: String,
    },
    /// The request is invalid, or not possible at present. Nothing was done.
    #[error("cannot {operation}: {reason}")]
    Refused {
        /// The operation.
        operation: &'static str,
        /// Reason given by the copier.
        reason: String,
    },
}

impl CopierError {
    pub(super) fn refused(operation: &'static str, refusal: Refusal) -> Self {
        match refusal {
            Refusal::OutOfMemory(reason) => Self::OutOfMemory { operation, reason },
            Refusal::Device(reason) => Self::Device { operation, reason },
            Refusal::Request(reason) => Self::Refused { operation, reason },
        }
    }

    pub(super) fn unexpected(operation: &'static str) -> Self {
        let source = io::Error::new(io::ErrorKind::InvalidData, "unexpected answer");
        Self::Talk { operation, source }
    }
}

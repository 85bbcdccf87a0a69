//! Failures between the supervisor and its copier.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use thiserror::Error;

use super::wire::Refusal;

/// Why the copier did not do what was asked. A job is never harmed by it: the copier works on memory of its own, or on
/// what the job has let go of and others hold as well.
#[derive(Debug, Error)]
pub enum CopierError {
    /// The program could not be started.
    #[error("start {} as the copier of GPU memory", program.display())]
    Start {
        /// The program.
        program: PathBuf,
        /// The system's error.
        #[source]
        source: io::Error,
    },
    /// The started program does not answer as a copier of this version does.
    #[error(
        "use {} as the copier of GPU memory: it does not answer as one of this version (a program that uses \
         the library has to call ckpt_run::helper_main first)",
        program.display()
    )]
    NotACopier {
        /// The program.
        program: PathBuf,
    },
    /// A connection broke, or something unexpected was said. The copier is ended.
    #[error("{operation}: talk to the copier")]
    Talk {
        /// The operation.
        operation: &'static str,
        /// The system's error.
        #[source]
        source: io::Error,
    },
    /// The process has ended. Start another one.
    #[error("{operation}: the copier has ended")]
    Gone {
        /// The operation.
        operation: &'static str,
    },
    /// No answer came in time. The copier is ended, because nobody knows what it will still do.
    #[error("{operation} within {limit:?}: the copier does not answer")]
    Slow {
        /// The operation.
        operation: &'static str,
        /// The time that was waited.
        limit: Duration,
    },
    /// A GPU has too little free memory. Nothing was taken.
    #[error("{operation}: {reason}")]
    OutOfMemory {
        /// The operation.
        operation: &'static str,
        /// The copier's words.
        reason: String,
    },
    /// The CUDA driver refused, or does not work.
    #[error("{operation}: {reason}")]
    Device {
        /// The operation.
        operation: &'static str,
        /// The copier's words.
        reason: String,
    },
    /// The request makes no sense, or not now. Nothing was done.
    #[error("{operation}: {reason}")]
    Refused {
        /// The operation.
        operation: &'static str,
        /// The copier's words.
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

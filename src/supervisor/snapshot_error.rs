//! Why there is no new image.

use std::io;
use std::time::Duration;

use super::describe::size;
use crate::cuda;
use crate::job;
use crate::sandbox::SandboxError;
use crate::store::WriteError;

/// Why there is no new image. The job computes, and older images are untouched, unless a variant says otherwise.
#[derive(Debug, thiserror::Error)]
pub enum SnapshotError {
    /// The process tree could not be read.
    #[error("cannot read the job's process tree")]
    Tree(#[from] job::TreeError),
    /// The open files could not be listed.
    #[error("cannot list the job's open files")]
    Files(#[from] job::FilesError),
    /// The TCP sockets could not be listed.
    #[error("cannot list the job's sockets")]
    Sockets(#[from] job::SocketsError),
    /// The timers could not be listed.
    #[error("cannot list the job's timers")]
    Timers(#[from] job::TimersError),
    /// A file's content could not be kept.
    #[error("cannot keep the content of {path}")]
    Content {
        /// The job's file.
        path: String,
        /// The reason.
        #[source]
        source: io::Error,
    },
    /// The store failed.
    #[error("cannot write the image")]
    Store(#[source] Box<WriteError>),
    /// There is no room for the image.
    #[error(
        "cannot write the image, the disk is full: free space where the store is, keep fewer images (--keep-last), or choose another --store"
    )]
    DiskFull(#[source] Box<WriteError>),
    /// The image would leave too little of the disk free. Nothing was frozen or written.
    #[error(
        "cannot begin the image: it needs about {} and {} must stay free (snapshot.min_free), but {} are free where the \
         store is: free space there, keep fewer images (--keep-last, `ckpt-run forget`), or choose another --store",
        size(*image),
        size(*floor),
        size(*free)
    )]
    NoRoom {
        /// Bytes that the image is expected to have.
        image: u64,
        /// Bytes that must stay free.
        floor: u64,
        /// Bytes that are free.
        free: u64,
    },
    /// The GPU's content does not fit into host memory; the kernel would kill the job.
    #[error(
        "cannot suspend the GPU state: it needs {} of host memory and {} are available; free some",
        size(*needed),
        size(*available)
    )]
    NoMemory {
        /// Bytes of GPU memory.
        needed: u64,
        /// Bytes of host memory.
        available: u64,
    },
    /// The CUDA driver's library could not be used.
    #[error("cannot load the CUDA driver")]
    Driver(#[from] cuda::LoadError),
    /// The GPU state could not be suspended. The job computes, unless the cause says otherwise.
    #[error("cannot suspend the GPU state")]
    Suspend(#[source] Box<cuda::TreeError>),
    /// The GPU state did not come back: the job does not compute.
    #[error("cannot resume the GPU state; the job does not compute any more and will be restored")]
    Resume(#[source] Box<cuda::TreeError>),
    /// A process has the GPU's devices open, and whether it uses them is not to be known now.
    #[error(
        "cannot snapshot process {pid} of the job: it holds the GPU's device files as if it were about to use CUDA; the \
         next snapshot will know"
    )]
    Device {
        /// Pid as the job sees it.
        pid: i32,
    },
    /// A socket or a stream of our own failed.
    #[error("cannot prepare the dump")]
    Prepare(#[source] io::Error),
    /// The sandbox failed.
    #[error("cannot run CRIU in the sandbox")]
    Sandbox(#[from] SandboxError),
    /// CRIU failed.
    #[error("cannot dump the processes: {reason} (log: {log})")]
    Criu {
        /// Its reason.
        reason: String,
        /// Its log file.
        log: String,
    },
    /// A thread of ours panicked, which is a mistake in this program.
    #[error("cannot take the snapshot: a mistake in ckpt-run, please report it")]
    Panicked,
    /// The image stream broke.
    #[error("cannot receive the image from CRIU")]
    Stream(#[source] io::Error),
    /// CRIU did not finish in time.
    #[error("cannot dump the processes within {0:?} (snapshot.timeout)")]
    Slow(Duration),
    /// The job died while it was dumped.
    #[error("cannot take a snapshot of a job that has ended")]
    Ended,
    /// CRIU was killed at work in the job: that computes, but nobody knows whether as before.
    #[error("cannot trust process {pid} of the job any more: CRIU was killed at work in it")]
    Doubtful {
        /// Pid as the job sees it.
        pid: i32,
        /// What CRIU's end meant for the snapshot.
        #[source]
        source: Box<SnapshotError>,
    },
}

impl SnapshotError {
    /// Whether the job may be left in a state in which it cannot compute.
    #[must_use]
    pub fn job_is_lost(&self) -> bool {
        match self {
            Self::Resume(_) => true,
            Self::Suspend(error) => !error.is_computing(),
            _ => false,
        }
    }

    /// Whether the job computes, but is better restored.
    #[must_use]
    pub fn job_is_doubtful(&self) -> bool {
        matches!(self, Self::Doubtful { .. })
    }
}

impl From<WriteError> for SnapshotError {
    fn from(error: WriteError) -> Self {
        if error.is_disk_full() {
            Self::DiskFull(Box::new(error))
        } else {
            Self::Store(Box::new(error))
        }
    }
}

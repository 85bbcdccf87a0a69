//! The reasons why a snapshot produced no new image.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use procfs::ProcError;

use crate::gpu::error::GpuError;
use crate::job::{self, Finding, Obstacle, ProcessName};
use crate::run::failure_kind::FailureKind;
use crate::run::format::size;
use crate::sandbox::SandboxError;
use crate::store::WriteError;
use crate::sync::ThreadsError;

/// The reason why there is no new image. The job computes and older images are unchanged, unless a variant states
/// otherwise.
#[derive(Debug, thiserror::Error)]
pub enum SnapshotError {
    /// The process tree could not be read.
    #[error("cannot read the job's process tree")]
    Tree(#[source] job::TreeError),
    /// The open files could not be listed.
    #[error("cannot list the job's open files")]
    Files(#[from] job::FilesError),
    /// The job has mounted a file system itself.
    #[error(
        "the job has mounted or remounted a file system at {}, and a restore would begin without that; mount it before \
         ckpt-run starts, or undo the mount",
        .0.display()
    )]
    Mount(PathBuf),
    /// The job has a POSIX message queue of this name.
    #[error(
        "the job has made the POSIX message queue /{} (mq_open), which CRIU cannot save; remove it (mq_unlink) before \
         snapshots, or use System V message queues (msgget)",
        .0.display()
    )]
    MessageQueue(PathBuf),
    /// The job's POSIX message queues cannot be listed.
    #[error("cannot look for POSIX message queues of the job")]
    MessageQueues(#[source] io::Error),
    /// The job has state that cannot be restored, or that a snapshot would harm.
    #[error(transparent)]
    Obstacle(#[from] job::Obstacle),
    /// A thread has descriptors or a working folder of its own.
    #[error(
        "a thread of process {0} has its own file descriptors or working folder (unshare with CLONE_FILES or CLONE_FS), which \
         CRIU does not restore; let a process of its own do that work"
    )]
    Unshared(i32),
    /// A thread has the scheduling policy `SCHED_DEADLINE`.
    #[error(
        "a thread of process {0} has the scheduling policy SCHED_DEADLINE, which CRIU cannot restore; use SCHED_FIFO or \
         SCHED_RR (chrt)"
    )]
    Deadline(i32),
    /// A thread blocks the signal of a fault that it has sent itself.
    #[error(
        "a thread of process {0} has sent itself the signal of a fault, such as SIGSEGV, and blocks it, which CRIU's code would \
         take; let it receive the signal"
    )]
    Blocked(i32),
    /// The job has removed the name of an open file when the snapshot had begun, and another job has the lock of its folder.
    #[error(
        "the job has removed the name of an open file in {} when the snapshot had begun, and another job with files there is \
         being snapshotted or restored; the next attempt waits for it",
        .0.display()
    )]
    Renamed(PathBuf),
    /// The path of a file of the job is longer than the kernel accepts in one call, so that it could not be put back.
    #[error(
        "the path of the job's file {} has 4096 bytes or more, and could not be restored; use a shorter one, or name its \
         folder in files.exclude",
        .0.display()
    )]
    LongPath(PathBuf),
    /// A process has protection keys that could not be restored.
    #[error(
        "process {0} uses protection keys (pkey_alloc) in a way that cannot be restored: beside memory that it may execute \
         and not read (PROT_EXEC alone), or in memory whose key it has freed; let it map its code with PROT_READ too, and give \
         memory another key before it frees one"
    )]
    Keys(i32),
    /// The job's sockets could not be listed, or their packets not held back.
    #[error(transparent)]
    Sockets(job::SocketsError),
    /// The timers could not be listed.
    #[error("cannot list the job's timers")]
    Timers(#[from] job::TimersError),
    /// The store failed.
    #[error("cannot write the image")]
    Store(#[source] Box<WriteError>),
    /// The store's disk has no space for the image.
    #[error(
        "cannot write the image, the disk is full: free space on the store's disk, keep fewer images (--keep-last), \
         or choose another --store"
    )]
    DiskFull(#[source] Box<WriteError>),
    /// The image would leave too little free space on the disk. Nothing was frozen or written.
    #[error(
        "cannot begin the image: it needs about {} and {} must stay free (snapshot.min_free), but {} are free on the \
         store's disk: free space there, keep fewer images (--keep-last, `ckpt-run forget`), or choose another \
         --store",
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
        "cannot suspend the GPU state: it needs {} of host memory and a margin of {}, but {} are available; free \
         some, or          raise the memory limit of the container",
        size(*needed),
        size(*headroom),
        size(*available)
    )]
    NoMemory {
        /// Bytes of GPU memory.
        needed: u64,
        /// Bytes of host memory that must be free beyond it.
        headroom: u64,
        /// Bytes of available host memory.
        available: u64,
    },
    /// A step on the job's GPU state failed.
    #[error(transparent)]
    Gpu(GpuError),
    /// A socket or a stream of ckpt-run failed.
    #[error("cannot prepare the dump")]
    Prepare(#[source] io::Error),
    /// Threads could not be started.
    #[error(transparent)]
    Threads(#[from] ThreadsError),
    /// The sandbox failed.
    #[error("cannot run CRIU in the sandbox")]
    Sandbox(#[from] SandboxError),
    /// CRIU failed.
    #[error("cannot dump the processes: {reason}")]
    Criu {
        /// CRIU's reason, and the path of its log.
        reason: String,
        /// True if the job's state that CRIU cannot dump is likely to pass.
        passes: bool,
    },
    /// A thread of ckpt-run panicked, which is a bug in ckpt-run.
    #[error("cannot take the snapshot: this is a bug of ckpt-run, please report it")]
    Panicked,
    /// The image stream broke.
    #[error("cannot receive the image from CRIU")]
    Stream(#[source] io::Error),
    /// CRIU did not finish in time.
    #[error("cannot dump the processes within {0:?} (snapshot.timeout)")]
    Slow(Duration),
    /// A hook cancelled the snapshot. Nothing was frozen.
    #[error("the hook before_snapshot cancelled it (exit code 75)")]
    Vetoed,
    /// The job died while it was dumped.
    #[error("the job has exited")]
    Ended,
    /// CRIU was killed while it worked in the job: the job computes, but possibly not as before.
    #[error("process {pid} of the job may be damaged: CRIU was killed while working in it")]
    Doubtful {
        /// Pid as the job sees it.
        pid: i32,
        /// The error that CRIU's end caused in the snapshot.
        #[source]
        source: Box<SnapshotError>,
    },
}

impl SnapshotError {
    /// Returns the kind of failure.
    #[must_use]
    pub fn kind(&self) -> FailureKind {
        match self {
            Self::Store(_) => FailureKind::Store,
            Self::DiskFull(_) | Self::NoRoom { .. } => FailureKind::Disk,
            Self::NoMemory { .. } => FailureKind::Memory,
            Self::Gpu(error) => error.kind(),
            Self::Files(job::FilesError::Semaphore { .. } | job::FilesError::Elsewhere(_))
            | Self::Mount(_)
            | Self::MessageQueue(_)
            | Self::LongPath(_)
            | Self::Keys(_)
            | Self::Unshared(_)
            | Self::Deadline(_)
            | Self::Blocked(_)
            | Self::Renamed(_)
            | Self::Obstacle(_) => FailureKind::Unsupported,
            Self::Criu { .. } | Self::Slow(_) | Self::Stream(_) => FailureKind::Criu,
            Self::Vetoed => FailureKind::Vetoed,
            Self::Ended => FailureKind::Ended,
            Self::Doubtful { source, .. } => source.kind(),
            Self::Tree(_)
            | Self::Files(job::FilesError::Process { .. })
            | Self::Sockets(_)
            | Self::Timers(_)
            | Self::Prepare(_)
            | Self::Threads(_)
            | Self::Sandbox(_)
            | Self::MessageQueues(_)
            | Self::Panicked => FailureKind::System,
        }
    }

    /// Returns true if the job may be left in a state in which it cannot compute.
    #[must_use]
    pub fn job_is_lost(&self) -> bool {
        matches!(self, Self::Gpu(error) if error.job_is_lost())
    }

    /// Returns true if the cause is likely to disappear soon, so that another attempt at the snapshot is worthwhile.
    pub(crate) fn is_passing(&self) -> bool {
        match self {
            Self::Gpu(error) => error.is_passing(),
            Self::Obstacle(obstacle) => obstacle.is_passing(),
            Self::Sockets(job::SocketsError::Lock(_)) | Self::Renamed(_) => true,
            Self::Criu { passes, .. } => *passes,
            _ => false,
        }
    }

    /// Returns true if the job computes, but should be restored.
    #[must_use]
    pub fn job_is_doubtful(&self) -> bool {
        matches!(self, Self::Doubtful { .. })
    }
}

impl From<job::TreeError> for SnapshotError {
    fn from(error: job::TreeError) -> Self {
        match error {
            // The tree's root exits with the job.
            job::TreeError::NoRoot => Self::Ended,
            job::TreeError::Process {
                pid,
                source: ProcError::PermissionDenied(_),
            } => Obstacle {
                process: ProcessName::of(pid, pid),
                finding: Finding::Closed,
            }
            .into(),
            job::TreeError::Process { .. } | job::TreeError::TooMany => Self::Tree(error),
        }
    }
}

impl From<job::SocketsError> for SnapshotError {
    fn from(error: job::SocketsError) -> Self {
        match error {
            job::SocketsError::Obstacle(obstacle) => obstacle.into(),
            error => Self::Sockets(error),
        }
    }
}

impl From<GpuError> for SnapshotError {
    fn from(error: GpuError) -> Self {
        match error {
            GpuError::Tree(error) => error.into(),
            GpuError::Store(error) => (*error).into(),
            error => Self::Gpu(error),
        }
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

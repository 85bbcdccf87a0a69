//! The job's sandbox: PID, mount and IPC namespaces of its own, and the process
//! that is pid 1 in it. The IPC namespace begins with the job, so that an image contains it.
//!
//! ```text
//! supervisor (host namespaces)
//!   │  control socket: Request →  ← Event
//!   └─ pid 1 (`init`): single-threaded, spawns, reaps, runs tools, reports
//!        ├─ pid N (`root`): first process of the job's tree, adopts its orphans
//!        │    └─ pid N+1: the job
//!        └─ tools: CRIU
//! ```
//!
//! A snapshot contains `root` and everything below it, nothing above. The
//! sandbox does not know what a tool is or what it is for: the supervisor
//! hands it a command line. Killing pid 1 ends every process in the sandbox,
//! and pid 1 dies with the supervisor (`PDEATHSIG` and the control socket's end).
//!
//! Without the privilege for namespaces the same process runs as a plain child
//! ([`Isolation::None`]) and adopts orphans as a subreaper; when its control socket
//! ends it kills them all before it goes.

mod callers_signals;
mod descendants;
#[cfg(any(fuzzing, test))]
pub(crate) mod fuzz_sandbox;
mod host;
mod init;
mod io_uring;
mod job_user;
mod mounts;
mod protocol;
mod root;
mod spawn;

pub use callers_signals::await_children;
pub use host::{Sandbox, SandboxError, ToolRun};
pub use init::main as init_main;
pub use io_uring::IoUring;
pub use job_user::{JobUser, UserError};
pub use mounts::own_mount;
pub use protocol::{Credentials, Ended, Event, JobPids, ToolCommand};
pub use spawn::{SpawnError, privilege_missing, raise_descriptor_limit, with_job_descriptor_limit};

/// First argument by which the binary knows that it is to be a sandbox's pid 1.
pub const INIT_ARGUMENT: &str = "__sandbox";

/// Isolation of the job: with or without namespaces of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Isolation {
    /// Own PID, mount and IPC namespace.
    Namespaces,
    /// A plain child: restores only while its pids are free on the host.
    None,
}

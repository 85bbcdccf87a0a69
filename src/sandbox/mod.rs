//! The job's sandbox: private PID, mount and IPC namespaces, and the process that is pid 1 in them. The IPC namespace
//! is created by the job's first process, so that an image contains it.
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
//! A snapshot contains `root` and its descendants, but not pid 1 and the tools. The sandbox does not know the purpose
//! of tools: the supervisor passes command lines. A kill of pid 1 ends every process in the sandbox, and pid 1 exits
//! with the supervisor (`PDEATHSIG` and the end of the control socket).
//!
//! An ordinary user's sandbox also has a user namespace, in which CRIU has the capabilities that it needs
//! ([`Isolation::User`]). If the kernel refuses namespaces, pid 1 is a plain child ([`Isolation::None`]) and adopts orphans
//! as a subreaper. When its control socket is closed, it kills all descendants and exits.

mod callers_signals;
mod clocks;
mod descendants;
mod forbidden;
#[cfg(any(fuzzing, test))]
pub(crate) mod fuzz_sandbox;
mod host;
mod init;
mod job_user;
mod message_queues;
mod mounts;
mod network;
mod network_keeper;
mod own_network;
mod protocol;
mod root;
mod seccomp;
mod spawn;
mod tool_start;
mod user_namespace;

pub use callers_signals::{await_children, survive_file_limits};
pub use clocks::Clocks;
pub use forbidden::Forbidden;
pub use host::{Sandbox, SandboxError, ToolRun};
pub use init::main as init_main;
pub use job_user::{JobUser, UserError};
pub use mounts::MountChanges;
pub use network::{NetworkError, find_pasta};
pub use network_keeper::{KEEPER_ARGUMENT, main as network_keeper_main};
pub use protocol::{Credentials, Ended, Event, JobPids, ToolCommand};
pub use seccomp::{Hidden, Visibility};
pub use spawn::{
    FewDescriptors, Keyring, SpawnError, privilege_missing, raise_descriptor_limit,
    with_job_descriptor_limit,
};
pub use user_namespace::{enter_user_namespace, is_in_user_namespace};

/// First argument that makes the binary pid 1 of a sandbox.
pub const INIT_ARGUMENT: &str = "__sandbox";

/// Isolation of the job: with or without namespaces of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Isolation {
    /// Own PID, mount and IPC namespace.
    Namespaces,
    /// The same namespaces in a user namespace: needs no privilege.
    User(Network),
    /// A plain child: restores only while its pids are free on the host.
    None,
}

/// Network of a job in a user namespace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Network {
    /// The machine's.
    Host,
    /// A network namespace, which pasta connects to the machine's network.
    Own,
}

impl Isolation {
    /// Returns true if the job has namespaces of its own.
    #[must_use]
    pub fn has_namespaces(self) -> bool {
        match self {
            Self::Namespaces | Self::User(_) => true,
            Self::None => false,
        }
    }

    /// Returns true if the job has a user namespace.
    #[must_use]
    pub fn is_user(self) -> bool {
        matches!(self, Self::User(_))
    }

    /// Returns true if the job has a network namespace.
    #[must_use]
    pub fn has_network(self) -> bool {
        self == Self::User(Network::Own)
    }
}

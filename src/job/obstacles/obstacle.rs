//! An obstacle, which is a process, what it has and the remedy; and the search for all obstacles.

use std::fmt;
use std::fs;
use std::net::SocketAddr;
use std::path::PathBuf;

use crate::job::tree::Process;

/// The reason why a snapshot of the job would be worth nothing, or would harm it.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("process {process} {finding}")]
pub struct Obstacle {
    /// The process that has it.
    pub process: ProcessName,
    /// What it is.
    pub finding: Finding,
}

impl Obstacle {
    /// Names the process.
    #[must_use]
    pub fn of(process: &Process, finding: Finding) -> Self {
        Self {
            process: ProcessName::of(process.host_pid, process.pid),
            finding,
        }
    }

    /// Returns true if it is likely to disappear soon: connections are accepted, data is read.
    #[must_use]
    pub fn is_passing(&self) -> bool {
        match self.finding {
            Finding::NotAccepted { .. }
            | Finding::NotRead { .. }
            | Finding::Backlog(_)
            | Finding::Datagram
            | Finding::Events(_) => true,
            Finding::Stray
            | Finding::Session { .. }
            | Finding::Lease(_)
            | Finding::Namespace(_)
            | Finding::ProcFile { .. }
            | Finding::Covered(_)
            | Finding::HugePages { .. }
            | Finding::Socket { .. }
            | Finding::Tun(_)
            | Finding::WatchedLink(_) => false,
        }
    }
}

/// What a process has; each message continues "process PID (NAME)" and ends with the remedy.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum Finding {
    /// It is outside the tree that CRIU dumps.
    #[error(
        "is not below the job's first process, so that an image would not contain it; end it, or start the program that \
         it belongs to again"
    )]
    Stray,
    /// It is in the session of a process that is not its ancestor.
    #[error(
        "is in the session of process {leader}, which is not above it, because process {parent} adopted it as a \
         subreaper, and CRIU cannot restore such a session; start the program in the foreground, or with setsid, or \
         without the subreaper"
    )]
    Session {
        /// Pid of the session's leader, which may have exited.
        leader: i32,
        /// The parent.
        parent: ProcessName,
    },
    /// It has a lease that a snapshot would break.
    #[error(
        "has a write lease on {} (F_SETLEASE), which a snapshot would break; let it release the lease before snapshots, \
         or run it without leases (in Samba: kernel oplocks = no)", .0.display()
    )]
    Lease(PathBuf),
    /// It has a namespace, named with an article, that the job's first process does not have.
    #[error(
        "has {0}, which CRIU cannot restore inside of the job (unshare, bwrap, a container); start ckpt-run inside of it \
         (`unshare … ckpt-run …`), or that process without it"
    )]
    Namespace(&'static str),
    /// A file in `/proc` does not exist yet when a restore opens the job's files, or leads to something else then.
    #[error(
        "has {} open, which {reason}; let the job close it before snapshots, and open it again when it reads it",
        path.display()
    )]
    ProcFile {
        /// The file, as the job sees it.
        path: PathBuf,
        /// Continues "which".
        reason: &'static str,
    },
    /// A file system was mounted over an open file or folder, or over a folder above it.
    #[error(
        "has {} open, over which a file system was mounted since; unmount it, or let the process open the file again",
        .0.display()
    )]
    Covered(PathBuf),
    /// It shares private huge pages with others, and the kernel could not give each its own.
    #[error(
        "and others share huge pages of {kib} KiB (MAP_HUGETLB) since their fork; a restore gives each its own and needs \
         {needed}, and the machine has {pool}: raise vm.nr_hugepages, or use transparent huge pages \
         (glibc.malloc.hugetlb=1)"
    )]
    HugePages {
        /// Size of a page in KiB.
        kib: u64,
        /// Number of pages for all processes up to this one.
        needed: u64,
        /// Number of pages that the machine has or may make.
        pool: u64,
    },
    /// A connection within the job was not accepted. The process has connected.
    #[error(
        "has a connection that waits to be accepted ({local} to {remote}), and CRIU cannot save such a connection; let \
         the job accept its connections, or close them"
    )]
    NotAccepted {
        /// Its address.
        local: SocketAddr,
        /// The address that it connected to.
        remote: SocketAddr,
    },
    /// The other end of a connection was closed before all its data was received. The process has the open end.
    #[error(
        "has not read all data of a connection whose other end was closed ({local} to {remote}), and CRIU cannot save the \
         rest; let the job read it, or close the connection"
    )]
    NotRead {
        /// Its address.
        local: SocketAddr,
        /// The address of the closed end.
        remote: SocketAddr,
    },
    /// A connection from another program was not accepted at this address. The process listens.
    #[error(
        "has not accepted a connection to {0}, and CRIU cannot save such a connection; let the job accept it, or set \
         network.tcp = \"close\""
    )]
    Backlog(SocketAddr),
    /// A socket is of a kind that CRIU does not know.
    #[error(
        "has a socket of a kind that CRIU cannot restore ({kind}, descriptor {descriptor}); {remedy}"
    )]
    Socket {
        /// Number of the descriptor.
        descriptor: String,
        /// The kernel's name of the protocol.
        kind: String,
        /// The action for the user.
        remedy: &'static str,
    },
    /// A tun or tap device is open under this descriptor.
    #[error(
        "has a tun or tap device open (descriptor {0}), which CRIU cannot restore in the machine's network; close it \
         before snapshots, or leave it to a program outside of the job"
    )]
    Tun(String),
    /// A UDP socket has data that was not sent.
    #[error(
        "has begun a datagram (UDP_CORK, MSG_MORE), which CRIU cannot save; let it send the datagram"
    )]
    Datagram,
    /// Events of watched files wait to be read from this descriptor.
    #[error(
        "has not read all events of the files that it watches (inotify or fanotify, descriptor {0}), which CRIU does not \
         save; let it read them, or close the descriptor"
    )]
    Events(i32),
    /// A symbolic link is watched itself.
    #[error(
        "watches the link {} itself (inotify, IN_DONT_FOLLOW), which CRIU cannot restore; watch what it leads to, or the \
         folder that it is in", .0.display()
    )]
    WatchedLink(PathBuf),
}

/// A process as messages name it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProcessName {
    /// Pid as the job sees it.
    pub pid: i32,
    /// Name of its program, at most 15 bytes; empty if it cannot be read.
    pub name: String,
}

impl ProcessName {
    /// Names a process by both its pids.
    #[must_use]
    pub fn of(host_pid: i32, pid: i32) -> Self {
        let name = fs::read(format!("/proc/{host_pid}/comm")).unwrap_or_default();
        Self {
            pid,
            name: String::from_utf8_lossy(&name).trim_end().to_owned(),
        }
    }
}

impl fmt::Display for ProcessName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.pid)?;
        if self.name.is_empty() {
            return Ok(());
        }
        write!(f, " ({})", self.name.escape_debug())
    }
}

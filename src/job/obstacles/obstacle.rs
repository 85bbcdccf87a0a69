//! An obstacle to a snapshot (a process, the problem and the remedy) and the search for obstacles.

use std::fmt;
use std::fs;
use std::net::SocketAddr;
use std::path::PathBuf;

use crate::job::tree::Process;

/// The reason why a snapshot of the job would be useless or harmful.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("process {process} {finding}")]
pub struct Obstacle {
    /// The process with the problem.
    pub process: ProcessName,
    /// The problem.
    pub finding: Finding,
}

impl Obstacle {
    /// Describes a problem of a process.
    #[must_use]
    pub fn of(process: &Process, finding: Finding) -> Self {
        Self {
            process: ProcessName::of(process.host_pid, process.pid),
            finding,
        }
    }

    /// Returns true if the problem is likely to disappear soon: connections are accepted, data is read, a process exits, a
    /// file is closed (programs that watch themselves, as by psutil, have files of their threads open for moments).
    #[must_use]
    pub fn is_passing(&self) -> bool {
        match self.finding {
            Finding::FirstThread
            | Finding::NotAccepted { .. }
            | Finding::NotRead { .. }
            | Finding::Backlog(_)
            | Finding::Datagram
            | Finding::Events(_)
            | Finding::ProcFile { .. }
            | Finding::Terminal(_)
            | Finding::ExitCodes(_)
            | Finding::ExitSignal(_)
            | Finding::Removed { .. }
            | Finding::RemovedTogether { .. }
            | Finding::RemovedName(_)
            | Finding::RemovedOwner(_)
            | Finding::WatchedOnce(_)
            | Finding::HungUp(_)
            | Finding::Unmounted(_) => true,
            Finding::Stray
            | Finding::Session { .. }
            | Finding::Lease(_)
            | Finding::Namespace(_)
            | Finding::Covered(_)
            | Finding::HugePages { .. }
            | Finding::NoVdso
            | Finding::SealedMapping
            | Finding::LockedGuards
            | Finding::SplitSegment
            | Finding::SegmentPart
            | Finding::MemoryProgram
            | Finding::NameElsewhere(_)
            | Finding::SignalsThread(_)
            | Finding::MovedSocket(_)
            | Finding::LostSocket(_)
            | Finding::Doomed
            | Finding::PathOfProgram(_)
            | Finding::PressureTrigger(_)
            | Finding::Closed
            | Finding::AsksForFiles
            | Finding::DescriptorNumber { .. }
            | Finding::Socket { .. }
            | Finding::Tun(_)
            | Finding::WatchedLink(_) => false,
        }
    }
}

/// A problem of a process. Each message continues "process PID (NAME)" and ends with the remedy.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum Finding {
    /// The process is outside the tree that CRIU dumps.
    #[error(
        "is not a descendant of the job's first process, so an image would not contain it; end it, or restart the \
         program that it belongs to"
    )]
    Stray,
    /// The first thread of the process has ended, and others run.
    #[error(
        "runs without its first thread, and CRIU cannot save such a process; let the first thread wait for the others \
         (pthread_join) before it ends"
    )]
    FirstThread,
    /// The process is in the session of a process that is not its ancestor.
    #[error(
        "is in the session of process {leader}, which is not its ancestor, because process {parent} adopted it as a \
         subreaper, and CRIU cannot restore such a session; start the program in the foreground, or with setsid, or \
         without the subreaper"
    )]
    Session {
        /// Pid of the session's leader, which may have exited.
        leader: i32,
        /// The process's parent.
        parent: ProcessName,
    },
    /// The process has a lease that a snapshot would break.
    #[error(
        "has a write lease on {} (F_SETLEASE), which a snapshot would break; let it release the lease before snapshots, \
         or run it without leases (in Samba: kernel oplocks = no)", .0.display()
    )]
    Lease(PathBuf),
    /// The process has a namespace, named with an article, that the job's first process lacks.
    #[error(
        "has {0}, which CRIU cannot restore inside of the job (unshare, bwrap, a container); start ckpt-run inside of \
         the namespace (`unshare … ckpt-run …`), or start the process without it"
    )]
    Namespace(&'static str),
    /// An open file of `/proc` does not exist when a restore opens the job's files, or its path leads to another file
    /// then.
    #[error(
        "has {} open, which {reason}; let the job close it before snapshots, and open it again to read it",
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
    /// An open or mapped file or folder is on a file system that the machine has unmounted since the job began.
    #[error(
        "has {} open, on a file system that the machine has unmounted or remounted since the job began; mount it as it \
         was, or let the process close the file",
        .0.display()
    )]
    Unmounted(PathBuf),
    /// The process has unmapped the kernel's code for system calls.
    #[error(
        "has unmapped the kernel's vdso and kept its data, and CRIU cannot restore such a process; run the program without \
         Valgrind"
    )]
    NoVdso,
    /// Many processes have ended with exit codes of which CRIU restores seven bits.
    #[error(
        "has ended with an exit code of 128 or more, and its parent has not waited for it yet; no more than {0} such \
         processes can be restored; let the parent wait for them"
    )]
    ExitCodes(usize),
    /// The end of the process causes another signal than SIGCHLD.
    #[error(
        "tells its parent of its end by signal {0} instead of SIGCHLD (clone), which CRIU cannot restore; start it by \
         fork, or let it execute a program"
    )]
    ExitSignal(i32),
    /// A removed file or folder cannot be made again for a restore.
    #[error(
        "has the removed {} open, or is in it, and {} is in its place now, so that CRIU cannot restore it; let the process \
         close or leave it, or rename the other one",
        path.display(), other.display()
    )]
    Removed {
        /// Its former path.
        path: PathBuf,
        /// The path itself, or one of a folder above it.
        other: PathBuf,
    },
    /// CRIU would make a removed file or folder again within a removed folder, which could not be removed then.
    #[error(
        "has the removed {} open, or is in it, and it was in the removed folder {}, which the job has open as well, so that \
         CRIU cannot restore it; let the job close or leave one of them",
        path.display(), folder.display()
    )]
    RemovedTogether {
        /// Its former path.
        path: PathBuf,
        /// The former path of the folder, which may be the same.
        folder: PathBuf,
    },
    /// A removed file has a name that CRIU cannot extend.
    #[error(
        "has the removed file {} open, whose name is too long for CRIU to make it again; give it a shorter one (237 bytes)",
        .0.display()
    )]
    RemovedName(PathBuf),
    /// CRIU searches the folder of a removed name for another one of the file.
    #[error(
        "has the file {} open or mapped: this name was removed, and its other names are in other folders (as in a cache of \
         packages) or in a lower layer of an overlay, where CRIU does not find it; let the process close the file, or restart after \
         an update of its files",
        .0.display()
    )]
    NameElsewhere(PathBuf),
    /// A removed file belongs to another user or group, which an ordinary user cannot give it.
    #[error(
        "has the removed file {} open, which belongs to another user or group, so that it cannot be made again without root; \
         let the process close it (or restart after an update of its files), or run ckpt-run as root",
        .0.display()
    )]
    RemovedOwner(PathBuf),
    /// The file of a unix socket has names that a restored one could not get.
    #[error(
        "has a unix socket that was bound as {} and then renamed or linked in a way that cannot be restored (by a relative name, \
         with a link in another folder, with another file at its former name, or in a chroot); let the job bind it at its final path, or remove its other names",
        .0.display()
    )]
    MovedSocket(PathBuf),
    /// CRIU waits for ever when it restores a connection whose other end was closed, if the socket's file was removed.
    #[error(
        "has a connection to the unix socket {}, whose file was removed, and whose other end was closed, so that a restore would not \
         end; let the process close it",
        .0.display()
    )]
    HungUp(PathBuf),
    /// An ordinary user cannot determine whether the file of a unix socket was removed or renamed.
    #[error(
        "has a unix socket whose file {} was removed or renamed: which of them, an ordinary user cannot determine; let the job keep \
         the file, or close the socket; or run ckpt-run with a network of the job's own (pasta), or as root",
        .0.display()
    )]
    LostSocket(PathBuf),
    /// A descriptor signals a thread other than the first.
    #[error(
        "has descriptor {0} with signals to a thread other than its first (F_OWNER_TID), which CRIU cannot restore; let it signal \
         the process (F_OWNER_PID) or the first thread"
    )]
    SignalsThread(i32),
    /// The process is stopped, and a signal that ends it was sent to it.
    #[error(
        "is stopped, and was sent a signal that ends it when it continues, which CRIU would deliver at a restore; let it \
         continue (SIGCONT, `fg`)"
    )]
    Doomed,
    /// A descriptor holds the program of a process without access to its content.
    #[error(
        "has descriptor {0} on the program that a process of the job runs, opened with O_PATH, so that CRIU cannot restore that \
         process; let it close the descriptor, or open the file for reading"
    )]
    PathOfProgram(i32),
    /// A descriptor waits for pressure on the machine.
    #[error(
        "waits for pressure on processors, memory or disks (a trigger in /proc/pressure or a control group, descriptor {0}), which \
         CRIU does not restore; let it close the descriptor before snapshots"
    )]
    PressureTrigger(i32),
    /// The process lets no other program of its user look at it.
    #[error(
        "lets no other program of its user inspect it (PR_SET_DUMPABLE, as ssh-agent does, or a program that the user may \
         not read); start it outside of the job, or run ckpt-run as root"
    )]
    Closed,
    /// A program was executed from memory.
    #[error(
        "runs a program that was executed from memory (memfd_create, fexecve), which CRIU cannot restore; run it from a file"
    )]
    MemoryProgram,
    /// A part of a System V segment is not mapped.
    #[error(
        "has unmapped a part of a System V segment, which CRIU cannot restore; let it keep or detach all of it (shmdt)"
    )]
    SegmentPart,
    /// A process decides whether others may open files.
    #[error(
        "decides whether other programs may open files (fanotify permission events), which would hold up a snapshot for \
         ever; run it outside of the job"
    )]
    AsksForFiles,
    /// A sealed memfd is mapped for reading.
    #[error(
        "has mapped a sealed memfd (F_SEAL_WRITE), which CRIU cannot restore; let it map the memory privately, or by a \
         descriptor for reading only"
    )]
    SealedMapping,
    /// Memory is locked and has guard pages.
    #[error(
        "has locked memory with guard pages (mlockall, MADV_GUARD_INSTALL), which CRIU cannot restore; let it lock no \
         memory, or lock it before it starts threads (MCL_FUTURE)"
    )]
    LockedGuards,
    /// A System V segment has two mappings side by side.
    #[error(
        "has a System V segment in two mappings side by side (two shmat, or one and mprotect), which CRIU cannot save \
         without root; run ckpt-run as root"
    )]
    SplitSegment,
    /// A file is watched for one event only.
    #[error(
        "watches a file for a single event (inotify with IN_ONESHOT, descriptor {0}), which CRIU restores for all events; \
         let it watch without that flag, or close the descriptor"
    )]
    WatchedOnce(i32),
    /// The process has a descriptor whose number is close to CRIU's limit.
    #[error(
        "has a descriptor with the number {number}, and a restore needs descriptors above it, which the limit of {limit} \
         does not allow; raise the limit for ckpt-run by 256 or more (ulimit -Hn, LimitNOFILE=), or let the process use \
         lower numbers"
    )]
    DescriptorNumber {
        /// Its number.
        number: i32,
        /// The limit on descriptors.
        limit: u64,
    },
    /// The process shares private huge pages with others, and the kernel could not give each process separate pages.
    #[error(
        "and others share huge pages of {kib} KiB (MAP_HUGETLB) since their fork; a restore gives each process separate \
         pages and needs {needed}, but the machine has {pool}: raise vm.nr_hugepages, or use transparent huge pages \
         (glibc.malloc.hugetlb=1)"
    )]
    HugePages {
        /// Size of a page in KiB.
        kib: u64,
        /// Number of pages for all processes up to this one.
        needed: u64,
        /// Number of pages that the machine has or may create.
        pool: u64,
    },
    /// A connection within the job was not accepted. The process is the connecting side.
    #[error(
        "has a connection that waits to be accepted ({local} to {remote}), and CRIU cannot save such a connection; let \
         the job accept its connections, or close them"
    )]
    NotAccepted {
        /// Address of the process's end.
        local: SocketAddr,
        /// Address of the listener.
        remote: SocketAddr,
    },
    /// The other end of a connection was closed before all its data was received. The process has the open end.
    #[error(
        "has not read all data of a connection whose other end was closed ({local} to {remote}), and CRIU cannot save the \
         rest; let the job read it, or close the connection"
    )]
    NotRead {
        /// Address of the open end.
        local: SocketAddr,
        /// Address of the closed end.
        remote: SocketAddr,
    },
    /// A connection from another program to this address was not accepted. The process is the listener.
    #[error(
        "has not accepted a connection to {0}, and CRIU cannot save such a connection; let the job accept it, or set \
         network.tcp = \"close\""
    )]
    Backlog(SocketAddr),
    /// CRIU does not support this kind of socket.
    #[error(
        "has a socket of a kind that CRIU cannot restore ({kind}, descriptor {descriptor}); {remedy}"
    )]
    Socket {
        /// Number of the descriptor.
        descriptor: String,
        /// The kernel's name of the protocol.
        kind: String,
        /// Remedy for the user.
        remedy: &'static str,
    },
    /// A tun or tap device is open at this descriptor.
    #[error(
        "has a tun or tap device open (descriptor {0}), which CRIU cannot restore in the machine's network; close it \
         before snapshots, or leave it to a program outside of the job"
    )]
    Tun(String),
    /// A UDP socket has unsent data.
    #[error(
        "has an unfinished datagram (UDP_CORK, MSG_MORE), which CRIU cannot save; let it send the datagram"
    )]
    Datagram,
    /// Events of watched files were not read from this descriptor.
    #[error(
        "has not read all events of the files that it watches (inotify or fanotify, descriptor {0}), which CRIU does not \
         save; let it read them, or close the descriptor"
    )]
    Events(i32),
    /// A terminal that the job has created has unread data.
    #[error(
        "has a terminal with unread data (/dev/pts/{0}), which CRIU cannot save; let the program at its other end read \
         it, or run the program without a terminal"
    )]
    Terminal(u32),
    /// A symbolic link itself is watched.
    #[error(
        "watches the symbolic link {} itself (inotify, IN_DONT_FOLLOW), which CRIU cannot restore; watch its target, or the \
         folder that contains it", .0.display()
    )]
    WatchedLink(PathBuf),
}

/// Identification of a process in messages.
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

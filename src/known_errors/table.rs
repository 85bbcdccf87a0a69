//! The table: signs of known errors, their causes and remedies. A more specific line comes before a general one.

use super::{Cause, Sign};

const fn criu(texts: &'static [&'static str], cause: &'static str, remedy: &'static str) -> Cause {
    let sign = Sign::Criu(texts);
    Cause {
        sign,
        cause,
        remedy,
    }
}

const fn cuda(
    calls: &'static [&'static str],
    code: i32,
    cause: &'static str,
    remedy: &'static str,
) -> Cause {
    let sign = Sign::Cuda(calls, code);
    Cause {
        sign,
        cause,
        remedy,
    }
}

const IO_URING: &str = "the job uses io_uring, which CRIU cannot dump";
const HIDE_IO_URING: &str = "start it with sandbox.io_uring = \"hide\", the default";
const OTHER_SIZE: &str = "a file that the job has open changed its size";
const OTHER_TYPE: &str = "a file that the job has open changed its type";
const PUT_BACK: &str = "put the file back as it was at the snapshot, or restore an older image";
const PID_TAKEN: &str = "a process id of the job is in use";
const OWN_PIDS: &str = "run with isolation = \"namespaces\"";

/// The causes in order of precedence: more specific entries come first.
pub static CAUSES: &[Cause] = &[
    criu(
        &["Too many levels of symbolic links"],
        "the path of a file of the job contains a link, in a folder that another user can write to",
        "replace the link by the folder, or mount the folder there",
    ),
    criu(&["has bad size"], OTHER_SIZE, PUT_BACK),
    criu(&["has bad mode"], OTHER_TYPE, PUT_BACK),
    criu(
        &["has bad build-ID"],
        "a program or library of the job was replaced",
        "reinstall the version that the job was started with",
    ),
    criu(
        &["Can't open file"],
        "a file that the job has open is gone",
        PUT_BACK,
    ),
    criu(
        &["Can't open map_files"],
        "a process of the job has mapped a deleted or replaced file without having it open, or an object that is not a file",
        "do not overwrite files that a running job uses; end the processes that have it mapped, or run ckpt-run as root, which can save it",
    ),
    criu(&["anon_inode:[io_uring]"], IO_URING, HIDE_IO_URING),
    // Since Linux 6.7 such a descriptor cannot be sent through a socket (EINVAL); CRIU gets all descriptors that way.
    criu(&["send_fds failed (-22)"], IO_URING, HIDE_IO_URING),
    criu(
        &["anon_inode:[userfaultfd]"],
        "the job handles page faults with userfaultfd, which CRIU cannot dump",
        "disable it: in a JVM, garbage collectors that use it; in a VM, post-copy migration",
    ),
    criu(
        &["anon_inode:[perf_event]"],
        "a profiler inside the job counts events (perf_event), which CRIU cannot dump",
        "end the profiler before snapshots",
    ),
    criu(
        &["anon_inode:bpf"],
        "the job has eBPF programs or maps open, which CRIU cannot dump",
        "load them from outside the job",
    ),
    criu(
        &["Can't dump file", "chr 10:229"],
        "the job serves a FUSE file system",
        "mount it outside the job",
    ),
    criu(
        &["Can't handle non-regular mapping"],
        "the job maps a device, which CRIU cannot dump",
        "unmap it before snapshots; only NVIDIA GPU mappings of a process without CUDA are left out",
    ),
    criu(
        &["/secretmem"],
        "the job has secret memory (memfd_secret), which no other process can read",
        "disable it in the program or library that creates it",
    ),
    criu(
        &["Can't dump file"],
        "the job has a file open that CRIU cannot dump",
        "close the device or special file before snapshots",
    ),
    criu(
        &["Can't dump ghost file", "increase limit"],
        "the job has a deleted file open that is too large to be kept",
        "let the job close it, or not delete it",
    ),
    criu(
        &["Open files on overmounted mounts"],
        "a file system was mounted over a file or folder that the job has open",
        "unmount it, or let the job open the file again",
    ),
    criu(
        &["Can't link remap", "Invalid cross-device link"],
        "a file system was mounted over a file that the job has open",
        "unmount it, or let the job open the file again",
    ),
    criu(
        &["Can't lookup mount"],
        "the job has a file open from a mount that the sandbox does not see, or a POSIX message queue (mq_open)",
        "open the file inside the job; close message queues, which CRIU cannot save",
    ),
    criu(
        &["External socket is used"],
        "a unix socket of the job is connected to a process outside the job",
        "start both ends inside the job",
    ),
    criu(
        &["Can't dump half of stream unix connection"],
        "a unix socket of the job is connected to a process outside the job",
        "start both ends inside the job",
    ),
    criu(
        &["Non-empty write queue on an in-flight socket"],
        "data waits on a unix socket connection that the job has not accepted yet",
        "wait: a snapshot works once the job has accepted the connection",
    ),
    criu(
        &["Found a closed in-flight socket"],
        "a unix socket connection was closed before the job has accepted it",
        "wait: a snapshot works once the job has accepted the connection",
    ),
    criu(
        &["Control messages in queue, not supported"],
        "data waits on a unix socket whose reader is told the sender (SO_PASSCRED)",
        "wait: a snapshot works once the job has read it",
    ),
    criu(
        &["unix: Can't resolve name for socket"],
        "the name of a unix socket of the job was removed, another socket has it, or it is relative to a folder that the process \
         has left, which CRIU cannot save without root",
        "let the job bind absolute names and keep them, or close the socket; or run ckpt-run as root",
    ),
    criu(
        &["unix: Unable too cut"],
        "a unix socket of the job was renamed",
        "let the job bind it at its final path",
    ),
    criu(
        &["Dump eventpoll"],
        "an epoll set has a file that the process has closed and another one has open",
        "let the job take files out of the set before it closes them (EPOLL_CTL_DEL), or not leave them to children",
    ),
    criu(
        &["Can't obtain piped data size"],
        "the job has a named pipe open without access to its data (O_PATH)",
        "let it close the descriptor before snapshots",
    ),
    criu(
        &["No CTL for TTY dump"],
        "a descriptor of a terminal waits on a unix socket",
        "wait: a snapshot works once the job has received it",
    ),
    criu(
        &["Can't make VM id"],
        "two processes of the job share their memory (clone with CLONE_VM, or vfork)",
        "let them be threads, or not share it",
    ),
    criu(
        &["Can't make FS id"],
        "two processes of the job share their working folder (clone with CLONE_FS)",
        "let them be threads, or not share it",
    ),
    criu(
        &["PIDFD_THREAD flag"],
        "the job has a descriptor of a thread open (pidfd_open with PIDFD_THREAD)",
        "let it close that before snapshots, or open the process instead",
    ),
    criu(
        &["thread with a pending SIGTRAP"],
        "a thread of the job blocks a pending SIGTRAP, or was stopped at a breakpoint of its own",
        "let it receive the signal, or not block it; after a breakpoint, try again",
    ),
    criu(
        &["fsnotify: ", "Can't dump that handle"],
        "the job watches files (inotify, fanotify) by handles that this machine or user cannot open",
        "let it end the watch of a deleted file, or of one below another mount; without root, all watches",
    ),
    criu(
        &["madvise(", "MADV_GUARD_INSTALL"],
        "the image has locked memory with guard pages, which CRIU cannot restore",
        "let the job lock no memory (mlockall)",
    ),
    criu(
        &["Can't open ", "map_files", "Input/output error"],
        "the job has shared memory with pages that cannot be read (guard pages, MADV_GUARD_INSTALL)",
        "run ckpt-run as root, or let the job make them with mprotect",
    ),
    criu(
        &["Unaccessible path opened"],
        "the job has a file open that no path leads to, such as one of another mount namespace",
        "open the file inside the job",
    ),
    criu(
        &["Can't find a session leader for"],
        "a process of the job is in a session whose leader CRIU cannot find",
        "start the program in the foreground, or with setsid",
    ),
    criu(
        &["unsupported stop signal"],
        "a process of the job was stopped because it is in the background and used its terminal (SIGTTIN, SIGTTOU), and CRIU \
         cannot save such a stop",
        "bring it to the foreground (`fg`), end it, or start it with other input (`< /dev/null`)",
    ),
    criu(
        &["netlink: The socket has data to read"],
        "the job has not read an answer of the kernel (netlink)",
        "wait: a snapshot works once the job has read it",
    ),
    criu(
        &["Unknown socket collected"],
        "the job has a socket of a kind that CRIU does not know, such as vsock or Bluetooth",
        "close it before snapshots, or use TCP or a unix socket",
    ),
    criu(
        &["Unsupported proto"],
        "the job has an internet socket of a protocol that CRIU does not know, such as MPTCP or SCTP",
        "use TCP or UDP; programs in Go: GODEBUG=multipathtcp=0",
    ),
    criu(
        &["inet socket", "Only stream, dgram and raw are supported"],
        "the job has an internet socket of a type that CRIU does not know",
        "use TCP or UDP",
    ),
    criu(
        &["Can't dump corked dgram socket"],
        "the job has begun a datagram (UDP_CORK, MSG_MORE), or could do so",
        "let it send the datagram and turn UDP_CORK off before snapshots",
    ),
    criu(
        &["Net namespace is required to dump tun link"],
        "the job has a tun or tap device open",
        "close it before snapshots, or leave it to a program outside of the job",
    ),
    criu(
        &["In-flight connection (l)"],
        "the job has not accepted a connection",
        "let it accept its connections, or set network.tcp = \"close\" for those of others",
    ),
    criu(
        &["Can't restore sub-task in NS"],
        "a process of the job had namespaces of its own, which CRIU cannot restore",
        "run ckpt-run inside of them instead, or without that sandbox",
    ),
    criu(
        &["Unable to connect a socket", "Network is unreachable"],
        "the loopback interface is down, and CRIU does not start without it",
        "ip link set lo up",
    ),
    criu(
        &["The packetized mode for pipes is not supported"],
        "the job has a pipe in packet mode (O_DIRECT)",
        "make the pipe without O_DIRECT",
    ),
    criu(
        &["with SysVIPC shmem map", "doesn't live in IPC ns"],
        "the job uses System V shared memory and has no IPC namespace of its own",
        "run with isolation = \"namespaces\", or use POSIX shared memory (shm_open) or mmap",
    ),
    criu(
        &["Can't dump nested", "namespace"],
        "a process of the job has namespaces of its own: a container or sandbox inside the job",
        "run ckpt-run inside of it instead, or without that sandbox",
    ),
    criu(
        &["Zombies with threads are not supported"],
        "the first thread of a process has ended while others run",
        "let the first thread wait for the others",
    ),
    criu(&["Can't fork for"], PID_TAKEN, OWN_PIDS),
    criu(&["do not match expected", "Pid "], PID_TAKEN, OWN_PIDS),
    criu(
        &["ctty inheritance detected"],
        "a process of the job opened /dev/tty itself, in addition to its inherited terminal (ssh, less, a password prompt)",
        "let it close /dev/tty before snapshots, or start it outside terminals that the job creates",
    ),
    criu(
        &["with specified index"],
        "the number of a terminal that the job created is in use",
        "run with isolation = \"namespaces\", or end the program that has /dev/pts of this number",
    ),
    criu(
        &["ns_last_pid"],
        "CRIU may not choose process ids",
        "run as root or with CAP_CHECKPOINT_RESTORE, and with /proc/sys writable",
    ),
    criu(
        &["Can't link remap", "File exists"],
        "the folder of one of the job's files has a link_remap file of another job's snapshot or restore",
        "wait for it to finish; remove the file if no ckpt-run and no CRIU runs here",
    ),
    criu(
        &["unix: Can't bind", "Address already in use"],
        "another program has the name of one of the job's Unix sockets",
        "end that program: it may be a copy of the job, or one in a container that shares the network",
    ),
    criu(
        &["Address already in use"],
        "a network address of the job is still in use",
        "wait until the connection's TIME_WAIT is over, or end the program that uses the address",
    ),
    criu(
        &["Can't turn TCP repair mode ON"],
        "CRIU may not touch the job's TCP connections",
        "run as root or with CAP_NET_ADMIN",
    ),
    criu(
        &["Can't get rlimit"],
        "CRIU may not read the limits of a process of another user",
        "run as root with CAP_SYS_RESOURCE, or use a CRIU that is linked dynamically",
    ),
    criu(
        &["Unable to set a monotonic clock offset"],
        "CRIU may not set the job's clocks",
        "run as root or with CAP_SYS_TIME",
    ),
    criu(
        &["SO_SNDBUFFORCE", "Operation not permitted"],
        "CRIU may not give sockets their buffers back",
        "run as root or with CAP_NET_ADMIN",
    ),
    criu(
        &["Can't change root", "Operation not permitted"],
        "CRIU may not set the job's root folder",
        "run as root or with CAP_SYS_CHROOT",
    ),
    criu(
        &["Unable to drop capability"],
        "CRIU may not remove capabilities that the job did not have",
        "run as root or with CAP_SETPCAP",
    ),
    criu(
        &["suspending seccomp failed"],
        "the job has set a seccomp filter, which CRIU cannot save without root or under a container's filter",
        "run as root, in a container with seccomp=unconfined (Kubernetes: seccompProfile of type Unconfined)",
    ),
    criu(
        &["Can't splice pages to pipe (-1/"],
        "a seccomp filter, as of a container, rejects a call by which CRIU reads memory (vmsplice)",
        "in a container set seccomp=unconfined (Kubernetes: seccompProfile of type Unconfined)",
    ),
    // SO_PASSCRED, which internet sockets no longer have since Linux 6.16.
    criu(
        &["Can't get 1:16 opt"],
        "the job has an internet socket, and this CRIU is too old for the running kernel",
        "install CRIU 4.2 or newer",
    ),
    criu(
        &["Unexpected rt vDSO area bounds"],
        "this CRIU is too old for the running kernel",
        "install CRIU 4.0 or newer (scripts/setup)",
    ),
    criu(
        &["Not supported images version"],
        "another version of CRIU made the image",
        "install the version that `ckpt-run show` prints",
    ),
    criu(
        &["capabilities do not match run time"],
        "this machine's processor lacks instructions that the job may use",
        "restore it on a machine with the processor that it was started on, or a newer one of that kind",
    ),
    criu(
        &["Unsupported mapping found"],
        "the job maps something that CRIU does not know",
        "unmap it before snapshots",
    ),
    criu(
        &["Unseizable non-zombie", "state D"],
        "a thread of the job waits in the kernel and cannot be stopped, for a program that it starts (vfork) or a disk",
        "wait: a later snapshot succeeds, unless the program never starts or the disk does not respond",
    ),
    criu(
        &["Unseizable non-zombie"],
        "another program traces the job",
        "detach the debugger, profiler or strace",
    ),
    // ENOMEM of mmap, as the restored process itself sees it.
    criu(
        &["Can't restore", "mapping with 0xfffffffffffffff4"],
        "a mapping of the job cannot get memory, such as huge pages",
        "if the job uses huge pages (MAP_HUGETLB), raise vm.nr_hugepages; otherwise free memory",
    ),
    // Without `CAP_SYS_RESOURCE`, CRIU has no more descriptors than ckpt-run.
    criu(
        &["Can't chose service_fd_base"],
        "a process of the job has a descriptor whose number is close to ckpt-run's limit, so CRIU has none left for itself",
        "raise the limit for ckpt-run by 256 or more (ulimit -Hn, LimitNOFILE=), and the run continues",
    ),
    criu(
        &["No space left on device"],
        "the disk is full",
        "free space, or choose another --store",
    ),
    criu(
        &["Cannot allocate memory"],
        "the machine is out of memory",
        "free memory, or lower snapshot.buffer; raise vm.nr_hugepages if the job uses huge pages (MAP_HUGETLB)",
    ),
    criu(
        &["Unable to set a pipe size"],
        "the user's programs have too many or too large pipes (64 MiB in all)",
        "end some of them, or raise the limit: sysctl fs.pipe-user-pages-soft",
    ),
    criu(
        &["Operation not permitted"],
        "the kernel refuses what CRIU needs",
        "run as root, or with what `ckpt-run doctor` asks for; in a container, allow it there (seccomp, capabilities)",
    ),
    cuda(
        &["checkpoint", "restore"],
        801,
        "the job uses managed memory, CUDA IPC or peer-mapped GPU memory, which this driver cannot suspend",
        "for NCCL set NCCL_P2P_DISABLE=1 NCCL_CUMEM_ENABLE=0 NCCL_CUMEM_HOST_ENABLE=0 (cuda.nccl = \"checkpointable\")",
    ),
    cuda(
        &["lock"],
        801,
        "a profiler measures the process (CUPTI: torch.profiler, Nsight), which this driver cannot suspend then",
        "run the job without the profiler",
    ),
    cuda(
        &["restore"],
        1,
        "a GPU that the process used is not visible here, the GPU map lacks one, or the process shares GPU memory with \
         another one",
        "name every GPU in the map that was visible to the process when it was suspended",
    ),
    cuda(
        &["restore"],
        2,
        "the GPU has less free memory than the process had in use",
        "end other users of the GPU; `ckpt-run show` prints what the image needs",
    ),
    cuda(
        &["checkpoint"],
        2,
        "the host has too little memory for a copy of the GPU memory",
        "free host memory, or raise the limit of the container; cuda.memory = \"auto\" needs less",
    ),
    cuda(
        &["lock"],
        600,
        "the GPU work that was submitted did not finish in time",
        "raise snapshot.lock_timeout",
    ),
    cuda(
        &[],
        3,
        "the process does not use CUDA",
        "name one that does: `nvidia-smi` lists them",
    ),
    cuda(
        &[],
        100,
        "the driver sees no GPU",
        "run `ckpt-run doctor`; in a container, give it the GPUs",
    ),
    cuda(
        &[],
        304,
        "the process has ended, or may not be controlled by this user",
        "run as the job's user or as root",
    ),
    cuda(
        &[],
        401,
        "another program is suspending or resuming this process",
        "wait for it; `ckpt-run cuda resume` resumes a process that it left suspended",
    ),
    cuda(
        &[],
        800,
        "the driver does not let this user control the process",
        "run as the job's user or as root",
    ),
    cuda(
        &[],
        803,
        "libcuda.so.1 and the kernel driver have different versions",
        "reboot after an upgrade of the driver; in a container, use the library of the host's driver",
    ),
];

//! Lines of CRIU's log that the table explains, each with a part of the meaning.

/// Lines of logs, each with a part of its meaning. Lines that begin without a time were provoked (CRIU 4.2.1, Linux
/// 6.18) and copied unchanged from the log; the others are composed from CRIU's source.
pub(super) const LINES: &[(&str, &str)] = &[
    (
        "Error (criu/sk-queue.c:144): skqueue: Control messages in queue, not supported",
        "told the sender",
    ),
    (
        "Error (criu/sk-unix.c:322): unix: Can't resolve name for socket 0xe",
        "name of a unix socket",
    ),
    (
        "Error (criu/sk-unix.c:698): unix: Unable too cut rel.sock from ./tmp/w/new.sock",
        "was renamed",
    ),
    (
        "Error (criu/cr-dump.c:1703): Dump eventpoll (pid: 28555) failed with -1",
        "epoll set",
    ),
    (
        "Error (criu/pipes.c:425): fifo: Can't obtain piped data size",
        "O_PATH",
    ),
    (
        "Error (criu/tty.c:1865): tty: No CTL for TTY dump, likely SCM case",
        "descriptor of a terminal",
    ),
    (
        "Error (criu/cr-dump.c:668): Can't make VM id for 28555",
        "share their memory",
    ),
    (
        "Error (criu/cr-dump.c:675): Can't make FS id for 28555",
        "share their working folder",
    ),
    (
        "(00.02) Error (criu/sk-inet.c:144): inet: Unsupported proto 262 for socket 9f01a5",
        "MPTCP",
    ),
    (
        "(00.02) Error (criu/sk-inet.c:170): inet: Can't dump 5 inet socket 9f01a5. Only stream, dgram and raw are \
         supported.",
        "of a type",
    ),
    (
        "(00.02) Error (criu/sk-inet.c:527): inet: Can't dump corked dgram socket 9f01a5",
        "begun a datagram",
    ),
    (
        "(00.034) Error (criu/sk-unix.c:525): unix: Found a closed in-flight socket to 0xf846d7",
        "closed before the job",
    ),
    (
        "(00.028) Error (criu/pidfd.c:88): pidfd: PIDFD_THREAD flag is currently not supported",
        "of a thread",
    ),
    (
        "(00.02) Error (compel/src/lib/infect.c:323): Can't dump the 20861 thread with a pending SIGTRAP.",
        "blocks a pending SIGTRAP, or was stopped at a breakpoint of its own",
    ),
    (
        "(00.02) Error (criu/fsnotify.c:284): fsnotify: \tCan't dump that handle",
        "watches files",
    ),
    (
        "(00.02)      9: Error (criu/pie/restorer.c:1802): madvise(0x7f5f6dd3c000, 8192, MADV_GUARD_INSTALL) failed with -22",
        "locked memory",
    ),
    (
        "(00.02) Error (criu/proc_parse.c:312): Can't open 13359/map_files/7f1655ed7000-7f1655ee7000 on procfs: Input/output error",
        "cannot be read",
    ),
    (
        "(00.02) Error (criu/files-reg.c:1444): Unaccessible path opened 65024:2, need 71:1",
        "no path leads to",
    ),
    (
        "(00.02) Error (criu/seize.c:720): SEIZE 8800: unsupported stop signal 21",
        "background",
    ),
    (
        "(00.02) Error (criu/pstree.c:801): Can't find a session leader for 16",
        "session whose leader",
    ),
    (
        "(00.02) Error (criu/tun.c:306): tun: Net namespace is required to dump tun link",
        "tun or tap",
    ),
    (
        "(00.02) Error (criu/sk-inet.c:188): inet: In-flight connection (l) for 9f01a5",
        "not accepted a connection",
    ),
    (
        "(00.03) Error (criu/cr-restore.c:1156): Can't restore sub-task in NS (cflags 40000000)",
        "namespaces of its own",
    ),
    (
        "Error (criu/kerndat.c:732): Unable to connect a socket: Network is unreachable",
        "loopback",
    ),
    (
        " 27116: Error (criu/files-reg.c:2175): File tmp/w/size/f has bad size 10 (expect 20)",
        "changed its size",
    ),
    (
        " 29380: Error (criu/files-reg.c:2294): File tmp/w/mode/f has bad mode 040755 (expect 0100644)",
        "changed its type",
    ),
    (
        " 27838: Error (criu/files-reg.c:2153): File tmp/w/buildid/lib.so has bad build-ID",
        "was replaced",
    ),
    (
        " 27760: Error (criu/files-reg.c:2267): Can't open file tmp/w/gone/f: No such file or directory",
        "open is gone",
    ),
    (
        "(00.01) Error (criu/files-ext.c:94): Can't dump file 5 of that type [600] (anon anon_inode:[io_uring])",
        "io_uring",
    ),
    (
        "pie: 301: Error (criu/pie/parasite.c:588): send_fds failed (-22)",
        "io_uring",
    ),
    (
        "Error (criu/files-ext.c:94): Can't dump file 3 of that type [600] (anon anon_inode:[userfaultfd])",
        "userfaultfd",
    ),
    (
        "Error (criu/files-ext.c:94): Can't dump file 3 of that type [600] (anon anon_inode:[perf_event])",
        "perf_event",
    ),
    (
        "Error (criu/files-ext.c:94): Can't dump file 3 of that type [600] (anon anon_inode:bpf-map)",
        "eBPF",
    ),
    (
        "Error (criu/files-ext.c:94): Can't dump file 3 of that type [20600] (chr 10:229)",
        "FUSE",
    ),
    (
        "(00.02) Error (criu/proc_parse.c:123): Can't handle non-regular mapping on 300's map 7f81936af000",
        "maps a device",
    ),
    (
        "Error (criu/files-reg.c:1796): Open files on overmounted mounts are not supported yet; mount=155 fd=3 \
         path=/tmp/m/x",
        "was mounted over",
    ),
    (
        "Error (criu/files-reg.c:1160): Can't link remap to /tmp/m/x: Invalid cross-device link",
        "was mounted over",
    ),
    (
        "pie: 1610: Error (criu/pie/restorer.c:1884): Can't restore 0x7f2351400000 mapping with 0xfffffffffffffff4",
        "huge pages",
    ),
    (
        "Error (criu/proc_parse.c:502): Unknown shit 100600 (/secretmem (deleted))",
        "memfd_secret",
    ),
    (
        "Error (criu/proc_parse.c:512): Can't open map_files: Input/output error",
        "deleted or replaced",
    ),
    (
        "Error (criu/files-ext.c:94): Can't dump file 3 of that type [20600] (chr 10:183)",
        "a file open that CRIU cannot",
    ),
    (
        "Error (criu/files-reg.c:1031): Can't dump ghost file /tmp/w/ghost/g of 3145728 size, increase limit",
        "deleted file",
    ),
    (
        "Error (criu/files-reg.c:1790): Can't lookup mount=44 for fd=3 path=/f",
        "does not see",
    ),
    (
        "Error (criu/sk-unix.c:874): unix: External socket is used. Consider using --ext-unix-sk option.",
        "outside the job",
    ),
    (
        "(00.02) Error (criu/sk-unix.c:880): unix: Can't dump half of stream unix connection. name: ; peer name: x",
        "outside the job",
    ),
    (
        "Error (criu/sk-unix.c:506): unix: Non-empty write queue on an in-flight socket 0xa6386f",
        "not accepted yet",
    ),
    (
        "Error (criu/sk-netlink.c:77): netlink: The socket has data to read",
        "netlink",
    ),
    (
        "Error (criu/sockets.c:767): sockets: BUG! Unknown socket collected (family 40)",
        "vsock",
    ),
    (
        "Error (criu/pipes.c:490): The packetized mode for pipes is not supported yet",
        "packet mode",
    ),
    (
        "Error (criu/cr-dump.c:478): Task 28685 with SysVIPC shmem map @7feefaba0000 doesn't live in IPC ns",
        "System V",
    ),
    (
        "Error (criu/namespaces.c:460): Can't dump nested pid namespace for 342",
        "container or sandbox inside",
    ),
    (
        "Error (criu/seize.c:882): Zombies with threads are not supported",
        "first thread",
    ),
    (
        "Error (criu/cr-restore.c:1237): Can't fork for 28302: File exists",
        "process id of the job is in use",
    ),
    (
        "(00.02)    300: Error (criu/cr-restore.c:1900): Pid 301 do not match expected 300",
        "process id of the job is in use",
    ),
    (
        "Error (criu/tty.c:2286): tty: ctty inheritance detected sid/pgrp 342 (ctty pid_real 342 pty pid_real 301)",
        "opened /dev/tty itself",
    ),
    (
        "   301: Error (criu/tty.c:625): tty: Unable to open dev/ptmx with specified index 2",
        "is in use",
    ),
    (
        "(00.02) Error (criu/cr-restore.c:1200): Can't open 1/sys/kernel/ns_last_pid on procfs: Read-only file system",
        "choose process ids",
    ),
    (
        "Error (criu/files-reg.c:1159): Can't link remap to /dev/shm/sem.ZBvp4E: File exists",
        "link_remap file of another",
    ),
    (
        "   301: Error (criu/sk-unix.c:1651): unix: Can't bind id 0x65 ino 177050 addr : Address already in use",
        "Unix sockets",
    ),
    (
        " 28379: Error (criu/sk-inet.c:1059): inet: Can't bind inet socket (id 26): Address already in use",
        "still in use",
    ),
    (
        "Error (soccr/soccr.c:94): Can't turn TCP repair mode ON: Operation not permitted",
        "TCP connections",
    ),
    (
        "Error (criu/timens.c:141): timens: Unable to set a monotonic clock offset: Operation not permitted",
        "set the job's clocks",
    ),
    (
        "Error (criu/sockets.c:483): sockets: Unable to set socket SO_SNDBUFFORCE/SO_RCVBUFFORCE: Operation not \
         permitted",
        "buffers back",
    ),
    (
        "   301: Error (criu/files.c:1419): Can't change root: Operation not permitted",
        "root folder",
    ),
    (
        "pie: 301: Error (criu/pie/restorer.c:316): Unable to drop capability 0: -1",
        "remove capabilities",
    ),
    (
        "Error (compel/src/lib/ptrace.c:27): suspending seccomp failed: Operation not permitted",
        "seccomp filter",
    ),
    (
        "pie: 301: Error (criu/pie/parasite.c:160): Can't splice pages to pipe (-1/2/0)",
        "vmsplice",
    ),
    (
        "Error (criu/sockets.c:628): sockets: Can't get 1:16 opt: Operation not supported",
        "too old",
    ),
    (
        "(00.02) Error (criu/vdso.c:600): vdso: Unexpected rt vDSO area bounds",
        "too old",
    ),
    (
        "Error (criu/image.c:89): Not supported images version 9",
        "another version of CRIU",
    ),
    (
        "Error (criu/arch/x86/cpu.c:297): cpu: CPU capabilities do not match run time",
        "processor",
    ),
    (
        "(00.02) Error (criu/proc_parse.c:700): Unsupported mapping found 7f0000000000-7f0000001000",
        "maps something",
    ),
    (
        "(60.03) Error (compel/src/lib/infect.c:262): Unseizable non-zombie 24329 found, state D, err -1/4",
        "waits in the kernel",
    ),
    (
        "Error (compel/src/lib/infect.c:262): Unseizable non-zombie 301 found, state S, err -1/10",
        "traces the job",
    ),
    (
        " 24218: Error (criu/servicefd.c:282): sfd: Can't chose service_fd_base: 256 331",
        "descriptor whose number is close to",
    ),
    (
        "Error (criu/page-xfer.c:263): page-xfer: Unable to spice data: No space left on device",
        "disk is full",
    ),
    (
        " 28728: Error (criu/mem.c:1363): Unable to reserve memory (646082560 bytes): Cannot allocate memory",
        "out of memory",
    ),
    (
        "Error (criu/pipes.c:436): Unable to set a pipe size: Operation not permitted",
        "too many or too large pipes",
    ),
    (
        "Error (criu/kerndat.c:1601): Unable create a network namespace: Operation not permitted",
        "kernel refuses",
    ),
    (
        "(00.010563) Error (criu/cr-dump.c:388): Can't get rlimit 0: Operation not permitted",
        "limits of a process of another user",
    ),
    (
        "  301: Error (criu/files-reg.c:2353): Can't open file home/d/f on restore: Too many levels of symbolic links",
        "contains a link",
    ),
];

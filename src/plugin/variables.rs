//! Variables by which the supervisor configures the plugin through CRIU's environment.

use core::ffi::CStr;

/// Major numbers of the devices that the plugin handles, in decimal, separated by spaces. Without it there are none.
pub const MAJORS: &CStr = c"CKPT_RUN_PLUGIN_MAJORS";
/// Set if CRIU's `RESTORE_EXT_FILE` has a second argument.
pub const RETRY: &CStr = c"CKPT_RUN_PLUGIN_RETRY";
/// Pid of the tree's first process, which adopts orphans, as seen by CRIU.
pub const ROOT: &CStr = c"CKPT_RUN_PLUGIN_ROOT";
/// Name of the action script for CRIU. There is no such program, because the plugin asks instead of a script.
pub const SCRIPT: &CStr = c"ckpt-run-asks";
/// Path of the socket for the question at the start of a dump: permission to freeze the tasks. As for all questions,
/// CRIU continues if the variable is not set.
pub const BEGIN: &CStr = c"CKPT_RUN_PLUGIN_BEGIN";
/// Path of the socket for the question when all tasks are frozen: permission to inspect them.
pub const FROZEN: &CStr = c"CKPT_RUN_PLUGIN_FROZEN";
/// Path of the socket for the question when the image is complete: permission to release the tasks.
pub const DUMPED: &CStr = c"CKPT_RUN_PLUGIN_DUMPED";
/// Path of the socket for the question when all tasks are restored: permission to end the repair mode of connections.
pub const RESTORED: &CStr = c"CKPT_RUN_PLUGIN_RESTORED";
/// The supervisor's answer that permits CRIU to continue.
pub const GO_ON: u8 = b'r';
/// Number of seccomp filters that the sandbox has installed for the job, in decimal. Set if CRIU may not suspend filters.
pub const FILTERS: &CStr = c"CKPT_RUN_PLUGIN_FILTERS";
/// Set at a dump if the job has a PID namespace of its own.
pub const NUMBERS: &CStr = c"CKPT_RUN_PLUGIN_NUMBERS";
/// Longest wait that is repeated with its whole time at a dump, in milliseconds, in decimal.
pub const WAIT_MS: &CStr = c"CKPT_RUN_PLUGIN_WAIT_MS";
/// System calls that restored threads make before they run; `remote_calls.rs` has the format.
pub const CALLS: &CStr = c"CKPT_RUN_PLUGIN_CALLS";
/// Pids and exit codes of processes that had ended at the dump, in decimal: `PID CODE;PID CODE`. Those of which CRIU keeps
/// all bits may be missing.
pub const EXIT_CODES: &CStr = c"CKPT_RUN_PLUGIN_EXIT_CODES";
/// Number that is added to a signal in that list.
pub const BY_SIGNAL: u16 = 256;
/// Descriptor of the file in memory with the state that CRIU omits, in decimal. Set at a dump, and at a restore if there is
/// any such state.
pub const OMITTED: &CStr = c"CKPT_RUN_PLUGIN_OMITTED";
/// Kind of a record in this file that refuses a dump: a process uses protection keys in a way that cannot be restored.
pub const BAD_KEYS: u32 = 0;
/// Kind of a record that refuses a dump: a thread has descriptors or a working folder of its own.
pub const UNSHARED: u32 = 6;
/// Kind of a record that refuses a dump: a thread has the scheduling policy `SCHED_DEADLINE`.
pub const DEADLINE: u32 = 7;
/// Kind of a record that refuses a dump: a thread blocks the signal of a fault, which it has sent itself.
pub const BLOCKED: u32 = 13;
/// Kind of a record of a thread that checks the alignment of its accesses (`EFLAGS.AC`). The flag is given back at the end of a
/// dump, too.
pub const ALIGNMENT: u32 = 12;
/// Kind of a record with a register of a thread: its component, then its bytes. It is given back at the end of a dump, too.
pub const REGISTERS: u32 = 2;
/// Kind of a record with the dispatch of a thread, as the kernel shows it. It is given back at the end of a dump, too.
pub const DISPATCH: u32 = 5;
/// Kind of a record with a record lock of a process: descriptor, four bytes, and `struct flock`, of which the first two bytes are
/// the kind and all up to the eighth are 0. The supervisor writes it.
pub const LOCK: u32 = 10;
/// Mount points, separated by newlines, on which symbolic links are disabled during a restore.
pub const NO_LINKS: &CStr = c"CKPT_RUN_PLUGIN_NO_LINKS";
/// Beginning of the paths of the sockets for long reads of memory pages. Device (major and minor number) and inode number
/// of the pipe follow, each after a dot.
pub const PAGES: &CStr = c"CKPT_RUN_PLUGIN_PAGES";
/// Shortest read that the supervisor serves directly. The exchange takes as long as to read about 128 KiB.
pub const LONG_READ_MIN: usize = 512 << 10;
/// Path of the socket for the question before the restored tasks run.
pub const QUESTION: &CStr = c"CKPT_RUN_PLUGIN_QUESTION";

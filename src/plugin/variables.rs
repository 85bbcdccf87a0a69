//! Variables by which the supervisor configures the plugin through CRIU's environment.

use core::ffi::CStr;

/// The major numbers of the devices that may be taken, in decimal, separated by spaces. Without it none may.
pub const MAJORS: &CStr = c"CKPT_RUN_PLUGIN_MAJORS";
/// Set where CRIU's `RESTORE_EXT_FILE` has a second argument.
pub const RETRY: &CStr = c"CKPT_RUN_PLUGIN_RETRY";
/// Pid of the tree's first process, which adopts orphans, as CRIU sees it.
pub const ROOT: &CStr = c"CKPT_RUN_PLUGIN_ROOT";
/// The action script, as CRIU is told to start it: there is no such program, the plugin acts in its place.
pub const SCRIPT: &CStr = c"ckpt-run-asks";
/// Paths of the sockets on which the plugin asks the supervisor whether CRIU may go on. Without one CRIU goes on. At a
/// dump: whether the tasks may be frozen.
pub const BEGIN: &CStr = c"CKPT_RUN_PLUGIN_BEGIN";
/// Whether CRIU may look at the tasks, once all of them are frozen.
pub const FROZEN: &CStr = c"CKPT_RUN_PLUGIN_FROZEN";
/// Whether the tasks may be released, once the image is complete.
pub const DUMPED: &CStr = c"CKPT_RUN_PLUGIN_DUMPED";
/// At a restore: whether CRIU may end the repair mode of connections, once all tasks are restored.
pub const RESTORED: &CStr = c"CKPT_RUN_PLUGIN_RESTORED";
/// The supervisor's word that CRIU may go on.
pub const GO_ON: u8 = b'r';
/// System calls that restored threads make before they run; `remote_calls.rs` has the format.
pub const CALLS: &CStr = c"CKPT_RUN_PLUGIN_CALLS";
/// The mount points, separated by newlines, that follow no links while CRIU restores.
pub const NO_LINKS: &CStr = c"CKPT_RUN_PLUGIN_NO_LINKS";
/// Path of the socket on which the supervisor is asked before the restored tasks run.
pub const QUESTION: &CStr = c"CKPT_RUN_PLUGIN_QUESTION";

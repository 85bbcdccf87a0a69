#![allow(unsafe_code, reason = "called by CRIU through C")]
//! Questions to the supervisor. The plugin connects to a socket, whose path is in a variable, and waits for a byte.
//!
//! ```text
//! pre-dump        CRIU has started and will inspect the tasks next, so that its start is not part of the freeze
//! (a hook)        the tasks are frozen, and CRIU has not inspected their sockets yet
//! post-dump       all image files are closed. CRIU passes memory pages to their pipes by reference: if the tasks were
//!                 released while a pipe contains unread pages, later writes would change the image
//! post-restore    everything is restored, and packets may reach the restored connections
//! (a hook)        the tasks are ready to run
//! ```
//! If CRIU has no hook for a question, it starts an action script. The preloaded plugin asks instead of the script, in
//! the child that CRIU has forked for it. No program is started, and none could be during a restore that follows no
//! links (see `guard`).
//!
//! A refusal aborts the dump, and the tasks continue, or aborts the restore. The wait ends with the supervisor's answer
//! or its exit. After a refusal of the last question, CRIU waits until it is killed.

use core::ffi::{CStr, c_char, c_int};

use super::connection::Connection;
use super::kernel::{_exit, variable};
use super::variables::{BEGIN, DUMPED, GO_ON, RESTORED, SCRIPT};

/// Variable with the name of the action for which CRIU starts the script.
pub const ACTION: &CStr = c"CRTOOLS_SCRIPT_ACTION";
/// Action at the end of a dump.
pub const AT_END: &[u8] = b"post-dump";

/// Starts a program like the C library's function. For the action script, it asks instead, and ends CRIU's child.
///
/// # Safety
/// See the C library's function.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn execvp(program: *const c_char, arguments: *const *const c_char) -> c_int {
    // SAFETY: by the contract above.
    if unsafe { CStr::from_ptr(program) } == SCRIPT {
        let is_refused = socket_of_action().and_then(ask) == Some(false);
        // SAFETY: takes a number and does not return.
        unsafe { _exit(is_refused.into()) }
    }
    // SAFETY: by the contract above; CRIU's process has one thread, so the environment stays.
    unsafe { execvpe(program, arguments, environ) }
}

/// Returns the variable of the action for which CRIU starts the script; `None` for an action without a question.
fn socket_of_action() -> Option<&'static CStr> {
    match variable(ACTION)?.to_bytes() {
        b"pre-dump" => Some(BEGIN),
        AT_END => Some(DUMPED),
        b"post-restore" => Some(RESTORED),
        _ => None,
    }
}

/// Asks on the socket named by the variable, and waits for the supervisor's answer or exit. Returns true for
/// [`GO_ON`], and `None` if the variable is not set.
pub fn ask(variable_name: &CStr) -> Option<bool> {
    variable(variable_name).map(may_go_on)
}

fn may_go_on(path: &CStr) -> bool {
    let mut word = [0];
    Connection::open(path).is_some_and(|it| it.receive(&mut word)) && word == [GO_ON]
}

// Of the C library that CRIU runs with; none is linked.
unsafe extern "C" {
    static environ: *const *const c_char;
    fn execvpe(
        program: *const c_char,
        arguments: *const *const c_char,
        environment: *const *const c_char,
    ) -> c_int;
}

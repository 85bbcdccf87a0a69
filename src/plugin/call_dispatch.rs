#![allow(
    unsafe_code,
    reason = "called by CRIU through C, and traces the job's threads"
)]
//! The dispatch of a thread's system calls to a handler (`PR_SET_SYSCALL_USER_DISPATCH`), which CRIU (4.2) omits.

use core::ffi::c_int;

use super::tracing::ptrace;

/// A thread's dispatch of system calls (`struct ptrace_sud_config`): mode, address of its switch, and the code that is
/// exempt, eight bytes each.
pub struct Dispatch(pub [u8; DISPATCH_BYTES]);

const DISPATCH_BYTES: usize = 32;

impl Dispatch {
    pub const OFF: Self = Self([0; DISPATCH_BYTES]);

    /// Returns `None` on a kernel that does not show it (before 6.4).
    pub fn of(thread: c_int) -> Option<Self> {
        let mut dispatch = Self::OFF;
        let into = dispatch.0.as_mut_ptr();
        // SAFETY: the kernel writes so many bytes.
        (unsafe { ptrace(PTRACE_GET_DISPATCH, thread, DISPATCH_BYTES as u64, into) } == 0)
            .then_some(dispatch)
    }

    pub fn is_on(&self) -> bool {
        self.0.first_chunk() != Some(&0_u64.to_ne_bytes())
    }

    pub fn give_to(&self, thread: c_int) -> Option<()> {
        let from = self.0.as_ptr();
        // SAFETY: the kernel reads so many bytes.
        (unsafe { ptrace(PTRACE_SET_DISPATCH, thread, DISPATCH_BYTES as u64, from) } == 0)
            .then_some(())
    }
}

const PTRACE_GET_DISPATCH: c_int = 0x4211;
const PTRACE_SET_DISPATCH: c_int = 0x4210;

#![allow(unsafe_code, reason = "a filter is installed between fork and exec")]
//! Limit on the size of pasta's pipes. pasta keeps 32 pipes that are as large as possible. The kernel grants all programs of
//! an ordinary user 64 MiB of pipes (`fs.pipe-user-pages-soft`); two jobs would use it up, and CRIU could not save the
//! pipes of jobs any more.

use std::os::unix::process::CommandExt;
use std::process::Command;

use nix::libc::{self, sock_filter};
use nix::sys::prctl;

use super::bpf_filter::{
    LOAD_WORD, MACHINE, MACHINES, NUMBER, RETURN, argument, install, instruction, skip_unless,
    skip_unless_greater,
};

/// Largest pipe. pasta makes its pipes smaller when the kernel refuses a size.
const PIPE_BYTES_MAX: u32 = 256 << 10;

#[allow(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "small positive numbers"
)]
const FILTER: [sock_filter; 10] = [
    instruction(LOAD_WORD, MACHINE),
    skip_unless(MACHINES[0], 0, 7),
    instruction(LOAD_WORD, NUMBER),
    skip_unless(libc::SYS_fcntl as u32, 0, 5),
    instruction(LOAD_WORD, argument(1)),
    skip_unless(libc::F_SETPIPE_SZ as u32, 0, 3),
    instruction(LOAD_WORD, argument(2)),
    skip_unless_greater(PIPE_BYTES_MAX, 1),
    instruction(
        RETURN,
        libc::SECCOMP_RET_ERRNO | libc::EPERM.cast_unsigned(),
    ),
    instruction(RETURN, libc::SECCOMP_RET_ALLOW),
];

/// Makes the program and its descendants unable to enlarge a pipe beyond [`PIPE_BYTES_MAX`], or to gain privileges by
/// executing a program. Where the kernel has no seccomp, pipes are not limited.
pub(in crate::sandbox) fn limit(command: &mut Command) {
    let filter = || {
        prctl::set_no_new_privs()?;
        let _ = install(&FILTER);
        Ok(())
    };
    // SAFETY: the closure makes only system calls.
    unsafe { command.pre_exec(filter) };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_larger_pipes_are_refused() {
        let script = "
import fcntl, os
pipe, _ = os.pipe()
fcntl.fcntl(pipe, 1031, 256 << 10)
try:
    fcntl.fcntl(pipe, 1031, 512 << 10)
except PermissionError:
    print(fcntl.fcntl(pipe, 1032) >> 10)
";
        let mut python = Command::new("python3");
        python.args(["-c", script]);
        limit(&mut python);
        let output = python.output().unwrap();
        assert_eq!(output.stdout, b"256\n", "{output:?}");
    }
}

//! Start of a tool in the sandbox.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};

use nix::errno::Errno;
use nix::libc;
use nix::sched::{CloneFlags, unshare};

use super::protocol::ToolCommand;
use super::seccomp::Hidden;
use super::spawn::raise_to_hard_limit;

pub(super) fn start_tool(
    tool: &ToolCommand,
    stdin: Stdio,
    descriptors: &[OwnedFd],
) -> io::Result<Child> {
    let (program, arguments) = tool.argv.split_first().ok_or(Errno::EINVAL)?;
    let mut command = Command::new(program);
    command
        .args(arguments)
        .env_clear()
        .envs(tool.environment.iter().cloned());
    command
        .stdin(stdin)
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    let first = tool.first_descriptor;
    let inherited: Vec<RawFd> = descriptors.iter().map(AsRawFd::as_raw_fd).collect();
    place_descriptors(&mut command, first, inherited);
    prepare(&mut command, tool.own_ipc, tool.hidden);
    command.spawn()
}

#[allow(
    unsafe_code,
    reason = "descriptors are put in place between fork and exec"
)]
fn place_descriptors(command: &mut Command, first: RawFd, inherited: Vec<RawFd>) {
    let place = move || {
        raise_to_hard_limit();
        // Pid 1 has only a few low descriptors, so no target number overwrites a source.
        for (source, target) in inherited.iter().zip(first..) {
            // SAFETY: duplicates a descriptor of this process to a number that nothing here uses.
            Errno::result(unsafe { libc::dup2(*source, target) })?;
        }
        Ok(())
    };
    // SAFETY: the closure makes only system calls.
    unsafe { command.pre_exec(place) };
}

#[allow(
    unsafe_code,
    reason = "namespace and filter are made between fork and exec"
)]
fn prepare(command: &mut Command, own_ipc: bool, hidden: Hidden) {
    let prepare = move || {
        if own_ipc {
            unshare(CloneFlags::CLONE_NEWIPC)?;
        }
        hidden.apply()
    };
    // SAFETY: the closure makes only system calls.
    unsafe { command.pre_exec(prepare) };
}

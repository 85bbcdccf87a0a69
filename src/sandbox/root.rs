#![allow(
    unsafe_code,
    reason = "fork of a single-threaded process, signal dispositions before exec"
)]
//! The first process of the job's tree. It starts the job, adopts and reaps its orphans, and exits with the job's exit
//! code or signal.
//!
//! It is part of every image, so that a daemonized worker, whose parent has exited, is inside the tree that CRIU dumps.
//! It has only `/dev/null` open and does not depend on the supervisor, so a restore in another sandbox does not affect
//! it.

use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::ops::Range;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};

use nix::errno::Errno;
use nix::fcntl::OFlag;
use nix::libc;
use nix::sched::{CloneFlags, unshare};
use nix::sys::prctl;
use nix::sys::resource::{Resource, setrlimit};
use nix::sys::signal::{SigHandler, SigSet, SigmaskHow, Signal, signal, sigprocmask};
use nix::sys::wait::{WaitStatus, waitpid};
use nix::unistd::{
    ForkResult, Gid, Pid, Uid, fork, pipe2, setgroups, setresgid, setresuid, setsid,
};
use rustix::process::ioctl_tiocsctty;
use rustix::termios::isatty;

use super::callers_signals::CallersSignals;
use super::protocol::{Credentials, JobPids};
use super::seccomp::Hidden;
use super::user_namespace::drop_rights;

/// Exit code if the job's program does not exist (as in a shell).
const NOT_FOUND: i32 = 127;
/// Exit code if the job's program cannot be executed (as in a shell).
const NOT_RUNNABLE: i32 = 126;

/// The job's own first process.
pub(super) struct JobCommand<'a> {
    pub program: &'a OsString,
    pub arguments: &'a [OsString],
    pub hidden: Hidden,
    pub signals: CallersSignals,
    /// The job's user, if it differs from the supervisor's.
    pub user: Option<&'a Credentials>,
}

/// Forks the root process and waits until it has started the job.
///
/// `stdio` are the job's stdin, stdout and stderr. The error is that of the fork or of the job's
/// `execve`; in that case the root process ends at once with 126 or 127.
pub(super) fn start(
    job: &JobCommand<'_>,
    stdio: [OwnedFd; 3],
    isolated: bool,
    in_user_namespace: bool,
) -> io::Result<JobPids> {
    let (answer, answer_to) = pipe2(OFlag::O_CLOEXEC)?;
    // SAFETY: this process has one thread, so the child may continue as an ordinary program.
    match unsafe { fork() }? {
        ForkResult::Child => {
            drop(answer);
            let prepared = prepare(isolated, in_user_namespace, job.hidden);
            run(job, stdio, prepared, answer_to)
        }
        ForkResult::Parent { child } => {
            drop((stdio, answer_to));
            let mut text = String::new();
            File::from(answer).read_to_string(&mut text)?;
            match text.split_once(' ') {
                Some(("pid", pid)) => Ok(JobPids {
                    root: child.as_raw(),
                    job: pid
                        .parse()
                        .map_err(|_| io::Error::from(io::ErrorKind::InvalidData))?,
                }),
                Some(("errno", errno)) => Err(io::Error::from_raw_os_error(
                    errno.parse().unwrap_or(libc::EIO),
                )),
                _ => Err(io::Error::from(io::ErrorKind::UnexpectedEof)),
            }
        }
    }
}

fn run(
    job: &JobCommand<'_>,
    stdio: [OwnedFd; 3],
    prepared: io::Result<()>,
    answer_to: OwnedFd,
) -> ! {
    let started = prepared.and_then(|()| spawn_job(job, stdio));
    let (text, failed_with) = match &started {
        Ok(pid) => (format!("pid {pid}"), None),
        Err(error) => {
            let code = if error.kind() == io::ErrorKind::NotFound {
                NOT_FOUND
            } else {
                NOT_RUNNABLE
            };
            (
                format!("errno {}", error.raw_os_error().unwrap_or(libc::EIO)),
                Some(code),
            )
        }
    };
    // If the parent cannot be reached, it has exited, and this process will too.
    let _ = File::from(answer_to).write_all(text.as_bytes());
    match (started, failed_with) {
        (Ok(pid), _) => {
            close_from(3);
            ignore_signals();
            end_like(wait_for(pid))
        }
        (Err(_), code) => std::process::exit(code.unwrap_or(NOT_RUNNABLE)),
    }
}

fn prepare(isolated: bool, in_user_namespace: bool, hidden: Hidden) -> io::Result<()> {
    if isolated {
        // CRIU saves System V memory, semaphores and queues only with an IPC namespace that is not its own.
        unshare(CloneFlags::CLONE_NEWIPC)?;
    }
    // CRIU wants the root of a tree to lead a session.
    setsid()?;
    prctl::set_child_subreaper(true)?;
    sigprocmask(SigmaskHow::SIG_SETMASK, Some(&SigSet::empty()), None)?;
    // If the filter is refused, the job runs without it. A snapshot that fails because of `io_uring` reports it.
    let _ = hidden.apply();
    if in_user_namespace {
        drop_rights()?;
    }
    Ok(())
}

fn spawn_job(job: &JobCommand<'_>, stdio: [OwnedFd; 3]) -> io::Result<Pid> {
    let signals = job.signals;
    let user = job.user.map(|user| {
        let groups = user.groups.iter().copied().map(Gid::from_raw);
        let (uid, gid) = (Uid::from_raw(user.user), Gid::from_raw(user.group));
        (uid, gid, groups.collect::<Vec<_>>())
    });
    let [stdin, stdout, stderr] = stdio;
    let in_terminal = isatty(&stdout);
    let mut command = Command::new(job.program);
    command
        .args(job.arguments)
        .stdin(Stdio::from(stdin))
        .stdout(Stdio::from(stdout))
        .stderr(Stdio::from(stderr));
    // SAFETY: the closure makes only system calls.
    unsafe {
        command.pre_exec(move || {
            setsid()?;
            if in_terminal {
                // The job itself leads the session: CRIU (4.2.1) can restore a controlling terminal only for the
                // session's leader.
                ioctl_tiocsctty(io::stdout())?;
            }
            signals.apply();
            // The user id is changed last, because the steps above need root's rights.
            if let Some((user, group, groups)) = &user {
                setgroups(groups)?;
                setresgid(*group, *group, *group)?;
                setresuid(*user, *user, *user)?;
            }
            Ok(())
        });
    }
    let child = command.spawn()?;
    i32::try_from(child.id())
        .map(Pid::from_raw)
        .map_err(io::Error::other)
}

/// Ignores signals that schedulers send to all processes at once. The job may handle them and finish later, and would
/// be killed if this process died.
pub(super) fn ignore_signals() {
    for ignored in [
        Signal::SIGHUP,
        Signal::SIGINT,
        Signal::SIGQUIT,
        Signal::SIGTERM,
        Signal::SIGUSR1,
        Signal::SIGUSR2,
    ] {
        // SAFETY: ignoring runs no code. It cannot fail: all of them can be ignored.
        let _ = unsafe { signal(ignored, SigHandler::SigIgn) };
    }
}

/// Reaps exited children until the job has exited.
fn wait_for(job: Pid) -> WaitStatus {
    loop {
        match waitpid(None, None) {
            Ok(status @ (WaitStatus::Exited(pid, _) | WaitStatus::Signaled(pid, ..)))
                if pid == job =>
            {
                return status;
            }
            Ok(_) | Err(Errno::EINTR) => {}
            Err(_) => std::process::exit(NOT_RUNNABLE),
        }
    }
}

/// Ends this process with the job's exit code, or by the signal that killed the job.
fn end_like(status: WaitStatus) -> ! {
    if let WaitStatus::Exited(_, code) = status {
        std::process::exit(code);
    }
    if let WaitStatus::Signaled(_, killer, _) = status {
        // The job has already written its core file, if that was enabled. Another one would overwrite it.
        let _ = setrlimit(Resource::RLIMIT_CORE, 0, 0);
        // SAFETY: restores the default action.
        let _ = unsafe { signal(killer, SigHandler::SigDfl) };
        let _ = nix::sys::signal::raise(killer);
    }
    std::process::exit(NOT_RUNNABLE)
}

/// Closes all descriptors from `first` on.
pub(super) fn close_from(first: i32) {
    // SAFETY: nothing in this process uses a descriptor from `first` on any more.
    unsafe { libc::syscall(libc::SYS_close_range, first, u32::MAX, 0) };
}

/// Opens `/dev/null` as the three standard descriptors. It must be opened in the current mount namespace: an inherited
/// one would belong to a mount that CRIU cannot see.
pub(super) fn detach_standard_streams() -> io::Result<()> {
    let null = File::options().read(true).write(true).open("/dev/null")?;
    for number in 0..3 {
        // SAFETY: replaces a standard descriptor of this process, which nothing holds open by value.
        Errno::result(unsafe { libc::dup2(null.as_raw_fd(), number) })?;
    }
    Ok(())
}

/// Range of a job's first pid, which is random.
///
/// The range begins at 300: after a wrap-around, Linux never assigns a pid below 300 (`RESERVED_PIDS`), so those stay
/// free for CRIU during a restore. It ends well below the smallest usual `pid_max`, 32768, so that pids of the job do
/// not wrap soon. The pids differ between sandboxes because the CUDA driver binds an abstract socket `cuda-uvmfd-<inode
/// of the PID namespace>-<pid>` in the network namespace. A restored process keeps this name, while the kernel may
/// assign the inode to the next sandbox. With equal pids, `cuInit` there fails with 304
/// (`CUDA_ERROR_OPERATING_SYSTEM`), or a restore fails with "address in use".
const FIRST_PIDS: Range<u32> = 300..30_000;

/// Returns a random pid for the job's first process.
pub(super) fn draw_pid() -> io::Result<i32> {
    let mut bytes = [0; 4];
    getrandom::fill(&mut bytes)?;
    let pid = FIRST_PIDS.start + u32::from_ne_bytes(bytes) % (FIRST_PIDS.end - FIRST_PIDS.start);
    i32::try_from(pid).map_err(io::Error::other)
}

/// Makes the next process of this PID namespace get the next free pid after this one.
pub(super) fn number_on(pid: i32) -> io::Result<()> {
    fs::write("/proc/sys/kernel/ns_last_pid", pid.to_string())
}

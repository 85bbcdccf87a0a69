#![allow(
    unsafe_code,
    reason = "clone and execve between the supervisor and pid 1"
)]
//! Starts pid 1 of a sandbox by one `clone` with the namespace flags and one `execve`.
//!
//! The caller must be a thread that exists as long as the run: the kernel sends the parent-death signal when the
//! *thread* that called `clone` exits.

use std::ffi::{CString, OsStr, OsString};
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;
use std::ptr;
use std::sync::OnceLock;

use nix::errno::Errno;
use nix::libc;
use nix::sched::CloneFlags;
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use nix::unistd::{Pid, getegid, geteuid};

use super::{Forbidden, INIT_ARGUMENT, Isolation, Network, own_network, user_namespace};

/// Size of the cloned child's stack until its `execve`.
const CHILD_STACK_BYTES: usize = 64 << 10;
/// Descriptor of pid 1's control socket.
pub(super) const CONTROL_DESCRIPTOR: RawFd = 3;
/// Exit code of a child that could not become pid 1.
const EXEC_FAILED: isize = 125;

/// Reasons why a sandbox could not be started.
#[derive(Debug, thiserror::Error)]
pub enum SpawnError {
    /// The kernel refuses namespaces.
    #[error("cannot create PID and mount namespaces (needs CAP_SYS_ADMIN)")]
    NotPermitted(#[source] io::Error),
    /// The kernel refuses a user namespace, or an operation in it.
    #[error("cannot create namespaces without privileges ({step}): {forbidden}")]
    UserNamespace {
        /// The step that was refused.
        step: String,
        /// Cause of the refusal.
        forbidden: Forbidden,
        /// The kernel's answer.
        source: io::Error,
    },
    /// Another system call failed.
    #[error("cannot start the sandbox process")]
    System(#[source] io::Error),
}

impl SpawnError {
    pub(super) fn forbidden(step: String, source: io::Error) -> Self {
        let forbidden = Forbidden::find(&source, step.starts_with("mount"));
        Self::UserNamespace {
            step,
            forbidden,
            source,
        }
    }
}

/// Descriptor limit of the job: the limit with which ckpt-run was started.
static JOB_DESCRIPTORS: OnceLock<libc::rlimit> = OnceLock::new();
/// Limit on descriptors: the number that Linux gives a process by default (`fs.nr_open`).
const DESCRIPTORS_MAX: u64 = 1 << 20;
/// Limit with which ckpt-run can work: helpers get descriptors from 200 on.
const DESCRIPTORS_MIN: u64 = 256;

/// The limit on open descriptors is too low.
#[derive(Debug, thiserror::Error)]
#[error(
    "the limit on open files is {0}, and ckpt-run needs {DESCRIPTORS_MIN} or more: raise it (`ulimit -Hn`, or \
     LimitNOFILE= of a systemd service)"
)]
pub struct FewDescriptors(u64);

/// Raises this process's limit of open descriptors to the maximum, because each piece of kept GPU memory needs one. The
/// job gets the former limit.
///
/// # Errors
/// The maximum is too low.
pub fn raise_descriptor_limit() -> Result<(), FewDescriptors> {
    let Ok((soft, hard)) = getrlimit(Resource::RLIMIT_NOFILE) else {
        return Ok(());
    };
    if hard < DESCRIPTORS_MIN {
        return Err(FewDescriptors(hard));
    }
    let wanted = hard.min(DESCRIPTORS_MAX);
    if soft < wanted && setrlimit(Resource::RLIMIT_NOFILE, wanted, hard).is_ok() {
        let _ = JOB_DESCRIPTORS.set(libc::rlimit {
            rlim_cur: soft,
            rlim_max: hard,
        });
    }
    Ok(())
}

/// Makes a command of the user start with the job's descriptor limit.
pub fn with_job_descriptor_limit(command: &mut Command) -> &mut Command {
    let Some(limit) = JOB_DESCRIPTORS.get() else {
        return command;
    };
    // SAFETY: one system call, by a structure that is valid as long as the process.
    unsafe {
        command.pre_exec(move || match libc::setrlimit(libc::RLIMIT_NOFILE, limit) {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        })
    }
}

/// Raises this process's descriptor limit to its hard limit. CRIU restores the job's descriptors in processes that inherit
/// CRIU's limit, and raises it itself only with `CAP_SYS_RESOURCE`. The function may be called between fork and exec.
pub(super) fn raise_to_hard_limit() {
    let mut limit = libc::rlimit {
        rlim_cur: 0,
        rlim_max: 0,
    };
    // SAFETY: the kernel writes the structure.
    if unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) } == 0 {
        limit.rlim_cur = limit.rlim_max;
        // SAFETY: the kernel reads the structure. A refusal leaves the limit.
        unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit) };
    }
}

/// Returns true if an error number of the sandbox's setup means a missing privilege.
#[must_use]
pub fn privilege_missing(errno: i32) -> bool {
    errno == libc::EPERM || errno == libc::EACCES
}

/// Session keyring of a sandbox: keys of programs, and tickets of Kerberos.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Keyring {
    /// The supervisor's keyring.
    Inherited,
    /// An empty one, as after a login.
    New,
}

/// Starts `program` as pid 1 of a new sandbox, and returns the supervisor's end of its control socket.
///
/// `environment` is the complete environment of pid 1, and thus of the job.
pub(super) fn spawn(
    program: &Path,
    isolation: Isolation,
    keyring: Keyring,
    environment: &[(std::ffi::OsString, std::ffi::OsString)],
) -> Result<(Pid, UnixStream), SpawnError> {
    let (ours, theirs) = UnixStream::pair().map_err(SpawnError::System)?;
    let path = c_string(program.as_os_str())?;
    let arguments = [
        path.clone(),
        c_string(OsStr::new(INIT_ARGUMENT))?,
        c_string(&mode_of(isolation))?,
    ];
    let variables = environment
        .iter()
        .map(|(key, value)| {
            let mut text = key.clone().into_vec();
            text.push(b'=');
            text.extend_from_slice(value.as_bytes());
            CString::new(text).map_err(|e| SpawnError::System(e.into()))
        })
        .collect::<Result<Vec<_>, _>>()?;
    let argv = pointers(&arguments);
    let envp = pointers(&variables);
    let socket = theirs.as_raw_fd();

    // Without a PID namespace, pid 1 must survive the supervisor to kill the job. It notices the end of the socket.
    let dies_with_us = isolation.has_namespaces();
    let own = CloneFlags::CLONE_NEWPID | CloneFlags::CLONE_NEWNS;
    let flags = match isolation {
        Isolation::Namespaces => own,
        Isolation::User(Network::Host) => own | CloneFlags::CLONE_NEWUSER,
        Isolation::User(Network::Own) => own | CloneFlags::CLONE_NEWUSER | CloneFlags::CLONE_NEWNET,
        Isolation::None => CloneFlags::empty(),
    };
    let mut stack = vec![0u8; CHILD_STACK_BYTES];
    let child = Box::new(|| {
        if isolation.is_user() {
            user_namespace::keep_rights(isolation.has_network());
        }
        if keyring == Keyring::New && !join_new_keyring() {
            return EXEC_FAILED;
        }
        become_init(dies_with_us, socket, &path, &argv, &envp)
    });
    // SAFETY: without CLONE_VM the child runs on its own copy of the stack; `become_init` makes only
    // async-signal-safe calls and does not allocate.
    let pid = unsafe { nix::sched::clone(child, &mut stack, flags, Some(libc::SIGCHLD)) };
    match pid {
        Ok(pid) => Ok((pid, ours)),
        Err(errno) if isolation.is_user() => Err(SpawnError::forbidden(
            "create a user namespace".to_owned(),
            errno.into(),
        )),
        Err(Errno::EPERM) => Err(SpawnError::NotPermitted(Errno::EPERM.into())),
        Err(errno) => Err(SpawnError::System(errno.into())),
    }
}

/// Returns pid 1's argument for its isolation. For a user namespace it contains the ids to be mapped, and for a
/// network namespace the machine's settings.
fn mode_of(isolation: Isolation) -> OsString {
    match isolation {
        Isolation::Namespaces => "namespaces".into(),
        Isolation::User(Network::Host) => format!("user {} {}", geteuid(), getegid()).into(),
        Isolation::User(Network::Own) => {
            let mut mode = OsString::from(format!("network {} {} ", geteuid(), getegid()));
            mode.push(own_network::of_machine());
            mode
        }
        Isolation::None => "none".into(),
    }
}

/// Gives this process an empty session keyring; returns false if it keeps the former one. The function may be called
/// between fork and exec.
fn join_new_keyring() -> bool {
    let no_name = std::ptr::null::<libc::c_char>();
    // SAFETY: a null pointer asks for a keyring without a name.
    let joined =
        unsafe { libc::syscall(libc::SYS_keyctl, libc::KEYCTL_JOIN_SESSION_KEYRING, no_name) };
    // Without the call, or under a filter that refuses it, no process can read keys.
    joined >= 0 || matches!(Errno::last(), Errno::ENOSYS | Errno::EPERM)
}

/// Executes pid 1 in the cloned child. Makes only system calls, because another thread may have held the allocator's lock.
fn become_init(
    dies_with_us: bool,
    socket: RawFd,
    path: &CString,
    argv: &[*const libc::c_char],
    envp: &[*const libc::c_char],
) -> isize {
    if dies_with_us {
        // SAFETY: plain system call with constant arguments.
        unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
    }
    if socket == CONTROL_DESCRIPTOR {
        // SAFETY: clears close-on-exec on a descriptor that this process has.
        unsafe { libc::fcntl(socket, libc::F_SETFD, 0) };
    } else {
        // SAFETY: both numbers are valid in the child; whatever was at the target is not used after exec.
        unsafe { libc::dup2(socket, CONTROL_DESCRIPTOR) };
    }
    if let Some(limit) = JOB_DESCRIPTORS.get() {
        // SAFETY: the structure is valid as long as the process.
        unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, limit) };
    }
    // SAFETY: the arrays are NULL-terminated and point into strings that outlive the call.
    unsafe { libc::execve(path.as_ptr(), argv.as_ptr(), envp.as_ptr()) };
    EXEC_FAILED
}

fn c_string(text: &OsStr) -> Result<CString, SpawnError> {
    CString::new(text.as_bytes()).map_err(|e| SpawnError::System(e.into()))
}

fn pointers(strings: &[CString]) -> Vec<*const libc::c_char> {
    strings
        .iter()
        .map(|s| s.as_ptr())
        .chain([ptr::null()])
        .collect()
}

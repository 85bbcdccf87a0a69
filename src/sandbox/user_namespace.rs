#![allow(unsafe_code, reason = "capabilities between clone and execve")]
//! The user namespace of an ordinary user's sandbox. CRIU has all capabilities over the job in it, and none outside.
//!
//! ```text
//! clone(CLONE_NEWUSER)   the child has all capabilities in the new namespace
//! keep_rights            makes them ambient, so that execve keeps them although the user is not root there
//! pid 1, map_user        maps the user's uid and gid to the same numbers; no other id is mapped
//! root, drop_rights      removes all capabilities before the job starts
//! ```
//! Setuid programs and programs with file capabilities gain no rights, because their owners are not mapped.

use std::fs;
use std::io;
use std::path::Path;
use std::thread;
use std::time::Duration;

use nix::errno::Errno;
use nix::libc;
use nix::sched::{CloneFlags, unshare};
use nix::sys::prctl;
use nix::unistd::{getegid, geteuid};

use crate::clock;

/// The machine's own user namespace (`USER_NS_INIT_INO` of linux/nsfs.h).
const INITIAL: &str = "user:[4026531837]";
/// Number of capabilities for which the kernel's sets have room.
const CAPABILITIES_MAX: libc::c_ulong = 64;
/// Time limit for other threads to exit, and interval between two checks.
const THREADS_END_WITHIN: Duration = Duration::from_secs(2);
const THREADS_POLL: Duration = Duration::from_millis(1);
/// `_LINUX_CAPABILITY_VERSION_3`.
const CAPABILITY_VERSION: u32 = 0x2008_0522;

/// Returns true if this process is in another user namespace than the machine's own, as in a rootless container: it has no
/// privileges on the machine, which the kernel requires for some of CRIU's work (`PTRACE_O_SUSPEND_SECCOMP` and others).
#[must_use]
pub fn is_in_user_namespace() -> bool {
    let namespace = fs::read_link("/proc/self/ns/user");
    namespace.is_ok_and(|name| name.as_os_str() != INITIAL)
}

/// Capabilities that have no effect in the namespace, by their numbers in linux/capability.h, all below 32. CRIU would use
/// them and fail: to become root, which is not mapped (`CAP_SETUID`), to change the machine's network (`CAP_NET_ADMIN`), and
/// to raise limits (`CAP_SYS_RESOURCE`).
const WITHOUT_EFFECT: [libc::c_ulong; 3] = [7, CAP_NET_ADMIN, 24];
const CAP_NET_ADMIN: libc::c_ulong = 12;

/// Moves this process into a user namespace of its own and into these other namespaces, in which it has all capabilities
/// until it executes a program. The process must have one thread; the function waits for others that are about to exit.
///
/// # Errors
/// The kernel or a security module refuses it.
pub fn enter_user_namespace(others: CloneFlags) -> nix::Result<()> {
    let ids = (geteuid().as_raw(), getegid().as_raw());
    let begun = clock::now();
    while threads() > 1 && begun.elapsed() < THREADS_END_WITHIN {
        thread::sleep(THREADS_POLL);
    }
    unshare(CloneFlags::CLONE_NEWUSER | others)?;
    map_user(ids).map_err(|error| error.raw_os_error().map_or(Errno::EIO, Errno::from_raw))
}

fn threads() -> usize {
    fs::read_dir("/proc/self/task").map_or(1, Iterator::count)
}

/// Lets this process keep its capabilities when it executes a program, and that program when it executes others.
///
/// The function may be called between clone and execve, because it makes only system calls. If the kernel refuses them, the
/// first step of pid 1 fails. `CAP_NET_ADMIN` has an effect on a network namespace that was created together with the
/// user namespace.
pub(super) fn keep_rights(owns_network: bool) {
    let Some(mut sets) = capabilities() else {
        return;
    };
    for set in &mut sets {
        set.inheritable = set.permitted;
    }
    // As root of the namespace, programs have the inheritable capabilities too.
    let kept = |capability| owns_network && capability == CAP_NET_ADMIN;
    let dropped = |capability| WITHOUT_EFFECT.contains(&capability) && !kept(capability);
    for capability in WITHOUT_EFFECT.into_iter().filter(|one| dropped(*one)) {
        sets[0].inheritable &= !(1 << capability);
    }
    set_capabilities(&sets);
    for capability in 0..CAPABILITIES_MAX {
        let (option, first, second) = if dropped(capability) {
            (libc::PR_CAPBSET_DROP, capability, 0)
        } else {
            let raise = libc::PR_CAP_AMBIENT_RAISE as libc::c_ulong;
            (libc::PR_CAP_AMBIENT, raise, capability)
        };
        // SAFETY: numbers only. The kernel refuses those that it does not know.
        unsafe { libc::prctl(option, first, second, 0, 0) };
    }
}

/// Drops all capabilities. If the user is root in the namespace, programs that it executes have them again.
///
/// # Errors
/// The kernel refuses it.
pub(super) fn drop_rights() -> io::Result<()> {
    // Clearing the inheritable set also clears the ambient set.
    let none = [Set::default(); 2];
    if set_capabilities(&none) {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

/// Parses the user and group from pid 1's argument `user UID GID` or `network UID GID SETTINGS`.
pub(super) fn user_of(mode: &str) -> Option<(u32, u32)> {
    let mut words = mode.split(' ');
    match words.next()? {
        "user" | "network" => Some((words.next()?.parse().ok()?, words.next()?.parse().ok()?)),
        _ => None,
    }
}

/// Returns the settings in pid 1's argument `network UID GID SETTINGS`.
pub(super) fn network_of(mode: &str) -> Option<&str> {
    mode.strip_prefix("network ")?.split(' ').nth(2)
}

/// Maps the user and group that created this process's namespace to the same numbers in it.
///
/// # Errors
/// The kernel or a security module refuses it.
pub(super) fn map_user((user, group): (u32, u32)) -> io::Result<()> {
    let of_us = Path::new("/proc/self");
    // The kernel requires this before it maps a group, because the process could leave a group that is denied access.
    fs::write(of_us.join("setgroups"), "deny")?;
    fs::write(of_us.join("uid_map"), format!("{user} {user} 1"))?;
    fs::write(of_us.join("gid_map"), format!("{group} {group} 1"))?;
    // Makes the process's files in /proc readable for CRIU.
    Ok(prctl::set_dumpable(true)?)
}

/// `struct __user_cap_data_struct`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Set {
    effective: u32,
    permitted: u32,
    inheritable: u32,
}

/// `struct __user_cap_header_struct`, of this process.
#[repr(C)]
struct Header {
    version: u32,
    pid: i32,
}

static OURS: Header = Header {
    version: CAPABILITY_VERSION,
    pid: 0,
};

fn capabilities() -> Option<[Set; 2]> {
    let mut sets = [Set::default(); 2];
    // SAFETY: both structures are as the kernel wants them in this version; it writes two sets.
    let result = unsafe { libc::syscall(libc::SYS_capget, &raw const OURS, sets.as_mut_ptr()) };
    (result == 0).then_some(sets)
}

fn set_capabilities(sets: &[Set; 2]) -> bool {
    // SAFETY: both structures are as the kernel wants them in this version; it reads two sets.
    Errno::result(unsafe { libc::syscall(libc::SYS_capset, &raw const OURS, sets.as_ptr()) })
        .is_ok()
}

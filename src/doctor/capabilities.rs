//! The capabilities that snapshots and restores need, and those that this process lacks.
//!
//! The table was made by leaving out one capability at a time, in containers (`tests/end_to_end/containers`). Without
//! some of them a snapshot works and only the restore fails, so they are checked before there is anything to lose. This
//! file does not know how the result is reported.

use std::fs;

use procfs::process::{Process, Status};

/// `Seccomp:` in `/proc/PID/status` of a process with a filter.
const SECCOMP_FILTERED: u32 = 2;

/// A capability: its number in linux/capability.h, and its name.
type Capability = (u8, &'static str);

/// Needed by any job; `CAP_SYS_PTRACE` where Yama restricts tracing, as on Ubuntu, or processes of the job have other
/// capabilities. `CAP_CHECKPOINT_RESTORE` is for those without `CAP_SYS_ADMIN`.
const NEEDED: [Capability; 6] = [
    (8, "CAP_SETPCAP"),
    (12, "CAP_NET_ADMIN"),
    (18, "CAP_SYS_CHROOT"),
    (19, "CAP_SYS_PTRACE"),
    (21, "CAP_SYS_ADMIN"),
    (25, "CAP_SYS_TIME"),
];

/// The machine's own user namespace (`USER_NS_INIT_INO` of linux/nsfs.h).
const INITIAL_USER_NAMESPACE: &str = "user:[4026531837]";

/// Returns the needed capabilities that an effective set lacks.
pub(crate) fn missing(effective: u64) -> Vec<&'static str> {
    let absent = NEEDED.iter().filter(|(bit, _)| effective & (1 << bit) == 0);
    absent.map(|(_, name)| *name).collect()
}

/// Returns true if a process is under a seccomp filter. The kernel does not let such a process lift the filters of
/// others (`PTRACE_O_SUSPEND_SECCOMP`), and its children have at least the same filter: it can dump nothing.
pub(crate) fn is_filtered(status: &Status) -> bool {
    status.seccomp == Some(SECCOMP_FILTERED)
}

/// Returns true if this process is root in a user namespace only, as in a rootless container: the kernel requires
/// rights on the machine (`PTRACE_O_SUSPEND_SECCOMP` and others).
pub(crate) fn is_in_user_namespace() -> bool {
    let namespace = fs::read_link("/proc/self/ns/user");
    namespace.is_ok_and(|name| name.as_os_str() != INITIAL_USER_NAMESPACE)
}

/// Says at a run's beginning what its snapshots or restores will fail of.
pub(crate) fn warn_of_missing() {
    let Ok(status) = Process::myself().and_then(|process| process.status()) else {
        return;
    };
    let missing = missing(status.capeff);
    if !missing.is_empty() {
        tracing::warn!(
            "snapshots or restores will fail here without {}: see `ckpt-run doctor`",
            missing.join(", ")
        );
    }
    if is_in_user_namespace() {
        tracing::warn!(
            "snapshots or restores will fail in this user namespace: see `ckpt-run doctor`"
        );
    }
    if is_filtered(&status) {
        tracing::warn!(
            "snapshots will fail under this seccomp filter: in a container set seccomp=unconfined"
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_missing_is_named() {
        assert!(missing(u64::MAX).is_empty());
        assert_eq!(missing(!(1 << 25)), ["CAP_SYS_TIME"]);
        // What docker and containerd give a container that asks for nothing.
        assert_eq!(
            missing(0xa804_25fb),
            [
                "CAP_NET_ADMIN",
                "CAP_SYS_PTRACE",
                "CAP_SYS_ADMIN",
                "CAP_SYS_TIME"
            ]
        );
        assert_eq!(missing(0).len(), NEEDED.len());
    }
}

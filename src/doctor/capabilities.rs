//! The capabilities that snapshots and restores need, and the check for those missing from this process.
//!
//! The table was found by leaving out one capability at a time, in containers (tests/containers). Without some of them
//! a snapshot succeeds and only the restore fails, so they are checked before any work can be lost. This module does
//! not know how the results are shown.

use procfs::process::Process;

use super::seccomp::rejected_calls;
use crate::config::Isolation;

/// A capability: its number in linux/capability.h and its name.
type Capability = (u8, &'static str);

/// Capabilities that any job needs. `CAP_SYS_PTRACE` is needed where Yama restricts tracing, as on Ubuntu, or where
/// processes of the job have other capabilities. `CAP_CHECKPOINT_RESTORE` is not listed: only processes without
/// `CAP_SYS_ADMIN` need it. Without `CAP_DAC_READ_SEARCH` it is not known which program changes which files, and
/// restores are refused once files have changed.
const NEEDED: [Capability; 7] = [
    (2, "CAP_DAC_READ_SEARCH"),
    (8, "CAP_SETPCAP"),
    (12, "CAP_NET_ADMIN"),
    (18, "CAP_SYS_CHROOT"),
    (19, "CAP_SYS_PTRACE"),
    (21, "CAP_SYS_ADMIN"),
    (25, "CAP_SYS_TIME"),
];

/// Returns the needed capabilities that are not in the effective set.
pub(crate) fn missing(effective: u64) -> Vec<&'static str> {
    let absent = NEEDED.iter().filter(|(bit, _)| effective & (1 << bit) == 0);
    absent.map(|(_, name)| *name).collect()
}

/// Warns at the start of a run about every missing privilege that will make its snapshots or restores fail. A job in a user
/// namespace needs none; "auto" chooses one where `CAP_SYS_ADMIN` is missing.
pub(crate) fn warn_of_missing(isolation: Isolation) {
    let Ok(status) = Process::myself().and_then(|process| process.status()) else {
        return;
    };
    let missing = missing(status.capeff);
    let needs_them = match isolation {
        Isolation::Namespaces | Isolation::None => true,
        Isolation::Auto => !missing.contains(&"CAP_SYS_ADMIN"),
        Isolation::User => false,
    };
    if needs_them && !missing.is_empty() {
        tracing::warn!(
            "snapshots or restores will fail here without {}: see `ckpt-run doctor`",
            missing.join(", ")
        );
    }
    let rejected = rejected_calls(&status);
    if !rejected.is_empty() {
        tracing::warn!(
            "snapshots will fail under this seccomp filter, which rejects {}: in a container set seccomp=unconfined",
            rejected.join(" and ")
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_capabilities_are_named() {
        assert!(missing(u64::MAX).is_empty());
        assert_eq!(missing(!(1 << 25)), ["CAP_SYS_TIME"]);
        // The capabilities that docker and containerd grant a container by default.
        assert_eq!(
            missing(0xa804_25fb),
            [
                "CAP_DAC_READ_SEARCH",
                "CAP_NET_ADMIN",
                "CAP_SYS_PTRACE",
                "CAP_SYS_ADMIN",
                "CAP_SYS_TIME"
            ]
        );
        assert_eq!(missing(0).len(), NEEDED.len());
    }
}

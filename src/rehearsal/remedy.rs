//! Remedies for a failed snapshot, by the kind of the failure. The reason itself often contains a more specific remedy.

/// Returns the remedy; `kind` is a word of the event log.
pub(super) fn of_snapshot(kind: Option<&str>) -> &'static str {
    match kind {
        Some("busy") => {
            "submit shorter GPU work, or raise snapshot.lock_timeout or snapshot.timeout, and rehearse again"
        }
        Some("changed") => {
            "rehearse again with --after, so that the job has started all its processes"
        }
        Some("unsupported") => {
            "remove the cause named above; docs/guide/troubleshooting.md and docs/guide/limits.md list the alternatives"
        }
        Some("memory") => {
            "free host memory, raise the limit of the container, or set cuda.memory = \"resident\""
        }
        Some("disk") => "free disk space, or choose another --store",
        Some("privilege") => "run as root; in a container, grant what `ckpt-run doctor` asks for",
        Some("driver") => "run `ckpt-run doctor`; a newer NVIDIA driver may help",
        Some("criu") => {
            "remove the cause named above (docs/guide/troubleshooting.md); --keep keeps CRIU's log"
        }
        Some("store") => "check the disk of the store, or choose another --store",
        _ => "rehearse again with --keep and read the logs",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::run::FailureKind;

    #[test]
    fn kinds_that_users_can_fix_have_specific_remedies() {
        let kinds = [
            FailureKind::Busy,
            FailureKind::Changed,
            FailureKind::Unsupported,
            FailureKind::Memory,
            FailureKind::Disk,
            FailureKind::Privilege,
            FailureKind::Driver,
            FailureKind::Criu,
            FailureKind::Store,
        ];
        for kind in kinds {
            assert_ne!(
                of_snapshot(Some(kind.as_str())),
                of_snapshot(None),
                "{kind:?}"
            );
        }
    }
}

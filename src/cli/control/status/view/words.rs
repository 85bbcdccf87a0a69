//! Events in words.

use crate::history::{Event, time_in_words};
use crate::run::size;

/// The meaning of an event for the user.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Good,
    Bad,
    /// The job computes again.
    Back,
    /// The job is paused or about to be stopped, as was requested.
    Rest,
    Plain,
}

pub(super) fn kind(event: &Event) -> Kind {
    match event {
        Event::Snapshot { .. } => Kind::Good,
        Event::Crashed { .. }
        | Event::Hung { .. }
        | Event::RestoreFailed { .. }
        | Event::SnapshotFailed { .. } => Kind::Bad,
        Event::Started { .. } | Event::Restored { .. } | Event::Unpaused { .. } => Kind::Back,
        Event::Paused { .. } | Event::Preempted { .. } => Kind::Rest,
        Event::Opened { .. }
        | Event::SnapshotBegan { .. }
        | Event::RestoreBegan { .. }
        | Event::Computing { .. }
        | Event::Interval { .. }
        | Event::Hook { .. }
        | Event::Ended { .. }
        | Event::Unknown => Kind::Plain,
    }
}

/// Returns `None` for events that other events describe better.
pub(super) fn in_words(event: &Event) -> Option<String> {
    Some(match event {
        Event::SnapshotBegan { .. }
        | Event::Computing { .. }
        | Event::RestoreBegan { .. }
        | Event::Unknown => return None,
        Event::Opened { version, pid, .. } => format!("ckpt-run {version} started, pid {pid}"),
        Event::Started { .. } => "the job started".to_owned(),
        Event::Snapshot {
            image,
            trigger,
            freeze_seconds,
            raw_bytes,
            ..
        } => format!(
            "snapshot {image} ({trigger}), frozen {}, {}",
            time_in_words(*freeze_seconds),
            size(*raw_bytes)
        ),
        Event::SnapshotFailed { kind, reason, .. } => format!("snapshot failed ({kind}): {reason}"),
        Event::Crashed {
            how, lost_seconds, ..
        } => {
            format!(
                "the job crashed: {how}, {} of work lost",
                time_in_words(*lost_seconds)
            )
        }
        Event::Hung { reason, .. } => format!("the job hung: {reason}"),
        Event::Restored { image, seconds, .. } => {
            format!("restored {image} in {}", time_in_words(*seconds))
        }
        Event::RestoreFailed { image, reason } => format!("restore of {image} failed: {reason}"),
        Event::Paused { image } => format!("paused, saved in image {image}"),
        Event::Unpaused { seconds } => format!("unpaused in {}", time_in_words(*seconds)),
        Event::Interval { seconds, why } => {
            format!("a snapshot every {}: {why}", time_in_words(*seconds))
        }
        Event::Preempted { cloud, action, .. } => {
            format!("{cloud} takes this machine back ({action})")
        }
        Event::Hook {
            hook,
            outcome,
            seconds,
        } => {
            format!("hook {hook}: {outcome} after {}", time_in_words(*seconds))
        }
        Event::Ended { how, code } => format!("ckpt-run ended: {how}, exit code {code}"),
    })
}

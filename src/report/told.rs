//! Descriptions of events, for the table.

use crate::history::{Event, time_in_words};
use crate::run::size;

/// Describes an event: a short name and details. `None` for an event that another event repeats.
pub(super) fn told(event: &Event) -> Option<(&'static str, String)> {
    let words = match event {
        Event::SnapshotBegan { .. }
        | Event::Computing { .. }
        | Event::RestoreBegan { .. }
        | Event::Unknown => return None,
        Event::Opened { version, pid, .. } => {
            ("supervisor", format!("version {version}, process {pid}"))
        }
        Event::Started { pid } => (
            "started",
            pid.map_or_else(String::new, |pid| format!("process {pid}")),
        ),
        Event::Snapshot {
            image,
            trigger,
            freeze_seconds,
            durable_seconds,
            stored_bytes,
            ..
        } => {
            let (freeze, durable) = (
                time_in_words(*freeze_seconds),
                time_in_words(*durable_seconds),
            );
            let stored = size(*stored_bytes);
            (
                "snapshot",
                format!(
                    "{image} ({trigger}): frozen {freeze}, durable after {durable}, {stored} new"
                ),
            )
        }
        Event::SnapshotFailed { kind, reason, .. } => {
            ("snapshot failed", format!("{kind}: {reason}"))
        }
        Event::Crashed {
            how, lost_seconds, ..
        } => (
            "crashed",
            format!(
                "{how}, {} since the newest image",
                time_in_words(*lost_seconds)
            ),
        ),
        Event::Hung {
            reason,
            silent_seconds,
        } => (
            "hung",
            format!("{reason} for {}", time_in_words(*silent_seconds)),
        ),
        Event::Restored { image, seconds, .. } => (
            "restored",
            format!("from {image}, in {}", time_in_words(*seconds)),
        ),
        Event::RestoreFailed { image, reason } => ("restore failed", format!("{image}: {reason}")),
        Event::Paused { image } => ("paused", format!("as in {image}")),
        Event::Unpaused { seconds } => ("unpaused", format!("in {}", time_in_words(*seconds))),
        Event::Interval { seconds, why } => {
            ("interval", format!("{}: {why}", time_in_words(*seconds)))
        }
        Event::Preempted { cloud, action, .. } => (
            "preempted",
            format!("{cloud} takes the machine back ({action})"),
        ),
        Event::Hook {
            hook,
            outcome,
            seconds,
        } => (
            "hook",
            format!("{hook} {outcome}, {}", time_in_words(*seconds)),
        ),
        Event::Ended { how, code } => ("ended", format!("{how}, exit code {code}")),
    };
    Some(words)
}

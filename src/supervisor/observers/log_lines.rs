//! The lines that notices have on stderr.

use std::time::Duration;

use crate::config::{HangAction, Occasion};
use crate::restore::restore_image::{CUT_NAMED_MAX, Restored};
use crate::run::format::{seconds, size};
use crate::run::image_facts::Phase;
use crate::snapshot::take_snapshot::Snapshotted;
use crate::store::ImageId;
use crate::supervisor::hooks::hook_command::{Ended, Outcome};
use crate::supervisor::notice::{AfterFailure, AfterSnapshotFailure, Notice};
use crate::supervisor::policy::interval;

pub(super) fn log(notice: &Notice) {
    match notice {
        Notice::Interval(chosen) => {
            let every = interval::rough(chosen.interval);
            tracing::info!("interval auto: a snapshot every {every}: {chosen}");
        }
        Notice::TooDear(text) => tracing::warn!("{text}"),
        Notice::Snapshot(done) => snapshot(done),
        Notice::SnapshotFailed { kind, reason, then } => snapshot_failed(kind, reason, *then),
        Notice::Preempted(notice) => tracing::warn!(
            action = notice.action.as_str(),
            "{} takes this machine back at {}: the last snapshot is taken",
            notice.cloud.name(),
            notice.deadline.strftime("%H:%M:%SZ")
        ),
        Notice::SentTerm => tracing::info!("sending SIGTERM to the job"),
        Notice::Paused(_) => tracing::info!(
            "paused: the job is frozen and its GPUs are free; `ckpt-run unpause` continues it"
        ),
        Notice::Unpaused(took) => {
            tracing::info!(took = %seconds(*took), "unpaused: the job computes again");
        }
        Notice::StaysPaused {
            failure: Some(reason),
            lost,
        } => {
            let meaning = if *lost {
                "the job did not continue and will be restored"
            } else {
                "the job stays paused"
            };
            tracing::error!("{meaning}: {reason}");
        }
        Notice::StopsUnsaved { why, newest } => stops_unsaved(why, newest),
        Notice::Hung {
            reason,
            log,
            action,
            ..
        } => {
            let log = log.as_ref().map(|log| log.display().to_string());
            let log = log.unwrap_or_else(|| "none".to_owned());
            let follows = match action {
                HangAction::Restore => "it is killed and restored",
                HangAction::Report => "no action is taken (hang.action)",
            };
            tracing::error!(log = %log, "the job hangs, {reason}: {follows}");
        }
        Notice::SilenceLeftOut(newest) => {
            tracing::info!(back_to = %newest, "skipping the images that were taken while the job was silent");
        }
        Notice::SuspectEnded => {
            tracing::debug!("the suspected job ended before it was declared hung");
        }
        exit_or_restore => log_attempt(exit_or_restore),
    }
}

/// Logs a notice of an exit or a restore. Other notices have no line.
fn log_attempt(notice: &Notice) {
    match notice {
        Notice::NoImageYet => {
            tracing::info!("the run has no image yet: the job starts from the beginning");
        }
        Notice::NoImageLeft => {
            tracing::warn!("no image could be restored: the job starts from the beginning");
        }
        Notice::Unreadable {
            image,
            instead,
            reason,
        } => {
            let instead = instead.map_or("there is no older one", |_| "an older one is restored");
            tracing::warn!(image = %image, "the image cannot be read, {instead}: {reason}");
        }
        Notice::PausedJobCrashed(status) => {
            tracing::warn!(end = %status, "the paused job crashed; `ckpt-run unpause` restores it");
        }
        Notice::RestoreDue(status, delay) => {
            tracing::warn!(end = %status, wait = %seconds(*delay), "the job crashed");
        }
        Notice::RestartDue(status, delay) => {
            tracing::warn!(end = %status, wait = %seconds(*delay), "the job ended without an image; it starts from the beginning");
        }
        Notice::GaveUp {
            status: Some(status),
            reason,
            ..
        } => tracing::error!(end = %status, "giving up: {reason}"),
        Notice::Restored { image, restored } => report_restored(*image, restored),
        Notice::RestoreFailed {
            image,
            reason,
            then: AfterFailure::Retry(delay),
        } => {
            tracing::warn!(image = %image, wait = %seconds(*delay), "restore failed; the image will be tried again: {reason}");
        }
        Notice::RestoreFailed {
            image,
            reason,
            then: AfterFailure::Older,
        } => tracing::error!(image = %image, "restore failed: {reason}"),
        Notice::NewerAbandoned(image) => {
            tracing::info!(back_to = %image, "the run abandons newer images; `ckpt-run restore IMAGE` can still restore one");
        }
        Notice::NewerTakenUp => {
            tracing::info!("the run keeps its newer images: the older image did not run");
        }
        _ => {}
    }
}

fn snapshot(done: &Snapshotted) {
    tracing::info!(
        image = %done.id,
        trigger = done.facts.trigger.as_str(),
        freeze = %seconds(done.freeze),
        durable = %seconds(done.total),
        raw = %size(done.raw_bytes),
        stored = %size(done.stored_bytes),
        phases = %in_words(&done.facts.phases),
        "snapshot"
    );
}

fn snapshot_failed(kind: &str, reason: &str, then: AfterSnapshotFailure) {
    match then {
        AfterSnapshotFailure::Ended => {
            tracing::info!("snapshot cancelled: the job ended");
        }
        AfterSnapshotFailure::Vetoed => tracing::info!("snapshot skipped: {reason}"),
        AfterSnapshotFailure::Killed => tracing::error!(
            kind,
            "snapshot failed; the job may be damaged and is killed: {reason}"
        ),
        AfterSnapshotFailure::Continues { failed } => tracing::warn!(
            kind,
            failed,
            "snapshot failed; the job continues, older images are unchanged: {reason}"
        ),
    }
}

fn stops_unsaved(why: &str, newest: &Result<Option<ImageId>, String>) {
    match newest {
        Ok(Some(id)) => {
            tracing::warn!(image = %id, "stopping without a new image ({why}); the run continues from the newest one");
        }
        Ok(None) => {
            tracing::warn!(
                "stopping without an image ({why}); the run starts from the beginning next time"
            );
        }
        Err(reason) => tracing::warn!(
            "stopping without a new image ({why}); cannot list the older images: {reason}"
        ),
    }
}

fn report_restored(id: ImageId, restored: &Restored) {
    let cut = &restored.cut;
    for cut in cut.iter().take_while(|_| cut.len() <= CUT_NAMED_MAX) {
        tracing::info!(
            file = %cut.path.display(),
            bytes = %size(cut.bytes),
            kept = %cut.kept.display(),
            "set aside what was written after the snapshot"
        );
    }
    if restored.input_lost {
        tracing::warn!(
            "the job reads later input only: what it read after the snapshot is not available again"
        );
    }
    let (took, phases) = (seconds(restored.total), in_words(&restored.phases));
    tracing::info!(image = %id, %took, %phases, "restored");
}

fn in_words(phases: &[Phase]) -> String {
    let words = |phase: &Phase| format!("{} {:.3}", phase.name, phase.seconds);
    phases.iter().map(words).collect::<Vec<_>>().join(", ")
}

/// Logs the end of a hook that failed. `limit`: `hooks.timeout`.
pub(super) fn hook_ended(ended: &Ended, limit: Duration) {
    let (name, took) = (ended.occasion.as_str(), ended.took);
    match &ended.outcome {
        Outcome::Done => tracing::debug!(took = %seconds(took), "hook {name} done"),
        Outcome::Veto if ended.occasion == Occasion::BeforeSnapshot => {
            tracing::debug!(took = %seconds(took), "hook {name} cancelled the snapshot");
        }
        Outcome::Veto => {
            tracing::warn!("hook {name} failed, ckpt-run continues: exit code 75");
        }
        Outcome::Failed(why) => {
            tracing::warn!("hook {name} failed, ckpt-run continues: {why}");
        }
        Outcome::TimedOut => tracing::warn!(
            after = %seconds(took),
            "hook {name} exceeded its time ({}) and was killed, ckpt-run continues",
            if took < limit { "a part of the grace period" } else { "hooks.timeout" }
        ),
    }
}

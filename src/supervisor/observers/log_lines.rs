//! The lines that notices have on stderr.

use std::path::Path;
use std::time::Duration;

use crate::config::{HangAction, Occasion};
use crate::restore::restore_image::Restored;
use crate::run::format::{seconds, size};
use crate::run::image_facts::Phase;
use crate::snapshot::take_snapshot::Snapshotted;
use crate::store::ImageId;
use crate::supervisor::hooks::hook_command::{Ended, Outcome};
use crate::supervisor::notice::{AfterFailure, AfterSnapshotFailure, Notice};
use crate::supervisor::policy::interval;

/// Limit on the cut files that are named, a line each, after a restore.
const CUT_NAMED_MAX: usize = 5;

pub(super) fn log(notice: &Notice) {
    match notice {
        Notice::Interval(chosen) => {
            let every = interval::rough(chosen.interval);
            tracing::info!("interval auto: a snapshot every {every}: {chosen}");
        }
        Notice::TooDear(text) => tracing::warn!("{text}"),
        Notice::Snapshot(done) => snapshot(done),
        Notice::SnapshotFailed { kind, reason, then } => snapshot_failed(kind, reason, *then),
        Notice::SentTerm => tracing::info!("sending SIGTERM to the job"),
        Notice::Paused(_) => tracing::info!(
            "paused: the job stands still, its GPUs are free; `ckpt-run unpause` lets it go on"
        ),
        Notice::Unpaused(took) => {
            tracing::info!(took = %seconds(*took), "unpaused: the job computes again");
        }
        Notice::StaysPaused {
            failure: Some(reason),
            lost,
        } => {
            let meaning = if *lost {
                "the job does not go on and will be restored"
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
                HangAction::Report => "it is left alone (hang.action)",
            };
            tracing::error!(log = %log, "the job hangs, {reason}: {follows}");
        }
        Notice::SilenceLeftOut(newest) => {
            tracing::info!(back_to = %newest, "images from the silence are left out");
        }
        Notice::SuspectEnded => {
            tracing::debug!("the job has ended, or is about to, before it was taken for hung");
        }
        exit_or_restore => log_attempt(exit_or_restore),
    }
}

/// Logs a notice of an exit or a restore. The rest has no line.
fn log_attempt(notice: &Notice) {
    match notice {
        Notice::NoImageYet => {
            tracing::info!("the run was begun before but has no image yet: it begins anew");
        }
        Notice::NoImageLeft => {
            tracing::warn!("no image could be restored: the job begins anew");
        }
        Notice::Unreadable {
            image,
            instead,
            reason,
        } => {
            let instead = instead.map_or("there is no older one", |_| "an older one is used");
            tracing::warn!(image = %image, "the image cannot be read, {instead}: {reason}");
        }
        Notice::PausedJobCrashed(status) => {
            tracing::warn!(end = %status, "the paused job crashed; `ckpt-run unpause` restores it");
        }
        Notice::RestoreDue(status, delay) => {
            tracing::warn!(end = %status, wait = %seconds(*delay), "the job crashed");
        }
        Notice::RestartDue(status, delay) => {
            tracing::warn!(end = %status, wait = %seconds(*delay), "the job ended; there is no image, it begins anew");
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
            tracing::warn!(image = %image, wait = %seconds(*delay), "restore failed, the image is tried again: {reason}");
        }
        Notice::RestoreFailed {
            image,
            reason,
            then: AfterFailure::Older,
        } => tracing::error!(image = %image, "restore failed: {reason}"),
        Notice::NewerAbandoned(image) => {
            tracing::info!(back_to = %image, "newer images are abandoned; `ckpt-run restore` can still name one");
        }
        Notice::NewerTakenUp => {
            tracing::info!("the newer images are no longer abandoned: the older one did not run");
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
            tracing::info!("snapshot called off: the job ended during it");
        }
        AfterSnapshotFailure::Vetoed => tracing::info!("no snapshot this time: {reason}"),
        AfterSnapshotFailure::Killed => tracing::error!(
            kind,
            "snapshot failed, the job does not compute as before and is ended: {reason}"
        ),
        AfterSnapshotFailure::Continues { failed } => tracing::warn!(
            kind,
            failed,
            "snapshot failed, the job goes on, older images are untouched: {reason}"
        ),
    }
}

fn stops_unsaved(why: &str, newest: &Result<Option<ImageId>, String>) {
    match newest {
        Ok(Some(id)) => {
            tracing::warn!(image = %id, "stopping without a new image ({why}); the run goes on from the newest one");
        }
        Ok(None) => {
            tracing::warn!("stopping without an image ({why}); the run begins anew");
        }
        Err(reason) => tracing::warn!(
            "stopping without a new image ({why}), and those that there are cannot be looked for: {reason}"
        ),
    }
}

fn report_restored(id: ImageId, restored: &Restored) {
    let cut = &restored.cut;
    if cut.len() > CUT_NAMED_MAX {
        let bytes = cut.iter().map(|cut| cut.bytes).sum();
        let kept = cut.first().and_then(|cut| cut.kept.parent());
        tracing::info!(
            files = cut.len(),
            bytes = %size(bytes),
            kept = %kept.unwrap_or(Path::new("")).display(),
            "kept aside what came after the snapshot"
        );
    }
    for cut in cut.iter().take_while(|_| cut.len() <= CUT_NAMED_MAX) {
        tracing::info!(
            file = %cut.path.display(),
            bytes = %size(cut.bytes),
            kept = %cut.kept.display(),
            "kept aside what came after the snapshot"
        );
    }
    if restored.input_lost {
        tracing::warn!(
            "stdin goes on with what comes next: what the job may have read since the snapshot it does not read again"
        );
    }
    let (took, phases) = (seconds(restored.total), in_words(&restored.phases));
    tracing::info!(image = %id, %took, %phases, "restored");
}

fn in_words(phases: &[Phase]) -> String {
    let words = |phase: &Phase| format!("{} {:.3}", phase.name, phase.seconds);
    phases.iter().map(words).collect::<Vec<_>>().join(", ")
}

/// Logs how a hook ended, if not well. `limit`: `hooks.timeout`.
pub(super) fn hook_ended(ended: &Ended, limit: Duration) {
    let (name, took) = (ended.occasion.as_str(), ended.took);
    match &ended.outcome {
        Outcome::Done => tracing::debug!(took = %seconds(took), "hook {name} done"),
        Outcome::Veto if ended.occasion == Occasion::BeforeSnapshot => {
            tracing::debug!(took = %seconds(took), "hook {name} called the snapshot off");
        }
        Outcome::Veto => {
            tracing::warn!("hook {name} failed, and nothing changes: exit code 75");
        }
        Outcome::Failed(why) => {
            tracing::warn!("hook {name} failed, and nothing changes: {why}");
        }
        Outcome::TimedOut => tracing::warn!(
            after = %seconds(took),
            "hook {name} was killed after its time ({}), and nothing changes",
            if took < limit { "a part of the grace" } else { "hooks.timeout" }
        ),
    }
}

//! Starts and restores of the job, and restores that fail.
//!
//! ```text
//! older image: abandon newer ones (run.json, durable) ─▶ roll back files and output ─▶ CRIU ─▶ the job runs
//!                                                                └──── failed ◀──────────┘
//!              revert the return (run.json) ◀── everything put back ◀────┘
//! ```
//! A kill at any point leaves a consistent choice: once the files of an older image are rolled back, the newer images
//! are abandoned. They are taken up again only after the older one failed before its job ran, and its restore was
//! undone.

use std::collections::BTreeSet;

use super::action::Action;
use super::stage::{AfterEnd, AfterWait, Ending, Restoring, Running, Stage};
use super::state_machine::Machine;
use crate::config::WithoutImage;
use crate::job::RewindError;
use crate::restore::error::RestoreError;
use crate::restore::restore_image::Restored;
use crate::run::format::chain;
use crate::sandbox::Ended;
use crate::snapshot::paused::StillPaused;
use crate::store::ImageId;
use crate::supervisor::error::RunError;
use crate::supervisor::notice::{AfterFailure, Notice};
use crate::supervisor::policy::restart::{Budget, ExitStatus, backoff};

/// The attempts at bringing the job back, and their limits.
#[derive(Debug, Default)]
pub(crate) struct Attempts {
    pub budget: Budget,
    /// Image that the job was last restored from; `None` if it was started.
    pub restored_from: Option<ImageId>,
    /// Images that could not be restored now, but may be good.
    pub refused: BTreeSet<ImageId>,
    /// The oldest image that could not be restored since the last progress: only older ones are left to try.
    pub oldest_refused: Option<ImageId>,
    /// Images whose restore was tried once more.
    pub retried: BTreeSet<ImageId>,
    /// The only image to restore, until the job runs.
    pub chosen: Option<ImageId>,
    /// True if newer images were abandoned for a restore and its job has not run.
    pub returned: bool,
    /// The image that failed, until everything of its restore is gone.
    pub failed: Option<(ImageId, RestoreError)>,
}

impl Attempts {
    /// Counts an exit of the job. Images that could not be restored before may be restored now.
    pub fn job_ended(&mut self, status: ExitStatus) {
        self.budget.ended(status);
        if self.budget.crashes <= 1 {
            self.oldest_refused = None;
        }
        self.forget_failures();
    }

    fn refuse(&mut self, id: ImageId) {
        self.refused.insert(id);
        self.oldest_refused = Some(self.oldest_refused.map_or(id, |oldest| oldest.min(id)));
    }

    pub fn image_taken(&mut self) {
        self.budget.image_taken();
        self.forget_failures();
    }

    fn forget_failures(&mut self) {
        self.refused.clear();
        self.retried.clear();
    }
}

impl Machine {
    pub(super) fn start(&mut self) {
        self.attempts.restored_from = None;
        self.attempts.oldest_refused = None;
        self.last_available.clear();
        let why = "none of its images could be restored; it starts from the beginning".to_owned();
        self.answer_unpause(Err(StillPaused::Failed(why)));
        self.stage = Stage::Starting;
        self.act(Action::Start);
    }

    pub(super) fn started(&mut self, pid: Option<i32>) {
        if let Stage::Starting = self.stage {
            self.notify(Notice::Started(pid));
            self.now_running(None, false);
            self.proceed();
        }
    }

    fn now_running(&mut self, ended: Option<Ended>, gone: bool) {
        self.timer.begin_anew(self.now.at);
        self.stage = Stage::Running(Running {
            ended,
            gone,
            ..Running::default()
        });
        self.watch_anew();
    }

    /// Continues a run that an earlier supervisor began.
    pub(super) fn resume_run(&mut self) {
        let Some(available) = self.listed_images() else {
            return;
        };
        if !available.is_empty() {
            return self.restore_next(0);
        }
        if self.any_images() && self.settings.restart.without_image != WithoutImage::Start {
            return self.fail(RunError::NothingRestorable);
        }
        self.notify(Notice::NoImageYet);
        self.start();
    }

    /// Restores this image; if that fails, no other, and the run ends.
    pub(super) fn restore_this(&mut self, id: ImageId) {
        self.attempts.chosen = Some(id);
        self.examine(id, 0);
    }

    /// Restores the newest image that can be restored, without the first `skip_newest`.
    fn restore_from(&mut self, skip_newest: usize) {
        if self.listed_images().is_some() {
            self.restore_next(skip_newest);
        }
    }

    fn restore_next(&mut self, skip_newest: usize) {
        let Some(available) = self.available_or_fail() else {
            return;
        };
        // The skipped images are better than none.
        let next = available
            .iter()
            .rev()
            .nth(skip_newest)
            .map(|id| (*id, skip_newest));
        if let Some((id, skip_newest)) = next.or(available.last().map(|id| (*id, 0))) {
            return self.examine(id, skip_newest);
        }
        let start = self.settings.restart.without_image == WithoutImage::Start;
        if !self.attempts.refused.is_empty() || !start {
            return self.fail(RunError::NothingRestorable);
        }
        self.notify(Notice::NoImageLeft);
        self.start();
    }

    fn examine(&mut self, id: ImageId, skip_newest: usize) {
        self.stage = Stage::Restoring(Restoring::new(id, skip_newest));
        self.act(Action::Examine(id));
    }

    /// Begins the restore of the examined image. The images newer than it are abandoned durably before anything of the
    /// job is rolled back.
    pub(super) fn fit(&mut self) {
        let Stage::Restoring(restoring) = &mut self.stage else {
            return;
        };
        restoring.at_work = true;
        let id = restoring.id;
        if let Some(error) = self.now.images.take_error() {
            return self.fail(error.into());
        }
        let images = self.now.images.list_or_none();
        if images.iter().any(|image| image.id > id) {
            let abandons = self.state.abandon_newer(id, images);
            // Also if they were abandoned before: that may not have been saved.
            self.act(Action::SaveOrFail);
            if abandons {
                self.attempts.returned = true;
                self.notify(Notice::NewerAbandoned(id));
            }
        }
        self.available();
        self.notify(Notice::RestoreBegan(id));
        self.act(Action::BringBack);
    }

    pub(super) fn unfit(&mut self, error: RestoreError) {
        if let Stage::Restoring(restoring) = &self.stage {
            self.image_failed(restoring.id, restoring.skip_newest, error);
        }
    }

    pub(super) fn restore_ended(&mut self, result: Result<Restored, RestoreError>) {
        if result
            .as_ref()
            .err()
            .is_none_or(RestoreError::job_may_have_run)
        {
            self.attempts.returned = false;
        }
        match &mut self.stage {
            Stage::Restoring(restoring) => {
                let (id, skip_newest) = (restoring.id, restoring.skip_newest);
                let (ended, gone) = (restoring.ended, restoring.gone);
                // An image without device memory has not taken what was prepared.
                self.act(Action::DismissStandby);
                match result {
                    Ok(restored) => self.restored(id, restored, ended, gone),
                    Err(error) => {
                        self.attempts.failed = Some((id, error));
                        self.stage = Stage::Ending(Ending {
                            then: AfterEnd::NextImage { skip_newest },
                            gone,
                            at_work: false,
                        });
                        if !gone {
                            self.act(Action::Kill);
                        }
                        self.drain_when_quiet();
                    }
                }
            }
            _ => self.work_ended(),
        }
    }

    fn restored(&mut self, id: ImageId, restored: Restored, ended: Option<Ended>, gone: bool) {
        self.attempts.chosen = None;
        self.attempts.restored_from = Some(id);
        self.act(Action::AdoptRestored(id, Box::new(restored)));
        self.now_running(ended, gone);
        self.answer_unpause(Ok(()));
        self.state.restarts += 1;
        self.act(Action::Save);
        self.proceed();
    }

    /// Takes up the images again that were abandoned for a restore that failed. Everything is put back by now.
    pub(super) fn revert_return(&mut self) {
        if std::mem::take(&mut self.attempts.returned) {
            self.state.revert_return();
            self.available();
            self.act(Action::Save);
            self.notify(Notice::NewerTakenUp);
        }
    }

    /// Continues after a restore that failed: once more with the same image if the reason lies outside it, otherwise with
    /// an older one.
    pub(super) fn after_failed_restore(&mut self, skip_newest: usize) {
        let Some((id, error)) = self.attempts.failed.take() else {
            return self.restore_from(skip_newest);
        };
        if error.is_outside_image() && self.attempts.retried.insert(id) {
            let delay = backoff(&self.settings.restart, 0);
            self.restore_failed(id, &error, AfterFailure::Retry(delay));
            return self.wait(Some(delay), AfterWait::Retry { id, skip_newest });
        }
        self.image_failed(id, skip_newest, error);
    }

    fn restore_failed(&mut self, image: ImageId, error: &RestoreError, then: AfterFailure) {
        self.notify(Notice::RestoreFailed {
            image,
            reason: chain(error),
            then,
        });
    }

    /// Remembers that an image did not become the job, and continues with an older one, or ends the run if an older one
    /// would not become it, either.
    fn image_failed(&mut self, id: ImageId, skip_newest: usize, error: RestoreError) {
        let no_room = matches!(error, RestoreError::Files(RewindError::NoRoom { .. }));
        let is_chosen = self.attempts.chosen == Some(id);
        let then = if no_room || is_chosen {
            AfterFailure::RunEnds
        } else {
            AfterFailure::Older
        };
        self.restore_failed(id, &error, then);
        if no_room {
            return self.fail(RunError::NoRoom(error));
        }
        let may_be_good = error.image_may_be_good();
        if !may_be_good {
            self.act(Action::SetAside(id, chain(&error)));
        }
        if is_chosen {
            return self.fail(RunError::Chosen {
                image: id,
                source: error,
            });
        }
        if may_be_good {
            self.attempts.refuse(id);
            return self.restore_from(skip_newest);
        }
        // The next one is chosen from the list without this one.
        self.stage = Stage::Restoring(Restoring::new(id, skip_newest));
    }

    /// Continues after a damaged image was set aside, or after that failed on a full disk.
    pub(super) fn image_set_aside(&mut self, done: bool) {
        if let Stage::Restoring(Restoring {
            id, skip_newest, ..
        }) = self.stage
        {
            if !done {
                self.attempts.refuse(id);
            }
            self.restore_next(skip_newest);
        }
    }

    /// Carries out what a wait was for.
    pub(super) fn backoff_over(&mut self) {
        let Stage::Waiting { then, .. } = self.stage else {
            return;
        };
        self.stage = Stage::Idle;
        match then {
            AfterWait::Retry { id, skip_newest } => self.examine(id, skip_newest),
            AfterWait::Restore { skip_newest } => {
                self.attempts.budget.restarted();
                self.restore_from(skip_newest);
            }
            AfterWait::StartAnew => {
                self.attempts.budget.restarted();
                self.start_anew();
            }
        }
    }

    /// Starts a new run of the job: no image of the old one belongs to it.
    fn start_anew(&mut self) {
        self.state.restarts += 1;
        let run = self.now.at.unix_ms.max(self.state.started_unix_ms + 1);
        // Without a list, each image may be one of its own.
        self.state
            .begin_attempt(run, self.now.images.list_or_none());
        self.act(Action::Save);
        self.start();
    }
}

//! Handling of restores that fail, and of the returns to older images.
//!
//! ```text
//! older image: abandon newer ones (run.json, durable) ─▶ roll back files and output ─▶ CRIU ─▶ the job runs
//!                                                                └──── failed ◀──────────┘
//!              revert the return (run.json) ◀── everything put back ◀────┘
//! ```
//! A kill at any point leaves a consistent choice: once the files of an older image are rolled back, the newer images
//! are abandoned. They are taken up again only after the older one failed before its job ran, and what its restore had
//! cut off is back.

use crate::clock;
use crate::history;
use crate::job::RewindError;
use crate::restore::error::RestoreError;
use crate::run::format::{chain, seconds};
use crate::store::ImageId;
use crate::supervisor::error::RunError;
use crate::supervisor::event_loop::Supervisor;
use crate::supervisor::policy::restart::backoff;
use crate::supervisor::stage::{AfterWait, Stage};

/// The restore under way, or the last one.
#[derive(Debug, Default)]
pub(crate) struct RestoreProgress {
    /// True while the restore's thread works on files and streams.
    at_work: bool,
    /// True if the output of the dead job is to be delivered once the thread has ended.
    drain_due: bool,
    /// True if newer images were abandoned for it and its job has not run.
    returned: bool,
    /// The image that failed, until that is handled.
    failed: Option<(ImageId, RestoreError)>,
}

impl RestoreProgress {
    pub fn begin(&mut self) {
        self.at_work = true;
    }

    /// Notes that the thread has ended. Returns true if the output is to be delivered now.
    pub fn ended(&mut self) -> bool {
        self.at_work = false;
        std::mem::take(&mut self.drain_due)
    }

    /// Notes that the job runs, or may have run: the return stays.
    pub fn job_ran(&mut self) {
        self.returned = false;
    }

    pub fn fail(&mut self, id: ImageId, error: RestoreError) {
        self.failed = Some((id, error));
    }

    /// Returns true if the output cannot be delivered yet: the thread still changes the streams. Its end is awaited.
    pub fn drain_is_deferred(&mut self) -> bool {
        self.drain_due |= self.at_work;
        self.at_work
    }
}

impl Supervisor {
    /// Abandons the images newer than this one, durably. Call it before anything of the job is rolled back.
    ///
    /// # Errors
    /// The state cannot be saved: the image must not be restored.
    pub fn abandon_newer(&mut self, id: ImageId) -> Result<(), RunError> {
        let images = self.context.store.images()?;
        if images.iter().all(|image| image.id <= id) {
            return Ok(());
        }
        let mut state = self.state.clone();
        let abandons = state.abandon_newer(id, &images);
        // Also if they were abandoned before: that may not have been saved.
        state.save(self.context.store.path())?;
        if !abandons {
            return Ok(());
        }
        self.state = state;
        self.restore.returned = true;
        tracing::info!(back_to = %id, "newer images are abandoned; `ckpt-run restore` can still name one");
        Ok(())
    }

    /// Takes up the images again that were abandoned for a restore that failed. Call it when everything is put back.
    pub fn revert_return(&mut self) {
        if !std::mem::take(&mut self.restore.returned) {
            return;
        }
        let mut state = self.state.clone();
        state.revert_return();
        match state.save(self.context.store.path()) {
            Ok(()) => {
                self.state = state;
                tracing::info!(
                    "the newer images are no longer abandoned: the older one did not run"
                );
            }
            Err(error) => tracing::warn!("newer images stay abandoned: {}", chain(&error)),
        }
    }

    /// Goes on after a restore that failed, once nothing of it is left: once more with the same image if the reason
    /// lies outside it, otherwise with an older one.
    pub fn after_failed_restore(&mut self, skip_newest: usize) -> Result<(), RunError> {
        if let Some((id, error)) = self.restore.failed.take() {
            if error.is_outside_image() && self.retried.insert(id) {
                self.tell_restore_failed(id, &error);
                let delay = backoff(&self.context.config.restart, 0);
                let reason = chain(&error);
                tracing::warn!(image = %id, wait = %seconds(delay), "restore failed, the image is tried again: {reason}");
                self.stage = Stage::Waiting {
                    until: Some(clock::now() + delay),
                    then: AfterWait::Retry { id, skip_newest },
                };
                return Ok(());
            }
            self.image_failed(id, error)?;
        }
        self.restore_from(skip_newest)
    }

    fn tell_restore_failed(&mut self, id: ImageId, error: &RestoreError) {
        self.tell(history::Event::RestoreFailed {
            image: id.to_string(),
            reason: chain(error),
        });
    }

    /// Remembers why an image did not become the job. An error where an older one would not, either.
    pub fn image_failed(&mut self, id: ImageId, error: RestoreError) -> Result<(), RunError> {
        let reason = chain(&error);
        self.tell_restore_failed(id, &error);
        if let RestoreError::Files(RewindError::NoRoom { .. }) = error {
            return Err(RunError::NoRoom(error));
        }
        if error.image_may_be_good() {
            self.refused.insert(id);
        } else if let Err(error) = self
            .context
            .store
            .set_aside(&self.context.lock, id, &reason)
        {
            // A full disk: at least this supervisor does not try it again.
            tracing::warn!(image = %id, "cannot set the image aside: {}", chain(&error));
            self.refused.insert(id);
        }
        if self.chosen == Some(id) {
            return Err(RunError::Chosen {
                image: id,
                source: error,
            });
        }
        tracing::error!(image = %id, "restore failed: {reason}");
        Ok(())
    }
}

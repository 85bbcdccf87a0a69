//! Rollback of the files that the job writes to the image's list of them.

use std::io;
use std::path::Path;
use std::sync::Arc;

use super::error::RestoreError;
use crate::files::{KeptFiles, Lost, Rollback, Sources};
use crate::job::OpenFile;
use crate::run::image_facts::KEPT_LIST;
use crate::run::run_context::RunContext;
use crate::store::ImageReader;

/// Limit on the size of the list, room for more than a million files.
const LIST_BYTES_MAX: u64 = 1 << 30;
/// Limit on the files that stay different and are named in the log.
const NAMED_MAX: usize = 5;

/// The files of an image, and the plan for their rollback.
#[derive(Debug)]
pub(super) struct Kept {
    pub set: Arc<KeptFiles>,
    pub rollback: Rollback,
}

impl Kept {
    /// Reads the list and makes the plan. Returns `None` for an image without a list. Changes nothing.
    pub fn plan(context: &RunContext, image: &ImageReader) -> Result<Option<Self>, RestoreError> {
        if !image.contains(KEPT_LIST) {
            return Ok(None);
        }
        let list = image.read_to_vec(KEPT_LIST, LIST_BYTES_MAX)?;
        let set = KeptFiles::read(&list[..]).map_err(RestoreError::KeptList)?;
        let id = image.manifest().id;
        let rollback = context.files.plan(id.number(), &set)?;
        Ok(Some(Self {
            set: Arc::new(set),
            rollback,
        }))
    }

    /// Returns true if this plan restores an open file.
    pub fn has(&self, file: &OpenFile) -> bool {
        let found = self.set.files.get(&file.path);
        found.is_some_and(|file| !file.is_appended())
    }

    /// Rolls the files back.
    pub fn put_back(
        &self,
        context: &RunContext,
        image: &ImageReader,
        aside: &Path,
    ) -> Result<(), RestoreError> {
        for Lost { path, why } in self.rollback.lost.iter().take(NAMED_MAX) {
            tracing::warn!(file = %path.display(), "the job continues with a file that differs from the snapshot: {why}");
        }
        // The first read only verifies the hashes: no file may be partly overwritten with damaged content.
        for (stream, offset, size) in self.rollback.contents() {
            image.copy_range(stream, offset, size, &mut io::sink())?;
        }
        let done = self.rollback.execute(&Sources {
            record: &context.files.record_path(),
            aside,
            held: context.files.held(),
            before_step: &|| Ok(()),
            content: |stream: &str, offset, size, mut target: &mut dyn io::Write| {
                image
                    .copy_range(stream, offset, size, &mut target)
                    .map_err(io::Error::other)
            },
        })?;
        if done.aside + done.put_back > 0 {
            tracing::info!(
                put_back = done.put_back,
                set_aside = done.aside,
                not_saved = done.not_saved,
                kept = %aside.display(),
                "rolled the job's files back to the snapshot"
            );
        }
        Ok(())
    }
}

//! The state of a run that the store keeps from one supervisor to the next.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Deserializer, Serialize};

use super::image_facts::{ImageFacts, run_of};
use crate::path_text::{self, CommandLine};
use crate::store::fs::durable::{self, DurableError};
use crate::store::{ImageEntry, ImageId};

/// Name of the file in the store.
const FILE: &str = "run.json";
/// The current format.
const FORMAT: u32 = 1;
/// Limit on the size of the file: a command line has at most 2 MiB.
const BYTES_MAX: u64 = 16 << 20;

/// The image from which a run continues.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ImageChoice {
    /// The newest image of the store's run.
    Newest,
    /// This image, of any run. The run no longer continues from newer images.
    This(ImageId),
}

/// The reason why the run's state could not be read or written.
#[derive(Debug, thiserror::Error)]
pub enum RunStateError {
    /// The file cannot be read.
    #[error("cannot read {}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The reason.
        #[source]
        source: io::Error,
    },
    /// The file was made by a newer version, or by another program.
    #[error("cannot read {}: it was written by a newer ckpt-run, or is damaged; use that version, or another --store", path.display())]
    Format {
        /// The file.
        path: PathBuf,
    },
    /// The file cannot be written.
    #[error(transparent)]
    Write(#[from] DurableError),
}

/// The error for an image that does not exist, or whose run cannot be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "cannot continue from image {0}: it does not exist or cannot be read; `ckpt-run list` shows the images"
)]
pub struct NoSuchImage(pub ImageId);

/// The progress of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "state", rename_all = "kebab-case")]
pub enum Progress {
    /// The job runs, or its supervisor was killed.
    Running,
    /// The job was saved and stopped.
    Saved,
    /// The job exited by itself, with exit code 0.
    Finished,
    /// The job failed, and was not restarted any more.
    Failed {
        /// The job's exit code.
        code: u8,
    },
}

/// The state of a run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunState {
    format: u32,
    /// The job's command line.
    pub command: CommandLine,
    /// The job's working directory.
    #[serde(with = "path_text")]
    pub directory: PathBuf,
    /// The time of the run's first start, in milliseconds since 1970.
    pub started_unix_ms: u64,
    /// Number of times that the job was restored or started from the beginning again.
    pub restarts: u64,
    /// Number of failed snapshots.
    #[serde(default)]
    pub failed_snapshots: u64,
    /// The kind of the last of those failures.
    #[serde(default)]
    pub last_failure: Option<String>,
    /// Time for which the job has computed, in milliseconds.
    #[serde(default)]
    pub computed_ms: u64,
    /// Number of failures in that time, of the job or of the supervisor or machine that ran it.
    #[serde(default)]
    pub failures: u64,
    /// The progress of the run.
    pub progress: Progress,
    /// The returns to an older image, oldest first. All entries are needed: a later entry does not record the images
    /// abandoned before it, and the run can also return to an image of an abandoned branch.
    #[serde(
        default,
        skip_serializing_if = "Vec::is_empty",
        deserialize_with = "one_or_more"
    )]
    abandoned: Vec<Abandoned>,
    /// Written by older versions: the image from which the job was restored although newer ones existed, as long as it
    /// had made no image since.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    came_from: Option<ImageId>,
    /// The newest image that existed when this run of the job began. No image up to that number belongs to the run, not
    /// even an unreadable one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    begun_after: Option<ImageId>,
}

/// Image numbers that a run abandoned when it returned to an older image. Newer images belong to the branch that began
/// then.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Abandoned {
    /// The image that the run returned to; it is not abandoned.
    after: ImageId,
    /// The newest image at that time.
    through: ImageId,
}

impl RunState {
    /// Creates the state of a new run.
    #[must_use]
    pub fn new(command: CommandLine, directory: PathBuf, started_unix_ms: u64) -> Self {
        Self {
            format: FORMAT,
            command,
            directory,
            started_unix_ms,
            restarts: 0,
            failed_snapshots: 0,
            last_failure: None,
            computed_ms: 0,
            failures: 0,
            progress: Progress::Running,
            abandoned: Vec::new(),
            came_from: None,
            begun_after: None,
        }
    }

    /// Returns the run that continues from the chosen image: the store's `known` run, or the run of a named image that
    /// was copied from another store or is from an earlier run. Returns `None` if there is neither a run nor an image.
    ///
    /// # Errors
    /// The image does not exist.
    pub(crate) fn chosen(
        known: Option<&Self>,
        choice: ImageChoice,
        images: &[ImageEntry],
    ) -> Result<Option<Self>, NoSuchImage> {
        let of_another = || Self::of_images(images, choice);
        match (known, choice) {
            (Some(state), ImageChoice::Newest) => Ok(Some(state.clone())),
            (None, ImageChoice::Newest) => Ok(of_another()),
            (None, ImageChoice::This(_)) if images.is_empty() => Ok(None),
            (known, ImageChoice::This(id)) => {
                let ours = known.filter(|state| state.has(id, images)).cloned();
                let mut state = ours.or_else(of_another).ok_or(NoSuchImage(id))?;
                state.go_back(id, images)?;
                Ok(Some(state))
            }
        }
    }

    /// Returns the run of the chosen image, or of the newest image that is not damaged.
    fn of_images(images: &[ImageEntry], choice: ImageChoice) -> Option<Self> {
        let image = match choice {
            ImageChoice::Newest => images.iter().rfind(|image| image.damaged.is_none()),
            ImageChoice::This(id) => images.iter().find(|image| image.id == id),
        };
        let facts: ImageFacts = serde_json::from_slice(&image?.meta).ok()?;
        Some(Self::new(facts.command, facts.directory, facts.run))
    }

    /// Records that the job starts from the beginning in a store with these images, the newest last: none of them
    /// belongs to the new run.
    pub fn begin_attempt(&mut self, unix_ms: u64, images: &[ImageEntry]) {
        self.started_unix_ms = unix_ms;
        self.begun_after = images.last().map(|image| image.id);
    }

    /// Records that the run continues from image `id`, which came from another machine: no older image of this store
    /// belongs to the run.
    pub fn begin_after_older(&mut self, id: ImageId, images: &[ImageEntry]) {
        let older = images
            .iter()
            .map(|image| image.id)
            .filter(|older| *older < id);
        self.begun_after = older.max().max(self.begun_after);
    }

    /// Takes over the failure statistics of an earlier run in this store.
    #[must_use]
    pub fn after(mut self, earlier: &Self) -> Self {
        self.computed_ms = earlier.computed_ms;
        self.failures = earlier.failures;
        self
    }

    /// Returns true if the run continues from this image, provided that it is not damaged.
    #[must_use]
    pub fn goes_on_from(&self, image: &ImageEntry) -> bool {
        self.goes_on_from_numbered(image.id, &image.meta)
    }

    /// Returns true if an unreadable image may be one that the run would continue from.
    #[must_use]
    pub fn may_go_on_from(&self, image: &ImageEntry) -> bool {
        image.is_unreadable() && self.may_have(image) && self.is_in_line(image.id)
    }

    /// Returns true if an image, damaged or not, belongs or may belong to the run.
    #[must_use]
    pub fn may_have(&self, image: &ImageEntry) -> bool {
        let may = || Some(image.id) > self.begun_after;
        run_of(&image.meta).map_or_else(may, |run| run == self.started_unix_ms)
    }

    /// Same as [`goes_on_from`](Self::goes_on_from), for an image's number and its facts.
    #[must_use]
    pub fn goes_on_from_numbered(&self, id: ImageId, meta: &[u8]) -> bool {
        run_of(meta) == Some(self.started_unix_ms) && self.is_in_line(id)
    }

    /// Returns true if an image belongs to the current branch, or to a branch from which it descends, up to the point
    /// where they part.
    fn is_in_line(&self, id: ImageId) -> bool {
        let mut newest = None;
        for past in self.abandoned.iter().rev() {
            if id > past.through {
                break;
            }
            if newest.is_none_or(|newest| newest > past.through) {
                newest = Some(past.after);
            }
        }
        Some(id) > self.begun_after && newest.is_none_or(|newest| id <= newest)
    }

    /// Returns true if this is an image of the run, abandoned or not.
    fn has(&self, id: ImageId, images: &[ImageEntry]) -> bool {
        let ours = |image: &&ImageEntry| run_of(&image.meta) == Some(self.started_unix_ms);
        images.iter().filter(ours).any(|image| image.id == id)
    }

    /// Returns true if an image's facts belong to another run.
    #[must_use]
    pub fn is_another_than_of(&self, meta: &[u8]) -> bool {
        run_of(meta).is_some_and(|run| run != self.started_unix_ms)
    }

    /// Returns the highest number of the abandoned images: a new image has a higher number.
    #[must_use]
    pub fn newest_abandoned(&self) -> Option<ImageId> {
        self.abandoned.iter().map(|past| past.through).max()
    }

    /// Same as [`newest_abandoned`](Self::newest_abandoned), including earlier runs: no number is assigned twice.
    #[must_use]
    pub fn newest_of_others(&self) -> Option<ImageId> {
        self.newest_abandoned().max(self.begun_after)
    }

    /// Abandons the images newer than `id`, because the job is about to be restored from that one. Returns false if
    /// there are none. The state must be saved before the files of the job change.
    #[must_use]
    pub fn abandon_newer(&mut self, id: ImageId, images: &[ImageEntry]) -> bool {
        let mut newer = images.iter().filter(|image| image.id > id);
        if !newer.any(|image| self.goes_on_from(image) || self.may_go_on_from(image)) {
            return false;
        }
        self.return_to(id, images);
        true
    }

    /// Reverts the last return: the older image did not run.
    pub fn revert_return(&mut self) {
        self.abandoned.pop();
    }

    /// Abandons the images that an older version had passed over: the job has run from an older one.
    pub fn abandon_passed_over(&mut self, images: &[ImageEntry]) {
        if let Some(id) = self.came_from.take() {
            let _ = self.abandon_newer(id, images);
        }
    }

    /// Returns to an older image: newer images belong to an abandoned branch from now on. They stay in the store.
    ///
    /// # Errors
    /// The run has no such image.
    pub fn go_back(&mut self, id: ImageId, images: &[ImageEntry]) -> Result<(), NoSuchImage> {
        if !self.has(id, images) {
            return Err(NoSuchImage(id));
        }
        self.return_to(id, images);
        Ok(())
    }

    fn return_to(&mut self, id: ImageId, images: &[ImageEntry]) {
        let newest = images.iter().map(|image| image.id).max();
        let newest = newest.max(self.newest_abandoned());
        self.abandoned.extend(newest.map(|newest| Abandoned {
            after: id,
            through: newest,
        }));
    }

    /// Reads the state from a store; `None` if no run was started there.
    ///
    /// # Errors
    /// The file cannot be read or parsed.
    pub fn load(store: &Path) -> Result<Option<Self>, RunStateError> {
        let path = store.join(FILE);
        let read = |source| RunStateError::Read {
            path: path.clone(),
            source,
        };
        match fs::metadata(&path) {
            Ok(metadata) if metadata.len() > BYTES_MAX => {
                return Err(RunStateError::Format { path });
            }
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(read(error)),
        }
        let content = fs::read(&path).map_err(read)?;
        match serde_json::from_slice::<Self>(&content) {
            Ok(state) if state.format == FORMAT => Ok(Some(state)),
            Ok(_) | Err(_) => Err(RunStateError::Format { path }),
        }
    }

    /// Writes the state durably to a store.
    ///
    /// # Errors
    /// The file cannot be written; the previous state is unchanged.
    pub fn save(&self, store: &Path) -> Result<(), RunStateError> {
        // A struct of strings and numbers can always be converted to JSON.
        let content = serde_json::to_vec_pretty(self).unwrap_or_default();
        Ok(durable::write(&store.join(FILE), &content)?)
    }
}

/// Reads a list, or a single entry: older versions recorded only the last return.
fn one_or_more<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<Abandoned>, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum OneOrMore {
        One(Abandoned),
        More(Vec<Abandoned>),
    }
    Ok(match OneOrMore::deserialize(deserializer)? {
        OneOrMore::One(one) => vec![one],
        OneOrMore::More(more) => more,
    })
}

#[cfg(test)]
mod tests;

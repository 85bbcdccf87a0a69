//! What a store remembers of its run between two lives of the supervisor.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::image::{ImageFacts, run_of};
use super::run::ImageChoice;
use crate::store::durable::{self, DurableError};
use crate::store::{ImageEntry, ImageId};

/// The file's name in the store.
const FILE: &str = "run.json";
/// The present format.
const FORMAT: u32 = 1;
/// Largest file that is believed: a command line has at most 2 MiB.
const BYTES_MAX: u64 = 16 << 20;

/// Why the run's state could not be read or written.
#[derive(Debug, thiserror::Error)]
pub enum RunStateError {
    /// It cannot be read.
    #[error("cannot read {}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The reason.
        #[source]
        source: io::Error,
    },
    /// It was made by a newer version, or by something else.
    #[error("cannot understand {}: made by a newer ckpt-run, or damaged; use that version, or another --store", path.display())]
    Format {
        /// The file.
        path: PathBuf,
    },
    /// It cannot be written.
    #[error(transparent)]
    Write(#[from] DurableError),
}

/// The image is not there, or does not tell of its run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "cannot go on from image {0}: there is none that can be read; `ckpt-run list` shows which there are"
)]
pub struct NoSuchImage(pub ImageId);

/// How far the run has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "state", rename_all = "kebab-case")]
pub enum Progress {
    /// It runs, or its supervisor was killed.
    Running,
    /// It was saved and stopped.
    Saved,
    /// The job ended by itself, with exit code 0.
    Finished,
    /// The job failed, and was given up.
    Failed {
        /// Its exit code.
        code: u8,
    },
}

/// The state of a run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunState {
    format: u32,
    /// The job's command line.
    pub command: Vec<String>,
    /// Its working directory.
    pub directory: PathBuf,
    /// When it was first started, milliseconds since 1970.
    pub started_unix_ms: u64,
    /// How often the job was restored or started anew.
    pub restarts: u64,
    /// How many snapshots have failed.
    #[serde(default)]
    pub failed_snapshots: u64,
    /// The kind of the last of those failures.
    #[serde(default)]
    pub last_failure: Option<String>,
    /// How long the job has computed, milliseconds.
    #[serde(default)]
    pub computed_ms: u64,
    /// How often it, or what ran it, has failed in that time.
    #[serde(default)]
    pub failures: u64,
    /// How far it has come.
    pub progress: Progress,
    /// Images that it does not go on from any more, because it went back to an older one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    abandoned: Option<Abandoned>,
}

/// Those images, by their numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Abandoned {
    /// The one that was gone back to, which is not among them.
    after: ImageId,
    /// The newest there was then.
    through: ImageId,
}

impl RunState {
    /// A run that begins.
    #[must_use]
    pub fn new(command: Vec<String>, directory: PathBuf, started_unix_ms: u64) -> Self {
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
            abandoned: None,
        }
    }

    /// The run that goes on from the chosen image: the `known` one, which the store is at, or the run of a named image
    /// that came from elsewhere or is from before. `None` where there is neither run nor image.
    ///
    /// # Errors
    /// When there is no such image.
    pub(super) fn chosen(
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

    /// The run of the chosen image, or of the newest that is not damaged.
    fn of_images(images: &[ImageEntry], choice: ImageChoice) -> Option<Self> {
        let image = match choice {
            ImageChoice::Newest => images.iter().rfind(|image| image.damaged.is_none()),
            ImageChoice::This(id) => images.iter().find(|image| image.id == id),
        };
        let facts: ImageFacts = serde_json::from_slice(&image?.meta).ok()?;
        Some(Self::new(facts.command, facts.directory, facts.run))
    }

    /// With what an earlier run in this place taught about failures.
    #[must_use]
    pub fn after(mut self, earlier: &Self) -> Self {
        self.computed_ms = earlier.computed_ms;
        self.failures = earlier.failures;
        self
    }

    /// Whether the run goes on from this image, if it is not damaged.
    #[must_use]
    pub fn goes_on_from(&self, image: &ImageEntry) -> bool {
        self.goes_on_from_numbered(image.id, &image.meta)
    }

    /// As [`goes_on_from`](Self::goes_on_from), by an image's number and what it says about itself.
    #[must_use]
    pub fn goes_on_from_numbered(&self, id: ImageId, meta: &[u8]) -> bool {
        let abandoned = self
            .abandoned
            .is_some_and(|range| range.after < id && id <= range.through);
        run_of(meta) == Some(self.started_unix_ms) && !abandoned
    }

    /// Whether this is one of its images, given up or not.
    fn has(&self, id: ImageId, images: &[ImageEntry]) -> bool {
        let ours = |image: &&ImageEntry| run_of(&image.meta) == Some(self.started_unix_ms);
        images.iter().filter(ours).any(|image| image.id == id)
    }

    /// Whether what an image says about itself is of another run.
    #[must_use]
    pub fn is_another_than_of(&self, meta: &[u8]) -> bool {
        run_of(meta).is_some_and(|run| run != self.started_unix_ms)
    }

    /// Goes back to an image: newer ones are those of a life that is given up. They stay in the store.
    ///
    /// # Errors
    /// When the run has no such image.
    pub fn go_back(&mut self, id: ImageId, images: &[ImageEntry]) -> Result<(), NoSuchImage> {
        if !self.has(id, images) {
            return Err(NoSuchImage(id));
        }
        let newest = images.iter().map(|image| image.id).max();
        self.abandoned = newest.map(|newest| Abandoned {
            after: id,
            through: newest,
        });
        Ok(())
    }

    /// Reads the state in a store; `None` when no run was begun there.
    ///
    /// # Errors
    /// When it cannot be read or understood.
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

    /// Makes the state durable in a store.
    ///
    /// # Errors
    /// When it cannot be written; the state that was there stays.
    pub fn save(&self, store: &Path) -> Result<(), RunStateError> {
        // A struct of strings and numbers always becomes JSON.
        let content = serde_json::to_vec_pretty(self).unwrap_or_default();
        Ok(durable::write(&store.join(FILE), &content)?)
    }
}

//! State of a run that the store keeps between two supervisors.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Deserializer, Serialize};

use super::image_facts::{ImageFacts, run_of};
use crate::store::fs::durable::{self, DurableError};
use crate::store::{ImageEntry, ImageId};

/// The file's name in the store.
const FILE: &str = "run.json";
/// The present format.
const FORMAT: u32 = 1;
/// Largest file that is believed: a command line has at most 2 MiB.
const BYTES_MAX: u64 = 16 << 20;

/// The image to restore.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ImageChoice {
    /// The newest one of the store's run.
    Newest,
    /// This one, of whichever run. Newer ones are not gone on from any more.
    This(ImageId),
}

/// Why the run's state could not be read or written.
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
    /// The file was written by a newer version, or by another program.
    #[error("cannot understand {}: made by a newer ckpt-run, or damaged; use that version, or another --store", path.display())]
    Format {
        /// The file.
        path: PathBuf,
    },
    /// The file cannot be written.
    #[error(transparent)]
    Write(#[from] DurableError),
}

/// The image is not there, or does not tell of its run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "cannot go on from image {0}: there is none that can be read; `ckpt-run list` shows which there are"
)]
pub struct NoSuchImage(pub ImageId);

/// Stage of the run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "state", rename_all = "kebab-case")]
pub enum Progress {
    /// The run is under way, or its supervisor was killed.
    Running,
    /// The run was saved and stopped.
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
    /// Time of the first start, milliseconds since 1970.
    pub started_unix_ms: u64,
    /// Number of restores and new starts of the job.
    pub restarts: u64,
    /// Number of failed snapshots.
    #[serde(default)]
    pub failed_snapshots: u64,
    /// The kind of the last of those failures.
    #[serde(default)]
    pub last_failure: Option<String>,
    /// Computing time of the job, milliseconds.
    #[serde(default)]
    pub computed_ms: u64,
    /// Number of failures of the job, or of what ran it, in that time.
    #[serde(default)]
    pub failures: u64,
    /// Stage of the run.
    pub progress: Progress,
    /// Each time that it went back to an older image, oldest first. Later ones say nothing of what was given up before:
    /// an image of a life that was given up can be gone back to, too.
    #[serde(
        default,
        skip_serializing_if = "Vec::is_empty",
        deserialize_with = "one_or_more"
    )]
    abandoned: Vec<Abandoned>,
    /// The image that the job came back from, while there are newer ones and it has none of its own since.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    came_from: Option<ImageId>,
    /// The newest image that there was when this life of the job began. Up to there none is its own, also none that
    /// cannot be read.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    begun_after: Option<ImageId>,
}

/// Images that a run gave up when it went back, by their numbers. Those after it belong to the life that began then.
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
            abandoned: Vec::new(),
            came_from: None,
            begun_after: None,
        }
    }

    /// The run that goes on from the chosen image: the `known` one, which the store is at, or the run of a named image
    /// that came from elsewhere or is from before. `None` where there is neither run nor image.
    ///
    /// # Errors
    /// When there is no such image.
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

    /// The run of the chosen image, or of the newest that is not damaged.
    fn of_images(images: &[ImageEntry], choice: ImageChoice) -> Option<Self> {
        let image = match choice {
            ImageChoice::Newest => images.iter().rfind(|image| image.damaged.is_none()),
            ImageChoice::This(id) => images.iter().find(|image| image.id == id),
        };
        let facts: ImageFacts = serde_json::from_slice(&image?.meta).ok()?;
        Some(Self::new(facts.command, facts.directory, facts.run))
    }

    /// The job begins anew, in a store with these images, the newest last: none of them belongs to the new life.
    pub fn begin_attempt(&mut self, unix_ms: u64, images: &[ImageEntry]) {
        self.started_unix_ms = unix_ms;
        self.begun_after = images.last().map(|image| image.id);
    }

    /// Adds what an earlier run in this store taught about failures.
    #[must_use]
    pub fn after(mut self, earlier: &Self) -> Self {
        self.computed_ms = earlier.computed_ms;
        self.failures = earlier.failures;
        self
    }

    /// Returns true if the run can continue from this image, provided that it is not damaged.
    #[must_use]
    pub fn goes_on_from(&self, image: &ImageEntry) -> bool {
        self.goes_on_from_numbered(image.id, &image.meta)
    }

    /// Returns true if an image that cannot be read may be one from which the run could continue.
    #[must_use]
    pub fn may_go_on_from(&self, image: &ImageEntry) -> bool {
        image.is_unreadable() && self.may_have(image) && self.is_in_line(image.id)
    }

    /// Returns true if an image, good or not, belongs or may belong to the run.
    #[must_use]
    pub fn may_have(&self, image: &ImageEntry) -> bool {
        let may = || Some(image.id) > self.begun_after;
        run_of(&image.meta).map_or_else(may, |run| run == self.started_unix_ms)
    }

    /// Decides as [`goes_on_from`](Self::goes_on_from), by an image's number and facts.
    #[must_use]
    pub fn goes_on_from_numbered(&self, id: ImageId, meta: &[u8]) -> bool {
        run_of(meta) == Some(self.started_unix_ms) && self.is_in_line(id)
    }

    /// Returns true if an image belongs to the present attempt, or to one from which it was restored, up to the image
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
        newest.is_none_or(|newest| id <= newest)
    }

    /// Returns true if this is one of the run's images, abandoned or not.
    fn has(&self, id: ImageId, images: &[ImageEntry]) -> bool {
        let ours = |image: &&ImageEntry| run_of(&image.meta) == Some(self.started_unix_ms);
        images.iter().filter(ours).any(|image| image.id == id)
    }

    /// Returns true if an image's facts belong to another run.
    #[must_use]
    pub fn is_another_than_of(&self, meta: &[u8]) -> bool {
        run_of(meta).is_some_and(|run| run != self.started_unix_ms)
    }

    /// The newest number that an image of a life that was given up had: an image that is not one of them has a higher.
    #[must_use]
    pub fn newest_abandoned(&self) -> Option<ImageId> {
        self.abandoned.iter().map(|past| past.through).max()
    }

    /// Returns the newest image of abandoned attempts and of other runs as well (see
    /// [`newest_abandoned`](Self::newest_abandoned)): no number is used twice.
    #[must_use]
    pub fn newest_of_others(&self) -> Option<ImageId> {
        self.newest_abandoned().max(self.begun_after)
    }

    /// The job came back from an image. Newer ones that were passed over may be restored yet.
    pub fn came_back(&mut self, id: ImageId, images: &[ImageEntry]) {
        let mut newer = images.iter().filter(|image| image.id > id);
        let passed_over = newer.any(|image| self.goes_on_from(image) || self.may_go_on_from(image));
        self.came_from = passed_over.then_some(id);
    }

    /// The job as it came back has an image: those that were passed over are of another life now. Whether there are any.
    pub fn leaves_behind(&mut self, taken: ImageId) -> bool {
        let through = ImageId::new(taken.number().saturating_sub(1));
        let past = self.came_from.take().zip(through);
        let past = past.map(|(after, through)| Abandoned { after, through });
        self.abandoned.extend(past);
        past.is_some()
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
        let newest = newest.max(self.newest_abandoned());
        self.abandoned.extend(newest.map(|newest| Abandoned {
            after: id,
            through: newest,
        }));
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

/// Older versions knew of the last time alone.
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
mod tests {
    //! Tests of which images a run goes on from, and of its file.

    use super::*;

    const RUN: u64 = 7;

    fn id(number: u64) -> ImageId {
        ImageId::new(number).unwrap()
    }

    /// The run's images of these numbers.
    fn images(numbers: std::ops::RangeInclusive<u64>) -> Vec<ImageEntry> {
        let image = |number| ImageEntry {
            id: id(number),
            created_unix_ms: 0,
            raw_bytes: 0,
            stored_bytes: 0,
            meta: format!("{{\"run\": {RUN}}}").into_bytes(),
            damaged: None,
            pinned: None,
        };
        numbers.map(image).collect()
    }

    fn state() -> RunState {
        RunState::new(vec!["job".to_owned()], PathBuf::from("/"), RUN)
    }

    /// The numbers that the run goes on from, of `images`.
    fn line(state: &RunState, images: &[ImageEntry]) -> Vec<u64> {
        let ours = images.iter().filter(|image| state.goes_on_from(image));
        ours.map(|image| image.id.number()).collect()
    }

    #[test]
    fn a_run_that_goes_back_twice_revives_nothing_that_it_gave_up_first() {
        let mut state = state();
        state.go_back(id(1), &images(1..=7)).unwrap();
        assert_eq!(line(&state, &images(1..=9)), [1, 8, 9]);
        state.go_back(id(8), &images(1..=9)).unwrap();
        assert_eq!(line(&state, &images(1..=11)), [1, 8, 10, 11]);
        state.go_back(id(8), &images(1..=11)).unwrap();
        assert_eq!(line(&state, &images(1..=11)), [1, 8]);
    }

    #[test]
    fn an_image_that_was_given_up_is_gone_back_to_with_what_it_came_of() {
        let mut state = state();
        state.go_back(id(1), &images(1..=7)).unwrap();
        state.go_back(id(5), &images(1..=10)).unwrap();
        assert_eq!(line(&state, &images(1..=11)), [1, 2, 3, 4, 5, 11]);
        state.go_back(id(9), &images(1..=12)).unwrap();
        assert_eq!(line(&state, &images(1..=13)), [1, 8, 9, 13]);
        state.go_back(id(11), &images(1..=13)).unwrap();
        assert_eq!(line(&state, &images(1..=13)), [1, 2, 3, 4, 5, 11]);
    }

    #[test]
    fn images_that_were_passed_over_are_left_behind_once_there_is_a_new_one() {
        let mut state = state();
        state.came_back(id(2), &images(1..=2));
        assert!(!state.leaves_behind(id(3)));
        state.came_back(id(1), &images(1..=3));
        assert_eq!(line(&state, &images(1..=3)), [1, 2, 3]);
        assert!(state.leaves_behind(id(4)));
        assert!(!state.leaves_behind(id(5)));
        assert_eq!(line(&state, &images(1..=5)), [1, 4, 5]);
        let mut unreadable = images(1..=5);
        unreadable[4].meta.clear();
        unreadable[4].damaged = Some("cannot read the manifest".to_owned());
        state.came_back(id(4), &unreadable);
        assert!(state.leaves_behind(id(6)));
        assert_eq!(line(&state, &images(1..=6)), [1, 4, 6]);
    }

    #[test]
    fn an_image_that_cannot_be_read_is_not_of_a_run_that_began_after_it() {
        let unreadable = |number| ImageEntry {
            meta: Vec::new(),
            damaged: Some("torn".to_owned()),
            ..images(number..=number).remove(0)
        };
        let mut state = state();
        state.begin_attempt(RUN, &images(1..=3));
        assert_eq!(state.newest_of_others(), Some(id(3)));
        for (number, may) in [(3, false), (4, true)] {
            let image = unreadable(number);
            assert_eq!(
                (state.may_have(&image), state.may_go_on_from(&image)),
                (may, may)
            );
        }
    }

    #[test]
    fn numbers_of_images_that_were_given_up_are_remembered_when_these_are_gone() {
        let mut state = state();
        assert_eq!(state.newest_abandoned(), None);
        state.go_back(id(1), &images(1..=7)).unwrap();
        // Damaged ones were removed.
        state.go_back(id(1), &images(1..=3)).unwrap();
        assert_eq!(state.newest_abandoned(), Some(id(7)));
        assert_eq!(line(&state, &images(1..=8)), [1, 8]);
    }

    #[test]
    fn what_older_versions_wrote_is_read_and_what_is_written_comes_back() {
        let folder = tempfile::tempdir().unwrap();
        let mut text = serde_json::to_value(state()).unwrap();
        text["abandoned"] = serde_json::json!({"after": id(1), "through": id(7)});
        fs::write(folder.path().join(FILE), text.to_string()).unwrap();
        let mut state = RunState::load(folder.path()).unwrap().unwrap();
        assert_eq!(line(&state, &images(1..=8)), [1, 8]);
        state.go_back(id(8), &images(1..=9)).unwrap();
        state.save(folder.path()).unwrap();
        assert_eq!(RunState::load(folder.path()).unwrap(), Some(state));
    }
}

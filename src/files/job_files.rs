//! The files of a run's job, over its snapshots and restores: the record, the watcher, and the newest set.

use std::collections::HashSet;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use super::changes::{Changed, changed_since};
use super::kept::KeptFiles;
use super::patterns::Patterns;
use super::record::Record;
use super::rollback::{OnLost, Place, Rollback, RollbackError};
use super::wire::{Marker, MarkerError};
use crate::sync::locked;

/// Name of the record in the store.
const RECORD: &str = "files.log";

/// What is known of the job's files.
#[derive(Debug)]
pub struct JobFiles {
    folder: PathBuf,
    excluded: Patterns,
    ours: Vec<PathBuf>,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    record: Record,
    marker: Option<Marker>,
    /// The set of the image that the job was last saved to or restored from.
    newest: Option<(u64, Arc<KeptFiles>)>,
}

/// What became of the files since the newest set, while the job is frozen.
#[derive(Debug)]
pub struct Changes {
    /// The earlier set, and the image that has it.
    pub earlier: Option<(u64, Arc<KeptFiles>)>,
    /// The paths that differ from it, or may.
    pub changed: Vec<Changed>,
    /// Why not all changes are known, if that is so.
    pub gap: Option<String>,
}

impl JobFiles {
    /// Reads the record in the `store`. `work` is ckpt-run's own folder beside it, `folder` the job's working folder, `exclude` the patterns of files that are
    /// never saved.
    ///
    /// # Errors
    /// The record cannot be read, or a pattern is none.
    pub fn open(store: &Path, work: &Path, folder: &Path, exclude: &[String]) -> io::Result<Self> {
        let excluded = Patterns::new(exclude, folder).map_err(io::Error::other)?;
        // As the kernel names it.
        let mut ours = vec![store.canonicalize()?, work.canonicalize()?];
        let output = [1, 2].map(|number| format!("/proc/self/fd/{number}"));
        ours.extend(
            output
                .into_iter()
                .filter_map(|it| std::fs::read_link(it).ok()),
        );
        let state = State {
            record: Record::open(&store.join(RECORD))?,
            marker: None,
            newest: None,
        };
        Ok(Self {
            folder: folder.to_owned(),
            excluded,
            ours,
            state: Mutex::new(state),
        })
    }

    /// Forgets what earlier lives of the job did: it starts from the beginning.
    ///
    /// # Errors
    /// The record cannot be removed.
    pub fn begin_anew(&self) -> io::Result<()> {
        let mut state = locked(&self.state);
        state.newest = None;
        state.record.clear()
    }

    /// Prepares a watcher; the descriptors are for it.
    ///
    /// # Errors
    /// The record cannot be opened.
    pub fn new_watcher(&self) -> io::Result<[OwnedFd; 2]> {
        let mut state = locked(&self.state);
        let (marker, descriptors) = Marker::new(state.record.path())?;
        state.marker = Some(marker);
        Ok(descriptors)
    }

    /// Waits until the new watcher watches.
    ///
    /// # Errors
    /// It does not.
    pub fn await_watcher(&self) -> Result<(), MarkerError> {
        locked(&self.state)
            .marker
            .as_ref()
            .map_or(Ok(()), Marker::wait)
    }

    /// Forgets the watcher: its sandbox ends.
    pub fn drop_watcher(&self) {
        locked(&self.state).marker = None;
    }

    /// Lists what has changed since the newest set, for the image `id`, while the job is frozen. `open` are the files
    /// that the list of open files has.
    #[must_use]
    pub fn changes(&self, id: u64, open: &HashSet<&Path>) -> Changes {
        let mut state = locked(&self.state);
        let marked = state.marker.as_ref().map(|marker| marker.mark(id));
        let mut gap = match marked {
            None => Some("nobody watches the job's files".to_owned()),
            Some(Err(error)) => {
                state.marker = None;
                Some(error.to_string())
            }
            Some(Ok(())) => None,
        };
        if let Err(error) = state.record.catch_up() {
            gap = Some(format!("the record cannot be read: {error}"));
        }
        let earlier = state.newest.clone();
        let none = KeptFiles::default();
        let (set, time) = match &earlier {
            Some((id, set)) => (&**set, state.record.time_of(*id)),
            None => (&none, 0),
        };
        let changed = changed_since(&state.record, set, time, open, &self.excluded);
        Changes {
            earlier,
            changed,
            gap,
        }
    }

    /// Remembers the set of the image that the job was saved to or restored from.
    pub fn now_at(&self, id: u64, set: Arc<KeptFiles>) {
        locked(&self.state).newest = Some((id, set));
    }

    /// Plans the rollback to the set of an image; see [`Rollback::plan`].
    ///
    /// # Errors
    /// As there; the record cannot be read.
    pub fn plan(
        &self,
        id: u64,
        set: &KeptFiles,
        open: &HashSet<&Path>,
        on_lost: OnLost,
    ) -> Result<Rollback, RollbackError> {
        let mut state = locked(&self.state);
        let path = state.record.path().to_owned();
        let caught_up = state.record.catch_up();
        caught_up.map_err(|source| RollbackError::System {
            operation: "read",
            path,
            source,
        })?;
        let place = Place {
            folder: &self.folder,
            ours: &self.ours,
            open,
            excluded: &self.excluded,
        };
        Rollback::plan(set, state.record.since(id), place, on_lost)
    }

    /// Returns the store and the work folder: nothing in them is the job's.
    #[must_use]
    pub fn ours(&self) -> &[PathBuf] {
        &self.ours[..2]
    }

    /// Returns the file of the record.
    #[must_use]
    pub fn record_path(&self) -> PathBuf {
        locked(&self.state).record.path().to_owned()
    }
}

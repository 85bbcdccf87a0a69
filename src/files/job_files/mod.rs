//! The job's files over all snapshots and restores of a run: the record, the watcher, and the newest set.

mod at_restore;
mod kept_summary;
mod warnings;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::{Arc, Mutex};

use super::changes::{Changed, Earlier, Look, OpenUses, SoFar, changed_since, gap_since, time_of};
use super::file_set::{KeptFile, KeptFiles, TICK_NS};
use super::folder_scan::{Scan, folders_of};
use super::held::Held;
use super::lost::OnLost;
use super::marker::{self, Mark, Marker, MarkerError, Request};
use super::patterns::Patterns;
use super::record::{Evidence, Record};
use super::record_line::{Line, append};
use crate::clock;
use crate::sync::locked;
pub use at_restore::ImageFiles;
pub use kept_summary::Kept;

/// Reason why changes may be missing if the job's programs report theirs.
pub(crate) const REPORTS_ONLY: &str = "the kernel reports them to root only, and programs that are linked statically or make system calls themselves (Go, Bun) report none";
/// Reason why changes may be missing if nobody records them.
const NO_WATCHER: &str = "no watcher records the job's changes";
/// Usual paths of process accounting (acct(2)), a file in which the kernel writes in the name of each process that ends.
pub const ACCOUNTING: [&str; 3] = ["/var/log/account", "/var/account", "/var/log/pacct"];
/// Name of the record in the store.
const RECORD: &str = "files.log";

/// State of the job's files.
#[derive(Debug)]
pub struct JobFiles {
    folder: PathBuf,
    included: Patterns,
    excluded: Patterns,
    shared: Patterns,
    on_lost: OnLost,
    held: Held,
    evidence: Evidence,
    ours: Vec<PathBuf>,
    /// Files that ckpt-run's own output goes to.
    outputs: Vec<PathBuf>,
    state: Mutex<State>,
    /// Time at which this supervisor saw the end of the job that the watcher watched, in nanoseconds since 1970; 0 before.
    seen_ns: AtomicI64,
}

#[derive(Debug)]
struct State {
    record: Record,
    marker: Option<Marker>,
    /// Number of the last mark, written or requested.
    mark: u64,
    /// The set of the image that the job was last saved to or restored from.
    newest: Option<Arc<Earlier>>,
    /// Time from which a scan finds changes if there is no set.
    begun_ns: i64,
    /// Subject of the last warning: files that are not kept, and the reason why changes are unknown.
    warned: Option<(Vec<PathBuf>, Option<String>)>,
    /// Files that were reported as written by other programs, too.
    contested: BTreeSet<PathBuf>,
}

/// The settings that concern the job's files.
#[derive(Clone, Copy, Debug)]
pub struct Choice<'a> {
    /// `files.include`.
    pub include: &'a [String],
    /// `files.exclude`.
    pub exclude: &'a [String],
    /// `files.shared`.
    pub shared: &'a [String],
    /// `files.on_lost`.
    pub on_lost: OnLost,
    /// Name of the settings file in the working folder: the user may edit it between two runs, and no job writes it.
    pub settings: &'a str,
}

/// Changes since the newest set, determined while the job is frozen.
#[derive(Debug)]
pub struct Changes {
    /// The earlier set.
    pub earlier: Option<Arc<Earlier>>,
    /// Paths that differ from the set, or may differ.
    pub changed: Vec<Changed>,
    /// Reason why not all changes are known, if there is one.
    pub gap: Option<String>,
}

impl State {
    fn next_mark(&mut self) -> u64 {
        self.mark = self.mark.max(self.record.mark()).saturating_add(1);
        self.mark
    }
}

impl JobFiles {
    /// Reads the record in the `store`. `work` is ckpt-run's private folder beside it, `folder` the job's working
    /// folder.
    ///
    /// # Errors
    /// The record cannot be read, or a pattern is invalid.
    pub fn open(store: &Path, work: &Path, folder: &Path, choice: Choice<'_>) -> io::Result<Self> {
        let patterns = |list: &[String]| Patterns::new(list, folder).map_err(io::Error::other);
        // The paths must be those that the kernel reports.
        let mut ours = vec![store.canonicalize()?, work.canonicalize()?];
        ours.extend(folder.canonicalize().map(|it| it.join(choice.settings)));
        let outputs = [1, 2].map(|number| format!("/proc/self/fd/{number}"));
        let outputs = outputs.iter().filter_map(|it| std::fs::read_link(it).ok());
        let outputs: Vec<PathBuf> = outputs.filter(|path| path.is_file()).collect();
        ours.extend(outputs.iter().cloned());
        let path = store.join(RECORD);
        // An earlier supervisor's sandbox may still be exiting, and its watcher writes the last line.
        let mut record = marker::locked_record(&path).and_then(|_lock| {
            let record = Record::open(&path)?;
            record.end_last_line()?;
            Ok(record)
        })?;
        record.end_cut(None)?;
        let state = State {
            record,
            marker: None,
            mark: 0,
            newest: None,
            begun_ns: clock::unix_ns(),
            warned: None,
            contested: BTreeSet::new(),
        };
        Ok(Self {
            folder: folder.to_owned(),
            included: patterns(choice.include)?,
            excluded: patterns(choice.exclude)?,
            shared: patterns(choice.shared)?,
            on_lost: choice.on_lost,
            held: Held::of(store),
            evidence: Evidence::of(store),
            ours,
            outputs,
            state: Mutex::new(state),
            seen_ns: AtomicI64::new(0),
        })
    }

    /// Discards the record of earlier attempts, because the job starts from the beginning.
    ///
    /// # Errors
    /// The record cannot be removed.
    pub fn begin_anew(&self) -> io::Result<()> {
        let mut state = locked(&self.state);
        state.newest = None;
        state.begun_ns = clock::unix_ns();
        self.evidence.clear()?;
        state.record.clear()
    }

    /// Returns the variable that makes the programs of a job without a watcher report their changes.
    ///
    /// # Errors
    /// The folder for the reports cannot be created.
    pub fn begin_reports(&self) -> io::Result<(&'static str, &Path)> {
        self.evidence.begin()
    }

    /// Prepares a watcher and returns the descriptors for it.
    ///
    /// # Errors
    /// The record cannot be opened.
    pub fn new_watcher(&self) -> io::Result<[OwnedFd; 2]> {
        let mut state = locked(&self.state);
        let (marker, descriptors) = Marker::new(state.record.path())?;
        state.marker = Some(marker);
        self.seen_ns.store(0, Ordering::Relaxed);
        Ok(descriptors)
    }

    /// Notes that the job and its watcher have ended by now.
    pub fn note_end(&self) {
        self.seen_ns.store(clock::unix_ns(), Ordering::Relaxed);
    }

    /// Waits until the new watcher is running.
    ///
    /// # Errors
    /// The watcher failed to start.
    pub fn await_watcher(&self) -> Result<(), MarkerError> {
        locked(&self.state)
            .marker
            .as_ref()
            .map_or(Ok(()), Marker::wait)
    }

    /// Drops the watcher of a sandbox that ends, or one that has ended.
    pub fn drop_watcher(&self) {
        locked(&self.state).marker = None;
    }

    /// Returns true if the watcher of the present sandbox has ended before the job.
    pub fn has_lost_watcher(&self) -> bool {
        let state = locked(&self.state);
        state.marker.as_ref().is_some_and(Marker::is_gone)
    }

    /// Lists the changes since the newest set while the job is running, for the image `id`, so that few files remain to
    /// be inspected during the freeze. Returns `None` if not all changes are known.
    #[must_use]
    pub fn changes_so_far(&self, id: u64) -> Option<SoFar> {
        let mut state = locked(&self.state);
        if let Err(reason) = request(&mut state, id, Mark::Prepared) {
            tracing::debug!(reason, "cannot list the changes before the freeze");
            return None;
        }
        state.record.catch_up().ok()?;
        let newest = state.newest.as_deref();
        let none = Earlier::default();
        let earlier = newest.unwrap_or(&none);
        if gap_since(&state.record, newest).is_some() {
            return None;
        }
        let look = Look {
            record: &state.record,
            earlier,
            since: time_of(&state.record, newest),
            so_far: None,
            open: &OpenUses::new(),
            included: &self.included,
            excluded: &self.excluded,
            scanned: &BTreeSet::new(),
        };
        let files = changed_since(look).into_iter();
        let mut files: BTreeMap<_, _> = files.map(|it| (it.path, it.file)).collect();
        // Files that were open or mapped are inspected again even without a change on record.
        let known = &earlier.set.files;
        files.retain(|path, _| !known.get(path).is_some_and(KeptFile::is_unsettled));
        let mut paths = files.keys();
        let is_watched = paths.all(|path| state.record.unwatched_mount(path).is_none());
        let time = state.record.time_of(id);
        is_watched.then(|| SoFar::new(time, files))
    }

    /// Lists the changes since the newest set during the freeze, for the image `id`. `open` are the files that the job
    /// has open for writing, `so_far` are the changes found before the freeze.
    #[must_use]
    pub fn changes(&self, id: u64, open: &OpenUses<'_>, so_far: Option<SoFar>) -> Changes {
        let mut state = locked(&self.state);
        let newest = state.newest.clone();
        let none = Earlier::default();
        let earlier = newest.as_deref().unwrap_or(&none);
        let set = &earlier.set;
        let unmarked = self.mark(&mut state, id);
        let gap = unmarked.or_else(|| gap_since(&state.record, newest.as_deref()));
        // A later change may be missing.
        let so_far = so_far.filter(|_| gap.is_none());
        let begun_ns = if newest.is_some() {
            set.frozen_ns - TICK_NS
        } else {
            state.begun_ns
        };
        let (scanned, gap) = self.scan(&state.record, set, open, begun_ns, gap);
        let look = Look {
            record: &state.record,
            earlier,
            since: so_far
                .as_ref()
                .map_or_else(|| time_of(&state.record, newest.as_deref()), |it| it.time),
            so_far: so_far.as_ref(),
            open,
            included: &self.included,
            excluded: &self.excluded,
            scanned: &scanned,
        };
        let mut changed = changed_since(look);
        if let Some(mut so_far) = so_far {
            for one in &changed {
                so_far.files.remove(&one.path);
            }
            let known = so_far.files.into_iter();
            changed.extend(known.map(|(path, file)| Changed::known(path, file, earlier)));
        }
        Changes {
            earlier: newest,
            changed,
            gap,
        }
    }

    /// Scans for changes if the record is incomplete, and for the files of `files.include`. Returns the paths, and the
    /// reason why changes are still unknown.
    fn scan(
        &self,
        record: &Record,
        set: &KeptFiles,
        open: &OpenUses<'_>,
        begun_ns: i64,
        gap: Option<String>,
    ) -> (BTreeSet<PathBuf>, Option<String>) {
        let is_unsure = |path: &Path| gap.is_some() || record.unwatched_mount(path).is_some();
        // The job is frozen, and a set may have many files: if the record is complete, only those below mount points of
        // unwatched file systems are considered.
        let tops: Vec<&Path> = match &gap {
            Some(_) => vec![Path::new("/")],
            None => record.unwatched_mounts().collect(),
        };
        let files = tops.iter().flat_map(|top| set.below(top));
        let open = open.keys().copied();
        let open = open.filter(|path| tops.iter().any(|top| path.starts_with(top)));
        let mut unsure_folders = HashMap::new();
        let known: Vec<&Path> = files
            .chain(open)
            .filter(|path| {
                let folder = path.parent().unwrap_or(path);
                *unsure_folders
                    .entry(folder)
                    .or_insert_with(|| is_unsure(folder))
                    || record.is_unwatched_mount(path)
            })
            .collect();
        let folders = folders_of(known.iter().copied());
        let tree_is_unsure = is_unsure(&self.folder);
        let look = |tree, folders| Scan {
            tree,
            folders,
            ours: &self.ours,
        };
        let tree = tree_is_unsure.then_some(self.folder.as_path());
        let mut found = BTreeSet::new();
        let mut failure = None;
        match look(tree, &folders).changed(begun_ns) {
            Ok(changed) => found.extend(changed),
            Err(error) => failure = Some(error),
        }
        // A removed file has no entry in its folder.
        found.extend(known.into_iter().map(Path::to_owned));
        let nothing = BTreeSet::new();
        for root in self.included.roots() {
            let mut see = |path: &Path, _: &std::fs::Metadata| {
                if self.included.matches(path) && !set.files.contains_key(path) {
                    found.insert(path.to_owned());
                }
            };
            if let Err(error) = look(Some(root), &nothing).walk(&mut see) {
                failure = Some(error);
            }
        }
        // The folder itself changes with every file in it, and other programs have files in it, too.
        found.remove(&self.folder);
        let gap = gap.or_else(|| {
            // The root folder is not searched.
            self.folder.parent()?;
            let mount = record.unwatched_mount(&self.folder)?;
            Some(format!(
                "the file system at {} cannot be watched",
                mount.display()
            ))
        });
        match (failure, gap) {
            (Some(error), Some(gap)) => (found, Some(format!("{gap}, and {error}"))),
            (Some(error), None) => (found, Some(error.to_string())),
            (None, gap) => (found, gap),
        }
    }

    /// Returns the store's folder of held files.
    #[must_use]
    pub fn held(&self) -> &Held {
        &self.held
    }

    /// Records the set of the image that the job was saved to or restored from.
    pub fn now_at(&self, id: u64, set: Arc<KeptFiles>) {
        let mut state = locked(&self.state);
        state.newest = Some(Arc::new(Earlier::new(id, set)));
        if let Err(error) = self.evidence.forget() {
            tracing::debug!(%error, "cannot remove the job's reports of its files");
        }
        if let Err(error) = state.record.compact_if_due() {
            tracing::debug!(%error, "cannot compact the record of the job's files");
        }
    }

    /// Has the watcher write a mark for the image, and reads the record up to the mark. If there is no mark, returns the
    /// reason; the record then has the reports of the job's programs, a gap and a mark of the supervisor's.
    fn mark(&self, state: &mut State, id: u64) -> Option<String> {
        let earlier = state.newest.as_ref();
        let since_ns = earlier.map_or(state.begun_ns, |it| it.set.frozen_ns);
        let reported = self.record_reports(&mut state.record, since_ns);
        let reason = match request(state, id, Mark::Frozen) {
            Ok(()) => None,
            Err(_) if state.marker.is_none() && self.evidence.is_used() => {
                Some(REPORTS_ONLY.to_owned())
            }
            Err(reason) => Some(reason),
        };
        // A late watcher may still write the mark of the request: it does not count.
        let written = reason.as_ref().map_or(Ok(()), |reason| {
            let gap = Line::Gap {
                reason: reason.clone(),
            };
            let mark = state.next_mark();
            let image = [gap.clone(), Line::Image { id, mark }, gap];
            let lines = image.into_iter().chain(self.output_lines());
            append(state.record.path(), &lines.collect::<Vec<_>>())
        });
        match reported.and(written).and_then(|()| state.record.catch_up()) {
            Ok(()) => reason,
            Err(error) => Some(format!("the record of the job's files: {error}")),
        }
    }

    /// Returns the lines by which a later start, with other files for its output, knows those of this one: without a watcher, the
    /// record does not show who has changed them.
    fn output_lines(&self) -> impl Iterator<Item = Line> {
        self.outputs.iter().map(|path| Line::Other {
            path: path.clone(),
            created: false,
        })
    }

    /// Adds the reports of the job's programs since a time to the record, except those of files that a watcher watches.
    fn record_reports(&self, record: &mut Record, since_ns: i64) -> io::Result<()> {
        record.catch_up()?;
        let is_ours = |path: &Path| self.ours.iter().any(|ours| path.starts_with(ours));
        let is_concern = |path: &Path| !is_ours(path) && !record.is_watched(path);
        self.evidence
            .take(is_concern, since_ns, |lines| match lines {
                [] => Ok(()),
                lines => append(record.path(), lines),
            })
    }

    /// Returns the store and the work folder, which contain no files of the job.
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

/// Has the watcher write a mark for the image.
///
/// # Errors
/// The reason why there is no mark.
fn request(state: &mut State, id: u64, when: Mark) -> Result<(), String> {
    let mark = state.next_mark();
    let Some(marker) = &mut state.marker else {
        return Err(NO_WATCHER.to_owned());
    };
    let newest = state.newest.as_ref();
    let newest_ns = newest.map_or(state.begun_ns, |it| it.set.frozen_ns);
    let caught_up = marker.catch_up(when);
    if let Ok(true) = caught_up {
        // Changes of a running job may have been recorded before that mark.
        let reason = MarkerError::Late.to_string();
        let appended = append(state.record.path(), &[Line::Gap { reason }]);
        appended.map_err(|error| format!("the record of the job's files: {error}"))?;
    }
    let marked = caught_up.and_then(|_| {
        marker.mark(Request {
            image: id,
            newest_ns,
            mark,
        })
    });
    marked.map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests;

//! The rollback of the job's files to the set of an image.
//!
//! The plan is a pure comparison: it checks everything and changes nothing. Before it is carried out, the record in the
//! store is told of every path that it changes. A rollback that is cut short, by a kill or a full disk, is therefore
//! planned again from what it left, and ends in the same state.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::fmt::{self, Write as _};
use std::path::{Path, PathBuf};

use super::kept::{Content, KeptFile, KeptFiles, Kind, Unkept, changed_ns};
use super::patterns::Patterns;
use super::record::{Since, everything_in};

/// What happens when a file cannot be put back (`files.on_lost`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnLost {
    /// The image is refused.
    Refuse,
    /// The job is restored with the file as it is, and a warning names it.
    Warn,
}

/// A file that cannot be made equal to the snapshot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Lost {
    /// Its path.
    pub path: PathBuf,
    /// Why.
    pub why: Why,
}

/// Why a file cannot be made equal to the snapshot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Why {
    /// Its content at the snapshot is not in the image.
    Unkept(Unkept),
    /// It existed before the job first changed it, which was after the snapshot.
    NotYetJobs,
    /// The job and another program have both changed it.
    OthersToo,
    /// It changed, and nobody knows who did it.
    Unknown,
    /// It belonged to another user at the snapshot.
    Owner,
}

impl fmt::Display for Why {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unkept(reason) => {
                write!(
                    f,
                    "the job changed it, and its content was not kept: {reason}"
                )
            }
            Self::NotYetJobs => f.write_str("the job first changed it after the snapshot"),
            Self::OthersToo => f.write_str("the job and another program changed it"),
            Self::Unknown => f.write_str("it changed, and it is not known who changed it"),
            Self::Owner => f.write_str("it belongs to another user now"),
        }
    }
}

/// Limit on the files that a message names.
const NAMED_MAX: usize = 5;

/// Why files cannot be rolled back.
#[derive(Debug, thiserror::Error)]
pub enum RollbackError {
    /// Some files would differ from the snapshot.
    #[error("cannot put back {}; put them back yourself, restore an older image, or accept them as they are with files.on_lost = \"warn\"{}", named(lost), gap.as_ref().map_or(String::new(), |gap| format!(" (not all changes are known: {gap})")))]
    Lost {
        /// The files.
        lost: Vec<Lost>,
        /// Why not all changes are known, if that is so.
        gap: Option<String>,
    },
    /// A system call failed.
    #[error("cannot {operation} {}", path.display())]
    System {
        /// The operation.
        operation: &'static str,
        /// The file.
        path: PathBuf,
        /// The system's error.
        #[source]
        source: std::io::Error,
    },
}

fn named(lost: &[Lost]) -> String {
    let mut text = String::new();
    for (number, one) in lost.iter().take(NAMED_MAX).enumerate() {
        let between = if number == 0 { "" } else { "; " };
        let _ = write!(text, "{between}{} ({})", one.path.display(), one.why);
    }
    if lost.len() > NAMED_MAX {
        let _ = write!(text, "; and {} more", lost.len() - NAMED_MAX);
    }
    text
}

/// The steps that make the job's files equal to a set.
#[derive(Debug, Default)]
pub struct Rollback {
    /// What the job made since: it goes aside.
    pub(super) aside: Vec<PathBuf>,
    /// What the job renamed since: its present name, and the one it had.
    pub(super) moves: Vec<(PathBuf, PathBuf)>,
    /// What is put back, in the order of the paths: folders before what is in them.
    pub(super) put_back: Vec<(PathBuf, KeptFile)>,
    /// Files that stay as they are, although they differ.
    pub lost: Vec<Lost>,
}

/// What a plan needs to know besides the set and the record.
#[derive(Clone, Copy, Debug)]
pub struct Place<'a> {
    /// The job's working folder.
    pub folder: &'a Path,
    /// Paths that are ckpt-run's own: the store, and the files that its output goes to.
    pub ours: &'a [PathBuf],
    /// The files of the list of open files: somebody else rolls them back.
    pub open: &'a HashSet<&'a Path>,
    /// `files.exclude`.
    pub excluded: &'a Patterns,
}

impl Rollback {
    /// Compares the files with the set of an image, and with what happened since.
    ///
    /// # Errors
    /// [`RollbackError::Lost`] names all files that would differ, unless the user accepts that.
    pub fn plan(
        set: &KeptFiles,
        since: Since<'_>,
        place: Place<'_>,
        on_lost: OnLost,
    ) -> Result<Self, RollbackError> {
        let mut places: Vec<&Path> = set.files.keys().map(PathBuf::as_path).collect();
        places.push(place.folder);
        let gap = since.gap(&places);
        let mut plan = Self::default();
        let concerns = |path: &Path| !place.open.contains(path) && !place.excluded.matches(path);
        for (path, file) in set.files.iter().filter(|(path, _)| concerns(path)) {
            plan.compare(path, file, since, gap.is_some());
        }
        let new = since
            .touched()
            .filter(|(path, _)| !set.files.contains_key(*path));
        for (path, touch) in new.filter(|(path, _)| concerns(path)) {
            let found = path.symlink_metadata().ok();
            let is_folder = found.as_ref().is_some_and(std::fs::Metadata::is_dir);
            match (since.was_not_jobs(&touch), found) {
                // A folder of somebody's is not lost by what the job makes in it.
                (true, Some(_)) if is_folder => {}
                (true, _) => plan.lose(path, Why::NotYetJobs),
                (false, Some(_)) => plan.aside.push(path.to_owned()),
                (false, None) => {}
            }
        }
        if gap.is_some() {
            plan.look_around(set, since, place);
        }
        plan.find_renamed(set);
        // What is in a folder goes before the folder.
        plan.aside.sort_by(|left, right| right.cmp(left));
        if plan.lost.is_empty() || on_lost == OnLost::Warn {
            return Ok(plan);
        }
        Err(RollbackError::Lost {
            lost: plan.lost,
            gap,
        })
    }

    fn lose(&mut self, path: &Path, why: Why) {
        let path = path.to_owned();
        self.lost.push(Lost { path, why });
    }

    /// Decides about a file of the set.
    fn compare(&mut self, path: &Path, then: &KeptFile, since: Since<'_>, gap: bool) {
        let now = KeptFile::of(path);
        if now.as_ref().is_some_and(|now| then.is_unchanged(now)) {
            return;
        }
        let is_same_folder = then.kind == Kind::Folder
            && now.as_ref().is_some_and(|now| {
                now.kind == Kind::Folder && (now.mode, now.owner) == (then.mode, then.owner)
            });
        if is_same_folder {
            return;
        }
        if !since.by_job(path) {
            if gap {
                self.lose(path, Why::Unknown);
            }
            // Else somebody else has changed it, and the job would see that without a restore, too.
            return;
        }
        if since.by_others(path) && then.kind != Kind::Folder {
            self.lose(path, Why::OthersToo);
            return;
        }
        if let Some(now) = &now
            && now.owner.0 != then.owner.0
        {
            self.lose(path, Why::Owner);
            return;
        }
        let is_there = now.as_ref().is_some_and(|now| then.has_same_content(now));
        match &then.kind {
            Kind::File {
                content: Content::Unkept(reason),
                ..
            } if !is_there => self.lose(path, Why::Unkept(*reason)),
            Kind::File {
                content: Content::Open,
                ..
            } => {}
            _ => self.put_back.push((path.to_owned(), then.clone())),
        }
    }

    /// Finds files of the set among those that the job made since: they have another name only, and get theirs back.
    fn find_renamed(&mut self, set: &KeptFiles) {
        let files = set.files.iter();
        let files = files.filter(|(_, file)| matches!(file.kind, Kind::File { .. }));
        let mut names: HashMap<(u64, u64), &Path> = files
            .map(|(path, file)| (file.identity, path.as_path()))
            .collect();
        let identity = |path: &Path| KeptFile::of(path).map(|file| file.identity);
        let mut moves = Vec::new();
        self.aside.retain(|from| {
            let Some(identity_now) = identity(from) else {
                return true;
            };
            let Some(to) = names.get(&identity_now).copied() else {
                return true;
            };
            if identity(to) == Some(identity_now) {
                return true; // it has both names
            }
            names.remove(&identity_now);
            moves.push((from.clone(), to.to_owned()));
            false
        });
        self.moves = moves;
        for (_, to) in &self.moves {
            // Its content may be all there: then only the name comes back.
            self.lost
                .retain(|lost| lost.path != *to || lost.why == Why::Owner);
            let Some(then) = set.files.get(to) else {
                continue;
            };
            let is_planned = self.put_back.iter().any(|(path, _)| path == to);
            if !is_planned
                && !matches!(
                    then.kind,
                    Kind::File {
                        content: Content::Open,
                        ..
                    }
                )
            {
                self.put_back.push((to.clone(), then.clone()));
            }
        }
        for (from, to) in &self.moves {
            let Some(Kind::File {
                content: Content::Unkept(reason),
                ..
            }) = set.files.get(to).map(|file| &file.kind)
            else {
                continue;
            };
            let now = KeptFile::of(from);
            if !now.is_some_and(|now| set.files[to].has_same_content(&now)) {
                let (path, why) = (to.clone(), Why::Unkept(*reason));
                self.lost.push(Lost { path, why });
            }
        }
        self.put_back.sort_by(|left, right| left.0.cmp(&right.0));
    }

    /// Returns the path at which a file is before the rollback.
    #[must_use]
    pub fn present_path<'a>(&'a self, path: &'a Path) -> &'a Path {
        let mut moves = self.moves.iter();
        let found = moves.find(|(_, to)| to == path);
        found.map_or(path, |(from, _)| from)
    }

    /// Looks for changes that nobody has recorded, in the working folder and wherever the job has files.
    fn look_around(&mut self, set: &KeptFiles, since: Since<'_>, place: Place<'_>) {
        let mut found: BTreeSet<PathBuf> = BTreeSet::new();
        if place.folder.parent().is_some() {
            found.extend(everything_in(place.folder));
        }
        let files = set.files.keys().map(PathBuf::as_path);
        let files = files.chain(place.open.iter().copied());
        let folders: BTreeSet<&Path> = files.filter_map(Path::parent).collect();
        for folder in folders {
            let entries = folder.read_dir().into_iter().flatten().flatten();
            found.extend(entries.map(|entry| entry.path()));
        }
        for path in found {
            let is_known = set.files.contains_key(&path)
                || place.open.contains(path.as_path())
                || since.by_job(&path)
                || since.by_others(&path)
                || place.excluded.matches(&path)
                || place.ours.iter().any(|ours| path.starts_with(ours));
            let is_new = |path: &Path| {
                let metadata = path.symlink_metadata();
                metadata.is_ok_and(|found| found.is_file() && changed_ns(&found) > set.frozen_ns)
            };
            if !is_known && is_new(&path) {
                self.lose(&path, Why::Unknown);
            }
        }
    }

    /// Returns the paths that the rollback changes.
    pub fn paths(&self) -> impl Iterator<Item = &Path> {
        let put_back = self.put_back.iter().map(|(path, _)| path.as_path());
        let moved = self.moves.iter().flat_map(|(from, to)| [from, to]);
        let aside = self.aside.iter().chain(moved).map(PathBuf::as_path);
        aside.chain(put_back)
    }

    /// Returns the contents that the rollback needs: stream, offset, bytes.
    pub fn contents(&self) -> impl Iterator<Item = (&str, u64, u64)> {
        self.put_back
            .iter()
            .filter_map(|(_, file)| match &file.kind {
                Kind::File {
                    size,
                    content: Content::Kept { stream, offset },
                } => Some((stream.as_str(), *offset, *size)),
                _ => None,
            })
    }

    /// Returns how many files go aside and how many are put back.
    #[must_use]
    pub fn counts(&self) -> (usize, usize) {
        (self.aside.len(), self.put_back.len() + self.moves.len())
    }
}

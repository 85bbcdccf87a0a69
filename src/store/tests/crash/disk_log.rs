//! Log of the steps of a change on disk. `fs/ops` reports each step while a log is attached to the folder.
//!
//! A log can also make one of the steps fail.

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::fs::{self, File};
use std::io;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use nix::errno::Errno;

use crate::sync::locked;

/// Target of a step.
pub(in crate::store) enum Target<'a> {
    Path(&'a Path),
    File(&'a File),
}

/// A change on disk.
pub(in crate::store) enum Step {
    Create(PathBuf),
    /// Creates the file if it does not exist.
    Open(PathBuf),
    Write {
        offset: u64,
        bytes: Vec<u8>,
    },
    SetLen(u64),
    /// Ensures that the file has at least this length.
    Extend(u64),
    Punch {
        offset: u64,
        len: u64,
    },
    Sync,
    Rename(PathBuf, PathBuf),
    Remove(PathBuf),
    CreateFolder(PathBuf),
    SyncFolder(PathBuf),
}

/// The object behind a name. Files have a number, because they may have several names or none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Entry {
    File(usize),
    Folder,
}

/// Folders and files below a root; paths are relative to it.
#[derive(Clone, Debug, Default)]
pub(super) struct Tree {
    pub(super) folders: BTreeMap<PathBuf, BTreeMap<String, Entry>>,
    pub(super) contents: Vec<Arc<Vec<u8>>>,
}

/// A change of the names in one folder.
#[derive(Clone, Debug)]
pub(super) enum NameChange {
    Set(String, Entry),
    Unset(String),
    Move(String, String, Entry),
}

/// A change of a file's bytes.
pub(super) enum DataChange {
    Write { offset: usize, bytes: Vec<u8> },
    SetLen(usize),
    Extend(usize),
    Punch { offset: usize, len: usize },
}

/// A step in the view of a crash.
pub(super) enum Event {
    Name(PathBuf, NameChange),
    Data(usize, DataChange),
    /// A sync of a folder: its names are durable from here on.
    SyncFolder(PathBuf),
    /// A sync of a file: its bytes are durable from here on.
    Sync(usize),
}

/// The steps of all changes below a folder, from when it was attached until it is dropped.
pub(super) struct Log {
    recorder: Arc<Recorder>,
}

struct Recorder {
    root: PathBuf,
    base: Tree,
    state: Mutex<State>,
}

struct State {
    events: Vec<Event>,
    /// The files that have names at present.
    files: HashMap<PathBuf, usize>,
    files_begun: usize,
    /// Number of further steps before one fails.
    fails_in: Option<usize>,
    /// The step that fails next, such as "`SyncFolder` of images".
    fails_named: Option<&'static str>,
    /// The step that failed.
    failed: Option<String>,
}

/// The logs of all running tests.
static ATTACHED: Mutex<Vec<Arc<Recorder>>> = Mutex::new(Vec::new());

/// Performs a step or makes it fail; `describe` returns its description.
pub(in crate::store) fn perform<T>(
    target: &Target<'_>,
    act: impl FnOnce() -> io::Result<T>,
    describe: impl Fn() -> Step,
) -> io::Result<T> {
    let path = match target {
        Target::Path(path) => path.to_path_buf(),
        // The present path after renames, or the last path with " (deleted)" at the end.
        Target::File(file) => fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd()))?,
    };
    let recorder = locked(&ATTACHED)
        .iter()
        .find(|recorder| path.starts_with(&recorder.root))
        .map(Arc::clone);
    match recorder {
        Some(recorder) => recorder.perform(&path, act, describe),
        None => act(),
    }
}

impl Log {
    /// Treats the state below `root` as durable and records all later steps.
    pub(super) fn attach(root: &Path) -> Self {
        let base = Tree::read(root);
        let mut files = HashMap::new();
        for (folder, entries) in &base.folders {
            for (name, entry) in entries {
                if let Entry::File(file) = entry {
                    files.insert(folder.join(name), *file);
                }
            }
        }
        let recorder = Arc::new(Recorder {
            root: root.to_owned(),
            state: Mutex::new(State {
                events: Vec::new(),
                files_begun: base.contents.len(),
                files,
                fails_in: None,
                fails_named: None,
                failed: None,
            }),
            base,
        });
        locked(&ATTACHED).push(Arc::clone(&recorder));
        Self { recorder }
    }

    /// Makes the step after `steps` further ones fail.
    pub(super) fn fail_after(&self, steps: usize) {
        locked(&self.recorder.state).fails_in = Some(steps);
    }

    /// Makes the next step of this name fail.
    pub(super) fn fail_next(&self, name: &'static str) {
        locked(&self.recorder.state).fails_named = Some(name);
    }

    /// Returns the step that failed.
    pub(super) fn failed(&self) -> Option<String> {
        locked(&self.recorder.state).failed.clone()
    }

    pub(super) fn len(&self) -> usize {
        locked(&self.recorder.state).events.len()
    }

    /// Returns the state at the beginning, and all events since.
    pub(super) fn take(self) -> (Tree, Vec<Event>) {
        let events = std::mem::take(&mut locked(&self.recorder.state).events);
        (self.recorder.base.clone(), events)
    }
}

impl Drop for Log {
    fn drop(&mut self) {
        locked(&ATTACHED).retain(|recorder| !Arc::ptr_eq(recorder, &self.recorder));
    }
}

impl Recorder {
    /// Performs a step. The lock admits one step at a time, so that steps are logged in their order.
    fn perform<T>(
        &self,
        path: &Path,
        act: impl FnOnce() -> io::Result<T>,
        describe: impl Fn() -> Step,
    ) -> io::Result<T> {
        let mut state = locked(&self.state);
        if state.fails_in.is_some() || state.fails_named.is_some() {
            state.fail(&format!("{} of {}", describe().name(), name_of(path)))?;
        }
        let result = act()?;
        let events = state.events_of(
            describe(),
            |path| path.strip_prefix(&self.root).unwrap().to_owned(),
            path,
        );
        state.events.extend(events);
        Ok(result)
    }
}

impl State {
    /// Returns an error if a failure of this step is due.
    fn fail(&mut self, name: &str) -> io::Result<()> {
        let is_due = self.fails_in == Some(0) || self.fails_named == Some(name);
        self.fails_in = self.fails_in.and_then(|steps| steps.checked_sub(1));
        if is_due {
            self.fails_named = None;
            self.failed = Some(name.to_owned());
            return Err(Errno::EIO.into());
        }
        Ok(())
    }

    /// Converts a step into events. `path` is the path of the target, for steps without a path.
    fn events_of(
        &mut self,
        step: Step,
        relative: impl Fn(&Path) -> PathBuf,
        path: &Path,
    ) -> Option<Event> {
        let name = |path: &Path, change: fn(String, Entry) -> NameChange, entry| {
            let path = relative(path);
            Event::Name(folder_of(&path), change(name_of(&path), entry))
        };
        let data = |state: &Self, change| {
            let file = state.files.get(&relative(path))?;
            Some(Event::Data(*file, change))
        };
        match step {
            Step::Open(path) if self.files.contains_key(&relative(&path)) => None,
            Step::Create(path) | Step::Open(path) => {
                let file = self.files_begun;
                self.files_begun += 1;
                self.files.insert(relative(&path), file);
                Some(name(&path, NameChange::Set, Entry::File(file)))
            }
            Step::CreateFolder(path) => Some(name(&path, NameChange::Set, Entry::Folder)),
            Step::Remove(path) => {
                let file = self.files.remove(&relative(&path)).unwrap();
                Some(name(
                    &path,
                    |name, _| NameChange::Unset(name),
                    Entry::File(file),
                ))
            }
            Step::Rename(from, to) => {
                let (from, to) = (relative(&from), relative(&to));
                assert_eq!(from.parent(), to.parent(), "a rename within a folder");
                let file = self.files.remove(&from).unwrap();
                self.files.insert(to.clone(), file);
                let change = NameChange::Move(name_of(&from), name_of(&to), Entry::File(file));
                Some(Event::Name(folder_of(&to), change))
            }
            Step::Write { offset, bytes } => {
                let offset = usize::try_from(offset).unwrap();
                data(self, DataChange::Write { offset, bytes })
            }
            Step::SetLen(len) => data(self, DataChange::SetLen(usize::try_from(len).unwrap())),
            Step::Extend(len) => data(self, DataChange::Extend(usize::try_from(len).unwrap())),
            Step::Punch { offset, len } => {
                let (offset, len) = (offset.try_into().unwrap(), len.try_into().unwrap());
                data(self, DataChange::Punch { offset, len })
            }
            Step::Sync => self.files.get(&relative(path)).copied().map(Event::Sync),
            Step::SyncFolder(path) => Some(Event::SyncFolder(relative(&path))),
        }
    }
}

impl Step {
    fn name(&self) -> &'static str {
        match self {
            Self::Create(_) => "Create",
            Self::Open(_) => "Open",
            Self::Write { .. } => "Write",
            Self::SetLen(_) => "SetLen",
            Self::Extend(_) => "Extend",
            Self::Punch { .. } => "Punch",
            Self::Sync => "Sync",
            Self::Rename(..) => "Rename",
            Self::Remove(_) => "Remove",
            Self::CreateFolder(_) => "CreateFolder",
            Self::SyncFolder(_) => "SyncFolder",
        }
    }
}

impl fmt::Display for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Name(folder, change) => write!(f, "{}: {change:?}", folder.display()),
            Self::Data(file, DataChange::Write { offset, bytes }) => {
                write!(f, "file {file}: {} bytes at {offset}", bytes.len())
            }
            Self::Data(file, DataChange::SetLen(len)) => write!(f, "file {file}: length {len}"),
            Self::Data(file, DataChange::Extend(len)) => write!(f, "file {file}: room to {len}"),
            Self::Data(file, DataChange::Punch { offset, len }) => {
                write!(f, "file {file}: a hole of {len} bytes at {offset}")
            }
            Self::SyncFolder(folder) => write!(f, "{}: sync", folder.display()),
            Self::Sync(file) => write!(f, "file {file}: sync"),
        }
    }
}

fn folder_of(path: &Path) -> PathBuf {
    path.parent().unwrap().to_owned()
}

fn name_of(path: &Path) -> String {
    path.file_name().unwrap().to_str().unwrap().to_owned()
}

impl Tree {
    fn read(root: &Path) -> Self {
        let mut tree = Self::default();
        tree.read_folder(root, Path::new(""));
        tree
    }

    fn read_folder(&mut self, root: &Path, folder: &Path) {
        let mut entries = BTreeMap::new();
        for found in fs::read_dir(root.join(folder)).unwrap() {
            let found = found.unwrap();
            let name = found.file_name().into_string().unwrap();
            let entry = if found.file_type().unwrap().is_dir() {
                self.read_folder(root, &folder.join(&name));
                Entry::Folder
            } else {
                self.contents
                    .push(Arc::new(fs::read(found.path()).unwrap()));
                Entry::File(self.contents.len() - 1)
            };
            entries.insert(name, entry);
        }
        self.folders.insert(folder.to_owned(), entries);
    }
}

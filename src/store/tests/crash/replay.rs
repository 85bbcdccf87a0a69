//! States of a disk after a crash, derived from the preceding steps.
//!
//! Synced changes are present. Of the others, POSIX allows any subset in any order: each name that was set, removed or
//! moved; each write or hole, or only some of its sectors; each change of a length, also without the bytes written
//! there.

use std::collections::BTreeMap;
use std::fs::{self, DirBuilder, OpenOptions};
use std::io::Write;
use std::ops::Range;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::Path;
use std::sync::Arc;

use super::disk_log::{DataChange, Entry, Event, NameChange, Tree};

/// Smallest unit that a disk writes as a whole.
const SECTOR_BYTES: usize = 512;

/// A crash after some events: the durable changes, and the possible ones.
pub(super) struct Crash<'a> {
    durable: Tree,
    names: BTreeMap<&'a Path, Vec<&'a NameChange>>,
    data: BTreeMap<usize, Vec<&'a DataChange>>,
}

impl<'a> Crash<'a> {
    pub(super) fn after(base: &Tree, events: impl Iterator<Item = &'a Event>) -> Self {
        let mut crash = Self {
            durable: base.clone(),
            names: BTreeMap::new(),
            data: BTreeMap::new(),
        };
        for event in events {
            match event {
                Event::Name(folder, change) => crash.names.entry(folder).or_default().push(change),
                Event::Data(file, change) => crash.data.entry(*file).or_default().push(change),
                Event::SyncFolder(folder) => {
                    for change in crash.names.remove(folder.as_path()).unwrap_or_default() {
                        crash.durable.rename(folder, change);
                    }
                }
                Event::Sync(file) => {
                    for change in crash.data.remove(file).unwrap_or_default() {
                        crash.durable.write(*file, change, |_| true);
                    }
                }
            }
        }
        crash
    }

    /// Returns true if the crash can leave only one state.
    pub(super) fn is_certain(&self) -> bool {
        self.names.is_empty() && self.data.is_empty()
    }

    /// Returns one of the states that the crash may leave.
    pub(super) fn state(&self, seed: u64) -> Tree {
        let mut tree = self.durable.clone();
        let mut fate = Fate::new(seed);
        for (folder, changes) in &self.names {
            for change in fate.order(changes) {
                if fate.keeps_name() {
                    tree.rename(folder, change);
                }
            }
        }
        for (file, changes) in &self.data {
            for change in fate.order(changes) {
                match fate.of_data() {
                    DataFate::Kept => tree.write(*file, change, |_| true),
                    DataFate::Torn => {
                        let chance = fate.below(101);
                        tree.write(*file, change, |_| fate.below(100) < chance);
                    }
                    DataFate::Lost => {}
                }
            }
        }
        tree
    }
}

enum DataFate {
    Kept,
    Torn,
    Lost,
}

/// Choice of the lost changes. The first four seeds are the extremes.
struct Fate {
    seed: u64,
    random: u64,
    names_kept_percent: u64,
    data_kept_percent: u64,
}

impl Fate {
    fn new(seed: u64) -> Self {
        let mut fate = Self {
            seed,
            random: seed,
            names_kept_percent: 0,
            data_kept_percent: 0,
        };
        (fate.names_kept_percent, fate.data_kept_percent) = match seed {
            0 => (100, 0),
            1 => (0, 100),
            2 => (0, 0),
            3 => (100, 100),
            _ => (10 + 40 * fate.below(3), 10 + 40 * fate.below(3)),
        };
        fate
    }

    /// Returns a random number below `limit`, by `SplitMix64`, whose low bits are as random as the others.
    fn below(&mut self, limit: u64) -> u64 {
        self.random = self.random.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut word = self.random;
        word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (word ^ (word >> 31)) % limit
    }

    fn order<'a, T>(&mut self, changes: &[&'a T]) -> Vec<&'a T> {
        let mut changes = changes.to_vec();
        if self.seed > 3 && self.below(2) == 0 {
            for at in (1..changes.len()).rev() {
                let other = usize::try_from(self.below(at as u64 + 1)).unwrap();
                changes.swap(at, other);
            }
        }
        changes
    }

    fn keeps_name(&mut self) -> bool {
        self.below(100) < self.names_kept_percent
    }

    fn of_data(&mut self) -> DataFate {
        if self.below(100) < self.data_kept_percent {
            DataFate::Kept
        } else if self.seed > 3 && self.below(2) == 0 {
            DataFate::Torn
        } else {
            DataFate::Lost
        }
    }
}

impl Tree {
    fn rename(&mut self, folder: &Path, change: &NameChange) {
        let entries = self.folders.entry(folder.to_owned()).or_default();
        match change {
            NameChange::Set(name, entry) => {
                entries.insert(name.clone(), *entry);
            }
            NameChange::Unset(name) => {
                entries.remove(name);
            }
            NameChange::Move(from, to, entry) => {
                entries.remove(from);
                entries.insert(to.clone(), *entry);
            }
        }
    }

    /// Applies a change of a file. The length changes even if none of the bytes arrive: sectors that are not kept have
    /// their old content, or zeros.
    fn write(&mut self, file: usize, change: &DataChange, mut keeps: impl FnMut(usize) -> bool) {
        if self.contents.len() <= file {
            self.contents.resize_with(file + 1, Arc::default);
        }
        let content = Arc::make_mut(&mut self.contents[file]);
        match change {
            DataChange::SetLen(len) => content.resize(*len, 0),
            DataChange::Extend(len) => content.resize(content.len().max(*len), 0),
            DataChange::Write { offset, bytes } => {
                let end = offset + bytes.len();
                content.resize(content.len().max(end), 0);
                for part in sectors(*offset..end).filter(|part| keeps(part.start)) {
                    let from = part.start - offset..part.end - offset;
                    content[part].copy_from_slice(&bytes[from]);
                }
            }
            DataChange::Punch { offset, len } => {
                let end = content.len().min(offset + len);
                for part in sectors(*offset..end).filter(|part| keeps(part.start)) {
                    content[part].fill(0);
                }
            }
        }
    }

    /// Writes the tree into an empty folder.
    pub(super) fn materialise(&self, root: &Path) {
        self.materialise_folder(root, Path::new(""));
    }

    fn materialise_folder(&self, root: &Path, folder: &Path) {
        for (name, entry) in self.folders.get(folder).into_iter().flatten() {
            let path = folder.join(name);
            match entry {
                Entry::Folder => {
                    DirBuilder::new()
                        .mode(0o700)
                        .create(root.join(&path))
                        .unwrap();
                    self.materialise_folder(root, &path);
                }
                Entry::File(file) => {
                    let mut options = OpenOptions::new();
                    let options = options.write(true).create_new(true).mode(0o600);
                    let mut created = options.open(root.join(&path)).unwrap();
                    // A file that was only created has no content yet.
                    if let Some(content) = self.contents.get(*file) {
                        created.write_all(content).unwrap();
                    }
                }
            }
        }
    }

    /// Returns a hash that is equal for equal trees.
    pub(super) fn hash(&self) -> blake3::Hash {
        let mut hasher = blake3::Hasher::new();
        hasher.update(format!("{:?}", self.folders).as_bytes());
        for content in &self.contents {
            hasher.update(&content.len().to_le_bytes());
            hasher.update(content);
        }
        hasher.finalize()
    }

    /// Lists all files with their lengths, for the message about a bad state.
    pub(super) fn describe(&self) -> String {
        let files = self.folders.iter().flat_map(|(folder, entries)| {
            entries.iter().map(move |(name, entry)| match entry {
                Entry::Folder => format!("{}/", folder.join(name).display()),
                Entry::File(file) => format!(
                    "{} ({} bytes)",
                    folder.join(name).display(),
                    self.contents.get(*file).map_or(0, |content| content.len())
                ),
            })
        });
        files.collect::<Vec<_>>().join(", ")
    }
}

/// Splits a range at the borders of sectors.
fn sectors(range: Range<usize>) -> impl Iterator<Item = Range<usize>> {
    let mut at = range.start;
    std::iter::from_fn(move || {
        let next = range.end.min((at / SECTOR_BYTES + 1) * SECTOR_BYTES);
        let part = at..next;
        at = next;
        (!part.is_empty()).then_some(part)
    })
}

/// Returns a folder for states: in memory, if there is a folder for that.
pub(super) fn workplace() -> tempfile::TempDir {
    let memory = Path::new("/dev/shm");
    let made = tempfile::tempdir_in(memory).or_else(|_| tempfile::tempdir());
    let made = made.unwrap();
    assert!(fs::read_dir(made.path()).unwrap().next().is_none());
    made
}

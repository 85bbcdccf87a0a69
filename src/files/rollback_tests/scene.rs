//! The scene of these tests.

use std::collections::BTreeMap;
use std::fs;
use std::io::{self, Write};
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;

use tempfile::TempDir;

use super::super::file_comparison::{Place, SpareContents};
use super::super::file_set::{Content, KeptFile, KeptFiles, Kind, StreamPlace, changed_ns};
use super::super::held::Held;
use super::super::lost::{Lost, OnLost, RollbackError};
use super::super::patterns::Patterns;
use super::super::put_back::{Done, Sources};
use super::super::record::Record;
use super::super::record_line::{JobChange, Line, append};
use super::super::rollback::Rollback;
use crate::safe_path::JobUsers;

/// Number of the image in these tests.
pub const IMAGE: u64 = 1;

/// A job's folder, a store, and the job's files at the snapshot.
pub struct Scene {
    pub folder: TempDir,
    contents: BTreeMap<String, Vec<u8>>,
    pub set: KeptFiles,
    pub spare: SpareContents,
    /// `files.shared`.
    pub shared: Patterns,
    /// End of the job.
    pub ended_ns: Option<i64>,
}

impl Scene {
    /// Creates a scene in which a job has created these files, all of them in the image.
    pub fn new(files: &[(&str, &str)]) -> Self {
        let folder = tempfile::tempdir_in("/var/tmp").unwrap();
        fs::create_dir(folder.path().join("store")).unwrap();
        fs::create_dir(folder.path().join("work")).unwrap();
        let scene = Self {
            folder,
            contents: BTreeMap::new(),
            set: KeptFiles::default(),
            spare: SpareContents::new(),
            shared: Patterns::default(),
            ended_ns: None,
        };
        for (name, text) in files {
            let path = scene.path(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        scene
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join("work").join(name)
    }

    pub fn record(&self) -> PathBuf {
        self.folder.path().join("store/record")
    }

    /// Adds all files in the folder to the set.
    pub fn snapshot(&mut self) {
        let work = self.path("");
        for path in super::super::folder_scan::everything_in(&work).unwrap() {
            let mut file = KeptFile::of(&path).unwrap();
            if let Kind::File { content, .. } = &mut file.kind {
                let stream = path.display().to_string();
                self.contents
                    .insert(stream.clone(), fs::read(&path).unwrap());
                *content = Content::Kept {
                    stream,
                    place: StreamPlace::Whole(0),
                };
            }
            self.set.files.insert(path, file);
        }
        // Files with this timestamp count as changed.
        self.set.frozen_ns = crate::clock::unix_ns();
        let boot = String::new();
        let entries = fs::read_dir(&work).unwrap();
        let names = Line::Names {
            names: entries.map(|entry| entry.unwrap().file_name()).collect(),
            folder: self.path("."),
        };
        let lines = [Line::Begin { boot }, names, Line::image(IMAGE)];
        append(&self.record(), &lines).unwrap();
    }

    pub fn content_of(&mut self, name: &str, content: Content) {
        let file = self.set.files.get_mut(&self.path(name)).unwrap();
        let Kind::File { content: known, .. } = &mut file.kind else {
            panic!("{name} is not a file");
        };
        *known = content;
    }

    /// Records changes by the job, and the end of the watcher.
    pub fn changed(&self, changes: &[(&str, JobChange)]) {
        let line = |(name, change): &(&str, JobChange)| Line::Job {
            path: self.path(name),
            change: *change,
        };
        let mut lines: Vec<Line> = changes.iter().map(line).collect();
        lines.push(Line::End);
        append(&self.record(), &lines).unwrap();
    }

    /// Waits until changes have a later time than the snapshot: the clock of file systems is coarse.
    pub fn pass_a_tick(&self) {
        let probe = self.folder.path().join("probe");
        let written_ns = || {
            fs::write(&probe, "").unwrap();
            changed_ns(&probe.metadata().unwrap())
        };
        while written_ns() <= self.set.frozen_ns {}
    }

    pub fn plan(&self, on_lost: OnLost) -> Result<Rollback, RollbackError> {
        self.plan_without(&Patterns::default(), on_lost)
    }

    pub fn plan_without(
        &self,
        excluded: &Patterns,
        on_lost: OnLost,
    ) -> Result<Rollback, RollbackError> {
        let record = Record::open(&self.record()).unwrap();
        let (open, locked) = (self.path("open"), self.path("locked"));
        let place = Place {
            folder: &self.path(""),
            ours: &[],
            open: &BTreeMap::from([(open.as_path(), false), (locked.as_path(), true)]),
            spare: &self.spare,
            held: &Held::of(&self.folder.path().join("store")),
            included: &Patterns::default(),
            excluded,
            shared: &self.shared,
            on_lost,
            ended_ns: self.ended_ns,
            is_elsewhere: false,
        };
        Rollback::plan(&self.set, record.since(IMAGE), place)
    }

    pub fn execute(
        &self,
        plan: &Rollback,
        before_step: &dyn Fn() -> io::Result<()>,
    ) -> Result<Done, RollbackError> {
        let store = self.folder.path().join("store");
        plan.execute(&Sources {
            users: &JobUsers::default(),
            record: &self.record(),
            aside: &store.join("aside"),
            held: &Held::of(&store),
            content: |stream: &str, offset, size, target: &mut dyn Write| {
                let end = usize::try_from(offset + size).unwrap();
                let start = usize::try_from(offset).unwrap();
                target.write_all(&self.contents[stream][start..end])
            },
            before_step,
        })
    }

    pub fn lost(&self) -> Vec<Lost> {
        match self.plan(OnLost::Refuse) {
            Err(RollbackError::Lost { lost, .. }) => lost,
            other => panic!("{other:?}"),
        }
    }

    /// Describes the job's folder, without inodes and their times.
    pub fn tree(&self) -> Vec<String> {
        let mut inodes = Vec::new();
        let mut paths = super::super::folder_scan::everything_in(&self.path("")).unwrap();
        paths.sort();
        let describe = |path: &PathBuf| {
            let found = path.symlink_metadata().unwrap();
            let content = if found.is_file() {
                format!("{:?}", fs::read(path).unwrap())
            } else {
                format!("{:?}", fs::read_link(path).ok())
            };
            let known = inodes.iter().position(|inode| *inode == found.ino());
            let number = known.unwrap_or(inodes.len());
            if known.is_none() {
                inodes.push(found.ino());
            }
            let modified = found.mtime_nsec() + found.mtime() * 1_000_000_000;
            format!("{path:?} {:o} {number} {modified} {content}", found.mode())
        };
        paths.iter().map(describe).collect()
    }
}

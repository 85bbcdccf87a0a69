//! Tests of rollbacks in a real folder without CRIU. The tests write the record themselves.

use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::fs::{MetadataExt, symlink};
use std::path::PathBuf;

use tempfile::TempDir;

use super::file_set::{Content, KeptFile, KeptFiles, Kind, Unkept, Writer};
use super::held::Held;
use super::lost::{Lost, OnLost, RollbackError, Why};
use super::patterns::Patterns;
use super::put_back::{Done, Sources};
use super::record::Record;
use super::record_line::{JobChange, Line, append};
use super::rollback::{Place, Rollback};

/// Number of the image in these tests.
const IMAGE: u64 = 1;

/// A job's folder, a store, and the job's files at the snapshot.
struct Scene {
    folder: TempDir,
    contents: BTreeMap<String, Vec<u8>>,
    set: KeptFiles,
}

impl Scene {
    /// Creates a scene in which a job has created these files, all of them in the image.
    fn new(files: &[(&str, &str)]) -> Self {
        let folder = tempfile::tempdir_in("/var/tmp").unwrap();
        fs::create_dir(folder.path().join("store")).unwrap();
        fs::create_dir(folder.path().join("work")).unwrap();
        let scene = Self {
            folder,
            contents: BTreeMap::new(),
            set: KeptFiles::default(),
        };
        for (name, text) in files {
            let path = scene.path(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        scene
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join("work").join(name)
    }

    fn record(&self) -> PathBuf {
        self.folder.path().join("store/record")
    }

    /// Adds all files in the folder to the set.
    fn snapshot(&mut self) {
        let work = self.path("");
        for path in super::folder_scan::everything_in(&work).unwrap() {
            let mut file = KeptFile::of(&path).unwrap();
            if let Kind::File { content, .. } = &mut file.kind {
                let stream = path.display().to_string();
                self.contents
                    .insert(stream.clone(), fs::read(&path).unwrap());
                *content = Content::Kept { stream, offset: 0 };
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
        let lines = [Line::Begin { boot }, names, Line::Image { id: IMAGE }];
        append(&self.record(), &lines).unwrap();
    }

    fn content_of(&mut self, name: &str, content: Content) {
        let file = self.set.files.get_mut(&self.path(name)).unwrap();
        let Kind::File { content: known, .. } = &mut file.kind else {
            panic!("{name} is not a file");
        };
        *known = content;
    }

    /// Records changes by the job, and the end of the watcher.
    fn changed(&self, changes: &[(&str, JobChange)]) {
        let line = |(name, change): &(&str, JobChange)| Line::Job {
            path: self.path(name),
            change: *change,
        };
        let mut lines: Vec<Line> = changes.iter().map(line).collect();
        lines.push(Line::End);
        append(&self.record(), &lines).unwrap();
    }

    fn plan(&self, on_lost: OnLost) -> Result<Rollback, RollbackError> {
        self.plan_without(&Patterns::default(), on_lost)
    }

    fn plan_without(
        &self,
        excluded: &Patterns,
        on_lost: OnLost,
    ) -> Result<Rollback, RollbackError> {
        let record = Record::open(&self.record()).unwrap();
        let open = self.path("open");
        let place = Place {
            folder: &self.path(""),
            ours: &[],
            open: &BTreeSet::from([open.as_path()]),
            held: &Held::of(&self.folder.path().join("store")),
            included: &Patterns::default(),
            excluded,
            on_lost,
            is_elsewhere: false,
        };
        Rollback::plan(&self.set, record.since(IMAGE), place)
    }

    fn execute(
        &self,
        plan: &Rollback,
        before_step: &dyn Fn() -> io::Result<()>,
    ) -> Result<Done, RollbackError> {
        let store = self.folder.path().join("store");
        plan.execute(&Sources {
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

    fn lost(&self) -> Vec<Lost> {
        match self.plan(OnLost::Refuse) {
            Err(RollbackError::Lost { lost, .. }) => lost,
            other => panic!("{other:?}"),
        }
    }

    /// Describes the job's folder, without inodes and their times.
    fn tree(&self) -> Vec<String> {
        let mut inodes = Vec::new();
        let mut paths = super::folder_scan::everything_in(&self.path("")).unwrap();
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

/// A job's folder with every kind of file that a rollback handles, changed in every way.
fn changed_everywhere() -> (Scene, Vec<String>) {
    let mut scene = Scene::new(&[
        ("state", "state at the snapshot"),
        ("grown", "short"),
        ("removed/deep/file", "removed"),
        ("log", "line 1\nline 2\n"),
        ("log.1", "older lines\n"),
        ("one", "two names"),
        ("replaced", "a file whose name becomes another one's"),
        ("source", "that other file"),
        ("turned", "a file that becomes a folder"),
        ("folder/inside", "x"),
    ]);
    fs::hard_link(scene.path("one"), scene.path("two")).unwrap();
    symlink("state", scene.path("link")).unwrap();
    scene.snapshot();
    scene.content_of("log", Content::Appended);
    let tree = scene.tree();

    fs::write(scene.path("state"), "another state").unwrap();
    fs::write(scene.path("grown"), "much longer than it was").unwrap();
    fs::remove_dir_all(scene.path("removed")).unwrap();
    fs::rename(scene.path("log"), scene.path("log.1")).unwrap();
    fs::write(scene.path("log"), "a new log").unwrap();
    fs::remove_file(scene.path("two")).unwrap();
    fs::write(scene.path("two"), "another file").unwrap();
    fs::remove_file(scene.path("replaced")).unwrap();
    fs::hard_link(scene.path("source"), scene.path("replaced")).unwrap();
    fs::remove_file(scene.path("link")).unwrap();
    symlink("grown", scene.path("link")).unwrap();
    fs::remove_file(scene.path("turned")).unwrap();
    fs::create_dir(scene.path("turned")).unwrap();
    fs::write(scene.path("turned/new"), "new").unwrap();
    fs::create_dir_all(scene.path("made/since")).unwrap();
    fs::write(scene.path("made/since/file"), "new").unwrap();
    fs::write(scene.path("state-journal"), "hot").unwrap();
    scene.changed(&[
        ("state", JobChange::Changed),
        ("grown", JobChange::Changed),
        ("removed/deep/file", JobChange::Gone),
        ("removed/deep", JobChange::FolderGone),
        ("removed", JobChange::FolderGone),
        ("log", JobChange::Gone),
        ("log.1", JobChange::MovedTo),
        ("log", JobChange::Created),
        ("two", JobChange::Gone),
        ("two", JobChange::Created),
        ("replaced", JobChange::Gone),
        ("replaced", JobChange::Created),
        ("link", JobChange::Created),
        ("turned", JobChange::Gone),
        ("turned/new", JobChange::Created),
        ("made", JobChange::Created),
        ("made/since", JobChange::Created),
        ("made/since/file", JobChange::Created),
        ("state-journal", JobChange::Created),
    ]);
    (scene, tree)
}

#[test]
fn a_rollback_restores_the_folder() {
    let (scene, tree) = changed_everywhere();
    let plan = scene.plan(OnLost::Refuse).unwrap();
    scene.execute(&plan, &|| Ok(())).unwrap();
    assert_eq!(scene.tree(), tree);
    let aside = scene.folder.path().join("store/aside/created");
    let journal = scene.path("state-journal");
    let kept = aside.join(journal.strip_prefix("/").unwrap());
    assert_eq!(fs::read(kept).unwrap(), b"hot");
}

/// A folder `moved` that has another name now and is a link to it, and a folder `emptied` that is a link to `other`.
fn folders_that_became_links() -> (Scene, Vec<String>) {
    let mut scene = Scene::new(&[
        (
            "moved/deep/file",
            "a file that is still at this path, by a link",
        ),
        ("moved/large", "a file without a copy"),
        ("emptied/old", "removed"),
        ("other/new", "not the job's new file"),
    ]);
    scene.snapshot();
    scene.content_of("moved/large", Content::Unkept(Unkept::TooLarge));
    // All files are older than the snapshot.
    scene.set.frozen_ns += 1_000_000_000;
    let tree = scene.tree();
    fs::rename(scene.path("moved"), scene.path("there")).unwrap();
    symlink("there", scene.path("moved")).unwrap();
    fs::remove_dir_all(scene.path("emptied")).unwrap();
    symlink("other", scene.path("emptied")).unwrap();
    scene.changed(&[
        ("moved", JobChange::FolderGone),
        // A record that knows these files takes them for gone.
        ("moved/deep", JobChange::Gone),
        ("moved/deep/file", JobChange::Gone),
        ("moved/large", JobChange::Gone),
        ("there", JobChange::MovedTo),
        ("there/deep", JobChange::MovedTo),
        ("there/deep/file", JobChange::MovedTo),
        ("there/large", JobChange::MovedTo),
        ("moved", JobChange::Created),
        ("emptied/old", JobChange::Gone),
        ("emptied/new", JobChange::Created),
        ("emptied/new", JobChange::Gone),
        ("emptied", JobChange::FolderGone),
        ("emptied", JobChange::Created),
    ]);
    (scene, tree)
}

#[test]
fn folders_that_became_links_are_folders_again() {
    let (scene, tree) = folders_that_became_links();
    let plan = scene.plan(OnLost::Refuse).unwrap();
    scene.execute(&plan, &|| Ok(())).unwrap();
    assert_eq!(scene.tree(), tree);
}

#[test]
fn a_rollback_stopped_at_any_step_is_completed_by_the_next() {
    for (changed, steps_min) in [
        (changed_everywhere as fn() -> (Scene, Vec<String>), 15),
        (folders_that_became_links, 9),
    ] {
        for failing in 0.. {
            let (scene, tree) = changed();
            let steps = Cell::new(0);
            let fail = || {
                steps.set(steps.get() + 1);
                if steps.get() > failing {
                    return Err(io::ErrorKind::StorageFull.into());
                }
                Ok(())
            };
            let plan = scene.plan(OnLost::Refuse).unwrap();
            let is_whole = scene.execute(&plan, &fail).is_ok();
            // A new supervisor has only the record.
            let plan = scene.plan(OnLost::Refuse);
            let plan = plan.unwrap_or_else(|error| panic!("stopped at step {failing}: {error}"));
            scene.execute(&plan, &|| Ok(())).unwrap();
            assert_eq!(scene.tree(), tree, "stopped at step {failing}");
            if is_whole {
                assert!(failing > steps_min, "{failing} steps");
                break;
            }
        }
    }
}

#[test]
fn a_file_that_was_changed_by_another_name_is_restored() {
    let mut scene = Scene::new(&[("one", "of two names"), ("single", "then")]);
    fs::hard_link(scene.path("one"), scene.path("two")).unwrap();
    scene.snapshot();
    scene.set.frozen_ns += 1_000_000_000;
    let tree = scene.tree();
    fs::write(scene.path("two"), "changed").unwrap();
    fs::remove_file(scene.path("two")).unwrap();
    fs::hard_link(scene.path("single"), scene.path("new")).unwrap();
    fs::write(scene.path("new"), "now").unwrap();
    scene.changed(&[
        ("two", JobChange::Changed),
        ("two", JobChange::Gone),
        ("new", JobChange::Created),
        ("new", JobChange::Changed),
    ]);
    let plan = scene.plan(OnLost::Refuse).unwrap();
    scene.execute(&plan, &|| Ok(())).unwrap();
    assert_eq!(scene.tree(), tree);
}

#[test]
fn files_that_are_excluded_after_the_snapshot_are_left_out() {
    let mut scene = Scene::new(&[("kept", "then"), ("cache", "then")]);
    scene.snapshot();
    for name in ["kept", "cache"] {
        fs::write(scene.path(name), "now").unwrap();
    }
    scene.changed(&[("kept", JobChange::Changed), ("cache", JobChange::Changed)]);
    let excluded = Patterns::new(&["cache".to_owned()], &scene.path("")).unwrap();
    let plan = scene.plan_without(&excluded, OnLost::Refuse).unwrap();
    scene.execute(&plan, &|| Ok(())).unwrap();
    // The caller has to compare the other one, if the job has it open.
    assert_eq!(plan.left_out, [scene.path("cache")].into());
    assert_eq!(fs::read(scene.path("kept")).unwrap(), b"then");
    assert_eq!(fs::read(scene.path("cache")).unwrap(), b"now");
}

#[test]
fn changes_by_others_stay_and_changes_by_both_are_refused() {
    let mut scene = Scene::new(&[("notes", "theirs"), ("shared", "of both"), ("open", "read")]);
    scene.snapshot();
    fs::write(scene.path("notes"), "edited").unwrap();
    fs::write(scene.path("shared"), "changed").unwrap();
    let folder = scene.path("");
    let other = |name| Line::Other {
        path: folder.join(name),
        created: false,
    };
    append(&scene.record(), &[other("notes")]).unwrap();
    scene.changed(&[]);
    let plan = scene.plan(OnLost::Refuse).unwrap();
    assert_eq!(plan.paths().next(), None, "nothing is the job's");

    // The new file is that of another program.
    let replace = |scene: &mut Scene, name| {
        fs::write(scene.path("new"), "edited, too").unwrap();
        fs::rename(scene.path("new"), scene.path(name)).unwrap();
        append(&scene.record(), &[other(name)]).unwrap();
        scene.changed(&[]);
    };
    replace(&mut scene, "notes");
    assert_eq!(scene.plan(OnLost::Refuse).unwrap().paths().next(), None);
    replace(&mut scene, "open");
    let (path, why) = (scene.path("open"), Why::Replaced);
    assert_eq!(scene.lost(), [Lost { path, why }]);
    scene.set.files.remove(&scene.path("open"));

    append(&scene.record(), &[other("shared")]).unwrap();
    scene.changed(&[("shared", JobChange::Changed)]);
    let path = scene.path("shared");
    let why = Why::OthersToo;
    assert_eq!(scene.lost(), [Lost { path, why }]);
}

#[test]
fn a_foreign_file_that_the_job_removed_is_not_restored() {
    let mut scene = Scene::new(&[("state", "x")]);
    scene.snapshot();
    let path = scene.path("order");
    let created = true;
    append(&scene.record(), &[Line::Other { path, created }]).unwrap();
    scene.changed(&[("order", JobChange::Gone)]);
    let plan = scene.plan(OnLost::Refuse).unwrap();
    assert_eq!(plan.paths().next(), None);
}

#[test]
fn unrestorable_files_are_named_and_never_truncated() {
    let mut scene = Scene::new(&[("big", "not kept"), ("input", "the user's")]);
    scene.snapshot();
    let input = scene.path("input");
    scene.set.files.remove(&input);
    scene.content_of("big", Content::Unkept(Unkept::TooLarge));
    fs::write(scene.path("big"), "not kept, and longer").unwrap();
    fs::write(&input, "overwritten").unwrap();
    scene.changed(&[("big", JobChange::Changed), ("input", JobChange::Changed)]);
    let lost = |path, why| Lost { path, why };
    assert_eq!(
        scene.lost(),
        [
            lost(scene.path("big"), Why::Unkept(Unkept::TooLarge)),
            lost(input, Why::NotYetJobs)
        ]
    );
    let plan = scene.plan(OnLost::Warn).unwrap();
    scene.execute(&plan, &|| Ok(())).unwrap();
    assert_eq!(
        fs::read(scene.path("big")).unwrap(),
        b"not kept, and longer"
    );
}

#[test]
fn a_large_file_that_was_replaced_is_restored_from_its_link() {
    let mut scene = Scene::new(&[("big", "first")]);
    scene.snapshot();
    let held = Held::of(&scene.folder.path().join("store"));
    let path = scene.path("big");
    let about = KeptFile::of(&path).unwrap();
    let content = held.hold(IMAGE, 0, &File::open(&path).unwrap(), &about);
    scene.content_of("big", content.unwrap());
    fs::write(scene.path("big.tmp"), "second").unwrap();
    fs::rename(scene.path("big.tmp"), &path).unwrap();
    scene.changed(&[("big", JobChange::MovedTo)]);
    for _ in 0..2 {
        let plan = scene.plan(OnLost::Refuse).unwrap();
        scene.execute(&plan, &|| Ok(())).unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"first");
        // The next attempt replaces it once more.
        fs::write(scene.path("big.tmp"), "third").unwrap();
        fs::rename(scene.path("big.tmp"), &path).unwrap();
    }
}

#[test]
fn unwatched_changes_are_refused_and_missing_files_return() {
    let mut scene = Scene::new(&[("gone", "x"), ("changed", "x")]);
    scene.snapshot();
    for file in scene.set.files.values_mut() {
        file.writer = Writer::Unknown;
    }
    let reason = "nobody watches".to_owned();
    append(&scene.record(), &[Line::Gap { reason }, Line::End]).unwrap();
    fs::remove_file(scene.path("gone")).unwrap();
    let plan = scene.plan(OnLost::Refuse).unwrap();
    scene.execute(&plan, &|| Ok(())).unwrap();
    assert_eq!(fs::read(scene.path("gone")).unwrap(), b"x");

    fs::write(scene.path("changed"), "longer").unwrap();
    fs::write(scene.path("new"), "x").unwrap();
    let mut lost: Vec<(PathBuf, Why)> = scene
        .lost()
        .into_iter()
        .map(|lost| (lost.path, lost.why))
        .collect();
    lost.sort_by(|left, right| left.0.cmp(&right.0));
    let unknown = |name| (scene.path(name), Why::Unknown);
    assert_eq!(lost, [unknown("changed"), unknown("new")]);
}

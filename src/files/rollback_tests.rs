//! Tests of rollbacks in a real folder without CRIU. The tests write the record themselves.

use std::cell::Cell;
use std::fs::{self, File, Permissions};
use std::io;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::PathBuf;

use nix::sys::stat::{Mode, SFlag, mknod};

use super::file_set::{Content, KeptFile, Unkept, Writer};
use super::held::Held;
use super::lost::{Lost, OnLost, Why};
use super::patterns::Patterns;
use super::record_line::{JobChange, Line, append};
use scene::{IMAGE, Scene};

mod appended_logs;
mod cut_record;
mod scene;
mod several_names;
mod shared_files;
mod stopped_job;

fn special(scene: &Scene, name: &str, kind: SFlag) {
    mknod(&scene.path(name), kind, Mode::S_IRWXU, 0).unwrap();
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
    for (name, kind) in [
        ("pipe", SFlag::S_IFIFO),
        ("wider-pipe", SFlag::S_IFIFO),
        ("socket", SFlag::S_IFSOCK),
        ("turned-socket", SFlag::S_IFSOCK),
    ] {
        special(&scene, name, kind);
    }
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
    for name in ["pipe", "wider-pipe", "socket", "turned-socket"] {
        fs::remove_file(scene.path(name)).unwrap();
    }
    for name in ["turned-socket", "new-pipe"] {
        special(&scene, name, SFlag::S_IFIFO);
    }
    special(&scene, "new-socket", SFlag::S_IFSOCK);
    special(&scene, "wider-pipe", SFlag::S_IFIFO);
    fs::set_permissions(scene.path("wider-pipe"), Permissions::from_mode(0o666)).unwrap();
    scene.changed(&[
        ("pipe", JobChange::Gone),
        ("wider-pipe", JobChange::Gone),
        ("wider-pipe", JobChange::Created),
        ("socket", JobChange::Gone),
        ("turned-socket", JobChange::Created),
        ("new-pipe", JobChange::Created),
        ("new-socket", JobChange::Created),
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
fn a_file_of_others_that_the_job_removed_is_lost() {
    let mut scene = Scene::new(&[("theirs", "then")]);
    scene.snapshot();
    let path = scene.path("theirs");
    scene.set.files.remove(&path);
    scene.changed(&[("theirs", JobChange::Gone)]);
    let line = Line::Other {
        path: path.clone(),
        created: true,
    };
    append(&scene.record(), &[line]).unwrap();
    let why = Why::NotYetJobs;
    assert_eq!(scene.lost(), [Lost { path, why }]);
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
fn pipes_that_others_use_come_back_and_those_of_others_stay() {
    let mut scene = Scene::new(&[]);
    special(&scene, "jobs", SFlag::S_IFIFO);
    // The job has written to a pipe of a server that is started again after the snapshot.
    let (path, is_jobs_own) = (scene.path("theirs"), false);
    append(&scene.record(), &[Line::Touched { path, is_jobs_own }]).unwrap();
    scene.snapshot();
    fs::remove_file(scene.path("jobs")).unwrap();
    special(&scene, "theirs", SFlag::S_IFIFO);
    let path = scene.path("jobs");
    let created = false;
    // Writing to a pipe is a change, too.
    append(&scene.record(), &[Line::Other { path, created }]).unwrap();
    scene.changed(&[("jobs", JobChange::Gone), ("theirs", JobChange::Changed)]);
    let plan = scene.plan(OnLost::Refuse).unwrap();
    scene.execute(&plan, &|| Ok(())).unwrap();
    for name in ["jobs", "theirs"] {
        assert!(scene.path(name).exists(), "{name}");
    }
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

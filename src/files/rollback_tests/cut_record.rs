//! A record from before a stop of the machine or container; its last lines can be missing.

use std::fs;

use super::super::file_set::{KeptFile, Kind};
use super::super::lost::{Lost, OnLost, Why};
use super::super::record_line::{JobChange, Line, append};
use super::scene::Scene;
use crate::clock;

/// Records that changes from now on are missing, after a boot or because a container was killed.
fn cut(scene: &Scene, is_jobs: bool) {
    let now = clock::unix_ns();
    let (from_ns, until_ns) = (now - 1_000_000_000, now + 60_000_000_000);
    let line = Line::Cut {
        from_ns,
        until_ns,
        is_jobs,
    };
    append(&scene.record(), &[line]).unwrap();
    scene.pass_a_tick();
}

#[test]
fn changes_of_the_last_seconds_count_as_the_jobs_in_its_folders() {
    let mut scene = Scene::new(&[("state", "then"), ("same", "then")]);
    scene.snapshot();
    let before = scene.tree();
    cut(&scene, true);
    fs::write(scene.path("state"), "now, and longer").unwrap();
    fs::write(scene.path("new"), "x").unwrap();
    fs::create_dir(scene.path("folder")).unwrap();
    fs::write(scene.path("folder/new"), "x").unwrap();
    let plan = scene.plan(OnLost::Refuse).unwrap();
    let presumed = ["folder", "new", "folder/new"].map(|name| scene.path(name));
    let mut found = plan.presumed.clone();
    found.sort_by_key(|path| presumed.iter().position(|one| one == path));
    assert_eq!(found, presumed);
    scene.execute(&plan, &|| Ok(())).unwrap();
    assert_eq!(scene.tree(), before);
}

#[test]
fn changes_of_the_last_seconds_elsewhere_are_refused() {
    let mut scene = Scene::new(&[("jobs/state", "then")]);
    fs::create_dir(scene.path("others")).unwrap();
    scene.snapshot();
    let is_jobs = |path: &std::path::Path| path.ends_with("jobs/state");
    scene.set.files.retain(|path, _| is_jobs(path));
    cut(&scene, true);
    fs::write(scene.path("others/new"), "x").unwrap();
    let lost = Lost {
        path: scene.path("others/new"),
        why: Why::Unknown,
    };
    assert_eq!(scene.lost(), [lost]);
}

#[test]
fn new_files_after_the_end_of_a_container_are_refused() {
    let mut scene = Scene::new(&[("state", "then")]);
    scene.snapshot();
    cut(&scene, false);
    fs::write(scene.path("new"), "x").unwrap();
    let (path, why) = (scene.path("new"), Why::Unknown);
    assert_eq!(scene.lost(), [Lost { path, why }]);
}

#[test]
fn files_that_others_have_written_too_are_refused_after_a_cut() {
    let mut scene = Scene::new(&[("state", "then")]);
    scene.snapshot();
    let path = scene.path("state");
    let other = Line::Other {
        path: path.clone(),
        created: false,
    };
    append(&scene.record(), &[other]).unwrap();
    scene.changed(&[("state", JobChange::Changed)]);
    cut(&scene, true);
    fs::write(&path, "now, and longer").unwrap();
    let why = Why::OthersToo;
    assert_eq!(scene.lost(), [Lost { path, why }]);
}

#[test]
fn missing_files_return_if_their_folder_is_another_one() {
    let mut scene = Scene::new(&[("folder/gone", "then"), ("removed", "then")]);
    scene.snapshot();
    scene.changed(&[]);
    scene.pass_a_tick();
    fs::remove_file(scene.path("removed")).unwrap();
    fs::remove_dir_all(scene.path("folder")).unwrap();
    fs::create_dir(scene.path("folder")).unwrap();
    let plan = scene.plan(OnLost::Refuse).unwrap();
    let files = plan.put_back.into_iter();
    let files = files.filter(|(_, file)| file.kind != Kind::Folder);
    let paths: Vec<_> = files.map(|(path, _)| path).collect();
    assert_eq!(paths, [scene.path("folder/gone")]);
    let other = Line::Other {
        path: scene.path("folder/gone"),
        created: false,
    };
    append(&scene.record(), &[other]).unwrap();
    let plan = scene.plan(OnLost::Refuse).unwrap();
    let is_folder = |file: &KeptFile| file.kind == Kind::Folder;
    assert!(plan.put_back.iter().all(|(_, file)| is_folder(file)));
}

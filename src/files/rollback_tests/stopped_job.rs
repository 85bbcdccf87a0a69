//! A job that was killed at the image: all later changes are by other programs.

use std::fs;

use super::super::file_set::{Content, Writer};
use super::super::lost::{Lost, OnLost, Why};
use super::super::record_line::{JobChange, Line, append};
use super::scene::{IMAGE, Scene};

/// End of a job at the scene's image, at a time that is not known.
const STOPPED: Line = Line::Stopped {
    id: IMAGE,
    at_ns: 0,
};

/// Returns a scene without a watcher, in which the job has been stopped, and others have changed everything.
fn stopped() -> Scene {
    let mut scene = Scene::new(&[("log", "then"), ("open", "then"), ("state", "then")]);
    scene.snapshot();
    scene.content_of("log", Content::Appended);
    for name in ["log", "open"] {
        let path = scene.path(name);
        scene.set.files.get_mut(&path).unwrap().writer = Writer::Open;
    }
    let reason = "nobody watches".to_owned();
    let lines = [Line::Gap { reason }, STOPPED];
    append(&scene.record(), &lines).unwrap();
    scene.pass_a_tick();
    for name in ["log", "open", "state"] {
        fs::write(scene.path(name), "then and later").unwrap();
    }
    fs::write(scene.path("new"), "x").unwrap();
    scene
}

#[test]
fn what_others_change_while_the_job_is_stopped_stays() {
    let scene = stopped();
    // The end of the job.
    scene.changed(&[("log", JobChange::Changed)]);
    let plan = scene.plan(OnLost::Refuse).unwrap();
    assert_eq!(plan.paths().next(), None);
    let names = [("log", false), ("open", false), ("state", false)];
    let mut by_others = names
        .map(|(name, is_new)| (scene.path(name), is_new))
        .to_vec();
    by_others.push((scene.path("new"), true));
    assert_eq!(plan.by_others, by_others);
}

/// Missing files are what a restore finds on another machine, or in another container.
#[test]
fn missing_files_of_an_unwatched_stopped_job_are_made_again() {
    let scene = stopped();
    for name in ["open", "state"] {
        fs::remove_file(scene.path(name)).unwrap();
    }
    let plan = scene.plan(OnLost::Refuse).unwrap();
    let paths: Vec<_> = plan.put_back.into_iter().map(|(path, _)| path).collect();
    assert_eq!(paths, ["open", "state"].map(|name| scene.path(name)));
}

#[test]
fn a_file_that_a_stopped_job_had_locked_is_refused() {
    let mut scene = Scene::new(&[("locked", "then")]);
    scene.snapshot();
    append(&scene.record(), &[STOPPED]).unwrap();
    scene.pass_a_tick();
    fs::write(scene.path("locked"), "then and later").unwrap();
    let (path, why) = (scene.path("locked"), Why::Locked);
    assert_eq!(scene.lost(), [Lost { path, why }]);
}

#[test]
fn once_a_stopped_job_runs_again_changes_are_unknown() {
    let scene = stopped();
    append(&scene.record(), &[Line::Running]).unwrap();
    let lost: Vec<_> = scene.lost().into_iter().map(|lost| lost.path).collect();
    assert_eq!(lost, ["state", "new"].map(|name| scene.path(name)));
}

#[test]
fn an_interrupted_rollback_of_a_stopped_job_is_completed() {
    let mut scene = Scene::new(&[("folder/state", "then")]);
    scene.snapshot();
    append(&scene.record(), &[STOPPED]).unwrap();
    let before = scene.tree();
    scene.pass_a_tick();
    fs::remove_dir_all(scene.path("folder")).unwrap();
    fs::create_dir(scene.path("folder")).unwrap();
    let plan = scene.plan(OnLost::Refuse).unwrap();
    scene.execute(&plan, &|| Ok(())).unwrap();
    assert_eq!(scene.tree(), before);
    // As if the content had not reached the disk, or the rollback had been killed.
    fs::write(scene.path("folder/state"), "th").unwrap();
    let plan = scene.plan(OnLost::Refuse).unwrap();
    scene.execute(&plan, &|| Ok(())).unwrap();
    assert_eq!(scene.tree(), before);
}

//! Files to which other programs write, too.

use std::fs;

use super::super::file_set::Content;
use super::super::lost::{Lost, OnLost, Why};
use super::super::patterns::Patterns;
use super::super::record_line::{JobChange, Line, append};
use super::scene::Scene;

/// Returns a scene after the snapshot with a log to which both append, and a table in which both write.
fn begun() -> Scene {
    let mut scene = Scene::new(&[("log", "then"), ("table", "then")]);
    scene.snapshot();
    scene.content_of("log", Content::Appended);
    fs::write(scene.path("log"), "then more").unwrap();
    fs::write(scene.path("table"), "now").unwrap();
    scene
}

fn written_by_others(scene: &Scene, names: &[&str]) {
    let other = |name: &&str| Line::Other {
        path: scene.path(name),
        created: false,
    };
    let lines: Vec<Line> = names.iter().map(other).collect();
    append(&scene.record(), &lines).unwrap();
}

#[test]
fn a_log_that_another_program_alone_has_continued_is_left() {
    let scene = begun();
    written_by_others(&scene, &["log", "table"]);
    scene.changed(&[]);
    let plan = scene.plan(OnLost::Refuse).unwrap();
    assert!(plan.leaves(&scene.path("log")));
    assert_eq!(plan.paths().next(), None);
}

#[test]
fn a_log_that_the_job_alone_has_continued_is_cut() {
    let scene = begun();
    scene.changed(&[("log", JobChange::Changed), ("table", JobChange::Changed)]);
    let plan = scene.plan(OnLost::Refuse).unwrap();
    assert!(!plan.leaves(&scene.path("log")));
    let cut: Vec<_> = plan.appended.iter().map(|(path, _)| path.clone()).collect();
    assert_eq!(cut, [scene.path("log")]);
}

#[test]
fn files_that_both_have_written_are_refused_unless_shared() {
    let mut scene = begun();
    written_by_others(&scene, &["log", "table"]);
    scene.changed(&[("log", JobChange::Changed), ("table", JobChange::Changed)]);
    let why = Why::OthersToo;
    let lost = ["log", "table"].map(|name| Lost {
        path: scene.path(name),
        why,
    });
    assert_eq!(scene.lost(), lost);
    let patterns = ["log".to_owned(), "table*".to_owned()];
    scene.shared = Patterns::new(&patterns, &scene.path("")).unwrap();
    fs::write(scene.path("table.new"), "new").unwrap();
    scene.changed(&[("table.new", JobChange::Created)]);
    let plan = scene.plan(OnLost::Refuse).unwrap();
    scene.execute(&plan, &|| Ok(())).unwrap();
    assert!(scene.path("table.new").exists());
    for (name, text) in [("log", "then more"), ("table", "now")] {
        assert!(plan.leaves(&scene.path(name)));
        assert_eq!(fs::read_to_string(scene.path(name)).unwrap(), text);
    }
}

#[test]
fn a_shared_file_that_the_job_had_locked_is_refused() {
    let mut scene = Scene::new(&[("locked", "then")]);
    scene.snapshot();
    scene.shared = Patterns::new(&["locked".to_owned()], &scene.path("")).unwrap();
    scene.changed(&[]);
    assert!(scene.plan(OnLost::Refuse).is_ok());
    fs::write(scene.path("locked"), "now").unwrap();
    scene.changed(&[]);
    let (path, why) = (scene.path("locked"), Why::Locked);
    assert_eq!(scene.lost(), [Lost { path, why }]);
}

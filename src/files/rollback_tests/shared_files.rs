//! Files to which other programs write, too.

use std::fs;

use super::super::file_set::{Content, KeptFile};
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

/// The watcher ends with the job.
#[test]
fn a_file_written_by_others_after_the_jobs_end_is_refused() {
    let mut scene = begun();
    scene.changed(&[("table", JobChange::Changed)]);
    let path = scene.path("table");
    let table = KeptFile::of(&path).unwrap();
    scene.ended_ns = Some(table.modified_ns);
    assert!(scene.plan(OnLost::Refuse).is_ok());
    scene.ended_ns = Some(table.modified_ns - 1);
    let lost = scene.lost();
    let table = lost.iter().find(|lost| lost.path == path);
    assert_eq!(table.unwrap().why, Why::OthersToo);
    // A rollback that was killed in the midst of the file, and which the next one completes.
    let rolls_back = Line::RollsBack {
        path,
        change: JobChange::Changed,
    };
    append(&scene.record(), &[rolls_back]).unwrap();
    assert!(scene.plan(OnLost::Refuse).is_ok());
}

#[test]
fn lines_written_to_a_log_after_the_jobs_end_are_not_cut() {
    let mut scene = begun();
    scene.changed(&[]);
    let log = KeptFile::of(&scene.path("log")).unwrap();
    scene.ended_ns = Some(log.modified_ns);
    let plan = scene.plan(OnLost::Refuse).unwrap();
    assert_eq!(plan.appended.len(), 1);
    scene.ended_ns = Some(log.modified_ns - 1);
    let plan = scene.plan(OnLost::Refuse).unwrap();
    assert!(plan.leaves(&scene.path("log")));
    scene.changed(&[("log", JobChange::Changed)]);
    let (path, why) = (scene.path("log"), Why::OthersToo);
    assert_eq!(scene.lost(), [Lost { path, why }]);
}

#[test]
fn a_log_without_new_lines_stays_out_of_the_plan() {
    let mut scene = Scene::new(&[("log", "then")]);
    scene.snapshot();
    scene.content_of("log", Content::Appended);
    scene.changed(&[]);
    assert!(scene.plan(OnLost::Refuse).unwrap().appended.is_empty());
}

#[test]
fn another_file_in_place_of_a_shared_open_one_is_refused() {
    let mut scene = Scene::new(&[("open", "then"), ("closed", "then")]);
    scene.snapshot();
    scene.shared = Patterns::new(&["*".to_owned()], &scene.path("")).unwrap();
    for name in ["open", "closed"] {
        fs::write(scene.path("new"), "another").unwrap();
        fs::rename(scene.path("new"), scene.path(name)).unwrap();
    }
    written_by_others(&scene, &["open", "closed"]);
    scene.changed(&[]);
    let (path, why) = (scene.path("open"), Why::Replaced);
    assert_eq!(scene.lost(), [Lost { path, why }]);
}

#[test]
fn another_name_of_a_shared_file_is_left_too() {
    let mut scene = Scene::new(&[("log", "then")]);
    fs::hard_link(scene.path("log"), scene.path("name")).unwrap();
    scene.snapshot();
    scene.shared = Patterns::new(&["log".to_owned()], &scene.path("")).unwrap();
    fs::write(scene.path("log"), "now").unwrap();
    scene.changed(&[("log", JobChange::Changed), ("name", JobChange::Changed)]);
    let plan = scene.plan(OnLost::Refuse).unwrap();
    scene.execute(&plan, &|| Ok(())).unwrap();
    assert_eq!(fs::read(scene.path("name")).unwrap(), b"now");
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

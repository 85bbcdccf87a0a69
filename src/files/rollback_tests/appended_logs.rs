//! Files that the job appends to, with a content in the image that is used if they are not as they were.

use std::fs;

use super::super::file_set::{Content, Writer};
use super::super::lost::OnLost;
use super::super::record_line::{JobChange, Line, append};
use super::scene::Scene;

/// Returns a scene with an open log that the job appends to and does not have any more as it was.
fn begun() -> Scene {
    let mut scene = Scene::new(&[("open", "line 1\nline 2\n")]);
    scene.snapshot();
    scene.content_of("open", Content::Appended);
    let path = scene.path("open");
    scene.set.files.get_mut(&path).unwrap().writer = Writer::Open;
    let stream = path.display().to_string();
    let content = Content::Kept { stream, offset: 0 };
    scene.spare.insert(path, content);
    scene
}

#[test]
fn what_the_job_took_from_its_log_is_put_back() {
    type Change = fn(&Scene);
    let changes: [(Change, &[(&str, JobChange)]); 4] = [
        (
            |scene| fs::remove_file(scene.path("open")).unwrap(),
            &[("open", JobChange::Gone)],
        ),
        (
            |scene| fs::write(scene.path("open"), "line 1\n").unwrap(),
            &[("open", JobChange::Changed)],
        ),
        (
            |scene| fs::write(scene.path("open"), "emptied, and longer after that\n").unwrap(),
            &[("open", JobChange::Changed)],
        ),
        (
            |scene| {
                fs::write(scene.path("new"), "another log, and a longer one\n").unwrap();
                fs::rename(scene.path("new"), scene.path("open")).unwrap();
            },
            &[
                ("new", JobChange::Created),
                ("new", JobChange::Gone),
                ("open", JobChange::MovedTo),
            ],
        ),
    ];
    for (number, (change, changed)) in changes.into_iter().enumerate() {
        let scene = begun();
        let tree = scene.tree();
        change(&scene);
        scene.changed(changed);
        let plan = scene.plan(OnLost::Refuse).unwrap();
        assert!(plan.puts_back(&scene.path("open")), "{number}");
        scene.execute(&plan, &|| Ok(())).unwrap();
        assert_eq!(scene.tree(), tree, "{number}");
    }
}

#[test]
fn a_rotated_log_is_renamed_back_with_what_it_has() {
    let scene = begun();
    fs::rename(scene.path("open"), scene.path("open.1")).unwrap();
    fs::write(scene.path("open"), "a new one").unwrap();
    scene.changed(&[("open", JobChange::Changed), ("open.1", JobChange::Created)]);
    let plan = scene.plan(OnLost::Refuse).unwrap();
    assert!(!plan.puts_back(&scene.path("open")));
    assert_eq!(plan.present_path(&scene.path("open")), scene.path("open.1"));
    scene.execute(&plan, &|| Ok(())).unwrap();
    let log = fs::read_to_string(scene.path("open")).unwrap();
    assert_eq!(log, "line 1\nline 2\n");
}

#[test]
fn what_others_have_done_to_a_log_is_not_undone() {
    let scene = begun();
    fs::remove_file(scene.path("open")).unwrap();
    let (path, created) = (scene.path("open"), false);
    append(&scene.record(), &[Line::Other { path, created }]).unwrap();
    // The list of open files refuses it.
    let plan = scene.plan(OnLost::Refuse).unwrap();
    assert!(!plan.puts_back(&scene.path("open")));
}

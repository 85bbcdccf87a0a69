//! Files that the job appends to, with a content in the image that is used if they are not as they were.

use std::fs;

use super::super::file_set::{Content, StreamPlace, Writer};
use super::super::lost::{OnLost, Why};
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
    let content = Content::Kept {
        stream,
        place: StreamPlace::Whole(0),
    };
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
fn a_rotated_log_is_put_back_or_renamed_back() {
    let rotated = || {
        let scene = begun();
        fs::rename(scene.path("open"), scene.path("open.1")).unwrap();
        fs::write(scene.path("open"), "a new one").unwrap();
        scene.changed(&[
            ("open", JobChange::Gone),
            ("open", JobChange::Created),
            ("open.1", JobChange::MovedTo),
        ]);
        scene
    };
    let mut scene = rotated();
    for has_content in [true, false] {
        let plan = scene.plan(OnLost::Refuse).unwrap();
        assert_eq!(plan.puts_back(&scene.path("open")), has_content);
        let present = scene.path(if has_content { "open" } else { "open.1" });
        assert_eq!(plan.present_path(&scene.path("open")), present);
        scene.execute(&plan, &|| Ok(())).unwrap();
        let log = fs::read_to_string(scene.path("open")).unwrap();
        assert_eq!(log, "line 1\nline 2\n");
        assert!(!scene.path("open.1").exists());
        scene = rotated();
        scene.spare.clear();
    }
    // Another program has appended to it before.
    let path = scene.path("open");
    let other = Line::Other {
        path,
        created: false,
    };
    append(&scene.record(), &[other]).unwrap();
    assert_eq!(scene.lost()[0].why, Why::OthersToo);
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

#[test]
fn another_file_in_place_of_an_open_one_is_refused() {
    for (is_appended, is_stopped) in [(true, false), (false, false), (true, true), (false, true)] {
        let mut scene = begun();
        if !is_appended {
            let path = scene.path("open");
            let content = scene.spare.remove(&path).unwrap();
            scene.content_of("open", content);
        }
        fs::write(scene.path("older"), "from before").unwrap();
        scene.changed(&[]);
        if is_stopped {
            let reason = "nobody watches".to_owned();
            let stopped = Line::Stopped {
                id: super::scene::IMAGE,
                at_ns: 0,
            };
            append(&scene.record(), &[Line::Gap { reason }, stopped]).unwrap();
        }
        fs::rename(scene.path("older"), scene.path("open")).unwrap();
        let case = format!("{is_appended} {is_stopped}");
        if is_appended {
            // The list of open files refuses it.
            let plan = scene.plan(OnLost::Refuse).unwrap();
            assert!(!plan.puts_back(&scene.path("open")), "{case}");
        } else {
            let why = scene.lost()[0].why;
            assert!(matches!(why, Why::Replaced | Why::Unknown), "{case}");
        }
    }
}

#[test]
fn an_older_file_moved_in_after_the_end_is_by_others() {
    let mut scene = Scene::new(&[("open", "then"), ("older", "from before")]);
    scene.snapshot();
    let open = scene.path("open");
    scene.set.files.get_mut(&open).unwrap().writer = Writer::Open;
    // The end of the job closes the file.
    scene.changed(&[("open", JobChange::Changed)]);
    scene.ended_ns = Some(scene.set.frozen_ns);
    scene.pass_a_tick();
    fs::rename(scene.path("older"), &open).unwrap();
    let lost = scene.lost();
    let lost = lost.iter().find(|lost| lost.path == open);
    assert_eq!(lost.map(|lost| lost.why), Some(Why::OthersToo));
}

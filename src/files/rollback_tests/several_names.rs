//! Rollbacks of files with several names (hard links).

use std::fs;

use super::super::file_set::Content;
use super::super::lost::OnLost;
use super::super::patterns::Patterns;
use super::super::record_line::{JobChange, Line, append};
use super::scene::Scene;

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
fn a_name_that_is_not_restored_gives_no_content_to_others() {
    let names = ["one", "two"];
    let restored = |scene: &Scene, excluded: &Patterns| {
        let plan = scene.plan_without(excluded, OnLost::Refuse).unwrap();
        scene.execute(&plan, &|| Ok(())).unwrap();
        names.map(|name| fs::read_to_string(scene.path(name)).unwrap())
    };
    let begun = || {
        let mut scene = Scene::new(&[("one", "then")]);
        fs::hard_link(scene.path("one"), scene.path("two")).unwrap();
        scene.snapshot();
        fs::remove_file(scene.path("one")).unwrap();
        scene
    };
    // Another program replaces the second name.
    let scene = begun();
    fs::write(scene.path("new"), "edited").unwrap();
    fs::rename(scene.path("new"), scene.path("two")).unwrap();
    let (path, created) = (scene.path("two"), true);
    append(&scene.record(), &[Line::Other { path, created }]).unwrap();
    scene.changed(&[("one", JobChange::Gone)]);
    assert_eq!(restored(&scene, &Patterns::default()), ["then", "edited"]);
    // The job changes the second name, and the settings exclude it now.
    let scene = begun();
    fs::write(scene.path("two"), "changed").unwrap();
    scene.changed(&[("one", JobChange::Gone), ("two", JobChange::Changed)]);
    let excluded = Patterns::new(&["two".to_owned()], &scene.path("")).unwrap();
    assert_eq!(restored(&scene, &excluded), ["then", "changed"]);
    // Another program changes the file. An uninterrupted job would see that by both names.
    let scene = begun();
    fs::write(scene.path("two"), "edited").unwrap();
    let (path, created) = (scene.path("two"), false);
    append(&scene.record(), &[Line::Other { path, created }]).unwrap();
    scene.changed(&[("one", JobChange::Gone)]);
    assert_eq!(restored(&scene, &Patterns::default()), ["edited"; 2]);
    // The job appends to the file. What it has appended is cut off after the rollback of files.
    let mut scene = begun();
    fs::write(scene.path("two"), "then more").unwrap();
    scene.content_of("two", Content::Appended);
    scene.changed(&[("one", JobChange::Gone), ("two", JobChange::Changed)]);
    assert_eq!(restored(&scene, &Patterns::default()), ["then more"; 2]);
    let rotated = scene.path("two.1");
    fs::rename(scene.path("two"), &rotated).unwrap();
    fs::remove_file(scene.path("one")).unwrap();
    scene.changed(&[("two", JobChange::Gone), ("two.1", JobChange::Created)]);
    assert_eq!(restored(&scene, &Patterns::default()), ["then more"; 2]);
    assert!(!rotated.exists());
}

/// Set and record are from before a reboot. The file system has another device number now.
#[test]
fn a_device_number_does_not_tell_files_apart() {
    let mut scene = Scene::new(&[("one", "then"), ("single", "then")]);
    fs::hard_link(scene.path("one"), scene.path("two")).unwrap();
    scene.snapshot();
    let tree = scene.tree();
    for file in scene.set.files.values_mut() {
        file.identity.0 += 1;
    }
    fs::remove_file(scene.path("two")).unwrap();
    fs::write(scene.path("single"), "changed by a name that is gone").unwrap();
    let id = scene.set.files[&scene.path("single")].id();
    append(&scene.record(), &[Line::File { id }]).unwrap();
    scene.changed(&[("two", JobChange::Gone)]);
    let plan = scene.plan(OnLost::Refuse).unwrap();
    scene.execute(&plan, &|| Ok(())).unwrap();
    assert_eq!(scene.tree(), tree);
}

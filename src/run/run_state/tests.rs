//! Tests of the images that a run continues from, and of its file.

use super::*;

const RUN: u64 = 7;

fn id(number: u64) -> ImageId {
    ImageId::new(number).unwrap()
}

/// Returns images of the run with these numbers.
fn images(numbers: std::ops::RangeInclusive<u64>) -> Vec<ImageEntry> {
    let image = |number| ImageEntry {
        id: id(number),
        created_unix_ms: 0,
        raw_bytes: 0,
        stored_bytes: 0,
        meta: format!("{{\"run\": {RUN}}}").into_bytes(),
        damaged: None,
        pinned: None,
    };
    numbers.map(image).collect()
}

fn state() -> RunState {
    RunState::new(vec!["job".into()].into(), PathBuf::from("/"), RUN)
}

/// Returns the numbers of those `images` that the run continues from.
fn line(state: &RunState, images: &[ImageEntry]) -> Vec<u64> {
    let ours = images.iter().filter(|image| state.goes_on_from(image));
    ours.map(|image| image.id.number()).collect()
}

#[test]
fn second_return_revives_no_abandoned_image() {
    let mut state = state();
    state.go_back(id(1), &images(1..=7)).unwrap();
    assert_eq!(line(&state, &images(1..=9)), [1, 8, 9]);
    state.go_back(id(8), &images(1..=9)).unwrap();
    assert_eq!(line(&state, &images(1..=11)), [1, 8, 10, 11]);
    state.go_back(id(8), &images(1..=11)).unwrap();
    assert_eq!(line(&state, &images(1..=11)), [1, 8]);
}

#[test]
fn returning_to_an_abandoned_image_restores_its_branch() {
    let mut state = state();
    state.go_back(id(1), &images(1..=7)).unwrap();
    state.go_back(id(5), &images(1..=10)).unwrap();
    assert_eq!(line(&state, &images(1..=11)), [1, 2, 3, 4, 5, 11]);
    state.go_back(id(9), &images(1..=12)).unwrap();
    assert_eq!(line(&state, &images(1..=13)), [1, 8, 9, 13]);
    state.go_back(id(11), &images(1..=13)).unwrap();
    assert_eq!(line(&state, &images(1..=13)), [1, 2, 3, 4, 5, 11]);
}

#[test]
fn a_restore_of_an_older_image_abandons_the_newer_ones() {
    let mut state = state();
    assert!(!state.abandon_newer(id(2), &images(1..=2)));
    assert!(state.abandon_newer(id(1), &images(1..=3)));
    assert_eq!(line(&state, &images(1..=3)), [1]);
    assert!(!state.abandon_newer(id(1), &images(1..=3)));
    assert_eq!(line(&state, &images(1..=5)), [1, 4, 5]);
    let mut unreadable = images(1..=5);
    unreadable[4].meta.clear();
    unreadable[4].damaged = Some("cannot read the manifest".to_owned());
    assert!(state.abandon_newer(id(4), &unreadable));
    assert_eq!(line(&state, &images(1..=6)), [1, 4, 6]);
}

#[test]
fn a_return_whose_image_did_not_run_is_reverted() {
    let mut state = state();
    state.go_back(id(1), &images(1..=2)).unwrap();
    assert!(state.abandon_newer(id(3), &images(1..=4)));
    state.revert_return();
    assert_eq!(line(&state, &images(1..=4)), [1, 3, 4]);
}

#[test]
fn images_skipped_by_older_versions_are_abandoned() {
    let folder = tempfile::tempdir().unwrap();
    let mut text = serde_json::to_value(state()).unwrap();
    text["came_from"] = serde_json::json!(id(1));
    fs::write(folder.path().join(FILE), text.to_string()).unwrap();
    let mut state = RunState::load(folder.path()).unwrap().unwrap();
    state.abandon_passed_over(&images(1..=3));
    assert_eq!(line(&state, &images(1..=4)), [1, 4]);
}

#[test]
fn unreadable_older_image_is_not_part_of_a_new_run() {
    let unreadable = |number| ImageEntry {
        meta: Vec::new(),
        damaged: Some("torn".to_owned()),
        ..images(number..=number).remove(0)
    };
    let mut state = state();
    state.begin_attempt(RUN, &images(1..=3));
    assert_eq!(state.newest_of_others(), Some(id(3)));
    for (number, may) in [(3, false), (4, true)] {
        let image = unreadable(number);
        assert_eq!(
            (state.may_have(&image), state.may_go_on_from(&image)),
            (may, may)
        );
    }
}

#[test]
fn numbers_of_removed_abandoned_images_are_remembered() {
    let mut state = state();
    assert_eq!(state.newest_abandoned(), None);
    state.go_back(id(1), &images(1..=7)).unwrap();
    // Damaged images were removed.
    state.go_back(id(1), &images(1..=3)).unwrap();
    assert_eq!(state.newest_abandoned(), Some(id(7)));
    assert_eq!(line(&state, &images(1..=8)), [1, 8]);
}

#[test]
fn old_formats_are_read_and_the_present_one_round_trips() {
    let folder = tempfile::tempdir().unwrap();
    let mut text = serde_json::to_value(state()).unwrap();
    text["abandoned"] = serde_json::json!({"after": id(1), "through": id(7)});
    fs::write(folder.path().join(FILE), text.to_string()).unwrap();
    let mut state = RunState::load(folder.path()).unwrap().unwrap();
    assert_eq!(line(&state, &images(1..=8)), [1, 8]);
    state.go_back(id(8), &images(1..=9)).unwrap();
    state.save(folder.path()).unwrap();
    assert_eq!(RunState::load(folder.path()).unwrap(), Some(state));
}

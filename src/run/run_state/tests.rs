//! Tests of which images a run goes on from, and of its file.

use super::*;

const RUN: u64 = 7;

fn id(number: u64) -> ImageId {
    ImageId::new(number).unwrap()
}

/// The run's images of these numbers.
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
    RunState::new(vec!["job".to_owned()], PathBuf::from("/"), RUN)
}

/// The numbers that the run goes on from, of `images`.
fn line(state: &RunState, images: &[ImageEntry]) -> Vec<u64> {
    let ours = images.iter().filter(|image| state.goes_on_from(image));
    ours.map(|image| image.id.number()).collect()
}

#[test]
fn a_run_that_goes_back_twice_revives_nothing_that_it_gave_up_first() {
    let mut state = state();
    state.go_back(id(1), &images(1..=7)).unwrap();
    assert_eq!(line(&state, &images(1..=9)), [1, 8, 9]);
    state.go_back(id(8), &images(1..=9)).unwrap();
    assert_eq!(line(&state, &images(1..=11)), [1, 8, 10, 11]);
    state.go_back(id(8), &images(1..=11)).unwrap();
    assert_eq!(line(&state, &images(1..=11)), [1, 8]);
}

#[test]
fn an_image_that_was_given_up_is_gone_back_to_with_what_it_came_of() {
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
fn images_that_were_passed_over_are_left_behind_once_there_is_a_new_one() {
    let mut state = state();
    state.came_back(id(2), &images(1..=2));
    assert!(!state.leaves_behind(id(3)));
    state.came_back(id(1), &images(1..=3));
    assert_eq!(line(&state, &images(1..=3)), [1, 2, 3]);
    assert!(state.leaves_behind(id(4)));
    assert!(!state.leaves_behind(id(5)));
    assert_eq!(line(&state, &images(1..=5)), [1, 4, 5]);
    let mut unreadable = images(1..=5);
    unreadable[4].meta.clear();
    unreadable[4].damaged = Some("cannot read the manifest".to_owned());
    state.came_back(id(4), &unreadable);
    assert!(state.leaves_behind(id(6)));
    assert_eq!(line(&state, &images(1..=6)), [1, 4, 6]);
}

#[test]
fn an_image_that_cannot_be_read_is_not_of_a_run_that_began_after_it() {
    let unreadable = |number| ImageEntry {
        meta: Vec::new(),
        damaged: Some("torn".to_owned()),
        ..images(number..=number).remove(0)
    };
    let mut state = state();
    state.begin_life(RUN, &images(1..=3));
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
fn numbers_of_images_that_were_given_up_are_remembered_when_these_are_gone() {
    let mut state = state();
    assert_eq!(state.newest_abandoned(), None);
    state.go_back(id(1), &images(1..=7)).unwrap();
    // Damaged ones were removed.
    state.go_back(id(1), &images(1..=3)).unwrap();
    assert_eq!(state.newest_abandoned(), Some(id(7)));
    assert_eq!(line(&state, &images(1..=8)), [1, 8]);
}

#[test]
fn what_older_versions_wrote_is_read_and_what_is_written_comes_back() {
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

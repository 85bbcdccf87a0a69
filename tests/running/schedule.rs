//! Snapshots by the clock, and how many of them stay.

use std::fs;

use super::UNTIL_GO;
use super::common::{Place, can_run, wait_until};

#[test]
fn an_interval_takes_snapshots_and_only_the_newest_stay() {
    if !can_run() {
        return;
    }
    let place = Place::new();
    let mut run = place.start_python(&["--interval", "1", "--keep-last", "2"], UNTIL_GO);
    wait_until("the fourth image and two in all", || {
        let images = place.images();
        images.len() == 2 && images[1]["id"].as_str().is_some_and(|id| id >= "000004")
    });
    assert!(
        place
            .images()
            .iter()
            .all(|image| image["trigger"] == "schedule")
    );
    fs::write(place.file("go"), "").unwrap();
    assert_eq!(run.wait(), 0, "{}", place.text("err"));
}

#[test]
fn a_cron_expression_takes_snapshots() {
    if !can_run() {
        return;
    }
    let place = Place::new();
    let mut run = place.start_python(&["--cron", "* * * * * *"], UNTIL_GO);
    wait_until("two images", || place.images().len() >= 2);
    assert_eq!(place.images()[0]["trigger"], "schedule");
    fs::write(place.file("go"), "").unwrap();
    assert_eq!(run.wait(), 0, "{}", place.text("err"));
}

use super::super::story::tests::{log, opened, snapshot};
use super::*;
use crate::history::Event;

const HOSTILE: &str =
    r#"</title></code><script>alert(1)</script><img src=x onerror="alert(2)">&'"`javascript:"#;

fn hostile() -> Story {
    let hostile = || HOSTILE.to_owned();
    let machine = Machine {
        host: hostile(),
        kernel: hostile(),
        criu: hostile(),
        driver: Some(hostile()),
        gpus: vec![hostile()],
    };
    let mut bad = snapshot(2);
    if let Event::Snapshot {
        image,
        trigger,
        phases,
        ..
    } = &mut bad
    {
        (*image, *trigger) = (hostile(), hostile());
        phases[0].name = hostile();
    }
    let failed = |kind: &str| Event::SnapshotFailed {
        kind: kind.to_owned(),
        reason: hostile(),
        job_goes_on: true,
    };
    let crashed = Event::Crashed {
        code: 1,
        how: hostile(),
        lost_seconds: f64::MAX,
    };
    let ended = Event::Ended {
        how: hostile(),
        code: 1,
    };
    let events = [
        (0.0, opened(&["python", HOSTILE, "\u{202e}\u{0}"])),
        (1.0, bad),
        (2.0, failed(HOSTILE)),
        (3.0, crashed),
        (4.0, ended),
    ];
    Story::of(log(&events), Some(machine)).unwrap()
}

#[test]
fn no_string_of_the_jobs_becomes_markup() {
    let text = page(&hostile());
    assert!(
        !text.contains("<script") && !text.contains("<img"),
        "{text}"
    );
    assert_eq!(text.matches("</title></code>").count(), 0);
    assert!(text.matches("&lt;script&gt;").count() >= 10, "it is shown");
    assert!(!text.contains('\u{202e}') && !text.contains('\u{0}'));
    for tag in text
        .split('<')
        .skip(1)
        .map(|rest| rest.split('>').next().unwrap())
    {
        assert!(
            !tag.contains("onerror=\"") && !tag.starts_with("img"),
            "{tag}"
        );
    }
}

#[test]
fn the_page_asks_for_nothing_from_anywhere() {
    let text = page(&hostile()).replace(&HOSTILE.replace('<', "&lt;"), "");
    assert!(text.contains("default-src 'none'"));
    for word in ["http://", "https://", "@import", "url(", "<link", "src=\""] {
        assert!(!text.contains(word), "{word}");
    }
}

#[test]
fn numbers_are_numbers_whatever_the_log_says() {
    let text = page(&hostile());
    assert!(!text.contains("NaN") && !text.contains("inf"), "{text}");
}

#[test]
fn a_run_without_snapshots_is_a_page_too() {
    let story = Story::of(log(&[(0.0, opened(&["train"]))]), None).unwrap();
    let text = page(&story);
    assert!(
        text.contains("none yet") && text.contains("0 of 0"),
        "{text}"
    );
    assert!(text.contains("No image tells of the machine."));
}

#[test]
fn the_headline_tells_what_the_run_comes_to() {
    let mut story = Story::of(log(&[(0.0, opened(&["train"])), (9.0, snapshot(1))]), None).unwrap();
    story.summary.freeze_seconds = 0.9;
    story.summary.run_seconds = 90.0;
    let text = page(&story);
    for part in [
        "1 min 30 s",
        "0.90 s",
        "1.0 % of the time",
        "ckpt-run: train",
        "1.2.3",
    ] {
        assert!(text.contains(part), "{part}");
    }
}

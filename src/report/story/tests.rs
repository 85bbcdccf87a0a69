use super::*;

const RUN: u64 = 1_795_600_800_000;

/// Makes lines of a log from the seconds since its beginning and the event.
pub(in crate::report) fn log(events: &[(f64, Event)]) -> Vec<Entry> {
    let entry = |(seconds, event): &(f64, Event)| Entry {
        time: Timestamp::from_millisecond(1_795_600_800_000).unwrap()
            + jiff::SignedDuration::from_secs_f64(*seconds),
        elapsed: *seconds,
        run: RUN,
        event: event.clone(),
    };
    events.iter().map(entry).collect()
}

pub(in crate::report) fn opened(command: &[&str]) -> Event {
    Event::Opened {
        version: "1.2.3".to_owned(),
        pid: 1,
        command: command.iter().map(|&word| word.to_owned()).collect(),
    }
}

pub(in crate::report) fn snapshot(number: u32) -> Event {
    let phase = |name: &str, seconds| Phase {
        name: name.to_owned(),
        seconds,
    };
    Event::Snapshot {
        image: format!("{number:06}"),
        trigger: "schedule".to_owned(),
        freeze_seconds: 0.4,
        durable_seconds: 2.0,
        raw_bytes: 8 << 30,
        stored_bytes: 1 << 30,
        phases: vec![phase("dump", 0.4), phase("write", 1.6)],
    }
}

fn crashed() -> Event {
    Event::Crashed {
        code: 139,
        how: "SIGSEGV".to_owned(),
        lost_seconds: 50.0,
    }
}

fn restored() -> Event {
    Event::Restored {
        image: "000001".to_owned(),
        seconds: 3.0,
        phases: Vec::new(),
    }
}

fn kinds(story: &Story) -> Vec<(f64, f64, SpanKind)> {
    let spans = story.spans.iter();
    spans.map(|span| (span.from, span.to, span.kind)).collect()
}

#[test]
fn crash_and_restore_are_placed_on_the_axis() {
    let story = Story::of(
        log(&[
            (0.0, opened(&["train"])),
            (1.0, Event::Started { pid: Some(7) }),
            (100.0, snapshot(1)),
            (150.0, crashed()),
            (154.0, restored()),
            (
                200.0,
                Event::Ended {
                    how: "finished".to_owned(),
                    code: 0,
                },
            ),
        ]),
        None,
    )
    .unwrap();
    let expected = [
        (1.0, 150.0, SpanKind::Computing),
        (150.0, 154.0, SpanKind::Down),
        (154.0, 200.0, SpanKind::Computing),
    ];
    assert_eq!(kinds(&story), expected);
    let marks: Vec<_> = story.marks.iter().map(|mark| mark.kind).collect();
    assert_eq!(
        marks,
        [MarkKind::Snapshot, MarkKind::Crash, MarkKind::Restore]
    );
    assert_eq!(story.ended, Some(("finished".to_owned(), 0)));
    assert_eq!((story.summary.survived, story.rows[0].what), (1, "ended"));
    assert!((story.seconds - 200.0).abs() < 0.01);
}

#[test]
fn time_after_a_killed_supervisor_is_down() {
    let story = Story::of(
        log(&[
            (0.0, opened(&["train"])),
            (1.0, Event::Started { pid: None }),
            (100.0, snapshot(1)),
            (500.0, opened(&["train"])),
            (505.0, restored()),
        ]),
        None,
    )
    .unwrap();
    assert_eq!(kinds(&story)[1], (500.0, 505.0, SpanKind::Down));
    assert_eq!((story.marks[1].kind, story.ended), (MarkKind::Crash, None));
}

#[test]
fn only_the_newest_run_is_shown_and_it_is_bounded() {
    let mut entries = log(&[(0.0, opened(&["old"])), (1.0, snapshot(9))]);
    for entry in &mut entries {
        entry.run = 1;
    }
    entries.extend(log(&[(10.0, opened(&["new"]))]));
    entries
        .extend((1..=5000).flat_map(|number| log(&[(10.0 + f64::from(number), snapshot(number))])));
    let story = Story::of(entries, None).unwrap();
    assert_eq!(story.command, ["new"]);
    assert_eq!(story.snapshots.len(), SNAPSHOTS_MAX);
    assert_eq!(story.snapshots.last().unwrap().image, "005000");
    assert_eq!(
        (story.rows.len(), story.left_out),
        (ROWS_MAX, 5001 - ROWS_MAX)
    );
    assert_eq!(story.marks.len(), MARKS_MAX);
    assert_eq!(story.summary.snapshots, 5000);
    assert!(Story::of([], None).is_none());
}

#[test]
fn a_clock_that_is_set_back_moves_nothing_back() {
    let story = Story::of(
        log(&[
            (100.0, opened(&["train"])),
            (101.0, Event::Started { pid: None }),
            (50.0, snapshot(1)),
            (60.0, crashed()),
        ]),
        None,
    )
    .unwrap();
    assert!(
        story
            .spans
            .iter()
            .all(|span| span.from <= span.to && span.from >= 0.0)
    );
    assert!(
        story
            .marks
            .iter()
            .all(|mark| mark.at >= 0.0 && mark.at <= story.seconds)
    );
}

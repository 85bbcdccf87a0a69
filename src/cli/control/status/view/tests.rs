use ratatui::buffer::Buffer;

use super::*;
use crate::history::Summary;
use crate::store::Usage;

fn at(second: i64) -> Timestamp {
    Timestamp::from_second(1_790_000_000 + second).unwrap()
}

fn entry(second: i64, event: Event) -> Entry {
    Entry {
        time: at(second),
        elapsed: 0.0,
        run: 1,
        event,
    }
}

fn snapshot(image: &str, freeze_seconds: f64, raw_bytes: u64) -> Event {
    Event::Snapshot {
        image: image.to_owned(),
        trigger: "schedule".to_owned(),
        freeze_seconds,
        durable_seconds: 3.0,
        raw_bytes,
        stored_bytes: 1,
        phases: vec![],
    }
}

/// Returns a run of an hour with three snapshots, a crash and a restore.
fn view() -> View {
    let opened = Event::Opened {
        version: "0.1.0".to_owned(),
        pid: 7,
        command: vec![],
    };
    let crashed = Event::Crashed {
        code: 139,
        how: "SIGSEGV".to_owned(),
        lost_seconds: 60.0,
    };
    let restored = Event::Restored {
        image: "000002".to_owned(),
        seconds: 3.0,
        phases: vec![],
    };
    let status = Status {
        state: State::Running,
        since_seconds: Some(800.0),
        restored_seconds: Some(890.0),
        restored_image: Some("000002".to_owned()),
        run: Some(1),
        command: vec!["python".to_owned(), "train.py".to_owned()],
        next_snapshot_seconds: Some(300.0),
        work_at_risk_seconds: Some(600.0),
        restarts_left: Some(2),
        usage: Some(Usage {
            images: 3,
            bytes: 1 << 30,
        }),
        summary: Summary {
            run_seconds: 3600.0,
            snapshots: 3,
            freeze_seconds: 2.4,
            survived: 1,
            lost_seconds: 60.0,
            saved_seconds: 1800.0,
            ..Summary::default()
        },
        ..Status::default()
    };
    View {
        status,
        events: vec![
            entry(0, opened),
            entry(1, Event::Started { pid: Some(8) }),
            entry(900, snapshot("000001", 0.8, 4 << 30)),
            entry(1800, snapshot("000002", 1.6, 8 << 30)),
            entry(2700, crashed),
            entry(2710, restored),
            entry(3000, snapshot("000003", 0.4, 2 << 30)),
        ],
        trouble: None,
        now: at(3600),
        zone: TimeZone::UTC,
        colors: true,
    }
}

fn text(buffer: &Buffer) -> String {
    let area = buffer.area;
    let line = |y| {
        let cells = (0..area.width).map(|x| buffer[(x, y)].symbol());
        cells.collect::<String>().trim_end().to_owned()
    };
    (0..area.height).map(|y| line(y) + "\n").collect()
}

#[test]
fn a_run_on_an_ordinary_terminal() {
    let expected = "\
running, up 1 h, restored 15 min ago  python train.py
snapshot in 5 min  ·  10 min at risk  ·  2 restarts left  ·  3 images, 1.0 GiB
ran 1 h: 3 snapshots (frozen 2.4 s in all, 0.07 %), survived 1 crash, lost 1 min
of work, saved 30 min
────────────────────────────────────────────────────────────────────────────────
since 09-21 14:13:20────────────────────────────────────────────────────────────
>──────────────────o───────────────────o───────────────────X─────o──────────────
o snapshot  X crash  R restored  ! failed  > started  P paused
freeze 0.40 s, longest 1.6 s───────────  size 2.0 GiB───────────────────────────
 █                                        █
 █                                        █
██                                       ██
███                                      ███
events──────────────────────────────────────────────────────────────────────────
09-21 14:13:20  ckpt-run 0.1.0 started, pid 7
09-21 14:13:21  the job started
09-21 14:28:20  snapshot 000001 (schedule), frozen 0.80 s, 4.0 GiB
09-21 14:43:20  snapshot 000002 (schedule), frozen 1.6 s, 8.0 GiB
09-21 14:58:20  the job crashed: SIGSEGV, 1 min of work lost
09-21 14:58:30  restored 000002 in 3.0 s
09-21 15:03:20  snapshot 000003 (schedule), frozen 0.40 s, 2.0 GiB



 q quits, the run continues
";
    let drawn = text(&drawn(&view(), 80, 25));
    assert_eq!(drawn, expected, "\n{drawn}");
}

#[test]
fn a_small_terminal_shows_what_matters_most() {
    let small = text(&drawn(&view(), 40, 8));
    assert!(
        small.starts_with("running, up 1 h, restored 15 min ago  py\nsnapshot in 5 min"),
        "{small}"
    );
    assert!(
        small.contains("000003") && !small.contains("timeline"),
        "{small}"
    );
    let middle = text(&drawn(&view(), 40, 12));
    assert!(middle.contains('X') && !middle.contains('█'), "{middle}");
    assert!(
        middle.lines().last().unwrap().contains("q quits"),
        "{middle}"
    );
}

#[test]
fn no_size_makes_a_panic() {
    let (known, mut unknown) = (view(), view());
    (unknown.status, unknown.events) = (Status::default(), vec![]);
    for width in (0..4).chain([12, 49, 50, 80, 300]) {
        for height in 0..30 {
            for view in [&known, &unknown] {
                drawn(view, width, height);
            }
        }
    }
}

#[test]
fn hostile_words_and_clocks_cannot_write_outside_of_their_cells() {
    let mut view = view();
    view.status.command = vec![
        "\u{1b}[2J\u{7}\r\nrm".to_owned(),
        "ｗｉｄｅ\u{200d}".repeat(50),
    ];
    view.trouble = Some("\u{1b}]0;title\u{7}".to_owned());
    let failed = Event::SnapshotFailed {
        kind: "disk".to_owned(),
        reason: "\u{1b}[31mred\nline".to_owned(),
        job_goes_on: true,
    };
    view.events.push(entry(i64::from(i32::MIN), failed));
    view.events.push(entry(10, snapshot("x", -1e300, u64::MAX)));
    view.events.push(entry(20, snapshot("x", f64::INFINITY, 0)));
    let buffer = drawn(&view, 80, 24);
    for cell in &buffer.content {
        assert!(!cell.symbol().chars().any(char::is_control), "{cell:?}");
    }
}

#[test]
fn a_supervisor_that_ended_is_shown_with_how() {
    let mut view = view();
    view.status = Status {
        state: State::Finished,
        since: Some(at(3600)),
        run: Some(1),
        ..Status::default()
    };
    let ended = Event::Ended {
        how: "finished".to_owned(),
        code: 0,
    };
    view.events.push(entry(3600, ended));
    let drawn = text(&drawn(&view, 80, 24));
    assert!(drawn.starts_with("not running: finished at "), "{drawn}");
    assert!(
        drawn.contains("ckpt-run ended: finished, exit code 0"),
        "{drawn}"
    );
}

#[test]
fn without_colours_there_are_none() {
    let mut view = view();
    let colored = |buffer: &Buffer| {
        let mut cells = buffer.content.iter();
        cells.any(|cell| cell.fg != Color::Reset || cell.bg != Color::Reset)
    };
    assert!(colored(&drawn(&view, 80, 24)));
    view.colors = false;
    assert!(!colored(&drawn(&view, 80, 24)));
}

#[test]
fn another_runs_events_are_not_on_the_timeline() {
    let mut view = view();
    for entry in &mut view.events[..3] {
        entry.run = 0;
    }
    let opened = Event::Opened {
        version: String::new(),
        pid: 1,
        command: vec![],
    };
    view.events.insert(3, entry(1000, opened));
    let run = view.run();
    assert_eq!((run.len(), run[0].time), (5, at(1000)));
    let last = view.events.last_mut().unwrap();
    last.run = 2;
    // The run was started again from the beginning; for a reader it is one run.
    assert_eq!(view.run().len(), 4);
}

#[test]
fn times_lie_on_the_line_whatever_they_are() {
    assert_eq!(column(0, 100, 80), 0);
    assert_eq!(column(100, 100, 80), 79);
    assert_eq!(column(50, 100, 80), 39);
    assert_eq!(column(-5, 100, 80), 0);
    assert_eq!(column(i64::MAX, i64::MAX, 80), 1, "no overflow");
    assert_eq!(column(7, 1, 1), 0);
}

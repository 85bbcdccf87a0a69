use std::os::unix::fs::PermissionsExt;

use jiff::Timestamp;
use proptest::prelude::*;

use super::*;
use crate::history::Event;

fn entry(run: u64, event: Event) -> Entry {
    Entry {
        time: Timestamp::from_second(1_790_000_000).unwrap(),
        elapsed: 1.5,
        run,
        event,
    }
}

fn ended(run: u64) -> Entry {
    entry(
        run,
        Event::Ended {
            how: "finished".to_owned(),
            code: 0,
        },
    )
}

fn place() -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let path = path(folder.path());
    (folder, path)
}

#[test]
fn what_is_appended_is_read_and_nobody_else_may() {
    let (_folder, path) = place();
    let log = Log::new(path.clone());
    for run in 0..3 {
        log.append(&ended(run)).unwrap();
    }
    let read: Vec<Entry> = entries(&path).collect();
    assert_eq!(read, [ended(0), ended(1), ended(2)]);
    let mode = fs::metadata(&path).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    assert_eq!(
        fs::read_to_string(&path).unwrap().lines().next().unwrap(),
        r#"{"time":"2026-09-21T14:13:20Z","elapsed":1.5,"run":0,"event":"ended","how":"finished","code":0}"#
    );
}

#[test]
fn a_full_file_becomes_the_older_one_and_both_are_read() {
    let (_folder, path) = place();
    let log = Log {
        path: path.clone(),
        bytes_max: 250,
    };
    for run in 0..5 {
        log.append(&ended(run)).unwrap();
    }
    let runs: Vec<u64> = entries(&path).map(|entry| entry.run).collect();
    assert_eq!(runs, [2, 3, 4], "the oldest are gone");
    assert!(fs::metadata(&path).unwrap().len() <= 250);
    assert_eq!(older(&path).file_name().unwrap(), "events.1.ndjson");
}

#[test]
fn a_torn_last_line_is_skipped_and_spoils_no_later_one() {
    let (_folder, path) = place();
    let log = Log::new(path.clone());
    log.append(&ended(1)).unwrap();
    let mut file = OpenOptions::new().append(true).open(&path).unwrap();
    file.write_all(br#"{"time":"2026-09-2"#).unwrap();
    assert_eq!(entries(&path).count(), 1);
    log.append(&ended(2)).unwrap();
    let runs: Vec<u64> = entries(&path).map(|entry| entry.run).collect();
    assert_eq!(runs, [1, 2]);
}

#[test]
fn events_and_fields_of_a_newer_version_are_tolerated() {
    let (_folder, path) = place();
    let text = r#"{"time":"2026-09-21T14:13:20Z","run":4,"event":"teleported","to":{"x":[1]}}
{"time":"2026-09-21T14:13:20Z","run":5,"colour":"red","event":"started","pid":7,"more":[]}
{"time":"2026-09-21T14:13:20Z","run":6,"event":"started","pid":"seven"}
"#;
    fs::write(&path, text).unwrap();
    let read: Vec<Entry> = entries(&path).collect();
    assert_eq!(read.len(), 2);
    assert_eq!((read[0].run, &read[0].event), (4, &Event::Unknown));
    assert_eq!(
        (read[1].run, &read[1].event),
        (5, &Event::Started { pid: Some(7) })
    );
}

#[test]
fn an_event_too_long_for_a_line_is_clipped() {
    let (_folder, path) = place();
    let log = Log::new(path.clone());
    let event = Event::Opened {
        version: "1".to_owned(),
        pid: 1,
        command: vec!["\u{1}é".repeat(1000); 500],
    };
    log.append(&entry(1, event)).unwrap();
    assert!(fs::metadata(&path).unwrap().len() <= LINE_BYTES_MAX as u64);
    let read: Vec<Entry> = entries(&path).collect();
    let Event::Opened { command, .. } = &read[0].event else {
        panic!("{read:?}");
    };
    assert_eq!((command.len(), command[64].as_str()), (65, "…"));
    assert!(command[0].ends_with('…'));
}

#[test]
fn a_line_too_long_to_be_ours_is_skipped() {
    let (_folder, path) = place();
    let mut text = vec![b'x'; 3 * LINE_BYTES_MAX];
    text.push(b'\n');
    text.extend(line(&ended(3)));
    fs::write(&path, text).unwrap();
    let runs: Vec<u64> = entries(&path).map(|entry| entry.run).collect();
    assert_eq!(runs, [3]);
}

#[test]
fn what_is_no_file_is_not_read_and_a_folder_in_the_way_is_an_error() {
    let (_folder, path) = place();
    nix::unistd::mkfifo(&path, nix::sys::stat::Mode::S_IRWXU).unwrap();
    assert_eq!(entries(&path).count(), 0, "and did not wait for a writer");
    fs::remove_file(&path).unwrap();
    fs::create_dir(&path).unwrap();
    let error = Log::new(path.clone()).append(&ended(1)).unwrap_err();
    assert!(matches!(error, LogError::Open { .. }), "{error:?}");
    assert_eq!(entries(&path).count(), 0);
}

#[test]
fn the_latest_entries_are_those_at_the_end() {
    let (_folder, path) = place();
    assert!(latest(&path).is_empty());
    let mut text = vec![b'x'; 300 << 10];
    text.push(b'\n');
    text.extend(line(&ended(7)));
    text.extend(line(&ended(8)));
    fs::write(&path, text).unwrap();
    assert_eq!(latest(&path), [ended(7), ended(8)]);
}

#[test]
fn a_pipe_that_nobody_reads_stops_nobody() {
    let (_folder, path) = place();
    nix::unistd::mkfifo(&path, nix::sys::stat::Mode::S_IRWXU).unwrap();
    // Its reader comes and goes with each line; what matters is that this returns.
    Log::new(path).append(&ended(1)).unwrap();
}

proptest! {
    #[test]
    fn no_content_makes_reading_panic(bytes in prop::collection::vec(any::<u8>(), 0..400), cut in 0..90_usize) {
        let (_folder, path) = place();
        let mut content = line(&ended(1));
        content.truncate(cut);
        content.extend(bytes);
        fs::write(&path, content).unwrap();
        let read = entries(&path).count();
        prop_assert!(read <= 400);
    }
}

//! Tests of the record, without a watcher.

use std::io::Write;

use super::*;

fn record(lines: &[Line]) -> Record {
    let mut record = Record::default();
    for line in lines {
        record.add(line.clone());
    }
    record
}

fn begin() -> Line {
    let boot = "boot".to_owned();
    Line::Begin { boot }
}

fn job(path: &str, change: JobChange) -> Line {
    let path = path.into();
    Line::Job { path, change }
}

#[test]
fn changes_after_an_image_are_listed() {
    let lines = [
        begin(),
        job("/w/a", JobChange::Created),
        Line::image(4),
        job("/w/b", JobChange::Changed),
        Line::Other {
            path: "/w/notes".into(),
            created: false,
        },
        Line::End,
    ];
    let record = record(&lines);
    let since = record.since(4);
    assert_eq!(since.gap(), None);
    let touched: Vec<_> = since.touched().map(|(path, _)| path).collect();
    assert_eq!(touched, [Path::new("/w/b")]);
    let touch = since.touched().next().unwrap().1;
    assert!(since.was_not_jobs(&touch));
    assert!(!since.by_job(Path::new("/w/a")) && since.by_others(Path::new("/w/notes")));
    assert!(record.since(5).gap().is_some());
}

#[test]
fn a_part_without_an_end_is_a_gap() {
    let cut = [begin(), Line::image(1)];
    let mut again = record(&cut);
    again.add(begin());
    again.add(Line::image(2));
    again.add(Line::End);
    assert!(again.since(1).gap().is_some());
    assert_eq!(again.since(2).gap(), None);
}

#[test]
fn a_watcher_that_ended_with_the_job_leaves_a_short_gap() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("record");
    append(&path, &[begin(), Line::image(1)]).unwrap();
    let mut record = Record::open(&path).unwrap();
    record.boot = clock::boot().to_owned();
    record.end_cut(None).unwrap();
    let alive_ns = clock::unix_ns();
    let again = Record::open(&path).unwrap();
    let since = again.since(1);
    assert_eq!(since.gap(), None);
    let minute = 60_000_000_000;
    let missed = [-minute, 0, minute].map(|after| since.may_miss(alive_ns + after));
    assert_eq!(missed, [false, true, false]);
    assert!(!again.watching);
}

#[test]
fn an_incomplete_last_line_is_removed_but_no_damaged_one() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("record");
    let add = |text: &[u8]| {
        let mut file = File::options().append(true).open(&path).unwrap();
        file.write_all(text).unwrap();
    };
    append(&path, &[begin(), Line::image(1)]).unwrap();
    add(b"{\"job\":{\"pa\0\0");
    let mut record = Record::open(&path).unwrap();
    record.end_last_line().unwrap();
    record.end_cut(None).unwrap();
    assert_eq!(Record::open(&path).unwrap().since(1).gap(), None);
    add(b"{\"job\":{\"pa\0\0\n");
    let record = Record::open(&path).unwrap();
    record.end_last_line().unwrap();
    assert!(Record::open(&path).unwrap().since(1).gap().is_some());
}

#[test]
fn a_boot_long_after_the_last_line_does_not_prolong_the_cut() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("record");
    append(&path, &[begin(), Line::image(1)]).unwrap();
    let alive = std::time::SystemTime::UNIX_EPOCH + std::time::Duration::from_secs(1000);
    let file = File::options().append(true).open(&path).unwrap();
    file.set_modified(alive).unwrap();
    Record::open(&path).unwrap().end_cut(None).unwrap();
    let record = Record::open(&path).unwrap();
    let misses = |seconds: i64| record.since(1).may_miss(seconds * 1_000_000_000);
    assert_eq!(
        [990, 1000, 1050, 1070].map(misses),
        [false, true, true, false]
    );
    assert_eq!(record.ended_ns(), Some(1_060_000_000_000));
}

#[test]
fn changes_until_an_end_that_was_seen_count_as_the_jobs() {
    for (late_ns, is_jobs) in [(1_000_000_000, true), (11_000_000_000, false)] {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("record");
        append(&path, &[begin(), Line::image(1)]).unwrap();
        let mut record = Record::open(&path).unwrap();
        let alive_ns = modified_ns(&path.metadata().unwrap());
        record.end_cut(Some(alive_ns + late_ns)).unwrap();
        let since = record.since(1);
        let at_ns = [alive_ns, alive_ns + late_ns];
        assert_eq!(at_ns.map(|at_ns| since.may_miss(at_ns)), [true; 2]);
        assert!(!since.may_miss(alive_ns + late_ns + 1));
        assert_eq!(
            at_ns.map(|at_ns| since.may_miss_of_job(at_ns)),
            [is_jobs; 2]
        );
    }
}

#[test]
fn a_later_time_of_the_end_stays() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("record");
    append(&path, &[begin(), Line::image(1), Line::Ended { at_ns: 9 }]).unwrap();
    let mut record = Record::open(&path).unwrap();
    record.end_cut(Some(7)).unwrap();
    assert_eq!(record.ended_ns(), Some(9));
    // The file's time is later than that of the end.
    assert!(record.since(1).may_miss_of_job(7));
}

#[test]
fn a_mark_that_comes_too_late_does_not_count() {
    let gap = Line::Gap {
        reason: "late".to_owned(),
    };
    let image = |mark| Line::Image { id: 2, mark };
    let by_supervisor = [gap.clone(), image(3), gap];
    let later = [job("/w/a", JobChange::Changed), image(2)];
    let mut record = record(&[&[begin(), Line::image(1)], &by_supervisor[..], &later].concat());
    assert!(record.since(2).gap().is_some());
    assert!(record.since(2).by_job(Path::new("/w/a")));
    record.add(image(4));
    assert!(record.since(2).gap().is_none());
}

#[test]
fn what_the_end_of_a_stopped_job_changes_is_ignored() {
    let job_changes = job("/w/a", JobChange::Changed);
    let stopped = [begin(), Line::image(1), Line::Stopped { id: 1, at_ns: 0 }];
    let ended = [job_changes.clone(), Line::Ended { at_ns: 7 }, Line::End];
    let mut record = record(&[&stopped[..], &ended[..]].concat());
    let path = Path::new("/w/a");
    let seen = |record: &Record| (record.since(1).is_stopped(), record.since(1).by_job(path));
    assert_eq!((seen(&record), record.ended_ns()), ((true, false), Some(7)));
    record.add(Line::Running);
    record.add(begin());
    assert_eq!((seen(&record), record.ended_ns()), ((false, false), None));
    record.add(job_changes);
    assert_eq!(seen(&record), (false, true));
}

#[test]
fn a_name_taken_by_a_rename_is_the_jobs_own_unless_it_existed() {
    let names = Line::Names {
        folder: "/w".into(),
        names: vec!["old".into()],
    };
    let record = record(&[
        begin(),
        names,
        job("/w/old", JobChange::MovedTo),
        job("/w/new", JobChange::MovedTo),
        job("/elsewhere/x", JobChange::MovedTo),
        job("/w/made", JobChange::Created),
        job("/w/gone", JobChange::Gone),
    ]);
    let own = |path: &str| record.touched[Path::new(path)].is_jobs_own;
    assert_eq!(
        ["/w/old", "/w/new", "/elsewhere/x", "/w/made", "/w/gone"].map(own),
        [false, true, false, true, true]
    );
}

#[test]
fn a_path_belongs_to_the_nearest_mount() {
    let record = record(&[Line::Mounts {
        watched: vec!["/".into(), "/nfs/local".into()],
        unwatched: vec!["/nfs".into()],
    }]);
    let mount = |path: &str| record.unwatched_mount(Path::new(path)).map(Path::to_owned);
    assert_eq!(mount("/nfs/a"), Some("/nfs".into()));
    assert_eq!(mount("/w/a"), None);
    assert_eq!(mount("/nfs/local/a"), None);
    assert_eq!(mount("/nfsa"), None);
}

#[test]
fn a_removed_folder_removes_its_files() {
    let record = record(&[
        begin(),
        job("/w/d", JobChange::Created),
        job("/w/d/a", JobChange::Created),
        job("/w/da", JobChange::Created),
        Line::image(1),
        job("/w/d", JobChange::FolderGone),
        Line::End,
    ]);
    let since = record.since(1);
    let touched: Vec<_> = since.touched().map(|(path, _)| path).collect();
    assert_eq!(touched, [Path::new("/w/d"), Path::new("/w/d/a")]);
}

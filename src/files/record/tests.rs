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
        Line::Image { id: 4 },
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
    let cut = [begin(), Line::Image { id: 1 }];
    let mut again = record(&cut);
    again.add(begin());
    again.add(Line::Image { id: 2 });
    again.add(Line::End);
    assert!(again.since(1).gap().is_some());
    assert_eq!(again.since(2).gap(), None);
}

#[test]
fn a_watcher_that_ended_with_the_job_leaves_a_short_gap() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("record");
    append(&path, &[begin(), Line::Image { id: 1 }]).unwrap();
    let mut record = Record::open(&path).unwrap();
    record.boot = clock::boot().to_owned();
    record.end_cut().unwrap();
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
fn a_torn_last_line_is_part_of_the_cut_and_another_one_a_gap() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("record");
    let torn = || {
        let mut file = File::options().append(true).open(&path).unwrap();
        file.write_all(b"{\"job\":{\"pa\0\0").unwrap();
    };
    append(&path, &[begin(), Line::Image { id: 1 }]).unwrap();
    torn();
    Record::open(&path).unwrap().end_cut().unwrap();
    assert_eq!(Record::open(&path).unwrap().since(1).gap(), None);
    torn();
    append(&path, &[Line::End]).unwrap();
    assert!(Record::open(&path).unwrap().since(1).gap().is_some());
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
        Line::Image { id: 1 },
        job("/w/d", JobChange::FolderGone),
        Line::End,
    ]);
    let since = record.since(1);
    let touched: Vec<_> = since.touched().map(|(path, _)| path).collect();
    assert_eq!(touched, [Path::new("/w/d"), Path::new("/w/d/a")]);
}

//! Tests of the job's files.

use super::super::changes::OpenUse;
use super::super::file_set::{Content, Kind, StreamPlace, Writer};
use super::super::lost::RollbackError;
use super::super::record_line::JobChange;
use super::super::rollback::Rollback;
use super::*;

fn open(top: &Path) -> JobFiles {
    let choice = Choice {
        include: &[],
        exclude: &[],
        shared: &[],
        on_lost: OnLost::Refuse,
        settings: "ckpt-run.toml",
    };
    JobFiles::open(
        &top.join("store"),
        &top.join("work"),
        &top.join("job"),
        choice,
    )
    .unwrap()
}

fn plan_of(files: &JobFiles, set: &KeptFiles, has_come: bool) -> Result<Rollback, RollbackError> {
    let (open, spare) = (BTreeMap::new(), BTreeMap::new());
    files.plan(&ImageFiles {
        id: 3,
        has_come,
        set,
        open: &open,
        spare: &spare,
    })
}

#[test]
fn a_complete_record_leaves_only_unwatched_files_to_inspect() {
    let place = tempfile::tempdir().unwrap();
    let top = place.path().canonicalize().unwrap();
    let path = |name: &str| top.join(name);
    for folder in ["store", "work", "job/nfs/watched"] {
        std::fs::create_dir_all(path(folder)).unwrap();
    }
    let kept = ["job/a", "job/nfs/b", "job/nfs/watched/c", "job/nfsd"];
    for name in kept {
        std::fs::write(path(name), "x").unwrap();
    }
    let mounts = Line::Mounts {
        watched: vec!["/".into(), path("job/nfs/watched")],
        unwatched: vec![path("job/nfs")],
    };
    append(&path("store").join(RECORD), &[mounts]).unwrap();
    let files = open(&top);
    let kept = kept.map(|name| (path(name), KeptFile::of(&path(name)).unwrap()));
    let set = KeptFiles {
        frozen_ns: 0,
        files: kept.into(),
    };
    let opened = ["job/d", "job/nfs/e"].map(path);
    let (appends, is_mapped) = (false, false);
    let usage = OpenUse { appends, is_mapped };
    let open: OpenUses<'_> = opened.iter().map(|path| (&**path, usage)).collect();
    let record = &locked(&files.state).record;
    let found = |gap| files.scan(record, &set, &open, i64::MAX, gap);
    let unwatched = ["job/nfs/b", "job/nfs/e"].map(path);
    assert_eq!(found(None), (unwatched.into(), None));
    let gap = Some("a gap".to_owned());
    let known = set.files.keys().chain(&opened);
    assert_eq!(found(gap.clone()), (known.cloned().collect(), gap));
}

/// Here: the folder has an older version of a file of the image, and a file that the image does not know.
#[test]
fn an_image_of_another_machine_replaces_what_is_there() {
    let place = tempfile::tempdir().unwrap();
    let top = place.path().canonicalize().unwrap();
    for folder in ["store", "work", "job"] {
        std::fs::create_dir(top.join(folder)).unwrap();
    }
    let path = |name: &str| top.join("job").join(name);
    let kept = ["changed", "missing"].map(|name| {
        std::fs::write(path(name), "as it is in the image").unwrap();
        let mut file = KeptFile::of(&path(name)).unwrap();
        if let Kind::File { content, .. } = &mut file.kind {
            let (stream, place) = (name.to_owned(), StreamPlace::Whole(0));
            *content = Content::Kept { stream, place };
        }
        (path(name), file)
    });
    let set = KeptFiles {
        frozen_ns: kept[0].1.changed_ns + 1,
        files: kept.into(),
    };
    std::fs::write(path("changed"), "older").unwrap();
    std::fs::write(path("program.py"), "deployed later").unwrap();
    std::fs::remove_file(path("missing")).unwrap();

    let files = open(&top);
    let refused = plan_of(&files, &set, false).unwrap_err().to_string();
    assert!(refused.contains("program.py"), "{refused}");
    let plan = plan_of(&files, &set, true).unwrap();
    let names = plan.put_back.iter().map(|(path, _)| path);
    assert!(names.eq([&path("changed"), &path("missing")]));
    assert!(plan.aside.is_empty());

    // From now on the job runs here, and a file without a record is not its own.
    files.begin_from(3, &set).unwrap();
    let plan = plan_of(&files, &set, true).unwrap();
    assert!(plan.put_back.is_empty() && plan.aside.is_empty());
}

/// Here: the run continues from the remote store where its files still are, so that none is restored.
#[test]
fn an_equal_file_of_another_machine_is_the_jobs() {
    let place = tempfile::tempdir().unwrap();
    let top = place.path().canonicalize().unwrap();
    for folder in ["store", "work", "job/data"] {
        std::fs::create_dir_all(top.join(folder)).unwrap();
    }
    let [data, old] = ["data", "old"].map(|name| top.join("job").join(name));
    let path = data.join("file");
    std::fs::write(&path, "x").unwrap();
    let kept = [&data, &path].map(|path| {
        let mut file = KeptFile::of(path).unwrap();
        file.writer = Writer::Job;
        if let Kind::File { content, .. } = &mut file.kind {
            let (stream, place) = ("file".to_owned(), StreamPlace::Whole(0));
            *content = Content::Kept { stream, place };
        }
        (path.clone(), file)
    });
    let set = KeptFiles {
        frozen_ns: kept[1].1.changed_ns + TICK_NS + 1,
        files: kept.into(),
    };
    let files = open(&top);
    let put_back = || {
        let plan = plan_of(&files, &set, true).unwrap();
        plan.put_back
            .into_iter()
            .map(|(path, _)| path)
            .collect::<Vec<_>>()
    };
    assert!(put_back().is_empty());
    files.begin_from(3, &set).unwrap();
    std::fs::rename(&data, &old).unwrap();
    let renamed = [
        (data.clone(), JobChange::FolderGone),
        (old, JobChange::MovedTo),
    ];
    let lines = renamed.map(|(path, change)| Line::Job { path, change });
    append(&files.record_path(), &lines).unwrap();
    assert_eq!(put_back(), [data, path]);
}

#[test]
fn changes_by_others_and_a_missing_watcher_are_noted() {
    let place = tempfile::tempdir().unwrap();
    let top = place.path().canonicalize().unwrap();
    for folder in ["store", "work", "job"] {
        std::fs::create_dir(top.join(folder)).unwrap();
    }
    let (boot, record) = (clock::boot().to_owned(), top.join("store").join(RECORD));
    let at_ns = 7;
    let lines = [
        Line::Begin { boot },
        Line::image(1),
        Line::Ended { at_ns },
        Line::End,
    ];
    append(&record, &lines).unwrap();
    let files = open(&top);
    let log = top.join("job/log");
    files.note_run(&[(log.clone(), false)]).unwrap();
    let noted = || Record::open(&record).unwrap();
    assert!(noted().since(1).by_others(&log) && noted().since(1).gap().is_none());
    for _ in 0..2 {
        files.note_missing_watcher().unwrap();
        assert_eq!(noted().since(1).gap(), Some(NO_WATCHER.to_owned()));
    }
    let text = std::fs::read_to_string(&record).unwrap();
    assert_eq!(text.matches(NO_WATCHER).count(), 1);
}

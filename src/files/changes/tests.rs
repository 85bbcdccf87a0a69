//! Tests of changes since a set.

use std::fs;

use super::super::file_set::StreamPlace;
use super::super::patterns::Patterns;
use super::super::record_line::{JobChange, Line, append};
use super::*;

/// Compares files of a job that were copied at time 1 with their state at the freeze.
fn found(open: &[(&str, bool)], later: &[Line], place: &Path) -> Vec<(String, bool)> {
    let path = |name: &str| place.join(name);
    let record = place.join("record");
    let before = ["a", "b"].map(|name| Line::Job {
        path: path(name),
        change: JobChange::Created,
    });
    append(&record, &before).unwrap();
    append(&record, &[Line::image(4)]).unwrap();
    append(&record, later).unwrap();
    let names = ["a", "b", "empty"];
    let files = names.map(|name| {
        fs::write(path(name), "x").unwrap();
        let mut file = KeptFile::of(&path(name)).unwrap();
        if let Kind::File { content, .. } = &mut file.kind
            && name != "empty"
        {
            let stream = "own".to_owned();
            *content = Content::Kept {
                stream,
                place: StreamPlace::Whole(0),
            };
        }
        (path(name), Some(file))
    });
    let mut so_far = SoFar::new(1, files.into());
    so_far.complete();
    let paths: Vec<_> = open.iter().map(|(name, _)| path(name)).collect();
    let uses = paths.iter().zip(open).map(|(path, (_, is_mapped))| {
        let is_mapped = *is_mapped;
        let appends = false;
        (&**path, OpenUse { appends, is_mapped })
    });
    let none = Patterns::new(&[], place).unwrap();
    let changed = changed_since(Look {
        record: &Record::open(&record).unwrap(),
        earlier: &Earlier::default(),
        since: 1,
        so_far: Some(&so_far),
        open: &uses.collect(),
        included: &none,
        excluded: &none,
        scanned: &BTreeSet::new(),
    });
    let about = |it: Changed| {
        let name = it.path.file_name().unwrap().to_str().unwrap().to_owned();
        (name, !it.file.unwrap().has_no_content())
    };
    changed.into_iter().map(about).collect()
}

/// Compares with an earlier set by the record in `place`, from its beginning.
fn found_since(earlier: &Earlier, open: &OpenUses<'_>, place: &Path) -> Vec<Changed> {
    let none = Patterns::new(&[], place).unwrap();
    changed_since(Look {
        record: &Record::open(&place.join("record")).unwrap(),
        earlier,
        since: 0,
        so_far: None,
        open,
        included: &none,
        excluded: &none,
        scanned: &BTreeSet::new(),
    })
}

#[test]
fn replaced_bytes_of_the_earlier_image_are_reported() {
    let place = tempfile::tempdir().unwrap();
    let path = |name: &str| place.path().join(name);
    let files = ["a", "b"].map(|name| {
        fs::write(path(name), name.repeat(5)).unwrap();
        let mut file = KeptFile::of(&path(name)).unwrap();
        if let Kind::File { content, .. } = &mut file.kind {
            let stream = "own".to_owned();
            *content = Content::Kept {
                stream,
                place: StreamPlace::Whole(0),
            };
        }
        (path(name), file)
    });
    let set = KeptFiles {
        frozen_ns: 0,
        files: files.into(),
    };
    let earlier = Earlier::new(4, Arc::new(set));
    assert_eq!(earlier.kept_bytes, 10);
    let changes = ["a", "new"].map(|name| Line::Job {
        path: path(name),
        change: JobChange::Changed,
    });
    fs::write(path("new"), "new").unwrap();
    append(&path("record"), &changes).unwrap();
    let changed = found_since(&earlier, &OpenUses::new(), place.path());
    let found = changed.iter().map(|it| (&*it.path, it.earlier_bytes));
    let expected = [(path("a"), 5), (path("new"), 0)];
    assert!(found.eq(expected.iter().map(|(path, bytes)| (&**path, *bytes))));
}

/// Neither path is on record: the first file was only opened, the second changed by another name.
#[test]
fn files_whose_folder_or_other_name_changed_are_inspected() {
    let place = tempfile::tempdir().unwrap();
    let path = |name: &str| place.path().join(name);
    fs::create_dir(path("folder")).unwrap();
    let names = ["folder/opened", "linked", "other"];
    let files = names.map(|name| {
        fs::write(path(name), "x").unwrap();
        (path(name), KeptFile::of(&path(name)).unwrap())
    });
    let id = files[1].1.id();
    let set = KeptFiles {
        frozen_ns: 0,
        files: files.into(),
    };
    fs::rename(path("folder"), path("renamed")).unwrap();
    let gone = Line::Job {
        path: path("folder"),
        change: JobChange::FolderGone,
    };
    append(&path("record"), &[gone, Line::File { id }]).unwrap();
    let found = found_since(
        &Earlier::new(4, Arc::new(set)),
        &OpenUses::new(),
        place.path(),
    );
    let found: Vec<_> = found
        .iter()
        .map(|it| (&*it.path, it.file.is_some()))
        .collect();
    let expected = [
        ("folder", false),
        ("folder/opened", false),
        ("linked", true),
    ];
    assert_eq!(found.len(), expected.len());
    for ((path, is_there), (name, expected)) in found.into_iter().zip(expected) {
        assert_eq!((path, is_there), (&*place.path().join(name), expected));
    }
}

#[test]
fn a_link_in_the_place_of_a_folder_leads_to_no_further_files() {
    let place = tempfile::tempdir().unwrap();
    let path = |name: &str| place.path().join(name);
    fs::create_dir(path("now")).unwrap();
    fs::write(path("now/file"), "x").unwrap();
    std::os::unix::fs::symlink("now", path("then")).unwrap();
    let names = ["now", "now/file", "then", "then/file"];
    let job = |name: &str| Line::Job {
        path: path(name),
        change: JobChange::Created,
    };
    append(&path("record"), &names.map(job)).unwrap();
    let found = |earlier: &Earlier| {
        let changed = found_since(earlier, &OpenUses::new(), place.path()).into_iter();
        changed.map(|it| (it.path, it.file)).collect::<Vec<_>>()
    };
    let first = found(&Earlier::default());
    let there: Vec<bool> = first.iter().map(|(_, file)| file.is_some()).collect();
    assert_eq!(there, [true, true, true, false]);
    let link = first.into_iter().nth(2).unwrap();
    let files = [(link.0, link.1.unwrap())].into();
    let set = KeptFiles {
        frozen_ns: 0,
        files,
    };
    let last = Line::Job {
        path: path("then/file"),
        change: JobChange::Changed,
    };
    fs::remove_file(path("record")).unwrap();
    append(&path("record"), &[last]).unwrap();
    let again = found(&Earlier::new(4, Arc::new(set)));
    assert_eq!(again, [(path("then/file"), None)]);
}

#[test]
fn only_pipes_that_the_job_made_are_kept() {
    let place = tempfile::tempdir().unwrap();
    let path = |name: &str| place.path().join(name);
    let changes = [("jobs", JobChange::Created), ("theirs", JobChange::Changed)];
    for name in ["jobs", "theirs"] {
        nix::unistd::mkfifo(&path(name), nix::sys::stat::Mode::S_IRWXU).unwrap();
    }
    let lines = changes.map(|(name, change)| Line::Job {
        path: path(name),
        change,
    });
    append(&path("record"), &lines).unwrap();
    let changed = found_since(&Earlier::default(), &OpenUses::new(), place.path());
    let kept = |it: &Changed| {
        (
            it.path.clone(),
            it.file.as_ref().map(|file| file.kind.clone()),
        )
    };
    let expected = [("jobs", Some(Kind::Pipe)), ("theirs", None)];
    let expected = expected.map(|(name, kind)| (path(name), kind));
    assert_eq!(changed.iter().map(kept).collect::<Vec<_>>(), expected);
}

#[test]
fn only_changes_after_the_copy_are_inspected_again() {
    let place = tempfile::tempdir().unwrap();
    let path = place.path().join("b");
    let empty = || ("empty".to_owned(), false);
    let found = |open: &[_], later: &[_]| {
        let _ = fs::remove_file(place.path().join("record"));
        found(open, later, place.path())
    };
    assert_eq!(found(&[], &[]), [empty()]);
    for line in [
        Line::Job {
            path: path.clone(),
            change: JobChange::Changed,
        },
        Line::Other {
            path: path.clone(),
            created: false,
        },
    ] {
        assert_eq!(found(&[], &[line]), [("b".to_owned(), false), empty()]);
    }
    // Writes through a mapping are not on record.
    let open = [("a", true), ("b", false)];
    let expected = [("a".to_owned(), false), ("b".to_owned(), true), empty()];
    assert_eq!(found(&open, &[]), expected);
}

/// The job has the file open by one name.
#[test]
fn the_other_name_of_a_mapped_file_is_inspected() {
    let place = tempfile::tempdir().unwrap();
    let [opened, other] = ["opened", "other"].map(|name| place.path().join(name));
    fs::write(&opened, "x").unwrap();
    fs::hard_link(&opened, &other).unwrap();
    let files = [&opened, &other].map(|path| (path.clone(), KeptFile::of(path).unwrap()));
    let set = KeptFiles {
        frozen_ns: i64::MAX,
        files: files.into(),
    };
    let earlier = Earlier::new(4, Arc::new(set));
    append(&place.path().join("record"), &[]).unwrap();
    for (appends, expected) in [(false, vec![&opened, &other]), (true, vec![&opened])] {
        let usage = OpenUse {
            appends,
            is_mapped: !appends,
        };
        let open = [(opened.as_path(), usage)].into();
        let changed = found_since(&earlier, &open, place.path());
        let paths: Vec<_> = changed.iter().map(|it| &it.path).collect();
        assert_eq!(paths, expected);
        let mut files = changed.iter().filter_map(|it| it.file.as_ref());
        assert!(files.all(|file| file.is_mapped != appends));
    }
}

#[test]
fn a_set_of_another_machine_knows_the_present_files() {
    let place = tempfile::tempdir().unwrap();
    let [one, two] = ["one", "two"].map(|name| place.path().join(name));
    fs::write(&one, "x").unwrap();
    fs::hard_link(&one, &two).unwrap();
    let mut file = KeptFile::of(&one).unwrap();
    let present = file.id();
    (file.identity, file.born_ns) = ((1, 2), 3);
    let files = [&one, &two].map(|path| (path.clone(), file.clone()));
    let mut set = KeptFiles {
        frozen_ns: 0,
        files: files.into(),
    };
    set.identify();
    append(&place.path().join("record"), &[Line::File { id: present }]).unwrap();
    let changed = found_since(
        &Earlier::new(4, Arc::new(set)),
        &OpenUses::new(),
        place.path(),
    );
    let paths: Vec<_> = changed.iter().map(|it| &it.path).collect();
    assert_eq!(paths, [&one, &two]);
}

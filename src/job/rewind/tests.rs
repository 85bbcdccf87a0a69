//! Tests of the plan for files, with real files.

use std::collections::BTreeSet;
use std::fs;

use super::*;

fn recorded(path: &Path, access: Access) -> OpenFile {
    let metadata = fs::metadata(path).unwrap();
    OpenFile {
        path: path.to_owned(),
        access,
        inode: metadata.ino(),
        size: metadata.size(),
        modified_ns: metadata.mtime() * 1_000_000_000 + metadata.mtime_nsec(),
        mode: 0o640,
        owner: (metadata.uid(), metadata.gid()),
        in_memory: false,
        sample: None,
        changed: false,
        is_locked: false,
        links: Vec::new(),
        rewrites: false,
        is_mapped: false,
    }
}

#[test]
fn a_log_that_grew_is_cut_and_its_end_is_kept_aside() {
    let folder = tempfile::tempdir().unwrap();
    let log = folder.path().join("log");
    fs::write(&log, "one\n").unwrap();
    let file = recorded(&log, Access::Write);
    fs::write(&log, "one\ntwo\n").unwrap();
    let cut = plan(&[file], &[], OtherBytes::Refuse, |path| path)
        .unwrap()
        .execute(&folder.path().join("aside"))
        .unwrap();
    assert_eq!(fs::read_to_string(&log).unwrap(), "one\n");
    assert_eq!((cut.len(), cut[0].bytes), (1, 4));
    assert_eq!(fs::read_to_string(&cut[0].kept).unwrap(), "two\n");
}

#[test]
fn a_file_with_another_owner_is_refused_and_unchanged() {
    let folder = tempfile::tempdir().unwrap();
    let state = folder.path().join("state");
    fs::write(&state, "0001").unwrap();
    let mut file = recorded(&state, Access::Update);
    let now = file.owner.0;
    file.owner.0 += 1;
    let then = file.owner.0;
    assert!(matches!(
        plan(&[file], &[], OtherBytes::Refuse, |path| path),
        Err(RewindError::Owner { then: t, now: n, .. }) if (t, n) == (then, now)
    ));
}

#[test]
fn saved_data_has_a_name_within_the_limit_and_its_holes() {
    let folder = tempfile::tempdir().unwrap();
    let log = folder.path().join("é".repeat(127));
    fs::write(&log, "abc").unwrap();
    let file = recorded(&log, Access::Write);
    let grown = File::options().write(true).open(&log).unwrap();
    grown.set_len(1 << 30).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&grown, b"end", (1 << 30) - 3).unwrap();
    let kept = plan(&[file], &[], OtherBytes::Refuse, |path| path)
        .unwrap()
        .execute(&folder.path().join("aside"))
        .unwrap();
    assert_eq!(fs::metadata(&log).unwrap().len(), 3);
    let about = fs::metadata(&kept[0].kept).unwrap();
    assert_eq!((about.len(), kept[0].bytes), ((1 << 30) - 3, (1 << 30) - 3));
    assert!(about.blocks() * 512 < 1 << 20, "{} blocks", about.blocks());
    let mut end = [0; 3];
    let kept = File::open(&kept[0].kept).unwrap();
    std::os::unix::fs::FileExt::read_exact_at(&kept, &mut end, (1 << 30) - 6).unwrap();
    assert_eq!(&end, b"end");
}

#[test]
fn a_shrunk_missing_or_replaced_file_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let (grown, bad) = (folder.path().join("grown"), folder.path().join("bad"));
    fs::write(&grown, "a").unwrap();
    fs::write(&bad, "content").unwrap();
    let files = [
        recorded(&grown, Access::Write),
        recorded(&bad, Access::Write),
    ];
    fs::write(&grown, "ab").unwrap();

    fs::write(&bad, "con").unwrap();
    assert!(matches!(
        plan(&files, &[], OtherBytes::Refuse, |path| path),
        Err(RewindError::Shrank {
            then: 7,
            now: 3,
            ..
        })
    ));
    let other = folder.path().join("other");
    fs::write(&other, "something else").unwrap();
    fs::rename(&other, &bad).unwrap();
    assert!(
        matches!(plan(&files, &[], OtherBytes::Refuse, |path| path), Err(RewindError::Replaced(path)) if path == bad)
    );
    fs::remove_file(&bad).unwrap();
    assert!(
        matches!(plan(&files, &[], OtherBytes::Refuse, |path| path), Err(RewindError::Vanished(path)) if path == bad)
    );
    assert_eq!(fs::read_to_string(&grown).unwrap(), "ab");
}

#[test]
fn a_copy_of_a_log_is_accepted_and_other_content_is_not() {
    let folder = tempfile::tempdir().unwrap();
    let (log, other) = (folder.path().join("log"), folder.path().join("other"));
    let first = "one\n".repeat(1024);
    fs::write(&log, &first).unwrap();
    let mut file = recorded(&log, Access::Write);
    file.mode = fs::metadata(&log).unwrap().mode() & 0o7777;
    file.sample = sample_at(&log, file.size).ok();
    // While the file is open, no other file gets its inode.
    let _first = File::open(&log).unwrap();
    let plan = |file: &OpenFile| {
        plan(
            std::slice::from_ref(file),
            &[],
            OtherBytes::Refuse,
            |path| path,
        )
    };
    let replace = |text: &str| {
        fs::write(&other, text).unwrap();
        fs::rename(&other, &log).unwrap();
    };

    // The file changes as in a log rotation.
    let others = "two\nthree\n".repeat(1000);
    fs::write(&log, &others).unwrap();
    assert!(
        matches!(plan(&file), Err(RewindError::OtherBytes { path, bytes: 4096 }) if path == log)
    );
    let accepted = super::plan(std::slice::from_ref(&file), &[], OtherBytes::Warn, |path| {
        path
    });
    assert_eq!(accepted.unwrap().cuts.len(), 1);
    for text in ["two\n", "on", &others] {
        replace(text);
        assert!(
            matches!(plan(&file), Err(RewindError::Replaced(path)) if path == log),
            "{text}"
        );
        assert_eq!(fs::read_to_string(&log).unwrap(), text);
    }

    replace(&(first.clone() + "two\n"));
    // An image made before samples were introduced.
    let unsampled = OpenFile {
        sample: None,
        ..file.clone()
    };
    assert!(matches!(plan(&unsampled), Err(RewindError::Replaced(_))));
    let unlike = OpenFile {
        mode: file.mode ^ 0o100,
        ..file.clone()
    };
    assert!(matches!(plan(&unlike), Err(RewindError::Replaced(_))));
    let cut = plan(&file)
        .unwrap()
        .execute(&folder.path().join("aside"))
        .unwrap();
    assert_eq!(fs::read_to_string(&log).unwrap(), first);
    assert_eq!(fs::read_to_string(&cut[0].kept).unwrap(), "two\n");
}

#[test]
fn a_short_log_with_other_bytes_and_its_copy_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let log = folder.path().join("log");
    fs::write(&log, "one\n").unwrap();
    let mut file = recorded(&log, Access::Write);
    file.mode = fs::metadata(&log).unwrap().mode() & 0o7777;
    crate::job::sample_appended(std::slice::from_mut(&mut file));
    let plan = || {
        let files = std::slice::from_ref(&file);
        plan(files, &[], OtherBytes::Refuse, |path| path).map(drop)
    };
    fs::write(&log, "two\n").unwrap();
    assert!(matches!(plan(), Err(RewindError::OtherBytes { .. })));
    let other = folder.path().join("other");
    fs::write(&other, "one\ntwo\n").unwrap();
    fs::rename(&other, &log).unwrap();
    assert!(matches!(plan(), Err(RewindError::Replaced(_))));
}

#[test]
fn an_upgraded_library_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let library = folder.path().join("lib.so");
    fs::write(&library, "v1").unwrap();
    let mut file = recorded(&library, Access::Map);
    file.modified_ns -= 1;
    assert!(
        matches!(plan(&[file], &[], OtherBytes::Refuse, |path| path), Err(RewindError::Changed { path, .. }) if path == library)
    );
}

#[test]
fn another_build_of_a_library_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let write = |path: &Path, text: &str| {
        fs::write(path, text).unwrap();
        let file = File::options().write(true).open(path).unwrap();
        // As Nix and reproducible builds do.
        file.set_modified(std::time::UNIX_EPOCH).unwrap();
    };
    let kinds = [
        ("mapped.so", "\x7fELF", Access::Map),
        ("open.so", "\x7fELF", Access::Read),
        ("data", "text", Access::Read),
    ];
    let build = |version: &str| {
        kinds.map(|(name, content, access)| {
            let path = folder.path().join(name);
            write(&path, &format!("{content} {version}"));
            recorded(&path, access)
        })
    };
    let mut files = build("v1");
    crate::job::sample_unwritten(&mut files, &BTreeSet::new());
    let judge = |file: &OpenFile| crate::job::check_unwritten(std::slice::from_ref(file));
    assert!(files.iter().all(|file| judge(file).is_ok()));
    let mut late = build("v2");
    for file in &files[..2] {
        assert!(matches!(judge(file), Err(RewindError::Replaced(path)) if path == file.path));
    }
    // What other programs write to a file that the job reads is theirs.
    judge(&files[2]).unwrap();
    // As if they were replaced right after the freeze; the first is kept with the image.
    for file in &mut late {
        file.inode ^= 1;
    }
    crate::job::sample_unwritten(&mut late, &BTreeSet::from([0]));
    assert_eq!(
        late.each_ref().map(|file| file.changed),
        [false, true, false]
    );
    assert!(matches!(judge(&late[1]), Err(RewindError::Unknown(_))));
}

#[test]
fn an_unchanged_file_needs_no_step() {
    let folder = tempfile::tempdir().unwrap();
    let log = folder.path().join("log");
    fs::write(&log, "same").unwrap();
    let file = recorded(&log, Access::Write);
    assert!(
        plan(&[file], &[], OtherBytes::Refuse, |path| path)
            .unwrap()
            .cuts
            .is_empty()
    );
}

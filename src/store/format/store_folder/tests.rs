//! Tests of opening and creating stores.

use std::os::unix::fs::PermissionsExt;

use super::*;

fn set_mode(path: &Path, mode: u32) {
    fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
}

#[test]
fn a_new_store_is_private_and_opens_again() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("deep/store");
    Store::create_or_open(&path).unwrap();
    assert_eq!(path.metadata().unwrap().mode() & 0o777, 0o700);
    let format = fs::read_to_string(path.join("format")).unwrap();
    assert_eq!(format, "ckpt-run store 2\n");
    assert_eq!(Store::create_or_open(&path).unwrap().path(), path);
    assert_eq!(Store::open(&path).unwrap().format(), FORMAT);
}

#[test]
fn store_readable_by_others_is_refused_with_a_remedy() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("it's");
    Store::create_or_open(&path).unwrap();
    set_mode(&path, 0o750);
    let text = Store::open(&path).unwrap_err().to_string();
    assert!(text.contains("mode 0750"), "{text}");
    assert!(text.ends_with(r"/it'\''s'`"), "{text}");
}

#[test]
fn a_store_of_another_user_is_refused() {
    if !nix::unistd::geteuid().is_root() {
        eprintln!("skipped: only root can give a folder away");
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("store");
    Store::create_or_open(&path).unwrap();
    std::os::unix::fs::chown(&path, Some(12345), None).unwrap();
    let error = Store::open(&path).unwrap_err();
    assert!(
        matches!(error, OpenError::Owner { owner: 12345, .. }),
        "{error}"
    );
    assert!(error.to_string().contains("`chown -R 0 /"), "{error}");
}

#[test]
fn no_store_is_made_among_other_files() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("thesis.tex"), "").unwrap();
    let error = Store::create_or_open(folder.path()).unwrap_err();
    assert!(matches!(error, OpenError::NotStore { .. }), "{error}");
    assert_eq!(folder.path().read_dir().unwrap().count(), 1);
}

#[test]
fn git_ignores_a_store_and_others_ignore_files_stay() {
    let folder = tempfile::tempdir().unwrap();
    let (store, other) = (folder.path().join("store"), folder.path().join("other"));
    Store::create_or_open(&store).unwrap();
    let ignored = fs::read_to_string(store.join(".gitignore")).unwrap();
    assert!(ignored.ends_with("\n*\n"), "{ignored}");
    fs::create_dir(&other).unwrap();
    set_mode(&other, 0o700);
    let file = other.join(".gitignore");
    fs::write(&file, "*.o\n").unwrap();
    let refused = Store::create_or_open(&other).unwrap_err();
    assert!(matches!(refused, OpenError::NotStore { .. }), "{refused}");
    assert_eq!(fs::read_to_string(&file).unwrap(), "*.o\n");
    // What a power failure can leave of ours.
    fs::write(&file, "# A store\0\0").unwrap();
    Store::create_or_open(&other).unwrap();
    assert_eq!(fs::read_to_string(&file).unwrap(), ignored);
}

#[test]
fn a_disk_that_was_just_formatted_becomes_a_store() {
    let folder = tempfile::tempdir().unwrap();
    let disk = folder.path().join("disk");
    durable::create_folder(&disk).unwrap();
    fs::create_dir(disk.join(LOST_AND_FOUND)).unwrap();
    Store::create_or_open(&disk).unwrap();
}

#[test]
fn a_creation_that_was_cut_short_is_finished() {
    let folder = tempfile::tempdir().unwrap();
    set_mode(folder.path(), 0o700);
    fs::create_dir(folder.path().join("images")).unwrap();
    fs::write(folder.path().join(".tmp-x"), "ckpt").unwrap();
    Store::create_or_open(folder.path()).unwrap();
    assert!(folder.path().join("packs").is_dir());
}

#[test]
fn store_that_lost_its_format_is_not_recreated() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("store");
    let key = |byte: u8| Key::from_bytes(&[byte; 32]);
    Store::create_or_open_with(&path, Some(&key(1))).unwrap();
    for file in [
        "images/000001.manifest",
        "images/000001.pinned",
        "packs/000001-00.pack",
    ] {
        let check = fs::read(path.join(KEY_FILE)).unwrap();
        fs::remove_file(path.join(FORMAT_FILE)).unwrap();
        fs::write(path.join(file), "").unwrap();
        for key in [None, Some(&key(1)), Some(&key(2))] {
            let created = Store::create_or_open_with(&path, key).unwrap_err();
            assert!(matches!(created, OpenError::Format { .. }), "{created}");
            assert!(created.to_string().contains("/format"), "{created}");
            let opened = Store::open_with(&path, key).unwrap_err();
            assert!(matches!(opened, OpenError::Format { .. }), "{opened}");
        }
        assert_eq!(fs::read(path.join(KEY_FILE)).unwrap(), check);
        fs::remove_file(path.join(file)).unwrap();
        // The state after an interrupted creation.
        Store::create_or_open_with(&path, Some(&key(1))).unwrap();
    }
}

#[test]
fn missing_or_damaged_store_is_reported() {
    let folder = tempfile::tempdir().unwrap();
    let missing = Store::open(&folder.path().join("none"));
    assert!(matches!(missing, Err(OpenError::Missing { .. })));
    for text in [
        "",
        "ckpt-run store \n",
        "ckpt-run store 0\n",
        "ckpt-run store 1",
        "x 1\n",
    ] {
        fs::write(folder.path().join("format"), text).unwrap();
        let damaged = Store::create_or_open(folder.path());
        assert!(matches!(damaged, Err(OpenError::Format { .. })), "{text:?}");
    }
}

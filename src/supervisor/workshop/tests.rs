//! Tests of the workshop: what it leaves behind, and what it finds.

use super::*;

#[test]
fn the_work_folder_of_a_killed_supervisor_is_removed() {
    let store = tempfile::tempdir().unwrap();
    let killed = WorkFolder::new(store.path()).unwrap();
    let left = killed.path().to_owned();
    fs::create_dir(left.join("plugins")).unwrap();
    std::mem::forget(killed);
    let next = WorkFolder::new(store.path()).unwrap();
    assert!(!left.exists());
    assert_eq!(
        fs::read_link(store.path().join("work")).unwrap(),
        next.path()
    );
    drop(next);
    assert_eq!(store.path().read_dir().unwrap().count(), 0);
}

#[test]
fn a_link_to_anything_else_loses_nothing_but_itself() {
    let place = tempfile::Builder::new()
        .prefix("other.")
        .tempdir_in(WORK_PARENT)
        .unwrap();
    let inner = place.path().join("ckpt-run.inner");
    fs::create_dir(&inner).unwrap();
    let file = tempfile::Builder::new()
        .prefix(WORK_PREFIX)
        .tempfile_in(WORK_PARENT)
        .unwrap();
    let link = tempfile::Builder::new()
        .prefix(WORK_PREFIX)
        .make_in(WORK_PARENT, |path| symlink(&inner, path))
        .unwrap();
    let gone = Path::new("/tmp/ckpt-run.none");
    let dots = Path::new("/tmp/ckpt-run.x/..");
    for target in [place.path(), &inner, file.path(), link.path(), gone, dots] {
        let store = tempfile::tempdir().unwrap();
        symlink(target, store.path().join("work")).unwrap();
        WorkFolder::new(store.path()).unwrap();
        assert!(!is_work_folder(target), "{target:?}");
    }
    assert!(inner.is_dir() && file.path().exists());
    assert!(fs::symlink_metadata(link.path()).is_ok());
}

#[test]
fn the_folder_of_plugins_is_closed_and_holds_ours_alone() {
    let store = tempfile::tempdir().unwrap();
    let folder = store.path().join(PLUGINS);
    fs::create_dir(&folder).unwrap();
    fs::write(folder.join("other.so"), "not ours").unwrap();
    fs::write(folder.join("ckpt-run.so"), "cut short").unwrap();
    renew_plugins(&folder).unwrap();
    let names: Vec<_> = folder
        .read_dir()
        .unwrap()
        .map(|entry| entry.unwrap().file_name())
        .collect();
    assert_eq!(names, ["ckpt-run.so"]);
    assert!(fs::metadata(folder.join("ckpt-run.so")).unwrap().len() > 1000);
    assert_eq!(fs::metadata(&folder).unwrap().mode() & 0o777, 0o700);
}

#[test]
fn a_damaged_copy_of_the_program_is_replaced() {
    let store = tempfile::tempdir().unwrap();
    let program = store.path().join("program");
    fs::write(&program, "the program").unwrap();
    let copy = keep_program(&program, store.path()).unwrap();
    let check = || {
        assert_eq!(keep_program(&program, store.path()).unwrap(), copy);
        assert_eq!(fs::read_to_string(&copy).unwrap(), "the program");
        let mode = fs::metadata(&copy).unwrap().mode();
        assert_eq!(mode & 0o777, 0o700);
    };
    check();
    fs::write(&copy, "the Program").unwrap();
    check();
    fs::set_permissions(&copy, fs::Permissions::from_mode(0o600)).unwrap();
    check();
}

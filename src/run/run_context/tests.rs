//! Tests of what a context puts into its store.

use super::*;

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

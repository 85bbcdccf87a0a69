//! Keys of encryption: where they come from, and what is refused.

use std::fs::{self, Permissions};
use std::os::unix::fs::{PermissionsExt, chown};

use super::*;

/// Far more than any of these commands takes.
const LIMIT: Duration = Duration::from_secs(60);

fn file(mode: u32) -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("key");
    generate_key(&path).unwrap();
    fs::set_permissions(&path, Permissions::from_mode(mode)).unwrap();
    (folder, path)
}

#[test]
fn folders_of_a_key_are_made_and_private() {
    let folder = tempfile::tempdir().unwrap();
    let made = folder.path().join("config/ckpt-run");
    generate_key(&made.join("key")).unwrap();
    for folder in [&*made, made.parent().unwrap()] {
        let mode = fs::metadata(folder).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o700);
    }
}

fn text(key: &Key) -> String {
    key.to_text().to_string()
}

#[test]
fn a_generated_key_is_private_and_is_read_again() {
    let (_folder, path) = file(0o600);
    let key = read_key(&Encryption::KeyFile(path.clone()))
        .unwrap()
        .unwrap();
    assert_eq!(text(&key), fs::read_to_string(&path).unwrap());
    let error = generate_key(&path).unwrap_err();
    assert!(matches!(error, KeyError::Exists(_)), "{error}");
    assert_eq!(text(&key), fs::read_to_string(&path).unwrap());
    let (_folder, fresh) = file(0o400);
    assert_ne!(text(&read_file(&fresh).unwrap()), text(&key));
    assert!(read_key(&Encryption::Off).unwrap().is_none());
}

#[test]
fn a_key_file_that_others_may_use_is_refused() {
    let us = nix::unistd::geteuid();
    // Root's own files may be open to their group.
    let of_group = if us.is_root() { 0o660 } else { 0o640 };
    for mode in [0o604, 0o602, 0o620, 0o610, of_group, 0o777] {
        let (_folder, path) = file(mode);
        let error = read_file(&path).unwrap_err();
        assert!(
            matches!(error, KeyError::Exposed { .. }),
            "{mode:o}: {error}"
        );
    }
    if !us.is_root() {
        eprintln!("skipped: only root can give a file away");
        return;
    }
    let (_folder, path) = file(0o640);
    read_file(&path).unwrap();
    let (_folder, path) = file(0o600);
    chown(&path, Some(12345), None).unwrap();
    let error = read_file(&path).unwrap_err();
    assert!(
        matches!(error, KeyError::Owner { owner: 12345, .. }),
        "{error}"
    );
}

#[test]
fn what_is_no_regular_file_is_refused_at_once() {
    let folder = tempfile::tempdir().unwrap();
    let fifo = folder.path().join("fifo");
    nix::unistd::mkfifo(&fifo, nix::sys::stat::Mode::S_IRUSR).unwrap();
    for path in [fifo.as_path(), folder.path(), Path::new("/dev/zero")] {
        let error = read_file(path).unwrap_err();
        assert!(matches!(error, KeyError::NotFile { .. }), "{error}");
    }
    let error = read_file(Path::new("/no/such/key")).unwrap_err();
    assert!(matches!(error, KeyError::Read { .. }), "{error}");
}

#[test]
fn a_file_that_is_no_key_says_so_without_showing_it() {
    let (_folder, path) = file(0o600);
    for content in ["", "hunter2", &"hunter2".repeat(1 << 20)] {
        fs::write(&path, content).unwrap();
        let error = read_file(&path).unwrap_err();
        assert!(matches!(error, KeyError::Invalid { .. }), "{error}");
        assert!(!format!("{error:?}").contains("hunter"), "{error:?}");
    }
}

#[test]
fn a_command_prints_the_key() {
    let (_folder, path) = file(0o600);
    let key = read_file(&path).unwrap();
    let shown = run_command(&format!("cat '{}'", path.display()), LIMIT).unwrap();
    assert_eq!(text(&shown), text(&key));
    let piped = format!("cat && printf {} | cat", text(&key).trim());
    assert_eq!(text(&run_command(&piped, LIMIT).unwrap()), text(&key));
}

#[test]
fn a_command_that_fails_prints_nothing_or_too_much_is_refused() {
    let key = Key::generate().unwrap().to_text().trim().to_owned();
    let run = |command: &str| run_command(command, LIMIT).unwrap_err();
    let error = run(&format!("echo {key}; exit 3"));
    assert!(matches!(&error, KeyError::Failed { status, .. } if status.code() == Some(3)));
    for command in ["true", "echo hunter2", &format!("echo {key}; echo {key}")] {
        let error = run(command);
        assert!(
            matches!(error, KeyError::Invalid { .. }),
            "{command}: {error}"
        );
    }
    assert!(matches!(run("exec yes"), KeyError::Failed { .. }));
}

#[test]
fn a_command_that_does_not_end_is_killed() {
    let limit = Duration::from_millis(200);
    for command in ["exec sleep 1000", "exec >&-; exec sleep 1000"] {
        let error = run_command(command, limit).unwrap_err();
        assert!(
            matches!(error, KeyError::Silent { .. }),
            "{command}: {error}"
        );
    }
}

//! Tests of the search, with small scripts instead of CRIU, and with the real one if it is installed.

use super::*;
use std::error::Error as _;

/// Writes a program through a child process. If this process wrote it, a process forked by another test at the same
/// time could inherit the descriptor, and the program's start would fail with "text file busy".
pub(crate) fn write_script(path: &Path, body: &str) -> PathBuf {
    let status = Command::new("/bin/sh")
        .args([
            "-c",
            "umask 022; mkdir -p \"${0%/*}\"; printf '#!/bin/sh\\n%s\\n' \"$1\" > \"$0\" && chmod 755 \"$0\"",
        ])
        .arg(path)
        .arg(body)
        .status()
        .unwrap();
    assert!(status.success());
    path.to_owned()
}

fn says(version: &str) -> String {
    format!("echo 'Version: {version}'")
}

/// Creates a prefix whose loader is a script that answers like CRIU and records its arguments.
fn prefix(root: &Path, version: &str) -> PathBuf {
    write_script(&root.join("usr/sbin/criu"), "exit 9");
    let lib = root.join("usr/lib/x86_64-linux-gnu");
    write_script(
        &lib.join("ld-linux-x86-64.so.2"),
        &format!("echo \"$@\" > {}/args; {}", root.display(), says(version)),
    );
    root.to_owned()
}

fn explicit(path: PathBuf) -> Search {
    Search {
        explicit: Some(path),
        prefixes: Vec::new(),
    }
}

fn version(major: u32, minor: u32, patch: u32) -> Version {
    Version {
        major,
        minor,
        patch,
    }
}

#[test]
fn explicit_program_wins_over_everything() {
    let dir = tempfile::tempdir().unwrap();
    let named = write_script(&dir.path().join("named"), &says("4.3"));
    let search = Search {
        explicit: Some(named.clone()),
        prefixes: vec![prefix(&dir.path().join("prefix"), "4.1")],
    };
    let criu = Criu::find_in(&search, vec![]).unwrap();
    assert_eq!(criu.version, version(4, 3, 0));
    assert_eq!(
        criu.argv(),
        [fs::canonicalize(named).unwrap().into_os_string()]
    );
}

#[test]
fn explicit_path_that_fails_is_never_skipped() {
    let dir = tempfile::tempdir().unwrap();
    let good = prefix(&dir.path().join("prefix"), "4.1");
    let search = Search {
        explicit: Some(dir.path().join("missing")),
        prefixes: vec![good.clone()],
    };
    let error = Criu::find_in(&search, vec![]).unwrap_err();
    assert!(matches!(error, FindError::Ask { .. }), "{error}");

    fs::create_dir(dir.path().join("empty")).unwrap();
    let search = Search {
        explicit: Some(dir.path().join("empty")),
        prefixes: vec![good],
    };
    let error = Criu::find_in(&search, vec![]).unwrap_err();
    assert!(matches!(error, FindError::NotAPrefix { .. }), "{error}");
}

#[test]
fn prefix_comes_before_path_and_starts_through_its_loader() {
    let dir = tempfile::tempdir().unwrap();
    let root = prefix(&dir.path().join("prefix"), "4.1.1");
    let bin = dir.path().join("bin");
    write_script(&bin.join("criu"), &says("4.2"));
    let search = Search {
        explicit: None,
        prefixes: vec![dir.path().join("missing"), root.clone()],
    };
    let criu = Criu::find_in(&search, vec![bin]).unwrap();
    assert_eq!(criu.version, version(4, 1, 1));
    let root = fs::canonicalize(root).unwrap();
    let lib = root.join("usr/lib/x86_64-linux-gnu");
    let told = format!(
        "--library-path {0} {1}/usr/sbin/criu --version\n",
        lib.display(),
        root.display()
    );
    assert_eq!(fs::read_to_string(root.join("args")).unwrap(), told);
    assert_eq!(criu.argv()[0], lib.join("ld-linux-x86-64.so.2"));
}

#[test]
fn broken_and_old_candidates_are_skipped_for_a_working_one() {
    let dir = tempfile::tempdir().unwrap();
    let old = dir.path().join("old");
    write_script(&old.join("criu"), &says("3.17"));
    let new = dir.path().join("new");
    write_script(&new.join("criu"), &says("4.2"));
    fs::create_dir(dir.path().join("empty")).unwrap();
    let search = Search {
        explicit: None,
        prefixes: vec![dir.path().join("empty")],
    };
    let criu = Criu::find_in(&search, vec![old, new]).unwrap();
    assert_eq!(criu.version, version(4, 2, 0));
}

#[test]
fn too_old_is_refused_with_version_and_remedy() {
    let dir = tempfile::tempdir().unwrap();
    write_script(&dir.path().join("criu"), &says("3.17.1"));
    let folders = vec![dir.path().to_owned()];
    let error = Criu::find_in(&Search::default(), folders).unwrap_err();
    assert!(matches!(error, FindError::TooOld { .. }));
    let text = error.to_string();
    assert!(
        text.contains("3.17.1") && text.contains("scripts/setup"),
        "{text}"
    );
    assert!(text.contains(&*dir.path().to_string_lossy()), "{text}");
}

#[test]
fn a_failed_search_names_its_places_and_the_remedy() {
    let dir = tempfile::tempdir().unwrap();
    let search = Search {
        explicit: None,
        prefixes: vec![dir.path().join("nowhere")],
    };
    let error = Criu::find_in(&search, vec![dir.path().join("bin")]).unwrap_err();
    let text = error.to_string();
    assert!(text.contains("/nowhere and in PATH"), "{text}");
    assert!(text.ends_with(error.remedy()), "{text}");
    assert!(error.finding().ends_with("in PATH)"), "{}", error.finding());
}

#[test]
fn relative_folders_of_path_are_ignored() {
    // The path names an existing CRIU, but its owner depends on the current folder.
    let dir = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap();
    write_script(&dir.path().join("criu"), &says("4.1"));
    let relative = PathBuf::from(dir.path().file_name().unwrap());
    assert!(
        relative.join("criu").exists(),
        "tests run in the package's folder"
    );
    let error = Criu::find_in(&Search::default(), vec!["".into(), relative]).unwrap_err();
    assert!(matches!(error, FindError::NotFound { .. }), "{error}");
}

#[test]
fn program_that_is_not_criu_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let silent = write_script(&dir.path().join("silent"), "exit 0");
    let error = Criu::find_in(&explicit(silent), vec![]).unwrap_err();
    assert!(matches!(error, FindError::NoVersion { .. }), "{error}");
    let failing = write_script(&dir.path().join("failing"), "echo 'Version: 4.1'; exit 1");
    let error = Criu::find_in(&explicit(failing), vec![]).unwrap_err();
    assert!(matches!(error, FindError::NoVersion { .. }), "{error}");
    let plain = dir.path().join("plain");
    fs::write(&plain, "not a program").unwrap();
    let error = Criu::find_in(&explicit(plain), vec![]).unwrap_err();
    let source = error.source().unwrap();
    assert!(source.to_string().contains("Permission denied"), "{source}");
}

#[test]
fn answer_longer_than_the_limit_does_not_hang() {
    let dir = tempfile::tempdir().unwrap();
    let body = "echo 'Version: 4.1'; i=0; while [ $i -lt 99999 ]; do echo noise || exit 0; i=$((i+1)); done";
    let noisy = write_script(&dir.path().join("noisy"), body);
    let error = Criu::find_in(&explicit(noisy), vec![]).unwrap_err();
    assert!(matches!(error, FindError::NoVersion { .. }), "{error}");
    assert!(error.to_string().len() < 1000, "{error}");
}

#[test]
fn silent_program_is_killed_at_the_limit() {
    let dir = tempfile::tempdir().unwrap();
    let body = "[ \"$1\" = check ] && exec sleep 1000; echo 'Version: 4.1'";
    let path = write_script(&dir.path().join("criu"), body);
    let criu = Criu::find_in(&explicit(path), vec![]).unwrap();
    let error = criu.ask("check", Duration::from_millis(1)).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::TimedOut, "{error}");
}

#[test]
fn a_failed_check_reports_crius_reason() {
    let dir = tempfile::tempdir().unwrap();
    let body = "[ \"$1\" = check ] || { echo 'Version: 4.1'; exit 0; }\n\
                echo 'Warn  (x.c:1): noise' >&2; echo 'Error (cr-check.c:9): no CAP' >&2; exit 1";
    let criu = Criu::find_in(
        &explicit(write_script(&dir.path().join("criu"), body)),
        vec![],
    );
    let error = criu.unwrap().check().unwrap_err();
    assert!(
        error
            .to_string()
            .ends_with(": Error (cr-check.c:9): no CAP"),
        "{error}"
    );
}

#[test]
fn a_command_passes_only_path() {
    let dir = tempfile::tempdir().unwrap();
    let body = format!("env > {}/env; {}", dir.path().display(), says("4.1"));
    Criu::find_in(
        &explicit(write_script(&dir.path().join("criu"), &body)),
        vec![],
    )
    .unwrap();
    let env = fs::read_to_string(dir.path().join("env")).unwrap();
    // The shell itself adds PWD, SHLVL and _.
    let own = |line: &&str| {
        !["PWD=", "SHLVL=", "_=", "OLDPWD="]
            .iter()
            .any(|n| line.starts_with(n))
    };
    let names: Vec<&str> = env
        .lines()
        .filter(own)
        .filter_map(|line| line.split('=').next())
        .collect();
    assert_eq!(names, ["PATH"]);
}

#[test]
fn empty_explicit_path_means_search() {
    assert_eq!(Search::new(Some(PathBuf::new())).explicit, None);
    let prefixes = Search::new(None).prefixes;
    assert_eq!(prefixes.last().unwrap(), Path::new(LOCAL_PREFIX));
}

#[test]
fn only_a_program_built_in_a_checkout_searches_the_checkout() {
    let beside = |program| prefix::beside(Path::new(program));
    assert_eq!(
        beside("/home/me/ckpt-run/target/release/ckpt-run"),
        [
            "/home/me/ckpt-run/.criu",
            "/home/me/ckpt-run/target/lib/ckpt-run/criu"
        ]
        .map(PathBuf::from)
    );
    assert_eq!(
        beside("/tmp/x/bin/ckpt-run"),
        [PathBuf::from("/tmp/x/lib/ckpt-run/criu")]
    );
}

#[test]
fn a_prefix_writable_by_others_is_used_only_when_named() {
    use std::os::unix::fs::PermissionsExt;
    let dir = tempfile::tempdir().unwrap();
    let root = prefix(&dir.path().join("prefix"), "4.2");
    let search = Search {
        explicit: None,
        prefixes: vec![root.clone()],
    };
    let parts = [
        "",
        "usr/sbin/criu",
        "usr/lib/x86_64-linux-gnu",
        "usr/lib/x86_64-linux-gnu/ld-linux-x86-64.so.2",
    ];
    for part in parts.map(|part| root.join(part)) {
        let set_mode = |mode| fs::set_permissions(&part, fs::Permissions::from_mode(mode)).unwrap();
        Criu::find_in(&search, vec![]).unwrap();
        set_mode(0o757);
        let error = Criu::find_in(&search, vec![]).unwrap_err();
        assert!(matches!(error, FindError::Untrusted { .. }), "{error}");
        Criu::find_in(&explicit(root.clone()), vec![]).unwrap();
        set_mode(0o755);
    }
    if nix::unistd::geteuid().is_root() {
        std::os::unix::fs::chown(root.join("usr/sbin/criu"), Some(12345), None).unwrap();
        let error = Criu::find_in(&search, vec![]).unwrap_err();
        assert!(
            error.to_string().contains("usr/sbin/criu belongs"),
            "{error}"
        );
    }
}

#[test]
fn real_criu_answers_and_is_checked() {
    let checkout = Path::new(env!("CARGO_MANIFEST_DIR")).join(".criu");
    let search = Search {
        explicit: None,
        prefixes: vec![checkout],
    };
    match Criu::find(&search) {
        Ok(criu) => {
            assert!(criu.version >= OLDEST);
            if nix::unistd::geteuid().is_root() {
                criu.check().unwrap();
            }
        }
        Err(error) => eprintln!("skipped: no CRIU on this machine: {error}"),
    }
}

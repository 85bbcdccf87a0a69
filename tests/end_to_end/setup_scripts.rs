//! The shell scripts of the repository, and those that are printed: shellcheck has nothing against them.
//! `scripts/setup` takes CRIU from a newer suite by way of the sources that the machine has. Which
//! of them it takes, and with which keys, is checked here for the formats that apt knows.

use std::fs;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::harness::{program, skip};

/// Folders that hold nothing of the repository.
const NOT_OURS: [&str; 5] = [".git", ".criu", "target", "shared", "corpus"];

/// Files below a folder that begin with the line of a shell script.
fn shell_scripts(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).unwrap().map(Result::unwrap) {
        let (path, kind) = (entry.path(), entry.file_type().unwrap());
        if kind.is_dir() {
            if !NOT_OURS.iter().any(|name| entry.file_name() == *name) {
                shell_scripts(&path, found);
            }
        } else if kind.is_file() && is_shell_script(&path) {
            found.push(path);
        }
    }
}

fn is_shell_script(path: &Path) -> bool {
    let mut first = [0; 32];
    let read = fs::File::open(path).and_then(|mut file| file.read(&mut first));
    let text = String::from_utf8_lossy(&first[..read.unwrap_or(0)]).into_owned();
    let line = text.lines().next().unwrap_or_default();
    let shell = line.rsplit(['/', ' ']).next();
    line.starts_with("#!") && matches!(shell, Some("sh" | "bash"))
}

/// Asks shellcheck about files, or about a text; `None`, said aloud, where there is none.
fn shellcheck(files: &[PathBuf], text: &[u8]) -> Option<()> {
    let mut command = Command::new("shellcheck");
    if files.is_empty() {
        command.arg("-");
    }
    let child = command
        .args(files)
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn();
    let Ok(mut child) = child else {
        skip("shell scripts are not checked: no shellcheck (scripts/setup-tests installs it)");
        return None;
    };
    child.stdin.take().unwrap().write_all(text).unwrap();
    let output = child.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{said}");
    Some(())
}

#[test]
fn shellcheck_has_nothing_against_the_scripts() {
    let mut scripts = Vec::new();
    shell_scripts(Path::new(env!("CARGO_MANIFEST_DIR")), &mut scripts);
    for name in ["scripts/setup", ".ci/run", "config/slurm.sbatch"] {
        assert!(
            scripts.iter().any(|path| path.ends_with(name)),
            "{name}: {scripts:?}"
        );
    }
    shellcheck(&scripts, b"");
}

#[test]
fn shellcheck_has_nothing_against_the_scripts_that_are_printed() {
    for scheduler in ["slurm", "slurm-preempt"] {
        let job = ["python", "train.py", "--name", "two words", "*", "it's"];
        let printed = Command::new(program())
            .args(["template", scheduler, "--"])
            .args(job)
            .output()
            .unwrap();
        assert!(printed.status.success(), "{printed:?}");
        if shellcheck(&[], &printed.stdout).is_none() {
            return;
        }
    }
}

/// What `scripts/setup` makes of apt sources: (file name, text), for a suite of a distribution.
fn derived(old: &str, new: &str, distribution: &str, sources: &[(&str, &str)]) -> String {
    let dir = tempfile::tempdir().unwrap();
    let files = sources.iter().map(|(name, text)| {
        let path = dir.path().join(name);
        fs::write(&path, text).unwrap();
        path
    });
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/scripts/setup");
    let output = Command::new("bash")
        // Its own name as $0 would make the script run.
        .args([
            "-c",
            "source \"$1\"; shift; derive_sources \"$@\"",
            "bash",
            script,
        ])
        .args([old, new, distribution])
        .args(files)
        .output()
        .unwrap();
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn suites_are_moved_and_keys_are_kept() {
    let text = "# a comment\n\
                Types: deb deb-src\n\
                URIs: http://mirror.example/debian\n\
                Suites: bookworm bookworm-updates bookworm-backports\n\
                Components: main contrib\n\
                Signed-By: /usr/share/keyrings/debian.gpg\n\
                \n\
                Types: deb\n\
                URIs: http://security.example\n\
                Suites: bookworm-security\n\
                Components: main\n";
    let expected = "Types: deb\n\
                    URIs: http://mirror.example/debian\n\
                    Suites: trixie trixie-updates\n\
                    Components: main\n\
                    Targets: Packages\n\
                    Signed-By: /usr/share/keyrings/debian.gpg\n\
                    \n\
                    Types: deb\n\
                    URIs: http://security.example\n\
                    Suites: trixie-security\n\
                    Components: main\n\
                    Targets: Packages\n\
                    \n";
    assert_eq!(
        derived("bookworm", "trixie", "debian", &[("debian.sources", text)]),
        expected
    );
}

#[test]
fn one_line_sources_become_the_same() {
    let text = "# deb http://commented.example noble main\n\
                deb [arch=amd64 signed-by=/k/a.gpg,/k/b.gpg] http://mirror.example/ubuntu noble main # tail\n\
                deb-src http://mirror.example/ubuntu noble main\n";
    let expected = "Types: deb\n\
                    URIs: http://mirror.example/ubuntu\n\
                    Suites: resolute\n\
                    Components: main universe\n\
                    Targets: Packages\n\
                    Signed-By: /k/a.gpg /k/b.gpg\n\
                    \n";
    assert_eq!(
        derived("noble", "resolute", "ubuntu", &[("sources.list", text)]),
        expected
    );
}

#[test]
fn embedded_keys_are_kept_whole() {
    let text = "Types: deb\nURIs: http://mirror.example\nSuites: noble\nComponents: main\n\
                Signed-By:\n -----BEGIN PGP PUBLIC KEY BLOCK-----\n .\n abc\n -----END PGP PUBLIC KEY BLOCK-----\n";
    let made = derived("noble", "plucky", "ubuntu", &[("ubuntu.sources", text)]);
    let key = "Signed-By: \n -----BEGIN PGP PUBLIC KEY BLOCK-----\n .\n abc\n -----END PGP PUBLIC KEY BLOCK-----\n";
    assert!(made.contains(key), "{made}");
}

#[test]
fn sources_of_others_and_disabled_ones_are_left_out() {
    let others = "deb http://tools.example bookworm stable\n\
                  deb http://database.example bookworm-pgdg main\n\
                  deb http://cloud.example cloud-bookworm main\n";
    let disabled = "Enabled: no\nTypes: deb\nURIs: http://off.example\nSuites: bookworm\nComponents: main\n\n\
                    Types: deb-src\nURIs: http://source.example\nSuites: bookworm\nComponents: main\n";
    let sources = [("others.list", others), ("disabled.sources", disabled)];
    assert_eq!(derived("bookworm", "trixie", "debian", &sources), "");
}

//! Shell scripts of the repository, and scripts that the program prints: shellcheck must not complain. `scripts/setup`
//! takes CRIU from a newer suite through the machine's package sources. The choice of sources and keys is tested here
//! for the formats that apt supports.

use std::fs;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use nix::fcntl::{FcntlArg, fcntl};

use crate::harness::{Place, apply, as_root, descendants, installed, program, skip, wait_until};

/// Folders that do not belong to the repository.
const NOT_OURS: [&str; 5] = [".git", ".criu", "target", "shared", "corpus"];

/// Collects the files below a folder that begin with a shell's interpreter line.
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

/// Runs shellcheck on files, or on a text; returns `None`, with a message, if it is not installed.
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

/// Returns the apt sources that `scripts/setup` derives for a suite of a distribution, as file name and text.
fn derived(old: &str, new: &str, distribution: &str, sources: &[(&str, &str)]) -> String {
    let dir = tempfile::tempdir().unwrap();
    let files = sources.iter().map(|(name, text)| {
        let path = dir.path().join(name);
        fs::write(&path, text).unwrap();
        path
    });
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/scripts/setup");
    let output = Command::new("bash")
        // If `$0` were its own name, the script would run.
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

/// Returns true if the process is an apt-get that waits for a lock: it does not sleep otherwise.
fn pauses(pid: i32) -> bool {
    let file = |name| fs::read_to_string(format!("/proc/{pid}/{name}")).unwrap_or_default();
    let sleeps = format!("{} ", nix::libc::SYS_clock_nanosleep);
    file("comm") == "apt-get\n" && file("syscall").starts_with(&sleeps)
}

/// Runs the scripts' apt-get on separate lists and status, while this process holds a lock of apt, until apt reports
/// the lock. Then the lock is released, and apt-get must succeed.
fn waits_for_the_lock(name: &str, words: &[&str]) {
    if !installed("apt-get") {
        return;
    }
    let place = Place::new();
    for folder in [
        "lists/partial",
        "cache/archives/partial",
        "dpkg",
        "etc/apt.conf.d",
        "etc/sources.list.d",
    ] {
        fs::create_dir_all(place.file(folder)).unwrap();
    }
    for file in ["dpkg/status", "etc/sources.list"] {
        fs::write(place.file(file), "").unwrap();
    }
    let configuration = format!(
        "Dir \"{}\";\nDir::State \"\";\nDir::State::lists \"lists\";\nDir::State::status \"dpkg/status\";\n\
         Dir::Cache \"cache\";\nDir::Etc \"etc\";\nAPT::Sandbox::User \"root\";\n",
        place.path().display()
    );
    fs::write(place.file("apt.conf"), configuration).unwrap();

    let lock = fs::File::create(place.file(name)).unwrap();
    let whole = nix::libc::flock {
        l_type: i16::try_from(nix::libc::F_WRLCK).unwrap(),
        l_whence: 0,
        l_start: 0,
        l_len: 0,
        l_pid: 0,
    };
    fcntl(&lock, FcntlArg::F_SETLK(&whole)).unwrap();
    let log = fs::File::create(place.file("said")).unwrap();
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/scripts/apt.sh");
    let mut waiting = Command::new("bash")
        .args(["-c", "source \"$1\"; shift; apt_get \"$@\"", "bash", script])
        .args(words)
        .env("APT_CONFIG", place.file("apt.conf"))
        .stdin(Stdio::null())
        .stdout(log.try_clone().unwrap())
        .stderr(log)
        .spawn()
        .unwrap();
    let pid = i32::try_from(waiting.id()).unwrap();
    wait_until("apt at the lock", || {
        place.text("said").contains("Could not get lock")
            || descendants(pid).into_iter().any(pauses)
    });
    assert!(
        waiting.try_wait().unwrap().is_none(),
        "{}",
        place.text("said")
    );
    drop(lock);
    let ended = waiting.wait().unwrap();
    assert!(ended.success(), "{}", place.text("said"));
}

#[apply(as_root)]
fn apt_is_run_again_while_another_one_has_the_lock_of_the_lists() {
    waits_for_the_lock("lists/lock", &["update"]);
}

#[apply(as_root)]
fn apt_waits_for_the_lock_of_dpkg() {
    waits_for_the_lock("dpkg/lock-frontend", &["install", "-y"]);
}

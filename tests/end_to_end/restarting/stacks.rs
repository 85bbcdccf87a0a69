//! Diagnosis of a hanging job by tools that print stacks: py-spy for Python, eu-stack for others.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use super::hangs::hang_log;
use crate::harness::{ON_REQUEST, Place, apply, as_root_and_user, installed, skip};

/// Newest py-spy at the time of writing.
const PY_SPY: &str = "py-spy==0.4.1";

/// Waits for ever in a function with a recognizable name, on a separate thread.
const STUCK_PYTHON: &str = r#"
import threading
def gather_gradients():
    print("ready", flush=True)
    threading.Event().wait()
def train_step():
    gather_gradients()
worker = threading.Thread(target=train_step, name="trainer", daemon=True)
worker.start()
worker.join()
"#;

const STUCK_C: &str = r#"
#include <unistd.h>
__attribute__((noinline)) void wait_for_the_other_rank(void) { for (;;) { pause(); __asm__ volatile(""); } }
__attribute__((noinline)) void all_reduce(void) { wait_for_the_other_rank(); __asm__ volatile(""); }
int main(void) { all_reduce(); return 0; }
"#;

/// Returns the folder of a py-spy: from the search path, or installed from `PyPI` into the target folder.
fn py_spy() -> Option<PathBuf> {
    let path = env::var_os("PATH").unwrap_or_default();
    let has = |folder: &Path| folder.join("py-spy").is_file();
    if let Some(folder) = env::split_paths(&path).find(|folder| has(folder)) {
        return Some(folder);
    }
    let installed = Path::new(env!("CARGO_TARGET_TMPDIR")).join(PY_SPY);
    if !has(&installed.join("bin")) {
        // A concurrent run of this test sees all of it or nothing.
        let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let made = folder.path().join("py-spy");
        let pip = Command::new("python3")
            .args(["-m", "pip", "install", "--quiet", "--no-input"])
            .args(["--disable-pip-version-check", "--no-deps"])
            .args(["--timeout", "10", "--retries", "1", "--target"])
            .args([made.as_os_str(), PY_SPY.as_ref()])
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .status();
        if pip.is_ok_and(|status| status.success()) {
            let _ = fs::rename(&made, &installed);
        }
    }
    let found = Some(installed.join("bin")).filter(|folder| has(folder));
    if found.is_none() {
        skip("Python stacks of a job that hangs: no py-spy, and pip cannot install it");
    }
    found
}

/// Returns the log of a job that hangs at once, with these folders first in the search path, and the job's name in it.
fn diagnosed(place: &Place, tools: &[&Path], job: &[&str]) -> (String, String) {
    let settings = "hang.output = '3s'\nhang.action = 'report'\n";
    fs::write(place.file("ckpt-run.toml"), settings).unwrap();
    let path = env::var_os("PATH").unwrap_or_default();
    let own = tools.iter().map(|tool| tool.to_path_buf());
    let path = env::join_paths(own.chain(env::split_paths(&path))).unwrap();
    let run = place.start_with(&ON_REQUEST, job, |command| {
        command.env("PATH", path);
    });
    place.wait_for("err", "the job hangs");
    (hang_log(place), run.job_named())
}

/// Returns the positions of these parts in the text, which must contain all of them.
fn places(text: &str, parts: &[&str]) -> Vec<usize> {
    let place = |part: &&str| {
        text.find(part)
            .unwrap_or_else(|| panic!("no {part}: {text}"))
    };
    parts.iter().map(place).collect()
}

#[apply(as_root_and_user)]
fn py_spy_shows_where_a_python_job_hangs() {
    let Some(tool) = py_spy() else { return };
    let place = Place::new();
    fs::write(place.file("job.py"), STUCK_PYTHON).unwrap();
    let (log, named) = diagnosed(&place, &[&tool], &["python3", "-u", "job.py"]);
    // The innermost frame first, with its line.
    let stack = [
        &format!("{named}, py-spy:"),
        "gather_gradients (job.py:5)",
        "train_step (job.py:7)",
    ];
    assert!(places(&log, &stack).is_sorted(), "{log}");
    assert!(log.contains("trainer"), "{log}");
    assert!(!log.contains("(failed"), "{log}");
}

#[apply(as_root_and_user)]
fn eu_stack_shows_where_a_job_hangs() {
    if !installed("eu-stack") {
        return;
    }
    if !installed("cc") {
        return;
    }
    let place = Place::new();
    fs::write(place.file("stuck.c"), STUCK_C).unwrap();
    let built = Command::new("cc")
        .args([
            "-g",
            "-O1",
            "-fno-optimize-sibling-calls",
            "-o",
            "stuck",
            "stuck.c",
        ])
        .current_dir(place.path())
        .status()
        .unwrap();
    assert!(built.success());
    let (log, named) = diagnosed(&place, &[], &["./stuck"]);
    let (_, stacks) = log
        .split_once(&format!("{named}, eu-stack:"))
        .unwrap_or_else(|| panic!("{log}"));
    let stack = ["pause", "wait_for_the_other_rank", "all_reduce", "main"];
    assert!(places(stacks, &stack).is_sorted(), "{log}");
    assert!(!log.contains("(failed"), "{log}");
}

//! Scripts that a test writes and executes.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use ckpt_run::criu::{Criu, Search};

/// Writes an executable file by another process. If this process had the file open for writing, a child that another
/// test starts would inherit it until its exec, and meanwhile the file could not be executed (`ETXTBSY`).
pub fn write_script(path: &Path, text: &str) {
    let mut install = Command::new("install")
        .args(["-m", "755", "/dev/stdin"])
        .arg(path)
        .stdin(Stdio::piped())
        .spawn()
        .expect("install starts");
    let mut input = install.stdin.take().expect("its input");
    input.write_all(text.as_bytes()).expect("written");
    drop(input);
    assert!(install.wait().expect("a child").success());
}

/// Returns the tested `ckpt-run`.
pub fn program() -> &'static str {
    env!("CARGO_BIN_EXE_ckpt-run")
}

/// Copies the changes of the environment from one command to another.
pub fn copy_environment(from: &Command, to: &mut Command) {
    for (name, value) in from.get_envs() {
        match value {
            Some(value) => to.env(name, value),
            None => to.env_remove(name),
        };
    }
}

/// Returns the prefix of the CRIU that `scripts/setup` has built in the checkout.
pub fn criu_prefix() -> Option<PathBuf> {
    let prefix = Path::new(env!("CARGO_MANIFEST_DIR")).join(".criu");
    prefix.exists().then_some(prefix)
}

/// Writes a substitute for CRIU: a shell script in which `CRIU` is the real one, and `HERE` the folder.
pub fn criu_script(folder: &Path, script: &str) -> PathBuf {
    let found = Criu::find(&Search::new(criu_prefix())).expect("a CRIU");
    let quoted = |word: &Path| format!("'{}'", word.to_str().expect("text"));
    let words: Vec<String> = found
        .argv()
        .iter()
        .map(|word| quoted(word.as_ref()))
        .collect();
    let script = script.replace("CRIU", &words.join(" "));
    let script = script.replace("HERE", &quoted(folder));
    let program = folder.join("criu");
    write_script(&program, &format!("#!/bin/sh\n{script}\n"));
    program
}
